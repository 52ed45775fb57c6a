//! A training that resumes where it was stopped: run it twice, stop it in between with Ctrl-C.
//!
//! ```sh
//! cargo run --release --features serde --example resume -- any.file
//! ```

use std::time::Duration;

use twinbuf::{BoxError, Checkpoint, Loader, Plan, Records, Shuffle};

fn main() -> Result<(), BoxError> {
    let path = std::env::args().nth(1).ok_or("usage: resume FILE")?;
    let data = Records::options().partial(true).open([path], 1024)?;
    let plan = Plan::builder(data.len()).batch(16).shuffle(Shuffle::Full).seed(42).build()?;
    let mut loader = Loader::builder(data, plan).build()?;
    let start = Checkpoint::load_or_start("resume.json")?;
    println!("from epoch {}, step {}", start.epoch(), start.step());
    for batch in loader.epochs_from(&start, 3)? {
        let batch = batch?;
        std::thread::sleep(Duration::from_millis(10)); // train on it
        batch.checkpoint().save("resume.json")?;
    }
    println!("{}", loader.report());
    Ok(())
}
