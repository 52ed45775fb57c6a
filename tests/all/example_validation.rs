//! The example `validation`: named loaders, each with its switches, one trace and one memory limit.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::common::trace;

fn run(folder: &Path, variables: &[(&str, &str)]) -> Output {
    let mut command = crate::common::example("validation");
    command.arg("data.bin").current_dir(folder).envs(variables.iter().copied()).output().unwrap()
}

#[test]
fn each_loader_has_its_switches_and_all_have_one_trace_and_one_limit() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("data.bin"), vec![1; 1000 * 1024]).unwrap();
    // Slots of 16 KiB: three with overlap, two without.
    let variables =
        [("TWINBUF_TRACE", "trace.json"), ("TWINBUF_VALID_OVERLAP", "0"), ("TWINBUF_MEMORY", "80KiB")];
    let Output { status, stdout, stderr } = run(folder.path(), &variables);
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    let text = String::from_utf8(stdout).unwrap();
    for counts in ["train: 3 epochs, 168 batches", "valid: 3 epochs, 18 batches"] {
        assert!(text.contains(counts), "{text}");
    }

    let events = trace::events(&folder.path().join("trace.json"));
    assert_eq!(trace::errors(&events), [""; 0]);
    let rows = trace::rows(&events);
    let mut names: Vec<String> = rows.values().map(|row| row.replace(" rank 0 of 1", "")).collect();
    names.sort_unstable();
    assert_eq!(names, ["train: read", "train: train", "valid: read", "valid: train"]);
    // Without overlap a load is part of its loader's wait.
    let number = |event: &Value| (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
    let of = |row: &str, name: &str| -> Vec<(f64, f64)> {
        let here =
            |event: &&Value| event["name"] == name && rows[&number(event)].replace(" rank 0 of 1", "") == row;
        events.iter().filter(here).map(trace::span).collect()
    };
    let waits = of("valid: train", "queue_wait");
    for (start, end) in of("valid: read", "disk_load") {
        assert!(waits.iter().any(|wait| wait.0 <= start + 0.01 && end <= wait.1 + 0.01), "{start} to {end}");
    }

    let Output { status, stderr, .. } = run(folder.path(), &[("TWINBUF_MEMORY", "81919")]);
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(!status.success() && stderr.contains("of which 49152 are taken"), "{stderr}");
}
