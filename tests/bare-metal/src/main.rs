//! Moves values through a static ring on bare x86_64 Linux: no std, no alloc, no libc, no panic.
//!
//! It exits with 0 if all is right. The panic handler calls a function that does not exist: if the optimised
//! program had a path to a panic, in the ring or in here, it would not link.

#![no_std]
#![no_main]

use core::arch::{asm, global_asm};
use core::hint::black_box;
use core::pin::pin;
use core::task::{Context, Poll, Waker};

use twinbuf_core::{DoubleBuffer, TryAcquireError, TryRecvError};

static RING: DoubleBuffer<u32> = DoubleBuffer::new([0, 0]);

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

/// The line of a check that failed.
struct Wrong(u32);

/// What `assert!` would be if it did not panic.
macro_rules! require {
    ($condition:expr) => {
        if !$condition {
            return Err(Wrong(line!()));
        }
    };
}

/// All kinds of call on either side.
fn check() -> Result<(), Wrong> {
    let Some((mut tx, mut rx)) = RING.try_split_static() else { return Err(Wrong(line!())) };
    require!(RING.try_split_static().is_none());
    for value in 0..black_box(1000) {
        require!(matches!(rx.try_recv(), Err(TryRecvError::Empty)));
        let Ok(mut slot) = tx.try_acquire() else { return Err(Wrong(line!())) };
        *slot = value;
        require!(slot.commit().is_ok());
        let replaced = tx.fill(|slot| core::mem::replace(slot, value + 1));
        require!(replaced.is_ok());
        require!(matches!(tx.try_acquire(), Err(TryAcquireError::Full)));
        require!(matches!(rx.try_recv(), Ok(Some(slot)) if *slot == value));
        require!(matches!(rx.recv(), Ok(Some(slot)) if *slot.keep() == value + 1));
    }
    let mut cx = Context::from_waker(Waker::noop());
    require!(rx.poll_recv(&mut cx).is_pending());
    require!(matches!(pin!(tx.acquire_async()).poll(&mut cx), Poll::Ready(Ok(_))));
    tx.finish();
    require!(matches!(pin!(rx.recv_async()).poll(&mut cx), Poll::Ready(Ok(None))));
    require!(matches!(rx.recv(), Ok(None)));
    Ok(())
}

unsafe extern "C" {
    safe fn there_is_a_path_to_a_panic() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    there_is_a_path_to_a_panic()
}
