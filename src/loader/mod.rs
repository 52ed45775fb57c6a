//! Loads the batches of a plan ahead of their use. An epoch is an iterator of batches.

pub(crate) mod batch;
mod builder;
pub(crate) mod checkpoint;
pub(crate) mod epochs;
mod order;
mod reader;
mod sizes;
mod switches;

#[cfg(feature = "cuda")]
pub use self::batch::BatchMeta;
pub use self::batch::{MiniBatch, Numbers};
pub use self::builder::{LoaderBuilder, MAX_WORKERS};
#[cfg(feature = "cuda")]
pub use self::epochs::DeviceBatch;
pub use self::epochs::Epochs;
pub use crate::dataset::{Fields, Locator};
pub use crate::error::{At, Reading};
pub use crate::pipe::memory::MemoryLimit;
