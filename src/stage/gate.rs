//! Which batches the loading thread may start.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::slot::Ticket;

/// Tells the loading thread what to load next. The caller grants epochs; the thread takes their batches one by one.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The next batch to start.
    next: Ticket,
    /// The last epoch that may be started; `None` if there is nothing to start.
    last: Option<u64>,
    /// Steps in an epoch.
    steps: u64,
    /// The last batch failed, and the caller has not been told yet: nothing is started.
    failed: bool,
    /// When the caller last asked for epochs. Before that the thread did not wait, it rested.
    resumed: Instant,
    closed: bool,
}

impl State {
    fn ready(&self) -> bool {
        !self.failed && self.next.step < self.steps && self.last.is_some_and(|last| self.next.epoch <= last)
    }

    fn take(&mut self) -> Option<Ticket> {
        let last = self.last.filter(|_| self.ready())?;
        let ticket = Ticket { last, ..self.next };
        self.next.step += 1;
        if self.next.step == self.steps {
            if ticket.epoch == last {
                self.last = None; // so that an epoch after the largest number is none
            }
            let (ordinal, epoch) = (ticket.ordinal + 1, ticket.epoch.wrapping_add(1));
            self.next = Ticket { ordinal, epoch, step: 0, ..ticket };
        }
        Some(ticket)
    }
}

impl Gate {
    /// A gate in front of epochs of `steps` steps, closed until the first [`begin`](Self::begin) or
    /// [`grant`](Self::grant).
    pub(crate) fn new(steps: u64) -> Self {
        let next = Ticket { generation: 0, ordinal: 0, epoch: 0, step: 0, last: 0 };
        let state = State { next, last: None, steps, failed: false, resumed: Instant::now(), closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// No foreign code runs while it is locked.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what was granted before, and grants the batches from `first` to the end of its last epoch.
    pub(crate) fn begin(&self, first: Ticket) {
        let mut state = self.lock();
        (state.next, state.last, state.failed) = (first, Some(first.last), false);
        state.resumed = Instant::now();
        drop(state);
        self.changed.notify_one();
    }

    /// Grants all epochs up to `last`. The caller began to ask for them at `resumed`.
    pub(crate) fn grant(&self, last: u64, resumed: Instant) {
        let mut state = self.lock();
        (state.last, state.resumed) = (Some(last), resumed);
        drop(state);
        self.changed.notify_one();
    }

    /// Takes back the leave for what has not been started. Returns the next epoch.
    pub(crate) fn retract(&self) -> u64 {
        let mut state = self.lock();
        state.last = None;
        state.next.epoch
    }

    /// Whether [`start`](Self::start) would wait now.
    pub(super) fn would_wait(&self) -> bool {
        !self.lock().ready()
    }

    /// Waits for leave to start the next batch. Returns it and when the caller last asked for epochs; `None` once the
    /// gate is closed.
    pub(super) fn start(&self) -> Option<(Ticket, Instant)> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(ticket) = state.take() {
                return Some((ticket, state.resumed));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The batch could not be loaded. Called before it is handed over, so that the caller learns of it later.
    pub(super) fn failed(&self, ticket: Ticket) {
        let mut state = self.lock();
        // Unless the caller has meanwhile asked for something else.
        if state.next.generation == ticket.generation {
            (state.next, state.failed) = (ticket, true);
        }
    }

    /// The caller has been told of the failure. The failed batch is the next one, once it is granted again.
    pub(crate) fn heard(&self) {
        let mut state = self.lock();
        (state.failed, state.last) = (false, None);
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }
}
