//! The consumer's side: receive a filled slot, use it in place, release it.

use core::fmt;
use core::future::poll_fn;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::task::{Context, Poll};
use core::time::Duration;

use crate::error::{RecvError, TryRecvError};
use crate::raw::{Cursor, Forever, Patience, RingRef, Share, Side, SlotRef, TimedOut, Until};
use crate::state::{ConsumerView, Lap, State};
use crate::wait::{Auto, Wait, WaitUntil};

/// The side of a ring that reads slots.
///
/// # One slot, or several
///
/// A receive call returns the next slot as a [`ReadSlot`]. A `ReadSlot` borrows the consumer: only one can exist at
/// a time. [`ReadSlot::keep`] converts it to a [`KeptSlot`], and the consumer can then receive the next slot while
/// the kept slot is in use, on this thread or another.
///
/// The ring reuses slots in order. In a ring of `N` slots, the consumer can receive `N - 1` further slots while one
/// slot is kept. The next [`recv`](Consumer::recv) then **waits until the kept slot is dropped** and filled again. Do
/// not wait for a slot that the same thread keeps. [`try_recv`](Consumer::try_recv) and
/// [`is_held`](Consumer::is_held) report a kept slot without waiting. Once the producer is dropped, a kept slot no
/// longer delays the end of the data, or [`Abandoned`](RecvError::Abandoned).
///
/// One thread or task uses the consumer at a time: it is `Send` if `T` is `Send` and `W` is `Sync`, but not `Sync`.
///
/// Dropping the consumer closes the ring: the producer's next acquire or commit returns [`Closed`](crate::Closed).
/// The consumer may be dropped at any time, also while slots are kept.
pub struct Consumer<'r, T, W: Wait = Auto> {
    ring: RingRef<'r, T, W>,
    at: Cursor,
    /// The last field, so that it is dropped last: it frees the ring if this is the ring's last owner.
    share: Share<'r, T, W>,
}

impl<'r, T, W: Wait> Consumer<'r, T, W> {
    pub(crate) fn new(ring: RingRef<'r, T, W>, share: Share<'r, T, W>) -> Self {
        Self { ring, at: Cursor::START, share }
    }

    #[cfg(feature = "alloc")]
    pub(crate) fn share_mut(&mut self) -> &mut Share<'r, T, W> {
        &mut self.share
    }

    /// Returns the next slot if it is filled, or `None` at the end of the data. Never waits. The call costs one
    /// atomic load. If the slot was cancelled, the call also releases it.
    ///
    /// # Errors
    ///
    /// - [`Empty`](TryRecvError::Empty): the slot is not filled, also if it was reserved before `finish`.
    /// - [`Held`](TryRecvError::Held): an earlier [`KeptSlot`] still holds the slot.
    /// - [`Abandoned`](TryRecvError::Abandoned), [`Cancelled`](TryRecvError::Cancelled), as for
    ///   [`recv`](Consumer::recv).
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::{DoubleBuffer, TryRecvError};
    /// let mut ring = DoubleBuffer::new([0, 0]);
    /// let (mut tx, mut rx) = ring.split();
    /// assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Empty);
    /// tx.fill(|slot| *slot = 1).unwrap();
    /// drop(tx); // without `finish`
    /// assert_eq!(*rx.try_recv()?.unwrap(), 1);
    /// assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Abandoned);
    /// # Ok::<(), TryRecvError>(())
    /// ```
    #[inline]
    pub fn try_recv(&mut self) -> Result<Option<ReadSlot<'_, 'r, T, W>>, TryRecvError> {
        let seen = self.slot().state();
        match seen.for_consumer(self.at.lap) {
            ConsumerView::Empty => Err(TryRecvError::Empty),
            ConsumerView::Held => Err(TryRecvError::Held),
            _ => Ok(self.take(seen)?),
        }
    }

    /// Waits until the next slot is filled, and returns it. Returns `None` at the end of the data, also in later calls:
    /// after the last slot that the producer committed or reserved before [`finish`](crate::Producer::finish).
    ///
    /// # Errors
    ///
    /// - [`Abandoned`](RecvError::Abandoned): the producer is dropped without `finish`, and the next slot is not
    ///   filled. Later calls return the same error, unless a [`ReservedSlot`](crate::ReservedSlot) is committed or
    ///   dropped at this position in the meantime. Also if the ring ended by a leak ([`split`](crate::Ring::split)).
    /// - [`Cancelled`](RecvError::Cancelled): the next slot was reserved and dropped without a commit. Returned once
    ///   per slot.
    ///
    /// # Panics
    ///
    /// If the next slot was cancelled and waking the producer's task panics (its `Waker` is foreign code). The
    /// consumer has then moved past the slot. All receive calls can panic in this case.
    ///
    /// # Examples
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0, 0]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.fill(|slot| *slot = 1).unwrap();
    /// tx.fill(|slot| *slot = 2).unwrap();
    /// tx.finish();
    /// let mut sum = 0;
    /// while let Some(slot) = rx.recv()? {
    ///     sum += *slot; // released here
    /// }
    /// assert_eq!(sum, 3);
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    #[inline]
    pub fn recv(&mut self) -> Result<Option<ReadSlot<'_, 'r, T, W>>, RecvError> {
        let Ok(seen) = self.wait(&Forever);
        self.take(seen)
    }

    /// Waits up to `timeout` until the next slot is filled, and returns it. Returns `None` at the end of the data.
    /// Waits without a limit if [`after`](WaitUntil::after) returns `None`.
    ///
    /// # Errors
    ///
    /// - [`Empty`](TryRecvError::Empty): the slot is not filled at the timeout.
    /// - [`Held`](TryRecvError::Held): an earlier [`KeptSlot`] still holds the slot at the timeout.
    /// - [`Abandoned`](TryRecvError::Abandoned), [`Cancelled`](TryRecvError::Cancelled), as for
    ///   [`recv`](Consumer::recv).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use twinbuf_core::{HeapRing, TryRecvError};
    /// let (_tx, mut rx) = HeapRing::new([0; 2]).into_handles();
    /// assert_eq!(rx.recv_timeout(Duration::from_millis(1)).unwrap_err(), TryRecvError::Empty);
    /// ```
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<ReadSlot<'_, 'r, T, W>>, TryRecvError>
    where
        W: WaitUntil,
    {
        match self.ring.strategy().after(timeout) {
            Some(deadline) => self.recv_deadline(deadline),
            None => Ok(self.recv()?),
        }
    }

    /// Waits until the next slot is filled or `deadline` passes, and returns the slot. Returns `None` at the end of
    /// the data. If the slot is filled, the call returns it even after the deadline.
    ///
    /// # Errors
    ///
    /// The errors of [`recv_timeout`](Consumer::recv_timeout): `Empty`, `Held`, `Abandoned` and `Cancelled`.
    ///
    /// # Examples
    ///
    /// ```
    /// let (mut tx, mut rx) = twinbuf_core::HeapRing::new([0; 2]).into_handles();
    /// tx.acquire().unwrap().commit().unwrap();
    /// assert!(rx.recv_deadline(std::time::Instant::now()).is_ok());
    /// ```
    pub fn recv_deadline(
        &mut self,
        deadline: W::Instant,
    ) -> Result<Option<ReadSlot<'_, 'r, T, W>>, TryRecvError>
    where
        W: WaitUntil,
    {
        match self.wait(&Until(deadline)) {
            Ok(seen) => Ok(self.take(seen)?),
            Err(TimedOut(seen)) => match seen.for_consumer(self.at.lap) {
                ConsumerView::Held => Err(TryRecvError::Held),
                _ => Err(TryRecvError::Empty),
            },
        }
    }

    /// Returns the next slot, or `None` at the end of the data. If the slot is not filled, or if a [`KeptSlot`]
    /// holds it, returns `Pending`, and wakes the task of `cx` when this may have changed.
    ///
    /// Only the waker of the latest call is stored; the waker of an earlier call is dropped.
    ///
    /// # Errors
    ///
    /// The errors of [`recv`](Consumer::recv): `Abandoned` and `Cancelled`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::task::{Context, Waker};
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (_tx, mut rx) = ring.split();
    /// assert!(rx.poll_recv(&mut Context::from_waker(Waker::noop())).is_pending());
    /// ```
    pub fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<ReadSlot<'_, 'r, T, W>>, RecvError>> {
        self.poll_ready(cx).map(|seen| self.take(seen))
    }

    /// Waits as a task until the next slot is filled, and returns it. Returns `None` at the end of the data.
    /// Dropping the future loses no slot.
    ///
    /// The future is `Send` if the consumer is: a task may move between threads while it waits.
    ///
    /// # Errors
    ///
    /// The errors of [`recv`](Consumer::recv): `Abandoned` and `Cancelled`.
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
    /// tx.fill(|slot| *slot = 5).unwrap();
    /// assert_eq!(*block_on(rx.recv_async())?.unwrap(), 5);
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    pub async fn recv_async(&mut self) -> Result<Option<ReadSlot<'_, 'r, T, W>>, RecvError> {
        let seen = poll_fn(|cx| self.poll_ready(cx)).await;
        self.take(seen)
    }

    /// Returns `true` if an earlier [`KeptSlot`] still holds the next slot and the producer exists.
    /// [`recv`](Self::recv) would then wait for that guard. Returns `false` once the producer is dropped: a receive
    /// call then does not wait for that guard, because no data follows in this slot.
    ///
    /// ```
    /// let mut ring = twinbuf_core::Ring::new([0; 1]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.fill(|slot| *slot = 1).unwrap();
    /// let kept = rx.recv()?.unwrap().keep();
    /// assert!(rx.is_held());
    /// drop(kept);
    /// assert!(!rx.is_held());
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.slot().state().for_consumer(self.at.lap) == ConsumerView::Held
    }

    /// Returns the number of slots in the ring.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.ring.len()
    }

    /// Returns the number of slots that were committed or cancelled and are not yet released. Kept slots count. Both
    /// sides count the same slots. Other threads may change the number during the call.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ring.full()
    }

    /// Returns `true` if [`len`](Consumer::len) is 0. This does not mean that the data has ended; only a receive call
    /// reports the end.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    fn slot(&self) -> SlotRef<'r, T, W> {
        self.ring.slot(self.at)
    }

    #[inline]
    fn advance(&mut self) {
        self.at = self.at.next(self.ring.len());
    }

    /// Converts the state of the next slot to the result of a receive call. The slot is neither empty nor held.
    #[inline]
    fn take(&mut self, seen: State) -> Result<Option<ReadSlot<'_, 'r, T, W>>, RecvError> {
        match seen.for_consumer(self.at.lap) {
            ConsumerView::Full => Ok(Some(ReadSlot { consumer: self, seen })),
            view => self.no_slot(seen, view).map(|()| None),
        }
    }

    /// Returns `Ok` at the end of the data, or the reason why there is no slot to read. Releases a cancelled slot.
    #[cold]
    fn no_slot(&mut self, seen: State, view: ConsumerView) -> Result<(), RecvError> {
        match view {
            ConsumerView::Finished => Ok(()),
            ConsumerView::Cancelled => {
                // Dropping the guard of a cancelled slot releases it.
                drop(ReadSlot { consumer: self, seen });
                Err(RecvError::Cancelled)
            }
            ConsumerView::Abandoned | ConsumerView::Full | ConsumerView::Empty | ConsumerView::Held => {
                debug_assert_eq!(view, ConsumerView::Abandoned);
                Err(RecvError::Abandoned)
            }
        }
    }

    /// Waits until the next slot is neither empty nor held.
    #[inline]
    fn wait<P: Patience<W>>(&self, patience: &P) -> Result<State, P::Over> {
        let seen = self.slot().state();
        if ready(seen, self.at.lap) { Ok(seen) } else { self.wait_longer(seen, patience) }
    }

    #[cold]
    fn wait_longer<P: Patience<W>>(&self, seen: State, patience: &P) -> Result<State, P::Over> {
        let lap = self.at.lap;
        self.slot().wait(seen, |seen| ready(seen, lap), patience)
    }

    // `&mut self`, because a future that holds `&Consumer` is not `Send`: `Consumer` is not `Sync`.
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<State> {
        let lap = self.at.lap;
        self.slot().poll(Side::Consumer, cx.waker(), |seen| ready(seen, lap))
    }
}

/// Whether a consumer on lap `lap` has nothing to wait for.
#[inline]
fn ready(seen: State, lap: Lap) -> bool {
    !matches!(seen.for_consumer(lap), ConsumerView::Empty | ConsumerView::Held)
}

impl<T, W: Wait> Drop for Consumer<'_, T, W> {
    fn drop(&mut self) {
        // The waker is dropped when this function returns, after the producer has been told of the end: its drop is
        // foreign code and may panic.
        let _waker = self.ring.unregister(Side::Consumer);
        self.ring.end(self.at, State::close, Side::Producer);
    }
}

impl<T, W: Wait> fmt::Debug for Consumer<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("seq", &self.at.seq)
            .field("next_slot", &self.slot().state())
            .finish_non_exhaustive()
    }
}

/// A filled slot, used in place. It dereferences to the value.
///
/// **Dropping it releases the slot** to the producer. A [`WriteSlot`](crate::WriteSlot) differs: dropping it does
/// *not* commit the slot. Leaking a `ReadSlot` changes nothing: the next receive call returns the same slot.
///
/// A `ReadSlot` borrows the consumer: only one can exist at a time, and it cannot outlive the consumer.
///
/// ```compile_fail,E0505
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (_tx, mut rx) = ring.split();
/// let slot = rx.recv().unwrap();
/// drop(rx);
/// println!("{slot:?}");
/// ```
pub struct ReadSlot<'c, 'r, T, W: Wait = Auto> {
    consumer: &'c mut Consumer<'r, T, W>,
    /// The state in which the slot was found filled.
    seen: State,
}

impl<'r, T, W: Wait> ReadSlot<'_, 'r, T, W> {
    /// Converts this guard to one that does not borrow the consumer. The consumer can then receive the next slot
    /// while this one is in use.
    ///
    /// The call does not wait. It does no atomic operation, except one for a ring on the heap, to count the guard as
    /// an owner.
    ///
    /// # Examples
    ///
    /// ```
    /// let (mut tx, mut rx) = twinbuf_core::HeapRing::new([0; 3]).into_handles();
    /// tx.fill(|slot| *slot = 1).unwrap();
    /// tx.fill(|slot| *slot = 2).unwrap();
    /// let first = rx.recv()?.unwrap().keep();
    /// let second = rx.recv()?.unwrap().keep();
    /// std::thread::spawn(move || assert_eq!(*second, 2)); // released there
    /// assert_eq!(*first, 1);
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    #[must_use = "dropping a kept slot releases it"]
    pub fn keep(self) -> KeptSlot<'r, T, W> {
        let mut this = ManuallyDrop::new(self);
        let seen = this.seen;
        let consumer = &mut *this.consumer;
        let (slot, Cursor { lap, seq, .. }) = (consumer.slot(), consumer.at);
        let share = consumer.share.share();
        consumer.advance();
        KeptSlot { slot, seen, lap, seq, share }
    }

    /// Leaves the slot unreleased, with what was written to it: the next receive call returns it again. If the consumer
    /// is dropped first, the producer finds it with [`unread`](crate::Producer::unread).
    pub fn put_back(self) {
        core::mem::forget(self);
    }

    /// Returns the sequence number of the data in this slot, starting at 0. It equals the
    /// [`seq`](crate::WriteSlot::seq) of the producer's guard that filled the slot.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// assert_eq!(rx.recv()?.unwrap().seq(), 0);
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.consumer.at.seq
    }
}

impl<T, W: Wait> Drop for ReadSlot<'_, '_, T, W> {
    #[inline]
    fn drop(&mut self) {
        let (slot, lap) = (self.consumer.slot(), self.consumer.at.lap);
        slot.hand_over(self.seen, &[Side::Producer], |s| s.release(lap), || self.consumer.advance());
    }
}

impl<T, W: Wait> Deref for ReadSlot<'_, '_, T, W> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the slot was found filled on the consumer's lap, so it belongs to the consumer until our drop
        // releases it. This guard is the only one: it holds the consumer, and with it the cursor. A `&mut` would need
        // `&mut self`.
        unsafe { self.consumer.slot().value() }
    }
}

impl<T, W: Wait> DerefMut for ReadSlot<'_, '_, T, W> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the slot belongs to the consumer until our drop; `&mut self` excludes other references.
        unsafe { self.consumer.slot().value_mut() }
    }
}

impl<U: ?Sized, T: AsRef<U>, W: Wait> AsRef<U> for ReadSlot<'_, '_, T, W> {
    fn as_ref(&self) -> &U {
        (**self).as_ref()
    }
}

impl<T: fmt::Debug, W: Wait> fmt::Debug for ReadSlot<'_, '_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadSlot").field("seq", &self.seq()).field("value", &**self).finish()
    }
}

/// A filled slot that does not borrow the consumer. [`ReadSlot::keep`] returns it. It dereferences to the value.
///
/// **Dropping it releases the slot**, on any thread and in any order. It may outlive the consumer. A guard of a
/// [`HeapRing`](crate::HeapRing) of `'static` values or of a `static` ring is `'static` and keeps the ring alive: a
/// task, a tensor or a foreign object can hold it.
///
/// If the guard is leaked (`mem::forget`), the ring never reuses its slot. [`recv`](Consumer::recv) then waits at this
/// slot until the producer finishes or is dropped.
///
/// It cannot outlive a borrowed ring:
///
/// ```compile_fail,E0505
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (_tx, mut rx) = ring.split();
/// let slot = rx.recv().unwrap().unwrap().keep();
/// drop(ring);
/// println!("{}", *slot);
/// ```
pub struct KeptSlot<'r, T, W: Wait = Auto> {
    slot: SlotRef<'r, T, W>,
    /// The state in which the slot was found filled.
    seen: State,
    lap: Lap,
    seq: u64,
    /// The last field, so that it is dropped last: it frees the ring if this is the ring's last owner.
    #[allow(dead_code)] // keeps the ring alive
    share: Share<'r, T, W>,
}

/// The sides that may wait for a kept slot: the producer waits until the slot is free; the consumer, one lap ahead,
/// waits until it is filled again.
const BOTH: &[Side] = &[Side::Producer, Side::Consumer];

impl<T, W: Wait> KeptSlot<'_, T, W> {
    /// Returns the sequence number of the data in this slot, starting at 0; see [`ReadSlot::seq`].
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.seq
    }
}

impl<T, W: Wait> Drop for KeptSlot<'_, T, W> {
    #[inline]
    fn drop(&mut self) {
        let lap = self.lap;
        self.slot.hand_over(self.seen, BOTH, |s| s.release(lap), || ());
    }
}

impl<T, W: Wait> Deref for KeptSlot<'_, T, W> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the slot was found filled on the consumer's lap, so it belongs to the consumer until our drop
        // releases it. The consumer's cursor has moved on, so this guard is the only one for this lap. A `&mut` would
        // need `&mut self`.
        unsafe { self.slot.value() }
    }
}

impl<T, W: Wait> DerefMut for KeptSlot<'_, T, W> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the slot belongs to the consumer until our drop; `&mut self` excludes other references.
        unsafe { self.slot.value_mut() }
    }
}

/// A kept slot can own the bytes of a [`bytes::Bytes`](https://docs.rs/bytes): the last clone releases the slot.
///
/// ```
/// use bytes::Bytes;
/// let (mut tx, mut rx) = twinbuf_core::HeapRing::from_fn(2, |_| vec![0u8; 4]).into_handles();
/// tx.fill(|slot| slot.fill(7)).unwrap();
/// let bytes = Bytes::from_owner(rx.recv()?.unwrap().keep());
/// let part = bytes.slice(1..3);
/// drop(bytes);
/// assert_eq!((&part[..], rx.len()), (&[7, 7][..], 1));
/// drop(part);
/// assert_eq!(rx.len(), 0);
/// # Ok::<(), twinbuf_core::RecvError>(())
/// ```
impl<U: ?Sized, T: AsRef<U>, W: Wait> AsRef<U> for KeptSlot<'_, T, W> {
    fn as_ref(&self) -> &U {
        (**self).as_ref()
    }
}

impl<T: fmt::Debug, W: Wait> fmt::Debug for KeptSlot<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptSlot").field("seq", &self.seq).field("value", &**self).finish()
    }
}
