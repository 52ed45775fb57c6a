//! The output: CSV for `bench/tables.py` and `bench/pictures.py`.

use std::fmt::Write as _;

use crate::peers::{Delivered, Row, Same};

/// A text that may contain commas and quotation marks.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// One line per run.
pub fn speed(rows: &[Row], head: &str) -> String {
    let mut out = format!(
        "# {head}\n\
         # From the go to the last batch, starts of workers included.\n\
         round,kind,order,cache,trains,subject,samples_per_s,first_ms,cpu_us_per_sample,au,step_us,step_alone_us,\
         error\n"
    );
    for row in rows {
        let Row { round, kind, order, cache, trains, subject, sample } = row;
        let _ = write!(out, "{round},{kind},{order},{cache},{trains},{subject}");
        let sample = match sample {
            Ok(sample) => sample,
            Err(error) => {
                let _ = writeln!(out, ",,,,,,,{}", quoted(error));
                continue;
            }
        };
        let _ = write!(
            out,
            ",{:.0},{:.2},{:.3}",
            sample.samples_per_s, sample.first_ms, sample.cpu_us_per_sample
        );
        let _ = if *trains {
            writeln!(out, ",{:.4},{:.2},{:.2},", sample.au, sample.step_us, sample.step_alone_us)
        } else {
            writeln!(out, ",,,,")
        };
    }
    out
}

pub fn same(found: &[Same], head: &str) -> String {
    let mut out = format!(
        "# {head}\n\
         kind,subject,order_right,content_right,repeated,error\n"
    );
    for Same { kind, subject, delivered } in found {
        let _ = write!(out, "{kind},{subject}");
        let _ = match delivered {
            Ok(Delivered { order_right, content_right, repeated }) => {
                writeln!(out, ",{order_right},{content_right},{repeated},")
            }
            Err(error) => writeln!(out, ",,,,{}", quoted(error)),
        };
    }
    out
}
