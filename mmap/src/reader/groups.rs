//! Reads groups of tensors, in the order that the caller chooses.

use std::fmt;

use super::direct::Direct;
use super::source::Source;
use super::stats::{ReadChoice, ReadStats};
use super::stream::{Stream, Wanted};
use crate::ranges::Stretch;
use crate::{Error, Groups, ReadMode, limit};

/// Memory for short reads past the page cache, ahead and now. Long ones go straight to their place, and nothing is read
/// ahead here: the caller's slots are.
const LANES: [u64; 2] = [1 << 20, 4 << 20];

/// Reads groups of tensors into memory of the caller.
///
/// Create one reader per loop. A read starts when the caller requests it, and covers a whole group. To read a group
/// while another is in use, read on another thread, as `twinbuf::stream` does.
///
/// ```
/// # fn f(model: &twinbuf_mmap::Tensors) -> Result<(), twinbuf_mmap::Error> {
/// use twinbuf_mmap::{Buffer, GroupReader, ReadMode};
///
/// let groups = model.groups([["embed.weight"], ["head.weight"]])?;
/// let mut memory = Buffer::new(groups.bytes(0).max(groups.bytes(1))).expect("memory");
/// let reader = GroupReader::new(groups, ReadMode::Auto, memory.len() as u64)?;
/// reader.read(0, &mut memory)?;
/// # Ok(())
/// # }
/// ```
pub struct GroupReader {
    groups: Groups,
    source: Source,
    choice: ReadChoice,
}

impl GroupReader {
    /// The maximum memory of a reader in bytes: its buffers for direct I/O.
    pub const MEMORY: u64 = LANES[0] + LANES[1];

    /// Creates a reader for `groups` and chooses how the files are read. `own` is the size in bytes of the caller's
    /// memory for the groups.
    ///
    /// With [`ReadMode::Auto`], the reader uses the page cache if all groups fit in the available memory after `own`
    /// bytes are taken. Otherwise it uses direct I/O for all groups.
    ///
    /// # Errors
    ///
    /// With [`ReadMode::Direct`], the errors of [`Reader::new`](crate::Reader::new): [`Error::Unsupported`],
    /// [`Error::System`] and [`Error::Replaced`].
    pub fn new(groups: Groups, mode: ReadMode, own: u64) -> Result<Self, Error> {
        Self::with_memory(groups, mode, own, limit::memory_left())
    }

    /// The same with `left` bytes of memory left.
    fn with_memory(groups: Groups, mode: ReadMode, own: u64, left: Option<u64>) -> Result<Self, Error> {
        let (data, shards) = (groups.data(), groups.model().shards());
        let fits =
            |left: u64| data.saturating_add(own.saturating_mul(limit::ranks_here())) <= left - left / 16;
        let past = match mode {
            ReadMode::Pread => false,
            ReadMode::Direct => true,
            ReadMode::Auto => left.is_some_and(|left| !fits(left)),
        };
        let files = if past { Direct::all(shards, mode)? } else { Vec::new() };
        let source = if files.is_empty() {
            Source::cached()
        } else {
            Source { cached: 0, stream: Some(Stream::new(files, LANES)), straight: true, ..Source::cached() }
        };
        let cached = if source.stream.is_some() { 0 } else { data };
        let choice = ReadChoice { data, cached, left: left.filter(|_| mode == ReadMode::Auto) };
        Ok(Self { groups, source, choice })
    }

    /// Reads a group into the start of `out`. Returns the size of the group in bytes, [`Groups::bytes`]. If `out`
    /// starts at a page boundary, as a [`Buffer`](crate::Buffer) does, direct I/O writes to it without a copy.
    ///
    /// # Errors
    ///
    /// - [`Error::NoSuchRecord`]: the index of the group is out of range.
    /// - [`Error::BufferTooSmall`]: `out` is smaller than the group. Nothing is read.
    /// - [`Error::Truncated`]: a file became shorter after it was opened.
    /// - [`Error::Read`]: a read failed.
    /// - [`Error::Replaced`], [`Error::NotFound`], [`Error::PermissionDenied`], [`Error::Open`]: a file that is not
    ///   kept open could not be reopened.
    ///
    /// After an error other than `NoSuchRecord` or `BufferTooSmall`, the contents of `out` are unspecified.
    pub fn read(&self, group: usize, out: &mut [u8]) -> Result<usize, Error> {
        let Some(runs) = self.groups.runs(group) else {
            return Err(Error::NoSuchRecord { wanted: group as u64, found: self.groups.len() as u64 });
        };
        let bytes = self.groups.bytes(group);
        let found = out.len() as u64;
        let out = out.get_mut(..bytes).ok_or(Error::BufferTooSmall { wanted: bytes as u64, found })?;
        let wanted = runs.iter().map(|run| {
            let at = Stretch { shard: run.file, bytes: run.bytes.clone(), own_end: run.bytes.end };
            Ok(Wanted { at, to: run.to })
        });
        let mut stats = ReadStats::default();
        let read = self.source.fill(self.groups.model().shards(), wanted, out, &mut stats);
        if read.is_ok() {
            stats.bytes = runs.iter().map(|run| run.bytes.end - run.bytes.start).sum();
        }
        self.source.count(stats);
        read.map(|()| bytes)
    }

    /// Returns the groups of the reader.
    #[must_use]
    pub const fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns statistics of the reads so far.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        self.source.stats()
    }

    /// Returns how the reader reads the files, and why.
    #[must_use]
    pub const fn choice(&self) -> ReadChoice {
        self.choice
    }
}

impl fmt::Debug for GroupReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { groups, choice, .. } = self;
        f.debug_struct("GroupReader").field("groups", groups).field("choice", choice).finish_non_exhaustive()
    }
}
