//! One data set, read by 64 processes (each its shard) and by one process.

use std::path::Path;
use std::time::Duration;

use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Plan};

use crate::child::{self, Child};
use crate::load;
use twinbuf_bench_harness::data::{self, MIB, RECORD};
use twinbuf_bench_harness::measure::{self, Effort, Subject};
use twinbuf_bench_harness::report::{Table, goal};
use twinbuf_bench_harness::sys;

const RANKS: u64 = 64;
/// Epochs over warm data: a single one is over too soon.
const WARM_EPOCHS: u64 = 4;
/// The target for all ranks together, relative to the speed of one process.
const WANTED: f64 = 0.9;

/// MiB/s of all ranks together, up to the last end. First: from a barrier after a first pass, when every rank has its
/// threads and has touched its slots. Second: from a barrier before the first pass. Third: the second, including the
/// sequential starts of the processes, the opening of files and the building of loaders.
const COLUMNS: [&str; 5] = ["MiB/s", "first epoch", "with starts", "starts s", "first to last end s"];

pub fn run(path: &Path, effort: Effort) -> Result<Vec<Table>, BoxError> {
    let mut tables = Vec::new();
    let records = data::open(path)?;
    for (state, epochs) in [("warm", WARM_EPOCHS), ("cold", 1)] {
        let title = format!("{RANKS} processes and one, {state}, batches of 1 MiB, {epochs} epoch(s)");
        let mut table = Table::new(title, &COLUMNS);
        table.compared = 3;
        let subject = |name: &str, world: u64, mode: ReadMode| {
            let records = &records;
            Subject::new(name, move || {
                together(path, world, mode, epochs, || match state {
                    "warm" => data::make_warm(records),
                    _ => data::make_cold(records),
                })
            })
        };
        let mut subjects = vec![
            subject("one process", 1, ReadMode::default()),
            subject("loader in 64 processes", RANKS, ReadMode::default()),
        ];
        if state == "cold" {
            // The intended use; compared with one process that reads the same way.
            subjects.push(subject("one process, Direct", 1, ReadMode::Direct));
            subjects.push(subject("loader in 64 processes, Direct", RANKS, ReadMode::Direct));
        }
        measure::run(&mut table, &subjects, effort.part(2))?;
        for (one, mode) in [(0, ""), (2, ", Direct")].into_iter().take(subjects.len() / 2) {
            table.reference = vec![one];
            for (column, which) in COLUMNS.iter().enumerate().take(table.compared) {
                if let Some(ratio) = table.ratio(&table.rows[one + 1], column) {
                    let what = format!("{RANKS} ranks against one process, {state}{mode}: {which}");
                    goal(&what, true, WANTED, ratio);
                }
            }
        }
        table.reference = vec![0];
        tables.push(table);
    }
    Ok(tables)
}

/// The figures named by [`COLUMNS`]. `prepare` runs before each barrier.
fn together(
    path: &Path,
    world: u64,
    mode: ReadMode,
    epochs: u64,
    prepare: impl Fn() -> Result<(), BoxError>,
) -> Result<Vec<f64>, BoxError> {
    let mode = if mode == ReadMode::Direct { "direct" } else { "default" };
    let args = ["rank".to_owned(), path.display().to_string(), mode.to_owned(), epochs.to_string()];
    let begun = sys::monotonic();
    let mut ranks = (0..world)
        .map(|rank| Child::spawn(&args, &[("RANK", rank.to_string()), ("WORLD_SIZE", world.to_string())]))
        .collect::<Result<Vec<_>, _>>()?;
    // The time when all were ready; MiB; seconds from the barrier to the first and to the last end.
    let mut pass = || {
        ranks.iter_mut().try_for_each(Child::ready)?;
        let ready = sys::monotonic();
        prepare()?;
        let start = sys::monotonic();
        ranks.iter_mut().try_for_each(Child::go)?;
        let (mut all, mut first, mut last) = (0.0, f64::INFINITY, 0.0_f64);
        for rank in &mut ranks {
            let [end, bytes] = rank.figures()?;
            all += bytes as f64 / MIB as f64;
            let end = Duration::from_nanos(end).saturating_sub(start).as_secs_f64();
            (first, last) = (first.min(end), last.max(end));
        }
        Ok::<_, BoxError>((ready, all, first, last))
    };
    let (ready, mib, _, first_epoch) = pass()?;
    let starts = (ready - begun).as_secs_f64();
    let (_, _, first, last) = pass()?;
    Ok(vec![mib / last, mib / first_epoch, mib / (starts + first_epoch), starts, last - first])
}

/// The child: reads its shard `epochs` times in each of two passes. After each it reports when it was done and how many
/// bytes it read.
pub fn rank(path: &Path, mode: &str, epochs: u64) -> Result<(), BoxError> {
    let mode = if mode == "direct" { ReadMode::Direct } else { ReadMode::default() };
    let records = data::open(path)?;
    let plan = Plan::from_env(records.len())?.batch(MIB / RECORD as u64).build()?;
    let mut loader = load::builder(records, plan.clone()).read_mode(mode).build()?;
    let mut before = 0;
    for pass in 0..2 {
        child::wait()?;
        for epoch in pass * epochs..(pass + 1) * epochs {
            for batch in loader.epoch(epoch) {
                batch?;
            }
        }
        let end = sys::monotonic();
        let report = loader.report();
        load::check(&report, &plan)?;
        child::say(&[u64::try_from(end.as_nanos())?, report.bytes - before]);
        before = report.bytes;
    }
    Ok(())
}
