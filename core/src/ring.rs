//! The ring: its slots, their words, and the creation of the two handles.

#[cfg(feature = "alloc")]
use alloc::{boxed::Box, vec::Vec};
use core::fmt;
use core::mem::ManuallyDrop;
use core::panic::{RefUnwindSafe, UnwindSafe};

use crate::consumer::Consumer;
use crate::producer::Producer;
#[cfg(feature = "alloc")]
use crate::raw::Block;
use crate::raw::{RingRef, Share, Waiting};
use crate::state::State;
use crate::sync::{self, AtomicU32, Ordering, UnsafeCell, const_fn};
use crate::wait::{Auto, Wait};

/// A ring of two slots: the producer fills one slot while the consumer uses the other.
pub type DoubleBuffer<T, W = Auto> = Ring<T, 2, W>;

/// `N` fixed slots (default: two) that one producer and one consumer hand back and forth.
///
/// The slots hold values of `T` that are created once, filled in place, read in place and reused. A hand-off moves,
/// allocates and drops nothing. If a `T` can be partly filled, it must carry its own length.
///
/// A ring is used through its two handles: borrowed ([`split`](Ring::split)) or from a `static`
/// ([`try_split_static`](Ring::try_split_static)).
///
/// The slots are stored inside this type, next to their state words. This needs no allocator. For slots on the heap,
/// handles that own their ring, or a depth known only at run time, use a `HeapRing`.
///
/// A ring that is dropped after a handle, a [`ReservedSlot`](crate::ReservedSlot) or a [`KeptSlot`](crate::KeptSlot)
/// was leaked leaks the values of its slots. The memory of the ring itself belongs to its owner: give the address of a
/// slot to a device only if the ring is a `static` or a `HeapRing`.
///
/// # Examples
///
/// ```
/// use twinbuf_core::DoubleBuffer;
///
/// let mut ring = DoubleBuffer::new([[0u8; 4096], [0u8; 4096]]);
/// let (mut tx, mut rx) = ring.split();
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
///     let mut i = 0;
///     while let Some(slot) = rx.recv().unwrap() {
///         assert_eq!(slot[4095], i); // released when the guard is dropped
///         i += 1;
///     }
///     assert_eq!(i, 3);
/// });
/// ```
///
/// If the slot type is not `Send`, the ring's handles cannot cross threads either:
///
/// ```compile_fail,E0277
/// let mut ring = twinbuf_core::DoubleBuffer::new([std::rc::Rc::new(1), std::rc::Rc::new(2)]);
/// let (tx, rx) = ring.split();
/// std::thread::scope(|s| { s.spawn(move || drop(tx)); });
/// ```
///
/// There is one producer and one consumer. The first pair must end before a second one can be made:
///
/// ```compile_fail,E0499
/// let mut ring = twinbuf_core::DoubleBuffer::new([1, 2]);
/// let (tx, rx) = ring.split();
/// let (tx2, rx2) = ring.split();
/// drop((tx, rx));
/// ```
// The words come first, with the slots right behind them. The words share cache lines (spread out they cost three
// lines per hand-off instead of one), few small slots fit on the same line, and the alignment keeps other data away.
// The line is 128 bytes where processors fetch pairs of 64 (Intel's Optimization Reference Manual on the spatial
// prefetcher) or have lines of 128 (Apple, POWER), 32 on small cores, and 64 elsewhere.
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
pub struct Ring<T, const N: usize = 2, W = Auto> {
    words: [AtomicU32; N],
    slots: ManuallyDrop<[UnsafeCell<T>; N]>,
    waiting: Waiting<W>,
    /// Not zero once the ring has been split.
    taken: AtomicU32,
}

// SAFETY: through a shared ring, only the side that owns a slot reaches its value, one thread at a time, and a slot is
// handed over with Release and Acquire, as if it were sent. Hence `T: Send` and not `T: Sync`. Both sides may call the
// wait strategy at the same time: hence `W: Sync`.
unsafe impl<T: Send, const N: usize, W: Sync> Sync for Ring<T, N, W> {}

// A panic never leaves the words half-changed: see the comment at the `UnwindSafe` of `Share`.
impl<T: UnwindSafe, const N: usize, W: RefUnwindSafe> RefUnwindSafe for Ring<T, N, W> {}

impl<T, const N: usize> Ring<T, N> {
    const_fn! {
        /// Creates a ring with these slots. Blocking calls use the strategy [`Auto`]. Each slot starts with the value
        /// given here.
        ///
        /// The function is `const`, and a ring can be a `static`. For other wait strategies use
        /// [`with_wait`](Ring::with_wait).
        ///
        /// A ring without slots does not compile:
        ///
        /// ```compile_fail,E0080
        /// let ring = twinbuf_core::Ring::<u8, 0>::new([]);
        /// ```
        #[must_use]
        pub const fn new(slots: [T; N]) -> Self {
            Self::with_wait(slots, Auto::new())
        }
    }
}

impl<T, const N: usize, W> Ring<T, N, W> {
    const_fn! {
        /// Creates a ring with these slots. Blocking calls use the wait strategy `wait`. A ring without slots does
        /// not compile.
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
                slots: ManuallyDrop::new(sync::cells(slots)),
                waiting: Waiting::new(wait),
                taken: AtomicU32::new(0),
            }
        }
    }

    /// Whether a handle or a guard of an earlier pair was leaked. None of them can still be alive.
    fn is_leaked(&mut self) -> bool {
        // Relaxed: we have `&mut self`, so everything done through handles and guards happened before this.
        let leaked = |word: &AtomicU32| State::from_bits(word.load(Ordering::Relaxed)).is_leaked();
        self.taken.load(Ordering::Relaxed) != 0 && self.words.iter().any(leaked)
    }
}

impl<T, const N: usize, W> Drop for Ring<T, N, W> {
    fn drop(&mut self) {
        if !self.is_leaked() {
            // SAFETY: the ring is being dropped, so nothing uses the slots again. No guard is alive or leaked.
            unsafe { ManuallyDrop::drop(&mut self.slots) };
        }
    }
}

impl<T, const N: usize, W: Wait> Ring<T, N, W> {
    /// Returns a producer and a consumer that borrow the ring. Does not allocate. When they and their guards are gone,
    /// the ring can be split again.
    ///
    /// All slots are then free, even if an earlier pair of handles left unread slots. But if a handle or a
    /// guard ([`ReservedSlot`](crate::ReservedSlot), [`KeptSlot`](crate::KeptSlot)) of an earlier pair was leaked,
    /// the ring has ended permanently, because the slot may still be in use: the producer gets
    /// [`Closed`](crate::Closed), and the consumer gets [`Abandoned`](crate::RecvError::Abandoned).
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0, 0]);
    /// for epoch in 1..=2 {
    ///     let (mut tx, mut rx) = ring.split();
    ///     tx.fill(|slot| *slot = epoch).unwrap();
    ///     assert_eq!(*rx.recv()?.unwrap(), epoch);
    /// }
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    pub fn split(&mut self) -> (Producer<'_, T, W>, Consumer<'_, T, W>) {
        let state = if self.is_leaked() { State::DEAD } else { State::NEW };
        for word in &mut self.words {
            *word = AtomicU32::new(state.bits());
        }
        self.taken = AtomicU32::new(1);
        handles(self.by_ref(), Share::BORROWED)
    }

    /// Returns the producer and the consumer of a ring that is never freed, such as a `static`. Succeeds once.
    /// Returns `None` if the ring was split before, with this call or with [`split`](Ring::split).
    ///
    /// ```
    /// use twinbuf_core::DoubleBuffer;
    /// static RING: DoubleBuffer<u32> = DoubleBuffer::new([0, 0]);
    ///
    /// let (mut tx, mut rx) = RING.try_split_static().unwrap();
    /// assert!(RING.try_split_static().is_none());
    /// std::thread::spawn(move || tx.fill(|slot| *slot = 7).unwrap());
    /// assert_eq!(*rx.recv()?.unwrap(), 7);
    /// # Ok::<(), twinbuf_core::RecvError>(())
    /// ```
    pub fn try_split_static(&'static self) -> Option<(Producer<'static, T, W>, Consumer<'static, T, W>)> {
        // Relaxed: the swap only decides which caller is first. It need not make the slots visible: they still have
        // their initial values, which came with the `&'static` itself.
        if self.taken.swap(1, Ordering::Relaxed) != 0 {
            return None;
        }
        Some(handles(self.by_ref(), Share::BORROWED))
    }

    fn by_ref(&self) -> RingRef<'_, T, W> {
        RingRef::new(&self.words, &*self.slots, &self.waiting)
    }
}

/// A ring on the heap. Its depth is chosen at run time, and its handles own it.
///
/// The slots are the elements of a `Vec` and stay in its memory if it has no spare capacity. Only up to four slots of
/// about 26 bytes or less move to the cache line of their words. The handles are the same types as a [`Ring`]'s.
///
/// # Examples
///
/// ```
/// use twinbuf_core::HeapRing;
///
/// let (mut tx, mut rx) = HeapRing::from_fn(3, |_| vec![0u8; 1 << 20]).into_handles();
///
/// let (mut a, mut b) = (tx.acquire()?.reserve(), tx.acquire()?.reserve()); // both are being filled
/// let other = std::thread::spawn(move || {
///     b.fill(2);
///     b.commit() // committed first, received second
/// });
/// a.fill(1);
/// a.commit()?;
/// other.join().unwrap()?;
/// for expected in [1, 2] {
///     assert_eq!(rx.recv().unwrap().unwrap()[0], expected);
/// }
///
/// let buffers = tx.reunite(rx).unwrap(); // the slots again
/// assert_eq!(buffers.len(), 3);
/// # Ok::<(), twinbuf_core::Closed>(())
/// ```
#[cfg(feature = "alloc")]
pub struct HeapRing<T, W = Auto>(Box<Block<T, W>>);

#[cfg(feature = "alloc")]
impl<T> HeapRing<T> {
    /// Creates a ring with these slots. Blocking calls use the strategy [`Auto`].
    ///
    /// # Panics
    ///
    /// If there are no slots, or more than 2³¹.
    #[must_use]
    pub fn new(slots: impl Into<Vec<T>>) -> Self {
        Self::with_wait(slots, Auto::new())
    }

    /// Creates a ring with `depth` slots. Slot `i` starts with the value of `slot(i)`. Blocking calls
    /// use the strategy [`Auto`].
    ///
    /// # Panics
    ///
    /// If `depth` is 0 or more than 2³¹.
    #[must_use]
    pub fn from_fn(depth: usize, slot: impl FnMut(usize) -> T) -> Self {
        assert!(depth <= 1 << 31, "a ring has at most 2^31 slots");
        Self::new((0..depth).map(slot).collect::<Vec<_>>())
    }
}

#[cfg(feature = "alloc")]
impl<T, W> HeapRing<T, W> {
    /// Creates a ring with these slots. Blocking calls use the wait strategy `wait`.
    ///
    /// If the vector has spare capacity, it is shrunk to its length. This may move the slots within the heap.
    ///
    /// # Panics
    ///
    /// If there are no slots, or more than 2³¹.
    #[must_use]
    pub fn with_wait(slots: impl Into<Vec<T>>, wait: W) -> Self {
        let slots = slots.into();
        assert!(!slots.is_empty(), "a ring needs at least one slot");
        assert!(slots.len() <= 1 << 31, "a ring has at most 2^31 slots");
        Self(Box::new(Block::new(slots, wait)))
    }

    /// Returns a producer and a consumer that own the ring together. The ring is freed when both handles and all
    /// guards are dropped: never if a handle, a [`ReservedSlot`](crate::ReservedSlot) or a
    /// [`KeptSlot`](crate::KeptSlot) is leaked.
    #[must_use]
    pub fn into_handles<'r>(self) -> (Producer<'r, T, W>, Consumer<'r, T, W>)
    where
        T: Send + 'r,
        W: Wait + Send + Sync + 'r,
    {
        let (block, share) = Share::first(self.0);
        // SAFETY: the block does not move, and lives as long as a share: each handle and each guard has one.
        let block = unsafe { block.as_ref() };
        handles(RingRef::new(block.memory.words(), block.memory.slots(), &block.waiting), share)
    }
}

fn handles<'r, T, W: Wait>(
    ring: RingRef<'r, T, W>,
    share: Share<'r, T, W>,
) -> (Producer<'r, T, W>, Consumer<'r, T, W>) {
    (Producer::new(ring, share.share()), Consumer::new(ring, share))
}

/// Prints the state of each slot, for example `Ring { slots: [FULL|LAP, free|WAITER], .. }`.
impl<T, const N: usize, W> fmt::Debug for Ring<T, N, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        struct States<'a>(&'a [AtomicU32]);
        impl fmt::Debug for States<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                // Relaxed: printed, and no slot is used because of it.
                let state = |word: &AtomicU32| State::from_bits(word.load(Ordering::Relaxed));
                f.debug_list().entries(self.0.iter().map(state)).finish()
            }
        }
        f.debug_struct("Ring").field("slots", &States(&self.words)).finish_non_exhaustive()
    }
}

#[cfg(feature = "alloc")]
impl<T, W> fmt::Debug for HeapRing<T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapRing").field("depth", &self.0.memory.words().len()).finish_non_exhaustive()
    }
}
