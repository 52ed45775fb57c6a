//! Read modes against each other, cold and warm; hints for a whole batch against one call for each run; what one call
//! brings.
//!
//! `cargo bench -p twinbuf-mmap --bench read`; with `-- orders` only whole epochs in several orders. Linux, and a target folder on a disk. The modes take turns,
//! so that a disturbance hits all of them; the least of the rounds says more than the median on a machine
//! that others use. "Cold" is an evicted cache, not a disk without a cache of its own.

#[cfg(target_os = "linux")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `cargo test --all-targets` runs benchmarks too, without this argument.
    if std::env::args().any(|argument| argument == "--bench") { linux::run() } else { Ok(()) }
}

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
mod linux {
    use std::error::Error;
    use std::fs::File;
    use std::io::Write;
    use std::num::NonZeroUsize;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use memmap2::{Advice, MmapOptions};
    use twinbuf_mmap::{BatchPlan, HINT_CHUNK, Plan, ReadMode, Records, Residency, Shuffle};

    const BYTES: usize = 256 << 20;
    const ROUNDS: u64 = 11;
    const MODES: [ReadMode; 2] = [ReadMode::Pread, ReadMode::Direct];

    /// What the pages are before a measurement.
    #[derive(Clone, Copy, Debug)]
    enum Pages {
        /// Not in the cache.
        Cold,
        /// In the cache.
        Cached,
    }

    pub(super) fn run() -> Result<(), Box<dyn Error>> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let path = folder.path().join("data");
        let mut file = File::create(&path)?;
        let block: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
        let orders = std::env::args().any(|argument| argument == "orders");
        // Of an epoch that is long beside a window.
        (0..if orders { 4 * BYTES } else { BYTES } >> 20).try_for_each(|_| file.write_all(&block))?;
        file.sync_all()?;
        if orders {
            return epochs(&path);
        }
        println!("{:<36} {:<11} {:>12} {:>12}", "what, pages before", "mode", "least", "median");
        for (what, record, batch) in [("4 MiB in order", 4 << 20, 1), ("1000 of 4 KiB, shuffled", 4096, 1000)]
        {
            let mut modes = Vec::new();
            for mode in MODES {
                modes.push(Records::options().read_mode(mode).open([&path], record)?);
            }
            let mut out = vec![0; record * batch];
            for pages in [Pages::Cold, Pages::Cached] {
                let mut times = [const { Vec::new() }; MODES.len()];
                for round in 0..ROUNDS {
                    for (records, times) in modes.iter().zip(&mut times) {
                        let batches = batches(records, batch, round)?;
                        match pages {
                            Pages::Cold => records.evict()?,
                            Pages::Cached => read(&Records::open([&path], record)?, &batches, &mut out)?,
                        }
                        let begun = Instant::now();
                        read(records, &batches, &mut out)?;
                        let count = u32::try_from(batches.len())?;
                        times.push(begun.elapsed() / count);
                    }
                }
                for (mode, times) in MODES.iter().zip(&mut times) {
                    print(&format!("{what}, {pages:?}"), &format!("{mode:?}"), times);
                }
            }
        }
        hints(&path)?;
        limits(&path)?;
        epochs(&path)
    }

    /// A whole epoch from a cold cache: in order by the kernel's read-ahead, and shuffled in windows of 64 MiB.
    /// Cold epochs on one thread, in batches of 1 MiB; each round's ratio to the epoch in order of the same round.
    fn epochs(path: &Path) -> Result<(), Box<dyn Error>> {
        const WINDOW: u64 = 64;
        for record in [1 << 10, 4 << 10, 16 << 10, 64 << 10] {
            let mut modes = Vec::new();
            for mode in MODES {
                modes.push(Records::options().read_mode(mode).open([path], record)?);
            }
            let batch = (1 << 20) / record as u64;
            let window = Shuffle::Window { records: batch, chunks: WINDOW };
            let chunks = Shuffle::Chunks { records: batch };
            let ways = [
                ("in order", Shuffle::None, 0, false),
                ("chunks", chunks, 0, true),
                ("window", window, 0, true),
                ("in order, direct", Shuffle::None, 1, true),
                ("chunks, direct", chunks, 1, true),
                ("window, direct", window, 1, true),
            ];
            let mut times = [const { Vec::new() }; 6];
            let mut out = vec![0; 1 << 20];
            for round in 0..ROUNDS {
                for ((_, shuffle, mode, hints), times) in ways.iter().zip(&mut times) {
                    let records = &modes[*mode];
                    let plan = Plan::builder(records.len()).batch(batch).shuffle(*shuffle).build()?;
                    records.evict()?;
                    let begun = Instant::now();
                    for step in 0..plan.steps() {
                        for ahead in if step == 0 { 0..=8 } else { 8..=8 } {
                            if let Some(next) = plan.batch(round, step + ahead).filter(|_| *hints) {
                                records.will_need(&next, HINT_CHUNK);
                            }
                        }
                        records.read(&plan.batch(round, step).expect("a step of the epoch"), &mut out)?;
                    }
                    times.push(begun.elapsed());
                }
            }
            let [in_order, ..] = &times;
            let mib = modes[0].bytes() >> 20;
            for ((name, ..), times) in ways.iter().zip(&times) {
                let mut speeds: Vec<f64> = in_order
                    .iter()
                    .zip(times)
                    .map(|(base, time)| base.as_secs_f64() / time.as_secs_f64())
                    .collect();
                speeds.sort_unstable_by(f64::total_cmp);
                let at = |part: usize| speeds[part * (speeds.len() - 1) / 4];
                println!(
                    "{:<36} {name:<16} {:>6.0} MiB/s  x in order {:.2} [{:.2}, {:.2}]",
                    format!("epoch of {mib} MiB in records of {record} B"),
                    mib as f64 / times.iter().min().expect("a round").as_secs_f64(),
                    at(2),
                    at(1),
                    at(3),
                );
            }
        }
        Ok(())
    }

    /// Eight batches, others in each round.
    fn batches(records: &Records, batch: usize, round: u64) -> Result<Vec<BatchPlan>, Box<dyn Error>> {
        let order = if batch == 1 { Shuffle::None } else { Shuffle::Records };
        let plan = Plan::builder(records.len()).batch(batch as u64).shuffle(order).build()?;
        Ok((0..8).filter_map(|step| plan.batch(round, step)).collect())
    }

    fn read(records: &Records, batches: &[BatchPlan], out: &mut [u8]) -> Result<(), Box<dyn Error>> {
        for batch in batches {
            records.read(batch, out)?;
        }
        Ok(())
    }

    /// `will_need` against a loop of `madvise` in batch order, which gets its ranges for nothing.
    fn hints(path: &Path) -> Result<(), Box<dyn Error>> {
        let map = MmapOptions::new().map_raw_read_only(&File::open(path)?)?;
        for (record, batch) in [(4096, 1000), (4096, 10_000), (256, 1000), (256, 10_000), (256, 100_000)] {
            let records = Records::open([path], record)?;
            for cold in [true, false] {
                let mut times = [const { Vec::new() }; 2];
                for round in 0..ROUNDS {
                    let batch = &batches(&records, batch, round)?[0];
                    let mut runs = Vec::new();
                    for run in batch.runs() {
                        let (start, end) = (usize::try_from(run.start)?, usize::try_from(run.end)?);
                        runs.push(start * record..end * record);
                    }
                    for (looped, times) in [true, false].into_iter().zip(&mut times) {
                        records.evict()?;
                        if cold {
                            std::thread::sleep(Duration::from_millis(20));
                        } else {
                            records.read(batch, &mut vec![0; record * usize::try_from(batch.len())?])?;
                        }
                        let begun = Instant::now();
                        if looped {
                            for run in &runs {
                                map.advise_range(Advice::WillNeed, run.start, run.len())?;
                            }
                            times.push(begun.elapsed());
                        } else {
                            times.push(records.will_need(batch, HINT_CHUNK).time);
                        }
                    }
                }
                let pages = if cold { "Cold" } else { "Cached" };
                let what = format!("hints for {batch} of {record} B, {pages}");
                for (how, times) in ["call a run", "will_need"].into_iter().zip(&mut times) {
                    print(&what, how, times);
                }
            }
        }
        Ok(())
    }

    /// How much of 64 MiB one call brings, and calls in pieces; and the time to ask for the whole file.
    fn limits(path: &Path) -> Result<(), Box<dyn Error>> {
        /// Any disk has read by then what it was asked for.
        const READ: Duration = Duration::from_secs(2);
        let records = Records::open([path], 1 << 20)?;
        let ask = |mib, piece| -> Result<_, Box<dyn Error>> {
            let batch = Plan::builder(records.len()).batch(mib).build()?.batch(0, 0).expect("one batch");
            records.evict()?;
            let time = records.will_need(&batch, piece).time;
            std::thread::sleep(READ);
            Ok((time, records.residency_of(&batch)?))
        };
        for (how, piece) in [("one call", NonZeroUsize::MAX), ("in pieces", HINT_CHUNK)] {
            let (_, Residency { pages, resident }) = ask(64, piece)?;
            let mib = format!("{:.1} MiB", 64.0 * resident as f64 / pages as f64);
            println!("{:<36} {how:<11} {mib:>12}", "resident of a hint for 64 MiB");
        }
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            times.push(ask(records.len(), HINT_CHUNK)?.0);
        }
        print("hint for 256 MiB in order, Cold", "will_need", &mut times);
        Ok(())
    }

    fn print(what: &str, how: &str, times: &mut [Duration]) {
        times.sort_unstable();
        let micros = |time: Duration| format!("{:.0} us", time.as_secs_f64() * 1e6);
        println!("{what:<36} {how:<11} {:>12} {:>12}", micros(times[0]), micros(times[times.len() / 2]));
    }
}
