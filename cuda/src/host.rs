//! The reading side: page-locked host slots, filled one after the other.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use twinbuf_core::{Park, Producer, ReservedSlot, WriteSlot};

use crate::copy::{ByHand, Fate};
use crate::cu::HostBytes;
use crate::error::Error;
use crate::slot::{HostBuf, Layout};

/// The side that fills host slots; made by [`Uploader::build`](crate::Uploader::build).
///
/// Dropping it tells the other side that the data may be incomplete; only [`finish`](HostSlots::finish) is the
/// end.
pub struct HostSlots<M: 'static> {
    // Dropped in this order: the copy thread is joined when both sides are gone.
    side: Side<M>,
    device_depth: usize,
    fate: Arc<Fate>,
    _thread: Option<Arc<Thread>>,
}

enum Side<M: 'static> {
    /// A thread copies what is committed.
    Ahead(Producer<'static, HostBuf<M>, Park>, Arc<Layout>),
    /// `commit` does.
    ByHand(Box<ByHand<M>>),
}

/// The copy thread, joined when both sides of the uploader have been dropped, unless that happens on it.
pub(crate) struct Thread(pub(crate) Option<JoinHandle<()>>);

impl Drop for Thread {
    fn drop(&mut self) {
        // Code of the caller's that runs on the copy thread, as a waker, may be the last that has a side: then this is
        // that thread, which cannot wait for its own end, and comes to it by itself.
        let other = |thread: &JoinHandle<()>| thread.thread().id() != thread::current().id();
        if let Some(thread) = self.0.take().filter(other) {
            // A panic (in `on_copied`) has been reported by its hook, and to both sides as the end.
            let _ = thread.join();
        }
    }
}

impl<M: 'static> HostSlots<M> {
    pub(crate) fn ahead(
        ring: Producer<'static, HostBuf<M>, Park>,
        layout: Arc<Layout>,
        device_depth: usize,
        fate: Arc<Fate>,
        thread: Arc<Thread>,
    ) -> Self {
        Self { side: Side::Ahead(ring, layout), device_depth, fate, _thread: Some(thread) }
    }

    pub(crate) fn by_hand(by_hand: ByHand<M>, device_depth: usize, fate: Arc<Fate>) -> Self {
        Self { side: Side::ByHand(Box::new(by_hand)), device_depth, fate, _thread: None }
    }

    /// The next host slot, waiting until its last copy is done.
    ///
    /// # Errors
    ///
    /// The error that ended the uploader, or [`Error::Closed`] once the [`DeviceBatches`](crate::DeviceBatches)
    /// are gone. With `overlap(false)` also [`Error::AllHeld`], if there is no device slot for a batch: a lease has
    /// to be dropped first, and on this thread nobody would.
    pub fn acquire(&mut self) -> Result<HostSlot<'_, M>, Error> {
        let Self { side, device_depth, fate, .. } = self;
        let ended = || fate.get().cloned().unwrap_or(Error::Closed);
        let (slot, layout) = match side {
            Side::Ahead(ring, layout) => {
                let slot = if layout.chunks() == 1 {
                    Slot::Whole(ring.acquire().map_err(|_| ended())?)
                } else {
                    let mut chunks = VecDeque::with_capacity(layout.chunks());
                    for _ in 0..layout.chunks() {
                        chunks.push_back(ring.acquire().map_err(|_| ended())?.reserve());
                    }
                    Slot::Chunks(chunks)
                };
                (slot, layout.clone())
            }
            Side::ByHand(by_hand) => {
                by_hand.acquire(*device_depth)?;
                let layout = by_hand.layout().clone();
                (Slot::ByHand(Turn { by_hand, ended: false }), layout)
            }
        };
        Ok(HostSlot { slot, layout, flushed: 0, fate })
    }

    /// The end of the data: the other side receives what was committed, then `None`.
    pub fn finish(self) {
        match self.side {
            Side::Ahead(ring, _) => ring.finish(),
            Side::ByHand(by_hand) => by_hand.finish(),
        }
    }
}

/// A free host slot, to be filled in place: page-locked memory, as long as the uploader's slots. CUDA promises no
/// alignment of it.
///
/// **Dropping it does not hand it over**, as in [`twinbuf_core::WriteSlot`]: call [`commit`](HostSlot::commit).
/// What is in it is what was there before, from 0 on.
///
/// A host slot that was made write-combined is slow to read: fill it in order, and do not read it.
#[must_use = "a slot that is dropped without `commit` is not handed over"]
pub struct HostSlot<'p, M: 'static> {
    slot: Slot<'p, M>,
    layout: Arc<Layout>,
    /// How many bytes, from the slot's start, have been handed over.
    flushed: usize,
    fate: &'p Fate,
}

enum Slot<'p, M: 'static> {
    Whole(WriteSlot<'p, 'static, HostBuf<M>, Park>),
    /// The chunks that have not been handed over, in order; at least one.
    Chunks(VecDeque<ReservedSlot<'static, HostBuf<M>, Park>>),
    ByHand(Turn<'p, M>),
}

/// A slot's turn by hand.
struct Turn<'p, M: 'static> {
    by_hand: &'p mut ByHand<M>,
    /// Its batch was handed over whole.
    ended: bool,
}

impl<M: 'static> Drop for Turn<'_, M> {
    fn drop(&mut self) {
        if !self.ended {
            self.by_hand.abandon();
        }
    }
}

impl<M: 'static> HostSlot<'_, M> {
    /// Hands the first `len` bytes over, to be copied, and `meta` with them, to be found in their
    /// [`Lease`](crate::Lease). No bytes are a batch too: so a reader tells its own errors, in their order.
    ///
    /// Of several [`arrays`](crate::Uploader::arrays) it is the first; the others are empty.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the slot is shorter than `len`; nothing was handed over. The error that ended the
    /// uploader, or [`Error::Closed`]: nobody will receive it.
    pub fn commit(self, len: usize, meta: M) -> Result<(), Error> {
        self.commit_arrays(&[len], meta)
    }

    /// The same for several [`arrays`](crate::Uploader::arrays): the first bytes of each, as many as `lens` tells. They
    /// are copied by one call of the driver where it has one (`cuMemcpyBatchAsync`, since 12.8).
    ///
    /// # Errors
    ///
    /// As [`commit`](HostSlot::commit); [`Error::Option`] if there are more lengths than arrays.
    pub fn commit_arrays(mut self, lens: &[usize], meta: M) -> Result<(), Error> {
        let arrays = self.layout.arrays();
        if lens.len() > arrays.len() {
            let wanted = format!("at most one for each of {} arrays", arrays.len());
            return Err(Error::Option { option: "lens", wanted, found: lens.len().to_string() });
        }
        for (array, &len) in arrays.iter().zip(lens) {
            if len > array.len() {
                let wanted = if arrays.len() == 1 {
                    format!("at most the slot's {} bytes", array.len())
                } else {
                    format!("at most the array's {} bytes", array.len())
                };
                return Err(Error::Option { option: "len", wanted, found: len.to_string() });
            }
        }
        let Self { slot, layout, flushed, fate } = &mut self;
        let closed = |_| fate.get().cloned().unwrap_or(Error::Closed);
        // Write-combined memory needs no fence of its own. On x86 the ring hands over by a locked instruction, which
        // drains the write-combining buffers (Intel SDM, volume 3, "Memory Types"). On aarch64 such memory is Normal
        // Non-cacheable, so that the ring's release orders the stores before the hand-over, and the driver's own
        // barrier before it starts the engine is behind that (Arm ARM, B2.3).
        match slot {
            Slot::Chunks(chunks) => {
                while let Some(mut chunk) = chunks.pop_front() {
                    if chunks.is_empty() {
                        chunk.set_rest(layout, lens, *flushed, meta);
                        return chunk.commit().map_err(closed);
                    }
                    chunk.set_part(0..0);
                    chunk.commit().map_err(closed)?;
                }
                Ok(())
            }
            Slot::ByHand(turn) => {
                turn.by_hand.slot_mut().set_rest(layout, lens, *flushed, meta);
                turn.ended = true;
                turn.by_hand.part()
            }
            Slot::Whole(_) => {
                let Slot::Whole(mut whole) = self.slot else { unreachable!("matched above") };
                whole.set_rest(&self.layout, lens, 0, meta);
                whole.commit().map_err(closed)
            }
        }
    }

    /// Starts the copy of the whole [`chunks`](crate::Uploader::chunk_bytes) among the slot's first `filled` bytes,
    /// while the rest is being filled. **The slot is then what comes after them**: [`flushed`](HostSlot::flushed) bytes
    /// less at its start. Its last chunk waits for [`commit`](HostSlot::commit).
    ///
    /// If the slot is then dropped, the batch is not handed over.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the slot is shorter; the error that ended the uploader, or [`Error::Closed`].
    pub fn flush(&mut self, filled: usize) -> Result<(), Error> {
        if filled > self.layout.bytes {
            let wanted = format!("at most the slot's {} bytes", self.layout.bytes);
            return Err(Error::Option { option: "filled", wanted, found: filled.to_string() });
        }
        let chunk = self.layout.chunk;
        let until = (filled / chunk).min(self.layout.chunks() - 1) * chunk;
        if until <= self.flushed {
            return Ok(());
        }
        // From here on it is not written to, whatever comes of it.
        let mut part = self.flushed..until;
        let count = part.len() / chunk;
        self.flushed = until;
        match &mut self.slot {
            Slot::Whole(_) => Ok(()), // of one chunk
            Slot::Chunks(chunks) => {
                for _ in 0..count {
                    let Some(mut chunk) = chunks.pop_front() else { break };
                    // One copy for all of them.
                    chunk.set_part(std::mem::replace(&mut part, until..until));
                    chunk.commit().map_err(|_| self.fate.get().cloned().unwrap_or(Error::Closed))?;
                }
                Ok(())
            }
            Slot::ByHand(turn) => {
                turn.by_hand.slot_mut().set_part(part);
                turn.by_hand.part()
            }
        }
    }

    /// How many bytes, from the slot's start, [`flush`](HostSlot::flush) has handed over.
    #[must_use]
    pub fn flushed(&self) -> usize {
        self.flushed
    }

    /// Where each of the [`arrays`](crate::Uploader::arrays) lies in the whole slot.
    #[must_use]
    pub fn arrays(&self) -> &[Range<usize>] {
        self.layout.arrays()
    }

    fn memory(&self) -> &HostBytes {
        match &self.slot {
            Slot::Whole(slot) => &slot.memory,
            Slot::Chunks(chunks) => &chunks[0].memory,
            Slot::ByHand(turn) => &turn.by_hand.slot().memory,
        }
    }
}

impl<M: 'static> Deref for HostSlot<'_, M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let rest = self.layout.bytes - self.flushed;
        // SAFETY: within the slot, whose memory has as many bytes (`build` compares them).
        let start = unsafe { self.memory().start().add(self.flushed) };
        // SAFETY: that many bytes, all set, of a slot that this guard has alone, from `flushed` on: the copies of its
        // last batch are over, and this batch's are of what comes before.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), rest) }
    }
}

impl<M: 'static> DerefMut for HostSlot<'_, M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let rest = self.layout.bytes - self.flushed;
        // SAFETY: as in `deref`.
        let start = unsafe { self.memory().start().add(self.flushed) };
        // SAFETY: as in `deref`, and `&mut self` excludes any other reference.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), rest) }
    }
}

impl<M: 'static> fmt::Debug for HostSlots<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSlots")
            .field("overlap", &matches!(self.side, Side::Ahead(..)))
            .field("error", &self.fate.get())
            .finish_non_exhaustive()
    }
}

impl<M: 'static> fmt::Debug for HostSlot<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSlot").field("bytes", &self.len()).finish_non_exhaustive()
    }
}
