//! Where the fields of a batch are in its slot, and as what values they may be taken.

use std::any::type_name;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::AnyBitPattern;
use twinbuf_mmap::DType;

use crate::batch::memory::Taken;
use crate::transform::RecordType;

/// Where the fields of a batch are in its slot, and who owns the slots' memory.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) fields: Vec<RecordType>,
    /// The room for the records of each field that differ in length; 0 where they do not.
    rooms: Vec<usize>,
    /// What the slots take of a limit. Each slot has this layout, so the last of them gives it back.
    pub(crate) taken: Option<Taken>,
    /// Whether the caller gave the memory.
    pub(crate) lent: bool,
    /// The loader's name, for errors.
    pub(crate) name: Option<Arc<str>>,
}

/// Fields begin at multiples of it.
const ALIGN: usize = 64;

impl Layout {
    pub(crate) fn new(fields: Vec<RecordType>, rooms: Vec<usize>) -> Self {
        Self { fields, rooms, taken: None, lent: false, name: None }
    }

    /// The place of a field of a batch of this many records: the full room, also if the records differ in length and
    /// take less. `None` if it does not fit the memory.
    pub(crate) fn range(&self, field: usize, records: usize) -> Option<Range<usize>> {
        let mut end = 0_usize;
        let mut range = None;
        for (record, &room) in self.fields.get(..=field)?.iter().zip(&self.rooms) {
            let start = end.checked_next_multiple_of(ALIGN)?;
            let len = if record.is_ragged() { room } else { records.checked_mul(record.len())? };
            end = start.checked_add(len)?;
            range = Some(start..end);
        }
        range
    }

    /// Bytes of a batch of this many records, with the gaps between its fields.
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
