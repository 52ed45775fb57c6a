//! Finding the driver, before cudarc does: cudarc panics where there is none.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUdeviceptr, CUevent, CUstream};
use libloading::Library;

use crate::cu::check;
use crate::error::Error;

/// The names to try, in cudarc's order, so that both find the same library. With the development files or the
/// toolkit's stub `libcuda.so` exists; with the driver alone only `libcuda.so.1` does.
#[cfg(not(windows))]
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
#[cfg(windows)]
const NAMES: [&str; 2] = ["cuda.dll", "nvcuda.dll"];

// `CUresult` as a number: a newer driver may return one that no enumeration here has.
const SUCCESS: u32 = 0;
const STUB_LIBRARY: u32 = 34;
const NO_DEVICE: u32 = 100;
const NOT_READY: u32 = 600;
const NOT_SUPPORTED: u32 = 801;

/// The driver's functions that are called without cudarc.
pub(crate) struct Driver {
    library: &'static str,
    init: unsafe extern "C" fn(c_uint) -> u32,
    device_count: unsafe extern "C" fn(*mut c_int) -> u32,
    // The first version of this function, which every driver has: cudarc, built for CUDA 13, calls the second and
    // panics with drivers before 12.8, which lack it.
    event_elapsed_time: unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> u32,
    error_name: unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
    /// Since 12.8. The first version of it, which newer drivers keep.
    memcpy_batch_async: Option<MemcpyBatchAsync>,
}

/// `cuMemcpyBatchAsync`: targets, sources, sizes, their count, attributes, which copies they begin at, their count,
/// which copy failed, the stream.
type MemcpyBatchAsync = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> u32;

/// `CUmemcpyAttributes`.
#[repr(C)]
struct CopyAttributes {
    source_access_order: u32,
    /// Kind and number of a place, for managed memory only: none.
    source: [u32; 2],
    target: [u32; 2],
    flags: u32,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: the sources are read in the stream's order, as by any other copy.
const STREAM_ORDER: u32 = 1;

/// The context of device number `ordinal`, from 0: its primary context, which frameworks share.
///
/// The same as [`CudaContext::new`], except that it returns an error where that panics.
///
/// # Errors
///
/// [`Error::NoDriver`], [`Error::NotADriver`], [`Error::StubDriver`], [`Error::NoDevice`]; [`Error::Option`] if
/// there are devices, but not this one; [`Error::Driver`] if the driver fails.
///
/// # Examples
///
/// ```
/// use twinbuf_cuda::{Error, context};
///
/// match context(0) {
///     Ok(ctx) => println!("{}", ctx.name().unwrap()),
///     Err(error @ (Error::NoDriver { .. } | Error::StubDriver { .. } | Error::NoDevice { .. })) => {
///         println!("on the CPU, then: {error}");
///     }
///     Err(error) => panic!("{error}"),
/// }
/// ```
pub fn context(ordinal: usize) -> Result<Arc<CudaContext>, Error> {
    let devices = Driver::load()?.start()?;
    if ordinal >= devices {
        let wanted = format!("0 to {}", devices - 1);
        return Err(Error::Option { option: "ordinal", wanted, found: ordinal.to_string() });
    }
    check("cuDevicePrimaryCtxRetain", CudaContext::new(ordinal))
}

impl Driver {
    /// The driver, loaded for as long as the program runs: cudarc keeps pointers into it.
    pub(crate) fn load() -> Result<&'static Self, Error> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let mut tried = Vec::new();
        for name in NAMES {
            // SAFETY: loading a library runs its initializers; the CUDA driver's may run at any time, and cudarc
            // would load the same library.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    let driver = Self::of(name, &library)?;
                    std::mem::forget(library);
                    return Ok(DRIVER.get_or_init(|| driver));
                }
                Err(error) => {
                    // What the system said is the source of what libloading says.
                    let said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                    let reason = said.strip_prefix(&format!("{name}: ")).unwrap_or(&said);
                    tried.push((name.to_string(), reason.to_string()));
                }
            }
        }
        Err(Error::NoDriver { tried })
    }

    fn of(name: &'static str, library: &Library) -> Result<Self, Error> {
        macro_rules! function {
            ($function:literal) => {
                // SAFETY: the type is that of the function of this name in cuda.h, with the result as a number.
                *unsafe { library.get($function) }
                    .map_err(|_| Error::NotADriver { library: name.to_string(), function: $function })?
            };
        }
        Ok(Self {
            library: name,
            init: function!("cuInit"),
            device_count: function!("cuDeviceGetCount"),
            event_elapsed_time: function!("cuEventElapsedTime"),
            error_name: function!("cuGetErrorName"),
            // SAFETY: the type is that of the function of this name in cuda.h of 12.8, with the result as a number.
            memcpy_batch_async: unsafe { library.get(b"cuMemcpyBatchAsync") }.ok().map(|function| *function),
        })
    }

    /// Initializes the driver and returns how many devices there are, at least one.
    fn start(&self) -> Result<usize, Error> {
        // SAFETY: takes no pointers; the only flags there are is 0.
        self.check("cuInit", unsafe { (self.init)(0) })?;
        let mut devices = 0;
        // SAFETY: the pointer is valid for the call.
        self.check("cuDeviceGetCount", unsafe { (self.device_count)(&raw mut devices) })?;
        match usize::try_from(devices) {
            Ok(devices @ 1..) => Ok(devices),
            _ => Err(Error::NoDevice { library: self.library.to_string() }),
        }
    }

    /// Milliseconds from one event to another, which both have timing and have been recorded; `None` if one of
    /// them is not complete yet.
    ///
    /// # Safety
    ///
    /// Both events exist.
    pub(crate) unsafe fn milliseconds(&self, start: CUevent, end: CUevent) -> Result<Option<f32>, Error> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is valid for the call; the events exist, says the caller.
        match unsafe { (self.event_elapsed_time)(&raw mut milliseconds, start, end) } {
            NOT_READY => Ok(None),
            code => self.check("cuEventElapsedTime", code).map(|()| Some(milliseconds)),
        }
    }

    /// Enqueues several copies by one call. `None` if the driver has no such call, or not for this.
    ///
    /// # Safety
    ///
    /// As for as many `cuMemcpyHtoDAsync`; the stream is no default stream.
    pub(crate) unsafe fn copy_batch(
        &self,
        targets: &mut [CUdeviceptr],
        sources: &mut [CUdeviceptr],
        sizes: &mut [usize],
        stream: CUstream,
    ) -> Option<Result<(), Error>> {
        let copy = self.memcpy_batch_async?;
        let mut attributes =
            CopyAttributes { source_access_order: STREAM_ORDER, source: [0; 2], target: [0; 2], flags: 0 };
        let (mut first, mut failed) = (0, 0);
        // SAFETY: the caller answers for the copies; all pointers are valid for the call, which reads as many of each
        // as there are sizes, and one of the attributes.
        let code = unsafe {
            copy(
                targets.as_mut_ptr(),
                sources.as_mut_ptr(),
                sizes.as_mut_ptr(),
                sizes.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                stream,
            )
        };
        (code != NOT_SUPPORTED).then(|| self.check("cuMemcpyBatchAsync", code))
    }

    fn check(&self, call: &'static str, code: u32) -> Result<(), Error> {
        match code {
            SUCCESS => Ok(()),
            STUB_LIBRARY => Err(Error::StubDriver { library: self.library.to_string() }),
            NO_DEVICE => Err(Error::NoDevice { library: self.library.to_string() }),
            code => Err(Error::Driver { call, code, name: self.name(code) }),
        }
    }

    /// What the driver calls this `CUresult`, which may be newer than every enumeration here.
    pub(crate) fn name(&self, code: u32) -> String {
        let mut name = ptr::null();
        // SAFETY: the pointer is valid for the call.
        match unsafe { (self.error_name)(code, &raw mut name) } {
            // SAFETY: the driver has set it to a C string of its own, which stays.
            SUCCESS if !name.is_null() => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            _ => "a CUresult that the driver does not know".to_string(),
        }
    }
}
