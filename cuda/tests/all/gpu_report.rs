//! The GPU report runs to its end on the software driver. Checks that its figures exist, and
//! the values of those alone that do not depend on the machine.

#[allow(dead_code)]
#[path = "../../examples/gpu_report/main.rs"]
mod example;

use crate::common::{copy_threads, start, start_software_with};
use serde_json::Value;
use twinbuf_cuda_sim::{Failure, Installed, Options, Sim};

/// The lines of a report, by section.
struct Report(Vec<Value>);

impl Report {
    fn run(sections: &[&str]) -> Self {
        let sections: Vec<String> = sections.iter().map(ToString::to_string).collect();
        let mut lines = Vec::new();
        example::run(&example::Extent::quick(), &sections, |line| lines.push(line)).unwrap();
        Self(lines)
    }

    fn lines(&self, section: &str) -> Vec<&Value> {
        self.0.iter().filter(|line| line["section"] == section).collect()
    }

    /// The only line of a section.
    fn line(&self, section: &str) -> &Value {
        let [line] = self.lines(section)[..] else { panic!("{section}: {:?}", self.lines(section)) };
        line
    }
}

/// Each of these paths of a line leads to a number.
#[track_caller]
fn figures(line: &Value, paths: &str) {
    for path in paths.split(' ') {
        assert!(line.pointer(&format!("/{path}")).is_some_and(Value::is_f64), "{path}: {line}");
    }
}

/// The lines of a table in a line, which are one for each of these values.
fn rows<'a>(line: &'a Value, table: &str, column: &str, values: [u64; 4]) -> &'a [Value] {
    let rows = line[table].as_array().unwrap();
    assert!(rows.iter().map(|row| row[column].as_u64().unwrap()).eq(values), "{line}");
    rows
}

#[test]
fn the_report_has_every_figure() {
    let (sim, _ctx) = start(1, true);
    let report = Report::run(&[]);
    assert_eq!(sim.calls_of("cuEventElapsedTime_v2"), 0, "drivers before CUDA 12.8 lack it");
    for line in &report.0 {
        assert!(line["error"].is_null(), "{line}");
    }
    assert!(report.line("machine")["device"].is_string());
    assert_eq!(report.lines("copies").len(), 2);
    for copies in report.lines("copies") {
        for kind in ["pinned", "write_combined"] {
            figures(&copies[kind], "gap_median gap_p99 uploader_over_plain plain/gb_s uploader/gb_s");
        }
        figures(copies, "pageable/plain/gb_s plain_gaps/gap_median");
    }
    let calls = report.line("calls");
    figures(calls, "host_seconds");
    if !sim.is_real() {
        println!("calls a batch: {calls:#}");
        let each = ["cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent", "cuEventElapsedTime"];
        assert_eq!(
            each.map(|name| calls["by_name"][name].as_f64().unwrap()),
            [1.0, 2.0, 2.0, 0.0],
            "{calls}"
        );
    }
    for depths in report.lines("depths") {
        figures(depths, "cudarc_one_stream/gb_s cudarc_two_streams/gb_s");
        for of in rows(depths, "depths", "depth", [1, 2, 4, 8]) {
            figures(of, "uploader/gb_s over_one_stream");
        }
    }
    for of in ["alone", "idle_uploader", "busy_uploader"] {
        figures(&report.line("neighbour")[of], "work_over_alone enqueue_over_alone");
    }
    figures(report.line("overlap"), "hidden");
    assert_eq!(report.lines("pipelines").len(), 2);
    for pipeline in report.lines("pipelines") {
        figures(pipeline, "serial overlapped_over_longest");
    }
    for of in rows(report.line("stager"), "threads", "fill_threads", [1, 2, 4, 8]) {
        figures(of, "upload upload_slices offload pageable_over_upload");
    }
    let latency = report.lines("latency");
    assert_eq!(latency.iter().filter(|line| line["plain_4k"].is_f64()).count(), 3);
    figures(latency[3], "uploader_4k");
    figures(report.line("cpu"), "cpu_share cpu_share_idle");
    report.lines("pinning").into_iter().for_each(|line| figures(line, "page_locked"));
    let [codes, modes] = report.lines("captures")[..] else { panic!("{:?}", report.lines("captures")) };
    let wanted =
        [("record", 0, 0), ("record_and_query", 907, 901), ("wait_for_an_event_from_outside", 905, 901)];
    for (call, code, end) in wanted {
        assert_eq!(codes["codes"][call], serde_json::json!({ "call": code, "end": end }), "{call}");
    }
    for mode in ["global", "thread_local", "relaxed"] {
        assert_eq!(modes["modes"][mode]["well"], true, "{modes}");
    }
    assert_eq!(report.lines("unknowns").len(), 3);
    each_promise_has_its_figure(report.0);
}

/// Also: a bad figure is a broken promise, and one that was not measured is none.
fn each_promise_has_its_figure(mut lines: Vec<Value>) {
    let no_log = |_: &str| None;
    let run = |lines: &[Value]| example::Run { lines, log: &no_log }.promises();
    let measured = run(&lines).iter().filter(|(_, found)| found.is_some()).count();
    assert_eq!(measured, 9, "{:?}", run(&lines));
    let met = |lines: &[Value], about: &str| {
        let found = run(lines).into_iter().find(|(promise, _)| promise.contains(about)).unwrap();
        found.1.map(|(met, _)| met)
    };
    let found =
        ["(address 0)", "freed in a capture", "breaks nothing", "arrive whole"].map(|of| met(&lines, of));
    assert_eq!(found, [Some(true); 4], "{:?}", run(&lines));
    for line in &mut lines {
        for (figure, bad) in
            [("/pinned/uploader_over_plain", 0.5), ("/overlapped_over_longest", 1.5), ("/wrong", 3.0)]
        {
            line.pointer_mut(figure).into_iter().for_each(|found| *found = bad.into());
        }
    }
    let found = ["0.98 of the rate", "overlap", "arrive whole"].map(|of| met(&lines, of));
    assert_eq!(found, [Some(false); 3], "{:?}", run(&lines));
    let log = |name: &str| match name {
        "tests" => Some(
            "test result: ok. 3\ntest result: FAILED. 1\nwithout A: 20 runs, other data in 0".to_string(),
        ),
        _ => Some("========= ERROR SUMMARY: 2 errors".to_string()),
    };
    let torch = |way, wall| serde_json::json!({ "section": "torch", "way": way, "wall_median": wall });
    let written = |way, wall| serde_json::json!({ "section": "torch", "written": way, "wall_median": wall });
    let mut lines =
        vec![torch("prefetch", 2.0), torch("pinned", 1.0), written("behind", 2.0), written("in_turn", 1.0)];
    let broken = example::Run { lines: &lines, log: &log }.promises();
    assert_eq!(broken.iter().filter(|(_, found)| found.as_ref().is_some_and(|(met, _)| !met)).count(), 5);
    lines[2]["wall_median"] = 0.5.into();
    assert_eq!(met(&lines, "twinbuf.Writer"), Some(true));
    // Wrong rows in one round.
    lines.push(
        serde_json::json!({ "section": "torch", "written": "behind", "error": "the file has other rows" }),
    );
    assert_eq!(met(&lines, "twinbuf.Writer"), Some(false));
}

#[test]
fn an_unknown_section_is_refused_by_name() {
    let sections = ["no such".to_string()];
    let error = example::run(&example::Extent::quick(), &sections, |_| ()).unwrap_err().to_string();
    assert!(error.contains("found `no such`") && error.contains("\"copies\""), "{error}");
}

#[test]
fn a_round_has_copies_with_gaps_between_and_is_long_beside_the_waking_of_threads_at_its_ends() {
    for extent in [example::Extent::quick(), example::Extent::full()] {
        for &size in &extent.sizes {
            assert!(extent.count(size) >= 2, "{size}: {}", extent.count(size));
        }
    }
    // At PCIe 5's 55 GB/s, a round of the larger sizes must take 50 ms, because waking threads takes tenths
    // of a millisecond.
    let full = example::Extent::full();
    for &size in full.sizes.iter().filter(|&&size| size >= 1 << 20) {
        assert!(full.count(size) * size >= 55 * 50_000_000, "{size}: {}", full.count(size));
    }
}

#[test]
fn leases_are_dropped_at_once_so_that_one_device_slot_is_enough() {
    let (_sim, ctx) = start(1, true);
    let uploader = twinbuf_cuda::Uploader::new(&ctx, 4096).device_depth(1);
    example::uploads(uploader, &example::Extent::quick(), 4096, 8, || Ok(())).unwrap();
}

#[test]
fn what_does_not_fit_or_fails_is_an_entry_and_the_rest_is_measured() {
    let device_bytes = 3 << 20; // less than four times the larger size, 1 MiB
    let options = Options { delay_us: 0, pieces: 1, device_bytes, ..Options::default() };
    let Some((sim, _ctx)) = start_software_with(options) else { return };
    sim.inject(Failure::api("cuMemcpyHtoDAsync_v2", 1, 999));
    let report = Report::run(&["copies", "overlap"]);
    let copies = report.lines("copies");
    assert!(copies[0]["error"].as_str().unwrap().contains("CUDA_ERROR_UNKNOWN"), "{copies:?}");
    assert_eq!(copies[0]["bytes"], 64 << 10);
    assert!(copies[1]["error"].as_str().unwrap().starts_with("wanted at most a quarter"), "{copies:?}");
    assert_eq!(copies[1]["bytes"], 1 << 20);
    assert!(report.line("overlap")["hidden"].is_f64());
}

#[test]
fn a_pipeline_that_fails_says_so_and_leaves_no_thread() {
    let (sim, ctx) = start(1, true);
    if sim.is_real() {
        return;
    }
    let work = example::Work::new(&ctx).unwrap();
    for nth in (0..).map(|power| 1 << power) {
        let before = sim.injected().len();
        sim.inject(Failure::api("cuLaunchKernel", nth, 719));
        let found = example::pipeline(&ctx, &example::Extent::quick(), &work, [1.0, 0.1, 1.0]);
        if sim.injected().len() == before {
            found.unwrap();
            break;
        }
        let error = found.unwrap_err().to_string();
        assert!(error.contains("LAUNCH_FAILED"), "{error}");
        assert_eq!(copy_threads(), 0);
    }
}

#[test]
fn without_a_device_it_is_one_line() {
    let Some(_sim) = Sim::start_software(Options { installed: Installed::NoDevice, ..Options::default() })
    else {
        return;
    };
    let error = example::run(&example::Extent::quick(), &[], |_| ()).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
}
