//! A batch as stretches of bytes, each in one file.

use std::ops::Range;

use crate::plan::Runs;
use crate::records::{Records, covered};
use crate::shard::Shard;
use crate::{BatchIndices, Error};

impl Records {
    /// The stretches of bytes that hold `batch`, in batch order, each in one file.
    pub(crate) fn spans(&self, batch: &BatchIndices) -> Spans<'_, Runs> {
        self.spans_of(batch.pieces())
    }

    /// The stretches of bytes that hold these records, each in one file.
    pub(crate) fn spans_of<I>(&self, runs: I) -> Spans<'_, I> {
        Spans { records: self, runs, run: 0..0 }
    }
}

/// Consecutive records of one file, without gaps between them.
#[derive(Debug)]
pub(crate) struct Span<'a> {
    pub(crate) shard: &'a Shard,
    /// The index of the shard.
    pub(crate) index: usize,
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
pub(crate) struct Spans<'a, I> {
    records: &'a Records,
    runs: I,
    /// What is left of the present run.
    run: Range<u64>,
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
        let most = if gaps { 1 } else { u64::MAX };
        let end = self.run.end.min(shard.records().end).min(wanted.saturating_add(most));
        self.run.start = end;
        let records = end - wanted;
        let bytes = location.offset..location.offset + covered(records, kind);
        Some(Ok(Span { shard, index: location.shard, bytes, records }))
    }
}
