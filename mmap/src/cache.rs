//! Which pages are in the kernel's page cache, and how to drop them.

use crate::read::ReadMode;
use std::ops::Range;

use crate::records::Records;
use crate::spans::Span;
use crate::{BatchPlan, Error};

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

/// Records of a batch that are looked at.
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
            count::add(&mut residency, shard, &shard.bytes)?;
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

    /// Whether a batch is probably in the page cache, so that [`will_need`](Self::will_need) has nothing to ask for:
    /// the first bytes of up to 4 of its records, spread over it, all are. With
    /// [`Shuffle::Window`](crate::Shuffle::Window) the chunks of the next window that `will_need` would ask for must
    /// be there too. `false` if that is unknown, and in [`ReadMode::Direct`], for which it does not matter.
    ///
    /// Unlike [`residency_of`](Self::residency_of) it takes a few microseconds, whatever the batch, and is right also
    /// for files that belong to others: it reads a byte of each, if that needs no disk (`preadv2(2)` with
    /// `RWF_NOWAIT`, Linux 4.14). Of a batch of which half the pages are in the cache it returns `true` in one case
    /// of 16, of nine in ten in two cases of three. What is not there the kernel may begin to read.
    #[must_use]
    pub fn seems_cached(&self, batch: &BatchPlan) -> bool {
        // To look at what is not there would bring it.
        if self.read_mode() == ReadMode::Direct {
            return false;
        }
        let ahead = batch.chunks_ahead().unwrap_or_default();
        let middle = |chunk: &Range<u64>| chunk.start + (chunk.end - chunk.start) / 2;
        self.records_seem_cached(batch) && ahead.iter().take(4).all(|chunk| self.seems_there(middle(chunk)))
    }

    /// Whether the first bytes of some of its records are in the page cache.
    pub(crate) fn records_seem_cached(&self, batch: &BatchPlan) -> bool {
        let looks = batch.len().min(LOOKS);
        (0..looks).all(|i| {
            // In the middle of each part, not at its edge, where a neighbour may have been read.
            let part = batch.len() / looks;
            let place = part * i + part / 2;
            let record = batch.part(place..place + 1).and_then(|one| one.runs().next());
            record.is_some_and(|run| self.seems_there(run.start))
        })
    }

    fn seems_there(&self, record: u64) -> bool {
        let found = self.locate(record);
        found.is_some_and(|at| {
            let file = self.shards()[at.shard].file.file();
            file.is_ok_and(|file| look::cached(&file, at.offset))
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
        self.shards().iter().try_for_each(evict::evict)
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
            uncache::uncache(span.shard, &span.bytes)
        };
        match batch.chunks_behind() {
            None => self.spans(batch).try_for_each(drop),
            Some(behind) => self.spans_of(behind.into_iter()).try_for_each(drop),
        }
    }
}

#[cfg(target_os = "linux")]
mod look {
    //! A byte, if it is in memory.

    use std::fs::File;
    use std::os::fd::AsRawFd;

    pub(super) fn cached(file: &File, offset: u64) -> bool {
        let mut byte = 0_u8;
        let piece = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        // The halves of the offset, of which a kernel of 64 bits takes the first as a whole and leaves the second.
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_possible_wrap,
            reason = "halves, where they are"
        )]
        let (low, high) = (offset as libc::c_long, (offset >> 32) as libc::c_long);
        // By number: C libraries before 2018 have no such function.
        // SAFETY: the descriptor is open as long as `file` lives; the kernel reads one entry and writes at most the
        // byte that it names.
        let read = unsafe {
            libc::syscall(
                libc::SYS_preadv2,
                file.as_raw_fd(),
                &raw const piece,
                1_usize,
                low,
                high,
                libc::RWF_NOWAIT,
            )
        };
        read == 1
    }
}

#[cfg(not(target_os = "linux"))]
mod look {
    //! No such call.

    use std::fs::File;

    pub(super) fn cached(_: &File, _: u64) -> bool {
        false
    }
}

#[cfg(target_os = "linux")]
mod count {
    //! `mincore`, a stretch of pages at a time; `cachestat` finds the stretches that it can skip.

    use std::fs::File;
    use std::io;
    use std::ops::Range;
    use std::os::fd::AsRawFd;

    use super::Residency;
    use crate::Error;
    use crate::page::{around, page_size};
    use crate::shard::Shard;

    /// Pages of one call, one byte each, so that no memory grows with the file.
    pub(super) const STRETCH: usize = 4096;

    /// Adds the pages of `shard` that hold `bytes`; what lies past the end is left out.
    pub(super) fn add(residency: &mut Residency, shard: &Shard, bytes: &Range<u64>) -> Result<(), Error> {
        let failed = |call, source| Error::System { path: shard.path().to_owned(), call, source };
        let map = shard.mapping()?;
        let page = page_size();
        let mut flags = [0_u8; STRETCH];
        let range = around(bytes, map.len(), page);
        for start in range.clone().step_by(STRETCH * page) {
            let pages = (range.end - start).div_ceil(page).min(STRETCH);
            residency.pages += pages as u64;
            // Of fewer pages, as batches have, `mincore` is as fast.
            if pages == STRETCH && matches!(cached(&*shard.file.file()?, start, pages * page), Ok(0)) {
                continue;
            }
            let address = map.as_mut_ptr().wrapping_add(start);
            // SAFETY: `start` is a multiple of the page size and so is the mapping's address. The `pages`
            // pages from there on belong to the mapping, which `map` keeps alive. The kernel writes one
            // byte a page, and `flags` has at least `pages` bytes. No byte of the mapping is touched.
            let status = unsafe { libc::mincore(address.cast(), pages * page, flags.as_mut_ptr()) };
            if status != 0 {
                return Err(failed("mincore", io::Error::last_os_error()));
            }
            // Only the lowest bit has a meaning; see mincore(2).
            residency.resident += flags[..pages].iter().map(|flag| u64::from(flag & 1)).sum::<u64>();
        }
        Ok(())
    }

    /// Pages of the cache that hold `len` bytes, at least one, of a file, in a time that grows with their number alone.
    ///
    /// 0 agrees with `mincore`, unless tmpfs has them in the swap cache. More is too many: it has those on their way
    /// from the disk, whose bytes cannot be read yet (`filemap_cachestat` in the kernel's `mm/filemap.c`,
    /// `mincore_page` in `mm/mincore.c`).
    fn cached(file: &File, start: usize, len: usize) -> io::Result<u64> {
        /// Of the same number wherever the kernel has it, but on MIPS, where that is the number of no call.
        const CACHESTAT: libc::c_long = 451;
        let range = [start as u64, len as u64];
        // Pages that are cached, dirty, being written, evicted, recently evicted: `include/uapi/linux/mman.h`.
        let mut found = [0_u64; 5];
        // By number: `libc` has no name for it.
        // SAFETY: the descriptor is open as long as `file` lives; the kernel reads two numbers of 64 bits and
        // writes five.
        let status =
            unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0_u32) };
        if status == 0 { Ok(found[0]) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(target_os = "linux")]
mod evict {
    //! The cache forgets a whole file, after it is clean.

    use super::uncache::uncache;
    use crate::Error;
    use crate::shard::Shard;

    pub(super) fn evict(shard: &Shard) -> Result<(), Error> {
        match shard.file.file()?.sync_all() {
            // Read-only file systems lack the call (squashfs, erofs, iso9660; `vfs_fsync_range` in
            // the kernel's `fs/sync.c`): there is nothing to write out.
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EROFS)) => {
                return Err(Error::System { path: shard.path().to_owned(), call: "fsync", source: error });
            }
            _ => {}
        }
        // A length of 0 is to the end of the file: posix_fadvise(2).
        uncache(shard, &(0..0))
    }
}

#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
mod uncache {
    //! `posix_fadvise`, which makes the cache forget clean pages that are mapped nowhere.

    use std::io;
    use std::ops::Range;
    use std::os::fd::AsRawFd;

    use crate::Error;
    use crate::shard::Shard;

    pub(super) fn uncache(shard: &Shard, bytes: &Range<u64>) -> Result<(), Error> {
        let failed = |source| Error::System { path: shard.path().to_owned(), call: "posix_fadvise", source };
        // On a 32-bit system an offset can be too large for the call; the mapping was refused then, too.
        let offset =
            |at: u64| libc::off_t::try_from(at).map_err(|_| failed(io::ErrorKind::FileTooLarge.into()));
        let (start, len) = (offset(bytes.start)?, offset(bytes.end - bytes.start)?);
        let file = shard.file.file()?;
        // SAFETY: the descriptor is open as long as `file` lives; the call takes no pointer.
        match unsafe { libc::posix_fadvise(file.as_raw_fd(), start, len, libc::POSIX_FADV_DONTNEED) } {
            0 => Ok(()),
            errno => Err(failed(io::Error::from_raw_os_error(errno))),
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
mod uncache {
    //! No `posix_fadvise` with an effect.

    use std::ops::Range;

    use crate::Error;
    use crate::shard::Shard;

    pub(super) fn uncache(_: &Shard, _: &Range<u64>) -> Result<(), Error> {
        Err(Error::Unsupported { call: "posix_fadvise" })
    }
}

#[cfg(not(target_os = "linux"))]
mod count {
    //! No `mincore` with Linux's meaning.

    use std::ops::Range;

    use super::Residency;
    use crate::Error;
    use crate::shard::Shard;

    pub(super) fn add(_: &mut Residency, _: &Shard, _: &Range<u64>) -> Result<(), Error> {
        Err(Error::Unsupported { call: "mincore" })
    }
}

#[cfg(not(target_os = "linux"))]
mod evict {
    //! No `posix_fadvise` with Linux's meaning.

    use crate::Error;
    use crate::shard::Shard;

    pub(super) fn evict(_: &Shard) -> Result<(), Error> {
        Err(Error::Unsupported { call: "posix_fadvise" })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::ops::Range;
    use std::os::unix::fs::FileExt;

    use super::Residency;
    use super::count::{STRETCH, add};
    use crate::Records;
    use crate::page::page_size;

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
        let count = |bytes: Range<usize>, at_once: usize| {
            let mut found = Residency::default();
            for start in bytes.clone().step_by(at_once) {
                let part = start as u64..start.saturating_add(at_once).min(bytes.end) as u64;
                add(&mut found, &records.shards()[0], &part).unwrap();
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
                let found = count(bytes.clone(), usize::MAX);
                let expected = count(pages.start * page..pages.end * page, page);
                (found == expected && found.resident >= least).then_some(found)
            });
            assert_eq!(found.map(|found| found.pages), Some(pages.len() as u64), "{bytes:?}");
        }
    }
}
