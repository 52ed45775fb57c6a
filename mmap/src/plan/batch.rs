//! The records of one batch and their order.

use std::fmt;
use std::iter::FusedIterator;
use std::ops::Range;
use std::sync::Arc;

use super::RecordList;
use super::permute::{InOrder, Key, Permutation};
use super::window::{self, Shares, Window};

/// The record indices of one batch: of one rank at one step, in order. A batch has at least one record.
///
/// The value contains a few numbers that determine the records, and shares the plan's
/// [`RecordList`]. It contains no data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::len_without_is_empty, reason = "a batch holds at least one record")]
pub struct BatchIndices {
    pub(super) list: RecordList,
    pub(super) seed: u64,
    pub(crate) shuffle: Shuffle,
    pub(super) epoch: u64,
    pub(super) step: u64,
    /// The positions of the batch in the epoch's order, `start < end`. Positions past the last record start again at
    /// the first. With seams, these are positions among the records that are left.
    pub(super) start: u64,
    pub(super) end: u64,
    /// With a windowed shuffle, the positions of all batches that follow each other at this rank. Empty for a batch
    /// after those.
    pub(super) share: Range<u64>,
    /// How the order of a windowed shuffle is divided among the ranks.
    pub(super) shares: Shares,
    /// Where the earlier parts of the epoch ended. `None` if all records that are left are at the end of the order.
    pub(super) seams: Option<Arc<[Seam]>>,
}

/// Chunks are requested this part of a window before their use, to give the disk time to read them.
const LEAD: u64 = 8;

impl BatchIndices {
    /// Returns the number of records in the batch, at least 1.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Returns the epoch of the batch, from 0.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the step of the batch within its epoch, from 0.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Returns the seed of the plan.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns a part of the batch. `positions` are positions in the batch, from 0, in batch order. Returns `None`
    /// if the range is empty or exceeds the batch. Takes O(1).
    ///
    /// ```
    /// use twinbuf_mmap::{Shuffle, Plan};
    ///
    /// let plan = Plan::builder(1000).batch(100).shuffle(Shuffle::Full).build()?;
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
        // No overflow: both sums are at most `self.end`.
        (start < end && end <= self.len()).then(|| Self {
            start: self.start + start,
            end: self.start + end,
            ..self.clone()
        })
    }

    /// Returns the record indices as ranges of consecutive records, in batch order.
    ///
    /// Adjacent ranges are merged: a batch of consecutive records is one range.
    #[must_use]
    pub fn runs(&self) -> impl FusedIterator<Item = Range<u64>> + Clone + fmt::Debug + use<> {
        let (records, key) = (self.list.len(), Key::new(self.seed, self.epoch));
        let order = match self.shuffle {
            Shuffle::None => Order::Same,
            Shuffle::Chunks { records: chunk } => Order::Chunks(ShuffledChunks::new(records, chunk, key)),
            Shuffle::Full => Order::Records(InOrder::new(Permutation::new(records, key))),
            Shuffle::Window { chunk_records: chunk, window_chunks: chunks } => {
                Order::Windows(self.windows(chunk, chunks))
            }
        };
        Runs { order, rest: self.clone(), next: None }
    }

    /// Returns the first record in batch order.
    #[must_use]
    pub fn first(&self) -> u64 {
        // A batch has at least one record.
        self.part(0..1).and_then(|one| one.runs().next()).map_or(0, |run| run.start)
    }

    fn windows(&self, chunk: u64, chunks: u64) -> window::Order {
        window::Order::new(self.list.len(), chunk, chunks, Key::new(self.seed, self.epoch), self.shares)
    }

    /// Returns the chunks that hold the records of a batch of a windowed shuffle. `None` with any
    /// other shuffle; for a batch that is the only one of its share or comes after the shares, because it visits
    /// too few records of each chunk; and for a batch that crosses a seam or the end of a share.
    pub(crate) fn window(&self) -> Option<Window> {
        let Shuffle::Window { chunk_records: chunk, window_chunks: chunks } = self.shuffle else {
            return None;
        };
        if self.share.is_empty() || self.share == (self.start..self.end) {
            return None;
        }
        let Stretch { position, ahead, .. } = self.stretch()?;
        let positions = (self.len() <= ahead).then(|| position..position + self.len())?;
        self.windows(chunk, chunks).window(positions)
    }

    /// The number of positions that are left after all seams.
    fn left(&self) -> u64 {
        self.seams.as_ref().and_then(|seams| seams.last()).map_or(self.list.len(), |seam| seam.left)
    }

    /// Converts the first position of the batch, which is among those that are left after all seams, to a position in
    /// the epoch's order, and its neighbors. Returns `None` if fewer positions are left.
    fn stretch(&self) -> Option<Stretch> {
        let found = Stretch { position: self.start, back: u64::MAX, ahead: u64::MAX };
        let seams = self.seams.as_deref().unwrap_or_default().iter().rev();
        (self.start < self.left()).then(|| seams.fold(found, |found, seam| seam.before(found)))
    }

    /// Returns the chunks that a batch of a [windowed](Shuffle::Window) shuffle draws its records from, as ranges of
    /// records. The chunk that has both the last and the first record is two ranges.
    ///
    /// Later batches of the rank can draw from these chunks too: a data set that keeps them need not read them again.
    /// Takes time in proportion to the number of chunks. Returns `None`:
    ///
    /// - with any other shuffle, and with a [list](RecordList) of records that are not consecutive.
    /// - for the only full batch of a rank, and for the batches that [`LastBatch::Keep`](super::LastBatch::Keep) or
    ///   [`LastBatch::Wrap`](super::LastBatch::Wrap) add at the end.
    /// - in the rest of an epoch after [`Plan::resume`](super::Plan::resume) or a change of the batch size: for a batch
    ///   whose records are in several pieces of the epoch's order, or in the parts of two earlier ranks.
    ///
    /// ```
    /// use twinbuf_mmap::{Plan, Shuffle};
    ///
    /// let shuffle = Shuffle::Window { chunk_records: 100, window_chunks: 4 };
    /// let plan = Plan::builder(1000).batch(20).shuffle(shuffle).build()?;
    /// let batch = plan.batch(0, 30).expect("a step below `steps`");
    /// let chunks = batch.window_chunks().expect("a windowed shuffle");
    /// assert!(batch.runs().flatten().all(|record| chunks.iter().any(|chunk| chunk.contains(&record))));
    /// assert_eq!(plan.with_records(vec![5; 1000])?.batch(0, 30).unwrap().window_chunks(), None);
    /// # Ok::<(), twinbuf_mmap::PlanError>(())
    /// ```
    #[must_use]
    pub fn window_chunks(&self) -> Option<Vec<Range<u64>>> {
        let window = self.window().filter(|_| self.list.step() == Some(1))?;
        let Range { start, end } = window.positions;
        let chunks = window.resident_at(start).start..window.resident_at(end - 1).end;
        Some(self.ranges(&window, chunks))
    }

    /// Returns the records of the chunks to request for this batch: the chunks of its window, and the next ones. If the
    /// batch `follows` another one, leaves out the chunks that were requested for that batch and earlier ones. `None`
    /// if [`window`](Self::window) is.
    pub(crate) fn chunks(&self, follows: bool) -> Option<Vec<Range<u64>>> {
        let (window, Stretch { back, ahead, .. }) = (self.window()?, self.stretch()?);
        let Range { start, end } = window.positions;
        // The positions of the window's share that this rank visits.
        let back = back.min(self.start - self.share.start);
        let ahead = ahead.min(self.share.end - self.start);
        let share = window.share();
        let visited = share.start.max(start.saturating_sub(back))..share.end.min(start.saturating_add(ahead));
        let most = window.resident_at(visited.end - 1).end;
        let lead = window.most().div_ceil(LEAD);
        let asked = |position| most.min(window.resident_at(position).end.saturating_add(lead));
        let first =
            if follows && start > visited.start { asked(start - 1) } else { window.resident_at(start).start };
        Some(self.ranges(&window, first..asked(end - 1)))
    }

    /// Whether this batch comes directly after `other` in the order of the same epoch.
    pub(crate) fn is_behind(&self, other: &Self) -> bool {
        (self.seed, self.epoch, self.start) == (other.seed, other.epoch, other.end)
    }

    /// Returns the records of `chunks` as ranges.
    pub(super) fn ranges(&self, window: &Window, chunks: Range<u64>) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        for mut positions in chunks.flat_map(|chunk| window.records(chunk)) {
            while !positions.is_empty() {
                let run = self.list.run(positions.clone());
                positions.start += run.end - run.start;
                ranges.push(run);
            }
        }
        ranges
    }
}

/// How to find the record of a position.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "it is on the stack during a read, and nothing is allocated")]
enum Order {
    Same,
    Chunks(ShuffledChunks),
    Records(InOrder),
    Windows(window::Order),
}

/// The ranges of consecutive records of a [`BatchIndices`].
#[derive(Clone, Debug)]
struct Runs {
    order: Order,
    /// The positions of the batch whose records were not looked up yet.
    rest: BatchIndices,
    /// The next range, if it is already known. It does not touch the one before it.
    next: Option<Range<u64>>,
}

impl Runs {
    /// Returns the first records of the rest, at most to the end of the chunk, and takes them off the rest.
    fn piece(&mut self) -> Option<Range<u64>> {
        let Self { order, rest, .. } = self;
        if rest.start == rest.end {
            return None;
        }
        let records = rest.list.len();
        let position = match rest.stretch() {
            Some(found) => found.position,
            // A position after those that are left wraps around to the front of the order.
            None => (rest.start - rest.left()) % records,
        };
        // No seam is within these positions: only windows have seams, and their records are found one by one.
        let wanted = rest.len().min(records - position);
        let one = |record| record..record + 1;
        let piece = match order {
            Order::Same => position..position + wanted,
            Order::Chunks(chunks) => {
                let chunk = chunks.from(position);
                chunk.start..chunk.start + wanted.min(chunk.end - chunk.start)
            }
            Order::Records(order) => one(order.at(position)),
            Order::Windows(order) => one(order.record(position)),
        };
        let run = rest.list.run(piece);
        rest.start += run.end - run.start;
        Some(run)
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

/// How the records of an epoch are shuffled.
///
/// The shuffle, the seed, the epoch and the number of records determine the order. With [`Shuffle::Window`], the number
/// of ranks, the batch size and [`PlanBuilder::steps`](super::PlanBuilder::steps) also affect it. The order does not
/// depend on threads, depth or timing. It is the same on every platform.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", deny_unknown_fields)
)]
pub enum Shuffle {
    /// No shuffle: every epoch visits the records in the order of the files, or of the plan's list.
    #[default]
    None,
    /// Shuffles chunks of consecutive records, or of consecutive positions of the plan's list. The order inside a chunk
    /// stays the same.
    ///
    /// The disk reads long contiguous ranges. Records of one chunk stay together: a batch that is not larger than a
    /// chunk contains consecutive records from only a few chunks. The last chunk may be shorter, and is shuffled
    /// like the others.
    Chunks {
        /// The number of records in a chunk, at least 1.
        records: u64,
    },
    /// Shuffles records within a sliding window of chunks in memory.
    ///
    /// Chunks enter the window in a random order that spreads them over the files. The shuffle draws one chunk's worth
    /// of records evenly from the chunks in the window, then the window advances by one chunk. Each epoch draws the
    /// chunk boundaries, the order of the chunks and the order of the records anew. If the window holds all chunks of a
    /// rank, the rank's records are fully shuffled.
    ///
    /// If memory holds one window plus the chunks being read, the disk reads each chunk about once per epoch over all
    /// ranks. The number of chunks in a window determines the quality of the shuffle: with the same memory, many small
    /// chunks mix better than a few large chunks. Start with chunks of 128 to 256 KiB (large enough to keep a disk busy
    /// if many are in flight), and four times as many chunks as a batch has records. This is close to a full shuffle
    /// even if the files are sorted by class.
    Window {
        /// The number of records in a chunk, at least 1.
        chunk_records: u64,
        /// The number of chunks in a window, at least 1.
        window_chunks: u64,
    },
    /// Shuffles all records individually.
    Full,
}

impl Shuffle {
    /// The number of records in a chunk of a window, and of chunks in a window. Zeros for other shuffles than
    /// [`Window`](Self::Window).
    pub(crate) const fn window(self) -> (u64, u64) {
        match self {
            Self::Window { chunk_records, window_chunks } => (chunk_records, window_chunks),
            _ => (0, 0),
        }
    }
}

/// The order of [`Shuffle::Chunks`]: the chunks in random order, and the records of each chunk in order.
#[derive(Clone, Debug)]
struct ShuffledChunks {
    records: u64,
    /// Records in a chunk.
    chunk: u64,
    order: Permutation,
    /// The place of the last chunk of the data set. That chunk may be shorter than the others.
    last: u64,
    /// The chunk that `order` has at `last`. It goes to the place where `order` has the last chunk.
    displaced: u64,
}

impl ShuffledChunks {
    /// For `records` records in chunks of `chunk`; both at least 1.
    fn new(records: u64, chunk: u64, key: Key) -> Self {
        let chunks = records.div_ceil(chunk);
        let order = Permutation::new(chunks, key);
        // Draw the place of the last, shorter chunk at random, instead of searching `order` for it: the record of every
        // position depends on this place.
        let last = key.of(0).below(chunks);
        let displaced = order.at(last);
        Self { records, chunk, order, last, displaced }
    }

    /// The records from `position` to the end of its chunk.
    fn from(&self, position: u64) -> Range<u64> {
        let &Self { records, chunk, last, .. } = self;
        // The last chunk may be shorter: count positions up to its end from 0, and later ones from its end.
        let short = (records - 1) % chunk + 1;
        let past = last * chunk + short;
        let (place, within) = match position.checked_sub(past) {
            None => (position / chunk, position % chunk),
            Some(past) => (last + 1 + past / chunk, past % chunk),
        };
        let start = self.at(place) * chunk;
        start + within..records.min(start.saturating_add(chunk))
    }

    /// Returns the chunk at a place.
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

/// Completed steps of an epoch with one batch size and one number of ranks. A state of Python's `Loader` lists the
/// fields in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct PartialEpoch {
    /// The number of records in a batch of one rank.
    pub batch: u64,
    /// The number of ranks.
    pub world: u64,
    /// The number of steps that all ranks completed.
    pub steps: u64,
}

/// Where a part of an epoch ended at each rank, for an order that gives each rank a separate share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Seam {
    /// The number of shares in the part, one for each rank.
    pub(super) world: u64,
    /// The number of positions in a share.
    pub(super) share: u64,
    /// How many positions of each share the part visited.
    pub(super) done: u64,
    /// The number of positions that were left after the part.
    pub(super) left: u64,
}

impl Seam {
    /// Converts a position among those that were left after the part to a position among those before the part. Counts
    /// only the neighbors that were neighbors before the part, too.
    fn before(&self, Stretch { position: at, back, ahead }: Stretch) -> Stretch {
        let Self { world, share, done, left } = *self;
        let each = share - done;
        if at < each * world {
            let (rank, within) = (at / each, at % each);
            let position = rank * share + done + within;
            Stretch { position, back: back.min(within), ahead: ahead.min(each - within) }
        } else {
            let position = at + world * done;
            Stretch { position, back: back.min(at - each * world), ahead: ahead.min(left - at) }
        }
    }
}

/// A position, and how many of its neighbors follow each other in the epoch's order.
struct Stretch {
    /// The position in the epoch's order.
    position: u64,
    /// The number of neighbors before the position.
    back: u64,
    /// The number of neighbors from the position on, including it.
    ahead: u64,
}
