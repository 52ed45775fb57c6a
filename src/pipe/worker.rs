//! Workers: what fills one slot after the other. A [`Worker`] has a source; a thread runs it, or the caller does. A
//! [`Driven`] worker has neither: whoever has it fills the slots.

use std::mem;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use super::ring::{Content, Header, Ring};
use super::turn::{Doing, Filling, HELP_LIMIT, Patience, Shared, Source, Take};
use crate::error::Error;
use crate::observe::log::{LoadTimes, Place, Ticket, What};
use crate::observe::recorder::{Span, span};
use crate::observe::trace::Track;
use crate::thread::caught;

/// A source of a ring, of any type.
pub(crate) type AnySource<R> = Box<dyn Source<<R as Ring>::Slot, Unit = <R as Ring>::Unit>>;

/// What a worker keeps from one fill to the next.
struct Lane {
    track: Track,
    /// Its place in [`Shared::doing`]. The caller's worker has none there.
    index: usize,
    /// When it was ready for another unit.
    ready: Instant,
    last: Option<Place>,
}

/// A fill that has begun.
struct Begun {
    span: Span,
    /// Whose code runs.
    who: &'static str,
}

impl Lane {
    /// Waits for the next slot and its unit. Returns no unit once the pipe is closed.
    fn take<R: Ring>(&mut self, shared: &Shared<R>) -> Take<R> {
        let mut taken = shared.take(Patience::Worker);
        if let Take::Idle = taken {
            // Write the recorded events to the trace file before a wait for the caller's next request.
            self.track.flush();
            taken = shared.take(Patience::Idle);
        }
        taken
    }

    /// Begins to fill a slot. The fill began at `start`, or begins now.
    fn begin<R: Ring>(
        &mut self,
        shared: &Shared<R>,
        header: &mut Header<R::Unit>,
        start: Option<Instant>,
    ) -> Begun {
        let Header { ticket, ref mut load, .. } = *header;
        let place = ticket.place;
        // Once an epoch has been read, write its events to the trace file. Not for epochs of one step: too many writes.
        if self.last.replace(place).is_some_and(|last| last.epoch != place.epoch && last.step > 0) {
            self.track.flush();
        }
        let now = start.unwrap_or_else(Instant::now);
        load.since = start.unwrap_or_else(|| self.ready.max(load.since).min(now));
        (load.start, load.end) = (now, now);
        let span = span(What::Load, None, place);
        shared.does(self.index, Some(Doing { ticket, since: now, place: None }));
        Begun { span, who: "source" }
    }

    /// Ends a fill with its result, and commits the slot. A slot that was not to be filled has a result already. Returns
    /// the times of the fill.
    fn end<R: Ring>(
        &mut self,
        shared: &Shared<R>,
        mut reserved: R::Reserved,
        filled: Option<(Begun, Result<Content, Box<Error>>)>,
    ) -> (Ticket, LoadTimes) {
        let (_, header) = R::parts(&mut reserved);
        let (ticket, load) = (header.ticket, &mut header.load);
        if let Some((Begun { span, .. }, result)) = filled {
            header.result = result;
            shared.does(self.index, None);
            // The braces end the span with this call. Without `tracing` it is empty, and clippy refuses to drop it.
            { span }.record("bytes", load.bytes);
            load.end = Instant::now();
            self.track.loaded(ticket.place, load);
        }
        self.ready = load.end;
        if !matches!(header.result, Ok(Content::Bytes(_))) {
            shared.stop(ticket.generation);
        }
        let (bytes, times) = (header.bytes(), header.load);
        shared.guard("waker", || R::commit(reserved, bytes));
        (ticket, times)
    }
}

/// Fills slots with a source, on whatever thread it is called.
pub(super) struct Worker<R: Ring> {
    // Dropped before `source`: a worker's trace is written before its source is dropped.
    lane: Lane,
    source: AnySource<R>,
    /// Whether it rests after each short fill: the other workers and a caller that helps use all processors already.
    rests: bool,
}

impl<R: Ring> Worker<R> {
    pub(super) fn new(source: AnySource<R>, track: Track, index: usize, rests: bool) -> Self {
        let lane = Lane { track, index, ready: Instant::now(), last: None };
        Self { lane, source, rests }
    }

    /// A worker's thread: fills slots until the pipe is closed.
    pub(super) fn run(mut self, shared: &Shared<R>) {
        shared.guard("source", || {
            while let Take::Unit(unit) = self.lane.take(shared) {
                let (_, times) = self.fill(shared, unit, None);
                if self.is_to_rest(shared, &times) {
                    std::thread::sleep(HELP_LIMIT);
                }
            }
        });
        shared.guard("source", || drop(self));
        shared.leave();
    }

    /// Whether to leave the processor to others after this fill.
    pub(super) fn is_to_rest(&self, shared: &Shared<R>, times: &LoadTimes) -> bool {
        self.rests && times.end - times.start < HELP_LIMIT && self.pays(shared)
    }

    pub(super) fn pays(&self, shared: &Shared<R>) -> bool {
        let mut pays = false;
        shared.guard("source", || pays = self.source.pays());
        pays
    }

    pub(super) fn flush(&mut self) {
        self.lane.track.flush();
    }

    /// Fills the slot and commits it. The fill began at `start`, or begins now. Returns its times.
    pub(super) fn fill(
        &mut self,
        shared: &Shared<R>,
        mut reserved: R::Reserved,
        start: Option<Instant>,
    ) -> (Ticket, LoadTimes) {
        let Self { lane, source, .. } = self;
        let (slot, header) = R::parts(&mut reserved);
        if !header.is_to_fill() {
            return lane.end(shared, reserved, None);
        }
        let mut begun = lane.begin(shared, header, start);
        let Header { ticket, unit, load, .. } = header;
        let Begun { span, who, .. } = &mut begun;
        let filled = caught(|| {
            let Some(unit) = unit else { return Ok(Content::End) };
            let _entered = span.enter();
            let mut filling = shared.filling(lane.index, *ticket, load, who);
            source.fill(unit, slot, &mut filling).map_err(Box::new)
        });
        let result = filled.unwrap_or_else(|message| {
            Err(Error::Panicked { at: shared.naming.at(ticket.place), who, message }.into())
        });
        lane.end(shared, reserved, Some((begun, result)))
    }
}

/// A worker without a thread: whoever has it, the driver, asks for the next slot, fills it, and asks again.
///
/// It is for code that must not run on threads of this crate: that of an interpreter, which has threads of its own, or the
/// tasks of a thread pool. [`Builder::driven`](super::Builder::driven) adds one to a pipe and
/// [`Pipe::driven`](super::Pipe::driven) hands it out. It shares the turn with the workers that have threads, and its
/// slots arrive in their places.
///
/// A driver may move it to another thread, in the middle of a fill too ([`Fill::suspend`]).
///
/// ```
/// use twinbuf::pipe;
///
/// let mut pipe = pipe::builder(vec![0_u64; 2]).driven().build()?;
/// let workers = pipe.driven();
/// let driver = std::thread::spawn(move || {
///     for mut worker in workers {
///         while let Some(mut fill) = worker.next() {
///             let number = *fill.unit();
///             *fill.slot() = number * number;
///             fill.commit(8);
///         }
///     }
/// });
/// for (number, square) in (0..100).zip(pipe.items(0..100_u64)) {
///     assert_eq!(*square?, number * number);
/// }
/// pipe.close()?; // `next` returns `None`
/// driver.join().unwrap();
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
pub struct Driven<R: Ring> {
    shared: Arc<Shared<R>>,
    lane: Lane,
    /// The fill that has begun, and its slot.
    filling: Option<(Begun, R::Reserved)>,
    /// Whether it has seen the end of the pipe.
    left: bool,
    /// The process that the pipe was built in.
    process: u32,
}

impl<R: Ring> Driven<R> {
    pub(super) fn new(shared: Arc<Shared<R>>, track: Track, index: usize) -> Self {
        let lane = Lane { track, index, ready: Instant::now(), last: None };
        Self { shared, lane, filling: None, left: false, process: std::process::id() }
    }

    /// Waits for the next slot to fill. Returns the suspended fill if there is one, and otherwise `None` once the pipe
    /// is closed or its device has failed.
    ///
    /// A pipe that is dropped or closed waits for a driver that is in this call or has a fill, suspended or not, as it
    /// does for the fill of a thread, and for no other driver.
    #[expect(clippy::should_implement_trait, reason = "the fill borrows the worker")]
    pub fn next(&mut self) -> Option<Fill<'_, R>> {
        match self.advance(true) {
            Poll::Ready(fill) => fill,
            Poll::Pending => None,
        }
    }

    /// Returns the next slot to fill as [`next`](Self::next) does, or [`Poll::Pending`] if there is none now.
    pub fn try_next(&mut self) -> Poll<Option<Fill<'_, R>>> {
        self.advance(false)
    }

    fn advance(&mut self, waits: bool) -> Poll<Option<Fill<'_, R>>> {
        let Self { shared, lane, filling, left, .. } = self;
        let inside = (filling.is_none() && !*left).then(|| {
            shared.enter();
            Inside(&**shared)
        });
        while filling.is_none() && !*left {
            let taken = if waits { lane.take(shared) } else { shared.take(Patience::None) };
            let Take::Unit(mut reserved) = taken else {
                if waits || shared.is_closed() {
                    *left = true;
                    // Before it leaves: the last to do so completes the trace.
                    lane.track = Track::default();
                    shared.leave();
                    break;
                }
                return Poll::Pending;
            };
            let (_, header) = R::parts(&mut reserved);
            if header.is_to_fill() {
                let begun = lane.begin(shared, header, None);
                *filling = Some((begun, reserved));
            } else {
                lane.end(shared, reserved, None);
            }
        }
        // Still inside while it fills. A worker that has left is counted out already.
        mem::forget(inside);
        Poll::Ready(filling.is_some().then_some(Fill { worker: self }))
    }

    fn end(&mut self, result: Result<Content, Error>) {
        if let Some((begun, reserved)) = self.filling.take() {
            let _inside = Inside(&*self.shared);
            self.lane.end(&self.shared, reserved, Some((begun, result.map_err(Box::new))));
        }
    }
}

/// A driven worker whose driver waits or fills: a pipe that ends waits for it. Its drop counts it out, also if a panic
/// drops it.
struct Inside<'s, R: Ring>(&'s Shared<R>);

impl<R: Ring> Drop for Inside<'_, R> {
    fn drop(&mut self) {
        self.0.exit();
    }
}

impl<R: Ring> Drop for Driven<R> {
    /// Counts the worker out. A fill that it has fails.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A thread of the parent may have held a lock at the fork.
            return mem::forget(self.filling.take());
        }
        if self.filling.is_some() {
            drop(Fill { worker: self });
        }
        if !self.left {
            self.shared.enter();
            self.shared.leave();
        }
    }
}

debug!([R: Ring] Driven[R], |worker| fills: worker.filling.is_some(), left: worker.left);

/// A slot that a [`Driven`] worker fills. [`commit`](Self::commit), [`end`](Self::end) or [`fail`](Self::fail) hands it
/// over, and [`suspend`](Self::suspend) puts it off. If it is dropped instead, the caller receives
/// [`Error::Load`] in its place: the driver has panicked, or did not hand it over.
#[must_use = "the slot is handed over by `commit`"]
pub struct Fill<'w, R: Ring> {
    worker: &'w mut Driven<R>,
}

impl<R: Ring> Fill<'_, R> {
    /// Returns the unit to fill the slot with. It can be changed: the caller receives it with the slot.
    pub fn unit(&mut self) -> &mut R::Unit {
        self.parts().0
    }

    /// Returns the memory of the slot. It still holds what was in it before.
    pub fn slot(&mut self) -> &mut R::Slot {
        self.parts().1
    }

    /// Returns the unit, the slot, and what tells where the fill is: what a [`Source`] is called with.
    pub fn parts(&mut self) -> (&mut R::Unit, &mut R::Slot, Filling<'_>) {
        let Driven { shared, lane, filling, .. } = &mut *self.worker;
        let Some((begun, reserved)) = filling else {
            unreachable!("a fill exists while its slot is reserved")
        };
        let (slot, Header { ticket, unit, load, .. }) = R::parts(reserved);
        let Some(unit) = unit else { unreachable!("a fill begins with a unit") };
        (unit, slot, shared.filling(lane.index, *ticket, load, &mut begun.who))
    }

    /// Hands the slot over. `bytes` of it are filled, which reports and traces show.
    pub fn commit(self, bytes: usize) {
        self.worker.end(Ok(Content::Bytes(bytes)));
    }

    /// Ends the iteration here: there is no more.
    pub fn end(self) {
        self.worker.end(Ok(Content::End));
    }

    /// Lets the caller receive this error in place of the slot. No further unit of the call is started, unless the
    /// caller [resumes](super::Items::resume) it.
    pub fn fail(self, error: Error) {
        self.worker.end(Err(error));
    }

    /// Puts the fill off: [`Driven::next`] and [`Driven::try_next`] return it again.
    pub fn suspend(self) {
        mem::forget(self);
    }
}

impl<R: Ring> Drop for Fill<'_, R> {
    fn drop(&mut self) {
        if self.worker.filling.is_some() {
            let error = self.parts().2.failed("wanted the slot filled, found the fill dropped by its driver");
            self.worker.end(Err(error));
        }
    }
}

debug!([R: Ring] Fill['_, R], |_fill|);
