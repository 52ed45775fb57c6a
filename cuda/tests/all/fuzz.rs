//! Random calls of the public API in random order, on the software driver, compared with one model: the result of each
//! call and the bytes that each use finds. No access is unordered, and nothing is lost or leaked.
//!
//! Another model has the scopes of a stager.
//!
//! `TWINBUF_FUZZ_CASES=3000 cargo test --release -p twinbuf-cuda --test all fuzz::` for a long run.
#![allow(clippy::cast_possible_truncation)] // of small counts

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::ptr::null_mut;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::common::{LAUNCH_FAILED, MODES, copy_threads, from, lent_slots, start_with, threads};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, result, sys};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use twinbuf_cuda::{DeviceBatches, Error, HostSlots, Lease, ReservedSlot, Stager, Uploader};
use twinbuf_cuda_sim::{Control, Failure, Kernel, Options, checksum_of};

const BYTES: usize = 448;
/// A deadline that is not reached, and one that is.
const LATER: Duration = Duration::from_secs(600);
const SOON: Duration = Duration::from_micros(100);

#[derive(Clone, Copy, Debug, Default)]
struct Setup {
    seed: u64,
    host_depth: usize,
    device_depth: usize,
    overlap: bool,
    lent: bool,
    times: bool,
    pools: bool,
    delay_us: u32,
}

prop_compose! {
    fn setup()(
        (seed, host_depth, device_depth) in (any::<u64>(), 1..=8_usize, 1..=8_usize),
        [overlap, lent, times, pools] in any::<[bool; 4]>(),
        delay_us in prop::sample::select(vec![0, 20]),
    ) -> Setup {
        Setup { seed, host_depth, device_depth, overlap, lent, times, pools, delay_us }
    }
}

/// What the test does with a slot that it acquired.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    Commit,
    /// It stays reserved.
    Keep,
    Drop,
    Forget,
    /// It is dropped without a reservation: the next acquire returns the same slot.
    DropFree,
}

/// One call. Leases are chosen by a number modulo their count.
#[derive(Clone, Debug)]
enum Call {
    Fill(usize, Then),
    /// Ends a reserved slot that was kept: with a commit of so many bytes, or without one.
    Close(usize, Option<usize>),
    Receive(u8),
    /// Use a batch on one of the streams, by its address or by a view.
    Use(usize, usize, bool),
    Own(usize, usize),
    Ask(usize),
    Release(usize),
    Leak(usize),
    Begin(usize, u8),
    End(usize),
    /// Make no context current.
    Leave,
    /// Make the n-th driver call from now on fail.
    Fail(u64),
}

fn call() -> impl Strategy<Value = Call> {
    let then = prop_oneof![
        16 => Just(Then::Commit),
        10 => Just(Then::Keep),
        2 => Just(Then::Drop),
        1 => Just(Then::Forget),
        3 => Just(Then::DropFree),
    ];
    let len = prop_oneof![4 => (0..=BYTES).prop_map(Some), 1 => Just(None)];
    prop_oneof![
        12 => (0..=BYTES, then).prop_map(|(len, then)| Call::Fill(len, then)),
        6 => (0..8_usize, len).prop_map(|(slot, len)| Call::Close(slot, len)),
        12 => (0..4_u8).prop_map(Call::Receive),
        10 => (0..8_usize, 0..3_usize, prop::bool::weighted(0.2))
            .prop_map(|(lease, stream, raw)| Call::Use(lease, stream, raw)),
        2 => (0..8_usize, 0..3_usize).prop_map(|(lease, stream)| Call::Own(lease, stream)),
        2 => (0..8_usize).prop_map(Call::Ask),
        10 => (0..8_usize).prop_map(Call::Release),
        1 => (0..8_usize).prop_map(Call::Leak),
        2 => (0..2_usize, 0..3_u8).prop_map(|(stream, mode)| Call::Begin(stream, mode)),
        3 => (0..2_usize).prop_map(Call::End),
        1 => Just(Call::Leave),
        1 => (1..40_u64).prop_map(Call::Fail),
    ]
}

/// How a run ends.
#[derive(Clone, Copy, Debug)]
enum Ending {
    Finish,
    DropSlots,
    DropBatches,
}

/// A batch, by its number.
#[derive(Clone)]
struct Batch {
    bytes: Vec<u8>,
    /// Streams whose use must be recorded when the lease is dropped.
    uses: BTreeSet<usize>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// Its slot is reserved.
    Open,
    Committed,
    /// Its slot was dropped without a commit, which was not received yet.
    Cancelled,
    Leased,
    /// The lease was dropped while a stream was captured.
    Captured,
    Released,
}

/// The model: the state of every batch and slot.
#[derive(Default)]
struct Model {
    setup: Setup,
    batches: Vec<Batch>,
    received: usize,
    /// Whether each stream is being captured: two non-blocking streams, and the default stream (while a blocking stream
    /// is).
    captured: [bool; 3],
    failing: bool,
    /// An injected error has ended the uploader.
    ended: bool,
    leaked: bool,
}

impl Model {
    /// Whether the device slot of a batch is free for it.
    fn is_free(&self, seq: usize) -> bool {
        let before = seq.checked_sub(self.setup.device_depth);
        before
            .is_none_or(|before| self.batches.get(before).is_some_and(|batch| batch.state == State::Released))
    }

    /// The number of batches that are copied, or passed on as cancelled, without another call.
    fn copied(&self) -> usize {
        let waits = |(seq, batch): &(usize, &Batch)| match batch.state {
            State::Open => true,
            State::Committed | State::Cancelled => !self.is_free(*seq),
            State::Leased | State::Captured | State::Released => false,
        };
        self.batches.iter().enumerate().find(waits).map_or(self.batches.len(), |(seq, _)| seq)
    }

    /// Whether a host slot becomes free without another call.
    fn can_acquire(&self) -> bool {
        let copied = self.copied();
        // A slot that was dropped is free before its turn on the device.
        let dropped = self.batches.get(copied).is_some_and(|batch| batch.state == State::Cancelled);
        copied + usize::from(dropped) + self.setup.host_depth > self.batches.len()
    }

    /// Records a call that releases the slots held by captures.
    fn release_captured(&mut self) {
        let captured = self.captured;
        for batch in self.batches.iter_mut().filter(|batch| batch.state == State::Captured) {
            if !batch.uses.iter().any(|stream| captured[*stream]) {
                batch.state = State::Released;
            }
        }
    }

    /// Checks a call that should succeed. `None`: it returned an injected error.
    fn expect<T>(&mut self, result: Result<T, Error>, ends: bool) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(Error::Driver { code: LAUNCH_FAILED, .. }) if self.failing => {
                self.ended |= ends;
                None
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Makes the context current, also if the first calls meet injected errors.
fn bind(ctx: &CudaContext) {
    // SAFETY: the context exists.
    let once = || unsafe { result::ctx::set_current(ctx.cu_ctx()) };
    (0..9).find_map(|_| once().ok()).expect("more calls than injected errors");
}

/// Ends a capture that must still be valid, if the stream is captured.
fn end_capture(ctx: &CudaContext, stream: sys::CUstream, captured: &mut bool) {
    while *captured {
        bind(ctx);
        // SAFETY: the stream exists.
        match unsafe { result::stream::end_capture(stream) } {
            Ok(_) => *captured = false,
            // An injected error; the capture continues.
            Err(error) => assert_eq!(error.0 as u32, LAUNCH_FAILED, "a broken capture"),
        }
    }
}

/// Takes one out of these, chosen by a number modulo their count.
fn take<T>(all: &mut Vec<T>, number: usize) -> Option<T> {
    Some(all.swap_remove(number.checked_rem(all.len())?))
}

struct World {
    model: Model,
    sim: Control,
    ctx: Arc<CudaContext>,
    streams: [Arc<CudaStream>; 3],
    /// A blocking stream.
    blocking: sys::CUstream,
    slots: Option<HostSlots<u64>>,
    /// Reserved slots, each with the bytes that were written to it.
    open: Vec<(ReservedSlot<u64>, Vec<u8>)>,
    batches: Option<DeviceBatches<u64>>,
    leases: Vec<Lease<u64>>,
    /// Kept, because cudarc frees them.
    owned: Vec<CudaSlice<u8>>,
    /// The launched kernels, and the digest of what each must find.
    kernels: Vec<(Kernel, u64)>,
}

impl World {
    fn fill(&mut self, len: usize, then: Then) {
        let Some(slots) = &mut self.slots else { return };
        let model = &mut self.model;
        if !model.setup.overlap {
            model.release_captured();
        }
        let seq = model.batches.len();
        if model.ended {
            // The copy thread may not have reached its end yet.
            let acquired = slots.acquire().map(drop);
            assert!(
                matches!(acquired, Ok(()) | Err(Error::Driver { code: LAUNCH_FAILED, .. })),
                "{acquired:?}"
            );
            return;
        }
        let full = !model.can_acquire();
        let held = !model.setup.overlap && !model.is_free(model.copied());
        let mut cx = Context::from_waker(Waker::noop());
        let acquired = match len % 4 {
            0 if !full && !held => slots.acquire(),
            1 if !full && !held => slots.acquire_deadline(Instant::now() + LATER),
            2 => match slots.poll_acquire(&mut cx) {
                Poll::Ready(acquired) => acquired,
                // Pending until the release of a lease, or the end of a copy.
                Poll::Pending => return assert!(full || held || model.setup.overlap),
            },
            _ => slots.try_acquire(),
        };
        let slot = match acquired {
            Err(Error::SlotHeld { .. }) if held => return,
            // The copy may still run.
            Err(Error::Full) if full || model.setup.overlap => return,
            acquired => {
                let Some(slot) = model.expect(acquired, true) else { return };
                assert!(!full && !held);
                slot
            }
        };
        assert_eq!(slot.seq(), seq as u64);
        if then == Then::DropFree {
            return;
        }
        let mut slot = slot.reserve();
        model.batches.push(Batch { bytes: Vec::new(), uses: BTreeSet::new(), state: State::Open });
        let bytes: Vec<u8> = (0..BYTES).map(|i| (seq * 31 + i * 7) as u8 ^ model.setup.seed as u8).collect();
        slot.copy_from_slice(&bytes);
        match then {
            Then::Forget => {
                std::mem::forget(slot);
                model.leaked = true;
            }
            Then::Keep => self.open.push((slot, bytes)),
            _ => self.close(slot, &bytes, (then == Then::Commit).then_some(len)),
        }
    }

    /// Ends a reserved slot.
    fn close(&mut self, slot: ReservedSlot<u64>, bytes: &[u8], len: Option<usize>) {
        let model = &mut self.model;
        let seq = slot.seq() as usize;
        assert!(slot[..] == bytes[..], "another batch was written to the slot");
        let batch = &mut model.batches[seq];
        match len {
            Some(len) => {
                // If it fails, the batch may still arrive: the error may be that of a later one, which waited for it.
                (batch.state, batch.bytes) = (State::Committed, bytes[..len].to_vec());
                let committed = slot.commit(len, seq as u64);
                model.expect(committed, true);
            }
            None => {
                batch.state = State::Cancelled;
                drop(slot);
            }
        }
    }

    fn receive(&mut self, way: u8) {
        let Some(batches) = &mut self.batches else { return };
        self.model.release_captured();
        let model = &mut self.model;
        let seq = model.received;
        let comes = seq < model.copied();
        // Held by the lease of the previous batch in that slot, whether or not another batch comes.
        let held = !model.is_free(seq);
        let mut cx = Context::from_waker(Waker::noop());
        let received = loop {
            if model.ended && !comes {
                // Batches committed before the error may or may not still arrive.
                assert!(!matches!(batches.try_recv(), Ok(Some(_))));
                return;
            }
            let received = match way {
                0 if comes || held || !model.setup.overlap => batches.recv(),
                1 => match batches.poll_recv(&mut cx) {
                    Poll::Ready(received) => received,
                    Poll::Pending => Err(Error::Empty),
                },
                2 if comes || held => {
                    batches.recv_deadline(Instant::now() + if comes { LATER } else { SOON })
                }
                _ => batches.try_recv(),
            };
            match received {
                // The copy thread will get to it.
                Err(Error::Empty) if comes && model.setup.overlap => std::thread::yield_now(),
                received => break received,
            }
        };
        match received {
            Err(Error::SlotHeld { device_depth }) if held => {
                assert_eq!(device_depth, model.setup.device_depth);
            }
            Err(Error::Empty) if !comes => {}
            Err(Error::Cancelled) if comes => {
                assert_eq!(model.batches[seq].state, State::Cancelled);
                model.batches[seq].state = State::Released;
                model.received += 1;
            }
            received => {
                let Some(lease) = model.expect(received, true) else { return };
                let lease = lease.expect("nothing was finished");
                let batch = &mut model.batches[seq];
                assert!(comes || model.failing, "a batch that was not committed");
                assert_eq!((lease.seq(), *lease.meta()), (seq as u64, seq as u64));
                assert_eq!((lease.len(), batch.state), (batch.bytes.len(), State::Committed));
                batch.state = State::Leased;
                model.received += 1;
                self.leases.push(lease);
            }
        }
    }

    /// Uses a batch on a stream: a kernel reads it there.
    fn use_on(&mut self, lease: usize, stream: usize, raw: bool) {
        let Some(lease) = lease.checked_rem(self.leases.len()).map(|i| &self.leases[i]) else { return };
        let used = &self.streams[stream];
        let address = if raw {
            // SAFETY: the streams outlive the uploader.
            unsafe { lease.on_raw(used.cu_stream()) }
        } else {
            lease.on::<u8>(used).map(|view| view.address())
        };
        let model = &mut self.model;
        if model.captured[stream] {
            match address {
                Err(Error::Captured) => {}
                other => drop(model.expect(other, false).map(|_| panic!("used in a capture"))),
            }
            return;
        }
        let Some(address) = model.expect(address, false) else { return };
        let batch = &mut model.batches[lease.seq() as usize];
        batch.uses.insert(stream);
        if batch.bytes.is_empty() {
            return;
        }
        bind(&self.ctx);
        let launched = self.sim.kernel_read(used.cu_stream(), address, batch.bytes.len(), 5);
        if let Ok(Some(kernel)) = launched {
            self.kernels.push((kernel, checksum_of(&batch.bytes)));
        }
    }

    fn own(&mut self, lease: usize, stream: usize) {
        let Some(lease) = take(&mut self.leases, lease) else { return };
        let seq = lease.seq() as usize;
        let owned = lease.into_owned::<u8>(&self.streams[stream]);
        let model = &mut self.model;
        let empty = model.batches[seq].bytes.is_empty();
        if !model.captured[stream] {
            model.batches[seq].uses.insert(stream);
        }
        match owned {
            Err(Error::Captured) if model.captured[stream] => {}
            Err(Error::Option { option: "self", .. }) if empty => {}
            owned => {
                if let Some(owned) = model.expect(owned, false) {
                    assert!(!model.captured[stream] && !empty);
                    self.owned.push(owned);
                }
            }
        }
        self.released(seq);
    }

    fn release(&mut self, lease: Lease<u64>) {
        let seq = lease.seq() as usize;
        drop(lease);
        self.released(seq);
    }

    /// Records that the lease of this batch was dropped.
    fn released(&mut self, seq: usize) {
        let captured = self.model.captured;
        let batch = &mut self.model.batches[seq];
        let held = batch.uses.iter().any(|stream| captured[*stream]);
        batch.state = if held { State::Captured } else { State::Released };
    }

    fn ask(&mut self, lease: usize) {
        let Some(lease) = lease.checked_rem(self.leases.len()).map(|i| &self.leases[i]) else { return };
        let model = &mut self.model;
        let times = model.setup.times && !lease.is_empty();
        let waited = lease.wait_copied();
        if let Some(time) = model.expect(waited, false) {
            assert_eq!(time.is_some(), times);
            let asked = lease.copied();
            assert!(model.expect(asked, false).is_none_or(|again| again == time));
        }
    }

    fn begin(&mut self, stream: usize, mode: u8) {
        let mode = MODES[usize::from(mode)];
        let (raw, flag) = self.capturable(stream);
        bind(&self.ctx);
        // SAFETY: the stream exists.
        if !self.model.captured[flag] && unsafe { result::stream::begin_capture(raw, mode) }.is_ok() {
            self.model.captured[flag] = true;
        }
    }

    fn end(&mut self, stream: usize) {
        let (raw, flag) = self.capturable(stream);
        end_capture(&self.ctx, raw, &mut self.model.captured[flag]);
    }

    /// A stream that may be captured, and the stream that cannot be used during that capture.
    fn capturable(&self, stream: usize) -> (sys::CUstream, usize) {
        if stream == 0 { (self.streams[0].cu_stream(), 0) } else { (self.blocking, 2) }
    }

    fn call(&mut self, call: &Call) {
        match call {
            Call::Fill(len, then) => self.fill(*len, *then),
            Call::Close(slot, len) => {
                if let Some((slot, bytes)) = take(&mut self.open, *slot) {
                    self.close(slot, &bytes, *len);
                }
            }
            Call::Receive(way) => self.receive(*way),
            Call::Use(lease, stream, raw) => self.use_on(*lease, *stream, *raw),
            Call::Own(lease, stream) => self.own(*lease, *stream),
            Call::Ask(lease) => self.ask(*lease),
            Call::Release(lease) => {
                if let Some(lease) = take(&mut self.leases, *lease) {
                    self.release(lease);
                }
            }
            Call::Leak(lease) => {
                self.model.leaked |= take(&mut self.leases, *lease).map(std::mem::forget).is_some();
            }
            Call::Begin(stream, mode) => self.begin(*stream, *mode),
            Call::End(stream) => self.end(*stream),
            // SAFETY: a null context is allowed.
            Call::Leave => drop(unsafe { result::ctx::set_current(null_mut()) }),
            Call::Fail(nth) => {
                if !std::mem::replace(&mut self.model.failing, true) {
                    self.sim.inject(Failure::call(*nth, LAUNCH_FAILED));
                }
            }
        }
    }

    /// The end of the data: everything that can still arrive does, in order, followed by the end.
    fn finish(&mut self, ending: Ending) {
        match ending {
            Ending::DropBatches => {
                self.leases.clear();
                self.batches = None;
                return;
            }
            Ending::Finish => {
                self.slots.take().into_iter().for_each(HostSlots::finish);
                // What is still open comes too.
                while let Some((slot, bytes)) = self.open.pop() {
                    let len = (slot.seq() % 3 > 0).then_some(bytes.len());
                    self.close(slot, &bytes, len);
                }
            }
            Ending::DropSlots => self.slots = None,
        }
        (0..2).for_each(|stream| self.end(stream));
        while let Some(lease) = self.leases.pop() {
            self.release(lease);
        }
        if self.model.leaked {
            return; // its slot is never used again
        }
        let Some(batches) = &mut self.batches else { return };
        let model = &mut self.model;
        let open = model.batches.iter().position(|batch| batch.state == State::Open);
        let last = open.unwrap_or(model.batches.len());
        loop {
            match batches.recv() {
                Err(Error::Cancelled) => {
                    let state = model.batches[model.received].state;
                    assert_eq!(state, State::Cancelled);
                    model.received += 1;
                }
                Ok(Some(lease)) => {
                    assert_eq!(lease.seq(), model.received as u64);
                    assert_eq!(lease.len(), model.batches[model.received].bytes.len());
                    model.received += 1;
                }
                Ok(None) => {
                    assert!(matches!(ending, Ending::Finish) && open.is_none());
                    break assert_eq!(model.received, last, "batches were lost");
                }
                // By hand, the receive releases a capture's slot; the copy thread may do so late.
                Err(Error::SlotHeld { .. }) => std::thread::yield_now(),
                Err(Error::Abandoned) => {
                    assert!(matches!(ending, Ending::DropSlots));
                    break assert_eq!(model.received, last, "batches were lost");
                }
                Err(Error::Driver { code: LAUNCH_FAILED, .. }) if model.failing => break,
                Err(error) => panic!("{error:?}"),
            }
        }
    }
}

fn run(setup: Setup, calls: &[Call], ending: Ending) {
    let Setup { seed, pools, delay_us, .. } = setup;
    let (sim, ctx) = start_with(Options { delay_us, pools, pieces: 2, ..Options::seeded(seed) }, false);
    let streams = [ctx.new_stream().unwrap(), ctx.new_stream().unwrap(), ctx.default_stream()];
    let mut blocking = null_mut();
    // SAFETY: the pointer is valid for the call.
    unsafe { sys::cuStreamCreate(&raw mut blocking, 0) }.result().unwrap();
    let before = sim.live().leaked();
    let mut uploader =
        Uploader::new(&ctx, BYTES).device_depth(setup.device_depth).host_depth(setup.host_depth);
    uploader = uploader.overlap(setup.overlap).times(setup.times);
    if setup.lent {
        uploader = uploader.host_slots(lent_slots(setup.host_depth, BYTES));
    }
    let (slots, batches) = uploader.build().unwrap();
    let model = Model { setup, ..Model::default() };
    let (slots, batches, control) = (Some(slots), Some(batches), sim.control());
    let (leases, kernels, owned, open) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut world =
        World { model, sim: control, ctx, streams, blocking, slots, open, batches, leases, owned, kernels };
    calls.iter().for_each(|call| world.call(call));
    world.finish(ending);
    (0..2).for_each(|stream| world.end(stream));
    // Frees memory of the default stream only while its context is current.
    bind(&world.ctx);
    drop((world.leases, world.slots, world.batches, world.owned));
    assert_eq!(copy_threads(), 0, "no one waits for a slot that is still reserved");
    drop(world.open);
    let failed = !sim.injected().is_empty();
    for (kernel, wanted) in world.kernels {
        assert_eq!(sim.checksum(kernel), Some(wanted), "a use found other bytes");
    }
    assert_eq!(copy_threads(), 0);
    let mut found = sim.violations();
    // After an error, cudarc frees an owned copy without waiting for its stream.
    found.retain(|found| !world.model.failing || !found.contains("after d2d"));
    assert_eq!(found, [""; 0]);
    sim.drain();
    if !world.model.leaked {
        let mut now = sim.live().leaked();
        if matches!(ending, Ending::DropBatches) {
            // A slot that a captured stream may still use is not freed.
            now.device_allocations = now.device_allocations.min(before.device_allocations);
            now.device_bytes = now.device_bytes.min(before.device_bytes);
        }
        assert_eq!(now, before, "failed {failed}");
    }
    bind(&world.ctx);
    // SAFETY: created above.
    let _ = unsafe { result::stream::destroy(blocking) };
}

#[test]
fn random_calls_agree_with_the_model() {
    if Control::get().is_real() {
        return;
    }
    let ending = prop::sample::select(vec![Ending::Finish, Ending::DropSlots, Ending::DropBatches]);
    let case = (setup(), prop::collection::vec(call(), 1..80), ending);
    let seen = RefCell::new(BTreeSet::new());
    let cases = explore(200, &case, |(setup, calls, ending)| {
        seen.borrow_mut().insert((setup.host_depth, setup.device_depth));
        run(setup, &calls, ending);
    });
    println!("{cases} cases, {} of 64 pairs of depths", seen.into_inner().len());
}

/// Tests random cases, as many as `TWINBUF_FUZZ_CASES` says or else `few`, and returns their number. With
/// `TWINBUF_FUZZ_PRINT` each is printed.
fn explore<T: Debug>(few: u32, case: &impl Strategy<Value = T>, test: impl Fn(T)) -> u32 {
    let cases = std::env::var("TWINBUF_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(few);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let result = TestRunner::new(config).run(case, |case| {
        if std::env::var_os("TWINBUF_FUZZ_PRINT").is_some() {
            eprintln!("{case:?}");
        }
        test(case);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    cases
}

/// What a scope of a stager does with each of its buffers: with each part of it, in some order.
#[derive(Clone, Debug)]
struct Scope {
    /// For each buffer, the size of its parts, and whether they are uploaded. `None`: it is not used.
    buffers: Vec<Option<(usize, bool)>>,
    /// Parts are taken in steps of this.
    stride: usize,
    /// The part whose fill fails.
    failing: Option<usize>,
    /// The part at which the closure gives up.
    gives_up: Option<usize>,
    /// The part before which the stream's capture begins, and the mode.
    captured: Option<(usize, u8)>,
    /// The driver call that fails, from the beginning of the scope.
    call: Option<u64>,
}

/// Bytes of a buffer. Parts divide it.
const LEN: usize = 600;

/// Each error is injected at an earlier call than this one, counted from the beginning of the scope.
const LAST_CALL: u64 = 120;

fn rarely<S: Strategy>(of: S) -> impl Strategy<Value = Option<S::Value>> {
    prop::option::weighted(0.1, of)
}

prop_compose! {
    fn scope()(
        buffers in {
            let size = prop::sample::select(vec![10, 25, 50, 100, 300, LEN]);
            prop::collection::vec(prop::option::weighted(0.8, (size, any::<bool>())), 3)
        },
        stride in 1..20_usize,
        failing in rarely(0..40_usize),
        gives_up in rarely(0..40_usize),
        captured in rarely((0..40_usize, 0..3_u8)),
        call in rarely(1..LAST_CALL),
    ) -> Scope {
        Scope { buffers, stride, failing, gives_up, captured, call }
    }
}

/// A part of a buffer in a scope.
enum Part<'a> {
    Up(CudaViewMut<'a, u8>, &'a [u8]),
    Down(CudaView<'a, u8>, &'a mut [u8]),
}

fn stage(setup: Setup, scopes: &[Scope], tracking: bool) {
    let Setup { seed, pools, delay_us, .. } = setup;
    let (sim, ctx) = start_with(Options { delay_us, pools, pieces: 2, ..Options::seeded(seed) }, tracking);
    let (stream, other) = (ctx.new_stream().unwrap(), ctx.new_stream().unwrap());
    let before = sim.live().leaked();
    let stager = Stager::new(&ctx).slot_bytes([16, 60, 100, 4096][setup.host_depth % 4]);
    let mut stager =
        stager.depth(setup.device_depth).fill_threads(setup.host_depth.div_ceil(2)).build().unwrap();
    let mut memory: Vec<CudaSlice<u8>> = (0..3).map(|_| stream.alloc_zeros(LEN).unwrap()).collect();
    // `None` after a scope that failed.
    let mut model: Vec<Option<Vec<u8>>> = vec![Some(vec![0; LEN]); 3];
    let (mut kernels, mut failing) = (Vec::new(), false);
    for (round, scope) in scopes.iter().enumerate() {
        let new: Vec<Vec<u8>> = (0..3)
            .map(|buffer| (0..LEN).map(|i| (i * 7 + buffer * 50 + round * 31) as u8 ^ seed as u8).collect())
            .collect();
        let mut back = vec![vec![0xEE; LEN]; 3];
        let mut parts = Vec::new();
        for (((memory, new), back), way) in memory.iter_mut().zip(&new).zip(&mut back).zip(&scope.buffers) {
            match *way {
                None => {}
                Some((size, true)) => {
                    let views = memory.as_view_mut().chunks_exact_mut(size);
                    parts.extend(views.zip(new.chunks(size)).map(|(view, new)| Some(Part::Up(view, new))));
                }
                Some((size, false)) => {
                    let memory = &*memory;
                    let views = (0..LEN).step_by(size).map(|from| memory.slice(from..from + size));
                    parts.extend(
                        views.zip(back.chunks_mut(size)).map(|(view, out)| Some(Part::Down(view, out))),
                    );
                }
            }
        }
        failing |= scope.call.is_some();
        scope.call.into_iter().for_each(|nth| sim.inject(Failure::call(nth, LAUNCH_FAILED)));
        let count = parts.len();
        let mut captured = false;
        let staged = stager.scope(&stream, |to| {
            let order = (0..scope.stride).flat_map(|from| (from..count).step_by(scope.stride));
            for (i, at) in order.enumerate() {
                if scope.gives_up == Some(i) {
                    return Err(Error::Closed);
                }
                if let Some((_, mode)) = scope.captured.filter(|(from, _)| *from == i) {
                    bind(&ctx);
                    let mode = MODES[usize::from(mode)];
                    // SAFETY: the stream exists.
                    captured = unsafe { result::stream::begin_capture(stream.cu_stream(), mode) }.is_ok();
                }
                match parts[at].take().unwrap() {
                    Part::Up(view, _) if scope.failing == Some(i) => {
                        to.upload_with(|_, _| Err(io::Error::other("fails")), view)?;
                    }
                    Part::Up(view, new) if i % 3 == 0 => to.upload(new, view)?,
                    Part::Up(view, new) => to.upload_with(from(new), view)?,
                    Part::Down(view, out) => to.offload(view, out)?,
                }
            }
            Ok(())
        });
        let wanted = match &staged {
            Ok(()) => !captured && scope.gives_up.is_none_or(|i| i >= count),
            Err(Error::Driver { code: LAUNCH_FAILED, .. }) => failing,
            Err(Error::Captured) => captured,
            Err(Error::Closed) => scope.gives_up.is_some(),
            Err(Error::Fill { .. }) => scope.failing.is_some(),
            Err(_) => false,
        };
        assert!(wanted, "{scope:?}: {staged:?}");
        drop(parts);
        bind(&ctx);
        end_capture(&ctx, stream.cu_stream(), &mut captured);
        let results = memory.iter().zip(&mut model).zip(new.into_iter().zip(back)).zip(&scope.buffers);
        for (((memory, model), (new, back)), way) in results {
            match (way, &staged) {
                (None, _) => {}
                (Some((_, true)), staged) => *model = staged.is_ok().then_some(new),
                (Some((_, false)), Ok(())) => assert!(model.as_ref().is_none_or(|model| *model == back)),
                (Some((_, false)), Err(_)) => {}
            }
            let Some(model) = model.as_ref() else { continue };
            // Not after an injected error: if it hits cudarc's own wait, cudarc copies without that edge.
            if tracking && round % 2 == 1 && !failing {
                assert_eq!(other.clone_dtoh(memory).as_ref(), Ok(model));
                continue;
            }
            let address = memory.device_ptr(&stream).0;
            let kernel = sim.kernel_read(stream.cu_stream(), address, LEN, 5);
            if let Ok(Some(kernel)) = kernel {
                kernels.push((kernel, checksum_of(model)));
            }
        }
    }
    // Without what an injected error may still hit.
    sim.drain();
    bind(&ctx);
    drop(stager);
    // cudarc frees the memory without a wait if an injected error hits that wait: these calls meet what is left of them.
    if failing {
        for _ in 0..LAST_CALL {
            let _ = stream.synchronize();
        }
    }
    // An error that cudarc recorded when an event failed: it would replace the wait, too.
    let _ = ctx.check_err();
    drop(memory);
    assert_eq!(threads("twinbuf-stage"), 0);
    for (kernel, wanted) in kernels {
        assert_eq!(sim.checksum(kernel), Some(wanted), "a use found other bytes");
    }
    sim.drain();
    assert_eq!(sim.live().leaked(), before);
}

#[test]
fn random_scopes_of_a_stager_agree_with_the_model() {
    if Control::get().is_real() {
        return;
    }
    let case = (setup(), prop::collection::vec(scope(), 1..6), any::<bool>());
    let cases = explore(50, &case, |(setup, scopes, tracking)| stage(setup, &scopes, tracking));
    println!("{cases} cases of a stager");
}
