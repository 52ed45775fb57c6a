//! System queries: clocks, memory, free space, the machine's name.

use std::fs;
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use twinbuf::BoxError;

fn clock(id: libc::clockid_t) -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours to write.
    let failed = unsafe { libc::clock_gettime(id, &mut now) };
    assert_eq!(failed, 0, "clock_gettime: {}", io::Error::last_os_error());
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).expect("below a thousand million"))
}

/// The time since a fixed moment, identical in all processes.
pub fn monotonic() -> Duration {
    clock(libc::CLOCK_MONOTONIC)
}

/// CPU time of this process so far: of all threads, in user and in kernel mode.
pub fn cpu() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// CPU time of the calling thread so far.
pub fn thread_cpu() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The processors that this process may run on.
pub fn processors() -> Vec<usize> {
    // SAFETY: a set of bits; all zero is the empty one.
    let mut set: libc::cpu_set_t = unsafe { zeroed() };
    // SAFETY: `set` is as large as we say.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    assert_eq!(failed, 0, "sched_getaffinity: {}", io::Error::last_os_error());
    let size = usize::try_from(libc::CPU_SETSIZE).expect("a small constant");
    // SAFETY: the index is below the set's size.
    (0..size).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Pins the calling thread to one processor.
pub fn pin(cpu: usize) {
    // SAFETY: as in `processors`.
    let mut set: libc::cpu_set_t = unsafe { zeroed() };
    assert!(cpu < 8 * size_of::<libc::cpu_set_t>(), "no such processor: {cpu}");
    // SAFETY: the index is below the set's size.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: `set` is as large as we say; 0 is the calling thread.
    let failed = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) };
    assert_eq!(failed, 0, "cannot pin to processor {cpu}: {}", io::Error::last_os_error());
}

/// Seconds of processor time since the machine's start that this process did not use: those of other processes, of
/// the kernel itself, and of the host's other guests (`steal`). The resolution is a hundredth of a second.
pub fn others() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let first = stat.lines().next().unwrap_or_default();
    // user nice system idle iowait irq softirq steal: proc_stat(5).
    let ticks: Vec<f64> = first.split_whitespace().skip(1).flat_map(str::parse).collect();
    let busy: f64 = ticks.iter().take(8).sum::<f64>() - ticks.iter().skip(3).take(2).sum::<f64>();
    busy / 100.0 - cpu().as_secs_f64()
}

/// The free bytes on the file system of `folder` that this process may use.
pub fn room(folder: &Path) -> io::Result<u64> {
    use std::os::unix::ffi::OsStrExt as _;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    let mut stat = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path ends with a 0; the kernel writes one `statvfs`, no more.
    if unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so all of it has been written.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail * stat.f_frsize)
}

/// The machine's memory in bytes.
pub fn memory() -> Result<u64, BoxError> {
    let info = fs::read_to_string("/proc/meminfo")?;
    let kib = info.split_whitespace().nth(1).ok_or("/proc/meminfo: wanted MemTotal")?;
    Ok(kib.parse::<u64>()? << 10)
}

/// The machine, the system, its load, and the date, for the head of a report.
pub fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpuinfo = read("/proc/cpuinfo");
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(": ")).map_or("?", |(_, value)| value.trim()).to_owned()
    };
    let load = read("/proc/loadavg");
    let date = Command::new("date").args(["-u", "+%F"]).output();
    let date = date.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    format!(
        "{} (family {} model {}), {} processors; {} {}; {}; load {}",
        field("model name"),
        field("cpu family"),
        field("model\t"),
        std::thread::available_parallelism().map_or(0, usize::from),
        read("/proc/sys/kernel/ostype"),
        read("/proc/sys/kernel/osrelease"),
        date.unwrap_or_default(),
        load.split(' ').next().unwrap_or("?"),
    )
}

/// A file under `/sys/dev/block` of the disk that holds `path`.
fn of_disk(path: &Path, file: &str) -> Option<String> {
    use std::os::unix::fs::MetadataExt as _;
    let device = fs::metadata(path).ok()?.dev();
    let device = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    // A partition has no queue; its disk has one.
    let found =
        ["", "../"].into_iter().find_map(|up| fs::read_to_string(format!("{device}/{up}{file}")).ok());
    Some(found?.trim().to_owned())
}

/// The number of read requests that the disk or partition of `path` has served, and their bytes, for all processes.
/// Fields 1 and 3 of `stat` (Documentation/block/stat.rst in the kernel's source).
pub fn disk_reads(path: &Path) -> Option<(u64, u64)> {
    let stat = of_disk(path, "stat")?;
    let mut fields = stat.split_whitespace().map(str::parse::<u64>);
    let requests = fields.next()?.ok()?;
    Some((requests, 512 * fields.nth(1)?.ok()?))
}

/// The scheduler of the disk of `folder`, the limits on the size of a request to it, and the kernel's read-ahead.
pub fn disk(folder: &Path) -> String {
    let files = ["scheduler", "max_sectors_kb", "max_segments", "read_ahead_kb"];
    let said = files.map(|file| {
        let value = of_disk(folder, &format!("queue/{file}"));
        format!("{file} {}", value.as_deref().unwrap_or("?"))
    });
    format!("disk: {}", said.join(", "))
}
