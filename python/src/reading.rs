//! The loaders for which this thread is calling `read_into` or the function of `Records.map`: a wait for such a loader
//! would be a deadlock.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a data set kept a view of a slot, and whether the loader is closed. Its address identifies the loader.
#[derive(Default)]
pub(crate) struct Kept {
    kept: AtomicBool,
    closing: AtomicBool,
}

// SeqCst: if a read keeps a view while another thread begins to close the loader, one of them must see the other.
impl Kept {
    /// Notes that a read kept a view of a slot. Returns whether the loader is being closed already, which frees the slots
    /// once the read returns.
    pub(crate) fn keep(&self) -> bool {
        self.kept.store(true, Ordering::SeqCst);
        self.closing.load(Ordering::SeqCst)
    }

    /// Notes that the loader is being closed. Returns whether a read kept a view of a slot.
    pub(crate) fn close(&self) -> bool {
        self.closing.store(true, Ordering::SeqCst);
        self.kept.load(Ordering::SeqCst)
    }
}

thread_local! {
    /// The loaders, each by the address of its [`Kept`]. There may be several: a data set may read from another loader.
    static READING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Exists for the duration of such a call.
pub(crate) struct Reading;

impl Reading {
    pub(crate) fn begin(loader: &Arc<Kept>) -> Self {
        READING.with_borrow_mut(|reading| reading.push(Arc::as_ptr(loader).addr()));
        Self
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        READING.with_borrow_mut(Vec::pop);
    }
}

pub(crate) fn is_reading(loader: &Arc<Kept>) -> bool {
    READING.with_borrow(|reading| reading.contains(&Arc::as_ptr(loader).addr()))
}
