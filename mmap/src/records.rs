//! Records of one size in one or several files, read by position into the caller's buffer.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file::DataFile;
use crate::ranges::{Kind, Layout, Ranges};
use crate::shard::Places;
use crate::{DType, Error};

/// How to open [`Records`]; made by [`Records::options`].
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
    partial: bool,
    skip_short: bool,
}

impl Options {
    /// Whether a file of plain bytes may end with a part of a record. That part is left unread. Default: no; the usual
    /// reasons are a wrong record size and a file that was cut off.
    pub const fn partial(mut self, partial: bool) -> Self {
        self.partial = partial;
        self
    }

    /// Whether to leave out files that do not hold one record, such as a last shard shorter than a window or an array
    /// without rows. [`Records::skipped`] lists them. Default: no.
    pub const fn skip_short(mut self, skip_short: bool) -> Self {
        self.skip_short = skip_short;
        self
    }

    /// Opens the files as records of `record_bytes` bytes. Together, in this order, they are the data set.
    ///
    /// The files stay open, as many as a quarter of the limit of open files (`RLIMIT_NOFILE`) allows; the soft limit is
    /// raised for them up to the hard one. Others are opened for each use and must not be renamed or replaced in
    /// between ([`Error::Replaced`]). Each use then costs a few microseconds more.
    ///
    /// On Unix each file has one read-only mapping. It takes address space but no memory until pages are read through
    /// it, unless the process locks all that it maps (`mlockall(MCL_FUTURE)`). If the system refuses the mapping, hints
    /// do nothing and reads work. If it has no room for one (`RLIMIT_AS`, `vm.max_map_count`), those made before are
    /// given back: the program may need that room.
    ///
    /// # Errors
    ///
    /// No path, a record of 0 bytes, a path that is missing, may not be read or is not a regular file (a
    /// FIFO is refused and not waited for), a file shorter than one record, and one that ends with a part of a record,
    /// unless the options allow these two. See [`Error`]; each names the path.
    pub fn open<P: AsRef<Path>>(
        self,
        paths: impl IntoIterator<Item = P>,
        record_bytes: usize,
    ) -> Result<Records, Error> {
        if record_bytes == 0 {
            return Err(Error::ZeroRecord);
        }
        Records::assemble(self, paths, |file| {
            let records = count(&file.path, file.len, record_bytes as u64, self.partial)?;
            let stride = record_bytes as u64;
            let shape = vec![record_bytes];
            let kind = Kind { dtype: DType::U8, typed: false, shape, bytes: record_bytes, stride };
            Ok(Layout { kind, at: Places::Strided(0), records })
        })
    }
}

/// Records of one size in one or several files, numbered through from the first file on.
///
/// [`open`](Self::open) takes files without headers as records of plain bytes;
/// [`open_headerless`](Self::open_headerless), [`open_llm_c`](Self::open_llm_c), [`open_npy`](Self::open_npy) and
/// `open_safetensors` (with the feature of that name) determine the element type, and can cut overlapping windows
/// ([`Cut`](crate::Cut)). All of them give the same `Records`.
///
/// A record is in one file, never across two. `Records` is `Send + Sync`: reads name their offsets and share no cursor,
/// so several threads may read at once.
///
/// The files must not be written to while they are open. A read of a truncated file is [`Error::Truncated`]; bytes that
/// change under the reader are delivered as they are found. On Unix a file that stays open is read on as it was when
/// its name is deleted or given to another file, as `mv` and most programs that save do; see [`Options::open`] for how
/// many do.
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
    ranges: Arc<Ranges>,
    skipped: Vec<PathBuf>,
}

impl Records {
    /// Opens `paths` as records of `record_bytes` bytes, and refuses a ragged file.
    ///
    /// # Errors
    ///
    /// The errors of [`Options::open`].
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        record_bytes: usize,
    ) -> Result<Self, Error> {
        Self::options().open(paths, record_bytes)
    }

    /// Returns default [`Options`]: short files are an error.
    pub const fn options() -> Options {
        Options { partial: false, skip_short: false }
    }

    /// Opens `paths` with the layout that `layout` finds in each. All layouts must be of one kind.
    pub(crate) fn assemble<P: AsRef<Path>>(
        options: Options,
        paths: impl IntoIterator<Item = P>,
        layout: impl Fn(&DataFile) -> Result<Layout, Error>,
    ) -> Result<Self, Error> {
        let mut skipped = Vec::new();
        let ranges = Ranges::assemble(paths, options.skip_short.then_some(&mut skipped), layout)?;
        Ok(Self { ranges, skipped })
    }

    /// Returns the files and the places of the records in them, for a [`Reader`](crate::Reader).
    #[must_use]
    pub fn ranges(&self) -> Arc<Ranges> {
        self.ranges.clone()
    }

    /// Bytes in a record, at least 1: the product of its [`shape`](Self::shape) and the size of its
    /// [`dtype`](Ranges::dtype).
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        self.kind.bytes
    }

    /// Elements of one record along each axis, in C order; empty if a record is one element.
    ///
    /// `[record_bytes]` if the files were opened without a type.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.kind.shape
    }

    /// Returns the files that were left out because they do not hold one record: [`Options::skip_short`].
    #[must_use]
    pub fn skipped(&self) -> &[PathBuf] {
        &self.skipped
    }
}

impl Deref for Records {
    type Target = Ranges;

    fn deref(&self) -> &Ranges {
        &self.ranges
    }
}

/// Whole records in a file of `len` bytes.
fn count(path: &Path, len: u64, record_bytes: u64, partial: bool) -> Result<u64, Error> {
    let (count, rest) = (len / record_bytes, len % record_bytes);
    if count == 0 {
        Err(Error::TooShort { path: path.to_owned(), wanted: record_bytes, found: len })
    } else if rest > 0 && !partial {
        let path = path.to_owned();
        Err(Error::Ragged { path, offset: len - rest, wanted: record_bytes, found: rest })
    } else {
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_records_are_counted() {
        let path = Path::new("a");
        assert_eq!(count(path, 12, 4, false).ok(), Some(3));
        assert_eq!(count(path, 15, 4, true).ok(), Some(3));
        assert_eq!(count(path, u64::MAX, 1, false).ok(), Some(u64::MAX));
        assert!(matches!(
            count(path, 15, 4, false),
            Err(Error::Ragged { offset: 12, wanted: 4, found: 3, .. })
        ));
        for partial in [false, true] {
            assert!(matches!(count(path, 0, 4, partial), Err(Error::TooShort { wanted: 4, found: 0, .. })));
            assert!(matches!(count(path, 3, 4, partial), Err(Error::TooShort { wanted: 4, found: 3, .. })));
        }
    }

    #[test]
    fn records_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Records>();
    }
}
