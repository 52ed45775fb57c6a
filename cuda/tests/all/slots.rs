//! Slots that are dropped, kept or lent.
#![allow(clippy::cast_possible_truncation)] // of small counts

use std::fs::{self, DirEntry};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::Context;
use std::thread;

use crate::common::{bytes, copy_threads, start, start_with, waker};
use twinbuf_cuda::{DeviceBatches, Error, Uploader, lent};
use twinbuf_cuda_sim::{Failure, Options};

const BYTES: usize = 1380;

/// Counts its drop.
struct Lender<T>(#[allow(dead_code)] T, Arc<AtomicUsize>);

impl<T> Drop for Lender<T> {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn lent_slots_are_filled_in_place_and_returned() {
    for overlap in [true, false] {
        let (sim, ctx) = start(1, false);
        let before = sim.live().leaked();
        let lent = Arc::new(AtomicUsize::new(3));
        // SAFETY: set before it is read.
        let host = (0..3).map(|_| unsafe { ctx.alloc_pinned::<u8>(BYTES + 1) }.unwrap()).map(|mut pinned| {
            let at = NonNull::new(pinned.as_mut_ptr().unwrap()).unwrap();
            // SAFETY: `alloc_pinned` allocated BYTES + 1 bytes.
            unsafe { at.write_bytes(0, BYTES + 1) };
            // SAFETY: the lender owns it.
            unsafe { lent::Host::new(at, BYTES + 1, Lender(pinned, lent.clone())) }
        });
        let build = Uploader::new(&ctx, BYTES).host_slots(host.collect());
        let built = sim.live();
        let (mut slots, mut batches): (_, DeviceBatches<u8>) = build.overlap(overlap).build().unwrap();
        assert_eq!(sim.live().host_bytes, built.host_bytes);
        let stream = ctx.new_stream().unwrap();
        let mut copy = stream.alloc_zeros::<u8>(BYTES).unwrap();
        for value in 1..20 {
            let mut slot = slots.acquire().unwrap();
            slot.fill(value);
            slot.commit(BYTES, value).unwrap();
            let batch = batches.recv().unwrap().unwrap();
            stream.memcpy_dtod(&batch.on::<u8>(&stream).unwrap(), &mut copy).unwrap();
        }
        assert_eq!(lent.load(Ordering::SeqCst), 3);
        drop((slots, batches));
        assert_eq!(lent.load(Ordering::SeqCst), 0, "returned once nothing uses them");
        assert_eq!(stream.clone_dtoh(&copy).unwrap(), [19; BYTES]);
        drop((copy, stream));
        sim.drain();
        assert_eq!(sim.live().leaked(), before);
    }
}

/// The copy thread itself still holds the next slot in turn: the guard of a copy that has ended in the meantime.
#[test]
fn a_slot_dropped_while_an_earlier_copy_runs_is_followed_by_the_next_batch() {
    for depth in 1..=8 {
        let (_sim, ctx) = start_with(Options { delay_us: 20, ..Options::seeded(depth as u64) }, true);
        let stream = ctx.new_stream().unwrap();
        let build = Uploader::new(&ctx, 1024).host_depth(depth).device_depth(depth);
        let (mut slots, mut batches) = build.build::<u8>().unwrap();
        let reader = std::thread::spawn(move || {
            for value in 1..=20 {
                let mut slot = slots.acquire()?.reserve();
                slot.fill(99);
                drop(slot);
                let mut slot = slots.acquire()?;
                slot.fill(value);
                slot.commit(1024, value)?;
            }
            slots.finish();
            Ok::<(), Error>(())
        });
        for value in 1..=20 {
            assert_eq!(batches.recv().unwrap_err(), Error::Cancelled);
            let batch = batches.recv().unwrap_or_else(|error| panic!("depth {depth}: {error}"));
            assert_eq!(bytes(&batch.unwrap(), &stream), [value; 1024], "depth {depth}");
        }
        assert!(batches.recv().unwrap().is_none());
        reader.join().unwrap().unwrap();
    }
}

/// Forgotten or in the hands of a thread that was left behind: nothing waits for it, and its memory stays.
#[test]
fn a_reserved_slot_that_does_not_come_holds_up_no_end() {
    for (overlap, forget) in [(true, false), (true, true), (false, false), (false, true)] {
        for (batches_first, finish) in [(true, false), (true, true), (false, false), (false, true)] {
            let (_sim, ctx) = start_with(Options { delay_us: 20, ..Options::default() }, true);
            let build = Uploader::new(&ctx, BYTES).overlap(overlap).host_depth(3);
            let (mut slots, batches) = build.build::<u8>().unwrap();
            slots.acquire().unwrap().commit(BYTES, 1).unwrap();
            let mut left = slots.acquire().unwrap().reserve();
            slots.acquire().unwrap().commit(BYTES, 2).unwrap();
            drop(slots.acquire().unwrap()); // the slot of the first batch, whose copy has ended
            let mut batches = Some(batches);
            if batches_first {
                drop(batches.take());
            }
            if finish {
                slots.finish();
            } else {
                drop(slots);
            }
            if let Some(mut batches) = batches {
                assert_eq!(*batches.recv().unwrap().unwrap().meta(), 1);
                if finish {
                    assert_eq!(batches.try_recv().unwrap_err(), Error::Empty);
                    if overlap {
                        until_the_copy_thread_sleeps();
                    }
                } else {
                    assert_eq!(batches.recv().unwrap_err(), Error::Abandoned);
                    assert_eq!(batches.recv().unwrap_err(), Error::Abandoned);
                }
            }
            assert_eq!(copy_threads(), 0);
            if forget {
                std::mem::forget(left);
            } else {
                left.fill(3); // its memory
                assert_eq!(left.commit(BYTES, 3).unwrap_err(), Error::Closed);
            }
        }
    }
}

/// Waits until the only copy thread has parked.
fn until_the_copy_thread_sleeps() {
    let sleeps = |task: DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat"));
        stat.is_ok_and(|stat| stat.contains("(twinbuf-copy) S "))
    };
    while !fs::read_dir("/proc/self/task").unwrap().flatten().any(sleeps) {
        thread::yield_now();
    }
}

#[test]
fn by_hand_the_drop_of_a_slot_lets_the_next_batch_be_copied_at_once() {
    let (sim, ctx) = start(1, false);
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).overlap(false).build::<u8>().unwrap();
    let copies = || sim.calls_of("cuMemcpyHtoDAsync_v2");
    let first = slots.acquire().unwrap().reserve();
    slots.acquire().unwrap().commit(BYTES, 2).unwrap();
    assert_eq!(copies(), 0, "it is behind the first");
    drop(first);
    assert!(sim.is_real() || copies() == 1, "before the next call");
    assert_eq!(batches.recv().unwrap_err(), Error::Cancelled);
    assert_eq!(*batches.recv().unwrap().unwrap().meta(), 2);
}

/// Its guard still has it when the copies end, because nobody receives or by an error.
#[test]
fn a_slot_that_is_reserved_is_not_handed_out_again() {
    for fails in [false, true] {
        let (sim, ctx) = start(1, true);
        if fails && sim.is_real() {
            return;
        }
        let (mut slots, batches) = Uploader::new(&ctx, BYTES).host_depth(2).build::<u8>().unwrap();
        let held = sim.hold(0);
        slots.acquire().unwrap().commit(BYTES, 1).unwrap();
        let mut reserved = slots.acquire().unwrap().reserve();
        // The thread that wakes the task waits until the task has looked.
        let (first, pause) = (AtomicBool::new(true), Arc::new(Barrier::new(2)));
        let paused = pause.clone();
        let waker = waker(move || {
            if first.swap(false, Ordering::Relaxed) {
                pause.wait();
                pause.wait();
            }
        });
        let pending = slots.poll_acquire(&mut Context::from_waker(&waker)).is_pending();
        assert!(pending || sim.is_real());
        if !pending {
            return;
        }
        let mut batches = Some(batches);
        if fails {
            sim.inject(Failure::api("cuEventQuery", 1, 719));
        } else {
            drop(batches.take());
        }
        paused.wait();
        let again = slots.try_acquire().map(drop);
        drop(held); // not before: the end of the copy would free the first slot
        paused.wait();
        reserved.fill(1);
        assert_eq!(again.unwrap_err() == Error::Closed, !fails, "two guards of one slot");
    }
}
