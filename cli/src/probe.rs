//! `twinbuf probe`: what training on these files waits for, with steps of a given length, and which options of the loader
//! make it faster.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use twinbuf::mmap::{Cut, ReadMode, Reader};
use twinbuf::observe::Settings;
use twinbuf::{BoxError, Loader, Plan, Records, Report, Shuffle};

use crate::data::{Format, Shape, parts, tells};
use crate::text;

/// Measures what training on these files waits for, and which options of the loader make it faster
///
/// Reads a part of an epoch twice, as a first and as a later epoch, with the loader's defaults and a busy loop for the
/// compute. If the report of every later epoch names the same options to try, measures them in turn with the defaults.
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
    #[arg(long, value_name = "NAME", conflicts_with_all = ["dtype", "record_bytes"])]
    tensor: Option<String>,
    /// The order of the records: sequential, chunks:N (runs of N records, shuffled), window:N,W (shuffled
    /// among W chunks of N records) or full (shuffled one by one)
    #[arg(long, default_value = "sequential", value_parser = Way::from_str)]
    order: Way,
    /// Batches to measure
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Rounds: each reads a first and a later epoch with a new loader; times are medians. Options to try take two more
    /// each
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Drop the files from the page cache before each round, to measure the disk
    #[arg(long)]
    cold: bool,
    /// Read past the page cache, with the loader's `ReadMode::Direct`
    #[arg(long, conflicts_with = "cold")]
    direct: bool,
    /// Write the report of the last round before options are tried, as a page for any browser. Replaces only an older
    /// page or an empty file; may be a pipe
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
    /// Write JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy)]
struct Way(Shuffle);

impl FromStr for Way {
    type Err = String;

    fn from_str(way: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|&number: &u64| number > 0);
        let found = match way.split_once(':') {
            None if way == "sequential" => Some(Shuffle::None),
            None if way == "full" => Some(Shuffle::Full),
            Some(("chunks", records)) => number(records).map(|records| Shuffle::Chunks { records }),
            Some(("window", sizes)) => sizes.split_once(',').and_then(|(records, chunks)| {
                Some(Shuffle::Window { chunk_records: number(records)?, window_chunks: number(chunks)? })
            }),
            _ => None,
        };
        let wanted = "wanted sequential, chunks:N, window:N,W with numbers of at least 1, or full";
        found.map(Self).ok_or_else(|| wanted.to_string())
    }
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(ms) if (0.0..=60_000.0).contains(&ms) => Ok(Duration::from_secs_f64(ms / 1000.0)),
        _ => Err("wanted 0 to 60000 milliseconds".to_string()),
    }
}

/// What was measured; times in seconds.
#[derive(Serialize)]
struct Figures {
    records: u64,
    record_bytes: u64,
    batch: u64,
    /// Batches measured; `epoch_steps` is for a whole epoch.
    steps: u64,
    epoch_steps: u64,
    rounds: u64,
    /// How many percent of the bytes to read were in the page cache before the first epoch: the highest of all rounds.
    /// `None` if the system does not tell, or if the files are read past the page cache.
    cached_percent: Option<f64>,
    #[serde(skip)]
    past: bool,
    compute_s: f64,
    first: Epoch,
    second: Epoch,
    /// What the reports of later epochs say to try, if all rounds agree.
    tried: Option<Tried>,
    /// The lines of a program.
    lines: Vec<String>,
}

/// The first reading of the batches, or the second one. Times are medians over all rounds.
#[derive(Serialize)]
struct Epoch {
    /// The average time to load a batch.
    load_s: f64,
    /// Bytes a second at `load_s`.
    load_rate: f64,
    wall_s: f64,
    /// The shortest and the longest `wall_s` of all rounds.
    wall_range: [f64; 2],
    /// The time that the loop waited for batches.
    wait_s: f64,
    verdict: String,
}

/// Options, measured in turn with the defaults.
#[derive(Serialize)]
struct Tried {
    calls: String,
    /// The shortest and the longest later epoch of all rounds, with the defaults (here) and with the options (`range`).
    defaults_range: [f64; 2],
    range: [f64; 2],
    /// Whether each later epoch was faster than all with the defaults, and the first one at most 2 % slower (medians).
    recommended: bool,
}

/// If a larger percentage of the bytes was in memory, the disk was not what was measured.
const COLD: f64 = 1.0;

/// The first epoch may take up to this many times as long where later ones are faster.
const FIRST: f64 = 1.02;

pub(crate) fn run(options: &Options) -> Result<String, BoxError> {
    let page = options.html.as_deref();
    let page_failed = |error| format!("{}: {error}", page.unwrap_or(Path::new("")).display());
    page.map_or(Ok(()), writable).map_err(page_failed)?;
    let (records, call) = open(options)?;
    let records = Arc::new(records);
    let plan = Plan::builder(records.len()).batch(options.batch).shuffle(options.order.0).build()?;
    let mode = if options.direct { ReadMode::Direct } else { ReadMode::Auto };
    let reader = Reader::new(records.ranges(), &plan, mode)?;
    // For reads past the page cache, it does not matter what the cache has.
    let past = options.direct || reader.memory() > 0;
    drop(reader);
    let steps = options.steps.min(plan.steps(0));
    let told = !past && options.files.iter().all(|path| tells(path));
    // If the files are not in the cache now, drop them from it before each round: each round fills it.
    let evict = options.cold || past || cached(&records, &plan, steps, told).is_some_and(|part| part <= COLD);
    let probe = Probe {
        records: &records,
        plan: plan.clone(),
        mode,
        steps,
        compute: options.compute_ms,
        evict,
        told,
    };

    let runs = (0..options.rounds).map(|_| probe.run(None)).collect::<Result<Vec<_>, _>>()?;
    let mut found = Figures { past, ..figures(&records, &plan, &runs) };
    let mut proposed = runs.iter().map(|run| run.second.to_try().map(|(settings, _)| settings));
    let first = proposed.next().flatten();
    if let Some(settings) = first.filter(|_| proposed.all(|other| other == first)) {
        found.tried = Some(probe.verify(settings, &runs)?);
    }
    let order = match options.order.0 {
        Shuffle::None => String::new(),
        shuffle => format!(".shuffle(Shuffle::{shuffle:?}).seed(42)"),
    };
    let tried = found.tried.as_ref().filter(|tried| tried.recommended);
    let calls = tried.map_or(String::new(), |tried| tried.calls.clone());
    let read_mode = if options.direct { ".read_mode(ReadMode::Direct)" } else { "" };
    found.lines = vec![
        format!("let data = {call};"),
        format!("let plan = Plan::builder(data.len()).batch({}){order}.build()?;", options.batch),
        format!("let mut loader = Loader::builder(data, plan){read_mode}{calls}.build()?;"),
    ];
    if let (Some(path), Some(run)) = (page, runs.last()) {
        let html = run.both.html();
        // Other than a regular file, such as a pipe, has no size.
        let is_other = fs::metadata(path).is_ok_and(|found| !found.is_file());
        let size = if is_other { 0 } else { html.len() as u64 };
        let fits = twinbuf::write::check_size(size).map_err(|(_, error)| error);
        let written = writable(path).and(fits).and_then(|()| text::said(fs::write(path, html)));
        written.map_err(page_failed)?;
    }
    Ok(if options.json { serde_json::to_string_pretty(&found)? + "\n" } else { sentences(options, &found)? })
}

/// Whether the page may be written, which is also asked before anything is measured: in a folder that exists, and over no
/// regular file but a page or an empty one. With `--html *.bin` the shell names a file of data here.
fn writable(path: &Path) -> io::Result<()> {
    const START: &[u8] = b"<!DOCTYPE html>";
    match fs::metadata(path) {
        Err(_) => {
            // More behind the name, such as `/`, makes it that of a folder.
            let is_last =
                |name: &OsStr| path.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes());
            if !path.file_name().is_some_and(is_last) {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            return fs::metadata(path.with_file_name(".")).map(drop);
        }
        Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(found) if !found.is_file() => return Ok(()),
        Ok(_) => {}
    }
    let mut start = Vec::new();
    fs::File::open(path)?.take(START.len() as u64).read_to_end(&mut start)?;
    if start.is_empty() || start == START {
        return Ok(());
    }
    Err(io::Error::other("wanted a page to write over, or no file, found something else"))
}

/// The files, and the call that opens them in a program.
fn open(options: &Options) -> Result<(Records, String), BoxError> {
    let Options { files, shape, .. } = options;
    let format = shape.format(&files[0])?;
    let wrong = |what: &str| Err(format!("{}: {what}", files[0].display()).into());
    let tensor = match (format.parts(), &options.tensor) {
        (Some(_), Some(name)) => name.clone(),
        (None, Some(_)) => {
            let format = format.name();
            return wrong(&format!("--tensor: wanted safetensors or .npz: {format} has no tensors"));
        }
        (Some(part), None) => {
            let names: Vec<String> = parts(&files[0], format, Cut::Rows)?.map(|(name, _)| name).collect();
            match &names[..] {
                [only] => only.clone(),
                [] => return wrong(&format!("no {part}s: wanted at least one")),
                names => {
                    // A model may have thousands of tensors.
                    let (shown, more) = names.split_at(names.len().min(16));
                    let shown = shown.join(", ");
                    let more =
                        if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
                    return wrong(&format!("--tensor: wanted one of its {part}s: {shown}{more}"));
                }
            }
        }
        (None, None) => String::new(),
    };
    match format {
        Format::LlmC if shape.sequence.is_none() => {
            return wrong("--sequence: wanted the tokens of a sequence, found tokens without one");
        }
        Format::Raw if shape.record_bytes.is_none() && shape.dtype.is_none() => {
            return wrong("has no header that says what its records are: give --record-bytes or --dtype");
        }
        Format::Raw if shape.record_bytes.is_some() => {
            // The header of such a file would be read as records.
            let found = Format::of(&files[0])?;
            if found != Format::Raw {
                let found = found.name();
                return wrong(&format!(
                    "--record-bytes: wanted a file of records alone, found {found}: leave it out"
                ));
            }
        }
        _ => {}
    }
    let records = shape.open(files, format, &tensor)?;
    if records.len() < options.batch {
        let (wanted, found) = (options.batch, records.len());
        return Err(
            format!("--batch: wanted at most the {found} records that there are, found {wanted}").into()
        );
    }
    Ok((records, shape.call(files, format, &tensor)))
}

/// How the files are read.
struct Probe<'a> {
    records: &'a Arc<Records>,
    plan: Plan,
    mode: ReadMode,
    steps: u64,
    compute: Duration,
    /// Whether to drop the files from the page cache before each round.
    evict: bool,
    /// Whether the system tells what is in the page cache.
    told: bool,
}

/// One round: two epochs of one loader.
struct Run {
    first: Report,
    second: Report,
    both: Report,
    /// In percent; `None` if the system does not tell.
    cached: Option<f64>,
}

impl Probe<'_> {
    /// A round with a new loader.
    fn run(&self, settings: Option<Settings>) -> Result<Run, BoxError> {
        if self.evict {
            self.records.evict()?;
        }
        let cached = cached(self.records, &self.plan, self.steps, self.told);
        let mut builder = Loader::builder(self.records.clone(), self.plan.clone()).read_mode(self.mode);
        if let Some(Settings { overlap, depth, workers }) = settings {
            builder = builder.overlap(overlap).depth(depth);
            // Only data sets that can be read by several threads take the option.
            builder = if workers > 1 { builder.workers(workers) } else { builder };
        }
        let mut loader = builder.build()?;
        let mut pass = || -> Result<Report, BoxError> {
            // Read epoch 0 both times. Another epoch would begin with other batches, which are not in the cache yet.
            for batch in loader.epoch(0).take(usize::try_from(self.steps)?) {
                let _batch = batch?;
                let end = Instant::now() + self.compute;
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
            }
            Ok(loader.report())
        };
        let (first, both) = (pass()?, pass()?);
        loader.close()?;
        let second = both.since(&first);
        Ok(Run { first, second, both, cached })
    }

    /// Measures the settings in turn with the defaults.
    fn verify(&self, settings: Settings, runs: &[Run]) -> Result<Tried, BoxError> {
        let (mut defaults, mut others) = (Vec::new(), Vec::new());
        for _ in runs {
            defaults.push(self.run(None)?);
            others.push(self.run(Some(settings))?);
        }
        let walls = |runs: &[Run], epoch: fn(&Run) -> &Report| sorted(runs.iter().map(epoch).map(wall));
        let [before, after] = [&defaults, &others].map(|runs| walls(runs, |run| &run.second));
        let [first, first_after] = [&defaults, &others].map(|runs| median(&walls(runs, |run| &run.first)));
        let all_before = sorted(before.iter().copied().chain(runs.iter().map(|run| wall(&run.second))));
        let (defaults_range, range) = (ends(&all_before), ends(&after));
        Ok(Tried {
            calls: calls(settings, runs.first().map_or(settings, |run| run.both.settings)),
            defaults_range,
            range,
            recommended: range[1] < defaults_range[0] && first_after <= first * FIRST,
        })
    }
}

/// The calls of the builder that set what differs from the defaults.
fn calls(Settings { overlap, depth, workers }: Settings, defaults: Settings) -> String {
    let mut calls = if overlap { String::new() } else { ".overlap(false)".to_string() };
    if workers != defaults.workers {
        calls.push_str(&format!(".workers({workers})"));
    }
    if depth != defaults.depth {
        calls.push_str(&format!(".depth({depth})"));
    }
    calls
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

fn figures(records: &Records, plan: &Plan, runs: &[Run]) -> Figures {
    let batch_bytes = plan.batch_records() * records.record_bytes() as u64;
    let epoch = |of: fn(&Run) -> &Report| {
        let reports: Vec<&Report> = runs.iter().map(of).collect();
        let walls = sorted(reports.iter().copied().map(wall));
        let loads = reports.iter().filter_map(|report| report.by_epoch.last());
        let load_s = median(&sorted(loads.map(|row| seconds(row.load) / row.batches.max(1) as f64)));
        // The verdict is that of the round with the median time.
        let mut by_wall = reports.clone();
        by_wall.sort_by(|a, b| wall(a).total_cmp(&wall(b)));
        Epoch {
            load_s,
            load_rate: batch_bytes as f64 / load_s.max(1e-9),
            wall_s: median(&walls),
            wall_range: ends(&walls),
            wait_s: median(&sorted(reports.iter().map(|report| seconds(report.train.waiting)))),
            verdict: by_wall
                .get(by_wall.len() / 2)
                .map(|report| report.verdict().to_string())
                .unwrap_or_default(),
        }
    };
    let compute = |run: &Run| seconds(run.both.train.busy) / run.both.batches.max(1) as f64;
    Figures {
        records: records.len(),
        record_bytes: records.record_bytes() as u64,
        batch: plan.batch_records(),
        steps: runs.first().map_or(0, |run| run.both.batches / 2),
        epoch_steps: plan.steps(0),
        rounds: runs.len() as u64,
        past: false,
        cached_percent: runs
            .iter()
            .map(|run| run.cached)
            .try_fold(0.0, |most: f64, run| Some(most.max(run?))),
        compute_s: median(&sorted(runs.iter().map(compute))),
        first: epoch(|run| &run.first),
        second: epoch(|run| &run.second),
        tried: None,
        lines: Vec::new(),
    }
}

/// The seconds that the batches of the report took.
fn wall(report: &Report) -> f64 {
    seconds(report.wall)
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

/// The least and the most of sorted values.
fn ends(sorted: &[f64]) -> [f64; 2] {
    [sorted.first(), sorted.last()].map(|end| end.copied().unwrap_or_default())
}

fn sentences(options: &Options, found: &Figures) -> Result<String, std::fmt::Error> {
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
        _ if found.past => writeln!(out, "past the page cache")?,
        None => writeln!(
            out,
            "WARNING: the system does not tell whether the page cache holds the files: perhaps no disk was measured"
        )?,
        Some(cached) if cached <= COLD => writeln!(out, "first from a cold page cache")?,
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
    writeln!(out, "compute {:.2} ms a batch, by a busy loop", ms(found.compute_s))?;
    writeln!(
        out,
        "{:<7} {:>13} {:>13} {:>10} {:>23} {:>16}  decides",
        "epoch", "load a batch", "read", "measured", "least to most", "of it waits"
    )?;
    for (name, epoch) in [("first", &found.first), ("later", &found.second)] {
        let [least, most] = epoch.wall_range.map(ms);
        writeln!(
            out,
            "{name:<7} {:>10.2} ms {:>11}/s {:>7.1} ms {:>20} ms {:>13.1} ms  {}",
            ms(epoch.load_s),
            text::bytes(epoch.load_rate as u64),
            ms(epoch.wall_s),
            format!("{least:.1} to {most:.1}"),
            ms(epoch.wait_s),
            epoch.verdict,
        )?;
    }
    match &found.tried {
        None => {
            writeln!(
                out,
                "The defaults: the reports of the rounds do not all name the same options to try."
            )?;
        }
        Some(Tried { calls, defaults_range, range, recommended }) => {
            let [[least, most], [before, before_most]] = [range, defaults_range].map(|range| range.map(ms));
            let found = if *recommended { "recommended" } else { "not faster in every round: the defaults" };
            writeln!(
                out,
                "{calls}: {found}. Later epochs {least:.1} to {most:.1} ms, with the defaults {before:.1} to \
                 {before_most:.1} ms."
            )?;
        }
    }
    found.lines.iter().try_for_each(|line| writeln!(out, "    {line}"))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read() {
        for (way, wanted) in [
            ("sequential", Some(Shuffle::None)),
            ("full", Some(Shuffle::Full)),
            ("chunks:20", Some(Shuffle::Chunks { records: 20 })),
            ("window:20,4", Some(Shuffle::Window { chunk_records: 20, window_chunks: 4 })),
            ("window:20", None),
            ("window:0,4", None),
            ("chunks:", None),
            ("", None),
        ] {
            assert_eq!(Way::from_str(way).ok().map(|way| way.0), wanted, "{way}");
        }
    }

    #[test]
    fn only_what_differs_from_the_defaults_is_set() {
        let defaults = Settings { overlap: true, depth: 3, workers: 1 };
        for (settings, wanted) in [
            (defaults, ""),
            (Settings { overlap: false, ..defaults }, ".overlap(false)"),
            (Settings { depth: 4, workers: 2, ..defaults }, ".workers(2).depth(4)"),
        ] {
            assert_eq!(calls(settings, defaults), wanted);
        }
    }
}
