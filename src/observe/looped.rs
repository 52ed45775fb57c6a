//! A recorder for loops over something other than a loader.

use std::fmt;
use std::time::{Duration, Instant};

use super::breakdown::Breakdown;
use super::history::LOOK;
use super::log::What;
use super::recorder::Recorder;
use super::replay::Settings;
use super::report::{Kind, Report};
use super::trace::{Trace, Track};
use crate::error::Error;
use crate::observe::unit::{Freed, LoadTimes, Ticket};
use crate::thread::{Clock, this_thread};

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
    /// The time of the last event.
    last: Option<Instant>,
}

impl LoopRecorder {
    /// Creates a recorder for a loop that has not started.
    #[must_use]
    pub fn new() -> Self {
        Self::make(None, What::Wait)
    }

    /// Creates a recorder for the loop `name` that writes a Chrome trace. With `device`, the loop waits for copies to a
    /// device, and the trace calls its waits `gpu_queue_wait`.
    ///
    /// # Errors
    ///
    /// [`Error::Trace`] if the file cannot be created.
    pub fn traced(name: Option<&str>, trace: Trace, device: bool) -> Result<Self, Error> {
        let trace = trace.open(name, 0, 1).map_err(Error::trace)?;
        let wait = if device { What::DeviceWait } else { What::Wait };
        Ok(Self::make(Some(Track::new(trace, 1, "train", false)), wait))
    }

    fn make(track: Option<Track>, wait: What) -> Self {
        let settings = Settings { overlap: false, depth: 2, workers: 1 };
        let report = Report::new(Kind::Items, settings, 0);
        let recorder = Recorder::new(track, wait, &Breakdown::off(), report, false);
        Self { recorder, next: Ticket::default(), looked: None, clock: None, last: None }
    }

    /// Records that the source makes its items ahead of the loop, in threads or processes of its own. A wait is then no
    /// whole load, and the report does not advise a thread that loads ahead.
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
        if self.recorder.epoch.as_ref().is_none_or(|begun| begun.first.epoch != epoch) {
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
        let freed = Some(Freed { number: self.next.seq, at, thread: this_thread() });
        let (transform, io_calls, bytes) = (Duration::ZERO, 0, 0);
        let load = LoadTimes { end: at, transform, io_calls, bytes, cpu, ..LoadTimes::new(start) };
        load.events(What::Read, self.next, |event| self.recorder.report.add(event));
        self.recorder.report.received(0, 0);
        self.recorder.in_use_from(self.next, &load, at, 0);
        self.recorder.history.freed(freed);
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
