//! The copies: issued in order on the copy stream, and tracked until they are done.
//!
//! [`thread`] issues them on a copy thread, [`by_hand`] on the thread that commits.

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent;

use crate::cu::{self, Event, Stream};
use crate::edge;
use crate::error::Error;
use crate::slot::DeviceBuf;
use crate::time::{Clock, Copied, OnCopied};

pub(crate) mod by_hand;
pub(crate) mod thread;

/// The copy stream, and the copies that may still be running in it, oldest first.
///
/// While an `H` is held here, its host slot is not refilled.
pub(crate) struct Copies<H> {
    stream: Arc<Stream>,
    /// `None` if copies are not timed.
    clock: Option<Arc<Clock>>,
    on_copied: Option<OnCopied>,
    running: VecDeque<Running<H>>,
    /// Holds the chunks of the batch that is being copied, until its last chunk is committed.
    open: Vec<H>,
    /// Empty vectors, one for each copy that may be in flight.
    spare: Vec<Vec<H>>,
    /// Whether a copy of that batch has been enqueued.
    started: bool,
    /// The maximum number of copies in flight: the smaller of the two depths. With more, an event could be recorded
    /// again before the end of its previous copy was seen.
    limit: usize,
}

struct Running<H> {
    seq: u64,
    bytes: usize,
    start: Option<CUevent>,
    /// `None` if the batch is empty.
    copied: Option<CUevent>,
    issued: Instant,
    held: Vec<H>,
}

// SAFETY: the events are handles of the driver, which is thread-safe.
unsafe impl<H: Send> Send for Running<H> {}

/// Whether to wait for the oldest copy.
#[derive(Clone, Copy, PartialEq)]
enum Patience {
    /// Query it only.
    Look,
    /// Query it, and block until it is done if it is not.
    Wait,
}

impl<H> Copies<H> {
    /// `chunks` is the number of chunks of a slot.
    pub(crate) fn new(
        stream: Arc<Stream>,
        clock: Option<Arc<Clock>>,
        on_copied: Option<OnCopied>,
        limit: usize,
        chunks: usize,
    ) -> Self {
        let list = || Vec::with_capacity(chunks);
        Self {
            stream,
            clock,
            on_copied,
            running: VecDeque::with_capacity(limit),
            open: list(),
            // All of them now: how many copies overlap, and when they first do, depends on timing.
            spare: std::iter::repeat_with(list).take(limit).collect(),
            started: false,
            limit,
        }
    }

    /// Makes the uploader's context current on the calling thread. Called before each copy and each wait, because
    /// `on_copied` and wakers run the caller's code, which may make another context current.
    fn bind(&self) -> Result<(), Error> {
        cu::bind(self.stream.context())
    }

    /// Begins a batch in `slot`: its copies wait for the uses of the slot's last batch. The context is current.
    fn begin<M>(&mut self, slot: &mut DeviceBuf<M>) -> Result<(), Error> {
        slot.copy_after_uses()?;
        slot.issued = Instant::now();
        self.started = false;
        Ok(())
    }

    /// Enqueues the copy of one chunk: a piece of the host slot at `from`, to the same offset in `slot`.
    ///
    /// # Safety
    ///
    /// `slot` belongs to this uploader, was passed to `begin`, and its previous copy has been retired. The piece is in
    /// bounds of both slots. `held` keeps the source allocated and the piece unwritten. The context is current.
    unsafe fn part<M>(
        &mut self,
        slot: &DeviceBuf<M>,
        from: NonNull<u8>,
        piece: Range<usize>,
        held: H,
    ) -> Result<(), Error> {
        // Hold the chunk before its copy is issued: if anything fails from here on, `settle` waits before releasing it.
        self.open.push(held);
        if piece.is_empty() {
            return Ok(()); // CUDA rejects empty copies
        }
        let stream = self.stream.raw();
        if let Some(start) = slot.start.as_ref().filter(|_| !self.started) {
            // SAFETY: both exist.
            unsafe { cu::record(start.raw(), stream) }?;
        }
        self.started = true;
        // SAFETY: the caller guarantees that the piece is in bounds.
        let from = unsafe { from.as_ptr().cast_const().add(piece.start) };
        let to = slot.address() + piece.start as u64;
        // SAFETY: `held` keeps the source; the caller guarantees the bounds. The copy stream waits for the target's uses
        // (`begin`), and both slots are freed after the copy stream's work.
        unsafe { cu::copy_to_device(to, from, piece.len(), stream) }
    }

    /// Ends the batch: records its event, and tracks its copies from now on.
    fn end<M>(&mut self, seq: u64, slot: &mut DeviceBuf<M>, len: usize) -> Result<(), Error> {
        slot.len = len;
        let copied = self.started.then(|| slot.copied.raw());
        self.running.push_back(Running {
            seq,
            bytes: len,
            start: slot.start.as_ref().map(Event::raw),
            copied,
            issued: slot.issued,
            held: mem::replace(&mut self.open, self.spare.pop().unwrap_or_default()),
        });
        // SAFETY: both exist.
        copied.map_or(Ok(()), |copied| unsafe { cu::record(copied, self.stream.raw()) })
    }

    /// Drops the batch that was begun: waits for its copies, and releases its chunks.
    fn abandon(&mut self) -> Result<(), Error> {
        if !self.open.is_empty() {
            // SAFETY: the stream is ours.
            unsafe { cu::synchronize(self.stream.raw()) }?;
            self.open.clear();
        }
        Ok(())
    }

    /// Releases the oldest copy's host slot, then calls `on_copied`. Returns `false` if the copy still runs.
    fn retire(&mut self, patience: Patience) -> Result<bool, Error> {
        let Some(oldest) = self.running.front() else { return Ok(true) };
        if let Some(copied) = oldest.copied {
            self.bind()?;
            // SAFETY: the event is in a device slot, which lives as long as the ring.
            let done = unsafe { edge::refill_after_copy(copied, patience == Patience::Wait) }?;
            if !done {
                return Ok(false);
            }
        }
        let Some(Running { seq, bytes, start, copied, issued, mut held }) = self.running.pop_front() else {
            return Ok(true);
        };
        // Release the slot first: the reader may be waiting for it, and the caller's code may run long.
        held.clear();
        self.spare.push(held);
        if let (Some(on_copied), Some(clock), Some(start), Some(copied), 1..) =
            (&mut self.on_copied, &self.clock, start, copied, bytes)
        {
            // Releasing the slot may have woken a task, which is the caller's code.
            cu::bind(self.stream.context())?;
            // SAFETY: both are in a device slot and were recorded for this batch; with a clock, they are for timing.
            if let Some(time) = unsafe { clock.time(start, copied, issued) }? {
                on_copied(Copied { seq, bytes, time });
            }
        }
        Ok(true)
    }

    /// Whether the oldest copy must end before another one may be issued.
    fn is_full(&self) -> bool {
        self.running.len() >= self.limit
    }

    /// Waits until another copy may be issued.
    pub(crate) fn make_room(&mut self) -> Result<(), Error> {
        self.retire_done()?;
        while self.is_full() {
            self.retire(Patience::Wait)?;
        }
        Ok(())
    }

    /// Releases the host slots of all copies that are done.
    fn retire_done(&mut self) -> Result<(), Error> {
        while !self.running.is_empty() && self.retire(Patience::Look)? {}
        Ok(())
    }

    pub(crate) fn retire_all(&mut self) -> Result<(), Error> {
        while !self.running.is_empty() {
            self.retire(Patience::Wait)?;
        }
        Ok(())
    }

    /// How long to sleep before the copies are queried again; `None` if none is in flight. The pause grows with the
    /// time that the newest copy has been in flight.
    fn pause(&self) -> Option<Duration> {
        let newest = self.running.back()?;
        Some((newest.issued.elapsed() / 8).clamp(Duration::from_micros(50), Duration::from_millis(5)))
    }

    /// Waits for the copy stream, even after an error. Returns `false` if that fails. A copy may still be running then,
    /// so its host slot is leaked: neither refilled nor freed.
    pub(crate) fn settle(&mut self) -> bool {
        if self.running.is_empty() && self.open.is_empty() {
            return true;
        }
        let settled = self.stream.settle().is_ok();
        let held = (mem::take(&mut self.running), mem::take(&mut self.open));
        if !settled {
            // A leaked guard keeps its ring alive, and thus the memory.
            mem::forget(held);
        }
        settled
    }
}

impl<H> Drop for Copies<H> {
    fn drop(&mut self) {
        self.settle();
    }
}
