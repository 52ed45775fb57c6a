//! A report as a page: the text, where the time went, the last steps, and what other settings would take. HTML with SVG
//! inside, without scripts and without a network.

use std::fmt::{self, Write as _};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::display::{count, time};
use super::history::Seen;
use super::replay::Settings;
use super::report::{Kind, Report};

/// Steps in the timeline.
const STEPS: usize = 24;
/// Pixels: the width of a drawing, of the names in front of it, and the height of a row.
const WIDTH: f64 = 760.0;
const NAMES: f64 = 84.0;
const ROW: f64 = 22.0;

/// Each colour has a contrast of 3 to 1 with the background, light and dark.
const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2530;--faint:#5d6875;--page:#fff;--line:#d5dae0;--best:#dcefe3;\
--load:#2f6fb0;--copy:#8a5fb5;--train:#2c7f52;--wait:#c2473b;--pause:#8a939d}\
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ec;--faint:#a0aab5;--page:#14181d;--line:#39424c;--best:#1f3d2c;\
--load:#5b9bd8;--copy:#b48ddb;--train:#52b483;--wait:#e8766a;--pause:#7d8792}}\
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:880px;margin:0 auto;\
padding:16px}h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:26px 0 6px}p{margin:4px 0}\
svg{display:block;width:100%;height:auto}svg text{font-size:12px;fill:var(--ink)}@media(max-width:700px){svg text{font-size:14px}}.faint{color:var(--faint);\
fill:var(--faint)}pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--line);padding:8px;font-size:12.5px}\
table{border-collapse:collapse}td,th{border:1px solid var(--line);padding:3px 10px;text-align:right}\
th{font-weight:600}.now{outline:2px solid var(--ink);outline-offset:-2px}.best{background:var(--best)}\
.wide{overflow-x:auto}.key i{display:inline-block;width:11px;height:11px;margin:0 5px 0 14px}\
.load{fill:var(--load);background:var(--load)}.copy{fill:var(--copy);background:var(--copy)}\
.train{fill:var(--train);background:var(--train)}.wait{fill:var(--wait);background:var(--wait)}\
.pause{fill:var(--pause);background:var(--pause)}";

impl Report {
    /// Writes an HTML page: the report, where the time went, the last steps, and the predicted time for other depths
    /// and numbers of workers. The page needs no other file and no network.
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
        self.html_in(&|text| text)
    }

    /// The page with the names of another language in its advice and figures.
    #[doc(hidden)]
    #[must_use]
    pub fn html_in(&self, words: &dyn Fn(String) -> String) -> String {
        let mut page = String::new();
        // Writing to a `String` does not fail.
        let _ = self.page(&mut page, words);
        page
    }

    fn page(&self, out: &mut String, words: &dyn Fn(String) -> String) -> fmt::Result {
        let verdict = self.verdict();
        write!(
            out,
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\"><title>twinbuf: {verdict}</title>\
             <style>{STYLE}</style></head>\n<body><h1>{verdict}</h1>\n<p>{}</p>\n",
            Escaped(&words(self.advice())).to_string().split('`').enumerate().fold(
                String::new(),
                |text, (at, part)| {
                    // What was between two of these is code.
                    if at % 2 == 1 { format!("{text}<code>{part}</code>") } else { text + part }
                }
            )
        )?;
        self.sums(out)?;
        self.timeline(out)?;
        self.table(out)?;
        writeln!(out, "<h2>Figures</h2>\n<pre>{}</pre>\n</body></html>", Escaped(&words(self.to_string())))
    }

    /// Where the time went: the caller's, a loading thread's, and the copies.
    fn sums(&self, out: &mut String) -> fmt::Result {
        let each = |time: Duration| time.as_secs_f64() / self.workers.max(1) as f64;
        let load = self.loads_name();
        let caller = [
            ("train", "train", self.train.busy.as_secs_f64()),
            ("wait", "wait", self.train.waiting.as_secs_f64()),
        ];
        let thread = [
            ("load", load, each(self.read.busy)),
            ("copy", "transform", each(self.transform)),
            ("wait", "wait", each(self.read.waiting)),
        ];
        let mut rows = vec![("caller", &caller[..])];
        if self.overlap {
            rows.push((if self.workers > 1 { "a worker" } else { "loader" }, &thread));
        } else {
            rows.push(("of the wait", &thread[..2]));
        }
        let copies = [("copy", "copy to the device", self.transfer.as_secs_f64())];
        if !self.transfer.is_zero() {
            rows.push(("device", &copies));
        }
        let sum = |parts: &[(_, _, f64)]| parts.iter().map(|part| part.2).sum::<f64>();
        let most = rows.iter().map(|row| sum(row.1)).fold(1e-9, f64::max);
        writeln!(out, "<h2>Where the time went</h2>")?;
        Drawing { rows: rows.len() }
            .open(out, "bars of the time of the caller and of the loading threads")?;
        for (row, (name, parts)) in rows.iter().enumerate() {
            name_row(out, row, name)?;
            let mut from = 0.0;
            for &(class, what, seconds) in *parts {
                let text =
                    format!("{what} {}", time(Duration::try_from_secs_f64(seconds).unwrap_or_default()));
                bar(out, row, (from / most, seconds / most), class, &text, true)?;
                from += seconds;
            }
        }
        writeln!(out, "</svg>")
    }

    /// The last steps, with the loads in as few rows as hold them.
    fn timeline(&self, out: &mut String) -> fmt::Result {
        let units = &self.recent.units;
        let units = &units[units.len().saturating_sub(STEPS)..];
        let (Some(first), Some(last)) = (units.first(), units.last()) else { return Ok(()) };
        // Loads that began before the first of these steps are cut off.
        let (from, to) = (first.asked, last.released);
        let all = to.saturating_duration_since(from).as_secs_f64().max(1e-9);
        let place = |start: Instant, end: Instant| {
            let at = |time: Instant| time.saturating_duration_since(from).as_secs_f64() / all;
            (at(start), at(end) - at(start))
        };
        let mut loads: Vec<(Instant, Instant, &Seen)> = units
            .iter()
            .filter_map(|seen| Some((seen.loaded?, seen.loaded? + seen.read + seen.transform, seen)))
            .filter(|load| load.1 > from)
            .collect();
        loads.sort_by_key(|load| load.0);
        let mut lanes: Vec<Instant> = Vec::new();
        let lane = |&(start, end, seen): &(Instant, Instant, _)| {
            let lane = lanes.iter().position(|&free| free <= start).unwrap_or_else(|| {
                lanes.push(start);
                lanes.len() - 1
            });
            lanes[lane] = end;
            (lane, start, end, seen)
        };
        let loads: Vec<_> = loads.iter().map(lane).collect();
        let copies = units.iter().filter_map(|seen| Some((seen.copied?, seen)));
        let copies: Vec<_> = copies.filter(|((end, _), _)| *end > from).collect();
        let rows = 1 + lanes.len() + usize::from(!copies.is_empty());
        let steps = count(units.len() as u64, "step", "steps");
        writeln!(out, "<h2>The last {steps}, {}</h2>", time(to.saturating_duration_since(from)))?;
        Drawing { rows }.open(out, "timeline of the last steps")?;
        for lane in 0..lanes.len() {
            let name = if lanes.len() > 1 { format!("load {}", lane + 1) } else { "load".to_string() };
            name_row(out, lane, &name)?;
        }
        for (lane, start, end, seen) in loads {
            let title = seen.title("load", end - start);
            bar(out, lane, place(start.max(from), end), "load", &title, false)?;
        }
        let mut row = lanes.len();
        if !copies.is_empty() {
            name_row(out, row, "copy")?;
            for ((end, took), seen) in copies {
                let start = end.checked_sub(took).unwrap_or(end).max(from);
                bar(out, row, place(start, end), "copy", &seen.title("copy", took), false)?;
            }
            row += 1;
        }
        name_row(out, row, "caller")?;
        for seen in units {
            let used = seen.used_from();
            let title = seen.title("wait", used - seen.asked);
            bar(out, row, place(seen.asked, used), "wait", &title, false)?;
            let title = seen.title("train", (seen.released - used).saturating_sub(seen.paused));
            bar(out, row, place(used, seen.released), "train", &title, false)?;
        }
        writeln!(
            out,
            "</svg>\n<p class=\"key faint\"><i class=\"load\"></i>load{}<i class=\"train\"></i>train\
             <i class=\"wait\"></i>wait</p>",
            if self.transfer.is_zero() { "" } else { "<i class=\"copy\"></i>copy" }
        )
    }

    /// What the last batches would take.
    fn table(&self, out: &mut String) -> fmt::Result {
        if self.kind == Kind::Rounds || self.recent.units.is_empty() {
            return Ok(());
        }
        let now = self.settings();
        let mut workers = if self.kind == Kind::Batches { vec![1, 2, 4, now.workers] } else { vec![1] };
        let mut depths = vec![2, 3, 4, 6, 8, now.depth];
        for list in [&mut depths, &mut workers] {
            list.sort_unstable();
            list.dedup();
        }
        let all = depths.iter().flat_map(|&depth| {
            workers.iter().map(move |&workers| Settings { overlap: true, depth, workers })
        });
        let off = Settings { overlap: false, ..now };
        let found = self.predict_all(all.chain([off]));
        let best = found.iter().flatten().map(|found| found.wall).min().unwrap_or_default();
        let recommended = self.recommended().map(|found| found.settings);
        let cell = |out: &mut String, settings: Settings| {
            let found = found.iter().flatten().find(|found| found.settings == settings);
            let mut class = String::new();
            if settings == now || (!settings.overlap && !now.overlap) {
                class.push_str("now ");
            }
            if recommended == Some(settings) {
                class.push_str("best");
            }
            let text = found.map_or_else(|| "none".to_string(), |found| time(found.wall));
            write!(out, "<td class=\"{class}\">{text}</td>")
        };
        let batches = count(self.recent.units.len() as u64, "batch", "batches");
        write!(
            out,
            "<h2>Predicted time</h2>\n<p class=\"faint\">The last {batches}, replayed; outlined: as it was; \
             green: recommended; shortest {}; <em>none</em>: the caller would wait for a slot that it keeps.</p>\n\
             <div class=\"wide\"><table><tr><th>slots</th>",
            time(best)
        )?;
        for workers in &workers {
            write!(out, "<th>{}</th>", count(*workers as u64, "worker", "workers"))?;
        }
        writeln!(out, "</tr>")?;
        for depth in depths {
            write!(out, "<tr><th>{depth}</th>")?;
            for &workers in &workers {
                cell(out, Settings { overlap: true, depth, workers })?;
            }
            writeln!(out, "</tr>")?;
        }
        write!(out, "<tr><th>no overlap</th>")?;
        cell(out, off)?;
        writeln!(out, "</tr></table></div>")
    }
}

impl Seen {
    fn title(&self, what: &str, took: Duration) -> String {
        format!("{what}, epoch {}, step {}: {}", self.epoch(), self.step(), time(took))
    }
}

/// The space of a drawing.
struct Drawing {
    rows: usize,
}

impl Drawing {
    fn open(self, out: &mut String, what: &str) -> fmt::Result {
        let height = self.rows as f64 * (ROW + 4.0) + 4.0;
        writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{what}\">")
    }
}

fn y(row: usize) -> f64 {
    row as f64 * (ROW + 4.0) + 4.0
}

fn name_row(out: &mut String, row: usize, name: &str) -> fmt::Result {
    writeln!(out, "<text x=\"0\" y=\"{}\">{}</text>", y(row) + 15.0, Escaped(name))
}

/// A bar from a part of the width on, over a part of it, with its text after it if there is room.
fn bar(
    out: &mut String,
    row: usize,
    (from, part): (f64, f64),
    class: &str,
    text: &str,
    shown: bool,
) -> fmt::Result {
    let (x, width) = (NAMES + from * (WIDTH - NAMES), part * (WIDTH - NAMES));
    if width <= 0.0 {
        return Ok(());
    }
    let text = Escaped(text);
    // Narrower than that it cannot be seen.
    let width = width.max(0.4);
    let y = y(row);
    write!(out, "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{ROW}\">")?;
    writeln!(out, "<title>{text}</title></rect>")?;
    if shown && width > 7.0 * text.0.len() as f64 {
        let (x, y) = (x + 6.0, y + 15.0);
        writeln!(out, "<text x=\"{x:.2}\" y=\"{y}\" style=\"fill:var(--page)\">{text}</text>")?;
    }
    Ok(())
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
