//! The counts of a report, epoch by epoch, and its JSON: every figure under its field's name.

use std::sync::mpsc::channel;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use crate::common::{Gated, RECORD, Reads, busy, files, nothing, open, plan};
use serde_json::json;
use twinbuf::observe::{EpochTimes, Verdict};
use twinbuf::transform::per_record;
use twinbuf::{Loader, Plan, Records};

#[test]
fn a_report_as_json() {
    let mut loader = Loader::builder(Reads(30, RECORD, nothing), plan(30, 8)).build().unwrap();
    assert_eq!(loader.epoch(0).count(), 4);
    let report = loader.report();
    let found = serde_json::to_value(&report).unwrap();
    assert_eq!((&found["epochs"], &found["batches"]), (&json!(1), &json!(4)));
    assert_eq!(found["bytes"], 30 * RECORD as u64);
    assert_eq!(found["reading"]["hints"], report.reading.hints);
    for (stage, busy) in [("read", report.read.busy), ("train", report.train.busy)] {
        let found = serde_json::from_value::<Duration>(found[stage]["busy"].clone()).unwrap();
        assert_eq!(found, busy, "{stage}");
    }
    assert_eq!(serde_json::to_value(Verdict::DiskBound).unwrap(), "DiskBound");
}

#[test]
fn every_system_call_that_reads_is_counted() {
    let (_dir, paths) = files(&[30, 23]);
    for (overlap, workers) in [(false, 1), (true, 1), (true, 2)] {
        let plan = plan(53, 8);
        let builder = Loader::builder(open(&paths), plan.clone()).overlap(overlap).workers(workers);
        let mut loader = builder.build().unwrap();
        assert_eq!(loader.report().io_calls, 0, "those of the fingerprint are no batch's");
        assert_eq!(loader.epoch(2).count(), 7);
        // The same number as when this thread reads them: the system decides whether small records are one
        // call.
        let (data, before) = (open(&paths), Records::read_calls());
        for batch in (0..plan.steps(0)).map(|step| plan.batch(2, step).unwrap()) {
            data.read(&batch, &mut [0; 8 * RECORD]).unwrap();
        }
        let calls = Records::read_calls() - before;
        assert!(calls >= 7, "{calls}");
        assert_eq!(loader.report().io_calls, calls, "overlap {overlap}, {workers} workers");
        let text = loader.report().to_string();
        assert!(text.contains(&format!(", {calls} I/O calls in ")), "{text}");
    }
}

/// A caller that waits runs no code of the program, so overlap saves no more than the use.
#[test]
fn overlap_is_not_said_to_make_loads_of_foreign_code_faster() {
    let (_dir, paths) = files(&[64]);
    let slow = per_record(RECORD, |record, out, _| {
        std::thread::sleep(Duration::from_millis(2));
        out.copy_from_slice(record);
        Ok(())
    });
    let builder = Loader::builder(open(&paths), plan(64, 2)).transform(slow);
    let mut loader = builder.overlap(false).build().unwrap();
    assert_eq!(loader.epoch(0).count(), 32);
    let report = loader.report();
    let (settings, saves) = report.to_try().unwrap();
    assert!(settings.overlap && saves < 0.25, "{report}");
}

#[test]
fn epochs_have_rows_that_add_up() {
    let (_dir, paths) = files(&[40]);
    let mut loader = Loader::builder(open(&paths), plan(40, 8)).build().unwrap();
    assert!(loader.report().by_epoch.is_empty());
    for batch in loader.epochs(3..6) {
        std::hint::black_box(batch.unwrap()[0]);
    }
    assert_eq!(loader.epoch(9).take(2).count(), 2);
    let report = loader.report();
    let rows: Vec<_> = report.by_epoch.iter().map(|row| (row.epoch, row.batches)).collect();
    assert_eq!(rows, [(3, 5), (4, 5), (5, 5), (9, 2)]);
    let sum = |figure: fn(&EpochTimes) -> Duration| report.by_epoch.iter().map(figure).sum::<Duration>();
    assert_eq!(sum(|row| row.wall), report.wall);
    assert_eq!(sum(|row| row.load), report.read.busy + report.transform);
    assert_eq!(sum(|row| row.train.busy), report.train.busy);
    assert_eq!(sum(|row| row.train.waiting), report.train.waiting);
    assert!(!report.to_string().contains("\nepoch "), "{report}");
    let text = format!("{report:#}");
    assert!(text.contains("\nepoch ") && text.contains("\n9 "), "{text}");

    // The current epoch has a row too, up to the batch in use.
    let mut epochs = loader.epochs(6..8);
    let held = epochs.by_ref().nth(6).unwrap().unwrap();
    let report = epochs.report();
    let rows: Vec<_> = report.by_epoch[4..].iter().map(|row| (row.epoch, row.batches)).collect();
    assert_eq!(rows, [(6, 5), (7, 2)]);
    drop((held, epochs));
    for epoch in 0..64 {
        assert_eq!(loader.epoch(100 + epoch).count(), 5);
    }
    let rows = loader.report().by_epoch;
    assert_eq!((rows.len(), rows[0].epoch), (64, 100), "the last ones only");
}

/// A read that hangs shows while it does: all batches before it, and a wait that grows, in whatever way it is waited.
#[test]
fn a_report_has_the_wait_in_progress() {
    for polled in [false, true] {
        let (open, gate) = channel();
        let plan = Plan::builder(8).build().unwrap();
        let mut loader = Loader::builder(Gated(gate), plan).build().unwrap();
        let mut epoch = loader.epoch(0);
        (0..5).for_each(|_| open.send(()).unwrap());
        (0..5).for_each(|_| drop(epoch.next().unwrap().unwrap()));
        let mut task = Context::from_waker(Waker::noop());
        let found = if polled { epoch.poll_next(&mut task) } else { epoch.try_next() };
        assert!(found.is_pending());
        let hung = epoch.report();
        let mut later = epoch.report();
        while later.train.waiting <= hung.train.waiting {
            later = epoch.report(); // hangs if the wait is not counted
        }
        assert_eq!((hung.batches, later.batches), (5, 5));
        assert_eq!(later.wall - hung.wall, later.train.waiting - hung.train.waiting);
        drop(open);
        assert!(epoch.next().unwrap().is_err());
    }
}

/// Without overlap, a forked process can continue with the loader. The time between two epochs does not count as use of a
/// batch.
#[test]
#[cfg(unix)]
fn a_forked_process_reports_its_own_epochs() {
    let mut loader = Loader::builder(Reads(30, RECORD, nothing), plan(30, 8)).overlap(false).build().unwrap();
    assert_eq!(loader.epoch(0).count(), 4);
    let before = loader.report();
    assert!(crate::common::forked::forked(|| {
        let (mut all, mut batches) = (Duration::ZERO, 0);
        for epoch in 1..4 {
            let began = Instant::now();
            batches += loader.epoch(epoch).filter(Result::is_ok).count();
            all += began.elapsed();
            busy(Duration::from_millis(5));
        }
        let found = loader.report().since(&before);
        batches == 12 && found.batches == 12 && found.wall <= all
    }));
}
