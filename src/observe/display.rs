//! Prints a report as text, or as an HTML page with a timeline of the last steps. The page contains an SVG image and no
//! scripts, and loads nothing from a network.

use std::fmt::{self, Write as _};
use std::time::{Duration, Instant};
use twinbuf_mmap::ReadStats;

use super::log::STEPS;
use super::report::{EpochTimes, Kind, Report, Verdict, rate};

/// The number of epochs that are printed.
const ROWS: usize = 8;

pub(crate) fn count(many: u64, one: &str, more: &str) -> String {
    format!("{many} {}", if many == 1 { one } else { more })
}

/// Formats a number with about four digits, or with all that it has before the decimal point.
fn digits(value: f64) -> String {
    let decimals = [10.0, 100.0, 1000.0].iter().filter(|limit| value < **limit).count();
    format!("{value:.decimals$}")
}

/// Formats a time in microseconds, milliseconds or seconds, whichever fits its size.
pub(crate) fn time(time: Duration) -> String {
    match time.as_secs_f64() {
        0.0 => "0".to_string(),
        s @ ..1e-3 => format!("{} µs", digits(s * 1e6)),
        s @ ..1.0 => format!("{} ms", digits(s * 1e3)),
        s => format!("{} s", digits(s)),
    }
}

/// Formats a part of a whole.
pub(super) fn percent(part: f64) -> String {
    match part * 100.0 {
        percent @ ..9.95 => format!("{percent:.1} %"),
        percent => format!("{percent:.0} %"),
    }
}

/// Formats a part of a whole as a bound, which is rounded up.
pub(super) fn at_most(part: f64) -> String {
    let steps = if part < 0.0995 { 1000.0 } else { 100.0 };
    // The parts of whole numbers are not exact.
    percent((part * steps - 1e-9).max(0.0).ceil() / steps)
}

/// Formats a number of bytes for a reader.
#[allow(clippy::cast_precision_loss)] // only shown
pub(crate) fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Prints a few lines of text: what was received in which time, the verdict, and the [advice](Report::advice). The
/// alternate form, `{report:#}`, adds tables: the times of the stages, those of the last epochs, and how files were read.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == Kind::Rounds {
            write!(f, "{}", count(self.batches, "round", "rounds"))?;
        } else {
            let epochs = count(self.epochs, "epoch", "epochs");
            let batches = count(self.batches, "batch", "batches");
            write!(f, "{epochs}, {batches}")?;
            if !matches!(self.kind, Kind::Items | Kind::Ahead) {
                write!(f, ", {}", size(self.bytes))?;
            }
            if self.io_calls > 0 {
                write!(f, ", {}", count(self.io_calls, "I/O call", "I/O calls"))?;
            }
        }
        write!(f, " in {}, {:.1} a second", time(self.wall), rate(self.batches, self.wall))?;
        let au = self.au().map_or_else(String::new, |au| format!(", AU {au:.3}"));
        write!(f, "{au}\n{}", self.advice())?;
        if f.alternate() { self.tables(f) } else { Ok(()) }
    }
}

impl Report {
    fn tables(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{:<9} {:>10} {:>10}", "stage", "busy", "waiting")?;
        let (name, read) = match self.kind {
            Kind::Rounds => ("generate", 0),
            Kind::Items | Kind::Ahead => ("load", 0),
            Kind::Batches | Kind::Groups => ("read", self.read_bytes),
        };
        write!(f, "{name:<9} {:>10} {:>10}", time(self.read.busy), time(self.read.waiting))?;
        // The rate of all loading threads together, while they read.
        match rate(read, self.each(self.read.busy)) {
            rate if rate > 0.0 => writeln!(f, "    at {} GB/s", digits(rate / 1e9))?,
            _ => writeln!(f)?,
        }
        if !self.transform.is_zero() {
            writeln!(f, "transform {:>10}", time(self.transform))?;
        }
        if self.transfer_bytes > 0 {
            let rate = digits(rate(self.transfer_bytes, self.transfer) / 1e9);
            writeln!(f, "transfer  {:>10} {:>10}    at {rate} GB/s", time(self.transfer), "")?;
        }
        write!(f, "train     {:>10} {:>10}", time(self.train.busy), time(self.train.waiting))?;
        if self.by_epoch.len() > 1 {
            f.write_str("\nepoch         in all       load      train    waiting  batches")?;
            for row in &self.by_epoch[self.by_epoch.len().saturating_sub(ROWS)..] {
                let EpochTimes { epoch, batches, wall, load, train, .. } = *row;
                let [wall, load, busy, waiting] = [wall, load, train.busy, train.waiting].map(time);
                write!(f, "\n{epoch:<9} {wall:>10} {load:>10} {busy:>10} {waiting:>10} {batches:>8}")?;
            }
        }
        for choice in &self.choices {
            write!(f, "\nfiles: {choice}")?;
        }
        if !self.choices.is_empty() {
            let ReadStats { bytes, disk, hinted, hint_time, .. } = self.reading;
            let memory = bytes.saturating_sub(disk);
            write!(f, "\nread: {} from disk, {} from memory", size(disk), size(memory))?;
            write!(f, "; {} hinted in {}", size(hinted), time(hint_time))?;
        }
        Ok(())
    }
}

/// In pixels: the width of the image, the width of the row names at its left, and the height of a row.
const WIDTH: f64 = 760.0;
const NAMES: f64 = 84.0;
const ROW: f64 = 26.0;

/// Each colour has a contrast of at least 3 to 1 with the background, in light and in dark mode.
const STYLE: &str = "\
:root{color-scheme:light dark;--load:#2f6fb0;--copy:#8a5fb5;--train:#2c7f52;--wait:#c2473b}\
@media(prefers-color-scheme:dark){:root{--load:#5b9bd8;--copy:#b48ddb;--train:#52b483;--wait:#e8766a}}\
body{font:15px/1.45 system-ui,sans-serif;max-width:880px;margin:0 auto;padding:16px}h1{font-size:22px}\
h2{font-size:16px}svg{display:block;width:100%;height:auto}svg text{font-size:12px;fill:currentColor}\
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid;padding:8px;font-size:12.5px}\
.load{fill:var(--load);color:var(--load)}.copy{fill:var(--copy);color:var(--copy)}\
.train{fill:var(--train);color:var(--train)}.wait{fill:var(--wait);color:var(--wait)}";

impl Report {
    /// Returns an HTML page: the report, and a timeline of the last steps. The page needs no other file and no network.
    ///
    /// ```no_run
    /// # fn f(loader: &twinbuf::Loader) -> std::io::Result<()> {
    /// std::fs::write("report.html", loader.report().html())
    /// # }
    /// ```
    #[must_use]
    pub fn html(&self) -> String {
        let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let (verdict, advice, text) =
            (self.verdict(), escaped(&self.advice()), escaped(&format!("{self:#}")));
        let mut page = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\"><title>twinbuf: {verdict}</title>\
             <style>{STYLE}</style></head>\n<body><h1>{verdict}</h1>\n<p style=\"white-space:pre-line\">{advice}</p>\n"
        );
        // Writing to a `String` does not fail.
        let _ = self.timeline(&mut page);
        page + &format!("<h2>Figures</h2>\n<pre>{text}</pre>\n</body></html>\n")
    }

    /// Writes the timeline of the last steps: a row for the caller, a row for the copies if there are any, and as few
    /// rows as possible for the loads.
    fn timeline(&self, out: &mut String) -> fmt::Result {
        let mut units: Vec<_> = self.recent[self.recent.len().saturating_sub(STEPS)..].iter().collect();
        let (Some(first), Some(last)) = (units.first(), units.last()) else { return Ok(()) };
        // The time axis starts when the caller asks for the first of these batches and ends with the use of the last. It
        // cuts off what is outside.
        let (from, to) = (first.asked, last.released);
        let all = to.saturating_duration_since(from);
        let x = |at: Instant| {
            let part = at.min(to).saturating_duration_since(from).as_secs_f64() / all.as_secs_f64().max(1e-9);
            NAMES + part * (WIDTH - NAMES)
        };
        let mut rows = vec!["caller"];
        rows.extend((!self.transfer.is_zero()).then_some("copy"));
        let above = rows.len();
        // The bars of the chart, each with its row, CSS class, start, end and step; and when the last load of each row ends.
        let (mut bars, mut lanes) = (Vec::new(), Vec::<Instant>::new());
        units.sort_by_key(|seen| seen.load.0);
        for seen in &units {
            let (start, end) = seen.load;
            let lane = lanes.iter().position(|&free| free <= start).unwrap_or(lanes.len());
            lanes.resize(lanes.len().max(lane + 1), end);
            lanes[lane] = end;
            // The use begins when the caller receives the unit, or when its copy is complete.
            let copied = seen.copied.map_or(seen.received, |(_, copied)| copied);
            let (used, step) = (copied.min(seen.released).max(seen.received), seen.ticket.place.step);
            bars.push((above + lane, "load", start, end, step));
            bars.extend(seen.copied.filter(|_| above > 1).map(|(start, end)| (1, "copy", start, end, step)));
            bars.push((0, "wait", seen.asked, used, step));
            bars.push((0, "train", used, seen.released, step));
        }
        rows.resize(above + lanes.len(), "load");
        let steps = count(units.len() as u64, "step", "steps");
        writeln!(out, "<h2>The last {steps}, {}</h2>\n<p>", time(all))?;
        for class in [&["wait", "train"], &rows[1..=above]].concat() {
            writeln!(out, "<span class=\"{class}\">\u{25a0} {class}</span>")?;
        }
        let (height, label) = (rows.len() as f64 * ROW, "role=\"img\" aria-label=\"the last steps\"");
        writeln!(out, "</p>\n<svg viewBox=\"0 0 {WIDTH} {height}\" {label}>")?;
        for (row, name) in rows.iter().enumerate() {
            writeln!(out, "<text x=\"0\" y=\"{}\">{name}</text>", row as f64 * ROW + 17.0)?;
        }
        for (row, class, start, end, step) in bars.into_iter().filter(|bar| x(bar.3) > x(bar.2)) {
            // A bar has a width of at least 0.4, because a narrower one would be invisible.
            let (left, width) = (x(start), (x(end) - x(start)).max(0.4));
            let (y, took) = (row as f64 * ROW, time(end.saturating_duration_since(start)));
            let place = format!("x=\"{left:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"22\"");
            writeln!(
                out,
                "<rect class=\"{class}\" {place}><title>{class}, step {step}: {took}</title></rect>"
            )?;
        }
        writeln!(out, "</svg>")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_has_digits() {
        for (nanos, wanted) in [
            (0, "0"),
            (7, "0.007 µs"),
            (12_346, "12.35 µs"),
            (123_456, "123.5 µs"),
            (1_234_567, "1.235 ms"),
            (999_400_000, "999.4 ms"),
            (12_345_678_901, "12.35 s"),
            (123_456_000_000_000, "123456 s"),
        ] {
            assert_eq!(time(Duration::from_nanos(nanos)), wanted);
        }
        assert_eq!(
            [0, 1023, 1024, 3 << 19, 5 << 30].map(size),
            ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB"]
        );
    }
}
