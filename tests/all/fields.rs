//! Several data sets in one batch. Their records are matched by number.

#![allow(clippy::cast_possible_truncation)] // small numbers

use std::path::PathBuf;

use crate::common::{files, in_order, open, saved, written};
use tempfile::TempDir;
use twinbuf::mmap::{Cut, DType};
use twinbuf::transform::{Transform, per_record};
use twinbuf::{Error, LastBatch, Loader, Plan, Records, Shuffle};

const RECORDS: u64 = 61;

/// Images of three bytes, so the labels after them need a gap; and labels.
fn pair() -> (TempDir, PathBuf, PathBuf) {
    let (dir, images) = written("images.bin", (0..RECORDS).flat_map(|i| [i as u8, 100 + i as u8, 7]));
    let labels = dir.path().join("labels.bin");
    let numbers = (0..RECORDS).flat_map(|i| (i as i64 - 30).to_le_bytes());
    std::fs::write(&labels, numbers.collect::<Vec<u8>>()).unwrap();
    (dir, images, labels)
}

fn open_pair(images: &PathBuf, labels: &PathBuf) -> (Records, Records) {
    (Records::open([images], 3).unwrap(), Records::open_headerless([labels], DType::I64, Cut::Rows).unwrap())
}

fn plan(batch: u64) -> Plan {
    let plan = Plan::builder(RECORDS).batch(batch).shuffle(Shuffle::Full).seed(4).last_batch(LastBatch::Keep);
    plan.build().unwrap()
}

#[test]
fn records_are_matched_by_number_whatever_the_options() {
    let (_dir, images, labels) = pair();
    for (overlap, workers, depth) in [(false, 1, 1), (true, 1, 2), (true, 1, 3), (true, 3, 4)] {
        let builder = Loader::builder(open_pair(&images, &labels), plan(8));
        let mut loader = builder.overlap(overlap).workers(workers).depth(depth).build().unwrap();
        let mut seen = 0;
        for batch in loader.epochs(0..2) {
            let batch = batch.unwrap();
            let (pixels, classes) = batch.fields::<(u8, i64)>().unwrap();
            assert_eq!(pixels.len(), classes.len() * 3);
            let gap = &batch[pixels.len()..pixels.len().next_multiple_of(64)];
            assert!(gap.iter().all(|&byte| byte == 0), "what an earlier batch left: {gap:?}");
            for ((record, pixels), class) in batch.plan().runs().flatten().zip(pixels.chunks(3)).zip(classes)
            {
                let wanted = [record as u8, 100 + record as u8, 7];
                assert_eq!((pixels, *class), (&wanted[..], record as i64 - 30));
                seen += 1;
            }
            let shapes = [0, 1].map(|field| batch.field_type(field).unwrap().shape().to_vec());
            assert_eq!(shapes, [vec![3], vec![]]);
        }
        assert_eq!(seen, 2 * RECORDS);
        let report = loader.report();
        assert!(report.bytes >= 2 * RECORDS * 11, "{report:?}");
        loader.close().unwrap();
    }
}

#[test]
fn each_field_has_a_transform_of_its_own() {
    let (_dir, images, labels) = pair();
    let to_f32 = Transform::new(DType::U8, 1).unwrap();
    let builder = Loader::builder(open_pair(&images, &labels), plan(8));
    let to_i32 = per_record(4, |label, out, context| {
        let label = i64::from_le_bytes(label.try_into()?);
        assert_eq!(label, context.number as i64 - 30);
        out.copy_from_slice(&i32::try_from(label)?.to_le_bytes());
        Ok(())
    });
    let mut loader = builder.transform(to_f32).transform_field(1, to_i32).build().unwrap();
    for batch in loader.epoch(3) {
        let batch = batch.unwrap();
        let (pixels, classes) = batch.fields::<(f32, i32)>().unwrap();
        for ((record, pixels), class) in batch.plan().runs().flatten().zip(pixels.chunks(3)).zip(classes) {
            let record = record as f32;
            assert_eq!((pixels, *class as f32), (&[record, 100.0 + record, 7.0][..], record - 30.0));
        }
    }
}

#[test]
fn fields_that_do_not_match_are_refused_and_named() {
    let (_dir, images, labels) = pair();
    let (_short_dir, short) = files(&[RECORDS - 1]);
    let refused = |error: Result<Loader, Error>| error.unwrap_err().to_string();
    let (pixels, classes) = open_pair(&images, &labels);
    let error = refused(Loader::builder((pixels, classes, open(&short)), plan(8)).build());
    let (images_at, short_at) = (images.display(), short[0].display());
    let wanted = "option `dataset`: wanted fields with the same number of records";
    assert_eq!(error, format!("{wanted}, found 61 in {images_at} and 60 in {short_at}"));
    // A different number of windows.
    let windows = Cut::Windows { rows: 4, stride: 4 };
    let inputs = Records::open_headerless([&labels], DType::I64, windows).unwrap();
    let error = refused(Loader::builder((inputs, open_pair(&images, &labels).0), plan(8)).build());
    assert!(error.contains("found 15 in ") && error.contains(" and 61 in "), "{error}");
}

#[test]
fn other_types_and_other_numbers_of_fields_are_refused() {
    let (_dir, images, labels) = pair();
    let mut loader = Loader::builder(open_pair(&images, &labels), plan(8)).build().unwrap();
    let batch = loader.epoch(0).next().unwrap().unwrap();
    let refused = [
        (batch.fields::<(u8, f64)>().map(drop), "1: wanted i64 [], found f64"),
        (batch.fields::<(u8, i32)>().map(drop), "1: wanted i64 [], found i32"),
        (batch.fields::<(u8, i64, u8)>().map(drop), "0: wanted types for 2 fields, found 3"),
        (batch.cast::<u8>().map(drop), "0: wanted types for 2 fields, found 1"),
        (batch.field_type(2).map(drop), "2: wanted a field below 2, found 2"),
        (batch.field::<[u8; 5]>(0).map(drop), "0: wanted a whole number of [u8; 5], found 24 bytes"),
    ];
    for (found, wanted) in refused {
        assert_eq!(found.unwrap_err().to_string(), format!("epoch 0, step 0: field {wanted}"));
    }
    assert_eq!(batch.field::<u8>(1).unwrap().len(), 64, "anything may be looked at as bytes");
    assert_eq!(batch.field::<[u8; 3]>(0).unwrap().len(), 8);
}

#[test]
fn pages_are_asked_for_in_every_field() {
    let (_dir, paths) = files(&[RECORDS]);
    let hinted = |loader: &mut Loader| {
        assert_eq!(loader.epoch(0).count(), 8);
        loader.report().reading
    };
    let one = hinted(&mut Loader::builder(open(&paths), plan(8)).build().unwrap());
    let two = hinted(&mut Loader::builder((open(&paths), open(&paths)), plan(8)).build().unwrap());
    assert!(one.hints > 0 || cfg!(not(target_os = "linux")), "{one:?}");
    assert_eq!((two.bytes, two.hinted), (2 * one.bytes, 2 * one.hinted));
}

#[test]
fn a_checkpoint_belongs_to_all_fields() {
    let (_dir, images, labels) = pair();
    let build = |fields: (Records, Records)| Loader::builder(fields, plan(8)).build().unwrap();
    let mut loader = build(open_pair(&images, &labels));
    assert_eq!(loader.epoch(0).take(3).count(), 3);
    let checkpoint = saved(&loader.checkpoint());
    let mut again = build(open_pair(&images, &labels));
    let batch = again.epochs_from(&checkpoint, 1).unwrap().next().unwrap().unwrap();
    assert_eq!(batch.step(), 3);
    // Different labels, or the same files in swapped order.
    let mut bytes = std::fs::read(&labels).unwrap();
    bytes[0] ^= 1;
    let other = labels.with_file_name("other.bin");
    std::fs::write(&other, bytes).unwrap();
    let mut different = build(open_pair(&images, &other));
    let (pixels, classes) = open_pair(&images, &labels);
    let mut turned = build((classes, pixels));
    let (pixels, _) = open_pair(&images, &labels);
    let mut alone = Loader::builder(pixels, plan(8)).build().unwrap();
    let prints = "data set fingerprint";
    for (loader, field) in [(&mut different, prints), (&mut turned, prints), (&mut alone, "record size")] {
        let error = loader.epochs_from(&checkpoint, 1).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint { field: found, .. } if *found == field), "{error}");
    }
}

#[test]
fn numbers_are_what_the_files_hold() {
    let (_dir, path) = written("data.bin", (0..64).flat_map(|i| f64::from(i).to_le_bytes()));
    let first = |dtype| {
        let cut = Cut::Windows { rows: 4, stride: 4 };
        let data = Records::open_headerless([&path], dtype, cut).unwrap();
        let plan = in_order(data.len(), 2);
        Loader::builder(data, plan).build().unwrap().epoch(0).next().unwrap().unwrap()
    };
    let batch = first(DType::F64);
    assert_eq!(batch.cast::<f64>().unwrap(), [0., 1., 2., 3., 4., 5., 6., 7.]);
    assert_eq!(batch.cast::<[f64; 4]>().unwrap()[1], [4., 5., 6., 7.]);
    assert_eq!(batch.cast::<u8>().unwrap().len(), 64, "anything may be looked at as bytes");
    let refused = "epoch 0, step 0: field 0: wanted f64 [4], found";
    assert_eq!(batch.cast::<f32>().unwrap_err().to_string(), format!("{refused} f32"));
    assert_eq!(batch.cast::<[f32; 2]>().unwrap_err().to_string(), format!("{refused} [f32; 2]"));
    assert!(batch.cast::<[i64; 2]>().is_err());
    assert!(batch.field::<[[u64; 2]; 2]>(0).is_err());
    let mut batch = first(DType::U8);
    assert!(batch.cast::<f32>().is_err(), "bytes that the program declared to be numbers of 8 bits");
    assert!(batch.cast_mut::<u16>().is_err());
    assert_eq!(batch.cast_mut::<u8>().unwrap().len(), 8);
    let batch = first(DType::Bf16);
    assert_eq!(batch.cast::<u16>().unwrap().len(), 8, "the bits of halves");
    assert!(batch.cast::<i16>().is_err());
    let batch = first(DType::Bool);
    assert!(batch.cast::<i8>().is_err() && batch.cast::<u8>().is_ok());
    // Opened without a type.
    let data = Records::open([&path], 32).unwrap();
    let plan = in_order(data.len(), 2);
    let batch = Loader::builder(data, plan).build().unwrap().epoch(0).next().unwrap().unwrap();
    assert_eq!(batch.cast::<f64>().unwrap()[7], 7.0);
    assert_eq!(batch.cast::<[i64; 2]>().unwrap().len(), 4);
    assert_eq!(batch.field_type(0).unwrap().shape(), [32]);
}
