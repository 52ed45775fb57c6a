//! candle's own loaders, and ours for candle.

use std::path::Path;

use candle_core::safetensors::{self, MmapedSafetensors};
use candle_core::{CpuStorage, Device, Storage, Tensor};
use twinbuf::BoxError;
use twinbuf_bench_weights::{Run, compute, open};

const HELP: &str = "\
candle WAY FILE PASSES REPEATS LIMIT
    candle     MmapedSafetensors: each layer is loaded, then computed on
    ours       twinbuf_candle::load: the whole checkpoint
    load       candle_core::safetensors::load: the same
    mmap       MmapedSafetensors, all tensors: the same";

fn main() -> Result<(), BoxError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [way, file, passes, repeats, _] = &*args else { return Err(HELP.into()) };
    let (path, passes, repeats): (&Path, usize, usize) = (file.as_ref(), passes.parse()?, repeats.parse()?);
    let mut x = 1.0;
    let mut run = Run::start();
    let device = Device::Cpu;
    // SAFETY: nobody truncates the file while it is mapped.
    let mapped = || unsafe { MmapedSafetensors::new(path) };
    match &**way {
        "candle" => {
            let model = mapped()?;
            for _ in 0..passes {
                for layer in 0..model.tensors().len() {
                    let layer = model.load(&format!("layers.{layer}.up"), &device)?;
                    x = numbers(&layer, |weights| compute(weights, repeats, x))?;
                }
                run.end_of_pass();
            }
        }
        _ => {
            let tensors = match &**way {
                "ours" => twinbuf_candle::load(&open(path)?.0, &device)?,
                "load" => safetensors::load(path, &device)?,
                "mmap" => {
                    let model = mapped()?;
                    let names = model.tensors().into_iter().map(|(name, _)| name);
                    names
                        .map(|name| Ok((name.clone(), model.load(&name, &device)?)))
                        .collect::<Result<_, BoxError>>()?
                }
                _ => return Err(HELP.into()),
            };
            run.end_of_pass();
            // All bytes, in the order of the layers.
            for layer in 0..tensors.len() {
                x = numbers(&tensors[&format!("layers.{layer}.up")], |weights| compute(weights, 1, x))?;
            }
        }
    }
    run.print(way, x.to_bits());
    Ok(())
}

fn numbers<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R, BoxError> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(numbers)) => Ok(f(numbers)),
        _ => Err("a tensor of another type".into()),
    }
}
