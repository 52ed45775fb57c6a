//! One run of one subject: a process of its own, its CPU time, its memory, its end.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use twinbuf::BoxError;

use crate::sys;
use crate::work::{Outcome, Work};

/// Between two looks at the memory.
const LOOK: Duration = Duration::from_millis(10);

/// How a run ended.
pub enum End {
    Said(Outcome),
    /// Without its line: with the last words of its standard error.
    Died(ExitStatus, String),
    /// Not within the time, and was killed.
    Hung,
}

/// What a run took.
pub struct Ran {
    pub end: End,
    /// CPU time of all its threads and processes after it was ready.
    pub cpu: Duration,
    /// Memory of all its processes that is no file's, in bytes: when it was ready, and at most. Only if looked at.
    pub memory: (u64, u64),
}

/// Runs `program`, which is a subject, on `work`.
///
/// `memory`: whether to look at its memory, which disturbs it. `limit`: the time from the go after which it hangs. `prepare`: what is done
/// between its being ready and its go, so that all find the page cache in the same state, however long they took.
pub fn run(
    program: &[String],
    work: &Work,
    memory: bool,
    limit: Duration,
    prepare: impl FnOnce() -> Result<(), BoxError>,
) -> Result<Ran, BoxError> {
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]).args(work.args());
    // Its last words are to be what went wrong.
    command.env("RUST_BACKTRACE", "0");
    // A group of its own, so that it can be killed with its workers.
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: between fork and exec only `prctl` is called, which is async-signal-safe.
    unsafe { command.pre_exec(sys::sharp_timers) };
    let mut child = command.spawn().map_err(|error| format!("{}: {error}", program[0]))?;
    let group = child.id().cast_signed();
    let stop = || {
        // SAFETY: a signal to a group that we have made and whose leader we have not waited for.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    };
    let (mut stdin, mut stderr) = (child.stdin.take(), child.stderr.take());
    let stdout = BufReader::new(child.stdout.take().ok_or("a child without its pipe")?);
    let (says, lines) = channel();
    let speech = thread::spawn(move || {
        // Both end when the last of its processes does.
        stdout.lines().map_while(Result::ok).try_for_each(|line| says.send(line))
    });
    let words = thread::spawn(move || {
        let mut text = Vec::new();
        // What came until it failed is all there is.
        let _ = stderr.as_mut().map(|stderr| stderr.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });

    let mut ran = Ran { end: End::Hung, cpu: Duration::ZERO, memory: (0, 0) };
    let mut line = lines.recv_timeout(Duration::from_secs(120));
    let mut outcome = None;
    let mut prepared = Ok(());
    if line.as_deref() == Ok("ready") {
        prepared = prepare();
        if memory {
            let found = anonymous(group);
            ran.memory = (found, found);
        }
        // Fails if it has ended, which its end tells.
        let _ = stdin.as_mut().map(|stdin| stdin.write_all(b"\n"));
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            line = lines.recv_timeout(if memory { left.min(LOOK) } else { left });
            match &line {
                Ok(line) => outcome = serde_json::from_str::<Outcome>(line).ok().or(outcome),
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {
                    ran.memory.1 = ran.memory.1.max(anonymous(group));
                }
                Err(_) => break,
            }
        }
    }
    let hung = line == Err(RecvTimeoutError::Timeout);
    if hung || line.is_ok() {
        stop();
    }
    ended(group)?;
    // A worker that outlived it.
    stop();
    let (status, cpu) = wait(group)?;
    let _ = speech.join();
    prepared?;
    let words = words.join().unwrap_or_default();
    let says_something = |line: &&str| !line.trim().is_empty() && !line.starts_with("note: ");
    let last = words.lines().rev().find(says_something).unwrap_or_default().to_owned();
    ran.end = match outcome {
        _ if hung => End::Hung,
        Some(outcome) => {
            ran.cpu = cpu.saturating_sub(Duration::from_secs_f64(outcome.cpu_before_s));
            End::Said(outcome)
        }
        None => End::Died(status, last),
    };
    Ok(ran)
}

/// Waits for a child's end, and leaves it a zombie, so that its number stays its own.
fn ended(child: i32) -> Result<(), BoxError> {
    let mut found = MaybeUninit::<libc::siginfo_t>::uninit();
    let flags = libc::WEXITED | libc::WNOWAIT;
    loop {
        // SAFETY: `found` is ours to write; the child is ours and nobody else waits for it.
        match unsafe { libc::waitid(libc::P_PID, child.cast_unsigned(), found.as_mut_ptr(), flags) } {
            0 => return Ok(()),
            _ => match std::io::Error::last_os_error() {
                error if error.kind() == std::io::ErrorKind::Interrupted => {}
                error => return Err(format!("waitid: {error}").into()),
            },
        }
    }
}

/// Takes the end of a child that has ended: its status, and its CPU time with that of those that it has waited for.
fn wait(child: i32) -> Result<(ExitStatus, Duration), BoxError> {
    let (mut status, mut usage) = (0, MaybeUninit::<libc::rusage>::uninit());
    // SAFETY: both are ours to write; the child is ours and nobody else waits for it.
    if unsafe { libc::wait4(child, &mut status, 0, usage.as_mut_ptr()) } != child {
        return Err(format!("wait4: {}", std::io::Error::last_os_error()).into());
    }
    // SAFETY: the call succeeded, so the kernel has written all of it.
    Ok((ExitStatus::from_raw(status), sys::used(&unsafe { usage.assume_init() })))
}

/// Memory of a process and all its descendants that is no file's, in bytes, shared pages counted once.
fn anonymous(process: i32) -> u64 {
    let (mut found, mut todo, mut seen) = (0, vec![process.to_string()], BTreeSet::new());
    while let Some(process) = todo.pop() {
        if !seen.insert(process.clone()) {
            continue;
        }
        // One that has just ended has none.
        let maps = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap_or_default();
        for line in
            maps.lines().filter(|line| line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:"))
        {
            let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
            found += kib.unwrap_or(0) << 10;
        }
        for thread in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            todo.extend(children.split_whitespace().map(str::to_owned));
        }
    }
    found
}
