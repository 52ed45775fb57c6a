//! A data set keeps its fingerprint when it is copied, and any other has another.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use twinbuf_mmap::{Cut, DType, Error, Records};

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

/// The numbers come from a separate implementation in Python:
///
/// ```python
/// def fnv(b, h=0xcbf29ce484222325):
///     for x in b: h = (h ^ x) * 0x100000001b3 % 2**64
///     return h
/// def ends(b): return b if len(b) <= 8192 else b[:4096] + b[-4096:]
/// n = lambda *v: b"".join(x.to_bytes(8, "little") for x in v)
/// data = b"".join((w * 2654435761 % 2**32).to_bytes(4, "little") for w in range(10_000))
/// files = data[:6000], data[6000:6040], data[6040:36040]
/// # Records::open(files, 20)
/// fnv(b"u8      " + n(1, 20) + n(20) + n(3, 0, 300, 0, 2, 0, 1500)
///     + b"".join(map(ends, files)))
/// # windows of 9 u16, one every 4: their last bytes are not the files' last
/// count = lambda f: (len(f) // 2 - 9) // 4 + 1
/// fnv(b"u16     " + n(1, 9) + n(8) + n(3) + b"".join(n(0, count(f)) for f in files)
///     + b"".join(ends(f[:(count(f) - 1) * 8 + 18]) for f in files))
/// ```
#[test]
fn golden() {
    let folder = tempfile::tempdir().unwrap();
    let paths = write(folder.path(), &[6000, 40, 30_000]);
    let plain = Records::open(&paths, 20).unwrap().fingerprint().unwrap();
    let windows = headerless(&paths, DType::U16, Cut::Windows { rows: 9, stride: 4 });
    assert_eq!((plain, windows), (0x2273_c3d2_07eb_bba9, 0x43c5_74d7_c47b_70f5), "{plain:#x} {windows:#x}");
}

#[test]
fn a_copy_is_the_same_data_set() {
    let folder = tempfile::tempdir().unwrap();
    let lens = [10_000, 20];
    let [first, second] = ["a", "b"].map(|name| write(&folder.path().join(name), &lens));
    fs::OpenOptions::new().write(true).open(&second[0]).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    let [first, second] = [first, second].map(|paths| Records::open(paths, 20).unwrap());
    assert_eq!(first.fingerprint().unwrap(), second.fingerprint().unwrap());
}

#[test]
fn any_other_is_another() {
    let folder = tempfile::tempdir().unwrap();
    let mut seen = BTreeMap::new();
    let mut add = |what: &str, fingerprint: u64| {
        let before = seen.insert(fingerprint, what.to_string());
        assert_eq!(before, None, "{what}");
    };
    let named = |name: &str, lens: &[usize]| write(&folder.path().join(name), lens);

    // The same bytes, cut otherwise.
    let paths = named("a", &[12_000, 12_000]);
    for bytes in [2, 4, 8, 12_000] {
        let records = Records::open(&paths, bytes).unwrap();
        add(&format!("records of {bytes}"), records.fingerprint().unwrap());
    }
    for dtype in [DType::U16, DType::I16, DType::F16, DType::Bf16, DType::C64] {
        add(&format!("{dtype}"), headerless(&paths, dtype, Cut::Rows));
    }
    for (rows, stride) in [(4, 4), (4, 3), (8, 3)] {
        let cut = Cut::Windows { rows, stride };
        add(&format!("{cut:?}"), headerless(&paths, DType::U16, cut));
    }
    add("one file less", Records::open(&paths[..1], 2).unwrap().fingerprint().unwrap());
    add("other order", Records::open([&paths[1], &paths[0]], 2).unwrap().fingerprint().unwrap());
    let split = named("split", &[8000, 16_000]);
    add("split elsewhere", Records::open(&split, 2).unwrap().fingerprint().unwrap());
    let joined = named("joined", &[24_000]);
    add("one file", Records::open(&joined, 2).unwrap().fingerprint().unwrap());

    // One byte of the many that are looked at.
    for (at, flip) in [(0, 1), (0, 2), (4095, 1), (12_000 - 4096, 1), (11_999, 1), (11_999, 0x80)] {
        for file in [0, 1] {
            let paths = named("flipped", &[12_000, 12_000]);
            let mut bytes = fs::read(&paths[file]).unwrap();
            bytes[at] ^= flip;
            fs::write(&paths[file], bytes).unwrap();
            let records = Records::open(&paths, 2).unwrap();
            add(&format!("byte {at} of {file} by {flip}"), records.fingerprint().unwrap());
        }
    }
}

/// 16 of 40 shards are looked at: the first, the last, and others evenly between.
#[test]
fn shards_are_looked_at_from_the_first_to_the_last() {
    let folder = tempfile::tempdir().unwrap();
    let paths = write(folder.path(), &[100; 40]);
    let fingerprint = || Records::open(&paths, 4).unwrap().fingerprint().unwrap();
    let before = fingerprint();
    let looked_at: Vec<usize> = (0..40)
        .filter(|&file| {
            let bytes = fs::read(&paths[file]).unwrap();
            let mut other = bytes.clone();
            other[50] ^= 1;
            fs::write(&paths[file], other).unwrap();
            let differs = fingerprint() != before;
            fs::write(&paths[file], bytes).unwrap();
            differs
        })
        .collect();
    assert_eq!(looked_at, [0, 2, 5, 7, 10, 13, 15, 18, 20, 23, 26, 28, 31, 33, 36, 39]);
}

#[test]
fn a_file_cut_off_after_it_was_opened() {
    let folder = tempfile::tempdir().unwrap();
    let paths = write(folder.path(), &[20_000]);
    let records = Records::open(&paths, 4).unwrap();
    fs::OpenOptions::new().write(true).open(&paths[0]).unwrap().set_len(19_000).unwrap();
    let error = records.fingerprint().unwrap_err();
    let Error::Truncated { path, offset: 19_000, wanted: 4096, found: 3096 } = error else {
        panic!("{error:?}")
    };
    assert_eq!(path, paths[0]);
}
