//! A violation: its sentence, and the call stacks of the accesses that it names. Also the report of a program without
//! `Sim`.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write;
use std::sync::{Arc, OnceLock};

use super::stack::{Site, Stack};
use crate::abi::{END, Live, VIOLATION};

pub(super) struct Violation {
    sentence: String,
    stacks: Vec<(&'static str, Arc<Stack>)>,
    /// Made at the first request and kept, because finding the names of frames takes long.
    text: OnceLock<String>,
    /// Where in the program it was found.
    sites: Vec<Site>,
}

impl Violation {
    /// The calling thread makes the later of the accesses.
    pub(super) fn new(sentence: String, stacks: Vec<(&'static str, Arc<Stack>)>) -> Self {
        Self { sentence, stacks, text: OnceLock::new(), sites: vec![Site::here()] }
    }

    /// Whether a later violation is this one again. It may come again in every batch: names are found only at a new place.
    pub(super) fn comes_again(&mut self, new: &Self) -> bool {
        if self.sentence != new.sentence {
            return false;
        }
        let known = new.sites.iter().all(|site| self.sites.contains(site));
        let again = known || self.text() == new.text();
        if again && !known {
            self.sites.extend_from_slice(&new.sites);
        }
        again
    }

    /// The sentence, and the stacks below it.
    pub(super) fn text(&self) -> &str {
        self.text.get_or_init(|| {
            let mut text = self.sentence.clone();
            for (what, stack) in &self.stacks {
                let _ = write!(text, "\n  {what} at:");
                for frame in stack.frames() {
                    let _ = write!(text, "\n    {frame}");
                }
            }
            text
        })
    }
}

/// A report, written as it comes: the process may be killed.
pub(super) struct Report(Option<File>);

impl Report {
    /// Appends to a file, or writes to standard error.
    pub(super) fn to(path: Option<&str>) -> Self {
        let open = |path| File::options().append(true).create(true).open(path);
        Self(path.map(|path| open(path).unwrap_or_else(|error| panic!("{path}: {error}"))))
    }

    /// Writes `text` with one call, so that the lines of several processes do not mix.
    fn write(&self, text: &str) {
        // An error is ignored: there is no place to report it.
        let _ = match &self.0 {
            Some(file) => (&*file).write_all(text.as_bytes()),
            None => std::io::stderr().write_all(text.as_bytes()),
        };
    }

    pub(super) fn violation(&self, violation: &Violation) {
        self.write(&format!("{VIOLATION}{}\n", violation.text()));
    }

    /// The last line: how much was found, and what was not freed. Writes nothing to standard error if nothing was found.
    pub(super) fn end(&self, found: usize, live: &Live) {
        if found == 0 && self.0.is_none() {
            return;
        }
        let Live { streams, events, host_allocations, device_allocations, .. } = live;
        self.write(&format!(
            "{END}{found} violations; not freed: {streams} streams, {events} events, \
             {host_allocations} host and {device_allocations} device allocations\n"
        ));
    }
}
