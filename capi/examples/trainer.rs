//! The trainer of `trainer.zig` in Rust: the same operations in the same order, so the same loss to the last bit.
//!
//! `trainer FILE RANK`

use twinbuf::{BoxError, Checkpoint, Loader, Plan, Records, Shuffle};

/// Fifteen inputs and a target.
const NUMBERS: usize = 16;

struct Model {
    weights: [f32; NUMBERS - 1],
    bias: f32,
    /// A moving average.
    loss: f32,
}

impl Model {
    fn step(&mut self, batch: &mut [f32]) {
        for number in &mut *batch {
            *number = (*number - 0.5) * 3.464_101_6;
        }
        for record in batch.chunks_exact(NUMBERS) {
            let (target, inputs) = (record[NUMBERS - 1], &record[..NUMBERS - 1]);
            let mut output = self.bias;
            for (weight, input) in self.weights.iter().zip(inputs) {
                output += weight * input;
            }
            let error = output - target;
            for (weight, input) in self.weights.iter_mut().zip(inputs) {
                *weight -= 0.001 * error * input;
            }
            self.bias -= 0.001 * error;
            self.loss += 0.001 * (error * error - self.loss);
        }
    }
}

/// The checksum of zlib.
fn adler32(sum: u32, bytes: &[u8]) -> u32 {
    let (mut low, mut high) = (sum & 0xffff, sum >> 16);
    for byte in bytes {
        low = (low + u32::from(*byte)) % 65521;
        high = (high + low) % 65521;
    }
    high << 16 | low
}

fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, rank] = &arguments[..] else { return Err("trainer FILE RANK".into()) };
    let mut model = Model { weights: [0.0; NUMBERS - 1], bias: 0.0, loss: 1.0 };
    let (mut checkpoint, mut batches, mut sum) = (Checkpoint::start(), 0_u64, 1);
    // As a training that was stopped and resumed once.
    for most in [40_000, usize::MAX] {
        let data = Records::open([file], NUMBERS * 4)?;
        let plan = Plan::builder(data.len()).batch(4).shuffle(Shuffle::Full).seed(42).rank(rank.parse()?, 2);
        let mut loader = Loader::builder(data, plan.build()?).depth(2).build()?;
        for batch in loader.epochs_from(&checkpoint, 3)?.take(most) {
            let mut batch = batch?;
            sum = adler32(sum, &batch);
            model.step(batch.cast_mut()?);
            batches += 1;
        }
        checkpoint = loader.checkpoint();
        loader.close()?;
    }
    println!("rank {rank}: {batches} batches, adler32 {sum:08x}");
    println!("loss {:08x} = {:.6}", model.loss.to_bits(), model.loss);
    Ok(())
}
