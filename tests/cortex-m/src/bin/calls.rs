//! The calls of `tests/bare-metal` on a Cortex-M. `.text` is the ring, these calls, and what starts and ends the program.

#![no_std]
#![no_main]

#[path = "../../../bare-metal/src/check.rs"]
mod check;
#[path = "../machine.rs"]
mod machine;

/// What a ring takes beside its slots.
const _: () = assert!(size_of::<twinbuf_core::DoubleBuffer<()>>() <= 64);

pub(crate) fn main() -> ! {
    machine::exit(check::check().is_ok())
}

/// There are no interrupts.
#[unsafe(no_mangle)]
extern "C" fn tick() {}
