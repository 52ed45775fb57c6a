//! The batches are the plan's alone: byte for byte the same with overlap on or off, hinted or not, at any depth.

mod common;

use common::{RECORD, batches, files, open, open_direct, plan, record};
use twinbuf::mmap::Hinted;
use twinbuf::{Error, Loader, MAX_HOST_DEPTH, Plan, ReadMode, Records};

#[test]
fn the_same_bytes_in_every_configuration() {
    let (_dir, paths) = files(&[40, 1, 62]);
    let plan = plan(103, 10);
    for epoch in [0, 1, 7] {
        let expected: Vec<Vec<u8>> = (0..plan.steps())
            .map(|step| plan.batch(epoch, step).unwrap().runs().flatten().flat_map(record).collect())
            .collect();
        assert_eq!(expected.len(), 11);
        assert_eq!(expected[10].len(), 3 * RECORD, "the partial batch is kept");
        for data in [Some(open(&paths)), open_direct(&paths, RECORD)].into_iter().flatten() {
            let mode = data.read_mode();
            for (overlap, hints, depth) in configurations() {
                let loader = Loader::builder(data.clone(), plan)
                    .overlap(overlap)
                    .hints(hints)
                    .host_depth(depth)
                    .build()
                    .unwrap();
                let found: Vec<Vec<u8>> = batches(&loader, epoch).into_iter().map(Result::unwrap).collect();
                assert!(
                    found == expected,
                    "{mode:?}, epoch {epoch}, overlap {overlap}, hints {hints}, depth {depth}"
                );
                let report = loader.report();
                assert_eq!((report.batches, report.reads), (11, 11), "one read a batch");
                assert_eq!(report.bytes, 103 * RECORD as u64);
                // That it asks when it may: the next test, and those of `memory`.
                let may_ask = overlap && hints && mode != ReadMode::Direct;
                assert!(may_ask || report.hints == Hinted::default());
                assert_eq!(report.hints.failed, 0);
            }
        }
    }
}

/// Overlap, hints, depth.
fn configurations() -> impl Iterator<Item = (bool, bool, usize)> {
    [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .flat_map(|(overlap, hints)| (1..=MAX_HOST_DEPTH).map(move |depth| (overlap, hints, depth)))
}

#[test]
#[cfg(target_os = "linux")]
fn what_is_in_the_page_cache_is_not_asked_for() {
    let (_dir, paths) = files(&[103]);
    let mut data = open(&paths);
    let batch = plan(103, 10).batch(0, 0).unwrap();
    // Just written; but not every file system tells.
    if data.seems_cached(&batch) {
        assert_eq!(twinbuf::Dataset::will_need(&mut data, &batch), Hinted::default());
    }
    // A look at what is not there may bring it, and find it if the disk is faster than the look; then again.
    for _ in 0..1000 {
        data.evict().unwrap();
        if data.residency().unwrap().resident > 0 {
            eprintln!("not checked: the file system lets go of nothing");
            return;
        }
        let hinted = twinbuf::Dataset::will_need(&mut data, &batch);
        if hinted.calls > 0 {
            assert!(hinted.bytes >= 10 * RECORD as u64 && hinted.failed == 0, "{hinted:?}");
            return;
        }
    }
    panic!("asked for nothing, a thousand times");
}

#[test]
fn a_batch_says_which_it_is() {
    let (_dir, paths) = files(&[32]);
    let plan = plan(32, 8);
    let loader = Loader::builder(open(&paths), plan).build().unwrap();
    for (step, batch) in (0..).zip(loader.epoch(3)) {
        let batch = batch.unwrap();
        assert_eq!((batch.epoch(), batch.step()), (3, step));
        assert_eq!(Some(*batch.plan()), plan.batch(3, step));
    }
}

#[test]
fn many_epochs_over_the_same_thread_and_slots() {
    let (_dir, paths) = files(&[50]);
    let plan = plan(50, 7);
    let loader = Loader::builder(open(&paths), plan).build().unwrap();
    let reference = Loader::builder(open(&paths), plan).overlap(false).build().unwrap();
    for epoch in 0..200 {
        let found: Vec<_> = batches(&loader, epoch).into_iter().map(Result::unwrap).collect();
        let expected: Vec<_> = batches(&reference, epoch).into_iter().map(Result::unwrap).collect();
        assert_eq!(found.len(), 8);
        assert!(found == expected, "epoch {epoch}");
    }
    assert_eq!(loader.report().epochs, 200);
    assert_eq!(loader.report().batches, 1600);
}

#[test]
fn an_epoch_given_up_early_leaves_nothing_to_the_next() {
    let (_dir, paths) = files(&[64]);
    let plan = plan(64, 4);
    for overlap in [false, true] {
        for depth in 1..=4 {
            let loader =
                Loader::builder(open(&paths), plan).overlap(overlap).host_depth(depth).build().unwrap();
            for taken in 0..=16usize {
                let epoch = taken as u64;
                let some: Vec<_> =
                    loader.epoch(epoch).take(taken).map(|batch| batch.unwrap().to_vec()).collect();
                assert_eq!(some.len(), taken);
                let whole: Vec<_> = batches(&loader, epoch).into_iter().map(Result::unwrap).collect();
                assert_eq!(whole.len(), 16);
                assert!(whole.starts_with(&some), "overlap {overlap}, depth {depth}, after {taken}");
            }
        }
    }
}

#[test]
fn a_batch_may_be_kept_beyond_its_epoch_and_sent_away() {
    let (_dir, paths) = files(&[16]);
    for overlap in [false, true] {
        let loader =
            Loader::builder(open(&paths), plan(16, 4)).overlap(overlap).host_depth(3).build().unwrap();
        let kept = loader.epoch(0).last().unwrap().unwrap();
        let copy = kept.to_vec();
        // Two slots are left, and used once each; then it is the turn of the one that is kept.
        let mut next = loader.epoch(1);
        assert_eq!(next.next().unwrap().unwrap().step(), 0);
        assert_eq!(next.next().unwrap().unwrap().step(), 1);
        assert!(matches!(
            next.next(),
            Some(Err(Error::AllHeld { epoch: 1, step: 2, option: "host_depth", slots: 3 }))
        ));
        drop(next);
        std::thread::scope(|s| {
            s.spawn(move || assert_eq!(*kept, copy)); // and dropped there
        });
        assert_eq!(batches(&loader, 2).into_iter().filter(Result::is_ok).count(), 4);
    }
}

#[test]
fn a_batch_may_be_changed_in_place() {
    let (_dir, paths) = files(&[16]);
    let plan = plan(16, 4);
    let loader = Loader::builder(open(&paths), plan).build().unwrap();
    for batch in loader.epoch(0) {
        batch.unwrap().fill(0xff);
    }
    let again: Vec<_> = batches(&loader, 0).into_iter().map(Result::unwrap).collect();
    let expected: Vec<u8> = plan.batch(0, 0).unwrap().runs().flatten().flat_map(record).collect();
    assert_eq!(again[0], expected);
}

#[test]
fn holding_every_slot_is_an_error_and_no_deadlock() {
    let (_dir, paths) = files(&[16]);
    for overlap in [false, true] {
        let loader = Loader::builder(open(&paths), plan(16, 4)).overlap(overlap).build().unwrap();
        let mut epoch = loader.epoch(5);
        let (first, second) = (epoch.next().unwrap().unwrap(), epoch.next().unwrap().unwrap());
        let error = epoch.next().unwrap().unwrap_err();
        assert!(
            matches!(error, Error::AllHeld { epoch: 5, step: 2, option: "host_depth", slots: 2 }),
            "{error:?}"
        );
        assert!(epoch.next().is_none());
        drop((first, second));
        drop(epoch);
        assert_eq!(batches(&loader, 5).into_iter().filter(Result::is_ok).count(), 4, "the loader goes on");
    }
}

#[test]
fn one_epoch_at_a_time() {
    let (_dir, paths) = files(&[16]);
    let loader = Loader::builder(open(&paths), plan(16, 4)).build().unwrap();
    let mut old = loader.epoch(0);
    drop(old.next().unwrap().unwrap());
    let mut new = loader.epoch(1);
    let error = old.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::Superseded { epoch: 0 }), "{error:?}");
    assert!(old.next().is_none());
    drop(old);
    let steps: Vec<u64> = new.by_ref().map(|batch| batch.unwrap().step()).collect();
    assert_eq!(steps, [0, 1, 2, 3], "the new epoch is not disturbed");
}

#[test]
fn options_that_cannot_work_are_refused() {
    let (_dir, paths) = files(&[16]);
    let refused = |builder: twinbuf::LoaderBuilder| match builder.build().unwrap_err() {
        Error::Option { option, wanted, found } => (option, wanted, found),
        error => panic!("{error:?}"),
    };
    for depth in [0, MAX_HOST_DEPTH + 1, usize::MAX] {
        let (option, wanted, found) = refused(Loader::builder(open(&paths), plan(16, 4)).host_depth(depth));
        assert_eq!((option, wanted.as_str(), found), ("host_depth", "1 to 8 slots", depth.to_string()));
    }
    let (option, wanted, found) = refused(Loader::builder(open(&paths), plan(17, 4)));
    assert_eq!(option, "plan");
    assert_eq!(wanted, "a plan for at most the data set's 16 records");
    assert_eq!(found, "one for 17");

    // A batch larger than any memory: refused, not an abort.
    let sparse = paths[0].with_extension("sparse");
    std::fs::File::create(&sparse).unwrap().set_len(1 << 43).unwrap();
    let data = std::sync::Arc::new(Records::open([&sparse], 1 << 20).unwrap());
    let plan = Plan::builder(data.len()).batch(data.len()).build().unwrap();
    let (option, _, found) = refused(Loader::builder(data, plan).host_depth(8));
    assert_eq!(option, "host_depth");
    assert_eq!(found, "8 host slots of 8388608 records of 1048576 bytes");
}
