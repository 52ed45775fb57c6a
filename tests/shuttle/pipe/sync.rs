//! The locks, the threads and the ring of the pipe, for shuttle.
//!
//! Shuttle has no clock, so a wait with a timeout yields until the system's clock is past it. A timeout of a second
//! or more is never over: a wait that needs it to end is a deadlock, which shuttle reports.

use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::{Duration, Instant};

use shuttle::rand::{Rng, thread_rng};
use twinbuf_core::{Wait, WaitUntil, Word};

/// Longer than a history takes.
const NEVER: Duration = Duration::from_secs(1);

pub type Consumer<'r, T> = twinbuf_core::Consumer<'r, T, Auto>;
pub type KeptSlot<'r, T> = twinbuf_core::KeptSlot<'r, T, Auto>;
pub type Producer<'r, T> = twinbuf_core::Producer<'r, T, Auto>;
pub type ReadSlot<'c, 'r, T> = twinbuf_core::ReadSlot<'c, 'r, T, Auto>;
pub type ReservedSlot<'r, T> = twinbuf_core::ReservedSlot<'r, T, Auto>;

/// Makes rings whose sides wait in shuttle.
pub(crate) struct HeapRing;

impl HeapRing {
    #[allow(clippy::new_ret_no_self)]
    pub(crate) fn new<T>(slots: Vec<T>) -> twinbuf_core::HeapRing<T, Auto> {
        twinbuf_core::HeapRing::with_wait(slots, Auto::new())
    }
}

/// Sleeps on a condition variable, and sometimes returns from its wait without a reason.
pub struct Auto {
    lock: shuttle::sync::Mutex<()>,
    changed: shuttle::sync::Condvar,
}

impl Auto {
    const fn new() -> Self {
        Self { lock: shuttle::sync::Mutex::new(()), changed: shuttle::sync::Condvar::new() }
    }
}

impl std::fmt::Debug for Auto {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Auto")
    }
}

impl Wait for Auto {
    fn relax(&self, round: u32) -> bool {
        round == 0 && thread_rng().gen_bool(0.25)
    }

    fn wait(&self, word: Word<'_>, expected: u32) {
        let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if word.load() == expected && !thread_rng().gen_bool(0.1) {
            drop(self.changed.wait(guard));
        }
    }

    fn wake(&self, _word: Word<'_>) {
        drop(self.lock.lock());
        self.changed.notify_all();
    }
}

impl WaitUntil for Auto {
    type Instant = Instant;

    fn after(&self, timeout: Duration) -> Option<Instant> {
        Instant::now().checked_add(timeout)
    }

    fn expired(&self, deadline: Instant) -> bool {
        Instant::now() >= deadline
    }

    fn wait_until(&self, word: Word<'_>, expected: u32, deadline: Instant) {
        if deadline.saturating_duration_since(Instant::now()) < NEVER {
            shuttle::thread::yield_now();
        } else {
            self.wait(word, expected);
        }
    }
}

/// A lock for a condition that waits with a timeout. Poison is ignored.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

pub(crate) struct MutexGuard<'m, T> {
    mutex: &'m Mutex<T>,
    guard: shuttle::sync::MutexGuard<'m, T>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    fn guard<'m>(&'m self, guard: LockResult<shuttle::sync::MutexGuard<'m, T>>) -> MutexGuard<'m, T> {
        MutexGuard { mutex: self, guard: guard.unwrap_or_else(PoisonError::into_inner) }
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        Ok(self.guard(self.0.lock()))
    }

    pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(TryLockError::Poisoned(guard)) => Ok(self.guard(Err(guard))),
            Ok(guard) => Ok(self.guard(Ok(guard))),
        }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

pub(crate) struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(shuttle::sync::Condvar::new())
    }

    pub(crate) fn wait<'m, T>(&self, guard: MutexGuard<'m, T>) -> LockResult<MutexGuard<'m, T>> {
        let MutexGuard { mutex, guard } = guard;
        Ok(mutex.guard(self.0.wait(guard)))
    }

    /// A short wait returns without a reason: the caller looks at the clock, and waits again.
    pub(crate) fn wait_timeout<'m, T>(
        &self,
        guard: MutexGuard<'m, T>,
        rest: Duration,
    ) -> LockResult<(MutexGuard<'m, T>, ())> {
        if rest >= NEVER {
            let MutexGuard { mutex, guard } = guard;
            return Ok((mutex.guard(self.0.wait(guard)), ()));
        }
        let MutexGuard { mutex, guard } = guard;
        drop(guard);
        shuttle::thread::yield_now();
        Ok((mutex.guard(mutex.0.lock()), ()))
    }

    pub(crate) fn wait_timeout_while<'m, T>(
        &self,
        mut guard: MutexGuard<'m, T>,
        limit: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'m, T>, ())> {
        let since = Instant::now();
        while condition(&mut guard) && since.elapsed() < limit {
            (guard, ()) = self.wait_timeout(guard, limit.saturating_sub(since.elapsed()))?;
        }
        Ok((guard, ()))
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

pub(crate) mod thread {
    pub(crate) use shuttle::thread::{Builder, JoinHandle, current};
}
