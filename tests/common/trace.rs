//! Checks that a trace is what Perfetto's importer demands of one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

/// The events of a file that all its loaders have closed.
pub fn events(path: &Path) -> Vec<Value> {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).expect("plain JSON after the last close")
}

/// Whole nanoseconds of a time of the format; `None` if it is not a number from 0 on.
pub fn nanos(micros: &Value) -> Option<u64> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // times of a short run
    micros.as_f64().filter(|micros| *micros >= 0.0).map(|micros| (micros * 1000.0).round() as u64)
}

/// Returns what is wrong with the events of a trace, in words.
///
/// Each row (`pid` and `tid`) has a name, and so has its process. The complete events of a row nest: two of them are one
/// after the other, or one is inside the other. They are in the file in the order of their ends, the inner before the
/// outer.
///
/// The rules of nesting are those of the Trace Event Format, section "Complete Events", and of `slice_tracker.cc`, which
/// drops events that overlap.
pub fn errors(events: &[Value]) -> Vec<String> {
    let mut errors = Vec::new();
    let (mut rows, mut names) = (BTreeMap::<_, Vec<_>>::new(), BTreeSet::new());
    for event in events {
        let (name, phase) = (event["name"].as_str().unwrap_or(""), event["ph"].as_str().unwrap_or(""));
        let (Some(pid), Some(tid)) = (event["pid"].as_u64(), event["tid"].as_u64()) else {
            errors.push(format!("no row: {event}"));
            continue;
        };
        if phase == "M" {
            if event["args"]["name"].as_str().is_some_and(|name| !name.is_empty()) {
                let row = (name == "thread_name").then_some(tid);
                names.insert((pid, row));
            }
            continue;
        }
        let Some(start) = nanos(&event["ts"]) else {
            errors.push(format!("no time: {event}"));
            continue;
        };
        match phase {
            "X" => match nanos(&event["dur"]) {
                Some(long) => rows.entry((pid, tid)).or_default().push((start, start + long, event)),
                None => errors.push(format!("no duration: {event}")),
            },
            _ => errors.push(format!("an event of no known kind: {event}")),
        }
    }
    for ((pid, tid), mut spans) in rows {
        if !names.contains(&(pid, None)) || !names.contains(&(pid, Some(tid))) {
            errors.push(format!("row {pid}/{tid} has no name"));
        }
        for pair in spans.windows(2).filter(|pair| pair[0].1 > pair[1].1) {
            errors.push(format!("{} is in the file before {}", pair[0].2, pair[1].2));
        }
        spans.sort_by_key(|&(start, end, _)| (start, std::cmp::Reverse(end)));
        let mut open: Vec<(u64, u64, &Value)> = Vec::new();
        for span in spans {
            open.retain(|outer| outer.1 > span.0);
            if let Some(outer) = open.iter().find(|outer| outer.1 < span.1) {
                errors.push(format!("overlap: {} and {}", outer.2, span.2));
            }
            open.push(span);
        }
    }
    errors
}

/// The start and the end of an event in microseconds.
pub fn span(event: &Value) -> (f64, f64) {
    let start = event["ts"].as_f64().unwrap();
    (start, start + event["dur"].as_f64().unwrap())
}

/// The rows of a trace, by `pid` and `tid`: the name of the process and that of the row.
pub fn rows(events: &[Value]) -> BTreeMap<(u64, u64), String> {
    let name = |event: &Value| event["args"]["name"].as_str().unwrap().to_string();
    let numbers = |event: &Value| (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
    let named = |kind| events.iter().filter(move |event| event["name"] == kind);
    let processes: BTreeMap<u64, String> =
        named("process_name").map(|event| (numbers(event).0, name(event))).collect();
    let row = |event| (numbers(event), format!("{}: {}", processes[&numbers(event).0], name(event)));
    named("thread_name").map(row).collect()
}
