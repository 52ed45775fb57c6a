//! What the machine's driver does while a stream is being captured (the software driver's tests rely on it), and what
//! happens to a lease that is dropped then.

use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use twinbuf_cuda::{Error, Uploader};

use super::{Line, Result};

const BYTES: usize = 4096;

pub(crate) fn captures(ctx: &Arc<CudaContext>, line: Line<'_>) {
    line(codes(ctx));
    line(lease(ctx));
}

pub(super) fn code(result: std::result::Result<(), DriverError>) -> u32 {
    result.map_or_else(|DriverError(code)| code as u32, |()| 0)
}

/// The code of the capture's end.
pub(super) fn end(stream: &CudaStream) -> u32 {
    // SAFETY: the stream exists.
    match unsafe { result::stream::end_capture(stream.cu_stream()) } {
        Ok(graph) if graph.is_null() => 0,
        // SAFETY: the graph exists, and is destroyed once.
        Ok(graph) => code(unsafe { result::graph::destroy(graph) }),
        Err(DriverError(code)) => code as u32,
    }
}

/// The code of each call on a captured stream, and the code of the capture's end.
fn codes(ctx: &Arc<CudaContext>) -> Result<Value> {
    let (captured, other) = (ctx.new_stream()?, ctx.new_stream()?);
    let (event, outside, never) = (ctx.new_event(None)?, ctx.new_event(None)?, ctx.new_event(None)?);
    outside.record(&other)?;
    // SAFETY: the event exists.
    let ask = |event: sys::CUevent| code(unsafe { result::event::query(event) });
    let recorded = || code(event.record(&captured));
    let calls: [(&str, &dyn Fn() -> u32); 7] = [
        ("record", &recorded),
        ("record_and_query", &|| recorded().max(ask(event.cu_event()))),
        ("wait_for_an_event_from_outside", &|| code(captured.wait(&outside))),
        ("wait_for_an_event_never_recorded", &|| code(captured.wait(&never))),
        ("synchronize", &|| code(captured.synchronize())),
        ("begin_again", &|| {
            code(captured.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED))
        }),
        ("another_stream_waits", &|| recorded().max(code(other.wait(&event)))),
    ];
    let mut codes = serde_json::Map::new();
    for (name, call) in calls {
        captured.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
        let called = call();
        codes.insert(name.to_string(), json!({ "call": called, "end": end(&captured) }));
    }
    let _ = ctx.check_err();
    Ok(json!({ "codes": codes }))
}

/// In each mode: whether the slot is held until the end of the capture, the capture is whole, and the next batch comes.
fn lease(ctx: &Arc<CudaContext>) -> Result<Value> {
    let mut modes = serde_json::Map::new();
    for (name, mode) in [
        ("global", sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL),
        ("thread_local", sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
        ("relaxed", sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED),
    ] {
        let stream = ctx.new_stream()?;
        let (mut slots, mut batches) = Uploader::new(ctx, BYTES).device_depth(1).build::<u32>()?;
        slots.acquire()?.commit(BYTES, 1)?;
        let lease = batches.recv()?.ok_or("no batch")?;
        lease.on::<u8>(&stream)?;
        stream.begin_capture(mode)?;
        let refused = lease.on::<u8>(&stream).err() == Some(Error::Captured);
        drop(lease);
        slots.acquire()?.commit(BYTES, 2)?;
        let held = matches!(batches.recv(), Err(Error::SlotHeld { .. }));
        let end = end(&stream);
        let next = batches.recv()?.ok_or("no batch")?;
        let well = refused && held && end == 0 && *next.meta() == 2;
        modes.insert(name.to_string(), json!({ "well": well, "end": end }));
    }
    Ok(json!({ "modes": modes }))
}
