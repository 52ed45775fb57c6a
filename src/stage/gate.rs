//! The batches that the loading threads may start, the thread that has each, and what each thread is doing.

use std::collections::VecDeque;
#[cfg(target_has_atomic = "64")]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};
use std::{fmt, thread};

#[cfg(not(target_has_atomic = "64"))]
use self::locked::AtomicU64;
use crate::slot::Ticket;

/// Tells the loading threads what to load next. The caller grants epochs; a thread that has a free slot takes the next
/// batch.
///
/// Each thread hands its batches over in the order of taking them: the order of the plan, with gaps. The caller
/// finds the thread that has the next batch in [`lane`](Self::lane). If none has taken it, then every thread waits for
/// a slot, or will take it soon.
pub(crate) struct Gate {
    state: Mutex<State>,
    steps: Steps,
    /// For the threads: there is something to start.
    changed: Condvar,
    /// For the caller: a batch was taken or handed over, or a thread ended.
    dealt: Condvar,
    /// What each thread does.
    progress: Vec<Progress>,
    /// A load did not end in time, and its thread was left behind.
    abandoned: AtomicBool,
}

/// Finds the steps of an epoch in a call: of a generation, and the epoch's number.
pub(crate) type Steps = Box<dyn Fn(u64, u64) -> u64 + Send + Sync>;

#[derive(Debug)]
struct State {
    /// The first batch of the generation.
    first: Ticket,
    /// The next batch of the generation to be started; `None` if epochs have no steps, and after the largest number of an
    /// epoch.
    next: Option<Ticket>,
    /// For each thread, the batches that it took and that were not received: generation and number. There are no more
    /// than it has slots.
    taken: Vec<VecDeque<(u64, u64)>>,
    /// Whether each thread waits for a slot.
    without_slot: Vec<bool>,
    /// Threads that have not ended.
    alive: usize,
    /// Batches handed over and threads ended, so far.
    events: u64,
    /// Whether the caller waits on `dealt`.
    caller_waits: bool,
    /// The task that waits for a batch that no thread has taken.
    waker: Option<Waker>,
    /// For each thread, the batch that it started last.
    started: Vec<Ticket>,
    /// The last epoch that may be started; `None` if there is nothing to start.
    last: Option<u64>,
    /// The first batch that failed, if the caller has not been told yet: neither it nor what comes after it is started.
    failed: Option<u64>,
    /// When the caller last asked for epochs. Before that the threads did not wait, they rested.
    resumed: Instant,
    closed: bool,
}

/// The thread that has a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Has(usize),
    /// One will take it soon.
    NotYet,
    /// None, because all wait for slots.
    SlotHeld,
    /// None, because all have ended.
    Gone,
}

impl State {
    fn lane(&self, ticket: Ticket) -> Lane {
        let wanted = ticket.place();
        match self.taken.iter().position(|taken| taken.contains(&wanted)) {
            Some(thread) => Lane::Has(thread),
            None if self.alive == 0 => Lane::Gone,
            None if self.without_slot.iter().all(|&waits| waits) => Lane::SlotHeld,
            None => Lane::NotYet,
        }
    }

    /// The batch that may be started now.
    fn ready(&self) -> Option<Ticket> {
        let last = self.last?;
        let ticket = self.next.filter(|ticket| ticket.epoch <= last)?;
        self.failed.is_none_or(|failed| ticket.seq < failed).then_some(Ticket { last, ..ticket })
    }
}

/// The first of the batches that begin here, if the epoch has any left.
fn from(ticket: Ticket) -> Option<Ticket> {
    (ticket.step < ticket.steps).then_some(ticket)
}

impl Gate {
    /// A gate in front of epochs of that many steps for this many threads, closed until the first [`begin`](Self::begin).
    pub(crate) fn new(steps: Steps, threads: usize) -> Self {
        let first =
            Ticket { generation: 0, seq: 0, ordinal: 0, epoch: 0, step: 0, steps: steps(0, 0), last: 0 };
        let state = State {
            first,
            next: from(first),
            taken: vec![VecDeque::new(); threads],
            without_slot: vec![false; threads],
            alive: threads,
            events: 0,
            caller_waits: false,
            waker: None,
            started: vec![first; threads],
            last: None,
            failed: None,
            resumed: Instant::now(),
            closed: false,
        };
        let progress = (0..threads).map(|_| Progress::default()).collect();
        let [changed, dealt] = [const { Condvar::new() }; 2];
        Self { state: Mutex::new(state), steps, changed, dealt, progress, abandoned: AtomicBool::new(false) }
    }

    /// The batch after this one, in this epoch or the next.
    fn after(&self, ticket: Ticket) -> Option<Ticket> {
        let Ticket { generation, seq, ordinal, epoch, step, steps, .. } = ticket;
        if step + 1 < steps {
            return Some(Ticket { seq: seq + 1, step: step + 1, ..ticket });
        }
        let epoch = epoch.checked_add(1)?;
        let steps = (self.steps)(generation, epoch);
        from(Ticket { seq: seq + 1, ordinal: ordinal + 1, epoch, step: 0, steps, ..ticket })
    }

    /// No foreign code runs while it is locked.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what was granted before, and grants the batches from `first` to the end of its last epoch.
    pub(crate) fn begin(&self, first: Ticket) {
        let mut state = self.lock();
        (state.first, state.next, state.last, state.failed) = (first, from(first), Some(first.last), None);
        state.resumed = Instant::now();
        drop(state);
        self.changed.notify_all();
    }

    /// Takes back the leave for what has not been started. Returns the epoch of the first such batch.
    pub(crate) fn retract(&self) -> u64 {
        let mut state = self.lock();
        state.last = None;
        state.next.map_or(state.first.epoch, |next| next.epoch)
    }

    /// Waits for leave to start the thread's next batch; runs `idle` first if there is none now. Returns the batch and
    /// when the caller last asked for epochs; `None` once the gate is closed.
    pub(super) fn start(&self, thread: usize, idle: impl FnOnce()) -> Option<(Ticket, Instant)> {
        let mut idle = Some(idle);
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(ticket) = state.ready() {
                state.next = self.after(ticket);
                state.started[thread] = ticket;
                if self.is_shared() {
                    state.taken[thread].push_back(ticket.place());
                    self.tell_caller(&state);
                }
                // While the state is locked: whoever closes the gate must see it.
                self.progress[thread].begin();
                return Some((ticket, state.resumed));
            }
            state = match idle.take() {
                Some(idle) => {
                    drop(state);
                    idle();
                    self.lock()
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// The batch could not be loaded. Called before it is handed over. The caller learns of the failure later.
    pub(super) fn failed(&self, ticket: Ticket) {
        let mut state = self.lock();
        // Unless the caller has asked for something else since.
        if state.first.generation == ticket.generation {
            state.next = state.next.filter(|next| next.seq < ticket.seq).or(Some(ticket));
            state.failed = Some(state.failed.map_or(ticket.seq, |failed| failed.min(ticket.seq)));
        }
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Whether there are several threads.
    pub(super) fn is_shared(&self) -> bool {
        self.progress.len() > 1
    }

    /// The thread waits for a slot, or has one again.
    pub(super) fn waits_for_slot(&self, thread: usize, waits: bool) {
        self.lock().without_slot[thread] = waits;
    }

    /// A thread has handed a batch over.
    pub(super) fn committed(&self) {
        if self.is_shared() {
            self.tell_event(self.lock());
        }
    }

    /// A thread has ended.
    pub(super) fn left(&self) {
        let mut state = self.lock();
        state.alive -= 1;
        self.tell_event(state);
    }

    fn tell_event(&self, mut state: MutexGuard<'_, State>) {
        state.events += 1;
        self.tell_caller(&state);
        let waker = state.waker.take();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    fn tell_caller(&self, state: &State) {
        if state.caller_waits {
            self.dealt.notify_all();
        }
    }

    /// What has happened so far, for [`wait_for_lane`](Self::wait_for_lane).
    pub(super) fn events(&self) -> u64 {
        self.lock().events
    }

    /// The thread that has the batch.
    pub(super) fn lane(&self, ticket: Ticket) -> Lane {
        if self.is_shared() { self.lock().lane(ticket) } else { Lane::Has(0) }
    }

    /// Waits until a thread takes this batch, up to `deadline` or to an event after those that the caller has `seen`.
    /// Returns the thread that has it.
    pub(super) fn wait_for_lane(&self, ticket: Ticket, deadline: Instant, seen: Option<u64>) -> Lane {
        let mut state = self.lock();
        let found = state.lane(ticket);
        let rest = deadline.saturating_duration_since(Instant::now());
        let news = seen.is_some_and(|seen| seen != state.events);
        if matches!(found, Lane::Has(_) | Lane::Gone) || news || rest.is_zero() {
            return found;
        }
        state.caller_waits = true;
        let waited = self.dealt.wait_timeout(state, rest);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.caller_waits = false;
        state.lane(ticket)
    }

    /// Wakes the task at the next event, unless a thread has this batch, whose lane wakes it then.
    pub(super) fn wake_for_lane(&self, ticket: Ticket, waker: &Waker) {
        let mut state = self.lock();
        let dealt = matches!(state.lane(ticket), Lane::Has(_));
        state.waker = (!dealt).then(|| waker.clone());
    }

    /// The thread's next batch to be received is of an earlier generation.
    pub(super) fn is_stale(&self, thread: usize, generation: u64) -> bool {
        self.lock().taken[thread].front().is_some_and(|&(of, _)| of != generation)
    }

    /// The caller has received the thread's next batch.
    pub(super) fn received(&self, thread: usize) {
        self.lock().taken[thread].pop_front();
    }

    pub(super) fn progress(&self, thread: usize) -> &Progress {
        &self.progress[thread]
    }

    /// The batch that the thread is loading, and since when.
    pub(crate) fn loading(&self, thread: usize) -> Option<(Ticket, &Progress, Duration)> {
        let ticket = self.lock().started[thread];
        let progress = &self.progress[thread];
        progress.busy_for().map(|time| (ticket, progress, time))
    }

    fn is_loading(&self) -> bool {
        self.progress.iter().any(|progress| progress.busy_for().is_some())
    }

    /// The loading thread whose batch is needed first.
    pub(super) fn first_loading(&self) -> Option<usize> {
        let state = self.lock();
        let loading = (0..self.progress.len()).filter(|&thread| self.progress[thread].busy_for().is_some());
        loading.min_by_key(|&thread| state.started[thread].place())
    }

    /// Closes the gate and waits until no thread is loading, up to `limit`. Returns whether that is so; if not, the
    /// threads are not waited for any more.
    pub(super) fn end(&self, limit: Duration) -> bool {
        self.close();
        if self.is_abandoned() {
            return false;
        }
        let start = Instant::now();
        while self.is_loading() {
            if start.elapsed() >= limit {
                // Relaxed: read only by the thread that ends the stage, and that is this one.
                self.abandoned.store(true, Ordering::Relaxed);
                return false;
            }
            thread::sleep(LOOK_AGAIN);
        }
        true
    }

    /// Whether [`end`](Self::end) gave up.
    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }
}

/// How often [`Gate::end`] checks whether a load has ended. It polls because a notification would cost each load
/// another lock.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("state", &self.state)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

/// A load has begun just now.
const NOW: u64 = 1;

/// What one thread is doing. Written by it for every batch, and read by callers only after a time-out.
///
/// All orderings are Relaxed: nothing is published with a value. Values of two batches may be seen together; then the
/// batch has just changed.
#[derive(Debug)]
pub(crate) struct Progress {
    origin: Instant,
    /// When the load began, in nanoseconds after `origin`, or [`NOW`]; 0 while no load runs.
    since: AtomicU64,
    /// One more than the field that is read; 0 if none is.
    field: AtomicU64,
    /// The first of the records that are read.
    record: AtomicU64,
}

impl Default for Progress {
    fn default() -> Self {
        let [since, field, record] = [const { AtomicU64::new(0) }; 3];
        Self { origin: Instant::now(), since, field, record }
    }
}

impl Progress {
    /// A load begins; [`began`](Self::began) says when.
    pub(super) fn begin(&self) {
        self.since.store(NOW, Ordering::Relaxed);
    }

    pub(super) fn began(&self, at: Instant) {
        let nanos = at.saturating_duration_since(self.origin).as_nanos();
        self.since.store(u64::try_from(nanos).unwrap_or(u64::MAX).max(NOW), Ordering::Relaxed);
    }

    /// Records of a field are read, from this one on.
    pub(crate) fn reads(&self, field: usize, record: u64) {
        self.field.store(field as u64 + 1, Ordering::Relaxed);
        self.record.store(record, Ordering::Relaxed);
    }

    /// The load has ended.
    pub(super) fn end(&self) {
        self.field.store(0, Ordering::Relaxed);
        self.since.store(0, Ordering::Relaxed);
    }

    /// How long the current load has been running, if there is one.
    pub(super) fn busy_for(&self) -> Option<Duration> {
        match self.since.load(Ordering::Relaxed) {
            0 => None,
            NOW => Some(Duration::ZERO),
            since => Some(self.origin.elapsed().saturating_sub(Duration::from_nanos(since))),
        }
    }

    /// The field that is read, and the first record of the read.
    pub(crate) fn place(&self) -> Option<(usize, u64)> {
        let field = self.field.load(Ordering::Relaxed).checked_sub(1)?;
        Some((usize::try_from(field).ok()?, self.record.load(Ordering::Relaxed)))
    }
}

/// For processors without atomics of 64 bits, such as 32-bit PowerPC.
#[cfg(not(target_has_atomic = "64"))]
mod locked {
    use std::sync::atomic::Ordering;
    use std::sync::{Mutex, PoisonError};

    #[derive(Debug)]
    pub(super) struct AtomicU64(Mutex<u64>);

    impl AtomicU64 {
        pub(super) const fn new(value: u64) -> Self {
            Self(Mutex::new(value))
        }

        pub(super) fn load(&self, _: Ordering) -> u64 {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(super) fn store(&self, value: u64, _: Ordering) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value;
        }
    }
}
