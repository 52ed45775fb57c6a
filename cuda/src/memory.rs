//! Page-locked host memory.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};

use crate::cu::{BesideCaptures, Current, Owner};
use crate::driver::check;
use crate::error::Error;
use crate::lent::Host;

/// Owns page-locked memory.
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
