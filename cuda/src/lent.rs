//! Host slots in memory that the caller allocated: the memory of a tensor library, or pages that the caller registered.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};

use crate::cu::{BesideCaptures, Current, Owner};
use crate::driver::check;
use crate::error::Error;

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
    /// `lender` owns the memory. The uploader drops `lender`, on any thread, when it no longer uses the memory, and
    /// leaks it if the driver fails to wait for a copy. If the memory is page-locked, copies from it are asynchronous.
    /// Otherwise the driver copies through a staging buffer. Write-combined memory (`CU_MEMHOSTALLOC_WRITECOMBINED`)
    /// needs no fence. Fill it in order, and do not read it, because it is not cached.
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

// SAFETY: only the uploader or the stager accesses the memory, and the lender is `Send`.
unsafe impl Send for Host {}

/// The lender of page-locked memory that this crate allocated.
struct PageLocked {
    start: NonNull<u8>,
    ctx: Owner<Arc<CudaContext>>,
}

// SAFETY: plain memory, which may be freed on any thread.
unsafe impl Send for PageLocked {}

/// Allocates `len` bytes, at least one, zeroed. `ctx` is current.
///
/// This call touches the pages on the calling thread, so Linux places them on that thread's NUMA node, unless a
/// policy (`numactl`) places them elsewhere.
pub(crate) fn page_locked(ctx: &Arc<CudaContext>, len: usize) -> Result<Host, Error> {
    // SAFETY: the memory is zeroed below, before it is read.
    let start = check("cuMemHostAlloc", unsafe { result::malloc_host(len, 0) })?;
    let null = || Error::Driver { call: "cuMemHostAlloc", code: 0, name: "a null pointer".to_string() };
    let start = NonNull::new(start.cast::<u8>()).ok_or_else(null)?;
    // SAFETY: `len` bytes were allocated there.
    unsafe { start.write_bytes(0, len) };
    // SAFETY: the lender owns the bytes, which are initialized, and only the slot has their address.
    Ok(unsafe { Host::new(start, len, PageLocked { start, ctx: Owner::new(ctx.clone()) }) })
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        let _current = Current::enter_to_free(&self.ctx);
        let _beside = BesideCaptures::enter();
        // SAFETY: allocated by `page_locked` and freed once. No copy reads it: memory whose copies could not be waited
        // for is leaked instead (the drop of `Copies`).
        let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
    }
}

debug!([] Host, this, start: this.start, len: this.len);
