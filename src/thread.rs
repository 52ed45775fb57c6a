//! Helpers for threads: values that must not be dropped in a forked process, thread names, panic messages, and how much
//! of its time a thread does not sleep.

use std::fs::File;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// The maximum of [`workers`](crate::loader::LoaderBuilder::workers).
pub const MAX_WORKERS: usize = 64;

/// A value that is leaked instead of dropped in a forked process, that is, in another process than the one that created
/// it.
///
/// A forked process does not have the threads that the drop would wait for, and a lock that one of these threads held
/// at the fork is never released there.
#[derive(Debug)]
pub(crate) struct ForkGuard<T> {
    value: Option<T>,
    process: u32,
}

impl<T> ForkGuard<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// Whether this process is not the one that created the value.
    pub(crate) fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    /// Returns the value, or `None` in another process than the one that created it.
    pub(crate) fn into_inner(mut self) -> Option<T> {
        // The drop leaks it in another process.
        if self.is_foreign() { None } else { self.value.take() }
    }
}

impl<T> Deref for ForkGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("taken only by what consumes it")
    }
}

impl<T> DerefMut for ForkGuard<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("taken only by what consumes it")
    }
}

impl<T> Drop for ForkGuard<T> {
    fn drop(&mut self) {
        if self.is_foreign() {
            mem::forget(self.value.take());
        }
    }
}

/// Returns the name of a thread: the name of its loader, cut to fit the 15 bytes that Linux keeps, and `row`, its work.
pub(crate) fn name(loader: Option<&str>, row: &str) -> String {
    const MOST: usize = 15;
    let row = row.replace(' ', "-");
    let loader = loader.unwrap_or("twinbuf").replace('\0', "");
    let room = MOST.saturating_sub(row.len() + 1);
    let end = (0..=room.min(loader.len())).rev().find(|&end| loader.is_char_boundary(end)).unwrap_or(0);
    format!("{}-{row}", &loader[..end])
}

/// Runs foreign code, a drop for example. Returns the message of its panic.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let message = panic_message(&*panic);
        // The drop of the panic's value is foreign code too. If that panics, leak the value of that panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(panic))).map_err(mem::forget);
        message
    })
}

pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    let text = panic.downcast_ref::<&str>().copied().or(owned);
    text.unwrap_or("(a panic without a message)").to_string()
}

/// Returns a number for the calling thread. No other thread has the same number while this one is alive.
#[inline]
pub(crate) fn this_thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.try_with(|mark| std::ptr::from_ref(mark).addr()).unwrap_or(0)
}

/// How long the calling thread has been on a processor, or ready to run without one, since it started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Duration);

impl Clock {
    /// Reads the clock. `None` if the system does not report the CPU time.
    pub(crate) fn now() -> Option<Self> {
        // Read the delay before the CPU time: a thread is often preempted at the end of the system call that reads the
        // CPU time. That delay then belongs to the interval that begins here. It must not belong to the interval that
        // ends here (`since`), whose length has been measured already.
        let delay = delay();
        Some(Self(cpu()? + delay))
    }

    /// Returns how much of the interval since then, whose length is `wall`, the thread did not sleep.
    pub(crate) fn since(self, wall: Duration) -> Option<Duration> {
        Some(Self::now()?.0.saturating_sub(self.0).min(wall))
    }
}

#[cfg(unix)]
fn cpu() -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid `timespec`, borrowed for this call only.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } != 0;
    let (seconds, nanos) = (u64::try_from(time.tv_sec).ok()?, u32::try_from(time.tv_nsec).ok()?);
    (!failed).then(|| Duration::new(seconds, nanos))
}

#[cfg(not(unix))]
fn cpu() -> Option<Duration> {
    None
}

/// Reads how long this thread was ready to run without a processor: the second number of `/proc/thread-self/schedstat`,
/// see proc(5) and `Documentation/scheduler/sched-stats.rst`.
fn delay() -> Duration {
    thread_local! {
        static STAT: Option<File> = File::open("/proc/thread-self/schedstat").ok();
    }
    let nanos = STAT.try_with(|file| word(file.as_ref()?)?.parse().ok());
    Duration::from_nanos(nanos.ok().flatten().unwrap_or(0))
}

/// Reads a file of the system, at most 64 bytes, and returns its second word.
#[cfg(unix)]
fn word(file: &File) -> Option<String> {
    use std::os::unix::fs::FileExt;

    let mut text = [0; 64];
    let len = file.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(text.get(..len)?).ok()?;
    text.split_ascii_whitespace().nth(1).map(ToString::to_string)
}

#[cfg(not(unix))]
fn word(_: &File) -> Option<String> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn work_takes_a_processor_and_sleep_does_not() {
        let (started, clock) = (Instant::now(), Clock::now().unwrap());
        while clock.since(Duration::MAX).unwrap() < Duration::from_millis(3) {
            std::hint::spin_loop();
        }
        let (took, slept) = (started.elapsed(), Duration::from_millis(20));
        assert!((Duration::from_millis(3)..=took).contains(&clock.since(took).unwrap()));
        let (started, clock) = (Instant::now(), Clock::now().unwrap());
        std::thread::sleep(slept);
        let awake = clock.since(Duration::MAX).unwrap();
        assert!(awake + slept * 9 / 10 < started.elapsed(), "{awake:?}");
    }
}
