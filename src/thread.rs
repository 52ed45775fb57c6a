//! What a loader needs around its thread: joining it, naming its panics, and staying out of forked processes.

use std::ops::{Deref, DerefMut};
use std::thread::{self, JoinHandle, ThreadId};

/// A value that is forgotten, not dropped, in a process that was forked from the one it was made in.
///
/// There the threads that it waits for are not, and a lock that one of them held at the fork is never released.
#[derive(Debug)]
pub(crate) struct ForkGuard<T> {
    value: Option<T>,
    process: u32,
}

impl<T> ForkGuard<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// Whether this is another process.
    pub(crate) fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    /// The value, unless this is another process.
    pub(crate) fn into_inner(mut self) -> Option<T> {
        let value = self.value.take();
        if self.is_foreign() {
            std::mem::forget(value);
            return None;
        }
        value
    }
}

impl<T> Deref for ForkGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let Some(value) = &self.value else { unreachable!("taken only by what consumes it") };
        value
    }
}

impl<T> DerefMut for ForkGuard<T> {
    fn deref_mut(&mut self) -> &mut T {
        let Some(value) = &mut self.value else { unreachable!("taken only by what consumes it") };
        value
    }
}

impl<T> Drop for ForkGuard<T> {
    fn drop(&mut self) {
        if self.is_foreign() {
            std::mem::forget(self.value.take());
        }
    }
}

/// A thread that is joined when this is dropped, unless that happens on it, or on one that it may wait for.
pub(crate) struct JoinOnDrop {
    thread: Option<JoinHandle<()>>,
    waits_for: Option<ThreadId>,
}

impl JoinOnDrop {
    pub(crate) fn new(thread: JoinHandle<()>, waits_for: Option<ThreadId>) -> Self {
        Self { thread: Some(thread), waits_for }
    }

    /// Leaves the thread to itself.
    pub(crate) fn detach(mut self) {
        self.thread = None;
    }
}

impl Drop for JoinOnDrop {
    fn drop(&mut self) {
        // A waker runs on the reading or the copying thread. It may hold the last reference to the loader: then this is
        // that thread. No thread can wait for its own end, and the two cannot wait for each other's; they end without a
        // join.
        let here = thread::current().id();
        let other = |thread: &JoinHandle<()>| thread.thread().id() != here && self.waits_for != Some(here);
        if let Some(thread) = self.thread.take().filter(other) {
            // A panic of the thread has been reported by its hook, and to the caller as `ReaderGone` or
            // `WorkerGone`.
            let _ = thread.join();
        }
    }
}

/// Names a thread after its loader and its row in the trace, within the 15 bytes that Linux keeps of a name.
pub(crate) fn name(loader: Option<&str>, row: &str) -> String {
    const MOST: usize = 15;
    let row = row.replace(' ', "-");
    let loader = loader.unwrap_or("twinbuf").replace('\0', "");
    let room = MOST.saturating_sub(row.len() + 1);
    let end = (0..=room.min(loader.len())).rev().find(|&end| loader.is_char_boundary(end)).unwrap_or(0);
    format!("{}-{row}", &loader[..end])
}

pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(a panic without a message)".to_string())
}

/// A number of the calling thread. No other thread has it while this one is alive.
pub(crate) fn this_thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.try_with(|mark| std::ptr::from_ref(mark).addr()).unwrap_or(0)
}
