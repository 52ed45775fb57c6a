//! What `tests/next.c` measures, in Rust: ns a batch. `capi/bench.sh` runs both.

use std::time::Instant;

use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Loader, Plan, Records};

fn main() -> Result<(), BoxError> {
    let data = Records::open(std::env::args().skip(1), 8192)?;
    let plan = Plan::builder(data.len()).batch(1).build()?;
    let mut loader = Loader::builder(data, plan).read_mode(ReadMode::Pread).build()?;
    // The first epoch warms the page cache.
    for epochs in [0..1, 1..17] {
        let (timed, start) = (epochs.start > 0, Instant::now());
        let (mut batches, mut sum) = (0_u32, 0_u64);
        for batch in loader.epochs(epochs) {
            sum += u64::from(batch?[0]);
            batches += 1;
        }
        assert_eq!(sum, 0, "the file has zeros");
        if timed {
            println!("{:.1}", start.elapsed().as_secs_f64() * 1e9 / f64::from(batches));
        }
    }
    Ok(loader.close()?)
}
