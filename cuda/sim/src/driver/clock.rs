//! Happens-before: vector clocks, and the accesses to one allocation that later accesses must be ordered after.
//!
//! An *agent* (a stream, or the host) numbers its steps. For every agent, a clock holds the last step known to happen
//! before. An edge (event wait, synchronize, enqueue) joins one clock into another. An access races with an earlier one
//! if they overlap, one of them writes, and the later one's clock does not contain the earlier one's step. All of this
//! happens when work is *enqueued*, so the workers' timing does not matter.

use std::collections::BTreeMap;

/// A stream's handle, or a host thread's number.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) agent: Agent,
    pub(super) step: u64,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) write: bool,
    /// The operation: `h2d`, `host write`, ...
    pub(super) what: &'static str,
}

/// The accesses to one allocation, except those that later ones cover.
#[derive(Debug, Default)]
pub(super) struct History(Vec<Access>);

impl History {
    /// Adds an access made with this clock, and returns the earlier ones that it races with.
    pub(super) fn add(&mut self, new: Access, clock: &Clock) -> Vec<Access> {
        let mut races = Vec::new();
        self.0.retain(|old| {
            let overlap = old.from < new.to && new.from < old.to;
            let ordered = clock.knows(old.agent, old.step);
            if overlap && !ordered && (old.write || new.write) {
                races.push(*old);
            }
            // An agent that is ordered after `new` is ordered after everything before `new`. So an earlier access can
            // be dropped if it is ordered before `new`, is inside its range, and conflicts with nothing that `new` does
            // not conflict with.
            let covered = new.from <= old.from && old.to <= new.to;
            !(ordered && covered && (new.write || !old.write))
        });
        self.0.push(new);
        races
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(agent: Agent, step: u64, (from, to): (u64, u64), write: bool) -> Access {
        Access { agent, step, from, to, write, what: "test" }
    }

    #[test]
    fn only_conflicting_overlapping_unordered_accesses_race() {
        // First access, second access (range, write), whether the second one's clock knows the first, race.
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
            assert_eq!(history.add(access(1, step, first, first_writes), &one), []);
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
        assert_eq!(history.add(access(3, step, (0, 8), true), &three), []);
    }

    #[test]
    fn a_long_run_keeps_few_accesses_and_forgets_no_race() {
        let (mut one, mut two) = (Clock::default(), Clock::default());
        let mut history = History::default();
        let mut last = None;
        for _ in 0..1000 {
            let step = one.tick(1);
            let write = access(1, step, (0, 8), true);
            assert_eq!(history.add(write, &one), []);
            two.join(&one);
            let step = two.tick(2);
            let read = access(2, step, (0, 8), false);
            assert_eq!(history.add(read, &two), []);
            last = Some((read, write));
            one.join(&two);
        }
        assert!(history.0.len() <= 2, "{} kept", history.0.len());
        let (read, write) = last.unwrap();
        let mut stranger = Clock::default();
        let step = stranger.tick(3);
        assert_eq!(history.add(access(3, step, (2, 3), true), &stranger), [write, read]);
    }
}
