//! Records of one size in one or several files, read by position into the caller's buffer.

use std::path::{Path, PathBuf};

use crate::file::DataFile;
use crate::shard::Shard;
use crate::{DType, Error, limit};

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
    /// Whether a file of plain bytes may end with a part of a record, which is left unread. Default: no; the usual
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

    /// Opens the files, which together are the data set, in this order, as records of `record_bytes` bytes.
    ///
    /// The files stay open, as many as a quarter of the limit of open files (`RLIMIT_NOFILE`) allows; the soft limit is
    /// raised for them up to the hard one. Others are opened for each use, which costs a few microseconds, and must not
    /// be renamed or replaced meanwhile ([`Error::Replaced`]).
    ///
    /// On Unix each file has one read-only mapping, which takes address space but no
    /// memory until pages are read through it, unless the process locks all that it maps
    /// (`mlockall(MCL_FUTURE)`). If the system refuses the mapping, hints do nothing and reads work. If it has no room
    /// for one (`RLIMIT_AS`, `vm.max_map_count`), those made before are given back, so that they do not take what the
    /// program needs.
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
            Ok(Layout { kind, offset: 0, records })
        })
    }
}

/// What the records are: the same in all files of a data set.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) dtype: DType,
    /// Whether the format or the caller named the type.
    pub(crate) typed: bool,
    /// The shape of one record.
    pub(crate) shape: Vec<usize>,
    /// Bytes in a record, at least 1: the product of the shape and the size of an element.
    pub(crate) bytes: usize,
    /// Bytes from the start of a record to the start of the next, at least 1. Meaningless, and perhaps larger
    /// than the file, if there is no next one.
    pub(crate) stride: u64,
}

/// Where the records of one file lie. All of them lie within the file.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) kind: Kind,
    /// The first byte of the first record.
    pub(crate) offset: u64,
    /// At least 1.
    pub(crate) records: u64,
}

/// Where a record lies; found by [`Records::locate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The index of its file in [`Records::shards`].
    pub shard: usize,
    /// Its first byte, counted from the start of that file.
    pub offset: u64,
}

/// Records of one size in one or several files, numbered through from the first file on.
///
/// [`open`](Self::open) takes files without headers as records of plain bytes;
/// [`open_headerless`](Self::open_headerless), [`open_llm_c`](Self::open_llm_c),
/// [`open_npy`](Self::open_npy) and `open_safetensors` (with the feature of that name) know what the elements
/// are, and can cut overlapping windows ([`Cut`](crate::Cut)). All of them give the same `Records`.
///
/// A record lies in one file, never across two. `Records` is `Send + Sync`: reads name their offsets and
/// share no cursor, so several threads may read at once.
///
/// The files must not be written to meanwhile. A read of a truncated file is [`Error::Truncated`]; bytes that change
/// under the reader are delivered as they are found. On Unix a file that stays open is read on as it was when its
/// name is deleted or given to another file, as `mv` and most programs that save do; see [`Options::open`] for how
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
#[expect(clippy::len_without_is_empty, reason = "a data set holds at least one record")]
pub struct Records {
    /// At least one, in the order of their records.
    shards: Vec<Shard>,
    skipped: Vec<PathBuf>,
    pub(crate) kind: Kind,
    records: u64,
    bytes: u64,
}

impl Records {
    /// Opens `paths` as records of `record_bytes` bytes, and refuses a ragged file.
    ///
    /// # Errors
    ///
    /// Those of [`Options::open`].
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

    /// Opens `paths` with the layout that `layout` finds in each, which must be of one kind.
    pub(crate) fn assemble<P: AsRef<Path>>(
        options: Options,
        paths: impl IntoIterator<Item = P>,
        layout: impl Fn(&DataFile) -> Result<Layout, Error>,
    ) -> Result<Self, Error> {
        let mut shards: Vec<Shard> = Vec::new();
        let mut common: Option<Kind> = None;
        let (mut records, mut bytes, mut before) = (0, 0_u64, 0_u64);
        #[cfg(unix)]
        let mut room = true;
        let paths: Vec<P> = paths.into_iter().collect();
        let mut kept = limit::kept(paths.len());
        let (mut skipped, mut too_short) = (Vec::new(), None);
        for path in paths {
            let path = path.as_ref();
            let mut file = DataFile::open(path);
            if file.as_ref().is_err_and(Error::is_too_many) && kept > 0 {
                // The program has opened others. What there is less of than the files need, the program needs too.
                kept = 0;
                shards.iter_mut().for_each(|shard| shard.file.give_back());
                file = DataFile::open(path);
            }
            let mut file = file?;
            let Layout { kind, offset, records: count } = match layout(&file) {
                Err(error @ Error::TooShort { .. }) if options.skip_short => {
                    skipped.push(file.path);
                    too_short.get_or_insert(error);
                    continue;
                }
                layout => layout?,
            };
            let common = match (&mut common, shards.first()) {
                (Some(common), Some(first)) if *common != kind => {
                    return Err(Error::Mixed {
                        path: file.path,
                        first: first.file.path.clone(),
                        wanted: (common.dtype, common.shape.clone()),
                        found: (kind.dtype, kind.shape),
                    });
                }
                (common, _) => common.get_or_insert(kind),
            };
            // There are no more records than bytes, so the sum of records cannot overflow before this one.
            bytes = count
                .checked_mul(common.bytes as u64)
                .and_then(|more| bytes.checked_add(more))
                .ok_or_else(|| Error::TooLarge { path: file.path.clone() })?;
            let end = offset + covered(count, common);
            #[cfg(unix)]
            let map = if room {
                crate::shard::map(&*file.file()?, end)
            } else {
                Err(std::io::ErrorKind::OutOfMemory.into())
            };
            // What there is less of than the files need, the program needs too: it could not even allocate.
            #[cfg(unix)]
            if room && map.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::OutOfMemory) {
                room = false;
                shards.iter_mut().for_each(|shard| shard.map = Err(std::io::ErrorKind::OutOfMemory.into()));
            }
            let hints_wait = crate::system::hints_wait(&*file.file()?);
            if shards.len() >= kept {
                file.give_back();
            }
            shards.push(Shard {
                #[cfg(unix)]
                map,
                hints_wait,
                file,
                bytes: offset..end,
                first: records,
                records: count,
                before,
            });
            before = before.saturating_add(end);
            records += count;
        }
        match common {
            Some(kind) => Ok(Self { shards, skipped, kind, records, bytes }),
            // If all are too short, the first of them is as good as any.
            None => Err(too_short.unwrap_or(Error::NoPaths)),
        }
    }

    /// Records in all files, at least 1.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.records
    }

    /// Bytes in a record, at least 1: the product of its [`shape`](Self::shape) and the size of its
    /// [`dtype`](Self::dtype).
    #[must_use]
    pub const fn record_bytes(&self) -> usize {
        self.kind.bytes
    }

    /// Returns the element type of a record: [`DType::U8`] if the files were opened without a type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.kind.dtype
    }

    /// Whether the files were opened with an element type. If not, the records are bytes that may be taken as anything.
    #[must_use]
    pub const fn is_typed(&self) -> bool {
        self.kind.typed
    }

    /// Elements of one record along each axis, in C order; empty if a record is one element.
    ///
    /// `[record_bytes]` if the files were opened without a type.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.kind.shape
    }

    /// Bytes from the start of a record to the start of the next.
    pub(crate) const fn stride(&self) -> u64 {
        self.kind.stride
    }

    /// Bytes in all records, [`len`](Self::len) times [`record_bytes`](Self::record_bytes): where windows
    /// overlap, the bytes that they share are counted for each.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the files, in the order in which they were given.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the files that were left out because they do not hold one record: [`Options::skip_short`].
    #[must_use]
    pub fn skipped(&self) -> &[PathBuf] {
        &self.skipped
    }

    /// Finds a record, in O(log shards), or `None` if there is no such one.
    #[must_use]
    pub fn locate(&self, record: u64) -> Option<Location> {
        if record >= self.records {
            return None;
        }
        // The first shard begins at record 0, so at least one begins at or before `record`.
        let shard = self.shards.partition_point(|shard| shard.first <= record) - 1;
        let Shard { first, bytes, .. } = &self.shards[shard];
        // Not past the end of the file. Where the stride is meaningless, `record` is `first`.
        Some(Location { shard, offset: bytes.start + (record - first) * self.kind.stride })
    }
}

/// Bytes from the start of the first to the end of the last of `records` records of one file, at least one.
pub(crate) fn covered(records: u64, kind: &Kind) -> u64 {
    (records - 1) * kind.stride + kind.bytes as u64
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
