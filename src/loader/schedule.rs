//! The batch of a step: a batch of the plan, or of the rest of an epoch that was begun under another plan.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use twinbuf_mmap::{BatchIndices, Plan, RemainingEpoch};

use crate::batch::checkpoint::Identity;
use crate::batch::layout::Layout;
use crate::slot::{Origin, Ticket};

/// The batches of a loader, shared by all its threads.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub(crate) plan: Plan,
    pub(crate) identity: Arc<Identity>,
    layout: Arc<Layout>,
    /// The last [`KEPT`] calls that went on in the middle of an epoch of another plan, the oldest first.
    begun: Arc<Mutex<Vec<Begun>>>,
}

/// Older calls than these load batches that are discarded.
const KEPT: usize = 8;

/// An epoch that was begun under another plan.
#[derive(Clone, Debug)]
pub(crate) struct Begun {
    pub(crate) generation: u64,
    pub(crate) epoch: u64,
    pub(crate) rest: RemainingEpoch,
    pub(crate) identity: Arc<Identity>,
}

impl Schedule {
    pub(crate) fn new(plan: Plan, identity: Identity, layout: Layout) -> Self {
        Self { plan, identity: Arc::new(identity), layout: Arc::new(layout), begun: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Begun>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Continues an epoch of another plan, for one call.
    pub(crate) fn begin(&self, epoch: Begun) {
        let mut begun = self.lock();
        if begun.len() == KEPT {
            begun.remove(0);
        }
        begun.push(epoch);
    }

    /// Returns the records of a step. `None` past the end of the epoch, and perhaps for a call that is over.
    pub(crate) fn batch(&self, ticket: Ticket) -> Option<Origin> {
        let Ticket { generation, epoch, step, .. } = ticket;
        let begun = self.lock();
        let (plan, identity) =
            match begun.iter().rfind(|begun| (begun.generation, begun.epoch) == (generation, epoch)) {
                Some(begun) => (begun.rest.batch(epoch, step)?, &begun.identity),
                None => (self.plan.batch(epoch, step)?, &self.identity),
            };
        Some(Origin { plan, identity: identity.clone(), layout: self.layout.clone() })
    }

    /// The batches from this one to the last that the same call asks for.
    pub(crate) fn from(&self, mut ticket: Ticket) -> impl Iterator<Item = BatchIndices> + Send + use<> {
        let schedule = self.clone();
        std::iter::from_fn(move || {
            loop {
                if let Some(Origin { plan, .. }) = schedule.batch(ticket) {
                    ticket.step += 1;
                    return Some(plan);
                }
                // An epoch without a step is followed by none.
                if ticket.epoch >= ticket.last || ticket.step == 0 {
                    return None;
                }
                (ticket.epoch, ticket.step) = (ticket.epoch + 1, 0);
            }
        })
    }
}
