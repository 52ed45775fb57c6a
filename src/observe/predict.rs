//! What replays tell: the time with other settings, the change that gains most, and the stage that decides.

use std::fmt::Write as _;
use std::time::Duration;

use super::display::{count, time};
use super::history::Recent;
use super::replay::{Hold, Machine, Outcome, Scale, Settings, Unit, replay};
use super::report::{Kind, Report, Verdict};

/// The predicted time of the last batches with other settings. [`Report::predict`] returns it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Prediction {
    /// The settings of the prediction.
    pub settings: Settings,
    /// The number of batches in the simulation: the most recent batches, at most 1024.
    pub batches: u64,
    /// The measured time of these batches.
    pub measured: Duration,
    /// The predicted time of these batches.
    pub wall: Duration,
    /// The part of `wall` in which the caller would wait for batches.
    pub waiting: Duration,
    /// The time that the loading threads would wait for free slots, summed over all threads.
    pub for_slots: Duration,
}

impl Prediction {
    /// Returns the fraction of the measured time that these settings save, for example 0.25 for a quarter. The value
    /// is negative if the settings take longer.
    #[must_use]
    pub fn gain(&self) -> f64 {
        1.0 - self.wall.as_secs_f64() / self.measured.as_secs_f64().max(1e-9)
    }
}

/// A change that gains less is not worth naming: runs differ as much by themselves.
const WORTH_IT: f64 = 0.03;

/// A smaller change is preferred to one that gains only this much more of the measured time.
const NEAR: f64 = 0.05;

/// How much faster a stage is made to see what that gains.
const FASTER: f64 = 0.9;

/// By how much the gain of one stage must exceed that of the others for it to decide alone.
const ALONE: f64 = 1.25;

/// Nanoseconds until a thread that sleeps is awake, where none was measured.
const WAKE: f64 = 30e3;

/// The batches to replay, and what they ran on.
struct Model {
    units: Vec<Unit>,
    machine: Machine,
    /// As it was measured.
    settings: Settings,
    measured: f64,
    /// What is measured over what is replayed with the same settings.
    ratio: f64,
}

impl Model {
    fn of(report: &Report) -> Self {
        let seen = &report.recent.units;
        let shares = report.recent.shares();
        let settings = report.settings();
        let processors = std::thread::available_parallelism().map_or(1.0, |number| number.get() as f64);
        let threads = if settings.overlap { settings.workers + 1 } else { 1 };
        // With threads enough to fill the processors, a thread waits for one that has another of these. If there are
        // fewer threads, it waits for another program, and that wait stays as it is.
        let crowded = threads as f64 > processors;
        let [load, train] = shares.map(|share| {
            let (wall, delay) = (f64::from(share.wall), f64::from(share.delay));
            if crowded && wall > 0.0 { 1.0 - delay / wall } else { 1.0 }
        });
        let cpu = |share: crate::thread::Share, part: f64| {
            let wall = f64::from(share.wall) * part;
            // A thread that was not looked at may need all of a processor.
            if wall > 0.0 { (f64::from(share.cpu) / wall).min(1.0) } else { 1.0 }
        };
        let mut units = report.recent.units(load, train);
        if !report.device.is_zero() {
            // The device has each batch after the caller, who only enqueues work.
            let threads = units.iter().map(|unit| match unit.hold {
                Hold::Lent { thread, .. } => thread + 1,
                _ => 0,
            });
            let thread = threads.max().unwrap_or(0);
            let service = report.device.as_nanos() as f64 / report.batches.max(1) as f64;
            units.iter_mut().for_each(|unit| unit.hold = Hold::Lent { thread, service });
        }
        // Where threads wait for a processor the replay lets them wait.
        let longest = if crowded { 3.0 * WAKE } else { f64::INFINITY };
        let awake =
            |measured: Option<f64>| measured.filter(|_| settings.overlap).unwrap_or(WAKE).min(longest);
        let [wake, start] = report.recent.wakes();
        let machine = Machine {
            processors,
            load_cpu: cpu(shares[0], load),
            train_cpu: cpu(shares[1], train),
            shared_disk: !report.choices.is_empty(),
            device_depth: report.device_depth,
            lockstep: report.lockstep,
            drains: !report.device.is_zero(),
            wake: awake(wake),
            start: awake(start),
        };
        let measured: Duration = seen.iter().map(super::history::Seen::wall).sum();
        let measured = measured.as_nanos() as f64;
        let mut model = Self { units, machine, settings, measured, ratio: 1.0 };
        if let Some(found) = model.run(settings, Scale::MEASURED).filter(|found| found.wall > 0.0) {
            model.ratio = measured / found.wall;
        }
        model
    }

    fn run(&self, settings: Settings, scale: Scale) -> Option<Outcome> {
        replay(&self.units, &self.machine, settings, scale)
    }

    fn predict(&self, settings: Settings) -> Option<Prediction> {
        if self.units.is_empty() || settings.workers == 0 || settings.depth == 0 {
            return None;
        }
        let found = self.run(settings, Scale::MEASURED)?;
        // What no thread explains has threads as its cause: without any there is none.
        let ratio = if settings.overlap == self.settings.overlap { self.ratio } else { 1.0 };
        Some(Prediction {
            settings,
            batches: self.units.len() as u64,
            measured: nanos(self.measured),
            wall: nanos(found.wall * ratio),
            waiting: nanos(found.waiting * ratio),
            for_slots: nanos(found.for_slots),
        })
    }

    /// The settings worth a try, the smallest change first: in slots, then in threads.
    fn candidates(&self, report: &Report) -> Vec<Settings> {
        let now = self.settings;
        if report.elsewhere {
            return Vec::new();
        }
        let mut all = vec![Settings { overlap: !now.overlap, ..now }];
        if report.kind == Kind::Rounds || (report.kind == Kind::Items && !now.overlap) {
            return all;
        }
        // The others have one thread.
        let more: &[usize] = if report.kind == Kind::Batches { &[0, 1, 2, 4] } else { &[0] };
        for workers in more.iter().map(|more| now.workers + more) {
            // As many slots beyond the workers as now, and more.
            for more in [0, 1, 2, 4] {
                let depth = (now.depth + (workers - now.workers) + more).max(workers + 1);
                all.push(Settings { overlap: true, depth, workers });
            }
        }
        let slots = |settings: &Settings| if settings.overlap { settings.depth } else { 0 };
        all.sort_by_key(|settings| (slots(settings), settings.workers));
        all.dedup();
        all.retain(|settings| *settings != now);
        all
    }

    /// The smallest change that gains, if none gains much more.
    fn recommended(&self, report: &Report) -> Option<Prediction> {
        let candidates = self.candidates(report);
        let found: Vec<_> = candidates.into_iter().filter_map(|settings| self.predict(settings)).collect();
        let best = found.iter().map(|found| found.wall).min()?;
        let near = best + nanos(self.measured * NEAR);
        found.into_iter().find(|found| found.gain() >= WORTH_IT && found.wall <= near)
    }

    /// With all iterations as one.
    fn at_once(&mut self) -> Option<Prediction> {
        let calls = self.units.iter_mut().skip(1).filter_map(|unit| unit.lead.take()).count();
        if calls == 0 { None } else { self.predict(self.settings) }
    }

    /// How much of the time each stage saves if it is faster: read, transform, transfer, train, other threads.
    fn gains(&self) -> Option<[f64; 5]> {
        let wall = self.run(self.settings, Scale::MEASURED)?.wall;
        let same = Scale::MEASURED;
        let faster = [
            Scale { read: FASTER, ..same },
            Scale { transform: FASTER, ..same },
            Scale { transfer: FASTER, ..same },
            Scale { train: FASTER, ..same },
            Scale { lent: FASTER, ..same },
        ];
        let mut gains = [0.0; 5];
        for (gain, scale) in gains.iter_mut().zip(faster) {
            *gain = if wall > 0.0 { 1.0 - self.run(self.settings, scale)?.wall / wall } else { 0.0 };
        }
        Some(gains)
    }
}

fn nanos(time: f64) -> Duration {
    Duration::try_from_secs_f64(time * 1e-9).unwrap_or_default()
}

impl Report {
    /// Returns the settings that the loader ran with.
    #[must_use]
    pub fn settings(&self) -> Settings {
        let workers = usize::try_from(self.workers).unwrap_or(usize::MAX);
        Settings { overlap: self.overlap, depth: self.depth, workers }
    }

    /// Predicts the time of the last batches, at most 1024, with other settings. A simulation of the loader replays
    /// their measured times. The call takes about a millisecond.
    ///
    /// In the simulation, loading and use share the processors. All files are on one disk, and more workers do not
    /// make the disk faster. The simulation assumes that the time of a single load or use does not depend on the
    /// settings; this is not true, for example, if the system reads ahead.
    ///
    /// Returns `None` if nothing was measured, if `workers` or `depth` is 0, or if the caller would wait for a slot
    /// that the caller itself occupies. More workers or slots than replayed batches change nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// # use twinbuf::{Report, observe::Settings};
    /// # fn f(report: &Report) {
    /// if let Some(found) = report.predict(Settings { workers: 2, ..report.settings() }) {
    ///     println!("2 workers: {:?} in place of {:?}", found.wall, found.measured);
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn predict(&self, settings: Settings) -> Option<Prediction> {
        Model::of(self).predict(settings)
    }

    /// Limits [`predict`](Self::predict), [`recommended`](Self::recommended), [`advice`](Self::advice) and
    /// [`verdict`](Self::verdict) to the last `batches` batches. Use it, for example, to exclude the first epoch,
    /// because the first epoch fills the page cache.
    #[must_use]
    pub fn of_last(mut self, batches: usize) -> Self {
        let units = &self.recent.units;
        let units = units[units.len().saturating_sub(batches)..].to_vec();
        self.recent = Recent { units }.into();
        self
    }

    /// Several predictions, for a table.
    pub(super) fn predict_all(&self, all: impl Iterator<Item = Settings>) -> Vec<Option<Prediction>> {
        let model = Model::of(self);
        all.map(|settings| model.predict(settings)).collect()
    }

    /// Returns the smallest change of settings that saves at least 3 % of the time, unless a larger change saves at
    /// least 5 percentage points more. Returns `None` if no change saves 3 %.
    ///
    /// It tries to toggle overlap, up to 4 more slots, and up to 4 more workers, each with one more slot. For a
    /// generator it tries only to toggle overlap. For a stream of tensors it tries overlap and slots.
    #[must_use]
    pub fn recommended(&self) -> Option<Prediction> {
        Model::of(self).recommended(self)
    }

    /// Returns advice as text: the change of [`recommended`](Self::recommended) with its predicted saving, for a
    /// loader the advice to iterate over all epochs with one call of [`Loader::epochs`](crate::Loader::epochs), or
    /// the reason why no change helps.
    #[must_use]
    pub fn advice(&self) -> String {
        let mut model = Model::of(self);
        let recommended = model.recommended(self);
        let verdict = verdict(&model, self);
        if self.kind == Kind::Batches && verdict != Verdict::Unmeasured {
            let least = recommended.map_or(1.0, |found| 1.0 - found.gain());
            let at_once = model.at_once().filter(|found| 1.0 - found.gain() <= least - WORTH_IT);
            if let Some(found) = at_once {
                return format!("Ask for all epochs at once, with `epochs(..)`: {}", gains(&found));
            }
        }
        if let Some(found) = recommended {
            return format!("{}: {}", change(self, found.settings), gains(&found));
        }
        let stream = self.kind == Kind::Groups;
        let why = match verdict {
            Verdict::Unmeasured => return "Nothing was measured.".to_string(),
            Verdict::ComputeBound => "the compute decides",
            Verdict::DiskBound if stream => {
                "the disk decides: try another `ReadMode`, keep more groups in memory, or use a faster disk"
            }
            Verdict::DiskBound => {
                "the disk decides: try another `ReadMode`, smaller records, or a faster disk"
            }
            Verdict::LoadBound if self.elsewhere => "the workers decide: start more, or make loading cheaper",
            Verdict::LoadBound => "the loading decides: make it cheaper, or use several processes",
            Verdict::TransformBound => "the transform decides: make it cheaper, or store its result",
            Verdict::TransferBound if stream => {
                "the copy to the device decides: store the tensors in a smaller type"
            }
            Verdict::TransferBound => "the copy to the device decides: send smaller numbers",
            Verdict::GenerationBound => "the closure decides: make it faster",
            Verdict::HeldBound if stream => "the threads that use the groups decide: make them faster",
            Verdict::HeldBound => "the threads that use the batches decide: make them faster",
            Verdict::Balanced => "the stages are balanced, and only making both faster helps",
        };
        let whose = if stream { "stream" } else { "loader" };
        format!("No option of the {whose} gains 3 %: {why}.")
    }

    /// Returns the bottleneck: the stage that would save the most time if it were faster, in a simulation of the
    /// last batches. Returns [`Verdict::Unmeasured`] if nothing was measured.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        if self.recent.units.is_empty() {
            return Verdict::Unmeasured;
        }
        verdict(&Model::of(self), self)
    }
}

fn verdict(model: &Model, report: &Report) -> Verdict {
    let read = match report.kind {
        Kind::Rounds => Verdict::GenerationBound,
        Kind::Items => Verdict::LoadBound,
        Kind::Batches | Kind::Groups => Verdict::DiskBound,
    };
    // The device has what the caller has enqueued.
    let lent = if report.device.is_zero() { Verdict::HeldBound } else { Verdict::ComputeBound };
    let stages = [read, Verdict::TransformBound, Verdict::TransferBound, Verdict::ComputeBound, lent];
    let Some([read, transform, transfer, train, lent]) = model.gains().filter(|_| model.measured > 0.0)
    else {
        return Verdict::Unmeasured;
    };
    // One thread does both.
    let load = read + transform;
    let sides = [load, transfer, train, lent];
    let [first, second] =
        sides.iter().fold(
            [0.0; 2],
            |[first, second], &gain| {
                if gain > first { [gain, first] } else { [first, second.max(gain)] }
            },
        );
    // One that is not reached by the others, or that several share.
    if first < WORTH_IT || first < ALONE * second {
        return Verdict::Balanced;
    }
    if load == first {
        return if transform > read { stages[1] } else { stages[0] };
    }
    match [transfer, train, lent].iter().position(|&gain| gain == first) {
        Some(at) => stages[at + 2],
        None => Verdict::Balanced,
    }
}

/// What it gains, as the end of a sentence.
fn gains(found: &Prediction) -> String {
    let Prediction { batches, measured, wall, .. } = *found;
    let batches = count(batches, "batch", "batches");
    format!(
        "{:.0} % less, {} in place of {} for the last {batches} (replayed).",
        found.gain() * 100.0,
        time(wall),
        time(measured)
    )
}

/// The calls that change the settings.
fn change(report: &Report, to: Settings) -> String {
    let from = report.settings();
    if to.overlap && !from.overlap && report.by_breakdown {
        return "Turn the breakdown off, which turns the overlap off".to_string();
    }
    let mut calls = String::new();
    let mut call = |text: String| {
        let and = if calls.is_empty() { "Set " } else { " and " };
        let _ = write!(calls, "{and}`{text}`");
    };
    if to.overlap != from.overlap {
        call(format!("overlap({})", to.overlap));
    }
    if to.workers != from.workers {
        call(format!("workers({})", to.workers));
    }
    if to.depth != from.depth {
        call(format!("depth({})", to.depth));
    }
    calls
}
