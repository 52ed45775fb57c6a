//! What becomes of records on their way from the file into the slot.

use bytemuck::{AnyBitPattern, NoUninit};
use twinbuf_mmap::transform::{self, Transform};

use crate::error::BoxError;

/// Turns records into records of another size, while their bytes are still in the CPU's cache.
///
/// [`Transform`] is one (numbers to normalised f32, planes), so are the [`Numbers`], and [`per_record`] makes one
/// of a function.
pub trait RecordTransform: Send {
    /// The size in bytes of what a record of `record_bytes` becomes, at least 1.
    ///
    /// # Errors
    ///
    /// If such records cannot be transformed: the loader is not built
    /// ([`Error::Transform`](crate::Error::Transform)).
    fn out_bytes(&self, record_bytes: usize) -> Result<usize, BoxError>;

    /// Transforms `records`, one or more whole ones, to all of `out`.
    ///
    /// `out` begins at a multiple of 64 bytes plus a multiple of the size of a transformed record.
    ///
    /// # Errors
    ///
    /// Whatever is wrong with the records: it reaches the caller as
    /// [`Error::Transform`](crate::Error::Transform), in order, and ends the epoch. So does a panic.
    fn apply(&mut self, records: &[u8], out: &mut [u8]) -> Result<(), BoxError>;
}

impl RecordTransform for Transform {
    fn out_bytes(&self, record_bytes: usize) -> Result<usize, BoxError> {
        let bytes = self.out_len(record_bytes)?.checked_mul(size_of::<f32>());
        bytes.ok_or_else(|| "the record would not fit the memory".into())
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8]) -> Result<(), BoxError> {
        Transform::apply(self, records, numbers_mut(out)?)?;
        Ok(())
    }
}

/// Numbers of one type to numbers of another, each by itself; see [`twinbuf_mmap::transform`] for the rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Numbers {
    /// Tokens as candle's embeddings take them.
    U16ToU32,
    /// Tokens as `PyTorch`'s embeddings take them.
    U16ToI64,
    /// To binary16, to nearest even.
    F32ToF16,
    /// To bfloat16, to nearest even.
    F32ToBf16,
}

impl Numbers {
    /// Bytes of a number before and after.
    const fn sizes(self) -> (usize, usize) {
        match self {
            Self::U16ToU32 => (2, 4),
            Self::U16ToI64 => (2, 8),
            Self::F32ToF16 | Self::F32ToBf16 => (4, 2),
        }
    }
}

impl RecordTransform for Numbers {
    fn out_bytes(&self, record_bytes: usize) -> Result<usize, BoxError> {
        let (wanted, after) = self.sizes();
        if record_bytes % wanted != 0 {
            let found = record_bytes;
            return Err(transform::TransformError::SourceLength { wanted, found }.into());
        }
        (record_bytes / wanted).checked_mul(after).ok_or_else(|| "the record would not fit the memory".into())
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8]) -> Result<(), BoxError> {
        match self {
            Self::U16ToU32 => transform::u16_to_u32(records, numbers_mut(out)?),
            Self::U16ToI64 => transform::u16_to_i64(records, numbers_mut(out)?),
            Self::F32ToF16 => transform::f32_to_f16(records, numbers_mut(out)?),
            Self::F32ToBf16 => transform::f32_to_bf16(records, numbers_mut(out)?),
        }?;
        Ok(())
    }
}

/// Aligned, because slots are and records are whole numbers long.
fn numbers_mut<T: NoUninit + AnyBitPattern>(out: &mut [u8]) -> Result<&mut [T], BoxError> {
    bytemuck::try_cast_slice_mut(out)
        .map_err(|error| format!("the slot cannot hold such numbers: {error}").into())
}

/// A transform that calls `apply` with each record and the `out_bytes` bytes that it becomes.
///
/// ```
/// use twinbuf::{RecordTransform, per_record};
///
/// // The first byte of each record is a label nobody wants.
/// let mut images = per_record(4, |record, image| {
///     image.copy_from_slice(&record[1..]);
///     Ok(())
/// });
/// let mut out = [0; 8];
/// images.apply(b"xabcdyefgh".as_slice(), &mut out)?;
/// assert_eq!(&out, b"abcdefgh");
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
pub fn per_record<F>(out_bytes: usize, apply: F) -> PerRecord<F>
where
    F: FnMut(&[u8], &mut [u8]) -> Result<(), BoxError> + Send,
{
    PerRecord { out_bytes, apply }
}

/// Made by [`per_record`].
#[must_use = "a transform does nothing until a loader has it"]
pub struct PerRecord<F> {
    out_bytes: usize,
    apply: F,
}

impl<F> RecordTransform for PerRecord<F>
where
    F: FnMut(&[u8], &mut [u8]) -> Result<(), BoxError> + Send,
{
    fn out_bytes(&self, _: usize) -> Result<usize, BoxError> {
        Ok(self.out_bytes)
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8]) -> Result<(), BoxError> {
        let wanted = self.out_bytes;
        let whole = |count| !records.is_empty() && records.len() % count == 0;
        let count = match out.len().checked_div(wanted) {
            Some(count @ 1..) if out.len() % wanted == 0 && whole(count) => count,
            _ => {
                let (found, records) = (out.len(), records.len());
                return Err(format!(
                    "wanted whole records of {wanted} bytes in place of {records} bytes, found room for {found} bytes"
                )
                .into());
            }
        };
        let record_bytes = records.len() / count;
        records
            .chunks_exact(record_bytes)
            .zip(out.chunks_exact_mut(self.out_bytes))
            .try_for_each(|(record, out)| (self.apply)(record, out))
    }
}

impl<F> std::fmt::Debug for PerRecord<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PerRecord").field("out_bytes", &self.out_bytes).finish_non_exhaustive()
    }
}
