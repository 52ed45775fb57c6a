//! Files of records for training loops: reproducible batch plans, prefetch, and reads that cannot raise SIGBUS.
//!
//! - [`Records`] opens one or more files as one data set: untyped bytes, token files with llm.c's header or without a
//!   header, `.npy`, one array of `.npz` files (feature `npz`), or one tensor of `safetensors` files (feature
//!   `safetensors`). A record with an element type is a row or a window of rows ([`Cut`]). Opening checks the header of
//!   a known format against the size of the file.
//! - [`RaggedRecords`] opens records of varying length: a data file with an index of offsets, or Megatron-LM token
//!   files. Both types contain a [`Ranges`]: the byte range of each record in the files.
//! - `Tensors` (feature `safetensors`) finds the tensors of a model by name, in `safetensors` files, their index, or
//!   GGUF files. [`Reader`] reads groups of tensors.
//! - [`Plan`] computes the order of an epoch. Without a schedule of batch sizes, it finds any [`BatchIndices`] of an
//!   epoch and step in O(1), with the same result on every machine. To resume, start at another step.
//! - [`Reader`] reads the batches of a loop into the caller's buffer and prefetches the next
//!   batches. On Linux, data that fits in memory is read through the page cache by default, the
//!   rest with direct I/O where all files support it ([`ReadMode`]). Reading bytes that a truncation removed returns an
//!   [`Error`] with path and offset. [`Ranges::read`] reads one batch without prefetch.
//! - [`Ranges::residency`] counts cached pages, and [`Ranges::evict`] asks the kernel to drop them, to measure cold
//!   reads (Linux, Android).
//!
//! This crate does not:
//!
//! - fill a buffer in the background during training; the crate `twinbuf` does. This crate starts threads only for
//!   direct I/O (where `io_uring` is missing or refused, and one if a reader is dropped during reads), and during
//!   [`Ranges::fingerprint`] of more than 64 files.
//! - convert records when it reads them: records keep the type and byte order of the file ([`DType`],
//!   little-endian). [`transform`] converts numbers on request.
//! - write or decompress files.
//! - return slices of a mapping, because another process may truncate the file.
//!
//! It supports Unix and Windows. The README has a table of prefetch, eviction and direct I/O for each system.
//!
//! # Example
//!
//! ```
//! use twinbuf_mmap::{Plan, ReadMode, Reader, Records, Shuffle};
//!
//! // A file of 1000 records of 8 bytes, each holding its number.
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("numbers.bin");
//! std::fs::write(&path, (0..1000_u64).flat_map(u64::to_le_bytes).collect::<Vec<u8>>())?;
//!
//! let records = Records::open([&path], 8)?;
//! let plan = Plan::builder(records.len())
//!     .batch(100)
//!     .shuffle(Shuffle::Window { chunk_records: 50, window_chunks: 4 })
//!     .seed(1)
//!     .build()?;
//!
//! let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto)?;
//! let batches: Vec<_> = (0..plan.steps(0)).filter_map(|step| plan.batch(0, step)).collect();
//! reader.begin(batches.clone().into_iter());
//! let mut slot = vec![0; 100 * 8];
//! let mut sum = 0;
//! for batch in batches {
//!     let read = reader.read(&batch, &mut slot)?;
//!     for number in slot[..read].chunks_exact(8) {
//!         sum += u64::from_le_bytes(number.try_into()?);
//!     }
//! }
//! assert_eq!(sum, (0..1000).sum::<u64>());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # See also
//!
//! [`Plan`] for shuffling, ranks and the end of an epoch; [`Records`] for files; [`Reader`] for prefetch; [`transform`]
//! for conversions to `f32`; [`Error`] for the errors of files.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod buffer;
mod cache;
mod dtype;
mod error;
mod file;
mod files;
mod fingerprint;
mod format;
#[cfg(feature = "safetensors")]
mod groups;
mod limit;
mod plan;
mod ranges;
mod reader;
mod records;
mod stats;
mod system;
pub mod transform;

pub use buffer::Buffer;
pub use cache::Residency;
pub use dtype::DType;
pub use error::Error;
pub use files::files;
#[cfg(feature = "safetensors")]
pub use format::{ByteRange, Tensor, Tensors};
pub use format::{Cut, RaggedRecords};
#[cfg(feature = "safetensors")]
pub use groups::Groups;
pub use plan::{
    BatchIndices, LastBatch, PartialEpoch, Plan, PlanBuilder, PlanError, RankError, RecordList,
    RemainingEpoch, Shuffle,
};
pub use ranges::{Location, Ranges, Shard};
pub use reader::cached::HINT_CHUNK;
pub use reader::units::Units;
pub use reader::{ReadMode, Reader};
pub use records::{Options, Records};
pub use stats::{ReadChoice, ReadStats};
