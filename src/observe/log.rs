//! The event log: what each thread did. The report, the trace and the breakdown are made from these events.
//!
//! An [`Event`] is an interval of one thread's time, with a batch and its bytes. A loading thread sends the times of a
//! load along with the batch ([`LoadTimes`]). A device keeps the times of its last copies. The
//! [`Recorder`](super::recorder::Recorder) makes the caller's events. The report adds events up, the trace writes them
//! to a file, and the breakdown counts them as phases.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::At;

/// The name of a unit in errors, reports and traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Counts epochs, passes, or rounds from 0: a trace records the first ones.
    pub ordinal: u64,
    /// The epoch; the round of a generator, the pass of a stream.
    pub epoch: u64,
    /// The step in the epoch.
    pub step: u64,
}

/// Identifies a unit: its call, its number in that call, and its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// The number of the call. A unit that was filled for an earlier call is discarded.
    pub(crate) generation: u64,
    /// The number of units before it in the same call. In the log: the number of units before it in the ring.
    pub(crate) seq: u64,
    pub(crate) place: Place,
}

/// Names batches in errors.
#[derive(Clone, Debug, Default)]
pub(crate) struct Naming {
    pub(crate) loader: Option<Arc<str>>,
    /// Whether the epochs are rounds of a generator, which have no steps.
    pub(crate) rounds: bool,
}

impl Naming {
    pub(crate) fn at(&self, Place { epoch, step, .. }: Place) -> At {
        At { loader: self.loader.clone(), epoch, step: (!self.rounds).then_some(step) }
    }
}

/// How a slot was filled: the loading thread's part of the event log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LoadTimes {
    /// When the loading thread began to wait for the slot, or for permission to start. `start` if it did not wait.
    pub(crate) since: Instant,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
    /// The time of the transforms.
    pub(crate) transform: Duration,
    /// The number of system calls that read files.
    pub(crate) io_calls: u64,
    /// Bytes before the transforms.
    pub(crate) bytes: usize,
    /// When the previous batch in this slot freed it.
    pub(crate) freed: Option<Freed>,
}

impl LoadTimes {
    /// Returns the times of a load that begins at `start`, without a wait before it.
    pub(crate) const fn new(start: Instant) -> Self {
        let (transform, io_calls, bytes, freed) = (Duration::ZERO, 0, 0, None);
        Self { since: start, start, end: start, transform, io_calls, bytes, freed }
    }

    pub(crate) fn took(&self) -> Duration {
        self.end.saturating_duration_since(self.start)
    }

    /// Returns the events of this load. In fact, reading and transforming alternate, part by part. The log has one event
    /// for all reading, followed by one for all transforms.
    pub(super) fn events(&self, batch: Place) -> impl Iterator<Item = Event> {
        let Self { since, start, end, transform, bytes, .. } = *self;
        let read_end = end.checked_sub(transform).unwrap_or(end);
        let all =
            [(What::SlotWait, since, start), (What::Load, start, read_end), (What::Transform, read_end, end)];
        let some = all.into_iter().filter(|(what, start, end)| *what == What::Load || start < end);
        some.map(move |(what, start, end)| Event { what, batch, start, end, bytes })
    }
}

/// The number of steps in the page's timeline.
pub(super) const STEPS: usize = 24;

/// When a unit was loaded, copied, received and used.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Seen {
    pub(super) ticket: Ticket,
    /// The start and the end of its load.
    pub(super) load: Interval,
    pub(super) copied: Option<Interval>,
    pub(super) asked: Instant,
    pub(super) received: Instant,
    /// When its use ended: when the caller asked for the next one.
    pub(super) released: Instant,
}

impl Seen {
    pub(super) fn new(ticket: Ticket, load: Interval, asked: Instant, received: Instant) -> Self {
        Self { ticket, load, copied: None, asked, received, released: received }
    }
}

/// When the slot of a batch was freed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Freed {
    /// The number of batches before that batch in the ring.
    pub(crate) number: u64,
    pub(crate) at: Instant,
}

/// What a thread did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The caller: a whole epoch.
    Epoch,
    /// The caller: a step, from the request for a batch to the end of its use.
    Step,
    /// The caller waited for a batch.
    Wait,
    /// The caller had received a batch whose copy to the device was not complete.
    CopyWait,
    /// The caller prepared the next round.
    Prepare,
    /// The caller used a batch.
    Use,
    /// The caller did something else: it iterated over another loader.
    Pause,
    /// A loading thread waited for a slot, or for permission to start.
    SlotWait,
    /// A loading thread read a batch, or ran the closure that makes a round.
    Load,
    /// A loading thread transformed a batch.
    Transform,
    /// A batch was copied to the device.
    Transfer,
}

/// An interval of one thread's time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) what: What,
    /// The batch. For an epoch, its first batch.
    pub(crate) batch: Place,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
    pub(crate) bytes: usize,
}

impl Event {
    #[inline]
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

impl StageTimes {
    /// These times without what `part` has of them.
    pub(super) fn less(self, part: Self) -> Self {
        let Self { busy, waiting } = self;
        Self { busy: busy.saturating_sub(part.busy), waiting: waiting.saturating_sub(part.waiting) }
    }
}

/// The start and the end of an interval.
pub(crate) type Interval = (Instant, Instant);

/// The number of pauses that a thread remembers: more than one step usually has.
pub(super) const LAST: usize = 1024;

thread_local! {
    /// The last pauses of this thread, in the order of their ends.
    static PAUSES: RefCell<VecDeque<Interval>> = const { RefCell::new(VecDeque::new()) };
}

/// Records that this thread did something else during `pause`, which ends now. Each loader whose batch was in use for
/// that whole time leaves it out.
pub(crate) fn pause(pause: Interval) {
    // Fails only while the thread ends, when no loop runs on it that could need the pause.
    let _ = PAUSES.try_with(|pauses| {
        let mut pauses = pauses.borrow_mut();
        if pauses.len() == LAST {
            pauses.pop_front();
        }
        pauses.push_back(pause);
    });
}

/// Returns the pauses of this thread that began at `since` or later, in order and disjoint.
#[inline]
pub(crate) fn pauses(since: Instant) -> Vec<Interval> {
    let last = |pauses: &RefCell<VecDeque<Interval>>| {
        let pauses = pauses.borrow();
        let later = pauses.iter().rev().take_while(|(_, to)| *to > since);
        later.filter(|(from, _)| *from >= since).copied().collect()
    };
    let mut found: Vec<Interval> = PAUSES.try_with(last).unwrap_or_default();
    found.sort_unstable();
    found.dedup_by(|later, earlier| {
        let overlap = later.0 <= earlier.1;
        if overlap {
            earlier.1 = earlier.1.max(later.1);
        }
        overlap
    });
    found
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn pauses_are_counted_once_and_only_within_the_use() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        pause((at(0), at(5))); // before the batch came
        pause((at(9), at(12))); // began before the batch came
        pause((at(20), at(25)));
        pause((at(32), at(36))); // within another
        pause((at(30), at(40)));
        pause((at(38), at(45)));
        assert_eq!(pauses(at(10)), [(at(20), at(25)), (at(30), at(45))]);
        assert_eq!(pauses(at(45)), []);
        for ms in 0..10 * LAST as u64 {
            pause((at(50 + ms), at(51 + ms)));
        }
        assert!(PAUSES.with_borrow(VecDeque::len) <= LAST);
    }
}
