//! Direct I/O (`O_DIRECT`): the disk writes whole blocks to the caller's buffer, past the page cache.
//!
//! [`system`] has the system calls. The kernel may refuse such a read unless its offset, its length and its address are
//! multiples of the disk's block size. The incomplete blocks at both ends are therefore read into separate memory, the
//! bounce buffer. On Linux, one call (`preadv(2)`) does all of this. If the alignment puts the whole blocks too far
//! back in the caller's buffer, by less than a block, they are moved to their place afterwards.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::file::DataFile;
use crate::ranges::Shard;
use crate::{Error, ReadMode, system};

/// The smallest and the largest block size, in bytes. The block size is `queue/logical_block_size` of the disk on
/// Linux, or that of the file system.
const SMALLEST: usize = 512;
pub(super) const LARGEST: usize = 64 << 10;

/// A file that is opened for direct I/O.
pub(crate) struct Direct {
    /// The open file. `None`: each use opens it again.
    pub(super) file: Option<Arc<File>>,
    /// Offsets, lengths and addresses must be multiples of this power of two. A later read may find that the real block
    /// size is larger: a hole in a file is read without the disk, in blocks of any size. Relaxed: no other data depends
    /// on it, and an outdated value only costs one more call.
    pub(super) block: AtomicUsize,
}

/// Memory for the blocks that are not read into the caller's buffer: one before it, and at most two after it (see
/// [`Alignment::new`]).
#[derive(Default)]
pub(crate) struct BounceBuffer(Vec<u8>);

impl BounceBuffer {
    const BLOCKS: usize = 3;
    /// The most bytes of a read that goes through this buffer as a whole.
    const MOST: usize = 1 << 20;

    /// Returns `wanted` bytes, a multiple of `block`. Their address is a multiple of `block`, too.
    fn aligned(&mut self, wanted: usize, block: usize) -> &mut [u8] {
        // Allocate one block more than `wanted`, because the memory may start up to a block before a multiple of
        // `block`.
        self.0.resize(wanted + block, 0);
        let start = self.0.as_ptr().align_offset(block);
        &mut self.0[start..start + wanted]
    }
}

impl Direct {
    /// Opens the files of a data set for direct I/O. With [`ReadMode::Auto`], returns an empty list if that fails for a
    /// file, if a file is not kept open or is in memory anyway, or if hints for a file can block. This is no error,
    /// because the reader can use the page cache.
    pub(super) fn all(shards: &[Shard], mode: ReadMode) -> Result<Vec<Self>, Error> {
        let auto = mode == ReadMode::Auto;
        let on_disk = |file: &DataFile| file.kept.as_ref().is_some_and(|file| !system::lives_in_memory(file));
        if auto && !shards.iter().all(|shard| on_disk(&shard.file) && !shard.file.hints_wait) {
            return Ok(Vec::new());
        }
        // The block size of each file system, found once: it is the same for all of its files.
        let mut blocks = Vec::new();
        let open = |shard: &Shard| Self::open(&shard.file, &mut blocks);
        let files: Result<Vec<_>, _> = shards.iter().map(open).collect();
        if auto { Ok(files.unwrap_or_default()) } else { files }
    }

    /// Opens `data` a second time. `known` has the block size of each file system that was found so far.
    pub(crate) fn open(data: &DataFile, known: &mut Vec<(u64, usize)>) -> Result<Self, Error> {
        let file = system::reopen(data)?;
        // The number of the file system. Windows has none here, so each file is probed there.
        let system = cfg!(unix).then_some(data.id[0]);
        let block = match known.iter().find(|(known, _)| Some(*known) == system) {
            Some(&(_, block)) => block,
            None => {
                let block = probe(|block| system::read(&file, 0, [block, &mut [], &mut []]));
                let block = block.map_err(|source| data.failed("preadv(O_DIRECT)", source))?;
                known.extend(system.map(|system| (system, block)));
                block
            }
        };
        Ok(Self { file: data.kept.is_some().then(|| Arc::new(file)), block: block.into() })
    }

    /// Returns the block size: offsets, lengths and addresses must be multiples of it.
    pub(crate) fn block(&self) -> u64 {
        self.block.load(Relaxed) as u64
    }

    /// Returns whether `error` means that the block was too small. If so, it enlarges the block for the next read, up to
    /// the largest size.
    pub(crate) fn has_grown(&self, error: &io::Error) -> bool {
        if let Some(larger) = larger(self.block.load(Relaxed), error) {
            self.block.fetch_max(larger, Relaxed);
        }
        // `true` also at the largest size: another read may have enlarged the block after the failed read began.
        system::too_small(error)
    }

    /// Fills `out` with the bytes of a file from `start` on.
    pub(super) fn read_exact(&self, data: &DataFile, out: &mut [u8], start: u64) -> Result<(), Error> {
        let file = self.file.clone().map_or_else(|| system::reopen(data).map(Arc::new), Ok)?;
        let mut bounce = BounceBuffer::default();
        read_exact(data, out, start, self.block(), |out, at| {
            self.read_at(out, at, &mut bounce, |start, pieces| system::read(&file, start, pieces))
        })
    }

    /// Does one read, like `pread`. Returns the number of bytes, which is 0 at the end of the file.
    ///
    /// If the kernel cannot pin the pages of `out` (`EFAULT`), this function reads into the bounce buffer and copies.
    /// Page-locked memory that a device's driver allocated can be of that kind: the driver chooses how it maps such
    /// memory.
    ///
    /// `read` is the system call. It takes an offset in the file and the memory to fill.
    fn read_at(
        &self,
        out: &mut [u8],
        start: u64,
        bounce: &mut BounceBuffer,
        mut read: impl FnMut(u64, [&mut [u8]; 3]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        /// The most bytes of one read, below the kernel's limit of 2 GiB less a page (`MAX_RW_COUNT`).
        const MOST: usize = 1 << 30;
        let len = out.len().min(MOST);
        let out = &mut out[..len];
        loop {
            let block = self.block.load(Relaxed);
            let cut = Alignment::new(out.as_ptr().addr(), len, start, block);
            let blocks = bounce.aligned(BounceBuffer::BLOCKS * block, block);
            let (before, after) = blocks.split_at_mut(cut.before);
            let after = &mut after[..cut.after];
            match read(cut.file, [&mut *before, &mut out[cut.whole.clone()], &mut *after]) {
                Ok(read) => {
                    cut.settle(out, before, after);
                    return Ok(read.saturating_sub(cut.skip).min(len));
                }
                Err(error) if system::cannot_be_pinned(&error) && !cut.whole.is_empty() => {
                    let len = len.min(BounceBuffer::MOST);
                    let blocks = bounce.aligned((cut.skip + len).next_multiple_of(block), block);
                    let read = read(cut.file, [&mut *blocks, &mut [], &mut []])?;
                    let len = read.saturating_sub(cut.skip).min(len);
                    out[..len].copy_from_slice(&blocks[cut.skip..cut.skip + len]);
                    return Ok(len);
                }
                Err(error) => {
                    let larger = larger(block, &error).ok_or(error)?;
                    self.block.fetch_max(larger, Relaxed);
                }
            }
        }
    }
}

/// Fills `out` with the bytes of a file from `start` on, by calls of `read_at`. One bad block of
/// the disk may fail the whole read. If so, the bytes are read again in blocks of at least 4 KiB,
/// so that the error has the offset of the bad block.
fn read_exact(
    data: &DataFile,
    out: &mut [u8],
    start: u64,
    block: u64,
    mut read_at: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> Result<(), Error> {
    match data.read_exact_by(out, start, &mut read_at) {
        Err(Error::Read { .. }) => {}
        read => return read,
    }
    let (block, mut done) = (block.max(4096), 0);
    while done < out.len() {
        let at = start + done as u64;
        let len = usize::try_from(block - at % block).unwrap_or(usize::MAX).min(out.len() - done);
        data.read_exact_by(&mut out[done..done + len], at, &mut read_at)?;
        done += len;
    }
    Ok(())
}

/// How a read is divided at the block boundaries of the disk.
#[derive(Debug, PartialEq, Eq)]
struct Alignment {
    /// The offset in the file where the read starts, a multiple of the block size.
    file: u64,
    /// The number of bytes from `file` to the first wanted byte.
    skip: usize,
    /// Bytes that are read into the bounce buffer before `whole`: a block or none.
    before: usize,
    /// The part of the caller's buffer that the disk writes to: whole blocks, at an address that is a multiple of the
    /// block size.
    whole: Range<usize>,
    /// The index in the caller's buffer where the bytes of `whole` belong: its start, or less than a block before it.
    place: usize,
    /// Bytes that are read into the bounce buffer after `whole`: at most two blocks.
    after: usize,
}

impl Alignment {
    /// Divides a read of `len` bytes, at least one, from offset `start` of the file into memory at `address`.
    fn new(address: usize, len: usize, start: u64, block: usize) -> Self {
        // Blocks are powers of two, so the low bits of `start` suffice, even where a usize has 32 bits.
        #[expect(clippy::cast_possible_truncation, reason = "only the low bits count")]
        let skip = start as usize % block;
        let before = if skip == 0 { 0 } else { block };
        let place = before - skip;
        let first = place + (address + place).wrapping_neg() % block;
        // `after` is a multiple of the block, and less than three blocks. It has three parts, each of less than a block:
        // the bytes of `out` from `place` to `first`, those behind the range `whole`, and the rest of the file's last
        // block.
        let whole = len.saturating_sub(first) / block * block;
        let first = first.min(len);
        let read = (skip + len).next_multiple_of(block);
        let after = read - before - whole;
        Self { file: start - skip as u64, skip, before, whole: first..first + whole, place, after }
    }

    /// Moves the whole blocks to their place in `out`, and copies the other bytes from the bounce buffer.
    fn settle(&self, out: &mut [u8], before: &[u8], after: &[u8]) {
        out.copy_within(self.whole.clone(), self.place.min(self.whole.start));
        let (front, rest) = out.split_at_mut(self.place.min(out.len()));
        if let Some(before) = before.get(self.skip..) {
            front.copy_from_slice(&before[..front.len()]);
        }
        let rest = &mut rest[self.whole.len()..];
        rest.copy_from_slice(&after[..rest.len()]);
    }
}

/// Finds the smallest block size that `read` accepts.
fn probe(mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
    let mut block = SMALLEST;
    loop {
        // Read into memory at an odd multiple of `block`, so that a disk with larger blocks refuses the read.
        let mut bounce = BounceBuffer::default();
        let blocks = bounce.aligned(2 * block, 2 * block);
        match read(&mut blocks[block..2 * block]) {
            Ok(_) => return Ok(block),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // EIO: the disk accepted this block size and tried to read, but the block is damaged.
            #[cfg(unix)]
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok(block),
            Err(error) => block = larger(block, &error).ok_or(error)?,
        }
    }
}

/// Returns the next larger block, if `error` means that `block` is too small.
fn larger(block: usize, error: &io::Error) -> Option<usize> {
    (system::too_small(error) && block < LARGEST).then_some((2 * block).max(SMALLEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `file` as a disk with blocks of 8 bytes would: from whole blocks to whole blocks of memory.
    fn read(file: &[u8], cut: &Alignment, out: &mut [u8], address: usize) -> usize {
        assert_eq!(cut.file % 8, 0);
        assert!(cut.before % 8 == 0 && cut.after % 8 == 0 && cut.whole.len() % 8 == 0, "{cut:?}");
        assert!(cut.before + cut.after <= BounceBuffer::BLOCKS * 8, "{cut:?}");
        assert!(cut.whole.is_empty() || (address + cut.whole.start) % 8 == 0, "{cut:?}");
        let mut before = vec![0xEE; cut.before];
        let mut after = vec![0xEE; cut.after];
        let mut rest = &file[usize::try_from(cut.file).unwrap()..];
        let mut read = 0;
        for piece in [&mut before[..], &mut out[cut.whole.clone()], &mut after[..]] {
            let len = piece.len().min(rest.len());
            piece[..len].copy_from_slice(&rest[..len]);
            rest = &rest[len..];
            read += len;
        }
        cut.settle(out, &before, &after);
        read.saturating_sub(cut.skip).min(out.len())
    }

    /// Tries every offset, length and address, also across the end of the file.
    #[test]
    fn every_byte_comes_to_its_place() {
        let file: Vec<u8> = (1..=61).collect();
        for address in 64..72 {
            for start in 0..file.len() {
                for len in 1..=70 - start {
                    let cut = Alignment::new(address, len, start as u64, 8);
                    let mut out = vec![0xEE; len];
                    let read = read(&file, &cut, &mut out, address);
                    let expected = &file[start..file.len().min(start + len)];
                    assert_eq!(out[..read], *expected, "{address} {start} {len}: {cut:?}");
                    // All bytes but fewer than three blocks are read directly into the buffer, and moved by less than
                    // a block. Those of whole blocks stay where they are.
                    assert!(cut.whole.len() + 3 * 8 > len, "{cut:?}");
                    assert!(cut.whole.is_empty() || cut.whole.start - cut.place < 8, "{cut:?}");
                    let odd = [address, start, len].iter().any(|place| place % 8 > 0);
                    assert!(odd || cut.whole == (0..len), "{cut:?}");
                }
            }
        }
    }

    /// A block size that was found in a hole can be too small for data. 128 bytes are too small on every disk.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_block_that_is_too_small_grows() {
        use std::os::unix::fs::OpenOptionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let bytes: Vec<u8> = (0..=250).cycle().take(10_000).collect();
        std::fs::write(&path, &bytes).unwrap();
        // Write the data to the disk first: a file system could otherwise answer the read from memory.
        File::open(&path).unwrap().sync_all().unwrap();
        let file = match File::options().read(true).custom_flags(libc::O_DIRECT).open(&path) {
            Err(error) => return eprintln!("not checked: open(O_DIRECT): {error}"),
            file => file.unwrap(),
        };
        let direct = Direct { file: None, block: AtomicUsize::new(128) };
        for _ in 0..2 {
            let mut out = vec![0xEE; 9000];
            let read = |start, pieces: [&mut [u8]; 3]| system::read(&file, start, pieces);
            assert_eq!(direct.read_at(&mut out, 130, &mut BounceBuffer::default(), read).unwrap(), 9000);
            assert!(out == bytes[130..9130]);
        }
    }

    /// Memory that a device's driver has mapped can refuse direct I/O in this way.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_buffer_that_cannot_be_pinned_is_filled_by_a_copy() {
        let data: Vec<u8> = (0..=250).cycle().take(3 << 20).collect();
        let direct = Direct { file: None, block: AtomicUsize::new(512) };
        for (start, len) in [(0, 4096), (130, 9000), (700, (1 << 20) + 5000), ((3 << 20) - 1000, 2000)] {
            let mut out = vec![0xEE; len];
            let mut refused = 0;
            let read = direct.read_at(&mut out, start, &mut BounceBuffer::default(), |start, pieces| {
                let [first, theirs, last] = pieces;
                if !theirs.is_empty() {
                    refused += 1;
                    return Err(io::Error::from_raw_os_error(libc::EFAULT));
                }
                assert!(last.is_empty() && first.as_ptr().addr() % 512 == 0 && first.len() % 512 == 0);
                let from = &data[usize::try_from(start).unwrap()..];
                let len = first.len().min(from.len());
                first[..len].copy_from_slice(&from[..len]);
                Ok(len)
            });
            let start = usize::try_from(start).unwrap();
            let expected = len.min(1 << 20).min(data.len() - start);
            assert_eq!((read.unwrap(), refused), (expected, 1), "{start} {len}");
            assert!(out[..expected] == data[start..start + expected], "{start} {len}");
        }
        // If the kernel refuses this crate's own memory too, the read returns an error and does not loop.
        let refuse = |_, _: [&mut [u8]; 3]| Err(io::Error::from_raw_os_error(libc::EFAULT));
        let error = direct.read_at(&mut [0; 4096], 0, &mut BounceBuffer::default(), refuse).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }

    /// Some file systems (FUSE) let a signal interrupt a read.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_probe_that_is_interrupted_goes_on() {
        let mut asked = Vec::new();
        let block = probe(|block| {
            asked.push(block.len());
            match asked.len() {
                1 | 3 => Err(io::Error::from_raw_os_error(libc::EINTR)),
                2 => Err(io::Error::from_raw_os_error(libc::EINVAL)),
                _ => Ok(0),
            }
        });
        assert_eq!((block.unwrap(), asked), (1024, vec![512, 512, 1024, 1024]));
        let failed = probe(|_| Err(io::Error::from_raw_os_error(libc::EBADF)));
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert_eq!(probe(|_| Err(io::Error::from_raw_os_error(libc::EIO))).unwrap(), 512);
    }

    /// Some file systems fail the whole read if one block is bad. Others return the bytes before the bad block.
    #[cfg(unix)]
    #[test]
    fn a_bad_block_has_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let bytes: Vec<u8> = (0..=250).cycle().take(50_000).collect();
        std::fs::write(&path, &bytes).unwrap();
        let data = DataFile::open(&path).unwrap();
        let mut out = vec![0; 30_000];
        for bad in [3000, 8192, 20_000, 32_999] {
            let read = |out: &mut [u8], at: u64| {
                if (at..at + out.len() as u64).contains(&bad) {
                    return Err(io::Error::from_raw_os_error(libc::EIO));
                }
                crate::file::read_at(&data.file().unwrap(), out, at)
            };
            let Err(Error::Read { offset, .. }) = read_exact(&data, &mut out, 3000, 512, read) else {
                panic!("wanted an error")
            };
            assert_eq!(offset, (bad / 4096 * 4096).max(3000), "{bad}");
        }
        // A read that fails once and then succeeds is no error.
        let mut calls = 0;
        let read = |out: &mut [u8], at| {
            calls += 1;
            if calls == 1 {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            crate::file::read_at(&data.file().unwrap(), out, at)
        };
        read_exact(&data, &mut out, 3000, 512, read).unwrap();
        assert!(out == bytes[3000..33_000]);
    }
}
