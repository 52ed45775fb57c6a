//! Copies to and from memory that the caller allocated: bytes, splits and runs, order, borrowing, errors.
#![allow(clippy::cast_possible_truncation)] // of small counts

#[allow(dead_code)]
#[path = "../../examples/stage.rs"]
mod stage;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::common::{
    LAUNCH_FAILED, from, make_current, pattern, start, start_software, start_software_with, start_with,
    threads,
};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};
use twinbuf_cuda::{Error, Stager, StagerBuilder};
use twinbuf_cuda_sim::{Failure, Live, Options, Sim};

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Stager>();
    shared::<StagerBuilder>();
};

fn small(ctx: &Arc<CudaContext>) -> StagerBuilder {
    Stager::new(ctx).slot_bytes(256).depth(2).fill_threads(2)
}

fn device(stream: &Arc<CudaStream>, len: usize) -> CudaSlice<u8> {
    stream.alloc_zeros(len).unwrap()
}

/// No thread, nothing leaked.
fn check(sim: &Sim, before: Live) {
    assert_eq!(threads("twinbuf-stage"), 0);
    sim.drain();
    assert_eq!(sim.live().leaked(), before);
}

#[test]
fn pieces_of_all_lengths_arrive_whole_and_come_back() {
    for seed in 0..24 {
        let pools = seed % 3 != 0;
        let (sim, ctx) = start_with(Options { delay_us: 10, pools, ..Options::seeded(seed) }, seed % 2 != 0);
        let stream = ctx.new_stream().unwrap();
        let before = sim.live().leaked();
        let seed = seed as usize;
        let (slot, depth, fill_threads) = ([64, 100, 256, 1 << 16][seed % 4], seed % 8 + 1, seed / 4 % 4 + 1);
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
                        match i % 2 {
                            0 => to.upload(bytes, part)?,
                            _ => to.upload_with(from(bytes), part)?,
                        }
                    }
                    Ok::<_, Error>(())
                })
                .unwrap();
            for (bytes, memory) in data.iter().zip(&memory) {
                assert_eq!(stream.clone_dtoh(memory).unwrap()[1..], bytes[..]);
            }
            let mut back: Vec<_> = lens.iter().map(|len| vec![0xEE; *len]).collect();
            let mut whole: Vec<_> = lens.iter().map(|len| vec![0xEE; len + 1]).collect();
            stager
                .scope(&stream, |to| {
                    for ((out, whole), memory) in back.iter_mut().zip(&mut whole).zip(&memory) {
                        to.offload(memory.slice(1..), out)?;
                        to.offload(memory.as_view(), whole)?;
                    }
                    Ok::<_, Error>(())
                })
                .unwrap();
            assert_eq!(back, data);
            assert!(whole.iter().zip(&data).all(|(whole, data)| whole[1..] == data[..]));
        }
        drop(stager);
        ctx.bind_to_thread().unwrap();
        check(&sim, before);
    }
}

/// A fill that converts sees whole elements, aligned in the slot, whatever was packed before and however long a slot is.
#[test]
fn parts_of_a_fill_are_whole_aligned_elements() {
    let (sim, ctx) = start(1, false);
    let stream = ctx.new_stream().unwrap();
    let before = sim.live().leaked();
    let halves: Vec<u16> = (0..500).collect();
    let fill = |at: usize, out: &mut [u8]| {
        assert_eq!((at % 4, out.len() % 4, out.as_ptr().addr() % 4), (0, 0, 0));
        for (four, half) in out.chunks_exact_mut(4).zip(&halves[at / 4..]) {
            four.copy_from_slice(&f32::from(*half).to_le_bytes());
        }
        Ok(())
    };
    let wanted: Vec<u8> = halves.iter().flat_map(|half| f32::from(*half).to_le_bytes()).collect();
    for slot in [4, 5, 7, 64, 65, 66, 67, 4096] {
        let mut stager = Stager::new(&ctx).slot_bytes(slot).build().unwrap();
        // Neighbours in device memory are apart in the slot.
        let mut memory = device(&stream, 3 + 2000 + 1);
        let (mask, mut rest) = memory.split_at_mut(3);
        let (mut weights, end) = rest.split_at_mut(2000);
        // SAFETY: as many bytes, and only copies access them.
        let weights = unsafe { weights.transmute_mut::<f32>(500) }.unwrap();
        stager
            .scope(&stream, |to| {
                to.upload(&[1; 3], mask)?;
                to.upload_with(fill, weights)?;
                to.upload(&[2], end)
            })
            .unwrap();
        let found = stream.clone_dtoh(&memory).unwrap();
        assert_eq!(found[..3], [1; 3], "{slot}");
        assert!(found[3..2003] == wanted[..], "{slot}");
        assert_eq!(found[2003], 2, "{slot}");
    }
    let mut stager = Stager::new(&ctx).slot_bytes(3).build().unwrap();
    let mut memory = stream.alloc_zeros::<f32>(500).unwrap();
    let (refused, rest) = memory.split_at_mut(250);
    stager
        .scope(&stream, |to| {
            let error = to.upload_with(fill, refused).unwrap_err();
            let text = "option `slot_bytes`: wanted at least 4, the bytes of an element, found 3";
            assert_eq!(error.to_string(), text);
            to.upload(&wanted[1000..], rest) // bytes are cut anywhere
        })
        .unwrap();
    let found = stream.clone_dtoh(&memory).unwrap();
    assert!(found.iter().zip(0..500_u16).all(|(found, i)| *found == f32::from(if i < 250 { 0 } else { i })));
    drop((stager, memory));
    check(&sim, before);
}

/// The slices of one layout of a checkpoint, many to an allocation: a copy for every run within a slot. Allocations may
/// follow each other in memory, and a copy across their border is refused by the driver.
#[test]
fn many_small_slices_are_few_copies() {
    const SLICES: usize = 16 * ALLOCATIONS;
    const ALLOCATIONS: usize = 1300;
    let (sim, ctx) = start(1, false);
    let stream = ctx.new_stream().unwrap();
    let bytes = pattern(1, SLICES * 32);
    let mut memory: Vec<_> = (0..ALLOCATIONS).map(|_| device(&stream, 512)).collect();
    let at = |memory: &CudaSlice<u8>| memory.device_ptr(&stream).0;
    assert!(sim.is_real() || memory.windows(2).any(|two| at(&two[0]) + 512 == at(&two[1])));
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
}

/// The example: a checkpoint, as people load it.
#[test]
fn a_checkpoint_arrives_tensor_by_tensor() {
    let (_sim, ctx) = start(1, true);
    let shapes = [("up", 700), ("down", 33), ("scale", 0), ("norm", 4096)];
    let data = (0..).zip(shapes).flat_map(|(i, (_, len))| pattern(i, len));
    let file = twinbuf_testing::safetensors(shapes.map(|(name, len)| (name, "U8", [len], len)), data);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::fs::write(&path, file).unwrap();
    let stream = ctx.new_stream().unwrap();
    let weights = stage::load(&path, &stream).unwrap();
    assert_eq!(weights.len(), 3); // CUDA has no empty allocations
    for (i, (name, len)) in shapes.into_iter().enumerate().filter(|(_, (_, len))| *len > 0) {
        assert_eq!(stream.clone_dtoh(&weights[name]).unwrap(), pattern(i, len), "{name}");
    }
    drop(weights);
}

/// Fresh memory, memory in use, and memory that is used and freed right after the scope; on cudarc's streams of all kinds.
#[test]
fn copies_come_after_the_streams_work_and_before_its_later_work() {
    for (seed, tracking) in (0..12).flat_map(|seed| [(seed, false), (seed, true)]) {
        let (sim, ctx) =
            start_with(Options { delay_us: 30, pools: seed % 2 == 0, ..Options::seeded(seed) }, tracking);
        let streams = [ctx.new_stream().unwrap(), ctx.default_stream(), ctx.per_thread_stream()];
        let before = sim.live().leaked();
        let mut stager = small(&ctx).build().unwrap();
        for (i, stream) in streams.iter().enumerate() {
            let bytes = pattern(i, 600);
            let mut memory = device(stream, 600);
            let mut back = vec![0; 600];
            let raw = memory.device_ptr(stream).0;
            let used = sim.kernel_read(stream.cu_stream(), raw, 600, 100).unwrap();
            stager.scope(stream, |to| to.upload(&bytes, memory.as_view_mut())).unwrap();
            let read = sim.kernel_read(stream.cu_stream(), raw, 600, 100).unwrap();
            stager.scope(stream, |to| to.offload(memory.as_view(), &mut back)).unwrap();
            stream.memset_zeros(&mut memory).unwrap();
            if tracking && i == 0 {
                // cudarc orders another stream after the upload, which is not its own.
                stager.scope(stream, |to| to.upload(&bytes, memory.as_view_mut())).unwrap();
                assert_eq!(streams[1].clone_dtoh(&memory).unwrap(), bytes);
            }
            drop(memory);
            assert_eq!(back, bytes);
            if let (Some(used), Some(read)) = (used, read) {
                assert_eq!(sim.checksum(used), Some(twinbuf_cuda_sim::checksum_of(&[0; 600])));
                assert_eq!(sim.checksum(read), Some(twinbuf_cuda_sim::checksum_of(&bytes)));
            }
        }
        drop(stager);
        check(&sim, before);
    }
}

#[test]
fn options_and_lengths_out_of_range_are_refused() {
    let (_sim, ctx) = start(1, false);
    let stream = ctx.new_stream().unwrap();
    for (option, builder) in [
        ("slot_bytes", Stager::new(&ctx).slot_bytes(0)),
        ("depth", Stager::new(&ctx).depth(0)),
        ("depth", Stager::new(&ctx).depth((1 << 16) + 1)),
        ("fill_threads", Stager::new(&ctx).fill_threads(0)),
        ("fill_threads", Stager::new(&ctx).fill_threads(65)),
    ] {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::Option { option: found, .. } if found == option), "{error}");
    }
    let mut stager = small(&ctx).build().unwrap();
    let mut memory = stream.alloc_zeros::<u32>(8).unwrap();
    let error = stager.scope(&stream, |to| to.upload(&[1; 31], memory.as_view_mut())).unwrap_err();
    assert_eq!(error.to_string(), "option `bytes`: wanted 32 bytes, as many as the view has, found 31");
    let mut out = [0; 33];
    let error = stager.scope(&stream, |to| to.offload(memory.as_view(), &mut out)).unwrap_err();
    assert!(matches!(error, Error::Option { option: "bytes", .. }), "{error}");
    // A refused piece takes nothing with it.
    let ones = [1; 32];
    stager
        .scope(&stream, |to| {
            let mut parts = memory.as_view_mut().chunks_exact_mut(4);
            to.upload(&ones[..16], parts.next().unwrap())?;
            assert!(to.upload(&ones, parts.next().unwrap()).is_err());
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!(
        stream.clone_dtoh(&memory).unwrap(),
        [0x0101_0101, 0x0101_0101, 0x0101_0101, 0x0101_0101, 0, 0, 0, 0]
    );
}

#[test]
fn another_context_is_refused() {
    let options = Options { devices: 2, delay_us: 0, ..Options::default() };
    let Some((_sim, here)) = start_software_with(options) else { return };
    let there = twinbuf_cuda::context(1).unwrap();
    let (stream, other) = (here.default_stream(), there.default_stream());
    let mut memory = other.alloc_zeros::<u8>(8).unwrap();
    let mut stager = small(&here).build().unwrap();
    assert_eq!(stager.scope(&other, |_| Ok::<_, Error>(())).unwrap_err(), Error::OtherContext);
    let upload = stager.scope(&stream, |to| to.upload(&[1; 8], memory.as_view_mut()));
    assert_eq!(upload.unwrap_err(), Error::OtherContext);
}

/// An error of the caller's, a fill's, and a panic in either: copies end before anything returns.
#[test]
fn whatever_fails_waits_for_the_copies_and_the_stager_works_afterwards() {
    for (seed, way) in (0..8).flat_map(|seed| (0..5).map(move |way| (seed, way))) {
        let (sim, ctx) = start_with(Options { delay_us: 60, ..Options::seeded(seed) }, false);
        let stream = ctx.new_stream().unwrap();
        let before = sim.live().leaked();
        let mut stager = small(&ctx).build().unwrap();
        let mut memory = device(&stream, 3000);
        let bytes = pattern(3, 3000);
        let fill = |at: usize, out: &mut [u8]| match way {
            0 if at >= 1024 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "cut off")),
            1 if at >= 1024 => panic!("in a fill"),
            _ => from(&bytes)(at, out),
        };
        let mut work = || {
            stager.scope(&stream, |to| {
                if way == 4 {
                    // The error of a call is the scope's, also if the closure ignores it.
                    let _ = to.upload_with(|_, _| Err(io::Error::other("lost")), memory.as_view_mut());
                    return Ok(());
                }
                to.upload_with(fill, memory.as_view_mut())?;
                match way {
                    2 => Err(Error::Closed),
                    3 => panic!("in the closure"),
                    _ => Ok(()),
                }
            })
        };
        let result = catch_unwind(AssertUnwindSafe(&mut work));
        match (way, result) {
            (0, Ok(Err(Error::Fill { kind: io::ErrorKind::UnexpectedEof, message }))) => {
                assert_eq!(message, "cut off");
            }
            (1, Err(panic)) => assert_eq!(panic.downcast_ref(), Some(&"in a fill")),
            (2, Ok(Err(Error::Closed))) => {}
            (3, Err(panic)) => assert_eq!(panic.downcast_ref(), Some(&"in the closure")),
            (4, Ok(Err(Error::Fill { message, .. }))) => assert_eq!(message, "lost"),
            (_, other) => panic!("{way}: {other:?}"),
        }
        assert_eq!(threads("twinbuf-stage"), 0);
        // The host has waited: a free by the host comes after the copies, which ran on another stream.
        stream.synchronize().unwrap();
        let raw = memory.leak();
        // SAFETY: allocated above, with or without pools.
        unsafe { result::free_sync(raw) }.unwrap();
        let mut memory = device(&stream, 3000);
        stager.scope(&stream, |to| to.upload(&bytes, memory.as_view_mut())).unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), bytes);
        drop((stager, memory));
        check(&sim, before);
    }
}

/// The calling thread's context is the caller's, and a fill may change its own thread's.
#[test]
fn contexts_are_left_as_they_were() {
    let (_sim, ctx) = start(1, true);
    let stream = ctx.new_stream().unwrap();
    let mut memory = device(&stream, 1000);
    make_current(None);
    let mut stager = small(&ctx).build().unwrap();
    let none = || assert_eq!(result::ctx::get_current().unwrap(), None);
    none();
    stager
        .scope(&stream, |to| {
            none();
            to.upload_with(
                move |_, out| {
                    make_current(None);
                    out.fill(7);
                    Ok(())
                },
                memory.as_view_mut(),
            )?;
            none();
            Ok::<_, Error>(())
        })
        .unwrap();
    none();
    drop(stager);
    none();
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [7; 1000]);
}

/// cudarc keeps the errors of its own waits and records. Without them the memory would not be ordered with other streams.
#[test]
fn what_cudarc_could_not_enqueue_fails_the_scope() {
    for (call, nth) in [("cuStreamWaitEvent", 1), ("cuEventRecord", 4)] {
        let (sim, ctx) = start(1, true);
        if sim.is_real() {
            return;
        }
        let stream = ctx.new_stream().unwrap();
        let mut memory = device(&ctx.new_stream().unwrap(), 64);
        let mut stager = small(&ctx).build().unwrap();
        // One slot: records of `ready`, of `copied` and of the end come before cudarc's.
        sim.inject(Failure::api(call, nth, LAUNCH_FAILED));
        let error = stager.scope(&stream, |to| to.upload(&[1; 64], memory.as_view_mut())).unwrap_err();
        assert!(matches!(&error, Error::Driver { call: found, .. } if *found == call), "{error}");
        stager.scope(&stream, |to| to.upload(&[2; 64], memory.as_view_mut())).unwrap();
        assert_eq!(ctx.default_stream().clone_dtoh(&memory).unwrap(), [2; 64]);
    }
}

/// Its slots are freed after their copies, which nobody has waited for, or stay allocated. The stream waits for the copies.
#[test]
fn a_stager_may_be_dropped_or_forgotten_while_its_copies_run() {
    for forget in [false, true] {
        let (_sim, ctx) = start_with(Options { delay_us: 50, ..Options::default() }, true);
        let stream = ctx.new_stream().unwrap();
        let mut memory = device(&stream, 600);
        let mut stager = small(&ctx).fill_threads(1).build().unwrap();
        stager.scope(&stream, |to| to.upload(&[3; 600], memory.as_view_mut())).unwrap();
        if forget {
            std::mem::forget(stager);
        } else {
            drop(stager);
        }
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [3; 600], "forget {forget}");
    }
}

/// Slots that a copy may still use are neither filled again nor freed.
#[test]
fn a_stager_whose_copies_cannot_be_waited_for_has_ended() {
    let Some((sim, ctx)) = start_software() else { return };
    let stream = ctx.new_stream().unwrap();
    let mut memory = device(&stream, 100);
    let before = sim.live().leaked();
    let mut stager = small(&ctx).build().unwrap();
    sim.inject(Failure::api("cuMemcpyHtoDAsync_v2", 1, LAUNCH_FAILED));
    sim.inject(Failure::api("cuStreamSynchronize", 1, LAUNCH_FAILED).times(2));
    let mut upload = || stager.scope(&stream, |to| to.upload(&[1; 100], memory.as_view_mut()));
    let error = upload().unwrap_err();
    assert!(matches!(error, Error::Driver { call: "cuMemcpyHtoDAsync", .. }), "{error}");
    let error = upload().unwrap_err();
    assert!(matches!(error, Error::Driver { call: "cuStreamSynchronize", .. }), "{error}");
    drop(stager);
    assert_eq!(sim.live().leaked().host_allocations, before.host_allocations + 4);
}
