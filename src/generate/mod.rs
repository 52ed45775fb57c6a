//! Generators: rounds of data made by a closure ahead of their use, for simulators and self-play.
//!
//! A generator is a loader whose batches come from a closure. It has a thread, a report, errors and a trace as a
//! loader has. A round is a batch. [`At::epoch`](crate::loader::At::epoch) and traces have its number as the epoch; a
//! report counts no epochs.

use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use crate::error::{BoxError, Error};
use crate::pipe::items::{Course, Next};
use crate::pipe::options::{Options, calls_of_pipe, common};
use crate::pipe::{self, Content, Filled, Filling, Front, Items, Pipe, Place, Slots};
use crate::thread::name;

/// Makes rounds of data with a closure. A thread makes round `N + 1` while the caller uses round `N`.
///
/// The caller waits for the first round. While it holds one, the thread makes one round ahead ([`with_slots`]: up to
/// one fewer than slots). The slots are reused: the generator allocates, copies and drops no round ([`with_parts`]
/// starts threads for each).
///
/// With overlap and without a [`before`](GeneratorBuilder::before) hook, the closure starts a requested round as soon
/// as a slot is free. With the hook, round `N + 1` starts only after the caller has received round `N` and the hook has
/// run on the caller's thread. Use the hook if rounds depend on the model's current weights.
///
/// A generator and its [`Round`]s may move to another thread. The hook may borrow the model.
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
    pipe: Pipe<Slots<T, u64>>,
    before: Option<Hook<'h>>,
    /// The first round of the pipe's current order. `None` if the pipe needs a new order.
    base: Option<u64>,
    /// The round that the caller receives next.
    next: u64,
    /// The round after the last one of the current iterator.
    end: u64,
    /// When the current iterator was created.
    started: Instant,
    /// Workers may start the rounds below this one.
    granted: u64,
}

/// Builds a [`Generator`]. [`generate`], [`with_slots`] and [`with_parts`] return it.
#[must_use = "a builder does nothing until `build`"]
pub struct GeneratorBuilder<'h, T> {
    slots: Vec<T>,
    make: Make<T>,
    before: Option<Hook<'h>>,
    options: Options,
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

/// Returns a builder for a generator that calls `make` for each round, with the caller's initial slots: one or more.
/// Defaults: overlap on, no hook, no trace.
///
/// `make` receives the round number, from 0, and a slot to fill. The slot still holds its initial value or the data
/// of an earlier round. The generator calls `make` for the rounds in order, once for each that does not fail. If `make`
/// returns an error or panics, the iterator returns an error and ends, and the next iterator of
/// [`rounds`](Generator::rounds) calls `make` again for the same round.
pub fn with_slots<'h, T, E, F>(slots: impl Into<Vec<T>>, mut make: F) -> GeneratorBuilder<'h, T>
where
    F: FnMut(u64, &mut T) -> Result<(), E> + Send + 'static,
    E: Into<BoxError>,
{
    let make = Box::new(move |round, slot: &mut T| make(round, slot).map_err(Into::into));
    GeneratorBuilder { slots: slots.into(), make, before: None, options: Options::default() }
}

/// Returns a builder for a generator that makes each round on several threads. A slot is a list of parts, and
/// `fill(round, part, &mut slot[part])` makes one of them. [`with_slots`] documents the slots and the defaults.
///
/// The generator's thread and at most `threads - 1` more, which it starts for the round, each take the next part until
/// none is left. Where the system starts fewer threads, these make all parts. If what `fill` makes depends only on the
/// round, the part and the part's own state, the rounds are the same with any number of threads. A part that takes
/// long is best among the first.
///
/// If `fill` returns an error or panics for a part, the threads end after the part that they have. The round fails with
/// what the first such part, in order, returned, and the next iterator of [`rounds`](Generator::rounds) makes all its
/// parts again.
///
/// # Examples
///
/// ```
/// use std::sync::Mutex;
/// use twinbuf::{BoxError, generate};
///
/// let simulators: Vec<_> = (1..=4).map(Mutex::new).collect(); // one for each part, with its state
/// let simulate = move |round: u64, part: usize, games: &mut Vec<u64>| {
///     let mut state = simulators[part].lock().map_err(|_| "an earlier round panicked")?;
///     *state += round;
///     games.clear(); // what an earlier round left
///     games.resize(256, *state);
///     Ok::<(), BoxError>(())
/// };
/// let slot = || vec![Vec::new(); 4];
/// let mut generator = generate::with_parts([slot(), slot()], 2, simulate).build()?;
/// for round in generator.rounds(3) {
///     let round = round?;
///     let sum: u64 = round.iter().flatten().sum();
///     assert_eq!(sum, 256 * [10, 14, 22][round.number() as usize]);
/// }
/// # Ok::<(), BoxError>(())
/// ```
pub fn with_parts<'h, P, E, F>(
    slots: impl Into<Vec<Vec<P>>>,
    threads: usize,
    fill: F,
) -> GeneratorBuilder<'h, Vec<P>>
where
    P: Send + 'static,
    F: Fn(u64, usize, &mut P) -> Result<(), E> + Send + Sync + 'static,
    E: Into<BoxError>,
{
    with_slots(slots, move |round, slot: &mut Vec<P>| {
        let threads = threads.min(slot.len());
        let state = Mutex::new((slot.iter_mut().enumerate(), None));
        let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            for (number, part) in iter::from_fn(|| lock().0.next()) {
                let made = catch_unwind(AssertUnwindSafe(|| fill(round, number, part).map_err(Into::into)));
                if !matches!(made, Ok(Ok(()))) {
                    let (left, failed) = &mut *lock();
                    *left = [].iter_mut().enumerate();
                    // Parts start in order, so all parts before this one have started. Of all that fail, keep the
                    // lowest number.
                    if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                        *failed = Some((number, made));
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                // If the system cannot start this thread, the other threads make its parts.
                let _ = thread::Builder::new().name(name(None, "part")).spawn_scoped(scope, work);
            }
            work();
        });
        let (_, failed) = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(()), |(_, made)| made.unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

impl<'h, T: Send + 'static> GeneratorBuilder<'h, T> {
    common!();

    /// Runs `hook(n)` on the caller's thread before round `n` starts. Round `n` starts only after the caller has
    /// received round `n - 1`. Default: no hook.
    ///
    /// Use it to copy the model's current weights to the closure. The hook for round `n` runs inside the call that
    /// receives round `n - 1`; the hook for the first round of an iterator runs inside the first call, unless it ran in
    /// an earlier iterator that ended early. It runs again before a failed round is retried. It does not run
    /// after the last requested round.
    ///
    /// The report counts the hook's time as use of a round. If the hook for round `n` returns an error, round `n` does
    /// not start, and the call that asks for round `n` returns [`Error::Hook`], or `close` if no call does.
    pub fn before<E: Into<BoxError>>(
        mut self,
        mut hook: impl FnMut(u64) -> Result<(), E> + Send + 'h,
    ) -> Self {
        self.before = Some(Box::new(move |round| hook(round).map_err(Into::into)));
        self
    }

    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: there is no slot, or too little memory for so many.
    /// - [`Error::Trace`]: the trace file could not be created.
    /// - [`Error::Spawn`]: the system could not start a thread.
    pub fn build(self) -> Result<Generator<'h, T>, Error> {
        let Self { slots, make, before, options } = self;
        let mut builder = pipe::builder(slots).worker(Maker(make)).rounds();
        builder.options = options;
        let pipe = builder.build()?;
        let (base, next, end, granted, started) = (None, 0, 0, 0, Instant::now());
        Ok(Generator { pipe, before, base, next, end, started, granted })
    }
}

/// The source of the pipe: calls the closure.
struct Maker<T>(Make<T>);

impl<T: 'static> pipe::Source<T> for Maker<T> {
    type Unit = u64;

    fn fill(&mut self, round: &mut u64, slot: &mut T, at: &mut Filling<'_>) -> Result<Content, Error> {
        at.runs("closure");
        let bytes = size_of::<T>();
        at.read_bytes(bytes);
        (self.0)(*round, slot).map_err(|source| at.failed(source))?;
        Ok(Content::Bytes(bytes))
    }
}

impl<'h, T: Send + 'static> Generator<'h, T> {
    calls_of_pipe!();

    /// Iterates over the next `n` rounds, in order. [`Rounds`] lists the errors.
    ///
    /// Each call continues with the next round number. If the caller drops the iterator early, the generator starts
    /// no further rounds, except one whose `before` hook has run. What it has started comes first in the next iterator.
    ///
    /// A round in use occupies a slot: of two slots, only one more round can be made while the caller keeps one. If the
    /// next round needs an occupied slot, the call for it waits up to [`held_timeout`](GeneratorBuilder::held_timeout)
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
    /// Not this method, but a call on the iterator panics if a hook panics. If the `before` hook of round `n`
    /// panics, round `n` does not start, and the round that the call was about to return, if any, is lost.
    pub fn rounds(&mut self, n: u64) -> Rounds<'_, 'h, T> {
        self.end = self.next.saturating_add(n);
        (self.started, self.pipe.failed) = (Instant::now(), None);
        Items::lent(self)
    }

    /// Allows the worker to start the requested rounds. With a hook `before`, runs the hook and allows only the next
    /// round.
    fn grant(&mut self) -> Result<(), Error> {
        let place = self.place();
        let Self { pipe, before, base, next, end, granted, started, .. } = self;
        *granted = match before {
            Some(hook) if granted == next => {
                let done = hook(*next);
                pipe.recorder().prepared(place, Instant::now());
                done.map_err(|source| Error::Hook { at: pipe.at(place), source })?;
                *next + 1
            }
            None if *granted < *end => *end,
            _ => return Ok(()),
        };
        let base = *base.get_or_insert_with(|| {
            let place = |round| (Place { ordinal: round, epoch: round, step: 0 }, round);
            pipe.post(Box::new((*next..).map(place)), 0, 0);
            *next
        });
        pipe.grant_since(*granted - base, *started);
        Ok(())
    }
}

impl<T: Send + 'static> Front for Generator<'_, T> {
    type Item = Round<T>;
}

impl<T: Send + 'static> Course<Round<T>> for Generator<'_, T> {
    type Ring = Slots<T, u64>;

    fn pipe(&self) -> &Pipe<Slots<T, u64>> {
        &self.pipe
    }

    fn pipe_mut(&mut self) -> &mut Pipe<Slots<T, u64>> {
        &mut self.pipe
    }

    fn place(&self) -> Place {
        Place { ordinal: self.next, epoch: self.next, step: 0 }
    }

    fn next(&mut self) -> Next<Round<T>> {
        if self.next == self.end {
            return Next::End;
        }
        self.pipe.asked(self.place(), Instant::now());
        match self.grant() {
            Ok(()) => Next::Slot,
            Err(error) => Next::Failed(error),
        }
    }

    fn item(&mut self, slot: Round<T>) -> Round<T> {
        self.next += 1;
        if self.next < self.end {
            self.pipe.failed = self.grant().err();
        }
        slot
    }

    fn ended(&mut self, error: Option<&Error>) {
        if matches!(error, Some(Error::Load { .. } | Error::Panicked { .. })) {
            // This round failed: the next call makes it again, first.
            (self.base, self.granted) = (None, self.next);
        } else if let (Some(base), None) = (self.base, &self.before) {
            // Take back the rounds that no worker has started. With a hook `before`, take none back, because the hook
            // has already run for them.
            self.granted = base + self.pipe.retract();
        }
    }

    fn left(&self) -> (usize, Option<usize>) {
        let left = self.end - self.next;
        (usize::from(left > 0), usize::try_from(left).ok())
    }
}

/// An iterator over rounds. [`Generator::rounds`] returns it.
///
/// # Errors
///
/// The iterator returns every round before the one that failed, then one error, and then ends.
///
/// - [`Error::Load`]: the closure returned an error.
/// - [`Error::Panicked`]: the closure or a task's waker panicked.
/// - [`Error::Hook`]: a hook returned an error.
/// - [`Error::SlotHeld`]: the caller did not drop an earlier round within the
///   [`held_timeout`](GeneratorBuilder::held_timeout).
/// - [`Error::Forked`]: with overlap, this process was forked from the process that built the generator.
/// - [`Error::ThreadGone`]: the thread ended unexpectedly.
///
/// # Panics
///
/// A call that asks for a round panics if a hook panics; see [`Generator::rounds`].
pub type Rounds<'g, 'h, T> = Items<'g, Generator<'h, T>>;

/// The data of one round, in its slot. It dereferences to `T`. Dropping it frees the slot. It may move to another
/// thread.
pub type Round<T> = Filled<T, u64>;

impl<T: Send + 'static> Round<T> {
    /// Returns the number of the round. Numbers start at 0 and continue over all iterators of the generator.
    #[must_use]
    pub fn number(&self) -> u64 {
        *self.unit()
    }
}

debug!([T: Send + 'static] Generator['_, T], |generator| next: generator.next, pipe: generator.pipe);

debug!([T] GeneratorBuilder['_, T], |builder| slots: builder.slots.len(), options: builder.options);
