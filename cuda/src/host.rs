//! The filling side: hands out host slots in turn, to be filled by any number of threads.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use twinbuf_core::{Closed, Producer, TryAcquireError, WriteSlot};

use crate::copy::{Hand, Waiting};
use crate::error::{Error, Fate, ended};
use crate::slot::HostBuf;

/// The filling side of an uploader: hands out free host slots. [`Uploader::build`](crate::Uploader::build) returns it.
///
/// It is the producer of a ring. An acquire call returns the next slot as a [`HostSlot`], which borrows this side.
/// [`HostSlot::reserve`] converts it to a [`ReservedSlot`], which does not: several threads can then fill slots at the
/// same time and commit them in any order. The batches are received in the order in which the slots were acquired. To
/// share this side between threads, hold a lock while a slot is acquired and reserved.
///
/// Call [`finish`](HostSlots::finish) at the end of the data. If the `HostSlots` are dropped without this call, the
/// training side receives [`Error::Abandoned`] after the last batch, because the data may be incomplete.
///
/// # Errors
///
/// Every acquire call returns
/// - the error that ended the uploader;
/// - [`Error::Closed`]: the copies have ended, because the [`DeviceBatches`](crate::DeviceBatches) were dropped or the
///   caller's code panicked in a copy;
/// - [`Error::SlotHeld`]: with `overlap(false)`, the next device slot is in use: its batch was not received yet, or a
///   lease holds it. No other thread would copy the new batch later, so it needs that slot too.
pub struct HostSlots<M: 'static> {
    // Fields drop in this order: `ring` must end before the last `_thread` joins the copy thread, which would wait for
    // a batch otherwise.
    pub(crate) ring: Producer<'static, HostBuf<M>>,
    pub(crate) copying: Copying<M>,
    pub(crate) _thread: ThreadShare,
}

/// Keeps the copies going after each commit. A copy thread needs nothing: the ring wakes it. Without one, the filling
/// side issues the copies itself, after a commit and when it is dropped.
pub(crate) struct Copying<M: 'static> {
    pub(crate) fate: Arc<Fate>,
    /// `None` with a copy thread.
    pub(crate) hand: Option<Arc<Hand<M>>>,
}

impl<M: 'static> Copying<M> {
    fn go_on(&self) -> Result<(), Error> {
        self.hand.as_ref().map_or(Ok(()), |hand| hand.pump())
    }

    /// The result of a commit.
    fn committed(&self, committed: Result<(), Closed>) -> Result<(), Error> {
        // Write-combined memory needs no fence before a commit. On x86 the ring hands over with a locked instruction,
        // which drains the write-combining buffers (Intel SDM, volume 3, "Memory Types"). On aarch64 such memory is
        // Normal Non-cacheable: the release orders the stores before the hand-over, and the driver's barrier before
        // starting the copy engine comes after that (Arm ARM, B2.3).
        committed.map_err(|Closed| ended(&self.fate))?;
        self.go_on()
    }
}

impl<M: 'static> Drop for Copying<M> {
    fn drop(&mut self) {
        // The error is ignored here: later calls of both sides return it.
        let _ = self.go_on();
    }
}

/// A side's share of the copy thread: its drop wakes the thread; the last one joins it, but not from itself.
/// `None` without a thread.
#[derive(Clone)]
pub(crate) struct ThreadShare(pub(crate) Option<Arc<JoinHandle<()>>>);

impl Drop for ThreadShare {
    fn drop(&mut self) {
        let Some(thread) = self.0.take() else { return };
        // Wake the copy thread: it may wait for a batch that is never committed, and must see that nobody receives.
        thread.thread().unpark();
        // Code of the caller, such as a waker, may drop the last side on the copy thread. A thread cannot join itself,
        // so it ends without being joined.
        let other = |thread: &JoinHandle<()>| thread.thread().id() != thread::current().id();
        if let Some(thread) = Arc::into_inner(thread).filter(other) {
            // A panic is ignored here: the panic hook has reported it, and both sides see the end.
            let _ = thread.join();
        }
    }
}

impl<M: 'static> HostSlots<M> {
    /// Waits until the previous copy from the next host slot is complete, and returns the slot. Do not wait for a
    /// [`ReservedSlot`] that the same thread holds.
    ///
    /// # Errors
    ///
    /// See [`HostSlots`]. With `overlap(false)`, also [`Error::Full`] as for [`try_acquire`](HostSlots::try_acquire).
    pub fn acquire(&mut self) -> Result<HostSlot<'_, M>, Error> {
        now(self.slot(Waiting::Forever))
    }

    /// Returns the next slot if it is free.
    ///
    /// # Errors
    ///
    /// - [`Error::Full`]: the slot was committed, and its copy was not seen to end, or a [`ReservedSlot`] holds it. With
    ///   `overlap(false)`, only the latter: the call waits for the copy.
    /// - The errors of [`HostSlots`].
    pub fn try_acquire(&mut self) -> Result<HostSlot<'_, M>, Error> {
        now(self.slot(Waiting::No))
    }

    /// Waits until the next slot is free or `deadline` passes, and returns the slot. With `overlap(false)` it waits
    /// until `deadline` for the release of the next device slot, and then without a limit for the copy from the next
    /// host slot.
    ///
    /// # Errors
    ///
    /// - [`Error::Full`]: the slot is still in use at the deadline. With `overlap(false)`: a [`ReservedSlot`] holds it,
    ///   at once.
    /// - The errors of [`HostSlots`]: [`Error::SlotHeld`] at the deadline.
    pub fn acquire_deadline(&mut self, deadline: Instant) -> Result<HostSlot<'_, M>, Error> {
        now(self.slot(Waiting::Until(deadline)))
    }

    /// Returns the next slot if it is free. Otherwise returns `Pending`, and wakes the task of `cx` when it is. With
    /// `overlap(false)`, it returns `Pending` only if the next device slot is in use, and wakes the task when the lease
    /// of its batch is dropped; the call itself waits for the copy from the next host slot.
    ///
    /// # Errors
    ///
    /// See [`HostSlots`]. [`Error::SlotHeld`] only while a capture holds a slot: nothing wakes the task when the
    /// capture ends, nor when a lease is dropped during the capture of a stream that used it. With `overlap(false)`,
    /// also [`Error::Full`]: a [`ReservedSlot`] holds the slot.
    pub fn poll_acquire(&mut self, cx: &mut Context<'_>) -> Poll<Result<HostSlot<'_, M>, Error>> {
        self.slot(Waiting::Task(cx))
    }

    fn slot(&mut self, waiting: Waiting<'_, '_>) -> Poll<Result<HostSlot<'_, M>, Error>> {
        let Self { ring, copying, .. } = self;
        let acquired = match (&copying.hand, waiting) {
            (Some(hand), waiting) => {
                ready!(hand.wait(ring, waiting))?;
                ring.try_acquire()
            }
            (None, Waiting::No) => ring.try_acquire(),
            (None, Waiting::Until(deadline)) => ring.acquire_deadline(deadline),
            (None, Waiting::Forever) => ring.acquire().map_err(TryAcquireError::from),
            (None, Waiting::Task(cx)) => ready!(ring.poll_acquire(cx)).map_err(TryAcquireError::from),
        };
        Poll::Ready(match acquired {
            Ok(slot) => Ok(HostSlot { slot, copying }),
            Err(TryAcquireError::Full) => Err(Error::Full),
            Err(_closed) => Err(ended(&copying.fate)),
        })
    }

    /// Returns the number of host slots.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.ring.depth()
    }

    /// Marks the end of the data: nothing more will be acquired. The training side receives all batches that were
    /// committed or reserved ([`Error::Cancelled`] for those dropped), then `None`.
    ///
    /// A [`ReservedSlot`] may still be open, on any thread. The end comes after it.
    pub fn finish(self) {
        self.ring.finish();
    }
}

/// A free host slot to fill in place: page-locked or lent memory of the uploader's slot size. It dereferences to its
/// bytes. CUDA does not guarantee an alignment.
///
/// **Dropping it does not commit the batch**: call [`commit`](HostSlot::commit). The next acquire call then returns the
/// same slot. The slot contains what was last written to it: at first zeros, or what lent memory contains.
#[must_use = "a slot dropped without `commit` is not handed over"]
pub struct HostSlot<'p, M: 'static> {
    slot: WriteSlot<'p, 'static, HostBuf<M>>,
    copying: &'p Copying<M>,
}

impl<M: 'static> HostSlot<'_, M> {
    /// Converts this guard to one that does not borrow the [`HostSlots`], which can then hand out the next slot.
    pub fn reserve(self) -> ReservedSlot<M> {
        let Copying { fate, hand } = self.copying;
        let copying = Copying { fate: fate.clone(), hand: hand.clone() };
        ReservedSlot { slot: self.slot.reserve(), copying }
    }

    /// Commits the first `len` bytes of the slot as a batch: see [`ReservedSlot::commit`].
    ///
    /// # Errors
    ///
    /// Those of [`ReservedSlot::commit`]. If `len` is too large, the next acquire call returns the same slot.
    pub fn commit(mut self, len: usize, meta: M) -> Result<(), Error> {
        self.slot.put(len, meta)?;
        self.copying.committed(self.slot.commit())
    }

    /// Returns the sequence number of the batch: that of its [`Lease`](crate::Lease::seq).
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.slot.seq()
    }
}

/// The result of a call that does not wait as a task: it is never pending.
fn now<T>(poll: Poll<T>) -> T {
    let Poll::Ready(value) = poll else { unreachable!("only a task is pending") };
    value
}

impl<M: 'static> Deref for HostSlot<'_, M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: this guard owns the bytes: the copy of the slot's previous batch is done.
        unsafe { self.slot.memory.bytes() }
    }
}

impl<M: 'static> DerefMut for HostSlot<'_, M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: this guard owns the bytes, as in `deref`, and `&mut self` excludes other references.
        unsafe { self.slot.memory.bytes_mut() }
    }
}

/// A host slot to fill that does not borrow the [`HostSlots`]. [`HostSlot::reserve`] returns it. It dereferences to its
/// bytes.
///
/// Several may exist at the same time, on any threads, and may be committed in any order. It may outlive the
/// [`HostSlots`]. If both sides of the uploader are dropped, nothing waits for it.
///
/// * **Dropped** without a commit: the training side receives [`Error::Cancelled`] at its position, once.
/// * **Leaked** (`mem::forget`): the slot is never reused, and the training side waits at its position (without a copy
///   thread: receives [`Error::Empty`]), also after [`finish`](HostSlots::finish). If the [`HostSlots`] are dropped
///   without it, the training side receives [`Error::Abandoned`].
#[must_use = "a slot dropped without `commit` is received as `Cancelled`"]
pub struct ReservedSlot<M: 'static> {
    // `slot` drops first and cancels its batch. The drop of `copying` then issues the copies that waited for it.
    slot: twinbuf_core::ReservedSlot<'static, HostBuf<M>>,
    copying: Copying<M>,
}

impl<M: 'static> ReservedSlot<M> {
    /// Commits the first `len` bytes of the slot as a batch. They are copied to the device. The batch's
    /// [`Lease`](crate::Lease) returns the value `meta`. `len` may be 0, for a batch without bytes: nothing is copied,
    /// and a reader can report its errors in order.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: `len` exceeds the size of the slot. The slot is dropped: the training side receives
    ///   [`Error::Cancelled`].
    /// - The error that ended the uploader.
    /// - [`Error::Closed`]: the copies have ended, because the [`DeviceBatches`](crate::DeviceBatches) were dropped,
    ///   the [`HostSlots`] were dropped without `finish`, or the caller's code panicked in a copy.
    ///
    /// The batch is not committed. Exception: with `overlap(false)`, an error of a copy is returned after the commit,
    /// and the batch may still be received.
    pub fn commit(self, len: usize, meta: M) -> Result<(), Error> {
        let Self { copying, mut slot } = self;
        slot.put(len, meta)?;
        copying.committed(slot.commit())
    }

    /// Returns the sequence number of the batch: that of its [`Lease`](crate::Lease::seq).
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.slot.seq()
    }
}

impl<M: 'static> Deref for ReservedSlot<M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: this guard owns the bytes: the copy of the slot's previous batch is done.
        unsafe { self.slot.memory.bytes() }
    }
}

impl<M: 'static> DerefMut for ReservedSlot<M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: this guard owns the bytes, as in `deref`, and `&mut self` excludes other references.
        unsafe { self.slot.memory.bytes_mut() }
    }
}

debug!([M: 'static] HostSlots<M>, this, depth: this.depth(), overlap: this.copying.hand.is_none(), error: this.copying.fate.get());

debug!([M: 'static] HostSlot<'_, M>, this, bytes: this.len());

debug!([M: 'static] ReservedSlot<M>, this, seq: this.seq(), bytes: this.len());
