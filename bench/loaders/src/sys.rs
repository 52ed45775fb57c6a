//! System calls in addition to those of `twinbuf_bench_disk`: sleeps, CPU time.

use std::io;
use std::time::Duration;

use twinbuf_bench_disk::sys::usage;

/// Sleeps until this time by the clock of `twinbuf_bench_disk::sys::monotonic`, even across signals.
pub fn sleep_until(time: Duration) {
    let time = libc::timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
    loop {
        // SAFETY: the time is ours to read; with an absolute time the kernel writes no remainder.
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
pub fn cpu() -> Duration {
    used(&usage())
}

/// Uses this much CPU time on this thread.
pub fn burn_cpu(time: Duration) {
    let now = || {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the pointer is valid for the call.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) };
        Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap_or(0))
    };
    if time.is_zero() {
        return;
    }
    let end = now() + time;
    while now() < end {}
}

/// The CPU time reported by `usage`.
pub fn used(usage: &libc::rusage) -> Duration {
    let of = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.cast_unsigned()) + Duration::from_micros(time.tv_usec.cast_unsigned())
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

/// Makes timers of this process and its children expire on time, not up to 50 us later.
pub fn sharp_timers() -> io::Result<()> {
    let nanoseconds: libc::c_ulong = 1;
    // SAFETY: sets a number of this thread.
    match unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanoseconds) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
