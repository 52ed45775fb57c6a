//! Records of any length in a loader: every byte is the file's, in every order, on several ranks, resumed at every
//! step, with overlap on and off; transforms change the length of records; what does not fit is a typed error.

#![allow(clippy::cast_possible_truncation)] // small numbers

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::{self, modes};
use tempfile::TempDir;
use twinbuf::mmap::{DType, RaggedRecords, ReadMode, files};
use twinbuf::transform::{Convert, map, per_record};
use twinbuf::{
    Batch, BatchIndices, BoxError, Dataset, Error, LastBatch, Loader, Plan, Records, Shuffle, mmap,
};
use twinbuf_testing::offsets;

const RECORDS: u64 = 97;

/// The bytes of record `i`, none for each seventh.
fn record(i: u64) -> Vec<u8> {
    let len = if i % 7 == 3 { 0 } else { i * 37 % 501 * 2 };
    (0..len).map(|at| (at * 13 + i * 31) as u8).collect()
}

/// Two files of these records.
fn data() -> (TempDir, Arc<RaggedRecords>) {
    let dir = common::folder();
    let pairs = [0..40, 40..RECORDS].map(|records| {
        let [data, index] = ["bin", "idx.npy"].map(|end| dir.path().join(format!("{}.{end}", records.start)));
        let bytes: Vec<u8> = records.clone().flat_map(record).collect();
        let lengths = records.map(|i| record(i).len() as u64);
        std::fs::write(&index, offsets(bytes.len() as u64, lengths)).unwrap();
        std::fs::write(&data, bytes).unwrap();
        (data, index)
    });
    (dir, Arc::new(RaggedRecords::open_indexed(pairs).unwrap()))
}

fn plan(shuffle: Shuffle, rank: (u64, u64), last: LastBatch) -> Plan {
    let plan = Plan::builder(RECORDS).batch(6).shuffle(shuffle).rank(rank.0, rank.1).last_batch(last);
    if shuffle == Shuffle::None { plan.build() } else { plan.seed(3).build() }.unwrap()
}

const ORDERS: [Shuffle; 4] = [
    Shuffle::None,
    Shuffle::Full,
    Shuffle::Chunks { records: 5 },
    Shuffle::Window { chunk_records: 4, window_chunks: 3 },
];

/// A batch as the list of its records, after all ways to get at them have been compared.
fn records(batch: &Batch) -> Vec<Vec<u8>> {
    let count = batch.plan().len() as usize;
    let offsets = batch.offsets(0).unwrap();
    assert_eq!((offsets.len(), offsets[0], offsets[count]), (count + 1, 0, batch.len()));
    let flat: &[u8] = batch.cast().unwrap();
    let all: Vec<Vec<u8>> = offsets.windows(2).map(|pair| flat[pair[0]..pair[1]].to_vec()).collect();
    assert!((0..count).all(|i| batch.record(i) == Some(&all[i][..])));
    assert_eq!((batch.record(count), batch.record(usize::MAX), batch.offsets(1)), (None, None, None));
    all
}

fn wanted(batch: &Batch) -> Vec<Vec<u8>> {
    batch.plan().runs().flatten().map(record).collect()
}

#[test]
fn every_record_in_every_order_and_configuration() {
    let (_dir, data) = data();
    for mode in all_modes() {
        for shuffle in ORDERS {
            for last in [LastBatch::Drop, LastBatch::Keep, LastBatch::Wrap] {
                for rank in [(0, 1), (0, 3), (2, 3)] {
                    for (overlap, workers, depth) in [(false, 1, 2), (true, 1, 2), (true, 2, 3)] {
                        let builder = Loader::builder(data.clone(), plan(shuffle, rank, last));
                        let builder = builder.read_mode(mode).overlap(overlap).workers(workers);
                        let mut loader = builder.depth(depth).build().unwrap();
                        let mut steps = 0;
                        for batch in loader.epochs(0..2) {
                            let batch = batch.unwrap();
                            assert_eq!(records(&batch), wanted(&batch), "{mode:?} {shuffle:?} {last:?}");
                            steps += 1;
                        }
                        assert_eq!(steps, 2 * loader.plan().steps(0));
                    }
                }
            }
        }
    }
}

/// The ways to read that the file system has.
fn all_modes() -> Vec<ReadMode> {
    let (_dir, paths) = common::files(&[3]);
    modes(&common::open(&paths))
}

fn decoded(jpeg: &[u8]) -> Result<Vec<u8>, zune_jpeg::errors::DecodeErrors> {
    zune_jpeg::JpegDecoder::new(zune_jpeg::zune_core::bytestream::ZCursor::new(jpeg)).decode()
}

/// Pictures of many sizes, decoded by two threads to records of many lengths.
#[test]
fn decoded_pictures_are_the_same_from_every_step_on() {
    let dir = common::folder();
    let [data, index] = ["jpeg.bin", "jpeg.idx.npy"].map(|name| dir.path().join(name));
    let (mut bytes, mut lengths, mut pictures) = (Vec::new(), Vec::new(), Vec::new());
    for i in 0..40_u32 {
        let (width, height) = (8 + i * 7 % 30, 8 + i * 11 % 30);
        let places = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
        let pixels: Vec<u8> =
            places.flat_map(|(x, y)| [x * i, y * 3 + i, (x ^ y) * 5].map(|n| n as u8)).collect();
        let mut jpeg = Vec::new();
        let encoder = jpeg_encoder::Encoder::new(&mut jpeg, 75);
        encoder.encode(&pixels, width as u16, height as u16, jpeg_encoder::ColorType::Rgb).unwrap();
        pictures.push(decoded(&jpeg).unwrap());
        assert_eq!(pictures[i as usize].len(), pixels.len());
        lengths.push(jpeg.len() as u64);
        bytes.extend(jpeg);
    }
    std::fs::write(&index, offsets(bytes.len() as u64, lengths)).unwrap();
    std::fs::write(&data, bytes).unwrap();
    let data = Arc::new(RaggedRecords::open_indexed([(data, index)]).unwrap());
    let plan = Plan::builder(40).batches([(3, 2), (4, 5), (1, 4)]).shuffle(Shuffle::Full).seed(2);
    let plan = plan.last_batch(LastBatch::Keep).build().unwrap();
    let decode = map(38 * 38 * 3, |jpeg, out, _| {
        let picture = decoded(jpeg)?;
        out[..picture.len()].copy_from_slice(&picture);
        Ok(picture.len())
    });
    let build = || {
        let builder = Loader::builder(data.clone(), plan.clone()).workers(2);
        builder.transform(decode.clone()).build().unwrap()
    };
    let mut loader = build();
    let mut checkpoints = Vec::new();
    let whole: Vec<_> = loader
        .epochs(0..2)
        .map(|batch| {
            let batch = batch.unwrap();
            let expected = batch.plan().runs().flatten().map(|i| pictures[i as usize].clone());
            assert_eq!(records(&batch), expected.collect::<Vec<_>>());
            checkpoints.push(batch.checkpoint());
            records(&batch)
        })
        .collect();
    for (step, checkpoint) in checkpoints.iter().enumerate() {
        let mut loader = build();
        let rest = loader.epochs_from(checkpoint, 2).unwrap().map(|batch| records(&batch.unwrap()));
        assert!(rest.eq(whole[step + 1..].iter().cloned()), "after {step}");
    }
}

#[test]
fn transforms_take_and_make_records_of_their_own_length() {
    let (_dir, data) = data();
    let plan = plan(Shuffle::Full, (0, 1), LastBatch::Keep);
    // Every second byte, to change the lengths; then each byte twice.
    let half = map(500, |record, out, context| {
        assert_eq!(record, self::record(context.number));
        for (out, pair) in out.iter_mut().zip(record.chunks_exact(2)) {
            *out = pair[0];
        }
        Ok(record.len() / 2)
    });
    let twice = map(1000, |record, out, _| {
        for (out, byte) in out.chunks_exact_mut(2).zip(record) {
            out.fill(*byte);
        }
        Ok(2 * record.len())
    });
    let expected =
        |number| -> Vec<u8> { record(number).chunks_exact(2).flat_map(|pair| [pair[0]; 2]).collect() };
    let digest = |bytes: &[u8]| {
        bytes.iter().fold(bytes.len() as u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
    };
    for (overlap, workers) in [(false, 1), (true, 1), (true, 2)] {
        let build = || {
            Loader::builder(data.clone(), plan.clone()).overlap(overlap).workers(workers).depth(workers + 2)
        };
        let mut loader = build().transform(half.clone()).transform(twice.clone()).build().unwrap();
        for batch in loader.epoch(0).map(Result::unwrap) {
            assert!(records(&batch).into_iter().eq(batch.plan().runs().flatten().map(expected)));
            assert!(batch.field_type(0).unwrap().is_ragged());
        }
        // To records of one size.
        let fixed = per_record(8, move |record, out, _| {
            out.copy_from_slice(&digest(record).to_le_bytes());
            Ok(())
        });
        let mut loader = build().transform(half.clone()).transform(fixed).build().unwrap();
        for batch in loader.epoch(0).map(Result::unwrap) {
            let half = |number| -> Vec<u8> { record(number).into_iter().step_by(2).collect() };
            let wanted: Vec<_> = batch.plan().runs().flatten().map(|number| digest(&half(number))).collect();
            assert_eq!((batch.cast::<u64>().unwrap(), batch.offsets(0)), (&wanted[..], None));
            assert_eq!(batch.record(0), Some(&wanted[0].to_le_bytes()[..]));
        }
        // Numbers, one by one.
        let mut loader = build().transform(Convert::U16ToU32).build().unwrap();
        for batch in loader.epoch(0).map(Result::unwrap) {
            let bytes = batch.plan().runs().flatten().flat_map(record).collect::<Vec<_>>();
            let numbers = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
            assert!(batch.cast::<u32>().unwrap().iter().copied().eq(numbers.map(u32::from)));
        }
    }
}

/// Sequences of tokens with a label each, by their fields.
#[test]
fn typed_records_and_labels() {
    let (dir, data) = data();
    let tokens: Vec<u16> = (0..RECORDS).flat_map(record).map(u16::from).collect();
    let lengths: Vec<i32> = (0..RECORDS).map(|i| record(i).len() as i32).collect();
    let index = twinbuf_testing::megatron(8, 2, &lengths, &[]);
    std::fs::write(dir.path().join("tokens.idx"), index).unwrap();
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    std::fs::write(dir.path().join("tokens.bin"), bytes).unwrap();
    let labels: Vec<u8> = (0..RECORDS).flat_map(u64::to_le_bytes).collect();
    std::fs::write(dir.path().join("labels"), labels).unwrap();
    let tokens = RaggedRecords::open_megatron(files([dir.path().join("tokens.bin")]).unwrap()).unwrap();
    let labels = Records::open_headerless([dir.path().join("labels")], DType::U64, mmap::Cut::Rows).unwrap();
    let plan = plan(Shuffle::Full, (0, 1), LastBatch::Keep);
    let mut loader = Loader::builder((tokens, labels, data), plan).build().unwrap();
    for batch in loader.epochs(0..2) {
        let batch = batch.unwrap();
        let numbers: Vec<u64> = batch.plan().runs().flatten().collect();
        let wanted: Vec<u16> = numbers.iter().flat_map(|&i| record(i)).map(u16::from).collect();
        assert_eq!(batch.field::<u16>(0).unwrap(), wanted);
        assert_eq!(batch.field::<u64>(1).unwrap(), numbers);
        let bytes: Vec<u8> = numbers.iter().flat_map(|&i| record(i)).collect();
        assert_eq!(batch.field::<u8>(2).unwrap(), bytes);
        let [two, one] = [0, 2].map(|field| batch.offsets(field).unwrap().to_vec());
        assert!(two.into_iter().eq(one.into_iter().map(|offset| 2 * offset)));
        assert_eq!(batch.offsets(1), None);
        assert!(matches!(batch.field::<u32>(0), Err(Error::Field { field: 0, .. })));
        assert_eq!(batch.field_type(0).unwrap().to_string(), "up to u16 [996]");
    }
}

/// Lists that repeat records, the long ones most of all, and steps that are filled up from few records.
#[test]
fn slots_hold_records_that_repeat() {
    let (_dir, data) = data();
    let longest = (0..RECORDS).max_by_key(|&i| record(i).len()).unwrap();
    let often = (0..60).map(|i| if i % 10 == 0 { i } else { longest }).collect();
    let lists: [Vec<u64>; 4] = [often, vec![longest; 3], vec![longest], vec![longest, 3, longest, 10]];
    let lasts = [LastBatch::Drop, LastBatch::Keep, LastBatch::Wrap];
    let cases = lists.iter().flat_map(|list| lasts.map(|last| (list, last)));
    for ((list, last), rank) in cases.flat_map(|case| [0, 1, 2].map(|rank| (case, rank))) {
        for shuffle in ORDERS {
            let plan = Plan::builder(RECORDS).records(list.clone()).batch(6).last_batch(last);
            let Ok(plan) = plan.shuffle(shuffle).seed(3).rank(rank, 3).build() else { continue };
            let mut loader = Loader::builder(data.clone(), plan.clone()).build().unwrap();
            let found = loader.epoch(0).map(|batch| records(&batch.unwrap()));
            let planned = (0..plan.steps(0)).map(|step| plan.batch(0, step).unwrap());
            let wanted = planned.map(|batch| batch.runs().flatten().map(record).collect::<Vec<_>>());
            assert!(found.eq(wanted), "{list:?} {last:?} {shuffle:?} {rank}");
        }
    }
}

/// After another number of ranks, the last step of a windowed epoch can take a record that was left, and then take it
/// again from the front of the order.
#[test]
fn slots_hold_records_that_come_again_after_other_ranks() {
    let (_dir, data) = data();
    let mut again = 0;
    for (seed, batch) in (0..20).flat_map(|seed| [1, 5, 8, 11, 12, 13, 24, 25].map(|batch| (seed, batch))) {
        let plan = |batch, world| {
            let plan = Plan::builder(RECORDS).records(50..62).batch(batch).rank(0, world).seed(seed);
            let shuffle = Shuffle::Window { chunk_records: 2, window_chunks: 2 };
            plan.shuffle(shuffle).last_batch(LastBatch::Wrap).build().unwrap()
        };
        let mut before = Loader::builder(data.clone(), plan(2, 3)).build().unwrap();
        let from = before.epoch(0).next().unwrap().unwrap().checkpoint();
        let mut loader = Loader::builder(data.clone(), plan(batch, 1)).build().unwrap();
        for found in loader.epochs_from(&from, 1).unwrap() {
            let found = found.unwrap_or_else(|error| panic!("seed {seed}, batches of {batch}: {error:?}"));
            assert_eq!(records(&found), wanted(&found));
            let numbers: BTreeSet<u64> = found.plan().runs().flatten().collect();
            again += u64::from(batch <= 12 && (numbers.len() as u64) < batch);
        }
    }
    assert!(again > 20, "{again}");
}

#[test]
fn slots_hold_so_many_bytes() {
    let (_dir, data) = data();
    let plan = plan(Shuffle::Full, (0, 1), LastBatch::Keep);
    let slot = |builder: twinbuf::loader::LoaderBuilder| builder.wanted_slots().unwrap().1.size();
    // The six longest records.
    let mut lengths: Vec<usize> = (0..RECORDS).map(|i| record(i).len()).collect();
    lengths.sort_unstable();
    let most: usize = lengths.iter().rev().take(6).sum();
    assert_eq!(slot(Loader::builder(data.clone(), plan.clone())), most);
    assert_eq!(slot(Loader::builder(data.clone(), plan.clone()).transform(map(700, |_, _, _| Ok(0)))), 4200);
    // A transform that claims to have written past its room.
    let mut loader =
        Loader::builder(data.clone(), plan).transform(map(10, |_, _, _| Ok(11))).build().unwrap();
    let error = format!("{:?}", loader.epoch(0).next().unwrap().unwrap_err());
    assert!(error.contains("wanted a record of 10 bytes, found 11"), "{error}");
}

/// Record `i` is `i` bytes of `i`; claims of lengths may be one too few.
#[derive(Clone)]
struct Growing {
    too_few: bool,
}

impl Dataset for Growing {
    fn records(&self) -> u64 {
        RECORDS
    }

    fn record_bytes(&self) -> usize {
        RECORDS as usize
    }

    fn lengths(&self, batch: &BatchIndices) -> Option<Vec<usize>> {
        let all = batch.len() as usize - usize::from(self.too_few && batch.len() > 1);
        Some(batch.runs().flatten().map(|number| number as usize).take(all).collect())
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        let mut rest = out;
        for number in batch.runs().flatten() {
            let (own, behind) = rest.split_at_mut(number as usize);
            own.fill(number as u8);
            rest = behind;
        }
        assert!(rest.is_empty());
        Ok(batch.runs().flatten().sum::<u64>() as usize)
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
}

#[test]
fn a_data_set_of_ones_own() {
    let plan = plan(Shuffle::Full, (0, 1), LastBatch::Keep);
    let mut loader = Loader::builder(Growing { too_few: false }, plan.clone()).workers(2).build().unwrap();
    for batch in loader.epoch(0) {
        let batch = batch.unwrap();
        let wanted: Vec<_> =
            batch.plan().runs().flatten().map(|number| vec![number as u8; number as usize]).collect();
        assert_eq!(records(&batch), wanted);
    }
    let mut loader = Loader::builder(Growing { too_few: true }, plan).build().unwrap();
    let error = loader.epoch(0).next().unwrap().unwrap_err().to_string();
    assert_eq!(error, "epoch 0, step 0: field 0: wanted the lengths of 6 records, found 5");
}
