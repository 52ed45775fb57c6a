//! `twinbuf probe`: the gain of overlap on these files, on this disk, with steps of a given length.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use twinbuf::mmap::{ReadMode, ReadOptions, Reader};
use twinbuf::observe::Verdict;
use twinbuf::{BoxError, Loader, Plan, Records, Report, Shuffle};

use crate::data::{Format, Shape, parts, tells};
use crate::search::{Found, Setting};
use crate::text;

/// Measures what overlapping the reading of these files with compute would gain
///
/// Reads a part of an epoch twice: first each batch followed by its compute, then with the next batch read ahead. A
/// busy loop replaces the compute.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The files, one data set
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Records in a batch
    #[arg(long, value_name = "B", value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Milliseconds of compute per training step
    #[arg(long, value_name = "C", value_parser = milliseconds)]
    compute_ms: Duration,
    #[command(flatten)]
    shape: Shape,
    /// Name of the tensor in safetensors files, or of the array in .npz files
    #[arg(long, value_name = "NAME")]
    tensor: Option<String>,
    /// Order of the records: sequential, chunks:N (runs of N records, shuffled) or records (shuffled one by one)
    #[arg(long, default_value = "sequential", value_parser = Way::from_str)]
    order: Way,
    /// Batches to measure
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Number of rounds; each round reads the batches both ways
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Drop the files from the page cache first, to measure the disk
    #[arg(long)]
    cold: bool,
    /// Read past the page cache, with the loader's `ReadMode::Direct`
    #[arg(long, conflicts_with = "cold")]
    direct: bool,
    /// Write JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy)]
struct Way(Shuffle);

impl FromStr for Way {
    type Err = String;

    fn from_str(way: &str) -> Result<Self, String> {
        let chunks = way.strip_prefix("chunks:").map(str::parse);
        Ok(Self(match (way, chunks) {
            ("sequential", _) => Shuffle::None,
            ("records", _) => Shuffle::Full,
            (_, Some(Ok(records @ 1..))) => Shuffle::Chunks { records },
            _ => return Err("wanted sequential, chunks:N with N at least 1, or records".to_string()),
        }))
    }
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(ms) if (0.0..=60_000.0).contains(&ms) => Ok(Duration::from_secs_f64(ms / 1000.0)),
        _ => Err("wanted 0 to 60000 milliseconds".to_string()),
    }
}

/// The measurement. Times are in seconds; with several rounds they are medians.
#[derive(Serialize)]
struct Figures {
    records: u64,
    record_bytes: u64,
    batch: u64,
    /// Batches measured; `epoch_steps` is for a whole epoch.
    steps: u64,
    epoch_steps: u64,
    rounds: u64,
    /// The maximum percentage of the bytes to read that was in the page cache before a run. `None` if the system does
    /// not report it, or if the reads bypass the page cache.
    cached_percent: Option<f64>,
    /// The mean per batch, like `compute_s`. The system reads ahead in a file that is read sequentially: most batches
    /// are then loaded at once and a few take all the time.
    load_s: f64,
    load_median_s: f64,
    load_min_s: f64,
    load_max_s: f64,
    /// Bytes per second at `load_s`.
    load_rate: f64,
    compute_s: f64,
    serial_s: f64,
    ideal_s: f64,
    overlapped_s: f64,
    gain_possible: f64,
    gain_measured: f64,
    /// The minimum and maximum of the rounds.
    gain_range: [f64; 2],
    verdict: String,
    /// Options of the loader.
    #[serde(flatten)]
    search: Option<Found>,
}

/// If a larger percentage of the bytes was in memory, the disk was not what was measured.
const COLD: f64 = 1.0;

pub(crate) fn run(options: &Options) -> Result<String, BoxError> {
    let (records, call) = open(options)?;
    let records = Arc::new(records);
    let plan = Plan::builder(records.len()).batch(options.batch).shuffle(options.order.0).build()?;
    let reader = |mode| Reader::new(records.clone(), &plan, ReadOptions::new().mode(mode));
    // The read mode that the loader does not choose for files of this size.
    let fits = reader(ReadMode::Auto).is_ok_and(|reader| reader.memory() == 0);
    let other = if fits { ReadMode::Direct } else { ReadMode::Pread };
    let base =
        Setting { mode: (options.direct && other == ReadMode::Direct).then_some(other), ..Setting::DEFAULT };
    let second = match reader(other) {
        Err(error) if base.mode.is_some() => return Err(error.into()),
        second => second.ok().map(|_| other),
    };
    let steps = options.steps.min(plan.steps());
    // Cached pages do not matter for reads past the page cache.
    let direct = base.mode.is_some() || !fits;
    let told = !direct && options.files.iter().all(|path| tells(path));
    // Cold files are evicted before each run, because the run before has filled the cache. Files larger than memory are
    // cold in each epoch.
    let evict =
        options.cold || !fits || cached(&records, &plan, steps, told).is_some_and(|part| part <= COLD);
    let one_run = |setting, overlap| -> Result<Run, BoxError> {
        if evict {
            records.evict()?;
        }
        one_run(&records, plan, steps, (setting, overlap), options.compute_ms)
    };

    let mut runs = Vec::new();
    for _ in 0..options.rounds {
        for overlap in [false, true] {
            if evict {
                records.evict()?;
            }
            let cached = cached(&records, &plan, steps, told);
            runs.push(Run { cached, ..one_run(base, overlap)? });
        }
    }
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let settings = Setting::all(options.order.0, second, processors);
    let mut measured: Vec<(Setting, Vec<f64>)> = settings.into_iter().map(|one| (one, Vec::new())).collect();
    for _ in 0..options.rounds {
        for (setting, walls) in &mut measured {
            walls.push(seconds(one_run(*setting, true)?.report.wall));
        }
    }
    measured.iter_mut().for_each(|(_, walls)| walls.sort_by(f64::total_cmp));
    let (mut figures, verdict) = figures(&records, &plan, &runs);
    let order = match options.order.0 {
        Shuffle::Full => ".shuffle(Shuffle::Full).seed(42)".to_string(),
        Shuffle::Chunks { records } => format!(".shuffle(Shuffle::Chunks {{ records: {records} }}).seed(42)"),
        _ => String::new(),
    };
    let plan = format!("Plan::builder(data.len()).batch({}){order}.build()?", options.batch);
    figures.search = Some(Found::new(&measured, &call, &plan));
    Ok(if options.json {
        serde_json::to_string_pretty(&figures)? + "\n"
    } else {
        let hinted = runs.iter().any(|run| run.report.reading.hints > 0);
        sentences(options, &figures, verdict, hinted)?
    })
}

/// The files, and the call that opens them in a program.
fn open(options: &Options) -> Result<(Records, String), BoxError> {
    let Options { files, shape, .. } = options;
    let format = shape.format(&files[0])?;
    let tensor = match (format, &options.tensor) {
        (Format::Npz | Format::Safetensors, Some(name)) => name.clone(),
        (_, Some(_)) => {
            let (path, format) = (files[0].display(), format.name());
            return Err(
                format!("{path}: --tensor: wanted safetensors or .npz: {format} has no tensors").into()
            );
        }
        (Format::Npz | Format::Safetensors, None) => {
            let (path, part) = (files[0].display(), format.parts().unwrap_or_default());
            let names: Vec<String> = parts(&files[0], format)?.map(|(name, _)| name).collect();
            match &names[..] {
                [only] => only.clone(),
                [] => return Err(format!("{path}: no {part}s: wanted at least one").into()),
                names => {
                    // A model may have thousands of tensors.
                    let (shown, more) = names.split_at(names.len().min(16));
                    let shown = shown.join(", ");
                    let more =
                        if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
                    return Err(format!("{path}: --tensor: wanted one of its {part}s: {shown}{more}").into());
                }
            }
        }
        (Format::LlmC, None) if shape.sequence.is_none() => {
            let path = files[0].display();
            return Err(format!(
                "{path}: --sequence: wanted the tokens of a sequence, found tokens without one"
            )
            .into());
        }
        (Format::Raw, None) if shape.record_bytes.is_none() && shape.dtype.is_none() => {
            let path = files[0].display();
            return Err(format!(
                "{path}: has no header that says what its records are: give --record-bytes or --dtype"
            )
            .into());
        }
        (Format::Raw, None) if shape.record_bytes.is_some() => {
            // Its header is not a record.
            if let found @ (Format::Npy | Format::Npz | Format::Safetensors | Format::LlmC) =
                Format::of(&files[0])?
            {
                let (path, found) = (files[0].display(), found.name());
                return Err(format!(
                    "{path}: --record-bytes: wanted a file of records alone, found {found}: leave it out"
                )
                .into());
            }
            String::new()
        }
        _ => String::new(),
    };
    let records = shape.open(files, format, &tensor)?;
    if records.len() < options.batch {
        let (wanted, found) = (options.batch, records.len());
        return Err(
            format!("--batch: wanted at most the {found} records that there are, found {wanted}").into()
        );
    }
    Ok((records, shape.call(files, format, &tensor)))
}

struct Run {
    report: Report,
    /// From requesting a batch to having it.
    loads: Vec<Duration>,
    /// In percent; `None` if the system does not report it.
    cached: Option<f64>,
}

fn one_run(
    records: &Arc<Records>,
    plan: Plan,
    steps: u64,
    (setting, overlap): (Setting, bool),
    compute: Duration,
) -> Result<Run, BoxError> {
    let builder = setting.apply(Loader::builder(records.clone(), plan));
    let mut loader = builder.overlap(overlap).build()?;
    let mut loads = Vec::new();
    let mut epoch = loader.epoch(0);
    for _ in 0..steps {
        let asked = Instant::now();
        let Some(batch) = epoch.next() else { break };
        let batch = batch?;
        loads.push(asked.elapsed());
        let end = Instant::now() + compute;
        while Instant::now() < end {
            std::hint::spin_loop();
        }
        drop(batch);
    }
    drop(epoch);
    let report = loader.report();
    loader.close()?;
    Ok(Run { report, loads, cached: None })
}

/// The percentage of the batches to read that is in the page cache.
fn cached(records: &Records, plan: &Plan, steps: u64, told: bool) -> Option<f64> {
    let (mut pages, mut resident) = (0, 0);
    for step in 0..steps {
        let found = records.residency_of(&plan.batch(0, step)?).ok().filter(|_| told)?;
        (pages, resident) = (pages + found.pages, resident + found.resident);
    }
    Some(text::percent(resident as f64, pages as f64))
}

fn figures(records: &Records, plan: &Plan, runs: &[Run]) -> (Figures, Verdict) {
    // Round by round, so a drift of the machine affects both sides of a ratio.
    let rounds: Vec<_> = runs.chunks_exact(2).map(|pair| (&pair[0], &pair[1])).collect();
    let serial = |value: fn(&Report) -> f64| sorted(rounds.iter().map(|(run, _)| value(&run.report)));
    let gain = sorted(rounds.iter().map(|(a, b)| seconds(a.report.wall) / seconds(b.report.wall)));
    let loads = sorted(rounds.iter().flat_map(|(run, _)| &run.loads).copied().map(seconds));
    let ends = |sorted: &[f64]| [sorted.first(), sorted.last()].map(|end| end.copied().unwrap_or_default());
    let [load_min_s, load_max_s] = ends(&loads);
    let load_s = median(&sorted(rounds.iter().map(|(run, _)| {
        let all: Duration = run.loads.iter().sum();
        seconds(all) / run.loads.len().max(1) as f64
    })));
    let batch_bytes = plan.batch_records() * records.record_bytes() as u64;
    let figures = Figures {
        records: records.len(),
        record_bytes: records.record_bytes() as u64,
        batch: plan.batch_records(),
        steps: rounds[0].0.report.batches,
        epoch_steps: plan.steps(),
        rounds: rounds.len() as u64,
        cached_percent: runs
            .iter()
            .map(|run| run.cached)
            .try_fold(0.0, |most: f64, run| Some(most.max(run?))),
        load_s,
        load_median_s: median(&loads),
        load_min_s,
        load_max_s,
        load_rate: batch_bytes as f64 / load_s,
        compute_s: median(&serial(|report| seconds(report.train.busy) / report.batches as f64)),
        serial_s: median(&serial(|report| seconds(report.wall))),
        ideal_s: median(&serial(|report| seconds(report.ideal()))),
        overlapped_s: median(&sorted(rounds.iter().map(|(_, run)| seconds(run.report.wall)))),
        // From the stages alone: no overlap hides the time between them.
        gain_possible: median(&serial(Report::possible_speedup)),
        gain_measured: median(&gain),
        gain_range: ends(&gain),
        verdict: String::new(),
        search: None,
    };
    // From the round with the median possible gain.
    let nearest = rounds.iter().map(|(run, _)| &run.report).min_by(|a, b| {
        let far = |report: &Report| (report.possible_speedup() - figures.gain_possible).abs();
        far(a).total_cmp(&far(b))
    });
    let verdict = nearest.map_or(Verdict::Unmeasured, Report::verdict);
    (Figures { verdict: verdict.to_string(), ..figures }, verdict)
}

/// At least a nanosecond: no run is faster, and every ratio is then a number.
fn seconds(time: Duration) -> f64 {
    time.as_secs_f64().max(1e-9)
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The median of sorted values; the upper one if two are in the middle.
fn median(sorted: &[f64]) -> f64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

fn sentences(
    options: &Options,
    found: &Figures,
    verdict: Verdict,
    hinted: bool,
) -> Result<String, std::fmt::Error> {
    let Figures { serial_s, ideal_s, overlapped_s, gain_possible, gain_measured, .. } = found;
    let mut out = String::new();
    writeln!(
        out,
        "{} of {} B; {} of {} ({}) measured, of {} an epoch, in {}",
        text::count(found.records, "record"),
        found.record_bytes,
        text::count(found.steps, "batch"),
        text::count(found.batch, "record"),
        text::bytes(found.batch * found.record_bytes),
        found.epoch_steps,
        text::count(found.rounds, "round"),
    )?;
    match found.cached_percent {
        _ if options.direct => writeln!(out, "past the page cache")?,
        None => writeln!(
            out,
            "WARNING: the system does not tell whether the page cache holds the files: perhaps no disk was measured"
        )?,
        Some(cached) if cached <= COLD => writeln!(out, "from a cold page cache")?,
        Some(cached) if options.cold => writeln!(
            out,
            "WARNING: {cached:.0} % could not be dropped from the page cache (only in memory, or mapped \
             elsewhere): the disk was not measured"
        )?,
        Some(cached) => writeln!(
            out,
            "WARNING: {cached:.0} % was in the page cache: the disk was not measured; --cold drops it first"
        )?,
    }
    let ms = |seconds: f64| seconds * 1000.0;
    writeln!(
        out,
        "load       {:>10.2} ms a batch (median {:.2}, least {:.2}, most {:.2}); {}/s",
        ms(found.load_s),
        ms(found.load_median_s),
        ms(found.load_min_s),
        ms(found.load_max_s),
        text::bytes(found.load_rate as u64),
    )?;
    writeln!(out, "compute    {:>10.2} ms a batch, by a busy loop", ms(found.compute_s))?;
    writeln!(out, "in turn    {:>10.2} ms, measured", ms(*serial_s))?;
    writeln!(out, "ideal      {:>10.2} ms, the longer of all load and all compute", ms(*ideal_s))?;
    writeln!(out, "overlapped {:>10.2} ms, measured", ms(*overlapped_s))?;
    let why = match verdict {
        Verdict::ComputeBound => "the compute decides, and a faster disk would change little",
        Verdict::DiskBound => "the disk decides, and overlap can hide no more than the compute",
        Verdict::Balanced => {
            "load and compute take about as long as each other, where overlap gains the most"
        }
        _ => "nothing was measured",
    };
    writeln!(out, "{verdict}: {why}.")?;
    let saved = |gain: &f64| (1.0 - 1.0 / gain) * 100.0;
    writeln!(
        out,
        "Overlap can save {:.0} % of the time at most ({gain_possible:.2} x as fast).",
        saved(gain_possible),
    )?;
    let [least, most] = found.gain_range;
    let range = if found.rounds > 1 { format!("; {least:.2} to {most:.2}") } else { String::new() };
    if *gain_measured > 1.0 {
        write!(out, "It saved {:.0} % ({gain_measured:.2} x as fast{range})", saved(gain_measured))?;
    } else {
        write!(out, "It saved nothing here ({gain_measured:.2} x as fast{range})")?;
    }
    let more = if *gain_measured > 1.05 * gain_possible { more(hinted) } else { "" };
    writeln!(out, "{more}.")?;
    if let Some(search) = &found.search {
        search.write(&mut out)?;
    }
    Ok(out)
}

/// The reason why more was gained than overlap allows.
fn more(hinted: bool) -> &'static str {
    if hinted {
        ": more than that, because the page hints make the reading itself faster, or because the machine was not \
         quiet"
    } else {
        // For sequential reads, past the page cache and out of it, the loader sends no hints.
        ": more than that, because the machine was not quiet"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three batches that the system had read ahead, and one that it had not.
    #[test]
    fn the_rate_is_that_of_all_batches() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.bin");
        std::fs::write(&path, [0; 4000]).unwrap();
        let records = Records::open([path], 100).unwrap();
        let plan = Plan::builder(records.len()).batch(10).build().unwrap();
        let run = || {
            let mut report = Report::default();
            report.batches = 4;
            Run { report, loads: [0, 0, 40, 0].map(Duration::from_millis).to_vec(), cached: None }
        };
        let (found, _) = figures(&records, &plan, &[run(), run()]);
        assert_eq!((found.load_s, found.load_rate), (0.01, 100_000.0), "1000 bytes in 10 ms");
        assert_eq!((found.load_min_s, found.load_max_s), (1e-9, 0.04));
    }

    #[test]
    fn page_hints_are_named_only_where_there_were_some() {
        assert!(more(true).contains("page hints"));
        assert!(!more(false).contains("page hints"));
    }
}
