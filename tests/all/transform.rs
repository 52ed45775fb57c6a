//! Records are transformed on their way into the slot: the same numbers in every configuration, faults in order.

#![allow(clippy::cast_possible_truncation)] // numbers below 65536

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::common::{RECORD, Reads, batches, files, in_order, modes, nothing, open, written};
use twinbuf::mmap::{Cut, DType};
use twinbuf::transform::{Convert, RecordTransform, RecordType, Transform, per_record};
use twinbuf::{BoxError, Error, Loader, Plan, Records, Shuffle};

/// With a height of 1, the width alone has as many pixels as a picture.
#[test]
fn planes_of_a_height_of_one() {
    let planar = Transform::new(DType::U8, 4).unwrap().planar(5).unwrap();
    for (shape, wanted) in [
        (&[1, 5, 4][..], &[4, 1, 5][..]),
        (&[2, 1, 5, 4], &[2, 4, 1, 5]),
        (&[2, 5, 1, 4], &[2, 4, 5, 1]),
        (&[2, 5, 4], &[2, 4, 5]),
        (&[5, 4], &[4, 5]),
        (&[40], &[2, 4, 5]),
    ] {
        let record = RecordType::new(DType::U8, shape).unwrap();
        assert_eq!(planar.output(&record).unwrap().shape(), wanted, "{shape:?}");
    }
}

#[test]
fn parts_meet_wherever_the_records_end() {
    // A part is 256 KiB. Tests records larger than that, of exactly that size, and of sizes that do not divide it.
    for (record_bytes, records, batch) in
        [(300 << 10, 5, 2), (256 << 10, 5, 5), (100_002, 97, 90), (6, 200_000, 99_999)]
    {
        let tokens: Vec<u16> =
            (0..record_bytes * records / 2).map(|i| ((i * 7 + i / 65_536) % 65_536) as u16).collect();
        let (_dir, path) = written("tokens.bin", tokens.iter().flat_map(|token| token.to_le_bytes()));
        let plan =
            Plan::builder(records as u64).batch(batch).last_batch(twinbuf::LastBatch::Keep).build().unwrap();
        let data = Arc::new(Records::open([&path], record_bytes).unwrap());
        for mode in modes(&data) {
            let builder = Loader::builder(data.clone(), plan.clone()).read_mode(mode);
            let mut loader = builder.transform(Convert::U16ToU32).depth(3).build().unwrap();
            let found = batches(&mut loader, 0).concat();
            let wanted = tokens.iter().flat_map(|&token| u32::from(token).to_le_bytes());
            assert!(found.into_iter().eq(wanted), "{mode:?}, {record_bytes} bytes");
        }
    }
}

/// `promises` has the faults of a data set, at every step.
#[test]
fn a_fault_arrives_in_its_place_and_once() {
    let (_dir, paths) = files(&[24]);
    for (panics, overlap) in [(false, false), (false, true), (true, false), (true, true)] {
        let bad = per_record(8, move |record, out, _| {
            let number = u64::from_le_bytes(record[..8].try_into()?);
            assert!(number != 10 || !panics, "record 10 is cursed");
            out.copy_from_slice(&record[..8]);
            if number == 10 { Err(BoxError::from("record 10 is bad")) } else { Ok(()) }
        });
        let builder = Loader::builder(open(&paths), in_order(24, 4)).overlap(overlap).transform(bad);
        let mut loader = builder.build().unwrap();
        for epoch in 0..2 {
            let mut found: Vec<_> = loader.epoch(epoch).map(|batch| batch.map(|b| b.step())).collect();
            let error = format!("{:?}", found.pop().unwrap().unwrap_err());
            assert!(found.into_iter().map(Result::unwrap).eq(0..2));
            let what = if panics {
                "the transform panicked: record 10 is cursed"
            } else {
                "the records could not be transformed: record 10 is bad"
            };
            assert_eq!(error, format!("epoch {epoch}, step 2: {what}"));
        }
        loader.close().unwrap();
    }
}

const CANNOT: &str = "option `transform`: the data set's records cannot be transformed:";

#[test]
fn a_transform_that_cannot_work_is_refused_when_the_loader_is_built() {
    fn refuse(size: usize, transform: impl RecordTransform + 'static) -> String {
        let built = Loader::builder(Reads(1, size, nothing), in_order(1, 1)).transform(transform).build();
        let error = built.unwrap_err();
        assert!(matches!(error, Error::Transform { at: None, .. }), "{size}: {error:?}");
        format!("{error:?}")
    }
    let nothing_left = refuse(RECORD, per_record(0, |_, _, _| Ok(())));
    let wanted = "wanted records of at least 1 byte, found 0 after the transform";
    assert_eq!(nothing_left, format!("{CANNOT} {wanted}"));
    let pictures = refuse(RECORD, Transform::new(DType::U8, 3).unwrap());
    let wanted = format!("{CANNOT} the source is not whole: wanted a multiple of 3");
    assert!(pictures.starts_with(&wanted), "{pictures}");
    for size in [usize::MAX, usize::MAX / 2, usize::MAX / 4 + 1] {
        refuse(size, Transform::new(DType::U8, 1).unwrap());
    }
    let four = per_record(4, |_, _, _| Ok(()));
    let mut loader = Loader::builder(Reads(1, 0, nothing), in_order(1, 1)).transform(four).build().unwrap();
    let error = loader.epoch(0).next().unwrap().unwrap_err();
    assert!(matches!(error, Error::Transform { at: Some(_), .. }), "{error}");
}

/// The number of each record and its seed. `workers` resumes with such a transform.
fn augment() -> impl RecordTransform {
    per_record(16, |record, out, context| {
        assert_eq!(record[..8], context.number.to_le_bytes(), "the context is that of the record");
        out[..8].copy_from_slice(&record[..8]);
        out[8..].copy_from_slice(&context.seed.to_le_bytes());
        Ok(())
    })
}

#[test]
fn a_random_augmentation_is_the_same_on_any_rank() {
    let (_dir, paths) = files(&[50]);
    let build = |seed, rank, world| {
        let plan = Plan::builder(50).batch(10 / world).shuffle(Shuffle::Full).seed(seed);
        let plan = plan.rank(rank, world).build().unwrap();
        Loader::builder(open(&paths), plan).transform(augment()).build().unwrap()
    };
    let all = |batches: &[Vec<u8>]| -> HashMap<u64, u64> {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        let records = batches.iter().flat_map(|batch| batch.chunks_exact(16));
        records.map(|record| (word(&record[..8]), word(&record[8..]))).collect()
    };
    let mut whole = build(1, 0, 1);
    let [seeds, next] = [0, 1].map(|epoch| all(&batches(&mut whole, epoch)));
    assert_eq!(seeds.len(), 50);
    assert_eq!(seeds.values().collect::<HashSet<_>>().len(), 50, "each record its own");
    assert!(seeds.iter().all(|(record, seed)| next[record] != *seed), "another one in the next epoch");
    let other = all(&batches(&mut build(2, 0, 1), 0));
    assert!(seeds.iter().all(|(record, seed)| other[record] != *seed), "and with another seed");
    for rank in 0..2 {
        let part = all(&batches(&mut build(1, rank, 2), 0));
        assert!(part.len() == 25 && part.iter().all(|(record, seed)| seeds[record] == *seed), "rank {rank}");
    }
}

#[test]
fn transforms_follow_each_other_and_keep_the_shape() {
    let numbers: Vec<u8> = (0..6 * 2 * 3 * 2).collect();
    let file = twinbuf_testing::npy("|u1", &[6, 2, 3, 2], numbers.iter().copied());
    let (_dir, path) = written("pictures.npy", file);
    let data = Arc::new(Records::open_npy([&path], Cut::Rows).unwrap());
    let floats = || Transform::new(DType::U8, 2).unwrap().normalise(&[1.0, 10.0], &[0.0, 0.5]).unwrap();
    for (overlap, workers) in [(false, 1), (true, 1), (true, 2)] {
        let build = || Loader::builder(data.clone(), in_order(6, 2)).overlap(overlap).workers(workers);
        let planar = build().transform(floats().planar(6).unwrap());
        let mut loader = planar.transform(Convert::F32ToBf16).build().unwrap();
        let mut found = Vec::new();
        for batch in loader.epoch(0).map(Result::unwrap) {
            assert_eq!(batch.field_type(0).unwrap().shape(), [2, 2, 3], "channels first");
            found.extend_from_slice(batch.cast::<u16>().unwrap());
        }
        let picture = |picture: &[u8]| -> Vec<u16> {
            let channel = |c: usize| picture.iter().skip(c).step_by(2);
            let first = channel(0).map(|&x| f32::from(x));
            let second = channel(1).map(|&x| f32::from(x) * 10.0 + 0.5);
            first.chain(second).map(|x| (x.to_bits() >> 16) as u16).collect()
        };
        let expected: Vec<u16> = numbers.chunks_exact(12).flat_map(picture).collect();
        let ulp = |(a, b): (&u16, &u16)| a.abs_diff(*b) <= 1; // rounded, where the other one is truncated
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(&expected).all(ulp), "{found:?}, {expected:?}");
        let mut plain = build().transform(floats()).build().unwrap();
        for (batch, pictures) in plain.epoch(0).zip(numbers.chunks_exact(24)) {
            let mut batch = batch.unwrap();
            assert_eq!(batch.field_type(0).unwrap().shape(), [2, 3, 2]);
            assert_eq!(batch.as_ptr().align_offset(64), 0);
            let pixel = |pixel: &[u8]| [f32::from(pixel[0]), f32::from(pixel[1]) * 10.0 + 0.5];
            let expected: Vec<f32> = pictures.chunks_exact(2).flat_map(pixel).collect();
            assert_eq!(batch.cast::<f32>().unwrap(), expected);
            batch.cast_mut::<f32>().unwrap().fill(0.0); // nobody else uses it
        }
        assert_eq!(plain.report().bytes, 72 * 4);
    }
}

#[test]
fn records_of_another_type_are_refused() {
    let (_dir, path) = written("numbers.bin", [0; 96]);
    let data = |dtype| Records::open_headerless([&path], dtype, Cut::Windows { rows: 3, stride: 3 }).unwrap();
    fn built(data: Records, transform: impl RecordTransform + 'static) -> Result<(), String> {
        let plan = in_order(data.len(), 1);
        let loader = Loader::builder(data, plan).transform(transform).build();
        loader.map(drop).map_err(|error| format!("{error:?}"))
    }
    let error = built(data(DType::F32), Convert::U16ToU32).unwrap_err();
    assert_eq!(error, format!("{CANNOT} wanted records of u16, found f32 [3]"));
    built(data(DType::U16), Convert::U16ToU32).unwrap();
    let error = built(data(DType::U16), Transform::new(DType::I16, 3).unwrap()).unwrap_err();
    assert_eq!(error, format!("{CANNOT} wanted records of i16, found u16 [3]"));
    let declared = |shape: &[usize]| per_record(8, |_, _, _| Ok(())).of(DType::F32, shape);
    let error = built(data(DType::F32), declared(&[3])).unwrap_err();
    assert_eq!(error, format!("{CANNOT} wanted 12 bytes for f32 [3], found 8"));
    built(data(DType::F32), declared(&[2, 1])).unwrap();
    assert!(built(data(DType::F32), declared(&[usize::MAX, 2])).unwrap_err().contains("fits the memory"));
}
