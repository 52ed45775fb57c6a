//! The producer's side: acquire a free slot, fill it in place, commit it.

use core::fmt;
use core::future::poll_fn;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::task::{Context, Poll};
use core::time::Duration;

use crate::error::{Closed, TryAcquireError};
use crate::raw::{Cursor, Forever, Patience, RingRef, Share, Side, SlotRef, TimedOut, Until};
use crate::state::{Lap, ProducerView, State};
use crate::wait::{Auto, Wait, WaitUntil};

/// The side of a ring that fills slots.
///
/// Dropping a producer tells the consumer that the data was *abandoned*. Only [`finish`](Producer::finish) marks the
/// end of the data: a panic, an early return or a lost error never looks like the end.
///
/// # One slot, or several
///
/// [`acquire`](Producer::acquire) returns the next slot as a [`WriteSlot`]. A `WriteSlot` borrows the producer: only
/// one can exist at a time, and dropping it hands nothing over. [`WriteSlot::reserve`] converts it to a
/// [`ReservedSlot`], and the producer can then acquire the next slot while the reserved slot is being filled, on
/// this thread or another.
///
/// One thread or task uses the producer at a time: it is `Send` if `T` is `Send` and `W` is `Sync`, but not `Sync`, and
/// so is a [`WriteSlot`]. Workers of a pool share it in a `Mutex`, which they lock to reserve a slot, not to fill it.
/// If a worker waits in [`acquire`](Producer::acquire) with the mutex locked, the other workers sleep, and each has to
/// be woken. So each worker first tries [`try_acquire`](Producer::try_acquire) a few times, and yields in between with
/// the mutex unlocked: see the example `pool.rs`.
///
/// # Cancelling
///
/// A timeout, a dropped future or a dropped [`WriteSlot`] loses no slot: the next acquire call is for the same slot.
pub struct Producer<'r, T, W: Wait = Auto> {
    ring: RingRef<'r, T, W>,
    at: Cursor,
    finished: bool,
    /// The last field, so that it is dropped last: it frees the ring if this is the ring's last owner.
    share: Share<'r, T, W>,
}

impl<'r, T, W: Wait> Producer<'r, T, W> {
    pub(crate) fn new(ring: RingRef<'r, T, W>, share: Share<'r, T, W>) -> Self {
        Self { ring, at: Cursor::START, finished: false, share }
    }

    /// Returns the next slot if it is free. Never waits. The call costs one atomic load.
    ///
    /// # Errors
    ///
    /// - [`Full`](TryAcquireError::Full): the consumer has not released the slot, or an earlier [`ReservedSlot`]
    ///   still holds it.
    /// - [`Closed`](TryAcquireError::Closed): the consumer is dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::{DoubleBuffer, TryAcquireError};
    /// let mut ring = DoubleBuffer::new([0, 0]);
    /// let (mut tx, rx) = ring.split();
    /// tx.try_acquire().unwrap().commit().unwrap();
    /// tx.try_acquire().unwrap().commit().unwrap();
    /// assert_eq!(tx.try_acquire().unwrap_err(), TryAcquireError::Full);
    /// drop(rx);
    /// assert_eq!(tx.try_acquire().unwrap_err(), TryAcquireError::Closed);
    /// ```
    #[inline]
    pub fn try_acquire(&mut self) -> Result<WriteSlot<'_, 'r, T, W>, TryAcquireError> {
        let seen = self.slot().state();
        if !free_or_closed(seen, self.at.lap) {
            return Err(TryAcquireError::Full);
        }
        Ok(self.write_slot(seen)?)
    }

    /// Waits until the next slot is free, and returns it.
    ///
    /// If every slot of the ring is reserved, the call waits until the oldest [`ReservedSlot`] has been committed
    /// or dropped *and* the consumer has released its slot. Do not wait for a guard that the same thread holds.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the consumer is dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// let mut slot = tx.acquire()?;
    /// *slot = 5;
    /// slot.commit()?;
    /// assert_eq!(*rx.recv().unwrap().unwrap(), 5);
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    #[inline]
    pub fn acquire(&mut self) -> Result<WriteSlot<'_, 'r, T, W>, Closed> {
        let Ok(seen) = self.wait(&Forever);
        self.write_slot(seen)
    }

    /// Waits up to `timeout` until the next slot is free, and returns it. Waits without a limit if
    /// [`after`](WaitUntil::after) returns `None`.
    ///
    /// # Errors
    ///
    /// - [`Full`](TryAcquireError::Full): the slot is still in use at the timeout.
    /// - [`Closed`](TryAcquireError::Closed): the consumer is dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use twinbuf_core::{HeapRing, TryAcquireError};
    /// let (mut tx, _rx) = HeapRing::new([0; 2]).into_handles();
    /// tx.acquire().unwrap().commit().unwrap();
    /// tx.acquire().unwrap().commit().unwrap();
    /// let timeout = Duration::from_millis(1);
    /// assert_eq!(tx.acquire_timeout(timeout).unwrap_err(), TryAcquireError::Full);
    /// ```
    pub fn acquire_timeout(&mut self, timeout: Duration) -> Result<WriteSlot<'_, 'r, T, W>, TryAcquireError>
    where
        W: WaitUntil,
    {
        match self.ring.strategy().after(timeout) {
            Some(deadline) => self.acquire_deadline(deadline),
            None => Ok(self.acquire()?),
        }
    }

    /// Waits until the next slot is free or `deadline` passes, and returns the slot. If the slot is free, the call
    /// returns it even after the deadline.
    ///
    /// # Errors
    ///
    /// The errors of [`acquire_timeout`](Producer::acquire_timeout): `Full` and `Closed`.
    ///
    /// # Examples
    ///
    /// ```
    /// let (mut tx, _rx) = twinbuf_core::HeapRing::new([0; 2]).into_handles();
    /// let deadline = std::time::Instant::now();
    /// assert!(tx.acquire_deadline(deadline).is_ok());
    /// ```
    pub fn acquire_deadline(
        &mut self,
        deadline: W::Instant,
    ) -> Result<WriteSlot<'_, 'r, T, W>, TryAcquireError>
    where
        W: WaitUntil,
    {
        match self.wait(&Until(deadline)) {
            Ok(seen) => Ok(self.write_slot(seen)?),
            Err(TimedOut(_)) => Err(TryAcquireError::Full),
        }
    }

    /// Returns the next slot if it is free. Otherwise returns `Pending`, and wakes the task of `cx` when this may have
    /// changed.
    ///
    /// Only the waker of the latest call is stored; the waker of an earlier call is dropped.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the consumer is dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::task::{Context, Poll, Waker};
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, _rx) = ring.split();
    /// let mut cx = Context::from_waker(Waker::noop());
    /// assert!(matches!(tx.poll_acquire(&mut cx), Poll::Ready(Ok(_))));
    /// ```
    pub fn poll_acquire(&mut self, cx: &mut Context<'_>) -> Poll<Result<WriteSlot<'_, 'r, T, W>, Closed>> {
        self.poll_free(cx).map(|seen| self.write_slot(seen))
    }

    /// Waits as a task until the next slot is free, and returns it. Dropping the future loses no slot.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the consumer is dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
    /// # fn block_on<F: Future>(future: F) -> F::Output {
    /// #     match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
    /// #         Poll::Ready(output) => output,
    /// #         Poll::Pending => unreachable!(),
    /// #     }
    /// # }
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// block_on(async {
    ///     let mut slot = tx.acquire_async().await?;
    ///     *slot = 5;
    ///     slot.commit()
    /// })?;
    /// assert_eq!(*rx.recv().unwrap().unwrap(), 5);
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    pub async fn acquire_async(&mut self) -> Result<WriteSlot<'_, 'r, T, W>, Closed> {
        let seen = poll_fn(|cx| self.poll_free(cx)).await;
        self.write_slot(seen)
    }

    /// Waits for the next slot, calls `fill` to fill it in place, and commits it. Returns the result of `fill`.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the consumer is dropped. If the consumer is dropped while `fill` runs, the result of `fill` is
    /// dropped too.
    ///
    /// # Panics
    ///
    /// If `fill` panics (the slot is then not committed), or as [`WriteSlot::commit`].
    ///
    /// # Examples
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.fill(|slot| *slot = 5)?;
    /// assert_eq!(*rx.recv().unwrap().unwrap(), 5);
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    pub fn fill<R>(&mut self, fill: impl FnOnce(&mut T) -> R) -> Result<R, Closed> {
        let mut slot = self.acquire()?;
        let result = fill(&mut slot);
        slot.commit()?;
        Ok(result)
    }

    /// Marks the end of the data: nothing more will be acquired. The consumer receives all slots that were committed or
    /// reserved (`Cancelled` for those dropped), then `None`.
    ///
    /// A [`ReservedSlot`] may still be open, on any thread. Receive calls treat it as if the producer still existed.
    /// The ring cannot distinguish an open guard from a leaked one: at the position of a leaked guard, a blocking
    /// call waits forever, `try_recv` and a call with a time limit return [`Empty`](crate::TryRecvError::Empty), and
    /// no call reports the end.
    ///
    /// # Panics
    ///
    /// If waking the consumer's task panics. The end has then been marked.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::{DoubleBuffer, TryRecvError};
    /// let mut ring = DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// let slot = tx.acquire()?.reserve();
    /// tx.finish();
    /// assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Empty); // the slot is open
    /// slot.commit()?;
    /// assert!(matches!(rx.try_recv(), Ok(Some(_))));
    /// assert!(matches!(rx.try_recv(), Ok(None)));
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    pub fn finish(mut self) {
        self.finished = true;
    }

    /// Returns `true` if the consumer is dropped, or the ring ended by a leak ([`split`](crate::Ring::split)).
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (tx, mut rx) = ring.split();
    /// assert!(!tx.is_closed());
    /// drop(rx);
    /// assert!(tx.is_closed());
    /// ```
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.slot().state().is_closed()
    }

    /// Returns the oldest committed slot that the consumer did not pass before it was dropped. Returns `None` if there
    /// is none, or while the consumer exists. Never waits.
    ///
    /// A consumer that gives up can say why in the slot that it reads, with
    /// [`put_back`](crate::ReadSlot::put_back). As soon as a call returns [`Closed`], the producer finds the reason
    /// here. A producer that gives up needs no such call: it commits the reason as its last slot.
    ///
    /// # Examples
    ///
    /// ```
    /// let (mut tx, mut rx) = twinbuf_core::HeapRing::new([const { Ok(vec![]) }; 2]).into_handles();
    /// tx.fill(|slot| *slot = Ok(vec![1; 512])).unwrap();
    /// let mut slot = rx.recv()?.unwrap();
    /// *slot = Err("the disk is full"); // instead of the bytes
    /// slot.put_back();
    /// drop(rx);
    /// assert!(tx.acquire().is_err());
    /// assert_eq!(tx.unread(), Some(&mut Err("the disk is full")));
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    pub fn unread(&mut self) -> Option<&mut T> {
        let (depth, mut oldest) = (self.depth(), None);
        // Look at the newest slot first. The consumer marks its end on the oldest slot first, so once we see the end on
        // one slot, we see it on every older slot too.
        for back in 1..=depth {
            let slot = self.ring.slot(Cursor { index: (self.at.index + depth - back) % depth, ..self.at });
            if slot.state().is_unread() {
                oldest = Some(slot);
            }
        }
        // SAFETY: the slot was committed and the consumer is gone, so no guard of the slot exists or can be made. The
        // reference borrows the producer.
        oldest.map(|slot| unsafe { slot.value_mut() })
    }

    /// Returns the number of slots in the ring.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.ring.len()
    }

    /// Returns the number of slots that were committed or cancelled and are not yet released. Both sides count the same
    /// slots. Other threads may change the number during the call.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// assert!(tx.is_empty());
    /// tx.fill(|slot| *slot = 1)?;
    /// assert_eq!((tx.len(), rx.len(), tx.depth()), (1, 1, 2));
    /// let slot = rx.recv().unwrap();
    /// assert_eq!(tx.len(), 1);
    /// drop(slot);
    /// assert_eq!((tx.len(), rx.len()), (0, 0));
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    #[must_use]
    pub fn len(&self) -> usize {
        self.ring.full()
    }

    /// Returns `true` if [`len`](Producer::len) is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ends both handles of a [`HeapRing`](crate::HeapRing) and returns its slots, in order. The slots stay at their
    /// addresses, except up to four small ones (see [`HeapRing`](crate::HeapRing)).
    ///
    /// # Errors
    ///
    /// Returns both handles unchanged if they belong to different rings, if they borrow the ring, or if a guard of
    /// the ring still exists or was leaked.
    ///
    /// # Examples
    ///
    /// ```
    /// let (mut tx, mut rx) = twinbuf_core::HeapRing::new([vec![1], vec![2]]).into_handles();
    /// tx.fill(|slot| slot.push(3)).unwrap();
    /// let slot = rx.recv().unwrap().unwrap().keep();
    /// let (tx, rx) = tx.reunite(rx).unwrap_err(); // the guard is alive
    /// drop(slot);
    /// assert_eq!(tx.reunite(rx).unwrap(), [vec![1, 3], vec![2]]);
    /// ```
    #[cfg(feature = "alloc")]
    #[allow(clippy::result_large_err, clippy::type_complexity)] // both handles are given back
    pub fn reunite(
        mut self,
        mut consumer: crate::Consumer<'r, T, W>,
    ) -> Result<alloc::vec::Vec<T>, (Self, crate::Consumer<'r, T, W>)> {
        if !self.share.is_all_with(consumer.share_mut()) {
            return Err((self, consumer));
        }
        // Drop both handles while we hold both shares: a share keeps the ring alive until both handles have ended.
        let shares = (self.share.take(), consumer.share_mut().take());
        drop((self, consumer));
        drop(shares.0);
        Ok(shares.1.into_slots().expect("no other share is left"))
    }

    #[inline]
    fn slot(&self) -> SlotRef<'r, T, W> {
        self.ring.slot(self.at)
    }

    /// Returns the guard of the next slot. The caller has found the slot free or closed, in state `seen`.
    #[inline]
    fn write_slot(&mut self, seen: State) -> Result<WriteSlot<'_, 'r, T, W>, Closed> {
        if seen.is_closed() { Err(Closed) } else { Ok(WriteSlot { producer: self, seen }) }
    }

    #[inline]
    fn advance(&mut self) {
        self.at = self.at.next(self.ring.len());
    }

    #[inline]
    fn wait<P: Patience<W>>(&mut self, patience: &P) -> Result<State, P::Over> {
        let lap = self.at.lap;
        let seen = self.slot().state();
        if free_or_closed(seen, lap) { Ok(seen) } else { self.wait_longer(seen, patience) }
    }

    #[cold]
    fn wait_longer<P: Patience<W>>(&mut self, seen: State, patience: &P) -> Result<State, P::Over> {
        let lap = self.at.lap;
        self.slot().wait(seen, |seen| free_or_closed(seen, lap), patience)
    }

    // `&mut self`, because a future that holds `&Producer` is not `Send`: `Producer` is not `Sync`.
    fn poll_free(&mut self, cx: &mut Context<'_>) -> Poll<State> {
        let lap = self.at.lap;
        self.slot().poll(Side::Producer, cx.waker(), |seen| free_or_closed(seen, lap))
    }
}

/// Whether a producer on lap `lap` has nothing to wait for.
#[inline]
fn free_or_closed(seen: State, lap: Lap) -> bool {
    match seen.for_producer(lap) {
        ProducerView::Free | ProducerView::Closed => true,
        ProducerView::Full | ProducerView::Reserved => false,
    }
}

impl<T, W: Wait> Drop for Producer<'_, T, W> {
    fn drop(&mut self) {
        // The waker is dropped when this function returns, after the consumer has been told of the end: its drop is
        // foreign code and may panic.
        let _waker = self.ring.unregister(Side::Producer);
        self.ring.end(self.at, if self.finished { State::finish } else { State::abandon }, Side::Consumer);
    }
}

impl<T, W: Wait> fmt::Debug for Producer<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("seq", &self.at.seq)
            .field("next_slot", &self.slot().state())
            .finish_non_exhaustive()
    }
}

/// A free slot to fill in place. It dereferences to the value. Only one `WriteSlot` exists at a time.
///
/// **Dropping it does not commit the slot**, because incomplete data must not reach the consumer. Call
/// [`commit`](WriteSlot::commit). A [`ReadSlot`](crate::ReadSlot) differs: dropping it *does* release the slot.
///
/// If a `WriteSlot` is dropped or leaked, nothing is handed over: the next acquire call returns **the same slot**. If
/// a device may still write to the slot, use a [`ReservedSlot`]: the ring reuses its slot only after the guard was
/// committed or dropped.
///
/// The slot contains what its last user left in it, or the initial value. Reuse it as a buffer.
///
/// A `WriteSlot` borrows the producer and cannot outlive it:
///
/// ```compile_fail,E0505
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (mut tx, _rx) = ring.split();
/// let slot = tx.acquire().unwrap();
/// drop(tx);
/// slot.commit();
/// ```
#[must_use = "a slot that is dropped without `commit` is not handed over"]
pub struct WriteSlot<'p, 'r, T, W: Wait = Auto> {
    producer: &'p mut Producer<'r, T, W>,
    /// The state in which the slot was found free.
    seen: State,
}

impl<'r, T, W: Wait> WriteSlot<'_, 'r, T, W> {
    /// Passes the slot to the consumer.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the consumer is dropped: nothing receives the slot. [`unread`](Producer::unread) may tell why.
    ///
    /// # Panics
    ///
    /// If waking the consumer's task panics (its `Waker` is foreign code). The slot has then been committed.
    ///
    /// # Examples
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// drop(tx.acquire()?); // not handed over: the next acquire returns the same slot
    /// tx.acquire()?.commit()?;
    /// assert!(rx.try_recv().is_ok());
    /// assert!(rx.try_recv().is_err());
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    #[inline]
    pub fn commit(self) -> Result<(), Closed> {
        let lap = self.producer.at.lap;
        let slot = self.producer.slot();
        let old = slot.hand_over(self.seen, &[Side::Consumer], |s| s.commit(lap), || self.producer.advance());
        if old.is_closed() { Err(Closed) } else { Ok(()) }
    }

    /// Converts this guard to one that does not borrow the producer, and moves the producer to the next slot.
    ///
    /// Several slots can then be filled at the same time, on any threads, and committed in any order. The consumer
    /// receives them in the order of their reservation. The call does not wait and does no atomic operation on the
    /// slot.
    ///
    /// # Examples
    ///
    /// ```
    /// let mut ring = twinbuf_core::Ring::<_, 3>::new([0; 3]);
    /// let (mut tx, mut rx) = ring.split();
    /// let mut first = tx.acquire()?.reserve();
    /// let mut second = tx.acquire()?.reserve();
    /// *second = 2;
    /// second.commit()?;
    /// assert!(rx.try_recv().is_err()); // the first slot comes first
    /// *first = 1;
    /// first.commit()?;
    /// assert_eq!(*rx.recv().unwrap().unwrap(), 1);
    /// assert_eq!(*rx.recv().unwrap().unwrap(), 2);
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    #[must_use = "a reserved slot that is dropped without `commit` reaches the consumer as `Cancelled`"]
    pub fn reserve(self) -> ReservedSlot<'r, T, W> {
        let at = self.producer.at;
        let slot = ReservedSlot {
            slot: self.producer.slot(),
            seen: self.seen,
            at,
            share: self.producer.share.share(),
        };
        self.producer.advance();
        slot
    }

    /// Returns the sequence number of the data in this slot, starting at 0. It counts the slots in the order in
    /// which the consumer receives them.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, _rx) = ring.split();
    /// tx.acquire()?.commit()?;
    /// assert_eq!(tx.acquire()?.seq(), 1);
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.producer.at.seq
    }
}

impl<T, W: Wait> Deref for WriteSlot<'_, '_, T, W> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the slot was found free on the producer's lap, so it belongs to the producer until `commit`. This
        // guard is the only one for it: it holds the producer, and with it the cursor. A `&mut` would need `&mut self`.
        unsafe { self.producer.slot().value() }
    }
}

impl<T, W: Wait> DerefMut for WriteSlot<'_, '_, T, W> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the slot belongs to the producer until `commit`, and `&mut self` excludes other references.
        unsafe { self.producer.slot().value_mut() }
    }
}

impl<T: fmt::Debug, W: Wait> fmt::Debug for WriteSlot<'_, '_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteSlot").field("seq", &self.seq()).field("value", &**self).finish()
    }
}

/// A slot to fill that does not borrow the producer. [`WriteSlot::reserve`] returns it. It dereferences to the value.
///
/// Several reserved slots may exist at the same time. They may move to other threads and may be committed in any
/// order. The consumer receives them in the order of their [`seq`](ReservedSlot::seq), and waits if one is not yet
/// committed. A guard may outlive its producer. In an owned ring of `'static` values and in a `static` ring it is
/// `'static`, and keeps the ring alive.
///
/// * **Committed:** the consumer receives the slot at its position in the order.
/// * **Dropped:** the consumer receives [`Cancelled`](crate::RecvError::Cancelled) at this position, once. Later
///   slots are not affected.
/// * **Leaked** (`mem::forget`): the ring never reuses the slot, and a ring on the heap is never freed. A DMA engine
///   or a driver that may still write to the slot can rely on this. The owner of a borrowed [`Ring`](crate::Ring)
///   can free its memory: give engines and drivers only a `ReservedSlot<'static, ..>`. The consumer waits at this
///   position, also after [`finish`](Producer::finish). When the producer is dropped without `finish`, the consumer
///   receives [`Abandoned`](crate::RecvError::Abandoned).
///
/// ```
/// use twinbuf_core::{HeapRing, RecvError};
/// let (mut tx, mut rx) = HeapRing::new([0; 3]).into_handles();
/// let first = tx.acquire()?.reserve();
/// let second = tx.acquire()?.reserve();
/// tx.finish(); // nothing more will be acquired
/// std::thread::spawn(move || second.commit());
/// drop(first);
/// assert_eq!(rx.recv().unwrap_err(), RecvError::Cancelled);
/// assert!(rx.recv().unwrap().is_some());
/// assert!(rx.recv().unwrap().is_none()); // the end
/// # Ok::<(), twinbuf_core::Closed>(())
/// ```
#[must_use = "a reserved slot that is dropped without `commit` reaches the consumer as `Cancelled`"]
pub struct ReservedSlot<'r, T, W: Wait = Auto> {
    slot: SlotRef<'r, T, W>,
    /// The state in which the slot was found free.
    seen: State,
    at: Cursor,
    /// The last field, so that it is dropped last: it frees the ring if this is the ring's last owner.
    share: Share<'r, T, W>,
}

/// The sides that may wait for a reserved slot: the consumer waits until the slot is filled; the producer, one lap
/// ahead, waits until it is free again.
const BOTH: &[Side] = &[Side::Consumer, Side::Producer];

impl<T, W: Wait> ReservedSlot<'_, T, W> {
    /// Passes the slot to the consumer. The consumer receives it at its position in the order.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the consumer is dropped: nothing receives the slot.
    ///
    /// # Panics
    ///
    /// If waking a task panics (its `Waker` is foreign code). The slot has then been committed. If the wakers of both
    /// sides panic, here or in the drop of this guard or of a [`KeptSlot`](crate::KeptSlot), the process aborts.
    #[inline]
    pub fn commit(self) -> Result<(), Closed> {
        let mut this = ManuallyDrop::new(self);
        // Our share keeps the ring alive during `hand_over`, which still uses the ring after the hand-over.
        let _share = core::mem::replace(&mut this.share, Share::BORROWED);
        let lap = this.at.lap;
        let old = this.slot.hand_over(this.seen, BOTH, |s| s.commit(lap), || ());
        if old.is_closed() { Err(Closed) } else { Ok(()) }
    }

    /// Returns the sequence number of the data in this slot, starting at 0. The consumer receives slots in this order.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.at.seq
    }
}

impl<T, W: Wait> Drop for ReservedSlot<'_, T, W> {
    /// Cancels the slot: see [`ReservedSlot`].
    fn drop(&mut self) {
        let lap = self.at.lap;
        self.slot.hand_over(self.seen, BOTH, |s| s.cancel(lap), || ());
    }
}

impl<T, W: Wait> Deref for ReservedSlot<'_, T, W> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the producer found the slot free on its lap and has moved on. It does not find the slot free again
        // before this guard commits or cancels, so this guard is the only one. A `&mut` would need `&mut self`.
        unsafe { self.slot.value() }
    }
}

impl<T, W: Wait> DerefMut for ReservedSlot<'_, T, W> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: no other guard of the slot exists before our commit or drop; `&mut self` excludes other references.
        unsafe { self.slot.value_mut() }
    }
}

impl<T: fmt::Debug, W: Wait> fmt::Debug for ReservedSlot<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReservedSlot").field("seq", &self.seq()).field("value", &**self).finish()
    }
}
