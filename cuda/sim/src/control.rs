//! The Rust side: loads the driver, before cudarc looks for one, and calls its control functions.

use std::ffi::{CString, c_void};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::abi::{KINDS, Live, TARGET_API, TARGET_WORK};
use crate::driver::{Hooks, Texts, is_error};
use crate::options::{Failure, Options};
use crate::sys::{Library, memory_file};
use crate::tool::library;

/// A launched simulated kernel, for [`Control::checksum`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(u64);

/// The digest that [`Control::checksum`] returns for these bytes (FNV-1a, 64 bits).
#[must_use]
pub fn checksum_of(bytes: &[u8]) -> u64 {
    bytes.iter().fold(crate::FNV_START, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(crate::FNV_PRIME))
}

/// The loaded driver.
struct Driver {
    library: Library,
    hooks: &'static Hooks,
    /// Stays open: call stacks look up the names of functions in it.
    _file: File,
}

/// The environment variable that selects the driver. `real` selects the machine's driver. Any other value, or none,
/// selects the simulated one.
pub const DRIVER_VARIABLE: &str = "TWINBUF_CUDA_DRIVER";

/// The software driver; `None` with the real one.
fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let real = || std::env::var_os(DRIVER_VARIABLE).is_some_and(|driver| driver == "real");
    let load = || load().unwrap_or_else(|error| panic!("the software driver: {error}"));
    DRIVER.get_or_init(|| (!real()).then(load)).as_ref()
}

/// Loads the driver from a file in memory: its SONAME is enough to be found.
fn load() -> io::Result<Driver> {
    let mut file = memory_file(c"libcuda.so")?;
    file.write_all(library()?)?;
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    // SAFETY: the driver runs no code when it is loaded.
    let library = unsafe { Library::open(&path) }?;
    let hooks = library.find(c"twinbuf_sim_hooks");
    let hooks = hooks.ok_or_else(|| io::Error::other("not a driver of this package"))?;
    // SAFETY: `driver/hooks.rs` exports this, and the library is never closed.
    Ok(Driver { library, hooks: unsafe { &*hooks.cast::<Hooks>() }, _file: file })
}

/// The control calls. Launching a [`Kernel`] counts as a call of `cuLaunchKernel` and is checked like one. The others
/// are not driver calls, and of these only [`Control::release`] and [`Control::acquire`] order anything.
///
/// With the real driver ([`Control::is_real`]) they do nothing, and launching a [`Kernel`] returns `Ok(None)`.
#[derive(Clone, Copy)]
pub struct Control {
    driver: Option<&'static Driver>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("real", &self.is_real()).finish()
    }
}

impl Control {
    /// Loads the driver if necessary, and returns its controls without a [`Sim`]. For hooks inside the code under test.
    ///
    /// # Panics
    ///
    /// If the driver cannot be loaded, or was not built for this system.
    #[must_use]
    pub fn get() -> Self {
        Self { driver: driver() }
    }

    /// Whether the machine's driver is used ([`DRIVER_VARIABLE`] is `real`).
    #[must_use]
    pub fn is_real(self) -> bool {
        self.driver.is_none()
    }

    /// Calls the software driver. With the real one, the result is the default value.
    fn with<T: Default>(self, call: impl FnOnce(&Hooks) -> T) -> T {
        self.driver.map_or_else(T::default, |driver| call(driver.hooks))
    }

    /// Adds an error to inject.
    ///
    /// # Panics
    ///
    /// If this driver lacks the call or the kind of work, or the call is `cuGetErrorName` or `cuGetErrorString`.
    pub fn inject(self, failure: Failure) {
        let cannot_fail = failure.cannot_fail();
        let Failure { raw, name } = failure;
        if let Some(driver) = self.driver {
            let symbol = CString::new(name.as_str()).unwrap_or_default();
            let exists = match raw.target {
                TARGET_API => !cannot_fail && driver.library.find(&symbol).is_some(),
                TARGET_WORK => KINDS.contains(&name.as_str()),
                _ => true,
            };
            assert!(exists, "the driver has no {name:?} that could fail");
            // SAFETY: the pointer is valid for the call.
            unsafe { (driver.hooks.inject)(symbol.as_ptr(), &raw) };
        }
    }

    /// The calls and operations that [`Control::inject`] has made fail, in order: names of calls, kinds of operations.
    #[must_use]
    pub fn injected(self) -> Vec<String> {
        self.with(|hooks| texts(hooks.injected))
    }

    /// Loses all contexts immediately: queued operations are dropped, and later calls on streams, events, memory,
    /// modules and graphs return `code` (`CUDA_ERROR_CONTEXT_IS_DESTROYED` is 709, an uncorrectable ECC error 214).
    ///
    /// # Panics
    ///
    /// If `code` is not one of the errors in `driver/codes.rs`.
    pub fn lose_context(self, code: u32) {
        assert!(is_error(code), "{code} is not an error code of this driver");
        self.with(|hooks| (hooks.lose_context)(code));
    }

    /// The number of driver calls since the start, without those that [`Failure::call`] does not count.
    #[must_use]
    pub fn calls(self) -> u64 {
        // SAFETY: null asks for all names.
        self.with(|hooks| unsafe { (hooks.calls)(std::ptr::null()) })
    }

    /// The number of calls of one name since the start.
    ///
    /// # Panics
    ///
    /// If `name` contains a NUL byte.
    #[must_use]
    pub fn calls_of(self, name: &str) -> u64 {
        let name = CString::new(name).expect("a name without NUL");
        // SAFETY: the pointer is valid for the call.
        self.with(|hooks| unsafe { (hooks.calls)(name.as_ptr()) })
    }

    /// The number of calls of one name that this thread has made since the start. Calls of other threads, whose number
    /// depends on timing, are not included.
    ///
    /// # Panics
    ///
    /// If `name` contains a NUL byte.
    #[must_use]
    pub fn own_calls_of(self, name: &str) -> u64 {
        let name = CString::new(name).expect("a name without NUL");
        // SAFETY: the pointer is valid for the call.
        self.with(|hooks| unsafe { (hooks.own_calls)(name.as_ptr()) })
    }

    /// The violations that the checker found since the last call: the first 16 different ones, a sentence each, and in
    /// further lines the call stacks of the accesses that it names.
    #[must_use]
    pub fn violations(self) -> Vec<String> {
        self.with(|hooks| texts(hooks.violations))
    }

    /// The resources that the driver currently holds for its user; all 0 with the real driver.
    #[must_use]
    pub fn live(self) -> Live {
        self.with(|hooks| (hooks.live)())
    }

    /// The first half of an edge that the driver cannot see: adds the clock of this thread, or of the host function,
    /// to `token`. Any number can be a token.
    pub fn release(self, token: u64) {
        self.with(|hooks| (hooks.release)(token));
    }

    /// The second half: joins the clocks added to `token` so far into that of this thread or host function.
    pub fn acquire(self, token: u64) {
        self.with(|hooks| (hooks.acquire)(token));
    }

    /// Enqueues a simulated kernel that reads `bytes` bytes of device memory at `address`, for at least `duration_us`
    /// microseconds. `stream` is a `CUstream`. Returns `Ok(None)` with the real driver.
    ///
    /// # Errors
    ///
    /// The launch's `CUresult`, as a number.
    pub fn kernel_read<S>(
        self,
        stream: *mut S,
        address: u64,
        bytes: usize,
        duration_us: u32,
    ) -> Result<Option<Kernel>, u32> {
        self.kernel(stream.cast(), address, bytes, None, duration_us)
    }

    /// Enqueues a simulated kernel that fills device memory with `value`; otherwise same as [`Control::kernel_read`].
    ///
    /// # Errors
    ///
    /// The launch's `CUresult`, as a number.
    pub fn kernel_write<S>(
        self,
        stream: *mut S,
        address: u64,
        bytes: usize,
        value: u8,
        duration_us: u32,
    ) -> Result<Option<Kernel>, u32> {
        self.kernel(stream.cast(), address, bytes, Some(value), duration_us)
    }

    fn kernel(
        self,
        stream: *mut c_void,
        address: u64,
        bytes: usize,
        fill: Option<u8>,
        duration_us: u32,
    ) -> Result<Option<Kernel>, u32> {
        let Some(driver) = self.driver else { return Ok(None) };
        let (write, value) = (fill.is_some(), fill.unwrap_or(0));
        let mut id = 0;
        // Handle and address are looked up, not dereferenced.
        match (driver.hooks.kernel)(stream, address, bytes, write, value, duration_us, &mut id) {
            0 => Ok(Some(Kernel(id))),
            code => Err(code),
        }
    }

    /// The digest ([`checksum_of`]) of the bytes that a kernel read or wrote; `None` after an error, for a captured
    /// kernel whose graph has not run, and with the real driver. Waits for a kernel that was not captured, but the
    /// checker does not count that as synchronization.
    #[must_use]
    pub fn checksum(self, kernel: Kernel) -> Option<u64> {
        let mut sum = 0;
        self.with(|hooks| (hooks.checksum)(kernel.0, &mut sum)).then_some(sum)
    }

    /// A copy of device memory as it is now. Makes no driver call, and the checker does not see it. `None` if no
    /// allocation has the range, if its contents are gone, or with the real driver.
    #[must_use]
    pub fn peek(self, address: u64, bytes: usize) -> Option<Vec<u8>> {
        let mut copy = vec![0; bytes];
        // SAFETY: `copy` has `bytes` bytes.
        self.with(|hooks| unsafe { (hooks.peek)(address, copy.as_mut_ptr(), bytes) }).then_some(copy)
    }

    /// Lets the device run `pieces` more pieces of work, then stops it until the guard is dropped. A host function is
    /// one piece, and so is a kernel of a module, except `twinbuf_sum`. Streams still pass events and frees.
    #[must_use = "dropping it resumes the device"]
    pub fn hold(self, pieces: u64) -> Held {
        self.allow(pieces);
        Held(self)
    }

    /// Waits until [`Control::hold`] has stopped a stream; returns at once if the device is not held. Enqueue enough
    /// work first.
    pub fn wait_held(self) {
        self.with(|hooks| (hooks.wait_held)());
    }

    fn allow(self, pieces: u64) {
        self.with(|hooks| (hooks.allow)(pieces));
    }

    /// Waits until every stream is idle and the threads of destroyed streams have ended. The checker does not count this
    /// as synchronization.
    pub fn drain(self) {
        self.with(|hooks| (hooks.drain)());
    }
}

/// Stops the device ([`Control::hold`]); dropping it resumes the device. Declare it after everything whose drop waits
/// for the device: a panicking test then resumes the device first.
#[derive(Debug)]
pub struct Held(Control);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.allow(u64::MAX);
    }
}

/// The texts that `get` writes, with a NUL between. `get` returns the length it needs.
fn texts(get: Texts) -> Vec<String> {
    let mut text = Vec::new();
    loop {
        // SAFETY: the pointer is valid for the length that is passed.
        let needed = unsafe { get(text.as_mut_ptr(), text.len()) };
        if needed <= text.len() {
            text.truncate(needed);
            break;
        }
        text.resize(needed, 0);
    }
    let texts = String::from_utf8_lossy(&text);
    texts.split('\0').filter(|text| !text.is_empty()).map(str::to_owned).collect()
}

/// One run of the driver, from [`Sim::start`] until this is dropped. It starts without what earlier runs created,
/// counted and injected.
///
/// A process has one driver, so only one `Sim` exists at a time: a second `start` waits until the first is dropped.
/// Declare it before everything that uses CUDA: it must be dropped last.
///
/// # Panics
///
/// The drop panics if the checker found violations that were not read ([`Control::violations`]), unless the thread is
/// panicking.
#[derive(Debug)]
pub struct Sim {
    control: Control,
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl Sim {
    /// Loads the driver if necessary, and begins a run.
    ///
    /// # Panics
    ///
    /// If the driver cannot be loaded, or was not built for this system.
    #[must_use]
    pub fn start(options: Options) -> Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        // `start` resets whatever a test that panicked left behind.
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let control = Control::get();
        let (pieces, devices) = (options.pieces.max(1), options.devices.clamp(1, 2));
        control.with(|hooks| (hooks.start)(&Options { pieces, devices, ..options }));
        Self { control, _one_at_a_time: guard }
    }

    /// The same, but `None` where the machine's driver is used: for tests of what only this one does.
    ///
    /// # Panics
    ///
    /// As [`Sim::start`].
    #[must_use]
    pub fn start_software(options: Options) -> Option<Self> {
        let sim = Self::start(options);
        (!sim.is_real()).then_some(sim)
    }

    /// The controls, for other threads.
    #[must_use]
    pub fn control(&self) -> Control {
        self.control
    }
}

impl std::ops::Deref for Sim {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        let found = self.control.violations();
        if !std::thread::panicking() {
            assert!(found.is_empty(), "the checker found {found:#?}");
        }
    }
}
