//! Cold sequential reads: the loader against `dd` and `fio` with the same block size on the same file.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut};
use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Plan, Records};

use crate::data::{self, MIB, RECORD};
use crate::load::{Way, cold_epoch, with_requests};
use crate::measure::{self, Effort, Subject};
use crate::report::{Report, Table};

const BATCHES: [u64; 2] = [4, 8];
const BUDGETS: [u64; 5] = [4, 8, 16, 32, 64];
/// What the loader has to reach of the best peer.
const WANTED: f64 = 0.95;

pub fn run(report: &mut Report, path: &Path, effort: Effort) -> Result<(), BoxError> {
    let records = data::open(path, ReadMode::Pread)?;
    for mib in BATCHES {
        let plan = Plan::builder(records.len()).batch(mib * MIB / RECORD as u64).build()?;
        let columns = ["MiB/s", "KiB a request", "load ms a batch", "of it hints", "waited for slots %"];
        let mut table = Table::new("sequential", format!("cold sequential, blocks of {mib} MiB"), &columns);
        let loader = |name: String, way: Way| {
            Subject::new(name, move |compute| {
                let ran = cold_epoch(path, plan, way, compute)?;
                let (report, wall) = (&ran.report, ran.wall.as_secs_f64());
                let ms_a_batch = |time: Duration| 1e3 * time.as_secs_f64() / report.batches as f64;
                Ok(vec![
                    report.bytes as f64 / MIB as f64 / wall,
                    ran.request,
                    ms_a_batch(report.read.busy),
                    ms_a_batch(report.hints.time),
                    100.0 * report.read.waiting.as_secs_f64() / wall,
                ])
            })
        };
        let default = Way::default();
        let mut subjects = vec![
            loader("loader".into(), default),
            loader("loader, no hints".into(), Way { hints: false, ..default }),
            loader("loader, no overlap".into(), Way { overlap: false, ..default }),
            loader("loader, Direct".into(), Way { mode: ReadMode::Direct, ..default }),
        ];
        for budget in BUDGETS {
            subjects.push(loader(format!("loader, prefetch {budget} MiB"), default.hint_window(budget)));
        }
        subjects.push(peer("floor: direct, huge pages", path, &records, move || floor(path, mib)));
        let ours = subjects.len();
        subjects.extend(peers(path, &records, mib));
        measure::run(&mut table, &subjects, effort.part(2), || Ok(Duration::ZERO))?;
        // The peer with the best median; the ratios are of neighbours, round by round.
        let by_median = |&a: &usize, &b: &usize| table.rows[a].median(0).total_cmp(&table.rows[b].median(0));
        table.reference = (ours..table.rows.len()).max_by(by_median);
        let best = table.reference.map_or("?", |best| &table.rows[best].name);
        for name in ["loader", "loader, Direct"] {
            if let Some(ratio) = table.row(name).and_then(|row| table.ratio(row)) {
                let what = format!("sequential, {mib} MiB: {name} against {best}");
                report.goal(what, format!(">= {WANTED}"), format!("{ratio:.3}"), ratio >= WANTED);
            }
        }
        report.tables.push(table);
    }
    Ok(())
}

/// A subject other than the loader.
fn peer<'a>(
    name: &str,
    path: &'a Path,
    records: &'a Records,
    speed: impl Fn() -> Result<f64, BoxError> + 'a,
) -> Subject<'a> {
    Subject::new(name, move |_| {
        data::make_cold(records)?;
        let (speed, request) = with_requests(path, &speed)?;
        Ok(vec![speed, request, f64::NAN, f64::NAN, f64::NAN])
    })
}

/// `dd` and, if it is there, `fio`; they say themselves how fast they were, without their start.
fn peers<'a>(path: &'a Path, records: &'a Records, mib: u64) -> Vec<Subject<'a>> {
    let mut peers = Vec::new();
    for (name, flags) in [("dd", "fullblock"), ("dd, direct", "fullblock,direct")] {
        peers.push(peer(name, path, records, move || dd(path, mib, flags)));
    }
    for (engine, direct, depth) in
        [("psync", 0, 1), ("psync", 1, 1), ("io_uring", 0, 2), ("io_uring", 1, 2), ("io_uring", 1, 4)]
    {
        let name = format!("fio {engine} {depth}{}", if direct == 1 { ", direct" } else { "" });
        // One block of it.
        match fio(path, mib, engine, direct, depth, Some(mib)) {
            Ok(_) => {
                peers.push(peer(&name, path, records, move || fio(path, mib, engine, direct, depth, None)));
            }
            // Not installed, or io_uring is forbidden here.
            Err(error) => eprintln!("{name}: left out: {error}"),
        }
    }
    peers
}

/// MiB/s, from the last line that it prints: "1073741824 bytes (1.1 GB, 1.0 GiB) copied, 0.5 s, 2.1 GB/s".
fn dd(path: &Path, mib: u64, flags: &str) -> Result<f64, BoxError> {
    let mut command = Command::new("dd");
    command.env("LC_ALL", "C").arg("of=/dev/null").arg(format!("bs={mib}M")).arg(format!("iflag={flags}"));
    let output = command.arg(format!("if={}", path.display())).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let speed = || {
        let last = said.lines().last()?;
        let bytes: f64 = last.split(' ').next()?.parse().ok()?;
        let seconds: f64 = last.split_once("copied, ")?.1.split(' ').next()?.parse().ok()?;
        (bytes as u64 == path.metadata().ok()?.len()).then_some(bytes / MIB as f64 / seconds)
    };
    speed().ok_or_else(|| format!("dd: wanted the number of bytes and the seconds, found {said:?}").into())
}

/// MiB/s of the whole file, or of `only` so many MiB of it, from its terse line: fields 6 and 9 are KiB read and
/// milliseconds ("TERSE OUTPUT" in fio(1)).
fn fio(
    path: &Path,
    mib: u64,
    engine: &str,
    direct: u8,
    depth: u8,
    only: Option<u64>,
) -> Result<f64, BoxError> {
    let mut command = Command::new("fio");
    command.args(["--name=read", "--rw=read", "--readonly", "--thread"]);
    command.args(["--output-format=terse", "--terse-version=3"]);
    command.arg(format!("--filename={}", path.display())).arg(format!("--bs={mib}M"));
    command.arg(format!("--ioengine={engine}")).arg(format!("--direct={direct}"));
    command.arg(format!("--iodepth={depth}")).args(only.map(|mib| format!("--io_size={mib}M")));
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let field = |line: &str, i: usize| line.split(';').nth(i)?.parse::<f64>().ok();
    let speed = || {
        let line = said.lines().find(|line| line.starts_with("3;"))?;
        let (error, kib, ms) = (field(line, 4)?, field(line, 5)?, field(line, 8)?);
        (error == 0.0 && kib > 0.0 && ms > 0.0).then_some(kib / 1024.0 / (ms / 1e3))
    };
    speed().ok_or_else(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("wanted a line of fio's terse output, found {said:?} {errors:?}").into()
    })
}

/// What the disk gives with the largest requests: MiB/s past the page cache, one block after the other, into
/// memory of huge pages. A request takes as many segments as there are stretches of memory that lie apart, and
/// the device allows so many (`max_segments`): of pages of 4 KiB that is far from `max_sectors_kb`.
fn floor(path: &Path, mib: u64) -> Result<f64, BoxError> {
    let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut block = MmapMut::map_anon(usize::try_from((mib + 2) * MIB)?)?;
    block.advise(Advice::HugePage)?;
    // Touched, so that it is there; begun where a huge page does.
    block.fill(1);
    let start = block.as_ptr().align_offset(2 << 20);
    let block = &mut block[start..][..usize::try_from(mib * MIB)?];
    let (begun, mut done) = (Instant::now(), 0);
    loop {
        match file.read_at(block, done)? {
            0 => break,
            read => done += read as u64,
        }
    }
    Ok(done as f64 / MIB as f64 / begun.elapsed().as_secs_f64())
}
