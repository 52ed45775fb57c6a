//! Small models of the ring, one per hazard, most of them explored with two parkers.

mod cell;
mod common;
mod end;
mod freeing;
mod guards;
mod handoff;
mod reserved;
mod steps;
mod timeout;
mod wakers;

/// A second copy of the ring's waker cell: the models of `cell` run it alone.
#[path = "../../../../core/src/waker.rs"]
mod waker;

/// The atomics and cells that `waker.rs` uses.
mod sync {
    pub(crate) use twinbuf_core::sync::{AtomicU32, Ordering, UnsafeCell};

    macro_rules! const_fn {
        ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => { $(#[$meta])* $vis fn $($rest)* };
    }
    pub(crate) use const_fn;
}
