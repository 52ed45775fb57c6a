//! macOS and its kin: `F_RDADVISE` for hints, `F_NOCACHE` for reads past the cache.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use super::Piece;
use crate::file::{DataFile, read_at};
use crate::shard::Shard;
use crate::{Error, HintStats, Residency};

/// One call each; `F_RDADVISE` does not wait (fcntl(2)).
pub(crate) fn will_need(pieces: &[Piece<'_>], hinted: &mut HintStats) {
    for piece in pieces {
        hinted.calls += 1;
        match advise(piece) {
            Ok(()) => hinted.bytes += piece.len(),
            Err(_) => hinted.failed += 1,
        }
    }
}

fn advise(piece: &Piece<'_>) -> Result<(), Error> {
    let file = piece.shard.file.file()?;
    let failed = |source| failed(&piece.shard.file, "fcntl(F_RDADVISE)", source);
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

/// No call tells.
pub(crate) fn seems_there(_: &File, _: u64) -> bool {
    false
}

/// `mincore` counts the pages of a mapping, not those of the file.
pub(crate) fn count(_: &mut Residency, _: &Shard, _: &Range<u64>) -> Result<(), Error> {
    Err(Error::Unsupported { call: "mincore" })
}

/// No call drops pages without the danger of dropping what was not written yet.
pub(crate) fn uncache(_: &Shard, _: &Range<u64>) -> Result<(), Error> {
    Err(Error::Unsupported { call: "posix_fadvise" })
}

/// As [`uncache`].
pub(crate) fn evict(_: &Shard) -> Result<(), Error> {
    Err(Error::Unsupported { call: "posix_fadvise" })
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

pub(crate) fn read(file: &File, start: u64, pieces: [&mut [u8]; 3]) -> io::Result<usize> {
    super::one_by_one(start, pieces, |out, offset| read_at(file, out, offset))
}

/// Reads of any place and length are taken; those that fit blocks avoid the cache.
pub(crate) fn too_small(_: &io::Error) -> bool {
    false
}

/// Not known of this system.
pub(crate) fn cannot_be_pinned(_: &io::Error) -> bool {
    false
}
