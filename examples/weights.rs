//! Generates tokens with a model that is larger than the memory it is given: while a layer computes, the next one is read.
//!
//! ```sh
//! cargo run --release --features safetensors --example weights               # 24 layers of 6 MiB in 38 MiB
//! cargo run --release --features safetensors --example weights -- 24 2048    # layers, and the hidden size: 96 MiB a layer
//! ```
//!
//! The model is random: gated layers in the shape of Llama's, without attention. A program with a real one opens its
//! `model.safetensors.index.json` or its GGUF, and changes nothing else here.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use twinbuf::stream::{Group, Tensor, Tensors};
use twinbuf::{BoxError, stream};

const TOKENS: usize = 4;

fn main() -> Result<(), BoxError> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<_, _>>()?;
    let (layers, hidden) = (*numbers.first().unwrap_or(&24), *numbers.get(1).unwrap_or(&512));
    let folder = std::env::temp_dir().join(format!("twinbuf-weights-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("model.safetensors");
    let generated = make(&path, layers, hidden).and_then(|()| generate(&path, hidden));
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
    println!(
        "{} MiB of weights in {} MiB of memory; {} layers stay",
        bytes >> 20,
        limit >> 20,
        layers.kept()
    );

    let mut x = vec![1.0f32; hidden];
    for token in 0..TOKENS {
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
    let gated = product(gate, x).into_iter().zip(product(up, x));
    let gated: Vec<f32> = gated.map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
    let down = product(weights("mlp.down_proj.weight")?, &gated);
    let sum: Vec<f32> = x.iter().zip(down).map(|(x, down)| x + down).collect();
    let size = (sum.iter().map(|x| x * x).sum::<f32>() / sum.len() as f32).sqrt();
    Ok(sum.iter().map(|x| x / size).collect())
}

/// A matrix of bf16 (in Rust, as bits) times a vector.
fn product(matrix: &[u16], x: &[f32]) -> Vec<f32> {
    let row = |row: &[u16]| {
        row.iter().zip(x).map(|(&weight, x)| f32::from_bits(u32::from(weight) << 16) * x).sum::<f32>()
    };
    matrix.chunks_exact(x.len()).map(row).collect()
}

/// Writes a model: a header in JSON that says where each tensor is, and the tensors.
fn make(path: &Path, layers: usize, hidden: usize) -> Result<(), BoxError> {
    let inner = 4 * hidden;
    let shapes =
        [("gate_proj", [inner, hidden]), ("up_proj", [inner, hidden]), ("down_proj", [hidden, inner])];
    let (mut header, mut end) = (Vec::new(), 0);
    for layer in 0..layers {
        for (name, [rows, columns]) in shapes {
            let (start, name) = (end, format!("model.layers.{layer}.mlp.{name}.weight"));
            end += rows * columns * 2;
            let shape = format!(r#""shape":[{rows},{columns}],"data_offsets":[{start},{end}]"#);
            header.push(format!(r#""{name}":{{"dtype":"BF16",{shape}}}"#));
        }
    }
    let header = format!("{{{}}}", header.join(","));
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut random = 1u64;
    for _ in 0..end / 2 {
        // Small numbers of either sign: the upper half of an f32.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let weight = ((random >> 40) as f32 / (1 << 24) as f32 - 0.5) / (hidden as f32).sqrt();
        file.write_all(&((weight.to_bits() >> 16) as u16).to_le_bytes())?;
    }
    Ok(file.flush()?)
}
