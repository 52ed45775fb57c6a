//! Checkpoints: positions in the data, which are saved with the model, and how a loader resumes from them.

use std::fmt;
use std::sync::Arc;

use twinbuf_mmap::{PartialEpoch, Plan, PlanError, RemainingEpoch};

use crate::error::Error;

/// A position between two batches, together with the plan and the data set of the loader.
///
/// Get a checkpoint from a [`Batch`](crate::Batch), [`Epochs`](crate::loader::Epochs) or [`Loader`](crate::Loader),
/// save it with the model, and pass it to [`Loader::epochs_from`](crate::Loader::epochs_from). With the feature
/// `serde`, a checkpoint is `Serialize` and `Deserialize`, and has the methods `save` and `load_or_start`. The names
/// of the serialized fields are a stable format. Use a format that writes them, such as JSON or CBOR: a checkpoint in
/// one that does not, such as bincode, cannot be loaded.
///
/// A checkpoint does not contain depth, overlap, hints, rank or transforms. All ranks have the same checkpoint after
/// the same step: any rank can resume from any other rank's checkpoint. A loader with another batch size or number
/// of ranks can also resume: it continues with the unseen records of the epoch, and [`step`](Self::step)
/// continues to count ([`Loader::epochs_from`](crate::Loader::epochs_from)).
///
/// With [`LastBatch::Keep`](crate::LastBatch::Keep), a rank may have no batch in the last step of an epoch. For this
/// rank the step counts as done when the epoch ends. Rank 0 has a batch in every step.
///
/// ```
/// # use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan};
/// # struct Zeros;
/// # impl Dataset for Zeros {
/// #     fn records(&self) -> u64 { 64 }
/// #     fn record_bytes(&self) -> usize { 4 }
/// #     fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> { Ok(out.len()) }
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
/// # After a loss spike
///
/// Resume from a checkpoint before the spike, at a later step: `loader.epochs_from(&checkpoint.with_step(700), 5)`. The
/// loader does not deliver the batches in between.
///
/// # Saved checkpoints
///
/// The JSON of version 4, the only one that can be loaded, has the following fields.
///
/// | field | content |
/// | --- | --- |
/// | `version` | 4 |
/// | `epoch`, `step` | the epoch and the step of the next batch |
/// | `trained` | the number of steps of the training before this epoch |
/// | `before` | the completed steps of this epoch with other batch sizes or numbers of ranks, in order: `batch`, `world`, `steps` |
/// | `plan` | the [`Plan`] of rank 0 |
/// | `list` | only for a list of records without a [step](crate::RecordList::step): its [fingerprint](crate::RecordList::fingerprint); `plan` then plans its positions |
/// | `record_bytes`, `fingerprint` | the record size and the fingerprint of the data set |
///
/// In a checkpoint from [`start`](Self::start), `trained`, `plan` and the last two are `null`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "saved::Saved", into = "saved::Saved")
)]
pub struct Checkpoint {
    /// `None` in a checkpoint from [`Checkpoint::start`].
    pub(crate) identity: Option<Identity>,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
}

/// The plan and the data set that a checkpoint belongs to. They determine the batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The plan of rank 0. A step is a step of all ranks, and no rank has more steps than rank 0.
    pub(crate) plan: Plan,
    /// [`RecordList::fingerprint`](twinbuf_mmap::RecordList::fingerprint), for a list with unequal steps. `plan` then
    /// plans positions of the list.
    pub(crate) list: Option<u64>,
    pub(crate) record_bytes: u64,
    /// [`Dataset::fingerprint`](crate::Dataset::fingerprint) of all fields together.
    pub(crate) fingerprint: u64,
    /// The steps of this epoch that were done with another batch size or number of ranks.
    pub(crate) before: Vec<PartialEpoch>,
    /// An epoch, and the number of steps of the training before it. In a checkpoint it is the checkpoint's epoch.
    pub(crate) trained: (u64, u64),
}

/// Where a loader continues.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    /// The batches of that epoch. If it began with another plan, those that are left.
    pub(crate) rest: RemainingEpoch,
    /// What a checkpoint in that epoch belongs to.
    pub(crate) identity: Arc<Identity>,
}

impl Checkpoint {
    /// Returns the checkpoint at step 0 of epoch 0. It is valid for any plan and any data set.
    #[must_use]
    pub const fn start() -> Self {
        Self { identity: None, epoch: 0, step: 0 }
    }

    /// Returns the epoch of the next batch, from 0. At the end of an epoch, it is still that epoch.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the step of the next batch, from 0. At the end of an epoch, this is the number of steps in the epoch.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Returns the start of the next epoch. The loader does not deliver the rest of this one.
    #[must_use]
    pub fn next_epoch(mut self) -> Self {
        (self.epoch, self.step) = (self.epoch.saturating_add(1), 0);
        if let Some(identity) = &mut self.identity {
            let end = identity.rest().map_or(0, |rest| rest.max_steps());
            identity.end_epoch(end);
        }
        self
    }

    /// Returns the position at another step of the same epoch.
    #[must_use]
    pub fn with_step(self, step: u64) -> Self {
        Self { step, ..self }
    }

    /// Returns the number of batches from here to the end of epoch `epochs - 1` for a loader with this plan.
    /// [`Loader::epochs_from`](crate::Loader::epochs_from) delivers that many.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the plan's records, number of steps, shuffle, seed or `LastBatch` mode differs, or if
    /// the step is outside of what is left of the epoch.
    pub fn steps_left(&self, plan: &Plan, epochs: u64) -> Result<u64, Error> {
        let mut own = Identity::new(plan, 0, 0);
        if let Some(Identity { record_bytes, fingerprint, .. }) = self.identity {
            (own.record_bytes, own.fingerprint) = (record_bytes, fingerprint);
        }
        let Start { epoch, step, rest, identity } = Arc::new(own).resume(plan, self)?;
        if epoch >= epochs {
            return Ok(0);
        }
        let trained = identity.steps_before(epoch).saturating_add(rest.max_steps());
        let after = plan.steps_between(epoch + 1..epochs, trained);
        Ok(rest.end().saturating_sub(step).saturating_add(after))
    }

    /// Returns the plan of the loader that made the checkpoint, as rank 0 has it: for a list of records without
    /// a [step](crate::RecordList::step), the plan of its positions. Returns `None` for [`start`](Self::start).
    #[must_use]
    pub fn plan(&self) -> Option<&Plan> {
        self.identity.as_ref().map(|identity| &identity.plan)
    }
}

impl Identity {
    pub(crate) fn new(plan: &Plan, record_bytes: usize, fingerprint: u64) -> Self {
        let list = plan.list().fingerprint();
        let positions = if list.is_some() { (0..plan.records()).into() } else { plan.list().clone() };
        let plan = plan.with_records(positions).and_then(|plan| plan.with_rank(0, plan.world()));
        let plan = plan.expect("there is a plan of another rank, and of as many records");
        let (record_bytes, before) = (record_bytes as u64, Vec::new());
        Self { plan, list, record_bytes, fingerprint, before, trained: (0, 0) }
    }

    /// Returns the steps of the training before an epoch. The epoch is not before that of `trained`.
    pub(crate) fn steps_before(&self, epoch: u64) -> u64 {
        let (from, trained) = self.trained;
        trained.saturating_add(self.plan.steps_between(from..epoch, trained))
    }

    /// Goes from the epoch of `trained` to the next one. `steps` are those of the epoch.
    pub(crate) fn end_epoch(&mut self, steps: u64) {
        let (epoch, trained) = self.trained;
        self.before.clear();
        self.trained = (epoch.saturating_add(1), trained.saturating_add(steps));
    }

    /// Returns the checkpoint at a step.
    pub(crate) fn at(&self, epoch: u64, step: u64) -> Checkpoint {
        let identity = Self { trained: (epoch, self.steps_before(epoch)), ..self.clone() };
        Checkpoint { identity: Some(identity), epoch, step }
    }

    /// Returns the part of the checkpoint's epoch that follows the steps in `before`.
    fn rest(&self) -> Result<RemainingEpoch, PlanError> {
        self.plan.resume(self.trained.1, &self.before)
    }

    /// Returns a start in an epoch of this plan alone. `plan` is the loader's plan with its own rank.
    pub(crate) fn start(self: &Arc<Self>, plan: &Plan, epoch: u64, step: u64) -> Start {
        Start { epoch, step, rest: plan.epoch_after(self.steps_before(epoch)), identity: self.clone() }
    }

    /// Returns where this loader continues from `checkpoint`. `plan` is the loader's plan with its own rank; `self.plan`
    /// is that of rank 0. If the checkpoint does not fit, the error names the field that differs.
    pub(crate) fn resume(self: &Arc<Self>, plan: &Plan, checkpoint: &Checkpoint) -> Result<Start, Error> {
        let &Checkpoint { ref identity, mut epoch, mut step } = checkpoint;
        let Some(other) = identity else {
            return in_epoch(step, 0, self.plan.steps(epoch)).map(|()| self.start(plan, epoch, step));
        };
        let (own, found) = (&self.plan, &other.plan);
        same("range of records", own.list(), found.list())?;
        same("list of records", &self.list, &other.list)?;
        same("number of steps in an epoch", &own.epoch_steps(), &found.epoch_steps())?;
        same("shuffle", &own.shuffle(), &found.shuffle())?;
        same("seed", &own.seed(), &found.seed())?;
        same("last_batch", &own.last_batch(), &found.last_batch())?;
        same("record size", &self.record_bytes, &other.record_bytes)?;
        if self.fingerprint != other.fingerprint {
            let [wanted, found] = [self.fingerprint, other.fingerprint].map(|print| format!("{print:016x}"));
            return Err(Error::Checkpoint { field: "data set fingerprint", wanted, found });
        }
        // The calls that may fail below use the steps trained before the checkpoint: if they fail, the checkpoint is
        // wrong.
        let wrong = |error| Error::Checkpoint {
            field: "number of steps",
            wanted: "as many as the epoch has".into(),
            found: format!("{error}"),
        };
        let rest = other.rest().map_err(wrong)?;
        let end = rest.max_steps();
        in_epoch(step, rest.first(), end)?;
        let (mut trained, mut before) = (other.trained.1, other.before.clone());
        if own != found && step < end {
            before.extend(rest.parts(step));
            // `before` lists the plans of this epoch's steps so far. Drop its last entries if this plan gives the same
            // batches.
            let same = |&at: &usize| {
                plan.resume(trained, &before[..at]).is_ok_and(|rest| rest.parts(step) == before[at..])
            };
            before.truncate((0..before.len()).find(same).unwrap_or(before.len()));
        } else if own != found {
            // The epoch is over: go on with the next one, or stay at the end of epoch `u64::MAX`.
            let next = epoch.checked_add(1).map(|next| (next, 0));
            (epoch, step) = next.unwrap_or((epoch, own.steps(epoch)));
            (trained, before) = (trained.saturating_add(end), Vec::new());
        }
        let rest = plan.resume(trained, &before).map_err(wrong)?;
        let identity = Arc::new(Self { before, trained: (epoch, trained), ..(**self).clone() });
        Ok(Start { epoch, step, rest, identity })
    }
}

fn in_epoch(step: u64, before: u64, steps: u64) -> Result<(), Error> {
    let wanted = match step {
        _ if step > steps => format!("at most the {steps} steps of an epoch"),
        _ if step < before => format!("at least the {before} steps before it"),
        _ => return Ok(()),
    };
    Err(Error::Checkpoint { field: "step", wanted, found: step.to_string() })
}

fn same<T: PartialEq + fmt::Debug>(field: &'static str, own: &T, found: &T) -> Result<(), Error> {
    if own == found {
        return Ok(());
    }
    Err(Error::Checkpoint { field, wanted: format!("{own:?}"), found: format!("{found:?}") })
}

#[cfg(feature = "serde")]
mod saved;
