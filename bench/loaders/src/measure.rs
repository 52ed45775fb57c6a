//! The process of a subject: its runs, its memory, its end.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use twinbuf::BoxError;

use crate::sys;
use crate::work::{Outcome, Work};

/// The interval between two memory samples.
const LOOK: Duration = Duration::from_millis(10);

/// The longest time to import a library and open the files.
const START: Duration = Duration::from_secs(120);

/// How a run ended.
pub enum End {
    Said(Outcome),
    /// The process ended without a result, and with these last lines on its standard error.
    Died(ExitStatus, String),
    /// It did not end within the time limit.
    Hung,
}

/// The figures of a run.
pub struct Ran {
    pub end: End,
    /// Memory of all its processes that is not file-backed, in bytes: when it was ready, and the peak. Only if sampled.
    pub memory: (u64, u64),
}

/// The process of a subject. It is killed with its workers when this is dropped.
pub struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    words: Option<JoinHandle<String>>,
}

impl Process {
    pub fn start(program: &[String]) -> Result<Self, BoxError> {
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]);
        // Its last lines must be the error.
        command.env("RUST_BACKTRACE", "0");
        // The trainer has one thread; the others are the loader's.
        command.env("OMP_NUM_THREADS", "1").env("OPENBLAS_NUM_THREADS", "1");
        // A separate process group, to kill it with its workers.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: between fork and exec only `prctl` is called. It is async-signal-safe.
        unsafe { command.pre_exec(sys::sharp_timers) };
        let mut child = command.spawn().map_err(|error| format!("{}: {error}", program[0]))?;
        let stdin = child.stdin.take().ok_or("a child without its pipe")?;
        let stdout = BufReader::new(child.stdout.take().ok_or("a child without its pipe")?);
        let mut stderr = child.stderr.take().ok_or("a child without its pipe")?;
        let (says, lines) = channel();
        // Both threads end when the last of its processes does.
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| says.send(line)));
        let words = thread::spawn(move || {
            let mut text = Vec::new();
            // The text up to the failure is all there is.
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Ok(Self { child, stdin, lines, words: Some(words) })
    }

    /// Runs it on `work`. After an end other than `Said` it cannot be used again.
    ///
    /// `memory`: whether to sample its memory, which disturbs it. `limit`: the time after the start at which it counts
    /// as hung. `prepare`: runs after the process is ready and before its start, so every subject finds the page cache
    /// in the same state, however long it took to get ready.
    pub fn run(
        &mut self,
        work: &Work,
        memory: bool,
        limit: Duration,
        prepare: impl FnOnce() -> Result<(), BoxError>,
    ) -> Result<Ran, BoxError> {
        let mut ran = Ran { end: End::Hung, memory: (0, 0) };
        // These fail if it has ended; its end is reported below.
        let _ = self.say(&serde_json::to_string(work)?);
        let started = Instant::now();
        loop {
            match self.lines.recv_timeout(START.saturating_sub(started.elapsed())) {
                Ok(line) if line == "ready" => break,
                // Output that a library prints while it is imported, or an early error.
                Ok(line) => {
                    if let Ok(outcome) = serde_json::from_str(&line) {
                        ran.end = End::Said(outcome);
                        return Ok(ran);
                    }
                }
                Err(end) => return self.ended(end, ran),
            }
        }
        prepare()?;
        if memory {
            let found = anonymous(self.child.id());
            ran.memory = (found, found);
        }
        let _ = self.say("go");
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(if memory { left.min(LOOK) } else { left }) {
                Ok(line) => {
                    if let Ok(outcome) = serde_json::from_str(&line) {
                        ran.end = End::Said(outcome);
                        return Ok(ran);
                    }
                }
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {
                    ran.memory.1 = ran.memory.1.max(anonymous(self.child.id()));
                }
                Err(end) => return self.ended(end, ran),
            }
        }
    }

    /// Whether it or one of its workers has the file mapped: such pages stay in the page cache.
    pub fn maps(&self, file: &Path) -> io::Result<bool> {
        let file = file.canonicalize()?.display().to_string();
        // A process that has just ended maps nothing.
        let maps = |process: &String| fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
        Ok(family(self.child.id())
            .iter()
            .any(|process| maps(process).lines().any(|line| line.ends_with(&file))))
    }

    fn say(&mut self, line: &str) -> io::Result<()> {
        self.stdin.write_all(format!("{line}\n").as_bytes())
    }

    /// The end after a timeout, or after the last of its processes has closed its standard output.
    fn ended(&mut self, end: RecvTimeoutError, mut ran: Ran) -> Result<Ran, BoxError> {
        if end == RecvTimeoutError::Timeout {
            return Ok(ran);
        }
        let words = self.words.take().and_then(|words| words.join().ok()).unwrap_or_default();
        let noise = ["note: ", "WARNING:"];
        let says_something =
            |line: &&str| !line.trim().is_empty() && !noise.iter().any(|noise| line.starts_with(noise));
        let last = words.lines().rev().find(says_something).unwrap_or_default().to_owned();
        ran.end = End::Died(self.child.wait()?, last);
        Ok(ran)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let group = self.child.id().cast_signed();
        // Its process id may be reused once it was waited for; its workers ended with its pipe.
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            // SAFETY: a signal to a group that we created and whose leader we have not waited for.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        let _ = self.child.wait();
    }
}

/// A process and all its descendants.
fn family(process: u32) -> BTreeSet<String> {
    let (mut todo, mut seen) = (vec![process.to_string()], BTreeSet::new());
    while let Some(process) = todo.pop() {
        if !seen.insert(process.clone()) {
            continue;
        }
        for thread in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            todo.extend(children.split_whitespace().map(str::to_owned));
        }
    }
    seen
}

/// Memory of a process and all its descendants that is not file-backed, in bytes, with shared pages counted once.
fn anonymous(process: u32) -> u64 {
    let mut found = 0;
    for process in family(process) {
        // A process that has just ended has none.
        let maps = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
        for line in
            maps.lines().filter(|line| line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:"))
        {
            let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
            found += kib.unwrap_or(0) << 10;
        }
    }
    found
}
