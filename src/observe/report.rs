//! Where the time went.

use std::time::Duration;

use std::sync::Arc;

use twinbuf_mmap::{ReadChoice, ReadStats, Reader};

use super::history::Recent;
use super::log::{Event, StageTimes, What};
use super::replay::Settings;

/// What decides how long an epoch takes: the stage that shortens it if it is faster. See [`Report::verdict`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum Verdict {
    /// Nothing was measured yet.
    Unmeasured,
    /// The caller's own work: a faster loader changes little.
    ComputeBound,
    /// Reading.
    DiskBound,
    /// The transform: a faster disk changes little.
    TransformBound,
    /// Copying to the device.
    TransferBound,
    /// Making the rounds of a [`Generator`](crate::generate::Generator).
    GenerationBound,
    /// Other threads that get the batches from the caller: their slots are free only when those are done.
    HeldBound,
    /// Several of them about equally, or only all of them together.
    Balanced,
}

/// The number of epochs that have rows in a report.
pub const EPOCHS: usize = 64;

/// Where the time of one epoch went: its part of the figures of a [`Report`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EpochTimes {
    /// The epoch.
    pub epoch: u64,
    /// Batches that the caller received.
    pub batches: u64,
    /// Their bytes.
    pub bytes: u64,
    /// System calls that read them.
    pub io_calls: u64,
    /// From the first time that a batch was asked for to the end; in the current epoch, to the batch in use.
    pub wall: Duration,
    /// Reading and transforming them, on all loading threads together.
    pub load: Duration,
    /// The caller: using them, and waiting for them.
    pub train: StageTimes,
}

/// Where the time of a loader's epochs went, up to now.
///
/// All times are wall-clock times, measured on every batch that the caller received.
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
    /// Epochs started.
    pub epochs: u64,
    /// Batches that the caller received.
    pub batches: u64,
    /// Their bytes, as they stood in the slots.
    pub bytes: u64,
    /// The bytes that were read for them: those of their records in the files or data sets, before any transform.
    pub read_bytes: u64,
    /// Batches whose load was started, for the caller or ahead of it.
    pub loads: u64,
    /// System calls that read the files of [`Records`](crate::Records), for these batches; 0 if another data set reads
    /// by other means.
    pub io_calls: u64,
    /// The number of loading threads; 1 if the caller loads. `read` and `transform` add up the time of all threads.
    pub workers: u64,
    /// From the first time that a batch of each epoch was asked for to its end, added up; a wait in progress is
    /// included, the batch in use is not.
    pub wall: Duration,
    /// Reading: disk to host slot, with the hints; waiting for a free slot.
    pub read: StageTimes,
    /// Transforming, on the reading thread as well.
    pub transform: Duration,
    /// Copies from the host to the device, by the device's clock, all that are done; nothing without a device.
    pub transfer: Duration,
    /// The bytes of those copies.
    pub transfer_bytes: u64,
    /// The time that the caller waited for the device and not for a batch, where that can be told: its work was only
    /// enqueued, the reading thread waited for slots too, and no copy accounts for it. 0 without a device.
    pub device: Duration,
    /// The caller: from receiving a batch, copied if it is on a device, to asking for the next; waiting for that.
    pub train: StageTimes,
    /// The caller's part of the very first step. The wait for the first batch makes that step unlike the others.
    pub first: StageTimes,
    /// What was read from files and prefetched, all fields together. It includes batches that are not received yet.
    pub reading: ReadStats,
    /// For each field that is files: how it is read, and why.
    pub choices: Vec<ReadChoice>,
    /// The last epochs, up to [`EPOCHS`], the oldest first. None for a generator.
    pub by_epoch: Vec<EpochTimes>,
    /// Whether this is the report of a generator.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) generated: bool,
    /// Whether a thread loads ahead of the caller: `false` also where the environment or a breakdown turned it off.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub overlap: bool,
    /// Host slots of each loading thread, and slots on the device.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) depth: usize,
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) device_depth: usize,
    /// A breakdown turned the overlap off.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) by_breakdown: bool,
    /// A round is started only when the caller has the one before.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) lockstep: bool,
    /// The last batches.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(super) recent: Arc<Recent>,
}

impl Report {
    pub(crate) fn new(rounds: bool, settings: Settings, device_depth: usize) -> Self {
        let Settings { overlap, depth, workers } = settings;
        let workers = workers as u64;
        Self { generated: rounds, overlap, workers, depth, device_depth, ..Self::default() }
    }

    /// What is counted elsewhere.
    pub(crate) fn with_transfers(self, loads: u64, transfer: Duration, transfer_bytes: u64) -> Self {
        // Where the caller waits longer than for any stage before the slots, while the reader waits for slots too, both
        // wait for what is behind them.
        let before = self.load_each().max(transfer);
        let unexplained = self.train.waiting.saturating_sub(before);
        let behind =
            self.each(self.read.waiting) >= unexplained / 2 && self.train.waiting > before.mul_f64(1.25);
        let device = if transfer_bytes > 0 && behind { self.train.waiting } else { Duration::ZERO };
        Self { loads, transfer, transfer_bytes, device, ..self }
    }

    /// What the readers of files count.
    pub(crate) fn with_reading(mut self, files: &[Arc<Reader>]) -> Self {
        files.iter().for_each(|files| self.reading += files.stats());
        self.choices = files.iter().map(|files| files.choice()).collect();
        self
    }

    /// An epoch began: it has a row from its first batch on.
    pub(crate) fn began(&mut self, epoch: u64) {
        self.epochs += 1;
        self.by_epoch.retain(|row| row.batches > 0);
        if self.by_epoch.len() == EPOCHS {
            self.by_epoch.remove(0);
        }
        self.by_epoch.push(EpochTimes { epoch, ..EpochTimes::default() });
    }

    /// A batch was received.
    pub(crate) fn received(&mut self, bytes: usize, io_calls: u64) {
        self.batches += 1;
        self.bytes += bytes as u64;
        self.io_calls += io_calls;
        if let Some(row) = self.by_epoch.last_mut() {
            row.batches += 1;
            row.bytes += bytes as u64;
            row.io_calls += io_calls;
        }
    }

    /// Adds an event of the log up.
    pub(crate) fn add(&mut self, event: &Event) {
        if matches!(event.what, What::Epoch | What::Step | What::Pause | What::Transfer) {
            return;
        }
        let (time, mut none) = (event.time(), None);
        let row = match self.by_epoch.last_mut() {
            Some(row) => row,
            None => none.insert(EpochTimes::default()),
        };
        match event.what {
            What::Wait | What::DeviceWait | What::CopyWait => {
                add([&mut self.train.waiting, &mut row.train.waiting, &mut self.wall, &mut row.wall], time);
            }
            What::Use | What::Prepare => {
                add([&mut self.train.busy, &mut row.train.busy, &mut self.wall, &mut row.wall], time);
            }
            What::Read | What::Generate => {
                self.read_bytes += event.bytes as u64;
                add([&mut self.read.busy, &mut row.load], time);
            }
            What::Transform => add([&mut self.transform, &mut row.load], time),
            What::SlotWait => self.read.waiting += time,
            What::Epoch | What::Step | What::Pause | What::Transfer => {}
        }
    }

    /// What each of the workers has of a time that is of all of them.
    fn each(&self, all: Duration) -> Duration {
        all / u32::try_from(self.workers.max(1)).unwrap_or(u32::MAX)
    }

    fn load_each(&self) -> Duration {
        self.each(self.read.busy + self.transform)
    }

    /// Returns the accelerator utilization as `MLPerf` Storage defines it: the caller's compute time over the total
    /// time, without the first step. `None` before the second step has ended.
    #[must_use]
    pub fn au(&self) -> Option<f64> {
        let total = self.wall.saturating_sub(self.first.busy + self.first.waiting);
        let busy = (self.train.busy + self.device).saturating_sub(self.first.busy);
        (self.batches > 1 && !total.is_zero()).then(|| (busy.as_secs_f64() / total.as_secs_f64()).min(1.0))
    }

    /// Batches that the caller received in a second of [`wall`](Self::wall); 0 if there is none.
    #[must_use]
    pub fn batches_per_second(&self) -> f64 {
        if self.wall.is_zero() { 0.0 } else { self.batches as f64 / self.wall.as_secs_f64() }
    }

    /// Bytes that the loading threads read in a second while all of them read; 0 before the first batch.
    #[must_use]
    pub fn read_rate(&self) -> f64 {
        rate(self.read_bytes, self.each(self.read.busy))
    }

    /// Bytes that were copied to the device in a second of copying; 0 without a device.
    #[must_use]
    pub fn transfer_rate(&self) -> f64 {
        rate(self.transfer_bytes, self.transfer)
    }
}

/// Adds a time to several sums.
fn add<const N: usize>(sums: [&mut Duration; N], time: Duration) {
    sums.into_iter().for_each(|sum| *sum += time);
}

fn rate(bytes: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { bytes as f64 / time.as_secs_f64() }
}

#[cfg(test)]
mod tests;
