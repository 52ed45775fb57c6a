//! The driver's calls and objects that an uploader owns, with our errors.
//!
//! On cudarc's lower layers: its safe objects unwrap or store away what fails in places where we return errors.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use cudarc::driver::{CudaContext, DriverError, result, sys};

use crate::error::Error;

pub(crate) fn check<T>(call: &'static str, result: Result<T, DriverError>) -> Result<T, Error> {
    result.map_err(|error| Error::driver(call, error))
}

/// Makes `ctx` the calling thread's context, which handles of default streams are looked up in.
///
/// Not `CudaContext::bind_to_thread`, which also returns errors that drops elsewhere in the program left behind.
pub(crate) fn bind(ctx: &CudaContext) -> Result<(), Error> {
    if check("cuCtxGetCurrent", result::ctx::get_current())? != Some(ctx.cu_ctx()) {
        // SAFETY: the context is alive while its `CudaContext` is.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(ctx.cu_ctx()) })?;
    }
    Ok(())
}

/// The same before something is given back: a second time if the first fails, because it may have returned an error
/// of earlier work, and a thread without a context gives nothing back.
pub(crate) fn bind_to_free(ctx: &CudaContext) {
    // If that fails too, so does what comes next, and the memory stays until the context ends.
    let _ = bind(ctx).or_else(|_| bind(ctx));
}

/// Lets the calling thread wait whatever other threads capture into graphs, and lets them. Without it a capture in
/// `GLOBAL` mode forbids "potentially unsafe" calls to every thread, waiting for an event among them, and one such call
/// breaks the capture (CUDA driver API, `cuThreadExchangeStreamCaptureMode`). The context is the calling thread's.
pub(crate) fn ignore_captures_elsewhere() {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // Copies need it only while somebody captures; if they cannot do without, their calls will say so.
    // SAFETY: the pointer is valid for the call, which leaves the mode before there.
    let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
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
    /// `ctx` is the calling thread's context.
    pub(crate) fn new(ctx: &Arc<CudaContext>, flags: CUevent_flags) -> Result<Self, Error> {
        let raw = check("cuEventCreate", result::event::create(flags))?;
        Ok(Self { raw, ctx: ctx.clone() })
    }

    /// Valid while this exists.
    pub(crate) fn raw(&self) -> CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        bind_to_free(&self.ctx);
        // SAFETY: created by us, and destroyed once. Streams that wait for it keep what they need of it.
        let _ = unsafe { result::event::destroy(self.raw) };
    }
}

/// Page-locked host memory of its own.
pub(crate) struct Pinned {
    start: NonNull<u8>,
    len: usize,
    ctx: Arc<CudaContext>,
}

// SAFETY: memory, reached through `&` and `&mut` only.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
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
        Ok(Self { start, len, ctx: ctx.clone() })
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: that many bytes, all set, which live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes any other reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        bind_to_free(&self.ctx);
        // SAFETY: allocated by us, and freed once; the copies from it are done (`Copies::settle`).
        let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
    }
}
