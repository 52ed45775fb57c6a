//! The Chrome trace: what each side did when, as a file for <https://ui.perfetto.dev> or `chrome://tracing`.
//!
//! The format is the JSON array of the Trace Event Format, whose closing bracket is optional: what has been
//! written is always a list of whole events, so the file can be opened while the program runs and after a kill.
//! The bracket comes when the loader is dropped, and makes it plain JSON.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Error;

/// What to record of a run; see [`LoaderBuilder::profile`](crate::LoaderBuilder::profile).
///
/// ```
/// let profile = twinbuf::Profile::chrome("trace.json").epochs(2);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    path: PathBuf,
    epochs: u64,
}

impl Profile {
    /// A Chrome trace of the first 5 epochs, in the file `path`, which is made anew.
    ///
    /// Events of the caller's track: `epoch`; in it one `chunk` a step, made up of `queue_wait` (the caller
    /// waits for the batch) and `train` (the caller has it). Of the reader's track: `disk_load` (one batch
    /// from the disk into its slot). Each has the epoch and the step in its `args`.
    pub fn chrome(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), epochs: 5 }
    }

    /// How many epochs to record, from the first one started.
    #[must_use]
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.epochs = epochs;
        self
    }

    pub(crate) fn create(self) -> Result<Trace, Error> {
        match File::create(&self.path) {
            Ok(file) => {
                let sink = Mutex::new(Sink { file, error: None });
                let trace = Trace { path: self.path, epochs: self.epochs, start: Instant::now(), sink };
                trace.write(&format!(
                    "[\n{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{},\"args\":{{\"name\":\"twinbuf\"}}}}",
                    std::process::id()
                ));
                trace.check()?;
                Ok(trace)
            }
            Err(source) => Err(Error::Trace { path: self.path, source }),
        }
    }
}

/// The file, and the clock that all tracks share.
#[derive(Debug)]
pub(crate) struct Trace {
    path: PathBuf,
    epochs: u64,
    start: Instant,
    sink: Mutex<Sink>,
}

#[derive(Debug)]
struct Sink {
    file: File,
    /// The first failure: nothing is written after it.
    error: Option<io::Error>,
}

impl Trace {
    fn write(&self, lines: &str) {
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        if sink.error.is_none() {
            // One call with whole lines, so that a kill leaves no half of one.
            sink.error = sink.file.write_all(lines.as_bytes()).err();
        }
    }

    /// The error that stopped the writing, once.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        match sink.error.take() {
            Some(source) => {
                sink.error = Some(io::Error::from(source.kind()));
                Err(Error::Trace { path: self.path.clone(), source })
            }
            None => Ok(()),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.write("\n]\n");
    }
}

/// Bytes of events that a track gathers before it writes them.
const BUFFER: usize = 16 << 10;
/// For how long a track may keep events to itself.
const KEEP: Duration = Duration::from_millis(250);

/// One side's events. Without a trace it records nothing.
#[derive(Debug)]
pub(crate) struct Track {
    trace: Option<Arc<Trace>>,
    id: u32,
    buffer: String,
    written: Instant,
}

/// Which batch an event is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// How many epochs this loader started before this one: decides whether it is recorded.
    pub(crate) ordinal: u64,
    pub(crate) epoch: u64,
    pub(crate) step: Option<u64>,
}

impl Track {
    pub(crate) fn new(trace: Option<Arc<Trace>>, id: u32, name: &str) -> Self {
        let mut track = Self { trace, id, buffer: String::new(), written: Instant::now() };
        if track.trace.is_some() {
            track.event(format_args!(
                r#"{{"name":"thread_name","ph":"M","pid":{},"tid":{id},"args":{{"name":"{name}"}}}}"#,
                std::process::id(),
            ));
        }
        track
    }

    /// Something that went on from `start` to `end`.
    pub(crate) fn span(&mut self, name: &str, place: Place, start: Instant, end: Instant) {
        let Some(trace) = &self.trace else { return };
        if place.ordinal >= trace.epochs {
            return;
        }
        let at = start.saturating_duration_since(trace.start);
        let long = end.saturating_duration_since(start);
        let (Place { epoch, step, .. }, id) = (place, self.id);
        let step = step.map(|step| format!(r#","step":{step}"#)).unwrap_or_default();
        self.event(format_args!(
            r#"{{"name":"{name}","ph":"X","pid":{},"tid":{id},"ts":{},"dur":{},"args":{{"epoch":{epoch}{step}}}}}"#,
            std::process::id(),
            Micros(at),
            Micros(long),
        ));
        if self.buffer.len() >= BUFFER || end.saturating_duration_since(self.written) >= KEEP {
            self.flush();
        }
    }

    /// Writes what has been gathered.
    pub(crate) fn flush(&mut self) {
        if let Some(trace) = &self.trace {
            if !self.buffer.is_empty() {
                trace.write(&self.buffer);
                self.buffer.clear();
            }
            self.written = Instant::now();
        }
    }

    fn event(&mut self, event: std::fmt::Arguments<'_>) {
        // Writing to a `String` does not fail. The comma goes before: the file never ends with one.
        let _ = write!(self.buffer, ",\n{event}");
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        self.flush();
    }
}

/// A time in microseconds, the format's unit, to the nanosecond.
struct Micros(Duration);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let nanos = self.0.as_nanos();
        write!(f, "{}.{:03}", nanos / 1000, nanos % 1000)
    }
}
