//! One epoch through the loader, with its measurements.

use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::{Buffer, ReadMode};
use twinbuf::{BoxError, Loader, Plan, Records, Report};

use twinbuf_bench_harness::data;

/// How a loader is set up.
#[derive(Clone, Copy)]
pub struct Way {
    pub overlap: bool,
    pub depth: usize,
    pub mode: ReadMode,
}

impl Default for Way {
    /// Two slots, and the loader's defaults.
    fn default() -> Self {
        Self { overlap: true, depth: 2, mode: ReadMode::default() }
    }
}

impl Way {
    pub fn build(self, records: Arc<Records>, plan: Plan) -> Result<Loader, BoxError> {
        Ok(self.builder(records, plan).build()?)
    }

    /// Builds it with slots in memory of `pool`.
    pub fn build_in(self, pool: &Pool, records: Arc<Records>, plan: Plan) -> Result<Loader, BoxError> {
        let builder = self.builder(records, plan);
        let (count, slot) = builder.wanted_slots()?;
        let slots = (0..count).map(|_| pool.take(slot.size())).collect::<Option<Vec<_>>>();
        Ok(builder.slots(slots.ok_or("no memory for slots")?).build()?)
    }

    fn builder(self, records: Arc<Records>, plan: Plan) -> LoaderBuilder {
        Loader::builder(records, plan).overlap(self.overlap).depth(self.depth).read_mode(self.mode)
    }
}

/// Memory for slots of one size, reused by one loader after another. Its pages are touched once, when it is new.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Vec<Buffer>>>);

impl Pool {
    /// Memory of `bytes` bytes. It returns here when it is dropped.
    fn take(&self, bytes: usize) -> Option<Buffer> {
        let free = self.free().pop();
        let mut memory = match free.filter(|memory| memory.len() == bytes) {
            Some(memory) => memory,
            None => {
                let mut new = Buffer::new(bytes)?;
                new.fill(1);
                new
            }
        };
        let start = NonNull::from(&mut memory[..]).cast();
        let lender = Lender { pool: self.clone(), memory: Some(memory) };
        // SAFETY: the memory is initialized. Moving its owner into the lender leaves it in place, and nothing else
        // reaches it until the lender is dropped.
        Some(unsafe { Buffer::lent(start, bytes, lender) })
    }

    fn free(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns memory to its pool.
struct Lender {
    pool: Pool,
    memory: Option<Buffer>,
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.pool.free().extend(self.memory.take());
    }
}

/// Reads one epoch, from the disk only. No other owner has the records open.
pub fn cold_epoch(records: Arc<Records>, plan: &Plan, way: Way) -> Result<(Report, Duration), BoxError> {
    let mut loader = way.build(records.clone(), plan.clone())?;
    data::make_cold(&records)?;
    let begun = Instant::now();
    for batch in loader.epoch(0) {
        black_box(&batch?[..]);
    }
    let (report, wall) = (loader.report(), begun.elapsed());
    loader.close()?;
    check(&report, plan)?;
    Ok((report, wall))
}

/// Checks that the epochs were complete, and took one read per batch.
pub fn check(report: &Report, plan: &Plan) -> Result<(), BoxError> {
    let wanted = plan.steps(0) * report.epochs;
    let Report { loads: reads, batches, .. } = *report;
    if (reads, batches) != (wanted, wanted) {
        return Err(format!("wanted {wanted} batches by as many reads, found {batches} by {reads}").into());
    }
    Ok(())
}
