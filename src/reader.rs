//! The reading stage: fills host slots from the data set, one batch ahead of its use.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use twinbuf_core::{Park, Producer};
use twinbuf_mmap::{BatchPlan, Hinted, Plan};

use crate::dataset::Dataset;
use crate::error::Error;
use crate::trace::{Place, Track};

/// A host slot: the memory of one batch, and what is in it.
pub(crate) struct Slot {
    bytes: Box<[u8]>,
    pub(crate) load: Option<Load>,
}

/// What a slot was filled with.
pub(crate) struct Load {
    /// The job it belongs to: a slot filled for an epoch that was given up is skipped.
    pub(crate) generation: u64,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    pub(crate) plan: BatchPlan,
    /// The bytes of the batch, or why there are none.
    pub(crate) result: Result<usize, Error>,
    /// How long it took, hints included.
    pub(crate) took: Duration,
    /// How long the reader waited for the slot before.
    pub(crate) waited: Duration,
    pub(crate) hints: Hinted,
}

impl Slot {
    /// A slot of `len` bytes, all of them touched, so that no epoch pays for it. `None` if there is no memory.
    pub(crate) fn new(len: usize) -> Option<Self> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).ok()?;
        bytes.resize(len, 0);
        Some(Self { bytes: bytes.into_boxed_slice(), load: None })
    }

    pub(crate) fn batch(&self) -> &[u8] {
        &self.bytes[..self.len()]
    }

    pub(crate) fn batch_mut(&mut self) -> &mut [u8] {
        let len = self.len();
        &mut self.bytes[..len]
    }

    fn len(&self) -> usize {
        self.load.as_ref().and_then(|load| load.result.as_ref().ok()).map_or(0, |&len| len)
    }
}

/// An epoch to read.
#[derive(Clone, Copy)]
pub(crate) struct Job {
    /// Numbers the jobs of a loader, from 1.
    pub(crate) generation: u64,
    pub(crate) epoch: u64,
}

impl Job {
    /// For the trace.
    pub(crate) fn place(self, step: Option<u64>) -> Place {
        Place { ordinal: self.generation - 1, epoch: self.epoch, step }
    }
}

/// Reads batches into slots, on whatever thread it is called.
pub(crate) struct Reader {
    pub(crate) dataset: Box<dyn Dataset>,
    pub(crate) plan: Plan,
    /// Whether to ask for the next batch's pages before reading this one.
    pub(crate) hints: bool,
    pub(crate) track: Track,
    /// Batch reads so far; the loader reads it for its report.
    pub(crate) reads: Arc<AtomicU64>,
}

impl Reader {
    /// Fills `slot` with a batch of the plan, or with the error that it met.
    pub(crate) fn load(&mut self, job: Job, step: u64, plan: BatchPlan, slot: &mut Slot, waited: Duration) {
        let start = Instant::now();
        let wanted = plan_bytes(&plan, self.dataset.record_bytes());
        let out = &mut slot.bytes[..wanted];
        let epoch = job.epoch;
        let mut hints = Hinted::default();
        // A data set that panicked is asked again only if the caller starts another epoch: what it then does
        // is its own affair, and memory-safe.
        let read = catch_unwind(AssertUnwindSafe(|| {
            if self.hints {
                hints = self.hint(job, step, &plan);
            }
            // Relaxed: a count. The hand-over of the slot makes it visible in time.
            self.reads.fetch_add(1, Ordering::Relaxed);
            self.dataset.read(&plan, out)
        }));
        let result = match read {
            Ok(Ok(found)) if found == wanted => Ok(wanted),
            Ok(Ok(found)) => Err(Error::Length { epoch, step, wanted, found }),
            Ok(Err(source)) => Err(Error::Read { epoch, step, source }),
            Err(panic) => Err(Error::Panicked { epoch, step, message: message(&*panic) }),
        };
        let end = Instant::now();
        self.track.span("disk_load", job.place(Some(step)), start, end);
        let generation = job.generation;
        slot.load = Some(Load { generation, epoch, step, plan, result, took: end - start, waited, hints });
    }

    /// Asks for the pages of the batch after this one, so that the disk works on them while this one is copied
    /// and while the caller is busy; on the first step for this one's too.
    fn hint(&mut self, job: Job, step: u64, plan: &BatchPlan) -> Hinted {
        let mut hints = if step == 0 { self.dataset.will_need(plan) } else { Hinted::default() };
        if let Some(next) = self.plan.batch(job.epoch, step + 1) {
            hints += self.dataset.will_need(&next);
        }
        hints
    }

    /// The reading thread: reads epoch after epoch, as far ahead as there are slots, until the loader is gone.
    pub(crate) fn run(
        mut self,
        jobs: &mpsc::Receiver<Job>,
        wanted: &AtomicU64,
        mut slots: Producer<'_, Slot, Park>,
    ) {
        for job in jobs {
            // Relaxed: the caller no longer wants this epoch. Seen late, it costs a batch read in vain, which
            // the caller skips.
            let still_wanted = || wanted.load(Ordering::Relaxed) == job.generation;
            for step in 0.. {
                let Some(plan) = self.plan.batch(job.epoch, step) else { break };
                let asked = Instant::now();
                let Ok(mut slot) = slots.acquire() else { return };
                if !still_wanted() {
                    break;
                }
                self.load(job, step, plan, &mut slot, asked.elapsed());
                let failed = slot.load.as_ref().is_some_and(|load| load.result.is_err());
                if slot.commit().is_err() {
                    return;
                }
                if failed {
                    break;
                }
            }
            self.track.flush();
        }
        slots.finish();
    }
}

/// The bytes of a batch. The builder has checked that a full batch fits a slot, so this does not overflow.
fn plan_bytes(plan: &BatchPlan, record_bytes: usize) -> usize {
    usize::try_from(plan.len()).unwrap_or(usize::MAX).saturating_mul(record_bytes)
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(a panic without a message)".to_string())
}
