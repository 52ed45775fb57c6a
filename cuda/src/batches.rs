//! The training side of an uploader: receives batches in device memory.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::ThreadId;

use cudarc::driver::CudaContext;
use twinbuf_core::{Consumer, KeptSlot, Park, ReadSlot, TryRecvError};

use crate::error::{Error, Fate};
use crate::host::Thread;
use crate::lease::{Lease, Shared};
use crate::slot::DeviceBuf;

/// The training side of an uploader: receives batches in device memory. [`Uploader::build`](crate::Uploader::build)
/// returns it.
pub struct DeviceBatches<M: 'static> {
    // Dropped in this order: the copy thread is joined after both sides are gone.
    ring: Consumer<'static, DeviceBuf<M>, Park>,
    /// The number of the next batch.
    next: u64,
    shared: Arc<Shared<M>>,
    fate: Arc<Fate>,
    thread: Option<Arc<Thread>>,
}

impl<M: 'static> DeviceBatches<M> {
    pub(crate) fn new(
        ring: Consumer<'static, DeviceBuf<M>, Park>,
        shared: Arc<Shared<M>>,
        fate: Arc<Fate>,
        thread: Option<Arc<Thread>>,
    ) -> Self {
        Self { ring, next: 0, shared, fate, thread }
    }

    /// Waits until the copy of the next batch has been issued, and returns the batch. Returns `None` at the end,
    /// after [`finish`](crate::HostSlots::finish).
    ///
    /// The copy may still be running. The streams that use the batch wait for it; the host does not. If the copy
    /// fails, CUDA reports the error in every later call, and the next receive call returns it.
    ///
    /// # Errors
    ///
    /// - The error that ended the uploader, or [`Error::Abandoned`] if the host slots were dropped without `finish`.
    ///   The caller first receives all earlier batches. Every later call returns the same error.
    /// - [`Error::SlotHeld`]: a lease holds the next device slot, the lease was leaked, or the lease was dropped
    ///   while a stream that used it was being captured. To wait for the slot could block forever.
    /// - [`Error::Empty`]: with `overlap(false)`, nothing was committed.
    pub fn recv(&mut self) -> Result<Option<Lease<M>>, Error> {
        if !self.overlap() {
            return self.try_recv();
        }
        if let Some(held) = self.held_by_a_capture() {
            return held;
        }
        if self.ring.is_held() {
            return Err(self.held());
        }
        let received = self.ring.recv().map(|slot| slot.map(ReadSlot::keep));
        self.lease(received.map_err(TryRecvError::from))
    }

    /// Returns the next batch if its copy has been issued. Does not wait. Returns `None` at the end.
    ///
    /// # Errors
    ///
    /// - [`Error::Empty`]: the copy has not been issued.
    /// - The errors of [`recv`](DeviceBatches::recv).
    pub fn try_recv(&mut self) -> Result<Option<Lease<M>>, Error> {
        self.shared.release_captured(None);
        let received = self.ring.try_recv().map(|slot| slot.map(ReadSlot::keep));
        self.lease(received)
    }

    /// Returns the next batch if its copy has been issued, or `None` at the end. Otherwise returns `Pending`, and
    /// wakes the task of `cx` when the copy has been issued, or when the lease that holds the next device slot is
    /// dropped.
    ///
    /// # Errors
    ///
    /// The errors of [`recv`](DeviceBatches::recv), except [`Error::SlotHeld`].
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Lease<M>>, Error>> {
        if !self.overlap() {
            return Poll::Ready(self.try_recv());
        }
        if let Some(held) = self.held_by_a_capture() {
            return Poll::Ready(held);
        }
        let received = self.ring.poll_recv(cx).map_ok(|slot| slot.map(ReadSlot::keep));
        received.map(|received| self.lease(received.map_err(TryRecvError::from)))
    }

    /// What to return if a capture holds the slot in turn. No call may wait for that slot, because only the next call
    /// releases it.
    fn held_by_a_capture(&mut self) -> Option<Result<Option<Lease<M>>, Error>> {
        let before = self.next.checked_sub(self.ring.depth() as u64);
        self.shared.release_captured(before).then(|| match self.try_recv() {
            Err(Error::Empty) => Err(self.held()),
            received => received,
        })
    }

    /// Converts what the ring returned.
    fn lease(
        &mut self,
        received: Result<Option<KeptSlot<'static, DeviceBuf<M>, Park>>, TryRecvError>,
    ) -> Result<Option<Lease<M>>, Error> {
        match received {
            Ok(slot) => Ok(slot.map(|slot| {
                self.next = slot.seq() + 1;
                Lease::new(slot, self.shared.clone())
            })),
            Err(TryRecvError::Empty) => Err(Error::Empty),
            Err(TryRecvError::Held) => Err(self.held()),
            // Device slots are never reserved, so none is cancelled.
            Err(_abandoned) => Err(self.fate.get().cloned().unwrap_or(Error::Abandoned)),
        }
    }

    fn held(&self) -> Error {
        Error::SlotHeld { device_depth: self.ring.depth() }
    }

    fn overlap(&self) -> bool {
        self.thread.is_some()
    }

    /// Returns the ID of the thread that issues the copies and wakes tasks. Code on that thread must not wait for
    /// the thread that fills the slots. Returns `None` with `overlap(false)`.
    #[doc(hidden)]
    #[must_use]
    pub fn copy_thread(&self) -> Option<ThreadId> {
        self.thread.as_ref()?.0.as_ref().map(|thread| thread.thread().id())
    }

    /// Returns the context of the device.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.shared.ctx
    }
}

impl<M: 'static> fmt::Debug for DeviceBatches<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBatches")
            .field("depth", &self.ring.depth())
            .field("overlap", &self.overlap())
            .field("error", &self.fate.get())
            .finish_non_exhaustive()
    }
}
