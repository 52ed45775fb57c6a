//! The memory that a loader needs: how much it is, and whether it fits the limit.

use std::fmt;

use twinbuf_mmap::{DType, Plan, Tail};

use super::layout::{Field, Layout};
use super::memory::{MemoryLimit, Taken};
use crate::backend::too_large;
use crate::dataset::Dataset;
use crate::error::Error;
use crate::transform::RecordTransform;

/// Bytes that are read and transformed at a time: few enough to be still in the CPU's second-level cache.
const PART: usize = 256 << 10;

/// The memory that a loader needs.
pub(super) struct Sizes {
    pub(super) depths: Depths,
    records: u64,
    /// Of a record in a slot, in all fields.
    out_bytes: usize,
    /// Bytes of a slot.
    pub(super) slot: usize,
    /// For each field, records that are transformed at a time, and bytes of so many in the file: 0 without a transform.
    pub(super) parts: Vec<(u64, usize)>,
    /// Bytes of memory for reads past the page cache.
    pub(super) ahead: u64,
}

/// How many workers, and how many slots each has.
#[derive(Clone, Copy)]
pub(super) struct Depths {
    pub(super) workers: usize,
    pub(super) host: usize,
    pub(super) device: usize,
}

impl Sizes {
    /// Of these data sets, each with its transform, and where they lie in a slot.
    pub(super) fn new<'f>(
        plan: &Plan,
        depths: Depths,
        fields: impl Iterator<Item = (&'f dyn Dataset, Option<&'f dyn RecordTransform>)>,
    ) -> Result<(Self, Layout), Error> {
        // A plan with fewer records than a batch has none that is full, unless it repeats them.
        let records = match plan.tail() {
            Tail::Wrap => plan.batch_records(),
            Tail::Drop | Tail::Keep => plan.batch_records().min(plan.records()),
        };
        let (mut parts, mut layout) = (Vec::new(), Vec::new());
        for (dataset, transform) in fields {
            let record_bytes = dataset.record_bytes();
            let Some(transform) = transform else {
                let (dtype, shape) = dataset
                    .element()
                    .map_or_else(|| (None, vec![record_bytes]), |(dtype, shape)| (Some(dtype), shape));
                parts.push((0, 0));
                layout.push(Field { bytes: record_bytes, dtype, shape });
                continue;
            };
            let failed = |source| Error::Transform { at: None, source };
            let bytes = transform.out_bytes(record_bytes).map_err(failed)?;
            if bytes == 0 {
                return Err(failed("wanted records of at least 1 byte, found 0 after the transform".into()));
            }
            let part = ((PART / record_bytes.max(1)).max(1) as u64).min(records);
            // No more than a batch in the file, or one record.
            let scratch = usize::try_from(part).unwrap_or(usize::MAX).saturating_mul(record_bytes);
            parts.push((part, scratch));
            let dtype = transform.dtype();
            layout.push(Field { bytes, dtype, shape: vec![bytes / dtype.map_or(1, DType::size)] });
        }
        let layout = Layout(layout);
        let out_bytes = layout.0.iter().fold(0_usize, |sum, field| sum.saturating_add(field.bytes));
        let sizes = Self { depths, records, out_bytes, slot: 0, parts, ahead: 0 };
        match usize::try_from(records).ok().and_then(|records| layout.len(records)) {
            Some(slot) => Ok((Self { slot, ..sizes }, layout)),
            None => Err(too_large(&sizes)),
        }
    }

    /// Bytes before the transforms, of each worker.
    fn scratch(&self) -> usize {
        self.parts.iter().fold(0, |sum, (_, scratch)| sum.saturating_add(*scratch))
    }

    /// Takes the sum from the limit.
    pub(super) fn take(&self, limit: MemoryLimit) -> Result<Taken, Error> {
        let Depths { workers, host, device } = self.depths;
        let wanted = (self.slot as u64)
            .checked_mul((host as u64).saturating_add(device as u64))
            .and_then(|slots| slots.checked_add(self.scratch() as u64))
            .and_then(|each| each.checked_mul(workers as u64))
            .and_then(|all| all.checked_add(self.ahead))
            .ok_or_else(|| too_large(self))?;
        limit.take(wanted).map_err(|(limit, taken)| Error::Memory {
            sum: self.to_string(),
            wanted,
            limit,
            taken,
        })
    }
}

/// The sum, spelled out.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { depths: Depths { workers, host, device }, records, out_bytes, .. } = self;
        if *workers > 1 {
            write!(f, "{workers} workers, each with ")?;
        }
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
