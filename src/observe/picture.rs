//! A report as a page: the text, and a timeline of the last steps. HTML with SVG inside, without scripts and without a
//! network.

use std::fmt::{self, Write as _};
use std::io;
use std::path::Path;
use std::time::Instant;

use super::display::{count, time};
use super::report::Report;

/// Steps in the timeline.
const STEPS: usize = 24;
/// Pixels: the width of the timeline, of the names in front of it, and the height of a row.
const WIDTH: f64 = 760.0;
const NAMES: f64 = 84.0;
const ROW: f64 = 26.0;

/// Each colour has a contrast of 3 to 1 with the background, light and dark.
const STYLE: &str = "\
:root{color-scheme:light dark;--load:#2f6fb0;--copy:#8a5fb5;--train:#2c7f52;--wait:#c2473b}\
@media(prefers-color-scheme:dark){:root{--load:#5b9bd8;--copy:#b48ddb;--train:#52b483;--wait:#e8766a}}\
body{font:15px/1.45 system-ui,sans-serif;max-width:880px;margin:0 auto;padding:16px}h1{font-size:22px}\
h2{font-size:16px}svg{display:block;width:100%;height:auto}svg text{font-size:12px;fill:currentColor}\
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid;padding:8px;font-size:12.5px}\
.load{fill:var(--load);color:var(--load)}.copy{fill:var(--copy);color:var(--copy)}\
.train{fill:var(--train);color:var(--train)}.wait{fill:var(--wait);color:var(--wait)}";

impl Report {
    /// Writes an HTML page: the report, and a timeline of the last steps. The page needs no other file and no network.
    ///
    /// ```no_run
    /// # fn f(loader: &twinbuf::Loader) -> std::io::Result<()> {
    /// loader.report().save("report.html")
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The [`io::Error`] of writing the file.
    pub fn save(&self, path: impl AsRef<Path>) -> io::Result<()> {
        std::fs::write(path, self.html())
    }

    /// Returns the HTML page that [`save`](Self::save) writes.
    #[must_use]
    pub fn html(&self) -> String {
        let verdict = self.verdict();
        let mut page = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\"><title>twinbuf: {verdict}</title>\
             <style>{STYLE}</style></head>\n<body><h1>{verdict}</h1>\n<p>{}</p>\n",
            Escaped(&self.advice())
        );
        // Writing to a `String` does not fail.
        let _ = self.timeline(&mut page);
        let _ = writeln!(page, "<h2>Figures</h2>\n<pre>{}</pre>\n</body></html>", Escaped(&self.to_string()));
        page
    }

    /// The last steps, with the loads in as few rows as hold them.
    fn timeline(&self, out: &mut String) -> fmt::Result {
        let units = &self.recent.units;
        let units = &units[units.len().saturating_sub(STEPS)..];
        let (Some(first), Some(last)) = (units.first(), units.last()) else { return Ok(()) };
        // Row, class, from when to when, and the step.
        let mut bars = Vec::new();
        let mut loads: Vec<_> = units.iter().collect();
        loads.sort_by_key(|seen| seen.load.start);
        let mut lanes: Vec<Instant> = Vec::new();
        for seen in loads {
            let (start, end) = (seen.load.start, seen.load.end);
            let lane = lanes.iter().position(|&free| free <= start).unwrap_or(lanes.len());
            lanes.resize(lanes.len().max(lane + 1), end);
            lanes[lane] = end;
            bars.push((lane, "load", start, end, seen.step()));
        }
        let copies: &[&str] = if self.transfer.is_zero() { &[] } else { &["copy"] };
        let rows = [&vec!["load"; lanes.len()], copies, &["caller"]].concat();
        for seen in units {
            let (used, caller) = (seen.used_from(), rows.len() - 1);
            if let Some((start, end)) = seen.copied.filter(|_| caller > lanes.len()) {
                bars.push((lanes.len(), "copy", start, end, seen.step()));
            }
            bars.push((caller, "wait", seen.asked, used, seen.step()));
            bars.push((caller, "train", used, seen.released, seen.step()));
        }
        // Loads that began before the first of these steps are cut off.
        let (from, all) = (first.asked, last.released.saturating_duration_since(first.asked));
        let x = |at: Instant| {
            let part = at.saturating_duration_since(from).as_secs_f64() / all.as_secs_f64().max(1e-9);
            NAMES + part * (WIDTH - NAMES)
        };
        let steps = count(units.len() as u64, "step", "steps");
        writeln!(out, "<h2>The last {steps}, {}</h2>\n<p>", time(all))?;
        for class in [&["load"], copies, &["train", "wait"]].concat() {
            writeln!(out, "<span class=\"{class}\">\u{25a0} {class}</span>")?;
        }
        let height = rows.len() as f64 * ROW;
        let label = "role=\"img\" aria-label=\"the last steps\"";
        writeln!(out, "</p>\n<svg viewBox=\"0 0 {WIDTH} {height}\" {label}>")?;
        for (row, name) in rows.iter().enumerate() {
            writeln!(out, "<text x=\"0\" y=\"{}\">{name}</text>", row as f64 * ROW + 17.0)?;
        }
        for (row, class, start, end, step) in bars.into_iter().filter(|bar| x(bar.3) > x(bar.2)) {
            // Narrower than that it cannot be seen.
            let (left, width) = (x(start), (x(end) - x(start)).max(0.4));
            let (y, took) = (row as f64 * ROW, time(end.saturating_duration_since(start)));
            write!(
                out,
                "<rect class=\"{class}\" x=\"{left:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"22\">"
            )?;
            writeln!(out, "<title>{class}, step {step}: {took}</title></rect>")?;
        }
        writeln!(out, "</svg>")
    }
}

/// Text within HTML.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '&' => f.write_str("&amp;"),
            '"' => f.write_str("&quot;"),
            c => f.write_char(c),
        })
    }
}
