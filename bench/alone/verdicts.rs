//! Verdicts and bounds of the report, for loops whose truth is known, quiet and beside busy threads. Each loop is
//! measured, and its verdict compared with the truth. If the report says what to try, the loop then runs with it and
//! without it in turn: the best time with it must not be better than the bound that the report gives, by more than the
//! times without it differ. A loop on a device uses the software driver of the tests: its copies and kernels take
//! time, and nothing else about it is a GPU's.
//!
//! ```sh
//! cargo bench --bench verdicts [-- --busy 0,1,2,4 --runs 5 --pairs 3 --texts loop...]
//! # default: quiet, 5 runs, 3 pairs, all loops
//! ```

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use twinbuf::loader::LoaderBuilder;
use twinbuf::observe::{Settings, Verdict};
use twinbuf::transform::per_record;
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan, Records, Report};

const RECORD: usize = 4096;

/// What a caller does with its batches.
#[derive(Clone, Copy, PartialEq)]
enum Caller {
    Computes,
    /// Waits, as for a device.
    Waits,
    /// Waits, and keeps the last ones.
    Keeps(usize),
    /// Hands them to a thread that takes 12 ms for each.
    Lends,
    /// Waits, for two seconds in its first step, as a program that compiles.
    Compiles,
    /// Waits, and asks for one epoch of one batch after the other.
    OneBatchEpochs,
    /// Enqueues work on a device that takes this many microseconds.
    Enqueues(u32),
}

/// What a load is made of.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    /// Whether the records are in files, and a transform waits in place of the data set.
    files: bool,
    /// Microseconds that a batch is waited for.
    read: fn(u64) -> u64,
    /// Loads wait for one lock.
    locked: bool,
    /// Milliseconds of computing in the transform.
    transform: u64,
    /// Milliseconds of a use.
    train: u64,
    /// The longest delay of each of the 8 pieces of a copy to the device, in microseconds.
    copy: u32,
    caller: Caller,
    settings: Settings,
    steps: u64,
    truth: &'static [Verdict],
}

const LOAD: &[Verdict] = &[Verdict::LoadBound, Verdict::TransformBound];
const TRANSFORM: &[Verdict] = &[Verdict::TransformBound];
const COMPUTE: &[Verdict] = &[Verdict::ComputeBound];
const HELD: &[Verdict] = &[Verdict::HeldBound];
const COPY: &[Verdict] = &[Verdict::TransferBound];
const LATE: &[Verdict] = &[Verdict::Balanced];
/// Loads and uses take about as long as each other.
const EVEN: &[Verdict] =
    &[Verdict::Balanced, Verdict::ComputeBound, Verdict::LoadBound, Verdict::TransformBound];

const fn on(workers: usize, depth: usize) -> Settings {
    let mut settings = OFF;
    (settings.overlap, settings.workers, settings.depth) = (true, workers, depth);
    settings
}

const OFF: Settings = Settings { overlap: false, depth: 3, workers: 1 };

/// Loops with data sets; the first `BOTH` also run with files.
const LOADS: [Load; 25] = [
    Load { caller: Caller::Computes, ..Load::new("use", |_| 1000, 4, COMPUTE) },
    Load { settings: OFF, ..Load::new("off", |_| 6000, 2, LOAD) },
    Load::new("loads", |_| 8000, 1, LOAD),
    Load { transform: 6, caller: Caller::Computes, ..Load::new("transform", |_| 0, 1, TRANSFORM) },
    Load { copy: 1500, caller: Caller::Enqueues(200), ..Load::new("copies", |_| 500, 0, COPY) },
    Load { caller: Caller::Lends, ..Load::new("held", |_| 1000, 0, HELD) },
    Load::new("late", |step| if step % 8 == 7 { 30_000 } else { 1000 }, 6, LATE),
    Load::new("start", |step| if step == 0 { 200_000 } else { 1000 }, 5, COMPUTE),
    Load { caller: Caller::Compiles, ..Load::new("first", |_| 8000, 1, LOAD) },
    Load { steps: 4000, ..Load::new("tiny", |_| 5, 0, LOAD) },
    Load::new("balanced", |_| 3000, 3, EVEN),
    Load::new("ragged", |step| 1000 + step * 7919 % 41 * 200, 4, EVEN),
    Load::new("bursts", |step| if step % 4 == 3 { 30_000 } else { 1000 }, 3, LOAD),
    Load { caller: Caller::Keeps(1), ..Load::new("keeps one", |_| 4000, 2, LOAD) },
    Load { caller: Caller::Keeps(2), ..Load::new("keeps all", |_| 4000, 6, HELD) },
    Load { caller: Caller::Keeps(20), settings: on(1, 22), ..Load::new("keeps 20", |_| 2000, 2, EVEN) },
    Load::new("hung", |step| if step == 30 { 900_000 } else { 1000 }, 3, LOAD),
    Load { caller: Caller::OneBatchEpochs, ..Load::new("one batch", |_| 4000, 2, COMPUTE) },
    Load { locked: true, ..Load::new("lock", |_| 3000, 1, LOAD) },
    Load { locked: true, settings: on(3, 4), ..Load::new("lock, 3", |_| 3000, 1, LOAD) },
    Load { settings: on(4, 8), ..Load::new("sleep, 4", |_| 16_000, 1, LOAD) },
    Load { transform: 6, settings: on(2, 4), ..Load::new("transform, 2", |_| 0, 1, TRANSFORM) },
    Load { settings: OFF, ..Load::new("off, even", |_| 3000, 3, EVEN) },
    Load { settings: OFF, caller: Caller::Computes, ..Load::new("off, use", |_| 0, 3, COMPUTE) },
    Load { caller: Caller::Enqueues(4000), copy: 125, ..Load::new("device", |_| 1000, 0, COMPUTE) },
];
const BOTH: usize = 8;

impl Load {
    const fn new(name: &'static str, read: fn(u64) -> u64, train: u64, truth: &'static [Verdict]) -> Self {
        let (files, locked, transform, copy, caller) = (false, false, 0, 0, Caller::Waits);
        Self {
            name,
            files,
            read,
            locked,
            transform,
            train,
            copy,
            caller,
            settings: on(1, 3),
            steps: 100,
            truth,
        }
    }
}

#[derive(Clone)]
struct Disk {
    read: fn(u64) -> u64,
    records: u64,
    lock: Option<Arc<Mutex<()>>>,
}

impl Dataset for Disk {
    fn records(&self) -> u64 {
        self.records
    }

    fn record_bytes(&self) -> usize {
        RECORD
    }

    fn read(&mut self, plan: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        self.wait(plan.first());
        Ok(out.len())
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
}

impl Disk {
    fn wait(&self, step: u64) {
        let time = (self.read)(step);
        let _turn = self.lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        if time > 0 {
            sleep(Duration::from_micros(time));
        }
    }
}

/// Uses a processor for this many rounds; longer if others use it too.
fn compute(rounds: u64) {
    let mut x = 1_u64;
    for _ in 0..rounds {
        x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
}

/// Runs the load, and returns its report.
fn measure(load: &Load, rounds_a_ms: u64) -> Result<Report, BoxError> {
    let Settings { overlap, depth, workers } = load.settings;
    let epochs = load.caller == Caller::OneBatchEpochs;
    let records = if epochs { 1 } else { load.steps };
    let lock = load.locked.then(Arc::default);
    let disk = Disk { read: load.read, records, lock };
    let plan = Plan::builder(records).batch(1).build()?;
    let folder = tempfile::tempdir()?;
    let mut builder = if load.files {
        let path = folder.path().join("records.bin");
        let mut bytes = vec![0; RECORD * usize::try_from(records)?];
        // Each record has its number.
        bytes
            .chunks_mut(RECORD)
            .zip(0_u64..)
            .for_each(|(record, n)| record[..8].copy_from_slice(&n.to_le_bytes()));
        std::fs::write(&path, bytes)?;
        let wait = disk.clone();
        let data = Records::open([&path], RECORD)?;
        Loader::builder(data, plan).transform(per_record(RECORD, move |record, _, _| {
            wait.wait(u64::from_le_bytes(record[..8].try_into()?));
            Ok(())
        }))
    } else {
        Loader::builder(disk, plan)
    };
    builder = builder.overlap(overlap).depth(depth);
    if workers > 1 {
        builder = builder.workers(workers);
    }
    if load.transform > 0 {
        let rounds = load.transform * rounds_a_ms;
        builder = builder.transform(per_record(RECORD, move |_, _, _| {
            compute(rounds);
            Ok(())
        }));
    }
    if let Caller::Enqueues(us) = load.caller {
        return enqueue(builder, load.copy, us);
    }
    let mut loader = builder.build()?;
    let train = || match load.caller {
        Caller::Computes => compute(load.train * rounds_a_ms),
        _ => sleep(Duration::from_millis(load.train)),
    };
    match load.caller {
        Caller::Keeps(most) => {
            let mut kept = VecDeque::new();
            for batch in loader.epoch(0) {
                kept.push_back(batch?);
                train();
                if kept.len() > most {
                    kept.pop_front();
                }
            }
        }
        Caller::Lends => thread::scope(|scope| -> Result<(), BoxError> {
            let (lend, lent) = mpsc::channel();
            scope.spawn(move || {
                for batch in lent {
                    sleep(Duration::from_millis(12));
                    drop(batch);
                }
            });
            for batch in loader.epoch(0) {
                lend.send(batch?)?;
            }
            Ok(())
        })?,
        _ => {
            for epoch in 0..if epochs { load.steps } else { 1 } {
                for (step, batch) in loader.epoch(epoch).enumerate() {
                    let _batch = batch?;
                    train();
                    if step == 0 && load.caller == Caller::Compiles {
                        sleep(Duration::from_secs(2));
                    }
                }
            }
        }
    }
    Ok(loader.report())
}

/// Copies take time, and the device computes for `us` while the host only enqueues.
#[cfg(target_os = "linux")]
fn enqueue(builder: LoaderBuilder, delay_us: u32, us: u32) -> Result<Report, BoxError> {
    use twinbuf_cuda_sim::{Options, Sim};
    // Before each piece of a copy there is a random delay: on average half of the longest.
    let sim = Sim::start(Options { delay_us, pieces: 8, ..Options::seeded(1) });
    let ctx = twinbuf::cuda::context(0)?;
    let stream = ctx.new_stream()?;
    let mut loader = builder.cuda(ctx).build()?;
    for batch in loader.epoch(0) {
        let batch = batch?;
        // SAFETY: the stream outlives the batch, and the kernel is enqueued before that is dropped.
        let address = unsafe { batch.on_raw(stream.cu_stream()) }?;
        let launched = sim.control().kernel_read(stream.cu_stream(), address, batch.len(), us);
        launched.map_err(|code| format!("the kernel was not launched: {code}"))?;
    }
    stream.synchronize()?;
    let report = loader.report();
    loader.close()?;
    Ok(report)
}

#[cfg(not(target_os = "linux"))]
fn enqueue(_: LoaderBuilder, _: u32, _: u32) -> Result<Report, BoxError> {
    Err("the software driver needs Linux".into())
}

/// The load with what its report says to try, and the part of the time that this saves at most.
fn changed(load: &Load, report: &Report) -> Option<(Load, f64)> {
    if let Some((settings, saves)) = report.to_try() {
        return Some((Load { settings, ..*load }, saves));
    }
    let advice = report.advice();
    let (before, after) = advice.split_once("It saves at most ")?;
    if !["`epochs(..)`", "drop each batch"].iter().any(|change| before.contains(change)) {
        return None;
    }
    let saves: f64 = after.split_once(" %")?.0.parse().ok()?;
    Some((Load { caller: Caller::Waits, ..*load }, saves / 100.0))
}

/// What came of the runs of one load.
#[derive(Default)]
struct Found {
    /// Verdicts other than `Unmeasured`, those that are right, and reports.
    verdicts: usize,
    right: usize,
    reports: Vec<String>,
    /// Bounds, and those that were broken.
    bounds: usize,
    broken: usize,
    /// The most that was saved, and that was said at most.
    saved: f64,
    said: f64,
}

impl Found {
    /// Measures the load once, and tries what its report says.
    fn run(&mut self, load: &Load, run: &Run) -> Result<(), BoxError> {
        let Run { pairs, rounds_a_ms, texts, .. } = *run;
        let report = measure(load, rounds_a_ms)?;
        let verdict = report.verdict();
        self.verdicts += usize::from(verdict != Verdict::Unmeasured);
        self.right += usize::from(load.truth.contains(&verdict));
        if texts || !load.truth.contains(&verdict) {
            self.reports.push(format!("{report:#}"));
        }
        let Some((change, said)) = changed(load, &report) else { return Ok(()) };
        let (mut before, mut after) = (vec![report.wall.as_secs_f64()], Vec::new());
        for _ in 0..pairs {
            before.push(measure(load, rounds_a_ms)?.wall.as_secs_f64());
            after.push(measure(&change, rounds_a_ms)?.wall.as_secs_f64());
        }
        if after.is_empty() {
            return Ok(());
        }
        let [least, most] =
            [f64::min, f64::max].map(|choose| before.iter().copied().reduce(choose).unwrap_or(0.0));
        let best = after.into_iter().fold(f64::INFINITY, f64::min);
        self.bounds += 1;
        self.broken += usize::from(best < before[0] * (1.0 - said) - (most - least));
        (self.saved, self.said) = (self.saved.max(1.0 - best / before[0]), self.said.max(said));
        Ok(())
    }
}

/// What to run.
struct Run {
    runs: usize,
    pairs: usize,
    /// Whether to print the report of each run, not only those that are wrong.
    texts: bool,
    wanted: Vec<String>,
    rounds_a_ms: u64,
}

/// All runs of the loads, while this many other threads are busy.
fn beside(busy: usize, run: &Run) -> Result<(), BoxError> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..busy {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    compute(1000);
                }
            });
        }
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        println!("beside {busy} busy threads, {} runs, load average {}", run.runs, load.trim());
        let done = table(run);
        stop.store(true, Ordering::Relaxed);
        done
    })
}

fn table(run: &Run) -> Result<(), BoxError> {
    println!("{:<20} {:>6} {:>7} {:>7} {:>9} {:>9}", "loop", "right", "bounds", "broken", "said", "saved");
    let mut all = Vec::new();
    let files = LOADS[..BOTH].iter().map(|load| Load { files: true, ..*load });
    for load in LOADS.into_iter().chain(files) {
        let name = if load.files { format!("{}, files", load.name) } else { load.name.to_string() };
        if !run.wanted.is_empty() && !run.wanted.iter().any(|wanted| *wanted == load.name) {
            continue;
        }
        let mut found = Found::default();
        for _ in 0..run.runs {
            found.run(&load, run)?;
        }
        let percent = |part: f64| format!("{:.0} %", part * 100.0);
        println!(
            "{name:<20} {:>4}/{} {:>7} {:>7} {:>9} {:>9}",
            found.right,
            run.runs,
            found.bounds,
            found.broken,
            percent(found.said),
            percent(found.saved)
        );
        found.reports.iter().for_each(|report| println!("    {}", report.replace('\n', "\n    ")));
        all.push(found);
    }
    let sum = |of: fn(&Found) -> usize| all.iter().map(of).sum::<usize>();
    let (told, right, runs) = (sum(|found| found.verdicts), sum(|found| found.right), all.len() * run.runs);
    let (bounds, broken) = (sum(|found| found.bounds), sum(|found| found.broken));
    println!("{told} verdicts in {runs} runs, {right} right; {broken} of {bounds} bounds broken\n");
    Ok(())
}

fn main() -> Result<(), BoxError> {
    let (mut busy, mut runs, mut pairs, mut texts, mut wanted) = (vec![0], 5, 3, false, Vec::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--busy" => busy = words.next().unwrap_or_default().split(',').flat_map(str::parse).collect(),
            "--runs" => runs = words.next().unwrap_or_default().parse()?,
            "--pairs" => pairs = words.next().unwrap_or_default().parse()?,
            "--texts" => texts = true,
            "--bench" => {}
            _ => wanted.push(word),
        }
    }
    // The fastest is the one that no other program interrupted.
    let timed = (0..100).map(|_| {
        let started = Instant::now();
        compute(100_000);
        started.elapsed()
    });
    let fastest = timed.min().unwrap_or_default();
    let rounds_a_ms = 100_000 * 1_000_000 / u64::try_from(fastest.as_nanos())?.max(1);
    let run = Run { runs, pairs, texts, wanted, rounds_a_ms };
    busy.into_iter().try_for_each(|busy| beside(busy, &run))
}
