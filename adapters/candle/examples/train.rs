//! A linear classifier on the CPU: u8 pictures from a `.npy` file, normalised on the reading thread while the
//! last batch is trained on.
//!
//! `cargo run --release --example train`

use std::path::Path;
use std::sync::Arc;

use candle_core::{D, Device, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, SGD, loss::cross_entropy};
use twinbuf::mmap::{Cut, DType};
use twinbuf::transform::Transform;
use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};
use twinbuf_candle::tensor;

const RECORDS: u64 = 4096;
const PIXELS: usize = 64;
const CLASSES: usize = 4;
const EPOCHS: u64 = 4;

fn main() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("pictures.npy");
    write_pictures(&path)?;
    let losses = train(&path)?;
    for (epoch, loss) in losses.iter().enumerate() {
        println!("epoch {epoch}: loss {loss:.4}");
    }
    if losses[losses.len() - 1] > losses[0] / 2.0 {
        return Err(format!("wanted a loss that falls to half, found {losses:?}").into());
    }
    Ok(())
}

/// The mean loss of each epoch.
fn train(path: &Path) -> Result<Vec<f32>, BoxError> {
    let device = Device::Cpu;
    let data = Arc::new(Records::open_npy([path], Cut::Rows)?);
    // A row is the pixels and the label: pixels to -1..1, the label as it is.
    let (mut scale, mut shift) = ([1.0 / 127.5; PIXELS + 1], [-1.0; PIXELS + 1]);
    (scale[PIXELS], shift[PIXELS]) = (1.0, 0.0);
    let normalise = Transform::new(data.dtype(), PIXELS + 1)?.normalise(&scale, &shift)?;

    let plan = Plan::builder(data.len()).batch(64).shuffle(Shuffle::Records).seed(42).build()?;
    let mut loader = Loader::builder(data.clone(), plan).transform(normalise).build()?;

    // Softmax regression is convex: zeros are as good a start as any, and the same in every run.
    let weight = Var::zeros((CLASSES, PIXELS), candle_core::DType::F32, &device)?;
    let bias = Var::zeros(CLASSES, candle_core::DType::F32, &device)?;
    let model = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
    let mut optimizer = SGD::new(vec![weight, bias], 0.02)?;

    let mut losses = Vec::new();
    for epoch in 0..EPOCHS {
        let mut sum = 0.0;
        for batch in loader.epoch(epoch) {
            // The one copy. The slot is free again at the end of this line.
            let rows = tensor(&batch?, DType::F32, data.shape(), &device)?;
            let loss = loss(&model, &rows)?;
            optimizer.backward_step(&loss)?;
            sum += loss.to_scalar::<f32>()?;
        }
        losses.push(sum / plan.steps() as f32);
    }
    println!("{}", loader.report());
    loader.close()?;
    Ok(losses)
}

fn loss(model: &Linear, rows: &Tensor) -> candle_core::Result<Tensor> {
    let pixels = rows.narrow(D::Minus1, 0, PIXELS)?;
    let labels = rows.narrow(D::Minus1, PIXELS, 1)?.squeeze(D::Minus1)?.to_dtype(candle_core::DType::U32)?;
    cross_entropy(&model.forward(&pixels.contiguous()?)?, &labels)
}

/// Pictures of noise, brighter in the quarter that is their class; and the class.
fn write_pictures(path: &Path) -> std::io::Result<()> {
    let mut header =
        format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({RECORDS}, {}), }}", PIXELS + 1);
    // NumPy's format 1.0: ten bytes before the header, which ends in a newline at a multiple of 64.
    header.extend(std::iter::repeat_n(' ', 63 - (10 + header.len()) % 64));
    header.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());

    let mut state = 1_u32;
    for record in 0..RECORDS {
        let class = record as usize % CLASSES;
        for pixel in 0..PIXELS {
            // xorshift32 (Marsaglia 2003).
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            let brighter = if pixel / (PIXELS / CLASSES) == class { 55 } else { 0 };
            file.push((state % 200) as u8 + brighter);
        }
        file.push(class as u8);
    }
    std::fs::write(path, file)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_loss_falls() {
        super::main().unwrap();
    }
}
