//! One file of a data set.

use std::ops::Range;
use std::path::Path;

use crate::file::DataFile;
use crate::system::Piece;

/// One file of a data set.
#[derive(Debug)]
pub struct Shard {
    pub(crate) file: DataFile,
    /// From the start of the file to the end of its records. Only the kernel touches its bytes. An
    /// error if the system refused this mapping, or had no room for all of them.
    #[cfg(unix)]
    pub(crate) map: std::io::Result<memmap2::MmapRaw>,
    /// Hints for it could wait for its file system, and are left out.
    pub(crate) hints_wait: bool,
    pub(crate) at: Places,
    /// From the first byte of the first record to the last byte of the last.
    pub(crate) bytes: Range<u64>,
    pub(crate) first: u64,
    pub(crate) records: u64,
    /// Bytes of the files before this one, up to where their records end.
    pub(crate) before: u64,
}

impl Shard {
    /// Returns the path as it was passed to the open call.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Returns the range of record indices in this file.
    #[must_use]
    pub const fn records(&self) -> Range<u64> {
        self.first..self.first + self.records
    }

    /// Some of its bytes, as the system's calls take them.
    pub(crate) fn piece(&self, bytes: Range<u64>) -> Piece<'_> {
        Piece {
            file: &self.file,
            #[cfg(unix)]
            map: &self.map,
            bytes,
        }
    }
}

/// Where the records of one file are.
#[derive(Debug)]
pub(crate) enum Places {
    /// The first byte of the first record: the others follow at each stride.
    Strided(u64),
    /// Where each record begins, and last where the last one ends. They never decrease.
    Offsets(Vec<u64>),
}

/// Maps the first `bytes` bytes of a file without touching them.
#[cfg(unix)]
pub(crate) fn map(file: &std::fs::File, bytes: u64) -> std::io::Result<memmap2::MmapRaw> {
    // On a 32-bit system a file may be larger than the address space.
    let len = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::FileTooLarge)?;
    let map = memmap2::MmapOptions::new().len(len).map_raw_read_only(file)?;
    // What was not asked for is read page by page: around a page that is touched the kernel may read megabytes.
    let _ = map.advise(memmap2::Advice::Random);
    Ok(map)
}
