//! Overlap reading with training: two buffers, one filled while the other is used.
//!
//! * [`Records`]: fixed-size records in one or several files: raw, token files, `.npy`, `safetensors`. [`Plan`]:
//!   which of them make which batch, as a pure function of seed, epoch, rank and step.
//! * [`Loader`]: reads the batches, one ahead of the one in use, on a thread of its own, with the pages of the
//!   one after asked for ahead. An epoch is an iterator; [`State`] goes on in the middle of one another day.
//! * [`RecordTransform`]: what becomes of records on their way into the slot. `LoaderBuilder::cuda` (feature
//!   `cuda`): from there to a device, on a stream of its own.
//! * [`Loader::generate`]: the same overlap for data that is made by code. [`Breakdown`]: a step, phase by phase.
//! * [`Report`]: where the time went, and how much overlap can still gain. Often that is nothing, because the
//!   compute dominates: then it says so. [`Profile`]: the same as a picture, a trace for Perfetto.
//! * Errors come in order, once, with path and offset; a truncated file is an error, never a signal.
//! * It does **not** decode, shuffle in memory or make tensors: a batch is bytes, or the numbers that
//!   they are, in a buffer that is reused.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use twinbuf::{Loader, Order, Plan, Records};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("tokens.bin");
//! # std::fs::write(&path, vec![1u8; 1024 * 64])?;
//! let data = Arc::new(Records::open([&path], 1024)?);
//! let plan = Plan::builder(data.len()).batch(16).order(Order::Records).seed(1).build()?;
//! let loader = Loader::builder(data, plan).build()?;
//! for epoch in 0..3 {
//!     for batch in loader.epoch(epoch) {
//!         let batch = batch?;
//!         for record in batch.chunks_exact(1024) {
//!             assert_eq!(record[0], 1); // train on it
//!         }
//!     }
//! }
//! println!("{}", loader.report());
//! # Ok::<(), twinbuf::BoxError>(())
//! ```
//!
//! # The crates
//!
//! [`core`] is the two-slot ring alone (`no_std`, no dependency), for authors of other loaders;
//! [`mmap`] is files, plans and page hints; `twinbuf-cuda` is page-locked and device slots and the stream between
//! them; this crate puts them together.
//!
//! | feature | is |
//! | --- | --- |
//! | `cuda` | `LoaderBuilder::cuda`; needs no toolkit, and a driver only when it is used |
//! | `safetensors` | `Records::open_safetensors`, `open_safetensors_each` |
//! | `serde` | [`State`] and [`Plan`] can be saved, [`Report`] written |
//! | `stream` | an [`Epoch`] is a `futures_core::Stream` |
//! | `tracing` | spans `epoch`, `load` and `wait` for the crate of that name |

mod backend;
mod breakdown;
mod budget;
mod dataset;
mod epoch;
mod error;
mod fork;
mod generate;
mod loader;
mod reader;
mod report;
mod slot;
mod spans;
mod state;
mod switches;
mod trace;
mod transform;
#[cfg(feature = "cuda")]
mod upload;

pub use backend::{Backend, Host};
pub use breakdown::{Breakdown, Validation};
pub use budget::MemoryBudget;
pub use dataset::Dataset;
pub use epoch::{Batch, Epoch};
pub use error::{BoxError, Error};
pub use generate::{GenerateReport, Generator, GeneratorBuilder, Round, RoundError, Rounds};
pub use loader::{Loader, LoaderBuilder, MAX_HOST_DEPTH};
pub use report::{DOMINATES, Report, Stage, Verdict};
#[cfg(feature = "cuda")]
pub use slot::Load;
pub use state::State;
pub use switches::{SwitchError, Switches};
pub use trace::Profile;
pub use transform::{Numbers, PerRecord, RecordTransform, per_record};
pub use twinbuf_core as core;
#[cfg(feature = "cuda")]
pub use twinbuf_cuda as cuda;
pub use twinbuf_mmap as mmap;
pub use twinbuf_mmap::transform::Transform;
pub use twinbuf_mmap::{
    BatchPlan, Cut, DType, Evict, Hinted, Order, Plan, PlanError, ReadMode, Records, Residency, Tail,
};
#[cfg(feature = "cuda")]
pub use upload::{Cuda, DeviceBatch};

/// The program in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
