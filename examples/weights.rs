//! Generates tokens with a model that is larger than the memory it is given: while a layer computes, the next one is
//! read.
//!
//! ```sh
//! cargo run --release --features safetensors --example weights               # 24 layers of 6 MiB in 38 MiB
//! cargo run --release --features safetensors --example weights -- 24 2048    # layers, hidden size: 96 MiB a layer
//! ```
//!
//! The model is random: gated layers in the shape of Llama's, without attention. A program with a real one opens its
//! `model.safetensors.index.json` or its GGUF.

use std::path::Path;
use std::time::Instant;

use twinbuf::mmap::Tensor;
use twinbuf::stream::{Group, Tensors};
use twinbuf::{BoxError, stream};

#[path = "data/model.rs"]
mod model;

fn main() -> Result<(), BoxError> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<_, _>>()?;
    let (layers, hidden) = (*numbers.first().unwrap_or(&24), *numbers.get(1).unwrap_or(&512));
    let folder = std::env::temp_dir().join(format!("twinbuf-weights-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("model.safetensors");
    let generated = model::make(&path, layers, hidden).and_then(|()| generate(&path, hidden));
    std::fs::remove_dir_all(&folder)?;
    generated
}

fn generate(path: &Path, hidden: usize) -> Result<(), BoxError> {
    let model = Tensors::open([path])?;
    // "model.layers.17.mlp.up_proj.weight" is of layer 17.
    let layer_of = |name: &str| name.strip_prefix("model.layers.")?.split('.').next()?.parse::<u32>().ok();
    let layers = model.groups_by(layer_of)?;
    let bytes: u64 = model.all().iter().map(Tensor::len).sum();
    // Two layers, and some that stay in memory and are read once.
    let limit = 2 * layers.bytes(0) as u64 + bytes / 8 + (8 << 20);
    let mut layers = stream(layers).cycle().memory_limit(limit).build()?;
    println!("{} MiB of weights in {} MiB; {} layers stay", bytes >> 20, limit >> 20, layers.kept());

    let mut x = vec![1.0f32; hidden];
    for token in 0..4 {
        let started = Instant::now();
        for layer in layers.pass() {
            x = forward(&layer?, &x)?; // the layer is in memory; the next one is being read
        }
        println!("token {token}: {:.3} s, x[0] = {}", started.elapsed().as_secs_f64(), x[0]);
    }
    println!("{}", layers.report());
    Ok(layers.close()?)
}

/// x + down(silu(gate(x)) * up(x)), normalized.
fn forward(layer: &Group, x: &[f32]) -> Result<Vec<f32>, BoxError> {
    let weights = |name: &str| layer.tensor(name)?.cast::<u16>();
    let (gate, up) = (weights("mlp.gate_proj.weight")?, weights("mlp.up_proj.weight")?);
    let gated = model::gated(&model::product(gate, x), &model::product(up, x));
    Ok(model::normalized(x, &model::product(weights("mlp.down_proj.weight")?, &gated)))
}
