//! The recorders of the caller and of loops over other iterables, and the spans for `tracing`. The recorders pass the
//! events of the log to the report, the breakdown and the trace; the threads that load write their own to the trace.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::breakdown::Breakdown;
use super::log::{self, Event, Freed, Interval, LoadTimes, Place, STEPS, Seen, Ticket, What};
use super::report::{Kind, Report, Settings};
use super::trace::{LoaderTrace, Trace, Track};
use crate::error::Error;

/// Records the events of a caller: a loop that asks for batches and uses them.
pub(crate) struct Recorder {
    pub(crate) report: Report,
    pub(crate) breakdown: Breakdown,
    track: Track,
    epoch: Option<Epoch>,
    /// The caller's request for a batch that it has not received yet.
    asked: Option<Asked>,
    /// When the caller asked for the first batch of the current iteration.
    since: Option<Instant>,
    /// The last times that the caller was not in the loop, in order: between two iterations, and in pauses.
    away: VecDeque<Interval>,
    /// The first step: from the first request to the end of the first use, or to the receipt while the use goes on.
    first: Option<Interval>,
    /// The time before this iteration and in the first step in which the settings to try could load batches.
    room: Duration,
    /// How many batches fit there.
    fit: usize,
    in_use: Option<Seen>,
    /// When the caller last was done with preparing a batch.
    prepared: Instant,
    /// The last batches that the caller has used: those of the page's timeline, and one for each slot.
    used: VecDeque<Seen>,
}

struct Epoch {
    first: Place,
    started: Instant,
    span: Span,
}

/// A request of the caller for a batch.
struct Asked {
    batch: Place,
    at: Instant,
    /// Whether it is the first of an iteration.
    first: bool,
    /// Whether the caller has loaded this batch itself.
    own: bool,
    span: Span,
}

impl Recorder {
    pub(crate) fn new(track: Track, breakdown: Breakdown, mut report: Report) -> Self {
        report.by_breakdown = !report.settings.overlap && breakdown.is_on();
        let (prepared, used, room, fit) = (Instant::now(), VecDeque::new(), Duration::ZERO, 0);
        let (epoch, asked, since, first, in_use) = (None, None, None, None, None);
        let away = [(prepared, prepared)].into();
        Self { report, breakdown, track, epoch, asked, since, away, first, room, fit, in_use, prepared, used }
    }

    /// Passes an event of the caller to the report and the trace.
    fn append(&mut self, what: What, batch: Place, (start, end): Interval, bytes: usize) -> Event {
        let event = Event { what, batch, start, end, bytes };
        self.report.add(&event);
        self.track.add(&event);
        event
    }

    /// Returns the report so far, including the current epoch.
    pub(crate) fn report(&self) -> Report {
        let mut report = self.report.clone();
        let mut recent: Vec<_> = self.used.range(self.used.len().saturating_sub(STEPS)..).cloned().collect();
        // Include the wait that is going on, so that the report shows a read that hangs.
        if let Some(Asked { batch, at, first, .. }) = self.asked {
            let (start, end) = (at, Instant::now().max(at));
            report.add(&Event { what: What::Wait, batch, start, end, bytes: 0 });
            report.parts.start_waits += if first { end - start } else { Duration::ZERO };
            let ticket = Ticket { place: batch, ..Ticket::default() };
            recent.push(Seen::new(ticket, (start, end), start, end));
        }
        report.wall = report.train.busy + report.train.waiting;
        report.by_epoch.iter_mut().for_each(|row| row.wall = row.train.busy + row.train.waiting);
        report.by_epoch.retain(|row| row.batches > 0);
        Report { recent: recent.into(), ..report }
    }

    /// Records that the epoch of `first` begins. `first` is its first batch.
    pub(crate) fn began(&mut self, first: Place, now: Instant) {
        self.report.began(first.epoch);
        self.epoch = Some(Epoch { first, started: now, span: spans::span(What::Epoch, None, first) });
    }

    /// Returns the batch in use. A request of the caller for the next batch ends this use.
    pub(crate) fn in_use(&self) -> Option<Ticket> {
        self.in_use.as_ref().map(|seen| seen.ticket)
    }

    /// Records that the caller asks for a batch. Repeated requests for the same batch count once. The use of the
    /// previous batch ends; `copy` is when that batch was copied to the device.
    pub(crate) fn asked(&mut self, batch: Place, now: Instant, copy: Option<Interval>) {
        if self.asked.is_none() {
            let first = self.since.is_none();
            if first {
                self.since = Some(now);
                self.away.back_mut().into_iter().for_each(|away| away.1 = now);
            }
            self.released(now, copy);
            self.away.drain(..self.away.len().saturating_sub(log::LAST));
            if self.report.batches == 0 {
                self.report.first_step.before = self.report.train;
            }
            let span = spans::span(What::Wait, self.epoch.as_ref().map(|epoch| &epoch.span), batch);
            self.asked = Some(Asked { batch, at: now, first, own: false, span });
        }
    }

    /// Records that the caller has spent the time since it asked for a batch, or received one, on preparing this batch. It
    /// waits, or uses what it received, from now on.
    pub(crate) fn prepared(&mut self, batch: Place, now: Instant) {
        let Some(since) = self.last_call() else { return };
        self.asked.iter_mut().for_each(|asked| asked.at = now);
        self.prepared = now;
        self.append(What::Prepare, batch, (since, now), 0);
    }

    /// Returns when the caller asked for the batch that it waits for, or received the one that it uses.
    pub(crate) fn last_call(&self) -> Option<Instant> {
        let received = self.in_use.as_ref().map(|seen| seen.received);
        self.asked.as_ref().map_or(received, |asked| Some(asked.at))
    }

    /// Returns the span of the current wait for a batch.
    pub(crate) fn waiting(&self) -> Option<Span> {
        self.asked.as_ref().map(|asked| asked.span.clone())
    }

    /// Records that the caller has received the batch that it asked for. `copy` is when the batch was copied to the
    /// device, if that copy is complete.
    pub(crate) fn received(
        &mut self,
        ticket: Ticket,
        bytes: usize,
        load: &LoadTimes,
        now: Instant,
        copy: Option<Interval>,
    ) {
        // Do not write these events to the trace: the threads that load and copy write them to rows of their own.
        let batch = ticket.place;
        let copy = copy.map(|(start, end)| Event { what: What::Transfer, batch, start, end, bytes });
        for event in load.events(batch).chain(copy) {
            self.report.add(&event);
            self.breakdown.add_event(&event);
        }
        self.report.received(bytes, load.io_calls, now);
        let asked = self.asked.take();
        let (asked, first, own) =
            asked.map_or((now, false, false), |asked| (asked.at, asked.first, asked.own));
        // A wait that brings no batch is in no step of the breakdown.
        let wait = self.append(What::Wait, batch, (asked, now), bytes);
        self.breakdown.add_event(&wait);
        let waited = now.saturating_duration_since(asked);
        let away = |from: Instant, to: Instant| -> Duration {
            let last = self.away.iter().rev().take_while(|(_, came)| *came > from);
            last.map(|(left, came)| to.min(*came).saturating_duration_since(from.max(*left))).sum()
        };
        let (began, ended) = *self.first.get_or_insert((asked, now));
        let in_first = |from: Instant, to: Instant| {
            let (from, to) = (from.max(began), to.min(ended));
            to.saturating_duration_since(from).saturating_sub(away(from, to))
        };
        let (outside, in_step) = (away(load.start, load.end), in_first(load.start, load.end));
        let late = self.report.each(load.took().saturating_sub(outside + in_step));
        // The most slots to try.
        let most = self.report.settings.deeper().max(self.report.workers_with_overlap + 2);
        let (parts, step) = (&mut self.report.parts, &mut self.report.first_step);
        parts.outside += outside;
        step.loads += in_step;
        step.slot_waits += in_first(load.since, load.start);
        if first {
            parts.starts += 1;
            parts.start_waits += waited;
            parts.start_loads += if own { Duration::ZERO } else { load.took().min(waited) };
            // Loading may start with the call, or earlier if it continues from the iteration before. If the loop drops its
            // first batch early, one more slot is free.
            let called = self.epoch.as_ref().map_or(asked, |epoch| epoch.started).min(load.start);
            (self.room, self.fit) = (away(called, asked), most + 1);
        }
        if late.is_zero() {
            // A device has slots too.
            self.fit = self.fit.saturating_sub(1).max(most + 1 - self.report.settings.depth);
        } else if self.fit > 0 {
            parts.early += late.min(self.room);
            (self.room, self.fit) = (self.room.saturating_sub(late), self.fit - 1);
        }
        if self.report.batches == 1 {
            step.start_loads = parts.start_loads;
        } else {
            parts.late += load.end.min(now).saturating_duration_since(load.start.max(asked));
        }
        if let Some(Freed { number, at }) = load.freed.filter(|freed| freed.at > load.since) {
            parts.full += (at - load.since).saturating_sub(away(load.since, at));
            step.full += in_first(load.since, at);
            // The batch before in this slot kept it from a loading thread, after the caller had asked for another batch.
            let before = self.used.iter().rev().find(|seen| seen.ticket.seq == number);
            let kept = |seen: &Seen| at.saturating_duration_since(seen.released.max(load.since));
            parts.held += before.filter(|_| !first).map_or(Duration::ZERO, kept).min(waited);
        }
        // If the loop received two items without a request in between, the first is forgotten: its use has no known end.
        self.in_use = Some(Seen::new(ticket, (load.start, load.end), asked, now));
        self.track.write_if_due(now);
    }

    /// Records that the caller has received a unit that was in memory, and sends it to a device. Its use counts if none is
    /// in use.
    #[cfg_attr(not(feature = "safetensors"), allow(dead_code, reason = "for a stream"))]
    pub(crate) fn kept(&mut self, place: Place, bytes: usize) {
        if self.report.sends {
            self.report.bytes = self.report.bytes.saturating_add(bytes as u64);
            // It is in no slot.
            let (ticket, now) = (Ticket { generation: 0, seq: u64::MAX, place }, Instant::now());
            self.in_use.get_or_insert(Seen::new(ticket, (now, now), now, now));
        }
    }

    /// Records that the caller has filled a slot while it waited.
    pub(crate) fn helped(&mut self, batch: Place, load: &LoadTimes) {
        self.report.parts.helped += load.took();
        if let Some(asked) = self.asked.as_mut().filter(|asked| asked.first) {
            self.report.parts.start_helped += load.took();
            asked.own |= asked.batch == batch;
        }
        if self.report.batches == 0 {
            self.report.first_step.helped += load.took();
        }
        load.events(batch).for_each(|event| self.track.add(&event));
    }

    /// Records that the caller's use of its batch ends.
    pub(crate) fn released(&mut self, now: Instant, copy: Option<Interval>) {
        let Some(mut seen) = self.in_use.take() else { return };
        let Seen { ticket: Ticket { place, .. }, asked, received, .. } = seen;
        let mut from = received.max(self.prepared);
        // The caller received its batch before the copy was done. The use counts from the end of the copy.
        if let Some((_, copied)) = copy.filter(|(_, copied)| *copied > received) {
            from = copied.min(now);
            self.append(What::CopyWait, place, (received, from), 0);
        }
        let pauses = if self.since.is_some() { log::pauses(received) } else { Vec::new() };
        for (start, end) in pauses {
            if start > from {
                self.append(What::Use, place, (from, start), 0);
            }
            if end > from {
                let start = start.max(from);
                self.append(What::Pause, place, (start, end), 0);
                self.report.parts.pauses += end - start;
                self.away.push_back((start, end));
                from = end;
            }
        }
        self.append(What::Use, place, (from, now), 0);
        (seen.released, seen.copied) = (now, copy);
        if self.epoch.is_some() {
            self.append(What::Step, place, (asked, now), 0);
        }
        if self.report.batches == 1 && self.used.is_empty() {
            self.report.first = self.report.train.less(self.report.first_step.before);
            self.room += self.report.first.busy + self.report.first.waiting;
            self.first.iter_mut().for_each(|first| first.1 = now);
        }
        if let (Some((_, ended)), Some((start, end))) = (self.first, copy) {
            self.report.first_step.copies += end.min(ended).saturating_duration_since(start);
        }
        self.used.drain(..self.used.len().saturating_sub(STEPS.max(self.report.settings.depth)));
        self.used.push_back(seen);
    }

    /// Records that the epoch ends.
    pub(crate) fn epoch_ended(&mut self, now: Instant) {
        if let Some(Epoch { first, started, .. }) = self.epoch.take() {
            self.append(What::Epoch, first, (started, now), 0);
        }
    }

    /// Records that the iteration ends: the caller asks for no more batches. The use of its batch, if any, ends without a
    /// copy.
    pub(crate) fn ended(&mut self, now: Instant) {
        self.released(now, None);
        // If the caller asked for a batch and did not receive it, count that wait.
        if let Some(Asked { batch, at, .. }) = self.asked.take() {
            self.append(What::Wait, batch, (at, now), 0);
        }
        self.epoch_ended(now);
        self.track.flush();
        if let Some(since) = self.since.take() {
            log::pause((since, now));
            self.away.push_back((now, now));
        }
    }
}

/// Measures a loop that iterates over a source other than a loader. It produces the same kind of report.
///
/// Its loads are the waits of the loop: [`Report::advice`] bounds what a thread that loads ahead would save. A loop over
/// what another thread sends to a device has its recorder from
/// [`Pipe::loop_recorder`](crate::pipe::Pipe::loop_recorder).
///
/// ```
/// use std::time::Instant;
/// use twinbuf::observe::LoopRecorder;
///
/// let mut recorder = LoopRecorder::new(None, None, false)?;
/// let mut lines = "a\nb\nc".lines();
/// for step in 0.. {
///     recorder.asked(Instant::now());
///     let Some(line) = lines.next() else { break };
///     recorder.received(0, step, Instant::now());
///     assert_eq!(line.len(), 1); // use it
/// }
/// recorder.ended(Instant::now());
/// assert_eq!(recorder.report().batches, 3);
/// # Ok::<(), twinbuf::Error>(())
/// ```
pub struct LoopRecorder {
    recorder: Recorder,
    /// The next item, if the epoch goes on.
    next: Place,
}

impl LoopRecorder {
    /// Creates a recorder for the loop `name` that has not started.
    ///
    /// With a `trace`, it writes a Chrome trace. If the source makes its items `ahead` of the loop, in threads or processes
    /// of its own, a wait is no whole load, and the report does not advise a thread that loads ahead.
    ///
    /// # Errors
    ///
    /// [`Error::Trace`] if the file cannot be created.
    pub fn new(name: Option<&str>, trace: Option<Trace>, ahead: bool) -> Result<Self, Error> {
        let trace = trace.map(|trace| trace.open(name, 0, 1)).transpose()?;
        Ok(Self::of(trace, ahead, false))
    }

    /// Creates a recorder that writes to an open trace. On a `device`, its waits have the name `gpu_queue_wait` there.
    pub(crate) fn of(trace: Option<Arc<LoaderTrace>>, ahead: bool, device: bool) -> Self {
        let track = Track::new(trace, 1, "train", false, device);
        let kind = if ahead { Kind::Ahead } else { Kind::Items };
        let report = Report::new(kind, Settings { overlap: ahead, depth: 2, workers: 1 });
        Self { recorder: Recorder::new(track, Breakdown::off(), report), next: Place::default() }
    }

    /// Records that the loop asks for the next item at the time `at`. The use of the previous item ends.
    pub fn asked(&mut self, at: Instant) {
        self.recorder.asked(self.next, at, None);
    }

    /// Records that the loop received the item at the time `at`. If `epoch` differs from the previous item's epoch,
    /// or if this is the first item or the first since [`ended`](Self::ended), a new epoch starts.
    pub fn received(&mut self, epoch: u64, step: u64, at: Instant) {
        let Self { recorder, next } = self;
        let mut item = Place { epoch, step, ..*next };
        let asked = recorder.asked.as_ref().map_or(at, |asked| asked.at);
        if recorder.epoch.as_ref().is_none_or(|begun| begun.first.epoch != epoch) {
            recorder.epoch_ended(asked);
            item.ordinal = recorder.report.epochs;
            recorder.began(item, asked);
        }
        *next = Place { step: step.saturating_add(1), ..item };
        let load = LoadTimes { end: at, ..LoadTimes::new(asked) };
        recorder.received(Ticket { place: item, ..Ticket::default() }, 0, &load, at, None);
    }

    /// Records that the loop ended at the time `at`.
    pub fn ended(&mut self, at: Instant) {
        self.recorder.ended(at);
    }

    /// Returns a report of where the time went so far. It counts no bytes, loads or I/O calls.
    #[must_use]
    pub fn report(&self) -> Report {
        self.recorder.report()
    }

    /// Ends the loop's row of the trace. What is recorded later counts in the report alone.
    pub fn close(&mut self) {
        self.recorder.track = Track::default();
    }
}

debug!([] LoopRecorder[], |recorder| next: recorder.next);

/// Spans for the `tracing` crate. Without the feature `tracing`, a span is an empty value and its functions do nothing.
#[cfg(feature = "tracing")]
mod spans {
    pub(crate) use tracing::Span;
    use tracing::{debug_span, field::Empty};

    use super::{Place, What};

    const TARGET: &str = "twinbuf";

    /// Returns the span of an epoch, of a caller's wait in it, or of a load.
    pub(crate) fn span(what: What, parent: Option<&Span>, Place { epoch, step, .. }: Place) -> Span {
        match what {
            // It is never entered, because the caller's own code runs between two batches.
            What::Epoch => debug_span!(target: TARGET, "epoch", epoch),
            What::Wait => debug_span!(target: TARGET, parent: parent.and_then(Span::id), "wait", epoch, step),
            // It has no parent: a loading thread may be ahead of the caller's epoch.
            _ => debug_span!(target: TARGET, parent: None, "load", epoch, step, bytes = Empty),
        }
    }
}
#[cfg(not(feature = "tracing"))]
mod spans {
    use super::{Place, What};

    /// An empty value.
    #[derive(Clone)]
    pub(crate) struct Span;

    impl Span {
        pub(crate) fn entered(self) -> Self {
            self
        }

        pub(crate) fn enter(&self) -> &Self {
            self
        }

        pub(crate) fn record(&self, _: &str, _: usize) {}
    }

    pub(crate) fn span(_: What, _: Option<&Span>, _: Place) -> Span {
        Span
    }
}
pub(crate) use spans::{Span, span};

#[cfg(test)]
mod tests {
    use super::*;

    /// Records a loop over two epochs with the same steps. A step is the time of its load and of its use, in
    /// milliseconds.
    fn recorded(steps: &[(u64, u64)]) -> LoopRecorder {
        let mut recorder = LoopRecorder::new(None, None, false).unwrap();
        let mut now = Instant::now();
        for epoch in 0..2 {
            for (step, &(load, used)) in steps.iter().enumerate() {
                recorder.asked(now);
                now += Duration::from_millis(load);
                recorder.received(epoch, step as u64, now);
                now += Duration::from_millis(used);
            }
            recorder.ended(now);
        }
        recorder
    }

    #[test]
    fn the_waits_of_a_loop_are_its_loads() {
        let report = recorded(&[(40, 30), (10, 30), (10, 30)]).report();
        assert_eq!((report.epochs, report.batches), (2, 6));
        assert_eq!(report.read.busy, Duration::from_millis(120));
        assert_eq!((report.train.waiting, report.train.busy), (report.read.busy, Duration::from_millis(180)));
        assert_eq!(report.wall, Duration::from_millis(300));
    }

    #[test]
    fn reports_of_iterations_add_up() {
        // Run one loop on another thread: two loops on one thread would count as pauses of each other.
        let second = std::thread::spawn(|| recorded(&[(20, 5); 3]).report()).join().unwrap();
        let first = recorded(&[(40, 30), (10, 30)]).report();
        let both = first.then(second.clone());
        assert_eq!((both.epochs, both.batches), (4, 10));
        assert_eq!(both.wall, first.wall + second.wall);
        assert_eq!(both.first, first.first);
        assert_eq!((both.parts.starts, both.recent.len()), (4, 10));
        assert_eq!(both.parts.start_waits, first.parts.start_waits + second.parts.start_waits);
        assert_eq!(Report::default().then(first.clone()), first);
    }
}
