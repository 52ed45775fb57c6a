//! `twinbuf trace`: its sums, of traces that are whole, cut off or none.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;
use twinbuf::observe::Trace;
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan};

use super::{Run, has, json, line, meta, span, text, twinbuf};

/// A file of data given for a trace may have no end of a line at all, and be larger than the memory.
#[test]
#[cfg(target_os = "linux")]
fn a_trace_need_not_fit_the_memory_line_by_line() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let span = span("train", [0, 1], [0, 9], [0, 0]);
    for (start, expected) in [("", Err("holes: no spans")), (&span, Ok("4 lines could not be read"))] {
        let path = folder.path().join("holes");
        fs::write(&path, format!("{start}\n")).unwrap();
        // The last of a file may be holes where the system has crashed.
        let long = if start.is_empty() { 1 << 32 } else { 4 << 20 };
        fs::OpenOptions::new().append(true).open(&path).unwrap().set_len(long).unwrap();
        let Run { code, stdout, stderr } = Command::new("sh")
            .args(["-c", "ulimit -v 1000000 && exec \"$0\" trace holes", env!("CARGO_BIN_EXE_twinbuf")])
            .current_dir(&folder)
            .output()
            .unwrap()
            .into();
        match expected {
            Ok(line) => has(&stdout, &[line]),
            Err(line) => has(&stderr, &[line]),
        }
        assert_eq!(code, Some(if expected.is_ok() { 0 } else { 2 }), "{stderr}");
    }
}

/// A trace whose times are known: two ranks. The second began 1 ms later.
fn known(folder: &TempDir) -> [PathBuf; 2] {
    [0_u64, 1].map(|rank| {
        let meta = |name: &str, tid: u64, args: &str| meta(name, [rank, tid], args);
        let span = |name: &str, tid: u64, start: u64, long: u64, step: u64| {
            span(name, [rank, tid], [start, long], [7, step])
        };
        let lines = [
            meta("clock_origin", 1, &format!(r#""unix_us":{}"#, 1_700_000_000_000_000 + 1000 * rank)),
            meta("process_name", 1, &format!(r#""name":"twinbuf rank {rank} of 2""#)),
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
            line("epoch", [rank, 1], r#""ph":"X","ts":0.000,"dur":6000.000"#, r#""epoch":7"#),
            // Not a span: passed over.
            line("full host slots", [rank, 2], r#""ph":"C","ts":3600"#, r#""slots":1"#),
        ];
        let path = folder.path().join(format!("rank{rank}.json"));
        fs::write(&path, format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
        path
    })
}

#[test]
fn trace_adds_up_who_waited_for_what() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    known(&folder);
    let found = json(&folder, "trace rank0.json --json");
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
    assert_eq!(json(&folder, "trace rank0.json --json --stall-ms 0.005")["stalls"], 2);

    has(
        &text(&folder, "trace rank0.json"),
        &[
            "1 epoch, 2 steps in 0.006 s\n",
            "0.003 s  the caller, for `disk_load` of the batch that it wanted\n",
            "0.001 s  `<read>`, between two batches, for a free slot\n",
            "1 wait of 1 ms or longer:\n",
            "      7        0      0.000      4.000  disk_load\n",
        ],
    );
    has(&text(&folder, "trace rank0.json --stall-ms 5"), &["no wait of 5 ms or longer"]);

    // Both on one clock: the second rank ends 1 ms later than it would by its own.
    let both = json(&folder, "trace rank0.json rank1.json --json");
    assert!(near(&both["wall_s"], 7000.0), "{both}");
    assert_eq!(both["tracks"].as_array().unwrap().len(), 4);
    has(
        &text(&folder, "trace rank1.json rank0.json"),
        &["twinbuf rank 1 of 2, train", "twinbuf rank 0 of 2, train"],
    );
}

#[test]
fn a_caller_that_loads_while_it_waits_works() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let span = |name: &str, row: u64, start: u64, long: u64, step: u64| {
        span(name, [0, row], [start, long], [0, step])
    };
    let row = |row: u64, name: &str| meta("thread_name", [0, row], &format!(r#""name":"{name}""#));
    let lines = [
        row(1, "train"),
        row(3, "upload"),
        span("queue_wait", 1, 0, 1000, 0),
        span("disk_load", 1, 100, 600, 0), // of the batch that it waits for
        span("disk_load", 1, 700, 200, 1), // and of the next one
        span("train", 1, 1000, 500, 0).replace("1000", "999.999"),
        span("pause", 1, 1500, 3000, 0),
        span("train", 1, 4500, 500, 0),
        span("gpu_transfer", 3, 0, 100, 0),
        span("gpu_transfer", 3, 300, 100, 1),
    ];
    fs::write(folder.path().join("t.json"), format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
    let found = json(&folder, "trace t.json --json");
    let micros = |seconds: &Value| (seconds.as_f64().unwrap() * 1e6).round();
    let train = &found["tracks"][0];
    assert_eq!((micros(&train["busy_s"]), micros(&train["waiting_s"])), (1800.0, 200.0), "{found}");
    let causes = found["waited_for"].as_array().unwrap();
    assert_eq!(causes.len(), 3, "not for its own use: {found}");
    let cause = causes.iter().find(|cause| cause["during"] == "disk_load").unwrap();
    assert_eq!(micros(&cause["waited_s"]), 600.0, "{found}");
    has(&text(&folder, "trace t.json"), &["  `upload`, between two batches\n"]);
    // Without overlap, loads are in the waits, and may begin later than these.
    let steps = |step: u64| {
        let start = 1000 * step;
        [span("disk_load", 2, start + 50, 800, step), span("queue_wait", 1, start, 900, step)].join(",\n")
    };
    let lines = [row(1, "train"), row(2, "read"), steps(0), steps(1)];
    fs::write(folder.path().join("in_turn.json"), format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
    let found = text(&folder, "trace in_turn.json");
    assert!(!found.contains("between two batches"), "{found}");
    // With a thread, each copy is in the caller's wait for it, too.
    let steps = |step: u64| {
        let start = 1000 * step;
        let spans = [
            span("disk_load", 2, start, 1000, step),
            span("gpu_transfer", 3, start + 1000, 100, step),
            span("queue_wait", 1, start + 130, 980, step),
            span("train", 1, start + 1110, 20, step),
        ];
        spans.join(",\n")
    };
    let lines = [row(1, "train"), row(2, "read"), row(3, "upload"), steps(0), steps(1), steps(2)];
    fs::write(folder.path().join("copies.json"), format!("[\n{}\n]\n", lines.join(",\n"))).unwrap();
    has(&text(&folder, "trace copies.json"), &["  `upload`, between two batches\n"]);
    // The second file is no trace.
    fs::write(folder.path().join("data.bin"), [7; 5000]).unwrap();
    let Run { code, stderr, .. } = twinbuf(&folder, "trace t.json data.bin");
    assert_eq!((code, stderr.lines().count()), (Some(2), 1), "{stderr}");
    has(&stderr, &["data.bin: no spans: wanted a trace by twinbuf, one event a line"]);
}

#[test]
fn nothing_is_no_negative_number() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // A track with one batch has no gap between two; one with waits alone does no work.
    let spans = [("disk_load", 2), ("queue_wait", 1)].map(|(name, row)| span(name, [0, row], [0, 9], [0, 0]));
    fs::write(folder.path().join("t.json"), spans.join("\n")).unwrap();
    for arguments in ["trace t.json", "trace t.json --json"] {
        let found = text(&folder, arguments);
        assert!(!found.contains("-0."), "{found}");
    }
}

/// Programs that filter JSON, such as `jq`, put a value on many lines or all on one.
#[test]
fn a_trace_on_other_lines_is_read() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let trace = &known(&folder)[0];
    let events: serde_json::Value = serde_json::from_slice(&fs::read(trace).unwrap()).unwrap();
    let wanted = text(&folder, "trace rank0.json");
    for written in [serde_json::to_string_pretty(&events).unwrap(), events.to_string()] {
        fs::write(trace, written).unwrap();
        assert_eq!(text(&folder, "trace rank0.json"), wanted);
    }
}

/// As by `cat`, or by `jq -s add`.
#[test]
fn traces_that_were_joined_to_one_file_are_on_one_clock() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let texts = known(&folder).map(|path| fs::read(path).unwrap());
    let wanted = text(&folder, "trace rank0.json rank1.json");
    has(&wanted, &["2 epochs, 4 steps in 0.007 s"]);
    let events = texts.each_ref().map(|text| serde_json::from_slice::<Vec<Value>>(text).unwrap());
    for joined in [texts.concat(), serde_json::to_vec(&events.concat()).unwrap()] {
        fs::write(folder.path().join("joined.json"), joined).unwrap();
        assert_eq!(text(&folder, "trace joined.json"), wanted);
    }
    // One of the two has no end, as that of a program that was killed: its last event has no line end either.
    let ends = texts.each_ref().map(|text| text.len() - b"\n]\n".len());
    for (front, back) in [
        (&texts[0][..], &texts[1][..ends[1]]),
        (&texts[0][..ends[0]], &texts[1]),
        (&texts[0][..ends[0] + 1], &texts[1]),
    ] {
        fs::write(folder.path().join("joined.json"), [front, back].concat()).unwrap();
        let found = text(&folder, "trace joined.json");
        has(&found, &["2 epochs, 4 steps in 0.007 s", "joined.json: has no end"]);
        assert!(!found.contains("could not be read"), "{found}");
    }
}

/// Runs that are no ranks of each other have the same names.
#[test]
fn processes_of_one_name_are_told_apart() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    known(&folder);
    let found = text(&folder, "trace rank0.json rank0.json rank0.json");
    for number in ["", " (2)", " (3)"] {
        has(&found, &[&format!("\ntwinbuf rank 0 of 2{number}, train  ")]);
    }
}

/// It can be read only once.
#[test]
#[cfg(target_os = "linux")]
fn a_pipe_is_read_to_its_end() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    known(&folder);
    for (input, expected) in [("rank0.json", Ok("1 epoch, 2 steps")), ("/dev/null", Err("pipe: no spans"))] {
        let command = format!("mkfifo pipe && (cat {input} > pipe & exec timeout 100 \"$0\" trace pipe)");
        let run = Command::new("sh")
            .args(["-c", &command, env!("CARGO_BIN_EXE_twinbuf")])
            .current_dir(&folder)
            .output();
        fs::remove_file(folder.path().join("pipe")).unwrap();
        let Run { code, stdout, stderr } = run.unwrap().into();
        assert_eq!(code, Some(if expected.is_ok() { 0 } else { 2 }), "{stderr}");
        match expected {
            Ok(line) => has(&stdout, &[line]),
            Err(line) => has(&stderr, &[line]),
        }
    }
}

#[test]
fn a_trace_that_was_cut_off_is_read_as_far_as_it_goes() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let whole = fs::read(&known(&folder)[0]).unwrap();
    let last = whole.windows(7).rposition(|part| part == b"\"epoch\"").unwrap();
    let mut read = 0;
    for end in 0..whole.len() {
        fs::write(folder.path().join("cut.json"), &whole[..end]).unwrap();
        // A separate process for every length would take minutes: lengths around the ends of lines, and some others.
        if end % 97 != 0 && !(last - 10..last + 10).contains(&end) {
            continue;
        }
        let Run { code, stdout, stderr } = twinbuf(&folder, "trace cut.json");
        if code == Some(0) {
            has(&stdout, &["cut.json: has no end"]);
            read += 1;
        } else {
            assert_eq!(code, Some(2));
            assert!(stderr.contains("no spans"), "{stderr}");
            assert_eq!(read, 0, "once there is a span it is read: {end}");
        }
    }
    assert!(read > 20);
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

    fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        Ok(out.len())
    }
}

/// A loader of 400 of them, whose trace is `trace.json` in the folder.
fn traced(folder: &TempDir, name: &str, batch: u64, overlap: bool) -> Loader {
    let plan = Plan::builder(400).batch(batch).build().unwrap();
    let builder = Loader::builder(Nothing, plan).name(name).overlap(overlap);
    builder.trace(Trace::new(folder.path().join("trace.json"))).build().unwrap()
}

#[test]
fn a_trace_by_the_loader_is_read_back() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut loader = traced(&folder, "train", 1, true);
    for epoch in 0..2 {
        assert_eq!(loader.epoch(epoch).count(), 400);
    }
    loader.close().unwrap();
    let found = json(&folder, "trace trace.json --json");
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
}

/// Without overlap the caller reads: no thread waits for a slot.
#[test]
fn a_caller_that_reads_waits_for_no_slot() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut loader = traced(&folder, "train", 4, false);
    for epoch in [0, 1, 0] {
        assert_eq!(loader.epoch(epoch).count(), 100);
    }
    loader.close().unwrap();
    let read = &json(&folder, "trace trace.json --json")["tracks"][1];
    assert_eq!((&read["track"], &read["waiting_s"]), (&"read".into(), &0.0.into()));
    let found = text(&folder, "trace trace.json");
    assert!(found.contains("for `disk_load` of the batch") && !found.contains("slot"), "{found}");
}

/// A loader that iterates over another one pauses, and a pause splits the use of a batch. An epoch may be left early,
/// and a validation repeats its epoch.
#[test]
fn a_step_with_pauses_is_one_step() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut train, mut valid) = (traced(&folder, "train", 40, true), traced(&folder, "valid", 400, true));
    for epoch in 0..2 {
        for batch in train.epoch(epoch).take(3) {
            let _batch = batch.unwrap();
            if epoch == 0 {
                assert_eq!(valid.epoch(0).count(), 1);
            }
        }
    }
    train.close().unwrap();
    valid.close().unwrap();
    let found = json(&folder, "trace trace.json --json");
    let pauses = fs::read_to_string(folder.path().join("trace.json")).unwrap().matches("\"pause\"").count();
    assert_eq!(pauses, 3);
    assert_eq!((&found["epochs"], &found["steps"]), (&5.into(), &9.into()));
    has(&text(&folder, "trace trace.json"), &["5 epochs, 9 steps in "]);
}
