//! The ring itself: the slots, their words, and the steps of [`state`](crate::state) done atomically.
//!
//! # The orderings
//!
//! A hand-off publishes with a Release read-modify-write of the slot's word and is taken with an Acquire load
//! of the same word. So is the end of a handle: what was done before it is visible to the side that is told of it.
//! That is all: there is no fence and nothing is `SeqCst`.
//!
//! # Why no wakeup is lost
//!
//! Who waits and who wakes both do a read-modify-write on the same word, so one comes first in the word's
//! modification order.
//!
//! * *The waiter first:* it has added `WAITER`; whoever changes the word next replaces a state with `WAITER`
//!   and so wakes it. The strategy may not sleep through that ([`Wait`]'s contract).
//! * *The other side first:* the waiter's compare-exchange fails, it looks at what it found instead, and does
//!   not sleep.
//!
//! A `WAITER` left behind by a wait that timed out or was cancelled costs the next hand-off one needless wake.
//!
//! # Why the end comes in order
//!
//! `finish` and the drop of a handle set their bits on *every* word. The consumer learns of the end from the
//! word that it would read next, and there `FULL` wins: all that was committed before is delivered first.

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::task::Waker;

use crate::consumer::Consumer;
use crate::producer::Producer;
use crate::state::{Lap, State};
use crate::sync::{self, AtomicU32, Ordering, UnsafeCell, const_fn};
use crate::wait::{Spin, Wait, WaitUntil};
use crate::waker::WakerCell;

/// A ring of two slots: one is filled while the other is used.
pub type DoubleBuffer<T, W = Spin> = Ring<T, 2, W>;

/// `N` fixed slots (two unless said otherwise), handed back and forth between one producer and one consumer.
///
/// The slots hold values of `T` that are made once, filled in place, read in place and recycled: nothing is
/// moved, allocated or dropped by a hand-off. A `T` that can be partly filled carries its own length.
///
/// A ring is used through its two handles: borrowed ([`split`](Ring::split)), from a `static`
/// ([`try_split_static`](Ring::try_split_static)) or owning the ring together (`into_handles`).
///
/// # Examples
///
/// ```
/// use twinbuf_core::{DoubleBuffer, RecvError};
///
/// let mut ring = DoubleBuffer::new([[0u8; 4096], [0u8; 4096]]);
/// let (mut tx, rx) = ring.split();
/// std::thread::scope(move |s| {
///     s.spawn(move || {
///         for i in 0..3 {
///             let mut slot = tx.acquire()?;
///             slot.fill(i); // in place: no copy, no allocation
///             slot.commit()?;
///         }
///         tx.finish();
///         Ok::<(), twinbuf_core::Closed>(())
///     });
///     for i in 0..3 {
///         assert_eq!(rx.recv().unwrap()[4095], i); // released when the guard is dropped
///     }
///     assert_eq!(rx.recv().unwrap_err(), RecvError::Finished);
/// });
/// ```
///
/// A slot that is not `Send` cannot cross threads, and neither can its ring's handles:
///
/// ```compile_fail,E0277
/// let mut ring = twinbuf_core::DoubleBuffer::new([std::rc::Rc::new(1), std::rc::Rc::new(2)]);
/// let (tx, rx) = ring.split();
/// std::thread::scope(|s| { s.spawn(move || drop(tx)); });
/// ```
///
/// There is one producer and one consumer; a second pair needs the first one's end:
///
/// ```compile_fail,E0499
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (tx, rx) = ring.split();
/// let (tx2, rx2) = ring.split();
/// drop((tx, rx));
/// ```
// The words first, and the slots right behind them: the words share one cache line (apart from each other
// they cost three lines a hand-off instead of one), small slots ride on the same line, and the alignment
// keeps the neighbours away. The line is 128 bytes where processors fetch pairs of 64 (Intel's Optimization
// Reference Manual on the spatial prefetcher) or have lines of 128 (Apple, POWER), 32 on small cores.
#[repr(C)]
#[cfg_attr(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "powerpc64"), repr(align(128)))]
#[cfg_attr(any(target_arch = "arm", target_arch = "riscv32"), repr(align(32)))]
#[cfg_attr(
    not(any(
        target_arch = "x86_64",
        target_arch = "aarch64",
        target_arch = "powerpc64",
        target_arch = "arm",
        target_arch = "riscv32"
    )),
    repr(align(64))
)]
pub struct Ring<T, const N: usize = 2, W = Spin> {
    words: [AtomicU32; N],
    slots: [UnsafeCell<T>; N],
    waiting: Waiting<W>,
    /// Not zero once the ring has been split.
    taken: AtomicU32,
}

// SAFETY: through a shared ring a slot's value is reached only by the side that owns the slot, one thread at a
// time, and handed over with Release and Acquire: as if it were sent. Hence `T: Send`, and no `T: Sync`. The
// strategy is called from both sides at once: `W: Sync`.
unsafe impl<T: Send, const N: usize, W: Sync> Sync for Ring<T, N, W> {}

/// Everything a ring has for those who wait.
struct Waiting<W> {
    strategy: W,
    producer: WakerCell,
    consumer: WakerCell,
}

impl<T, const N: usize> Ring<T, N, Spin> {
    const_fn! {
        /// A ring of these slots whose blocking calls [`Spin`]. Each slot starts with the value given here.
        ///
        /// `const`, so that a ring can be a `static`. Other strategies: [`with_wait`](Ring::with_wait).
        ///
        /// A ring of no slots does not compile:
        ///
        /// ```compile_fail,E0080
        /// let ring = twinbuf_core::Ring::<u8, 0>::new([]);
        /// ```
        #[must_use]
        pub const fn new(slots: [T; N]) -> Self {
            Self::with_wait(slots, Spin)
        }
    }
}

impl<T, const N: usize, W> Ring<T, N, W> {
    const_fn! {
        /// A ring of these slots whose blocking calls wait by `wait`.
        ///
        /// ```
        /// use twinbuf_core::{DoubleBuffer, Park};
        /// static RING: DoubleBuffer<u64, Park> = DoubleBuffer::with_wait([0, 0], Park);
        /// ```
        #[must_use]
        pub const fn with_wait(slots: [T; N], wait: W) -> Self {
            const { assert!(N > 0, "a ring needs at least one slot") };
            Self {
                words: sync::words(),
                slots: sync::cells(slots),
                waiting: Waiting { strategy: wait, producer: WakerCell::new(), consumer: WakerCell::new() },
                taken: AtomicU32::new(0),
            }
        }
    }

    /// The slots' values, in the order they were given in.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([10, 20]);
    /// let (mut tx, rx) = ring.split();
    /// tx.fill(|slot| Ok::<(), ()>(*slot += 1)).unwrap();
    /// drop((tx, rx));
    /// assert_eq!(ring.into_inner(), [11, 20]);
    /// ```
    #[must_use]
    pub fn into_inner(self) -> [T; N] {
        self.slots.map(UnsafeCell::into_inner)
    }
}

impl<T, const N: usize, W: Wait> Ring<T, N, W> {
    /// The two handles, borrowing the ring: no allocation, and the ring can be split again when they are gone.
    ///
    /// Starts afresh: every slot is free, whatever an earlier pair of handles left behind.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0, 0]);
    /// for epoch in 1..=2 {
    ///     let (mut tx, rx) = ring.split();
    ///     tx.fill(|slot| Ok::<(), ()>(*slot = epoch)).unwrap();
    ///     assert_eq!(*rx.recv().unwrap(), epoch);
    /// }
    /// ```
    pub fn split(&mut self) -> (Producer<'_, T, W>, Consumer<'_, T, W>) {
        self.restart();
        let ring = self.by_ref();
        (Producer::new(ring), Consumer::new(ring))
    }

    /// The two handles of a ring that lives for ever, such as a `static`: once.
    ///
    /// `None` if the ring was split before, in whatever way.
    ///
    /// ```
    /// use twinbuf_core::DoubleBuffer;
    /// static RING: DoubleBuffer<u32> = DoubleBuffer::new([0, 0]);
    ///
    /// let (mut tx, rx) = RING.try_split_static().unwrap();
    /// assert!(RING.try_split_static().is_none());
    /// std::thread::spawn(move || tx.fill(|slot| Ok::<(), ()>(*slot = 7)).unwrap());
    /// assert_eq!(*rx.recv().unwrap(), 7);
    /// ```
    pub fn try_split_static(&'static self) -> Option<(Producer<'static, T, W>, Consumer<'static, T, W>)> {
        // Relaxed: only who comes first. The slots are as they were made; whoever hands this `&'static` to
        // another thread has made that visible too.
        if self.taken.swap(1, Ordering::Relaxed) != 0 {
            return None;
        }
        let ring = self.by_ref();
        Some((Producer::new(ring), Consumer::new(ring)))
    }

    /// The two handles, owning the ring together: it is freed with the second of them.
    ///
    /// ```
    /// use twinbuf_core::{Park, Ring};
    /// let slots = std::array::from_fn::<_, 3, _>(|_| vec![0u8; 1 << 20]);
    /// let (mut tx, rx) = Ring::with_wait(slots, Park).into_handles();
    /// std::thread::spawn(move || tx.fill(|slot| Ok::<(), ()>(slot[0] = 1)).map(|()| tx.finish()));
    /// assert_eq!(rx.recv().unwrap()[0], 1);
    /// ```
    #[cfg(feature = "alloc")]
    #[must_use]
    pub fn into_handles<'a>(mut self) -> (Producer<'a, T, W>, Consumer<'a, T, W>)
    where
        T: Send + 'a,
        W: Send + Sync + 'a,
    {
        self.restart();
        let owner = alloc::sync::Arc::new(self);
        // SAFETY: the ring does not move in its `Arc`, which each handle keeps until it is dropped itself; the
        // guards, which copy this reference, borrow the handle that they came from.
        let ring = unsafe { &*alloc::sync::Arc::as_ptr(&owner) }.by_ref();
        (Producer::owning(ring, owner.clone()), Consumer::owning(ring, owner))
    }

    fn restart(&mut self) {
        self.words = sync::words();
        self.waiting.producer = WakerCell::new();
        self.waiting.consumer = WakerCell::new();
        self.taken = AtomicU32::new(1);
    }

    fn by_ref(&self) -> RingRef<'_, T, W> {
        RingRef {
            words: NonNull::from(&self.words),
            slots: NonNull::from(&self.slots),
            waiting: NonNull::from(&self.waiting),
            ring: PhantomData,
        }
    }
}

/// The two handles of a new double buffer, owning it together; blocking calls [`Park`](crate::Park).
///
/// For other depths and strategies: [`Ring::into_handles`].
///
/// ```
/// let (mut tx, rx) = twinbuf_core::channel([Vec::new(), Vec::new()]);
/// std::thread::spawn(move || {
///     tx.fill(|slot| Ok::<(), ()>(slot.extend([1, 2, 3]))).unwrap();
///     tx.finish();
/// });
/// for slot in rx.iter() {
///     assert_eq!(**slot?, [1, 2, 3]);
/// }
/// # Ok::<(), twinbuf_core::RecvError>(())
/// ```
#[cfg(feature = "std")]
#[must_use]
pub fn channel<'a, T: Send + 'a>(
    slots: [T; 2],
) -> (Producer<'a, T, crate::Park>, Consumer<'a, T, crate::Park>) {
    Ring::with_wait(slots, crate::Park).into_handles()
}

/// Keeps a ring alive for handles whose type does not say its depth.
#[cfg(feature = "alloc")]
pub(crate) trait Owner {}

#[cfg(feature = "alloc")]
impl<T, const N: usize, W> Owner for Ring<T, N, W> {}

/// A reference to a ring without its depth in the type. Whoever has one borrows the ring or keeps it alive.
///
/// Made of pointers: a function that is passed a reference, be it in a struct, may rely on it up to its end, and
/// the last of the handles that own a ring frees it within the call that it was passed to.
pub(crate) struct RingRef<'a, T, W> {
    /// As many as there are slots, and at least one.
    words: NonNull<[AtomicU32]>,
    slots: NonNull<[UnsafeCell<T>]>,
    waiting: NonNull<Waiting<W>>,
    ring: PhantomData<(&'a [UnsafeCell<T>], &'a Waiting<W>)>,
}

impl<T, W> Clone for RingRef<'_, T, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, W> Copy for RingRef<'_, T, W> {}

// SAFETY: as for `Sync` of `Ring`, which this is a reference to.
unsafe impl<T: Send, W: Sync> Send for RingRef<'_, T, W> {}

impl<'a, T, W: Wait> RingRef<'a, T, W> {
    /// The slot at which a handle stands.
    pub(crate) fn slot(self, at: Cursor) -> SlotRef<'a, T, W> {
        debug_assert!(at.index < self.len());
        // SAFETY: a cursor starts at 0 and is advanced with this ring's length, so that its index stays below.
        let word = unsafe { self.words().get_unchecked(at.index) };
        // SAFETY: the ring is alive: see the type.
        let slots = unsafe { self.slots.as_ref() };
        // SAFETY: as for the word: there are as many slots as words.
        let value = unsafe { slots.get_unchecked(at.index) };
        SlotRef { word, value, waiting: self.waiting() }
    }

    fn words(self) -> &'a [AtomicU32] {
        // SAFETY: the ring is alive: see the type.
        unsafe { self.words.as_ref() }
    }

    fn waiting(self) -> &'a Waiting<W> {
        // SAFETY: the ring is alive: see the type.
        unsafe { self.waiting.as_ref() }
    }

    pub(crate) fn strategy(self) -> &'a W {
        &self.waiting().strategy
    }

    pub(crate) fn len(self) -> usize {
        self.words.len()
    }

    /// One side is gone: `bits` on every word, then a wake for whoever sleeps on one of them.
    pub(crate) fn end(self, bits: State, side: Side) {
        let waiting = self.waiting();
        let mut somebody_waits = false;
        for word in self.words() {
            // A read-modify-write on every word, whatever it holds: a waiter that was not there yet will find
            // the bits when it announces itself. Release: whatever this side did before it went, such as
            // leaving an error where the other one looks for it, is visible to who reads the bits.
            let old = State::from_bits(word.fetch_or(bits.bits(), Ordering::Release));
            if old.has_waiter() {
                somebody_waits = true;
                waiting.strategy.wake(word);
            }
        }
        if somebody_waits {
            waiting.cell(side).wake();
        }
    }

    /// Takes out the task that `side` has registered: its handle is gone.
    pub(crate) fn take_waker(self, side: Side) -> Option<Waker> {
        self.waiting().cell(side).take()
    }
}

/// One side of the ring.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    Producer,
    Consumer,
}

impl<W> Waiting<W> {
    fn cell(&self, side: Side) -> &WakerCell {
        match side {
            Side::Producer => &self.producer,
            Side::Consumer => &self.consumer,
        }
    }
}

/// Where a handle stands: the slot it handles next, its lap, and how many it has handled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    index: usize,
    pub(crate) lap: Lap,
    /// The number of hand-offs so far, which numbers the next one.
    pub(crate) seq: u64,
}

impl Cursor {
    pub(crate) const START: Cursor = Cursor { index: 0, lap: Lap::FIRST, seq: 0 };

    /// The same handle one hand-off later, in a ring of `len` slots.
    pub(crate) fn next(self, len: usize) -> Cursor {
        let seq = self.seq.wrapping_add(1);
        if self.index + 1 < len {
            Cursor { index: self.index + 1, lap: self.lap, seq }
        } else {
            Cursor { index: 0, lap: self.lap.next(), seq }
        }
    }
}

/// A reference to one slot, for the side that owns it or waits for it.
pub(crate) struct SlotRef<'a, T, W> {
    word: &'a AtomicU32,
    value: &'a UnsafeCell<T>,
    waiting: &'a Waiting<W>,
}

impl<T, W> Clone for SlotRef<'_, T, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, W> Copy for SlotRef<'_, T, W> {}

// SAFETY: as for `Sync` of `Ring`. A guard is made of this, and may be used and dropped on another thread.
unsafe impl<T: Send, W: Sync> Send for SlotRef<'_, T, W> {}
// SAFETY: a shared guard gives out `&T` and nothing else.
unsafe impl<T: Send + Sync, W: Sync> Sync for SlotRef<'_, T, W> {}

impl<T, W: Wait> SlotRef<'_, T, W> {
    /// What the word says now. Acquire: if the slot is ours, what the other side did to the value is visible.
    pub(crate) fn state(self) -> State {
        State::from_bits(self.word.load(Ordering::Acquire))
    }

    /// The value.
    ///
    /// # Safety
    ///
    /// The caller's side owns the slot, and nobody has a `&mut` to the value.
    pub(crate) unsafe fn value<'g>(self) -> &'g T
    where
        Self: 'g,
    {
        // SAFETY: the caller's promise.
        self.value.with(|value| unsafe { &*value })
    }

    /// The value, to change it.
    ///
    /// # Safety
    ///
    /// The caller's side owns the slot, and nobody else has a reference to the value.
    pub(crate) unsafe fn value_mut<'g>(self) -> &'g mut T
    where
        Self: 'g,
    {
        // SAFETY: the caller's promise.
        self.value.with_mut(|value| unsafe { &mut *value })
    }

    /// Hands the slot to the other `side`, which is woken if it waits; gives the state that was replaced.
    ///
    /// `seen` is what the word is expected to say; `step` is the hand-off. `before_wake` runs between the two:
    /// a wake may panic (it runs foreign code), and by then the handle must have moved on.
    pub(crate) fn hand_over(
        self,
        seen: State,
        side: Side,
        step: impl Fn(State) -> State,
        before_wake: impl FnOnce(),
    ) -> State {
        // Our last access to the value; nothing for the processor, but where the models check that it is.
        self.value.with_mut(|_| ());
        let mut seen = seen.bits();
        // A loop, since the other side may add its sticky bits or `WAITER` at any time; nothing else in the
        // word can change while the slot is ours, so it goes round at most three times.
        // Release: what we did to the value comes before the other side's next access. Acquire on failure: what
        // is found instead may be the other side's end, and what it did before that is to be visible.
        while let Err(now) = self.word.compare_exchange(
            seen,
            step(State::from_bits(seen)).bits(),
            Ordering::Release,
            Ordering::Acquire,
        ) {
            seen = now;
        }
        before_wake();
        let old = State::from_bits(seen);
        if old.has_waiter() {
            self.waiting.strategy.wake(self.word);
            self.waiting.cell(side).wake();
        }
        old
    }

    /// Blocks until `ready` makes something of the word's state, or `patience` is over.
    ///
    /// Says how often it was woken (or returned from its wait) for nothing.
    pub(crate) fn wait<R, P: Patience<W>>(
        self,
        mut seen: State,
        ready: impl Fn(State) -> Option<R>,
        patience: &P,
    ) -> (Result<R, P::Over>, u64) {
        let strategy = &self.waiting.strategy;
        let mut round = 0;
        let mut spurious = 0;
        loop {
            if let Some(found) = ready(seen) {
                return (Ok(found), spurious);
            }
            if let Some(over) = patience.over(strategy) {
                return (Err(over), spurious);
            }
            if strategy.relax(round) {
                round = round.saturating_add(1);
                seen = self.state();
                continue;
            }
            // Once more, though the state is the same: the strategy may have come back to the handle, which then
            // waits for another slot.
            if let Some(found) = ready(seen) {
                return (Ok(found), spurious);
            }
            if let Err(now) = self.announce(seen) {
                seen = now;
                continue;
            }
            let asleep = seen.announce();
            patience.wait(strategy, self.word, asleep.bits());
            seen = self.state();
            spurious += u64::from(seen == asleep);
        }
    }

    /// What `ready` makes of the word's state; if nothing, leaves `waker` to be woken when the word changes.
    pub(crate) fn poll<R>(self, side: Side, waker: &Waker, ready: impl Fn(State) -> Option<R>) -> Option<R> {
        if let Some(found) = ready(self.state()) {
            return Some(found);
        }
        // First the waker, then the announcement: whoever sees the announcement finds the waker.
        self.waiting.cell(side).register(waker);
        let mut seen = self.state();
        loop {
            if let Some(found) = ready(seen) {
                return Some(found);
            }
            match self.announce(seen) {
                Ok(()) => return None,
                Err(now) => seen = now,
            }
        }
    }

    /// Adds `WAITER` to the word if it still is `seen`; otherwise says what it is.
    fn announce(self, seen: State) -> Result<(), State> {
        if seen.has_waiter() {
            return Ok(());
        }
        // Relaxed: nothing is published; the word's modification order alone decides who came first. Acquire
        // on failure: what is found instead may say that the slot is ours.
        match self.word.compare_exchange(
            seen.bits(),
            seen.announce().bits(),
            Ordering::Relaxed,
            Ordering::Acquire,
        ) {
            Ok(_) => Ok(()),
            Err(now) => Err(State::from_bits(now)),
        }
    }
}

/// How long a blocking call waits.
pub(crate) trait Patience<W> {
    /// Says that the wait is over.
    type Over;

    fn over(&self, strategy: &W) -> Option<Self::Over>;
    fn wait(&self, strategy: &W, word: &AtomicU32, expected: u32);
}

/// Waits as long as it takes.
pub(crate) struct Forever;

impl<W: Wait> Patience<W> for Forever {
    type Over = core::convert::Infallible;

    fn over(&self, _strategy: &W) -> Option<Self::Over> {
        None
    }

    fn wait(&self, strategy: &W, word: &AtomicU32, expected: u32) {
        strategy.wait(word, expected);
    }
}

/// Waits until a point in time.
pub(crate) struct Until<I>(pub(crate) I);

/// The point in time of an [`Until`] has come.
pub(crate) struct TimedOut;

impl<W: WaitUntil> Patience<W> for Until<W::Instant> {
    type Over = TimedOut;

    fn over(&self, strategy: &W) -> Option<TimedOut> {
        strategy.expired(self.0).then_some(TimedOut)
    }

    fn wait(&self, strategy: &W, word: &AtomicU32, expected: u32) {
        strategy.wait_until(word, expected, self.0);
    }
}

/// The states of the slots in words, as in `[FULL|LAP, free|WAITER]`.
impl<T, const N: usize, W> fmt::Debug for Ring<T, N, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = |word: &AtomicU32| State::from_bits(word.load(Ordering::Relaxed));
        f.debug_struct("Ring").field("slots", &self.words.each_ref().map(state)).finish_non_exhaustive()
    }
}
