//! The effect of the hints: the share of a batch's pages that are in memory just before it is read.

use std::path::Path;
use std::time::Duration;

use twinbuf::mmap::Residency;
use twinbuf::{BoxError, Plan, Shuffle};

use crate::data::{self, MIB, RECORD};
use crate::load::{Ran, Way, cold_epoch};
use crate::measure::{self, Effort, Subject};
use crate::report::{Report, Table};

/// MiB of a batch, and of a chunk.
const BATCH: u64 = 4;
/// MiB of an epoch in which each record is shuffled: the disk needs long for it.
const RECORDS: u64 = 128;
/// The target share in memory, in percent.
const WANTED: f64 = 99.0;

pub fn run(report: &mut Report, path: &Path, effort: Effort) -> Result<(), BoxError> {
    let all = data::open(path)?.len();
    let batch = BATCH * MIB / RECORD as u64;
    let few = all.min(RECORDS * MIB / RECORD as u64);
    for (title, order, of) in [
        ("sequential", Shuffle::None, all),
        ("shuffled chunks of 4 MiB", Shuffle::Chunks { records: batch }, all),
        ("shuffled records of 4 KiB", Shuffle::Full, few),
    ] {
        let plan = Plan::builder(of).batch(batch).shuffle(order).build()?;
        let plan = &plan;
        let columns = [
            "% resident",
            "without first",
            "major faults a batch",
            "waiting %",
            "load ms a batch",
            "compute",
        ];
        let mut table = Table::new("resident", format!("{title}, batches of {BATCH} MiB"), &columns);
        let subject = |name: &str, way: Way, times: u32| {
            Subject::new(name, move |load: Duration| Ok(figures(&cold_epoch(path, plan, way, load * times)?)))
        };
        let way = Way { residency: true, ..Way::default() };
        let subjects = [
            subject("loader, compute 0", way, 0),
            subject("loader, compute = load", way, 1),
            subject("loader, compute = 2 load", way, 2),
            subject("loader, 32 MiB, = load", way.hint_window(32), 1),
            subject("no hints, compute = load", Way { hints: false, ..way }, 1),
        ];
        // The time that a batch takes when nothing is read ahead and no hint precedes it.
        let serial = Way { overlap: false, ..Way::default() };
        let calibrate = || {
            let ran = cold_epoch(path, plan, serial, Duration::ZERO)?;
            Ok(ran.report.read.busy / u32::try_from(ran.report.batches)?)
        };
        measure::run(&mut table, &subjects, effort.part(3), calibrate)?;
        for name in ["loader, compute = load", "loader, compute = 2 load"] {
            let Some(row) = table.row(name) else { continue };
            let (resident, faults) = (row.median(1), row.median(2));
            let what = format!("{title}: resident, {name}, without the first batch");
            report.goal(what, format!(">= {WANTED} %"), format!("{resident:.2} %"), resident >= WANTED);
            let what = format!("{title}: major faults a batch, {name}");
            report.goal(what, "<= 1", format!("{faults:.2}"), faults <= 1.0);
        }
        report.tables.push(table);
    }
    Ok(())
}

fn figures(ran: &Ran) -> Vec<f64> {
    let Ran { report, resident, wall, major_faults, .. } = ran;
    let percent = |Residency { pages, resident, .. }: Residency| 100.0 * resident as f64 / pages as f64;
    let batches = report.batches as f64;
    vec![
        percent(resident.0),
        percent(resident.1),
        *major_faults as f64 / batches,
        100.0 * report.train.waiting.as_secs_f64() / wall.as_secs_f64(),
        1e3 * report.read.busy.as_secs_f64() / batches,
        1e3 * report.train.busy.as_secs_f64() / batches,
    ]
}
