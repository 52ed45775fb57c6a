#![doc = include_str!("../README.md")]

use std::fmt;

use bytemuck::{AnyBitPattern, NoUninit};
use ndarray::{ArrayViewD, ArrayViewMutD};
use twinbuf::{Batch, Error};

/// A batch as an array of shape `[records, shape..]` in C order, where `shape` is that of one record.
///
/// Nothing is copied: the view is of the batch's own bytes and borrows it. Shape and type are the batch's: those of the
/// data set, or what the last transform declares.
///
/// # Errors
///
/// [`ViewError::Batch`] for another type than the batch has, and if it has several fields; [`ViewError::Shape`] if `T` is
/// not one element, such as an array.
pub fn view<T: AnyBitPattern>(batch: &Batch) -> Result<ArrayViewD<'_, T>, ViewError> {
    array(batch, 0, batch.cast()?)
}

/// Returns one field of a batch as [`view`] does: `field_view::<i64>(&batch, 1)?`.
///
/// # Errors
///
/// The errors of [`view`]; [`ViewError::Batch`] if there is no such field.
pub fn field_view<T: AnyBitPattern>(batch: &Batch, field: usize) -> Result<ArrayViewD<'_, T>, ViewError> {
    array(batch, field, batch.field(field)?)
}

fn array<'b, T>(batch: &Batch, field: usize, numbers: &'b [T]) -> Result<ArrayViewD<'b, T>, ViewError> {
    let shape = shape::<T>(batch, field, numbers.len())?;
    ArrayViewD::from_shape(&*shape, numbers)
        .map_err(|_| ViewError::Shape { wanted: shape, found: numbers.len() })
}

/// Same as [`view`]. The elements can be changed, in place: the batch is the caller's until it is dropped.
///
/// # Errors
///
/// The errors of [`view`].
pub fn view_mut<T: AnyBitPattern + NoUninit>(batch: &mut Batch) -> Result<ArrayViewMutD<'_, T>, ViewError> {
    let found = batch.cast::<T>()?.len();
    let wanted = shape::<T>(batch, 0, found)?;
    let numbers = batch.cast_mut()?;
    ArrayViewMutD::from_shape(&*wanted, numbers).map_err(|_| ViewError::Shape { wanted, found })
}

/// The shape of a field. It must have exactly `found` elements: ndarray alone would show the front of a longer slice.
fn shape<T>(batch: &Batch, field: usize, found: usize) -> Result<Vec<usize>, ViewError> {
    let of = batch.field_type(field)?;
    let mut wanted = vec![usize::try_from(batch.plan().len()).unwrap_or(usize::MAX)];
    match of.dtype() {
        Some(_) => wanted.extend(of.shape()),
        // Bytes of any type.
        None => wanted.push(of.len() / size_of::<T>().max(1)),
    }
    match wanted.iter().try_fold(1_usize, |all, &axis| all.checked_mul(axis)) {
        Some(elements) if elements == found => Ok(wanted),
        _ => Err(ViewError::Shape { wanted, found }),
    }
}

/// Why a batch is no such array.
#[derive(Debug)]
#[non_exhaustive]
pub enum ViewError {
    /// The batch has another type, or other fields.
    Batch(Error),
    /// The numbers do not have the shape of the records.
    Shape {
        /// The shape of the batch.
        wanted: Vec<usize>,
        /// The numbers that it is as the type that was asked for.
        found: usize,
    },
}

impl From<Error> for ViewError {
    fn from(error: Error) -> Self {
        Self::Batch(error)
    }
}

impl fmt::Display for ViewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Batch(error) => error.fmt(f),
            Self::Shape { wanted, found } => {
                write!(
                    f,
                    "wanted elements in the shape {wanted:?}, found {found} values of the type of the view"
                )
            }
        }
    }
}

impl std::error::Error for ViewError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its line is this one's.
            Self::Batch(error) => error.source(),
            Self::Shape { .. } => None,
        }
    }
}
