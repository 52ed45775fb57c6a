//! Async calls without an executor: the waiting thread polls the future.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// The waker's flag, on its own cache line.
#[repr(align(128))]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Release: what was done before the wake is visible to the next poll.
        self.0.store(true, Ordering::Release);
    }
}

/// Runs futures one after the other and spins while they wait, as an executor with one task would.
pub struct Task {
    woken: Arc<Woken>,
    waker: Waker,
}

impl Task {
    fn new() -> Self {
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let waker = woken.clone().into();
        Self { woken, waker }
    }

    /// Polls, then watches the flag until the waker is called, and polls again.
    #[inline]
    pub fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = pin!(future);
        let mut context = Context::from_waker(&self.waker);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            while !self.woken.0.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            // Acquire: the poll sees what was done before each wake that this swap clears.
            self.woken.0.swap(false, Ordering::Acquire);
        }
    }
}

/// An end with async calls, and the task that runs them.
pub struct Async<E> {
    pub end: E,
    pub task: Task,
}

/// Both ends of a pair, each with a separate task.
pub fn awaited<T, R>((tx, rx): (T, R)) -> (Async<T>, Async<R>) {
    (Async { end: tx, task: Task::new() }, Async { end: rx, task: Task::new() })
}
