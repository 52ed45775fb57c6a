//! What differs between operating systems, one file for each: page hints, what is in the cache, and reads past it.
//!
//! Each file has the same functions. What a system lacks is [`Error::Unsupported`](crate::Error::Unsupported), but for
//! hints: without them records are read all the same.

use std::ops::Range;

use crate::file::DataFile;

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod lacking;

#[cfg_attr(any(target_os = "linux", target_os = "android"), path = "linux.rs")]
#[cfg_attr(target_vendor = "apple", path = "apple.rs")]
#[cfg_attr(target_os = "freebsd", path = "freebsd.rs")]
#[cfg_attr(windows, path = "windows.rs")]
#[cfg_attr(
    not(any(
        target_os = "linux",
        target_os = "android",
        target_vendor = "apple",
        target_os = "freebsd",
        windows
    )),
    path = "other.rs"
)]
mod this;

/// `count(piece)` returns the pages that hold its bytes, and how many of them are in the cache; pages past the end are
/// left out.
pub(crate) use this::count;
/// `evict(piece)` writes its file out and drops all of it from the cache.
pub(crate) use this::evict;
/// `gather(pieces, out)` copies pieces of mappings to places in `out`; it raises no signal, whatever happens to the
/// files.
pub(crate) use this::gather;
/// `hints_wait(file)`: whether hints for this file can wait for its file system.
pub(crate) use this::hints_wait;
/// `in_large_pages(file, range)` requests the front of a range of whole pages, in larger pages than those of a hint. Returns
/// how many bytes it has requested; 0 if it cannot.
pub(crate) use this::in_large_pages;
/// `touch(file, at)` reads this byte without a wait. The kernel then reads ahead from there. Returns `false`, and reads
/// nothing, if the byte before it has not been requested, or if there is no such call.
pub(crate) use this::touch;
/// `will_need(pieces, asked)` hints pieces, at most [`PIECES`] of them, and counts them.
pub(crate) use this::will_need;
/// `reopen(data)` opens the same file for reads past the cache; `read(file, start, pieces)` fills the pieces one after
/// the other; `file_system(file)` is what files with the same blocks share; `too_small(error)`: whether the file's
/// blocks are larger than those that were asked for; `cannot_be_pinned(error)`: whether the caller's memory is of a kind
/// that takes no such reads.
pub(crate) use this::{cannot_be_pinned, file_system, read, reopen, too_small};
/// `read_from_disk()` returns what this thread has had read so far, if the system counts it; `counts_reads(file)`: whether
/// it does for this file.
pub(crate) use this::{counts_reads, read_from_disk};

#[cfg(all(test, target_os = "linux"))]
pub(crate) use this::{STRETCH, cached};

/// Bytes of one file.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) file: &'a DataFile,
    /// The mapping of the file, or why there is none.
    #[cfg(unix)]
    #[cfg_attr(
        any(target_vendor = "apple", target_os = "freebsd"),
        allow(dead_code, reason = "hints are for files there")
    )]
    pub(crate) map: &'a std::io::Result<memmap2::MmapRaw>,
    pub(crate) bytes: Range<u64>,
}

impl<'a> Piece<'a> {
    /// The mapping, or why there is none.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(crate) fn mapping(&self) -> Result<&'a memmap2::MmapRaw, crate::Error> {
        self.map.as_ref().map_err(|error| crate::Error::System {
            path: self.file.path.clone(),
            call: "mmap",
            // The reason is kept with the file and io::Error cannot be cloned: give its kind and words.
            source: std::io::Error::new(error.kind(), error.to_string()),
        })
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub(crate) const fn len(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }
}

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

/// Most pieces that one call of [`will_need`] gets: as many as Linux takes in one (`UIO_MAXIOV` in the kernel's
/// `include/uapi/linux/uio.h`).
pub(crate) const PIECES: usize = 1024;
