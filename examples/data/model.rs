//! The files of the example `weights`, and its arithmetic.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use twinbuf::BoxError;

/// A matrix of bf16 (in Rust, as bits) times a vector.
pub(crate) fn product(matrix: &[u16], x: &[f32]) -> Vec<f32> {
    let row = |row: &[u16]| {
        row.iter().zip(x).map(|(&weight, x)| f32::from_bits(u32::from(weight) << 16) * x).sum::<f32>()
    };
    matrix.chunks_exact(x.len()).map(row).collect()
}

/// silu(gate) * up.
pub(crate) fn gated(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
}

/// The sum of two vectors, divided by the root of its mean square.
pub(crate) fn normalized(x: &[f32], y: &[f32]) -> Vec<f32> {
    let sum: Vec<f32> = x.iter().zip(y).map(|(x, y)| x + y).collect();
    let size = (sum.iter().map(|x| x * x).sum::<f32>() / sum.len() as f32).sqrt();
    sum.iter().map(|x| x / size).collect()
}

/// Writes a model: a header in JSON that says where each tensor is, and the tensors.
pub(crate) fn make(path: &Path, layers: usize, hidden: usize) -> Result<(), BoxError> {
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
