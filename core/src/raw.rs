//! The parts that both handles and their guards share: pointers into a ring, and the steps of [`state`](crate::state)
//! applied atomically.
//!
//! # The orderings
//!
//! A hand-off publishes with a Release read-modify-write of the slot's word, and the other side takes it with an
//! Acquire read of the same word. The end of a handle works the same way: what a side did before its end is visible to
//! the side that sees the end. There is no fence, and nothing is `SeqCst`.
//!
//! # Why no wakeup is lost
//!
//! Waiter (unless `WAITER` is set already) and waker both do a read-modify-write on the same word, so one comes first
//! in the word's modification order.
//!
//! * *The waiter first:* it has added `WAITER`; the next change of the word replaces a state with `WAITER` and so
//!   wakes it. The strategy may not sleep through that ([`Wait`]'s contract).
//! * *The other side first:* the waiter's compare-exchange fails. The waiter looks at the value that it found
//!   before it sleeps.
//!
//! A `WAITER` left behind by a wait that timed out or was cancelled costs the next hand-off at most one needless wake.
//!
//! Both sides can wait for the same slot. While a reserved slot is open, the consumer waits for its commit and the
//! producer, one lap ahead, waits for its release. While a kept slot is held, the producer waits for its release and
//! the consumer, one lap ahead, waits for the next commit. Both share one `WAITER` bit. The hand-off clears it and
//! wakes both sides; the side that must wait longer sets the bit again.
//!
//! # Why the end comes in order
//!
//! `finish` and the drop of a handle set their bits on *every* word. The consumer reads the end from the word that it
//! would read next, and there `FULL` wins: what was committed comes first, up to an open slot.

#[cfg(feature = "alloc")]
use alloc::{boxed::Box, vec::Vec};
use core::marker::PhantomData;
#[cfg(feature = "alloc")]
use core::mem::MaybeUninit;
use core::panic::{RefUnwindSafe, UnwindSafe};
use core::ptr::NonNull;
use core::task::{Poll, Waker};

use crate::state::{Lap, State};
#[cfg(feature = "alloc")]
use crate::sync::{self, HeapWords};
use crate::sync::{AtomicU32, Ordering, UnsafeCell, const_fn};
use crate::wait::{Wait, WaitUntil, Word};
use crate::waker::WakerCell;

/// The parts of a ring that serve waiting sides.
pub(crate) struct Waiting<W> {
    pub(crate) strategy: W,
    producer: WakerCell,
    consumer: WakerCell,
}

impl<W> Waiting<W> {
    const_fn! {
        pub(crate) const fn new(strategy: W) -> Self {
            Self { strategy, producer: WakerCell::new(), consumer: WakerCell::new() }
        }
    }

    fn cell(&self, side: Side) -> &WakerCell {
        match side {
            Side::Producer => &self.producer,
            Side::Consumer => &self.consumer,
        }
    }
}

/// One side of the ring.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    Producer,
    Consumer,
}

/// A ring on the heap, owned jointly by its handles and guards.
#[cfg(feature = "alloc")]
pub(crate) struct Block<T, W> {
    /// The number of shares, including the first. The maximum is two handles and one guard per slot.
    count: AtomicU32,
    pub(crate) memory: Memory<T>,
    pub(crate) waiting: Waiting<W>,
}

#[cfg(feature = "alloc")]
impl<T, W> Block<T, W> {
    pub(crate) fn new(slots: Vec<T>, wait: W) -> Self {
        Self { count: AtomicU32::new(1), memory: Memory::new(slots), waiting: Waiting::new(wait) }
    }
}

/// The words and slots of a ring on the heap.
#[cfg(feature = "alloc")]
pub(crate) enum Memory<T> {
    /// Small slots share the cache line of their words, as in a `Ring`: a hand-off moves one line and not two.
    Together(Box<Line<T>>),
    /// Larger slots stay in the memory of their vector.
    Apart(HeapWords, Box<[UnsafeCell<T>]>),
}

/// The words and slots of a ring of few, small slots, on cache lines that hold nothing else. See `Ring` for the 128
/// bytes.
#[cfg(feature = "alloc")]
#[repr(C, align(128))]
pub(crate) struct Line<T> {
    words: [AtomicU32; Line::<()>::MOST],
    /// The first `len` are initialized.
    slots: [MaybeUninit<UnsafeCell<T>>; Line::<()>::MOST],
    len: usize,
}

#[cfg(feature = "alloc")]
impl<T> Line<T> {
    const MOST: usize = 4;

    // Not inlined, nor is `take_values` below: a caller's stack frame would otherwise reserve room for `MOST` values,
    // even for large values, which are never stored in a line.
    #[inline(never)]
    fn new(values: Vec<T>) -> Box<Self> {
        let slots = [const { MaybeUninit::uninit() }; Line::<()>::MOST];
        let mut line = Box::new(Line { words: sync::words(), slots, len: values.len() });
        for (slot, value) in line.slots.iter_mut().zip(values) {
            slot.write(UnsafeCell::new(value));
        }
        line
    }

    #[inline(never)]
    fn take_values(&mut self) -> Vec<T> {
        let len = core::mem::take(&mut self.len);
        // SAFETY: the first `len` slots are initialized. The line no longer owns their values: its `len` is 0 now.
        self.slots[..len].iter().map(|slot| unsafe { slot.assume_init_read() }.into_inner()).collect()
    }
}

#[cfg(feature = "alloc")]
impl<T> Memory<T> {
    fn new(values: Vec<T>) -> Self {
        if values.len() > Line::<T>::MOST || size_of::<Line<T>>() > align_of::<Line<T>>() {
            return Self::Apart(HeapWords::new(values.len()), sync::heap_cells(values));
        }
        Self::Together(Line::new(values))
    }

    pub(crate) fn words(&self) -> &[AtomicU32] {
        match self {
            Self::Together(line) => &line.words[..line.len],
            Self::Apart(words, _) => words.as_slice(),
        }
    }

    pub(crate) fn slots(&self) -> &[UnsafeCell<T>] {
        match self {
            // SAFETY: the first `len` slots are initialized, and a `MaybeUninit` has the layout of what it holds.
            Self::Together(line) => unsafe {
                core::slice::from_raw_parts(line.slots.as_ptr().cast(), line.len)
            },
            Self::Apart(_, slots) => slots,
        }
    }

    fn into_values(self) -> Vec<T> {
        match self {
            Self::Together(mut line) => line.take_values(),
            Self::Apart(_, slots) => sync::heap_values(slots),
        }
    }
}

#[cfg(feature = "alloc")]
impl<T> Drop for Line<T> {
    fn drop(&mut self) {
        let slots = self.slots.as_mut_ptr().cast::<UnsafeCell<T>>();
        // Drop the values as one slice: if one value panics in its drop, the others are dropped too.
        // SAFETY: the first `len` slots are initialized, and their values are dropped only here.
        unsafe { core::ptr::slice_from_raw_parts_mut(slots, self.len).drop_in_place() };
    }
}

/// Marks a type that uses a ring for `'r`. It is invariant in `T`, as a cell is. It consists of function pointers: a
/// struct with such a type then needs no bound `T: 'r`. The constructors of the handles require that bound.
type Marker<'r, T, W> = PhantomData<(&'r (), fn(T) -> T, fn(W) -> W)>;

/// A share of a [`Block`] if the ring is owned by its handles and guards; nothing if it is borrowed.
pub(crate) struct Share<'r, T, W> {
    #[cfg(feature = "alloc")]
    block: Option<NonNull<Block<T, W>>>,
    marker: Marker<'r, T, W>,
}

impl<T, W> Share<'_, T, W> {
    pub(crate) const BORROWED: Self = Self {
        #[cfg(feature = "alloc")]
        block: None,
        marker: PhantomData,
    };

    /// One more share of the same ring.
    #[inline]
    pub(crate) fn share(&self) -> Self {
        #[cfg(feature = "alloc")]
        if let Some(block) = &self.block {
            // SAFETY: the block lives as long as any share of it, and `self` is one.
            let block = unsafe { block.as_ref() };
            // Relaxed: whoever uses the new share got it from us after this. The count cannot overflow: see `Block`.
            block.count.fetch_add(1, Ordering::Relaxed);
        }
        Self {
            #[cfg(feature = "alloc")]
            block: self.block,
            ..Self::BORROWED
        }
    }
}

#[cfg(feature = "alloc")]
impl<T, W> Share<'_, T, W> {
    /// Makes the first share of this new block. The block's values must outlive `'r`.
    pub(crate) fn first(block: Box<Block<T, W>>) -> (NonNull<Block<T, W>>, Self) {
        let block = NonNull::from(Box::leak(block));
        (block, Self { block: Some(block), ..Self::BORROWED })
    }

    /// Whether this share and `other` are the only shares of one ring. No other thread can make a third one while the
    /// caller has both.
    pub(crate) fn is_all_with(&self, other: &Self) -> bool {
        let (Some(ours), Some(theirs)) = (self.block, other.block) else { return false };
        // SAFETY: the block lives as long as any share of it, and `self` is one.
        let count = &unsafe { ours.as_ref() }.count;
        // Relaxed: the caller drops one of these two shares next, and that drop acquires everything that other shares
        // did before they were dropped.
        ours == theirs && count.load(Ordering::Relaxed) == 2
    }

    /// Returns this share, and leaves `BORROWED` in its place.
    pub(crate) fn take(&mut self) -> Self {
        core::mem::replace(self, Self::BORROWED)
    }

    /// Takes the slots out of the ring. The caller has its last share.
    pub(crate) fn into_slots(self) -> Option<Vec<T>> {
        let block = core::mem::ManuallyDrop::new(self).block?;
        // Relaxed: the caller had two shares, saw by `is_all_with` that there was no third, and has dropped one. So no
        // other thread changes the count. SAFETY: the block lives as long as any share of it, and ours is the last one.
        debug_assert_eq!(unsafe { block.as_ref() }.count.load(Ordering::Relaxed), 1);
        // SAFETY: the pointer came from `Box::leak`, and this was the last share.
        let block = unsafe { Box::from_raw(block.as_ptr()) };
        Some(block.memory.into_values())
    }
}

#[cfg(feature = "alloc")]
impl<T, W> Drop for Share<'_, T, W> {
    /// Small, so that the compiler inlines it into the drop of a guard and keeps the guard in registers.
    #[inline]
    fn drop(&mut self) {
        #[inline(never)]
        fn give_up<T, W>(block: NonNull<Block<T, W>>) {
            // SAFETY: the block lives as long as any share of it, and ours is counted until the next line.
            let count = &unsafe { block.as_ref() }.count;
            // AcqRel: what the owners of all other shares did happens before the last owner frees the block.
            if count.fetch_sub(1, Ordering::AcqRel) == 1 {
                // SAFETY: the pointer came from `Box::leak`, and this was the last share.
                drop(unsafe { Box::from_raw(block.as_ptr()) });
            }
        }
        if let Some(block) = self.block {
            give_up(block);
        }
    }
}

// SAFETY: a share is a pointer to a block, and any thread may free the block with the last share.
// `HeapRing::into_handles` creates all shares and requires `T: Send` and `W: Send + Sync`. A share of a borrowed ring
// is empty.
unsafe impl<T, W> Send for Share<'_, T, W> {}
// SAFETY: a shared reference to a share gives access to its count only.
unsafe impl<T, W> Sync for Share<'_, T, W> {}

// A panic never leaves counts, words or cursors half-changed. A half-filled value is not handed over, but the next fill
// can see it: hence the bound `T: UnwindSafe`.
impl<T, W> UnwindSafe for Share<'_, T, W> {}
impl<T, W> RefUnwindSafe for Share<'_, T, W> {}
impl<T: UnwindSafe, W: RefUnwindSafe> UnwindSafe for RingRef<'_, T, W> {}
impl<T: UnwindSafe, W: RefUnwindSafe> RefUnwindSafe for RingRef<'_, T, W> {}
impl<T: UnwindSafe, W: RefUnwindSafe> UnwindSafe for SlotRef<'_, T, W> {}
impl<T: UnwindSafe, W: RefUnwindSafe> RefUnwindSafe for SlotRef<'_, T, W> {}

/// A reference to a ring without its depth in the type. Its owner borrows the ring for `'r` or has a [`Share`].
///
/// It holds pointers, not references. A function may rely on any reference passed to it, even inside a struct, until
/// the function returns. But the last handle or guard of an owned ring frees the ring within the call that received
/// that handle or guard.
pub(crate) struct RingRef<'r, T, W> {
    /// One per slot, and at least one.
    words: NonNull<[AtomicU32]>,
    slots: NonNull<[UnsafeCell<T>]>,
    waiting: NonNull<Waiting<W>>,
    marker: Marker<'r, T, W>,
}

impl<T, W> Clone for RingRef<'_, T, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, W> Copy for RingRef<'_, T, W> {}

// SAFETY: to send this is to send a reference to a ring: see the `Sync` of `Ring`.
unsafe impl<T: Send, W: Sync> Send for RingRef<'_, T, W> {}

impl<'r, T, W> RingRef<'r, T, W> {
    pub(crate) fn new(words: &'r [AtomicU32], slots: &'r [UnsafeCell<T>], waiting: &'r Waiting<W>) -> Self {
        debug_assert!(!words.is_empty() && words.len() == slots.len());
        Self {
            words: NonNull::from(words),
            slots: NonNull::from(slots),
            waiting: NonNull::from(waiting),
            marker: PhantomData,
        }
    }

    /// The slot at the handle's position.
    #[inline]
    pub(crate) fn slot(self, at: Cursor) -> SlotRef<'r, T, W> {
        debug_assert!(at.index < self.len());
        // SAFETY: a cursor starts at 0 and advances with this ring's length, so its index stays below that length.
        let word = unsafe { self.words().get_unchecked(at.index) };
        // SAFETY: the ring is alive: whoever has this reference borrows the ring or has a share of it.
        let slots = unsafe { self.slots.as_ref() };
        // SAFETY: there are as many slots as words, so the index is in bounds here too.
        let value = unsafe { slots.get_unchecked(at.index) };
        SlotRef {
            word: NonNull::from(word),
            value: NonNull::from(value),
            waiting: self.waiting,
            marker: PhantomData,
        }
    }

    pub(crate) fn words<'g>(self) -> &'g [AtomicU32]
    where
        Self: 'g,
    {
        // SAFETY: the ring is alive: whoever has this reference borrows the ring or has a share of it.
        unsafe { self.words.as_ref() }
    }

    fn waiting<'g>(self) -> &'g Waiting<W>
    where
        Self: 'g,
    {
        // SAFETY: the ring is alive: whoever has this reference borrows the ring or has a share of it.
        unsafe { self.waiting.as_ref() }
    }

    pub(crate) fn strategy<'g>(self) -> &'g W
    where
        Self: 'g,
    {
        &self.waiting().strategy
    }

    #[inline]
    pub(crate) fn len(self) -> usize {
        self.words.len()
    }

    /// How many slots are filled and not released.
    pub(crate) fn full(self) -> usize {
        // Relaxed: only a count is returned, which may be outdated by then. No slot is read because of it.
        self.words().iter().filter(|word| State::from_bits(word.load(Ordering::Relaxed)).is_full()).count()
    }

    /// Takes out the waker that `side` registered. Called when the side's handle is dropped.
    pub(crate) fn unregister(self, side: Side) -> Option<Waker> {
        self.waiting().cell(side).unregister()
    }
}

impl<T, W: Wait> RingRef<'_, T, W> {
    /// Ends one side: sets on each word the `bits` of the lap of this side's next visit, and wakes the other `side` if
    /// it waits. `at` is where this side ends.
    ///
    /// It visits the words in the order of the ring. A side that reads the end from one word therefore finds it in the
    /// words before, such as that of a slot that the consumer put back.
    pub(crate) fn end(self, mut at: Cursor, bits: impl Fn(Lap) -> State, side: Side) {
        let waiting = self.waiting();
        let mut any_waiter = false;
        for _ in 0..self.len() {
            let slot = self.slot(at);
            let word = slot.word();
            // Set the bits by a read-modify-write on every word, free or full: a side that announces its wait later
            // then finds them. Release: whatever this side did before its end, such as storing an error for the other
            // side, is visible to the side that reads the bits.
            let old = State::from_bits(word.fetch_or(bits(at.lap).bits(), Ordering::Release));
            at = at.next(self.len());
            if old.has_waiter() {
                any_waiter = true;
                waiting.strategy.wake(Word::new(word));
            }
        }
        if any_waiter {
            waiting.cell(side).wake();
        }
    }
}

/// The position of a handle: the slot that it handles next, its lap, and the number of slots that it has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    pub(crate) index: usize,
    pub(crate) lap: Lap,
    /// The number of slots passed, and thus the number of the next one.
    pub(crate) seq: u64,
}

impl Cursor {
    pub(crate) const START: Cursor = Cursor { index: 0, lap: Lap::FIRST, seq: 0 };

    /// Returns the position one slot later, in a ring of `len` slots.
    #[inline]
    pub(crate) fn next(self, len: usize) -> Cursor {
        let seq = self.seq.wrapping_add(1);
        if self.index + 1 < len {
            Cursor { index: self.index + 1, lap: self.lap, seq }
        } else {
            Cursor { index: 0, lap: self.lap.next(), seq }
        }
    }
}

/// A reference to one slot, for the side that owns it or waits for it. Made of pointers as [`RingRef`] is.
pub(crate) struct SlotRef<'r, T, W> {
    word: NonNull<AtomicU32>,
    value: NonNull<UnsafeCell<T>>,
    waiting: NonNull<Waiting<W>>,
    marker: Marker<'r, T, W>,
}

impl<T, W> Clone for SlotRef<'_, T, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, W> Copy for SlotRef<'_, T, W> {}

// SAFETY: as for `RingRef`, see the `Sync` of `Ring`. A guard holds a `SlotRef` and may be used on another thread.
unsafe impl<T: Send, W: Sync> Send for SlotRef<'_, T, W> {}
// SAFETY: a guard that is shared between threads gives out `&T` and nothing else: hence `T: Sync`.
unsafe impl<T: Send + Sync, W: Sync> Sync for SlotRef<'_, T, W> {}

impl<T, W> SlotRef<'_, T, W> {
    fn word<'g>(self) -> &'g AtomicU32
    where
        Self: 'g,
    {
        // SAFETY: the ring is alive: whoever has this reference borrows the ring or has a share of it.
        unsafe { self.word.as_ref() }
    }

    fn cell<'g>(self) -> &'g UnsafeCell<T>
    where
        Self: 'g,
    {
        // SAFETY: the ring is alive: whoever has this reference borrows the ring or has a share of it.
        unsafe { self.value.as_ref() }
    }

    fn waiting<'g>(self) -> &'g Waiting<W>
    where
        Self: 'g,
    {
        // SAFETY: the ring is alive: whoever has this reference borrows the ring or has a share of it.
        unsafe { self.waiting.as_ref() }
    }

    /// The state of the slot now. Acquire: if the slot is ours, what the other side did to the value is visible to us.
    #[inline]
    pub(crate) fn state(self) -> State {
        State::from_bits(self.word().load(Ordering::Acquire))
    }

    /// The value.
    ///
    /// # Safety
    ///
    /// The caller's side owns the slot, and there is no `&mut` to the value.
    #[inline]
    pub(crate) unsafe fn value<'g>(self) -> &'g T
    where
        Self: 'g,
    {
        // SAFETY: the caller's promise.
        self.cell().with(|value| unsafe { &*value })
    }

    /// The value, to change it.
    ///
    /// # Safety
    ///
    /// The caller's side owns the slot, and there is no other reference to the value.
    #[inline]
    pub(crate) unsafe fn value_mut<'g>(self) -> &'g mut T
    where
        Self: 'g,
    {
        // SAFETY: the caller's promise.
        self.cell().with_mut(|value| unsafe { &mut *value })
    }
}

impl<T, W: Wait> SlotRef<'_, T, W> {
    /// Hands the slot to the other side by `step` and wakes `sides` if one waits. Returns the replaced state.
    ///
    /// `seen` is the expected value of the word. `before_wake` runs between the hand-off and the wake: a wake may panic
    /// (it runs foreign code), so the handle must move on before it.
    #[inline]
    pub(crate) fn hand_over(
        self,
        seen: State,
        sides: &[Side],
        step: impl Fn(State) -> State,
        before_wake: impl FnOnce(),
    ) -> State {
        // Our last access to the value, for the loom models to check. In other builds it compiles to nothing.
        self.cell().with_mut(|_| ());
        let word = self.word();
        let mut seen = seen.bits();
        // While we own the slot, either side may set its sticky bits and `WAITER`, each once; nothing else in the word
        // can change, so the exchange fails at most three times. Release: what we did to the value happens
        // before the other side's next access. Acquire on failure: the value found may contain the other side's end,
        // and what that side did before its end must be visible.
        while let Err(now) = word.compare_exchange(
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
            wake(self.waiting(), Word::new(word), sides);
        }
        old
    }

    /// Blocks until the word is in a state that is `ready`, or `patience` is over.
    pub(crate) fn wait<P: Patience<W>>(
        self,
        mut seen: State,
        ready: impl Fn(State) -> bool,
        patience: &P,
    ) -> Result<State, P::Over> {
        let strategy = &self.waiting().strategy;
        let mut round = 0;
        loop {
            if ready(seen) {
                return Ok(seen);
            }
            if let Some(over) = patience.over(strategy, seen) {
                return Err(over);
            }
            if strategy.relax(round) {
                round = round.saturating_add(1);
                seen = self.state();
                continue;
            }
            if let Err(now) = self.announce(seen) {
                seen = now;
                continue;
            }
            let asleep = seen.announce();
            patience.wait(strategy, Word::new(self.word()), asleep.bits());
            seen = self.state();
        }
    }

    /// Returns the word's state if it is `ready`. Otherwise registers `waker`, which is woken when the word changes.
    pub(crate) fn poll(self, side: Side, waker: &Waker, ready: impl Fn(State) -> bool) -> Poll<State> {
        let seen = self.state();
        if ready(seen) {
            return Poll::Ready(seen);
        }
        // Register the waker before the announcement: a side that finds the announcement then also finds the waker.
        self.waiting().cell(side).register(waker);
        let mut seen = self.state();
        loop {
            if ready(seen) {
                return Poll::Ready(seen);
            }
            match self.announce(seen) {
                Ok(()) => return Poll::Pending,
                Err(now) => seen = now,
            }
        }
    }

    /// Adds `WAITER` to the word, unless `seen` has it. Returns the current state if that is no longer `seen`.
    fn announce(self, seen: State) -> Result<(), State> {
        if seen.has_waiter() {
            return Ok(());
        }
        // Relaxed: the announcement publishes no data; the word's modification order alone decides whether it came
        // before the other side's change. Acquire on failure: the value found may mean that the slot is ours.
        match self.word().compare_exchange(
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

/// Wakes the threads that wait on `word` and the tasks of these sides. Takes two pointers instead of a [`SlotRef`]:
/// every hand-off would have to write a `SlotRef` to the stack for this call.
#[cold]
fn wake<W: Wait>(waiting: &Waiting<W>, word: Word<'_>, sides: &[Side]) {
    waiting.strategy.wake(word);
    wake_each(waiting, sides);
}

/// Wakes the tasks of these sides. If an earlier waker panics, the later ones are still woken. If one of these panics too,
/// the process aborts, as with each panic during another.
fn wake_each<W>(waiting: &Waiting<W>, sides: &[Side]) {
    struct Rest<'a, W>(&'a Waiting<W>, &'a [Side]);
    impl<W> Drop for Rest<'_, W> {
        fn drop(&mut self) {
            wake_each(self.0, self.1);
        }
    }
    if let [first, rest @ ..] = sides {
        let _rest = Rest(waiting, rest);
        waiting.cell(*first).wake();
    }
}

/// How long a blocking call waits.
pub(crate) trait Patience<W> {
    /// What the call returns if its time is over.
    type Over;

    /// Returns `Some` if the wait is over while the word is still `seen`.
    fn over(&self, strategy: &W, seen: State) -> Option<Self::Over>;
    fn wait(&self, strategy: &W, word: Word<'_>, expected: u32);
}

/// Waits without a time limit.
pub(crate) struct Forever;

impl<W: Wait> Patience<W> for Forever {
    type Over = core::convert::Infallible;

    fn over(&self, _strategy: &W, _seen: State) -> Option<Self::Over> {
        None
    }

    fn wait(&self, strategy: &W, word: Word<'_>, expected: u32) {
        strategy.wait(word, expected);
    }
}

/// Waits until a deadline.
pub(crate) struct Until<I>(pub(crate) I);

/// The deadline of an [`Until`] has passed. The word was in this state.
pub(crate) struct TimedOut(pub(crate) State);

impl<W: WaitUntil> Patience<W> for Until<W::Instant> {
    type Over = TimedOut;

    fn over(&self, strategy: &W, seen: State) -> Option<TimedOut> {
        strategy.expired(self.0).then_some(TimedOut(seen))
    }

    fn wait(&self, strategy: &W, word: Word<'_>, expected: u32) {
        strategy.wait_until(word, expected, self.0);
    }
}
