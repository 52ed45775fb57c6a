//! Hints: the kernel reads the pages of the next batch while this one is used.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::BatchPlan;
use crate::ahead::{Ahead, Room};
use crate::around::{Around, STRETCH};
use crate::page::{around, page_size};
use crate::records::Records;
use crate::spans::Span;
use crate::system::{Asked, PIECES, Piece, bring, will_need};

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
    /// Bytes that the kernel accepted hints for, in whole pages. Not all of them had to be read. In
    /// [`ReadMode::Direct`](crate::ReadMode::Direct), bytes of the reads that were begun, in whole blocks.
    pub bytes: u64,
    /// Calls made, each for one piece, for many, or for a huge page. 0: nothing is mapped, because the system
    /// lacks the call or refused the mapping. In `Direct`, reads that were begun; 0: there was no room, or all of it was
    /// asked for before.
    pub calls: u64,
    /// Pieces that the kernel refused; and 1 more if the batch names a record that the files do not have. What there was
    /// no room for is not counted.
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
    /// filters may forbid it). Where the kernel refuses, it is one `madvise(MADV_WILLNEED)` a piece; on macOS one
    /// `fcntl(F_RDADVISE)`, on FreeBSD one `posix_fadvise`; on Windows one `PrefetchVirtualMemory` a file. Measured against one such call for each run in batch order, for records shuffled one by one over
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
    /// In [`ReadMode::Auto`](crate::ReadMode::Auto), where the files fit in memory, small records bring what is
    /// around them, once an epoch. On ext4 (Linux 6.16) and XFS (5.18) runs of 1 to 4 MiB bring the whole huge
    /// pages of 2 MiB on which they lie, which takes a fraction of the processor time. This call waits for them:
    /// the kernel fills huge pages only for a thread that waits.
    ///
    /// In [`ReadMode::Direct`](crate::ReadMode::Direct) it begins to read the records themselves, into the data
    /// set's own memory, as far as there is room ([`ahead_bytes`](Self::ahead_bytes)); `piece` has no effect. Runs
    /// of 4 MiB and more are left to [`read`](Self::read).
    ///
    /// A hint is only a hint. If it fails, the records are read all the same, later and slower; so a failure
    /// is counted in [`HintStats`] and is no error. Truncated files do no harm here: no byte of the mapping is
    /// touched. Where a system has no such call this does nothing, nor
    /// for files of FUSE, whose kernel side makes hints wait for answers once a few are under way (`max_background`).
    pub fn will_need(&self, batch: &BatchPlan, piece: NonZeroUsize) -> HintStats {
        let begun = Instant::now();
        let mut hinted = match batch.chunks_ahead() {
            None => match self.around_for(batch) {
                Some(around) => ask(self, batch.pieces(), piece, Some(around)),
                None => self.ask(batch.pieces(), piece, self.ahead(0), false),
            },
            Some(ahead) => {
                let memory = self.ahead(batch.window_records());
                let mut hinted = HintStats::default();
                if self.needs_window(batch, memory.is_some()) {
                    // Chunks of windows that nobody will read now.
                    memory.iter().for_each(|(memory, _)| memory.forget_queued());
                    hinted += self.ask(batch.own_chunks().into_iter().flatten(), piece, memory, true);
                    hinted += self.ask(batch.chunks_up_to_ahead().into_iter().flatten(), piece, memory, true);
                } else {
                    hinted += self.ask(ahead.into_iter(), piece, memory, true);
                }
                hinted
            }
        };
        hinted.time = begun.elapsed();
        hinted
    }

    /// Where more than the records of this batch is to be asked for.
    fn around_for(&self, batch: &BatchPlan) -> Option<&Around> {
        let around = self.around.as_ref().filter(|_| Around::pays(self.stride(), batch.world()))?;
        around.begin(batch.epoch_id());
        Some(around)
    }

    /// Asks for the pages of these records, or, past the page cache, begins to read them as far as there is room.
    fn ask(
        &self,
        runs: impl Iterator<Item = Range<u64>>,
        piece: NonZeroUsize,
        ahead: Option<(&Ahead, Room)>,
        chunks: bool,
    ) -> HintStats {
        let Some((ahead, room)) = ahead else { return ask(self, runs, piece, None) };
        let mut failed = 0;
        let found = self.spans_of(runs).map_while(|span| span.map_err(|_| failed += 1).ok());
        // Whole chunks are cut; a large stretch of a batch is left to be read straight to its place.
        let wanted = |span: &Span<'_>| span.shard.is_read_ahead() && (chunks || !span.is_large());
        let found: Vec<_> = found.filter(wanted).map(|span| self.stretch(&span)).collect();
        let (bytes, calls) = ahead.ask(found.into_iter(), room);
        HintStats { bytes, calls, failed, time: Duration::ZERO }
    }

    /// Whether the window of this batch has had no hints yet, as at the start of an epoch and after resuming.
    fn needs_window(&self, batch: &BatchPlan, past_cache: bool) -> bool {
        let Some([window, previous]) = batch.window_ids() else { return false };
        // Relaxed: only a hint depends on it.
        let before = self.asked.swap(window, Relaxed);
        // The batches of the previous window have hinted this one. Several plans or ranks may share these records,
        // and then each finds the window of another here.
        before != window && before != previous && (past_cache || !self.records_seem_cached(batch))
    }
}

/// Asks for the pages of these records, each page once; or for what is missing around them.
fn ask(
    records: &Records,
    runs: impl Iterator<Item = Range<u64>>,
    piece: NonZeroUsize,
    more: Option<&Around>,
) -> HintStats {
    let page = page_size() as u64;
    let mut queue = Queue { pieces: Vec::new(), hinted: HintStats::default() };
    let mut found = Vec::new();
    for span in records.spans_of(runs) {
        let Ok(span) = span else {
            queue.hinted.failed += 1;
            break;
        };
        if span.shard.hints_wait {
            continue;
        }
        let Span { shard, bytes, .. } = span;
        let mut push = |bytes: &Range<u64>| {
            found.push((shard, shard.piece(around(bytes, shard.bytes.end, page))));
        };
        match more {
            Some(more) if bytes.end - bytes.start < STRETCH => {
                more.missing(shard.before, &bytes, &shard.bytes).for_each(|bytes| push(&bytes));
            }
            _ => push(&bytes),
        }
    }
    found.sort_unstable_by_key(|(shard, found)| (shard.first, found.bytes.start));
    // Pages that touch are asked for together.
    found.dedup_by(|(shard, next), (first, whole)| {
        let touch = shard.first == first.first && next.bytes.start <= whole.bytes.end;
        if touch {
            whole.bytes.end = whole.bytes.end.max(next.bytes.end);
        }
        touch
    });
    let mut in_huge = Vec::new();
    for (shard, whole) in found {
        let len = whole.bytes.end - whole.bytes.start;
        // Shorter runs would bring more than they need. For longer ones the kernel takes huge pages itself.
        match shard.huge.filter(|huge| (huge / 2..huge * 2).contains(&len)) {
            Some(huge) => in_huge.push((whole, huge)),
            None => queue.push(&whole, piece, page),
        }
    }
    // The disk reads small pages while this waits for huge ones.
    queue.flush();
    for (whole, huge) in in_huge {
        queue.bring(&whole, huge);
    }
    queue.hinted
}

/// Pieces that are not hinted yet, and the result of the others.
struct Queue<'a> {
    pieces: Vec<Piece<'a>>,
    hinted: HintStats,
}

impl<'a> Queue<'a> {
    fn push(&mut self, whole: &Piece<'a>, piece: NonZeroUsize, page: u64) {
        for bytes in pieces(&whole.bytes, piece, page) {
            if self.pieces.len() == PIECES {
                self.flush();
            }
            self.pieces.push(whole.with(bytes));
        }
    }

    /// Reads the huge pages on which `whole` lies, with what is around it.
    fn bring(&mut self, whole: &Piece<'_>, huge: u64) {
        let Range { mut start, end } = whole.bytes;
        while start < end {
            let next = (start / huge + 1) * huge;
            self.hinted.calls += 1;
            match bring(whole.file, start) {
                Ok(()) => self.hinted.bytes += next.min(end) - start,
                Err(_) => self.hinted.failed += 1,
            }
            start = next;
        }
    }

    fn flush(&mut self) {
        let mut asked = Asked::default();
        will_need(&self.pieces, &mut asked);
        let Asked { calls, bytes, failed } = asked;
        self.hinted += HintStats { bytes, calls, failed, time: Duration::ZERO };
        self.pieces.clear();
    }
}

/// Cuts `range`, which begins at a page, into pieces of whole pages.
fn pieces(range: &Range<u64>, piece: NonZeroUsize, page: u64) -> impl Iterator<Item = Range<u64>> {
    let step = (piece.get() as u64 / page).max(1) * page;
    let Range { mut start, end } = *range;
    std::iter::from_fn(move || {
        let piece = start..start.saturating_add(step).min(end);
        start = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(range: Range<u64>, piece: usize) -> Vec<Range<u64>> {
        pieces(&range, NonZeroUsize::new(piece).unwrap(), 10).collect()
    }

    #[test]
    fn pieces_are_whole_pages_and_cover_the_range() {
        assert_eq!(cut(10..55, 20), [10..30, 30..50, 50..55]);
        assert_eq!(cut(10..55, 29), [10..30, 30..50, 50..55]);
        assert_eq!(cut(10..35, 1), [10..20, 20..30, 30..35]);
        assert_eq!(cut(10..55, usize::MAX), std::slice::from_ref(&(10..55)));
        assert_eq!(cut(55..55, 20), []);
    }

    /// A file of records of 1 MiB, of which nothing is in the cache, if it is read into huge pages.
    #[cfg(target_os = "linux")]
    fn in_huge_pages(records: u64) -> Option<(tempfile::TempDir, Records)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, vec![1; usize::try_from(records << 20).unwrap()]).unwrap();
        let records = Records::open([&path], 1 << 20).unwrap().with_fitting_mode(Some(u64::MAX));
        records.evict().unwrap();
        // QEMU does not pass advice on; tools/platforms.sh tells.
        let huge = std::env::var_os("TWINBUF_TEST_NO_HINTS").is_none()
            && records.shards()[0].huge == Some(2 << 20)
            && records.residency().unwrap().resident == 0;
        if !huge {
            println!("not checked: the file system, the kernel or an emulator has no huge pages of 2 MiB");
        }
        huge.then_some((folder, records))
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn long_runs_bring_whole_huge_pages_and_the_others_what_they_need() {
        // The last huge page is cut.
        let Some((_folder, records)) = in_huge_pages(19) else { return };
        let plan = crate::Plan::builder(records.len()).batch(1).build().unwrap();
        let pages = |mib: u64| (mib << 20) / page_size() as u64;
        let there = |from: u64, to: u64| {
            let bytes = from << 20..to << 20;
            crate::system::count(&records.shards()[0].piece(bytes)).unwrap()[1]
        };
        for (step, all) in [(3, 2), (18, 3)] {
            let hinted = records.will_need(&plan.batch(0, step).unwrap(), HINT_CHUNK);
            assert_eq!((hinted.bytes, hinted.calls, hinted.failed), (1 << 20, 1, 0));
            // Where there is no huge page for them, small ones come, of which one is waited for.
            until(|| there(0, 19) >= pages(all));
            assert_eq!(there(0, 19), pages(all));
        }
        assert_eq!((there(2, 4), there(18, 19)), (pages(2), pages(1)));

        // 4 MiB and more are left to the kernel.
        let plan = crate::Plan::builder(records.len()).batch(4).build().unwrap();
        let hinted = records.will_need(&plan.batch(0, 2).unwrap(), NonZeroUsize::new(8 << 20).unwrap());
        assert_eq!((hinted.bytes, hinted.calls), (4 << 20, 1));

        // Nor where the kernel is to read as it likes.
        let options = Records::options().read_mode(crate::ReadMode::Pread);
        let records = options.open([records.shards()[0].path()], 1 << 20).unwrap();
        assert_eq!(records.shards()[0].huge, None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn to_look_what_is_there_brings_nothing() {
        let Some((_folder, records)) = in_huge_pages(4) else { return };
        let plan = crate::Plan::builder(records.len()).batch(4).build().unwrap();
        let batch = plan.batch(0, 0).unwrap();
        assert!(!records.seems_cached(&batch));
        // Nor is anything on its way.
        let file = &records.shards()[0].file;
        let on_its_way = crate::system::cached(&file.file().unwrap(), 0, 4 << 20);
        assert!(matches!(on_its_way, Ok(0) | Err(_)), "{on_its_way:?}");
        let mut out = vec![0; 4 << 20];
        // Where memory is short, a page may have gone again.
        until(|| {
            records.read(&batch, &mut out).unwrap();
            records.seems_cached(&batch)
        });
    }

    /// Asks until it holds, or fails after a time in which any disk reads four megabytes.
    #[cfg(target_os = "linux")]
    #[track_caller]
    fn until(mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(300);
        while !holds() {
            assert!(Instant::now() < deadline, "not within five minutes");
            std::thread::yield_now();
        }
    }
}
