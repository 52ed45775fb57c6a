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
#[non_exhaustive]
pub struct Hinted {
    /// Bytes the kernel was asked for and did not refuse, in whole pages. Not all of them had to be read.
    pub bytes: u64,
    /// Calls made. 0: nothing is mapped, because the system lacks the call or refused the mapping.
    pub calls: u64,
    /// Calls that the kernel refused; and 1 more if the batch names a record that the files do not have.
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

    use super::Hinted;
    use crate::page::{around, page_size};
    use crate::{BatchPlan, Records};

    pub(super) fn ask(records: &Records, batch: &BatchPlan, piece: NonZeroUsize) -> Hinted {
        let page = page_size();
        let mut hinted = Hinted::default();
        // Pages found but not yet asked for: the next run may touch them.
        let mut pending: Option<(&MmapRaw, Range<usize>)> = None;
        for span in records.spans(batch) {
            let Ok(span) = span else {
                hinted.failed += 1;
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
                ask_range(before, found, piece, page, &mut hinted);
            }
        }
        if let Some((map, found)) = pending {
            ask_range(map, found, piece, page, &mut hinted);
        }
        hinted
    }

    /// Both ranges as one, if `next` begins inside `range` or where it ends.
    fn joined(range: &Range<usize>, next: &Range<usize>) -> Option<Range<usize>> {
        (range.start <= next.start && next.start <= range.end).then(|| range.start..range.end.max(next.end))
    }

    fn ask_range(map: &MmapRaw, range: Range<usize>, piece: NonZeroUsize, page: usize, hinted: &mut Hinted) {
        for piece in pieces(range, piece, page) {
            hinted.calls += 1;
            match map.advise_range(Advice::WillNeed, piece.start, piece.len()) {
                Ok(()) => hinted.bytes += piece.len() as u64,
                Err(_) => hinted.failed += 1,
            }
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
