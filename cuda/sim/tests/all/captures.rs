//! Captures of streams, as the CUDA driver API documents them: the result of each call, and its effect on the capture.
#![allow(clippy::undocumented_unsafe_blocks, reason = "handles that live as long as their test")]

use std::ptr::null_mut;
use std::sync::Arc;

use crate::support::{BYTES, Pinned, address, code, context};
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, result, sys};
use sys::CUstreamCaptureMode::{
    CU_STREAM_CAPTURE_MODE_GLOBAL as GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED as RELAXED,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as THREAD_LOCAL,
};
use twinbuf_cuda_sim::{Options, Sim};

fn begin(stream: &CudaStream) {
    stream.begin_capture(RELAXED).unwrap();
}

/// The end of a capture: its code.
fn end(stream: &CudaStream) -> u32 {
    match unsafe { result::stream::end_capture(stream.cu_stream()) } {
        Ok(graph) => {
            unsafe { result::graph::destroy(graph) }.unwrap();
            0
        }
        Err(error) => code(Err(error)),
    }
}

fn is_capturing(stream: sys::CUstream) -> Result<u32, u32> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    match unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) } {
        CUresult::CUDA_SUCCESS => Ok(status as u32),
        code => Err(code as u32),
    }
}

fn start() -> (Sim, Arc<CudaContext>) {
    let sim = Sim::start(Options { delay_us: 0, ..Options::default() });
    (sim, context().unwrap())
}

/// Slots of the device and in page-locked memory, and the address of the first. The device's is zeroed.
fn slots(stream: &Arc<CudaStream>) -> (CudaSlice<u8>, u64, Pinned) {
    let device = stream.alloc_zeros::<u8>(BYTES).unwrap();
    stream.synchronize().unwrap();
    let at = address(&device);
    (device, at, Pinned::new(BYTES).unwrap())
}

/// Calls while a stream is captured: the code of each, and the code of the capture's end.
#[test]
fn each_call_on_a_captured_stream_returns_its_code() {
    let (_sim, ctx) = start();
    let captured = ctx.new_stream().unwrap();
    let (raw, (_device, address, host)) = (captured.cu_stream(), slots(&captured));
    let (event, elsewhere) = (ctx.new_event(None).unwrap(), ctx.new_event(None).unwrap());
    let never = ctx.new_event(None).unwrap();
    let other = ctx.new_stream().unwrap();
    elsewhere.record(&other).unwrap();
    type Call<'a> = (&'a str, &'a dyn Fn() -> u32, u32, u32);
    let calls: &[Call<'_>] = &[
        ("copy to the device", &|| code(host.upload(address, &captured)), 0, 0),
        ("copy to the host", &|| code(host.download(address, &captured)), 0, 0),
        ("memset", &|| code(unsafe { result::memset_d8_async(address, 1, BYTES, raw) }), 0, 0),
        ("allocate", &|| code(unsafe { result::malloc_async(raw, BYTES) }.map(drop)), 0, 0),
        (
            "allocate and free",
            &|| {
                let memory = unsafe { result::malloc_async(raw, BYTES) }.unwrap();
                code(unsafe { result::free_async(memory, raw) })
            },
            0,
            0,
        ),
        ("free what no graph has allocated", &|| code(unsafe { result::free_async(address, raw) }), 1, 0),
        ("record", &|| code(event.record(&captured)), 0, 0),
        ("wait for an event from outside", &|| code(captured.wait(&elsewhere)), 905, 901),
        ("wait for an event that was never recorded", &|| code(captured.wait(&never)), 0, 0),
        ("synchronize", &|| code(captured.synchronize()), 900, 901),
        ("query", &|| unsafe { sys::cuStreamQuery(raw) } as u32, 900, 901),
        ("synchronize the context", &|| code(result::ctx::synchronize()), 900, 901),
        ("begin again", &|| code(captured.begin_capture(RELAXED)), 401, 0),
        ("use the legacy stream", &|| code(host.upload(address, &ctx.default_stream())), 0, 0),
        ("use another stream", &|| code(host.upload(address, &other)), 0, 0),
    ];
    for &(name, call, wanted, wanted_end) in calls {
        begin(&captured);
        assert_eq!((call(), end(&captured)), (wanted, wanted_end), "{name}");
        assert_eq!(is_capturing(raw), Ok(0), "{name}");
        ctx.synchronize().unwrap(); // gives the copies of different streams an order
    }
    assert_eq!(end(&captured), 401, "there is no capture to end");
    let legacy = ctx.default_stream();
    assert_eq!(code(legacy.begin_capture(RELAXED)), 900);
}

/// What is not enqueued in a stream is forbidden to the capturing thread, unless the capture is relaxed. A question about
/// a captured event is its own error in every mode.
#[test]
fn unsafe_calls_end_a_capture_that_is_not_relaxed() {
    let (_sim, ctx) = start();
    let (captured, other) = (ctx.new_stream().unwrap(), ctx.new_stream().unwrap());
    let (host, mut pageable) = (Pinned::new(BYTES).unwrap(), vec![0_u8; BYTES]);
    let allocate = || unsafe { result::malloc_sync(BYTES) }.unwrap();
    let (to, from) = (allocate(), allocate());
    let event = ctx.new_event(None).unwrap();
    let to_pageable = pageable.as_mut_ptr().cast();
    type Call<'a> = (&'a str, &'a dyn Fn() -> CUresult, u32);
    let module = || {
        let mut module = null_mut();
        unsafe { sys::cuModuleLoadData(&raw mut module, c".version 7.0".as_ptr().cast()) }
    };
    let ask = |ask: unsafe fn(sys::CUevent) -> CUresult| {
        let event = event.cu_event();
        unsafe { sys::cuEventRecord(event, captured.cu_stream()) }.result().unwrap();
        unsafe { ask(event) }
    };
    let calls: &[Call<'_>] = &[
        ("copy to the device", &|| unsafe { sys::cuMemcpyHtoD_v2(to, host.pointer, BYTES) }, 900),
        ("copy to the host", &|| unsafe { sys::cuMemcpyDtoH_v2(host.pointer, from, BYTES) }, 900),
        ("copy on the device", &|| unsafe { sys::cuMemcpyDtoD_v2(to, from, BYTES) }, 900),
        (
            "copy to pageable memory on another stream",
            &|| unsafe { sys::cuMemcpyDtoHAsync_v2(to_pageable, from, BYTES, other.cu_stream()) },
            900,
        ),
        ("copy between addresses", &|| unsafe { sys::cuMemcpy(to, from, BYTES) }, 900),
        ("load a module", &module, 900),
        ("allocate managed memory", &|| unsafe { sys::cuMemAllocManaged(&mut 0, BYTES, 1) }, 900),
        ("allocate", &|| unsafe { sys::cuMemAlloc_v2(&mut 0, BYTES) }, 900),
        ("query another stream", &|| unsafe { sys::cuStreamQuery(other.cu_stream()) }, 900),
        ("query a captured event", &|| ask(sys::cuEventQuery), 907),
        ("wait for a captured event", &|| ask(sys::cuEventSynchronize), 907),
    ];
    for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
        for &(name, call, refused) in calls {
            captured.begin_capture(mode).unwrap();
            let wanted = if mode == RELAXED && refused == 900 { (0, 0) } else { (refused, 901) };
            assert_eq!((call() as u32, end(&captured)), wanted, "{name}, {mode:?}");
            ctx.synchronize().unwrap();
        }
    }
}

/// Captured work does not run until its graph is launched. The accesses are those of the stream that it is launched on, at
/// each launch.
#[test]
fn a_graph_runs_what_was_captured_each_time_that_it_is_launched_and_not_before() {
    let (sim, ctx) = start();
    let stream = ctx.new_stream().unwrap();
    let (device, address, host) = slots(&stream);
    host.fill(7);
    begin(&stream);
    host.upload(address, &stream).unwrap();
    unsafe { result::memset_d8_async(address, 9, 1, stream.cu_stream()) }.unwrap();
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(stream.clone_dtoh(&device).unwrap(), [0; BYTES]);
    for value in [3, 4] {
        host.fill(value);
        graph.launch().unwrap();
        let arrived = stream.clone_dtoh(&device).unwrap();
        assert_eq!((arrived[0], &arrived[1..]), (9, &[value; BYTES][1..]));
    }
    assert_eq!(sim.violations(), [""; 0]);
    graph.launch().unwrap();
    host.fill(5);
    let found = sim.violations();
    assert!(sim.is_real() || found.len() == 1 && found[0].contains("\n    cuGraphLaunch\n"), "{found:#?}");
    stream.synchronize().unwrap();
}

/// "Each launch is ordered behind [..] any previous launches of this executable graph" (`cuGraphLaunch`).
#[test]
fn a_graph_runs_behind_its_launch_before_on_any_stream() {
    let (sim, ctx) = start();
    let streams = [ctx.new_stream().unwrap(), ctx.new_stream().unwrap()];
    let (_device, address, host) = slots(&streams[0]);
    begin(&streams[0]);
    host.upload(address, &streams[0]).unwrap();
    let graph = unsafe { result::stream::end_capture(streams[0].cu_stream()) }.unwrap();
    let instantiate = || {
        let mut executable = null_mut();
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) }.result().unwrap();
        executable
    };
    let two = [instantiate(), instantiate()];
    for (graphs, races) in [([two[0], two[0]], false), (two, true)] {
        for (graph, stream) in graphs.into_iter().zip(&streams) {
            unsafe { result::graph::launch(graph, stream.cu_stream()) }.unwrap();
        }
        streams[1].synchronize().unwrap();
        if !races {
            host.fill(5);
        }
        let found = sim.violations();
        assert_eq!(!found.is_empty(), races && !sim.is_real(), "{found:#?}");
        ctx.synchronize().unwrap();
    }
    for executable in two {
        unsafe { result::graph::exec_destroy(executable) }.unwrap();
    }
    unsafe { result::graph::destroy(graph) }.unwrap();
}

#[test]
fn a_stream_that_waits_for_a_captured_event_belongs_to_the_capture_until_its_end() {
    let (_sim, ctx) = start();
    let [origin, joined, third] = [(); 3].map(|()| ctx.new_stream().unwrap());
    let (fork, join) = (ctx.new_event(None).unwrap(), ctx.new_event(None).unwrap());
    let (_device, address, host) = slots(&origin);
    let forked = || {
        begin(&origin);
        fork.record(&origin).unwrap();
        joined.wait(&fork).unwrap();
        assert_eq!(is_capturing(joined.cu_stream()), Ok(1));
        host.upload(address, &joined).unwrap();
    };
    forked();
    assert_eq!(end(&joined), 903, "begun on another stream");
    join.record(&joined).unwrap();
    origin.wait(&join).unwrap();
    assert_eq!(end(&origin), 0);
    assert_eq!(is_capturing(joined.cu_stream()), Ok(0));
    // A captured event stays captured after the end.
    assert_eq!(code(third.wait(&fork)), 907);
    assert_eq!(code(unsafe { result::event::query(fork.cu_event()) }), 907);
    fork.record(&third).unwrap();
    fork.synchronize().unwrap();

    forked();
    assert_eq!(end(&origin), 904, "the work of the other stream was not joined");

    forked();
    begin(&third);
    assert_eq!(code(third.wait(&fork)), 902);
    assert_eq!((is_capturing(third.cu_stream()), is_capturing(joined.cu_stream())), (Ok(2), Ok(2)));
    assert_eq!(code(host.upload(address, &joined)), 901);
    assert_eq!((end(&third), end(&origin)), (901, 901));
}

#[test]
fn a_capture_is_ended_by_its_thread_unless_it_is_relaxed() {
    let (_sim, ctx) = start();
    let stream = ctx.new_stream().unwrap();
    for (mode, elsewhere) in [(GLOBAL, 908), (THREAD_LOCAL, 908), (RELAXED, 0)] {
        stream.begin_capture(mode).unwrap();
        let other = std::thread::scope(|scope| {
            let end = || {
                ctx.bind_to_thread().unwrap();
                end(&stream)
            };
            scope.spawn(end).join().unwrap()
        });
        assert_eq!(other, elsewhere, "{mode:?}");
        assert_eq!(end(&stream), if other == 0 { 401 } else { 0 }, "{mode:?}");
    }
}

#[test]
fn a_capture_ends_with_the_stream_that_it_was_begun_on() {
    let (_sim, ctx) = start();
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
    unsafe { sys::cuStreamBeginCapture_v2(stream, GLOBAL) }.result().unwrap();
    unsafe { result::stream::destroy(stream) }.unwrap();
    ctx.synchronize().unwrap();
}

/// Streams of cudarc are non-blocking; this one is not.
#[test]
fn the_legacy_stream_is_unusable_while_a_blocking_stream_is_captured() {
    let (_sim, ctx) = start();
    let mut raw = null_mut();
    unsafe { sys::cuStreamCreate(&raw mut raw, 0) }.result().unwrap();
    let begin = || unsafe { sys::cuStreamBeginCapture_v2(raw, RELAXED) }.result().unwrap();
    let end = || {
        let mut graph = null_mut();
        unsafe { sys::cuStreamEndCapture(raw, &raw mut graph) as u32 }
    };
    let event = ctx.new_event(None).unwrap();
    begin();
    assert_eq!(is_capturing(null_mut()), Err(906));
    assert_eq!((is_capturing(raw), end()), (Ok(1), 0), "asking is harmless");
    let calls: [&dyn Fn() -> u32; 3] = [
        &|| code(event.record(&ctx.default_stream())),
        &|| code(ctx.default_stream().synchronize()),
        &|| code(ctx.default_stream().wait(&event)),
    ];
    for call in calls {
        begin();
        assert_eq!((call(), end()), (906, 901));
    }
    assert_eq!(is_capturing(null_mut()), Ok(0));
    unsafe { sys::cuStreamDestroy_v2(raw) }.result().unwrap();
}

#[test]
fn a_capture_forbids_waits_to_its_thread_and_a_global_one_to_every_thread_that_does_not_opt_out() {
    let (_sim, ctx) = start();
    let (captured, event) = (ctx.new_stream().unwrap(), ctx.new_event(None).unwrap());
    // Waits for the event on a new thread with this mode.
    let elsewhere = |mode| {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                ctx.bind_to_thread().unwrap();
                let mut mode = mode;
                unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().unwrap();
                assert_eq!(mode, GLOBAL, "what a thread begins with");
                event.synchronize()
            });
            thread.join().unwrap()
        })
    };
    // The capture's mode; the waiting thread's mode and whether it is another thread; whether both are valid.
    let table = [
        (GLOBAL, GLOBAL, true, false),
        (GLOBAL, THREAD_LOCAL, true, true),
        (GLOBAL, RELAXED, true, true),
        (GLOBAL, GLOBAL, false, false),
        (THREAD_LOCAL, GLOBAL, true, true),
        (THREAD_LOCAL, GLOBAL, false, false),
        (RELAXED, GLOBAL, true, true),
        (RELAXED, GLOBAL, false, true),
    ];
    for (capture, thread, other, well) in table {
        captured.begin_capture(capture).unwrap();
        let waited = if other { elsewhere(thread) } else { event.synchronize() };
        let wanted = if well { (0, 0) } else { (900, 901) };
        let row = format!("{capture:?}, {thread:?}, another thread: {other}");
        assert_eq!((code(waited), end(&captured)), wanted, "{row}");
    }
    captured.synchronize().unwrap();
}
