//! What is asked of the system: clocks, sleeps, CPU time, the machine's name.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

/// The time since a fixed moment, by the clock that [`sleep_until`] goes by.
pub fn monotonic() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is ours to write.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    assert_eq!(failed, 0, "clock_gettime: {}", io::Error::last_os_error());
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).expect("below a thousand million"))
}

/// Sleeps until that time, signals or not.
pub fn sleep_until(time: Duration) {
    let time = libc::timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
    loop {
        // SAFETY: the time is ours to read; with an absolute time the kernel writes no rest.
        let failed = unsafe {
            libc::clock_nanosleep(libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME, &time, std::ptr::null_mut())
        };
        match failed {
            libc::EINTR => {}
            0 => return,
            error => panic!("clock_nanosleep: {}", io::Error::from_raw_os_error(error)),
        }
    }
}

/// CPU time of this process so far: of all threads, in user and in kernel mode.
pub fn cpu() -> io::Result<Duration> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the kernel writes one `rusage`, no more.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the kernel has written all of it.
    Ok(used(&unsafe { usage.assume_init() }))
}

/// The CPU time that `usage` tells.
pub fn used(usage: &libc::rusage) -> Duration {
    let of = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.cast_unsigned()) + Duration::from_micros(time.tv_usec.cast_unsigned())
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// Lets timers of this process and those that it becomes end when they are to, not up to 50 us later.
pub fn sharp_timers() -> io::Result<()> {
    let nanoseconds: libc::c_ulong = 1;
    // SAFETY: sets a number of this thread.
    match unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanoseconds) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The machine and the system, for the head of a report.
pub fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let load = read("/proc/loadavg");
    format!(
        "{}, {} processors; {} {}; load {}",
        model.and_then(|line| line.split_once(": ")).map_or("?", |(_, name)| name),
        std::thread::available_parallelism().map_or(0, usize::from),
        read("/proc/sys/kernel/ostype"),
        read("/proc/sys/kernel/osrelease"),
        load.split(' ').next().unwrap_or("?"),
    )
}
