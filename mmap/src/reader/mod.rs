//! Reads batches ahead of use: the only read path. `groups` does the same for tensors.
//!
//! A [`Reader`] gets the list of coming batches and reads each batch on request. A batch is a list of byte ranges in
//! the order of use. [`source`] fills a slot with them: those at the front of the data set come through the page cache
//! ([`cached`]), those behind past it ([`stream`]). How much is at the front is decided once ([`memory`]).

pub(crate) mod cached;
pub(crate) mod direct;
#[cfg(feature = "safetensors")]
pub(crate) mod groups;
mod memory;
pub(crate) mod mode;
pub(crate) mod queue;
mod ring;
mod source;
pub(crate) mod stats;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::{iter, mem};

use self::cached::{Around, Copied, Point};
use self::memory::Share;
use self::source::Source;
use self::stats::{ReadChoice, ReadStats};
use self::stream::{Stream, Wanted};
use crate::file::READ_CALLS;
use crate::ranges::{Ranges, Span, Stretch};
use crate::system::PIECES;
use crate::{BatchIndices, Error, Plan, ReadMode, Records, system};

/// Options for a [`Reader`]. The defaults suit most programs.
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until a reader is made"]
pub struct ReadOptions {
    mode: ReadMode,
    prefetch: Option<u64>,
    threads: usize,
}

/// Bytes of batches to come that are asked for, by default. With batches of 4 MiB in shuffled chunks every page was in memory
/// when it was read; with one batch half of them were (`bench/disk`, section `resident`).
const PREFETCH: u64 = 32 << 20;

/// After this many bytes that were there when they were read, the files are taken to be in memory: more than the kernel
/// reads ahead at a time, 8 MiB on some disks. After as many bytes of hints that found everything there, hints stop until
/// something is missing.
const IN_MEMORY: u64 = 16 << 20;

/// Longer batches in order are left to the kernel: it asks for all that a read wants in requests as large as the disk
/// takes, and the time between two reads is short in comparison.
const FOLLOWED: u64 = 1 << 20;

/// Bytes that one of several threads reads at a time: reading them takes much longer than to start a thread.
const THREAD_BYTES: u64 = 4 << 20;

impl ReadOptions {
    /// Returns the default options: [`ReadMode::Auto`] and the default prefetch window.
    pub const fn new() -> Self {
        Self { mode: ReadMode::Auto, prefetch: None, threads: 1 }
    }

    /// Sets how files are read: through the page cache, or past it. Default: [`ReadMode::Auto`].
    pub const fn mode(mut self, mode: ReadMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets the prefetch window: how many bytes of the next batches the reader requests ahead. Default: 32 MiB or
    /// one batch, whichever is more.
    pub const fn prefetch(mut self, bytes: u64) -> Self {
        self.prefetch = Some(bytes);
        self
    }

    /// Sets how many threads read one batch, 4 MiB at a time. Default: 1; 0 is 1 too. They are started for each batch.
    pub const fn fill_threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// Reads the batches of a plan and prefetches the next batches.
///
/// Create one reader per loop. The threads of the loop share it. The reader has all state that depends on the read
/// order: the prefetch window, the buffers for direct I/O, and the counters. [`Ranges`] has no such state, and any
/// number of readers can use the same files independently.
///
/// # Examples
///
/// ```
/// use twinbuf_mmap::{Plan, ReadOptions, Reader, Records, Shuffle};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("data");
/// # std::fs::write(&path, vec![7; 1000 * 8])?;
/// let records = Records::open([path], 8)?;
/// let plan = Plan::builder(records.len()).batch(100).shuffle(Shuffle::Full).build()?;
/// let reader = Reader::new(records.ranges(), &plan, ReadOptions::new())?;
/// let batches = move |epoch| (0..).map_while(move |step| plan.batch(epoch, step));
///
/// reader.begin(batches(0));
/// let mut slot = vec![0; 100 * 8];
/// for batch in batches(0) {
///     reader.read(&batch, &mut slot)?;
///     assert!(slot.iter().all(|&byte| byte == 7));
/// }
/// assert_eq!(reader.stats().bytes, 8000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Reader {
    ranges: Arc<Ranges>,
    source: Source,
    share: Share,
    left: Option<u64>,
    prefetch: u64,
    /// The most threads that read a batch.
    threads: usize,
    /// Ranks that share an epoch.
    world: u64,
    window: Mutex<Window>,
}

/// The batches to come, as far as they have been asked for. Positions are bytes of batches since [`Reader::begin`].
#[derive(Default)]
struct Window {
    /// `None`: nothing is asked for.
    batches: Option<Box<dyn Iterator<Item = BatchIndices> + Send>>,
    /// A batch, and how many of its records have been requested.
    part: Option<(BatchIndices, u64)>,
    /// Where the window ends, and where the reading is.
    told: u64,
    used: u64,
    /// Only the first batch has been asked for.
    fresh: bool,
    /// What was asked for last, and whether that was whole chunks.
    last: Option<BatchIndices>,
    chunked: bool,
    around: Around,
    /// Points of batches in order that were not touched yet.
    ahead: VecDeque<Point>,
    /// What the stream has no room for yet.
    pending: VecDeque<(Stretch, u64)>,
    /// Bytes of hints since something came from a disk, and whether something did.
    quiet: u64,
    missing: bool,
}

impl Reader {
    /// Creates a reader for batches of `plan`. The plan's range, shuffle and batch size affect how the files are
    /// read.
    ///
    /// # Errors
    ///
    /// With [`ReadMode::Direct`]:
    ///
    /// - [`Error::Unsupported`]: the operating system has no direct I/O.
    /// - [`Error::System`]: the kernel or the file system refuses direct I/O.
    /// - [`Error::Replaced`]: another file now has the path of a file.
    pub fn new(ranges: Arc<Ranges>, plan: &Plan, options: ReadOptions) -> Result<Self, Error> {
        Self::with_memory(ranges, plan, options, crate::limit::memory_left())
    }

    /// The same with `left` bytes of memory left.
    fn with_memory(
        ranges: Arc<Ranges>,
        plan: &Plan,
        options: ReadOptions,
        left: Option<u64>,
    ) -> Result<Self, Error> {
        let (share, files) = memory::decide(&ranges, plan, options.mode, left)?;
        let straight = options.mode == ReadMode::Direct;
        let stream = (!files.is_empty()).then(|| Stream::new(files, [share.ahead, share.now]));
        let batch = plan.batch_records().saturating_mul(ranges.mean_len());
        let counts = |shard: &crate::Shard| shard.file.file().is_ok_and(|file| system::counts_reads(&file));
        // Most often all of them are on one file system.
        let copied = Copied::new(ranges.shards().first().is_some_and(counts));
        let window = Window { around: Around::new(&ranges), ..Window::default() };
        Ok(Self {
            source: Source { cached: share.until, stream, straight, copied, ..Source::cached() },
            left: left.filter(|_| options.mode == ReadMode::Auto),
            prefetch: options.prefetch.unwrap_or(batch.max(PREFETCH)),
            threads: options.threads,
            world: plan.world(),
            share,
            ranges,
            window: Mutex::new(window),
        })
    }

    /// Sets the list of the next batches, in read order, and discards the previous list. The reader prefetches along
    /// this list.
    ///
    /// Each [`read`](Self::read) prefetches further batches of the list. The caller may read other batches, and
    /// several at the same time; these reads benefit less from prefetch.
    pub fn begin(&self, batches: impl IntoIterator<Item = BatchIndices, IntoIter: Send + 'static>) {
        let mut window = self.lock();
        if let Some(stream) = &self.source.stream {
            stream.forget();
        }
        window.around.clear();
        *window = Window {
            batches: Some(Box::new(batches.into_iter())),
            fresh: true,
            around: std::mem::take(&mut window.around),
            quiet: window.quiet,
            missing: window.missing,
            ..Window::default()
        };
    }

    /// Reads the records of `batch` in batch order into the start of `out`. Returns the number of bytes read.
    ///
    /// Before the read, it requests at most twice this number of bytes of the next batches, and does not wait for
    /// them.
    ///
    /// # Errors
    ///
    /// [`Error::BufferTooSmall`], [`Error::NoSuchRecord`], [`Error::Truncated`], [`Error::Read`], and errors of
    /// reopening a file, in the cases of [`Ranges::read`].
    pub fn read(&self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, Error> {
        let (mut stats, wanted) = (ReadStats::default(), self.ranges.size(batch));
        let bytes = wanted.unwrap_or(u64::MAX);
        self.advance(bytes, true, &mut stats);
        let read = self.read_now(batch, wanted, (out, 0), &mut stats);
        self.advance(bytes, false, &mut stats);
        self.source.count(stats);
        read
    }

    /// The two halves of [`read`](Self::read), for a batch that several threads read in parts. This one asks for the
    /// batches after it, once.
    #[doc(hidden)]
    pub fn ask_ahead(&self, batch: &BatchIndices) {
        let (mut stats, bytes) = (ReadStats::default(), self.ranges.size(batch).unwrap_or(u64::MAX));
        self.advance(bytes, true, &mut stats);
        self.advance(bytes, false, &mut stats);
        self.source.count(stats);
    }

    /// Reads a part, into a slot that has `behind` bytes more: how bytes are copied depends on the size of the slot.
    #[doc(hidden)]
    pub fn read_part(&self, part: &BatchIndices, out: &mut [u8], behind: usize) -> Result<usize, Error> {
        let mut stats = ReadStats::default();
        let read = self.read_now(part, self.ranges.size(part), (out, behind), &mut stats);
        self.source.count(stats);
        read
    }

    /// Reads the `wanted` bytes of a batch, and asks for nothing.
    fn read_now(
        &self,
        batch: &BatchIndices,
        wanted: Option<u64>,
        (out, behind): (&mut [u8], usize),
        stats: &mut ReadStats,
    ) -> Result<usize, Error> {
        let (bytes, asked) = (wanted.unwrap_or(u64::MAX), stats.disk);
        let threads = self.threads.min(usize::try_from(bytes / THREAD_BYTES).unwrap_or(1));
        let read = match usize::try_from(bytes).ok().and_then(|bytes| out.get_mut(..bytes)) {
            Some(out) if threads > 1 => self.read_parts(batch, threads, (out, behind), stats),
            _ => read_batch(&self.ranges, &self.source, batch, wanted, (out, behind), stats),
        };
        if self.source.copied.is_counted() && stats.disk > asked && self.source.stream.is_none() {
            self.lock().missed();
        }
        stats.bytes = *read.as_ref().unwrap_or(&0) as u64;
        read
    }

    /// Reads a batch in parts, on several threads; one is this one. A thread that is free takes the next part, so the
    /// files are read from front to back.
    fn read_parts(
        &self,
        batch: &BatchIndices,
        threads: usize,
        (out, behind): (&mut [u8], usize),
        stats: &mut ReadStats,
    ) -> Result<usize, Error> {
        let len = out.len();
        let records = (THREAD_BYTES / self.ranges.mean_len()).max(1);
        let rest = Mutex::new((0, out));
        let next = || {
            let mut rest = rest.lock().unwrap_or_else(PoisonError::into_inner);
            let (at, out) = &mut *rest;
            let part = batch.part(*at..batch.len().min(*at + records))?;
            let size = self.ranges.size(&part).and_then(|size| usize::try_from(size).ok());
            let (own, later) = mem::take(out).split_at_mut_checked(size?)?;
            *out = later;
            Some((mem::replace(at, *at + part.len()), part, (own, out.len() + behind)))
        };
        // Returns which part failed, if one did.
        let fill = || {
            let (mut stats, calls) = (ReadStats::default(), Records::read_calls());
            let failed = iter::from_fn(next).find_map(|(at, part, out)| {
                let wanted = Some(out.0.len() as u64);
                let read = read_batch(&self.ranges, &self.source, &part, wanted, out, &mut stats);
                Some((at, read.err()?))
            });
            if failed.is_some() {
                rest.lock().unwrap_or_else(PoisonError::into_inner).0 = batch.len();
            }
            (failed, stats, Records::read_calls() - calls)
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(fill)).collect();
            let (failed, own, _) = fill();
            *stats += own;
            let mut failed: Vec<_> = failed.into_iter().collect();
            for other in others {
                let (error, took, calls) = other.join().unwrap_or_else(|panic| resume_unwind(panic));
                READ_CALLS.with(|all| all.set(all.get() + calls));
                *stats += took;
                failed.extend(error);
            }
            // The parts before it were read.
            match failed.into_iter().min_by_key(|(at, _)| *at) {
                Some((_, error)) => Err(error),
                None => Ok(len),
            }
        })
    }

    /// Returns the maximum size in bytes of the buffers for direct I/O. Returns 0 if all files are read through the
    /// page cache.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.source.stream.as_ref().map_or(0, Stream::memory)
    }

    /// Returns statistics of the reads and prefetches so far.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        self.source.stats()
    }

    /// Returns how the reader reads the files, and why.
    #[must_use]
    pub fn choice(&self) -> ReadChoice {
        ReadChoice { data: self.share.data, cached: self.share.cached, left: self.left }
    }

    /// Whether all files are read through the page cache, and every byte of the last 16 MiB was in it before it was asked
    /// for.
    #[doc(hidden)]
    #[must_use]
    pub fn is_in_memory(&self) -> bool {
        let window = self.lock();
        !window.missing && self.source.stream.is_none() && self.source.copied.warm_bytes() >= IN_MEMORY
    }

    /// Returns the files and byte ranges that this reader reads.
    #[must_use]
    pub const fn ranges(&self) -> &Arc<Ranges> {
        &self.ranges
    }

    /// A panic leaves a window that is still one.
    fn lock(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for batches to come, before a read of that many bytes and after it.
    ///
    /// The first batch is asked for alone, so it does not wait for those after it, and not even that if it is one run, because
    /// it is read at once. The others follow after it.
    fn advance(&self, bytes: u64, before: bool, stats: &mut ReadStats) {
        let mut window = self.lock();
        let window = &mut *window;
        if window.batches.is_none() {
            return;
        }
        let fresh = window.fresh;
        if before {
            window.used = window.used.saturating_add(bytes);
        } else if !std::mem::take(&mut window.fresh) {
            return;
        }
        if self.is_quiet(window) {
            // All of it is in memory.
            while window.told < window.used && window.pull(window.used, &self.ranges).is_some() {}
            return;
        }
        let most = if before && fresh { 0 } else { self.prefetch };
        let until =
            window.used.saturating_add(most).min(window.told.saturating_add(2 * bytes)).max(window.used);
        loop {
            if let Some(stream) = self.source.stream.as_ref().filter(|_| !window.pending.is_empty()) {
                stream.ask(&mut window.pending, window.used);
            }
            if !window.pending.is_empty() || window.told >= until {
                break;
            }
            let Some(batch) = window.pull(until, &self.ranges) else { break };
            self.ask(window, batch, stats);
        }
        if !window.ahead.is_empty() {
            let asked = *stats;
            cached::follow(self.ranges.shards(), &mut window.ahead, window.used, stats);
            window.asked(&asked, stats);
        }
    }

    /// Whether hints are superfluous: everything comes through the page cache, and the last ones found all of it there.
    fn is_quiet(&self, window: &Window) -> bool {
        self.source.copied.is_counted() && self.source.stream.is_none() && window.quiet >= IN_MEMORY
    }

    /// Asks for the bytes of a batch or of a part of it. With windows: for the chunks that it brings in.
    fn ask(&self, window: &mut Window, batch: BatchIndices, stats: &mut ReadStats) {
        let last = window.last.as_ref();
        let follows = last.is_some_and(|last| batch.is_behind(last));
        if !last.is_some_and(|last| batch.is_of_epoch_of(last)) {
            window.around.clear();
        }
        // Not by going through all runs: the read goes through them again.
        let end = |batch: &BatchIndices| batch.part(batch.len() - 1..batch.len())?.runs().next();
        let goes_on = |start| last.is_none_or(|last| end(last).is_some_and(|last| last.end == start));
        // Records in order are not hinted: the kernel's read-ahead uses larger requests and pages.
        let in_order =
            batch.runs().next().is_some_and(|run| run.end - run.start == batch.len() && goes_on(run.start));
        let mut hints = Vec::new();
        let chunks = if self.share.windows { batch.chunks(follows && window.chunked) } else { None };
        window.chunked = chunks.is_some();
        let failed = match chunks {
            Some(chunks) => {
                let life = batch.window_records().saturating_mul(self.ranges.mean_len());
                let until = life.saturating_add(life / 4);
                self.sort(window, chunks.into_iter(), until, false, &mut hints)
            }
            None => self.sort(window, batch.pieces(), 0, in_order, &mut hints),
        };
        window.last = Some(batch);
        stats.failed += u64::from(failed);
        if !hints.is_empty() {
            let asked = *stats;
            cached::hint(self.ranges.shards(), hints, stats);
            window.asked(&asked, stats);
        }
    }

    /// Sorts the bytes of these records into hints and what is to be streamed. Whether they name a record that is not there.
    fn sort(
        &self,
        window: &mut Window,
        runs: impl Iterator<Item = Range<u64>>,
        life: u64,
        in_order: bool,
        hints: &mut Vec<(usize, Range<u64>)>,
    ) -> bool {
        let pays = Around::pays(self.ranges.stride(), self.world);
        for span in self.ranges.spans(runs) {
            let Ok(Span { at: Stretch { shard: index, bytes, own_end }, .. }) = span else { return true };
            let shard = &self.ranges.shards()[index];
            let until = self.source.cached_until(shard);
            let front = bytes.start..bytes.end.min(until);
            let len = front.end.saturating_sub(front.start);
            if in_order {
                if len <= FOLLOWED && self.source.copied.is_counted() {
                    let room = PIECES.saturating_sub(window.ahead.len());
                    window.ahead.extend(cached::points(index, &front, window.told).take(room));
                }
            } else if len > 0 {
                if pays && len < cached::STRETCH {
                    let limit = shard.bytes.start..shard.bytes.end.min(until);
                    let missing = window.around.missing(shard.before, &front, &limit);
                    hints.extend(missing.map(|bytes| (index, bytes)));
                } else {
                    hints.push((index, front));
                }
            }
            let back = bytes.start.max(until)..bytes.end;
            if let Some(stream) = self.source.stream.as_ref().filter(|_| !back.is_empty()) {
                // Whole chunks are cut; a large stretch of a batch is left to be read straight to its place.
                let wanted = Wanted { at: Stretch { shard: index, bytes: back, own_end }, to: 0 };
                if life > 0 || self.source.is_streamed(stream, self.ranges.shards(), &wanted) {
                    let life = life.saturating_add(stream.room());
                    window.pending.push_back((wanted.at, window.told.saturating_add(life)));
                }
            }
        }
        false
    }
}

impl Window {
    /// The next batch, or as much of it as ends at `until`, and at least one record.
    fn pull(&mut self, until: u64, ranges: &Ranges) -> Option<BatchIndices> {
        let (batch, done) = match self.part.take() {
            Some(part) => part,
            None => (self.batches.as_mut()?.next()?, 0),
        };
        let records = until.saturating_sub(self.told).div_ceil(ranges.mean_len()).max(1);
        let end = batch.len().min(done.saturating_add(records));
        let part = batch.part(done..end)?;
        self.told = self.told.saturating_add(ranges.size(&part).unwrap_or(u64::MAX));
        if end < batch.len() {
            self.part = Some((batch, end));
        }
        Some(part)
    }

    /// Something was asked for between the two.
    fn asked(&mut self, before: &ReadStats, after: &ReadStats) {
        let missing = after.disk > before.disk;
        self.quiet = if missing { 0 } else { self.quiet + after.hinted - before.hinted };
        self.missing = missing || self.missing && self.quiet < IN_MEMORY;
    }

    /// Something had to be waited for: what was asked for before may be gone.
    fn missed(&mut self) {
        if self.quiet >= IN_MEMORY {
            self.around.clear();
        }
        self.quiet = 0;
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranges, prefetch, .. } = self;
        f.debug_struct("Reader")
            .field("ranges", ranges)
            .field("choice", &self.choice())
            .field("prefetch", prefetch)
            .finish_non_exhaustive()
    }
}

impl Ranges {
    /// Reads the records of `batch` in batch order into the start of `out`, through the page cache and without
    /// prefetch. Returns the number of bytes read.
    ///
    /// Each contiguous run of records in a file is one system call. On Linux, one call reads up to 1024 small
    /// scattered records. Bytes shared by overlapping windows are read once and then copied inside `out`. If a file
    /// is truncated during the read, the call returns an error and cannot raise SIGBUS.
    ///
    /// # Errors
    ///
    /// - [`Error::BufferTooSmall`]: `out` is smaller than the batch. Nothing is read.
    /// - [`Error::NoSuchRecord`]: the plan was made for a larger data set.
    /// - [`Error::Truncated`]: a file became shorter after it was opened.
    /// - [`Error::Read`]: a read failed.
    /// - [`Error::Replaced`], [`Error::NotFound`], [`Error::PermissionDenied`], [`Error::Open`]: a file that is not
    ///   kept open could not be reopened.
    ///
    /// After every error except `BufferTooSmall`, the contents of `out` are unspecified.
    pub fn read(&self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, Error> {
        read_batch(self, &Source::cached(), batch, self.size(batch), (out, 0), &mut ReadStats::default())
    }
}

impl Records {
    /// Returns the number of read requests that this thread has made through this crate: system calls that read
    /// files, plus direct I/O requests. Subtract two values to count the requests of a read.
    #[must_use]
    pub fn read_calls() -> u64 {
        READ_CALLS.with(std::cell::Cell::get)
    }
}

/// Reads a batch of `wanted` bytes.
fn read_batch(
    ranges: &Ranges,
    source: &Source,
    batch: &BatchIndices,
    wanted: Option<u64>,
    (out, behind): (&mut [u8], usize),
    stats: &mut ReadStats,
) -> Result<usize, Error> {
    let found = out.len();
    let cut = wanted.and_then(|wanted| out.split_at_mut_checked(usize::try_from(wanted).ok()?));
    let Some((out, later)) = cut else {
        return Err(Error::BufferTooSmall { wanted: wanted.unwrap_or(u64::MAX), found: found as u64 });
    };
    let behind = behind + later.len();
    let wanted = ranges.placed(batch.pieces()).map(|found| found.map(|(at, to)| Wanted { at, to }));
    source.fill(ranges.shards(), wanted, (&mut *out, behind), stats)?;
    ranges.spread(batch, out)?;
    Ok(out.len())
}
