//! Which pages are in the kernel's page cache, and how to drop them.

use crate::{BatchPlan, Error, ReadMode, Records};

/// What becomes of a batch's pages after use; see [`Records::evict_batch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Evict {
    /// They stay, in the cache and mapped: right if the data set fits in memory.
    #[default]
    Keep,
    /// They are unmapped, so that they no longer count as this process's memory, and stay in the cache.
    /// Without effect after [`ReadMode::Pread`](crate::ReadMode::Pread), which maps nothing.
    Unmap,
    /// They are unmapped and dropped from the cache: right if the data set is larger than memory, so that
    /// each page is used once an epoch and only pushes out what others still need.
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

impl Records {
    /// Counts the pages of all shards that are in the page cache, by `mincore(2)`: those that hold records or
    /// lie between them. Linux only.
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

    /// Whether a batch is probably in the page cache: the first bytes of up to 4 of its records, spread over it, all
    /// are. `false` if that cannot be told, and in [`ReadMode::Direct`], for which it does not matter.
    ///
    /// Unlike [`residency_of`](Self::residency_of) it takes a few microseconds, whatever the batch, and tells the
    /// truth also of files that belong to others: it reads a byte of each, if that needs no disk (`preadv2(2)` with
    /// `RWF_NOWAIT`, Linux 4.14). Of a batch of which half the pages are in the cache it says so in one case of 16, of
    /// nine in ten in two cases of three. What is not there the kernel may begin to read.
    #[must_use]
    pub fn seems_cached(&self, batch: &BatchPlan) -> bool {
        const LOOKS: u64 = 4;
        // To look at what is not there would bring it.
        if self.mode == ReadMode::Direct {
            return false;
        }
        let looks = batch.len().min(LOOKS);
        (0..looks).all(|i| {
            // In the middle of each part, not at its edge, where a neighbour may have been read.
            let part = batch.len() / looks;
            let place = part * i + part / 2;
            let record = batch.part(place..place + 1).and_then(|one| one.runs().next());
            let found = record.and_then(|run| self.locate(run.start));
            found.is_some_and(|at| look::cached(&self.shards()[at.shard].file.file, at.offset))
        })
    }

    /// Asks the kernel to drop the files of all shards, headers and all, from its cache, so that the next read
    /// is a cold one. Linux only.
    ///
    /// Each file is written out first (`fsync`), because `posix_fadvise(POSIX_FADV_DONTNEED)` drops clean
    /// pages only. Pages that another mapping has touched, here or in another process, stay; those that
    /// `Records` has mapped itself are unmapped before. File systems that live in memory (tmpfs) keep
    /// everything. [`residency`](Self::residency) tells what became of it.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses; [`Error::Unsupported`] on another operating system.
    pub fn evict(&self) -> Result<(), Error> {
        self.shards().iter().try_for_each(evict::evict)
    }

    /// Gives up the pages of a batch that has been used. It waits for nothing and writes nothing.
    ///
    /// [`Evict::Unmap`] is `madvise(MADV_DONTNEED)` and takes all pages that the batch touches, and 64 KiB
    /// before and after each run, which the kernel maps along with them. Views stay
    /// valid, and bring pages back when they touch them. On macOS and the BSDs the kernel may keep such pages
    /// mapped until it needs memory.
    ///
    /// [`Evict::Drop`] is that, and `posix_fadvise(POSIX_FADV_DONTNEED)`, which takes the pages that lie wholly
    /// within a run of the batch: a page that is shared with a neighbour stays, so records smaller than a page,
    /// shuffled one by one, all stay. So do pages that are dirty or mapped elsewhere, all of tmpfs, and large
    /// folios (of up to 2 MiB on x86-64, at multiples of their size) that reach out of the run
    /// (`find_lock_entries` in the kernel's `mm/filemap.c`).
    /// Linux, Android and FreeBSD; macOS and the other Unixes lack the call or give it no effect.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRecord`]; [`Error::System`] if the kernel refuses, as it does for pages locked by
    /// `mlockall(2)`; [`Error::Unsupported`] for what this operating system lacks. A failure leaves pages in
    /// memory and does no other harm. [`Evict::Keep`] does nothing and cannot fail, nor does anything in
    /// [`ReadMode::Direct`], which leaves no pages behind: what is in the cache is others'.
    pub fn evict_batch(&self, batch: &BatchPlan, evict: Evict) -> Result<(), Error> {
        if evict == Evict::Keep || self.mode == ReadMode::Direct {
            return Ok(());
        }
        for span in self.spans(batch) {
            let span = span?;
            unmap::unmap(span.shard, &span.bytes)?;
            if evict == Evict::Drop {
                uncache::uncache(span.shard, &span.bytes)?;
            }
        }
        Ok(())
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
    //! Nothing tells.

    use std::fs::File;

    pub(super) fn cached(_: &File, _: u64) -> bool {
        false
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
        let map = shard.mapping()?;
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
    //! The cache forgets a whole file, after it is clean.

    use super::uncache::uncache;
    use super::unmap::unmap;
    use crate::{Error, Shard};

    pub(super) fn evict(shard: &Shard) -> Result<(), Error> {
        match shard.file.file.sync_all() {
            // File systems that nobody writes to lack the call (squashfs, erofs, iso9660; `vfs_fsync_range` in
            // the kernel's `fs/sync.c`): there is nothing to write out.
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EROFS)) => {
                return Err(Error::System { path: shard.path().to_owned(), call: "fsync", source: error });
            }
            _ => {}
        }
        unmap(shard, &shard.bytes)?;
        // A length of 0 is to the end of the file: posix_fadvise(2).
        uncache(shard, &(0..0))
    }
}

#[cfg(unix)]
mod unmap {
    //! `madvise`, which takes pages out of the mapping and leaves the cache as it is.

    use std::ops::Range;

    use memmap2::UncheckedAdvice;

    use crate::page::{around, page_size};
    use crate::{Error, Shard};

    /// A fault maps its cached neighbours too, as far as this: `fault_around_bytes` in the kernel's
    /// `mm/memory.c`, unless somebody has set another.
    const AROUND: usize = 64 << 10;

    /// Unmaps the pages that hold `bytes`, and those that came with them. Without a mapping there is nothing
    /// to do.
    pub(super) fn unmap(shard: &Shard, bytes: &Range<u64>) -> Result<(), Error> {
        let Ok(map) = shard.mapping() else { return Ok(()) };
        let touched = around(bytes, map.len(), page_size());
        let start = touched.start.saturating_sub(AROUND);
        let range = start..touched.end.saturating_add(AROUND).min(map.len());
        // SAFETY: the mapping is shared and of a file that is never written through it, so a page touched
        // afterwards is the file's again: the contents of the memory do not change.
        unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) }
            .map_err(|source| Error::System { path: shard.path().to_owned(), call: "madvise", source })
    }
}

#[cfg(not(unix))]
mod unmap {
    //! Nothing is mapped here.

    use std::ops::Range;

    use crate::{Error, Shard};

    pub(super) fn unmap(_: &Shard, _: &Range<u64>) -> Result<(), Error> {
        Err(Error::Unsupported { call: "madvise" })
    }
}

#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
mod uncache {
    //! `posix_fadvise`, which makes the cache forget clean pages that are mapped nowhere.

    use std::io;
    use std::ops::Range;
    use std::os::fd::AsRawFd;

    use crate::{Error, Shard};

    pub(super) fn uncache(shard: &Shard, bytes: &Range<u64>) -> Result<(), Error> {
        let failed = |source| Error::System { path: shard.path().to_owned(), call: "posix_fadvise", source };
        // On a 32-bit system an offset can be too large for the call; the mapping was refused then, too.
        let offset =
            |at: u64| libc::off_t::try_from(at).map_err(|_| failed(io::ErrorKind::FileTooLarge.into()));
        let (start, len) = (offset(bytes.start)?, offset(bytes.end - bytes.start)?);
        let file = shard.file.file.as_raw_fd();
        // SAFETY: the descriptor is open as long as the shard lives; the call takes no pointer.
        match unsafe { libc::posix_fadvise(file, start, len, libc::POSIX_FADV_DONTNEED) } {
            0 => Ok(()),
            errno => Err(failed(io::Error::from_raw_os_error(errno))),
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
mod uncache {
    //! No `posix_fadvise` with an effect.

    use std::ops::Range;

    use crate::{Error, Shard};

    pub(super) fn uncache(_: &Shard, _: &Range<u64>) -> Result<(), Error> {
        Err(Error::Unsupported { call: "posix_fadvise" })
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
