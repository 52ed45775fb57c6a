//! Bytes as operations on a ring, against the oracle that the property test uses too.
#![no_main]

#[expect(dead_code, reason = "only its replay is needed here")]
#[path = "../../core/tests/oracle/mod.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| oracle::replay(bytes));
