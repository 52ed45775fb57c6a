//! What differs between operating systems: page hints, what is in the cache, and reads past it.
//!
//! Both files have the same functions. What a system lacks is [`Error::Unsupported`](crate::Error::Unsupported), but for
//! hints: without them records are read all the same.

#[cfg_attr(any(target_os = "linux", target_os = "android"), path = "linux.rs")]
#[cfg_attr(not(any(target_os = "linux", target_os = "android")), path = "others.rs")]
mod this;

// Hints: `will_need(pieces, asked)` hints pieces of files, and counts them; `hints_wait(file)`: whether hints for this file
// can wait for its file system; `touch(file, at)` reads this byte without a wait, so that the kernel reads ahead from
// there: it returns `false`, and reads nothing, if the byte before it has not been requested, or if there is no such call.
pub(crate) use this::{hints_wait, touch, will_need};
// The cache: `count(file, bytes)` returns the pages that hold these bytes, and how many of them are in the cache, without
// pages past the end; `evict(file)` writes a file out and drops all of it from the cache; `gather(pieces, out)` copies pieces
// of mappings to places in `out`, and raises no signal, whatever happens to the files; `read_from_disk()` returns how many
// bytes the system has read from disks for this thread, if it counts them; `counts_reads(file)`: whether it does for this
// file.
pub(crate) use this::{count, counts_reads, evict, gather, read_from_disk};
// Past the cache: `reopen(data)` opens the file once more, for such reads; `read(file, start, pieces)` fills the pieces one
// after the other; `file_system(file)` is a number that all files of one file system have in common, as they have the
// size of their blocks in common; `too_small(error)`: whether the file's blocks are larger than those that were asked
// for; `cannot_be_pinned(error)`: whether the caller's memory is of a kind that takes no such reads.
pub(crate) use this::{cannot_be_pinned, file_system, read, reopen, too_small};

#[cfg(all(test, target_os = "linux"))]
pub(crate) use this::{STRETCH, cached};

/// What became of copying out of mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gathered {
    /// All bytes are in their places.
    All,
    /// Some bytes are not in their file any more, or the kernel cannot write to their places.
    Fault,
    /// Nothing can be copied so.
    Unavailable,
}

/// What became of hints: calls made, bytes that were accepted, pieces that were refused.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    pub(crate) calls: u64,
    pub(crate) bytes: u64,
    pub(crate) failed: u64,
}

/// Most pieces of one call: as many as Linux takes (`UIO_MAXIOV` in the kernel's
/// `include/uapi/linux/uio.h`).
pub(crate) const PIECES: usize = 1024;
