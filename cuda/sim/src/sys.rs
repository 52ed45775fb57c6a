//! What this library calls of the C library, declared here: `build.rs` compiles the driver without dependencies. Numbers and
//! layouts are those of Linux and glibc on 64 bits (`sys/mman.h`, `signal.h`, `sys/ucontext.h`, `dlfcn.h`, `unwind.h`).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::FromRawFd;
use std::ptr::null_mut;

pub(crate) const PROT_NONE: c_int = 0;
pub(crate) const PROT_READ: c_int = 1;
pub(crate) const PROT_WRITE: c_int = 2;
pub(crate) const MAP_SHARED: c_int = 1;
pub(crate) const MAP_PRIVATE: c_int = 2;
pub(crate) const MAP_FIXED: c_int = 0x10;
pub(crate) const MAP_ANONYMOUS: c_int = 0x20;
pub(crate) const MAP_NORESERVE: c_int = 0x4000;
pub(crate) const SIGTRAP: c_int = 5;
pub(crate) const SIGSEGV: c_int = 11;
/// The handler takes three arguments.
pub(crate) const SA_SIGINFO: c_int = 4;
/// `SIG_DFL` and `SIG_IGN`.
pub(crate) const NO_HANDLERS: [usize; 2] = [0, 1];
const MFD_CLOEXEC: c_uint = 1;
const RTLD_NOW: c_int = 2;

/// `struct sigaction`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct SigAction {
    pub(crate) handler: usize,
    pub(crate) mask: [u64; 16],
    pub(crate) flags: c_int,
    pub(crate) restorer: usize,
}

/// The beginning of `siginfo_t`.
#[repr(C)]
pub(crate) struct SigInfo {
    numbers: [c_int; 4],
    /// Of SIGSEGV: the address that was accessed.
    pub(crate) address: usize,
}

/// `struct iovec`.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
pub(crate) struct Part {
    pub(crate) at: *mut c_void,
    pub(crate) bytes: usize,
}

/// The beginning of `ucontext_t`.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
#[derive(Clone, Default)]
pub(crate) struct Context {
    /// The flags, the next context, and the stack.
    before: [u64; 5],
    pub(crate) registers: [i64; 23],
}

/// Registers, in [`Context::registers`].
#[cfg(target_arch = "x86_64")]
pub(crate) const RDI: usize = 8;
#[cfg(target_arch = "x86_64")]
pub(crate) const RSI: usize = 9;
#[cfg(target_arch = "x86_64")]
pub(crate) const RAX: usize = 13;
#[cfg(target_arch = "x86_64")]
pub(crate) const RCX: usize = 14;
/// The address of the instruction, in [`Context::registers`].
#[cfg(target_arch = "x86_64")]
pub(crate) const INSTRUCTION: usize = 16;
/// The processor's flags, in [`Context::registers`].
#[cfg(target_arch = "x86_64")]
pub(crate) const FLAGS: usize = 17;
/// The page fault's error code, in [`Context::registers`].
#[cfg(target_arch = "x86_64")]
pub(crate) const ERROR: usize = 19;

unsafe extern "C" {
    pub(crate) fn mmap(
        at: *mut c_void,
        bytes: usize,
        prot: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    pub(crate) fn mprotect(at: *mut c_void, bytes: usize, prot: c_int) -> c_int;
    pub(crate) fn munmap(at: *mut c_void, bytes: usize) -> c_int;
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn process_vm_readv(
        process: c_int,
        to: *const Part,
        parts_to: usize,
        from: *const Part,
        parts_from: usize,
        flags: usize,
    ) -> isize;
    pub(crate) fn sigaction(signal: c_int, new: *const SigAction, old: *mut SigAction) -> c_int;
    pub(crate) fn raise(signal: c_int) -> c_int;
    pub(crate) fn atexit(function: extern "C" fn()) -> c_int;
    /// Calls the function with each frame of the calling thread, innermost first, while it returns 0. From `unwind.h`.
    pub(crate) fn _Unwind_Backtrace(
        function: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    pub(crate) fn _Unwind_GetIP(frame: *mut c_void) -> usize;
    fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
}

/// Opens a new file in memory.
pub(crate) fn memory_file(name: &CStr) -> Result<File> {
    // SAFETY: the name is a C string.
    let file = unsafe { memfd_create(name.as_ptr(), MFD_CLOEXEC) };
    if file < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: just opened, and owned by nothing else.
    Ok(unsafe { File::from_raw_fd(file) })
}

/// A loaded library. It is never closed, so pointers to its functions stay valid.
pub(crate) struct Library(*mut c_void);

// SAFETY: a handle belongs to the process, not to a thread.
unsafe impl Send for Library {}
// SAFETY: `dlsym` may be called on many threads at once (dlsym(3)).
unsafe impl Sync for Library {}

impl Library {
    /// The libraries in the program's global scope (`RTLD_DEFAULT`).
    pub(crate) const PROGRAM: Self = Self(null_mut());

    /// # Safety
    ///
    /// What the library runs when it is loaded must be sound.
    pub(crate) unsafe fn open(path: &CStr) -> Result<Self> {
        // SAFETY: the path is a C string; the rest is the caller's promise.
        let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
        if library.is_null() {
            // SAFETY: takes nothing.
            let error = unsafe { dlerror() };
            // SAFETY: after an error this is a C string, valid up to this thread's next call of these functions.
            return Err(Error::other(unsafe { CStr::from_ptr(error) }.to_string_lossy()));
        }
        Ok(Self(library))
    }

    /// The address of a function; `None` if the library and its dependencies have none of this name.
    pub(crate) fn find(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the library is loaded, or `PROGRAM`; the name is a C string.
        let function = unsafe { dlsym(self.0, name.as_ptr()) };
        (!function.is_null()).then_some(function)
    }
}
