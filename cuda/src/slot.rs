//! The slots of an uploader. A host slot: memory and what is committed with it. A device slot: memory, its events, and
//! the streams that use it.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUdeviceptr, CUevent_flags, CUstream};

use crate::cu::{self, BesideCaptures, Current, Event, Stream};
use crate::edge;
use crate::error::Error;
use crate::memory::{DeviceBytes, HostBytes};

/// A host slot.
pub(crate) struct HostBuf<M> {
    pub(crate) memory: HostBytes,
    /// Bytes of the batch that was committed; the value that was committed with it.
    pub(crate) len: usize,
    pub(crate) meta: Option<M>,
}

impl<M> HostBuf<M> {
    /// Sets the length and the value of the batch to commit. Fails if the batch does not fit.
    pub(crate) fn put(&mut self, len: usize, meta: M) -> Result<(), Error> {
        if len > self.memory.len() {
            let wanted = format!("at most the slot's {} bytes", self.memory.len());
            return Err(Error::Option { option: "len", wanted, found: len.to_string() });
        }
        (self.len, self.meta) = (len, Some(meta));
        Ok(())
    }
}

/// A device slot.
pub(crate) struct DeviceBuf<M> {
    bytes: DeviceBytes,
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
    uses: RefCell<Uses>,
}

/// The streams that use a device slot, and the events that mark the end of their use.
#[derive(Default)]
struct Uses {
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

impl<M> DeviceBuf<M> {
    /// Makes a slot of `bytes`. `stream` is the copy stream; its context is current.
    pub(crate) fn new(stream: &Arc<Stream>, bytes: DeviceBytes, timed: bool) -> Result<Self, Error> {
        let ctx = stream.context();
        let start = timed.then(|| Event::new(ctx, CUevent_flags::CU_EVENT_DEFAULT as u32)).transpose()?;
        let mut flags = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        if !timed {
            flags |= CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        }
        let copied = Event::new(ctx, flags)?;
        let (issued, stream, uses) = (Instant::now(), stream.clone(), RefCell::default());
        Ok(Self { bytes, stream, len: 0, meta: None, issued, start, copied, uses })
    }

    /// The slot's device address.
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.bytes.start()
    }

    /// Makes `stream` wait for the copy, and remembers it for [`end_uses`](Self::end_uses).
    ///
    /// # Safety
    ///
    /// The stream exists until `end_uses` has returned `true`, or `owner` keeps it alive. It belongs to this slot's
    /// context, which is current. `end_uses` is called on a thread where the handle names the same stream.
    pub(crate) unsafe fn use_on(
        &self,
        stream: CUstream,
        owner: Option<Arc<CudaStream>>,
    ) -> Result<(), Error> {
        // Also check a stream that uses the batch already: its capture may have begun since.
        // SAFETY: the caller guarantees that the stream exists.
        if unsafe { cu::is_captured(stream) }? {
            return Err(Error::Captured);
        }
        let uses = &mut *self.uses.borrow_mut();
        if uses.streams.iter().any(|used| used.stream == stream) {
            return Ok(());
        }
        // Create the event now, not when the lease is dropped: a drop cannot return an error.
        if uses.consumed.len() == uses.streams.len() {
            uses.consumed
                .push(Event::new(self.stream.context(), CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)?);
        }
        if self.len > 0 {
            // SAFETY: the caller guarantees that the stream exists; the event is this slot's.
            unsafe { edge::use_after_copy(stream, self.copied.raw()) }?;
        }
        uses.streams.push(UsedOn { stream, _owner: owner });
        Ok(())
    }

    /// Whether `use_on` was called for this stream.
    pub(crate) fn is_used_on(&self, stream: CUstream) -> bool {
        self.uses.borrow().streams.iter().any(|used| used.stream == stream)
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
            if let Err(error) = ended {
                uses.lost = Some(error);
            }
        }
        true
    }

    /// Makes the copy stream wait for every recorded use. Copies enqueued after this may refill the slot.
    pub(crate) fn copy_after_uses(&mut self) -> Result<(), Error> {
        let copy_stream = self.stream.raw();
        let uses = self.uses.get_mut();
        if let Some(error) = &uses.lost {
            return Err(error.clone());
        }
        for consumed in &uses.consumed[..uses.recorded] {
            // SAFETY: both are ours.
            unsafe { edge::copy_after_use(copy_stream, consumed.raw()) }?;
        }
        uses.recorded = 0;
        Ok(())
    }
}

impl<M> Drop for DeviceBuf<M> {
    /// Orders the free after the uses. `DeviceBytes` frees the memory in the copy stream, and therefore after the
    /// copies too.
    fn drop(&mut self) {
        let _current = Current::enter_to_free(self.stream.context());
        // Leak the memory if nothing can wait for its uses: a stream that used it is still being captured, or a use
        // could be neither recorded nor waited for.
        if !self.end_uses() || cu::twice(|| self.copy_after_uses()).is_err() {
            self.bytes.leak();
        }
    }
}
