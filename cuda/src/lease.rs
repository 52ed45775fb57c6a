//! A batch in device memory, leased from its slot.

use std::fmt;
use std::ops::Range;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::AnyBitPattern;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr};
use twinbuf_core::{KeptSlot, Park};

use crate::cu::{self, BesideCaptures, Current};
use crate::driver::check;
use crate::error::Error;
use crate::slot::DeviceBuf;
use crate::time::{Clock, CopyTime};

mod view;

pub use view::View;

/// An element type for views of a batch in device memory: every bit pattern is a valid value.
pub trait Element: DeviceRepr + AnyBitPattern {}

impl<T: DeviceRepr + AnyBitPattern> Element for T {}

/// `CU_STREAM_PER_THREAD` of cuda.h.
const PER_THREAD: usize = 2;

/// One batch in device memory, in its slot.
///
/// Dropping it records an event on every stream that used the batch, and the next copy into the slot waits for those
/// events. Drop it as soon as the work that reads the batch is *enqueued*. Dropping blocks only if an event cannot be
/// recorded: it then waits for that stream. Leases may be dropped in any order and on any thread. If a lease is leaked
/// (`mem::forget`), its slot is never refilled.
///
/// **If one of those streams is being captured** into a graph when the lease is dropped, the slot stays held, because
/// an event recorded now would belong to the graph. The first receive after the end of the capture releases it. Until
/// then, a receive that reaches this slot returns [`Error::SlotHeld`]. If the uploader and its leases are dropped
/// before that, the slot's memory is leaked.
///
/// Every call, and the drop, restores the calling thread's current context.
///
/// `M` is the value committed with the batch. It is dropped with the lease.
pub struct Lease<M: 'static> {
    /// Taken by `drop` only.
    slot: Option<Slot<M>>,
    shared: Arc<Shared<M>>,
}

type Slot<M> = KeptSlot<'static, DeviceBuf<M>, Park>;

/// State that an uploader's leases and its receiving side share.
pub(crate) struct Shared<M: 'static> {
    pub(crate) ctx: Arc<CudaContext>,
    /// `None` if copies are not timed.
    pub(crate) clock: Option<Arc<Clock>>,
    /// The legacy default stream, for [`View`]s: see `DeviceSlice::stream` of [`View`].
    elsewhere: Arc<CudaStream>,
    /// Slots of leases that were dropped while a stream that used them was being captured.
    captured: Mutex<Vec<Slot<M>>>,
}

impl<M: 'static> Shared<M> {
    pub(crate) fn new(ctx: Arc<CudaContext>, clock: Option<Arc<Clock>>) -> Self {
        let legacy = ptr::without_provenance_mut(view::LEGACY);
        // SAFETY: this stream exists in every context as long as the context does.
        let elsewhere = unsafe { ctx.wrap_borrowed_stream(legacy) };
        Self { ctx, clock, elsewhere, captured: Mutex::default() }
    }

    fn captured(&self) -> MutexGuard<'_, Vec<Slot<M>>> {
        // No locked section runs the caller's code.
        self.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the slots held by captures that have ended. Returns whether the slot of batch `seq` is still held.
    pub(crate) fn release_captured(&self, seq: Option<u64>) -> bool {
        let mut captured = self.captured();
        captured.retain(|slot| !slot.end_uses());
        captured.iter().any(|slot| Some(slot.seq()) == seq)
    }
}

impl<M: 'static> Lease<M> {
    pub(crate) fn new(slot: Slot<M>, shared: Arc<Shared<M>>) -> Self {
        Self { slot: Some(slot), shared }
    }

    fn slot(&self) -> &DeviceBuf<M> {
        let Some(slot) = &self.slot else { unreachable!("taken by `drop` only") };
        slot
    }

    /// Views the batch as elements of type `T`, for use on `stream`.
    ///
    /// Work enqueued on `stream` after this call runs after the copy. The slot's next copy runs after all work that was
    /// enqueued on `stream` before the lease was dropped. Call this once for each stream that uses the batch; repeated
    /// calls for one stream cost nothing. cudarc's safe copies of the [`View`] on another stream are ordered too, but
    /// block the host.
    ///
    /// To use a batch in a graph, copy it into the graph's own memory before the launch: captured work would find
    /// another batch in the slot.
    ///
    /// # Errors
    ///
    /// [`Error::OtherContext`]; [`Error::PerThreadStream`]; [`Error::Option`] if the batch is not a whole number of
    /// `T`; [`Error::Captured`] while `stream` is being captured or, if it is the default stream, while any blocking
    /// stream is: the capture stays valid. [`Error::Driver`] if the stream could not be made to wait; do not use the
    /// batch on that stream then.
    pub fn on<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<View<'_, T>, Error> {
        self.on_range(0..self.len(), stream)
    }

    /// Views a range of the batch's bytes as elements of type `T`; otherwise same as [`on`](Lease::on). For batches of
    /// several fields.
    ///
    /// # Errors
    ///
    /// Same as [`on`](Lease::on); also [`Error::Option`] if the range is out of bounds or not aligned for `T`.
    pub fn on_range<T: Element>(
        &self,
        bytes: Range<usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<View<'_, T>, Error> {
        self.refuse_per_thread(stream.cu_stream())?;
        self.view(bytes, stream)
    }

    /// Copies the batch into new memory, on the device and on `stream`, for frameworks that own their memory. The host
    /// does not wait. The slot can be refilled once that copy is done.
    ///
    /// The per-thread default stream is accepted, because its use ends within this call. But the returned slice is
    /// bound to it, like every slice that cudarc allocates on that stream: cudarc frees it on the per-thread stream of
    /// the thread that drops it. Drop it on this thread, or synchronize this thread's stream first.
    ///
    /// The memory comes from cudarc (`cuMemAllocAsync` if the device supports it).
    ///
    /// # Errors
    ///
    /// Same as [`on`](Lease::on), without [`Error::PerThreadStream`]; also [`Error::Driver`] if there is not enough
    /// memory, [`Error::Option`] if the batch is empty.
    pub fn into_owned<T: Element>(self, stream: &Arc<CudaStream>) -> Result<CudaSlice<T>, Error> {
        // `self` is dropped here, on the thread where the stream's handle was used.
        let view = self.view::<T>(0..self.len(), stream)?;
        if view.is_empty() {
            let (wanted, found) = ("a batch with bytes".to_string(), "an empty one".to_string());
            return Err(Error::Option { option: "self", wanted, found });
        }
        let _current = Current::enter(&self.shared.ctx)?;
        // Without memory pools the allocation belongs to no stream and could break a capture.
        let _beside = BesideCaptures::enter();
        // SAFETY: the copy below fills it before it is returned.
        let mut owned = check("cuMemAllocAsync", unsafe { stream.alloc::<T>(view.len()) })?;
        check("cuMemcpyDtoDAsync", stream.memcpy_dtod(&view, &mut owned))?;
        Ok(owned)
    }

    /// Returns the batch's device address, for code that uses it on `stream` without cudarc; otherwise same as
    /// [`on`](Lease::on). A null `stream` is the *legacy* default stream, whatever default the other code was compiled
    /// with.
    ///
    /// # Safety
    ///
    /// The stream belongs to the uploader's context and exists until the lease has been dropped; if it is being captured
    /// at that time, until the uploader and all its leases have been dropped. The memory is used on this stream only,
    /// within [`len`](Lease::len) bytes, and only by work that is enqueued before the lease is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::PerThreadStream`], [`Error::Captured`], [`Error::Driver`].
    pub unsafe fn on_raw(&self, stream: CUstream) -> Result<CUdeviceptr, Error> {
        self.refuse_per_thread(stream)?;
        let _current = Current::enter(&self.shared.ctx)?;
        // SAFETY: the caller guarantees the stream; its handle names the same stream on every thread. Its context has
        // just been entered.
        unsafe { self.slot().use_on(stream, None) }?;
        Ok(self.slot().address())
    }

    /// Returns the batch's length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slot().len
    }

    /// Whether the batch has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the batch's number, from 0, in commit order.
    #[must_use]
    pub fn seq(&self) -> u64 {
        let Some(slot) = &self.slot else { unreachable!("taken by `drop` only") };
        slot.seq()
    }

    /// Returns the value committed with the batch.
    #[must_use]
    pub fn meta(&self) -> &M {
        let Some(meta) = &self.slot().meta else { unreachable!("set by the commit, taken by `drop` only") };
        meta
    }

    /// Returns a mutable reference to the value committed with the batch, to modify it or move it out.
    #[must_use]
    pub fn meta_mut(&mut self) -> &mut M {
        let meta = self.slot.as_mut().and_then(|slot| slot.meta.as_mut());
        let Some(meta) = meta else { unreachable!("set by the commit, taken by `drop` only") };
        meta
    }

    /// Whether the copy is done. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], also if the copy failed.
    pub fn is_copied(&self) -> Result<bool, Error> {
        if self.is_empty() {
            return Ok(true);
        }
        let _current = Current::enter(&self.shared.ctx)?;
        let _beside = BesideCaptures::enter();
        // SAFETY: the slot's event.
        unsafe { cu::is_complete(self.slot().copied.raw()) }
    }

    /// Returns when the batch was copied. `None` while the copy runs, if the batch is empty, or if
    /// [`times`](crate::Uploader::times) is off. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], also if the copy failed.
    pub fn copied(&self) -> Result<Option<CopyTime>, Error> {
        let (Some(clock), Some(start), false) = (&self.shared.clock, &self.slot().start, self.is_empty())
        else {
            return Ok(None);
        };
        let _current = Current::enter(&self.shared.ctx)?;
        // SAFETY: the slot's events. They are for timing and were recorded before the batch was handed over.
        unsafe { clock.time(start.raw(), self.slot().copied.raw(), self.slot().issued) }
    }

    /// Blocks until the copy is done, then returns the same as [`copied`](Lease::copied). Streams do not need this
    /// call. It is for a host that runs one stage after the other.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`], also if the copy failed.
    pub fn wait_copied(&self) -> Result<Option<CopyTime>, Error> {
        if !self.is_copied()? {
            let _current = Current::enter(&self.shared.ctx)?;
            let _beside = BesideCaptures::enter();
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
        if *stream.context() != self.shared.ctx {
            return Err(Error::OtherContext);
        }
        if bytes.start > bytes.end || bytes.end > self.len() {
            let wanted = format!("a range of the batch's {} bytes", self.len());
            return Err(Error::Option { option: "bytes", wanted, found: format!("{bytes:?}") });
        }
        let start = self.slot().address() + bytes.start as u64;
        let whole = bytes.len().checked_rem(size_of::<T>()) == Some(0);
        if !whole || !start.is_multiple_of(align_of::<T>() as u64) {
            return Err(Error::Option {
                option: "T",
                wanted: if whole {
                    format!("a type that byte {} of the batch is aligned for", bytes.start)
                } else {
                    format!("a type whose size divides the batch's {} bytes", bytes.len())
                },
                found: format!("{} of {} bytes", std::any::type_name::<T>(), size_of::<T>()),
            });
        }
        let _current = Current::enter(&self.shared.ctx)?;
        // SAFETY: the `Arc` keeps the stream alive; it belongs to our context, which has just been entered.
        unsafe { self.slot().use_on(stream.cu_stream(), Some(stream.clone())) }?;
        Ok(View::new(self, start, bytes.len() / size_of::<T>(), stream.clone()))
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
            self.shared.captured().push(slot);
        }
        // Last, because it is the caller's code.
        drop(meta);
    }
}

impl<M: 'static> fmt::Debug for Lease<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("seq", &self.seq()).field("bytes", &self.len()).finish_non_exhaustive()
    }
}
