//! The producer's side: acquire a free slot, fill it in place, commit it.

use core::fmt;
use core::future::poll_fn;
use core::ops::{Deref, DerefMut};
use core::task::{Context, Poll};
use core::time::Duration;

use crate::error::{AcquireTimeoutError, Closed, FillError, TryAcquireError};
use crate::ring::{Cursor, Forever, Patience, RingRef, Side, SlotRef, TimedOut, Until};
use crate::state::{ProducerView, State};
use crate::wait::{Spin, Wait, WaitUntil};

/// The side of a ring that fills slots.
///
/// Dropping a producer tells the consumer that it was *abandoned*: a panic, an early return or a lost error can
/// never look like the end of the data. Only [`finish`](Producer::finish) is the end.
///
/// # Cancelling
///
/// Every way to wait for a slot may be given up: a timeout, a dropped future, a dropped [`WriteSlot`] leave
/// the ring as it was, and the next call gets the same slot.
pub struct Producer<'a, T, W: Wait = Spin> {
    ring: RingRef<'a, T, W>,
    at: Cursor,
    stats: ProducerStats,
    /// The hand-off for which the last poll that found nothing was.
    pending: Option<u64>,
    /// What to tell the consumer at the end.
    end: State,
    #[cfg(feature = "alloc")]
    _owner: Option<alloc::sync::Arc<dyn crate::ring::Owner + Send + Sync + 'a>>,
}

/// What a [`Producer`] has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProducerStats {
    /// Slots committed.
    pub handoffs: u64,
    /// Calls that found the next slot still full and had to wait for it (`try_acquire` never does).
    pub waits: u64,
    /// Wake-ups, within those waits, after which the slot was still full. A poll that finds the same slot still
    /// full as the one before counts as one, and so does a sleep that its deadline ended.
    pub spurious_wakes: u64,
}

impl<'a, T, W: Wait> Producer<'a, T, W> {
    pub(crate) fn new(ring: RingRef<'a, T, W>) -> Self {
        Self {
            ring,
            at: Cursor::START,
            stats: ProducerStats::default(),
            pending: None,
            end: State::ABANDON,
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

impl<T, W: Wait> Producer<'_, T, W> {
    /// The next slot, if it is free now. Never waits: at most one atomic load.
    ///
    /// # Errors
    ///
    /// [`Full`](TryAcquireError::Full) while the consumer has not released it,
    /// [`Closed`](TryAcquireError::Closed) once the consumer is gone.
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
    pub fn try_acquire(&mut self) -> Result<WriteSlot<'_, T, W>, TryAcquireError> {
        let seen = self.slot().state();
        match seen.for_producer() {
            ProducerView::Free => Ok(self.write_slot(seen)),
            ProducerView::Full => Err(TryAcquireError::Full),
            ProducerView::Closed => Err(TryAcquireError::Closed),
        }
    }

    /// The next slot, waiting until it is free.
    ///
    /// # Errors
    ///
    /// [`Closed`] once the consumer is gone.
    ///
    /// # Examples
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, rx) = ring.split();
    /// let mut slot = tx.acquire()?;
    /// *slot = 5;
    /// slot.commit()?;
    /// assert_eq!(*rx.recv().unwrap(), 5);
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    #[inline]
    pub fn acquire(&mut self) -> Result<WriteSlot<'_, T, W>, Closed> {
        let Ok(found) = self.wait(&Forever);
        found.map(|seen| self.write_slot(seen))
    }

    /// The next slot, waiting until it is free, but no longer than `timeout`.
    ///
    /// # Errors
    ///
    /// [`Timeout`](AcquireTimeoutError::Timeout) when the time is over and the slot still full,
    /// [`Closed`](AcquireTimeoutError::Closed) once the consumer is gone.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use twinbuf_core::AcquireTimeoutError;
    /// let (mut tx, _rx) = twinbuf_core::channel([0; 2]);
    /// tx.acquire().unwrap().commit().unwrap();
    /// tx.acquire().unwrap().commit().unwrap();
    /// let timeout = Duration::from_millis(1);
    /// assert_eq!(tx.acquire_timeout(timeout).unwrap_err(), AcquireTimeoutError::Timeout);
    /// ```
    pub fn acquire_timeout(&mut self, timeout: Duration) -> Result<WriteSlot<'_, T, W>, AcquireTimeoutError>
    where
        W: WaitUntil,
    {
        match self.ring.strategy().after(timeout) {
            Some(deadline) => self.acquire_deadline(deadline),
            None => self.acquire().map_err(|Closed| AcquireTimeoutError::Closed),
        }
    }

    /// The next slot, waiting until it is free, but no longer than until `deadline`, which may lie in the past:
    /// then a slot that is free is returned all the same.
    ///
    /// # Errors
    ///
    /// As [`acquire_timeout`](Producer::acquire_timeout).
    ///
    /// # Examples
    ///
    /// ```
    /// let (mut tx, _rx) = twinbuf_core::channel([0; 2]);
    /// let deadline = std::time::Instant::now();
    /// assert!(tx.acquire_deadline(deadline).is_ok());
    /// ```
    pub fn acquire_deadline(
        &mut self,
        deadline: W::Instant,
    ) -> Result<WriteSlot<'_, T, W>, AcquireTimeoutError>
    where
        W: WaitUntil,
    {
        match self.wait(&Until(deadline)) {
            Ok(Ok(seen)) => Ok(self.write_slot(seen)),
            Ok(Err(Closed)) => Err(AcquireTimeoutError::Closed),
            Err(TimedOut) => Err(AcquireTimeoutError::Timeout),
        }
    }

    /// The next slot, or the promise that the task of `cx` is woken when it is free.
    ///
    /// Only the task that polled last is woken for the slot; another one, whose waker is still there, is woken
    /// at once, so that it polls again.
    ///
    /// # Errors
    ///
    /// [`Closed`] once the consumer is gone.
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
    pub fn poll_acquire(&mut self, cx: &mut Context<'_>) -> Poll<Result<WriteSlot<'_, T, W>, Closed>> {
        self.poll_free(cx).map(|found| found.map(|seen| self.write_slot(seen)))
    }

    /// The next slot, when it is free. Dropping the future loses nothing.
    ///
    /// # Errors
    ///
    /// [`Closed`] once the consumer is gone.
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
    /// block_on(async {
    ///     let mut slot = tx.acquire_async().await?;
    ///     *slot = 5;
    ///     slot.commit()
    /// })?;
    /// assert_eq!(*rx.recv().unwrap(), 5);
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    pub async fn acquire_async(&mut self) -> Result<WriteSlot<'_, T, W>, Closed> {
        let seen = poll_fn(|cx| self.poll_free(cx)).await?;
        Ok(self.write_slot(seen))
    }

    /// Waits for the next slot, lets `fill` fill it in place, and commits it.
    ///
    /// # Errors
    ///
    /// [`Failed`](FillError::Failed) with the closure's error: the slot was not committed.
    /// [`Closed`](FillError::Closed) once the consumer is gone.
    ///
    /// # Panics
    ///
    /// If `fill` does; the slot was then not committed either.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::Read;
    /// let mut ring = twinbuf_core::DoubleBuffer::new([[0u8; 4], [0u8; 4]]);
    /// let (mut tx, rx) = ring.split();
    /// let mut file: &[u8] = b"12345";
    /// assert!(tx.fill(|slot| file.read_exact(slot)).is_ok());
    /// assert!(tx.fill(|slot| file.read_exact(slot)).is_err()); // only one byte left: nothing is committed
    /// assert_eq!(*rx.try_recv().unwrap(), *b"1234");
    /// assert!(rx.try_recv().is_err());
    /// ```
    pub fn fill<R, E>(&mut self, fill: impl FnOnce(&mut T) -> Result<R, E>) -> Result<R, FillError<E>> {
        let mut slot = self.acquire().map_err(|Closed| FillError::Closed)?;
        let result = fill(&mut slot).map_err(FillError::Failed)?;
        slot.commit().map_err(|Closed| FillError::Closed)?;
        Ok(result)
    }

    /// The end of the data: the consumer receives what was committed, then `Finished`.
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf_core::{DoubleBuffer, TryRecvError};
    /// let mut ring = DoubleBuffer::new([0; 2]);
    /// let (tx, rx) = ring.split();
    /// tx.finish();
    /// assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Finished);
    /// ```
    pub fn finish(mut self) {
        self.end = State::FINISH;
    }

    /// Whether the consumer is gone.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (tx, rx) = ring.split();
    /// assert!(!tx.is_closed());
    /// drop(rx);
    /// assert!(tx.is_closed());
    /// ```
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.slot().state().is_closed()
    }

    /// What this producer has done so far. Counters of the handle itself: reading and keeping them costs the
    /// other side nothing.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, _rx) = ring.split();
    /// tx.acquire().unwrap().commit().unwrap();
    /// assert_eq!(tx.stats().handoffs, 1);
    /// assert_eq!(tx.stats().waits, 0);
    /// ```
    #[must_use]
    pub fn stats(&self) -> ProducerStats {
        ProducerStats { handoffs: self.at.seq, ..self.stats }
    }

    fn slot(&self) -> SlotRef<'_, T, W> {
        self.ring.slot(self.at)
    }

    /// The guard of the next slot, which the caller found free in state `seen`.
    fn write_slot(&mut self, seen: State) -> WriteSlot<'_, T, W> {
        WriteSlot { slot: self.ring.slot(self.at), seen, len: self.ring.len(), at: &mut self.at }
    }

    #[inline]
    fn wait<P: Patience<W>>(&mut self, patience: &P) -> Result<Result<State, Closed>, P::Over> {
        let seen = self.slot().state();
        if let Some(found) = free(seen) {
            return Ok(found);
        }
        let (found, spurious) = self.slot().wait(seen, free, patience);
        self.stats.waits += 1;
        self.stats.spurious_wakes += spurious;
        found
    }

    fn poll_free(&mut self, cx: &mut Context<'_>) -> Poll<Result<State, Closed>> {
        if let Some(found) = self.slot().poll(Side::Producer, cx.waker(), free) {
            return Poll::Ready(found);
        }
        let again = self.pending.replace(self.at.seq) == Some(self.at.seq);
        self.stats.waits += u64::from(!again);
        self.stats.spurious_wakes += u64::from(again);
        Poll::Pending
    }
}

/// What a waiting producer makes of a word: the state in which its slot is free, or the end.
fn free(seen: State) -> Option<Result<State, Closed>> {
    match seen.for_producer() {
        ProducerView::Free => Some(Ok(seen)),
        ProducerView::Full => None,
        ProducerView::Closed => Some(Err(Closed)),
    }
}

impl<T, W: Wait> Drop for Producer<'_, T, W> {
    fn drop(&mut self) {
        // Held until the consumer is told: what drops a waker is foreign code, which may panic.
        let _waker = self.ring.take_waker(Side::Producer);
        self.ring.end(self.end, Side::Consumer);
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

/// A free slot, to be filled in place.
///
/// **Dropping it does not hand it over**: half-filled data must not leak out. Call
/// [`commit`](WriteSlot::commit). (A [`ReadSlot`](crate::ReadSlot) is the other way round: dropping it *does*
/// give the slot back.)
///
/// The value is what the consumer left in the slot, or what the ring was made with: a buffer to reuse.
///
/// It borrows the producer, so that one slot is filled at a time, and none outlives its handle:
///
/// ```compile_fail,E0505
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (mut tx, _rx) = ring.split();
/// let slot = tx.acquire().unwrap();
/// drop(tx);
/// slot.commit();
/// ```
#[must_use = "a slot that is dropped without `commit` is not handed over"]
pub struct WriteSlot<'p, T, W: Wait = Spin> {
    slot: SlotRef<'p, T, W>,
    /// The state in which the slot was found free.
    seen: State,
    at: &'p mut Cursor,
    len: usize,
}

impl<T, W: Wait> WriteSlot<'_, T, W> {
    /// Hands the slot over to the consumer.
    ///
    /// # Errors
    ///
    /// [`Closed`] if the consumer is gone: nobody will read it.
    ///
    /// # Panics
    ///
    /// If waking the consumer's task does (its `Waker` is foreign code); the slot has then been handed over.
    ///
    /// # Examples
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, rx) = ring.split();
    /// drop(tx.acquire()?); // not handed over
    /// tx.acquire()?.commit()?;
    /// assert!(rx.try_recv().is_ok());
    /// assert!(rx.try_recv().is_err());
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    #[inline]
    pub fn commit(self) -> Result<(), Closed> {
        let (at, len) = (self.at, self.len);
        let lap = at.lap;
        let old = self.slot.hand_over(self.seen, Side::Consumer, |s| s.commit(lap), || *at = at.next(len));
        if old.is_closed() { Err(Closed) } else { Ok(()) }
    }

    /// Gives the slot up, as dropping it does: the next acquire gets it again, with what has been written.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0; 2]);
    /// let (mut tx, _rx) = ring.split();
    /// let mut slot = tx.acquire()?;
    /// *slot = 7;
    /// slot.abort();
    /// assert_eq!(*tx.acquire()?, 7);
    /// # Ok::<(), twinbuf_core::Closed>(())
    /// ```
    pub fn abort(self) {}

    /// The number of this hand-off, from 0.
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
        self.at.seq
    }
}

impl<T, W: Wait> Deref for WriteSlot<'_, T, W> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the slot was found free, so it is the producer's until `commit`, and this guard is the only
        // one: it holds the producer's cursor. A `&mut` would need `&mut self`.
        unsafe { self.slot.value() }
    }
}

impl<T, W: Wait> DerefMut for WriteSlot<'_, T, W> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `&mut self` excludes any other reference.
        unsafe { self.slot.value_mut() }
    }
}

impl<T: fmt::Debug, W: Wait> fmt::Debug for WriteSlot<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteSlot").field("seq", &self.seq()).field("value", &**self).finish()
    }
}
