//! The handlers of SIGSEGV and SIGTRAP: an access to a closed page of page-locked memory stops here (`guard`). To open a
//! page for one instruction, they set the processor's trap flag.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::guard::{Verdict, stepped};
use super::machine::{lock, stopped};

/// The handlers that were there before, of SIGSEGV and of SIGTRAP.
static BEFORE: [OnceLock<libc::sigaction>; 2] = [const { OnceLock::new() }; 2];

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// Installs the handlers, once.
pub(super) fn handle() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(install);
}

fn install() {
    let handlers: [(c_int, Handler); 2] = [(libc::SIGSEGV, on_fault), (libc::SIGTRAP, on_step)];
    for ((signal, handler), before) in handlers.into_iter().zip(&BEFORE) {
        // SAFETY: all zero is a value of this type.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as usize;
        // Run the handlers on the thread's own stack: an alternate stack is too small to take a call stack.
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: as above.
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: both are valid. The handlers act only on faults of the program's own instructions, so this thread holds
        // neither this driver's lock nor an allocator's. `stopped` leaves faults inside this driver alone.
        unsafe { libc::sigaction(signal, &raw const action, &raw mut old) };
        let _ = before.set(old);
    }
}

/// Passes a signal that is not the guard's to the handler that was installed before.
fn pass_on(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
    before: &OnceLock<libc::sigaction>,
) {
    let Some(before) = before.get() else { return };
    if before.sa_sigaction == libc::SIG_DFL || before.sa_sigaction == libc::SIG_IGN {
        // There was no handler. The default action ends the process when the instruction runs again.
        // SAFETY: the action is the one that the process had.
        unsafe { libc::sigaction(signal, before, null_mut()) };
        return;
    }
    // SAFETY: a handler that was installed for this signal; those without SA_SIGINFO ignore the rest.
    let handler = unsafe { std::mem::transmute::<usize, Handler>(before.sa_sigaction) };
    handler(signal, info, context);
}

/// The processor's trap flag, in the saved flags.
#[cfg(target_arch = "x86_64")]
fn trap_after_this(context: *mut c_void, on: bool) {
    const TRAP: i64 = 0x100;
    // SAFETY: the kernel gives the handler the context of the stopped thread.
    let flags =
        unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_EFL as usize] };
    *flags = if on { *flags | TRAP } else { *flags & !TRAP };
}

/// Whether the access that faulted was a write: bit 1 of the page fault's error code.
#[cfg(target_arch = "x86_64")]
fn was_write(context: *const c_void) -> bool {
    // SAFETY: as in `trap_after_this`.
    let code = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_ERR as usize] };
    code & 2 != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn trap_after_this(_context: *mut c_void, _on: bool) {}

#[cfg(not(target_arch = "x86_64"))]
fn was_write(_context: *const c_void) -> bool {
    false
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives the handler a valid one.
    let info_of = unsafe { &*info };
    // SAFETY: the signal is SIGSEGV, whose information has an address.
    let address = unsafe { info_of.si_addr() } as u64;
    match stopped(address, was_write(context)) {
        Verdict::Foreign => pass_on(signal, info, context, &BEFORE[0]),
        Verdict::Opened => {}
        Verdict::Step => trap_after_this(context, true),
    }
}

extern "C" fn on_step(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
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
