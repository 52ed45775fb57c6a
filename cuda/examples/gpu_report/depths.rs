//! Uploads by size and depth, compared with a program that uses only cudarc: with one stream, and with two.

use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::Uploader;
use twinbuf_cuda::cudarc::driver::CudaContext;

use super::measure::{median, rates, seconds, upload};
use super::{Extent, Result};

/// As many slots on either side.
const DEPTHS: [usize; 4] = [1, 2, 4, 8];

/// The same bytes, alternately by hand and through uploaders.
pub(crate) fn depths(ctx: &Arc<CudaContext>, extent: &Extent, size: usize) -> Result<Value> {
    let count = extent.count(size);
    let mut ways: Vec<Box<dyn FnMut() -> Result<()>>> = Vec::new();
    for streams in [1, 2] {
        let mut by_hand = ByHand::new(ctx, size, streams)?;
        ways.push(Box::new(move || by_hand.copy(count)));
    }
    for depth in DEPTHS {
        let mut sides = Uploader::new(ctx, size).host_depth(depth).device_depth(depth).build()?;
        ways.push(Box::new(move || upload(&mut sides, size, count)));
    }
    let mut times = vec![Vec::new(); ways.len()];
    // The first round is not counted: first touches.
    for round in 0..=extent.rounds {
        for (way, times) in ways.iter_mut().zip(&mut times) {
            let took = seconds(way)?;
            times.extend((round > 0).then_some(took));
        }
    }
    let mut times = times.into_iter();
    let (one, two) = (times.next().unwrap_or_default(), times.next().unwrap_or_default());
    let by_depth: Vec<Value> = DEPTHS
        .into_iter()
        .zip(times)
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
