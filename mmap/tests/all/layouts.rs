//! `read` delivers what a layout says, whatever its offsets, strides, windows and files: checked against a
//! reader of a few lines.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::asked::write;
use proptest::prelude::*;
use tempfile::TempDir;
use twinbuf_mmap::{Cut, DType, Error, LastBatch, Plan, RaggedRecords, Ranges, Records, Shuffle};
use twinbuf_testing::bytes as data;

fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// An `.npy` file of version 1 or 2, its header padded to `pad` more bytes than needed.
fn npy(descr: &str, shape: &[usize], pad: usize, data: &[u8]) -> Vec<u8> {
    let axes: String = shape.iter().map(|axis| format!("{axis}, ")).collect();
    let header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({axes}), }}{}\n", " ".repeat(pad));
    crate::asked::npy(if pad % 2 == 0 { 1 } else { 2 }, &header, data)
}

/// The windows of all shards, one after the other: the reference.
fn windows(shards: &[Vec<u8>], row: usize, rows: usize, stride: usize) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for shard in shards {
        let mut start = 0;
        while start + rows * row <= shard.len() {
            all.push(shard[start..start + rows * row].to_vec());
            start += stride * row;
        }
    }
    all
}

fn order(kind: u64) -> Shuffle {
    match kind {
        0 => Shuffle::None,
        1 => Shuffle::Full,
        2 => Shuffle::Window { chunk_records: 3, window_chunks: 2 },
        records => Shuffle::Chunks { records },
    }
}

/// Reads an epoch in batches and compares it record by record.
fn compare(records: &Records, expected: &[Vec<u8>], batch: u64, order: Shuffle) {
    assert_eq!(records.len(), expected.len() as u64);
    let plan = Plan::builder(records.len()).batch(batch).shuffle(order).last_batch(LastBatch::Keep);
    crate::asked::compare(records, &plan.build().unwrap(), &format!("{order:?}"), |record| &expected[record]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// The offset differs from file to file, the number of rows too; rows have two axes or none.
    #[test]
    fn read_equals_a_naive_reader(
        columns in prop::option::of(1_usize..5),
        shards in prop::collection::vec((0_usize..40, 0_usize..60), 1..5),
        rows in 1_usize..12,
        stride in 1_usize..15,
        batch in 1_u64..40,
        kind in 0_u64..7,
    ) {
        let folder = folder();
        let row = columns.map_or(4, |columns| columns * 2 * 4);
        let (mut paths, mut all) = (Vec::new(), Vec::new());
        for (index, &(more, pad)) in shards.iter().enumerate() {
            let count = rows + more;
            let shape = columns.map_or(vec![count], |columns| vec![count, columns, 2]);
            all.push(data(count * row, u32::try_from(index * 1000).unwrap()));
            paths.push(write(folder.path(), &index.to_string(), npy("<u4", &shape, pad, &all[index])));
        }
        let records = Records::open_npy(&paths, Cut::Windows { rows, stride }).unwrap();
        prop_assert_eq!(records.record_bytes(), rows * row);
        compare(&records, &windows(&all, row, rows, stride), batch, order(kind));
        let records = Records::open_npy(&paths, Cut::Rows).unwrap();
        compare(&records, &windows(&all, row, 1, 1), batch, order(kind));
    }
}

#[test]
fn windows_do_not_cross_files_and_leave_the_rest_unread() {
    let folder = folder();
    let shards: Vec<Vec<u8>> = [9, 12, 5].map(|tokens| data(tokens * 2, 7)).to_vec();
    let paths = (0..).zip(&shards).map(|(index, shard)| write(folder.path(), &index.to_string(), shard));
    let paths: Vec<PathBuf> = paths.collect();
    let records = Records::open_headerless(&paths, DType::U16, Cut::sequence(4)).unwrap();
    let shard_records: Vec<_> = records.shards().iter().map(twinbuf_mmap::Shard::records).collect();
    assert_eq!(shard_records, [0..2, 2..4, 4..5]);
    let offsets: Vec<_> = (0..5).map(|record| records.locate(record).unwrap().offset).collect();
    assert_eq!(offsets, [0, 8, 0, 8, 0]);
    compare(&records, &windows(&shards, 2, 5, 4), 5, Shuffle::None);
    assert_eq!(records.bytes(), 5 * 10);
}

/// A stride that no file holds is no trouble while each file has one window only.
#[test]
fn the_largest_strides_and_windows() {
    let folder = folder();
    let path = write(folder.path(), "tokens", data(40, 1));
    let open = |rows, stride| Records::open_headerless([&path], DType::U32, Cut::Windows { rows, stride });
    for stride in [10, usize::MAX / 1000, usize::MAX / 4, usize::MAX] {
        let records = open(10, stride).unwrap();
        compare(&records, &[data(40, 1)], 1, Shuffle::None);
        let records = open(3, stride).unwrap();
        compare(&records, &[data(12, 1)], 1, Shuffle::Full);
    }
    let sequence = |len| Records::open_headerless([&path], DType::U32, Cut::sequence(len));
    let too_long = [11, 1 << (usize::BITS - 2), usize::MAX].map(|rows| (rows, open(rows, 1)));
    for (rows, opened) in too_long.into_iter().chain([(usize::MAX, sequence(usize::MAX))]) {
        let Err(Error::TooShort { path: at, wanted, found: 40 }) = opened else { panic!("{opened:?}") };
        assert_eq!((at, wanted), (path.clone(), (rows as u64).saturating_mul(4)));
    }
    assert!(matches!(open(0, 1), Err(Error::ZeroRecord)));
    assert!(matches!(open(1, 0), Err(Error::ZeroStride)));
    assert!(matches!(sequence(0), Err(Error::ZeroStride)));
}

/// Windows share bytes, so together they may have more than 2^64: 2^32 + 1 of them of 4 GiB each.
#[cfg(all(unix, target_pointer_width = "64"))]
#[test]
fn more_bytes_than_can_be_counted() {
    let folder = folder();
    let path = folder.path().join("sparse");
    File::create(&path).unwrap().set_len(8 << 30).unwrap();
    let open = |rows| Records::open_headerless([&path], DType::U8, Cut::Windows { rows, stride: 1 });
    let error = open(1 << 32).unwrap_err();
    assert!(matches!(&error, Error::TooLarge { path: at } if *at == path), "{error:?}");
    let records = open((1 << 32) + (1 << 20)).unwrap();
    assert_eq!(records.bytes(), records.len() * records.record_bytes() as u64);
    assert_eq!(records.locate(records.len() - 1).unwrap().offset, (1 << 32) - (1 << 20));
}

/// Read calls that the kernel has counted for this thread; proc(5). Asking takes one itself. `None` if it does not count
/// them (`CONFIG_TASK_IO_ACCOUNTING`).
#[cfg(target_os = "linux")]
fn read_calls() -> Option<u64> {
    use std::io::Read as _;

    let mut counters = [0; 1024];
    // By one call, however many digits the counters have.
    let len = File::open("/proc/thread-self/io").ok()?.read(&mut counters).ok()?;
    let counters = std::str::from_utf8(&counters[..len]).unwrap();
    Some(counters.lines().find_map(|line| line.strip_prefix("syscr: "))?.parse().unwrap())
}

#[cfg(target_os = "linux")]
#[test]
fn one_read_call_for_a_run_of_windows_without_gaps() {
    let folder = folder();
    let path = write(folder.path(), "tokens", data(20_000, 1));
    for (rows, stride, calls) in [(65, 64, 1), (8, 1, 1), (64, 64, 1), (64, 65, 0)] {
        let records = Records::open_headerless([&path], DType::U16, Cut::Windows { rows, stride }).unwrap();
        let batch = Plan::builder(records.len()).batch(100).build().unwrap().batch(0, 0).unwrap();
        let mut out = vec![0; 100 * records.record_bytes()];
        let (Some(first), Some(second)) = (read_calls(), read_calls()) else {
            return eprintln!("not checked: the kernel counts no reads");
        };
        records.read(&batch, &mut out).unwrap();
        let found = read_calls().unwrap() - second - (second - first);
        // Where there are gaps, one call copies all windows, which is none of those; or it is forbidden.
        assert!(found == calls || calls == 0 && found == 100, "windows of {rows}, stride {stride}: {found}");
    }
}

/// The error names the first missing byte, and counts the bytes read once: in overlapping windows, and in records of varying
/// length. What is before it is read.
#[test]
fn truncated_while_open() {
    let folder = folder();
    let path = write(folder.path(), "tokens", data(2000, 1));
    let index = write(folder.path(), "index", twinbuf_testing::offsets(2000, [900, 700]));
    let windows = Records::open_headerless([&path], DType::U16, Cut::sequence(10)).unwrap();
    let ragged = RaggedRecords::open_indexed([(&path, index)]).unwrap();
    assert_eq!((windows.len(), ragged.len()), (99, 3));
    let mut out = vec![0; 2000];
    let mut read = |ranges: &Ranges, records: u64, step: u64| {
        let batch = Plan::builder(ranges.len()).batch(records).build().unwrap().batch(0, step).unwrap();
        ranges.read(&batch, &mut out)
    };
    assert_eq!([read(&windows, 33, 1).unwrap(), read(&ragged, 1, 1).unwrap()], [33 * 22, 700]);
    File::options().write(true).open(&path).unwrap().set_len(1000).unwrap();
    assert_eq!([read(&windows, 33, 0).unwrap(), read(&ragged, 1, 0).unwrap()], [33 * 22, 900]);
    // Windows 33 to 65 are at bytes 660 to 65 * 20 + 22.
    for (error, bytes) in [(read(&windows, 33, 1), (662, 340)), (read(&ragged, 1, 1), (700, 100))] {
        let Err(Error::Truncated { path: at, offset: 1000, wanted, found }) = error else {
            panic!("{error:?}")
        };
        assert_eq!((&at, (wanted, found)), (&path, bytes));
    }
}

#[test]
fn files_of_one_data_set_have_records_of_one_kind() {
    let folder = folder();
    let file = |name, bytes: Vec<u8>| write(folder.path(), name, bytes);
    let first = file("first", npy("<f4", &[2, 3], 0, &data(24, 0)));
    let longer = file("longer", npy("<f4", &[9, 3], 0, &data(108, 0)));
    let ints = file("ints", npy("<i4", &[2, 3], 0, &data(24, 0)));
    let wide = file("wide", npy("<f4", &[2, 4], 0, &data(32, 0)));
    let deep = file("deep", npy("<f4", &[2, 3, 1], 0, &data(24, 0)));
    assert_eq!(Records::open_npy([&first, &longer], Cut::Rows).unwrap().len(), 11);
    let cases: [(&Path, DType, &[usize]); 3] =
        [(&ints, DType::I32, &[3]), (&wide, DType::F32, &[4]), (&deep, DType::F32, &[3, 1])];
    for (path, dtype, shape) in cases {
        let error = Records::open_npy([&*first, &*longer, path], Cut::Rows).unwrap_err();
        let Error::Mixed { path: at, first: other, wanted, found } = &error else { panic!("{error:?}") };
        assert_eq!((&**at, &**other), (path, &*first));
        assert_eq!(*wanted, (DType::F32, vec![3]));
        assert_eq!(*found, (dtype, shape.to_vec()));
        let message = error.to_string();
        assert!(message.ends_with(&format!("wanted f32 [3], found {dtype} {shape:?}")), "{message}");
    }
}

/// Reads the last tokens of an 8 GiB file of 32-bit tokens with a header. The file is sparse, so it takes almost no
/// disk space.
#[cfg(unix)]
#[test]
fn tokens_past_four_gib() {
    use std::os::unix::fs::FileExt;

    const TOKENS: u64 = (1 << 31) - 1;
    let folder = folder();
    let path = folder.path().join("llama_3.bin");
    let file = File::create(&path).unwrap();
    let header = [20_240_801_i32, 7, i32::MAX].map(i32::to_le_bytes).concat();
    file.write_all_at(&header, 0).unwrap();
    file.set_len(1024 + TOKENS * 4).unwrap();
    let last = data(4096, 3);
    file.write_all_at(&last, 1024 + TOKENS * 4 - 4096).unwrap();

    // Behind a small file: numbers and offsets then differ.
    let mut bytes = [20_240_801_i32, 7, 16].map(i32::to_le_bytes).concat();
    bytes.resize(1024 + 64, 0);
    let small = write(folder.path(), "small.bin", bytes);

    let records = Records::open_llm_c([&small, &path], Cut::sequence(15)).unwrap();
    let windows = (TOKENS - 16) / 15 + 1;
    assert_eq!(records.len(), 1 + windows);
    let start = (windows - 3) * 60;
    assert_eq!(records.locate(windows - 2).unwrap().offset, 1024 + start);
    let batch = Plan::builder(records.len()).batch(3).build().unwrap().batch(0, windows / 3).unwrap();
    let mut out = [0; 3 * 64];
    let len = records.read(&batch, &mut out).unwrap();
    let first = batch.first() - 1;
    for (index, found) in (first..).zip(out[..len].chunks_exact(64)) {
        let from = usize::try_from(index * 60 + 4096 - TOKENS * 4).unwrap();
        assert_eq!(found, &last[from..from + 64], "window {index}");
    }
}

/// Whatever tensors there are, and with no other look at the header, which is overwritten meanwhile.
#[cfg(feature = "safetensors")]
#[test]
fn every_tensor_is_opened_as_by_its_name() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let dtypes = [("U8", 1), ("I16", 2), ("F8_E4M3", 1), ("F64", 8)];
    let shapes = [&[2, 3][..], &[5], &[], &[0, 3], &[3, 0]];
    let tensors = (0..200).map(|i| {
        let ((dtype, size), shape) = (dtypes[i % 4], shapes[i % 5]);
        // Not in the order of their names.
        (format!("t{:03}", i * 77 % 200), dtype, shape, size * shape.iter().product::<usize>())
    });
    let file = twinbuf_testing::safetensors(tensors, data(200 * 6 * 8, 0));
    // As long, and without its header.
    let blank = [&file[..8], &vec![b'x'; file.len() - 8]].concat();

    let told = |records: Result<Records, Error>| match records {
        Ok(records) => {
            let first = records.locate(0);
            format!("{} of {} {:?} from {first:?}", records.len(), records.dtype(), records.shape())
        }
        Err(error) => error.to_string(),
    };
    for cut in [Cut::Rows, Cut::Windows { rows: 2, stride: 1 }] {
        std::fs::write(&path, &file).unwrap();
        let expected: Vec<(String, String)> = (0..200)
            .map(|i| format!("t{i:03}"))
            .map(|name| (name.clone(), told(Records::open_safetensors([&path], &name, cut))))
            .collect();
        assert!(expected.iter().any(|(_, told)| told.contains(" of f64 [")), "{expected:?}");
        let each = Records::open_safetensors_each(&path, cut).unwrap();
        std::fs::write(&path, &blank).unwrap();
        let found: Vec<_> = each.map(|(name, records)| (name, told(records))).collect();
        assert_eq!(found, expected);
    }

    // A file that is no longer as long is not the one of that header.
    const LENGTH: &str = "cut off or grown, by the length of the data";
    std::fs::write(&path, &file).unwrap();
    let each = Records::open_safetensors_each(&path, Cut::Rows).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(file.len() as u64 - 1).unwrap();
    for (name, records) in each {
        assert!(matches!(records, Err(Error::Format { problem: LENGTH, .. })), "{name}: {records:?}");
    }
    let error = Records::open_safetensors_each(&path, Cut::Rows).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Format { problem: LENGTH, .. }), "{error:?}");
}

/// The four files of MNIST have 16 and 8 bytes in front of the pixels and the labels.
#[test]
fn the_files_of_mnist() {
    let folder = tempfile::tempdir().unwrap();
    for (name, count) in [("train", 60), ("t10k", 10)] {
        let file = |of, header: &[u32], data: &[u8]| {
            let header = header.iter().flat_map(|n| n.to_be_bytes()).collect::<Vec<u8>>();
            write(folder.path(), &format!("{name}-{of}"), [&header, data].concat())
        };
        let pixels: Vec<u8> = (0..count * 784).map(|at| (at % 251) as u8).collect();
        let classes: Vec<u8> = (0..count).map(|at| (at % 10) as u8).collect();
        let images = file("images-idx3-ubyte", &[2051, count, 28, 28], &pixels);
        let labels = file("labels-idx1-ubyte", &[2049, count], &classes);

        // In six lines.
        let images = Records::options().header(16).open([&images], 28 * 28).unwrap();
        let labels = Records::options().header(8).open_headerless([&labels], DType::U8, Cut::Rows).unwrap();
        let batch = Plan::builder(images.len()).batch(images.len()).build().unwrap().batch(0, 0).unwrap();
        let (mut pixels_read, mut classes_read) = (vec![0; pixels.len()], vec![0; classes.len()]);
        images.read(&batch, &mut pixels_read).unwrap();
        labels.read(&batch, &mut classes_read).unwrap();

        assert_eq!((images.len(), labels.len()), (u64::from(count), u64::from(count)));
        assert!(pixels_read == pixels && classes_read == classes);
    }
}

#[test]
fn a_header_that_is_not_whole_or_leaves_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "x", [7; 20]);
    let open = |header, bytes| Records::options().header(header).open([&path], bytes);
    let typed = |header| Records::options().header(header).open_headerless([&path], DType::U16, Cut::Rows);
    assert_eq!((open(8, 4).unwrap().len(), typed(8).unwrap().len()), (3, 6));
    assert_eq!(open(8, 4).unwrap().locate(1).unwrap().offset, 12);
    assert!(matches!(open(8, 5), Err(Error::Ragged { offset: 18, wanted: 5, found: 2, .. })));
    assert!(matches!(typed(9), Err(Error::Ragged { offset: 19, wanted: 2, found: 1, .. })));
    assert!(matches!(open(20, 4), Err(Error::TooShort { wanted: 4, found: 0, .. })));
    for header in [21, u64::MAX] {
        for error in [open(header, 4).unwrap_err(), typed(header).unwrap_err()] {
            let wanted = format!("wanted at least {header} bytes, found 20");
            assert_eq!(error.to_string(), format!("{path:?}: ends inside its header: {wanted}"));
        }
    }
    // Another format is another format, with a header or without.
    std::fs::write(&path, b"\x1f\x8b\x08\0\0\0\0\0\x02\x03 of an archive").unwrap();
    let message = typed(8).unwrap_err().to_string();
    assert!(message.contains("wanted numbers without a header, found gzip"), "{message}");
}
