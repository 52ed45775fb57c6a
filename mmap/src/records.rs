//! Records of one size in one or more files.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file::DataFile;
use crate::ranges::{Kind, Layout, Places, Ranges};
use crate::{DType, Error};

/// Options for opening [`Records`]. [`Records::options`] returns the defaults.
///
/// ```
/// use twinbuf_mmap::{Cut, DType, Records};
///
/// let folder = tempfile::tempdir()?;
/// for (name, tokens) in [("0.bin", 2049), ("1.bin", 500), ("2.bin", 0)] {
///     std::fs::write(folder.path().join(name), vec![0; tokens * 2])?;
/// }
/// let paths = twinbuf_mmap::files([folder.path()])?;
/// let options = Records::options().skip_short(true);
/// let records = options.open_headerless(&paths, DType::U16, Cut::sequence(1024))?;
/// assert_eq!((records.len(), records.skipped()), (2, &paths[1..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing until a file is opened"]
pub struct Options {
    pub(crate) header: u64,
    partial: bool,
    pub(crate) skip_short: bool,
}

impl Options {
    /// Sets the number of bytes at the start of every file that [`open`](Self::open) and
    /// [`open_headerless`](Self::open_headerless) skip: a header of a format that this crate does
    /// not know. Default: 0. The openers of known formats ignore this option.
    ///
    /// For example, the files of MNIST have 16 bytes before the pixels and 8 before the labels, as `numpy.fromfile` skips
    /// them with `offset`:
    ///
    /// ```no_run
    /// use twinbuf_mmap::{Cut, DType, Records};
    ///
    /// let images = Records::options().header(16).open(["train-images-idx3-ubyte"], 28 * 28)?;
    /// let labels = Records::options().header(8).open_headerless(["train-labels-idx1-ubyte"], DType::U8, Cut::Rows)?;
    /// assert_eq!(images.len(), labels.len());
    /// # Ok::<(), twinbuf_mmap::Error>(())
    /// ```
    pub const fn header(self, bytes: u64) -> Self {
        Self { header: bytes, ..self }
    }

    /// Sets whether a file of untyped bytes ([`open`](Self::open)) may end with an incomplete record. The crate
    /// ignores the incomplete record. Default: `false`, [`Error::Ragged`], because the usual causes are a wrong
    /// record size or a truncated file.
    pub const fn partial(self, partial: bool) -> Self {
        Self { partial, ..self }
    }

    /// Sets whether to skip files that contain less than one record, for example a last shard that is shorter than a
    /// window, or an array without rows. [`Records::skipped`] lists the skipped files. A file with an incomplete header
    /// or element is an error all the same. Default: `false`, [`Error::TooShort`]. If every file is too short, opening
    /// fails with [`Error::TooShort`].
    pub const fn skip_short(self, skip_short: bool) -> Self {
        Self { skip_short, ..self }
    }

    /// Opens files as records of `record_bytes` untyped bytes. The files in this order are the data set.
    ///
    /// On Unix, each data set keeps files open, up to a quarter of the limit on open files (`RLIMIT_NOFILE`); if
    /// needed, the call raises the soft limit toward the hard limit. The remaining files, or all if the process has no
    /// descriptor left, are reopened for each use. This costs a few microseconds per use; do not rename or replace them
    /// ([`Error::NotFound`], [`Error::Replaced`]). Several data sets of very many files can take all descriptors: raise
    /// the limit first.
    ///
    /// On Unix, each file has one read-only mapping for page hints and, on Linux, copies. The
    /// mapping takes address space, but takes no memory until pages are touched, unless the process
    /// locks all mappings (`mlockall(MCL_FUTURE)`). If the system refuses a mapping, this file gets
    /// no page hints, and reads still work. If the address space is exhausted (`RLIMIT_AS`,
    /// `vm.max_map_count`), or nearly so by the mappings of a thousand files and more, the crate releases all mappings
    /// of this data set.
    ///
    /// # Errors
    ///
    /// - [`Error::NoPaths`], [`Error::ZeroRecord`]: the list of paths is empty, or `record_bytes` is 0.
    /// - [`Error::NotFound`], [`Error::PermissionDenied`], [`Error::NotAFile`], [`Error::Open`]: a file cannot be
    ///   opened. The call refuses a FIFO and does not block on it.
    /// - [`Error::Format`]: a file is shorter than its [`header`](Self::header), or is a pointer of Git LFS.
    /// - [`Error::TooShort`]: a file, or with [`skip_short`](Self::skip_short) every file, contains less than one
    ///   record.
    /// - [`Error::Ragged`]: a file ends with an incomplete record, unless [`partial`](Self::partial) is set.
    /// - [`Error::Read`], [`Error::Truncated`]: looking for such a pointer, in a file of less than 1 KiB, fails.
    /// - [`Error::TooLarge`]: the total size is 2^64 bytes or more.
    pub fn open(
        self,
        paths: impl IntoIterator<Item: AsRef<Path>>,
        record_bytes: usize,
    ) -> Result<Records, Error> {
        if record_bytes == 0 {
            return Err(Error::ZeroRecord);
        }
        Ranges::assemble(paths, self.skip_short, |file| {
            let (len, stride) = (behind(file, self.header)?, record_bytes as u64);
            if len < stride {
                return Err(Error::TooShort { path: file.path.clone(), wanted: stride, found: len });
            }
            let records = count(file, self.header, stride, self.partial)?;
            let shape = vec![record_bytes];
            let kind = Kind { dtype: DType::U8, typed: false, shape, bytes: record_bytes, stride };
            Ok(Layout { kind, at: Places::Strided(self.header), records })
        })
        .map(|ranges| Records { ranges })
    }
}

/// Records of one size in one or more files. Record indices start at 0 and continue from each file to the next.
///
/// [`open`](Self::open) reads files as untyped bytes. [`open_headerless`](Self::open_headerless),
/// [`open_llm_c`](Self::open_llm_c), [`open_npy`](Self::open_npy), `open_npz` (feature `npz`) and `open_safetensors`
/// (feature `safetensors`) give records an element type and can cut overlapping windows ([`Cut`](crate::Cut)).
///
/// A record never spans two files. `Records` is `Send` and `Sync`: reads use explicit offsets, and
/// several threads can read at the same time.
///
/// Do not write to the files while they are open. Reading bytes that a truncation removed fails with
/// [`Error::Truncated`]. A [`Reader`](crate::Reader) fails with [`Error::Replaced`] from the epoch on in which it finds
/// that a file was written to, unless the file is shorter than it was: this is taken for a truncation, and the bytes before
/// its end are read as they are. Until then, and with [`Ranges::read`], reads of files that stay open return the present
/// content. On Unix, a file that stays open keeps its content when its name is deleted or given to another file, as
/// `mv` does. [`Options::open`] documents how many files stay open.
///
/// ```
/// use twinbuf_mmap::{Plan, Records};
///
/// let folder = tempfile::tempdir()?;
/// let paths = [folder.path().join("0.bin"), folder.path().join("1.bin")];
/// std::fs::write(&paths[0], b"aabb")?;
/// std::fs::write(&paths[1], b"ccddee")?;
///
/// let records = Records::open(&paths, 2)?;
/// assert_eq!((records.len(), records.bytes()), (5, 10));
/// assert_eq!(records.shards()[1].records(), 2..5);
///
/// let plan = Plan::builder(records.len()).batch(3).build()?;
/// let mut out = [0; 6];
/// assert_eq!(records.read(&plan.batch(0, 0).unwrap(), &mut out)?, 6);
/// assert_eq!(&out, b"aabbcc");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Records {
    pub(crate) ranges: Arc<Ranges>,
}

impl Records {
    /// Opens files as records of `record_bytes` untyped bytes, with default [`Options`].
    ///
    /// # Errors
    ///
    /// The errors of [`Options::open`].
    pub fn open(paths: impl IntoIterator<Item: AsRef<Path>>, record_bytes: usize) -> Result<Self, Error> {
        Self::options().open(paths, record_bytes)
    }

    /// Returns the default [`Options`]: `header(0)`, `partial(false)` and `skip_short(false)`.
    pub const fn options() -> Options {
        Options { header: 0, partial: false, skip_short: false }
    }

    /// Returns the files and the byte ranges of the records, for a [`Reader`](crate::Reader).
    #[must_use]
    pub fn ranges(&self) -> Arc<Ranges> {
        self.ranges.clone()
    }

    /// Returns the size of a record in bytes, at least 1. It is the product of the [`shape`](Self::shape) and the
    /// size of the [`dtype`](Ranges::dtype).
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        self.kind.bytes
    }

    /// Returns the number of elements of a record along each axis, in C order. The shape is empty if a record is one
    /// element. For untyped bytes the shape is `[record_bytes]`.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.kind.shape
    }

    /// Returns the files that [`Options::skip_short`] skipped.
    #[must_use]
    pub fn skipped(&self) -> &[PathBuf] {
        &self.ranges.skipped
    }
}

impl Deref for Records {
    type Target = Ranges;

    fn deref(&self) -> &Ranges {
        &self.ranges
    }
}

/// Returns the number of whole records or elements in a file after its header. Unless `partial` is set, they must be all
/// of it.
pub(crate) fn count(file: &DataFile, header: u64, size: u64, partial: bool) -> Result<u64, Error> {
    let len = behind(file, header)?;
    let found = len % size;
    if found > 0 && !partial {
        return Err(Error::Ragged { path: file.path.clone(), offset: file.len - found, wanted: size, found });
    }
    Ok(len / size)
}

/// Returns the number of bytes in a file after its header.
fn behind(file: &DataFile, header: u64) -> Result<u64, Error> {
    file.check_end(header, file.len).map(|()| file.len - header)
}
