//! A lock-free double buffer: two fixed slots, one filled while the other is used, handed over by one atomic
//! word each.
//!
//! * One producer, one consumer, two slots (or any number); hand-offs in order, none lost, none doubled.
//! * Slots are filled and read **in place** and recycled: no copy, no allocation, no drop in a hand-off.
//! * `no_std`, no `alloc`, no dependency; one compare-exchange a hand-off; no fence, nothing `SeqCst`.
//! * Try, block, block with a timeout, or await, each side as it likes. How a blocked side waits is a strategy
//!   ([`Wait`]): spin, park in the kernel, or your own.
//! * The end and a failure are different things: a producer that is dropped without
//!   [`finish`](Producer::finish) is reported as [`Abandoned`](RecvError::Abandoned), after all it committed.
//! * Several slots may be filled at once ([`WriteSlot::reserve`]) and several read at once, finished in any order and
//!   on any thread. From owned or `static` handles the guards are `'static`.
//! * It is **not** a queue: no more than `N` items are ever in flight, and it is at its best with large ones.
//!   For many small messages take a channel.
//! * It is not for several producers or consumers, nor for a reader that needs only the newest value (that is
//!   a triple buffer).
//!
//! # Example
//!
//! ```
//! use twinbuf_core::{DoubleBuffer, RecvError};
//!
//! let mut ring = DoubleBuffer::new([vec![0u8; 1 << 16], vec![0u8; 1 << 16]]);
//! let (mut tx, mut rx) = ring.split();
//!
//! std::thread::scope(move |s| { // `move`: an early end drops `rx` too, which ends the producer's wait
//!     s.spawn(move || -> Result<(), twinbuf_core::Closed> {
//!         for i in 0..10 {
//!             let mut slot = tx.acquire()?; // waits until the consumer has released it
//!             slot.fill(i);                 // dropped here, it would not be handed over
//!             slot.commit()?;
//!         }
//!         tx.finish();
//!         Ok(())
//!     });
//!     for (i, slot) in (0..).zip(&mut rx) {
//!         assert!(slot?.iter().all(|&byte| byte == i)); // released when it goes out of scope
//!     }
//!     Ok::<(), RecvError>(())
//! })?;
//! # Ok::<(), RecvError>(())
//! ```
//!
//! # The guards
//!
//! | guard | from | dropped | leaked | lives as long as |
//! | --- | --- | --- | --- | --- |
//! | [`WriteSlot`] | `acquire` | nothing happened | nothing happened | the producer |
//! | [`ReservedSlot`] | [`WriteSlot::reserve`] | the consumer reads `Cancelled`, once | its slot is lost | the ring |
//! | [`ReadSlot`] | `recv` | the slot is released | its slot is lost | the ring |
//!
//! # Which calls are lock-free
//!
//! All `try_*` calls, `commit`, `cancel` by dropping, `release` and the end of a handle: a bounded number of atomic
//! steps, whatever the other side does, even if it stopped in the middle of a call. So are the `poll_*` and `*_async`
//! calls between two suspensions. What a waker or a wait strategy does when it is called is its affair: [`Spin`] does
//! nothing, [`Park`] makes a system call on 64-bit Linux and takes a lock of `parking_lot_core` elsewhere. The
//! blocking calls wait, as they must. With the feature `portable-atomic` each atomic step is a critical section.
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
//! | (none) | [`Ring`], [`Spin`], async; `no_std` without `alloc` |
//! | `alloc` | [`HeapRing`], of any depth; handles that own their ring |
//! | `std` | [`Park`], [`Backoff`], [`Adaptive`], [`SpinYield`], timeouts by `std::time::Instant`, [`channel`] |
//! | `portable-atomic` | targets without a 32-bit compare-exchange, such as `thumbv6m`, by `critical-section` |
//! | `embedded-dma` | `WriteBuffer` for a [`ReservedSlot`] and `ReadBuffer` for a [`ReadSlot`] that are `'static` |
//! | `defmt` | `defmt::Format` for errors, states and statistics |

#![no_std]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", doctest))]
extern crate std;

mod consumer;
#[cfg(doctest)]
mod contracts;
#[cfg(feature = "embedded-dma")]
mod dma;
mod error;
mod producer;
mod raw;
mod ring;
pub mod state;
#[cfg(not(loom))]
#[allow(unreachable_pub)]
mod sync;
#[cfg(loom)]
#[allow(missing_docs)] // The models count the steps, and run the waker cell alone.
pub mod sync;
mod wait;
mod waker;

pub use consumer::{Consumer, ConsumerStats, Iter, ReadSlot};
pub use error::{
    AcquireTimeoutError, Closed, FillError, RecvError, RecvTimeoutError, TryAcquireError, TryRecvError,
};
pub use producer::{Producer, ProducerStats, ReservedSlot, WriteSlot};
#[cfg(feature = "alloc")]
pub use ring::HeapRing;
#[cfg(feature = "std")]
pub use ring::channel;
pub use ring::{DoubleBuffer, Ring};
#[cfg(feature = "std")]
pub use wait::{Adaptive, Backoff, Park, SpinYield};
pub use wait::{Spin, Wait, WaitUntil, Word};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
