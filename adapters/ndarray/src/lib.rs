#![doc = include_str!("../README.md")]

use std::fmt;

use bytemuck::{AnyBitPattern, NoUninit};
use ndarray::{ArrayViewD, ArrayViewMutD};
use twinbuf::Batch;
use twinbuf::mmap::DType;

/// A number that records are made of. To be implemented for others too, f16 for example.
pub trait Number: AnyBitPattern + NoUninit {
    /// Its type in a file.
    const DTYPE: DType;
}

macro_rules! numbers {
    ($($number:ty: $dtype:ident),*) => {$(
        impl Number for $number {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

numbers!(u8: U8, i8: I8, u16: U16, i16: I16, u32: U32, i32: I32, u64: U64, i64: I64, f32: F32, f64: F64);

/// A batch as an array of shape `[records, shape..]` in C order, where `shape` is that of one record.
///
/// Nothing is copied: the view is of the batch's own bytes and borrows it.
///
/// `dtype` and `shape` say what the records are: `data.dtype()` and `data.shape()` of
/// [`Records`](twinbuf::Records), or what the loader's transform makes of them.
///
/// # Errors
///
/// [`ViewError::DType`] unless `T` is the number that `dtype` is; [`ViewError::Record`] unless a record of the
/// batch has exactly the bytes of such numbers in that shape.
pub fn view<'b, T: Number>(
    batch: &'b Batch,
    dtype: DType,
    shape: &[usize],
) -> Result<ArrayViewD<'b, T>, ViewError> {
    let whole = whole::<T>(batch, dtype, shape)?;
    let numbers = batch.cast().unwrap_or_else(|error| unreachable!("records are whole: {error}"));
    Ok(ArrayViewD::from_shape(whole, numbers).unwrap_or_else(|error| unreachable!("of that size: {error}")))
}

/// As [`view`], and what it shows can be changed, in place: the batch is the caller's until it is dropped.
///
/// # Errors
///
/// Those of [`view`].
pub fn view_mut<'b, T: Number>(
    batch: &'b mut Batch,
    dtype: DType,
    shape: &[usize],
) -> Result<ArrayViewMutD<'b, T>, ViewError> {
    let whole = whole::<T>(batch, dtype, shape)?;
    let numbers = batch.cast_mut().unwrap_or_else(|error| unreachable!("records are whole: {error}"));
    Ok(ArrayViewMutD::from_shape(whole, numbers)
        .unwrap_or_else(|error| unreachable!("of that size: {error}")))
}

/// The shape of the whole batch, which has exactly as many numbers.
fn whole<T: Number>(batch: &Batch, dtype: DType, shape: &[usize]) -> Result<Vec<usize>, ViewError> {
    if T::DTYPE != dtype {
        return Err(ViewError::DType { wanted: T::DTYPE, found: dtype });
    }
    // A batch is in memory, so its number of records fits.
    let records = usize::try_from(batch.plan().len()).unwrap_or(usize::MAX);
    let found = batch.len() / records;
    // ndarray alone would show the front of a longer slice.
    let fits = shape.iter().try_fold(size_of::<T>(), |bytes, &axis| bytes.checked_mul(axis)) == Some(found);
    let whole: Vec<usize> = std::iter::once(records).chain(shape.iter().copied()).collect();
    // An axis of 0 hides the others, whose product ndarray wants to be an `isize` all the same.
    let others = whole.iter().try_fold(1_isize, |all, &axis| all.checked_mul(axis.max(1).try_into().ok()?));
    if !fits || others.is_none() {
        let (epoch, step) = (batch.epoch(), batch.step());
        return Err(ViewError::Record { epoch, step, wanted: (dtype, shape.to_vec()), found });
    }
    Ok(whole)
}

/// Why a batch is no such array.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ViewError {
    /// The records are of other numbers.
    DType {
        /// The numbers of the view that was asked for.
        wanted: DType,
        /// The numbers of the records.
        found: DType,
    },
    /// A record of the batch is larger or smaller than such numbers in that shape.
    Record {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
        /// The type and the shape that were asked for.
        wanted: (DType, Vec<usize>),
        /// Bytes of a record.
        found: usize,
    },
}

impl fmt::Display for ViewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DType { wanted, found } => write!(f, "wanted a view of {wanted}, found records of {found}"),
            Self::Record { epoch, step, wanted: (dtype, shape), found } => write!(
                f,
                "epoch {epoch}, step {step}: wanted records of {dtype} in the shape {shape:?}, found {found} \
                 bytes a record"
            ),
        }
    }
}

impl std::error::Error for ViewError {}
