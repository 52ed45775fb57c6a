//! What comes out: CSV for programs (`bench/tables.py` makes the tables of the READMEs of it), and a picture.

use std::fmt::Write as _;

use twinbuf_bench_disk::report::median;

use crate::failures::Found;
use crate::peers::{Cell, Same, Sample};

impl Cell {
    fn median(&self, of: fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(of))
    }
}

/// A text that may hold commas and quotation marks.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

pub fn speed(cells: &[Cell], head: &str) -> String {
    let mut out = format!(
        "# {head}\n\
         # Medians of the rounds. After the first batch, but for first_ms and cpu_fixed_ms: CPU time of starts and ends.\n\
         kind,order,cache,compute,subject,rounds,epochs,compute_us,samples_per_s,min,max,wait_us,wait_share,\
         first_ms,cpu_us_per_sample,cpu_fixed_ms\n"
    );
    for cell in cells {
        let Cell { kind, order, cache, compute, subject, epochs, samples, .. } = cell;
        let speeds = || samples.iter().map(|sample| sample.samples_per_s);
        let _ = writeln!(
            out,
            "{kind},{order},{cache},{compute},{subject},{},{epochs},{:.1},{:.0},{:.0},{:.0},{:.2},{:.4},{:.2},{:.3},{:.2}",
            samples.len(),
            cell.median(|sample| sample.compute_us),
            cell.median(|sample| sample.samples_per_s),
            speeds().fold(f64::INFINITY, f64::min),
            speeds().fold(0.0, f64::max),
            cell.median(|sample| sample.wait_us),
            cell.median(|sample| sample.wait_share),
            cell.median(|sample| sample.first_ms),
            cell.median(|sample| sample.cpu_us_per_sample),
            cell.median(|sample| sample.cpu_fixed_ms),
        );
    }
    out
}

pub fn same(found: &[Same], head: &str) -> String {
    let mut out = format!(
        "# {head}\n\
         kind,order,subject,digest,order_right,content_right,repeated,memory_ready_mib,memory_most_mib\n"
    );
    for same in found {
        let Same { kind, order, subject, digest, order_right, content_right, repeated, memory } = same;
        let (ready, most) = memory;
        let _ = writeln!(
            out,
            "{kind},{order},{subject},{digest},{order_right},{content_right},{repeated},{ready:.1},{most:.1}"
        );
    }
    out
}

pub fn failures(found: &[Found], head: &str) -> String {
    let mut out = format!("# {head}\nsubject,fault,outcome,before,possible,right,words\n");
    for Found { subject, fault, outcome, before, possible, right, words } in found {
        let before = before.map_or(String::new(), |before| before.to_string());
        let right = right.map_or(String::new(), |right| right.to_string());
        let (outcome, words) = (quoted(outcome), quoted(words));
        let _ = writeln!(out, "{subject},{fault},{outcome},{before},{possible},{right},{words}");
    }
    out
}

/// A panel for each data set, order and cache: on the left the samples per second of a caller that does nothing else,
/// on the right the share of waiting of one that is busy for as long as a load.
pub fn svg(cells: &[Cell], head: &str) -> String {
    const LABEL: f64 = 110.0;
    const BAR: f64 = 220.0;
    const RIGHT: f64 = 420.0;
    let (mut body, mut top) = (String::new(), 74.0);
    let mut places: Vec<_> = cells.iter().map(|cell| (cell.kind, cell.order, cell.cache)).collect();
    places.sort_unstable();
    places.dedup();
    for (kind, order, cache) in places {
        let _ = writeln!(body, r#"<text x="10" y="{top}" class="title">{kind}, {order}, {cache}</text>"#);
        let of = |compute| {
            let here = move |cell: &&Cell| {
                (cell.kind, cell.order, cell.cache, cell.compute) == (kind, order, cache, compute)
            };
            cells.iter().filter(here)
        };
        let fastest =
            of("none").map(|cell| cell.median(|s| s.samples_per_s)).fold(f64::MIN_POSITIVE, f64::max);
        for cell in of("none") {
            top += 16.0;
            let y = top - 9.0;
            let class = if cell.subject.starts_with("twinbuf") { "ours" } else { "peer" };
            let speed = cell.median(|s| s.samples_per_s);
            let width = BAR * speed / fastest;
            let _ = writeln!(
                body,
                r#"<text x="{:.1}" y="{top}" class="name">{}</text><rect x="{LABEL}" y="{y}" width="{width:.1}" height="11" class="{class}"/><text x="{:.1}" y="{top}">{speed:.0}</text>"#,
                LABEL - 6.0,
                cell.subject,
                LABEL + width + 4.0,
            );
            let Some(busy) = of("balanced").find(|busy| busy.subject == cell.subject) else { continue };
            let share = busy.median(|s| s.wait_share);
            let width = BAR * share;
            let _ = writeln!(
                body,
                r#"<rect x="{RIGHT}" y="{y}" width="{width:.1}" height="11" class="{class}"/><text x="{:.1}" y="{top}">{:.1} %</text>"#,
                RIGHT + width + 4.0,
                100.0 * share,
            );
        }
        top += 28.0;
    }
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{top}" viewBox="0 0 720 {top}">
<style>
text {{ font: 11px sans-serif; fill: #333 }}
.name {{ text-anchor: end }}
.title {{ font-weight: bold; font-size: 12px }}
rect.ours {{ fill: #d95f02 }} rect.peer {{ fill: #4a7fb5 }}
</style>
<rect width="720" height="{top}" fill="white"/>
<text x="10" y="20" class="title">Loaders on the same batches, medians</text>
<text x="10" y="38">{head}</text>
<text x="{LABEL}" y="56">samples/s, without compute</text>
<text x="{RIGHT}" y="56">share of waiting, compute = load of the serial loop</text>
{body}</svg>
"#
    )
}
