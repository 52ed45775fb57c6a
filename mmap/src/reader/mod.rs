//! Reads units (batches of records, or groups of tensors) and prefetches the next ones. All reads of units go through
//! this module.
//!
//! A [`Reader`] gets the list of the next units, and reads each unit on request. A unit ([`units`]) is a list of
//! extents in the order of the slot. [`ahead`] requests those of the next units, and [`source`] fills a slot with
//! extents. The front of the data set is read through the page cache ([`cached`]), and the rest with direct I/O
//! ([`stream`]). [`memory`] decides how large the front is, for all readers of the process together.

mod ahead;
pub(crate) mod cached;
pub(crate) mod direct;
mod memory;
pub(crate) mod queue;
mod ring;
mod source;
mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod units;

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use self::ahead::{Ahead, IN_MEMORY};
use self::cached::{Around, Copied};
use self::memory::{READERS, Readers, Share, Wish};
use self::source::{STRAIGHT, Source};
use self::stream::Stream;
use self::units::Units;
use crate::error::lock;
use crate::file::READ_CALLS;
use crate::ranges::{Ranges, Shard};
use crate::{BatchIndices, Error, Plan, ReadChoice, ReadStats, Records, limit, system};

/// The least prefetch window of batches, in bytes: how many bytes of the next batches the reader requests ahead. A
/// larger batch is the window. With batches of 4 MiB in shuffled chunks, every page was then in memory when it was
/// read. With a window of one batch, only half of the pages were.
const PREFETCH: u64 = 32 << 20;

/// How a [`Reader`](crate::Reader) reads files.
///
/// All modes return the same bytes, and none can raise SIGBUS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReadMode {
    /// Reads as much data through the page cache as fits in memory, and the rest with direct I/O.
    ///
    /// The reader takes the memory available when it is created (of the machine, or of a control group if that is less;
    /// the page cache counts as available) and leaves one sixteenth of it free. If the data of the plan fits in the
    /// rest, the reader uses the page cache for all of it. If not, it reserves buffers for direct I/O (up to 32 MiB,
    /// plus up to one and an eighth windows with [`Shuffle::Window`](crate::Shuffle::Window); up to 10 MiB for groups).
    /// It reads the first part of the data, as large as the remaining memory, through the page cache. Direct I/O leaves
    /// this part in the page cache, and later epochs read only the other part from disk. Ranks on one machine share
    /// these pages. So do the readers of a process: each counts on what the earlier ones leave, and bytes that two of
    /// them keep in the page cache count once.
    ///
    /// The kernel can reclaim page cache memory when programs need it. The next epoch then reads these pages from disk
    /// again. [`Reader::choice`](crate::Reader::choice) returns the choice. All data is read through the page cache if
    /// the available memory is unknown (as on systems other than Linux) or less than about 16 MiB for a rank, and if a
    /// file has no direct I/O, is in memory (tmpfs), is on FUSE or is reopened for each use.
    #[default]
    Auto,
    /// Reads through the page cache, with a system call for each contiguous run of records (`pread`
    /// on Unix, `seek_read` on Windows). On Linux, if the kernel permits it, four or more scattered runs of up to
    /// 4 KiB are copied from the mapping, many per call (`process_vm_writev`). Where the file system counts disk reads,
    /// so are longer runs once 32 MiB were found in the page cache without a gap: up to 16 KiB, and any into huge pages
    /// of the slot. Files on FUSE, reopened for each use or changed since they were opened are not copied from. The
    /// pages copied from count as resident memory of the process.
    Pread,
    /// Reads with direct I/O, past the page cache: `O_DIRECT` on Linux and Android, `FILE_FLAG_NO_BUFFERING` on
    /// Windows. On other systems it is an error.
    ///
    /// Up to 96 reads with up to 8 MiB in total are in flight, with `io_uring` if the kernel and the container allow it
    /// (Linux on x86-64 and aarch64), otherwise up to 32, with as many threads. They fill buffers of the reader
    /// ([`Reader::memory`](crate::Reader::memory)), and the reader copies batches from these buffers.
    ///
    /// Without [`Shuffle::Window`](crate::Shuffle::Window), a run of 4 MiB or more is read directly into the caller's
    /// buffer, on the thread that asks for it, except for up to three blocks at its ends. This is fastest with a
    /// [`Buffer`](crate::Buffer): bytes that are not aligned for the disk are moved. If the kernel cannot pin the memory,
    /// the run is copied. Do not call `fork` during such a read (NOTES in `open(2)`). Files that are reopened for each use
    /// (see [`Options::open`](crate::Options::open)) and files on FUSE are also read directly into the caller's buffer.
    ///
    /// If no thread uses the reader during a `fork`, it works in the child too, but waits for each
    /// read before it starts the next. Create a new reader in the child instead.
    ///
    /// The page cache is neither used nor filled: each epoch reads the records from the disk again. The reader opens
    /// each file a second time: through `/proc/self/fd` on Linux, through its handle on Windows. Files that are
    /// reopened for each use are opened twice at each use.
    Direct,
}

/// Bytes of memory for direct I/O: for prefetched data, and for data that is needed now but was not prefetched. Each is
/// twice what the disk has in flight.
const LANES: [u64; 2] = [16 << 20; 2];

/// Reads the batches of a plan, or groups of tensors, and prefetches the next ones.
///
/// [`new`](Reader::new) makes a reader of batches. With the feature `safetensors`, `Reader::of_groups` makes one of
/// groups; its units are the indices of the groups.
///
/// Create one reader per loop. The threads of the loop share it. The reader has all state that depends on the read
/// order: the prefetch window, the buffers for direct I/O, and the counters. [`Ranges`] has no such state, and any
/// number of readers can use the same files independently. The readers of a process share its memory: see
/// [`ReadMode::Auto`].
///
/// A drop waits up to 0.5 s for direct reads in flight. After that a thread waits for them, with their memory and their
/// files. If the system starts no thread, the drop waits for all of them.
///
/// # Examples
///
/// ```
/// use twinbuf_mmap::{Plan, ReadMode, Reader, Records, Shuffle};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("data");
/// # std::fs::write(&path, vec![7; 1000 * 8])?;
/// let records = Records::open([path], 8)?;
/// let plan = Plan::builder(records.len()).batch(100).shuffle(Shuffle::Full).build()?;
/// let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto)?;
/// let batches: Vec<_> = (0..plan.steps(0)).filter_map(|step| plan.batch(0, step)).collect();
///
/// reader.begin(batches.clone().into_iter());
/// let mut slot = vec![0; 100 * 8];
/// for batch in batches {
///     reader.read(&batch, &mut slot)?;
///     assert!(slot.iter().all(|&byte| byte == 7));
/// }
/// assert_eq!(reader.stats().bytes, 8000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Reader<D: Units = Arc<Ranges>> {
    data: D,
    source: Source,
    /// How it reads. Has the claim on memory, for as long as the reader lives.
    share: Share,
    ahead: Ahead<D>,
    /// The last epoch in which all files were checked, and the index of a file that had changed by then.
    checked: Mutex<Option<(u64, Option<usize>)>>,
}

impl Reader {
    /// Creates a reader for batches of `plan`. The plan's records, shuffle, batch size and number of
    /// ranks affect how the files are read.
    ///
    /// # Errors
    ///
    /// With [`ReadMode::Direct`]:
    ///
    /// - [`Error::Unsupported`]: the operating system has no direct I/O.
    /// - [`Error::System`]: the kernel or the file system refuses direct I/O, or opening a file a second time fails.
    /// - [`Error::Replaced`] and the other errors of [`Ranges::read`] for a file that is not kept open.
    pub fn new(ranges: Arc<Ranges>, plan: &Plan, mode: ReadMode) -> Result<Self, Error> {
        Self::with_memory(ranges, plan, mode, (&READERS, limit::memory_left()))
    }

    /// Creates a reader. `memory` has the readers that share memory with it, and the bytes that are left to all of
    /// them.
    fn with_memory(
        ranges: Arc<Ranges>,
        plan: &Plan,
        mode: ReadMode,
        memory: (&Readers, Option<u64>),
    ) -> Result<Self, Error> {
        let place = |record: u64| {
            let at = ranges.locate(record.min(ranges.len() - 1))?;
            let start = ranges.shards()[at.shard].before.saturating_add(at.offset);
            Some(start..start.saturating_add(at.len))
        };
        let range = plan.list().range();
        let first = place(range.start).unwrap_or_default();
        let part = first.start..place(range.end.saturating_sub(1)).unwrap_or(first).end;
        let data = part.end - part.start;
        let (chunk, chunks) = plan.shuffle().window();
        let window = chunk.saturating_mul(chunks).saturating_mul(ranges.stride()).min(data);
        let wish = Wish { mode, shards: ranges.shards(), part, data, window, own: 0, lanes: LANES };
        let share = memory.0.decide(&wish, memory.1)?;
        let batch = plan.batch_records().saturating_mul(ranges.mean_len());
        let mut ahead = Ahead::new(batch.max(PREFETCH), 0, share.windows);
        // The second argument of `pays`: the reader reads one in that many records in an epoch. Other ranks read the
        // rest, or the plan's list leaves it out.
        let left_out = (range.end - range.start) / plan.list().len().max(1);
        ahead.stretches = Around::pays(ranges.stride(), plan.world().saturating_mul(left_out.max(1)));
        // Chunks of a window are requested as a whole, and all of their records are taken from the stream.
        let least = if window > 0 { u64::MAX } else { STRAIGHT };
        Ok(Self::with_share(ranges, share, (mode == ReadMode::Direct).then_some(least), ahead))
    }

    /// Returns the files and byte ranges that this reader reads.
    #[must_use]
    pub const fn ranges(&self) -> &Arc<Ranges> {
        &self.data
    }
}

#[cfg(feature = "safetensors")]
impl Reader<crate::Groups> {
    /// Bytes of memory for short direct reads: for prefetched data, and for data that is needed now but was not
    /// prefetched. Long reads need none, because they go directly to the caller's memory.
    const LANES: [u64; 2] = [8 << 20, 2 << 20];

    /// The maximum of [`memory`](Self::memory) for a reader of groups, in bytes.
    pub const MEMORY: u64 = Self::LANES[0] + Self::LANES[1];

    /// Creates a reader for groups of tensors and chooses how the files are read. `own` is the size in bytes of the
    /// caller's memory for the groups: with [`ReadMode::Auto`], the page cache gets what is left.
    ///
    /// A read of 4 MiB or more past the page cache starts when the caller requests it: to read a group while another is
    /// in use, read on another thread, as `twinbuf::stream` does. Shorter reads of the next groups can start earlier if
    /// [`begin`](Self::begin) has their order.
    ///
    /// ```
    /// # fn f(model: &twinbuf_mmap::Tensors) -> Result<(), twinbuf_mmap::Error> {
    /// use twinbuf_mmap::{Buffer, ReadMode, Reader};
    ///
    /// let groups = model.groups([["embed.weight"], ["head.weight"]])?;
    /// let mut memory = Buffer::new(groups.bytes(0).max(groups.bytes(1))).expect("memory");
    /// let reader = Reader::of_groups(groups, ReadMode::Auto, memory.len() as u64)?;
    /// reader.read(&0, &mut memory)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// With [`ReadMode::Direct`], the errors of [`Reader::new`].
    pub fn of_groups(groups: crate::Groups, mode: ReadMode, own: u64) -> Result<Self, Error> {
        Self::of_groups_with(groups, mode, own, (&READERS, limit::memory_left()))
    }

    /// Creates a reader. `memory` has the readers that share memory with it, and the bytes that are left to all of
    /// them.
    fn of_groups_with(
        groups: crate::Groups,
        mode: ReadMode,
        own: u64,
        memory: (&Readers, Option<u64>),
    ) -> Result<Self, Error> {
        let shards = groups.model().shards();
        let end = shards.last().map_or(0, |shard| shard.before.saturating_add(shard.bytes.end));
        let (part, data, lanes) = (0..end, groups.data(), Self::LANES);
        let wish = Wish { mode, shards, part, data, window: 0, own, lanes };
        let share = memory.0.decide(&wish, memory.1)?;
        let ahead = Ahead::new(lanes[0], lanes[0], share.windows);
        Ok(Self::with_share(groups, share, Some(STRAIGHT), ahead))
    }

    /// Fills `out` with bytes of a file, from `start` on: a tensor, or a part of one, by its
    /// [`ByteRange`](crate::ByteRange). Several threads may read at a time.
    ///
    /// Past the page cache, 4 MiB or more are read directly into `out`, except for up to three
    /// blocks at the ends. Bytes are moved by less than a block if `out` does not begin as far into
    /// a block of memory as `start` is into a block of the file. If the kernel cannot pin `out`, the bytes are copied.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRecord`] if there is no such file; [`Error::Truncated`], [`Error::Read`], and, for a file that is
    /// not kept open, [`Error::System`] and the errors of reopening it, as for [`Ranges::read`]. It does not check
    /// whether a file that is kept open was written to. After an error, the contents of `out` are unspecified.
    pub fn read_bytes(&self, file: usize, start: u64, out: &mut [u8]) -> Result<(), Error> {
        let shards = self.groups().model().shards();
        if file >= shards.len() {
            return Err(Error::NoSuchRecord { wanted: file as u64, found: shards.len() as u64 });
        }
        // No file is that long: these bytes are missing too. The system calls take offsets below 2^63.
        let start = start.min(1 << 62);
        let extent = crate::ranges::Extent::new(file, start..start + out.len() as u64, 0);
        let bytes = extent.len();
        let mut stats = ReadStats::default();
        let read = self.source.fill(shards, std::iter::once(Ok(extent)), bytes, out, &mut stats).map(drop);
        *lock(&self.source.stats) += ReadStats { bytes: read.as_ref().map_or(0, |()| bytes), ..stats };
        read
    }

    /// Returns the groups of the reader.
    #[must_use]
    pub const fn groups(&self) -> &crate::Groups {
        &self.data
    }
}

impl<D: Units> Reader<D> {
    /// Creates a reader for `data`. `straight`: see [`Source`].
    fn with_share(data: D, mut share: Share, straight: Option<u64>, ahead: Ahead<D>) -> Self {
        let files = std::mem::take(&mut share.files);
        let stream = (!files.is_empty()).then(|| Stream::new(files, share.room));
        let counts = |shard: &Shard| shard.file.file().is_ok_and(|file| system::counts_reads(&file));
        // Check only the first file: usually all files are on one file system.
        let copied = Copied::new(data.shards().first().is_some_and(counts));
        Self {
            data,
            source: Source { cached: share.until, stream, straight, copied, ..Source::default() },
            share,
            ahead,
            checked: Mutex::default(),
        }
    }

    /// Sets the list of the next units, in read order, and discards the previous list. The reader prefetches along
    /// this list. The call itself requests nothing.
    ///
    /// Each [`read`](Self::read) requests further units of the list where that helps. The caller may read other units,
    /// and several at the same time; these reads benefit less from prefetch. The iterator must not call
    /// [`begin`](Self::begin) or [`read`](Self::read) of this reader: a read that takes units from it holds the lock
    /// that the call would wait for.
    pub fn begin(&self, units: impl IntoIterator<Item = D::Unit, IntoIter: Send + 'static>) {
        *lock(&self.checked) = None;
        self.ahead.begin(&self.source, Box::new(units.into_iter()));
    }

    /// Reads a unit, a batch or the index of a group, into the start of `out`. Returns its size in bytes.
    ///
    /// It also requests the next units where that helps, as far as the prefetch window reaches, and does not wait for
    /// their bytes. Past the page cache, a part of a group of 4 MiB or more in one place of a file is read directly
    /// into `out`, except for up to three blocks at its ends. Its bytes are not moved if its tensors are at multiples
    /// of their element sizes in the file, and `out` starts at a page boundary, as a new [`Buffer`](crate::Buffer)
    /// does.
    ///
    /// # Errors
    ///
    /// - The errors of [`Ranges::read`]. [`Error::NoSuchRecord`] also if there is no such group.
    /// - [`Error::Replaced`] if a file was written to, and [`Error::Open`] if the system cannot tell. After `begin`,
    ///   the first read of each higher epoch checks all files of the batches. Each read of a group checks its files.
    /// - [`Error::System`] if a file that is not kept open could not be reopened for direct I/O.
    pub fn read(&self, unit: &D::Unit, out: &mut [u8]) -> Result<usize, Error> {
        let mut stats = ReadStats::default();
        let bytes = self.data.size(unit)?;
        self.check(unit)?;
        let (of, mut start) = ((&self.data, &self.source), None);
        self.ahead.advance(of, bytes, &mut start, &mut stats);
        let (data, asked) = (&self.data, stats.disk);
        let filled = self.source.fill(data.shards(), data.extents(unit), bytes, out, &mut stats);
        let read = filled.and_then(|out| data.spread(unit, out).map(|()| out.len()));
        if self.source.copied.is_counted() && stats.disk > asked && self.source.stream.is_none() {
            lock(&self.ahead.window).missed();
        }
        stats.bytes = *read.as_ref().unwrap_or(&0) as u64;
        self.ahead.advance(of, bytes, &mut start, &mut stats);
        *lock(&self.source.stats) += stats;
        read
    }

    /// Returns the most bytes that two parts of the reader take: the buffers for direct I/O that the reader copies
    /// from, and the list of what was prefetched of small records. The list has a bit for each 128 KiB of a file that are
    /// read through the page cache, and for what is left of each file: 1 MiB for each TiB of long files, at most 4 MiB.
    /// Its size is rounded down to pages of 4 KiB.
    #[must_use]
    pub fn memory(&self) -> u64 {
        let around = Around::memory(self.ahead.covered(self.data.shards(), &self.source));
        around / 4096 * 4096 + self.source.stream.as_ref().map_or(0, |stream| stream.room.iter().sum::<u64>())
    }

    /// Returns statistics of the reads and prefetches so far.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        let mut stats = *lock(&self.source.stats);
        stats.disk += self.source.stream.as_ref().map_or(0, |stream| stream.bytes.load(Relaxed));
        stats
    }

    /// Returns how the reader reads the files, and why.
    #[must_use]
    pub const fn choice(&self) -> ReadChoice {
        self.share.choice
    }

    /// Returns whether the reader reads all files through the page cache, and found there all of the last 16 MiB that
    /// it was asked for or requested. `false` if the file system of the first file does not count disk reads. Does not
    /// wait for a read.
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        let missing = self.ahead.missing.load(Relaxed);
        !missing && self.source.stream.is_none() && self.source.copied.warm_bytes() >= IN_MEMORY
    }

    /// Fails if a file that is kept open was written to since it was opened. For batches, it checks all files once in
    /// each epoch after `begin`. Groups have no epochs, so it checks the files of each group when the group is read.
    fn check(&self, unit: &D::Unit) -> Result<(), Error> {
        let shards = self.data.shards();
        let Some(epoch) = D::epoch(unit) else {
            let mut files = self.data.extents(unit);
            return files.try_for_each(|extent| shards[extent?.file].file.check_unchanged());
        };
        let mut checked = lock(&self.checked);
        if checked.is_none_or(|(last, _)| epoch > last) {
            let changed = shards.iter().position(|shard| shard.file.check_unchanged().is_err());
            *checked = Some((epoch, changed));
        }
        checked.and_then(|(_, changed)| changed).map_or(Ok(()), |file| shards[file].file.check_unchanged())
    }
}

impl<D: Units> fmt::Debug for Reader<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { data, share, .. } = self;
        f.debug_struct("Reader").field("data", data).field("choice", &share.choice).finish_non_exhaustive()
    }
}

impl Ranges {
    /// Reads the records of `batch` in batch order into the start of `out`, through the page cache and without
    /// prefetch. Returns the number of bytes that it filled.
    ///
    /// Each contiguous run of records in a file takes a system call. On Linux, if the kernel permits it, one call reads
    /// up to 1024 scattered runs of up to 4 KiB. Bytes shared by overlapping windows of a run are read once and then
    /// copied inside `out`. If a file is truncated during the read, the call returns an error for missing bytes and
    /// cannot raise SIGBUS.
    ///
    /// # Errors
    ///
    /// - [`Error::BufferTooSmall`]: `out` is smaller than the batch. Nothing is read.
    /// - [`Error::NoSuchRecord`]: the plan was made for a larger data set.
    /// - [`Error::Truncated`]: a file became shorter after it was opened.
    /// - [`Error::Read`]: a read failed.
    /// - [`Error::Replaced`], [`Error::NotFound`], [`Error::PermissionDenied`],
    ///   [`Error::NotAFile`], [`Error::Open`]: a file that is not kept open could not be reopened, or has changed.
    ///
    /// After every error except `BufferTooSmall`, the contents of `out` are unspecified.
    pub fn read(&self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, Error> {
        let (source, extents) = (Source::default(), self.extents(batch.runs()));
        let (wanted, stats) = (self.size(batch), &mut ReadStats::default());
        let out = source.fill(self.shards(), extents, wanted, out, stats)?;
        self.spread(batch, out)?;
        Ok(out.len())
    }
}

impl Records {
    /// Returns the number of read requests that this thread has made through this crate: system calls that read records
    /// or most headers, plus direct I/O requests. Subtract two values to count the requests of a read.
    #[must_use]
    pub fn read_calls() -> u64 {
        READ_CALLS.with(std::cell::Cell::get)
    }
}
