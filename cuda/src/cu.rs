//! The driver's calls and objects that an uploader owns, with our errors.
//!
//! On cudarc's lower layers: its safe objects unwrap or store away what fails in places where we return errors.

use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUevent, CUevent_wait_flags, CUstream};
use cudarc::driver::{CudaContext, DriverError, result, sys};

use crate::error::Error;

pub(crate) fn check<T>(call: &'static str, result: Result<T, DriverError>) -> Result<T, Error> {
    result.map_err(|error| Error::driver(call, error))
}

/// Makes `ctx` the calling thread's context, which handles of default streams are looked up in, and leaves it so: for
/// threads of our own.
///
/// Not `CudaContext::bind_to_thread`, which also returns errors that drops elsewhere in the program left behind.
pub(crate) fn bind(ctx: &CudaContext) -> Result<(), Error> {
    if check("cuCtxGetCurrent", result::ctx::get_current())? != Some(ctx.cu_ctx()) {
        // SAFETY: the context is alive while its `CudaContext` is.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(ctx.cu_ctx()) })?;
    }
    Ok(())
}

/// A context is the calling thread's until this is dropped; then again the one before. For threads of the caller's.
#[must_use]
pub(crate) struct Current {
    /// The context before, null for none; `None` if it was this one.
    before: Option<CUcontext>,
    _here: PhantomData<*const ()>,
}

impl Current {
    pub(crate) fn enter(ctx: &CudaContext) -> Result<Self, Error> {
        let before = check("cuCtxGetCurrent", result::ctx::get_current())?;
        let before = if before == Some(ctx.cu_ctx()) {
            None
        } else {
            // SAFETY: the context is alive while its `CudaContext` is.
            check("cuCtxSetCurrent", unsafe { result::ctx::set_current(ctx.cu_ctx()) })?;
            Some(before.unwrap_or(ptr::null_mut()))
        };
        Ok(Self { before, _here: PhantomData })
    }

    /// The same before something is given back: a second time if the first fails, because it may have returned an
    /// error of earlier work, and a thread without a context gives nothing back.
    pub(crate) fn enter_to_free(ctx: &CudaContext) -> Option<Self> {
        // If that fails too, so does what comes next, and the memory stays until the context ends.
        Self::enter(ctx).or_else(|_| Self::enter(ctx)).ok()
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current on this thread, or is none. An error is one of earlier work, told elsewhere.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

/// Until this is dropped the calling thread may wait, and free, whatever is being captured into graphs: without it a
/// capture in `GLOBAL` mode forbids "potentially unsafe" calls to every thread, and one such call breaks the capture
/// (CUDA driver API, `cuThreadExchangeStreamCaptureMode`). Nothing that an uploader waits for or frees is captured.
#[must_use]
pub(crate) struct BesideCaptures {
    before: sys::CUstreamCaptureMode,
    _here: PhantomData<*const ()>,
}

impl BesideCaptures {
    /// `None` if the driver refuses: copies need it only while somebody captures, and then their calls fail.
    pub(crate) fn enter() -> Option<Self> {
        let before = exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
        Some(Self { before, _here: PhantomData })
    }
}

impl Drop for BesideCaptures {
    fn drop(&mut self) {
        // A second time if the first returned an error of earlier work.
        let _ = exchange(self.before).or_else(|| exchange(self.before));
    }
}

/// Sets the calling thread's capture mode, and returns the one before.
fn exchange(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: the pointer is valid for the call, which leaves the mode before there.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().ok()?;
    Some(mode)
}

/// Waits until everything in the context is done.
pub(crate) fn synchronize_context() -> Result<(), Error> {
    check("cuCtxSynchronize", result::ctx::synchronize())
}

/// Waits until everything in the stream is done.
///
/// # Safety
///
/// The stream exists.
pub(crate) unsafe fn synchronize(stream: CUstream) -> Result<(), Error> {
    // SAFETY: the stream exists, says the caller.
    check("cuStreamSynchronize", unsafe { result::stream::synchronize(stream) })
}

/// What comes in `stream` from now on runs after what `event` was last recorded behind.
///
/// # Safety
///
/// Both exist.
pub(crate) unsafe fn wait(stream: CUstream, event: CUevent) -> Result<(), Error> {
    let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both exist, says the caller.
    check("cuStreamWaitEvent", unsafe { result::stream::wait_event(stream, event, flags) })
}

/// Blocks the calling thread until `event`, as last recorded, is complete.
///
/// # Safety
///
/// It exists.
pub(crate) unsafe fn wait_on_host(event: CUevent) -> Result<(), Error> {
    // SAFETY: it exists, says the caller.
    check("cuEventSynchronize", unsafe { result::event::synchronize(event) })
}

/// Whether `event`, as last recorded, is complete.
///
/// # Safety
///
/// It exists.
pub(crate) unsafe fn is_complete(event: CUevent) -> Result<bool, Error> {
    // SAFETY: it exists, says the caller.
    match unsafe { result::event::query(event) } {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        result => check("cuEventQuery", result).map(|()| true),
    }
}

/// Records `event` behind what is in `stream`.
///
/// # Safety
///
/// Both exist.
pub(crate) unsafe fn record(event: CUevent, stream: CUstream) -> Result<(), Error> {
    // SAFETY: both exist, says the caller.
    check("cuEventRecord", unsafe { result::event::record(event, stream) })
}

/// Enqueues a copy of `len` bytes to the device.
///
/// # Safety
///
/// Both ranges and the stream exist until the copy is done, and `from` is page-locked and not written to.
pub(crate) unsafe fn copy_to_device(
    to: CUdeviceptr,
    from: *const u8,
    len: usize,
    stream: CUstream,
) -> Result<(), Error> {
    // SAFETY: as the caller says. No slice is made of the source: other threads own it while the copy runs.
    let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), len, stream) };
    check("cuMemcpyHtoDAsync", result.result())
}

/// The copy stream: not one of cudarc's, whose count of streams turns on event tracking for every call in the context.
pub(crate) struct Stream {
    raw: CUstream,
    ctx: Arc<CudaContext>,
}

// SAFETY: a handle of the driver, which is thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// One that does not synchronize with the legacy default stream. `ctx` is the calling thread's context.
    pub(crate) fn new(ctx: &Arc<CudaContext>) -> Result<Self, Error> {
        let raw = check("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Self { raw, ctx: ctx.clone() })
    }

    /// Valid while this exists.
    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.ctx
    }

    /// Waits until everything in it is done: a second time if the first call fails, because it may have returned an
    /// error of earlier work.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let _current = Current::enter_to_free(&self.ctx);
        let _beside = BesideCaptures::enter();
        // SAFETY: the stream exists.
        let once = || unsafe { synchronize(self.raw) };
        once().or_else(|_| once())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _current = Current::enter_to_free(&self.ctx);
        // SAFETY: created by us, and destroyed once. The driver gives its resources back when its work is done.
        let _ = unsafe { result::stream::destroy(self.raw) };
    }
}

/// Device memory of its own, given back in the copy stream. Not cudarc's `CudaSlice`, which brings two events of
/// cudarc's tracking.
pub(crate) struct DeviceBytes {
    start: CUdeviceptr,
    stream: Arc<Stream>,
    /// Whose it is, if it is not ours.
    lender: Option<Lender>,
}

/// What is dropped when memory that was lent is not used any more.
pub(crate) type Lender = Box<dyn Send>;

impl DeviceBytes {
    /// `len` bytes, at least one, of any content. The stream's context is the calling thread's.
    pub(crate) fn new(stream: &Arc<Stream>, len: usize) -> Result<Self, Error> {
        let start = if stream.ctx.has_async_alloc() {
            // SAFETY: the stream exists; nobody reads the memory before it is filled.
            check("cuMemAllocAsync", unsafe { result::malloc_async(stream.raw, len) })
        } else {
            // SAFETY: as above.
            check("cuMemAlloc", unsafe { result::malloc_sync(len) })
        }?;
        Ok(Self { start, stream: stream.clone(), lender: None })
    }

    /// Memory that somebody else has allocated, in the stream's context.
    pub(crate) fn lent(stream: &Arc<Stream>, start: CUdeviceptr, lender: Lender) -> Self {
        Self { start, stream: stream.clone(), lender: Some(lender) }
    }

    pub(crate) fn start(&self) -> CUdeviceptr {
        self.start
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        let _current = Current::enter_to_free(&self.stream.ctx);
        if let Some(lender) = self.lender.take() {
            // Whatever the lender does with it is not ordered behind the stream: so nothing of that may be left. If it
            // cannot be waited for, it is not given back.
            match self.stream.settle() {
                Ok(()) => drop(lender),
                Err(_) => std::mem::forget(lender),
            }
        } else if self.stream.ctx.has_async_alloc() {
            // SAFETY: allocated by us and freed once, behind the copies into it and what those waited for. Its uses
            // are in the copy stream's past by now (`DeviceBuf::drop`).
            let _ = unsafe { result::free_async(self.start, self.stream.raw) };
        } else {
            let _beside = BesideCaptures::enter();
            // The host frees it: nothing of the stream may still want it. If this fails, nothing runs any more.
            let _ = self.stream.settle();
            // SAFETY: allocated by us, and freed once.
            let _ = unsafe { result::free_sync(self.start) };
        }
    }
}

/// An event of its own.
pub(crate) struct Event {
    raw: CUevent,
    ctx: Arc<CudaContext>,
}

// SAFETY: a handle of the driver, which is thread-safe.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// `ctx` is the calling thread's context,
    /// `flags` are `CU_EVENT_*`.
    pub(crate) fn new(ctx: &Arc<CudaContext>, flags: u32) -> Result<Self, Error> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is valid for the call. cudarc's own function takes one flag only.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) }.result())?;
        Ok(Self { raw, ctx: ctx.clone() })
    }

    /// Valid while this exists.
    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _current = Current::enter_to_free(&self.ctx);
        // SAFETY: created by us, and destroyed once. Streams that wait for it keep what they need of it.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

/// A host slot's memory, reached through pointers: of one slot, some is copied while the rest is being filled.
pub(crate) struct HostBytes {
    start: NonNull<u8>,
    owner: Owner,
}

enum Owner {
    /// Page-locked, and ours.
    Context(Arc<CudaContext>),
    Lender(#[allow(dead_code, reason = "dropped with this")] Lender),
}

// SAFETY: memory, which is reached by those who have its slot (`HostSlot`) or a guard of it (`Copies`); `Lender` is
// `Send`, and only dropped.
unsafe impl Send for HostBytes {}
// SAFETY: as above; through `&` the lender is not reached.
unsafe impl Sync for HostBytes {}

impl HostBytes {
    /// `len` bytes, at least one, all 0. `flags` are `CU_MEMHOSTALLOC_*`. `ctx` is the calling thread's context.
    pub(crate) fn new(ctx: &Arc<CudaContext>, len: usize, flags: u32) -> Result<Self, Error> {
        // SAFETY: the memory is set below, before anybody sees it.
        let start = check("cuMemHostAlloc", unsafe { result::malloc_host(len, flags) })?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(Error::Driver {
                call: "cuMemHostAlloc",
                code: 0,
                name: "a null pointer".to_string(),
            });
        };
        // SAFETY: `len` bytes were allocated there.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { start, owner: Owner::Context(ctx.clone()) })
    }

    /// Memory that somebody else has allocated.
    pub(crate) fn lent(start: NonNull<u8>, lender: Lender) -> Self {
        Self { start, owner: Owner::Lender(lender) }
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        if let Owner::Context(ctx) = &self.owner {
            let _current = Current::enter_to_free(ctx);
            let _beside = BesideCaptures::enter();
            // SAFETY: allocated by us, and freed once. No copy reads it: whoever could not wait for its copies has
            // leaked it, by hand or with the ring (`Copies::settle`).
            let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
        }
    }
}
