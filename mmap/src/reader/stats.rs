//! What a reader has done, and how it was chosen.

use std::fmt;
use std::time::Duration;

/// What a [`Reader`](super::Reader) has read and asked for so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ReadStats {
    /// Bytes delivered.
    pub bytes: u64,
    /// Bytes that came from disks for them or for later batches, whole blocks and pages. On Linux; elsewhere, and on file
    /// systems that do not count them, only those of reads past the page cache.
    pub disk: u64,
    /// Bytes that the kernel accepted hints for, in whole pages. Not all of them had to be read.
    pub hinted: u64,
    /// Calls for hints. 0: nothing is mapped, because the system lacks the call or refused the mapping, or all of it was in
    /// memory.
    pub hints: u64,
    /// Hints that the kernel refused. The bytes are read all the same, later and slower.
    pub failed: u64,
    /// Time spent in hints. They start the reading and do not wait for it, yet they are not free.
    pub hint_time: Duration,
}

impl std::ops::AddAssign for ReadStats {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.disk += other.disk;
        self.hinted += other.hinted;
        self.hints += other.hints;
        self.failed += other.failed;
        self.hint_time += other.hint_time;
    }
}

/// How a [`Reader`](super::Reader) reads, and why; printed by a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ReadChoice {
    /// Bytes of the files that the plan reads.
    pub data: u64,
    /// Bytes of `data` that are read through the page cache and stay there. The others are read past it each time.
    pub cached: u64,
    /// The memory that was left when the reader was made, if that decided.
    pub left: Option<u64>,
}

impl fmt::Display for ReadChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { data, cached, left } = self;
        let mib = |bytes: u64| format!("{} MiB", bytes.div_ceil(1 << 20));
        match (cached, left) {
            (0, None) => write!(f, "{} past the page cache, as asked for", mib(*data))?,
            (0, Some(_)) => write!(f, "{} past the page cache", mib(*data))?,
            (cached, None) if cached == data => write!(f, "{} through the page cache", mib(*data))?,
            (cached, _) if cached == data => {
                write!(f, "{} through the page cache, where they fit", mib(*data))?;
            }
            _ => write!(f, "{} of {} kept in the page cache, the rest past it", mib(*cached), mib(*data))?,
        }
        left.map_or(Ok(()), |left| write!(f, " ({} of memory left)", mib(left)))
    }
}
