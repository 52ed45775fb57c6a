//! Work on a stream of the user, in place of training: three-stage runs, concurrent copies, and a neighbour of an uploader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, result};
use twinbuf_cuda::{DeviceBatches, Uploader, View};

use super::kernels::Kernels;
use super::measure::{Source, beside_uploads, fill, median, seconds};
use super::{Extent, Result};

/// Kernels on a stream of the user, in place of training.
pub(crate) struct Work {
    pub(crate) stream: Arc<CudaStream>,
    kernels: Kernels,
    /// The sum of all bytes that were read.
    total: CudaSlice<u64>,
}

impl Work {
    pub(crate) fn new(ctx: &Arc<CudaContext>) -> Result<Self> {
        let stream = ctx.new_stream()?;
        let total = stream.alloc_zeros::<u64>(1)?;
        stream.synchronize()?;
        Ok(Self { kernels: Kernels::new(ctx)?, stream, total })
    }

    /// Takes this long, and no memory bandwidth.
    pub(crate) fn spin(&self, time: Duration) -> Result<()> {
        Ok(self.kernels.spin(&self.stream, time)?)
    }

    /// Reads every byte of a batch.
    pub(crate) fn read(&self, batch: &View<'_, u8>) -> Result<()> {
        let total = self.total.device_ptr(&self.stream).0;
        // SAFETY: the view is for this stream, and both are there until the stream is done.
        Ok(unsafe { self.kernels.sum(&self.stream, batch.address(), batch.len(), total) }?)
    }

    /// The sum of all bytes read so far.
    pub(crate) fn total(&self) -> Result<u64> {
        let total = self.stream.clone_dtoh(&self.total)?;
        Ok(total.first().copied().unwrap_or(0))
    }
}

/// Copies and work at the same time, on two streams, compared with each alone.
pub(crate) fn overlap(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let (work, copying) = (Work::new(ctx)?, ctx.new_stream()?);
    let size = extent.at_most(256 << 20)?;
    let source = Source::pinned(size, 0)?;
    let mut target = copying.alloc_zeros::<u8>(size)?;
    let (address, _record) = target.device_ptr_mut(&copying);
    let taken = |copy: bool, spin: Duration| -> Result<f64> {
        let round = || {
            if copy {
                // SAFETY: both are `size` bytes long, and are there until the stream has been waited for.
                unsafe { result::memcpy_htod_async(address, source.bytes(), copying.cu_stream()) }?;
            }
            if !spin.is_zero() {
                work.spin(spin)?;
            }
            copying.synchronize()?;
            Ok(work.stream.synchronize()?)
        };
        Ok(median((0..extent.rounds).map(|_| seconds(round)).collect::<Result<_>>()?))
    };
    let copy = taken(true, Duration::ZERO)?;
    let spin = Duration::from_secs_f64(copy);
    let (work, both) = (taken(false, spin)?, taken(true, spin)?);
    Ok(json!({
        "bytes": size,
        "copy_alone": copy,
        "work_alone": work,
        "both": both,
        "hidden": (copy + work - both) / copy.min(work),
    }))
}

/// The user's stream without an uploader, with an idle one, and with one that uploads all the time: the duration of the
/// work, and the time that the host needs to enqueue small copies.
pub(crate) fn neighbour(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    const ENQUEUED: u32 = 256;
    let size = extent.at_most(16 << 20)?;
    let (work, spin) = (Work::new(ctx)?, extent.stage / 10);
    let stream = &work.stream;
    let small = stream.alloc_zeros::<u8>(4096)?;
    let mut target = stream.alloc_zeros::<u8>(4096)?;
    let mut once = || -> Result<[f64; 2]> {
        let took = seconds(|| {
            work.spin(spin)?;
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
    // Alternated, so a change of the clock or of another load affects all three.
    let mut figures = [const { Vec::new() }; 3];
    for _ in 0..extent.rounds {
        figures[0].push(once()?);
        let sides = Uploader::new(ctx, size).host_depth(4).device_depth(4).build::<()>()?;
        figures[1].push(once()?);
        figures[2].push(beside_uploads(sides, size, &mut once)?);
    }
    let medians =
        |rounds: Vec<[f64; 2]>| [0, 1].map(|of| median(rounds.iter().map(|round| round[of]).collect()));
    let [alone, idle, busy] = figures.map(medians);
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

/// The most that a copy takes in a three-stage run, in seconds: at 50 GB/s that is half a gigabyte a slot.
const LONGEST_COPY: f64 = 0.01;

/// Each pipeline runs this often, both ways in turn.
const EPOCHS: usize = 3;

/// Load (sleep), copy, train (two kernels), in this proportion: one after the other, and overlapped.
pub(crate) fn pipeline(
    ctx: &Arc<CudaContext>,
    extent: &Extent,
    work: &Work,
    parts: [f64; 3],
) -> Result<Value> {
    let longest = parts.iter().copied().fold(0.0, f64::max);
    let scale = (extent.stage.as_secs_f64() / longest).min(LONGEST_COPY / parts[1]);
    let [load, copy, train] = parts.map(|part| part * scale);
    let count = (extent.epoch.as_secs_f64() / (longest * scale)).ceil() as usize;
    // The bytes that take this long at the rate of one large copy.
    let size = bytes_in(ctx, extent, copy)?;
    let (load, train, stream) = (Duration::from_secs_f64(load), Duration::from_secs_f64(train), &work.stream);
    let alone = alone(ctx, size, load, || {
        work.spin(train)?;
        Ok(stream.synchronize()?)
    })?;
    let epoch = |overlap: bool| -> Result<f64> {
        let (mut slots, mut batches) = Uploader::new(ctx, size).overlap(overlap).build::<()>()?;
        let start = Instant::now();
        let step = |batches: &mut DeviceBatches<()>| -> Result<()> {
            let batch = batches.recv()?.ok_or("a short epoch")?;
            work.read(&batch.on::<u8>(stream)?)?;
            work.spin(train)?;
            drop(batch);
            Ok(stream.synchronize()?) // a training loop reads its loss back
        };
        let mut read = move |seq: usize| {
            let mut slot = slots.acquire()?;
            std::thread::sleep(load);
            // All other bytes are zero.
            slot[..STAMP].copy_from_slice(&stamp(seq));
            slot.commit(size, ())
        };
        // Each wall time ends before any slot is freed, because freeing page-locked memory takes long.
        let wall = if overlap {
            std::thread::scope(|scope| -> Result<Duration> {
                // Dropped in here, before the scope waits: the reader then ends, whatever fails.
                let mut batches = batches;
                let reader = scope.spawn(move || (0..count).try_for_each(&mut read).map(|()| read));
                for _ in 0..count {
                    step(&mut batches)?;
                }
                let wall = start.elapsed();
                drop(reader.join().map_err(|_| "the reader panicked")??);
                Ok(wall)
            })?
        } else {
            for seq in 0..count {
                read(seq)?;
                step(&mut batches)?;
            }
            start.elapsed()
        };
        Ok(wall.as_secs_f64())
    };
    let wanted = (0..count).flat_map(stamp).map(u64::from).sum::<u64>();
    let (mut serial, mut overlapped) = (Vec::new(), Vec::new());
    for overlap in (0..EPOCHS).flat_map(|_| [false, true]) {
        let before = work.total()?;
        let wall = epoch(overlap)?;
        let found = work.total()? - before;
        if found != wanted {
            return Err(format!("the sum of all bytes: wanted {wanted}, found {found}").into());
        }
        if overlap { overlapped.push(wall) } else { serial.push(wall) }
    }
    let longest = count as f64 * alone.iter().copied().fold(0.0, f64::max);
    let (serial, overlapped) = (median(serial), median(overlapped));
    Ok(json!({
        "batches": count,
        "batch_bytes": size,
        "stage_seconds": { "load": alone[0], "copy": alone[1], "train": alone[2] },
        "serial": serial,
        "overlapped": overlapped,
        "longest": longest,
        "overlapped_over_longest": overlapped / longest,
    }))
}

/// Bytes that differ between batches.
const STAMP: usize = 8;

/// The bytes differ from one batch to the next, and so does their sum.
fn stamp(seq: usize) -> [u8; STAMP] {
    (seq as u64).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()
}

/// Returns the median seconds of a load, a copy and a training step, each run alone: they only approximate the
/// requested times.
fn alone(
    ctx: &Arc<CudaContext>,
    size: usize,
    load: Duration,
    mut train: impl FnMut() -> Result<()>,
) -> Result<[f64; 3]> {
    let stream = ctx.new_stream()?;
    let source = Source::pinned(size, 0)?;
    let mut batch = stream.alloc_zeros::<u8>(size)?;
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..EPOCHS {
        times[0].push(seconds(|| {
            std::thread::sleep(load);
            Ok(())
        })?);
        times[1].push(seconds(|| fill(&mut batch, &source, &stream, 1))?);
        times[2].push(seconds(&mut train)?);
    }
    Ok(times.map(median))
}

/// The number of bytes that a copy moves in `long` seconds.
fn bytes_in(ctx: &Arc<CudaContext>, extent: &Extent, long: f64) -> Result<usize> {
    let stream = ctx.new_stream()?;
    let size = extent.at_most(64 << 20)?;
    let source = Source::pinned(size, 0)?;
    let mut target = stream.alloc_zeros::<u8>(size)?;
    let mut best = f64::INFINITY;
    for _ in 0..extent.rounds {
        best = best.min(seconds(|| fill(&mut target, &source, &stream, 1))?);
    }
    Ok((size as f64 * long / best).max(STAMP as f64) as usize)
}
