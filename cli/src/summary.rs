//! The report of `twinbuf trace` on a timeline: totals per track, causes of waits, the longest stalls.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde::Serialize;

use crate::text;
use crate::timeline::{Stall, Timeline, Track};

/// The maximum number of stalls listed individually.
const MOST: usize = 10;

/// Totals of a timeline. The name of each time ends with its unit.
#[derive(Serialize)]
pub(crate) struct Summary {
    pub(crate) wall_s: f64,
    /// Epochs that have ended, also early.
    pub(crate) epochs: u64,
    pub(crate) steps: u64,
    pub(crate) tracks: Vec<Row>,
    pub(crate) waited_for: Vec<Cause>,
    pub(crate) stall_ms: f64,
    pub(crate) stalls: u64,
    pub(crate) longest: Vec<Wait>,
    pub(crate) unread_lines: u64,
    #[serde(serialize_with = "text::paths")]
    pub(crate) open_files: Vec<PathBuf>,
}

/// A track.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) process: String,
    pub(crate) track: String,
    pub(crate) busy_s: f64,
    pub(crate) waiting_s: f64,
    pub(crate) spans: u64,
    /// Whether its waits are the gaps between batches; otherwise it has spans of waits, or its caller did the work.
    pub(crate) waits_for_slots: bool,
}

/// The cause of the waits of a process's caller.
#[derive(Serialize)]
pub(crate) struct Cause {
    pub(crate) process: String,
    /// The work on the batch during this part of the waits; `None` if there was none.
    pub(crate) during: Option<String>,
    pub(crate) waited_s: f64,
}

/// One of the longest waits of a caller.
#[derive(Serialize)]
pub(crate) struct Wait {
    pub(crate) process: String,
    pub(crate) epoch: Option<u64>,
    pub(crate) step: Option<u64>,
    pub(crate) at_s: f64,
    pub(crate) waited_s: f64,
    pub(crate) during: Option<String>,
}

const SECOND: f64 = 1e6;

impl Summary {
    pub(crate) fn of(timeline: &Timeline, stall_ms: f64) -> Self {
        let (start, end) = timeline.extent();
        let process = |number: usize| timeline.processes[number].clone();
        let stalls: Vec<_> = timeline
            .stalls()
            .into_iter()
            .take_while(|Stall { span, .. }| span.long >= stall_ms * 1000.0)
            .collect();
        let spans = || timeline.tracks.iter().flat_map(|track| &track.spans);
        Self {
            wall_s: (end - start) / SECOND,
            epochs: spans().filter(|span| span.name == "epoch").count() as u64,
            steps: timeline.tracks.iter().map(Track::steps).sum(),
            tracks: timeline
                .tracks
                .iter()
                .map(|track| {
                    let of_caller = timeline.is_of_caller(track);
                    Row {
                        process: process(track.process),
                        track: track.name.clone(),
                        busy_s: track.busy() / SECOND,
                        waiting_s: if of_caller { 0.0 } else { track.waiting() / SECOND },
                        spans: track.spans.len() as u64,
                        waits_for_slots: !of_caller && track.waits().next().is_none(),
                    }
                })
                .collect(),
            waited_for: timeline
                .waited_for()
                .into_iter()
                .map(|((number, during), waited)| Cause {
                    process: process(number),
                    during: during.map(str::to_string),
                    waited_s: waited / SECOND,
                })
                .collect(),
            stall_ms,
            stalls: stalls.len() as u64,
            longest: stalls
                .iter()
                .take(MOST)
                .map(|stall| Wait {
                    process: process(stall.process),
                    epoch: stall.span.epoch,
                    step: stall.span.step,
                    at_s: (stall.span.start - start) / SECOND,
                    waited_s: stall.span.long / SECOND,
                    during: stall.during.first().map(|(name, _)| name.to_string()),
                })
                .collect(),
            unread_lines: timeline.unread,
            open_files: timeline.open.clone(),
        }
    }

    pub(crate) fn print(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        let of = |number: Option<u64>| number.map_or("-".to_string(), |number| number.to_string());
        writeln!(
            out,
            "{}, {} in {:.3} s",
            text::count(self.epochs, "epoch"),
            text::count(self.steps, "step"),
            self.wall_s
        )?;
        for path in &self.open_files {
            let path = text::printable(&path.to_string_lossy());
            writeln!(out, "{path}: has no end: the program was killed, still runs, or could not write on")?;
        }
        if self.unread_lines > 0 {
            writeln!(out, "{} could not be read", text::count(self.unread_lines, "line"))?;
        }
        let many = self.tracks.iter().any(|row| row.process != self.tracks[0].process);
        let named = |process: &str, what: &str| {
            text::printable(&if many { format!("{process}, {what}") } else { what.to_string() })
        };
        let width =
            self.tracks.iter().map(|row| named(&row.process, &row.track).len()).max().unwrap_or(0).max(5);
        writeln!(out, "\n{:width$}     busy s      %  waiting s      %   spans", "track")?;
        for row in &self.tracks {
            writeln!(
                out,
                "{:width$} {:>10.3} {:>6.1} {:>10.3} {:>6.1} {:>7}",
                named(&row.process, &row.track),
                row.busy_s,
                text::percent(row.busy_s, self.wall_s),
                row.waiting_s,
                text::percent(row.waiting_s, self.wall_s),
                row.spans
            )?;
        }
        writeln!(out, "\nwho waited for what")?;
        for Cause { process, during, waited_s } in &self.waited_for {
            let what = match during {
                Some(name) => format!("the caller, for `{name}` of the batch that it wanted"),
                None => "the caller, while no work on that batch went on".to_string(),
            };
            writeln!(out, "{waited_s:>10.3} s  {}", named(process, &what))?;
        }
        for Row { process, track, waiting_s, .. } in self.tracks.iter().filter(|row| row.waits_for_slots) {
            // The others also wait for a batch, or until a round may start.
            let slot = if track.contains("read") { ", for a free slot" } else { "" };
            let what = format!("`{track}`, between two batches{slot}");
            writeln!(out, "{waiting_s:>10.3} s  {}", named(process, &what))?;
        }
        let Self { stalls, stall_ms, .. } = self;
        if *stalls == 0 {
            writeln!(out, "\nno wait of {stall_ms} ms or longer")?;
            return Ok(out);
        }
        let longest = if self.longest.len() as u64 == *stalls { "" } else { "; the longest" };
        writeln!(out, "\n{} of {stall_ms} ms or longer{longest}:", text::count(*stalls, "wait"))?;
        writeln!(out, "  epoch     step       at s  waited ms  during")?;
        for wait in &self.longest {
            writeln!(
                out,
                "{:>7} {:>8} {:>10.3} {:>10.3}  {}",
                of(wait.epoch),
                of(wait.step),
                wait.at_s,
                wait.waited_s * 1000.0,
                named(&wait.process, wait.during.as_deref().unwrap_or("-"))
            )?;
        }
        Ok(out)
    }
}
