//! What cudarc 0.19.10 does when calls fail, as far as code built on it must know. If a test here fails after an update of
//! cudarc, the list has changed:
//!
//! - A drop keeps its error in the context, and **the next call that binds the context returns it instead of running**. Call
//!   `ctx.check_err()` before a call whose error has another meaning, or use the `result` functions, which never look there.
//! - With tracking on, a wait or a record that fails is kept in the same way, and the copy is enqueued **without its edge** and
//!   returns `Ok`. If creating an event fails, the memory of `alloc`, `alloc_zeros` and `clone_htod` is lost.
//! - `CudaContext::new` leaves the context retained if its attribute query fails; `new_stream` leaves it in multi-stream mode if
//!   creating the stream fails.
//! - With pools, a `CudaSlice` that is dropped on a thread where its context is not current loses memory of a default stream.
//! - A missing symbol or library panics at the first call, in drops too; ask `is_culib_present()`, or load the library first.

use std::sync::Arc;

use crate::support::{BYTES, context, device, start};
use cudarc::driver::{CudaContext, CudaSlice};
use twinbuf_cuda_sim::Failure;

const LAUNCH_FAILED: u32 = 719;

#[test]
fn a_failing_attribute_query_keeps_the_context() {
    let Some(sim) = start() else { return };
    sim.inject(Failure::api("cuDeviceGetAttribute", 1, LAUNCH_FAILED));
    CudaContext::new(0).unwrap_err();
    assert_eq!(sim.live().contexts, 1);
}

#[test]
fn a_failing_new_stream_leaves_multi_stream_mode_on() {
    let Some(sim) = start() else { return };
    let context = CudaContext::new(0).unwrap();
    sim.inject(Failure::api("cuStreamCreate", 1, LAUNCH_FAILED));
    context.new_stream().unwrap_err();
    assert!(context.is_in_multi_stream_mode());
}

#[test]
fn a_failing_tracking_event_loses_the_memory() {
    let Some(sim) = start() else { return };
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    sim.inject(Failure::api("cuEventCreate", 2, LAUNCH_FAILED));
    stream.alloc_zeros::<u8>(BYTES).unwrap_err();
    assert_eq!((sim.live().device_allocations, sim.live().events), (1, 0));
}

#[test]
fn an_error_in_a_drop_comes_out_of_the_next_call_in_place_of_that_call() {
    let Some(sim) = start() else { return };
    let context = context().unwrap();
    let stream = context.new_stream().unwrap();
    let (one, two) = (context.new_event(None).unwrap(), context.new_event(None).unwrap());
    sim.inject(Failure::api("cuEventDestroy_v2", 1, LAUNCH_FAILED));
    drop(one);
    two.record(&stream).unwrap_err();
    assert_eq!(sim.calls_of("cuEventRecord"), 0);
    // cudarc returns the kept error only once.
    two.record(&stream).unwrap();
    assert_eq!(sim.calls_of("cuEventRecord"), 1);
}

#[test]
fn tracking_goes_on_without_an_edge_that_failed() {
    for call in ["cuStreamWaitEvent", "cuEventRecord"] {
        let Some(sim) = start() else { return };
        let context = CudaContext::new(0).unwrap();
        let (one, two) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let mut memory = one.alloc_zeros::<u8>(BYTES).unwrap();
        sim.inject(Failure::api(call, 1, LAUNCH_FAILED).times(2));
        // The wait for the memset above fails, or its record does. The second memset is enqueued anyway.
        match call {
            "cuStreamWaitEvent" => two.memset_zeros(&mut memory).unwrap(),
            _ => {
                one.memset_zeros(&mut memory).unwrap();
                // The error that was kept when the guard was dropped.
                context.check_err().unwrap_err();
                two.memset_zeros(&mut memory).unwrap();
            }
        }
        let found = sim.violations();
        assert!(found.iter().any(|found| found.contains("memset (write")), "{call}: {found:#?}");
        let _ = context.check_err();
        context.synchronize().unwrap();
        drop(memory);
        let _ = sim.violations();
    }
}

#[test]
fn a_default_streams_slice_is_lost_on_a_thread_without_context() {
    let Some(sim) = start() else { return };
    let context = context().unwrap();
    let lost = device(&context.default_stream(), BYTES).unwrap();
    let kept = device(&context.new_stream().unwrap(), BYTES).unwrap();
    context.synchronize().unwrap();
    std::thread::spawn(move || drop::<[CudaSlice<u8>; 2]>([lost, kept])).join().unwrap();
    assert_eq!(sim.live().device_allocations, 1);
    context.check_err().unwrap_err();
}

#[test]
#[should_panic(expected = "CUDA_ERROR_OUT_OF_MEMORY")]
fn a_slices_clone_panics() {
    let Some(sim) = start() else { panic!("CUDA_ERROR_OUT_OF_MEMORY: the real driver") };
    let context: Arc<CudaContext> = context().unwrap();
    let memory = device(&context.new_stream().unwrap(), BYTES).unwrap();
    sim.inject(Failure::api("cuMemAllocAsync", 1, 2));
    drop(memory.clone());
}

#[test]
#[should_panic(expected = "Missing symbol cuProfilerStart")]
fn a_missing_symbol_panics() {
    let Some(_sim) = start() else { panic!("Missing symbol cuProfilerStart: the real driver has it") };
    let _context = CudaContext::new(0).unwrap();
    // SAFETY: takes nothing.
    let _ = unsafe { cudarc::driver::sys::cuProfilerStart() };
}
