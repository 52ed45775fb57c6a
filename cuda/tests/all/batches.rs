//! The two sides: order, metadata, waiting, errors, the end, the copy thread, memory.
#![allow(clippy::cast_possible_truncation)] // of small counts

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    BYTES, LAUNCH_FAILED, arrive, bytes, commit, copy_threads, lent_slots, make_current, start, start_with,
    upload, uploader, waker,
};
use cudarc::driver::sys;
use twinbuf_cuda::{DeviceBatches, Error, ReservedSlot, Uploader};
use twinbuf_cuda_sim::{Failure, Options};

#[test]
fn the_next_copy_is_queued_while_one_runs() {
    for overlap in [true, false] {
        let (sim, ctx) = start(1, false);
        let stream = ctx.new_stream().unwrap();
        let build = Uploader::new(&ctx, BYTES).overlap(overlap).times(true);
        let (mut slots, mut batches) = build.build().unwrap();
        let held = sim.hold(0); // the device is stopped: no copy completes
        commit(&mut slots, BYTES, 1).unwrap();
        let (first, second) = (upload(&mut slots, &mut batches, 2), batches.recv().unwrap().unwrap());
        if !sim.is_real() {
            assert_eq!((first.copied(), second.copied()), (Ok(None), Ok(None)));
        }
        drop(held);
        let time = first.wait_copied().unwrap();
        assert!(time.is_some());
        assert_eq!(first.copied(), Ok(time), "the copy is done");
        assert_eq!((bytes(&first, &stream)[0], bytes(&second, &stream)[0]), (1, 2));
    }
}

#[test]
fn an_error_that_was_left_behind_is_told_as_such() {
    let (_sim, ctx) = start(1, true);
    ctx.record_err(sys::CUresult::CUDA_ERROR_UNKNOWN.result());
    let error = Uploader::new(&ctx, BYTES).build::<()>().unwrap_err();
    assert!(error.to_string().starts_with("a call before this uploader's: CUDA_ERROR_UNKNOWN"), "{error}");
}

#[test]
fn a_reader_is_told_that_the_receiver_is_gone() {
    for overlap in [true, false] {
        let (_sim, ctx) = start(1, false);
        let (mut slots, batches) = uploader(&ctx, overlap);
        drop(batches);
        let error = loop {
            if let Err(error) = commit(&mut slots, BYTES, 1) {
                break error;
            }
        };
        assert_eq!(error, Error::Closed);
        assert_eq!(slots.acquire().unwrap_err(), Error::Closed);
        drop(slots);
        assert_eq!(copy_threads(), 0);
    }
}

#[test]
fn arguments_that_cannot_work_are_refused_by_name() {
    let (sim, ctx) = start(1, false);
    let before = sim.live().leaked();
    let option = |uploader: Uploader| match uploader.build::<()>() {
        Err(Error::Option { option, wanted, found }) => format!("{option}: {wanted}, {found}"),
        other => panic!("{other:?}"),
    };
    assert_eq!(option(Uploader::new(&ctx, 0)), "slot_bytes: at least 1 byte, 0");
    assert_eq!(option(Uploader::new(&ctx, 1).host_depth(0)), "host_depth: at least 1 slot, 0");
    assert_eq!(option(Uploader::new(&ctx, 1).device_depth(0)), "device_depth: at least 1 slot, 0");
    let wanted = "slots of 2 bytes that fit the memory";
    let most = isize::MAX as usize / 2;
    for depth in [most + 1, usize::MAX] {
        let (host, device) =
            (Uploader::new(&ctx, 2).host_depth(depth), Uploader::new(&ctx, 2).device_depth(depth));
        assert_eq!(option(host), format!("host_depth: {wanted}, {depth}"));
        assert_eq!(option(device), format!("device_depth: {wanted}, {depth}"));
    }
    assert_eq!(option(Uploader::new(&ctx, 1).host_slots(Vec::new())), "host_depth: at least 1 slot, 0");
    // The lent slots are used in turn: a larger depth would refill one under its copy.
    for depth in [1, 3, 8] {
        let two = || Uploader::new(&ctx, 8).host_slots(lent_slots(2, 8));
        let wanted = format!("host_depth: 2, the number of lent slots, {depth}");
        assert_eq!(option(two().host_depth(depth)), wanted);
        assert!(two().host_depth(2).build::<()>().is_ok());
    }
    let short = Uploader::new(&ctx, 8).host_slots(lent_slots(1, 7));
    assert_eq!(option(short), "host_slots: at least 8 bytes, 7");
    let huge = Uploader::new(&ctx, usize::MAX / 4).build::<()>().unwrap_err();
    assert!(matches!(huge, Error::Driver { call: "cuMemHostAlloc", .. }), "{huge}");
    assert_eq!(sim.live().leaked(), before);

    let stream = ctx.new_stream().unwrap();
    let (mut slots, mut batches) = uploader(&ctx, false);
    commit(&mut slots, 6, 1).unwrap();
    let batch = batches.recv().unwrap().unwrap();
    let error = batch.on::<f32>(&stream).unwrap_err();
    assert_eq!(
        error.to_string(),
        "option `T`: wanted a type whose size divides the batch's 6 bytes, found f32 of 4 bytes"
    );
    assert!(batch.on::<[f32; 0]>(&stream).is_err());
    assert_eq!(batch.on::<u16>(&stream).unwrap().len(), 3);

    let (mut slots, mut batches) = Uploader::new(&ctx, 8).build::<()>().unwrap();
    let refused = |result: Result<(), Error>| result.unwrap_err().to_string();
    let long = "option `len`: wanted at most the slot's 8 bytes, found 9";
    assert_eq!(refused(slots.acquire().unwrap().commit(9, ())), long);
    let slot = slots.acquire().unwrap().reserve();
    assert_eq!(slot.seq(), 0, "the same slot again");
    assert_eq!(refused(slot.commit(9, ())), long);
    slots.acquire().unwrap().commit(8, ()).unwrap();
    assert_eq!(batches.recv().unwrap_err(), Error::Cancelled);
    assert_eq!(batches.recv().unwrap().unwrap().len(), 8);
}

#[test]
fn receiving_without_waiting_and_by_a_task() {
    let (_sim, ctx) = start(1, false);
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).times(true).build::<u64>().unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    assert_eq!(batches.try_recv().unwrap_err(), Error::Empty);
    assert!(batches.poll_recv(&mut cx).is_pending());
    let first = upload(&mut slots, &mut batches, 1);
    commit(&mut slots, 0, 2).unwrap();
    let second = loop {
        match batches.poll_recv(&mut cx) {
            Poll::Ready(second) => break second.unwrap().unwrap(),
            Poll::Pending => thread::yield_now(),
        }
    };
    assert_eq!(second.wait_copied().unwrap(), None, "nothing to copy");
    assert_eq!(batches.try_recv().unwrap_err(), Error::SlotHeld { device_depth: 2 });
    drop((first, second));
    slots.finish();
    assert!(batches.recv().unwrap().is_none());
    assert!(batches.try_recv().unwrap().is_none());
    assert!(matches!(batches.poll_recv(&mut cx), Poll::Ready(Ok(None))));

    let (mut slots, mut batches) = uploader(&ctx, false);
    assert!(matches!(batches.poll_recv(&mut cx), Poll::Ready(Err(Error::Empty))));
    commit(&mut slots, BYTES, 4).unwrap();
    let lease = batches.try_recv().unwrap().unwrap();
    assert_eq!(lease.wait_copied(), Ok(None), "no times were asked for");
}

/// By hand, another thread commits a batch, or drops the lease that keeps the next one from the device.
#[test]
fn a_receive_by_hand_waits_to_its_deadline_for_other_threads() {
    let (_sim, ctx) = start(1, false);
    let build = Uploader::new(&ctx, BYTES).device_depth(1).overlap(false);
    let (mut slots, mut batches) = build.build::<u64>().unwrap();
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(batches.recv_deadline(soon).unwrap_err(), Error::Empty);
    assert!(Instant::now() >= soon);
    let later = soon + Duration::from_secs(300);
    let [first, second] = [(); 2].map(|()| slots.acquire().unwrap().reserve());
    let held = thread::scope(|scope| {
        scope.spawn(|| first.commit(BYTES, 1).unwrap());
        batches.recv_deadline(later).unwrap().unwrap()
    });
    second.commit(BYTES, 2).unwrap();
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(batches.recv_deadline(soon).unwrap_err(), Error::SlotHeld { device_depth: 1 });
    assert!(Instant::now() >= soon);
    thread::scope(|scope| {
        scope.spawn(|| drop(held));
        assert_eq!(*batches.recv_deadline(later).unwrap().unwrap().meta(), 2);
    });
}

/// By hand, the next device slot may have a batch that nobody has received: no lease holds it.
#[test]
fn a_device_that_is_full_asks_to_receive() {
    let (_sim, ctx) = start(1, false);
    let (mut slots, mut batches) = uploader(&ctx, false);
    (0..2).for_each(|value| commit(&mut slots, BYTES, value).unwrap());
    let error = slots.acquire().unwrap_err();
    assert_eq!(error, Error::SlotHeld { device_depth: 2 });
    assert!(error.to_string().contains("receive its batch"), "{error}");
    drop(batches.recv().unwrap());
    commit(&mut slots, BYTES, 2).unwrap();
}

/// Dropped after a task's batches: sends whether that panicked.
struct TaskEnd(mpsc::Sender<bool>);

impl Drop for TaskEnd {
    fn drop(&mut self) {
        let _ = self.0.send(thread::panicking());
    }
}

#[test]
fn a_waker_may_drop_the_last_side_on_the_copy_thread() {
    let (sim, ctx) = start(1, false);
    let before = sim.live().leaked();
    let (mut slots, mut batches) = uploader(&ctx, true);
    let held = sim.hold(0); // the copy thread waits for the copy and has not noticed the drop
    drop(upload(&mut slots, &mut batches, 1));
    slots.finish();
    let (end, panicked) = mpsc::channel();
    // What remains of a task after its executor is gone: only its waker keeps the task, and its future owns the batches.
    let task = Arc::new((Mutex::new(None::<DeviceBatches<u64>>), TaskEnd(end)));
    let kept = task.clone();
    let waker = waker(move || {
        let _kept = &kept;
    });
    let polled = batches.poll_recv(&mut Context::from_waker(&waker)).is_pending();
    assert!(polled || sim.is_real());
    *task.0.lock().unwrap() = Some(batches);
    drop((waker, task));
    drop(held); // the waker is called; it is the last owner of the task
    if polled {
        assert!(!panicked.recv().unwrap(), "a thread cannot wait for its own end");
    }
    // Nobody joins the thread, and it frees the last slot when it ends. `/proc` may also omit a thread while
    // another one ends. The watchdog bounds the wait.
    while sim.live().leaked() != before {
        thread::yield_now();
    }
    assert_eq!(copy_threads(), 0);
}

/// By hand, the panic also reaches the caller.
#[test]
fn a_panic_in_on_copied_ends_both_sides() {
    for overlap in [true, false] {
        let (_sim, ctx) = start(1, false);
        let build = Uploader::new(&ctx, BYTES).on_copied(|copy| assert!(copy.seq < 2, "on purpose"));
        let (mut slots, mut batches) = build.overlap(overlap).build::<u64>().unwrap();
        let mut committed = 0;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            while commit(&mut slots, BYTES, 1).is_ok() {
                committed += 1;
                drop(batches.recv());
            }
        }));
        assert_eq!(ended.is_ok(), overlap);
        // At most as many batches late as there are slots; a copy that has ended sooner is told of sooner.
        assert!(overlap || (2..=4).contains(&committed), "{committed}");
        assert_eq!(slots.acquire().unwrap_err(), Error::Closed);
        let error = loop {
            if let Err(error) = batches.recv() {
                break error;
            }
        };
        assert_eq!(error, Error::Abandoned);
        drop(batches);
        assert_eq!(copy_threads(), 0);
    }
}

/// No device slot becomes free any more for the task that waits for one: another thread's commit ends the copies.
#[test]
fn a_task_by_hand_is_told_that_the_copies_have_ended() {
    for panics in [true, false] {
        let (sim, ctx) = start(1, false);
        if !panics && sim.is_real() {
            return; // it cannot be told to fail
        }
        let build = Uploader::new(&ctx, BYTES).host_depth(3).device_depth(1).overlap(false);
        let build = build.on_copied(move |_| assert!(!panics, "on purpose"));
        let (mut slots, mut batches) = build.build::<u64>().unwrap();
        let [first, second] = [(); 2].map(|()| slots.acquire().unwrap().reserve());
        first.commit(BYTES, 1).unwrap();
        let _held = batches.recv().unwrap().unwrap();
        let (wakes, woken) = mpsc::channel();
        let waker = waker(move || wakes.send(()).unwrap());
        assert!(slots.poll_acquire(&mut Context::from_waker(&waker)).is_pending());
        if !panics {
            sim.inject(Failure::api("cuEventQuery", 1, LAUNCH_FAILED));
        }
        // Its batch waits for the first one's copy.
        let committed = thread::scope(|scope| scope.spawn(|| second.commit(BYTES, 2)).join());
        assert!(!matches!(committed, Ok(Ok(()))));
        woken.try_recv().unwrap();
        let ended = slots.poll_acquire(&mut Context::from_waker(&waker));
        assert!(matches!(ended, Poll::Ready(Err(Error::Closed | Error::Driver { .. }))), "{ended:?}");
    }
}

/// The call that an uploader without a thread makes of the caller's code: it may use the uploader.
#[test]
fn on_copied_by_hand_may_commit_and_drop_slots() {
    for commits in [true, false] {
        let (_sim, ctx) = start(1, false);
        let slot = Arc::new(Mutex::new(None::<ReservedSlot<u64>>));
        let taken = slot.clone();
        let build = Uploader::new(&ctx, BYTES).overlap(false).on_copied(move |_| {
            match taken.lock().unwrap().take() {
                Some(slot) if commits => slot.commit(7, 70).unwrap(),
                slot => drop(slot),
            }
        });
        let (mut slots, mut batches) = build.build().unwrap();
        assert_eq!(upload(&mut slots, &mut batches, 1).wait_copied().unwrap().map(drop), Some(()));
        *slot.lock().unwrap() = Some(slots.acquire().unwrap().reserve());
        // Sees that the first copy has ended: then its host slot is free, and `on_copied` is called.
        let next = slots.acquire();
        assert!(slot.lock().unwrap().is_none(), "called");
        next.unwrap().commit(BYTES, 2).unwrap();
        let reserved = batches.recv();
        if commits {
            let reserved = reserved.unwrap().unwrap();
            assert_eq!((reserved.len(), *reserved.meta()), (7, 70));
        } else {
            assert_eq!(reserved.unwrap_err(), Error::Cancelled);
        }
        assert_eq!(*batches.recv().unwrap().unwrap().meta(), 2);
    }
}

/// It waits for nothing: only the call that it is within could copy the batch.
#[test]
fn within_on_copied_by_hand_a_deadline_is_not_waited_for() {
    let (_sim, ctx) = start(1, false);
    let received = Arc::new(Mutex::new(None::<DeviceBatches<u64>>));
    let (of, (finds, found)) = (received.clone(), mpsc::channel());
    let build = Uploader::new(&ctx, BYTES).host_depth(1).overlap(false).on_copied(move |_| {
        let later = Instant::now() + Duration::from_secs(3600);
        let next = of.lock().unwrap().as_mut().unwrap().recv_deadline(later);
        finds.send(next.unwrap_err()).unwrap();
    });
    let (mut slots, mut batches) = build.build().unwrap();
    drop(upload(&mut slots, &mut batches, 1));
    *received.lock().unwrap() = Some(batches);
    // The only host slot: its copy has to end.
    drop(slots.acquire().unwrap());
    assert_eq!(found.try_recv(), Ok(Error::Empty));
    // It owns the uploader that calls it.
    let _batches = received.lock().unwrap().take();
}

/// The next batch records a device slot's events again, so its times are read before that. A dropped slot uses a device slot
/// too, without a copy.
#[test]
fn each_copy_has_its_own_time_though_there_are_more_host_slots_than_device_slots() {
    // The caller commits every `of`-th slot and drops the others.
    for (host_depth, device_depth, of) in [(8, 1, 1), (8, 3, 1), (3, 2, 1), (1, 8, 1), (3, 2, 2), (8, 3, 3)] {
        let (_sim, ctx) = start_with(Options { delay_us: 20, ..Options::default() }, true);
        let times = Arc::new(Mutex::new(Vec::new()));
        let log = times.clone();
        let build = Uploader::new(&ctx, BYTES).host_depth(host_depth).device_depth(device_depth);
        let build = build.on_copied(move |copy| log.lock().unwrap().push((copy.seq, copy.time.start)));
        let (mut slots, mut batches) = build.build::<u64>().unwrap();
        let reader = thread::spawn(move || {
            for seq in 0..200 {
                match seq % of {
                    0 => commit(&mut slots, BYTES, 1).unwrap(),
                    _ => drop(slots.acquire().unwrap().reserve()),
                }
            }
            slots.finish();
        });
        while let Ok(Some(_)) | Err(Error::Cancelled) = batches.recv() {}
        reader.join().unwrap();
        drop(batches);
        let times = times.lock().unwrap();
        assert!(times.iter().map(|(seq, _)| *seq).eq((0..200).step_by(of)));
        let equal = times.windows(2).find(|pair| pair[0].1 >= pair[1].1);
        assert_eq!(equal, None, "host depth {host_depth}, device depth {device_depth}");
    }
}

#[test]
fn host_slots_begin_with_zeros_and_are_cached() {
    let (sim, ctx) = start(1, false);
    let (mut slots, _batches) = Uploader::new(&ctx, BYTES).build::<()>().unwrap();
    let slot = slots.acquire().unwrap();
    assert_eq!(slot[..], [0; BYTES]);
    let (at, mut flags) = (slot.as_ptr().cast_mut().cast(), 0);
    ctx.bind_to_thread().unwrap();
    // SAFETY: the pointer is valid for the call; the driver has allocated the slot.
    unsafe { sys::cuMemHostGetFlags(&raw mut flags, at) }.result().unwrap();
    assert!(sim.is_real() || flags & sys::CU_MEMHOSTALLOC_WRITECOMBINED == 0);
}

#[test]
fn on_copied_may_make_another_context_current() {
    for overlap in [true, false] {
        let (_sim, ctx) = start(1, false);
        let build = Uploader::new(&ctx, BYTES).overlap(overlap).on_copied(|_| make_current(None));
        let (mut slots, mut batches) = build.build::<u64>().unwrap();
        let stream = ctx.new_stream().unwrap();
        arrive(&mut slots, &mut batches, &stream, 1..10);
        slots.finish();
        assert!(batches.recv().unwrap().is_none());
    }
}

#[test]
fn memory_is_what_was_asked_for_after_thousands_of_batches() {
    let all: u64 = twinbuf_testing::extent(3000, 20_000);
    let (sim, ctx) = start_with(Options { delay_us: 0, pieces: 1, ..Options::default() }, false);
    let stream = ctx.new_stream().unwrap();
    let before = sim.live();
    let (mut slots, mut batches) =
        Uploader::new(&ctx, BYTES).host_depth(3).device_depth(2).build::<u64>().unwrap();
    let built = sim.live();
    if !sim.is_real() {
        assert_eq!(built.host_bytes - before.host_bytes, 3 * BYTES as u64);
        assert_eq!(built.device_bytes - before.device_bytes, 2 * BYTES as u64);
    }
    let reader = thread::spawn(move || {
        for seq in 0..all {
            slots.acquire().unwrap().commit(BYTES, seq).unwrap();
        }
        slots.finish();
    });
    let mut later = built;
    for seq in 0..all {
        let batch = batches.recv().unwrap().unwrap();
        assert_eq!(*batch.meta(), seq);
        if seq % 16 < 2 {
            batch.on::<u8>(&stream).unwrap();
        }
        drop(batch);
        match seq {
            10 => later = sim.live(), // each device slot has its `consumed` event by now
            _ if seq == all - 100 => assert_eq!(sim.live(), later),
            _ => {}
        }
    }
    assert!(batches.recv().unwrap().is_none());
    reader.join().unwrap();
    let after = sim.live();
    assert_eq!((after.peak_host_bytes, after.peak_device_bytes), (built.host_bytes, built.device_bytes));
    drop(batches);
    sim.drain();
    assert_eq!(sim.live().leaked(), before.leaked());
}
