//! Call stacks of the program: of its machine code, or of its Python.

use std::backtrace::Backtrace;
use std::ffi::{c_int, c_void};
use std::io::{Read, Seek};
use std::mem::transmute;
use std::os::fd::AsRawFd;
use std::sync::LazyLock;

use crate::sys::{self, Library, memory_file};

/// The most frames that are shown.
const MOST_FRAMES: usize = 12;

/// The call stack of a thread. Finding the names of machine code takes long, so only `frames` does it.
#[derive(Debug)]
pub(super) struct Stack {
    native: Backtrace,
    python: Option<String>,
}

impl Stack {
    /// Takes the stack of the calling thread.
    pub(super) fn here() -> Self {
        Self { native: Backtrace::force_capture(), python: python() }
    }

    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self { native: Backtrace::disabled(), python: None }
    }

    /// Its frames, innermost first, one line each. With a Python stack: the innermost one, then the frames of Python.
    pub(super) fn frames(&self) -> Vec<String> {
        let mut frames = native(&self.native.to_string());
        if let Some(python) = &self.python {
            frames.truncate(1);
            frames.extend(python.lines().skip(1).map(|line| line.trim().to_owned()));
        }
        frames.truncate(MOST_FRAMES);
        frames
    }
}

/// A place in the program, to tell it from others: the addresses of a thread's frames, and its Python stack.
#[derive(Clone, PartialEq)]
pub(super) struct Site(Vec<usize>, Option<String>);

impl Site {
    /// The place of the calling thread.
    pub(super) fn here() -> Self {
        extern "C" fn add(frame: *mut c_void, addresses: *mut c_void) -> c_int {
            // SAFETY: the unwinder gives a frame.
            let address = unsafe { sys::_Unwind_GetIP(frame) };
            // SAFETY: the vector below, which nothing else uses meanwhile.
            unsafe { &mut *addresses.cast::<Vec<usize>>() }.push(address);
            0
        }
        let mut addresses = Vec::new();
        // SAFETY: `add` takes this vector.
        unsafe { sys::_Unwind_Backtrace(add, (&raw mut addresses).cast()) };
        Self(addresses, python())
    }
}

/// The Python stack of this thread; `None` if it runs no Python. The function of `faulthandler` writes it, which takes no
/// lock and allocates nothing. `CPython` 3.8, 3.11 and 3.12 export this function under a private name, and newer versions
/// may under a public one. With a version that exports neither (3.9, 3.10, 3.13), there is no Python stack.
fn python() -> Option<String> {
    type State = unsafe extern "C" fn() -> *mut c_void;
    type Dump = unsafe extern "C" fn(c_int, *mut c_void) -> *const c_void;
    static PYTHON: LazyLock<Option<(State, Dump)>> = LazyLock::new(|| {
        let find = |name| Library::PROGRAM.find(name);
        let state = find(c"PyGILState_GetThisThreadState")?;
        let dump = find(c"_Py_DumpTraceback").or_else(|| find(c"PyUnstable_DumpTraceback"))?;
        // SAFETY: this is the signature in CPython.
        let state = unsafe { transmute::<*mut c_void, State>(state) };
        // SAFETY: as above; it returns nothing up to 3.12, and its result is not used.
        Some((state, unsafe { transmute::<*mut c_void, Dump>(dump) }))
    });
    let (state, dump) = (*PYTHON)?;
    // SAFETY: takes nothing.
    let thread = unsafe { state() };
    if thread.is_null() {
        return None;
    }
    let mut file = memory_file(c"python").ok()?;
    // SAFETY: the state of this thread, whose frames stay as they are while it is here.
    unsafe { dump(file.as_raw_fd(), thread) };
    let mut text = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut text).ok()?;
    Some(text)
}

/// The program's frames, innermost first: without those of the driver below the exported function, of the handler, and of
/// what starts `main` or a thread of Rust. One line each.
fn native(stack: &str) -> Vec<String> {
    let mut frames: Vec<String> = Vec::new();
    for line in stack.lines().map(str::trim) {
        // A line has the number of a frame and its function, or the place of the last frame in the source.
        match (line.split_once(": "), frames.last_mut()) {
            (Some((number, function)), _) if number.bytes().all(|digit| digit.is_ascii_digit()) => {
                frames.push(function.to_owned());
            }
            (_, Some(frame)) => {
                frame.push(' ');
                frame.push_str(line);
            }
            _ => {}
        }
    }
    let of_driver = |frame: &String| frame.contains("twinbuf_cuda_sim::driver::");
    let inside = frames.iter().rposition(of_driver).map_or(0, |last| {
        // Between the handler and the access is the frame that the kernel returns through.
        last + 1 + usize::from(frames[last].contains("on_fault"))
    });
    let starts =
        |frame: &String| frame.contains("__rust_begin_short_backtrace") || frame.contains("__libc_start");
    frames.into_iter().skip(inside).take_while(|frame| !starts(frame)).collect()
}
