//! Small batches from the page cache, with the loader's own way to wait: the time of an epoch over the ideal one, and
//! the CPU time of a loader that waits.
//!
//! A file of 64 MiB is read in batches of 4, 64 and 512 KiB. `load` is the time that a loader without overlap takes to
//! read a batch. The caller then does nothing with a batch, or is busy for as long as a load takes; either way the
//! ideal epoch takes `load` for each batch. Runs follow each other in turn; the table has medians, and the ratio to the
//! least `load` too. Epochs are short, some milliseconds, so some of them run undisturbed on a machine that others use
//! too: look at the least ratio there.
//!
//! `cargo bench --bench small` prints the table, `cargo bench --bench small -- 5` that of five rounds. With `pin` behind
//! it the two threads run on processors 0 and 1, for a machine that others use too: there the scheduler may leave both
//! on one.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use twinbuf::{BoxError, Loader, Plan, Records};

const FILE: usize = 64 << 20;
const RECORD: usize = 4 << 10;

/// An epoch: what each batch took, and the report's time for its load.
fn epoch(loader: &mut Loader, compute: Duration) -> Result<(Duration, Duration), BoxError> {
    let before = loader.report();
    let mut epoch = loader.epoch(0);
    // The wait for the first batch is that for a thread that was asleep.
    epoch.next().ok_or("no batch")??;
    let start = Instant::now();
    let mut batches = 0;
    for batch in &mut epoch {
        let batch = batch?;
        let until = Instant::now() + compute;
        batches += 1;
        black_box(batch[0]);
        while !compute.is_zero() && Instant::now() < until {}
    }
    let took = start.elapsed() / batches;
    drop(epoch);
    let after = loader.report();
    Ok((took, (after.read.busy - before.read.busy) / (batches + 1)))
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// The CPU time of the process so far.
fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the timespec that it is given.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "every Linux has this clock");
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Runs this thread, and threads that it starts from now on, on one processor.
fn pin(processor: usize) {
    // SAFETY: a set of bits; none is set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: writes to the set alone; 0 and 1 are within it.
    unsafe { libc::CPU_SET(processor, &mut set) };
    // SAFETY: reads the set, whose size it is given.
    let failed = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    assert_eq!(failed, 0, "wanted processors 0 and 1");
}

fn main() -> Result<(), BoxError> {
    let rounds = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(101);
    let pinned = std::env::args().any(|arg| arg == "pin");
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("small.bin");
    std::fs::write(&path, vec![1; FILE])?;
    let data = Arc::new(Records::open([&path], RECORD)?);
    println!(
        "{rounds} rounds over {} MiB; us a batch; ratio to the ideal: median (least to most)",
        FILE >> 20
    );
    println!(
        "{:>9} {:>8} {:>8} {:>8} {:>20} {:>8}",
        "batch KiB", "compute", "load", "took", "ratio", "of least"
    );
    for kib in [4, 64, 512] {
        // At most 4096 batches.
        let (len, batch) = (data.len().min(4 * kib * 1024), kib * 1024 / RECORD as u64);
        let plan = Plan::builder(len).batch(batch).build()?;
        let mut serial = Loader::builder(data.clone(), plan.clone()).overlap(false).build()?;
        if pinned {
            pin(1);
        }
        let mut ours = Loader::builder(data.clone(), plan).build()?;
        if pinned {
            pin(0);
        }
        // Whatever is done once.
        epoch(&mut serial, Duration::ZERO)?;
        epoch(&mut ours, Duration::ZERO)?;
        for computes in [false, true] {
            let mut found = Vec::new();
            for _ in 0..rounds {
                let (_, load) = epoch(&mut serial, Duration::ZERO)?;
                let (took, _) = epoch(&mut ours, if computes { load } else { Duration::ZERO })?;
                let us = |time: Duration| time.as_secs_f64() * 1e6;
                found.push((us(load), us(took)));
            }
            let ratios: Vec<f64> = found.iter().map(|(load, took)| took / load).collect();
            let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
            let most = ratios.iter().copied().fold(0.0, f64::max);
            let fewest = |of: &dyn Fn(&(f64, f64)) -> f64| found.iter().map(of).fold(f64::INFINITY, f64::min);
            let best = fewest(&|found| found.1) / fewest(&|found| found.0);
            println!(
                "{kib:>9} {:>8} {:>8.2} {:>8.2} {:>20} {:>8}",
                if computes { "as load" } else { "none" },
                median(found.iter().map(|found| found.0).collect()),
                median(found.iter().map(|found| found.1).collect()),
                format!("{:.2} ({least:.2} to {most:.2})", median(ratios)),
                format!("{best:.2}"),
            );
        }
    }
    // Both sides have just waited for short times only, and now for a long one.
    let plan = Plan::builder(data.len()).batch(1).build()?;
    let mut loader = Loader::builder(data, plan).build()?;
    epoch(&mut loader, Duration::ZERO)?;
    let mut epoch = loader.epoch(0);
    let held = epoch.next().ok_or("no batch")??;
    let before = cpu();
    std::thread::sleep(Duration::from_secs(1));
    println!("a loader whose slots are full for a second used {:?} of CPU time", cpu() - before);
    drop(held);
    Ok(())
}
