//! Systems that this crate is compiled for but not run on: hints and direct I/O, where a system has them.
//!
//! - macOS and related systems: `F_RDADVISE` for hints, `F_NOCACHE` for direct I/O.
//! - FreeBSD: `posix_fadvise` for hints and for dropping pages, `O_DIRECT`.
//! - Windows: `PrefetchVirtualMemory`, `FILE_FLAG_NO_BUFFERING`.
//! - Other Unixes: `madvise` for hints, and nothing else.

use std::fs::File;
use std::io;
use std::ops::Range;

use super::{Asked, Gathered};
use crate::Error;
use crate::file::{DataFile, read_at};

/// Hints each piece with one call.
pub(crate) fn will_need<'f>(pieces: impl Iterator<Item = (&'f DataFile, Range<u64>)>, asked: &mut Asked) {
    for (file, bytes) in pieces {
        asked.calls += 1;
        match advise(file, &bytes) {
            Ok(()) => asked.bytes += bytes.end - bytes.start,
            Err(_) => asked.failed += 1,
        }
    }
}

/// Hints with `F_RDADVISE`, which does not wait (fcntl(2)).
#[cfg(target_vendor = "apple")]
fn advise(file: &DataFile, bytes: &Range<u64>) -> Result<(), Error> {
    use std::os::fd::AsRawFd;
    let failed = |source| file.failed("fcntl(F_RDADVISE)", source);
    let too_large = |_| failed(io::ErrorKind::FileTooLarge.into());
    let advice = libc::radvisory {
        ra_offset: bytes.start.try_into().map_err(too_large)?,
        ra_count: (bytes.end - bytes.start).try_into().map_err(too_large)?,
    };
    let file = file.file()?;
    // SAFETY: the descriptor is open as long as `file` lives; the kernel reads one `radvisory`.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_RDADVISE, &raw const advice) } {
        -1 => Err(failed(io::Error::last_os_error())),
        _ => Ok(()),
    }
}

/// Hints with `posix_fadvise`. A file system that does not support it (UFS) does nothing (`vop_stdadvise`).
#[cfg(target_os = "freebsd")]
fn advise(file: &DataFile, bytes: &Range<u64>) -> Result<(), Error> {
    fadvise(file, bytes, libc::POSIX_FADV_WILLNEED)
}

#[cfg(target_os = "freebsd")]
fn fadvise(data: &DataFile, bytes: &Range<u64>, advice: libc::c_int) -> Result<(), Error> {
    use std::os::fd::AsRawFd;
    let offset = |at: u64| {
        libc::off_t::try_from(at)
            .map_err(|_| data.failed("posix_fadvise", io::ErrorKind::FileTooLarge.into()))
    };
    let (start, len) = (offset(bytes.start)?, offset(bytes.end - bytes.start)?);
    let file = data.file()?;
    // SAFETY: the descriptor is open as long as `file` lives; the call takes no pointer.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), start, len, advice) } {
        0 => Ok(()),
        errno => Err(data.failed("posix_fadvise", io::Error::from_raw_os_error(errno))),
    }
}

/// Hints with `PrefetchVirtualMemory`. The file is mapped only during the call, because a file that stays mapped can be
/// neither truncated nor replaced.
#[cfg(windows)]
fn advise(data: &DataFile, bytes: &Range<u64>) -> Result<(), Error> {
    use windows_sys::Win32::System::Memory::{PrefetchVirtualMemory, WIN32_MEMORY_RANGE_ENTRY};
    use windows_sys::Win32::System::Threading::GetCurrentProcess;
    let failed = |source| data.failed("PrefetchVirtualMemory", source);
    let len =
        usize::try_from(bytes.end - bytes.start).map_err(|_| failed(io::ErrorKind::FileTooLarge.into()))?;
    let file = data.file()?;
    let map = memmap2::MmapOptions::new().offset(bytes.start).len(len).map_raw_read_only(&*file);
    let map = map.map_err(failed)?;
    let range =
        WIN32_MEMORY_RANGE_ENTRY { VirtualAddress: map.as_mut_ptr().cast(), NumberOfBytes: map.len() };
    // SAFETY: takes nothing and returns a constant.
    let this = unsafe { GetCurrentProcess() };
    // SAFETY: the one range is in `map`, which is alive. The call changes no byte of it.
    match unsafe { PrefetchVirtualMemory(this, 1, &raw const range, 0) } {
        0 => Err(failed(io::Error::last_os_error())),
        _ => Ok(()),
    }
}

#[cfg(not(any(target_vendor = "apple", target_os = "freebsd", windows)))]
fn advise(file: &DataFile, bytes: &Range<u64>) -> Result<(), Error> {
    let Ok(map) = &file.map else { return Err(Error::Unsupported { call: "mmap" }) };
    // An offset that does not fit a usize is past the end of the mapping, because the mapping's length fits.
    let [start, end] =
        [bytes.start, bytes.end].map(|at| usize::try_from(at).unwrap_or(usize::MAX).min(map.len()));
    let advised = map.advise_range(memmap2::Advice::WillNeed, start, end - start);
    advised.map_err(|source| file.failed("madvise", source))
}

/// Opens the file again, by its path. `F_NOCACHE` and `O_DIRECT` apply to an open file, and `/dev/fd` would only give
/// the one that is already open.
#[cfg(any(target_vendor = "apple", target_os = "freebsd"))]
pub(crate) fn reopen(data: &DataFile) -> Result<File, Error> {
    #[cfg(target_os = "freebsd")]
    return data.open_again(libc::O_DIRECT);
    #[cfg(target_vendor = "apple")]
    {
        use std::os::fd::AsRawFd;
        let file = data.open_again(0)?;
        // SAFETY: the descriptor is open as long as `file` lives; the call takes a number.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) } {
            -1 => Err(data.failed("fcntl(F_NOCACHE)", io::Error::last_os_error())),
            _ => Ok(file),
        }
    }
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

#[cfg(not(any(target_vendor = "apple", target_os = "freebsd", windows)))]
pub(crate) fn reopen(_: &DataFile) -> Result<File, Error> {
    Err(Error::Unsupported { call: "open(O_DIRECT)" })
}

/// Whether `error` means that a read was not aligned to the file's blocks. On FreeBSD, some file systems refuse such a
/// read, and others read through the cache. macOS accepts any read.
pub(crate) fn too_small(error: &io::Error) -> bool {
    #[cfg(target_os = "freebsd")]
    return error.raw_os_error() == Some(libc::EINVAL);
    #[cfg(windows)]
    return error
        .raw_os_error()
        .is_some_and(|code| code.cast_unsigned() == windows_sys::Win32::Foundation::ERROR_INVALID_PARAMETER);
    #[cfg(not(any(target_os = "freebsd", windows)))]
    {
        let _ = error;
        false
    }
}

/// Drops a file from the cache. Writes it out first, because dirty pages stay. A length of 0 means up to the end of the
/// file.
#[cfg(target_os = "freebsd")]
pub(crate) fn evict(data: &DataFile) -> Result<(), Error> {
    data.file()?.sync_all().map_err(|source| data.failed("fsync", source))?;
    fadvise(data, &(0..0), libc::POSIX_FADV_DONTNEED)
}

/// Fails: these systems have no such call, or it has no effect, or it also drops what was not written out yet.
#[cfg(not(target_os = "freebsd"))]
pub(crate) fn evict(_: &DataFile) -> Result<(), Error> {
    Err(Error::Unsupported { call: "posix_fadvise" })
}

/// Returns `false`: on these systems, no file system is known whose hints block.
pub(crate) const fn hints_wait(_: &File) -> bool {
    false
}

/// Returns `false`: these systems have no read that does not wait for the disk.
pub(crate) const fn touch(_: &File, _: u64) -> bool {
    false
}

/// Copies nothing: these systems have no call that copies from a mapping and raises no signal.
pub(crate) fn gather<'f>(
    _: impl Iterator<Item = (&'f DataFile, &'f Range<u64>, usize)>,
    _: &mut [u8],
) -> Gathered {
    Gathered::Unavailable
}

/// Returns `None`: these systems do not count the disk reads of a thread.
pub(crate) const fn read_from_disk() -> Option<u64> {
    None
}

/// Returns `false`, as [`read_from_disk`] counts nothing.
pub(crate) const fn counts_reads(_: &File) -> bool {
    false
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

/// Reads as `preadv` does, with one call for each piece. Stops after a piece that it cannot fill.
pub(crate) fn read(file: &File, start: u64, pieces: [&mut [u8]; 3]) -> io::Result<usize> {
    let mut done = 0;
    for piece in pieces {
        let mut filled = 0;
        while filled < piece.len() {
            match read_at(file, &mut piece[filled..], start + (done + filled) as u64) {
                Ok(0) => return Ok(done + filled),
                Ok(read) => filled += read,
                Err(error) if done + filled == 0 => return Err(error),
                // Return the bytes that were read. The next call meets the error again.
                Err(_) => return Ok(done + filled),
            }
        }
        done += filled;
    }
    Ok(done)
}
