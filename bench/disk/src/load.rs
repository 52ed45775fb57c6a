//! One epoch through the loader, with its measurements.

use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::{Buffer, ReadMode};
use twinbuf::{BoxError, Loader, Plan, Records, Report};

use twinbuf_bench_harness::data;

/// A loader with two slots, and else its defaults.
pub fn builder(records: Arc<Records>, plan: Plan) -> LoaderBuilder {
    Loader::builder(records, plan).depth(2)
}

/// Memory for slots of one size, reused by one loader after another. Its pages are touched once, when it is new.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Vec<Buffer>>>);

impl Pool {
    /// Builds a loader with slots in this memory.
    pub fn build(&self, builder: LoaderBuilder) -> Result<Loader, BoxError> {
        let (count, slot) = builder.wanted_slots()?;
        let slots = (0..count).map(|_| self.take(slot.size())).collect::<Option<Vec<_>>>();
        Ok(builder.slots(slots.ok_or("no memory for slots")?).build()?)
    }

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
pub fn cold_epoch(
    records: Arc<Records>,
    plan: &Plan,
    mode: ReadMode,
) -> Result<(Report, Duration), BoxError> {
    let mut loader = builder(records.clone(), plan.clone()).read_mode(mode).build()?;
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
