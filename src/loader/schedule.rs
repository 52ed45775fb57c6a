//! The batch of a step: a batch of the plan, which may continue a training that was begun under another plan.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use twinbuf_mmap::{BatchIndices, Plan, RemainingEpoch};

use crate::batch::checkpoint::{Begun, Identity};
use crate::batch::layout::Layout;
use crate::slot::{Origin, Ticket};

/// The batches of a loader, shared by all its threads.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub(crate) plan: Plan,
    pub(crate) identity: Arc<Identity>,
    layout: Arc<Layout>,
    /// The last [`KEPT`] calls that continued a training of another plan, by generation, the oldest first.
    begun: Arc<Mutex<Vec<(u64, Begun)>>>,
    /// The epoch of the last batch: those that follow are mostly of the same.
    last: Arc<Mutex<Option<Epoch>>>,
}

/// The batches of an epoch in a call, and what a checkpoint in it belongs to.
#[derive(Debug)]
struct Epoch {
    generation: u64,
    epoch: u64,
    batches: RemainingEpoch,
    identity: Arc<Identity>,
}

/// Older calls than these load batches that are discarded.
const KEPT: usize = 8;

impl Schedule {
    pub(crate) fn new(plan: Plan, identity: Identity, layout: Layout) -> Self {
        Self {
            plan,
            identity: Arc::new(identity),
            layout: Arc::new(layout),
            begun: Arc::default(),
            last: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(u64, Begun)>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Continues the training of another plan, in one call.
    pub(crate) fn begin(&self, generation: u64, start: Begun) {
        let mut begun = self.lock();
        if begun.len() == KEPT {
            begun.remove(0);
        }
        begun.push((generation, start));
    }

    /// Returns the batches of an epoch in a call, and what a checkpoint in it belongs to.
    pub(crate) fn epoch(&self, generation: u64, epoch: u64) -> (RemainingEpoch, Arc<Identity>) {
        let begun = self.lock();
        let identity = match begun.iter().rfind(|(of, _)| *of == generation) {
            Some((_, Begun { epoch: first, rest, identity, .. })) if *first == epoch => {
                return (rest.clone(), identity.clone());
            }
            Some((_, Begun { later, .. })) => later,
            None => &self.identity,
        };
        (self.plan.epoch_after(identity.steps_before(epoch)), identity.clone())
    }

    /// Returns the records of a step. `None` past the end of the epoch, and perhaps for a call that is over.
    pub(crate) fn batch(&self, ticket: Ticket) -> Option<Origin> {
        let Ticket { generation, epoch, step, .. } = ticket;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|last| (last.generation, last.epoch) != (generation, epoch)) {
            let (batches, identity) = self.epoch(generation, epoch);
            *last = Some(Epoch { generation, epoch, batches, identity });
        }
        let Epoch { batches, identity, .. } = last.as_ref()?;
        let plan = batches.batch(epoch, step)?;
        Some(Origin { plan, identity: identity.clone(), layout: self.layout.clone() })
    }

    /// The batches from this one to the last that the same call asks for.
    pub(crate) fn from(&self, mut ticket: Ticket) -> impl Iterator<Item = BatchIndices> + Send + use<> {
        let schedule = self.clone();
        let (mut batches, _) = self.epoch(ticket.generation, ticket.epoch);
        std::iter::from_fn(move || {
            loop {
                if let Some(plan) = batches.batch(ticket.epoch, ticket.step) {
                    ticket.step += 1;
                    return Some(plan);
                }
                // An epoch without a step is followed by none.
                if ticket.epoch >= ticket.last || ticket.step == 0 {
                    return None;
                }
                (ticket.epoch, ticket.step) = (ticket.epoch + 1, 0);
                (batches, _) = schedule.epoch(ticket.generation, ticket.epoch);
            }
        })
    }
}
