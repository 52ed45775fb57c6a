//! Where batches come from: what a loader asks of a data set.

use std::path::PathBuf;
use std::sync::Arc;

use twinbuf_mmap::{BatchIndices, DType, RaggedRecords, Ranges, Records};

use crate::error::BoxError;

/// A source of records that a [`Loader`](crate::Loader) reads batches from.
///
/// [`Records`] and [`RaggedRecords`] in an [`Arc`] are; anything else that can fill a buffer can be one. Several of them make batches with
/// several fields: [`Fields`](crate::loader::Fields).
///
/// A method that panics ends the epoch with [`Error::Panicked`](crate::Error::Panicked); one that is called to build
/// the loader (`records`, `record_bytes`, `fingerprint`) panics there.
///
/// # Examples
///
/// ```
/// use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan};
///
/// /// Record `i` is the number `i`.
/// struct Numbers;
///
/// impl Dataset for Numbers {
///     fn records(&self) -> u64 {
///         1000
///     }
///     fn record_bytes(&self) -> usize {
///         8
///     }
///     fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
///         for (record, out) in batch.runs().flatten().zip(out.chunks_exact_mut(8)) {
///             out.copy_from_slice(&record.to_le_bytes());
///         }
///         Ok(out.len())
///     }
/// }
///
/// let plan = Plan::builder(1000).batch(100).build()?;
/// let mut loader = Loader::builder(Numbers, plan).build()?;
/// assert_eq!(loader.epoch(0).count(), 10);
/// # Ok::<(), BoxError>(())
/// ```
pub trait Dataset: Send {
    /// How many records there are.
    fn records(&self) -> u64;

    /// The size of a record in bytes; that of the longest, if they differ ([`lengths`](Self::lengths)).
    fn record_bytes(&self) -> usize;

    /// The type of a record's elements and their number along each axis, for
    /// [`Batch::fields`](crate::Batch::fields). Default: `None`, bytes that may be taken as anything.
    fn element(&self) -> Option<(DType, Vec<usize>)> {
        None
    }

    /// The bytes of each record of `batch`, in its order, if records differ in length. Default: `None`, all have
    /// [`record_bytes`](Self::record_bytes). The answer is `Some` for every batch or for none.
    fn lengths(&self, _batch: &BatchIndices) -> Option<Vec<usize>> {
        None
    }

    /// What errors call it. Default: the name of its type.
    fn name(&self) -> String {
        std::any::type_name::<Self>().to_string()
    }

    /// Reads the records of `batch`, in its order, into `out`. The length of `out` is exactly their total. Returns how
    /// many bytes it read.
    ///
    /// With a [`transform`](crate::loader::LoaderBuilder::transform), and for large batches on their way to a device, it
    /// is asked for a batch part by part.
    ///
    /// # Errors
    ///
    /// Whatever the data set finds: it reaches the caller as [`Error::Load`](crate::Error::Load).
    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError>;

    /// The files that it reads, if its records are theirs, unchanged. The loader then reads them itself, ahead of use, and
    /// does not call [`read`](Self::read). Default: `None`.
    fn files(&self) -> Option<Arc<Ranges>> {
        None
    }

    /// Clones the data set for another thread of [`workers`](crate::loader::LoaderBuilder::workers). Called when the
    /// loader is built.
    ///
    /// The two read at the same time, and each reads its part of the batches. Returns `None` unless implemented: then
    /// there can be only one worker. A data set that is [`Clone`] returns `Some(Box::new(self.clone()))`.
    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        None
    }

    /// Returns a function that finds the file of a record and its offset there, for callers that wait for a read that
    /// does not return. Asked once, when the loader is built; `None` unless implemented.
    fn locator(&self) -> Option<Locator> {
        None
    }

    /// A number that no other data set has: a [`Checkpoint`](crate::Checkpoint) saved with one data set is not restored
    /// with another. Asked once, when the loader is built. Unless implemented it is 0: then only the number and the
    /// size of the records are compared.
    ///
    /// # Errors
    ///
    /// Whatever keeps the data set from telling: [`Error::Fingerprint`](crate::Error::Fingerprint).
    fn fingerprint(&mut self) -> Result<u64, BoxError> {
        Ok(0)
    }
}

/// Finds a record by its number: its file, and the offset of its first byte there. It must not wait.
pub type Locator = Box<dyn Fn(u64) -> Option<(PathBuf, u64)> + Send + Sync>;

/// Files as a data set: `$element` is the type and the shape of a record, and `$lengths` those of a batch.
macro_rules! files {
    ($($records:ident, $shape:expr, $lengths:expr;)+) => {$(
        impl Dataset for Arc<$records> {
            fn records(&self) -> u64 {
                self.len()
            }

            fn record_bytes(&self) -> usize {
                self.max_len()
            }

            fn element(&self) -> Option<(DType, Vec<usize>)> {
                self.is_typed().then(|| (self.dtype(), $shape(self)))
            }

            fn lengths(&self, batch: &BatchIndices) -> Option<Vec<usize>> {
                $lengths(self, batch)
            }

            fn name(&self) -> String {
                let (first, others) = (self.shards()[0].path().display(), self.shards().len() - 1);
                if others == 0 { first.to_string() } else { format!("{first} and {others} more") }
            }

            fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
                Ok(Ranges::read(self, batch, out)?)
            }

            fn files(&self) -> Option<Arc<Ranges>> {
                Some(self.ranges())
            }

            fn try_clone(&self) -> Option<Box<dyn Dataset>> {
                Some(Box::new(self.clone()))
            }

            fn locator(&self) -> Option<Locator> {
                let records = self.ranges();
                Some(Box::new(move |record| {
                    let found = records.locate(record)?;
                    Some((records.shards()[found.shard].path().to_owned(), found.offset))
                }))
            }

            fn fingerprint(&mut self) -> Result<u64, BoxError> {
                Ok(Ranges::fingerprint(self)?)
            }
        }
    )+};
}
files! {
    Records, |records: &Self| records.shape().to_vec(), |_: &Self, _: &BatchIndices| None;
    RaggedRecords,
    |records: &Self| vec![records.max_len() / records.dtype().size()],
    |records: &Self, batch: &BatchIndices| Some(Ranges::lengths(records, batch).collect());
}
