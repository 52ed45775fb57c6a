//! A data set that decodes: one worker against two.
//!
//! A record takes 4 ms of one processor, in a chain of dependent multiplications; a batch has 4 of them, and the caller
//! does nothing with it. Epochs follow each other in turn; the table has medians, with the least and the most.
//!
//! Then a data set that waits, unevenly: each fourth batch takes 20 ms, the others 1 ms, with 1 to 4 workers.
//!
//! `cargo bench --bench workers` prints the tables, `cargo bench --bench workers -- 5` those of five rounds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan, Shuffle};

const RECORDS: u64 = 128;
const BATCH: u64 = 4;

/// Multiplies so often, one after the other.
fn decode(times: u64, seed: u64) -> u64 {
    (0..times).fold(black_box(seed), |x, i| x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i))
}

#[derive(Clone)]
struct Encoded {
    times: u64,
}

impl Dataset for Encoded {
    fn records(&self) -> u64 {
        RECORDS
    }

    fn record_bytes(&self) -> usize {
        8
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        for (record, out) in batch.runs().flatten().zip(out.chunks_exact_mut(8)) {
            out.copy_from_slice(&decode(self.times, record).to_le_bytes());
        }
        Ok(out.len())
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
}

/// Sleeps for 20 ms at each fourth batch, and for 1 ms at the others.
#[derive(Clone)]
struct Uneven;

impl Dataset for Uneven {
    fn records(&self) -> u64 {
        160
    }

    fn record_bytes(&self) -> usize {
        8
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        std::thread::sleep(Duration::from_millis(if batch.step() % 4 == 0 { 20 } else { 1 }));
        Ok(out.len())
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
}

fn uneven(rounds: usize) -> Result<(), BoxError> {
    println!("160 batches, each fourth of 20 ms, the others of 1 ms; ms an epoch: median (least to most)");
    for workers in 1..=4 {
        let plan = Plan::builder(160).build()?;
        let mut loader = Loader::builder(Uneven, plan).workers(workers).build()?;
        let times = (0..rounds).map(|_| epoch(&mut loader).map(|(time, _)| time.as_secs_f64() * 1e3));
        let of = sorted(times.collect::<Result<_, _>>()?);
        println!("{workers} workers    {:>8.2} ({:.2} to {:.2})", of[of.len() / 2], of[0], of[of.len() - 1]);
    }
    Ok(())
}

/// An epoch's time, and its batches.
fn epoch(loader: &mut Loader) -> Result<(Duration, Vec<u8>), BoxError> {
    let start = Instant::now();
    let mut bytes = Vec::new();
    for batch in loader.epoch(0) {
        bytes.extend_from_slice(&batch?);
    }
    Ok((start.elapsed(), bytes))
}

fn sorted(mut of: Vec<f64>) -> Vec<f64> {
    of.sort_by(f64::total_cmp);
    of
}

fn main() -> Result<(), BoxError> {
    let rounds = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(11);
    let probe = 1 << 22;
    // The least of some: what a processor takes that nothing disturbs.
    let least = (0..9).map(|i| {
        let start = Instant::now();
        black_box(decode(probe, i));
        start.elapsed()
    });
    let each = least.min().unwrap_or_default().as_secs_f64() / probe as f64;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // some millions
    let times = (4e-3 / each) as u64;
    let plan = Plan::builder(RECORDS).batch(BATCH).shuffle(Shuffle::Full).seed(7).build()?;
    let build = |workers| Loader::builder(Encoded { times }, plan.clone()).workers(workers).build();
    let (mut one, mut two) = (build(1)?, build(2)?);
    let (_, expected) = epoch(&mut one)?;
    let mut found = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..rounds {
        let (first, bytes) = epoch(&mut one)?;
        assert!(bytes == expected, "the order of one worker");
        let (second, bytes) = epoch(&mut two)?;
        assert!(bytes == expected, "the order of two workers");
        let (first, second) = (first.as_secs_f64() * 1e3, second.as_secs_f64() * 1e3);
        found[0].push(first);
        found[1].push(second);
        found[2].push(first / second);
    }
    println!(
        "{RECORDS} records of 4 ms, batches of {BATCH}, {rounds} rounds; ms an epoch: median (least to most)"
    );
    for (name, of) in ["one worker", "two workers", "times faster"].into_iter().zip(found) {
        let of = sorted(of);
        println!("{name:<12} {:>8.2} ({:.2} to {:.2})", of[of.len() / 2], of[0], of[of.len() - 1]);
    }
    println!("{}", two.report());
    uneven(rounds)
}
