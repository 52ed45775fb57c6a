//! The settings of a run: the simulated machine, and the errors to inject.

use std::str::FromStr;

use crate::abi::{KINDS, RawFailure, TARGET_API, TARGET_CALL, TARGET_WORK};
use crate::driver::is_error;

/// What is installed in the simulated machine.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Installed {
    /// A driver with devices.
    #[default]
    Device,
    /// The toolkit's stub in place of a driver: `cuInit` returns `CUDA_ERROR_STUB_LIBRARY` (34).
    Stub,
    /// A driver without a device: `cuInit` returns `CUDA_ERROR_NO_DEVICE` (100), and the device count is 0.
    NoDevice,
}

/// How the driver behaves in one run.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The seed of all delays.
    pub seed: u64,
    /// The longest delay before each piece of an operation, and before an asynchronous free, in microseconds. 0: no
    /// delays.
    pub delay_us: u32,
    /// The most pieces that a copy, a memset or a simulated kernel runs in. 0 counts as 1.
    pub pieces: u32,
    /// Whether the device has memory pools, and with them `cuMemAllocAsync` and `cuMemFreeAsync`.
    pub pools: bool,
    /// Bytes of device memory, managed memory included. Allocations beyond it fail with `CUDA_ERROR_OUT_OF_MEMORY` (2).
    pub device_bytes: u64,
    /// Bytes of page-locked host memory. Allocations beyond it fail with the same error.
    pub host_bytes: u64,
    /// What is installed: devices, a driver without a device, or the stub.
    pub installed: Installed,
    /// The number of devices, clamped to 1 or 2. They share the memory limits and the sticky error.
    pub devices: u32,
    /// Whether the checker treats each host thread as a separate agent. If `true`, an edge between two threads exists
    /// only if it passes through a stream, or if [`Control::release`](crate::Control::release) and
    /// [`Control::acquire`](crate::Control::acquire) announce it. If `false`, all host threads are one
    /// agent: a missing edge *between host threads* shows only if their accesses happen in the wrong order in this run.
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
    /// The defaults, with this seed.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }
}

/// The settings of `cuda-sim run`. It passes them to the driver in the program by [`Settings::VARIABLE`]: `NAME=VALUE`,
/// with commas between.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub(crate) options: Options,
    pub(crate) failures: Vec<Failure>,
    /// The file that the report is appended to. Default: standard error.
    pub(crate) report: Option<String>,
}

impl Settings {
    /// The environment variable.
    pub(crate) const VARIABLE: &str = "TWINBUF_SIM";
}

impl FromStr for Settings {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut settings = Self::default();
        let options = &mut settings.options;
        // A path may contain commas: it is the last.
        let (text, report) =
            text.split_once("report=").map_or((text, None), |(text, path)| (text, Some(path)));
        settings.report = report.map(str::to_owned);
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| format!("{part}: wanted NAME=VALUE"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("{part}: wanted a number"));
            let small = |least, most| {
                let number = value.parse().ok().filter(|number: &u32| (least..=most).contains(number));
                number.ok_or_else(|| format!("{part}: wanted a number from {least} to {most}"))
            };
            match name {
                "seed" => options.seed = number()?,
                "delay" => options.delay_us = small(0, u32::MAX)?,
                "pieces" => options.pieces = small(1, u32::MAX)?,
                "pools" => options.pools = small(0, 1)? != 0,
                "devices" => options.devices = small(1, 2)?,
                "device-bytes" => options.device_bytes = number()?,
                "host-bytes" => options.host_bytes = number()?,
                "fail" => settings.failures.push(Failure::parse(value).ok_or_else(|| {
                    format!("{part}: wanted fail=WHAT:N:CODE; WHAT is a call's name, `call` for any, or one of {KINDS:?}")
                })?),
                _ => return Err(format!("{part}: no such setting")),
            }
        }
        Ok(settings)
    }
}

/// An error to inject: the call or operation that fails, counted from [`Control::inject`](crate::Control::inject), and
/// its code.
///
/// Without [`after_effect`](Self::after_effect), a failed call has no effect, except that a call that frees something
/// (destroy, free, release, unload) frees it. The real driver also returns errors of earlier work from such calls.
#[derive(Clone, Debug)]
pub struct Failure {
    pub(crate) raw: RawFailure,
    pub(crate) name: String,
}

impl Failure {
    fn new(target: u32, name: &str, nth: u64, code: u32) -> Self {
        assert!(nth > 0, "calls are counted from 1");
        // cudarc converts the number to its enum unchecked.
        assert!(is_error(code), "{code} is not an error code of this driver");
        Self { raw: RawFailure { target, code, nth, times: 1, effect: 0 }, name: name.to_owned() }
    }

    /// `WHAT:N:CODE`.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, ':');
        let (what, nth, code) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        (nth > 0 && is_error(code)).then(|| match what {
            "call" => Self::call(nth, code),
            kind if KINDS.contains(&kind) => Self::op(kind, nth, code),
            name => Self::api(name, nth, code),
        })
    }

    /// Whether it names a function that cannot be made to fail: see [`call`](Self::call).
    pub(crate) fn cannot_fail(&self) -> bool {
        self.raw.target == TARGET_API && ["cuGetErrorName", "cuGetErrorString"].contains(&self.name.as_str())
    }

    /// Fails the `nth` call (from 1) of this exported name, such as `cuMemcpyHtoDAsync_v2`. The launch of a simulated
    /// kernel is `cuLaunchKernel`.
    ///
    /// # Panics
    ///
    /// If `nth` is 0, or `code` is not one of the errors in `driver/codes.rs`.
    #[must_use]
    pub fn api(name: &str, nth: u64, code: u32) -> Self {
        Self::new(TARGET_API, name, nth, code)
    }

    /// Fails the `nth` call (from 1) of any name. `cuGetErrorName` and `cuGetErrorString` do not count, because
    /// formatting an error calls them.
    ///
    /// # Panics
    ///
    /// If `nth` is 0, or `code` is not one of the errors in `driver/codes.rs`.
    #[must_use]
    pub fn call(nth: u64, code: u32) -> Self {
        Self::new(TARGET_CALL, "", nth, code)
    }

    /// Fails the `nth` operation (from 1) of this kind *while it runs*: `h2d`, `d2h`, `d2d`, `memset`, `kernel`, `host`
    /// (a host function, which fails before it runs) or `any`. The error is sticky: later calls on streams, events,
    /// memory, modules and graphs return it, queued operations are dropped, and host functions are not called.
    ///
    /// # Panics
    ///
    /// If `nth` is 0, or `code` is not one of the errors in `driver/codes.rs`.
    #[must_use]
    pub fn op(kind: &str, nth: u64, code: u32) -> Self {
        Self::new(TARGET_WORK, kind, nth, code)
    }

    /// Fails this many calls or operations in a row. Default: 1. `u64::MAX`: all from the `nth` on.
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.raw.times = times;
        self
    }

    /// Lets the call take effect before it returns the error, like a call that reports an error of earlier work. An
    /// operation ([`op`](Self::op)) ignores this.
    #[must_use]
    pub fn after_effect(mut self) -> Self {
        self.raw.effect = 1;
        self
    }
}
