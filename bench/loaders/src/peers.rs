//! All subjects on the same batches: whether they deliver them, how fast, and at what cost.

use std::time::{Duration, Instant};

use twinbuf::BoxError;
use twinbuf_bench_harness::data::{make_cold, make_warm};
use twinbuf_bench_harness::measure::Effort;

use crate::data::{self, Files};
use crate::measure::Process;
use crate::ours;
use crate::report::quoted;
use crate::work::{Outcome, Work};

/// A subject, and its command line.
pub struct Subject {
    pub name: &'static str,
    pub program: Vec<String>,
}

/// The subject whose load time of a batch is the time of a training step: it loads and does nothing else at the same
/// time.
pub const SERIAL: &str = "llm.c";

/// twinbuf past the page cache.
pub const DIRECT: &str = "twinbuf direct";

/// Shuffled or not, and the cache. Each is also measured with a trainer if the serial loop succeeds.
const PLACES: [(bool, &str); 4] = [(true, "cold"), (true, "warm"), (false, "cold"), (false, "warm")];

/// The start of workers and what the first batches find out matter little in a warm run of this length.
const LEAST: Duration = Duration::from_millis(300);

/// The figures of one run, from the start to the last batch. A rate measured from the first batch on would ignore the
/// time in which loaders with many workers had read ahead.
pub struct Sample {
    pub samples_per_s: f64,
    /// Milliseconds to the first batch, including the start of workers.
    pub first_ms: f64,
    /// CPU time of all threads and worker processes, including the trainer.
    pub cpu_us_per_sample: f64,
    /// A training step, without and with the loader running.
    pub step_alone_us: f64,
    pub step_us: f64,
    /// The share of the time in which the caller trains.
    pub au: f64,
    /// The caller's wait per batch.
    wait: Duration,
}

/// What a subject delivers for one kind, shuffled.
pub struct Delivered {
    pub order_right: bool,
    pub content_right: bool,
    /// Whether the digests of two runs are the same.
    pub repeated: bool,
}

/// Runs every subject on each kind twice, untimed and shuffled, and compares what it delivered with the file. Returns a line
/// for each.
pub fn same(subjects: &[Subject], kinds: &[Files]) -> Result<Vec<String>, BoxError> {
    let mut found = Vec::new();
    for files in kinds {
        make_warm(&ours::open(&files.work(true))?)?;
        let work = Work { verify: true, ..files.work(true) };
        let (digest, sum) = data::expected(&work)?;
        let digest = format!("{digest:016x}");
        for subject in subjects {
            let run = || {
                let mut process = Process::start(&subject.program)?;
                let first = process.run(&work, || Ok(()))?;
                let second = process.run(&work, || Ok(()))?;
                Ok(Delivered {
                    order_right: second.digest.as_ref() == Some(&digest),
                    content_right: second.sum == Some(sum),
                    repeated: second.digest == first.digest,
                })
            };
            let (kind, subject) = (files.kind.name(), subject.name);
            let delivered = run().map_err(|error: BoxError| error.to_string());
            match &delivered {
                Ok(delivered) => println!(
                    "{kind}, {subject}: order {}, content {}, repeated {}",
                    if delivered.order_right { "right" } else { "WRONG" },
                    if delivered.content_right { "right" } else { "WRONG" },
                    if delivered.repeated { "the same" } else { "ANOTHER" },
                ),
                Err(error) => println!("{kind}, {subject}: FAILED: {error}"),
            }
            found.push(delivered_line(&format!("{kind},{subject}"), &delivered));
        }
    }
    Ok(found)
}

/// Runs all subjects, round by round, in each place in a new order. Passes the lines of the runs so far to `write` after
/// each round.
///
/// A subject is one process per round, as long as its runs succeed and leave no part of the file mapped. A cold run
/// has one epoch, a warm one as many as take [`LEAST`].
pub fn speed(
    subjects: &[Subject],
    kinds: &[Files],
    effort: Effort,
    mut write: impl FnMut(&[String]) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let (begun, mut rows, mut round) = (Instant::now(), Vec::new(), 0);
    while effort.allows(round, begun) {
        // Each process starts at its first run: its imports would disturb the run of another one.
        let mut processes: Vec<(&Subject, Option<Process>)> =
            subjects.iter().map(|subject| (subject, None)).collect();
        for files in kinds {
            for (shuffled, cache) in PLACES {
                let order = if shuffled { "shuffled" } else { "sequential" };
                let mut work = files.work(shuffled);
                for trains in [false, true] {
                    fastrand::shuffle(&mut processes);
                    let mut serial = None;
                    for (subject, process) in &mut processes {
                        // A subject that bypasses the page cache has no warm figures.
                        if subject.name == DIRECT && cache == "warm" {
                            continue;
                        }
                        let (kind, place) = (files.kind.name(), format!("{order} {cache}"));
                        let sample = timed(subject, process, &work, cache).map_err(|error| error.to_string());
                        let subject = subject.name;
                        match &sample {
                            Ok(sample) => println!(
                                "round {round}: {kind} {place}, {subject}: {:.0} samples/s, first {:.1} ms, CPU \
                                 {:.1} us a sample, AU {:.2}, step {:.0} us, alone {:.0} us",
                                sample.samples_per_s,
                                sample.first_ms,
                                sample.cpu_us_per_sample,
                                sample.au,
                                sample.step_us,
                                sample.step_alone_us,
                            ),
                            Err(error) => {
                                println!("round {round}: {kind} {place}, {subject}: FAILED: {error}");
                            }
                        }
                        if subject == SERIAL {
                            serial = sample.as_ref().ok().map(|sample| sample.wait);
                        }
                        let place = format!("{round},{kind},{order},{cache},{trains},{subject}");
                        rows.push(line(&place, trains, &sample));
                    }
                    // A training step takes as long as the serial loop took to load a batch, in the same round and
                    // place.
                    let Some(wait) = serial else { break };
                    work.train = wait;
                }
            }
        }
        round += 1;
        write(&rows)?;
    }
    Ok(())
}

/// One run. If it is warm, it is done again with more epochs until it takes long enough.
fn timed(
    subject: &Subject,
    process: &mut Option<Process>,
    work: &Work,
    cache: &str,
) -> Result<Sample, BoxError> {
    let mut work = work.clone();
    loop {
        let outcome = one(subject, process, &work, cache)?;
        let more = LEAST.as_secs_f64() / outcome.wall_s;
        if cache == "cold" || more <= 1.0 {
            return Ok(Sample::new(&work, &outcome));
        }
        work.epochs *= (1.2 * more).ceil() as u64;
    }
}

/// One run with the file in the page cache or not, by the existing process or by a new one.
fn one(
    subject: &Subject,
    process: &mut Option<Process>,
    work: &Work,
    cache: &str,
) -> Result<Outcome, BoxError> {
    let records = ours::open(work)?;
    let mut running = match process.take() {
        Some(running) => running,
        None => Process::start(&subject.program)?,
    };
    let prepare = || match cache {
        "warm" => make_warm(&records),
        _ => make_cold(&records),
    };
    let found = running.run(work, prepare)?;
    let wanted = work.epochs * (work.records()? / work.batch as u64);
    if found.batches != wanted {
        return Err(format!("wanted {wanted} batches, found {}", found.batches).into());
    }
    // Mapped pages would stay in the page cache, and no cold run could start.
    if !running.maps(&work.data)? {
        *process = Some(running);
    }
    Ok(found)
}

impl Sample {
    fn new(work: &Work, outcome: &Outcome) -> Self {
        let batches = outcome.batches as f64;
        let samples = batches * work.batch as f64;
        Self {
            samples_per_s: samples / outcome.wall_s,
            first_ms: outcome.first_s * 1e3,
            cpu_us_per_sample: outcome.cpu_s * 1e6 / samples,
            step_alone_us: outcome.step_alone_s * 1e6,
            step_us: outcome.step_s * 1e6,
            au: outcome.step_s * batches / outcome.wall_s,
            wait: Duration::from_secs_f64(outcome.wait_s / batches),
        }
    }
}

/// The line of a run in this place, which may have a trainer.
fn line(place: &str, trains: bool, sample: &Result<Sample, String>) -> String {
    match sample {
        Ok(Sample { samples_per_s, first_ms, cpu_us_per_sample, step_alone_us, step_us, au, .. }) => {
            let line = format!("{place},{samples_per_s:.0},{first_ms:.2},{cpu_us_per_sample:.3}");
            let steps = format!(",{au:.4},{step_us:.2},{step_alone_us:.2},\n");
            line + if trains { &steps } else { ",,,,\n" }
        }
        Err(error) => format!("{place},,,,,,,{}\n", quoted(error)),
    }
}

/// The line of a subject and a kind.
fn delivered_line(place: &str, delivered: &Result<Delivered, String>) -> String {
    match delivered {
        Ok(Delivered { order_right, content_right, repeated }) => {
            format!("{place},{order_right},{content_right},{repeated},\n")
        }
        Err(error) => format!("{place},,,,{}\n", quoted(error)),
    }
}
