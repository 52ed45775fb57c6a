//! System calls that differ between operating systems: prefetch hints, queries of the page cache, and direct I/O.
//!
//! Both files have the functions below. If a system lacks the call, `count`, `evict` and `reopen` return
//! [`Error::Unsupported`](crate::Error::Unsupported). The others do without, because reads work without them.

#[cfg_attr(any(target_os = "linux", target_os = "android"), path = "linux.rs")]
#[cfg_attr(not(any(target_os = "linux", target_os = "android")), path = "others.rs")]
mod this;

// Hints:
// - `will_need(pieces, stats)` hints pieces of files, and counts the hints.
// - `hints_wait(file)`: whether a hint for this file can block in its file system.
// - `touch(file, at)` reads the byte at `at` without waiting, so that the kernel reads ahead from
//   there. Returns `false`, and reads nothing, if the page of the byte before it is not in the
//   cache, or if the system has no such call.
pub(crate) use this::{hints_wait, touch, will_need};
// The page cache:
// - `count(file, bytes)` returns the number of pages that hold these bytes, and how many of them
//   are in the cache. Pages past the end of the mapping do not count.
// - `evict(file)` writes a file out, and asks the kernel to drop all of it from the cache.
// - `gather(pieces, out)` copies pieces of mappings to places in `out`. It raises no signal, whatever happens to the
//   files.
// - `read_from_disk()` returns how many bytes the disks have read for this thread, as far as the system counts them.
// - `counts_reads(file)`: whether it counts the reads of this file.
pub(crate) use this::{count, counts_reads, evict, gather, read_from_disk};
// Direct I/O:
// - `lives_in_memory(file)`: whether the file's bytes are always in memory, so that direct I/O would only copy them.
// - `reopen(data)` opens the file a second time, for direct I/O.
// - `read(file, start, pieces)` reads into the pieces, one after the other.
// - `too_small(error)`: whether the file's blocks are larger than the block size of the read.
// - `cannot_be_pinned(error)`: whether the caller's memory is of a kind that cannot be used for direct I/O.
pub(crate) use this::{cannot_be_pinned, lives_in_memory, read, reopen, too_small};

#[cfg(all(test, target_os = "linux"))]
pub(crate) use this::{STRETCH, cached};

/// The result of `gather`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gathered {
    /// All bytes are in their places.
    All,
    /// Some bytes are no longer in their file, or the kernel cannot write to their places.
    Fault,
    /// Nothing was copied: the system has no such call, or it cannot be used for these files, or it failed.
    Unavailable,
}

/// The most pieces in one call, which is the limit of Linux (`UIO_MAXIOV` in the kernel's `include/uapi/linux/uio.h`).
pub(crate) const PIECES: usize = 1024;
