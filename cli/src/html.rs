//! The timeline as a self-contained page: SVG in HTML, no script, no network.
//!
//! Time runs like text, in lines of equal length, so hundreds of steps can be read without horizontal scrolling. Each
//! line has a row for every track.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use crate::summary::{Cause, Row, Summary, Wait};
use crate::text;
use crate::timeline::{Span, Timeline, Track};

/// The start of a page.
pub(crate) const START: &str = "<!DOCTYPE html>";
/// Steps per line of the timeline, unless there are too many lines.
const STEPS: usize = 16;
/// The maximum number of lines: in a longer run each line has more steps.
const LINES: usize = 100;
/// Pixels: width of a line, of the names before it, height of a row and of the gap between two rows.
const WIDTH: f64 = 1200.0;
const NAMES: f64 = 130.0;
const ROW: f64 = 18.0;
const GAP: f64 = 4.0;
/// Space above the rows, for epochs and times.
const HEAD: f64 = 26.0;

/// Colors that color-blind readers can distinguish too (Okabe and Ito, "Color Universal Design", 2008).
const COLOURS: [(&str, &str); 7] = [
    ("train", "#009e73"),
    ("disk_load", "#0072b2"),
    ("transform", "#cc79a7"),
    ("gpu_transfer", "#e69f00"),
    ("queue_wait", "url(#wait)"),
    ("gpu_queue_wait", "url(#wait)"),
    ("gpu_copy_wait", "url(#wait)"),
];
const OTHERS: &str = "#999999";

const STYLE: &str = "body{font:14px/1.4 system-ui,sans-serif;margin:1.5em;max-width:1200px;color:#222}\
h1{font-size:1.3em}h2{font-size:1.1em;margin-top:1.5em}table{border-collapse:collapse}\
td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}\
td.t,th.t{text-align:left}svg{display:block;width:100%;margin-bottom:10px}\
svg text{font:11px system-ui,sans-serif;fill:#444}svg text.in{fill:#fff;text-anchor:middle}\
.legend span{margin-right:1.2em;white-space:nowrap}.legend svg{display:inline;width:28px;height:14px;margin:0 4px -2px 0}\
.note{color:#a33}";

/// The page.
pub(crate) fn page(timeline: &Timeline, summary: &Summary) -> String {
    let mut out = String::new();
    // Writing to a `String` does not fail.
    let _ = write_page(&mut out, timeline, summary);
    out
}

fn write_page(out: &mut String, timeline: &Timeline, summary: &Summary) -> fmt::Result {
    let Summary { wall_s, epochs, steps, .. } = summary;
    writeln!(
        out,
        "{START}\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>twinbuf timeline</title>\n\
         <style>{STYLE}</style></head><body>\n<h1>{}, {} in {wall_s:.3} s</h1>",
        text::count(*epochs, "whole epoch"),
        text::count(*steps, "step"),
    )?;
    for note in summary.notes() {
        writeln!(out, "<p class=\"note\">{}</p>", Escaped(&note))?;
    }
    tables(out, summary)?;
    writeln!(out, "<h2>Timeline</h2>")?;
    legend(out, timeline)?;
    let (start, end) = timeline.extent();
    let steps = timeline.tracks.iter().map(steps_of).max().unwrap_or(0);
    let lines = steps.div_ceil(STEPS).clamp(1, LINES);
    let long = ((end - start) / lines as f64).max(1.0);
    let epochs = epochs_of(timeline);
    for line in 0..lines {
        let from = start + line as f64 * long;
        Line { timeline, epochs: &epochs, origin: start, from, to: from + long }.write(out)?;
    }
    writeln!(out, "</body></html>")
}

fn steps_of(track: &Track) -> usize {
    let mut steps: Vec<_> =
        track.spans.iter().filter_map(|span| span.step.map(|step| (span.epoch, step))).collect();
    steps.sort_unstable();
    steps.dedup();
    steps.len()
}

/// The start of each epoch, from its first span: the span of the whole epoch is missing if the epoch never ended.
fn epochs_of(timeline: &Timeline) -> BTreeMap<u64, f64> {
    let mut epochs = BTreeMap::new();
    for span in timeline.tracks.iter().flat_map(|track| &track.spans) {
        if let Some(epoch) = span.epoch {
            let start = epochs.entry(epoch).or_insert(span.start);
            *start = span.start.min(*start);
        }
    }
    epochs
}

fn tables(out: &mut String, summary: &Summary) -> fmt::Result {
    writeln!(
        out,
        "<h2>Tracks</h2><table><tr><th class=\"t\">process<th class=\"t\">track<th>busy s<th>%\
         <th>waiting s<th>%<th>spans</tr>"
    )?;
    for Row { process, track, busy_s, waiting_s, spans, .. } in &summary.tracks {
        writeln!(
            out,
            "<tr><td class=\"t\">{}<td class=\"t\">{}<td>{busy_s:.3}<td>{:.1}<td>{waiting_s:.3}<td>{:.1}\
             <td>{spans}</tr>",
            Escaped(process),
            Escaped(track),
            text::percent(*busy_s, summary.wall_s),
            text::percent(*waiting_s, summary.wall_s),
        )?;
    }
    writeln!(
        out,
        "</table>\n<h2>What the caller waited for</h2><table><tr><th class=\"t\">process\
         <th class=\"t\">work on the batch meanwhile<th>waited s</tr>"
    )?;
    for Cause { process, during, waited_s } in &summary.waited_for {
        let during = during.as_deref().unwrap_or("none");
        writeln!(
            out,
            "<tr><td class=\"t\">{}<td class=\"t\">{}<td>{waited_s:.3}</tr>",
            Escaped(process),
            Escaped(during)
        )?;
    }
    writeln!(out, "</table>")?;
    if summary.stalls == 0 {
        return writeln!(out, "<p>No wait of {} ms or longer.</p>", summary.stall_ms);
    }
    writeln!(
        out,
        "<h2>Longest of {} of {} ms or longer</h2><table><tr><th class=\"t\">process<th>epoch<th>step<th>at s\
         <th>waited ms<th class=\"t\">during</tr>",
        text::count(summary.stalls, "wait"),
        summary.stall_ms,
    )?;
    let number = |number: &Option<u64>| number.map(|number| number.to_string()).unwrap_or_default();
    for Wait { process, epoch, step, at_s, waited_s, during } in &summary.longest {
        writeln!(
            out,
            "<tr><td class=\"t\">{}<td>{}<td>{}<td>{at_s:.3}<td>{:.3}<td class=\"t\">{}</tr>",
            Escaped(process),
            number(epoch),
            number(step),
            waited_s * 1000.0,
            Escaped(during.as_deref().unwrap_or_default()),
        )?;
    }
    writeln!(out, "</table>")
}

fn colour(name: &str) -> &'static str {
    COLOURS.iter().find(|(known, _)| *known == name).map_or(OTHERS, |(_, colour)| colour)
}

/// Every kind of span in the timeline, with its color; and the pattern of the waits, for all pictures of the page.
fn legend(out: &mut String, timeline: &Timeline) -> fmt::Result {
    let spans = timeline.tracks.iter().flat_map(|track| &track.spans);
    let mut names: Vec<&str> = spans.filter(|span| !span.is_frame()).map(|span| &*span.name).collect();
    names.sort_unstable();
    names.dedup();
    writeln!(
        out,
        "<p class=\"legend\"><svg aria-hidden=\"true\" style=\"width:0;height:0\"><defs><pattern id=\"wait\" \
         width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"6\" height=\"6\" fill=\"#fbe3d6\"/><rect width=\"3\" height=\"6\" fill=\"#d55e00\"/>\
         </pattern></defs></svg>"
    )?;
    for name in names {
        writeln!(
            out,
            "<span><svg><rect width=\"28\" height=\"14\" fill=\"{}\"/></svg>{}</span>",
            colour(name),
            Escaped(name)
        )?;
    }
    writeln!(out, "<span>(times in ms; numbers in the bars are steps)</span></p>")
}

/// One line of the timeline, from one time to another, in microseconds.
struct Line<'t> {
    timeline: &'t Timeline,
    epochs: &'t BTreeMap<u64, f64>,
    /// The zero of the time axis.
    origin: f64,
    from: f64,
    to: f64,
}

impl Line<'_> {
    fn x(&self, time: f64) -> f64 {
        let part = ((time - self.from) / (self.to - self.from)).clamp(0.0, 1.0);
        NAMES + part * (WIDTH - NAMES)
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        let Self { timeline, from, to, .. } = self;
        let height = HEAD + timeline.tracks.len() as f64 * (ROW + GAP);
        writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {height}\">")?;
        let tick = tick(to - from);
        let first = ((from - self.origin) / tick).ceil() as u64;
        for number in first.. {
            let time = self.origin + number as f64 * tick;
            if time > *to {
                break;
            }
            let x = self.x(time);
            write!(out, "<path d=\"M{x:.1} {HEAD}V{height}\" stroke=\"#ddd\"/>")?;
            label(out, x, 22, &(number as f64 * tick / 1000.0).to_string())?;
        }
        for (epoch, start) in self.epochs.range(..).filter(|(_, start)| (*from..*to).contains(*start)) {
            let x = self.x(*start);
            write!(out, "<path d=\"M{x:.1} 0V{height}\" stroke=\"#222\"/>")?;
            label(out, x, 10, &format!("epoch {epoch}"))?;
        }
        for (i, track) in timeline.tracks.iter().enumerate() {
            self.row(out, track, HEAD + i as f64 * (ROW + GAP))?;
        }
        writeln!(out, "</svg>")
    }

    fn row(&self, out: &mut String, track: &Track, y: f64) -> fmt::Result {
        let process = &self.timeline.processes[track.process];
        let process = process.strip_prefix("twinbuf ").unwrap_or(process);
        let name = if self.timeline.processes.len() > 1 {
            // `rank 1 of 2` is too long for every row.
            format!("{} {}", process.split(" of ").next().unwrap_or(process), track.name)
        } else {
            track.name.clone()
        };
        writeln!(
            out,
            "<text x=\"0\" y=\"{:.1}\">{}</text><rect x=\"{NAMES}\" y=\"{y}\" width=\"{}\" height=\"{ROW}\" \
             fill=\"#f3f3f3\"/>",
            y + 13.0,
            Escaped(&name),
            WIDTH - NAMES
        )?;
        // The end of the drawn bars that are too narrow to tell apart, and their name.
        let mut drawn = (f64::NEG_INFINITY, "");
        for span in &track.spans {
            if span.is_frame() || span.start >= self.to || span.end() < self.from {
                continue;
            }
            let (left, right) = (self.x(span.start), self.x(span.end()));
            if right <= drawn.0 && span.name == drawn.1 {
                continue;
            }
            let width = (right - left).max(0.5);
            drawn = (left + width, &span.name);
            bar(out, span, (left, y), width, self.origin)?;
        }
        Ok(())
    }
}

/// Text next to a line at `x`: to its right, or to its left at the edge of the picture.
fn label(out: &mut String, x: f64, y: u32, text: &str) -> fmt::Result {
    // About seven pixels per character.
    let (x, anchor) = match x + 3.0 + 7.0 * text.len() as f64 {
        end if end > WIDTH => (x - 3.0, " text-anchor=\"end\""),
        _ => (x + 3.0, ""),
    };
    writeln!(out, "<text x=\"{x:.1}\" y=\"{y}\"{anchor}>{text}</text>")
}

fn bar(out: &mut String, span: &Span, (x, y): (f64, f64), width: f64, origin: f64) -> fmt::Result {
    write!(
        out,
        "<rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{ROW}\" fill=\"{}\"><title>{}",
        colour(&span.name),
        Escaped(&span.name)
    )?;
    for (what, number) in [("epoch", span.epoch), ("step", span.step)] {
        if let Some(number) = number {
            write!(out, ", {what} {number}")?;
        }
    }
    write!(out, ": {:.3} ms at {:.3} ms", span.long / 1000.0, (span.start - origin) / 1000.0)?;
    write!(out, "</title></rect>")?;
    if let (Some(step), false) = (span.step, span.is_wait()) {
        let step = step.to_string();
        // About seven pixels per digit.
        if width > 7.0 * step.len() as f64 + 4.0 {
            write!(
                out,
                "<text class=\"in\" x=\"{:.1}\" y=\"{:.1}\">{step}</text>",
                x + width / 2.0,
                y + 13.0
            )?;
        }
    }
    writeln!(out)
}

/// The distance of two marks on the axis: 1, 2 or 5 times a power of ten microseconds, for at most 12 marks.
fn tick(long: f64) -> f64 {
    let least = (long / 12.0).max(1.0);
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|tick| *tick >= least).unwrap_or(least)
}

/// Escapes text of the trace for the page.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                _ => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_not_too_many() {
        for (long, expected) in
            [(1.0, 1.0), (12.0, 1.0), (13.0, 2.0), (36.0, 5.0), (61.0, 10.0), (1e6, 1e5), (2.5e6, 5e5)]
        {
            let found = tick(long);
            assert!((found - expected).abs() < 1e-6 * expected, "{long}: {found}");
            assert!(long / found <= 12.0);
        }
    }

    #[test]
    fn labels_at_the_right_edge_are_not_cut() {
        let mut out = String::new();
        label(&mut out, 500.0, 10, "epoch 3").unwrap();
        label(&mut out, WIDTH - 20.0, 10, "epoch 4").unwrap();
        assert_eq!(
            out,
            "<text x=\"503.0\" y=\"10\">epoch 3</text>\n\
             <text x=\"1177.0\" y=\"10\" text-anchor=\"end\">epoch 4</text>\n"
        );
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(Escaped("a<b>&\"c\"").to_string(), "a&lt;b&gt;&amp;&quot;c&quot;");
    }
}
