//! A data set keeps its fingerprint when it is copied, and any other has another.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use twinbuf_mmap::{Cut, DType, Error, RaggedRecords, Records};

/// Files of `lens` bytes; each byte depends on its place.
fn write(folder: &Path, lens: &[usize]) -> Vec<PathBuf> {
    fs::create_dir_all(folder).unwrap();
    let mut bytes = (0_u32..).flat_map(|word| word.wrapping_mul(2_654_435_761).to_le_bytes());
    let paths: Vec<PathBuf> = (0..lens.len()).map(|index| folder.join(index.to_string())).collect();
    for (path, &len) in paths.iter().zip(lens) {
        fs::write(path, bytes.by_ref().take(len).collect::<Vec<u8>>()).unwrap();
    }
    paths
}

fn headerless(paths: &[PathBuf], dtype: DType, cut: Cut) -> u64 {
    Records::open_headerless(paths, dtype, cut).unwrap().fingerprint().unwrap()
}

fn print(paths: &[PathBuf], record: usize) -> u64 {
    Records::open(paths, record).unwrap().fingerprint().unwrap()
}

/// The numbers come from a separate implementation in Python:
///
/// ```python
/// def step(lane, word):
///     lane = (lane ^ word) * 0x9E3779B97F4A7C15 % 2**64
///     return lane >> 32 | lane << 32 & (2**64 - 1)
/// def add(lanes, b):
///     for at in range(0, len(b), 8):
///         lanes[at // 8 % 8] = step(lanes[at // 8 % 8], int.from_bytes(b[at : at + 8], "little"))
/// def end(*parts):
///     lanes, h = list(range(8)), 8
///     for part in parts: add(lanes, part)
///     for lane in lanes: h = step(h, lane)
///     return h
/// n = lambda *v: b"".join(x.to_bytes(8, "little") for x in v)
/// ends = lambda b: (b[:8192], b[max(8192, len(b) - 8192):])
/// data = b"".join((w * 2654435761 % 2**32).to_bytes(4, "little") for w in range(10_000))
/// files = data[:6000], data[6000:6040], data[6040:36040]
/// # Records::open(files, 20)
/// print(hex(end(b"u8      " + n(1, 20, 20, 3, *(end(n(0, len(f) // 20), *ends(f)) for f in files)))))
/// # windows of 9 u16, one every 4: their last bytes are not the files' last
/// count = lambda f: (len(f) // 2 - 9) // 4 + 1
/// cut = lambda f: f[:(count(f) - 1) * 8 + 18]
/// print(hex(end(b"u16     " + n(1, 9, 8, 3, *(end(n(0, count(f)), *ends(cut(f))) for f in files)))))
/// ```
#[test]
fn golden() {
    let folder = tempfile::tempdir().unwrap();
    let paths = write(folder.path(), &[6000, 40, 30_000]);
    let plain = print(&paths, 20);
    let windows = headerless(&paths, DType::U16, Cut::Windows { rows: 9, stride: 4 });
    assert_eq!((plain, windows), (0x891d_98a0_f46f_ff1c, 0x0d5c_935b_1ece_ed77), "{plain:#x} {windows:#x}");
}

#[test]
fn a_copy_is_the_same_data_set_and_any_other_is_another() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "copy"].map(|name| write(&folder.path().join(name), &[10_000, 20]));
    fs::OpenOptions::new().write(true).open(&second[0]).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(print(&first, 20), print(&second, 20));
    let mut seen = BTreeMap::new();
    let mut add = |what: &str, fingerprint: u64| {
        let before = seen.insert(fingerprint, what.to_string());
        assert_eq!(before, None, "{what}");
    };
    let named = |name: &str, lens: &[usize]| print(&write(&folder.path().join(name), lens), 2);

    // The same bytes, cut otherwise.
    let paths = write(&folder.path().join("a"), &[12_000, 12_000]);
    for bytes in [2, 4, 8, 12_000] {
        add(&format!("records of {bytes}"), print(&paths, bytes));
    }
    for dtype in [DType::U16, DType::I16, DType::F16, DType::Bf16, DType::C64] {
        add(&format!("{dtype}"), headerless(&paths, dtype, Cut::Rows));
    }
    for (rows, stride) in [(4, 4), (4, 3), (8, 3)] {
        let cut = Cut::Windows { rows, stride };
        add(&format!("{cut:?}"), headerless(&paths, DType::U16, cut));
    }
    add("one file less", print(&paths[..1], 2));
    add("other order", print(&[paths[1].clone(), paths[0].clone()], 2));
    add("split elsewhere", named("split", &[8000, 16_000]));
    add("one file", named("joined", &[24_000]));
}

/// Swaps each pair of files, checks that the new order has a fingerprint that is not in `seen`, and adds it.
fn swap_files(paths: &mut [PathBuf], record: usize, pairs: &[(usize, usize)], seen: &mut BTreeSet<u64>) {
    for &(one, other) in pairs {
        paths.swap(one, other);
        assert!(seen.insert(print(paths, record)), "{one} and {other} swapped");
        paths.swap(one, other);
    }
}

/// Of 40 files of the same length: two swapped, one replaced, one with a byte changed at an end. Every file counts.
#[test]
fn every_shard_is_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let mut paths = write(folder.path(), &[40_000; 40]);
    let before = print(&paths, 40);
    let mut seen = BTreeSet::from([before]);
    swap_files(&mut paths, 40, &[(3, 4), (0, 39), (17, 31)], &mut seen);
    for file in (0..40).step_by(twinbuf_testing::extent(3, 1)) {
        let bytes = fs::read(&paths[file]).unwrap();
        fs::write(&paths[file], vec![7; 40_000]).unwrap();
        assert!(seen.insert(print(&paths, 40)), "{file} replaced");
        for at in [0, 4095, 8191, 40_000 - 8192, 39_999] {
            let mut other = bytes.clone();
            other[at] ^= 0x80;
            fs::write(&paths[file], other).unwrap();
            assert!(seen.insert(print(&paths, 40)), "byte {at} of {file}");
        }
        fs::write(&paths[file], bytes).unwrap();
    }
    assert_eq!(print(&paths, 40), before);
}

/// As many files as several threads read: in any order of reading it is the same number, and an error is the first.
#[test]
fn many_shards() {
    let folder = tempfile::tempdir().unwrap();
    let mut paths = write(folder.path(), &[40; 300]);
    let before = print(&paths, 40);
    swap_files(&mut paths, 40, &[(0, 1), (0, 299), (100, 200)], &mut BTreeSet::from([before]));
    assert_eq!(print(&paths, 40), before);
    let records = Records::open(&paths, 40).unwrap();
    for file in [299, 170, 80] {
        fs::OpenOptions::new().write(true).open(&paths[file]).unwrap().set_len(0).unwrap();
        let error = records.fingerprint().unwrap_err();
        assert!(matches!(&error, Error::Truncated { path, .. } if *path == paths[file]), "{error}");
    }
}

/// Two records of other lengths in the middle of many, and the same bytes.
#[test]
fn every_length_of_a_record_counts() {
    let folder = tempfile::tempdir().unwrap();
    let [data, index] = ["data", "index.npy"].map(|name| folder.path().join(name));
    fs::write(&data, vec![1; 50_000]).unwrap();
    let print = |lens: &[u64]| {
        fs::write(&index, twinbuf_testing::offsets(50_000, lens.iter().copied())).unwrap();
        RaggedRecords::open_indexed([(&data, &index)]).unwrap().fingerprint().unwrap()
    };
    let mut lens = vec![10; 5000];
    let before = print(&lens);
    (lens[2501], lens[2502]) = (9, 11);
    assert_ne!(print(&lens), before);
}

#[test]
fn a_file_cut_off_after_it_was_opened() {
    let folder = tempfile::tempdir().unwrap();
    let paths = write(folder.path(), &[20_000]);
    let records = Records::open(&paths, 4).unwrap();
    fs::OpenOptions::new().write(true).open(&paths[0]).unwrap().set_len(19_000).unwrap();
    let error = records.fingerprint().unwrap_err();
    let Error::Truncated { path, offset: 19_000, wanted: 8192, found: 7192 } = error else {
        panic!("{error:?}")
    };
    assert_eq!(path, paths[0]);
}
