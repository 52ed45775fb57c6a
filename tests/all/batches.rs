//! Only the plan determines the batches: they are identical byte for byte with overlap on or off, with or without
//! hints, at any depth.

use std::sync::mpsc::channel;
use std::task::Poll;
use std::time::Duration;

use crate::common::{
    Gated, RECORD, Reads, batches, files, in_order, modes, more_than_memory, nothing, open, plan, record,
    until,
};
use twinbuf::loader::LoaderBuilder;
use twinbuf::transform::Convert;
use twinbuf::{Loader, Records};

#[test]
fn the_same_bytes_in_every_configuration() {
    let (_dir, paths) = files(&[40, 1, 62]);
    let plan = plan(103, 10);
    for epoch in [0, 1, 7] {
        let expected: Vec<Vec<u8>> = (0..plan.steps(0))
            .map(|step| plan.batch(epoch, step).unwrap().runs().flatten().flat_map(record).collect())
            .collect();
        assert_eq!(expected.len(), 11);
        assert_eq!(expected[10].len(), 3 * RECORD, "the partial batch is kept");
        let data = open(&paths);
        for mode in modes(&data) {
            for (overlap, hints, depth) in configurations() {
                let mut loader = Loader::builder(data.clone(), plan.clone())
                    .read_mode(mode)
                    .overlap(overlap)
                    .hints(hints)
                    .depth(depth)
                    .build()
                    .unwrap();
                let case =
                    format!("{mode:?}, epoch {epoch}, overlap {overlap}, hints {hints}, depth {depth}");
                assert!(batches(&mut loader, epoch) == expected, "{case}");
                let report = loader.report();
                assert_eq!((report.batches, report.loads), (11, 11), "one read a batch");
                assert_eq!(report.bytes, 103 * RECORD as u64);
                // The test `reading` checks that hints are sent when they may be.
                assert!(overlap && hints || report.reading.hints == 0);
                assert_eq!((report.reading.bytes, report.reading.failed), (report.bytes, 0));
            }
        }
    }
}

/// Overlap, hints, depth.
fn configurations() -> impl Iterator<Item = (bool, bool, usize)> {
    [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .flat_map(|(overlap, hints)| (1 + usize::from(overlap)..=9).map(move |depth| (overlap, hints, depth)))
}

#[test]
fn every_batch_can_be_kept_in_memory_of_its_own() {
    let (_dir, paths) = files(&[16]);
    for overlap in [false, true] {
        let depth = 1 + usize::from(overlap);
        let mut loader =
            Loader::builder(open(&paths), plan(16, 4)).overlap(overlap).depth(depth).build().unwrap();
        let expected = batches(&mut loader, 1);
        let mut epoch = loader.epoch(1);
        let mut kept = Vec::new();
        for bytes in &expected {
            let batch = epoch.next_timeout(Duration::MAX);
            let Poll::Ready(Some(Ok(batch))) = batch else { panic!("{batch:?}") };
            assert!(epoch.held_for().is_none());
            if !overlap {
                // The only slot is held.
                assert!(kept.len() == 3 || epoch.try_next().is_pending());
                assert_eq!(epoch.held_for().is_some(), kept.len() < 3);
            }
            let at = batch.as_ptr();
            let buffer = batch.into_buffer().unwrap();
            assert!(std::ptr::eq(buffer.as_ptr(), at), "nothing is copied");
            kept.push((buffer, bytes));
        }
        assert!(kept.iter().all(|(buffer, bytes)| buffer.starts_with(bytes)));
    }
}

#[test]
fn the_next_epoch_is_read_during_the_last_step_of_this_one() {
    for depth in [2, 3] {
        let (open, gate) = channel();
        let mut loader = Loader::builder(Gated(gate), in_order(8, 4)).depth(depth).build().unwrap();
        (0..8).for_each(|_| open.send(()).unwrap());
        let mut epochs = loader.epochs(3..6);
        assert_eq!(epochs.size_hint(), (1, Some(6)));
        for i in 0..6 {
            let batch = epochs.next().unwrap().unwrap();
            assert_eq!((batch.epoch(), batch.step()), (3 + i / 2, i % 2), "depth {depth}");
            // The last batch of an epoch is in use; those of the next one fill the other slots.
            let ahead = (i + depth as u64).min(6);
            until(|| epochs.report().loads >= ahead);
        }
        assert!(epochs.next().is_none() && epochs.next().is_none());
        drop(epochs);
        assert_eq!((loader.report().epochs, loader.report().loads), (3, 6), "and nothing beyond the range");
        assert_eq!(loader.epochs(5..5).count(), 0);
        assert_eq!(loader.report().epochs, 3);
    }
}

#[test]
fn slots_are_no_larger_than_the_largest_batch() {
    let (_dir, paths) = files(&[10]);
    let plan = plan(10, 1 << 18);
    let builder = Loader::builder(open(&paths), plan).memory_limit(3 * 10 * RECORD as u64);
    let mut loader = builder.build().unwrap();
    assert_eq!(loader.epoch(0).next().unwrap().unwrap().len(), 10 * RECORD);
}

#[test]
fn what_cannot_work_is_refused_before_slots_are_wanted() {
    let (_dir, paths) = files(&[16]);
    let builder = || Loader::builder(open(&paths), in_order(16, 4));
    let pair = || Loader::builder((open(&paths), open(&paths)), in_order(16, 4));
    let halves = || Records::open(&paths, RECORD / 2).unwrap();
    let at = paths[0].display();
    // Some systems grant any memory that has an address. These slots must be refused, not abort.
    let huge = || Loader::builder(Reads(1 << 39, RECORD, nothing), in_order(1 << 39, 1 << 39)).depth(8);
    let refused: [(&dyn Fn() -> LoaderBuilder, &str); 11] = [
        (&|| builder().workers(0), "option `workers`: wanted 1 to 64 threads, found 0"),
        (&|| builder().workers(65).overlap(false), "option `workers`: wanted 1 to 64 threads, found 65"),
        (&|| builder().depth(0), "option `depth`: wanted at least 2 slots for 1 workers, found 0"),
        (&|| builder().depth(1), "option `depth`: wanted at least 2 slots for 1 workers, found 1"),
        (&|| builder().depth(3).workers(3), "option `depth`: wanted at least 4 slots for 3 workers, found 3"),
        (
            &|| builder().depth(0).workers(3).overlap(false),
            "option `depth`: wanted at least 1 slots for 1 workers, found 0",
        ),
        (&huge, ", found 2251799813685248 bytes: 8 host slots of 549755813888 records of 512 bytes"),
        (
            &|| Loader::builder(open(&paths), in_order(17, 4)),
            "option `plan`: wanted a plan for at most the data set's 16 records, found one for 17",
        ),
        (
            &|| pair().transform_field(2, Convert::U16ToU32),
            "option `transform_field`: wanted a field below 2, found 2",
        ),
        (
            &|| Loader::builder((open(&paths), halves()), in_order(16, 4)),
            &format!(
                "option `dataset`: wanted fields with the same number of records, found 16 in {at} and 32 in {at}"
            ),
        ),
        (
            &|| Loader::builder(Vec::<Records>::new(), in_order(1, 1)),
            "option `dataset`: wanted at least one data set, found none",
        ),
    ];
    for (builder, wanted) in refused {
        let error = builder().wanted_slots().expect_err(wanted).to_string();
        assert!(error.ends_with(wanted), "{error}");
        assert_eq!(builder().build().expect_err(wanted).to_string(), error);
    }
    assert!(huge().build().unwrap_err().to_string().starts_with("option `depth`: "));
}

#[test]
#[cfg(target_pointer_width = "64")]
fn more_slots_than_memory_are_refused_before_any_is_allocated() {
    let (_dir, paths) = files(&[16]);
    for depth in [1 << 31, 1 << 40, 1 << 62, usize::MAX] {
        for overlap in [true, false] {
            let builder = || Loader::builder(open(&paths), plan(16, 4)).depth(depth).overlap(overlap);
            for error in [builder().wanted_slots().unwrap_err(), builder().build().unwrap_err()] {
                let slots = more_than_memory(&error, "depth", depth, 4096);
                assert_eq!(slots, format!("host slots of 4 records of {RECORD} bytes"));
            }
        }
    }
}
