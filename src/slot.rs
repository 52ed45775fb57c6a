//! A host slot: the memory of one batch, and what is in it.

use std::time::Duration;

use twinbuf_mmap::{BatchPlan, Buffer, Hinted, Residency};

use crate::error::Error;
use crate::trace::Place;

/// The memory of one batch, and what is in it.
#[derive(Debug)]
pub struct Slot {
    pub(crate) buffer: Buffer,
    pub(crate) load: Option<Load>,
}

impl Slot {
    /// `None` if there is no memory.
    pub(crate) fn new(len: usize) -> Option<Self> {
        Some(Self { buffer: Buffer::new(len)?, load: None })
    }

    pub(crate) fn batch(&self) -> &[u8] {
        &self.buffer[..self.len()]
    }

    pub(crate) fn batch_mut(&mut self) -> &mut [u8] {
        let len = self.len();
        &mut self.buffer[..len]
    }

    fn len(&self) -> usize {
        self.load.as_ref().and_then(|load| load.result.as_ref().ok()).map_or(0, |&len| len)
    }
}

/// What a slot was filled with: the loader's own note that travels with a batch. Its content is not public.
#[derive(Debug)]
pub struct Load {
    /// The job it belongs to: a slot filled for an epoch that was given up is skipped.
    pub(crate) generation: u64,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    pub(crate) plan: BatchPlan,
    /// The bytes of the batch, or why there are none.
    pub(crate) result: Result<usize, Error>,
    pub(crate) cost: Cost,
}

impl Load {
    /// For the trace.
    pub(crate) fn place(&self) -> Place {
        Place { ordinal: self.generation - 1, epoch: self.epoch, step: Some(self.step) }
    }
}

/// What it took to fill a slot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    /// Reading, hints included.
    pub(crate) read: Duration,
    pub(crate) transform: Duration,
    /// How long the reader waited for the slot before.
    pub(crate) waited: Duration,
    pub(crate) hints: Hinted,
    /// Times that the pages could not be given up.
    pub(crate) evict_failed: u64,
    pub(crate) residency: Residency,
}

impl Cost {
    /// The time of the reading thread.
    pub(crate) fn load(&self) -> Duration {
        self.read + self.transform
    }
}
