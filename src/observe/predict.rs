//! Conclusions from replays: the time with other settings, the change of settings that saves most, and the bottleneck.

use std::time::Duration;

use super::display::{count, time};
use super::history::{Recent, Seen};
use super::replay::{Hold, MEASURED, Machine, Outcome, Settings, Unit, replay};
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
    /// Whether `wall` is a lower limit. More loads at a time than were measured may take turns at something, such as a
    /// lock, and other programs may take more of the processors.
    pub at_most: bool,
}

impl Prediction {
    /// Returns the fraction of the measured time that these settings save, for example 0.25 for a quarter. The value
    /// is negative if the settings take longer.
    #[must_use]
    pub fn gain(&self) -> f64 {
        1.0 - self.wall.as_secs_f64() / self.measured.as_secs_f64().max(1e-9)
    }
}

/// A change must save at least this part of the time to be advised: repeated runs of one program differ as much.
const WORTH_IT: f64 = 0.03;
/// The same, while other programs want the processors.
const BUSY_WORTH_IT: f64 = 0.1;

/// Of two changes, the smaller one is advised unless the other gains at least this much more, as a part of the measured
/// time.
const NEAR: f64 = 0.05;

/// The factor for the time of a stage, to see what a faster stage would save.
const FASTER: f64 = 0.9;

/// A stage is the bottleneck only if its gain is at least this many times the second largest gain.
const ALONE: f64 = 1.25;

/// Nanoseconds that a sleeping thread needs to wake up, if that was not measured.
const WAKE: f64 = 30e3;

/// The least number of batches, and their least time in nanoseconds, that allow a prediction.
const LEAST: (usize, f64) = (8, 20e6);

/// How far a replay with the measured settings may be from the measured time.
const MISFIT: f64 = 0.05;

/// The machine is busy if at least this many threads of other programs want a processor, on average.
const BUSY: f64 = 0.5;

/// How many processors the threads of the loader and of the caller used and wanted, and how many other programs wanted.
pub(super) struct Demand {
    pub(super) processors: f64,
    /// The part of a load, and of a use, in which its thread ran on a processor.
    cpu: [f64; 2],
    /// The part of a load, and of a use, in which its thread was ready to run and had no processor.
    delay: [f64; 2],
    /// How many of our threads ran on a processor, on average.
    had: f64,
    /// How many of our threads ran on a processor or waited for one, on average.
    wanted: f64,
    /// How many threads of other programs ran on a processor or waited for one, on average.
    others: f64,
}

impl Demand {
    fn of(recent: &Recent, units: &[Unit], measured: f64, overlap: bool) -> Self {
        // Assume two processors if the system does not report their number. The unit tests always assume two, so that
        // their results are the same on every machine.
        let found = std::thread::available_parallelism().ok().filter(|_| !cfg!(test));
        let processors = found.map_or(2.0, |number| number.get() as f64);
        let part = |time: f32, share: &Share| (share.wall > 0.0).then(|| f64::from(time / share.wall));
        let shares = recent.shares();
        // If the CPU time of a thread was not measured, assume that it needs a whole processor.
        let cpu = shares.each_ref().map(|share| part(share.cpu, share).map_or(1.0, |cpu| cpu.min(1.0)));
        let delay = shares.each_ref().map(|share| part(share.delay, share).unwrap_or(0.0));
        let (mut load, mut train) = (0.0, 0.0);
        for unit in units {
            load += (unit.read + unit.transform) / measured.max(1.0);
            train += unit.train / measured.max(1.0);
        }
        let had = load * cpu[0] + train * cpu[1];
        let wanted = had + load * delay[0] + train * delay[1];
        let running = part(shares[1].running, &shares[1]).filter(|running| *running > 0.0);
        // The threads of other programs are all running threads that the caller counted, less the caller and the
        // loading threads.
        let loads = if overlap { wanted - train * (cpu[1] + delay[1]) } else { 0.0 };
        let others = match running {
            Some(running) => running - 1.0 - loads,
            // Without a count, estimate `others`: `wanted / had` threads of all programs share each processor, on average.
            // Subtract one thread for each processor, or all our threads if they are more.
            None => processors * (wanted / had.max(1e-9) - 1.0) - (wanted - processors).max(0.0),
        };
        Self { processors, cpu, delay, had, wanted, others: others.max(0.0) }
    }

    fn is_busy(&self) -> bool {
        self.others >= BUSY
    }

    /// Returns how many processors the threads of the loader and of the caller can expect to get.
    fn left(&self) -> f64 {
        if self.is_busy() {
            // The scheduler may give each program an equal share, however many threads it has: expect half of the
            // processors.
            self.had.max(self.processors / 2.0)
        } else {
            // An idle processor counts as half of one: it may be the second hyperthread of a busy core, or belong to an
            // overcommitted host.
            f64::midpoint(self.had.clamp(1.0, self.processors), self.processors)
        }
    }

    /// Returns how many times longer work on a processor takes if our threads want `times` as many processors as now.
    fn slower(&self, times: f64) -> f64 {
        let part = |wanted: f64| (self.processors / (self.others + wanted).max(1e-9)).min(1.0);
        part(self.wanted) / part(self.wanted * times)
    }
}

/// The measurements, and what a replay of them with the measured settings gave.
pub(super) struct Model {
    units: Vec<Unit>,
    machine: Machine,
    settings: Settings,
    pub(super) demand: Demand,
    measured: f64,
    /// The measured time divided by the replayed time. Not a number if the replay has no end.
    ratio: f64,
    /// How long after the caller's end other threads still use the batches that were lent to them.
    lent: f64,
    /// The replayed time if no other program wants the processors.
    alone: f64,
    /// Whether loads wait for each other, so that more threads load no faster. `None` if the measurements do not tell.
    turns: Option<bool>,
}

impl Model {
    pub(super) fn of(report: &Report) -> Self {
        let (recent, settings) = (&report.recent, report.settings);
        let measured: Duration = recent.units.iter().map(Seen::wall).sum();
        let measured = measured.as_nanos() as f64;
        let mut units = recent.units();
        let demand = Demand::of(recent, &units, measured, settings.overlap);
        let (files, loads) = (!report.choices.is_empty(), recent.side_by_side());
        let turns = match recent.takes_turns(loads) {
            _ if files => Some(false),
            // Loads that use or wait for a processor nearly all the time do not take turns at a lock.
            Some(true) if demand.cpu[0] + demand.delay[0] > 0.9 => Some(false),
            turns => turns,
        };
        let wake = |measured: Option<f64>| measured.filter(|_| settings.overlap).unwrap_or(WAKE);
        let [wake, start] = recent.wakes().map(wake);
        let machine = Machine {
            processors: demand.left(),
            load_cpu: demand.cpu[0],
            train_cpu: demand.cpu[1],
            // The part of a load that more workers do not speed up: a read from one disk, or a lock that loads take
            // turns at.
            serial: match turns {
                Some(true) => 1.0 / loads,
                _ if files => (1.0 - demand.cpu[0]) / loads,
                _ => 0.0,
            },
            device_depth: report.device_depth,
            lockstep: report.lockstep,
            wake,
            start,
        };
        if !report.device.is_zero() {
            on_device(&mut units, report);
        }
        let now = replay(&units, &machine, settings, MEASURED);
        let lent = now.map_or(0.0, |now| now.end - now.wall);
        let ratio = now.filter(|now| now.wall > 0.0).map_or(f64::NAN, |now| measured / now.wall);
        let mut model = Self { units, machine, settings, demand, measured, ratio, lent, alone: 1.0, turns };
        model.alone = model.alone(settings).unwrap_or(f64::NAN);
        model
    }

    /// Returns why the measurements allow no prediction, or `None` if they allow one.
    fn doubt(&self) -> Option<String> {
        let Self { units, ratio, measured, .. } = self;
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

    /// Replays the batches on `machine`. `load` and `train` are factors for the times of loads and of uses.
    fn replay(&self, settings: Settings, machine: &Machine, [load, train]: [f64; 2]) -> Option<Outcome> {
        replay(&self.units, machine, settings, [load, load, 1.0, train, 1.0])
    }

    /// Returns the time with `settings` if no other program wants the processors, divided by the time that the measured
    /// settings would then take.
    fn alone(&self, settings: Settings) -> Option<f64> {
        let (machine, parts) = self.without_others();
        Some(self.replay(settings, &machine, parts)?.end / self.alone)
    }

    /// Returns the machine if no other program wants the processors, and the factors for the times of loads and of uses
    /// there.
    fn without_others(&self) -> (Machine, [f64; 2]) {
        let Demand { processors, cpu, delay, .. } = self.demand;
        let parts = delay.map(|delay| 1.0 - delay.min(0.95));
        let [load_cpu, train_cpu] = [0, 1].map(|of| (cpu[of] / parts[of]).min(1.0));
        (Machine { processors, load_cpu, train_cpu, ..self.machine }, parts)
    }

    /// Predicts the time with `settings`, with the other programs and without them, and returns the prediction with the
    /// smaller gain.
    fn predict(&self, settings: Settings) -> Option<Prediction> {
        if self.units.is_empty() || settings.workers == 0 || settings.depth == 0 {
            return None;
        }
        // `ratio` is the measured time over the replayed time. It holds only with the same threads: not if overlap
        // changes.
        let ratio = if settings.overlap == self.settings.overlap { self.ratio } else { 1.0 };
        let ratio = if ratio.is_finite() { ratio } else { 1.0 };
        let Demand { cpu, delay, .. } = self.demand;
        let mut found = self.replay(settings, &self.machine, [1.0; 2])?;
        // A faster run needs the same processor time in less time, so it competes more with other programs.
        let slower = self.demand.slower((self.measured / (found.end * ratio)).max(1.0)) - 1.0;
        if slower > 0.0 {
            let parts = [0, 1].map(|of| 1.0 + (cpu[of] + delay[of]).min(1.0) * slower);
            found = self.replay(settings, &self.machine, parts)?;
        }
        let measured = self.measured + self.lent;
        Some(Prediction {
            settings,
            batches: self.units.len() as u64,
            measured: nanos(measured),
            // `alone` is NaN if nothing took time; `max` then ignores it.
            wall: nanos((found.end * ratio).max(self.alone(settings).unwrap_or(0.0) * measured)),
            waiting: nanos(found.waiting * ratio),
            at_most: self.may_wait(settings) || self.demand.is_busy(),
        })
    }

    /// Whether `settings` load more batches at the same time, and it is not known whether loads take turns.
    fn may_wait(&self, settings: Settings) -> bool {
        settings.workers > self.settings.workers && self.turns.is_none()
    }

    /// Returns the settings to try: those with the fewest slots first, and of these the fewest threads.
    fn candidates(&self, report: &Report) -> Vec<Settings> {
        let now = self.settings;
        let mut all = Vec::new();
        if report.kind == Kind::Ahead {
            return all;
        }
        // Do not turn overlap off on a busy machine: with fewer threads, the program gets less of the processors.
        if !(now.overlap && self.demand.is_busy()) {
            all.push(Settings { overlap: !now.overlap, ..now });
        }
        if report.kind == Kind::Rounds || (report.kind == Kind::Items && !now.overlap) {
            return all;
        }
        // While it is not known whether loads take turns, try only one more worker: that will show it. Without overlap,
        // and for anything but batches, try the present number of workers only.
        let more: &[usize] = match self.turns {
            _ if report.kind != Kind::Batches || !now.overlap => &[0],
            None => &[0, 1],
            Some(_) => &[0, 1, 2, 4],
        };
        for workers in more.iter().map(|more| now.workers + more) {
            // Try as many slots beyond the number of workers as now, and 1, 2 and 4 more.
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

    /// Returns the smallest change that gains enough, unless a larger one gains much more. To be called only if `kept`
    /// and `doubt` return `None`.
    pub(super) fn recommended(&self, report: &Report) -> Option<Prediction> {
        let mut candidates = self.candidates(report);
        // Without an idle processor, do not advise more workers if the loads may take turns: each would wait longer.
        let busy = self.demand.is_busy() || self.demand.processors < 2.0;
        candidates.retain(|settings| !(busy && self.may_wait(*settings)));
        let found: Vec<_> = candidates.into_iter().filter_map(|settings| self.predict(settings)).collect();
        let best = found.iter().map(|found| found.wall).min()?;
        let near = best + nanos(self.measured * NEAR);
        found.into_iter().find(|found| found.gain() >= self.worth_it() && found.wall <= near)
    }

    /// The part of the time that a change must save.
    fn worth_it(&self) -> f64 {
        if self.demand.is_busy() { BUSY_WORTH_IT } else { WORTH_IT }
    }

    /// Returns why no change is advised, although one would gain if no other program wanted the processors and loads
    /// did not take turns.
    pub(super) fn unsure(&self, report: &Report) -> Option<&'static str> {
        let (busy, one) = (self.demand.is_busy(), self.demand.processors < 2.0);
        let gains = |settings| self.alone(settings).is_some_and(|part| part <= 1.0 - WORTH_IT);
        let unsure = |settings| (busy || one && self.may_wait(settings)) && gains(settings);
        let why = if busy {
            "other programs have a part of the processors"
        } else {
            "loads may take turns at the one processor"
        };
        self.candidates(report).into_iter().any(unsure).then_some(why)
    }

    /// Returns how many batches the caller keeps besides the one in use. `None` if it keeps none, or if the loader does
    /// not wait for their slots.
    fn kept(&self, report: &Report) -> Option<usize> {
        let kept = |unit: &Unit| if let Hold::Kept { later, .. } = unit.hold { later } else { 0 };
        let most = self.units.iter().map(kept).max().filter(|most| *most > 0 && report.settings.overlap)?;
        let mut free = self.units.clone();
        free.iter_mut().filter(|unit| kept(unit) > 0).for_each(|unit| unit.hold = Hold::Use);
        let run =
            |units: &[Unit]| replay(units, &self.machine, self.settings, MEASURED).map(|found| found.wall);
        let waits = match (run(&self.units), run(&free)) {
            (Some(now), Some(free)) => free < now * (1.0 - self.worth_it()),
            (now, _) => now.is_none(),
        };
        waits.then_some(most)
    }

    /// Merges all iterations into one, and predicts the time with the measured settings. `None` if there is only one.
    fn at_once(&mut self) -> Option<Prediction> {
        let calls = self.units.iter_mut().skip(1).filter_map(|unit| unit.lead.take()).count();
        if calls == 0 { None } else { self.predict(self.settings) }
    }

    /// Returns which part of the time each stage saves if it is faster: read, transform, transfer, train, other
    /// threads. `load` and `train` are factors for the times of loads and of uses.
    fn gains(&self, machine: Machine, [load, train]: [f64; 2]) -> Option<[f64; 5]> {
        // Replay with all processors: the measured time of a stage includes its waits for a processor.
        let machine = Machine { processors: self.demand.processors, ..machine };
        let end = |scale| replay(&self.units, &machine, self.settings, scale).map(|found| found.end);
        let parts = [load, load, 1.0, train, 1.0];
        let now = end(parts).filter(|now| *now > 0.0)?;
        let mut gains = [0.0; 5];
        for (stage, gain) in gains.iter_mut().enumerate() {
            let mut scale = parts;
            scale[stage] *= FASTER;
            *gain = 1.0 - end(scale)? / now;
        }
        Some(gains)
    }
}

/// Replaces the caller, who only enqueues work, by the device: as another thread, it uses each batch after the caller.
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
    /// if let Some(found) = report.predict(Settings { workers: 2, ..report.settings }) {
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

    /// Returns the smallest change of settings that saves at least 3 % of the time. A larger change is returned instead
    /// if it saves at least 5 percentage points more. Returns `None` if no change saves 3 %.
    ///
    /// Also returns `None` if the measurements are not sure, and [`advice`](Self::advice) names the reason: there are
    /// fewer than 8 batches or 20 ms, a replay with the measured settings misses the measured time by more than 5 %, or
    /// the loader waits for slots of batches that the caller keeps.
    ///
    /// The changes for a loader are overlap on or off, up to 4 more slots, and up to 4 more workers with one more slot
    /// each. Where loads may take turns, it tries only one more worker; with one processor, or while other programs want
    /// the processors, it then tries none. For a generator it tries overlap, and for a stream of tensors overlap and slots.
    ///
    /// Each change is predicted twice: other programs want the processors as before, or not at all. The smaller saving
    /// counts. While other programs want the processors, a change must save 10 %. See also [`Prediction::at_most`].
    #[must_use]
    pub fn recommended(&self) -> Option<Prediction> {
        let model = Model::of(self);
        if model.kept(self).is_some() || model.doubt().is_some() { None } else { model.recommended(self) }
    }

    /// Returns advice as text. It names the change of [`recommended`](Self::recommended) and its predicted saving, or says
    /// why there is no advice. If the loader waits for slots of batches that the caller keeps, the advice is to let go of
    /// these batches. For a loader it may be to iterate over all epochs with one call of
    /// [`Loader::epochs`](crate::Loader::epochs).
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
        if let Some(unsure) = model.unsure(self) {
            return format!("No advice: {unsure}.");
        }
        let why = match verdict {
            Verdict::Unmeasured => "what decides depends on other programs",
            Verdict::ComputeBound => "the compute decides",
            Verdict::DiskBound if stream => {
                "the disk decides: keep more groups in memory, or use a faster disk"
            }
            Verdict::DiskBound => "the disk decides: try another `ReadMode`, or use a faster disk",
            Verdict::LoadBound if self.kind == Kind::Ahead => {
                "the workers decide: start more, or make loading cheaper"
            }
            Verdict::LoadBound if model.turns == Some(true) => "the loads take turns, as at a lock",
            Verdict::LoadBound => "the loading decides: make it cheaper, or use several processes",
            Verdict::TransformBound => "the transform decides: make it cheaper, or store its result",
            Verdict::TransferBound if stream => "the copy to the device decides: store a smaller type",
            Verdict::TransferBound => "the copy to the device decides: send smaller numbers",
            Verdict::GenerationBound => "the closure decides: make it faster",
            Verdict::HeldBound if stream => "the threads that use the groups decide: make them faster",
            Verdict::HeldBound => "the threads that use the batches decide: make them faster",
            Verdict::Balanced => "the stages are balanced, and only making both faster helps",
        };
        format!("Keep the settings. No option of the {whose} gains 3 %: {why}.")
    }

    /// Returns the bottleneck: the stage that would save the most time if it were faster, in a replay of the last batches.
    ///
    /// Returns [`Verdict::Unmeasured`] if the measurements are not sure, for the reasons of
    /// [`recommended`](Self::recommended), or if the stage would be another one without the other programs that run now.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let model = Model::of(self);
        if model.doubt().is_some() { Verdict::Unmeasured } else { verdict(&model, self) }
    }
}

fn verdict(model: &Model, report: &Report) -> Verdict {
    let measured = decides(model.gains(model.machine, [1.0; 2]), report);
    let (machine, parts) = model.without_others();
    let told = !model.demand.is_busy() || decides(model.gains(machine, parts), report) == measured;
    if told { measured } else { Verdict::Unmeasured }
}

/// Returns the bottleneck. `gains` is what each stage saves if it is faster.
fn decides(gains: Option<[f64; 5]>, report: &Report) -> Verdict {
    let read = match report.kind {
        Kind::Rounds => Verdict::GenerationBound,
        // Most bytes came from a disk.
        Kind::Batches | Kind::Groups if report.reading.disk > report.reading.bytes / 2 => Verdict::DiskBound,
        _ => Verdict::LoadBound,
    };
    let Some([reads, transform, transfer, train, lent]) = gains else { return Verdict::Unmeasured };
    // A loading thread both reads and transforms. If loading is the bottleneck, name the one with the larger gain.
    let load = if transform > reads { Verdict::TransformBound } else { read };
    // If the caller only enqueues work, the model lends its batches to the device, which does the caller's compute.
    let lender = if report.device.is_zero() { Verdict::HeldBound } else { Verdict::ComputeBound };
    let mut sides = [
        (reads + transform, load),
        (transfer, Verdict::TransferBound),
        (train, Verdict::ComputeBound),
        (lent, lender),
    ];
    sides.sort_by(|a, b| b.0.total_cmp(&a.0));
    let [(first, decides), (second, _), ..] = sides;
    // No single stage is the bottleneck if the largest gain is too small, or if another stage gains nearly as much.
    if first < WORTH_IT || first < ALONE * second { Verdict::Balanced } else { decides }
}

/// Returns what the settings save, as the end of a sentence.
fn gains(found: &Prediction) -> String {
    let Prediction { batches, measured, wall, at_most, .. } = *found;
    let (up_to, if_not) =
        if at_most { ("up to ", ", unless a lock or other programs prevent it") } else { ("", "") };
    format!(
        "{up_to}{:.0} % less, {} in place of {} for the last {} (replayed){if_not}.",
        found.gain() * 100.0,
        time(wall),
        time(measured),
        count(batches, "batch", "batches")
    )
}

/// Returns the builder's calls that change the settings, as the start of a sentence.
fn change(report: &Report, to: Settings) -> String {
    let from = report.settings;
    if to.overlap && !from.overlap && report.by_breakdown {
        return "Turn the breakdown off, which turns the overlap off".to_string();
    }
    let calls = [
        (to.overlap != from.overlap).then(|| format!("`overlap({})`", to.overlap)),
        (to.workers != from.workers).then(|| format!("`workers({})`", to.workers)),
        (to.depth != from.depth).then(|| format!("`depth({})`", to.depth)),
    ];
    format!("Set {}", calls.into_iter().flatten().collect::<Vec<_>>().join(" and "))
}
