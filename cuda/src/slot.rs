//! The two kinds of slots: page-locked host memory, and device memory with its events.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::{CUdeviceptr, CUevent_flags, CUstream};
use cudarc::driver::{CudaContext, CudaStream};

use crate::cu::{self, BesideCaptures, Current, DeviceBytes, Event, HostBytes, Stream};
use crate::edge;
use crate::error::Error;

/// Arrays that every slot consists of, one behind the other.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Where each begins and ends.
    arrays: Vec<Range<usize>>,
    /// All of them.
    pub(crate) bytes: usize,
    /// How much of a slot is handed over at once while it is still being filled.
    pub(crate) chunk: usize,
}

/// Arrays begin at multiples of this, as device allocations do.
const ALIGNMENT: usize = 256;

impl Layout {
    /// `None` if they are more than can be addressed.
    pub(crate) fn new(arrays: &[usize], chunk: Option<usize>) -> Option<Self> {
        let mut bytes = 0_usize;
        let mut ranges = Vec::with_capacity(arrays.len());
        for &len in arrays {
            let start = bytes.checked_next_multiple_of(ALIGNMENT)?;
            bytes = start.checked_add(len)?;
            ranges.push(start..bytes);
        }
        Some(Self { arrays: ranges, bytes, chunk: chunk.unwrap_or(bytes).min(bytes) })
    }

    /// Of a slot.
    pub(crate) fn chunks(&self) -> usize {
        self.bytes.div_ceil(self.chunk)
    }

    pub(crate) fn arrays(&self) -> &[Range<usize>] {
        &self.arrays
    }
}

/// A host slot, or the turn of one of its chunks.
pub(crate) struct HostBuf<M> {
    pub(crate) memory: Arc<HostBytes>,
    /// What of the slot is to be copied, in order.
    pub(crate) pieces: Vec<Range<usize>>,
    /// How much of each array the batch takes. With the last chunk, as what follows.
    pub(crate) lens: Vec<usize>,
    /// Whether this is the batch's last chunk.
    pub(crate) last: bool,
    /// What travels with the batch.
    pub(crate) meta: Option<M>,
}

/// A device slot.
pub(crate) struct DeviceBuf<M> {
    bytes: DeviceBytes,
    /// The copy stream.
    stream: Arc<Stream>,
    /// How many of the bytes the batch takes.
    pub(crate) len: usize,
    /// How much of each array.
    pub(crate) lens: Vec<usize>,
    pub(crate) meta: Option<M>,
    /// Just before the copy into this slot was issued.
    pub(crate) issued: Instant,
    /// Recorded on the copy stream before that copy, if times are asked for.
    pub(crate) start: Option<Event>,
    /// Recorded behind it; for timing only with `start`. Blocks: the copy thread waits for it.
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

// SAFETY: a handle of the driver, which is thread-safe. The one handle that means another stream on another thread is
// accepted only by a `LocalLease`, which does not leave its thread, and is forgotten when that is dropped.
unsafe impl Send for UsedOn {}

impl<M> HostBuf<M> {
    /// The turns of one slot's chunks.
    pub(crate) fn chunks(memory: HostBytes, layout: &Layout) -> impl Iterator<Item = Self> + use<M> {
        let (memory, arrays) = (Arc::new(memory), layout.arrays.len());
        (0..layout.chunks()).map(move |_| Self {
            memory: memory.clone(),
            pieces: Vec::with_capacity(arrays),
            lens: Vec::with_capacity(arrays),
            last: false,
            meta: None,
        })
    }

    /// To be copied: this part of the slot; more of the batch follows.
    pub(crate) fn set_part(&mut self, part: Range<usize>) {
        self.pieces.clear();
        self.pieces.extend(Some(part).filter(|part| !part.is_empty()));
        self.last = false;
    }

    /// To be copied: what of these arrays has not been yet. Nothing of the batch follows.
    pub(crate) fn set_rest(&mut self, layout: &Layout, lens: &[usize], flushed: usize, meta: M) {
        self.pieces.clear();
        let rest =
            layout.arrays.iter().zip(lens).map(|(array, len)| array.start.max(flushed)..array.start + len);
        self.pieces.extend(rest.filter(|piece| !piece.is_empty()));
        self.lens.clear();
        self.lens.extend_from_slice(lens);
        self.last = true;
        self.meta = Some(meta);
    }
}

impl<M> DeviceBuf<M> {
    /// A slot of these bytes. `stream` is the copy stream, and its context the calling thread's.
    pub(crate) fn new(stream: &Arc<Stream>, bytes: DeviceBytes, timed: bool) -> Result<Self, Error> {
        let ctx = stream.context();
        let start = timed.then(|| Event::new(ctx, CUevent_flags::CU_EVENT_DEFAULT as u32)).transpose()?;
        let mut flags = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        if !timed {
            flags |= CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        }
        let copied = Event::new(ctx, flags)?;
        let (issued, stream, uses) = (Instant::now(), stream.clone(), RefCell::default());
        Ok(Self { bytes, stream, len: 0, lens: Vec::new(), meta: None, issued, start, copied, uses })
    }

    /// It now holds a batch of these lengths.
    pub(crate) fn set_lens(&mut self, layout: &Layout, lens: &[usize]) {
        self.lens.clear();
        self.lens.extend_from_slice(lens);
        let ends =
            layout.arrays.iter().zip(lens).filter(|(_, len)| **len > 0).map(|(array, len)| array.start + len);
        self.len = ends.max().unwrap_or(0);
    }

    /// Where its bytes are.
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.bytes.start()
    }

    fn context(&self) -> &Arc<CudaContext> {
        self.stream.context()
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
            uses.consumed.push(Event::new(self.context(), CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)?);
        }
        if self.len > 0 {
            // SAFETY: the caller says so of the stream; the event is ours.
            unsafe { edge::use_after_copy(stream, self.copied.raw()) }?;
        }
        uses.streams.push(UsedOn { stream, _owner: owner });
        Ok(())
    }

    /// Makes a stream wait for the copy that is not remembered: whoever calls this waits for its use.
    ///
    /// # Safety
    ///
    /// The stream exists, belongs to this slot's context, which is the calling thread's.
    pub(crate) unsafe fn use_meanwhile(&self, stream: CUstream) -> Result<(), Error> {
        if self.len > 0 {
            // SAFETY: the caller says so of the stream; the event is ours.
            unsafe { edge::use_after_copy(stream, self.copied.raw()) }?;
        }
        Ok(())
    }

    /// The lease is dropped: records behind what each stream was given to do with the batch.
    pub(crate) fn end_uses(&self) {
        let uses = &mut *self.uses.borrow_mut();
        uses.recorded = uses.streams.len();
        if uses.recorded == 0 {
            return;
        }
        let bound = Current::enter(self.context());
        for (used, consumed) in uses.streams.drain(..).zip(&uses.consumed) {
            let ended = bound.as_ref().map_err(Clone::clone).and_then(|_| {
                // SAFETY: `use_on`'s caller has said that the stream exists until now.
                unsafe { cu::record(consumed.raw(), used.stream) }.or_else(|error| {
                    // Without the event only the stream's end says that the use is over. The next copy then waits
                    // for an older record of the event, which is complete.
                    let _beside = BesideCaptures::enter();
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
    /// The memory is given back in the copy stream (`DeviceBytes`), so behind the copies; here it is put behind the
    /// uses too.
    fn drop(&mut self) {
        let _current = Current::enter_to_free(self.stream.context());
        let uses = self.uses.get_mut();
        let leaked = !uses.streams.is_empty();
        if leaked || uses.lost.is_some() || self.copy_after_uses().is_err() {
            let _beside = BesideCaptures::enter();
            // A lease was leaked, or an error has come between. If this fails too, so does everything else in
            // this context, and nothing runs in it any more.
            let _ = cu::synchronize_context();
        }
    }
}
