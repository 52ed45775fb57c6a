//! The reading side: fills page-locked host slots in turn.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use twinbuf_core::{Park, Producer, ReservedSlot, WriteSlot};

use crate::copy::by_hand::ByHand;
use crate::error::{Error, Fate};
use crate::memory::HostBytes;
use crate::slot::{HostBuf, Layout};

/// The reading side of an uploader: fills host slots. [`Uploader::build`](crate::Uploader::build) returns it.
///
/// Call [`finish`](HostSlots::finish) at the end of the data. If it is dropped without this call, the training side
/// receives [`Error::Abandoned`] after the last batch, because the data may be incomplete.
pub struct HostSlots<M: 'static> {
    // Dropped in this order: the copy thread is joined after both sides are gone.
    side: Side<M>,
    layout: Layout,
    device_depth: usize,
    fate: Arc<Fate>,
    _thread: Option<Arc<Thread>>,
}

enum Side<M: 'static> {
    /// The copy thread copies committed slots. The queue holds the chunks of the slot being filled. It is stored here
    /// to avoid an allocation per batch.
    Ahead(Producer<'static, HostBuf<M>, Park>, Reserved<M>),
    /// `commit` copies them.
    ByHand(Box<ByHand<M>>),
}

type Reserved<M> = VecDeque<ReservedSlot<'static, HostBuf<M>, Park>>;

/// The copy thread, joined when both sides of the uploader have been dropped.
pub(crate) struct Thread(pub(crate) Option<JoinHandle<()>>);

impl Drop for Thread {
    fn drop(&mut self) {
        // The caller's code on the copy thread, such as a waker, may drop the last side. A thread cannot join itself;
        // it ends without being joined.
        let other = |thread: &JoinHandle<()>| thread.thread().id() != thread::current().id();
        if let Some(thread) = self.0.take().filter(other) {
            // A panic in `on_copied` was reported by the panic hook, and both sides see the end.
            let _ = thread.join();
        }
    }
}

impl<M: 'static> HostSlots<M> {
    pub(crate) fn ahead(
        ring: Producer<'static, HostBuf<M>, Park>,
        layout: Layout,
        device_depth: usize,
        fate: Arc<Fate>,
        thread: Arc<Thread>,
    ) -> Self {
        let side = Side::Ahead(ring, VecDeque::with_capacity(layout.chunks()));
        Self { side, layout, device_depth, fate, _thread: Some(thread) }
    }

    pub(crate) fn by_hand(by_hand: ByHand<M>, layout: Layout, device_depth: usize, fate: Arc<Fate>) -> Self {
        Self { side: Side::ByHand(Box::new(by_hand)), layout, device_depth, fate, _thread: None }
    }

    /// Waits until the previous copy from the next host slot is complete, and returns the slot.
    ///
    /// # Errors
    ///
    /// - The error that ended the uploader.
    /// - [`Error::Closed`]: the [`DeviceBatches`](crate::DeviceBatches) were dropped.
    /// - [`Error::SlotHeld`]: with `overlap(false)`, a lease holds the next device slot. Drop the lease first.
    pub fn acquire(&mut self) -> Result<HostSlot<'_, M>, Error> {
        let Self { side, layout, device_depth, fate, .. } = self;
        let ended = || fate.get().cloned().unwrap_or(Error::Closed);
        let slot = match side {
            Side::Ahead(ring, reserved) => {
                if layout.chunks() == 1 {
                    Slot::Whole(ring.acquire().map_err(|_| ended())?)
                } else {
                    let chunks = Chunks(reserved);
                    // The chunks of a forgotten slot.
                    chunks.0.clear();
                    for _ in 0..layout.chunks() {
                        chunks.0.push_back(ring.acquire().map_err(|_| ended())?.reserve());
                    }
                    Slot::Chunks(chunks)
                }
            }
            Side::ByHand(by_hand) => {
                by_hand.acquire(*device_depth)?;
                Slot::ByHand(Turn { by_hand, ended: false })
            }
        };
        Ok(HostSlot { slot, layout: *layout, flushed: 0, fate })
    }

    /// Marks the end of the data. The training side receives all committed batches, then `None`.
    pub fn finish(self) {
        match self.side {
            Side::Ahead(ring, reserved) => {
                // The chunks of a forgotten slot. The end comes after them.
                drop(reserved);
                ring.finish();
            }
            Side::ByHand(by_hand) => by_hand.finish(),
        }
    }
}

/// A free host slot to fill in place: page-locked memory of the uploader's slot size. It dereferences to its bytes.
/// CUDA does not guarantee an alignment.
///
/// **Dropping it does not commit the batch**: call [`commit`](HostSlot::commit). The slot contains bytes of an
/// earlier batch, or zeros.
///
/// A write-combined slot is slow to read: fill it in order, and do not read it.
#[must_use = "a slot dropped without `commit` is not handed over"]
pub struct HostSlot<'p, M: 'static> {
    slot: Slot<'p, M>,
    layout: Layout,
    /// Bytes at the slot's start that have been handed over.
    flushed: usize,
    fate: &'p Fate,
}

enum Slot<'p, M: 'static> {
    Whole(WriteSlot<'p, 'static, HostBuf<M>, Park>),
    Chunks(Chunks<'p, M>),
    ByHand(Turn<'p, M>),
}

/// The chunks that have not been handed over, in order. Not empty until the commit.
struct Chunks<'p, M: 'static>(&'p mut Reserved<M>);

impl<M: 'static> Drop for Chunks<'_, M> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// A slot of [`ByHand`].
struct Turn<'p, M: 'static> {
    by_hand: &'p mut ByHand<M>,
    /// The batch was handed over.
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
    /// Commits the first `len` bytes of the slot as a batch. They are copied to the device. The batch's
    /// [`Lease`](crate::Lease) returns the value `meta`. `len` may be 0: a reader can use empty batches to report
    /// its errors in order.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: `len` exceeds the size of the slot.
    /// - The error that ended the uploader.
    /// - [`Error::Closed`]: the [`DeviceBatches`](crate::DeviceBatches) were dropped.
    ///
    /// In all cases the batch is not committed.
    pub fn commit(mut self, len: usize, meta: M) -> Result<(), Error> {
        if len > self.layout.bytes {
            let wanted = format!("at most the slot's {} bytes", self.layout.bytes);
            return Err(Error::Option { option: "len", wanted, found: len.to_string() });
        }
        let Self { slot, flushed, fate, .. } = &mut self;
        let closed = |_| fate.get().cloned().unwrap_or(Error::Closed);
        // Write-combined memory needs no fence here. On x86 the ring hands over with a locked instruction, which drains
        // the write-combining buffers (Intel SDM, volume 3, "Memory Types"). On aarch64 such memory is Normal
        // Non-cacheable: the ring's release orders the stores before the hand-over, and the driver's barrier before
        // starting the copy engine comes after that (Arm ARM, B2.3).
        match slot {
            Slot::Chunks(chunks) => {
                while let Some(mut chunk) = chunks.0.pop_front() {
                    if chunks.0.is_empty() {
                        chunk.set_rest(len, *flushed, meta);
                        return chunk.commit().map_err(closed);
                    }
                    chunk.set_part(0..0);
                    chunk.commit().map_err(closed)?;
                }
                Ok(())
            }
            Slot::ByHand(turn) => {
                turn.by_hand.slot_mut().set_rest(len, *flushed, meta);
                turn.ended = true;
                turn.by_hand.part()
            }
            Slot::Whole(_) => {
                let Slot::Whole(mut whole) = self.slot else { unreachable!("matched above") };
                whole.set_rest(len, 0, meta);
                whole.commit().map_err(closed)
            }
        }
    }

    /// Starts the copies of all complete [chunks](crate::Uploader::chunk_bytes) within the first `filled` bytes of
    /// the slot. The caller continues to fill the rest.
    ///
    /// **After this call, the slot dereferences to the bytes after these chunks**: its first
    /// [`flushed`](HostSlot::flushed) bytes are no longer accessible. `filled` always counts from the original start
    /// of the slot. [`commit`](HostSlot::commit) copies the last chunk. If the slot is dropped instead, the batch is
    /// not committed.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: `filled` exceeds the size of the slot.
    /// - The error that ended the uploader.
    /// - [`Error::Closed`]: the [`DeviceBatches`](crate::DeviceBatches) were dropped.
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
        // These bytes are not written to from here on, even if a call below fails.
        let mut part = self.flushed..until;
        let count = part.len() / chunk;
        self.flushed = until;
        match &mut self.slot {
            Slot::Whole(_) => Ok(()), // has one chunk
            Slot::Chunks(chunks) => {
                for _ in 0..count {
                    let Some(mut chunk) = chunks.0.pop_front() else { break };
                    // One copy for all of these chunks; the others are empty.
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

    /// Returns how many bytes [`flush`](HostSlot::flush) has already sent, counted from the start of the slot.
    #[must_use]
    pub fn flushed(&self) -> usize {
        self.flushed
    }

    fn memory(&self) -> &HostBytes {
        match &self.slot {
            Slot::Whole(slot) => &slot.memory,
            Slot::Chunks(chunks) => &chunks.0[0].memory,
            Slot::ByHand(turn) => &turn.by_hand.slot().memory,
        }
    }
}

impl<M: 'static> Deref for HostSlot<'_, M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let rest = self.layout.bytes - self.flushed;
        // SAFETY: in bounds of the slot's memory (`build` checks its length).
        let start = unsafe { self.memory().start().add(self.flushed) };
        // SAFETY: `rest` initialized bytes, which this guard owns: the copies of the slot's previous batch are done, and
        // this batch's copies read only the bytes before `flushed`.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), rest) }
    }
}

impl<M: 'static> DerefMut for HostSlot<'_, M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let rest = self.layout.bytes - self.flushed;
        // SAFETY: as in `deref`.
        let start = unsafe { self.memory().start().add(self.flushed) };
        // SAFETY: as in `deref`; `&mut self` excludes other references.
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
