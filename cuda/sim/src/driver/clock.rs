//! Happens-before: vector clocks, and the accesses to one allocation that later accesses must be ordered after.
//!
//! An *agent* (a stream, or the host) numbers its steps. For every agent, a clock holds the last step known to happen
//! before. An edge (event wait, synchronize, enqueue) joins one clock into another. An access races with an earlier one
//! if they overlap, one of them writes, and the later one's clock does not contain the earlier one's step. For
//! work, all of this happens when it is *enqueued*, so the workers' timing does not matter. A host function takes its
//! step then too, but its accesses are checked when it makes them.

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

/// A step of an agent.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) agent: Agent,
    pub(super) number: u64,
    /// What it is ordered after, and itself.
    pub(super) clock: Arc<Clock>,
}

impl Step {
    /// Whether it is ordered after another step, or is the same.
    fn follows(&self, other: &Self) -> bool {
        self.clock.knows(other.agent, other.number)
    }
}

/// A read or write of the bytes `from..to` of one allocation.
#[derive(Clone, Debug)]
pub(super) struct Access {
    pub(super) at: Step,
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
    /// Whether an access at a step races with this one. A host function runs after calls that enqueued work behind it, so
    /// either of the two may be ordered first.
    fn races(&self, (from, to): (u64, u64), write: bool, at: &Step) -> bool {
        let overlap = self.from < to && from < self.to;
        overlap && (self.write || write) && !at.follows(&self.at) && !self.at.follows(at)
    }
}

/// The accesses to one allocation that calls made, except those that later ones cover.
#[derive(Debug, Default)]
pub(super) struct History(Vec<Access>);

impl History {
    /// Adds an access, and returns the earlier ones that it races with. `pending` are the host functions whose accesses may
    /// still come.
    pub(super) fn add(&mut self, new: Access, pending: &[Step]) -> Vec<Access> {
        let mut races = Vec::new();
        // A function may be ordered before `new`, and still race with an earlier access.
        let between = |old: &Access, function: &Step| {
            new.at.follows(function) && !old.at.follows(function) && !function.follows(&old.at)
        };
        self.0.retain(|old| {
            if old.races((new.from, new.to), new.write, &new.at) {
                races.push(old.clone());
            }
            // An agent that is ordered after `new` is ordered after everything before `new`. So an earlier access can
            // be dropped if it is ordered before `new`, is inside its range, and conflicts with nothing that `new` does
            // not conflict with.
            let covered = new.from <= old.from && old.to <= new.to;
            let useless = new.at.follows(&old.at) && covered && (new.write || !old.write);
            !useless || pending.iter().any(|function| between(old, function))
        });
        self.0.push(new);
        races
    }

    /// The accesses that race with a read or `write` of these bytes at a step. Each is returned only once.
    pub(super) fn touch(&mut self, bytes: (u64, u64), write: bool, at: &Step) -> Vec<Access> {
        let racing = self.0.iter_mut().filter(|old| !old.reported && old.races(bytes, write, at));
        racing
            .map(|old| {
                old.reported = true;
                old.clone()
            })
            .collect()
    }

    /// The pages to close to a program in which agents with these clocks run: those with accesses that one of the clocks does
    /// not contain and that were not reported. Where these only read, the program may read too. Where one writes, the program
    /// may do nothing.
    pub(super) fn closed(&self, clocks: &[&Clock]) -> Vec<Closed> {
        let known =
            |Step { agent, number, .. }: &Step| clocks.iter().all(|clock| clock.knows(*agent, *number));
        let unknown = self.0.iter().filter(|old| !old.reported && !known(&old.at));
        // In one pass over where the accesses begin and end, because a buffer may be copied in thousands of chunks.
        let ends = |old: &Access| {
            [(old.from / PAGE * PAGE, old.write, 1), (old.to.next_multiple_of(PAGE), old.write, -1)]
        };
        let mut ends: Vec<_> = unknown.flat_map(ends).collect();
        ends.sort_unstable();
        let (mut closed, mut begin, mut reads_and_writes) = (Vec::<Closed>::new(), 0, [0, 0]);
        for (end, write, change) in ends {
            let prot = if reads_and_writes[1] > 0 { sys::PROT_NONE } else { sys::PROT_READ };
            let used = reads_and_writes != [0, 0] && begin < end;
            match closed.last_mut().filter(|(_, to, last)| *to == begin && *last == prot) {
                Some((_, to, _)) if used => *to = end,
                _ if used => closed.push((begin, end, prot)),
                _ => {}
            }
            begin = end;
            reads_and_writes[usize::from(write)] += change;
        }
        closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next step of an agent with this clock.
    fn step(agent: Agent, clock: &mut Clock) -> Step {
        let number = clock.tick(agent);
        Step { agent, number, clock: Arc::new(clock.clone()) }
    }

    /// An access at the next step of an agent.
    fn access(agent: Agent, clock: &mut Clock, (from, to): (u64, u64), write: bool) -> Access {
        let (at, stack) = (step(agent, clock), Arc::new(Stack::none()));
        Access { at, from, to, write, what: "test", stack, reported: false }
    }

    /// What tells the accesses of these tests apart: agent, step, and whether it is a write.
    fn steps(accesses: &[Access]) -> Vec<(Agent, u64, bool)> {
        accesses.iter().map(|access| (access.at.agent, access.at.number, access.write)).collect()
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
        for row @ (first, first_writes, second, second_writes, known, race) in table {
            let mut history = History::default();
            let mut one = Clock::default();
            assert!(history.add(access(1, &mut one, first, first_writes), &[]).is_empty());
            let mut two = Clock::default();
            if known {
                two.join(&one);
            }
            let races = history.add(access(2, &mut two, second, second_writes), &[]);
            assert_eq!(!races.is_empty(), race, "{row:?}");
        }
    }

    #[test]
    fn knowledge_passes_through_a_third_agent() {
        let (mut one, mut two, mut three) = (Clock::default(), Clock::default(), Clock::default());
        let mut history = History::default();
        history.add(access(1, &mut one, (0, 8), true), &[]);
        two.join(&one);
        two.tick(2);
        three.join(&two);
        assert!(history.add(access(3, &mut three, (0, 8), true), &[]).is_empty());
    }

    #[test]
    fn a_long_run_keeps_few_accesses_and_forgets_no_race() {
        let (mut one, mut two) = (Clock::default(), Clock::default());
        let mut history = History::default();
        let mut last = None;
        for _ in 0..1000 {
            let write = access(1, &mut one, (0, 8), true);
            assert!(history.add(write.clone(), &[]).is_empty());
            two.join(&one);
            let read = access(2, &mut two, (0, 8), false);
            assert!(history.add(read.clone(), &[]).is_empty());
            last = Some((read, write));
            one.join(&two);
        }
        assert!(history.0.len() <= 2, "{} kept", history.0.len());
        let (read, write) = last.unwrap();
        let mut stranger = Clock::default();
        let races = history.add(access(3, &mut stranger, (2, 3), true), &[]);
        assert_eq!(steps(&races), steps(&[write, read]));
    }

    #[test]
    fn a_host_function_does_not_race_with_what_was_enqueued_behind_it() {
        let (mut one, mut two) = (Clock::default(), Clock::default());
        let mut history = History::default();
        let function = step(1, &mut one);
        history.add(access(1, &mut one, (0, 8), false), &[]);
        assert!(history.touch((0, 1), true, &function).is_empty());
        history.add(access(2, &mut two, (0, 8), false), &[]);
        assert_eq!(steps(&history.touch((0, 1), true, &function)), [(2, 1, false)]);
    }

    #[test]
    fn an_access_that_a_host_function_may_race_with_is_kept_until_the_function_has_ended() {
        for pending in [true, false] {
            let (mut one, mut two) = (Clock::default(), Clock::default());
            let mut history = History::default();
            let function = step(1, &mut one);
            history.add(access(2, &mut two, (0, 8), true), &[]);
            // The second copy is ordered after both.
            two.join(&one);
            let functions = [function.clone()];
            history.add(access(2, &mut two, (0, 8), true), &functions[..usize::from(pending)]);
            let found = history.touch((0, 1), true, &function);
            assert_eq!(steps(&found), [(2, 1, true)][..usize::from(pending)]);
        }
    }

    #[test]
    fn pages_are_closed_as_far_as_copies_use_them_that_the_host_does_not_know() {
        let (mut stream, mut host) = (Clock::default(), Clock::default());
        let mut history = History::default();
        for (range, write) in [((0, 10), false), ((2 * PAGE, 3 * PAGE + 1), true), ((5000, 9000), false)] {
            history.add(access(1, &mut stream, range, write), &[]);
        }
        let (read, nothing) = (sys::PROT_READ, sys::PROT_NONE);
        let closed = [(0, 2 * PAGE, read), (2 * PAGE, 4 * PAGE, nothing)];
        assert_eq!(history.closed(&[&host]), closed);
        // A byte that no copy uses; a read and then a write of a byte that a copy reads. The write is reported once.
        let at = step(2, &mut host);
        assert!(history.touch((10, 11), true, &at).is_empty());
        assert!(history.touch((9, 10), false, &at).is_empty());
        assert_eq!(steps(&history.touch((8, 16), true, &at)), [(1, 1, false)]);
        assert!(history.touch((9, 10), true, &at).is_empty());
        assert_eq!(history.closed(&[&host]), [(PAGE, 2 * PAGE, read), closed[1]]);
        host.join(&stream);
        assert_eq!(history.closed(&[&host]), []);
    }

    #[test]
    fn each_page_is_closed_by_what_uses_it() {
        let mut random = 1_u64;
        let mut number = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..1000 {
            let (mut history, mut accesses) = (History::default(), Vec::new());
            for agent in 2..2 + number(6) {
                // Each has a clock of its own, so none is ordered after another and drops it.
                let from = number(8 * PAGE);
                let new =
                    access(agent, &mut Clock::default(), (from, from + 1 + number(2 * PAGE)), number(3) == 0);
                history.add(new.clone(), &[]);
                accesses.push(new);
            }
            let closed = history.closed(&[&Clock::default()]);
            assert!(closed.windows(2).all(|two| two[0].1 <= two[1].0), "{closed:?}");
            for page in (0..10 * PAGE).step_by(4096) {
                let here = accesses.iter().filter(|one| one.from < page + PAGE && page < one.to);
                let writes = here.map(|one| one.write).reduce(|one, other| one || other);
                let closed = closed.iter().find(|(from, to, _)| (*from..*to).contains(&page));
                let found = closed.map(|(.., prot)| *prot);
                let wanted = writes.map(|write| if write { sys::PROT_NONE } else { sys::PROT_READ });
                assert_eq!(found, wanted, "{accesses:?}");
            }
        }
    }
}
