//! Shuffled chunks of consecutive records.

use std::ops::Range;

use super::permute::{Key, Permutation};

/// All chunks in random order; inside a chunk the order stays.
#[derive(Clone, Debug)]
pub(super) struct ShuffledChunks {
    records: u64,
    /// Records in a chunk.
    chunk: u64,
    order: Permutation,
    /// The place of the last chunk of the data set. That chunk may be shorter than the others.
    last: u64,
    /// The chunk that `order` has there. It takes the place that `order` has for the last chunk.
    displaced: u64,
}

impl ShuffledChunks {
    /// For `records` records in chunks of `chunk`; both at least 1.
    pub(super) fn new(records: u64, chunk: u64, key: Key) -> Self {
        let chunks = records.div_ceil(chunk);
        let order = Permutation::new(chunks, key);
        // The place of the last chunk determines all positions. It is drawn, not searched for.
        let last = key.of(0).below(chunks);
        let displaced = order.at(last);
        Self { records, chunk, order, last, displaced }
    }

    /// The records from `position` to the end of its chunk.
    pub(super) fn from(&self, position: u64) -> Range<u64> {
        let &Self { records, chunk, last, .. } = self;
        // Positions before the end of the last chunk count from 0, and those after it from its end.
        let short = (records - 1) % chunk + 1;
        let past = last * chunk + short;
        let (place, within) = match position.checked_sub(past) {
            None => (position / chunk, position % chunk),
            Some(past) => (last + 1 + past / chunk, past % chunk),
        };
        let start = self.at(place) * chunk;
        start + within..records.min(start.saturating_add(chunk))
    }

    fn at(&self, place: u64) -> u64 {
        let end = (self.records - 1) / self.chunk;
        if place == self.last {
            return end;
        }
        match self.order.at(place) {
            chunk if chunk == end => self.displaced,
            chunk => chunk,
        }
    }
}
