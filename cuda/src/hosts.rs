//! The host slots of an uploader, as its filling threads and its copies share them.

use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Fate};
use crate::memory::HostBytes;

/// The host slots' memory, and what the filling threads have handed over of the slots in use.
pub(crate) struct Hosts<M> {
    /// At least [`bytes`](Self::bytes) each.
    pub(crate) memory: Vec<HostBytes>,
    /// The size of a slot.
    pub(crate) bytes: usize,
    /// The unit that is copied while the rest of a slot is being filled.
    pub(crate) chunk: usize,
    /// The error that ended the uploader.
    pub(crate) fate: Arc<Fate>,
    state: Mutex<State<M>>,
    changed: Condvar,
}

struct State<M> {
    /// One for each slot.
    handed: Vec<Handed<M>>,
    /// The copies have ended, or the filling side has without `finish`.
    closed: bool,
    /// How often something was handed over, or a side has ended.
    changes: u64,
}

/// How much of a slot the copies may read.
pub(crate) enum Handed<M> {
    /// Its first bytes. More of the batch follows.
    Part(usize),
    /// The whole batch: its length, and the caller's value.
    All(usize, M),
    /// The slot was dropped without a commit.
    Cancelled,
    /// The filling side is gone, and the rest of the batch may never come.
    Gone,
}

impl<M> Hosts<M> {
    pub(crate) fn new(memory: Vec<HostBytes>, bytes: usize, chunk: usize) -> Self {
        let handed = memory.iter().map(|_| Handed::Part(0)).collect();
        let state = Mutex::new(State { handed, closed: false, changes: 0 });
        Self { memory, bytes, chunk, fate: Arc::default(), state, changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<M>> {
        // No locked section runs the caller's code.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the uploader has ended.
    pub(crate) fn ended(&self) -> Error {
        self.fate.get().cloned().unwrap_or(Error::Closed)
    }

    /// Hands over a part or the rest of slot `index`.
    pub(crate) fn hand_over(&self, index: usize, handed: Handed<M>) -> Result<(), Error> {
        let mut state = self.lock();
        if state.closed {
            drop(state);
            return Err(self.ended());
        }
        state.handed[index] = handed;
        Ok(())
    }

    /// What was handed over of slot `index`, of which `copied` bytes are copied.
    pub(crate) fn take(&self, index: usize, copied: usize) -> Handed<M> {
        let mut state = self.lock();
        match mem::replace(&mut state.handed[index], Handed::Part(0)) {
            Handed::Part(until) if until <= copied && state.closed => Handed::Gone,
            Handed::Part(until) => {
                state.handed[index] = Handed::Part(until);
                Handed::Part(until)
            }
            handed => handed,
        }
    }

    pub(crate) fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// Waits up to `timeout` for a change after the number `seen`.
    pub(crate) fn wait(&self, seen: u64, timeout: Option<Duration>) {
        let same = |state: &mut State<M>| state.changes == seen;
        let state = self.lock();
        match timeout {
            Some(timeout) => drop(self.changed.wait_timeout_while(state, timeout, same)),
            None => drop(self.changed.wait_while(state, same)),
        }
    }

    /// Wakes the copy thread: there is something new to it.
    pub(crate) fn tell(&self) {
        self.lock().changes += 1;
        self.changed.notify_one();
    }

    /// Nothing more is copied, or none of what is still open.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
    }

    pub(crate) fn check(&self, option: &'static str, found: usize) -> Result<(), Error> {
        if found <= self.bytes {
            return Ok(());
        }
        let wanted = format!("at most the slot's {} bytes", self.bytes);
        Err(Error::Option { option, wanted, found: found.to_string() })
    }

    /// The bytes of slot `index` from `flushed` on.
    pub(crate) fn rest(&self, index: usize, flushed: usize) -> *mut [u8] {
        // SAFETY: in bounds of the slot's memory (`build` checks its length).
        let start = unsafe { self.memory[index].start().add(flushed) };
        std::ptr::slice_from_raw_parts_mut(start.as_ptr(), self.bytes - flushed)
    }
}
