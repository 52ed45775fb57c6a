//! The memory of slots: on the host (page-locked here, or the caller's), and on the device.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, result};

use crate::cu::{BesideCaptures, Current, Owner, Stream};
use crate::driver::check;
use crate::error::Error;
use crate::lent::{Host, Lender};

/// A device slot's memory, freed after the copy stream's work. Not cudarc's `CudaSlice`: that creates two events for
/// cudarc's tracking.
pub(crate) struct DeviceBytes {
    start: CUdeviceptr,
    stream: Arc<Stream>,
    /// Whether it must not be freed, because something may still use it.
    leaked: bool,
}

impl DeviceBytes {
    /// Allocates `len` bytes, at least one, uninitialized. The stream's context is current.
    pub(crate) fn new(stream: &Arc<Stream>, len: usize) -> Result<Self, Error> {
        let start = if stream.context().has_async_alloc() {
            // SAFETY: the stream exists; the memory is filled before it is read.
            check("cuMemAllocAsync", unsafe { result::malloc_async(stream.raw(), len) })
        } else {
            // SAFETY: as above.
            check("cuMemAlloc", unsafe { result::malloc_sync(len) })
        }?;
        Ok(Self { start, stream: stream.clone(), leaked: false })
    }

    /// Leaves the memory allocated forever.
    pub(crate) fn leak(&mut self) {
        self.leaked = true;
    }

    pub(crate) fn start(&self) -> CUdeviceptr {
        self.start
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        if self.leaked {
            return;
        }
        let _current = Current::enter_to_free(self.stream.context());
        if self.stream.context().has_async_alloc() {
            // SAFETY: allocated by `new` and freed once, in the copy stream. The free therefore runs after the copies
            // into the memory, and after its uses, for which the stream waits (`DeviceBuf::drop`).
            let _ = unsafe { result::free_async(self.start, self.stream.raw()) };
        } else {
            let _beside = BesideCaptures::enter();
            // This free is in no stream's order, so wait until the copy stream's work is over. If the wait fails, the
            // context is lost and no work runs in it.
            let _ = self.stream.settle();
            // SAFETY: allocated by `new` and freed once.
            let _ = unsafe { result::free_sync(self.start) };
        }
    }
}

/// A host slot's memory.
pub(crate) struct HostBytes {
    start: NonNull<u8>,
    len: usize,
    keeper: Keeper,
}

enum Keeper {
    /// Page-locked memory that this crate allocated.
    Context(Owner<Arc<CudaContext>>),
    Lender(#[allow(dead_code, reason = "dropped with this")] Lender),
}

// SAFETY: plain memory, accessed only by the owner of the slot (`HostSlot`) or by the guards of its copies (`Copies`).
// A `Lender` is `Send`.
unsafe impl Send for HostBytes {}
// SAFETY: as for `Send`; a shared reference does not reach the lender.
unsafe impl Sync for HostBytes {}

impl HostBytes {
    /// Allocates `len` bytes, at least one, zeroed. `ctx` is current.
    ///
    /// This call touches the pages on the calling thread, so Linux places them on that thread's NUMA node, unless a
    /// policy (`numactl`) places them elsewhere.
    pub(crate) fn new(ctx: &Arc<CudaContext>, len: usize) -> Result<Self, Error> {
        // SAFETY: the memory is zeroed below, before it is read.
        let start = check("cuMemHostAlloc", unsafe { result::malloc_host(len, 0) })?;
        let null = || Error::Driver { call: "cuMemHostAlloc", code: 0, name: "a null pointer".to_string() };
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(null)?;
        // SAFETY: `len` bytes were allocated there.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { start, len, keeper: Keeper::Context(Owner::new(ctx.clone())) })
    }

    /// The first `len` bytes of lent memory.
    pub(crate) fn lent(Host { start, lender, .. }: Host, len: usize) -> Self {
        Self { start, len, keeper: Keeper::Lender(lender) }
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

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        if let Keeper::Context(ctx) = &self.keeper {
            let _current = Current::enter_to_free(ctx);
            let _beside = BesideCaptures::enter();
            // SAFETY: allocated by `new` and freed once. No copy reads it: memory whose copies could not be waited for
            // is leaked instead (the drop of `Copies`).
            let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
        }
    }
}
