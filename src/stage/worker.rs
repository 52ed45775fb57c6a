//! The loading side: fills slots from a source, ahead of their use.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::gate::Gate;
use super::gate::Progress;
use crate::backend::NoSlot;
use crate::backend::sealed::{SlotGuard, Slots};
use crate::error::Error;
use crate::observe::log::Interval;
use crate::observe::log::What;
use crate::observe::recorder::LoadRecorder;
use crate::slot::{BatchMeta, LoadTimes, Naming, Origin, Ticket};
use crate::thread::panic_message;

/// Where batches come from: a data set, or a closure that makes them.
pub(crate) trait Source<C: ?Sized>: Send {
    /// What a load is in the log, and what the thread's row is called.
    fn log(&self) -> (What, &'static str);

    /// Puts the batch into `slot`, and returns its bytes, with those that were flushed.
    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = C>) -> Result<usize, Error>;

    /// The ticket with the step that errors and traces show. It differs if some steps of an epoch need no slot.
    fn placed(&self, ticket: Ticket) -> Ticket {
        ticket
    }

    /// The records of the batch, if it is made of records.
    fn records(&self, ticket: Ticket) -> Option<Origin>;
}

/// One call of [`Source::load`].
pub(crate) struct Load<'a> {
    pub(crate) ticket: Ticket,
    pub(crate) records: Option<&'a Origin>,
    pub(crate) naming: &'a Naming,
    /// Same as in [`BatchMeta`].
    pub(crate) offsets: &'a mut Vec<Vec<usize>>,
    /// Where the source says how long the transforms took, the bytes before them, and how many system calls it made.
    pub(crate) times: &'a mut LoadTimes,
    /// Whose code runs, to be named if it panics.
    pub(crate) who: &'a mut &'static str,
    /// Where a loading thread tells what it reads.
    pub(crate) progress: Option<&'a Progress>,
}

/// Fills slots, on whatever thread it is called.
pub(crate) struct Worker<C: ?Sized> {
    // Dropped first: when the source goes, the trace is written.
    pub(crate) recorder: LoadRecorder,
    pub(crate) naming: Naming,
    pub(crate) source: Box<dyn Source<C>>,
}

impl<C: ?Sized> Worker<C> {
    /// Fills `slot`, and returns what is known about the batch: its length, or why it could not be loaded. The load begins
    /// at `start`, and the wait for it at `since`.
    pub(crate) fn load(
        &mut self,
        ticket: Ticket,
        slot: &mut dyn SlotGuard<Content = C>,
        (since, start): Interval,
        progress: Option<&Progress>,
    ) -> BatchMeta {
        let Self { source, naming, recorder, .. } = self;
        let mut offsets = Vec::new();
        let mut who = "source";
        let records = source.records(ticket);
        let span = recorder.began(source.placed(ticket)).entered();
        let clock = recorder.clock(start);
        let mut times = LoadTimes { since, ..LoadTimes::new(start) };
        if let Some(progress) = progress {
            progress.began(start);
        }
        // A source that panicked is called again only if the caller continues. What it then does is up to it, and
        // memory-safe.
        let loaded = catch_unwind(AssertUnwindSafe(|| {
            let (records, times, who) = (records.as_ref(), &mut times, &mut who);
            let offsets = &mut offsets;
            source.load(Load { ticket, records, naming, times, offsets, who, progress }, slot)
        }));
        let ticket = source.placed(ticket);
        let result = loaded.unwrap_or_else(|panic| {
            Err(Error::Panicked { at: naming.at(ticket), who, message: panic_message(&*panic) })
        });
        let result = result.map_err(Box::new);
        if let Some(progress) = progress {
            progress.end();
        }
        span.record("bytes", times.bytes);
        drop(span);
        times.end = Instant::now();
        times.cpu = clock.and_then(|clock| clock.since(times.end - start));
        recorder.loaded(ticket, &times);
        BatchMeta { ticket, records, offsets, result, load: times }
    }

    /// A loading thread: takes the next batch whenever it has a slot and leave, until the gate is closed or the receiver
    /// is gone.
    pub(crate) fn run<S: Slots<Content = C>>(mut self, thread: usize, gate: &Gate, mut slots: S) {
        // Dropped last, and by a panic too.
        let _left = Left(gate);
        let mut before: Option<Ticket> = None;
        let mut asked = Instant::now();
        loop {
            // The wait for a slot may be long.
            self.recorder.write_if_due(asked);
            // The slot first: a batch counts as started only when nothing but the source is in its way.
            let waits = gate.is_shared() && matches!(slots.acquire_within(Duration::ZERO), Err(NoSlot::Held));
            if waits {
                gate.waits_for_slot(thread, true);
            }
            let Ok(mut slot) = slots.acquire() else { return };
            if waits {
                gate.waits_for_slot(thread, false);
            }
            let Some((ticket, resumed)) = gate.start(thread, || self.recorder.flush()) else { break };
            // The trace of an epoch that has been read is complete in the file. Epochs of one step are too many for that.
            if before.replace(ticket).is_some_and(|last| last.epoch != ticket.epoch && last.steps > 1) {
                self.recorder.flush();
            }
            let (start, progress) = (Instant::now(), Some(gate.progress(thread)));
            let since = asked.max(resumed).min(start);
            let meta = self.load(ticket, &mut slot, (since, start), progress);
            asked = meta.load.end;
            if meta.result.is_err() {
                gate.failed(ticket);
            }
            if slot.commit(meta).is_err() {
                return;
            }
            gate.committed();
        }
        slots.finish();
    }
}

/// Tells the gate when its thread ends.
struct Left<'g>(&'g Gate);

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.0.left();
    }
}
