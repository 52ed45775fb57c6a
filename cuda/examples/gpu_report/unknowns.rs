//! What the machine's driver does where a test or the crate relies on it: during captures, which the software driver's tests
//! rely on, and what no documentation says.

use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{CudaContext, CudaStream, DevicePtr, DriverError, result, sys};
use twinbuf_cuda::{Error, Uploader};

use super::measure::{self, Source};
use super::{Line, Result, entry};

pub(crate) fn captures(ctx: &Arc<CudaContext>, line: Line<'_>) {
    line(codes(ctx));
    line(lease(ctx));
}

fn code(result: std::result::Result<(), DriverError>) -> u32 {
    result.map_or_else(|DriverError(code)| code as u32, |()| 0)
}

/// The code of the capture's end.
fn end(stream: &CudaStream) -> u32 {
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
    const BYTES: usize = 4096;
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

const BYTES: usize = 1 << 20;

pub(crate) fn unknowns(ctx: &Arc<CudaContext>, line: Line<'_>) {
    line(entry("what", "frees_in_a_capture", frees(ctx)));
    line(entry("what", "write_combined", write_combined(ctx)));
    // Last: an address that is not refused may cost the context.
    line(entry("what", "address_0", address_0(ctx)));
}

/// Frees and unregisters page-locked memory while a stream is captured in the mode `GLOBAL`: as the thread is, and with
/// the thread's mode relaxed, as the crate does it.
fn frees(ctx: &Arc<CudaContext>) -> Result<Value> {
    type Register = unsafe extern "C" fn(*mut u8, usize, u32) -> sys::CUresult;
    type Unregister = unsafe extern "C" fn(*mut u8) -> sys::CUresult;
    // SAFETY: the driver has been loaded.
    let driver = unsafe { sys::culib() };
    // SAFETY: the type is that of the function of this name in cuda.h.
    let register = unsafe { driver.get::<Register>("cuMemHostRegister_v2") };
    // SAFETY: as above.
    let unregister = unsafe { driver.get::<Unregister>("cuMemHostUnregister") };
    let captured = |relax: bool, call: &mut dyn FnMut() -> u32| -> Result<Value> {
        let stream = ctx.new_stream()?;
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for the call.
        let mut exchange = || relax.then(|| unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) });
        exchange();
        let called = call();
        exchange();
        let end = end(&stream);
        if called != 0 {
            call();
        }
        Ok(json!({ "call": called, "end": end }))
    };
    let mut found = json!({});
    for (name, relax) in [("global", false), ("relaxed", true)] {
        // SAFETY: used by nothing, and freed below.
        let memory = unsafe { result::malloc_host(4096, 0) }?;
        // SAFETY: allocated above; freed again only if this fails.
        let mut free = || code(unsafe { result::free_host(memory) });
        found["free"][name] = captured(relax, &mut free)?;
        let (Ok(register), Ok(unregister)) = (&register, &unregister) else {
            found["unregister"][name] = Value::Null;
            continue;
        };
        let mut pages = vec![0_u8; 3 * 4096];
        let at = pages.as_mut_ptr().addr().next_multiple_of(4096) - pages.as_mut_ptr().addr();
        // SAFETY: in bounds: a page that begins in the first one.
        let page = unsafe { pages.as_mut_ptr().add(at) };
        // SAFETY: the page is there until it is unregistered.
        unsafe { register(page, 4096, 0) }.result()?;
        // SAFETY: registered above; again only if this fails.
        let mut give_up = || code(unsafe { unregister(page) }.result());
        found["unregister"][name] = captured(relax, &mut give_up)?;
    }
    let _ = ctx.check_err();
    Ok(found)
}

/// Whether all bytes arrive that were written to write-combined memory just before the copy: no fence is between.
fn write_combined(ctx: &Arc<CudaContext>) -> Result<Value> {
    const ROUNDS: u8 = 200;
    let stream = ctx.new_stream()?;
    let (mut slots, mut batches) =
        Uploader::new(ctx, BYTES).host_slots(measure::write_combined(BYTES)?).build::<()>()?;
    let mut wrong = 0;
    for round in 0..ROUNDS {
        let mut slot = slots.acquire()?;
        slot.fill(round);
        slot.commit(BYTES, ())?;
        let batch = batches.recv()?.ok_or("no batch")?;
        let found = stream.clone_dtoh(&batch.on::<u8>(&stream)?)?;
        wrong += u32::from(found.iter().any(|byte| *byte != round));
    }
    Ok(json!({ "processor": std::env::consts::ARCH, "rounds": ROUNDS, "wrong": wrong }))
}

/// A view that is used on another stream than its batch was prepared for has address 0, so that a copy from it fails.
/// Measures whether the copy also fails on a device that can read pageable memory.
fn address_0(ctx: &Arc<CudaContext>) -> Result<Value> {
    let pageable = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS;
    let pageable = ctx.attribute(pageable).ok();
    let _ = ctx.check_err();
    let (own, other) = (ctx.new_stream()?, ctx.new_stream()?);
    let (mut slots, mut batches) = Uploader::new(ctx, BYTES).build::<()>()?;
    slots.acquire()?.commit(BYTES, ())?;
    let batch = batches.recv()?.ok_or("no batch")?;
    let view = batch.on::<u8>(&own)?;
    let mut host = Source::pinned(BYTES, 0)?;
    let Source::Pinned(to, _) = &mut host else { return Err("no memory".into()) };
    let (address, _guard) = view.device_ptr(&other);
    // SAFETY: the target has that many bytes, until the stream has been waited for.
    let copy = unsafe { sys::cuMemcpyDtoHAsync_v2((*to).cast(), address, BYTES, other.cu_stream()) };
    let waited = code(other.synchronize());
    let refused = address == 0 && (copy != sys::CUresult::CUDA_SUCCESS || waited != 0);
    Ok(json!({ "pageable_memory_access": pageable, "call": copy as u32, "wait": waited, "refused": refused }))
}
