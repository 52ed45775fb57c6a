//! Time that a thread spends on something else while it has a batch: a validation inside an epoch is neither the
//! training's compute nor its wait.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::time::Instant;

/// From when to when.
pub(crate) type Interval = (Instant, Instant);

/// How many pauses a thread remembers: more than there are in one step.
const LAST: usize = 1024;

thread_local! {
    /// The last pauses of this thread, in the order of their ends.
    static PAUSES: RefCell<VecDeque<Interval>> = const { RefCell::new(VecDeque::new()) };
}

/// This thread did something else from `from` to `to` (now): all loaders whose batch was in use all the time leave
/// that out.
pub(crate) fn pause(pause: Interval) {
    // At the end of a thread there is nothing left to tell.
    let _ = PAUSES.try_with(|pauses| {
        let mut pauses = pauses.borrow_mut();
        if pauses.len() == LAST {
            pauses.pop_front();
        }
        pauses.push_back(pause);
    });
}

/// Returns the pauses of this thread that began at `since` or later, in order and disjoint.
pub(crate) fn pauses(since: Instant) -> Vec<Interval> {
    let last = |pauses: &RefCell<VecDeque<Interval>>| {
        let pauses = pauses.borrow();
        let later = pauses.iter().rev().take_while(|(_, to)| *to > since);
        later.filter(|(from, _)| *from >= since).copied().collect()
    };
    let mut found: Vec<Interval> = PAUSES.try_with(last).unwrap_or_default();
    if found.is_empty() {
        return found;
    }
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
        pause((at(9), at(12))); // began before it did
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
