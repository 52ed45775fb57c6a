//! A batch as stretches of bytes, each in one file.

use std::ops::Range;

use crate::ahead::LARGE;
use crate::plan::Runs;
use crate::records::{Records, covered};
use crate::shard::Shard;
use crate::{BatchPlan, Error};

impl Records {
    /// Where the records of a range lie, or `None` for an empty range.
    pub(crate) fn in_one_file(&self, records: Range<u64>) -> Result<Option<Span<'_>>, Error> {
        if records.is_empty() {
            return Ok(None);
        }
        let found = self.len();
        let missing = |wanted| Error::NoSuchRecord { wanted, found };
        let location = self.locate(records.start).ok_or_else(|| missing(records.start))?;
        if records.end > found {
            return Err(missing(records.end - 1));
        }
        let shard = &self.shards()[location.shard];
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
    pub(crate) fn spans(&self, batch: &BatchPlan) -> Spans<'_, Runs> {
        self.spans_of(batch.pieces())
    }

    /// The stretches of bytes that hold these records, each in one file.
    pub(crate) fn spans_of<I>(&self, runs: I) -> Spans<'_, I> {
        Spans { records: self, runs, run: 0..0, most: self.most_at_once() }
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
    /// Whether it keeps the disk busy for long enough, so that it is read straight to its place.
    pub(crate) fn is_large(&self) -> bool {
        self.bytes.end - self.bytes.start >= LARGE
    }

    /// Bytes by which its records, one after the other, are longer than it is: what overlapping windows share.
    pub(crate) fn shared(&self, records_bytes: usize) -> usize {
        let covered = usize::try_from(self.bytes.end - self.bytes.start).unwrap_or(usize::MAX);
        // No less than 0: there are no gaps between the records.
        records_bytes.saturating_sub(covered)
    }
}

/// Cuts the runs of a batch where one file ends and the next begins, and at gaps between records.
#[derive(Debug)]
pub(crate) struct Spans<'a, I> {
    records: &'a Records,
    runs: I,
    /// What is left of the present run.
    run: Range<u64>,
    /// Records in a span.
    most: u64,
}

impl<'a, I: Iterator<Item = Range<u64>>> Iterator for Spans<'a, I> {
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
        let shard = &self.records.shards()[location.shard];
        let kind = &self.records.kind;
        let gaps = kind.stride > kind.bytes as u64;
        let most = if gaps { 1 } else { self.most };
        let end = self.run.end.min(shard.records().end).min(wanted.saturating_add(most));
        self.run.start = end;
        let records = end - wanted;
        let bytes = location.offset..location.offset + covered(records, kind);
        Some(Ok(Span { shard, bytes, records }))
    }
}
