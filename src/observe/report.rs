//! Where the time went, and what overlap can still gain.

use std::fmt;
use std::time::Duration;

use twinbuf_mmap::HintStats;

use crate::slot::LoadStats;

/// What one stage did with its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StageTimes {
    /// Time spent on its own work.
    pub busy: Duration,
    /// Time spent waiting for the other stage.
    pub waiting: Duration,
}

/// Which stage decides how long an epoch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum Verdict {
    /// Nothing was measured yet.
    Unmeasured,
    /// The caller's own work is at least [`BOUND_RATIO`] times the reading: a faster loader changes little.
    ComputeBound,
    /// Reading and transforming is at least [`BOUND_RATIO`] times the caller's own work, and the reading is the larger
    /// part of it: overlap hides the work, not the disk.
    DiskBound,
    /// Reading and transforming is at least [`BOUND_RATIO`] times the caller's own work, and the transform is the
    /// larger part of it: a faster disk changes little.
    TransformBound,
    /// Copying to the device is at least [`BOUND_RATIO`] times everything else that goes on beside it.
    TransferBound,
    /// Of a [`Generator`](crate::generate::Generator): making the rounds is at least [`BOUND_RATIO`] times the
    /// caller's own work.
    GenerationBound,
    /// None of them is so much longer than the others: here overlap gains the most, up to half of the time.
    Balanced,
}

/// From this speedup on an option is worth naming: below it, runs differ as much by themselves.
const WORTH_IT: f64 = 1.05;

/// By how much one stage must exceed the other to be said to decide alone.
pub const BOUND_RATIO: f64 = 1.25;

/// Where the time of a loader's epochs went, up to now.
///
/// All times are wall-clock times, measured on every batch that the caller received.
///
/// # Examples
///
/// ```
/// # use twinbuf::{BatchPlan, BoxError, Dataset, Loader, Plan};
/// # struct Zeros;
/// # impl Dataset for Zeros {
/// #     fn records(&self) -> u64 { 64 }
/// #     fn record_bytes(&self) -> usize { 4 }
/// #     fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> { Ok(out.len()) }
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
    /// Batches whose load was started, for the caller or ahead of it.
    pub loads: u64,
    /// The number of loading threads; 1 if the caller loads. `read` and `transform` add up the time of all threads.
    pub workers: u64,
    /// From the first time that a batch of each epoch was asked for to its end, added up; the batch in use not yet.
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
    /// The caller's part of the very first step, which the wait for the first batch makes unlike the others.
    pub first: StageTimes,
    /// The page hints made.
    pub hints: HintStats,
    /// Batches whose pages could not be given up as [`cache_policy`](crate::loader::LoaderBuilder::cache_policy) asks.
    pub evict_failed: u64,
    /// Of a generator.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) generated: bool,
    /// Whether a thread loads ahead of the caller: `false` also where the environment or a breakdown turned it off.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub overlap: bool,
}

impl Report {
    pub(crate) fn new(rounds: bool, overlap: bool, workers: usize) -> Self {
        Self { generated: rounds, overlap, workers: workers as u64, ..Self::default() }
    }

    /// What is counted elsewhere.
    pub(crate) fn with_transfers(self, loads: u64, transfer: Duration, transfer_bytes: u64) -> Self {
        // Where the caller waits longer than for any stage before the slots, while the reader waits for slots too,
        // both wait for what stands behind them.
        let before = self.load_each().max(transfer);
        let unexplained = self.train.waiting.saturating_sub(before);
        let behind = self.each(self.read.waiting) >= unexplained / 2
            && self.train.waiting > before.mul_f64(BOUND_RATIO);
        let device = if transfer_bytes > 0 && behind { self.train.waiting } else { Duration::ZERO };
        Self { loads, transfer, transfer_bytes, device, ..self }
    }

    /// A batch was received.
    pub(crate) fn add(&mut self, stats: &LoadStats, bytes: usize, waited: Duration) {
        self.batches += 1;
        self.bytes += bytes as u64;
        self.read.busy += stats.read;
        self.read.waiting += stats.waited;
        self.transform += stats.transform;
        self.train.waiting += waited;
        self.hints += stats.hints;
        self.evict_failed += stats.evict_failed;
    }

    /// Returns the time that reading, transforming, copying to the device and the caller's work take one after the
    /// other.
    #[must_use]
    pub fn serial(&self) -> Duration {
        let [_, transfer, train] = self.stages();
        self.read.busy + self.transform + transfer + train
    }

    /// A reading thread's share of the loads, the copies to the device, and the caller's work.
    fn stages(&self) -> [Duration; 3] {
        [self.load_each(), self.transfer, self.train.busy + self.device]
    }

    /// What each of the workers has of a time that is of all of them.
    fn each(&self, all: Duration) -> Duration {
        all / u32::try_from(self.workers.max(1)).unwrap_or(u32::MAX)
    }

    fn load_each(&self) -> Duration {
        self.each(self.read.busy + self.transform)
    }

    /// Returns what perfect overlap would take: the longest of the loads, the copies to the device and the caller's
    /// work, each added up, the loads divided by the number of [`workers`](Self::workers). No overlap takes less,
    /// with however many slots.
    ///
    /// Two slots come near it where the batches are alike. Where now the one and now the other takes longer, more of
    /// them are needed. And the first load of an epoch and its last use have nothing beside them: where epochs have
    /// very few batches, that much is out of reach.
    #[must_use]
    pub fn ideal(&self) -> Duration {
        self.stages().into_iter().max().unwrap_or_default()
    }

    /// Returns how many times faster perfect overlap is than one stage after the other: `serial / ideal`, from 1 to
    /// the number of stages and of workers beyond the first together.
    #[must_use]
    pub fn possible_speedup(&self) -> f64 {
        ratio(self.serial(), self.ideal())
    }

    /// How many times faster than it was perfect overlap would be: `wall / ideal`. This much overlap can still
    /// gain at most.
    #[must_use]
    pub fn remaining_speedup(&self) -> f64 {
        ratio(self.wall, self.ideal()).max(1.0)
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

    /// Recommends a change: one sentence that names the option, if one helps.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        let remaining = self.remaining_speedup();
        match self.verdict() {
            Verdict::Unmeasured => "Nothing was measured.",
            _ if !self.overlap && self.possible_speedup() > WORTH_IT => "Set `overlap(true)`: it is off.",
            _ if self.overlap && self.wall > self.serial().mul_f64(BOUND_RATIO) => {
                "It took longer than one stage after the other: steps this short are dominated by waking threads, or \
                 other programs use the processors. Try `overlap(false)`, or larger batches."
            }
            _ if remaining > WORTH_IT && self.first.waiting * 2 > self.wall.saturating_sub(self.ideal()) => {
                "Most of that is the wait for the first batch, which nothing hides."
            }
            _ if remaining > WORTH_IT && self.overlap => {
                "Raise `host_depth`: single batches take longer than the others."
            }
            Verdict::ComputeBound => "The compute decides: no option of the loader makes this faster.",
            Verdict::DiskBound => {
                "The disk decides: try another `ReadMode`, smaller records, or a faster disk; or, if the data set \
                 decodes, more `workers`."
            }
            Verdict::TransformBound => {
                "The transform decides: raise `workers`, make it cheaper, or store its result."
            }
            Verdict::TransferBound => "The copy to the device decides: send smaller numbers.",
            Verdict::GenerationBound => "The closure decides: make it faster.",
            Verdict::Balanced => "The stages are balanced: only making both faster helps.",
        }
    }

    /// Returns which stage limits the run.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let [load, transfer, train] = self.stages().map(|time| time.as_secs_f64());
        let dominates = |stage: f64, a: f64, b: f64| stage >= BOUND_RATIO * a.max(b);
        if self.batches == 0 || self.serial().is_zero() {
            Verdict::Unmeasured
        } else if dominates(train, load, transfer) {
            Verdict::ComputeBound
        } else if dominates(transfer, load, train) {
            Verdict::TransferBound
        } else if dominates(load, transfer, train) {
            match self.generated {
                true => Verdict::GenerationBound,
                false if self.transform > self.read.busy => Verdict::TransformBound,
                false => Verdict::DiskBound,
            }
        } else {
            Verdict::Balanced
        }
    }
}

fn count(many: u64, one: &str, more: &str) -> String {
    format!("{many} {}", if many == 1 { one } else { more })
}

fn ratio(a: Duration, b: Duration) -> f64 {
    if b.is_zero() { 1.0 } else { a.as_secs_f64() / b.as_secs_f64() }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unmeasured => "Unmeasured",
            Self::ComputeBound => "ComputeBound",
            Self::DiskBound => "DiskBound",
            Self::TransformBound => "TransformBound",
            Self::TransferBound => "TransferBound",
            Self::GenerationBound => "GenerationBound",
            Self::Balanced => "Balanced",
        })
    }
}

/// A few lines of text: the times of both stages, then the verdict and what overlap can still gain.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Short runs in milliseconds, so that their figures have digits.
        let (unit, scale) = if self.wall < Duration::from_millis(500) { ("ms", 1e3) } else { ("s", 1.0) };
        let time = |time: Duration| time.as_secs_f64() * scale;
        let mib = |bytes: u64| {
            #[allow(clippy::cast_precision_loss)] // a size to read, not to calculate with
            let mib = bytes as f64 / f64::from(1 << 20);
            mib
        };
        if self.generated {
            write!(f, "{}", count(self.batches, "round", "rounds"))?;
        } else {
            let epochs = count(self.epochs, "epoch", "epochs");
            let batches = count(self.batches, "batch", "batches");
            write!(f, "{epochs}, {batches}, {:.1} MiB", mib(self.bytes))?;
        }
        write!(f, " in {:.3} {unit}, {:.1} a second", time(self.wall), self.batches_per_second())?;
        match self.au() {
            Some(au) => writeln!(f, ", AU {au:.3}")?,
            None => writeln!(f)?,
        }
        writeln!(f, "{:<9} {:>8} {:>10}", "stage", format!("busy {unit}"), format!("waiting {unit}"))?;
        let row = |f: &mut fmt::Formatter<'_>, name, stage: StageTimes| {
            writeln!(f, "{name:<9} {:>8.3} {:>10.3}", time(stage.busy), time(stage.waiting))
        };
        row(f, if self.generated { "generate" } else { "read" }, self.read)?;
        if !self.transform.is_zero() {
            writeln!(f, "transform {:>8.3}", time(self.transform))?;
        }
        if self.transfer_bytes > 0 {
            let each_second = mib(self.transfer_bytes) / self.transfer.as_secs_f64().max(1e-9);
            writeln!(f, "transfer  {:>8.3}    at {each_second:.0} MiB/s", time(self.transfer))?;
        }
        if !self.device.is_zero() {
            writeln!(f, "device    {:>8.3}    of the caller's waiting", time(self.device))?;
        }
        row(f, "train", self.train)?;
        if self.hints.calls > 0 {
            writeln!(
                f,
                "page hints: {:.1} MiB in {} calls, {:.3} {unit} of the reading",
                mib(self.hints.bytes),
                self.hints.calls,
                time(self.hints.time)
            )?;
        }
        if self.evict_failed > 0 {
            writeln!(f, "pages of {} batches could not be given up", self.evict_failed)?;
        }
        writeln!(
            f,
            "{}: one after the other {:.3} {unit}, at best {:.3} {unit} ({:.2} x). Better overlap can still gain {:.1} %.",
            self.verdict(),
            time(self.serial()),
            time(self.ideal()),
            self.possible_speedup(),
            (1.0 - 1.0 / self.remaining_speedup()) * 100.0,
        )?;
        f.write_str(self.advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(read_ms: u64, train_ms: u64, wall_ms: u64) -> Report {
        let ms = Duration::from_millis;
        Report {
            batches: 1,
            wall: ms(wall_ms),
            read: StageTimes { busy: ms(read_ms), waiting: ms(0) },
            train: StageTimes { busy: ms(train_ms), waiting: ms(0) },
            ..Report::default()
        }
    }

    #[test]
    fn the_verdict_names_the_stage_that_decides() {
        assert_eq!(Report::default().verdict(), Verdict::Unmeasured);
        for (read, train, verdict) in [
            (0, 0, Verdict::Unmeasured), // by a clock too coarse for it
            (100, 10_000, Verdict::ComputeBound),
            (100, 125, Verdict::ComputeBound),
            (100, 124, Verdict::Balanced),
            (100, 100, Verdict::Balanced),
            (124, 100, Verdict::Balanced),
            (125, 100, Verdict::DiskBound),
            (10_000, 100, Verdict::DiskBound),
        ] {
            assert_eq!(report(read, train, 0).verdict(), verdict, "read {read}, train {train}");
        }
    }

    #[test]
    fn time_that_both_sides_wait_is_the_devices() {
        let ms = Duration::from_millis;
        let stage = |busy, waiting| StageTimes { busy: ms(busy), waiting: ms(waiting) };
        let of = |read: StageTimes, train: StageTimes, transfer| {
            let report = Report { batches: 1, wall: ms(4000), read, train, ..Report::default() };
            report.with_transfers(1, ms(transfer), u64::from(transfer > 0))
        };
        // Only enqueued: the caller waits for the device, and so does the reader.
        let enqueued = of(stage(1000, 3000), stage(10, 3990), 500);
        assert_eq!((enqueued.device, enqueued.verdict()), (ms(3990), Verdict::ComputeBound));
        assert!(
            (enqueued.remaining_speedup() - 1.0).abs() < 1e-9,
            "better overlap gains nothing: {enqueued}"
        );
        // Waits that have another cause.
        for (read, train, transfer, verdict) in [
            (stage(3900, 100), stage(10, 3990), 500, Verdict::DiskBound),
            (stage(1000, 3000), stage(10, 3990), 3900, Verdict::TransferBound),
            (stage(1000, 3000), stage(3900, 100), 500, Verdict::ComputeBound),
            (stage(2000, 0), stage(10, 3990), 1990, Verdict::Balanced), // without overlap
            (stage(1000, 3000), stage(10, 3990), 0, Verdict::DiskBound), // without a device
        ] {
            let report = of(read, train, transfer);
            assert_eq!((report.device, report.verdict()), (ms(0), verdict), "{report}");
        }
    }

    #[test]
    fn nothing_takes_less_than_its_longest_stage() {
        let ms = Duration::from_millis;
        let stage = |busy, waiting| StageTimes { busy: ms(busy), waiting: ms(waiting) };
        // Only enqueued: when the caller is done with a batch its copy is still on its way.
        let (read, train) = (stage(200, 3800), stage(10, 3990));
        let enqueued =
            Report { batches: 10, wall: ms(4000), read, train, overlap: true, ..Report::default() };
        let report = enqueued.with_transfers(10, ms(3900), 1);
        assert_eq!((report.verdict(), report.ideal()), (Verdict::TransferBound, ms(3900)), "{report}");
        assert!(report.to_string().contains("Better overlap can still gain 2.5 %."), "{report}");
        assert!(report.to_string().ends_with("send smaller numbers."), "{report}");
        // A transform is the reading thread's work.
        let transformed = Report { transform: ms(900), ..self::report(200, 1000, 2000) };
        assert_eq!(transformed.ideal(), ms(1100), "{transformed}");
    }

    #[test]
    fn accelerator_utilization_leaves_the_first_step_aside() {
        let ms = Duration::from_millis;
        let first = StageTimes { busy: ms(10), waiting: ms(190) };
        // 1000 ms in all, 200 of them the first step; 10 + 600 ms of compute.
        let report = Report { batches: 61, first, ..report(500, 610, 1000) };
        assert!((report.au().unwrap() - 600.0 / 800.0).abs() < 1e-9, "{report}");
        assert!((report.batches_per_second() - 61.0).abs() < 1e-9);
        assert!(report.to_string().contains("61.0 a second, AU 0.750\n"), "{report}");
        assert_eq!(Report { batches: 1, ..report }.au(), None);
        assert_eq!(Report::default().au(), None);
    }

    #[test]
    fn the_gains_are_ratios_to_perfect_overlap() {
        let balanced = report(1000, 1000, 2000);
        assert!((balanced.possible_speedup() - 2.0).abs() < 1e-9);
        assert!((balanced.remaining_speedup() - 2.0).abs() < 1e-9);
        assert!(balanced.to_string().contains("Better overlap can still gain 50.0 %."), "{balanced}");
        assert_eq!(balanced.advice(), "Set `overlap(true)`: it is off.");
        let overlapped = Report { overlap: true, ..balanced };
        assert!(overlapped.advice().starts_with("Raise `host_depth`"), "{overlapped}");
        let first = StageTimes { busy: Duration::ZERO, waiting: Duration::from_millis(600) };
        let cold = Report { first, ..overlapped };
        assert!(cold.advice().contains("the first batch"), "{cold}");

        // Compute 99 to 1: there is nothing to gain, with overlap or without.
        let dominated = report(10, 990, 991);
        assert!((dominated.possible_speedup() - 1000.0 / 990.0).abs() < 1e-9);
        assert!(dominated.to_string().contains("ComputeBound"), "{dominated}");
        assert!(dominated.to_string().contains("Better overlap can still gain 0.1 %."), "{dominated}");
        assert!(dominated.to_string().ends_with("no option of the loader makes this faster."), "{dominated}");

        // Slower than without: no overlap is to be made better then.
        let small = Report { overlap: true, ..report(3, 2, 22) };
        assert!(small.to_string().starts_with("0 epochs, 1 batch, "), "{small}");
        assert!(small.to_string().starts_with("0 epochs, 1 batch, 0.0 MiB in 22.000 ms, "), "{small}");
        assert!(small.advice().contains("waking threads"), "{small}");
        // Without a thread there is none to wake.
        assert!(!Report { overlap: false, ..small }.advice().contains("waking"));

        // The first read took its time and failed.
        let nothing = Report { epochs: 1, wall: Duration::from_millis(22), ..Report::default() };
        assert!(nothing.to_string().contains("Better overlap can still gain 0.0 %."), "{nothing}");

        // Hints make a read look shorter than the disk was busy: never a gain below nothing.
        assert!((report(500, 1000, 900).remaining_speedup() - 1.0).abs() < 1e-9);
        assert!((Report::default().possible_speedup() - 1.0).abs() < 1e-9);
    }
}
