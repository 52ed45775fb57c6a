//! What belongs to the process it was made in: a thread does not follow a fork, and neither may its locks.

use std::ops::{Deref, DerefMut};

/// A value that is forgotten, not dropped, in a process that was forked from the one it was made in.
///
/// There the threads that it waits for are not, and a lock that one of them held at the fork is never released.
#[derive(Debug)]
pub(crate) struct OfProcess<T> {
    value: Option<T>,
    process: u32,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// Whether this is another process.
    pub(crate) fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    /// The process it was made in.
    pub(crate) fn process(&self) -> u32 {
        self.process
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

impl<T> Deref for OfProcess<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let Some(value) = &self.value else { unreachable!("taken only by what consumes it") };
        value
    }
}

impl<T> DerefMut for OfProcess<T> {
    fn deref_mut(&mut self) -> &mut T {
        let Some(value) = &mut self.value else { unreachable!("taken only by what consumes it") };
        value
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.is_foreign() {
            std::mem::forget(self.value.take());
        }
    }
}
