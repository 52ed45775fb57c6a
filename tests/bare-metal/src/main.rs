//! Moves values through a static ring on bare x86_64 Linux: no std, no alloc, no libc, no panic.
//!
//! It exits with 0 if all checks pass. The panic handler calls a function that does not exist: if the
//! optimized program had a path to a panic, in the ring or here, it would not link.

#![no_std]
#![no_main]

mod check;

use core::arch::{asm, global_asm};

use check::{Wrong, check};

// The kernel enters at `_start` with an aligned stack and no return address.
global_asm!(".globl _start", "_start:", "xor ebp, ebp", "call {run}", "ud2", run = sym run);

extern "C" fn run() -> ! {
    let status = match check() {
        Ok(()) => 0,
        Err(Wrong(line)) => line & 0xff | 1,
    };
    // SAFETY: `exit_group` (231) takes one number and does not return.
    unsafe { asm!("syscall", in("rax") 231, in("rdi") status, options(noreturn, nostack)) }
}

unsafe extern "C" {
    safe fn there_is_a_path_to_a_panic() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    there_is_a_path_to_a_panic()
}
