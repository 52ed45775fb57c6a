//! Bytes as a model (`safetensors`, GGUF or an index): refused with a typed error, or every tensor can be read.
#![no_main]

#[path = "../../mmap/tests/fuzz_bodies/tensors.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| body::tensors(bytes));
