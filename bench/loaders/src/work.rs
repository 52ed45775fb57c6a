//! What every subject does: what it is told, the batches that it has to deliver, and the meter that it delivers them to.
//!
//! A subject is a process that runs whenever a line of JSON comes, a [`Work`], until its standard input ends. In a run
//! it opens what it reads, says `ready` ([`Meter::ready`]), and waits for another line; only then it starts workers and
//! reads. It asks for each batch inside [`Meter::wait`] and gives it to [`Meter::take`], which touches it and computes.
//! Then it closes everything, so that no page of the file stays mapped, and says one line of JSON, an [`Outcome`].

use std::fs::{self, OpenOptions};
use std::hint::black_box;
use std::io::{self, BufRead as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use twinbuf::BoxError;
use twinbuf_bench_disk::sys::monotonic;

use crate::sys;

/// Tokens of a window, of which the first of the next window is the last.
pub const WINDOW: usize = 1024 + 1;

/// What the file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A shard of llm.c: a header, then tokens of 16 bits. A record is a window of [`WINDOW`] tokens, a batch holds
    /// them as 32-bit numbers. The first 4 tokens of a window are its number, 16 bits each, the lowest first.
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

/// What is to go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// The code that makes a batch panics: [`Work::fault`].
    Panic,
    /// A worker process is killed. Threads cannot be.
    Kill,
    /// The file is cut off at half of its length by the caller, when it has received the batch of this step:
    /// [`Meter::take`].
    Truncate,
}

impl Fault {
    pub const ALL: [Self; 3] = [Self::Panic, Self::Kill, Self::Truncate];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Panic => "panic",
            Self::Kill => "kill",
            Self::Truncate => "truncate",
        }
    }
}

/// What a subject is told to do: one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Work {
    pub kind: Kind,
    pub data: PathBuf,
    /// The file with the order of an epoch, one u64 (little-endian) a record; `None`: that of the file. All epochs
    /// have the same order.
    pub order: Option<PathBuf>,
    /// Records of a batch.
    pub batch: usize,
    pub epochs: u64,
    /// The caller sleeps so long on each batch.
    #[serde(rename = "compute_us", with = "micros")]
    pub compute: Duration,
    /// The caller trains about so long on each batch, if nothing slows it down: [`Trainer`]. Zero: not at all.
    #[serde(rename = "train_us", with = "micros")]
    pub train: Duration,
    /// The CPU time that each record takes where it is read, as decoding it would.
    #[serde(rename = "decode_us", with = "micros")]
    pub decode: Duration,
    /// Whether to take digest and sum, which takes time.
    pub verify: bool,
    /// What goes wrong, and at which step (from 0) of the first epoch.
    pub fail: Option<(Fault, u64)>,
}

impl Work {
    /// Records in the file.
    pub fn records(&self) -> io::Result<u64> {
        Ok(self.kind.records(fs::metadata(&self.data)?.len()))
    }

    /// The numbers of the records of an epoch, in order; those that fill no whole batch are left out.
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

    /// To be called by the code that makes the batch of `step`, where it runs.
    ///
    /// # Panics
    ///
    /// If that is the fault that is wanted.
    pub fn fault(&self, step: u64) {
        if self.fail == Some((Fault::Panic, step)) {
            panic!("a fault that was asked for, at step {step}");
        }
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

/// One batch as it is delivered: record after record, in one piece.
#[derive(Clone, Copy, Debug)]
pub enum Batch<'a> {
    Tokens(&'a [u32]),
    Images(&'a [u8]),
}

/// What a subject says at the end of a run, as one line of JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub batches: u64,
    /// Seconds from the go to the first batch: the start of workers, and the wait for it.
    pub first_s: f64,
    /// Seconds from the go to the end of the computation on the last batch.
    pub wall_s: f64,
    /// Seconds of these in which the caller waited for batches.
    pub wait_s: f64,
    /// Seconds of CPU, of all its threads and worker processes, meanwhile.
    pub cpu_s: f64,
    /// Seconds of a training step: before the go the median, on the batches the mean. 0 without training.
    pub step_alone_s: f64,
    pub step_s: f64,
    /// If `verify`: over the numbers of the records delivered, `h = h * 6364136223846793005 + number + 1` modulo
    /// 2^64, from 0; 16 hexadecimal digits.
    pub digest: Option<String>,
    /// If `verify`: the sum of all numbers in all batches (tokens or bytes), modulo 2^64.
    pub sum: Option<u64>,
    /// What the caller saw in place of a batch.
    pub error: Option<String>,
}

/// A training step that takes CPU time: products of small matrices, which stay in the processor's nearest cache.
struct Trainer {
    numbers: Vec<f32>,
    out: Vec<f32>,
    /// Products of a step.
    products: u32,
}

/// Rows and columns of a matrix.
const SIDE: usize = 48;

impl Trainer {
    /// One whose step takes about so long, and the median of its steps while nothing is loaded.
    fn new(step: Duration) -> (Self, Duration) {
        let numbers = (0..SIDE * SIDE).map(|i| i as f32 / (SIDE * SIDE) as f32).collect();
        let mut trainer = Self { numbers, out: vec![0.0; SIDE * SIDE], products: 100 };
        // The fastest of some: a step that is disturbed here would make all of them short.
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

/// Times what a subject does, and computes on its batches.
pub struct Meter<'w> {
    work: &'w Work,
    trainer: Option<Trainer>,
    started: Instant,
    /// For all that was asked for, and for the batches received.
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

    /// Everything is open: waits for the go. To be called once, before any worker is started and anything is read.
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

    /// Asks for the next batch: the time that this takes is the caller's wait.
    pub fn wait<T>(&mut self, next: impl FnOnce() -> T) -> T {
        let asked = Instant::now();
        let found = next();
        self.wait += asked.elapsed();
        found
    }

    /// Uses a batch: reads one number of every record, then sleeps or trains.
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
        let until = monotonic() + work.compute;
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
        if work.fail == Some((Fault::Truncate, self.batches)) {
            let file = OpenOptions::new().write(true).open(&work.data)?;
            file.set_len(file.metadata()?.len() / 2)?;
        }
        if !work.compute.is_zero() {
            sys::sleep_until(until);
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

    /// What was found, with what ended the run if it was not the end of the last epoch.
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
