//! A batch in device memory, leased from its slot.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex};

use bytemuck::AnyBitPattern;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr};
use twinbuf_core::KeptSlot;

use crate::cu::{self, Current, Owner};
use crate::driver::check;
use crate::error::{Error, Fate, lock, wrong};
use crate::slot::DeviceBuf;
use crate::time::{Clock, CopyTime};

mod view;

pub use view::View;

/// An element type for views of device memory. Every bit pattern must be a valid value. It is implemented for all
/// types that are [`DeviceRepr`] and [`AnyBitPattern`].
pub trait Element: DeviceRepr + AnyBitPattern {}

impl<T: DeviceRepr + AnyBitPattern> Element for T {}

/// `CU_STREAM_PER_THREAD` of cuda.h.
const PER_THREAD: usize = 2;

/// One batch in device memory, in its slot.
///
/// Dropping the lease records an event on every stream that used the batch, and the next copy into the slot waits
/// for these events. Drop the lease as soon as the work that reads the batch is *enqueued*. If an event cannot be
/// recorded, the drop blocks until the stream is done; it may also block if it is the last part of the uploader, which
/// frees the memory. Leases may be dropped in any
/// order and on any thread. If a lease is leaked (`mem::forget`), its slot is never refilled.
///
/// **If one of these streams is being captured** into a graph when the lease is dropped, the slot stays occupied,
/// because an event recorded at this time would belong to the graph. The first receive (with `overlap(false)`, also
/// acquire) call after the end of the capture releases the slot. Until then, a receive call that needs this slot
/// returns [`Error::SlotHeld`] ([`recv_deadline`](crate::DeviceBatches::recv_deadline): at the deadline). If the
/// [`DeviceBatches`](crate::DeviceBatches) and their leases are dropped before, and with `overlap(false)` the host
/// slots too, the memory of the slot is leaked. Do not begin a capture of such a stream while another thread drops the
/// lease or makes a call that may release the slot: the capture would swallow the uploader's next copies.
///
/// Every call, and the drop, restores the calling thread's current context.
///
/// `M` is the type of the value committed with the batch. The value is dropped with the lease.
pub struct Lease<M: 'static> {
    /// Taken by `drop` only.
    pub(crate) slot: Option<Slot<M>>,
    pub(crate) shared: Arc<Shared<M>>,
}

pub(crate) type Slot<M> = KeptSlot<'static, DeviceBuf<M>>;

/// State that an uploader's leases and its sides share.
pub(crate) struct Shared<M: 'static> {
    pub(crate) ctx: Owner<Arc<CudaContext>>,
    pub(crate) fate: Arc<Fate>,
    /// `None` if copies are not timed.
    pub(crate) clock: Option<Arc<Clock>>,
    /// The legacy default stream. The method `DeviceSlice::stream` of [`View`] returns it and has the reason.
    elsewhere: Owner<Arc<CudaStream>>,
    /// Slots of leases that were dropped while a stream that used them was being captured.
    captured: Mutex<Vec<Slot<M>>>,
}

impl<M: 'static> Shared<M> {
    pub(crate) fn new(ctx: Owner<Arc<CudaContext>>, clock: Option<Arc<Clock>>) -> Self {
        let legacy = ptr::without_provenance_mut(view::LEGACY);
        // SAFETY: the legacy default stream exists in every context as long as the context does.
        let elsewhere = Owner::new(unsafe { ctx.wrap_borrowed_stream(legacy) });
        Self { ctx, fate: Arc::default(), clock, elsewhere, captured: Mutex::default() }
    }

    /// Releases the slots held by captures that have ended. Returns whether another capture still holds the slot of
    /// batch `seq`; without a number, whether one holds any slot.
    pub(crate) fn release_captured(&self, seq: Option<u64>) -> bool {
        let mut captured = lock(&self.captured);
        let ended: Vec<_> = captured.extract_if(.., |slot| slot.end_uses()).collect();
        let held = captured.iter().any(|slot| seq.is_none_or(|seq| slot.seq() == seq));
        drop(captured);
        // Not under the lock: to release a slot wakes tasks, and a waker may drop a lease, which locks it too.
        drop(ended);
        held
    }
}

impl<M: 'static> Lease<M> {
    fn slot(&self) -> &Slot<M> {
        let Some(slot) = &self.slot else { unreachable!("taken by `drop` only") };
        slot
    }

    /// Returns a view of the batch as elements of type `T`, for use on `stream`.
    ///
    /// Work enqueued on `stream` after this call runs after the copy. The slot's next copy runs after all work that was
    /// enqueued on `stream` before the lease was dropped. Call this method once for each stream that uses the batch;
    /// repeated calls for one stream do not wait again. A copy of the [`View`] on a stream without this call fails with
    /// a driver error.
    ///
    /// To use a batch in a graph, copy it to the graph's own memory before the launch. When the graph is launched
    /// again, the slot may contain a different batch.
    ///
    /// # Errors
    ///
    /// - [`Error::OtherContext`]: the stream belongs to another context.
    /// - [`Error::PerThreadStream`]: the stream is the per-thread default stream.
    /// - [`Error::Option`]: the size of the batch is not a multiple of the size of `T`, `T` has size 0, or the slot is
    ///   not aligned for `T`.
    /// - [`Error::Captured`]: `stream` is being captured, or `stream` is the default stream and any blocking stream
    ///   is being captured. The capture stays valid.
    /// - [`Error::Driver`]: a driver call failed, so the stream may not wait for the copy. Do not use the batch on this
    ///   stream.
    pub fn on<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<View<'_, T>, Error> {
        self.on_range(0..self.len(), stream)
    }

    /// Returns a view of a byte range of the batch as elements of type `T`, for use on `stream`. Use it for a batch
    /// with several fields. See [`on`](Lease::on).
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: the range is out of bounds, not aligned for `T`, or no multiple of its size.
    /// - The errors of [`on`](Lease::on).
    pub fn on_range<T: Element>(
        &self,
        bytes: Range<usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<View<'_, T>, Error> {
        self.refuse_per_thread(stream.cu_stream())?;
        self.view(bytes, stream)
    }

    /// Copies the batch to new device memory, on `stream`, for frameworks that own their memory. The host does not
    /// wait for the copy. The slot can be refilled when this copy is complete.
    ///
    /// The method accepts the per-thread default stream, because the use of the slot ends within the call. cudarc then
    /// frees the returned slice, like every slice of that stream, on the per-thread stream of the thread that drops it:
    /// drop the slice on this thread, or synchronize this thread's stream first.
    ///
    /// cudarc allocates the memory (`cuMemAllocAsync` if the device supports it).
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: the batch is empty.
    /// - [`Error::Driver`]: a driver call failed, for example because there is not enough memory.
    /// - The errors of [`on`](Lease::on), except [`Error::PerThreadStream`].
    pub fn into_owned<T: Element>(self, stream: &Arc<CudaStream>) -> Result<CudaSlice<T>, Error> {
        // `stream` may be the per-thread default stream: this call also drops `self`, so the use ends on the same
        // thread.
        let view = self.view::<T>(0..self.len(), stream)?;
        if view.is_empty() {
            return Err(wrong("self", "a batch with bytes".to_string(), &"an empty one"));
        }
        // Where the device has no memory pools, the allocation is not stream-ordered, and could break a capture.
        let _apart = cu::apart(&self.shared.ctx)?;
        // SAFETY: the copy below is enqueued on the same stream before the memory is returned. Later work on the stream
        // finds it filled.
        let mut owned = check("cuMemAllocAsync", unsafe { stream.alloc::<T>(view.len()) })?;
        check("cuMemcpyDtoDAsync", stream.memcpy_dtod(&view, &mut owned))?;
        Ok(owned)
    }

    /// Returns the device address of the batch, for code that uses it on `stream` without cudarc. See
    /// [`on`](Lease::on). A null `stream` is the *legacy* default stream, regardless of the default stream of the
    /// other code.
    ///
    /// # Safety
    ///
    /// - The stream must belong to the uploader's context.
    /// - The stream must exist until the lease has been dropped. If the stream is being captured at that time, it
    ///   must exist until the uploader and all its leases have been dropped.
    /// - Only work that is enqueued on this stream before the lease is dropped may access the memory, within
    ///   [`len`](Lease::len) bytes.
    ///
    /// # Errors
    ///
    /// [`Error::PerThreadStream`], [`Error::Captured`] and [`Error::Driver`], as for [`on`](Lease::on).
    pub unsafe fn on_raw(&self, stream: CUstream) -> Result<CUdeviceptr, Error> {
        self.refuse_per_thread(stream)?;
        // SAFETY: the caller guarantees the stream; its handle names the same stream on every thread.
        unsafe { self.slot().use_on(stream, None) }?;
        Ok(self.slot().address)
    }

    /// Returns the size of the batch in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slot().len
    }

    /// Returns `true` if the batch has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the sequence number of the batch, starting at 0, in the order in which slots were acquired. A cancelled
    /// one counts.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.slot().seq()
    }

    /// Returns the value committed with the batch.
    #[must_use]
    pub fn meta(&self) -> &M {
        let Some(meta) = &self.slot().meta else { unreachable!("set by the commit, taken by `drop` only") };
        meta
    }

    /// Returns a mutable reference to the value committed with the batch, to modify it, or to move it out by
    /// [`mem::take`](std::mem::take).
    #[must_use]
    pub fn meta_mut(&mut self) -> &mut M {
        let meta = self.slot.as_mut().and_then(|slot| slot.meta.as_mut());
        let Some(meta) = meta else { unreachable!("set by the commit, taken by `drop` only") };
        meta
    }

    /// Returns the time of the copy. Does not wait. Returns `None` if the copy is still running, if the batch is empty,
    /// or if copies are not timed ([`times`](crate::Uploader::times), [`on_copied`](crate::Uploader::on_copied)).
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] if the copy or the query failed.
    pub fn copied(&self) -> Result<Option<CopyTime>, Error> {
        let (Some(clock), Some(start), false) = (&self.shared.clock, &self.slot().start, self.is_empty())
        else {
            return Ok(None);
        };
        let _current = Current::enter(&self.shared.ctx)?;
        // SAFETY: both events are the slot's, are for timing, and were recorded before the batch was handed over.
        unsafe { clock.time(start.raw(), self.slot().copied.raw(), self.slot().issued) }
    }

    /// Blocks until the copy is complete, and returns its time as [`copied`](Lease::copied) does. Streams do not
    /// need this call. It is for a host that runs one stage after the other.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] if the copy or the wait failed.
    pub fn wait_copied(&self) -> Result<Option<CopyTime>, Error> {
        if !self.is_empty() {
            let _apart = cu::apart(&self.shared.ctx)?;
            // SAFETY: the slot's event.
            unsafe { cu::wait_on_host(self.slot().copied.raw()) }?;
        }
        self.copied()
    }

    fn refuse_per_thread(&self, stream: CUstream) -> Result<(), Error> {
        if stream.addr() == PER_THREAD { Err(Error::PerThreadStream) } else { Ok(()) }
    }

    /// Implements `on_range` for a stream whose handle names the same stream until the lease is dropped.
    fn view<T: Element>(&self, bytes: Range<usize>, stream: &Arc<CudaStream>) -> Result<View<'_, T>, Error> {
        if *stream.context() != *self.shared.ctx {
            return Err(Error::OtherContext);
        }
        if bytes.start > bytes.end || bytes.end > self.len() {
            let wanted = format!("a range of the batch's {} bytes", self.len());
            return Err(wrong("bytes", wanted, &format_args!("{bytes:?}")));
        }
        let start = self.slot().address + bytes.start as u64;
        let whole = bytes.len().checked_rem(size_of::<T>()) == Some(0);
        if !whole || !start.is_multiple_of(align_of::<T>() as u64) {
            let wanted = if whole {
                format!("a type that byte {} of the batch is aligned for", bytes.start)
            } else {
                format!("a type whose size divides the batch's {} bytes", bytes.len())
            };
            let (name, size) = (std::any::type_name::<T>(), size_of::<T>());
            return Err(wrong("T", wanted, &format_args!("{name} of {size} bytes")));
        }
        // SAFETY: the `Arc` keeps the stream alive; it belongs to our context.
        unsafe { self.slot().use_on(stream.cu_stream(), Some(stream.clone())) }?;
        let (len, stream) = (bytes.len() / size_of::<T>(), stream.clone());
        let (uses, elsewhere) = (&self.slot().uses, &*self.shared.elsewhere);
        Ok(View { uses, elsewhere, start, len, stream, elements: PhantomData })
    }
}

impl<M: 'static> Drop for Lease<M> {
    fn drop(&mut self) {
        let Some(mut slot) = self.slot.take() else { return };
        let meta = slot.meta.take();
        if slot.end_uses() {
            // Dropping the guard releases the slot.
            drop(slot);
        } else {
            lock(&self.shared.captured).push(slot);
        }
        // Drop the caller's value last: its drop is foreign code.
        drop(meta);
    }
}

debug!([M: 'static] Lease<M>, this, seq: this.seq(), bytes: this.len());
