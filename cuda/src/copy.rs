//! Copies committed host slots to device slots, in order, on the copy stream, and tracks each copy until it is done.
//!
//! A copy thread runs an [`Engine`] to the end of the data. With `overlap(false)` the calling threads share it in a
//! [`Hand`], and each call does what can be done without another thread.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent;
use twinbuf_core::{Consumer, KeptSlot, Producer, ReadSlot, TryAcquireError, TryRecvError};

use crate::cu::{self, BesideCaptures, Current, Event, Stream};
use crate::edge;
use crate::error::{Error, Fate};
use crate::hosts::{Handed, Hosts};
use crate::lease::{Shared, look_again};
use crate::slot::DeviceBuf;
use crate::time::{Clock, Copied, OnCopied};

/// A committed host slot. It is not refilled while this guard exists.
type Source = KeptSlot<'static, usize>;

/// The copy stream, the batch that is being copied, and the copies that may still be running, oldest first.
pub(crate) struct Copies<M> {
    stream: Arc<Stream>,
    /// `None` if copies are not timed.
    clock: Option<Arc<Clock>>,
    on_copied: Option<OnCopied>,
    running: VecDeque<Running>,
    open: Option<Open>,
    /// The maximum number of copies in flight: the smaller of the two depths. With more, an event could be recorded
    /// again before the end of its previous copy was seen.
    limit: usize,
    hosts: Arc<Hosts<M>>,
}

/// A batch that is being copied.
struct Open {
    source: Source,
    /// The bytes from the slot's start whose copies were issued. The batch may turn out to be shorter.
    copied: usize,
}

struct Running {
    seq: u64,
    bytes: usize,
    start: Option<CUevent>,
    /// `None` if nothing was copied.
    copied: Option<CUevent>,
    issued: Instant,
    source: Source,
}

// SAFETY: the events are handles of the driver, which is thread-safe.
unsafe impl Send for Running {}

impl<M> Copies<M> {
    pub(crate) fn new(
        stream: Arc<Stream>,
        clock: Option<Arc<Clock>>,
        on_copied: Option<OnCopied>,
        limit: usize,
        hosts: Arc<Hosts<M>>,
    ) -> Self {
        let running = VecDeque::with_capacity(limit);
        Self { stream, clock, on_copied, running, open: None, limit, hosts }
    }

    /// Enqueues the copy of the open batch's bytes before `until` that were not copied yet, to the same offset in `slot`.
    ///
    /// # Safety
    ///
    /// `slot` belongs to this uploader, the copy stream waits for its uses, and its previous copy has been retired. `until`
    /// is in bounds of both slots, and the bytes before it were handed over: nobody writes to them. The context is current.
    unsafe fn part(&mut self, slot: &DeviceBuf<M>, until: usize) -> Result<(), Error> {
        // A real driver accepts an empty copy. It is left out because there is nothing to wait for then.
        let Some(open) = self.open.as_mut().filter(|open| open.copied < until) else { return Ok(()) };
        let at = mem::replace(&mut open.copied, until);
        let stream = self.stream.raw();
        if let Some(start) = slot.start.as_ref().filter(|_| at == 0) {
            // SAFETY: both exist.
            unsafe { cu::record(start.raw(), stream) }?;
        }
        // SAFETY: the caller guarantees that it is in bounds.
        let from = unsafe { self.hosts.memory[*open.source].start().add(at) };
        // SAFETY: `open` keeps the source; the caller guarantees the bounds. The copy stream waits for the target's uses,
        // and both slots are freed after the copy stream's work.
        unsafe { cu::copy_to_device(slot.address() + at as u64, from.as_ptr(), until - at, stream) }
    }

    /// Ends the open batch: records its event, and tracks its copies from now on.
    fn end(&mut self, seq: u64, slot: &mut DeviceBuf<M>, len: usize) -> Result<(), Error> {
        slot.len = len;
        let Some(Open { source, copied }) = self.open.take() else { return Ok(()) };
        let copied = (copied > 0).then(|| slot.copied.raw());
        let (start, issued) = (slot.start.as_ref().map(Event::raw), slot.issued);
        self.running.push_back(Running { seq, bytes: len, start, copied, issued, source });
        // SAFETY: both exist.
        copied.map_or(Ok(()), |copied| unsafe { cu::record(copied, self.stream.raw()) })
    }

    /// Drops the open batch: waits for its copies, and releases its host slot.
    fn abandon(&mut self) -> Result<(), Error> {
        if self.open.as_ref().is_some_and(|open| open.copied > 0) {
            let _apart = self.apart()?;
            // SAFETY: the stream is ours.
            unsafe { cu::synchronize(self.stream.raw()) }?;
        }
        self.open = None;
        Ok(())
    }

    /// Makes the context current, and allows the thread to wait during a capture, until the result is dropped.
    fn apart(&self) -> Result<(Current, Option<BesideCaptures>), Error> {
        Ok((Current::enter(self.stream.context())?, BesideCaptures::enter()))
    }

    /// Releases the oldest copy's host slot, then calls `on_copied`. Returns `false` if no copy runs or, unless it is to
    /// `wait`, if the oldest still runs.
    fn retire(&mut self, wait: bool) -> Result<bool, Error> {
        if let Some(copied) = self.running.front().and_then(|oldest| oldest.copied) {
            // SAFETY: the event is in a device slot, which lives as long as the ring.
            if !unsafe { edge::refill_after_copy(copied, wait) }? {
                return Ok(false);
            }
        }
        let Some(Running { seq, bytes, start, copied, issued, source }) = self.running.pop_front() else {
            return Ok(false);
        };
        // Release the slot first: the reader may be waiting for it, and the caller's code may run long.
        drop(source);
        if let (Some(on_copied), Some(clock), Some(start), Some(copied), 1..) =
            (&mut self.on_copied, &self.clock, start, copied, bytes)
        {
            // SAFETY: both are in a device slot and were recorded for this batch; with a clock, they are for timing.
            if let Some(time) = unsafe { clock.time(start, copied, issued) }? {
                on_copied(Copied { seq, bytes, time });
            }
        }
        Ok(true)
    }

    /// Whether the oldest copy must end before another one may be issued.
    fn is_full(&self) -> bool {
        self.running.len() >= self.limit
    }

    /// Waits until another copy may be issued.
    fn make_room(&mut self) -> Result<(), Error> {
        self.retire_all(false)?;
        while self.is_full() {
            self.retire(true)?;
        }
        Ok(())
    }

    /// Releases the host slots of all copies, or of those that are done.
    fn retire_all(&mut self, wait: bool) -> Result<(), Error> {
        while self.retire(wait)? {}
        Ok(())
    }

    /// How long to sleep before the copies are queried again; `None` if none is in flight. The pause grows with the
    /// time that the newest copy has been in flight.
    fn pause(&self) -> Option<Duration> {
        let newest = self.running.back()?;
        Some((newest.issued.elapsed() / 8).clamp(Duration::from_micros(50), Duration::from_millis(5)))
    }
}

impl<M> Drop for Copies<M> {
    /// Waits for the copy stream, even after an error. If that fails, a copy may still be running: its host slot is
    /// leaked, neither refilled nor freed.
    fn drop(&mut self) {
        if self.running.is_empty() && self.open.is_none() {
            return;
        }
        let settled = self.stream.settle().is_ok();
        let held = (mem::take(&mut self.running), self.open.take());
        if !settled {
            mem::forget((held, self.hosts.clone()));
        }
    }
}

/// The two rings, and the copies between them.
pub(crate) struct Engine<M: 'static> {
    // Dropped in this order: the filling side is at its end before the open batch's slot is released, because a
    // `ReservedSlot` may still have the rest of that slot; and the copies are waited for before the other side sees its.
    host: Consumer<'static, usize>,
    copies: Copies<M>,
    /// Whether the host slot of the next batch was dropped without a commit. No batch is open then.
    cancelled: bool,
    device: Producer<'static, DeviceBuf<M>>,
    /// Last: who is told of the end by a commit is told by the next acquire too.
    _end: End<M>,
}

/// Refuses further commits.
struct End<M>(Arc<Hosts<M>>);

impl<M> Drop for End<M> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// What the next copy needs.
enum Needs {
    /// The end of the oldest copy.
    Room,
    /// A batch, or more of the open one.
    Batch,
    DeviceSlot,
    /// Nothing follows. `false` if the data may be incomplete.
    End(bool),
    /// Nothing: no one receives batches.
    Closed,
}

impl<M: 'static> Engine<M> {
    pub(crate) fn new(
        copies: Copies<M>,
        host: Consumer<'static, usize>,
        device: Producer<'static, DeviceBuf<M>>,
    ) -> Self {
        let end = End(copies.hosts.clone());
        Self { copies, cancelled: false, host, device, _end: end }
    }

    /// The body of the copy thread: copies until the data end, a side is dropped, or something fails.
    pub(crate) fn run(mut self, fate: &Fate) {
        match self.copy_all() {
            Ok(finished) => self.end(finished),
            Err(error) => self.fail(error, fate),
        }
    }

    fn copy_all(&mut self) -> Result<bool, Error> {
        cu::bind(self.copies.stream.context())?;
        let _beside = BesideCaptures::enter();
        loop {
            let seen = self.copies.hosts.changes();
            let needs = self.advance()?;
            self.copies.retire_all(false)?;
            // No call waits for both a slot and an event, so the events are polled while copies run. A batch that
            // arrives in the meantime is queued behind them without a gap.
            let pause = self.copies.pause();
            match needs {
                Needs::Room => self.copies.make_room()?,
                // The rest may be in the hands of a thread that was left behind.
                Needs::Batch if self.device.is_closed() => return Ok(false),
                Needs::Batch => self.copies.hosts.wait(seen, pause),
                // Dropped without a commit, the slot is returned again.
                Needs::DeviceSlot => match pause {
                    Some(pause) => drop(self.device.acquire_timeout(pause)),
                    None => drop(self.device.acquire()),
                },
                Needs::End(finished) => {
                    self.copies.retire_all(true)?;
                    return Ok(finished);
                }
                Needs::Closed => return Ok(false),
            }
        }
    }

    /// Issues all copies that can be issued without a wait.
    fn advance(&mut self) -> Result<Needs, Error> {
        loop {
            if self.copies.open.is_none() && !self.cancelled {
                match self.host.try_recv().map(|slot| slot.map(ReadSlot::keep)) {
                    Ok(Some(source)) => self.copies.open = Some(Open { source, copied: 0 }),
                    Err(TryRecvError::Cancelled) => self.cancelled = true,
                    // A held slot is held by a copy in flight.
                    Err(TryRecvError::Empty | TryRecvError::Held) => return Ok(Needs::Batch),
                    Ok(None) => return Ok(Needs::End(true)),
                    Err(_abandoned) => return Ok(Needs::End(false)),
                }
            }
            if self.copies.is_full() && self.copies.open.as_ref().is_some_and(|open| open.copied == 0) {
                return Ok(Needs::Room);
            }
            let mut slot = match self.device.try_acquire() {
                Ok(slot) => slot,
                Err(TryAcquireError::Full) => return Ok(Needs::DeviceSlot),
                Err(_closed) => return Ok(Needs::Closed),
            };
            let Some(Open { source, copied }) = &self.copies.open else {
                // Dropped, the reservation is received as `Cancelled`.
                drop(slot.reserve());
                self.cancelled = false;
                continue;
            };
            let copied = *copied;
            let (until, ended) = match self.copies.hosts.take(**source, copied) {
                Handed::Part(until) if until > copied => (until, None),
                Handed::Part(_) => return Ok(Needs::Batch),
                Handed::All(len, meta) => (len, Some(meta)),
                Handed::Cancelled => {
                    self.copies.abandon()?;
                    self.cancelled = true;
                    continue;
                }
                Handed::Gone => return Ok(Needs::End(false)),
            };
            // On the caller's thread, or after the caller's code ran on this one.
            let _current = Current::enter(self.copies.stream.context())?;
            if copied == 0 {
                slot.copy_after_uses()?;
                slot.issued = Instant::now();
            }
            // SAFETY: both slots have the uploader's slot size, and lengths were checked against it (`ReservedSlot`).
            // Fewer copies than `limit` are in flight, and slots are used in turn: the previous copy of the device slot
            // has been retired.
            unsafe { self.copies.part(&slot, until) }?;
            if let Some(meta) = ended {
                self.copies.end(slot.seq(), &mut slot, until)?;
                slot.meta = Some(meta);
                // Hand the batch over while the copy runs: the streams that use it wait for the copy, the host does not.
                if slot.commit().is_err() {
                    return Ok(Needs::Closed);
                }
            }
        }
    }

    /// Issues all copies that can be issued without another thread, on the caller's thread. At the end of the data,
    /// returns whether they were finished.
    fn pump(&mut self) -> Result<Option<bool>, Error> {
        loop {
            match self.advance()? {
                Needs::Room => {
                    let _apart = self.copies.apart()?;
                    self.copies.make_room()?;
                }
                Needs::Closed => return Err(Error::Closed),
                Needs::End(finished) => return Ok(Some(finished)),
                Needs::Batch | Needs::DeviceSlot => return Ok(None),
            }
        }
    }

    fn end(self, finished: bool) {
        let Self { host, copies, device, .. } = self;
        drop((host, copies));
        if finished {
            device.finish();
        }
    }

    fn fail(self, error: Error, fate: &Fate) {
        // Set before the rings end, because both sides read it when they see the end.
        let _ = fate.set(error);
    }
}

/// The engine of an uploader without a copy thread.
pub(crate) struct Hand<M: 'static> {
    /// `None` after the end.
    engine: Mutex<Option<Box<Engine<M>>>>,
    /// The thread that has that lock: the engine calls the caller's code, which may use the uploader.
    user: Mutex<Option<ThreadId>>,
    hosts: Arc<Hosts<M>>,
    shared: Arc<Shared<M>>,
}

/// Forgets the thread when it is dropped, also by a panic of the caller's code.
struct User<'h>(&'h Mutex<Option<ThreadId>>);

impl Drop for User<'_> {
    fn drop(&mut self) {
        *lock(self.0) = None;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How to wait for a host slot.
pub(crate) enum Waiting<'a, 'c> {
    No,
    Until(Instant),
    Forever,
    Task(&'a mut Context<'c>),
}

impl<M: 'static> Hand<M> {
    pub(crate) fn new(engine: Engine<M>, hosts: Arc<Hosts<M>>, shared: Arc<Shared<M>>) -> Self {
        Self { engine: Mutex::new(Some(Box::new(engine))), user: Mutex::new(None), hosts, shared }
    }

    /// Whether `on_copied` or a waker makes this call, within another one of the uploader's on the same thread.
    fn is_within(&self) -> bool {
        *lock(&self.user) == Some(thread::current().id())
    }

    /// Calls `work`. Its error ends the uploader.
    fn with<R>(&self, work: impl FnOnce(&mut Engine<M>) -> Result<R, Error>) -> Result<R, Error> {
        let mut place = lock(&self.engine);
        *lock(&self.user) = Some(thread::current().id());
        let _user = User(&self.user);
        // Taken out: if the caller's code panics in `on_copied` or a waker, the engine is dropped, and both sides end.
        let Some(mut engine) = place.take() else { return Err(self.hosts.ended()) };
        let result = work(&mut engine);
        match &result {
            Ok(_) => *place = Some(engine),
            Err(error) => engine.fail(error.clone(), &self.hosts.fate),
        }
        result
    }

    /// Issues the copies of all that was committed, as far as there are device slots. After the last of them, ends.
    pub(crate) fn pump(&self) -> Result<(), Error> {
        if self.is_within() {
            return Ok(()); // the call around this one, or the next one, copies what was committed
        }
        let end = self.with(|engine| {
            let end = engine.pump()?;
            if end == Some(true) {
                let _apart = engine.copies.apart()?;
                engine.copies.retire_all(true)?;
            }
            Ok(end)
        })?;
        if let Some(finished) = end {
            // Not under the lock: the end wakes the caller's tasks.
            let engine = lock(&self.engine).take();
            if let Some(engine) = engine {
                engine.end(finished);
            }
        }
        Ok(())
    }

    /// Waits for the next device slot, for as long as only the caller can release it, and for the copy from the next
    /// host slot.
    pub(crate) fn wait(
        &self,
        hosts: &mut Producer<'static, usize>,
        mut waiting: Waiting<'_, '_>,
    ) -> Poll<Result<(), Error>> {
        if self.is_within() {
            return Poll::Ready(Ok(())); // without a wait
        }
        let waited = self.with(|engine| {
            loop {
                let captured = self.shared.release_captured(None);
                engine.pump()?;
                let acquired = match &mut waiting {
                    Waiting::Until(deadline) => {
                        engine.device.acquire_deadline(look_again(captured, *deadline))
                    }
                    Waiting::Task(cx) if !captured => match engine.device.poll_acquire(cx) {
                        Poll::Ready(acquired) => acquired.map_err(TryAcquireError::from),
                        Poll::Pending => return Ok(Poll::Pending),
                    },
                    _ => engine.device.try_acquire(),
                };
                match (acquired.map(drop), &waiting) {
                    (Ok(()), _) => break,
                    (Err(TryAcquireError::Full), Waiting::Until(deadline))
                        if captured && Instant::now() < *deadline => {}
                    (Err(TryAcquireError::Full), _) => {
                        return Ok(Poll::Ready(Err(Error::SlotHeld {
                            device_depth: self.shared.device_depth,
                        })));
                    }
                    (Err(_closed), _) => return Err(Error::Closed),
                }
            }
            while matches!(hosts.try_acquire(), Err(TryAcquireError::Full)) {
                let _apart = engine.copies.apart()?;
                if !engine.copies.retire(true)? {
                    break; // a reserved slot, which the caller finds
                }
            }
            Ok(Poll::Ready(Ok(())))
        });
        waited.unwrap_or_else(|error| Poll::Ready(Err(error)))
    }
}
