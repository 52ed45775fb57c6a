//! The report of where the time went.

use std::sync::Arc;
use std::time::{Duration, Instant};

use twinbuf_mmap::{ReadChoice, ReadStats, Reader, Units};

use super::log::{Event, STEPS, Seen, StageTimes, What};

/// Options that a loader ran with, or that [`Report::to_try`] returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Settings {
    /// Whether slots are filled ahead of the caller.
    pub overlap: bool,
    /// The number of host slots.
    pub depth: usize,
    /// The number of workers that fill slots.
    pub workers: usize,
}

impl Settings {
    /// The number of slots to try if loads come late.
    pub(super) fn deeper(self) -> usize {
        self.depth + (self.depth / 2).max(2)
    }
}

/// The bottleneck: what takes the time of the loop. See [`Report::verdict`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum Verdict {
    /// Fewer than 8 batches were received.
    Unmeasured,
    /// The caller's own work, on the host or on a device.
    ComputeBound,
    /// Loads, most of it reading, and most bytes came from a disk.
    DiskBound,
    /// Loads: reading from memory, from a disk whose reads the system does not count, or by the caller's
    /// [`Dataset`](crate::Dataset), or making the items of a pipe or an iterable.
    LoadBound,
    /// Loads, most of it the transforms.
    TransformBound,
    /// Copies to the device.
    TransferBound,
    /// The closure of a [`Generator`](crate::generate::Generator).
    GenerationBound,
    /// Batches that were kept after the caller had asked for the next one, by the caller or by another thread. Loads
    /// waited for their slots, and the caller for the loads.
    HeldBound,
    /// Nothing alone: loads or copies take about as long as the use, or less but come late now and then.
    Balanced,
}

/// The maximum number of epochs in [`Report::by_epoch`].
const EPOCHS: usize = 64;

/// The times of one epoch in a [`Report`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EpochTimes {
    /// The epoch.
    pub epoch: u64,
    /// The number of batches that the caller received.
    pub batches: u64,
    /// The time from the first request for a batch to the end of the epoch, without pauses: iterations of the same
    /// thread over another loader that begin and end within one step. In the current epoch, the time up to the batch in
    /// use.
    pub wall: Duration,
    /// The time spent reading and transforming these batches, summed over all threads.
    pub load: Duration,
    /// The caller's times: using batches (`busy`) and waiting for batches (`waiting`).
    pub train: StageTimes,
    /// When the caller received the first of these batches. It tells apart epochs of the same number.
    #[cfg_attr(feature = "serde", serde(skip))]
    first: Option<Instant>,
}

/// Where the time of a loader went so far. [`Loader::report`](crate::Loader::report) returns it.
///
/// Times are wall-clock times. Those of `read`, `transform` and `train` are of the batches that the caller received;
/// `train` includes its waits for others.
///
/// # Examples
///
/// ```
/// # use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan};
/// # struct Zeros;
/// # impl Dataset for Zeros {
/// #     fn records(&self) -> u64 { 64 }
/// #     fn record_bytes(&self) -> usize { 4 }
/// #     fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> { Ok(out.len()) }
/// # }
/// # let mut loader = Loader::builder(Zeros, Plan::builder(64).batch(8).build()?).build()?;
/// for batch in loader.epoch(0) {
///     let _ = batch?;
/// }
/// let report = loader.report();
/// assert_eq!(report.batches, 8);
/// println!("{report}");
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Report {
    /// The number of epochs started. 0 for a generator.
    pub epochs: u64,
    /// The number of batches that the caller received.
    pub batches: u64,
    /// The size of these batches in the slots, in bytes, after the transforms. A round of a generator counts the size
    /// of its Rust type alone, without what that points to. Of a stream whose builder calls `sends`, groups that are
    /// kept in memory count too.
    pub bytes: u64,
    /// The number of bytes read for the batches that the caller received, before the transforms. For a generator as
    /// `bytes`.
    pub read_bytes: u64,
    /// The number of batches whose load was started, including batches loaded ahead.
    pub loads: u64,
    /// The number of system calls and direct I/O requests that read the received batches from files. 0 for streams,
    /// generators and pipes, and for data sets that read by other means.
    pub io_calls: u64,
    /// The settings that the loader ran with. `workers` is 1 if the caller's thread loads the batches of a loader;
    /// `read` and `transform` are sums over all threads. `overlap` is `false` if the builder, the environment or a
    /// breakdown turned overlap off.
    pub settings: Settings,
    /// The time from the first request for a batch to the end of each epoch, without pauses, summed over all epochs; of
    /// a generator, over all iterations. A wait in progress is included. The use in progress is not.
    pub wall: Duration,
    /// The workers' times: `busy` reading to host slots, including the time for prefetch calls; `waiting` for a free
    /// slot or a generator's hook.
    pub read: StageTimes,
    /// The time spent in transforms.
    pub transform: Duration,
    /// The time of all completed copies from host to device, by the device's clock, or as the sender measured them
    /// ([`on_device`](Self::on_device)). Zero without a device.
    pub transfer: Duration,
    /// The size of these copies in bytes.
    pub transfer_bytes: u64,
    /// The caller's times: `waiting` from the request for a batch to its receipt, and to the end of its copy to a
    /// device; `busy` from then to the next request or [`Items::used`](crate::pipe::Items::used), without pauses, and
    /// in a generator's hook.
    pub train: StageTimes,
    /// The caller's times of the first step, which the verdict and [`au`](Self::au) leave out: the caller waits for the first
    /// batch, and programs compile, import and allocate.
    pub first: StageTimes,
    /// Statistics of file reads and prefetch, summed over all fields. They include batches that the caller has not
    /// received.
    pub reading: ReadStats,
    /// For each field of files: how the files are read, and why.
    pub choices: Vec<ReadChoice>,
    /// The times of the most recent epochs that delivered a batch, at most 64, oldest first. Empty for a generator.
    pub by_epoch: Vec<EpochTimes>,
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) kind: Kind,
    /// Whether a breakdown turned overlap off.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) by_breakdown: bool,
    /// Whether the builder or the environment turned it off.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) overlap_off: bool,
    /// Whether the caller sends the items to a device.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) sends: bool,
    /// Whether more workers need clones of data sets and transforms that may have none.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) needs_clones: bool,
    /// Whether with overlap a caller that waits loads too, if files are in memory.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) helps: bool,
    /// Whether a limit of memory counts the slots.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) limited: bool,
    /// The number of slots on a device.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) device_slots: usize,
    /// The number of loading threads that the builder starts if overlap is on.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) workers_with_overlap: usize,
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) parts: Parts,
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) first_step: FirstStep,
    /// The last batches.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) recent: Arc<[Seen]>,
}

/// Parts of the sums, for the verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Parts {
    /// How often the caller began to iterate.
    pub(super) starts: u64,
    /// The waits for the first batch of each iteration, the loads of these batches by workers as far as they fell into the
    /// wait, and the loads of the caller in it.
    pub(super) start_waits: Duration,
    pub(super) start_loads: Duration,
    pub(super) start_helped: Duration,
    /// The part of the waits, without those, in which a slot was kept that a load waited for.
    pub(super) held: Duration,
    /// The time of the loads that the caller did while it waited.
    pub(super) helped: Duration,
    /// The time of loads while the caller was not in the loop: before it asked for a first batch, or in a pause.
    pub(super) outside: Duration,
    /// The time of loads in the loop that the settings to try could move, into more slots, before the loop or into its first
    /// step.
    pub(super) early: Duration,
    /// The time in which a loading thread waited for a slot to be freed, while the caller was in the loop.
    pub(super) full: Duration,
    /// The part of the waits, without that for the first batch, in which the awaited batch was being loaded.
    pub(super) late: Duration,
    /// The pauses of the caller, which are in no other time here.
    pub(super) pauses: Duration,
}

/// What fell into the first step, [`Report::first`], for a verdict without it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FirstStep {
    /// The time of loads and of waits for slots, without those that count as outside of the loop.
    pub(super) loads: Duration,
    pub(super) slot_waits: Duration,
    /// The parts of these names.
    pub(super) start_loads: Duration,
    pub(super) helped: Duration,
    pub(super) full: Duration,
    /// The time of the copies to a device that began before its end.
    pub(super) copies: Duration,
    /// The caller's times before it asked for the batch of that step: of requests that brought none.
    pub(super) before: StageTimes,
    /// Whether it began in an earlier report, of which this one is the rest.
    pub(super) is_earlier: bool,
}

impl FirstStep {
    fn times(&mut self) -> [&mut Duration; 6] {
        let Self { loads, slot_waits, start_loads, helped, full, copies, .. } = self;
        [loads, slot_waits, start_loads, helped, full, copies]
    }
}

/// The kind of the items of a pipe or of a loop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Batches of records.
    #[default]
    Batches,
    /// Rounds of a generator. They have no steps.
    Rounds,
    /// Items of any iterable.
    Items,
    /// Items of an iterable that makes them ahead, with threads or processes of its own.
    Ahead,
    /// Groups of tensors. A stream of them has one thread and no option `workers`.
    #[cfg_attr(not(feature = "safetensors"), allow(dead_code, reason = "for a stream"))]
    Groups,
}

impl Report {
    pub(crate) fn new(kind: Kind, settings: Settings) -> Self {
        Self { kind, settings, workers_with_overlap: settings.workers, ..Self::default() }
    }

    /// Adds the figures that the readers of files count.
    pub(crate) fn with_reading<D: Units>(mut self, files: &[Arc<Reader<D>>]) -> Self {
        files.iter().for_each(|files| self.reading += files.stats());
        self.choices = files.iter().map(|files| files.choice()).collect();
        self
    }

    /// Records that an epoch begins, and adds its row. Rows of epochs without batches are removed.
    pub(crate) fn began(&mut self, epoch: u64) {
        self.epochs = self.epochs.saturating_add(1);
        self.by_epoch.retain(|row| row.batches > 0);
        self.by_epoch.drain(..self.by_epoch.len().saturating_sub(EPOCHS - 1));
        self.by_epoch.push(EpochTimes { epoch, ..EpochTimes::default() });
    }

    /// Counts a batch that the caller received.
    #[inline]
    pub(crate) fn received(&mut self, bytes: usize, io_calls: u64, now: Instant) {
        self.batches += 1;
        self.bytes = self.bytes.saturating_add(bytes as u64);
        self.io_calls += io_calls;
        if let Some(row) = self.by_epoch.last_mut() {
            row.batches += 1;
            row.first.get_or_insert(now);
        }
    }

    /// Adds an event of the log to the sums, and to those of the current epoch.
    #[inline]
    pub(crate) fn add(&mut self, event: &Event) {
        let (time, mut none) = (event.time(), EpochTimes::default());
        let row = self.by_epoch.last_mut().unwrap_or(&mut none);
        match event.what {
            What::Wait | What::CopyWait => {
                self.train.waiting += time;
                row.train.waiting += time;
            }
            What::Use | What::Prepare => {
                self.train.busy += time;
                row.train.busy += time;
            }
            What::Load => {
                self.read_bytes = self.read_bytes.saturating_add(event.bytes as u64);
                self.read.busy += time;
                row.load += time;
            }
            What::Transform => {
                self.transform += time;
                row.load += time;
            }
            What::SlotWait => self.read.waiting += time,
            What::Epoch | What::Step | What::Pause | What::Transfer => {}
        }
    }

    /// Returns the sum of this report and of a `later` one, for example of two iterations over the same source. The
    /// settings and `choices` are those of the later report. `first` is that of this report if it has a batch.
    #[must_use]
    pub fn then(&self, mut later: Self) -> Self {
        later.combine(self, u64::saturating_add, Duration::saturating_add);
        if self.batches > 0 {
            (later.first, later.first_step) = (self.first, self.first_step);
        }
        let rows = [&self.by_epoch[..], &later.by_epoch].concat();
        later.by_epoch = rows[rows.len().saturating_sub(EPOCHS)..].to_vec();
        let units = [&self.recent[..], &later.recent].concat();
        later.recent = units[units.len().saturating_sub(STEPS)..].into();
        later
    }

    /// Returns what was measured since an `earlier` report of the same loader, for example the second epoch without the
    /// first one, which filled the page cache. [`by_epoch`](Self::by_epoch) has the rows of the epochs whose first batches
    /// came since.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut since = self.clone();
        since.combine(earlier, u64::saturating_sub, Duration::saturating_sub);
        // The earlier report may have a part of the first step.
        let before = self.first_step.before;
        since.first = self.first.less(earlier.train.less(before));
        since.first_step.before = before.less(earlier.train);
        since.first_step.is_earlier |= earlier.batches > 0;
        let mut had = earlier.first_step;
        let step = since.first_step.times().into_iter().zip(had.times());
        step.for_each(|(time, had)| *time = time.saturating_sub(*had));
        since.by_epoch.retain(|row| earlier.by_epoch.iter().all(|before| before.first != row.first));
        let recent = self.recent.iter().filter(|seen| !earlier.recent.contains(seen));
        since.recent = recent.cloned().collect();
        since
    }

    /// Combines each sum with that of another report: replaces it by the result of `count` or `time`.
    fn combine(&mut self, with: &Self, count: fn(u64, u64) -> u64, time: fn(Duration, Duration) -> Duration) {
        let mut with = with.clone();
        self.counts().zip(with.counts()).for_each(|(sum, other)| *sum = count(*sum, *other));
        self.times().zip(with.times()).for_each(|(sum, other)| *sum = time(*sum, *other));
    }

    /// All sums that are counts.
    fn counts(&mut self) -> impl Iterator<Item = &mut u64> {
        let ReadStats { bytes, disk, hinted, hints, failed, .. } = &mut self.reading;
        let reading = [bytes, disk, hinted, hints, failed];
        let Self { epochs, batches, bytes, read_bytes, loads, io_calls, transfer_bytes, .. } = self;
        let pipe = [epochs, batches, bytes, read_bytes, loads, io_calls];
        pipe.into_iter().chain(reading).chain([transfer_bytes, &mut self.parts.starts])
    }

    /// All sums that are times.
    fn times(&mut self) -> impl Iterator<Item = &mut Duration> {
        let parts = &mut self.parts;
        let starts = [&mut parts.start_waits, &mut parts.start_loads, &mut parts.start_helped];
        let loads = [&mut parts.helped, &mut parts.outside, &mut parts.early, &mut parts.late];
        let others = [&mut parts.held, &mut parts.full, &mut parts.pauses];
        let Self { wall, transform, transfer, read, train, reading, .. } = self;
        let stages = [read, train].into_iter().flat_map(|stage| [&mut stage.busy, &mut stage.waiting]);
        let all = [wall, transform, transfer, &mut reading.hint_time];
        all.into_iter().chain(stages).chain(starts).chain(loads).chain(others)
    }

    /// Returns the report of a loop over batches that another thread receives from a loader and sends to a device.
    ///
    /// `self` is the report of the loop, for example by a [`LoopRecorder`](super::LoopRecorder). `sender` is the report
    /// of that loader: its uses are the copies. They end where the sender calls
    /// [`Items::used`](crate::pipe::Items::used) or asks for the next batch.
    #[must_use]
    pub fn on_device(self, sender: Self) -> Self {
        let (transfer, transfer_bytes) = (sender.train.busy, sender.bytes);
        // Each unit of the loop, with its load and its copy as the sender recorded them. Several may have the same name: it
        // is the last that the sender had before the loop did, and had after the unit before.
        let id = |seen: &Seen| (seen.ticket.place.epoch, seen.ticket.place.step);
        let mut before = None;
        let recent = self.recent.iter().filter_map(|seen| {
            let is_same = |sent: &&Seen| {
                id(sent) == id(seen) && sent.received <= seen.received && Some(sent.received) > before
            };
            let sent = sender.recent.iter().rev().find(is_same)?;
            before = Some(sent.received);
            Some(Seen { load: sent.load, copied: Some((sent.received, sent.released)), ..seen.clone() })
        });
        let recent = recent.collect();
        let Self { epochs, batches, wall, train, first, mut by_epoch, .. } = self;
        for row in &mut by_epoch {
            // The sender may be an epoch ahead of the loop.
            let is_same = |read: &&EpochTimes| read.epoch == row.epoch && read.first <= row.first;
            if let Some(read) = sender.by_epoch.iter().rev().find(is_same) {
                row.load = read.load;
            }
        }
        let Parts { start_loads, outside, early, late, .. } = sender.parts;
        let start_loads = start_loads.min(self.parts.start_waits);
        let parts = Parts { start_loads, outside, early, late, ..self.parts };
        // The first step of the loads is the sender's: it ends with its first copy.
        let first_step = FirstStep { copies: sender.first.busy, ..sender.first_step };
        let all = Self { epochs, batches, wall, train, first, first_step, by_epoch, recent, parts, ..sender };
        Self { transfer, transfer_bytes, ..all }
    }

    /// Returns the mean time of one worker. `all` is the sum over all workers.
    pub(super) fn each(&self, all: Duration) -> Duration {
        all / u32::try_from(self.settings.workers.max(1)).unwrap_or(u32::MAX)
    }

    /// Returns the accelerator utilization as defined by `MLPerf` Storage, from 0 to 1: the caller's compute time
    /// divided by the total time, without the first step. Returns `None` before the second batch was received, and if
    /// the caller waits for work that it enqueued on a device: the time of that work is not known.
    #[must_use]
    pub fn au(&self) -> Option<f64> {
        let total = self.wall.saturating_sub(self.first.busy + self.first.waiting);
        let busy = self.train.busy.saturating_sub(self.first.busy);
        let known = self.batches > 1 && !total.is_zero() && !self.waits_for_device();
        known.then(|| (busy.as_secs_f64() / total.as_secs_f64()).min(1.0))
    }

    /// Whether the caller waits for work on a device: it waits longer than loads or copies take, and the loading threads
    /// wait for slots meanwhile.
    pub(super) fn waits_for_device(&self) -> bool {
        let Self { first_step, parts, .. } = self;
        let loads = self.each(self.loads().saturating_sub(first_step.loads));
        // Of several loads at a time, the caller may wait for a long one.
        let before = loads.max(parts.late).max(self.transfer.saturating_sub(first_step.copies));
        let waiting = self.train.waiting.saturating_sub(self.first.waiting);
        self.transfer_bytes > 0
            && self.slot_waits() >= waiting.saturating_sub(before) / 2
            && waiting > before.mul_f64(1.25)
    }

    /// The time that one worker waited for slots, on average, at least: the rest may have been in pauses.
    pub(super) fn slot_waits(&self) -> Duration {
        let all = self.each(self.read.waiting.saturating_sub(self.first_step.slot_waits));
        all.saturating_sub(self.parts.pauses)
    }
}

/// Returns how many bytes, or batches, these are a second. Returns 0 if the time is zero.
pub(super) fn rate(number: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { number as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests;
