//! What all measurements share: memory to copy from, timing, and figures.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, result, sys};
use twinbuf_cuda::{DeviceBatches, HostSlots, lent};

use super::Result;

/// Host memory to copy from, page-locked or not.
pub(crate) enum Source {
    Pinned(*mut u8, usize),
    Pageable(Vec<u8>),
}

impl Source {
    pub(crate) fn pinned(bytes: usize, flags: u32) -> Result<Self> {
        // SAFETY: set below, and freed by `drop`.
        let start = unsafe { result::malloc_host(bytes, flags) }?.cast::<u8>();
        // SAFETY: that many bytes were allocated.
        unsafe { start.write_bytes(1, bytes) };
        Ok(Self::Pinned(start, bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: allocated and set by `pinned`.
            Self::Pinned(start, bytes) => unsafe { std::slice::from_raw_parts(*start, *bytes) },
            Self::Pageable(bytes) => bytes,
        }
    }
}

// SAFETY: plain memory of the driver's; freed on any thread.
unsafe impl Send for Source {}

/// Two host slots of write-combined memory.
pub(crate) fn write_combined(bytes: usize) -> Result<Vec<lent::Host>> {
    let slot = |_| {
        let source = Source::pinned(bytes, sys::CU_MEMHOSTALLOC_WRITECOMBINED)?;
        let start = NonNull::from(source.bytes()).cast();
        // SAFETY: initialized by `pinned`. The lender owns it, and nothing else uses it.
        Ok(unsafe { lent::Host::new(start, bytes, source) })
    };
    (0..2).map(slot).collect()
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Self::Pinned(start, _) = self {
            // After an error, copies from it may still be running.
            let _ = result::ctx::synchronize();
            // SAFETY: allocated by `pinned`, and used by nothing any more.
            let _ = unsafe { result::free_host(start.cast()) };
        }
    }
}

/// Copies to the target this many times, enqueued at once, and waits for the copies.
pub(crate) fn fill(
    target: &mut CudaSlice<u8>,
    source: &Source,
    stream: &Arc<CudaStream>,
    times: usize,
) -> Result<()> {
    let bytes = &source.bytes()[..target.len()];
    let (address, _record) = target.device_ptr_mut(stream);
    for _ in 0..times {
        // SAFETY: both have the same length, and exist until the stream has been waited for.
        unsafe { result::memcpy_htod_async(address, bytes, stream.cu_stream()) }?;
    }
    Ok(stream.synchronize()?)
}

pub(crate) fn seconds(round: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    round()?;
    Ok(start.elapsed().as_secs_f64())
}

/// The seconds of each of so many rounds, after one that is not counted: first touches.
pub(crate) fn rounds(count: usize, mut round: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    round()?;
    (0..count).map(|_| seconds(&mut round)).collect()
}

/// The two sides of an uploader.
pub(crate) type Sides = (HostSlots<()>, DeviceBatches<()>);

/// Receives so many batches, and waits for the last one's copy.
pub(crate) fn receive(batches: &mut DeviceBatches<()>, count: usize) -> Result<()> {
    for _ in 1..count {
        batches.recv()?.ok_or("a short round")?;
    }
    batches.recv()?.ok_or("a short round")?.wait_copied()?;
    Ok(())
}

/// Commits so many batches of `size` bytes, unchanged, on another thread, and receives them.
pub(crate) fn upload((slots, batches): &mut Sides, size: usize, count: usize) -> Result<()> {
    thread::scope(|scope| {
        let reader = scope.spawn(|| (0..count).try_for_each(|_| slots.acquire()?.commit(size, ())));
        receive(batches, count)?;
        Ok(reader.join().map_err(|_| "the reader panicked")??)
    })
}

/// Calls `work` while an uploader copies batches of `size` bytes all the time.
pub(crate) fn beside_uploads<T>(
    (mut slots, mut batches): Sides,
    size: usize,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // Relaxed: nothing else is read because of it.
            while !stop.load(Ordering::Relaxed) {
                slots.acquire()?.commit(size, ())?;
            }
            slots.finish();
            Ok::<(), twinbuf_cuda::Error>(())
        });
        let receiver = scope.spawn(move || {
            while batches.recv()?.is_some() {}
            Ok::<(), twinbuf_cuda::Error>(())
        });
        let measured = work();
        stop.store(true, Ordering::Relaxed);
        let received = receiver.join().map_err(|_| "the receiver panicked")?;
        let measured = measured?;
        received?;
        Ok(measured)
    })
}

/// Rounds of `bytes`, each in one of these times in seconds, as GB/s: median, least, most.
pub(crate) fn rates(bytes: usize, seconds: Vec<f64>) -> Value {
    let mut rates: Vec<f64> = seconds.into_iter().map(|seconds| bytes as f64 / 1e9 / seconds).collect();
    rates.sort_by(f64::total_cmp);
    json!({ "gb_s": rates[rates.len() / 2], "min": rates[0], "max": rates[rates.len() - 1] })
}

/// Of the gaps between copies, at least one.
pub(crate) fn quantiles(mut gaps: Vec<f64>) -> Value {
    gaps.sort_by(f64::total_cmp);
    let gap = |part: f64| gaps.get(((gaps.len() as f64 * part) as usize).min(gaps.len().saturating_sub(1)));
    json!({ "gap_median": gap(0.5), "gap_p99": gap(0.99) })
}

pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
