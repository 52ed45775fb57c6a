//! The Rust side of `overhead.py`: reads the epochs of one plan, and prints the nanoseconds of each.

use std::hint::black_box;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};

fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or("wanted: FILE RECORD_BYTES BATCH");
    let (path, record_bytes, batch) = (next()?, next()?.parse()?, next()?.parse()?);
    let data = Arc::new(Records::open([path], record_bytes)?);
    let plan = Plan::builder(data.len()).batch(batch).shuffle(Shuffle::Chunks { records: batch }).build()?;
    // As many slots as `overhead.py` asks for where it compares a batch.
    let mut loader = Loader::builder(data, plan).depth(3).build()?;
    // One epoch per line of input, so the two sides alternate.
    for (epoch, line) in std::io::stdin().lock().lines().enumerate() {
        line?;
        let start = Instant::now();
        for batch in loader.epoch(epoch as u64) {
            black_box(batch?[0]);
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", start.elapsed().as_nanos())?;
        out.flush()?;
    }
    Ok(())
}
