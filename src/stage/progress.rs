//! What a loading thread is doing, for a caller that has waited long.

#[cfg(target_has_atomic = "64")]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[cfg(not(target_has_atomic = "64"))]
use self::locked::AtomicU64;

/// A load has begun just now.
const NOW: u64 = 1;

/// What one thread is doing. Written by it for every batch, and read by callers only after a time-out.
///
/// All orderings are Relaxed: nothing is published with a value. Values of two batches may be seen together; then the
/// batch has just changed.
#[derive(Debug)]
pub(crate) struct Progress {
    origin: Instant,
    /// When the load began, in nanoseconds after `origin`, or [`NOW`]; 0 while no load runs.
    since: AtomicU64,
    /// One more than the field that is read; 0 if none is.
    field: AtomicU64,
    /// The first of the records that are read.
    record: AtomicU64,
}

impl Default for Progress {
    fn default() -> Self {
        let [since, field, record] = [const { AtomicU64::new(0) }; 3];
        Self { origin: Instant::now(), since, field, record }
    }
}

impl Progress {
    /// A load begins; [`began`](Self::began) says when.
    pub(super) fn begin(&self) {
        self.since.store(NOW, Ordering::Relaxed);
    }

    pub(super) fn began(&self, at: Instant) {
        let nanos = at.saturating_duration_since(self.origin).as_nanos();
        self.since.store(u64::try_from(nanos).unwrap_or(u64::MAX).max(NOW), Ordering::Relaxed);
    }

    /// Records of a field are read, from this one on.
    pub(crate) fn reads(&self, field: usize, record: u64) {
        self.field.store(field as u64 + 1, Ordering::Relaxed);
        self.record.store(record, Ordering::Relaxed);
    }

    /// The load has ended.
    pub(super) fn end(&self) {
        self.field.store(0, Ordering::Relaxed);
        self.since.store(0, Ordering::Relaxed);
    }

    /// How long the current load has been running, if there is one.
    pub(super) fn busy_for(&self) -> Option<Duration> {
        match self.since.load(Ordering::Relaxed) {
            0 => None,
            NOW => Some(Duration::ZERO),
            since => Some(self.origin.elapsed().saturating_sub(Duration::from_nanos(since))),
        }
    }

    /// The field that is read, and the first record of the read.
    pub(crate) fn place(&self) -> Option<(usize, u64)> {
        let field = self.field.load(Ordering::Relaxed).checked_sub(1)?;
        Some((usize::try_from(field).ok()?, self.record.load(Ordering::Relaxed)))
    }
}

/// For processors without atomics of 64 bits, such as 32-bit PowerPC.
#[cfg(not(target_has_atomic = "64"))]
mod locked {
    use std::sync::atomic::Ordering;
    use std::sync::{Mutex, PoisonError};

    #[derive(Debug)]
    pub(super) struct AtomicU64(Mutex<u64>);

    impl AtomicU64 {
        pub(super) const fn new(value: u64) -> Self {
            Self(Mutex::new(value))
        }

        pub(super) fn load(&self, _: Ordering) -> u64 {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(super) fn store(&self, value: u64, _: Ordering) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value;
        }
    }
}
