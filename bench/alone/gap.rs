//! What the boundary between two epochs costs: 8 epochs of 2 steps, 10 ms to load a batch and 10 ms to compute on it,
//! epoch by epoch and as one range.
//!
//! ```sh
//! cargo bench --bench gap
//! ```

use std::thread::sleep;
use std::time::Duration;

use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan, Report};

const STEP: Duration = Duration::from_millis(10);

/// Records that take their time.
struct Slow;

impl Dataset for Slow {
    fn records(&self) -> u64 {
        2
    }

    fn record_bytes(&self) -> usize {
        1024
    }

    fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        sleep(STEP);
        Ok(out.len())
    }
}

fn loader() -> Result<Loader, BoxError> {
    Ok(Loader::builder(Slow, Plan::builder(2).build()?).build()?)
}

fn print(name: &str, report: &Report) {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let after_first = report.train.waiting - report.first.waiting;
    println!(
        "{name:<16} {:>8.1} ms, waited {:>6.1} ms after the first batch",
        ms(report.wall),
        ms(after_first)
    );
}

fn main() -> Result<(), BoxError> {
    let mut by_epoch = loader()?;
    for epoch in 0..8 {
        for batch in by_epoch.epoch(epoch) {
            let _batch = batch?;
            sleep(STEP);
        }
    }
    print("epoch by epoch", &by_epoch.report());

    let mut range = loader()?;
    for batch in range.epochs(0..8) {
        let _batch = batch?;
        sleep(STEP);
    }
    print("epochs(0..8)", &range.report());
    Ok(())
}
