//! The recorders of the caller and of the loading threads: they append events to the log, and hand each to what is made
//! from it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::breakdown::Breakdown;
use super::history::{History, LOOK, Seen, StepTimes};
use super::log::{Event, What};
use super::pause::{self, Interval};
use super::replay::Settings;
use super::report::Report;
use super::spans::{self, Span};
use super::trace::{Trace, Track};
use crate::cpu::Clock;
use crate::error::Error;
use crate::slot::{BatchId, BatchMeta, Freed, LoadTimes, Naming, Ticket};
use crate::thread::this_thread;

/// The caller's log: a loop that asks for batches and uses them.
pub(crate) struct Recorder {
    report: Report,
    pub(crate) breakdown: Breakdown,
    track: Track,
    naming: Naming,
    /// The wait for a batch.
    wait: What,
    epoch: Option<Epoch>,
    /// Since when the caller has been asking for the next batch.
    asked: Option<Asked>,
    /// When the first batch was asked for.
    first: Option<Instant>,
    /// When the first batch was asked for since the caller began again.
    since: Option<Instant>,
    history: History,
    /// The caller is a thread that sends the batches to a device.
    sends: bool,
}

struct Epoch {
    first: Ticket,
    id: BatchId,
    started: Instant,
    span: Span,
}

/// The batch that the caller asks for.
struct Asked {
    id: BatchId,
    at: Instant,
    span: Span,
}

impl Recorder {
    pub(crate) fn new(
        track: Track,
        naming: Naming,
        wait: What,
        breakdown: Breakdown,
        settings: Settings,
        device_depth: usize,
    ) -> Self {
        let by_breakdown = !settings.overlap && breakdown.is_on();
        let report = Report { by_breakdown, ..Report::new(naming.rounds, settings, device_depth) };
        let (epoch, asked, first, since, history) = (None, None, None, None, History::default());
        Self { report, breakdown, track, naming, wait, epoch, asked, first, since, history, sends: false }
    }

    /// Whether the caller is a thread that sends the batches to a device: in the trace that is what its use is.
    pub(crate) fn sends(&mut self, sends: bool) {
        self.sends = sends;
    }

    /// Whether the rounds of a generator wait for a hook of the caller.
    pub(crate) fn lockstep(&mut self, lockstep: bool) {
        self.report.lockstep = lockstep;
    }

    /// The rounds of a generator are the items of an iterable, from `first` on.
    pub(crate) fn items(&mut self, first: Ticket) {
        (self.report.generated, self.report.items) = (false, true);
        self.began(first, Instant::now());
    }

    /// Appends an event of the caller's.
    fn append(&mut self, what: What, batch: BatchId, (start, end): Interval, bytes: usize) {
        let event = Event { what, batch, start, end, bytes };
        self.report.add(&event);
        self.breakdown.add_event(&event);
        match what {
            What::Use if self.sends => self.track.add(&Event { what: What::Transfer, ..event }),
            _ if self.sends => {}
            _ => self.track.add(&event),
        }
    }

    /// Returns the report so far, including the current epoch.
    pub(crate) fn report(&self) -> Report {
        let mut report = self.report.clone();
        // A read that hangs shows while it does.
        let waits = self.asked.as_ref().map(|asked| (asked.at, Instant::now().max(asked.at)));
        if let (Some((start, end)), Some(Asked { id, .. })) = (waits, &self.asked) {
            report.add(&Event { what: self.wait, batch: *id, start, end, bytes: 0 });
        }
        let first = self.epoch.as_ref().map(|epoch| epoch.first);
        report.recent = self.history.recent(first.zip(waits)).into();
        report.by_epoch.retain(|row| row.batches > 0);
        report
    }

    /// Returns the last steps, the oldest first.
    pub(crate) fn recent_steps(&self) -> Vec<StepTimes> {
        self.first.map_or(Vec::new(), |first| self.history.steps(first))
    }

    /// The epoch of `first` begins with that batch.
    pub(crate) fn began(&mut self, first: Ticket, now: Instant) {
        self.report.began(first.epoch);
        let id = BatchId { step: None, ..self.naming.id(first) };
        self.epoch = Some(Epoch { first, id, started: now, span: spans::epoch(first.epoch) });
    }

    /// Returns the batch whose use is over if the caller asks now.
    pub(crate) fn in_use(&self) -> Option<Ticket> {
        self.history.in_use().map(|seen| seen.ticket)
    }

    /// The caller asks for a batch, perhaps not for the first time: its use of the one before is over, whose copy ran
    /// as told.
    pub(crate) fn asked(&mut self, ticket: Ticket, now: Instant, copy: Option<Interval>) {
        if self.asked.is_none() {
            self.first.get_or_insert(now);
            if self.since.is_none() {
                self.since = Some(now);
                self.history.began(self.epoch.as_ref().map_or(now, |epoch| epoch.started));
            }
            self.released(now, copy);
            let epoch = self.epoch.as_ref().map(|epoch| &epoch.span);
            let span = spans::wait(epoch, ticket.epoch, ticket.step);
            self.asked = Some(Asked { id: self.naming.id(ticket), at: now, span });
        }
    }

    /// The caller prepared the batch that it has asked for before it began to wait.
    pub(crate) fn prepared(&mut self, now: Instant) {
        if let Some(Asked { id, at, .. }) = &mut self.asked {
            let (id, asked) = (*id, std::mem::replace(at, now));
            self.append(What::Prepare, id, (asked, now), 0);
        }
    }

    /// The span of the wait for a batch.
    pub(crate) fn waiting(&self) -> Option<Span> {
        self.asked.as_ref().map(|asked| asked.span.clone())
    }

    /// The caller has the batch that it asked for; a copy that is over ran as told.
    pub(crate) fn received(&mut self, meta: &BatchMeta, now: Instant, copy: Option<Interval>) {
        let (load, id) = (&meta.load, self.naming.id(meta.ticket));
        let bytes = meta.result.as_ref().map_or(0, |&bytes| bytes);
        // The loading thread has them in its row of the trace.
        load.events(What::Read, id, |event| {
            self.report.add(event);
            self.breakdown.add_event(event);
        });
        if let Some((start, end)) = copy {
            self.breakdown.add_event(&Event { what: What::Transfer, batch: id, start, end, bytes });
        }
        self.report.received(bytes, load.io_calls);
        self.in_use_from(meta.ticket, Some(load), now, bytes);
        self.track.taken(id);
        self.track.write_if_due(now);
    }

    /// The caller has the batch that it asked for.
    fn in_use_from(&mut self, ticket: Ticket, load: Option<&LoadTimes>, now: Instant, bytes: usize) {
        let asked = self.asked.take().map_or(now, |asked| asked.at);
        self.append(self.wait, self.naming.id(ticket), (asked, now), bytes);
        self.history.received(ticket, load, asked, now);
    }

    /// A batch was released unseen: it had failed, or was loaded for a call that was left early.
    pub(crate) fn discarded(&mut self, ticket: Ticket) {
        self.track.taken(self.naming.id(ticket));
    }

    /// The caller is done with its batch.
    pub(crate) fn released(&mut self, now: Instant, copy: Option<Interval>) {
        let Some(&Seen { ticket, asked, received, .. }) = self.history.in_use() else { return };
        let (id, mut from, mut paused) = (self.naming.id(ticket), received, Duration::ZERO);
        // The caller has its batch before the copy is done: its own work began only then.
        if let Some((_, copied)) = copy.filter(|(_, copied)| *copied > received) {
            from = copied.min(now);
            self.append(What::CopyWait, id, (received, from), 0);
        }
        self.track.used(id, from);
        let pauses = if self.since.is_some() { pause::pauses(received) } else { Vec::new() };
        for (start, end) in pauses {
            if start > from {
                self.append(What::Use, id, (from, start), 0);
            }
            if end > from {
                let start = start.max(from);
                self.append(What::Pause, id, (start, end), 0);
                paused += end - start;
                from = end;
            }
        }
        self.append(What::Use, id, (from, now), 0);
        self.history.released(now, paused, copy);
        if self.epoch.is_some() {
            self.append(What::Step, id, (asked, now), 0);
        }
        if self.report.batches == 1 {
            self.report.first = self.report.train;
        }
    }

    /// The epoch is over.
    pub(crate) fn epoch_ended(&mut self, now: Instant) {
        if let Some(Epoch { id, started, .. }) = self.epoch.take() {
            self.append(What::Epoch, id, (started, now), 0);
        }
    }

    /// The caller asks for no more batches.
    pub(crate) fn ended(&mut self, now: Instant, copy: Option<Interval>) {
        self.released(now, copy);
        // It may have asked for one that did not come.
        if let Some(Asked { id, at, .. }) = self.asked.take() {
            self.append(self.wait, id, (at, now), 0);
        }
        self.epoch_ended(now);
        self.track.flush();
        if let Some(since) = self.since.take() {
            pause::pause((since, now));
        }
    }
}

/// Measures a loop that iterates over a source other than a loader. It produces the same report.
///
/// Its loads are the waits of the loop: [`Report::predict`] tells what a thread that loads ahead would gain.
///
/// ```
/// use std::time::Instant;
/// use twinbuf::observe::LoopRecorder;
///
/// let mut recorder = LoopRecorder::new();
/// let mut lines = "a\nb\nc".lines();
/// for step in 0.. {
///     recorder.asked(Instant::now());
///     let Some(line) = lines.next() else { break };
///     recorder.received(0, step, Instant::now());
///     assert_eq!(line.len(), 1); // use it
/// }
/// recorder.ended(Instant::now());
/// assert_eq!(recorder.report().batches, 3);
/// ```
pub struct LoopRecorder {
    recorder: Recorder,
    next: Ticket,
    /// When the clocks of the processors were last read, and what they were when the loop asked.
    looked: Option<Instant>,
    clock: Option<Clock>,
    /// What came last, and a mean of how long the loop waits on a processor and off it.
    last: Option<Instant>,
}

impl LoopRecorder {
    /// Creates a recorder for a loop that has not started.
    #[must_use]
    pub fn new() -> Self {
        Self::make(Track::new(None, 0, ""), Naming::default(), What::Wait)
    }

    /// Makes one that writes a Chrome trace. With a device the loop's waits are called `gpu_queue_wait`.
    ///
    /// # Errors
    ///
    /// [`Error::Trace`] if the file cannot be created.
    #[doc(hidden)]
    pub fn traced(name: Option<&str>, trace: Trace, device: bool) -> Result<Self, Error> {
        let trace = trace.open(name, 0, 1).map_err(Error::trace)?;
        let naming = Naming { loader: name.map(Into::into), rounds: false };
        Ok(Self::make(
            Track::new(Some(trace), 1, "train"),
            naming,
            if device { What::DeviceWait } else { What::Wait },
        ))
    }

    fn make(track: Track, naming: Naming, wait: What) -> Self {
        let next = Ticket { generation: 0, seq: 0, ordinal: 0, epoch: 0, step: 0, steps: 0, last: 0 };
        let settings = Settings { overlap: false, depth: 2, workers: 1 };
        let mut recorder = Recorder::new(track, naming, wait, Breakdown::off(), settings, 0);
        recorder.report.items = true;
        Self { recorder, next, looked: None, clock: None, last: None }
    }

    /// The items come from workers of the iterable, ahead of the loop.
    #[doc(hidden)]
    pub fn from_workers(&mut self) {
        (self.recorder.report.overlap, self.recorder.report.elsewhere) = (true, true);
    }

    /// Records that the loop asks for the next item at the time `at`. The use of the previous item ends.
    pub fn asked(&mut self, at: Instant) {
        self.recorder.asked(self.next, at, None);
        if self.looked.is_none_or(|looked| at.saturating_duration_since(looked) >= LOOK) {
            (self.looked, self.clock) = (Some(at), Clock::now());
        }
    }

    /// Records that the loop received the item at the time `at`. If `epoch` differs from the previous item's epoch,
    /// or if this is the first item, a new epoch starts.
    pub fn received(&mut self, epoch: u64, step: u64, at: Instant) {
        let (seq, ordinal) = (self.next.seq + 1, self.recorder.report.epochs);
        self.next = Ticket { seq, epoch, step, ..self.next };
        let asked = self.recorder.asked.as_ref().map_or(at, |asked| asked.at);
        if self.recorder.epoch.as_ref().is_none_or(|begun| begun.id.epoch != epoch) {
            self.recorder.epoch_ended(at);
            self.next.ordinal = ordinal;
            self.recorder.began(self.next, asked);
        }
        let cpu = self.clock.take().and_then(|clock| clock.since(at - asked));
        // Workers that the loop waits for have been at work since they handed over the item before.
        let waits = self.recorder.report.elsewhere && cpu.is_none_or(|cpu| 2.0 * cpu.cpu < cpu.wall);
        let start = self.last.filter(|_| waits).unwrap_or(asked);
        self.last = Some(at);
        // The item leaves nothing behind that it could occupy.
        let batch = (self.next.generation, self.next.seq);
        let freed = Some(Freed { batch, at, thread: this_thread() });
        let (transform, io_calls, bytes) = (Duration::ZERO, 0, 0);
        let load = LoadTimes { since: start, start, end: at, transform, io_calls, bytes, cpu, freed: None };
        load.events(What::Read, self.naming_id(), |event| self.recorder.report.add(event));
        self.recorder.report.received(0, 0);
        self.recorder.in_use_from(self.next, Some(&load), at, 0);
        self.recorder.history.freed(freed);
    }

    fn naming_id(&self) -> BatchId {
        self.recorder.naming.id(self.next)
    }

    /// Records that the loop ended at the time `at`.
    pub fn ended(&mut self, at: Instant) {
        self.recorder.ended(at, None);
        self.last = None;
    }

    /// Returns a report of where the time went so far.
    #[must_use]
    pub fn report(&self) -> Report {
        self.recorder.report()
    }
}

impl Default for LoopRecorder {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for LoopRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopRecorder").field("next", &self.next).finish_non_exhaustive()
    }
}

/// The log of a thread that loads.
pub(crate) struct LoadRecorder {
    track: Track,
    naming: Naming,
    /// What it does: reads, or generates.
    what: What,
    /// Loads so far, failed ones too; the caller's side reads it for its report. Not `u64`: some 32-bit processors
    /// have no atomics of 64 bits.
    loads: Arc<AtomicUsize>,
    /// When the clocks of the processors were last read.
    looked: Option<Instant>,
}

impl LoadRecorder {
    pub(crate) fn new(track: Track, what: What, naming: Naming, loads: Arc<AtomicUsize>) -> Self {
        Self { track, naming, what, loads, looked: None }
    }

    /// The load of a batch begins. Returns its span.
    pub(crate) fn began(&self, ticket: Ticket) -> Span {
        // Relaxed: a count. Handing over the slot makes it visible in time.
        self.loads.fetch_add(1, Ordering::Relaxed);
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
        if !self.track.is_on() {
            return;
        }
        load.events(self.what, self.naming.id(ticket), |event| self.track.add(event));
        self.track.write_if_due(load.end);
    }

    /// Before something that may take long.
    pub(crate) fn write_if_due(&mut self, now: Instant) {
        self.track.write_if_due(now);
    }

    pub(crate) fn flush(&mut self) {
        self.track.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads and uses of a loop in milliseconds, over two epochs.
    fn recorded(steps: &[(u64, u64)]) -> LoopRecorder {
        let mut recorder = LoopRecorder::new();
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
    fn a_thread_would_hide_the_shorter_side_of_each_step() {
        let report = recorded(&[(10, 30); 20]).report();
        let found = report.predict(Settings { overlap: true, ..report.settings() }).unwrap();
        assert_eq!(found.measured, Duration::from_millis(1600));
        // The first load of each epoch, and the uses. Threads need some microseconds to wake up.
        let wanted = 2.0 * (0.01 + 20.0 * 0.03);
        assert!((found.wall.as_secs_f64() / wanted - 1.0).abs() < 0.02, "{found:?}");
        assert!(report.advice().contains("`overlap(true)`"), "{}", report.advice());
    }

    #[test]
    fn workers_of_the_iterable_that_decide_gain_nothing_from_a_thread() {
        let mut recorder = LoopRecorder::new();
        recorder.from_workers();
        let mut now = Instant::now();
        for step in 0..20 {
            recorder.asked(now);
            now += Duration::from_millis(10);
            recorder.received(0, step, now);
            now += Duration::from_millis(1);
        }
        recorder.ended(now);
        let report = recorder.report();
        assert_eq!(report.recommended(), None);
        assert!(report.advice().contains("the workers decide"), "{}", report.advice());
    }

    #[test]
    fn reports_of_iterations_add_up() {
        // Loops of one thread would pause for each other.
        let second = std::thread::spawn(|| recorded(&[(20, 5); 3]).report()).join().unwrap();
        let first = recorded(&[(40, 30), (10, 30)]).report();
        let both = first.then(second.clone());
        assert_eq!((both.epochs, both.batches), (4, 10));
        assert_eq!(both.wall, first.wall + second.wall);
        assert_eq!(both.first, first.first);
        let found = both.predict(both.settings()).unwrap();
        assert_eq!(found.batches, 10);
        assert_eq!(found.measured, first.wall + second.wall);
        assert_eq!(Report::default().then(first.clone()), first);
    }
}
