//! What replays tell: the time with other settings, the change that gains most, and the stage that decides.

use std::fmt::Write as _;
use std::time::Duration;

use super::display::{count, time};
use super::history::{Recent, Seen};
use super::replay::{Hold, Machine, Scale, Settings, Unit, replay};
use super::report::{Kind, Report, Verdict};
use crate::thread::Share;

/// The predicted time of the last batches with other settings. [`Report::predict`] returns it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Prediction {
    /// The settings of the prediction.
    pub settings: Settings,
    /// The number of batches in the replay: the most recent batches, at most 1024.
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

/// Fewer batches, or nanoseconds of them, say nothing about the next.
const LEAST: (usize, f64) = (8, 20e6);

/// How far a replay with the measured settings may be from the measured time.
const MISFIT: f64 = 0.05;

/// The part of the time that our threads may wait for processors that other programs have.
const BUSY: f64 = 0.05;

/// What our threads wanted of the processors, loads first, then uses.
struct Demand {
    /// The parts of their time that they had one, and that they waited for one.
    cpu: [f64; 2],
    delay: [f64; 2],
    /// How many of them had one, on average.
    had: f64,
    /// The part of the time that they wait for one if nobody else wants any.
    ours: f64,
    /// They waited for longer: other programs have a part of the processors.
    busy: bool,
}

impl Demand {
    fn of(recent: &Recent, measured: f64, processors: f64) -> Self {
        let part = |time: f32, share: &Share| (share.wall > 0.0).then(|| f64::from(time / share.wall));
        let shares = recent.shares();
        // A thread that was not looked at may need all of a processor.
        let cpu = shares.each_ref().map(|share| part(share.cpu, share).map_or(1.0, |cpu| cpu.min(1.0)));
        let delay =
            shares.each_ref().map(|share| part(share.delay, share).map_or(0.0, |delay| delay.min(0.95)));
        let (mut load, mut train) = (0.0, 0.0);
        for unit in recent.units(1.0, 1.0) {
            load += (unit.read + unit.transform) / measured.max(1.0);
            train += unit.train / measured.max(1.0);
        }
        let had = load * cpu[0] + train * cpu[1];
        let wanted = (had + load * delay[0] + train * delay[1]).max(1e-9);
        let ours = (1.0 - processors / wanted).max(0.0);
        Self { cpu, delay, had, ours, busy: 1.0 - had / wanted > ours + BUSY }
    }
}

/// The batches to replay, and what they ran on.
struct View {
    units: Vec<Unit>,
    machine: Machine,
    /// What is measured over what is replayed with the same settings. Not a number if the replay has no end.
    ratio: f64,
    /// How much longer than the caller other threads use what they were lent, with these settings.
    lent: f64,
}

/// Two views of what was measured. Threads waited for processors, and the system does not tell who had them: in the first
/// view others did, and will; in the second our own threads did, as far as they explain it.
struct Model {
    views: [View; 2],
    /// As it was measured.
    settings: Settings,
    measured: f64,
    busy: bool,
    /// The loads take turns: more threads load no faster.
    turns: bool,
}

impl Model {
    fn of(report: &Report) -> Self {
        let (recent, settings) = (&report.recent, report.settings());
        let measured: Duration = recent.units.iter().map(Seen::wall).sum();
        let measured = measured.as_nanos() as f64;
        let processors = std::thread::available_parallelism().map_or(1.0, |number| number.get() as f64);
        let demand = Demand::of(recent, measured, processors);
        let (files, loads) = (!report.choices.is_empty(), recent.side_by_side());
        let turns = !files && demand.cpu[0] < 0.9 && loads > 1.5 && recent.takes_turns();
        let view = |explained: f64, processors: f64, longest_wake: f64| {
            let [load, train] = demand.delay.map(|delay| 1.0 - delay.min(explained));
            let load_cpu = (demand.cpu[0] / load).min(1.0);
            // More threads make neither a disk faster nor what they take turns at.
            let serial = if turns {
                1.0
            } else if files {
                1.0 - load_cpu
            } else {
                0.0
            };
            let wake = |measured: Option<f64>| {
                measured.filter(|_| settings.overlap).unwrap_or(WAKE).min(longest_wake)
            };
            let [wake, start] = recent.wakes().map(wake);
            let machine = Machine {
                processors,
                load_cpu,
                train_cpu: (demand.cpu[1] / train).min(1.0),
                serial: serial / loads,
                device_depth: report.device_depth,
                lockstep: report.lockstep,
                wake,
                start,
            };
            let mut units = recent.units(load, train);
            if !report.device.is_zero() {
                on_device(&mut units, report);
            }
            let now = replay(&units, &machine, settings, Scale::MEASURED);
            let lent = now.map_or(0.0, |now| now.end - now.wall);
            let now = now.filter(|now| now.wall > 0.0);
            let ratio = now.map_or(f64::NAN, |now| measured / now.wall);
            View { units, machine, ratio, lent }
        };
        let left = if demand.busy { demand.had.clamp(0.1, processors) } else { processors };
        let views = [view(0.0, left, f64::INFINITY), view(demand.ours, processors, 3.0 * WAKE)];
        Self { views, settings, measured, busy: demand.busy, turns }
    }

    /// Why nothing is said about other settings, if nothing is.
    fn doubt(&self) -> Option<String> {
        let Self { views: [View { units, ratio, .. }, _], measured, .. } = self;
        let batches = count(units.len() as u64, "batch", "batches");
        if units.len() < LEAST.0 || *measured < LEAST.1 {
            return Some(format!("{batches} in {} are too few", time(nanos(*measured))));
        }
        if (ratio - 1.0).abs() <= MISFIT {
            return None;
        }
        let replayed = if ratio.is_nan() { "no end".to_string() } else { time(nanos(measured / ratio)) };
        Some(format!(
            "replayed, the last {batches} take {replayed}, and they took {}",
            time(nanos(*measured))
        ))
    }

    /// By the view that gains less.
    fn predict(&self, settings: Settings) -> Option<Prediction> {
        let units = &self.views[0].units;
        if units.is_empty() || settings.workers == 0 || settings.depth == 0 {
            return None;
        }
        let mut worse: Option<Prediction> = None;
        for View { units, machine, ratio, lent } in &self.views {
            let found = replay(units, machine, settings, Scale::MEASURED)?;
            // What no thread explains has threads as its cause: without any there is none.
            let ratio = if settings.overlap == self.settings.overlap { *ratio } else { 1.0 };
            let ratio = if ratio.is_finite() { ratio } else { 1.0 };
            let found = Prediction {
                settings,
                batches: units.len() as u64,
                measured: nanos(self.measured + lent),
                wall: nanos(found.end * ratio),
                waiting: nanos(found.waiting * ratio),
                for_slots: nanos(found.for_slots),
            };
            worse = match worse {
                Some(before) if before.gain() <= found.gain() => Some(before),
                _ => Some(found),
            };
        }
        worse
    }

    /// The settings worth a try, the smallest change first: in slots, then in threads.
    fn candidates(&self, report: &Report) -> Vec<Settings> {
        let now = self.settings;
        if report.elsewhere {
            return Vec::new();
        }
        let mut all = Vec::new();
        // Fewer threads have less of processors that others want too.
        if !(now.overlap && self.busy) {
            all.push(Settings { overlap: !now.overlap, ..now });
        }
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

    /// The smallest change that gains, if none gains much more. For a caller that keeps no batches, and without a doubt.
    fn recommended(&self, report: &Report) -> Option<Prediction> {
        let candidates = self.candidates(report);
        let found: Vec<_> = candidates.into_iter().filter_map(|settings| self.predict(settings)).collect();
        let best = found.iter().map(|found| found.wall).min()?;
        let near = best + nanos(self.measured * NEAR);
        found.into_iter().find(|found| found.gain() >= WORTH_IT && found.wall <= near)
    }

    /// How many batches the caller keeps beside the one that it uses, if it waits for their slots.
    fn kept(&self, report: &Report) -> Option<usize> {
        let View { units, machine, .. } = &self.views[0];
        let kept = |unit: &Unit| if let Hold::Kept { later, .. } = unit.hold { later } else { 0 };
        let most = units.iter().map(kept).max().filter(|most| *most > 0 && report.overlap)?;
        let mut free = units.clone();
        free.iter_mut().filter(|unit| kept(unit) > 0).for_each(|unit| unit.hold = Hold::Use);
        let run =
            |units: &[Unit]| replay(units, machine, self.settings, Scale::MEASURED).map(|found| found.wall);
        let waits = match (run(units), run(&free)) {
            (Some(now), Some(free)) => free < now * (1.0 - WORTH_IT),
            (now, _) => now.is_none(),
        };
        waits.then_some(most)
    }

    /// With all iterations as one.
    fn at_once(&mut self) -> Option<Prediction> {
        let mut calls = 0;
        for View { units, .. } in &mut self.views {
            calls += units.iter_mut().skip(1).filter_map(|unit| unit.lead.take()).count();
        }
        if calls == 0 { None } else { self.predict(self.settings) }
    }

    /// How much of the time each stage saves if it is faster: read, transform, transfer, train, other threads.
    fn gains(&self) -> Option<[f64; 5]> {
        let View { units, machine, .. } = &self.views[0];
        let end = |scale| replay(units, machine, self.settings, scale).map(|found| found.end);
        let same = Scale::MEASURED;
        let now = end(same).filter(|now| *now > 0.0)?;
        let mut gains = [0.0; 5];
        for (gain, scale) in gains.iter_mut().zip([
            Scale { read: FASTER, ..same },
            Scale { transform: FASTER, ..same },
            Scale { transfer: FASTER, ..same },
            Scale { train: FASTER, ..same },
            Scale { lent: FASTER, ..same },
        ]) {
            *gain = 1.0 - end(scale)? / now;
        }
        Some(gains)
    }
}

/// The device has each batch after the caller, who only enqueues work.
fn on_device(units: &mut [Unit], report: &Report) {
    let thread =
        units.iter().map(|unit| if let Hold::Lent { thread, .. } = unit.hold { thread + 1 } else { 0 });
    let thread = thread.max().unwrap_or(0);
    let service = report.device.as_nanos() as f64 / report.batches.max(1) as f64;
    units.iter_mut().for_each(|unit| unit.hold = Hold::Lent { thread, service });
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

    /// Predicts the time of the last batches, at most 1024, with other settings, by a replay of their measured times. The
    /// call takes less than a millisecond.
    ///
    /// In the replay, loading and use share the processors. All files are on one disk, and more workers do not make the
    /// disk faster. The replay assumes that the time of a single load or use does not depend on the settings; this is not
    /// true, for example, if the system reads ahead. Batches that were lent to other threads are used until these threads
    /// are done.
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

    /// Returns the smallest change of settings that saves at least 3 % of the time, unless a larger change saves at
    /// least 5 percentage points more. Returns `None` if no change saves 3 %, or if the measurements do not tell: they are
    /// of fewer than 8 batches or 20 ms, a replay with the measured settings misses the measured time by more than 5 %, or
    /// the loader waits for slots of batches that the caller keeps. [`advice`](Self::advice) names the reason.
    ///
    /// It tries to toggle overlap, up to 4 more slots, and up to 4 more workers, each with one more slot. For a
    /// generator it tries only to toggle overlap. For a stream of tensors it tries overlap and slots.
    ///
    /// Threads wait for processors, and the system does not tell who has them. The replay is done twice: with the waits as
    /// they were, and without those that the loader's own threads can explain. What gains less counts.
    #[must_use]
    pub fn recommended(&self) -> Option<Prediction> {
        let model = Model::of(self);
        if model.kept(self).is_some() || model.doubt().is_some() { None } else { model.recommended(self) }
    }

    /// Returns advice as text: to let go of batches that are kept while the loader waits for their slots, the change of
    /// [`recommended`](Self::recommended) with its predicted saving, for a loader the advice to iterate over all epochs with
    /// one call of [`Loader::epochs`](crate::Loader::epochs), or the reason why there is no advice.
    #[must_use]
    pub fn advice(&self) -> String {
        if self.recent.units.is_empty() {
            return "Nothing was measured.".to_string();
        }
        let mut model = Model::of(self);
        let stream = self.kind == Kind::Groups;
        let (whose, units) = if stream { ("stream", "groups") } else { ("loader", "batches") };
        if let Some(kept) = model.kept(self) {
            let unit = if stream { "group" } else { "batch" };
            let kept = count(kept as u64, &format!("{unit} is"), &format!("{units} are"));
            return format!("{kept} kept while the {whose} waits for slots: let go of what is not needed.");
        }
        if let Some(doubt) = model.doubt() {
            return format!("No advice: {doubt}.");
        }
        let recommended = model.recommended(self);
        let verdict = verdict(&model, self);
        if self.kind == Kind::Batches {
            let least = recommended.map_or(1.0, |found| 1.0 - found.gain());
            let at_once = model.at_once().filter(|found| 1.0 - found.gain() <= least - WORTH_IT);
            if let Some(found) = at_once {
                return format!("Ask for all epochs at once, with `epochs(..)`: {}", gains(&found));
            }
        }
        if let Some(found) = recommended {
            return format!("{}: {}", change(self, found.settings), gains(&found));
        }
        let why = match verdict {
            Verdict::Unmeasured => "nothing was measured",
            Verdict::ComputeBound => "the compute decides",
            Verdict::DiskBound if stream => {
                "the disk decides: try another `ReadMode`, keep more groups in memory, or use a faster disk"
            }
            Verdict::DiskBound => {
                "the disk decides: try another `ReadMode`, smaller records, or a faster disk"
            }
            Verdict::LoadBound if self.elsewhere => "the workers decide: start more, or make loading cheaper",
            Verdict::LoadBound if model.turns => "the loads take turns at something, such as a lock",
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
        let busy = if model.busy { " Other programs have a part of the processors." } else { "" };
        format!("No option of the {whose} gains 3 %: {why}.{busy}")
    }

    /// Returns the bottleneck: the stage that would save the most time if it were faster, in a replay of the last
    /// batches. Returns [`Verdict::Unmeasured`] if the measurements do not tell: see [`recommended`](Self::recommended).
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let model = Model::of(self);
        if model.doubt().is_some() { Verdict::Unmeasured } else { verdict(&model, self) }
    }
}

fn verdict(model: &Model, report: &Report) -> Verdict {
    let read = match report.kind {
        Kind::Rounds => Verdict::GenerationBound,
        // Most of it came from a disk.
        Kind::Batches | Kind::Groups if report.reading.disk > report.reading.bytes / 2 => Verdict::DiskBound,
        _ => Verdict::LoadBound,
    };
    // The device has what the caller has enqueued.
    let lent = if report.device.is_zero() { Verdict::HeldBound } else { Verdict::ComputeBound };
    let stages = [read, Verdict::TransformBound, Verdict::TransferBound, Verdict::ComputeBound, lent];
    let Some([read, transform, transfer, train, lent]) = model.gains() else {
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
