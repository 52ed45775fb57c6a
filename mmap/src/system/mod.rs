//! What differs between operating systems, one file for each: page hints, what is in the cache, and reads past it.
//!
//! Each file has the same functions. What a system lacks is [`Error::Unsupported`](crate::Error::Unsupported), but for
//! hints: without them records are read all the same.

use std::ops::Range;

use crate::shard::Shard;

#[cfg(target_vendor = "apple")]
mod apple;
#[cfg(target_os = "freebsd")]
mod freebsd;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux;
#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    target_vendor = "apple",
    target_os = "freebsd",
    windows
)))]
mod other;
#[cfg(windows)]
mod windows;

#[cfg(target_vendor = "apple")]
use apple as this;
#[cfg(target_os = "freebsd")]
use freebsd as this;
#[cfg(any(target_os = "linux", target_os = "android"))]
use linux as this;
#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    target_vendor = "apple",
    target_os = "freebsd",
    windows
)))]
use other as this;
#[cfg(windows)]
use windows as this;

/// `count(residency, shard, bytes)` adds the pages that hold `bytes`; what lies past the end is left out.
pub(crate) use this::count;
/// `seems_there(file, offset)`: whether a byte is in the cache; `false` if that is unknown.
pub(crate) use this::seems_there;
/// `will_need(pieces, stats)` hints pieces, at most [`PIECES`] of them, and counts them.
pub(crate) use this::will_need;
/// `uncache(shard, bytes)` drops clean pages; `evict(shard)` writes the file out first and drops all.
pub(crate) use this::{evict, uncache};
/// `reopen(data)` opens the same file for reads past the cache; `read(file, start, pieces)` fills the pieces one after
/// the other; `file_system(file)` is what files with the same blocks share; `too_small(error)`: whether the file's
/// blocks are larger than those that were asked for; `cannot_be_pinned(error)`: whether the caller's memory is of a kind
/// that takes no such reads.
pub(crate) use this::{cannot_be_pinned, file_system, read, reopen, too_small};

#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) use linux::hints_wait;

/// No system that is known.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) const fn hints_wait(_: &std::fs::File) -> bool {
    false
}

/// Bytes of one file, whole pages but at the end.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) bytes: Range<u64>,
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
impl Piece<'_> {
    pub(crate) const fn len(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }
}

/// Most pieces that one call of [`will_need`] gets: as many as Linux takes in one (`UIO_MAXIOV` in the kernel's
/// `include/uapi/linux/uio.h`).
pub(crate) const PIECES: usize = 1024;

/// Reads as `preadv` does, where there is none: one call for each piece, up to the first that is not filled.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn one_by_one(
    start: u64,
    pieces: [&mut [u8]; 3],
    read_at: impl Fn(&mut [u8], u64) -> std::io::Result<usize>,
) -> std::io::Result<usize> {
    let mut done = 0;
    for piece in pieces {
        let mut filled = 0;
        while filled < piece.len() {
            match read_at(&mut piece[filled..], start + (done + filled) as u64) {
                Ok(0) => return Ok(done + filled),
                Ok(read) => filled += read,
                Err(error) if done + filled == 0 => return Err(error),
                // What was read counts; the next call meets the error again.
                Err(_) => return Ok(done + filled),
            }
        }
        done += filled;
    }
    Ok(done)
}
