//! Rounds of data made by code, one ahead of the one in use: simulators and self-play.
//!
//! A generator is a loader whose batches a closure makes: the same thread, the same report, errors and trace. Its
//! rounds are epochs of one batch.

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
use crate::stage::{self, HELD_TIMEOUT, Stage};

/// Makes rounds of data with a closure: round `N + 1` on a thread while the caller trains on round `N`.
///
/// The first round is made while the caller waits for it. From then on one round is made ahead. The two slots are
/// made once and recycled: nothing is allocated, copied or dropped per round.
///
/// Without a [`before`](GeneratorBuilder::before) hook the closure may start a round as soon as a slot is free. With
/// it, round `N + 1` starts only when round `N` has been received and the hook has run on the caller's thread: data
/// made from the model's current weights needs that order.
///
/// Dropping the generator waits for the round that is being made and joins the thread. After 10 s it leaves the thread
/// behind. The thread then ends with its round.
///
/// A generator may be sent to another thread, and so may its [`Round`]s. The hook may borrow the model.
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
}

/// Builds a [`Generator`]; made by [`generate`].
#[must_use = "a builder does nothing until `build`"]
pub struct GeneratorBuilder<'h, T> {
    slots: [T; 2],
    make: Make<T>,
    first: u64,
    before: Option<Hook<'h>>,
    after: Option<Hook<'h>>,
    name: Option<String>,
    overlap: bool,
    held_timeout: Duration,
    trace: Option<Trace>,
    breakdown: Breakdown,
}

type Make<T> = Box<dyn FnMut(u64, &mut T) -> Result<(), BoxError> + Send>;
type Hook<'h> = Box<dyn FnMut(u64) -> Result<(), BoxError> + Send + 'h>;

/// Builds a generator of rounds that `make` makes, in two slots that start as `T::default()`.
///
/// See [`with_slots`] for values that have no default or that reserve memory up front.
pub fn generate<'h, T, E, F>(make: F) -> GeneratorBuilder<'h, T>
where
    T: Default,
    F: FnMut(u64, &mut T) -> Result<(), E> + Send + 'static,
    E: Into<BoxError>,
{
    with_slots([T::default(), T::default()], make)
}

/// Builds a generator of rounds that `make` makes in `slots`. Defaults: overlap, no hook, no trace.
///
/// `make` gets the number of the round, from 0, and a slot. The slot still holds the round before the last one. It is
/// called once for every round, in order. After an error or a panic it is called again for the same round if the
/// caller asks again.
pub fn with_slots<'h, T, E, F>(slots: [T; 2], mut make: F) -> GeneratorBuilder<'h, T>
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
    }
}

impl<'h, T: Send + 'static> GeneratorBuilder<'h, T> {
    /// Names the generator in errors, reports and traces. Default: no name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Whether a thread makes the rounds ahead. Default: `true`.
    ///
    /// With `false`, each round is made on the caller's thread when the caller asks for it. The rounds are the same,
    /// and the hook runs at the same points.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Runs `hook(n)` on the caller's thread before round `n` is started, and starts round `n` only once round
    /// `n - 1` has been received.
    ///
    /// This is the place to copy the model's current weights into what the closure reads. The hook runs within the
    /// call that receives round `n - 1`, before the first round too, and again before a round that failed and is
    /// tried again. It does not run after the last round that was asked for; [`after`](Self::after) does.
    ///
    /// Its time counts as the caller's. If it fails, its round is not started, and the next call gets
    /// [`Error::Hook`].
    pub fn before<E: Into<BoxError>>(
        mut self,
        mut hook: impl FnMut(u64) -> Result<(), E> + Send + 'h,
    ) -> Self {
        self.before = Some(Box::new(move |round| hook(round).map_err(Into::into)));
        self
    }

    /// Runs `hook(n)` on the caller's thread when the caller is done with round `n`: when it asks for the next round,
    /// or finds that there is no other.
    ///
    /// This is the place to save, to log, or to publish the weights of every round, also of the last. If the caller
    /// leaves the iterator early, the hook runs within its next call, if there is one.
    ///
    /// Its time counts as the caller's. If it fails, the call gets [`Error::Hook`], and the next call runs it again for
    /// the same round. No round is lost.
    pub fn after<E: Into<BoxError>>(
        mut self,
        mut hook: impl FnMut(u64) -> Result<(), E> + Send + 'h,
    ) -> Self {
        self.after = Some(Box::new(move |round| hook(round).map_err(Into::into)));
        self
    }

    /// Numbers the rounds from `round`: the first round that a resumed training still needs. Default: 0.
    pub fn first_round(mut self, round: u64) -> Self {
        self.first = round;
        self
    }

    /// Sets how long to wait for a round that is still held, when its slot is the next to be filled. Default: 10 s.
    ///
    /// Rounds may be dropped on other threads. When the time is over the iterator ends with [`Error::SlotHeld`], also
    /// if the caller itself holds the round.
    pub fn held_timeout(mut self, timeout: Duration) -> Self {
        self.held_timeout = timeout;
        self
    }

    /// Writes a Chrome trace. Default: no trace.
    ///
    /// Each round counts as an epoch of the [`Trace`]. The caller's row has `queue_wait` and `train`; the thread's
    /// has `generate`.
    pub fn trace(mut self, trace: impl Into<Trace>) -> Self {
        self.trace = Some(trace.into());
        self
    }

    /// Times the phases of each round; the generator adds its own, `load`. Default: off. Turns the overlap off.
    pub fn breakdown(mut self, breakdown: Breakdown) -> Self {
        self.breakdown = breakdown;
        self
    }

    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// [`Error::Trace`] if the trace's file cannot be created, [`Error::Spawn`] if the system starts no thread.
    pub fn build(self) -> Result<Generator<'h, T>, Error> {
        let Self { slots, make, first, before, after, name, overlap, held_timeout, trace, breakdown } = self;
        if overlap && breakdown.is_on() {
            breakdown.overlap_is_off();
        }
        let trace = trace.map(|trace| trace.open(name.as_deref(), 0, 1)).transpose().map_err(Error::trace)?;
        let options = stage::Options {
            naming: Naming { loader: name.map(Into::into), rounds: true },
            overlap: overlap && !breakdown.is_on(),
            held_timeout,
            trace,
            breakdown,
            steps: Box::new(|_, _| 1),
            slots: (size_of::<T>(), slots.len(), &"2 slots"),
            lent: None,
        };
        let mut stage = Stage::start(Values(slots.into()), vec![Box::new(Maker(make))], options)?;
        stage.recorder().lockstep(before.is_some());
        let generator = Generator { stage, before, after, first, next: first, granted: first, used: None };
        if let Some(gate) = generator.stage.gate() {
            gate.start_at(generator.ticket());
        }
        Ok(generator)
    }
}

/// The closure as the source of a stage.
struct Maker<T>(Make<T>);

impl<T> Source<T> for Maker<T> {
    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = T>) -> Result<usize, Error> {
        let Load { ticket, naming, times, who, .. } = load;
        times.bytes = size_of::<T>();
        *who = "closure";
        (self.0)(ticket.epoch, slot.content())
            .map_err(|source| Error::Load { at: naming.at(ticket), source })?;
        Ok(size_of::<T>())
    }

    fn log(&self) -> (What, &'static str) {
        (What::Generate, "generate")
    }

    fn records(&self, _: Ticket) -> Option<Origin> {
        None
    }
}

impl<'h, T: Send + 'static> Generator<'h, T> {
    /// Iterates over the next `n` rounds, in order.
    ///
    /// The numbers continue from call to call. If the iterator is dropped early, no further round is started. A round
    /// that was already made, or whose hook has run, comes first in the next call.
    ///
    /// Slots are filled in turn: while a round is kept, only one more can be made. Asking for another waits for the
    /// first to be dropped on another thread, up to
    /// [`held_timeout`](GeneratorBuilder::held_timeout), and then ends with [`Error::SlotHeld`].
    ///
    /// The iterator borrows the generator, so there is one at a time:
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
    /// The iterator's `next`, if a hook does. The round that `before` ran for has then not been started; the one that
    /// was being received is lost.
    pub fn rounds(&mut self, n: u64) -> Rounds<'_, 'h, T> {
        Rounds::new(self, n)
    }

    /// Reports where the time went so far. `read` is the closure.
    #[must_use]
    pub fn report(&self) -> Report {
        self.stage.report()
    }

    /// Returns a handle of the breakdown that the generator was built with, for the phases of the loop itself.
    #[must_use]
    pub fn breakdown(&self) -> Breakdown {
        self.stage.breakdown().clone()
    }

    /// Joins the thread and returns an error that has not been delivered. Dropping the generator joins it too.
    ///
    /// # Errors
    ///
    /// The failure of the round that was made ahead of a caller who left early; else [`Error::Trace`] if the trace
    /// could not be written. The rounds are not affected by that.
    pub fn close(self) -> Result<(), Error> {
        self.stage.close(None, &[])
    }

    fn ticket(&self) -> Ticket {
        // One generation: rounds that were made for a call that was left early come first in the next one.
        let (epoch, n) = (self.next, self.next - self.first);
        Ticket { generation: 0, seq: n, ordinal: n, epoch, step: 0, steps: 1, last: epoch }
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
