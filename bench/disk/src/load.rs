//! One epoch through the loader, with what is measured of it.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use twinbuf::{BoxError, Evict, Loader, Plan, ReadMode, Records, Report};

use crate::{data, sys};

/// How a loader is set up.
#[derive(Clone, Copy)]
pub struct Way {
    pub overlap: bool,
    pub hints: bool,
    /// In MiB.
    pub prefetch: Option<u64>,
    pub host_depth: usize,
    pub evict: Evict,
    pub residency: bool,
    pub mode: ReadMode,
}

impl Default for Way {
    /// As the loader's own.
    fn default() -> Self {
        let (overlap, hints, host_depth) = (true, true, 2);
        let (evict, residency, mode) = (Evict::Keep, false, ReadMode::Pread);
        Self { overlap, hints, prefetch: None, host_depth, evict, residency, mode }
    }
}

impl Way {
    pub const fn prefetch(self, mib: u64) -> Self {
        Self { prefetch: Some(mib), ..self }
    }

    pub fn build(self, records: Arc<Records>, plan: Plan) -> Result<Loader, BoxError> {
        let mut builder = Loader::builder(records, plan)
            .overlap(self.overlap)
            .hints(self.hints)
            .host_depth(self.host_depth)
            .evict(self.evict)
            .residency(self.residency);
        if let Some(mib) = self.prefetch {
            builder = builder.prefetch(mib * data::MIB);
        }
        Ok(builder.build()?)
    }
}

/// What an epoch took.
pub struct Ran {
    pub report: Report,
    pub wall: Duration,
    /// Waiting for the first batch.
    pub first_wait: Duration,
    /// The report when the first batch had come.
    pub first: Report,
    pub major_faults: u64,
    /// The mean size of the disk's read requests in KiB.
    pub request: f64,
}

/// What `read` returns, and the mean size in KiB of the disk's read requests meanwhile, everybody's.
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

/// Reads one epoch of the file, from the disk alone, and spends `compute` on each batch.
///
/// The file is opened anew each time: pages that an open one has mapped would not leave the page cache.
pub fn cold_epoch(path: &Path, plan: Plan, way: Way, compute: Duration) -> Result<Ran, BoxError> {
    let records = data::open(path, way.mode)?;
    let loader = way.build(records.clone(), plan)?;
    data::make_cold(&records)?;
    let faults = sys::major_faults();
    let mut first = None;
    let (wall, request) = with_requests(path, || {
        let begun = Instant::now();
        for batch in loader.epoch(0) {
            let batch = batch?;
            if first.is_none() {
                first = Some((begun.elapsed(), loader.report()));
            }
            black_box(work(&batch, compute));
        }
        Ok(begun.elapsed())
    })?;
    let major_faults = sys::major_faults() - faults;
    let report = loader.report();
    loader.close()?;
    check(&report, &plan)?;
    let (first_wait, first) = first.ok_or("an epoch without a batch")?;
    Ok(Ran { report, wall, first_wait, first, major_faults, request })
}

/// Whether the epochs were whole, and took one read for each batch: ceil(N / B) an epoch.
pub fn check(report: &Report, plan: &Plan) -> Result<(), BoxError> {
    let wanted = plan.steps() * report.epochs;
    let Report { reads, batches, .. } = *report;
    if (reads, batches) != (wanted, wanted) {
        return Err(format!("wanted {wanted} batches by as many reads, found {batches} by {reads}").into());
    }
    Ok(())
}

/// Adds up the batch, again and again, for so long.
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
