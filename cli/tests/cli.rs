//! The program as it is used: what it prints, and how it refuses.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use twinbuf::observe::Trace;
use twinbuf::{BatchPlan, BoxError, Dataset, Loader, Plan, Records};

fn twinbuf(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_twinbuf")).args(arguments).current_dir(folder).output().unwrap()
}

/// What it prints when all is well.
fn text(folder: &Path, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = twinbuf(folder, arguments);
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(status.success() && stderr.is_empty(), "{arguments:?}: {status}, {stderr}");
    String::from_utf8(stdout).unwrap()
}

fn json(folder: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&text(folder, arguments)).unwrap()
}

#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` in:\n{text}");
    }
}

/// A file of each format.
fn samples() -> TempDir {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let put = |name: &str, bytes: Vec<u8>| fs::write(folder.path().join(name), bytes).unwrap();
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (6, 3, 2), }";
    let npy = [b"\x93NUMPY\x01\x00\x76\x00", format!("{header:117}\n").as_bytes(), &[1; 144]].concat();
    put("images.npy", npy.clone());
    put("cut.npy", npy[..200].to_vec());
    let header = r#"{"x":{"dtype":"F32","shape":[5,3],"data_offsets":[0,60]},"s":{"dtype":"F64","shape":[],"data_offsets":[60,68]}}"#;
    let tensors = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 68]].concat();
    put("cut.safetensors", tensors[..100].to_vec());
    put("two.safetensors", tensors);
    put("none.safetensors", [&2_u64.to_le_bytes()[..], b"{}"].concat());
    let mut header = [0_i32; 256];
    header[..3].copy_from_slice(&[20_240_520, 1, 100]);
    let header: Vec<u8> = header.into_iter().flat_map(i32::to_le_bytes).collect();
    put("tokens.bin", [&header[..], &[0; 200]].concat());
    put("short.bin", [&header[..], &[0; 199]].concat());
    put("data.bin", (0..10_000_u32).map(|i| i.to_le_bytes()[0]).collect());
    put("empty.bin", vec![]);
    put(
        "noise.json",
        b"{\"a\": 1}\nno trace\n{\"name\":\"x\",\"ph\":\"X\",\"ts\":1e300,\"dur\":1}\n".to_vec(),
    );
    folder
}

#[test]
fn inspect_tells_each_format() {
    let folder = samples();
    let folder = folder.path();
    for (arguments, expected) in [
        (
            &["images.npy"][..],
            &[
                "npy (an array by numpy), 272 B",
                "6 records of f32 [3, 2], 24 B, together 144 B",
                "page cache  1 of 1 pages",
            ][..],
        ),
        (
            &["two.safetensors"],
            &[
                "safetensors",
                "x: 5 records of f32 [3], 12 B, together 60 B",
                "s: no records:",
                "at least one axis",
            ],
        ),
        (&["tokens.bin"], &["tokens with llm.c's header", "100 records of one u16, 2 B, together 200 B"]),
        (&["data.bin"], &["raw, 9.8 KiB", "10000 records of 1 B"]),
        (
            &["data.bin", "--record-bytes", "300"],
            &["33 records of 300 B, together 9.7 KiB; 100 bytes are left over"],
        ),
        (&["data.bin", "--dtype", "f64"], &["1250 records of one f64, 8 B"]),
        (&["tokens.bin", "--record-bytes", "1224"], &["raw", "1 record of 1224 B"]),
        (&["data.bin", "tokens.bin"], &["data.bin\n", "tokens.bin\n", "2 files, 11.0 KiB"]),
    ] {
        has(&text(folder, &[&["inspect"], arguments].concat()), expected);
    }
    let found = json(folder, &["inspect", "--json", "images.npy", "two.safetensors"]);
    assert_eq!(found[0]["format"], "npy");
    assert_eq!(found[0]["arrays"][0]["shape"], serde_json::json!([3, 2]));
    assert_eq!(found[0]["page_cache"], serde_json::json!({ "pages": 1, "resident": 1 }));
    assert_eq!(found[1]["arrays"][1]["tensor"], "x");
    assert_eq!(found[1]["arrays"][1]["records"], 5);
}

/// So many that a look at the header for each of them would take minutes.
#[test]
fn inspect_tells_all_tensors_of_a_model() {
    const TENSORS: usize = 5000;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let (mut entries, mut lines, mut end) = (Vec::new(), Vec::new(), 0);
    for i in 0..TENSORS {
        let (rows, start) = (2 + i % 7, end);
        end += rows * 12;
        entries.push(format!(
            r#""t{i:04}":{{"dtype":"F32","shape":[{rows},3],"data_offsets":[{start},{end}]}}"#
        ));
        lines.push(format!(
            "  tensor      t{i:04}: {rows} records of f32 [3], 12 B, together {} B",
            rows * 12
        ));
    }
    let header = format!("{{{}}}", entries.join(","));
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; end]].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    let found = text(folder, &["inspect", "model.safetensors"]);
    let tensors: Vec<&str> = found.lines().filter(|line| line.starts_with("  tensor")).collect();
    assert_eq!(tensors, lines);
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let folder = samples();
    let folder = folder.path();
    let mkfifo = Command::new("mkfifo").arg(folder.join("fifo")).status();
    assert!(mkfifo.unwrap().success());
    let probe = ["--batch", "4", "--compute-ms", "0"];
    for (arguments, expected) in [
        (&[][..], "requires a subcommand"),
        (&["frobnicate"], "frobnicate"),
        (&["inspect"], "<FILE>..."),
        (&["inspect", "missing.bin"], "missing.bin\": no such file"),
        (&["inspect", "."], "wanted a regular file, found a directory"),
        (&["inspect", "fifo"], "found a FIFO"),
        (&["inspect", "empty.bin"], "empty.bin"),
        (&["inspect", "cut.npy"], "cut.npy"),
        (&["inspect", "cut.safetensors"], "cut.safetensors"),
        (&["inspect", "short.bin"], "short.bin"),
        (&["inspect", "data.bin", "--dtype", "f7"], "wanted one of bool, u8"),
        (&["inspect", "data.bin", "--dtype", "c128", "--record-bytes", "3"], "cannot be used with"),
        (&["inspect", "data.bin", "--record-bytes", "0"], "0 is not in"),
        (&["inspect", "data.bin", "--record-bytes", "10001"], "wanted at least 10001 bytes"),
        (&["probe", "data.bin"], "--batch <B>"),
        (&["probe", "data.bin", "--batch", "4", "--compute-ms", "0"], "give --record-bytes or --dtype"),
        (
            &["probe", "tokens.bin", "--batch", "4", "--compute-ms", "0"],
            "--sequence: wanted the tokens of a sequence",
        ),
        (
            &["probe", "tokens.bin", "--record-bytes", "20", "--batch", "4", "--compute-ms", "0"],
            "wanted a file of records alone, found tokens with llm.c's header",
        ),
        (
            &["probe", "tokens.bin", "--dtype", "u16", "--batch", "4", "--compute-ms", "0"],
            "open it with `Records::open_llm_c`",
        ),
        (&["probe", "images.npy", "--batch", "7", "--compute-ms", "0"], "at most the 6 records"),
        (&["probe", "images.npy", "--batch", "0", "--compute-ms", "0"], "0 is not in"),
        (&["probe", "images.npy", "--batch", "1", "--compute-ms", "NaN"], "0 to 60000 milliseconds"),
        (&["probe", "images.npy", "--batch", "1", "--compute-ms=-1"], "0 to 60000 milliseconds"),
        (&["probe", "images.npy", "--batch", "1", "--compute-ms", "0", "--order", "chunks:0"], "chunks:N"),
        (&["probe", "images.npy", "--batch", "1", "--compute-ms", "0", "--order", "shuffled"], "chunks:N"),
        (
            &["probe", "two.safetensors", probe[0], probe[1], probe[2], probe[3]],
            "wanted one of its tensors: s, x",
        ),
        (&["probe", "images.npy", "tokens.bin", probe[0], probe[1], probe[2], probe[3]], "tokens.bin"),
        (&["trace", "noise.json", "--stall-ms", "NaN"], "milliseconds"),
        (&["trace", "noise.json", "--stall-ms", "inf"], "milliseconds"),
        (&["trace", "noise.json", "--stall-ms=-1"], "milliseconds"),
        (&["probe", "images.npy", "--tensor", "x", probe[0], probe[1], probe[2], probe[3]], "has no tensors"),
        (
            &[
                "probe",
                "two.safetensors",
                "--dtype",
                "u8",
                "--tensor",
                "x",
                probe[0],
                probe[1],
                probe[2],
                probe[3],
            ],
            "has no tensors",
        ),
        (&["trace", "missing.json"], "missing.json"),
        (&["trace", "two\n\nlines\u{1b}"], "two\\n\\nlines\\u{1b}: No such file"),
        (&["probe", "none.safetensors", probe[0], probe[1], probe[2], probe[3]], "no tensors"),
        (&["trace", "."], "."),
        (&["trace", "empty.bin"], "no spans"),
        (&["trace", "noise.json"], "no spans"),
        (&["trace", "data.bin"], "no spans"),
    ] {
        let Output { status, stdout, stderr } = twinbuf(folder, arguments);
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stdout.is_empty(), "{arguments:?}");
        assert!(stderr.starts_with("twinbuf: ") && stderr.contains(expected), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
        assert!(!stderr.contains("Usage"), "no more than what is wrong: {stderr}");
    }
}

/// Names in files are what others wrote.
#[test]
fn names_in_files_break_no_line() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let header = r#"{"a\n\u001b[31m":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b\n\n":{"dtype":"U8","shape":[],"data_offsets":[3,4]}}"#;
    let tensors = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
    fs::write(folder.join("names.safetensors"), tensors).unwrap();
    let found = text(folder, &["inspect", "names.safetensors"]);
    has(
        &found,
        &["  tensor      a\\n\\u{1b}[31m: 3 records of one u8", "  tensor      b\\n\\n: no records: "],
    );
    let Output { status, stderr, .. } =
        twinbuf(folder, &["probe", "names.safetensors", "--batch", "1", "--compute-ms", "0"]);
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!((status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
    has(&stderr, &["wanted one of its tensors: a\\n\\u{1b}[31m, b\\n\\n"]);

    let lines = [
        r#"{"name":"process_name","ph":"M","pid":0,"tid":1,"args":{"name":"p\n\u001b"}}"#,
        r#"{"name":"thread_name","ph":"M","pid":0,"tid":2,"args":{"name":"read\n\u001b"}}"#,
        r#"{"name":"load\n\u001b","ph":"X","pid":0,"tid":2,"ts":0,"dur":9000,"args":{"epoch":0,"step":0}}"#,
        r#"{"name":"queue_wait","ph":"X","pid":0,"tid":1,"ts":0,"dur":9000,"args":{"epoch":0,"step":0}}"#,
    ];
    fs::write(folder.join("names\n.json"), lines.join(",\n")).unwrap();
    let found = text(folder, &["trace", "names\n.json"]);
    has(&found, &["names\\n.json: has no end", "\nread\\n\\u{1b} ", "for `load\\n\\u{1b}` of"]);
    assert!(!found.contains('\u{1b}'), "{found}");
}

/// A file of data given for a trace may have no end of a line at all, and be larger than the memory.
#[test]
#[cfg(target_os = "linux")]
fn a_trace_need_not_fit_the_memory_line_by_line() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let span = r#"{"name":"train","ph":"X","pid":0,"tid":1,"ts":0,"dur":9,"args":{"epoch":0,"step":0}}"#;
    for (start, expected) in [("", Err("holes: no spans")), (span, Ok("4 lines could not be read"))] {
        let path = folder.join("holes");
        fs::write(&path, format!("{start}\n")).unwrap();
        // The last of a file may be holes where the system has crashed.
        let long = if start.is_empty() { 1 << 32 } else { 4 << 20 };
        fs::OpenOptions::new().append(true).open(&path).unwrap().set_len(long).unwrap();
        let Output { status, stdout, stderr } = Command::new("sh")
            .args(["-c", "ulimit -v 1000000 && exec \"$0\" trace holes", env!("CARGO_BIN_EXE_twinbuf")])
            .current_dir(folder)
            .output()
            .unwrap();
        let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        match expected {
            Ok(line) => has(&stdout, &[line]),
            Err(line) => has(&stderr, &[line]),
        }
        assert_eq!(status.code(), Some(if expected.is_ok() { 0 } else { 2 }), "{stderr}");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    let here = Path::new(".");
    has(&text(here, &["--version"]), &["twinbuf 0."]);
    has(&text(here, &["--help"]), &["inspect", "probe", "trace"]);
    has(&text(here, &["probe", "--help"]), &["--compute-ms <C>", "--cold", "chunks:N"]);
}

/// Whoever reads may stop reading: no message, no panic.
#[test]
fn a_broken_pipe_is_no_error() {
    let folder = samples();
    let mut child = Command::new(env!("CARGO_BIN_EXE_twinbuf"))
        // More than a pipe holds, so that it is still writing when the reader has gone.
        .args(["inspect"].into_iter().chain(std::iter::repeat_n("data.bin", 2000)))
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 8]).unwrap();
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert_eq!((status.code(), String::from_utf8(stderr).unwrap()), (Some(0), String::new()));
}

#[test]
fn probe_measures_and_says_what_it_measured() {
    let folder = samples();
    let folder = folder.path();
    let arguments = ["probe", "data.bin", "--record-bytes", "100", "--batch", "10", "--compute-ms", "5"];
    let found = text(folder, &[&arguments[..], &["--steps", "4"]].concat());
    has(
        &found,
        &[
            "100 records of 100 B; 4 batches of 10 records (1000 B) measured, of 10 an epoch, in 3 rounds\n",
            "WARNING: 100 % was in the page cache: the disk was not measured; --cold drops it first\n",
            "load  ",
            "compute  ",
            "in turn  ",
            "ideal  ",
            "overlapped  ",
            "ComputeBound: the compute decides",
            "Overlap can save ",
        ],
    );
    for order in ["sequential", "chunks:20", "records"] {
        let more = ["--json", "--rounds", "2", "--order", order];
        let found = json(folder, &[&arguments[..], &more].concat());
        assert_eq!((&found["steps"], &found["rounds"]), (&10.into(), &2.into()), "all there are: {found}");
        assert!(found["compute_s"].as_f64().unwrap() >= 0.005, "{found}");
        assert!(found["ideal_s"].as_f64() <= found["serial_s"].as_f64(), "{found}");
        assert_eq!(found["verdict"], "ComputeBound");
    }
    // Formats that say themselves what their records are.
    for arguments in [
        &["images.npy", "--batch", "2"][..],
        &["tokens.bin", "--sequence", "9", "--batch", "2"],
        &["data.bin", "--dtype", "u16", "--sequence", "100", "--batch", "2"],
        &["two.safetensors", "--tensor", "x", "--batch", "2"],
        &["data.bin", "--dtype", "u16", "--batch", "2"],
    ] {
        has(&text(folder, &[&["probe", "--compute-ms", "0"], arguments].concat()), &["Overlap can save "]);
    }
}

#[test]
fn probe_prints_the_lines_that_measured_best() {
    let folder = samples();
    let folder = folder.path();
    let of = |arguments: &[&str]| {
        text(folder, &[&["probe", "--compute-ms", "0", "--batch", "2"], arguments].concat())
    };
    let found = of(&["tokens.bin", "--sequence", "9", "--order", "records"]);
    has(
        &found,
        &[
            // 100 tokens: sequences of 10, one every 9.
            "11 records of 20 B; ",
            "\nOptions, overlapped:\n  the defaults  ",
            "\n  .hints(false)  ",
            "\n  .hint_window(8 << 20)  ",
            "\nLines that measured best:\n    let data = Records::open_llm_c([\"tokens.bin\"], Cut::sequence(9))?",
            "\n    let plan = Plan::builder(data.len()).batch(2).shuffle(Shuffle::Records).seed(42).build()?;\n",
            "\n    let mut loader = Loader::builder(data, plan)",
        ],
    );
    let found = json(folder, &["probe", "images.npy", "--compute-ms", "0", "--batch", "2", "--json"]);
    assert_eq!(found["options"][0]["name"], "the defaults");
    assert!(found["options"][0]["median_s"].as_f64().unwrap() > 0.0, "{found}");
    assert!(
        found["best"][0]
            .as_str()
            .unwrap()
            .starts_with("let data = Records::open_npy([\"images.npy\"], Cut::Rows)?")
    );
}

/// Of so small a batch the time between its phases is most of what passes; no overlap hides that.
#[test]
fn probe_promises_no_more_than_two_stages_can_gain() {
    let folder = samples();
    for _ in 0..20 {
        let arguments =
            ["probe", "data.bin", "--record-bytes", "1", "--batch", "1", "--steps", "1", "--json"];
        let found = json(folder.path(), &[&arguments[..], &["--compute-ms", "0"]].concat());
        assert!((1.0..=2.0).contains(&found["gain_possible"].as_f64().unwrap()), "{found}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn probe_evicts_if_it_is_told_to() {
    let folder = samples();
    let arguments =
        ["probe", "data.bin", "--record-bytes", "100", "--batch", "10", "--compute-ms", "0", "--cold"];
    // File systems that live in memory keep everything; then it says so.
    let file = folder.path().join("data.bin");
    let records = Records::open([&file], 100).unwrap();
    records.evict().unwrap();
    let expected = match records.residency().unwrap().resident {
        0 => "from a cold page cache",
        _ => "WARNING: 100 % could not be dropped",
    };
    drop(records);
    assert_eq!(fs::read(&file).unwrap().len(), 10_000, "in the cache again");
    has(&text(folder.path(), &arguments), &[expected]);
}

#[test]
#[cfg(target_os = "linux")]
fn probe_reads_past_the_page_cache_if_it_is_told_to() {
    let folder = samples();
    let arguments =
        ["probe", "data.bin", "--record-bytes", "100", "--batch", "10", "--compute-ms", "0", "--direct"];
    // Not every file system can; then it says so.
    let Output { status, stdout, stderr } = twinbuf(folder.path(), &arguments);
    if status.success() {
        has(&String::from_utf8(stdout).unwrap(), &["past the page cache\n", "Overlap can save "]);
    } else {
        has(&String::from_utf8(stderr).unwrap(), &["data.bin", "open(O_DIRECT)"]);
    }
}

/// A trace whose times are known: two ranks, the second of which began 1 ms later.
fn known(folder: &Path) -> [PathBuf; 2] {
    [0_u64, 1].map(|rank| {
        let meta = |name: &str, tid: u64, args: &str| {
            format!(r#"{{"name":"{name}","ph":"M","pid":{rank},"tid":{tid},"args":{{{args}}}}}"#)
        };
        let span = |name: &str, tid: u64, start: u64, long: u64, step: u64| {
            format!(
                r#"{{"name":"{name}","ph":"X","pid":{rank},"tid":{tid},"ts":{start}.000,"dur":{long}.000,"args":{{"epoch":7,"step":{step}}}}}"#
            )
        };
        let lines = [
            meta("process_name", 1, &format!(r#""name":"twinbuf rank {rank} of 2""#)),
            meta("clock_origin", 1, &format!(r#""unix_us":{}"#, 1_700_000_000_000_000 + 1000 * rank)),
            meta("thread_name", 1, r#""name":"train""#),
            meta("thread_name", 2, r#""name":"<read>""#),
            span("disk_load", 2, 100, 3000, 0),
            span("transform", 2, 3100, 500, 0),
            span("queue_wait", 1, 0, 4000, 0),
            span("train", 1, 4000, 1000, 0),
            span("disk_load", 2, 4100, 900, 1),
            span("disk_load", 2, 5100, 400, 2),
            span("queue_wait", 1, 5000, 10, 1),
            span("train", 1, 5010, 990, 1),
            r#"{"name":"epoch","ph":"X","pid":0,"tid":1,"ts":0,"dur":6000,"args":{"epoch":7}}"#.replace("\"pid\":0", &format!("\"pid\":{rank}")),
            // Not a span: passed over.
            format!(r#"{{"name":"full host slots","ph":"C","pid":{rank},"tid":2,"ts":3600,"args":{{"slots":1}}}}"#),
        ];
        let path = folder.join(format!("rank{rank}.json"));
        fs::write(&path, format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
        path
    })
}

#[test]
fn trace_adds_up_who_waited_for_what() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    known(folder);
    let found = json(folder, &["trace", "rank0.json", "--json"]);
    let near = |found: &Value, micros: f64| (found.as_f64().unwrap() * 1e6 - micros).abs() < 1e-6;
    assert!(near(&found["wall_s"], 6000.0), "{found}");
    assert_eq!((&found["epochs"], &found["steps"]), (&1.into(), &2.into()));
    for (row, track, busy, waiting) in [(0, "train", 1990.0, 4010.0), (1, "<read>", 4800.0, 600.0)] {
        let row = &found["tracks"][row];
        assert_eq!(row["track"], track);
        assert!(near(&row["busy_s"], busy) && near(&row["waiting_s"], waiting), "{row}");
    }
    let causes = found["waited_for"].as_array().unwrap();
    for (cause, (during, waited)) in
        causes.iter().zip([(None, 510.0), (Some("disk_load"), 3000.0), (Some("transform"), 500.0)])
    {
        assert_eq!(cause["during"].as_str(), during);
        assert!(near(&cause["waited_s"], waited), "{cause}");
    }
    assert_eq!(causes.len(), 3);
    // The wait of 10 us is no stall.
    assert_eq!(found["stalls"], 1);
    let longest = &found["longest"][0];
    assert_eq!((&longest["epoch"], &longest["step"]), (&7.into(), &0.into()));
    assert_eq!(longest["during"], "disk_load");
    assert_eq!(json(folder, &["trace", "rank0.json", "--json", "--stall-ms", "0.005"])["stalls"], 2);

    has(
        &text(folder, &["trace", "rank0.json"]),
        &[
            "1 whole epoch, 2 steps in 0.006 s\n",
            "0.003 s  the caller, for `disk_load` of the batch that it wanted\n",
            "0.001 s  `<read>`, between two batches, for a free slot\n",
            "1 wait of 1 ms or longer:\n",
            "      7        0      0.000      4.000  disk_load\n",
        ],
    );
    has(&text(folder, &["trace", "rank0.json", "--stall-ms", "5"]), &["no wait of 5 ms or longer"]);

    // Both on one clock: the second rank ends 1 ms later than it would by its own.
    let both = json(folder, &["trace", "rank0.json", "rank1.json", "--json"]);
    assert!(near(&both["wall_s"], 7000.0), "{both}");
    assert_eq!(both["tracks"].as_array().unwrap().len(), 4);
    has(
        &text(folder, &["trace", "rank1.json", "rank0.json"]),
        &["twinbuf rank 1 of 2, train", "twinbuf rank 0 of 2, train"],
    );
}

#[test]
fn nothing_is_no_negative_number() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    // A track with one batch has no gap between two; one with waits alone does no work.
    let span = |name: &str, tid: u64| {
        format!(
            r#"{{"name":"{name}","ph":"X","pid":0,"tid":{tid},"ts":0,"dur":9,"args":{{"epoch":0,"step":0}}}}"#
        )
    };
    fs::write(folder.join("t.json"), [span("disk_load", 2), span("queue_wait", 1)].join("\n")).unwrap();
    for arguments in [&["trace", "t.json"][..], &["trace", "t.json", "--json"]] {
        let found = text(folder, arguments);
        assert!(!found.contains("-0."), "{found}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_path_that_is_no_utf_8_is_written_as_json_as_well_as_it_can_be() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join(OsStr::from_bytes(b"a\xffb"));
    let span = r#"{"name":"train","ph":"X","pid":0,"tid":1,"ts":0,"dur":9,"args":{"epoch":0,"step":0}}"#;
    fs::write(&path, span).unwrap();
    for command in ["inspect", "trace"] {
        let program =
            Command::new(env!("CARGO_BIN_EXE_twinbuf")).args([command, "--json"]).arg(&path).output();
        let Output { status, stdout, stderr } = program.unwrap();
        assert!(status.success(), "{command}: {}", String::from_utf8_lossy(&stderr));
        let found: Value = serde_json::from_slice(&stdout).unwrap();
        let named = if command == "inspect" { &found[0]["path"] } else { &found["open_files"][0] };
        assert!(named.as_str().unwrap().ends_with("a\u{fffd}b"), "{found}");
    }
}

#[test]
fn a_trace_that_was_cut_off_is_read_as_far_as_it_goes() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let whole = fs::read(&known(folder)[0]).unwrap();
    let last = whole.windows(7).rposition(|part| part == b"\"epoch\"").unwrap();
    let mut read = 0;
    for end in 0..whole.len() {
        fs::write(folder.join("cut.json"), &whole[..end]).unwrap();
        // Every length would take minutes in processes of their own: those around the ends of lines, and some.
        if end % 97 != 0 && !(last - 10..last + 10).contains(&end) {
            continue;
        }
        let Output { status, stdout, stderr } = twinbuf(folder, &["trace", "cut.json"]);
        let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        if status.success() {
            has(&stdout, &["cut.json: has no end"]);
            read += 1;
        } else {
            assert_eq!(status.code(), Some(2));
            assert!(stderr.contains("no spans"), "{stderr}");
            assert_eq!(read, 0, "once there is a span it is read: {end}");
        }
    }
    assert!(read > 20);
}

/// The page holds every span, and needs nothing but itself.
/// `trace --html *.json` names the first trace as the page.
#[test]
fn a_page_replaces_a_page_and_nothing_else() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let [first, second] = known(folder);
    let before = fs::read(&first).unwrap();
    for files in [["--html", "rank0.json", "rank1.json"], ["rank0.json", "--html", "rank0.json"]] {
        let Output { status, stderr, .. } = twinbuf(folder, &[&["trace"], &files[..]].concat());
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!((status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
        has(&stderr, &["rank0.json: wanted"]);
        assert_eq!(fs::read(&first).unwrap(), before, "{files:?}");
    }
    let out = folder.join("page.html");
    for there in [None, Some(""), Some("<!DOCTYPE html>\n<p>an older page")] {
        if let Some(there) = there {
            fs::write(&out, there).unwrap();
        }
        text(folder, &["trace", "rank1.json", "--html", "page.html"]);
        assert!(fs::read_to_string(&out).unwrap().ends_with("</html>\n"), "in place of {there:?}");
    }
    assert!(second.exists());
}

#[test]
fn the_page_of_a_trace_stands_alone() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    known(folder);
    text(folder, &["trace", "rank0.json", "rank1.json", "--html", "out.html"]);
    let page = fs::read_to_string(folder.join("out.html")).unwrap();
    has(
        &page,
        &[
            "<title>disk_load, epoch 7, step 0: 3.000 ms at 0.100 ms</title>",
            "<title>queue_wait, epoch 7, step 0: 4.000 ms at 1.000 ms</title>",
            "epoch 7</text>",
            "rank 1 &lt;read&gt;</text>",
            "<td class=\"t\">train<td>0.002<td>28.4<td>0.004<td>57.3",
            "</html>",
        ],
    );
    assert_eq!(page.matches("<title>train").count(), 4);
    assert_eq!(page.matches("<title>disk_load").count(), 6);
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    for forbidden in ["<script", "http", "<read>", "NaN", "inf\""] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    let error = twinbuf(folder, &["trace", "rank0.json", "--html", "no/such/folder.html"]);
    assert_eq!(error.status.code(), Some(2));
}

/// Records that cost nothing.
struct Nothing;

impl Dataset for Nothing {
    fn records(&self) -> u64 {
        400
    }

    fn record_bytes(&self) -> usize {
        1
    }

    fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> {
        Ok(out.len())
    }
}

#[test]
fn a_trace_by_the_loader_is_read_back() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("trace.json");
    let plan = Plan::builder(400).batch(1).build().unwrap();
    let mut loader = Loader::builder(Nothing, plan).trace(Trace::new(&path)).build().unwrap();
    for epoch in 0..2 {
        assert_eq!(loader.epoch(epoch).count(), 400);
    }
    loader.close().unwrap();
    let found = json(folder.path(), &["trace", "trace.json", "--json", "--html", "out.html"]);
    assert_eq!((&found["epochs"], &found["steps"]), (&2.into(), &800.into()));
    assert_eq!((&found["unread_lines"], &found["open_files"]), (&0.into(), &serde_json::json!([])));
    let tracks = found["tracks"].as_array().unwrap();
    assert_eq!(
        tracks.iter().map(|row| row["track"].as_str().unwrap()).collect::<Vec<_>>(),
        ["train", "read"]
    );
    // `epoch`, and `chunk`, `queue_wait` and `train` of each step.
    assert_eq!(tracks[0]["spans"], 2 + 3 * 800);
    assert_eq!(tracks[1]["spans"], 800);
    let page = fs::read_to_string(folder.path().join("out.html")).unwrap();
    assert!((20..=101 + 5).contains(&page.matches("<svg").count()), "a line holds some of the steps");
}
