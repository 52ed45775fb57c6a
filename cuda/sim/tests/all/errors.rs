//! Injected errors arrive at the requested place, and nowhere else.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use crate::support::{
    BYTES, Edges, Pinned, address, code, device, launch_function, pipeline, slot, start, stream,
};
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, DriverError, result};
use twinbuf_cuda_sim::{Failure, Live, Options, Sim};

const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;
const LAUNCH_FAILED: u32 = 719;

#[test]
fn the_nth_call_of_a_name_fails_as_often_as_asked_counted_from_its_injection() {
    let Some(sim) = start() else { return };
    sim.inject(Failure::api("cuEventRecord", 2, LAUNCH_FAILED));
    let (context, stream) = stream();
    let event = context.new_event(None).unwrap();
    let results: Vec<_> = (0..4).map(|_| code(event.record(&stream))).collect();
    assert_eq!(results, [0, LAUNCH_FAILED, 0, 0]);
    assert_eq!(sim.injected(), ["cuEventRecord"]);
    // The error of a call alone is not sticky.
    context.synchronize().unwrap();
    assert_eq!(sim.calls_of("cuEventRecord"), 4);
    let all = sim.calls();
    event.synchronize().unwrap();
    assert_eq!((sim.calls() - all, sim.calls_of("cuEventSynchronize")), (2, 1)); // one makes the context current
    sim.inject(Failure::api("cuEventRecord", 2, LAUNCH_FAILED).times(2));
    let fine: Vec<_> = (0..5).map(|_| event.record(&stream).is_ok()).collect();
    assert_eq!(fine, [true, false, false, true, true]);
    sim.inject(Failure::api("cuEventRecord", 1, LAUNCH_FAILED).times(u64::MAX));
    assert!((0..5).all(|_| event.record(&stream).is_err()));
}

#[test]
fn a_failed_call_has_no_effect_unless_asked() {
    for effect in [false, true] {
        let Some(sim) = start() else { return };
        let (_context, stream) = stream();
        let mut memory = stream.clone_htod(&[7_u8; 8]).unwrap();
        stream.synchronize().unwrap();
        let failure = Failure::api("cuMemsetD8Async", 1, ILLEGAL_ADDRESS);
        sim.inject(if effect { failure.after_effect() } else { failure });
        stream.memset_zeros(&mut memory).unwrap_err();
        sim.drain();
        let byte = if effect { 0 } else { 7 };
        assert_eq!(sim.peek(address(&memory), 8), Some(vec![byte; 8]));
    }
}

#[test]
fn every_call_of_a_run_can_fail_and_nothing_leaks() {
    let mut failed = Vec::new();
    for call in 1.. {
        let Some(sim) = start() else { return };
        sim.inject(Failure::call(call, LAUNCH_FAILED));
        let outcome = pipeline(sim.control(), Edges::ALL, 3);
        let Some(name) = sim.injected().pop() else {
            outcome.unwrap();
            break;
        };
        sim.drain();
        // After an error the pipeline frees without waiting. This is reported, but is not the subject of this test.
        let _ = sim.violations();
        // cudarc does not release the context if this call fails: see `cudarc.rs`.
        let contexts = u64::from(name == "cuDeviceGetAttribute");
        assert_eq!(sim.live().leaked(), Live { contexts, ..Live::default() }, "call {call}, {name}");
        // cudarc's drops do not report their errors (they query the current context too). Every other error
        // is reported.
        let in_drop =
            ["Destroy", "Free", "Release", "cuCtxGetCurrent"].iter().any(|part| name.contains(part));
        assert!(outcome.is_err() || in_drop, "call {call}, {name}");
        failed.push(name);
    }
    let memory = ["cuMemHostAlloc", "cuMemAllocAsync", "cuMemcpyHtoDAsync_v2"];
    for name in ["cuInit", "cuStreamCreate", "cuEventRecord"].into_iter().chain(memory) {
        assert!(failed.iter().any(|failed| failed == name), "{name} was never reached: {failed:?}");
    }
}

#[test]
fn an_error_in_flight_is_sticky_and_drops_what_is_queued() {
    let Some(sim) = start() else { return };
    let (context, stream) = stream();
    let mut memory = stream.clone_htod(&[7_u8; BYTES]).unwrap();
    stream.synchronize().unwrap();
    let raw = result::event::create(CUevent_flags::CU_EVENT_DEFAULT).unwrap();
    let held = sim.hold(0);
    sim.inject(Failure::op("any", 1, ILLEGAL_ADDRESS).times(u64::MAX));
    stream.memset_zeros(&mut memory).unwrap();
    let kernel = sim.kernel_read(stream.cu_stream(), address(&memory), BYTES, 0).unwrap().unwrap();
    let event = stream.record_event(None).unwrap();
    assert_eq!(event.try_is_complete(), Ok(false));
    drop(held);
    // The waiting call returns the error, and so does every later call.
    let later = [stream.synchronize(), event.synchronize(), context.new_event(None).map(drop)];
    assert_eq!(later.map(code), [ILLEGAL_ADDRESS; 3]);
    assert_eq!(sim.checksum(kernel), None);
    // The kernel did not begin, so it did not fail.
    assert_eq!(sim.injected(), ["memset"]);
    // One piece of the memset ran: the error struck in the middle.
    let bytes = sim.peek(address(&memory), BYTES).unwrap();
    assert_eq!((bytes[0], bytes[BYTES - 1]), (0, 7));
    // Freeing still frees, and returns the error too.
    let events = sim.live().events;
    // SAFETY: created above, destroyed once.
    assert_eq!(code(unsafe { result::event::destroy(raw) }), ILLEGAL_ADDRESS);
    assert_eq!(sim.live().events, events - 1);
    drop((memory, event, stream));
    sim.drain();
    drop(context);
    assert_eq!(sim.live().leaked(), Live::default());
}

#[test]
fn host_functions_do_not_run_after_an_error() {
    // Either the kernel before it fails, or the function's own step.
    for kind in ["kernel", "host"] {
        let counter = AtomicU32::new(0);
        let Some(sim) = start() else { return };
        let (_context, stream) = stream();
        let launch = || {
            // Relaxed: read after a synchronize.
            launch_function(&stream, || _ = counter.fetch_add(1, Ordering::Relaxed))
        };
        launch().unwrap();
        stream.synchronize().unwrap();
        let memory = device(&stream, 8).unwrap();
        let held = sim.hold(0);
        sim.inject(Failure::op(kind, 1, LAUNCH_FAILED));
        sim.kernel_read(stream.cu_stream(), address(&memory), 8, 0).unwrap();
        launch().unwrap();
        drop(held);
        assert_eq!(code(stream.synchronize()), LAUNCH_FAILED);
        sim.drain();
        // Relaxed: everything has been waited for.
        assert_eq!(counter.load(Ordering::Relaxed), 1, "{kind}");
        assert_eq!(sim.injected(), [kind]);
    }
}

#[test]
fn driver_calls_in_a_host_function_are_refused() {
    let Some(_sim) = start() else { return };
    let (_context, stream) = stream();
    let (outcome, called) = mpsc::channel();
    launch_function(&stream, move || outcome.send(result::ctx::synchronize()).unwrap()).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(code(called.recv().unwrap()), 800, "NOT_PERMITTED");
}

#[test]
fn a_lost_context_fails_everything_and_hangs_nothing() {
    const DESTROYED: u32 = 709;
    let Some(sim) = start() else { return };
    let (context, stream, memory, slot) = slot();
    let _held = sim.hold(0);
    slot.upload(address(&memory), &stream).unwrap();
    sim.wait_held();
    sim.lose_context(DESTROYED);
    // The stopped copy was dropped: there is nothing to wait for, although the device is still held.
    let calls = [stream.synchronize(), context.synchronize(), slot.upload(address(&memory), &stream)];
    assert_eq!(calls.map(code), [DESTROYED; 3]);
    drop((slot, memory, stream));
    sim.drain();
    drop(context);
    assert_eq!(sim.live().leaked(), Live::default());
    // The slot was freed under an enqueued copy, but not before a call had said that it would not run.
    assert_eq!(sim.violations(), [""; 0]);
}

#[test]
fn a_clean_up_is_no_race_once_a_call_has_returned_the_error() {
    for told in [true, false] {
        let Some(sim) = start() else { return };
        let (context, stream, memory, slot) = slot();
        sim.inject(Failure::op("h2d", 1, LAUNCH_FAILED));
        slot.upload(address(&memory), &stream).unwrap();
        if told {
            assert_eq!(code(stream.synchronize()), LAUNCH_FAILED);
        }
        slot.fill(1);
        drop((slot, memory, stream));
        let found = sim.violations();
        assert_eq!(found.is_empty(), told, "{found:#?}");
        sim.drain();
        drop(context);
    }
}

#[test]
fn memory_ends_where_the_options_say() {
    let options = Options { device_bytes: 4096, host_bytes: 4096, ..Options::default() };
    let Some(sim) = Sim::start_software(options) else { return };
    let (context, stream) = stream();
    assert_eq!(context.mem_get_info(), Ok((4096, 4096)));
    let first = device(&stream, 3000).unwrap();
    let allocate = |bytes| code(device(&stream, bytes).map(drop));
    assert_eq!((allocate(1097), allocate(1096)), (OUT_OF_MEMORY, 0));
    assert_eq!(code(Pinned::new(4097).map(drop)), OUT_OF_MEMORY);
    drop(first);
    device(&stream, 4096).unwrap();
    assert_eq!(sim.live().peak_device_bytes, 4096);
}

#[test]
#[allow(clippy::multiple_unsafe_ops_per_block, reason = "a table of calls, safe for one reason")]
fn bad_arguments_have_their_codes() {
    use cudarc::driver::sys::{
        self,
        CUresult::{self, CUDA_ERROR_INVALID_HANDLE as HANDLE, CUDA_ERROR_INVALID_VALUE as VALUE},
    };
    let Some(sim) = start() else { return };
    let null = std::ptr::null_mut();
    // SAFETY: the driver checks its arguments; all pointers are null or valid.
    let before = unsafe { [sys::cuDeviceGet(&mut 0, 0), sys::cuCtxSynchronize()] };
    assert_eq!(before, [CUresult::CUDA_ERROR_NOT_INITIALIZED; 2]);
    assert_eq!(CudaContext::new(1).map(drop), Err(DriverError(CUresult::CUDA_ERROR_INVALID_DEVICE)));
    result::init().unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { sys::cuStreamSynchronize(null) }, CUresult::CUDA_ERROR_INVALID_CONTEXT);
    let (_context, stream) = stream();
    let mut memory = device(&stream, 8).unwrap();
    let wild = 0x1234_5670 as *mut c_void;
    // SAFETY: as above; handles are looked up, not dereferenced.
    let table = unsafe {
        [
            (sys::cuStreamDestroy_v2(wild.cast()), HANDLE),
            (sys::cuStreamDestroy_v2(null), HANDLE),
            (sys::cuEventRecord(wild.cast(), stream.cu_stream()), HANDLE),
            (sys::cuEventCreate(&mut null.cast(), 4), VALUE),
            (sys::cuMemHostAlloc(&mut null.cast(), 8, 8), VALUE),
            (sys::cuMemHostAlloc(&mut null.cast(), 0, 0), VALUE),
            (sys::cuMemFreeHost(wild), VALUE),
            (sys::cuMemsetD8Async(address(&memory) + 1, 0, 8, stream.cu_stream()), VALUE),
            (sys::cuMemFreeAsync(address(&memory) + 1, stream.cu_stream()), VALUE),
            (sys::cuEventQuery(null.cast()), HANDLE),
        ]
    };
    for (row, (found, wanted)) in table.into_iter().enumerate() {
        assert_eq!(found, wanted, "row {row}");
    }
    stream.memset_zeros(&mut memory).unwrap();
    // A thread that has not made the context current.
    let raw = stream.cu_stream() as usize;
    std::thread::spawn(move || {
        // SAFETY: as above.
        let found = unsafe { sys::cuEventCreate(&mut std::ptr::null_mut(), 0) };
        assert_eq!(found, CUresult::CUDA_ERROR_INVALID_CONTEXT);
        // SAFETY: as above; a created stream needs no current context here.
        assert_eq!(unsafe { sys::cuStreamSynchronize(raw as _) }, CUresult::CUDA_SUCCESS);
    })
    .join()
    .unwrap();
    assert_eq!(sim.violations(), [""; 0]);
}

/// CUDA documents that a null pointer is no error for these results, and that a name is cut where it does not fit.
#[test]
#[allow(clippy::multiple_unsafe_ops_per_block, reason = "calls that are safe for one reason")]
fn a_result_that_is_not_wanted_needs_no_place() {
    use cudarc::driver::sys;
    use std::ptr::null_mut;
    let Some(_sim) = start() else { return };
    let (_context, stream) = stream();
    let memory = device(&stream, 24).unwrap();
    let (inside, mut start, mut bytes) = (address(&memory) + 9, 0, 0);
    let (mut least, mut greatest, mut name) = (1, 1, [1; 9]);
    // SAFETY: all pointers are null or valid.
    let found = unsafe {
        [
            sys::cuMemGetAddressRange_v2(&raw mut start, null_mut(), inside),
            sys::cuMemGetAddressRange_v2(null_mut(), &raw mut bytes, inside),
            sys::cuCtxGetStreamPriorityRange(&raw mut least, null_mut()),
            sys::cuCtxGetStreamPriorityRange(null_mut(), &raw mut greatest),
            sys::cuDeviceGetName(name.as_mut_ptr(), 8, 0),
        ]
    };
    assert_eq!(found, [sys::CUresult::CUDA_SUCCESS; 5]);
    assert_eq!((start, bytes, least), (address(&memory), 24, 0));
    assert!(greatest < 0 && !name[..7].contains(&0) && name[7..] == [0, 1]);
}

#[test]
#[should_panic(expected = "12345 is not an error code of this driver")]
fn a_number_that_is_no_error_is_refused() {
    // cudarc would convert this number to its enum, unchecked.
    let _ = Failure::api("cuInit", 1, 12345);
}

#[test]
fn a_failure_of_what_does_not_exist_is_refused() {
    let failures = [
        Failure::api("cuMemcpyHtoDAsync", 1, 700),
        Failure::api("cuGetErrorName", 1, 700),
        Failure::op("copy", 1, 700),
    ];
    for failure in failures {
        let Some(sim) = start() else { return };
        let control = sim.control();
        std::thread::spawn(move || control.inject(failure)).join().unwrap_err();
    }
}
