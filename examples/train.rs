//! The main job: trains a small model over real files, three ways, and says what overlap gained.
//!
//! ```sh
//! cargo run --release --example train
//! cargo run --release --example train -- --data any.file --epochs 2 --json figures.json
//! ```
//!
//! Every run reads the same batches in the same order, from a cold page cache where the system lets us:
//!
//! * `serial`: read, then train, in turn;
//! * `double`: the next batch is read while this one is trained on, into the second slot;
//! * `double+willneed`: in addition, the pages of later batches are prefetched.
//!
//! The model is a bigram softmax regression over bytes, trained by plain SGD on a sample of each batch's
//! positions; with `--compute-ms X` a busy loop stands in for it.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use twinbuf::mmap::Residency;
use twinbuf::observe::Trace;
use twinbuf::{BoxError, LastBatch, Loader, Plan, Records, Report, Shuffle};

mod data;

/// Bytes of a record, the model's line of text.
const RECORD: usize = 1024;

/// Trains a small model over real files: read and train in turn, overlapped, and with page hints.
#[derive(Parser)]
#[command(name = "train")]
struct Args {
    /// Any file to train on, byte by byte [default: 512 MiB made once under target/twinbuf/data]
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Records of 1 KiB in a batch
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Epochs in a run
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Seed of the order of the batches
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How to run
    #[arg(long, value_enum, default_value_t = Mode::All)]
    mode: Mode,
    /// Rounds; each runs every mode once
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Host slots
    #[arg(long, default_value_t = 2)]
    depth: usize,
    /// Spend this long on each batch instead of training the model
    #[arg(long, value_name = "X")]
    compute_ms: Option<f64>,
    /// Write a Chrome trace of the last run to this file
    #[arg(long, value_name = "PATH", default_value = "target/twinbuf/trace.json")]
    trace: PathBuf,
    /// Write the figures here as JSON
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    All,
    Serial,
    Double,
    #[value(name = "double+willneed")]
    DoubleWillneed,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::All => "all",
            Mode::Serial => "serial",
            Mode::Double => "double",
            Mode::DoubleWillneed => "double+willneed",
        }
    }
}

/// One run of one mode.
#[derive(Serialize)]
struct Run {
    mode: &'static str,
    epoch_s: f64,
    load_s: f64,
    compute_s: f64,
    wait_s: f64,
    batches: u64,
    io_ops: u64,
    order_hash: String,
    /// `null` where a busy loop stood in for the model.
    final_loss: Option<f64>,
    #[serde(skip)]
    first_loss: Option<f64>,
    #[serde(skip)]
    report: Report,
    #[serde(skip)]
    cold: bool,
}

#[derive(Serialize)]
struct Figures {
    runs: Vec<Run>,
    /// The longer of load and compute in an epoch of a serial run: the median.
    ideal_s: Option<f64>,
    /// serial / ideal.
    gain_possible: Option<f64>,
    /// serial / double+willneed.
    gain_reached: Option<f64>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let first = &*error as &(dyn std::error::Error + 'static);
            let causes = std::iter::successors(Some(first), |error| error.source());
            eprintln!("train: {}", causes.map(ToString::to_string).collect::<Vec<_>>().join(": "));
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<(), BoxError> {
    if let Some(ms) = args.compute_ms {
        if !(0.0..=60_000.0).contains(&ms) {
            return Err(format!("--compute-ms: wanted 0 to 60000 milliseconds, found {ms}").into());
        }
    }
    let paths = match &args.data {
        Some(path) => vec![path.clone()],
        None => data::made()?,
    };
    let records = Arc::new(Records::options().partial(true).open(&paths, RECORD)?);
    if records.len() < args.batch {
        return Err(format!(
            "{}: wanted at least {} bytes (one batch of {} records), found {}",
            paths[0].display(),
            args.batch.saturating_mul(RECORD as u64),
            args.batch,
            records.bytes(),
        )
        .into());
    }
    let plan = Plan::builder(records.len())
        .batch(args.batch)
        .seed(args.seed)
        .shuffle(Shuffle::Chunks { records: args.batch })
        .last_batch(LastBatch::Keep)
        .build()?;
    println!(
        "{:.1} MiB in {} file(s); {} batches of {} KiB an epoch, {} epoch(s) a run, {} round(s)",
        mib(records.bytes()),
        paths.len(),
        plan.steps(0),
        args.batch,
        args.epochs,
        args.rounds,
    );
    for path in [Some(&args.trace), args.json.as_ref()].into_iter().flatten() {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        }
    }

    let modes = match args.mode {
        Mode::All => vec![Mode::Serial, Mode::Double, Mode::DoubleWillneed],
        mode => vec![mode],
    };
    let batches = [args.rounds, modes.len() as u64, args.epochs, plan.steps(0)];
    let bar = ProgressBar::new(batches.into_iter().fold(1, u64::saturating_mul));
    bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len} {msg} {eta}")?);
    let mut runs = Vec::new();
    for round in 0..args.rounds {
        for (i, &mode) in modes.iter().enumerate() {
            bar.set_message(mode.name());
            let last = round + 1 == args.rounds && i + 1 == modes.len();
            runs.push(one_run(args, &records, &plan, mode, last, &bar)?);
        }
    }
    bar.finish_and_clear();

    let figures = figures(runs);
    print_table(&figures, &modes);
    println!("trace: {} (open it at https://ui.perfetto.dev)", args.trace.display());
    if let Some(path) = &args.json {
        let write = || -> io::Result<()> {
            let mut file = BufWriter::new(fs::File::create(path)?);
            serde_json::to_writer_pretty(&mut file, &figures)?;
            writeln!(file)?;
            file.flush()
        };
        write().map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// Evicts the data from the page cache, trains over it, and measures.
fn one_run(
    args: &Args,
    records: &Arc<Records>,
    plan: &Plan,
    mode: Mode,
    traced: bool,
    bar: &ProgressBar,
) -> Result<Run, BoxError> {
    records.evict()?;
    let Residency { pages, resident } = records.residency()?;
    let cold = resident * 100 <= pages;

    let mut builder = Loader::builder(records.clone(), plan.clone())
        .depth(args.depth)
        .overlap(mode != Mode::Serial)
        .hints(mode == Mode::DoubleWillneed);
    if traced {
        builder = builder.trace(Trace::new(&args.trace).epochs(args.epochs));
    }
    let mut loader = builder.build()?;
    let mut model = Model::new();
    let mut losses = Vec::new();
    let mut order = FNV;
    for epoch in 0..args.epochs {
        for batch in loader.epoch(epoch) {
            let batch = batch?;
            for record in batch.chunks_exact(RECORD) {
                order = fnv(order, &record[..8]);
            }
            match args.compute_ms {
                Some(ms) => busy(Duration::from_secs_f64(ms / 1000.0)),
                None => losses.push(model.train(&batch)),
            }
            bar.inc(1);
        }
    }
    let report = loader.report();
    loader.close()?;
    let tenth = losses.len().div_ceil(10);
    let per_epoch = |time: Duration| time.as_secs_f64() / args.epochs as f64;
    Ok(Run {
        mode: mode.name(),
        epoch_s: per_epoch(report.wall),
        load_s: per_epoch(report.read.busy),
        compute_s: per_epoch(report.train.busy),
        wait_s: per_epoch(report.train.waiting),
        batches: report.batches,
        io_ops: report.io_calls,
        order_hash: format!("{order:016x}"),
        final_loss: mean(&losses[losses.len() - tenth..]),
        first_loss: losses.first().copied(),
        report,
        cold,
    })
}

fn busy(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

fn figures(runs: Vec<Run>) -> Figures {
    // Round by round: a drift of the machine then affects both sides of a ratio.
    let of = |mode: Mode| runs.iter().filter(move |run| run.mode == mode.name());
    // What perfect overlap of a run would take.
    let ideal = |run: &Run| run.load_s.max(run.compute_s);
    let ideals: Vec<f64> = of(Mode::Serial).map(ideal).collect();
    let possible: Vec<f64> = of(Mode::Serial).map(|run| run.epoch_s / ideal(run)).collect();
    let reached: Vec<f64> = of(Mode::Serial)
        .zip(of(Mode::DoubleWillneed))
        .map(|(serial, double)| serial.epoch_s / double.epoch_s)
        .collect();
    let (ideal_s, gain_possible, gain_reached) = (median(&ideals), median(&possible), median(&reached));
    Figures { runs, ideal_s, gain_possible, gain_reached }
}

fn print_table(figures: &Figures, modes: &[Mode]) {
    if figures.runs.iter().any(|run| !run.cold) {
        println!("warm: not a disk test (the data could not be evicted from the page cache)");
    }
    println!("medians, seconds an epoch:");
    println!("mode               epoch    load  compute    wait  io_ops  order hash        loss");
    for mode in modes {
        let runs: Vec<&Run> = figures.runs.iter().filter(|run| run.mode == mode.name()).collect();
        let of = |value: fn(&Run) -> f64| {
            median(&runs.iter().map(|run| value(run)).collect::<Vec<_>>()).unwrap_or_default()
        };
        let Some(run) = runs.first() else { continue };
        let loss = match (run.first_loss, run.final_loss) {
            (Some(first), Some(last)) => format!("{first:.3} -> {last:.3}"),
            _ => "(busy loop)".to_string(),
        };
        println!(
            "{:<16} {:>7.3} {:>7.3}  {:>7.3} {:>7.3} {:>7}  {}  {loss}",
            mode.name(),
            of(|run| run.epoch_s),
            of(|run| run.load_s),
            of(|run| run.compute_s),
            of(|run| run.wait_s),
            run.io_ops,
            run.order_hash,
        );
    }
    let same = figures
        .runs
        .windows(2)
        .all(|pair| pair[0].order_hash == pair[1].order_hash && pair[0].final_loss == pair[1].final_loss);
    println!("{}", if same { "same batches and same loss in every run" } else { "THE RUNS DIFFER" });
    match (figures.ideal_s, figures.gain_possible, figures.gain_reached) {
        (Some(ideal), Some(possible), Some(reached)) => println!(
            "{}: perfect overlap of serial's load and compute would take {ideal:.3} s, {possible:.2} x faster; \
             double+willneed is {reached:.2} x faster, {:.0} % of that{}.",
            verdict(figures),
            reached / possible * 100.0,
            if reached > 1.02 * possible {
                ": the page hints make the reading itself faster too"
            } else {
                ""
            },
        ),
        (Some(ideal), Some(possible), None) => println!(
            "{}: perfect overlap would take {ideal:.3} s, {possible:.2} x faster than serial.",
            verdict(figures),
        ),
        _ => println!("{}.", verdict(figures)),
    }
}

/// The verdict of the run with the median time, of the serial ones if there are any.
fn verdict(figures: &Figures) -> twinbuf::observe::Verdict {
    let mut runs: Vec<&Run> = figures.runs.iter().filter(|run| run.mode == figures.runs[0].mode).collect();
    runs.sort_by(|a, b| a.epoch_s.total_cmp(&b.epoch_s));
    runs[runs.len() / 2].report.verdict()
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The hash of nothing, and of bytes behind others: FNV-1a, 64 bits (Fowler, Noll, Vo).
const FNV: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The probability of each byte after each byte: softmax of a table of logits, trained by SGD.
struct Model {
    logits: Vec<[f32; 256]>,
}

/// Every how many bytes the model looks at one pair of neighbours.
const SAMPLE_EVERY: usize = 1201;
const LEARNING_RATE: f32 = 0.5;

impl Model {
    fn new() -> Self {
        Self { logits: vec![[0.0; 256]; 256] }
    }

    /// One pass over a sample of the batch's byte pairs; the mean loss in nats, before each update.
    fn train(&mut self, batch: &[u8]) -> f64 {
        let mut sum = 0.0;
        let mut pairs = 0u32;
        for pair in batch.windows(2).step_by(SAMPLE_EVERY) {
            sum += f64::from(self.step(pair[0], pair[1]));
            pairs += 1;
        }
        sum / f64::from(pairs.max(1))
    }

    fn step(&mut self, context: u8, next: u8) -> f32 {
        let row = &mut self.logits[usize::from(context)];
        let most = row.iter().copied().fold(f32::MIN, f32::max);
        let mut weights = [0.0f32; 256];
        let mut total = 0.0;
        for (weight, &logit) in weights.iter_mut().zip(row.iter()) {
            *weight = (logit - most).exp();
            total += *weight;
        }
        let loss = total.ln() + most - row[usize::from(next)];
        let scale = LEARNING_RATE / total;
        for (logit, weight) in row.iter_mut().zip(weights) {
            *logit -= scale * weight;
        }
        row[usize::from(next)] += LEARNING_RATE;
        loss
    }
}
