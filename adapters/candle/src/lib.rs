#![doc = include_str!("../README.md")]

use std::fmt;

use candle_core::{Device, Tensor};
use twinbuf::mmap::DType;
use twinbuf::transform::RecordType;
use twinbuf::{Batch, Error};

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
pub use cuda::device_tensor;
mod weights;
pub use weights::{linear, load, weight};

/// A batch as a tensor of shape `[records, shape..]`, where `shape` is that of one record.
///
/// The bytes are **copied once**, into memory that candle owns: a tensor cannot borrow. So the batch may be
/// dropped right after, and its slot returns to the loader. On a device other than the CPU that copy is
/// the transfer; no test here has run on one.
///
/// Type and shape are the batch's: those of the data set, or what the last transform declares
/// ([`Map::of`](twinbuf::transform::Map::of)). Bytes without a type become u8. Nothing is converted.
///
/// # Errors
///
/// [`TensorError::Batch`] if the batch has several fields: see [`field_tensor`]. [`TensorError::DType`] for numbers
/// that no tensor is made of; [`TensorError::Candle`] if candle cannot make it.
pub fn tensor(batch: &Batch, device: &Device) -> Result<Tensor, TensorError> {
    batch.cast::<u8>().map_err(TensorError::Batch)?;
    field_tensor(batch, 0, device)
}

/// Returns one field of a batch as [`tensor`] does: of `(images, labels)`, field 1 is the labels.
///
/// # Errors
///
/// [`TensorError::Batch`] if there is no such field; [`TensorError::DType`] and [`TensorError::Candle`] as for
/// [`tensor`].
pub fn field_tensor(batch: &Batch, field: usize, device: &Device) -> Result<Tensor, TensorError> {
    let of = batch.field_type(field).map_err(TensorError::Batch)?;
    let (dtype, shape) = shape_of(of, batch.plan().len())?;
    let bytes = batch.field::<u8>(field).map_err(TensorError::Batch)?;
    // Candle makes one copy of memory that is aligned for its numbers, and a field is aligned.
    Tensor::from_raw_buffer(bytes, dtype, &shape, device).map_err(TensorError::Candle)
}

/// candle's type, and the shape of that many records.
fn shape_of(of: &RecordType, records: u64) -> Result<(candle_core::DType, Vec<usize>), TensorError> {
    let dtype = of.dtype().unwrap_or(DType::U8);
    let to = candle_dtype(dtype).ok_or(TensorError::DType { found: dtype })?;
    // A batch is in memory, so its number of records fits.
    let records = usize::try_from(records).unwrap_or(usize::MAX);
    Ok((to, std::iter::once(records).chain(of.shape().iter().copied()).collect()))
}

/// candle's name of the same type. `None` for those that [`TensorError::DType`] lists.
fn candle_dtype(dtype: DType) -> Option<candle_core::DType> {
    use candle_core::DType as To;
    Some(match dtype {
        DType::U8 => To::U8,
        DType::I16 => To::I16,
        DType::F16 => To::F16,
        DType::Bf16 => To::BF16,
        DType::U32 => To::U32,
        DType::I32 => To::I32,
        DType::F32 => To::F32,
        DType::I64 => To::I64,
        DType::F64 => To::F64,
        _ => return None,
    })
}

/// Why a batch or a weight is no such tensor.
#[derive(Debug)]
#[non_exhaustive]
pub enum TensorError {
    /// No tensor is made of such numbers: bool, i8, u16, u64, floats of 8 bits or complex ones.
    DType {
        /// The type of the batch.
        found: DType,
    },
    /// candle has no tensor, or no matrix, of this type, or the bytes are not aligned, or not those of its
    /// shape.
    Weight {
        /// The tensor.
        name: String,
        /// Its type and shape, and what is wrong with its bytes.
        found: String,
    },
    /// twinbuf's error, such as a batch with several fields or not this one, a missing tensor, an unreadable file.
    Batch(Error),
    /// candle's own error.
    Candle(candle_core::Error),
    /// The batch is on another CUDA device than the tensor's, or the driver failed.
    #[cfg(feature = "cuda")]
    Device(twinbuf::cuda::Error),
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DType { found } => {
                write!(
                    f,
                    "wanted one of the types (u8, i16, u32, i32, i64, f16, bf16, f32, f64), found {found}"
                )?;
                match found {
                    DType::U16 => {
                        write!(f, ": give the loader `.transform(Convert::U16ToU32)`")
                    }
                    DType::Bool => write!(f, ": open the files as u8"),
                    _ => Ok(()),
                }
            }
            Self::Weight { name, found } => write!(f, "{name}: wanted a type that candle has, found {found}"),
            Self::Batch(error) => error.fmt(f),
            Self::Candle(source) => write!(f, "candle: {source}"),
            #[cfg(feature = "cuda")]
            Self::Device(source) => write!(f, "device: {source}"),
        }
    }
}

impl std::error::Error for TensorError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // `fmt` has printed this error already, so its cause comes next.
            Self::Batch(error) => error.source(),
            Self::Candle(source) => Some(source),
            #[cfg(feature = "cuda")]
            Self::Device(source) => Some(source),
            _ => None,
        }
    }
}
