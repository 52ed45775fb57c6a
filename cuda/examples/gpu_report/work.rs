//! Work on a stream of the user, in place of training: with concurrent copies, and with an uploader.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, result};
use twinbuf_cuda::{Uploader, View};

use super::kernels::Kernels;
use super::measure::{Source, beside_uploads, median, seconds};
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
    let mut figures = [const { [const { Vec::new() }; 2] }; 3];
    for _ in 0..extent.rounds {
        let mut add = |kind: usize, [took, enqueued]: [f64; 2]| {
            figures[kind][0].push(took);
            figures[kind][1].push(enqueued);
        };
        add(0, once()?);
        let sides = Uploader::new(ctx, size).host_depth(4).device_depth(4).build::<()>()?;
        add(1, once()?);
        add(2, beside_uploads(sides, size, &mut once)?);
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
