//! The consumer's side: receive a filled slot, use it in place, release it.

use core::fmt;
use core::future::poll_fn;
use core::ops::{Deref, DerefMut};
use core::task::{Context, Poll};
use core::time::Duration;

use crate::error::{RecvError, RecvTimeoutError, TryRecvError};
use crate::raw::{Cursor, Forever, Patience, RingRef, Share, Side, SlotRef, TimedOut, Until};
use crate::state::{ConsumerView, Lap, State};
use crate::wait::{Spin, Wait, WaitUntil};

/// The side of a ring that reads slots.
///
/// Several [`ReadSlot`]s may be alive at once (a copy still reads one slot while the next is begun), and released in
/// any order and on any thread. A guard does not borrow the consumer: it lives as long as the ring. The slots come in
/// turn: a guard that is kept lets `N - 1` further slots be received, then its slot would be the next
/// ([`SlotHeld`](RecvError::SlotHeld)).
///
/// The consumer belongs to one thread or task at a time: it is `Send`, and not `Sync`.
///
/// Dropping the consumer closes the ring: the producer's next acquire or commit returns [`Closed`](crate::Closed).
/// That is allowed at any time, also while guards are alive.
pub struct Consumer<'r, T, W: Wait = Spin> {
    ring: RingRef<'r, T, W>,
    at: Cursor,
    stats: ConsumerStats,
    /// The hand-off for which the last poll that found nothing was.
    pending: Option<u64>,
    /// Last: frees the ring, if this is its last owner.
    share: Share<'r, T>,
}

/// What a [`Consumer`] has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub struct ConsumerStats {
    /// Slots received, cancelled places among them.
    pub handoffs: u64,
    /// Calls that found the next slot still empty and had to wait for it (`try_recv` never does).
    pub waits: u64,
    /// Wake-ups, within those waits, after which the slot was still empty. A poll that finds the same slot still
    /// empty as the one before counts as one, and so does a sleep that its deadline ended.
    pub spurious_wakes: u64,
}

impl<'r, T, W: Wait> Consumer<'r, T, W> {
    pub(crate) fn new(ring: RingRef<'r, T, W>, share: Share<'r, T>) -> Self {
        Self { ring, at: Cursor::START, stats: ConsumerStats::default(), pending: None, share }
    }

    #[cfg(feature = "alloc")]
    pub(crate) fn share_mut(&mut self) -> &mut Share<'r, T> {
        &mut self.share
    }

    /// Returns the next slot if it is filled now. Never waits: one atomic load, and at a cancelled place its release.
    ///
    /// # Errors
    ///
    /// [`Empty`](TryRecvError::Empty) while it is not filled; the others as [`recv`](Consumer::recv).
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
    /// assert_eq!(*rx.try_recv().unwrap(), 1);
    /// assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Abandoned);
    /// ```
    #[inline]
    pub fn try_recv(&mut self) -> Result<ReadSlot<'r, T, W>, TryRecvError> {
        let seen = self.slot().state();
        match seen.for_consumer(self.at.lap) {
            ConsumerView::Empty => Err(TryRecvError::Empty),
            _ => Ok(self.take(seen)?),
        }
    }

    /// Waits until the next slot is filled and returns it.
    ///
    /// # Errors
    ///
    /// [`Finished`](RecvError::Finished) after the last slot, at every further call.
    /// [`Abandoned`](RecvError::Abandoned) where the producer is gone and the next place is neither filled nor the
    /// end; also at every further call, unless a [`ReservedSlot`](crate::ReservedSlot) is committed there later.
    /// [`Cancelled`](RecvError::Cancelled) once, in the place of a slot that was reserved and dropped;
    /// [`SlotHeld`](RecvError::SlotHeld) if the next slot in turn is held by a guard that this consumer returned: a
    /// thread that waits for a guard that it holds would wait for ever. Where another thread drops the guard, wait
    /// for it by [`recv_timeout`](Consumer::recv_timeout). Once the producer is gone the end is returned even so.
    ///
    /// # Panics
    ///
    /// If the next place was cancelled and waking the producer's task panics (its `Waker` is foreign code); the place
    /// has then been passed. The same holds for all calls that receive.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::RecvError;
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0, 0]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// tx.acquire().unwrap().commit().unwrap();
    /// let (first, second) = (rx.recv()?, rx.recv()?);
    /// assert_eq!(rx.recv().unwrap_err(), RecvError::SlotHeld);
    /// drop(second); // in any order
    /// drop(first);
    /// # Ok::<(), RecvError>(())
    /// ```
    #[inline]
    pub fn recv(&mut self) -> Result<ReadSlot<'r, T, W>, RecvError> {
        let Ok(seen) = self.wait(not_empty, &Forever);
        self.take(seen)
    }

    /// Waits until the next slot is filled, at most for `timeout`, and returns it.
    ///
    /// # Errors
    ///
    /// [`Timeout`](RecvTimeoutError::Timeout) when the time is over and the slot still empty,
    /// [`SlotHeld`](RecvTimeoutError::SlotHeld) when the time is over and the slot still held by a guard that this
    /// consumer returned: a call with a timeout, however long, waits for that guard too. The others as
    /// [`recv`](Consumer::recv).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use twinbuf_core::RecvTimeoutError;
    /// let (_tx, mut rx) = twinbuf_core::channel([0; 2]);
    /// assert_eq!(rx.recv_timeout(Duration::from_millis(1)).unwrap_err(), RecvTimeoutError::Timeout);
    /// ```
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<ReadSlot<'r, T, W>, RecvTimeoutError>
    where
        W: WaitUntil,
    {
        match self.ring.strategy().after(timeout) {
            Some(deadline) => self.recv_deadline(deadline),
            None => {
                let Ok(seen) = self.wait(neither_empty_nor_held, &Forever);
                Ok(self.take(seen)?)
            }
        }
    }

    /// Waits until the next slot is filled, at most until `deadline`, and returns it. A slot that is filled is
    /// returned even if the deadline has passed.
    ///
    /// # Errors
    ///
    /// As [`recv_timeout`](Consumer::recv_timeout).
    ///
    /// # Examples
    ///
    /// ```
    /// let (mut tx, mut rx) = twinbuf_core::channel([0; 2]);
    /// tx.acquire().unwrap().commit().unwrap();
    /// assert!(rx.recv_deadline(std::time::Instant::now()).is_ok());
    /// ```
    pub fn recv_deadline(&mut self, deadline: W::Instant) -> Result<ReadSlot<'r, T, W>, RecvTimeoutError>
    where
        W: WaitUntil,
    {
        match self.wait(neither_empty_nor_held, &Until(deadline)) {
            Ok(seen) => Ok(self.take(seen)?),
            Err(TimedOut(seen)) => match seen.for_consumer(self.at.lap) {
                ConsumerView::Held => Err(RecvTimeoutError::SlotHeld),
                _ => Err(RecvTimeoutError::Timeout),
            },
        }
    }

    /// Returns the next slot, or arranges for the task of `cx` to be woken when it is filled.
    ///
    /// Only the waker of the last call is woken; one that was left by an earlier call is dropped.
    ///
    /// # Errors
    ///
    /// As [`recv`](Consumer::recv).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::task::{Context, Waker};
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (_tx, mut rx) = ring.split();
    /// assert!(rx.poll_recv(&mut Context::from_waker(Waker::noop())).is_pending());
    /// ```
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Result<ReadSlot<'r, T, W>, RecvError>> {
        let lap = self.at.lap;
        match self.slot().poll(Side::Consumer, cx.waker(), |seen| not_empty(seen.for_consumer(lap))) {
            Some(seen) => Poll::Ready(self.take(seen)),
            None => {
                let again = self.pending.replace(self.at.seq) == Some(self.at.seq);
                self.stats.waits += u64::from(!again);
                self.stats.spurious_wakes += u64::from(again);
                Poll::Pending
            }
        }
    }

    /// Waits as a task until the next slot is filled and returns it. Dropping the future loses nothing.
    ///
    /// The future is `Send` if the consumer is, so a task may be moved between threads while it waits.
    ///
    /// # Errors
    ///
    /// As [`recv`](Consumer::recv).
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
    /// assert_eq!(*block_on(rx.recv_async())?, 5);
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    pub async fn recv_async(&mut self) -> Result<ReadSlot<'r, T, W>, RecvError> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Iterates over the slots in order, until the producer finishes.
    ///
    /// An item does not borrow the iterator: two may be held at once. A loop that hands its items to other threads
    /// must be ready for [`SlotHeld`](RecvError::SlotHeld), which ends the iterator where such a thread is late:
    /// receive by [`recv_timeout`](Consumer::recv_timeout) there, which waits for the slot. A
    /// [`Cancelled`](RecvError::Cancelled) item is followed by the next slot; after any other error the iterator ends.
    ///
    /// # Errors
    ///
    /// As [`recv`](Consumer::recv), but that `Finished` ends the iterator without an item.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::RecvError;
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.fill(|slot| *slot = 1).unwrap();
    /// drop(tx); // without `finish`: not the end of the data
    /// let mut slots = rx.iter();
    /// assert_eq!(*slots.next().unwrap()?, 1);
    /// assert_eq!(slots.next().unwrap().unwrap_err(), RecvError::Abandoned);
    /// assert!(slots.next().is_none());
    /// # Ok::<(), RecvError>(())
    /// ```
    pub fn iter(&mut self) -> Iter<'_, 'r, T, W> {
        Iter { consumer: self, ended: false }
    }

    /// Returns what this consumer has done so far. Counters of the handle itself: reading and keeping them costs the
    /// other side nothing.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// rx.recv().unwrap();
    /// assert_eq!(rx.stats().handoffs, 1);
    /// ```
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        ConsumerStats { handoffs: self.at.seq, ..self.stats }
    }

    /// Returns the number of slots of the ring.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.ring.len()
    }

    /// Returns how many slots the next calls would return without a wait, up to the first place that is open,
    /// cancelled or held. The producer may be adding to them. Zero is not a sign of the end: only a receive is.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.fill(|slot| *slot = 1)?;
    /// assert_eq!((rx.len(), rx.depth()), (1, 2));
    /// let _slot = rx.recv().unwrap();
    /// assert!(rx.is_empty()); // held, and no longer to be received
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    #[must_use]
    pub fn len(&self) -> usize {
        let mut at = self.at;
        let mut len = 0;
        while len < self.ring.len() && self.ring.slot(at).state().for_consumer(at.lap) == ConsumerView::Full {
            at = at.next(self.ring.len());
            len += 1;
        }
        len
    }

    /// Whether the next [`try_recv`](Consumer::try_recv) would return no slot, for whatever reason.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    fn slot(&self) -> SlotRef<'r, T, W> {
        self.ring.slot(self.at)
    }

    /// Acts on the state in which the next slot was found, which is not empty: moves on, unless that is the end.
    fn take(&mut self, seen: State) -> Result<ReadSlot<'r, T, W>, RecvError> {
        match seen.for_consumer(self.at.lap) {
            ConsumerView::Full => Ok(self.read_slot(seen)),
            view => Err(self.no_slot(seen, view)),
        }
    }

    /// Why there is no slot to read, in a place that is neither full nor empty. Passes a cancelled one.
    #[cold]
    fn no_slot(&mut self, seen: State, view: ConsumerView) -> RecvError {
        debug_assert!(!matches!(view, ConsumerView::Full | ConsumerView::Empty));
        match view {
            ConsumerView::Cancelled => {
                // Dropping the guard of a cancelled slot releases it.
                drop(self.read_slot(seen));
                RecvError::Cancelled
            }
            ConsumerView::Held => RecvError::SlotHeld,
            ConsumerView::Finished => RecvError::Finished,
            ConsumerView::Abandoned | ConsumerView::Full | ConsumerView::Empty => RecvError::Abandoned,
        }
    }

    /// The guard of the next slot, which was found filled in state `seen`. Made field by field, from no copy of the
    /// cursor: a wide load would wait for the stores that moved it on the last time.
    #[inline]
    fn read_slot(&mut self, seen: State) -> ReadSlot<'r, T, W> {
        let (slot, lap, seq) = (self.slot(), self.at.lap, self.at.seq);
        self.at = self.at.next(self.ring.len());
        ReadSlot { slot, seen, lap, seq, share: self.share.clone() }
    }

    /// Waits until the next slot is in a state that is `ready`.
    #[inline]
    fn wait<P: Patience<W>>(
        &mut self,
        ready: impl Fn(ConsumerView) -> bool,
        patience: &P,
    ) -> Result<State, P::Over> {
        let seen = self.slot().state();
        if ready(seen.for_consumer(self.at.lap)) { Ok(seen) } else { self.wait_longer(seen, ready, patience) }
    }

    #[cold]
    fn wait_longer<P: Patience<W>>(
        &mut self,
        seen: State,
        ready: impl Fn(ConsumerView) -> bool,
        patience: &P,
    ) -> Result<State, P::Over> {
        let lap = self.at.lap;
        let (found, spurious) = self.slot().wait(seen, |seen| ready(seen.for_consumer(lap)), patience);
        self.stats.waits += 1;
        self.stats.spurious_wakes += spurious;
        found
    }
}

/// What a receive waits for.
#[inline]
fn not_empty(view: ConsumerView) -> bool {
    view != ConsumerView::Empty
}

/// What a receive with a timeout waits for: it also waits while the slot is held.
#[inline]
fn neither_empty_nor_held(view: ConsumerView) -> bool {
    !matches!(view, ConsumerView::Empty | ConsumerView::Held)
}

impl<T, W: Wait> Drop for Consumer<'_, T, W> {
    fn drop(&mut self) {
        // Dropped once the producer is told: what drops a waker is foreign code, which may panic.
        let _waker = self.ring.unregister(Side::Consumer);
        self.ring.end(|_| State::CLOSE, Side::Producer);
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

/// The slots of a [`Consumer`] in order; see [`Consumer::iter`].
#[derive(Debug)]
#[must_use = "an iterator does nothing until it is asked for an item"]
pub struct Iter<'c, 'r, T, W: Wait = Spin> {
    consumer: &'c mut Consumer<'r, T, W>,
    ended: bool,
}

impl<'r, T, W: Wait> Iterator for Iter<'_, 'r, T, W> {
    type Item = Result<ReadSlot<'r, T, W>, RecvError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let item = self.consumer.recv();
        self.ended = !matches!(item, Ok(_) | Err(RecvError::Cancelled));
        match item {
            Err(RecvError::Finished) => None,
            item => Some(item),
        }
    }
}

impl<T, W: Wait> core::iter::FusedIterator for Iter<'_, '_, T, W> {}

impl<'c, 'r, T, W: Wait> IntoIterator for &'c mut Consumer<'r, T, W> {
    type Item = Result<ReadSlot<'r, T, W>, RecvError>;
    type IntoIter = Iter<'c, 'r, T, W>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// A filled slot, to be used in place; the producer gets it back when it is dropped.
///
/// **Dropping it releases the slot**: progress must not depend on a call. (A
/// [`WriteSlot`](crate::WriteSlot) differs: dropping it does *not* hand it over.)
///
/// It may outlive the consumer and be dropped on any thread. From owned or `static` handles it is `'static` and keeps
/// the ring alive, so it fits into a task, a tensor or a foreign object. A guard that is leaked (`mem::forget`) costs
/// its slot: the ring runs out of slots ([`SlotHeld`](RecvError::SlotHeld), and the end once the producer is gone),
/// it never hands one out twice.
///
/// It does not outlive a ring that is borrowed:
///
/// ```compile_fail,E0505
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (_tx, mut rx) = ring.split();
/// let slot = rx.recv().unwrap();
/// drop(ring);
/// println!("{}", *slot);
/// ```
pub struct ReadSlot<'r, T, W: Wait = Spin> {
    slot: SlotRef<'r, T, W>,
    /// The state in which the slot was found filled.
    seen: State,
    lap: Lap,
    seq: u64,
    /// Last: frees the ring, if this is its last owner.
    #[allow(dead_code)] // keeps the ring alive
    share: Share<'r, T>,
}

impl<T, W: Wait> ReadSlot<'_, T, W> {
    /// Gives the slot back to the producer, as dropping it does.
    ///
    /// # Panics
    ///
    /// If waking the producer's task does (its `Waker` is foreign code); the slot has then been given back.
    ///
    /// # Examples
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// tx.acquire().unwrap().commit().unwrap();
    /// rx.recv()?.release();
    /// assert!(tx.try_acquire().is_ok());
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    #[inline]
    pub fn release(self) {}

    /// Returns the number of this hand-off, from 0: that of the [`WriteSlot`](crate::WriteSlot) it was filled by.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, mut rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// assert_eq!(rx.recv()?.seq(), 0);
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.seq
    }
}

impl<T, W: Wait> Drop for ReadSlot<'_, T, W> {
    #[inline]
    fn drop(&mut self) {
        let lap = self.lap;
        self.slot.hand_over(self.seen, &[Side::Producer], |s| s.release(lap), || ());
    }
}

impl<T, W: Wait> Deref for ReadSlot<'_, T, W> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the slot was found filled on the consumer's lap, so it is the consumer's until the release
        // in our drop, and its cursor has moved on: this guard is the only one for this lap. A `&mut` would
        // need `&mut self`.
        unsafe { self.slot.value() }
    }
}

impl<T, W: Wait> DerefMut for ReadSlot<'_, T, W> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `&mut self` excludes any other reference.
        unsafe { self.slot.value_mut() }
    }
}

impl<T: fmt::Debug, W: Wait> fmt::Debug for ReadSlot<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadSlot").field("seq", &self.seq()).field("value", &**self).finish()
    }
}
