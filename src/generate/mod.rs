//! Generators: rounds of data made by a closure ahead of their use, for simulators and self-play.
//!
//! A generator is a loader whose batches come from a closure. It has the same thread, report, errors and trace as a
//! loader. A round is a batch. Errors and traces show its number as the epoch; a report counts no epochs.

mod items;
mod rounds;

use std::fmt;
use std::time::Duration;

pub use self::rounds::{Round, Rounds};
use crate::backend::host::Values;
use crate::backend::sealed::SlotGuard;
use crate::error::{BoxError, Error};
use crate::observe::breakdown::Breakdown;
use crate::observe::log::What;
use crate::observe::report::Report;
use crate::observe::trace::Trace;
use crate::slot::{Naming, Origin, Ticket};
use crate::stage::worker::{Load, Source};
use crate::stage::{self, Around, HELD_TIMEOUT, Stage};

/// Makes rounds of data with a closure. A thread makes round `N + 1` while the caller uses round `N`.
///
/// The caller waits for the first round. After that, the thread makes one round ahead. The generator creates two
/// slots once and reuses them: it allocates, copies and drops nothing per round.
///
/// Without a [`before`](GeneratorBuilder::before) hook, the closure starts a round as soon as a slot is free. With
/// the hook, round `N + 1` starts only after the caller has received round `N` and the hook has run on the caller's
/// thread. Use the hook if rounds depend on the model's current weights.
///
/// Dropping the generator waits at most 10 s for the round in progress and joins the thread. After 10 s it detaches
/// the thread, and the thread ends when its round is made.
///
/// A generator and its [`Round`]s may move to another thread. The hooks may borrow the model.
///
/// # Examples
///
/// ```
/// use twinbuf::{BoxError, generate};
///
/// let simulate = |round: u64, games: &mut Vec<f32>| {
///     games.clear(); // what an earlier round left: a buffer to reuse
///     games.extend((0..1000).map(|i| (round * 1000 + i) as f32));
///     Ok::<(), BoxError>(())
/// };
/// let mut generator = generate(simulate).build()?;
/// for round in generator.rounds(10) {
///     let round = round?; // made while the previous one was trained on; released at the end of the scope
///     assert_eq!(round[1], round.number() as f32 * 1000.0 + 1.0);
/// }
/// println!("{}", generator.report());
/// # Ok::<(), BoxError>(())
/// ```
///
/// Several threads for one round, each with a part of the slot:
///
/// ```
/// use twinbuf::{BoxError, generate};
///
/// let mut simulators = vec![1u64; 4]; // each has its state
/// let simulate = move |round: u64, games: &mut Vec<u64>| {
///     games.resize(4 * 256, 0);
///     std::thread::scope(|scope| {
///         for (state, part) in simulators.iter_mut().zip(games.chunks_exact_mut(256)) {
///             scope.spawn(move || {
///                 *state += round;
///                 part.fill(*state);
///             });
///         }
///     });
///     Ok::<(), BoxError>(())
/// };
/// let mut generator = generate(simulate).build()?;
/// for round in generator.rounds(3) {
///     let round = round?;
///     assert_eq!(round.iter().sum::<u64>(), 4 * 256 * [1, 2, 4][round.number() as usize]);
/// }
/// # Ok::<(), BoxError>(())
/// ```
///
/// Data made from the current weights:
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use twinbuf::{BoxError, generate};
///
/// let model = Mutex::new(1.0f32); // the weights that are trained
/// let copy = Arc::new(Mutex::new(0.0f32)); // and those that play
/// let play = {
///     let copy = copy.clone();
///     move |_round: u64, score: &mut f32| {
///         *score = *copy.lock().unwrap();
///         Ok::<(), BoxError>(())
///     }
/// };
/// let publish = |_next: u64| {
///     *copy.lock().unwrap() = *model.lock().unwrap();
///     Ok::<(), BoxError>(())
/// };
/// let mut generator = generate(play).before(publish).build()?;
/// let mut played = Vec::new();
/// for round in generator.rounds(4) {
///     played.push(*round?);
///     *model.lock().unwrap() *= 2.0; // train
/// }
/// // Round N + 1 was started when round N was received, so it was played before N was trained on.
/// assert_eq!(played, [1.0, 1.0, 2.0, 4.0]);
/// # Ok::<(), BoxError>(())
/// ```
pub struct Generator<'h, T: Send + 'static> {
    stage: Stage<Values<T>>,
    before: Option<Hook<'h>>,
    after: Option<Hook<'h>>,
    /// The first round.
    first: u64,
    /// The round to receive next.
    next: u64,
    /// Rounds below this one may be started.
    granted: u64,
    /// The round that was received, if `after` has not run for it.
    used: Option<u64>,
    /// The epoch of which the rounds are steps, if they are items.
    items: Option<u64>,
}

/// Builds a [`Generator`]. [`generate`] and [`with_slots`] return it.
#[must_use = "a builder does nothing until `build`"]
pub struct GeneratorBuilder<'h, T> {
    slots: Vec<T>,
    make: Make<T>,
    first: u64,
    before: Option<Hook<'h>>,
    after: Option<Hook<'h>>,
    name: Option<String>,
    overlap: bool,
    held_timeout: Duration,
    trace: Option<Trace>,
    breakdown: Breakdown,
    items: Option<u64>,
    around: Option<Around>,
}

type Make<T> = Box<dyn FnMut(u64, &mut T) -> Result<(), BoxError> + Send>;
type Hook<'h> = Box<dyn FnMut(u64) -> Result<(), BoxError> + Send + 'h>;

/// Returns a builder for a generator that calls `make` for each round. The two slots start as `T::default()`.
/// [`with_slots`] documents the arguments of `make`. Use [`with_slots`] for types without a default, or to allocate
/// memory up front.
pub fn generate<'h, T, E, F>(make: F) -> GeneratorBuilder<'h, T>
where
    T: Default,
    F: FnMut(u64, &mut T) -> Result<(), E> + Send + 'static,
    E: Into<BoxError>,
{
    with_slots([T::default(), T::default()], make)
}

/// Returns a builder for a generator that calls `make` for each round, with the caller's initial slots. Defaults:
/// overlap on, no hooks, no trace.
///
/// `make` receives the round number, from 0, and a slot to fill. The slot still holds its initial value or the data
/// of an earlier round. The generator calls `make` once per round, in order. If `make` returns an error or panics,
/// the iterator ends, and the next call of [`rounds`](Generator::rounds) calls `make` again for the same round.
pub fn with_slots<'h, T, E, F>(slots: [T; 2], make: F) -> GeneratorBuilder<'h, T>
where
    F: FnMut(u64, &mut T) -> Result<(), E> + Send + 'static,
    E: Into<BoxError>,
{
    any_slots(slots.into(), make)
}

/// Same as [`with_slots`], with any number of slots from 1 on. For the Python package.
#[doc(hidden)]
pub fn any_slots<'h, T, E, F>(slots: Vec<T>, mut make: F) -> GeneratorBuilder<'h, T>
where
    F: FnMut(u64, &mut T) -> Result<(), E> + Send + 'static,
    E: Into<BoxError>,
{
    let make = Box::new(move |round, slot: &mut T| make(round, slot).map_err(Into::into));
    let breakdown = Breakdown::off();
    let (before, after, name, trace, held_timeout) = (None, None, None, None, HELD_TIMEOUT);
    GeneratorBuilder {
        slots,
        make,
        first: 0,
        before,
        after,
        name,
        overlap: true,
        held_timeout,
        trace,
        breakdown,
        items: None,
        around: None,
    }
}

impl<'h, T: Send + 'static> GeneratorBuilder<'h, T> {
    /// Sets the name of the generator in errors, reports and traces. Default: no name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets whether a thread makes rounds ahead of the caller. Default: `true`.
    ///
    /// With `false`, the call that asks for a round makes it on the caller's thread. The rounds are the same, and
    /// the hooks run at the same points.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Runs `hook(n)` on the caller's thread before round `n` starts. Round `n` starts only after the caller has
    /// received round `n - 1`. Default: no hook.
    ///
    /// Use it to copy the model's current weights to the closure. The hook for round `n` runs inside the call that
    /// receives round `n - 1`; the hook for the first round runs inside the first call. It runs again before a
    /// failed round is retried. It does not run after the last requested round; [`after`](Self::after) does.
    ///
    /// The report counts the hook's time as the caller's. If the hook for round `n` returns an error, round `n` does
    /// not start, and the call that asks for round `n` returns [`Error::Hook`].
    pub fn before<E: Into<BoxError>>(
        mut self,
        mut hook: impl FnMut(u64) -> Result<(), E> + Send + 'h,
    ) -> Self {
        self.before = Some(Box::new(move |round| hook(round).map_err(Into::into)));
        self
    }

    /// Runs `hook(n)` on the caller's thread when the caller has finished with round `n`: when the caller asks for
    /// the next round, or reaches the end of the iterator. Default: no hook.
    ///
    /// Use it to save, to log or to publish the weights after every round, including the last. If the caller drops
    /// the iterator early, the hook runs inside the first call on the next iterator.
    ///
    /// The report counts the hook's time as the caller's. If the hook returns an error, the call returns
    /// [`Error::Hook`] and the iterator ends. The next iterator runs the hook again for the same round. No round is
    /// lost.
    pub fn after<E: Into<BoxError>>(
        mut self,
        mut hook: impl FnMut(u64) -> Result<(), E> + Send + 'h,
    ) -> Self {
        self.after = Some(Box::new(move |round| hook(round).map_err(Into::into)));
        self
    }

    /// Sets the number of the first round, for example to resume a training run. Default: 0.
    pub fn first_round(mut self, round: u64) -> Self {
        self.first = round;
        self
    }

    /// Sets how long to wait for the caller to drop an earlier round when the generator needs its slot. Default: 10
    /// s.
    ///
    /// Another thread can drop the round during the wait. After the timeout the iterator ends with
    /// [`Error::SlotHeld`]. If the waiting thread itself holds the round, the
    /// generator waits for the full timeout.
    pub fn held_timeout(mut self, timeout: Duration) -> Self {
        self.held_timeout = timeout;
        self
    }

    /// Writes a Chrome trace to a file. Default: no trace.
    ///
    /// Each round counts as one epoch of the [`Trace`]. The caller's row has the events `queue_wait` and `train`.
    /// The thread's row has the event `generate`.
    pub fn trace(mut self, trace: impl Into<Trace>) -> Self {
        self.trace = Some(trace.into());
        self
    }

    /// Measures the phases of each round. Default: off. The generator adds the phase `load`. A breakdown that is on
    /// turns overlap off.
    pub fn breakdown(mut self, breakdown: Breakdown) -> Self {
        self.breakdown = breakdown;
        self
    }

    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// - [`Error::Trace`]: the trace file could not be created.
    /// - [`Error::Spawn`]: the system could not start a thread.
    pub fn build(self) -> Result<Generator<'h, T>, Error> {
        let Self { slots, make, first, before, after, name, overlap, held_timeout, trace, breakdown, .. } =
            self;
        let (items, around) = (self.items, self.around);
        if overlap && breakdown.is_on() {
            breakdown.overlap_is_off();
        }
        let trace = trace.map(|trace| trace.open(name.as_deref(), 0, 1)).transpose().map_err(Error::trace)?;
        let options = stage::Options {
            naming: Naming { loader: name.map(Into::into), rounds: items.is_none() },
            overlap: overlap && !breakdown.is_on(),
            held_timeout,
            trace,
            breakdown,
            steps: Box::new(move |_, _| if items.is_some() { u64::MAX } else { 1 }),
            slots: (size_of::<T>(), slots.len(), &"slots of rounds"),
            lent: None,
            sending: None,
            sends: false,
            around,
            help: None,
        };
        let maker = Maker { make, what: if items.is_some() { What::Read } else { What::Generate } };
        let mut stage = Stage::start(Values(slots), vec![Box::new(maker)], options)?;
        stage.recorder().lockstep(before.is_some());
        let (next, granted, used) = (first, first, None);
        let mut generator = Generator { stage, before, after, first, next, granted, used, items };
        let first = generator.ticket();
        if items.is_some() {
            generator.stage.recorder().items(first);
        }
        if let Some(gate) = generator.stage.gate() {
            gate.start_at(first);
        }
        Ok(generator)
    }
}

/// The closure as the source of a stage.
struct Maker<T> {
    make: Make<T>,
    what: What,
}

impl<T> Source<T> for Maker<T> {
    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = T>) -> Result<usize, Error> {
        let Load { ticket, naming, times, who, .. } = load;
        times.bytes = size_of::<T>();
        *who = "closure";
        (self.make)(ticket.epoch, slot.content())
            .map_err(|source| Error::Load { at: naming.at(ticket), source })?;
        Ok(size_of::<T>())
    }

    fn log(&self) -> (What, &'static str) {
        (self.what, if self.what == What::Read { "prefetch" } else { "generate" })
    }

    fn records(&self, _: Ticket) -> Option<Origin> {
        None
    }
}

impl<'h, T: Send + 'static> Generator<'h, T> {
    /// Iterates over the next `n` rounds, in order. [`Rounds`] lists the errors.
    ///
    /// Each call continues with the next round number. If the caller drops the iterator early, the generator starts
    /// no further rounds. A round that was already made, or whose `before` hook has run, is the first round of the
    /// next call.
    ///
    /// A round in use occupies one of the two slots: while the caller keeps one round, only one more can be made.
    /// When the generator needs an occupied slot, it waits up to [`held_timeout`](GeneratorBuilder::held_timeout)
    /// for another thread to drop the round, and then the iterator ends with [`Error::SlotHeld`].
    ///
    /// The iterator borrows the generator: only one iterator can exist at a time.
    ///
    /// ```compile_fail,E0499
    /// # let make = |_: u64, _: &mut u64| Ok::<(), twinbuf::BoxError>(());
    /// let mut generator = twinbuf::generate(make).build().unwrap();
    /// let (a, b) = (generator.rounds(1), generator.rounds(1));
    /// drop((a, b));
    /// ```
    ///
    /// # Panics
    ///
    /// This method does not panic. A call on the iterator panics if a hook panics. If the `before` hook of round `n`
    /// panics, round `n` does not start, and the round that the call was about to return is lost.
    pub fn rounds(&mut self, n: u64) -> Rounds<'_, 'h, T> {
        Rounds::new(self, n)
    }

    /// Returns a report of where the time went so far. In it, `read` is the time of the closure.
    #[must_use]
    pub fn report(&self) -> Report {
        self.stage.report()
    }

    /// Returns a handle to the generator's breakdown, which is off by default. Use it to measure the phases of the
    /// training loop.
    #[must_use]
    pub fn breakdown(&self) -> Breakdown {
        self.stage.breakdown().clone()
    }

    /// Joins the thread and returns a pending error. Waits without a time limit for the round in progress. Dropping
    /// the generator also joins the thread, but waits at most 10 s.
    ///
    /// # Errors
    ///
    /// Returns the error of a round made ahead that the caller has not received: [`Error::Load`] or
    /// [`Error::Panicked`]. Otherwise, returns [`Error::Trace`] if the trace could not be written; delivered rounds
    /// remain valid.
    pub fn close(self) -> Result<(), Error> {
        self.stage.close(None, &[])
    }

    fn ticket(&self) -> Ticket {
        // One generation: rounds that were made for a call that was left early come first in the next one.
        let (epoch, n) = (self.next, self.next - self.first);
        match self.items {
            Some(epoch) => {
                let (seq, step, steps) = (n, n, u64::MAX);
                Ticket { generation: 0, seq, ordinal: 0, epoch, step, steps, last: epoch }
            }
            None => Ticket { generation: 0, seq: n, ordinal: n, epoch, step: 0, steps: 1, last: epoch },
        }
    }
}

impl<T: Send + 'static> fmt::Debug for Generator<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generator")
            .field("next", &self.next)
            .field("overlap", &self.stage.gate().is_some())
            .field("before", &self.before.is_some())
            .field("after", &self.after.is_some())
            .field("trace", &self.stage.trace_path())
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for GeneratorBuilder<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GeneratorBuilder")
            .field("overlap", &self.overlap)
            .field("before", &self.before.is_some())
            .field("after", &self.after.is_some())
            .field("trace", &self.trace)
            .finish_non_exhaustive()
    }
}
