//! A position in the data, saved with the model and resumed from another day.

use std::fmt;

use twinbuf_mmap::Plan;

use crate::error::Error;

/// A position between two batches, and which plan and data set it belongs to.
///
/// Take one from a [`Batch`](crate::Batch), [`Epochs`](crate::loader::Epochs) or [`Loader`](crate::Loader), save it
/// with the model, and pass it to [`Loader::epochs_from`](crate::Loader::epochs_from). With the feature `serde` it is
/// `Serialize` and `Deserialize` and has `save` and `load_or_start`. The names of its fields are a stable format.
///
/// Depth, overlap, hints, rank and transform are not part of it. It is the same for all ranks of a step: any rank
/// resumes from any other rank's checkpoint.
///
/// With [`Tail::Keep`](crate::Tail::Keep) a rank may have no batch in the last step. It has done that step when its
/// epoch has ended. Rank 0 has a batch in every step.
///
/// ```
/// # use twinbuf::{BatchPlan, BoxError, Dataset, Loader, Plan};
/// # struct Zeros;
/// # impl Dataset for Zeros {
/// #     fn records(&self) -> u64 { 64 }
/// #     fn record_bytes(&self) -> usize { 4 }
/// #     fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> { Ok(out.len()) }
/// # }
/// # let build = || Loader::builder(Zeros, Plan::builder(64).batch(8).build().unwrap()).build();
/// let mut loader = build()?;
/// let mut checkpoint = loader.checkpoint();
/// for batch in loader.epoch(3).take(2) {
///     checkpoint = batch?.checkpoint(); // saved with the model
/// }
///
/// let mut loader = build()?; // another day
/// let mut rest = loader.epochs_from(&checkpoint, 5)?; // the rest of epoch 3, then epoch 4
/// let batch = rest.next().unwrap()?;
/// assert_eq!((batch.epoch(), batch.step()), (3, 2));
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "saved::Saved", into = "saved::Saved")
)]
pub struct Checkpoint {
    /// `None` at the start of any training.
    pub(crate) identity: Option<Identity>,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
}

/// Which batches a loader delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// That of rank 0, which has as many steps as any rank: a step is a step of all ranks.
    pub(crate) plan: Plan,
    pub(crate) record_bytes: u64,
    /// [`Dataset::fingerprint`](crate::Dataset::fingerprint).
    pub(crate) fingerprint: u64,
}

impl Checkpoint {
    /// The start of a training: the first step of epoch 0, of any plan and data set.
    #[must_use]
    pub const fn start() -> Self {
        Self { identity: None, epoch: 0, step: 0 }
    }

    /// The epoch of the next batch.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The step of the next batch; the number of steps in an epoch if the epoch is over.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// The plan that it belongs to, as rank 0 has it; `None` for [`start`](Self::start).
    #[must_use]
    pub fn plan(&self) -> Option<&Plan> {
        self.identity.as_ref().map(|identity| &identity.plan)
    }
}

impl Default for Checkpoint {
    /// [`Checkpoint::start`].
    fn default() -> Self {
        Self::start()
    }
}

impl Identity {
    pub(crate) fn new(plan: &Plan, record_bytes: usize, fingerprint: u64) -> Self {
        let Ok(plan) = plan.with_rank(0, plan.world()) else {
            unreachable!("there is a plan of another rank")
        };
        Self { plan, record_bytes: record_bytes as u64, fingerprint }
    }

    /// Whether a loader of this identity can go on at `checkpoint`. The error names the field that differs.
    pub(crate) fn check(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let Some(other) = &checkpoint.identity else { return Ok(()) };
        let (own, found) = (&self.plan, &other.plan);
        same("range of records", &own.range(), &found.range())?;
        same("batch size", &own.batch_records(), &found.batch_records())?;
        same("number of ranks", &own.world(), &found.world())?;
        same("shuffle", &own.shuffle(), &found.shuffle())?;
        same("seed", &own.seed(), &found.seed())?;
        same("tail", &own.tail(), &found.tail())?;
        same("record size", &self.record_bytes, &other.record_bytes)?;
        let print = |print: u64| format!("{print:016x}");
        if self.fingerprint != other.fingerprint {
            let (wanted, found) = (print(self.fingerprint), print(other.fingerprint));
            return Err(Error::Checkpoint { field: "data set fingerprint", wanted, found });
        }
        if checkpoint.step > own.steps() {
            let wanted = format!("at most the {} steps of an epoch", own.steps());
            return Err(Error::Checkpoint { field: "step", wanted, found: checkpoint.step.to_string() });
        }
        Ok(())
    }
}

fn same<T: PartialEq + fmt::Debug>(field: &'static str, own: &T, found: &T) -> Result<(), Error> {
    if own == found {
        return Ok(());
    }
    Err(Error::Checkpoint { field, wanted: format!("{own:?}"), found: format!("{found:?}") })
}

#[cfg(feature = "serde")]
mod saved;
