//! Files of records for training loops: plans, page hints ahead of use, and reads that cannot raise SIGBUS.
//!
//! - [`Records`] opens one or several files as one data set: plain bytes, tokens with llm.c's header or none, `.npy`,
//!   one array of `.npz` or one tensor of `safetensors` (features of these names). A record is a row or a window over rows ([`Cut`]).
//!   Opening checks every header against the file's real size.
//! - [`RaggedRecords`] describes records of varying length: a data file with an index of offsets, or Megatron-LM's.
//!   Readers see both as [`Ranges`]: the bytes of each record in the files.
//! - `Tensors` (feature `safetensors`) finds the tensors of a model by name: `safetensors`, their index, and GGUF.
//!   `GroupReader` reads groups of them.
//! - [`Plan`] computes the order of an epoch and stores nothing: from seed, epoch, rank, world size and step it finds
//!   any [`BatchIndices`] in O(1), the same on every machine. To resume, ask for another step.
//! - [`Reader`] reads the batches of one loop into your buffer and prefetches the next ones. What fits in memory comes
//!   through the page cache, the rest past it ([`ReadMode`]). A truncated file is a typed [`Error`] with path and
//!   offset, never a SIGBUS. [`Ranges::read`] reads one batch without reading ahead.
//! - [`Ranges::residency`] counts the pages in the cache and [`Ranges::evict`] drops them, to measure cold reads.
//!
//! It does not:
//!
//! - overlap reading with training: the crate `twinbuf` does. The only threads are those of reads past the page cache where
//!   there is no `io_uring`.
//! - convert records: they stay bytes in the file's type and byte order ([`DType`], little-endian). [`transform`] turns
//!   them into f32 on request.
//! - write or decompress.
//! - give slices of a mapping, because any process may truncate the file.
//!
//! Runs on Unix and Windows. The README has a table of what hints, eviction and direct reads are on each system.
//!
//! # Example
//!
//! ```
//! use twinbuf_mmap::{Plan, ReadOptions, Reader, Records, Shuffle};
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
//! let reader = Reader::new(records.ranges(), &plan, ReadOptions::new())?;
//! let batches = move || (0..).map_while(move |step| plan.batch(0, step));
//! reader.begin(batches());
//! let mut slot = vec![0; 100 * 8];
//! let mut sum = 0;
//! for batch in batches() {
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
//! [`Plan`] for shuffling, ranks and the end of an epoch; [`Records`] for files; [`Reader`] for reading ahead; [`transform`] for f32 in place of bytes; [`Error`] for what can be wrong with a file.
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
mod page;
mod plan;
mod ranges;
mod reader;
mod records;
mod shard;
mod system;
pub mod transform;

pub use buffer::Buffer;
pub use cache::Residency;
pub use dtype::DType;
pub use error::{Error, FormatError};
pub use files::files;
#[cfg(feature = "safetensors")]
pub use format::{ByteRange, Tensor, Tensors};
pub use format::{Cut, RaggedRecords};
#[cfg(feature = "safetensors")]
pub use groups::Groups;
pub use plan::{
    BatchIndices, LastBatch, PartialEpoch, Plan, PlanBuilder, PlanError, RankError, RemainingEpoch, Shuffle,
};
pub use ranges::{Location, Ranges};
pub use reader::cached::HINT_CHUNK;
#[cfg(feature = "safetensors")]
pub use reader::groups::GroupReader;
pub use reader::mode::ReadMode;
pub use reader::stats::{ReadChoice, ReadStats};
pub use reader::{ReadOptions, Reader};
pub use records::{Options, Records};
pub use shard::Shard;
