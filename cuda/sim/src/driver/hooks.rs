//! The functions that test code calls: the other end of [`Control`](crate::Control). Not CUDA calls. Those with a name of their
//! own, `twinbuf_sim_*`, programs may call too.

use std::ffi::{CStr, c_char, c_void};

use super::calls;
use super::machine::{self, changed, drain, lock, wait};
use super::violation::Violation;
use crate::abi::{Live, RawFailure};
use crate::options::Options;

/// What [`Control`](crate::Control) calls, found as one symbol.
#[repr(C)]
pub(crate) struct Hooks {
    pub(crate) start: extern "C" fn(&Options),
    pub(crate) inject: unsafe extern "C" fn(*const c_char, &RawFailure),
    pub(crate) injected: Texts,
    pub(crate) lose_context: extern "C" fn(u32),
    pub(crate) calls: unsafe extern "C" fn(*const c_char) -> u64,
    pub(crate) own_calls: unsafe extern "C" fn(*const c_char) -> u64,
    pub(crate) violations: Texts,
    pub(crate) live: extern "C" fn() -> Live,
    pub(crate) release: extern "C" fn(u64),
    pub(crate) acquire: extern "C" fn(u64),
    pub(crate) kernel: extern "C" fn(*mut c_void, u64, usize, bool, u8, u32, &mut u64) -> u32,
    pub(crate) checksum: extern "C" fn(u64, &mut u64) -> bool,
    pub(crate) peek: unsafe extern "C" fn(u64, *mut u8, usize) -> bool,
    pub(crate) allow: extern "C" fn(u64),
    pub(crate) wait_held: extern "C" fn(),
    pub(crate) drain: extern "C" fn(),
}

/// Writes texts with a NUL between to a pointer, if there is room for as many bytes as it returns.
pub(crate) type Texts = unsafe extern "C" fn(*mut u8, usize) -> usize;

#[unsafe(export_name = "twinbuf_sim_hooks")]
static HOOKS: Hooks = Hooks {
    start,
    inject,
    injected,
    lose_context,
    calls: twinbuf_sim_calls,
    own_calls,
    violations,
    live,
    release: twinbuf_sim_release,
    acquire: twinbuf_sim_acquire,
    kernel: twinbuf_sim_kernel,
    checksum,
    peek,
    allow,
    wait_held,
    drain,
};

/// Copies `lines` if there is room, and returns their number of bytes.
///
/// # Safety
///
/// `to` must be valid for `room` bytes.
unsafe fn give(lines: &str, to: *mut u8, room: usize) -> usize {
    if lines.len() <= room {
        // SAFETY: the caller's promise, and no more than `room` bytes.
        unsafe { std::ptr::copy_nonoverlapping(lines.as_ptr(), to, lines.len()) };
    }
    lines.len()
}

/// # Safety
///
/// `name` must be null or a C string.
unsafe fn text(name: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// `Sim::start`.
extern "C" fn start(options: &Options) {
    machine::start(*options);
}

/// `Control::inject`.
///
/// # Safety
///
/// `name` must be a C string.
unsafe extern "C" fn inject(name: *const c_char, failure: &RawFailure) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name) }.unwrap_or_default();
    lock().failures.arm(name, *failure);
}

/// Implements `Control::injected`: writes the names of the calls and operations that were made to fail, separated by NUL
/// bytes.
///
/// # Safety
///
/// `to` must be valid for `room` bytes.
unsafe extern "C" fn injected(to: *mut u8, room: usize) -> usize {
    let lines = lock().failures.happened.join("\0");
    // SAFETY: the caller's promise.
    unsafe { give(&lines, to, room) }
}

/// `Control::lose_context`.
extern "C" fn lose_context(code: u32) {
    lock().lost = code;
    changed();
}

/// `Control::calls` (null) and `Control::calls_of`.
///
/// # Safety
///
/// `name` must be null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name) };
    let core = lock();
    match name {
        Some(name) => core.calls.get(name.as_str()).copied().unwrap_or(0),
        // A wait that spins is counted under a second name too.
        None => core.calls.iter().filter(|(name, _)| !name.contains(' ')).map(|(_, calls)| calls).sum(),
    }
}

/// `Control::own_calls_of`.
///
/// # Safety
///
/// `name` must be a C string.
unsafe extern "C" fn own_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name) }.unwrap_or_default();
    machine::own_calls(&lock(), &name)
}

/// `Control::violations`: with a NUL between. They are cleared if there is room for them.
///
/// # Safety
///
/// `to` must be valid for `room` bytes.
unsafe extern "C" fn violations(to: *mut u8, room: usize) -> usize {
    let mut core = lock();
    let texts: Vec<&str> = core.violations.iter().map(Violation::text).collect();
    let lines = texts.join("\0");
    if lines.len() <= room {
        core.violations.clear();
    }
    // SAFETY: the caller's promise.
    unsafe { give(&lines, to, room) }
}

/// `Control::live`.
extern "C" fn live() -> Live {
    lock().live
}

/// `Control::release`.
#[unsafe(no_mangle)]
extern "C" fn twinbuf_sim_release(token: u64) {
    lock().release(token);
}

/// `Control::acquire`.
#[unsafe(no_mangle)]
extern "C" fn twinbuf_sim_acquire(token: u64) {
    lock().acquire(token);
}

/// `Control::kernel_read` (without `write`) and `Control::kernel_write`. The exported name is in call stacks.
#[unsafe(no_mangle)]
extern "C" fn twinbuf_sim_kernel(
    stream: *mut c_void,
    address: u64,
    bytes: usize,
    write: bool,
    value: u8,
    duration_us: u32,
    id: &mut u64,
) -> u32 {
    calls::launch(id, stream as u64, (address, bytes), write.then_some(value), duration_us)
}

/// `Control::checksum`: whether there is one.
extern "C" fn checksum(kernel: u64, sum: &mut u64) -> bool {
    let mut core = lock();
    loop {
        match core.kernels.get(&kernel) {
            None | Some(Some(Err(_))) => return false,
            Some(Some(Ok(found))) => {
                *sum = *found;
                return true;
            }
            Some(None) => core = wait(core),
        }
    }
}

/// `Control::peek`: whether an allocation holds the range, and has its contents.
///
/// # Safety
///
/// `to` must be valid for `bytes` bytes.
unsafe extern "C" fn peek(address: u64, to: *mut u8, bytes: usize) -> bool {
    let mut core = lock();
    let data = core.bytes(address, bytes);
    // SAFETY: the caller's promise, and `data` has `bytes` bytes.
    data.map(|data| unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, bytes) }).is_some()
}

/// `Control::hold`, and with `u64::MAX` its end.
extern "C" fn allow(pieces: u64) {
    lock().allowed = pieces;
    changed();
}

/// `Control::wait_held`.
extern "C" fn wait_held() {
    let mut core = lock();
    while core.held == 0 && core.allowed != u64::MAX {
        core = wait(core);
    }
}
