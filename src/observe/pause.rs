//! Time that the caller spends on something else while it has a batch: a validation inside an epoch is neither the
//! training's compute nor its wait.

use std::cell::RefCell;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// From when to when.
pub(crate) type Span = (Instant, Instant);

/// The pauses of one recorder while its batch is in use.
#[derive(Debug, Default)]
pub(crate) struct Pauses(Mutex<InUse>);

#[derive(Debug, Default)]
struct InUse {
    /// `None` while no batch is in use.
    since: Option<Instant>,
    pauses: Vec<Span>,
}

thread_local! {
    /// The recorders of loaders that are iterated on this thread.
    static WATCHING: RefCell<Vec<Weak<Pauses>>> = const { RefCell::new(Vec::new()) };
}

/// The caller did something else from `from` to `to`: all loaders of this thread whose batch was in use all the time
/// leave that out.
pub(crate) fn pause((from, to): Span) {
    // At the end of a thread there is nothing left to tell.
    let _ = WATCHING.try_with(|watching| {
        for pauses in watching.borrow().iter().filter_map(Weak::upgrade) {
            let mut in_use = pauses.lock();
            if in_use.since.is_some_and(|since| since <= from) {
                in_use.pauses.push((from, to));
            }
        }
    });
}

impl Pauses {
    fn lock(&self) -> MutexGuard<'_, InUse> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens for pauses on this thread.
    pub(crate) fn watch(self: &Arc<Self>) {
        let _ = WATCHING.try_with(|watching| watching.borrow_mut().push(Arc::downgrade(self)));
    }

    /// Listens no more.
    pub(crate) fn unwatch(self: &Arc<Self>) {
        let _ = WATCHING.try_with(|watching| {
            watching
                .borrow_mut()
                .retain(|other| other.strong_count() > 0 && other.as_ptr() != Arc::as_ptr(self));
        });
    }

    /// A batch is in use from now on.
    pub(crate) fn begin(&self, now: Instant) {
        self.lock().since = Some(now);
    }

    /// The use is over. Returns its pauses, in order and disjoint.
    pub(crate) fn end(&self) -> Vec<Span> {
        let mut in_use = self.lock();
        in_use.since = None;
        let mut found = mem::take(&mut in_use.pauses);
        drop(in_use);
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
}

/// How long they are together.
pub(crate) fn total(pauses: &[Span]) -> Duration {
    pauses.iter().map(|(from, to)| to.saturating_duration_since(*from)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_counted_once_and_only_within_the_use() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let pauses = Arc::new(Pauses::default());
        pauses.watch();
        pause((at(0), at(5))); // no batch is in use
        pauses.begin(at(10));
        pause((at(9), at(12))); // began before it was
        pause((at(30), at(40)));
        pause((at(32), at(36))); // within another
        pause((at(38), at(45)));
        pause((at(20), at(25)));
        let found = pauses.end();
        assert_eq!(found, [(at(20), at(25)), (at(30), at(45))]);
        assert_eq!(total(&found), Duration::from_millis(20));
        pauses.unwatch();
        pauses.begin(at(50));
        pause((at(60), at(70)));
        assert!(pauses.end().is_empty());
    }
}
