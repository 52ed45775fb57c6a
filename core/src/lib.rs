//! A lock-free double buffer: two fixed slots, one filled while the other is used, handed over by one atomic
//! word each.
//!
//! * One producer, one consumer, two slots (or `N`); hand-offs in order, none lost, none doubled.
//! * Slots are filled and read **in place** and recycled: no copy, no allocation, no drop in a hand-off.
//! * `no_std`, no `alloc`, no dependency; one compare-exchange a hand-off; no fence, nothing `SeqCst`.
//! * Try, block, block with a timeout, or await, each side as it likes. How a blocked side waits is a strategy
//!   ([`Wait`]): spin, park in the kernel, or your own.
//! * The end and a failure are different things: a producer that is dropped without
//!   [`finish`](Producer::finish) is reported as [`Abandoned`](RecvError::Abandoned), after all it committed.
//! * Several read guards may be alive, released in any order and from any thread.
//! * It is **not** a queue: no more than `N` items are ever in flight, and it is at its best with large ones.
//!   For many small messages take a channel.
//! * It is not for several producers or consumers, nor for a reader that wants only the newest value (that is
//!   a triple buffer).
//!
//! # Example
//!
//! ```
//! use twinbuf_core::{DoubleBuffer, RecvError};
//!
//! let mut ring = DoubleBuffer::new([vec![0u8; 1 << 16], vec![0u8; 1 << 16]]);
//! let (mut tx, rx) = ring.split();
//!
//! std::thread::scope(move |s| { // `move`: an early end drops `rx` too, and the waiting producer is told
//!     s.spawn(move || -> Result<(), twinbuf_core::Closed> {
//!         for i in 0..10 {
//!             let mut slot = tx.acquire()?; // waits until the consumer has released it
//!             slot.fill(i);                 // dropped here, it would not be handed over
//!             slot.commit()?;
//!         }
//!         tx.finish();
//!         Ok(())
//!     });
//!     for (i, slot) in (0..).zip(rx.iter()) {
//!         assert!(slot?.iter().all(|&byte| byte == i)); // released when it goes out of scope
//!     }
//!     Ok::<(), RecvError>(())
//! })?;
//! # Ok::<(), RecvError>(())
//! ```
//!
//! # Where to read on
//!
//! [`state`] is the whole protocol without an atomic in it; [`Ring`] how to make one; [`Producer`] and
//! [`Consumer`] what each side can do; [`Wait`] how to wait. The README has the state diagram and the proof.
//!
//! # Features
//!
//! | feature | adds |
//! | --- | --- |
//! | (none) | all of the ring, [`Spin`], async; `no_std` without `alloc` |
//! | `alloc` | [`Ring::into_handles`]: handles that own the ring together |
//! | `std` | [`Park`], [`Backoff`], [`SpinYield`], timeouts by `std::time::Instant`, [`channel`] |
//!
//! A target needs a 32-bit compare-exchange (`thumbv6m` has none).

#![no_std]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", doctest))]
extern crate std;

mod consumer;
mod error;
mod producer;
mod ring;
pub mod state;
#[doc(hidden)] // For the models, which need the atomics that the crate was compiled with.
pub mod sync;
mod wait;
mod waker;

pub use consumer::{Consumer, ConsumerStats, Iter, ReadSlot};
pub use error::{
    AcquireTimeoutError, Closed, FillError, RecvError, RecvTimeoutError, TryAcquireError, TryRecvError,
};
pub use producer::{Producer, ProducerStats, WriteSlot};
#[cfg(feature = "std")]
pub use ring::channel;
pub use ring::{DoubleBuffer, Ring};
#[cfg(feature = "std")]
pub use wait::{Backoff, Park, SpinYield};
pub use wait::{Spin, Wait, WaitUntil};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
