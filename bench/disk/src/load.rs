//! One epoch through the loader, with its measurements.

use std::hint::black_box;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::{Buffer, ReadMode, ReadOptions, Reader, Residency};
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan, Records, Report};

use crate::{data, sys};

/// How a loader is set up.
#[derive(Clone, Copy)]
pub struct Way {
    pub overlap: bool,
    pub hints: bool,
    /// In MiB.
    pub prefetch: Option<u64>,
    pub depth: usize,
    pub residency: bool,
    pub mode: ReadMode,
}

impl Default for Way {
    /// The loader's defaults.
    fn default() -> Self {
        let (overlap, hints, depth) = (true, true, 2);
        let (residency, mode) = (false, ReadMode::default());
        Self { overlap, hints, prefetch: None, depth, residency, mode }
    }
}

impl Way {
    pub const fn hint_window(self, mib: u64) -> Self {
        Self { prefetch: Some(mib), ..self }
    }

    pub fn build(self, records: Arc<Records>, plan: Plan) -> Result<Loader, BoxError> {
        self.build_over(records, plan)
    }

    /// Builds it with slots in memory of `pool`.
    pub fn build_in(self, pool: &Pool, records: Arc<Records>, plan: Plan) -> Result<Loader, BoxError> {
        let builder = self.builder(records, plan);
        let (count, slot) = builder.wanted_slots()?;
        let slots = (0..count).map(|_| pool.take(slot.size())).collect::<Option<Vec<_>>>();
        Ok(builder.slots(slots.ok_or("no memory for slots")?).build()?)
    }

    fn build_over(self, data: impl Dataset + 'static, plan: Plan) -> Result<Loader, BoxError> {
        Ok(self.builder(data, plan).build()?)
    }

    fn builder(self, data: impl Dataset + 'static, plan: Plan) -> LoaderBuilder {
        let mut builder = Loader::builder(data, plan)
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

/// Counts the pages of each batch that are in memory just before it is read.
struct Counted {
    records: Arc<Records>,
    /// Reads ahead, if that is being measured.
    reader: Reader,
    plan: Plan,
    /// Of all batches, and without the first batch.
    found: Arc<Mutex<(Residency, Residency)>>,
    first: bool,
}

impl Dataset for Counted {
    fn records(&self) -> u64 {
        Dataset::records(&self.records)
    }

    fn record_bytes(&self) -> usize {
        Dataset::record_bytes(&self.records)
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        if batch.step() == 0 {
            let (plan, epoch) = (self.plan.clone(), batch.epoch());
            self.reader.begin((0..).map_while(move |step| plan.batch(epoch, step)));
        }
        let Residency { pages, resident, .. } = self.records.residency_of(batch)?;
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.0.pages += pages;
        found.0.resident += resident;
        if !std::mem::take(&mut self.first) {
            found.1.pages += pages;
            found.1.resident += resident;
        }
        drop(found);
        Ok(self.reader.read(batch, out)?)
    }
}

/// The figures of an epoch.
pub struct Ran {
    pub report: Report,
    /// Pages in memory just before they were read, if they were counted: of all batches, and without the first batch.
    pub resident: (Residency, Residency),
    pub wall: Duration,
    /// Waiting for the first batch.
    pub first_wait: Duration,
    pub major_faults: u64,
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
    let found = Arc::new(Mutex::new(<(Residency, Residency)>::default()));
    let mut loader = if way.residency {
        // Reads like the loader, except that hints may be off.
        let options = ReadOptions::new().mode(way.mode).prefetch(if way.hints { 32 * data::MIB } else { 0 });
        let reader = Reader::new(records.ranges(), plan, options)?;
        let (records, found) = (records.clone(), found.clone());
        way.build_over(Counted { records, reader, plan: plan.clone(), found, first: true }, plan.clone())?
    } else {
        way.build(records.clone(), plan.clone())?
    };
    data::make_cold(&records)?;
    let faults = sys::major_faults();
    let mut first = None;
    let (wall, request) = with_requests(path, || {
        let begun = Instant::now();
        for batch in loader.epoch(0) {
            let batch = batch?;
            if first.is_none() {
                first = Some(begun.elapsed());
            }
            black_box(work(&batch, compute));
        }
        Ok(begun.elapsed())
    })?;
    let major_faults = sys::major_faults() - faults;
    let report = loader.report();
    loader.close()?;
    check(&report, plan)?;
    let first_wait = first.ok_or("an epoch without a batch")?;
    let resident = *found.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Ran { report, resident, wall, first_wait, major_faults, request })
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
