//! Leases: any order, any thread, any stream, leaked, copied out, timed.
#![allow(clippy::cast_possible_truncation)] // of small counts

use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    BYTES, bytes, commit, copy_threads, start, start_software, start_with, upload, uploader,
};
use cudarc::driver::sys;
use twinbuf_cuda::{Error, Lease, Uploader};
use twinbuf_cuda_sim::{Control, Options};

#[test]
fn leases_are_dropped_in_any_order_on_any_thread() {
    let (_sim, ctx) = start(1, true);
    let stream = ctx.new_stream().unwrap();
    let (mut slots, mut batches) =
        Uploader::new(&ctx, BYTES).host_depth(3).device_depth(3).build::<u64>().unwrap();
    let reader = thread::spawn(move || {
        // One more than the rounds take: at the end of the data, no slot is held.
        for value in 1..=61 {
            commit(&mut slots, BYTES, value).unwrap();
        }
        slots.finish();
    });
    for round in 0..20 {
        let mut leases: Vec<_> = (0..3).map(|_| batches.recv().unwrap().unwrap()).collect();
        assert_eq!(batches.recv().unwrap_err(), Error::SlotHeld { device_depth: 3 });
        leases.rotate_left(round % 3);
        if round % 2 == 0 {
            leases.reverse();
        }
        for lease in leases {
            assert_eq!(u64::from(bytes(&lease, &stream)[9]), *lease.meta());
            thread::scope(|scope| drop(scope.spawn(move || drop(lease))));
        }
    }
    assert_eq!(*batches.recv().unwrap().unwrap().meta(), 61);
    reader.join().unwrap();
    assert!(batches.recv().unwrap().is_none());
}

#[test]
fn a_leaked_lease_costs_its_slot_and_is_never_aliased() {
    for overlap in [true, false] {
        let (sim, ctx) = start(1, false);
        let before = sim.live().leaked();
        let stream = ctx.new_stream().unwrap();
        let (mut slots, mut batches) = uploader(&ctx, overlap);
        let leaked = upload(&mut slots, &mut batches, 1);
        let other = ctx.new_stream().unwrap();
        // SAFETY: the stream outlives everything here.
        let address = unsafe { leaked.on_raw(other.cu_stream()) }.unwrap();
        let mut copy = other.alloc_zeros::<u8>(BYTES).unwrap();
        // Not waited for here: freeing the slot must wait for it.
        other.memcpy_dtod(&leaked.on::<u8>(&other).unwrap(), &mut copy).unwrap();
        std::mem::forget(leaked);
        let second = upload(&mut slots, &mut batches, 2);
        assert_eq!(bytes(&second, &stream), [2; BYTES]);
        drop(second);
        // The leaked slot's turn: nothing more arrives, and the slot still has its contents.
        if overlap {
            commit(&mut slots, BYTES, 3).unwrap();
        } else {
            assert_eq!(slots.acquire().unwrap_err(), Error::SlotHeld { device_depth: 2 });
        }
        assert_eq!(batches.recv().unwrap_err(), Error::SlotHeld { device_depth: 2 });
        if let Some(held) = sim.peek(address, BYTES) {
            assert_eq!(held, [1; BYTES]);
        }
        drop(batches);
        if overlap {
            // The copy thread waits for the leaked slot, and must stop waiting now.
            while commit(&mut slots, 1, 4).is_ok() {}
        }
        drop(slots);
        assert_eq!(copy_threads(), 0);
        assert_eq!(other.clone_dtoh(&copy).unwrap(), [1; BYTES]);
        drop((copy, stream, other));
        // A lease keeps its slots alive, and so does a leaked lease: the two device slots. Everything else is
        // freed.
        let after = sim.live().leaked();
        assert_eq!((after.host_allocations, after.threads), (before.host_allocations, before.threads));
        if !sim.is_real() {
            assert_eq!(after.device_allocations, before.device_allocations + 2);
        }
    }
}

#[test]
fn without_memory_pools_the_last_use_is_waited_for_whatever_failed_elsewhere() {
    let (_sim, ctx) = start_with(Options { pools: false, ..Options::default() }, true);
    let stream = ctx.new_stream().unwrap();
    let (mut slots, mut batches) = uploader(&ctx, false);
    let mut copy = stream.alloc_zeros::<u8>(BYTES).unwrap();
    let batch = upload(&mut slots, &mut batches, 1);
    stream.memcpy_dtod(&batch.on::<u8>(&stream).unwrap(), &mut copy).unwrap();
    drop(batch);
    // Simulates an error left by a drop elsewhere: cudarc's drops then wait for nothing.
    ctx.record_err(sys::CUresult::CUDA_ERROR_UNKNOWN.result());
    drop((slots, batches));
    ctx.check_err().unwrap_err();
    assert_eq!(stream.clone_dtoh(&copy).unwrap(), [1; BYTES]);
}

#[test]
fn what_travels_with_a_batch_is_dropped_once_with_its_lease() {
    for overlap in [true, false] {
        let (_sim, ctx) = start(1, false);
        let count = Arc::new(());
        let (mut slots, mut batches) = Uploader::new(&ctx, 8).overlap(overlap).build::<Arc<()>>().unwrap();
        slots.acquire().unwrap().commit(8, count.clone()).unwrap();
        let mut lease = batches.recv().unwrap().unwrap();
        assert_eq!(Arc::strong_count(&count), 2);
        *lease.meta_mut() = Arc::new(()); // moved out
        assert_eq!(Arc::strong_count(&count), 1);
        *lease.meta_mut() = count.clone();
        drop(lease);
        assert_eq!(Arc::strong_count(&count), 1);
        slots.acquire().unwrap().commit(0, count.clone()).unwrap(); // never received
        drop((slots, batches));
        assert_eq!(Arc::strong_count(&count), 1);
    }
}

#[test]
fn the_times_of_a_copy_come_from_its_events() {
    for overlap in [true, false] {
        let (_sim, ctx) = start(1, false);
        let (log, begin) = (Arc::new(Mutex::new(Vec::new())), std::time::Instant::now());
        let copied = log.clone();
        let build = Uploader::new(&ctx, BYTES).overlap(overlap);
        let (mut slots, mut batches) =
            build.on_copied(move |copy| copied.lock().unwrap().push(copy)).build::<u64>().unwrap();
        let stream = ctx.new_stream().unwrap();
        let mut times = Vec::new();
        for value in 1..=9 {
            let len = if value == 4 { 0 } else { BYTES };
            commit(&mut slots, len, value).unwrap();
            let batch = batches.recv().unwrap().unwrap();
            batch.on::<u8>(&stream).unwrap();
            stream.synchronize().unwrap(); // so the copy is done
            times.push((batch.seq(), batch.len(), batch.copied().unwrap()));
        }
        slots.finish();
        while batches.recv().unwrap().is_some() {}
        let logged = log.lock().unwrap();
        let seqs: Vec<u64> = logged.iter().map(|copy| copy.seq).collect();
        assert_eq!(seqs, [0, 1, 2, 4, 5, 6, 7, 8], "in order, and none for the empty one");
        for copy in logged.iter() {
            let (_, len, time) = times[copy.seq as usize];
            assert_eq!((copy.bytes, Some(copy.time)), (len, time), "{}", copy.seq);
            let end = copy.time.start + copy.time.took;
            assert!(begin <= copy.time.start && copy.time.start < end && end <= Instant::now());
        }
        assert_eq!(times[3], (3, 0, None));
        assert!(logged.windows(2).all(|pair| pair[0].time.start <= pair[1].time.start));
    }
}

#[test]
fn a_use_is_waited_for_once() {
    let (sim, ctx) = start(1, false);
    let stream = ctx.new_stream().unwrap();
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).device_depth(1).overlap(false).build().unwrap();
    let mut waits = || {
        let before = sim.calls_of("cuStreamWaitEvent");
        let batch = upload(&mut slots, &mut batches, 1);
        (batch, sim.calls_of("cuStreamWaitEvent") - before)
    };
    let (first, waited) = waits();
    assert_eq!(waited, 0, "nothing has used the slot");
    first.on::<u8>(&stream).unwrap();
    drop(first);
    let (second, waited) = waits();
    assert!(waited == 1 || sim.is_real());
    drop(second);
    assert_eq!(waits().1, 0, "the second batch was not used");
}

/// Only the receive calls free the slot that the filling side waits for.
#[test]
fn without_overlap_a_wait_for_a_slot_keeps_no_receive_call_out() {
    let (_sim, ctx) = start(1, false);
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).device_depth(1).overlap(false).build().unwrap();
    let received = thread::scope(|scope| {
        scope.spawn(move || {
            for value in 0..50_u8 {
                let slot = slots.acquire_deadline(Instant::now() + Duration::from_secs(3600)).unwrap();
                slot.commit(BYTES, value).unwrap();
            }
            slots.finish();
        });
        let mut received = Vec::new();
        loop {
            match batches.try_recv() {
                Ok(Some(batch)) => received.push(*batch.meta()),
                Ok(None) => break received,
                Err(error) => assert_eq!(error, Error::Empty),
            }
            thread::yield_now();
        }
    });
    assert!(received.into_iter().eq(0..50));
}

/// Another thread may drop the lease between the two looks of a poll. Here the clone of the waker does, made between them.
#[test]
fn by_hand_a_task_does_not_wait_for_a_lease_that_is_gone() {
    const TABLE: RawWakerVTable = RawWakerVTable::new(clone, |_| {}, |_| {}, |_| {});
    fn clone(lease: *const ()) -> RawWaker {
        // SAFETY: it is the one below, which is there while the task is polled.
        drop(unsafe { &*lease.cast::<Mutex<Option<Lease<u64>>>>() }.lock().unwrap().take());
        RawWaker::new(lease, &TABLE)
    }
    let (_sim, ctx) = start(1, false);
    let build = Uploader::new(&ctx, BYTES).device_depth(1).overlap(false);
    let (mut slots, mut batches) = build.build().unwrap();
    let lease = Mutex::new(Some(upload(&mut slots, &mut batches, 1)));
    // SAFETY: the mutex may be used on any thread, and nothing of the waker has to be dropped.
    let waker = unsafe { Waker::from_raw(RawWaker::new((&raw const lease).cast(), &TABLE)) };
    let polled = batches.poll_recv(&mut Context::from_waker(&waker));
    assert!(matches!(polled, Poll::Ready(Err(Error::Empty))), "{polled:?}");
}

/// The value of a batch is the caller's code, and may own what the batch's last use needs.
#[test]
fn the_value_of_a_batch_is_dropped_after_its_use_has_ended_and_its_slot_is_free() {
    struct Value(Control, Arc<Mutex<Vec<u64>>>);
    impl Drop for Value {
        fn drop(&mut self) {
            self.1.lock().unwrap().push(self.0.own_calls_of("cuEventRecord"));
        }
    }
    let Some((sim, ctx)) = start_software() else { return };
    let stream = ctx.new_stream().unwrap();
    let seen = Arc::default();
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).device_depth(1).build::<Value>().unwrap();
    for _ in 0..3 {
        let before = sim.own_calls_of("cuEventRecord");
        slots.acquire().unwrap().commit(BYTES, Value(sim.control(), Arc::clone(&seen))).unwrap();
        let batch = batches.recv().unwrap().unwrap();
        batch.on::<u8>(&stream).unwrap();
        drop(batch);
        assert_eq!(seen.lock().unwrap().pop(), Some(before + 1), "recorded before the value is gone");
    }
}
