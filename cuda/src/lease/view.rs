//! A typed view of a batch on one stream. Every read by a safe call of cudarc's is ordered or refused.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop};

use crate::cu::{self, Current};
use crate::slot::Uses;

/// `CU_STREAM_LEGACY` of cuda.h: the legacy default stream, whose usual handle is null.
pub(super) const LEGACY: usize = 1;

/// A view of a batch, or of a part of it, as elements of type `T` on one stream. [`Lease::on`](crate::Lease::on) and
/// [`Lease::on_range`](crate::Lease::on_range) return it.
///
/// cudarc's safe copies (`stream.memcpy_dtod(&view, ..)`, `memcpy_dtoh`, `clone_dtoh`) and all other functions that
/// accept a [`DevicePtr`] can read the view, on each stream that [`Lease::on`](crate::Lease::on) was called for. On its
/// own stream, it can be a kernel argument, as a pointer.
///
/// **A copy on any other stream fails** with a driver error, because it could not be ordered before the slot's next
/// copy. So does a copy on a stream that is being captured. To copy to another context, copy within the context first
/// ([`Lease::into_owned`](crate::Lease::into_owned)).
pub struct View<'l, T> {
    /// The streams that the lease is used on.
    pub(super) uses: &'l RefCell<Uses>,
    /// Returned by [`DeviceSlice::stream`]; see there.
    pub(super) elsewhere: &'l Arc<CudaStream>,
    pub(super) start: CUdeviceptr,
    pub(super) len: usize,
    /// The stream that the view is for. The lease records its use when it is dropped.
    pub(super) stream: Arc<CudaStream>,
    pub(super) elements: PhantomData<&'l [T]>,
}

impl<'l, T> View<'l, T> {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the view has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the stream of the view.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns the device address of the view. Use it only on [`stream`](View::stream), in work enqueued before the
    /// lease is dropped.
    #[must_use]
    pub fn address(&self) -> CUdeviceptr {
        self.start
    }

    /// Returns a view of a range of the elements, on the same stream. Returns `None` if the range is out of bounds.
    #[must_use]
    pub fn slice(&self, elements: Range<usize>) -> Option<Self> {
        if elements.start > elements.end || elements.end > self.len {
            return None;
        }
        let start = self.start + (elements.start * size_of::<T>()) as u64;
        Some(Self { start, len: elements.len(), stream: self.stream.clone(), ..*self })
    }
}

impl<T> DeviceSlice<T> for View<'_, T> {
    fn len(&self) -> usize {
        self.len
    }

    /// Returns the legacy default stream; [`View::stream`] returns the view's stream. Only cudarc's copies between
    /// contexts ask for the address on this stream, and they then copy on another one. `device_ptr` uses this to
    /// recognize and refuse them.
    #[allow(clippy::misnamed_getters, reason = "see above")]
    fn stream(&self) -> &Arc<CudaStream> {
        self.elsewhere
    }
}

impl<T> DevicePtr<T> for View<'_, T> {
    /// Returns address 0, which the driver should reject, if the lease is not [on](crate::Lease::on) this stream, or
    /// the access would be captured into a graph.
    ///
    /// The guard waits for nothing: cudarc's waits do nothing while an error of an earlier call is recorded in the
    /// context.
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let (handle, ctx) = (stream.cu_stream(), self.elsewhere.context());
        let here = handle.addr() != LEGACY && stream.context() == ctx;
        let is_captured = || {
            let _current = Current::enter(ctx);
            // If the driver cannot tell, assume that it is not: cudarc's own call then fails.
            // SAFETY: the stream exists and belongs to this context.
            matches!(unsafe { cu::is_captured(handle) }, Ok(true))
        };
        let ordered = here && self.uses.borrow().has(handle) && !is_captured();
        (if ordered { self.start } else { 0 }, SyncOnDrop::Sync(None))
    }
}

// SAFETY: the argument is the device address. `LaunchArgs` keeps a pointer to it, and borrows the view for as long. To
// launch is unsafe: the caller guarantees that the kernel runs on the view's stream.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b View<'_, T>> for LaunchArgs<'a> {
    fn arg(&mut self, view: &'b View<'_, T>) -> &mut Self {
        self.arg(&view.start)
    }
}

debug!([T] View<'_, T>, this, len: this.len, stream: this.stream);
