//! A data set of your own: anything that fills a buffer with the records of a batch.
//!
//! `cargo run --release --example custom_dataset`

use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan};

/// Record `i` is the square of `i`.
struct Squares;
impl Dataset for Squares {
    fn records(&self) -> u64 {
        1000
    }
    fn record_bytes(&self) -> usize {
        8
    }
    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        for (record, out) in batch.runs().flatten().zip(out.chunks_exact_mut(8)) {
            out.copy_from_slice(&(record * record).to_le_bytes());
        }
        Ok(out.len())
    }
}

fn main() -> Result<(), BoxError> {
    let plan = Plan::builder(1000).batch(250).build()?;
    let mut loader = Loader::builder(Squares, plan).build()?;
    let batch = loader.epoch(0).next().expect("a first batch")?;
    println!("its squares sum up to {}", batch.cast::<u64>()?.iter().sum::<u64>());
    Ok(())
}
