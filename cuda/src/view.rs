//! A batch on one stream: its address with a type, ordered wherever cudarc reads it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{
    CudaContext, CudaStream, DevicePtr, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop,
};

use crate::cu::Current;
use crate::error::Error;
use crate::lease::Lease;

/// `CU_STREAM_LEGACY` of cuda.h: the legacy default stream, whose usual handle is null.
const LEGACY: usize = 1;

/// A batch, or a part of it, as elements of type `T` on one stream; made by [`Lease::on`].
///
/// It can be read by cudarc's safe copies (`stream.memcpy_dtod(&view, ..)`, `memcpy_dtoh`, `clone_dtoh`) and whatever
/// else takes a [`DevicePtr`]; and it can be an argument of a kernel, on the view's own stream, as a pointer.
///
/// **A copy on another stream than the view's** is ordered too, at the cost of a wait of the host for that stream: call
/// [`Lease::on`] for each stream. A copy to another *context* is refused, with an error of the driver: nothing would
/// order it before the slot's next copy. Copy within the context first ([`Lease::into_owned`]).
pub struct View<'l, T> {
    lease: &'l dyn Leased,
    start: CUdeviceptr,
    len: usize,
    /// It is for this stream, which the lease waits for when it is dropped.
    stream: Arc<CudaStream>,
    /// What [`DeviceSlice::stream`] gives: see there.
    elsewhere: Arc<CudaStream>,
    _elements: PhantomData<&'l [T]>,
}

/// A lease of any metadata.
trait Leased {
    fn context(&self) -> &Arc<CudaContext>;

    /// # Safety
    ///
    /// The stream exists, and belongs to the lease's context.
    unsafe fn wait_for_copy(&self, stream: CUstream) -> Result<(), Error>;
}

impl<M: 'static> Leased for Lease<M> {
    fn context(&self) -> &Arc<CudaContext> {
        Lease::context(self)
    }

    unsafe fn wait_for_copy(&self, stream: CUstream) -> Result<(), Error> {
        let _current = Current::enter(Lease::context(self))?;
        // SAFETY: as the caller says; the context has just been entered.
        unsafe { self.slot().use_meanwhile(stream) }
    }
}

impl<'l, T> View<'l, T> {
    pub(crate) fn new<M: 'static>(
        lease: &'l Lease<M>,
        start: CUdeviceptr,
        len: usize,
        stream: Arc<CudaStream>,
    ) -> Self {
        let handle = std::ptr::without_provenance_mut(LEGACY);
        // SAFETY: the driver has this stream in every context, for ever.
        let elsewhere = unsafe { Lease::context(lease).wrap_borrowed_stream(handle) };
        Self { lease, start, len, stream, elsewhere, _elements: PhantomData }
    }

    /// How many elements it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The stream that it is for.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Its device address. Whoever uses it does so on [`stream`](View::stream), by work that is enqueued before the
    /// lease is dropped.
    #[must_use]
    pub fn address(&self) -> CUdeviceptr {
        self.start
    }

    /// Some of its elements, on the same stream; `None` if it has no such.
    #[must_use]
    pub fn slice(&self, elements: Range<usize>) -> Option<Self> {
        if elements.start > elements.end || elements.end > self.len {
            return None;
        }
        Some(Self {
            lease: self.lease,
            start: self.start + (elements.start * size_of::<T>()) as u64,
            len: elements.len(),
            stream: self.stream.clone(),
            elsewhere: self.elsewhere.clone(),
            _elements: PhantomData,
        })
    }
}

impl<T> DeviceSlice<T> for View<'_, T> {
    fn len(&self) -> usize {
        self.len
    }

    /// Not the stream that the view is for, which [`View::stream`] gives, but one by which cudarc's copies to other
    /// contexts are recognized, and refused: they ask for this one's address, and then copy on another.
    #[allow(clippy::misnamed_getters, reason = "see above")]
    fn stream(&self) -> &Arc<CudaStream> {
        &self.elsewhere
    }
}

impl<T> DevicePtr<T> for View<'_, T> {
    /// Makes the stream wait for the copy, if it is not the view's, and the host for what is then enqueued there.
    ///
    /// The address is 0, which the driver refuses, where that order cannot be had.
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        if *stream == *self.stream {
            return (self.start, SyncOnDrop::Sync(None));
        }
        if stream.cu_stream().addr() == LEGACY || stream.context() != self.lease.context() {
            return (0, SyncOnDrop::Sync(None));
        }
        // SAFETY: the stream exists, and is of this context.
        match unsafe { self.lease.wait_for_copy(stream.cu_stream()) } {
            Ok(()) => (self.start, SyncOnDrop::sync_stream(stream)),
            // The call this is for returns an error of its own.
            Err(_) => (0, SyncOnDrop::Sync(None)),
        }
    }
}

// SAFETY: the argument is the device address, which stays where it is as long as the view is borrowed: `LaunchArgs`
// keeps pointers to its arguments. Whoever launches a kernel answers for its stream.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b View<'_, T>> for LaunchArgs<'a> {
    fn arg(&mut self, view: &'b View<'_, T>) -> &mut Self {
        self.arg(&view.start)
    }
}

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("len", &self.len).field("stream", &self.stream).finish_non_exhaustive()
    }
}
