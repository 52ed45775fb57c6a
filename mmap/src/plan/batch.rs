//! The records of one batch: which ones, in which order.

use std::fmt;
use std::iter::FusedIterator;
use std::ops::Range;
use std::sync::Arc;

use super::chunks::ShuffledChunks;
use super::leg::{self, Seam, Stretch};
use super::permute::Key;

use super::shuffle::Shuffle;
use super::window::Windows;

/// The records of one rank at one step, in the order in which they are read. It holds at least one.
///
/// A batch is a few words that name the records; it holds none of their bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::len_without_is_empty, reason = "a batch holds at least one record")]
pub struct BatchPlan {
    pub(super) first: u64,
    pub(super) records: u64,
    pub(super) seed: u64,
    pub(super) shuffle: Shuffle,
    pub(super) epoch: u64,
    pub(super) step: u64,
    /// Ranks that share the epoch.
    pub(super) world: u64,
    /// Positions in the epoch's order, `start < end`. Past the last record they start again at the first. With seams,
    /// positions among those that are left.
    pub(super) start: u64,
    pub(super) end: u64,
    /// The positions, from the first to the second, of all batches that follow each other at this rank.
    pub(super) share: (u64, u64),
    /// Where the legs before this one left off, if what is left is not all at the end of the order.
    pub(super) seams: Option<Arc<[Seam]>>,
}

/// The last such part of a window (1/8) asks for nothing more, so that the disk has read the next window in time.
const LEAD: u64 = 8;

impl BatchPlan {
    /// Records in this batch, at least 1.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Returns the epoch that the batch is part of.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Its step within the epoch.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Returns the seed of the plan that the batch is part of.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the records at these positions of the batch, in its order, or `None` if there are none or the batch
    /// has no such positions. Takes O(1).
    ///
    /// ```
    /// use twinbuf_mmap::{Shuffle, Plan};
    ///
    /// let plan = Plan::builder(1000).batch(100).shuffle(Shuffle::Records).build()?;
    /// let batch = plan.batch(0, 3).expect("a step below `steps`");
    /// let part = batch.part(30..60).expect("positions below 100");
    /// assert_eq!(part.len(), 30);
    /// assert!(part.runs().flatten().eq(batch.runs().flatten().skip(30).take(30)));
    /// assert_eq!(batch.part(90..101), None);
    /// # Ok::<(), twinbuf_mmap::PlanError>(())
    /// ```
    #[must_use]
    pub fn part(&self, positions: Range<u64>) -> Option<Self> {
        let Range { start, end } = positions;
        // Not past `self.end`, so the sums do not overflow.
        (start < end && end <= self.len()).then(|| Self {
            start: self.start + start,
            end: self.start + end,
            ..self.clone()
        })
    }

    /// Returns the records as ranges of consecutive ones, in batch order.
    ///
    /// A range that begins where the one before it ends is joined to it, so a sequential batch is one range.
    /// Each range takes O(1) for every chunk in it.
    #[must_use]
    pub fn runs(&self) -> impl FusedIterator<Item = Range<u64>> + Clone + fmt::Debug + use<> {
        self.pieces()
    }

    /// The same as a type that can be named.
    pub(crate) fn pieces(&self) -> Runs {
        let &Self { first, records, seed, shuffle, epoch, start, end, .. } = self;
        let order = match shuffle {
            Shuffle::None => Order::Same,
            Shuffle::Chunks { records: chunk } => {
                Order::Chunks(ShuffledChunks::new(records, chunk, seed, epoch))
            }
            Shuffle::Records => Order::Chunks(ShuffledChunks::new(records, 1, seed, epoch)),
            Shuffle::Window { records: chunk, chunks } => {
                Order::Windows(Windows::new(records, chunk, chunks, seed, epoch))
            }
        };
        Runs { order, first, records, seams: self.seams.clone(), at: start, end, next: None }
    }

    /// With a windowed shuffle: the chunks of the window that comes next, shared out evenly among the batches of this
    /// one. `None` with any other.
    pub(crate) fn chunks_ahead(&self) -> Option<Vec<Range<u64>>> {
        self.chunks_beside(|window| window.checked_add(1), LEAD, false)
    }

    /// The same with those that belong to earlier batches of this window.
    pub(crate) fn chunks_up_to_ahead(&self) -> Option<Vec<Range<u64>>> {
        self.chunks_beside(|window| window.checked_add(1), LEAD, true)
    }

    /// The same of the window before this one.
    #[cfg(test)]
    pub(crate) fn chunks_behind(&self) -> Option<Vec<Range<u64>>> {
        self.chunks_beside(|window| window.checked_sub(1), u64::MAX, false)
    }

    /// With a windowed shuffle: all chunks of the windows in which this batch lies. `None` with any other.
    pub(crate) fn own_chunks(&self) -> Option<Vec<Range<u64>>> {
        let batch = self.placed()?;
        let windows = batch.windows()?;
        let mut ranges = Vec::new();
        for (window, _) in batch.touched(&windows) {
            ranges.extend(windows.ranges(window, 0..windows.chunks(window)));
        }
        Some(batch.moved(ranges))
    }

    /// The share of another window's chunks that belongs to this batch, or to it and to all before it in its window. It
    /// is the `lead`th part of a window in front of the batch.
    fn chunks_beside(
        &self,
        beside: impl Fn(u64) -> Option<u64>,
        lead: u64,
        with_earlier: bool,
    ) -> Option<Vec<Range<u64>>> {
        let batch = self.placed()?;
        let share = batch.share;
        let windows = batch.windows()?;
        let mut ranges = Vec::new();
        for (window, part) in batch.touched(&windows) {
            let Some(other) = beside(window).filter(|&other| other < windows.len()) else { continue };
            let there = windows.positions(other);
            if there.end <= share.0 || share.1 <= there.start {
                continue;
            }
            // What the batches of this share have of the window, and this one of that.
            let here = windows.positions(window);
            let (from, to) = (here.start.max(share.0), here.end.min(share.1));
            let chunks = windows.chunks(other);
            let scaled = |at: u64| {
                let lead = if at == from { 0 } else { ((to - from) / lead).min(to - at) };
                let product = u128::from(at - from + lead) * u128::from(chunks);
                // No more than `chunks`, since `at` lies between `from` and `to`.
                u64::try_from(product / u128::from(to - from)).unwrap_or(chunks)
            };
            let first = if with_earlier { 0 } else { scaled(part.start) };
            ranges.extend(windows.ranges(other, first..scaled(part.end)));
        }
        Some(batch.moved(ranges))
    }

    /// Records in a whole window; 0 with any other shuffle.
    pub(crate) const fn window_records(&self) -> u64 {
        match self.shuffle {
            Shuffle::Window { records, chunks } => records.saturating_mul(chunks),
            _ => 0,
        }
    }

    /// Numbers for the window in which this batch begins and for the one before, if whole windows are worth reading for
    /// it.
    pub(crate) fn window_ids(&self) -> Option<[usize; 2]> {
        let batch = self.placed()?;
        let window = batch.windows()?.window_of(batch.start);
        let key = Key::new(self.seed, self.epoch);
        Some([window, window.wrapping_sub(1)].map(|window| key.of(window).id()))
    }

    /// The same batch in positions of the epoch's order. `None` for one that has seams in it.
    fn placed(&self) -> Option<Self> {
        let Some(seams) = &self.seams else { return Some(self.clone()) };
        let Stretch { position, back, ahead } = leg::find(seams, self.start)?;
        let share =
            (position - back.min(self.start - self.share.0), position + ahead.min(self.share.1 - self.start));
        (self.len() <= ahead).then(|| Self {
            start: position,
            end: position + self.len(),
            share,
            seams: None,
            ..self.clone()
        })
    }

    /// `None` also for the one batch of a share: it visits too few records of its windows.
    fn windows(&self) -> Option<Windows> {
        let &Self { records, seed, shuffle, epoch, .. } = self;
        match shuffle {
            Shuffle::Window { records: chunk, chunks } if self.share != (self.start, self.end) => {
                Some(Windows::new(records, chunk, chunks, seed, epoch))
            }
            _ => None,
        }
    }

    /// The windows in which this batch lies, each with the positions that it has there. What wraps around to the front
    /// of the epoch is left out.
    fn touched(&self, windows: &Windows) -> impl Iterator<Item = (u64, Range<u64>)> {
        let (mut at, end) = (self.start, self.end.min(self.records));
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let window = windows.window_of(at);
            let part = at..end.min(windows.positions(window).end);
            at = part.end;
            Some((window, part))
        })
    }

    /// Counts records as the data set does.
    fn moved(&self, mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
        for range in &mut ranges {
            *range = self.first + range.start..self.first + range.end;
        }
        ranges
    }
}

/// Where the record of a position is found.
#[derive(Clone, Debug)]
enum Order {
    Same,
    Chunks(ShuffledChunks),
    Windows(Windows),
}

/// The ranges of consecutive records of a [`BatchPlan`].
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    order: Order,
    /// The number of the plan's first record, which is 0 to everything below.
    first: u64,
    /// Records in the plan.
    records: u64,
    seams: Option<Arc<[Seam]>>,
    /// The position of the next record, and where positions end.
    at: u64,
    end: u64,
    /// A range that does not touch the one before it, and so is the next.
    next: Option<Range<u64>>,
}

impl Runs {
    /// The records from position `at` to the end of its chunk or of the batch.
    fn piece(&mut self) -> Option<Range<u64>> {
        if self.at == self.end {
            return None;
        }
        let (position, most) = match self.seams.as_deref() {
            None => (self.at % self.records, u64::MAX),
            Some(seams) => match leg::find(seams, self.at) {
                Some(Stretch { position, ahead, .. }) => (position, ahead),
                // Past what is left the order starts again at its front.
                None => ((self.at - leg::left(seams).unwrap_or_default()) % self.records, u64::MAX),
            },
        };
        let wanted = (self.end - self.at).min(self.records - position).min(most);
        let piece = match &mut self.order {
            Order::Same => position..position + wanted,
            Order::Chunks(chunks) => {
                let chunk = chunks.from(position);
                chunk.start..chunk.start + wanted.min(chunk.end - chunk.start)
            }
            Order::Windows(windows) => {
                let record = windows.record(position);
                record..record + 1
            }
        };
        self.at += piece.end - piece.start;
        Some(self.first + piece.start..self.first + piece.end)
    }
}

impl Iterator for Runs {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let mut run = self.next.take().or_else(|| self.piece())?;
        while let Some(piece) = self.piece() {
            if piece.start != run.end {
                self.next = Some(piece);
                break;
            }
            run.end = piece.end;
        }
        Some(run)
    }
}

impl FusedIterator for Runs {}
