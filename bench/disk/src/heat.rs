//! The picture of the grid: a panel for each cache and depth, a row a batch size, a column a ratio.

use std::fmt::Write as _;

use crate::cell::{CACHES, Cell, DEPTHS, RATIOS, size};

const WIDTH: f64 = 40.0;
const HEIGHT: f64 = 22.0;
const LABEL: f64 = 62.0;
const TOP: f64 = 90.0;

pub fn svg(cells: &[Cell], head: &str) -> String {
    let mut batches: Vec<u64> = cells.iter().map(|cell| cell.batch).collect();
    batches.sort_unstable();
    batches.dedup();
    let panel_width = RATIOS.len() as f64 * WIDTH + 14.0;
    let panel_height = batches.len() as f64 * HEIGHT + 50.0;
    let mut body = String::new();
    for (c, cache) in CACHES.into_iter().enumerate() {
        for (d, depth) in DEPTHS.into_iter().enumerate() {
            let left = LABEL + d as f64 * panel_width;
            let top = TOP + 30.0 + c as f64 * panel_height;
            let _ = writeln!(
                body,
                r#"<text x="{left}" y="{:.1}" class="title">{cache}, depth {depth}</text>"#,
                top - 18.0
            );
            for (r, ratio) in RATIOS.into_iter().enumerate() {
                let x = left + (r as f64 + 0.5) * WIDTH;
                let _ = writeln!(body, r#"<text x="{x:.1}" y="{:.1}" class="in">{ratio}</text>"#, top - 4.0);
            }
            for (b, &batch) in batches.iter().enumerate() {
                let y = top + b as f64 * HEIGHT;
                if d == 0 {
                    let (x, y) = (left - 5.0, y + 15.0);
                    let _ =
                        writeln!(body, r#"<text x="{x:.1}" y="{y:.1}" class="row">{}</text>"#, size(batch));
                }
                for (r, ratio) in RATIOS.into_iter().enumerate() {
                    let here = |cell: &&Cell| {
                        (cell.cache, cell.batch, cell.depth) == (cache, batch, depth) && cell.ratio == ratio
                    };
                    let Some(cell) = cells.iter().find(here) else { continue };
                    let (x, found) = (left + r as f64 * WIDTH, cell.over_ideal());
                    let class = if cell.counts() { "counts" } else { "small" };
                    let _ = writeln!(
                        body,
                        r#"<rect x="{x:.1}" y="{y:.1}" width="{:.1}" height="{:.1}" fill="{}" class="{class}"/><text x="{:.1}" y="{:.1}" class="in {class}">{found:.2}</text>"#,
                        WIDTH - 2.0,
                        HEIGHT - 2.0,
                        colour(found),
                        x + WIDTH / 2.0 - 1.0,
                        y + 14.5,
                    );
                }
            }
        }
    }
    // The line is too long for the picture.
    let (machine, rest) = head.split_once("; disk: ").unwrap_or((head, ""));
    let width = LABEL + DEPTHS.len() as f64 * panel_width;
    let height = TOP + CACHES.len() as f64 * panel_height;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
text {{ font: 11px sans-serif; fill: #333 }}
.row {{ text-anchor: end }} .in {{ text-anchor: middle }}
.title {{ font-weight: bold; font-size: 12px }}
rect.counts {{ stroke: #333 }} rect.small {{ opacity: 0.5 }} text.small {{ fill: #555 }}
</style>
<rect width="{width}" height="{height}" fill="white"/>
<text x="10" y="20" class="title">Wall time of an epoch / ideal, by batch size (down) and compute / load (across)</text>
<text x="10" y="38">{machine}</text>
<text x="10" y="53">{rest}</text>
<text x="10" y="70">Framed: load and compute take 1 ms or more a batch. White at 1, red from 1.5 on.</text>
{body}</svg>
"##
    )
}

/// From white at 1 to red at 1.5; pale blue below 1.
fn colour(over: f64) -> String {
    let mix = |from: f64, to: f64, share: f64| (from + (to - from) * share).round();
    if over < 1.0 {
        let share = ((1.0 - over) / 0.2).min(1.0);
        return format!("rgb({},{},255)", mix(255.0, 170.0, share), mix(255.0, 205.0, share));
    }
    let share = ((over - 1.0) / 0.5).min(1.0);
    format!("rgb({},{},{})", mix(255.0, 227.0, share), mix(255.0, 74.0, share), mix(255.0, 51.0, share))
}
