//! Cold reads, at random and in order: the loader against the best of fio and, in order, `dd` on the same file.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Plan, Records, Shuffle};

use crate::cell::size;
use crate::fio::Fio;
use crate::load::cold_epoch;
use twinbuf_bench_harness::data::{self, MIB, RECORD};
use twinbuf_bench_harness::measure::{self, Effort, Subject};
use twinbuf_bench_harness::report::{Table, goal, median};
use twinbuf_bench_harness::sys;

/// Bytes of a record, records of a batch, and MiB of the file. The whole file is read. A run must take only a few
/// tenths of a second, because disks have a burst budget.
const RANDOM: [(usize, u64, u64); 4] =
    [(4 << 10, 1024, 64), (64 << 10, 128, 256), (256 << 10, 32, 512), (1 << 20, 16, 512)];
/// The same for sequential reads, with batches of 4 and 8 MiB.
const SEQUENTIAL: [(usize, u64, u64); 2] = [(RECORD, 1024, 512), (RECORD, 2048, 512)];
/// fio's engine, requests in flight, and whether it reads past the page cache.
const RANDOM_FIO: [(&str, u64, bool); 4] =
    [("io_uring", 8, true), ("io_uring", 32, true), ("io_uring", 64, true), ("libaio", 64, true)];
const SEQUENTIAL_FIO: [(&str, u64, bool); 4] =
    [("psync", 1, false), ("io_uring", 4, false), ("io_uring", 4, true), ("io_uring", 8, true)];
/// The default, which uses the page cache for files that fit in the available memory, and reads past the page cache.
/// What each has to reach of the best peer in the same round, at random.
const MODES: [(&str, ReadMode, f64); 2] =
    [("loader", ReadMode::Auto, 0.95), ("loader, Direct", ReadMode::Direct, 0.90)];
/// The same, in order.
const WANTED_SEQUENTIAL: f64 = 0.95;

pub fn run(
    random: bool,
    folder: &Path,
    size_mib: Option<u64>,
    effort: Effort,
) -> Result<Vec<Table>, BoxError> {
    let (cases, fio) = if random { (&RANDOM[..], RANDOM_FIO) } else { (&SEQUENTIAL[..], SEQUENTIAL_FIO) };
    let mut tables = Vec::new();
    for &(record, batch, mib) in cases {
        let path = data::random(folder, size_mib.unwrap_or(mib))?;
        let path = path.as_path();
        let records = Records::open([path], record)?;
        let plan = Plan::builder(records.len()).batch(batch);
        let plan = if random { plan.shuffle(Shuffle::Full).seed(1) } else { plan }.build()?;
        // Bytes of a request.
        let (title, block) = if random {
            (format!("cold random, records of {}", size(record as u64)), record as u64)
        } else {
            let block = batch * record as u64;
            (format!("cold sequential, blocks of {}", size(block)), block)
        };
        let mut table = Table::new(title, &["MiB/s", "disk KiB a request"]);
        // As counted by the disk, for all processes.
        let requests = || sys::disk_reads(path).unwrap_or_default();
        let figures = |mib_per_s: f64, before: (u64, u64)| {
            let after = requests();
            vec![mib_per_s, (after.1 - before.1) as f64 / 1024.0 / (after.0 - before.0).max(1) as f64]
        };
        let bucket = &Bucket::new(path);
        let peer = |name: String, speed: Box<dyn Fn() -> Result<f64, BoxError>>| {
            let records = &records;
            Subject::new(name, move || {
                bucket.wait()?;
                data::make_cold(records)?;
                let before = requests();
                Ok(figures(speed()?, before))
            })
        };
        let mut subjects = Vec::new();
        for (name, mode, _) in MODES {
            let plan = &plan;
            subjects.push(Subject::new(name, move || {
                bucket.wait()?;
                // Opened again each time: pages mapped by an open data set would stay in the page cache.
                let records = Arc::new(Records::open([path], record)?);
                let before = requests();
                let (report, wall) = cold_epoch(records, plan, mode)?;
                Ok(figures(report.bytes as f64 / MIB as f64 / wall.as_secs_f64(), before))
            }));
        }
        let ours = subjects.len();
        for (engine, depth, direct) in fio {
            let fio = Fio { engine, depth, direct, random, block, only: None };
            if fio.works(path) {
                let path = path.to_owned();
                subjects.push(peer(fio.name(), Box::new(move || fio.run(&path))));
            }
        }
        if !random {
            let path = path.to_owned();
            subjects.push(peer("dd".to_owned(), Box::new(move || dd(&path, block))));
        }
        // A size that is asked for gets all rounds.
        let parts = u32::try_from(cases.len())?;
        let effort =
            if size_mib.is_some() { Effort { time: Duration::MAX, ..effort } } else { effort.part(parts) };
        measure::run(&mut table, &subjects, effort)?;
        // The best peer of each round: it ran at about the same time.
        table.reference = (ours..table.rows.len()).collect();
        for (row, (name, _, wanted)) in table.rows.iter().zip(MODES) {
            let wanted = if random { wanted } else { WANTED_SEQUENTIAL };
            if let Some(ratio) = table.ratio(row, 0) {
                goal(&format!("{}: {name} against the best peer", table.title), true, wanted, ratio);
            }
        }
        println!("paused {} times for the disk's budget", bucket.pauses.get());
        tables.push(table);
    }
    Ok(tables)
}

/// MiB/s, from the last line of its output: "1073741824 bytes (1.1 GB, 1.0 GiB) copied, 0.5 s, 2.1 GB/s".
fn dd(path: &Path, block: u64) -> Result<f64, BoxError> {
    let mut command = Command::new("dd");
    command.env("LC_ALL", "C").arg("of=/dev/null").arg(format!("bs={block}")).arg("iflag=fullblock");
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

/// The disk's burst budget. The host of a virtual machine lets a number of bytes and requests pass, then fewer per
/// second until its token bucket is full again. An empty bucket shows as small reads that are slower than at the start.
struct Bucket<'a> {
    path: &'a Path,
    /// The fastest read so far.
    fastest: Cell<f64>,
    pauses: Cell<u32>,
}

impl<'a> Bucket<'a> {
    /// The maximum time of a read while budget remains, relative to the fastest.
    const SLOW: f64 = 2.5;
    const PAUSE: Duration = Duration::from_millis(500);
    /// After this many pauses the benchmark continues even if reads are slow: then the disk itself is slow now.
    const MOST: u32 = 10;

    fn new(path: &'a Path) -> Self {
        Self { path, fastest: f64::INFINITY.into(), pauses: 0.into() }
    }

    /// Waits until the disk is about as fast as before, for at most [`Self::MOST`] pauses.
    fn wait(&self) -> Result<(), BoxError> {
        for _ in 0..Self::MOST {
            let found = self.probe()?;
            self.fastest.set(self.fastest.get().min(found));
            if found <= Self::SLOW * self.fastest.get() {
                break;
            }
            self.pauses.set(self.pauses.get() + 1);
            std::thread::sleep(Self::PAUSE);
        }
        Ok(())
    }

    /// The median seconds of 32 reads of 256 KiB, one after another, past the page cache.
    fn probe(&self) -> Result<f64, BoxError> {
        const READ: u64 = 256 << 10;
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(self.path)?;
        let mut room = MmapMut::map_anon(usize::try_from(READ)?)?;
        let places = file.metadata()?.len() / READ;
        let mut took = Vec::new();
        for _ in 0..32 {
            let begun = Instant::now();
            file.read_exact_at(&mut room, fastrand::u64(0..places) * READ)?;
            took.push(begun.elapsed().as_secs_f64());
        }
        Ok(median(took))
    }
}
