//! Shared parts of the tests: a driver with a context, an uploader of small batches, a watchdog, the count of copy
//! threads.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::Write;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Condvar, Mutex, Once};
use std::time::Duration;

use cudarc::driver::sys::{CUcontext, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaStream, result};
use twinbuf_cuda::{DeviceBatches, Error, HostSlots, Lease, Uploader, context, lent};
use twinbuf_cuda_sim::{Options, Sim};

/// A driver without delays, and its context, with cudarc's event tracking or without.
pub(crate) fn start(seed: u64, tracking: bool) -> (Sim, Arc<CudaContext>) {
    start_with(Options { delay_us: 0, pieces: 1, ..Options::seeded(seed) }, tracking)
}

/// The same with these options.
pub(crate) fn start_with(options: Options, tracking: bool) -> (Sim, Arc<CudaContext>) {
    let sim = Sim::start(options);
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
pub(crate) fn start_software() -> Option<(Sim, Arc<CudaContext>)> {
    let (sim, ctx) = start(1, false);
    (!sim.is_real()).then_some((sim, ctx))
}

/// A test that takes longer hangs. Default: 20 minutes, for busy machines.
fn hung() -> Duration {
    let seconds = std::env::var("TWINBUF_HUNG_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(1200))
}

/// Ends the process if `test` hangs: a hang must be a failure. The watchdog's thread allocates nothing while the test runs.
#[track_caller]
pub(crate) fn must_end(test: impl FnOnce() + Send + 'static) {
    let test_at = std::panic::Location::caller();
    // Whether the test runs: not before the watchdog does.
    let runs = Arc::new((Mutex::new(false), Condvar::new()));
    let watched = runs.clone();
    let watchdog = std::thread::spawn(move || {
        let (runs, changed) = &*watched;
        let mut running = runs.lock().unwrap();
        *running = true;
        changed.notify_one();
        let hung = hung();
        if changed.wait_timeout_while(running, hung, |runs| *runs).unwrap().1.timed_out() {
            // Not a print macro: the test harness captures its output until the test ends.
            let _ = writeln!(std::io::stderr(), "hung: the test at {test_at} has not ended in {hung:?}");
            std::process::abort();
        }
    });
    let (runs, changed) = &*runs;
    drop(changed.wait_while(runs.lock().unwrap(), |runs| !*runs).unwrap());
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
    *runs.lock().unwrap() = false;
    changed.notify_one();
    watchdog.join().unwrap();
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
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
