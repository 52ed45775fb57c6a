//! The atomics and cells that the ring is made of. The only file that knows `cfg(loom)` and
//! `cfg(shuttle)`.
//!
//! Built plainly, these are `core`'s own, at no cost. Built with `cfg(loom)` (by the package `tests/loom`,
//! which compiles this crate a second time) they are loom's, which checks every access to a cell and
//! explores every value that a load may read; and each access to an atomic is counted, so that a model can
//! assert how many steps a call takes. With `cfg(shuttle)` (the package `tests/shuttle`) the atomics are
//! shuttle's, which draws long schedules at random.

#[cfg(not(loom))]
mod plain {
    #[cfg(feature = "alloc")]
    use alloc::{boxed::Box, sync::Arc, vec::Vec};
    use core::mem::{ManuallyDrop, transmute_copy};
    #[cfg(all(not(shuttle), not(feature = "portable-atomic")))]
    pub use core::sync::atomic::AtomicU32;
    #[cfg(not(shuttle))]
    pub use core::{hint::spin_loop, sync::atomic::Ordering};
    #[cfg(all(not(shuttle), feature = "portable-atomic"))]
    pub use portable_atomic::AtomicU32;
    #[cfg(shuttle)] // Switches threads at these; the cells are not checked.
    pub use shuttle::{
        hint::spin_loop,
        sync::atomic::{AtomicU32, Ordering},
    };

    /// A cell whose accesses say whether they read or write, so that loom can check them.
    #[repr(transparent)]
    #[derive(Debug)]
    pub struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub const fn new(value: T) -> Self {
            Self(core::cell::UnsafeCell::new(value))
        }

        pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }

        pub fn into_inner(self) -> T {
            self.0.into_inner()
        }
    }

    #[must_use]
    pub const fn words<const N: usize>() -> [AtomicU32; N] {
        [const { AtomicU32::new(0) }; N]
    }

    /// As many words as fit a line, apart from everything else: see `Ring` for the 128 bytes.
    #[cfg(feature = "alloc")]
    #[repr(align(128))]
    #[derive(Debug)]
    struct Line(#[allow(dead_code)] [AtomicU32; LINE]); // read as a slice of words

    #[cfg(feature = "alloc")]
    const LINE: usize = 128 / size_of::<AtomicU32>();

    /// Words whose number is known at run time, side by side on cache lines that nothing else is on.
    #[cfg(feature = "alloc")]
    #[derive(Debug)]
    pub struct HeapWords {
        lines: Box<[Line]>,
        len: usize,
    }

    #[cfg(feature = "alloc")]
    impl HeapWords {
        #[must_use]
        pub fn new(len: usize) -> Self {
            Self { lines: (0..len.div_ceil(LINE)).map(|_| Line(words())).collect(), len }
        }

        #[must_use]
        pub fn as_slice(&self) -> &[AtomicU32] {
            // SAFETY: the lines hold at least `len` words, one behind the other: a line is as large as it is aligned,
            // so there is nothing between two of them.
            unsafe { core::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
        }
    }

    /// The cells around these values, in the memory that the vector already has.
    #[cfg(feature = "alloc")]
    #[must_use]
    pub fn heap_cells<T>(values: Vec<T>) -> Box<[UnsafeCell<T>]> {
        let values = Box::into_raw(values.into_boxed_slice());
        // SAFETY: both `UnsafeCell`s are `repr(transparent)`, so the two slices have one layout.
        unsafe { Box::from_raw(values as *mut [UnsafeCell<T>]) }
    }

    /// The values in these cells, in the memory that the cells had.
    #[cfg(feature = "alloc")]
    #[must_use]
    pub fn heap_values<T>(cells: Box<[UnsafeCell<T>]>) -> Vec<T> {
        let cells = Box::into_raw(cells);
        // SAFETY: as in `heap_cells`.
        unsafe { Box::from_raw(cells as *mut [T]) }.into_vec()
    }

    pub const fn cells<T, const N: usize>(values: [T; N]) -> [UnsafeCell<T>; N] {
        let values = ManuallyDrop::new(values);
        // SAFETY: `ManuallyDrop` and both `UnsafeCell`s are `repr(transparent)`, so the two arrays have one
        // layout; the original is never dropped, so each value has one owner.
        unsafe { transmute_copy(&values) }
    }

    /// Nothing: see the models' one.
    #[cfg(feature = "alloc")]
    #[derive(Clone, Debug)]
    pub struct Count;

    #[cfg(feature = "alloc")]
    impl Count {
        pub const fn new() -> Self {
            Self
        }

        #[allow(clippy::unused_self)] // the models' one counts
        pub fn of<T: ?Sized>(&self, shared: &Arc<T>) -> usize {
            Arc::strong_count(shared)
        }
    }

    /// A function that is `const`, but for loom, whose atomics cannot be made in a constant.
    macro_rules! const_fn {
        ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => { $(#[$meta])* $vis const fn $($rest)* };
    }
    pub(crate) use const_fn;
}
#[cfg(not(loom))]
pub use plain::*;

#[cfg(loom)]
#[allow(clippy::must_use_candidate)] // seen by the models alone
mod checked {
    extern crate std; // for loom's macro

    use alloc::{boxed::Box, sync::Arc, vec::Vec};
    use core::cell::Cell;
    pub use loom::cell::UnsafeCell;
    pub use loom::hint::spin_loop;
    pub use loom::sync::atomic::Ordering;

    loom::thread_local! {
        static STEPS: Cell<usize> = Cell::new(0);
    }

    /// How many atomic accesses this (modelled) thread has made to words and waker cells.
    pub fn steps() -> usize {
        STEPS.with(Cell::get)
    }

    fn step() {
        STEPS.with(|steps| steps.set(steps.get() + 1));
    }

    /// loom's atomic, counted.
    #[derive(Debug)]
    pub struct AtomicU32(loom::sync::atomic::AtomicU32);

    impl AtomicU32 {
        pub fn new(value: u32) -> Self {
            Self(loom::sync::atomic::AtomicU32::new(value))
        }

        pub fn load(&self, order: Ordering) -> u32 {
            step();
            self.0.load(order)
        }

        /// Never called by the crate: a mutant of a read-modify-write needs it.
        pub fn store(&self, value: u32, order: Ordering) {
            step();
            self.0.store(value, order);
        }

        pub fn swap(&self, value: u32, order: Ordering) -> u32 {
            step();
            self.0.swap(value, order)
        }

        pub fn compare_exchange(
            &self,
            current: u32,
            new: u32,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u32, u32> {
            step();
            self.0.compare_exchange(current, new, success, failure)
        }

        pub fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
            step();
            self.0.fetch_or(bits, order)
        }
    }

    pub fn words<const N: usize>() -> [AtomicU32; N] {
        core::array::from_fn(|_| AtomicU32::new(0))
    }

    pub fn cells<T, const N: usize>(values: [T; N]) -> [UnsafeCell<T>; N] {
        values.map(UnsafeCell::new)
    }

    #[derive(Debug)]
    pub struct HeapWords(Box<[AtomicU32]>);

    impl HeapWords {
        pub fn new(len: usize) -> Self {
            Self((0..len).map(|_| AtomicU32::new(0)).collect())
        }

        pub fn as_slice(&self) -> &[AtomicU32] {
            &self.0
        }
    }

    pub fn heap_cells<T>(values: Vec<T>) -> Box<[UnsafeCell<T>]> {
        values.into_iter().map(UnsafeCell::new).collect()
    }

    pub fn heap_values<T>(cells: Box<[UnsafeCell<T>]>) -> Vec<T> {
        cells.into_iter().map(UnsafeCell::into_inner).collect()
    }

    /// Goes with each clone of an `Arc`, into which loom cannot look: loom's own `Arc`, made, cloned and dropped just
    /// before the other one. No thread runs between the two, so both have one count, and what the other one orders,
    /// this one orders.
    #[derive(Clone, Debug, Default)]
    pub struct Count(loom::sync::Arc<()>);

    impl Count {
        pub fn new() -> Self {
            Self(loom::sync::Arc::new(()))
        }

        pub fn of<T: ?Sized>(&self, shared: &Arc<T>) -> usize {
            let count = loom::sync::Arc::strong_count(&self.0);
            assert_eq!(count, Arc::strong_count(shared));
            count
        }
    }

    macro_rules! const_fn {
        ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => { $(#[$meta])* $vis fn $($rest)* };
    }
    pub(crate) use const_fn;
}
#[cfg(loom)]
pub use checked::*;
