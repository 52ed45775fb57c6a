//! Several reading threads: the plan's order whatever their number, errors in order, memory as documented.

#![allow(clippy::cast_possible_truncation)] // small numbers

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use crate::common::{self, RECORD, Reads, driven, files, in_order, numbers, open, plan, record, until};
use twinbuf::loader::{Driven, LoaderBuilder};
use twinbuf::transform::{Context, RecordTransform, RecordType, map, per_record};
use twinbuf::{Batch, BatchIndices, BoxError, Dataset, Error, Loader};

/// A random augmentation: changes the record by random numbers from its seed.
fn augment() -> impl RecordTransform {
    per_record(RECORD, |record, out, context| {
        let mut random = context.seed;
        for (out, byte) in out.iter_mut().zip(record) {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(context.epoch << 32 | context.step | 1);
            *out = byte ^ random.to_le_bytes()[7];
        }
        Ok(())
    })
}

#[test]
fn an_epoch_is_the_same_with_any_number_of_workers() {
    let (_dir, paths) = files(&[40, 1, 62]);
    let plan = plan(103, 10);
    let build = |workers, depth, overlap| {
        let builder = Loader::builder(open(&paths), plan.clone()).transform(augment());
        builder.workers(workers).depth(depth).overlap(overlap).build().unwrap()
    };
    let mut first = build(1, 2, false);
    let expected: Vec<Vec<u8>> = first.epochs(3..6).map(|batch| batch.unwrap().to_vec()).collect();
    assert_eq!(expected.len(), 33);
    assert!(!expected.concat().chunks_exact(RECORD).any(|found| found == record(0)), "augmented");
    for workers in 1..=4 {
        for depth in workers + 1..=9 {
            for overlap in [false, true] {
                let which = format!("workers {workers}, depth {depth}, overlap {overlap}");
                let mut loader = build(workers, depth, overlap);
                let found = loader.epochs(3..6).map(|batch| batch.unwrap().to_vec());
                assert!(found.eq(expected.iter().cloned()), "{which}");
                let report = loader.report();
                assert_eq!((report.batches, report.loads), (33, 33), "one read a batch: {which}");
                assert!(!report.transform.is_zero(), "{which}");
                assert_eq!(report.settings.workers, if overlap { workers } else { 1 }, "{which}");
                // Also from the middle of an epoch, and after epochs that were left early.
                for taken in [0, 1, 4, 11] {
                    let epoch = loader.epoch(3).take(taken).map(|batch| batch.unwrap().to_vec());
                    assert!(epoch.eq(expected[..taken].iter().cloned()), "{which}, left after {taken}");
                    let checkpoint = loader.checkpoint();
                    let rest = loader.epochs_from(&checkpoint, 6).unwrap();
                    let rest = rest.map(|batch| batch.unwrap().to_vec());
                    assert!(rest.eq(expected[taken..].iter().cloned()), "{which}, resumed after {taken}");
                }
                loader.close().unwrap();
            }
        }
    }
}

#[test]
fn the_first_error_is_told_by_close() {
    // Each batch fails; the first one fails only after the others have.
    let meet = Arc::new(Barrier::new(4));
    let read = move |batch: &BatchIndices, _: &mut [u8]| {
        meet.wait();
        Err(format!("record {}", batch.first()).into())
    };
    let mut loader = Loader::builder(Reads(4, 1, read), in_order(4, 1)).workers(4).build().unwrap();
    let epoch = loader.epoch(0);
    until(|| epoch.report().loads >= 4);
    drop(epoch);
    let error = loader.close().unwrap_err();
    assert!(format!("{error:?}").ends_with("step 0: the batch could not be read: record 0"), "{error:?}");
}

#[test]
fn what_has_no_clone_is_refused() {
    let (_dir, paths) = files(&[64]);
    let builder = || Loader::builder(open(&paths), plan(64, 8));
    // It has no clone.
    let gated = common::Gated(std::sync::mpsc::channel().1);
    let error = Loader::builder(gated, plan(8, 2)).workers(2).build().unwrap_err();
    let expected = "option `workers`: wanted 1 thread: the data set has no `try_clone`, found 2";
    assert_eq!(error.to_string(), expected);

    struct Alone;
    impl RecordTransform for Alone {
        fn output(&self, record: &RecordType) -> Result<RecordType, BoxError> {
            Ok(record.clone())
        }
        fn apply(&mut self, records: &[u8], out: &mut [u8], _: &Context<'_>) -> Result<(), BoxError> {
            out.copy_from_slice(records);
            Ok(())
        }
        fn pays(&self) -> bool {
            true // but a caller that waits cannot have a clone
        }
    }
    let error = builder().transform(Alone).workers(2).build().unwrap_err();
    assert!(error.to_string().contains("the transform has no `try_clone`"), "{error}");
    // One worker does not need a second one.
    assert_eq!(builder().transform(Alone).build().unwrap().epoch(0).count(), 8);
    assert_eq!(builder().transform(Alone).workers(2).overlap(false).build().unwrap().epoch(0).count(), 8);
}

#[test]
fn a_worker_that_is_free_takes_the_next_batch() {
    for (workers, depth) in [(2, 3), (2, 4), (2, 8), (3, 6), (4, 8)] {
        // As many as there are other slots.
        let others = depth as u64 - 1;
        let (state, alone) = (Arc::new((Mutex::new(0), Condvar::new())), Arc::new(AtomicUsize::new(0)));
        let timed_out = alone.clone();
        // Reading the first record of an epoch takes as long as reading the next few.
        let read = move |batch: &BatchIndices, out: &mut [u8]| {
            let first = batch.first();
            let (read, changed) = &*state;
            let mut read = read.lock().unwrap();
            if first == 0 {
                // Not forever, in case the others are left to this thread.
                let limit = Duration::from_secs(10);
                let waited = changed.wait_timeout_while(read, limit, |read| *read < others).unwrap();
                timed_out.fetch_add(usize::from(waited.1.timed_out()), Ordering::Relaxed);
            } else {
                *read += u64::from(first <= others);
                changed.notify_all();
            }
            numbers(batch, out)
        };
        let builder = Loader::builder(Reads(32, 8, read), in_order(32, 1)).workers(workers).depth(depth);
        let mut loader = builder.build().unwrap();
        let found: Vec<u64> = loader.epoch(0).map(|batch| batch.unwrap().cast().unwrap()[0]).collect();
        assert!(found.into_iter().eq(0..32), "the plan's order");
        assert_eq!(alone.load(Ordering::Relaxed), 0, "{workers} workers, depth {depth}: others waited");
    }
}

/// Puts every other call off, if it is on.
#[derive(Clone)]
struct PutOff<T> {
    inner: T,
    on: bool,
    /// The call that was put off: the next one is the same.
    put_off: Option<(Vec<u64>, usize, Vec<u8>)>,
}

impl<T> PutOff<T> {
    fn new(inner: T, on: bool) -> Self {
        Self { inner, on, put_off: None }
    }

    fn now(&mut self, records: Vec<u64>, out: &[u8], input: &[u8]) -> Result<(), BoxError> {
        let call = (records, out.as_ptr().addr(), input.to_vec());
        match self.put_off.take() {
            Some(before) => assert_eq!(before, call, "the same call comes again"),
            None if self.on => {
                self.put_off = Some(call);
                return Err(io::Error::from(io::ErrorKind::WouldBlock).into());
            }
            None => {}
        }
        Ok(())
    }
}

/// 103 numbers.
fn numbers_put_off(on: bool) -> Box<dyn Dataset> {
    let mut put_off = PutOff::new((), on);
    let read = move |batch: &BatchIndices, out: &mut [u8]| {
        put_off.now(batch.runs().flatten().collect(), out, &[])?;
        numbers(batch, out)
    };
    Box::new(Reads(103, 8, read))
}

impl<T: RecordTransform + Clone + 'static> RecordTransform for PutOff<T> {
    fn output(&self, record: &RecordType) -> Result<RecordType, BoxError> {
        self.inner.output(record)
    }
    fn apply(&mut self, records: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError> {
        self.now(context.records().map(|record| record.number).collect(), out, records)?;
        self.inner.apply(records, out, context)
    }
    fn apply_one(&mut self, record: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<usize, BoxError> {
        self.now(context.records().map(|record| record.number).collect(), out, record)?;
        self.inner.apply_one(record, out, context)
    }
    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        Some(Box::new(self.clone()))
    }
}

/// Three fields: numbers that are changed twice, to records of varying length at last; files; numbers as they are.
fn put_off(paths: &[PathBuf], on: bool) -> LoaderBuilder {
    let data = vec![numbers_put_off(on), Box::new(open(paths)), numbers_put_off(on)];
    let shifted = per_record(16, |record, out, context| {
        out[..8].copy_from_slice(&context.seed.to_le_bytes());
        out[8..].copy_from_slice(record);
        Ok(())
    });
    let cut = map(16, |record, out, context| {
        let len = context.number as usize % 16;
        out[..len].copy_from_slice(&record[..len]);
        Ok(len)
    });
    let same = map(16, |record, out, _| {
        out[..record.len()].copy_from_slice(record);
        Ok(record.len())
    });
    let builder = Loader::builder(data, plan(103, 10)).transform(PutOff::new(shifted, on));
    builder.transform(PutOff::new(cut, on)).transform(same)
}

fn whole(batch: &Batch) -> (Vec<u8>, Option<Vec<usize>>) {
    let fields: Vec<u8> = (0..3).flat_map(|field| batch.field::<u8>(field).unwrap().to_vec()).collect();
    (fields, batch.offsets(0).map(<[usize]>::to_vec))
}

/// What two epochs deliver.
fn nothing_put_off(paths: &[PathBuf]) -> Vec<(Vec<u8>, Option<Vec<usize>>)> {
    let mut loader = put_off(paths, false).build().unwrap();
    let found: Vec<_> = loader.epochs(1..3).map(|batch| whole(&batch.unwrap())).collect();
    assert_eq!(found.len(), 22);
    found
}

#[test]
fn a_driver_goes_on_with_what_was_put_off() {
    let (_dir, paths) = files(&[40, 1, 62]);
    let expected = nothing_put_off(&paths);
    for workers in 1..=3 {
        let mut loader = put_off(&paths, true).workers(workers).driven().build().unwrap();
        let drive = |mut worker: Driven<_>| {
            thread::spawn(move || std::iter::from_fn(|| worker.next().then_some(())).count())
        };
        let drivers: Vec<_> = loader.driven().into_iter().map(drive).collect();
        assert_eq!((drivers.len(), loader.driven().len()), (workers, 0));
        for taken in [0, 1, 9, 22] {
            let found = loader.epochs(1..3).take(taken).map(|batch| whole(&batch.unwrap()));
            assert!(found.eq(expected[..taken].iter().cloned()), "{workers} workers, left after {taken}");
        }
        assert_eq!(loader.report().settings.workers, workers);
        loader.close().unwrap();
        let calls: usize = drivers.into_iter().map(|driver| driver.join().unwrap()).sum();
        // Two reads, a part and ten records of a batch are put off.
        assert!(calls >= 32 * 13 - 2 * 7, "{calls}");
    }
}

#[test]
fn a_loader_whose_drivers_nobody_has_is_refused() {
    for overlap in [true, false] {
        let builder = Loader::builder(numbers_put_off(false), plan(103, 10)).overlap(overlap).driven();
        let mut loader = builder.build().unwrap();
        assert_eq!(loader.epochs(3..3).count(), 0);
        let error = loader.epoch(2).next().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Load { at, .. } if at.epoch == 2), "{error:?}");
        assert!(format!("{error:?}").contains("`Loader::driven`"), "{error:?}");
        let mut worker = loader.driven().pop().unwrap();
        let mut batches = loader.into_epochs(2..3);
        let batches = driven(&mut batches, || _ = worker.try_next());
        assert_eq!(batches.filter(Result::is_ok).count(), 11);
    }
}

#[test]
fn without_overlap_the_caller_drives() {
    let (_dir, paths) = files(&[40, 1, 62]);
    let expected = nothing_put_off(&paths);
    let mut loader = put_off(&paths, true).overlap(false).driven().build().unwrap();
    let mut worker = loader.driven().pop().unwrap();
    let mut batches = loader.into_epochs(1..3);
    let found = driven(&mut batches, || while worker.try_next() == Poll::Ready(true) {});
    assert!(found.map(|batch| whole(&batch.unwrap())).eq(expected));
    // It fills one slot at a time, though two are free.
    assert_eq!((batches.report().loads, batches.report().settings.workers), (22, 1));
}

#[test]
fn a_thread_does_not_wait_for_what_was_put_off() {
    let (_dir, paths) = files(&[103]);
    let mut loader = put_off(&paths, true).build().unwrap();
    let error = loader.epoch(0).next().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Load { at, .. } if at.step == Some(0)), "{error:?}");
    assert!(format!("{error:?}").contains("block"), "{error:?}");
}

#[test]
fn a_panic_reaches_the_driver_and_is_named_to_the_caller() {
    for who in ["data set", "transform"] {
        let read = move |_: &BatchIndices, _: &mut [u8]| {
            assert!(who == "transform", "cursed");
            Ok(())
        };
        let transform = per_record(8, |_, _, _| panic!("cursed"));
        let builder = Loader::builder(Reads(8, 8, read), plan(8, 8)).transform(transform);
        let mut loader = builder.driven().build().unwrap();
        let mut worker = loader.driven().remove(0);
        let driver = thread::spawn(move || worker.next());
        let error = loader.epoch(0).next().unwrap().unwrap_err();
        assert_eq!(error.to_string(), format!("epoch 0, step 0: the {who} panicked: cursed"));
        assert!(driver.join().is_err(), "{who}");
    }
}

#[test]
fn a_slot_that_is_leaked_gets_new_memory() {
    let builder = Loader::builder(numbers_put_off(true), plan(103, 10)).driven().depth(2);
    let mut loader = builder.build().unwrap();
    let mut worker = loader.driven().pop().unwrap();
    let mut batches = loader.into_epochs(0..1);
    assert_eq!(worker.try_next(), Poll::Ready(true));
    assert_eq!(worker.leak_slot(), Some(()));
    drop(worker); // its fill fails
    let error = batches.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::Load { .. }), "{error}");
}

/// The memory that it loses has the fields that were read before.
#[test]
fn a_fill_whose_slot_is_leaked_begins_anew() {
    let mut puts_off = false;
    let second = move |batch: &BatchIndices, out: &mut [u8]| {
        puts_off = !puts_off;
        match puts_off {
            true => Err(io::Error::from(io::ErrorKind::WouldBlock).into()),
            false => numbers(batch, out),
        }
    };
    let data: Vec<Box<dyn Dataset>> = vec![Box::new(Reads(40, 8, numbers)), Box::new(Reads(40, 8, second))];
    // Records of varying length, whose offsets are no part of that memory.
    let same = map(8, |record, out, _| {
        out.copy_from_slice(record);
        Ok(8)
    });
    let builder = Loader::builder(data, plan(40, 10)).transform(same);
    let mut loader = builder.overlap(false).driven().build().unwrap();
    let mut worker = loader.driven().pop().unwrap();
    let mut batches = loader.into_epochs(0..1);
    let mut found = Vec::new();
    let leak = || {
        while worker.try_next() == Poll::Ready(true) {
            worker.leak_slot().unwrap();
        }
    };
    for batch in driven(&mut batches, leak).map(Result::unwrap) {
        assert_eq!(batch.field::<u64>(0).unwrap(), batch.field::<u64>(1).unwrap());
        assert!(batch.offsets(0).unwrap().iter().copied().eq((0..=80).step_by(8)));
        found.extend_from_slice(batch.field::<u64>(0).unwrap());
    }
    found.sort_unstable();
    assert!(found.into_iter().eq(0..40));
    assert!(batches.report().read.waiting.is_zero());
}
