//! Bytes read through the page cache: copied out of it, and prefetched.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::stats::ReadStats;
use super::stream::Wanted;
use crate::Error;
use crate::file::{Opened, read_at};
use crate::page::{around, page_size};
use crate::ranges::Stretch;
use crate::shard::Shard;
use crate::system::{self, Asked, Gathered, PIECES, Piece};

/// The most bytes of a piece that is copied out of the mapping, in a slot of small pages and in one of huge pages. The
/// kernel pins each page once. Longer pieces are found page by page, where `pread` copies whole folios: 4 KiB took 0.79
/// and 6 KiB 1.04 of its time, in huge pages 8 KiB 0.65 and 64 KiB 1.40 (`cargo bench --bench read --
/// cached`).
const GATHERED: [u64; 2] = [4 << 10, 8 << 10];

/// Slots of this length are in huge pages if there are any.
const HUGE: usize = 2 << 20;

/// The fewest pieces for which one call for all is faster than a call for each.
const TOGETHER: usize = 4;

/// The maximum size of one prefetch hint: 1 MiB.
///
/// One `madvise(MADV_WILLNEED)` reads at most the larger of the device's `max_sectors_kb` and `read_ahead_kb`, and
/// returns 0 in any case (`force_page_cache_ra` in the kernel's `mm/readahead.c`). In a test with `read_ahead_kb`
/// 8192, only 8 MiB of a 64 MiB hint were resident afterwards. Many devices allow 1280 KiB. If both values in
/// `/sys/block/*/queue/` are below 1024, increase the larger one.
pub const HINT_CHUNK: NonZeroUsize = NonZeroUsize::new(1 << 20).unwrap();

/// Slots that the kernel does not write to for us: memory that a driver mapped may be of that kind.
#[derive(Debug, Default)]
pub(super) struct Unreachable(Mutex<Vec<Range<usize>>>);

impl Unreachable {
    fn has(&self, out: &[u8]) -> bool {
        let at = out.as_ptr().addr();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|known| known.contains(&at))
    }

    fn add(&self, out: &[u8]) {
        let start = out.as_ptr().addr();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(start..start + out.len().max(1));
    }
}

/// Copies `wanted`, at most [`PIECES`] pieces, to their places in `out`.
///
/// Small pieces come out of the mapping by one call. A piece of a file that was truncated since it was opened may then be
/// zeros, so files that have changed are read by `pread`, as everything else is: it tells what is missing.
///
/// # Errors
///
/// [`Error::Truncated`], [`Error::Read`], and those of opening a file again.
pub(super) fn fill(
    shards: &[Shard],
    wanted: &[Wanted],
    out: &mut [u8],
    unreachable: &Unreachable,
) -> Result<(), Error> {
    let most = GATHERED[usize::from(out.len() >= HUGE)];
    let small = |wanted: &&Wanted| {
        let shard = &shards[wanted.at.shard];
        wanted.at.bytes.end - wanted.at.bytes.start <= most && shard.file.is_kept() && !shard.hints_wait
    };
    let gathered: Vec<_> = wanted
        .iter()
        .filter(small)
        .map(|wanted| (shards[wanted.at.shard].piece(wanted.at.bytes.clone()), wanted.to))
        .collect();
    if gathered.len() < TOGETHER || unreachable.has(out) {
        return pread(shards, wanted.iter(), out);
    }
    let copied = system::gather(&gathered, out);
    let mut changed: Vec<usize> = wanted.iter().filter(small).map(|wanted| wanted.at.shard).collect();
    changed.sort_unstable();
    changed.dedup();
    changed.retain(|&shard| !shards[shard].file.is_unchanged());
    if copied == Gathered::Fault && changed.is_empty() {
        // Not for lack of bytes in the files.
        unreachable.add(out);
    }
    let missing = |wanted: &&Wanted| {
        copied != Gathered::All || !small(wanted) || changed.binary_search(&wanted.at.shard).is_ok()
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
    for (shard, whole) in &wanted {
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
    stats.disk += read_since(before);
}

/// Bytes that this thread has had read from disks since `before`; 0 if that is not counted.
pub(super) fn read_since(before: Option<u64>) -> u64 {
    let now = system::read_from_disk();
    now.zip(before).map_or(0, |(now, before)| now.saturating_sub(before))
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

#[cfg(test)]
mod tests {
    use super::*;

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
