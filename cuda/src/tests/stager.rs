//! The edges of a stager, as those of an uploader: with all of them, no access is unordered; with one removed, the
//! checker reports it.

#![allow(clippy::cast_possible_truncation)] // of small counts

use twinbuf_cuda_sim::{Control, Options};

use super::common::start_with;
use super::{any_at, seeds, seeds_without};
use crate::Stager;
use crate::edge::Edge;
use crate::error::OnDrop;

const SLOT: usize = 64;

/// Uploads and offloads twice the slots' bytes, without a wait on the host. Returns what the checker found.
fn run(seed: u64, without: Option<Edge>, offload: bool, tracking: bool) -> Vec<String> {
    let options = Options { delay_us: 20, pools: seed % 5 != 4, ..Options::seeded(seed) };
    let (sim, ctx) = start_with(options, tracking);
    let stream = ctx.new_stream().unwrap();
    let (depth, threads) =
        if without.is_some() { (1, 1) } else { (seed as usize % 8 + 1, seed as usize / 8 % 4 + 1) };
    let mut stager = Stager::new(&ctx).slot_bytes(SLOT).depth(depth).fill_threads(threads).build().unwrap();
    // To notice that `RefillAfterCopy` is missing, each slot must be filled twice. For the other edges, fill one slot
    // once.
    let slots =
        if without.is_none_or(|edge| edge == Edge::RefillAfterCopy) { 2 * depth * threads } else { 1 };
    let len = slots * SLOT;
    Edge::take_away(without);
    let _back = OnDrop(|| Edge::take_away(None));
    // The stream zeroes this memory: a copy that does not wait for the stream is unordered with that write.
    let mut memory = stream.alloc_zeros::<u8>(len).unwrap();
    // If an edge is missing, hold the device until everything is enqueued: no copy may be over by chance.
    let held = without.filter(|_| !offload).map(|_| sim.hold(0));
    let fill = |at: usize, out: &mut [u8]| {
        out.fill((at / SLOT) as u8 + 1);
        Ok(())
    };
    if !offload {
        stager.scope(&stream, |to| to.upload_with(fill, memory.as_view_mut())).unwrap();
    }
    let mut out = vec![0xEE; len];
    if offload {
        stager.scope(&stream, |from| from.offload(memory.as_view(), &mut out)).unwrap();
        stream.memset_zeros(&mut memory).unwrap();
    } else if without.is_some() {
        // The stream reads the memory: this read must come after the uploads.
        let mut copy = stream.alloc_zeros::<u8>(len).unwrap();
        stream.memcpy_dtod(&memory, &mut copy).unwrap();
        drop(held);
    } else {
        stager.scope(&stream, |from| from.offload(memory.as_view(), &mut out)).unwrap();
    }
    let wanted = |at| if offload { 0 } else { (at / SLOT) as u8 + 1 };
    assert!(without.is_some() || out.iter().enumerate().all(|(at, byte)| *byte == wanted(at)));
    drop((memory, stager));
    sim.violations()
}

#[test]
fn no_access_is_unordered_for_any_seed() {
    for seed in seeds().step_by(8) {
        for (tracking, offload) in [(false, false), (true, false), (false, true)] {
            assert_eq!(run(seed, None, offload, tracking), [""; 0], "seed {seed}");
        }
    }
}

/// Whether the checker found that this edge is missing, at the access that needs it: where a slot is filled or its bytes are
/// taken, or in the driver's call.
fn is_found(found: &[String], edge: Edge, offload: bool) -> bool {
    let (race, at) = match (edge, offload) {
        (Edge::RefillAfterCopy, false) => ("is not ordered after h2d (read", "host write at:"),
        (Edge::RefillAfterCopy, true) => ("is not ordered after d2h (write", "host read at:"),
        (Edge::UseAfterCopy, _) => ("d2d (read", "d2d at:"),
        (Edge::CopyAfterUse, false) => ("h2d (write", "h2d at:"),
        (Edge::CopyAfterUse, true) => ("d2h (read", "d2h at:"),
    };
    any_at(found, race, at)
}

#[test]
fn a_missing_edge_is_found_for_every_seed() {
    if Control::get().is_real() {
        return; // a real driver has no checker
    }
    // Offloads have no `UseAfterCopy`: only the host waits for their copies.
    for (edge, offload) in [
        (Edge::RefillAfterCopy, false),
        (Edge::UseAfterCopy, false),
        (Edge::CopyAfterUse, false),
        (Edge::RefillAfterCopy, true),
        (Edge::CopyAfterUse, true),
    ] {
        for seed in 0..seeds_without() {
            let found = run(seed, Some(edge), offload, seed % 2 == 0);
            let found = is_found(&found, edge, offload);
            assert!(found, "without {edge:?}, offload {offload}, seed {seed}: not found at the access");
        }
        println!("stager without {edge:?}, offload {offload}: found by the checker for every seed");
    }
}
