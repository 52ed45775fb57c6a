//! The order of a loader's batches: the batches of its plan. After a resumption with another batch size or number of
//! ranks, the rest of the interrupted epoch comes first.

use std::sync::Arc;

use twinbuf_mmap::{BatchIndices, Plan, Reader, RemainingEpoch};

use super::sizes::Layout;
use crate::loader::checkpoint::{Begun, Identity};
use crate::pipe::Place;

/// The records of a batch, and their places in its slot.
#[derive(Debug)]
pub struct Records {
    pub(crate) plan: BatchIndices,
    /// The plan and the data set that a checkpoint after the batch belongs to.
    pub(crate) identity: Arc<Identity>,
    pub(crate) layout: Arc<Layout>,
    /// For each field whose records vary in length: the offset of each record in the field, and the end of the last
    /// one. For other fields: empty.
    pub(crate) offsets: Vec<Vec<usize>>,
}

/// The batches of one call for epochs.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub(crate) plan: Plan,
    pub(crate) identity: Arc<Identity>,
    pub(crate) layout: Arc<Layout>,
    /// Set if the call resumes a training that began with another plan.
    pub(crate) begun: Option<Begun>,
}

impl Schedule {
    /// Returns the batches of an epoch, and the plan and the data set that a checkpoint in this epoch belongs to.
    pub(crate) fn epoch(&self, epoch: u64) -> (RemainingEpoch, Arc<Identity>) {
        let identity = match &self.begun {
            Some(Begun { epoch: first, rest, identity, .. }) if *first == epoch => {
                return (rest.clone(), identity.clone());
            }
            Some(Begun { later, .. }) => later,
            None => &self.identity,
        };
        (self.plan.epoch_after(identity.steps_before(epoch)), identity.clone())
    }

    /// Returns the batches from `first` to the end of epoch `last`. When the first batch is taken, the iterator also
    /// gives the batches to the readers `files`, which read ahead.
    pub(crate) fn order(&self, first: Place, last: u64, files: Vec<Arc<Reader>>) -> Batches {
        let (epoch, identity) = self.epoch(first.epoch);
        Batches { schedule: self.clone(), next: first, last, epoch, identity, files }
    }
}

/// An iterator over the batches of a call.
pub(crate) struct Batches {
    schedule: Schedule,
    next: Place,
    last: u64,
    epoch: RemainingEpoch,
    identity: Arc<Identity>,
    files: Vec<Arc<Reader>>,
}

impl Batches {
    fn step(&mut self) -> Option<(Place, BatchIndices)> {
        loop {
            let Place { ordinal, epoch, step } = self.next;
            if let Some(plan) = self.epoch.batch(epoch, step) {
                self.next.step += 1;
                return Some((Place { ordinal, epoch, step }, plan));
            }
            // If an epoch has no step, later epochs have none either, and without this check the loop would not end.
            if epoch >= self.last || step == 0 {
                return None;
            }
            self.next = Place { ordinal: ordinal + 1, epoch: epoch + 1, step: 0 };
            (self.epoch, self.identity) = self.schedule.epoch(epoch + 1);
        }
    }
}

impl Iterator for Batches {
    type Item = (Place, Records);

    fn next(&mut self) -> Option<(Place, Records)> {
        for files in std::mem::take(&mut self.files) {
            let mut ahead = self.schedule.order(self.next, self.last, Vec::new());
            files.begin(std::iter::from_fn(move || ahead.step().map(|(_, plan)| plan)));
        }
        let (place, plan) = self.step()?;
        let (identity, layout) = (self.identity.clone(), self.schedule.layout.clone());
        Some((place, Records { plan, identity, layout, offsets: Vec::new() }))
    }
}
