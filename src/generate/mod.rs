//! Rounds of data made by code, one ahead of the one in use: simulators and self-play.
//!
//! A generator is a loader whose batches a closure makes: the same thread, the same report, errors and trace. Its
//! rounds are epochs of one batch.

use std::fmt;
use std::iter::FusedIterator;
use std::ops::{Deref, DerefMut};
use std::task::Poll;
use std::time::{Duration, Instant};

use twinbuf_core::KeptSlot;

use crate::backend::Waiting;
use crate::backend::adaptive::Adaptive;
use crate::backend::host::{Value, Values};
use crate::backend::sealed::SlotGuard;
use crate::error::{At, BoxError, Error};
use crate::observe::breakdown::Breakdown;
use crate::observe::log::What;
use crate::observe::report::Report;
use crate::observe::trace::Trace;
use crate::slot::{Naming, Origin, Slot, Ticket};
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
    hook: Option<Hook<'h>>,
    /// The round to receive next.
    next: u64,
    /// Rounds below this one may be started.
    granted: u64,
}

/// Builds a [`Generator`]; made by [`generate`].
#[must_use = "a builder does nothing until `build`"]
pub struct GeneratorBuilder<'h, T> {
    slots: [T; 2],
    make: Make<T>,
    hook: Option<Hook<'h>>,
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
    let (hook, name, trace, held_timeout) = (None, None, None, HELD_TIMEOUT);
    GeneratorBuilder { slots, make, hook, name, overlap: true, held_timeout, trace, breakdown }
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
    /// tried again. It does not run after the last round that was asked for: the weights of the last training step are
    /// published before the next round, or by the program itself.
    ///
    /// Its time counts as the caller's. If it fails, its round is not started, and the next call gets
    /// [`Error::Hook`].
    pub fn before<E: Into<BoxError>>(
        mut self,
        mut hook: impl FnMut(u64) -> Result<(), E> + Send + 'h,
    ) -> Self {
        self.hook = Some(Box::new(move |round| hook(round).map_err(Into::into)));
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
        let Self { slots, make, hook, name, overlap, held_timeout, trace, breakdown } = self;
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
            steps: 1,
            slots: (size_of::<T>(), slots.len(), &"2 slots"),
            lent: None,
        };
        let mut stage = Stage::start(Values(slots.into()), vec![Box::new(Maker(make))], options)?;
        stage.recorder().lockstep(hook.is_some());
        Ok(Generator { stage, hook, next: 0, granted: 0 })
    }
}

/// The closure as the source of a stage.
struct Maker<T>(Make<T>);

impl<T> Source<T> for Maker<T> {
    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = T>) -> Result<usize, Error> {
        let Load { ticket, naming, who, .. } = load;
        *who = "closure";
        (self.0)(ticket.epoch, slot.content())
            .map_err(|source| Error::Load { at: naming.at(ticket), source })?;
        Ok(size_of::<T>())
    }

    fn log(&self) -> (What, &'static str) {
        (What::Generate, "generate")
    }

    fn records(&self, _: Ticket) -> (Option<Origin>, usize) {
        (None, size_of::<T>())
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
    /// The iterator's `next`, if the hook does. The round that it ran before has then not been started; the one that
    /// was being received is lost.
    pub fn rounds(&mut self, n: u64) -> Rounds<'_, 'h, T> {
        let end = self.next.saturating_add(n);
        Rounds { generator: self, end, started: Instant::now(), hook_failed: None, ended: false }
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
        let n = self.next;
        Ticket { generation: 0, seq: n, ordinal: n, epoch: n, step: 0, steps: 1, last: n }
    }
}

/// An iterator over rounds; see [`Generator::rounds`].
///
/// It yields at most one error, after every round made before it, and then ends.
#[must_use = "rounds are delivered only by iterating"]
pub struct Rounds<'g, 'h, T: Send + 'static> {
    generator: &'g mut Generator<'h, T>,
    end: u64,
    started: Instant,
    /// The hook failed for the next round when the last one was received.
    hook_failed: Option<Error>,
    ended: bool,
}

impl<T: Send + 'static> Iterator for Rounds<'_, '_, T> {
    type Item = Result<Round<T>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        if self.generator.next == self.end || self.hook_failed.is_some() {
            self.end();
            return self.hook_failed.take().map(Err);
        }
        let ticket = self.generator.ticket();
        if self.generator.stage.is_orphaned() {
            self.ended = true;
            return Some(Err(Error::Forked { at: self.generator.stage.naming().at(ticket) }));
        }
        let called = Instant::now();
        self.generator.stage.asked(ticket, called);
        let found = self.grant().and_then(|()| {
            self.generator.stage.recorder().prepared(Instant::now());
            match self.generator.stage.receive(ticket, Waiting::Block) {
                Poll::Ready(found) => found,
                Poll::Pending => unreachable!("a wait that blocks ends with a round or an error"),
            }
        });
        match found {
            Ok(slot) => {
                self.generator.next += 1;
                let round = Round { slot };
                if self.generator.next < self.end {
                    self.hook_failed = self.grant().err();
                }
                Some(Ok(round))
            }
            Err(error) => {
                if matches!(error, Error::Load { .. } | Error::Panicked { .. }) {
                    self.generator.granted = ticket.epoch;
                    if let Some(gate) = self.generator.stage.gate() {
                        gate.heard();
                    }
                }
                self.end();
                Some(Err(error))
            }
        }
    }

    /// Collects the rounds, at most two. If there are more, it fails with [`Error::SlotHeld`] at once: only the
    /// collection holds the slots, so a wait would never end.
    fn collect<C: FromIterator<Self::Item>>(mut self) -> C {
        let mut rounds = 0;
        std::iter::from_fn(|| {
            rounds += 1;
            if rounds <= 2 {
                return self.next();
            }
            let patience = self.generator.stage.set_held_timeout(Duration::ZERO);
            let item = self.next();
            self.generator.stage.set_held_timeout(patience);
            item
        })
        .collect()
    }

    /// Exact, unless an error ends the iteration early.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended { 0 } else { self.end - self.generator.next };
        (usize::from(left > 0), usize::try_from(left).ok())
    }
}

impl<T: Send + 'static> FusedIterator for Rounds<'_, '_, T> {}

impl<T: Send + 'static> Rounds<'_, '_, T> {
    /// Gives leave to start the rounds asked for; with a hook only the next one, after the hook.
    fn grant(&mut self) -> Result<(), Error> {
        let Generator { stage, hook, next, granted } = &mut *self.generator;
        *granted = match hook {
            Some(hook) if granted == next => {
                hook(*next).map_err(|source| {
                    let at = At { loader: stage.naming().loader.clone(), epoch: *next, step: None };
                    Error::Hook { at, source }
                })?;
                *next + 1
            }
            None if *granted < self.end => self.end,
            _ => return Ok(()),
        };
        if let Some(gate) = stage.gate() {
            gate.grant(*granted - 1, self.started);
        }
        Ok(())
    }

    fn end(&mut self) {
        self.ended = true;
        let Generator { stage, hook, granted, .. } = &mut *self.generator;
        if stage.is_orphaned() {
            return;
        }
        stage.ended(Instant::now());
        // With a hook the round that it ran before has been granted: it is made from what the hook saw.
        if let (Some(gate), None) = (stage.gate(), hook) {
            *granted = gate.retract();
        }
    }
}

impl<T: Send + 'static> Drop for Rounds<'_, '_, T> {
    fn drop(&mut self) {
        if !self.ended {
            self.end();
        }
    }
}

/// One round's data, in its slot. Dropping it frees the slot. It may be sent to another thread.
pub struct Round<T: Send + 'static> {
    slot: KeptSlot<'static, Slot<Value<T>>, Adaptive>,
}

impl<T: Send + 'static> Round<T> {
    /// Its number, from 0 over all rounds of the generator.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.slot.meta().ticket.epoch
    }
}

impl<T: Send + 'static> Deref for Round<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.slot.content.0
    }
}

impl<T: Send + 'static> DerefMut for Round<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.slot.content.0
    }
}

impl<T: Send + 'static> fmt::Debug for Generator<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generator")
            .field("next", &self.next)
            .field("overlap", &self.stage.gate().is_some())
            .field("hook", &self.hook.is_some())
            .field("trace", &self.stage.trace_path())
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for GeneratorBuilder<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GeneratorBuilder")
            .field("overlap", &self.overlap)
            .field("hook", &self.hook.is_some())
            .field("trace", &self.trace)
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> fmt::Debug for Rounds<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounds")
            .field("next", &self.generator.next)
            .field("end", &self.end)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl<T: fmt::Debug + Send + 'static> fmt::Debug for Round<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Round").field("number", &self.number()).field("value", &**self).finish()
    }
}
