//! Threads that load ahead of the caller, or the caller itself that loads when it asks: what a loader and a generator
//! are made of.
//!
//! Each thread has its own slots, in a separate ring. A thread that has a free slot takes the next batch; the caller
//! receives the batches in their order, whichever thread has them.

pub(crate) mod gate;
pub(crate) mod worker;

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use twinbuf_mmap::Buffer;

use self::gate::{Gate, Lane, Steps};
use self::worker::{Source, Worker};
use crate::backend::sealed::{Backend, Batches, SlotGuard, Slots};
use crate::backend::{NoSlot, Received, Sides, Waiting};
use crate::dataset::Locator;
use crate::error::{Error, Reading};
use crate::observe::breakdown::Breakdown;
use crate::observe::history::StepTimes;
use crate::observe::recorder::Span;
use crate::observe::recorder::{LoadRecorder, Recorder};
use crate::observe::replay::Settings;
use crate::observe::report::Report;
use crate::observe::report::{LiveReport, Publisher};
use crate::observe::trace::{LoaderTrace, Track};
use crate::slot::{BatchMeta, Naming, Sending, Ticket};
use crate::thread::{ForkGuard, JoinOnDrop};

/// A batch as a backend's receiving side hands it out.
pub(crate) type Raw<B> = <<B as Backend>::Batches as Batches>::Batch;

/// What a stage is started with.
pub(crate) struct Options<'a> {
    pub(crate) naming: Naming,
    pub(crate) overlap: bool,
    /// How long to wait for a slot that the caller holds.
    pub(crate) held_timeout: Duration,
    pub(crate) trace: Option<Arc<LoaderTrace>>,
    pub(crate) breakdown: Breakdown,
    pub(crate) steps: Steps,
    /// Bytes of a host slot, their number, and what they are for.
    pub(crate) slots: (usize, usize, &'a dyn std::fmt::Display),
    /// The memory of the slots, if the caller gave it.
    pub(crate) lent: Option<Vec<Buffer>>,
    /// Sends parts of a batch that is being loaded.
    pub(crate) sending: Option<Sending>,
    /// The caller sends the batches to a device.
    pub(crate) sends: bool,
    /// What the caller may do for the only thread while it waits for a batch.
    pub(crate) help: Option<Help>,
}

/// Does a part of what a thread is loading. Returns `None` if no load can be taken part in, and else whether there was
/// a part.
pub(crate) type Help = Box<dyn FnMut() -> Option<bool> + Send>;

pub(crate) struct Stage<B: Backend> {
    running: ForkGuard<Running<B>>,
    naming: Naming,
    held_timeout: Duration,
    /// Since when the next slot has been found held by calls that do not wait.
    held_since: Option<Instant>,
    loads: Arc<AtomicUsize>,
    /// Numbers the calls that ask for epochs, from 1.
    generation: u64,
    publisher: Publisher,
    breakdown: Breakdown,
}

/// What runs while a stage exists.
struct Running<B: Backend> {
    // Dropped in this order: first loads get some time to end. The end of the receiving sides makes the threads return from their waits for a slot, the
    // end of the feed from their waits at the gate, and joins them.
    ending: Ending,
    lanes: Lanes<B>,
    feed: Feed<B>,
    help: Option<Help>,
    sending: Option<Sending>,
    recorder: Recorder,
    trace: Option<Arc<LoaderTrace>>,
}

/// Default wait for a batch that is held: longer than any step except those of the largest models. Handing batches to
/// other threads is then free of races.
pub(crate) const HELD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long dropping a stage waits for a running load; if a task waited for the last batch, its thread has others.
const END_LIMIT: Duration = Duration::from_secs(10);
const TASK_LIMIT: Duration = Duration::from_millis(10);

/// Waits for running loads, up to a limit, when it is dropped.
struct Ending {
    gate: Arc<Gate>,
    copy_threads: Vec<ThreadId>,
    limit: Duration,
}

impl Drop for Ending {
    fn drop(&mut self) {
        // A waker may drop the stage on a copy thread. Nothing waits for the copy thread then: the reading thread waits
        // for its end.
        if !self.copy_threads.contains(&thread::current().id()) {
            // What comes after it finds whether the threads were left behind.
            self.gate.end(self.limit);
        }
    }
}

/// The receiving sides, one for each thread.
struct Lanes<B: Backend> {
    lanes: Vec<B::Batches>,
    gate: Arc<Gate>,
    /// The generation of the last call.
    generation: u64,
    /// Whether some thread has batches of an earlier one.
    stale: bool,
}

/// Limits of the waits that an unlimited wait is split into.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(3600);

/// How often a caller looks for a part of the load that it waits for: about as long as a thread takes from a batch to the
/// next.
const LOOKS: u32 = 200;

impl<B: Backend> Drop for Lanes<B> {
    fn drop(&mut self) {
        if self.gate.is_abandoned() {
            // Its end waits for a copy thread, and that one waits for the load that does not end.
            let (copied, others) =
                mem::take(&mut self.lanes).into_iter().partition(|lane| lane.copy_thread().is_some());
            mem::forget::<Vec<_>>(copied);
            drop::<Vec<_>>(others);
        }
    }
}

impl<B: Backend> Lanes<B> {
    /// The batch of `ticket`, from the thread that has it; or one of an earlier generation.
    fn receive(
        &mut self,
        ticket: Ticket,
        waiting: &mut Waiting<'_, '_>,
        held_timeout: Duration,
    ) -> Received<Raw<B>> {
        if let [lane] = &mut *self.lanes {
            return lane.receive(waiting, held_timeout);
        }
        if self.generation != ticket.generation {
            (self.generation, self.stale) = (ticket.generation, true);
        }
        let started = Instant::now();
        loop {
            // In front of the look for what is stale: a batch that is handed over from now on ends the wait.
            let seen = self.stale.then(|| self.gate.events());
            if let Waiting::Poll(cx) = waiting {
                self.gate.wake_for_lane(ticket, cx.waker());
            }
            if let Some(stale) = self.take_stale() {
                return Received::Batch(stale);
            }
            let now = Instant::now();
            let found = match waiting {
                Waiting::Until(deadline) => self.gate.wait_for_lane(ticket, *deadline, seen),
                Waiting::Block => {
                    self.gate.wait_for_lane(ticket, now + held_timeout.clamp(SHORTEST, LONGEST), seen)
                }
                Waiting::Try | Waiting::Poll(_) | Waiting::Drain => self.gate.lane(ticket),
            };
            // A thread may not have run yet since its slot was released.
            let found = match found {
                Lane::SlotHeld if self.lanes.iter().any(|lane| !lane.is_held()) => Lane::NotYet,
                found => found,
            };
            let again = match &*waiting {
                Waiting::Block => found == Lane::NotYet || started.elapsed() < held_timeout,
                Waiting::Until(deadline) => Instant::now() < *deadline,
                _ => false,
            };
            return match found {
                Lane::Has(lane) => {
                    let found = self.lanes[lane].receive(waiting, held_timeout);
                    if let Received::Batch(_) = found {
                        self.gate.received(lane);
                    }
                    found
                }
                Lane::Gone => Received::Gone,
                _ if again => continue,
                Lane::NotYet => Received::NotYet,
                Lane::SlotHeld => Received::SlotHeld,
            };
        }
    }

    /// Does parts of the load that the caller waits for, until there is a batch, no part is left, or the time is over.
    fn help(&mut self, help: &mut Help, waiting: &Waiting<'_, '_>) -> Option<Received<Raw<B>>> {
        let deadline = match waiting {
            Waiting::Block => None,
            Waiting::Until(deadline) => Some(*deadline),
            // A task has its thread for a moment only.
            _ => return None,
        };
        let mut looks = 0;
        while looks < LOOKS && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            // The thread may be between two batches.
            looks = if help()? { 0 } else { looks + 1 };
            match self.lanes[0].receive(&mut Waiting::Try, Duration::ZERO) {
                Received::NotYet => std::hint::spin_loop(),
                // It is waited for, for as long as the caller wants.
                Received::SlotHeld => break,
                found => return Some(found),
            }
        }
        None
    }

    /// A batch of an earlier generation. It keeps its slot from a thread that could take another batch.
    fn take_stale(&mut self) -> Option<Raw<B>> {
        if !self.stale {
            return None;
        }
        let Self { lanes, gate, generation, stale } = self;
        *stale = false;
        for (lane, batches) in
            lanes.iter_mut().enumerate().filter(|(lane, _)| gate.is_stale(*lane, *generation))
        {
            *stale = true;
            if let Received::Batch(batch) = batches.receive(&mut Waiting::Try, Duration::ZERO) {
                gate.received(lane);
                return Some(batch);
            }
        }
        None
    }

    /// The thread that is loading this batch.
    fn loading(&self, ticket: Ticket) -> Option<usize> {
        match self.gate.lane(ticket) {
            Lane::Has(lane) => Some(lane),
            _ => None,
        }
    }

    /// When this batch was copied to the device, if that is done.
    fn copied(&self, ticket: Ticket) -> Option<(Instant, Instant)> {
        self.lanes.iter().find_map(|lane| lane.copied(ticket))
    }

    /// How long the copies to the device have taken so far, and their bytes.
    fn copies(&self) -> (Duration, u64) {
        self.lanes.iter().map(Batches::copies).fold((Duration::ZERO, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    }

    /// The option that sets how many slots batches hold, and how many there are.
    fn slots(&self) -> (&'static str, usize) {
        let (option, slots) = self.lanes[0].slots();
        (option, slots * self.lanes.len())
    }
}

/// Who fills the slots.
enum Feed<B: Backend> {
    /// Threads, ahead of the caller.
    Threads(Threads),
    /// The caller itself, when it asks for a batch.
    Inline(Box<(Worker<B::Content>, B::Slots)>),
}

/// The threads. A drop of this tells them to end and joins them.
struct Threads {
    gate: Arc<Gate>,
    join: Vec<JoinOnDrop>,
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.gate.close();
        if self.gate.is_abandoned() {
            // A thread that is left behind owns what it uses, its slots too, and ends when its load does.
            mem::take(&mut self.join).into_iter().for_each(JoinOnDrop::detach);
        }
    }
}

impl<B: Backend> Stage<B> {
    /// Makes the slots and starts a thread for each source; without overlap there is one source and no thread.
    pub(crate) fn start(
        backend: B,
        sources: Vec<Box<dyn Source<B::Content>>>,
        options: Options<'_>,
    ) -> Result<Self, Error> {
        let Options {
            naming,
            overlap,
            held_timeout,
            trace,
            breakdown,
            steps,
            slots,
            lent,
            sending,
            sends,
            help,
        } = options;
        let (slot, host_depth, sum) = slots;
        let lanes = sources.len();
        let mut sides = Sides {
            lanes,
            slot,
            host_depth,
            lent,
            sending: sending.clone(),
            overlap,
            trace: trace.clone(),
            naming: naming.clone(),
            sum,
        };
        let loads = Arc::new(AtomicUsize::new(0));
        let gate = Arc::new(Gate::new(steps, lanes));
        let mut feed = Feed::Threads(Threads { gate: gate.clone(), join: Vec::new() });
        let mut batches = Vec::with_capacity(lanes);
        let made = backend.make(&mut sides)?;
        for (lane, (source, (slots, received))) in sources.into_iter().zip(made).enumerate() {
            let (what, row) = source.log();
            let (id, row) = sides.row(lane, row);
            let track = trace.clone().map(|trace| Track::new(trace, id, &row));
            let recorder = LoadRecorder::new(track, what, naming.clone()).counting(loads.clone());
            let worker = Worker { source, naming: naming.clone(), recorder };
            match &mut feed {
                Feed::Threads(threads) if overlap => {
                    let gate = gate.clone();
                    let thread = thread::Builder::new()
                        .name(crate::thread::name(naming.loader.as_deref(), &row))
                        .spawn(move || worker.run(lane, &gate, slots))
                        .map_err(Error::Spawn)?;
                    threads.join.push(JoinOnDrop::new(thread, received.copy_thread()));
                }
                _ => feed = Feed::Inline(Box::new((worker, slots))),
            }
            batches.push(received);
        }
        let (id, row) = if sends { (3, "upload") } else { (1, "train") };
        let track = trace.clone().map(|trace| Track::new(trace, id, row));
        let (option, slots) = batches[0].slots();
        let (depth, device_depth) = if option == "host_depth" { (slots, 0) } else { (host_depth, slots) };
        let settings = Settings { overlap, depth, workers: lanes };
        let mut recorder = Recorder::new(track, naming.clone(), B::WAIT, &breakdown, settings, device_depth);
        recorder.sends(sends);
        let copy_threads = batches.iter().filter_map(Batches::copy_thread).collect();
        let ending = Ending { gate: gate.clone(), copy_threads, limit: END_LIMIT };
        let lanes = Lanes { lanes: batches, gate, generation: 0, stale: false };
        let running = ForkGuard::new(Running { ending, lanes, feed, help, sending, recorder, trace });
        let publisher = Publisher::default();
        Ok(Self {
            running,
            naming,
            held_timeout,
            held_since: None,
            loads,
            generation: 0,
            publisher,
            breakdown,
        })
    }

    pub(crate) fn naming(&self) -> &Naming {
        &self.naming
    }

    pub(crate) fn recorder(&mut self) -> &mut Recorder {
        &mut self.running.recorder
    }

    pub(crate) fn breakdown(&self) -> &Breakdown {
        &self.breakdown
    }

    /// `None` without a thread.
    pub(crate) fn gate(&self) -> Option<&Gate> {
        match &self.running.feed {
            Feed::Threads(threads) => Some(&threads.gate),
            Feed::Inline(_) => None,
        }
    }

    /// Whether this is a process that was forked from the one it was started in.
    pub(crate) fn is_foreign(&self) -> bool {
        self.running.is_foreign()
    }

    /// Whether batches come from a thread that stayed in the process that this one was forked from.
    pub(crate) fn is_orphaned(&self) -> bool {
        self.gate().is_some() && self.running.is_foreign()
    }

    pub(crate) fn trace_path(&self) -> Option<&std::path::Path> {
        self.running.trace.as_ref().map(|trace| trace.path())
    }

    /// Reports where the time went so far.
    pub(crate) fn report(&self) -> Report {
        // Relaxed: a count. Handing a batch over made the loads before it visible.
        let loads = self.loads.load(Ordering::Relaxed) as u64;
        let (time, bytes) = self.running.lanes.copies();
        self.running.recorder.report().with_transfers(loads, time, bytes)
    }

    /// The last steps.
    pub(crate) fn recent_steps(&self) -> Vec<StepTimes> {
        self.running.recorder.recent_steps()
    }

    /// A handle of the report. The report is kept up to date from now on.
    pub(crate) fn live_report(&mut self) -> LiveReport {
        let so_far = self.report();
        self.publisher.handle(so_far)
    }

    /// Starts a new generation: what was loaded for an earlier one is discarded when it comes.
    pub(crate) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// The caller asks for the batch of `ticket`: the use of the one before is over.
    pub(crate) fn asked(&mut self, ticket: Ticket, now: Instant) {
        let Running { lanes, recorder, .. } = &mut *self.running;
        let copy = recorder.in_use().and_then(|ticket| lanes.copied(ticket));
        recorder.asked(ticket, now, copy);
    }

    /// The epoch of the batch in use is over, and that of `next` begins.
    pub(crate) fn next_epoch(&mut self, now: Instant) {
        let Running { lanes, recorder, .. } = &mut *self.running;
        let copy = recorder.in_use().and_then(|ticket| lanes.copied(ticket));
        recorder.released(now, copy);
        recorder.epoch_ended(now);
    }

    /// The epoch is over, or the caller gives it up.
    pub(crate) fn ended(&mut self, now: Instant) {
        let Running { lanes, recorder, feed, .. } = &mut *self.running;
        let copy = recorder.in_use().and_then(|ticket| lanes.copied(ticket));
        recorder.ended(now, copy);
        if let Feed::Inline(inline) = feed {
            inline.0.recorder.flush();
        }
        if self.publisher.is_on() {
            self.publisher.publish(self.report(), now);
        }
    }

    /// The batch of `ticket`: the next one in order.
    pub(crate) fn receive(
        &mut self,
        ticket: Ticket,
        mut waiting: Waiting<'_, '_>,
    ) -> Poll<Result<Raw<B>, Error>> {
        let asked = Instant::now();
        self.asked(ticket, asked);
        let Running { lanes, feed, help, sending, recorder, trace, ending } = &mut *self.running;
        sending.iter().for_each(|sending| sending.ask(ticket));
        ending.limit = if matches!(waiting, Waiting::Poll(_)) { TASK_LIMIT } else { END_LIMIT };
        let mut found = None;
        // A batch that is ready costs no second read of the clock, unless a trace shows how long that took.
        let (mut look, mut there) = (true, false);
        if let Feed::Inline(inline) = feed {
            let (worker, slots) = &mut **inline;
            // A slot that is free costs none either: the load begins when the caller asks.
            let (mut patience, mut start) = (Duration::ZERO, Some(asked));
            loop {
                match slots.acquire_within(patience) {
                    Ok(mut slot) => {
                        let start = start.unwrap_or_else(Instant::now);
                        let meta = worker.load(ticket, &mut slot, (start, start), None);
                        // If the backend has failed, the receiving side has the error.
                        let _ = slot.commit(meta);
                    }
                    Err(NoSlot::Held) if start.take().is_some() => {
                        patience = waiting.patience(self.held_timeout);
                        continue;
                    }
                    // Both sides are at this slot, so the receiving one leaves the task's waker there.
                    Err(NoSlot::Held) if matches!(waiting, Waiting::Poll(_)) => {
                        match lanes.receive(ticket, &mut waiting, Duration::ZERO) {
                            // Released since: there is a slot, or the next acquire tells that there is none.
                            Received::NotYet | Received::Gone => continue,
                            other => found = Some(other),
                        }
                    }
                    Err(NoSlot::Held) => found = Some(Received::SlotHeld),
                    Err(NoSlot::Gone) => {}
                }
                break;
            }
        }
        let _waiting = recorder.waiting().map(Span::entered);
        loop {
            let received = found.take().unwrap_or_else(|| {
                if mem::take(&mut look) {
                    let found = lanes.receive(ticket, &mut Waiting::Try, Duration::ZERO);
                    if !matches!(found, Received::NotYet | Received::SlotHeld) {
                        there = trace.is_none();
                        return found;
                    }
                    if let Some(found) = help.as_mut().and_then(|help| lanes.help(help, &waiting)) {
                        return found;
                    }
                }
                lanes.receive(ticket, &mut waiting, self.held_timeout)
            });
            let mut batch = match received {
                Received::Batch(batch) => batch,
                Received::NotYet => {
                    self.held_since = None;
                    return Poll::Pending;
                }
                Received::SlotHeld => {
                    let (option, slots) = lanes.slots();
                    let error = Error::SlotHeld { at: self.naming.at(ticket), option, slots };
                    return self.slot_held(&waiting, error);
                }
                Received::Gone => return Poll::Ready(Err(Error::ThreadGone { at: self.naming.at(ticket) })),
                Received::Failed(source) => {
                    return Poll::Ready(Err(Error::Upload { at: self.naming.at(ticket), source }));
                }
            };
            let meta = B::Batches::meta(&mut batch);
            if meta.ticket.generation != ticket.generation {
                // Loaded ahead for a call that was left early: released, and on to the next.
                recorder.discarded(meta.ticket);
                there = false;
                continue;
            }
            self.held_since = None;
            let now = match &feed {
                // The caller itself has just loaded it.
                Feed::Inline(_) => meta.load.end.max(asked),
                Feed::Threads(_) if there => asked,
                Feed::Threads(_) => Instant::now(),
            };
            if meta.result.is_err() {
                recorder.discarded(ticket);
                return Poll::Ready(take_error(meta).map_or(Ok(batch), Err));
            }
            let bytes = meta.result.as_ref().map_or(0, |&bytes| bytes);
            recorder.received(meta.ticket, bytes, &meta.load, now, lanes.copied(ticket));
            if self.publisher.is_due(now) {
                self.publisher.publish(self.report(), now);
            }
            return Poll::Ready(Ok(batch));
        }
    }

    /// The next slot is held. A blocking call has waited for its full timeout; the others return `Pending` until the
    /// same time is over.
    fn slot_held(&mut self, waiting: &Waiting<'_, '_>, error: Error) -> Poll<Result<Raw<B>, Error>> {
        if !matches!(waiting, Waiting::Block) {
            let since = *self.held_since.get_or_insert_with(Instant::now);
            if since.elapsed() < self.held_timeout {
                return Poll::Pending;
            }
        }
        Poll::Ready(Err(error))
    }

    /// The option that sets how many slots batches hold, and how many there are.
    pub(crate) fn slots(&self) -> (&'static str, usize) {
        self.running.lanes.slots()
    }

    /// Sets how long to wait for a slot that the caller holds, and returns what it was.
    pub(crate) fn set_held_timeout(&mut self, timeout: Duration) -> Duration {
        mem::replace(&mut self.held_timeout, timeout)
    }

    /// Returns how long the next slot has been found held by calls that do not wait, if the last one found it so.
    pub(crate) fn held_for(&self) -> Option<Duration> {
        self.held_since.map(|since| since.elapsed())
    }

    /// The batch that a thread is loading, if one is: the thread of this batch, or any.
    pub(crate) fn reading(&self, ticket: Option<Ticket>, locators: &[Option<Locator>]) -> Option<Reading> {
        let gate = self.gate()?;
        let thread = match ticket {
            Some(ticket) => self.running.lanes.loading(ticket)?,
            None => gate.first_loading()?,
        };
        let (ticket, progress, time) = gate.loading(thread)?;
        let place = progress.place();
        let file = place.and_then(|(field, record)| locators.get(field)?.as_ref()?(record));
        Some(Reading { at: self.naming.at(ticket), time, record: place.map(|place| place.1), file })
    }

    /// Ends the threads, and returns the undelivered error, if there is one. The wait for running loads is at most the
    /// limit.
    pub(crate) fn close(self, limit: Option<Duration>, locators: &[Option<Locator>]) -> Result<(), Error> {
        if let (Some(limit), false) = (limit, self.is_foreign()) {
            if self.gate().is_some_and(|gate| !gate.end(limit)) {
                return Err(Error::Timeout { waited: limit, reading: self.reading(None, locators) });
            }
        }
        let Self { running, generation, .. } = self;
        let Some(Running { ending, mut lanes, feed, recorder, trace, .. }) = running.into_inner() else {
            return Ok(());
        };
        let mut unheard = None;
        if let Feed::Threads(threads) = &feed {
            threads.gate.close();
            let errors = lanes.lanes.iter_mut().filter_map(|batches| drain::<B>(batches, generation));
            unheard = errors.min_by_key(|&(seq, _)| seq).map(|(_, error)| error);
        }
        drop(ending);
        drop(lanes);
        drop(feed);
        // The last of the tracks: now everything is written, or was refused.
        drop(recorder);
        unheard.map_or(Ok(()), Err).and(trace.map_or(Ok(()), |trace| trace.close().map_err(Error::trace)))
    }
}

/// Receives up to the end of the ring, to a batch that the caller has leaked, or to an error of this generation.
/// Returns that and its place in the generation.
fn drain<B: Backend>(batches: &mut B::Batches, generation: u64) -> Option<(u64, Error)> {
    loop {
        let mut batch = match batches.receive(&mut Waiting::Drain, Duration::ZERO) {
            Received::Batch(batch) => batch,
            Received::Failed(source) => return Some((u64::MAX, Error::Device(source))),
            _ => return None,
        };
        let meta = B::Batches::meta(&mut batch);
        if meta.ticket.generation == generation && meta.result.is_err() {
            return take_error(meta).map(|error| (meta.ticket.seq, error));
        }
    }
}

/// Moves the error out, if there is one; the slot that it leaves is an empty batch. A batch that was loaded is not
/// written to: its cache line then stays shared between both threads.
fn take_error(meta: &mut BatchMeta) -> Option<Error> {
    mem::replace(&mut meta.result, Ok(0)).err().map(|error| *error)
}
