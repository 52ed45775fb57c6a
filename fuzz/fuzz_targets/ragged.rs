//! Bytes as an index of records of varying length (`.npy` or Megatron-LM's `.idx`): refused with a typed error, or every
//! record can be read.
#![no_main]

#[path = "../../mmap/tests/fuzz_bodies/ragged.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| body::ragged(bytes));
