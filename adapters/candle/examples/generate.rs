//! Generates tokens with a Llama that is larger than the memory it is given: while a layer computes, the next one is read.
//!
//! `cargo run --release --example generate -- 32 1024`: layers and hidden size. The weights are
//! random and of bf16. The matrices are multiplied in the slots that they were read into.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{D, DType, Device, Module, Tensor, safetensors};
use candle_nn::ops::{rms_norm, silu, softmax_last_dim};
use candle_nn::rotary_emb::rope;
use twinbuf::BoxError;
use twinbuf::stream::{Group, StreamBuilder, Tensors};
use twinbuf_candle::{linear, weight};

const HEAD: usize = 64;
const LAYER: &str = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj \
    mlp.down_proj input_layernorm post_attention_layernorm";
const ENDS: &str = "model.embed_tokens model.norm lm_head";
type Cache = Option<[Tensor; 2]>; // keys and values of a layer

fn main() -> Result<(), BoxError> {
    let number = |at, usual| std::env::args().nth(at).map_or(Ok(usual), |arg| arg.parse());
    let folder = tempfile::tempdir()?;
    let model = Tensors::open(make(folder.path(), number(1, 16)?, number(2, 512)?)?)?;
    let bytes: u64 = model.all().iter().map(twinbuf::mmap::Tensor::len).sum();
    println!("{} MiB of weights in {} MiB of memory", bytes >> 20, bytes / (3 << 20));
    println!("{:?}", generate(twinbuf::stream(model.groups_by(place)?).memory_limit(bytes / 3))?);
    Ok(())
}

/// The place of a tensor in a pass: the embedding, the layers, and the head.
fn place(name: &str) -> Option<u32> {
    match name.strip_prefix("model.layers.") {
        Some(layer) => Some(1 + layer.split('.').next()?.parse::<u32>().ok()?),
        None => Some(if name.starts_with("model.embed") { 0 } else { u32::MAX }),
    }
}

/// Each pass takes one token. After the prompt, it adds the most likely next one.
fn generate(model: StreamBuilder) -> Result<Vec<u32>, BoxError> {
    let mut model = model.cycle().build()?;
    let (mut tokens, mut caches, head) = (vec![1, 306, 763], HashMap::new(), model.groups().len() - 1);
    for at in 0..10 {
        let mut x = Tensor::new(&tokens[at..=at], &Device::Cpu)?;
        for group in model.pass() {
            let group = Arc::new(group?); // in memory; the next one is being read
            x = match group.number() {
                0 => linear(&group, "embed_tokens.weight")?.embedding(&x)?,
                i if i == head => linear(&group, "lm_head.weight")?.forward(&norm(&group, "norm", &x)?)?,
                layer => forward(&group, &x, at, caches.entry(layer).or_insert(None))?,
            };
        }
        if at + 1 == tokens.len() {
            tokens.push(x.argmax(D::Minus1)?.to_vec1()?[0]);
        }
    }
    Ok(tokens)
}

/// One layer at position `at`; `cache` has the keys and values of the positions before.
fn forward(layer: &Arc<Group>, x: &Tensor, at: usize, cache: &mut Cache) -> Result<Tensor, BoxError> {
    let product = |name: &str, x: &Tensor| -> Result<Tensor, BoxError> {
        Ok(linear(layer, &format!("{name}_proj.weight"))?.forward(x)?)
    };
    let heads = |x: Tensor| x.reshape((1, (), 1, HEAD));
    let angle = |i: usize| at as f32 / 10_000f32.powf(2.0 * i as f32 / HEAD as f32);
    let angles = Tensor::from_iter((0..HEAD / 2).map(angle), &Device::Cpu)?.reshape((1, ()))?;
    let turned = |x: Tensor| rope(&x, &angles.cos()?, &angles.sin()?);

    let inner = norm(layer, "input_layernorm", x)?;
    let query = turned(heads(product("self_attn.q", &inner)?)?)?;
    let mut key = turned(heads(product("self_attn.k", &inner)?)?)?;
    let mut value = heads(product("self_attn.v", &inner)?)?;
    if let Some([keys, values]) = cache {
        (key, value) = (Tensor::cat(&[&*keys, &key], 2)?, Tensor::cat(&[&*values, &value], 2)?);
    }
    let scores = softmax_last_dim(&(query.matmul(&key.t()?)? / (HEAD as f64).sqrt())?)?;
    let attended = scores.matmul(&value)?.reshape(x.shape())?;
    *cache = Some([key, value]);
    let x = (x + product("self_attn.o", &attended)?)?;

    let inner = norm(layer, "post_attention_layernorm", &x)?;
    let gated = (silu(&product("mlp.gate", &inner)?)? * product("mlp.up", &inner)?)?;
    Ok((&x + product("mlp.down", &gated)?)?)
}

fn norm(layer: &Group, name: &str, x: &Tensor) -> Result<Tensor, BoxError> {
    let scale = weight(&layer.tensor(&format!("{name}.weight"))?, &Device::Cpu)?; // a copy of a few numbers
    Ok(rms_norm(x, &scale.to_dtype(DType::F32)?, 1e-5)?)
}

/// Writes a model: a file for each layer, and one for the embedding and the head.
fn make(folder: &Path, layers: usize, hidden: usize) -> Result<Vec<PathBuf>, BoxError> {
    let random = |name: &str| {
        let (rows, columns) = match name {
            "mlp.gate_proj" | "mlp.up_proj" => (4, 1),
            "mlp.down_proj" => (1, 4),
            "model.embed_tokens" | "lm_head" => (8, 1),
            _ => (1, 1),
        };
        let shape = [rows * hidden, columns * hidden];
        let shape = if name.ends_with("norm") { &shape[1..] } else { &shape };
        Tensor::randn(0f32, 0.05, shape, &Device::Cpu)?.to_dtype(DType::BF16)
    };
    let file = |at: usize| {
        let end = (String::new(), ENDS);
        let (front, names) = if at < layers { (format!("model.layers.{at}."), LAYER) } else { end };
        let tensors = names.split(' ').map(|name| Ok((format!("{front}{name}.weight"), random(name)?)));
        let path = folder.join(format!("{at}.safetensors"));
        safetensors::save(&tensors.collect::<Result<HashMap<_, _>, BoxError>>()?, &path)?;
        Ok(path)
    };
    (0..=layers).map(file).collect()
}

#[test]
fn the_same_tokens_as_with_all_layers_in_memory() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let groups = Tensors::open(make(folder.path(), 2, 128)?)?.groups_by(place)?;
    let streamed = generate(twinbuf::stream(groups.clone()).keep(1))?;
    let resident = generate(twinbuf::stream(groups.clone()).keep(groups.len()))?;
    assert_eq!((streamed.len(), &streamed), (11, &resident));
    Ok(())
}
