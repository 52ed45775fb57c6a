//! A small network on the CPU: u8 pictures, normalised on the reading thread while the last batch is trained on.
//!
//! `cargo run --release --example train`

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::relu};
use twinbuf::mmap::DType;
use twinbuf::transform::Transform;
use twinbuf::{Batch, BoxError, Plan, Records, Shuffle};
use twinbuf_burn::BurnLoader;

const RECORDS: usize = 4096;
const PIXELS: usize = 64;
const CLASSES: usize = 4;
const EPOCHS: usize = 3;

#[derive(Module, Debug)]
struct Model {
    hidden: Linear,
    output: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(PIXELS, 32).init(device),
            output: LinearConfig::new(32, CLASSES).init(device),
        }
    }

    fn loss(&self, (pictures, labels): (Tensor<2>, Tensor<1, Int>)) -> Tensor<1> {
        let found = self.output.forward(relu(self.hidden.forward(pictures)));
        CrossEntropyLossConfig::new().init(&labels.device()).forward(found, labels)
    }
}

/// The pictures and the labels of a batch, whose rows are the pixels of a picture and its label.
fn tensors(batch: Batch, device: &Device) -> Result<(Tensor<2>, Tensor<1, Int>), BoxError> {
    let (mut pictures, mut labels) = (Vec::new(), Vec::new());
    for row in batch.cast::<f32>()?.chunks_exact(PIXELS + 1) {
        pictures.extend_from_slice(&row[..PIXELS]);
        labels.push(row[PIXELS] as i32);
    }
    let shape = [labels.len(), PIXELS];
    Ok((
        Tensor::from_data(TensorData::new(pictures, shape), device),
        Tensor::from_data(TensorData::new(labels, [shape[0]]), device),
    ))
}

fn main() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("pictures.bin");
    write_pictures(&path)?;
    let losses = train(&path)?;
    for (epoch, loss) in losses.iter().enumerate() {
        println!("epoch {epoch}: loss {loss:.4}");
    }
    if losses[EPOCHS - 1] > losses[0] / 2.0 {
        return Err(format!("wanted a loss that falls to half, found {losses:?}").into());
    }
    Ok(())
}

/// The mean loss of each epoch.
fn train(path: &Path) -> Result<Vec<f32>, BoxError> {
    let device = Device::flex().autodiff();
    device.seed(42);

    let data = Arc::new(Records::open([path], PIXELS + 1)?);
    // Pixels to -1..1, the label as it is.
    let (mut scale, mut shift) = ([1.0 / 127.5; PIXELS + 1], [-1.0; PIXELS + 1]);
    (scale[PIXELS], shift[PIXELS]) = (1.0, 0.0);
    let normalise = Transform::new(DType::U8, PIXELS + 1)?.normalise(&scale, &shift)?;

    let plan = Plan::builder(data.len()).batch(64).shuffle(Shuffle::Full).seed(42).build()?;
    let loader = BurnLoader::builder(data, plan, tensors)
        .options(move |loader| loader.transform(normalise.clone()))
        .build(&device)?;

    let mut model = Model::new(&device);
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..EPOCHS {
        let (mut sum, mut steps) = (0.0, 0);
        for batch in loader.iter() {
            let loss = model.loss(batch?);
            sum += loss.clone().into_scalar::<f32>();
            steps += 1;
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients);
        }
        losses.push(sum / steps as f32);
    }
    if let Some(report) = loader.report() {
        println!("{report}");
    }
    Ok(losses)
}

/// Pictures of noise, brighter in the quarter that is their class; and the class.
fn write_pictures(path: &Path) -> std::io::Result<()> {
    let mut file = Vec::with_capacity(RECORDS * (PIXELS + 1));
    let mut state = 1_u32;
    for record in 0..RECORDS {
        let class = record % CLASSES;
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
