//! The handlers of SIGSEGV and SIGTRAP: an access to a closed page of memory that the program sees stops here (`guard`).
//! To open a page for one instruction, they set the processor's trap flag.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::guard::{Verdict, stepped};
use super::machine::{lock, stopped};
use super::operand::width;
use crate::sys::{self, SigAction, SigInfo};

/// The handlers that were there before, of SIGSEGV and of SIGTRAP.
static BEFORE: [OnceLock<SigAction>; 2] = [const { OnceLock::new() }; 2];

type Handler = extern "C" fn(c_int, *mut SigInfo, *mut c_void);

/// Installs the handlers, once.
pub(super) fn handle() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(install);
}

fn install() {
    let handlers: [(c_int, Handler); 2] = [(sys::SIGSEGV, on_fault), (sys::SIGTRAP, on_step)];
    for ((signal, handler), before) in handlers.into_iter().zip(&BEFORE) {
        // Run the handlers on the thread's own stack: an alternate stack is too small to take a call stack.
        let action = SigAction { handler: handler as usize, flags: sys::SA_SIGINFO, ..SigAction::default() };
        let mut old = SigAction::default();
        // SAFETY: both pointers are valid. A handler acts only on faults of the program's own instructions: `stopped`
        // ignores faults inside this driver. So the thread that faults holds neither this driver's lock nor an allocator's.
        unsafe { sys::sigaction(signal, &raw const action, &raw mut old) };
        let _ = before.set(old);
    }
}

/// Passes a signal that is not the guard's to the handler that was installed before.
fn pass_on(signal: c_int, info: *mut SigInfo, context: *mut c_void, before: &OnceLock<SigAction>) {
    let Some(before) = before.get() else { return };
    if sys::NO_HANDLERS.contains(&before.handler) {
        // There was no handler. After a fault, the default action ends the process when the instruction runs again. A
        // breakpoint's instruction does not run again: its signal is sent once more.
        // SAFETY: the action is the one that the process had.
        unsafe { sys::sigaction(signal, before, null_mut()) };
        if signal == sys::SIGTRAP {
            // SAFETY: takes a plain value.
            unsafe { sys::raise(signal) };
        }
        return;
    }
    // SAFETY: sigaction returned this handler for this signal. A handler without SA_SIGINFO takes only the signal
    // number, and ignores the other arguments.
    let handler = unsafe { std::mem::transmute::<usize, Handler>(before.handler) };
    handler(signal, info, context);
}

/// The processor's trap flag, in the saved flags.
#[cfg(target_arch = "x86_64")]
fn trap_after_this(context: *mut c_void, on: bool) {
    const TRAP: i64 = 0x100;
    // SAFETY: the kernel gives the handler the context of the stopped thread.
    let flags = unsafe { &mut (*context.cast::<sys::Context>()).registers[sys::FLAGS] };
    *flags = if on { *flags | TRAP } else { *flags & !TRAP };
}

/// Whether the access that faulted was a write: bit 1 of the page fault's error code.
#[cfg(target_arch = "x86_64")]
fn was_write(context: *const c_void) -> bool {
    // SAFETY: as in `trap_after_this`.
    let code = unsafe { (*context.cast::<sys::Context>()).registers[sys::ERROR] };
    code & 2 != 0
}

/// The bytes of the access that an instruction of the program made.
#[cfg(target_arch = "x86_64")]
fn bytes(context: *const c_void, write: bool) -> u64 {
    // SAFETY: as in `trap_after_this`.
    let at = unsafe { (*context.cast::<sys::Context>()).registers[sys::INSTRUCTION] } as *const u8;
    // SAFETY: the processor has just read this instruction, and `width` reads no byte behind it.
    width((0..).map(|i| unsafe { at.wrapping_add(i).read() }), write)
}

#[cfg(not(target_arch = "x86_64"))]
fn trap_after_this(_context: *mut c_void, _on: bool) {}

#[cfg(not(target_arch = "x86_64"))]
fn bytes(_context: *const c_void, write: bool) -> u64 {
    width([], write)
}

#[cfg(not(target_arch = "x86_64"))]
fn was_write(_context: *const c_void) -> bool {
    false
}

extern "C" fn on_fault(signal: c_int, info: *mut SigInfo, context: *mut c_void) {
    // SAFETY: the kernel gives the handler a valid one.
    let address = unsafe { (*info).address } as u64;
    let write = was_write(context);
    match stopped(address, write, || bytes(context, write)) {
        Verdict::Foreign => pass_on(signal, info, context, &BEFORE[0]),
        Verdict::Opened => {}
        Verdict::Step => trap_after_this(context, true),
    }
}

extern "C" fn on_step(signal: c_int, info: *mut SigInfo, context: *mut c_void) {
    let pages = stepped();
    if pages.is_empty() {
        return pass_on(signal, info, context, &BEFORE[1]);
    }
    trap_after_this(context, false);
    let core = lock();
    for (program, page) in pages {
        if let Some(mapping) = core.mapping(program) {
            mapping.close_again(page);
        }
    }
}
