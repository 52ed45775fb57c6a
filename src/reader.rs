//! The reading stage: fills host slots from the data set, ahead of their use.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::Context;
use std::time::{Duration, Instant};

use twinbuf_mmap::{BatchPlan, Buffer, Evict, Hinted, Plan};

use crate::backend::Backend;
use crate::dataset::Dataset;
use crate::error::Error;
use crate::slot::{Cost, Load};
use crate::spans;
use crate::trace::{Place, Track};
use crate::transform::RecordTransform;

/// An epoch to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    /// Numbers the jobs of a loader, from 1.
    pub(crate) generation: u64,
    pub(crate) epoch: u64,
    /// The first step.
    pub(crate) start: u64,
}

impl Job {
    /// For the trace.
    pub(crate) fn place(self, step: Option<u64>) -> Place {
        Place { ordinal: self.generation - 1, epoch: self.epoch, step }
    }
}

/// How a caller wants to wait for a batch.
#[derive(Debug)]
pub enum Waiting<'a, 'b> {
    Block,
    /// Not at all.
    Try,
    /// Until this task is woken.
    Poll(&'a mut Context<'b>),
}

/// Reads batches into slots, on whatever thread it is called.
pub(crate) struct Reader {
    pub(crate) dataset: Box<dyn Dataset>,
    pub(crate) plan: Plan,
    /// Of a record in the file.
    pub(crate) record_bytes: usize,
    pub(crate) transform: Option<Transforming>,
    /// How far ahead of the reading to ask for pages, if at all.
    pub(crate) ahead: Option<Ahead>,
    pub(crate) evict: Evict,
    /// Whether to count the pages that are in memory when a batch is read.
    pub(crate) residency: bool,
    pub(crate) track: Track,
    /// Batch reads so far; the loader reads it for its report.
    pub(crate) reads: Arc<AtomicU64>,
}

impl Reader {
    /// Fills `out`, which has room for it, with a batch of the plan, or says what it met.
    pub(crate) fn load(
        &mut self,
        job: Job,
        step: u64,
        plan: BatchPlan,
        out: &mut [u8],
        waited: Duration,
    ) -> Load {
        let mut cost = Cost { waited, ..Cost::default() };
        let mut who = "data set";
        let span = spans::load(job.epoch, step, bytes(plan.len(), self.record_bytes));
        let start = Instant::now();
        // A data set or transform that panicked is asked again only if the caller starts another epoch: what it
        // then does is its own affair, and memory-safe.
        let filled = catch_unwind(AssertUnwindSafe(|| {
            span.in_scope(|| self.fill(job, step, &plan, out, &mut cost, &mut who))
        }));
        let Job { generation, epoch, .. } = job;
        let result = match filled {
            Ok(result) => result,
            Err(panic) => Err(Error::Panicked { epoch, step, who, message: message(&*panic) }),
        };
        let end = Instant::now();
        cost.read = (end - start).saturating_sub(cost.transform);
        // Both go on part by part; the trace shows how long each took, one after the other.
        let read = end - cost.transform;
        self.track.span("disk_load", job.place(Some(step)), start, read);
        if !cost.transform.is_zero() {
            self.track.span("transform", job.place(Some(step)), read, end);
        }
        self.track.filled(job.place(Some(step)), start, read);
        self.track.write_if_due(end);
        Load { generation, epoch, step, plan, result, cost }
    }

    fn fill(
        &mut self,
        job: Job,
        step: u64,
        plan: &BatchPlan,
        out: &mut [u8],
        cost: &mut Cost,
        who: &mut &'static str,
    ) -> Result<usize, Error> {
        let epoch = job.epoch;
        if self.residency {
            cost.residency = self.dataset.residency(plan).unwrap_or_default();
        }
        if let Some(ahead) = &mut self.ahead {
            cost.hints = ahead.ask(&mut *self.dataset, &self.plan, job, step);
        }
        // Relaxed: a count. The hand-over of the slot makes it visible in time.
        self.reads.fetch_add(1, Ordering::Relaxed);
        let (dataset, record_bytes) = (&mut *self.dataset, self.record_bytes);
        let mut read = |plan: &BatchPlan, out: &mut [u8]| {
            let wanted = out.len();
            match dataset.read(plan, out) {
                Ok(found) if found == wanted => Ok(()),
                Ok(found) => Err(Error::Length { epoch, step, wanted, found }),
                Err(source) => Err(Error::Read { epoch, step, source }),
            }
        };
        let len = match &mut self.transform {
            None => {
                let len = bytes(plan.len(), record_bytes);
                read(plan, &mut out[..len])?;
                len
            }
            Some(Transforming { transform, out_bytes, part, scratch }) => {
                let len = bytes(plan.len(), *out_bytes);
                let mut out = &mut out[..len];
                let mut at = 0;
                while let Some(part) = plan.part(at..plan.len().min(at + *part)) {
                    let records = &mut scratch[..bytes(part.len(), record_bytes)];
                    read(&part, records)?;
                    let (front, rest) = out.split_at_mut(bytes(part.len(), *out_bytes));
                    let start = Instant::now();
                    *who = "transform";
                    transform
                        .apply(records, front)
                        .map_err(|source| Error::Transform { place: Some((epoch, step)), source })?;
                    *who = "data set";
                    cost.transform += start.elapsed();
                    out = rest;
                    at += part.len();
                }
                len
            }
        };
        if let (Some(ahead), true) = (&mut self.ahead, step == job.start) {
            cost.hints += ahead.ask(&mut *self.dataset, &self.plan, job, step);
        }
        if self.evict != Evict::Keep && self.dataset.evict(plan, self.evict).is_err() {
            cost.evict_failed = 1;
        }
        Ok(len)
    }

    /// The reading thread: reads epoch after epoch, as far ahead as there are slots, until the loader is gone.
    pub(crate) fn run<B: Backend>(
        mut self,
        jobs: &mpsc::Receiver<Job>,
        wanted: &AtomicU64,
        mut slots: B::Slots,
    ) {
        for job in jobs {
            // Relaxed: the caller no longer wants this epoch. Seen late, it costs a batch read in vain, which
            // the caller skips.
            let still_wanted = || wanted.load(Ordering::Relaxed) == job.generation;
            for step in job.start..self.plan.steps() {
                let Some(plan) = self.plan.batch(job.epoch, step) else { break };
                let asked = Instant::now();
                // The wait for a slot may be long.
                self.track.write_if_due(asked);
                let mut go_on = false;
                let filled = B::fill(&mut slots, true, &mut |out| {
                    if !still_wanted() {
                        return None;
                    }
                    let load = self.load(job, step, plan, out, asked.elapsed());
                    go_on = load.result.is_ok();
                    Some(load)
                });
                if filled.is_err() {
                    return;
                }
                if !go_on {
                    break;
                }
            }
            self.track.flush();
        }
        B::finish(slots);
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

/// Asks for pages of records that will be read, up to so many ahead.
pub(crate) struct Ahead {
    /// Records after the batch that is being read.
    budget: u64,
    /// The job they belong to.
    generation: u64,
    /// Records of the epoch before this one have been asked for; each batch counts as a full one.
    through: u64,
    /// The record after the last of those.
    next: Option<u64>,
}

impl Ahead {
    pub(crate) fn new(budget: u64) -> Self {
        Self { budget, generation: 0, through: 0, next: None }
    }

    /// Before `step` is read, asks for what has come within the budget, so that the disk works on it while that one is
    /// copied and while the caller is busy; but for no more than two batches at once: what is needed first is to come
    /// first.
    ///
    /// The first batch of an epoch has been asked for by nobody. It is asked for alone, so that it does not have to wait
    /// for those after it; and not even that if it is one run, because it is read at once. Called again after it has
    /// been read, this goes on to the others.
    fn ask(&mut self, dataset: &mut dyn Dataset, plan: &Plan, job: Job, step: u64) -> Hinted {
        let batch = plan.batch_records();
        let mut budget = self.budget;
        if self.generation != job.generation {
            (self.generation, self.through, budget) = (job.generation, step.saturating_mul(batch), 0);
            self.next =
                plan.batch(job.epoch, step).and_then(|first| first.runs().next()).map(|run| run.start);
        }
        let until = step.saturating_add(1).saturating_mul(batch).saturating_add(budget);
        let until = until.min(self.through.saturating_add(batch.saturating_mul(2)));
        let mut hints = Hinted::default();
        while self.through < until {
            let (next, done) = (self.through / batch, self.through % batch);
            let Some(records) = plan.batch(job.epoch, next) else { break };
            let end = records.len().min(until - next * batch);
            if let Some(part) = records.part(done..end) {
                hints += self.ask_for(dataset, &part);
            }
            self.through =
                if end == records.len() { (next + 1).saturating_mul(batch) } else { next * batch + end };
        }
        hints
    }

    /// Records that go on where the last ones ended are left to the system, which reads ahead of a reader in order by
    /// itself, and in larger requests: here at 1465 MiB/s instead of 616 (`bench/disk`, section `sequential`).
    fn ask_for(&mut self, dataset: &mut dyn Dataset, records: &BatchPlan) -> Hinted {
        let first = records.runs().next();
        let goes_on = self.next.is_some_and(|next| first == Some(next..next + records.len()));
        // Not by going through all runs, which would be done once more to read them.
        let last = records.len().checked_sub(1).and_then(|last| records.part(last..last + 1));
        self.next = last.and_then(|last| last.runs().next()).map(|run| run.end);
        if goes_on { Hinted::default() } else { dataset.will_need(records) }
    }
}

pub(crate) fn message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(a panic without a message)".to_string())
}
