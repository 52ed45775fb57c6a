//! The last units that the caller received: the timeline of the page, and when the caller's use of a unit ended.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::log::{Interval, LoadTimes, Ticket};

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
    fn new(ticket: Ticket, load: Interval, asked: Instant, received: Instant) -> Self {
        Self { ticket, load, copied: None, asked, received, released: received }
    }

    /// Returns when the use of the unit began: when the caller received it, or when its copy to the device was complete.
    pub(super) fn used_from(&self) -> Instant {
        match self.copied {
            Some((_, copied)) => copied.clamp(self.received, self.released),
            None => self.received,
        }
    }
}

/// The last units that the caller received.
#[derive(Debug)]
pub(super) struct History {
    /// The last one may be in use.
    units: VecDeque<Seen>,
    in_use: bool,
    /// The maximum number of units: those of the timeline, and one for each slot.
    limit: usize,
}

impl History {
    /// Creates the history of a loader with `depth` slots.
    pub(super) fn new(depth: usize) -> Self {
        Self { units: VecDeque::new(), in_use: false, limit: STEPS.max(depth.saturating_add(1)) }
    }

    /// Returns the unit in use.
    #[inline]
    pub(super) fn in_use(&self) -> Option<&Seen> {
        self.units.back().filter(|_| self.in_use)
    }

    /// Records that the caller has received a unit.
    #[inline]
    pub(super) fn received(&mut self, ticket: Ticket, load: &LoadTimes, asked: Instant, now: Instant) {
        // If the loop received two items without a request in between, forget the first: its use has no known end.
        if std::mem::replace(&mut self.in_use, true) {
            self.units.pop_back();
        }
        if self.units.len() == self.limit {
            self.units.pop_front();
        }
        self.units.push_back(Seen::new(ticket, (load.start, load.end), asked, now));
    }

    /// Returns how long the slot of this load was kept from a loading thread that waited for it, after the caller had
    /// asked for another unit.
    #[inline]
    pub(super) fn kept(&self, load: &LoadTimes) -> Duration {
        let Some(freed) = load.freed.filter(|freed| freed.at > load.since) else { return Duration::ZERO };
        let before = self.units.iter().rev().find(|seen| seen.ticket.seq == freed.number);
        before.map_or(Duration::ZERO, |before| {
            freed.at.saturating_duration_since(before.released.max(load.since))
        })
    }

    /// Records the end of the use of the unit in use. `copied` is when the unit was copied to the device.
    #[inline]
    pub(super) fn released(&mut self, now: Instant, copied: Option<Interval>) {
        self.in_use = false;
        if let Some(seen) = self.units.back_mut() {
            (seen.released, seen.copied) = (now, copied);
        }
    }

    /// Returns the last units whose use is over. If the caller is waiting for a unit, `waits` has the first unit of its
    /// epoch, and the interval of the wait: the last unit is then that one, with a load that takes that long.
    pub(super) fn recent(&self, waits: Option<(Ticket, Interval)>) -> Vec<Seen> {
        let used = self.units.len() - usize::from(self.in_use);
        let units = self.units.iter().take(used).skip(used.saturating_sub(STEPS));
        let mut units: Vec<_> = units.cloned().collect();
        units.extend(waits.map(|(first, wait)| {
            let next = |last: &Seen| Ticket { step: last.ticket.step + 1, ..last.ticket };
            let last = self.units.back().filter(|last| last.ticket.epoch == first.epoch);
            Seen::new(last.map_or(first, next), wait, wait.0, wait.1)
        }));
        units
    }
}

/// Returns the units of a loop, with their loads and copies as `sender` recorded them: the thread that receives the
/// batches from the loader and sends them to a device.
pub(super) fn on_device(units: &[Seen], sender: &[Seen]) -> Vec<Seen> {
    let id = |seen: &Seen| (seen.ticket.epoch, seen.ticket.step);
    let unit = |seen: &Seen| {
        let sent = sender.iter().rev().find(|sent| id(sent) == id(seen))?;
        Some(Seen { load: sent.load, copied: Some((sent.received, sent.released)), ..seen.clone() })
    };
    units.iter().filter_map(unit).collect()
}
