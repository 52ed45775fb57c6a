//! The files of a data set, and the byte ranges of its records in them.

#[cfg(unix)]
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::too_many;
use crate::file::DataFile;
use crate::{BatchIndices, DType, Error, RecordList, limit, system};

/// The type, shape and size of the records. All files of a data set have the same `Kind`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) dtype: DType,
    /// Whether the format or the caller set the type. `false` for untyped bytes.
    pub(crate) typed: bool,
    /// The shape of one record; empty for records of varying length.
    pub(crate) shape: Vec<usize>,
    /// Bytes in a record, at least 1: the product of the shape and the size of an element. For records of varying
    /// length: bytes in an element.
    pub(crate) bytes: usize,
    /// Bytes from the start of a record to the start of the next, at least 1. If every file has only one record, this
    /// may exceed the size of the files.
    pub(crate) stride: u64,
}

/// The positions of the records of one file. All records are within the file.
pub(crate) struct Layout {
    pub(crate) kind: Kind,
    pub(crate) at: Places,
    /// The number of records, at least 1.
    pub(crate) records: u64,
}

/// The position of a record in its file. [`Ranges::locate`] returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The index of the file in [`Ranges::shards`].
    pub shard: usize,
    /// The offset of the record's first byte from the start of the file.
    pub offset: u64,
    /// The length of the record in bytes. It can be 0 only for records of varying length.
    pub len: u64,
}

/// The files of a data set, and the byte range of each record. Record indices start at 0 and continue from each file
/// to the next.
///
/// A [`Reader`](crate::Reader) reads the batches of a `Ranges`. [`Records`](crate::Records) and
/// [`RaggedRecords`](crate::RaggedRecords) each contain a `Ranges` and dereference to it. `Ranges`
/// is immutable, `Send` and `Sync`: reads use explicit offsets, and any number of readers and
/// threads can use it at the same time. A record never spans two files.
#[derive(Debug)]
#[expect(clippy::len_without_is_empty, reason = "a data set holds at least one record")]
pub struct Ranges {
    /// At least one file. The files are in the order of their record indices.
    shards: Vec<Shard>,
    pub(crate) kind: Kind,
    records: u64,
    bytes: u64,
    longest: usize,
    /// The files that were skipped because they are too short.
    pub(crate) skipped: Vec<PathBuf>,
}

/// A byte range of a file, and the offset in the slot where it goes. A unit (a batch or a group of tensors) consists of
/// extents. The reader hints, requests and copies extents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The index of the file.
    pub(crate) file: usize,
    pub(crate) bytes: Range<u64>,
    /// The end of the bytes that only this extent has. If windows of records overlap, later extents of the unit may
    /// also contain the bytes from here to the end.
    pub(crate) own_end: u64,
    /// The offset in the slot where the first byte goes.
    pub(crate) to: usize,
}

impl Extent {
    pub(crate) const fn new(file: usize, bytes: Range<u64>, to: usize) -> Self {
        Self { file, own_end: bytes.end, bytes, to }
    }

    pub(crate) const fn len(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }
}

/// Consecutive records of one file, without gaps between them.
struct Span {
    extent: Extent,
    records: u64,
    /// Bytes of the records in a slot. Records that overlap in the file are separate in the slot, so this is at least
    /// the length of the extent.
    len: u64,
}

impl Ranges {
    /// Opens `paths`. `layout` finds the layout of each file; all layouts must have the same [`Kind`]. With `skip_short`,
    /// files that are too short are skipped, unless all are too short.
    pub(crate) fn assemble(
        paths: impl IntoIterator<Item: AsRef<Path>>,
        skip_short: bool,
        mut layout: impl FnMut(&DataFile) -> Result<Layout, Error>,
    ) -> Result<Arc<Self>, Error> {
        let mut common: Option<Kind> = None;
        let (mut bytes, mut longest) = (0_u64, 0);
        let paths: Vec<_> = paths.into_iter().collect();
        let mut shards = Shards::new(paths.len());
        let (mut skipped, mut too_short) = (Vec::new(), None);
        for path in paths {
            let file = shards.open(path.as_ref())?;
            let Layout { kind, at, records: count } = match layout(&file) {
                Err(error @ Error::TooShort { .. }) if skip_short => {
                    skipped.push(file.path);
                    too_short.get_or_insert(error);
                    continue;
                }
                layout => layout?,
            };
            let common = match (&mut common, shards.all.first()) {
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
            let too_large = || Error::TooLarge { path: file.path.clone() };
            let (start, end, more) = match &at {
                Places::Strided(start) => {
                    longest = common.bytes;
                    (*start, start + covered(count, common), count.checked_mul(longest as u64))
                }
                Places::Offsets(offsets) => {
                    let most = offsets.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
                    longest = longest.max(usize::try_from(most).map_err(|_| too_large())?);
                    let (start, end) = (offsets[0], offsets[offsets.len() - 1]);
                    (start, end, Some(end - start))
                }
            };
            // Check only the sum of the bytes. The number of records cannot overflow first, because each record has at
            // least one byte or an offset in memory.
            bytes = more.and_then(|more| bytes.checked_add(more)).ok_or_else(too_large)?;
            shards.push(file, at, start..end, count);
        }
        // If all files are too short, report the first one.
        let kind = common.ok_or(too_short.unwrap_or(Error::NoPaths))?;
        let shards = shards.all;
        let records = shards.last().map_or(0, |last| last.records().end);
        Ok(Arc::new(Self { shards, kind, records, bytes, longest, skipped }))
    }

    /// Returns the number of records in all files. It is at least 1.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.records
    }

    /// Returns the element type. Returns [`DType::U8`] for files opened without a type; see
    /// [`is_typed`](Self::is_typed).
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.kind.dtype
    }

    /// Returns `true` if the files have an element type. If `false`, the records are untyped bytes that can be read as
    /// any type. Megatron-LM files of `uint8` tokens count as untyped.
    #[must_use]
    pub const fn is_typed(&self) -> bool {
        self.kind.typed
    }

    /// Returns the total size of all records in bytes. If records overlap, shared bytes count once for each record.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the length of the longest record in bytes.
    #[must_use]
    pub const fn max_len(&self) -> usize {
        self.longest
    }

    /// Returns the files in the order of their records.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Finds the file, offset and length of a record. Takes O(log shards). Returns `None` if the index is out of range.
    #[must_use]
    pub fn locate(&self, record: u64) -> Option<Location> {
        let Span { extent, len, .. } = self.span(&(record..record.checked_add(1)?), 0)?;
        Some(Location { shard: extent.file, offset: extent.bytes.start, len })
    }

    /// Returns an upper bound for the bytes of a batch of `records` positions of `list`, in any order. A batch that is longer
    /// than the list starts it again. A record counts as often as the list has it.
    ///
    /// It is no bound for a last batch of [`LastBatch::Wrap`](crate::LastBatch::Wrap) with
    /// [`Shuffle::Window`](crate::Shuffle::Window) in an epoch that began with other batch sizes or numbers of ranks: such a
    /// batch can have a position once more.
    #[must_use]
    pub fn most_bytes(&self, records: u64, list: &RecordList) -> u64 {
        if !self.is_ragged() {
            return records.saturating_mul(self.longest as u64);
        }
        let count = usize::try_from(records.min(list.len())).unwrap_or(usize::MAX);
        // A record that does not exist has no bytes: the read of its batch reports it. Stop there if the list rises.
        let rises = list.step().is_some();
        let len = |at| Some(self.locate(list.get(at)?)?.len);
        let lengths = (0..list.len()).map_while(|at| len(at).or((!rises).then_some(0)));
        let mut lengths: Vec<u64> = lengths.collect();
        if count < lengths.len() {
            lengths.select_nth_unstable_by(count, |a, b| b.cmp(a));
        }
        let once = lengths.iter().take(count).fold(0_u64, |sum, &len| sum.saturating_add(len));
        once.saturating_mul(records.div_ceil(list.len().max(1)).max(1))
    }

    /// Whether the records have varying length.
    pub(crate) fn is_ragged(&self) -> bool {
        matches!(self.shards[0].at, Places::Offsets(_))
    }

    /// Bytes from the start of a record to the start of the next. For records of varying length: their mean length.
    pub(crate) fn stride(&self) -> u64 {
        if self.is_ragged() { self.mean_len() } else { self.kind.stride }
    }

    /// The mean length of the records in bytes, at least 1.
    pub(crate) fn mean_len(&self) -> u64 {
        (self.bytes / self.records).max(1)
    }

    /// Returns the length in bytes of each record of a batch, in batch order. Returns 0 for a record that does not
    /// exist.
    pub fn lengths(&self, batch: &BatchIndices) -> impl Iterator<Item = usize> {
        let len = |record| self.locate(record).and_then(|found| usize::try_from(found.len).ok());
        batch.runs().flatten().map(move |record| len(record).unwrap_or(0))
    }

    /// The size of a batch in bytes. Returns `u64::MAX` on overflow.
    pub(crate) fn size(&self, batch: &BatchIndices) -> u64 {
        if !self.is_ragged() {
            return batch.len().saturating_mul(self.kind.bytes as u64);
        }
        // Stop at a record that does not exist: the read of the batch reports it.
        let spans = self.spans(batch.runs());
        spans.map_while(Result::ok).fold(0, |sum: u64, span| sum.saturating_add(span.len))
    }

    /// Returns the first span of `records`: as many of them, from the first on, as one file has without a gap. `to` is
    /// the offset of the span in the slot. Returns `None` if the first record does not exist.
    fn span(&self, records: &Range<u64>, to: u64) -> Option<Span> {
        let start = records.start;
        if start >= self.records {
            return None;
        }
        // The first shard begins at record 0, so at least one begins at or before `start`.
        let index = self.shards.partition_point(|shard| shard.first <= start) - 1;
        let shard = &self.shards[index];
        let count = records.end.min(shard.records().end) - start;
        let first = start - shard.first;
        let Kind { bytes, stride, .. } = self.kind;
        let (bytes, own_end, records, len) = match &shard.at {
            Places::Strided(at) => {
                let records = if stride > bytes as u64 { 1 } else { count };
                // No overflow: the records are within the file. If the stride has saturated, the file has one record,
                // and `first` is 0.
                let at = at + first * stride;
                let end = at + covered(records, &self.kind);
                let own_end = at.saturating_add(records.saturating_mul(stride)).min(end);
                // No overflow: the product is at most the bytes of all records.
                (at..end, own_end, records, records * bytes as u64)
            }
            Places::Offsets(offsets) => {
                // These are indices of `offsets`, which is in memory, so they fit a usize.
                let [at, end] = [first, first + count].map(|at| usize::try_from(at).unwrap_or(usize::MAX));
                let (at, end) = (offsets[at], offsets[end]);
                (at..end, end, count, end - at)
            }
        };
        // Overlapping records have fewer bytes in the file than in the slot. Read them into the last bytes of their
        // part of the slot; `spread` then moves each record to its own place. The sum fits a usize, because a batch fits its slot.
        let to = usize::try_from(to + len - (bytes.end - bytes.start)).unwrap_or(usize::MAX);
        Some(Span { extent: Extent { file: index, bytes, own_end, to }, records, len })
    }

    /// Cuts runs of records into spans: at the end of each file, and at gaps between records. The spans follow each
    /// other in the slot. Spans without bytes are left out.
    fn spans(&self, mut runs: impl Iterator<Item = Range<u64>>) -> impl Iterator<Item = Result<Span, Error>> {
        let (mut run, mut to) = (0..0, 0);
        let all = std::iter::from_fn(move || {
            if run.is_empty() {
                run = runs.next()?;
            }
            let Some(span) = self.span(&run, to) else {
                let wanted = std::mem::take(&mut run).start;
                return Some(Err(Error::NoSuchRecord { wanted, found: self.records }));
            };
            run.start += span.records;
            to += span.len;
            Some(Ok(span))
        });
        all.filter(|span| !matches!(span, Ok(Span { len: 0, .. })))
    }

    /// Returns the extents that contain the records of `runs`.
    pub(crate) fn extents(
        &self,
        runs: impl Iterator<Item = Range<u64>>,
    ) -> impl Iterator<Item = Result<Extent, Error>> {
        self.spans(runs).map(|span| Ok(span?.extent))
    }

    /// Moves records that overlap in their file to separate places in `out`. Call it after all extents of the batch
    /// were read.
    pub(crate) fn spread(&self, batch: &BatchIndices, out: &mut [u8]) -> Result<(), Error> {
        if self.kind.stride >= self.kind.bytes as u64 {
            return Ok(());
        }
        for span in self.spans(batch.runs()) {
            let Span { extent, len, .. } = span?;
            let [len, shared] =
                [len, len - extent.len()].map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
            let start = extent.to - shared;
            expand(&mut out[start..start + len], self.kind.bytes, shared);
        }
        Ok(())
    }
}

/// Bytes from the start of the first to the end of the last of `records` consecutive records of one file. `records` is
/// at least 1.
fn covered(records: u64, kind: &Kind) -> u64 {
    (records - 1) * kind.stride + kind.bytes as u64
}

/// Moves overlapping records to separate places. Before the call, the records are at the end of `out`, from byte
/// `shared` on, as they are in the file. After the call, they fill `out`, with `record` bytes each.
fn expand(out: &mut [u8], record: usize, shared: usize) {
    if shared == 0 {
        return;
    }
    // With n records and the stride s, `shared` is n * record - ((n - 1) * s + record), that is (n - 1) * (record - s).
    // Record i starts at shared + i * s and goes to i * record. So it starts (n - 1 - i) * (record - s) bytes after its
    // place, never before it. When record i is in its place, only bytes before (i + 1) * record have been written.
    // Record i + 1 starts there or later, so no record is overwritten before it was copied.
    let overlap = shared / (out.len() / record - 1);
    for (to, from) in (0..out.len()).step_by(record).zip((shared..).step_by(record - overlap)) {
        out.copy_within(from..from + record, to);
    }
}

#[cfg(test)]
mod expanding {
    use super::*;

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
}

/// One file of a data set.
#[derive(Debug)]
pub struct Shard {
    pub(crate) file: DataFile,
    pub(crate) at: Places,
    /// The byte range from the start of the first record to the end of the last.
    pub(crate) bytes: Range<u64>,
    pub(crate) first: u64,
    pub(crate) records: u64,
    /// The number of bytes in the files before this one. Each of these files counts up to the end of its last record.
    pub(crate) before: u64,
}

impl Shard {
    /// Returns the path as it was passed to the open call; a prefix of Megatron-LM files ends in `.bin`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Returns the range of record indices in this file.
    #[must_use]
    pub const fn records(&self) -> Range<u64> {
        self.first..self.first + self.records
    }
}

/// The files of a data set or a model, while they are opened one by one.
pub(crate) struct Shards {
    pub(crate) all: Vec<Shard>,
    /// How many files stay open. The others are opened again for each use.
    kept: usize,
}

impl Shards {
    pub(crate) fn new(files: usize) -> Self {
        Self { all: Vec::new(), kept: limit::kept(files) }
    }

    pub(crate) fn open(&mut self, path: &Path) -> Result<DataFile, Error> {
        match DataFile::open(path) {
            Err(Error::Open { source, .. }) if too_many(&source) && self.kept > 0 => {
                // The process or the system has too many open files. Close those of this data set,
                // and open each again for each use, so that the program has descriptors left.
                self.kept = 0;
                self.all.iter_mut().for_each(|shard| shard.file.give_back());
                DataFile::open(path)
            }
            file => file,
        }
    }

    /// Adds a file that is open.
    pub(crate) fn push(&mut self, mut file: DataFile, at: Places, bytes: Range<u64>, records: u64) {
        // If the address space has no room for all mappings, unmap all: the program needs room to allocate.
        #[cfg(unix)]
        if self.all.last().is_none_or(|last| last.file.has_room()) {
            /// The number of mappings that stay free for the rest of the program, for example for threads. It is checked
            /// at every thousandth file, together with room for the files up to the next check.
            const OTHERS: usize = 1000;
            let others = if self.all.len() % OTHERS == OTHERS - 1 { 2 * OTHERS } else { 0 };
            let others: io::Result<Vec<_>> = (0..others).map(|_| file.mapped(1)).collect();
            file.map = others.and_then(|_| file.mapped(bytes.end));
            if !file.has_room() {
                self.all.iter_mut().for_each(|shard| shard.file.map = Err(ErrorKind::OutOfMemory.into()));
            }
        }
        // Consecutive files of one file system have the same answer: ask the system only once.
        file.hints_wait = match self.all.last().filter(|last| last.file.id[0] == file.id[0]) {
            Some(last) => last.file.hints_wait,
            None => file.kept.as_ref().is_some_and(|file| system::hints_wait(file)),
        };
        if self.all.len() >= self.kept {
            file.give_back();
        }
        let ends = |last: &Shard| [last.records().end, last.before.saturating_add(last.bytes.end)];
        let [first, before] = self.all.last().map_or([0; 2], ends);
        self.all.push(Shard { file, at, bytes, first, records, before });
    }
}

/// The positions of the records in one file.
#[derive(Debug)]
pub(crate) enum Places {
    /// The offset of the first record. Each further record starts one stride later.
    Strided(u64),
    /// The offset of each record, and then the end of the last record. The offsets never decrease.
    Offsets(Vec<u64>),
}
