//! A trace read back: spans on tracks, and what each wait was for.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use twinbuf::BoxError;

/// Spans of the caller's waits. The waits of the other sides are the gaps between their spans.
const WAITS: [&str; 3] = ["queue_wait", "gpu_queue_wait", "gpu_copy_wait"];
/// A limit in microseconds that no run exceeds, about 30 years: sums below it are accurate enough and far from
/// infinite.
const LONGEST: f64 = 1e15;
/// The maximum bytes of a line. An event has a few hundred. Without a limit, a data file without line ends would have
/// to fit in memory.
const LINE: u64 = 1 << 20;
/// Microseconds: times have three digits behind the point.
const ROUNDING: f64 = 0.01;
/// Spans that consist of others, or of time that belongs to another loader.
const FRAMES: [&str; 3] = ["epoch", "chunk", "pause"];

/// A span of time, in microseconds since the earliest trace began.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) name: String,
    pub(crate) start: f64,
    pub(crate) long: f64,
    pub(crate) epoch: Option<u64>,
    pub(crate) step: Option<u64>,
}

impl Span {
    pub(crate) fn end(&self) -> f64 {
        self.start + self.long
    }

    pub(crate) fn is_wait(&self) -> bool {
        WAITS.contains(&&*self.name)
    }

    pub(crate) fn is_frame(&self) -> bool {
        FRAMES.contains(&&*self.name)
    }

    /// The time that the two overlap.
    fn common(&self, other: &Self) -> f64 {
        (self.end().min(other.end()) - self.start.max(other.start)).max(0.0)
    }
}

/// A row of the trace: the caller, one loading thread, or the copies to a device.
#[derive(Debug)]
pub(crate) struct Track {
    /// The index of its process.
    pub(crate) process: usize,
    pub(crate) name: String,
    /// In the order of their starts; longer spans first.
    pub(crate) spans: Vec<Span>,
}

impl Track {
    /// The track's work, in order.
    pub(crate) fn work(&self) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(|span| !span.is_wait() && !span.is_frame())
    }

    pub(crate) fn waits(&self) -> impl Iterator<Item = &Span> {
        self.spans.iter().filter(|span| span.is_wait())
    }

    /// The number of batches that were used, in spans `train`. A `pause` splits a use into several spans. A wait
    /// separates two uses, also if an epoch is repeated and both have the same step.
    pub(crate) fn steps(&self) -> u64 {
        let mut steps = 0;
        let (mut last, mut waited): (Option<&Span>, _) = (None, f64::NEG_INFINITY);
        for span in &self.spans {
            if span.is_wait() {
                waited = span.start;
            } else if span.name == "train" {
                let same = |last: &Span| (last.epoch, last.step) == (span.epoch, span.step);
                let continued = last.is_some_and(|last| same(last) && waited <= last.start);
                steps += u64::from(!continued);
                last = Some(span);
            }
        }
        steps
    }

    /// Microseconds of work.
    pub(crate) fn busy(&self) -> f64 {
        sum(self.work().map(|span| span.long))
    }

    /// Microseconds of waiting: its wait spans, without the loads that a waiting caller does itself. On a track without
    /// wait spans: the gaps between one batch's work and the next one's in the same epoch.
    pub(crate) fn waiting(&self) -> f64 {
        if self.waits().next().is_some() {
            let (mut waited, mut last) = (0.0, None);
            for span in self.spans.iter().filter(|span| !span.is_frame()) {
                if span.is_wait() {
                    waited += span.long;
                    last = Some(span);
                } else {
                    waited -= last.map_or(0.0, |wait: &Span| wait.common(span));
                }
            }
            return waited.max(0.0);
        }
        let work: Vec<_> = self.work().collect();
        let pairs = work.windows(2).filter(|pair| pair[0].epoch.is_some() && pair[0].epoch == pair[1].epoch);
        sum(pairs.map(|pair| (pair[1].start - pair[0].end()).max(0.0)))
    }
}

/// 0 for an empty iterator. `Iterator::sum` would return -0, and that would be printed.
fn sum(times: impl Iterator<Item = f64>) -> f64 {
    times.fold(0.0, |sum, time| sum + time)
}

/// One or several traces on one clock.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    /// Their names.
    pub(crate) processes: Vec<String>,
    /// Process by process.
    pub(crate) tracks: Vec<Track>,
    /// Lines that are no valid event: the last line of a killed program, or foreign text.
    pub(crate) unread: u64,
    /// Files without an end: their programs were killed, are still running or could not write on.
    pub(crate) open: Vec<PathBuf>,
}

/// A wait of the caller, and the work on its batch during the wait.
#[derive(Debug)]
pub(crate) struct Stall<'t> {
    pub(crate) process: usize,
    pub(crate) span: &'t Span,
    /// The work and its microseconds, the longest first.
    pub(crate) during: Vec<(&'t str, f64)>,
}

/// A line of the file. Fields that are not needed may be anything.
#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    name: String,
    ph: String,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    tid: u64,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Args,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Args {
    epoch: Option<u64>,
    step: Option<u64>,
    name: Option<String>,
    unix_us: Option<u64>,
}

impl Timeline {
    /// Reads traces and puts them on one clock. With one event per line, as [`twinbuf::observe::Trace`] writes it, a
    /// truncated file is read up to its end; otherwise it must be a whole JSON array.
    pub(crate) fn read(paths: &[PathBuf]) -> Result<Self, BoxError> {
        let (mut timeline, mut parts) = (Self::default(), Vec::new());
        let mut names = HashMap::new();
        for path in paths {
            parts.append(&mut timeline.read_one(path)?);
        }
        let first = parts.iter().filter_map(|part| part.origin).min().unwrap_or(0);
        for part in parts {
            // A trace without a start time is assumed to have started with the first one.
            let shift = part.origin.map_or(0.0, |origin| (origin - first) as f64);
            for (pid, process) in part.processes {
                let number = timeline.processes.len();
                let name = process.name.unwrap_or_else(|| format!("process {pid}"));
                // Those of two runs that are no ranks of each other may have one name.
                let same = names.entry(name.clone()).and_modify(|same| *same += 1).or_insert(1);
                timeline.processes.push(if *same > 1 { format!("{name} ({same})") } else { name });
                for (tid, (name, mut spans)) in process.tracks {
                    if spans.is_empty() {
                        continue;
                    }
                    for span in &mut spans {
                        span.start += shift;
                    }
                    spans.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.long.total_cmp(&a.long)));
                    let name = name.unwrap_or_else(|| format!("thread {tid}"));
                    timeline.tracks.push(Track { process: number, name, spans });
                }
            }
        }
        if timeline.tracks.is_empty() {
            return Err(no_spans(paths.first().map_or(Path::new(""), PathBuf::as_path)).into());
        }
        Ok(timeline)
    }

    /// Reads the traces of a file, which are several if it was joined from several.
    fn read_one(&mut self, path: &Path) -> Result<Vec<Part>, BoxError> {
        let failed = |error| format!("{}: {error}", path.display());
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let (mut parts, mut line) = (Vec::new(), Vec::new());
        let (mut starts, mut ends, unread) = (0, 0, self.unread);
        let within = |event: &Event| event.ts.abs().max(event.dur) < LONGEST;
        while file.by_ref().take(LINE).read_until(b'\n', &mut line).map_err(failed)? > 0 {
            if line.len() as u64 == LINE && !line.ends_with(b"\n") && parts.is_empty() {
                break;
            }
            let text = line.trim_ascii();
            let text = text.strip_prefix(b",").unwrap_or(text);
            let mut text = text.strip_suffix(b",").unwrap_or(text).trim_ascii();
            // A trace without an end has no line end either: the start of the next one follows its last event.
            if let Some(before) = text.strip_suffix(b"[") {
                (text, starts) = (before, starts + 1);
            }
            match text {
                b"" => {}
                b"]" => ends += 1,
                _ => match serde_json::from_slice(text) {
                    Ok(event) if within(&event) => add(&mut parts, event),
                    _ => self.unread += 1,
                },
            }
            line.clear();
        }
        // Another program has put it on other lines, such as `jq`. A pipe cannot be read again.
        if parts.is_empty() && file.rewind().is_ok() {
            if let Ok(events) = serde_json::from_reader::<_, Vec<Event>>(file) {
                (starts, ends, self.unread) = (1, 1, unread);
                events.into_iter().filter(within).for_each(|event| add(&mut parts, event));
            }
        }
        if parts.is_empty() {
            return Err(no_spans(path).into());
        }
        if ends < starts.max(1) {
            self.open.push(path.to_path_buf());
        }
        Ok(parts)
    }

    /// The start of the first span and the end of the last one, in microseconds.
    pub(crate) fn extent(&self) -> (f64, f64) {
        let spans = || self.tracks.iter().flat_map(|track| &track.spans);
        let start = spans().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let end = spans().map(Span::end).fold(f64::NEG_INFINITY, f64::max);
        (start.min(end), end)
    }

    /// Whether the caller did the work of a track itself, as without overlap: within its waits for the same batches. A thread
    /// also loads while its caller does not wait, and copies of a caller are in a process whose loads are the caller's.
    pub(crate) fn is_of_caller(&self, track: &Track) -> bool {
        let of_process = || self.tracks.iter().filter(|other| other.process == track.process);
        let mut waits: HashMap<_, Vec<&Span>> = HashMap::new();
        for wait in of_process().flat_map(Track::waits) {
            waits.entry((wait.epoch, wait.step)).or_default().push(wait);
        }
        let within = |work: &Span| {
            let waits = waits.get(&(work.epoch, work.step));
            waits.is_some_and(|waits| waits.iter().any(|wait| wait.common(work) > work.long - ROUNDING))
        };
        let has = |track: &Track, name| track.work().any(|work| work.name == name);
        let is_copies = has(track, "gpu_transfer");
        let loads =
            of_process().filter(|other| is_copies && !has(other, "gpu_transfer") && !has(other, "train"));
        let mut work = track.work().chain(loads.flat_map(Track::work));
        track.work().next().is_some() && work.all(within)
    }

    /// Every wait, the longest first.
    pub(crate) fn stalls(&self) -> Vec<Stall<'_>> {
        // The work on each batch. The caller may do it itself while it waits.
        let mut work: HashMap<_, Vec<&Span>> = HashMap::new();
        for track in &self.tracks {
            for span in track.work() {
                work.entry((track.process, span.epoch, span.step)).or_default().push(span);
            }
        }
        let mut stalls = Vec::new();
        for track in &self.tracks {
            for span in track.waits() {
                let batch = work.get(&(track.process, span.epoch, span.step)).map_or(&[][..], Vec::as_slice);
                let mut during: Vec<_> = batch
                    .iter()
                    .map(|work| (&*work.name, span.common(work)))
                    .filter(|found| found.1 > ROUNDING)
                    .collect();
                during.sort_by(|a, b| b.1.total_cmp(&a.1));
                stalls.push(Stall { process: track.process, span, during });
            }
        }
        stalls.sort_by(|a, b| b.span.long.total_cmp(&a.span.long));
        stalls
    }

    /// For each process, the microseconds that its caller waited, by the simultaneous work on the batch; `None` for
    /// the rest.
    pub(crate) fn waited_for(&self) -> BTreeMap<(usize, Option<&str>), f64> {
        let mut sums = BTreeMap::new();
        for Stall { process, span, during } in self.stalls() {
            let mut left = span.long;
            for (name, common) in during {
                *sums.entry((process, Some(name))).or_default() += common;
                left -= common;
            }
            // Spans of two tracks may overlap.
            *sums.entry((process, None)).or_default() += left.max(0.0);
        }
        sums
    }
}

fn no_spans(path: &Path) -> String {
    format!("{}: no spans: wanted a trace by twinbuf, one event a line", path.display())
}

/// The contents of one trace.
#[derive(Default)]
struct Part {
    /// The zero of its clock, in microseconds since 1970.
    origin: Option<u64>,
    processes: BTreeMap<u64, Process>,
}

#[derive(Default)]
struct Process {
    name: Option<String>,
    tracks: BTreeMap<u64, (Option<String>, Vec<Span>)>,
}

/// Adds an event to the last trace of a file. Its clock is the first event of each: a second one begins another trace.
fn add(parts: &mut Vec<Part>, event: Event) {
    let Event { name, ph, pid, tid, ts, dur, args } = event;
    if parts.last().is_none_or(|part| part.origin.is_some() && name == "clock_origin") {
        parts.push(Part::default());
    }
    let Some(part) = parts.last_mut() else { return };
    let process = part.processes.entry(pid).or_default();
    match (&*ph, &*name) {
        ("M", "process_name") => process.name = args.name,
        ("M", "thread_name") => process.tracks.entry(tid).or_default().0 = args.name,
        ("M", "clock_origin") => part.origin = args.unix_us,
        ("X", _) => {
            let Args { epoch, step, .. } = args;
            // An epoch has its number in its name.
            let name = if name.starts_with("epoch ") { "epoch".to_string() } else { name };
            let span = Span { name, start: ts, long: dur.max(0.0), epoch, step };
            process.tracks.entry(tid).or_default().1.push(span);
        }
        _ => {}
    }
}
