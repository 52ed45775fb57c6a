//! A software CUDA driver for tests: no device, no toolkit, 78 of the `cu*` calls.
//!
//! - A stream is a worker thread. Device memory is host memory behind addresses that cannot be dereferenced
//!   (those of managed memory can).
//! - Copies run late and in pieces, with seeded delays, so reusing a buffer too early can corrupt data.
//! - A checker compares vector clocks at accesses to page-locked and device memory (those of the program itself on
//!   x86-64 only). It reports missing happens-before edges, even where the data are right.
//! - Calls can be made to fail, and so can the work that they enqueue. Resources that were not freed are counted
//!   ([`Live`]).
//!
//! Tests use [`Sim`]. The program `cuda-sim` runs other programs on the driver ([`install`], [`run`]). The driver is a
//! shared library that `build.rs` compiles and this one contains. README.md lists where it behaves like the real
//! driver, and where it does not.
//!
//! Linux with glibc: the driver is found by its SONAME. In a build for another C library, or for another system than
//! the one that builds, this library has no driver, and [`Sim::start`] panics; outside Linux this library is empty.
#![cfg(target_os = "linux")]

mod abi;
#[cfg(not(driver))]
mod control;
#[allow(non_snake_case, reason = "the names of the CUDA driver API")]
mod driver;
mod options;
mod sys;
#[cfg(not(driver))]
mod tool;

pub use abi::Live;
#[cfg(not(driver))]
pub use control::{Control, DRIVER_VARIABLE, Held, Kernel, Sim, checksum_of};
pub use options::{Failure, Installed, Options};
#[cfg(not(driver))]
pub use tool::{Outcome, install, run};

/// FNV-1a, 64 bits: <https://datatracker.ietf.org/doc/html/draft-eastlake-fnv>.
pub(crate) const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;
/// The prime of FNV-1a, from the same source.
pub(crate) const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;
