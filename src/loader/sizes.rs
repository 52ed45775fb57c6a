//! The memory that a loader needs.

use std::fmt;
use std::sync::Arc;

use twinbuf_mmap::{LastBatch, Plan};

use super::batch::Layout;
use crate::dataset::Dataset;
use crate::error::{BoxError, Error};
use crate::pipe::memory::{MemoryLimit, Taken, too_large};
use crate::transform::{RecordTransform, RecordType};

/// The bytes that are read and transformed at a time: few enough to be still in the CPU's second-level cache.
const PART: usize = 256 << 10;

/// The memory that a loader needs.
pub(super) struct Sizes {
    pub(super) depths: Depths,
    records: u64,
    /// The bytes of a record in a slot, all fields together.
    out_bytes: usize,
    /// The bytes of a slot.
    pub(super) slot: usize,
    /// One for each field.
    pub(super) shapes: Vec<Arc<Shape>>,
    /// The bytes of memory for reads past the page cache.
    pub(super) ahead: u64,
}

/// The records of a field.
pub(crate) struct Shape {
    /// The number of records that are transformed at a time.
    pub(crate) part: u64,
    /// A record of the data set, and after each transform.
    pub(crate) records: Vec<RecordType>,
}

impl Shape {
    /// Returns, for each transform, the bytes of the records that are transformed at a time, before it.
    pub(super) fn scratch(&self) -> impl Iterator<Item = usize> {
        let (before, part) = (&self.records[..self.records.len() - 1], usize::try_from(self.part));
        before.iter().map(move |record| part.unwrap_or(usize::MAX).saturating_mul(record.len()))
    }
}

/// The numbers of workers, of callers that fill slots while they wait (0 or 1), of host slots and of device slots.
#[derive(Clone, Copy)]
pub(super) struct Depths {
    pub(super) workers: usize,
    pub(super) helpers: usize,
    pub(super) host: usize,
    pub(super) device: usize,
}

impl Sizes {
    /// Computes the sizes for these data sets, each with its transforms, and the layout of a slot.
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
        let (mut shapes, mut layout, mut rooms) = (Vec::new(), Vec::new(), Vec::new());
        // A batch of the first record. If `lengths` returns `Some` for it, the lengths of the data set's records vary.
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
            let mut types = vec![record];
            for transform in transforms {
                let after = transform.output(&types[types.len() - 1]).map_err(failed)?;
                if after.len() == 0 {
                    let error = "wanted records of at least 1 byte, found 0 after the transform";
                    return Err(failed(error.into()));
                }
                types.push(after);
            }
            let last = types[types.len() - 1].clone();
            let room = match dataset.files().filter(|_| ragged && transforms.is_empty()) {
                Some(files) => usize::try_from(files.most_bytes(records)).ok(),
                None => usize::try_from(records).ok().and_then(|records| records.checked_mul(last.len())),
            };
            rooms.push(room.unwrap_or(usize::MAX));
            shapes.push(Arc::new(Shape { part, records: types }));
            layout.push(last);
        }
        let layout = Layout::new(layout, rooms);
        let out_bytes = layout.fields.iter().fold(0_usize, |sum, field| sum.saturating_add(field.len()));
        let sizes = Self { depths, records, out_bytes, slot: 0, shapes, ahead: 0 };
        match usize::try_from(records).ok().and_then(|records| layout.len(records)) {
            Some(slot) => Ok((Self { slot, ..sizes }, layout)),
            None => Err(too_large(&sizes)),
        }
    }

    /// Returns the bytes of the records before the transforms, for all workers, and for the caller if it fills slots
    /// too.
    fn scratch(&self) -> usize {
        let own = self.shapes.iter().flat_map(|shape| shape.scratch()).fold(0, usize::saturating_add);
        own.saturating_mul(self.depths.workers + self.depths.helpers)
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

fn failed(source: BoxError) -> Error {
    Error::Transform { at: None, source }
}

/// Returns an error if the element type and the shape of a data set do not give records of its size.
fn typed(dataset: &dyn Dataset, record: Result<RecordType, BoxError>) -> Result<RecordType, Error> {
    let found = match record {
        Ok(record) if record.len() == dataset.record_bytes() => return Ok(record),
        Ok(record) => format!("{record}, which is {} bytes", record.len()),
        Err(error) => error.to_string(),
    };
    let wanted = format!("elements of {} bytes a record in {}", dataset.record_bytes(), dataset.name());
    Err(Error::Option { option: "dataset", wanted, found })
}

/// Prints what the memory is for.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { depths: Depths { host, device, .. }, records, out_bytes, .. } = self;
        write!(f, "{host} host slots")?;
        if *device > 0 {
            write!(f, " and {device} device slots")?;
        }
        write!(f, " of {records} records of {out_bytes} bytes")?;
        if self.shapes.len() > 1 {
            write!(f, " in {} fields", self.shapes.len())?;
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
