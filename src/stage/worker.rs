//! The loading side: fills slots from a source, ahead of their use.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use twinbuf_mmap::BatchIndices;

use super::gate::Gate;
use super::progress::Progress;
use crate::backend::NoSlot;
use crate::backend::sealed::{SlotGuard, Slots};
use crate::error::Error;
use crate::observe::recorder::LoadRecorder;
use crate::observe::spans;
use crate::slot::{BatchMeta, LoadStats, Naming, Origin, Ticket};
use crate::thread::panic_message;

/// Where batches come from: a data set, or a closure that makes them.
pub(crate) trait Source<C: ?Sized>: Send {
    /// Puts the batch into `slot`, and returns its bytes, with those that were flushed.
    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = C>) -> Result<usize, Error>;

    /// Which records the batch is made of, if it is made of records.
    fn records(&self, ticket: Ticket) -> Option<Origin>;

    /// The bytes of the batch before a transform.
    fn bytes(&self, records: &BatchIndices) -> usize;
}

/// One call of [`Source::load`].
pub(crate) struct Load<'a> {
    pub(crate) ticket: Ticket,
    pub(crate) records: Option<&'a Origin>,
    pub(crate) naming: &'a Naming,
    /// Filled in by the source, but for the time it took as a whole.
    pub(crate) stats: &'a mut LoadStats,
    /// Whose code runs, to be named if it panics.
    pub(crate) who: &'a mut &'static str,
    /// Where a loading thread tells what it reads.
    pub(crate) progress: Option<&'a Progress>,
}

/// Fills slots, on whatever thread it is called.
pub(crate) struct Worker<C: ?Sized> {
    pub(crate) source: Box<dyn Source<C>>,
    pub(crate) naming: Naming,
    pub(crate) recorder: LoadRecorder,
}

impl<C: ?Sized> Worker<C> {
    /// Fills `slot`, and returns what is known about the batch: its length, or why it could not be loaded; and when that
    /// was. The wait for it began at `since`, if there was one.
    pub(crate) fn load(
        &mut self,
        ticket: Ticket,
        slot: &mut dyn SlotGuard<Content = C>,
        since: Option<Instant>,
        progress: Option<&Progress>,
    ) -> (BatchMeta, Instant) {
        let Self { source, naming, recorder } = self;
        let mut stats = LoadStats::default();
        let mut who = if naming.rounds { "closure" } else { "data set" };
        let records = source.records(ticket);
        let plan = records.as_ref().map(|records| &records.plan);
        let span = spans::load(ticket.epoch, ticket.step, plan.map_or(0, |plan| source.bytes(plan)));
        let start = Instant::now();
        let clock = recorder.started(start);
        if let Some(progress) = progress {
            progress.began(start);
        }
        stats.waited = since.map_or(Duration::ZERO, |since| start.saturating_duration_since(since));
        // A source that panicked is called again only if the caller goes on. What it then does is up to it, and
        // memory-safe.
        let loaded = catch_unwind(AssertUnwindSafe(|| {
            let (records, stats, who) = (records.as_ref(), &mut stats, &mut who);
            let load = Load { ticket, records, naming, stats, who, progress };
            span.in_scope(|| source.load(load, slot))
        }));
        let result = loaded.unwrap_or_else(|panic| {
            Err(Error::Panicked { at: naming.at(ticket), who, message: panic_message(&*panic) })
        });
        if let Some(progress) = progress {
            progress.end();
        }
        let end = Instant::now();
        stats.read = (end - start).saturating_sub(stats.transform);
        stats.started = Some(start);
        stats.cpu = clock.and_then(|clock| clock.since(end - start));
        recorder.loaded(ticket, start, end, &stats);
        (BatchMeta { ticket, records, result, stats }, end)
    }

    /// A loading thread: takes the next batch whenever it has a slot and leave, until the gate is closed or the receiver
    /// is gone.
    pub(crate) fn run<S: Slots<Content = C>>(mut self, thread: usize, gate: &Gate, mut slots: S) {
        // Dropped last, and by a panic too.
        let _left = Left(gate);
        let mut epoch = None;
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
            // The trace of an epoch that has been read is complete in the file. Rounds are too many for that.
            if epoch.replace((ticket.generation, ticket.epoch)).is_some_and(|last| last.1 != ticket.epoch)
                && !self.naming.rounds
            {
                self.recorder.flush();
            }
            let (since, progress) = (Some(asked.max(resumed)), Some(gate.progress(thread)));
            let (meta, end) = self.load(ticket, &mut slot, since, progress);
            asked = end;
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
