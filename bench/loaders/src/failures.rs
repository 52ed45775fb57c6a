//! What the caller sees when a reader fails.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::time::Duration;

use twinbuf::BoxError;

use crate::data::{self, Files};
use crate::measure::{End, Process};
use crate::peers::Subject;
use crate::work::{Fault, Outcome, Work};

/// The step of the fault.
const STEP: u64 = 3;

/// A run that takes longer than this after the start hangs.
const LIMIT: Duration = Duration::from_secs(15);

/// Keeps most readers from running far ahead of the caller.
const COMPUTE: Duration = Duration::from_millis(5);

/// The result of one subject with one fault.
pub struct Found {
    pub subject: &'static str,
    pub fault: &'static str,
    /// A short description.
    pub outcome: String,
    /// Complete batches that the caller received before, if it could still report them.
    pub before: Option<u64>,
    /// The number of batches that could be made before the fault.
    pub possible: u64,
    /// Whether the received batches were in order, with the correct contents.
    pub right: Option<bool>,
    /// The error message.
    pub words: String,
}

/// Runs every subject with every fault on images in order.
pub fn run(subjects: &[Subject], files: &Files) -> Result<Vec<Found>, BoxError> {
    let whole = Work { verify: true, compute: COMPUTE, ..files.work(false) };
    let expected = data::expected(&whole)?;
    let copy = files.data.with_extension("copy");
    let len = fs::metadata(&files.data)?.len();
    let batch = whole.batch as u64 * files.kind.stride();
    let mut all = Vec::new();
    for fault in Fault::ALL {
        for subject in subjects.iter().filter(|subject| subject.processes || fault != Fault::Kill) {
            // Written again, because the fault truncates it.
            fs::copy(&files.data, &copy)?;
            let work = Work { data: copy.clone(), fail: Some((fault, STEP)), ..whole.clone() };
            let ran = Process::start(&subject.program)?.run(&work, false, LIMIT, || Ok(()))?;
            let possible = if fault == Fault::Truncate { len / 2 / batch } else { STEP };
            let mut found = Found::new(subject.name, fault.name(), possible, ran.end, &expected);
            found.words = short(&found.words, &copy);
            let right = match found.right {
                Some(false) => "; NOT THE BATCHES ASKED FOR",
                _ => "",
            };
            println!("{}, {}: {}{right}: {}", found.fault, found.subject, found.outcome, found.words);
            all.push(found);
        }
    }
    fs::remove_file(&copy)?;
    Ok(all)
}

impl Found {
    fn new(
        subject: &'static str,
        fault: &'static str,
        possible: u64,
        end: End,
        expected: &[(u64, u64)],
    ) -> Self {
        let wanted = expected.len() as u64;
        let (outcome, before, right, words) = match end {
            End::Hung => (format!("hangs; killed after {} s", LIMIT.as_secs()), None, None, String::new()),
            End::Died(status, words) => {
                let how = match (status.signal(), status.code()) {
                    (Some(signal), _) => format!("dies of {}", name(signal)),
                    (_, code) => format!("ends with status {}", code.unwrap_or_default()),
                };
                (how, None, None, words)
            }
            End::Said(Outcome { batches, digest, sum, error, .. }) => {
                let (digest, sum) = (digest.unwrap_or_default(), sum.unwrap_or_default());
                let received = match batches {
                    0 => Some((0, 0)),
                    n => usize::try_from(n - 1).ok().and_then(|n| expected.get(n).copied()),
                };
                let right = received.is_some_and(|(h, s)| digest == format!("{h:016x}") && sum == s);
                let how = match &error {
                    Some(_) => format!("an error after {batches} batches"),
                    None if batches == wanted => "nothing noticed".to_owned(),
                    None => format!("ends as if whole, after {batches} of {wanted} batches"),
                };
                (how, Some(batches), Some(right), error.unwrap_or_default())
            }
        };
        Self { subject, fault, outcome, before, possible, right, words }
    }
}

/// The message without the folder, because that differs between machines; only the ends of a backtrace.
fn short(words: &str, file: &Path) -> String {
    let folder = file.parent().map_or(String::new(), |folder| format!("{}/", folder.display()));
    let words = words.trim().replace(&folder, "");
    match (words.lines().next(), words.lines().last()) {
        (Some(first), Some(last)) if words.lines().nth(1).is_some() => format!("{first} ... {last}"),
        _ => words,
    }
}

fn name(signal: i32) -> String {
    match signal {
        libc::SIGBUS => "SIGBUS".to_owned(),
        libc::SIGSEGV => "SIGSEGV".to_owned(),
        libc::SIGABRT => "SIGABRT".to_owned(),
        libc::SIGKILL => "SIGKILL".to_owned(),
        other => format!("signal {other}"),
    }
}
