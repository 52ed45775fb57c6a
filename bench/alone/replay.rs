//! Predicted against measured time: ten loads, each measured with four settings and without overlap; each report
//! predicts the time of the other settings. Then two loads on a device that is the software driver of the tests: its
//! copies take time, and nothing else about it is a GPU's.
//!
//! Settings take turns, in a new order in each of five rounds. A prediction is compared with what was measured in the same
//! round, and the table has the medians of these errors. For a quiet machine.
//!
//! ```sh
//! cargo bench --bench replay [-- load...]
//! ```

use std::hint::black_box;
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use twinbuf::observe::{Settings, Verdict};
use twinbuf::transform::per_record;
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan, Report};

const STEPS: u64 = 80;
const ROUNDS: usize = 5;
const RECORD: usize = 4096;

/// What a caller does with its batches.
#[derive(Clone, Copy, PartialEq)]
enum Caller {
    Drops,
    /// Waits for a device in place of computing.
    Waits,
    /// Keeps each until it has the next one.
    KeepsOne,
    /// Hands them to a thread that takes 5 ms for each.
    Lends,
    /// Asks for one epoch of one batch after the other.
    OneBatchEpochs,
}

#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    /// Microseconds that a batch is waited for.
    read: fn(u64) -> u64,
    /// Milliseconds of computing, in the transform and in the loop.
    transform: u64,
    train: u64,
    caller: Caller,
    /// With one worker and two slots.
    verdict: Verdict,
}

const LOADS: [Load; 10] = [
    Load::new("disk", |_| 4000, 2, Verdict::DiskBound),
    Load::new("compute", |_| 1000, 4, Verdict::ComputeBound),
    Load { caller: Caller::Waits, ..Load::new("balanced", |_| 3000, 3, Verdict::Balanced) },
    Load::new("jitter", |step| 1000 + step * 7919 % 41 * 200, 4, Verdict::DiskBound),
    Load::new("each fourth", |step| if step % 4 == 3 { 20_000 } else { 1000 }, 4, Verdict::DiskBound),
    Load { caller: Caller::Lends, ..Load::new("held", |_| 1000, 0, Verdict::HeldBound) },
    Load { caller: Caller::KeepsOne, ..Load::new("kept", |_| 4000, 2, Verdict::DiskBound) },
    Load::new("hung read", |step| if step == 30 { 500_000 } else { 1000 }, 3, Verdict::DiskBound),
    Load { caller: Caller::OneBatchEpochs, ..Load::new("one batch", |_| 4000, 2, Verdict::DiskBound) },
    Load { transform: 6, ..Load::new("cpu", |_| 0, 3, Verdict::TransformBound) },
];

impl Load {
    const fn new(name: &'static str, read: fn(u64) -> u64, train: u64, verdict: Verdict) -> Self {
        Self { name, read, transform: 0, train, caller: Caller::Drops, verdict }
    }
}

#[derive(Clone)]
struct Disk(fn(u64) -> u64, u64);

impl Dataset for Disk {
    fn records(&self) -> u64 {
        self.1
    }

    fn record_bytes(&self) -> usize {
        RECORD
    }

    fn read(&mut self, plan: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        let step = plan.runs().next().map_or(0, |run| run.start);
        let time = (self.0)(step);
        if time > 0 {
            sleep(Duration::from_micros(time));
        }
        Ok(out.len())
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
}

/// Uses a processor for this many milliseconds; longer if others use it too.
fn compute(rounds: u64) {
    let mut x = 1_u64;
    for _ in 0..rounds {
        x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
}

fn measure(load: &Load, settings: Settings, rounds_a_ms: u64) -> Result<Report, BoxError> {
    let Settings { overlap, depth, workers } = settings;
    let epochs = load.caller == Caller::OneBatchEpochs;
    let records = if epochs { 1 } else { STEPS };
    let disk = Disk(load.read, records);
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
    let mut loader = builder.build()?;
    let train = || compute(load.train * rounds_a_ms);
    match load.caller {
        Caller::Drops => {
            for batch in loader.epoch(0) {
                let _batch = batch?;
                train();
            }
        }
        Caller::Waits => {
            for batch in loader.epoch(0) {
                let _batch = batch?;
                sleep(Duration::from_millis(load.train));
            }
        }
        Caller::KeepsOne => {
            let mut kept = None;
            for batch in loader.epoch(0) {
                let batch = batch?;
                train();
                kept.replace(batch);
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
            for epoch in 0..STEPS {
                for batch in loader.epoch(epoch) {
                    let _batch = batch?;
                    train();
                }
            }
        }
    }
    Ok(loader.report())
}

/// Copies of 4 ms; or of 0.5 ms, and the device computes for 4 ms while the host only enqueues.
#[cfg(target_os = "linux")]
fn upload(enqueued: bool, rounds_a_ms: u64) -> Result<Report, BoxError> {
    use twinbuf_cuda_sim::{Options, Sim};
    // Between two pieces of a copy there is a random delay: on average half of the longest.
    let delay_us = 125;
    let pieces = (if enqueued { 500 } else { 4000 }) * 2 / delay_us;
    let sim = Sim::start(Options { delay_us, pieces, ..Options::seeded(1) });
    let ctx = twinbuf::cuda::context(0)?;
    let stream = ctx.new_stream()?;
    let disk = Disk(|_| 1000, STEPS);
    let mut loader = Loader::builder(disk, Plan::builder(STEPS).batch(1).build()?).cuda(ctx).build()?;
    for batch in loader.epoch(0) {
        let batch = batch?;
        if enqueued {
            // SAFETY: the stream outlives the batch, and the kernel is enqueued before that is dropped.
            let address = unsafe { batch.on_raw(stream.cu_stream()) }?;
            let launched = sim.control().kernel_read(stream.cu_stream(), address, batch.len(), 4000);
            launched.map_err(|code| format!("the kernel was not launched: {code}"))?;
        } else {
            batch.on::<u8>(&stream)?;
            stream.synchronize()?; // the copy is there
            compute(rounds_a_ms);
        }
    }
    stream.synchronize()?;
    let report = loader.report();
    loader.close()?;
    Ok(report)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn main() -> Result<(), BoxError> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let started = Instant::now();
    compute(20_000_000);
    let rounds_a_ms = 20_000_000 * 1000 / u64::try_from(started.elapsed().as_micros())?.max(1);
    let on = |workers, depth| Settings { overlap: true, depth, workers };
    let settings = [on(1, 2), on(1, 4), on(4, 2), on(4, 4), Settings { overlap: false, ..on(1, 2) }];
    let name = |settings: Settings| match settings {
        Settings { overlap: false, .. } => "off".to_string(),
        Settings { depth, workers, .. } => format!("{workers}w d{depth}"),
    };
    print!("{:<12} {:<15} {:<9}", "load", "verdict", "measured");
    settings.iter().for_each(|&to| print!(" {:>16}", name(to)));
    println!();
    let (mut errors, mut wrong) = (Vec::new(), 0);
    for load in LOADS.iter().filter(|load| wanted.is_empty() || wanted.iter().any(|name| name == load.name)) {
        let mut rounds: Vec<Vec<Report>> = Vec::new();
        for round in 0..ROUNDS {
            let mut reports = Vec::new();
            for at in 0..settings.len() {
                // A new order, and then that of the settings.
                let at = (at + round) % settings.len();
                reports.push((at, measure(load, settings[at], rounds_a_ms)?));
            }
            reports.sort_by_key(|(at, _)| *at);
            rounds.push(reports.into_iter().map(|(_, report)| report).collect());
        }
        for (from, &at) in settings.iter().enumerate() {
            let mut runs: Vec<&Report> = rounds.iter().map(|round| &round[from]).collect();
            runs.sort_by_key(|report| report.wall);
            let report = runs[runs.len() / 2];
            let verdict = if from == 0 { report.verdict().to_string() } else { String::new() };
            wrong += u32::from(from == 0 && report.verdict() != load.verdict);
            let shown = if from == 0 { load.name } else { "" };
            print!("{shown:<12} {verdict:<15} {:<9}", name(at));
            for (to, &settings) in settings.iter().enumerate() {
                if from == to {
                    print!(" {:>13.0} ms", report.wall.as_secs_f64() * 1e3);
                    continue;
                }
                let found = rounds.iter().filter_map(|round| {
                    let predicted = round[from].predict(settings)?.wall;
                    Some(predicted.as_secs_f64() / round[to].wall.as_secs_f64() - 1.0)
                });
                let Some(error) = median(found.collect()) else {
                    print!(" {:>16}", "none");
                    continue;
                };
                // Of the default settings, and of all.
                errors.push((
                    from,
                    error.abs(),
                    format!("{} from {} to {}", load.name, name(at), name(settings)),
                ));
                print!(" {:>16}", format!("{:+.1} %", error * 100.0));
            }
            println!();
        }
    }
    #[cfg(target_os = "linux")]
    for (name, enqueued, verdict) in
        [("transfer", false, Verdict::TransferBound), ("enqueued", true, Verdict::ComputeBound)]
    {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            let report = upload(enqueued, rounds_a_ms)?;
            wrong += u32::from(report.verdict() != verdict);
            println!("{name:<12} {:<15} {}", report.verdict().to_string(), report.advice());
        }
    }
    for (what, only) in [("from the defaults", 1), ("from any", usize::MAX)] {
        let mut found: Vec<_> = errors.iter().filter(|(from, ..)| *from < only).collect();
        found.sort_by(|a, b| a.1.total_cmp(&b.1));
        if found.is_empty() {
            continue;
        }
        let [median, worst] = [found.len() / 2, found.len() - 1].map(|at| found[at].1 * 100.0);
        println!("{what}: median error {median:.1} %, worst {worst:.1} % ({})", found[found.len() - 1].2);
    }
    println!("{wrong} verdicts wrong");
    Ok(())
}
