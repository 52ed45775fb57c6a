//! Cold random reads: the loader against fio with as many requests in flight as suit the disk.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Plan, Records, Shuffle};

use crate::cell::size;
use crate::fio::Fio;
use crate::load::{Way, cold_run};
use twinbuf_bench_harness::data::{self, MIB};
use twinbuf_bench_harness::measure::{self, Effort, Subject};
use twinbuf_bench_harness::report::{Table, goal, median};
use twinbuf_bench_harness::sys;

/// Bytes of a record, records of a batch, and MiB of the file. The whole file is read. A run must take only a few
/// tenths of a second, because disks have a burst budget.
const SIZES: [(u64, u64, u64); 4] =
    [(4 << 10, 1024, 64), (64 << 10, 128, 256), (256 << 10, 32, 512), (1 << 20, 16, 512)];
const DEPTHS: [u64; 3] = [8, 32, 64];
/// What the loader has to reach of the best of fio in the same round.
const WANTED: f64 = 0.95;
const WANTED_DIRECT: f64 = 0.90;

pub fn run(folder: &Path, size_mib: Option<u64>, effort: Effort) -> Result<Vec<Table>, BoxError> {
    let mut tables = Vec::new();
    for (record, batch, mib) in SIZES {
        let mib = size_mib.unwrap_or(mib);
        let path = data::random(folder, mib)?;
        let path = path.as_path();
        let records = Records::open([path], usize::try_from(record)?)?;
        let plan = Plan::builder(records.len()).batch(batch).shuffle(Shuffle::Full).seed(1).build()?;
        let plan = &plan;
        let title = format!("cold random, records of {}", size(record));
        let mut table = Table::new(title, &["MiB/s", "disk KiB a request"]);
        // As counted by the disk, for all processes.
        let requests = || sys::disk_reads(path).unwrap_or_default();
        let figures = |mib_per_s: f64, before: (u64, u64)| {
            let after = requests();
            vec![mib_per_s, (after.1 - before.1) as f64 / 1024.0 / (after.0 - before.0).max(1) as f64]
        };
        let bucket = Bucket::new(path);
        let mut subjects = Vec::new();
        for (name, mode) in MODES {
            let bucket = &bucket;
            subjects.push(Subject::new(name, move |_| {
                bucket.wait()?;
                let records = Arc::new(Records::open([path], usize::try_from(record)?)?);
                let before = requests();
                let ran = cold_run(path, records, plan, Way { mode, ..Way::default() }, Duration::ZERO)?;
                Ok(figures(ran.report.bytes as f64 / MIB as f64 / ran.wall.as_secs_f64(), before))
            }));
        }
        let ours = subjects.len();
        let all = [("io_uring", &DEPTHS[..]), ("libaio", &DEPTHS[2..])];
        for (engine, depth) in all.into_iter().flat_map(|(engine, all)| all.iter().map(move |&d| (engine, d)))
        {
            let fio = Fio { engine, depth, direct: true, random: true, block: record, only: None };
            if fio.works(path) {
                let (bucket, records) = (&bucket, &records);
                subjects.push(Subject::new(fio.name(), move |_| {
                    bucket.wait()?;
                    data::make_cold(records)?;
                    let before = requests();
                    Ok(figures(fio.run(path)?, before))
                }));
            }
        }
        // A size that is asked for gets all rounds.
        let effort =
            if size_mib.is_some() { Effort { time: Duration::MAX, ..effort } } else { effort.part(4) };
        measure::run(&mut table, &subjects, effort, || Ok(Duration::ZERO))?;
        table.reference = (ours..table.rows.len()).collect();
        for (i, (name, mode)) in MODES.into_iter().enumerate() {
            let wanted = if mode == ReadMode::Direct { WANTED_DIRECT } else { WANTED };
            if let Some(ratio) = table.ratio(&table.rows[i], 0) {
                goal(&format!("{}: {name} against the best of fio", table.title), true, wanted, ratio);
            }
        }
        println!("paused {} times for the disk's budget", bucket.pauses.get());
        tables.push(table);
    }
    Ok(tables)
}

/// The default, which is [`ReadMode::Pread`] for files that are small compared with the memory, and reads past the page
/// cache.
const MODES: [(&str, ReadMode); 2] = [("loader", ReadMode::Auto), ("loader, Direct", ReadMode::Direct)];

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

    /// Waits until the disk is as fast as before.
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
