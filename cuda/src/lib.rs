//! Uploads batches from the host to a CUDA device while the previous batch is in use: page-locked host slots, device
//! slots, and a copy stream. A stager copies weights to memory that the caller allocated, and back.
//!
//! * [`Uploader`] builds the two sides: the reading side fills [`HostSlots`], and the training side receives
//!   from [`DeviceBatches`]. Both hand-overs, reader to copy thread and copy thread to trainer, are
//!   [`twinbuf_core::HeapRing`]s.
//! * A [`Lease`] is one batch in device memory. [`on`](Lease::on) makes a stream wait for the copy and returns a
//!   [`View`] for cudarc's copies and kernels. Dropping the lease makes the next copy into that memory wait for the
//!   work in that stream. For other frameworks use [`on_raw`](Lease::on_raw), or [`into_owned`](Lease::into_owned) if
//!   they need a [`CudaSlice`](cudarc::driver::CudaSlice).
//! * A [`Stager`] copies between the host and device memory of the caller's, in pieces of any size, within a scope that
//!   borrows both.
//! * Between the first batch and the last, only the copy thread waits for the device, asleep, and the device is not
//!   synchronized as a whole. Exceptions: [`Lease::wait_copied`]; with `overlap(false)`, which has no copy thread, the
//!   calls of both sides; dropping the second side joins the copy thread; dropping a lease waits for a stream on which
//!   no event can be recorded; the allocation of [`Lease::into_owned`] may wait.
//! * The caller's context is not changed: event tracking, the count of streams, the calling thread's current context
//!   and, with a [copy stream](Uploader::copy_stream), captures begun before the call stay as they are.
//! * A missing driver, the toolkit's stub and a missing device are three different errors of [`context`], never a
//!   panic.
//! * It does **not** read files, convert numbers or make tensors: a batch is bytes plus a value of the caller's type.
//!
//! # Example
//!
//! ```no_run
//! use twinbuf_cuda::{Error, Uploader, context};
//!
//! let ctx = context(0)?; // or an existing Arc<CudaContext>
//! let stream = ctx.new_stream().unwrap();
//! let (mut slots, mut batches) = Uploader::new(&ctx, 1 << 20).build::<u64>()?;
//!
//! std::thread::spawn(move || {
//!     for step in 0..100 {
//!         let mut slot = slots.acquire()?; // page-locked memory; its previous copy is done
//!         slot[..4096].fill(7); // read a batch into it
//!         slot.commit(4096, step)?; // copied in the background
//!     }
//!     slots.finish();
//!     Ok::<(), Error>(())
//! });
//!
//! while let Some(batch) = batches.recv()? {
//!     let view = batch.on::<f32>(&stream)?; // this stream waits for the copy; the host does not
//!     // launch kernels on `stream` that read `view`
//!     assert_eq!((view.len(), *batch.meta()), (1024, batch.seq()));
//! } // dropped: the slot is refilled once the stream is done with it
//! # Ok::<(), Error>(())
//! ```
//!
//! # The edges
//!
//! The reader, the copy engine and the compute streams run independently: one could overwrite what another still reads,
//! or read too early. Three waits prevent that, shown for host slot `h` and device slot `d`:
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
//! 1. **The host waits for `copied`** before the reader refills `h`: the copy thread (without one, the calling thread)
//!    queries the event, or blocks on it. A host function on the stream could not do this, because it does not run
//!    after an error.
//! 2. **Every stream that uses the batch waits for `copied`**: [`Lease::on`] and its siblings, once per stream.
//! 3. **The copy stream waits for `consumed`**. Dropping the lease records this event on each of those streams. If one
//!    of them is being captured then, the first receive (with `overlap(false)`, also acquire) call after the capture
//!    records it.
//!
//! In these edges, cudarc's event tracking is not involved: they are the same with it on or off.
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Implements `Debug` with some fields: `debug!([generics] Type, this, name: value, ..)`.
macro_rules! debug {
    ([$($generics:tt)*] $type:ty, $this:ident, $($name:ident: $value:expr),*) => {
        impl<$($generics)*> std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let ($this, name) = (self, stringify!($type));
                let mut fields = f.debug_struct(name.split('<').next().unwrap_or(name));
                $(fields.field(stringify!($name), &$value);)*
                fields.finish_non_exhaustive()
            }
        }
    };
}

mod batches;
mod context;
mod copy;
mod cu;
mod driver;
mod edge;
mod error;
mod host;
mod lease;
pub mod lent;
mod slot;
mod stager;
#[cfg(all(test, target_os = "linux"))]
mod tests;
mod time;
mod uploader;

pub use batches::DeviceBatches;
pub use context::context;
pub use cudarc;
pub use error::Error;
pub use host::{HostSlot, HostSlots, ReservedSlot};
pub use lease::{Element, Lease, View};
pub use stager::{Stager, StagerBuilder, Staging};
pub use time::{Copied, CopyTime};
pub use uploader::Uploader;

// The unit tests and the others share helpers, which name this crate.
#[cfg(all(test, target_os = "linux"))]
extern crate self as twinbuf_cuda;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
