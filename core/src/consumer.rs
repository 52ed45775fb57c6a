//! The consumer's side: receive a filled slot, use it in place, release it.

use core::cell::Cell;
use core::fmt;
use core::future::poll_fn;
use core::ops::{Deref, DerefMut};
use core::task::{Context, Poll};
use core::time::Duration;

use crate::error::{RecvError, RecvTimeoutError, TryRecvError};
use crate::ring::{Cursor, Forever, Patience, RingRef, Side, SlotRef, TimedOut, Until};
use crate::state::{ConsumerView, Lap, State};
use crate::wait::{Ours, Spin, Wait, WaitUntil};

/// The side of a ring that reads slots.
///
/// Its calls take `&self`, so that several [`ReadSlot`]s may be alive at once (a copy still reads one slot
/// while the next is begun); they may be released in any order and from any thread. The slots come round in
/// turn: a guard that is kept lets `N - 1` further slots be received, then its own slot would be the next
/// ([`AllHeld`](RecvError::AllHeld)).
///
/// The consumer itself belongs to one thread at a time: it is `Send`, and not `Sync`.
///
/// ```compile_fail,E0277
/// fn shared_between_threads<T: Sync>(_: T) {}
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (_tx, rx) = ring.split();
/// shared_between_threads(rx);
/// ```
///
/// Dropping the consumer closes the ring: the producer's next acquire or commit says so.
pub struct Consumer<'a, T, W: Wait = Spin> {
    ring: RingRef<'a, T, W>,
    at: Cell<Cursor>,
    stats: Cell<ConsumerStats>,
    /// The hand-off for which the last poll that found nothing was.
    pending: Cell<Option<u64>>,
    #[cfg(feature = "alloc")]
    _owner: Option<alloc::sync::Arc<dyn crate::ring::Owner + Send + Sync + 'a>>,
}

/// What a [`Consumer`] has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerStats {
    /// Slots received.
    pub handoffs: u64,
    /// Calls that found the next slot still empty and had to wait for it (`try_recv` never does).
    pub waits: u64,
    /// Wake-ups, within those waits, after which the slot was still empty. A poll that finds the same slot still
    /// empty as the one before counts as one, and so does a sleep that its deadline ended.
    pub spurious_wakes: u64,
}

impl<'a, T, W: Wait> Consumer<'a, T, W> {
    pub(crate) fn new(ring: RingRef<'a, T, W>) -> Self {
        Self {
            ring,
            at: Cell::new(Cursor::START),
            stats: Cell::default(),
            pending: Cell::new(None),
            #[cfg(feature = "alloc")]
            _owner: None,
        }
    }

    #[cfg(feature = "alloc")]
    pub(crate) fn owning(
        ring: RingRef<'a, T, W>,
        owner: alloc::sync::Arc<dyn crate::ring::Owner + Send + Sync + 'a>,
    ) -> Self {
        let mut handle = Self::new(ring);
        handle._owner = Some(owner);
        handle
    }
}

impl<T, W: Wait> Consumer<'_, T, W> {
    /// The next slot, if it is filled now. Never waits: at most one atomic load.
    ///
    /// # Errors
    ///
    /// [`Empty`](TryRecvError::Empty) while it is not filled; [`Finished`](TryRecvError::Finished) or
    /// [`Abandoned`](TryRecvError::Abandoned) after the last slot, again and again;
    /// [`AllHeld`](TryRecvError::AllHeld) if the next slot in turn is held by a guard of this consumer.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::{DoubleBuffer, TryRecvError};
    /// let mut ring = DoubleBuffer::new([0, 0]);
    /// let (mut tx, rx) = ring.split();
    /// assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Empty);
    /// tx.fill(|slot| Ok::<(), ()>(*slot = 1)).unwrap();
    /// drop(tx); // without `finish`
    /// assert_eq!(*rx.try_recv().unwrap(), 1);
    /// assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Abandoned);
    /// ```
    #[inline]
    pub fn try_recv(&self) -> Result<ReadSlot<'_, T, W>, TryRecvError> {
        match filled(self.slot().state(), self.lap()) {
            Some(found) => Ok(self.read_slot(found?)),
            None => Err(TryRecvError::Empty),
        }
    }

    /// The next slot, waiting until it is filled.
    ///
    /// # Errors
    ///
    /// [`Finished`](RecvError::Finished) or [`Abandoned`](RecvError::Abandoned) after the last slot, again and
    /// again; [`AllHeld`](RecvError::AllHeld) if the next slot in turn is held by a guard of this consumer,
    /// since waiting for oneself would never end.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::RecvError;
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0, 0]);
    /// let (mut tx, rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// tx.acquire().unwrap().commit().unwrap();
    /// let (first, second) = (rx.recv()?, rx.recv()?);
    /// assert_eq!(rx.recv().unwrap_err(), RecvError::AllHeld);
    /// drop(second); // in any order
    /// drop(first);
    /// # Ok::<(), RecvError>(())
    /// ```
    #[inline]
    pub fn recv(&self) -> Result<ReadSlot<'_, T, W>, RecvError> {
        let Ok(found) = self.wait(&Forever);
        found.map(|seen| self.read_slot(seen))
    }

    /// The next slot, waiting until it is filled, but no longer than `timeout`.
    ///
    /// # Errors
    ///
    /// [`Timeout`](RecvTimeoutError::Timeout) when the time is over and the slot still empty; the others as
    /// [`recv`](Consumer::recv).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use twinbuf_core::RecvTimeoutError;
    /// let (_tx, rx) = twinbuf_core::channel([0; 2]);
    /// assert_eq!(rx.recv_timeout(Duration::from_millis(1)).unwrap_err(), RecvTimeoutError::Timeout);
    /// ```
    pub fn recv_timeout(&self, timeout: Duration) -> Result<ReadSlot<'_, T, W>, RecvTimeoutError>
    where
        W: WaitUntil,
    {
        match self.ring.strategy().after(timeout) {
            Some(deadline) => self.recv_deadline(deadline),
            None => Ok(self.recv()?),
        }
    }

    /// The next slot, waiting until it is filled, but no longer than until `deadline`, which may lie in the
    /// past: then a slot that is filled is returned all the same.
    ///
    /// # Errors
    ///
    /// As [`recv_timeout`](Consumer::recv_timeout).
    ///
    /// # Examples
    ///
    /// ```
    /// let (mut tx, rx) = twinbuf_core::channel([0; 2]);
    /// tx.acquire().unwrap().commit().unwrap();
    /// assert!(rx.recv_deadline(std::time::Instant::now()).is_ok());
    /// ```
    pub fn recv_deadline(&self, deadline: W::Instant) -> Result<ReadSlot<'_, T, W>, RecvTimeoutError>
    where
        W: WaitUntil,
    {
        match self.wait(&Until(deadline)) {
            Ok(found) => Ok(self.read_slot(found?)),
            Err(TimedOut) => Err(RecvTimeoutError::Timeout),
        }
    }

    /// The next slot, or the promise that the task of `cx` is woken when it is filled.
    ///
    /// Only the task that polled last is woken for the slot; another one, whose waker is still there, is woken
    /// at once, so that it polls again.
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
    /// let (_tx, rx) = ring.split();
    /// assert!(rx.poll_recv(&mut Context::from_waker(Waker::noop())).is_pending());
    /// ```
    pub fn poll_recv(&self, cx: &mut Context<'_>) -> Poll<Result<ReadSlot<'_, T, W>, RecvError>> {
        self.poll_filled(cx).map(|found| found.map(|seen| self.read_slot(seen)))
    }

    /// The next slot, when it is filled. Dropping the future loses nothing.
    ///
    /// The future borrows the consumer, which is not `Sync`, so it stays on its thread. A task that an executor
    /// moves between threads uses [`ready`](Consumer::ready).
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
    /// let (mut tx, rx) = ring.split();
    /// tx.fill(|slot| Ok::<(), ()>(*slot = 5)).unwrap();
    /// assert_eq!(*block_on(rx.recv_async())?, 5);
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    pub async fn recv_async(&self) -> Result<ReadSlot<'_, T, W>, RecvError> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// Returns when the next [`try_recv`](Consumer::try_recv) will not say `Empty`.
    ///
    /// For a task that an executor may move between threads: this future is `Send`.
    ///
    /// # Errors
    ///
    /// As [`recv`](Consumer::recv).
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::{Consumer, RecvError};
    /// async fn sum(mut rx: Consumer<'static, u64>) -> Result<u64, RecvError> {
    ///     let mut sum = 0;
    ///     loop {
    ///         match rx.ready().await {
    ///             Ok(()) => {}
    ///             Err(RecvError::Finished) => return Ok(sum),
    ///             Err(error) => return Err(error),
    ///         }
    ///         if let Ok(slot) = rx.try_recv() {
    ///             sum += *slot;
    ///         }
    ///     }
    /// }
    /// fn spawn<F: Future + Send + 'static>(_: F) {}
    /// # use std::future::Future;
    /// # use twinbuf_core::DoubleBuffer;
    /// # static RING: DoubleBuffer<u64> = DoubleBuffer::new([0, 0]);
    /// spawn(sum(RING.try_split_static().unwrap().1));
    /// ```
    pub async fn ready(&mut self) -> Result<(), RecvError> {
        poll_fn(move |cx| self.poll_filled(cx)).await.map(|_| ())
    }

    /// The slots in order, until the producer finishes.
    ///
    /// An item borrows the consumer, not the iterator: two may be held at once. After an error the iterator
    /// ends.
    ///
    /// # Errors
    ///
    /// An item is [`Abandoned`](RecvError::Abandoned) if the producer went away without `finish`, or
    /// [`AllHeld`](RecvError::AllHeld) if the next slot in turn is held by an earlier item.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::RecvError;
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, rx) = ring.split();
    /// tx.fill(|slot| Ok::<(), ()>(*slot = 1)).unwrap();
    /// drop(tx); // without `finish`: not the end of the data
    /// let mut slots = rx.iter();
    /// assert_eq!(*slots.next().unwrap()?, 1);
    /// assert_eq!(slots.next().unwrap().unwrap_err(), RecvError::Abandoned);
    /// assert!(slots.next().is_none());
    /// # Ok::<(), RecvError>(())
    /// ```
    #[must_use]
    pub fn iter(&self) -> Iter<'_, T, W> {
        Iter { consumer: self, ended: false }
    }

    /// What this consumer has done so far. Counters of the handle itself: reading and keeping them costs the
    /// other side nothing.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// rx.recv().unwrap();
    /// assert_eq!(rx.stats().handoffs, 1);
    /// ```
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        ConsumerStats { handoffs: self.at.get().seq, ..self.stats.get() }
    }

    fn slot(&self) -> SlotRef<'_, T, W> {
        self.ring.slot(self.at.get())
    }

    fn lap(&self) -> Lap {
        self.at.get().lap
    }

    /// The guard of the next slot, which the caller found filled in state `seen`, with no foreign code run since.
    fn read_slot(&self, seen: State) -> ReadSlot<'_, T, W> {
        let at = self.at.get();
        self.at.set(at.next(self.ring.len()));
        ReadSlot { slot: self.ring.slot(at), seen, seq: at.seq }
    }

    #[inline]
    fn wait<P: Patience<W>>(&self, patience: &P) -> Result<Result<State, RecvError>, P::Over> {
        let lap = self.lap();
        let seen = self.slot().state();
        if let Some(found) = filled(seen, lap) {
            return Ok(found);
        }
        if self.ring.strategy().may_call_back(Ours) {
            return self.wait_among_calls(seen, patience);
        }
        let (found, spurious) = self.slot().wait(seen, |seen| filled(seen, lap), patience);
        self.count(1, spurious);
        found
    }

    /// The rest of a wait whose strategy may come back to this consumer.
    fn wait_among_calls<P: Patience<W>>(
        &self,
        mut seen: State,
        patience: &P,
    ) -> Result<Result<State, RecvError>, P::Over> {
        self.count(1, 0);
        loop {
            let at = self.at.get();
            let (found, spurious) = self.slot().wait(seen, |seen| self.look(at, seen), patience);
            self.count(0, spurious);
            if let Some(found) = found.transpose() {
                return found;
            }
            seen = self.slot().state();
        }
    }

    fn poll_filled(&self, cx: &mut Context<'_>) -> Poll<Result<State, RecvError>> {
        loop {
            let at = self.at.get();
            match self.ring.slot(at).poll(Side::Consumer, cx.waker(), |seen| self.look(at, seen)) {
                Some(Some(found)) => return Poll::Ready(found),
                Some(None) => {}
                None => break,
            }
        }
        let seq = self.at.get().seq;
        let again = self.pending.replace(Some(seq)) == Some(seq);
        self.count(u64::from(!again), u64::from(again));
        Poll::Pending
    }

    /// What a consumer that began to wait at `at` makes of that slot's word; `Some(None)`: nothing, since it stands
    /// elsewhere by now. (The strategy and the wakers are foreign code, which may come back here and receive.)
    fn look(&self, at: Cursor, seen: State) -> Option<Option<Result<State, RecvError>>> {
        if self.at.get().seq == at.seq { filled(seen, at.lap).map(Some) } else { Some(None) }
    }

    fn count(&self, waits: u64, spurious: u64) {
        let mut stats = self.stats.get();
        stats.waits += waits;
        stats.spurious_wakes += spurious;
        self.stats.set(stats);
    }
}

/// What a waiting consumer makes of a word: the state in which its slot is filled, or why there is none.
fn filled(seen: State, lap: Lap) -> Option<Result<State, RecvError>> {
    match seen.for_consumer(lap) {
        ConsumerView::Full => Some(Ok(seen)),
        ConsumerView::Empty => None,
        ConsumerView::Finished => Some(Err(RecvError::Finished)),
        ConsumerView::Abandoned => Some(Err(RecvError::Abandoned)),
        ConsumerView::AllHeld => Some(Err(RecvError::AllHeld)),
    }
}

impl<T, W: Wait> Drop for Consumer<'_, T, W> {
    fn drop(&mut self) {
        // Held until the producer is told: what drops a waker is foreign code, which may panic.
        let _waker = self.ring.take_waker(Side::Consumer);
        self.ring.end(State::CLOSE, Side::Producer);
    }
}

impl<T, W: Wait> fmt::Debug for Consumer<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("seq", &self.at.get().seq)
            .field("next_slot", &self.slot().state())
            .finish_non_exhaustive()
    }
}

/// The slots of a [`Consumer`] in order; see [`Consumer::iter`].
#[derive(Debug)]
pub struct Iter<'c, T, W: Wait = Spin> {
    consumer: &'c Consumer<'c, T, W>,
    ended: bool,
}

impl<'c, T, W: Wait> Iterator for Iter<'c, T, W> {
    type Item = Result<ReadSlot<'c, T, W>, RecvError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let item = self.consumer.recv();
        self.ended = item.is_err();
        match item {
            Err(RecvError::Finished) => None,
            item => Some(item),
        }
    }
}

impl<T, W: Wait> core::iter::FusedIterator for Iter<'_, T, W> {}

impl<'c, T, W: Wait> IntoIterator for &'c Consumer<'_, T, W> {
    type Item = Result<ReadSlot<'c, T, W>, RecvError>;
    type IntoIter = Iter<'c, T, W>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// A filled slot, to be used in place; the producer gets it back when it is dropped.
///
/// **Dropping it releases the slot**: progress must not depend on a call. (A
/// [`WriteSlot`](crate::WriteSlot) is the other way round: dropping it does *not* hand it over.)
///
/// It may be dropped on another thread than the consumer's. A guard that is leaked (`mem::forget`) costs its
/// slot: the ring runs out of slots ([`AllHeld`](RecvError::AllHeld)), it never hands one out twice.
///
/// It does not outlive the consumer:
///
/// ```compile_fail,E0505
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (_tx, rx) = ring.split();
/// let slot = rx.recv().unwrap();
/// drop(rx);
/// println!("{}", *slot);
/// ```
pub struct ReadSlot<'c, T, W: Wait = Spin> {
    slot: SlotRef<'c, T, W>,
    /// The state in which the slot was found filled.
    seen: State,
    seq: u64,
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
    /// let (mut tx, rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// tx.acquire().unwrap().commit().unwrap();
    /// rx.recv()?.release();
    /// assert!(tx.try_acquire().is_ok());
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    #[inline]
    pub fn release(self) {}

    /// The number of this hand-off, from 0: that of the [`WriteSlot`](crate::WriteSlot) it was filled by.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, rx) = ring.split();
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
        self.slot.hand_over(self.seen, Side::Producer, State::release, || ());
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
        f.debug_struct("ReadSlot").field("seq", &self.seq).field("value", &**self).finish()
    }
}
