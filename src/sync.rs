//! The locks, the threads and the ring of the pipe. This is the only file that depends on `cfg(shuttle)`: the package
//! `tests/shuttle/pipe` sets it, and compiles this crate a second time, to test random schedules of the threads.

#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};
#[cfg(not(shuttle))]
pub(crate) use twinbuf_core::{Consumer, HeapRing, KeptSlot, Producer, ReadSlot, ReservedSlot};

#[cfg(shuttle)]
#[path = "../tests/shuttle/pipe/sync.rs"]
mod drawn;
#[cfg(shuttle)]
pub(crate) use drawn::*;

/// Locks a mutex, also after a panic under it: foreign code does not run there, or its panics are caught.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
