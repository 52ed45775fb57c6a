//! Measures the phases of each step: log lines while the program runs, and a table at the end.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::log::{Event, What};

/// The number of steps at the start that are all logged.
const FIRST: u64 = 10;

/// Measures the phases of each step: the loader's phases (`load`, `transform`, `h2d`) and the caller's own phases,
/// for example `forward`, `backward` and `optimizer`.
///
/// [`Breakdown::every(k)`](Breakdown::every) logs the first 10 steps and every `k`-th step. `Display` prints a table. A
/// breakdown that is off only tests a flag in each call. For a validation, use another breakdown: end the step before
/// it, because time between two steps is not counted.
///
/// A clone is another handle to the same breakdown: pass one to the loader
/// ([`LoaderBuilder::breakdown`](crate::loader::LoaderBuilder::breakdown)) and use one in the loop. The lines begin
/// with the loader's name, if it has one. A loader whose breakdown is on does not overlap loading with use: two phases
/// that run at the same time cannot be measured separately.
///
/// Work on a device is measured only if the phase waits for it: synchronize at the end of the phase, or measure with
/// the device's events and [`add`](Breakdown::add) the result.
///
/// # Examples
///
/// ```
/// use twinbuf::Breakdown;
///
/// let breakdown = Breakdown::every(100).sink(|line| println!("{line}"));
/// let mut weight = 1.0;
/// for step in 0..250 {
///     let loss = breakdown.phase("forward", || weight * f64::from(step));
///     let gradient = breakdown.phase("backward", || loss * 1e-6);
///     breakdown.phase("optimizer", || weight -= gradient);
///     // `step 0: forward 0.001 backward 0.000 optimizer 0.000 other 0.001 total 0.002 ms`
///     breakdown.end_step();
/// }
/// println!("{breakdown}");
/// ```
#[derive(Clone, Default)]
pub struct Breakdown {
    /// The state that all handles share. `None` if nothing is measured.
    on: Option<Arc<Mutex<Inner>>>,
}

/// The function that receives the log lines. It is called while `Inner` is not locked, so it may use the breakdown.
type Sink = Arc<Mutex<dyn FnMut(&str) + Send>>;

struct Inner {
    /// The names of the loaders. Each line begins with them.
    names: Vec<String>,
    /// Every step whose number is a multiple of this is logged. 0: only the first steps are.
    every: u64,
    sink: Sink,
    table: Table,
}

impl Inner {
    /// Returns the start of each line.
    fn start(&self) -> String {
        if self.names.is_empty() { String::new() } else { self.names.join(", ") + ": " }
    }
}

impl Breakdown {
    /// Creates a breakdown that measures nothing.
    #[must_use]
    pub const fn off() -> Self {
        Self { on: None }
    }

    /// Creates a breakdown that logs the first 10 steps and every `steps`-th step, counted from 0. If `steps` is 0,
    /// it logs only the first 10 steps. Log lines go to standard error by default; see [`sink`](Breakdown::sink).
    #[must_use]
    pub fn every(steps: u64) -> Self {
        // Do not use `eprintln`: it panics if the standard error is closed, which would end the training.
        let sink = Arc::new(Mutex::new(|line: &str| drop(writeln!(std::io::stderr(), "{line}"))));
        let inner = Inner { names: Vec::new(), every: steps, sink, table: Table::default() };
        Self { on: Some(Arc::new(Mutex::new(inner))) }
    }

    /// Sends the log lines of this breakdown and of its clones to `sink`, one line per call, without a newline.
    /// Default: standard error. It has no effect on a breakdown that is off.
    ///
    /// A line that is logged while `sink` is running, on any thread, is lost.
    ///
    /// # Panics
    ///
    /// This method does not panic. If `sink` panics, the call that logs the line panics. The sink receives the next
    /// line as usual.
    #[must_use]
    pub fn sink(self, sink: impl FnMut(&str) + Send + 'static) -> Self {
        let sink = Arc::new(Mutex::new(sink));
        let before = self.lock().map(|mut inner| std::mem::replace(&mut inner.sink, sink));
        drop(before);
        self
    }

    /// Returns `true` if the breakdown measures phases.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Runs `work` and adds its time to the phase `name` of the current step. Returns the result of `work`.
    ///
    /// If a phase runs several times in a step, for example once per micro-step of gradient accumulation, its times are
    /// added, and the table also shows the mean of a single run. The time of a nested phase counts for both phases.
    ///
    /// # Panics
    ///
    /// If `work` panics. The time is then not counted.
    #[inline]
    pub fn phase<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        let start = self.is_on().then(Instant::now);
        let result = work();
        if let Some(start) = start {
            self.add(name, start.elapsed());
        }
        result
    }

    /// Adds `time` to the phase `name` of the current step. Use it for a time that was measured elsewhere and ends now.
    #[inline]
    pub fn add(&self, name: &'static str, time: Duration) {
        let Some(mut inner) = self.lock() else { return };
        let now = Instant::now();
        inner.table.count(name, now.checked_sub(time).unwrap_or(now), time);
    }

    /// Counts an event of a loader, if it is on. A wait begins the step; reading, transforms and copies are phases of it.
    #[inline]
    pub(crate) fn add_event(&self, event: &Event) {
        let Some(mut inner) = self.lock() else { return };
        let name = match event.what {
            What::Wait => return inner.table.begin(event.start),
            What::Load => "load",
            What::Transform => "transform",
            What::Transfer => "h2d",
            _ => return,
        };
        inner.table.count(name, event.start, event.time());
    }

    /// Ends the current step. The step's time is the time from the start of its first phase, or of the loader's wait
    /// before it, until this call. Time outside the phases is shown as `other`. Time between two steps is not counted.
    pub fn end_step(&self) {
        let Some(mut inner) = self.lock() else { return };
        let (step, every) = (inner.table.total.count, inner.every);
        let is_logged = step < FIRST || step.checked_rem(every) == Some(0);
        let mut line = is_logged.then(|| format!("step {step}:"));
        inner.table.end_step(Instant::now(), line.as_mut());
        drop(inner);
        if let Some(line) = line {
            self.log(&line);
        }
    }

    /// Begins each line with the name of a loader. If several loaders share the breakdown, it has all names.
    pub(crate) fn name(&self, loader: &str) {
        let Some(mut inner) = self.lock() else { return };
        if !inner.names.iter().any(|name| name == loader) {
            inner.names.push(loader.to_string());
        }
    }

    /// Logs that the loader does not overlap while the breakdown is on.
    pub(crate) fn overlap_is_off(&self) {
        self.log("breakdown: overlap is off while this is on, so that every phase is timed for itself");
    }

    fn log(&self, line: &str) {
        let on = self.lock().map(|inner| (inner.sink.clone(), inner.start()));
        let Some((sink, start)) = on else { return };
        let mut sink = match sink.try_lock() {
            Ok(sink) => sink,
            // The sink panicked in an earlier call.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        sink(&(start + line));
    }

    /// Locks the state. Do not call foreign code under this lock: it might call this breakdown, which takes the lock
    /// again.
    fn lock(&self) -> Option<MutexGuard<'_, Inner>> {
        Some(self.on.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Prints a table, or `breakdown: off`. For each phase the table has the mean, the median of its last 1024 times, and
/// its share of the total time.
impl fmt::Display for Breakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(inner) = self.lock() else { return f.write_str("breakdown: off") };
        let text = inner.start() + &inner.table.summary();
        drop(inner);
        f.write_str(&text)
    }
}

debug!([] Breakdown[], |breakdown|
    steps: breakdown.lock().map(|inner| inner.table.total.count));

/// How many times of a phase its median takes. The limit keeps memory from growing with the run.
const RECENT: usize = 1024;

/// The times of the steps.
#[derive(Default)]
struct Table {
    /// In the order of their first uses.
    phases: Vec<Phase>,
    /// When the current step began, which is when its first phase began.
    begun: Option<Instant>,
    /// The time of each step outside all phases.
    other: Times,
    /// The whole time of each step.
    total: Times,
}

#[derive(Default)]
struct Phase {
    name: &'static str,
    /// The time in the current step.
    now: Duration,
    /// How often it ran in the current step. 0 if it is no part of it.
    now_runs: u64,
    /// How often it ran in all finished steps.
    runs: u64,
    times: Times,
}

/// The times of a phase, or of a part of each step.
#[derive(Default)]
struct Times {
    count: u64,
    sum: Duration,
    /// The last [`RECENT`] ones, the oldest first.
    recent: VecDeque<Duration>,
}

impl Table {
    /// Moves the start of the current step to `start` if the step has not begun, or began later.
    fn begin(&mut self, start: Instant) {
        self.begun = Some(self.begun.map_or(start, |begun| begun.min(start)));
    }

    /// Adds `time` to a phase of the current step. If the step has not begun, it began at `start`.
    fn count(&mut self, name: &'static str, start: Instant, time: Duration) {
        self.begin(start);
        let at = self.phases.iter().position(|phase| phase.name == name).unwrap_or_else(|| {
            self.phases.push(Phase { name, ..Phase::default() });
            self.phases.len() - 1
        });
        let phase = &mut self.phases[at];
        phase.now = phase.now.saturating_add(time);
        phase.now_runs += 1;
    }

    /// Ends the step, and writes its phases to `line`.
    fn end_step(&mut self, now: Instant, mut line: Option<&mut String>) {
        let total = self.begun.take().map_or(Duration::ZERO, |begun| now.saturating_duration_since(begun));
        let mut known = Duration::ZERO;
        let mut write = |name: &str, time| {
            if let Some(line) = &mut line {
                // Writing to a `String` does not fail.
                let _ = write!(line, " {name} {:.3}", ms(time));
            }
        };
        for phase in self.phases.iter_mut().filter(|phase| phase.now_runs > 0) {
            let time = std::mem::take(&mut phase.now);
            phase.runs += std::mem::take(&mut phase.now_runs);
            phase.times.add(time);
            known = known.saturating_add(time);
            write(phase.name, time);
        }
        let other = total.saturating_sub(known);
        self.other.add(other);
        self.total.add(total);
        write("other", other);
        write("total", total);
        line.into_iter().for_each(|line| line.push_str(" ms"));
    }

    /// Returns the times of all phases as a table.
    fn summary(&self) -> String {
        let Times { count, sum, .. } = self.total;
        let mut text = format!("{count} steps, {:.3} s", sum.as_secs_f64());
        text += "\nphase               mean ms  median ms   share";
        // A phase may run several times in a step, for example once per micro-step of a gradient accumulation.
        let micro = self.phases.iter().any(|phase| phase.runs > phase.times.count);
        if micro {
            text += "  runs a step    each ms";
        }
        let phases = self.phases.iter().map(|phase| (phase.name, &phase.times, phase.runs));
        for (name, times, runs) in phases.chain([("other", &self.other, 0), ("total", &self.total, 0)]) {
            let share = if sum.is_zero() { 0.0 } else { times.sum.as_secs_f64() / sum.as_secs_f64() * 100.0 };
            let (mean, median) = (ms(times.sum) / times.count.max(1) as f64, ms(times.median()));
            // Writing to a `String` does not fail.
            let _ = write!(text, "\n{name:<16} {mean:>10.3} {median:>10.3} {share:>5.1} %");
            if micro && runs > 0 {
                let (each, runs) = (ms(times.sum) / runs as f64, runs as f64 / times.count.max(1) as f64);
                let _ = write!(text, " {runs:>12.1} {each:>10.3}");
            }
        }
        text
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Times {
    fn add(&mut self, time: Duration) {
        self.recent.drain(..self.recent.len().saturating_sub(RECENT - 1));
        self.recent.push_back(time);
        self.count += 1;
        self.sum = self.sum.saturating_add(time);
    }

    fn median(&self) -> Duration {
        let mut sorted = Vec::from(self.recent.clone());
        sorted.sort_unstable();
        match sorted.len() {
            0 => Duration::ZERO,
            n if n % 2 == 1 => sorted[n / 2],
            n => sorted[n / 2 - 1].saturating_add(sorted[n / 2]) / 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_the_last_times_only() {
        let mut times = Times::default();
        assert_eq!(times.median(), Duration::ZERO);
        for (add, median) in [(30, 30), (10, 20), (20, 20), (40, 25)] {
            times.add(Duration::from_nanos(add));
            assert_eq!(times.median(), Duration::from_nanos(median));
        }
        for _ in 0..RECENT {
            times.add(Duration::from_nanos(7));
        }
        assert_eq!(times.median(), Duration::from_nanos(7));
        assert_eq!(times.recent.len(), RECENT);
        assert_eq!(times.count, RECENT as u64 + 4);
        assert_eq!(times.sum, Duration::from_nanos(100 + 7 * RECENT as u64));
    }

    #[test]
    fn a_mean_of_more_times_than_32_bits_count() {
        let before = u64::from(u32::MAX);
        let total = Times { count: before, sum: Duration::from_secs(before), ..Times::default() };
        let mut table = Table { total, ..Table::default() };
        for _ in 0..3 {
            table.total.add(Duration::from_secs(1));
            let text = table.summary();
            assert!(text.contains("\ntotal              1000.000   1000.000 100.0 %"), "{text}");
        }
    }

    /// Returns the line of each step of these phases, in milliseconds, and the table. A step takes `total`.
    fn measured(steps: &[&[(&'static str, u64)]], total: u64) -> (Vec<String>, String) {
        let (at, mut table) = (Instant::now(), Table::default());
        let lines = steps.iter().map(|phases| {
            let mut line = String::new();
            phases.iter().for_each(|(name, ms)| table.count(name, at, Duration::from_millis(*ms)));
            table.end_step(at + Duration::from_millis(total), Some(&mut line));
            line
        });
        (lines.collect(), table.summary())
    }

    #[test]
    fn the_table() {
        let load = |ms| ("load", ms);
        let forward = ("forward", 50);
        let steps = [&[load(10)][..], &[load(20), forward], &[load(30)], &[load(40), forward]];
        let (lines, text) = measured(&steps, 100);
        assert_eq!(
            lines,
            [
                " load 10.000 other 90.000 total 100.000 ms",
                " load 20.000 forward 50.000 other 30.000 total 100.000 ms",
                " load 30.000 other 70.000 total 100.000 ms",
                " load 40.000 forward 50.000 other 10.000 total 100.000 ms",
            ]
        );
        assert_eq!(
            text,
            "\
4 steps, 0.400 s
phase               mean ms  median ms   share
load                 25.000     25.000  25.0 %
forward              50.000     50.000  25.0 %
other                50.000     50.000  50.0 %
total               100.000    100.000 100.0 %"
        );
    }

    #[test]
    fn a_phase_of_micro_steps_is_shown_for_each_of_them() {
        let micro = (0..4).flat_map(|micro| [("load", 1), ("forward", 10 + micro)]);
        let step: Vec<_> = micro.chain([("optimizer", 8)]).collect();
        let (lines, text) = measured(&[&step, &step], 60);
        assert_eq!(lines[1], " load 4.000 forward 46.000 optimizer 8.000 other 2.000 total 60.000 ms");
        assert_eq!(
            text,
            "\
2 steps, 0.120 s
phase               mean ms  median ms   share  runs a step    each ms
load                  4.000      4.000   6.7 %          4.0      1.000
forward              46.000     46.000  76.7 %          4.0     11.500
optimizer             8.000      8.000  13.3 %          1.0      8.000
other                 2.000      2.000   3.3 %
total                60.000     60.000 100.0 %"
        );
    }
}
