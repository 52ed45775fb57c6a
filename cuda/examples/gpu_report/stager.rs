//! Weights into and out of memory that the caller allocated: a stager with one thread and more, against cudarc's copies of
//! pageable memory.

use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::Stager;
use twinbuf_cuda::cudarc::driver::CudaContext;

use super::measure::{median, rounds};
use super::{Extent, Result};

/// From the first byte read on the host until the stream is done, and back; once whole, once in small slices.
pub(crate) fn stager(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let (size, slice) = (extent.large, extent.slot / 64);
    let source: Vec<u8> = (0..size).map(|i| (i / slice) as u8 ^ i as u8).collect();
    let mut back = vec![0_u8; size];
    let stream = ctx.new_stream()?;
    let mut target = stream.alloc_zeros::<u8>(size)?;
    let middle = |round: &mut dyn FnMut() -> Result<()>| rounds(extent.rounds, round).map(median);
    let pageable = middle(&mut || {
        stream.memcpy_htod(&source, &mut target)?;
        Ok(stream.synchronize()?)
    })?;
    let mut threads = Vec::new();
    for fill_threads in [1, 2, 4, 8] {
        let mut stager = Stager::new(ctx).slot_bytes(extent.slot).fill_threads(fill_threads).build()?;
        let whole = middle(&mut || {
            stager.scope(&stream, |to| to.upload(&source, target.as_view_mut()))?;
            Ok(stream.synchronize()?)
        })?;
        let slices = middle(&mut || {
            stager.scope(&stream, |to| {
                let mut parts = target.as_view_mut().chunks_exact_mut(slice).zip(source.chunks(slice));
                parts.try_for_each(|(part, bytes)| to.upload(bytes, part))
            })?;
            Ok(stream.synchronize()?)
        })?;
        let offload =
            middle(&mut || Ok(stager.scope(&stream, |from| from.offload(target.as_view(), &mut back))?))?;
        if back != source {
            return Err("other bytes came back".into());
        }
        threads.push(json!({
            "fill_threads": fill_threads,
            "upload": whole,
            "upload_slices": slices,
            "offload": offload,
            "pageable_over_upload": pageable / whole,
        }));
    }
    Ok(
        json!({ "bytes": size, "slices": size / slice, "slot_bytes": extent.slot, "pageable": pageable, "threads": threads }),
    )
}
