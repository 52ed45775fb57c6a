//! The trace: the documented events, nested as they happened, in a file that can be read at any time.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::task::Poll;
use std::time::Instant;

use crate::common::trace::{self, nanos, span};
use crate::common::{RECORD, Reads, files, nothing, open, plan};
use crate::pipe::Numbers;
use serde_json::{Value, json};
use tempfile::TempDir;
use twinbuf::loader::LoaderBuilder;
use twinbuf::observe::{LoopRecorder, Trace};
use twinbuf::{Error, Loader, Plan, Shuffle};
use twinbuf_testing::extent;

/// The file as a viewer reads it if its process has not closed the list.
fn unclosed(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(!text.trim_end().ends_with(']'), "it could close the list");
    serde_json::from_str(&(text + "]")).unwrap()
}

/// A folder, and the path of a trace in it.
fn place() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("trace.json");
    (dir, path)
}

/// A loader whose epochs have `records / 8` batches.
fn traced(records: u64, trace: impl Into<Trace>) -> LoaderBuilder {
    Loader::builder(Reads(records, RECORD, nothing), plan(records, 8)).trace(trace)
}

/// Returns the command that runs `test` of this program in another process, with `variable` set to `path`.
fn again(test: &str, variable: &str, path: &Path) -> Command {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", &format!("trace::{test}"), "--nocapture"]).env(variable, path);
    program
}

/// Makes a FIFO and a process that reads its first line. With `holds`, the process then keeps it open until the end of its
/// standard input. A thread of this process would not do: processes that other tests fork would have copies of its end.
#[cfg(unix)]
fn reader(fifo: &Path, holds: bool) -> Child {
    assert!(Command::new("mkfifo").arg(fifo).status().unwrap().success());
    let holds = if holds { "read -r _" } else { "true" };
    let program = format!(r#"exec 3<"$0"; read -r _ <&3; {holds}; true"#);
    Command::new("sh").args(["-c", &program]).arg(fifo).stdin(Stdio::piped()).spawn().unwrap()
}

fn named<'e>(events: &'e [Value], name: &str) -> Vec<&'e Value> {
    // Epochs have their numbers in their names.
    let named = |event: &&Value| match event["name"].as_str().unwrap().split_once(' ') {
        Some(("epoch", _)) => name == "epoch",
        _ => event["name"] == name,
    };
    events.iter().filter(named).collect()
}

#[test]
fn the_events_of_the_first_epochs() {
    let (dir, paths) = files(&[40]);
    let path = dir.path().join("trace.json");
    for overlap in [false, true] {
        let builder = Loader::builder(open(&paths), plan(40, 8)).overlap(overlap);
        let mut loader = builder.trace(Trace::new(&path).epochs(2)).build().unwrap();
        let mut first = loader.epoch(10);
        let batch = first.next().unwrap().unwrap();
        // Each side has written its events before it handed the batch over.
        let early = unclosed(&path);
        for name in ["disk_load", "queue_wait"] {
            let found = named(&early, name);
            assert!(found.iter().any(|event| event["args"]["step"] == 0), "{name}, overlap {overlap}");
        }
        drop(batch);
        assert_eq!(first.count(), 4);
        for epoch in 11..13 {
            assert_eq!(loader.epoch(epoch).count(), 5);
        }
        loader.close().unwrap();
        let events = trace::events(&path);
        for (name, expected) in
            [("epoch", 2), ("chunk", 10), ("train", 10), ("queue_wait", 10), ("disk_load", 10)]
        {
            let found = named(&events, name);
            assert_eq!(found.len(), expected, "{name}, overlap {overlap}");
            for event in found {
                assert_eq!(event["ph"], "X");
                assert!([10, 11].contains(&event["args"]["epoch"].as_u64().unwrap()), "{event}");
                assert!(event["ts"].as_f64().unwrap() >= 0.0 && event["dur"].as_f64().unwrap() >= 0.0);
                let track = if name == "disk_load" { 2 } else { 1 };
                assert_eq!(event["tid"], track, "{event}");
            }
        }
        // A chunk consists of its wait and its use, in this order; the disk was read before its use began.
        let close = |a: f64, b: f64| (a - b).abs() < 0.002; // the format's rounding, in microseconds
        for (epoch, step) in (10..12).flat_map(|epoch| (0..5).map(move |step| (epoch, step))) {
            let here = |event: &Value| event["args"]["epoch"] == epoch && event["args"]["step"] == step;
            let of = |name: &str| {
                let found: Vec<_> = named(&events, name).into_iter().filter(|event| here(event)).collect();
                assert_eq!(found.len(), 1, "{name}, epoch {epoch}, step {step}");
                span(found[0])
            };
            let [chunk, wait, train, load] = ["chunk", "queue_wait", "train", "disk_load"].map(of);
            assert!(close(chunk.0, wait.0) && close(wait.1, train.0) && close(train.1, chunk.1));
            assert!(load.1 <= train.0 + 0.002, "read before used");
        }
    }
}

/// Each epoch ends before the next one begins, in which the loop waits for its first item.
#[test]
fn the_epochs_of_any_loop_are_one_after_the_other() {
    let (_dir, path) = place();
    let mut recorder = LoopRecorder::new(None, Some(Trace::new(&path)), false).unwrap();
    let (start, mut steps) = (std::time::Instant::now(), 0);
    let mut later = || {
        steps += 1;
        start + std::time::Duration::from_millis(steps)
    };
    for (epoch, step) in (0..3).flat_map(|epoch| (0..2).map(move |step| (epoch, step))) {
        recorder.asked(later());
        recorder.received(epoch, step, later());
    }
    recorder.ended(later());
    drop(recorder);
    let events = trace::events(&path);
    assert_eq!(named(&events, "epoch").len(), 3);
    assert_eq!(trace::errors(&events), [""; 0]);
}

#[test]
fn a_rank_is_a_process_so_that_traces_can_be_put_together() {
    let (dir, paths) = files(&[64]);
    let before = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    for rank in 0..3 {
        let path = dir.path().join("trace.json");
        let plan = Plan::builder(64).batch(8).shuffle(Shuffle::Full).rank(rank, 3).build().unwrap();
        let steps = plan.steps(0);
        let mut loader = Loader::builder(open(&paths), plan).trace(Trace::new(&path)).build().unwrap();
        assert_eq!(loader.epoch(0).count() as u64, steps);
        loader.close().unwrap();
        let events = trace::events(&path);
        assert!(events.iter().all(|event| event["pid"] == rank), "rank {rank}");
        let meta = |name: &str| -> Vec<&Value> {
            let found = named(&events, name);
            assert!(found.iter().all(|event| event["ph"] == "M" && event["tid"].is_u64()), "{name}");
            found.into_iter().map(|event| &event["args"]).collect()
        };
        assert_eq!(meta("process_name"), [&json!({ "name": format!("twinbuf rank {rank} of 3") })]);
        assert_eq!(meta("process_sort_index"), [&json!({ "sort_index": rank })]);
        let mut names: Vec<_> = meta("thread_name").iter().map(|args| args["name"].to_string()).collect();
        names.sort_unstable();
        assert_eq!(names, ["\"read\"", "\"train\""]);
        let clock = meta("clock_origin")[0];
        let after = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let started = u128::from(clock["unix_us"].as_u64().unwrap());
        assert!((before.as_micros()..=after.as_micros()).contains(&started), "{clock}");
        assert_eq!(clock["process"], std::process::id());
    }
    // A generator has no ranks. It is another process than a loader of any rank.
    let path = dir.path().join("trace.json");
    let made = twinbuf::generate(|_: u64, _: &mut u64| Ok::<(), std::io::Error>(()));
    let plan = Plan::builder(64).batch(8).rank(1, 2).build().unwrap();
    let loader = Loader::builder(open(&paths), plan).trace(Trace::new(&path)).build().unwrap();
    let both = (loader, made.trace(Trace::new(&path)).build().unwrap());
    drop(both);
    let events = trace::events(&path);
    let numbers: BTreeSet<_> =
        named(&events, "process_name").iter().map(|event| event["pid"].as_u64()).collect();
    assert_eq!(numbers.len(), 2, "{numbers:?}");
}

/// Set for the process to be killed: the path of its trace.
const VICTIM: &str = "TWINBUF_TEST_TRACE_OF_VICTIM";

#[test]
fn a_killed_program_leaves_whole_events() {
    if let Some(path) = std::env::var_os(VICTIM) {
        let mut loader = traced(80, path).build().unwrap();
        assert_eq!(loader.epoch(4).count(), 10);
        let _batch = loader.epoch(5).next();
        println!("\nin the second epoch");
        // Nobody writes to it: this waits until the process is killed.
        let _ = io::stdin().read(&mut [0]);
        return;
    }
    let (_dir, path) = place();
    let mut victim = again("a_killed_program_leaves_whole_events", VICTIM, &path);
    let mut victim = victim.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    let said = lines.map_while(Result::ok).any(|line| line == "in the second epoch");
    victim.kill().unwrap();
    victim.wait().unwrap();
    assert!(said, "the program came to its second epoch");

    let events = unclosed(&path);
    for (name, expected) in [("epoch", 1), ("train", 10), ("queue_wait", 10), ("disk_load", 10)] {
        let first: Vec<_> =
            named(&events, name).into_iter().filter(|event| event["args"]["epoch"] == 4).collect();
        assert_eq!(first.len(), expected, "{name}: an epoch that has ended is in the file");
    }
}

/// Two loaders write one file, whatever it is called.
#[test]
#[cfg(unix)]
fn one_file_under_several_names_is_one_file() {
    let (dir, path) = place();
    std::fs::create_dir(dir.path().join("x")).unwrap();
    std::os::unix::fs::symlink("trace.json", dir.path().join("link.json")).unwrap();
    let names = ["trace.json", "x/../trace.json", "link.json"];
    // The first name may be of a link to a file that does not exist yet.
    for (first, second) in [(names[0], names[1]), (names[1], names[2]), (names[2], names[0])] {
        let _ = std::fs::remove_file(&path);
        let build = |name| traced(40, dir.path().join(name)).build().unwrap();
        let (mut one, mut other) = (build(first), build(second));
        assert_eq!((one.epoch(0).count(), other.epoch(0).count()), (5, 5));
        one.close().unwrap();
        other.close().unwrap();
        assert_eq!(named(&trace::events(&path), "train").len(), 10, "{first}, {second}");
    }
}

/// A path is that of another file once the first one was renamed or removed.
#[test]
#[cfg(unix)]
fn a_file_that_was_moved_is_another_file() {
    let (dir, path) = place();
    let moved = dir.path().join("moved.json");
    let build = |path| traced(40, path).build().unwrap();
    for removed in [false, true] {
        let mut one = build(&path);
        assert_eq!(one.epoch(0).count(), 5);
        let gone = if removed { std::fs::remove_file(&path) } else { std::fs::rename(&path, &moved) };
        gone.unwrap();
        let mut others = vec![build(&path), build(&path)];
        if !removed {
            others.push(build(&moved));
        }
        assert!(others.iter_mut().all(|other| other.epoch(0).count() == 5));
        one.close().unwrap();
        others.into_iter().for_each(|other| other.close().unwrap());
        assert_eq!(named(&trace::events(&path), "train").len(), 10);
        assert_eq!(named(&trace::events(&moved), "train").len(), 10);
    }
}

/// One thread drops the last loader of a file while another opens it: both write one trace, or the second begins a new one.
#[test]
fn a_file_that_another_thread_completes_may_be_opened() {
    let (_dir, path) = place();
    let now = Instant::now();
    let record = || {
        let mut recorder = LoopRecorder::new(None, Some(Trace::new(&path)), false).unwrap();
        recorder.asked(now);
        recorder.received(0, 0, now);
        recorder.ended(now);
        recorder
    };
    for case in 0..extent(300, 5000) {
        let (first, both) = (record(), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                both.wait();
                drop(first);
            });
            both.wait();
            drop(record());
        });
        let text = std::fs::read(&path).unwrap();
        let events = serde_json::from_slice::<Vec<Value>>(&text);
        assert!(events.is_ok(), "{case}: {}", String::from_utf8_lossy(&text).escape_debug());
    }
}

/// The loaders of a forked process share a file too.
#[test]
#[cfg(unix)]
fn a_forked_process_has_a_file_of_its_own() {
    let (_dir, path) = place();
    let build = || traced(40, &path).overlap(false).build();
    let _parents = build().unwrap();
    assert!(crate::common::forked::forked(|| {
        let (mut one, mut other) = (build().unwrap(), build().unwrap());
        let counts = (one.epoch(0).count(), other.epoch(0).count());
        let closed = one.close().is_ok() && other.close().is_ok();
        counts == (5, 5) && closed && named(&trace::events(&path), "train").len() == 10
    }));
}

/// A process that is forked while a write takes long, as to a pipe that nobody reads, opens a trace too.
#[test]
#[cfg(target_os = "linux")]
fn a_trace_opens_while_the_write_to_another_waits() {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;

    let (dir, path) = place();
    let fifo = dir.path().join("trace.fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let options = std::fs::File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).clone();
    let mut full = options.open(&fifo).unwrap();
    while full.write(&[0; 4096]).is_ok() {}
    let record = |path: &Path| LoopRecorder::new(None, Some(Trace::new(path)), false).map(drop);
    let (send, thread) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            // SAFETY: takes no pointer.
            send.send(unsafe { libc::gettid() }).unwrap();
            record(&fifo)
        });
        let call = format!("/proc/self/task/{}/syscall", thread.recv().unwrap());
        let is_write = |call: String| call.starts_with(&format!("{} ", libc::SYS_write));
        while std::fs::read_to_string(&call).is_ok_and(|call| !is_write(call)) {
            std::thread::yield_now();
        }
        let opens = crate::common::forked::forked(|| record(&path).is_ok());
        // Room for the rest.
        while full.read(&mut [0; 4096]).is_ok() {}
        waits.join().unwrap().unwrap();
        assert!(opens);
    });
}

#[cfg(unix)]
#[track_caller]
fn fails(found: &Result<(), Error>, wanted: &Path, kind: io::ErrorKind) {
    let Err(Error::Trace { path, source }) = found else { panic!("{found:?}") };
    assert_eq!((&**path, source.kind()), (wanted, kind));
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_stops_the_trace_and_not_the_training() {
    // Opened like a file; every write to it fails with ENOSPC.
    fails(&traced(4000, "/dev/full").build().map(drop), Path::new("/dev/full"), io::ErrorKind::StorageFull);
}

#[test]
#[cfg(unix)]
fn a_write_that_fails_later_is_told_by_close() {
    for overlap in [false, true] {
        let (_dir, fifo) = place();
        let mut reader = reader(&fifo, false);
        let mut loader = traced(4000, &fifo).overlap(overlap).build().unwrap();
        // Every write fails with EPIPE from now on.
        assert!(reader.wait().unwrap().success());
        for epoch in 0..2 {
            assert!(loader.epoch(epoch).all(|batch| batch.is_ok()), "the training goes on");
        }
        assert_eq!(loader.report().batches, 1000);
        fails(&loader.close(), &fifo, io::ErrorKind::BrokenPipe);
    }
}

#[test]
#[cfg(unix)]
fn a_write_that_only_close_does_is_told_too() {
    let (_dir, fifo) = place();
    let mut reader = reader(&fifo, true);
    // Without overlap, all events are written by the end of the epoch: `close` writes the bracket alone.
    let mut loader = traced(160, &fifo).overlap(false).build().unwrap();
    assert!(loader.epoch(0).all(|batch| batch.is_ok()));
    // `wait` also closes its standard input.
    assert!(reader.wait().unwrap().success());
    fails(&loader.close(), &fifo, io::ErrorKind::BrokenPipe);
}

/// Set for the process with a limit on file sizes: the path of its trace.
const LIMITED: &str = "TWINBUF_TEST_TRACE_OF_LIMITED";

/// No signal ends the process.
#[test]
#[cfg(target_os = "linux")]
fn a_limit_on_the_size_of_files_leaves_whole_events() {
    if let Some(path) = std::env::var_os(LIMITED) {
        let limit = libc::rlimit { rlim_cur: 120_001, rlim_max: 120_001 };
        // SAFETY: the kernel reads `limit`, a live local.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        let mut loader = traced(4000, &path).build().unwrap();
        assert_eq!(loader.epoch(0).count(), 500);
        let mut valid = traced(8, &path).build().expect("what fails later stops no training");
        assert_eq!(valid.epoch(0).count(), 1);
        assert!(matches!(loader.close(), Err(Error::Trace { .. })));
        return;
    }
    let (_dir, path) = place();
    let test = "a_limit_on_the_size_of_files_leaves_whole_events";
    let limited = again(test, LIMITED, &path).output().unwrap();
    assert!(limited.status.success(), "{}", String::from_utf8_lossy(&limited.stderr));
    assert!(named(&unclosed(&path), "disk_load").len() > 1, "what was written before is there");
}

/// Mounts a small file system; needs root.
#[test]
#[cfg(target_os = "linux")]
fn a_write_that_stops_in_the_middle_leaves_whole_events() {
    let (dir, path) = place();
    let at = std::ffi::CString::new(dir.path().to_str().unwrap()).unwrap();
    // SAFETY: all strings end with a zero.
    let mounted = unsafe {
        libc::mount(c"tmpfs".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=122880".as_ptr().cast())
    };
    if mounted != 0 {
        eprintln!("not checked: mount: {}", io::Error::last_os_error());
        return;
    }
    let mut loader = traced(4000, &path).build().unwrap();
    let batches = loader.epoch(0).count();
    let closed = loader.close();
    let events = std::panic::catch_unwind(|| unclosed(&path));
    // A process that another test forked may have the file open. SAFETY: the string ends with a zero.
    assert_eq!(unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) }, 0);
    assert_eq!(batches, 500);
    fails(&closed, &path, io::ErrorKind::StorageFull);
    assert!(named(&events.unwrap(), "disk_load").len() > 1, "what was written before is there");
}

/// Whatever is traced: the rows nest, and the times add up to those of the report.
#[test]
fn traces_add_up_to_the_reports() {
    let (dir, paths) = files(&[4000]);
    let sum = |events: &[Value], pid: u64, names: &[&str]| -> u64 {
        let found = names.iter().flat_map(|name| named(events, name));
        found.filter(|event| event["pid"] == pid).map(|event| nanos(&event["dur"]).unwrap()).sum()
    };
    for (workers, overlap) in [(1, true), (3, true), (1, false)] {
        let path = dir.path().join("trace.json");
        let loader = |name: &str| {
            let trace = Trace::new(&path).epochs(100);
            let builder = Loader::builder(open(&paths), plan(4000, 8)).trace(trace).name(name);
            builder.workers(workers).overlap(overlap).build().unwrap()
        };
        let (mut training, mut validation) = (loader("training"), loader("validation"));
        for epoch in 0..3 {
            // Left early, with a validation in between.
            for (step, batch) in training.epoch(epoch).take(200).enumerate() {
                let _batch = batch.unwrap();
                if step % 100 == 50 {
                    assert_eq!(validation.epoch(epoch).take(20).count(), 20);
                }
            }
        }
        let make = |round: u64, out: &mut u64| {
            *out = round;
            Ok::<(), std::io::Error>(())
        };
        let mut rounds = twinbuf::generate(make).trace(Trace::new(&path).epochs(100)).build().unwrap();
        assert_eq!(rounds.rounds(50).filter(Result::is_ok).count(), 50);
        // During a pause, everything made so far is written to the file while the generator still exists.
        while std::fs::read_to_string(&path).unwrap().matches(r#""name":"generate","ph":"X""#).count() < 50 {
            std::thread::yield_now();
        }
        let reports = [training.report(), validation.report(), rounds.report()];
        training.close().unwrap();
        validation.close().unwrap();
        rounds.close().unwrap();
        let events = trace::events(&path);
        for (pid, report) in reports.iter().enumerate() {
            let pid = (pid as u64) << 16;
            for (names, wanted) in
                [(&["train", "before"][..], report.train.busy), (&["queue_wait"], report.train.waiting)]
            {
                let (found, wanted) = (sum(&events, pid, names), u64::try_from(wanted.as_nanos()).unwrap());
                assert!(found.abs_diff(wanted) <= wanted / 100 + 1000, "{pid}, {names:?}: {found}, {wanted}");
            }
            let read = sum(&events, pid, &["disk_load", "generate"]);
            // Loads of batches that were never received are in the trace alone.
            assert!(read + 1000 >= u64::try_from(report.read.busy.as_nanos()).unwrap(), "{pid}: {read}");
        }
        assert_eq!(trace::errors(&events), [""; 0], "{workers} workers, overlap {overlap}");
    }
}

#[test]
fn every_hook_of_a_generator_is_in_the_trace() {
    let (_dir, path) = place();
    let make = |_: u64, _: &mut u64| Ok::<(), std::io::Error>(());
    let hook = |_: u64| Ok::<(), std::io::Error>(());
    let mut generator = twinbuf::generate(make).before(hook).trace(&path).build().unwrap();
    generator.rounds(3).for_each(|round| drop(round.unwrap()));
    generator.close().unwrap();
    let events = trace::events(&path);
    let rounds: Vec<_> =
        named(&events, "before").iter().map(|event| event["args"]["epoch"].clone()).collect();
    assert_eq!(rounds, [0, 1, 2]);
    assert_eq!(named(&events, "train").len(), 3);
    assert_eq!(trace::errors(&events), [""; 0]);
}

#[test]
fn a_driven_worker_that_has_left_completes_the_trace() {
    let (_dir, path) = place();
    let mut pipe = twinbuf::pipe::builder(vec![0_u64; 2]).driven().trace(&path).build().unwrap();
    let mut worker = pipe.driven().pop().unwrap();
    pipe.begin(0, 0..2_u64, u64::MAX);
    while let Poll::Ready(Some(fill)) = worker.try_next() {
        fill.commit(8);
    }
    assert_eq!(twinbuf::pipe::Items::lent(&mut pipe).count(), 2);
    pipe.close().unwrap();
    assert!(worker.next().is_none());
    // It is whole JSON, though the worker still exists.
    assert_eq!(named(&trace::events(&path), "disk_load").len(), 2);
    drop(worker);
}

/// A pipe counts its rounds through all calls, because they have no epochs.
#[test]
fn the_first_rounds_of_all_calls_are_recorded() {
    for overlap in [false, true] {
        let (_dir, path) = place();
        let builder = twinbuf::pipe::builder(vec![0; 2]).worker(Numbers::default()).rounds();
        let builder = builder.overlap(overlap);
        let mut pipe = builder.trace(Trace::new(&path).epochs(5)).build().unwrap();
        for _ in 0..3 {
            assert_eq!(pipe.items(0..3).count(), 3);
        }
        pipe.close().unwrap();
        for name in ["generate", "train"] {
            assert_eq!(named(&trace::events(&path), name).len(), 5, "{name}, overlap {overlap}");
        }
    }
}
