//! The loaders whose `read_into` this thread is in: waiting for such a loader would be a deadlock.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

thread_local! {
    /// Flags that identify the loaders. A data set may read from another loader.
    static READING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Exists for the duration of a `read_into` call.
pub(crate) struct Reading;

impl Reading {
    pub(crate) fn begin(loader: &Arc<AtomicBool>) -> Self {
        READING.with_borrow_mut(|reading| reading.push(Arc::as_ptr(loader).addr()));
        Self
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        READING.with_borrow_mut(Vec::pop);
    }
}

pub(crate) fn is_reading(loader: &Arc<AtomicBool>) -> bool {
    READING.with_borrow(|reading| reading.contains(&Arc::as_ptr(loader).addr()))
}
