//! Fields: several data sets in one batch, their records matched by number.

use std::sync::Arc;

use twinbuf_mmap::{RaggedRecords, Records};

use crate::dataset::Dataset;
use crate::error::Error;

/// One data set, or several data sets in parallel: record `i` of each belongs to the same sample.
///
/// Every [`Dataset`] implements this trait; so do [`Records`], [`RaggedRecords`] and `Box<dyn Dataset>`. A tuple of
/// two to four items, or a `Vec`, has one field per data set. [`build`](crate::loader::LoaderBuilder::build) returns
/// [`Error::Option`](crate::Error::Option) if the record counts differ. A checkpoint, the prefetch and the read mode
/// apply to all fields.
///
/// In a batch, each field is contiguous and starts at a multiple of 64 bytes.
/// [`Batch::fields`](crate::Batch::fields) returns the fields.
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

impl Fields for Records {
    fn into_fields(self) -> Vec<Box<dyn Dataset>> {
        vec![Box::new(Arc::new(self))]
    }
}

impl Fields for RaggedRecords {
    fn into_fields(self) -> Vec<Box<dyn Dataset>> {
        vec![Box::new(Arc::new(self))]
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
                let mut fields = Vec::new();
                $(fields.extend($name.into_fields());)+
                fields
            }
        }
    };
}
tuple_of_data_sets!(A, B);
tuple_of_data_sets!(A, B, C);
tuple_of_data_sets!(A, B, C, D);

/// Refuses fields that do not have as many records as the first.
pub(super) fn check(fields: &[Box<dyn Dataset>]) -> Result<(), Error> {
    let Some((first, others)) = fields.split_first() else {
        let (wanted, found) = ("at least one data set".to_string(), "none".to_string());
        return Err(Error::Option { option: "dataset", wanted, found });
    };
    match others.iter().find(|other| other.records() != first.records()) {
        None => Ok(()),
        Some(other) => Err(Error::Option {
            option: "dataset",
            wanted: "fields with the same number of records".to_string(),
            found: format!(
                "{} in {} and {} in {}",
                first.records(),
                first.name(),
                other.records(),
                other.name()
            ),
        }),
    }
}

/// The fingerprint of all fields together: that of the only one, or one that depends on all of them and their order.
pub(super) fn fingerprint(fields: &mut [Box<dyn Dataset>]) -> Result<u64, Error> {
    let mut all: Option<u64> = None;
    for field in fields {
        let own = field.fingerprint().map_err(Error::Fingerprint)?;
        all = Some(match all {
            None => own,
            // A step of `SplitMix64`'s output function, because the order must count.
            Some(before) => {
                let z = (before ^ field.record_bytes() as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
                let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) ^ own
            }
        });
    }
    Ok(all.unwrap_or_default())
}
