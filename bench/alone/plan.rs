//! How long a plan takes to name the records of a batch, with few windows and with many.
//!
//! ```sh
//! cargo bench --bench plan
//! ```
//!
//! No file is read. Each epoch visits 100 of its steps, or all if it has fewer.

use std::hint::black_box;
use std::time::Instant;

use twinbuf_mmap::{BatchIndices, Plan, PlanError, Shuffle};

const EPOCHS: u64 = 500;
const STEPS: u64 = 100;
/// Records in a chunk, and chunks in a window.
const CHUNK: u64 = 341;
const WINDOW: u64 = 64;

fn main() -> Result<(), PlanError> {
    println!("{:<10} {:>6} {:>8} {:>12} {:>12}", "shuffle", "batch", "windows", "median, us", "worst, us");
    for batch in [64, 256] {
        for windows in [1, 16, 256] {
            let records = CHUNK * WINDOW * windows;
            for (name, shuffle) in [
                ("Records", Shuffle::Full),
                ("Chunks", Shuffle::Chunks { records: CHUNK }),
                ("Window", Shuffle::Window { chunk_records: CHUNK, window_chunks: WINDOW }),
            ] {
                let plan = Plan::builder(records).batch(batch).shuffle(shuffle).seed(7).build()?;
                let steps = plan.steps(0).min(STEPS);
                let mut times: Vec<f64> = (0..EPOCHS).map(|epoch| time(&plan, epoch, steps)).collect();
                times.sort_by(f64::total_cmp);
                let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
                println!("{name:<10} {batch:>6} {windows:>8} {median:>12.2} {worst:>12.2}");
            }
        }
    }
    Ok(())
}

/// Microseconds a step.
fn time(plan: &Plan, epoch: u64, steps: u64) -> f64 {
    let begun = Instant::now();
    for step in 0..steps {
        let batch = plan.batch(epoch, step * plan.steps(0) / steps);
        let sum =
            batch.iter().flat_map(BatchIndices::runs).fold(0_u64, |sum, run| sum.wrapping_add(run.start));
        black_box(sum);
    }
    begun.elapsed().as_secs_f64() * 1e6 / steps as f64
}
