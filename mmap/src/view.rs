//! Records in place, without a copy.

use std::ops::Range;

use crate::Error;
use crate::records::Records;

impl Records {
    /// Returns the bytes of `records`, which must lie in one file, in place: nothing is copied, and pages that are not
    /// in memory are read when they are touched. Unix only.
    ///
    /// The slice runs from the first byte of the first record to the last byte of the last one, as in the file: bytes
    /// that overlapping windows share are read once, and so are the bytes in gaps between windows.
    ///
    /// # Safety
    ///
    /// While the slice lives, no process truncates the file or writes to it. A touch past the end of a truncated file
    /// raises SIGBUS; so does a disk that fails.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRecord`]; [`Error::AcrossFiles`] if the records do not lie in one file;
    /// [`Error::System`] if that file could not be mapped; [`Error::Unsupported`] on another operating system.
    pub unsafe fn view(&self, records: Range<u64>) -> Result<&[u8], Error> {
        let Some(span) = self.in_one_file(records)? else { return Ok(&[]) };
        // SAFETY: by this function's contract no process changes or truncates the file while the slice lives.
        unsafe { in_place::bytes(span.shard, &span.bytes) }
    }
}

#[cfg(unix)]
mod in_place {
    //! Slices of a mapping.

    use std::ops::Range;

    use crate::Error;
    use crate::shard::Shard;

    /// Bytes of the mapping, which must lie within the shard's.
    ///
    /// # Safety
    ///
    /// The file is neither written to nor truncated while the slice lives, and it contains all of `bytes`.
    pub(super) unsafe fn bytes<'a>(shard: &'a Shard, bytes: &Range<u64>) -> Result<&'a [u8], Error> {
        let map = shard.piece(0..0).mapping()?;
        // Within the mapping, whose length is a usize.
        let clamp = |offset| usize::try_from(offset).map_or(map.len(), |offset: usize| offset.min(map.len()));
        let (start, end) = (clamp(bytes.start), clamp(bytes.end));
        // SAFETY: `start` is no further than the end of the mapping, and both pointers lie in it.
        let first = unsafe { map.as_ptr().add(start) };
        // SAFETY: the bytes lie in a mapping that `shard` keeps alive, readable and no longer than isize::MAX.
        // By the contract above the file has them all and no process writes to them.
        Ok(unsafe { std::slice::from_raw_parts(first, end - start) })
    }
}

#[cfg(not(unix))]
mod in_place {
    //! Nothing is mapped here.

    use std::ops::Range;

    use crate::Error;
    use crate::shard::Shard;

    /// # Safety
    ///
    /// None needed; as on Unix.
    pub(super) unsafe fn bytes<'a>(_: &'a Shard, _: &Range<u64>) -> Result<&'a [u8], Error> {
        Err(Error::Unsupported { call: "mmap" })
    }
}
