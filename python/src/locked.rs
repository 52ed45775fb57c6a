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
    /// The process that has the threads.
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

    pub(crate) fn with<R: Send>(&self, py: Python<'_>, use_it: impl FnOnce(&mut T) -> R + Send) -> R {
        match self.state.try_lock() {
            Ok(mut state) => use_it(&mut state),
            Err(TryLockError::Poisoned(poisoned)) => use_it(&mut poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => self.detached(py, use_it),
        }
    }

    /// Same as `with`, for calls that may read data or join a thread that needs the GIL.
    pub(crate) fn detached<R: Send>(&self, py: Python<'_>, use_it: impl FnOnce(&mut T) -> R + Send) -> R {
        detached(py, || use_it(&mut self.lock()))
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Refuses a call that would wait for ever.
    pub(crate) fn check(&self, py: Python<'_>, what_to_do: &str) -> PyResult<()> {
        if !self.is_forked() {
            return Ok(());
        }
        let line =
            format!("threads do not survive a fork, and this is not process {}: {what_to_do}", self.process);
        Err(errors::raise(py, Failure::new("ForkedError", line)))
    }
}

/// How long a thread may take to leave a data set, a function or an iterable. It may never return: after that it is left
/// behind, and keeps what it uses.
pub(crate) const LEAVE: Duration = Duration::from_secs(1);

/// The longest time before a signal is handled.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// How long to look at the processor's time of threads that had their time to leave.
pub(crate) const LEFT_FOR: Duration = Duration::from_millis(100);

/// Tells whether a thread is there.
pub(crate) type IsThere = Box<dyn FnMut() -> bool>;

/// Waits without the GIL.
pub(crate) fn detached<T: Send>(py: Python<'_>, wait: impl FnOnce() -> T + Send) -> T {
    // SeqCst, the strongest ordering: its cost does not matter once per wait.
    DETACHED.fetch_add(1, Ordering::SeqCst);
    let result = py.detach(wait);
    DETACHED.fetch_sub(1, Ordering::SeqCst);
    result
}

/// Threads that have released the interpreter within a call. If the interpreter exits before they have it back, Python
/// (before 3.14) ends them in the middle of that call, which aborts the process.
pub(crate) static DETACHED: AtomicUsize = AtomicUsize::new(0);

/// Registered to run in forked children, where those threads do not exist.
#[pyfunction]
pub(crate) fn _forked() {
    DETACHED.store(0, Ordering::SeqCst);
}
