//! The workers' side: they share one turn, take units in order, and fill slots side by side.
//!
//! Beside those of `doing`, there are two locks. The **turn** holds the producer of the ring and the order of units. A
//! worker holds it while it waits for the next free slot, takes the next unit and reserves the slot; it fills without
//! it. With overlap, the caller never waits for the turn. The **mailbox** holds what the caller wants. It is locked
//! for a few instructions, and no foreign code runs under it. A worker that needs both takes the turn first.
//!
//! One worker waits for a slot while the others wait for the turn. It takes the unit after the slot is free: a started unit
//! waits for nothing but its source.

use std::mem;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, TryLockError};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::ring::{Content, Header, Ring};
use crate::error::{At, BoxError, Error, Reading};
use crate::observe::log::{LoadTimes, Naming, Place, Ticket};
use crate::sync::{Condvar, Mutex, lock, thread};
use crate::thread::caught;

/// Fills slots. Each worker with a thread has one. The caller has one without overlap, or as a
/// [`helper`](super::Builder::helper).
///
/// `S` is the memory of a slot. A source that returns an error or panics is not called again for the same call, unless
/// the caller [resumes](super::Items::resume) it; what it then does is up to it.
pub trait Source<S: ?Sized>: Send + 'static {
    /// What one slot is filled with: a batch, a round, a group of tensors.
    type Unit: Send + 'static;

    /// Fills `slot` with `unit`. `slot` still holds what was in it before.
    ///
    /// Returns the number of bytes, for `Report::bytes` and traces, or [`Content::End`] if there is no more. `unit` can
    /// be changed: the caller receives it with the slot.
    ///
    /// # Errors
    ///
    /// Any. The caller receives the error once, in the place of the unit. No further unit of the call is started,
    /// unless the caller [resumes](super::Items::resume) it.
    fn fill(&mut self, unit: &mut Self::Unit, slot: &mut S, at: &mut Filling<'_>) -> Result<Content, Error>;

    /// Whether a fill takes a processor, and does not wait for a device. Only then a caller that waits fills slots with
    /// its own source ([`Builder::helper`](super::Builder::helper)). Default: `false`.
    fn pays(&self) -> bool {
        false
    }
}

/// One fill of a slot. A [`Source`] calls its methods to report what it is doing.
#[derive(Debug)]
pub struct Filling<'f> {
    pub(crate) ticket: Ticket,
    naming: &'f Naming,
    pub(crate) times: &'f mut LoadTimes,
    /// Whose code runs: an error names it after a panic.
    pub(crate) who: &'f mut &'static str,
    /// `None` if the caller fills the slot.
    doing: Option<&'f Mutex<Option<Doing>>>,
}

impl Filling<'_> {
    /// Returns the name of the unit, for errors.
    #[must_use]
    pub fn at(&self) -> At {
        self.naming.at(self.ticket.place)
    }

    /// Makes the error of a fill that failed for this reason.
    #[must_use]
    pub fn failed(&self, source: impl Into<BoxError>) -> Error {
        Error::Load { at: self.at(), source: source.into() }
    }

    /// Notes what the source is about to read: `offset` in the part `part` of its data, both as the source counts them.
    /// [`Pipe::reading`](super::Pipe::reading) returns `offset` as the record until the next call, or until the
    /// worker's fill ends. Without effect if the caller fills the slot.
    pub fn reads(&mut self, part: usize, offset: u64) {
        if let Some(doing) = self.doing.map(lock).as_deref_mut().and_then(Option::as_mut) {
            doing.place = Some((part, offset));
        }
    }

    /// Notes that this many bytes were read for the unit, before they were transformed: for the report.
    pub fn read_bytes(&mut self, bytes: usize) {
        self.times.bytes = self.times.bytes.saturating_add(bytes);
    }

    /// Names whose code runs from now on, such as `"data set"`: [`Error::Panicked`] repeats it. Default: `"source"`.
    pub fn runs(&mut self, who: &'static str) {
        *self.who = who;
    }
}

/// The units of a call, in order, with their names.
pub(crate) type Order<U> = Box<dyn Iterator<Item = (Place, U)> + Send>;

/// What the workers of a pipe share with its caller.
pub(super) struct Shared<R: Ring> {
    /// `None` once the last worker has left.
    turn: Mutex<Option<Turn<R>>>,
    mail: Mutex<Mailbox<R::Unit>>,
    /// Wakes the worker that holds the turn, and the clock's thread, after the caller has changed the mailbox.
    posted: Condvar,
    /// Wakes the caller after a worker has left.
    left: Condvar,
    /// What each worker is doing. A caller that fills a slot has no place here: it asks only when it waits.
    doing: Box<[Mutex<Option<Doing>>]>,
    /// Units started so far, of all calls. Counted by the holder of the turn.
    loads: AtomicU64,
    pub(super) naming: Naming,
}

struct Turn<R: Ring> {
    producer: R::Producer,
    posted: Posted<R::Unit>,
}

/// The order of a call.
pub(super) struct Posted<U> {
    pub(super) order: Order<U>,
    /// The number of units that the caller takes without asking for the end, which then takes no slot. An order that
    /// ends before fails there. 0 if the caller counts by itself, and `u64::MAX` if only the order has the end.
    pub(super) length: u64,
}

/// What the caller wants.
struct Mailbox<U> {
    /// Numbers the calls, from 1. What was filled for an earlier call is discarded when it comes.
    call: u64,
    /// The order of this call, until the holder of the turn fetches it.
    posted: Option<Posted<U>>,
    /// Units of this call that were started, and that may be.
    started: u64,
    granted: u64,
    /// What lets no further unit of this call start, however many are granted: its end, and each unit that failed until
    /// the caller passes it over.
    stops: u64,
    /// When the caller last asked for units. Time before that does not count as a wait of the workers.
    resumed: Instant,
    closed: bool,
    /// Workers that may fill slots, and those that a pipe waits for when it ends: threads, and drivers that wait or fill.
    running: usize,
    alive: usize,
    /// Foreign code that panicked where no unit fails by it, a drop for example: the next unit fails in its place, or
    /// the close of the pipe.
    fault: Option<Fault>,
    /// A task that waits for a slot that the caller holds, and until when.
    held: Option<(Instant, Waker)>,
    /// Whether a thread runs [`Shared::run_clock`].
    clock: bool,
}

/// Who panicked, and the message.
type Fault = (&'static str, String);

/// Longer than a process runs.
pub(crate) const FOREVER: Duration = Duration::from_secs(1 << 31);

/// If fills take this long or longer, a waiting caller helps only in the first half of the one that it waits for. A worker
/// for which no processor is left rests as long after each fill that took less.
pub(super) const HELP_LIMIT: Duration = Duration::from_millis(1);

/// How long [`Shared::take`] waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Not at all.
    None,
    /// For a free slot, up to this time.
    Slot(Instant),
    /// For a free slot, without a limit; not for a unit that may be started.
    Worker,
    /// For a free slot, and then for a unit that may be started, without a limit.
    Idle,
}

/// What [`Shared::take`] returns. A worker leaves if a call that waits returns no unit.
pub(super) enum Take<R: Ring> {
    /// A slot to be filled. Its header names the unit.
    Unit(R::Reserved),
    /// No slot: the next one is in use, another thread has the turn, or a side of the ring is gone.
    InUse,
    /// No unit may be started, or the pipe is closed.
    Idle,
}

impl<R: Ring> Shared<R> {
    /// `driven`: how many of the workers have no thread.
    pub(super) fn new(producer: R::Producer, workers: usize, driven: usize, naming: Naming) -> Self {
        let mail = Mailbox {
            call: 0,
            posted: None,
            started: 0,
            granted: 0,
            stops: 0,
            resumed: Instant::now(),
            closed: false,
            running: workers,
            alive: workers - driven,
            fault: None,
            held: None,
            clock: false,
        };
        let posted = Posted { order: Box::new(std::iter::empty()), length: 0 };
        Self {
            turn: Mutex::new(Some(Turn { producer, posted })),
            mail: Mutex::new(mail),
            posted: Condvar::new(),
            left: Condvar::new(),
            doing: (0..workers).map(|_| Mutex::new(None)).collect(),
            loads: AtomicU64::new(0),
            naming,
        }
    }

    /// Reserves the next slot for the next unit.
    pub(super) fn take(&self, patience: Patience) -> Take<R> {
        let mut turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if patience == Patience::None => return Take::InUse,
            Err(TryLockError::WouldBlock) => lock(&self.turn),
        };
        let Some(Turn { producer, posted }) = &mut *turn else { return Take::InUse };
        // Most slots are free already: then the clock is not read.
        if !R::wait_free(producer, None) {
            let until = match patience {
                Patience::None => return Take::InUse,
                Patience::Slot(until) => until,
                Patience::Worker | Patience::Idle => Instant::now() + FOREVER,
            };
            if !R::wait_free(producer, Some(until)) {
                return Take::InUse;
            }
        }
        let mut mail = lock(&self.mail);
        loop {
            if mail.closed {
                return Take::Idle;
            }
            if let Some(new) = mail.posted.take() {
                drop(mail);
                let old = mem::replace(posted, new);
                self.guard("order", || drop(old));
                mail = lock(&self.mail);
            } else if mail.stops == 0 && mail.started < mail.granted {
                let (call, seq, resumed, faulty) =
                    (mail.call, mail.started, mail.resumed, mail.fault.is_some());
                mail.started = seq + 1;
                drop(mail);
                let next = caught(|| posted.order.next());
                if matches!(next, Ok(None)) && seq >= posted.length {
                    // Take back the start of a unit that does not exist.
                    mail = lock(&self.mail);
                    if mail.call == call {
                        (mail.started, mail.stops) = (seq, mail.stops + 1);
                    }
                    continue;
                }
                // Only the holder of the turn takes slots, so the free slot is still there, unless the consumer was dropped.
                let Some(mut reserved) = R::reserve(producer) else {
                    self.guard("unit", || drop(next));
                    return Take::InUse;
                };
                let (_, header) = R::parts(&mut reserved);
                // A unit may have hundreds of bytes, and a move takes time: from here on the unit stays in the slot.
                *header = Header::new(resumed, header.load.freed);
                let (place, panicked) = match next {
                    Ok(Some((place, unit))) => {
                        header.unit = Some(unit);
                        // Relaxed: a statistic.
                        self.loads.fetch_add(1, Ordering::Relaxed);
                        (place, None)
                    }
                    Ok(None) => (Place::default(), None),
                    Err(message) => (Place::default(), Some(("order", message))),
                };
                header.ticket = Ticket { generation: call, seq, place };
                if let Some((who, message)) =
                    panicked.or_else(|| if faulty { lock(&self.mail).fault.take() } else { None })
                {
                    header.result = Err(Error::Panicked { at: self.naming.at(place), who, message }.into());
                } else if let Some(found) = self.miscounted(posted, seq, header.unit.is_some()) {
                    let wanted = posted.length;
                    let source =
                        format!("wanted {wanted} units, as the order's `size_hint` says, found {found}");
                    header.result =
                        Err(Error::Load { at: self.naming.at(place), source: source.into() }.into());
                }
                // Here, before another worker asks the order for what is behind its end.
                if seq + 1 == posted.length || header.unit.is_none() && header.result.is_ok() {
                    self.stop(call);
                }
                return Take::Unit(reserved);
            } else if patience == Patience::Idle {
                mail = self.posted.wait(mail).unwrap_or_else(PoisonError::into_inner);
            } else {
                return Take::Idle;
            }
        }
    }

    /// Looks behind the last unit of an order whose length is known. If the length is wrong, returns whether there are
    /// fewer units or more.
    fn miscounted(&self, posted: &mut Posted<R::Unit>, seq: u64, there: bool) -> Option<&'static str> {
        if posted.length == u64::MAX || there && seq + 1 != posted.length {
            return None;
        }
        if !there {
            return Some("fewer");
        }
        let next = caught(|| posted.order.next());
        let more = !matches!(next, Ok(None));
        self.guard("order", || drop(next));
        more.then_some("more")
    }

    /// Runs foreign code. If it panics, the next unit fails in its place, or the close of the pipe.
    pub(super) fn guard(&self, who: &'static str, call: impl FnOnce()) {
        if let Err(message) = caught(call) {
            lock(&self.mail).fault.get_or_insert((who, message));
        }
    }

    /// Returns a panic of foreign code that no unit has failed by.
    pub(super) fn fault(&self, at: &At) -> Option<Error> {
        let (who, message) = lock(&self.mail).fault.take()?;
        Some(Error::Panicked { at: at.clone(), who, message })
    }

    /// Wakes the task at this time, unless the slot that it waits for is released before.
    pub(super) fn wake_at(self: &Arc<Self>, until: Instant, waker: &Waker) {
        let task = (until, waker.clone()); // not under the lock: the waker is foreign code
        let mut mail = lock(&self.mail);
        let old = mail.held.replace(task);
        let runs = mem::replace(&mut mail.clock, true);
        drop(mail);
        if !runs {
            let shared = Arc::clone(self);
            let clock = thread::Builder::new().name("twinbuf-clock".to_string());
            // If the thread cannot be started, the task asks again and again until its time is over.
            if clock.spawn(move || shared.run_clock()).is_err() {
                lock(&self.mail).clock = false;
                self.guard("waker", || waker.wake_by_ref());
            }
        }
        self.guard("waker", || drop(old));
    }

    /// Wakes tasks that wait for held slots when their time is over, until none waits or the pipe is closed.
    pub(super) fn run_clock(&self) {
        let mut mail = lock(&self.mail);
        while let Some((until, _)) = mail.held.as_ref().filter(|_| !mail.closed) {
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                let over = mail.held.take();
                drop(mail);
                self.guard("waker", || over.into_iter().for_each(|(_, waker)| waker.wake()));
                mail = lock(&self.mail);
            } else {
                (mail, _) = self.posted.wait_timeout(mail, rest).unwrap_or_else(PoisonError::into_inner);
            }
        }
        mail.clock = false;
    }

    /// Forgets the task that waits for a held slot.
    pub(super) fn forget_task(&self) {
        let old = lock(&self.mail).held.take();
        self.guard("waker", || drop(old));
    }

    /// Begins a call: what was started for an earlier one is discarded when it comes. `granted` units may be started.
    pub(super) fn begin(&self, posted: Posted<R::Unit>, granted: u64) -> u64 {
        let mut mail = lock(&self.mail);
        mail.call += 1;
        let old = mail.posted.replace(posted);
        (mail.started, mail.granted, mail.stops, mail.resumed) = (0, granted, 0, Instant::now());
        let call = mail.call;
        drop(mail);
        self.posted.notify_all();
        self.guard("order", || drop(old));
        call
    }

    /// The caller passes over a unit that failed.
    pub(super) fn pass_over(&self) {
        lock(&self.mail).stops -= 1;
    }

    /// Allows the workers to start the first `granted` units of the present call; see `Pipe::grant_since`.
    pub(super) fn grant(&self, granted: u64, resumed: Instant) {
        let mut mail = lock(&self.mail);
        (mail.granted, mail.resumed) = (granted, resumed);
        drop(mail);
        self.posted.notify_all();
    }

    /// Lets no further units of the call start. Returns how many were started.
    pub(super) fn retract(&self) -> u64 {
        let mut mail = lock(&self.mail);
        mail.granted = mail.granted.min(mail.started);
        mail.started
    }

    /// Lets no further unit of this call start: one failed, or was the last or the end.
    pub(super) fn stop(&self, call: u64) {
        let mut mail = lock(&self.mail);
        if mail.call == call {
            mail.stops += 1;
        }
    }

    /// Tells the workers to leave.
    pub(super) fn close(&self) {
        lock(&self.mail).closed = true;
        self.posted.notify_all();
    }

    pub(super) fn is_closed(&self) -> bool {
        lock(&self.mail).closed
    }

    /// Whether no thread is left, and no driver waits or fills.
    pub(super) fn is_idle(&self) -> bool {
        lock(&self.mail).alive == 0
    }

    /// Counts a driven worker in while its driver waits or fills: a pipe that ends waits for it.
    pub(super) fn enter(&self) {
        lock(&self.mail).alive += 1;
    }

    /// Counts it out again. It may come back.
    pub(super) fn exit(&self) {
        lock(&self.mail).alive -= 1;
        self.left.notify_all();
    }

    /// Counts a worker out for good. The last one drops the side of the ring that is filled.
    pub(super) fn leave(&self) {
        let mut mail = lock(&self.mail);
        mail.running -= 1;
        let last = mail.running == 0;
        drop(mail);
        if last {
            // Without a lock: this may run a task's waker, and join a copy thread. If a waker on that thread
            // drops the pipe, it must find this worker in `alive`, or the two threads would join each other.
            self.end();
        }
        self.exit();
    }

    /// Drops the side of the ring that is filled, and the order.
    pub(super) fn end(&self) {
        let turn = lock(&self.turn).take();
        if let Some(Turn { producer, posted }) = turn {
            self.guard("order", || drop(posted));
            self.guard("slot, a unit or a waker", || drop(producer));
        }
        let posted = lock(&self.mail).posted.take();
        self.guard("order", || drop(posted));
        self.forget_task();
    }

    /// Waits until no more than `most` workers are left, up to `until`. Returns whether that is so.
    pub(super) fn wait_for_workers(&self, most: usize, until: Option<Instant>) -> bool {
        let rest = until.map_or(FOREVER, |until| until.saturating_duration_since(Instant::now()));
        let waited = self.left.wait_timeout_while(lock(&self.mail), rest, |mail| mail.alive > most);
        let (mail, _) = waited.unwrap_or_else(PoisonError::into_inner);
        mail.alive <= most
    }

    /// Units started so far.
    pub(super) fn loads(&self) -> u64 {
        self.loads.load(Ordering::Relaxed)
    }

    /// The worker `index` begins to fill a slot, or has filled it. The caller's worker has no place.
    pub(super) fn does(&self, index: usize, fill: Option<Doing>) {
        if let Some(doing) = self.doing.get(index) {
            *lock(doing) = fill;
        }
    }

    /// What a source is called with.
    pub(super) fn filling<'f>(
        &'f self,
        index: usize,
        ticket: Ticket,
        times: &'f mut LoadTimes,
        who: &'f mut &'static str,
    ) -> Filling<'f> {
        Filling { ticket, naming: &self.naming, times, who, doing: self.doing.get(index) }
    }

    /// Of the fills that the workers are doing, the one whose unit is needed first.
    pub(super) fn first_fill(&self) -> Option<Doing> {
        let doing = self.doing.iter().filter_map(|doing| *lock(doing));
        doing.min_by_key(|doing| (doing.ticket.generation, doing.ticket.seq))
    }

    /// Returns what that worker is reading.
    pub(super) fn reading(&self, locate: &Locate) -> Option<Reading> {
        let Doing { ticket, since, place } = self.first_fill()?;
        let file = place.and_then(|(part, offset)| locate(part, offset));
        let record = place.map(|(_, offset)| offset);
        Some(Reading { at: self.naming.at(ticket.place), time: since.elapsed(), record, file })
    }
}

/// Finds the file and the offset of what a source is reading.
pub(crate) type Locate = Box<dyn Fn(usize, u64) -> Option<(PathBuf, u64)> + Send + Sync>;

/// The fill that a worker is doing. Callers read it after a timeout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doing {
    pub(super) ticket: Ticket,
    pub(super) since: Instant,
    /// What is being read: a part of the data, and an offset in it.
    pub(super) place: Option<(usize, u64)>,
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use super::*;
    use crate::pipe::{Items, builder};

    /// Otherwise a task that is polled often, beside a timer for example, would put off the end of its wait for ever.
    #[test]
    fn a_task_that_is_polled_again_is_woken_at_the_same_time() {
        let mut pipe = builder(vec![0_u64; 1]).driven().held_timeout(FOREVER).build().unwrap();
        let mut worker = pipe.driven().remove(0);
        pipe.begin(0, 0..2_u64, 2);
        worker.next().unwrap().commit(8);
        let shared = pipe.running.shared.clone();
        let mut items = Items::lent(&mut pipe);
        let _held = items.next().unwrap().unwrap();
        let [first, second] = [(); 2].map(|()| {
            let before = Instant::now();
            while Instant::now() == before {} // or a coarse clock would show the same time to both polls
            assert!(items.poll_next(&mut Context::from_waker(Waker::noop())).is_pending());
            lock(&shared.mail).held.as_ref().map(|(until, _)| *until).expect("the slot is held")
        });
        assert_eq!(first, second);
    }
}
