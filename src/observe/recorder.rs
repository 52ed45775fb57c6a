//! The recorder is told what happens to each batch, and keeps the report, the trace, the spans and the breakdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::breakdown::Breakdown;
use super::cpu::Clock;
use super::history::{History, LOOK};
use super::pause::{self, Pauses};
use super::replay::Settings;
use super::report::{EPOCHS, EpochTimes, Report};
use super::spans::{self, Span};
use super::trace::Track;
use crate::slot::{BatchMeta, LoadStats, Naming, Ticket};

/// When a batch's copy to the device was done, and how long it took.
pub(crate) type Copy = Option<(Instant, Duration)>;

/// The caller's side: asked, received, released, ended.
pub(crate) struct Recorder {
    pub(crate) report: Report,
    pub(crate) breakdown: Breakdown,
    track: Track,
    naming: Naming,
    /// The name of the wait for a batch in the trace.
    wait: &'static str,
    epoch: Option<Epoch>,
    /// Up to when the report has counted the wall-clock time: from the first time a batch was asked for.
    counted: Option<Instant>,
    /// Since when the caller has been asking for the next batch.
    asked: Option<Instant>,
    /// While it asks for a batch.
    waiting: Option<Span>,
    in_use: Option<InUse>,
    /// When the first batch was asked for since the caller began.
    since: Option<Instant>,
    pauses: Arc<Pauses>,
    history: History,
}

struct Epoch {
    /// Its first batch.
    ticket: Ticket,
    started: Instant,
    span: Span,
    /// What the report had before it.
    before: EpochTimes,
}

/// The batch that the caller has.
struct InUse {
    ticket: Ticket,
    asked: Instant,
    received: Instant,
}

impl Recorder {
    pub(crate) fn new(
        track: Track,
        naming: Naming,
        wait: &'static str,
        breakdown: Breakdown,
        settings: Settings,
        device_depth: usize,
    ) -> Self {
        let by_breakdown = !settings.overlap && breakdown.is_on();
        let report = Report { by_breakdown, ..Report::new(naming.rounds, settings, device_depth) };
        Self {
            report,
            breakdown,
            track,
            naming,
            wait,
            epoch: None,
            counted: None,
            asked: None,
            waiting: None,
            in_use: None,
            since: None,
            pauses: Arc::default(),
            history: History::default(),
        }
    }

    /// The epoch of `first` begins with that batch.
    pub(crate) fn began(&mut self, first: Ticket) {
        self.report.epochs += 1;
        let before = EpochTimes::so_far(&self.report, first.epoch);
        let (started, span) = (Instant::now(), spans::epoch(first.epoch));
        self.epoch = Some(Epoch { ticket: first, started, span, before });
    }

    /// The caller asks for a batch, perhaps not for the first time: its use of the one before is over.
    pub(crate) fn asked(&mut self, ticket: Ticket, now: Instant, copied: impl Fn(Ticket) -> Copy) {
        if self.asked.is_none() {
            self.asked = Some(now);
            if self.since.is_none() {
                self.since = Some(now);
                self.history.began(self.epoch.as_ref().map_or(now, |epoch| epoch.started));
                self.pauses.watch();
            }
            self.released(now, copied);
            let parent = self.epoch.as_ref().map(|epoch| &epoch.span);
            self.waiting = Some(spans::wait(parent, ticket.epoch, ticket.step));
        }
    }

    /// The caller spent this time on its own behalf before it began to wait.
    pub(crate) fn prepared(&mut self, time: Duration) {
        self.report.train.busy += time;
        self.asked = self.asked.map(|asked| asked + time);
    }

    /// Runs a wait for a batch within its span.
    pub(crate) fn wait<R>(&self, wait: impl FnOnce() -> R) -> R {
        match &self.waiting {
            Some(span) => span.in_scope(wait),
            None => wait(),
        }
    }

    /// The caller has the batch that it asked for.
    pub(crate) fn received(&mut self, meta: &BatchMeta, now: Instant, copy: Copy) {
        let ticket = meta.ticket;
        let bytes = meta.result.as_ref().map_or(0, |&bytes| bytes);
        let asked = self.asked.take().unwrap_or(now);
        self.waiting = None;
        // The step begins when it is asked for, not when the last of the loader's phases does.
        self.breakdown.add_from("load", asked, meta.stats.busy());
        if let (true, Some((_, took))) = (self.breakdown.is_on(), copy) {
            // Without overlap the copy is done by now.
            self.breakdown.add("h2d", took);
        }
        self.report.add(&meta.stats, bytes, now - asked);
        self.in_use = Some(InUse { ticket, asked, received: now });
        self.history.received(meta, asked, now);
        self.pauses.begin(now);
        let id = self.naming.id(ticket);
        self.track.span(self.wait, id, asked, now);
        self.track.taken(id);
        self.track.write_if_due(now);
    }

    /// A batch was released unseen: it had failed, or was loaded for a call that was left early.
    pub(crate) fn discarded(&mut self, ticket: Ticket) {
        self.track.taken(self.naming.id(ticket));
    }

    /// The caller is done with its batch.
    fn released(&mut self, now: Instant, copied: impl Fn(Ticket) -> Copy) {
        let pauses = self.pauses.end();
        let paused = pause::total(&pauses);
        self.report.wall += now.saturating_duration_since(self.counted.unwrap_or(now)).saturating_sub(paused);
        self.counted = Some(now);
        let Some(InUse { ticket, asked, received }) = self.in_use.take() else { return };
        let copy = copied(ticket);
        self.history.released(now, &pauses, copy);
        let mut used = (now - received).saturating_sub(paused);
        let mut from = received;
        if let Some((copied, _)) = copy {
            // The caller has its batch before the copy is done: its own work began only then.
            let waited = copied.saturating_duration_since(received).min(used);
            used -= waited;
            from += waited;
            self.report.train.waiting += waited;
        }
        self.report.train.busy += used;
        if self.report.batches == 1 {
            self.report.first = self.report.train;
        }
        let id = self.naming.id(ticket);
        let used_from = from;
        // The names of the waits say what was waited for: a free batch, or its copy.
        if from > received {
            self.track.span("gpu_copy_wait", id, received, from);
        }
        for (start, end) in pauses {
            if start > from {
                self.track.span("train", id, from, start);
            }
            self.track.span("pause", id, start, end);
            from = from.max(end);
        }
        self.track.span("train", id, from, now);
        if !self.naming.rounds {
            self.track.span("chunk", id, asked, now);
        }
        self.track.used(id, used_from);
    }

    /// Returns the report so far, the epoch under way included.
    pub(crate) fn report(&self) -> Report {
        let mut report = self.report.clone();
        // A read that hangs shows while it does.
        let waits = self.asked.map(|asked| (asked, Instant::now().max(asked)));
        if let (Some((asked, now)), Some(counted)) = (waits, self.counted) {
            report.wall += now.saturating_duration_since(counted);
            report.train.waiting += now - asked;
        }
        let first = self.epoch.as_ref().map(|epoch| epoch.ticket);
        report.recent = self.history.recent(first.zip(waits)).into();
        if let (Some(Epoch { ticket, before, .. }), false) = (&self.epoch, self.naming.rounds) {
            let row = EpochTimes::so_far(&report, ticket.epoch).since(before);
            push(&mut report.by_epoch, row);
        }
        report
    }

    /// The epoch is over.
    pub(crate) fn epoch_ended(&mut self, now: Instant) {
        if let (Some(Epoch { ticket, started, before, .. }), false) = (self.epoch.take(), self.naming.rounds)
        {
            let row = EpochTimes::so_far(&self.report, ticket.epoch).since(&before);
            push(&mut self.report.by_epoch, row);
            let id = crate::slot::BatchId { step: None, ..self.naming.id(ticket) };
            self.track.span("epoch", id, started, now);
        }
    }

    /// The caller asks for no more batches.
    pub(crate) fn ended(&mut self, now: Instant, copied: impl Fn(Ticket) -> Copy) {
        if self.counted.is_some() {
            self.released(now, copied);
        }
        self.epoch_ended(now);
        self.track.flush();
        (self.counted, self.asked, self.waiting) = (None, None, None);
        if let Some(since) = self.since.take() {
            self.pauses.unwatch();
            pause::pause((since, now));
        }
    }
}

/// Adds a row, unless nothing came of the epoch.
fn push(rows: &mut Vec<EpochTimes>, row: EpochTimes) {
    if row.batches > 0 {
        if rows.len() == EPOCHS {
            rows.remove(0);
        }
        rows.push(row);
    }
}

/// The loading side: started, loaded.
pub(crate) struct LoadRecorder {
    track: Track,
    /// The name of a load in the trace.
    span: &'static str,
    naming: Naming,
    /// Loads so far, failed ones too; the caller's side reads it for its report. Not `u64`: some 32-bit processors
    /// have no atomics of 64 bits.
    loads: Arc<AtomicUsize>,
    /// When the clocks of the processors were last read.
    looked: Option<Instant>,
}

impl LoadRecorder {
    pub(crate) fn new(track: Track, span: &'static str, naming: Naming, loads: Arc<AtomicUsize>) -> Self {
        Self { track, span, naming, loads, looked: None }
    }

    /// The load of a batch begins. Returns the clocks if it is time to look at them.
    pub(crate) fn started(&mut self, now: Instant) -> Option<Clock> {
        // Relaxed: a count. Handing over the slot makes it visible in time.
        self.loads.fetch_add(1, Ordering::Relaxed);
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK) {
            return None;
        }
        self.looked = Some(now);
        Clock::now()
    }

    pub(crate) fn loaded(&mut self, ticket: Ticket, start: Instant, end: Instant, stats: &LoadStats) {
        let id = self.naming.id(ticket);
        // Both go on part by part. The trace shows how long each took, one after the other.
        let read = end - stats.transform;
        self.track.span(self.span, id, start, read);
        if !stats.transform.is_zero() {
            self.track.span("transform", id, read, end);
        }
        self.track.filled(id, start, read);
        self.track.write_if_due(end);
    }

    /// Before something that may take long.
    pub(crate) fn write_if_due(&mut self, now: Instant) {
        self.track.write_if_due(now);
    }

    pub(crate) fn flush(&mut self) {
        self.track.flush();
    }
}
