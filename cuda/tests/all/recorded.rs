//! Errors that cudarc records in the context, for its next call to return. That call then does nothing: a wait that is
//! skipped in this way must not free or refill memory that is in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{BYTES, start_software_with, upload, uploader};
use cudarc::driver::{CudaContext, DevicePtr, DriverError, result, sys};
use twinbuf_cuda::Stager;
use twinbuf_cuda_sim::{Options, Sim};

fn record(ctx: &CudaContext) {
    ctx.record_err(Err::<(), _>(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)));
}

/// A kernel reads the view on a stream that is not the view's, and an error is recorded before cudarc's guard goes.
#[test]
fn a_read_on_another_stream_ends_before_the_slot_is_refilled() {
    for (seed, overlap, known) in (0..20).map(|seed| (seed, seed % 2 == 0, seed % 4 < 2)) {
        let options = Options { delay_us: 20, ..Options::seeded(seed) };
        let Some((sim, ctx)) = start_software_with(options) else { return };
        let (own, other) = (ctx.new_stream().unwrap(), ctx.new_stream().unwrap());
        let (mut slots, mut batches) = uploader(&ctx, overlap);
        for value in 0..8 {
            let batch = upload(&mut slots, &mut batches, value);
            let view = batch.on::<u8>(&own).unwrap();
            if known {
                batch.on::<u8>(&other).unwrap();
            }
            let (address, guard) = view.device_ptr(&other);
            assert_eq!(address != 0, known);
            if address != 0 {
                sim.kernel_read(other.cu_stream(), address, BYTES, 2000).unwrap();
            }
            record(&ctx);
            drop(guard);
        }
        drop((slots, batches));
        let _ = ctx.check_err();
        assert_eq!(sim.violations(), [""; 0], "seed {seed}");
    }
}

/// Everything at random, with errors recorded on this thread and on another, and an end while kernels and copies run.
#[test]
fn errors_recorded_at_any_time_free_nothing_that_is_in_use() {
    for seed in 0..100 {
        let pools = seed % 3 != 0;
        let options = Options { delay_us: 20, pools, ..Options::seeded(seed) };
        let Some((sim, ctx)) = start_software_with(options) else { return };
        life(&sim, &ctx, seed);
        assert_eq!(sim.violations(), [""; 0], "seed {seed}");
    }
}

fn life(sim: &Sim, ctx: &Arc<CudaContext>, seed: u64) {
    if seed.is_multiple_of(2) {
        // SAFETY: nothing here relies on it.
        unsafe { ctx.disable_event_tracking() };
    }
    let streams = [ctx.new_stream().unwrap(), ctx.new_stream().unwrap(), ctx.default_stream()];
    let mut memory = streams[0].alloc_zeros::<u8>(BYTES).unwrap();
    let before = sim.live().leaked();
    let mut stager = Stager::new(ctx).slot_bytes(256).fill_threads(2).build().unwrap();
    let (mut slots, mut batches) = uploader(ctx, seed % 4 < 2);
    let (mut leases, mut owned, mut sent, mut lost) = (Vec::new(), Vec::new(), 0, false);
    let mut dice = twinbuf_testing::Random(seed);
    let mut random = move |below: usize| usize::try_from(dice.below(below as u64)).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, recorded) = (stop.clone(), ctx.clone());
    let noise = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            record(&recorded);
            std::thread::yield_now();
        }
    });
    for _call in 0..60 {
        if random(2) == 0 {
            record(ctx);
        }
        let on = &streams[random(3)];
        match random(5) {
            // Slots come in turn: an older lease would hold the next one.
            0 | 1 if leases.iter().all(|&(_, value)| value + 1 == sent) => {
                let lease = upload(&mut slots, &mut batches, sent);
                let address = lease.on::<u8>(on).unwrap().address();
                sim.kernel_read(on.cu_stream(), address, BYTES, 300).unwrap();
                assert_eq!(lease.seq(), u64::from(sent));
                leases.push((lease, sent));
                sent += 1;
            }
            2 if !leases.is_empty() => drop(leases.swap_remove(random(leases.len()))),
            3 if !leases.is_empty() => {
                let (lease, _) = leases.swap_remove(random(leases.len()));
                // An error that was recorded is that of cudarc's allocation or copy. With event tracking on, cudarc's
                // allocation loses its memory if the error is recorded between it and its events.
                let copy = lease.into_owned::<u8>(on);
                lost |= copy.is_err() && ctx.is_event_tracking();
                owned.extend(copy);
            }
            4 => {
                let work = stager.scope(&streams[0], |to| to.upload(&[7; BYTES], memory.as_view_mut()));
                assert!(!matches!(work, Err(twinbuf_cuda::Error::Closed)), "{work:?}");
            }
            _ => {}
        }
    }
    for (lease, value) in &leases {
        let view = lease.on::<u8>(&streams[1]).unwrap();
        let mut found = [0xff; BYTES];
        // An error that was recorded is returned, and nothing is read.
        let copied = streams[1].memcpy_dtoh(&view, &mut found).is_ok();
        // SAFETY: the stream exists.
        unsafe { result::stream::synchronize(streams[1].cu_stream()) }.unwrap();
        assert!(!copied || found == [*value; BYTES], "seed {seed}");
    }
    match random(4) {
        0 => drop((stager, slots, batches, leases)),
        1 => drop((leases, batches, slots, stager)),
        2 => drop((batches, leases, stager, slots)),
        _ => drop((slots, leases, batches, stager)),
    }
    stop.store(true, Ordering::Relaxed);
    noise.join().unwrap();
    // What follows is the caller's memory, and cudarc frees it without a wait if an error is recorded.
    let _ = ctx.check_err();
    for stream in &streams {
        // SAFETY: the stream exists.
        unsafe { result::stream::synchronize(stream.cu_stream()) }.unwrap();
    }
    drop(owned);
    sim.drain();
    let mut after = sim.live().leaked();
    if lost {
        (after.device_allocations, after.device_bytes) = (before.device_allocations, before.device_bytes);
    }
    assert_eq!(after, before, "seed {seed}");
    drop(memory);
}
