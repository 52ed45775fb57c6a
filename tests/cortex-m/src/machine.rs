//! What the programs need from the processor and from QEMU: a start, one interrupt, an exit status.

#![allow(dead_code)] // Not every program uses all of it.

use core::arch::{asm, global_asm};

// The vector table: the stack, the start, NMI to SVCall and PendSV as traps, SysTick. The interrupt passes the address
// at which it stopped the program: the seventh word pushed by the processor.
global_asm!(
    ".section .vectors,\"a\"",
    ".word stack_top",
    ".word start",
    ".rept 13",
    ".word trap",
    ".endr",
    ".word systick",
    ".text",
    ".thumb_func",
    ".globl systick",
    "systick:",
    "ldr r0, [sp, #24]",
    "ldr r1, =tick",
    "bx r1",
    ".ltorg",
);

#[unsafe(no_mangle)]
extern "C" fn start() -> ! {
    crate::main()
}

#[unsafe(no_mangle)]
extern "C" fn trap() -> ! {
    write("exception\n\0");
    exit(false)
}

const SYST_CSR: *mut u32 = 0xe000_e010 as *mut u32;
const SYST_RVR: *mut u32 = 0xe000_e014 as *mut u32;
const SYST_CVR: *mut u32 = 0xe000_e018 as *mut u32;
const ICSR: *mut u32 = 0xe000_ed04 as *mut u32;

/// Writes a register of the system control space.
fn store(register: *mut u32, value: u32) {
    // SAFETY: one of the registers above. Every Cortex-M with SysTick has them, and none of them affects memory.
    unsafe { register.write_volatile(value) }
}

/// Interrupts the program `ticks` of the processor's clock from now, and again and again if it is not set anew.
pub(crate) fn interrupt_after(ticks: u32) {
    store(SYST_RVR, ticks);
    store(SYST_CVR, 0);
    store(SYST_CSR, 0b111);
}

/// Interrupts the program now, or after the current interrupt.
pub(crate) fn interrupt_now() {
    const PENDSTSET: u32 = 1 << 26;
    store(ICSR, PENDSTSET);
}

/// Turns the interrupt off.
pub(crate) fn stop_interrupts() {
    const PENDSTCLR: u32 = 1 << 25;
    store(SYST_CSR, 0);
    store(ICSR, PENDSTCLR);
    // SAFETY: barriers: the interrupt is off before the code that follows.
    unsafe { asm!("dsb", "isb", options(nostack)) }
}

/// Sleeps until an interrupt.
pub(crate) fn wait_for_interrupt() {
    // SAFETY: the statics may change during the instruction, so the compiler must assume it: no `nomem`.
    unsafe { asm!("wfi", options(nostack)) }
}

/// A semihosting call to the debugger, here QEMU.
fn semihosting(call: u32, argument: usize) {
    // SAFETY: the caller passes a valid argument for the call; QEMU changes only r0.
    unsafe { asm!("bkpt #0xab", inout("r0") call => _, in("r1") argument, options(nostack)) }
}

/// Writes a text that ends with a zero.
pub(crate) fn write(text: &str) {
    const SYS_WRITE0: u32 = 4;
    semihosting(SYS_WRITE0, text.as_ptr() as usize);
}

/// Writes a number. By subtraction: a Cortex-M0 has no division.
pub(crate) fn write_number(mut number: u32) {
    const SYS_WRITEC: u32 = 3;
    let mut leading = true;
    for power in [1_000_000_000, 100_000_000, 10_000_000, 1_000_000, 100_000, 10_000, 1000, 100, 10, 1] {
        let mut digit = b'0';
        while number >= power {
            number -= power;
            digit += 1;
        }
        leading &= digit == b'0' && power != 1;
        if !leading {
            semihosting(SYS_WRITEC, &raw const digit as usize);
        }
    }
}

/// Ends QEMU, with status 0 or 1.
pub(crate) fn exit(passed: bool) -> ! {
    const SYS_EXIT: u32 = 0x18;
    const APPLICATION_EXIT: usize = 0x2_0026;
    const RUN_TIME_ERROR: usize = 0x2_0023;
    loop {
        semihosting(SYS_EXIT, if passed { APPLICATION_EXIT } else { RUN_TIME_ERROR });
    }
}

#[cfg(feature = "portable-atomic")]
mod critical {
    use core::arch::asm;

    use critical_section::{Impl, RawRestoreState, set_impl};

    struct Interrupts;
    set_impl!(Interrupts);

    // SAFETY: there is one core, where a masked interrupt does not run; `release` gets the value that its `acquire`
    // returned.
    unsafe impl Impl for Interrupts {
        unsafe fn acquire() -> RawRestoreState {
            let masked: u32;
            // SAFETY: reads PRIMASK and sets it. No `nomem`: no access may move out of the section.
            unsafe { asm!("mrs {}, PRIMASK", "cpsid i", out(reg) masked, options(nostack)) };
            masked & 1 != 0
        }

        unsafe fn release(masked: RawRestoreState) {
            if !masked {
                // SAFETY: interrupts were on before the section.
                unsafe { asm!("cpsie i", options(nostack)) };
            }
        }
    }
}

unsafe extern "C" {
    safe fn there_is_a_path_to_a_panic() -> !;
}

/// A program with a path to a panic does not link.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    there_is_a_path_to_a_panic()
}
