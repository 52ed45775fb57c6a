//! One epoch through the loader, with its measurements.

use std::hint::black_box;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::{Buffer, ReadMode};
use twinbuf::{BoxError, Loader, Plan, Records, Report};

use twinbuf_bench_harness::{data, sys};

/// How a loader is set up.
#[derive(Clone, Copy)]
pub struct Way {
    pub overlap: bool,
    pub hints: bool,
    /// In MiB.
    pub prefetch: Option<u64>,
    pub depth: usize,
    pub mode: ReadMode,
}

impl Default for Way {
    /// The loader's defaults.
    fn default() -> Self {
        Self { overlap: true, hints: true, prefetch: None, depth: 2, mode: ReadMode::default() }
    }
}

impl Way {
    pub const fn hint_window(self, mib: u64) -> Self {
        Self { prefetch: Some(mib), ..self }
    }

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
        let mut builder = Loader::builder(records, plan)
            .overlap(self.overlap)
            .hints(self.hints)
            .depth(self.depth)
            .read_mode(self.mode);
        if let Some(mib) = self.prefetch {
            builder = builder.hint_window(mib * data::MIB);
        }
        builder
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

/// The figures of an epoch.
pub struct Ran {
    pub report: Report,
    pub wall: Duration,
    /// The mean size of the disk's read requests in KiB.
    pub request: f64,
}

/// Returns what `read` returns, and the mean size in KiB of the disk's read requests during it. Requests of all
/// processes count.
pub fn with_requests<T>(
    path: &Path,
    read: impl FnOnce() -> Result<T, BoxError>,
) -> Result<(T, f64), BoxError> {
    let before = sys::disk_reads(path);
    let read = read()?;
    let size = before.zip(sys::disk_reads(path)).map_or(f64::NAN, |((requests, bytes), (then, more))| {
        (more - bytes) as f64 / 1024.0 / (then - requests) as f64
    });
    Ok((read, size))
}

/// Reads one epoch of the file, from the disk only, and spends `compute` on each batch.
///
/// The file is opened again each time: pages mapped by an open data set would stay in the page cache.
pub fn cold_epoch(path: &Path, plan: &Plan, way: Way, compute: Duration) -> Result<Ran, BoxError> {
    cold_run(path, data::open(path)?, plan, way, compute)
}

/// The same for `records`. No other owner has them open.
pub fn cold_run(
    path: &Path,
    records: Arc<Records>,
    plan: &Plan,
    way: Way,
    compute: Duration,
) -> Result<Ran, BoxError> {
    let mut loader = way.build(records.clone(), plan.clone())?;
    data::make_cold(&records)?;
    let (wall, request) = with_requests(path, || {
        let begun = Instant::now();
        for batch in loader.epoch(0) {
            black_box(work(&batch?, compute));
        }
        Ok(begun.elapsed())
    })?;
    let report = loader.report();
    loader.close()?;
    check(&report, plan)?;
    Ok(Ran { report, wall, request })
}

/// Checks that the epochs were complete, and took one read per batch: ceil(N / B) per epoch.
pub fn check(report: &Report, plan: &Plan) -> Result<(), BoxError> {
    let wanted = plan.steps(0) * report.epochs;
    let Report { loads: reads, batches, .. } = *report;
    if (reads, batches) != (wanted, wanted) {
        return Err(format!("wanted {wanted} batches by as many reads, found {batches} by {reads}").into());
    }
    Ok(())
}

/// Sums up the batch repeatedly for this long.
fn work(batch: &[u8], time: Duration) -> u64 {
    let end = Instant::now() + time;
    let mut sum = 0_u64;
    loop {
        for block in batch.chunks(64 << 10) {
            if Instant::now() >= end {
                return sum;
            }
            for word in block.chunks_exact(8) {
                sum = sum.wrapping_add(u64::from_le_bytes(word.try_into().expect("8 bytes")));
            }
        }
    }
}
