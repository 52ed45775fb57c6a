//! An error while reading arrives once, in order, with its place. Then the epoch is over.

use std::fs::OpenOptions;
use std::io;
use std::sync::Arc;

use crate::common::{RECORD, Reads, at, files, in_order, open, plan, until, yield_often};
use twinbuf::mmap::DType;
use twinbuf::write::Writer;
use twinbuf::{BatchIndices, BoxError, Checkpoint, Dataset, Error, Loader, Plan};

const STEPS: u64 = 8;
const BATCH: u64 = 4;
const BATCH_BYTES: usize = 4 * RECORD;

fn sequential() -> Plan {
    in_order(STEPS * BATCH, BATCH)
}

/// Reads a byte less than a batch has. Its records have numbers of 4 bytes along this axis, if any.
struct Short(Option<usize>);

impl Dataset for Short {
    fn records(&self) -> u64 {
        STEPS * BATCH
    }
    fn record_bytes(&self) -> usize {
        RECORD
    }
    fn element(&self) -> Option<(DType, Vec<usize>)> {
        self.0.map(|axis| (DType::F32, vec![axis]))
    }
    fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        Ok(out.len() - 1)
    }
}

/// `promises` has errors at every step.
#[test]
fn a_short_read_is_an_error_with_both_lengths() {
    let mut loader = Loader::builder(Short(None), sequential()).build().unwrap();
    for epoch in 0..2 {
        let error = loader.epoch(epoch).next().unwrap().unwrap_err();
        let Error::Length { at: place, wanted, found } = error else { panic!("{error:?}") };
        assert_eq!((place, wanted, found), (at(epoch, 0), BATCH_BYTES, BATCH_BYTES - 1));
    }
}

#[test]
fn an_element_and_shape_that_do_not_make_the_record_are_refused() {
    assert!(Loader::builder(Short(Some(RECORD / 4)), sequential()).build().is_ok());
    for axis in [0, 1, RECORD / 4 - 1, RECORD, usize::MAX] {
        let error = Loader::builder(Short(Some(axis)), sequential()).build().unwrap_err();
        assert!(matches!(error, Error::Option { option: "dataset", .. }), "{axis}: {error:?}");
    }
}

#[test]
fn a_file_truncated_in_mid_epoch_is_an_error_with_path_and_offset() {
    for overlap in [false, true] {
        for hints in [false, true] {
            let (_dir, paths) = files(&[STEPS * BATCH]);
            let builder = Loader::builder(open(&paths), sequential()).depth(3);
            let mut loader = builder.overlap(overlap).hints(hints).build().unwrap();
            let mut epoch = loader.epoch(0);
            drop(epoch.next().unwrap().unwrap());
            // In the middle of step 5. No reader has reached it: at most three slots are read ahead.
            let cut = 5 * BATCH * RECORD as u64 + 700;
            OpenOptions::new().write(true).open(&paths[0]).unwrap().set_len(cut).unwrap();
            let mut found: Vec<_> = epoch.map(|batch| batch.map(|batch| batch.step())).collect();
            let error = found.pop().unwrap().unwrap_err();
            assert_eq!(found.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [1, 2, 3, 4]);
            let Error::Load { at: failed, source } = error else { panic!("{error:?}") };
            assert_eq!(failed, at(0, 5));
            let Some(twinbuf::mmap::Error::Truncated { path, offset, wanted, found }) = source.downcast_ref()
            else {
                panic!("{source:?}")
            };
            assert_eq!(*path, paths[0]);
            assert_eq!(*offset, cut, "the first byte that is missing");
            assert_eq!((*wanted, *found), (BATCH_BYTES as u64, 700));
        }
    }
}

#[test]
fn a_caller_that_stops_receiving_stops_the_reading_and_can_leave() {
    for depth in 2..=4 {
        for keep in [false, true] {
            let alive = Arc::new(());
            let kept_alive = alive.clone();
            let read = move |_: &BatchIndices, _: &mut [u8]| {
                let _ = &kept_alive;
                Ok(())
            };
            let data = Reads(STEPS * BATCH, RECORD, read);
            let mut loader = Loader::builder(data, sequential()).depth(depth).build().unwrap();
            let mut epoch = loader.epoch(0);
            let first = epoch.next().unwrap().unwrap();
            let kept = keep.then_some(first);
            // As many as there are slots, plus one if the caller's slot is free again.
            let most = depth as u64 + u64::from(!keep);
            until(|| epoch.report().loads >= most);
            yield_often();
            assert_eq!(epoch.report().loads, most, "no further than the slots, depth {depth}, kept {keep}");
            drop((kept, epoch));
            drop(loader);
            assert_eq!(Arc::strong_count(&alive), 1, "the thread is joined, depth {depth}, kept {keep}");
        }
    }
}

#[test]
fn an_error_is_one_sentence_however_it_is_printed() {
    let (_dir, paths) = files(&[8]);
    let mut loader = Loader::builder(open(&paths), in_order(8, 2)).name("train").build().unwrap();
    OpenOptions::new().write(true).open(&paths[0]).unwrap().set_len(3 * RECORD as u64).unwrap();
    let error = loader.epoch(0).find_map(Result::err).unwrap();
    let wanted = format!(
        "train: epoch 0, step 1: the batch could not be read: {:?}: truncated while open, byte 1536 is missing: wanted \
         1024 bytes, found 512: do not write to data files in use",
        paths[0]
    );
    // A reporter prints each cause, once.
    let mut lines = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        lines += &format!(": {error}");
        cause = error.source();
    }
    assert_eq!(lines, wanted);
    assert_eq!(error.to_string(), "train: epoch 0, step 1: the batch could not be read");
    // The output of `main`.
    let boxed: twinbuf::BoxError = error.into();
    assert_eq!(format!("{boxed:?}"), wanted);
    let missing = paths[0].with_file_name("missing.bin");
    let error = twinbuf::Records::open([&missing], 8).unwrap_err();
    assert_eq!(format!("{error:?}"), format!("{missing:?}: no such file"));
}

#[test]
fn the_systems_error_is_among_the_causes() {
    let (dir, paths) = files(&[8]);
    let missing = dir.path().join("no such folder").join("x");
    let errors = [
        Checkpoint::start().save(&missing).unwrap_err(),
        Loader::builder(open(&paths), plan(8, 2)).trace(&missing).build().unwrap_err(),
        Writer::raw(&missing, 8).build().unwrap_err(),
    ];
    for error in errors {
        let first = &error as &(dyn std::error::Error + 'static);
        let causes = std::iter::successors(Some(first), |cause| cause.source());
        let found = causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
        assert!(found.eq([io::ErrorKind::NotFound]), "{error:?}");
    }
}
