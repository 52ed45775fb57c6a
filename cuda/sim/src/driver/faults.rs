//! The handlers of SIGSEGV and SIGTRAP: an access to a closed page of memory that the program sees stops here (`guard`).
//! To open a page for one instruction, they set the processor's trap flag.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::guard::{Verdict, stepped};
use super::machine::{is_forked, lock, stopped};
use super::operand::Instruction;
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
        // There was no handler. The signal is sent once more, for the default action: after a breakpoint, or if a program sent
        // it, no instruction runs again that would do so.
        // SAFETY: the action is the one that the process had.
        unsafe { sys::sigaction(signal, before, null_mut()) };
        // SAFETY: takes a plain value.
        unsafe { sys::raise(signal) };
        return;
    }
    // SAFETY: sigaction returned this handler for this signal. A handler without SA_SIGINFO takes only the signal
    // number, and ignores the other arguments.
    let handler = unsafe { std::mem::transmute::<usize, Handler>(before.handler) };
    handler(signal, info, context);
}

/// Opens a range of closed pages without the driver's lock. Returns `false` if the driver has no memory at this address.
fn open_in_child(address: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let range = |line: &str| {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
    };
    let ours = maps.lines().filter(|line| line.contains("/memfd:cuda-sim")).filter_map(range);
    ours.filter(|(from, to)| (*from..*to).contains(&address)).any(|(from, to)| {
        let prot = sys::PROT_READ | sys::PROT_WRITE;
        let Ok(bytes) = usize::try_from(to - from) else { return false };
        // SAFETY: pages of page-locked or managed memory, which are open where there is no guard.
        unsafe { sys::mprotect(from as *mut c_void, bytes, prot) == 0 }
    })
}

extern "C" fn on_fault(signal: c_int, info: *mut SigInfo, context: *mut c_void) {
    // SAFETY: the kernel gives the handler a valid one.
    let address = unsafe { (*info).address } as u64;
    // The lock may be held for good.
    if is_forked() {
        if !open_in_child(address) {
            pass_on(signal, info, context, &BEFORE[0]);
        }
        return;
    }
    let mut instruction = Instruction::stopped(context);
    let write = instruction.was_write();
    match stopped(address, write, &mut instruction) {
        Verdict::Foreign => pass_on(signal, info, context, &BEFORE[0]),
        Verdict::Resume => {}
        Verdict::Step => instruction.trap_after_this(true),
    }
}

extern "C" fn on_step(signal: c_int, info: *mut SigInfo, context: *mut c_void) {
    let pages = stepped();
    if pages.is_empty() {
        return pass_on(signal, info, context, &BEFORE[1]);
    }
    Instruction::stopped(context).trap_after_this(false);
    let core = lock();
    for (program, page) in pages {
        if let Some(mapping) = core.mapping(program) {
            mapping.close_again(page);
        }
    }
}
