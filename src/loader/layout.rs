//! Where the fields of a batch lie in its slot, and what they are.

use std::any::type_name;
use std::ops::Range;

use bytemuck::AnyBitPattern;
use twinbuf_mmap::DType;

use super::memory::Taken;
use crate::transform::RecordType;

/// Where the fields of a batch lie in its slot, and whose memory the slots are.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) fields: Vec<RecordType>,
    /// What the slots take of a limit: each slot has this layout, so that the last of them gives it back.
    pub(super) taken: Option<Taken>,
    /// Whether the caller gave the memory.
    pub(super) lent: bool,
}

/// Fields begin at multiples of it.
const ALIGN: usize = 64;

impl Layout {
    pub(super) fn new(fields: Vec<RecordType>) -> Self {
        Self { fields, taken: None, lent: false }
    }

    /// Where a field of a batch of so many records lies. `None` if it does not fit the memory.
    pub(crate) fn range(&self, field: usize, records: usize) -> Option<Range<usize>> {
        let mut end = 0_usize;
        let mut range = None;
        for record in self.fields.get(..=field)? {
            let start = end.checked_next_multiple_of(ALIGN)?;
            end = records.checked_mul(record.len())?.checked_add(start)?;
            range = Some(start..end);
        }
        range
    }

    /// Bytes of a batch of so many records, with the gaps between its fields.
    pub(crate) fn len(&self, records: usize) -> Option<usize> {
        self.range(self.fields.len() - 1, records).map(|last| last.end)
    }
}

/// Whether elements of this type may be taken as values of type `T`: as themselves or arrays of them, as bytes, and
/// those of 16 bits without a type in Rust as their bits. Types that are no numbers, such as a caller's `struct`, need
/// only have the alignment of the elements and be a whole number of them.
pub(crate) fn fits<T: AnyBitPattern>(dtype: Option<DType>) -> bool {
    const NUMBERS: [&str; 12] =
        ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "u64", "i64", "f64", "f16", "bf16"];
    let Some(dtype) = dtype else { return true };
    // `[[f32; 3]; 2]` is numbers of `f32`, and `half::bfloat::bf16` is known by its last name. Where the compiler wrote
    // names in another way, sizes and alignments would still be compared.
    let name = type_name::<T>().trim_start_matches('[');
    let name = name.split(';').next().unwrap_or(name);
    let name = name.rsplit("::").next().unwrap_or(name);
    if NUMBERS.contains(&name) {
        let bits = name == "u16" && matches!(dtype, DType::F16 | DType::Bf16);
        return name == "u8" || bits || name == dtype.to_string();
    }
    let align = match dtype {
        DType::C64 | DType::C128 => dtype.size() / 2,
        _ => dtype.size(),
    };
    size_of::<T>() % dtype.size() == 0 && align_of::<T>() == align
}
