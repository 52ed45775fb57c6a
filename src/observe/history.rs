//! The measurements of the last batches: the steps of the caller's loop, and the input of a [`replay`](super::replay).

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use super::log::{Freed, Interval, LoadTimes, Ticket};
use super::replay::{Hold, Unit};
use crate::thread::{Clock, Share, this_thread};

/// The maximum number of recent steps that a loader records.
const STEPS: usize = 1024;

/// The least time between two measurements of a thread's CPU time. Each reads the clocks twice, which takes about a
/// microsecond.
const LOOK: Duration = Duration::from_millis(1);

/// When a thread last began to measure its CPU time.
#[derive(Debug, Default)]
pub(super) struct Looks(Option<Instant>);

impl Looks {
    /// Reads the clocks if the last measurement began at least [`LOOK`] before `now`.
    #[inline]
    pub(super) fn clock(&mut self, now: Instant) -> Option<Clock> {
        if self.0.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK) {
            return None;
        }
        self.0 = Some(now);
        Clock::now()
    }
}

/// The measurements of one batch.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Seen {
    pub(super) ticket: Ticket,
    /// The thread that received the batch.
    pub(super) by: usize,
    /// When the caller began to iterate, if this is the first batch of that iteration.
    pub(super) began: Option<Instant>,
    pub(super) load: LoadTimes,
    pub(super) copied: Option<Interval>,
    pub(super) asked: Instant,
    pub(super) received: Instant,
    pub(super) released: Instant,
    pub(super) paused: Duration,
    /// When the batch's slot was freed, and by which thread, if that is known.
    pub(super) freed: Option<(Instant, usize)>,
    /// CPU share of the use, if it was measured.
    pub(super) use_cpu: Option<Share>,
}

/// The measurements of the last batches that the caller received.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The last one may be in use.
    units: VecDeque<Seen>,
    in_use: bool,
    began: Option<Instant>,
    /// The clocks when the batch in use was received.
    clock: Option<Clock>,
    looks: Looks,
}

/// A copy of the measurements, for a report.
#[derive(Clone, Default, PartialEq)]
pub(super) struct Recent {
    pub(super) units: Vec<Seen>,
}

impl History {
    /// Records that the caller begins to iterate.
    pub(crate) fn began(&mut self, at: Instant) {
        self.began = Some(at);
    }

    /// Returns the batch in use.
    #[inline]
    pub(super) fn in_use(&self) -> Option<&Seen> {
        self.units.back().filter(|_| self.in_use)
    }

    /// Records that the caller has received a batch.
    #[inline]
    pub(super) fn received(&mut self, ticket: Ticket, load: &LoadTimes, asked: Instant, now: Instant) {
        self.freed(load.freed);
        if std::mem::replace(&mut self.in_use, true) {
            // The loop received two items without a request in between. Forget the first, because its use has no known
            // end.
            self.units.pop_back();
        }
        self.units.push_back(Seen { began: self.began.take(), ..Seen::new(ticket, *load, asked, now) });
        self.clock = self.looks.clock(now);
    }

    /// Records when the slot of an earlier batch was freed. Does nothing for `None`.
    #[inline]
    pub(super) fn freed(&mut self, freed: Option<Freed>) {
        let Some(Freed { number, at, thread }) = freed else { return };
        // Search from the end: a slot is freed soon after the caller received its unit.
        if let Some(seen) = self.units.iter_mut().rev().find(|seen| seen.ticket.seq == number) {
            seen.freed = Some((at, thread));
        }
    }

    /// Measures the CPU time of the batch in use. To be called before the end time of the use is read: the system often
    /// preempts a thread when it reads its CPU time, and the time of that preemption then counts as use.
    #[inline]
    pub(crate) fn ends(&mut self) {
        if let (Some(clock), Some(seen)) = (self.clock.take(), self.units.back_mut()) {
            seen.use_cpu = clock.since(seen.received.elapsed());
        }
    }

    /// Records the end of the use of the batch in use. `paused` is the time of pauses during the use. `copied` is when
    /// the batch was copied to the device.
    #[inline]
    pub(super) fn released(&mut self, now: Instant, paused: Duration, copied: Option<Interval>) {
        self.in_use = false;
        // At the end of an epoch or a loop, no request for another batch has read the clocks: read them now.
        self.ends();
        let Some(seen) = self.units.back_mut() else { return };
        (seen.released, seen.paused, seen.copied) = (now, paused, copied);
        seen.use_cpu.take_if(|_| !paused.is_zero());
        if self.units.len() > STEPS {
            self.units.pop_front();
        }
    }

    /// Returns a copy of the measurements of the batches whose use is over. If the caller is waiting for a batch,
    /// `waits` has the first batch of its epoch, and the interval of the wait; the copy then has one more batch, whose
    /// load takes that long.
    pub(super) fn recent(&self, waits: Option<(Ticket, (Instant, Instant))>) -> Recent {
        let used = self.units.len() - usize::from(self.in_use);
        let mut units: Vec<_> = self.units.iter().take(used).cloned().collect();
        units.extend(waits.map(|(first, (asked, now))| {
            let next = |last: &Seen| Ticket { step: last.ticket.step + 1, ..last.ticket };
            let last = self.units.back().filter(|last| last.ticket.epoch == first.epoch);
            let load = LoadTimes { end: now, ..LoadTimes::new(asked) };
            Seen { began: self.began, ..Seen::new(last.map_or(first, next), load, asked, now) }
        }));
        Recent { units }
    }
}

/// Prints the number of batches instead of the batches.
impl fmt::Debug for Recent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recent({} batches)", self.units.len())
    }
}

impl Seen {
    pub(super) fn new(ticket: Ticket, load: LoadTimes, asked: Instant, received: Instant) -> Self {
        Self {
            ticket,
            by: this_thread(),
            began: None,
            load,
            copied: None,
            asked,
            received,
            released: received,
            paused: Duration::ZERO,
            freed: None,
            use_cpu: None,
        }
    }

    /// Returns when the use of the batch began: when the caller received it, or when its copy to the device was
    /// complete.
    pub(super) fn used_from(&self) -> Instant {
        match self.copied {
            Some((_, copied)) => copied.clamp(self.received, self.released),
            None => self.received,
        }
    }

    /// Returns the time from the call that asked for this batch to the call that asked for the next one, without
    /// pauses.
    pub(super) fn wall(&self) -> Duration {
        (self.released - self.asked).saturating_sub(self.paused)
    }
}

impl Recent {
    /// Returns these batches and those of a later iteration: the last [`STEPS`] of them.
    pub(super) fn then(&self, later: &Self) -> Self {
        let mut units = [&self.units[..], &later.units].concat();
        units.drain(..units.len().saturating_sub(STEPS));
        Self { units }
    }

    /// Returns the batches of a loop, with their loads and copies as `sender` recorded them. `sender` is the thread
    /// that receives the batches from the loader and sends them to a device.
    pub(super) fn on_device(&self, sender: &Self) -> Self {
        let unit = |seen: &Seen| {
            let id = |seen: &Seen| (seen.ticket.epoch, seen.ticket.step);
            let sent = sender.units.iter().rev().find(|sent| id(sent) == id(seen))?;
            // `freed` is `None`: the device slot is free when the loop ends its use of the batch.
            let (copied, freed) = (Some((sent.received, sent.released)), None);
            Some(Seen { load: sent.load, copied, freed, ..seen.clone() })
        };
        Self { units: self.units.iter().filter_map(unit).collect() }
    }

    /// Returns how many nanoseconds a sleeping thread needs to wake up, on average: the caller after a load, and a
    /// loading thread after a slot was freed. `None` for a thread that never slept.
    pub(super) fn wakes(&self) -> [Option<f64>; 2] {
        let [mut caller, mut loader] = [(Duration::ZERO, 0_u32); 2];
        for seen in &self.units {
            let loaded = seen.load.end;
            if loaded > seen.asked {
                caller = (caller.0 + seen.received.saturating_duration_since(loaded), caller.1 + 1);
            }
            loader = seen.load.slept().map_or(loader, |slept| (loader.0 + slept, loader.1 + 1));
        }
        [caller, loader].map(|(sum, count)| (count > 0).then(|| sum.as_nanos() as f64 / f64::from(count)))
    }

    /// Returns the sums of the measured CPU shares, of loads and of uses.
    pub(super) fn shares(&self) -> [Share; 2] {
        let mut shares = [Share::default(); 2];
        for seen in &self.units {
            for (sum, share) in shares.iter_mut().zip([seen.load.cpu, seen.use_cpu]) {
                share.into_iter().for_each(|share| sum.add(share));
            }
        }
        shares
    }

    /// Returns how many loads ran at the same time, on average over the time in which any ran.
    pub(super) fn side_by_side(&self) -> f64 {
        let mut loads: Vec<_> = self.units.iter().map(|seen| (seen.load.start, seen.load.end)).collect();
        loads.sort_unstable();
        let (mut any, mut until) = (Duration::ZERO, None);
        for (start, end) in &loads {
            let from = until.map_or(*start, |until| (*start).max(until));
            any += end.saturating_duration_since(from);
            until = until.max(Some(*end));
        }
        let all: Duration = loads.iter().map(|(start, end)| *end - *start).sum();
        (all.as_secs_f64() / any.as_secs_f64().max(1e-9)).max(1.0)
    }

    /// Whether loads that run at the same time wait for each other, for example for a lock. `None` if the measurements
    /// do not tell.
    pub(super) fn takes_turns(&self, side_by_side: f64) -> Option<bool> {
        let mut ends: Vec<_> = self.units.iter().map(|seen| seen.load.end).collect();
        ends.sort_unstable();
        let mut gaps: Vec<_> = ends.windows(2).map(|ends| ends[1] - ends[0]).collect();
        gaps.sort_unstable();
        let mean = gaps.iter().sum::<Duration>() / u32::try_from(gaps.len().max(1)).unwrap_or(u32::MAX);
        if side_by_side < 1.5 {
            return None;
        }
        // Loads that wait for each other never end close together. If a tenth of all ends are close, the loads do not
        // take turns.
        let short = *gaps.get(gaps.len() / 10)?;
        if short < mean / 4 {
            return Some(false);
        }
        if short < mean / 2 {
            return None;
        }
        // Even distances between the ends have two causes. Loads that began at even distances all take equally long. If
        // loads take turns, the first of them does not wait, and takes the least time.
        let took = self.units.iter().map(|seen| seen.load.took());
        let (shortest, all) = (took.clone().min().unwrap_or_default(), took.sum::<Duration>());
        let mean = all.as_secs_f64() / self.units.len().max(1) as f64;
        (shortest.as_secs_f64() * side_by_side < 1.5 * mean).then_some(true)
    }

    /// Converts the batches to the input of a replay.
    pub(super) fn units(&self) -> Vec<Unit> {
        let nanos = |time: Duration| time.as_nanos() as f64;
        let between = |from: Instant, to: Instant| nanos(to.saturating_duration_since(from));
        // Each thread that the caller lent batches to, and when that thread freed its last batch.
        let mut threads: Vec<(usize, Instant)> = Vec::new();
        let unit = |(at, seen): (usize, &Seen)| {
            let used_from = seen.used_from();
            let paused = nanos(seen.paused);
            let (own, transform) = (nanos(seen.load.took()), nanos(seen.load.transform));
            let hold = match seen.freed {
                Some((freed, _)) if freed <= seen.released => {
                    Hold::Kept { later: 0, used: between(used_from, freed) }
                }
                Some((freed, thread)) if thread == seen.by => {
                    let later = self.units[at + 1..].iter().take_while(|next| next.received <= freed);
                    let later = later.count();
                    let used = between(self.units[at + later].used_from(), freed);
                    Hold::Kept { later, used }
                }
                Some((freed, thread)) => {
                    let index = threads.iter().position(|&(other, _)| other == thread).unwrap_or_else(|| {
                        threads.push((thread, seen.received));
                        threads.len() - 1
                    });
                    let from = threads[index].1.max(seen.received);
                    threads[index].1 = threads[index].1.max(freed);
                    Hold::Lent { thread: index, service: between(from, freed) }
                }
                None => Hold::Use,
            };
            Unit {
                lead: seen.began.map(|began| between(began, seen.asked)),
                read: (own - transform).max(0.0),
                helps: seen.load.helps,
                transform,
                transfer: seen.copied.map_or(0.0, |(start, end)| between(start, end)),
                train: (between(used_from, seen.released) - paused).max(0.0),
                paused,
                hold,
            }
        };
        let mut units: Vec<Unit> = self.units.iter().enumerate().map(unit).collect();
        // The slots of the last batches were not filled again, so it is not known who freed them, and when. Assume the
        // same as for the last batch of which it is known.
        let known = self.units.iter().rposition(|seen| seen.freed.is_some());
        let (known, last) = units.split_at_mut(known.map_or(0, |known| known + 1));
        if let Some(Unit { hold: hold @ (Hold::Lent { .. } | Hold::Kept { later: 1.., .. }), .. }) =
            known.last()
        {
            last.iter_mut().for_each(|unit| unit.hold = *hold);
        }
        units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No request follows the last use of an epoch, or of a loop that stops early.
    #[test]
    #[cfg(unix)]
    fn a_use_that_no_request_ends_has_its_clocks() {
        let (now, mut history) = (Instant::now(), History::default());
        history.received(Ticket::default(), &LoadTimes::new(now), now, now);
        history.released(Instant::now(), Duration::ZERO, None);
        assert!(history.units[0].use_cpu.is_some());
        history.ends();
        assert!(history.clock.is_none(), "a later request ends no use that is over");
    }
}
