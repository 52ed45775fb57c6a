//! Tests of the three edges. With all of them, no access is unordered, for any seed; with one removed, the checker
//! reports it.
//!
//! Unit tests, because only the crate itself can remove an edge.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::CudaContext;
use cudarc::driver::sys;
use twinbuf_cuda_sim::{Control, Options, Sim};
use twinbuf_testing::extent;

use crate::driver::check;
use crate::edge::Edge;
use crate::error::OnDrop;
use crate::lent::page_locked;
use crate::{Error, HostSlots, Uploader};
use common::start_with;
use kernels::Kernels;

mod stager;
mod time;

#[path = "../tests/common/mod.rs"]
mod common;

#[path = "../kernels/mod.rs"]
#[allow(dead_code)]
mod kernels;

const BATCHES: u32 = 10;
const BYTES: usize = 512;
/// Every pair of depths, three times with a thread and once without.
const SEEDS: u64 = 256;
/// One seed of so many: each depth, kind of slot and pool, with a thread and without.
const STEP: usize = 7;
/// A real driver has no seeds; this is its number of tries.
const SEEDS_REAL: u64 = 12;

/// The contents of batch `seq`.
fn pattern(seed: u64, seq: u32) -> impl Iterator<Item = u8> {
    let start = seed.wrapping_mul(31).wrapping_add(u64::from(seq) * 101);
    (0..BYTES as u64).map(move |i| start.wrapping_add(i).to_le_bytes()[0])
}

/// The streams of the copies and of the batches' use.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Streams {
    /// A copy stream, and two streams of the caller's.
    Apart,
    /// The copies are on the default stream; the caller's two streams do not synchronize with it.
    CopiesOnDefault,
    /// Everything is on the default stream.
    AllOnDefault,
    /// The caller's work is on the default stream, and the copies are not.
    UseOnDefault,
}

/// Uploads `BATCHES` batches and reads each on one of two streams. Returns what the device had, batch after batch.
fn train(
    sim: &Sim,
    ctx: &Arc<CudaContext>,
    seed: u64,
    (lent, (host, device), overlap, on): (bool, (usize, usize), bool, Streams),
    without: Option<Edge>,
) -> Result<Vec<u8>, Error> {
    ctx.bind_to_thread().unwrap();
    let streams = match on {
        Streams::Apart | Streams::CopiesOnDefault => [ctx.new_stream().unwrap(), ctx.new_stream().unwrap()],
        Streams::AllOnDefault | Streams::UseOnDefault => [ctx.default_stream(), ctx.default_stream()],
    };
    let copy_stream = matches!(on, Streams::Apart | Streams::UseOnDefault);
    let mut uploader = Uploader::new(ctx, BYTES).host_depth(host).device_depth(device);
    if lent {
        let slots = (0..host).map(|_| page_locked(ctx, BYTES));
        uploader = uploader.host_slots(slots.collect::<Result<_, _>>()?);
    }
    let uploader = uploader.overlap(overlap).copy_stream(copy_stream);
    let (mut slots, mut batches) = uploader.build::<u32>()?;
    // Page-locked: a copy to pageable memory would wait on the host, and hide missing edges.
    let seen = page_locked(ctx, BYTES * BATCHES as usize)?;
    let target = seen.start.as_ptr();
    // If an edge is missing, hold the device until the first batch is in use. Otherwise the copy thread may already
    // have seen a copy complete, and the host's later work then comes after that copy even without the edge. On a busy
    // machine every copy could end this way.
    let mut held = without.map(|_| sim.hold(0));
    let kernels = without.map(|_| Kernels::new(ctx).unwrap());
    let delay = Duration::from_millis(if sim.is_real() { 20 } else { 2 });
    let fill = |slots: &mut HostSlots<u32>, seq| {
        let mut slot = slots.acquire()?.reserve();
        slot.iter_mut().zip(pattern(seed, seq)).for_each(|(byte, value)| *byte = value);
        slot.commit(BYTES, seq)
    };
    let mut read = |seq: u32| -> Result<(), Error> {
        let batch = batches.recv()?.expect("as many as were committed");
        assert_eq!((*batch.meta(), batch.seq(), batch.len()), (seq, u64::from(seq), BYTES));
        // The batches of one slot alternate between the two streams.
        let stream = &streams[seq as usize / 2 % 2];
        assert_eq!(batch.on::<u8>(stream)?.len(), BYTES);
        // SAFETY: the stream outlives the lease, and the batch is read on it.
        let from = unsafe { batch.on_raw(stream.cu_stream()) }?;
        // SAFETY: the buffer has room for all batches.
        let to = unsafe { target.add(BYTES * seq as usize) };
        // SAFETY: both are long enough, and the target is read only after the streams are done.
        let read = || unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, BYTES, stream.cu_stream()) };
        // Without `UseAfterCopy`, read early and then keep the stream busy: the next copy is late, because it waits for
        // the end of this use. Otherwise read late, after the kernels: the next copy then finds its slot in use.
        let spin = || kernels.iter().for_each(|kernels| kernels.spin(stream, delay).unwrap());
        let copied = if without == Some(Edge::UseAfterCopy) {
            let copied = read();
            spin();
            copied
        } else {
            spin();
            read()
        };
        drop(held.take());
        check("cuMemcpyDtoHAsync", copied.result())
    };
    if overlap {
        thread::scope(|scope| {
            scope.spawn(move || {
                for seq in 0..BATCHES {
                    fill(&mut slots, seq)?;
                }
                slots.finish();
                Ok::<(), Error>(())
            });
            (0..BATCHES).try_for_each(&mut read)
        })?;
        assert!(batches.recv()?.is_none());
    } else {
        for seq in 0..BATCHES {
            fill(&mut slots, seq)?;
            read(seq)?;
        }
    }
    for stream in &streams {
        stream.synchronize().unwrap();
    }
    // SAFETY: the buffer has this many bytes, and nothing writes to them any more.
    let seen = unsafe { std::slice::from_raw_parts(target, BYTES * BATCHES as usize) };
    Ok(seen.to_vec())
}

/// Runs one seed without this edge. Returns what the checker found, and whether the data were right.
fn run(seed: u64, without: Option<Edge>, tracking: bool, on: Streams) -> (Vec<String>, bool) {
    let overlap = without.is_some() || seed / 64 % 4 != 3;
    // With `overlap(false)`, one thread makes every call. The checker may then treat threads separately: it would
    // report work that is ordered only by a hand-over between threads.
    let options = Options { delay_us: 20, pools: seed % 5 != 4, ..Options::seeded(seed) };
    let (sim, ctx) = start_with(Options { host_threads_apart: !overlap, ..options }, tracking);
    Edge::take_away(without);
    let _back = OnDrop(|| Edge::take_away(None));
    // Try every pair of depths from 1 to 8. If an edge is missing, try only (2, 2): with one slot of a kind, other
    // waits replace some edges.
    let pair = ((seed % 8) as usize + 1, (seed / 8 % 8) as usize + 1);
    let depths = if without.is_some() { (2, 2) } else { pair };
    // From 512 seeds on, each pair has both kinds of slots, with a thread and without.
    let lent = (seed + seed / 64 + seed / 256) % 2 == 1;
    let seen = train(&sim, &ctx, seed, (lent, depths, overlap, on), without).unwrap();
    let equal = seen.iter().copied().eq((0..BATCHES).flat_map(|seq| pattern(seed, seq)));
    (sim.violations(), equal)
}

/// Whether the checker found that this edge is missing, at the access that needs it: where the reader fills its slot again,
/// or in the driver's call.
fn is_found(found: &[String], edge: Edge) -> bool {
    let (race, at) = match edge {
        Edge::RefillAfterCopy => ("is not ordered after h2d (read", "host write at:"),
        Edge::UseAfterCopy => ("d2h (read", "d2h at:\n    cuMemcpyDtoHAsync_v2"),
        Edge::CopyAfterUse => ("h2d (write", "h2d at:\n    cuMemcpyHtoDAsync_v2"),
    };
    any_at(found, race, at)
}

/// Whether a sentence of the checker's has this race, and the first stack after it begins so, and is in this crate.
fn any_at(found: &[String], race: &str, at: &str) -> bool {
    found.iter().any(|found| {
        let (sentence, stacks) = found.split_once('\n').unwrap_or((found, ""));
        sentence.contains(race) && stacks.trim_start().starts_with(at) && stacks.contains("twinbuf_cuda::")
    })
}

/// The seeds of a run: as many as `TWINBUF_CUDA_SEEDS` says, one after the other, or else [`SEEDS`] or a part of them.
fn seeds() -> impl Iterator<Item = u64> + Clone {
    let asked = std::env::var("TWINBUF_CUDA_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    let (seeds, step) = match asked {
        _ if Control::get().is_real() => (SEEDS_REAL, 1),
        Some(seeds) => (seeds, 1),
        None => (SEEDS, extent(STEP, 1)),
    };
    (0..seeds).step_by(step)
}

/// The number of seeds of a run without an edge.
fn seeds_without() -> u64 {
    extent(6, 20)
}

#[test]
fn no_access_is_unordered_for_any_seed_with_tracking_on_and_off() {
    let apart = seeds().map(|seed| (seed, Streams::Apart));
    let on_default = [Streams::CopiesOnDefault, Streams::AllOnDefault];
    // A part of the seeds: with a copy thread and without, and all depths, as 13 has no factor in common with their number.
    let some = || seeds().step_by(extent(5, 13));
    let on_default = on_default.into_iter().flat_map(|on| some().map(move |seed| (seed, on)));
    for ((seed, on), tracking) in apart.chain(on_default).flat_map(|each| [(each, true), (each, false)]) {
        let (found, equal) = run(seed, None, tracking, on);
        assert!(found.is_empty(), "seed {seed}, tracking {tracking}, {on:?}: {found:#?}");
        assert!(equal, "seed {seed}, tracking {tracking}, {on:?}: other data arrived");
    }
}

/// With a copy stream, the checker reports each edge that is missing. With the copies on the stream that uses the batches,
/// the order of work there replaces the two edges between streams; the host's wait is still needed.
#[test]
fn a_missing_edge_is_found_for_every_seed() {
    let real = Control::get().is_real();
    let edges = [Edge::RefillAfterCopy, Edge::UseAfterCopy, Edge::CopyAfterUse];
    let on = [Streams::Apart, Streams::CopiesOnDefault, Streams::UseOnDefault, Streams::AllOnDefault];
    for (edge, on) in edges.into_iter().flat_map(|edge| on.map(|on| (edge, on))) {
        // A real driver has no checker. It must show the missing edge in the data: in every run, unless the machine is too
        // busy for the kernels' delay.
        let in_data = matches!(on, Streams::Apart | Streams::CopiesOnDefault);
        if real && !in_data {
            continue;
        }
        let wanted = on != Streams::AllOnDefault || edge == Edge::RefillAfterCopy;
        let (mut wrong, seeds) = (0, seeds_without());
        for seed in 0..seeds {
            let (found, equal) = run(seed, Some(edge), seed.is_multiple_of(2), on);
            let right = is_found(&found, edge) == wanted && found.is_empty() != wanted;
            assert!(real || right, "without {edge:?}, {on:?}, seed {seed}: {found:#?}");
            wrong += u64::from(!equal);
        }
        assert!(!real || wrong > 0, "without {edge:?}, {on:?}: the data were right");
        if in_data {
            let checked = if real { "no checker here" } else { "found by the checker in each" };
            println!("without {edge:?}, {on:?}: {seeds} runs, {checked}, other data in {wrong}");
        }
    }
}
