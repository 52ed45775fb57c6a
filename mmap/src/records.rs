//! Records of one size in one or several files, read by position into the caller's buffer.

use std::ops::Range;
use std::path::Path;

use crate::direct::{Beside, Direct};
use crate::file::DataFile;
use crate::mapped::{self, ReadMode};
use crate::plan::Runs;
use crate::{BatchPlan, DType, Error};

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
    /// memory until pages are read through it, unless the process locks all that it maps
    /// (`mlockall(MCL_FUTURE)`). If the system refuses the mapping, hints do nothing and reads in the default
    /// mode work. If it has no room for one (`RLIMIT_AS`, `vm.max_map_count`), those made before are given back,
    /// so that they do not take what the program needs.
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
        let bytes = self.record_bytes;
        Records::assemble(paths, |file| {
            let records = count(&file.path, file.len, bytes as u64, self.ragged)?;
            let kind = Kind { dtype: DType::U8, shape: vec![bytes], bytes, stride: bytes as u64 };
            Ok(Layout { kind, offset: 0, records })
        })
    }
}

/// What the records are: the same in all files of a data set.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) dtype: DType,
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

/// One file of a data set.
#[derive(Debug)]
pub struct Shard {
    pub(crate) file: DataFile,
    /// From the start of the file to the end of its records. Hints need its address alone; only reads in a
    /// mode that says so, and views, touch bytes of it. An error where the system refused it, or one of the others for
    /// lack of room.
    #[cfg(unix)]
    pub(crate) map: std::io::Result<memmap2::MmapRaw>,
    /// For reads past the page cache: there in [`ReadMode::Direct`] alone.
    pub(crate) direct: Option<Direct>,
    /// From the first byte of the first record to the last byte of the last.
    pub(crate) bytes: Range<u64>,
    first: u64,
    records: u64,
}

impl Shard {
    /// The path as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The numbers of its records in the data set.
    #[must_use]
    pub const fn records(&self) -> Range<u64> {
        self.first..self.first + self.records
    }

    /// The mapping, or why there is none.
    #[cfg(unix)]
    pub(crate) fn mapping(&self) -> Result<&memmap2::MmapRaw, Error> {
        self.map.as_ref().map_err(|error| Error::System {
            path: self.file.path.clone(),
            call: "mmap",
            // The reason is kept with the shard and io::Error cannot be cloned: give its kind and words.
            source: std::io::Error::new(error.kind(), error.to_string()),
        })
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
/// The files must not be written to meanwhile. If they are truncated all the same, a read says so by
/// [`Error::Truncated`]; bytes that change under the reader are delivered as they are found. The files stay
/// open: on Unix one whose name is deleted or given to another file, as `mv` and most programs that save do,
/// is read on as it was.
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
    kind: Kind,
    records: u64,
    bytes: u64,
    pub(crate) mode: ReadMode,
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

    pub(crate) fn shards_mut(&mut self) -> &mut [Shard] {
        &mut self.shards
    }

    /// Opens `paths` with the layout that `layout` finds in each, which must be of one kind.
    pub(crate) fn assemble<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        layout: impl Fn(&DataFile) -> Result<Layout, Error>,
    ) -> Result<Self, Error> {
        let mut shards: Vec<Shard> = Vec::new();
        let mut common: Option<Kind> = None;
        let (mut records, mut bytes) = (0, 0_u64);
        #[cfg(unix)]
        let mut room = true;
        for path in paths {
            let file = DataFile::open(path.as_ref())?;
            let Layout { kind, offset, records: count } = layout(&file)?;
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
            let map = if room { map(&file.file, end) } else { Err(std::io::ErrorKind::OutOfMemory.into()) };
            // What there is less of than the files need, the program needs too: it could not even allocate.
            #[cfg(unix)]
            if room && map.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::OutOfMemory) {
                room = false;
                shards.iter_mut().for_each(|shard| shard.map = Err(std::io::ErrorKind::OutOfMemory.into()));
            }
            shards.push(Shard {
                #[cfg(unix)]
                map,
                direct: None,
                file,
                bytes: offset..end,
                first: records,
                records: count,
            });
            records += count;
        }
        match common {
            Some(kind) => Ok(Self { shards, kind, records, bytes, mode: ReadMode::default() }),
            None => Err(Error::NoPaths),
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

    /// What a record is made of: [`DType::U8`] if the files were opened without a type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.kind.dtype
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
        let Shard { first, bytes, .. } = &self.shards[shard];
        // Not past the end of the file. Where the stride is meaningless, `record` is `first`.
        Some(Location { shard, offset: bytes.start + (record - first) * self.kind.stride })
    }

    /// Reads the records of `batch`, one after the other in batch order, to the front of `out`, and says how
    /// many bytes that were: [`BatchPlan::len`] times [`record_bytes`](Self::record_bytes).
    ///
    /// The bytes go from the page cache straight into `out`, in the way that [`ReadMode`] says; by default one
    /// `pread` for each run of consecutive records in a file, and for each record where there are gaps
    /// between them. Of windows that overlap, shared bytes are read once and then copied inside `out`. In
    /// every mode a file that is truncated meanwhile gives an error here, and cannot raise SIGBUS.
    ///
    /// # Errors
    ///
    /// [`Error::BufferTooSmall`], before anything is read. [`Error::NoSuchRecord`] if the plan was made for
    /// a larger data set. [`Error::Truncated`] if a file has become shorter, [`Error::Read`] if the system
    /// fails. After any of these three the contents of `out` are unspecified.
    pub fn read(&self, batch: &BatchPlan, out: &mut [u8]) -> Result<usize, Error> {
        let wanted = batch.len().checked_mul(self.kind.bytes as u64);
        let out = match wanted.and_then(|wanted| usize::try_from(wanted).ok()) {
            Some(wanted) if wanted <= out.len() => &mut out[..wanted],
            _ => {
                let wanted = wanted.unwrap_or(u64::MAX);
                return Err(Error::BufferTooSmall { wanted, found: out.len() as u64 });
            }
        };
        let (read, record) = (out.len(), self.kind.bytes);
        let mut parts = self.parts(batch, out);
        let mut beside = Beside::new();
        match self.mode {
            ReadMode::Pread | ReadMode::Direct => parts.try_for_each(|part| {
                let (span, out) = part?;
                let shared = span.shared(out.len());
                let (file, start) = (&span.shard.file, span.bytes.start);
                match &span.shard.direct {
                    Some(direct) => file.read_exact_by(&mut out[shared..], start, |out, offset| {
                        direct.read_at(out, offset, &mut beside)
                    }),
                    None => file.read_exact(&mut out[shared..], start),
                }?;
                expand(out, record, shared);
                Ok(())
            }),
            ReadMode::MapChecked => mapped::checked::read(parts, record),
            ReadMode::MapCopy => parts.try_for_each(|part| {
                let (span, out) = part?;
                let shared = span.shared(out.len());
                // SAFETY: the mode is chosen only where every file is sealed against writing and shrinking,
                // and holds all its records.
                let bytes = unsafe { mapped::in_place::bytes(span.shard, &span.bytes) }?;
                out[shared..].copy_from_slice(bytes);
                expand(out, record, shared);
                Ok(())
            }),
        }?;
        Ok(read)
    }

    /// The spans of `batch`, each with the part of `out` that its records fill.
    fn parts<'a, 'b>(
        &'a self,
        batch: &BatchPlan,
        mut out: &'b mut [u8],
    ) -> impl Iterator<Item = Result<(Span<'a>, &'b mut [u8]), Error>> + use<'a, 'b> {
        let record = self.kind.bytes as u64;
        self.spans(batch).map(move |span| {
            let span = span?;
            // The records of the spans are those of the batch, all of which fit `out`; so each fits usize.
            let len = usize::try_from(span.records * record).unwrap_or(usize::MAX);
            let (part, rest) = std::mem::take(&mut out).split_at_mut_checked(len).unwrap_or_default();
            out = rest;
            Ok((span, part))
        })
    }

    /// Where the records of a range lie, or `None` for an empty range.
    pub(crate) fn in_one_file(&self, records: Range<u64>) -> Result<Option<Span<'_>>, Error> {
        if records.is_empty() {
            return Ok(None);
        }
        let found = self.records;
        let missing = |wanted| Error::NoSuchRecord { wanted, found };
        let location = self.locate(records.start).ok_or_else(|| missing(records.start))?;
        if records.end > found {
            return Err(missing(records.end - 1));
        }
        let shard = &self.shards[location.shard];
        let end = shard.records().end;
        if records.end > end {
            let path = shard.file.path.clone();
            return Err(Error::AcrossFiles { path, wanted: records.end, found: end });
        }
        let records = records.end - records.start;
        let bytes = location.offset..location.offset + covered(records, &self.kind);
        Ok(Some(Span { shard, bytes, records }))
    }

    /// The stretches of bytes that hold `batch`, in batch order, each in one file.
    pub(crate) fn spans(&self, batch: &BatchPlan) -> Spans<'_> {
        Spans { records: self, runs: batch.runs(), run: 0..0 }
    }
}

/// Consecutive records of one file, without gaps between them.
#[derive(Debug)]
pub(crate) struct Span<'a> {
    pub(crate) shard: &'a Shard,
    /// From the first byte of the first record to the last byte of the last.
    pub(crate) bytes: Range<u64>,
    pub(crate) records: u64,
}

impl Span<'_> {
    /// Bytes by which its records, one after the other, are longer than it is: what overlapping windows share.
    pub(crate) fn shared(&self, records_bytes: usize) -> usize {
        let covered = usize::try_from(self.bytes.end - self.bytes.start).unwrap_or(usize::MAX);
        // No less than 0: there are no gaps between the records.
        records_bytes.saturating_sub(covered)
    }
}

/// Cuts the runs of a batch where one file ends and the next begins, and at gaps between records.
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
        let kind = &self.records.kind;
        let gaps = kind.stride > kind.bytes as u64;
        let end = if gaps { wanted + 1 } else { self.run.end.min(shard.records().end) };
        self.run.start = end;
        let records = end - wanted;
        let bytes = location.offset..location.offset + covered(records, kind);
        Some(Ok(Span { shard, bytes, records }))
    }
}

/// Bytes from the start of the first to the end of the last of `records` records of one file, at least one.
fn covered(records: u64, kind: &Kind) -> u64 {
    (records - 1) * kind.stride + kind.bytes as u64
}

/// Spreads overlapping records, of `record` bytes each, out of the end of `out`, where they begin at byte
/// `shared`, over all of `out`.
pub(crate) fn expand(out: &mut [u8], record: usize, shared: usize) {
    if shared == 0 {
        return;
    }
    // With n records and the stride s, `shared` is n * record - ((n - 1) * s + record), that is
    // (n - 1) * (record - s). Record i goes to i * record and lies at shared + i * s, which is
    // (n - 1 - i) * (record - s) further behind: never before its place. And all that is written up to then
    // ends at (i + 1) * record, which is the place of record i + 1 and so not behind where that one lies: no
    // record is overwritten before it has been copied.
    let overlap = shared / (out.len() / record - 1);
    for (to, from) in (0..out.len()).step_by(record).zip((shared..).step_by(record - overlap)) {
        out.copy_within(from..from + record, to);
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

/// Maps the first `bytes` bytes of a file without touching them.
#[cfg(unix)]
fn map(file: &std::fs::File, bytes: u64) -> std::io::Result<memmap2::MmapRaw> {
    // On a 32-bit system a file may be larger than the address space.
    let len = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::FileTooLarge)?;
    memmap2::MmapOptions::new().len(len).map_raw_read_only(file)
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
    fn overlapping_records_are_spread_out() {
        for (record, stride, records) in [(3, 2, 4), (5, 1, 7), (4, 3, 1), (4, 4, 3), (2, 1, 2), (1, 1, 5)] {
            let source: Vec<u8> = (0_u8..).take((records - 1) * stride + record).collect();
            let expected: Vec<u8> =
                (0..records).flat_map(|i| &source[i * stride..i * stride + record]).copied().collect();
            let mut out = vec![0xEE; records * record];
            let shared = out.len() - source.len();
            out[shared..].copy_from_slice(&source);
            expand(&mut out, record, shared);
            assert_eq!(out, expected, "{records} records of {record}, stride {stride}");
        }
    }

    #[test]
    fn records_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Records>();
    }
}
