//! What an uploader must not change in the caller's context and thread: cudarc's event tracking, the current context. Also
//! the number of driver calls per batch.
#![allow(clippy::cast_possible_truncation)] // of small counts

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    BYTES, bytes, commit, make_current, start, start_software, start_software_with, start_with, upload,
    uploader,
};
use cudarc::driver::{CudaContext, DeviceSlice, result};
use twinbuf_cuda::{Error, Stager, Uploader};
use twinbuf_cuda_sim::Options;

/// What has not happened within this time, far longer than it takes, does not happen.
const MANY_TIMES: Duration = Duration::from_secs(60);

/// The driver calls that these tests count: copies from the host and on the device, calls on events, waits for a stream or the context, and the
/// query of the current context.
const CALLS: [&str; 10] = [
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuCtxGetCurrent",
];

/// What `work` returns, and its calls by name, as `count` counts them.
fn made<R>(count: impl Fn(&str) -> u64, work: impl FnOnce() -> R) -> (R, Vec<(&'static str, u64)>) {
    let before = CALLS.map(&count);
    let result = work();
    let made = CALLS.into_iter().zip(before).map(|(name, before)| (name, count(name) - before));
    (result, made.filter(|(_, made)| *made > 0).collect())
}

#[test]
fn the_callers_own_copies_make_the_same_calls_with_an_uploader_alive() {
    for overlap in [true, false] {
        let (sim, ctx) = start(1, true); // with cudarc's event tracking, as frameworks have it
        let stream = ctx.default_stream(); // the only one
        let from = stream.alloc_zeros::<u8>(BYTES).unwrap();
        let mut to = stream.alloc_zeros::<u8>(BYTES).unwrap();
        // Of this thread: the copy thread makes separate calls in the meantime.
        let own = |name: &str| sim.own_calls_of(name);
        let mut copy = || made(own, || stream.memcpy_dtod(&from, &mut to).unwrap()).1;
        let without = copy();
        let ((mut slots, mut batches), built) = made(|name| sim.calls_of(name), || uploader(&ctx, overlap));
        assert!(!ctx.is_in_multi_stream_mode(), "another mode, for every call in this context");
        assert!(!built.iter().any(|(name, _)| *name == "cuCtxSynchronize"), "{built:?}");
        let idle = copy();
        let batch = upload(&mut slots, &mut batches, 1);
        batch.wait_copied().unwrap();
        let leased = copy();
        println!("overlap {overlap}: without {without:?}, with {idle:?}, with a lease {leased:?}");
        assert!(sim.is_real() || !without.is_empty(), "no call was counted");
        assert_eq!(idle, without);
        assert_eq!(leased, without);
    }
}

#[test]
fn as_many_copies_are_in_flight_as_there_are_slots() {
    for (host, device, flight) in [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (8, 3, 3), (3, 8, 3)] {
        let Some((sim, ctx)) = start_software() else { return };
        let (mut slots, mut batches) =
            Uploader::new(&ctx, BYTES).host_depth(host).device_depth(device).build::<u64>().unwrap();
        let held = sim.hold(0); // the device is stopped: no copy completes
        (0..flight).for_each(|value| commit(&mut slots, BYTES, value).unwrap());
        let looked = Instant::now();
        while sim.calls_of("cuMemcpyHtoDAsync_v2") < u64::from(flight) && looked.elapsed() < MANY_TIMES {
            thread::yield_now();
        }
        let copies = sim.calls_of("cuMemcpyHtoDAsync_v2");
        println!("host depth {host}, device depth {device}: {copies} copies in flight");
        assert_eq!(copies, u64::from(flight));
        drop(held);
        for _ in 0..flight {
            drop(batches.recv().unwrap().unwrap());
        }
    }
}

#[test]
fn the_host_slot_is_free_before_the_callback_is_called() {
    let (_sim, ctx) = start(1, false);
    let (entered, is_in) = mpsc::channel();
    let (leave, may_leave) = mpsc::channel::<()>();
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES)
        .host_depth(1)
        .on_copied(move |_| {
            entered.send(()).unwrap();
            let _ = may_leave.recv();
        })
        .build::<u64>()
        .unwrap();
    commit(&mut slots, BYTES, 1).unwrap();
    is_in.recv().unwrap(); // the callback runs and does not return
    let (got, is_free) = mpsc::channel();
    let reader = thread::spawn(move || {
        drop(slots.acquire().unwrap());
        got.send(()).unwrap();
        slots
    });
    is_free.recv_timeout(MANY_TIMES).expect("the slot is kept while the callback runs");
    drop(leave);
    drop((reader.join().unwrap(), batches.recv()));
}

/// No context, as on a thread that has never used CUDA, or that of another device.
#[test]
fn the_callers_current_context_stays_what_it_was() {
    for (overlap, elsewhere) in [(true, false), (false, false), (true, true), (false, true)] {
        let options = Options { devices: 2, delay_us: 0, pieces: 1, ..Options::seeded(1) };
        let (sim, ctx) = start_with(options, false);
        if elsewhere && sim.is_real() {
            return;
        }
        let stream = ctx.new_stream().unwrap();
        let other = elsewhere.then(|| twinbuf_cuda::context(1).unwrap());
        let theirs = other.as_ref().map(|other| other.new_stream().unwrap());
        let wanted = other.as_ref().map(|other| other.cu_ctx());
        let enter = || make_current(wanted);
        let is_current = |after: &str| {
            assert_eq!(result::ctx::get_current().unwrap(), wanted, "after {after}");
        };
        enter();
        let same = twinbuf_cuda::context(0).unwrap();
        is_current("context");
        drop(same); // cudarc binds it when it is dropped
        enter();
        let (mut slots, mut batches) = uploader(&ctx, overlap);
        is_current("build");
        for value in 0..6 {
            commit(&mut slots, BYTES, value).unwrap();
            is_current("commit");
            let batch = batches.recv().unwrap().unwrap();
            is_current("recv");
            let view = batch.on::<u8>(&stream).unwrap();
            is_current("on");
            if let Some(theirs) = &theirs {
                assert_eq!(batch.on::<u8>(theirs).unwrap_err(), Error::OtherContext);
                // A copy to another context could not be ordered before the slot's next copy, even if the lease is
                // on the stream that cudarc takes for the view's.
                batch.on::<u8>(DeviceSlice::<u8>::stream(&view)).unwrap();
                let mut copy = theirs.alloc_zeros::<u8>(BYTES).unwrap();
                theirs.memcpy_dtod(&view, &mut copy).unwrap_err();
                enter();
            }
            drop(view);
            batch.wait_copied().unwrap();
            is_current("wait_copied");
            assert_eq!(bytes(&batch, &stream), [value; BYTES]);
            enter();
            drop(batch);
            is_current("a lease's drop");
        }
        slots.finish();
        is_current("finish");
        drop(batches);
        is_current("dropping the sides");
    }
}

/// Blocks on its channel, inside the device's stream.
extern "C" fn wait_there(channel: *mut std::ffi::c_void) {
    // SAFETY: the test below passes a receiver that outlives the call.
    let channel = unsafe { &*channel.cast::<mpsc::Receiver<()>>() };
    let _ = channel.recv();
}

#[test]
fn copies_do_not_wait_for_the_default_stream() {
    let (sim, ctx) = start(1, false);
    if sim.is_real() {
        return; // host functions of a real driver may share a thread
    }
    let (stream, (end, mut channel)) = (ctx.default_stream(), mpsc::channel::<()>());
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).times(true).build().unwrap();
    ctx.bind_to_thread().unwrap();
    // SAFETY: the receiver outlives the stream's work.
    unsafe {
        result::stream::launch_host_function(stream.cu_stream(), wait_there, (&raw mut channel).cast())
    }
    .unwrap();
    let batch = upload(&mut slots, &mut batches, 1);
    let looked = Instant::now();
    while batch.copied().unwrap().is_none() && looked.elapsed() < MANY_TIMES {
        thread::yield_now();
    }
    let copied = batch.copied().unwrap().is_some();
    drop(end);
    assert!(copied, "the copy waits for work on the default stream");
    stream.synchronize().unwrap();
}

#[test]
fn the_calls_of_a_batch() {
    const BATCHES: u64 = 1000;
    for overlap in [false, true] {
        let (sim, ctx) = start(1, true);
        let stream = ctx.default_stream();
        let (mut slots, mut batches) =
            Uploader::new(&ctx, BYTES).host_depth(4).device_depth(4).overlap(overlap).build().unwrap();
        let mut round = || {
            let batch = upload(&mut slots, &mut batches, 1);
            assert_eq!(batch.on::<u8>(&stream).unwrap().len(), BYTES);
            drop(batch);
            sim.drain(); // the training step on this batch is over when the next batch arrives
        };
        (0..8).for_each(|_| round()); // every slot has been used
        let ((), made) = made(|name| sim.calls_of(name), || (0..BATCHES).for_each(|_| round()));
        println!("overlap {overlap}, {BATCHES} batches: {made:?}");
        let of = |name| made.iter().find(|(made, _)| *made == name).map_or(0, |&(_, count)| count);
        if sim.is_real() {
            return;
        }
        assert_eq!(of("cuMemcpyHtoDAsync_v2"), BATCHES);
        assert!(of("cuEventRecord") <= 2 * BATCHES && of("cuStreamWaitEvent") <= 2 * BATCHES);
        for never in ["cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize", "cuEventElapsedTime"] {
            assert_eq!(of(never), 0, "{never}");
        }
    }
}

#[test]
fn a_view_is_read_on_each_stream_that_the_lease_is_on_and_on_no_other() {
    for (seed, tracking) in (0..40).map(|seed| (seed, seed % 2 == 0)) {
        let (sim, ctx) = start_with(Options { delay_us: 20, ..Options::seeded(seed) }, tracking);
        let (own, other) = (ctx.new_stream().unwrap(), ctx.new_stream().unwrap());
        let (mut slots, mut batches) = uploader(&ctx, seed % 4 < 2);
        let mut copies = Vec::new();
        for value in 0..6 {
            let batch = upload(&mut slots, &mut batches, value);
            let waits = sim.own_calls_of("cuStreamWaitEvent");
            let view = batch.on::<u8>(&own).unwrap();
            for (stream, shared) in
                [(&other, true), (&ctx.default_stream(), true), (&ctx.per_thread_stream(), false)]
            {
                let mut copy = stream.alloc_zeros::<u8>(BYTES).unwrap();
                stream.memcpy_dtod(&view, &mut copy).unwrap_err();
                if shared {
                    batch.on::<u8>(stream).unwrap();
                    assert_eq!(batch.on::<u32>(stream).unwrap().len(), BYTES / 4);
                    stream.memcpy_dtod(&view, &mut copy).unwrap();
                    copies.push((value, copy));
                }
            }
            copies.push((value, own.clone_dtod(&view).unwrap()));
            // With cudarc's event tracking, its copies wait too.
            let waits = sim.own_calls_of("cuStreamWaitEvent") - waits;
            assert!(tracking || sim.is_real() || waits == 3, "once a stream: {waits}");
        }
        for (value, copy) in copies {
            assert_eq!(copy.stream().clone_dtoh(&copy).unwrap(), [value; BYTES], "seed {seed}");
        }
        drop((slots, batches));
        assert_eq!(sim.violations(), [""; 0], "seed {seed}");
    }
}

#[test]
fn parts_of_a_batch_have_types_of_their_own() {
    let (_sim, ctx) = start(1, false);
    let stream = ctx.new_stream().unwrap();
    let (mut slots, mut batches) = uploader(&ctx, false);
    let mut slot = slots.acquire().unwrap();
    slot[..8].copy_from_slice(&[1, 0, 2, 0, 3, 0, 4, 0]);
    slot[8..16].copy_from_slice(bytes_of(&[1.5, -2.0]).as_slice());
    slot.commit(16, 1).unwrap();
    let batch = batches.recv().unwrap().unwrap();
    let tokens = batch.on_range::<u16>(0..8, &stream).unwrap();
    let weights = batch.on_range::<f32>(8..16, &stream).unwrap();
    assert_eq!(stream.clone_dtoh(&tokens).unwrap(), [1, 2, 3, 4]);
    assert_eq!(stream.clone_dtoh(&weights).unwrap(), [1.5, -2.0]);
    assert_eq!(stream.clone_dtoh(&tokens.slice(1..3).unwrap()).unwrap(), [2, 3]);
    assert!(tokens.slice(3..5).is_none());
    for range in [6..10, 1..5] {
        assert!(matches!(batch.on_range::<f32>(range, &stream), Err(Error::Option { option: "T", .. })));
    }
    let error = batch.on_range::<u8>(8..17, &stream).unwrap_err();
    assert_eq!(error.to_string(), "option `bytes`: wanted a range of the batch's 16 bytes, found 8..17");
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

#[test]
fn the_per_thread_stream_is_refused_but_for_a_copy_on_the_device_without_a_wait() {
    let (sim, ctx) = start(1, true);
    let stream = ctx.per_thread_stream(); // candle's
    let (mut slots, mut batches) = uploader(&ctx, false);
    for value in 1..20 {
        let batch = upload(&mut slots, &mut batches, value);
        assert_eq!(batch.on::<u8>(&stream).unwrap_err(), Error::PerThreadStream);
        // SAFETY: the call is refused.
        assert_eq!(unsafe { batch.on_raw(stream.cu_stream()) }, Err(Error::PerThreadStream));
        let (owned, made) = made(|name| sim.calls_of(name), || batch.into_owned::<f32>(&stream).unwrap());
        if !sim.is_real() {
            assert!(made.contains(&("cuMemcpyDtoDAsync_v2", 1)), "{made:?}");
            assert!(!made.iter().any(|(name, _)| name.contains("Synchronize")), "{made:?}");
        }
        assert_eq!(stream.clone_dtoh(&owned).unwrap(), [f32::from_ne_bytes([value; 4]); BYTES / 4]);
    }
    let message = Error::PerThreadStream.to_string();
    assert!(message.contains("`into_owned`") && message.contains("`new_stream`"), "{message}");
}

/// Whoever is the last owner of a context, cudarc makes it current in its drop, and then destroys it.
#[test]
fn the_last_owner_of_a_context_leaves_the_callers_context_current() {
    type Owner = fn(Arc<CudaContext>) -> Box<dyn std::any::Any>;
    let owners: [(&str, Owner); 6] = [
        ("lease", |ctx| {
            let (mut slots, mut batches) = uploader(&ctx, false);
            Box::new(upload(&mut slots, &mut batches, 1))
        }),
        ("batches", |ctx| Box::new(uploader(&ctx, true).1)),
        ("slots", |ctx| Box::new(uploader(&ctx, true).0)),
        ("reserved slot", |ctx| Box::new(uploader(&ctx, true).0.acquire().unwrap().reserve())),
        ("stager", |ctx| Box::new(Stager::new(&ctx).slot_bytes(64).fill_threads(1).build().unwrap())),
        ("builders", |ctx| Box::new((Uploader::new(&ctx, 1), Stager::new(&ctx)))),
    ];
    let options = Options { devices: 2, ..Options::default() };
    let Some((_sim, first)) = start_software_with(options) else { return };
    drop(first);
    let other = twinbuf_cuda::context(1).unwrap();
    for round in 0..200 {
        let (name, owner) = owners[round % owners.len()];
        let owner = owner(twinbuf_cuda::context(0).unwrap());
        let wanted = (round / owners.len()).is_multiple_of(2).then(|| other.cu_ctx());
        make_current(wanted);
        drop(owner);
        assert_eq!(result::ctx::get_current(), Ok(wanted), "{name}, round {round}");
    }
}

/// A thread that waits for a copy sleeps: a wait for an event without `BLOCKING_SYNC` takes a whole processor.
#[test]
fn waits_for_copies_sleep() {
    for (overlap, times) in [(true, false), (true, true), (false, false), (false, true)] {
        let options = Options { delay_us: 50, ..Options::default() };
        let Some((sim, ctx)) = start_software_with(options) else { return };
        let build = Uploader::new(&ctx, BYTES).overlap(overlap).times(times).host_depth(1);
        let (mut slots, mut batches) = build.build::<u64>().unwrap();
        for value in 0..20 {
            upload(&mut slots, &mut batches, value).wait_copied().unwrap();
        }
        // With one slot, the second batch waits for the first on the host.
        commit(&mut slots, BYTES, 1).unwrap();
        drop((slots, batches));
        let stream = ctx.new_stream().unwrap();
        let mut memory = stream.alloc_zeros::<u8>(640).unwrap();
        let mut stager = Stager::new(&ctx).slot_bytes(64).depth(1).fill_threads(1).build().unwrap();
        stager.scope(&stream, |to| to.upload(&[1; 640], memory.as_view_mut())).unwrap();
        assert!(sim.calls_of("cuEventSynchronize") > 1, "nothing was waited for");
        assert_eq!(sim.calls_of("cuEventSynchronize, spinning"), 0, "overlap {overlap}, times {times}");
    }
}
