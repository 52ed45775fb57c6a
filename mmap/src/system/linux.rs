//! Linux and Android.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[cfg(target_os = "android")]
use libc::{off_t as Offset, posix_fadvise, preadv};
/// Offsets of 64 bits, also on 32-bit processors.
#[cfg(target_os = "linux")]
use libc::{off64_t as Offset, posix_fadvise64 as posix_fadvise, preadv64 as preadv};

use super::{FUSE, Gathered, PIECES};
use crate::buffer::{around, page_size, prefetch};
use crate::file::{DataFile, READ_CALLS};
use crate::{Error, ReadStats};

thread_local! {
    /// Lists of memory ranges for one system call, kept to be used again.
    static RANGES: RefCell<[Vec<libc::iovec>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// Hints pieces of files: up to [`PIECES`] of them with one call if the kernel permits that,
/// otherwise with one call for each. A piece starts at a page and has at most 1 MiB, so a call has
/// less than the kernel's limit of 2 GiB less a page (`MAX_RW_COUNT`).
pub(crate) fn will_need<'f>(pieces: impl Iterator<Item = (&'f DataFile, Range<u64>)>, stats: &mut ReadStats) {
    RANGES.with_borrow_mut(|[ranges, _]| {
        ranges.clear();
        for (file, piece) in pieces {
            if ranges.len() == PIECES {
                hint(ranges, stats);
            }
            ranges.extend(part(file, &piece));
        }
        hint(ranges, stats);
    });
}

/// Returns the part of a file's mapping that has these bytes, cut at the mapping's end. `None` if there is no mapping.
fn part(file: &DataFile, bytes: &Range<u64>) -> Option<libc::iovec> {
    let map = file.map.as_ref().ok()?;
    // An offset that does not fit a usize is past the end of the mapping, because the mapping's length fits.
    let at = |offset| usize::try_from(offset).unwrap_or(usize::MAX).min(map.len());
    let (start, iov_len) = (at(bytes.start), at(bytes.end) - at(bytes.start));
    Some(libc::iovec { iov_base: map.as_mut_ptr().wrapping_add(start).cast(), iov_len })
}

/// Hints `ranges`, and empties the list. The ranges are in mappings that exist.
fn hint(ranges: &mut Vec<libc::iovec>, stats: &mut ReadStats) {
    // The kernel stops at the first range that fails, and returns the number of bytes in the ranges before it.
    let mut taken = at_once(ranges);
    stats.hints += u64::from(taken > 0);
    for range in ranges.drain(..) {
        if let Some(rest) = taken.checked_sub(range.iov_len) {
            taken = rest;
            stats.hinted += range.iov_len as u64;
            continue;
        }
        taken = 0;
        stats.hints += 1;
        // SAFETY: the range is in a mapping that is alive, and this advice changes the contents of no memory.
        match unsafe { libc::madvise(range.iov_base, range.iov_len, libc::MADV_WILLNEED) } {
            0 => stats.hinted += range.iov_len as u64,
            _ => stats.failed += 1,
        }
    }
}

/// Reads the byte at `at` without waiting, and the byte before it, because the mark of the kernel's read-ahead may be
/// in its page. If that page is not in the cache, nothing is read: the kernel would take the read for a random one and
/// would not read ahead.
pub(crate) fn touch(file: &File, at: u64) -> bool {
    let Some(before) = at.checked_sub(1) else { return false };
    matches!(cached(file, before..at), Ok(1..)) && [before, at].iter().all(|&at| read_now(file, at))
}

/// Reads a byte without waiting: if its page is not complete, the call fails at once (`filemap_get_pages` in the
/// kernel's `mm/filemap.c`). Returns `false` after any other error, as if the kernel has no such call. The call is made
/// by its number, because old versions of libc have no name for it.
fn read_now(file: &File, at: u64) -> bool {
    let mut byte = 0_u8;
    let into = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // The kernel joins the two halves to the offset, whatever the size of a `long` (`pos_from_hilo` in
    // `fs/read_write.c`).
    #[allow(clippy::cast_possible_truncation, clippy::cast_lossless, reason = "the low half")]
    let [low, high] = [at, at >> 32].map(|half| half as libc::c_ulong);
    // SAFETY: the descriptor is open as long as `file` lives. The kernel reads one entry and writes one byte.
    let read = unsafe {
        let (file, flags) = (file.as_raw_fd(), libc::RWF_NOWAIT);
        libc::syscall(libc::SYS_preadv2, file, &raw const into, 1 as libc::c_ulong, low, high, flags)
    };
    read >= 0 || io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
}

/// Returns the kernel's number for the type of the file system.
#[allow(clippy::useless_conversion, clippy::unnecessary_fallible_conversions, reason = "types differ")]
pub(crate) fn file_system(file: &File) -> Option<u64> {
    // SAFETY: a `statfs` has only numbers, and all of them may be 0.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open as long as `file` lives; the kernel writes one `statfs`.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) } != 0 {
        return None;
    }
    u64::try_from(found.f_type).ok()
}

/// Hints `ranges` with one call. Returns the number of bytes that were hinted, from the first range on.
fn at_once(ranges: &[libc::iovec]) -> usize {
    /// Whether the kernel has refused this call. It is then not made again. Relaxed: no other data depends on it.
    static REFUSED: AtomicBool = AtomicBool::new(false);
    if ranges.len() < 2 || REFUSED.load(Relaxed) {
        return 0;
    }
    process_madvise(ranges).unwrap_or_else(|error| {
        if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL)) {
            REFUSED.store(true, Relaxed);
        }
        0
    })
}

/// Returns the number of bytes that were hinted, from the first range on.
fn process_madvise(ranges: &[libc::iovec]) -> io::Result<usize> {
    // Open the descriptor of this process anew for each call: after a fork, an old one would name the parent. The open
    // costs little in comparison. SAFETY: takes no pointer and cannot fail.
    let this = unsafe { libc::getpid() };
    // SAFETY: takes a process and flags, no pointer.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, this, 0) };
    let fd = i32::try_from(fd).ok().filter(|&fd| fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just opened this descriptor for us, and nothing else owns it.
    let process = unsafe { OwnedFd::from_raw_fd(fd) };
    let (fd, first, count) = (process.as_raw_fd(), ranges.as_ptr(), ranges.len());
    // SAFETY: the kernel reads the array, and the given length is the array's. Its ranges are in mappings that are
    // alive, and this advice changes the contents of no memory.
    let taken = unsafe { libc::syscall(libc::SYS_process_madvise, fd, first, count, libc::MADV_WILLNEED, 0) };
    usize::try_from(taken).map_err(|_| io::Error::last_os_error())
}

/// Copies pieces of mapped files to their places in `out`, which do not overlap, with one call.
///
/// It calls `process_vm_writev` on this process. The kernel reads the pieces as it reads any argument, so a missing
/// page ends the call and raises no SIGBUS. The call pins the pages of `out` once for each contiguous part of it.
pub(crate) fn gather<'f>(
    pieces: impl Iterator<Item = (&'f DataFile, &'f Range<u64>, usize)>,
    out: &mut [u8],
) -> Gathered {
    /// Whether the kernel has refused this call. It is then not made again. Relaxed: no other data depends on it.
    static REFUSED: AtomicBool = AtomicBool::new(false);
    /// Bytes at the front of each piece that are loaded into the processor's cache first. A batch of 2 KiB records then
    /// took 0.40 of the time of `pread`; without it 0.57, and with all bytes of the pieces 0.44.
    const FRONT: usize = 256;
    if REFUSED.load(Relaxed) {
        return Gathered::Unavailable;
    }
    RANGES.with_borrow_mut(|[from, into]| {
        from.clear();
        into.clear();
        let slot = out.as_mut_ptr();
        let mut wanted = 0;
        for (file, bytes, to) in pieces {
            let Some(piece) = part(file, bytes) else { return Gathered::Unavailable };
            let len = piece.iov_len;
            if to.checked_add(len).is_none_or(|end| end > out.len()) {
                return Gathered::Unavailable;
            }
            wanted += len;
            // Pieces are scattered: prefetch the front and the end of each, so that the kernel's copy waits less.
            prefetch(piece.iov_base.cast(), len.min(FRONT));
            prefetch(piece.iov_base.wrapping_byte_add(len).wrapping_byte_sub(64).cast(), 64);
            from.push(piece);
            let base = slot.wrapping_add(to).cast();
            match into.last_mut() {
                Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == base => last.iov_len += len,
                _ => into.push(libc::iovec { iov_base: base, iov_len: len }),
            }
        }
        // Callers give at most `PIECES` pieces.
        #[allow(clippy::cast_possible_truncation, clippy::cast_lossless, reason = "at most 1024")]
        let [places, slots] = [from.len(), into.len()].map(|count| count as libc::c_ulong);
        READ_CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: takes no pointer and cannot fail.
        let this = unsafe { libc::getpid() };
        // SAFETY: the kernel reads two arrays, as long as given. It reads through the ranges of the first; they are in
        // mappings that are alive. It writes to those of the second; they are in an exclusive borrow. It has finished when
        // the call returns.
        let copied = unsafe { libc::process_vm_writev(this, from.as_ptr(), places, into.as_ptr(), slots, 0) };
        let error = io::Error::last_os_error().raw_os_error();
        match usize::try_from(copied) {
            Ok(copied) if copied == wanted => Gathered::All,
            Ok(_) => Gathered::Fault,
            Err(_) if error == Some(libc::EFAULT) => Gathered::Fault,
            Err(_) => {
                if matches!(error, Some(libc::ENOSYS | libc::EPERM)) {
                    REFUSED.store(true, Relaxed);
                }
                Gathered::Unavailable
            }
        }
    })
}

/// Returns how many bytes the disks have read for this thread so far.
pub(crate) fn read_from_disk() -> u64 {
    /// By number, because `libc` has no name for it on Android: `include/uapi/linux/resource.h`.
    const RUSAGE_THREAD: libc::c_int = 1;
    // SAFETY: a `rusage` has only numbers, and all of them may be 0.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `rusage`. If the call fails, the numbers stay 0.
    unsafe { libc::getrusage(RUSAGE_THREAD, &raw mut usage) };
    // `ru_inblock` counts 512 bytes each (`task_io_get_inblock` in `include/linux/task_io_accounting_ops.h`).
    u64::try_from(usage.ru_inblock).map_or(0, |blocks| blocks * 512)
}

/// The most pages in one call of `mincore`, which returns one byte for each. The limit keeps memory independent of the
/// file's size.
pub(crate) const STRETCH: usize = 4096;

/// Counts pages with `mincore`, a stretch at a time. Skips full stretches in which `cachestat`
/// finds no page, unless the file system is stacked.
pub(crate) fn count(data: &DataFile, bytes: &Range<u64>) -> Result<[u64; 2], Error> {
    /// `OVERLAYFS_SUPER_MAGIC` in the kernel's `include/uapi/linux/magic.h`.
    const OVERLAYFS: u64 = 0x794C_7630;
    // `io::Error` cannot be cloned, and this one stays with the file: return its kind and text.
    let copy = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
    let map = data.map.as_ref().map_err(|error| data.failed("mmap", copy(error)))?;
    let [mut found, mut resident] = [0; 2];
    let page = page_size();
    let mut flags = [0_u8; STRETCH];
    let range = around(bytes, map.len() as u64, page as u64);
    // The range is within the mapping, so both ends fit a usize.
    let [start, end] = [range.start, range.end].map(|at| usize::try_from(at).unwrap_or(map.len()));
    // With overlayfs and FUSE's passthrough, cached pages may belong to a file of another file system. `mincore` finds such
    // pages, and `cachestat` does not.
    let stacked = || Ok(matches!(file_system(&*data.file()?), None | Some(OVERLAYFS | FUSE)));
    let skips = end.saturating_sub(start) >= STRETCH * page && !stacked()?;
    for start in (start..end).step_by(STRETCH * page) {
        let pages = (end - start).div_ceil(page).min(STRETCH);
        found += pages as u64;
        // Ask `cachestat` only about full stretches: for fewer pages, as of a batch, `mincore` is as fast.
        let stretch = start as u64..(start + pages * page) as u64;
        if skips && pages == STRETCH && matches!(cached(&*data.file()?, stretch), Ok(0)) {
            continue;
        }
        let address = map.as_mut_ptr().wrapping_add(start);
        // SAFETY: `start` is a multiple of the page size and so is the mapping's address. The `pages`
        // pages from there on belong to the mapping, which `map` keeps alive. The kernel writes one
        // byte a page, and `flags` has at least `pages` bytes. No byte of the mapping is touched.
        let status = unsafe { libc::mincore(address.cast(), pages * page, flags.as_mut_ptr().cast()) };
        if status != 0 {
            return Err(data.failed("mincore", io::Error::last_os_error()));
        }
        // Only the lowest bit has a meaning; see mincore(2).
        resident += flags[..pages].iter().map(|flag| u64::from(flag & 1)).sum::<u64>();
    }
    Ok([found, resident])
}

/// Returns how many pages of the cache hold these bytes of a file. There is at least one byte. The time depends only on
/// the number of pages found.
///
/// If the result is 0, `mincore` finds none either, unless the file system is stacked, or is tmpfs and has the pages in
/// the swap cache. A larger result may be too large: it includes pages that are still being read from the disk
/// (`filemap_cachestat` in the kernel's `mm/filemap.c`, `mincore_page` in `mm/mincore.c`).
pub(crate) fn cached(file: &File, bytes: Range<u64>) -> io::Result<u64> {
    /// The number is the same on all architectures of Rust's Linux targets, except on MIPS: there
    /// no call has this number.
    const CACHESTAT: libc::c_long = 451;
    let range = [bytes.start, bytes.end - bytes.start];
    // Numbers of pages: cached, dirty, being written, evicted, recently evicted (`include/uapi/linux/mman.h`).
    let mut found = [0_u64; 5];
    // `libc` has no function for this call.
    // SAFETY: the descriptor is open as long as `file` lives; the kernel reads two numbers of 64 bits and writes five.
    let status =
        unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0_u32) };
    if status == 0 { Ok(found[0]) } else { Err(io::Error::last_os_error()) }
}

/// Asks the kernel to drop a whole file from the page cache. Releases this mapping's pages and
/// writes out the file first, because the kernel keeps pages that are in use or dirty.
pub(crate) fn evict(data: &DataFile) -> Result<(), Error> {
    if let Ok(map) = &data.map {
        // SAFETY: no reference to the mapping's bytes exists, and what is read through it later comes from the file.
        let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }
    match data.file()?.sync_all() {
        // Read-only file systems (squashfs, erofs, iso9660) refuse the call (`vfs_fsync_range` in the kernel's
        // `fs/sync.c`). They have nothing to write out.
        Err(error) if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EROFS)) => {
            return Err(data.failed("fsync", error));
        }
        _ => {}
    }
    let file = data.file()?;
    // SAFETY: the descriptor is open as long as `file` lives; the call takes no pointer. A length of 0 means up to the
    // end of the file: posix_fadvise(2).
    match unsafe { posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        errno => Err(data.failed("posix_fadvise", io::Error::from_raw_os_error(errno))),
    }
}

/// Opens the same file again, for direct I/O.
pub(crate) fn reopen(data: &DataFile) -> Result<File, Error> {
    let file = data.file()?;
    // Open by the descriptor, not by the path: the path may name another file by now. `O_DIRECT` belongs to an open
    // file, so to set it on this descriptor would change the other reads too.
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT | libc::O_NONBLOCK)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(|source| data.failed("open(O_DIRECT)", source))
}

/// Reads from `start` on into three pieces of memory, one after the other.
pub(crate) fn read(file: &File, start: u64, pieces: [&mut [u8]; 3]) -> io::Result<usize> {
    let start = Offset::try_from(start).map_err(|_| io::ErrorKind::FileTooLarge)?;
    let pieces =
        pieces.map(|piece| libc::iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() });
    // SAFETY: the descriptor is open as long as `file` is alive. The kernel reads three entries and writes only to what
    // they name: parts of three exclusive borrows. It has finished when the call returns.
    let read = unsafe { preadv(file.as_raw_fd(), pieces.as_ptr(), 3, start) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// Whether `error` means that the kernel cannot pin the caller's pages.
pub(crate) fn cannot_be_pinned(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EFAULT)
}
