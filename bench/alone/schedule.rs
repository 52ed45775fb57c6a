//! What a change of the batch size costs: batches of 32, 64, and 128 records of 64 KiB in the middle of an epoch, with
//! compute as long as a load from the page cache, or half or twice as long.
//!
//! ```sh
//! cargo bench --bench schedule [-- ROUNDS]
//! ```

use std::time::{Duration, Instant};

use twinbuf::{BoxError, Checkpoint, Loader, Plan, Records, Shuffle};

const RECORD: usize = 64 << 10;
const STEPS: u64 = 12;
const SIZES: [(u64, u64); 3] = [(STEPS, 32), (STEPS, 64), (STEPS, 128)];

fn spin(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), BoxError> {
    let rounds: usize = std::env::args().find_map(|word| word.parse().ok()).unwrap_or(15);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("data.bin");
    let records: u64 = SIZES.iter().map(|(steps, size)| steps * size).sum();
    std::fs::write(&path, vec![7; usize::try_from(records)? * RECORD])?;
    let plan = Plan::builder(records).batches(SIZES).shuffle(Shuffle::Full).build()?;
    let build = |overlap| -> Result<Loader, BoxError> {
        let data = Records::open([&path], RECORD)?;
        Ok(Loader::builder(data, plan.clone()).overlap(overlap).build()?)
    };
    // A load of one record.
    let mut loader = build(false)?;
    let loads = (0..5).map(|epoch| {
        let started = Instant::now();
        loader.epoch(epoch).try_for_each(|batch| batch.map(drop))?;
        Ok(started.elapsed().as_secs_f64() / records as f64)
    });
    let load = median(loads.collect::<Result<_, BoxError>>()?);
    println!("{rounds} rounds, medians; a load of one record {:.1} us; times in ms", load * 1e6);
    println!(
        "{:>7} {:>12} {:>14} {:>14} {:>16} {:>16}",
        "compute", "change", "ordinary step", "ordinary wait", "wait at change", "wait / step"
    );
    for share in [0.5, 1.0, 2.0] {
        // Of each step: the wait, and all of it.
        let mut steps = vec![Vec::new(); usize::try_from(3 * STEPS)?];
        let mut loader = build(true)?;
        for _ in 0..rounds {
            let mut epoch = loader.epochs_from(&Checkpoint::start(), 1)?;
            for step in &mut steps {
                let started = Instant::now();
                let Some(batch) = epoch.next() else { break };
                let (batch, waited) = (batch?, started.elapsed());
                spin(Duration::from_secs_f64(load * share * (batch.len() / RECORD) as f64));
                drop(batch);
                step.push((waited.as_secs_f64() * 1e3, started.elapsed().as_secs_f64() * 1e3));
            }
        }
        for (change, (_, size)) in (1..).zip(SIZES.into_iter().skip(1)) {
            let at = usize::try_from(change * STEPS)?;
            // Without the three steps that fill and refill the slots.
            let ordinary = || steps[at + 3..at + usize::try_from(STEPS).unwrap_or(0)].iter().flatten();
            let step = median(ordinary().map(|step| step.1).collect());
            let wait = median(ordinary().map(|step| step.0).collect());
            let changed = median(steps[at].iter().map(|step| step.0).collect());
            println!(
                "{share:>7} {:>12} {step:>14.3} {wait:>14.3} {changed:>16.3} {:>16.2}",
                format!("{} to {size}", size / 2),
                changed / step
            );
        }
    }
    Ok(())
}
