//! Which batches the loading threads may start.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::progress::Progress;
use crate::slot::Ticket;

/// Tells the loading threads what to load next. The caller grants epochs; the threads take their batches in turn: the
/// first thread the first batch, the second one the second, and round again.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// What each thread does.
    progress: Vec<Progress>,
    /// A load did not end in time, and its thread was left behind.
    abandoned: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// The first batch of the generation.
    first: Ticket,
    /// For each thread, which batch of the generation it starts next.
    next: Vec<u64>,
    /// For each thread, the batch that it started last.
    started: Vec<Ticket>,
    /// The last epoch that may be started; `None` if there is nothing to start.
    last: Option<u64>,
    /// Steps in an epoch after that of `first`.
    steps: u64,
    /// The first batch that failed, if the caller has not been told yet: neither it nor what comes after it is started.
    failed: Option<u64>,
    /// When the caller last asked for epochs. Before that the threads did not wait, they rested.
    resumed: Instant,
    closed: bool,
}

impl State {
    /// The batch that the thread may start now.
    fn ready(&self, thread: usize) -> Option<Ticket> {
        let (last, seq) = (self.last?, self.next[thread]);
        let ticket = self.ticket(seq).filter(|ticket| ticket.epoch <= last)?;
        self.failed.is_none_or(|failed| seq < failed).then_some(Ticket { last, ..ticket })
    }

    /// A batch of the generation; `None` if epochs have no steps, and after the largest number of an epoch.
    fn ticket(&self, seq: u64) -> Option<Ticket> {
        let first = self.first;
        let (at, here) = (seq - first.seq, first.steps.saturating_sub(first.step));
        if here == 0 {
            return None;
        }
        if at < here {
            return Some(Ticket { seq, step: first.step + at, ..first });
        }
        // The epoch of the first batch may have another number of steps than those after it.
        let (at, steps) = (at - here, self.steps);
        let epochs = at.checked_div(steps)?.checked_add(1)?;
        let epoch = first.epoch.checked_add(epochs)?;
        Some(Ticket { seq, ordinal: first.ordinal + epochs, epoch, step: at % steps, steps, ..first })
    }
}

impl Gate {
    /// A gate in front of epochs of `steps` steps for so many threads, closed until the first
    /// [`begin`](Self::begin) or [`grant`](Self::grant).
    pub(crate) fn new(steps: u64, threads: usize) -> Self {
        let first = Ticket { generation: 0, seq: 0, ordinal: 0, epoch: 0, step: 0, steps, last: 0 };
        let next = (0..threads as u64).collect();
        let resumed = Instant::now();
        let started = vec![first; threads];
        let state = State { first, next, started, last: None, steps, failed: None, resumed, closed: false };
        let progress = (0..threads).map(|_| Progress::default()).collect();
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            progress,
            abandoned: AtomicBool::new(false),
        }
    }

    /// No foreign code runs while it is locked.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what was granted before, and grants the batches from `first` to the end of its last epoch.
    pub(crate) fn begin(&self, first: Ticket) {
        let mut state = self.lock();
        (state.first, state.last, state.failed) = (first, Some(first.last), None);
        for (next, seq) in state.next.iter_mut().zip(first.seq..) {
            *next = seq;
        }
        state.resumed = Instant::now();
        drop(state);
        self.changed.notify_all();
    }

    /// Grants all epochs up to `last`. The caller began to ask for them at `resumed`.
    pub(crate) fn grant(&self, last: u64, resumed: Instant) {
        let mut state = self.lock();
        (state.last, state.resumed) = (Some(last), resumed);
        drop(state);
        self.changed.notify_all();
    }

    /// Takes back the leave for what has not been started. Returns the epoch of the first such batch.
    pub(crate) fn retract(&self) -> u64 {
        let mut state = self.lock();
        state.last = None;
        let next = state.next.iter().min().and_then(|&seq| state.ticket(seq));
        next.map_or(state.first.epoch, |next| next.epoch)
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
            if let Some(ticket) = state.ready(thread) {
                state.next[thread] += state.next.len() as u64;
                state.started[thread] = ticket;
                // While the state is locked, so that whoever has closed the gate sees it.
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

    /// The batch could not be loaded. Called before it is handed over, so that the caller learns of it later.
    pub(super) fn failed(&self, thread: usize, ticket: Ticket) {
        let mut state = self.lock();
        // Unless the caller has meanwhile asked for something else.
        if state.first.generation == ticket.generation {
            state.next[thread] = ticket.seq;
            state.failed = Some(state.failed.map_or(ticket.seq, |failed| failed.min(ticket.seq)));
        }
    }

    /// The caller has been told of the failure. The failed batch is the next one, once it is granted again.
    pub(crate) fn heard(&self) {
        let mut state = self.lock();
        (state.failed, state.last) = (None, None);
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
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

    /// The first thread that is loading.
    pub(super) fn loading_thread(&self) -> Option<usize> {
        self.progress.iter().position(|progress| progress.busy_for().is_some())
    }

    /// Closes the gate and waits until no thread is loading, up to `limit`. Returns whether that is so; if not, the
    /// threads are not waited for any more.
    pub(super) fn end(&self, limit: Duration) -> bool {
        self.close();
        if self.is_abandoned() {
            return false;
        }
        let start = Instant::now();
        while self.loading_thread().is_some() {
            if start.elapsed() >= limit {
                // Relaxed: read by the thread that ends the stage, which is this one.
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

/// How often [`Gate::end`] looks whether a load has ended; nothing is told to it, so that loads cost no lock more.
const LOOK_AGAIN: Duration = Duration::from_micros(200);
