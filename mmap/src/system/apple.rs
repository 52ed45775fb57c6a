//! macOS and its kin: `F_RDADVISE` for hints, `F_NOCACHE` for reads past the cache.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

pub(crate) use super::lacking::{
    cannot_be_pinned, count, counts_reads, evict, gather, hints_wait, in_large_pages, read, read_from_disk,
    touch,
};
use super::{Asked, Piece};
use crate::Error;
use crate::file::DataFile;

/// One call each; `F_RDADVISE` does not wait (fcntl(2)).
pub(crate) fn will_need(pieces: &[Piece<'_>], asked: &mut Asked) {
    for piece in pieces {
        asked.calls += 1;
        match advise(piece) {
            Ok(()) => asked.bytes += piece.len(),
            Err(_) => asked.failed += 1,
        }
    }
}

fn advise(piece: &Piece<'_>) -> Result<(), Error> {
    let file = piece.file.file()?;
    let failed = |source| failed(piece.file, "fcntl(F_RDADVISE)", source);
    let too_large = |_| failed(io::ErrorKind::FileTooLarge.into());
    let advice = libc::radvisory {
        ra_offset: piece.bytes.start.try_into().map_err(too_large)?,
        ra_count: piece.len().try_into().map_err(too_large)?,
    };
    // SAFETY: the descriptor is open as long as `file` lives; the kernel reads one `radvisory`.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_RDADVISE, &raw const advice) } {
        -1 => Err(failed(io::Error::last_os_error())),
        _ => Ok(()),
    }
}

/// Opens it by its path: `F_NOCACHE` belongs to the opening, and `/dev/fd` would only give the same one.
pub(crate) fn reopen(data: &DataFile) -> Result<File, Error> {
    let file = data.open_again(0)?;
    // SAFETY: the descriptor is open as long as `file` lives; the call takes a number.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) } {
        -1 => Err(failed(data, "fcntl(F_NOCACHE)", io::Error::last_os_error())),
        _ => Ok(file),
    }
}

fn failed(data: &DataFile, call: &'static str, source: io::Error) -> Error {
    Error::System { path: data.path.clone(), call, source }
}

pub(crate) fn file_system(file: &File) -> io::Result<u64> {
    Ok(std::os::unix::fs::MetadataExt::dev(&file.metadata()?))
}

/// Reads of any place and length are taken; those that fit blocks avoid the cache.
pub(crate) fn too_small(_: &io::Error) -> bool {
    false
}
