//! Host slots in memory that the caller allocated: the memory of a tensor library, or pages that the caller registered.

use std::ptr::NonNull;

/// Keeps lent memory allocated; dropped when the memory is no longer used.
pub(crate) type Lender = Box<dyn Send>;

/// Host memory that the caller allocated, used as one slot; see [`Uploader::host_slots`](crate::Uploader::host_slots).
pub struct Host {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) lender: Lender,
}

impl Host {
    /// Creates a slot from `len` bytes at `start`, at any alignment.
    ///
    /// `lender` owns the memory. The uploader drops `lender`, on any thread, when it no longer uses the memory. If
    /// the memory is page-locked, copies from it are asynchronous. Otherwise the driver copies through a staging
    /// buffer. Write-combined memory (`CU_MEMHOSTALLOC_WRITECOMBINED`) needs no fence. Fill it in order, and do not read
    /// it, because it is not cached.
    ///
    /// # Safety
    ///
    /// Until `lender` is dropped, the `len` bytes at `start` must be initialized, must be valid for reads and
    /// writes, and must be accessed only by the uploader.
    pub unsafe fn new(start: NonNull<u8>, len: usize, lender: impl Send + 'static) -> Self {
        Self { start, len, lender: Box::new(lender) }
    }
}

// SAFETY: only the uploader accesses the memory, and the lender is `Send`.
unsafe impl Send for Host {}

debug!([] Host, this, start: this.start, len: this.len);
