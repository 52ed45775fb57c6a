//! Hints: the kernel reads the pages of the next batch while this one is used.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::BatchPlan;
use crate::read::ReadMode;
use crate::records::Records;

/// The usual size of one hint of [`Records::will_need`]: 1 MiB.
///
/// One `madvise(MADV_WILLNEED)` reads at most the larger of the device's `max_sectors_kb` and
/// `read_ahead_kb` and still returns 0 (`force_page_cache_ra` in the kernel's `mm/readahead.c`): of a hint
/// for 64 MiB, 8 MiB were resident afterwards where `read_ahead_kb` was 8192. With smaller hints all of them
/// were (`cargo bench -p twinbuf-mmap --bench read`). Many devices allow 1280 KiB; where both files in
/// `/sys/block/*/queue/` have less than 1024, use the larger.
pub const HINT_CHUNK: NonZeroUsize = NonZeroUsize::new(1 << 20).unwrap();

/// What [`Records::will_need`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HintStats {
    /// Bytes that the kernel accepted hints for, in whole pages. Not all of them had to be read.
    pub bytes: u64,
    /// Calls made, each for one piece or for many. 0: nothing is mapped, because the system
    /// lacks the call or refused the mapping.
    pub calls: u64,
    /// Pieces that the kernel refused; and 1 more if the batch names a record that the files do not have.
    pub failed: u64,
    /// Time spent in here. The calls start the reading and do not wait for it, yet they are not free:
    /// for 256 MiB that were not in the cache they took 147 ms (the least of 11 rounds of
    /// `cargo bench -p twinbuf-mmap --bench read`; 2 vCPUs, Linux 6.18, ext4).
    pub time: Duration,
}

impl std::ops::AddAssign for HintStats {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.calls += other.calls;
        self.failed += other.failed;
        self.time += other.time;
    }
}

impl Records {
    /// Asks the kernel to read the pages of `batch` into its cache, in pieces of at most `piece` bytes.
    ///
    /// It does not wait for them. Call it for the next batch on the thread that reads, before reading the
    /// present one; see [`HINT_CHUNK`] for the reason for pieces. A piece is rounded down to whole pages and is at
    /// least one page.
    ///
    /// The hints follow the order of the files, not of the batch. Each page is hinted once, however many records lie on
    /// it, and those that touch together. That takes 32 bytes of memory for each run of the batch, and the time
    /// to sort them, which the figures below include.
    ///
    /// On Linux up to 1024 pieces are one call, `process_madvise(2)` on this process (since 5.10; seccomp
    /// filters may forbid it). Where the kernel refuses, and on other Unixes, it is one `madvise(MADV_WILLNEED)`
    /// a piece. Measured against one such call for each run in batch order, for records shuffled one by one over
    /// a file of 256 MiB (`cargo bench -p twinbuf-mmap --bench read`; 2 vCPUs, Linux 6.18, ext4, least of 11
    /// rounds):
    ///
    /// | a batch | pages before | a call a run | `will_need` |
    /// | --- | --- | --- | --- |
    /// | 1000 of 4 KiB | not in the cache | 12.9 ms | 11.6 ms |
    /// | | in the cache | 0.76 ms | 0.58 ms |
    /// | 10 000 of 256 bytes | not in the cache | 127 ms | 117 ms |
    /// | | in the cache | 7.3 ms | 4.4 ms |
    /// | 100 000 of 256 bytes | not in the cache | 841 ms | 365 ms |
    /// | | in the cache | 72 ms | 20 ms |
    ///
    /// With [`Shuffle::Window`](crate::Shuffle::Window) earlier batches have hinted the pages of this one, because
    /// whole chunks are read for all batches of a window. This call hints the batch's share of the next window's
    /// chunks. If the batch is not in the cache, as at the start of an epoch, it hints all chunks of the batch's own
    /// window first.
    ///
    /// In [`ReadMode::Direct`](crate::ReadMode::Direct) nothing is read from the cache, and this does nothing.
    ///
    /// A hint is only a hint. If it fails, the records are read all the same, later and slower; so a failure
    /// is counted in [`HintStats`] and is no error. Truncated files do no harm here: no byte of the mapping is
    /// touched. Where there is no `madvise` (Windows) this does nothing.
    pub fn will_need(&self, batch: &BatchPlan, piece: NonZeroUsize) -> HintStats {
        if self.read_mode() == ReadMode::Direct || cfg!(not(unix)) {
            return HintStats::default();
        }
        let begun = Instant::now();
        let mut hinted = match batch.chunks_ahead() {
            None => asking::ask(self, batch.pieces(), piece),
            Some(_) if self.needs_window(batch) => {
                let mut hinted = asking::ask(self, batch.own_chunks().into_iter().flatten(), piece);
                hinted += asking::ask(self, batch.chunks_up_to_ahead().into_iter().flatten(), piece);
                hinted
            }
            Some(ahead) => asking::ask(self, ahead.into_iter(), piece),
        };
        hinted.time = begun.elapsed();
        hinted
    }

    /// Whether the window of this batch has had no hints yet, as at the start of an epoch and after resuming.
    fn needs_window(&self, batch: &BatchPlan) -> bool {
        let Some([window, previous]) = batch.window_ids() else { return false };
        // Relaxed: only a hint depends on it.
        let before = self.asked.swap(window, Relaxed);
        // The batches of the previous window have hinted this one. Several plans or ranks may share these records,
        // and then each finds the window of another here.
        before != window && before != previous && !self.records_seem_cached(batch)
    }
}

#[cfg(unix)]
mod asking {
    //! The calls themselves, on the systems that have `madvise`.

    use std::num::NonZeroUsize;
    use std::ops::Range;

    use memmap2::{Advice, MmapRaw};

    use super::{HintStats, many};
    use crate::page::{around, page_size};
    use crate::records::Records;

    /// Bytes of a mapping.
    pub(super) type Piece<'a> = (&'a MmapRaw, Range<usize>);

    /// Asks for the pages of these records, each page once.
    pub(super) fn ask(
        records: &Records,
        runs: impl Iterator<Item = Range<u64>>,
        piece: NonZeroUsize,
    ) -> HintStats {
        let page = page_size();
        let mut queue = Queue { pieces: Vec::new(), bytes: 0, hinted: HintStats::default() };
        let mut found = Vec::new();
        for span in records.spans_of(runs) {
            let Ok(span) = span else {
                queue.hinted.failed += 1;
                break;
            };
            let Ok(map) = &span.shard.map else { continue };
            found.push((span.shard.records().start, around(&span.bytes, map.len(), page), map));
        }
        found.sort_unstable_by_key(|(shard, pages, _)| (*shard, pages.start));
        // Pages not yet cut: the next may touch them.
        let mut pending: Option<Piece<'_>> = None;
        for (_, pages, map) in found {
            match &mut pending {
                Some((before, whole)) if std::ptr::eq(*before, map) && pages.start <= whole.end => {
                    whole.end = whole.end.max(pages.end);
                }
                _ => {
                    if let Some((map, whole)) = pending.replace((map, pages)) {
                        queue.push(map, whole, piece, page);
                    }
                }
            }
        }
        if let Some((map, whole)) = pending {
            queue.push(map, whole, piece, page);
        }
        queue.flush();
        queue.hinted
    }

    /// Pieces that are not hinted yet, and the result of the others.
    struct Queue<'a> {
        pieces: Vec<Piece<'a>>,
        /// In all `pieces`.
        bytes: usize,
        hinted: HintStats,
    }

    impl<'a> Queue<'a> {
        fn push(&mut self, map: &'a MmapRaw, range: Range<usize>, piece: NonZeroUsize, page: usize) {
            for piece in pieces(range, piece, page) {
                if self.pieces.len() == many::PIECES || piece.len() > many::BYTES.saturating_sub(self.bytes) {
                    self.flush();
                }
                self.bytes = self.bytes.saturating_add(piece.len());
                self.pieces.push((map, piece));
            }
        }

        fn flush(&mut self) {
            let asked = many::ask(&self.pieces, &mut self.hinted);
            for (map, piece) in &self.pieces[asked..] {
                self.hinted.calls += 1;
                match map.advise_range(Advice::WillNeed, piece.start, piece.len()) {
                    Ok(()) => self.hinted.bytes += piece.len() as u64,
                    Err(_) => self.hinted.failed += 1,
                }
            }
            self.pieces.clear();
            self.bytes = 0;
        }
    }

    /// Cuts `range`, which begins at a page, into pieces of whole pages.
    fn pieces(range: Range<usize>, piece: NonZeroUsize, page: usize) -> impl Iterator<Item = Range<usize>> {
        let step = (piece.get() / page).max(1) * page;
        range.clone().step_by(step).map(move |start| start..start.saturating_add(step).min(range.end))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn cut(range: Range<usize>, piece: usize) -> Vec<Range<usize>> {
            pieces(range, NonZeroUsize::new(piece).unwrap(), 10).collect()
        }

        #[test]
        fn pieces_are_whole_pages_and_cover_the_range() {
            assert_eq!(cut(10..55, 20), [10..30, 30..50, 50..55]);
            assert_eq!(cut(10..55, 29), [10..30, 30..50, 50..55]);
            assert_eq!(cut(10..35, 1), [10..20, 20..30, 30..35]);
            assert_eq!(cut(10..55, usize::MAX), std::slice::from_ref(&(10..55)));
            assert_eq!(cut(55..55, 20), []);
        }
    }
}

#[cfg(target_os = "linux")]
mod many {
    //! Many pieces in one call: `process_madvise` on this process.

    use std::io;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::HintStats;
    use super::asking::Piece;

    /// Pieces in one call: `UIO_MAXIOV` in the kernel's `include/uapi/linux/uio.h`.
    pub(super) const PIECES: usize = 1024;

    /// Bytes in one call, below the 2 GiB less a page at which the kernel stops (`MAX_RW_COUNT`).
    pub(super) const BYTES: usize = 1 << 30;

    /// The kernel has no such call for us, so it is not tried again. It guards no other data.
    static REFUSED: AtomicBool = AtomicBool::new(false);

    /// Hints as many of the first pieces as one call takes, counts the call, and returns their number.
    pub(super) fn ask(pieces: &[Piece<'_>], hinted: &mut HintStats) -> usize {
        let bytes = pieces.iter().fold(0_usize, |sum, (_, piece)| sum.saturating_add(piece.len()));
        if pieces.len() < 2 || bytes > BYTES || REFUSED.load(Relaxed) {
            return 0;
        }
        let taken = match advise(pieces) {
            Ok(taken) => taken,
            Err(error) => {
                if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL)) {
                    REFUSED.store(true, Relaxed);
                }
                return 0;
            }
        };
        // It stops before the first piece that fails.
        let mut rest = taken;
        let whole = pieces.iter().take_while(|(_, piece)| {
            let left = rest.checked_sub(piece.len());
            rest = left.unwrap_or(rest);
            left.is_some()
        });
        let asked = whole.count();
        hinted.calls += 1;
        hinted.bytes += (taken - rest) as u64;
        asked
    }

    /// Returns the number of bytes that were hinted, from the first piece on.
    fn advise(pieces: &[Piece<'_>]) -> io::Result<usize> {
        let ranges: Vec<libc::iovec> = pieces
            .iter()
            .map(|(map, piece)| libc::iovec {
                iov_base: map.as_mut_ptr().wrapping_add(piece.start).cast(),
                iov_len: piece.len(),
            })
            .collect();
        // Opened for each call, which costs little beside it: after a fork a kept one would name the parent.
        // SAFETY: takes no pointer and cannot fail.
        let this = unsafe { libc::getpid() };
        // SAFETY: takes a process and flags, no pointer.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, this, 0) };
        let fd = i32::try_from(fd).ok().filter(|&fd| fd >= 0).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the kernel has just opened it for us, and nothing else has it.
        let process = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the kernel reads the array, as long as said. Its ranges lie in mappings that are alive, and
        // this advice changes the contents of no memory.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                process.as_raw_fd(),
                ranges.as_ptr(),
                ranges.len(),
                libc::MADV_WILLNEED,
                0,
            )
        };
        usize::try_from(taken).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(all(unix, not(target_os = "linux")))]
mod many {
    //! No call for many pieces.

    use super::HintStats;
    use super::asking::Piece;

    pub(super) const PIECES: usize = 1;
    pub(super) const BYTES: usize = usize::MAX;

    pub(super) fn ask(_: &[Piece<'_>], _: &mut HintStats) -> usize {
        0
    }
}

#[cfg(not(unix))]
mod asking {
    //! No `madvise`.

    use std::num::NonZeroUsize;
    use std::ops::Range;

    use super::HintStats;
    use crate::records::Records;

    pub(super) fn ask(_: &Records, _: impl Iterator<Item = Range<u64>>, _: NonZeroUsize) -> HintStats {
        HintStats::default()
    }
}
