//! Cold sequential reads: the loader against `dd` and `fio` with the same block size on the same file.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut};
use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Plan, Records};

use crate::fio::Fio;
use crate::load::{Way, cold_epoch, with_requests};
use twinbuf_bench_harness::data::{self, MIB, RECORD};
use twinbuf_bench_harness::measure::{self, Effort, Subject};
use twinbuf_bench_harness::report::{Table, goal};

const BATCHES: [u64; 2] = [4, 8];
const BUDGET: u64 = 64;
/// The loader's target, relative to the best peer.
const WANTED: f64 = 0.95;

pub fn run(path: &Path, effort: Effort) -> Result<Vec<Table>, BoxError> {
    let mut tables = Vec::new();
    let records = data::open(path)?;
    for mib in BATCHES {
        let plan = Plan::builder(records.len()).batch(mib * MIB / RECORD as u64).build()?;
        let columns = ["MiB/s", "KiB a request", "load ms a batch", "of it hints", "waited for slots %"];
        let mut table = Table::new(format!("cold sequential, blocks of {mib} MiB"), &columns);
        let loader = |name: String, way: Way| {
            Subject::new(name, move |compute| {
                let ran = cold_epoch(path, &plan, way, compute)?;
                let (report, wall) = (&ran.report, ran.wall.as_secs_f64());
                let ms_a_batch = |time: Duration| 1e3 * time.as_secs_f64() / report.batches as f64;
                Ok(vec![
                    report.bytes as f64 / MIB as f64 / wall,
                    ran.request,
                    ms_a_batch(report.read.busy),
                    ms_a_batch(report.reading.hint_time),
                    100.0 * report.read.waiting.as_secs_f64() / wall,
                ])
            })
        };
        let default = Way::default();
        let mut subjects = vec![
            loader.clone()("loader".into(), default),
            loader.clone()("loader, no hints".into(), Way { hints: false, ..default }),
            loader.clone()("loader, Direct".into(), Way { mode: ReadMode::Direct, ..default }),
        ];
        subjects.push(loader(format!("loader, prefetch {BUDGET} MiB"), default.hint_window(BUDGET)));
        subjects.push(peer("floor: direct, huge pages", path, &records, move || floor(path, mib)));
        let ours = subjects.len();
        subjects.extend(peers(path, &records, mib));
        measure::run(&mut table, &subjects, effort.part(2), || Ok(Duration::ZERO))?;
        // The best peer of each round: it ran at about the same time.
        table.reference = (ours..table.rows.len()).collect();
        for name in ["loader", "loader, Direct"] {
            if let Some(ratio) = table.row(name).and_then(|row| table.ratio(row, 0)) {
                let what = format!("sequential, {mib} MiB: {name} against the best of dd and fio");
                goal(&what, true, WANTED, ratio);
            }
        }
        tables.push(table);
    }
    Ok(tables)
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

/// `dd` and, if it is installed, `fio`. Both report their speed, without their start.
fn peers<'a>(path: &'a Path, records: &'a Records, mib: u64) -> Vec<Subject<'a>> {
    let mut peers = Vec::new();
    peers.push(peer("dd", path, records, move || dd(path, mib)));
    for (engine, direct, depth) in
        [("psync", false, 1), ("io_uring", false, 4), ("io_uring", true, 4), ("io_uring", true, 8)]
    {
        let fio = Fio { engine, depth, direct, random: false, block: mib * MIB, only: None };
        if fio.works(path) {
            peers.push(peer(&fio.name(), path, records, move || fio.run(path)));
        }
    }
    peers
}

/// MiB/s, from the last line of its output: "1073741824 bytes (1.1 GB, 1.0 GiB) copied, 0.5 s, 2.1 GB/s".
fn dd(path: &Path, mib: u64) -> Result<f64, BoxError> {
    let mut command = Command::new("dd");
    command.env("LC_ALL", "C").arg("of=/dev/null").arg(format!("bs={mib}M")).arg("iflag=fullblock");
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

/// The disk's speed with the largest requests: MiB/s past the page cache, one block after another, into
/// memory of huge pages. A request has one segment per contiguous stretch of memory, and the device limits
/// their number (`max_segments`): with pages of 4 KiB the limit is far below `max_sectors_kb`.
fn floor(path: &Path, mib: u64) -> Result<f64, BoxError> {
    let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut block = MmapMut::map_anon(usize::try_from((mib + 2) * MIB)?)?;
    block.advise(Advice::HugePage)?;
    // Touched to allocate it; starts at a huge page.
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
