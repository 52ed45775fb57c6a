//! FreeBSD: `posix_fadvise` for hints and for dropping pages, `O_DIRECT` for reads past the cache.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

pub(crate) use super::lacking::{
    cannot_be_pinned, count, counts_reads, gather, hints_wait, in_large_pages, read, read_from_disk, touch,
};
use super::{Asked, Piece};
use crate::Error;
use crate::file::DataFile;

/// One call each; file systems without a method for it (UFS) do nothing (`vop_stdadvise`).
pub(crate) fn will_need(pieces: &[Piece<'_>], asked: &mut Asked) {
    for piece in pieces {
        asked.calls += 1;
        match advise(piece.file, &piece.bytes, libc::POSIX_FADV_WILLNEED) {
            Ok(()) => asked.bytes += piece.len(),
            Err(_) => asked.failed += 1,
        }
    }
}

fn advise(data: &DataFile, bytes: &Range<u64>, advice: libc::c_int) -> Result<(), Error> {
    let failed = |source| Error::System { path: data.path.clone(), call: "posix_fadvise", source };
    let offset = |at: u64| libc::off_t::try_from(at).map_err(|_| failed(io::ErrorKind::FileTooLarge.into()));
    let (start, len) = (offset(bytes.start)?, offset(bytes.end - bytes.start)?);
    let file = data.file()?;
    // SAFETY: the descriptor is open as long as `file` lives; the call takes no pointer.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), start, len, advice) } {
        0 => Ok(()),
        errno => Err(failed(io::Error::from_raw_os_error(errno))),
    }
}

/// Written out first: dirty pages stay. A length of 0 is to the end of the file.
pub(crate) fn evict(piece: &Piece<'_>) -> Result<(), Error> {
    let data = piece.file;
    let sync = data.file()?.sync_all();
    sync.map_err(|source| Error::System { path: data.path.clone(), call: "fsync", source })?;
    advise(data, &(0..0), libc::POSIX_FADV_DONTNEED)
}

/// Opens it by its path: `/dev/fd` would give the same open file description.
pub(crate) fn reopen(data: &DataFile) -> Result<File, Error> {
    data.open_again(libc::O_DIRECT)
}

pub(crate) fn file_system(file: &File) -> io::Result<u64> {
    Ok(std::os::unix::fs::MetadataExt::dev(&file.metadata()?))
}

/// A read that does not fit the blocks is refused by some file systems and goes through the cache of others.
pub(crate) fn too_small(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}
