//! The duration of one small copy: on a stream of the user without an uploader, with an idle one, and with a busy one;
//! and through an uploader.

use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::Uploader;
use twinbuf_cuda::cudarc::driver::CudaContext;

use super::measure::{Source, beside_uploads, fill, median, receive, rounds, seconds};
use super::{Extent, Line, Result, entry};

const BYTES: usize = 4096;

pub(crate) fn latency(ctx: &Arc<CudaContext>, extent: &Extent, line: Line<'_>) {
    line(entry("beside", "nothing", plain(ctx, extent)));
    line(entry("beside", "an idle uploader", idle(ctx, extent)));
    line(entry("beside", "a busy uploader", busy(ctx, extent)));
    line(uploader(ctx, extent));
}

/// The number of copies, one after another.
fn count(extent: &Extent) -> usize {
    100 * extent.rounds
}

fn plain(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let stream = ctx.new_stream()?;
    let source = Source::pinned(BYTES, 0)?;
    let mut target = stream.alloc_zeros::<u8>(BYTES)?;
    let times = rounds(count(extent), || fill(&mut target, &source, &stream, 1))?;
    Ok(json!({ "plain_4k": median(times) }))
}

fn idle(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let sides = Uploader::new(ctx, extent.at_most(64 << 20)?).build::<()>()?;
    let figures = plain(ctx, extent);
    drop(sides);
    figures
}

fn busy(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let size = extent.at_most(64 << 20)?;
    beside_uploads(Uploader::new(ctx, size).build()?, size, || plain(ctx, extent))
}

fn uploader(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let (mut slots, mut batches) = Uploader::new(ctx, BYTES).build::<()>()?;
    let mut times = Vec::new();
    for round in 0..=count(extent) {
        let slot = slots.acquire()?;
        let took = seconds(|| {
            slot.commit(BYTES, ())?;
            receive(&mut batches, 1)
        })?;
        times.extend((round > 0).then_some(took));
    }
    Ok(json!({ "uploader_4k": median(times) }))
}
