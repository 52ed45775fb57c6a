//! Replaces the atomics and cells of `core/src/sync.rs`, which includes this file, with loom's. loom checks every
//! access to a cell and explores the values that a load may read. Each access to an atomic, but for counts of shares, is
//! counted: a model can assert the number of steps of a call.

extern crate std; // for loom's macro

use alloc::{boxed::Box, vec::Vec};
use core::cell::Cell;
pub use loom::cell::UnsafeCell;
pub use loom::hint::spin_loop;
pub use loom::sync::atomic::Ordering;

loom::thread_local! {
    static STEPS: Cell<usize> = Cell::new(0);
}

/// The number of atomic accesses that this (modelled) thread has made to words and waker cells.
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

    /// The crate never calls this: a mutant of a read-modify-write needs it.
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

    // The shares of a ring on the heap. Not counted as steps of the protocol.
    pub fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.0.fetch_add(value, order)
    }

    pub fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        self.0.fetch_sub(value, order)
    }
}

pub fn words<const N: usize>() -> [AtomicU32; N] {
    core::array::from_fn(|_| AtomicU32::new(0))
}

/// There are no cache lines.
pub const LINE: usize = 1;

pub fn cells<T, const N: usize>(values: [T; N]) -> [UnsafeCell<T>; N] {
    values.map(UnsafeCell::new)
}

pub fn heap_cells<T>(values: Vec<T>) -> Box<[UnsafeCell<T>]> {
    values.into_iter().map(UnsafeCell::new).collect()
}

pub fn heap_values<T>(cells: Box<[UnsafeCell<T>]>) -> Vec<T> {
    cells.into_iter().map(UnsafeCell::into_inner).collect()
}

macro_rules! const_fn {
    ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => { $(#[$meta])* $vis fn $($rest)* };
}
pub(crate) use const_fn;
