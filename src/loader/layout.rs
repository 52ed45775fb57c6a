//! Where the fields of a batch are in its slot.

use std::ops::Range;
use std::sync::Arc;

use crate::pipe::memory::Taken;
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

/// Slots begin at multiples of it, and so do fields in a slot.
pub(super) const ALIGN: usize = 64;

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
