//! Bytes as a token file with a header of llm.c: refused with a typed error, or every record can be read.
#![no_main]

use twinbuf_mmap::Records;

#[path = "../../mmap/tests/fuzz_bodies/headers.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    body::headers(bytes, |path, cut| Records::open_llm_c([path], cut));
});
