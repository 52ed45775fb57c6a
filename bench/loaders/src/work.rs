//! The task of every subject: its input, the batches that it must deliver, and the meter that receives them.
//!
//! A subject is a process. For each line of JSON on its standard input, a [`Work`], it does one run. In a run it opens
//! its files, reports `ready` ([`Meter::ready`]), and waits for another line; only then does it start workers and read.
//! It requests each batch inside [`Meter::wait`] and passes it to [`Meter::take`], which touches it and computes. Then
//! it closes everything, and prints one line of JSON, an [`Outcome`].

use std::fs;
use std::hint::black_box;
use std::io::{self, BufRead as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use twinbuf::BoxError;
use twinbuf_bench_harness::sys;

/// Tokens of a window. The first token of the next window is the last one of this window.
pub const WINDOW: usize = 1024 + 1;

/// The contents of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A shard of llm.c: a header, followed by tokens of 16 bits. A record is a window of [`WINDOW`] tokens; a batch
    /// holds them as 32-bit numbers. The first 4 tokens of a window are its number, 16 bits each, the lowest first.
    Tokens,
    /// Records of 224 x 224 x 3 bytes without a header. The first 8 bytes are the record's number, the lowest first.
    Images,
}

impl Kind {
    pub const ALL: [Self; 2] = [Self::Tokens, Self::Images];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Images => "images",
        }
    }

    /// Bytes before the first record.
    pub const fn header(self) -> u64 {
        match self {
            Self::Tokens => 1024,
            Self::Images => 0,
        }
    }

    /// Bytes of a record in the file.
    pub const fn record_bytes(self) -> usize {
        match self {
            Self::Tokens => WINDOW * 2,
            Self::Images => 224 * 224 * 3,
        }
    }

    /// Bytes from the start of a record to the start of the next.
    pub const fn stride(self) -> u64 {
        match self {
            Self::Tokens => (WINDOW as u64 - 1) * 2,
            Self::Images => self.record_bytes() as u64,
        }
    }

    /// Records of a batch.
    pub const fn batch(self) -> usize {
        match self {
            Self::Tokens => 64,
            Self::Images => 32,
        }
    }

    /// Records in a file of `len` bytes.
    pub const fn records(self, len: u64) -> u64 {
        (len - self.header() - self.record_bytes() as u64) / self.stride() + 1
    }
}

/// The task of a subject: one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Work {
    pub kind: Kind,
    pub data: PathBuf,
    /// The file with the order of an epoch, one u64 (little-endian) per record; `None`: the order of the data file. All
    /// epochs have the same order.
    pub order: Option<PathBuf>,
    /// Records of a batch.
    pub batch: usize,
    pub epochs: u64,
    /// The caller trains about this long on each batch, if nothing slows it down: [`Trainer`]. Zero: not at all.
    #[serde(rename = "train_us", with = "micros")]
    pub train: Duration,
    /// Whether to compute digest and sum; this takes time.
    pub verify: bool,
}

impl Work {
    /// Records in the file.
    pub fn records(&self) -> io::Result<u64> {
        Ok(self.kind.records(fs::metadata(&self.data)?.len()))
    }

    /// The numbers of the records of an epoch, in order, without those that do not fill a whole batch.
    pub fn order(&self) -> Result<Vec<u64>, BoxError> {
        let records = self.records()?;
        let mut order: Vec<u64> = match &self.order {
            None => (0..records).collect(),
            Some(path) => {
                let bytes = fs::read(path)?;
                bytes.as_chunks::<8>().0.iter().copied().map(u64::from_le_bytes).collect()
            }
        };
        if order.len() as u64 != records {
            let found = order.len();
            return Err(format!("the order: wanted {records} records, found {found}").into());
        }
        order.truncate(order.len() / self.batch * self.batch);
        Ok(order)
    }
}

/// Durations as microseconds.
mod micros {
    use super::Duration;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_micros)
    }
}

/// One delivered batch: record after record, in one piece.
#[derive(Clone, Copy, Debug)]
pub enum Batch<'a> {
    Tokens(&'a [u32]),
    Images(&'a [u8]),
}

/// The result of a run, as one line of JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub batches: u64,
    /// Seconds from the start to the first batch: the start of workers, and the wait for the batch.
    pub first_s: f64,
    /// Seconds from the start to the end of the computation on the last batch.
    pub wall_s: f64,
    /// The part of these seconds in which the caller waited for batches.
    pub wait_s: f64,
    /// CPU seconds of all its threads and worker processes in this time.
    pub cpu_s: f64,
    /// Seconds of a training step: the median before the start, the mean on the batches. 0 without training.
    pub step_alone_s: f64,
    pub step_s: f64,
    /// If `verify`: the hash of the numbers of the delivered records, `h = h * 6364136223846793005 + number + 1` modulo
    /// 2^64, from 0; 16 hexadecimal digits.
    pub digest: Option<String>,
    /// If `verify`: the sum of all numbers in all batches (tokens or bytes), modulo 2^64.
    pub sum: Option<u64>,
    /// What the caller got in place of a batch, or its panic.
    pub error: Option<String>,
}

/// A training step that takes CPU time: products of small matrices that stay in the processor's L1 cache.
struct Trainer {
    numbers: Vec<f32>,
    out: Vec<f32>,
    /// Products of a step.
    products: u32,
}

/// Rows and columns of a matrix.
const SIDE: usize = 48;

impl Trainer {
    /// A trainer whose step takes about this long, and the median of its steps while nothing is loaded.
    fn new(step: Duration) -> (Self, Duration) {
        let numbers = (0..SIDE * SIDE).map(|i| i as f32 / (SIDE * SIDE) as f32).collect();
        let mut trainer = Self { numbers, out: vec![0.0; SIDE * SIDE], products: 100 };
        // The fastest of several: a disturbed step here would make all of them short.
        let product = (0..10).map(|_| trainer.step()).min().unwrap_or_default() / trainer.products;
        trainer.products = ((step.as_secs_f64() / product.as_secs_f64()).round() as u32).max(1);
        let (begun, mut steps) = (Instant::now(), Vec::new());
        while steps.len() < 10 || begun.elapsed() < Duration::from_millis(50) {
            steps.push(trainer.step());
        }
        steps.sort_unstable();
        (trainer, steps[steps.len() / 2])
    }

    fn step(&mut self) -> Duration {
        let begun = Instant::now();
        for _ in 0..self.products {
            let Self { numbers, out, .. } = self;
            out.fill(0.0);
            for (row, out) in numbers.chunks_exact(SIDE).zip(out.chunks_exact_mut(SIDE)) {
                for (factor, other) in row.iter().zip(numbers.chunks_exact(SIDE)) {
                    out.iter_mut().zip(other).for_each(|(out, other)| *out += factor * other);
                }
            }
            black_box(&mut *out);
        }
        begun.elapsed()
    }
}

/// The digest of one more number: see [`Outcome::digest`].
pub fn digest(before: u64, number: u64) -> u64 {
    before.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(number).wrapping_add(1)
}

/// Reads one number of every record, and returns how many there are in all.
fn touch<T: Copy>(numbers: &[T], record: usize) -> usize {
    numbers.chunks_exact(record).for_each(|numbers| _ = black_box(numbers[record / 2]));
    numbers.len()
}

/// Adds the numbers of records to a digest, and returns the sum of all `T`, of which the first 64 bits of a record are its
/// number.
fn sum<T: Copy + Into<u64>>(numbers: &[T], record: usize, bits: usize, all: &mut u64) -> u64 {
    for record in numbers.chunks_exact(record) {
        let number = record[..64 / bits].iter().rev().fold(0, |number, &part| number << bits | part.into());
        *all = digest(*all, number);
    }
    numbers.iter().map(|&number| number.into()).sum()
}

/// Times a subject, and computes on its batches.
pub struct Meter<'w> {
    work: &'w Work,
    trainer: Option<Trainer>,
    started: Instant,
    cpu_before: Duration,
    /// The total of all requests, also of one that brought no batch.
    wait: Duration,
    digest: u64,
    sum: u64,
    /// What is known so far; `step_s` is the sum of all steps.
    found: Outcome,
}

impl<'w> Meter<'w> {
    pub fn new(work: &'w Work) -> Self {
        let (started, zero) = (Instant::now(), Duration::ZERO);
        let found = Outcome::default();
        Self { work, trainer: None, started, cpu_before: zero, wait: zero, digest: 0, sum: 0, found }
    }

    /// Reports that everything is open, and waits for the start. Call it once, before any worker is started and
    /// anything is read.
    pub fn ready(&mut self) -> io::Result<()> {
        if !self.work.train.is_zero() {
            let (trainer, alone) = Trainer::new(self.work.train);
            (self.trainer, self.found.step_alone_s) = (Some(trainer), alone.as_secs_f64());
        }
        println!("ready");
        io::stdout().flush()?;
        io::stdin().lock().read_line(&mut String::new())?;
        (self.started, self.cpu_before) = (Instant::now(), sys::cpu());
        Ok(())
    }

    /// Requests the next batch. The time of this call is the caller's wait.
    pub fn wait<T>(&mut self, next: impl FnOnce() -> T) -> T {
        let asked = Instant::now();
        let found = next();
        self.wait += asked.elapsed();
        found
    }

    /// Uses a batch: reads one number of every record, then trains.
    pub fn take(&mut self, batch: Batch) -> Result<(), BoxError> {
        let Self { work, found, .. } = self;
        if found.batches == 0 {
            found.first_s = self.started.elapsed().as_secs_f64();
        }
        found.wait_s = self.wait.as_secs_f64();
        let size = work.kind.record_bytes();
        let (numbers, record) = match batch {
            Batch::Tokens(tokens) => (touch(tokens, WINDOW), WINDOW),
            Batch::Images(bytes) => (touch(bytes, size), size),
        };
        let wanted = work.batch * record;
        if wanted != numbers {
            return Err(format!("a batch: wanted {wanted} numbers, found {numbers}").into());
        }
        if work.verify {
            self.sum = self.sum.wrapping_add(match batch {
                Batch::Tokens(tokens) => sum(tokens, WINDOW, 16, &mut self.digest),
                Batch::Images(bytes) => sum(bytes, size, 8, &mut self.digest),
            });
        }
        if let Some(trainer) = &mut self.trainer {
            found.step_s += trainer.step().as_secs_f64();
        }
        found.wall_s = self.started.elapsed().as_secs_f64();
        found.batches += 1;
        found.cpu_s = sys::cpu().saturating_sub(self.cpu_before).as_secs_f64();
        Ok(())
    }

    /// The outcome, with the error that ended the run before the end of the last epoch.
    pub fn outcome(self, error: Option<String>) -> Outcome {
        let Self { work, found, .. } = self;
        Outcome {
            step_s: found.step_s / found.batches.max(1) as f64,
            digest: work.verify.then(|| format!("{:016x}", self.digest)),
            sum: work.verify.then_some(self.sum),
            error,
            ..found
        }
    }
}
