//! The driver that the cdylib exports. Data flows from `calls` (the `cu*` functions) through `machine` (streams, events,
//! memory) to `machine::worker` (a stream's thread). `clock` checks every access on the way, `guard` those of the program to page-locked memory;
//! `capture` rejects the calls that a captured stream forbids.
//!
//! The rlib that test code links contains these functions too, but does not use them: the driver's state is in the
//! cdylib.

mod calls;
mod capture;
mod clock;
mod codes;
mod failures;
mod faults;
mod guard;
mod hooks;
mod machine;
mod ptx;
mod stack;
mod violation;

/// Whether a number is a `CUresult` that this driver can return as an error.
pub(crate) fn is_error(code: u32) -> bool {
    code != codes::SUCCESS && codes::describe(code).is_some()
}
