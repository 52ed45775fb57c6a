//! The event log: each thread appends what it did, once, and everything that is shown is made from these events.
//!
//! An [`Event`] is an interval of one thread's time, with the batch and its bytes. A loading thread sends those of a load
//! along with the batch ([`LoadTimes`]), a copying thread keeps its last ones, and the caller's are made by the
//! [`Recorder`](super::recorder::Recorder). The report adds events up, the trace writes them down, and the breakdown counts
//! them as phases. None of these looks at the clock.

use std::time::{Duration, Instant};

use crate::slot::{BatchId, LoadTimes};

/// What a thread did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The caller: an epoch, with its steps.
    Epoch,
    /// The caller: a step, with its wait and its use.
    Step,
    /// The caller waited for a batch.
    Wait,
    /// The same, of a device.
    DeviceWait,
    /// The caller had a batch, and its copy to the device was not done.
    CopyWait,
    /// The caller prepared the next round.
    Prepare,
    /// The caller used a batch.
    Use,
    /// The caller did something else during this time.
    Pause,
    /// A loading thread waited for a slot, or for leave to start.
    SlotWait,
    /// A loading thread read a batch.
    Read,
    /// A loading thread ran the closure that makes a round.
    Generate,
    /// A loading thread transformed a batch.
    Transform,
    /// A batch was copied to the device.
    Transfer,
}

/// An interval of one thread's time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) what: What,
    pub(crate) batch: BatchId,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
    pub(crate) bytes: usize,
}

impl Event {
    pub(crate) fn time(&self) -> Duration {
        self.end.saturating_duration_since(self.start)
    }
}

/// The times of one stage: the loading threads, or the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StageTimes {
    /// The time that the stage worked.
    pub busy: Duration,
    /// The time that the stage waited for the other stage.
    pub waiting: Duration,
}

impl LoadTimes {
    /// Passes the events of the loading thread to `add`. Reading and transforming alternate part by part: the log has the
    /// time of each, one after the other.
    pub(super) fn events(&self, read: What, batch: BatchId, mut add: impl FnMut(&Event)) {
        let Self { since, start, end, transform, bytes, .. } = *self;
        let mut event = |what, start, end| add(&Event { what, batch, start, end, bytes });
        let read_end = end.checked_sub(transform).unwrap_or(end);
        if since < start {
            event(What::SlotWait, since, start);
        }
        event(read, start, read_end);
        if read_end < end {
            event(What::Transform, read_end, end);
        }
    }
}
