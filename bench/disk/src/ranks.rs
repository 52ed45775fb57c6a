//! One data set, read by 64 processes, each its shard, and by one.

use std::path::Path;
use std::time::Duration;

use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Plan};

use crate::child::{self, Child, Gate};
use crate::data::{self, MIB, RECORD};
use crate::load::{self, Way};
use crate::measure::{self, Effort, Subject};
use crate::report::{Report, Table};
use crate::sys;

const RANKS: u64 = 64;
/// Epochs over warm data: one alone is over too soon.
const WARM_EPOCHS: u64 = 4;
/// How much of the speed of one process all ranks together have to reach.
const WANTED: f64 = 0.9;

pub fn run(report: &mut Report, path: &Path, effort: Effort) -> Result<(), BoxError> {
    let records = data::open(path, ReadMode::Pread)?;
    for (state, epochs) in [("warm", WARM_EPOCHS), ("cold", 1)] {
        let title = format!("{RANKS} processes and one, {state}, batches of 1 MiB, {epochs} epoch(s)");
        let mut table = Table::new("ranks", title, &["MiB/s", "first end s", "last end s"]);
        let subject = |name: &str, world: u64, mode: ReadMode| {
            let records = &records;
            Subject::new(name, move |_| {
                together(path, world, mode, epochs, || match state {
                    "warm" => data::make_warm(records),
                    _ => data::make_cold(records),
                })
            })
        };
        let mut subjects = vec![
            subject("one process", 1, ReadMode::Pread),
            subject("loader in 64 processes", RANKS, ReadMode::Pread),
        ];
        if state == "cold" {
            // What it is for; against one process that reads in the same way.
            subjects.push(subject("one process, Direct", 1, ReadMode::Direct));
            subjects.push(subject("loader in 64 processes, Direct", RANKS, ReadMode::Direct));
        }
        measure::run(&mut table, &subjects, effort.part(2), || Ok(Duration::ZERO))?;
        for (one, mode) in [(0, ""), (2, ", Direct")].into_iter().take(subjects.len() / 2) {
            table.reference = Some(one);
            if let Some(ratio) = table.ratio(&table.rows[one + 1]) {
                let what = format!("{RANKS} ranks against one process, {state}{mode}");
                report.goal(what, format!(">= {WANTED}"), format!("{ratio:.3}"), ratio >= WANTED);
            }
        }
        table.reference = Some(0);
        report.tables.push(table);
    }
    Ok(())
}

/// MiB/s from the common start, which is after `prepare`, to the last end; seconds to the first and the last end.
fn together(
    path: &Path,
    world: u64,
    mode: ReadMode,
    epochs: u64,
    prepare: impl Fn() -> Result<(), BoxError>,
) -> Result<Vec<f64>, BoxError> {
    let gate = Gate::new()?;
    let mode = if mode == ReadMode::Direct { "direct" } else { "pread" };
    let args = ["rank".to_owned(), path.display().to_string(), mode.to_owned(), epochs.to_string()];
    let mut ranks = (0..world)
        .map(|rank| {
            Child::spawn(&gate, &args, &[("RANK", rank.to_string()), ("WORLD_SIZE", world.to_string())])
        })
        .collect::<Result<Vec<_>, _>>()?;
    ranks.iter_mut().try_for_each(Child::ready)?;
    prepare()?;
    let start = sys::monotonic();
    drop(gate);
    let (mut all, mut ends) = (0, Vec::new());
    for rank in &mut ranks {
        let [end, bytes] = rank.figures()?;
        all += bytes;
        ends.push(Duration::from_nanos(end).saturating_sub(start).as_secs_f64());
    }
    let (first, last) = ends.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), &end| (a.min(end), b.max(end)));
    Ok(vec![all as f64 / MIB as f64 / last, first, last])
}

/// The child: reads its shard, and says when it was done and how many bytes it read.
pub fn rank(path: &Path, mode: &str, epochs: u64) -> Result<(), BoxError> {
    let mode = if mode == "direct" { ReadMode::Direct } else { ReadMode::Pread };
    let records = data::open(path, mode)?;
    let plan = Plan::from_env(records.len())?.batch(MIB / RECORD as u64).build()?;
    let mut loader = Way::default().build(records, plan)?;
    child::wait()?;
    for epoch in 0..epochs {
        for batch in loader.epoch(epoch) {
            batch?;
        }
    }
    let end = sys::monotonic();
    let report = loader.report();
    load::check(&report, &plan)?;
    child::say(&[u64::try_from(end.as_nanos())?, report.bytes]);
    Ok(())
}
