//! Bytes as an archive of NumPy arrays: refused with a typed error, or every record of each array can be read.
#![no_main]

use twinbuf_mmap::{Cut, Records};

#[path = "../../mmap/tests/fuzz_bodies/headers.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    body::headers(bytes, |path, cut| Records::open_npz([path], "x", cut));
    body::headers(bytes, |path, cut| {
        let each: Vec<_> = Records::open_npz_each(path, Cut::Rows)?.collect();
        for (name, _) in &each {
            // Opened by its name alone, it is the same.
            match (
                Records::open_npz([path], name, cut),
                Records::open_npz_each(path, cut)?.find(|(n, _)| n == name),
            ) {
                (Ok(one), Some((_, Ok(same)))) => {
                    assert_eq!((one.len(), one.shape()), (same.len(), same.shape()))
                }
                (Err(one), Some((_, Err(same)))) => assert_eq!(one.to_string(), same.to_string()),
                other => panic!("{name}: {other:?}"),
            }
        }
        Records::open_npz([path], each.first().map_or("", |(name, _)| name), cut)
    });
});
