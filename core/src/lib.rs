#![doc = include_str!("../README.md")]
#![allow(clippy::doc_markdown, reason = "a page for people too")]
#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]

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
#[allow(unreachable_pub)] // the oracle compiles it again
mod state;
#[cfg(not(loom))]
#[allow(unreachable_pub)]
mod sync;
#[cfg(loom)]
#[allow(missing_docs)] // The models count the steps, and run the waker cell alone.
pub mod sync;
mod wait;
mod waker;

pub use consumer::{Consumer, KeptSlot, ReadSlot};
pub use error::{Closed, RecvError, TryAcquireError, TryRecvError};
pub use producer::{Producer, ReservedSlot, WriteSlot};
#[cfg(feature = "alloc")]
pub use ring::HeapRing;
pub use ring::{DoubleBuffer, Ring};
#[cfg(feature = "std")]
pub use wait::Park;
pub use wait::{Auto, Spin, Wait, WaitUntil, Word};
