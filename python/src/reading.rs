//! The loaders for which this thread is calling `read_into` or the function of `Records.map`: a wait for such a loader
//! would be a deadlock.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

thread_local! {
    /// The loaders, each by the address of its flag. There may be several: a data set may read from another loader.
    static READING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Exists for the duration of such a call.
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
