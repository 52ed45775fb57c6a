//! Happens-before: vector clocks, and the accesses to one allocation that later accesses must be ordered after.
//!
//! An *agent* (a stream, or the host) numbers its steps. For every agent, a clock holds the last step known to happen
//! before. An edge (event wait, synchronize, enqueue) joins one clock into another. An access races with an earlier one
//! if they overlap, one of them writes, and the later one's clock does not contain the earlier one's step. For
//! work, all of this happens when it is *enqueued*, so the workers' timing does not matter.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::guard::{Closed, PAGE};
use super::stack::Stack;
use crate::sys;

/// The number of a stream, of the host, or of a host thread.
pub(super) type Agent = u64;

/// For every agent, the number of its last known step.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(BTreeMap<Agent, u64>);

impl Clock {
    /// Joins `other` into this clock.
    pub(super) fn join(&mut self, other: &Self) {
        for (agent, step) in &other.0 {
            let known = self.0.entry(*agent).or_insert(0);
            *known = (*known).max(*step);
        }
    }

    /// The agent's next step.
    pub(super) fn tick(&mut self, agent: Agent) -> u64 {
        let step = self.0.entry(agent).or_insert(0);
        *step += 1;
        *step
    }

    /// The agent's last known step; 0 if none is known.
    pub(super) fn step(&self, agent: Agent) -> u64 {
        self.0.get(&agent).copied().unwrap_or(0)
    }

    pub(super) fn knows(&self, agent: Agent, step: u64) -> bool {
        self.step(agent) >= step
    }
}

/// A read or write of the bytes `from..to` of one allocation.
#[derive(Clone, Debug)]
pub(super) struct Access {
    pub(super) agent: Agent,
    pub(super) step: u64,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) write: bool,
    /// The operation: `h2d`, `host write`, ...
    pub(super) what: &'static str,
    /// Where it was made.
    pub(super) stack: Arc<Stack>,
    /// Whether it was part of a reported violation: the guard then no longer closes its pages.
    pub(super) reported: bool,
}

impl Access {
    /// Whether an access with this clock races with this earlier one.
    fn races(&self, (from, to): (u64, u64), write: bool, clock: &Clock) -> bool {
        let overlap = self.from < to && from < self.to;
        overlap && (self.write || write) && !clock.knows(self.agent, self.step)
    }
}

/// The accesses to one allocation that calls made, except those that later ones cover.
#[derive(Debug, Default)]
pub(super) struct History(Vec<Access>);

impl History {
    /// Adds an access made with this clock, and returns the earlier ones that it races with.
    pub(super) fn add(&mut self, new: Access, clock: &Clock) -> Vec<Access> {
        let mut races = Vec::new();
        self.0.retain(|old| {
            if old.races((new.from, new.to), new.write, clock) {
                races.push(old.clone());
            }
            // An agent that is ordered after `new` is ordered after everything before `new`. So an earlier access can
            // be dropped if it is ordered before `new`, is inside its range, and conflicts with nothing that `new` does
            // not conflict with.
            let covered = new.from <= old.from && old.to <= new.to;
            !(clock.knows(old.agent, old.step) && covered && (new.write || !old.write))
        });
        self.0.push(new);
        races
    }

    /// The accesses that race with a read or `write` of this byte by an agent with this clock. Each is returned only once.
    pub(super) fn touch(&mut self, byte: u64, write: bool, clock: &Clock) -> Vec<Access> {
        let racing =
            self.0.iter_mut().filter(|old| !old.reported && old.races((byte, byte + 1), write, clock));
        racing
            .map(|old| {
                old.reported = true;
                old.clone()
            })
            .collect()
    }

    /// The pages to close to a program with the clock `known`: those with accesses that `known` does not contain and
    /// that were not reported. Where these only read, the program may read too. Where one writes, the program may do nothing.
    pub(super) fn closed(&self, known: &Clock) -> Vec<Closed> {
        let pages = |old: &Access| (old.from / PAGE * PAGE, old.to.next_multiple_of(PAGE), old.write);
        let unknown = self.0.iter().filter(|old| !old.reported && !known.knows(old.agent, old.step));
        let unknown: Vec<_> = unknown.map(pages).collect();
        let mut cuts: Vec<u64> = unknown.iter().flat_map(|(from, to, _)| [*from, *to]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let between = cuts.windows(2).filter_map(|cut| {
            let here = unknown.iter().filter(|(from, to, _)| *from < cut[1] && cut[0] < *to);
            let writes = here.map(|(.., write)| *write).reduce(|one, other| one || other)?;
            Some((cut[0], cut[1], if writes { sys::PROT_NONE } else { sys::PROT_READ }))
        });
        between.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(agent: Agent, step: u64, (from, to): (u64, u64), write: bool) -> Access {
        let stack = Arc::new(Stack::none());
        Access { agent, step, from, to, write, what: "test", stack, reported: false }
    }

    /// What tells the accesses of these tests apart: agent, step, and whether it is a write.
    fn steps(accesses: &[Access]) -> Vec<(Agent, u64, bool)> {
        accesses.iter().map(|access| (access.agent, access.step, access.write)).collect()
    }

    #[test]
    fn only_conflicting_overlapping_unordered_accesses_race() {
        // First and second access (range, write), whether the second one's clock contains the first, whether they race.
        let table = [
            ((0, 8), true, (0, 8), true, false, true),
            ((0, 8), true, (0, 8), false, false, true),
            ((0, 8), false, (4, 12), true, false, true),
            ((0, 8), false, (0, 8), false, false, false),
            ((0, 8), true, (8, 16), true, false, false),
            ((0, 8), true, (7, 9), true, false, true),
            ((0, 8), true, (0, 8), true, true, false),
        ];
        for (number, (first, first_writes, second, second_writes, known, race)) in
            table.into_iter().enumerate()
        {
            let mut history = History::default();
            let mut one = Clock::default();
            let step = one.tick(1);
            assert!(history.add(access(1, step, first, first_writes), &one).is_empty());
            let mut two = Clock::default();
            if known {
                two.join(&one);
            }
            let step = two.tick(2);
            let races = history.add(access(2, step, second, second_writes), &two);
            assert_eq!(!races.is_empty(), race, "row {number}");
        }
    }

    #[test]
    fn knowledge_passes_through_a_third_agent() {
        let (mut one, mut two, mut three) = (Clock::default(), Clock::default(), Clock::default());
        let mut history = History::default();
        let step = one.tick(1);
        history.add(access(1, step, (0, 8), true), &one);
        two.join(&one);
        two.tick(2);
        three.join(&two);
        let step = three.tick(3);
        assert!(history.add(access(3, step, (0, 8), true), &three).is_empty());
    }

    #[test]
    fn a_long_run_keeps_few_accesses_and_forgets_no_race() {
        let (mut one, mut two) = (Clock::default(), Clock::default());
        let mut history = History::default();
        let mut last = None;
        for _ in 0..1000 {
            let step = one.tick(1);
            let write = access(1, step, (0, 8), true);
            assert!(history.add(write.clone(), &one).is_empty());
            two.join(&one);
            let step = two.tick(2);
            let read = access(2, step, (0, 8), false);
            assert!(history.add(read.clone(), &two).is_empty());
            last = Some((read, write));
            one.join(&two);
        }
        assert!(history.0.len() <= 2, "{} kept", history.0.len());
        let (read, write) = last.unwrap();
        let mut stranger = Clock::default();
        let step = stranger.tick(3);
        let races = history.add(access(3, step, (2, 3), true), &stranger);
        assert_eq!(steps(&races), steps(&[write, read]));
    }

    #[test]
    fn pages_are_closed_as_far_as_copies_use_them_that_the_host_does_not_know() {
        let (mut stream, mut host) = (Clock::default(), Clock::default());
        let mut history = History::default();
        for (range, write) in [((0, 10), false), ((2 * PAGE, 3 * PAGE + 1), true), ((5000, 9000), false)] {
            let step = stream.tick(1);
            history.add(access(1, step, range, write), &stream);
        }
        let (read, nothing) = (sys::PROT_READ, sys::PROT_NONE);
        let closed = [
            (0, PAGE, read),
            (PAGE, 2 * PAGE, read),
            (2 * PAGE, 3 * PAGE, nothing),
            (3 * PAGE, 4 * PAGE, nothing),
        ];
        assert_eq!(history.closed(&host), closed);
        // A byte that no copy uses; a read and then a write of a byte that a copy reads. The write is reported once.
        assert!(history.touch(10, true, &host).is_empty() && history.touch(9, false, &host).is_empty());
        assert_eq!(steps(&history.touch(9, true, &host)), [(1, 1, false)]);
        assert!(history.touch(9, true, &host).is_empty());
        assert_eq!(history.closed(&host), closed[1..]);
        host.join(&stream);
        assert_eq!(history.closed(&host), []);
    }
}
