//! Return codes, and the last error of a thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStrExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;

use twinbuf::{Error, mmap};

/// The call succeeded.
pub const TWINBUF_OK: i32 = 0;
/// The epochs are over: there is no further batch.
pub const TWINBUF_END: i32 = 1;
/// No batch was ready within the timeout.
pub const TWINBUF_PENDING: i32 = 2;
/// The text does not fit into the caller's memory. Its length was stored.
pub const TWINBUF_SHORT: i32 = 3;
/// A pointer is NULL.
pub const TWINBUF_ERROR_NULL: i32 = -1;
/// A handle was already released or freed, is one of another kind, or is none of this library.
pub const TWINBUF_ERROR_HANDLE: i32 = -2;
/// The loader is closed.
pub const TWINBUF_ERROR_CLOSED: i32 = -3;
/// Another thread uses the loader, or a call on it has panicked.
pub const TWINBUF_ERROR_BUSY: i32 = -4;
/// An option or an environment variable has a wrong value, or the options do not fit the records or the memory.
pub const TWINBUF_ERROR_OPTION: i32 = -5;
/// A file cannot be opened or checked, or is not of the format; or the trace cannot be written.
pub const TWINBUF_ERROR_FILE: i32 = -6;
/// A batch could not be read.
pub const TWINBUF_ERROR_READ: i32 = -7;
/// The next slot holds a batch that was not released.
pub const TWINBUF_ERROR_HELD: i32 = -8;
/// The text is no checkpoint, or one of another plan or other files. It has no checksum: keep it where bytes stay
/// right.
pub const TWINBUF_ERROR_CHECKPOINT: i32 = -9;
/// A read did not end within the timeout. Its thread was left behind.
pub const TWINBUF_ERROR_TIMEOUT: i32 = -10;
/// The library panicked. This is a bug of it.
pub const TWINBUF_ERROR_PANIC: i32 = -11;
/// Another error.
pub const TWINBUF_ERROR_OTHER: i32 = -12;
/// No epochs were begun.
pub const TWINBUF_ERROR_EPOCHS: i32 = -13;
/// twinbuf_cancel ended the wait.
pub const TWINBUF_ERROR_CANCELLED: i32 = -14;
/// The `size` of a struct is wrong, or the struct sets a field that this library does not have.
pub const TWINBUF_ERROR_SIZE: i32 = -15;

/// Why a call failed.
#[repr(C)]
pub struct twinbuf_error {
    /// The size of this struct in the library. A field is there if it ends within `size`.
    pub size: usize,
    /// What the call returned: one of TWINBUF_ERROR_*.
    pub code: i32,
    /// One line; where they apply, with path, offset, the wanted and the found value.
    pub message: *const c_char,
    /// The file, or NULL.
    pub path: *const c_char,
    /// The place in the file in bytes, or -1.
    pub offset: i64,
}

thread_local! {
    static LAST: RefCell<Option<(twinbuf_error, Failure)>> = const { RefCell::new(None) };
}

/// Returns the last error of this thread, or NULL if no call on this thread failed, and in destructors that run while the
/// thread or the program ends. The result and its texts are valid until the next call that fails on this thread, or its
/// end. A call that succeeds does not change it.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_last_error() -> *const twinbuf_error {
    // A thread that is ending has lost its last error.
    LAST.try_with(|last| last.borrow().as_ref().map_or(ptr::null(), |(error, _)| ptr::from_ref(error)))
        .unwrap_or(ptr::null())
}

#[derive(Clone)]
pub(crate) struct Failure {
    pub(crate) code: i32,
    message: CString,
    path: Option<CString>,
    offset: i64,
}

impl Failure {
    pub(crate) fn new(code: i32, message: impl Into<String>) -> Self {
        // Paths and texts of panics may have these.
        let message = message.into().replace('\0', "\\0").replace('\n', "\\n");
        Self { code, message: CString::new(message).unwrap_or_default(), path: None, offset: -1 }
    }

    fn at(self, place: Option<(&Path, Option<u64>)>) -> Self {
        let Some((path, offset)) = place else { return self };
        let offset = offset.and_then(|offset| offset.try_into().ok()).unwrap_or(-1);
        Self { path: CString::new(path.as_os_str().as_bytes()).ok(), offset, ..self }
    }

    /// Makes this the last error of the thread.
    fn store(self) -> i32 {
        let (code, message, offset) = (self.code, self.message.as_ptr(), self.offset);
        let path = self.path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        // The pointers stay valid: moving the owner of the texts does not move the texts.
        let last = (twinbuf_error { size: size_of::<twinbuf_error>(), code, message, path, offset }, self);
        let _ = LAST.try_with(|cell| cell.replace(Some(last)));
        code
    }
}

impl From<mmap::Error> for Failure {
    fn from(error: mmap::Error) -> Self {
        Self::new(TWINBUF_ERROR_FILE, format!("{error:?}")).at(error.place())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (code, source) = match &error {
            Error::Option { .. } | Error::Memory { .. } => (TWINBUF_ERROR_OPTION, None),
            Error::Switch { .. } | Error::UnknownSwitch { .. } => (TWINBUF_ERROR_OPTION, None),
            Error::Open(source) => (TWINBUF_ERROR_FILE, Some(source)),
            Error::Trace { .. } => (TWINBUF_ERROR_FILE, None),
            Error::Fingerprint(source) => (TWINBUF_ERROR_FILE, source.downcast_ref()),
            Error::Load { source, .. } => (TWINBUF_ERROR_READ, source.downcast_ref()),
            Error::SlotHeld { .. } => (TWINBUF_ERROR_HELD, None),
            Error::Checkpoint { .. } => (TWINBUF_ERROR_CHECKPOINT, None),
            Error::Timeout { .. } => (TWINBUF_ERROR_TIMEOUT, None),
            Error::Panicked { .. } => (TWINBUF_ERROR_PANIC, None),
            _ => (TWINBUF_ERROR_OTHER, None),
        };
        let at = match &error {
            Error::Timeout { reading: Some(it), .. } => it.file.as_ref().map(|at| (&*at.0, Some(at.1))),
            Error::Trace { path, .. } => Some((&**path, None)),
            _ => None,
        };
        Self::new(code, format!("{error:?}")).at(source.and_then(mmap::Error::place).or(at))
    }
}

/// Runs the body of each exported function. A failure or a panic becomes the last error of the thread.
pub(crate) fn door<T: From<i32>>(body: impl FnOnce() -> Result<T, Failure>) -> T {
    catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|_| Err(Failure::new(TWINBUF_ERROR_PANIC, "the library panicked: see stderr")))
        .unwrap_or_else(|failure| failure.store().into())
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(door::<i32>(|| panic!("out of range")), TWINBUF_ERROR_PANIC);
        // SAFETY: this thread's call has just failed.
        let error = unsafe { &*twinbuf_last_error() };
        // SAFETY: the message lives until the next failure of this thread.
        let message = unsafe { CStr::from_ptr(error.message) };
        assert_eq!(message.to_str(), Ok("the library panicked: see stderr"));
        assert!(error.path.is_null() && error.offset == -1);
    }

    #[test]
    fn the_header_has_the_version_of_the_package() {
        let found =
            [crate::TWINBUF_VERSION_MAJOR, crate::TWINBUF_VERSION_MINOR, crate::TWINBUF_VERSION_PATCH];
        let found = found.map(|number| number.to_string()).join(".");
        assert_eq!(found, env!("CARGO_PKG_VERSION"));
    }
}
