//! The tests of the public API that need no program of their own, by subject: one program links faster than many.

#[path = "../common/asked.rs"]
mod asked;
#[cfg(unix)]
#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
#[path = "../common/disk.rs"]
mod disk;

mod bad_files;
mod bad_headers;
#[cfg(target_os = "linux")]
mod cache;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod changed;
mod corpus;
#[cfg(target_os = "linux")]
mod damaged;
mod fingerprint;
mod golden;
mod layouts;
mod lists;
mod npz;
mod ragged;
mod read;
#[cfg(target_os = "linux")]
mod read_modes;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod refused;
#[cfg(feature = "serde")]
mod saved;
#[cfg(target_os = "linux")]
mod sparse;
#[cfg(feature = "safetensors")]
mod tensors;
mod transform;
