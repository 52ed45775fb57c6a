#![doc = include_str!("../README.md")]

use std::fmt;

use candle_core::{Device, Tensor};
use twinbuf::mmap::DType;
use twinbuf::{Batch, BatchPlan};

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
pub use cuda::device_tensor;

/// A batch as a tensor of shape `[records, shape..]`, where `shape` is that of one record.
///
/// The bytes are **copied once**, into memory that candle owns: a tensor cannot borrow. So the batch may be
/// dropped right after, which gives its slot back to the loader. On a device other than the CPU that copy is
/// the transfer; no test here has run on one.
///
/// `dtype` and `shape` say what the records are: `data.dtype()` and `data.shape()` of
/// [`Records`](twinbuf::Records), or what the loader's transform makes of them. Nothing is converted or
/// swapped; a wrong type of the right size cannot be told from the right one.
///
/// # Errors
///
/// [`TensorError::DType`] if candle has no such numbers; [`TensorError::Record`] unless a record of the batch
/// has exactly the bytes of such numbers in that shape; [`TensorError::Candle`] if candle has no memory for it.
pub fn tensor(batch: &Batch, dtype: DType, shape: &[usize], device: &Device) -> Result<Tensor, TensorError> {
    let place = (batch.epoch(), batch.step());
    let (to, whole) = shape_of(batch.plan(), batch.len(), place, dtype, shape)?;
    // Of memory that is aligned for its numbers, as a slot is, candle makes one copy.
    Tensor::from_raw_buffer(batch, to, &whole, device).map_err(TensorError::Candle)
}

/// candle's type and the shape of a whole batch of `bytes` bytes, which is at `(epoch, step)`.
fn shape_of(
    plan: &BatchPlan,
    bytes: usize,
    (epoch, step): (u64, u64),
    dtype: DType,
    shape: &[usize],
) -> Result<(candle_core::DType, Vec<usize>), TensorError> {
    let to = candle_dtype(dtype).ok_or(TensorError::DType { found: dtype })?;
    // A batch is in memory, so its number of records fits.
    let records = usize::try_from(plan.len()).unwrap_or(usize::MAX);
    let found = bytes / records;
    let wanted = shape.iter().try_fold(dtype.size(), |bytes, &axis| bytes.checked_mul(axis));
    let whole: Vec<usize> = std::iter::once(records).chain(shape.iter().copied()).collect();
    // An axis of 0 hides the others, which candle multiplies for its strides all the same.
    let others = whole.iter().try_fold(1_usize, |all, &axis| all.checked_mul(axis.max(1)));
    if wanted != Some(found) || others.is_none() {
        return Err(TensorError::Record { epoch, step, wanted: (dtype, shape.to_vec()), found });
    }
    Ok((to, whole))
}

/// candle's name of a type, where it has the same one.
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

/// Why a batch is no such tensor.
#[derive(Debug)]
#[non_exhaustive]
pub enum TensorError {
    /// candle has no such numbers: no bool, i8, u16, u64 or complex ones.
    DType {
        /// The type that was asked for.
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
    /// candle's own error.
    Candle(candle_core::Error),
    /// The tensor's device is not the CUDA device that the batch is on, or the driver failed.
    #[cfg(feature = "cuda")]
    Device(twinbuf::cuda::Error),
}

impl fmt::Display for TensorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DType { found } => {
                write!(
                    f,
                    "wanted a type that candle has (u8, i16, u32, i32, i64, f16, bf16, f32, f64), found {found}"
                )?;
                match found {
                    DType::U16 => {
                        write!(f, ": give the loader `.transform(Convert::U16ToU32)` and ask for u32")
                    }
                    DType::Bool => write!(f, ": ask for u8"),
                    _ => Ok(()),
                }
            }
            Self::Record { epoch, step, wanted: (dtype, shape), found } => write!(
                f,
                "epoch {epoch}, step {step}: wanted records of {dtype} in the shape {shape:?}, found {found} \
                 bytes a record"
            ),
            Self::Candle(source) => write!(f, "candle: {source}"),
            #[cfg(feature = "cuda")]
            Self::Device(source) => write!(f, "device: {source}"),
        }
    }
}

impl std::error::Error for TensorError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Candle(source) => Some(source),
            #[cfg(feature = "cuda")]
            Self::Device(source) => Some(source),
            _ => None,
        }
    }
}
