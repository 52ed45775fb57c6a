//! Plans: the records that a rank reads at a step, as a pure function of the plan, the epoch and the step.

mod batch;
mod builder;
mod launch;
mod list;
mod permute;
mod remaining;
#[cfg(test)]
mod tests;
mod window;

use std::ops::Range;

pub use batch::{BatchIndices, PartialEpoch, Shuffle};
pub use builder::{PlanBuilder, PlanError};
pub use launch::RankError;
pub use list::RecordList;
pub use remaining::RemainingEpoch;
use window::Shares;

/// The order of the records in every epoch, divided into batches and ranks.
///
/// A `Plan` is a small value, except for a [`RecordList`] without a [`step`](RecordList::step). It computes any batch
/// of any epoch in O(1): to resume, start at another step. With a schedule of batch sizes
/// ([`PlanBuilder::batches`]), the time grows with the number of sizes, at most 16.
///
/// In each epoch, the shuffle puts positions in an order. The record of a position is the position itself, or the
/// number that the plan's [`RecordList`] has there. With one batch size, and without [`Shuffle::Window`], full step `s`
/// of rank `r` takes `batch` places of this order, from place `(s * world + r) * batch` on: all ranks together go
/// through the order.
///
/// With [`Shuffle::Window`], each rank has its own part of the order, which also depends on the number of ranks, the
/// batch size and [`PlanBuilder::steps`]. With one batch size, step `s` of rank `r` starts at place
/// `(r * full + s) * batch` if `s` is below `full`, the number of steps in which every rank has a whole batch and no
/// place comes again.
///
/// The number of ranks and the batch size may change between any two steps; see [`resume`](Self::resume).
///
/// ```
/// use twinbuf_mmap::{Shuffle, Plan, LastBatch};
///
/// // Ten records, batches of two, two ranks: two full steps each, and two records remain.
/// let plan = Plan::builder(10).batch(2).rank(1, 2).last_batch(LastBatch::Keep).build()?;
/// let runs = |step| plan.batch(0, step).map(|batch| batch.runs().collect::<Vec<_>>());
/// assert_eq!(plan.steps(0), 3);
/// assert_eq!(runs(0), Some(vec![2..4]));
/// assert_eq!(runs(1), Some(vec![6..8]));
/// assert_eq!(runs(2), Some(vec![9..10]));
/// assert_eq!(runs(3), None);
///
/// let shuffled = Plan::builder(10).batch(5).shuffle(Shuffle::Full).seed(1).build()?;
/// assert_ne!(shuffled.batch(0, 0), shuffled.batch(1, 0));
/// # Ok::<(), twinbuf_mmap::PlanError>(())
/// ```
///
/// # Saved plans
///
/// With the feature `serde`, a plan can be saved, for example with a model, and restored. The names of the fields are a
/// stable format, and later versions of this crate can read it. Use a format that writes them, such as JSON or CBOR: a
/// plan in one that does not, such as bincode, cannot be loaded.
///
/// | field | content |
/// | --- | --- |
/// | `first`, `records` | the first record, and the number of records |
/// | `step` | only for a list with a [`step`](RecordList::step) other than 1: that step |
/// | `list` | only for a list without a step: all its numbers |
/// | `batch` | the number of records in a batch; with a schedule, of its last size |
/// | `batches` | only with a schedule: the sizes before the last, as pairs of steps and records |
/// | `steps` | only with [`PlanBuilder::steps`]: the number of steps in an epoch |
/// | `seed` | [`seed`](Self::seed) |
/// | `shuffle` | `none`, `full`, `chunks` with a field `records`, or `window` with fields `chunk_records` and `window_chunks`: [`Shuffle`] |
/// | `rank`, `world` | [`rank`](Self::rank), [`world`](Self::world) |
/// | `last_batch` | `drop`, `keep` or `wrap`: [`LastBatch`] |
///
/// ```json
/// {"first":0,"records":1000,"batch":10,"seed":7,"shuffle":{"chunks":{"records":50}},"rank":1,"world":4,"last_batch":"keep"}
/// ```
///
/// The fields without *only* are required, and unknown fields are an error. If [`PlanBuilder::build`] would refuse the
/// plan, loading fails with the message of the [`PlanError`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "Saved", into = "Saved")
)]
pub struct Plan {
    list: RecordList,
    /// The number of positions in an epoch: all positions of the list, or those that are left of an epoch.
    records: u64,
    /// The number of records in a batch, after the steps of `early`.
    batch: u64,
    /// The earlier batch sizes of a schedule: for each, its number of steps, and the number of records in a batch.
    early: Vec<(u64, u64)>,
    /// The maximum number of steps in an epoch.
    steps: Option<u64>,
    seed: u64,
    shuffle: Shuffle,
    rank: u64,
    world: u64,
    last_batch: LastBatch,
}

impl Plan {
    /// Returns a builder for a plan over `records` records, at least 1.
    ///
    /// Defaults: batches of one record, [`Shuffle::None`], seed 0, rank 0 of 1, [`LastBatch::Drop`].
    pub fn builder(records: u64) -> PlanBuilder {
        let plan = Self {
            list: (0..records).into(),
            records,
            steps: None,
            batch: 1,
            early: Vec::new(),
            seed: 0,
            shuffle: Shuffle::None,
            rank: 0,
            world: 1,
            last_batch: LastBatch::Drop,
        };
        PlanBuilder { plan, sizes: vec![(u64::MAX, 1)], seeded: false }
    }

    /// Returns this plan for another rank or another number of ranks.
    ///
    /// # Errors
    ///
    /// [`PlanError::Rank`], [`PlanError::NoStep`], [`PlanError::TooManySteps`] or
    /// [`PlanError::StepTooLarge`], as for [`PlanBuilder::build`].
    ///
    /// ```
    /// use twinbuf_mmap::Plan;
    ///
    /// let mine = Plan::builder(1000).batch(10).rank(3, 8).build()?;
    /// let first = mine.with_rank(0, mine.world())?;
    /// assert_eq!((first.rank(), first.steps(0)), (0, mine.steps(0)));
    /// # Ok::<(), twinbuf_mmap::PlanError>(())
    /// ```
    pub fn with_rank(&self, rank: u64, world: u64) -> Result<Self, PlanError> {
        Self { rank, world, ..self.clone() }.checked()
    }

    /// Returns this plan over other records of the data set, for example to separate training and validation: a range,
    /// or any list of numbers ([`RecordList`]). Record indices stay the indices in the data set.
    ///
    /// # Errors
    ///
    /// [`PlanError::NoRecords`], [`PlanError::RangeTooLarge`], [`PlanError::NoStep`],
    /// [`PlanError::TooManySteps`] or [`PlanError::StepTooLarge`], as for [`PlanBuilder::build`].
    ///
    /// ```
    /// use twinbuf_mmap::Plan;
    ///
    /// let all = Plan::builder(1000).batch(10).build()?;
    /// let (train, valid) = (all.with_records(0..900)?, all.with_records(900..1000)?);
    /// assert_eq!((train.steps(0), valid.steps(0)), (90, 10));
    /// assert_eq!(valid.batch(0, 0).and_then(|batch| batch.runs().next()), Some(900..910));
    /// # Ok::<(), twinbuf_mmap::PlanError>(())
    /// ```
    pub fn with_records(&self, records: impl Into<RecordList>) -> Result<Self, PlanError> {
        let list = records.into();
        Self { records: list.len(), list, ..self.clone() }.checked()
    }

    /// Returns the number of positions of the plan's list: a record counts as often as the list has it.
    /// [`LastBatch`] and [`PlanBuilder::steps`] decide whether an epoch drops or repeats some of them.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.records
    }

    /// Returns the records of the plan: `0..records` if none were set.
    #[must_use]
    pub const fn list(&self) -> &RecordList {
        &self.list
    }

    /// Returns the number of steps that [`PlanBuilder::steps`] set, or `None` if it was not called.
    #[must_use]
    pub const fn epoch_steps(&self) -> Option<u64> {
        self.steps
    }

    /// Returns the number of records in a full batch of one rank. If
    /// [`PlanBuilder::batches`] changes the size during the training, returns the largest size.
    #[must_use]
    pub fn batch_records(&self) -> u64 {
        self.batches().fold(0, |most, (_, batch)| most.max(batch))
    }

    /// Returns the batch sizes as [`PlanBuilder::batches`] takes them: a number of steps, and the number of records in
    /// a batch of one rank during these steps. Sizes for 0 steps are left out. The number of steps of the last size is
    /// [`u64::MAX`].
    pub fn batches(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        self.early.clone().into_iter().chain([(u64::MAX, self.batch)])
    }

    /// Returns the seed of the shuffle. Returns 0 if no seed was set.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns how the records of an epoch are shuffled.
    #[must_use]
    pub const fn shuffle(&self) -> Shuffle {
        self.shuffle
    }

    /// Returns the rank of this plan, less than [`world`](Self::world).
    #[must_use]
    pub const fn rank(&self) -> u64 {
        self.rank
    }

    /// Returns the number of ranks (world size).
    #[must_use]
    pub const fn world(&self) -> u64 {
        self.world
    }

    /// Returns how records that do not fill the last step are handled.
    #[must_use]
    pub const fn last_batch(&self) -> LastBatch {
        self.last_batch
    }

    /// Returns the number of steps of this rank in an epoch. It is the same for every epoch unless a schedule changes
    /// the batch size ([`PlanBuilder::batches`]).
    ///
    /// With [`LastBatch::Drop`] and [`LastBatch::Wrap`], it is at least 1 and the same for every rank. With
    /// [`LastBatch::Keep`], ranks may differ by one step, and a rank may have 0 steps if the plan has fewer records
    /// than ranks.
    #[must_use]
    pub fn steps(&self, epoch: u64) -> u64 {
        self.epoch(epoch).end()
    }

    /// Returns the number of steps that this rank does in `epochs`. `trained` is the number of steps that the training
    /// completed before the first of these epochs; a step of all ranks counts once. Returns [`u64::MAX`] on overflow.
    ///
    /// No rank does more steps than rank 0: the result for rank 0 is the number of steps of the training in `epochs`.
    #[must_use]
    pub fn steps_between(&self, epochs: Range<u64>, mut trained: u64) -> u64 {
        let (mut epoch, mut sum) = (epochs.start, 0_u64);
        while epoch < epochs.end {
            // Each iteration counts all next epochs that have one batch size, or one epoch with several sizes.
            let (batch, more) = self.size_at(trained);
            let same = self.with_size(batch);
            let (mut count, mut own, mut longest) = (1, same.steps_of(self.rank), same.steps_of(0));
            if same.ends_within(more) {
                let rest = epochs.end - epoch;
                // An epoch that ends with the last step of this size may leave records to the next size: it counts
                // alone.
                count = if more == u64::MAX { rest } else { rest.min(((more - 1) / longest).max(1)) };
            } else {
                let mixed = self.epoch_after(trained);
                (own, longest) = (mixed.end(), mixed.max_steps());
            }
            epoch += count;
            trained = trained.saturating_add(longest.saturating_mul(count));
            sum = sum.saturating_add(own.saturating_mul(count));
        }
        sum
    }

    /// Returns the record indices of this rank at `step` of `epoch`. Returns `None` if this rank has no such step: from
    /// [`steps`](Self::steps) on.
    #[must_use]
    pub fn batch(&self, epoch: u64, step: u64) -> Option<BatchIndices> {
        self.epoch(epoch).batch(epoch, step)
    }

    /// Returns an epoch of a training that had no other plan than this one.
    fn epoch(&self, epoch: u64) -> RemainingEpoch {
        let all = Self { rank: 0, ..self.clone() };
        self.epoch_after(if self.early.is_empty() { 0 } else { all.steps_between(0..epoch, 0) })
    }

    /// Returns this plan with a single batch size.
    fn with_size(&self, batch: u64) -> Self {
        Self { batch, early: Vec::new(), ..self.clone() }
    }

    /// Returns the batch size at `step` of the training, and for how many steps from there on it stays.
    fn size_at(&self, step: u64) -> (u64, u64) {
        let mut end = 0_u64;
        let size = self.early.iter().find(|(steps, _)| {
            end = end.saturating_add(*steps);
            step < end
        });
        size.map_or((self.batch, u64::MAX), |&(_, batch)| (batch, end - step))
    }

    /// The number of steps of a rank in an epoch, for a plan with a single batch size. No rank has more than rank 0.
    fn steps_of(&self, rank: u64) -> u64 {
        let full = self.full_steps();
        match self.last_batch {
            LastBatch::Drop => full,
            // A rank has a smaller last batch if the positions that are left suffice for the ranks up to it.
            LastBatch::Keep => self.steps.unwrap_or(u64::MAX).min(full + u64::from(rank < self.left_out())),
            LastBatch::Wrap => self.steps.unwrap_or(full + u64::from(self.left_out() > 0)),
        }
    }

    /// The number of positions after the full steps.
    fn left_out(&self) -> u64 {
        self.records - self.full_steps() * self.batch.saturating_mul(self.world)
    }

    /// Whether an epoch ends before or with the last of `more` steps and leaves nothing to other steps after it, for a
    /// plan with a single batch size.
    fn ends_within(&self, more: u64) -> bool {
        let (longest, full) = (self.steps_of(0), self.full_steps());
        // The next size takes records that `LastBatch::Drop` would leave out after the last step of this size.
        let leaves_out =
            self.last_batch == LastBatch::Drop && self.left_out() > 0 && self.steps != Some(full);
        longest < more || longest == more && !leaves_out
    }

    /// Returns the positions of a step, and the share around them: with a windowed shuffle, the
    /// positions of all full steps of this rank. A later step has no share: it is empty.
    fn positions(&self, step: u64) -> Option<(Range<u64>, Range<u64>)> {
        if step >= self.steps_of(self.rank) {
            None
        } else if step < self.full_steps() {
            let len = self.shares().len;
            Some((self.whole_batch(step), self.rank * len..(self.rank + 1) * len))
        } else {
            let keeps = self.last_batch == LastBatch::Keep;
            let last = if keeps { self.smaller_batch() } else { self.whole_batch(step) };
            Some((last.clone(), last.start..last.start))
        }
    }

    /// The shares of the ranks: the positions of their full steps.
    fn shares(&self) -> Shares {
        Shares { len: self.full_steps() * self.batch, count: self.world }
    }

    /// Returns the plan if its options are valid together.
    fn checked(self) -> Result<Self, PlanError> {
        self.batches().try_for_each(|(_, batch)| self.with_size(batch).check()).map(|()| self)
    }

    /// Checks a plan with a single batch size.
    fn check(self) -> Result<(), PlanError> {
        let Self { records, batch, rank, world, last_batch, .. } = self;
        let wraps = last_batch == LastBatch::Wrap;
        let end = batch.checked_mul(world).and_then(|step| step.checked_mul(self.steps.unwrap_or(1)));
        match (self.shuffle, self.steps) {
            _ if records == 0 => Err(PlanError::NoRecords),
            // A data set has at most 2^64 - 1 records, so no record has the number 2^64 - 1.
            _ if self.list.ends().1 == u64::MAX => {
                Err(PlanError::RangeTooLarge { first: u64::MAX, records: 1 })
            }
            _ if batch == 0 => Err(PlanError::ZeroBatch),
            (Shuffle::Chunks { records: 0 } | Shuffle::Window { chunk_records: 0, .. }, _) => {
                Err(PlanError::ZeroChunk)
            }
            (Shuffle::Window { window_chunks: 0, .. }, _) => Err(PlanError::ZeroWindow),
            (_, Some(0)) => Err(PlanError::ZeroSteps),
            _ if rank >= world => Err(PlanError::Rank { rank, world }),
            _ if last_batch == LastBatch::Drop && self.full_steps() == 0 => {
                Err(PlanError::NoStep { records, batch, world })
            }
            _ if wraps && end.and_then(|end| end.checked_add(records)).is_none() => {
                Err(PlanError::StepTooLarge { batch, world })
            }
            (_, Some(steps)) if !wraps && end.is_none_or(|end| end > records) => {
                Err(PlanError::TooManySteps { steps, records, batch, world })
            }
            _ => Ok(()),
        }
    }

    /// The number of steps in which every rank has a whole batch and no position comes again.
    fn full_steps(&self) -> u64 {
        // A step of 2^64 records or more is larger than any data set: there is no whole step.
        let whole = self.batch.checked_mul(self.world).map_or(0, |step| self.records / step);
        whole.min(self.steps.unwrap_or(u64::MAX))
    }

    /// The positions of a whole batch.
    fn whole_batch(&self, step: u64) -> Range<u64> {
        // No overflow: a full step ends within the records. With `LastBatch::Wrap`, there can be
        // more steps, and the builder has checked the end of the last.
        let full = self.full_steps();
        let batch = match self.shuffle {
            // Each rank has windows of its own, so the steps of one rank follow each other in the order.
            Shuffle::Window { .. } if step < full => self.rank * full + step,
            _ => step * self.world + self.rank,
        };
        let start = batch * self.batch;
        start..start + self.batch
    }

    /// The positions of this rank's smaller last batch: its part of those after the full steps.
    /// Empty if there are too few of them.
    fn smaller_batch(&self) -> Range<u64> {
        let remaining = self.left_out();
        let (each, extra) = (remaining / self.world, remaining % self.world);
        // No overflow: the ranks before this one have at most `remaining` positions together.
        let start = self.records - remaining + self.rank * each + self.rank.min(extra);
        start..start + each + u64::from(self.rank < extra)
    }
}

/// How to handle the records that do not fill the last step of all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", deny_unknown_fields)
)]
pub enum LastBatch {
    /// Drops these records in the present epoch. Every rank has the same number of steps. With a
    /// shuffle, each epoch draws anew which records it drops.
    #[default]
    Drop,
    /// Divides these records evenly among the ranks, as a smaller last batch. With [`PlanBuilder::steps`], a whole
    /// epoch has no smaller batch: it drops the records after these steps.
    ///
    /// If some are left, but fewer than there are ranks, some ranks have **one step fewer**. A
    /// collective operation in every step (all-reduce, barrier) can then block forever: let these
    /// ranks take part with an empty contribution, or use [`LastBatch::Drop`].
    Keep,
    /// Fills the last step with records from the start of the same epoch's order, repeatedly if the epoch is shorter
    /// than a step. Every rank has the same number of whole batches. Without [`PlanBuilder::steps`], no record is
    /// dropped, and fewer places are filled with repeated records than one step of all ranks has.
    Wrap,
}

/// The fields of a saved plan. A plan that is loaded is checked like a new one.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename = "Plan", deny_unknown_fields)]
struct Saved {
    first: u64,
    records: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    step: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    list: Vec<u64>,
    batch: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    batches: Vec<(u64, u64)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    steps: Option<u64>,
    seed: u64,
    shuffle: Shuffle,
    rank: u64,
    world: u64,
    last_batch: LastBatch,
}

#[cfg(feature = "serde")]
impl From<Plan> for Saved {
    fn from(plan: Plan) -> Self {
        let numbers = || (0..plan.list.len()).filter_map(|position| plan.list.get(position)).collect();
        Self {
            first: plan.list.get(0).unwrap_or_default(),
            records: plan.records,
            step: plan.list.step().filter(|&step| step != 1),
            list: plan.list.step().map_or_else(numbers, |_| Vec::new()),
            batch: plan.batch,
            batches: plan.early,
            steps: plan.steps,
            seed: plan.seed,
            shuffle: plan.shuffle,
            rank: plan.rank,
            world: plan.world,
            last_batch: plan.last_batch,
        }
    }
}

#[cfg(feature = "serde")]
impl TryFrom<Saved> for Plan {
    type Error = PlanError;

    fn try_from(saved: Saved) -> Result<Self, PlanError> {
        let Saved { first, records, step, steps, seed, .. } = saved;
        let list = match saved.list {
            list if list.is_empty() => RecordList::even(first, step.unwrap_or(1).max(1), records)
                .ok_or(PlanError::RangeTooLarge { first, records })?,
            list => list.into(),
        };
        let sizes = saved.batches.into_iter().chain([(u64::MAX, saved.batch)]);
        let builder = Self::builder(records).records(list).batches(sizes).shuffle(saved.shuffle);
        let builder = builder.rank(saved.rank, saved.world).last_batch(saved.last_batch);
        let builder = steps.map_or(builder.clone(), |steps| builder.steps(steps));
        if seed == 0 { builder } else { builder.seed(seed) }.build()
    }
}
