//! What every subject does: its arguments, the batches that it has to deliver, and the meter that it delivers them to.
//!
//! A subject is one process for one run. It opens what it reads, says `ready` ([`Meter::ready`]), and waits for a line
//! or the end of its standard input; only then it starts workers and reads. It asks for each batch inside
//! [`Meter::wait`] and gives it to [`Meter::take`], which touches it and computes. At last it says one line of JSON, an
//! [`Outcome`].

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// The arguments of a subject.
#[derive(Clone, Debug)]
pub struct Work {
    pub kind: Kind,
    pub data: PathBuf,
    /// The file with the order of an epoch, one u64 (little-endian) a record; `None`: that of the file. All epochs
    /// have the same order.
    pub order: Option<PathBuf>,
    /// Records of a batch.
    pub batch: usize,
    pub epochs: u64,
    /// The time that the caller is busy with each batch.
    pub compute: Duration,
    /// The CPU time that each record takes where it is read, as decoding it would.
    pub decode: Duration,
    /// Whether to take digest and sum, which takes time.
    pub verify: bool,
    /// What goes wrong, and at which step (from 0) of the first epoch.
    pub fail: Option<(Fault, u64)>,
}

impl Work {
    /// From the command line, after the name of the subject.
    pub fn parse(mut args: lexopt::Parser) -> Result<Self, BoxError> {
        use lexopt::Arg::Long;
        use lexopt::ValueExt as _;

        let (mut kind, mut data, mut order) = (None, None, None);
        let (mut batch, mut epochs, mut compute_us, mut decode_us) = (None, 1, 0, 0);
        let (mut verify, mut fail) = (false, None);
        while let Some(arg) = args.next()? {
            match arg {
                Long("kind") => {
                    let name = args.value()?.string()?;
                    let found = Kind::ALL.into_iter().find(|kind| kind.name() == name);
                    kind = Some(found.ok_or_else(|| format!("--kind: no such kind: {name}"))?);
                }
                Long("data") => data = Some(PathBuf::from(args.value()?)),
                Long("order") => order = Some(args.value()?).filter(|order| order != "sequential"),
                Long("batch") => batch = Some(args.value()?.parse()?),
                Long("epochs") => epochs = args.value()?.parse()?,
                Long("compute-us") => compute_us = args.value()?.parse()?,
                Long("decode-us") => decode_us = args.value()?.parse()?,
                Long("verify") => verify = true,
                Long("fail") => {
                    let text = args.value()?.string()?;
                    let wrong = || format!("--fail: wanted FAULT@STEP, found {text}");
                    let (name, step) = text.split_once('@').ok_or_else(wrong)?;
                    let fault =
                        Fault::ALL.into_iter().find(|fault| fault.name() == name).ok_or_else(wrong)?;
                    fail = Some((fault, step.parse()?));
                }
                other => return Err(other.unexpected().into()),
            }
        }
        let kind = kind.ok_or("--kind is missing")?;
        Ok(Self {
            kind,
            data: data.ok_or("--data is missing")?,
            order: order.map(PathBuf::from),
            batch: batch.unwrap_or(kind.batch()),
            epochs,
            compute: Duration::from_micros(compute_us),
            decode: Duration::from_micros(decode_us),
            verify,
            fail,
        })
    }

    /// The arguments that [`parse`](Self::parse) reads.
    pub fn args(&self) -> Vec<String> {
        let order = self.order.as_ref().map_or("sequential".to_owned(), |path| path.display().to_string());
        let mut args = vec!["--kind".to_owned(), self.kind.name().to_owned()];
        args.extend(["--data".to_owned(), self.data.display().to_string(), "--order".to_owned(), order]);
        for (name, value) in [
            ("--batch", self.batch as u64),
            ("--epochs", self.epochs),
            ("--compute-us", u64::try_from(self.compute.as_micros()).unwrap_or(u64::MAX)),
            ("--decode-us", u64::try_from(self.decode.as_micros()).unwrap_or(u64::MAX)),
        ] {
            args.extend([name.to_owned(), value.to_string()]);
        }
        args.extend(self.verify.then(|| "--verify".to_owned()));
        if let Some((fault, step)) = self.fail {
            args.extend(["--fail".to_owned(), format!("{}@{step}", fault.name())]);
        }
        args
    }

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

/// One batch as it is delivered: record after record, in one piece.
#[derive(Clone, Copy, Debug)]
pub enum Batch<'a> {
    Tokens(&'a [u32]),
    Images(&'a [u8]),
}

/// What a subject says at its end, as one line of JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    pub samples: u64,
    pub batches: u64,
    /// Seconds from the go to the end of the last computation.
    pub wall_s: f64,
    /// Seconds in which the caller waited for batches, up to the last one.
    pub wait_s: f64,
    /// Seconds of that for the first batch.
    pub first_wait_s: f64,
    /// Seconds from the go to the first batch: the start of workers, and the wait for it.
    pub first_s: f64,
    /// Seconds of CPU, of all its threads and worker processes, from the first batch to the last.
    pub cpu_s: f64,
    /// Seconds of CPU that the process had used when it was ready.
    pub cpu_before_s: f64,
    /// With `--verify`: over the numbers of the records delivered, `h = h * 6364136223846793005 + number + 1` modulo
    /// 2^64, from 0; 16 hexadecimal digits.
    pub digest: Option<String>,
    /// With `--verify`: the sum of all numbers in all batches (tokens or bytes), modulo 2^64.
    pub sum: Option<u64>,
    /// What the caller saw in place of a batch.
    pub error: Option<String>,
}

/// Times what a subject does, and computes on its batches.
pub struct Meter<'w> {
    work: &'w Work,
    started: Instant,
    /// For all that was asked for.
    wait: Duration,
    /// For the batches received.
    wait_received: Duration,
    first_wait: Duration,
    first: Duration,
    last: Duration,
    cpu_before: Duration,
    cpu_first: Duration,
    cpu_last: Duration,
    batches: u64,
    digest: u64,
    sum: u64,
}

impl<'w> Meter<'w> {
    pub fn new(work: &'w Work) -> Self {
        Self {
            work,
            started: Instant::now(),
            wait: Duration::ZERO,
            wait_received: Duration::ZERO,
            first_wait: Duration::ZERO,
            first: Duration::ZERO,
            last: Duration::ZERO,
            cpu_before: Duration::ZERO,
            cpu_first: Duration::ZERO,
            cpu_last: Duration::ZERO,
            batches: 0,
            digest: 0,
            sum: 0,
        }
    }

    /// Everything is open: waits for the go. To be called once, before any worker is started and anything is read.
    pub fn ready(&mut self) -> io::Result<()> {
        println!("ready");
        io::stdout().flush()?;
        self.cpu_before = sys::cpu();
        io::stdin().lock().read_line(&mut String::new())?;
        self.started = Instant::now();
        Ok(())
    }

    /// Asks for the next batch: the time that this takes is the caller's wait.
    pub fn wait<T>(&mut self, next: impl FnOnce() -> T) -> T {
        let asked = Instant::now();
        let found = next();
        self.wait += asked.elapsed();
        found
    }

    /// Uses a batch: reads one number of every record, and is busy for the time to compute.
    pub fn take(&mut self, batch: Batch) -> Result<(), BoxError> {
        self.wait_received = self.wait;
        if self.batches == 0 {
            (self.first, self.first_wait) = (self.started.elapsed(), self.wait);
            self.cpu_first = sys::cpu();
        }
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
        self.batches += 1;
        if !work.compute.is_zero() {
            sys::sleep_until(until);
        }
        self.last = self.started.elapsed();
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
            samples: self.batches * work.batch as u64,
            batches: self.batches,
            wall_s: self.last.as_secs_f64(),
            wait_s: self.wait_received.as_secs_f64(),
            first_wait_s: self.first_wait.as_secs_f64(),
            first_s: self.first.as_secs_f64(),
            cpu_s: (self.cpu_last - self.cpu_first).as_secs_f64(),
            cpu_before_s: self.cpu_before.as_secs_f64(),
            digest: work.verify.then(|| format!("{:016x}", self.digest)),
            sum: work.verify.then_some(self.sum),
            error,
        }
    }
}
