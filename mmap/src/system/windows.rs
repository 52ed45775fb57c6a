//! Windows: `PrefetchVirtualMemory` for hints, `FILE_FLAG_NO_BUFFERING` for reads past the cache.

use std::fs::File;
use std::io;
use std::os::windows::io::{AsRawHandle, FromRawHandle};

use memmap2::{MmapOptions, MmapRaw};
use windows_sys::Win32::Foundation::{ERROR_INVALID_PARAMETER, GENERIC_READ, INVALID_HANDLE_VALUE};
use windows_sys::Win32::Storage::FileSystem::{
    FILE_FLAG_NO_BUFFERING, FILE_SHARE_DELETE, FILE_SHARE_READ, FILE_SHARE_WRITE, ReOpenFile,
};
use windows_sys::Win32::System::Memory::{PrefetchVirtualMemory, WIN32_MEMORY_RANGE_ENTRY};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

pub(crate) use super::lacking::{
    cannot_be_pinned, count, counts_reads, evict, gather, hints_wait, in_large_pages, read, read_from_disk,
    touch,
};
use super::{Asked, Piece};
use crate::Error;
use crate::file::DataFile;

/// One call for all pieces of a file. The file is mapped only during the call: a file that stays mapped can be
/// neither truncated nor replaced.
pub(crate) fn will_need(pieces: &[Piece<'_>], asked: &mut Asked) {
    for pieces in pieces.chunk_by(|a, b| std::ptr::eq(a.file, b.file)) {
        let Ok(map) = map(pieces) else { continue };
        asked.calls += 1;
        if prefetch(&map, pieces) {
            asked.bytes += pieces.iter().map(Piece::len).sum::<u64>();
        } else {
            asked.failed += pieces.len() as u64;
        }
    }
}

/// Maps the bytes from the first piece to the last. A file that was truncated cannot be mapped, and has no hints.
fn map(pieces: &[Piece<'_>]) -> Result<MmapRaw, Error> {
    let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return Err(Error::NoPaths) };
    let file = first.file.file()?;
    let failed = |source| Error::System { path: first.file.path.clone(), call: "mmap", source };
    let len = usize::try_from(last.bytes.end - first.bytes.start)
        .map_err(|_| failed(io::ErrorKind::FileTooLarge.into()))?;
    MmapOptions::new().offset(first.bytes.start).len(len).map_raw_read_only(&*file).map_err(failed)
}

fn prefetch(map: &MmapRaw, pieces: &[Piece<'_>]) -> bool {
    let Some(first) = pieces.first() else { return true };
    let within = |bytes: u64| usize::try_from(bytes).unwrap_or(0);
    let ranges: Vec<WIN32_MEMORY_RANGE_ENTRY> = pieces
        .iter()
        .map(|piece| WIN32_MEMORY_RANGE_ENTRY {
            VirtualAddress: map
                .as_mut_ptr()
                .wrapping_add(within(piece.bytes.start - first.bytes.start))
                .cast(),
            NumberOfBytes: within(piece.len()),
        })
        .collect();
    // SAFETY: takes nothing and returns a constant.
    let this = unsafe { GetCurrentProcess() };
    // SAFETY: the array is as long as given; its ranges are in `map`, `map` is alive, and no byte of it is changed.
    unsafe { PrefetchVirtualMemory(this, ranges.len(), ranges.as_ptr(), 0) != 0 }
}

/// By the handle, not by the path: the path may name another file by now.
pub(crate) fn reopen(data: &DataFile) -> Result<File, Error> {
    let file = data.file()?;
    let share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    // SAFETY: the handle is open as long as `file` lives; the others are numbers.
    let handle =
        unsafe { ReOpenFile(file.as_raw_handle().cast(), GENERIC_READ, share, FILE_FLAG_NO_BUFFERING) };
    if handle == INVALID_HANDLE_VALUE {
        let source = io::Error::last_os_error();
        return Err(Error::System { path: data.path.clone(), call: "ReOpenFile", source });
    }
    // SAFETY: the system has just opened it for us, and nothing else has it.
    Ok(unsafe { File::from_raw_handle(handle.cast()) })
}

/// All the same: each file is asked.
pub(crate) fn file_system(_: &File) -> io::Result<u64> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Not a multiple of the sector.
pub(crate) fn too_small(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| code.cast_unsigned() == ERROR_INVALID_PARAMETER)
}
