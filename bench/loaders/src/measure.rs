//! The process of a subject: its runs and its end.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use twinbuf::BoxError;

use crate::work::{Outcome, Work};

/// The longest time to import a library, open the files and time the trainer.
const START: Duration = Duration::from_secs(120);

/// A run that takes longer than this after its start fails.
const LIMIT: Duration = Duration::from_secs(60);

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

    /// Runs it on `work`. Do not use it after an error.
    ///
    /// `prepare` runs after the process is ready and before its start, so every subject finds the page cache in the same
    /// state, however long it took to get ready.
    pub fn run(
        &mut self,
        work: &Work,
        prepare: impl FnOnce() -> Result<(), BoxError>,
    ) -> Result<Outcome, BoxError> {
        // This fails if it has ended; `line` reports its end.
        let _ = self.say(&serde_json::to_string(work)?);
        let (mut until, mut prepare) = (Instant::now() + START, Some(prepare));
        loop {
            let line = self.line(until)?;
            if line == "ready" {
                if let Some(prepare) = prepare.take() {
                    prepare()?;
                    let _ = self.say("go");
                    until = Instant::now() + LIMIT;
                }
            // Another line is output that a library prints while it is imported.
            } else if let Ok(outcome) = serde_json::from_str::<Outcome>(&line) {
                return match outcome.error {
                    Some(error) => Err(error.into()),
                    None => Ok(outcome),
                };
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

    /// Its next line, or the reason why there is none.
    fn line(&mut self, until: Instant) -> Result<String, BoxError> {
        match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => return Ok(line),
            Err(RecvTimeoutError::Timeout) => return Err("it hangs".into()),
            Err(RecvTimeoutError::Disconnected) => {}
        }
        // The last of its processes has closed its standard output.
        let words = self.words.take().and_then(|words| words.join().ok()).unwrap_or_default();
        let noise = ["note: ", "WARNING:"];
        let says_something =
            |line: &&str| !line.trim().is_empty() && !noise.iter().any(|noise| line.starts_with(noise));
        let last = words.lines().rev().find(says_something).unwrap_or_default();
        Err(format!("{}: {last}", self.child.wait()?).into())
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
