//! State behind a lock, and waits without the GIL.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::errors::{self, Failure};

/// Locks a mutex, also after a thread panicked with it. No mutex of this package guards data that a panic leaves invalid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of a loader or an iteration. No call waits for the lock while it holds the GIL: the lock's holder may wait
/// for the GIL.
pub(crate) struct Locked<T> {
    state: Mutex<T>,
    /// The process that built it, and that has its threads; and the number of forks before.
    process: u32,
    forks: usize,
}

impl<T: Send> Locked<T> {
    pub(crate) fn new(state: T) -> Self {
        let (process, forks) = (std::process::id(), FORKS.load(Ordering::Relaxed));
        Self { state: Mutex::new(state), process, forks }
    }

    /// For callers without the GIL.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.state)
    }

    /// For callers without the GIL. `None`: the lock was not free until then, or this is a forked process.
    pub(crate) fn lock_until(&self, until: Instant) -> Option<MutexGuard<'_, T>> {
        while !self.is_forked() {
            match self.state.try_lock() {
                Ok(state) => return Some(state),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= until => return None,
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_micros(100)),
            }
        }
        None
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `use_it` with the lock. Releases the GIL only if another thread has the lock.
    pub(crate) fn with<R: Send>(&self, py: Python<'_>, use_it: impl FnOnce(&mut T) -> R + Send) -> R {
        match self.state.try_lock() {
            Ok(mut state) => use_it(&mut state),
            Err(_) => self.detached(py, use_it),
        }
    }

    /// Same as `with`, but always releases the GIL: for calls that may read data, or join a thread that needs the GIL.
    pub(crate) fn detached<R: Send>(&self, py: Python<'_>, use_it: impl FnOnce(&mut T) -> R + Send) -> R {
        detached(py, || use_it(&mut self.lock()))
    }

    /// Same as `with`. In a forked process, where the lock's holder may be a thread that does not exist there, this waits
    /// for no one: if the lock is not free, the call is refused.
    pub(crate) fn ask<R: Send>(&self, py: Python<'_>, f: impl FnOnce(&mut T) -> R + Send) -> PyResult<R> {
        match self.state.try_lock() {
            Ok(mut state) => Ok(f(&mut state)),
            Err(_) => self.check(py, "ask in that one").map(|()| self.detached(py, f)),
        }
    }

    pub(crate) fn is_forked(&self) -> bool {
        // Not by the number of the process, which is a system call for each item.
        self.forks != FORKS.load(Ordering::Relaxed)
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

/// The longest wait for an item before signals are handled again.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Waits without the GIL. If the hook at the end of the program returns meanwhile, this does not return: the interpreter
/// would end this thread in the middle of native code, which aborts the process. If the hook has returned before the call,
/// the thread keeps the GIL: a later hook of the program, which closes what it has, may wait for this thread.
pub(crate) fn detached<T: Send>(py: Python<'_>, wait: impl FnOnce() -> T + Send) -> T {
    if is_over() {
        return attached(py, wait);
    }
    // SeqCst, as below: the hook sees a thread that began to wait before the program began to end.
    WAITING.fetch_add(1, Ordering::SeqCst);
    let result = py.detach(|| {
        let result = wait();
        // SeqCst: either this thread sees that the hook is over, or the hook sees this thread and waits for it.
        RETURNING.fetch_add(1, Ordering::SeqCst);
        if is_over() {
            RETURNING.fetch_sub(1, Ordering::SeqCst);
            park()
        }
        result
    });
    RETURNING.fetch_sub(1, Ordering::SeqCst);
    WAITING.fetch_sub(1, Ordering::SeqCst);
    result
}

/// Waits with the GIL, while another thread runs `wait`. After [`LEAVE`] this thread parks for ever, without the GIL: `wait`
/// may be waiting for a thread that needs the GIL.
fn attached<T: Send>(py: Python<'_>, wait: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let started = Instant::now();
        let Ok(waits) = thread::Builder::new().spawn_scoped(scope, wait) else { return py.detach(|| park()) };
        while !waits.is_finished() {
            if started.elapsed() >= LEAVE {
                return py.detach(|| park());
            }
            thread::sleep(Duration::from_micros(100));
        }
        waits.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Stays for ever, without the GIL.
fn park() -> ! {
    loop {
        thread::park();
    }
}

/// Whether the interpreter may end this thread when it takes the GIL back.
pub(crate) fn is_over() -> bool {
    OVER.load(Ordering::SeqCst) && !HOOK.get()
}

/// Whether the program is ending: iterations are cut off, and none begins. SeqCst, as `WAITING` in [`detached`].
pub(crate) static ENDING: AtomicBool = AtomicBool::new(false);

/// Whether the hook at the end of the program has returned: the interpreter may end any thread but the one that ran it.
static OVER: AtomicBool = AtomicBool::new(false);

/// The number of forks, of which this process is the child. Relaxed: a child adds to it before it has a second thread.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// The number of threads in [`detached`].
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The number of threads that are about to take the GIL back.
static RETURNING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread ran the hook.
    static HOOK: Cell<bool> = const { Cell::new(false) };
}

/// The hook at the end of the program returns. Waits first, for at most so many seconds, until all threads are back in
/// Python: iterations that are cut off raise an exception there. Then for those that are about to take the GIL back.
#[pyfunction]
pub(crate) fn _end_hook(py: Python<'_>, seconds: f64) {
    let wait = |threads: &AtomicUsize, limit| {
        let started = Instant::now();
        while threads.load(Ordering::SeqCst) > 0 && started.elapsed() < limit {
            py.detach(|| thread::sleep(Duration::from_micros(100)));
        }
    };
    HOOK.set(true);
    wait(&WAITING, Duration::from_secs_f64(seconds));
    // Since 3.14 the interpreter lets such a thread sleep in place of ending it.
    OVER.store(py.version_info() < (3, 14), Ordering::SeqCst);
    wait(&RETURNING, LEAVE);
}

/// Refuses to iterate while the program ends: what is cut off must not look like the end of an epoch.
pub(crate) fn check_end(py: Python<'_>) -> PyResult<()> {
    if !ENDING.load(Ordering::SeqCst) {
        return Ok(());
    }
    let line = "the program is ending: the iteration is cut off";
    Err(errors::raise(py, Failure::new("LoaderError", line)))
}

/// Registered to run in forked children: the threads that are counted do not exist there.
#[pyfunction]
pub(crate) fn _forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    WAITING.store(0, Ordering::SeqCst);
    RETURNING.store(0, Ordering::SeqCst);
}
