//! Reads a file in shuffled batches, ahead of the one in use.
//!
//! ```sh
//! cargo run --release --example hello -- any.file
//! ```

use twinbuf::{BoxError, LastBatch, Loader, Plan, Records, Shuffle};

fn main() -> Result<(), BoxError> {
    let path = std::env::args().nth(1).ok_or("usage: hello FILE")?;
    let data = Records::options().partial(true).open([path], 1024)?;
    let plan = Plan::builder(data.len())
        .batch(256)
        .shuffle(Shuffle::Full)
        .seed(42)
        .last_batch(LastBatch::Keep)
        .build()?;
    let mut loader = Loader::builder(data, plan).build()?;
    let mut sum = 0;
    for batch in loader.epochs(0..3) {
        sum += batch?.iter().map(|&byte| u64::from(byte)).sum::<u64>(); // train on it
    }
    println!("{sum}\n{}", loader.report());
    Ok(loader.close()?)
}
