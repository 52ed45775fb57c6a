//! Where the time of a step goes, phase by phase, as lines of a log and a table at the end.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::log::{Event, What};
use super::pause::pause;
use super::phases::{Summary, Table};

/// The first steps. All of them are logged.
const FIRST: u64 = 10;

/// Times the phases of each step: those of the loader (`load`, `h2d`), and the caller's own, under the names
/// that it gives them (`forward`, `backward`, `optimizer`).
///
/// Logs the first 10 steps and every `K`-th, and sums up when it is displayed. Training and
/// [`validation`](Breakdown::validation) are kept apart. Off, every call only looks whether it is on.
///
/// A clone is another handle of the same breakdown: one for the loader
/// ([`LoaderBuilder::breakdown`](crate::loader::LoaderBuilder::breakdown)), one for the loop. A loader whose
/// breakdown is on does not overlap, and says so in the log: of two things done at once, neither could be
/// timed for itself.
///
/// What runs on a device is timed only if the phase waits for it: synchronise at its end, or measure with the
/// device's events and [`add`](Breakdown::add) the result.
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
    on: Option<Arc<Mutex<Inner>>>,
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
    /// Makes a breakdown that does nothing.
    #[must_use]
    pub const fn off() -> Self {
        Self { on: None }
    }

    /// Makes a breakdown that logs the first 10 steps and every `steps`-th, counted from 0; only the first 10 if that
    /// is 0. The log goes to the standard error, unless [`sink`](Breakdown::sink) sends it elsewhere.
    #[must_use]
    pub fn every(steps: u64) -> Self {
        let inner = Inner {
            every: steps,
            validation_every: steps,
            // Not `eprintln`: it panics if the standard error is closed, and that would end the training.
            sink: Some(Box::new(|line| drop(writeln!(std::io::stderr(), "{line}")))),
            training: Table::default(),
            validation: Table::default(),
            validating: None,
            validated: Duration::ZERO,
        };
        Self { on: Some(Arc::new(Mutex::new(inner))) }
    }

    /// Logs every `batches`-th batch of a validation; none if that is 0. Default: as many as steps, see
    /// [`every`](Breakdown::every).
    #[must_use]
    pub fn validation_every(self, batches: u64) -> Self {
        if let Some(mut inner) = self.lock() {
            inner.validation_every = batches;
        }
        self
    }

    /// Hands the lines of the log to `sink`, one a call and without their ends.
    ///
    /// Lines that are due while the sink is being called are lost, be they the sink's own or another
    /// thread's.
    ///
    /// # Panics
    ///
    /// Not here, but if the sink panics, so does the call whose line it got; the next line is the sink's
    /// again.
    #[must_use]
    pub fn sink(self, sink: impl FnMut(&str) + Send + 'static) -> Self {
        let before = self.lock().and_then(|mut inner| inner.sink.replace(Box::new(sink)));
        drop(before);
        self
    }

    /// Whether it is on.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Runs `work` and counts its time for the phase `name` of this step.
    ///
    /// A phase that runs several times in a step, as where gradients are accumulated over micro-steps, is added up, and
    /// shown for each run too. A phase within a phase counts for both.
    ///
    /// A phase belongs to whatever was running when it started: training or a [`validation`](Breakdown::validation).
    /// Time spent in the other is excluded. A phase that outlives its validation is discarded.
    ///
    /// # Panics
    ///
    /// If `work` does; its time is then not counted.
    #[inline]
    pub fn phase<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        if self.on.is_none() {
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

    /// Counts a time that was measured elsewhere and ended just now: all of it, so measure it without a validation's.
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

    /// Ends a step, or a batch of validation: it lasted from the start of its first phase until now. Time outside of
    /// its phases is shown as `other`. Time between two steps is in neither.
    ///
    /// A validation in between is left out, and phases that are not within one another never add up to more than
    /// the step.
    pub fn end_step(&self) {
        let Some(mut inner) = self.lock() else { return };
        let now = Instant::now();
        let Inner { every, validation_every, .. } = *inner;
        let line = match &mut inner.validating {
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
                    format!("validation {done}/{batches}, {:.3} s so far:", (now - started).as_secs_f64())
                });
                inner.validation.end_step(now, line.as_mut());
                line
            }
        };
        drop(inner);
        if let Some(line) = line {
            self.log(&line);
        }
    }

    /// Counts phases and steps, until the result is dropped, as those of a validation of `batches` batches.
    ///
    /// Its progress is logged at every `K`-th batch, and its time at the end. A validation in the middle of a
    /// step, or of a phase, does not count for it; one within another validation is part of that.
    /// It counts neither as compute nor as wait in the [`Report`](crate::Report) of a loader whose batch is in use on
    /// this thread, whether the breakdown is on or off.
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
    fn table(&mut self) -> &mut Table {
        if self.validating.is_some() { &mut self.validation } else { &mut self.training }
    }

    fn validation_began(&self) -> Option<Instant> {
        self.validating.as_ref().map(|validating| validating.started)
    }
}

/// A table of training and one of validation, of those that had a step: of each phase the mean and the median
/// (of its last 1024 times) over the steps that had it, and its share of all the steps' time.
impl fmt::Display for Breakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(inner) = self.lock() else { return f.write_str("breakdown: off") };
        let mut text = Summary("training", "steps", &inner.training).to_string();
        if inner.validation.steps > 0 {
            // Writing to a `String` does not fail.
            let _ = write!(text, "\n{}", Summary("validation", "batches", &inner.validation));
        }
        drop(inner);
        f.write_str(&text)
    }
}

/// A validation; see [`Breakdown::validation`]. It ends when this is dropped.
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
        let Some(inner) = self.lock() else { return f.write_str("Breakdown(off)") };
        let (every, steps, batches) = (inner.every, inner.training.steps, inner.validation.steps);
        drop(inner);
        f.debug_struct("Breakdown")
            .field("every", &every)
            .field("steps", &steps)
            .field("validation_batches", &batches)
            .finish_non_exhaustive()
    }
}
