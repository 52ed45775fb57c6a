//! System queries and calls: processors, CPU clocks, the futex, the machine's name.

use std::fs;
use std::mem::{size_of, zeroed};
use std::process::Command;
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// The processors that this process may run on.
pub fn processors() -> Vec<usize> {
    // SAFETY: a set of bits; all zero is the empty one.
    let mut set: libc::cpu_set_t = unsafe { zeroed() };
    // SAFETY: `set` is as large as we say.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    assert_eq!(failed, 0, "sched_getaffinity: {}", std::io::Error::last_os_error());
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
    assert_eq!(failed, 0, "cannot pin to processor {cpu}: {}", std::io::Error::last_os_error());
}

/// The CPU time used by the calling thread so far.
pub fn thread_cpu() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours to write.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    assert_eq!(failed, 0, "clock_gettime: {}", std::io::Error::last_os_error());
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).expect("below a thousand million"))
}

/// Sleeps while `word` is `expected`.
pub fn futex_wait(word: &AtomicU32, expected: u32) {
    let forever = ptr::null::<libc::timespec>();
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is valid for the call. EAGAIN and EINTR mean "look again", and the caller does.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, expected, forever) };
}

/// Wakes one thread that sleeps on `word`.
pub fn futex_wake(word: &AtomicU32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is valid for the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, 1) };
}

/// The machine, the system and the date, for the head of a report.
pub fn machine() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(':')).map_or("?", |(_, value)| value.trim()).to_owned()
    };
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let virtualised =
        if field("flags").split(' ').any(|flag| flag == "hypervisor") { ", virtual" } else { "" };
    let date =
        Command::new("date").args(["-u", "+%F"]).output().map_or_else(|_| Vec::new(), |done| done.stdout);
    format!(
        "{} (family {} model {}), {} processors{virtualised}; {} {} {}; {}",
        field("model name"),
        field("cpu family"),
        field("model\t"),
        processors().len(),
        read("/proc/sys/kernel/ostype"),
        read("/proc/sys/kernel/osrelease"),
        std::env::consts::ARCH,
        String::from_utf8_lossy(&date).trim(),
    )
}

/// The number of processes that wanted a processor in the last minute: it shows a noisy machine.
pub fn load() -> String {
    fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or("?").to_owned()
}
