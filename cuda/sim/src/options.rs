//! What a test asks of the driver: the machine it runs on, and the errors it injects.

use crate::abi::{RawFailure, TARGET_API, TARGET_CALL, TARGET_WORK};
use crate::driver::is_error;

/// What the driver finds in the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Installed {
    /// A driver with devices.
    #[default]
    Device,
    /// The toolkit's stub in place of a driver: `cuInit` says `CUDA_ERROR_STUB_LIBRARY` (34).
    Stub,
    /// A driver and no device: `cuInit` says `CUDA_ERROR_NO_DEVICE` (100), the count is 0.
    NoDevice,
}

/// How one run of the driver behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Of every delay.
    pub seed: u64,
    /// Longest delay before an operation, and between the pieces of a copy, in microseconds. 0: none.
    pub delay_us: u32,
    /// In how many pieces a copy or a kernel runs, at least 1.
    pub pieces: u32,
    /// Whether the device has memory pools, so `cuMemAllocAsync`.
    pub pools: bool,
    /// Device memory in bytes: allocations beyond fail with `CUDA_ERROR_OUT_OF_MEMORY` (2).
    pub device_bytes: u64,
    /// Page-locked host memory in bytes, likewise.
    pub host_bytes: u64,
    /// Stub, no device, or some.
    pub installed: Installed,
    /// How many devices there are, 1 or 2. They share the limits of memory and the sticky error.
    pub devices: u32,
    /// Every host thread is an agent of its own for the checker: an edge from one to another exists only where
    /// [`Control::release`] and [`Control::acquire`] say so. `false`: all host threads are one agent, so what
    /// one of them knows, all know, and a missing edge *between host threads* shows only if their accesses
    /// happen in the wrong order in this run.
    pub host_threads_apart: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 1,
            delay_us: 40,
            pieces: 4,
            pools: true,
            device_bytes: 1 << 30,
            host_bytes: 1 << 30,
            installed: Installed::Device,
            devices: 1,
            host_threads_apart: false,
        }
    }
}

impl Options {
    /// The defaults with this seed.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }
}

/// An error to be injected: which call or operation fails, counted from [`Control::inject`] on, and with what.
///
/// A call that fails has no effect, except that a call which gives something back (destroy, free, release)
/// always does so: the real driver too returns errors of earlier work from such calls.
#[derive(Clone, Debug)]
pub struct Failure {
    pub(crate) raw: RawFailure,
    pub(crate) name: String,
}

impl Failure {
    fn new(target: u32, name: &str, nth: u64, code: u32) -> Self {
        assert!(nth > 0, "calls are counted from 1");
        // cudarc takes the number for its enum unchecked.
        assert!(is_error(code), "{code} is no `CUresult` that this driver knows as an error");
        Self { raw: RawFailure { target, code, nth, times: 1, effect: 0 }, name: name.to_owned() }
    }

    /// The `nth` call (from 1) of this name, as exported: `cuMemcpyHtoDAsync_v2`. A simulated kernel's launch is
    /// `cuLaunchKernel`.
    ///
    /// # Panics
    ///
    /// If `nth` is 0, or `code` is not one of the errors in `driver/codes.rs`.
    #[must_use]
    pub fn api(name: &str, nth: u64, code: u32) -> Self {
        Self::new(TARGET_API, name, nth, code)
    }

    /// The `nth` call (from 1) of any name but `cuGetErrorName` and `cuGetErrorString`, which formatting an
    /// error calls.
    ///
    /// # Panics
    ///
    /// If `nth` is 0, or `code` is not one of the errors in `driver/codes.rs`.
    #[must_use]
    pub fn call(nth: u64, code: u32) -> Self {
        Self::new(TARGET_CALL, "", nth, code)
    }

    /// The `nth` operation (from 1) of this kind *while it runs*: `h2d`, `d2h`, `d2d`, `memset`, `kernel`,
    /// `host` (a host function) or `any` of them. The error is sticky: it comes from every later call, what is
    /// queued is dropped, host functions are not called.
    ///
    /// # Panics
    ///
    /// If `nth` is 0, or `code` is not one of the errors in `driver/codes.rs`.
    #[must_use]
    pub fn op(kind: &str, nth: u64, code: u32) -> Self {
        Self::new(TARGET_WORK, kind, nth, code)
    }

    /// Fails this many times in a row, not once. `u64::MAX`: from then on.
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.raw.times = times;
        self
    }

    /// The call takes effect and then returns the error, as one does that reports earlier work.
    #[must_use]
    pub fn after_effect(mut self) -> Self {
        self.raw.effect = 1;
        self
    }
}
