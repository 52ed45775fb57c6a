//! Rounds of data made by code, one ahead of the one in use: simulators and self-play.

use std::fmt;
use std::iter::FusedIterator;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twinbuf_core::{Consumer, Park, Producer, ReadSlot, RecvError, Ring, TryAcquireError};

use crate::error::{BoxError, Error};
use crate::fork::OfProcess;
use crate::loader::{Joined, Loader};
use crate::reader::message;
use crate::report::{DOMINATES, Stage, Verdict, left, ratio};
use crate::trace::{Place, Profile, Trace, Track};

/// Rounds of data that a closure makes: round `N + 1` on a thread of its own while the caller trains on `N`.
///
/// The first round is made while the caller waits for it: there is nothing yet to train on meanwhile. From
/// then on one round is made ahead. The two slots are made once and recycled: nothing is allocated, copied or
/// dropped per round.
///
/// Without [`lockstep`](GeneratorBuilder::lockstep) the closure may start a round as soon as a slot is free.
/// With it, round `N + 1` starts when round `N` has been taken and the hook has run on the caller's thread:
/// data made from the model's current weights needs that order.
///
/// Dropping the generator, in whatever state, waits for the round that is being made and joins the thread.
///
/// It stays on the thread that built it, as the hook does, which may borrow the model there: it is not
/// `Send`. Its [`Round`]s may go to others.
///
/// # Examples
///
/// ```
/// use twinbuf::{BoxError, Loader};
///
/// let simulate = |round: u64, games: &mut Vec<f32>| {
///     games.clear(); // what an earlier round left: a buffer to reuse
///     games.extend((0..1000).map(|i| (round * 1000 + i) as f32));
///     Ok::<(), BoxError>(())
/// };
/// let mut generator = Loader::generate([Vec::new(), Vec::new()], simulate).build()?;
/// for round in generator.rounds(10) {
///     let round = round?; // made while the last one was trained on; released at the end of the scope
///     assert_eq!(round[1], round.number() as f32 * 1000.0 + 1.0);
/// }
/// println!("{}", generator.report());
/// # Ok::<(), BoxError>(())
/// ```
///
/// Data made from the current weights:
///
/// ```
/// use std::cell::RefCell;
/// use std::sync::{Arc, Mutex};
/// use twinbuf::{BoxError, Loader};
///
/// let model = RefCell::new(1.0f32); // the weights that are trained
/// let copy = Arc::new(Mutex::new(0.0f32)); // and those that play
/// let play = {
///     let copy = copy.clone();
///     move |_round: u64, score: &mut f32| {
///         *score = *copy.lock().unwrap();
///         Ok::<(), BoxError>(())
///     }
/// };
/// let mut generator = Loader::generate([0.0; 2], play)
///     .lockstep(|_next| *copy.lock().unwrap() = *model.borrow())
///     .build()?;
/// let mut played = Vec::new();
/// for round in generator.rounds(4) {
///     played.push(*round?);
///     *model.borrow_mut() *= 2.0; // train
/// }
/// // Round N + 1 was started when round N was taken, so it was played before N was trained on.
/// assert_eq!(played, [1.0, 1.0, 2.0, 4.0]);
/// # Ok::<(), BoxError>(())
/// ```
pub struct Generator<'h, T: 'static> {
    running: OfProcess<Running<T>>,
    caller: Caller<'h>,
}

/// Makes a [`Generator`]; see [`Loader::generate`].
#[must_use = "a builder does nothing until `build`"]
pub struct GeneratorBuilder<'h, T> {
    slots: [T; 2],
    make: Make<T>,
    hook: Option<Hook<'h>>,
    overlap: bool,
    profile: Option<Profile>,
}

type Make<T> = Box<dyn FnMut(u64, &mut T) -> Result<(), BoxError> + Send>;
type Hook<'h> = Box<dyn FnMut(u64) + 'h>;

impl Loader {
    /// A generator of rounds that `make` makes in `slots`, with overlap, not in lockstep, no trace.
    ///
    /// `make` gets the number of the round, from 0, and a slot, with what the round before the last left in
    /// it. It is called once for every round, in order; after an error or a panic once more for the same
    /// round, if the caller goes on.
    pub fn generate<'h, T, E, F>(slots: [T; 2], mut make: F) -> GeneratorBuilder<'h, T>
    where
        F: FnMut(u64, &mut T) -> Result<(), E> + Send + 'static,
        E: Into<BoxError>,
    {
        let make = Box::new(move |round, slot: &mut T| make(round, slot).map_err(Into::into));
        GeneratorBuilder { slots, make, hook: None, overlap: true, profile: None }
    }
}

impl<'h, T: Send + 'static> GeneratorBuilder<'h, T> {
    /// Whether a thread makes the rounds ahead; `true` unless said otherwise. If not, each is made on the
    /// caller's thread when it is asked for: the same rounds, and in lockstep the hook at the same points.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Starts no round before the one before it has been taken and `hook` has run with the number of the new
    /// round, on the caller's thread, within the call that takes the round before it.
    ///
    /// The place to copy the model's current weights into what the closure reads. It runs before the first
    /// round too, and again before a round that failed and is tried again. Its time counts as the caller's.
    pub fn lockstep(mut self, hook: impl FnMut(u64) + 'h) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Records what happens in a file; nothing unless said otherwise.
    ///
    /// Each round counts as an epoch of the [`Profile`]. Events of the caller's track: `queue_wait`, `train`;
    /// of the thread's: `generate`.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = Some(profile);
        self
    }

    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// [`Error::Trace`] if the trace's file cannot be made, [`Error::Spawn`] if the system starts no thread.
    pub fn build(self) -> Result<Generator<'h, T>, Error> {
        let Self { slots, make, hook, overlap, profile } = self;
        let trace = profile.map(|profile| profile.create(0, 1)).transpose()?.map(Arc::new);
        let slots = slots.map(|value| Slot { value, made: None });
        let (producer, consumer) = Ring::with_wait(slots, Park).into_handles();
        let maker = Maker { make, track: Track::new(trace.clone(), 2, "generate") };
        let feed = if overlap {
            let gate = Arc::new(Gate::new());
            let seen = gate.clone();
            let thread = std::thread::Builder::new()
                .name("twinbuf-generate".to_string())
                .spawn(move || maker.run(&seen, producer))
                .map_err(Error::Spawn)?;
            Feed::Ahead(Worker { gate, _thread: Joined::new(thread, None) })
        } else {
            Feed::Inline(maker, producer)
        };
        let track = Track::new(trace.clone(), 1, "train");
        Ok(Generator {
            running: OfProcess::new(Running { slots: consumer, feed, track, trace }),
            caller: Caller { hook, next: 0, granted: 0, report: GenerateReport::default() },
        })
    }
}

impl<'h, T: 'static> Generator<'h, T> {
    /// The next `n` rounds, in order.
    ///
    /// The numbers go on from call to call; a round that was made ahead for a call that was left early comes
    /// first in the next one. Left early, no round is started but the one that is being made, or, in
    /// lockstep, the one for which the hook has run.
    ///
    /// The two slots come round in turn: while a round is kept, only one more can be made. Asking for another
    /// then is [`RoundError::AllHeld`].
    ///
    /// One call at a time, which the compiler sees to:
    ///
    /// ```compile_fail,E0499
    /// # let make = |_: u64, _: &mut u64| Ok::<(), twinbuf::BoxError>(());
    /// let mut generator = twinbuf::Loader::generate([0; 2], make).build().unwrap();
    /// let (a, b) = (generator.rounds(1), generator.rounds(1));
    /// drop((a, b));
    /// ```
    ///
    /// # Panics
    ///
    /// The iterator's `next`, if the hook does. The round that it ran before has then not been started; the
    /// one that was being taken is lost.
    pub fn rounds(&mut self, n: u64) -> Rounds<'_, 'h, T> {
        let now = Instant::now();
        let end = self.caller.next.saturating_add(n);
        let process = self.running.process();
        let Running { slots, feed, track, .. } = &mut *self.running;
        Rounds {
            slots,
            feed,
            track,
            caller: &mut self.caller,
            process,
            end,
            started: now,
            counted: now,
            before: Duration::ZERO,
            in_use: None,
            ended: false,
        }
    }

    /// Where the time went so far.
    #[must_use]
    pub fn report(&self) -> GenerateReport {
        self.caller.report
    }

    /// Ends the thread, which dropping the generator does too, and tells what nobody has heard yet.
    ///
    /// # Errors
    ///
    /// [`Error::Round`] with the failure of the round that was made ahead for a caller who left before it
    /// came to it; else [`Error::Trace`] if the trace could not be written, which did not disturb it.
    pub fn close(self) -> Result<(), Error> {
        let Some(Running { slots, feed, track, trace }) = self.running.into_inner() else { return Ok(()) };
        let mut unheard = Ok(());
        if let Feed::Ahead(worker) = &feed {
            worker.gate.close();
            // Up to the end of the ring, or to a round that the caller has leaked.
            while let Ok(mut slot) = slots.recv() {
                if let Some(error) = slot.failure() {
                    unheard = Err(Error::Round(error));
                    break;
                }
            }
        }
        drop(slots);
        drop(feed);
        drop(track);
        unheard.and(trace.map_or(Ok(()), |trace| trace.check()))
    }
}

/// What goes on while a generator lives.
struct Running<T: 'static> {
    // Dropped in this order: the consumer's end makes the thread return from its wait for a slot, the feed's
    // end from its wait for leave to start, and joins it.
    slots: Consumer<'static, Slot<T>, Park>,
    feed: Feed<T>,
    track: Track,
    trace: Option<Arc<Trace>>,
}

/// What the ring carries: the caller's value, and what became of it.
struct Slot<T> {
    value: T,
    made: Option<Made>,
}

impl<T> Slot<T> {
    /// Why the round could not be made, moved out.
    fn failure(&mut self) -> Option<RoundError> {
        std::mem::replace(&mut self.made.as_mut()?.result, Ok(())).err()
    }
}

struct Made {
    round: u64,
    result: Result<(), RoundError>,
    /// How long the closure took.
    took: Duration,
    /// How long it could not start, for want of a slot or of leave.
    waited: Duration,
}

/// Makes rounds, on whatever thread it is called.
struct Maker<T> {
    make: Make<T>,
    track: Track,
}

impl<T> Maker<T> {
    fn fill(&mut self, round: u64, slot: &mut Slot<T>, waited: Duration) {
        let start = Instant::now();
        // A closure that panicked is called again only if the caller goes on: what it then does is its own
        // affair, and memory-safe.
        let result = match catch_unwind(AssertUnwindSafe(|| (self.make)(round, &mut slot.value))) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(RoundError::Failed { round, source }),
            Err(panic) => Err(RoundError::Panicked { round, message: message(&*panic) }),
        };
        let end = Instant::now();
        self.track.span("generate", place(round), start, end);
        self.track.write_if_due(end);
        slot.made = Some(Made { round, result, took: end - start, waited });
    }

    /// The thread: makes round after round, as far as there are slots and leave, until the generator is gone.
    fn run(mut self, gate: &Gate, mut slots: Producer<'_, Slot<T>, Park>) {
        loop {
            let asked = Instant::now();
            // The slot first: a round counts as started only when nothing but the closure is in its way.
            let Ok(mut slot) = slots.acquire() else { return };
            if gate.would_wait() {
                self.track.flush();
            }
            let Some((round, resumed)) = gate.start() else { return };
            let waited = Instant::now().saturating_duration_since(asked.max(resumed));
            self.fill(round, &mut slot, waited);
            if slot.made.as_ref().is_some_and(|made| made.result.is_err()) {
                gate.failed();
            }
            if slot.commit().is_err() {
                return;
            }
        }
    }
}

fn place(round: u64) -> Place {
    Place { ordinal: round, epoch: round, step: None }
}

/// Which rounds the thread may start.
struct Gate {
    state: Mutex<Leave>,
    changed: Condvar,
}

struct Leave {
    /// Rounds started, a failed one not among them: the number of the next.
    started: u64,
    /// Rounds below this one may be started.
    granted: u64,
    /// The last round failed, and the caller has not heard of it yet: nothing is started.
    failed: bool,
    /// When the caller began to ask for rounds again: before that the thread did not wait, it rested.
    resumed: Instant,
    closed: bool,
}

impl Gate {
    fn new() -> Self {
        let resumed = Instant::now();
        let state = Leave { started: 0, granted: 0, failed: false, resumed, closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// No foreign code runs while it is locked.
    fn lock(&self) -> MutexGuard<'_, Leave> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn would_wait(&self) -> bool {
        self.lock().next().is_none()
    }

    /// Waits for leave to start the next round. `None` once the generator is gone.
    fn start(&self) -> Option<(u64, Instant)> {
        let mut leave = self.lock();
        loop {
            if leave.closed {
                return None;
            }
            if let Some(round) = leave.next() {
                leave.started += 1;
                return Some((round, leave.resumed));
            }
            leave = self.changed.wait(leave).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The round started last failed. Called before it is handed over, so that the caller hears of it later.
    fn failed(&self) {
        let mut leave = self.lock();
        leave.started -= 1;
        leave.failed = true;
    }

    fn grant(&self, granted: u64, resumed: Instant) {
        let mut leave = self.lock();
        (leave.granted, leave.resumed) = (granted, resumed);
        drop(leave);
        self.changed.notify_one();
    }

    /// Takes back the leave for rounds that have not been started; says how far it still goes.
    fn retract(&self) -> u64 {
        let mut leave = self.lock();
        leave.granted = leave.granted.min(leave.started);
        leave.granted
    }

    /// The caller has heard of the failure.
    fn heard(&self) {
        let mut leave = self.lock();
        leave.failed = false;
        leave.granted = leave.started;
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }
}

impl Leave {
    fn next(&self) -> Option<u64> {
        (!self.failed && self.started < self.granted).then_some(self.started)
    }
}

/// The thread, which is told to end and joined when this is dropped.
struct Worker {
    gate: Arc<Gate>,
    _thread: Joined,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.gate.close();
    }
}

/// Who makes the rounds.
enum Feed<T: 'static> {
    /// A thread, ahead of the caller.
    Ahead(Worker),
    /// The caller itself, when it asks for a round.
    Inline(Maker<T>, Producer<'static, Slot<T>, Park>),
}

/// What the caller has asked for, and what came of it.
struct Caller<'h> {
    hook: Option<Hook<'h>>,
    /// The round to receive next.
    next: u64,
    /// Rounds below this one may be started.
    granted: u64,
    report: GenerateReport,
}

/// Some rounds of a [`Generator`]; see [`Generator::rounds`].
///
/// After an error it ends; the next call of [`rounds`](Generator::rounds) tries that round again.
#[must_use = "no round is made until it is asked for"]
pub struct Rounds<'g, 'h, T: 'static> {
    slots: &'g Consumer<'static, Slot<T>, Park>,
    feed: &'g mut Feed<T>,
    track: &'g mut Track,
    caller: &'g mut Caller<'h>,
    /// The process that the thread is in.
    process: u32,
    end: u64,
    started: Instant,
    /// Up to when the report has counted the wall-clock time.
    counted: Instant,
    /// How long the caller used the round before: the next one can be made meanwhile.
    before: Duration,
    /// The round that the caller has, and since when.
    in_use: Option<(u64, Instant)>,
    ended: bool,
}

impl<'g, T: 'static> Iterator for Rounds<'g, '_, T> {
    type Item = Result<Round<'g, T>, RoundError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let called = Instant::now();
        if self.caller.next == self.end {
            self.end(called);
            return None;
        }
        if self.thread_is_elsewhere() {
            self.end(called);
            return Some(Err(RoundError::Forked { round: self.caller.next }));
        }
        self.end_of_use(called);
        self.ask();
        let asked = Instant::now();
        let found = self.receive();
        let received = Instant::now();
        match found {
            Ok(slot) => {
                self.count(asked - called, received - asked, &slot);
                let round = self.caller.next - 1;
                self.in_use = Some((round, received));
                self.track.span("queue_wait", place(round), asked, received);
                self.track.write_if_due(received);
                if self.caller.next < self.end {
                    self.ask();
                }
                Some(Ok(Round { slot }))
            }
            Err(error) => {
                self.end(received);
                Some(Err(error))
            }
        }
    }

    /// Exact, unless an error cuts it short.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended { 0 } else { self.end - self.caller.next };
        (usize::from(left > 0), usize::try_from(left).ok())
    }
}

impl<T: 'static> FusedIterator for Rounds<'_, '_, T> {}

impl<'g, T: 'static> Rounds<'g, '_, T> {
    /// In a process that was forked: nobody would make a round, and a lock that the thread held stays held.
    fn thread_is_elsewhere(&self) -> bool {
        matches!(self.feed, Feed::Ahead(_)) && self.process != std::process::id()
    }

    /// Gives leave to start the rounds asked for, in lockstep only the next one, after the hook.
    fn ask(&mut self) {
        let caller = &mut *self.caller;
        caller.granted = match &mut caller.hook {
            Some(hook) if caller.granted == caller.next => {
                hook(caller.next);
                caller.next + 1
            }
            None if caller.granted < self.end => self.end,
            _ => return,
        };
        if let Feed::Ahead(worker) = &self.feed {
            worker.gate.grant(caller.granted, self.started);
        }
    }

    fn receive(&mut self) -> Result<ReadSlot<'g, Slot<T>, Park>, RoundError> {
        let round = self.caller.next;
        if let Feed::Inline(maker, producer) = &mut *self.feed {
            let mut slot = producer.try_acquire().map_err(|error| match error {
                TryAcquireError::Full => RoundError::AllHeld { round },
                TryAcquireError::Closed => RoundError::WorkerGone { round },
            })?;
            maker.fill(round, &mut slot, Duration::ZERO);
            slot.commit().map_err(|_| RoundError::WorkerGone { round })?;
        }
        let slots = self.slots;
        let mut slot = slots.recv().map_err(|error| match error {
            RecvError::AllHeld => RoundError::AllHeld { round },
            RecvError::Finished | RecvError::Abandoned => RoundError::WorkerGone { round },
        })?;
        if let Some(error) = slot.failure() {
            self.caller.granted = round;
            if let Feed::Ahead(worker) = &self.feed {
                worker.gate.heard();
            }
            return Err(error);
        }
        self.caller.next += 1;
        Ok(slot)
    }

    /// A round was received; `hook` is what the hook took before.
    fn count(&mut self, hook: Duration, waited: Duration, slot: &Slot<T>) {
        let Some(made) = &slot.made else { return };
        let report = &mut self.caller.report;
        report.rounds += 1;
        report.generate.busy += made.took;
        report.generate.waiting += made.waited;
        report.train.busy += hook;
        report.train.waiting += waited;
        report.ideal += hook + made.took.max(std::mem::take(&mut self.before));
    }

    /// The caller is done with its round: it asks for the next, or gives up.
    fn end_of_use(&mut self, now: Instant) {
        let report = &mut self.caller.report;
        report.wall += now.saturating_duration_since(self.counted);
        self.counted = now;
        if let Some((round, received)) = self.in_use.take() {
            self.before = now - received;
            report.train.busy += self.before;
            self.track.span("train", place(round), received, now);
        }
    }

    fn end(&mut self, now: Instant) {
        self.ended = true;
        if self.thread_is_elsewhere() {
            return;
        }
        self.end_of_use(now);
        // Nothing is left to hide the last round's use behind.
        self.caller.report.ideal += std::mem::take(&mut self.before);
        self.track.flush();
        match &mut *self.feed {
            Feed::Inline(maker, _) => maker.track.flush(),
            // In lockstep the hook has run for a round that was granted: it is made from what the hook saw.
            Feed::Ahead(_) if self.caller.hook.is_some() => {}
            Feed::Ahead(worker) => self.caller.granted = worker.gate.retract(),
        }
    }
}

impl<T: 'static> Drop for Rounds<'_, '_, T> {
    fn drop(&mut self) {
        if !self.ended {
            self.end(Instant::now());
        }
    }
}

/// One round's data, in its slot. The slot is free for another round when this is dropped.
///
/// It may be sent to another thread.
pub struct Round<'g, T> {
    slot: ReadSlot<'g, Slot<T>, Park>,
}

impl<T> Round<'_, T> {
    /// Its number, from 0 over all rounds of the generator.
    #[must_use]
    pub fn number(&self) -> u64 {
        let Some(made) = &self.slot.made else { unreachable!("a round is made of a slot that was filled") };
        made.round
    }
}

impl<T> Deref for Round<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.slot.value
    }
}

impl<T> DerefMut for Round<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.slot.value
    }
}

/// Why a round could not be had.
///
/// [`Generator::rounds`] yields at most one error a call, after every round made before it, and then ends.
#[derive(Debug)]
#[non_exhaustive]
pub enum RoundError {
    /// The closure returned an error.
    Failed {
        /// The round.
        round: u64,
        /// The closure's error.
        source: BoxError,
    },
    /// The closure panicked.
    Panicked {
        /// The round.
        round: u64,
        /// The panic's message.
        message: String,
    },
    /// The slot whose turn it is, is held by a round that the caller still has: the next one can go nowhere.
    AllHeld {
        /// The round.
        round: u64,
    },
    /// The generator is used in a process forked from the one it was built in, where its thread is not.
    Forked {
        /// The round.
        round: u64,
    },
    /// The thread is gone. It catches the panics of the closure, so this is a bug in this crate.
    WorkerGone {
        /// The round.
        round: u64,
    },
}

impl fmt::Display for RoundError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { round, source } => write!(f, "round {round}: {source}"),
            Self::Panicked { round, message } => {
                write!(f, "round {round}: the closure panicked while generating: {message}")
            }
            Self::AllHeld { round } => write!(
                f,
                "round {round}: wanted the next of 2 slots, found it held by a round that was received \
                 earlier: drop that"
            ),
            Self::Forked { round } => write!(
                f,
                "round {round}: the generator's thread stayed in the process this one was forked from: build \
                 the generator after the fork"
            ),
            Self::WorkerGone { round } => write!(f, "round {round}: the generating thread is gone"),
        }
    }
}

impl std::error::Error for RoundError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Failed { source, .. } => Some(&**source),
            _ => None,
        }
    }
}

/// Where the time of a generator's rounds went, up to now.
///
/// All times are wall-clock times, of the rounds that the caller received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct GenerateReport {
    /// Rounds that the caller received.
    pub rounds: u64,
    /// From each call of [`Generator::rounds`] to its end, added up.
    pub wall: Duration,
    /// The closure; waiting for a slot, and in lockstep for the round before to be taken.
    pub generate: Stage,
    /// The caller, its hook included: from receiving a round to asking for the next; waiting for a round.
    pub train: Stage,
    /// What perfect overlap would take: the first round's generation, then round by round the longer of its
    /// use and the generation of the next, then the last round's use. The first and the last have nothing to
    /// hide behind.
    pub ideal: Duration,
}

impl GenerateReport {
    /// The time that generating and the caller's work take one after the other.
    #[must_use]
    pub fn serial(&self) -> Duration {
        self.generate.busy + self.train.busy
    }

    /// How many times faster than one after the other perfect overlap of these rounds is: `serial / ideal`,
    /// below 2.
    #[must_use]
    pub fn gain_possible(&self) -> f64 {
        ratio(self.serial(), self.ideal)
    }

    /// How many times faster it would be over very many such rounds: `serial` to the longer stage.
    #[must_use]
    pub fn gain_in_the_long_run(&self) -> f64 {
        ratio(self.serial(), self.generate.busy.max(self.train.busy))
    }

    /// How many times faster than it was perfect overlap would be: `wall / ideal`. This much overlap can
    /// still gain at most.
    #[must_use]
    pub fn gain_left(&self) -> f64 {
        ratio(self.wall, self.ideal).max(1.0)
    }

    /// Which stage decides.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let (generate, train) = (self.generate.busy.as_secs_f64(), self.train.busy.as_secs_f64());
        if self.rounds == 0 || self.serial().is_zero() {
            Verdict::Unmeasured
        } else if train >= DOMINATES * generate {
            Verdict::ComputeBound
        } else if generate >= DOMINATES * train {
            Verdict::GenerationBound
        } else {
            Verdict::Balanced
        }
    }
}

impl fmt::Display for GenerateReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} rounds in {:.3} s", self.rounds, self.wall.as_secs_f64())?;
        writeln!(f, "stage        busy s  waiting s")?;
        for (name, stage) in [("generate", self.generate), ("train", self.train)] {
            let (busy, waiting) = (stage.busy.as_secs_f64(), stage.waiting.as_secs_f64());
            writeln!(f, "{name:<8} {busy:>10.3} {waiting:>10.3}")?;
        }
        write!(
            f,
            "{}: one after the other {:.3} s, at best {:.3} s ({:.2} x; in the long run {:.2} x). {}",
            self.verdict(),
            self.serial().as_secs_f64(),
            self.ideal.as_secs_f64(),
            self.gain_possible(),
            self.gain_in_the_long_run(),
            left(self.wall, self.serial(), self.gain_left())
        )
    }
}

impl<T: 'static> fmt::Debug for Generator<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generator")
            .field("next", &self.caller.next)
            .field("overlap", &matches!(self.running.feed, Feed::Ahead(_)))
            .field("lockstep", &self.caller.hook.is_some())
            .field("trace", &self.running.trace.as_ref().map(|trace| trace.path()))
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for GeneratorBuilder<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GeneratorBuilder")
            .field("overlap", &self.overlap)
            .field("lockstep", &self.hook.is_some())
            .field("profile", &self.profile)
            .finish_non_exhaustive()
    }
}

impl<T: 'static> fmt::Debug for Rounds<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounds")
            .field("next", &self.caller.next)
            .field("end", &self.end)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl<T: fmt::Debug> fmt::Debug for Round<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Round").field("number", &self.number()).field("value", &**self).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(generate_ms: u64, train_ms: u64, ideal_ms: u64, wall_ms: u64) -> GenerateReport {
        let ms = Duration::from_millis;
        GenerateReport {
            rounds: 1,
            wall: ms(wall_ms),
            generate: Stage { busy: ms(generate_ms), waiting: ms(0) },
            train: Stage { busy: ms(train_ms), waiting: ms(0) },
            ideal: ms(ideal_ms),
        }
    }

    #[test]
    fn the_verdict_names_the_stage_that_decides() {
        assert_eq!(GenerateReport::default().verdict(), Verdict::Unmeasured);
        for (generate, train, verdict) in [
            (0, 0, Verdict::Unmeasured), // by a clock too coarse for it
            (100, 125, Verdict::ComputeBound),
            (100, 124, Verdict::Balanced),
            (124, 100, Verdict::Balanced),
            (125, 100, Verdict::GenerationBound),
        ] {
            assert_eq!(report(generate, train, 0, 0).verdict(), verdict, "{generate} to {train}");
        }
    }

    #[test]
    fn the_gains_of_seven_to_two_and_a_half() {
        // Ten rounds: 95 s in turn; overlapped 10 * 7 s and the last round's training.
        let report = report(70_000, 25_000, 72_500, 95_000);
        assert!((report.gain_possible() - 95.0 / 72.5).abs() < 1e-9);
        assert!((report.gain_in_the_long_run() - 9.5 / 7.0).abs() < 1e-9);
        assert!((report.gain_left() - 95.0 / 72.5).abs() < 1e-9);
        let text = report.to_string();
        assert!(text.contains("GenerationBound"), "{text}");
        assert!(
            text.ends_with("(1.31 x; in the long run 1.36 x). Better overlap can still gain 23.7 %."),
            "{text}"
        );
        assert!((GenerateReport::default().gain_left() - 1.0).abs() < 1e-9);
    }
}
