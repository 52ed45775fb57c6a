//! No batch costs memory: after the first ten batches, nothing is allocated on any thread. Without the test harness, whose own thread allocates when a test takes a minute.
#![cfg(target_os = "linux")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::start;
use twinbuf_cuda::Uploader;
use twinbuf_testing::{ALLOCATIONS, Counting};

/// The software driver has an allocator of its own, which is not counted.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn nothing_is_allocated_when_copies_first_overlap() {
    const BYTES: usize = 64 * 64;
    let (sim, ctx) = start(1, false);
    let retired = Arc::new(AtomicU64::new(0));
    let seen = retired.clone();
    let build = Uploader::new(&ctx, BYTES).on_copied(move |_| {
        seen.fetch_add(1, Ordering::Release);
    });
    let (mut slots, mut batches) = build.build::<u64>().unwrap();
    let mut commit = |value| slots.acquire().unwrap().commit(BYTES, value).unwrap();
    for round in 0..10 {
        commit(round);
        drop(batches.recv().unwrap().unwrap());
        while retired.load(Ordering::Acquire) <= round {
            std::thread::yield_now();
        }
    }
    let held = sim.hold(0);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    commit(10);
    commit(11);
    drop((batches.recv().unwrap().unwrap(), batches.recv().unwrap().unwrap()));
    drop(held);
    // A third copy, while the copies of the other two may still run.
    commit(12);
    drop(batches.recv().unwrap().unwrap());
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before);
}

fn nothing_is_allocated_per_batch() {
    const BYTES: usize = 64 * 64;
    const BATCHES: u64 = 200;
    for (overlap, times) in [(true, false), (true, true), (false, false), (false, true)] {
        let (_sim, ctx) = start(1, false);
        let stream = ctx.new_stream().unwrap();
        // cudarc looks a function up at its first call, and each batch may be the first that is waited for.
        ctx.new_event(None).unwrap().synchronize().unwrap();
        let build = Uploader::new(&ctx, BYTES).overlap(overlap).times(times);
        let (mut slots, mut batches) = build.build::<u64>().unwrap();
        let mut round = |value: u64| {
            slots.acquire().unwrap().reserve().commit(BYTES, value).unwrap();
            let batch = batches.recv().unwrap().unwrap();
            let view = batch.on::<f32>(&stream).unwrap();
            assert_eq!(view.slice(4..8).unwrap().len(), 4);
            batch.wait_copied().unwrap();
        };
        (0..10).for_each(&mut round);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..BATCHES).for_each(&mut round);
        let made = ALLOCATIONS.load(Ordering::Relaxed) - before;
        println!("overlap {overlap}, times {times}: {made} allocations in {BATCHES} batches");
        assert_eq!(made, 0);
    }
    // Last: cudarc looks each function up at its first call.
    nothing_is_allocated_when_copies_first_overlap();
}

fn main() {
    nothing_is_allocated_per_batch();
    println!("test result: ok");
}
