//! Records are transformed on their way into the slot: the same numbers in every configuration, faults in order.

#![allow(clippy::cast_possible_truncation)] // numbers below 65536

mod common;

use std::sync::Arc;

use common::{Fault, Faulty, RECORD, files, open, open_direct, plan, record};
use twinbuf::{
    BatchPlan, BoxError, DType, Dataset, Error, Loader, Numbers, Plan, RecordTransform, Records, Transform,
    per_record,
};

#[test]
fn the_same_numbers_in_every_configuration() {
    let (_dir, paths) = files(&[40, 63]);
    let data = open(&paths);
    let (scale, shift) = ([0.5, 2.0], [-1.0, 3.0]);
    let transform = || Transform::new(DType::U8, 2).unwrap().normalise(&scale, &shift).unwrap();
    let plan = plan(103, 10);
    let expected: Vec<Vec<f32>> = (0..plan.steps())
        .map(|step| {
            let records = plan.batch(1, step).unwrap().runs().flatten().flat_map(record);
            records
                .zip([0, 1].into_iter().cycle())
                .map(|(x, c): (u8, usize)| f32::from(x) * scale[c] + shift[c])
                .collect()
        })
        .collect();
    for overlap in [false, true] {
        for depth in 1..=3 {
            let loader = Loader::builder(data.clone(), plan)
                .overlap(overlap)
                .host_depth(depth)
                .transform(transform())
                .build()
                .unwrap();
            for (step, batch) in loader.epoch(1).enumerate() {
                let mut batch = batch.unwrap();
                assert_eq!(batch.as_ptr().align_offset(64), 0);
                assert_eq!(
                    batch.numbers::<f32>().unwrap(),
                    expected[step],
                    "overlap {overlap}, depth {depth}"
                );
                batch.numbers_mut::<f32>().unwrap().fill(0.0); // nobody else's
            }
            let report = loader.report();
            assert_eq!(report.reads, 11, "one read a batch");
            assert_eq!(report.bytes, 103 * RECORD as u64 * 4);
            assert!(!report.transform.is_zero());
        }
    }
}

#[test]
fn parts_meet_wherever_the_records_end() {
    // A part is 256 KiB, or 4 MiB past the page cache: records of more than that, of just that, and of sizes that
    // do not divide it.
    for (record_bytes, records, batch) in
        [(300 << 10, 5, 2), (256 << 10, 5, 5), (100_002, 97, 90), (6, 200_000, 99_999)]
    {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("tokens.bin");
        let tokens: Vec<u16> =
            (0..record_bytes * records / 2).map(|i| ((i * 7 + i / 65_536) % 65_536) as u16).collect();
        std::fs::write(&path, tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>())
            .unwrap();
        let plan = Plan::builder(records as u64).batch(batch).tail(twinbuf::Tail::Keep).build().unwrap();
        let data = Some(Arc::new(Records::open([&path], record_bytes).unwrap()));
        for data in [data, open_direct(&[path], record_bytes)].into_iter().flatten() {
            let mode = data.read_mode();
            let loader = Loader::builder(data, plan).transform(Numbers::U16ToU32).build().unwrap();
            let mut found = Vec::new();
            for batch in loader.epoch(0) {
                found.extend_from_slice(batch.unwrap().numbers::<u32>().unwrap());
            }
            assert!(
                found.iter().copied().eq(tokens.iter().map(|&token| u32::from(token))),
                "{mode:?}, {record_bytes} bytes"
            );
        }
    }
}

/// Fails or panics at the record whose number it is told.
fn cursed(at: u64, panics: bool) -> impl RecordTransform {
    per_record(8, move |record, out| {
        let number = u64::from_le_bytes(record[..8].try_into()?);
        if number == at {
            assert!(!panics, "record {number} is cursed");
            return Err(BoxError::from(format!("record {number} is bad")));
        }
        out.copy_from_slice(&record[..8]);
        Ok(())
    })
}

#[test]
fn every_fault_at_every_step_arrives_in_order_and_once() {
    const STEPS: u64 = 6;
    let (_dir, paths) = files(&[STEPS * 4]);
    let plan = Plan::builder(STEPS * 4).batch(4).build().unwrap();
    for at in 0..STEPS {
        for panics in [false, true] {
            for (overlap, depth) in [(false, 1), (true, 1), (true, 2), (true, 3)] {
                let loader = Loader::builder(open(&paths), plan)
                    .overlap(overlap)
                    .host_depth(depth)
                    .transform(cursed(at * 4 + 2, panics))
                    .build()
                    .unwrap();
                for epoch in 0..2 {
                    let mut found: Vec<_> =
                        loader.epoch(epoch).map(|batch| batch.map(|b| b.step())).collect();
                    let error = found.pop().unwrap().unwrap_err();
                    assert!(found.into_iter().map(Result::unwrap).eq(0..at));
                    let wanted = if panics {
                        format!(
                            "epoch {epoch}, step {at}: the transform panicked: record {} is cursed",
                            at * 4 + 2
                        )
                    } else {
                        format!("epoch {epoch}, step {at}: the transform: record {} is bad", at * 4 + 2)
                    };
                    assert_eq!(error.to_string(), wanted);
                }
                loader.close().unwrap();
            }
        }
    }
}

#[test]
fn a_transform_that_cannot_work_is_refused_when_the_loader_is_built() {
    let plan = Plan::builder(8).batch(2).build().unwrap();
    let refuse = |transform: Box<dyn RecordTransform>| {
        struct Boxed(Box<dyn RecordTransform>);
        impl RecordTransform for Boxed {
            fn out_bytes(&self, record_bytes: usize) -> Result<usize, BoxError> {
                self.0.out_bytes(record_bytes)
            }
            fn apply(&mut self, records: &[u8], out: &mut [u8]) -> Result<(), BoxError> {
                self.0.apply(records, out)
            }
        }
        let data = Faulty::new(8, Fault::None, 0).0;
        let error = Loader::builder(data, plan).transform(Boxed(transform)).build().unwrap_err();
        assert!(matches!(error, Error::Transform { place: None, .. }), "{error:?}");
        error.to_string()
    };
    let nothing = refuse(Box::new(per_record(0, |_, _| Ok(()))));
    assert_eq!(nothing, "option `transform`: wanted records of at least 1 byte, found 0 after the transform");
    let pictures = refuse(Box::new(Transform::new(DType::U8, 3).unwrap()));
    assert!(
        pictures.starts_with("option `transform`: the source is not whole: wanted a multiple of 3"),
        "{pictures}"
    );
}

#[test]
fn a_batch_that_is_no_whole_number_of_numbers_says_so() {
    let (_dir, paths) = files(&[8]);
    let first = |n: usize| {
        let transform = per_record(n, move |record: &[u8], out: &mut [u8]| {
            out.copy_from_slice(&record[..n]);
            Ok(())
        });
        let loader = Loader::builder(open(&paths), plan(8, 1)).transform(transform).build().unwrap();
        let batch = loader.epoch(0).next().unwrap().unwrap();
        batch.numbers::<f32>().map(<[f32]>::len).map_err(|error| error.to_string())
    };
    assert_eq!(first(12), Ok(3));
    let error = "epoch 0, step 0: wanted the batch as whole numbers of type f32, found 10 bytes";
    assert_eq!(first(10).unwrap_err(), error);
}

/// Records of a size that no memory has, or of none.
struct Sized(usize);

impl Dataset for Sized {
    fn records(&self) -> u64 {
        1
    }

    fn record_bytes(&self) -> usize {
        self.0
    }

    fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> {
        Ok(out.len())
    }
}

#[test]
fn records_of_any_size_are_transformed_or_refused() {
    let one = Plan::builder(1).build().unwrap();
    for size in [usize::MAX, usize::MAX / 2, usize::MAX / 4 + 1] {
        let floats = Transform::new(DType::U8, 1).unwrap();
        let error = Loader::builder(Sized(size), one).transform(floats).build().unwrap_err();
        assert!(matches!(error, Error::Transform { place: None, .. }), "{size}: {error}");
    }
    let nothing = per_record(4, |_, _| Ok(()));
    let loader = Loader::builder(Sized(0), one).transform(nothing).build().unwrap();
    let error = loader.epoch(0).next().unwrap().unwrap_err();
    assert!(matches!(error, Error::Transform { place: Some((0, 0)), .. }), "{error}");
}
