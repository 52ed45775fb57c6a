//! Systems without a file of their own: `madvise` where there is one, and no more.

use std::fs::File;
use std::io;
use std::ops::Range;

use super::{Asked, Piece};
use crate::Error;
use crate::file::DataFile;

/// One call each.
#[cfg(unix)]
pub(crate) fn will_need(pieces: &[Piece<'_>], asked: &mut Asked) {
    for piece in pieces {
        let Ok(map) = &piece.map else { continue };
        // What is mapped has a length that fits.
        let at = |offset| usize::try_from(offset).unwrap_or(map.len()).min(map.len());
        let (start, end) = (at(piece.bytes.start), at(piece.bytes.end));
        asked.calls += 1;
        match map.advise_range(memmap2::Advice::WillNeed, start, end - start) {
            Ok(()) => asked.bytes += piece.len(),
            Err(_) => asked.failed += 1,
        }
    }
}

/// No such call.
#[cfg(not(unix))]
pub(crate) fn will_need(_: &[Piece<'_>], _: &mut Asked) {}

/// No call tells.
pub(crate) fn seems_there(_: &File, _: u64) -> bool {
    false
}

/// No `mincore` with Linux's meaning.
pub(crate) fn count(_: &Piece<'_>) -> Result<[u64; 2], Error> {
    Err(Error::Unsupported { call: "mincore" })
}

/// No such call, or one without an effect.
pub(crate) fn uncache(_: &DataFile, _: &Range<u64>) -> Result<(), Error> {
    Err(Error::Unsupported { call: "posix_fadvise" })
}

/// As [`uncache`].
pub(crate) fn evict(_: &DataFile) -> Result<(), Error> {
    Err(Error::Unsupported { call: "posix_fadvise" })
}

/// No such reads.
pub(crate) fn reopen(_: &DataFile) -> Result<File, Error> {
    Err(Error::Unsupported { call: "open(O_DIRECT)" })
}

/// Never called: nothing is opened.
pub(crate) fn file_system(_: &File) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Never called.
pub(crate) fn read(_: &File, _: u64, _: [&mut [u8]; 3]) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Never called.
pub(crate) fn too_small(_: &io::Error) -> bool {
    false
}

/// Never called.
pub(crate) fn cannot_be_pinned(_: &io::Error) -> bool {
    false
}
