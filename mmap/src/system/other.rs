//! The other Unixes: `madvise` for hints, and no more.

use std::fs::File;
use std::io;

pub(crate) use super::lacking::{
    cannot_be_pinned, count, counts_reads, evict, gather, hints_wait, in_large_pages, read, read_from_disk,
    touch,
};
use super::{Asked, Piece};
use crate::Error;
use crate::file::DataFile;

/// One call each.
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

/// No such reads.
pub(crate) fn reopen(_: &DataFile) -> Result<File, Error> {
    Err(Error::Unsupported { call: "open(O_DIRECT)" })
}

/// Never called: nothing is opened.
pub(crate) fn file_system(_: &File) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Never called.
pub(crate) fn too_small(_: &io::Error) -> bool {
    false
}
