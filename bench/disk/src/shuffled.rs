//! Shuffled chunks from the disk, with compute as long as the load: the share of the epoch spent waiting.

use std::path::Path;
use std::time::Duration;

use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Plan, Shuffle};

use crate::data::{self, MIB, RECORD};
use crate::load::{Ran, Way, cold_epoch};
use crate::measure::{self, Effort, Subject};
use crate::report::{Report, Table};

/// MiB of a chunk. A chunk is a batch.
const CHUNK: u64 = 8;
const BUDGETS: [u64; 2] = [16, 64];
/// The maximum share of the epoch spent waiting, in percent.
const WANTED: f64 = 5.0;

pub fn run(report: &mut Report, path: &Path, effort: Effort) -> Result<(), BoxError> {
    let of = data::open(path)?.len();
    let chunk = CHUNK * MIB / RECORD as u64;
    let order = Shuffle::Chunks { records: chunk };
    let plan = Plan::builder(of).batch(chunk).shuffle(order).seed(1).build()?;
    let plan = &plan;
    // The compute time per batch equals the load time without overlap. It is measured at the start of each
    // round, because disks drift.
    let calibrate = |mode| {
        let ran = cold_epoch(path, plan, Way { overlap: false, mode, ..Way::default() }, Duration::ZERO)?;
        Ok::<_, BoxError>(ran.report.read.busy / u32::try_from(ran.report.batches)?)
    };
    let columns = ["waiting %", "without first", "epoch ms", "load ms a batch", "of it hints", "compute"];
    let mut table =
        Table::new("shuffled", format!("cold, shuffled chunks of {CHUNK} MiB, compute = load"), &columns);
    let subject = |name: String, way: Way| {
        Subject::new(name, move |compute| Ok(figures(&cold_epoch(path, plan, way, compute)?)))
    };
    // With the load time of this read mode.
    let direct = |depth| {
        let way = Way { mode: ReadMode::Direct, depth, ..Way::default() };
        let name = if depth == 2 { "loader, Direct" } else { "loader, Direct, depth 4" };
        Subject::new(name, move |_| Ok(figures(&cold_epoch(path, plan, way, calibrate(ReadMode::Direct)?)?)))
    };
    let default = Way::default();
    let mut subjects = vec![
        subject("serial".into(), Way { overlap: false, ..default }),
        subject("double buffer, no hints".into(), Way { hints: false, ..default }),
        subject("loader".into(), default),
        subject("loader, depth 4".into(), Way { depth: 4, ..default }),
        direct(2),
        direct(4),
    ];
    for budget in BUDGETS {
        subjects.push(subject(format!("loader, prefetch {budget} MiB"), default.hint_window(budget)));
    }
    measure::run(&mut table, &subjects, effort, || calibrate(ReadMode::default()))?;
    for name in ["loader", "loader, Direct", "loader, Direct, depth 4"] {
        let Some(row) = table.row(name) else { continue };
        for (column, of) in [(0, "all of the epoch"), (1, "without the first batch")] {
            let found = row.median(column);
            let what = format!("shuffled chunks, compute = load: {name}: waiting, {of}");
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
        ms_a_batch(report.reading.hint_time),
        ms_a_batch(report.train.busy),
    ]
}
