//! Trains a linear model on `.npy` objects: rows of f32, the last column is the target.
//!
//! ```sh
//! AWS_REGION=eu-central-1 cargo run --release --features aws --example train -- s3://bucket/train/
//! ```
//!
//! Settings of the store come from the environment: `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP` and others.

use twinbuf::mmap::Cut;
use twinbuf::{BoxError, Dataset, Loader, Plan, Records, Shuffle};
use twinbuf_object_store::{Objects, Options};

const RATE: f32 = 0.02;

fn main() -> Result<(), BoxError> {
    let url = std::env::args().nth(1).ok_or("wanted a URL, such as s3://bucket/train/")?;
    let settings = std::env::vars().filter(|(name, _)| name.starts_with("AWS_")).collect();
    let options = Options { settings, ..Options::default() };
    let data = Objects::open(&url, options, |files| Records::open_npy(files, Cut::Rows))?;
    let columns = data.element().ok_or("wanted numbers")?.1[0];
    println!("{}: {} rows of {columns} numbers", data.name(), data.len());

    // Neighbouring rows share requests.
    let shuffle = Shuffle::Chunks { records: 64 };
    let plan = Plan::builder(data.len()).batch(256).shuffle(shuffle).seed(1).build()?;
    let mut loader = Loader::builder(data.clone(), plan).workers(4).build()?;
    let mut weights = vec![0.0; columns - 1];
    for epoch in 0..5 {
        let (mut loss, mut rows) = (0.0, 0);
        for batch in loader.epoch(epoch) {
            let batch = batch?;
            for row in batch.cast::<f32>()?.chunks_exact(columns) {
                let (features, target) = row.split_at(columns - 1);
                let found: f32 = features.iter().zip(&weights).map(|(x, weight)| x * weight).sum();
                let error = found - target[0];
                for (weight, x) in weights.iter_mut().zip(features) {
                    *weight -= RATE * error * x;
                }
                loss += error * error;
                rows += 1;
            }
        }
        println!("epoch {epoch}: loss {:.6}", loss / rows as f32);
    }
    println!("{}\n{}", loader.report(), data.stats());
    Ok(())
}
