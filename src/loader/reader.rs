//! Reads one batch of a data set into a slot: hints, read, transform, cache policy.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use twinbuf_mmap::{BatchPlan, Buffer, CachePolicy};

use super::checkpoint::Identity;
use super::prefetch::Prefetch;
use super::schedule::Schedule;
use crate::dataset::Dataset;
use crate::error::{At, Error};
use crate::slot::Ticket;
use crate::stage::worker::{Load, Source};
use crate::transform::{Context, RecordTransform};

/// A data set as the source of a stage.
pub(crate) struct Reader {
    pub(crate) dataset: Box<dyn Dataset>,
    pub(crate) schedule: Schedule,
    /// Of a record in the file.
    pub(crate) record_bytes: usize,
    pub(crate) transform: Option<Transforming>,
    /// The window of pages to ask for ahead of the reading, if there is one; all workers have the same.
    pub(crate) prefetch: Option<Arc<Mutex<Prefetch>>>,
    pub(crate) cache_policy: CachePolicy,
}

impl Source<[u8]> for Reader {
    fn load(&mut self, load: Load<'_>, out: &mut [u8]) -> Result<usize, Error> {
        let Load { ticket, plan, naming, stats, who } = load;
        let at = || naming.at(ticket);
        // A call that was left long ago: the batch will be discarded.
        let Some(plan) = plan else { return Err(Error::ThreadGone { at: at() }) };
        if let Some(prefetch) = &self.prefetch {
            stats.hints = lock(prefetch).before(&mut *self.dataset, &self.schedule, ticket);
        }
        let (dataset, record_bytes) = (&mut *self.dataset, self.record_bytes);
        let len = match &mut self.transform {
            None => {
                let len = bytes(plan.len(), record_bytes);
                read(dataset, plan, &mut out[..len], &at)?;
                len
            }
            Some(Transforming { transform, out_bytes, part, scratch }) => {
                let len = bytes(plan.len(), *out_bytes);
                let mut out = &mut out[..len];
                let mut done = 0;
                while let Some(part) = plan.part(done..plan.len().min(done + *part)) {
                    let records = &mut scratch[..bytes(part.len(), record_bytes)];
                    read(dataset, &part, records, &at)?;
                    let (front, rest) = out.split_at_mut(bytes(part.len(), *out_bytes));
                    let context = Context::new(&part);
                    let start = Instant::now();
                    *who = "transform";
                    transform
                        .apply(records, front, &context)
                        .map_err(|source| Error::Transform { at: Some(at()), source })?;
                    *who = "data set";
                    stats.transform += start.elapsed();
                    out = rest;
                    done += part.len();
                }
                len
            }
        };
        if let Some(prefetch) = &self.prefetch {
            stats.hints += lock(prefetch).after(dataset, &self.schedule);
        }
        if self.cache_policy != CachePolicy::Keep && dataset.evict(plan, self.cache_policy).is_err() {
            stats.evict_failed = 1;
        }
        Ok(len)
    }

    fn records(&self, ticket: Ticket) -> Option<(BatchPlan, Arc<Identity>)> {
        self.schedule.batch(ticket)
    }

    fn bytes(&self, records: &BatchPlan) -> usize {
        bytes(records.len(), self.record_bytes)
    }
}

/// A data set that panicked while it was asked for pages leaves a window that is still one.
fn lock(prefetch: &Mutex<Prefetch>) -> MutexGuard<'_, Prefetch> {
    prefetch.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read(
    dataset: &mut dyn Dataset,
    plan: &BatchPlan,
    out: &mut [u8],
    at: &dyn Fn() -> At,
) -> Result<(), Error> {
    let wanted = out.len();
    match dataset.read(plan, out) {
        Ok(found) if found == wanted => Ok(()),
        Ok(found) => Err(Error::Length { at: at(), wanted, found }),
        Err(source) => Err(Error::Load { at: at(), source }),
    }
}

/// The bytes of so many records. The builder has checked that a full batch fits a slot, so this does not overflow.
fn bytes(records: u64, record_bytes: usize) -> usize {
    usize::try_from(records).unwrap_or(usize::MAX).saturating_mul(record_bytes)
}

/// A transform and the memory between it and the file.
pub(crate) struct Transforming {
    pub(crate) transform: Box<dyn RecordTransform>,
    /// Of a record afterwards.
    pub(crate) out_bytes: usize,
    /// Records that are read and transformed at a time.
    pub(crate) part: u64,
    /// Room for so many, as they are in the file.
    pub(crate) scratch: Buffer,
}
