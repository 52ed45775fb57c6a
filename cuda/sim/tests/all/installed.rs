//! A program without a usable driver: a stub, no device, no memory pools.

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError};
use twinbuf_cuda_sim::{Failure, Installed, Live, Options, Sim};

fn start(installed: Installed) -> Option<Sim> {
    Sim::start_software(Options { installed, ..Options::default() })
}

#[test]
fn a_stub_says_so_in_every_call() {
    let Some(sim) = start(Installed::Stub) else { return };
    let stub = DriverError(CUresult::CUDA_ERROR_STUB_LIBRARY);
    assert_eq!(CudaContext::new(0).map(drop), Err(stub));
    assert_eq!(CudaContext::device_count(), Err(stub));
    assert_eq!(cudarc::driver::result::device::get_count(), Err(stub));
    assert_eq!(stub.error_name(), Err(stub));
    assert_eq!(sim.live(), Live::default());
}

#[test]
fn no_device_fails_at_init() {
    let Some(_sim) = start(Installed::NoDevice) else { return };
    let none = DriverError(CUresult::CUDA_ERROR_NO_DEVICE);
    assert_eq!(CudaContext::new(0).map(drop), Err(none));
    assert_eq!(cudarc::driver::result::device::get_count(), Ok(0));
    assert_eq!(none.error_name().unwrap(), c"CUDA_ERROR_NO_DEVICE");
}

/// Programs compute their grids from these, and the driver refuses a launch of no blocks.
#[test]
fn a_device_has_the_sizes_that_grids_come_from() {
    use cudarc::driver::sys::CUdevice_attribute_enum::*;
    let Some(_sim) = start(Installed::Device) else { return };
    let context = CudaContext::new(0).unwrap();
    for size in [
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        CU_DEVICE_ATTRIBUTE_WARP_SIZE,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK,
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
    ] {
        assert!(context.attribute(size).unwrap() >= 32, "{size:?}");
    }
}

#[test]
fn without_pools_memory_is_allocated_synchronously() {
    for pools in [false, true] {
        let Some(sim) = Sim::start_software(Options { pools, ..Options::default() }) else { return };
        let context = CudaContext::new(0).unwrap();
        assert_eq!(context.has_async_alloc(), pools);
        let stream = context.new_stream().unwrap();
        let memory = stream.clone_htod(&[1_u8, 2, 3]).unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [1, 2, 3]);
        drop(memory);
        let count = |name| sim.calls_of(name);
        let (sync, pooled) = (u64::from(!pools), u64::from(pools));
        assert_eq!((count("cuMemAlloc_v2"), count("cuMemFree_v2")), (sync, sync));
        assert_eq!((count("cuMemAllocAsync"), count("cuMemFreeAsync")), (pooled, pooled));
        assert_eq!(sim.live().device_bytes, 0);
    }
}

#[test]
fn one_run_knows_nothing_of_the_one_before() {
    let Some(before) = start(Installed::Device) else { return };
    before.inject(Failure::api("cuInit", 2, 999).times(u64::MAX));
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    std::mem::forget(context.new_event(None).unwrap());
    before.lose_context(709);
    drop(before);
    let after = Sim::start(Options::default());
    assert_eq!((after.live(), after.calls(), after.injected()), (Live::default(), 0, Vec::new()));
    // Handles of the earlier run are unknown, and so is its context.
    cudarc::driver::result::init().unwrap();
    assert_eq!(cudarc::driver::result::ctx::get_current(), Ok(None));
    stream.synchronize().unwrap_err();
    let new = CudaContext::new(0).unwrap();
    new.synchronize().unwrap();
    std::mem::forget((stream, context));
    drop(new);
    assert_eq!(after.live(), Live::default());
}
