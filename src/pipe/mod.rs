//! For authors of other loaders: sources fill the slots of one ring ahead of a caller, who receives them in order.
//!
//! ```text
//! order of units ──► worker: turn { acquire, next unit, reserve } ──► fill ──► commit ──► ring ──► Items ──► a guard
//! ```
//!
//! - A [`Source`] fills one slot with one unit. Each worker with a thread has one.
//! - The **order** is an iterator of units: batches of a plan, rounds, files. Workers share the **turn**: who has it waits
//!   for the next free slot, takes the next unit and reserves the slot. The fill is outside of it.
//! - The caller receives the slots in the order of the units, whichever worker filled them, as guards. Dropping a guard
//!   frees its slot. [`Items`] is the iterator: `next`, `try_next`, `next_timeout`, `poll_next`, `next_async`.
//! - A **call** is one order ([`Pipe::begin`]). What was filled for an earlier call is discarded.
//! - An error or a panic of a source arrives once, in its place. No further unit is started before a new call or
//!   [`Items::resume`].
//! - Slots come round in turn. If the caller asks for an item while it holds the next slot, and does not drop that for
//!   `held_timeout`, it receives [`Error::SlotHeld`].
//! - Without overlap no thread of the pipe fills slots: the caller fills the one that it asks for, or a driver does.
//!
//! [`Loader`](crate::Loader), [`Generator`](crate::generate::Generator) and the stream of weights are front ends of a
//! pipe.
//!
//! # Examples
//!
//! Shards of a compressed stream, decoded by two workers, delivered in order, and resumed by the caller:
//!
//! ```
//! use twinbuf::pipe::{self, Content, Filling, Source};
//! use twinbuf::{BoxError, Error};
//!
//! /// Decodes shards: each byte stands for a run of its own length.
//! struct Decoder;
//!
//! impl Source<Vec<u8>> for Decoder {
//!     type Unit = u64; // the number of a shard
//!
//!     fn fill(&mut self, shard: &mut u64, out: &mut Vec<u8>, at: &mut Filling<'_>) -> Result<Content, Error> {
//!         let read = fetch(*shard).map_err(|error| at.failed(error))?;
//!         at.read_bytes(read.len());
//!         out.clear(); // what an earlier shard left: memory to reuse
//!         out.extend(read.iter().flat_map(|&byte| std::iter::repeat_n(byte, byte.into())));
//!         Ok(Content::Bytes(out.len()))
//!     }
//! }
//!
//! fn fetch(shard: u64) -> Result<Vec<u8>, BoxError> {
//!     Ok(vec![u8::try_from(shard)?; 3]) // from a socket, or from a file
//! }
//!
//! # fn main() -> Result<(), BoxError> {
//! let done = 5; // where the last run stopped
//! let mut pipe = pipe::builder(vec![Vec::new(); 4]).worker(Decoder).worker(Decoder).build()?;
//! let mut next = done;
//! for shard in pipe.items(done..100) {
//!     let shard = shard?; // decoded while the one before was in use
//!     assert_eq!(*shard.unit(), next);
//!     assert_eq!(shard.len() as u64, 3 * next);
//!     next = shard.unit() + 1; // save it, to resume there
//! }
//! assert_eq!(next, 100);
//! println!("{}", pipe.report());
//! pipe.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! A task that gives up a wait, because the source blocks, and goes on later. A future that is dropped loses no item:
//!
//! ```
//! use std::future::Future;
//! use std::pin::pin;
//! use std::sync::mpsc::{Receiver, channel};
//! use std::task::{Context, Waker};
//! use std::time::Duration;
//! use twinbuf::pipe::{self, Content, Filling, Source};
//! use twinbuf::{BoxError, Error};
//!
//! /// Asks a server, which answers unit 3 late.
//! struct Remote(Receiver<u64>);
//!
//! impl Source<u64> for Remote {
//!     type Unit = u64;
//!
//!     fn fill(&mut self, unit: &mut u64, slot: &mut u64, at: &mut Filling<'_>) -> Result<Content, Error> {
//!         at.reads(0, *unit); // what `reading` returns while this blocks
//!         *slot = if *unit == 3 { self.0.recv().map_err(|error| at.failed(error))? } else { *unit };
//!         Ok(Content::Bytes(8))
//!     }
//! }
//!
//! # fn main() -> Result<(), BoxError> {
//! let (server, answers) = channel();
//! let mut pipe = pipe::builder(vec![0; 2]).worker(Remote(answers)).build()?;
//! let mut items = pipe.items(0..6);
//! pollster::block_on(async {
//!     for unit in 0..3 {
//!         assert_eq!(items.next_async().await.map(|item| *item.unwrap()), Some(unit));
//!     }
//! });
//! {
//!     let next = pin!(items.next_async()); // a runtime polls it beside a timer, with `select!` for example
//!     assert!(next.poll(&mut Context::from_waker(Waker::noop())).is_pending());
//! } // the task gives up
//! if let Some(reading) = items.reading() {
//!     println!("{reading}"); // epoch 0, step 3: loading for 0.002 s, from record 3 on
//! }
//! server.send(30)?;
//! let mut rest = Vec::new();
//! pollster::block_on(async {
//!     while let Some(item) = items.next_async().await {
//!         rest.push(*item?);
//!     }
//!     Ok::<(), Error>(())
//! })?;
//! assert_eq!(rest, [30, 4, 5]);
//! drop(items);
//! pipe.close_timeout(Duration::from_secs(60))?; // an error, not a hang, if the server never answers
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "cuda")]
pub(crate) mod device;
pub(crate) mod items;
pub(crate) mod memory;
pub(crate) mod options;
mod plain;
pub(crate) mod ring;
pub(crate) mod turn;
mod worker;

use std::mem;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

pub use self::items::{Front, Items};
use self::options::Options;
pub use self::plain::{Builder, builder};
use self::ring::{BothSides, Received, Waiting};
pub use self::ring::{Content, Filled, Ring, Slots};
use self::turn::{FOREVER, HELP_LIMIT, Locate, Order, Patience, Posted, Shared, Take};
pub use self::turn::{Filling, Source};
pub(crate) use self::worker::AnySource;
use self::worker::Worker;
pub use self::worker::{Driven, Fill};
use crate::error::{At, Error, Reading};
use crate::observe::breakdown::Breakdown;
pub use crate::observe::log::Place;
use crate::observe::log::{Naming, Ticket};
use crate::observe::recorder::{Recorder, Span};
use crate::observe::report::{Kind, Report, Settings};
use crate::observe::trace::{LoaderTrace, Track};
use crate::sync::thread::{self, JoinHandle};
use crate::thread::{ForkGuard, processors};

/// How long the drop of a pipe or a writer waits for its threads.
pub(crate) const END_LIMIT: Duration = Duration::from_secs(10);

/// The same if a task asked for the last item. It is short because other tasks share the thread.
const TASK_LIMIT: Duration = Duration::from_millis(10);

/// What a pipe is made of.
pub(crate) struct Setup<R: Ring> {
    pub(crate) sides: BothSides<R>,
    /// One for each worker with a thread. Without overlap the first is the caller's.
    pub(crate) sources: Vec<AnySource<R>>,
    /// Workers without threads.
    pub(crate) driven: usize,
    /// The source with which a waiting caller fills slots.
    pub(crate) helper: Option<AnySource<R>>,
    pub(crate) options: Options,
    pub(crate) trace: Option<Arc<LoaderTrace>>,
    pub(crate) kind: Kind,
    /// Host slots.
    pub(crate) depth: usize,
    pub(crate) locate: Locate,
    pub(crate) add_reads: AddReads,
}

/// Adds what the readers of files have counted to a report.
pub(crate) type AddReads = Box<dyn Fn(Report) -> Report + Send>;

/// Workers that fill the slots of a ring ahead of the caller; without overlap the caller or a driver fills them.
pub struct Pipe<R: Ring> {
    running: ForkGuard<Running<R>>,
    /// The number of the present call, from 1, and how many of its units the caller has received.
    call: u64,
    received: u64,
    /// Why the caller receives no item.
    stopped: Option<Stopped>,
    /// An error of no unit, of a hook or an order: it comes in place of the next item. `close` returns a hook's.
    pub(crate) failed: Option<Error>,
    locate: Locate,
    add_reads: AddReads,
    begun: plain::Begun,
}

/// Why a call delivers nothing more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stopped {
    /// A unit failed: until it is passed over.
    Failed,
    /// The iteration is over: until more units are granted.
    Left,
    Ended,
}

/// What runs while a pipe exists.
struct Running<R: Ring> {
    /// `None` once it is dropped.
    consumer: Option<R::Consumer>,
    shared: Arc<Shared<R>>,
    threads: Vec<JoinHandle<()>>,
    /// Workers that no driver has taken.
    driven: Vec<Driven<R>>,
    overlap: bool,
    /// The caller's own source: the only one without overlap, and otherwise what it fills slots with while it waits.
    own: Option<Worker<R>>,
    recorder: Recorder,
    trace: Option<Arc<LoaderTrace>>,
    held_timeout: Duration,
    /// Since when the next slot has been found held by calls other than `next`.
    held_since: Option<Instant>,
    /// How long the last fill took.
    last_fill: Duration,
    /// How long a drop waits for the workers.
    limit: Duration,
}

impl<R: Ring> Running<R> {
    /// Ends the workers, and joins them if they leave before `until`. Returns whether they did.
    fn end(&mut self, until: Option<Instant>) -> bool {
        let Self { shared, driven, consumer, own, .. } = self;
        shared.close();
        driven.clear();
        // All drops run foreign code.
        let consumer = consumer.take();
        shared.guard("slot, a unit or a waker", || drop(consumer));
        let own = own.take();
        shared.guard("source", || drop(own));
        let threads = mem::take(&mut self.threads);
        // Workers run wakers, and a waker may drop the last reference to the pipe. Then this thread is a worker, and a
        // thread cannot join itself.
        let here = thread::current().id();
        let own = threads.iter().any(|thread| thread.thread().id() == here);
        if !self.shared.wait_for_workers(usize::from(own), until) {
            // The workers that are left behind own all that they use: a source, a slot and a reference to the ring.
            return false;
        }
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != here) {
            // The thread catches all panics.
            let _ = thread.join();
        }
        if !own {
            self.shared.end();
        }
        true
    }

    /// Without overlap, fills the slot of the unit that the caller asks for. Returns what a receive call would find if that
    /// was not possible.
    fn fill_inline(&mut self, asked: Instant, waiting: &mut Waiting<'_, '_>) -> Option<Received<R::Item>> {
        let Self { consumer: Some(consumer), shared, overlap: false, own: Some(own), .. } = self else {
            return None;
        };
        // If a slot is free at once, `asked` is the start of the fill, without another read of the clock.
        let (mut patience, mut start, mut again) = (Patience::None, Some(asked), false);
        loop {
            match shared.take(patience) {
                Take::Unit(unit) => {
                    own.fill(shared, unit, Some(start.unwrap_or_else(Instant::now)));
                    return None;
                }
                Take::InUse if start.take().is_some() => {
                    let by = waiting.release_by(&mut self.held_since, self.held_timeout);
                    patience = by.map_or(Patience::None, Patience::Slot);
                }
                // No slot can be filled. The receiving side, which is at the same slot, returns why: a guard holds the
                // slot, or the device failed. It also stores the waker of a task.
                taken => {
                    let mut look = Waiting::Try;
                    let waiting = if let Waiting::Poll(_) = waiting { &mut *waiting } else { &mut look };
                    match (R::receive(consumer, waiting), taken) {
                        // Between `take` and `receive` the slot was released: now it can be filled.
                        (Received::Empty, Take::InUse) if !mem::replace(&mut again, true) => {}
                        (Received::Empty, _) => return Some(Received::Gone),
                        (found, _) => return Some(found),
                    }
                }
            }
        }
    }

    /// Lets a caller that waits work as one more worker: it fills the next slots. Its source must tell that this pays, and
    /// the last fill must have been shorter than the time that the caller has. Returns the item that it waits for when that
    /// is ready.
    fn help(&mut self, waiting: &Waiting<'_, '_>) -> Option<Received<R::Item>> {
        let Self { consumer: Some(consumer), shared, overlap: true, own: Some(own), .. } = self else {
            return None;
        };
        loop {
            let rest = match waiting {
                Waiting::Block => FOREVER,
                Waiting::Until(deadline) => deadline.saturating_duration_since(Instant::now()),
                // A `try` or `poll` call must not block, so it fills no slots.
                Waiting::Try | Waiting::Poll(_) => return None,
            };
            if !own.pays(shared) {
                return None;
            }
            let took = self.last_fill;
            // Whether the unit that the caller waits for comes in less than half a fill: it would receive it too late.
            let soon = || shared.first_fill().is_some_and(|doing| 2 * doing.since.elapsed() > took);
            if took >= rest || took >= HELP_LIMIT && soon() {
                return None;
            }
            let Take::Unit(unit) = shared.take(Patience::None) else { return None };
            let (ticket, times) = own.fill(shared, unit, Some(Instant::now()));
            self.last_fill = times.took();
            self.recorder.helped(ticket.place, &times);
            match R::receive(consumer, &mut Waiting::Try) {
                Received::Empty => {}
                Received::Held => return None,
                found => return Some(found),
            }
        }
    }

    fn receive(&mut self, waiting: &mut Waiting<'_, '_>) -> Received<R::Item> {
        self.consumer.as_mut().map_or(Received::Gone, |consumer| R::receive(consumer, waiting))
    }

    /// Receives the units that were started, up to `until`, the end, a slot that the caller holds, or an error.
    /// Returns an error of this call, or of the device.
    fn unheard(&mut self, mut call: u64, until: Option<Instant>) -> Option<Error> {
        const PIECE: Duration = Duration::from_millis(5);
        let consumer = self.consumer.as_mut().filter(|_| self.overlap)?;
        loop {
            let piece = until.into_iter().fold(Instant::now() + PIECE, Instant::min);
            // Ask this before the slot: once no worker is left, every unit that will come has been committed.
            let idle = self.shared.is_idle();
            let mut item = match R::receive(consumer, &mut Waiting::Until(piece)) {
                Received::Item(item) => item,
                Received::Empty if !idle && until.is_none_or(|until| piece < until) => continue,
                Received::Failed(source) => return Some(Error::Device(source)),
                _ => return None,
            };
            let header = R::header_mut(&mut item);
            let result = mem::replace(&mut header.result, Ok(Content::End));
            let heard = header.ticket.generation == call;
            self.shared.guard("unit", || drop(item));
            match result {
                Err(error) if heard => return Some(*error),
                Ok(Content::End) if heard => call = 0, // no unit behind the end is the caller's
                result => self.shared.guard("error", || drop(result)),
            }
        }
    }
}

impl<R: Ring> Drop for Running<R> {
    fn drop(&mut self) {
        if self.consumer.is_some() {
            self.end(Some(Instant::now() + self.limit));
        }
    }
}

impl<R: Ring> Pipe<R> {
    /// Starts a thread for each source; without overlap none.
    pub(crate) fn start(setup: Setup<R>) -> Result<Self, Error> {
        let Setup { sides: (producer, consumer), sources, driven, helper, options, trace, kind, .. } = setup;
        let Setup { depth, locate, add_reads, .. } = setup;
        let overlap = options.overlaps();
        // Without overlap a caller with a source fills all slots. A driver that waits for one would hold the turn, and the
        // caller would wait for the driver.
        let driven = if overlap || sources.is_empty() { driven } else { 0 };
        let naming = Naming { loader: options.name.clone(), rounds: kind == Kind::Rounds };
        let Options { held_timeout, breakdown, sends, .. } = options;
        let row = match kind {
            Kind::Rounds => "generate",
            Kind::Items | Kind::Ahead => "prefetch",
            Kind::Batches | Kind::Groups => "read",
        };
        let threaded = if overlap { sources.len() } else { 0 };
        let workers = sources.len() + driven;
        let processors = helper.as_ref().map_or(usize::MAX, |_| processors());
        let shared = Arc::new(Shared::new(producer, threaded + driven, driven, naming.clone()));
        let (id, train) = if sends { (3, "upload") } else { (1, "train") };
        let track = Track::new(trace.clone(), id, train, naming.rounds, R::ON_DEVICE);
        let mut report = Report::new(kind, Settings { overlap, depth, workers });
        report.settings.workers = if overlap { workers } else { 1 };
        (report.overlap_off, report.sends) = (!options.overlap, sends);
        report.device_slots = if R::ON_DEVICE { R::depth(&consumer).1 } else { 0 };
        let mut running = ForkGuard::new(Running {
            consumer: Some(consumer),
            shared,
            threads: Vec::with_capacity(workers),
            driven: Vec::new(),
            overlap,
            own: None,
            recorder: Recorder::new(track, breakdown, report),
            trace,
            held_timeout: held_timeout.min(FOREVER),
            held_since: None,
            last_fill: Duration::ZERO,
            limit: END_LIMIT,
        });
        let Running { shared, threads, driven: idle, own, trace, .. } = &mut *running;
        let named =
            |index: usize| if workers == 1 { row.to_string() } else { format!("{row} {}", index + 1) };
        let track_of = |index: usize| {
            // In the trace, row 1 is the caller and the even rows are the workers. Row 3 is for copies to a device, or
            // for a caller that sends.
            let id = u32::try_from(2 + 2 * index).unwrap_or(u32::MAX);
            Track::new(trace.clone(), id, &named(index), naming.rounds, false)
        };
        idle.extend((0..driven).map(|n| Driven::new(shared.clone(), track_of(threaded + n), threaded + n)));
        for (index, source) in sources.into_iter().enumerate() {
            let rests = index > 0 && index + 1 >= processors;
            let worker = Worker::new(source, track_of(index), index, rests);
            if !overlap {
                *own = Some(worker);
                break;
            }
            let (of, name) = (shared.clone(), crate::thread::name(naming.loader.as_deref(), &named(index)));
            match thread::Builder::new().name(name).spawn(move || worker.run(&of)) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    (index..threaded).for_each(|_| shared.leave()); // these never came
                    return Err(Error::Spawn(error));
                }
            }
        }
        if let (true, Some(helper)) = (overlap, helper) {
            *own = Some(Worker::new(helper, Track::default(), workers, false));
        }
        Ok(Self {
            running,
            call: 0,
            received: 0,
            stopped: None,
            failed: None,
            locate,
            add_reads,
            begun: plain::Begun::default(),
        })
    }

    /// Returns the workers without threads that no driver has taken yet.
    pub fn driven(&mut self) -> Vec<Driven<R>> {
        mem::take(&mut self.running.driven)
    }

    /// The unit's name in errors.
    pub(crate) fn at(&self, place: Place) -> At {
        self.running.shared.naming.at(place)
    }

    pub(crate) fn recorder(&mut self) -> &mut Recorder {
        &mut self.running.recorder
    }

    pub(crate) fn breakdown(&self) -> &Breakdown {
        &self.running.recorder.breakdown
    }

    /// Whether units come from a thread that stayed in the process that this one was forked from.
    pub(crate) fn is_orphaned(&self) -> bool {
        self.running.overlap && self.running.is_foreign()
    }

    /// Begins a call with these units: what was filled for an earlier call is discarded when it comes. At most `granted`
    /// units are started before [`grant`](Self::grant).
    ///
    /// `length`: the number of units, or 0 if the caller counts them itself, or `u64::MAX` if the end takes a slot.
    pub(crate) fn post(&mut self, order: Order<R::Unit>, length: u64, granted: u64) {
        if !self.is_orphaned() {
            self.call = self.running.shared.begin(Posted { order, length }, granted);
            (self.received, self.stopped) = (0, None);
        }
    }

    /// Lets the units behind one that failed start, if the caller has received its error.
    fn pass_over(&mut self) {
        if self.stopped == Some(Stopped::Failed) {
            self.stopped = None;
            if !self.is_orphaned() {
                self.running.shared.pass_over();
            }
        }
    }

    /// Allows the workers to start the first `granted` units of the present call. The caller began to ask for them at
    /// `resumed`: no worker has waited for it longer than since then.
    pub(crate) fn grant_since(&mut self, granted: u64, resumed: Instant) {
        if !self.is_orphaned() {
            self.running.shared.grant(granted, resumed);
        }
    }

    /// Lets no further units of the call start. Returns how many were started.
    pub(crate) fn retract(&mut self) -> u64 {
        self.running.shared.retract()
    }

    /// Returns a report of where the time went so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let Running { consumer, shared, recorder, .. } = &*self.running;
        let mut report = recorder.report();
        report.loads = shared.loads();
        (report.transfer, report.transfer_bytes) = consumer.as_ref().map(R::copies).unwrap_or_default();
        (self.add_reads)(report)
    }

    /// When the unit in use was copied to a device. `None` if the copy is not over, or there is none.
    fn copy_in_use(&self) -> Option<(Instant, Instant)> {
        R::copied(self.running.consumer.as_ref()?, self.running.recorder.in_use()?.seq)
    }

    /// The caller asks for the unit of this name, so its use of the unit before is over.
    pub(crate) fn asked(&mut self, place: Place, now: Instant) {
        let copy = self.copy_in_use();
        self.running.recorder.asked(place, now, copy);
    }

    /// The caller's use of the unit is over.
    pub(crate) fn used(&mut self, now: Instant) {
        let copy = self.copy_in_use();
        self.running.recorder.released(now, copy);
    }

    /// The iteration is over, or the caller gives it up.
    pub(crate) fn ended(&mut self, now: Instant) {
        self.used(now);
        let Running { recorder, own, shared, held_since, .. } = &mut *self.running;
        // The next iteration has the full time, also if the same slot is still held.
        if held_since.take().is_some() {
            shared.forget_task();
        }
        recorder.ended(now);
        own.iter_mut().for_each(Worker::flush);
    }

    /// Receives the next unit of the call; errors and the report name it `place`. `None`: the order or the source has no
    /// more.
    pub(crate) fn receive(
        &mut self,
        place: Place,
        mut waiting: Waiting<'_, '_>,
    ) -> Poll<Result<Option<R::Item>, Error>> {
        let asked = Instant::now();
        self.asked(place, asked);
        let (found, there) = self.next_slot(asked, &mut waiting);
        let error = match found {
            Received::Item(item) => return Poll::Ready(self.accept(item, place, asked, there)),
            Received::Empty => return Poll::Pending,
            Received::Held => return self.slot_held(&waiting, place),
            Received::Gone => {
                let at = self.at(place);
                self.running.shared.fault(&at).unwrap_or(Error::ThreadGone { at })
            }
            Received::Failed(source) => Error::Upload { at: self.at(place), source },
        };
        Poll::Ready(Err(error))
    }

    /// Waits for the next slot of the call, and releases those of earlier calls. Returns also whether it was ready when the
    /// caller asked; with a trace `false`.
    fn next_slot(&mut self, asked: Instant, waiting: &mut Waiting<'_, '_>) -> (Received<R::Item>, bool) {
        let (expected, running) = ((self.call, self.received), &mut *self.running);
        running.limit = if matches!(waiting, Waiting::Poll(_)) { TASK_LIMIT } else { END_LIMIT };
        let mut found = running.fill_inline(asked, waiting);
        let _waiting = running.recorder.waiting().map(Span::entered);
        // With a trace the clock is read again: the trace shows the exact time of receipt.
        let mut there = running.trace.is_none();
        loop {
            let received = match found.take() {
                // The caller fills slots itself, and found this in place of one: do not wait for another to fill it.
                Some(found) => found,
                None => match running.receive(&mut Waiting::Try) {
                    received @ (Received::Empty | Received::Held) => {
                        there = false;
                        let held = matches!(received, Received::Held);
                        let by = || waiting.release_by(&mut running.held_since, running.held_timeout);
                        let by = held.then(by).flatten();
                        let helped = running.help(waiting);
                        match helped.or_else(|| Some(running.receive(&mut Waiting::Until(by?)))) {
                            // The slot was not held, or was released in time and is being filled; or this call does not
                            // wait.
                            None | Some(Received::Empty) => running.receive(waiting),
                            Some(found) => found,
                        }
                    }
                    received => received,
                },
            };
            if !matches!(received, Received::Held) && running.held_since.take().is_some() {
                // The slot is no longer held, so no task waits for its release.
                running.shared.forget_task();
            }
            let Received::Item(mut item) = received else { return (received, there) };
            let ticket = R::header_mut(&mut item).ticket;
            if (ticket.generation, ticket.seq) == expected {
                return (Received::Item(item), there);
            }
            // The caller left the call that this slot was filled for. Release the slot and receive the next one.
            running.shared.guard("unit or an error", || drop(item));
            there = false;
        }
    }

    /// Takes the item out that the caller asked for. If it was ready (`there`), `asked` is its time of receipt, and the
    /// clock need not be read again.
    fn accept(
        &mut self,
        mut item: R::Item,
        place: Place,
        asked: Instant,
        there: bool,
    ) -> Result<Option<R::Item>, Error> {
        let Running { consumer, shared, overlap, recorder, last_fill, .. } = &mut *self.running;
        let number = R::number(&item);
        let copied = consumer.as_ref().and_then(|consumer| R::copied(consumer, number));
        let header = R::header_mut(&mut item);
        if !*overlap {
            header.load.since = header.load.start; // nobody waits for a slot between two calls
        }
        let load = &header.load;
        *last_fill = load.took();
        let now = match *overlap {
            // The caller has filled the slot itself: the end of the fill is the time of receipt.
            false => load.end.max(asked),
            true if there => asked,
            true => Instant::now(),
        };
        self.received += 1;
        let result = mem::replace(&mut header.result, Ok(Content::End));
        let Ok(Content::Bytes(bytes)) = result else {
            self.stopped = Some(if result.is_ok() { Stopped::Ended } else { Stopped::Failed });
            let named = header.unit.is_some();
            shared.guard("unit", || drop(item));
            let error = |error: Box<Error>| if named { *error } else { at_place(*error, self.at(place)) };
            return result.map(|_| None).map_err(error);
        };
        header.result = result;
        recorder.received(Ticket { seq: number, ..header.ticket }, bytes, load, now, copied);
        Ok(Some(item))
    }

    /// The next slot is held. A blocking call has waited for its full timeout; the others return `Pending` until the
    /// same time is over since the first of them found it held.
    fn slot_held(&mut self, waiting: &Waiting<'_, '_>, place: Place) -> Poll<Result<Option<R::Item>, Error>> {
        let Running { consumer, shared, held_since, held_timeout, .. } = &mut *self.running;
        if !matches!(waiting, Waiting::Block) {
            let since = *held_since.get_or_insert_with(Instant::now);
            if since.elapsed() < *held_timeout {
                if let Waiting::Poll(cx) = waiting {
                    shared.wake_at(since + *held_timeout, cx.waker());
                }
                return Poll::Pending;
            }
        }
        let (option, slots) = consumer.as_ref().map_or(("depth", 0), R::depth);
        Poll::Ready(Err(Error::SlotHeld { at: self.at(place), option, slots }))
    }

    /// Returns what the worker is reading whose unit is needed first. `None` if no worker is filling a slot, and in a
    /// forked process.
    #[must_use]
    pub fn reading(&self) -> Option<Reading> {
        if self.is_orphaned() {
            return None;
        }
        self.running.shared.reading(&self.locate)
    }

    /// Joins the workers and returns a pending error. Waits without a time limit for running fills; see
    /// [`close_timeout`](Self::close_timeout). In a forked process, it does nothing.
    ///
    /// Dropping the pipe also joins them. It waits for running fills for at most 10 s, or 10 ms if the last item was
    /// asked for by [`poll_next`](Items::poll_next) or [`next_async`](Items::next_async). After that it leaves their
    /// threads behind.
    ///
    /// # Errors
    ///
    /// With overlap, returns the first error of the last call that the caller has not received, for example because it
    /// stopped iterating early, or [`Error::Device`] if the device failed. Otherwise, returns [`Error::Panicked`] if a
    /// drop or a waker panicked and no item failed by that, and then [`Error::Trace`] if the trace could not be
    /// written. Delivered items remain valid.
    pub fn close(self) -> Result<(), Error> {
        self.close_within(None)
    }

    /// Closes the pipe as [`close`](Self::close) does, but waits at most `timeout` for running fills.
    ///
    /// A blocked read cannot be cancelled, for example if a file server does not answer. After the timeout, its thread is
    /// left behind. It keeps its slot and its source until the fill returns or the process exits. A thread that fills nothing
    /// only has to be woken: it is waited for up to 1 s more.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], with what is being read if anything is, if a thread was left behind, or if a driver still
    /// has a fill or is in [`Driven::next`]. Otherwise, the errors of [`close`](Self::close).
    pub fn close_timeout(self, timeout: Duration) -> Result<(), Error> {
        self.close_within(Some(timeout))
    }

    fn close_within(self, limit: Option<Duration>) -> Result<(), Error> {
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let Self { running, call, locate, stopped, failed, .. } = self;
        let Some(mut running) = running.into_inner() else { return Ok(()) };
        running.shared.close();
        let call = if stopped == Some(Stopped::Ended) { 0 } else { call };
        let unheard = running.unheard(call, until);
        // A thread that fills nothing leaves soon, but it has to be woken: no limit is too short for that. Where only drivers
        // fill slots, it may be long until one calls.
        let leaves = !running.threads.is_empty() && running.shared.first_fill().is_none();
        let soon = leaves.then(|| Instant::now() + Duration::from_secs(1));
        if !running.end(until.map(|until| soon.unwrap_or(until).max(until))) {
            let reading = running.shared.reading(&locate);
            return Err(Error::Timeout { waited: limit.unwrap_or_default(), reading });
        }
        let fault = running.shared.fault(&running.shared.naming.at(Place::default()));
        let trace = running.trace.take();
        // This drops the last rows of the trace, which write their events. `close` below returns an error of these
        // writes.
        drop(running);
        unheard.or(failed).or(fault).map_or(Ok(()), Err).and(trace.map_or(Ok(()), LoaderTrace::close))
    }
}

/// Names the unit in the error of an order that gave none: the unit that the caller asked for.
fn at_place(error: Error, at: At) -> Error {
    match error {
        Error::Panicked { who, message, .. } => Error::Panicked { at, who, message },
        Error::Load { source, .. } => Error::Load { at, source },
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::ring::Sides;
    use super::*;
    use crate::observe::log::LoadTimes;
    use crate::sync::{Consumer, ReservedSlot};

    type Numbered = Slots<u64, u64>;

    /// Writes its unit to the slot. With `other`, first fills and commits the slot that another worker has taken.
    #[derive(Default)]
    struct Numbers {
        other: Option<Other>,
        waits_for_disk: bool,
    }

    type Other = (Arc<Shared<Numbered>>, Worker<Numbered>, ReservedSlot<'static, ring::Slot<u64, u64>>);

    impl Source<u64> for Numbers {
        type Unit = u64;

        fn fill(&mut self, unit: &mut u64, slot: &mut u64, _: &mut Filling<'_>) -> Result<Content, Error> {
            if let Some((shared, mut worker, taken)) = self.other.take() {
                worker.fill(&shared, taken, None);
            }
            *slot = *unit;
            Ok(Content::Bytes(8))
        }

        fn pays(&self) -> bool {
            !self.waits_for_disk
        }
    }

    /// A ring of `depth` slots, and what its sides share. A call for these units has begun; each is its own step.
    fn begun(
        depth: usize,
        units: std::ops::Range<u64>,
    ) -> (Arc<Shared<Numbered>>, Consumer<'static, ring::Slot<u64, u64>>) {
        let (producer, consumer) = Numbered::ring(vec![0; depth]);
        let shared = Arc::new(Shared::new(producer, 1, 0, Naming::default()));
        let units = units.map(|unit| (Place { step: unit, ..Place::default() }, unit));
        shared.begin(Posted { order: Box::new(units), length: 0 }, u64::MAX);
        (shared, consumer)
    }

    fn worker(source: impl Source<u64, Unit = u64> + 'static, index: usize) -> Worker<Numbered> {
        Worker::new(Box::new(source), Track::default(), index, false)
    }

    /// What a caller has that helps with this source. The last fill took so long.
    fn helper(
        shared: &Arc<Shared<Numbered>>,
        consumer: Consumer<'static, ring::Slot<u64, u64>>,
        source: Numbers,
        last_fill: Duration,
    ) -> Running<Numbered> {
        let report = Report::new(Kind::Items, Settings { overlap: true, depth: 3, workers: 1 });
        Running {
            consumer: Some(consumer),
            shared: shared.clone(),
            threads: Vec::new(),
            driven: Vec::new(),
            overlap: true,
            own: Some(worker(source, 1)),
            recorder: Recorder::new(Track::default(), Breakdown::default(), report),
            trace: None,
            held_timeout: Duration::ZERO,
            held_since: None,
            last_fill,
            limit: Duration::ZERO,
        }
    }

    #[test]
    fn a_caller_that_helps_receives_what_a_worker_filled_meanwhile() {
        let (shared, consumer) = begun(3, 0..3);
        let Take::Unit(taken) = shared.take(Patience::None) else { panic!("every slot is free") };
        let other = Some((shared.clone(), worker(Numbers::default(), 0), taken));
        let mut caller = helper(&shared, consumer, Numbers { other, ..Numbers::default() }, Duration::ZERO);
        let found = caller.help(&Waiting::Block);
        let Some(Received::Item(first)) = found else { panic!("{found:?}") };
        assert_eq!((*first, *first.unit()), (0, 0));
        let next = caller.receive(&mut Waiting::Try);
        let Received::Item(own) = &next else { panic!("{next:?}") };
        let LoadTimes { since, start, .. } = Numbered::header(own).load;
        assert_eq!((**own, since), (1, start), "the caller's own use is no wait for a slot");
    }

    #[test]
    fn a_caller_helps_unless_fills_wait_for_a_disk_or_take_longer_than_it_may_wait() {
        const TOOK: Duration = Duration::from_millis(2);
        let until = |rest| Waiting::Until(Instant::now() + rest);
        for (helps, waits_for_disk, waiting) in [
            (true, false, Waiting::Block),
            (true, false, until(Duration::from_secs(3600))),
            (false, false, until(TOOK)),
            (false, true, Waiting::Block),
            (false, true, until(Duration::from_secs(3600))),
            (false, false, Waiting::Try),
        ] {
            let (shared, consumer) = begun(2, 7..8);
            let source = Numbers { waits_for_disk, ..Numbers::default() };
            let found = helper(&shared, consumer, source, TOOK).help(&waiting);
            let has = matches!(&found, Some(Received::Item(item)) if **item == 7);
            assert_eq!(has, helps, "{waits_for_disk} {found:?}");
            assert_eq!(shared.loads(), u64::from(helps), "{waits_for_disk}");
        }
    }

    /// Each fill lasts until the other side of the channel is dropped.
    struct Endless(mpsc::Receiver<()>);

    impl Source<u64> for Endless {
        type Unit = u64;

        fn fill(&mut self, _: &mut u64, _: &mut u64, _: &mut Filling<'_>) -> Result<Content, Error> {
            let _ = self.0.recv();
            Ok(Content::Bytes(0))
        }
    }

    #[test]
    fn a_caller_helps_with_long_fills_only_in_the_first_half_of_the_one_that_it_waits_for() {
        for (helps, took) in [(true, 3600), (false, 0)].map(|(helps, s)| (helps, Duration::new(s, 2_000_000)))
        {
            let (shared, consumer) = begun(2, 0..2);
            let (ends, end) = mpsc::channel();
            let (of, filler) = (shared.clone(), worker(Endless(end), 0));
            let filler = std::thread::spawn(move || filler.run(&of));
            while shared.first_fill().is_none_or(|doing| doing.since.elapsed() < Duration::from_millis(2)) {
                std::thread::yield_now();
            }
            let mut caller = helper(&shared, consumer, Numbers::default(), took);
            let found = caller.help(&Waiting::Block);
            assert!(found.is_none(), "the worker has the first unit: {found:?}");
            assert_eq!(shared.loads(), 1 + u64::from(helps));
            shared.close();
            drop((caller, ends));
            filler.join().unwrap();
        }
    }

    #[test]
    fn a_caller_does_not_wait_for_a_worker_that_has_the_turn() {
        let (producer, _consumer) = Numbered::ring(vec![0; 2]);
        let shared = Arc::new(Shared::<Numbered>::new(producer, 1, 0, Naming::default()));
        let ((began, begins), (goes_on, go_on)) = (mpsc::channel(), mpsc::channel::<()>());
        // The order is foreign code, and may take long. The worker that runs it holds the turn.
        let units = std::iter::once_with(move || {
            began.send(()).unwrap();
            let _ = go_on.recv();
            (Place::default(), 0)
        });
        shared.begin(Posted { order: Box::new(units), length: 0 }, u64::MAX);
        let (of, caller) = (shared.clone(), shared.clone());
        let worker = std::thread::spawn(move || matches!(of.take(Patience::Worker), Take::Unit(_)));
        begins.recv().unwrap();
        let (found, finds) = mpsc::channel();
        let caller = std::thread::spawn(move || {
            found.send(matches!(caller.take(Patience::None), Take::InUse)).unwrap();
        });
        let found = finds.recv_timeout(Duration::from_secs(60));
        drop(goes_on);
        assert_eq!(found, Ok(true));
        caller.join().unwrap();
        assert!(worker.join().unwrap());
    }

    /// Otherwise the report would count no wait for a slot that the caller kept.
    #[test]
    fn a_load_knows_when_its_slot_was_freed() {
        let (shared, mut consumer) = begun(2, 0..3);
        let mut own = worker(Numbers::default(), 0);
        for before in [None, None, Some(0)] {
            let Take::Unit(mut taken) = shared.take(Patience::None) else { panic!("a slot is free") };
            let freed = Numbered::parts(&mut taken).1.load.freed;
            assert_eq!(freed.map(|freed| freed.number), before);
            own.fill(&shared, taken, None);
            let next = Numbered::receive(&mut consumer, &mut Waiting::Try);
            assert!(matches!(&next, Received::Item(_)), "{next:?}");
        }
    }

    /// Otherwise the report would count the caller's time between two calls as a wait of the workers.
    #[test]
    fn a_call_waits_from_its_begin_on() {
        let (shared, _consumer) = begun(2, 0..0);
        let before = Instant::now();
        let order = Box::new(std::iter::once((Place::default(), 7)));
        shared.begin(Posted { order, length: 1 }, u64::MAX);
        let Take::Unit(mut taken) = shared.take(Patience::None) else { panic!("every slot is free") };
        assert!(Numbered::parts(&mut taken).1.load.since >= before);
    }

    /// Tells of each wake.
    struct Told(mpsc::Sender<()>);

    impl std::task::Wake for Told {
        fn wake(self: Arc<Self>) {
            self.0.send(()).unwrap();
        }
    }

    #[test]
    fn a_clock_wakes_a_task_at_its_time_and_ends_with_the_pipe() {
        let (shared, _consumer) = begun(2, 0..0);
        let (told, wakes) = mpsc::channel();
        let waker = Arc::new(Told(told)).into();
        let until = Instant::now() + Duration::from_millis(20);
        shared.wake_at(until, &waker);
        wakes.recv().unwrap();
        assert!(Instant::now() >= until, "woken before its time");
        // The worker that would forget the task has not left yet.
        shared.wake_at(Instant::now() + Duration::from_secs(10), &waker);
        shared.close();
        while Arc::strong_count(&shared) > 1 {
            std::thread::yield_now(); // the clock's thread has the other
        }
        assert!(wakes.try_recv().is_err(), "woken after the close");
    }

    /// Panics when it is woken.
    struct Cursed;

    impl std::task::Wake for Cursed {
        fn wake(self: Arc<Self>) {
            std::panic::resume_unwind(Box::new("cursed")); // without the panic hook, which would print it
        }
    }

    #[test]
    fn a_waker_that_panics_is_named_and_the_next_task_gets_a_clock() {
        let (shared, _consumer) = begun(2, 0..0);
        let clocks = || Arc::strong_count(&shared) - 1; // each clock's thread has a share
        shared.wake_at(Instant::now(), &Arc::new(Cursed).into());
        while clocks() > 0 {
            std::thread::yield_now();
        }
        let fault = shared.fault(&shared.naming.at(Place::default()));
        let Some(Error::Panicked { who: "waker", message, .. }) = &fault else { panic!("{fault:?}") };
        assert_eq!(message, "cursed");
        shared.wake_at(Instant::now() + FOREVER, std::task::Waker::noop());
        assert_eq!(clocks(), 1);
        shared.close();
        while clocks() > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_worker_for_which_no_processor_is_left_rests_after_a_short_fill() {
        let (shared, _consumer) = begun(2, 0..0);
        for rests in [false, true] {
            let worker: Worker<Numbered> =
                Worker::new(Box::new(Numbers::default()), Track::default(), 0, rests);
            let start = Instant::now();
            for (took, short) in [(HELP_LIMIT / 2, true), (HELP_LIMIT, false)] {
                let times = LoadTimes { end: start + took, ..LoadTimes::new(start) };
                assert_eq!(worker.is_to_rest(&shared, &times), rests && short, "{took:?}");
            }
        }
    }
}
