//! Memory: a data set larger than the limit of a cgroup, and 10^5 small batches.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, Plan};

use crate::child::{self, Child};
use crate::data::{self, MIB, RECORD, Sparse};
use crate::load::{self, Way};
use crate::measure::{self, Effort, Subject};
use crate::report::{Report, Table};
use crate::sys;

/// MiB of the sparse file, of the limit, and of a batch.
const SPARSE: u64 = 20 << 10;
const LIMIT: u64 = 256;
const BATCH: u64 = 4;
/// Numbers of small batches: memory is checked first after the first number, finally after the second.
const SMALL: [u64; 2] = [1_000, 100_000];
/// MiB that the memory may grow in between: the rounding of the allocator and the kernel.
const FLAT: f64 = 0.5;

pub fn run(report: &mut Report, folder: &Path, path: &Path, effort: Effort) -> Result<(), BoxError> {
    let mut table = Table::new(
        "memory",
        "10^5 batches of one record of 4 KiB",
        &["MiB grown", "MiB at 10^3", "batches/s"],
    );
    let small = Subject::new("loader, VmRSS", |_| small_batches(path));
    measure::run(&mut table, &[small], effort.part(4), || Ok(Duration::ZERO))?;
    let grown = table.rows[0].max(0);
    report.goal(
        "10^5 small batches: growth of VmRSS",
        format!("<= {FLAT} MiB"),
        format!("{grown:.2} MiB"),
        grown <= FLAT,
    );
    report.tables.push(table);

    let Some(hierarchy) = Hierarchy::found() else {
        eprintln!("memory: no cgroup with a memory controller that we may write to: the limit is left out");
        return Ok(());
    };
    let sparse = Sparse::make(folder, SPARSE)?;
    let title = format!(
        "{SPARSE} MiB sparse under a limit of {LIMIT} MiB, batches of {BATCH} MiB, {}",
        hierarchy.name
    );
    let columns = ["MiB/s", "peak of cgroup MiB", "peak of VmRSS MiB"];
    let mut table = Table::new("memory", title, &columns);
    let subject = |name: &str, mode: &'static str| {
        let (hierarchy, sparse) = (&hierarchy, &sparse);
        Subject::new(name, move |_| limited(hierarchy, &sparse.0, mode))
    };
    let subjects = [subject("loader", "auto"), subject("loader, Pread", "pread")];
    measure::run(&mut table, &subjects, effort.part(2), || Ok(Duration::ZERO))?;
    for row in &table.rows {
        // Any child that gets here has finished: exceeding the limit kills it, and that was an error before.
        let found = row.max(1);
        let what = format!("{} GiB under a limit: {} finishes, peak", SPARSE >> 10, row.name);
        report.goal(what, format!("<= {LIMIT} MiB"), format!("{found:.0} MiB"), found <= LIMIT as f64);
    }
    report.tables.push(table);
    Ok(())
}

fn small_batches(path: &Path) -> Result<Vec<f64>, BoxError> {
    let mut child = Child::spawn(&["small".to_owned(), path.display().to_string()], &[])?;
    child.ready()?;
    child.go()?;
    let [early, late, micros] = child.figures()?;
    let mib = |kib: u64| kib as f64 / 1024.0;
    Ok(vec![mib(late) - mib(early), mib(early), SMALL[1] as f64 / (micros as f64 / 1e6)])
}

/// The child of many small batches. Reports VmRSS in KiB early and late, and the total microseconds.
pub fn small(path: &Path) -> Result<(), BoxError> {
    child::wait()?;
    let records = data::open(path)?;
    let plan = Plan::builder(records.len().min(SMALL[1])).build()?;
    let mut loader = Way::default().build(records, plan.clone())?;
    let (begun, mut seen, mut found) = (Instant::now(), 0, Vec::new());
    // Up to the last batch: a file with fewer records is read to the end of an epoch.
    let mut took = Duration::ZERO;
    for epoch in 0.. {
        for batch in loader.epoch(epoch) {
            batch?;
            seen += 1;
            if SMALL.contains(&seen) {
                found.push(sys::status("VmRSS")?);
                took = begun.elapsed();
            }
        }
        if seen >= SMALL[1] {
            break;
        }
    }
    load::check(&loader.report(), &plan)?;
    child::say(&[found[0], found[1], u64::try_from(took.as_micros())?]);
    Ok(())
}

fn limited(hierarchy: &Hierarchy, path: &Path, mode: &str) -> Result<Vec<f64>, BoxError> {
    let group = hierarchy.group(LIMIT * MIB)?;
    let mut child = Child::spawn(&["limited".into(), path.display().to_string(), mode.into()], &[])?;
    child.ready()?;
    group.enter(child.id())?;
    child.go()?;
    let [bytes, micros, most] = child.figures()?;
    let peak = group.peak()?;
    drop(child);
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    Ok(vec![mib(bytes) / (micros as f64 / 1e6), mib(peak), most as f64 / 1024.0])
}

/// The child under the limit. Reports the bytes read, the microseconds, and the peak VmRSS in KiB.
pub fn under_limit(path: &Path, mode: &str) -> Result<(), BoxError> {
    child::wait()?;
    let records = data::open(path)?;
    let plan = Plan::builder(records.len()).batch(BATCH * MIB / RECORD as u64).build()?;
    let mode = if mode == "pread" { ReadMode::Pread } else { ReadMode::Auto };
    let mut loader = Way { mode, ..Way::default() }.build(records, plan.clone())?;
    let begun = Instant::now();
    for batch in loader.epoch(0) {
        batch?;
    }
    let took = begun.elapsed();
    let report = loader.report();
    load::check(&report, &plan)?;
    child::say(&[report.bytes, u64::try_from(took.as_micros())?, sys::status("VmHWM")?]);
    Ok(())
}

/// A mounted hierarchy of cgroups in which memory can be limited.
struct Hierarchy {
    name: &'static str,
    root: &'static str,
    limit: &'static str,
    peak: &'static str,
}

impl Hierarchy {
    /// The hierarchy of this system, if this process may create a group in it.
    fn found() -> Option<Self> {
        let v2 = Self { name: "cgroup v2", root: "/sys/fs/cgroup", limit: "memory.max", peak: "memory.peak" };
        let v1 = Self {
            name: "cgroup v1",
            root: "/sys/fs/cgroup/memory",
            limit: "memory.limit_in_bytes",
            peak: "memory.max_usage_in_bytes",
        };
        [v2, v1].into_iter().find(|hierarchy| hierarchy.group(LIMIT * MIB).is_ok())
    }

    /// A new group with this limit. Fails if there are no cgroups, or this process may not create one.
    fn group(&self, limit: u64) -> Result<Group<'_>, BoxError> {
        let path = Path::new(self.root).join(format!("twinbuf-disk-{}", std::process::id()));
        fs::create_dir(&path)?;
        let group = Group { hierarchy: self, path };
        group.write(self.limit, limit)?;
        // There since Linux 5.19 in v2.
        group.peak()?;
        Ok(group)
    }
}

/// A cgroup, removed when this is dropped. Its processes must have ended by then.
struct Group<'a> {
    hierarchy: &'a Hierarchy,
    path: PathBuf,
}

impl Group<'_> {
    fn write(&self, file: &str, value: u64) -> Result<(), BoxError> {
        let path = self.path.join(file);
        // Not created if missing.
        let written = fs::File::options().write(true).open(&path);
        let written =
            written.and_then(|mut file| std::io::Write::write_all(&mut file, value.to_string().as_bytes()));
        written.map_err(|error| format!("{}: {error}", path.display()).into())
    }

    fn enter(&self, process: u32) -> Result<(), BoxError> {
        self.write("cgroup.procs", process.into())
    }

    fn peak(&self) -> Result<u64, BoxError> {
        Ok(fs::read_to_string(self.path.join(self.hierarchy.peak))?.trim().parse()?)
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}
