//! Numbers, paths and errors in readable form.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serializer;

/// Text from a file or a path, on one line with control characters escaped: it must not control the terminal.
pub(crate) fn printable(text: &str) -> String {
    let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escaped).collect()
}

/// An error and its causes on one line. Causes that the error has printed already are left out.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !line.ends_with(&text) {
            line = format!("{line}: {text}");
        }
        next = cause.source();
    }
    line
}

/// Of what was written: a reader that has closed its pipe is not an error.
pub(crate) fn said(written: io::Result<()>) -> io::Result<()> {
    written.or_else(|error| if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}

/// `1536` as `1.5 KiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// A path as JSON: invalid UTF-8 is replaced.
pub(crate) fn path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// Paths as JSON, each as [`path`] writes it.
pub(crate) fn paths<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

/// `part` of `whole`, in percent; 0 of nothing.
pub(crate) fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole * 100.0 } else { 0.0 }
}

/// `1 file`, `2 files`.
pub(crate) fn count(number: u64, what: &str) -> String {
    // English: two batches, but two epochs.
    let plural = if what.ends_with("tch") || what.ends_with('s') { "es" } else { "s" };
    format!("{number} {what}{}", if number == 1 { "" } else { plural })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_numbers() {
        for (found, expected) in [
            (bytes(0), "0 B"),
            (bytes(1023), "1023 B"),
            (bytes(1536), "1.5 KiB"),
            (bytes(u64::MAX), "16777216.0 TiB"),
            (count(1, "batch"), "1 batch"),
            (count(2, "batch"), "2 batches"),
            (count(0, "file"), "0 files"),
            (count(3, "epoch"), "3 epochs"),
            (count(2, "process"), "2 processes"),
        ] {
            assert_eq!(found, expected);
        }
        assert_eq!(printable("a\u{1b}[31m\n\n\u{e4} \"\u{9b}"), "a\\u{1b}[31m\\n\\n\u{e4} \"\\u{9b}");
        assert_eq!(percent(1.0, 4.0), 25.0);
        assert_eq!(percent(1.0, 0.0), 0.0);
    }
}
