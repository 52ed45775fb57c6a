//! Reads and prefetches bytes through the page cache.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use crate::buffer::{HUGE, around, page_size};
use crate::error::lock;
use crate::file::read_at;
use crate::ranges::{Extent, Shard};
use crate::system::{self, Gathered};
use crate::{Error, ReadStats};

/// The longest extent that is copied from the mapping into small pages of a slot, in bytes: if the cache is cold, and
/// if it is warm. The kernel pins small pages one by one, and a huge page at once (`cargo bench --bench read`).
pub(super) const GATHERED: [u64; 2] = [4 << 10, 16 << 10];

/// The cache counts as warm after this many bytes were found in it without a gap. This is more than the kernel reads
/// ahead for `pread`. If the cache is cold, a copy from the mapping may read single pages from the disk, while `pread`
/// reads all bytes of an extent at once.
const WARM: u64 = 32 << 20;

/// The fewest extents for which one call for all is faster than a call for each.
const TOGETHER: usize = 4;

/// The maximum size of one prefetch hint: 1 MiB.
///
/// One `madvise(MADV_WILLNEED)` reads at most the larger of the device's `max_sectors_kb` and `read_ahead_kb`, and
/// returns 0 although it reads less than asked (`force_page_cache_ra` in the kernel's `mm/readahead.c`). In a test with
/// `read_ahead_kb` 8192, only 8 MiB of a 64 MiB hint were resident afterwards. Many devices allow 1280 KiB. If both
/// values in `/sys/block/*/queue/` are below 1024, increase the larger one.
pub const HINT_CHUNK: usize = 1 << 20;

/// What earlier reads through the page cache have found out.
#[derive(Debug, Default)]
pub(super) struct Copied {
    /// Address ranges of slots to which the kernel cannot copy from a mapping, such as memory that a driver mapped.
    unreachable: Mutex<Vec<Range<usize>>>,
    /// Bytes read since a read last had to wait for the disk. `None`: the file system does not count disk reads.
    warm: Option<AtomicU64>,
}

impl Copied {
    /// `counted`: whether the file system counts disk reads.
    pub(super) fn new(counted: bool) -> Self {
        Self { warm: counted.then(AtomicU64::default), ..Self::default() }
    }

    pub(super) const fn is_counted(&self) -> bool {
        self.warm.is_some()
    }

    /// Bytes read since a read last had to wait for the disk, or 0 if that is not counted. Relaxed: the number only
    /// selects between two ways to read the same bytes.
    pub(super) fn warm_bytes(&self) -> u64 {
        self.warm.as_ref().map_or(0, |warm| warm.load(Relaxed))
    }

    /// Reads `extents`, at most [`PIECES`](system::PIECES), to their places in `out`, and counts the bytes that came from
    /// the disk. `behind` is the number of bytes in the slot after `out`. `changed` is a list whose memory is reused; its
    /// content has no meaning before and after the call.
    ///
    /// # Errors
    ///
    /// [`Error::Truncated`], [`Error::Read`], and those of opening a file again.
    pub(super) fn fill(
        &self,
        shards: &[Shard],
        extents: &[Extent],
        (out, behind): (&mut [u8], usize),
        changed: &mut Vec<usize>,
        stats: &mut ReadStats,
    ) -> Result<(), Error> {
        let before = system::read_from_disk();
        let filled = self.copy(shards, extents, (out, behind), changed);
        let disk = system::read_from_disk().saturating_sub(before);
        stats.disk += disk;
        match &self.warm {
            Some(warm) if disk == 0 => _ = warm.fetch_add(extents.iter().map(Extent::len).sum(), Relaxed),
            Some(warm) => warm.store(0, Relaxed),
            None => {}
        }
        filled
    }

    /// Copies small extents, and long ones if the cache is warm, from the mappings with one call. If a file was truncated
    /// since it was opened, its bytes may then be zeros. So extents of files that have changed are read with `pread`, which
    /// reports missing bytes. So are all other extents.
    fn copy(
        &self,
        shards: &[Shard],
        extents: &[Extent],
        (out, behind): (&mut [u8], usize),
        changed: &mut Vec<usize>,
    ) -> Result<(), Error> {
        let warm = self.warm_bytes() >= WARM;
        // Take a slot to have huge pages up to the last address in it that is a multiple of 2 MiB,
        // and small pages after that.
        let start = out.as_ptr().addr();
        let end = start + out.len() + behind;
        let huge = if warm { (end - end % HUGE).saturating_sub(start) } else { 0 };
        let most = GATHERED[usize::from(warm)];
        let together = |extent: &&Extent| {
            let file = &shards[extent.file].file;
            (extent.len() <= most || extent.to < huge) && file.kept.is_some() && !file.hints_wait
        };
        let gathered = || extents.iter().filter(together);
        let has_slot = |known: &Range<usize>| known.contains(&start);
        if gathered().take(TOGETHER).count() < TOGETHER || lock(&self.unreachable).iter().any(has_slot) {
            return pread(shards, extents.iter(), out);
        }
        let pieces = gathered().map(|extent| (&shards[extent.file].file, &extent.bytes, extent.to));
        let copied = system::gather(pieces, out);
        changed.clear();
        changed.extend(gathered().map(|extent| extent.file));
        changed.sort_unstable();
        changed.dedup();
        changed.retain(|&file| !shards[file].file.is_unchanged());
        if copied == Gathered::Fault && changed.is_empty() {
            // No file has changed, so the kernel could not write to `out`. From now on, read into this memory with `pread`.
            lock(&self.unreachable).push(start..start + out.len().max(1));
        }
        let missing = |extent: &&Extent| {
            copied != Gathered::All || !together(extent) || changed.binary_search(&extent.file).is_ok()
        };
        pread(shards, extents.iter().filter(missing), out)
    }
}

/// Reads each extent with a separate call.
fn pread<'e>(
    shards: &[Shard],
    extents: impl Iterator<Item = &'e Extent>,
    out: &mut [u8],
) -> Result<(), Error> {
    // Keep the file of the last extent open: usually the next extent is in the same file.
    let mut last: Option<(usize, Arc<File>)> = None;
    for extent in extents {
        let data = &shards[extent.file].file;
        let file = match last.take() {
            Some((of, file)) if of == extent.file => file,
            _ => data.file()?,
        };
        // An extent fits the slot, so its length fits a usize.
        let len = usize::try_from(extent.len()).unwrap_or(usize::MAX);
        let out = &mut out[extent.to..][..len];
        data.read_exact_by(out, extent.bytes.start, |out, offset| read_at(&file, out, offset))?;
        last = Some((extent.file, file));
    }
    Ok(())
}

/// Asks the kernel to read the pages of `extents` into the page cache, each page once, and does not wait for them. The
/// kernel may read more pages. Empties the list.
pub(super) fn hint(shards: &[Shard], extents: &mut Vec<Extent>, stats: &mut ReadStats) {
    let page = page_size() as u64;
    extents.retain(|extent| !shards[extent.file].file.hints_wait);
    for Extent { file, bytes, .. } in &mut *extents {
        *bytes = around(bytes, shards[*file].bytes.end, page);
    }
    extents.sort_unstable_by_key(|extent| (extent.file, extent.bytes.start));
    // Merge extents whose pages touch or overlap.
    extents.dedup_by(|next, first| next.file == first.file && joins(&mut first.bytes, &next.bytes));
    let pieces = extents.iter().flat_map(|Extent { file, bytes, .. }| {
        let piece = |start| start..bytes.end.min(start + HINT_CHUNK as u64);
        bytes.clone().step_by(HINT_CHUNK).map(move |start| (&shards[*file].file, piece(start)))
    });
    system::will_need(pieces, stats);
    extents.clear();
}

/// Extends `first` by `next` if they touch or overlap, and returns whether they do. `next` does not start before `first`.
pub(super) fn joins(first: &mut Range<u64>, next: &Range<u64>) -> bool {
    let touch = next.start <= first.end;
    if touch {
        first.end = first.end.max(next.end);
    }
    touch
}

/// A byte to touch ahead of a sequential read: the index of the file, the offset, and the position in the reader's
/// window where the batch of the byte ends.
pub(super) type Point = (usize, u64, u64);

/// Returns the points of `bytes`: one at each multiple of [`STRETCH`]. `end` is the position where their batch ends.
pub(super) fn points(shard: usize, bytes: &Range<u64>, end: u64) -> impl Iterator<Item = Point> + use<> {
    let stretches = bytes.start.div_ceil(STRETCH)..bytes.end.div_ceil(STRETCH);
    stretches.map(move |stretch| (shard, stretch * STRETCH, end))
}

/// Touches the points ahead of the read, without waiting for the disk. The kernel then reads ahead from there. Removes
/// the touched points, and those of batches that end at `used` or before. Stops at a point that cannot be touched.
///
/// The kernel reads `read_ahead_kb` ahead, in large pages. It reads more when a read reaches a page that it has marked,
/// or the end of what it has requested. Until that read, the disk is idle. A touch reaches the mark earlier than the
/// read: tokens in batches of 128 KiB were read 1.25 times as fast with `read_ahead_kb` 8192, and 1.75 times with 128
/// (`bench/loaders`).
pub(super) fn follow(shards: &[Shard], points: &mut VecDeque<Point>, used: u64, stats: &mut ReadStats) {
    while let Some(&(shard, at, end)) = points.front() {
        if end > used {
            if !shards[shard].file.kept.as_ref().is_some_and(|file| system::touch(file, at)) {
                break;
            }
            stats.hints += 1;
            stats.hinted += STRETCH;
        }
        points.pop_front();
    }
}

/// Bytes in a stretch. Small records are requested in whole stretches: Linux itself reads this many bytes around a page
/// that is touched (the default of `read_ahead_kb`).
pub(super) const STRETCH: u64 = 128 << 10;

/// Whole stretches are requested only if an epoch reads at least this many records of each on average.
const WORTH: u64 = 2;

/// The stretches that were requested in this epoch. They are numbered from the front of all files, one file after the
/// other. A stretch at the end of a file may be shorter.
///
/// Without requests of whole stretches (`pays` always `false`), the first cold epoch of 512 MiB in full shuffle with
/// `ReadMode::Pread` took five times as long with records of 512 B and of 4 KiB, 1.6 times with 16 KiB, and 0.9 times
/// with 64 KiB (3 rounds, not quiet).
#[derive(Debug, Default)]
pub(super) struct Around {
    /// A bit for each stretch.
    pub(super) asked: Vec<u64>,
}

impl Around {
    /// The most bytes that `asked` may take. They suffice for 4 TiB of files.
    const MOST: u64 = 4 << 20;

    /// Covers the first `bytes` bytes of all files, or as many as [`MOST`](Self::MOST) allows.
    pub(super) fn new(bytes: u64) -> Self {
        Self { asked: vec![0; usize::try_from(Self::memory(bytes) / 8).unwrap_or(0)] }
    }

    /// The bytes of memory that `asked` takes to cover the first `bytes` bytes of all files.
    pub(super) fn memory(bytes: u64) -> u64 {
        Self::MOST.min(bytes.div_ceil(STRETCH).div_ceil(64) * 8)
    }

    /// Whether it pays to request whole stretches, for records that start every `stride` bytes, if an epoch reads one
    /// out of every `share` records.
    pub(super) const fn pays(stride: u64, share: u64) -> bool {
        STRETCH / stride >= WORTH.saturating_mul(share)
    }

    /// Forgets all requests.
    pub(super) fn clear(&mut self) {
        self.asked.fill(0);
    }

    /// Whether it covers this many stretches.
    pub(super) fn has(&self, stretches: u64) -> bool {
        stretches <= self.asked.len() as u64 * 64
    }

    /// Returns the stretches around `bytes` that were not requested yet, cut at `file`, and marks them as requested.
    /// `first` is the number of the file's first stretch. It [has](Self::has) those of `bytes`.
    pub(super) fn missing(
        &mut self,
        first: u64,
        bytes: &Range<u64>,
        file: &Range<u64>,
    ) -> impl Iterator<Item = Range<u64>> {
        let stretches = bytes.start / STRETCH..bytes.end.div_ceil(STRETCH);
        let (start, end) = (file.start, file.end);
        stretches.filter_map(move |stretch| {
            let number = first + stretch;
            let word = &mut self.asked[usize::try_from(number / 64).unwrap_or(usize::MAX)];
            let bit = 1 << (number % 64);
            let is_new = *word & bit == 0;
            *word |= bit;
            is_new.then(|| start.max(stretch * STRETCH)..end.min((stretch + 1) * STRETCH))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stretch_is_asked_for_once_an_epoch() {
        let file = 1000..10 * STRETCH + 77;
        let around = std::cell::RefCell::new(Around::new(4 * 64 * STRETCH));
        let ask = |bytes: Range<u64>| around.borrow_mut().missing(3, &bytes, &file).collect::<Vec<_>>();
        around.borrow_mut().clear();
        assert_eq!(ask(5000..5001), std::slice::from_ref(&(1000..STRETCH)));
        assert_eq!(ask(1000..STRETCH), []);
        assert_eq!(ask(STRETCH - 1..STRETCH + 1), std::slice::from_ref(&(STRETCH..2 * STRETCH)));
        let end = file.end;
        assert_eq!(ask(end - 1..end), std::slice::from_ref(&(10 * STRETCH..end)));
        assert_eq!(ask(end - 1..end), []);
        // The next file.
        let next = around.borrow_mut().missing(14, &(0..5), &(0..9)).collect::<Vec<_>>();
        assert_eq!(next, std::slice::from_ref(&(0..9)));
        around.borrow_mut().clear();
        assert_eq!(ask(2000..2001), std::slice::from_ref(&(1000..STRETCH)));
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
}
