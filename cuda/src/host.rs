//! The reading side: page-locked host slots, filled one after the other.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use twinbuf_core::{Park, Producer, WriteSlot};

use crate::copy::{ByHand, Fate};
use crate::error::Error;
use crate::slot::HostBuf;

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
    Ahead(Producer<'static, HostBuf<M>, Park>),
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
        device_depth: usize,
        fate: Arc<Fate>,
        thread: Arc<Thread>,
    ) -> Self {
        Self { side: Side::Ahead(ring), device_depth, fate, _thread: Some(thread) }
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
        let slot = match &mut self.side {
            Side::Ahead(ring) => {
                Slot::Ahead(ring.acquire().map_err(|_| self.fate.get().cloned().unwrap_or(Error::Closed))?)
            }
            Side::ByHand(by_hand) => {
                by_hand.acquire(self.device_depth)?;
                Slot::ByHand(by_hand)
            }
        };
        Ok(HostSlot { slot, fate: &self.fate })
    }

    /// The end of the data: the other side receives what was committed, then `None`.
    pub fn finish(self) {
        match self.side {
            Side::Ahead(ring) => ring.finish(),
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
    fate: &'p Fate,
}

enum Slot<'p, M: 'static> {
    Ahead(WriteSlot<'p, HostBuf<M>, Park>),
    ByHand(&'p mut ByHand<M>),
}

impl<M: 'static> HostSlot<'_, M> {
    /// Hands the first `len` bytes over, to be copied, and `meta` with them, to be found in their
    /// [`Lease`](crate::Lease). No bytes are a batch too: so a reader tells its own errors, in their order.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the slot is shorter than `len`; nothing was handed over. The error that ended the
    /// uploader, or [`Error::Closed`]: nobody will receive it.
    pub fn commit(self, len: usize, meta: M) -> Result<(), Error> {
        if len > self.bytes().len() {
            let wanted = format!("at most the slot's {} bytes", self.bytes().len());
            return Err(Error::Option { option: "len", wanted, found: len.to_string() });
        }
        match self.slot {
            Slot::Ahead(mut slot) => {
                slot.len = len;
                slot.meta = Some(meta);
                // Write-combined memory needs no fence of its own: the ring hands over by a compare-and-exchange,
                // which on x86 is a locked instruction and so drains the write-combining buffers (Intel SDM,
                // volume 3, "Memory Types"); elsewhere it is memory as any other.
                slot.commit().map_err(|_| self.fate.get().cloned().unwrap_or(Error::Closed))
            }
            Slot::ByHand(by_hand) => by_hand.commit(len, meta),
        }
    }

    fn bytes(&self) -> &[u8] {
        match &self.slot {
            Slot::Ahead(slot) => slot.bytes.bytes(),
            Slot::ByHand(by_hand) => by_hand.slot().bytes.bytes(),
        }
    }
}

impl<M: 'static> Deref for HostSlot<'_, M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes()
    }
}

impl<M: 'static> DerefMut for HostSlot<'_, M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.slot {
            Slot::Ahead(slot) => slot.bytes.bytes_mut(),
            Slot::ByHand(by_hand) => by_hand.slot_mut().bytes.bytes_mut(),
        }
    }
}

impl<M: 'static> fmt::Debug for HostSlots<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSlots")
            .field("overlap", &matches!(self.side, Side::Ahead(_)))
            .field("error", &self.fate.get())
            .finish_non_exhaustive()
    }
}

impl<M: 'static> fmt::Debug for HostSlot<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSlot").field("bytes", &self.len()).finish_non_exhaustive()
    }
}
