//! The guard: page-locked memory is mapped twice. The device works through one mapping. The other one is the program's:
//! its pages are closed while a copy may use them, so that an access which no synchronization orders stops at its
//! instruction, with its call stack.
//!
//! Pages are coarser than copies. If a closed page is touched at a byte that no copy uses, the handler opens the page for
//! one instruction (the processor's trap flag), and closes it again.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::machine::{lock, stopped};

/// The size of a page on x86-64.
pub(super) const PAGE: u64 = 4096;

const OPEN: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// A range of pages, from and to as offsets, and the `PROT_*` that the program has there.
pub(super) type Closed = (u64, u64, c_int);

/// The memory of one allocation.
pub(super) struct Mapping {
    /// Where the program sees it.
    pub(super) program: u64,
    /// Where the device sees it.
    pub(super) device: u64,
    pub(super) bytes: u64,
    length: usize,
    closed: Vec<Closed>,
}

impl Mapping {
    /// `None` if there is no memory.
    pub(super) fn new(bytes: u64) -> Option<Self> {
        static HANDLERS: OnceLock<()> = OnceLock::new();
        HANDLERS.get_or_init(handle_signals);
        let bytes = bytes.checked_next_multiple_of(PAGE)?;
        let length = usize::try_from(bytes).ok()?;
        // SAFETY: the name is a C string.
        let file = unsafe { libc::memfd_create(c"cuda-sim".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return None;
        }
        // SAFETY: just opened, and owned by nothing else.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        // SAFETY: the file is open.
        if unsafe { libc::ftruncate(file.as_raw_fd(), i64::try_from(bytes).ok()?) } != 0 {
            return None;
        }
        let map = || {
            // SAFETY: a new mapping of an open file, where the kernel finds room.
            let at = unsafe { libc::mmap(null_mut(), length, OPEN, libc::MAP_SHARED, file.as_raw_fd(), 0) };
            (at != libc::MAP_FAILED).then_some(at as u64)
        };
        let device = map()?;
        let mut mapping = Self { program: 0, device, bytes, length, closed: Vec::new() };
        mapping.program = map()?;
        Some(mapping)
    }

    /// Opens all pages but these.
    pub(super) fn close(&mut self, closed: Vec<Closed>) {
        for &(from, to, _) in self.closed.iter().filter(|old| !closed.contains(old)) {
            self.protect(from, to, OPEN);
        }
        for &(from, to, prot) in closed.iter().filter(|new| !self.closed.contains(new)) {
            self.protect(from, to, prot);
        }
        self.closed = closed;
    }

    /// Opens the page of this offset for one instruction of this thread.
    pub(super) fn open_once(&self, offset: u64) {
        let page = offset / PAGE * PAGE;
        self.protect(page, page + PAGE, OPEN);
        STEPPED.with_borrow_mut(|pages| pages.push((self.program, page)));
    }

    /// Closes the page again.
    fn close_again(&self, page: u64) {
        for &(from, to, prot) in &self.closed {
            if from <= page && page < to {
                self.protect(page, page + PAGE, prot);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[allow(clippy::cast_possible_truncation, reason = "x86-64")]
    fn protect(&self, from: u64, to: u64, prot: c_int) {
        // SAFETY: pages of the program's mapping, which this owns. Whoever has references into them is who this stops.
        let code =
            unsafe { libc::mprotect((self.program + from) as *mut c_void, (to - from) as usize, prot) };
        assert_eq!(code, 0, "mprotect: {}", std::io::Error::last_os_error());
    }

    /// Elsewhere there is no trap flag: no page is ever closed.
    #[cfg(not(target_arch = "x86_64"))]
    fn protect(&self, _from: u64, _to: u64, _prot: c_int) {}
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for at in [self.program, self.device].into_iter().filter(|at| *at != 0) {
            // SAFETY: mapped by `new` with this length. The owner has seen to it that nothing uses it any more.
            unsafe { libc::munmap(at as *mut c_void, self.length) };
        }
    }
}

thread_local! {
    /// The pages that are open for this thread's next instruction: their mapping, and their offset in it.
    static STEPPED: RefCell<Vec<(u64, u64)>> = const { RefCell::new(Vec::new()) };
}

/// The handlers that were there before, of SIGSEGV and of SIGTRAP.
static BEFORE: [OnceLock<libc::sigaction>; 2] = [const { OnceLock::new() }; 2];

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

fn handle_signals() {
    let handlers: [(c_int, Handler); 2] = [(libc::SIGSEGV, on_fault), (libc::SIGTRAP, on_step)];
    for ((signal, handler), before) in handlers.into_iter().zip(&BEFORE) {
        // SAFETY: all zero is a value of this type.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as usize;
        // On the thread's own stack: to take the call stack needs more than an alternate one has.
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: as above.
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: both are valid. The handlers run where an instruction of the program has stopped: never inside this
        // driver, which touches the program's mapping nowhere, and so never under its lock or an allocator's.
        unsafe { libc::sigaction(signal, &raw const action, &raw mut old) };
        let _ = before.set(old);
    }
}

/// Gives a signal that is not the guard's to whoever had it before.
fn pass_on(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
    before: &OnceLock<libc::sigaction>,
) {
    let Some(before) = before.get() else { return };
    if before.sa_sigaction == libc::SIG_DFL || before.sa_sigaction == libc::SIG_IGN {
        // It ends the process when the instruction runs again.
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

/// What becomes of an access that a closed page stopped.
pub(super) enum Verdict {
    /// Some other fault.
    Foreign,
    /// The page is open now: the access was a violation, and has been reported.
    Opened,
    /// No copy uses the byte: the page is open for one instruction.
    Step,
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives the handler a valid one.
    let info_of = unsafe { &*info };
    // SAFETY: it is that of SIGSEGV, which has an address.
    let address = unsafe { info_of.si_addr() } as u64;
    match stopped(address, was_write(context)) {
        Verdict::Foreign => pass_on(signal, info, context, &BEFORE[0]),
        Verdict::Opened => {}
        Verdict::Step => trap_after_this(context, true),
    }
}

extern "C" fn on_step(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let pages = STEPPED.take();
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
