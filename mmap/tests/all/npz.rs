//! Arrays of `.npz`: found by name, read in place, refused where they are compressed.

use std::path::{Path, PathBuf};

use twinbuf_mmap::{Cut, DType, Error, Plan, Records};
use twinbuf_testing::zip;

/// As `numpy.save` writes rows of two float32.
fn npy(rows: u8) -> Vec<u8> {
    let numbers = (0..2 * rows).flat_map(|number| f32::from(number).to_le_bytes());
    twinbuf_testing::npy("<f4", &[rows.into(), 2], numbers)
}

fn write(folder: &Path, bytes: &[u8]) -> PathBuf {
    crate::asked::write(folder, "data.npz", bytes)
}

fn message(path: &Path, name: &str) -> String {
    Records::open_npz([path], name, Cut::Rows).unwrap_err().to_string()
}

#[test]
fn arrays_are_found_by_name_and_read_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let (x, y) = (npy(3), npy(5));
    let path = write(folder.path(), &zip(&[("x.npy", 0, &x), ("note.txt", 0, b"hello"), ("y.npy", 0, &y)]));
    for (name, rows) in [("x", 3_u8), ("y", 5)] {
        let records = Records::open_npz([&path], name, Cut::Rows).unwrap();
        assert_eq!((records.len(), records.dtype(), records.shape()), (rows.into(), DType::F32, &[2][..]));
        let all = Plan::builder(records.len()).batch(records.len()).build().unwrap().batch(0, 0).unwrap();
        let mut numbers = vec![0_u8; usize::from(rows) * 8];
        records.read(&all, &mut numbers).unwrap();
        let expected: Vec<u8> = (0..2 * rows).flat_map(|number| f32::from(number).to_le_bytes()).collect();
        assert_eq!(numbers, expected, "{name}");
    }
    // Two files, one data set.
    assert_eq!(Records::open_npz([&path, &path], "y", Cut::Rows).unwrap().len(), 10);
}

#[test]
fn what_cannot_be_read_in_place_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let x = npy(3);
    let path = write(folder.path(), &zip(&[("x.npy", 8, &x), ("y.npy", 0, &x)]));
    let wanted = "the array is compressed: wanted \"x\" stored, found DEFLATE: save it with `numpy.savez(";
    let compressed = format!("{path:?}: {wanted}");
    let message = message(&path, "x");
    assert!(message.starts_with(&compressed) && !message.contains('\n'), "{message}");
    assert!(Records::open_npz([&path], "y", Cut::Rows).is_ok());

    let each: Vec<_> = Records::open_npz_each(&path, Cut::Rows).unwrap().collect();
    let [(first, refused), (second, opened)] = &each[..] else { panic!("{each:?}") };
    assert_eq!((first.as_str(), second.as_str()), ("x", "y"));
    assert_eq!(refused.as_ref().unwrap_err().to_string(), message);
    assert_eq!(opened.as_ref().unwrap().len(), 3);

    let error = Records::open_npz([&path], "z", Cut::Rows).unwrap_err();
    let Error::NoTensor { wanted, found, .. } = &error else { panic!("{error:?}") };
    assert_eq!((wanted.as_str(), &found[..]), ("z", &["x".to_owned(), "y".to_owned()][..]));
}

/// The array says that it is longer than its member: the next member's bytes are not its own.
#[test]
fn an_array_ends_with_its_member() {
    let folder = tempfile::tempdir().unwrap();
    let long = npy(4);
    let short = &long[..long.len() - 8];
    let path = write(folder.path(), &zip(&[("x.npy", 0, short), ("y.npy", 0, &long)]));
    // 30 bytes of the local header and 5 of the name, 128 of the array's own header.
    let wanted = "cut off or grown, by the length of the data at byte 163: wanted 32 bytes, found 24";
    assert_eq!(message(&path, "x"), format!("{path:?}: {wanted}"));
    let path = write(folder.path(), &zip(&[("x.npy", 0, &npy(0)[..100])]));
    let message = message(&path, "x");
    assert!(message.ends_with("ends inside its header: wanted at least 163 bytes, found 135"), "{message}");
}

/// Between the look at the directory and that at an array the file becomes shorter.
#[test]
fn an_archive_that_is_cut_off_after_its_directory_was_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), &zip(&[("x.npy", 0, &npy(3)), ("y.npy", 0, &npy(5))]));
    let mut each = Records::open_npz_each(&path, Cut::Rows).unwrap();
    assert_eq!(each.next().unwrap().1.unwrap().len(), 3);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(200).unwrap();
    let (name, records) = each.next().unwrap();
    let message = records.unwrap_err().to_string();
    assert_eq!(name, "y");
    assert!(message.contains("ends inside its header") && message.ends_with("found 200"), "{message}");
}

/// Cut off at every byte, and with every byte of the archive's own structures changed: an error or the right array, no
/// panic.
#[test]
fn broken_archives_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let x = npy(3);
    let good = zip(&[("x.npy", 0, &x)]);
    for end in 0..good.len() {
        let path = write(folder.path(), &good[..end]);
        let error = Records::open_npz([&path], "x", Cut::Rows).unwrap_err();
        assert!(
            matches!(&error, Error::Format { .. }) && error.to_string().starts_with(&format!("{path:?}: "))
        );
    }
    for at in (0..35).chain(35 + x.len()..good.len()) {
        for change in [1, 0x80, 0xFF] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            let path = write(folder.path(), &bytes);
            match Records::open_npz([&path], "x", Cut::Rows) {
                Ok(records) => assert_eq!(records.len(), 3, "byte {at}"),
                Err(error) => assert!(
                    matches!(error, Error::Format { .. } | Error::NoTensor { .. }),
                    "byte {at}: {error:?}"
                ),
            }
        }
    }
}
