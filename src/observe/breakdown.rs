//! Measures the phases of each step: log lines while the program runs, and a table at the end.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::log::pause;
use super::log::{Event, What};
use super::phases::{Summary, Table};

/// The first steps. All of them are logged.
const FIRST: u64 = 10;

/// Measures the phases of each step: the loader's phases (`load`, `transform`, `h2d`) and the caller's own phases,
/// for example `forward`, `backward` and `optimizer`.
///
/// It logs the first 10 steps and every `K`-th step. `Display` prints a summary table. Training and
/// [`validation`](Breakdown::validation) have separate tables. A breakdown that is off only tests a flag in each
/// call.
///
/// A clone is another handle to the same breakdown: pass one to the loader
/// ([`LoaderBuilder::breakdown`](crate::loader::LoaderBuilder::breakdown)) and use one in the loop. A loader whose
/// breakdown is on does not overlap loading with use, and logs this: two phases that run at the same time cannot be
/// measured separately.
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
///
///     if step == 200 {
///         let _validation = breakdown.validation(20);
///         for batch in 0..20 {
///             breakdown.phase("forward", || weight * f64::from(batch));
///             breakdown.end_step();
///         }
///     }
/// }
/// println!("{breakdown}");
/// ```
#[derive(Clone, Default)]
pub struct Breakdown {
    /// What logs, if anything does.
    on: Option<Arc<Mutex<Inner>>>,
    /// Phases are measured too.
    measures: bool,
}

type Sink = Box<dyn FnMut(&str) + Send>;

struct Inner {
    /// 0: only the first steps are logged.
    every: u64,
    /// The same of batches of a validation.
    validation_every: u64,
    /// Taken out while it is called: a sink may use the breakdown.
    sink: Option<Sink>,
    training: Table,
    validation: Table,
    validating: Option<Validating>,
    /// How long the validations that are over took together.
    validated: Duration,
}

struct Validating {
    /// The batches it is said to have.
    batches: u64,
    done: u64,
    started: Instant,
}

/// The start of a phase.
struct Start {
    at: Instant,
    /// When the validation began that it is of, if it is of one.
    validation: Option<Instant>,
    validated: Duration,
}

impl Breakdown {
    /// Creates a breakdown that measures nothing.
    #[must_use]
    pub const fn off() -> Self {
        Self { on: None, measures: false }
    }

    /// Creates a breakdown that logs the first 10 steps and every `steps`-th step, counted from 0. If `steps` is 0,
    /// it logs only the first 10 steps. Log lines go to standard error by default; see [`sink`](Breakdown::sink).
    #[must_use]
    pub fn every(steps: u64) -> Self {
        Self { on: Some(Arc::new(Mutex::new(Inner::new(steps)))), measures: true }
    }

    /// Sets how often validation batches are logged: every `batches`-th batch, or none if `batches` is 0. Default:
    /// the value of [`every`](Breakdown::every).
    ///
    /// A breakdown that is [`off`](Breakdown::off) then logs the progress of validations and nothing else. It still
    /// measures nothing, and loaders overlap.
    #[must_use]
    pub fn validation_every(mut self, batches: u64) -> Self {
        self.on.get_or_insert_with(|| Arc::new(Mutex::new(Inner::new(0))));
        if let Some(mut inner) = self.lock() {
            inner.validation_every = batches;
        }
        self
    }

    /// Sends the log lines to `sink`, one line per call, without a newline. Default: standard error. It has no
    /// effect on a breakdown that logs nothing.
    ///
    /// A line that is logged while `sink` is running, on any thread, is lost.
    ///
    /// # Panics
    ///
    /// This method does not panic. If `sink` panics, the call that logs the line panics. The sink receives the next
    /// line as usual.
    #[must_use]
    pub fn sink(self, sink: impl FnMut(&str) + Send + 'static) -> Self {
        let before = self.lock().and_then(|mut inner| inner.sink.replace(Box::new(sink)));
        drop(before);
        self
    }

    /// Returns `true` if the breakdown measures phases.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.measures
    }

    /// Runs `work` and adds its time to the phase `name` of the current step. Returns the result of `work`.
    ///
    /// If a phase runs several times in a step, for example once per micro-step of gradient accumulation, its times
    /// are added, and the table also shows the mean of a single run. The time of a nested phase counts for both
    /// phases.
    ///
    /// A phase belongs to the mode in which it started: training or [`validation`](Breakdown::validation). Time
    /// spent in the other mode is excluded. A validation phase that is still running when its validation ends is
    /// discarded.
    ///
    /// # Panics
    ///
    /// If `work` panics. The time is then not counted.
    #[inline]
    pub fn phase<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        if !self.measures {
            return work();
        }
        let start = self.start();
        let result = work();
        self.end_phase(name, start);
        result
    }

    fn start(&self) -> Option<Start> {
        let inner = self.lock()?;
        Some(Start { at: Instant::now(), validation: inner.validation_began(), validated: inner.validated })
    }

    fn end_phase(&self, name: &'static str, start: Option<Start>) {
        let (Some(mut inner), Some(start)) = (self.lock(), start) else { return };
        let validation = inner.validation_began();
        // As a step's start, it moves by the validations since.
        let at = start.at + (inner.validated - start.validated);
        let (table, end) = match start.validation {
            None => (&mut inner.training, validation.unwrap_or_else(Instant::now)),
            same if same == validation => (&mut inner.validation, Instant::now()),
            Some(_) => return,
        };
        table.count(name, at, end.saturating_duration_since(at));
    }

    /// Adds `time` to the phase `name` of the current step. Use it for a time that was measured elsewhere and ends
    /// now. The whole `time` counts: exclude the time of any validation from it.
    #[inline]
    pub fn add(&self, name: &'static str, time: Duration) {
        if self.is_on() {
            let now = Instant::now();
            self.count(name, now.checked_sub(time).unwrap_or(now), time);
        }
    }

    /// Counts an event of a loader: its phases, and the wait that its step begins with.
    #[inline]
    pub(crate) fn add_event(&self, event: &Event) {
        if self.is_on() {
            self.count_event(event);
        }
    }

    fn count_event(&self, event: &Event) {
        let Some(mut inner) = self.lock() else { return };
        match event.what {
            What::Wait | What::DeviceWait => inner.table().begin(event.start),
            What::Read | What::Generate => inner.table().count("load", event.start, event.time()),
            What::Transform => inner.table().count("transform", event.start, event.time()),
            What::Transfer => inner.table().count("h2d", event.start, event.time()),
            _ => {}
        }
    }

    fn count(&self, name: &'static str, start: Instant, time: Duration) {
        if let Some(mut inner) = self.lock() {
            inner.table().count(name, start, time);
        }
    }

    /// Ends the current step, or the current batch of a validation. The step's time is the time from the start of
    /// its first phase until this call. Time outside the phases is shown as `other`. Time between two steps is not
    /// counted.
    ///
    /// The step's time excludes any validation that ran during the step. The sum of non-nested phases never exceeds
    /// the step's time.
    pub fn end_step(&self) {
        let Some(mut inner) = self.lock() else { return };
        let now = Instant::now();
        let Inner { every, validation_every, .. } = *inner;
        let line = match &mut inner.validating {
            None if !self.measures => None,
            None => {
                let step = inner.training.steps;
                let logged = step < FIRST || step.checked_rem(every) == Some(0);
                let mut line = logged.then(|| format!("step {step}:"));
                inner.training.end_step(now, line.as_mut());
                line
            }
            Some(validating) => {
                validating.done += 1;
                let Validating { batches, done, started } = *validating;
                let logged = done.checked_rem(validation_every) == Some(0);
                let mut line = logged.then(|| {
                    format!("validation {done}/{batches}, {:.3} s so far", (now - started).as_secs_f64())
                });
                if self.measures {
                    line.iter_mut().for_each(|line| line.push(':'));
                    inner.validation.end_step(now, line.as_mut());
                }
                line
            }
        };
        drop(inner);
        if let Some(line) = line {
            self.log(&line);
        }
    }

    /// Starts a validation. Until the returned guard is dropped, phases belong to the validation, and each step counts as
    /// one of its batches. `batches` is the expected number of batches; the log shows progress against it.
    ///
    /// The breakdown logs progress after every `n` batches, where [`validation_every`](Self::validation_every) sets `n`,
    /// and the total time at the end. If a validation runs inside a training step or phase, its time does not count for the
    /// step or phase. A validation inside another validation is part of the outer one.
    ///
    /// If the thread is using a batch of a loader at this time, the [`Report`](crate::Report) of that loader
    /// excludes the validation from compute and wait. This is true even if the breakdown is off.
    #[must_use = "the validation ends when this is dropped"]
    pub fn validation(&self, batches: u64) -> Validation<'_> {
        let begun = self.lock().is_some_and(|mut inner| {
            let first = inner.validating.is_none();
            if first {
                inner.validating = Some(Validating { batches, done: 0, started: Instant::now() });
            }
            first
        });
        Validation { breakdown: begun.then_some(self), started: Instant::now() }
    }

    fn end_validation(&self) {
        let Some(mut inner) = self.lock() else { return };
        let Some(Validating { done, started, .. }) = inner.validating.take() else { return };
        let took = started.elapsed();
        // A batch that was not ended is none.
        inner.validation.leave_step();
        inner.training.begun = inner.training.begun.map(|begun| begun + took);
        inner.validated += took;
        drop(inner);
        // A sink that panicked while the caller's own panic ends the validation would abort the process.
        if !std::thread::panicking() {
            self.log(&format!("validation: {done} batches in {:.3} s", took.as_secs_f64()));
        }
    }

    /// Logs that the loader does not overlap while the breakdown is on.
    pub(crate) fn overlap_is_off(&self) {
        self.log("breakdown: overlap is off while this is on, so that every phase is timed for itself");
    }

    fn log(&self, line: &str) {
        let sink = self.lock().and_then(|mut inner| inner.sink.take());
        let mut taken = Taken { breakdown: self, sink };
        if let Some(sink) = &mut taken.sink {
            sink(line);
        }
    }

    /// No foreign code runs while it is locked: such code might take the lock too.
    fn lock(&self) -> Option<MutexGuard<'_, Inner>> {
        Some(self.on.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The sink while it is called, put back also if it panics.
struct Taken<'b> {
    breakdown: &'b Breakdown,
    sink: Option<Sink>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let (Some(sink), Some(mut inner)) = (self.sink.take(), self.breakdown.lock()) {
            // During the call it may have been given another.
            let old = if inner.sink.is_none() { inner.sink.replace(sink) } else { Some(sink) };
            drop(inner);
            drop(old);
        }
    }
}

impl Inner {
    fn new(steps: u64) -> Self {
        Self {
            every: steps,
            validation_every: steps,
            // Not `eprintln`: it panics if the standard error is closed, and that would end the training.
            sink: Some(Box::new(|line| drop(writeln!(std::io::stderr(), "{line}")))),
            training: Table::default(),
            validation: Table::default(),
            validating: None,
            validated: Duration::ZERO,
        }
    }

    fn table(&mut self) -> &mut Table {
        if self.validating.is_some() { &mut self.validation } else { &mut self.training }
    }

    fn validation_began(&self) -> Option<Instant> {
        self.validating.as_ref().map(|validating| validating.started)
    }
}

/// Prints a table for training, and one for validation if there was any. For each phase it prints the mean, the
/// median of its last 1024 times, and its share of the total time.
impl fmt::Display for Breakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(inner) = self.lock().filter(|_| self.measures) else { return f.write_str("breakdown: off") };
        let mut text = Summary("training", "steps", &inner.training).to_string();
        if inner.validation.steps > 0 {
            // Writing to a `String` does not fail.
            let _ = write!(text, "\n{}", Summary("validation", "batches", &inner.validation));
        }
        drop(inner);
        f.write_str(&text)
    }
}

/// A running validation. [`Breakdown::validation`] returns it. The validation ends when it is dropped.
#[derive(Debug)]
pub struct Validation<'b> {
    breakdown: Option<&'b Breakdown>,
    started: Instant,
}

impl Drop for Validation<'_> {
    fn drop(&mut self) {
        pause((self.started, Instant::now()));
        if let Some(breakdown) = self.breakdown {
            breakdown.end_validation();
        }
    }
}

impl fmt::Debug for Breakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.lock().filter(|_| self.measures).map(|inner| inner.training.steps);
        f.debug_struct("Breakdown").field("steps", &steps).finish_non_exhaustive()
    }
}
