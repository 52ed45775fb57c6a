//! The calls of `tests/bare-metal` on a Cortex-M. `.text` contains the ring, these calls, and the code that starts and
//! ends the program.

#![no_std]
#![no_main]

#[path = "../../../bare-metal/src/check.rs"]
mod check;
#[path = "../machine.rs"]
mod machine;

/// The size of a ring without its slots.
const _: () = assert!(size_of::<twinbuf_core::DoubleBuffer<()>>() <= 64);

pub(crate) fn main() -> ! {
    machine::exit(check::check().is_ok())
}

/// There are no interrupts.
#[unsafe(no_mangle)]
extern "C" fn tick() {}
