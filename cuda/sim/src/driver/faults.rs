//! The handlers of SIGSEGV and SIGTRAP: an access to a closed page of memory that the program sees stops here (`guard`).
//! To open a page for one instruction, they set the processor's trap flag.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::Read;
use std::ptr::null_mut;
use std::str;
use std::sync::OnceLock;

use super::guard::{Closed, PAGE, Verdict, stepped};
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
        // Block other signals meanwhile: their handlers may use such a page too, and this thread may hold the lock.
        let mask = [u64::MAX; 16];
        let action = SigAction { handler: handler as usize, mask, flags: sys::SA_SIGINFO, restorer: 0 };
        let mut old = SigAction::default();
        // SAFETY: both pointers are valid. A handler takes locks only for faults of the program's own instructions, where the
        // thread holds neither this driver's lock nor an allocator's: `stopped` tells faults inside this driver.
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

/// Finds the pages of one protection around an address of page-locked or managed memory. Takes no lock, not even an
/// allocator's.
fn pages_at(address: u64) -> Option<Closed> {
    let pages = |line: &str| {
        let mut words = line.split_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        let prot = words.next()?.bytes().zip([(b'r', sys::PROT_READ), (b'w', sys::PROT_WRITE)]);
        let prot = prot.filter(|(found, (named, _))| found == named).map(|(_, (_, prot))| prot).sum();
        Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?, prot))
    };
    let mut maps = File::open("/proc/self/maps").ok()?;
    let (mut text, mut rest) = ([0; 1 << 13], 0); // a path has at most 4096 bytes
    loop {
        let all = rest + maps.read(&mut text[rest..]).ok().filter(|read| *read > 0)?;
        let end = text[..all].iter().rposition(|byte| *byte == b'\n').map_or(all, |last| last + 1);
        let lines = text[..end].split(|byte| *byte == b'\n').filter_map(|line| str::from_utf8(line).ok());
        let mut ours = lines.filter(|line| line.contains("/memfd:cuda-sim")).filter_map(pages);
        if let Some(found) = ours.find(|(from, to, _)| (*from..*to).contains(&address)) {
            return Some(found);
        }
        text.copy_within(end..all, 0);
        rest = all - end;
    }
}

/// Sets the protection of such pages without the driver's lock.
fn protect((from, to, prot): Closed) -> bool {
    let Ok(bytes) = usize::try_from(to - from) else { return false };
    // SAFETY: pages of page-locked or managed memory, which are open where there is no guard.
    unsafe { sys::mprotect(from as *mut c_void, bytes, prot) == 0 }
}

const OPEN: c_int = sys::PROT_READ | sys::PROT_WRITE;

thread_local! {
    /// The pages that are open for this thread's next instruction within a call of the driver, as they were. A signal's handler
    /// may run before that instruction, and use others.
    static OPENED: Cell<[Option<Closed>; 8]> = const { Cell::new([None; 8]) };
}

/// Opens a page for one instruction of the driver itself: a call stores its result beside what a copy uses.
fn open_in_call(address: u64) -> bool {
    let Some((.., prot)) = pages_at(address) else { return false };
    let (page, end) = (address / PAGE * PAGE, address / PAGE * PAGE + PAGE);
    let mut opened = OPENED.get();
    let Some(free) = opened.iter_mut().find(|page| page.is_none()) else { return false };
    *free = Some((page, end, prot));
    OPENED.set(opened);
    protect((page, end, OPEN))
}

extern "C" fn on_fault(signal: c_int, info: *mut SigInfo, context: *mut c_void) {
    // SAFETY: the kernel gives the handler a valid one.
    let address = unsafe { (*info).address } as u64;
    // The lock may be held for good.
    if is_forked() {
        if !pages_at(address).is_some_and(|(from, to, _)| protect((from, to, OPEN))) {
            pass_on(signal, info, context, &BEFORE[0]);
        }
        return;
    }
    let mut instruction = Instruction::stopped(context);
    let write = instruction.was_write();
    match stopped(address, write, &mut instruction) {
        Verdict::Foreign => pass_on(signal, info, context, &BEFORE[0]),
        Verdict::InCall if !open_in_call(address) => pass_on(signal, info, context, &BEFORE[0]),
        Verdict::Resume => {}
        Verdict::InCall | Verdict::Step => instruction.trap_after_this(true),
    }
}

extern "C" fn on_step(signal: c_int, info: *mut SigInfo, context: *mut c_void) {
    let opened = OPENED.take();
    if opened[0].is_some() {
        Instruction::stopped(context).trap_after_this(false);
        return opened.into_iter().flatten().for_each(|page| _ = protect(page));
    }
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
