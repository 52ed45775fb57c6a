//! The program as it is used: what it prints, and how it refuses.

mod inspect;
mod probe;
mod trace;

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use twinbuf::Records;
use twinbuf::mmap::Residency;
use twinbuf_testing::{npy, safetensors, zip};

/// A run that has ended: its exit code, and what it printed.
struct Run {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl From<Output> for Run {
    fn from(Output { status, stdout, stderr }: Output) -> Self {
        let [stdout, stderr] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        Self { code: status.code(), stdout, stderr }
    }
}

/// Runs the program with these arguments, which have no spaces.
fn twinbuf(folder: impl AsRef<Path>, arguments: &str) -> Run {
    let arguments = arguments.split(' ').filter(|argument| !argument.is_empty());
    Command::new(env!("CARGO_BIN_EXE_twinbuf")).args(arguments).current_dir(folder).output().unwrap().into()
}

/// Runs the program, which must succeed, and returns what it prints.
fn text(folder: impl AsRef<Path>, arguments: &str) -> String {
    let Run { code, stdout, stderr } = twinbuf(folder, arguments);
    assert!(code == Some(0) && stderr.is_empty(), "{arguments:?}: {code:?}, {stderr}");
    stdout
}

fn json(folder: impl AsRef<Path>, arguments: &str) -> Value {
    serde_json::from_str(&text(folder, arguments)).unwrap()
}

#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` in:\n{text}");
    }
}

/// A line of a trace: a span of a process and a row, its start and length in microseconds, its epoch and step.
fn span(name: &str, row: [u64; 2], [start, long]: [u64; 2], [epoch, step]: [u64; 2]) -> String {
    let args = format!(r#""epoch":{epoch},"step":{step}"#);
    line(name, row, &format!(r#""ph":"X","ts":{start},"dur":{long}"#), &args)
}

/// A line of a trace that names a process or a row.
fn meta(name: &str, row: [u64; 2], args: &str) -> String {
    line(name, row, r#""ph":"M""#, args)
}

fn line(name: &str, [pid, tid]: [u64; 2], of: &str, args: &str) -> String {
    format!(r#"{{"name":"{name}","pid":{pid},"tid":{tid},{of},"args":{{{args}}}}}"#)
}

/// A file of each format.
fn samples() -> TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let put = |name: &str, bytes: Vec<u8>| fs::write(folder.path().join(name), bytes).unwrap();
    let npy = npy("<f4", &[6, 3, 2], [1; 144]);
    put("images.npy", npy.clone());
    put("cut.npy", npy[..200].to_vec());
    let archive = zip(&[("y.npy", 0, &npy), ("note.txt", 0, b"hello"), ("x.npy", 8, &npy)]);
    put("cut.npz", archive[..archive.len() - 1].to_vec());
    put("two.npz", archive);
    put("one.npz", zip(&[("x.npy", 0, &npy)]));
    put("model.pt", zip(&[("model/data.pkl", 0, b"pickle")]));
    let tensors = safetensors([("x", "F32", &[5, 3][..], 60), ("s", "F64", &[], 8)], [0; 68]);
    put("cut.safetensors", tensors[..100].to_vec());
    put("two.safetensors", tensors);
    put("none.safetensors", [&2_u64.to_le_bytes()[..], b"{}"].concat());
    let mut header = [0_i32; 256];
    header[..3].copy_from_slice(&[20_240_520, 1, 100]);
    let header: Vec<u8> = header.into_iter().flat_map(i32::to_le_bytes).collect();
    put("tokens.bin", [&header[..], &[0; 200]].concat());
    put("short.bin", [&header[..], &[0; 199]].concat());
    put("data.bin", (0..10_000_u32).map(|i| i.to_le_bytes()[0]).collect());
    put("ten.bin", (0..10).collect());
    put("empty.bin", vec![]);
    put(
        "notes.txt",
        b"It was the best of times, it was the worst of times, it was the age of wisdom".repeat(8),
    );
    put(
        "noise.json",
        b"{\"a\": 1}\nno trace\n{\"name\":\"x\",\"ph\":\"X\",\"ts\":1e300,\"dur\":1}\n".to_vec(),
    );
    folder
}

/// Returns what `run` returns, and the file's pages in memory, which were the same before and after it. Runs again if they
/// were not: another program may have dropped the whole page cache meanwhile.
fn with_pages<T>(path: &Path, run: impl Fn() -> T) -> (T, Residency) {
    let pages = || Records::open([path], 1).unwrap().residency().unwrap();
    let looks = (0..100).map(|_| (pages(), run(), pages()));
    let same = looks.map(|(before, found, after)| (before == after).then_some((found, before)));
    same.flatten().next().expect("the pages of a file come and go, a hundred times")
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let folder = samples();
    let mkfifo = Command::new("mkfifo").arg(folder.path().join("fifo")).status();
    assert!(mkfifo.unwrap().success());
    for (arguments, expected) in [
        ("", "requires a subcommand"),
        ("frobnicate", "frobnicate"),
        ("inspect", "<FILE>..."),
        ("inspect missing.bin", "missing.bin\": no such file"),
        (
            "inspect .",
            "wanted a regular file, found a directory: name its files, as the shell does for `folder/*`\n",
        ),
        ("inspect *.bin", "*.bin\": no such file\n"),
        ("inspect fifo", "found a FIFO"),
        ("inspect empty.bin", "empty.bin"),
        ("inspect cut.npy", "cut.npy"),
        ("inspect cut.safetensors", "cut.safetensors"),
        ("inspect cut.npz", "wanted a zip archive"),
        ("inspect short.bin", "short.bin"),
        ("inspect data.bin --dtype f7", "wanted one of bool, u8"),
        ("inspect data.bin --dtype c128 --record-bytes 3", "cannot be used with"),
        ("inspect data.bin --record-bytes 0", "0 is not in"),
        ("inspect data.bin --record-bytes 10001", "wanted at least 10001 bytes"),
        ("inspect data.bin --sequence 9", "data.bin: --sequence: wanted --dtype too"),
        (
            "inspect tokens.bin --dtype u16",
            "tokens.bin: --dtype: wanted numbers without a header, found llm.c's",
        ),
        ("inspect notes.txt --dtype u16", "tokenize it first"),
        ("probe data.bin", "--batch <B>"),
        ("probe data.bin --batch 4 --compute-ms 0", "give --record-bytes or --dtype"),
        ("probe tokens.bin --batch 4 --compute-ms 0", "--sequence: wanted the tokens of a sequence"),
        (
            "probe tokens.bin --record-bytes 20 --batch 4 --compute-ms 0",
            "wanted a file of records alone, found tokens with llm.c's header",
        ),
        (
            "probe data.bin tokens.bin --dtype u16 --batch 4 --compute-ms 0",
            "found llm.c's tokens: leave it out",
        ),
        ("probe images.npy --dtype f32 --batch 4 --compute-ms 0", "found numpy's .npy: leave it out"),
        ("probe two.npz --dtype f32 --batch 4 --compute-ms 0", "found zip (.npz, .pt): leave it out"),
        ("probe images.npy --batch 7 --compute-ms 0", "at most the 6 records"),
        ("probe images.npy --batch 0 --compute-ms 0", "0 is not in"),
        ("probe images.npy --batch 1 --compute-ms NaN", "0 to 60000 milliseconds"),
        ("probe images.npy --batch 1 --compute-ms=-1", "0 to 60000 milliseconds"),
        ("probe images.npy --batch 1 --compute-ms 0 --order chunks:0", "chunks:N"),
        ("probe images.npy --batch 1 --compute-ms 0 --order shuffled", "chunks:N"),
        ("probe two.safetensors --batch 4 --compute-ms 0", "wanted one of its tensors: s, x"),
        ("probe two.npz --batch 4 --compute-ms 0", "two.npz: --tensor: wanted one of its arrays: x, y"),
        ("probe two.npz --tensor z --batch 4 --compute-ms 0", "wanted \"z\", found [\"x\", \"y\"]"),
        ("probe model.pt --batch 4 --compute-ms 0", "model.pt: no arrays"),
        ("probe images.npy tokens.bin --batch 4 --compute-ms 0", "tokens.bin"),
        ("trace noise.json --stall-ms NaN", "milliseconds"),
        ("trace noise.json --stall-ms inf", "milliseconds"),
        ("trace noise.json --stall-ms=-1", "milliseconds"),
        ("probe images.npy --tensor x --batch 4 --compute-ms 0", "has no tensors"),
        ("probe two.safetensors --dtype u8 --tensor x --batch 4 --compute-ms 0", "cannot be used with"),
        ("probe two.safetensors --record-bytes 4 --tensor x --batch 4 --compute-ms 0", "cannot be used with"),
        ("trace missing.json", "missing.json"),
        ("trace two\n\nlines\u{1b}", "two\\n\\nlines\\u{1b}: No such file"),
        ("probe none.safetensors --batch 4 --compute-ms 0", "no tensors"),
        ("trace .", "."),
        ("trace empty.bin", "no spans"),
        ("trace noise.json", "no spans"),
        ("trace data.bin", "no spans"),
    ] {
        let Run { code, stdout, stderr } = twinbuf(&folder, arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        assert!(stdout.is_empty(), "{arguments:?}");
        assert!(stderr.starts_with("twinbuf: ") && stderr.contains(expected), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
        assert!(!stderr.contains("Usage"), "no more than what is wrong: {stderr}");
    }
}

/// Names in files may contain line ends and control characters. The output escapes them.
#[test]
fn names_in_files_break_no_line() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let tensors = [(r"a\n\u001b[31m", "U8", &[3][..], 3), (r"b\n\n", "U8", &[], 1)];
    fs::write(folder.path().join("names.safetensors"), safetensors(tensors, [0; 4])).unwrap();
    let found = text(&folder, "inspect names.safetensors");
    has(
        &found,
        &["  tensor      a\\n\\u{1b}[31m: 3 records of one u8", "  tensor      b\\n\\n: no records: "],
    );
    let Run { code, stderr, .. } = twinbuf(&folder, "probe names.safetensors --batch 1 --compute-ms 0");
    assert_eq!((code, stderr.lines().count()), (Some(2), 1), "{stderr}");
    has(&stderr, &["wanted one of its tensors: a\\n\\u{1b}[31m, b\\n\\n"]);

    let lines = [
        meta("process_name", [0, 1], r#""name":"p\n\u001b""#),
        meta("thread_name", [0, 2], r#""name":"read\n\u001b""#),
        span(r"load\n\u001b", [0, 2], [0, 9000], [0, 0]),
        span("queue_wait", [0, 1], [0, 9000], [0, 0]),
    ];
    fs::write(folder.path().join("names\n.json"), lines.join(",\n")).unwrap();
    let found = text(&folder, "trace names\n.json");
    has(&found, &["names\\n.json: has no end", "\nread\\n\\u{1b} ", "for `load\\n\\u{1b}` of"]);
    assert!(!found.contains('\u{1b}'), "{found}");
}

#[test]
fn help_and_version_are_no_errors() {
    let here = Path::new(".");
    has(&text(here, "--version"), &["twinbuf 0."]);
    has(&text(here, "--help"), &["inspect", "probe", "trace"]);
    let help = text(here, "probe --help");
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let rounds = "--rounds <N> Rounds: each reads a first and a later epoch with a new loader; times are medians. Options to \
                  try take two more each";
    let page = "--html <OUT> Write the report of the last round before options are tried, as a page for any browser. Replaces \
                only an older page or an empty file; may be a pipe";
    has(&help, &["--compute-ms <C>", "--cold", "chunks:N", rounds, page]);
}

/// If the reader of its output stops, the program prints no message and does not panic.
#[test]
fn a_broken_pipe_is_no_error() {
    let folder = samples();
    let mut child = Command::new(env!("CARGO_BIN_EXE_twinbuf"))
        // More than a pipe holds: it must still be writing when the reader has gone.
        .args(["inspect"].into_iter().chain(std::iter::repeat_n("data.bin", 2000)))
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 8]).unwrap();
    let Run { code, stderr, .. } = child.wait_with_output().unwrap().into();
    assert_eq!((code, &*stderr), (Some(0), ""));
}

/// The page of a probe may go there, too.
#[test]
#[cfg(target_os = "linux")]
fn a_broken_pipe_of_a_page_is_no_error() {
    let arguments =
        "probe data.bin --record-bytes 100 --batch 10 --compute-ms 0 --rounds 1 --html /dev/stdout";
    let folder = samples();
    let mut child = Command::new(env!("CARGO_BIN_EXE_twinbuf"))
        .args(arguments.split(' '))
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let Run { code, stderr, .. } = child.wait_with_output().unwrap().into();
    assert_eq!((code, &*stderr), (Some(0), ""));
}
