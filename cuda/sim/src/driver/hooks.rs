//! The functions that test code calls, `twinbuf_sim_*`: the other end of [`Control`](crate::Control). Not CUDA calls.

use std::ffi::{CStr, c_char, c_void};

use super::calls;
use super::machine::{self, changed, lock, wait};
use super::violation::Violation;
use crate::abi::{Live, RawFailure};
use crate::options::Options;

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
///
/// # Safety
///
/// The pointer must be valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_start(options: *const Options) {
    // SAFETY: the caller's promise.
    machine::start(unsafe { *options });
}

/// `Control::inject`.
///
/// # Safety
///
/// Both pointers must be valid, the first a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_inject(name: *const c_char, failure: *const RawFailure) {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name) }.unwrap_or_default();
    // SAFETY: the caller's promise.
    let failure = unsafe { *failure };
    lock().failures.arm(name, failure);
}

/// Implements `Control::injected`: writes the names of the calls and operations that were made to fail, separated by NUL
/// bytes.
///
/// # Safety
///
/// `to` must be valid for `room` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_injected(to: *mut u8, room: usize) -> usize {
    let lines = lock().failures.happened.join("\0");
    // SAFETY: the caller's promise.
    unsafe { give(&lines, to, room) }
}

/// `Control::lose_context`.
#[unsafe(no_mangle)]
extern "C" fn twinbuf_sim_lose_context(code: u32) {
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
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_own_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name) }.unwrap_or_default();
    machine::own_calls(&lock(), &name)
}

/// `Control::violations`: with a NUL between. They are cleared if there is room for them.
///
/// # Safety
///
/// `to` must be valid for `room` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_violations(to: *mut u8, room: usize) -> usize {
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
///
/// # Safety
///
/// The pointer must be valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_live(live: *mut Live) {
    // SAFETY: the caller's promise.
    unsafe { live.write(lock().live) };
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

/// `Control::kernel_read` (`write` 0) and `Control::kernel_write`.
///
/// # Safety
///
/// `id` must be valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_kernel(
    stream: *mut c_void,
    address: u64,
    bytes: usize,
    write: u32,
    value: u8,
    duration_us: u32,
    id: *mut u64,
) -> u32 {
    let mut launched = 0;
    let fill = (write != 0).then_some(value);
    let code = calls::launch(&mut launched, stream as u64, (address, bytes), fill, duration_us);
    // SAFETY: the caller's promise.
    unsafe { id.write(launched) };
    code
}

/// `Control::checksum`: 0, or 1 if there is none.
///
/// # Safety
///
/// `sum` must be valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_checksum(kernel: u64, sum: *mut u64) -> u32 {
    let mut core = lock();
    loop {
        match core.kernels.get(&kernel) {
            None | Some(Some(Err(_))) => return 1,
            Some(Some(Ok(found))) => {
                // SAFETY: the caller's promise.
                unsafe { sum.write(*found) };
                return 0;
            }
            Some(None) => core = wait(core),
        }
    }
}

/// `Control::peek`: 0, or 1 if no allocation holds the range, or its contents are gone.
///
/// # Safety
///
/// `to` must be valid for `bytes` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn twinbuf_sim_peek(address: u64, to: *mut u8, bytes: usize) -> u32 {
    lock().bytes(address, bytes).map_or(1, |data| {
        // SAFETY: the caller's promise, and `data` has `bytes` bytes.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, bytes) };
        0
    })
}

/// `Control::hold`, and with `u64::MAX` its end.
#[unsafe(no_mangle)]
extern "C" fn twinbuf_sim_allow(pieces: u64) {
    lock().allowed = pieces;
    changed();
}

/// `Control::wait_held`.
#[unsafe(no_mangle)]
extern "C" fn twinbuf_sim_wait_held() {
    let mut core = lock();
    while core.held == 0 && core.allowed != u64::MAX {
        core = wait(core);
    }
}

/// `Control::drain`.
#[unsafe(no_mangle)]
extern "C" fn twinbuf_sim_drain() {
    machine::drain();
}
