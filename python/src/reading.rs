//! Which loader's `read_into` this thread is in: what waits for that loader would wait for itself.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

thread_local! {
    /// The flags by which loaders are told apart; a data set may read from another loader.
    static READING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Lasts as long as the call of `read_into`.
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
