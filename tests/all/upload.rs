//! The upload stage on the software driver: the same batches as without a device, errors in order, nothing lost.

use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{
    Gated, LONG, RECORD, Reads, at, batches, files, in_order, is_dropped_by_a_waker, modes, open, plan,
    record, until,
};
use twinbuf::cuda::cudarc::driver::{CudaContext, CudaStream, result};
use twinbuf::loader::DeviceBatch;
use twinbuf::mmap::Buffer;
use twinbuf::transform::{Convert, per_record};
use twinbuf::{BatchIndices, Error, Loader, cuda};
use twinbuf_cuda_sim::{Failure, Live, Options, Sim};

const LAUNCH_FAILED: u32 = 719;

pub(super) fn start(seed: u64) -> (Sim, Arc<CudaContext>) {
    let sim = Sim::start(Options { delay_us: 5, ..Options::seeded(seed) });
    let ctx = cuda::context(0).unwrap();
    (sim, ctx)
}

/// The end of a test, after all else that had a share of the context: nothing was done wrong, and nothing is left.
pub(super) fn is_clean(sim: &Sim, ctx: Arc<CudaContext>) {
    assert_eq!(sim.violations(), [""; 0]);
    drop(ctx);
    sim.drain();
    assert_eq!(sim.live().leaked(), Live::default());
}

/// The batch's contents on the device.
fn bytes(batch: &DeviceBatch, stream: &Arc<CudaStream>) -> Vec<u8> {
    bytes_of(batch, 0..batch.on::<u8>(stream).unwrap().len(), stream)
}

fn bytes_of(batch: &DeviceBatch, range: Range<usize>, stream: &Arc<CudaStream>) -> Vec<u8> {
    let view = batch.on_range::<u8>(range, stream).unwrap();
    let mut bytes = vec![0; view.len()];
    stream.memcpy_dtoh(&view, &mut bytes).unwrap();
    stream.synchronize().unwrap();
    bytes
}

#[test]
fn without_overlap_the_caller_drives() {
    let (_dir, paths) = files(&[30]);
    let expected = batches(&mut Loader::builder(open(&paths), plan(30, 7)).build().unwrap(), 2);
    let (sim, ctx) = start(8);
    let stream = ctx.new_stream().unwrap();
    let builder = Loader::builder(open(&paths), plan(30, 7)).overlap(false).driven();
    let mut loader = builder.cuda(ctx.clone()).build().unwrap();
    let mut worker = loader.driven().remove(0);
    for polls in [false, true] {
        let mut epochs = loader.epoch(2);
        let mut found = Vec::new();
        loop {
            let next = match polls {
                true => epochs.poll_next(&mut Context::from_waker(Waker::noop())),
                false => epochs.try_next(),
            };
            match next {
                Poll::Ready(Some(batch)) => found.push(bytes(&batch.unwrap(), &stream)),
                Poll::Ready(None) => break,
                Poll::Pending => assert_eq!(worker.try_next(), Poll::Ready(false), "the slot is filled"),
            }
        }
        assert!(found == expected, "{polls}");
    }
    drop(worker);
    loader.close().unwrap();
    drop(stream);
    is_clean(&sim, ctx);
}

/// Nothing wakes the caller: neither a driver that has filled the slot, nor the drop of the lease in it.
#[test]
fn without_overlap_a_caller_waits_its_time_for_a_driver_and_for_a_slot() {
    const TIME: Duration = Duration::from_millis(20);
    let (_dir, paths) = files(&[30]);
    let (sim, ctx) = start(8);
    let builder = Loader::builder(open(&paths), plan(30, 7)).overlap(false).driven().held_timeout(TIME);
    let mut loader = builder.cuda(ctx.clone()).device_depth(1).build().unwrap();
    let mut worker = loader.driven().remove(0);
    let mut epoch = loader.epoch(2);
    let began = Instant::now();
    assert!(epoch.next_timeout(TIME).is_pending() && began.elapsed() >= TIME, "nobody fills the slot");
    let first = thread::scope(|scope| {
        scope.spawn(|| assert_eq!(worker.try_next(), Poll::Ready(false)));
        epoch.next_timeout(LONG)
    });
    let Poll::Ready(Some(Ok(first))) = first else { panic!("{first:?}") };
    let began = Instant::now();
    let error = epoch.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::SlotHeld { option: "device_depth", slots: 1, .. }), "{error}");
    assert!(began.elapsed() >= TIME, "another thread may drop it meanwhile");
    drop((first, epoch, worker));
    loader.close().unwrap();
    is_clean(&sim, ctx);
}

/// A driver that waits for a slot keeps the caller, which frees it, from nothing.
#[test]
fn without_overlap_a_driver_may_wait_on_another_thread() {
    let (_dir, paths) = files(&[30]);
    let expected = batches(&mut Loader::builder(open(&paths), plan(30, 7)).build().unwrap(), 2);
    let (sim, ctx) = start(8);
    let stream = ctx.new_stream().unwrap();
    let builder = Loader::builder(open(&paths), plan(30, 7)).overlap(false).driven();
    let mut loader = builder.cuda(ctx.clone()).device_depth(1).build().unwrap();
    let mut worker = loader.driven().remove(0);
    let driver = thread::spawn(move || while worker.next() {});
    let mut epoch = loader.epoch(2);
    let (mut found, mut held) = (Vec::new(), None);
    while found.len() < expected.len() {
        let waits = held.is_some() && epoch.next_timeout(Duration::from_millis(5)).is_pending();
        assert_eq!(waits, held.take().is_some(), "the one slot is held");
        let Poll::Ready(Some(Ok(batch))) = epoch.next_timeout(Duration::MAX) else { panic!("no batch") };
        found.push(bytes(&batch, &stream));
        held = Some(batch);
    }
    assert!(matches!(epoch.next_timeout(LONG), Poll::Ready(None)) && found == expected);
    drop((epoch, held));
    loader.close().unwrap();
    driver.join().unwrap();
    drop(stream);
    is_clean(&sim, ctx);
}

#[test]
fn the_fields_of_a_pair_lie_where_they_are_told() {
    let (_dir, paths) = files(&[30]);
    // Three bytes of each record, so the second field begins after a gap.
    let starts = || {
        per_record(3, |record, out, _| {
            out.copy_from_slice(&record[..3]);
            Ok(())
        })
    };
    let (sim, ctx) = start(3);
    let stream = ctx.new_stream().unwrap();
    let builder = Loader::builder((open(&paths), open(&paths)), plan(30, 7)).transform(starts());
    let mut loader = builder.cuda(ctx.clone()).build().unwrap();
    for batch in loader.epoch(2) {
        let batch = batch.unwrap();
        let records: Vec<u64> = batch.plan().runs().flatten().collect();
        let ranges = [0, 1].map(|field| batch.field_range(field).unwrap());
        assert_eq!((ranges[0].clone(), ranges[1].start % 64), (0..3 * records.len(), 0));
        assert_eq!(batch.field_range(2), None);
        let [short, long] = ranges.map(|range| bytes_of(&batch, range, &stream));
        assert_eq!(short, records.iter().flat_map(|&i| record(i)[..3].to_vec()).collect::<Vec<u8>>());
        assert_eq!(long, records.iter().flat_map(|&i| record(i)).collect::<Vec<u8>>());
    }
    loader.close().unwrap();
    assert_eq!(sim.violations(), [""; 0]);
}

/// The copies have a stream of their own or not, at the loader's word, and the host slots are the loader's or the caller's.
#[test]
fn the_same_batches_as_without_a_device() {
    let (_dir, paths) = files(&[40, 21]);
    let plan = plan(61, 7);
    let mut host = Loader::builder(open(&paths), plan.clone()).overlap(false).build().unwrap();
    let expected = batches(&mut host, 3);
    let ways = [(false, true, false), (true, true, true), (false, false, true), (true, false, false)];
    for (overlap, copy_stream, lent) in ways {
        let one = [(1, 2, 1), (1, 2, 2), (1, 3, 1), (1, 3, 2), (1, 4, 4)];
        let more = [(2, 3, 1), (2, 4, 2), (3, 6, 1), (3, 5, 9)];
        for (workers, host_depth, device_depth) in one.into_iter().chain(more) {
            let (sim, ctx) = start(host_depth as u64);
            let stream = if copy_stream { ctx.new_stream().unwrap() } else { ctx.default_stream() };
            let before = sim.live().streams;
            let builder = Loader::builder(open(&paths), plan.clone()).workers(workers).overlap(overlap);
            let slots = || (0..host_depth).map(|_| Buffer::new(7 * RECORD).unwrap()).collect();
            let builder = builder.depth(host_depth);
            let builder = if lent { builder.slots(slots()) } else { builder };
            let builder = builder.cuda(ctx.clone()).device_depth(device_depth).copy_stream(copy_stream);
            let mut loader = builder.build().unwrap();
            if !sim.is_real() {
                assert_eq!(sim.live().streams - before, u64::from(copy_stream), "overlap {overlap}");
            }
            for _ in 0..2 {
                for (step, batch) in loader.epoch(3).enumerate() {
                    let batch = batch.unwrap();
                    assert_eq!((batch.epoch(), batch.step()), (3, step as u64));
                    assert_eq!(Some(batch.plan()), plan.batch(3, step as u64).as_ref());
                    assert!(bytes(&batch, &stream) == expected[step], "step {step}, overlap {overlap}");
                }
            }
            // A copy thread checks its last copies when it gets to them: wait for them here.
            until(|| loader.report().transfer_bytes >= loader.report().bytes);
            let report = loader.report();
            assert_eq!((report.batches, report.loads), (18, 18));
            assert_eq!(report.bytes, 2 * 61 * RECORD as u64);
            assert!(report.transfer_bytes == report.bytes && !report.transfer.is_zero());
            loader.close().unwrap();
            drop(stream);
            is_clean(&sim, ctx);
        }
    }
}

#[test]
fn reads_past_the_page_cache_fill_page_locked_slots() {
    for record_bytes in [4096, RECORD, 64] {
        let (_dir, paths) = files(&[64, 32]);
        let data = Arc::new(twinbuf::Records::open(&paths, record_bytes).unwrap());
        let Some(&mode) = modes(&data).get(1) else { return };
        let plan = plan(data.len(), 7);
        let mut host = Loader::builder(data.clone(), plan.clone()).overlap(false).build().unwrap();
        let expected = batches(&mut host, 0);
        let (_sim, ctx) = start(1);
        let stream = ctx.new_stream().unwrap();
        let mut loader = Loader::builder(data, plan).read_mode(mode).depth(3).cuda(ctx).build().unwrap();
        let found: Vec<_> = loader.epoch(0).map(|batch| bytes(&batch.unwrap(), &stream)).collect();
        assert!(found == expected, "records of {record_bytes} bytes");
    }
}

/// Batches of 20 MiB, in records of 1 MiB.
const LARGE: usize = 1 << 20;
const LARGE_BATCH: u64 = 20;
const LARGE_STEPS: u64 = 3;

#[test]
fn large_batches_arrive_whole_and_a_failure_in_its_place() {
    for (host_depth, fails_at) in [(2, None), (3, None), (2, Some(33))] {
        let (sim, ctx) = start(1);
        let stream = ctx.new_stream().unwrap();
        let read = move |batch: &BatchIndices, out: &mut [u8]| {
            for (record, out) in batch.runs().flatten().zip(out.chunks_exact_mut(LARGE)) {
                if fails_at == Some(record) {
                    return Err(format!("no record {record}").into());
                }
                out.fill(record.to_le_bytes()[0]);
            }
            Ok(())
        };
        let data = Reads(LARGE_BATCH * LARGE_STEPS, LARGE, read);
        let plan = in_order(data.0, LARGE_BATCH);
        let mut loader = Loader::builder(data, plan).depth(host_depth).cuda(ctx).build().unwrap();
        let found: Vec<_> = loader.epoch(0).map(|batch| batch.map(|batch| bytes(&batch, &stream))).collect();
        for (step, batch) in (0..).zip(&found) {
            if fails_at.is_some_and(|record| record / LARGE_BATCH == step) {
                let error = format!("{:?}", batch.as_ref().unwrap_err());
                assert_eq!(error, "epoch 0, step 1: the batch could not be read: no record 33");
                continue;
            }
            let batch = batch.as_ref().unwrap();
            assert_eq!(batch.len() as u64, LARGE_BATCH * LARGE as u64);
            for (record, bytes) in (step * LARGE_BATCH..).zip(batch.chunks_exact(LARGE)) {
                assert!(bytes.iter().all(|&byte| byte == record.to_le_bytes()[0]), "record {record}");
            }
        }
        assert_eq!(found.len(), if fails_at.is_some() { 2 } else { 3 });
        if !sim.is_real() && fails_at.is_none() {
            assert_eq!(sim.calls_of("cuMemcpyHtoDAsync_v2"), LARGE_STEPS, "one copy a batch");
        }
        loader.close().unwrap();
    }
}

#[test]
fn a_transform_comes_before_and_a_resumption_as_always() {
    let (_dir, paths) = files(&[32]);
    let (_sim, ctx) = start(1);
    let stream = ctx.new_stream().unwrap();
    let build = || Loader::builder(open(&paths), plan(32, 4)).depth(3).transform(Convert::U16ToU32);
    let mut host = build().build().unwrap();
    let expected = batches(&mut host, 0);
    let mut first = build().cuda(ctx.clone()).build().unwrap();
    for batch in first.epoch(0).take(3) {
        batch.unwrap();
    }
    let mut second = build().cuda(ctx.clone()).build().unwrap();
    let rest = second.epochs_from(&first.checkpoint(), 1).unwrap();
    let rest: Vec<_> = rest.map(|batch| bytes(&batch.unwrap(), &stream)).collect();
    assert!(rest == expected[3..]);
}

/// Runs the life of a front with each call of the driver failing in turn. `life` counts how many of its `units` it
/// receives before its error.
pub(super) fn every_call_fails_in_turn(
    units: u64,
    life: impl Fn(&Arc<CudaContext>, &Arc<CudaStream>, bool, &mut u64) -> Result<(), Error>,
) {
    for overlap in [false, true] {
        let mut errors = 0;
        for k in 1.. {
            let (sim, ctx) = start(k);
            if sim.is_real() {
                return;
            }
            let stream = ctx.new_stream().unwrap();
            sim.inject(Failure::call(k, LAUNCH_FAILED));
            let mut received = 0;
            let result = life(&ctx, &stream, overlap, &mut received);
            match &result {
                Ok(()) => assert_eq!(received, units, "call {k}: a short epoch"),
                // Before the first unit, or reported by `close` after the last one.
                Err(Error::Device(_)) => assert!([0, units].contains(&received), "call {k}: {received}"),
                Err(Error::Upload { at: failed, source }) => {
                    assert_eq!(*failed, at(0, received), "call {k}");
                    let text = source.to_string();
                    assert!(text.contains("719") || text.contains("LAUNCH"), "{text}");
                }
                Err(error) => panic!("call {k}: {error}"),
            }
            errors += u64::from(result.is_err());
            let reached = !sim.injected().is_empty();
            let _ = sim.violations(); // of the streams whose call failed
            drop((stream, ctx));
            sim.drain();
            if !reached {
                assert!(k > 30 && errors > 20, "{errors} errors in {k} calls");
                break;
            }
        }
    }
}

#[test]
fn every_call_of_the_driver_that_fails_is_one_error_and_no_hang() {
    const STEPS: u64 = 5;
    let (_dir, paths) = files(&[STEPS * 4]);
    let plan = in_order(STEPS * 4, 4);
    every_call_fails_in_turn(STEPS, |ctx, stream, overlap, received| {
        let builder = Loader::builder(open(&paths), plan.clone()).depth(3).overlap(overlap);
        let mut loader = builder.cuda(ctx.clone()).build()?;
        for batch in loader.epoch(0) {
            let batch = batch?;
            assert_eq!(batch.step(), *received, "in order");
            *received += 1;
            // A failure here is the caller's call; no batch is lost by it.
            let _ = batch.on::<u8>(stream);
        }
        loader.close()
    });
}

#[test]
fn memory_is_what_the_depths_say_and_is_counted_in_the_limit() {
    let (_dir, paths) = files(&[64]);
    let (sim, ctx) = start(1);
    let slot = 8 * RECORD as u64;
    let build = |limit: u64| {
        let builder = Loader::builder(open(&paths), plan(64, 8)).depth(2).memory_limit(limit);
        builder.cuda(ctx.clone()).device_depth(3).build()
    };
    let error = build(5 * slot - 1).unwrap_err().to_string();
    let sum = "20480 bytes (2 host slots and 3 device slots of 8 records of 512 bytes)";
    assert!(error.contains(sum), "{error}");
    let mut loader = build(5 * slot).unwrap();
    for epoch in 0..50 {
        assert_eq!(loader.epoch(epoch).map(Result::unwrap).count(), 8);
        if !sim.is_real() {
            let live = sim.live();
            assert_eq!((live.host_bytes, live.device_bytes), (2 * slot, 3 * slot));
        }
    }
    let workers = Loader::builder(open(&paths), plan(64, 8)).workers(3).cuda(ctx.clone());
    let error = workers.memory_limit(7 * slot - 1).build().unwrap_err().to_string();
    assert!(error.contains("(5 host slots and 2 device slots of"), "{error}");
    for depth in [0, usize::MAX] {
        let builder = || Loader::builder(open(&paths), plan(64, 8)).cuda(ctx.clone()).device_depth(depth);
        for builder in [builder(), builder().memory_limit(u64::MAX)] {
            let error = builder.build().unwrap_err();
            let refused = matches!(error, Error::Option { option: "device_depth" | "depth", .. });
            assert!(refused, "{depth}: {error}");
        }
    }
}

#[test]
fn a_breakdown_has_the_copy_as_a_phase_of_its_step() {
    let (_dir, paths) = files(&[24]);
    let (_sim, ctx) = start(1);
    let lines = Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = lines.clone();
    let breakdown = twinbuf::Breakdown::every(0).sink(move |line| log.lock().unwrap().push(line.to_string()));
    let builder = Loader::builder(open(&paths), plan(24, 8)).breakdown(breakdown.clone());
    let mut loader = builder.cuda(ctx).build().unwrap();
    for batch in loader.epoch(0) {
        let _batch = batch.unwrap();
        breakdown.phase("forward", || {});
        breakdown.end_step();
    }
    let lines = lines.lock().unwrap();
    let steps: Vec<&String> = lines.iter().filter(|line| line.starts_with("step ")).collect();
    assert_eq!(steps.len(), 3, "{lines:?}");
    for line in steps {
        let at = |phase: &str| line.find(phase).unwrap_or_else(|| panic!("no {phase} in {line}"));
        assert!(at(" load ") < at(" h2d ") && at(" h2d ") < at(" forward "), "{line}");
        // The loader's phases follow one another, and the step has room for both.
        let ms =
            |phase: &str| line[at(phase) + phase.len()..].split(' ').next().unwrap().parse::<f64>().unwrap();
        assert!(ms(" load ") + ms(" h2d ") + ms(" other ") <= ms(" total ") + 0.002, "rounded: {line}");
    }
}

#[test]
fn a_waker_may_drop_the_loader_on_the_copy_thread() {
    let (sim, ctx) = start(1);
    let (open, gate) = mpsc::channel();
    let loader = Loader::builder(Gated(gate), in_order(8, 2)).cuda(ctx).build().unwrap();
    is_dropped_by_a_waker(loader, &open);
    until(|| open.send(()).is_err()); // the reading thread keeps the gate until it ends, after the copying thread
    // Nobody joins the copy thread; it drops the last driver handles when it ends.
    until(|| sim.live().leaked() == Live::default());
    assert_eq!(sim.violations(), [""; 0]);
}

/// The loader has the only share of its context. The drop of a context makes it current, and then destroys it.
#[test]
fn a_loader_that_owns_its_context_leaves_the_callers_context_current() {
    let (_dir, paths) = files(&[64]);
    let sim = Sim::start(Options { devices: 2, ..Options::default() });
    if sim.is_real() {
        return;
    }
    let other = cuda::context(1).unwrap();
    for round in 0..200 {
        let loader = Loader::builder(open(&paths), plan(64, 8)).overlap(round % 2 == 0);
        let mut loader = loader.cuda(cuda::context(0).unwrap()).build().unwrap();
        other.bind_to_thread().unwrap();
        if round % 4 < 2 {
            drop(loader.epoch(0).next().unwrap().unwrap());
        }
        drop(loader);
        assert_eq!(result::ctx::get_current(), Ok(Some(other.cu_ctx())), "round {round}");
    }
}
