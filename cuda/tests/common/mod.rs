//! Shared parts of the tests: a driver with a context and a watchdog, an uploader of small batches, the count of copy
//! threads.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::{self, Write};
use std::panic::Location;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, Once, PoisonError, mpsc};
use std::task::{Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUcontext, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaStream, result};
use twinbuf_cuda::{DeviceBatches, Error, HostSlots, Lease, Uploader, context, lent};
use twinbuf_cuda_sim::{Options, Sim};

/// A driver without delays, and its context, with cudarc's event tracking or without.
#[track_caller]
pub(crate) fn start(seed: u64, tracking: bool) -> (Sim, Arc<CudaContext>) {
    start_with(Options { delay_us: 0, pieces: 1, ..Options::seeded(seed) }, tracking)
}

/// The same with these options.
#[track_caller]
pub(crate) fn start_with(options: Options, tracking: bool) -> (Sim, Arc<CudaContext>) {
    let sim = Sim::start(options);
    watch(Location::caller());
    static HELD: Once = Once::new();
    if sim.is_real() {
        // Keeps the primary context for the life of the process, because it takes long to create and to destroy.
        HELD.call_once(|| std::mem::forget(context(0).unwrap()));
    }
    let ctx = context(0).unwrap();
    if !tracking {
        // SAFETY: no test relies on it: one stream uses everything, or the test orders its streams.
        unsafe { ctx.disable_event_tracking() };
    }
    (sim, ctx)
}

/// The driver in software without delays and without cudarc's event tracking; none where the real one is used.
#[track_caller]
pub(crate) fn start_software() -> Option<(Sim, Arc<CudaContext>)> {
    let (sim, ctx) = start(1, false);
    (!sim.is_real()).then_some((sim, ctx))
}

/// The driver in software with these options and with cudarc's event tracking; none where the real one is used.
#[track_caller]
pub(crate) fn start_software_with(options: Options) -> Option<(Sim, Arc<CudaContext>)> {
    let (sim, ctx) = start_with(options, true);
    (!sim.is_real()).then_some((sim, ctx))
}

/// Ends the process if a test hangs: a hang must be a failure. A test hangs if no other start of a driver follows its own
/// for so many seconds: one test at a time has the driver. Default: 20 minutes, for busy machines. The watchdog's thread
/// allocates nothing once it runs.
fn watch(started_at: &'static Location<'static>) {
    static LAST: Mutex<Option<(Instant, &Location<'_>)>> = Mutex::new(None);
    let last = || LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if last().replace((Instant::now(), started_at)).is_some() {
        return;
    }
    let seconds = std::env::var("TWINBUF_HUNG_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let hung = Duration::from_secs(seconds.unwrap_or(1200));
    let (runs, running) = mpsc::channel();
    thread::spawn(move || {
        runs.send(()).unwrap();
        loop {
            thread::sleep(Duration::from_secs(1));
            let Some((since, at)) = *last() else { continue };
            if since.elapsed() > hung {
                // Not a print macro: the test harness captures its output until the test ends.
                let _ = writeln!(
                    std::io::stderr(),
                    "hung: the test that started the driver at {at}, for {hung:?}"
                );
                std::process::abort();
            }
        }
    });
    running.recv().unwrap();
}

/// Makes this context current to the thread, or none.
pub(crate) fn make_current(ctx: Option<CUcontext>) {
    // SAFETY: the context is alive, or none.
    unsafe { result::ctx::set_current(ctx.unwrap_or(null_mut())) }.unwrap();
}

/// The number of copy threads of this process.
pub(crate) fn copy_threads() -> usize {
    threads("twinbuf-copy")
}

/// The number of this process's threads of this name, after threads that were joined have left its list: the kernel
/// wakes the joiner before it removes a thread from `/proc`. A thread that was not joined stays there.
pub(crate) fn threads(wanted: &str) -> usize {
    let listed = || {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .filter(|name| name.trim_end() == wanted)
            .count()
    };
    let looked = std::time::Instant::now();
    loop {
        match listed() {
            left if left > 0 && looked.elapsed() < Duration::from_secs(60) => std::thread::yield_now(),
            left => return left,
        }
    }
}

pub(crate) const BYTES: usize = 1024;
/// The code of the errors that are injected.
pub(crate) const LAUNCH_FAILED: u32 = 719;

/// The batch's contents on the device, read on `stream`.
pub(crate) fn bytes<M>(batch: &Lease<M>, stream: &Arc<CudaStream>) -> Vec<u8> {
    let view = batch.on::<u8>(stream).unwrap();
    let mut bytes = vec![0; view.len()];
    if !bytes.is_empty() {
        stream.memcpy_dtoh(&view, &mut bytes).unwrap();
        stream.synchronize().unwrap();
    }
    bytes
}

pub(crate) fn commit(slots: &mut HostSlots<u64>, len: usize, value: u8) -> Result<(), Error> {
    let mut slot = slots.acquire()?;
    slot[..len].fill(value);
    slot.commit(len, u64::from(value))
}

/// Commits a batch of this byte, and receives it.
pub(crate) fn upload(slots: &mut HostSlots<u64>, batches: &mut DeviceBatches<u64>, value: u8) -> Lease<u64> {
    commit(slots, BYTES, value).unwrap();
    batches.recv().unwrap().unwrap()
}

/// Uploads batches of these bytes, one after the other: each arrives.
#[track_caller]
pub(crate) fn arrive(
    slots: &mut HostSlots<u64>,
    batches: &mut DeviceBatches<u64>,
    stream: &Arc<CudaStream>,
    values: std::ops::Range<u8>,
) {
    for value in values {
        assert_eq!(bytes(&upload(slots, batches, value), stream), [value; BYTES]);
    }
}

pub(crate) fn uploader(ctx: &Arc<CudaContext>, overlap: bool) -> (HostSlots<u64>, DeviceBatches<u64>) {
    Uploader::new(ctx, BYTES).overlap(overlap).build().unwrap()
}

/// What fills an upload with these bytes, part by part.
pub(crate) fn from(bytes: &[u8]) -> impl Fn(usize, &mut [u8]) -> io::Result<()> + Send + Sync + '_ {
    move |at, out| {
        out.copy_from_slice(&bytes[at..][..out.len()]);
        Ok(())
    }
}

/// Bytes of which neighbours differ, as do those of another seed.
pub(crate) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed * 37 + i * 11 + i / 256).to_le_bytes()[0]).collect()
}

struct Calls<F>(F);

impl<F: Fn() + Send + Sync> Wake for Calls<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

/// A waker that calls this.
pub(crate) fn waker(wake: impl Fn() + Send + Sync + 'static) -> Waker {
    Arc::new(Calls(wake)).into()
}

/// Host slots in memory of the caller.
pub(crate) fn lent_slots(count: usize, bytes: usize) -> Vec<lent::Host> {
    let slot = |_| {
        let mut memory = vec![0_u8; bytes].into_boxed_slice();
        let at = NonNull::from(&mut memory[..]).cast();
        // SAFETY: the lender owns it.
        unsafe { lent::Host::new(at, bytes, memory) }
    };
    (0..count).map(slot).collect()
}

pub(crate) const MODES: [CUstreamCaptureMode; 3] = [
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
];
