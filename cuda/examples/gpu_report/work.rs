//! Work on a stream of the user's own, in place of training: beside copies, and beside an uploader.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};
use twinbuf_cuda::Uploader;
use twinbuf_cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, result};

use super::measure::{Source, median, seconds};
use super::{Extent, Result};

/// In place of training: a device-to-device copy, repeated.
pub(crate) struct Work {
    /// One for all of it, so that what an error has left there runs before what comes next.
    pub(crate) stream: Arc<CudaStream>,
    /// Both halves of each copy.
    from: CudaSlice<u8>,
    pub(crate) bytes: usize,
    seconds: f64,
}

impl Work {
    /// Shorter copies would measure the launches, run within the cache, and overflow the launch queue.
    const LEAST: f64 = 0.5e-3;

    /// Copies that take that long each, or that take an eighth of the free memory.
    pub(crate) fn new(ctx: &Arc<CudaContext>) -> Result<Self> {
        const COPIES: u32 = 8;
        let (stream, (free, _)) = (ctx.new_stream()?, ctx.mem_get_info()?);
        let mut bytes = 1 << 20;
        loop {
            let from = stream.alloc_zeros::<u8>(2 * bytes)?;
            let mut work = Self { stream: stream.clone(), from, bytes, seconds: 0.0 };
            work.enqueue(COPIES)?;
            stream.synchronize()?;
            let start = Instant::now();
            work.enqueue(COPIES)?;
            stream.synchronize()?;
            work.seconds = start.elapsed().as_secs_f64() / f64::from(COPIES);
            if work.seconds >= Self::LEAST || 2 * 2 * bytes > free / 8 {
                return Ok(work);
            }
            bytes *= 2;
        }
    }

    pub(crate) fn copies(&self, seconds: f64) -> u32 {
        (seconds / self.seconds).round().clamp(1.0, 1e6) as u32
    }

    pub(crate) fn enqueue(&self, copies: u32) -> Result<()> {
        let (from, _record) = self.from.device_ptr(&self.stream);
        for _ in 0..copies {
            let to = from + self.bytes as u64;
            // SAFETY: both halves are that long, and are there until the stream has been waited for.
            unsafe { result::memcpy_dtod_async(to, from, self.bytes, self.stream.cu_stream()) }?;
        }
        Ok(())
    }
}

/// Copies and work at the same time, on two streams, against each alone.
pub(crate) fn overlap(ctx: &Arc<CudaContext>, extent: &Extent, work: &Work) -> Result<Value> {
    let copying = ctx.new_stream()?;
    let size = extent.sizes.iter().copied().max().ok_or("no sizes")?;
    let source = Source::pinned(size, 0)?;
    let mut target = copying.alloc_zeros::<u8>(size)?;
    let (address, _record) = target.device_ptr_mut(&copying);
    let taken = |copy: bool, copies: u32| -> Result<f64> {
        let round = || {
            if copy {
                // SAFETY: both are `size` bytes long, and are there until the stream has been waited for.
                unsafe { result::memcpy_htod_async(address, source.bytes(), copying.cu_stream()) }?;
            }
            work.enqueue(copies)?;
            copying.synchronize()?;
            Ok(work.stream.synchronize()?)
        };
        Ok(median((0..extent.rounds).map(|_| seconds(round)).collect::<Result<_>>()?))
    };
    let copy = taken(true, 0)?;
    let copies = work.copies(copy);
    let (work, both) = (taken(false, copies)?, taken(true, copies)?);
    Ok(json!({
        "bytes": size,
        "copy_alone": copy,
        "work_alone": work,
        "both": both,
        "hidden": (copy + work - both) / copy.min(work),
    }))
}

/// The user's stream, without an uploader, beside an idle one, and beside one that uploads all the time: how long the work
/// takes, and how long the host takes to enqueue small copies.
pub(crate) fn neighbour(ctx: &Arc<CudaContext>, extent: &Extent, work: &Work) -> Result<Value> {
    const ENQUEUED: u32 = 256;
    let size = extent.sizes.iter().copied().filter(|&size| size <= 16 << 20).max().ok_or("no sizes")?;
    let copies = work.copies(extent.stage.as_secs_f64() / 10.0);
    let stream = &work.stream;
    let small = stream.alloc_zeros::<u8>(4096)?;
    let mut target = stream.alloc_zeros::<u8>(4096)?;
    let mut once = || -> Result<[f64; 2]> {
        let took = seconds(|| {
            work.enqueue(copies)?;
            Ok(stream.synchronize()?)
        })?;
        let start = Instant::now();
        for _ in 0..ENQUEUED {
            stream.memcpy_dtod(&small, &mut target)?;
        }
        let enqueued = start.elapsed().as_secs_f64() / f64::from(ENQUEUED);
        stream.synchronize()?;
        Ok([took, enqueued])
    };
    once()?; // not counted: first touches
    // In turn, so that a change of the clock or of another load meets all three.
    let mut figures = [const { [const { Vec::new() }; 2] }; 3];
    for _ in 0..extent.rounds {
        let mut add = |kind: usize, [took, enqueued]: [f64; 2]| {
            figures[kind][0].push(took);
            figures[kind][1].push(enqueued);
        };
        add(0, once()?);
        let (mut slots, batches) = Uploader::new(ctx, size).host_depth(4).device_depth(4).build::<()>()?;
        add(1, once()?);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| -> Result<()> {
            let mut batches = batches;
            scope.spawn(|| {
                // Relaxed: nothing else is read because of it.
                while !stop.load(Ordering::Relaxed) {
                    let slot = slots.acquire()?;
                    slot.commit(size, ())?;
                }
                slots.finish();
                Ok::<(), twinbuf_cuda::Error>(())
            });
            let receiver = scope.spawn(move || {
                while batches.recv()?.is_some() {}
                Ok::<(), twinbuf_cuda::Error>(())
            });
            let measured = once();
            stop.store(true, Ordering::Relaxed);
            let received = receiver.join().map_err(|_| "the receiver panicked")?;
            add(2, measured?);
            Ok(received?)
        })?;
    }
    let [alone, idle, busy] = figures.map(|kind| kind.map(median));
    let entry = |[took, enqueue]: [f64; 2]| {
        json!({
            "work": took,
            "enqueue_a_copy": enqueue,
            "work_over_alone": took / alone[0],
            "enqueue_over_alone": enqueue / alone[1],
        })
    };
    Ok(
        json!({ "batch_bytes": size, "alone": entry(alone), "idle_uploader": entry(idle), "busy_uploader": entry(busy) }),
    )
}
