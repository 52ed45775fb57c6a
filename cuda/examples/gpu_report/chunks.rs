//! One large batch at a time, copied whole or in chunks while it is being filled.

use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::Uploader;
use twinbuf_cuda::cudarc::driver::CudaContext;

use super::measure::{median, seconds};
use super::{Extent, Result};

/// From the first byte filled to the last byte copied, for each size of chunks; the host fills by copying from memory.
pub(crate) fn chunks(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let size = extent.large;
    let source = vec![1_u8; size];
    let mut found = Vec::new();
    let mut whole = 0.0;
    for chunk in std::iter::once(size).chain(extent.chunks.iter().copied()) {
        let (mut slots, mut batches) = Uploader::new(ctx, size).chunk_bytes(chunk).build::<()>()?;
        let mut times = Vec::new();
        // The first round is not counted: first touches.
        for round in 0..=extent.rounds {
            let took = seconds(|| {
                let mut slot = slots.acquire()?.reserve();
                for from in source.chunks(chunk) {
                    let flushed = slot.flushed();
                    let at = from.as_ptr().addr() - source.as_ptr().addr();
                    slot[at - flushed..][..from.len()].copy_from_slice(from);
                    slot.flush(at + from.len())?;
                }
                slot.commit(size, ())?;
                batches.recv()?.ok_or("a short round")?.wait_copied()?;
                Ok(())
            })?;
            times.extend((round > 0).then_some(took));
        }
        let took = median(times);
        if chunk == size {
            whole = took;
        }
        found.push(json!({ "chunk_bytes": chunk, "fill_and_copy": took, "whole_over_this": whole / took }));
    }
    Ok(json!({ "bytes": size, "chunks": found }))
}
