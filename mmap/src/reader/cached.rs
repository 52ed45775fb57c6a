//! Bytes read through the page cache: copied out of it, and prefetched.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::stats::ReadStats;
use super::stream::Wanted;
use crate::Error;
use crate::buffer::{HUGE, around, page_size};
use crate::file::{Opened, read_at};
use crate::ranges::{Ranges, Shard, Stretch};
use crate::system::{self, Asked, Gathered, PIECES, Piece};

/// The most bytes of a piece that is copied out of the mapping into small pages, of a cold cache and of a warm one. The
/// kernel pins each page of the slot once there, and a huge page at once (`cargo bench --bench read -- cached`).
const GATHERED: [u64; 2] = [4 << 10, 16 << 10];

/// The cache is warm if this many bytes were in it without a gap. Before that a fault may read from the disk, single pages,
/// where `pread` reads all that it needs. This is more than `pread` itself reads ahead.
const WARM: u64 = 32 << 20;

/// The fewest pieces for which one call for all is faster than a call for each.
const TOGETHER: usize = 4;

/// The maximum size of one prefetch hint: 1 MiB.
///
/// One `madvise(MADV_WILLNEED)` reads at most the larger of the device's `max_sectors_kb` and `read_ahead_kb`, and
/// returns 0 in any case (`force_page_cache_ra` in the kernel's `mm/readahead.c`). In a test with `read_ahead_kb`
/// 8192, only 8 MiB of a 64 MiB hint were resident afterwards. Many devices allow 1280 KiB. If both values in
/// `/sys/block/*/queue/` are below 1024, increase the larger one.
pub const HINT_CHUNK: NonZeroUsize = NonZeroUsize::new(1 << 20).unwrap();

/// What earlier copies have found out.
#[derive(Debug, Default)]
pub(super) struct Copied {
    /// Slots that the kernel does not write to for us: memory that a driver mapped may be of that kind.
    unreachable: Mutex<Vec<Range<usize>>>,
    /// Bytes copied since a copy had to wait for a disk. `None`: the file system does not count its reads.
    warm: Option<AtomicU64>,
}

impl Copied {
    /// `counted`: whether reads of the files are counted.
    pub(super) fn new(counted: bool) -> Self {
        Self { warm: counted.then(AtomicU64::default), ..Self::default() }
    }

    pub(super) const fn is_counted(&self) -> bool {
        self.warm.is_some()
    }

    fn cannot_reach(&self, out: &[u8]) -> bool {
        let at = out.as_ptr().addr();
        let known = self.unreachable.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().any(|known| known.contains(&at))
    }

    fn add_unreachable(&self, out: &[u8]) {
        let start = out.as_ptr().addr();
        let mut known = self.unreachable.lock().unwrap_or_else(PoisonError::into_inner);
        known.push(start..start + out.len().max(1));
    }

    // Relaxed: it decides between two ways to copy the same bytes.
    fn is_warm(&self) -> bool {
        self.warm_bytes() >= WARM
    }

    /// Bytes copied since a copy had to wait for a disk; 0 if that is not counted.
    pub(super) fn warm_bytes(&self) -> u64 {
        self.warm.as_ref().map_or(0, |warm| warm.load(Relaxed))
    }

    /// Counts a copy of this many bytes. `disk`: bytes that came from a disk for it; `None` if that is not counted.
    fn add(&self, bytes: u64, disk: Option<u64>) {
        match (&self.warm, disk) {
            (Some(warm), Some(0)) => _ = warm.fetch_add(bytes, Relaxed),
            (Some(warm), _) => warm.store(0, Relaxed),
            (None, _) => {}
        }
    }
}

/// Copies `wanted`, at most [`PIECES`] pieces, to their places in `out`, and counts what came from disks for it. The slot has
/// `behind` bytes more.
///
/// # Errors
///
/// [`Error::Truncated`], [`Error::Read`], and those of opening a file again.
pub(super) fn fill(
    shards: &[Shard],
    wanted: &[Wanted],
    (out, behind): (&mut [u8], usize),
    before: &Copied,
    stats: &mut ReadStats,
) -> Result<(), Error> {
    let at_first = system::read_from_disk();
    let filled = copy(shards, wanted, (out, behind), before);
    let disk = read_since(at_first);
    before.add(wanted.iter().map(Wanted::len).sum(), disk);
    stats.disk += disk.unwrap_or(0);
    filled
}

/// Small pieces, and long ones of a warm cache, come out of the mapping by one call. A piece of a file that was truncated
/// since it was opened may then be zeros, so files that have changed are read by `pread`, as everything else is: it tells
/// what is missing.
fn copy(
    shards: &[Shard],
    wanted: &[Wanted],
    (out, behind): (&mut [u8], usize),
    before: &Copied,
) -> Result<(), Error> {
    let warm = before.is_warm();
    // A slot begins at a huge page, and is in such pages up to its last multiple of one.
    let start = out.as_ptr().addr();
    let end = start + out.len() + behind;
    let huge = if warm { (end - end % HUGE).saturating_sub(start) } else { 0 };
    let most = GATHERED[usize::from(warm)];
    let together = |wanted: &&Wanted| {
        let shard = &shards[wanted.at.shard];
        (wanted.len() <= most || wanted.to < huge) && shard.file.is_kept() && !shard.hints_wait
    };
    let gathered: Vec<_> = wanted
        .iter()
        .filter(together)
        .map(|wanted| (shards[wanted.at.shard].piece(wanted.at.bytes.clone()), wanted.to))
        .collect();
    if gathered.len() < TOGETHER || before.cannot_reach(out) {
        return pread(shards, wanted.iter(), out);
    }
    let copied = system::gather(&gathered, out);
    let mut changed: Vec<usize> = wanted.iter().filter(together).map(|wanted| wanted.at.shard).collect();
    changed.sort_unstable();
    changed.dedup();
    changed.retain(|&shard| !shards[shard].file.is_unchanged());
    if copied == Gathered::Fault && changed.is_empty() {
        // Not for lack of bytes in the files.
        before.add_unreachable(out);
    }
    let missing = |wanted: &&Wanted| {
        copied != Gathered::All || !together(wanted) || changed.binary_search(&wanted.at.shard).is_ok()
    };
    pread(shards, wanted.iter().filter(missing), out)
}

/// Reads each piece by a separate call.
fn pread<'w>(
    shards: &[Shard],
    wanted: impl Iterator<Item = &'w Wanted>,
    out: &mut [u8],
) -> Result<(), Error> {
    // The file of the last piece; most often the next piece is in the same file.
    let mut last: Option<(usize, Opened<'_>)> = None;
    for Wanted { at: Stretch { shard, bytes, .. }, to } in wanted {
        let data = &shards[*shard].file;
        let file = match last.take() {
            Some((of, file)) if of == *shard => file,
            _ => data.file()?,
        };
        // A slot has room for all pieces, so this fits.
        let len = usize::try_from(bytes.end - bytes.start).unwrap_or(usize::MAX);
        let out = &mut out[*to..*to + len];
        data.read_exact_by(out, bytes.start, |out, offset| read_at(&file, out, offset))?;
        last = Some((*shard, file));
    }
    Ok(())
}

/// Stretches from here on are asked for in large pages, as far as the system has them. Shuffled records of 1 MiB were read 1.3
/// times as fast with them, for 0.6 of the processor time, those of 256 KiB 1.2 times, and shorter ones no faster.
const LARGE: u64 = 256 << 10;

/// Asks the kernel for the pages of these bytes, each page once, and does not wait for them. It may read more.
pub(super) fn hint(shards: &[Shard], mut wanted: Vec<(usize, Range<u64>)>, stats: &mut ReadStats) {
    let (begun, before) = (Instant::now(), system::read_from_disk());
    let page = page_size() as u64;
    wanted.retain(|(shard, _)| !shards[*shard].hints_wait);
    for (shard, bytes) in &mut wanted {
        *bytes = around(bytes, shards[*shard].bytes.end, page);
    }
    wanted.sort_unstable_by_key(|(shard, bytes)| (*shard, bytes.start));
    // Pages that touch are asked for together.
    wanted.dedup_by(|(shard, next), (first, whole)| {
        let touch = shard == first && next.start <= whole.end;
        if touch {
            whole.end = whole.end.max(next.end);
        }
        touch
    });
    let mut asked = Asked::default();
    let mut pieces: Vec<Piece<'_>> = Vec::new();
    for (shard, whole) in &mut wanted {
        if let Some(file) = shards[*shard].file.kept().filter(|_| whole.end - whole.start >= LARGE) {
            let front = system::in_large_pages(file, whole);
            asked.bytes += front;
            asked.calls += u64::from(front > 0);
            whole.start += front;
        }
        for bytes in cut(whole, HINT_CHUNK, page) {
            if pieces.len() == PIECES {
                system::will_need(&pieces, &mut asked);
                pieces.clear();
            }
            pieces.push(shards[*shard].piece(bytes));
        }
    }
    system::will_need(&pieces, &mut asked);
    stats.hinted += asked.bytes;
    stats.hints += asked.calls;
    stats.failed += asked.failed;
    stats.hint_time += begun.elapsed();
    stats.disk += read_since(before).unwrap_or(0);
}

/// A byte of a file that is read in order, and where its batch ends in the window.
pub(super) type Point = (usize, u64, u64);

/// The points of these bytes: one in each [`STRETCH`].
pub(super) fn points(shard: usize, bytes: &Range<u64>, end: u64) -> impl Iterator<Item = Point> + use<> {
    let stretches = bytes.start.div_ceil(STRETCH)..bytes.end.div_ceil(STRETCH);
    stretches.map(move |stretch| (shard, stretch * STRETCH, end))
}

/// Touches the points ahead of the read, without a wait. The kernel then reads ahead from there. Removes the touched points,
/// and those of batches that end at `used` or before. Stops at a point that cannot be touched.
///
/// The kernel reads `read_ahead_kb` ahead, in large pages. It reads more when a read reaches a page that it has marked, or
/// the end of what it has requested. Until that read the disk is idle. The touches reach the mark early: tokens in batches of
/// 128 KiB were read 1.25 times as fast with `read_ahead_kb` 8192, and 1.75 times with 128 (`bench/loaders`).
pub(super) fn follow(shards: &[Shard], points: &mut VecDeque<Point>, used: u64, stats: &mut ReadStats) {
    let (begun, before) = (Instant::now(), system::read_from_disk());
    while let Some(&(shard, at, end)) = points.front() {
        if end > used {
            if !shards[shard].file.kept().is_some_and(|file| system::touch(file, at)) {
                break;
            }
            stats.hints += 1;
            stats.hinted += STRETCH;
        }
        points.pop_front();
    }
    stats.hint_time += begun.elapsed();
    stats.disk += read_since(before).unwrap_or(0);
}

/// Bytes that this thread has had read from disks since `before`. `None` if that is not counted.
fn read_since(before: Option<u64>) -> Option<u64> {
    let now = system::read_from_disk();
    now.zip(before).map(|(now, before)| now.saturating_sub(before))
}

/// Cuts `range` into pieces of whole pages; it begins at a page.
fn cut(range: &Range<u64>, piece: NonZeroUsize, page: u64) -> impl Iterator<Item = Range<u64>> {
    let step = (piece.get() as u64 / page).max(1) * page;
    let Range { mut start, end } = *range;
    std::iter::from_fn(move || {
        let piece = start..start.saturating_add(step).min(end);
        start = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Bytes that are asked for together: what Linux itself reads around a page that is touched (`read_ahead_kb`, by default).
pub(super) const STRETCH: u64 = 128 << 10;

/// Records of a stretch that an epoch has to read for it to pay to ask for all of it.
const WORTH: u64 = 2;

/// The stretches of all files that were requested in this epoch.
#[derive(Debug, Default)]
pub(super) struct Around(Vec<u64>);

impl Around {
    pub(super) fn new(ranges: &Ranges) -> Self {
        let bytes = ranges.shards().last().map_or(0, |shard| shard.before.saturating_add(shard.bytes.end));
        let words = usize::try_from(bytes / STRETCH / 64).unwrap_or(0) + 1;
        Self(vec![0; words])
    }

    /// Whether reading around pays for records at every `stride` bytes if an epoch reads one of `share` records.
    pub(super) const fn pays(stride: u64, share: u64) -> bool {
        STRETCH / stride >= WORTH.saturating_mul(share)
    }

    /// Another epoch begins.
    pub(super) fn clear(&mut self) {
        self.0.fill(0);
    }

    /// The stretches around `bytes` that have not been asked for, cut at `file`. All files follow each other, this one from
    /// `before` on.
    pub(super) fn missing(
        &mut self,
        before: u64,
        bytes: &Range<u64>,
        file: &Range<u64>,
    ) -> impl Iterator<Item = Range<u64>> {
        let stretches = (before + bytes.start) / STRETCH..(before + bytes.end).div_ceil(STRETCH);
        let (start, end) = (file.start, file.end);
        stretches.filter(|&stretch| self.first(stretch)).filter_map(move |stretch| {
            let at =
                (stretch * STRETCH).saturating_sub(before)..((stretch + 1) * STRETCH).saturating_sub(before);
            let at = at.start.max(start)..at.end.min(end);
            (!at.is_empty()).then_some(at)
        })
    }

    /// Whether this one has not been asked for.
    fn first(&mut self, stretch: u64) -> bool {
        let word = usize::try_from(stretch / 64).ok().and_then(|index| self.0.get_mut(index));
        let Some(word) = word else { return true };
        let bit = 1 << (stretch % 64);
        let first = *word & bit == 0;
        *word |= bit;
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stretch_is_asked_for_once_an_epoch() {
        let file = 1000..10 * STRETCH + 77;
        let around = std::cell::RefCell::new(Around(vec![0; 4]));
        let before = 3 * STRETCH - 500;
        let ask = |bytes: Range<u64>| around.borrow_mut().missing(before, &bytes, &file).collect::<Vec<_>>();
        around.borrow_mut().clear();
        assert_eq!(ask(5000..5001), std::slice::from_ref(&(1000..STRETCH + 500)));
        assert_eq!(ask(1000..STRETCH + 500), []);
        assert_eq!(
            ask(STRETCH + 499..STRETCH + 501),
            std::slice::from_ref(&(STRETCH + 500..2 * STRETCH + 500))
        );
        let end = file.end;
        assert_eq!(ask(end - 1..end), std::slice::from_ref(&(9 * STRETCH + 500..end)));
        assert_eq!(ask(end - 1..end), []);
        around.borrow_mut().clear();
        assert_eq!(ask(2000..2001), std::slice::from_ref(&(1000..STRETCH + 500)));
    }

    #[test]
    fn each_stretch_has_one_point() {
        let points = |bytes| points(1, &bytes, 7).collect::<Vec<_>>();
        assert_eq!(points(1..STRETCH), []);
        assert_eq!(points(0..STRETCH), [(1, 0, 7)]);
        assert_eq!(points(STRETCH..2 * STRETCH + 1), [(1, STRETCH, 7), (1, 2 * STRETCH, 7)]);
    }

    #[test]
    fn it_pays_for_small_records_of_which_many_are_read() {
        assert!(Around::pays(4096, 1) && Around::pays(4096, 16) && !Around::pays(4096, 17));
        assert!(Around::pays(64 << 10, 1) && !Around::pays((64 << 10) + 1, 1));
        assert!(!Around::pays(u64::MAX, 1) && !Around::pays(1, u64::MAX));
    }

    #[test]
    fn pieces_are_whole_pages_and_cover_the_range() {
        let cut = |range: Range<u64>, piece| -> Vec<_> {
            super::cut(&range, NonZeroUsize::new(piece).unwrap(), 10).collect()
        };
        assert_eq!(cut(10..55, 20), [10..30, 30..50, 50..55]);
        assert_eq!(cut(10..55, 29), [10..30, 30..50, 50..55]);
        assert_eq!(cut(10..35, 1), [10..20, 20..30, 30..35]);
        assert_eq!(cut(10..55, usize::MAX), std::slice::from_ref(&(10..55)));
        assert_eq!(cut(55..55, 20), []);
    }
}
