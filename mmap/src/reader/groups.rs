//! Reads groups of tensors, in the order that the caller chooses.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::direct::Direct;
use super::source::Source;
use super::stats::{ReadChoice, ReadStats};
use super::stream::{Stream, Wanted};
use crate::groups::{BLOCK, Run};
use crate::ranges::Stretch;
use crate::{Error, Groups, ReadMode, limit};

/// Memory for short reads past the page cache, ahead and now. Long ones go straight to their place: the caller's slots are
/// what is read ahead.
const LANES: [u64; 2] = [8 << 20, 2 << 20];

/// Reads groups of tensors into memory of the caller.
///
/// Create one reader per loop. A read of 4 MiB or more starts when the caller requests it: to read a group while another
/// is in use, read on another thread, as `twinbuf::stream` does. Shorter reads of the next groups start earlier if
/// [`begin`](Self::begin) has their order.
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
    window: Mutex<Window>,
}

/// The groups to come, as far as they have been asked for. Positions are bytes of groups, each at least a block, since [`GroupReader::begin`].
#[derive(Default)]
struct Window {
    groups: Option<Box<dyn Iterator<Item = usize> + Send>>,
    /// Where the window ends, and where the reading is.
    told: u64,
    used: u64,
    /// What the stream has no room for yet.
    pending: VecDeque<(Stretch, u64)>,
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
        Ok(Self { groups, source, choice, window: Mutex::default() })
    }

    /// Sets the groups to prefetch: those that will be read next, in this order. Replaces the groups of an earlier call.
    pub fn begin(&self, groups: impl IntoIterator<Item = usize, IntoIter: Send + 'static>) {
        let Some(stream) = &self.source.stream else { return };
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        stream.forget();
        *window = Window { groups: Some(Box::new(groups.into_iter())), ..Window::default() };
    }

    /// Asks for the short runs of a group of that many bytes, which is read now, and of the groups after it.
    fn advance(&self, bytes: usize) {
        let Some(stream) = &self.source.stream else { return };
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let Window { groups: Some(groups), told, used, pending } = &mut *window else { return };
        *used = used.saturating_add(cost(bytes));
        let until = used.saturating_add(stream.room());
        loop {
            stream.ask(pending, *used);
            if !pending.is_empty() || *told >= until {
                return;
            }
            let Some(group) = groups.next() else { return };
            *told = told.saturating_add(cost(self.groups.bytes(group)));
            let wanted = self.groups.runs(group).unwrap_or_default().iter().map(Wanted::from);
            let short =
                wanted.filter(|run| self.source.is_streamed(stream, self.groups.model().shards(), run));
            pending.extend(short.map(|run| (run.at, told.saturating_add(stream.room()))));
        }
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
        self.advance(bytes);
        let wanted = runs.iter().map(|run| Ok(Wanted::from(run)));
        let mut stats = ReadStats::default();
        let read = self.source.fill(self.groups.model().shards(), wanted, (out, 0), &mut stats);
        if read.is_ok() {
            stats.bytes = runs.iter().map(|run| run.bytes.end - run.bytes.start).sum();
        }
        self.source.count(stats);
        read.map(|()| bytes)
    }

    /// Fills `out` with bytes of a file, from `start` on: a tensor, or a part of one, by its [`ByteRange`](crate::ByteRange).
    /// Several threads may read at a time, and each has one read in flight.
    ///
    /// Past the page cache the disk writes to `out` from 4 MiB on. Bytes are moved by less than a block if `out` does not
    /// begin as far into a block of memory as `start` is into a block of the file.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); [`Error::NoSuchRecord`] if there is no such file.
    pub fn read_bytes(&self, file: usize, start: u64, out: &mut [u8]) -> Result<(), Error> {
        let shards = self.groups.model().shards();
        if file >= shards.len() {
            return Err(Error::NoSuchRecord { wanted: file as u64, found: shards.len() as u64 });
        }
        let bytes = start..start.saturating_add(out.len() as u64);
        let wanted = Wanted { at: Stretch { shard: file, own_end: bytes.end, bytes }, to: 0 };
        let mut stats = ReadStats { bytes: wanted.len(), ..ReadStats::default() };
        let read = self.source.fill(shards, std::iter::once(Ok(wanted)), (out, 0), &mut stats);
        self.source.count(stats);
        read
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

/// What a group takes of the window: at least a block, so the window has a bounded number of groups.
fn cost(bytes: usize) -> u64 {
    (bytes as u64).max(BLOCK as u64)
}

impl From<&Run> for Wanted {
    fn from(run: &Run) -> Self {
        let at = Stretch { shard: run.file, bytes: run.bytes.clone(), own_end: run.bytes.end };
        Self { at, to: run.to }
    }
}

impl fmt::Debug for GroupReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { groups, choice, .. } = self;
        f.debug_struct("GroupReader").field("groups", groups).field("choice", choice).finish_non_exhaustive()
    }
}
