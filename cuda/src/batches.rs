//! The training side of an uploader: receives batches in device memory.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use twinbuf_core::{Consumer, ReadSlot, TryRecvError};

use crate::copy::Hand;
use crate::error::Error;
use crate::host::ThreadShare;
use crate::lease::{Lease, Shared, Slot};
use crate::slot::DeviceBuf;

/// The training side of an uploader: receives batches in device memory. [`Uploader::build`](crate::Uploader::build)
/// returns it.
///
/// It is the consumer of a ring. Each [`Lease`] holds a device slot, and slots come round in turn: if a lease still
/// holds the slot of the next batch, the batch cannot be copied. [`is_held`](DeviceBatches::is_held) tells. Dropping
/// the lease wakes [`recv_deadline`](DeviceBatches::recv_deadline) and the task of
/// [`poll_recv`](DeviceBatches::poll_recv), except while a stream that used the batch is being captured: see [`Lease`].
///
/// # Errors
///
/// Every receive call returns
/// - the error that ended the uploader, or [`Error::Abandoned`] if the host slots were dropped without `finish` or the
///   caller's code panicked in a copy. The caller first receives all earlier batches. Every later call returns the same
///   error;
/// - [`Error::Cancelled`]: the reserved slot of this batch was dropped without a commit. Returned once.
pub struct DeviceBatches<M: 'static> {
    // Fields drop in this order: `ring` must end before the last `_thread` joins the copy thread.
    pub(crate) ring: Consumer<'static, DeviceBuf<M>>,
    /// The number of the next batch.
    pub(crate) next: u64,
    pub(crate) shared: Arc<Shared<M>>,
    /// `None` with a copy thread.
    pub(crate) hand: Option<Arc<Hand<M>>>,
    pub(crate) _thread: ThreadShare,
}

impl<M: 'static> DeviceBatches<M> {
    /// Waits until the copy of the next batch has been issued, and returns the batch. Returns `None` at the end,
    /// after [`finish`](crate::HostSlots::finish).
    ///
    /// The copy may still be running. The streams that use the batch wait for it; the host does not. If the copy fails,
    /// later CUDA calls in the context report the error, and so do receive calls, after the batches issued by then.
    ///
    /// # Errors
    ///
    /// - [`Error::SlotHeld`]: a lease holds the next device slot, was leaked, or was dropped while a stream that used it
    ///   was captured, and the capture has not ended. To wait for the slot could block forever. To wait with a limit, use
    ///   [`recv_deadline`](DeviceBatches::recv_deadline).
    /// - [`Error::Empty`]: with `overlap(false)`, the next batch is not committed.
    /// - The errors of [`DeviceBatches`].
    pub fn recv(&mut self) -> Result<Option<Lease<M>>, Error> {
        match self.try_recv() {
            Err(Error::Empty) if self.hand.is_none() => {
                // The next slot is empty, so no lease holds it, and only receive calls make leases. This call waits for
                // a copy, never for a lease.
                let received = self.ring.recv().map(keep);
                self.lease(received.map_err(TryRecvError::from))
            }
            received => received,
        }
    }

    /// Returns the next batch if its copy has been issued. Does not wait for that. Returns `None` at the end. With
    /// `overlap(false)`, it may wait for earlier copies and for a call on another thread to end.
    ///
    /// # Errors
    ///
    /// - [`Error::Empty`]: the copy has not been issued.
    /// - [`Error::SlotHeld`], as for [`recv`](DeviceBatches::recv), and the errors of [`DeviceBatches`].
    pub fn try_recv(&mut self) -> Result<Option<Lease<M>>, Error> {
        self.shared.release_captured(None);
        self.pump();
        let received = self.ring.try_recv().map(keep);
        self.lease(received)
    }

    /// Waits until the copy of the next batch has been issued or `deadline` passes, and returns the batch. Returns
    /// `None` at the end. It also waits for a lease to release the slot. With `overlap(false)`, another thread has to
    /// commit the batch, and the call may also wait as [`try_recv`](DeviceBatches::try_recv) does, beyond `deadline`.
    ///
    /// # Errors
    ///
    /// - [`Error::Empty`]: at the deadline, the copy has not been issued.
    /// - [`Error::SlotHeld`]: at the deadline, a lease still holds the next device slot.
    /// - The errors of [`DeviceBatches`].
    pub fn recv_deadline(&mut self, deadline: Instant) -> Result<Option<Lease<M>>, Error> {
        if self.hand.as_ref().is_some_and(|hand| hand.is_within()) {
            return self.try_recv();
        }
        loop {
            // Nothing wakes a wait for a slot that a capture holds, because only the next call releases it; nor, without a
            // copy thread, a wait for a lease, because only the next call issues the copy.
            let looks = self.held_by_a_capture() || self.hand.is_some();
            let until =
                if looks { deadline.min(Instant::now() + Duration::from_millis(1)) } else { deadline };
            self.pump();
            let received = self.ring.recv_deadline(until).map(keep);
            let waits = looks && matches!(received, Err(TryRecvError::Empty | TryRecvError::Held));
            if !waits || Instant::now() >= deadline {
                return self.lease(received);
            }
        }
    }

    /// Returns the next batch if its copy has been issued, or `None` at the end. Otherwise returns `Pending`, and wakes
    /// the task of `cx` when the copy has been issued, or when the lease that holds the next device slot is dropped.
    /// The copy thread or a thread that uses the uploader calls the waker: a waker must not wait for the thread that
    /// fills the slots.
    ///
    /// # Errors
    ///
    /// - [`Error::SlotHeld`]: a capture holds the slot. Nothing wakes the task when the capture ends, nor when a lease
    ///   is dropped during the capture of a stream that used it.
    /// - [`Error::Empty`], as for [`recv`](DeviceBatches::recv), and the errors of [`DeviceBatches`].
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Lease<M>>, Error>> {
        // Do not wait for a slot that a capture holds: nothing wakes the task. Without a copy thread, do not wait for a
        // batch: the caller itself commits it. But wait for a lease, because another thread may drop it.
        if self.held_by_a_capture() || self.hand.is_some() && !self.ring.is_held() {
            return Poll::Ready(self.try_recv());
        }
        let received = self.ring.poll_recv(cx).map(|received| received.map(keep));
        // The lease may have been dropped before the ring stored the task. Nothing wakes the task then.
        if self.hand.is_some() && received.is_pending() && !self.ring.is_held() {
            return Poll::Ready(self.try_recv());
        }
        Poll::Ready(self.lease(ready!(received).map_err(TryRecvError::from)))
    }

    /// Returns `true` if a lease holds the device slot of the next batch. The batch cannot be received before the lease
    /// is dropped. Also if the lease was dropped while a stream that used it was being captured: then until the first
    /// receive (with `overlap(false)`, also acquire) call after the capture. Returns `false` once the copies have
    /// ended: no further batch needs the slot.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.ring.is_held()
    }

    /// Returns the number of device slots.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.ring.depth()
    }

    /// Without a copy thread, issues the copies that can be issued.
    fn pump(&self) {
        // The error is ignored here: the next receive returns it after the earlier batches.
        let _ = self.hand.as_ref().map(|hand| hand.pump());
    }

    /// Releases the slots of captures that have ended. Returns whether a capture holds the slot in turn. Nothing
    /// wakes a wait for that slot: only the next call releases it.
    fn held_by_a_capture(&self) -> bool {
        // Before the slots come round, a number that no batch has.
        self.shared.release_captured(Some(self.next.wrapping_sub(self.ring.depth() as u64)))
    }

    /// Converts what the ring returned.
    fn lease(&mut self, received: Result<Option<Slot<M>>, TryRecvError>) -> Result<Option<Lease<M>>, Error> {
        self.next += u64::from(matches!(received, Ok(Some(_)) | Err(TryRecvError::Cancelled)));
        match received {
            Ok(slot) => Ok(slot.map(|slot| Lease { slot: Some(slot), shared: self.shared.clone() })),
            Err(TryRecvError::Empty) => Err(Error::Empty),
            Err(TryRecvError::Held) => Err(Error::SlotHeld { device_depth: self.depth() }),
            Err(TryRecvError::Cancelled) => Err(Error::Cancelled),
            Err(_abandoned) => Err(self.shared.fate.get().cloned().unwrap_or(Error::Abandoned)),
        }
    }

    /// Returns the uploader's context.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.shared.ctx
    }
}

fn keep<M>(slot: Option<ReadSlot<'_, 'static, DeviceBuf<M>>>) -> Option<Slot<M>> {
    slot.map(ReadSlot::keep)
}

debug!([M: 'static] DeviceBatches<M>, this, depth: this.ring.depth(), overlap: this.hand.is_none(), error: this.shared.fate.get());
