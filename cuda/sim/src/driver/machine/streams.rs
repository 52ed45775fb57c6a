//! Streams, their queues and events.

use std::collections::VecDeque;
use std::sync::Arc;

use super::work::{HostFunction, Mark, Work};
use super::{Actor, LEGACY, State, changed, in_call, worker};
use crate::driver::capture::{Captured, Id};
use crate::driver::clock::{Clock, Step};
use crate::driver::codes::{CAPTURE_IMPLICIT, CAPTURE_UNSUPPORTED, Code, INVALID_HANDLE, INVALID_VALUE};

#[derive(Default)]
pub(in crate::driver) struct Stream {
    pub(in crate::driver) queue: VecDeque<Work>,
    /// The worker runs an operation that it took from the queue.
    pub(in crate::driver) busy: bool,
    pub(in crate::driver) destroyed: bool,
    clock: Clock,
    /// Synchronizes with the legacy default stream.
    blocking: bool,
    /// A default stream: created by the driver, and not counted.
    pub(super) default: bool,
    device: usize,
    /// A default stream belongs to all contexts of its device.
    context: u64,
}

pub(super) struct Event {
    device: usize,
    context: u64,
    last: Option<Arc<Mark>>,
    /// Set if the last record was captured; `last` is then `None`.
    captured: Option<Captured>,
    flags: u32,
}

impl State {
    fn add_stream(&mut self, blocking: bool, default: bool) -> u64 {
        let id = self.handle();
        self.insert_stream(id, blocking, default);
        id
    }

    fn insert_stream(&mut self, id: u64, blocking: bool, default: bool) {
        let (device, context) = (self.device().unwrap_or(0), self.current());
        self.streams.insert(id, Stream { blocking, default, device, context, ..Stream::default() });
        self.live.threads += 1;
        // Seeded with the stream's number in this run, not its handle: a seed gives the same delays in every run.
        self.streams_begun += 1;
        let (run, seed) = (self.run, self.options.seed.wrapping_add(self.streams_begun << 32));
        let thread = std::thread::Builder::new().name(format!("cuda-sim-{id:x}"));
        let worker =
            thread.spawn(move || in_call(|| worker::run(id, run, seed))).expect("a thread for a stream");
        self.workers.retain(|worker| !worker.is_finished());
        self.workers.push(worker);
    }

    pub(in crate::driver) fn create_stream(&mut self, flags: u32) -> Result<u64, Code> {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        self.live.streams += 1;
        Ok(self.add_stream(flags == 0, false))
    }

    pub(in crate::driver) fn destroy_stream(&mut self, handle: u64) -> Result<(), Code> {
        let stream = self.streams.get_mut(&handle).filter(|stream| !stream.destroyed && !stream.default);
        stream.ok_or(INVALID_HANDLE)?.destroyed = true;
        self.captures.destroy(handle);
        self.live.streams -= 1;
        Ok(())
    }

    /// Removes a destroyed stream that has no work left.
    pub(super) fn end_stream(&mut self, stream: u64) {
        if let Some(Stream { context, clock, .. }) = self.streams.remove(&stream) {
            self.ended.entry(context).or_default().join(&clock);
        }
        self.live.threads -= 1;
    }

    /// The stream behind a handle: a created stream, the legacy default stream (0, 1) or the thread's default stream
    /// (2).
    pub(in crate::driver) fn stream(&mut self, handle: u64) -> Result<u64, Code> {
        match handle {
            0 | 1 => {
                let legacy = LEGACY[self.device().unwrap_or(0)];
                if !self.streams.contains_key(&legacy) {
                    self.insert_stream(legacy, false, true);
                }
                Ok(legacy)
            }
            2 => {
                let device = self.device().unwrap_or(0);
                if let Some(stream) = self.own(|own| own.streams[device]) {
                    return Ok(stream);
                }
                let stream = self.add_stream(true, true);
                self.own(|own| own.streams[device] = Some(stream));
                Ok(stream)
            }
            handle => match self.streams.get(&handle) {
                Some(stream) if !stream.destroyed && !stream.default => Ok(handle),
                _ => Err(INVALID_HANDLE),
            },
        }
    }

    /// The legacy default stream stands for every blocking stream. Using it while one of those is being captured is an
    /// error that invalidates the capture.
    pub(in crate::driver) fn refuse_implicit(&mut self, stream: u64) -> Result<(), Code> {
        let implied = self.implied(stream);
        implied.iter().for_each(|id| self.captures.invalidate(*id));
        if implied.is_empty() { Ok(()) } else { Err(CAPTURE_IMPLICIT) }
    }

    /// The captures of blocking streams that the legacy default stream stands for. Empty for every other stream.
    pub(in crate::driver) fn implied(&mut self, stream: u64) -> Vec<Id> {
        let device = self.at(stream).device;
        if stream != LEGACY[device] {
            return Vec::new();
        }
        let streams = &self.streams;
        let blocking =
            |id: u64| streams.get(&id).is_some_and(|other| other.device == device && other.blocking);
        self.captures.among(blocking)
    }

    /// The streams of the context that is current on this thread.
    fn of_current(&self) -> Vec<u64> {
        let (device, context) = (self.device(), self.current());
        let own = |stream: &Stream| {
            if stream.default { Some(stream.device) == device } else { stream.context == context }
        };
        self.streams.iter().filter(|(_, stream)| own(stream)).map(|(id, _)| *id).collect()
    }

    /// Invalidates the captures of the current context's streams, because the context is about to be waited for.
    pub(in crate::driver) fn refuse_captured(&mut self) -> Result<(), Code> {
        let own = self.of_current();
        let captured = self.captures.among(|id| own.contains(&id));
        captured.iter().for_each(|id| self.captures.invalidate(*id));
        if captured.is_empty() { Ok(()) } else { Err(CAPTURE_UNSUPPORTED) }
    }

    /// Whether a stream is the legacy default stream of a device.
    pub(in crate::driver) fn is_legacy(stream: u64) -> bool {
        LEGACY.contains(&stream)
    }

    fn at(&mut self, stream: u64) -> &mut Stream {
        self.streams.get_mut(&stream).expect("a handle that `stream` gave under this lock")
    }

    /// The next step of a stream. It is ordered after everything that this thread knows, and after all work that
    /// implicit synchronization with the legacy default stream orders before it: not that of destroyed streams, for which
    /// CUDA documents no such order.
    pub(in crate::driver) fn step(&mut self, stream: u64) -> Actor {
        let device = self.at(stream).device;
        let before: Vec<u64> = if stream == LEGACY[device] {
            let others = self.streams.iter().filter(|(_, other)| other.device == device);
            others.filter(|(_, other)| other.blocking && !other.destroyed).map(|(id, _)| *id).collect()
        } else if self.at(stream).blocking && self.streams.contains_key(&LEGACY[device]) {
            vec![LEGACY[device]]
        } else {
            Vec::new()
        };
        for other in before {
            let mark = self.mark(other);
            self.follow(stream, mark);
        }
        let known = self.known().clone();
        let clock = &mut self.at(stream).clock;
        clock.join(&known);
        Actor::new(Step { agent: stream, number: clock.tick(stream), clock: Arc::new(clock.clone()) })
    }

    pub(in crate::driver) fn push(&mut self, stream: u64, work: Work) {
        self.at(stream).queue.push_back(work);
        changed();
    }

    /// A host function. It acts as the stream's current step.
    pub(in crate::driver) fn function(
        &mut self,
        stream: u64,
        function: HostFunction,
        argument: usize,
    ) -> Work {
        let at = self.step(stream).at;
        self.pending.push(at.clone());
        Work::Host { function, argument, at }
    }

    /// Enqueues a mark at a stream's end. The mark is not a step.
    fn mark(&mut self, stream: u64) -> Arc<Mark> {
        let mark = Arc::new(Mark { clock: self.at(stream).clock.clone(), ..Mark::default() });
        self.push(stream, Work::Record(mark.clone()));
        mark
    }

    /// Makes a stream's later work wait for a mark.
    fn follow(&mut self, stream: u64, mark: Arc<Mark>) {
        self.at(stream).clock.join(&mark.clock);
        self.push(stream, Work::Wait(mark));
    }

    /// Enqueues a mark at a stream's end.
    pub(in crate::driver) fn record(&mut self, stream: u64) -> Arc<Mark> {
        self.step(stream);
        self.mark(stream)
    }

    /// Enqueues a mark at the end of each stream.
    pub(in crate::driver) fn record_all(&mut self) -> Vec<Arc<Mark>> {
        let all: Vec<u64> = self.streams.keys().copied().collect();
        all.into_iter().map(|stream| self.mark(stream)).collect()
    }

    /// Enqueues a mark at the end of each stream of the current context, to wait for. Those that have ended are known at once.
    pub(in crate::driver) fn record_current(&mut self) -> Vec<Arc<Mark>> {
        let ended = self.ended.get(&self.current()).cloned().unwrap_or_default();
        self.learn(&ended);
        self.of_current().into_iter().map(|stream| self.mark(stream)).collect()
    }

    /// Whether a stream has no work left. If so, this thread learns its clock.
    pub(in crate::driver) fn is_idle(&mut self, stream: u64) -> bool {
        let stream = self.at(stream);
        let idle = stream.queue.is_empty() && !stream.busy;
        if idle {
            let clock = stream.clock.clone();
            self.learn(&clock);
        }
        idle
    }

    pub(in crate::driver) fn create_event(&mut self, flags: u32) -> Result<u64, Code> {
        // BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS (which needs DISABLE_TIMING).
        if flags > 7 || flags & 6 == 4 {
            return Err(INVALID_VALUE);
        }
        let id = self.handle();
        let (device, context) = (self.device().unwrap_or(0), self.current());
        self.events.insert(id, Event { device, context, last: None, captured: None, flags });
        self.live.events += 1;
        Ok(id)
    }

    /// Counts a wait for an event without `BLOCKING_SYNC`: a real driver spins in it.
    pub(in crate::driver) fn count_spinning(&mut self, handle: u64) {
        if self.events.get(&handle).is_some_and(|event| event.flags & 1 == 0) {
            super::count(self, "cuEventSynchronize, spinning");
        }
    }

    pub(in crate::driver) fn destroy_event(&mut self, handle: u64) -> Result<(), Code> {
        self.events.remove(&handle).ok_or(INVALID_HANDLE)?;
        self.live.events -= 1;
        Ok(())
    }

    pub(in crate::driver) fn record_event(&mut self, handle: u64, stream: u64) -> Result<(), Code> {
        let Event { device, context, .. } = *self.events.get(&handle).ok_or(INVALID_HANDLE)?;
        // An event can be recorded only in its own context; streams of any context can wait for it.
        let stream_of = self.at(stream);
        let same = if stream_of.default { device == stream_of.device } else { context == stream_of.context };
        if !same {
            return Err(INVALID_HANDLE);
        }
        let (last, captured) = match self.captures.of(stream) {
            Some(id) => (None, Some(self.captures.record(id, stream)?)),
            None => {
                self.refuse_implicit(stream)?;
                (Some(self.record(stream)), None)
            }
        };
        let event = self.events.get_mut(&handle).ok_or(INVALID_HANDLE)?;
        (event.last, event.captured) = (last, captured);
        Ok(())
    }

    /// Makes a stream wait for an event's last record. Has no effect if the event was never recorded.
    pub(in crate::driver) fn wait_event(&mut self, stream: u64, handle: u64) -> Result<(), Code> {
        let event = self.events.get(&handle).ok_or(INVALID_HANDLE)?;
        let (last, captured) = (event.last.clone(), event.captured.clone());
        if captured.is_some() && Self::is_legacy(stream) {
            // The legacy default stream cannot join the event's capture: this invalidates the capture.
            let _ = self.captures.ask(captured.as_ref());
            return Err(CAPTURE_IMPLICIT);
        }
        self.refuse_implicit(stream)?;
        if !self.captures.wait(stream, captured, last.is_some())? {
            return Ok(());
        }
        if let Some(mark) = last {
            self.step(stream);
            self.follow(stream, mark);
        }
        Ok(())
    }

    /// Makes a stream wait for an executable graph's last launch, if there was one.
    pub(in crate::driver) fn follow_launch(&mut self, stream: u64, graph: u64) {
        if let Some(mark) = self.launched.get(&graph).cloned() {
            self.step(stream);
            self.follow(stream, mark);
        }
    }

    /// An event's last record, to query or to wait for.
    pub(in crate::driver) fn last_record(&mut self, handle: u64) -> Result<Option<Arc<Mark>>, Code> {
        let event = self.events.get(&handle).ok_or(INVALID_HANDLE)?;
        let last = event.last.clone();
        self.captures.ask(event.captured.as_ref())?;
        self.permit()?;
        Ok(last)
    }

    /// Refuses the calling thread's "potentially unsafe" call if a capture forbids it.
    pub(in crate::driver) fn permit(&mut self) -> Result<(), Code> {
        let run = self.run;
        self.captures.permit(run)
    }

    /// A timing event's last record.
    pub(in crate::driver) fn timed_record(&mut self, handle: u64) -> Result<Arc<Mark>, Code> {
        const DISABLE_TIMING: u32 = 2;
        let event = self.events.get(&handle).ok_or(INVALID_HANDLE)?;
        self.captures.ask(event.captured.as_ref())?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        event.last.clone().ok_or(INVALID_HANDLE)
    }
}
