//! Requests the bytes of the next units ahead of their reads: hints to the kernel, touches of sequential files, requests
//! of the stream. Decides how far ahead.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use super::cached::{self, Around, Point};
use super::source::Source;
use super::units::{Units, Use};
use crate::ReadStats;
use crate::error::lock;
use crate::ranges::{Extent, Shard};
use crate::system::{self, PIECES};

/// The reader takes the files to be in memory after it found this many bytes in the page cache without a gap. This is
/// more than the kernel reads ahead at a time, which is 8 MiB on some disks. The reader also stops its hints after this
/// many bytes of hints that caused no disk read. It resumes them when a read has to wait for the disk.
pub(super) const IN_MEMORY: u64 = 16 << 20;

/// The reader does not touch points ahead of sequential extents longer than this. The kernel reads a long extent in
/// requests as large as the disk takes, and the time between two reads is short in comparison.
const FOLLOWED: u64 = 1 << 20;

/// What a reader requests ahead.
pub(super) struct Ahead<D: Units> {
    /// The prefetch window, in bytes.
    pub(super) prefetch: u64,
    /// One read requests about this many bytes of the next units at most, or twice its own size if that is more.
    burst: u64,
    /// Whether hints cover whole stretches around the records, and not only the records.
    pub(super) stretches: bool,
    /// Whether whole chunks of a windowed shuffle are requested.
    windows: bool,
    pub(super) window: Mutex<Window<D::Unit>>,
    /// Whether hints caused a disk read. It becomes `false` after [`IN_MEMORY`] bytes of hints that caused none. Outside of
    /// `window`, which is locked while the system takes a hint, for seconds on a slow disk. Relaxed: it orders nothing.
    pub(super) missing: AtomicBool,
}

/// The next units, and how much of them was requested. A position is a number of bytes of units since
/// [`Reader::begin`](super::Reader::begin).
pub(super) struct Window<U> {
    /// The units that were not requested yet.
    units: Box<dyn Iterator<Item = U> + Send>,
    /// The rest of a unit of which only the front was requested.
    rest: Option<U>,
    /// The position up to which units were requested.
    pub(super) told: u64,
    /// The position up to which units were read, including the unit that is being read.
    used: u64,
    /// Where the units start that are being read.
    reading: Vec<u64>,
    /// `true` until the first read after `begin` has ended. Until then, only the first unit is requested.
    fresh: bool,
    /// The last unit that was requested, and whether whole chunks were requested for it, not only its own records.
    last: Option<(U, bool)>,
    /// The stretches around records that were requested in this epoch.
    pub(super) around: Around,
    /// Points of sequential extents that were not touched yet.
    points: VecDeque<Point>,
    /// Extents for which the stream has no room yet. Each has the position at which it is not needed any more, and how
    /// many bytes of units later what was requested of it is given up.
    pending: VecDeque<(Extent, [u64; 2])>,
    /// Extents for the next hint. The list is empty between calls, and is kept to reuse its memory.
    hints: Vec<Extent>,
    /// Bytes of hints since the last disk read.
    quiet: u64,
}

impl<D: Units> Ahead<D> {
    pub(super) fn new(prefetch: u64, burst: u64, windows: bool) -> Self {
        let window = Mutex::new(Window::new(Box::new(std::iter::empty())));
        Self { prefetch, burst, stretches: false, windows, window, missing: AtomicBool::new(false) }
    }

    /// Sets the list of the next units.
    pub(super) fn begin(&self, source: &Source, units: Box<dyn Iterator<Item = D::Unit> + Send>) {
        let mut window = lock(&self.window);
        if let Some(stream) = &source.stream {
            stream.forget();
        }
        window.around.clear();
        let (around, quiet) = (std::mem::take(&mut window.around), window.quiet);
        *window = Window { fresh: true, around, quiet, ..Window::new(units) };
    }

    /// The number of bytes, from the front of all files on, in which hints cover whole stretches. Each file counts up to
    /// the end of a stretch.
    pub(super) fn covered(&self, shards: &[Shard], source: &Source) -> u64 {
        let all = shards.last().map_or(0, |last| last.before.saturating_add(last.bytes.end));
        let ends = shards.len().saturating_sub(1) as u64 * cached::STRETCH;
        if self.stretches { all.min(source.cached).saturating_add(ends) } else { 0 }
    }

    /// Requests the next units. The reader calls it before each read of `bytes` bytes and after it. `at` is `None` before
    /// the read, and then the position where its unit starts.
    ///
    /// Before the first read, it requests only the first unit, so that this unit does not wait for later ones. The
    /// later ones are requested after the first read.
    pub(super) fn advance(&self, of: (&D, &Source), bytes: u64, at: &mut Option<u64>, stats: &mut ReadStats) {
        let ((data, source), mut window) = (of, lock(&self.window));
        let window = &mut *window;
        let (fresh, before) = (window.fresh, at.is_none());
        let start = *at.get_or_insert(window.used);
        window.reading.retain(|&other| other != start);
        if before {
            window.reading.push(start);
            window.used = window.used.saturating_add(counted(bytes));
        } else if !std::mem::take(&mut window.fresh) {
            return;
        }
        let quiet = source.copied.is_counted() && source.stream.is_none();
        if quiet && window.quiet >= IN_MEMORY {
            // Hints are useless: all data is read through the page cache, and the last hints caused no disk read. Only
            // count the units, and request nothing.
            while window.told < window.used && window.pull(window.used, data, None).is_some() {}
            return;
        }
        let most = if before && fresh { 0 } else { self.prefetch };
        let burst = window.told.saturating_add(bytes.saturating_mul(2).max(self.burst));
        let until = window.used.saturating_add(most).min(burst).max(window.used);
        loop {
            if let Some(stream) = source.stream.as_ref().filter(|_| !window.pending.is_empty()) {
                let done = window.reading.iter().copied().min().unwrap_or(window.used);
                stream.ask(&mut window.pending, window.used.saturating_add(u64::from(!before)), done);
            }
            if !window.pending.is_empty() || window.told >= until {
                break;
            }
            let Some(unit) = window.pull(until, data, source.straight) else { break };
            self.ask(window, (data, source), unit, stats);
        }
        if !window.points.is_empty() {
            self.request(window, data.shards(), stats);
        }
    }

    /// Requests the bytes of a unit or of a part of it. For a windowed shuffle, requests the chunks that it adds to the
    /// window.
    fn ask(&self, window: &mut Window<D::Unit>, of: (&D, &Source), unit: D::Unit, stats: &mut ReadStats) {
        let (data, source) = of;
        let last = window.last.take();
        if last.as_ref().is_none_or(|(last, _)| D::epoch(last) != D::epoch(&unit)) {
            window.around.clear();
        }
        let windowed = data.ahead(&unit, last.as_ref(), self.windows, |extent, how| {
            self.ask_for(window, (data.shards(), source), &extent, how);
        });
        stats.failed += u64::from(windowed.is_err());
        window.last = Some((unit, windowed.unwrap_or(false)));
        if !window.hints.is_empty() {
            self.request(window, data.shards(), stats);
        }
    }

    /// Hints the extents and touches the points that were found, counts the time and the disk reads that this starts, and
    /// updates the state by them.
    fn request(&self, window: &mut Window<D::Unit>, shards: &[Shard], stats: &mut ReadStats) {
        let (hinted, begun, before) = (stats.hinted, Instant::now(), system::read_from_disk());
        cached::hint(shards, &mut window.hints, stats);
        cached::follow(shards, &mut window.points, window.used, stats);
        stats.hint_time += begun.elapsed();
        let disk = system::read_from_disk().saturating_sub(before);
        stats.disk += disk;
        window.quiet = if disk > 0 { 0 } else { window.quiet + stats.hinted - hinted };
        if disk > 0 || window.quiet >= IN_MEMORY {
            self.missing.store(disk > 0, Relaxed);
        }
    }

    /// Divides an extent into the bytes to hint or to touch, which it adds to `hints` or `points`,
    /// and the bytes to stream, which it adds to `pending`.
    fn ask_for(&self, window: &mut Window<D::Unit>, of: (&[Shard], &Source), extent: &Extent, how: Use) {
        let (shards, source) = of;
        let (file, shard) = (extent.file, &shards[extent.file]);
        let until = source.cached_until(shard);
        let front = extent.bytes.start..extent.bytes.end.min(until);
        let len = front.end.saturating_sub(front.start);
        // Sequential extents get no hints: the kernel's own read-ahead makes larger requests, into larger pages of the
        // cache. To keep the read-ahead going, points ahead of the read are touched. Read-ahead ends with the file, so
        // the front of each file is hinted.
        if how == Use::InOrder && (len > FOLLOWED || front.start > shard.bytes.start) {
            if len <= FOLLOWED && source.copied.is_counted() {
                let room = PIECES.saturating_sub(window.points.len());
                window.points.extend(cached::points(file, &front, window.told).take(room));
            }
        } else if len > 0 {
            if window.around.asked.is_empty() {
                window.around = Around::new(self.covered(shards, source));
            }
            // A stretch never spans two files.
            let first = shard.before / cached::STRETCH + file as u64;
            if len < cached::STRETCH && window.around.has(first + front.end.div_ceil(cached::STRETCH)) {
                let limit = shard.bytes.start..shard.bytes.end.min(until);
                let missing = window.around.missing(first, &front, &limit);
                window.hints.extend(missing.map(|bytes| Extent::new(file, bytes, 0)));
            } else {
                window.hints.push(Extent::new(file, front, 0));
            }
        }
        let back = Extent { bytes: extent.bytes.start.max(until)..extent.bytes.end, ..*extent };
        if let Some(stream) = source.stream.as_ref().filter(|_| !back.bytes.is_empty()) {
            // Do not stream extents that are read directly into the slot.
            if source.is_streamed(stream, shards, &back) {
                // The unit's thread may be late: others may take as many bytes as the lane has. A window leaves less
                // time: a chunk that was requested late is not read whole, and would keep its memory from the next.
                let [ahead, now] = stream.room;
                let (life, late) = if let Use::Window(life) = how { (life, now / 4) } else { (0, ahead) };
                window.pending.push_back((back, [window.told.saturating_add(life), late]));
            }
        }
    }
}

/// The bytes that a unit counts for. One without bytes counts as a page: otherwise an endless list of such units would be
/// taken without end, or millions of them for one read.
const fn counted(bytes: u64) -> u64 {
    if bytes == 0 { 4096 } else { bytes }
}

impl<U> Window<U> {
    fn new(units: Box<dyn Iterator<Item = U> + Send>) -> Self {
        Self {
            units,
            rest: None,
            told: 0,
            used: 0,
            reading: Vec::new(),
            fresh: false,
            last: None,
            around: Around::default(),
            points: VecDeque::new(),
            pending: VecDeque::new(),
            hints: Vec::new(),
            quiet: 0,
        }
    }

    /// Takes the next unit, or about as much of it as ends at position `until`. A unit of at least `straight` bytes, which
    /// may be read directly into the slot, is not cut: a part could be short enough for the stream.
    fn pull<D: Units<Unit = U>>(&mut self, until: u64, data: &D, straight: Option<u64>) -> Option<U> {
        let unit = self.rest.take().or_else(|| self.units.next())?;
        let whole = straight.is_some_and(|least| data.size(&unit).is_ok_and(|bytes| bytes >= least));
        let (part, rest) = data.split(unit, if whole { u64::MAX } else { until.saturating_sub(self.told) });
        self.told = self.told.saturating_add(counted(data.size(&part).unwrap_or(0)));
        self.rest = rest;
        Some(part)
    }

    /// Resumes hints after a read had to wait for the disk. If hints had stopped, requested pages may have left the
    /// cache since, so all stretches may be requested again.
    pub(super) fn missed(&mut self) {
        if self.quiet >= IN_MEMORY {
            self.around.clear();
        }
        self.quiet = 0;
    }
}
