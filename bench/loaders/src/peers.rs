//! All subjects on the same batches: that they deliver them, how fast, and at what cost.

use std::time::{Duration, Instant};

use twinbuf::BoxError;
use twinbuf_bench_disk::data::{make_cold, make_warm};
use twinbuf_bench_disk::measure::Effort;

use crate::data::{self, Files};
use crate::measure::{self, End, Ran};
use crate::ours;
use crate::work::{Kind, Outcome, Work};

/// A subject, and the beginning of its command line.
pub struct Subject {
    pub name: &'static str,
    pub program: Vec<String>,
    /// Whether its workers are processes.
    pub processes: bool,
}

/// The subject whose load time of a batch is the balanced time to compute: it does nothing else meanwhile.
pub const SERIAL: &str = "llm.c";

/// twinbuf past the page cache.
pub const DIRECT: &str = "twinbuf direct";

/// As long as the serial loop took to load a batch, in the same round.
const BALANCED: &str = "balanced";
const COMPUTES: [&str; 2] = ["none", BALANCED];

/// Shuffled or not, and the cache.
const PLACES: [(bool, &str); 4] = [(false, "cold"), (false, "warm"), (true, "cold"), (true, "warm")];

/// No run takes longer.
const LIMIT: Duration = Duration::from_secs(300);

/// One place of a table: what it is about, and what was found in each round.
pub struct Cell {
    pub kind: &'static str,
    pub order: &'static str,
    pub cache: &'static str,
    pub compute: &'static str,
    pub subject: &'static str,
    subject_index: usize,
    pub epochs: u64,
    pub samples: Vec<Sample>,
}

/// What one run took.
pub struct Sample {
    /// Of the caller, a batch.
    pub compute_us: f64,
    /// After the first batch.
    pub samples_per_s: f64,
    /// The caller waits so many microseconds for a batch after the first.
    pub wait_us: f64,
    /// The share of the time after the first batch that the caller waits.
    pub wait_share: f64,
    /// From the go to the first batch, starts of workers included.
    pub first_ms: f64,
    /// After the first batch, to the last: of all threads and worker processes.
    pub cpu_us_per_sample: f64,
    /// Before and after that: what starts and ends cost.
    pub cpu_fixed_ms: f64,
}

/// What a subject delivers, in one kind and order.
pub struct Same {
    pub kind: &'static str,
    pub order: &'static str,
    pub subject: &'static str,
    /// Of the second of two runs.
    pub digest: String,
    pub order_right: bool,
    pub content_right: bool,
    /// Whether the digests of both runs are the same.
    pub repeated: bool,
    /// In MiB: when it was ready, and at most in the run.
    pub memory: (f64, f64),
}

pub const fn order_name(shuffled: bool) -> &'static str {
    if shuffled { "shuffled" } else { "sequential" }
}

/// Runs every subject on each kind and order, without a clock: twice to compare with what is in the file, once to look
/// at its memory.
pub fn same(subjects: &[Subject], kinds: &[Files]) -> Result<Vec<Same>, BoxError> {
    let mut found = Vec::new();
    for files in kinds {
        make_warm(&ours::open(&files.work(false))?)?;
        for shuffled in [false, true] {
            // Long enough to be looked at.
            let work = Work { compute: Duration::from_millis(1), ..files.work(shuffled) };
            let verify = Work { verify: true, ..work.clone() };
            let (digest, sum) = *data::expected(&work)?.last().ok_or("no batch")?;
            let digest = format!("{digest:016x}");
            for subject in subjects {
                let run = |work, memory| {
                    let ran = measure::run(&subject.program, work, memory, LIMIT, || Ok(()))?;
                    let memory = ran.memory;
                    outcome(subject, ran).map(|(outcome, _)| (outcome, memory))
                };
                let (first, _) = run(&verify, false)?;
                let (second, _) = run(&verify, false)?;
                // Not while it verifies, which takes memory.
                let (_, memory) = run(&work, true)?;
                let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                let same = Same {
                    kind: files.kind.name(),
                    order: order_name(shuffled),
                    subject: subject.name,
                    order_right: second.digest.as_ref() == Some(&digest),
                    content_right: second.sum == Some(sum),
                    repeated: second.digest == first.digest,
                    digest: second.digest.unwrap_or_default(),
                    memory: (mib(memory.0), mib(memory.1)),
                };
                println!(
                    "{} {}, {}: order {}, content {}, repeated {}; {:.1} MiB ready, {:.1} at most",
                    same.kind,
                    same.order,
                    same.subject,
                    if same.order_right { "right" } else { "WRONG" },
                    if same.content_right { "right" } else { "WRONG" },
                    if same.repeated { "the same" } else { "ANOTHER" },
                    same.memory.0,
                    same.memory.1,
                );
                found.push(same);
            }
        }
    }
    Ok(found)
}

/// Runs all subjects, round by round, each time in a new order, and gives what there is to `write` after each round.
///
/// A warm run has `warm_epochs` epochs, a cold one has one.
pub fn speed(
    subjects: &[Subject],
    kinds: &[Files],
    effort: Effort,
    warm_epochs: u64,
    mut write: impl FnMut(&[Cell]) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let serial = subjects.iter().find(|subject| subject.name == SERIAL).ok_or("the serial one")?;
    let begun = Instant::now();
    let mut cells = cells(subjects, kinds, warm_epochs);
    let mut round = 0;
    while effort.allows(round, begun) {
        for files in kinds {
            for (shuffled, cache) in PLACES {
                let here = (files.kind.name(), order_name(shuffled), cache);
                let (mut work, mut load) = (files.work(shuffled), Duration::ZERO);
                for compute in COMPUTES {
                    let mut todo: Vec<&mut Cell> = cells
                        .iter_mut()
                        .filter(|cell| (cell.kind, cell.order, cell.cache) == here && cell.compute == compute)
                        .collect();
                    work.epochs = todo[0].epochs;
                    if compute == BALANCED {
                        let (found, _) = one(serial, &work, cache)?;
                        load = Duration::from_secs_f64(found.wait_s / found.batches as f64);
                    }
                    let work = Work { compute: load, ..work.clone() };
                    fastrand::shuffle(&mut todo);
                    for cell in todo {
                        let subject = &subjects[cell.subject_index];
                        let (outcome, cpu) = one(subject, &work, cache)?;
                        let sample = Sample::new(&work, &outcome, cpu);
                        println!(
                            "round {round}: {here:?}, {compute}, {}: {:.0} samples/s, waits {:.0} us a batch, CPU {:.1} us a sample",
                            subject.name, sample.samples_per_s, sample.wait_us, sample.cpu_us_per_sample
                        );
                        cell.samples.push(sample);
                    }
                }
            }
        }
        write(&cells)?;
        round += 1;
    }
    Ok(())
}

/// The CPU time of a record in [`decode`].
const DECODE: Duration = Duration::from_millis(4);

/// Runs all subjects on shuffled records that take CPU time to make, round by round, each time in a new order. Prints
/// the median of each, its quartiles, and whether the order was right.
pub fn decode(subjects: &[Subject], images: &Files, effort: Effort) -> Result<(), BoxError> {
    let work = Work { decode: DECODE, verify: true, ..images.work(true) };
    let (digest, _) = *data::expected(&work)?.last().ok_or("no batch")?;
    let mut found: Vec<(&Subject, Vec<f64>, bool)> =
        subjects.iter().map(|subject| (subject, Vec::new(), true)).collect();
    let begun = Instant::now();
    while effort.allows(found[0].1.len(), begun) {
        let mut todo: Vec<_> = found.iter_mut().collect();
        fastrand::shuffle(&mut todo);
        for (subject, samples, right) in todo {
            let (outcome, cpu) = one(subject, &work, "warm")?;
            samples.push(Sample::new(&work, &outcome, cpu).samples_per_s);
            *right &= outcome.digest.as_ref() == Some(&format!("{digest:016x}"));
        }
    }
    println!("| {DECODE:?} of CPU time a record | samples/s | quartiles | order |");
    println!("| --- | ---: | ---: | --- |");
    for (subject, mut samples, right) in found {
        samples.sort_by(f64::total_cmp);
        let at = |part: usize| samples[(samples.len() - 1) * part / 4];
        let order = if right { "the plan's" } else { "ANOTHER" };
        println!("| {} | {:.1} | {:.1}–{:.1} | {order} |", subject.name, at(2), at(1), at(3));
    }
    Ok(())
}

/// All places, empty, in the order in which they are reported.
fn cells(subjects: &[Subject], kinds: &[Files], warm_epochs: u64) -> Vec<Cell> {
    let mut cells = Vec::new();
    for files in kinds {
        for compute in COMPUTES {
            for (shuffled, cache) in PLACES {
                // Every window from the disk, each waited for: it is not made for that, and takes longer than all others.
                let left_out = |name| name == DIRECT && files.kind == Kind::Tokens && shuffled;
                let here = subjects.iter().enumerate().filter(|(_, subject)| !left_out(subject.name));
                cells.extend(here.map(|(subject_index, subject)| Cell {
                    kind: files.kind.name(),
                    order: order_name(shuffled),
                    cache,
                    compute,
                    subject: subject.name,
                    subject_index,
                    epochs: if cache == "warm" { warm_epochs } else { 1 },
                    samples: Vec::new(),
                }));
            }
        }
    }
    cells
}

/// One run with the file in the page cache or out of it.
fn one(subject: &Subject, work: &Work, cache: &str) -> Result<(Outcome, Duration), BoxError> {
    let records = ours::open(work)?;
    let prepare = || match cache {
        "warm" => make_warm(&records),
        _ => make_cold(&records),
    };
    let ran = measure::run(&subject.program, work, false, LIMIT, prepare)?;
    let (found, cpu) = outcome(subject, ran)?;
    let wanted = work.epochs * (work.records()? / work.batch as u64);
    if found.batches != wanted {
        return Err(format!("{}: wanted {wanted} batches, found {}", subject.name, found.batches).into());
    }
    Ok((found, cpu))
}

/// What a run said in which nothing was to go wrong.
fn outcome(subject: &Subject, ran: Ran) -> Result<(Outcome, Duration), BoxError> {
    let name = subject.name;
    match ran.end {
        End::Said(Outcome { error: Some(error), .. }) => Err(format!("{name}: {error}").into()),
        End::Said(outcome) => Ok((outcome, ran.cpu)),
        End::Died(status, words) => Err(format!("{name}: {status}: {words}").into()),
        End::Hung => Err(format!("{name}: no end within {LIMIT:?}").into()),
    }
}

impl Sample {
    fn new(work: &Work, outcome: &Outcome, cpu: Duration) -> Self {
        let batches = (outcome.batches - 1) as f64;
        let compute_us = work.compute.as_secs_f64() * 1e6;
        let wall = outcome.wall_s - outcome.first_s - work.compute.as_secs_f64();
        let wait = outcome.wait_s - outcome.first_wait_s;
        Self {
            compute_us,
            samples_per_s: batches * work.batch as f64 / wall,
            wait_us: wait / batches * 1e6,
            wait_share: wait / wall,
            first_ms: outcome.first_s * 1e3,
            cpu_us_per_sample: outcome.cpu_s * 1e6 / (batches * work.batch as f64),
            cpu_fixed_ms: (cpu.as_secs_f64() - outcome.cpu_s) * 1e3,
        }
    }
}
