//! The order of [`Shuffle::Window`](super::Shuffle::Window): records are mixed over the chunks that are in memory.
//!
//! # The tape
//!
//! The records form a ring. Each epoch cuts the ring into chunks, from another record on. The tape is all chunks, one
//! after the other in another order; records that do not fill a chunk are at its end. The chunk at place `i` of the
//! tape has the number `first + i * stride`, modulo the number of chunks. The stride is random, but such that the
//! quotients of its continued fraction are small: any consecutive chunks of the tape are then spread evenly over the
//! files (Niederreiter, "Random Number Generation and Quasi-Monte Carlo Methods", 1992, chapter 3).
//!
//! # The shares
//!
//! Each rank visits one contiguous part of the tape, its share. A share consists of a part of a
//! chunk, whole chunks, and a part of a chunk; any of them may be missing.
//!
//! # The window
//!
//! A window of `W` chunks slides over the whole chunks of a share, by one chunk for each block.
//! Each block visits as many records as a chunk has, from the chunks of the window: chunk `k` gives
//! a slice of its records to each of the blocks `k - W + 1` to `k`. With `W` = 4:
//!
//! ```text
//!            chunk  0   1   2   3   4   5
//!  block -3         s0                          blocks below 0: one section, the start
//!  block -2         s1  s0
//!  block -1         s2  s1  s0
//!  block  0         s3  s2  s1  s0
//!  block  1             s3  s2  s1  s0
//!  block  2                 s3  s2  s1  s0
//!  block  3                     s3  s2  s1      blocks past the last whole window: one section, the end
//!  block  4                         s3  s2
//!  block  5                             s3
//! ```
//!
//! Each section, and each block between the two sections, is permuted as a whole. The start also has the records before
//! the first whole chunk, and the end those after the last one. If a share has `W` whole chunks or fewer, all of it is
//! one section.
//!
//! # The slices
//!
//! The records of a chunk are numbered slice by slice. Number `x` is in slice `slice(x)`, which never falls with
//! `x`, and `slice(x) + slice(chunk - 1 - x) = W - 1`, except for the middle number of an odd chunk if `W` is even. So
//! block `t` has exactly one record of each number `x`: that of chunk `t + W - 1 - slice(x)`. And two chunks of the
//! start, `k` and `W - 2 - k`, together give it as many records as one chunk has. So the record of any position can be
//! computed without the others.
//!
//! Most neighbors in a file are kept apart: a chunk with more records than there are slices is divided into strands of
//! at most `W` consecutive records, and a slice takes at most one record of each strand.

use std::ops::Range;

use super::permute::{InOrder, Key, Permutation, Table};

/// The shares of an epoch: `count` shares of `len` positions each, and one share of the positions that are left. Share
/// `i` starts at position `i * len`, and has the records at the same places of the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shares {
    pub(super) len: u64,
    pub(super) count: u64,
}

impl Shares {
    /// Returns the share that has this position. The epoch has `records` positions.
    pub(super) const fn around(self, position: u64, records: u64) -> Range<u64> {
        let Self { len, count } = self;
        if position < len * count {
            let start = position / len * len;
            start..start + len
        } else {
            len * count..records
        }
    }
}

/// The order of one epoch.
#[derive(Clone, Debug)]
pub(super) struct Order {
    tape: Tape,
    shares: Shares,
    /// The share of the position that was looked up last.
    share: Option<Share>,
}

impl Order {
    /// For chunks of `chunk` records and windows of `window` chunks, all at least 1.
    pub(super) fn new(records: u64, chunk: u64, window: u64, key: Key, shares: Shares) -> Self {
        Self { tape: Tape::new(records, chunk, window, key), shares, share: None }
    }

    /// Returns the record at `position`.
    pub(super) fn record(&mut self, position: u64) -> u64 {
        let Self { tape, shares, share } = self;
        match share {
            Some(share) if share.range.contains(&position) => share.record(tape, position),
            _ => {
                let found = Share::new(tape, shares.around(position, tape.records));
                share.insert(found).record(tape, position)
            }
        }
    }

    /// Returns the window for `positions`. `None` if they are in two shares.
    pub(super) fn window(self, positions: Range<u64>) -> Option<Window> {
        let range = self.shares.around(positions.start, self.tape.records);
        let share = Share::new(&self.tape, range);
        (positions.end <= share.range.end).then_some(Window { tape: self.tape, share, positions })
    }
}

/// The chunks that hold the records of a batch.
///
/// The chunks of a share are numbered in the order of the tape. From batch to batch of a share,
/// neither end of [`resident_at`](Self::resident_at) moves back. So a reader can drop the chunks
/// before this range, needs those in it, and reads those after it next, in order.
pub(crate) struct Window {
    tape: Tape,
    share: Share,
    pub(crate) positions: Range<u64>,
}

impl Window {
    /// The number of whole chunks in a window.
    pub(crate) const fn most(&self) -> u64 {
        self.tape.window
    }

    /// Returns the records of a chunk of the share, whose number counts from 0: one range, or two if the chunk has both the
    /// last and the first record.
    pub(crate) fn records(&self, chunk: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { tape, share, .. } = self;
        let (start, len) = match chunk.checked_sub(u64::from(share.before > 0)) {
            None => (share.range.start, share.before),
            Some(whole) if whole < share.whole => ((share.first + whole) * tape.chunk, tape.chunk),
            Some(_) => (share.range.end - share.after, share.after),
        };
        let record = tape.at(start);
        let front = len.min(tape.records - record);
        [record..record + front, 0..len - front].into_iter().filter(|range| !range.is_empty())
    }

    /// The share, as positions in the epoch's order.
    pub(crate) fn share(&self) -> Range<u64> {
        self.share.range.clone()
    }

    /// Returns the chunks that are needed at a position of the share.
    pub(crate) fn resident_at(&self, position: u64) -> Range<u64> {
        let Self { tape, share, .. } = self;
        let at = position - share.range.start;
        // No overflow: if a chunk is one record, it is whole.
        let (before, after) = (u64::from(share.before > 0), u64::from(share.after > 0));
        let end = before + share.whole + after;
        if share.whole <= tape.window {
            0..end
        } else if at < share.start {
            // The start has records of `before` and of `window - 1` chunks, but none of the window's last chunk.
            0..before + tape.window - 1
        } else if at < share.range.end - share.range.start - share.end {
            let first = before + (at - share.start) / tape.chunk;
            first..first + tape.window
        } else {
            end - after - (tape.window - 1)..end
        }
    }
}

/// All records of an epoch, chunk after chunk.
#[derive(Clone, Debug)]
struct Tape {
    records: u64,
    /// Records in a chunk.
    chunk: u64,
    /// The number of whole chunks.
    chunks: u64,
    /// Chunks in a window.
    window: u64,
    /// The record at which this epoch starts to cut the records into chunks: the last record is followed by the first.
    shift: u64,
    /// The number of the chunk at the first place of the tape.
    first: u64,
    /// The step from the number of a chunk to that of the next one on the tape, modulo the number of chunks.
    stride: u64,
    /// The number of strands in a chunk.
    strands: u64,
    /// The number of records in a shorter strand.
    each: u64,
    /// How many strands, at the front of the chunk, have one record more.
    more: u64,
    /// The order within a longer strand, and within a shorter one.
    longer: Table,
    shorter: Table,
    /// The key of the random rotation of each strand.
    turns: Key,
    key: Key,
}

impl Tape {
    fn new(records: u64, chunk: u64, window: u64, key: Key) -> Self {
        let chunks = records / chunk;
        let strands = chunk.div_ceil(window);
        let (each, more) = (chunk / strands, chunk % strands);
        Self {
            records,
            chunk,
            chunks,
            window,
            shift: key.of(Role::Shift as u64).below(records),
            first: key.of(Role::First as u64).below(chunks),
            stride: stride(chunks.max(1), key.of(Role::Stride as u64)),
            strands,
            each,
            more,
            longer: Table::new(Permutation::new(chunk.div_ceil(strands), key.of(Role::Longer as u64))),
            shorter: Table::new(Permutation::new(each, key.of(Role::Shorter as u64))),
            turns: key.of(Role::Turn as u64),
            key,
        }
    }

    /// Returns the record at `place` of the tape.
    fn at(&self, place: u64) -> u64 {
        self.on_ring(place / self.chunk, place % self.chunk)
    }

    /// Returns record `x`, in the order of use, of the whole chunk at a place of the tape.
    fn used(&self, chunk: u64, x: u64) -> u64 {
        let &Self { each, more, .. } = self;
        let (strand, within) = (x % self.strands, x / self.strands);
        let (order, len) = if strand < more { (&self.longer, each + 1) } else { (&self.shorter, each) };
        // No overflow: chunks times strands are no more than the records.
        let turn = self.turns.of(chunk * self.strands + strand).below(len);
        let start = strand * each + strand.min(more);
        self.on_ring(chunk, start + order.at(add_modulo(within, turn, len)))
    }

    /// Returns a record, in the order of the ring, of the chunk at a place of the tape.
    fn on_ring(&self, chunk: u64, within: u64) -> u64 {
        add_modulo(self.numbered(chunk) * self.chunk + within, self.shift, self.records)
    }

    /// Returns the number on the ring of the chunk at a place of the tape.
    fn numbered(&self, chunk: u64) -> u64 {
        if chunk >= self.chunks {
            return chunk;
        }
        // The remainder is less than `chunks`, so it fits a u64.
        let large = || u64::try_from(u128::from(chunk) * u128::from(self.stride) % u128::from(self.chunks));
        let further = chunk.checked_mul(self.stride).map(|product| product % self.chunks);
        add_modulo(further.unwrap_or_else(|| large().unwrap_or_default()), self.first, self.chunks)
    }
}

/// A share of the tape, and how its positions are divided.
#[derive(Clone, Debug)]
struct Share {
    range: Range<u64>,
    /// The number of records before the first whole chunk.
    before: u64,
    /// The number of records after the last whole chunk.
    after: u64,
    /// The place on the tape of the first whole chunk.
    first: u64,
    /// The number of whole chunks.
    whole: u64,
    /// The number of positions in the section before the blocks. Without blocks, all positions are in this section.
    start: u64,
    /// The number of positions in the section after the blocks.
    end: u64,
    /// The section of the position that was looked up last.
    section: Option<Section>,
}

/// Positions of a share that are permuted as a whole: a block, or one of the two sections around the blocks.
#[derive(Clone, Debug)]
struct Section {
    /// The positions of the section, counted from the start of the share.
    positions: Range<u64>,
    place: Place,
    order: InOrder,
}

/// Which section of a share it is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    Block(u64),
    End,
}

impl Share {
    /// Creates the share of the positions in `range`, which is not empty.
    fn new(tape: &Tape, range: Range<u64>) -> Self {
        let &Tape { chunk, window, .. } = tape;
        let len = range.end - range.start;
        let first = range.start.div_ceil(chunk);
        // If no chunk starts in the share, all of it counts as `before`; the product may then saturate.
        let before = first.saturating_mul(chunk).min(range.end) - range.start;
        let whole = (len - before) / chunk;
        let after = len - before - whole * chunk;
        let (start, end) = if whole <= window {
            (len, 0)
        } else {
            // The section before the blocks has records of the first `window - 1` whole chunks. The chunks `k` and
            // `window - 2 - k` together give it as many records as one chunk has. If `window` is even, the chunk in the
            // middle is left without a partner, and gives half of its records, rounded down.
            let (pairs, middle) = ((window - 1) / 2, (window - 1) % 2);
            let start = pairs * chunk + middle * (chunk / 2);
            (before + start, after + (window - 1) * chunk - start)
        };
        Self { range, before, after, first, whole, start, end, section: None }
    }

    fn record(&mut self, tape: &Tape, position: u64) -> u64 {
        let at = position - self.range.start;
        if self.section.as_ref().is_none_or(|section| !section.positions.contains(&at)) {
            self.section = Some(self.section(tape, at));
        }
        let Some(Section { positions, place, order }) = &mut self.section else {
            unreachable!("it was just set")
        };
        let (at, place) = (order.at(at - positions.start), *place);
        let (chunk, x) = match place {
            Place::Start if self.whole <= tape.window || at < self.before => {
                return tape.at(self.range.start + at);
            }
            Place::Start => {
                let (chunk, x) = corner(tape, at - self.before);
                (self.first + chunk, x)
            }
            Place::Block(block) => (self.first + block + tape.window - 1 - slice(tape, at), at),
            Place::End if at < self.after => return tape.at(self.range.end - self.after + at),
            // The end is the mirror image of the start.
            Place::End => {
                let (chunk, x) = corner(tape, at - self.after);
                (self.first + self.whole - 1 - chunk, tape.chunk - 1 - x)
            }
        };
        tape.used(chunk, x)
    }

    /// Returns the section that has a position. The position is counted from the start of the share.
    fn section(&self, tape: &Tape, at: u64) -> Section {
        let end = self.range.end - self.range.start - self.end;
        let (place, positions, key) = if at < self.start {
            (Place::Start, 0..self.start, Role::Start as u64)
        } else if at < end {
            let block = (at - self.start) / tape.chunk;
            let start = self.start + block * tape.chunk;
            (Place::Block(block), start..start + tape.chunk, (Role::Blocks as u64).wrapping_add(block))
        } else {
            (Place::End, end..end + self.end, Role::End as u64)
        };
        let key = tape.key.of(Role::Sections as u64).of(self.range.start).of(key);
        let order = InOrder::new(Permutation::new(positions.end - positions.start, key));
        Section { positions, place, order }
    }
}

/// The slice of record `x` of a chunk, in the order of use; below the number of chunks in the share's window.
const fn slice(tape: &Tape, x: u64) -> u64 {
    let &Tape { chunk, window, .. } = tape;
    let mirrored = chunk - 1 - x;
    // No overflow: the factors are at most `chunk` and `window`, whose product is at most the number of records.
    if x <= mirrored {
        (2 * x + 1) * window / (2 * chunk)
    } else {
        window - 1 - (2 * mirrored + 1) * window / (2 * chunk)
    }
}

/// Returns the chunk and the number, in the order of use, of a record in the section before the blocks. `at` counts
/// the positions after the records before the first whole chunk.
const fn corner(tape: &Tape, at: u64) -> (u64, u64) {
    let (chunk, x) = (at / tape.chunk, at % tape.chunk);
    // The chunk gives this section only a part of its records. For each of the other numbers `x`,
    // the chunk `window - 2 - chunk` gives its record `tape.chunk - 1 - x`.
    if slice(tape, x) < tape.window - 1 - chunk {
        (chunk, x)
    } else {
        (tape.window - 2 - chunk, tape.chunk - 1 - x)
    }
}

/// What a key is derived for. The numbers affect the order, so they stay the same in every version.
#[derive(Clone, Copy)]
enum Role {
    Shift = 1,
    First = 2,
    Stride = 3,
    Longer = 4,
    Shorter = 5,
    Turn = 6,
    Sections = 7,
    // The sections of a share: their keys are derived from that of `Sections`.
    Start = 0,
    End = 8,
    Blocks = 9,
}

/// Returns a random number coprime to `n` whose multiples modulo `n` are spread evenly: all quotients of Euclid's
/// algorithm, which are those of the continued fraction, are small.
fn stride(n: u64, key: Key) -> u64 {
    let small = |stride: u64, most: u64| {
        let (mut a, mut b) = (n, stride);
        while b > 0 && a / b <= most {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    // On average 5 to 50 strides are tried for 16 to ten million chunks. The limit of the quotients
    // grows with the number of tries, so the loop ends.
    let mut tried = 0;
    loop {
        let stride = key.of(tried).below(n);
        if small(stride, 4 + tried / 8) {
            return stride;
        }
        tried += 1;
    }
}

/// The sum modulo `modulus`, for two numbers below it.
const fn add_modulo(a: u64, b: u64, modulus: u64) -> u64 {
    let room = modulus - b;
    if a >= room { a - room } else { a + b }
}
