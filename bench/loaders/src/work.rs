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

/// Times a subject, and computes on its batches.
pub struct Meter<'w> {
    work: &'w Work,
    trainer: Option<Trainer>,
    started: Instant,
    /// The total of all requests, and of the received batches.
    wait: Duration,
    wait_received: Duration,
    first: Duration,
    last: Duration,
    cpu_before: Duration,
    cpu_last: Duration,
    step_alone: Duration,
    steps: Duration,
    batches: u64,
    digest: u64,
    sum: u64,
}

impl<'w> Meter<'w> {
    pub fn new(work: &'w Work) -> Self {
        Self {
            work,
            trainer: None,
            started: Instant::now(),
            wait: Duration::ZERO,
            wait_received: Duration::ZERO,
            first: Duration::ZERO,
            last: Duration::ZERO,
            cpu_before: Duration::ZERO,
            cpu_last: Duration::ZERO,
            step_alone: Duration::ZERO,
            steps: Duration::ZERO,
            batches: 0,
            digest: 0,
            sum: 0,
        }
    }

    /// Reports that everything is open, and waits for the start. Call it once, before any worker is started and
    /// anything is read.
    pub fn ready(&mut self) -> io::Result<()> {
        if !self.work.train.is_zero() {
            let (trainer, alone) = Trainer::new(self.work.train);
            (self.trainer, self.step_alone) = (Some(trainer), alone);
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
        if self.batches == 0 {
            self.first = self.started.elapsed();
        }
        self.wait_received = self.wait;
        let Self { work, .. } = *self;
        let (records, size) = (work.batch, work.kind.record_bytes());
        let (wanted, found) = match batch {
            Batch::Tokens(tokens) => (records * WINDOW, tokens.len()),
            Batch::Images(bytes) => (records * size, bytes.len()),
        };
        if wanted != found {
            return Err(format!("a batch: wanted {wanted} numbers, found {found}").into());
        }
        match batch {
            Batch::Tokens(tokens) => {
                tokens.chunks_exact(WINDOW).for_each(|record| _ = black_box(record[WINDOW / 2]));
            }
            Batch::Images(bytes) => {
                bytes.chunks_exact(size).for_each(|record| _ = black_box(record[size / 2]));
            }
        }
        if work.verify {
            self.verify(batch);
        }
        if let Some(trainer) = &mut self.trainer {
            self.steps += trainer.step();
        }
        self.last = self.started.elapsed();
        self.batches += 1;
        self.cpu_last = sys::cpu();
        Ok(())
    }

    fn verify(&mut self, batch: Batch) {
        let mut number = |number: u64| {
            self.digest =
                self.digest.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(number).wrapping_add(1);
        };
        let sum: u64 = match batch {
            Batch::Tokens(tokens) => {
                for record in tokens.chunks_exact(WINDOW) {
                    number(
                        record[..4].iter().rev().fold(0, |number, &token| number << 16 | u64::from(token)),
                    );
                }
                tokens.iter().map(|&token| u64::from(token)).sum()
            }
            Batch::Images(bytes) => {
                for record in bytes.chunks_exact(self.work.kind.record_bytes()) {
                    number(record[..8].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)));
                }
                bytes.iter().map(|&byte| u64::from(byte)).sum()
            }
        };
        self.sum = self.sum.wrapping_add(sum);
    }

    /// The outcome, with the error that ended the run before the end of the last epoch.
    pub fn outcome(&self, error: Option<String>) -> Outcome {
        let Self { work, .. } = self;
        Outcome {
            batches: self.batches,
            first_s: self.first.as_secs_f64(),
            wall_s: self.last.as_secs_f64(),
            wait_s: self.wait_received.as_secs_f64(),
            cpu_s: self.cpu_last.saturating_sub(self.cpu_before).as_secs_f64(),
            step_alone_s: self.step_alone.as_secs_f64(),
            step_s: self.steps.as_secs_f64() / self.batches.max(1) as f64,
            digest: work.verify.then(|| format!("{:016x}", self.digest)),
            sum: work.verify.then_some(self.sum),
            error,
        }
    }
}
