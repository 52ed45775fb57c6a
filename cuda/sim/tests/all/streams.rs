//! Streams: late copies in pieces, events, host functions, and the counts of live resources.

use crate::support::{
    BYTES, Edges, Pinned, address, assert_found, context, device, managed, pipeline, slot, start, stream,
    streams,
};
use cudarc::driver::{DriverError, result, sys};
use twinbuf_cuda_sim::{Live, Options, Sim, checksum_of};

#[test]
fn a_copy_reads_its_source_late_and_in_pieces() {
    let Some(sim) = Sim::start_software(Options { pieces: 4, ..Options::default() }) else { return };
    let (_context, stream, memory, slot) = slot();
    slot.fill(1);
    // Three of four pieces are copied, then the slot is filled again.
    let held = sim.hold(3);
    slot.upload(address(&memory), &stream).unwrap();
    sim.wait_held();
    slot.fill(2);
    drop(held);
    stream.synchronize().unwrap();
    let torn = [vec![1; BYTES / 4 * 3], vec![2; BYTES / 4]].concat();
    assert_eq!(sim.peek(address(&memory), BYTES), Some(torn));
    // The fill has stopped at its first byte.
    let wanted =
        "page-locked memory +0x0..+0x1: host write (write, the host) is not ordered after h2d (read, ";
    assert_found(&sim, wanted);
}

/// Of a stream that was destroyed: while it runs and after its end.
#[test]
fn a_wait_for_the_context_covers_destroyed_streams() {
    for ended in [false, true] {
        let Some(sim) = start() else { return };
        let (context, stream, memory, slot) = slot();
        let destroyed = stream.fork().unwrap();
        slot.upload(address(&memory), &destroyed).unwrap();
        drop(destroyed);
        if ended {
            sim.drain();
        }
        context.synchronize().unwrap();
        slot.fill(2);
        assert_eq!(sim.violations(), [""; 0], "ended: {ended}");
    }
}

#[test]
fn a_threads_own_calls_are_counted_in_this_run_alone() {
    let own = |sim: &Sim| sim.own_calls_of("cuEventRecord");
    for _run in 0..2 {
        let Some(sim) = start() else { return };
        assert_eq!(own(&sim), 0);
        let context = context().unwrap();
        let (stream, event) = (context.new_stream().unwrap(), context.new_event(None).unwrap());
        event.record(&stream).unwrap();
        std::thread::scope(|threads| {
            let other = threads.spawn(|| {
                event.record(&stream).unwrap();
                event.record(&stream).unwrap();
                own(&sim)
            });
            assert_eq!(other.join().unwrap(), 2);
        });
        assert_eq!((own(&sim), sim.calls_of("cuEventRecord")), (1, 3));
    }
}

#[test]
fn a_pageable_source_is_read_before_the_call_returns() {
    let sim = Sim::start(Options::default());
    let (_context, stream) = stream();
    let mut memory = device(&stream, 8).unwrap();
    let mut source = vec![1_u8; 8];
    let held = sim.hold(0);
    stream.memcpy_htod(&source, &mut memory).unwrap();
    source.fill(2);
    drop(held);
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [1; 8]);
}

#[test]
fn kernels_read_and_write_what_they_are_told() {
    let Some(sim) = start() else { return };
    let (_context, stream) = stream();
    let memory = stream.clone_htod(&[1_u8, 2, 3, 4]).unwrap();
    let raw = stream.cu_stream();
    let before = sim.kernel_read(raw, address(&memory), 4, 0).unwrap().unwrap();
    let write = sim.kernel_write(raw, address(&memory) + 1, 2, 9, 100).unwrap().unwrap();
    let after = sim.kernel_read(raw, address(&memory), 4, 0).unwrap().unwrap();
    assert_eq!(sim.checksum(before), Some(checksum_of(&[1, 2, 3, 4])));
    assert_eq!(sim.checksum(write), Some(checksum_of(&[9, 9])));
    assert_eq!(sim.checksum(after), Some(checksum_of(&[1, 9, 9, 4])));
    // Not a device address, and one byte past the end.
    assert_eq!(sim.kernel_read(raw, 0x1000, 4, 0), Err(1));
    assert_eq!(sim.kernel_read(raw, address(&memory), 5, 0), Err(1));
}

#[test]
#[allow(clippy::multiple_unsafe_ops_per_block, reason = "calls that are safe for one reason")]
fn copies_between_host_and_device_arrive() {
    // Use cudarc's safe calls, with its event tracking on.
    let _sim = Sim::start(Options::default());
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let bytes: Vec<u8> = (0..=255).collect();
    for stream in [context.default_stream(), context.per_thread_stream(), context.new_stream().unwrap()] {
        let one = stream.clone_htod(&bytes).unwrap();
        let mut two = stream.alloc_zeros::<u8>(256).unwrap();
        stream.memcpy_dtod(&one, &mut two).unwrap();
        assert_eq!(stream.clone_dtoh(&two).unwrap(), bytes);
        stream.memset_zeros(&mut two).unwrap();
        assert_eq!(stream.clone_dtoh(&two).unwrap(), [0; 256]);
        // SAFETY: written before it is read.
        let mut pinned = unsafe { context.alloc_pinned::<u8>(256) }.unwrap();
        stream.memcpy_dtoh(&one, &mut pinned).unwrap();
        assert_eq!(pinned.as_slice().unwrap(), bytes);
    }
    // Synchronous copies.
    let memory = context.default_stream().clone_htod(&bytes).unwrap();
    let at = address(&memory);
    let mut back = [0_u8; 256];
    // SAFETY: addresses and lengths are right.
    unsafe {
        sys::cuMemsetD8_v2(at, 5, 128).result().unwrap();
        sys::cuMemcpyHtoD_v2(at, [6_u8].as_ptr().cast(), 1).result().unwrap();
        sys::cuMemcpyDtoD_v2(at + 200, at, 2).result().unwrap();
        sys::cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), at, 256).result().unwrap();
    }
    assert_eq!((back[0], back[1], back[127], back[128], back[200], back[201]), (6, 5, 5, 128, 6, 5));
}

#[test]
fn events_are_ready_when_their_work_is_done() {
    let Some(sim) = start() else { return };
    let context = context().unwrap();
    let stream = context.new_stream_with_priority(-1).unwrap();
    let mut memory = device(&stream, 8).unwrap();
    let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let (start, end) = (context.new_event(timed).unwrap(), context.new_event(timed).unwrap());
    // Never recorded: complete.
    assert_eq!(end.try_is_complete(), Ok(true));
    start.record(&stream).unwrap();
    let held = sim.hold(0);
    stream.memset_zeros(&mut memory).unwrap();
    end.record(&stream).unwrap();
    sim.wait_held();
    assert_eq!((start.try_is_complete(), end.try_is_complete()), (Ok(true), Ok(false)));
    drop(held);
    end.synchronize().unwrap();
    assert_eq!(end.try_is_complete(), Ok(true));
    assert!(start.elapsed_ms(&end).unwrap() >= 0.0);
    assert!(end.elapsed_ms(&start).unwrap() <= 0.0);
    let untimed = stream.record_event(None).unwrap();
    let invalid = DriverError(sys::CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(start.elapsed_ms(&untimed), Err(invalid));
}

#[test]
fn a_wait_takes_the_record_of_its_time() {
    let Some(sim) = start() else { return };
    let (_context, [one, two]) = streams();
    let mut memory = device(&one, 8).unwrap();
    let event = one.record_event(None).unwrap();
    two.wait(&event).unwrap();
    let held = sim.hold(0);
    one.memset_zeros(&mut memory).unwrap();
    // A new record does not affect the wait above: `two` passes although `one` is stopped.
    event.record(&one).unwrap();
    two.synchronize().unwrap();
    drop(held);
    event.synchronize().unwrap();
}

#[test]
fn the_books_count_what_is_alive() {
    let Some(sim) = start() else { return };
    let context = context().unwrap();
    let again = cudarc::driver::CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let event = context.new_event(None).unwrap();
    let slots = [Pinned::new(100).unwrap(), Pinned::new(50).unwrap()];
    let memory = device(&stream, 1000).unwrap();
    let first = Live {
        contexts: 2,
        streams: 1,
        events: 1,
        host_allocations: 2,
        host_bytes: 150,
        device_allocations: 1,
        device_bytes: 1000,
        peak_host_bytes: 150,
        peak_device_bytes: 1000,
        threads: 1,
    };
    assert_eq!(sim.live(), first);
    let [kept, freed] = slots;
    drop((again, event, freed));
    assert_eq!(sim.live(), Live { contexts: 1, events: 0, host_allocations: 1, host_bytes: 100, ..first });
    drop((kept, memory, stream));
    sim.drain();
    let leaked = Live { contexts: 1, ..Live::default() };
    assert_eq!(sim.live(), Live { peak_host_bytes: 150, peak_device_bytes: 1000, ..leaked });
    assert_eq!(sim.live().leaked(), leaked);
    drop(context);
    assert_eq!(sim.live().leaked(), Live::default());
}

#[test]
fn the_pages_of_freed_memory_are_given_back() {
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("memfd:cuda-sim")).count()
    };
    let Some(_sim) = start() else { return };
    let (_context, stream, memory, slot) = slot();
    let before = mapped();
    let again = Pinned::new(BYTES).unwrap();
    let (managed, _) = managed();
    again.upload(address(&memory), &stream).unwrap();
    stream.synchronize().unwrap();
    // The program's pages and the device's.
    assert_eq!(mapped(), before + 4);
    drop(again);
    // SAFETY: allocated above.
    unsafe { result::memory_free(managed) }.unwrap();
    assert_eq!(mapped(), before);
    slot.fill(1);
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    let Some(sim) = start() else { return };
    let context = context().unwrap();
    let keeper = context.new_stream().unwrap();
    let memory = keeper.clone_htod(&[0_u8; 8]).unwrap();
    let stream = context.new_stream().unwrap();
    stream.join(&keeper).unwrap();
    let held = sim.hold(0);
    let kernel = sim.kernel_write(stream.cu_stream(), address(&memory), 8, 3, 0).unwrap().unwrap();
    keeper.join(&stream).unwrap();
    drop(stream);
    assert_eq!((sim.live().streams, sim.live().threads), (1, 2));
    drop(held);
    assert_eq!(sim.checksum(kernel), Some(checksum_of(&[3; 8])));
    sim.drain();
    assert_eq!(sim.live().threads, 1);
}

#[test]
#[should_panic(expected = "the checker found")]
fn a_violation_that_was_not_read_panics() {
    let sim = Sim::start(Options::default());
    if sim.is_real() {
        panic!("the checker found nothing: the real driver has none");
    }
    pipeline(sim.control(), Edges { copied: false, ..Edges::ALL }, 2).unwrap();
}
