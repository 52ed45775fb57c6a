//! The Chrome trace: a timeline of what each thread did, as a file for <https://ui.perfetto.dev> or `chrome://tracing`.
//!
//! The format is the JSON array of the Trace Event Format. Its closing bracket is optional, and the file always
//! contains whole events: it can be opened while the program runs and after a kill. The bracket is written when the
//! last loader that uses the file is closed or dropped; the file is then plain JSON. Each event is one line.
//!
//! Each loader of each rank is a process of the trace. The files of several ranks can be joined to one, because the
//! loaders of no two ranks below 65 536 use the same process number. Times count from when the file was opened: viewers read
//! times as `f64`, which cannot hold microseconds since 1970 with three decimals. The event `clock_origin` has the time
//! when the file was opened.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use super::log::{Event, LoadTimes, Place, What};
use crate::error::Error;
use crate::temporary::check_size;
use crate::thread::{ForkGuard, OfProcess};

/// The file and the number of epochs of a Chrome trace. Pass it to
/// [`LoaderBuilder::trace`](crate::loader::LoaderBuilder::trace).
///
/// ```
/// let profile = twinbuf::observe::Trace::new("trace.json").epochs(2);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    pub(crate) path: PathBuf,
    pub(crate) epochs: u64,
}

impl Trace {
    /// Creates a trace of the first 5 epochs, passes or rounds in the file `path`. The loader overwrites an existing
    /// file. Open the trace in <https://ui.perfetto.dev> or `chrome://tracing`.
    ///
    /// Each loader is a process in the trace, named `NAME rank R of W`. Without a name, the first is called `twinbuf`,
    /// and the second of a file `loader 2`. A process has these rows:
    ///
    /// | row | events |
    /// | --- | --- |
    /// | `train`: the caller | `epoch N` contains a `chunk` for each step. A generator has neither. A `chunk` contains `queue_wait` (the caller waits for the batch) and `train` (the caller uses the batch). On a device, `gpu_queue_wait` and `gpu_copy_wait` (wait for the copy) replace `queue_wait`. `pause`: the caller iterates over another loader. `before`: a generator's hook runs. `disk_load`, `transform`: the caller fills a slot while it waits. |
    /// | `read`, or `generate` for a generator, or `prefetch` for a pipe: a worker, with its number if there are several | `disk_load` (a batch is read into its slot, from a disk or from memory) and `transform`, or `generate` for a generator |
    /// | `upload`: the copies to a device, or a caller that `sends` | `gpu_transfer` |
    ///
    /// The `args` of an event contain the epoch, and the step and the bytes where there are any. The event
    /// `clock_origin` contains the start of the clock in microseconds since 1970 (`unix_us`) and the process ID.
    ///
    /// Recording takes about 0.1 us per event, plus the writes. Each row writes its events at least with its first
    /// batch, with a batch if the last write was 250 ms or more earlier, whenever they take 16 KiB, and when the loader
    /// is closed or dropped. If the program is killed, unwritten and unfinished events are lost.
    ///
    /// Loaders, generators and streams of one process may share a path. The file is complete when the last of them is
    /// closed or dropped. Another process needs another path. In a process forked from the loader's process, that
    /// loader records nothing.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), epochs: 5 }
    }

    /// Sets the number of epochs to record (passes of a stream, rounds of a generator), counted from the first one
    /// that the loader starts. Default: 5.
    #[must_use]
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.epochs = epochs;
        self
    }

    /// Opens the file for a loader or a generator. Loaders of one process that write to the same file share it.
    pub(crate) fn open(self, loader: Option<&str>, rank: u64, world: u64) -> Result<Arc<LoaderTrace>, Error> {
        // Do not truncate the file: another loader may be writing to it.
        let created = File::options().write(true).create(true).truncate(false).open(&self.path);
        let found = created.and_then(|file| Ok((identity(&self.path, &file)?, file)));
        let (identity, created) = found.map_err(|source| Error::Trace { path: self.path.clone(), source })?;
        let file = loop {
            // Nothing is read or written under this lock.
            let mut open = OPEN.lock();
            open.retain(|(_, _, sink)| sink.strong_count() > 0);
            match open.iter().find(|open| open.0 == identity).map(|(_, file, _)| file.upgrade()) {
                Some(Some(file)) => break file,
                // Another thread drops it now, and writes its end.
                Some(None) => drop(open),
                None => {
                    let file = Arc::new(TraceFile::new(self.path, created, rank));
                    open.push((identity, Arc::downgrade(&file), Arc::downgrade(&file.sink)));
                    break file;
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        file.write("");
        // What fails later stops the trace, and not the training.
        if file.sink.lock().unwrap_or_else(PoisonError::into_inner).whole == 0 {
            check(&file.sink)?;
        }
        // Relaxed: the counter gives each loader another number, and orders nothing else.
        let index = file.loaders.fetch_add(1, Ordering::Relaxed) as u64;
        let name = match loader {
            // Replace characters that a JSON string would have to escape.
            Some(loader) => loader.replace(|c: char| matches!(c, '"' | '\\') || c.is_control(), "_"),
            None if index == 0 => "twinbuf".to_string(),
            None => format!("loader {}", index + 1),
        };
        // A generator has rank 0 of 1 beside loaders of any rank: the number of ranks tells no two of them apart. From
        // 65 536 ranks on, two may be equal.
        let pid = rank.wrapping_add(index << 16);
        // Each event names a thread: without one, Perfetto adds a thread with the number of the process.
        let tid = ROWS * index + 1;
        let named = about("process_name", pid, tid, &format!(r#""name":"{name} rank {rank} of {world}""#));
        let sorted = about("process_sort_index", pid, tid, &format!(r#""sort_index":{pid}"#));
        file.write(&format!(",\n{named},\n{sorted}"));
        Ok(Arc::new(LoaderTrace { file, epochs: self.epochs, index, pid }))
    }
}

/// Returns an event that describes the trace, a process or a row, and has no time.
fn about(name: &str, pid: u64, tid: u64, args: &str) -> String {
    format!(r#"{{"name":"{name}","ph":"M","pid":{pid},"tid":{tid},"args":{{{args}}}}}"#)
}

/// The identity of a file; what its loaders share; and the sink, which exists until the end of the file is written.
type Open = (String, Weak<TraceFile>, Weak<ForkGuard<Mutex<Sink>>>);

/// The files that this process writes. A forked process does not write to its parent's files: it starts other ones.
static OPEN: OfProcess<Vec<Open>> = OfProcess::new();

/// Returns what no other file has while this one is open. A path may become that of another file.
#[cfg(unix)]
fn identity(_: &Path, file: &File) -> io::Result<String> {
    use std::os::unix::fs::MetadataExt as _;
    file.metadata().map(|file| format!("{} {}", file.dev(), file.ino()))
}

/// Returns the path without links and `..`.
#[cfg(not(unix))]
fn identity(path: &Path, _: &File) -> io::Result<String> {
    path.canonicalize().map(|path| format!("{path:?}"))
}

impl<P: Into<PathBuf>> From<P> for Trace {
    /// Calls [`Trace::new`].
    fn from(path: P) -> Self {
        Self::new(path)
    }
}

/// A loader's or generator's access to a trace: the file, and the numbers that identify the loader in it.
#[derive(Debug)]
pub(crate) struct LoaderTrace {
    file: Arc<TraceFile>,
    /// The number of its epochs that are recorded.
    epochs: u64,
    /// The number of loaders that opened the file before this one.
    index: u64,
    /// The process number of this loader in the trace. No loader of another rank below 65 536 has it.
    pid: u64,
}

/// The file, and the clock that all rows share.
#[derive(Debug)]
struct TraceFile {
    start: Instant,
    /// The number of loaders that have opened the file.
    loaders: AtomicUsize,
    /// A forked process has a copy of the events that the tracks gathered, and shares the position in the file with its
    /// parent. So it writes nothing.
    sink: Arc<ForkGuard<Mutex<Sink>>>,
}

#[derive(Debug)]
struct Sink {
    path: PathBuf,
    file: File,
    /// The start of the file, until it is written.
    head: Option<String>,
    /// The bytes of whole lines in the file.
    whole: u64,
    /// The first failure: nothing is written after it.
    error: Option<io::Error>,
}

impl TraceFile {
    /// The first write makes the file empty and writes its start.
    fn new(path: PathBuf, file: File, rank: u64) -> Self {
        let (start, clock) = (Instant::now(), SystemTime::now());
        let unix_us = clock.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros();
        let origin = format!(r#""unix_us":{unix_us},"process":{}"#, std::process::id());
        let head = Some(format!("[\n{}", about("clock_origin", rank, 1, &origin)));
        let sink = Arc::new(ForkGuard::new(Mutex::new(Sink { path, file, head, whole: 0, error: None })));
        Self { start, loaders: AtomicUsize::new(0), sink }
    }

    fn write(&self, lines: &str) {
        if self.sink.is_foreign() {
            return;
        }
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(head) = sink.head.take() {
            // What is not a regular file, for example a pipe, has no length.
            sink.error = sink.file.set_len(0).err().filter(|_| sink.is_regular());
            sink.write(&head);
        }
        sink.write(lines);
    }
}

impl Sink {
    fn is_regular(&self) -> bool {
        self.file.metadata().is_ok_and(|file| file.is_file())
    }

    fn write(&mut self, lines: &str) {
        if self.error.is_none() {
            let fits = check_size(if self.is_regular() { self.whole + lines.len() as u64 } else { 0 });
            // Write whole lines with one call, so that a killed process leaves no partial line.
            match fits.map_err(|(_, error)| error).and_then(|()| self.file.write_all(lines.as_bytes())) {
                Ok(()) => self.whole += lines.len() as u64,
                Err(error) => {
                    // A full disk may take only a part of the lines: cut the file back to whole lines. This fails for a
                    // pipe, which has no length.
                    let _ = self.file.set_len(self.whole);
                    self.error = Some(error);
                }
            }
        }
    }
}

/// Returns the error that stopped the writing. Later calls return only the kind of that error.
fn check(sink: &Mutex<Sink>) -> Result<(), Error> {
    let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(source) = sink.error.take() else { return Ok(()) };
    sink.error = Some(io::Error::from(source.kind()));
    Err(Error::Trace { path: sink.path.clone(), source })
}

impl LoaderTrace {
    /// Writes the closing bracket if nothing else uses the file. Returns the error that stopped the writing.
    pub(crate) fn close(self: Arc<Self>) -> Result<(), Error> {
        let sink = self.file.sink.clone();
        drop(self);
        check(&sink)
    }
}

impl Drop for TraceFile {
    fn drop(&mut self) {
        self.write("\n]\n");
    }
}

/// The bytes of events that a track gathers before it writes them.
const BUFFER: usize = 16 << 10;
/// The row numbers that are reserved for each loader: more than it has threads.
const ROWS: u64 = 1000;
/// A track writes its events when the last write was at least this long ago.
const KEEP: Duration = Duration::from_millis(250);

/// One row of the trace: gathers the events of a thread, and writes them to the file. Without a trace it does nothing.
#[derive(Debug, Default)]
pub(crate) struct Track {
    trace: Option<Arc<LoaderTrace>>,
    /// Whether the batches are rounds of a generator, which have no steps.
    rounds: bool,
    /// Whether the caller waits for batches on a device.
    on_device: bool,
    /// Whether the row shows copies: a caller sends the batches to a device, and its use of a batch is a copy.
    sends: bool,
    /// The text between the name and the time of an event. It is the same for all events of the track.
    common: String,
    buffer: String,
    /// When events were last written; `None` before the first time.
    written: Option<Instant>,
}

impl Track {
    pub(crate) fn new(
        trace: Option<Arc<LoaderTrace>>,
        id: u32,
        name: &str,
        rounds: bool,
        on_device: bool,
    ) -> Self {
        let Some(trace) = trace else { return Self::default() };
        let pid = trace.pid;
        let id = ROWS * trace.index + u64::from(id);
        let common = format!(r#"","ph":"X","pid":{pid},"tid":{id},"ts":"#);
        let buffer = String::with_capacity(BUFFER + 1024);
        let named = about("thread_name", pid, id, &format!(r#""name":"{name}""#));
        let sorted = about("thread_sort_index", pid, id, &format!(r#""sort_index":{id}"#));
        trace.file.write(&format!(",\n{named},\n{sorted}"));
        let (trace, sends) = (Some(trace), name == "upload");
        Self { trace, rounds, on_device, sends, common, buffer, written: None }
    }

    /// Adds an event of the log.
    pub(crate) fn add(&mut self, &Event { what, batch, start, end, bytes }: &Event) {
        let Some(trace) = self.trace.as_ref().filter(|trace| batch.ordinal < trace.epochs) else { return };
        let (Some(name), since) = (self.name(what), trace.file.start) else { return };
        // The comma comes before the event, so that the file never ends with a comma. An event is written piece by piece:
        // `core::fmt` takes several times as long.
        self.buffer.push_str(",\n{\"name\":\"");
        self.buffer.push_str(name);
        if what == What::Epoch {
            // A viewer colors events by name, so each epoch has a name of its own.
            self.buffer.push(' ');
            self.number(batch.epoch);
        }
        self.buffer.push_str(&self.common);
        self.micros(start.saturating_duration_since(since));
        self.buffer.push_str(r#","dur":"#);
        self.micros(end.saturating_duration_since(start));
        self.buffer.push_str(r#","args":{"epoch":"#);
        self.number(batch.epoch);
        if !self.rounds && what != What::Epoch {
            self.buffer.push_str(r#","step":"#);
            self.number(batch.step);
        }
        if bytes > 0 {
            self.buffer.push_str(r#","bytes":"#);
            self.number(bytes as u64);
        }
        self.buffer.push_str("}}");
        if self.buffer.len() >= BUFFER {
            self.flush();
        }
    }

    /// Adds the events of a load, and writes the gathered events if they are due.
    pub(crate) fn loaded(&mut self, batch: Place, load: &LoadTimes) {
        load.events(batch).for_each(|event| self.add(&event));
        self.write_if_due(load.end);
    }

    /// Writes the gathered events if the last write was at least [`KEEP`] ago, or if there was none. To be called
    /// before the thread does something that may take long.
    pub(crate) fn write_if_due(&mut self, now: Instant) {
        if self.written.is_none_or(|written| now.saturating_duration_since(written) >= KEEP) {
            self.flush();
        }
    }

    /// Writes the gathered events.
    pub(crate) fn flush(&mut self) {
        if let Some(trace) = self.trace.as_ref().filter(|_| !self.buffer.is_empty()) {
            trace.file.write(&self.buffer);
            self.buffer.clear();
            self.written = Some(Instant::now());
        }
    }

    /// Returns the name of the event in the trace. An event without a name is not written: it shows as a gap.
    fn name(&self, what: What) -> Option<&'static str> {
        Some(match what {
            What::Load if self.rounds => "generate",
            What::Load => "disk_load",
            What::Transform => "transform",
            What::Transfer => "gpu_transfer",
            What::Use if self.sends => "gpu_transfer",
            What::SlotWait => return None,
            _ if self.sends => return None,
            What::Epoch => "epoch",
            What::Step => "chunk",
            What::Wait if self.on_device => "gpu_queue_wait",
            What::Wait => "queue_wait",
            What::CopyWait => "gpu_copy_wait",
            What::Prepare => "before",
            What::Use => "train",
            What::Pause => "pause",
        })
    }

    fn number(&mut self, number: u64) {
        self.buffer.push_str(itoa::Buffer::new().format(number));
    }

    /// Writes a time in microseconds, with three decimals.
    fn micros(&mut self, time: Duration) {
        // A `u64` holds more than five centuries of nanoseconds.
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.number(nanos / 1000);
        // Add 1000 to keep leading zeros, then skip the first digit: 1007 becomes `007`.
        self.buffer.push('.');
        self.buffer.push_str(&itoa::Buffer::new().format(1000 + nanos % 1000)[1..]);
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests {
    #[cfg(unix)]
    use super::*;

    /// The thread that made the list's entry has not written the start of the file yet.
    #[test]
    #[cfg(target_os = "linux")]
    fn who_finds_a_trace_open_is_told_that_its_start_cannot_be_written() {
        let path = Path::new("/dev/full"); // every write to it fails
        let full = File::options().write(true).open(path).unwrap();
        let identity = identity(path, &full).unwrap();
        let file = Arc::new(TraceFile::new(path.into(), full, 0));
        OPEN.lock().push((identity, Arc::downgrade(&file), Arc::downgrade(&file.sink)));
        let found = Trace::new(path).open(None, 0, 1);
        assert!(matches!(&found, Err(Error::Trace { .. })), "{found:?}");
    }

    /// The thread that has locked the list does not exist there.
    #[test]
    #[cfg(unix)]
    fn a_process_that_is_forked_while_the_list_is_locked_opens_a_trace() {
        let list = OPEN.lock();
        // SAFETY: takes no pointer. The child leaves by `_exit` and runs nothing of the test harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: takes no pointer. It ends a hang.
            unsafe { libc::alarm(60) };
            let opens = Trace::new("/dev/null").open(None, 0, 1).is_ok();
            // SAFETY: takes no pointer, and does not return.
            unsafe { libc::_exit(i32::from(!opens)) }
        }
        let mut status = 0;
        // SAFETY: the kernel writes to `status`, a live local.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        drop(list);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status}");
    }
}
