//! A linear classifier on the CPU: u8 pictures from a `.npy` file, normalised on the reading thread while the
//! last batch is trained on.
//!
//! `cargo run --release --example train`

use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Var};
use candle_nn::{Linear, Module, Optimizer, SGD, loss::cross_entropy};
use twinbuf::mmap::Cut;
use twinbuf::transform::Transform;
use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};
use twinbuf_candle::tensor;

#[path = "support/pictures.rs"]
mod pictures;
use pictures::{CLASSES, EPOCHS, PIXELS};

fn main() -> Result<(), BoxError> {
    pictures::learn(train)
}

/// The mean loss of each epoch.
fn train(path: &Path) -> Result<Vec<f32>, BoxError> {
    let device = Device::Cpu;
    let data = Arc::new(Records::open_npy([path], Cut::Rows)?);
    let (scale, shift) = pictures::normalise();
    let normalise = Transform::new(data.dtype(), PIXELS + 1)?.normalise(&scale, &shift)?;

    let plan = Plan::builder(data.len()).batch(64).shuffle(Shuffle::Full).seed(42).build()?;
    let mut loader = Loader::builder(data, plan.clone()).transform(normalise).build()?;

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
            let rows = tensor(&batch?, &device)?;
            let (pixels, labels) = pictures::split(&rows)?;
            let loss = cross_entropy(&model.forward(&pixels)?, &labels)?;
            optimizer.backward_step(&loss)?;
            sum += loss.to_scalar::<f32>()?;
        }
        losses.push(sum / plan.steps(0) as f32);
    }
    println!("{}", loader.report());
    loader.close()?;
    Ok(losses)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_loss_falls() {
        super::main().unwrap();
    }
}
