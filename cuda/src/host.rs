//! The filling side: fills page-locked host slots in turn, by any number of threads.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use twinbuf_core::{Closed, Producer, TryAcquireError, WriteSlot};

use crate::copy::{Hand, Waiting};
use crate::error::Error;
use crate::hosts::{Handed, Hosts};

/// The filling side of an uploader: hands out free host slots. [`Uploader::build`](crate::Uploader::build) returns it.
///
/// It is the producer of a ring. An acquire call returns the next slot as a [`HostSlot`], which borrows this side.
/// [`HostSlot::reserve`] converts it to a [`ReservedSlot`], which does not: several threads can then fill slots at the
/// same time and commit them in any order. The batches are received in the order of the reservations. Threads share this
/// side under a lock, held while a slot is acquired and reserved.
///
/// Call [`finish`](HostSlots::finish) at the end of the data. If it is dropped without this call, the training side
/// receives [`Error::Abandoned`] after the last batch, because the data may be incomplete.
///
/// # Errors
///
/// Every acquire call returns
/// - the error that ended the uploader;
/// - [`Error::Closed`]: the [`DeviceBatches`](crate::DeviceBatches) were dropped;
/// - [`Error::SlotHeld`]: with `overlap(false)`, a lease holds the next device slot. No other thread would copy the
///   batch later, so it needs that slot too.
pub struct HostSlots<M: 'static> {
    // Dropped in this order: the copy thread is joined after both sides are gone.
    ring: Producer<'static, usize>,
    end: End<M>,
    _thread: Option<Arc<Thread>>,
}

/// Tells the copies that the filling side is gone.
struct End<M: 'static> {
    hosts: Arc<Hosts<M>>,
    finished: bool,
    /// `None` with a copy thread.
    hand: Option<Arc<Hand<M>>>,
}

impl<M: 'static> Drop for End<M> {
    fn drop(&mut self) {
        if !self.finished {
            // A reserved slot that is open is not waited for.
            self.hosts.close();
        }
        self.hosts.tell();
        // An error is the other side's too.
        let _ = self.hand.as_ref().map(|hand| hand.pump());
    }
}

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
    pub(crate) fn new(
        ring: Producer<'static, usize>,
        hosts: Arc<Hosts<M>>,
        hand: Option<Arc<Hand<M>>>,
        thread: Option<Arc<Thread>>,
    ) -> Self {
        Self { ring, end: End { hosts, finished: false, hand }, _thread: thread }
    }

    /// Waits until the previous copy from the next host slot is complete, and returns the slot. Do not wait for a
    /// [`ReservedSlot`] that the same thread holds.
    ///
    /// # Errors
    ///
    /// See [`HostSlots`]. With `overlap(false)`, also [`Error::Full`] as for [`try_acquire`](HostSlots::try_acquire).
    pub fn acquire(&mut self) -> Result<HostSlot<'_, M>, Error> {
        now(self.slot(Waiting::Forever))
    }

    /// Returns the next slot if it is free. Does not wait for another thread.
    ///
    /// # Errors
    ///
    /// - [`Error::Full`]: the slot is being copied, or it was committed and not copied yet, or a [`ReservedSlot`] holds
    ///   it. With `overlap(false)`, the call waits for the copy.
    /// - The errors of [`HostSlots`].
    pub fn try_acquire(&mut self) -> Result<HostSlot<'_, M>, Error> {
        now(self.slot(Waiting::No))
    }

    /// Waits until the next slot is free or `deadline` passes, and returns the slot. With `overlap(false)` it waits for
    /// the lease that holds the next device slot.
    ///
    /// # Errors
    ///
    /// - [`Error::Full`]: the slot is still in use at the deadline.
    /// - The errors of [`HostSlots`].
    pub fn acquire_deadline(&mut self, deadline: Instant) -> Result<HostSlot<'_, M>, Error> {
        now(self.slot(Waiting::Until(deadline)))
    }

    /// Returns the next slot if it is free. Otherwise returns `Pending`, and wakes the task of `cx` when it is. With
    /// `overlap(false)`, wakes the task when the lease that holds the next device slot is dropped.
    ///
    /// # Errors
    ///
    /// See [`HostSlots`]. [`Error::SlotHeld`] only if a capture holds the slot: nothing wakes the task then.
    pub fn poll_acquire(&mut self, cx: &mut Context<'_>) -> Poll<Result<HostSlot<'_, M>, Error>> {
        self.slot(Waiting::Task(cx))
    }

    fn slot(&mut self, waiting: Waiting<'_, '_>) -> Poll<Result<HostSlot<'_, M>, Error>> {
        let Self { ring, end, .. } = self;
        let acquired = match (&end.hand, waiting) {
            (Some(hand), waiting) => {
                if let Err(error) = ready!(hand.wait(ring, waiting)) {
                    return Poll::Ready(Err(error));
                }
                ring.try_acquire()
            }
            (None, Waiting::No) => ring.try_acquire(),
            (None, Waiting::Until(deadline)) => ring.acquire_deadline(deadline),
            (None, Waiting::Forever) => ring.acquire().map_err(TryAcquireError::from),
            (None, Waiting::Task(cx)) => ready!(ring.poll_acquire(cx)).map_err(TryAcquireError::from),
        };
        Poll::Ready(match acquired {
            Ok(slot) => Ok(HostSlot { slot, end }),
            Err(TryAcquireError::Full) => Err(Error::Full),
            Err(_closed) => Err(end.hosts.ended()),
        })
    }

    /// Returns the number of host slots.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.ring.depth()
    }

    /// Marks the end of the data: nothing more will be acquired. The training side receives all batches that were
    /// committed or reserved, then `None`.
    ///
    /// A [`ReservedSlot`] may still be open, on any thread. The training side waits for it.
    pub fn finish(mut self) {
        self.end.finished = true;
        self.ring.finish();
    }
}

/// A free host slot to fill in place: page-locked memory of the uploader's slot size. It dereferences to its bytes.
/// CUDA does not guarantee an alignment.
///
/// **Dropping it does not commit the batch**: call [`commit`](HostSlot::commit). The next acquire call then returns the
/// same slot. The slot contains bytes of an earlier batch, or zeros.
#[must_use = "a slot dropped without `commit` is not handed over"]
pub struct HostSlot<'p, M: 'static> {
    slot: WriteSlot<'p, 'static, usize>,
    end: &'p End<M>,
}

impl<M: 'static> HostSlot<'_, M> {
    /// Converts this guard to one that does not borrow the [`HostSlots`], which can then hand out the next slot.
    pub fn reserve(self) -> ReservedSlot<M> {
        let (index, End { hosts, hand, .. }) = (*self.slot, self.end);
        ReservedSlot {
            seq: self.slot.seq(),
            slot: Some(self.slot.reserve()),
            index,
            flushed: 0,
            ended: false,
            hosts: hosts.clone(),
            hand: hand.clone(),
        }
    }

    /// Commits the first `len` bytes of the slot as a batch: see [`ReservedSlot::commit`].
    ///
    /// # Errors
    ///
    /// Those of [`ReservedSlot::commit`]. If `len` is too large, the next acquire call returns the same slot.
    pub fn commit(self, len: usize, meta: M) -> Result<(), Error> {
        self.end.hosts.check("len", len)?;
        self.reserve().commit(len, meta)
    }

    /// Returns the sequence number of the batch: that of its [`Lease`](crate::Lease::seq).
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.slot.seq()
    }
}

/// The result of a call that is not a task's.
fn now<T>(poll: Poll<T>) -> T {
    let Poll::Ready(value) = poll else { unreachable!("only a task is pending") };
    value
}

impl<M: 'static> Deref for HostSlot<'_, M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialized bytes that this guard owns: the copies of the slot's previous batch are done.
        unsafe { &*self.end.hosts.rest(*self.slot, 0) }
    }
}

impl<M: 'static> DerefMut for HostSlot<'_, M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` excludes other references.
        unsafe { &mut *self.end.hosts.rest(*self.slot, 0) }
    }
}

/// A host slot to fill that does not borrow the [`HostSlots`]. [`HostSlot::reserve`] returns it. It dereferences to its
/// bytes, without those that were [flushed](ReservedSlot::flush).
///
/// Several may exist at the same time, on any threads, and may be committed in any order. It may outlive the
/// [`HostSlots`]. If both sides of the uploader are dropped, nothing waits for it.
///
/// * **Dropped** without a commit: the training side receives [`Error::Cancelled`] at its position, once.
/// * **Leaked** (`mem::forget`): the slot is never reused, and the training side waits at its position, also after
///   [`finish`](HostSlots::finish). If the [`HostSlots`] are dropped without it, the training side receives
///   [`Error::Abandoned`].
#[must_use = "a slot dropped without `commit` is received as `Cancelled`"]
pub struct ReservedSlot<M: 'static> {
    /// `None` once a part was handed over.
    slot: Option<twinbuf_core::ReservedSlot<'static, usize>>,
    seq: u64,
    index: usize,
    /// Bytes at the slot's start that were handed over.
    flushed: usize,
    /// The batch was committed.
    ended: bool,
    hosts: Arc<Hosts<M>>,
    hand: Option<Arc<Hand<M>>>,
}

impl<M: 'static> ReservedSlot<M> {
    /// Commits the first `len` bytes of the slot as a batch. They are copied to the device. The batch's
    /// [`Lease`](crate::Lease) returns the value `meta`. `len` may be 0, for a batch without bytes: nothing is copied,
    /// and a reader can report its errors in order.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: `len` exceeds the size of the slot.
    /// - The error that ended the uploader.
    /// - [`Error::Closed`]: the [`DeviceBatches`](crate::DeviceBatches) were dropped, or the [`HostSlots`] were without `finish`.
    ///
    /// In all cases the batch is not committed.
    pub fn commit(mut self, len: usize, meta: M) -> Result<(), Error> {
        self.hosts.check("len", len)?;
        self.ended = true;
        // Write-combined memory needs no fence here. On x86 the lock and the ring hand over with a locked instruction,
        // which drains the write-combining buffers (Intel SDM, volume 3, "Memory Types"). On aarch64 such memory is
        // Normal Non-cacheable: the release orders the stores before the hand-over, and the driver's barrier before
        // starting the copy engine comes after that (Arm ARM, B2.3).
        self.hand_over(Handed::All(len, meta))
    }

    /// Starts the copies of all complete [chunks](crate::Uploader::chunk_bytes) within the first `filled` bytes of
    /// the slot, once the batches before it are committed. The caller continues to fill the rest.
    ///
    /// **After this call, the slot dereferences to the bytes after these chunks**: its first
    /// [`flushed`](ReservedSlot::flushed) bytes are no longer accessible. `filled` always counts from the original start
    /// of the slot. [`commit`](ReservedSlot::commit) copies the rest. If the slot is dropped instead, the batch is
    /// cancelled.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: `filled` exceeds the size of the slot.
    /// - The other errors of [`commit`](ReservedSlot::commit).
    pub fn flush(&mut self, filled: usize) -> Result<(), Error> {
        self.hosts.check("filled", filled)?;
        // The last chunk is left to `commit`.
        let until = filled.min(self.hosts.bytes - 1) / self.hosts.chunk * self.hosts.chunk;
        if until <= self.flushed {
            return Ok(());
        }
        // These bytes are not written to from here on, even if the call below fails.
        self.flushed = until;
        self.hand_over(Handed::Part(until))
    }

    /// Returns how many bytes [`flush`](ReservedSlot::flush) has already handed over, counted from the start of the
    /// slot.
    #[must_use]
    pub fn flushed(&self) -> usize {
        self.flushed
    }

    /// Returns the sequence number of the batch: that of its [`Lease`](crate::Lease::seq).
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.seq
    }

    fn hand_over(&mut self, handed: Handed<M>) -> Result<(), Error> {
        self.hosts.hand_over(self.index, handed)?;
        if let Some(slot) = self.slot.take() {
            slot.commit().map_err(|Closed| self.hosts.ended())?;
        }
        self.told()
    }

    /// The copies go on: on their thread, or here.
    fn told(&self) -> Result<(), Error> {
        self.hosts.tell();
        self.hand.as_ref().map_or(Ok(()), |hand| hand.pump())
    }
}

impl<M: 'static> Drop for ReservedSlot<M> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // An error is that of a later call too.
        if self.slot.is_none() {
            let _ = self.hand_over(Handed::Cancelled);
        } else {
            drop(self.slot.take());
            let _ = self.told();
        }
    }
}

impl<M: 'static> Deref for ReservedSlot<M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialized bytes that this guard owns: the copies of the slot's previous batch are done, and this
        // batch's copies read only the bytes before `flushed`. The slot is not handed out again before the guard has
        // handed over the rest: until then a part that was handed over keeps it (`Copies::open`), or the filling side
        // has ended (`Handed::Gone`).
        unsafe { &*self.hosts.rest(self.index, self.flushed) }
    }
}

impl<M: 'static> DerefMut for ReservedSlot<M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` excludes other references.
        unsafe { &mut *self.hosts.rest(self.index, self.flushed) }
    }
}

debug!([M: 'static] HostSlots<M>, this, depth: this.depth(), overlap: this.end.hand.is_none(), error: this.end.hosts.fate.get());

debug!([M: 'static] HostSlot<'_, M>, this, bytes: this.len());

debug!([M: 'static] ReservedSlot<M>, this, seq: this.seq, bytes: this.len());
