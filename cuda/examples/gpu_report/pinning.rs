//! How long slots take to allocate: page-locking is the slow part.

use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::Uploader;
use twinbuf_cuda::cudarc::driver::CudaContext;

use super::measure::{Source, seconds};
use super::{Extent, Line, Result, entry};

pub(crate) fn pinning(ctx: &Arc<CudaContext>, extent: &Extent, line: Line<'_>) {
    for &size in extent.sizes.iter().filter(|&&size| size >= 1 << 20) {
        line(entry("bytes", size, one(ctx, size)));
    }
}

/// One allocation that is touched, and one uploader with two host slots and one device slot.
fn one(ctx: &Arc<CudaContext>, size: usize) -> Result<Value> {
    let mut source = None;
    let pinned = seconds(|| {
        source = Some(Source::pinned(size, 0)?);
        Ok(())
    })?;
    let freed = seconds(|| {
        source = None;
        Ok(())
    })?;
    let mut sides = None;
    let built = seconds(|| {
        sides = Some(Uploader::new(ctx, size).device_depth(1).build::<()>()?);
        Ok(())
    })?;
    Ok(json!({ "page_locked": pinned, "freed": freed, "built_with_two_host_slots": built }))
}
