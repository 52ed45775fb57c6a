//! Files of records for training loops: which ones come next, asked for ahead of use, read without signals.
//!
//! - A data set is one or several files of records of one size: [`Records`]. Plain bytes, tokens with llm.c's
//!   header or none, `.npy`, one tensor of `safetensors` (feature `safetensors`); rows of them or overlapping
//!   windows ([`Cut`]). Headers are checked against the files' real sizes when they are opened.
//! - The order of an epoch is computed, not stored: from seed, epoch, rank, world size and step a [`Plan`]
//!   finds any [`BatchPlan`] in O(1), the same on every machine. Resuming is asking for another step.
//! - The next batch's pages are asked for while this one is used: [`Records::will_need`], in pieces, because
//!   one large `madvise` reads only a part and does not say so ([`PIECE`]).
//! - Records are read into the caller's buffer, by `pread` or in another way that cannot raise a signal
//!   ([`ReadMode`]): a truncated file is a typed [`Error`] with path and offset, never a SIGBUS.
//! - Pages that were used can be unmapped or dropped from the page cache, so that a data set larger than
//!   memory does not push out everything else: [`Records::evict_batch`].
//! - What the page cache holds can be counted and dropped, to measure cold reads: [`Records::residency`],
//!   [`Records::evict`].
//! - For data larger than memory there are reads past the page cache ([`ReadMode::Direct`]), into memory made for
//!   them ([`Buffer`]).
//! - It starts no thread: that is the loader's part (`twinbuf`).
//! - Records stay bytes, in the type and byte order ([`DType`], little-endian) that the file has. It does not
//!   know lengths inside records, decompress, or write.
//! - Slices of a mapping are `unsafe` ([`Records::view`]) unless the file is sealed
//!   ([`Records::view_sealed`]): others may truncate any other.
//! - Unix and Windows; hints need `madvise` (Unix), counting and dropping pages need Linux.
//!
//! # Example
//!
//! ```
//! use twinbuf_mmap::{Order, PIECE, Plan, Records};
//!
//! // A file of 1000 records of 8 bytes, each holding its number.
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("numbers.bin");
//! std::fs::write(&path, (0..1000_u64).flat_map(u64::to_le_bytes).collect::<Vec<u8>>())?;
//!
//! let records = Records::open([&path], 8)?;
//! let plan = Plan::builder(records.len())
//!     .batch(100)
//!     .order(Order::Chunks { records: 50 })
//!     .seed(1)
//!     .build()?;
//!
//! let mut slot = vec![0; 100 * records.record_bytes()];
//! let mut sum = 0;
//! for step in 0..plan.steps() {
//!     // Ask for the next batch, then read this one.
//!     if let Some(next) = plan.batch(0, step + 1) {
//!         records.will_need(&next, PIECE);
//!     }
//!     let batch = plan.batch(0, step).expect("a step below `steps`");
//!     let read = records.read(&batch, &mut slot)?;
//!     for number in slot[..read].chunks_exact(8) {
//!         sum += u64::from_le_bytes(number.try_into()?);
//!     }
//! }
//! assert_eq!(sum, (0..1000).sum::<u64>());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Onward
//!
//! [`Plan`] for shuffling, ranks and the end of an epoch; [`Records`] for files; [`Records::will_need`] for
//! hints; [`transform`] for f32 in place of bytes; [`Error`] for everything that can be wrong with a file.

mod buffer;
mod direct;
mod dtype;
mod error;
mod file;
mod fingerprint;
mod format;
mod hint;
mod launch;
mod mapped;
#[cfg(unix)]
mod page;
mod permute;
mod plan;
mod records;
mod residency;
#[cfg(feature = "serde")]
mod saved;
pub mod transform;

pub use buffer::Buffer;
pub use dtype::DType;
pub use error::Error;
pub use format::Cut;
pub use hint::{Hinted, PIECE};
pub use launch::LaunchError;
pub use mapped::ReadMode;
pub use plan::{BatchPlan, Order, Plan, PlanBuilder, PlanError, Runs, Tail};
pub use records::{Location, Options, Ragged, Records, Shard};
pub use residency::{Evict, Residency};
