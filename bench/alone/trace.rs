//! What a trace costs: nanoseconds an event, on the thread that records it.
//!
//! One thread reads batches of one byte and uses them, without and with a trace: the difference, over the events
//! of the file. The least of many rounds: what the code takes when nothing disturbs it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use twinbuf::observe::Trace;
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan};

const STEPS: u64 = 2_000;
const ROUNDS: usize = 200;

/// Bytes that cost nothing.
struct Nothing;

impl Dataset for Nothing {
    fn records(&self) -> u64 {
        STEPS
    }

    fn record_bytes(&self) -> usize {
        1
    }

    fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        Ok(out.len())
    }
}

/// One epoch's time, with the writing at its end.
fn epoch(profile: Option<Trace>) -> Result<Duration, BoxError> {
    let mut builder = Loader::builder(Nothing, Plan::builder(STEPS).batch(1).build()?).overlap(false);
    if let Some(profile) = profile {
        builder = builder.trace(profile);
    }
    let mut loader = builder.build()?;
    let start = Instant::now();
    for batch in loader.epoch(0) {
        black_box(&batch?[..]);
    }
    let took = start.elapsed();
    loader.close()?;
    Ok(took)
}

fn main() -> Result<(), BoxError> {
    let path = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let path = path.path().join("trace.json");
    let (mut without, mut with, mut beyond) = (Duration::MAX, Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        without = without.min(epoch(None)?);
        beyond = beyond.min(epoch(Some(Trace::new(&path).epochs(0)))?);
        with = with.min(epoch(Some(Trace::new(&path)))?);
    }
    let text = std::fs::read_to_string(&path)?;
    #[allow(clippy::cast_precision_loss)] // figures to read
    let (events, steps) = (text.lines().filter(|line| line.contains("\"ts\":")).count() as f64, STEPS as f64);
    let nanos = |time: Duration| time.as_secs_f64() * 1e9;
    println!("no trace                {:>6.0} ns a step", nanos(without) / steps);
    println!("an epoch not recorded   {:>6.0} ns a step", nanos(beyond) / steps);
    println!("recorded                {:>6.0} ns a step", nanos(with) / steps);
    println!(
        "{:.0} ns an event, {:.1} events a step, {:.0} bytes an event",
        (nanos(with) - nanos(without)) / events,
        events / steps,
        text.len() as f64 / events,
    );
    Ok(())
}
