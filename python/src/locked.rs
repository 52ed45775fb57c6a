//! State behind a lock, and waits without the GIL.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::{self, Failure};

/// The state of a loader or an iteration. No call waits for the lock while it holds the GIL: the lock's holder may wait
/// for the GIL.
pub(crate) struct Locked<T> {
    state: Mutex<T>,
    /// The process that built it, and that has its threads.
    process: u32,
}

impl<T: Send> Locked<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { state: Mutex::new(state), process: std::process::id() }
    }

    /// For callers without the GIL.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `use_it` with the lock. Releases the GIL only if another thread has the lock.
    pub(crate) fn with<R: Send>(&self, py: Python<'_>, use_it: impl FnOnce(&mut T) -> R + Send) -> R {
        match self.state.try_lock() {
            Ok(mut state) => use_it(&mut state),
            Err(TryLockError::Poisoned(poisoned)) => use_it(&mut poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => self.detached(py, use_it),
        }
    }

    /// Same as `with`, but always releases the GIL: for calls that may read data, or join a thread that needs the GIL.
    pub(crate) fn detached<R: Send>(&self, py: Python<'_>, use_it: impl FnOnce(&mut T) -> R + Send) -> R {
        detached(py, || use_it(&mut self.lock()))
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Refuses a call in a forked process, where it would wait for ever.
    pub(crate) fn check(&self, py: Python<'_>, what_to_do: &str) -> PyResult<()> {
        if !self.is_forked() {
            return Ok(());
        }
        let line =
            format!("threads do not survive a fork, and this is not process {}: {what_to_do}", self.process);
        Err(errors::raise(py, Failure::new("ForkedError", line)))
    }
}

/// How long to wait for a thread that runs the program's code: a data set, a function, an iterable. That code may never
/// return: after this time the thread is left behind, with all that it uses.
pub(crate) const LEAVE: Duration = Duration::from_secs(1);

/// The longest wait before signals are handled again.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// How long the exit waits for a thread that was left behind before: long enough to see whether it computes.
pub(crate) const LEFT_FOR: Duration = Duration::from_millis(100);

/// Tells whether a thread still runs.
pub(crate) type IsThere = Box<dyn FnMut() -> bool>;

/// Waits without the GIL.
pub(crate) fn detached<T: Send>(py: Python<'_>, wait: impl FnOnce() -> T + Send) -> T {
    // SeqCst, the strongest ordering: its cost does not matter once per wait.
    DETACHED.fetch_add(1, Ordering::SeqCst);
    let result = py.detach(wait);
    DETACHED.fetch_sub(1, Ordering::SeqCst);
    result
}

/// The number of threads that have released the GIL within a call of this module. If the interpreter exits before they
/// have it back, Python (before 3.14) ends them in the middle of that call, which aborts the process.
pub(crate) static DETACHED: AtomicUsize = AtomicUsize::new(0);

/// Registered to run in forked children, where the threads that [`DETACHED`] counts do not exist.
#[pyfunction]
pub(crate) fn _forked() {
    DETACHED.store(0, Ordering::SeqCst);
}
