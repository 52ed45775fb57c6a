//! How much of its time a thread spends on a processor.

use std::time::Duration;

/// What became of some time of a thread, or of several pieces of it, in seconds. Each batch may have two: they are small.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Share {
    pub(crate) wall: f32,
    /// On a processor.
    pub(crate) cpu: f32,
    /// Ready to run, while others had the processors. 0 where the system does not tell.
    pub(crate) delay: f32,
}

impl Share {
    pub(crate) fn add(&mut self, other: Self) {
        self.wall += other.wall;
        self.cpu += other.cpu;
        self.delay += other.delay;
    }
}

/// What the calling thread has used so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    cpu: Duration,
    delay: Duration,
}

impl Clock {
    /// `None` where the system does not tell.
    pub(crate) fn now() -> Option<Self> {
        Some(Self { cpu: cpu()?, delay: delay() })
    }

    /// What the thread used since then, out of `wall`.
    pub(crate) fn since(self, wall: Duration) -> Option<Share> {
        let now = Self::now()?;
        let cpu = now.cpu.saturating_sub(self.cpu).min(wall);
        let delay = now.delay.saturating_sub(self.delay).min(wall - cpu);
        let [wall, cpu, delay] = [wall, cpu, delay].map(|time| time.as_secs_f32());
        Some(Share { wall, cpu, delay })
    }
}

#[cfg(unix)]
fn cpu() -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a `timespec` that may be written to.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } != 0;
    let (seconds, nanos) = (u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?);
    (!failed).then(|| Duration::new(seconds, nanos))
}

#[cfg(not(unix))]
fn cpu() -> Option<Duration> {
    None
}

/// The second number of `/proc/thread-self/schedstat`: proc(5), `Documentation/scheduler/sched-stats.rst`.
#[cfg(target_os = "linux")]
fn delay() -> Duration {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    thread_local! {
        static STAT: Option<File> = File::open("/proc/thread-self/schedstat").ok();
    }
    let read = |file: &Option<File>| {
        let mut text = [0; 64];
        let len = file.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = std::str::from_utf8(text.get(..len)?).ok()?;
        text.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    Duration::from_nanos(STAT.try_with(read).ok().flatten().unwrap_or(0))
}

#[cfg(not(target_os = "linux"))]
fn delay() -> Duration {
    Duration::ZERO
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn work_takes_a_processor_and_sleep_does_not() {
        let (started, clock) = (Instant::now(), Clock::now().unwrap());
        while clock.since(Duration::MAX).unwrap().cpu < 3e-3 {
            std::hint::spin_loop();
        }
        let worked = clock.since(started.elapsed()).unwrap();
        assert!(worked.cpu >= 3e-3 && worked.cpu + worked.delay <= worked.wall * 1.001, "{worked:?}");
        let clock = Clock::now().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let slept = clock.since(Duration::from_millis(20)).unwrap();
        assert!(slept.cpu < 20e-3, "{slept:?}");
    }
}
