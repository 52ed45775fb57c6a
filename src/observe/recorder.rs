//! The recorders of the caller and of the loading threads: they append events to the log, and hand each to what is made
//! from it.

use std::time::{Duration, Instant};

use super::breakdown::Breakdown;
use super::history::{History, LOOK, Seen};
use super::log::{self, Event, Interval, What};
use super::report::Report;
use super::trace::Track;
use crate::observe::unit::{LoadTimes, Ticket};
use crate::thread::Clock;

/// The caller's log: a loop that asks for batches and uses them.
pub(crate) struct Recorder {
    pub(crate) report: Report,
    /// If it is on.
    breakdown: Option<Breakdown>,
    track: Option<Track>,
    /// The wait for a batch.
    wait: What,
    pub(super) epoch: Option<Epoch>,
    /// Since when the caller has been asking for the next batch.
    pub(super) asked: Option<Asked>,
    /// When the first batch was asked for since the caller began again.
    since: Option<Instant>,
    pub(super) history: History,
    /// The caller is a thread that sends the batches to a device.
    sends: bool,
}

pub(super) struct Epoch {
    pub(super) first: Ticket,
    started: Instant,
    span: Span,
}

/// The batch that the caller asks for.
pub(super) struct Asked {
    batch: Ticket,
    pub(super) at: Instant,
    span: Span,
}

impl Recorder {
    pub(crate) fn new(
        track: Option<Track>,
        wait: What,
        breakdown: &Breakdown,
        mut report: Report,
        sends: bool,
    ) -> Self {
        report.by_breakdown = !report.overlap && breakdown.is_on();
        let breakdown = breakdown.is_on().then(|| breakdown.clone());
        let (epoch, asked, since, history) = (None, None, None, History::default());
        Self { report, breakdown, track, wait, epoch, asked, since, history, sends }
    }

    /// Appends an event of the caller's.
    fn append(&mut self, what: What, batch: Ticket, (start, end): Interval, bytes: usize) {
        let event = Event { what, batch, start, end, bytes };
        self.report.add(&event);
        if let Some(breakdown) = &self.breakdown {
            breakdown.add_event(&event);
        }
        let Some(track) = &mut self.track else { return };
        match what {
            What::Use if self.sends => track.add(&Event { what: What::Transfer, ..event }),
            _ if self.sends => {}
            _ => track.add(&event),
        }
    }

    /// Returns the report so far, including the current epoch.
    pub(crate) fn report(&self) -> Report {
        let now = Instant::now();
        let waits = self.asked.as_ref().map(|asked| (asked.at, now.max(asked.at)));
        let first = self.epoch.as_ref().map(|epoch| epoch.first);
        Report { recent: self.history.recent(first.zip(waits)).into(), ..self.sums(now) }
    }

    /// The same without the single batches: a copy of few bytes.
    pub(crate) fn sums(&self, now: Instant) -> Report {
        let mut report = self.report.clone();
        // A read that hangs shows while it does.
        if let Some(Asked { batch, at, .. }) = self.asked {
            let (start, end) = (at, now.max(at));
            report.add(&Event { what: self.wait, batch, start, end, bytes: 0 });
        }
        report.by_epoch.retain(|row| row.batches > 0);
        report
    }

    /// The epoch of `first` begins with that batch.
    pub(crate) fn began(&mut self, first: Ticket, now: Instant) {
        self.report.began(first.epoch);
        self.epoch = Some(Epoch { first, started: now, span: spans::epoch(first.epoch) });
    }

    /// Returns the batch whose use is over if the caller asks now.
    pub(crate) fn in_use(&self) -> Option<Ticket> {
        self.history.in_use().map(|seen| seen.ticket)
    }

    /// The caller is about to ask for a batch.
    #[inline]
    pub(crate) fn ends(&mut self) {
        self.history.ends();
    }

    /// The caller asks for a batch, perhaps not for the first time: its use of the one before is over, whose copy ran
    /// as told.
    pub(crate) fn asked(&mut self, ticket: Ticket, now: Instant, copy: Option<Interval>) {
        if self.asked.is_none() {
            if self.since.is_none() {
                self.since = Some(now);
                self.history.began(self.epoch.as_ref().map_or(now, |epoch| epoch.started));
            }
            self.released(now, copy);
            let epoch = self.epoch.as_ref().map(|epoch| &epoch.span);
            let span = spans::wait(epoch, ticket.epoch, ticket.step);
            self.asked = Some(Asked { batch: ticket, at: now, span });
        }
    }

    /// The caller prepared the batch that it has asked for before it began to wait.
    pub(crate) fn prepared(&mut self, now: Instant) {
        if let Some(Asked { batch, at, .. }) = &mut self.asked {
            let (batch, asked) = (*batch, std::mem::replace(at, now));
            self.append(What::Prepare, batch, (asked, now), 0);
        }
    }

    /// The span of the wait for a batch.
    pub(crate) fn waiting(&self) -> Option<Span> {
        self.asked.as_ref().map(|asked| asked.span.clone())
    }

    /// The caller has the batch that it asked for; a copy that is over ran as told.
    pub(crate) fn received(
        &mut self,
        ticket: Ticket,
        bytes: usize,
        load: &LoadTimes,
        now: Instant,
        copy: Option<Interval>,
    ) {
        // The loading thread has them in its row of the trace.
        load.events(What::Read, ticket, |event| {
            self.report.add(event);
            if let Some(breakdown) = &self.breakdown {
                breakdown.add_event(event);
            }
        });
        if let (Some((start, end)), Some(breakdown)) = (copy, &self.breakdown) {
            breakdown.add_event(&Event { what: What::Transfer, batch: ticket, start, end, bytes });
        }
        self.report.received(bytes, load.io_calls);
        self.in_use_from(ticket, load, now, bytes);
        if let Some(track) = &mut self.track {
            track.taken(ticket);
            track.write_if_due(now);
        }
    }

    /// The caller has the batch that it asked for.
    pub(super) fn in_use_from(&mut self, ticket: Ticket, load: &LoadTimes, now: Instant, bytes: usize) {
        let asked = self.asked.take().map_or(now, |asked| asked.at);
        self.append(self.wait, ticket, (asked, now), bytes);
        self.history.received(ticket, load, asked, now);
    }

    /// A batch was released unseen: it had failed, or was loaded for a call that was left early.
    pub(crate) fn discarded(&mut self, ticket: Ticket) {
        if let Some(track) = &mut self.track {
            track.taken(ticket);
        }
    }

    /// The caller has filled a slot while it waited.
    pub(crate) fn helped(&mut self, ticket: Ticket, load: &LoadTimes) {
        if let Some(track) = &mut self.track {
            load.events(What::Read, ticket, |event| track.add(event));
        }
    }

    /// The caller is done with its batch.
    pub(crate) fn released(&mut self, now: Instant, copy: Option<Interval>) {
        let Some(&Seen { ticket, asked, received, .. }) = self.history.in_use() else { return };
        let (mut from, mut paused) = (received, Duration::ZERO);
        // The caller has its batch before the copy is done: its own work began only then.
        if let Some((_, copied)) = copy.filter(|(_, copied)| *copied > received) {
            from = copied.min(now);
            self.append(What::CopyWait, ticket, (received, from), 0);
        }
        if let Some(track) = &mut self.track {
            track.used(ticket, from);
        }
        let pauses = if self.since.is_some() { log::pauses(received) } else { Vec::new() };
        for (start, end) in pauses {
            if start > from {
                self.append(What::Use, ticket, (from, start), 0);
            }
            if end > from {
                let start = start.max(from);
                self.append(What::Pause, ticket, (start, end), 0);
                paused += end - start;
                from = end;
            }
        }
        self.append(What::Use, ticket, (from, now), 0);
        self.history.released(now, paused, copy);
        if self.epoch.is_some() {
            self.append(What::Step, ticket, (asked, now), 0);
        }
        if self.report.batches == 1 {
            self.report.first = self.report.train;
        }
    }

    /// The epoch is over.
    pub(crate) fn epoch_ended(&mut self, now: Instant) {
        if let Some(Epoch { first, started, .. }) = self.epoch.take() {
            self.append(What::Epoch, first, (started, now), 0);
        }
    }

    /// The caller asks for no more batches.
    pub(crate) fn ended(&mut self, now: Instant, copy: Option<Interval>) {
        self.released(now, copy);
        // It may have asked for one that did not come.
        if let Some(Asked { batch, at, .. }) = self.asked.take() {
            self.append(self.wait, batch, (at, now), 0);
        }
        self.epoch_ended(now);
        if let Some(track) = &mut self.track {
            track.flush();
        }
        if let Some(since) = self.since.take() {
            log::pause((since, now));
        }
    }
}

/// The log of a thread that loads.
pub(crate) struct LoadRecorder {
    track: Option<Track>,
    /// What it does: reads, or generates.
    what: What,
    /// When the clocks of the processors were last read.
    looked: Option<Instant>,
}

impl LoadRecorder {
    pub(crate) fn new(track: Option<Track>, what: What) -> Self {
        Self { track, what, looked: None }
    }

    /// The load of a batch begins. Returns its span.
    pub(crate) fn began(&self, ticket: Ticket) -> Span {
        spans::load(ticket.epoch, ticket.step)
    }

    /// Returns the clocks at the beginning of a load if it is time to look at them.
    pub(crate) fn clock(&mut self, now: Instant) -> Option<Clock> {
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK) {
            return None;
        }
        self.looked = Some(now);
        Clock::now()
    }

    pub(crate) fn loaded(&mut self, ticket: Ticket, load: &LoadTimes) {
        let Some(track) = &mut self.track else { return };
        load.events(self.what, ticket, |event| track.add(event));
        track.write_if_due(load.end);
    }

    /// Before something that may take long.
    pub(crate) fn write_if_due(&mut self, now: Instant) {
        if let Some(track) = &mut self.track {
            track.write_if_due(now);
        }
    }

    pub(crate) fn flush(&mut self) {
        if let Some(track) = &mut self.track {
            track.flush();
        }
    }
}

/// Spans for the `tracing` crate. Without the feature of that name they are nothing, and take no time.
#[cfg(feature = "tracing")]
mod spans {
    pub(crate) use tracing::Span;
    use tracing::debug_span;

    const TARGET: &str = "twinbuf";

    /// An epoch, from its start to its end. Never entered: between two batches the thread is the caller's.
    pub(crate) fn epoch(epoch: u64) -> Span {
        debug_span!(target: TARGET, "epoch", epoch)
    }

    /// The caller waits for a batch.
    pub(crate) fn wait(parent: Option<&Span>, epoch: u64, step: u64) -> Span {
        debug_span!(target: TARGET, parent: parent.and_then(Span::id), "wait", epoch, step)
    }

    /// A batch is loaded into its slot, on the thread that reads. A root: that thread may be ahead of the caller's epoch.
    pub(crate) fn load(epoch: u64, step: u64) -> Span {
        debug_span!(target: TARGET, parent: None, "load", epoch, step, bytes = tracing::field::Empty)
    }
}
#[cfg(not(feature = "tracing"))]
mod spans {
    #[derive(Clone)]
    pub(crate) struct Span;

    impl Span {
        pub(crate) fn entered(self) -> Self {
            self
        }

        pub(crate) fn record(&self, _: &str, _: usize) {}
    }

    pub(crate) fn epoch(_: u64) -> Span {
        Span
    }

    pub(crate) fn wait(_: Option<&Span>, _: u64, _: u64) -> Span {
        Span
    }

    pub(crate) fn load(_: u64, _: u64) -> Span {
        Span
    }
}
pub(crate) use spans::Span;
