//! Which pages are in the kernel's page cache, and how to drop them: for tests and measurements.

use crate::{BatchPlan, Error, Records};

/// Pages of a data set or of a batch, and how many of them the page cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// Pages in all.
    pub pages: u64,
    /// Those that can be read without the disk. It is a snapshot: pages come and go at any time.
    pub resident: u64,
}

impl Records {
    /// Counts the pages of all shards that are in the page cache, by `mincore(2)`. Linux only.
    ///
    /// Since Linux 5.2 the kernel tells this only to those who own the file or may write to it
    /// (`can_do_mincore` in `mm/mincore.c`). To anyone else every page is reported as resident.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if a shard could not be mapped or the kernel refuses; [`Error::Unsupported`] on
    /// another operating system.
    pub fn residency(&self) -> Result<Residency, Error> {
        let mut residency = Residency::default();
        for shard in self.shards() {
            count::add(&mut residency, shard, &(0..u64::MAX))?;
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
            count::add(&mut residency, span.shard, &span.bytes)?;
        }
        Ok(residency)
    }

    /// Asks the kernel to drop the pages of all shards from its cache, so that the next read is a cold one.
    /// Linux only.
    ///
    /// Each file is written out first (`fsync`), because `posix_fadvise(POSIX_FADV_DONTNEED)` drops clean
    /// pages only. Pages that another mapping has touched, here or in another process, stay; the mapping
    /// held by `Records` is never touched and keeps none. File systems that live in memory (tmpfs) keep
    /// everything. [`residency`](Self::residency) tells what became of it.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses; [`Error::Unsupported`] on another operating system.
    pub fn evict(&self) -> Result<(), Error> {
        self.shards().iter().try_for_each(evict::evict)
    }
}

#[cfg(target_os = "linux")]
mod count {
    //! `mincore`, a stretch of pages at a time.

    use std::io;
    use std::ops::Range;

    use super::Residency;
    use crate::page::{around, page_size};
    use crate::{Error, Shard};

    /// Adds the pages of `shard` that hold `bytes`; what lies past the end is left out.
    pub(super) fn add(residency: &mut Residency, shard: &Shard, bytes: &Range<u64>) -> Result<(), Error> {
        let failed = |call, source| Error::System { path: shard.path().to_owned(), call, source };
        let map = match &shard.map {
            Ok(map) => map,
            // The reason is kept with the shard and io::Error cannot be cloned: give its kind and words.
            Err(error) => return Err(failed("mmap", io::Error::new(error.kind(), error.to_string()))),
        };
        let page = page_size();
        // One byte a page; a stretch of 4096 of them, so that no memory grows with the file.
        let mut flags = [0_u8; 4096];
        let range = around(bytes, map.len(), page);
        for start in range.clone().step_by(flags.len() * page) {
            let pages = (range.end - start).div_ceil(page).min(flags.len());
            let address = map.as_mut_ptr().wrapping_add(start);
            // SAFETY: `start` is a multiple of the page size and so is the mapping's address. The `pages`
            // pages from there on belong to the mapping, which `map` keeps alive. The kernel writes one
            // byte a page, and `flags` has at least `pages` bytes. No byte of the mapping is touched.
            let status = unsafe { libc::mincore(address.cast(), pages * page, flags.as_mut_ptr()) };
            if status != 0 {
                return Err(failed("mincore", io::Error::last_os_error()));
            }
            residency.pages += pages as u64;
            // Only the lowest bit has a meaning; see mincore(2).
            residency.resident += flags[..pages].iter().map(|flag| u64::from(flag & 1)).sum::<u64>();
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
mod evict {
    //! `posix_fadvise`, after the file is clean.

    use std::io;
    use std::os::fd::AsRawFd;

    use crate::{Error, Shard};

    pub(super) fn evict(shard: &Shard) -> Result<(), Error> {
        let failed = |call, source| Error::System { path: shard.path().to_owned(), call, source };
        shard.file.sync_all().map_err(|source| failed("fsync", source))?;
        // SAFETY: the descriptor is open as long as `shard.file` lives; the call takes no pointer.
        let errno = unsafe { libc::posix_fadvise(shard.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        match errno {
            0 => Ok(()),
            errno => Err(failed("posix_fadvise", io::Error::from_raw_os_error(errno))),
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod count {
    //! No `mincore` with Linux's meaning.

    use std::ops::Range;

    use super::Residency;
    use crate::{Error, Shard};

    pub(super) fn add(_: &mut Residency, _: &Shard, _: &Range<u64>) -> Result<(), Error> {
        Err(Error::Unsupported { call: "mincore" })
    }
}

#[cfg(not(target_os = "linux"))]
mod evict {
    //! No `posix_fadvise` with Linux's meaning.

    use crate::{Error, Shard};

    pub(super) fn evict(_: &Shard) -> Result<(), Error> {
        Err(Error::Unsupported { call: "posix_fadvise" })
    }
}
