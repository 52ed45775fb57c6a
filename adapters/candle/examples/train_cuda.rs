//! The classifier of `train.rs` on a CUDA device: the upload stage copies the next batch while this one is trained on,
//! and a batch becomes a tensor by one copy on the device, on candle's stream.
//!
//! `cargo run --release --features cuda --example train_cuda`, with a device and the CUDA toolkit (candle needs it to
//! build its kernels).

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, Optimizer, SGD, loss::cross_entropy};
use twinbuf::mmap::Cut;
use twinbuf::transform::Transform;
use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};
use twinbuf_candle::device_tensor;

#[path = "support/pictures.rs"]
mod pictures;
use pictures::{CLASSES, EPOCHS, PIXELS};

fn main() -> Result<(), BoxError> {
    pictures::learn(|path| train(path, &Device::new_cuda(0)?))
}

/// The mean loss of each epoch.
fn train(path: &Path, device: &Device) -> Result<Vec<f32>, BoxError> {
    let data = Arc::new(Records::open_npy([path], Cut::Rows)?);
    let (scale, shift) = pictures::normalise();
    let normalise = Transform::new(data.dtype(), PIXELS + 1)?.normalise(&scale, &shift)?;

    let plan = Plan::builder(data.len()).batch(64).shuffle(Shuffle::Full).seed(42).build()?;
    // candle's own context. The uploader leaves it as it is.
    let context = device.as_cuda_device()?.cuda_stream().context().clone();
    let mut loader = Loader::builder(data, plan.clone()).transform(normalise).cuda(context).build()?;

    let weight = Var::zeros((CLASSES, PIXELS), DType::F32, device)?;
    let bias = Var::zeros(CLASSES, DType::F32, device)?;
    let model = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
    let mut optimizer = SGD::new(vec![weight, bias], 0.02)?;

    let mut losses = Vec::new();
    for epoch in 0..EPOCHS {
        // On the device: reading it back each step would make the host wait.
        let mut sum = Tensor::zeros((), DType::F32, device)?;
        for batch in loader.epoch(epoch) {
            // Enqueued behind the upload. The slot is uploaded to again once the copy is done.
            let rows = device_tensor(batch?, device)?;
            let (pixels, labels) = pictures::split(&rows)?;
            let loss = cross_entropy(&model.forward(&pixels)?, &labels)?;
            optimizer.backward_step(&loss)?;
            sum = (sum + loss.detach())?;
        }
        losses.push(sum.to_scalar::<f32>()? / plan.steps(0) as f32);
    }
    println!("{}", loader.report());
    loader.close()?;
    Ok(losses)
}
