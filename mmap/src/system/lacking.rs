//! What the systems other than Linux lack, and what they do instead.

use std::fs::File;
use std::io;
use std::ops::Range;

use super::{Gathered, Piece};
use crate::Error;
use crate::file::read_at;

/// No file system is known whose hints wait.
pub(crate) const fn hints_wait(_: &File) -> bool {
    false
}

/// There is no read that does not wait for the disk.
pub(crate) const fn touch(_: &File, _: u64) -> bool {
    false
}

/// There is no way to choose the size of pages.
pub(crate) const fn in_large_pages(_: &File, _: &Range<u64>) -> u64 {
    0
}

/// No call copies without a signal.
pub(crate) fn gather(_: &[(Piece<'_>, usize)], _: &mut [u8]) -> Gathered {
    Gathered::Unavailable
}

/// Not counted for a thread.
pub(crate) const fn read_from_disk() -> Option<u64> {
    None
}

/// Same as [`read_from_disk`].
pub(crate) const fn counts_reads(_: &File) -> bool {
    false
}

/// Where there is a `mincore`, it does not count the pages of the file but those of a mapping (macOS), or means
/// something else (the BSDs).
pub(crate) fn count(_: &Piece<'_>) -> Result<[u64; 2], Error> {
    Err(Error::Unsupported { call: "mincore" })
}

/// There is no such call, it has no effect, or it also drops what was not written yet.
#[cfg(not(target_os = "freebsd"))]
pub(crate) fn evict(_: &Piece<'_>) -> Result<(), Error> {
    Err(Error::Unsupported { call: "posix_fadvise" })
}

/// No error is known that means it.
pub(crate) fn cannot_be_pinned(_: &io::Error) -> bool {
    false
}

/// Reads as `preadv` does: one call for each piece, up to the first that is not filled.
pub(crate) fn read(file: &File, start: u64, pieces: [&mut [u8]; 3]) -> io::Result<usize> {
    let mut done = 0;
    for piece in pieces {
        let mut filled = 0;
        while filled < piece.len() {
            match read_at(file, &mut piece[filled..], start + (done + filled) as u64) {
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
