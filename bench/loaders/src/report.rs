//! The output: CSV for `bench/tables.py` and `bench/pictures.py`.

use crate::peers::{Delivered, Sample};

/// A text that may contain commas and quotation marks.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// The lines of all runs.
pub fn speed(lines: &[String], head: &str) -> String {
    format!(
        "# {head}\n\
         # From the go to the last batch, starts of workers included.\n\
         round,kind,order,cache,trains,subject,samples_per_s,first_ms,cpu_us_per_sample,au,step_us,step_alone_us,\
         error\n{}",
        lines.concat()
    )
}

/// The line of a run in this place, which may have a trainer.
pub fn run(place: &str, trains: bool, sample: &Result<Sample, String>) -> String {
    match sample {
        Ok(Sample { samples_per_s, first_ms, cpu_us_per_sample, step_alone_us, step_us, au, .. }) => {
            let line = format!("{place},{samples_per_s:.0},{first_ms:.2},{cpu_us_per_sample:.3}");
            let steps = format!(",{au:.4},{step_us:.2},{step_alone_us:.2},\n");
            line + if trains { &steps } else { ",,,,\n" }
        }
        Err(error) => format!("{place},,,,,,,{}\n", quoted(error)),
    }
}

/// The lines of all subjects and kinds.
pub fn same(lines: &[String], head: &str) -> String {
    format!("# {head}\nkind,subject,order_right,content_right,repeated,error\n{}", lines.concat())
}

/// The line of a subject and a kind.
pub fn delivered(place: &str, delivered: &Result<Delivered, String>) -> String {
    match delivered {
        Ok(Delivered { order_right, content_right, repeated }) => {
            format!("{place},{order_right},{content_right},{repeated},\n")
        }
        Err(error) => format!("{place},,,,{}\n", quoted(error)),
    }
}
