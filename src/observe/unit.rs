//! How units are named, and the times of a fill: what the log is made of.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::At;
use crate::thread::Share;

/// A unit: its call and its place in that call, and its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// Numbers the calls. A unit that was filled for an earlier call is discarded.
    pub(crate) generation: u64,
    /// Units of the same call before it. In the log: its number in the ring.
    pub(crate) seq: u64,
    /// Epochs that were started before this one: decides whether the trace records it.
    pub(crate) ordinal: u64,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
}

/// Names batches in errors.
#[derive(Clone, Debug, Default)]
pub(crate) struct Naming {
    pub(crate) loader: Option<Arc<str>>,
    /// The epochs are the rounds of a generator, and have no steps.
    pub(crate) rounds: bool,
}

impl Naming {
    pub(crate) fn at(&self, Ticket { epoch, step, .. }: Ticket) -> At {
        At { loader: self.loader.clone(), epoch, step: (!self.rounds).then_some(step) }
    }
}

/// How a slot was filled: the loading thread's part of the event log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LoadTimes {
    /// Since when the loading thread waited for the slot, or for leave to start; `start` if it did not.
    pub(crate) since: Instant,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
    /// The part of it that was no reading.
    pub(crate) transform: Duration,
    /// System calls that read files.
    pub(crate) io_calls: u64,
    /// Bytes before the transforms.
    pub(crate) bytes: usize,
    /// CPU share of the load, if it was measured.
    pub(crate) cpu: Option<Share>,
    /// A caller that waits fills slots too.
    pub(crate) helps: bool,
    /// When the batch that had the slot before freed it.
    pub(crate) freed: Option<Freed>,
}

impl LoadTimes {
    /// Of a load that begins now, without a wait before it.
    pub(crate) const fn new(start: Instant) -> Self {
        Self {
            since: start,
            start,
            end: start,
            transform: Duration::ZERO,
            io_calls: 0,
            bytes: 0,
            cpu: None,
            helps: false,
            freed: None,
        }
    }

    pub(crate) fn took(&self) -> Duration {
        self.end.saturating_duration_since(self.start)
    }

    /// How long the slot was free before the loading thread, waiting for it, continued.
    pub(crate) fn slept(&self) -> Option<Duration> {
        let slept = self.start.saturating_duration_since(self.freed?.at);
        (slept < self.start - self.since).then_some(slept)
    }
}

/// When the slot of a batch was freed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Freed {
    /// The number of that batch in the ring.
    pub(crate) number: u64,
    pub(crate) at: Instant,
    pub(crate) thread: usize,
}
