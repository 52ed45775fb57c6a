//! A position in the data. Saved with the model, it resumes the training later.

use std::fmt;

use twinbuf_mmap::{PartialEpoch, Plan, RemainingEpoch};

use crate::error::Error;

/// A position between two batches, together with the plan and the data set of the loader.
///
/// Get a checkpoint from a [`Batch`](crate::Batch), [`Epochs`](crate::loader::Epochs) or [`Loader`](crate::Loader),
/// save it with the model, and pass it to [`Loader::epochs_from`](crate::Loader::epochs_from). With the feature
/// `serde`, a checkpoint is `Serialize` and `Deserialize`, and has the methods `save` and `load_or_start`. The names
/// of the serialized fields are a stable format.
///
/// A checkpoint does not contain depth, overlap, hints, rank or transforms. All ranks have the same checkpoint after
/// the same step: any rank can resume from any other rank's checkpoint. A loader with another batch size or number
/// of ranks can also resume: it continues with the unseen records of the epoch, each once, and [`step`](Self::step)
/// continues to count.
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
/// Resume from a checkpoint before the spike and skip the batches that led to it:
/// `loader.epochs_from(&checkpoint.skip(200), 5)`.
///
/// # Saved checkpoints
///
/// The JSON of version 2 has the following fields. Version 1 has no `before`, and can also be loaded.
///
/// | field | content |
/// | --- | --- |
/// | `version` | 2 |
/// | `epoch`, `step` | the epoch and the step of the next batch |
/// | `before` | the completed steps of this epoch with other batch sizes or numbers of ranks, in order: `batch`, `world`, `steps` |
/// | `plan` | the [`Plan`] of rank 0 |
/// | `record_bytes`, `fingerprint` | the record size and the fingerprint of the data set |
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// That of rank 0: a step is a step of all ranks, and no rank has more steps than rank 0.
    pub(crate) plan: Plan,
    pub(crate) record_bytes: u64,
    /// [`Dataset::fingerprint`](crate::Dataset::fingerprint).
    pub(crate) fingerprint: u64,
    /// The steps of this epoch that were done with another batch size or number of ranks.
    pub(crate) before: Vec<PartialEpoch>,
}

/// Where a loader continues.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    /// What is left of an epoch that was begun with another batch size or number of ranks.
    pub(crate) begun: Option<(RemainingEpoch, Identity)>,
}

impl Checkpoint {
    /// Returns the checkpoint at step 0 of epoch 0. It is valid for any plan and any data set.
    #[must_use]
    pub const fn start() -> Self {
        Self { identity: None, epoch: 0, step: 0 }
    }

    /// Returns the epoch of the next batch, from 0.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the step of the next batch, from 0. At the end of an epoch, this is the number of steps in the epoch.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Returns the number of records of the current epoch that precede this position, summed over all ranks. Returns
    /// 0 for [`start`](Self::start).
    #[must_use]
    pub fn records_seen(&self) -> u64 {
        let Some(Identity { plan, before, .. }) = &self.identity else { return 0 };
        let of = |batch: u64, world: u64, steps: u64| batch.saturating_mul(world).saturating_mul(steps);
        let legs = before.iter().map(|leg| of(leg.batch, leg.world, leg.steps));
        let steps: u64 = before.iter().map(|leg| leg.steps).sum();
        let own = of(plan.batch_records(), plan.world(), self.step.saturating_sub(steps));
        legs.fold(own, u64::saturating_add).min(plan.records())
    }

    /// Returns the position `steps` steps later. The loader never delivers the batches in between. The new position
    /// may be in a later epoch.
    ///
    /// A checkpoint made by [`start`](Self::start) has no plan and always stays in epoch 0.
    #[must_use]
    pub fn skip(mut self, mut steps: u64) -> Self {
        if let Some(identity) = &mut self.identity {
            let end = identity.plan.resume(&identity.before).map_or(self.step, |rest| rest.max_steps());
            let room = end.saturating_sub(self.step);
            if steps > room {
                steps -= room;
                let each = identity.plan.steps().max(1);
                // To the end of an epoch, not to the start of the next.
                let epochs = (steps - 1) / each;
                (self.epoch, self.step) = (self.epoch.saturating_add(1).saturating_add(epochs), 0);
                steps -= epochs * each;
                identity.before.clear();
            }
        }
        self.step = self.step.saturating_add(steps);
        self
    }

    /// Returns the plan of the loader that made the checkpoint, as rank 0 has it. Returns `None` for
    /// [`start`](Self::start).
    #[must_use]
    pub fn plan(&self) -> Option<&Plan> {
        self.identity.as_ref().map(|identity| &identity.plan)
    }
}

impl Default for Checkpoint {
    /// Returns [`Checkpoint::start`].
    fn default() -> Self {
        Self::start()
    }
}

impl Identity {
    pub(crate) fn new(plan: &Plan, record_bytes: usize, fingerprint: u64) -> Self {
        let Ok(plan) = plan.with_rank(0, plan.world()) else {
            unreachable!("there is a plan of another rank")
        };
        Self { plan, record_bytes: record_bytes as u64, fingerprint, before: Vec::new() }
    }

    /// Where a loader of this identity continues, as the rank of `plan`. The error names the field that differs.
    pub(crate) fn resume(&self, plan: &Plan, checkpoint: &Checkpoint) -> Result<Start, Error> {
        let &Checkpoint { ref identity, epoch, step } = checkpoint;
        let Some(other) = identity else {
            at_most(step, self.plan.steps())?;
            return Ok(Start { epoch, step, begun: None });
        };
        let (own, found) = (&self.plan, &other.plan);
        same("range of records", &own.range(), &found.range())?;
        same("shuffle", &own.shuffle(), &found.shuffle())?;
        same("seed", &own.seed(), &found.seed())?;
        same("last_batch", &own.last_batch(), &found.last_batch())?;
        same("record size", &self.record_bytes, &other.record_bytes)?;
        let print = |print: u64| format!("{print:016x}");
        if self.fingerprint != other.fingerprint {
            let (wanted, found) = (print(self.fingerprint), print(other.fingerprint));
            return Err(Error::Checkpoint { field: "data set fingerprint", wanted, found });
        }
        // Both describe the past of the checkpoint, so what is wrong with them is wrong with it.
        let wrong = |error| Error::Checkpoint {
            field: "number of steps",
            wanted: "as many as the epoch has".into(),
            found: format!("{error}"),
        };
        let rest = found.resume(&other.before).map_err(wrong)?;
        let end = rest.max_steps();
        at_most(step, end)?;
        let Some(steps) = step.checked_sub(rest.first()) else {
            let (wanted, found) =
                (format!("at least the {} steps before it", rest.first()), step.to_string());
            return Err(Error::Checkpoint { field: "step", wanted, found });
        };
        let mut before = other.before.clone();
        let sizes = |plan: &Plan| (plan.batch_records(), plan.world());
        if sizes(own) != sizes(found) {
            if step == end {
                return Ok(match epoch.checked_add(1) {
                    Some(next) => Start { epoch: next, step: 0, begun: None },
                    None => Start { epoch, step: own.steps(), begun: None },
                });
            }
            let (batch, world) = sizes(found);
            before.extend((steps > 0).then_some(PartialEpoch { batch, world, steps }));
            // Back at what it was before.
            if before.last().is_some_and(|last| (last.batch, last.world) == sizes(own)) {
                before.pop();
            }
        }
        let begun = match before[..] {
            [] => None,
            _ => Some((plan.resume(&before).map_err(wrong)?, Self { before, ..self.clone() })),
        };
        Ok(Start { epoch, step, begun })
    }
}

fn at_most(step: u64, steps: u64) -> Result<(), Error> {
    if step <= steps {
        return Ok(());
    }
    let wanted = format!("at most the {steps} steps of an epoch");
    Err(Error::Checkpoint { field: "step", wanted, found: step.to_string() })
}

fn same<T: PartialEq + fmt::Debug>(field: &'static str, own: &T, found: &T) -> Result<(), Error> {
    if own == found {
        return Ok(());
    }
    Err(Error::Checkpoint { field, wanted: format!("{own:?}"), found: format!("{found:?}") })
}

#[cfg(feature = "serde")]
mod replace;
#[cfg(feature = "serde")]
mod saved;
