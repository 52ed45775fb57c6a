//! Records of one size in one or several files, read by position into the caller's buffer.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::plan::Runs;
use crate::{BatchPlan, Error};

/// What to do with a file whose length is no multiple of the record size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Ragged {
    /// Refuse it: the usual reason is a wrong record size or a file that was cut off.
    #[default]
    Refuse,
    /// Leave the rest at the end of each file unread.
    Ignore,
}

/// How to open [`Records`]; made by [`Records::options`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `open`"]
pub struct Options {
    record_bytes: usize,
    ragged: Ragged,
}

impl Options {
    /// What to do with a file whose length is no multiple of the record size. The default is
    /// [`Ragged::Refuse`].
    pub const fn ragged(mut self, ragged: Ragged) -> Self {
        self.ragged = ragged;
        self
    }

    /// Opens the files, which together are the data set, in this order.
    ///
    /// One descriptor a file stays open, and on Unix one read-only mapping, which takes address space but no
    /// memory. If the system refuses the mapping, hints do nothing and everything else works.
    ///
    /// # Errors
    ///
    /// No path, a record of 0 bytes, a path that is missing, may not be read or is not a regular file (a
    /// FIFO is refused and not waited for), a file shorter than one record, and a ragged file unless that is
    /// to be ignored. See [`Error`]; each names the path.
    pub fn open<P: AsRef<Path>>(self, paths: impl IntoIterator<Item = P>) -> Result<Records, Error> {
        if self.record_bytes == 0 {
            return Err(Error::ZeroRecord);
        }
        let record_bytes = self.record_bytes as u64;
        let mut shards = Vec::new();
        let (mut records, mut bytes) = (0, 0_u64);
        for path in paths {
            let path = path.as_ref();
            let (file, len) = open_regular(path)?;
            let count = count(path, len, record_bytes, self.ragged)?;
            // There are no more records than bytes, so the sum of records cannot overflow before this one.
            bytes = bytes
                .checked_add(count * record_bytes)
                .ok_or_else(|| Error::TooLarge { path: path.to_owned() })?;
            shards.push(Shard {
                path: path.to_owned(),
                #[cfg(unix)]
                map: map(&file, count * record_bytes),
                file,
                first: records,
                records: count,
            });
            records += count;
        }
        if shards.is_empty() {
            return Err(Error::NoPaths);
        }
        Ok(Records { shards, record_bytes: self.record_bytes, records, bytes })
    }
}

/// One file of a data set.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    pub(crate) file: File,
    /// Kept for its address alone: no byte of it is touched. An error where the system refused it.
    #[cfg(unix)]
    pub(crate) map: io::Result<memmap2::MmapRaw>,
    first: u64,
    records: u64,
}

impl Shard {
    /// The path as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The numbers of its records in the data set.
    #[must_use]
    pub const fn records(&self) -> Range<u64> {
        self.first..self.first + self.records
    }
}

/// Where a record lies; found by [`Records::locate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The index of its file in [`Records::shards`].
    pub shard: usize,
    /// Its first byte, counted from the start of that file.
    pub offset: u64,
}

/// Fixed-size records in one or several files without headers, numbered through from the first file on.
///
/// A record lies in one file, never across two. `Records` is `Send + Sync`: reads name their offsets and
/// share no cursor, so several threads may read at once.
///
/// The files must not be written to meanwhile. If they are truncated all the same, a read says so by
/// [`Error::Truncated`]; bytes that change under the reader are delivered as they are found.
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
    record_bytes: usize,
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
        Self::options(record_bytes).open(paths)
    }

    /// Says how to open files of records of `record_bytes` bytes.
    pub const fn options(record_bytes: usize) -> Options {
        Options { record_bytes, ragged: Ragged::Refuse }
    }

    /// Records in all files, at least 1.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.records
    }

    /// Bytes in a record, at least 1.
    #[must_use]
    pub const fn record_bytes(&self) -> usize {
        self.record_bytes
    }

    /// Bytes in all records.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The files, in the order in which they were given.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Finds a record, in O(log shards), or `None` if there is no such one.
    #[must_use]
    pub fn locate(&self, record: u64) -> Option<Location> {
        if record >= self.records {
            return None;
        }
        // The first shard begins at record 0, so at least one begins at or before `record`.
        let shard = self.shards.partition_point(|shard| shard.first <= record) - 1;
        let offset = (record - self.shards[shard].first) * self.record_bytes as u64;
        Some(Location { shard, offset })
    }

    /// Reads the records of `batch`, one after the other in batch order, to the front of `out`, and says how
    /// many bytes that were: [`BatchPlan::len`] times [`record_bytes`](Self::record_bytes).
    ///
    /// The bytes go from the page cache straight into `out` (`pread` on Unix, `ReadFile` with an offset on
    /// Windows), one call for each run of consecutive records in a file. The mapping takes no part: a file
    /// that is truncated meanwhile gives an error here, and cannot raise SIGBUS.
    ///
    /// # Errors
    ///
    /// [`Error::BufferTooSmall`], before anything is read. [`Error::NoSuchRecord`] if the plan was made for
    /// a larger data set. [`Error::Truncated`] if a file has become shorter, [`Error::Read`] if the system
    /// fails. After any of these three the contents of `out` are unspecified.
    pub fn read(&self, batch: &BatchPlan, out: &mut [u8]) -> Result<usize, Error> {
        let wanted = batch.len().checked_mul(self.record_bytes as u64);
        let mut rest = match wanted.and_then(|wanted| usize::try_from(wanted).ok()) {
            Some(wanted) if wanted <= out.len() => &mut out[..wanted],
            _ => {
                let wanted = wanted.unwrap_or(u64::MAX);
                return Err(Error::BufferTooSmall { wanted, found: out.len() as u64 });
            }
        };
        let read = rest.len();
        for span in self.spans(batch) {
            let span = span?;
            // The spans of a batch add up to its bytes, all of which fit `rest`; so each fits usize.
            let len = usize::try_from(span.bytes.end - span.bytes.start).unwrap_or(usize::MAX);
            let part;
            (part, rest) = rest.split_at_mut(len.min(rest.len()));
            read_exact_at(span.shard, part, span.bytes.start)?;
        }
        Ok(read)
    }

    /// The stretches of bytes that hold `batch`, in batch order, each in one file.
    pub(crate) fn spans(&self, batch: &BatchPlan) -> Spans<'_> {
        Spans { records: self, runs: batch.runs(), run: 0..0 }
    }
}

/// Consecutive bytes of one file.
#[derive(Debug)]
pub(crate) struct Span<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) bytes: Range<u64>,
}

/// Cuts the runs of a batch where one file ends and the next begins.
#[derive(Debug)]
pub(crate) struct Spans<'a> {
    records: &'a Records,
    runs: Runs,
    /// What is left of the present run.
    run: Range<u64>,
}

impl<'a> Iterator for Spans<'a> {
    type Item = Result<Span<'a>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.run.is_empty() {
            self.run = self.runs.next()?;
        }
        let wanted = self.run.start;
        let Some(location) = self.records.locate(wanted) else {
            self.run = 0..0;
            return Some(Err(Error::NoSuchRecord { wanted, found: self.records.len() }));
        };
        let shard = &self.records.shards[location.shard];
        let end = self.run.end.min(shard.records().end);
        let bytes = (end - wanted) * self.records.record_bytes as u64;
        self.run.start = end;
        Some(Ok(Span { shard, bytes: location.offset..location.offset + bytes }))
    }
}

/// Whole records in a file of `len` bytes.
fn count(path: &Path, len: u64, record_bytes: u64, ragged: Ragged) -> Result<u64, Error> {
    let (count, rest) = (len / record_bytes, len % record_bytes);
    if count == 0 {
        Err(Error::TooShort { path: path.to_owned(), wanted: record_bytes, found: len })
    } else if rest > 0 && ragged == Ragged::Refuse {
        let path = path.to_owned();
        Err(Error::Ragged { path, offset: len - rest, wanted: record_bytes, found: rest })
    } else {
        Ok(count)
    }
}

/// Opens a regular file and gives its length; anything else is refused without being opened.
fn open_regular(path: &Path) -> Result<(File, u64), Error> {
    let regular = |metadata: &Metadata| match special(metadata) {
        Some(found) => Err(Error::NotAFile { path: path.to_owned(), found }),
        None => Ok(metadata.len()),
    };
    let failed = |source| Error::opening(path, source);
    // Looked at before it is opened, because opening a FIFO wakes its writer and opening a device can move it.
    regular(&std::fs::metadata(path).map_err(failed)?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    // Should a FIFO have taken the file's place since, opening does not wait for its writer. It has no
    // effect on regular files: open(2).
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path).map_err(failed)?;
    let len = regular(&file.metadata().map_err(failed)?)?;
    Ok((file, len))
}

/// What this is, if it is no regular file.
fn special(metadata: &Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return None;
    }
    if kind.is_dir() {
        return Some("directory");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return Some("FIFO");
        }
        if kind.is_socket() {
            return Some("socket");
        }
    }
    Some("device")
}

/// Maps the records of a file without touching them.
#[cfg(unix)]
fn map(file: &File, bytes: u64) -> io::Result<memmap2::MmapRaw> {
    // On a 32-bit system a file may be larger than the address space.
    let len = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    memmap2::MmapOptions::new().len(len).map_raw_read_only(file)
}

/// Fills `out` with the bytes of `shard` from `start` on.
fn read_exact_at(shard: &Shard, out: &mut [u8], start: u64) -> Result<(), Error> {
    let mut found = 0;
    while found < out.len() {
        let offset = start + found as u64;
        match read_at(&shard.file, &mut out[found..], offset) {
            Ok(0) => {
                let (wanted, found) = (out.len() as u64, found as u64);
                return Err(Error::Truncated { path: shard.path.clone(), offset, wanted, found });
            }
            // Fewer bytes than asked for are no error: Linux gives at most 2 GiB a call.
            Ok(bytes) => found += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(Error::Read { path: shard.path.clone(), offset, source }),
        }
    }
    Ok(())
}

/// One read at an offset; it does not depend on the file's cursor.
#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

/// One read at an offset; it moves the file's cursor, which nothing here uses.
#[cfg(windows)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_records_are_counted() {
        let path = Path::new("a");
        assert_eq!(count(path, 12, 4, Ragged::Refuse).ok(), Some(3));
        assert_eq!(count(path, 15, 4, Ragged::Ignore).ok(), Some(3));
        assert_eq!(count(path, u64::MAX, 1, Ragged::Refuse).ok(), Some(u64::MAX));
        assert!(matches!(
            count(path, 15, 4, Ragged::Refuse),
            Err(Error::Ragged { offset: 12, wanted: 4, found: 3, .. })
        ));
        for ragged in [Ragged::Refuse, Ragged::Ignore] {
            assert!(matches!(count(path, 0, 4, ragged), Err(Error::TooShort { wanted: 4, found: 0, .. })));
            assert!(matches!(count(path, 3, 4, ragged), Err(Error::TooShort { wanted: 4, found: 3, .. })));
        }
    }

    #[test]
    fn records_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Records>();
    }
}
