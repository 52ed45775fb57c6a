//! The driver: loads it before cudarc does, because cudarc panics if there is none, and converts its errors to this
//! crate's.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::mem;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUevent;
use libloading::Library;
#[cfg(target_os = "linux")]
use libloading::os::unix;

use crate::error::Error;

/// The names to try, in cudarc's order: both should find the same library. `libcuda.so` may be the
/// toolkit's stub, and some packages of the driver have only `libcuda.so.1`.
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
#[cfg(windows)]
const NAMES: [&str; 2] = ["cuda.dll", "nvcuda.dll"];

// Codes of `CUresult`, as numbers: a newer driver may return a code that cudarc's enum lacks.
const SUCCESS: u32 = 0;
const STUB_LIBRARY: u32 = 34;
const NO_DEVICE: u32 = 100;
const NOT_READY: u32 = 600;

/// The driver functions that are called without cudarc.
pub(crate) struct Driver {
    library: &'static str,
    init: unsafe extern "C" fn(c_uint) -> u32,
    device_count: unsafe extern "C" fn(*mut c_int) -> u32,
    // The first version of this function; every driver has it. cudarc, built for CUDA 13, calls the second version and
    // panics on drivers before 12.8, which lack it.
    event_elapsed_time: unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> u32,
    error_name: unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
}

/// Converts cudarc's result of a driver call.
pub(crate) fn check<T>(call: &'static str, result: Result<T, DriverError>) -> Result<T, Error> {
    result.map_err(|DriverError(found)| failed(call, found as u32))
}

/// The error of a driver call that returned this code. The code's name comes from the driver: cudarc's enum may lack the
/// codes of a newer driver.
fn failed(call: &'static str, code: u32) -> Error {
    match Driver::load() {
        // cudarc loaded the first of `NAMES`, a stub; `Driver::load` passes over a stub and tries the other name.
        _ if code == STUB_LIBRARY => Error::StubDriver { library: NAMES[0].to_string() },
        Ok(driver) if code == NO_DEVICE => Error::NoDevice { library: driver.library.to_string() },
        Ok(driver) => Error::Driver { call, code, name: driver.name(code) },
        // Not reached: a driver that has returned an error is loaded.
        Err(error) => error,
    }
}

/// The result of a driver call that is made without cudarc.
fn succeeded(call: &'static str, code: u32) -> Result<(), Error> {
    if code == SUCCESS { Ok(()) } else { Err(failed(call, code)) }
}

/// The library of this name, if the process has it.
#[cfg(target_os = "linux")]
fn if_loaded(name: &str) -> Option<Library> {
    /// From dlfcn.h: only returns a library that is loaded.
    const RTLD_NOLOAD: c_int = 4;
    // SAFETY: `RTLD_NOLOAD` loads nothing, so no initializer runs.
    let library = unsafe { unix::Library::open(Some(name), unix::RTLD_LAZY | RTLD_NOLOAD) };
    library.ok().map(Library::from)
}

#[cfg(not(target_os = "linux"))]
fn if_loaded(_: &str) -> Option<Library> {
    None
}

impl Driver {
    /// The driver. It stays loaded until the process ends, because cudarc keeps pointers into it.
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let (mut tried, mut refused) = (Vec::new(), None);
        // Try what is loaded first: a program that is linked to the driver uses it, whatever the library path has.
        let loaded = NAMES.iter().rev().filter_map(|name| Some((*name, Ok(if_loaded(name)?))));
        // SAFETY: loading a library runs its initializers. The CUDA driver's may run at any time; cudarc loads the same
        // library.
        let found = NAMES.iter().map(|name| (*name, unsafe { Library::new(*name) }));
        for (name, library) in loaded.chain(found) {
            match library.map(|library| Self::of(name, library)) {
                Ok(Ok(driver)) => return Ok(DRIVER.get_or_init(|| driver)),
                Ok(Err(error)) => refused = refused.or(Some(error)),
                Err(error) => {
                    // libloading wraps the system's message, which begins with the library's name. Cut the name off.
                    let message = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                    let reason = message.strip_prefix(&format!("{name}: ")).unwrap_or(&message);
                    tried.push((name.to_string(), reason.to_string()));
                }
            }
        }
        Err(refused.unwrap_or(Error::NoDriver { tried }))
    }

    /// Looks up the functions. Refuses the toolkit's stub, so that the driver behind it in the library path is found.
    fn of(name: &'static str, library: Library) -> Result<Self, Error> {
        macro_rules! function {
            ($function:literal) => {
                // SAFETY: the field's type is the function's type in cuda.h, with the result as a number.
                *unsafe { library.get($function) }
                    .map_err(|_| Error::NotADriver { library: name.to_string(), function: $function })?
            };
        }
        let driver = Self {
            library: name,
            init: function!("cuInit"),
            device_count: function!("cuDeviceGetCount"),
            event_elapsed_time: function!("cuEventElapsedTime"),
            error_name: function!("cuGetErrorName"),
        };
        // SAFETY: takes no pointers; the flags must be 0.
        if unsafe { (driver.init)(0) } == STUB_LIBRARY {
            return Err(Error::StubDriver { library: name.to_string() });
        }
        mem::forget(library);
        Ok(driver)
    }

    /// Initializes the driver and returns the number of devices, at least one.
    pub(crate) fn start(&self) -> Result<usize, Error> {
        // SAFETY: takes no pointers; the flags must be 0.
        succeeded("cuInit", unsafe { (self.init)(0) })?;
        let mut devices = 0;
        // SAFETY: the pointer is valid for the call.
        succeeded("cuDeviceGetCount", unsafe { (self.device_count)(&raw mut devices) })?;
        match usize::try_from(devices) {
            Ok(devices @ 1..) => Ok(devices),
            _ => Err(failed("cuDeviceGetCount", NO_DEVICE)),
        }
    }

    /// Milliseconds from one recorded timing event to another; `None` if one of them is not complete.
    ///
    /// # Safety
    ///
    /// Both events exist.
    pub(crate) unsafe fn milliseconds(&self, start: CUevent, end: CUevent) -> Result<Option<f32>, Error> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is valid for the call; the caller guarantees the events.
        match unsafe { (self.event_elapsed_time)(&raw mut milliseconds, start, end) } {
            NOT_READY => Ok(None),
            code => succeeded("cuEventElapsedTime", code).map(|()| Some(milliseconds)),
        }
    }

    /// The driver's name for this `CUresult`.
    fn name(&self, code: u32) -> String {
        let mut name = ptr::null();
        // SAFETY: the pointer is valid for the call.
        match unsafe { (self.error_name)(code, &raw mut name) } {
            // SAFETY: after a success, `name` points to a static C string of the driver.
            SUCCESS if !name.is_null() => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            _ => "unknown CUresult".to_string(),
        }
    }
}
