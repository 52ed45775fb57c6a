//! The driver's calls, the copy stream and events, with our errors.
//!
//! Built on cudarc's lower layers. Its safe objects panic on some errors or keep them for a later call; these functions
//! return them.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, Range};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use cudarc::driver::{CudaContext, DriverError, result, sys};

use crate::driver::check;
use crate::error::Error;

/// Calls `call` again if it fails: the first call may have returned an error of earlier work. Used where such an error
/// must not keep something from being freed or waited for.
pub(crate) fn twice<T>(mut call: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    call().or_else(|_| call())
}

/// Makes a context current on the calling thread, and restores the previous one when dropped. Handles of default streams
/// are resolved in the current context.
///
/// `CudaContext::bind_to_thread` would not do: it also returns errors that drops elsewhere in the program left behind.
#[must_use]
pub(crate) struct Current {
    /// The previous context, null for none. `None` if `ctx` was current already.
    before: Option<CUcontext>,
    _here: PhantomData<*const ()>,
}

impl Current {
    /// Changes nothing now, and restores the current context when dropped.
    pub(crate) fn keep() -> Result<Self, Error> {
        let before = check("cuCtxGetCurrent", result::ctx::get_current())?;
        Ok(Self { before: Some(before.unwrap_or(ptr::null_mut())), _here: PhantomData })
    }

    pub(crate) fn enter(ctx: &CudaContext) -> Result<Self, Error> {
        let mut current = Self::keep()?;
        if current.before == Some(ctx.cu_ctx()) {
            current.before = None;
        } else {
            // SAFETY: the context is alive while its `CudaContext` is.
            check("cuCtxSetCurrent", unsafe { result::ctx::set_current(ctx.cu_ctx()) })?;
        }
        Ok(current)
    }

    /// Same as `enter`, before freeing something: most calls that free need a current context.
    pub(crate) fn enter_to_free(ctx: &CudaContext) -> Option<Self> {
        // If both tries fail, the free may fail too, and the memory then stays allocated until the context ends.
        twice(|| Self::enter(ctx)).ok()
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: `before` was current on this thread, or is null. An error is of earlier work, reported elsewhere.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

/// A share of a context or of one of its streams. Its drop restores the calling thread's current context.
///
/// When the last share of a context is dropped, cudarc makes the context current and gives it back to the driver. The
/// thread would be left with a context that may no longer exist.
#[derive(Clone)]
pub(crate) struct Owner<T>(ManuallyDrop<T>);

impl<T> Owner<T> {
    pub(crate) fn new(share: T) -> Self {
        Self(ManuallyDrop::new(share))
    }
}

impl<T> Deref for Owner<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        let _current = twice(Current::keep);
        // SAFETY: dropped only here.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

/// Allows the calling thread to wait and free while any stream is being captured into a graph, until this is dropped.
///
/// A capture in `GLOBAL` mode forbids "potentially unsafe" calls to each thread in its default mode, and one such call
/// invalidates the capture (CUDA driver API, `cuThreadExchangeStreamCaptureMode`). An uploader never waits for captured work and never
/// frees captured memory.
#[must_use]
pub(crate) struct BesideCaptures {
    before: sys::CUstreamCaptureMode,
    _here: PhantomData<*const ()>,
}

impl BesideCaptures {
    /// `None` if the driver refuses. Copies need the mode only during a capture, and then their own calls fail.
    pub(crate) fn enter() -> Option<Self> {
        let before = exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
        Some(Self { before, _here: PhantomData })
    }
}

impl Drop for BesideCaptures {
    fn drop(&mut self) {
        let _ = exchange(self.before);
    }
}

/// Makes a context current, and allows the thread to wait and free during a capture, until the result is dropped. The
/// mode is given back first: the context is still current then.
pub(crate) fn apart(ctx: &CudaContext) -> Result<(Option<BesideCaptures>, Current), Error> {
    let current = Current::enter(ctx)?;
    Ok((BesideCaptures::enter(), current))
}

/// Sets the calling thread's capture mode and returns the previous one. `None` if the driver refuses.
fn exchange(mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    let once = || {
        let mut mode = mode;
        // SAFETY: the pointer is valid for the call, which writes the previous mode there.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        check("cuThreadExchangeStreamCaptureMode", exchanged.result()).map(|()| mode)
    };
    twice(once).ok()
}

/// Whether work in `stream` becomes part of a graph now, or cannot be enqueued because of a capture. If `stream` is the
/// legacy default stream, a capture on any blocking stream counts.
///
/// # Safety
///
/// The stream exists.
pub(crate) unsafe fn is_captured(stream: CUstream) -> Result<bool, Error> {
    // SAFETY: the caller guarantees that the stream exists.
    match unsafe { result::stream::is_capturing(stream) } {
        Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(true),
        status => {
            let none = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
            check("cuStreamIsCapturing", status).map(|status| status != none)
        }
    }
}

/// Waits until all work in the stream is done.
///
/// # Safety
///
/// The stream exists.
pub(crate) unsafe fn synchronize(stream: CUstream) -> Result<(), Error> {
    // SAFETY: the caller guarantees that the stream exists.
    check("cuStreamSynchronize", unsafe { result::stream::synchronize(stream) })
}

/// Makes later work in `stream` wait for the last record of `event`.
///
/// # Safety
///
/// Both exist.
pub(crate) unsafe fn wait(stream: CUstream, event: CUevent) -> Result<(), Error> {
    let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: the caller guarantees that both exist.
    check("cuStreamWaitEvent", unsafe { result::stream::wait_event(stream, event, flags) })
}

/// Blocks the calling thread until the last record of `event` is complete.
///
/// # Safety
///
/// The event exists.
pub(crate) unsafe fn wait_on_host(event: CUevent) -> Result<(), Error> {
    // SAFETY: the caller guarantees that the event exists.
    check("cuEventSynchronize", unsafe { result::event::synchronize(event) })
}

/// Returns whether the last record of `event` is complete.
///
/// # Safety
///
/// The event exists.
pub(crate) unsafe fn is_complete(event: CUevent) -> Result<bool, Error> {
    // SAFETY: the caller guarantees that the event exists.
    match unsafe { result::event::query(event) } {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        result => check("cuEventQuery", result).map(|()| true),
    }
}

/// Records `event` after the work that is in `stream` now.
///
/// # Safety
///
/// Both exist.
pub(crate) unsafe fn record(event: CUevent, stream: CUstream) -> Result<(), Error> {
    // SAFETY: the caller guarantees that both exist.
    check("cuEventRecord", unsafe { result::event::record(event, stream) })
}

/// Enqueues a copy of `len` bytes to the device.
///
/// # Safety
///
/// Both ranges and the stream exist until the copy is done. `from` is not written to until then.
pub(crate) unsafe fn copy_to_device(
    to: CUdeviceptr,
    from: *const u8,
    len: usize,
    stream: CUstream,
) -> Result<(), Error> {
    // SAFETY: the caller guarantees the ranges and the stream. No reference to the source is made: other threads own it
    // while the copy runs.
    let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), len, stream) };
    check("cuMemcpyHtoDAsync", result.result())
}

/// Enqueues a copy of `len` bytes from the device.
///
/// # Safety
///
/// Both ranges and the stream exist until the copy is done. `to` is page-locked and is not accessed until then.
pub(crate) unsafe fn copy_to_host(
    to: *mut u8,
    from: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> Result<(), Error> {
    // SAFETY: the caller guarantees the ranges and the stream.
    let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, len, stream) };
    check("cuMemcpyDtoHAsync", result.result())
}

/// The allocation of device memory that contains an address.
pub(crate) fn allocation(address: CUdeviceptr) -> Result<Range<CUdeviceptr>, Error> {
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: both pointers are valid for the call, which does not access the device memory.
    let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, address) };
    check("cuMemGetAddressRange", found.result())?;
    Ok(start..start + bytes as u64)
}

/// A handle of the driver's, which is destroyed when this is dropped.
pub(crate) struct Handle<T: Copy> {
    raw: T,
    /// `None` for the legacy default stream, which is not destroyed.
    destroy: Option<unsafe fn(T) -> Result<(), DriverError>>,
    ctx: Owner<Arc<CudaContext>>,
}

/// The copy stream. Not cudarc's stream type: creating one raises a count that turns on event tracking for every call
/// in the context.
pub(crate) type Stream = Handle<CUstream>;

pub(crate) type Event = Handle<CUevent>;

// SAFETY: a handle of the driver, which is thread-safe.
unsafe impl<T: Copy> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Copy> Sync for Handle<T> {}

impl<T: Copy> Handle<T> {
    /// The handle, valid while `self` exists. That of the legacy default stream names it while its context is current.
    pub(crate) fn raw(&self) -> T {
        self.raw
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.ctx
    }
}

impl Stream {
    /// With `apart`, creates a stream that does not synchronize with the legacy default stream. Otherwise, uses the legacy
    /// default stream itself, whose handle is null. `ctx` is current.
    pub(crate) fn new(ctx: &Arc<CudaContext>, apart: bool) -> Result<Self, Error> {
        let create = || result::stream::create(result::stream::StreamKind::NonBlocking);
        let raw = check("cuStreamCreate", apart.then(create).unwrap_or(Ok(ptr::null_mut())))?;
        Ok(Self { raw, destroy: apart.then_some(result::stream::destroy), ctx: Owner::new(ctx.clone()) })
    }

    /// Waits until all work in it is done.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        // In another context, the handle of the legacy default stream would name another stream.
        let _apart = twice(|| apart(&self.ctx))?;
        // SAFETY: the stream exists.
        twice(|| unsafe { synchronize(self.raw) })
    }
}

impl Event {
    /// Creates an event. With `timed`, the driver can tell the time between two of them; with `blocking`, a host thread
    /// that waits for it sleeps. `ctx` is current.
    pub(crate) fn new(ctx: &Arc<CudaContext>, timed: bool, blocking: bool) -> Result<Self, Error> {
        let timing = if timed { 0 } else { CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
        let sleep = if blocking { CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 } else { 0 };
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is valid for the call. Called without cudarc's wrapper, which accepts only one flag.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, timing | sleep) }.result())?;
        Ok(Self { raw, destroy: Some(result::event::destroy), ctx: Owner::new(ctx.clone()) })
    }
}

impl<T: Copy> Drop for Handle<T> {
    fn drop(&mut self) {
        let Some(destroy) = self.destroy else { return };
        let _current = Current::enter_to_free(&self.ctx);
        // SAFETY: created by `new` and destroyed once. The driver releases a stream's resources when its work is done, and
        // streams that wait for an event keep what they need.
        let _ = unsafe { destroy(self.raw) };
    }
}
