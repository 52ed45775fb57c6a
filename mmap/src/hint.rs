//! Hints: the kernel is told which pages the next batch needs, and reads them while this one is used.

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::{BatchPlan, Records};

/// The piece in which [`Records::will_need`] asks, unless there is reason for another: 1 MiB.
///
/// One `madvise(MADV_WILLNEED)` reads at most the larger of the device's `max_sectors_kb` and
/// `read_ahead_kb` and still returns 0 (`force_page_cache_ra` in the kernel's `mm/readahead.c`): of 64 MiB
/// asked for at once, 8 MiB were resident afterwards. Asked for in pieces below that limit, all were. Many
/// devices allow 1280 KiB; where both files in `/sys/block/*/queue/` say less than 1024, use the larger.
pub const PIECE: NonZeroUsize = NonZeroUsize::new(1 << 20).unwrap();

/// What [`Records::will_need`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Hinted {
    /// Bytes the kernel was asked for and did not refuse, in whole pages. Not all of them had to be read.
    pub bytes: u64,
    /// Calls made, each for one piece or for many. 0: nothing is mapped, because the system
    /// lacks the call or refused the mapping.
    pub calls: u64,
    /// Pieces that the kernel refused; and 1 more if the batch names a record that the files do not have.
    pub failed: u64,
    /// Time spent in here. The calls start the reading and do not wait for it, yet they are not free:
    /// queueing 512 MiB took 84 to 188 ms.
    pub time: Duration,
}

impl std::ops::AddAssign for Hinted {
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
    /// present one; [`PIECE`] says why in pieces. A piece is rounded down to whole pages and is at least one
    /// page. Runs of the batch whose pages touch are asked for together.
    ///
    /// On Linux up to 1024 pieces are one call, `process_madvise(2)` on this process (since 5.10; seccomp
    /// filters may forbid it). For 1000 scattered records of 4 KiB that took 0.7 of the time of 1000 calls
    /// where they were cached already (least of 11 rounds: 518 against 749 us) and about as much where the disk
    /// had to be started (least 9.8 against 9.6 ms, median 11.6 against 13.8; `cargo bench -p twinbuf-mmap
    /// --bench read`). Where the kernel refuses, and on other Unixes, it is one `madvise(MADV_WILLNEED)` a piece.
    ///
    /// A hint is only a hint. If it fails, the records are read all the same, later and slower; so a failure
    /// is counted in [`Hinted`] and is no error. Truncated files do no harm here: no byte of the mapping is
    /// touched. Where there is no `madvise` (Windows) this does nothing.
    #[expect(clippy::must_use_candidate, reason = "it is called for its effect")]
    pub fn will_need(&self, batch: &BatchPlan, piece: NonZeroUsize) -> Hinted {
        #[cfg(unix)]
        {
            let begun = std::time::Instant::now();
            let mut hinted = asking::ask(self, batch, piece);
            hinted.time = begun.elapsed();
            hinted
        }
        #[cfg(not(unix))]
        {
            let _ = (batch, piece);
            Hinted::default()
        }
    }
}

#[cfg(unix)]
mod asking {
    //! The calls themselves, on the systems that have `madvise`.

    use std::num::NonZeroUsize;
    use std::ops::Range;

    use memmap2::{Advice, MmapRaw};

    use super::{Hinted, many};
    use crate::page::{around, page_size};
    use crate::{BatchPlan, Records};

    /// Bytes of a mapping.
    pub(super) type Piece<'a> = (&'a MmapRaw, Range<usize>);

    pub(super) fn ask(records: &Records, batch: &BatchPlan, piece: NonZeroUsize) -> Hinted {
        let page = page_size();
        let mut queue = Queue { pieces: Vec::new(), bytes: 0, hinted: Hinted::default() };
        // Pages found but not yet cut: the next run may touch them.
        let mut pending: Option<Piece<'_>> = None;
        for span in records.spans(batch) {
            let Ok(span) = span else {
                queue.hinted.failed += 1;
                break;
            };
            let Ok(map) = &span.shard.map else { continue };
            let pages = around(&span.bytes, map.len(), page);
            let whole = match &pending {
                Some((before, found)) if std::ptr::eq(*before, map) => joined(found, &pages),
                _ => None,
            };
            let last = pending.replace((map, whole.clone().unwrap_or(pages)));
            if let (None, Some((before, found))) = (whole, last) {
                queue.push(before, found, piece, page);
            }
        }
        if let Some((map, found)) = pending {
            queue.push(map, found, piece, page);
        }
        queue.flush();
        queue.hinted
    }

    /// Pieces not yet asked for, and what became of the others.
    struct Queue<'a> {
        pieces: Vec<Piece<'a>>,
        /// In all `pieces`.
        bytes: usize,
        hinted: Hinted,
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

    /// Both ranges as one, if `next` begins inside `range` or where it ends.
    fn joined(range: &Range<usize>, next: &Range<usize>) -> Option<Range<usize>> {
        (range.start <= next.start && next.start <= range.end).then(|| range.start..range.end.max(next.end))
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

        #[test]
        fn only_touching_ranges_are_joined() {
            let range = 10..30;
            assert_eq!(joined(&range, &(30..40)), Some(10..40));
            assert_eq!(joined(&range, &(20..40)), Some(10..40));
            assert_eq!(joined(&range, &(10..20)), Some(10..30));
            assert_eq!(joined(&range, &(40..50)), None);
            assert_eq!(joined(&range, &(0..20)), None);
        }
    }
}

#[cfg(target_os = "linux")]
mod many {
    //! Many pieces in one call: `process_madvise` on this process.

    use std::io;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::Hinted;
    use super::asking::Piece;

    /// Pieces in one call: `UIO_MAXIOV` in the kernel's `include/uapi/linux/uio.h`.
    pub(super) const PIECES: usize = 1024;

    /// Bytes in one call, below the 2 GiB less a page at which the kernel stops (`MAX_RW_COUNT`).
    pub(super) const BYTES: usize = 1 << 30;

    /// The kernel has no such call for us, so it is not tried again. It guards no other data.
    static REFUSED: AtomicBool = AtomicBool::new(false);

    /// Asks for as many of the first pieces as one call takes, counts it, and says how many those were.
    pub(super) fn ask(pieces: &[Piece<'_>], hinted: &mut Hinted) -> usize {
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

    /// Says how many bytes were asked for, from the first piece on.
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
        // SAFETY: the kernel has just opened it for us, and nobody else knows it.
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

    use super::Hinted;
    use super::asking::Piece;

    pub(super) const PIECES: usize = 1;
    pub(super) const BYTES: usize = usize::MAX;

    pub(super) fn ask(_: &[Piece<'_>], _: &mut Hinted) -> usize {
        0
    }
}
