//! Which pages are in the kernel's page cache, and how to drop them.

use crate::ranges::Ranges;
use crate::shard::Shard;
use crate::system::Piece;
use crate::{BatchIndices, Error, system};

/// Pages of a data set or of a batch, and how many of them the page cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Residency {
    /// Pages in all.
    pub pages: u64,
    /// Pages that can be read without the disk. It is a snapshot and may be out of date at once.
    pub resident: u64,
}

impl Residency {
    fn of(shards: &[Shard]) -> Result<Self, Error> {
        let mut residency = Self::default();
        for shard in shards {
            residency.add(shard.piece(shard.bytes.clone()))?;
        }
        Ok(residency)
    }

    #[expect(clippy::needless_pass_by_value, reason = "made for this call")]
    fn add(&mut self, piece: Piece<'_>) -> Result<(), Error> {
        let [pages, resident] = system::count(&piece)?;
        self.pages += pages;
        self.resident += resident;
        Ok(())
    }
}

impl Ranges {
    /// Counts the pages of all shards that are in the page cache, by `mincore(2)`: pages that hold records or are
    /// between them. Linux only.
    ///
    /// The time is proportional to the number of pages, unless the kernel has `cachestat(2)` (Linux 6.5): it skips
    /// stretches without cached pages.
    ///
    /// Since Linux 5.2 the kernel answers truthfully only to those who own the file or may write to it
    /// (`can_do_mincore` in `mm/mincore.c`). To anyone else it reports all pages as resident.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if a shard could not be mapped or the kernel refuses; [`Error::Unsupported`] on
    /// another operating system.
    pub fn residency(&self) -> Result<Residency, Error> {
        Residency::of(self.shards())
    }

    /// Counts the pages of one batch that are in the page cache, as [`residency`](Self::residency) does.
    ///
    /// A page that two runs of the batch share is counted for each of them.
    ///
    /// # Errors
    ///
    /// The errors of [`residency`](Self::residency), and [`Error::NoSuchRecord`].
    pub fn residency_of(&self, batch: &BatchIndices) -> Result<Residency, Error> {
        let mut residency = Residency::default();
        for span in self.spans(batch.pieces()) {
            let at = span?.at;
            residency.add(self.shards()[at.shard].piece(at.bytes))?;
        }
        Ok(residency)
    }

    /// Asks the kernel to drop the files of all shards, headers included, from its cache. The next read is then cold.
    /// Linux only.
    ///
    /// Each file is written out first (`fsync`), because `posix_fadvise(POSIX_FADV_DONTNEED)` drops clean pages only.
    /// Pages that another data set or process has mapped and touched stay. File systems that live in memory (tmpfs)
    /// keep everything. [`residency`](Self::residency) shows what is left.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses; [`Error::Unsupported`] on another operating system.
    pub fn evict(&self) -> Result<(), Error> {
        self.shards().iter().try_for_each(|shard| system::evict(&shard.piece(0..0)))
    }
}

#[cfg(feature = "safetensors")]
impl crate::Tensors {
    /// Counts the pages of all files that are in the page cache, as [`Ranges::residency`] does.
    ///
    /// # Errors
    ///
    /// The errors of [`Ranges::residency`].
    pub fn residency(&self) -> Result<Residency, Error> {
        Residency::of(self.shards())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::ops::Range;
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
