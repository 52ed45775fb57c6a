//! Overlap reading with training: two buffers, one filled while the other is used.
//!
//! * [`Records`]: fixed-size records in one or several files: raw, token files, `.npy`, `safetensors`. [`Plan`]:
//!   the records of each batch, as a pure function of seed, epoch, rank and step.
//! * [`Loader`]: reads the batches, one ahead of the one in use, on its own thread, and prefetches the pages of the
//!   batch after that. An epoch is an iterator; a [`Checkpoint`] resumes one in the middle.
//! * [`mmap::RaggedRecords`]: records of any length; [`Batch::record`] is one of them.
//! * [`transform`]: changes records on their way into the slot. `LoaderBuilder::cuda` (feature `cuda`): copies them to
//!   a device, on a separate stream.
//! * [`generate`](generate()): the same overlap for data that is made by code. [`Breakdown`]: a step, phase by phase.
//! * `stream()` (feature `safetensors`): the same overlap for the weights of a model that is larger than memory.
//! * [`Report`]: where the time went, and what other options would gain, replayed. Often that is nothing, because the
//!   compute dominates, and the report tells you. [`observe::Trace`]: the same as a picture, for Perfetto.
//! * Errors come in order, once, with path and offset; a truncated file is an error, never a signal.
//! * It does **not** decode by itself, shuffle in memory or make tensors: a batch is bytes, or the numbers that
//!   they are, in a buffer that is reused.
//!
//! # Example
//!
//! ```
//! use twinbuf::{Loader, Plan, Records, Shuffle};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("tokens.bin");
//! # std::fs::write(&path, vec![1u8; 1024 * 64])?;
//! let data = Records::open([&path], 1024)?;
//! let plan = Plan::builder(data.len()).batch(16).shuffle(Shuffle::Full).seed(1).build()?;
//! let mut loader = Loader::builder(data, plan).build()?;
//! for batch in loader.epochs(0..3) {
//!     for record in batch?.chunks_exact(1024) {
//!         assert_eq!(record[0], 1); // train on it
//!     }
//! }
//! println!("{}", loader.report());
//! # Ok::<(), twinbuf::BoxError>(())
//! ```
//!
//! # The crates
//!
//! [`ring`] is the two-slot ring alone (`no_std`, no dependency), for authors of other loaders;
//! [`mmap`] is files, plans and page hints; `twinbuf-cuda` is page-locked and device slots and the stream between
//! them; this crate puts them together.
//!
//! | feature | is |
//! | --- | --- |
//! | `cuda` | `LoaderBuilder::cuda`; needs no toolkit, and a driver only when it is used |
//! | `safetensors` | `Records::open_safetensors`, `open_safetensors_each`; `stream()` and the tensors of models |
//! | `serde` | [`Checkpoint`] and [`Plan`] can be saved, [`Report`] written |
//! | `stream` | [`loader::Epochs`] is a `futures_core::Stream` |
//! | `tracing` | spans `epoch`, `load` and `wait` for the crate of that name |
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod batch;
mod cpu;
mod dataset;
mod error;
pub mod generate;
pub mod loader;
pub mod observe;
mod slot;
mod stage;
#[cfg(feature = "safetensors")]
pub mod stream;
mod thread;
pub mod transform;

pub use dataset::Dataset;
pub use error::{BoxError, Error};
pub use generate::generate;
pub use loader::{Batch, Checkpoint, Loader};
pub use observe::{Breakdown, Report};
#[cfg(feature = "safetensors")]
pub use stream::stream;
pub use twinbuf_core as ring;
#[cfg(feature = "cuda")]
pub use twinbuf_cuda as cuda;
pub use twinbuf_mmap as mmap;
pub use twinbuf_mmap::{BatchIndices, LastBatch, Plan, Records, Shuffle};

/// The program in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
