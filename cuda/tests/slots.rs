//! Slots in chunks, and slots in memory of the caller.
#![cfg(target_os = "linux")]
#![allow(clippy::cast_possible_truncation)] // of small counts

mod common;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Wake};
use std::time::{Duration, Instant};

use common::{copy_threads, must_end, start};
use cudarc::driver::CudaStream;
use twinbuf_cuda::{DeviceBatches, Error, Lease, Uploader, lent};
use twinbuf_cuda_sim::{Control, Failure, Options, Sim};

const CHUNK: usize = 256;
const BYTES: usize = 5 * CHUNK + 100;
/// Something that does not happen within this time, a thousand times its normal duration, does not happen.
const MANY_TIMES: Duration = Duration::from_secs(60);

fn bytes<M>(batch: &Lease<M>, stream: &Arc<CudaStream>) -> Vec<u8> {
    stream.clone_dtoh(&batch.on::<u8>(stream).unwrap()).unwrap()
}

fn wait_for_copies(sim: Control, count: u64) {
    let looked = Instant::now();
    while sim.calls_of("cuMemcpyHtoDAsync_v2") < count {
        assert!(looked.elapsed() < MANY_TIMES, "{} copies", sim.calls_of("cuMemcpyHtoDAsync_v2"));
        std::thread::yield_now();
    }
}

#[test]
fn a_copy_starts_while_the_rest_of_its_slot_is_filled() {
    must_end(|| {
        for (overlap, depth) in [(true, 1), (true, 3), (false, 1), (false, 3)] {
            let (sim, ctx) = start(1, true);
            let stream = ctx.new_stream().unwrap();
            let build = Uploader::new(&ctx, BYTES).chunk_bytes(CHUNK).overlap(overlap);
            let (mut slots, mut batches) = build.host_depth(depth).device_depth(depth).build::<u8>().unwrap();
            let mut copies = 0;
            for value in 1..20 {
                let mut slot = slots.acquire().unwrap().reserve();
                slot[..2 * CHUNK + 1].fill(value);
                slot.flush(2 * CHUNK + 1).unwrap();
                assert_eq!((slot.flushed(), slot.len()), (2 * CHUNK, BYTES - 2 * CHUNK));
                copies += 1;
                if !sim.is_real() {
                    wait_for_copies(sim.control(), copies); // two chunks in one copy; the slot is not committed
                }
                assert_eq!(slot[0], value, "what comes after the chunks");
                let rest = slot.len();
                slot.fill(value + 100);
                slot.flush(BYTES).unwrap(); // all but the last chunk
                assert_eq!((slot.flushed(), slot.len()), (5 * CHUNK, rest - 3 * CHUNK));
                copies += 1;
                if !sim.is_real() {
                    wait_for_copies(sim.control(), copies); // what comes before the copy thread looks is one copy
                }
                slot.commit(BYTES, value).unwrap();
                copies += 1;
                let batch = batches.recv().unwrap().unwrap();
                let mut wanted = vec![value; 2 * CHUNK];
                wanted.resize(BYTES, value + 100);
                assert_eq!(bytes(&batch, &stream), wanted, "overlap {overlap}");
                if !sim.is_real() {
                    assert_eq!(sim.calls_of("cuMemcpyHtoDAsync_v2"), copies);
                }
            }
            // Shorter than the flushed part: the batch has that length.
            let mut slot = slots.acquire().unwrap().reserve();
            slot.flush(BYTES).unwrap();
            slot.commit(0, 7).unwrap();
            let batch = batches.recv().unwrap().unwrap();
            assert_eq!((batch.len(), *batch.meta()), (0, 7));
            drop(batch);
            slots.finish();
            assert!(batches.recv().unwrap().is_none());
        }
    });
}

#[test]
fn without_a_flush_chunks_cost_no_call() {
    must_end(|| {
        let (sim, ctx) = start(1, false);
        let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).chunk_bytes(CHUNK).build::<u8>().unwrap();
        for value in 0..10 {
            slots.acquire().unwrap().commit(BYTES - usize::from(value), value).unwrap();
            assert_eq!(batches.recv().unwrap().unwrap().len(), BYTES - usize::from(value));
        }
        if !sim.is_real() {
            assert_eq!(sim.calls_of("cuMemcpyHtoDAsync_v2"), 10);
        }
    });
}

#[test]
fn a_slot_dropped_half_way_is_no_batch() {
    must_end(|| {
        for overlap in [true, false] {
            let (_sim, ctx) = start(1, false);
            let stream = ctx.new_stream().unwrap();
            let build = Uploader::new(&ctx, BYTES).chunk_bytes(CHUNK).overlap(overlap);
            let (mut slots, mut batches) = build.build::<u8>().unwrap();
            for value in 1..20 {
                drop(slots.acquire().unwrap()); // leaves no trace
                let mut slot = slots.acquire().unwrap().reserve();
                if value % 2 == 0 {
                    slot[..CHUNK].fill(99);
                    slot.flush(CHUNK).unwrap();
                }
                drop(slot);
                let mut slot = slots.acquire().unwrap().reserve();
                slot.fill(value);
                slot.flush(3 * CHUNK).unwrap();
                slot.commit(BYTES, value).unwrap();
                assert_eq!(batches.recv().unwrap_err(), Error::Cancelled);
                let batch = batches.recv().unwrap().unwrap();
                assert_eq!((batch.seq(), *batch.meta()), (2 * u64::from(value) - 1, value));
                assert_eq!(bytes(&batch, &stream), [value; BYTES]);
            }
        }
    });
}

#[test]
fn a_reader_that_is_gone_half_way_has_abandoned_its_batch() {
    must_end(|| {
        for overlap in [true, false] {
            let (_sim, ctx) = start(1, false);
            let build = Uploader::new(&ctx, BYTES).chunk_bytes(CHUNK).overlap(overlap);
            let (mut slots, mut batches) = build.build::<u8>().unwrap();
            slots.acquire().unwrap().commit(1, 1).unwrap();
            let mut slot = slots.acquire().unwrap().reserve();
            slot.flush(2 * CHUNK).unwrap();
            drop(slot);
            drop(slots);
            assert_eq!(*batches.recv().unwrap().unwrap().meta(), 1);
            assert_eq!(batches.recv().unwrap_err(), Error::Cancelled);
            assert_eq!(batches.recv().unwrap_err(), Error::Abandoned);
        }
    });
}

/// Counts its drop.
struct Lender<T>(#[allow(dead_code)] T, Arc<AtomicUsize>);

impl<T> Drop for Lender<T> {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn lent_slots_are_filled_in_place_and_returned() {
    must_end(|| {
        for overlap in [true, false] {
            let (sim, ctx) = start(1, false);
            let before = sim.live().leaked();
            let stream = ctx.new_stream().unwrap();
            let lent = Arc::new(AtomicUsize::new(3));
            // SAFETY: set before it is read.
            let host =
                (0..3).map(|_| unsafe { ctx.alloc_pinned::<u8>(BYTES + 1) }.unwrap()).map(|mut pinned| {
                    let at = NonNull::new(pinned.as_mut_ptr().unwrap()).unwrap();
                    // SAFETY: as many bytes.
                    unsafe { at.write_bytes(0, BYTES + 1) };
                    // SAFETY: the lender owns it.
                    unsafe { lent::Host::new(at, BYTES + 1, Lender(pinned, lent.clone())) }
                });
            let build = Uploader::new(&ctx, BYTES).host_slots(host.collect());
            let built = sim.live();
            let (mut slots, mut batches): (_, DeviceBatches<u8>) = build.overlap(overlap).build().unwrap();
            assert_eq!(sim.live().host_bytes, built.host_bytes);
            let mut copies = Vec::new();
            let reading = ctx.new_stream().unwrap();
            for value in 1..20 {
                let mut slot = slots.acquire().unwrap();
                slot.fill(value);
                slot.commit(BYTES, value).unwrap();
                let batch = batches.recv().unwrap().unwrap();
                let view = batch.on::<u8>(&reading).unwrap();
                let mut copy = reading.alloc_zeros::<u8>(BYTES).unwrap();
                reading.memcpy_dtod(&view, &mut copy).unwrap();
                copies.push((value, copy));
            }
            let last = copies.len() - 1;
            assert_eq!(lent.load(Ordering::SeqCst), 3);
            drop((slots, batches));
            assert_eq!(lent.load(Ordering::SeqCst), 0, "returned once nothing uses them");
            assert_eq!(reading.clone_dtoh(&copies[last].1).unwrap(), [copies[last].0; BYTES]);
            drop((copies, stream, reading));
            sim.drain();
            assert_eq!(sim.live().leaked(), before);
        }
    });
}

#[test]
fn arguments_that_cannot_work_are_refused_by_name() {
    let (_sim, ctx) = start(1, false);
    let option = |uploader: Uploader| match uploader.build::<()>() {
        Err(Error::Option { option, wanted, found }) => format!("{option}: {wanted}, {found}"),
        other => panic!("{other:?}"),
    };
    assert_eq!(option(Uploader::new(&ctx, 1).chunk_bytes(0)), "chunk_bytes: at least 1 byte, 0");
    assert_eq!(option(Uploader::new(&ctx, 0).chunk_bytes(1)), "slot_bytes: at least 1 byte, 0");
    assert_eq!(option(Uploader::new(&ctx, 1).host_slots(Vec::new())), "host_depth: at least 1 slot, 0");
    // The lent slots are used in turn: a larger depth would refill one under its copy.
    for depth in [1, 3, 8] {
        let two = || {
            let slot = |_| {
                let memory = Box::leak(Box::new([0; 8]));
                // SAFETY: never freed, and used by this slot alone.
                unsafe { lent::Host::new(NonNull::from(memory).cast(), 8, ()) }
            };
            Uploader::new(&ctx, 8).host_slots((0..2).map(slot).collect())
        };
        let wanted = format!("host_depth: 2, the number of lent slots, {depth}");
        assert_eq!(option(two().host_depth(depth)), wanted);
        assert!(two().host_depth(2).build::<()>().is_ok());
    }
    let mut memory = [0; 7];
    // SAFETY: refused before it is used.
    let short = unsafe { lent::Host::new(NonNull::from(&mut memory).cast(), 7, ()) };
    let short = Uploader::new(&ctx, 8).host_slots(vec![short]);
    assert_eq!(option(short), "host_slots: at least 8 bytes, 7");

    let chunks = Uploader::new(&ctx, 1 << 20).chunk_bytes(1).build::<()>().unwrap();
    drop(chunks);
    let (mut slots, mut batches) = Uploader::new(&ctx, 8).build::<()>().unwrap();
    let refused = |result: Result<(), Error>| result.unwrap_err().to_string();
    assert_eq!(
        refused(slots.acquire().unwrap().commit(9, ())),
        "option `len`: wanted at most the slot's 8 bytes, found 9"
    );
    let mut slot = slots.acquire().unwrap().reserve();
    assert_eq!(slot.seq(), 0, "the same slot again");
    assert_eq!(refused(slot.flush(9)), "option `filled`: wanted at most the slot's 8 bytes, found 9");
    assert_eq!(refused(slot.commit(9, ())), "option `len`: wanted at most the slot's 8 bytes, found 9");
    slots.acquire().unwrap().commit(8, ()).unwrap();
    assert_eq!(batches.recv().unwrap_err(), Error::Cancelled);
    assert_eq!(batches.recv().unwrap().unwrap().len(), 8);
}

/// The copy thread itself still holds the next slot in turn: the guard of a copy that has ended in the meantime.
#[test]
fn a_slot_dropped_half_way_while_an_earlier_copy_runs_is_followed_by_the_next_batch() {
    must_end(|| {
        for (depth, chunk) in (1..=8).flat_map(|depth| [(depth, 256), (depth, 1024)]) {
            let sim = Sim::start(Options { delay_us: 20, ..Options::seeded(depth as u64) });
            let ctx = twinbuf_cuda::context(0).unwrap();
            let stream = ctx.new_stream().unwrap();
            let build = Uploader::new(&ctx, 1024).chunk_bytes(chunk).host_depth(depth).device_depth(depth);
            let (mut slots, mut batches) = build.build::<u8>().unwrap();
            let reader = std::thread::spawn(move || {
                for value in 1..=20 {
                    let mut slot = slots.acquire()?.reserve();
                    slot.fill(99);
                    slot.flush(256 * usize::from(value % 4))?;
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
                let batch = batches
                    .recv()
                    .unwrap_or_else(|error| panic!("depth {depth}, chunks of {chunk}: {error}"));
                assert_eq!(
                    bytes(&batch.unwrap(), &stream),
                    [value; 1024],
                    "depth {depth}, chunks of {chunk}"
                );
            }
            assert!(batches.recv().unwrap().is_none());
            reader.join().unwrap().unwrap();
            assert_eq!(sim.violations(), [""; 0]);
        }
    });
}

/// Forgotten or in the hands of a thread that was left behind: nothing waits for it, and its memory stays.
#[test]
fn a_reserved_slot_that_does_not_come_holds_up_no_end() {
    must_end(|| {
        for (overlap, flushed, forget) in [true, false]
            .into_iter()
            .flat_map(|o| [(o, 0, false), (o, CHUNK, false), (o, 0, true), (o, CHUNK, true)])
        {
            for (batches_first, finish) in [(true, false), (true, true), (false, false), (false, true)] {
                let sim = Sim::start(Options { delay_us: 20, ..Options::default() });
                let ctx = twinbuf_cuda::context(0).unwrap();
                let build = Uploader::new(&ctx, BYTES).chunk_bytes(CHUNK).overlap(overlap).host_depth(3);
                let (mut slots, batches) = build.build::<u8>().unwrap();
                slots.acquire().unwrap().commit(BYTES, 1).unwrap();
                let mut left = slots.acquire().unwrap().reserve();
                left.flush(flushed).unwrap();
                slots.acquire().unwrap().commit(BYTES, 2).unwrap();
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
                assert_eq!(sim.violations(), [""; 0]);
            }
        }
    });
}

#[test]
fn a_slot_that_is_dropped_without_a_reservation_is_handed_out_again() {
    let (_sim, ctx) = start(1, false);
    for overlap in [true, false] {
        let (mut slots, mut batches) =
            Uploader::new(&ctx, 8).overlap(overlap).host_depth(1).build::<()>().unwrap();
        for seq in 0..5 {
            drop(slots.acquire().unwrap());
            slots.acquire().unwrap().commit(8, ()).unwrap();
            assert_eq!(batches.recv().unwrap().unwrap().seq(), seq);
        }
    }
}

/// The memory belongs to the test, so it can break the slot's rules.
#[test]
fn what_was_flushed_is_not_copied_again() {
    must_end(|| {
        for overlap in [true, false] {
            let (sim, ctx) = start(1, false);
            let stream = ctx.new_stream().unwrap();
            let memory = Box::leak(vec![0_u8; BYTES].into_boxed_slice());
            let at = NonNull::from(&mut *memory).cast::<u8>();
            // SAFETY: leaked, and written below only while no copy reads it.
            let host = unsafe { lent::Host::new(at, BYTES, ()) };
            let build = Uploader::new(&ctx, BYTES).chunk_bytes(CHUNK).overlap(overlap);
            let (mut slots, mut batches) = build.host_slots(vec![host]).build::<u8>().unwrap();
            let mut slot = slots.acquire().unwrap().reserve();
            slot.fill(1);
            slot.flush(2 * CHUNK).unwrap();
            if sim.is_real() {
                return;
            }
            wait_for_copies(sim.control(), 1);
            sim.drain();
            // SAFETY: the copy is done, and the slot no longer reaches these bytes.
            unsafe { at.write_bytes(9, 2 * CHUNK) };
            slot.commit(BYTES, 1).unwrap();
            assert_eq!(bytes(&batches.recv().unwrap().unwrap(), &stream), [1; BYTES]);
        }
    });
}

#[test]
fn the_time_of_a_copy_in_chunks_begins_with_the_first() {
    must_end(|| {
        for overlap in [true, false] {
            let (sim, ctx) = start(1, false);
            if sim.is_real() {
                return;
            }
            let build = Uploader::new(&ctx, BYTES).chunk_bytes(CHUNK).overlap(overlap).times(true);
            let (mut slots, mut batches) = build.build::<u8>().unwrap();
            let mut slot = slots.acquire().unwrap().reserve();
            slot.flush(CHUNK).unwrap();
            wait_for_copies(sim.control(), 1);
            sim.drain();
            // Not compared with the host's clock: that is read before the device's, and a busy machine makes it earlier.
            let (drained, pause) = (Instant::now(), Duration::from_millis(20));
            while drained.elapsed() < pause {
                std::thread::yield_now();
            }
            slot.commit(BYTES, 1).unwrap();
            let time = batches.recv().unwrap().unwrap().wait_copied().unwrap().unwrap();
            assert!(time.start < drained && time.took >= pause, "overlap {overlap}: {time:?}");
        }
    });
}

/// Holds the thread that wakes a task until the task has looked.
struct Look {
    first: AtomicBool,
    woken: Barrier,
    looked: Barrier,
}

impl Wake for Look {
    fn wake(self: Arc<Self>) {
        if self.first.swap(false, Ordering::Relaxed) {
            self.woken.wait();
            self.looked.wait();
        }
    }
}

/// Its guard still has the rest when the copies end, because nobody receives or by an error.
#[test]
fn a_slot_that_is_half_handed_over_is_not_handed_out_again() {
    must_end(|| {
        for fails in [false, true] {
            let (sim, ctx) = start(1, true);
            if fails && sim.is_real() {
                return;
            }
            let build = Uploader::new(&ctx, BYTES).chunk_bytes(CHUNK).host_depth(1);
            let (mut slots, batches) = build.build::<u8>().unwrap();
            let mut half = slots.acquire().unwrap().reserve();
            half.flush(CHUNK).unwrap();
            if !sim.is_real() {
                wait_for_copies(sim.control(), 1);
            }
            let (woken, looked) = (Barrier::new(2), Barrier::new(2));
            let look = Arc::new(Look { first: AtomicBool::new(true), woken, looked });
            let waker = look.clone().into();
            assert!(slots.poll_acquire(&mut Context::from_waker(&waker)).is_pending());
            let mut batches = Some(batches);
            if fails {
                sim.inject(Failure::api("cuMemcpyHtoDAsync_v2", 1, 719));
                half.flush(2 * CHUNK).unwrap();
            } else {
                drop(batches.take());
            }
            look.woken.wait();
            let again = slots.try_acquire().map(drop);
            look.looked.wait();
            half.fill(1);
            assert_eq!(again.unwrap_err() == Error::Closed, !fails, "two guards of one slot");
        }
    });
}
