//! The three edges that keep the streams apart, one function each; the crate's documentation has the picture.
//!
//! The tests take each of them away in turn, and the checker must notice. Without `cfg(test)` there is no switch.

use cudarc::driver::sys::{CUevent, CUstream};

use crate::cu;
use crate::error::Error;

/// Edge 1: the host may write the host slot again. `false` if it may not yet, unless this is to `wait`.
///
/// # Safety
///
/// The event exists.
pub(crate) unsafe fn refill_after_copy(copied: CUevent, wait: bool) -> Result<bool, Error> {
    #[cfg(test)]
    if Edge::RefillAfterCopy.is_missing() {
        return Ok(true);
    }
    // SAFETY: it exists, says the caller. Mostly it is complete, and a look costs less than a wait.
    let done = unsafe { cu::is_complete(copied) }?;
    if !done && wait {
        // SAFETY: as above.
        unsafe { cu::wait_on_host(copied) }?;
    }
    Ok(done || wait)
}

/// Edge 2: `stream` may use the batch.
///
/// # Safety
///
/// Both exist.
pub(crate) unsafe fn use_after_copy(stream: CUstream, copied: CUevent) -> Result<(), Error> {
    #[cfg(test)]
    if Edge::UseAfterCopy.is_missing() {
        return Ok(());
    }
    // SAFETY: both exist, says the caller.
    unsafe { cu::wait(stream, copied) }
}

/// Edge 3: the copy stream may write the device slot again.
///
/// # Safety
///
/// Both exist.
pub(crate) unsafe fn copy_after_use(copy_stream: CUstream, consumed: CUevent) -> Result<(), Error> {
    #[cfg(test)]
    if Edge::CopyAfterUse.is_missing() {
        return Ok(());
    }
    // SAFETY: both exist, says the caller.
    unsafe { cu::wait(copy_stream, consumed) }
}

#[cfg(test)]
pub(crate) use missing::Edge;

#[cfg(test)]
mod missing {
    use std::sync::atomic::{AtomicU8, Ordering};

    static MISSING: AtomicU8 = AtomicU8::new(0);

    #[derive(Clone, Copy, Debug)]
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
