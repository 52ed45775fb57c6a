//! Where the fields of a batch lie in its slot, and what they are.

use std::any::TypeId;
use std::fmt;
use std::ops::Range;

use bytemuck::AnyBitPattern;
use twinbuf_mmap::DType;

/// What a record is in one field, as it stands in a slot.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub(crate) bytes: usize,
    /// `None` for bytes of any kind.
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: Vec<usize>,
}

/// Where the fields of a batch lie in its slot.
#[derive(Debug)]
pub(crate) struct Layout(pub(crate) Vec<Field>);

/// Fields begin at multiples of it.
const ALIGN: usize = 64;

impl Layout {
    /// Where a field of a batch of so many records lies. `None` if it does not fit the memory.
    pub(crate) fn range(&self, field: usize, records: usize) -> Option<Range<usize>> {
        let mut end = 0_usize;
        let mut range = None;
        for Field { bytes, .. } in self.0.get(..=field)? {
            let start = end.checked_next_multiple_of(ALIGN)?;
            end = records.checked_mul(*bytes)?.checked_add(start)?;
            range = Some(start..end);
        }
        range
    }

    /// Bytes of a batch of so many records, with the gaps between its fields.
    pub(crate) fn len(&self, records: usize) -> Option<usize> {
        self.range(self.0.len() - 1, records).map(|last| last.end)
    }
}

/// Whether elements of this type may be taken as values of type `T`. Types that are no numbers, such as `[u8; 3]`, are
/// told by their size alone.
pub(super) fn fits<T: AnyBitPattern>(dtype: Option<DType>) -> bool {
    use DType::{Bf16, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    let numbers = [
        (TypeId::of::<u8>(), U8),
        (TypeId::of::<i8>(), I8),
        (TypeId::of::<u16>(), U16),
        (TypeId::of::<i16>(), I16),
        (TypeId::of::<u32>(), U32),
        (TypeId::of::<i32>(), I32),
        (TypeId::of::<f32>(), F32),
        (TypeId::of::<u64>(), U64),
        (TypeId::of::<i64>(), I64),
        (TypeId::of::<f64>(), F64),
    ];
    let Some(dtype) = dtype.filter(|&dtype| dtype != U8) else { return true };
    match numbers.iter().find(|(id, _)| *id == TypeId::of::<T>()) {
        // Bytes may be anything, anything may be looked at as bytes, and Rust has no numbers of its own for half precision.
        Some((_, number)) => {
            *number == dtype || *number == U8 || *number == U16 && matches!(dtype, F16 | Bf16)
        }
        None => size_of::<T>() % dtype.size() == 0,
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype {
            Some(dtype) => write!(f, "{dtype} {:?}", self.shape),
            None => write!(f, "{} bytes", self.bytes),
        }
    }
}
