//! Every driver call fails in turn, once or permanently: a typed error in order, no hang, and everything freed if the
//! driver works again.
#![allow(clippy::cast_possible_truncation)] // of small counts

use std::sync::Arc;

use crate::common::{LAUNCH_FAILED, copy_threads, from, lent_slots, pattern, start, start_software, threads};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use twinbuf_cuda::{DeviceBatches, Error, HostSlots, Stager, Uploader};
use twinbuf_cuda_sim::Failure;

const BATCHES: u64 = 5;
const BYTES: usize = 64;
/// Bytes of what a stager fills.
const MEMORY: usize = 1200;

/// Fills and commits a batch.
fn fill_one(slots: &mut HostSlots<u64>, seq: u64) -> Result<(), Error> {
    if seq == 4 {
        drop(slots.acquire()?.reserve());
    }
    let mut slot = slots.acquire()?;
    slot.fill(seq as u8 + 1);
    let len = if seq == 3 { 0 } else { BYTES }; // one batch is empty
    slot.commit(len, seq)
}

/// Fills and commits every batch, or as many as the uploader accepts.
fn fill(mut slots: HostSlots<u64>) -> Result<(), Error> {
    for seq in 0..BATCHES {
        fill_one(&mut slots, seq)?;
    }
    slots.finish();
    Ok(())
}

/// Receives one batch, uses it on two streams and copies it. `false`: the end.
fn take(
    batches: &mut DeviceBatches<u64>,
    streams: &[Arc<CudaStream>; 2],
    expected: u64,
) -> Result<bool, Error> {
    let received = match batches.recv() {
        // The one that was dropped.
        Err(Error::Cancelled) if expected == 4 => batches.recv(),
        received => received,
    };
    let Some(batch) = received? else { return Ok(false) };
    let dropped = batch.seq() - expected;
    assert!(*batch.meta() == expected && dropped <= u64::from(expected >= 4), "out of order: {batch:?}");
    let _ = batch.copied()?;
    for stream in streams {
        batch.on::<u8>(stream)?;
    }
    if !batch.is_empty() {
        drop(batch.into_owned::<u8>(&streams[1])?);
    }
    Ok(true)
}

/// The whole life of an uploader. Returns the receiver's error, or else the reader's.
fn upload(uploader: Uploader, streams: &[Arc<CudaStream>; 2], overlap: bool) -> Result<(), Error> {
    let uploader = uploader.overlap(overlap).on_copied(|copied| assert_eq!(copied.bytes, BYTES));
    let (mut slots, mut batches) = uploader.build::<u64>()?;
    if overlap {
        let reader = std::thread::spawn(move || fill(slots));
        let mut received = 0;
        let taken = loop {
            match take(&mut batches, streams, received) {
                Ok(true) => received += 1,
                ended => break ended,
            }
        };
        if taken.is_err() {
            // An error of the uploader is returned by every call; an error of a lease or of `on` does not end it.
            while let Ok(Some(_)) | Err(Error::Cancelled) = batches.recv() {}
            assert_eq!(
                batches.recv().map(|batch| batch.is_some()),
                batches.recv().map(|batch| batch.is_some())
            );
        }
        drop(batches);
        let filled = reader.join().unwrap();
        taken?;
        assert_eq!(received, BATCHES, "a short epoch");
        return filled;
    }
    for seq in 0..BATCHES {
        fill_one(&mut slots, seq)?;
        take(&mut batches, streams, seq)?;
    }
    slots.finish();
    match batches.recv()? {
        None => Ok(()),
        Some(batch) => panic!("one too many: {batch:?}"),
    }
}

/// The whole life of a stager. Returns its error.
fn stage(ctx: &Arc<CudaContext>, stream: &Arc<CudaStream>, memory: &mut CudaSlice<u8>) -> Result<(), Error> {
    let mut stager = Stager::new(ctx).slot_bytes(256).depth(2).fill_threads(2).build()?;
    let (bytes, mut back) = (pattern(0, MEMORY), [0; MEMORY]);
    for round in 0..2 {
        stager.scope(stream, |to| {
            for (part, bytes) in memory.as_view_mut().chunks_exact_mut(400).zip(bytes.chunks(400)) {
                match round {
                    0 => to.upload(bytes, part)?,
                    _ => to.upload_with(from(bytes), part)?,
                }
            }
            Ok::<_, Error>(())
        })?;
        stager.scope(stream, |from| from.offload(memory.as_view(), &mut back))?;
        assert_eq!(back[..], bytes);
    }
    Ok(())
}

/// Whose calls fail.
#[derive(Clone, Copy, Debug)]
enum Life {
    /// The host slots are the uploader's own, or lent.
    Uploader {
        overlap: bool,
        lent: bool,
    },
    Stager,
}

/// The state of the driver after a failure.
#[derive(Clone, Copy, PartialEq)]
enum Driver {
    /// It works: everything must be freed, in order.
    Works,
    /// Every later call fails: nothing can be waited for, and a thread without a context cannot free.
    IsLost,
    /// The same, but the device works on.
    Refuses,
}

/// One life in which `failure` is injected. `false` if the failure never occurred.
fn survives(failure: Failure, driver: Driver, life: Life, tracking: bool, surfaced: &mut u32) -> bool {
    let (sim, ctx) = start(1, tracking);
    let streams = [ctx.new_stream().unwrap(), ctx.new_stream().unwrap()];
    let before = sim.live().leaked();
    let mut description = format!("{failure:?}, {life:?}, tracking {tracking}");
    let mut memory = streams[0].alloc_zeros::<u8>(MEMORY).unwrap();
    streams[0].synchronize().unwrap();
    sim.inject(failure);
    let result = match life {
        Life::Uploader { overlap, lent } => {
            let uploader = Uploader::new(&ctx, BYTES);
            let uploader = if lent { uploader.host_slots(lent_slots(2, BYTES)) } else { uploader };
            let result = upload(uploader, &streams, overlap);
            sim.drain();
            result
        }
        Life::Stager => stage(&ctx, &streams[0], &mut memory),
    };
    let injected = sim.injected();
    description += &format!(": {injected:?}");
    match &result {
        Ok(()) => {}
        Err(Error::Driver { code: LAUNCH_FAILED, .. }) if !injected.is_empty() => *surfaced += 1,
        Err(error) => panic!("{description}: {error:?}"),
    }
    assert_eq!((copy_threads(), threads("twinbuf-stage")), (0, 0), "{description}");
    // Freed at once: a copy that still ran would be found.
    let _ = ctx.check_err();
    drop(memory);
    sim.drain();
    let mut left = sim.live().leaked();
    let in_alloc = injected.first().is_some_and(|name| IN_ALLOC.contains(&name.as_str()));
    let is_one = left.device_allocations == before.device_allocations + 1;
    if tracking && in_alloc && is_one && !matches!(life, Life::Stager) {
        (left.device_allocations, left.device_bytes) = (before.device_allocations, before.device_bytes);
    }
    if driver == Driver::Works {
        assert_eq!(left, before, "{description}: not given back, result {result:?}");
    }
    let mut found = sim.violations();
    // For the program, the context is lost, and its memory may be freed. For the checker, copies still run.
    found.retain(|found| driver != Driver::Refuses || !found.contains("free ("));
    assert_eq!(found, [""; 0], "{description}");
    let _ = ctx.check_err();
    !injected.is_empty()
}

/// Calls that cudarc's `CudaStream::alloc` makes for its event tracking after it has the memory. If one fails, it
/// returns the error and forgets the memory (0.19.10). One allocation is then leaked by cudarc.
const IN_ALLOC: [&str; 2] = ["cuCtxGetCurrent", "cuEventCreate"];

fn every(failure: impl Fn(u64) -> Failure + Send + 'static, driver: Driver) {
    let uploaders = [(true, false), (true, true), (false, false), (false, true)];
    let uploaders = uploaders.map(|(overlap, lent)| Life::Uploader { overlap, lent });
    let lives = uploaders.into_iter().chain([Life::Stager]);
    for (life, tracking) in lives.flat_map(|life| [(life, false), (life, true)]) {
        let (mut nth, mut surfaced) = (1, 0);
        while survives(failure(nth), driver, life, tracking, &mut surfaced) {
            nth += 1;
        }
        println!("{life:?}, tracking {tracking}: {} failures, {surfaced} came out as errors", nth - 1);
        // Some calls occur only with some slots; a stager's look at an event may fail without harm.
        let harmless = nth == 1 || matches!(life, Life::Stager);
        assert!(surfaced > 0 || harmless || twinbuf_cuda_sim::Control::get().is_real());
    }
}

#[test]
fn any_one_call_may_fail() {
    every(|nth| Failure::call(nth, LAUNCH_FAILED), Driver::Works);
}

/// The call takes effect, like calls that report an error of earlier work.
#[test]
fn any_one_call_on_a_stream_may_take_effect_and_fail() {
    for name in [
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamSynchronize",
        "cuMemGetAddressRange_v2",
    ] {
        println!("{name}");
        every(move |nth| Failure::api(name, nth, LAUNCH_FAILED).after_effect(), Driver::Works);
    }
}

#[test]
fn every_call_may_fail_from_some_point_on() {
    every(|nth| Failure::call(nth, LAUNCH_FAILED).times(u64::MAX), Driver::Refuses);
}

#[test]
fn any_one_operation_on_the_device_may_fail() {
    every(|nth| Failure::op("any", nth, LAUNCH_FAILED), Driver::IsLost);
}

/// The call that makes the context current may report an error of earlier work. A thread of the caller that never had a
/// context still frees host slots.
#[test]
fn a_thread_without_a_context_frees_though_its_first_call_fails() {
    let Some((sim, ctx)) = start_software() else { return };
    let before = sim.live().leaked();
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).build::<u64>().unwrap();
    // Receiving a batch shows that the copy thread has started: before that it has neither its name nor its
    // context.
    slots.acquire().unwrap().commit(BYTES, 0).unwrap();
    drop(batches.recv().unwrap().unwrap());
    drop(batches);
    // The receiver is gone; the copy thread notices now, or with the next batch. The host slots outlive it.
    match slots.acquire().and_then(|slot| slot.commit(BYTES, 1)) {
        Ok(()) | Err(Error::Closed) => {}
        Err(error) => panic!("{error}"),
    }
    assert_eq!(copy_threads(), 0);
    sim.inject(Failure::api("cuCtxSetCurrent", 1, LAUNCH_FAILED));
    std::thread::spawn(move || drop(slots)).join().unwrap();
    assert_eq!(sim.injected(), ["cuCtxSetCurrent"]);
    assert_eq!(sim.live().leaked(), before);
}

/// Also if cudarc has no part in the call.
#[test]
fn an_error_has_the_name_that_the_driver_gives_it() {
    let Some((sim, ctx)) = start_software() else { return };
    sim.inject(Failure::api("cuInit", 1, 46));
    let error = twinbuf_cuda::context(0).unwrap_err();
    assert_eq!(error.to_string(), "cuInit: CUDA_ERROR_DEVICE_UNAVAILABLE (46)");
    sim.inject(Failure::api("cuMemHostAlloc", 1, LAUNCH_FAILED));
    let error = Uploader::new(&ctx, BYTES).build::<()>().unwrap_err();
    assert_eq!(error.to_string(), "cuMemHostAlloc: CUDA_ERROR_LAUNCH_FAILED (719)");
}

#[test]
fn a_use_that_was_neither_recorded_nor_waited_for_ends_the_uploader() {
    let Some((sim, ctx)) = start_software() else { return };
    let stream = ctx.new_stream().unwrap();
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).overlap(false).build::<u8>().unwrap();
    let mut commit = |value| slots.acquire()?.commit(BYTES, value);
    commit(1).unwrap();
    let lease = batches.recv().unwrap().unwrap();
    lease.on::<u8>(&stream).unwrap();
    sim.inject(Failure::api("cuEventRecord", 1, LAUNCH_FAILED));
    sim.inject(Failure::api("cuStreamSynchronize", 1, LAUNCH_FAILED));
    drop(lease);
    commit(2).unwrap(); // the other device slot
    drop(batches.recv().unwrap().unwrap());
    let error = commit(3).unwrap_err();
    assert!(matches!(error, Error::Driver { call: "cuEventRecord", code: LAUNCH_FAILED, .. }), "{error:?}");
    assert_eq!(commit(4).unwrap_err(), error);
    assert_eq!(batches.recv().unwrap_err(), error);
}

/// A copy may still read the slots of an uploader whose stream cannot be waited for.
#[test]
fn host_slots_whose_copies_cannot_be_waited_for_are_leaked() {
    for overlap in [false, true] {
        let Some((sim, ctx)) = start_software() else { return };
        let before = sim.live().host_allocations;
        let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).overlap(overlap).build::<u8>().unwrap();
        // Fails before the copy, so the copy thread never sees its end.
        for call in ["cuStreamSynchronize", "cuEventSynchronize", "cuEventQuery"] {
            sim.inject(Failure::api(call, 1, LAUNCH_FAILED).times(u64::MAX));
        }
        slots.acquire().unwrap().commit(BYTES, 1).unwrap();
        drop(batches.recv());
        drop((slots, batches));
        assert_eq!(sim.live().host_allocations, before + 2, "overlap {overlap}");
    }
}
