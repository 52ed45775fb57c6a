//! `twinbuf trace`: where the time of a traced run went, as text, JSON or a page to look at.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use twinbuf::BoxError;

use crate::html;
use crate::summary::Summary;
use crate::timeline::Timeline;

/// Shows where the time of a traced run went; puts the traces of several ranks on one clock
///
/// Reads the file of `Profile::chrome`, even of a program that was killed.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The traces
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Waits as long as this are stalls
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = milliseconds)]
    stall_ms: f64,
    /// Write a page with the timeline to this path, for any browser; replaces only an older page
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
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
    if let Some(path) = &options.html {
        let page = html::page(&timeline, &summary);
        put(path, &page).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(if options.json { serde_json::to_string_pretty(&summary)? + "\n" } else { summary.print()? })
}

/// Writes the page, but replaces only a page: with `--html *.json` the shell puts a trace here.
fn put(path: &Path, page: &str) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| found.is_file()) {
        let mut start = Vec::new();
        fs::File::open(path)?.take(html::START.len() as u64).read_to_end(&mut start)?;
        if !start.is_empty() && start != html::START.as_bytes() {
            return Err(io::Error::other("wanted a page to write over, or no file, found something else"));
        }
    }
    fs::write(path, page)
}
