//! Three-stage runs, overlapped and not, against their longest stage.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{CudaContext, CudaSlice, DevicePtr};
use twinbuf_cuda::{DeviceBatches, Uploader};

use super::measure::{Source, fill, median, seconds};
use super::work::Work;
use super::{Extent, Result};

/// The most that a copy takes in a three-stage run, in seconds: at 50 GB/s that is half a gigabyte a slot.
const LONGEST_COPY: f64 = 0.01;

/// Each pipeline runs this often, both ways in turn.
const EPOCHS: usize = 3;

/// Load (sleep), copy, train (device copies), in this proportion: one after the other, and overlapped.
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
    // As many bytes as take that long at the rate of one large copy.
    let size = bytes_in(ctx, extent, copy)?;
    let (load, copies, stream) = (Duration::from_secs_f64(load), work.copies(train), &work.stream);
    let mut train = Train { work, copies, weights: stream.alloc_zeros::<u8>(size)? };
    let alone = alone(ctx, size, load, |batch| {
        train.step(batch)?;
        Ok(stream.synchronize()?)
    })?;
    let mut epoch = |overlap: bool| -> Result<f64> {
        let (mut slots, mut batches) = Uploader::new(ctx, size).overlap(overlap).build::<()>()?;
        let start = Instant::now();
        let mut step = |batches: &mut DeviceBatches<()>| -> Result<()> {
            let batch = batches.recv()?.ok_or("a short epoch")?;
            train.step(&batch.on::<u8>(stream)?)?;
            drop(batch);
            Ok(stream.synchronize()?) // a training loop reads its loss back
        };
        let mut read = move || {
            let slot = slots.acquire()?;
            std::thread::sleep(load);
            slot.commit(size, ())
        };
        // Each wall ends before any slot is given back, which takes long for page-locked memory.
        let wall = if overlap {
            std::thread::scope(|scope| -> Result<Duration> {
                // Dropped in here, before the scope waits: without it the reader ends, whatever fails.
                let mut batches = batches;
                let reader = scope.spawn(move || (0..count).try_for_each(|_| read()).map(|()| read));
                for _ in 0..count {
                    step(&mut batches)?;
                }
                let wall = start.elapsed();
                drop(reader.join().map_err(|_| "the reader panicked")??);
                Ok(wall)
            })?
        } else {
            for _ in 0..count {
                read()?;
                step(&mut batches)?;
            }
            start.elapsed()
        };
        Ok(wall.as_secs_f64())
    };
    let (mut serial, mut overlapped) = (Vec::new(), Vec::new());
    for _ in 0..EPOCHS {
        serial.push(epoch(false)?);
        overlapped.push(epoch(true)?);
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

/// In place of a training step: the batch is read, then work is done on the device.
struct Train<'w> {
    work: &'w Work,
    copies: u32,
    weights: CudaSlice<u8>,
}

impl Train<'_> {
    fn step(&mut self, batch: &impl DevicePtr<u8>) -> Result<()> {
        self.work.stream.memcpy_dtod(batch, &mut self.weights)?;
        self.work.enqueue(self.copies)
    }
}

/// Load, copy and train, each by itself: what was asked for is only about that.
fn alone(
    ctx: &Arc<CudaContext>,
    size: usize,
    load: Duration,
    mut train: impl FnMut(&CudaSlice<u8>) -> Result<()>,
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
        times[2].push(seconds(|| train(&batch))?);
    }
    Ok(times.map(median))
}

/// How many bytes a copy moves that takes `long` seconds.
fn bytes_in(ctx: &Arc<CudaContext>, extent: &Extent, long: f64) -> Result<usize> {
    let stream = ctx.new_stream()?;
    let size = extent.sizes.iter().copied().filter(|&size| size <= 64 << 20).max().ok_or("no sizes")?;
    let source = Source::pinned(size, 0)?;
    let mut target = stream.alloc_zeros::<u8>(size)?;
    let mut best = f64::INFINITY;
    for _ in 0..extent.rounds {
        best = best.min(seconds(|| fill(&mut target, &source, &stream, 1))?);
    }
    Ok((size as f64 * long / best).max(1.0) as usize)
}
