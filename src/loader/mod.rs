//! Loads the batches of a plan ahead of their use. An epoch is an iterator of batches.
//!
//! # Sequences that grow during the training
//!
//! A plan changes the batch size ([`batches`](twinbuf_mmap::PlanBuilder::batches)). The length of the records belongs
//! to the data set, so each length has a loader of its own, and one follows the other. With overlap, a loader reads
//! ahead from the moment that its iterator exists: if all iterators exist before the training begins, no step waits for
//! a new loader to start. Each loader then has its slots in memory all the time.
//!
//! The plan of each loader visits the windows of its own part of the tokens. [`Cut::sequence`](twinbuf_mmap::Cut) makes
//! windows of one token more than the length, one every length, so each token but the first is a target once, up to
//! the end of the last window.
//!
//! A state of the training is the number of the loader and its [`Checkpoint`](crate::Checkpoint).
//!
//! ```
//! use twinbuf::mmap::{Cut, DType};
//! use twinbuf::{BoxError, Checkpoint, Loader, Plan, Records, Shuffle};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("tokens.bin");
//! # std::fs::write(&path, vec![0; 2 * (2 * 64 * 512 + 3 * 32 * 1024 + 1)])?;
//! // Two steps of 64 windows of 512 tokens, then windows of 1024 in batches of 32.
//! let open = |length| Records::open_headerless([&path], DType::U16, Cut::sequence(length));
//! let (short, long) = (open(512)?, open(1024)?);
//! let trained = 2 * 64 * 512; // tokens; a multiple of the next length
//! let plan = Plan::builder(short.len()).records(0..trained / 512).batch(64).shuffle(Shuffle::Full).seed(1);
//! let first = Loader::builder(short, plan.build()?).build()?;
//! let plan = Plan::builder(long.len()).records(trained / 1024..long.len()).batch(32).shuffle(Shuffle::Full).seed(1);
//! let second = Loader::builder(long, plan.build()?).build()?;
//!
//! let (number, state) = (0, Checkpoint::start()); // read from a file to resume
//! let mut loaders = Vec::new();
//! for (i, loader) in [first, second].into_iter().enumerate().skip(number) {
//!     let state = if i == number { &state } else { &Checkpoint::start() };
//!     loaders.push((i, loader.into_epochs_from(state, 1).map_err(|refused| refused.1)?)); // reads from now on
//! }
//! let mut tokens = 0;
//! for (number, batches) in loaders {
//!     for batch in batches {
//!         let batch = batch?;
//!         tokens += batch.cast::<u16>()?.len() as u64 - batch.plan().len(); // train on it
//!         let (_number, _state) = (number, batch.checkpoint()); // what to save
//!     }
//! }
//! assert_eq!(tokens, trained + 3 * 32 * 1024);
//! # Ok::<(), BoxError>(())
//! ```

pub(crate) mod batch;
mod builder;
pub(crate) mod checkpoint;
pub(crate) mod epochs;
mod layout;
mod reader;
mod switches;

#[cfg(feature = "cuda")]
pub use self::batch::BatchMeta;
pub use self::batch::Numbers;
pub use self::builder::LoaderBuilder;
#[cfg(feature = "cuda")]
pub use self::epochs::DeviceBatch;
pub use self::epochs::Epochs;
pub use self::reader::Driven;
pub use crate::dataset::{Fields, Locator};
pub use crate::error::{At, Reading};
#[cfg(feature = "cuda")]
pub use crate::pipe::device::Cuda;
pub use crate::pipe::memory::{Backend, Host, MemoryLimit};
pub use crate::thread::MAX_WORKERS;
