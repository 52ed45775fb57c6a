//! Records of varying length: every byte is that of the slice that numpy would take, and indexes that are wrong are refused
//! with a typed error. `lists` has the orders, ranks and resumptions.

#![allow(clippy::cast_possible_truncation)] // small numbers

use std::path::{Path, PathBuf};

use crate::asked::write;
use proptest::prelude::*;
use twinbuf_mmap::{DType, Error, Plan, RaggedRecords, Shard};
use twinbuf_testing::megatron as idx;

/// A `.npy` of one axis.
fn npy(descr: &str, numbers: impl ExactSizeIterator<Item = u64>) -> Vec<u8> {
    twinbuf_testing::npy(descr, &[numbers.len()], numbers.flat_map(u64::to_le_bytes))
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at * 31 + seed * 17) ^ (at >> 7)) as u8).collect()
}

/// Cuts `files` of bytes where the lengths say, as `numpy.split` does.
fn slices(files: &[(Vec<u8>, Vec<usize>)]) -> Vec<(usize, Vec<u8>)> {
    let mut all = Vec::new();
    for (file, (bytes, lengths)) in files.iter().enumerate() {
        let mut rest = &bytes[..];
        for &len in lengths {
            let (record, after) = rest.split_at(len);
            all.push((file, record.to_vec()));
            rest = after;
        }
    }
    all
}

/// Reads one record, as a batch.
fn read_record(records: &RaggedRecords, record: u64, out: &mut [u8]) -> Result<usize, Error> {
    let plan = Plan::builder(record + 1).build().unwrap();
    records.read(&plan.batch(0, record).unwrap(), out)
}

fn all_equal(records: &RaggedRecords, wanted: &[(usize, Vec<u8>)]) {
    assert_eq!(records.len(), wanted.len() as u64);
    assert_eq!(records.max_len(), wanted.iter().map(|(_, record)| record.len()).max().unwrap());
    assert_eq!(records.bytes(), wanted.iter().map(|(_, record)| record.len() as u64).sum::<u64>());
    let mut out = vec![0xAA; records.max_len() + 1];
    for (at, (file, record)) in wanted.iter().enumerate() {
        let found = records.locate(at as u64).unwrap();
        assert_eq!((found.shard, found.len), (*file, record.len() as u64));
        let len = read_record(records, at as u64, &mut out).unwrap();
        assert_eq!(&out[..len], &record[..], "record {at}");
        if let Some(less) = record.len().checked_sub(1) {
            let error = read_record(records, at as u64, &mut out[..less]).unwrap_err();
            assert!(matches!(error, Error::BufferTooSmall { wanted, .. } if wanted == record.len() as u64));
        }
    }
    let end = wanted.len() as u64;
    assert_eq!(records.locate(end), None);
    assert!(matches!(read_record(records, end, &mut out), Err(Error::NoSuchRecord { .. })));
}

/// What `fixtures/make.py` wrote with numpy, and the slices that numpy took.
#[test]
fn the_slices_of_numpy() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let text = std::fs::read_to_string(folder.join("ragged.txt")).unwrap();
    let mut wanted = std::collections::BTreeMap::<&str, Vec<(&str, &str)>>::new();
    for line in text.lines() {
        let [file, dtype, bytes] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        wanted.entry(file).or_default().push((dtype, bytes));
    }
    assert_eq!(wanted.len(), 4);
    for (file, slices) in wanted {
        let path = folder.join(file);
        let records = if file.starts_with("megatron") {
            RaggedRecords::open_megatron([&path])
        } else {
            RaggedRecords::open_indexed([(&path, path.with_extension("idx.npy"))])
        };
        let records = records.unwrap();
        assert_eq!(records.len(), slices.len() as u64, "{file}");
        let mut out = vec![0; records.max_len()];
        for (at, (dtype, bytes)) in slices.into_iter().enumerate() {
            let len = read_record(&records, at as u64, &mut out).unwrap();
            let found: String = out[..len].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!((&*records.dtype().to_string(), &*found), (dtype, bytes), "{file}, {at}");
        }
    }
}

fn lengths() -> impl Strategy<Value = Vec<Vec<usize>>> {
    let one = prop_oneof![3 => 0_usize..40, 1 => Just(0), 1 => 3000_usize..9000];
    prop::collection::vec(prop::collection::vec(one, 1..40), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// By an index of offsets, or by Megatron's.
    #[test]
    fn records_are_the_slices_of_their_files(
        lengths in lengths(), front in 0_usize..100, signed: bool,
        of in 0_usize..16, modes: bool, documents in 0_i64..5,
    ) {
        let megatron = [
            (1, DType::U8), (2, DType::I8), (3, DType::I16), (4, DType::I32),
            (5, DType::I64), (6, DType::F64), (7, DType::F32), (8, DType::U16),
        ].get(of);
        let (dtype, front) = megatron.map_or((DType::U8, front), |(_, dtype)| (*dtype, 0));
        let folder = tempfile::tempdir().unwrap();
        let (mut files, mut paths) = (Vec::new(), Vec::new());
        for (i, lengths) in lengths.iter().enumerate() {
            let in_bytes: Vec<usize> = lengths.iter().map(|len| len * dtype.size()).collect();
            let data = bytes(front + in_bytes.iter().sum::<usize>(), i);
            let index = if let Some((code, _)) = megatron {
                let tokens: Vec<i32> = lengths.iter().map(|&len| i32::try_from(len).unwrap()).collect();
                let mut index = idx(*code, dtype.size(), &tokens, &(0..documents).collect::<Vec<_>>());
                index.extend(vec![0; if modes { lengths.len() } else { 0 }]);
                index
            } else {
                let mut offsets = vec![front as u64];
                offsets.extend(lengths.iter().scan(front, |end, len| { *end += len; Some(*end as u64) }));
                npy(if signed { "<i8" } else { "<u8" }, offsets.into_iter())
            };
            let name = format!("{i}_text_document");
            write(folder.path(), &format!("{name}.idx"), index);
            paths.push(write(folder.path(), &format!("{name}.bin"), &data));
            files.push((data[front..].to_vec(), in_bytes));
        }
        let records = match megatron {
            Some(_) => RaggedRecords::open_megatron(&paths),
            None => RaggedRecords::open_indexed(paths.iter().map(|path| (path, path.with_extension("idx")))),
        }.unwrap();
        prop_assert_eq!(records.dtype(), dtype);
        prop_assert!(records.shards().iter().map(Shard::path).eq(paths.iter().map(PathBuf::as_path)));
        all_equal(&records, &slices(&files));
    }
}

/// The message for data at this byte that is not as long as the index says.
fn cut(at: u64, wanted: u64, found: u64) -> String {
    format!("cut off or grown, by the length of the data at byte {at}: wanted {wanted} bytes, found {found}")
}

#[test]
fn indexes_of_offsets_that_are_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let data = write(folder.path(), "data", bytes(100, 0));
    let open = |index: &[u8]| {
        let index = write(folder.path(), "index.npy", index);
        RaggedRecords::open_indexed([(&data, index)]).map(|_| ()).unwrap_err().to_string()
    };
    let offsets = |offsets: &[u64]| npy("<u8", offsets.iter().copied());
    let axis =
        |found| format!("no records in this shape: wanted one axis of at least 2 offsets, found [{found}]");
    let below = |at, found: &str| {
        format!(
            "bad header at byte {at}: wanted an offset from 0 that is not below the one before it, found {found}"
        )
    };
    let float = "unsupported type at byte 0, found offsets of f64: wanted integers of 64 bits".to_string();
    for (index, wanted) in [
        (offsets(&[]), axis(0)),
        (offsets(&[100]), axis(1)),
        (offsets(&[0, 99]), cut(0, 99, 100)),
        (offsets(&[5, 101]), cut(5, 96, 95)),
        (offsets(&[u64::MAX, u64::MAX]), cut(u64::MAX, 0, 0)),
        (offsets(&[0, 50, 49, 100]), below(144, "49")),
        (npy("<i8", [u64::MAX - 1, 100].into_iter()), below(128, "-2")),
        (npy("<f8", [0, 100].into_iter()), float),
        (b"MMIDIDX\0\0".to_vec(), "another format, by the magic at byte 0".to_string()),
    ] {
        let message = open(&index);
        assert!(message.contains(&wanted), "{message}");
    }
    assert!(open(&offsets(&[0, 100])[..140]).contains("cut off or grown"));
    assert!(matches!(RaggedRecords::open_indexed([] as [(&Path, &Path); 0]), Err(Error::NoPaths)));
    let missing = RaggedRecords::open_indexed([(&data, folder.path().join("missing"))]);
    assert!(matches!(missing, Err(Error::NotFound { .. })));
}

#[test]
fn indexes_of_megatron_that_are_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let data = write(folder.path(), "data.bin", bytes(100, 0));
    let open = |index: &[u8]| {
        write(folder.path(), "data.idx", index);
        RaggedRecords::open_megatron([&data]).map(|_| ()).unwrap_err().to_string()
    };
    let good = idx(8, 2, &[20, 0, 30], &[0, 1, 3]);
    write(folder.path(), "data.idx", &good);
    assert_eq!(RaggedRecords::open_megatron([&data]).unwrap().len(), 3);
    // Wherever it is cut off.
    for len in 0..good.len() {
        let message = open(&good[..len]);
        let wanted =
            if len < 34 { "ends inside its header: wanted at least 34 bytes" } else { "cut off or grown" };
        assert!(message.contains(wanted), "{len}: {message}");
    }
    let changed = |at: usize, with: &[u8]| {
        let mut index = good.clone();
        index[at..at + with.len()].copy_from_slice(with);
        open(&index)
    };
    for (message, wanted) in [
        (
            changed(0, b"X"),
            "another format, by the magic at byte 0: wanted MMIDIDX\\0\\0, found XMIDIDX\\x00\\x00",
        ),
        (changed(9, &[2]), "unknown version at byte 9: wanted 1, found 2"),
        (changed(17, &[0]), "unsupported type at byte 17, found the code 0"),
        (changed(17, &[9]), "unsupported type at byte 17, found the code 9"),
        (changed(18, &[0]), "bad header at byte 18: wanted at least one sequence, found 0"),
        (changed(18, &[0xFF; 8]), &cut(34, u64::MAX, 60)),
        (changed(26, &[0xFF; 8]), "cut off or grown"),
        (changed(34, &(-1_i32).to_le_bytes()), "bad header at byte 34: wanted a number of tokens"),
        (changed(34, &[21]), "bad header at byte 54: wanted the end of the sequence before, found 40"),
        (changed(46, &[1]), "bad header at byte 46: wanted the end of the sequence before, found 1"),
        (changed(62, &[0xFF; 8]), "bad header at byte 62: wanted the end of the sequence before, found -1"),
        (changed(42, &[31]), &cut(0, 102, 100)),
    ] {
        assert!(message.contains(wanted), "{message}");
    }
    let other = write(folder.path(), "other.bin", bytes(100, 0));
    write(folder.path(), "other.idx", idx(4, 4, &[25], &[]));
    write(folder.path(), "data.idx", &good);
    let both = RaggedRecords::open_megatron([&data, &other]);
    assert!(matches!(both, Err(Error::Mixed { path, .. }) if path == other));
}

#[test]
fn the_most_bytes_of_a_batch_of_a_list() {
    let folder = tempfile::tempdir().unwrap();
    let data = write(folder.path(), "data", bytes(60, 0));
    let index = write(folder.path(), "index", npy("<i8", [0, 10, 30, 60].into_iter()));
    let records = RaggedRecords::open_indexed([(data, index)]).unwrap();
    // Only the batches with record 9 fail: the others fit the bound.
    for (list, wanted) in [(vec![1, 0], 20), (vec![9, 2, 1, 0], 30), (vec![0, 9, 2], 30), (vec![1, 9], 20)] {
        assert_eq!(records.most_bytes(1, &list.clone().into()), wanted, "{list:?}");
    }
    assert_eq!(records.most_bytes(2, &(1..u64::MAX).into()), 50);
}

/// Megatron's own programs take the path without the extension. A dot in that prefix does not start an extension.
#[test]
fn a_prefix_of_megatron() {
    let folder = tempfile::tempdir().unwrap();
    for prefix in ["corpus", "corpus_v1.5_text"] {
        let data = write(folder.path(), &format!("{prefix}.bin"), bytes(100, 0));
        write(folder.path(), &format!("{prefix}.idx"), idx(4, 4, &[10, 15], &[]));
        let found = RaggedRecords::open_megatron([folder.path().join(prefix)]).unwrap();
        assert_eq!((found.len(), found.shards()[0].path()), (2, &*data));
        // Beside a file that has the prefix as its name, such as the text that the tokens were made of.
        write(folder.path(), prefix, bytes(100, 0));
        let found = RaggedRecords::open_megatron([folder.path().join(prefix)]).unwrap();
        assert_eq!(found.shards()[0].path(), &*data);
        assert_eq!(RaggedRecords::open_megatron([&data]).unwrap().len(), 2);
    }
    let gone = folder.path().join("gone");
    let error = RaggedRecords::open_megatron([&gone]).unwrap_err();
    assert!(matches!(&error, Error::NotFound { path } if *path == folder.path().join("gone.bin")), "{error}");
}
