//! Data sets: where the records of a loader come from. Several data sets together fill one batch, one field each.

use std::path::PathBuf;
use std::sync::Arc;

use twinbuf_mmap::{BatchIndices, DType, RaggedRecords, Ranges, Records};

use crate::error::{BoxError, Error};

/// A source of records. A [`Loader`](crate::Loader) reads batches from it.
///
/// [`Records`] and [`RaggedRecords`] in an [`Arc`] implement this trait. Implement it for any other type that can
/// fill a buffer with records. For batches with several fields, combine several data sets
/// ([`Fields`](crate::loader::Fields)).
///
/// If a method panics while a batch is loaded, the epoch ends with [`Error::Panicked`](crate::Error::Panicked). If a
/// method panics while the loader is built, for example `records`, [`build`](crate::loader::LoaderBuilder::build)
/// panics. A panic of its drop is an error of [`close`](crate::Loader::close). If the drops of two data sets or
/// transforms of one worker panic, the process aborts.
///
/// In a [driven](crate::loader::LoaderBuilder::driven) loader, a panic of a load also reaches the driver. A panic of its
/// drop reaches whoever drops the worker.
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
    /// Returns the number of records. It must not change. All data sets of one loader need the same number, and the plan
    /// must not go beyond it.
    fn records(&self) -> u64;

    /// Returns the size of a record in bytes. If records vary in length ([`lengths`](Self::lengths)), returns the
    /// size of the longest record.
    fn record_bytes(&self) -> usize;

    /// Returns the element type of a record and its shape: the number of elements along each axis. If records vary in
    /// length, the shape is that of the longest. [`build`](crate::loader::LoaderBuilder::build) returns
    /// [`Error::Option`](crate::Error::Option) if they do not make [`record_bytes`](Self::record_bytes) bytes.
    /// [`Batch::fields`](crate::Batch::fields) checks types against it. Default: `None`, untyped bytes that can be
    /// read as any type.
    fn element(&self) -> Option<(DType, Vec<usize>)> {
        None
    }

    /// Returns the length in bytes of each record of `batch`, in batch order, if records vary in length. Return
    /// `Some` for every batch, or `None` for every batch. Default: `None`, all records have
    /// [`record_bytes`](Self::record_bytes) bytes.
    fn lengths(&self, _batch: &BatchIndices) -> Option<Vec<usize>> {
        None
    }

    /// Returns the name of the data set in error messages. Default: the name of the Rust type.
    fn name(&self) -> String {
        std::any::type_name::<Self>().to_string()
    }

    /// Reads the records of `batch`, in batch order, into `out`. Returns the number of bytes read. The length of
    /// `out` is exactly the total size of these records. If the returned number differs from it, the epoch ends with
    /// [`Error::Length`](crate::Error::Length).
    ///
    /// With a [`transform`](crate::loader::LoaderBuilder::transform), the loader may request one batch in several
    /// parts.
    ///
    /// # Errors
    ///
    /// Any error. The caller receives it as [`Error::Load`](crate::Error::Load), and the epoch ends.
    ///
    /// In a [driven](crate::loader::LoaderBuilder::driven) loader, an [`io::Error`](std::io::Error) of the kind
    /// [`WouldBlock`](std::io::ErrorKind::WouldBlock) puts the read off: the driver's next call calls it again, with
    /// the same batch and the same memory, unless [`leak_slot`](crate::loader::Driven::leak_slot) began the fill anew.
    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError>;

    /// Returns the files of the records, if the records are unchanged byte ranges of files. The loader then reads
    /// the files itself, and does not call [`read`](Self::read). Default: `None`.
    fn files(&self) -> Option<Arc<Ranges>> {
        None
    }

    /// Clones the data set for another [worker](crate::loader::LoaderBuilder::workers), or for a caller that reads
    /// while it waits. [`build`](crate::loader::LoaderBuilder::build) and
    /// [`wanted_slots`](crate::loader::LoaderBuilder::wanted_slots) call it.
    ///
    /// The clones read at the same time, each a different batch. For a type that is [`Clone`], return
    /// `Some(Box::new(self.clone()))`. Default: `None`; the loader can then have only one worker.
    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        None
    }

    /// Returns a function that finds the file and the byte offset of a record. The loader calls this method once,
    /// when it is built, and calls the function to show a read in progress ([`Reading`](crate::loader::Reading)).
    /// Default: finds the record in [`files`](Self::files); `None` if there are none.
    fn locator(&self) -> Option<Locator> {
        let records = self.files()?;
        Some(Box::new(move |record| {
            let found = records.locate(record)?;
            Some((records.shards()[found.shard].path().to_owned(), found.offset))
        }))
    }

    /// Returns a number that identifies the content of the data set. A [`Checkpoint`](crate::Checkpoint) of one data
    /// set cannot resume with a data set that has another fingerprint. The loader calls this method once, when it is
    /// built. Default: 0; a checkpoint then compares only the plan and the size of the records.
    ///
    /// # Errors
    ///
    /// Any error. The caller receives it as [`Error::Fingerprint`](crate::Error::Fingerprint).
    fn fingerprint(&mut self) -> Result<u64, BoxError> {
        Ok(0)
    }
}

/// Finds a record by its index: returns the file and the offset of the record's first byte in this file. The
/// function must not block.
pub type Locator = Box<dyn Fn(u64) -> Option<(PathBuf, u64)> + Send + Sync>;

/// Implements `Dataset` for files in an `Arc`, and `Fields` for the files alone. `$shape` returns the shape of a
/// record, and `$lengths` the lengths of the records of a batch.
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

            fn fingerprint(&mut self) -> Result<u64, BoxError> {
                Ok(Ranges::fingerprint(self)?)
            }
        }

        impl Fields for $records {
            fn into_fields(self) -> Vec<Box<dyn Dataset>> {
                vec![Box::new(Arc::new(self))]
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

/// One data set, or several data sets in parallel: record `i` of each belongs to the same sample.
///
/// Every [`Dataset`] implements this trait; so do [`Records`], [`RaggedRecords`] and `Box<dyn Dataset>`. A tuple of
/// two to four items, or a `Vec`, has one field per data set. [`build`](crate::loader::LoaderBuilder::build) returns
/// [`Error::Option`](crate::Error::Option) if the record counts differ, or if a `Vec` is empty. A checkpoint applies to
/// all fields; prefetch and read mode apply to all fields that are files.
///
/// In a batch, each field is contiguous and starts at a multiple of 64 bytes.
/// [`Batch::fields`](crate::Batch::fields) returns two to four fields, [`Batch::field`](crate::Batch::field) one of any
/// number.
///
/// ```
/// use twinbuf::mmap::Cut;
/// use twinbuf::{Loader, Plan, Records};
///
/// # let dir = tempfile::tempdir()?;
/// # let paths = [dir.path().join("images.bin"), dir.path().join("labels.bin")];
/// # std::fs::write(&paths[0], vec![7; 100 * 48])?;
/// # std::fs::write(&paths[1], (0..100).flat_map(i64::to_le_bytes).collect::<Vec<u8>>())?;
/// # let (images, labels) = (&paths[0], &paths[1]);
/// let images = Records::open([images], 48)?; // bytes, 48 a record
/// let labels = Records::open_headerless([labels], twinbuf::mmap::DType::I64, Cut::Rows)?;
/// let plan = Plan::builder(images.len()).batch(10).build()?;
/// let mut loader = Loader::builder((images, labels), plan).build()?;
/// for batch in loader.epoch(0) {
///     let batch = batch?;
///     let (pixels, labels) = batch.fields::<(u8, i64)>()?;
///     assert_eq!((pixels.len(), labels.len()), (480, 10));
/// }
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
pub trait Fields {
    /// Returns the data sets in the order of the fields.
    fn into_fields(self) -> Vec<Box<dyn Dataset>>;
}

impl<D: Dataset + 'static> Fields for D {
    fn into_fields(self) -> Vec<Box<dyn Dataset>> {
        vec![Box::new(self)]
    }
}

impl Fields for Box<dyn Dataset> {
    fn into_fields(self) -> Vec<Box<dyn Dataset>> {
        vec![self]
    }
}

impl<F: Fields> Fields for Vec<F> {
    fn into_fields(self) -> Vec<Box<dyn Dataset>> {
        self.into_iter().flat_map(Fields::into_fields).collect()
    }
}

macro_rules! tuple_of_data_sets {
    ($($name:ident),+) => {
        impl<$($name: Fields),+> Fields for ($($name,)+) {
            fn into_fields(self) -> Vec<Box<dyn Dataset>> {
                #[allow(non_snake_case)]
                let ($($name,)+) = self;
                [$($name.into_fields()),+].into_iter().flatten().collect()
            }
        }
    };
}
tuple_of_data_sets!(A, B);
tuple_of_data_sets!(A, B, C);
tuple_of_data_sets!(A, B, C, D);

/// Returns an error if there is no field, or if a field has another number of records than the first.
pub(crate) fn check_fields(fields: &[Box<dyn Dataset>]) -> Result<(), Error> {
    let Some((first, others)) = fields.split_first() else {
        return Err(Error::option("dataset", "at least one data set", "none"));
    };
    let Some(other) = others.iter().find(|other| other.records() != first.records()) else { return Ok(()) };
    let found = [first, other].map(|field| format!("{} in {}", field.records(), field.name()));
    Err(Error::option("dataset", "fields with the same number of records", found.join(" and ")))
}

/// Returns the fingerprint of all fields. For a single field, it is the field's own. For several, it depends on each of
/// them and on their order.
pub(crate) fn fingerprint_fields(fields: &mut [Box<dyn Dataset>]) -> Result<u64, Error> {
    let mut all: Option<u64> = None;
    for field in fields {
        let own = field.fingerprint().map_err(Error::Fingerprint)?;
        all = Some(match all {
            None => own,
            // `SplitMix64`'s output function without its last shift: unlike a sum, it depends on the order of the
            // fields.
            Some(before) => {
                let z = (before ^ field.record_bytes() as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
                let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) ^ own
            }
        });
    }
    Ok(all.unwrap_or_default())
}
