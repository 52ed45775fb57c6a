//! The memory that a loader needs, and where the fields of a batch are in a slot.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use twinbuf_mmap::{LastBatch, Plan};

use crate::dataset::Dataset;
use crate::error::{BoxError, Error};
use crate::pipe::memory::{MemoryLimit, Taken, too_large};
use crate::transform::{RecordTransform, RecordType};

/// Bytes that are read and transformed at a time: few enough to be still in the CPU's second-level cache.
const PART: usize = 256 << 10;

/// The memory that a loader needs.
pub(super) struct Sizes {
    pub(super) depths: Depths,
    records: u64,
    /// Bytes of a record in a slot, in all fields.
    out_bytes: usize,
    /// Bytes of a slot.
    pub(super) slot: usize,
    /// For each field.
    pub(super) parts: Vec<Part>,
    /// Bytes of memory for reads past the page cache.
    pub(super) ahead: u64,
}

/// How the transforms of a field take its records.
pub(super) struct Part {
    /// Records that are transformed at a time.
    pub(super) records: u64,
    /// One for each transform.
    pub(super) stages: Vec<Stage>,
    /// Whether the data set's records differ in length.
    pub(super) ragged: bool,
}

/// What a transform is applied to.
#[derive(Clone, Copy)]
pub(crate) struct Stage {
    /// Bytes of a record before it and after it; of the longest, if they differ.
    pub(crate) bytes: [usize; 2],
    /// Whether records differ in length there.
    pub(crate) ragged: [bool; 2],
    /// Bytes of all records that are transformed at a time, before it.
    pub(crate) scratch: usize,
}

/// How many workers and slots there are, and whether the caller has room for transforms too.
#[derive(Clone, Copy)]
pub(super) struct Depths {
    pub(super) workers: usize,
    pub(super) helpers: usize,
    pub(super) host: usize,
    pub(super) device: usize,
}

impl Sizes {
    /// Of these data sets, each with its transforms, and their places in a slot.
    pub(super) fn new<'f>(
        plan: &Plan,
        depths: Depths,
        fields: impl Iterator<Item = (&'f dyn Dataset, &'f [Box<dyn RecordTransform>])>,
    ) -> Result<(Self, Layout), Error> {
        // With fewer records than the batch size, a plan has a full batch only if it repeats records (`Wrap`).
        let records = match plan.last_batch() {
            LastBatch::Wrap => plan.batch_records(),
            LastBatch::Drop | LastBatch::Keep => plan.batch_records().min(plan.records()),
        };
        let (mut parts, mut layout, mut rooms) = (Vec::new(), Vec::new(), Vec::new());
        // The first record, as a sample.
        let first = Plan::builder(1).build().ok().and_then(|plan| plan.batch(0, 0));
        for (dataset, transforms) in fields {
            let bytes = dataset.record_bytes();
            let mut record = match dataset.element() {
                Some((dtype, shape)) => typed(dataset, RecordType::new(dtype, shape))?,
                None => RecordType::bytes(bytes),
            };
            let ragged = first.as_ref().is_some_and(|first| dataset.lengths(first).is_some());
            if ragged {
                record = record.ragged();
            }
            let part = ((PART / bytes.max(1)).max(1) as u64).min(records);
            let part_records = usize::try_from(part).unwrap_or(usize::MAX);
            let mut stages = Vec::with_capacity(transforms.len());
            for transform in transforms {
                let after = transform.output(&record).map_err(failed)?;
                let before = std::mem::replace(&mut record, after);
                stages.push(Stage {
                    bytes: [before.len(), record.len()],
                    ragged: [before.is_ragged(), record.is_ragged()],
                    // Scratch memory for the records that are transformed at a time.
                    scratch: part_records.saturating_mul(before.len()),
                });
                if record.len() == 0 {
                    let error = "wanted records of at least 1 byte, found 0 after the transform";
                    return Err(failed(error.into()));
                }
            }
            let all = || usize::try_from(records).ok()?.checked_mul(record.len());
            let room = match dataset.files().filter(|_| ragged && stages.is_empty()) {
                Some(files) => usize::try_from(files.most_bytes(records)).ok(),
                None => all(),
            };
            rooms.push(room.unwrap_or(usize::MAX));
            parts.push(Part { records: part, stages, ragged });
            layout.push(record);
        }
        let layout = Layout::new(layout, rooms);
        let out_bytes = layout.fields.iter().fold(0_usize, |sum, field| sum.saturating_add(field.len()));
        let sizes = Self { depths, records, out_bytes, slot: 0, parts, ahead: 0 };
        match usize::try_from(records).ok().and_then(|records| layout.len(records)) {
            Some(slot) => Ok((Self { slot, ..sizes }, layout)),
            None => Err(too_large(&sizes)),
        }
    }

    /// Bytes before the transforms, of all workers, and of the caller if it helps.
    fn scratch(&self) -> usize {
        let stages = self.parts.iter().flat_map(|part| &part.stages);
        let own = stages.fold(0, |sum: usize, stage| sum.saturating_add(stage.scratch));
        own.saturating_mul(self.depths.workers + self.depths.helpers)
    }

    /// Takes the sum from the limit.
    pub(super) fn take(&self, limit: MemoryLimit) -> Result<Taken, Error> {
        let Depths { host, device, .. } = self.depths;
        let wanted = (self.slot as u64)
            .checked_mul((host as u64).saturating_add(device as u64))
            .and_then(|slots| slots.checked_add(self.scratch() as u64))
            .and_then(|all| all.checked_add(self.ahead))
            .ok_or_else(|| too_large(self))?;
        limit.take(wanted, self)
    }
}

fn failed(source: BoxError) -> Error {
    Error::Transform { at: None, source }
}

/// Refuses a data set whose element type does not give records of its size.
fn typed(dataset: &dyn Dataset, record: Result<RecordType, BoxError>) -> Result<RecordType, Error> {
    let found = match record {
        Ok(record) if record.len() == dataset.record_bytes() => return Ok(record),
        Ok(record) => format!("{record}, which is {} bytes", record.len()),
        Err(error) => error.to_string(),
    };
    let wanted = format!("elements of {} bytes a record in {}", dataset.record_bytes(), dataset.name());
    Err(Error::Option { option: "dataset", wanted, found })
}

/// The sum, spelled out.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { depths: Depths { host, device, .. }, records, out_bytes, .. } = self;
        write!(f, "{host} host slots")?;
        if *device > 0 {
            write!(f, " and {device} device slots")?;
        }
        write!(f, " of {records} records of {out_bytes} bytes")?;
        if self.parts.len() > 1 {
            write!(f, " in {} fields", self.parts.len())?;
        }
        match self.scratch() {
            0 => {}
            scratch => write!(f, " and {scratch} bytes before the transform")?,
        }
        match self.ahead {
            0 => Ok(()),
            ahead => write!(f, "; {ahead} bytes of later batches"),
        }
    }
}

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
