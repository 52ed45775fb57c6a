//! The driver itself, which the cdylib exports: data flows from `calls` (the `cu*` functions) through `machine`
//! (streams, events, memory) to `worker` (what a stream does), with `clock` checking every access on the way and
//! `capture` the calls that a captured stream forbids.
//!
//! In the rlib that test code links these functions are dead: their state is the cdylib's own.

mod calls;
mod capture;
mod clock;
mod codes;
mod failures;
mod hooks;
mod machine;
mod worker;

/// Whether a number is a `CUresult` that this driver can return as an error.
pub(crate) fn is_error(code: u32) -> bool {
    code != codes::SUCCESS && codes::describe(code).is_some()
}
