//! Bytes as a plan over records. The plan must cover every record exactly once.
#![no_main]

#[path = "../../mmap/tests/fuzz_bodies/plan.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| body::plan(bytes));
