//! Which pages are in the kernel's page cache, and how to drop them.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use crate::records::Records;
use crate::spans::Span;
use crate::system::Piece;
use crate::{BatchPlan, Error, ReadMode, system};

/// What becomes of a batch's pages after use; see [`Records::evict_batch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CachePolicy {
    /// Keeps them in the page cache: right if the data set fits in memory.
    #[default]
    Keep,
    /// Drops them from the page cache: right if the data set is larger than memory, so that each page is used once an
    /// epoch and only pushes out what other programs still need.
    Drop,
}

/// Pages of a data set or of a batch, and how many of them the page cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Residency {
    /// Pages in all.
    pub pages: u64,
    /// Those that can be read without the disk. It is a snapshot: pages come and go at any time.
    pub resident: u64,
}

impl Residency {
    #[expect(clippy::needless_pass_by_value, reason = "made for this call")]
    fn add(&mut self, piece: Piece<'_>) -> Result<(), Error> {
        let [pages, resident] = system::count(&piece)?;
        self.pages += pages;
        self.resident += resident;
        Ok(())
    }
}

/// Records of a batch that are looked at, unless the batch before seemed to be in the cache: then one tells. Four looks took
/// 12 us of the 60 us that a batch of 64 records of 2 KiB takes from the cache.
const LOOKS: u64 = 4;

impl Records {
    /// Counts the pages of all shards that are in the page cache, by `mincore(2)`: those that hold records or
    /// lie between them. Linux only.
    ///
    /// It takes as long as there are pages, unless the kernel has `cachestat(2)` (Linux 6.5), which passes over
    /// stretches without any in the cache.
    ///
    /// Since Linux 5.2 the kernel answers truthfully only to those who own the file or may write to it
    /// (`can_do_mincore` in `mm/mincore.c`). To anyone else it reports all pages as resident.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if a shard could not be mapped or the kernel refuses; [`Error::Unsupported`] on
    /// another operating system.
    pub fn residency(&self) -> Result<Residency, Error> {
        let mut residency = Residency::default();
        for shard in self.shards() {
            residency.add(shard.piece(shard.bytes.clone()))?;
        }
        Ok(residency)
    }

    /// Counts the pages of one batch that are in the page cache, as [`residency`](Self::residency) does.
    ///
    /// A page that two runs of the batch share is counted for each of them.
    ///
    /// # Errors
    ///
    /// Those of [`residency`](Self::residency), and [`Error::NoSuchRecord`].
    pub fn residency_of(&self, batch: &BatchPlan) -> Result<Residency, Error> {
        let mut residency = Residency::default();
        for span in self.spans(batch) {
            let span = span?;
            residency.add(span.shard.piece(span.bytes))?;
        }
        Ok(residency)
    }

    /// Whether a batch is probably in the page cache, so that [`will_need`](Self::will_need) has nothing to ask for:
    /// the first bytes of up to 4 of its records, spread over it, all are. With
    /// [`Shuffle::Window`](crate::Shuffle::Window) the chunks of the next window that `will_need` would ask for must
    /// be there too. `false` if that is unknown, and in [`ReadMode::Direct`], for which it does not matter.
    ///
    /// Unlike [`residency_of`](Self::residency_of) it takes a few microseconds, whatever the batch, and is right also
    /// for files that belong to others: it reads a byte of each, if that needs no disk (`preadv2(2)` with
    /// `RWF_NOWAIT`, Linux 4.14). Of a batch of which half the pages are in the cache it returns `true` in one case
    /// of 16, of nine in ten in two cases of three. After it has returned `true` it looks at one record of the next
    /// batch. What is not there the kernel may begin to read.
    #[must_use]
    pub fn seems_cached(&self, batch: &BatchPlan) -> bool {
        // To look at what is not there would bring it.
        if self.read_mode() == ReadMode::Direct {
            return false;
        }
        let ahead = batch.chunks_ahead().unwrap_or_default();
        let middle = |chunk: &Range<u64>| chunk.start + (chunk.end - chunk.start) / 2;
        self.records_seem_cached(batch)
            && ahead.iter().take(4).all(|chunk| self.seems_there(middle(chunk), false))
    }

    /// Whether the first bytes of some of its records are in the page cache.
    pub(crate) fn records_seem_cached(&self, batch: &BatchPlan) -> bool {
        // Relaxed: only a hint depends on it.
        let seemed = self.seemed_cached.load(Relaxed);
        let looks = if seemed { 1 } else { LOOKS }.min(batch.len());
        let seems = (0..looks).all(|i| {
            // In the middle of each part, not at its edge, where a neighbour may have been read.
            let part = batch.len() / looks;
            let place = part * i + part / 2;
            let record = batch.part(place..place + 1).and_then(|one| one.runs().next());
            record.is_some_and(|run| self.seems_there(run.start, seemed))
        });
        self.seemed_cached.store(seems, Relaxed);
        seems
    }

    /// Whether the first byte of a record is in the page cache. Where that is `likely`, one system call tells.
    fn seems_there(&self, record: u64, likely: bool) -> bool {
        let found = self.locate(record);
        found.is_some_and(|at| {
            let shard = &self.shards()[at.shard];
            let missing = || {
                let piece = shard.piece(at.offset..at.offset + 1);
                matches!(system::count(&piece), Ok([_, 0]))
            };
            // To ask may begin to read, which may wait, and takes a small page where a huge one could be.
            !(shard.hints_wait || !likely && shard.huge.is_some() && missing())
                && shard.file.file().is_ok_and(|file| system::seems_there(&file, at.offset))
        })
    }

    /// Asks the kernel to drop the files of all shards, headers and all, from its cache, so that the next read
    /// is a cold one. Linux only.
    ///
    /// Each file is written out first (`fsync`), because `posix_fadvise(POSIX_FADV_DONTNEED)` drops clean
    /// pages only. Pages that are mapped and touched stay: those of a [`view`](Self::view), and those of other
    /// processes. File systems that live in memory (tmpfs) keep everything. [`residency`](Self::residency) shows what
    /// is left.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses; [`Error::Unsupported`] on another operating system.
    pub fn evict(&self) -> Result<(), Error> {
        self.shards().iter().try_for_each(|shard| system::evict(&shard.file))
    }

    /// Applies `policy` to the pages of a batch that has been used. It waits for nothing and writes nothing.
    ///
    /// [`CachePolicy::Drop`] is `posix_fadvise(POSIX_FADV_DONTNEED)`. It drops the pages that lie wholly within a run
    /// of the batch: a page that is shared with a neighbour stays, so records smaller than a page, shuffled one by
    /// one, all stay. So do pages that are dirty or mapped and touched, all of tmpfs, and large folios (of up to 2 MiB
    /// on x86-64, at multiples of their size) that reach out of the run
    /// (`find_lock_entries` in the kernel's `mm/filemap.c`).
    /// With [`Shuffle::Window`](crate::Shuffle::Window) it drops whole chunks: the batch's share of those of the window
    /// before its own, which no later batch needs.
    /// Linux, Android and FreeBSD; macOS and the other Unixes lack the call or give it no effect.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRecord`]; [`Error::System`] if the kernel refuses; [`Error::Unsupported`] for what this
    /// operating system lacks. A failure leaves pages in memory and does no other harm. [`CachePolicy::Keep`] does
    /// nothing and cannot fail. Nor does anything in [`ReadMode::Direct`], which leaves no pages behind: those in the
    /// cache belong to other readers.
    pub fn evict_batch(&self, batch: &BatchPlan, policy: CachePolicy) -> Result<(), Error> {
        if policy == CachePolicy::Keep || self.read_mode() == ReadMode::Direct {
            return Ok(());
        }
        let drop = |span: Result<Span<'_>, Error>| {
            let span = span?;
            system::uncache(&span.shard.file, &span.bytes)
        };
        match batch.chunks_behind() {
            None => self.spans(batch).try_for_each(drop),
            Some(behind) => self.spans_of(behind.into_iter()).try_for_each(drop),
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::Records;
    use crate::page::page_size;
    use crate::system::STRETCH;

    /// Three stretches and a half with a page here and there: counted at once, and page by page.
    #[test]
    fn stretches_are_counted_like_their_pages() {
        let page = page_size();
        let stretch = STRETCH * page;
        let len = 3 * stretch + stretch / 2 + 100;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sparse");
        let file = std::fs::File::create_new(&path).unwrap();
        file.set_len(len as u64).unwrap();
        let written = [0, 5, STRETCH - 1, 2 * STRETCH + 77, 2 * STRETCH + 78, 3 * STRETCH];
        let write = || written.map(|at| file.write_all_at(&vec![1; page], (at * page) as u64).unwrap());
        let records = Records::open([&path], 1).unwrap();
        let count_parts = |bytes: Range<usize>, at_once: usize| {
            let mut found = Residency::default();
            for start in bytes.clone().step_by(at_once) {
                let part = start as u64..start.saturating_add(at_once).min(bytes.end) as u64;
                found.add(records.shards()[0].piece(part)).unwrap();
            }
            found
        };
        for bytes in [
            0..len,
            0..stretch,
            stretch..2 * stretch,
            1..2 * stretch + 1,
            stretch - 1..3 * stretch,
            page - 1..2 * stretch + 77 * page + 1,
            2 * stretch + 78 * page..len,
            5 * page + 99..len + 2 * stretch,
        ] {
            let pages = bytes.start / page..bytes.end.min(len).div_ceil(page);
            let least = written.iter().filter(|at| pages.contains(at)).count() as u64;
            // Where memory is short, pages go between two looks, and come when they are written.
            let found = (0..1000).find_map(|_| {
                write();
                let found = count_parts(bytes.clone(), usize::MAX);
                let expected = count_parts(pages.start * page..pages.end * page, page);
                (found == expected && found.resident >= least).then_some(found)
            });
            assert_eq!(found.map(|found| found.pages), Some(pages.len() as u64), "{bytes:?}");
        }
    }
}
