//! The training side: batches in device memory, leased from their slots.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::ThreadId;

use bytemuck::AnyBitPattern;
use cudarc::driver::sys::{CUdeviceptr, CUevent, CUstream};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr};
use twinbuf_core::{Consumer, Park, ReadSlot, RecvError, TryRecvError};

use crate::copy::{Clock, CopyTime, Fate};
use crate::cu::{self, BesideCaptures, Current, check};
use crate::error::Error;
use crate::host::Thread;
use crate::slot::{DeviceBuf, Layout};
use crate::view::View;

/// What a batch can be seen as in device memory: a type that every sequence of bytes is a value of.
pub trait Element: DeviceRepr + AnyBitPattern {}

impl<T: DeviceRepr + AnyBitPattern> Element for T {}

/// `CU_STREAM_PER_THREAD` of cuda.h.
const PER_THREAD: usize = 2;

/// The side that receives batches; made by [`Uploader::build`](crate::Uploader::build).
pub struct DeviceBatches<M: 'static> {
    // Dropped in this order: the copy thread is joined when both sides are gone.
    ring: Consumer<'static, DeviceBuf<M>, Park>,
    layout: Arc<Layout>,
    clock: Option<Arc<Clock>>,
    ctx: Arc<CudaContext>,
    fate: Arc<Fate>,
    thread: Option<Arc<Thread>>,
}

impl<M: 'static> DeviceBatches<M> {
    pub(crate) fn new(
        ring: Consumer<'static, DeviceBuf<M>, Park>,
        layout: Arc<Layout>,
        clock: Option<Arc<Clock>>,
        ctx: Arc<CudaContext>,
        fate: Arc<Fate>,
        thread: Option<Arc<Thread>>,
    ) -> Self {
        Self { ring, layout, clock, ctx, fate, thread }
    }

    /// The next batch, waiting until its copy has been issued; `None` after
    /// [`finish`](crate::HostSlots::finish).
    ///
    /// The copy may still be running: the streams that use the batch wait for it, the host does not. If it fails,
    /// CUDA says so in every later call, and the batch after this one is that error.
    ///
    /// # Errors
    ///
    /// After all batches that came before: the error that ended the uploader, [`Error::Abandoned`] if the host
    /// slots were dropped without `finish`; again and again. [`Error::AllHeld`] if the next device slot in turn is
    /// held by a lease, or was when it was leaked: waiting for oneself would never end. With `overlap(false)`
    /// [`Error::Empty`] if nothing was committed.
    pub fn recv(&mut self) -> Result<Option<Lease<M>>, Error> {
        if !self.overlap() {
            return self.try_recv();
        }
        let received = self.ring.recv();
        self.lease(received)
    }

    /// The next batch, if its copy has been issued by now. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Empty`] if it has not; the others as [`recv`](DeviceBatches::recv).
    pub fn try_recv(&mut self) -> Result<Option<Lease<M>>, Error> {
        let received = match self.ring.try_recv() {
            Ok(slot) => Ok(slot),
            Err(TryRecvError::Empty) => return Err(Error::Empty),
            Err(TryRecvError::Finished) => Err(RecvError::Finished),
            // Nothing here reserves slots, so none is cancelled.
            Err(TryRecvError::Abandoned | TryRecvError::Cancelled) => Err(RecvError::Abandoned),
            Err(TryRecvError::SlotHeld) => Err(RecvError::SlotHeld),
        };
        self.lease(received)
    }

    /// The next batch, or the promise that the task of `cx` is woken when its copy has been issued.
    ///
    /// # Errors
    ///
    /// As [`recv`](DeviceBatches::recv).
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Lease<M>>, Error>> {
        if self.overlap() {
            self.ring.poll_recv(cx).map(|received| self.lease(received))
        } else {
            Poll::Ready(self.try_recv())
        }
    }

    /// What a receive from the ring means.
    fn lease(
        &self,
        received: Result<ReadSlot<'static, DeviceBuf<M>, Park>, RecvError>,
    ) -> Result<Option<Lease<M>>, Error> {
        match received {
            Ok(slot) => {
                let (layout, clock, ctx) = (self.layout.clone(), self.clock.clone(), self.ctx.clone());
                Ok(Some(Lease { slot, layout, clock, ctx }))
            }
            Err(RecvError::Finished) => Ok(None),
            Err(RecvError::Abandoned | RecvError::Cancelled) => {
                Err(self.fate.get().cloned().unwrap_or(Error::Abandoned))
            }
            Err(RecvError::SlotHeld) => Err(Error::AllHeld { device_depth: self.ring.depth() }),
        }
    }

    fn overlap(&self) -> bool {
        self.thread.is_some()
    }

    /// The thread that issues the copies, and wakes tasks. For a thread that fills the slots: whoever runs on this one
    /// cannot wait for that one's end.
    #[doc(hidden)]
    #[must_use]
    pub fn copy_thread(&self) -> Option<ThreadId> {
        self.thread.as_ref()?.0.as_ref().map(|thread| thread.thread().id())
    }

    /// The context that the batches are in.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.ctx
    }
}

/// One batch in device memory, in its slot.
///
/// When it is dropped, an event is recorded on every stream it was used on, and the next copy into the slot waits
/// for those: drop it as soon as the work is *enqueued*. Dropping waits for nothing, unless an event cannot be
/// recorded: then for that stream. Leases may be dropped in any order, on any thread. One that is leaked
/// (`mem::forget`) costs its slot; the slot is never filled again.
///
/// What calls the driver, dropping too, leaves the calling thread's current context as it was.
///
/// `M` is what the reading side committed with the batch; it is dropped with the lease.
pub struct Lease<M: 'static> {
    slot: ReadSlot<'static, DeviceBuf<M>, Park>,
    layout: Arc<Layout>,
    clock: Option<Arc<Clock>>,
    ctx: Arc<CudaContext>,
}

impl<M: 'static> Lease<M> {
    /// The batch as elements of type `T`, for use on `stream`: what is enqueued there from now on runs after the
    /// copy, and the slot's next copy runs after what is enqueued there until the lease is dropped.
    ///
    /// Call it for each stream; a second time for one costs nothing. The [`View`] is for this stream: cudarc's copies
    /// on another one are ordered too, but wait on the host.
    ///
    /// **Not while the stream is being captured** into a graph, nor may the lease be dropped then: a captured stream
    /// cannot wait for a copy outside of its graph, and no copy for an event that the graph records. Call this for
    /// the stream that launches the graph. The copy thread and a capture on another thread, in any mode, leave each
    /// other alone.
    ///
    /// # Errors
    ///
    /// [`Error::OtherContext`]; [`Error::PerThreadStream`], for which there is
    /// [`on_this_thread`](Lease::on_this_thread); [`Error::Option`] if the batch is no whole number of `T`;
    /// [`Error::Driver`] if the stream could not be made to wait: do not use the batch on it.
    pub fn on<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<View<'_, T>, Error> {
        self.on_range(0..self.len(), stream)
    }

    /// Some of the batch's bytes as elements of type `T`, the rest as [`on`](Lease::on): for batches of several
    /// arrays.
    ///
    /// # Errors
    ///
    /// As [`on`](Lease::on); [`Error::Option`] if the batch has no such bytes, or they do not begin on `T`'s alignment.
    pub fn on_range<T: Element>(
        &self,
        bytes: Range<usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<View<'_, T>, Error> {
        self.refuse_per_thread(stream.cu_stream())?;
        self.view(bytes, stream)
    }

    /// The batch as memory of your own, copied there by the device, on `stream`: for frameworks that want to own
    /// what they compute with. The slot is free as soon as that copy is done.
    ///
    /// It is allocated as cudarc does it (`cuMemAllocAsync` where the device can), so it is dropped in `stream`.
    ///
    /// # Errors
    ///
    /// As [`on`](Lease::on); [`Error::Driver`] if there is no memory, [`Error::Option`] if the batch is empty.
    pub fn into_owned<T: Element>(self, stream: &Arc<CudaStream>) -> Result<CudaSlice<T>, Error> {
        self.refuse_per_thread(stream.cu_stream())?;
        self.copy(stream)
    }

    /// The batch's device address, for use on `stream` by code that does not know cudarc; the rest as
    /// [`on`](Lease::on). A null `stream` is the *legacy* default stream, whatever the other code was compiled for.
    ///
    /// # Safety
    ///
    /// The stream belongs to the uploader's context, and exists until the lease has been dropped. The memory is
    /// used on this stream only, as far as [`len`](Lease::len) reaches, and only by work that is enqueued before
    /// the lease is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::PerThreadStream`], [`Error::Driver`].
    pub unsafe fn on_raw(&self, stream: CUstream) -> Result<CUdeviceptr, Error> {
        self.refuse_per_thread(stream)?;
        // SAFETY: the caller has promised what is needed.
        unsafe { self.address_on(stream) }
    }

    /// The event that the copy is complete, for code that makes its own streams wait for it; `None` if the batch is
    /// empty. Valid while the lease is. What such a stream does is ordered before the slot's next copy only by
    /// [`on_raw`](Lease::on_raw).
    #[must_use]
    pub fn copied_event(&self) -> Option<CUevent> {
        (!self.is_empty()).then(|| self.slot.copied.raw())
    }

    /// The same lease, bound to this thread, for use on the per-thread default stream: the same handle means
    /// another stream on another thread, and the end of the use has to be recorded on the right one.
    ///
    /// It cannot be sent to another thread:
    ///
    /// ```compile_fail,E0277
    /// fn send<T: Send>(_: T) {}
    /// fn test(lease: twinbuf_cuda::Lease<()>) {
    ///     send(lease.on_this_thread());
    /// }
    /// ```
    ///
    /// A lease can:
    ///
    /// ```
    /// fn send<T: Send>(_: T) {}
    /// fn test(lease: twinbuf_cuda::Lease<()>) {
    ///     send(lease);
    /// }
    /// ```
    #[must_use]
    pub fn on_this_thread(self) -> LocalLease<M> {
        LocalLease { lease: self, _here: PhantomData }
    }

    /// The batch's length in bytes; of several arrays, where the last one ends.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slot.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the batch's part of array `i` lies, for [`on_range`](Lease::on_range); `None` if there is no such array
    /// ([`Uploader::arrays`](crate::Uploader::arrays)).
    #[must_use]
    pub fn array(&self, i: usize) -> Option<Range<usize>> {
        let start = self.layout.arrays().get(i)?.start;
        let len = self.slot.lens.get(i).copied().unwrap_or(0);
        // An empty one may begin behind the batch's end.
        Some(if len > 0 { start..start + len } else { 0..0 })
    }

    /// The number of the batch, from 0, in the order of the commits.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.slot.seq()
    }

    /// What was committed with the batch.
    #[must_use]
    pub fn meta(&self) -> &M {
        let Some(meta) = &self.slot.meta else { unreachable!("committed with it, and taken by `drop` only") };
        meta
    }

    /// The same, to be changed or moved out.
    #[must_use]
    pub fn meta_mut(&mut self) -> &mut M {
        let Some(meta) = &mut self.slot.meta else {
            unreachable!("committed with it, and taken by `drop` only")
        };
        meta
    }

    /// Whether the batch has been copied by now. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], if the copy has failed too.
    pub fn is_copied(&self) -> Result<bool, Error> {
        if self.is_empty() {
            return Ok(true);
        }
        let _current = Current::enter(&self.ctx)?;
        let _beside = BesideCaptures::enter();
        // SAFETY: the slot's event.
        unsafe { cu::is_complete(self.slot.copied.raw()) }
    }

    /// When the batch was copied; `None` while it still is, if it is empty, or if the uploader takes no
    /// [`times`](crate::Uploader::times). Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], if the copy has failed too.
    pub fn copied(&self) -> Result<Option<CopyTime>, Error> {
        let (Some(clock), Some(start), false) = (&self.clock, &self.slot.start, self.is_empty()) else {
            return Ok(None);
        };
        let _current = Current::enter(&self.ctx)?;
        // SAFETY: the slot's events, which are for timing and were recorded before the batch was handed over.
        unsafe { clock.time(start.raw(), self.slot.copied.raw(), self.slot.issued) }
    }

    /// Blocks until the batch has been copied, and tells when that was, as [`copied`](Lease::copied). Streams need no
    /// such wait: it is for a host that wants one stage after the other.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], if the copy has failed too.
    pub fn wait_copied(&self) -> Result<Option<CopyTime>, Error> {
        if !self.is_copied()? {
            let _current = Current::enter(&self.ctx)?;
            let _beside = BesideCaptures::enter();
            // SAFETY: the slot's event.
            unsafe { cu::wait_on_host(self.slot.copied.raw()) }?;
        }
        self.copied()
    }

    fn refuse_per_thread(&self, stream: CUstream) -> Result<(), Error> {
        if stream.addr() == PER_THREAD { Err(Error::PerThreadStream) } else { Ok(()) }
    }

    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.ctx
    }

    pub(crate) fn slot(&self) -> &DeviceBuf<M> {
        &self.slot
    }

    /// `on_range`, where the stream's handle means the same until the lease is dropped.
    fn view<T: Element>(&self, bytes: Range<usize>, stream: &Arc<CudaStream>) -> Result<View<'_, T>, Error> {
        if *stream.context() != self.ctx {
            return Err(Error::OtherContext);
        }
        if bytes.start > bytes.end || bytes.end > self.len() {
            let wanted = format!("a range of the batch's {} bytes", self.len());
            return Err(Error::Option { option: "bytes", wanted, found: format!("{bytes:?}") });
        }
        let start = self.slot.address() + bytes.start as u64;
        let whole = bytes.len().checked_rem(size_of::<T>()) == Some(0);
        if !whole || !start.is_multiple_of(align_of::<T>() as u64) {
            return Err(Error::Option {
                option: "T",
                wanted: if whole {
                    format!("a type whose alignment byte {} of the batch has", bytes.start)
                } else {
                    format!("a type that a batch of {} bytes is a whole number of", bytes.len())
                },
                found: format!("{} of {} bytes", std::any::type_name::<T>(), size_of::<T>()),
            });
        }
        let _current = Current::enter(&self.ctx)?;
        // SAFETY: the `Arc` keeps the stream; it is of our context, which has just been entered.
        unsafe { self.slot.use_on(stream.cu_stream(), Some(stream.clone())) }?;
        Ok(View::new(self, start, bytes.len() / size_of::<T>(), stream.clone()))
    }

    fn copy<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<CudaSlice<T>, Error> {
        let view = self.view::<T>(0..self.len(), stream)?;
        if view.is_empty() {
            let (wanted, found) = ("a batch with bytes".to_string(), "an empty one".to_string());
            return Err(Error::Option { option: "self", wanted, found });
        }
        let _current = Current::enter(&self.ctx)?;
        // SAFETY: filled by the copy below before anybody sees it.
        let mut owned = check("cuMemAllocAsync", unsafe { stream.alloc::<T>(view.len()) })?;
        check("cuMemcpyDtoDAsync", stream.memcpy_dtod(&view, &mut owned))?;
        Ok(owned)
    }

    /// # Safety
    ///
    /// As `on_raw`; and the handle means the same stream until the lease is dropped.
    unsafe fn address_on(&self, stream: CUstream) -> Result<CUdeviceptr, Error> {
        let _current = Current::enter(&self.ctx)?;
        // SAFETY: the caller has promised what is needed.
        unsafe { self.slot.use_on(stream, None) }?;
        Ok(self.slot.address())
    }
}

impl<M: 'static> Drop for Lease<M> {
    fn drop(&mut self) {
        self.slot.end_uses();
        self.slot.meta = None;
    }
}

/// A [`Lease`] that stays on its thread, and so can be used on the per-thread default stream too; see
/// [`Lease::on_this_thread`].
pub struct LocalLease<M: 'static> {
    lease: Lease<M>,
    _here: PhantomData<*const ()>,
}

impl<M: 'static> LocalLease<M> {
    /// As [`Lease::on`], on any stream.
    ///
    /// # Errors
    ///
    /// As [`Lease::on`], without [`Error::PerThreadStream`].
    pub fn on<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<View<'_, T>, Error> {
        self.lease.view(0..self.lease.len(), stream)
    }

    /// As [`Lease::on_range`], on any stream.
    ///
    /// # Errors
    ///
    /// As [`Lease::on_range`], without [`Error::PerThreadStream`].
    pub fn on_range<T: Element>(
        &self,
        bytes: Range<usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<View<'_, T>, Error> {
        self.lease.view(bytes, stream)
    }

    /// As [`Lease::into_owned`], on any stream.
    ///
    /// The slice can be sent to another thread; this lease could not. On the per-thread default stream that is no
    /// use: cudarc frees the slice in the stream that the handle means on the thread that drops it, and nothing
    /// orders that behind this thread's work. Drop it here, or wait for this thread's stream first.
    ///
    /// # Errors
    ///
    /// As [`Lease::into_owned`], without [`Error::PerThreadStream`].
    pub fn into_owned<T: Element>(self, stream: &Arc<CudaStream>) -> Result<CudaSlice<T>, Error> {
        self.lease.copy(stream)
    }

    /// As [`Lease::on_raw`], on any stream.
    ///
    /// # Safety
    ///
    /// As [`Lease::on_raw`].
    ///
    /// # Errors
    ///
    /// [`Error::Driver`].
    pub unsafe fn on_raw(&self, stream: CUstream) -> Result<CUdeviceptr, Error> {
        // SAFETY: as the caller says, and the lease stays on this thread.
        unsafe { self.lease.address_on(stream) }
    }

    /// As [`Lease::meta_mut`].
    #[must_use]
    pub fn meta_mut(&mut self) -> &mut M {
        self.lease.meta_mut()
    }
}

// Not `DerefMut`: by that the lease could be swapped out, and sent to another thread after all.
impl<M: 'static> Deref for LocalLease<M> {
    type Target = Lease<M>;

    fn deref(&self) -> &Lease<M> {
        &self.lease
    }
}

impl<M: 'static> fmt::Debug for DeviceBatches<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBatches")
            .field("depth", &self.ring.depth())
            .field("overlap", &self.overlap())
            .field("error", &self.fate.get())
            .finish_non_exhaustive()
    }
}

impl<M: 'static> fmt::Debug for Lease<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("seq", &self.seq()).field("bytes", &self.len()).finish_non_exhaustive()
    }
}

impl<M: 'static> fmt::Debug for LocalLease<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalLease").field(&self.lease).finish()
    }
}
