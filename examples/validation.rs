//! Training with a validation in every epoch. Each loader has its own name and switches:
//!
//! ```sh
//! TWINBUF_TRACE=trace.json TWINBUF_VALID_OVERLAP=0 TWINBUF_MEMORY=64MiB \
//!     cargo run --release --example validation -- any.file
//! ```

use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};

fn main() -> Result<(), BoxError> {
    let path = std::env::args().nth(1).ok_or("usage: validation FILE")?;
    let open = || Records::options().partial(true).open([&path], 1024);
    let records = open()?.len();
    let all = Plan::builder(records).batch(16).shuffle(Shuffle::Full).seed(42).build()?;
    let (plan, held_out) =
        (all.with_records(0..records / 10 * 9)?, all.with_records(records / 10 * 9..records)?);
    let mut train = Loader::builder(open()?, plan.clone()).name("train").from_env()?.build()?;
    let mut valid = Loader::builder(open()?, held_out).name("valid").from_env()?.build()?;
    let mut sum = 0;
    for batch in train.epochs(0..3) {
        let batch = batch?;
        // Made before the last step of an epoch: its first batch is read during that step.
        let validation = (batch.step() + 1 == plan.steps(batch.epoch())).then(|| valid.epoch(0));
        sum += u64::from(batch[0]); // train on it
        for held_out in validation.into_iter().flatten() {
            sum += u64::from(held_out?[0]); // neither compute nor wait of the training
        }
    }
    println!("{sum}\ntrain: {}\n\nvalid: {}", train.report(), valid.report());
    train.close()?;
    Ok(valid.close()?)
}
