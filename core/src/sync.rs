//! The atomics and cells of the ring. Only it, and its lines in `lib.rs`, depend on `cfg(loom)` or `cfg(shuttle)`.
//!
//! In a normal build the atomics are those of `core` (or `portable-atomic`), and the cells cost nothing. `cfg(loom)`
//! takes both from `tests/loom/checked.rs`; the package `tests/loom` sets it and compiles this crate a second time.
//! With `cfg(shuttle)`, set by the package `tests/shuttle`, the atomics are shuttle's, for long random schedules.

#[cfg(not(loom))]
mod plain {
    #[cfg(feature = "alloc")]
    use alloc::{boxed::Box, vec::Vec};
    use core::mem::{ManuallyDrop, transmute_copy};
    #[cfg(all(not(shuttle), not(feature = "portable-atomic")))]
    pub use core::sync::atomic::AtomicU32;
    #[cfg(not(shuttle))]
    pub use core::{hint::spin_loop, sync::atomic::Ordering};
    #[cfg(all(not(shuttle), feature = "portable-atomic"))]
    pub use portable_atomic::AtomicU32;
    #[cfg(shuttle)] // Shuttle switches threads at calls of these. It does not check the cells.
    pub use shuttle::{
        hint::spin_loop,
        sync::atomic::{AtomicU32, Ordering},
    };

    /// A cell whose accesses are marked as reads or writes, for loom to check.
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

        #[cfg(feature = "alloc")]
        pub fn into_inner(self) -> T {
            self.0.into_inner()
        }
    }

    #[must_use]
    pub const fn words<const N: usize>() -> [AtomicU32; N] {
        [const { AtomicU32::new(0) }; N]
    }

    /// The number of words in a cache line: see `Ring` for the 128 bytes.
    #[cfg(feature = "alloc")]
    pub const LINE: usize = 128 / size_of::<AtomicU32>();

    /// Wraps these values in cells, in the vector's own memory, which is shrunk to fit.
    #[cfg(feature = "alloc")]
    #[must_use]
    pub fn heap_cells<T>(values: Vec<T>) -> Box<[UnsafeCell<T>]> {
        let values = Box::into_raw(values.into_boxed_slice());
        // SAFETY: our `UnsafeCell` and core's are `repr(transparent)`: cells and values have one layout.
        unsafe { Box::from_raw(values as *mut [UnsafeCell<T>]) }
    }

    /// Unwraps the values from these cells, in the cells' own memory.
    #[cfg(feature = "alloc")]
    #[must_use]
    pub fn heap_values<T>(cells: Box<[UnsafeCell<T>]>) -> Vec<T> {
        let cells = Box::into_raw(cells);
        // SAFETY: as in `heap_cells`, cells and values have one layout.
        unsafe { Box::from_raw(cells as *mut [T]) }.into_vec()
    }

    pub const fn cells<T, const N: usize>(values: [T; N]) -> [UnsafeCell<T>; N] {
        let values = ManuallyDrop::new(values);
        // SAFETY: `ManuallyDrop`, our `UnsafeCell` and core's are `repr(transparent)`, so the two arrays have one
        // layout; the original is never dropped, so each value has one owner.
        unsafe { transmute_copy(&values) }
    }

    /// Defines a function that is `const`, except for loom: loom's atomics cannot be created in a constant.
    macro_rules! const_fn {
        ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => { $(#[$meta])* $vis const fn $($rest)* };
    }
    pub(crate) use const_fn;
}
#[cfg(not(loom))]
pub use plain::*;

#[cfg(loom)]
#[allow(clippy::must_use_candidate)] // seen by the models alone
#[path = "../../tests/loom/checked.rs"]
mod checked;
#[cfg(loom)]
pub use checked::*;

/// Words whose number is known at run time, contiguous on cache lines that hold nothing else.
#[cfg(feature = "alloc")]
#[derive(Debug)]
pub struct HeapWords {
    memory: alloc::boxed::Box<[AtomicU32]>,
    len: usize,
}

#[cfg(feature = "alloc")]
impl HeapWords {
    #[must_use]
    pub fn new(len: usize) -> Self {
        // Room for whole cache lines of words, and for the words that `as_slice` skips to start at a cache line.
        let room = len.next_multiple_of(LINE) + LINE - 1;
        Self { memory: (0..room).map(|_| AtomicU32::new(0)).collect(), len }
    }

    #[must_use]
    pub fn as_slice(&self) -> &[AtomicU32] {
        let at = self.memory.as_ptr().addr() / size_of::<AtomicU32>();
        let first = at.next_multiple_of(LINE) - at;
        &self.memory[first..first + self.len]
    }
}
