//! Follows what the report recommends, for 21 loads whose truth is known, quiet and beside busy threads. Each load is
//! measured. If its report recommends something, the same loop runs with that and without it in turn; the table compares
//! the time that it saves with the time that was promised. To keep the settings is right advice where nothing is gained by
//! any. "Up to" promises nothing. The load on a device uses the software driver of the tests: its
//! copies take time, and nothing else about it is a GPU's.
//!
//! ```sh
//! cargo bench --bench replay [-- --busy 0,1,2,4 --runs 5 load...]    # default: quiet, 5 runs, all loads
//! ```

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use twinbuf::observe::{Settings, Verdict};
use twinbuf::transform::per_record;
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan, Report};

const RECORD: usize = 4096;
/// Pairs of runs, with and without what is recommended.
const PAIRS: usize = 3;

/// What a caller does with its batches.
#[derive(Clone, Copy, PartialEq)]
enum Caller {
    Drops,
    /// Waits for a device in place of computing.
    Waits,
    /// Keeps the last ones.
    Keeps(usize),
    /// Hands them to a thread that takes 5 ms for each.
    Lends,
    /// Asks for one epoch of one batch after the other.
    OneBatchEpochs,
    /// Enqueues 4 ms of work on a device.
    Enqueues,
}

/// What a load is made of.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    /// Microseconds that a batch is waited for.
    read: fn(u64) -> u64,
    /// Loads wait for one lock.
    locked: bool,
    /// Milliseconds of computing, in the transform and in the loop.
    transform: u64,
    train: u64,
    caller: Caller,
    settings: Settings,
    steps: u64,
    /// The truth: no option gains, and the verdict.
    keep: bool,
    verdicts: &'static [Verdict],
}

const LOAD: &[Verdict] = &[Verdict::LoadBound];
const COMPUTE: &[Verdict] = &[Verdict::ComputeBound];
const EVEN: &[Verdict] = &[Verdict::Balanced, Verdict::ComputeBound, Verdict::LoadBound];

const fn on(workers: usize, depth: usize) -> Settings {
    Settings { overlap: true, depth, workers }
}

const LOADS: [Load; 21] = [
    Load::new("disk", |_| 4000, 2, LOAD),
    Load { keep: true, ..Load::new("compute", |_| 1000, 4, COMPUTE) },
    Load { keep: true, caller: Caller::Waits, ..Load::new("balanced", |_| 3000, 3, EVEN) },
    Load::new("ragged", |step| 1000 + step * 7919 % 41 * 200, 4, EVEN),
    Load::new("bursts", |step| if step % 4 == 3 { 20_000 } else { 1000 }, 4, LOAD),
    Load { keep: true, caller: Caller::Lends, ..Load::new("lent", |_| 1000, 0, &[Verdict::HeldBound]) },
    Load { caller: Caller::Keeps(1), ..Load::new("keeps one", |_| 4000, 2, LOAD) },
    Load {
        keep: true,
        caller: Caller::Keeps(20),
        settings: on(1, 22),
        ..Load::new("keeps 20", |_| 2000, 2, EVEN)
    },
    Load { keep: true, ..Load::new("hung", |step| if step == 30 { 500_000 } else { 1000 }, 3, LOAD) },
    Load { caller: Caller::OneBatchEpochs, ..Load::new("one batch", |_| 4000, 2, LOAD) },
    Load { transform: 6, ..Load::new("cpu", |_| 0, 3, &[Verdict::TransformBound]) },
    Load { keep: true, locked: true, ..Load::new("lock", |_| 3000, 1, LOAD) },
    Load { keep: true, locked: true, settings: on(3, 4), ..Load::new("lock, 3", |_| 3000, 1, LOAD) },
    Load { keep: true, locked: true, settings: on(4, 8), ..Load::new("lock, 4", |_| 3000, 1, LOAD) },
    Load { settings: on(2, 4), ..Load::new("sleep, 2", |_| 8000, 1, LOAD) },
    Load { settings: on(4, 8), ..Load::new("sleep, 4", |_| 16_000, 1, LOAD) },
    Load {
        keep: true,
        transform: 6,
        settings: on(2, 4),
        ..Load::new("cpu, 2", |_| 0, 1, &[Verdict::TransformBound])
    },
    Load { settings: OFF, ..Load::new("off", |_| 3000, 3, EVEN) },
    Load { keep: true, settings: OFF, ..Load::new("off, cpu", |_| 0, 3, COMPUTE) },
    Load { keep: true, steps: 20_000, ..Load::new("nothing", |_| 0, 0, EVEN) },
    Load { keep: true, caller: Caller::Enqueues, ..Load::new("device", |_| 1000, 0, COMPUTE) },
];

const OFF: Settings = Settings { overlap: false, ..on(1, 3) };

impl Load {
    const fn new(name: &'static str, read: fn(u64) -> u64, train: u64, verdicts: &'static [Verdict]) -> Self {
        let (locked, transform, caller, settings, steps) = (false, 0, Caller::Drops, on(1, 3), 100);
        Self { name, read, locked, transform, train, caller, settings, steps, keep: false, verdicts }
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
        let step = plan.runs().next().map_or(0, |run| run.start);
        let time = (self.read)(step);
        let _turn = self.lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        if time > 0 {
            sleep(Duration::from_micros(time));
        }
        Ok(out.len())
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
}

/// Uses a processor for this many rounds; longer if others use it too.
fn compute(rounds: u64) {
    let mut x = 1_u64;
    for _ in 0..rounds {
        x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
}

/// Runs the load, and returns its report and the time until all of it was done.
fn measure(load: &Load, rounds_a_ms: u64) -> Result<(Report, Duration), BoxError> {
    let Settings { overlap, depth, workers } = load.settings;
    let epochs = load.caller == Caller::OneBatchEpochs;
    let records = if epochs { 1 } else { load.steps };
    let lock = load.locked.then(Arc::default);
    let disk = Disk { read: load.read, records, lock };
    let builder = Loader::builder(disk, Plan::builder(records).batch(1).build()?);
    let mut builder = builder.overlap(overlap).depth(depth);
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
    if load.caller == Caller::Enqueues {
        return enqueue(builder);
    }
    let mut loader = builder.build()?;
    let train = || compute(load.train * rounds_a_ms);
    let started = Instant::now();
    match load.caller {
        Caller::Waits => {
            for batch in loader.epoch(0) {
                let _batch = batch?;
                sleep(Duration::from_millis(load.train));
            }
        }
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
                    sleep(Duration::from_millis(5));
                    drop(batch);
                }
            });
            for batch in loader.epoch(0) {
                lend.send(batch?)?;
            }
            Ok(())
        })?,
        Caller::OneBatchEpochs => {
            for epoch in 0..load.steps {
                for batch in loader.epoch(epoch) {
                    let _batch = batch?;
                    train();
                }
            }
        }
        Caller::Drops | Caller::Enqueues => {
            for batch in loader.epoch(0) {
                let _batch = batch?;
                train();
            }
        }
    }
    Ok((loader.report(), started.elapsed()))
}

/// Copies of 0.5 ms, and the device computes for 4 ms while the host only enqueues.
#[cfg(target_os = "linux")]
fn enqueue(builder: twinbuf::loader::LoaderBuilder) -> Result<(Report, Duration), BoxError> {
    use twinbuf_cuda_sim::{Options, Sim};
    // Between two pieces of a copy there is a random delay: on average half of the longest.
    let sim = Sim::start(Options { delay_us: 125, pieces: 8, ..Options::seeded(1) });
    let ctx = twinbuf::cuda::context(0)?;
    let stream = ctx.new_stream()?;
    let mut loader = builder.cuda(ctx).build()?;
    let started = Instant::now();
    for batch in loader.epoch(0) {
        let batch = batch?;
        // SAFETY: the stream outlives the batch, and the kernel is enqueued before that is dropped.
        let address = unsafe { batch.on_raw(stream.cu_stream()) }?;
        let launched = sim.control().kernel_read(stream.cu_stream(), address, batch.len(), 4000);
        launched.map_err(|code| format!("the kernel was not launched: {code}"))?;
    }
    stream.synchronize()?;
    let (report, took) = (loader.report(), started.elapsed());
    loader.close()?;
    Ok((report, took))
}

#[cfg(not(target_os = "linux"))]
fn enqueue(_: twinbuf::loader::LoaderBuilder) -> Result<(Report, Duration), BoxError> {
    Err("the software driver needs Linux".into())
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// The load as its report advises, and what that promises; `None` if it advises nothing that can be done.
fn advised(load: &Load, report: &Report) -> Option<(Load, Option<f64>)> {
    let advice = report.advice();
    if ["let go of", "`epochs(..)`"].iter().any(|call| advice.contains(call)) {
        return Some((Load { caller: Caller::Drops, ..*load }, None));
    }
    let found = report.recommended()?;
    Some((Load { settings: found.settings, ..*load }, Some(found.gain()).filter(|_| !found.at_most)))
}

/// What came of the runs of one load.
#[derive(Default)]
struct Found {
    /// The parts of the time that were promised, and that were saved, and whether each promise was kept.
    promised: Vec<f64>,
    saved: Vec<f64>,
    kept: Vec<bool>,
    /// How often nothing was to be changed.
    keeps: usize,
    /// Verdicts, and those that are right.
    verdicts: usize,
    right: usize,
    /// Of the last run.
    advice: String,
}

impl Found {
    /// Measures the load once, and follows the advice.
    fn run(&mut self, load: &Load, rounds_a_ms: u64) -> Result<(), BoxError> {
        let (report, _) = measure(load, rounds_a_ms)?;
        self.advice = report.advice();
        let verdict = report.verdict();
        self.verdicts += usize::from(verdict != Verdict::Unmeasured);
        self.right += usize::from(load.verdicts.contains(&verdict));
        self.keeps += usize::from(self.advice.starts_with("Keep the settings"));
        let Some((change, promised)) = advised(load, &report) else { return Ok(()) };
        let mut pairs = Vec::new();
        for _ in 0..PAIRS {
            let before = measure(load, rounds_a_ms)?.1.as_secs_f64();
            pairs.push(1.0 - measure(&change, rounds_a_ms)?.1.as_secs_f64() / before);
        }
        let saved = median(pairs).unwrap_or_default();
        self.saved.push(saved);
        self.kept.extend(promised.map(|promised| promised - saved <= 0.08));
        self.promised.extend(promised);
        Ok(())
    }
}

fn percent(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{:.0} %", value * 100.0))
}

/// All runs of the loads, while this many other threads are busy.
fn beside(busy: usize, runs: usize, wanted: &[String], rounds_a_ms: u64) -> Result<(), BoxError> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..busy {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    compute(1000);
                }
            });
        }
        println!("beside {busy} busy threads, {runs} runs");
        let done = table(runs, wanted, rounds_a_ms);
        stop.store(true, Ordering::Relaxed);
        done
    })
}

fn table(runs: usize, wanted: &[String], rounds_a_ms: u64) -> Result<(), BoxError> {
    println!(
        "{:<10} {:>6} {:>6} {:>9} {:>9} {:>9} {:>9}  advice of the last run",
        "load", "change", "keep", "promised", "got", "slowest", "verdicts"
    );
    let (mut spoke, mut slower, mut promises, mut kept, mut wrong, mut lost) = (0, 0, 0, 0, 0, 0);
    for load in LOADS.iter().filter(|load| wanted.is_empty() || wanted.iter().any(|name| name == load.name)) {
        let mut found = Found::default();
        for _ in 0..runs {
            found.run(load, rounds_a_ms)?;
        }
        let Found { promised, saved, kept: each_kept, keeps, verdicts, right, advice } = found;
        let least = saved.iter().copied().min_by(f64::total_cmp);
        slower += saved.iter().filter(|saved| **saved < -0.03).count();
        promises += promised.len();
        kept += each_kept.iter().filter(|kept| **kept).count();
        wrong += verdicts - right;
        let (times, got) = (saved.len(), median(saved));
        let changed = if got > Some(0.0) { times } else { 0 };
        spoke += usize::from((changed + if load.keep { keeps } else { 0 }) * 2 > runs);
        lost += if load.keep { 0 } else { keeps };
        println!(
            "{:<10} {times:>6} {keeps:>6} {:>9} {:>9} {:>9} {:>9}  {advice}",
            load.name,
            percent(median(promised)),
            percent(got),
            percent(least),
            format!("{right}/{verdicts}")
        );
    }
    println!(
        "right advice for {spoke} loads; {kept} of {promises} promises kept within 8 points; {slower} more than 3 % \
         slower; {lost} times kept what could gain; {wrong} verdicts wrong\n"
    );
    Ok(())
}

fn main() -> Result<(), BoxError> {
    let (mut busy, mut runs, mut wanted) = (vec![0], 5, Vec::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--busy" => busy = words.next().unwrap_or_default().split(',').flat_map(str::parse).collect(),
            "--runs" => runs = words.next().unwrap_or_default().parse()?,
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
    busy.into_iter().try_for_each(|busy| beside(busy, runs, &wanted, rounds_a_ms))
}
