//! What the loader adds to the ring: nanoseconds a batch, over the same hand-overs without a loader.
//!
//! An epoch of 100 000 batches of one byte, read by a second thread and received by the caller, against a
//! bare ring with the same wait, depth and threads whose producer writes that byte. The two take turns, and
//! threads are not pinned. Two threads that sleep and wake each other are noisy, so look at the medians of
//! many rounds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use twinbuf::ring::HeapRing;
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan};

const STEPS: u64 = 100_000;
const ROUNDS: usize = 11;

struct Bytes;

impl Dataset for Bytes {
    fn records(&self) -> u64 {
        STEPS
    }

    fn record_bytes(&self) -> usize {
        1
    }

    fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        black_box(&mut *out)[0] = 1;
        Ok(out.len())
    }
}

fn loader(overlap: bool) -> Result<Duration, BoxError> {
    let mut loader =
        Loader::builder(Bytes, Plan::builder(STEPS).batch(1).build()?).overlap(overlap).build()?;
    let start = Instant::now();
    for batch in loader.epoch(0) {
        black_box(&batch?[..]);
    }
    Ok(start.elapsed())
}

fn ring(overlap: bool) -> Result<Duration, BoxError> {
    let (mut tx, mut rx) = HeapRing::new([0_u8; 2]).into_handles();
    let start = Instant::now();
    if overlap {
        std::thread::scope(|scope| -> Result<(), BoxError> {
            scope.spawn(move || {
                for _ in 0..STEPS {
                    let Ok(mut slot) = tx.acquire() else { return };
                    *black_box(&mut *slot) = 1;
                    if slot.commit().is_err() {
                        return;
                    }
                }
                tx.finish();
            });
            while let Some(slot) = rx.recv()? {
                black_box(&*slot);
            }
            Ok(())
        })?;
    } else {
        for _ in 0..STEPS {
            let mut slot = tx.try_acquire()?;
            *black_box(&mut *slot) = 1;
            slot.commit()?;
            black_box(rx.try_recv()?.as_deref());
        }
    }
    Ok(start.elapsed())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> Result<(), BoxError> {
    println!("{STEPS} batches of one byte, {ROUNDS} rounds, ns a batch: least, median");
    for (name, overlap) in [("one thread", false), ("two threads", true)] {
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        #[allow(clippy::cast_precision_loss)] // figures to read
        let each = |time: Duration| time.as_nanos() as f64 / STEPS as f64;
        for _ in 0..ROUNDS {
            bare.push(each(ring(overlap)?));
            ours.push(each(loader(overlap)?));
        }
        let least = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
        println!("{name:<12} bare ring {:>7.0} {:>7.0}", least(&bare), median(bare.clone()));
        println!("{:<12} loader    {:>7.0} {:>7.0}", "", least(&ours), median(ours.clone()));
        let differences = ours.iter().zip(&bare).map(|(ours, bare)| ours - bare).collect();
        println!("{:<12} more      {:>7.0} {:>7.0}", "", least(&ours) - least(&bare), median(differences));
    }
    Ok(())
}
