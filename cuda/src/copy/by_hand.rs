//! Copies on the thread that commits, for `overlap(false)`: the same slots and edges without a copy thread.

use std::mem;
use std::sync::Arc;

use twinbuf_core::{Park, Producer, TryAcquireError};

use super::Copies;
use crate::cu::{BesideCaptures, Current};
use crate::error::{Error, Fate};
use crate::lease::Shared;
use crate::slot::{DeviceBuf, HostBuf};

/// Everything that `acquire` and `commit` need to copy without a copy thread.
pub(crate) struct ByHand<M: 'static> {
    copies: Copies<()>,
    slots: Vec<HostBuf<M>>,
    /// `None` after an error. The consumer then sees the end of the ring and takes the error from `fate`.
    device: Option<Producer<'static, DeviceBuf<M>, Park>>,
    /// The index of the next host slot.
    turn: usize,
    committed: u64,
    /// Whether part of that slot has been flushed.
    begun: bool,
    fate: Arc<Fate>,
    shared: Arc<Shared<M>>,
}

impl<M: 'static> ByHand<M> {
    /// `slots` has at least one slot.
    pub(crate) fn new(
        copies: Copies<()>,
        slots: Vec<HostBuf<M>>,
        device: Producer<'static, DeviceBuf<M>, Park>,
        fate: Arc<Fate>,
        shared: Arc<Shared<M>>,
    ) -> Self {
        Self { copies, slots, device: Some(device), turn: 0, committed: 0, begun: false, fate, shared }
    }

    /// Waits until the next host slot may be filled. Does not wait for a device slot: only the caller can release it.
    pub(crate) fn acquire(&mut self, device_depth: usize) -> Result<(), Error> {
        // A slot that was forgotten after a flush is this one again.
        self.abandon();
        self.shared.release_captured(None);
        match self.device.as_mut().map(Producer::try_acquire) {
            Some(Ok(_)) => {}
            Some(Err(TryAcquireError::Full)) => return Err(Error::SlotHeld { device_depth }),
            Some(Err(_closed)) => return Err(Error::Closed),
            None => return Err(self.end()),
        }
        if !self.copies.is_full() {
            return Ok(());
        }
        let entered = Current::enter(self.copies.stream.context());
        let _beside = BesideCaptures::enter();
        // Taken out during the call: if `on_copied` panics, it is dropped, and the ring ends.
        let device = self.device.take();
        let room = entered.and_then(|_current| self.copies.make_room());
        self.device = device;
        room.map_err(|error| self.fail(error))
    }

    /// The next host slot. It may be filled after `acquire`.
    pub(crate) fn slot(&self) -> &HostBuf<M> {
        &self.slots[self.turn]
    }

    pub(crate) fn slot_mut(&mut self) -> &mut HostBuf<M> {
        &mut self.slots[self.turn]
    }

    /// Issues the copy of that slot's piece. If it is the batch's last, hands the batch over.
    pub(crate) fn part(&mut self) -> Result<(), Error> {
        let Some(device) = &mut self.device else { return Err(self.end()) };
        let Ok(mut slot) = device.try_acquire() else { return Err(Error::Closed) };
        let (copies, host) = (&mut self.copies, &mut self.slots[self.turn]);
        // This may run on another thread than `acquire` did, or with another current context.
        let issued = Current::enter(copies.stream.context()).and_then(|_current| {
            if !self.begun {
                copies.begin(&mut slot)?;
                self.begun = true;
            }
            // SAFETY: slots are used in turn, and `acquire` has waited until fewer copies are in flight than either
            // side has slots: so the previous copies of this host slot and this device slot are retired. All slots
            // have one size, and the piece is in bounds. Flushed bytes are not written to (`HostSlot`); if the batch is
            // dropped or forgotten, their copies are waited for (`abandon`).
            unsafe { copies.part(&slot, host.memory.start(), host.piece.clone(), ()) }?;
            if host.last { copies.end(self.committed, &mut slot, host.len) } else { Ok(()) }
        });
        match issued {
            Err(error) => Err(self.fail(error)),
            Ok(()) if !host.last => Ok(()),
            Ok(()) => {
                self.committed += 1;
                self.begun = false;
                slot.meta = host.meta.take();
                self.turn = (self.turn + 1) % self.slots.len();
                slot.commit().map_err(|_| Error::Closed)
            }
        }
    }

    /// The slot was dropped without a commit: waits for the copies of what was flushed.
    pub(crate) fn abandon(&mut self) {
        if mem::take(&mut self.begun) {
            let entered = Current::enter(self.copies.stream.context());
            let _beside = BesideCaptures::enter();
            if let Err(error) = entered.and_then(|_current| self.copies.abandon()) {
                self.fail(error);
            }
        }
    }

    /// Ends the data, or the uploader if a copy failed.
    pub(crate) fn finish(mut self) {
        let entered = Current::enter(self.copies.stream.context());
        let beside = BesideCaptures::enter();
        match entered.and_then(|_current| self.copies.retire_all()) {
            Ok(()) => drop(self.device.take().map(Producer::finish)),
            Err(error) => drop(self.fail(error)),
        }
        drop(beside);
    }

    /// Why the uploader has ended.
    fn end(&self) -> Error {
        self.fate.get().cloned().unwrap_or(Error::Closed)
    }

    fn fail(&mut self, error: Error) -> Error {
        self.settle();
        // Set before the ring ends, because the other side looks here when it sees the end.
        let _ = self.fate.set(error.clone());
        self.device = None;
        error
    }

    /// Waits for all copies. If that fails, the slots are leaked, because a copy may still read them.
    fn settle(&mut self) {
        if !self.copies.settle() {
            mem::forget(mem::take(&mut self.slots));
        }
    }
}

impl<M: 'static> Drop for ByHand<M> {
    fn drop(&mut self) {
        self.settle();
    }
}
