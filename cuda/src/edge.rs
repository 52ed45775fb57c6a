//! The three edges between host, copy stream and compute streams, one function each; the crate's documentation has a
//! diagram.
//!
//! The tests remove each edge in turn, and the checker must report it. Only `cfg(test)` builds can remove one.

use cudarc::driver::sys::{CUevent, CUstream};

use crate::cu;
use crate::error::Error;

/// Edge 1: returns whether the host may refill the host slot. Blocks until it may, if `wait` is set.
///
/// # Safety
///
/// The event exists.
pub(crate) unsafe fn refill_after_copy(copied: CUevent, wait: bool) -> Result<bool, Error> {
    #[cfg(test)]
    if Edge::RefillAfterCopy.is_missing() {
        return Ok(true);
    }
    // SAFETY: the caller guarantees that the event exists. Query it first: it is usually complete, and a query costs
    // less than a wait.
    let done = unsafe { cu::is_complete(copied) }?;
    if !done && wait {
        // SAFETY: as above.
        unsafe { cu::wait_on_host(copied) }?;
    }
    Ok(done || wait)
}

/// Edge 2: makes `stream` wait for the copy before it uses the batch.
///
/// # Safety
///
/// Both exist.
pub(crate) unsafe fn use_after_copy(stream: CUstream, copied: CUevent) -> Result<(), Error> {
    #[cfg(test)]
    if Edge::UseAfterCopy.is_missing() {
        return Ok(());
    }
    // SAFETY: the caller guarantees that both exist.
    unsafe { cu::wait(stream, copied) }
}

/// Edge 3: makes the copy stream wait for a use before it refills the device slot.
///
/// # Safety
///
/// Both exist.
pub(crate) unsafe fn copy_after_use(copy_stream: CUstream, consumed: CUevent) -> Result<(), Error> {
    #[cfg(test)]
    if Edge::CopyAfterUse.is_missing() {
        return Ok(());
    }
    // SAFETY: the caller guarantees that both exist.
    unsafe { cu::wait(copy_stream, consumed) }
}

#[cfg(test)]
pub(crate) use missing::Edge;

#[cfg(test)]
mod missing {
    use std::sync::atomic::{AtomicU8, Ordering};

    static MISSING: AtomicU8 = AtomicU8::new(0);

    #[derive(Clone, Copy, Debug, PartialEq)]
    #[repr(u8)]
    pub(crate) enum Edge {
        RefillAfterCopy = 1,
        UseAfterCopy = 2,
        CopyAfterUse = 3,
    }

    impl Edge {
        /// Relaxed: set before an uploader's thread is started and after it has ended.
        pub(crate) fn is_missing(self) -> bool {
            MISSING.load(Ordering::Relaxed) == self as u8
        }

        pub(crate) fn take_away(edge: Option<Self>) {
            MISSING.store(edge.map_or(0, |edge| edge as u8), Ordering::Relaxed);
        }
    }
}
