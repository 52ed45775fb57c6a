//! The driver that the shared library exports. Data flows from `calls` (the `cu*` functions) through `machine`
//! (streams, events, memory) to `machine::worker` (a stream's thread). `clock` checks accesses on the way, `guard`
//! those of the program to page-locked and managed memory; `capture` rejects the calls that a captured stream forbids.
//!
//! The rlib that test code links compiles these functions too, so that lints and unit tests see them, but no test calls
//! its `cu*` functions: the driver's state is in the shared library that `build.rs` makes of them.

mod calls;
mod capture;
mod clock;
mod codes;
mod failures;
mod faults;
mod guard;
mod hooks;
mod machine;
mod operand;
mod ptx;
mod stack;
mod violation;

#[cfg(not(driver))]
pub(crate) use hooks::{Hooks, Texts};

/// The name that programs load the driver by. Exported only to have it in the library's table of names:
/// [`install`](crate::install) makes it the SONAME. As built, the SONAME is `libcuda.so` (`build.rs`), for tests in one
/// process.
pub(crate) const NAME: &str = "libcuda.so.1";

#[unsafe(export_name = "libcuda.so.1")]
static SONAME: u8 = 0;

/// Whether a number is a `CUresult` that this driver can return as an error.
pub(crate) fn is_error(code: u32) -> bool {
    code != codes::SUCCESS && codes::describe(code).is_some()
}
