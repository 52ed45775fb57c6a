//! The builder of a plan.

use super::{LastBatch, PartialEpoch, Plan, RecordList, Shuffle};

/// The most batch sizes of a plan.
const MAX_SIZES: usize = 16;

/// Builds a [`Plan`]. [`Plan::builder`] and [`Plan::from_env`] return it.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct PlanBuilder {
    /// All options but the batch sizes.
    pub(super) plan: Plan,
    /// The batch sizes that were given, up to one more than allowed.
    pub(super) sizes: Vec<(u64, u64)>,
    /// Whether a seed was given.
    pub(super) seeded: bool,
}

impl PlanBuilder {
    /// Sets the number of records in a batch of one rank, at least 1. Default: 1.
    pub fn batch(self, records: u64) -> Self {
        self.batches([(u64::MAX, records)])
    }

    /// Sets batch sizes that change during the training. Each of the 1 to 16 pairs is a number of
    /// steps and the number of records in a batch of one rank during these steps. The last size
    /// applies until the training ends, and its number of steps is ignored. Other pairs with 0
    /// steps are ignored. [`build`](Self::build) returns [`PlanError::BatchSizes`] for no pairs or
    /// more than 16, and [`PlanError::ZeroBatch`] if a size that is not ignored is 0.
    ///
    /// Steps are counted over all epochs. If the size changes within an epoch, the remaining records of the epoch form
    /// batches of the new size. The change itself drops and repeats no record, as in [`Plan::resume`].
    ///
    /// ```
    /// use twinbuf_mmap::Plan;
    ///
    /// let plan = Plan::builder(1000).batches([(10, 32), (4, 64), (u64::MAX, 128)]).build()?;
    /// let sizes = |epoch| (0..).map_while(|step| Some(plan.batch(epoch, step)?.len())).collect::<Vec<_>>();
    /// assert_eq!(sizes(0), [[32; 10].as_slice(), &[64; 4], &[128; 3]].concat());
    /// assert_eq!(sizes(1), [128; 7]);
    /// # Ok::<(), twinbuf_mmap::PlanError>(())
    /// ```
    pub fn batches(mut self, sizes: impl IntoIterator<Item = (u64, u64)>) -> Self {
        // Keep one size more than allowed: `build` then refuses the schedule.
        self.sizes = sizes.into_iter().take(MAX_SIZES + 1).collect();
        self
    }

    /// Sets which records of the data set the plan visits: a range, or any list of numbers. Default: all.
    pub fn records(mut self, records: impl Into<RecordList>) -> Self {
        self.plan.list = records.into();
        self.plan.records = self.plan.list.len();
        self
    }

    /// Sets the number of steps in an epoch, at least 1: the epoch takes the first records of its order. With a
    /// shuffle, other epochs can visit the rest. Default: as many as the records and [`LastBatch`] give.
    ///
    /// With [`LastBatch::Wrap`], an epoch may have more steps than the records fill: its order starts again at the
    /// front. Otherwise [`build`](Self::build) fails with [`PlanError::TooManySteps`] or [`PlanError::NoStep`]. To
    /// shuffle the repeated records too, make a list that has them several times.
    ///
    /// ```
    /// use twinbuf_mmap::{Plan, Shuffle};
    ///
    /// let plan = Plan::builder(1_000_000).batch(100).shuffle(Shuffle::Full).steps(250).build()?;
    /// assert_eq!(plan.steps(0), 250);
    /// # Ok::<(), twinbuf_mmap::PlanError>(())
    /// ```
    pub const fn steps(mut self, steps: u64) -> Self {
        self.plan.steps = Some(steps);
        self
    }

    /// Sets how the records of an epoch are shuffled. Default: [`Shuffle::None`].
    pub const fn shuffle(mut self, shuffle: Shuffle) -> Self {
        self.plan.shuffle = shuffle;
        self
    }

    /// Sets the seed of the shuffle. Default: 0. With [`Shuffle::None`], setting a seed makes [`build`](Self::build)
    /// fail.
    pub const fn seed(mut self, seed: u64) -> Self {
        (self.plan.seed, self.seeded) = (seed, true);
        self
    }

    /// Sets the rank, from 0, and the number of ranks (world size). Default: rank 0 of 1.
    pub const fn rank(mut self, rank: u64, world: u64) -> Self {
        (self.plan.rank, self.plan.world) = (rank, world);
        self
    }

    /// Sets how to handle records that do not fill the last step. Default: [`LastBatch::Drop`].
    pub const fn last_batch(mut self, last_batch: LastBatch) -> Self {
        self.plan.last_batch = last_batch;
        self
    }

    /// Checks the options and builds the plan.
    ///
    /// # Errors
    ///
    /// - [`PlanError::NoRecords`], [`PlanError::ZeroBatch`], [`PlanError::ZeroChunk`], [`PlanError::ZeroWindow`],
    ///   [`PlanError::ZeroSteps`]: a count is 0.
    /// - [`PlanError::BatchSizes`]: [`batches`](Self::batches) got no sizes, or more than 16.
    /// - [`PlanError::RangeTooLarge`]: a record has the number 2^64 - 1.
    /// - [`PlanError::SeedWithoutShuffle`]: a seed was set with [`Shuffle::None`].
    /// - [`PlanError::Rank`]: the rank is not less than the world size.
    /// - [`PlanError::NoStep`]: with [`LastBatch::Drop`] and one of the batch sizes, the records do not fill one step
    ///   of all ranks.
    /// - [`PlanError::TooManySteps`]: without [`LastBatch::Wrap`], the records do not fill the
    ///   [`steps`](Self::steps) of an epoch with one of the batch sizes.
    /// - [`PlanError::StepTooLarge`]: with [`LastBatch::Wrap`] and one of the batch sizes, the records of one step of
    ///   all ranks, or of all [`steps`](Self::steps) that were set, plus those of the plan exceed 2^64 - 1.
    pub fn build(self) -> Result<Plan, PlanError> {
        let Self { mut plan, mut sizes, seeded } = self;
        if !(1..=MAX_SIZES).contains(&sizes.len()) {
            return Err(PlanError::BatchSizes);
        }
        if seeded && plan.shuffle == Shuffle::None {
            return Err(PlanError::SeedWithoutShuffle { seed: plan.seed });
        }
        plan.batch = sizes.pop().map_or(0, |(_, batch)| batch);
        sizes.retain(|&(steps, _)| steps > 0);
        plan.early = sizes;
        plan.checked()
    }
}

/// Why a [`Plan`] cannot be built, loaded or resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The plan has no records.
    #[error("a plan needs at least one record, found 0")]
    NoRecords,
    /// The batch size is 0.
    #[error("a batch needs at least one record, found 0")]
    ZeroBatch,
    /// A schedule of [`PlanBuilder::batches`] has no sizes, or more than 16.
    #[error("a schedule needs 1 to {MAX_SIZES} batch sizes")]
    BatchSizes,
    /// The chunk size of [`Shuffle::Chunks`] or [`Shuffle::Window`] is 0.
    #[error("a chunk needs at least one record, found 0")]
    ZeroChunk,
    /// The number of chunks in a window of [`Shuffle::Window`] is 0.
    #[error("a window needs at least one chunk, found 0")]
    ZeroWindow,
    /// The number of steps in an epoch is 0.
    #[error("an epoch needs at least one step, found 0")]
    ZeroSteps,
    /// The records do not fill the steps of an epoch ([`PlanBuilder::steps`]).
    #[error(
        "{steps} steps of {world} ranks need {batch} records for each in every step, found {records} in all: take \
        fewer steps, or repeat the records with `LastBatch::Wrap` or in the list"
    )]
    TooManySteps {
        /// The number of steps.
        steps: u64,
        /// The number of records.
        records: u64,
        /// The number of records in a batch of one rank.
        batch: u64,
        /// The number of ranks.
        world: u64,
    },
    /// A seed was set, but the shuffle is [`Shuffle::None`].
    #[error(
        "the seed {seed} has no effect, because the plan does not shuffle: set `shuffle`, or leave out the seed"
    )]
    SeedWithoutShuffle {
        /// The seed.
        seed: u64,
    },
    /// A record has the number 2^64 - 1, which no data set has. Or, in a saved plan, `first` and `step` give the last
    /// record this number or a larger one.
    #[error("{records} records from {first} on end past 2^64")]
    RangeTooLarge {
        /// The record 2^64 - 1, or `first` of the saved plan.
        first: u64,
        /// The number of records from `first` on: 1, or `records` of the saved plan.
        records: u64,
    },
    /// The rank is not less than the world size, or the world size is 0.
    #[error("the rank must be below the world size {world}, found {rank}")]
    Rank {
        /// The rank.
        rank: u64,
        /// The world size.
        world: u64,
    },
    /// With [`LastBatch::Drop`], the records do not fill one step of all ranks.
    #[error(
        "one step of {world} ranks needs {batch} records for each, found {records} in all: take a smaller batch, or \
        keep the last batch"
    )]
    NoStep {
        /// The number of records in the plan.
        records: u64,
        /// The number of records in a batch of one rank.
        batch: u64,
        /// The number of ranks.
        world: u64,
    },
    /// With [`LastBatch::Wrap`], the records of one step of all ranks, or of all
    /// [`steps`](PlanBuilder::steps) that were set, plus those of the plan exceed 2^64 - 1.
    #[error(
        "one step of {world} ranks needs {batch} records for each: together with the data set more than 2^64"
    )]
    StepTooLarge {
        /// The number of records in a batch of one rank.
        batch: u64,
        /// The number of ranks.
        world: u64,
    },
    /// A part passed to [`Plan::resume`] has more steps than the records that remained before it,
    /// or [`PlanBuilder::steps`], allow; or it has steps and its batch size or number of ranks is 0.
    #[error(
        "{} steps of {} ranks with {} records for each do not fit into the {left} records that were left",
        part.steps, part.world, part.batch
    )]
    PartialEpoch {
        /// The part.
        part: PartialEpoch,
        /// The number of records that remained before the part.
        left: u64,
    },
}
