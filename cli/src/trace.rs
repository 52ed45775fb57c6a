//! `twinbuf trace`: where the time of a traced run went, as text or JSON.

use std::path::PathBuf;

use twinbuf::BoxError;

use crate::summary::Summary;
use crate::timeline::Timeline;

/// Shows where the time of a traced run went; puts the traces of several ranks on one clock
///
/// Reads the files of `observe::Trace`, even of a program that was killed.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The traces
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Waits of this length or longer are stalls
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = milliseconds)]
    stall_ms: f64,
    /// Write JSON
    #[arg(long)]
    json: bool,
}

fn milliseconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ms) if (0.0..f64::INFINITY).contains(&ms) => Ok(ms),
        _ => Err("wanted milliseconds, 0 or more".to_string()),
    }
}

pub(crate) fn run(options: &Options) -> Result<String, BoxError> {
    let timeline = Timeline::read(&options.files)?;
    let summary = Summary::of(&timeline, options.stall_ms);
    Ok(if options.json { serde_json::to_string_pretty(&summary)? + "\n" } else { summary.print()? })
}
