//! Several loaders at once: training and validation, with one trace and separate times.

use std::time::Duration;

use crate::common::{busy, files, open, plan, trace};
use serde_json::Value;
use twinbuf::Loader;
use twinbuf::loader::LoaderBuilder;

#[test]
fn loaders_with_one_trace_have_rows_of_their_own() {
    let (dir, paths) = files(&[40]);
    let path = dir.path().join("trace.json");
    let build = |name: Option<&str>| {
        let builder = Loader::builder(open(&paths), plan(40, 8)).trace(path.as_path());
        name.into_iter().fold(builder, LoaderBuilder::name).build().unwrap()
    };
    let (mut train, mut valid, mut third) = (build(Some("train")), build(Some("va\"lid")), build(None));
    assert_eq!(train.epoch(0).count(), 5);
    assert_eq!(valid.epoch(7).count(), 5);
    assert_eq!(third.epoch(9).count(), 5);
    train.close().unwrap();
    drop(third);
    assert_eq!(valid.epoch(8).count(), 5, "the others may be gone");
    valid.close().unwrap();

    let events = trace::events(&path);
    assert_eq!(trace::errors(&events), [""; 0]);
    let rows = trace::rows(&events);
    let names: Vec<&str> = rows.values().map(String::as_str).collect();
    let expected = [
        "train rank 0 of 1: train",
        "train rank 0 of 1: read",
        "va_lid rank 0 of 1: train",
        "va_lid rank 0 of 1: read",
        "loader 3 rank 0 of 1: train",
        "loader 3 rank 0 of 1: read",
    ];
    assert_eq!(names, expected);
    for ((_, row), name) in rows {
        let of_batches = |name: &Value| name == "train" || name == "disk_load";
        let here = events.iter().filter(|event| event["tid"] == row && of_batches(&event["name"]));
        let epochs: Vec<u64> = here.map(|event| event["args"]["epoch"].as_u64().unwrap()).collect();
        let expected = match &name[..5] {
            "train" => [0; 5].to_vec(),
            "va_li" => [[7; 5], [8; 5]].concat(),
            _ => [9; 5].to_vec(),
        };
        assert_eq!(epochs, expected, "{name}");
    }
    // A file that no loader writes any more is created again.
    drop(build(None));
    assert!(!std::fs::read_to_string(&path).unwrap().contains("va_lid"));
}

#[test]
fn two_loaders_in_step_do_not_pause_each_other() {
    let (_dir, paths) = files(&[40]);
    let build = || Loader::builder(open(&paths), plan(40, 8)).build().unwrap();
    let (mut inputs, mut labels) = (build(), build());
    for (input, label) in inputs.epoch(0).zip(labels.epoch(0)) {
        busy(Duration::from_millis(2));
        drop((input.unwrap(), label.unwrap()));
    }
    for report in [inputs.report(), labels.report()] {
        assert!(report.train.busy >= Duration::from_millis(10), "{report:?}");
    }
}
