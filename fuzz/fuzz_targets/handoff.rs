//! Bytes as operations on a ring, checked by the same oracle as the property test.
#![no_main]

#[expect(dead_code, reason = "only its replay is needed here")]
#[path = "../../core/tests/oracle/mod.rs"]
mod oracle;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| oracle::replay(bytes));
