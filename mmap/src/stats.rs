//! Statistics of a reader, and how it reads.

use std::fmt;
use std::time::Duration;

/// Statistics of a [`Reader`](super::Reader): bytes read and prefetched so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ReadStats {
    /// The number of bytes delivered to the caller, with the gaps between the tensors of a group.
    pub bytes: u64,
    /// The number of bytes read from disk, including prefetched bytes of later batches. Direct reads into the reader's
    /// buffers count when they are requested. On systems other than Linux and Android, and on file systems that do not
    /// count disk reads, only direct I/O counts.
    pub disk: u64,
    /// The number of bytes in accepted prefetch requests to the page cache, also for pages that were already in
    /// memory. A touch ahead of a sequential read counts as 128 KiB.
    pub hinted: u64,
    /// The number of prefetch requests to the page cache, including failed ones. One may cover many ranges, or take
    /// several system calls.
    pub hints: u64,
    /// The number of prefetch requests to the page cache that failed, which fails no read. A request for a batch with a
    /// record that does not exist counts too.
    pub failed: u64,
    /// The time spent in prefetch requests to the page cache. They start reads and do not wait for the bytes, but the
    /// calls take time, for example while the queue of a slow disk is full.
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

/// How a [`Reader`](super::Reader) reads its files, and why. `Display` prints it as one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ReadChoice {
    /// The size in bytes of the files from the lowest to the highest record of the plan; for a reader of groups, the
    /// size of what it reads for all groups.
    pub data: u64,
    /// The part of `data`, in bytes, that is read through the page cache. The rest is read with direct I/O. For a
    /// reader of groups, the part can be smaller, because files can have bytes of no group.
    pub cached: u64,
    /// The available memory in bytes when the reader was created, without what other readers of the
    /// process count on. `None` if it did not affect the choice or is unknown.
    pub left: Option<u64>,
}

impl fmt::Display for ReadChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { data, cached, left } = self;
        let mib = |bytes: u64| format!("{} MiB", bytes.div_ceil(1 << 20));
        let how = match (cached, left) {
            (0, None) if *data > 0 => " past the page cache, as asked for",
            (0, Some(_)) if *data > 0 => " past the page cache",
            (cached, _) if cached < data => " kept in the page cache, the rest past it",
            (_, None) => " through the page cache",
            (_, Some(left)) if data > left => {
                " through the page cache: they do not fit, but direct I/O is refused"
            }
            _ => " through the page cache, where they fit",
        };
        if (1..*data).contains(cached) {
            write!(f, "{} of ", mib(*cached))?;
        }
        write!(f, "{}{how}", mib(*data))?;
        left.map_or(Ok(()), |left| write!(f, " ({} of memory left)", mib(left)))
    }
}

#[cfg(test)]
mod tests {
    use super::ReadChoice;

    #[test]
    fn a_choice_is_one_line() {
        let says = |data, cached, left: Option<u64>| {
            let [data, cached]: [u64; 2] = [data, cached].map(|mib: u64| mib << 20);
            ReadChoice { data, cached, left: left.map(|left: u64| left << 20) }.to_string()
        };
        assert_eq!(says(9, 9, None), "9 MiB through the page cache");
        for (cached, left, wanted) in [
            (9, 20, "9 MiB through the page cache, where they fit"),
            (9, 5, "9 MiB through the page cache: they do not fit, but direct I/O is refused"),
            (4, 5, "4 MiB of 9 MiB kept in the page cache, the rest past it"),
        ] {
            assert_eq!(says(9, cached, Some(left)), format!("{wanted} ({left} MiB of memory left)"));
        }
        assert_eq!(says(9, 0, None), "9 MiB past the page cache, as asked for");
        assert_eq!(says(0, 0, None), "0 MiB through the page cache");
        assert_eq!(
            says(0, 0, Some(5)),
            "0 MiB through the page cache, where they fit (5 MiB of memory left)"
        );
    }
}
