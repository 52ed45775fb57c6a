//! The two kinds of slots: page-locked host memory, and device memory with its events.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::{CUdeviceptr, CUevent_flags, CUstream};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};

use crate::cu::{self, Event, Pinned, check};
use crate::edge;
use crate::error::Error;

/// A host slot.
pub(crate) struct HostBuf<M> {
    pub(crate) bytes: Pinned,
    /// How much of it the batch takes.
    pub(crate) len: usize,
    /// What travels with the batch.
    pub(crate) meta: Option<M>,
}

/// A device slot.
pub(crate) struct DeviceBuf<M> {
    bytes: CudaSlice<u8>,
    /// Where `bytes` are.
    pub(crate) address: CUdeviceptr,
    /// How much of them the batch takes.
    pub(crate) len: usize,
    pub(crate) meta: Option<M>,
    /// Just before the copy into this slot was issued.
    pub(crate) issued: Instant,
    /// Recorded on the copy stream before that copy.
    pub(crate) start: Event,
    /// Recorded behind it. Blocks: the copy thread waits for it.
    pub(crate) copied: Event,
    /// Changed by the lease through `&`, because several views of a batch may exist.
    uses: RefCell<Uses>,
}

/// Which streams use a device slot, and the events that end that.
#[derive(Default)]
struct Uses {
    /// The streams that the present lease was used on.
    streams: Vec<UsedOn>,
    /// One event for each stream at least, kept for the next batch.
    consumed: Vec<Event>,
    /// How many of those the next copy has to wait for.
    recorded: usize,
    /// Set if a use could not be recorded and could not be waited for either: the slot must not be filled again.
    lost: Option<Error>,
}

struct UsedOn {
    stream: CUstream,
    /// Keeps it alive until its use is recorded; `None` where the caller has promised that.
    _owner: Option<Arc<CudaStream>>,
}

// SAFETY: a handle of the driver, which is thread-safe. A handle that means another stream on another thread is
// accepted only by a lease that does not leave its thread.
unsafe impl Send for UsedOn {}

impl<M> HostBuf<M> {
    pub(crate) fn new(ctx: &Arc<CudaContext>, len: usize, flags: u32) -> Result<Self, Error> {
        Ok(Self { bytes: Pinned::new(ctx, len, flags)?, len: 0, meta: None })
    }
}

impl<M> DeviceBuf<M> {
    /// A slot of `len` bytes, at least one. `stream` is the copy stream, and its context the calling thread's.
    pub(crate) fn new(stream: &Arc<CudaStream>, len: usize) -> Result<Self, Error> {
        let ctx = stream.context();
        let start = Event::new(ctx, CUevent_flags::CU_EVENT_DEFAULT)?;
        let copied = Event::new(ctx, CUevent_flags::CU_EVENT_BLOCKING_SYNC)?;
        // SAFETY: nobody reads it before it is filled: a view is as long as the batch, and waits for the copy.
        let bytes = check("cuMemAllocAsync", unsafe { stream.alloc::<u8>(len) })?;
        let (address, record) = bytes.device_ptr(stream);
        // Would record a read that does not take place.
        std::mem::forget(record);
        check("cuStreamWaitEvent", ctx.check_err())?;
        let issued = Instant::now();
        Ok(Self { bytes, address, len: 0, meta: None, issued, start, copied, uses: RefCell::default() })
    }

    pub(crate) fn bytes(&self) -> &CudaSlice<u8> {
        &self.bytes
    }

    fn copy_stream(&self) -> CUstream {
        self.bytes.stream().cu_stream()
    }

    /// Lets `stream` use the batch: it waits for the copy, and is remembered for [`end_uses`](Self::end_uses).
    ///
    /// # Safety
    ///
    /// The stream exists until `end_uses`, or `owner` is the one that keeps it, and it belongs to this slot's
    /// context, which is the calling thread's. `end_uses` is called on a thread where the handle means the same.
    pub(crate) unsafe fn use_on(
        &self,
        stream: CUstream,
        owner: Option<Arc<CudaStream>>,
    ) -> Result<(), Error> {
        let uses = &mut *self.uses.borrow_mut();
        if uses.streams.iter().any(|used| used.stream == stream) {
            return Ok(());
        }
        // Made here, where the caller hears of an error, not when the lease is dropped.
        if uses.consumed.len() == uses.streams.len() {
            uses.consumed.push(Event::new(self.bytes.context(), CUevent_flags::CU_EVENT_DISABLE_TIMING)?);
        }
        if self.len > 0 {
            // SAFETY: the caller says so of the stream; the event is ours.
            unsafe { edge::use_after_copy(stream, self.copied.raw()) }?;
        }
        uses.streams.push(UsedOn { stream, _owner: owner });
        Ok(())
    }

    /// The lease is dropped: records behind what each stream was given to do with the batch.
    pub(crate) fn end_uses(&self) {
        let uses = &mut *self.uses.borrow_mut();
        uses.recorded = uses.streams.len();
        if uses.recorded == 0 {
            return;
        }
        let bound = cu::bind(self.bytes.context());
        for (used, consumed) in uses.streams.drain(..).zip(&uses.consumed) {
            let ended = bound.clone().and_then(|()| {
                // SAFETY: `use_on`'s caller has said that the stream exists until now.
                unsafe { cu::record(consumed.raw(), used.stream) }.or_else(|error| {
                    // Without the event only the stream's end says that the use is over. The next copy then waits
                    // for an older record of the event, which is complete.
                    // SAFETY: as above.
                    unsafe { cu::synchronize(used.stream) }.map_err(|_| error)
                })
            });
            if let Err(error) = ended {
                uses.lost = Some(error);
            }
        }
    }

    /// Makes the copy stream wait for every recorded use. After that the slot may be filled in that stream.
    pub(crate) fn copy_after_uses(&mut self) -> Result<(), Error> {
        let copy_stream = self.copy_stream();
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
    /// The memory is given back in the copy stream (by `CudaSlice`), so behind the copies; here it is put behind
    /// the uses too.
    fn drop(&mut self) {
        cu::bind_to_free(self.bytes.context());
        let uses = self.uses.get_mut();
        let leaked = !uses.streams.is_empty();
        if leaked || uses.lost.is_some() || self.copy_after_uses().is_err() {
            // A lease was leaked, or an error has come between. If this fails too, so does everything else in
            // this context, and nothing runs in it any more.
            let _ = cu::synchronize_context();
        } else if !self.bytes.context().has_async_alloc() {
            // Then the memory is freed by the host, and cudarc's own wait for that is left out if an earlier drop
            // anywhere in the program has failed.
            // SAFETY: the stream lives as long as the slice.
            let _ = unsafe { cu::synchronize(self.copy_stream()) };
        }
    }
}
