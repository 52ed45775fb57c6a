//! Which records a rank reads at which step: a pure function of seed, epoch, rank, world size and step.

use std::fmt;
use std::iter::FusedIterator;
use std::ops::Range;

use crate::permute::Permutation;

/// In which order an epoch visits the records.
///
/// The two shuffled orders are keyed by the seed and the epoch, and by nothing else: no thread, depth or
/// timing enters, and the numbers are the same on every platform and in every version of this crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", deny_unknown_fields)
)]
pub enum Order {
    /// The order of the files, the same in every epoch.
    #[default]
    Sequential,
    /// Chunks of consecutive records are shuffled; inside a chunk the order stays.
    ///
    /// The disk still reads long stretches, so this is the shuffle for records far smaller than a
    /// megabyte. The last chunk may be shorter, and is shuffled like the others.
    Chunks {
        /// Records in a chunk, at least 1.
        records: u64,
    },
    /// Every record is shuffled on its own.
    Records,
}

/// What becomes of the records that do not fill a last step of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", deny_unknown_fields)
)]
pub enum Tail {
    /// They are left out of this epoch, and every rank has the same number of steps. A shuffled order
    /// leaves out other ones in the next epoch.
    #[default]
    Drop,
    /// They are split evenly over the ranks as one last, smaller batch.
    ///
    /// When fewer remain than there are ranks, the ranks past the last record have **one step fewer**. A
    /// loop with a collective in every step (an all-reduce, a barrier) would wait for them for ever: let
    /// those ranks join with an empty contribution, or use [`Tail::Drop`].
    Keep,
    /// The last step is filled up from the front of the same epoch's order, again and again if that is
    /// shorter than a step. Every rank has the same number of whole batches, no record is left out, and
    /// those at the front are seen twice: fewer than one step of all ranks.
    Wrap,
}

/// The order of the records of every epoch, cut into batches and split over ranks.
///
/// A `Plan` is a value of a few words. It holds no table and allocates nothing; any batch of any epoch is
/// found in O(1), which is also what makes resuming at a step free.
///
/// With `p` for the position in the epoch's order, step `s` of rank `r` covers the `batch` positions from
/// `(s * world + r) * batch` on. All ranks together walk through the epoch front to back, so a change of
/// the world size at a step boundary can continue from the same position.
///
/// ```
/// use twinbuf_mmap::{Order, Plan, Tail};
///
/// // Ten records, batches of two, two ranks: two full steps each, and two records remain.
/// let plan = Plan::builder(10).batch(2).shard(1, 2).tail(Tail::Keep).build()?;
/// let runs = |step| plan.batch(0, step).map(|batch| batch.runs().collect::<Vec<_>>());
/// assert_eq!(plan.steps(), 3);
/// assert_eq!(runs(0), Some(vec![2..4]));
/// assert_eq!(runs(1), Some(vec![6..8]));
/// assert_eq!(runs(2), Some(vec![9..10]));
/// assert_eq!(runs(3), None);
///
/// let shuffled = Plan::builder(10).batch(5).order(Order::Records).seed(1).build()?;
/// assert_ne!(shuffled.batch(0, 0), shuffled.batch(1, 0));
/// # Ok::<(), twinbuf_mmap::PlanError>(())
/// ```
///
/// # Saved plans
///
/// With the feature `serde`, a plan can be saved, for example with a model, and restored. These names are a
/// format that later versions of this crate read too:
///
/// | field | is |
/// | --- | --- |
/// | `records` | [`records`](Self::records) |
/// | `batch` | [`batch_records`](Self::batch_records) |
/// | `seed` | [`seed`](Self::seed) |
/// | `order` | `sequential`, `records`, or `chunks` with its own field `records`: [`Order`] |
/// | `rank`, `world` | [`rank`](Self::rank), [`world`](Self::world) |
/// | `tail` | `drop`, `keep` or `wrap`: [`Tail`] |
///
/// ```json
/// {"records":1000,"batch":10,"seed":7,"order":{"chunks":{"records":50}},"rank":1,"world":4,"tail":"keep"}
/// ```
///
/// All of them must be there and no others, and a plan that [`PlanBuilder::build`] refuses is refused in the
/// words of [`PlanError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "crate::saved::Saved")
)]
pub struct Plan {
    records: u64,
    batch: u64,
    seed: u64,
    order: Order,
    rank: u64,
    world: u64,
    tail: Tail,
}

impl Plan {
    /// Starts a plan over `records` records, at least 1.
    ///
    /// Unless said otherwise: batches of one record, [`Order::Sequential`], seed 0, rank 0 of 1,
    /// [`Tail::Drop`].
    pub fn builder(records: u64) -> PlanBuilder {
        PlanBuilder(Plan {
            records,
            batch: 1,
            seed: 0,
            order: Order::default(),
            rank: 0,
            world: 1,
            tail: Tail::default(),
        })
    }

    /// Records in the data set.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.records
    }

    /// Records in a full batch of one rank.
    #[must_use]
    pub const fn batch_records(&self) -> u64 {
        self.batch
    }

    /// The seed of the shuffled orders.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// The order of an epoch.
    #[must_use]
    pub const fn order(&self) -> Order {
        self.order
    }

    /// The rank whose batches these are, below [`world`](Self::world).
    #[must_use]
    pub const fn rank(&self) -> u64 {
        self.rank
    }

    /// The number of ranks that share an epoch.
    #[must_use]
    pub const fn world(&self) -> u64 {
        self.world
    }

    /// What becomes of the records that do not fill a last step.
    #[must_use]
    pub const fn tail(&self) -> Tail {
        self.tail
    }

    /// Steps of this rank in an epoch; the same in every epoch.
    ///
    /// With [`Tail::Drop`] and [`Tail::Wrap`] it is the same for every rank and at least 1. With
    /// [`Tail::Keep`] two ranks may differ by one, and it is 0 for a rank past the last record of a data set
    /// smaller than the world.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.full_steps() + u64::from(self.last_batch().is_some())
    }

    /// The records of this rank at `step` of `epoch`, or `None` past the end of the epoch.
    #[must_use]
    pub fn batch(&self, epoch: u64, step: u64) -> Option<BatchPlan> {
        let full = self.full_steps();
        let positions = if step < full {
            self.whole_batch(step)
        } else if step == full {
            self.last_batch()?
        } else {
            return None;
        };
        let &Plan { records, seed, order, .. } = self;
        Some(BatchPlan { records, seed, order, epoch, start: positions.start, end: positions.end })
    }

    /// Steps in which every rank has a whole batch.
    fn full_steps(&self) -> u64 {
        // A step larger than 2^64 records is larger than any data set.
        self.batch.checked_mul(self.world).map_or(0, |step| self.records / step)
    }

    /// The positions of a batch that is not the smaller one at the end.
    fn whole_batch(&self, step: u64) -> Range<u64> {
        // A full step ends at or before the last record, and one more is checked by the builder where it can
        // be asked for: these products do not overflow.
        let start = (step * self.world + self.rank) * self.batch;
        start..start + self.batch
    }

    /// The positions of the batch after the full steps, if this rank has one.
    fn last_batch(&self) -> Option<Range<u64>> {
        let full = self.full_steps();
        let done = full * self.batch.saturating_mul(self.world);
        let remaining = self.records - done;
        match self.tail {
            Tail::Drop => return None,
            Tail::Wrap => return (remaining > 0).then(|| self.whole_batch(full)),
            Tail::Keep => {}
        }
        let (each, extra) = (remaining / self.world, remaining % self.world);
        // At most `remaining` positions lie before this rank's: no overflow.
        let start = done + self.rank * each + self.rank.min(extra);
        let len = each + u64::from(self.rank < extra);
        (len > 0).then(|| start..start + len)
    }
}

/// Sets up a [`Plan`]; made by [`Plan::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct PlanBuilder(Plan);

impl PlanBuilder {
    /// Records in a batch of one rank, at least 1. The default is 1.
    pub const fn batch(mut self, records: u64) -> Self {
        self.0.batch = records;
        self
    }

    /// The seed of the shuffled orders. The default is 0, which shuffles as well as any other.
    pub const fn seed(mut self, seed: u64) -> Self {
        self.0.seed = seed;
        self
    }

    /// The order of an epoch. The default is [`Order::Sequential`].
    pub const fn order(mut self, order: Order) -> Self {
        self.0.order = order;
        self
    }

    /// Plans for rank `rank` of `world` ranks. The default is rank 0 of 1.
    pub const fn shard(mut self, rank: u64, world: u64) -> Self {
        (self.0.rank, self.0.world) = (rank, world);
        self
    }

    /// What becomes of the records that do not fill a last step. The default is [`Tail::Drop`].
    pub const fn tail(mut self, tail: Tail) -> Self {
        self.0.tail = tail;
        self
    }

    /// Checks the numbers and makes the plan.
    ///
    /// # Errors
    ///
    /// A count that is zero, a rank not below the world size, and a data set that with [`Tail::Drop`] does
    /// not fill one step: every epoch of it would be empty. See [`PlanError`].
    pub fn build(self) -> Result<Plan, PlanError> {
        let plan = self.0;
        let Plan { records, batch, rank, world, .. } = plan;
        if records == 0 {
            Err(PlanError::NoRecords)
        } else if batch == 0 {
            Err(PlanError::ZeroBatch)
        } else if plan.order == (Order::Chunks { records: 0 }) {
            Err(PlanError::ZeroChunk)
        } else if rank >= world {
            Err(PlanError::Rank { rank, world })
        } else if plan.tail == Tail::Drop && plan.full_steps() == 0 {
            Err(PlanError::NoStep { records, batch, world })
        } else if plan.tail == Tail::Wrap
            && batch.checked_mul(world).and_then(|step| step.checked_add(records)).is_none()
        {
            Err(PlanError::StepTooLarge { batch, world })
        } else {
            Ok(plan)
        }
    }
}

/// Why there is no such [`Plan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// The data set has no records.
    NoRecords,
    /// A batch has no records.
    ZeroBatch,
    /// A chunk of [`Order::Chunks`] has no records.
    ZeroChunk,
    /// The rank is not below the world size, or the world size is 0.
    Rank {
        /// The rank that was given.
        rank: u64,
        /// The world size that was given.
        world: u64,
    },
    /// With [`Tail::Drop`], the records do not fill one step of all ranks.
    NoStep {
        /// Records in the data set.
        records: u64,
        /// Records in a batch of one rank.
        batch: u64,
        /// The number of ranks.
        world: u64,
    },
    /// With [`Tail::Wrap`], the positions of a step that goes past the end do not fit 64 bits.
    StepTooLarge {
        /// Records in a batch of one rank.
        batch: u64,
        /// The number of ranks.
        world: u64,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRecords => write!(f, "a plan needs at least one record, found 0"),
            Self::ZeroBatch => write!(f, "a batch needs at least one record, found 0"),
            Self::ZeroChunk => write!(f, "a chunk needs at least one record, found 0"),
            Self::Rank { rank, world } => {
                write!(f, "the rank must be below the world size {world}, found {rank}")
            }
            Self::NoStep { records, batch, world } => write!(
                f,
                "one step of {world} ranks needs {batch} records for each, found {records} in all: \
                 take a smaller batch, or keep the tail",
            ),
            Self::StepTooLarge { batch, world } => write!(
                f,
                "one step of {world} ranks needs {batch} records for each: together with the data set more \
                 than 2^64",
            ),
        }
    }
}

impl std::error::Error for PlanError {}

/// The records of one rank at one step, in the order in which they are read. It holds at least one.
///
/// A batch is a few words that name the records; it holds none of their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::len_without_is_empty, reason = "a batch holds at least one record")]
pub struct BatchPlan {
    records: u64,
    seed: u64,
    order: Order,
    epoch: u64,
    /// Positions in the epoch's order, `start < end`. Past the last record they start again at the first.
    start: u64,
    end: u64,
}

impl BatchPlan {
    /// Records in this batch, at least 1.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.end - self.start
    }

    /// The records at these positions of the batch, in its order, or `None` if there are none or the batch
    /// has no such positions. Takes O(1).
    ///
    /// ```
    /// use twinbuf_mmap::{Order, Plan};
    ///
    /// let plan = Plan::builder(1000).batch(100).order(Order::Records).build()?;
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
            ..*self
        })
    }

    /// The records as ranges of consecutive ones, in batch order.
    ///
    /// A range that begins where the one before it ends is joined to it, so a sequential batch is one range.
    /// Each range takes O(1) for every chunk in it.
    pub fn runs(&self) -> Runs {
        let shuffle = match self.order {
            Order::Sequential => None,
            Order::Chunks { records } => Some(Shuffle::new(self, records)),
            Order::Records => Some(Shuffle::new(self, 1)),
        };
        Runs { shuffle, records: self.records, at: self.start, end: self.end, next: None }
    }
}

/// The ranges of consecutive records of a [`BatchPlan`]; made by [`BatchPlan::runs`].
#[derive(Clone, Debug)]
#[must_use = "an iterator does nothing until it is used"]
pub struct Runs {
    shuffle: Option<Shuffle>,
    /// Records in the data set.
    records: u64,
    /// Positions still to be turned into records.
    at: u64,
    end: u64,
    /// A range that was found not to touch the one before it.
    next: Option<Range<u64>>,
}

impl Runs {
    /// The records from position `at` to the end of its chunk or of the batch.
    fn piece(&mut self) -> Option<Range<u64>> {
        if self.at == self.end {
            return None;
        }
        let position = self.at % self.records;
        let wanted = (self.end - self.at).min(self.records - position);
        let piece = match &self.shuffle {
            None => position..position + wanted,
            Some(shuffle) => {
                let chunk = shuffle.from(position);
                chunk.start..chunk.start + wanted.min(chunk.end - chunk.start)
            }
        };
        self.at += piece.end - piece.start;
        Some(piece)
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

/// Shuffled chunks of consecutive records.
#[derive(Clone, Debug)]
struct Shuffle {
    permutation: Permutation,
    /// Records in a chunk.
    chunk: u64,
    /// Positions of the last chunk of the data set, which may be shorter than the others.
    short: Range<u64>,
}

impl Shuffle {
    fn new(batch: &BatchPlan, chunk: u64) -> Self {
        let chunks = batch.records.div_ceil(chunk);
        let permutation = Permutation::new(chunks, batch.seed, batch.epoch);
        // Only whole chunks precede the short one, and all of them together are fewer than the records.
        let start = permutation.inverse(chunks - 1) * chunk;
        let len = batch.records - (chunks - 1) * chunk;
        Self { permutation, chunk, short: start..start + len }
    }

    /// The records from `position` to the end of its chunk.
    fn from(&self, position: u64) -> Range<u64> {
        let Self { permutation, chunk, short } = self;
        // Past the short chunk everything stands earlier by what that chunk lacks; count from its end.
        let (slot, within, len) = if position < short.start {
            (position / chunk, position % chunk, *chunk)
        } else if position < short.end {
            (short.start / chunk, position - short.start, short.end - short.start)
        } else {
            let past = position - short.end;
            (short.start / chunk + 1 + past / chunk, past % chunk, *chunk)
        };
        let start = permutation.forward(slot) * chunk;
        start + within..start + len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn records(batch: BatchPlan) -> impl Iterator<Item = u64> {
        batch.runs().flatten()
    }

    /// The first batch of a plan that has it in one run.
    fn only_run(plan: Plan) -> Range<u64> {
        let mut runs = plan.batch(0, 0).unwrap().runs();
        let run = runs.next().unwrap();
        assert_eq!(runs.next(), None);
        run
    }

    fn epoch(plan: Plan, epoch: u64) -> Vec<u64> {
        (0..plan.steps()).flat_map(|step| records(plan.batch(epoch, step).unwrap())).collect()
    }

    #[test]
    fn every_refusal() {
        let of = |records| Plan::builder(records);
        let refused = [
            (of(0), PlanError::NoRecords, "a plan needs at least one record, found 0"),
            (of(1).batch(0), PlanError::ZeroBatch, "a batch needs at least one record, found 0"),
            (
                of(1).order(Order::Chunks { records: 0 }),
                PlanError::ZeroChunk,
                "a chunk needs at least one record, found 0",
            ),
            (
                of(9).shard(3, 3),
                PlanError::Rank { rank: 3, world: 3 },
                "the rank must be below the world size 3, found 3",
            ),
            (
                of(9).shard(0, 0),
                PlanError::Rank { rank: 0, world: 0 },
                "the rank must be below the world size 0, found 0",
            ),
            (
                of(9).batch(5).shard(0, 2),
                PlanError::NoStep { records: 9, batch: 5, world: 2 },
                "one step of 2 ranks needs 5 records for each, found 9 in all: take a smaller batch, or \
                 keep the tail",
            ),
            (
                of(9).batch(1 << 32).shard(0, 1 << 32).tail(Tail::Wrap),
                PlanError::StepTooLarge { batch: 1 << 32, world: 1 << 32 },
                "one step of 4294967296 ranks needs 4294967296 records for each: together with the data \
                 set more than 2^64",
            ),
        ];
        for (builder, error, message) in refused {
            assert_eq!(builder.build(), Err(error));
            assert_eq!(error.to_string(), message);
        }
    }

    #[test]
    fn the_largest_numbers() {
        let all = u64::MAX;
        let whole = Plan::builder(all).batch(all).build().unwrap();
        assert_eq!((whole.steps(), whole.batch(all, 0).unwrap().len()), (1, all));
        assert_eq!(only_run(whole), 0..all);
        assert_eq!(whole.batch(0, all), None);

        let builder = Plan::builder(all).batch(all).shard(all - 1, all);
        assert!(matches!(builder.clone().build(), Err(PlanError::NoStep { .. })));
        let last = builder.tail(Tail::Keep).build().unwrap();
        assert_eq!(last.steps(), 1);
        assert_eq!(only_run(last), all - 1..all);

        // Two chunks, the second of one record: they come in this order or in the other.
        let chunked = Plan::builder(all).order(Order::Chunks { records: all - 1 }).build().unwrap();
        let ends: std::collections::BTreeSet<_> = (0..64)
            .map(|epoch| {
                [0, all - 1].map(|step| chunked.batch(epoch, step).unwrap().runs().next().unwrap().start)
            })
            .collect();
        assert!(ends.into_iter().eq([[0, all - 1], [all - 1, all - 2]]));
        let shuffled = Plan::builder(all).order(Order::Records).build().unwrap();
        assert!(records(shuffled.batch(all, all - 1).unwrap()).all(|record| record < all));
    }

    #[test]
    fn the_ranks_walk_through_the_epoch_together() {
        let steps = |rank| {
            let plan = Plan::builder(17).batch(2).shard(rank, 3).tail(Tail::Keep).build().unwrap();
            (0..plan.steps())
                .map(|step| plan.batch(0, step).unwrap().runs().next().unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(steps(0), [0..2, 6..8, 12..14]);
        assert_eq!(steps(1), [2..4, 8..10, 14..16]);
        assert_eq!(steps(2), [4..6, 10..12, 16..17]);
    }

    #[test]
    fn a_rank_past_the_last_record_has_a_step_fewer() {
        let steps = |rank| {
            Plan::builder(14).batch(3).shard(rank, 4).tail(Tail::Keep).build().map(|plan| plan.steps())
        };
        assert_eq!([steps(0), steps(1), steps(2), steps(3)], [Ok(2), Ok(2), Ok(1), Ok(1)]);
    }

    /// Record 9 is a chunk of its own; in the first epochs of this seed it comes at several places.
    #[test]
    fn a_short_chunk_in_the_middle_shifts_what_follows() {
        let plan = Plan::builder(10).order(Order::Chunks { records: 3 }).seed(5).build().unwrap();
        let orders: Vec<Vec<u64>> = (0..8).map(|e| epoch(plan, e)).collect();
        let places: std::collections::BTreeSet<usize> =
            orders.iter().map(|order| order.iter().position(|&record| record == 9).unwrap()).collect();
        assert!(places.len() > 2 && places.iter().all(|place| place % 3 == 0), "{places:?}");
        for order in orders {
            for chunk in [[0, 1, 2], [3, 4, 5], [6, 7, 8]] {
                assert!(order.windows(3).any(|window| window == chunk), "{order:?}");
            }
        }
    }

    /// FNV-1a over the ends of all runs, each taken as one unit of 64 bits; the numbers come from a
    /// separate implementation in Python that lists every record.
    #[test]
    fn golden_hash_of_a_million_records() {
        for (order, golden) in [
            (Order::Records, 0x17b5_2d20_0ddf_f465_u64),
            (Order::Chunks { records: 999 }, 0x6719_4030_93ce_ab65),
        ] {
            let plan = Plan::builder(1_000_000).batch(1000).order(order).seed(42).build().unwrap();
            let mut hash = 0xcbf2_9ce4_8422_2325_u64;
            for step in 0..plan.steps() {
                for end in plan.batch(3, step).unwrap().runs().flat_map(|run| [run.start, run.end]) {
                    hash = (hash ^ end).wrapping_mul(0x0100_0000_01b3);
                }
            }
            assert_eq!(hash, golden, "{order:?}");
        }
    }

    fn any_order() -> impl Strategy<Value = Order> {
        prop_oneof![
            Just(Order::Sequential),
            (1_u64..200).prop_map(|records| Order::Chunks { records }),
            Just(Order::Records),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn keep_covers_every_record_once(
            (n, batch, world, order, seed, e)
                in (1_u64..2000, 1_u64..70, 1_u64..9, any_order(), any::<u64>(), any::<u64>())
        ) {
            let mut seen = Vec::new();
            let mut steps = Vec::new();
            for rank in 0..world {
                let plan = Plan::builder(n).batch(batch).seed(seed).order(order).shard(rank, world)
                    .tail(Tail::Keep).build().unwrap();
                seen.extend(epoch(plan, e));
                steps.push(plan.steps());
                prop_assert_eq!(plan.batch(e, plan.steps()), None);
            }
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..n));
            prop_assert!(steps.is_sorted_by(|a, b| a >= b) && steps[0] - steps[steps.len() - 1] <= 1);
        }

        #[test]
        fn drop_gives_every_rank_the_same_and_nothing_twice(
            (n, batch, world, order, seed, e)
                in (600_u64..2000, 1_u64..70, 1_u64..9, any_order(), any::<u64>(), any::<u64>())
        ) {
            let mut seen = Vec::new();
            for rank in 0..world {
                let plan = Plan::builder(n).batch(batch).seed(seed).order(order).shard(rank, world)
                    .build().unwrap();
                prop_assert_eq!(plan.steps(), n / (batch * world));
                let own = epoch(plan, e);
                prop_assert_eq!(own.len() as u64, plan.steps() * batch);
                seen.extend(own);
            }
            let count = seen.len();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), count);
            prop_assert!(seen.iter().all(|&record| record < n));
        }

        #[test]
        fn wrap_fills_the_last_step_from_the_front(
            (n, batch, world, order, seed, e)
                in (1_u64..900, 1_u64..70, 1_u64..9, any_order(), any::<u64>(), any::<u64>())
        ) {
            let plan = |rank| Plan::builder(n).batch(batch).seed(seed).order(order).shard(rank, world)
                .tail(Tail::Wrap).build().unwrap();
            let steps = n.div_ceil(batch * world);
            // The order of the epoch, as one rank sees it, again and again.
            let alone = Plan::builder(n).seed(seed).order(order).build().unwrap();
            let order: Vec<u64> = epoch(alone, e);
            let expected = order.iter().copied().cycle();
            let mut seen = Vec::new();
            for step in 0..steps {
                for rank in 0..world {
                    let of = plan(rank).batch(e, step).unwrap();
                    prop_assert_eq!(of.len(), batch);
                    seen.extend(records(of));
                }
            }
            prop_assert!((0..world).all(|rank| plan(rank).steps() == steps));
            prop_assert!(seen.iter().copied().eq(expected.take(seen.len())));
            prop_assert!((seen.len() as u64) - n < batch * world);
        }

        #[test]
        fn parts_are_the_whole(
            (n, batch, world, order, e)
                in (1_u64..900, 1_u64..500, 1_u64..4, any_order(), any::<u64>()),
            tail in prop_oneof![Just(Tail::Drop), Just(Tail::Keep), Just(Tail::Wrap)],
            rank in any::<u64>(),
            cuts in proptest::collection::vec(any::<u64>(), 0..6),
        ) {
            let plan = Plan::builder(n).batch(batch).seed(n).order(order).shard(rank % world, world)
                .tail(tail).build();
            prop_assume!(plan.is_ok());
            let plan = plan.unwrap();
            for step in 0..plan.steps() {
                let whole = plan.batch(e, step).unwrap();
                let len = whole.len();
                let mut ends: Vec<u64> = cuts.iter().map(|cut| cut % (len + 1)).collect();
                ends.extend([0, len]);
                ends.sort_unstable();
                let mut parts = Vec::new();
                for pair in ends.windows(2) {
                    match whole.part(pair[0]..pair[1]) {
                        Some(part) => {
                            prop_assert_eq!(part.len(), pair[1] - pair[0]);
                            // A part of a part is a part.
                            let last = part.part(part.len() - 1..part.len()).unwrap();
                            prop_assert!(records(last).eq(records(part).last()));
                            parts.extend(records(part));
                        }
                        None => prop_assert_eq!(pair[0], pair[1]),
                    }
                }
                prop_assert!(records(whole).eq(parts));
                prop_assert_eq!(whole.part(0..len), Some(whole));
                for past in [len..len + 1, 0..len + 1, len - 1..u64::MAX, u64::MAX - 1..u64::MAX] {
                    prop_assert_eq!(whole.part(past), None);
                }
                #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
                let backward = 1..0;
                prop_assert_eq!(whole.part(backward), None);
            }
        }

        #[test]
        fn runs_add_up_and_never_touch(
            (n, batch, order, seed, e) in (1_u64..2000, 1_u64..500, any_order(), any::<u64>(), any::<u64>())
        ) {
            let plan = Plan::builder(n).batch(batch).seed(seed).order(order).tail(Tail::Keep).build().unwrap();
            for step in 0..plan.steps() {
                let batch = plan.batch(e, step).unwrap();
                let runs: Vec<_> = batch.runs().collect();
                prop_assert_eq!(runs.iter().map(|run| run.end - run.start).sum::<u64>(), batch.len());
                prop_assert!(runs.iter().all(|run| run.start < run.end));
                prop_assert!(runs.windows(2).all(|pair| pair[0].end != pair[1].start));
            }
        }

        #[test]
        fn sequential_is_the_identity(n in 1_u64..3000, batch in 1_u64..100, e: u64) {
            let plan = Plan::builder(n).batch(batch).tail(Tail::Keep).build().unwrap();
            prop_assert!(epoch(plan, e).into_iter().eq(0..n));
            prop_assert!((0..plan.steps()).all(|step| plan.batch(e, step).unwrap().runs().count() == 1));
        }
    }
}
