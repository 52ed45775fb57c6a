//! The memory that a loader needs: how much it is, and whether it fits the limit.

use std::fmt;

use twinbuf_mmap::{Plan, Tail};

use crate::backend::too_large;
use crate::error::Error;
use crate::transform::RecordTransform;

/// The memory that a loader needs.
pub(super) struct Sizes {
    pub(super) depths: Depths,
    records: u64,
    /// Of a record in a slot.
    pub(super) out_bytes: usize,
    /// Bytes of a slot.
    pub(super) slot: usize,
    /// Records that are transformed at a time, and bytes of so many in the file: 0 without a transform.
    pub(super) part: u64,
    pub(super) scratch: usize,
}

/// How many workers, and how many slots each has.
#[derive(Clone, Copy)]
pub(super) struct Depths {
    pub(super) workers: usize,
    pub(super) host: usize,
    pub(super) device: usize,
}

impl Sizes {
    pub(super) fn new(
        plan: &Plan,
        depths: Depths,
        (record_bytes, part_bytes): (usize, usize),
        transform: Option<&dyn RecordTransform>,
    ) -> Result<Self, Error> {
        // A plan with fewer records than a batch has none that is full, unless it repeats them.
        let records = match plan.tail() {
            Tail::Wrap => plan.batch_records(),
            Tail::Drop | Tail::Keep => plan.batch_records().min(plan.records()),
        };
        let (out_bytes, part) = match transform {
            None => (record_bytes, 0),
            Some(transform) => {
                let failed = |source| Error::Transform { at: None, source };
                let out_bytes = transform.out_bytes(record_bytes).map_err(failed)?;
                if out_bytes == 0 {
                    return Err(failed(
                        "wanted records of at least 1 byte, found 0 after the transform".into(),
                    ));
                }
                (out_bytes, ((part_bytes / record_bytes.max(1)).max(1) as u64).min(records))
            }
        };
        let slot = usize::try_from(records).ok().and_then(|records| records.checked_mul(out_bytes));
        // No more than a batch in the file, or one record.
        let scratch = usize::try_from(part).unwrap_or(usize::MAX).saturating_mul(record_bytes);
        let sizes = Self { depths, records, out_bytes, slot: 0, part, scratch };
        match slot {
            Some(slot) => Ok(Self { slot, ..sizes }),
            None => Err(too_large(&sizes)),
        }
    }

    /// Refuses a sum above `limit` bytes.
    pub(super) fn check(&self, limit: u64) -> Result<(), Error> {
        let Depths { workers, host, device } = self.depths;
        let wanted = (self.slot as u64)
            .checked_mul((host as u64).saturating_add(device as u64))
            .and_then(|slots| slots.checked_add(self.scratch as u64))
            .and_then(|each| each.checked_mul(workers as u64))
            .ok_or_else(|| too_large(self))?;
        if wanted > limit { Err(Error::Memory { sum: self.to_string(), wanted, limit }) } else { Ok(()) }
    }
}

/// The sum, spelled out.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { depths: Depths { workers, host, device }, records, out_bytes, scratch, .. } = self;
        if *workers > 1 {
            write!(f, "{workers} workers, each with ")?;
        }
        write!(f, "{host} host slots")?;
        if *device > 0 {
            write!(f, " and {device} device slots")?;
        }
        write!(f, " of {records} records of {out_bytes} bytes")?;
        if *scratch > 0 {
            write!(f, " and {scratch} bytes before the transform")?;
        }
        Ok(())
    }
}
