//! Overlaps reading with training: a thread fills one buffer while the training loop uses another.
//!
//! - [`Records`]: records of a fixed size in one or more files: untyped bytes, token files, `.npy`, `.npz`,
//!   `safetensors`. [`Plan`]: the records of each batch, as a pure function of its options, epoch and step.
//! - [`Loader`]: by default, reads batches ahead of use on a separate thread and prefetches later ones from files. An
//!   epoch is an iterator. A [`Checkpoint`] resumes in the middle of an epoch.
//! - [`mmap::RaggedRecords`]: records of any length. [`Batch::record`] returns one of them.
//! - [`transform`]: converts records before they reach the slot. `LoaderBuilder::cuda` (feature `cuda`): copies
//!   batches to a device.
//! - [`generate`](generate()): the same overlap for data made by code. [`Breakdown`]: the time of each phase of a step.
//! - `stream()` (feature `safetensors`): the same overlap for the weights of a model that may be larger than memory.
//! - [`write`](mod@write): the other direction. The loop fills one buffer while a thread writes the other to a file.
//! - [`pipe`]: what loaders, generators and streams are built on, for authors of others. Its workers are threads of
//!   its own, or the program drives them.
//! - [`Report`]: by sums of measured times, what takes the time, and at most one change to try, with a bound of what
//!   it saves ([guide](https://github.com/twinbuf/twinbuf/blob/main/docs/report.md)). [`observe::Trace`]: a timeline
//!   for Perfetto.
//! - An iterator returns what comes before a failure, and then one error. That of a failed read of
//!   a file has path and offset. A read of what a truncated file lacks is an error, never a signal.
//! - This crate does **not** decode, shuffle in memory or make tensors: a batch is bytes, or numbers without a copy,
//!   in a reused buffer.
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
//! # Index of calls
//!
//! | what | call |
//! | --- | --- |
//! | raw files, tokens of llm.c or nanoGPT, `.npy`, `.npz`, `safetensors` | `Records::open`, or `open_..` with a `Cut` ([mmap](https://github.com/twinbuf/twinbuf/blob/main/mmap/README.md)) |
//! | your own data set | implement `Dataset` |
//! | records in S3, Azure, GCS or HTTP | the adapter [object-store](https://github.com/twinbuf/twinbuf/tree/main/adapters/object-store), a `Dataset` |
//! | images with labels, inputs with targets | `Loader::builder((images, labels), plan)`, `batch.fields::<(f32, i64)>()?` |
//! | records of any length: JPEGs, texts, Megatron-LM's tokens | `RaggedRecords::open_indexed`, `open_megatron`; `batch.record(i)`, `batch.offsets(0)` |
//! | decode or augment on several threads, in the plan's order | `.workers(2)`, with `transform::per_record` to one size, `transform::map` to any |
//! | convert on the way: u8 to normalised f32, planes, wider tokens | `.transform(t)`, once or several times |
//! | batches on a GPU | `.cuda(ctx).device_depth(2)`, feature `cuda` ([cuda](https://github.com/twinbuf/twinbuf/blob/main/cuda/README.md)) |
//! | slots in memory of your own, such as pinned tensors | `.slots(buffers)`, `Buffer::lent` |
//! | several ranks | `Plan::builder(n).rank(rank, world)`, or `Plan::from_env` for torchrun, Open MPI, Slurm |
//! | batch sizes that change; sequences that grow | `Plan::builder(n).batches(sizes)`; a loader for each length ([`loader`]) |
//! | resume in the middle of an epoch, also with another batch size or number of ranks | `batch.checkpoint()`, `loader.epochs_from(&checkpoint, 3)`; to save it, feature `serde` |
//! | data larger than memory | on most Linux file systems nothing: `ReadMode::Auto` reads what does not fit past the page cache; on Windows `ReadMode::Direct` |
//! | reads that may never return: a file server that is gone | `epochs.next_timeout(t)` and `epochs.reading()`; `loader.close_timeout(t)` |
//! | do not block | `epochs.try_next()`, `epochs.next_async().await`, feature `stream` |
//! | weights larger than memory, layer by layer | `twinbuf::stream(model.groups_by(layer)?)`, feature `safetensors` |
//! | data made by code: simulators, self-play | `twinbuf::generate`, in lockstep if it needs the newest weights; several threads for one round: `generate::with_parts` |
//! | rows that a loop makes, written behind it to `.npy` or raw files | [`Writer::npy`](write::Writer::npy), `out.slot::<f32>(256)?`, `out.commit(256)`, `out.finish()?` |
//! | a snapshot of a model while it trains | Python's [snapshot.py](https://github.com/twinbuf/twinbuf/blob/main/python/examples/snapshot.py) |
//! | your own threads or event loop fill the slots | `.driven()` on the builder, [`loader::Driven`]; [`pipe::Driven`] for other loaders |
//! | traces and phases | `.trace("trace.json")`, `.breakdown(Breakdown::every(100))`, feature `tracing` |
//! | switches for a program that cannot be recompiled | `.from_env()?`: `TWINBUF_OVERLAP`, `_COPY_STREAM`, `_WORKERS`, `_DEPTH`, `_HINTS`, `_MEMORY`, `_TRACE`, `_BREAKDOWN` |
//! | estimate the gain before you adopt it | `twinbuf probe FILE` |
//!
//! # The crates
//!
//! - [`ring`]: the ring of slots alone (`no_std` without its feature `std`), for authors of other loaders.
//! - [`mmap`]: files, plans and prefetch.
//! - `twinbuf-cuda`: page-locked host slots, device slots, and the copies between them.
//! - This crate combines them.
//!
//! | feature | provides |
//! | --- | --- |
//! | `cuda` | `LoaderBuilder::cuda`, with `safetensors` `StreamBuilder::cuda`; it needs no CUDA toolkit, and needs a driver only at run time |
//! | `npz` | `Records::open_npz`, `open_npz_each` |
//! | `safetensors` | `Records::open_safetensors`, `open_safetensors_each`; `stream()` and the tensors of models |
//! | `serde` | [`Checkpoint`] and [`Plan`] can be saved and loaded, [`Report`] can be serialized |
//! | `stream` | [`pipe::Items`], and so every iterator of items, implements `futures_core::Stream` |
//! | `tracing` | spans `epoch`, `load` and `wait` for the crate `tracing` |
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Implements `Debug` for a type with fields that have none. Prints the given values, and `..` for the other fields.
macro_rules! debug {
    ([$($generics:tt)*] $name:ident [$($arguments:tt)*], |$this:ident| $($field:ident: $value:expr),*) => {
        #[automatically_derived]
        impl<$($generics)*> std::fmt::Debug for $name<$($arguments)*> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $this = self;
                f.debug_struct(stringify!($name))$(.field(stringify!($field), &$value))*.finish_non_exhaustive()
            }
        }
    };
}

mod dataset;
mod error;
pub mod generate;
pub mod loader;
pub mod observe;
pub mod pipe;
#[cfg(feature = "safetensors")]
pub mod stream;
mod sync;
mod temporary;
mod thread;
pub mod transform;
pub mod write;

pub use dataset::Dataset;
pub use error::{BoxError, Error};
pub use generate::generate;
pub use loader::batch::Batch;
pub use loader::checkpoint::Checkpoint;
pub use loader::epochs::Loader;
pub use observe::breakdown::Breakdown;
pub use observe::report::Report;
#[cfg(feature = "safetensors")]
pub use stream::stream;
pub use twinbuf_core as ring;
#[cfg(feature = "cuda")]
pub use twinbuf_cuda as cuda;
pub use twinbuf_mmap as mmap;
pub use twinbuf_mmap::{BatchIndices, LastBatch, Plan, RecordList, Records, Shuffle};

/// The program in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
