//! The trace: the events that were promised, nested as they happened, in a file that can be read at any time.

mod common;

use std::path::Path;

use common::{files, open, plan};
use serde_json::Value;
use twinbuf::{Error, Loader, Profile};

/// The file as a viewer reads it: the closing bracket may be missing.
fn events(path: &Path) -> Vec<Value> {
    let mut text = std::fs::read_to_string(path).unwrap();
    if !text.trim_end().ends_with(']') {
        text.push(']');
    }
    serde_json::from_str(&text).unwrap()
}

fn named<'e>(events: &'e [Value], name: &str) -> Vec<&'e Value> {
    events.iter().filter(|event| event["name"] == name).collect()
}

#[test]
fn the_events_of_the_first_epochs() {
    let (dir, paths) = files(&[40]);
    let path = dir.path().join("trace.json");
    for overlap in [false, true] {
        let loader = Loader::builder(open(&paths), plan(40, 8))
            .overlap(overlap)
            .profile(Profile::chrome(&path).epochs(2))
            .build()
            .unwrap();
        for epoch in 10..13 {
            assert_eq!(loader.epoch(epoch).count(), 5);
        }
        loader.close().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let events: Vec<Value> = serde_json::from_str(&text).expect("plain JSON after the close");
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
        // A chunk is its wait and its use, one after the other; the disk was read before its use began.
        let span = |event: &Value| {
            let start = event["ts"].as_f64().unwrap();
            (start, start + event["dur"].as_f64().unwrap())
        };
        let of = |name: &str, epoch: u64, step: u64| {
            let found: Vec<_> = named(&events, name)
                .into_iter()
                .filter(|event| event["args"]["epoch"] == epoch && event["args"]["step"] == step)
                .map(span)
                .collect();
            assert_eq!(found.len(), 1, "{name}, epoch {epoch}, step {step}");
            found[0]
        };
        let close = |a: f64, b: f64| (a - b).abs() < 0.002; // the format's own rounding, in microseconds
        for epoch in 10..12 {
            for step in 0..5 {
                let (chunk, wait, train, load) = (
                    of("chunk", epoch, step),
                    of("queue_wait", epoch, step),
                    of("train", epoch, step),
                    of("disk_load", epoch, step),
                );
                assert!(close(chunk.0, wait.0) && close(wait.1, train.0) && close(train.1, chunk.1));
                assert!(load.1 <= train.0 + 0.002, "read before used");
            }
        }
        for name in ["process_name", "thread_name"] {
            assert!(!named(&events, name).is_empty(), "{name}");
        }
    }
}

#[test]
fn the_file_can_be_read_while_the_program_runs() {
    let (dir, paths) = files(&[40]);
    let path = dir.path().join("trace.json");
    let loader = Loader::builder(open(&paths), plan(40, 8)).profile(Profile::chrome(&path)).build().unwrap();
    assert_eq!(loader.epoch(0).count(), 5);
    assert_eq!(named(&events(&path), "train").len(), 5, "written at the end of an epoch, loader still open");
    let mut epoch = loader.epoch(1);
    drop(epoch.next());
    assert!(!events(&path).is_empty(), "and in the middle of one");
}

#[test]
fn a_trace_that_cannot_be_made_is_an_error_with_its_path() {
    let (dir, paths) = files(&[8]);
    let path = dir.path().join("no such folder").join("trace.json");
    let error =
        Loader::builder(open(&paths), plan(8, 8)).profile(Profile::chrome(&path)).build().unwrap_err();
    let Error::Trace { path: found, source } = error else { panic!("{error:?}") };
    assert_eq!(found, path);
    assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_stops_the_trace_and_not_the_training() {
    let (_dir, paths) = files(&[4000]);
    // Opened like a file; every write to it fails with ENOSPC.
    let builder = Loader::builder(open(&paths), plan(4000, 8)).profile(Profile::chrome("/dev/full"));
    match builder.build() {
        Err(Error::Trace { path, source }) => {
            assert_eq!(path, Path::new("/dev/full"));
            assert_eq!(source.kind(), std::io::ErrorKind::StorageFull);
        }
        other => panic!("{other:?}"),
    }
}
