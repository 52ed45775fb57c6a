//! A report as JSON: every figure under its field's name, times as serde writes a `Duration`.

mod common;

use std::time::Duration;

use common::{Fault, Faulty, RECORD, plan};
use serde_json::json;
use twinbuf::Loader;
use twinbuf::observe::Verdict;

#[test]
fn a_report_as_json() {
    let (dataset, _) = Faulty::new(30, Fault::None, 0);
    let mut loader = Loader::builder(dataset, plan(30, 8)).build().unwrap();
    assert_eq!(loader.epoch(0).count(), 4);
    let report = loader.report();
    let found = serde_json::to_value(&report).unwrap();
    assert_eq!((&found["epochs"], &found["batches"]), (&json!(1), &json!(4)));
    assert_eq!(found["bytes"], 30 * RECORD as u64);
    assert_eq!(found["hints"]["calls"], report.hints.calls);
    for (stage, busy) in [("read", report.read.busy), ("train", report.train.busy)] {
        let found = serde_json::from_value::<Duration>(found[stage]["busy"].clone()).unwrap();
        assert_eq!(found, busy, "{stage}");
    }
    assert_eq!(serde_json::to_value(Verdict::DiskBound).unwrap(), "DiskBound");
}
