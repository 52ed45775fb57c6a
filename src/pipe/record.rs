//! What a pipe keeps about a unit: its name, the result and the times of its fill, and when its slot was released.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::error::{At, BoxError, Error, Reading};
use crate::observe::log::{Freed, LoadTimes, Naming, Ticket};

/// The name of a unit in errors, reports and traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Epochs, rounds or passes that the caller began before this one: decides whether a trace records it.
    pub ordinal: u64,
    /// The epoch; the round of a generator, the pass of a stream.
    pub epoch: u64,
    /// The step in the epoch.
    pub step: u64,
}

impl Place {
    /// The ticket of the unit, with its name alone.
    pub(super) fn ticket(self) -> Ticket {
        let Self { ordinal, epoch, step } = self;
        Ticket { ordinal, epoch, step, ..Ticket::default() }
    }
}

/// What filled a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// This many bytes.
    Bytes(usize),
    /// Nothing: the source has no more, and the iteration ends here.
    End,
}

/// What a pipe keeps about the unit in a slot. It travels with the slot, from the worker to the caller.
#[derive(Debug)]
pub struct Header<U> {
    pub(crate) ticket: Ticket,
    /// `None` at the end, or after an error of the order.
    pub(crate) unit: Option<U>,
    pub(crate) result: Result<Content, Box<Error>>,
    pub(crate) load: LoadTimes,
}

impl<U> Header<U> {
    /// The header of a slot that is not filled yet. The caller has asked for units since `resumed`. `freed` is when the
    /// slot was released.
    pub(super) fn new(resumed: Instant, freed: Option<Freed>) -> Self {
        let load = LoadTimes { freed, ..LoadTimes::new(resumed) };
        Self { ticket: Ticket::default(), unit: None, result: Ok(Content::End), load }
    }

    pub(crate) fn bytes(&self) -> usize {
        match self.result {
            Ok(Content::Bytes(bytes)) => bytes,
            _ => 0,
        }
    }
}

/// One fill of a slot. A [`Source`](super::Source) tells it what it is doing.
#[derive(Debug)]
pub struct Filling<'f> {
    pub(crate) ticket: Ticket,
    pub(super) naming: &'f Naming,
    pub(crate) times: &'f mut LoadTimes,
    /// Whose code runs: an error names it after a panic.
    pub(super) who: &'f mut &'static str,
    pub(super) progress: Option<&'f Progress>,
}

impl Filling<'_> {
    /// Returns the name of the unit, for errors.
    #[must_use]
    pub fn at(&self) -> At {
        self.naming.at(self.ticket)
    }

    /// Makes the error of a fill that failed for this reason.
    #[must_use]
    pub fn failed(&self, source: impl Into<BoxError>) -> Error {
        Error::Load { at: self.at(), source: source.into() }
    }

    /// Notes what the source is about to read: `offset` in the part `part` of its data, both as the source counts them.
    /// [`Pipe::reading`](super::Pipe::reading) returns it while the read lasts.
    pub fn reads(&mut self, part: usize, offset: u64) {
        self.progress.iter().for_each(|progress| progress.reads(part, offset));
    }

    /// Notes that this many bytes were read for the unit, before they were transformed: for the report.
    pub fn read_bytes(&mut self, bytes: usize) {
        self.times.bytes += bytes;
    }

    /// Names whose code runs from now on, such as `"data set"`: [`Error::Panicked`] repeats it. Default: `"source"`.
    pub fn runs(&mut self, who: &'static str) {
        *self.who = who;
    }
}

/// What one worker is doing. Callers read it after a timeout.
#[derive(Debug, Default)]
pub(super) struct Progress(Mutex<Option<Doing>>);

/// Finds the file and the offset of what a source is reading.
pub(crate) type Locate = Box<dyn Fn(usize, u64) -> Option<(PathBuf, u64)> + Send + Sync>;

#[derive(Clone, Copy, Debug)]
pub(super) struct Doing {
    pub(super) ticket: Ticket,
    pub(super) since: Instant,
    /// What is being read: a part of the data, and an offset in it.
    pub(super) place: Option<(usize, u64)>,
}

impl Doing {
    pub(super) fn reading(self, naming: &Naming, locate: &Locate) -> Reading {
        let Self { ticket, since, place } = self;
        let file = place.and_then(|(part, offset)| locate(part, offset));
        Reading {
            at: naming.at(ticket),
            time: since.elapsed(),
            record: place.map(|(_, offset)| offset),
            file,
        }
    }
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Option<Doing>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn began(&self, ticket: Ticket, since: Instant) {
        *self.lock() = Some(Doing { ticket, since, place: None });
    }

    fn reads(&self, part: usize, offset: u64) {
        if let Some(doing) = &mut *self.lock() {
            doing.place = Some((part, offset));
        }
    }

    pub(super) fn ended(&self) {
        *self.lock() = None;
    }

    pub(super) fn get(&self) -> Option<Doing> {
        *self.lock()
    }
}
