//! Shuffled chunks from the disk, computing as long as loading: how much of the epoch is spent waiting.

use std::path::Path;
use std::time::Duration;

use twinbuf::{BoxError, Order, Plan, ReadMode};

use crate::data::{self, MIB, RECORD};
use crate::load::{Ran, Way, cold_epoch};
use crate::measure::{self, Effort, Subject};
use crate::report::{Report, Table};

/// MiB of a chunk, which is a batch.
const CHUNK: u64 = 8;
const BUDGETS: [u64; 4] = [4, 16, 32, 64];
/// How much of the epoch may be spent waiting, in percent.
const WANTED: f64 = 5.0;

pub fn run(report: &mut Report, path: &Path, effort: Effort) -> Result<(), BoxError> {
    let of = data::open(path, ReadMode::Pread)?.len();
    let chunk = CHUNK * MIB / RECORD as u64;
    let order = Order::Chunks { records: chunk };
    let plan = Plan::builder(of).batch(chunk).order(order).seed(1).build()?;
    let serial = Way { overlap: false, ..Way::default() };
    // The time to compute on a batch is what it takes to load one without overlap: at the beginning of each
    // round, because disks drift.
    let calibrate = || {
        let ran = cold_epoch(path, plan, serial, Duration::ZERO)?;
        Ok(ran.report.read.busy / u32::try_from(ran.report.batches)?)
    };
    let columns = ["waiting %", "without first", "epoch ms", "load ms a batch", "of it hints", "compute"];
    let mut table =
        Table::new("shuffled", format!("cold, shuffled chunks of {CHUNK} MiB, compute = load"), &columns);
    let subject = |name: String, way: Way| {
        Subject::new(name, move |compute| Ok(figures(&cold_epoch(path, plan, way, compute)?)))
    };
    let default = Way::default();
    let mut subjects = vec![
        subject("serial".into(), serial),
        subject("double buffer, no hints".into(), Way { hints: false, ..default }),
        subject("loader".into(), default),
        subject("loader, host_depth 4".into(), Way { host_depth: 4, ..default }),
    ];
    for budget in BUDGETS {
        subjects.push(subject(format!("loader, prefetch {budget} MiB"), default.prefetch(budget)));
    }
    measure::run(&mut table, &subjects, effort, calibrate)?;
    if let Some(row) = table.row("loader") {
        for (column, what) in [(0, "all of the epoch"), (1, "without the first batch")] {
            let found = row.median(column);
            let what = format!("shuffled chunks, compute = load: waiting, {what}");
            report.goal(what, format!("<= {WANTED} %"), format!("{found:.1} %"), found <= WANTED);
        }
    }
    report.tables.push(table);
    Ok(())
}

fn figures(ran: &Ran) -> Vec<f64> {
    let Ran { report, wall, first_wait, .. } = ran;
    let percent = |part: Duration, whole: Duration| 100.0 * part.as_secs_f64() / whole.as_secs_f64();
    let ms_a_batch = |time: Duration| 1e3 * time.as_secs_f64() / report.batches as f64;
    let waiting = report.train.waiting;
    vec![
        percent(waiting, *wall),
        percent(waiting.saturating_sub(*first_wait), wall.saturating_sub(*first_wait)),
        1e3 * wall.as_secs_f64(),
        ms_a_batch(report.read.busy),
        ms_a_batch(report.hints.time),
        ms_a_batch(report.train.busy),
    ]
}
