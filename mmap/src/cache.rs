//! Queries and drops the pages of a data set in the kernel's page cache.

use std::ops::Range;

use crate::file::DataFile;
use crate::ranges::{Extent, Ranges, Shard};
use crate::{BatchIndices, Error, system};

/// The number of pages of a data set, a model or a batch, and how many of them are in the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Residency {
    /// The total number of pages.
    pub pages: u64,
    /// The number of pages in the page cache at the time of the call.
    pub resident: u64,
}

impl Residency {
    fn of(shards: &[Shard]) -> Result<Self, Error> {
        shards.iter().try_fold(Self::default(), |found, shard| found.plus(&shard.file, &shard.bytes))
    }

    fn plus(self, file: &DataFile, bytes: &Range<u64>) -> Result<Self, Error> {
        let [pages, resident] = system::count(file, bytes)?;
        Ok(Self { pages: self.pages + pages, resident: self.resident + resident })
    }
}

impl Ranges {
    /// Counts the pages of all shards in the page cache, with `mincore(2)`. It counts the pages from the first to
    /// the last record of each shard. Linux and Android only.
    ///
    /// The time is proportional to the number of pages. With `cachestat(2)` (Linux 6.5), the call
    /// skips runs of 4096 pages of which none is cached, except on overlayfs and FUSE.
    ///
    /// Since Linux 5.2, the count is correct only if the process owns the file or may write to it (`can_do_mincore` in
    /// `mm/mincore.c`). Otherwise it may be too large: the kernel reports all pages that it is asked about as resident.
    ///
    /// # Errors
    ///
    /// - [`Error::System`]: a shard could not be mapped, or the system call failed.
    /// - The errors of [`Ranges::read`] for a file that could not be reopened.
    /// - [`Error::Unsupported`]: the operating system is neither Linux nor Android.
    pub fn residency(&self) -> Result<Residency, Error> {
        Residency::of(self.shards())
    }

    /// Counts the pages of one batch in the page cache, as [`residency`](Self::residency) does. A
    /// page that several separate byte ranges of the batch share is counted for each.
    ///
    /// # Errors
    ///
    /// - [`Error::NoSuchRecord`]: the batch has a record that the data set does not have.
    /// - The errors of [`residency`](Self::residency).
    pub fn residency_of(&self, batch: &BatchIndices) -> Result<Residency, Error> {
        self.extents(batch.runs()).try_fold(Residency::default(), |found, extent| {
            let Extent { file, bytes, .. } = extent?;
            found.plus(&self.shards()[file].file, &bytes)
        })
    }

    /// Asks the kernel to drop the files of all shards from the page cache, including headers, so
    /// that the next read comes from disk. Linux and Android only.
    ///
    /// The call first writes each file to disk (`fsync`), because `posix_fadvise(POSIX_FADV_DONTNEED)` drops only clean
    /// pages. Pages that another mapping has touched, in this process or another, stay in the cache. File systems in
    /// memory (tmpfs) keep all pages. [`residency`](Self::residency) shows the remaining pages of the records.
    ///
    /// # Errors
    ///
    /// - [`Error::System`]: the system call failed.
    /// - The errors of [`Ranges::read`] for a file that could not be reopened.
    /// - [`Error::Unsupported`]: the operating system is neither Linux nor Android.
    pub fn evict(&self) -> Result<(), Error> {
        self.shards().iter().try_for_each(|shard| system::evict(&shard.file))
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

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::Records;
    use crate::buffer::page_size;
    use crate::system::STRETCH;

    /// Counts a sparse file of three and a half stretches in large ranges, and page by page: the numbers are equal.
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
                found = found.plus(&records.shards()[0].file, &part).unwrap();
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
            // If memory is short, pages may leave the cache between two counts: repeat until both counts agree.
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
