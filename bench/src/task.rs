//! Async calls without an executor: a future is polled on the thread that waits for it.

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
        // Release: what was done before the wake is visible to the poll that follows it.
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

    /// Polls, then looks at the flag until the waker was called, and polls again.
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

/// An end whose async calls are used, and the task that runs them.
pub struct Async<E> {
    pub end: E,
    pub task: Task,
}

/// Both ends of a pair, each in a task of its own.
pub fn awaited<T, R>((tx, rx): (T, R)) -> (Async<T>, Async<R>) {
    (Async { end: tx, task: Task::new() }, Async { end: rx, task: Task::new() })
}
