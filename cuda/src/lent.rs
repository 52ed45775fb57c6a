//! Host slots in memory that the caller allocated: the memory of a tensor library, or pages that the caller registered.

use std::ptr::NonNull;

/// Host memory that the caller allocated, used as one slot; see [`Uploader::host_slots`](crate::Uploader::host_slots).
pub struct Host {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
    /// Keeps the memory allocated.
    pub(crate) _lender: Box<dyn Send>,
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
        Self { start, len, _lender: Box::new(lender) }
    }

    /// # Safety
    ///
    /// No copy writes to the memory while the reference exists.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the `len` bytes are initialized; the caller guarantees that no copy writes to them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// # Safety
    ///
    /// No copy uses the memory while the reference exists.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and no copy reads them either; `&mut self` excludes other references.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

// SAFETY: only the uploader accesses the memory, and the lender is `Send`.
unsafe impl Send for Host {}

debug!([] Host, this, start: this.start, len: this.len);
