//! Systems other than Linux and Android: hints and direct I/O, where a system has them.
//!
//! - Windows: `PrefetchVirtualMemory`, `FILE_FLAG_NO_BUFFERING`.
//! - Other Unixes: `madvise` for hints, and nothing else.

use std::fs::File;
use std::io;
use std::ops::Range;

use super::Gathered;
use crate::file::{DataFile, read_at};
use crate::{Error, ReadStats};

/// Hints each piece with one call.
pub(crate) fn will_need<'f>(pieces: impl Iterator<Item = (&'f DataFile, Range<u64>)>, stats: &mut ReadStats) {
    for (file, bytes) in pieces {
        stats.hints += 1;
        match advise(file, &bytes) {
            Ok(()) => stats.hinted += bytes.end - bytes.start,
            Err(_) => stats.failed += 1,
        }
    }
}

/// Hints with `PrefetchVirtualMemory`. The file is mapped only during the call, because a file that stays mapped can be
/// neither truncated nor replaced.
#[cfg(windows)]
fn advise(data: &DataFile, bytes: &Range<u64>) -> io::Result<()> {
    use windows_sys::Win32::System::Memory::{PrefetchVirtualMemory, WIN32_MEMORY_RANGE_ENTRY};
    use windows_sys::Win32::System::Threading::GetCurrentProcess;
    let len = usize::try_from(bytes.end - bytes.start).map_err(|_| io::ErrorKind::FileTooLarge)?;
    let file = data.file().map_err(io::Error::other)?;
    let map = memmap2::MmapOptions::new().offset(bytes.start).len(len).map_raw_read_only(&*file)?;
    let range =
        WIN32_MEMORY_RANGE_ENTRY { VirtualAddress: map.as_mut_ptr().cast(), NumberOfBytes: map.len() };
    // SAFETY: takes nothing and returns a constant.
    let this = unsafe { GetCurrentProcess() };
    // SAFETY: the one range is in `map`, which is alive. The call changes no byte of it.
    match unsafe { PrefetchVirtualMemory(this, 1, &raw const range, 0) } {
        0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(not(windows))]
fn advise(file: &DataFile, bytes: &Range<u64>) -> io::Result<()> {
    let map = file.map.as_ref().map_err(io::Error::kind)?;
    // An offset that does not fit a usize is past the end of the mapping, because the mapping's length fits.
    let [start, end] =
        [bytes.start, bytes.end].map(|at| usize::try_from(at).unwrap_or(usize::MAX).min(map.len()));
    map.advise_range(memmap2::Advice::WillNeed, start, end - start)
}

/// Opens the file again, by its handle and not by its path: the path may name another file by now.
#[cfg(windows)]
pub(crate) fn reopen(data: &DataFile) -> Result<File, Error> {
    use std::os::windows::io::{AsRawHandle, FromRawHandle};
    use windows_sys::Win32::Foundation::{GENERIC_READ, INVALID_HANDLE_VALUE};
    use windows_sys::Win32::Storage::FileSystem::{
        FILE_FLAG_NO_BUFFERING, FILE_SHARE_DELETE, FILE_SHARE_READ, FILE_SHARE_WRITE, ReOpenFile,
    };
    let file = data.file()?;
    let share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    // SAFETY: the handle is open as long as `file` lives; the other arguments are numbers.
    let handle =
        unsafe { ReOpenFile(file.as_raw_handle().cast(), GENERIC_READ, share, FILE_FLAG_NO_BUFFERING) };
    if handle == INVALID_HANDLE_VALUE {
        return Err(data.failed("ReOpenFile", io::Error::last_os_error()));
    }
    // SAFETY: the system has just opened this handle for us, and nothing else owns it.
    Ok(unsafe { File::from_raw_handle(handle.cast()) })
}

#[cfg(not(windows))]
pub(crate) fn reopen(_: &DataFile) -> Result<File, Error> {
    Err(Error::Unsupported { call: "open(O_DIRECT)" })
}

/// Fails: these systems have no such call, or it has no effect, or it also drops what was not written out yet.
pub(crate) fn evict(_: &DataFile) -> Result<(), Error> {
    Err(Error::Unsupported { call: "posix_fadvise" })
}

/// Returns `None`: on these systems, no file system is known whose hints block, or whose files are always in memory, or
/// that counts disk reads.
pub(crate) const fn file_system(_: &File) -> Option<u64> {
    None
}

/// Returns `false`: on these systems, the crate has no read that does not wait for the disk.
pub(crate) const fn touch(_: &File, _: u64) -> bool {
    false
}

/// Copies nothing: on these systems, the crate has no call that copies from a mapping and raises no signal.
pub(crate) fn gather<'f>(
    _: impl Iterator<Item = (&'f DataFile, &'f Range<u64>, usize)>,
    _: &mut [u8],
) -> Gathered {
    Gathered::Unavailable
}

/// Returns 0: on these systems, the crate does not count the disk reads of a thread.
pub(crate) const fn read_from_disk() -> u64 {
    0
}

/// Fails: if these systems have a `mincore`, it counts the pages of a mapping and not those of the file (macOS), or has
/// another meaning (the BSDs).
pub(crate) fn count(_: &DataFile, _: &Range<u64>) -> Result<[u64; 2], Error> {
    Err(Error::Unsupported { call: "mincore" })
}

/// Returns `false`: no error with this meaning is known.
pub(crate) fn cannot_be_pinned(_: &io::Error) -> bool {
    false
}

/// Reads as `preadv` does, piece by piece. Stops at a short read, as at the end of the file, and at an error.
pub(crate) fn read(file: &File, start: u64, pieces: [&mut [u8]; 3]) -> io::Result<usize> {
    let mut done = 0;
    for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
        match read_at(file, piece, start + done as u64) {
            Ok(read) if read == piece.len() => done += read,
            Ok(read) => return Ok(done + read),
            // Return the bytes that were read. The next call meets the error again.
            Err(_) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
