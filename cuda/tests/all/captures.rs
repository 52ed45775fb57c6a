//! Captures of streams into graphs: calls of the API while a stream is being captured, in every mode. No call
//! breaks the capture, and the uploader works afterwards.
#![allow(clippy::cast_possible_truncation)] // of small counts

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::common::{
    BYTES, MODES, arrive, bytes, commit, copy_threads, from, start, start_software, start_with, upload, waker,
};
use cudarc::driver::sys::CUstreamCaptureMode::{
    CU_STREAM_CAPTURE_MODE_GLOBAL as GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED as RELAXED,
};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result, sys};
use twinbuf_cuda::{DeviceBatches, Error, HostSlots, Lease, Stager, Uploader};
use twinbuf_cuda_sim::{Failure, Options};

const HELD: Error = Error::SlotHeld { device_depth: 2 };

/// Ends a capture that must still be valid.
#[track_caller]
fn end(captured: sys::CUstream) {
    // SAFETY: the stream exists.
    let graph = unsafe { result::stream::end_capture(captured) }.expect("the capture is broken");
    // SAFETY: the graph exists, and is destroyed once.
    unsafe { result::graph::destroy(graph) }.unwrap();
}

/// An uploader with two batches in its device slots, 1 and 2, and a stream that is being captured.
struct Scene {
    ctx: Arc<CudaContext>,
    captured: Arc<CudaStream>,
    /// Not captured.
    other: Arc<CudaStream>,
    /// `None` after the end.
    slots: Option<HostSlots<u64>>,
    batches: Option<DeviceBatches<u64>>,
    /// Kept, because cudarc frees it.
    owned: Option<CudaSlice<u8>>,
    /// 1000 bytes on the stream that is not captured.
    memory: CudaSlice<u8>,
}

impl Scene {
    fn lease(&mut self) -> Lease<u64> {
        self.batches.as_mut().unwrap().recv().unwrap().unwrap()
    }

    fn commit(&mut self, value: u8) {
        commit(self.slots.as_mut().unwrap(), BYTES, value).unwrap();
    }
}

type Call = fn(&mut Scene);

/// Calls of the API.
const CALLS: [(&str, Call); 14] = [
    ("context", |_| drop(twinbuf_cuda::context(0).unwrap())),
    ("build and drop", |scene| {
        let uploader = Uploader::new(&scene.ctx, BYTES).times(true);
        drop(uploader.build::<()>().unwrap());
    }),
    ("acquire and commit", |scene| {
        drop(scene.lease());
        scene.commit(3);
    }),
    ("reserve and drop", |scene| {
        drop(scene.lease());
        drop(scene.slots.as_mut().unwrap().acquire().unwrap().reserve());
    }),
    ("try_recv and poll_recv", |scene| {
        let batches = scene.batches.as_mut().unwrap();
        while matches!(batches.try_recv(), Err(Error::Empty)) {
            std::thread::yield_now();
        }
        let _ = batches.poll_recv(&mut Context::from_waker(Waker::noop()));
    }),
    ("on and on_range", |scene| {
        let (lease, captured) = (scene.lease(), &scene.captured);
        assert_eq!(lease.on::<u8>(captured).unwrap_err(), Error::Captured);
        assert_eq!(lease.on_range::<u8>(0..4, captured).unwrap_err(), Error::Captured);
        lease.on::<u8>(&scene.other).unwrap();
    }),
    ("on_raw", |scene| {
        // SAFETY: the call is refused.
        assert_eq!(unsafe { scene.lease().on_raw(scene.captured.cu_stream()) }, Err(Error::Captured));
    }),
    ("into_owned", |scene| {
        assert_eq!(scene.lease().into_owned::<u8>(&scene.captured).unwrap_err(), Error::Captured);
        scene.owned = Some(scene.lease().into_owned::<u8>(&scene.other).unwrap());
    }),
    ("copied and wait_copied", |scene| {
        let lease = scene.lease();
        assert!(lease.wait_copied().unwrap().is_some());
        assert!(lease.copied().unwrap().is_some());
    }),
    ("a copy of a view's on the captured stream", |scene| {
        let lease = scene.lease();
        let view = lease.on::<u8>(&scene.other).unwrap();
        // The address that cudarc's copies ask for: null, so the driver refuses it.
        assert_eq!(DevicePtr::device_ptr(&view, &scene.captured).0, 0);
    }),
    ("drop of a lease used elsewhere", |scene| {
        scene.lease().on::<u8>(&scene.other).unwrap();
    }),
    ("a stager's scopes on another stream", |scene| {
        let memory = &mut scene.memory;
        let mut stager = Stager::new(&scene.ctx).slot_bytes(64).fill_threads(2).build().unwrap();
        stager.scope(&scene.other, |to| to.upload(&[7; 1000], memory.as_view_mut())).unwrap();
        let mut back = [0; 1000];
        stager.scope(&scene.other, |from| from.offload(memory.as_view(), &mut back)).unwrap();
        assert_eq!(back, [7; 1000]);
        let failed = stager.scope(&scene.other, |_| Err::<(), _>(Error::Closed));
        assert_eq!(failed.unwrap_err(), Error::Closed);
    }),
    ("drop of both sides", |scene| drop((scene.slots.take(), scene.batches.take()))),
    ("finish", |scene| {
        scene.slots.take().unwrap().finish();
        let mut batches = scene.batches.take().unwrap();
        while batches.recv().unwrap().is_some() {}
    }),
];

#[test]
fn each_call_leaves_a_capture_alone_and_the_uploader_works_afterwards() {
    let ways = MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]);
    let ways = ways.flat_map(|way| [(way, true), (way, false)]);
    for (((mode, overlap), pools), (name, call)) in ways.flat_map(|way| CALLS.map(|call| (way, call))) {
        let (sim, ctx) = start_with(Options { delay_us: 0, pools, ..Options::default() }, false);
        let (captured, other) = (ctx.new_stream().unwrap(), ctx.new_stream().unwrap());
        let uploader = Uploader::new(&ctx, BYTES).overlap(overlap).times(true);
        let (slots, batches) = uploader.build().map(|(slots, batches)| (Some(slots), Some(batches))).unwrap();
        let memory = other.alloc_zeros(1000).unwrap();
        let mut scene = Scene { ctx, captured, other, slots, batches, owned: None, memory };
        scene.commit(1);
        scene.commit(2);
        scene.captured.begin_capture(mode).unwrap();
        call(&mut scene);
        let mut own = GLOBAL;
        // SAFETY: the pointer is valid for the call.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut own) }.result().unwrap();
        assert_eq!(own, GLOBAL, "{name} has left its own mode behind");
        end(scene.captured.cu_stream());
        let Scene { captured, slots: Some(mut slots), batches: Some(mut batches), .. } = scene else {
            continue;
        };
        for value in 10..20 {
            while let Err(error) = commit(&mut slots, BYTES, value) {
                assert_eq!(error, HELD, "{name}, {mode:?}");
                drop(batches.recv());
            }
            loop {
                let batch = match batches.recv() {
                    Err(Error::Cancelled) if name == "reserve and drop" => continue,
                    batch => batch.unwrap().unwrap(),
                };
                let found = *batch.meta();
                assert_eq!(bytes(&batch, &captured), [found as u8; BYTES], "{name}, {mode:?}");
                if found == u64::from(value) {
                    break;
                }
            }
        }
        assert_eq!(sim.violations(), [""; 0], "{name}, {mode:?}");
    }
}

/// The first receive after the capture releases the slot, after the work that was enqueued before the capture.
#[test]
fn a_lease_dropped_while_its_stream_is_captured_holds_its_slot_until_the_end() {
    let ways = MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]);
    for ((mode, overlap), raw) in ways.flat_map(|way| [(way, false), (way, true)]) {
        let (_sim, ctx) = start_with(Options { delay_us: 20, ..Options::default() }, true);
        let (stream, other) = (ctx.new_stream().unwrap(), ctx.new_stream().unwrap());
        let mut copy = stream.alloc_zeros::<u8>(BYTES).unwrap();
        let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).overlap(overlap).build().unwrap();
        for round in 0..5 {
            let value = 3 * round + 1;
            let lease = upload(&mut slots, &mut batches, value);
            if raw {
                // SAFETY: the stream outlives the uploader.
                unsafe { lease.on_raw(stream.cu_stream()) }.unwrap();
            }
            let view = lease.on::<u8>(&stream).unwrap();
            stream.memcpy_dtod(&view, &mut copy).unwrap();
            stream.begin_capture(mode).unwrap();
            assert_eq!(
                DevicePtr::device_ptr(&view, &stream).0,
                0,
                "cudarc's copies would be part of the graph"
            );
            drop(lease);
            assert_eq!(*upload(&mut slots, &mut batches, value + 1).meta(), u64::from(value) + 1);
            // The turn of the held slot.
            if overlap {
                commit(&mut slots, BYTES, value + 2).unwrap();
            } else {
                assert_eq!(commit(&mut slots, BYTES, value + 2).unwrap_err(), HELD);
            }
            assert_eq!(batches.recv().unwrap_err(), HELD);
            end(stream.cu_stream());
            if !overlap {
                commit(&mut slots, BYTES, value + 2).unwrap();
            }
            assert_eq!(bytes(&batches.recv().unwrap().unwrap(), &other), [value + 2; BYTES]);
            assert_eq!(stream.clone_dtoh(&copy).unwrap(), [value; BYTES], "{mode:?}, overlap {overlap}");
        }
        drop((slots, batches));
    }
}

/// Nothing wakes a wait for a slot that a capture holds: a call with a deadline looks again, the others say so.
#[test]
fn a_deadline_waits_for_the_end_of_a_capture_and_a_task_is_told() {
    for (overlap, cancelled) in [(true, false), (true, true), (false, false), (false, true)] {
        let Some((sim, ctx)) = start_software() else { return };
        let (captured, control) = (ctx.new_stream().unwrap(), sim.control());
        let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).overlap(overlap).build().unwrap();
        if cancelled {
            drop(slots.acquire().unwrap().reserve());
            assert_eq!(batches.recv().unwrap_err(), Error::Cancelled);
        }
        let lease = upload(&mut slots, &mut batches, 1);
        lease.on::<u8>(&captured).unwrap();
        captured.begin_capture(RELAXED).unwrap();
        drop(lease);
        assert_eq!(*upload(&mut slots, &mut batches, 2).meta(), 2);
        assert!(batches.is_held());
        let mut cx = Context::from_waker(Waker::noop());
        let soon = Instant::now() + Duration::from_millis(5);
        if overlap {
            commit(&mut slots, BYTES, 3).unwrap();
            assert!(matches!(batches.poll_recv(&mut cx), Poll::Ready(Err(HELD))));
            assert_eq!(batches.recv_deadline(soon).unwrap_err(), HELD);
        } else {
            assert!(matches!(slots.poll_acquire(&mut cx), Poll::Ready(Err(HELD))));
            assert_eq!(slots.acquire_deadline(soon).unwrap_err(), HELD);
        }
        let looks = control.calls_of("cuStreamIsCapturing");
        let given_up = AtomicBool::new(false);
        let deadline = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The call waits, and has looked again.
                while control.calls_of("cuStreamIsCapturing") < looks + 2 && !given_up.load(Ordering::Relaxed)
                {
                    std::thread::yield_now();
                }
                ctx.bind_to_thread().unwrap();
                end(captured.cu_stream());
            });
            if !overlap {
                let slot = slots.acquire_deadline(deadline);
                given_up.store(true, Ordering::Relaxed);
                slot.unwrap().commit(BYTES, 3).unwrap();
            }
            let batch = batches.recv_deadline(deadline);
            given_up.store(true, Ordering::Relaxed);
            assert_eq!(*batch.unwrap().unwrap().meta(), 3, "overlap {overlap}, cancelled {cancelled}");
        });
    }
}

/// A receive call that releases a slot after a capture wakes a task. The waker may drop another lease, which locks the
/// list of captured slots: the call must not hold that lock.
#[test]
fn a_waker_may_drop_a_lease_of_a_captured_stream_when_a_capture_has_ended() {
    for overlap in [true, false] {
        let (_sim, ctx) = start(1, false);
        let streams = [ctx.new_stream().unwrap(), ctx.new_stream().unwrap()];
        let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).overlap(overlap).build().unwrap();
        let [first, second] = [0, 1].map(|at| {
            let lease = upload(&mut slots, &mut batches, at as u8);
            lease.on::<u8>(&streams[at]).unwrap();
            streams[at].begin_capture(RELAXED).unwrap();
            lease
        });
        // A captured stream uses the second lease, so its drop keeps its slot.
        let (second, woken) = (Mutex::new(Some(second)), Arc::new(AtomicBool::new(false)));
        let was_woken = woken.clone();
        let waker = waker(move || {
            drop(second.lock().unwrap().take());
            woken.store(true, Ordering::Relaxed);
        });
        let mut cx = Context::from_waker(&waker);
        if overlap {
            assert!(batches.poll_recv(&mut cx).is_pending(), "the first lease holds the next slot");
        } else {
            assert!(slots.poll_acquire(&mut cx).is_pending(), "the first lease holds the next slot");
        }
        drop(first);
        end(streams[0].cu_stream());
        // Releases the first slot, and so calls the waker.
        assert_eq!(batches.try_recv().unwrap_err(), Error::Empty, "overlap {overlap}");
        assert!(was_woken.load(Ordering::Relaxed), "the task was not woken");
        end(streams[1].cu_stream());
        arrive(&mut slots, &mut batches, &streams[1], 2..10);
    }
}

/// The default stream depends on every blocking stream: while one is being captured, no event can be recorded on the
/// default stream.
#[test]
fn a_lease_used_on_the_default_stream_waits_for_the_end_of_a_blocking_streams_capture() {
    let (_sim, ctx) = start(1, false);
    let (legacy, other) = (ctx.default_stream(), ctx.new_stream().unwrap());
    let mut blocking = std::ptr::null_mut();
    // SAFETY: the pointer is valid for the call.
    unsafe { sys::cuStreamCreate(&raw mut blocking, 0) }.result().unwrap();
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).build().unwrap();
    let lease = upload(&mut slots, &mut batches, 1);
    lease.on::<u8>(&legacy).unwrap();
    // SAFETY: the stream exists.
    unsafe { sys::cuStreamBeginCapture_v2(blocking, GLOBAL) }.result().unwrap();
    assert_eq!(lease.on::<u8>(&legacy).unwrap_err(), Error::Captured);
    drop(lease);
    end(blocking);
    arrive(&mut slots, &mut batches, &other, 2..10);
    // SAFETY: created above.
    unsafe { sys::cuStreamDestroy_v2(blocking) }.result().unwrap();
}

#[test]
fn memory_that_a_captured_stream_may_still_use_is_leaked_and_the_rest_is_freed() {
    let all = [(true, true), (true, false), (false, true), (false, false)];
    for ((overlap, pools), keeps) in all.into_iter().flat_map(|how| [(how, false), (how, true)]) {
        let (sim, ctx) = start_with(Options { delay_us: 0, pools, ..Options::default() }, false);
        let stream = ctx.new_stream().unwrap();
        let before = sim.live().leaked();
        let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).overlap(overlap).build().unwrap();
        let lease = upload(&mut slots, &mut batches, 1);
        lease.on::<u8>(&stream).unwrap();
        stream.begin_capture(GLOBAL).unwrap();
        let kept = keeps.then_some(slots);
        drop((batches, lease));
        // The copy thread sees that nobody receives, and drops the device slots. Without one, the host slots keep them.
        while overlap && copy_threads() > 0 {
            std::thread::yield_now();
        }
        end(stream.cu_stream());
        drop(kept);
        let mut after = sim.live().leaked();
        if !sim.is_real() && (overlap || !keeps) {
            assert_eq!(after.device_allocations, before.device_allocations + 1);
            assert_eq!(after.device_bytes, before.device_bytes + BYTES as u64);
        }
        (after.device_allocations, after.device_bytes) = (before.device_allocations, before.device_bytes);
        assert_eq!(after, before);
    }
}

/// Changing the thread's capture mode and querying whether a stream is captured may both report an error of earlier
/// work.
#[test]
fn a_capture_is_whole_though_the_call_that_spares_it_fails_once() {
    for call in ["cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing"] {
        let Some((sim, ctx)) = start_software() else { return };
        let stream = ctx.new_stream().unwrap();
        let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).overlap(false).build().unwrap();
        let lease = upload(&mut slots, &mut batches, 1);
        lease.on::<u8>(&stream).unwrap();
        stream.begin_capture(GLOBAL).unwrap();
        sim.inject(Failure::api(call, 1, 719));
        lease.wait_copied().unwrap();
        drop(lease);
        assert_eq!(sim.injected(), [call]);
        end(stream.cu_stream());
        for value in 2..6 {
            let arrived = bytes(&upload(&mut slots, &mut batches, value), &stream);
            assert_eq!(arrived, [value; BYTES], "{call}");
        }
    }
}

/// A scope on a captured stream, and on one whose capture begins between its calls or after them.
#[test]
fn a_scope_leaves_a_capture_of_its_stream_alone_and_the_stager_works_afterwards() {
    let ways = MODES.into_iter().flat_map(|mode| [(mode, false), (mode, true)]);
    // 92: the second piece fills the last slot, and nothing is handed over at the end.
    let ways = ways.flat_map(|way| [(way, 92), (way, 100)]);
    for (((mode, tracking), len), begins) in ways.flat_map(|way| [0, 1, 2, 3].map(|begins| (way, begins))) {
        let (sim, ctx) = start_with(Options { delay_us: 20, ..Options::default() }, tracking);
        let stream = ctx.new_stream().unwrap();
        let (mut first, mut second) =
            (stream.alloc_zeros::<u8>(100).unwrap(), stream.alloc_zeros::<u8>(len).unwrap());
        stream.synchronize().unwrap();
        let mut stager = Stager::new(&ctx).slot_bytes(64).fill_threads(1).build().unwrap();
        let capture = |now: u8| {
            if now == begins {
                stream.begin_capture(mode).unwrap();
            }
        };
        capture(0);
        let error = stager
            .scope(&stream, |to| {
                to.upload(&[1; 100], first.as_view_mut())?;
                capture(1);
                let uploaded = to.upload_with(from(&[2; 100]), second.as_view_mut());
                assert_eq!(uploaded, if begins < 2 { Err(Error::Captured) } else { Ok(()) });
                capture(2);
                Ok::<_, Error>(())
            })
            .map(|()| capture(3));
        assert_eq!(error, if begins < 3 { Err(Error::Captured) } else { Ok(()) }, "{mode:?}, {begins}");
        end(stream.cu_stream());
        for value in 3..6 {
            let bytes = [value; 100];
            stager.scope(&stream, |to| to.upload(&bytes, first.as_view_mut())).unwrap();
            assert_eq!(stream.clone_dtoh(&first).unwrap(), [value; 100]);
        }
        drop((stager, first, second));
        assert_eq!(sim.violations(), [""; 0], "{mode:?}, tracking {tracking}, begins {begins}");
    }
}
