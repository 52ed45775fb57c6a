//! Copies to and from memory that the caller allocated: bytes, splits and runs, order, borrowing, errors.
#![cfg(target_os = "linux")]
#![allow(clippy::cast_possible_truncation)] // of small counts

mod common;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{must_end, start, threads};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};
use twinbuf_cuda::{Error, Stager, StagerBuilder};
use twinbuf_cuda_sim::{Failure, Live, Options, Sim};

const LAUNCH_FAILED: u32 = 719;

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed * 37 + i * 11 + i / 256) as u8).collect()
}

fn small(ctx: &Arc<CudaContext>) -> StagerBuilder {
    Stager::new(ctx).slot_bytes(256).depth(2).fill_threads(2)
}

fn device(stream: &Arc<CudaStream>, len: usize) -> CudaSlice<u8> {
    stream.alloc_zeros(len).unwrap()
}

/// No thread, nothing leaked, nothing unordered.
fn check(sim: &Sim, before: Live) {
    assert_eq!(threads("twinbuf-stage"), 0);
    sim.drain();
    assert_eq!(sim.live().leaked(), before);
    assert_eq!(sim.violations(), [""; 0]);
}

#[test]
fn pieces_of_all_lengths_arrive_whole_and_come_back() {
    must_end(|| {
        for seed in 0..48 {
            let pools = seed % 3 != 0;
            let sim = Sim::start(Options { delay_us: 10, pools, ..Options::seeded(seed) });
            let ctx = twinbuf_cuda::context(0).unwrap();
            if seed % 2 == 0 {
                // SAFETY: one stream uses everything.
                unsafe { ctx.disable_event_tracking() };
            }
            let stream = ctx.new_stream().unwrap();
            let (before, control) = (sim.live().leaked(), sim.control());
            let seed = seed as usize;
            let (slot, depth, fill_threads) =
                ([64, 100, 256, 1 << 16][seed % 4], seed % 8 + 1, seed / 4 % 4 + 1);
            let stager = Stager::new(&ctx).slot_bytes(slot).depth(depth).fill_threads(fill_threads);
            let mut stager = stager.build().unwrap();
            if !sim.is_real() {
                let held = sim.live().host_bytes - before.host_bytes;
                assert_eq!(held, (slot * depth * fill_threads) as u64);
            }
            for round in 0..3 {
                let lens = [1, 3, 64, 0, 700, 255, 256, 257, 2000, 5];
                let data: Vec<_> = lens.iter().enumerate().map(|(i, len)| pattern(i + round, *len)).collect();
                let mut memory: Vec<_> = lens.iter().map(|len| device(&stream, len + 1)).collect();
                stager
                    .scope(&stream, |to| {
                        for (i, (bytes, memory)) in data.iter().zip(&mut memory).enumerate() {
                            let part = memory.slice_mut(1..);
                            if i % 2 == 0 {
                                to.upload(bytes, part)?;
                            } else {
                                let fill = move |at: usize, out: &mut [u8]| {
                                    control.host_write(&raw const *out);
                                    out.copy_from_slice(&bytes[at..][..out.len()]);
                                    Ok(())
                                };
                                to.upload_with(fill, part)?;
                            }
                        }
                        Ok::<_, Error>(())
                    })
                    .unwrap();
                for (bytes, memory) in data.iter().zip(&memory) {
                    assert_eq!(stream.clone_dtoh(memory).unwrap()[1..], bytes[..]);
                }
                let mut back: Vec<_> = lens.iter().map(|len| vec![0xEE; *len]).collect();
                let sum = AtomicUsize::new(0);
                stager
                    .scope(&stream, |to| {
                        for (out, memory) in back.iter_mut().zip(&memory) {
                            to.offload(memory.slice(1..), out)?;
                            to.offload_with(memory.as_view(), |at, bytes| {
                                control.host_read(&raw const *bytes);
                                let used = if at == 0 { &bytes[1..] } else { bytes };
                                let used: usize = used.iter().map(|byte| usize::from(*byte)).sum();
                                sum.fetch_add(used, Ordering::Relaxed);
                                Ok(())
                            })?;
                        }
                        Ok::<_, Error>(())
                    })
                    .unwrap();
                assert_eq!(back, data);
                let all: usize = data.iter().flatten().map(|byte| usize::from(*byte)).sum();
                assert_eq!(sum.into_inner(), all);
            }
            drop(stager);
            ctx.bind_to_thread().unwrap();
            check(&sim, before);
        }
    });
}

/// The slices of one layout of a checkpoint, many to an allocation: a copy for every run within a slot.
#[test]
fn many_small_slices_are_few_copies() {
    must_end(|| {
        const SLICES: usize = 26_677;
        const ALLOCATIONS: usize = 1300;
        let (sim, ctx) = start(1, false);
        let stream = ctx.new_stream().unwrap();
        let bytes = pattern(1, SLICES * 32);
        let of = |i: usize| SLICES * i / ALLOCATIONS..SLICES * (i + 1) / ALLOCATIONS;
        let mut memory: Vec<_> = (0..ALLOCATIONS).map(|i| device(&stream, of(i).len() * 32)).collect();
        let mut stager = Stager::new(&ctx).slot_bytes(16 << 10).build().unwrap();
        let mut pieces = bytes.chunks(32);
        stager
            .scope(&stream, |to| {
                for memory in &mut memory {
                    for part in memory.as_view_mut().chunks_exact_mut(32) {
                        to.upload(pieces.next().unwrap(), part)?;
                    }
                }
                Ok::<_, Error>(())
            })
            .unwrap();
        let copies = sim.calls_of("cuMemcpyHtoDAsync_v2");
        println!("{SLICES} slices in {ALLOCATIONS} allocations: {copies} copies");
        assert!(sim.is_real() || (ALLOCATIONS as u64..=1500).contains(&copies), "{copies}");
        let found: Vec<u8> = memory.iter().flat_map(|memory| stream.clone_dtoh(memory).unwrap()).collect();
        assert_eq!(found, bytes);
    });
}
