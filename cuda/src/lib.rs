//! Batches from the host to a CUDA device: page-locked host slots, device slots, a copy stream of its own.
//!
//! * [`Uploader`] makes it: [`HostSlots`], which the reading side fills, and [`DeviceBatches`], which the
//!   training side receives. Both hand-overs, reader to copy thread to trainer, are [`twinbuf_core::Ring`]s.
//! * [`Lease`]: one batch in device memory. [`on`](Lease::on) makes a stream wait for the copy and gives a [`View`]
//!   for cudarc's copies and kernels; dropping the lease makes the next copy into that memory wait for that stream. Raw pointers and streams for other frameworks; [`into_owned`](Lease::into_owned) for those
//!   that want a [`CudaSlice`](cudarc::driver::CudaSlice).
//! * Between the first batch and the last nothing waits on the host but the copy thread, which sleeps; no
//!   synchronization of the whole device. The exceptions: dropping the last side joins the copy thread; giving back
//!   the slot of a leaked lease waits for the context; dropping a lease waits for a stream on which no event can be
//!   recorded.
//! * A good neighbour: the context's event tracking, its count of streams, the calling thread's current context and
//!   captures on other threads stay as they are.
//! * No driver, a stub in its place, no device: three different errors of [`context`], never a panic.
//! * It does **not** read files, convert numbers or make tensors: a batch is bytes, with a value of yours beside
//!   it.
//!
//! # Example
//!
//! ```no_run
//! use twinbuf_cuda::{Error, Uploader, context};
//!
//! let ctx = context(0)?; // or the context you have
//! let stream = ctx.new_stream().unwrap();
//! let (mut slots, mut batches) = Uploader::new(&ctx, 1 << 20).build::<u64>()?;
//!
//! std::thread::spawn(move || {
//!     for step in 0..100 {
//!         let mut slot = slots.acquire()?; // page-locked memory, free again
//!         slot[..4096].fill(7); // read the batch into it
//!         slot.commit(4096, step)?; // the copy starts, in the background
//!     }
//!     slots.finish();
//!     Ok::<(), Error>(())
//! });
//!
//! while let Some(batch) = batches.recv()? {
//!     let view = batch.on::<f32>(&stream)?; // this stream waits for the copy; the host does not
//!     // launch kernels on `stream` that read `view`
//!     assert_eq!((view.len(), *batch.meta()), (1024, 0));
//! } // dropped: the slot is refilled once the stream is done with it
//! # Ok::<(), Error>(())
//! ```
//!
//! # The edges
//!
//! A copy engine and a compute stream run by themselves; what one may overwrite, the other may still read. Three
//! waits, and no others, keep them apart, for host slot `h` and device slot `d`:
//!
//! ```text
//! reader        fill h ───┐                                  ┌── fill h again
//!                         │ ring                        ring │
//! copy thread             └─ issue ─────── wait for copied ──┘
//!                              │                  ▲ (1)
//! copy stream     ─ (3) ── copy h → d ─ record copied ─────────────── copy → d ──
//!                    ▲                            │ (2)                 ▲ (3)
//! compute stream     │                            └─ wait ─ use d ─ record consumed
//!                  of the last use                                  (lease dropped)
//! ```
//!
//! 1. **The host waits for `copied`** before `h` goes back to the reader: by an event that blocks the copy thread,
//!    not by a host function on the stream, which does not run after an error.
//! 2. **Every stream that uses the batch waits for `copied`**: [`Lease::on`], once a stream.
//! 3. **The copy stream waits for `consumed`**, recorded on each of those streams when the lease is dropped.
//!
//! cudarc's own event tracking plays no part in this: with it switched off or on, the edges are the same.
#![deny(missing_docs)]

mod copy;
mod cu;
mod driver;
mod edge;
mod error;
mod host;
mod lease;
mod slot;
#[cfg(all(test, target_os = "linux"))]
mod tests;
mod uploader;
mod view;

pub use copy::{Copied, CopyTime};
pub use cudarc;
pub use driver::context;
pub use error::Error;
pub use host::{HostSlot, HostSlots};
pub use lease::{DeviceBatches, Element, Lease, LocalLease};
pub use uploader::{LentDevice, LentHost, MAX_DEPTH, Uploader};
pub use view::View;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
