//! The systems that this crate is compiled for but not run on: hints and reads past the cache, where a system has them.
//!
//! - macOS and its kin: `F_RDADVISE` for hints, `F_NOCACHE` for reads past the cache.
//! - FreeBSD: `posix_fadvise` for hints and for dropping pages, `O_DIRECT`.
//! - Windows: `PrefetchVirtualMemory`, `FILE_FLAG_NO_BUFFERING`.
//! - Other Unixes: `madvise` for hints, and no more.

use std::fs::File;
use std::io;
use std::ops::Range;

use super::{Asked, Gathered};
use crate::Error;
use crate::file::{DataFile, read_at};

/// One call each.
pub(crate) fn will_need<'f>(pieces: impl Iterator<Item = (&'f DataFile, Range<u64>)>, asked: &mut Asked) {
    for (file, bytes) in pieces {
        asked.calls += 1;
        match advise(file, &bytes) {
            Ok(()) => asked.bytes += bytes.end - bytes.start,
            Err(_) => asked.failed += 1,
        }
    }
}

/// `F_RDADVISE` does not wait (fcntl(2)).
#[cfg(target_vendor = "apple")]
fn advise(file: &DataFile, bytes: &Range<u64>) -> Result<(), Error> {
    use std::os::fd::AsRawFd;
    let failed = |source| failed(file, "fcntl(F_RDADVISE)", source);
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

/// File systems without a method for it (UFS) do nothing (`vop_stdadvise`).
#[cfg(target_os = "freebsd")]
fn advise(file: &DataFile, bytes: &Range<u64>) -> Result<(), Error> {
    fadvise(file, bytes, libc::POSIX_FADV_WILLNEED)
}

#[cfg(target_os = "freebsd")]
fn fadvise(data: &DataFile, bytes: &Range<u64>, advice: libc::c_int) -> Result<(), Error> {
    use std::os::fd::AsRawFd;
    let offset = |at: u64| {
        libc::off_t::try_from(at)
            .map_err(|_| failed(data, "posix_fadvise", io::ErrorKind::FileTooLarge.into()))
    };
    let (start, len) = (offset(bytes.start)?, offset(bytes.end - bytes.start)?);
    let file = data.file()?;
    // SAFETY: the descriptor is open as long as `file` lives; the call takes no pointer.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), start, len, advice) } {
        0 => Ok(()),
        errno => Err(failed(data, "posix_fadvise", io::Error::from_raw_os_error(errno))),
    }
}

/// The file is mapped only during the call: a file that stays mapped can be neither truncated nor replaced.
#[cfg(windows)]
fn advise(data: &DataFile, bytes: &Range<u64>) -> Result<(), Error> {
    use windows_sys::Win32::System::Memory::{PrefetchVirtualMemory, WIN32_MEMORY_RANGE_ENTRY};
    use windows_sys::Win32::System::Threading::GetCurrentProcess;
    let failed = |source| failed(data, "PrefetchVirtualMemory", source);
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
    // An offset that does not fit a usize is behind the end of the mapping, whose length does.
    let [start, end] =
        [bytes.start, bytes.end].map(|at| usize::try_from(at).unwrap_or(usize::MAX).min(map.len()));
    let advised = map.advise_range(memmap2::Advice::WillNeed, start, end - start);
    advised.map_err(|source| failed(file, "madvise", source))
}

fn failed(data: &DataFile, call: &'static str, source: io::Error) -> Error {
    Error::System { path: data.path.clone(), call, source }
}

/// By its path: `F_NOCACHE` and `O_DIRECT` belong to the opening, and `/dev/fd` would only give the same one.
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
            -1 => Err(failed(data, "fcntl(F_NOCACHE)", io::Error::last_os_error())),
            _ => Ok(file),
        }
    }
}

/// By the handle, not by the path: the path may name another file by now.
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
        return Err(failed(data, "ReOpenFile", io::Error::last_os_error()));
    }
    // SAFETY: the system has just opened this handle for us, and nothing else owns it.
    Ok(unsafe { File::from_raw_handle(handle.cast()) })
}

#[cfg(not(any(target_vendor = "apple", target_os = "freebsd", windows)))]
pub(crate) fn reopen(_: &DataFile) -> Result<File, Error> {
    Err(Error::Unsupported { call: "open(O_DIRECT)" })
}

/// Windows: each file is asked.
pub(crate) fn file_system(file: &File) -> io::Result<u64> {
    #[cfg(unix)]
    return Ok(std::os::unix::fs::MetadataExt::dev(&file.metadata()?));
    #[cfg(not(unix))]
    Err(file.metadata().err().unwrap_or(io::ErrorKind::Unsupported.into()))
}

/// FreeBSD: some file systems refuse a read that does not fit the blocks, others send it through the cache. macOS takes
/// any.
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

/// Written out first: dirty pages stay. A length of 0 is to the end of the file.
#[cfg(target_os = "freebsd")]
pub(crate) fn evict(data: &DataFile) -> Result<(), Error> {
    data.file()?.sync_all().map_err(|source| failed(data, "fsync", source))?;
    fadvise(data, &(0..0), libc::POSIX_FADV_DONTNEED)
}

/// There is no such call, it has no effect, or it also drops what was not written yet.
#[cfg(not(target_os = "freebsd"))]
pub(crate) fn evict(_: &DataFile) -> Result<(), Error> {
    Err(Error::Unsupported { call: "posix_fadvise" })
}

/// No file system is known whose hints wait.
pub(crate) const fn hints_wait(_: &File) -> bool {
    false
}

/// There is no read that does not wait for the disk.
pub(crate) const fn touch(_: &File, _: u64) -> bool {
    false
}

/// No call copies without a signal.
pub(crate) fn gather<'f>(
    _: impl Iterator<Item = (&'f DataFile, &'f Range<u64>, usize)>,
    _: &mut [u8],
) -> Gathered {
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
pub(crate) fn count(_: &DataFile, _: &Range<u64>) -> Result<[u64; 2], Error> {
    Err(Error::Unsupported { call: "mincore" })
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
                // Return the bytes that were read. The next call meets the error again.
                Err(_) => return Ok(done + filled),
            }
        }
        done += filled;
    }
    Ok(done)
}
