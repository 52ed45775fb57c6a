//! Shuffled chunks of consecutive records.

use std::ops::Range;

use super::permute::Permutation;

/// Chunks laid one after the other: where each begins when one of them is shorter than the others.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    /// Records in a chunk.
    chunk: u64,
    /// Positions of the last chunk of the data set, which may be shorter than the others.
    short: Range<u64>,
}

impl Slots {
    /// For `records` records, of which the last chunk lies in slot `last`.
    pub(super) const fn new(records: u64, chunk: u64, last: u64) -> Self {
        // Only whole chunks precede the short one, and all of them together are fewer than the records.
        let start = last * chunk;
        let len = records - (records.div_ceil(chunk) - 1) * chunk;
        Self { chunk, short: start..start + len }
    }

    /// The slot of a position, the position's place in it, and the slot's length.
    pub(super) const fn find(&self, position: u64) -> (u64, u64, u64) {
        let Self { chunk, short } = self;
        // Behind the short chunk everything begins earlier by what that chunk lacks; count from its end.
        if position < short.start {
            (position / *chunk, position % *chunk, *chunk)
        } else if position < short.end {
            (short.start / *chunk, position - short.start, short.end - short.start)
        } else {
            let past = position - short.end;
            (short.start / *chunk + 1 + past / *chunk, past % *chunk, *chunk)
        }
    }

    /// The first position of a slot.
    pub(super) const fn start(&self, slot: u64) -> u64 {
        let Self { chunk, short } = self;
        let last = short.start / *chunk;
        // Slots are chunks of the data set, so neither product exceeds its records.
        if slot <= last { slot * *chunk } else { short.end + (slot - last - 1) * *chunk }
    }
}

/// All chunks in the order of a permutation; inside a chunk the order stays.
#[derive(Clone, Debug)]
pub(super) struct ShuffledChunks {
    permutation: Permutation,
    /// Records in a chunk.
    chunk: u64,
    slots: Slots,
}

impl ShuffledChunks {
    pub(super) fn new(records: u64, chunk: u64, seed: u64, epoch: u64) -> Self {
        let chunks = records.div_ceil(chunk);
        let permutation = Permutation::new(chunks, seed, epoch);
        let slots = Slots::new(records, chunk, permutation.inverse(chunks - 1));
        Self { permutation, chunk, slots }
    }

    /// The records from `position` to the end of its chunk.
    pub(super) fn from(&self, position: u64) -> Range<u64> {
        let (slot, within, len) = self.slots.find(position);
        let start = self.permutation.forward(slot) * self.chunk;
        start + within..start + len
    }
}
