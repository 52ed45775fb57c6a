//! Reads the records of this rank, as the launcher's variables define it, and lists them.
//!
//! `twinbuf-ranks FILE FOLDER` reads two epochs of FILE, whose records are their own numbers (u64, little-endian), and
//! writes a line `epoch step number` for each record to `FOLDER/<rank>.txt`. `tools/ranks.sh` runs it under launchers.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use twinbuf::{BoxError, LastBatch, Loader, Plan, Records, Shuffle};

fn main() -> Result<(), BoxError> {
    let [file, folder] = <[String; 2]>::try_from(std::env::args().skip(1).collect::<Vec<_>>())
        .map_err(|found| format!("wanted FILE FOLDER, found {found:?}"))?;
    let data = Arc::new(Records::open([file], 8)?);
    let plan = Plan::from_env(data.len())?
        .batch(16)
        .shuffle(Shuffle::Full)
        .seed(42)
        .last_batch(LastBatch::Keep)
        .build()?;
    let mut loader = Loader::builder(data, plan.clone()).build()?;
    let mut lines = String::new();
    for epoch in 0..2 {
        for batch in loader.epoch(epoch) {
            let batch = batch?;
            for &number in batch.cast::<u64>()? {
                writeln!(lines, "{epoch} {} {}", batch.step(), u64::from_le(number))?;
            }
        }
    }
    // A rank that appears twice is an error of the launcher.
    let mut out = std::fs::File::create_new(Path::new(&folder).join(format!("{}.txt", plan.rank())))?;
    std::io::Write::write_all(&mut out, lines.as_bytes())?;
    println!("rank {} of {}: {} records in 2 epochs", plan.rank(), plan.world(), lines.lines().count());
    Ok(())
}
