//! Bytes as an archive of NumPy arrays: refused with a typed error, or every record of each array can be read.
#![no_main]

use twinbuf_mmap::{Cut, Error, Records};

#[path = "../../mmap/tests/fuzz_bodies/headers.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    body::headers(bytes, |path, cut| Records::open_npz([path], "x", cut));
    body::headers(bytes, |path, cut| {
        let each: Vec<_> = Records::open_npz_each(path, Cut::Rows)?.collect();
        for (name, _) in &each {
            // Opened by its name alone, it is the same.
            let told = |opened: Result<Records, Error>| {
                opened.map(|found| (found.len(), found.shape().to_vec())).map_err(|error| error.to_string())
            };
            let same = Records::open_npz_each(path, cut)?.find(|(other, _)| other == name).expect("the name");
            assert_eq!(told(Records::open_npz([path], name, cut)), told(same.1), "{name}");
        }
        Records::open_npz([path], each.first().map_or("", |(name, _)| name), cut)
    });
});
