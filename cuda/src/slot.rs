//! The slots of an uploader. A host slot: memory and what is committed with it. A device slot: memory, its events, and
//! the streams that use it.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{CudaStream, result};

use crate::cu::{self, BesideCaptures, Current, Event, Stream};
use crate::driver::check;
use crate::edge;
use crate::error::{Error, wrong};
use crate::lent::Host;

/// A host slot.
pub(crate) struct HostBuf<M> {
    pub(crate) memory: Host,
    /// Bytes of the batch that was committed; the value that was committed with it.
    pub(crate) len: usize,
    pub(crate) meta: Option<M>,
}

// SAFETY: plain memory, accessed only by the owner of the slot (`HostSlot`) or by the guards of its copies (`Copies`). A
// shared reference does not reach the lender, which may not be `Sync`.
unsafe impl<M: Sync> Sync for HostBuf<M> {}

impl<M> HostBuf<M> {
    /// Sets the length and the value of the batch to commit. Fails if the batch does not fit.
    pub(crate) fn put(&mut self, len: usize, meta: M) -> Result<(), Error> {
        if len > self.memory.len {
            let wanted = format!("at most the slot's {} bytes", self.memory.len);
            return Err(wrong("len", wanted, &len));
        }
        (self.len, self.meta) = (len, Some(meta));
        Ok(())
    }
}

/// A device slot. Its memory is not cudarc's `CudaSlice`: that creates two events for cudarc's tracking.
pub(crate) struct DeviceBuf<M> {
    /// The address of its memory.
    pub(crate) address: CUdeviceptr,
    /// The copy stream.
    stream: Arc<Stream>,
    /// Bytes of the batch in this slot.
    pub(crate) len: usize,
    pub(crate) meta: Option<M>,
    /// The time just before the batch's copy was issued.
    pub(crate) issued: Instant,
    /// Recorded on the copy stream before that copy. `None` if copies are not timed.
    pub(crate) start: Option<Event>,
    /// Recorded after the batch's copy. A timing event only if `start` is one. The copy thread blocks on it.
    pub(crate) copied: Event,
    /// Modified through `&`, because several views of a batch may exist.
    pub(crate) uses: RefCell<Uses>,
}

/// The streams that use a device slot, and the events that mark the end of their use.
#[derive(Default)]
pub(crate) struct Uses {
    /// The streams that the current lease was used on.
    streams: Vec<UsedOn>,
    /// At least one event for each of those streams, reused by later batches.
    consumed: Vec<Event>,
    /// How many of the events the next copy must wait for.
    recorded: usize,
    /// Set if a use could neither be recorded nor waited for: the slot must not be refilled.
    lost: Option<Error>,
}

struct UsedOn {
    stream: CUstream,
    /// Keeps the stream alive until its use is recorded. `None` if the caller guarantees that.
    _owner: Option<Arc<CudaStream>>,
}

// SAFETY: `stream` is a handle of the driver, which is thread-safe. Only the handle of the per-thread default stream
// names a different stream on every thread. Only `Lease::into_owned` accepts that one, and ends the use before it
// returns.
unsafe impl Send for UsedOn {}

impl Uses {
    /// Whether the current lease is used on this stream.
    pub(crate) fn has(&self, stream: CUstream) -> bool {
        self.streams.iter().any(|used| used.stream == stream)
    }
}

impl<M> DeviceBuf<M> {
    /// Allocates a slot of `bytes`, at least one, uninitialized. `stream` is the copy stream; its context is current.
    pub(crate) fn new(stream: &Arc<Stream>, bytes: usize, timed: bool) -> Result<Self, Error> {
        let ctx = stream.context();
        let start = timed.then(|| Event::new(ctx, true, false)).transpose()?;
        let copied = Event::new(ctx, timed, true)?;
        let address = if ctx.has_async_alloc() {
            // SAFETY: the stream exists; the memory is filled before it is read.
            check("cuMemAllocAsync", unsafe { result::malloc_async(stream.raw(), bytes) })
        } else {
            // SAFETY: as above.
            check("cuMemAlloc", unsafe { result::malloc_sync(bytes) })
        }?;
        let (issued, stream, uses) = (Instant::now(), stream.clone(), RefCell::default());
        Ok(Self { address, stream, len: 0, meta: None, issued, start, copied, uses })
    }

    /// Makes `stream` wait for the copy, and remembers it for [`end_uses`](Self::end_uses).
    ///
    /// # Safety
    ///
    /// The stream exists until `end_uses` has returned `true`, or `owner` keeps it alive. It belongs to this slot's
    /// context. `end_uses` is called on a thread where the handle names the same stream.
    pub(crate) unsafe fn use_on(
        &self,
        stream: CUstream,
        owner: Option<Arc<CudaStream>>,
    ) -> Result<(), Error> {
        let _current = Current::enter(self.stream.context())?;
        // Also check a stream that uses the batch already: its capture may have begun since.
        // SAFETY: the caller guarantees that the stream exists.
        if unsafe { cu::is_captured(stream) }? {
            return Err(Error::Captured);
        }
        let uses = &mut *self.uses.borrow_mut();
        if uses.has(stream) {
            return Ok(());
        }
        // Create the event now, not when the lease is dropped: a drop cannot return an error.
        if uses.consumed.len() == uses.streams.len() {
            uses.consumed.push(Event::new(self.stream.context(), false, false)?);
        }
        if self.len > 0 {
            // SAFETY: the caller guarantees that the stream exists; the event is this slot's.
            unsafe { edge::use_after_copy(stream, self.copied.raw()) }?;
        }
        uses.streams.push(UsedOn { stream, _owner: owner });
        Ok(())
    }

    /// Ends the lease: records an event on each stream that used the batch. While one of those streams is being
    /// captured, does nothing and returns `false`: the event would become part of the graph, and the copy stream with
    /// it.
    pub(crate) fn end_uses(&self) -> bool {
        let uses = &mut *self.uses.borrow_mut();
        if uses.streams.is_empty() {
            return true;
        }
        let _current = Current::enter_to_free(self.stream.context());
        let is_captured = |used: &UsedOn| {
            // SAFETY: the caller of `use_on` guarantees that the stream still exists.
            cu::twice(|| unsafe { cu::is_captured(used.stream) }) == Ok(true)
        };
        if uses.streams.iter().any(is_captured) {
            return false;
        }
        uses.recorded = uses.streams.len();
        for (used, consumed) in uses.streams.drain(..).zip(&uses.consumed) {
            // SAFETY: the caller of `use_on` guarantees that the stream still exists.
            let ended = unsafe { cu::record(consumed.raw(), used.stream) }.or_else(|error| {
                // If the event cannot be recorded, wait for the stream itself. The next copy then waits for an older
                // record of the event, which is complete.
                let _beside = BesideCaptures::enter();
                // SAFETY: as above.
                unsafe { cu::synchronize(used.stream) }.map_err(|_| error)
            });
            ended.unwrap_or_else(|error| uses.lost = Some(error));
        }
        true
    }

    /// Makes the copy stream wait for every recorded use. Copies enqueued after this may refill the slot.
    pub(crate) fn copy_after_uses(&mut self) -> Result<(), Error> {
        let copy_stream = self.stream.raw();
        let uses = self.uses.get_mut();
        uses.lost.clone().map_or(Ok(()), Err)?;
        for consumed in &uses.consumed[..uses.recorded] {
            // SAFETY: both are ours.
            unsafe { edge::copy_after_use(copy_stream, consumed.raw()) }?;
        }
        uses.recorded = 0;
        Ok(())
    }
}

impl<M> Drop for DeviceBuf<M> {
    /// Frees the memory after the copies into it and after its uses.
    fn drop(&mut self) {
        let _current = Current::enter_to_free(self.stream.context());
        // Leak the memory if nothing can wait for its uses: a stream that used it is still being captured, or a use
        // could be neither recorded nor waited for.
        if !self.end_uses() || cu::twice(|| self.copy_after_uses()).is_err() {
            return;
        }
        if self.stream.context().has_async_alloc() {
            // SAFETY: allocated by `new` and freed once, in the copy stream, which waits for the uses.
            let _ = unsafe { result::free_async(self.address, self.stream.raw()) };
        } else {
            let _beside = BesideCaptures::enter();
            // This free is in no stream's order, so wait until the copy stream's work is over. If the wait fails, the
            // context is lost and no work runs in it.
            let _ = self.stream.settle();
            // SAFETY: allocated by `new` and freed once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
