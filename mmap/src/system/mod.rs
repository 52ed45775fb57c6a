//! System calls that differ between operating systems: prefetch hints, queries of the page cache, and direct I/O.
//!
//! Both files have the functions below. If a system lacks the call, `count`, `evict` and `reopen` return
//! [`Error::Unsupported`](crate::Error::Unsupported). The others do without, because reads work without them.

#[cfg_attr(any(target_os = "linux", target_os = "android"), path = "linux.rs")]
#[cfg_attr(not(any(target_os = "linux", target_os = "android")), path = "others.rs")]
mod this;

use std::fs::File;
use std::io;
use std::path::Path;

use this::file_system;

// Hints:
// - `will_need(pieces, stats)` hints pieces of files, and counts the hints.
// - `touch(file, at)` reads the byte at `at` without waiting, so that the kernel reads ahead from
//   there. Returns `false`, and reads nothing, if the page of the byte before it is not in the
//   cache, or if the system has no such call.
pub(crate) use this::{touch, will_need};
// The page cache:
// - `count(file, bytes)` returns the number of pages that hold these bytes, and how many of them
//   are in the cache. Pages past the end of the mapping do not count.
// - `evict(file)` writes a file out, and asks the kernel to drop all of it from the cache.
// - `gather(pieces, out)` copies pieces of mappings to places in `out`. It raises no signal, whatever happens to the
//   files.
// - `read_from_disk()` returns how many bytes the disks have read for this thread, as far as the system counts them.
pub(crate) use this::{count, evict, gather, read_from_disk};
// Direct I/O:
// - `reopen(data)` opens the file a second time, for direct I/O.
// - `read(file, start, pieces)` reads into the pieces, one after the other.
// - `cannot_be_pinned(error)`: whether the caller's memory is of a kind that cannot be used for direct I/O.
pub(crate) use this::{cannot_be_pinned, read, reopen};

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

// File systems by the kernel's numbers, most of them in its `include/uapi/linux/magic.h`. FUSE's is virtiofs's too.
const FUSE: u64 = 0x6573_5546;
const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58F6;
const EXT4: u64 = 0xEF53;
const XFS: u64 = 0x5846_5342;
const BTRFS: u64 = 0x9123_683E;

/// Whether hints for this file can block in its file system.
///
/// FUSE has at most `max_background` such requests in flight, 12 by default. Further requests wait until one is
/// answered (`fuse_get_req` in the kernel's `fs/fuse/dev.c`).
pub(crate) fn hints_wait(file: &File) -> bool {
    file_system(file) == Some(FUSE)
}

/// Whether the file's bytes are always in memory, so that direct I/O would only copy them.
pub(crate) fn lives_in_memory(file: &File) -> bool {
    matches!(file_system(file), Some(TMPFS | RAMFS))
}

/// Whether `read_from_disk` counts reads of this file. File systems on local disks count them; others may not.
pub(crate) fn counts_reads(file: &File) -> bool {
    // A kernel that was built without these counts (`CONFIG_TASK_IO_ACCOUNTING`) does not have this file.
    let counts = Path::new("/proc/self/io").exists();
    counts && matches!(file_system(file), Some(EXT4 | XFS | BTRFS | TMPFS))
}

/// Whether a direct read failed because it was not aligned to the file's blocks: `EINVAL` in open(2), and
/// `ERROR_INVALID_PARAMETER` on Windows.
pub(crate) fn too_small(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput
}
