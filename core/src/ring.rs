//! The ring itself: the slots, their words, and how the two handles are made.

#[cfg(feature = "alloc")]
use alloc::{boxed::Box, sync::Arc, vec::Vec};
use core::fmt;
use core::panic::{RefUnwindSafe, UnwindSafe};

use crate::consumer::Consumer;
use crate::producer::Producer;
#[cfg(feature = "alloc")]
use crate::raw::Owner;
use crate::raw::{RingRef, Share, Waiting};
use crate::state::State;
#[cfg(feature = "alloc")]
use crate::sync::HeapWords;
use crate::sync::{self, AtomicU32, Ordering, UnsafeCell, const_fn};
use crate::wait::{Spin, Wait};

/// A ring of two slots: one is filled while the other is used.
pub type DoubleBuffer<T, W = Spin> = Ring<T, 2, W>;

/// `N` fixed slots (default: two), handed back and forth between one producer and one consumer.
///
/// The slots hold values of `T` that are made once, filled in place, read in place and recycled: nothing is
/// moved, allocated or dropped by a hand-off. A `T` that can be partly filled carries its own length.
///
/// A ring is used through its two handles: borrowed ([`split`](Ring::split)), from a `static`
/// ([`try_split_static`](Ring::try_split_static)) or owning the ring together (`into_handles`).
///
/// The slots lie inside this type, next to their words: the fastest layout for small values, and one that needs no
/// allocator. For slots on the heap, or a depth known at run time, take a `HeapRing`.
///
/// # Examples
///
/// ```
/// use twinbuf_core::{DoubleBuffer, RecvError};
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

// See `Share`.
impl<T: UnwindSafe, const N: usize, W: RefUnwindSafe> RefUnwindSafe for Ring<T, N, W> {}

impl<T, const N: usize> Ring<T, N, Spin> {
    const_fn! {
        /// Makes a ring of these slots whose blocking calls [`Spin`]. Each slot starts with the value given here.
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
        /// Makes a ring of these slots whose blocking calls wait by `wait`.
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
                waiting: Waiting::new(wait),
                taken: AtomicU32::new(0),
            }
        }
    }

    /// Returns the slots' values, in the order they were given in.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([10, 20]);
    /// let (mut tx, rx) = ring.split();
    /// tx.fill(|slot| *slot += 1).unwrap();
    /// drop((tx, rx));
    /// assert_eq!(ring.into_inner(), [11, 20]);
    /// ```
    #[must_use]
    pub fn into_inner(self) -> [T; N] {
        self.slots.map(UnsafeCell::into_inner)
    }
}

impl<T, const N: usize, W: Wait> Ring<T, N, W> {
    /// Returns the two handles, which borrow the ring: no allocation, and the ring can be split again when they are
    /// gone.
    ///
    /// Starts afresh: every slot is free, whatever an earlier pair of handles left behind.
    ///
    /// ```
    /// let mut ring = twinbuf_core::DoubleBuffer::new([0, 0]);
    /// for epoch in 1..=2 {
    ///     let (mut tx, mut rx) = ring.split();
    ///     tx.fill(|slot| *slot = epoch).unwrap();
    ///     assert_eq!(*rx.recv().unwrap(), epoch);
    /// }
    /// ```
    pub fn split(&mut self) -> (Producer<'_, T, W>, Consumer<'_, T, W>) {
        self.restart();
        handles(self.by_ref(), &Share::BORROWED)
    }

    /// Returns the two handles of a ring that lives for ever, such as a `static`; once.
    ///
    /// `None` if the ring was split before, in whatever way.
    ///
    /// ```
    /// use twinbuf_core::DoubleBuffer;
    /// static RING: DoubleBuffer<u32> = DoubleBuffer::new([0, 0]);
    ///
    /// let (mut tx, mut rx) = RING.try_split_static().unwrap();
    /// assert!(RING.try_split_static().is_none());
    /// std::thread::spawn(move || tx.fill(|slot| *slot = 7).unwrap());
    /// assert_eq!(*rx.recv().unwrap(), 7);
    /// ```
    pub fn try_split_static(&'static self) -> Option<(Producer<'static, T, W>, Consumer<'static, T, W>)> {
        // Relaxed: only who comes first. The slots are as they were made; whoever hands this `&'static` to
        // another thread has made that visible too.
        if self.taken.swap(1, Ordering::Relaxed) != 0 {
            return None;
        }
        Some(handles(self.by_ref(), &Share::BORROWED))
    }

    /// Returns the two handles, which own the ring together: it moves to the heap, and is freed with the last of the
    /// handles and guards.
    ///
    /// The ring passes over the stack on its way. For slots too large for that take a [`HeapRing`].
    ///
    /// ```
    /// use twinbuf_core::{Park, Ring};
    /// let (mut tx, mut rx) = Ring::with_wait([[0u8; 64], [0u8; 64], [0u8; 64]], Park).into_handles();
    /// std::thread::spawn(move || tx.fill(|slot| slot[0] = 1).map(|()| tx.finish()));
    /// assert_eq!(rx.recv().unwrap()[0], 1);
    /// ```
    #[cfg(feature = "alloc")]
    #[must_use]
    pub fn into_handles<'r>(mut self) -> (Producer<'r, T, W>, Consumer<'r, T, W>)
    where
        T: Send + 'r,
        W: Send + Sync + 'r,
    {
        self.restart();
        let owner = Arc::new(self);
        // SAFETY: the ring does not move in its `Arc`, of which each handle, and each guard that is made by one, keeps a
        // share.
        let ring = unsafe { &*Arc::as_ptr(&owner) }.by_ref();
        handles(ring, &Share::new(owner))
    }

    fn restart(&mut self) {
        self.words = sync::words();
        self.waiting.restart();
        self.taken = AtomicU32::new(1);
    }

    fn by_ref(&self) -> RingRef<'_, T, W> {
        RingRef::new(&self.words, &self.slots, &self.waiting)
    }
}

/// A ring of a depth that is known at run time, with its slots on the heap.
///
/// The slots are those of a `Vec`, in the memory that it has: nothing moves, however large a slot is. The handles
/// are the same as a [`Ring`]'s.
///
/// # Examples
///
/// ```
/// use twinbuf_core::{HeapRing, Park};
///
/// let depth = 3;
/// let slots = (0..depth).map(|_| vec![0u8; 1 << 20]).collect();
/// let (mut tx, mut rx) = HeapRing::with_wait(slots, Park).into_handles();
///
/// let (mut a, mut b) = (tx.acquire()?.reserve(), tx.acquire()?.reserve()); // both are being filled
/// let other = std::thread::spawn(move || {
///     b.fill(2);
///     b.commit() // committed first, received second
/// });
/// a.fill(1);
/// a.commit()?;
/// other.join().unwrap()?;
/// assert_eq!(rx.recv().unwrap()[0], 1);
/// assert_eq!(rx.recv().unwrap()[0], 2);
///
/// let buffers = tx.reunite(rx).unwrap(); // the slots again
/// assert_eq!(buffers.len(), 3);
/// # Ok::<(), twinbuf_core::Closed>(())
/// ```
#[cfg(feature = "alloc")]
pub struct HeapRing<T, W = Spin> {
    words: HeapWords,
    slots: Box<[UnsafeCell<T>]>,
    waiting: Waiting<W>,
}

// SAFETY: as for `Ring`.
#[cfg(feature = "alloc")]
unsafe impl<T: Send, W: Sync> Sync for HeapRing<T, W> {}

// See `Share`.
#[cfg(feature = "alloc")]
impl<T: UnwindSafe, W: RefUnwindSafe> RefUnwindSafe for HeapRing<T, W> {}

#[cfg(feature = "alloc")]
impl<T> HeapRing<T, Spin> {
    /// Makes a ring of these slots whose blocking calls [`Spin`].
    ///
    /// # Panics
    ///
    /// If there is no slot.
    #[must_use]
    pub fn new(slots: Vec<T>) -> Self {
        Self::with_wait(slots, Spin)
    }
}

#[cfg(feature = "alloc")]
impl<T, W> HeapRing<T, W> {
    /// Makes a ring of these slots whose blocking calls wait by `wait`.
    ///
    /// A vector with room to spare is first cut to its length, which may move the slots within the heap.
    ///
    /// # Panics
    ///
    /// If there is no slot.
    #[must_use]
    pub fn with_wait(slots: Vec<T>, wait: W) -> Self {
        assert!(!slots.is_empty(), "a ring needs at least one slot");
        Self {
            words: HeapWords::new(slots.len()),
            slots: sync::heap_cells(slots),
            waiting: Waiting::new(wait),
        }
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Returns the slots' values, in the order they were given in and in the memory that the ring had for them.
    #[must_use]
    pub fn into_vec(self) -> Vec<T> {
        sync::heap_values(self.slots)
    }
}

#[cfg(feature = "alloc")]
impl<T, W: Wait> HeapRing<T, W> {
    /// Returns the two handles, which borrow the ring, as [`Ring::split`] does.
    pub fn split(&mut self) -> (Producer<'_, T, W>, Consumer<'_, T, W>) {
        self.restart();
        handles(self.by_ref(), &Share::BORROWED)
    }

    /// Returns the two handles, which own the ring together: it is freed with the last of the handles and guards.
    #[must_use]
    pub fn into_handles<'r>(mut self) -> (Producer<'r, T, W>, Consumer<'r, T, W>)
    where
        T: Send + 'r,
        W: Send + Sync + 'r,
    {
        self.restart();
        let owner = Arc::new(self);
        // SAFETY: as in `Ring::into_handles`.
        let ring = unsafe { &*Arc::as_ptr(&owner) }.by_ref();
        handles(ring, &Share::new(owner))
    }

    fn restart(&mut self) {
        self.words = HeapWords::new(self.slots.len());
        self.waiting.restart();
    }

    fn by_ref(&self) -> RingRef<'_, T, W> {
        RingRef::new(self.words.as_slice(), &self.slots, &self.waiting)
    }
}

#[cfg(feature = "alloc")]
impl<T, const N: usize, W> Owner<T> for Ring<T, N, W> {
    fn into_slots(self: Arc<Self>) -> Option<Vec<T>> {
        Arc::into_inner(self).map(|ring| ring.into_inner().into())
    }
}

#[cfg(feature = "alloc")]
impl<T, W> Owner<T> for HeapRing<T, W> {
    fn into_slots(self: Arc<Self>) -> Option<Vec<T>> {
        Arc::into_inner(self).map(HeapRing::into_vec)
    }
}

fn handles<'r, T, W: Wait>(
    ring: RingRef<'r, T, W>,
    share: &Share<'r, T>,
) -> (Producer<'r, T, W>, Consumer<'r, T, W>) {
    (Producer::new(ring, share.clone()), Consumer::new(ring, share.clone()))
}

/// Makes a double buffer on the heap and returns its two handles, which own it together. Blocking calls
/// [`Park`](crate::Park).
///
/// For other strategies: [`HeapRing::with_wait`].
///
/// # Panics
///
/// If there is no slot.
///
/// # Examples
///
/// ```
/// let (mut tx, mut rx) = twinbuf_core::channel([Vec::new(), Vec::new()]);
/// std::thread::spawn(move || {
///     tx.fill(|slot| slot.extend([1, 2, 3])).unwrap();
///     tx.finish();
/// });
/// for slot in &mut rx {
///     assert_eq!(**slot?, [1, 2, 3]);
/// }
/// # Ok::<(), twinbuf_core::RecvError>(())
/// ```
#[cfg(feature = "std")]
#[must_use]
pub fn channel<'a, T: Send + 'a>(
    slots: impl Into<Vec<T>>,
) -> (Producer<'a, T, crate::Park>, Consumer<'a, T, crate::Park>) {
    HeapRing::with_wait(slots.into(), crate::Park).into_handles()
}

/// The states of the slots in words, as in `[FULL|LAP, free|WAITER]`.
impl<T, const N: usize, W> fmt::Debug for Ring<T, N, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        states(f, "Ring", &self.words)
    }
}

/// As that of [`Ring`].
#[cfg(feature = "alloc")]
impl<T, W> fmt::Debug for HeapRing<T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        states(f, "HeapRing", self.words.as_slice())
    }
}

fn states(f: &mut fmt::Formatter<'_>, name: &str, words: &[AtomicU32]) -> fmt::Result {
    struct States<'a>(&'a [AtomicU32]);
    impl fmt::Debug for States<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let state = |word: &AtomicU32| State::from_bits(word.load(Ordering::Relaxed));
            f.debug_list().entries(self.0.iter().map(state)).finish()
        }
    }
    f.debug_struct(name).field("slots", &States(words)).finish_non_exhaustive()
}
