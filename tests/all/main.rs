//! The tests of the public API that need no process of their own, by subject: one program links faster than many.
//!
//! Those of `example_*`, but `ndarray`, start the examples, which `cargo test --test all` does not build: `cargo
//! build --examples` does.

#[path = "../common/mod.rs"]
mod common;

mod author;
mod batches;
mod breakdown;
#[cfg(unix)]
mod checkpoint;
mod elastic;
mod example_decode;
mod example_ndarray;
mod example_train;
#[cfg(target_os = "linux")]
mod example_train_cuda;
mod example_validation;
mod faults;
mod fields;
mod generate;
mod histories;
mod owned;
mod pipe;
mod promises;
mod ragged;
#[cfg(target_os = "linux")]
mod reading;
mod report;
mod resume;
mod several;
mod slots;
mod stream;
#[cfg(target_os = "linux")]
mod stream_device;
mod stuck;
mod trace;
#[cfg(target_os = "linux")]
mod trace_device;
mod transform;
#[cfg(target_os = "linux")]
mod upload;
mod waiting;
mod workers;
