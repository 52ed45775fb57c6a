//! Uploads by size and depth, compared with a program that uses only cudarc: with one stream, and with two.

use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::Uploader;
use twinbuf_cuda::cudarc::driver::CudaContext;

use super::measure::{median, rates, seconds};
use super::{Extent, Result};

/// As many slots on either side.
const DEPTHS: [usize; 4] = [1, 2, 4, 8];

/// The same bytes, alternately by hand and through uploaders.
pub(crate) fn depths(ctx: &Arc<CudaContext>, extent: &Extent, size: usize) -> Result<Value> {
    let count = extent.count(size);
    let mut by_hand = [ByHand::new(ctx, size, 1)?, ByHand::new(ctx, size, 2)?];
    let mut uploaders = Vec::new();
    for depth in DEPTHS {
        uploaders.push(Uploader::new(ctx, size).host_depth(depth).device_depth(depth).build::<()>()?);
    }
    let mut times = vec![Vec::new(); by_hand.len() + uploaders.len()];
    // The first round is not counted: first touches.
    for round in 0..=extent.rounds {
        let (hands, rings) = times.split_at_mut(by_hand.len());
        for (hand, times) in by_hand.iter_mut().zip(hands) {
            let took = seconds(|| hand.copy(count))?;
            times.extend((round > 0).then_some(took));
        }
        for ((slots, batches), times) in uploaders.iter_mut().zip(rings) {
            let took = seconds(|| {
                std::thread::scope(|scope| -> Result<()> {
                    let reader =
                        scope.spawn(|| (0..count).try_for_each(|_| slots.acquire()?.commit(size, ())));
                    for left in (0..count).rev() {
                        let batch = batches.recv()?.ok_or("a short round")?;
                        if left == 0 {
                            batch.wait_copied()?;
                        }
                    }
                    Ok(reader.join().map_err(|_| "the reader panicked")??)
                })
            })?;
            times.extend((round > 0).then_some(took));
        }
    }
    let uploads = times.split_off(by_hand.len());
    let two = times.pop().unwrap_or_default();
    let one = times.pop().unwrap_or_default();
    let by_depth: Vec<Value> = DEPTHS
        .into_iter()
        .zip(uploads)
        .map(|(depth, times)| {
            let ratio = median(one.iter().zip(&times).map(|(hand, ring)| hand / ring).collect());
            json!({ "depth": depth, "uploader": rates(size * count, times), "over_one_stream": ratio })
        })
        .collect();
    Ok(json!({
        "cudarc_one_stream": rates(size * count, one),
        "cudarc_two_streams": rates(size * count, two),
        "depths": by_depth,
    }))
}

/// Double buffering by hand with cudarc's safe calls: two page-locked buffers, on one stream or two.
struct ByHand {
    streams: Vec<Arc<twinbuf_cuda::cudarc::driver::CudaStream>>,
    sources: Vec<twinbuf_cuda::cudarc::driver::PinnedHostSlice<u8>>,
    targets: Vec<twinbuf_cuda::cudarc::driver::CudaSlice<u8>>,
}

impl ByHand {
    fn new(ctx: &Arc<CudaContext>, size: usize, streams: usize) -> Result<Self> {
        let streams = (0..streams).map(|_| ctx.new_stream()).collect::<std::result::Result<Vec<_>, _>>()?;
        let (mut sources, mut targets) = (Vec::new(), Vec::new());
        for i in 0..2 {
            // SAFETY: set below.
            let mut source = unsafe { ctx.alloc_pinned::<u8>(size) }?;
            source.as_mut_slice()?.fill(1);
            sources.push(source);
            targets.push(streams[i % streams.len()].alloc_zeros::<u8>(size)?);
        }
        Ok(Self { streams, sources, targets })
    }

    fn copy(&mut self, count: usize) -> Result<()> {
        for i in 0..count {
            let source = &mut self.sources[i % 2];
            // Waits until its last copy is done: now it could be filled.
            source.as_mut_slice()?;
            self.streams[i % self.streams.len()].memcpy_htod(source, &mut self.targets[i % 2])?;
        }
        for stream in &self.streams {
            stream.synchronize()?;
        }
        Ok(())
    }
}
