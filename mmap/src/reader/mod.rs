//! Reads batches: the only prefetch window, the only read path.
//!
//! A [`Reader`] is told which batches are to come and reads each of them when it is asked to. A batch is a list of byte ranges
//! in the order of use. [`source`] fills a slot with them: those at the front of the data set come through the page cache
//! ([`cached`]), those behind past it ([`stream`]). How much is at the front is decided once ([`memory`]).

mod around;
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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::around::Around;
use self::memory::Share;
use self::source::Source;
use self::stats::{ReadChoice, ReadStats};
use self::stream::{Stream, Stretch, Wanted};
use crate::file::READ_CALLS;
use crate::records::Records;
use crate::spans::Span;
use crate::{BatchIndices, Error, Plan, ReadMode, system};

/// How a [`Reader`] reads; the default is right for most.
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing until a reader is made"]
pub struct ReadOptions {
    mode: ReadMode,
    prefetch: Option<u64>,
}

/// Bytes of batches to come that are asked for, by default. With batches of 4 MiB in shuffled chunks every page was in memory
/// when it was read; with one batch half of them were (`bench/disk`, section `resident`).
const PREFETCH: u64 = 32 << 20;

/// Bytes of hints that found everything in memory, after which none are given until something is missing.
const QUIET: u64 = 8 << 20;

impl ReadOptions {
    /// Default options.
    pub const fn new() -> Self {
        Self { mode: ReadMode::Auto, prefetch: None }
    }

    /// Sets where bytes come from. Default: [`ReadMode::Auto`].
    pub const fn mode(mut self, mode: ReadMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets how many bytes of the batches to come are asked for. Default: 32 MiB or one batch, whichever is more.
    pub const fn prefetch(mut self, bytes: u64) -> Self {
        self.prefetch = Some(bytes);
        self
    }
}

/// Reads the batches of a plan, and asks the system for those that come next.
///
/// Make one for each loop that reads; its threads share it. Everything that depends on the order of reading is in here: the
/// prefetch window, the memory of reads past the page cache, and the counters. [`Records`] has none of it, so any number of
/// readers use the same files without knowledge of each other.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use twinbuf_mmap::{Plan, ReadOptions, Reader, Records, Shuffle};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("data");
/// # std::fs::write(&path, vec![7; 1000 * 8])?;
/// let records = Arc::new(Records::open([path], 8)?);
/// let plan = Plan::builder(records.len()).batch(100).shuffle(Shuffle::Full).build()?;
/// let reader = Reader::new(records, &plan, ReadOptions::new())?;
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
    records: Arc<Records>,
    source: Source,
    share: Share,
    left: Option<u64>,
    prefetch: u64,
    /// Ranks that share an epoch.
    world: u64,
    /// Whether reads from disks are counted for all files.
    counted: bool,
    window: Mutex<Window>,
    stats: Mutex<ReadStats>,
}

/// The batches to come, as far as they have been asked for. Positions are bytes of batches since [`Reader::begin`].
struct Window {
    /// `None`: nothing is asked for.
    batches: Option<Box<dyn Iterator<Item = BatchIndices> + Send>>,
    /// A batch of which so many records have been asked for.
    part: Option<(BatchIndices, u64)>,
    /// Where the window ends, and where the reading is.
    told: u64,
    used: u64,
    /// Only the first batch has been asked for.
    fresh: bool,
    /// The record after the last one that was asked for.
    next: Option<u64>,
    /// The epoch that is asked for.
    epoch: Option<(u64, u64)>,
    /// The window of the order whose chunks were asked for last.
    chunks_of: usize,
    around: Around,
    /// What the stream has no room for yet.
    pending: VecDeque<(Stretch, u64)>,
    /// Bytes of hints since something came from a disk.
    quiet: u64,
}

impl Reader {
    /// Makes a reader of batches of `plan`, which decides how the files are read.
    ///
    /// # Errors
    ///
    /// In [`ReadMode::Direct`]: [`Error::Unsupported`] where the system has no such reads, [`Error::System`] if the kernel
    /// refuses them, as it does on some file systems, and [`Error::Replaced`].
    pub fn new(records: Arc<Records>, plan: &Plan, options: ReadOptions) -> Result<Self, Error> {
        Self::with_memory(records, plan, options, crate::limit::memory_left())
    }

    /// The same with so much memory left.
    fn with_memory(
        records: Arc<Records>,
        plan: &Plan,
        options: ReadOptions,
        left: Option<u64>,
    ) -> Result<Self, Error> {
        let (mut share, files) = memory::decide(&records, plan, options.mode, left)?;
        let straight = options.mode == ReadMode::Direct;
        let stream = (!files.is_empty()).then(|| Stream::new(files, [share.ahead, share.now]));
        if stream.is_none() {
            share = Share::all(share.data);
        }
        let batch = plan.batch_records().saturating_mul(records.record_bytes() as u64);
        let counts = |shard: &crate::Shard| shard.file.file().is_ok_and(|file| system::counts_reads(&file));
        let window = Window {
            batches: None,
            part: None,
            told: 0,
            used: 0,
            fresh: false,
            next: None,
            epoch: None,
            chunks_of: 0,
            around: Around::new(&records),
            pending: VecDeque::new(),
            quiet: 0,
        };
        Ok(Self {
            source: Source { cached: share.until, stream, straight, ..Source::cached() },
            left: left.filter(|_| options.mode == ReadMode::Auto),
            prefetch: options.prefetch.unwrap_or(batch.max(PREFETCH)),
            world: plan.world(),
            // All of them lie on one file system most often.
            counted: records.shards().first().is_some_and(counts),
            share,
            records,
            window: Mutex::new(window),
            stats: Mutex::default(),
        })
    }

    /// Begins with `batches`, the ones that will be read next, in this order: what was asked for before is forgotten.
    ///
    /// Each [`read`](Self::read) asks for more of them. Reads of other batches, and several at a time, are allowed: they find
    /// less of what they need.
    pub fn begin(&self, batches: impl IntoIterator<Item = BatchIndices, IntoIter: Send + 'static>) {
        let mut window = self.lock();
        if let Some(stream) = &self.source.stream {
            stream.forget();
        }
        let Window { around, quiet, .. } = &mut *window;
        around.clear();
        *window = Window {
            batches: Some(Box::new(batches.into_iter())),
            part: None,
            told: 0,
            used: 0,
            fresh: true,
            next: None,
            epoch: None,
            chunks_of: 0,
            around: std::mem::take(around),
            pending: VecDeque::new(),
            quiet: *quiet,
        };
    }

    /// Reads the records of `batch`, one after the other in batch order, to the front of `out`. Returns the number of
    /// bytes: [`BatchIndices::len`] times [`Records::record_bytes`].
    ///
    /// Before that it asks for batches to come, at most twice as many bytes as it reads, which does not wait for them.
    ///
    /// # Errors
    ///
    /// Those of [`Records::read`].
    pub fn read(&self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, Error> {
        let mut stats = ReadStats::default();
        let bytes = batch.len().saturating_mul(self.records.record_bytes() as u64);
        self.advance(bytes, true, &mut stats);
        let asked = stats.disk;
        let read = read_batch(&self.records, &self.source, batch, out, &mut stats);
        let missed = self.counted && stats.disk > asked && self.source.stream.is_none();
        if missed {
            self.lock().missed();
        }
        self.advance(bytes, false, &mut stats);
        stats.bytes = *read.as_ref().unwrap_or(&0) as u64;
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) += stats;
        read
    }

    /// Returns the bytes of memory for reads past the page cache, at most.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.source.stream.as_ref().map_or(0, Stream::memory)
    }

    /// Returns what it has read and asked for so far.
    #[must_use]
    pub fn stats(&self) -> ReadStats {
        let mut stats = *self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        stats.disk += self.source.stream.as_ref().map_or(0, Stream::bytes);
        stats
    }

    /// Returns how it reads, and why.
    #[must_use]
    pub fn choice(&self) -> ReadChoice {
        ReadChoice { data: self.share.data, cached: self.share.cached, left: self.left }
    }

    /// Returns the files that it reads.
    #[must_use]
    pub const fn records(&self) -> &Arc<Records> {
        &self.records
    }

    /// A panic leaves a window that is still one.
    fn lock(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for batches to come, before a read of so many bytes and after it.
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
            while window.told < window.used && window.pull(window.used, self.record_bytes()).is_some() {}
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
            let first = window.told == 0;
            let Some(batch) = window.pull(until, self.record_bytes()) else { break };
            self.ask(window, &batch, first, stats);
        }
    }

    fn record_bytes(&self) -> u64 {
        self.records.record_bytes() as u64
    }

    /// Whether hints are superfluous: everything comes through the page cache, and the last ones found all of it there.
    fn is_quiet(&self, window: &Window) -> bool {
        self.counted && self.source.stream.is_none() && window.quiet >= QUIET
    }

    /// Asks for the bytes of a batch or of a part of it. With windows: for the chunks that it brings in.
    fn ask(&self, window: &mut Window, batch: &BatchIndices, first: bool, stats: &mut ReadStats) {
        let epoch = Some((batch.seed(), batch.epoch()));
        if window.epoch != epoch {
            window.epoch = epoch;
            window.around.clear();
        }
        let run = batch.runs().next();
        let whole = run.as_ref().is_some_and(|run| run.end - run.start == batch.len());
        let goes_on = window.next.is_some() && window.next == run.as_ref().map(|run| run.start);
        // Not by going through all runs, which would be done once more to read them.
        let last = batch.len().checked_sub(1).and_then(|last| batch.part(last..last + 1));
        window.next = last.and_then(|last| last.runs().next()).map(|run| run.end);
        // The kernel reads ahead of records in order by itself, in larger requests: 1465 MiB/s instead of 616 (`bench/disk`,
        // section `sequential`).
        let in_order = whole && (goes_on || first);
        let mut hints = Vec::new();
        let failed = match window.chunks(batch, self.share.windows) {
            Some(chunks) => {
                let life = batch.window_records().saturating_mul(self.record_bytes());
                let until = life.saturating_add(life / 4);
                self.sort(window, chunks.into_iter(), until, false, &mut hints)
            }
            None => self.sort(window, batch.pieces(), 0, in_order, &mut hints),
        };
        stats.failed += u64::from(failed);
        if !hints.is_empty() {
            let (disk, hinted) = (stats.disk, stats.hinted);
            cached::hint(self.records.shards(), hints, stats);
            window.quiet = if stats.disk > disk { 0 } else { window.quiet + stats.hinted - hinted };
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
        let pays = Around::pays(self.records.stride(), self.world);
        for span in self.records.spans_of(runs) {
            let Ok(span) = span else { return true };
            let until = self.source.cached_until(span.shard);
            let Span { index, bytes, .. } = &span;
            let front = bytes.start..bytes.end.min(until);
            if !front.is_empty() && !in_order {
                if pays && front.end - front.start < around::STRETCH {
                    let limit = span.shard.bytes.start..span.shard.bytes.end.min(until);
                    hints.extend(
                        window.around.missing(span.shard.before, &front, &limit).map(|bytes| (*index, bytes)),
                    );
                } else {
                    hints.push((*index, front));
                }
            }
            let back = bytes.start.max(until)..bytes.end;
            if let Some(stream) = self.source.stream.as_ref().filter(|_| !back.is_empty()) {
                let own_end = self.own_end(&span);
                let stretch = Stretch { shard: *index, bytes: back, own_end };
                // Whole chunks are cut; a large stretch of a batch is left to be read straight to its place.
                let wanted = Wanted { at: stretch, to: 0 };
                if life > 0 || self.source.is_streamed(stream, self.records.shards(), &wanted) {
                    let life = life.saturating_add(stream.room());
                    window.pending.push_back((wanted.at, window.told.saturating_add(life)));
                }
            }
        }
        false
    }

    fn own_end(&self, span: &Span<'_>) -> u64 {
        own_end(&self.records, span)
    }
}

impl Window {
    /// The next batch, or as much of it as ends at `until`, and at least one record.
    fn pull(&mut self, until: u64, record_bytes: u64) -> Option<BatchIndices> {
        let (batch, done) = match self.part.take() {
            Some(part) => part,
            None => (self.batches.as_mut()?.next()?, 0),
        };
        let records = until.saturating_sub(self.told).div_ceil(record_bytes.max(1)).max(1);
        let end = batch.len().min(done.saturating_add(records));
        let part = batch.part(done..end)?;
        self.told = self.told.saturating_add(part.len().saturating_mul(record_bytes));
        if end < batch.len() {
            self.part = Some((batch, end));
        }
        Some(part)
    }

    /// The chunks that a batch of a windowed order brings in: those of its own window too, if that was not asked for. `None`
    /// with another order, and where there is no room for whole windows.
    fn chunks(&mut self, batch: &BatchIndices, room: bool) -> Option<Vec<Range<u64>>> {
        let ahead = batch.chunks_ahead().filter(|_| room)?;
        let Some([window, previous]) = batch.window_ids() else { return Some(ahead) };
        let before = std::mem::replace(&mut self.chunks_of, window);
        if before == window || before == previous {
            return Some(ahead);
        }
        let mut all = batch.own_chunks().unwrap_or_default();
        all.extend(batch.chunks_up_to_ahead().unwrap_or_default());
        Some(all)
    }

    /// Something had to be waited for: what was asked for before may be gone.
    fn missed(&mut self) {
        if self.quiet >= QUIET {
            self.around.clear();
        }
        self.quiet = 0;
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { records, prefetch, .. } = self;
        f.debug_struct("Reader")
            .field("records", records)
            .field("choice", &self.choice())
            .field("prefetch", prefetch)
            .finish_non_exhaustive()
    }
}

impl Records {
    /// Reads the records of `batch`, one after the other in batch order, to the front of `out`, through the page cache.
    /// Returns the number of bytes: [`BatchIndices::len`] times [`record_bytes`](Self::record_bytes).
    ///
    /// A [`Reader`] does the same and reads ahead. The bytes go straight into `out`. Each run of consecutive records in a file
    /// is one call, and each record where there are gaps between them; on Linux up to 1024 small records that are scattered are
    /// one call. Bytes that overlapping windows share are read once and then copied inside `out`.
    /// A file that is truncated in the meantime is an error here and cannot raise SIGBUS.
    ///
    /// # Errors
    ///
    /// [`Error::BufferTooSmall`], before anything is read. [`Error::NoSuchRecord`] if the plan was made for
    /// a larger data set. [`Error::Truncated`] if a file has become shorter, [`Error::Read`] if the system
    /// fails. After any of these three the contents of `out` are unspecified.
    pub fn read(&self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, Error> {
        read_batch(self, &Source::cached(), batch, out, &mut ReadStats::default())
    }

    /// Returns how many system calls that read files this thread has made through this crate, and how many requests past the
    /// page cache it has begun. Compare two of them to count those of a read.
    #[must_use]
    pub fn read_calls() -> u64 {
        READ_CALLS.with(std::cell::Cell::get)
    }
}

fn read_batch(
    records: &Records,
    source: &Source,
    batch: &BatchIndices,
    out: &mut [u8],
    stats: &mut ReadStats,
) -> Result<usize, Error> {
    let record = records.record_bytes();
    let wanted = batch.len().checked_mul(record as u64);
    let out = match wanted.and_then(|wanted| usize::try_from(wanted).ok()) {
        Some(wanted) if wanted <= out.len() => &mut out[..wanted],
        _ => {
            let wanted = wanted.unwrap_or(u64::MAX);
            return Err(Error::BufferTooSmall { wanted, found: out.len() as u64 });
        }
    };
    // The records of the spans are those of the batch, all of which fit `out`; so each fits usize.
    let fitting = |span: &Span<'_>| usize::try_from(span.records * record as u64).unwrap_or(usize::MAX);
    let mut to = 0;
    let wanted = records.spans(batch).map(|span| {
        let span = span?;
        let (start, len) = (to, fitting(&span));
        to += len;
        let own_end = own_end(records, &span);
        let Span { index: shard, ref bytes, .. } = span;
        let at = Stretch { shard, bytes: bytes.clone(), own_end };
        // Overlapping records take less in the file. They are spread out of the end of their place.
        Ok(Wanted { at, to: start + span.shared(len) })
    });
    source.fill(records.shards(), wanted, out, stats)?;
    if records.stride() < record as u64 {
        let mut rest = &mut *out;
        for span in records.spans(batch) {
            let span = span?;
            let len = fitting(&span);
            let (part, behind) = rest.split_at_mut_checked(len).unwrap_or_default();
            rest = behind;
            expand(part, record, span.shared(len));
        }
    }
    Ok(out.len())
}

/// Where the bytes of a span end that no other record has too.
fn own_end(records: &Records, span: &Span<'_>) -> u64 {
    let own = span.records.saturating_mul(records.stride());
    span.bytes.start.saturating_add(own).min(span.bytes.end)
}

/// Spreads overlapping records, of `record` bytes each, out of the end of `out`, where they begin at byte
/// `shared`, over all of `out`.
fn expand(out: &mut [u8], record: usize, shared: usize) {
    if shared == 0 {
        return;
    }
    // With n records and the stride s, `shared` is n * record - ((n - 1) * s + record), that is
    // (n - 1) * (record - s). Record i goes to i * record and lies at shared + i * s, which is
    // (n - 1 - i) * (record - s) further behind: never before its place. And all that is written up to then
    // ends at (i + 1) * record, which is the place of record i + 1 and so not behind where that one lies: no
    // record is overwritten before it has been copied.
    let overlap = shared / (out.len() / record - 1);
    for (to, from) in (0..out.len()).step_by(record).zip((shared..).step_by(record - overlap)) {
        out.copy_within(from..from + record, to);
    }
}

#[cfg(test)]
mod expanding {
    use super::*;

    #[test]
    fn overlapping_records_are_spread_out() {
        for (record, stride, records) in [(3, 2, 4), (5, 1, 7), (4, 3, 1), (4, 4, 3), (2, 1, 2), (1, 1, 5)] {
            let source: Vec<u8> = (0_u8..).take((records - 1) * stride + record).collect();
            let expected: Vec<u8> =
                (0..records).flat_map(|i| &source[i * stride..i * stride + record]).copied().collect();
            let mut out = vec![0xEE; records * record];
            let shared = out.len() - source.len();
            out[shared..].copy_from_slice(&source);
            expand(&mut out, record, shared);
            assert_eq!(out, expected, "{records} records of {record}, stride {stride}");
        }
    }
}
