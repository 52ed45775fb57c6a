//! Streams of tensors to a device, on the software driver: every byte by name, held leases, other streams, faults.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::upload::{is_clean, start};
use crate::common::model::Model;
use crate::common::until;
use twinbuf::cuda::cudarc::driver::{CudaContext, CudaStream};
use twinbuf::loader::{Cuda, MemoryLimit};
use twinbuf::stream::{Group, StreamBuilder, Tensors};
use twinbuf::{Error, mmap, stream};
use twinbuf_cuda_sim::checksum_of;

/// Layers of different sizes, one of them with an empty tensor; short, because the device is software.
const SHORT: [usize; 6] = [4000, 3, 0, 25_000, 700, 9];

fn device(model: &Model, ctx: &Arc<CudaContext>) -> StreamBuilder<Cuda> {
    stream(model.groups()).cuda(ctx.clone())
}

/// Compares each tensor with the model's, read back by its name.
fn check(model: &Model, group: &Group<Cuda>, number: usize, on: &Arc<CudaStream>) {
    assert_eq!(group.number(), number);
    let names: Vec<_> = group.tensors().map(|view| view.tensor().name().to_string()).collect();
    let (up, down) = (format!("m.{number}.mlp.up"), format!("m.{number}.down"));
    assert!(names.len() == 2 && names.contains(&up) && names.contains(&down), "{names:?}");
    let up = group.tensor("mlp.up").unwrap();
    assert_eq!(up.tensor().shape(), [model.numbers[number].len()]);
    let view = up.on::<u16>(on).unwrap();
    assert_eq!((view.len(), up.range().len()), (model.numbers[number].len(), 2 * view.len()));
    let mut found = vec![0; view.len()];
    if !view.is_empty() {
        on.memcpy_dtoh(&view, &mut found).unwrap();
    }
    let view = group.tensor(&down).unwrap().on::<f32>(on).unwrap();
    let mut four = [0.0; 4];
    on.memcpy_dtoh(&view, &mut four).unwrap();
    on.synchronize().unwrap();
    assert!(found == model.numbers[number], "layer {number}");
    assert_eq!(four, [number as f32; 4]);
}

#[test]
fn every_tensor_by_its_name_in_three_passes() {
    let model = Model::new(&SHORT);
    for (cycle, overlap, host, device_depth) in [
        (true, true, 2, 2),
        (false, true, 2, 2),
        (true, false, 2, 2),
        (true, true, 2, 1),
        (false, false, 1, 1),
        (true, true, 3, 8),
    ] {
        for keep in [0, 2, SHORT.len()] {
            let (sim, ctx) = start(keep as u64);
            let on = ctx.new_stream().unwrap();
            let builder = device(&model, &ctx).overlap(overlap).depth(host).keep(keep);
            let builder = builder.device_depth(device_depth);
            let builder = if cycle { builder.cycle() } else { builder };
            let mut layers = builder.build().unwrap();
            assert_eq!(layers.kept(), keep);
            let mut read = 0;
            for pass in 0..3 {
                let mut count = 0;
                for (number, group) in layers.pass().enumerate() {
                    let group = group.unwrap();
                    check(&model, &group, number, &on);
                    assert_eq!(group.pass(), pass);
                    count += 1;
                }
                assert_eq!(count, SHORT.len());
                if pass == 0 {
                    read = layers.report().reading.bytes;
                }
            }
            // A copy thread checks its last copies when it gets to them.
            until(|| layers.report().transfer_bytes >= layers.report().bytes);
            let report = layers.report();
            let pass: usize = (0..SHORT.len()).map(|group| layers.groups().bytes(group)).sum();
            assert_eq!((report.epochs, report.batches, report.bytes), (3, 18, 3 * pass as u64));
            // What is kept is read once.
            assert!(keep < SHORT.len() || report.reading.bytes == read, "{}", report.reading.bytes);
            layers.close().unwrap();
            drop(on);
            is_clean(&sim, ctx);
        }
    }
}

#[test]
fn a_lease_that_is_kept_is_never_overwritten() {
    let model = Model::new(&SHORT);
    for overlap in [true, false] {
        let (sim, ctx) = start(5);
        let on = ctx.new_stream().unwrap();
        let builder = device(&model, &ctx).cycle().overlap(overlap).device_depth(3);
        let mut layers = builder.held_timeout(Duration::from_millis(20)).build().unwrap();
        let mut pass = layers.pass();
        let held = pass.next().unwrap().unwrap();
        for number in 1..3 {
            check(&model, &pass.next().unwrap().unwrap(), number, &on);
        }
        // Slots are filled in turn: the next one is held.
        assert!(matches!(pass.next_timeout(Duration::ZERO), Poll::Pending));
        check(&model, &held, 0, &on);
        let error = pass.next().unwrap().unwrap_err();
        assert!(matches!(error, Error::SlotHeld { option: "device_depth", slots: 3, .. }), "{error}");
        assert!(pass.next().is_none());
        drop(pass);
        check(&model, &held, 0, &on);
        drop(held);
        for (number, group) in layers.pass().enumerate() {
            check(&model, &group.unwrap(), number, &on);
        }
        // The last ones outlive their stream.
        let mut pass = layers.pass();
        let held: Vec<Group<Cuda>> = (0..3).map(|_| pass.next().unwrap().unwrap()).collect();
        drop(pass);
        drop(layers);
        held.iter().enumerate().for_each(|(number, group)| check(&model, group, number, &on));
        drop(held);
        assert_eq!(sim.violations(), [""; 0]);
    }
}

/// Kernels on two streams read each layer, and run long after its lease was dropped.
#[test]
fn a_use_on_any_stream_comes_between_two_copies() {
    let model = Model::new(&SHORT);
    for seed in 0..20 {
        let (sim, ctx) = start(seed);
        if sim.is_real() {
            return;
        }
        let streams = [ctx.new_stream().unwrap(), ctx.new_stream().unwrap()];
        let mut layers = device(&model, &ctx).cycle().overlap(seed % 2 == 0).build().unwrap();
        let mut sums = Vec::new();
        for _pass in 0..3 {
            for (number, group) in layers.pass().enumerate() {
                let group = group.unwrap();
                let bytes: Vec<u8> = model.numbers[number].iter().flat_map(|n| n.to_le_bytes()).collect();
                if bytes.is_empty() {
                    continue;
                }
                for on in &streams {
                    let view = group.tensor("mlp.up").unwrap().on::<u16>(on).unwrap();
                    let kernel = sim.kernel_read(on.cu_stream(), view.address(), bytes.len(), 200).unwrap();
                    sums.push((kernel.unwrap(), checksum_of(&bytes)));
                }
            }
        }
        layers.close().unwrap();
        for (kernel, wanted) in sums {
            assert_eq!(sim.checksum(kernel), Some(wanted), "seed {seed}");
        }
        assert_eq!(sim.violations(), [""; 0], "seed {seed}");
    }
}

#[test]
fn a_stream_is_dropped_in_mid_read() {
    let model = Model::new(&[100_000; 4]);
    for taken in 0..4 {
        for held in [true, false] {
            let (sim, ctx) = start(taken as u64);
            let on = ctx.new_stream().unwrap();
            let mut layers = device(&model, &ctx).cycle().build().unwrap();
            let mut pass = layers.pass();
            let last = (0..taken).map(|_| pass.next().unwrap().unwrap()).last();
            drop(pass);
            if held {
                drop(layers);
                last.iter().for_each(|group| check(&model, group, taken - 1, &on));
                drop(last);
            } else {
                drop((last, layers));
            }
            drop(on);
            is_clean(&sim, ctx);
        }
    }
}

#[test]
fn every_call_of_the_driver_that_fails_is_one_error_and_no_hang() {
    let model = Model::new(&[50, 3, 0, 700]);
    super::upload::every_call_fails_in_turn(4, |ctx, on, overlap, received| {
        let mut layers = device(&model, ctx).overlap(overlap).build()?;
        for group in layers.pass() {
            let group = group?;
            assert_eq!(group.number() as u64, *received, "in order");
            *received += 1;
            // A failure here is the caller's call; no group is lost by it.
            let used = group.tensor("mlp.up").unwrap().on::<u16>(on);
            assert!(matches!(used, Ok(_) | Err(Error::Device(_))), "{used:?}");
        }
        layers.close()
    });
}

#[test]
fn types_options_and_the_limit_are_checked() {
    let model = Model::new(&SHORT);
    let (sim, ctx) = start(1);
    let on = ctx.new_stream().unwrap();
    for depth in [0, usize::MAX] {
        let error = device(&model, &ctx).device_depth(depth).build().unwrap_err();
        let refused = matches!(error, Error::Option { option: "device_depth" | "depth", .. });
        assert!(refused, "{depth}: {error}");
    }
    let mut layers = device(&model, &ctx).build().unwrap();
    let group = layers.pass().next().unwrap().unwrap();
    let error = group.tensor("mlp.up").unwrap().on::<f32>(&on).unwrap_err();
    assert_eq!(error.to_string(), "epoch 0, step 0: tensor \"m.0.mlp.up\": wanted bf16 [4000], found f32");
    let error = group.tensor("down").unwrap().on::<[f32; 3]>(&on).unwrap_err();
    assert!(matches!(&error, Error::Tensor { found, .. } if found == "16 bytes"), "{error}");
    let error = group.tensor("nothing").unwrap_err();
    assert!(matches!(error, Error::Tensor { .. }), "{error}");
    assert_eq!(group.lease().len(), layers.groups().bytes(0));
    drop((group, layers));
    // A group without a byte.
    let empty = Tensors::open([&model.path]).unwrap().groups([["m.2.mlp.up"]]).unwrap();
    let mut layers = stream(empty).cuda(ctx.clone()).build().unwrap();
    for group in layers.pass() {
        assert!(group.unwrap().tensor("up").unwrap().on::<u16>(&on).unwrap().is_empty());
    }
    drop(layers);
    // Both kinds of slots count.
    let largest = (0..SHORT.len()).map(|group| model.groups().bytes(group) as u64).max().unwrap();
    let least = mmap::Reader::<mmap::Groups>::MEMORY + 4 * largest;
    let limit = MemoryLimit::new(least - 1);
    let error = device(&model, &ctx).memory_limit(&limit).build().unwrap_err();
    assert!(matches!(error, Error::Memory { wanted, .. } if wanted == least), "{error}");
    assert!(error.to_string().contains("2 host slots and 2 device slots of"), "{error}");
    assert_eq!(limit.taken(), 0);
    let limit = MemoryLimit::new(least + model.groups().bytes(0) as u64);
    let mut layers = device(&model, &ctx).memory_limit(&limit).build().unwrap();
    assert!(layers.kept() > 0 && limit.taken() <= least + model.groups().bytes(0) as u64);
    let last = layers.pass().map(Result::unwrap).last();
    drop(layers);
    assert!(limit.taken() > 0, "the last group counts");
    drop(last);
    assert_eq!(limit.taken(), 0);
    assert_eq!(sim.violations(), [""; 0]);
}
