//! Programs in C on the stand-alone `libcuda.so.1`: what NVIDIA documents, a zoo of races that real projects had, each with
//! its right form, and the command line.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use twinbuf_cuda_sim::{Outcome, install, run};
use twinbuf_testing::extent;

/// A folder with the driver, removed when this is dropped, and programs linked with it.
struct Workshop(PathBuf);

impl Workshop {
    fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        install(&folder).unwrap();
        Self(folder)
    }

    /// Compiles a file of `tests/programs`.
    fn compile(&self, source: &str) -> PathBuf {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
        let to = self.0.join(from.file_stem().unwrap());
        let flags =
            ["-std=gnu17", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-O0", "-g", "-lcuda"];
        let mut cc = Command::new("cc");
        cc.arg(&from).arg("-pthread").arg("-o").arg(&to).arg("-L").arg(&self.0).args(flags);
        assert!(cc.status().unwrap().success(), "{cc:?}");
        to
    }

    fn run(&self, seed: u64, program: &Path, arguments: &[&str]) -> Outcome {
        run(&self.0, &format!("seed={seed}"), Command::new(program).args(arguments)).unwrap()
    }
}

/// What a folder has.
fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

impl Drop for Workshop {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const UNSAFE: &str = "If the local thread has an ongoing capture sequence that was not initiated with \
    CU_STREAM_CAPTURE_MODE_RELAXED at cuStreamBeginCapture, [..] this thread is prohibited from potentially unsafe API calls";

/// The name of a program, what it does, and the sentence of NVIDIA's documentation that it follows from. What it does: its violation
/// begins with this text, or it prints these codes, of a call that a capture refuses and of the capture's end.
const DOCUMENTED: [(&str, &str, &str); 14] = [
    (
        "pageable_copy_then_another_stream",
        "device memory +0x0..+0x100: memset (write, stream",
        "API synchronization behavior, synchronous 1: the function will return once the pageable buffer has been copied to \
         the staging memory for DMA transfer to device memory, but the DMA to final destination may not have completed",
    ),
    (
        "download_read_before_a_wait",
        "page-locked memory +0x0..+0x1: host read (read, the host) is not ordered after d2h",
        "API synchronization behavior, asynchronous 4: for all other transfers, the function should be fully asynchronous",
    ),
    (
        "source_written_under_its_copy_and_back",
        "page-locked memory +0x8000..+0x8001: host write (write, the host) is not ordered after h2d",
        "API synchronization behavior, asynchronous 4: for all other transfers, the function should be fully asynchronous",
    ),
    (
        "non_blocking_stream_beside_the_default_one",
        "device memory +0x0..+0x10000: memset (write, stream",
        "cuStreamCreate: work running in the created stream may run concurrently with work in stream 0 (the NULL stream), \
         and the created stream should perform no implicit synchronization with stream 0",
    ),
    (
        "wait_for_an_event_before_its_record",
        "device memory +0x0..+0x10000: memset (write, stream",
        "cuEventRecord: before the first call to cuEventRecord(), an event represents an empty set of work",
    ),
    (
        "record_after_the_wait",
        "device memory +0x0..+0x10000: memset (write, stream",
        "cuEventRecord: other APIs such as cuStreamWaitEvent() use the most recently captured state at the time of the API \
         call, and are not affected by later calls to cuEventRecord()",
    ),
    (
        "use_after_a_free_in_stream_order",
        "device memory +0x0..+0x10000: free (write, stream",
        "cuMemFreeAsync: the allocation must not be accessed after stream execution reaches the free",
    ),
    (
        "wait_for_another_context",
        "page-locked memory +0x0..+0x1: host write (write, the host) is not ordered after h2d",
        "cuCtxSynchronize: blocks until the current context has completed all preceding requested tasks",
    ),
    ("synchronous_copy", "900 901\n", UNSAFE),
    ("module_load", "900 901\n", UNSAFE),
    (
        "pageable_download",
        "900 901\n",
        "API synchronization behavior, asynchronous 1: for transfers between device memory and pageable host memory, the \
         function might be synchronous with respect to host; and the sentence above",
    ),
    (
        "captured_event",
        "907 901\n",
        "CUDA_ERROR_CAPTURED_EVENT: the operation is not permitted on an event which was last recorded in a capturing stream",
    ),
    (
        "event_of_another_context",
        "400 0\n",
        "cuEventRecord: hEvent and hStream must be from the same context",
    ),
    (
        "call_in_a_forked_child",
        "3 0\n",
        "CUDA_ERROR_NOT_INITIALIZED: the CUDA driver has not been initialized with cuInit() or initialization has failed",
    ),
];

#[test]
fn documented_races_and_refusals_are_as_documented() {
    let workshop = Workshop::new("documented");
    let program = workshop.compile("documented.c");
    for (name, does, sentence) in DOCUMENTED {
        let out = workshop.0.join("out");
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$0\" \"$1\" >\"$2\""]).arg(&program).arg(name).arg(&out);
        let Outcome { code, violations, .. } = run(&workshop.0, "", &mut command).unwrap();
        assert_eq!(code, 0, "{name}");
        if does.contains("memory") {
            let found = violations.iter().find(|found| found.starts_with(does));
            let found = found.unwrap_or_else(|| panic!("{name}: {violations:#?}; {sentence}"));
            assert_eq!(found.matches(&format!("{name} at ")).count(), 2, "the two stacks in {found}");
        } else {
            assert_eq!(fs::read_to_string(&out).unwrap(), does, "{name}: {sentence}");
            assert_eq!(violations, [""; 0], "{name}");
        }
        println!("as documented: {name}");
    }
}

/// Each program of `zoo.c`, and a part of the first violation of its wrong form.
const ZOO: [(&str, &str); 12] = [
    ("chunks", "host write (write, the host) is not ordered after h2d (read"),
    ("default_stream", "d2d (read"),
    ("early_record", "d2d (read"),
    ("free_on_other_stream", "free (write"),
    ("freed_under_copy", "host free (write, the host) is not ordered after h2d (read"),
    ("no_last_use", "h2d (write"),
    ("no_wait", "d2d (read"),
    ("offload", "the host) is not ordered after d2h (write"),
    ("pageable", "d2d (read"),
    ("read_early", "host read (read, the host) is not ordered after d2h (write"),
    ("refill", "host write (write, the host) is not ordered after h2d (read"),
    ("rotation", "host write (write, the host) is not ordered after h2d (read"),
];

#[test]
fn every_race_of_the_zoo_is_found_in_every_seed_and_no_right_form() {
    let seeds = extent(4, 20);
    let workshop = Workshop::new("zoo");
    let program = workshop.compile("zoo.c");
    for (name, wanted) in ZOO {
        for seed in 0..seeds {
            let wrong = workshop.run(seed, &program, &[name, "wrong"]);
            let first = wrong.violations.first().map_or("", String::as_str);
            let found = first.contains(wanted) && first.contains(&format!("{name} at "));
            assert!(found && first.contains("/zoo.c:"), "{name}, wrong, seed {seed}: {wrong:#?}");
            let right = workshop.run(seed, &program, &[name, "right"]);
            assert!(right.violations.is_empty() && right.code == 0, "{name}, right, seed {seed}: {right:#?}");
        }
        println!("{name}: the wrong form found in {seeds} of {seeds} seeds, the right one clean in all");
    }
    // Without a name, it ends with their number.
    assert_eq!(usize::try_from(workshop.run(1, &program, &[]).code), Ok(ZOO.len()));
}

/// The command line: its exit codes, the report, an injected error.
#[test]
fn the_command_finds_the_faults_of_a_double_buffer() {
    let workshop = Workshop::new("command");
    let program = workshop.compile("double_buffer.c");
    // As `cargo install` leaves it: alone.
    let installed = workshop.0.join("cuda-sim");
    fs::copy(env!("CARGO_BIN_EXE_cuda-sim"), &installed).unwrap();
    let ends = |arguments: &[&str]| {
        let mut command = Command::new(&installed);
        let output = command.args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let run = |options: &[&str], fault: &str| {
        ends(&[&["run"], options, &["--", program.to_str().unwrap(), fault]].concat())
    };
    let seeds = extent(3, 20);
    let (code, said) = run(&["--seeds", "3"], "");
    let clean = said.matches("exit code 0, 0 violations; not freed: 2 streams").count();
    assert_eq!((code, clean), (Some(0), 3), "{said}");
    for (fault, race) in [
        ("host", "host write (write, the host) is not ordered after h2d (read"),
        ("stream", "d2d (read"),
        ("use", "h2d (write"),
        ("early", "host read (read, the host) is not ordered after d2h (write"),
    ] {
        let (code, said) = run(&["--seeds", &seeds.to_string()], fault);
        let all = format!("cuda-sim: {seeds} of {seeds} seeds, the first 1: ");
        let found = said.split_once(&all).map_or("", |(_, found)| found);
        let right = code == Some(1) && found.contains(race) && found.contains("double_buffer.c:");
        assert!(right, "{fault}: {said}");
    }
    // The second record fails: the program ends with its own code.
    let (code, said) = run(&["--set", "seed=7", "--set", "fail=cuEventRecord:2:719"], "");
    assert!(code == Some(3) && said.contains("error 719") && said.contains("seed 7: exit code 3"), "{said}");
    for (wrong, says) in [
        ("run", "no program"),
        ("run --seeds x -- true", "--seeds: wanted a number from 1 on, found \"x\""),
        ("run --seeds 0 -- true", "--seeds: wanted a number from 1 on, found \"0\""),
        ("run --set seed= -- true", "--set seed: wanted a number from 0 on, found \"\""),
        ("run --set speed=1 -- true", "--set speed=1: no such setting"),
        ("run --set devices=3 -- true", "--set devices=3: wanted a number from 1 to 2"),
        ("run --set fail=cuNo:1:2 -- true", "--set fail=cuNo:1:2: no function of this driver"),
        ("run --set fail=memcpy:1:2 -- true", "--set fail=memcpy:1:2: no function of this driver"),
        ("run --set fail=cuGetErrorName:1:2 -- true", "--set fail=cuGetErrorName:1:2: no function"),
        ("run -- ./nowhere", "./nowhere: No such file"),
        ("library a b", "usage: "),
        ("", "usage: "),
    ] {
        let (code, said) = ends(&wrong.split_whitespace().collect::<Vec<_>>());
        assert!(code == Some(2) && said.starts_with(says), "{wrong:?}: {code:?} {said}");
    }
    assert_eq!(ends(&["run", "--", "sh", "-c", "kill -9 $$"]).0, Some(137));
    // The last seed that there is.
    let (code, said) = run(&["--seeds", "2", "--set", &format!("seed={}", u64::MAX)], "");
    assert!(code == Some(0) && said.matches("exit code 0").count() == 1, "{said}");
    // The program was linked with `libcuda.so`, but loads `libcuda.so.1`, as with a real driver.
    fs::remove_file(workshop.0.join("libcuda.so")).unwrap();
    assert_eq!(workshop.run(1, &program, &[]).code, 0);
}

/// A child may use what its parent's copies use: if a thread holds the guard's lock at the fork, no thread of the child unlocks
/// it, so the guard checks nothing there. And calls may come when a thread's local data are gone: C++ runs the destructors of
/// static objects after those of the main thread's local data.
#[test]
fn forked_and_late_uses_end_well() {
    for name in ["forked", "late"] {
        let workshop = Workshop::new(name);
        let ended = workshop.run(1, &workshop.compile(&format!("{name}.c")), &[]);
        assert!(ended.code == 0 && ended.violations.is_empty() && ended.end.is_some(), "{name}: {ended:#?}");
    }
}

/// A call may hold the driver's lock where it stores its result, or where a signal's handler interrupts it.
#[test]
fn calls_and_handlers_may_use_the_rest_of_a_page_that_a_copy_uses() {
    let workshop = Workshop::new("results");
    let program = workshop.compile("results.c");
    let clean = workshop.run(1, &program, &[]);
    assert!(clean.code == 0 && clean.violations.is_empty() && clean.end.is_some(), "{clean:#?}");
    let raced = workshop.run(1, &program, &["wrong"]);
    let found = raced.violations.first().is_some_and(|found| found.contains("host write (write, the host)"));
    assert!(raced.code == 0 && found, "{raced:#?}");
}

/// A copy to memory that is not for writing: a stream's thread makes it, and holds the driver's lock. A signal that was sent:
/// no instruction runs again.
#[test]
fn a_fault_that_is_not_the_guards_ends_the_program() {
    let workshop = Workshop::new("nowhere");
    let program = workshop.compile("nowhere.c");
    for how in ["copy", "sent"] {
        let ended = workshop.run(1, &program, &[how]);
        assert_eq!(ended.code, 128 + 11, "{how}, SIGSEGV: {ended:#?}");
    }
}

/// The guard needs a mapping of the process for each range of closed pages, and the kernel limits their number.
#[test]
fn a_program_may_have_more_copies_than_a_process_mappings() {
    let workshop = Workshop::new("rows");
    let program = workshop.compile("rows.c");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-sim"));
    let output = command.args(["run", "--set", "delay=0", "--"]).arg(program).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("exit code 0, 0 violations"), "{said}");
    let limit = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let few = limit.trim().parse::<u32>().unwrap() <= 65_530;
    assert_eq!(said.matches("vm.max_map_count is reached").count(), usize::from(few), "{said}");
}

/// Arguments of the program need not be UTF-8, and a full disk below standard error changes no exit code.
#[test]
fn the_command_takes_any_bytes_and_needs_no_standard_error() {
    let workshop = Workshop::new("bytes");
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-sim"));
    command.args(["run", "--", "sh", "-c", "test \"$0\" = \"$(printf 'a\\377')\" && exit 7"]);
    command.arg(std::ffi::OsStr::from_bytes(b"a\xff")).env("TMPDIR", &workshop.0).stderr(full);
    assert_eq!(command.status().unwrap().code(), Some(7));
    assert_eq!(names(&workshop.0).len(), 2); // the driver's names, and nothing of the run
}

/// The driver and the report are found from each folder that the program runs in, although `TMPDIR` names a folder from here.
#[test]
fn a_program_may_run_in_another_folder() {
    let workshop = Workshop::new("folder");
    let program = workshop.compile("double_buffer.c");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-sim"));
    command.args(["run", "--", "sh", "-c", "cd / && exec \"$0\" host"]).arg(program);
    let output = command.current_dir(&workshop.0).env("TMPDIR", ".").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("host write (write, the host)"), "{said}");
}

/// A program that starts meanwhile finds the old driver or the new one, never a part.
#[test]
fn a_driver_is_replaced_as_a_whole() {
    let workshop = Workshop::new("replaced");
    let file = workshop.0.join("libcuda.so.1");
    let old = fs::File::open(&file).unwrap();
    install(&workshop.0).unwrap();
    let inode = |metadata: fs::Metadata| std::os::unix::fs::MetadataExt::ino(&metadata);
    assert_ne!(inode(old.metadata().unwrap()), inode(file.metadata().unwrap()));
    let mut names = names(&workshop.0);
    names.sort();
    assert_eq!(names, ["libcuda.so", "libcuda.so.1"]);
    assert_eq!(fs::read_link(workshop.0.join("libcuda.so")).unwrap(), Path::new("libcuda.so.1"));
    let error = install(&file).unwrap_err().to_string();
    assert!(error.starts_with(&file.display().to_string()), "{error}");
}

#[test]
fn an_interrupt_ends_the_program_and_leaves_nothing() {
    let workshop = Workshop::new("interrupt");
    let temporary = workshop.0.join("temporary, its name has a comma");
    fs::create_dir(&temporary).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-sim"));
    command.args(["run", "--seeds", "5", "--", "sh", "-c", "echo runs; exec sleep 600"]);
    // A group of its own, as a terminal's foreground job is.
    command.env("TMPDIR", &temporary).process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(run.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!((line.as_str(), names(&temporary).len()), ("runs\n", 1));
    let kill = format!("kill -INT -{}", run.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    let output = run.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.matches("exit code 130").count()), (Some(130), 1), "{said}");
    assert_eq!(names(&temporary).len(), 0);
}

/// cargo builds no file with a name of a real driver, so a program finds the software driver only in a folder made for it.
#[test]
fn nothing_that_cargo_builds_has_a_drivers_name() {
    let program = std::env::current_exe().unwrap();
    let deps = program.parent().unwrap();
    for folder in [deps, deps.parent().unwrap()] {
        let found = names(folder).into_iter().filter(|name| name.starts_with("libcuda.so"));
        assert_eq!(found.collect::<Vec<_>>(), [""; 0]);
    }
}
