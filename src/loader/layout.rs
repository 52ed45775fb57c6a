//! The memory of a loader: its slots, and in each slot the records of each field.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use twinbuf_mmap::{LastBatch, Plan, Shuffle};

use crate::dataset::Dataset;
use crate::error::Error;
use crate::pipe::memory::{MemoryLimit, Taken, too_large};
use crate::transform::{RecordTransform, RecordType};

/// The alignment in bytes of a slot, and of a field in a slot.
pub(super) const ALIGN: usize = 64;

/// The bytes that are read and transformed at a time: few enough to be still in the CPU's second-level cache.
const PART: usize = 256 << 10;

/// What the memory of a loader is, and where the fields of a batch are in its slot. The loader and all its batches share
/// it.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(super) depths: Depths,
    /// The records of the largest batch.
    records: u64,
    pub(super) fields: Vec<Field>,
    /// The bytes of a slot.
    pub(super) slot: usize,
    /// The bytes of memory for reads past the page cache.
    pub(super) ahead: u64,
    /// What the loader takes of a memory limit.
    pub(super) taken: Option<Taken>,
    /// Whether the slots are in memory of the caller.
    pub(super) lent: bool,
    /// The loader's name, for errors.
    pub(super) name: Option<Arc<str>>,
}

/// The numbers of readers, of host slots and of device slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depths {
    /// One for each worker, and one for a caller that fills slots while it waits.
    pub(super) readers: usize,
    /// Whether a caller fills slots with overlap.
    pub(super) helps: bool,
    pub(super) host: usize,
    pub(super) device: usize,
}

/// The records of one data set.
#[derive(Debug)]
pub(super) struct Field {
    /// A record as it is read, and after each transform.
    pub(super) records: Vec<RecordType>,
    /// The number of records that are transformed at a time.
    pub(super) part: u64,
    /// For each transform, the bytes of these records before it.
    pub(super) scratch: Vec<usize>,
    /// The most bytes that the records take in a batch. Used only if their lengths vary.
    room: usize,
}

impl Field {
    fn new(
        dataset: &dyn Dataset,
        transforms: &[Box<dyn RecordTransform>],
        records: u64,
        plan: &Plan,
    ) -> Result<Self, Error> {
        let record_bytes = dataset.record_bytes();
        let mut first = match dataset.element().map(|(dtype, shape)| RecordType::new(dtype, shape)) {
            None => RecordType::bytes(record_bytes),
            Some(Ok(record)) if record.len() == record_bytes => record,
            Some(other) => {
                let wanted = format!("elements of {record_bytes} bytes a record in {}", dataset.name());
                let found = other.map(|record| format!("{record}, which is {} bytes", record.len()));
                let found = found.unwrap_or_else(|error| error.to_string());
                return Err(Error::option("dataset", wanted, found));
            }
        };
        // A batch of the first record. If `lengths` returns `Some` for it, the lengths of the data set's records vary.
        let one = Plan::builder(1).build().ok().and_then(|plan| plan.batch(0, 0));
        if one.is_some_and(|one| dataset.lengths(&one).is_some()) {
            first = first.ragged();
        }
        let part = ((PART / record_bytes.max(1)).max(1) as u64).min(records);
        let mut field = Self { records: vec![first], part, scratch: Vec::new(), room: 0 };
        for transform in transforms {
            field.scratch.push(bytes(part, field.record().len()));
            let after = match transform.output(field.record()) {
                Ok(after) if after.len() > 0 => Ok(after),
                Ok(_) => Err("wanted records of at least 1 byte, found 0 after the transform".into()),
                error => error,
            };
            field.records.push(after.map_err(|source| Error::Transform { at: None, source })?);
        }
        // After other batch sizes or ranks, records that a windowed epoch has left can come once more in its last step.
        let again = plan.last_batch() == LastBatch::Wrap && matches!(plan.shuffle(), Shuffle::Window { .. });
        let times = if again { 2 + records / plan.list().len() } else { 1 };
        let files = dataset.files().filter(|_| field.record().is_ragged() && transforms.is_empty());
        let longest = files.map(|files| files.most_bytes(records.div_ceil(times), plan.list()));
        let most = records.saturating_mul(field.record().len() as u64);
        field.room = count(longest.map_or(most, |bytes| bytes.saturating_mul(times).min(most)));
        Ok(field)
    }

    /// Returns a record in the slot.
    pub(super) fn record(&self) -> &RecordType {
        &self.records[self.records.len() - 1]
    }
}

impl Layout {
    /// Computes the layout for these data sets, each with its transforms.
    pub(super) fn new<'f>(
        plan: &Plan,
        depths: Depths,
        fields: impl Iterator<Item = (&'f dyn Dataset, &'f [Box<dyn RecordTransform>])>,
    ) -> Result<Self, Error> {
        // With fewer records than the batch size, a plan has a full batch only if it repeats records (`Wrap`).
        let records = match plan.last_batch() {
            LastBatch::Wrap => plan.batch_records(),
            LastBatch::Drop | LastBatch::Keep => plan.batch_records().min(plan.records()),
        };
        let fields = fields.map(|(dataset, transforms)| Field::new(dataset, transforms, records, plan));
        let (fields, taken, name) = (fields.collect::<Result<Vec<_>, _>>()?, None, None);
        let layout = Self { depths, records, fields, slot: 0, ahead: 0, taken, lent: false, name };
        let last = usize::try_from(records).ok().and_then(|all| layout.range(layout.fields.len() - 1, all));
        let slot = last.ok_or_else(|| too_large(&layout))?.end;
        Ok(Self { slot, ..layout })
    }

    /// Returns the range of a field in the slot of a batch of `records` records. If lengths vary, it is the largest
    /// possible range. `None` if there is no such field, or if the range overflows.
    pub(super) fn range(&self, field: usize, records: usize) -> Option<Range<usize>> {
        let mut range = 0..0_usize;
        for field in self.fields.get(..=field)? {
            let (start, record) = (range.end.checked_next_multiple_of(ALIGN)?, field.record());
            let len = if record.is_ragged() { field.room } else { records.checked_mul(record.len())? };
            range = start..start.checked_add(len)?;
        }
        Some(range)
    }

    /// Returns the bytes of the records before the transforms, for all workers, and for the caller if it fills slots
    /// too.
    fn scratch(&self) -> usize {
        let own = self.fields.iter().flat_map(|field| field.scratch.iter().copied());
        let own = own.fold(0, usize::saturating_add);
        own.saturating_mul(self.depths.readers)
    }

    /// Takes the memory from the limit.
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

/// Converts a number of records or bytes: what is in memory fits `usize`, and `usize::MAX` does not fit the memory.
pub(super) fn count(records: u64) -> usize {
    usize::try_from(records).unwrap_or(usize::MAX)
}

/// Returns the size of `records` records in bytes, or `usize::MAX` on overflow. A batch of a built loader fits a slot.
pub(super) fn bytes(records: u64, record_bytes: usize) -> usize {
    count(records).saturating_mul(record_bytes)
}

/// Prints what the memory is for.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { depths: Depths { host, device, .. }, records, fields, ahead, .. } = self;
        write!(f, "{host} host slots")?;
        if *device > 0 {
            write!(f, " and {device} device slots")?;
        }
        let bytes = fields.iter().fold(0_usize, |sum, field| sum.saturating_add(field.record().len()));
        write!(f, " of {records} records of {bytes} bytes")?;
        if fields.len() > 1 {
            write!(f, " in {} fields", fields.len())?;
        }
        if self.scratch() > 0 {
            write!(f, " and {} bytes before the transform", self.scratch())?;
        }
        match ahead {
            0 => Ok(()),
            ahead => write!(f, "; {ahead} bytes of later batches"),
        }
    }
}
