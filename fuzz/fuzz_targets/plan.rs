//! Bytes as a plan over records: it must cover each as often as its last batch allows, or be refused.
#![no_main]

#[path = "../../mmap/tests/fuzz_bodies/plan.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| body::plan(bytes));
