//! Copies committed host slots to device slots, in order, on the copy stream, and tracks each copy until it is done.
//!
//! A copy thread runs an [`Engine`] to the end of the data. With `overlap(false)` the calling threads share it in a
//! [`Hand`], and each call does what can be done without another thread.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread, ThreadId};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent;
use twinbuf_core::{Consumer, KeptSlot, Producer, RecvError, TryAcquireError};

use crate::cu::{self, Current, Event, Stream};
use crate::edge;
use crate::error::{Error, Fate, OnDrop, ended, ending, lock};
use crate::lease::Shared;
use crate::slot::{DeviceBuf, HostBuf};
use crate::time::{Clock, Copied, OnCopied};

/// A committed host slot. It is not refilled while this guard exists.
type Source<M> = KeptSlot<'static, HostBuf<M>>;

/// The copy stream, and the copies that may still be running, oldest first.
pub(crate) struct Copies<M: 'static> {
    pub(crate) stream: Arc<Stream>,
    /// What to call after each copy, and the clock of its time.
    pub(crate) on_copied: Option<(OnCopied, Arc<Clock>)>,
    pub(crate) running: VecDeque<Running<M>>,
    /// The task that waits for a device slot, without a copy thread. If the copies end, no slot becomes free.
    pub(crate) task: Option<Waker>,
}

pub(crate) struct Running<M: 'static> {
    start: Option<CUevent>,
    /// `None` if nothing was copied.
    copied: Option<CUevent>,
    issued: Instant,
    source: Source<M>,
}

// SAFETY: the events are handles of the driver, which is thread-safe.
unsafe impl<M: Send> Send for Running<M> {}

impl<M> Copies<M> {
    /// Enqueues the copy of a batch, and tracks it from now on.
    ///
    /// # Safety
    ///
    /// `slot` belongs to this uploader, and its previous copy has been retired. The batch fits in it. The context is
    /// current.
    unsafe fn issue(&mut self, source: Source<M>, slot: &mut DeviceBuf<M>) -> Result<(), Error> {
        slot.copy_after_uses()?;
        (slot.len, slot.issued) = (source.len, Instant::now());
        let (stream, from) = (self.stream.raw(), source.memory.start);
        let (start, issued) = (slot.start.as_ref().map(Event::raw), slot.issued);
        // An empty batch is not copied, although the driver would accept it: there is nothing to wait for.
        let copied = (slot.len > 0).then(|| slot.copied.raw());
        // Track the copy before it is enqueued: if a call below fails, the drop of `Copies` waits before it drops
        // `source`.
        self.running.push_back(Running { start, copied, issued, source });
        let Some(copied) = copied else { return Ok(()) };
        if let Some(start) = start {
            // SAFETY: both exist.
            unsafe { cu::record(start, stream) }?;
        }
        // SAFETY: `running` keeps the source; the caller guarantees the bounds. The copy stream waits for earlier uses
        // of the target, and both slots are freed after the copy stream's work.
        unsafe { cu::copy_to_device(slot.address, from.as_ptr(), slot.len, stream) }?;
        // SAFETY: both exist.
        unsafe { cu::record(copied, stream) }
    }

    /// Releases the oldest copy's host slot, then calls `on_copied`. Returns `false` if no copy runs or, unless it is
    /// to `wait`, if the oldest still runs.
    fn retire(&mut self, wait: bool) -> Result<bool, Error> {
        if let Some(copied) = self.running.front().and_then(|oldest| oldest.copied) {
            // SAFETY: the event is in a device slot, which lives as long as the ring.
            if !unsafe { edge::refill_after_copy(copied, wait) }? {
                return Ok(false);
            }
        }
        let Some(Running { start, copied, issued, source }) = self.running.pop_front() else {
            return Ok(false);
        };
        // Release the slot first: the reader may be waiting for it, and the caller's code may run long.
        let (seq, bytes) = (source.seq(), source.len);
        drop(source);
        if let (Some((on_copied, clock)), Some(start), Some(copied)) = (&mut self.on_copied, start, copied) {
            // SAFETY: both events are in a device slot and were recorded for this batch. A clock's events are for
            // timing.
            if let Some(time) = unsafe { clock.time(start, copied, issued) }? {
                on_copied(Copied { seq, bytes, time });
            }
        }
        Ok(true)
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
    /// leaked, neither refilled nor freed, and with it the ring of the host slots.
    fn drop(&mut self) {
        if !self.running.is_empty() && self.stream.settle().is_err() {
            mem::forget(mem::take(&mut self.running));
        }
        self.task.take().into_iter().for_each(Waker::wake);
    }
}

/// The two rings, and the copies between them.
pub(crate) struct Engine<M: 'static> {
    // Fields drop in this order: first `copies` waits for the running copies, then `device` drops, and whoever receives
    // sees the end and may free the memory of the device slots. `host` may drop before: `copies` has its slots in use.
    pub(crate) host: Consumer<'static, HostBuf<M>>,
    pub(crate) copies: Copies<M>,
    /// The next batch to be copied, or that its host slot was dropped without a commit.
    pub(crate) next: Option<Result<Source<M>, RecvError>>,
    pub(crate) device: Producer<'static, DeviceBuf<M>>,
}

/// Wakes the copy thread, which waits for a batch in [`thread::park`].
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What the engine needs before it can issue the next copy, or why there is no next copy.
enum Needs {
    /// The end of the oldest copy.
    Room,
    Batch,
    DeviceSlot,
    /// No batch follows. `false` if the data may be incomplete.
    End(bool),
}

impl<M: 'static> Engine<M> {
    /// The body of the copy thread: copies until the data end, a side is dropped, or something fails.
    pub(crate) fn run(mut self, fate: &Fate) {
        match self.copy_all() {
            Ok(finished) => self.end(finished),
            // Set the error before the drop of `self` ends the rings: both sides read it when they see the end.
            Err(error) => drop(fate.set(error)),
        }
    }

    fn copy_all(&mut self) -> Result<bool, Error> {
        let _apart = cu::apart(self.copies.stream.context())?;
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut cx = Context::from_waker(&waker);
        loop {
            while self.copies.retire(false)? {}
            // Nothing may run between the last look at the ring, in `advance`, and `park` below: the caller's code
            // could use up the wakeup by parking this thread itself.
            let needs = self.advance(&mut cx)?;
            // A thread cannot wait for a slot and for an event at once, so it polls the events while copies run. A
            // batch that is committed in the meantime unparks it, and is enqueued behind those copies.
            let pause = self.copies.pause();
            match (needs, pause) {
                (Needs::Room, _) => while self.copies.retire(self.is_full())? {},
                // Nobody receives any more. Do not wait: a worker that was left behind may never commit its slot.
                (Needs::Batch, _) if self.device.is_closed() => return Ok(false),
                (Needs::Batch, Some(pause)) => thread::park_timeout(pause),
                (Needs::Batch, None) => thread::park(),
                // Wait for a free slot. Its guard is dropped without a commit, so `advance` acquires the slot again.
                (Needs::DeviceSlot, Some(pause)) => drop(self.device.acquire_timeout(pause)),
                (Needs::DeviceSlot, None) => drop(self.device.acquire()),
                (Needs::End(finished), _) => {
                    while self.copies.retire(true)? {}
                    return Ok(finished);
                }
            }
        }
    }

    /// Whether the oldest copy must end before the next batch's may be issued: the device slot has an event for one copy.
    /// Batches that are not copied use device slots too.
    fn is_full(&self) -> bool {
        let (Some(Ok(next)), Some(oldest)) = (&self.next, self.copies.running.front()) else { return false };
        next.seq() - oldest.source.seq() >= self.device.depth() as u64
    }

    /// Issues all copies that can be issued without a wait. If the next batch is not committed, wakes the task of `cx`
    /// when it is.
    fn advance(&mut self, cx: &mut Context<'_>) -> Result<Needs, Error> {
        loop {
            if self.next.is_none() {
                self.next = Some(match self.host.poll_recv(cx) {
                    Poll::Ready(Ok(Some(source))) => Ok(source.keep()),
                    Poll::Ready(Err(RecvError::Cancelled)) => Err(RecvError::Cancelled),
                    // Also if the next host slot is still the source of a copy in flight.
                    Poll::Pending => return Ok(Needs::Batch),
                    Poll::Ready(Ok(None)) => return Ok(Needs::End(true)),
                    Poll::Ready(Err(_abandoned)) => return Ok(Needs::End(false)),
                });
            }
            if self.is_full() {
                return Ok(Needs::Room);
            }
            let mut slot = match self.device.try_acquire() {
                Ok(slot) => slot,
                Err(TryAcquireError::Full) => return Ok(Needs::DeviceSlot),
                Err(_closed) => return Err(Error::Closed),
            };
            let Some(Ok(mut source)) = self.next.take() else {
                // Pass the cancellation on: the receiver gets `Cancelled` for a reserved slot that was dropped.
                drop(slot.reserve());
                continue;
            };
            // Enter the context: this is the caller's thread, or the caller's code may have left another one current.
            let _current = Current::enter(self.copies.stream.context())?;
            let meta = source.meta.take();
            // SAFETY: both slots have the uploader's slot size, and the length was checked against it (`HostBuf::put`).
            // Slots are used in turn, one for each batch, so `is_full` has waited for the previous copy of this slot.
            unsafe { self.copies.issue(source, &mut slot) }?;
            slot.meta = meta;
            // Hand the batch over while the copy runs: the streams that use it wait for the copy, the host does not.
            slot.commit().map_err(|_closed| Error::Closed)?;
        }
    }

    /// Issues on the caller's thread all copies that need no other thread. After the last batch, returns whether the
    /// filling side called `finish`.
    fn pump(&mut self) -> Result<Option<bool>, Error> {
        loop {
            // No task: the calls of both sides look for batches.
            match self.advance(&mut Context::from_waker(Waker::noop()))? {
                Needs::Room => {
                    let _apart = cu::apart(self.copies.stream.context())?;
                    while self.copies.retire(self.is_full())? {}
                }
                Needs::End(finished) => {
                    let _apart = cu::apart(self.copies.stream.context())?;
                    while self.copies.retire(true)? {}
                    return Ok(Some(finished));
                }
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
}

/// The engine of an uploader without a copy thread.
pub(crate) struct Hand<M: 'static> {
    /// `None` after the end.
    pub(crate) engine: Mutex<Option<Box<Engine<M>>>>,
    /// The thread that has locked `engine`. The engine calls the caller's code, which may call the uploader again.
    pub(crate) user: Mutex<Option<ThreadId>>,
    pub(crate) shared: Arc<Shared<M>>,
}

/// How to wait for a host slot.
pub(crate) enum Waiting<'a, 'c> {
    No,
    Until(Instant),
    Forever,
    Task(&'a mut Context<'c>),
}

impl<M: 'static> Hand<M> {
    /// Whether another call of this uploader is running on this thread: `on_copied` or a waker then makes this one.
    pub(crate) fn is_within(&self) -> bool {
        *lock(&self.user) == Some(thread::current().id())
    }

    /// Calls `work`. Its error ends the uploader. Within another call, returns `within`.
    fn with<R>(&self, within: R, work: impl FnOnce(&mut Engine<M>) -> Result<R, Error>) -> Result<R, Error> {
        if self.is_within() {
            return Ok(within);
        }
        let mut place = lock(&self.engine);
        *lock(&self.user) = Some(thread::current().id());
        // Also after a panic of the caller's code.
        let _user = OnDrop(|| *lock(&self.user) = None);
        // Take the engine out: if a waker or `on_copied` panics, the engine is dropped, and both sides end.
        let Some(mut engine) = place.take() else { return Err(ended(&self.shared.fate)) };
        // Set the error before the drop of the engine ends the rings: both sides read it when they see the end.
        let result = ending(&self.shared.fate, work(&mut engine));
        if result.is_ok() {
            *place = Some(engine);
        }
        result
    }

    /// Issues the copies of the committed batches, as far as device slots are free. After the last batch, ends the
    /// engine.
    pub(crate) fn pump(&self) -> Result<(), Error> {
        // Within another call, that one or the next copies what was committed.
        if let Some(finished) = self.with(None, Engine::pump)? {
            let engine = lock(&self.engine).take();
            engine.into_iter().for_each(|engine| engine.end(finished));
        }
        Ok(())
    }

    /// Waits for the next device slot as `waiting` allows (`Forever` does not: only the caller may be able to release
    /// it), and for the copy from the next host slot.
    pub(crate) fn wait(
        &self,
        hosts: &mut Producer<'static, HostBuf<M>>,
        mut waiting: Waiting<'_, '_>,
    ) -> Poll<Result<(), Error>> {
        loop {
            let found = self.look(hosts, &mut waiting);
            let rest = match (&found, &waiting) {
                (Poll::Ready(Err(Error::SlotHeld { .. })), Waiting::Until(deadline)) => {
                    deadline.saturating_duration_since(Instant::now())
                }
                _ => return found,
            };
            if rest.is_zero() {
                return found;
            }
            // Not with the engine locked: a receive call of another thread, which needs it, may free the slot.
            thread::sleep(rest.min(Duration::from_millis(1)));
        }
    }

    /// Looks for the next device slot. If it is free, waits for the copy from the next host slot.
    fn look(
        &self,
        hosts: &mut Producer<'static, HostBuf<M>>,
        waiting: &mut Waiting<'_, '_>,
    ) -> Poll<Result<(), Error>> {
        // Within another call, without a wait.
        self.with(Poll::Ready(Ok(())), |engine| {
            let captured = self.shared.release_captured(None);
            engine.pump()?;
            let acquired = match waiting {
                Waiting::Task(cx) if !captured => match engine.device.poll_acquire(cx) {
                    Poll::Ready(acquired) => acquired.map_err(TryAcquireError::from),
                    Poll::Pending => {
                        engine.copies.task = Some(cx.waker().clone());
                        return Ok(Poll::Pending);
                    }
                },
                _ => engine.device.try_acquire(),
            };
            match acquired.map(drop) {
                Ok(()) => engine.copies.task = None,
                Err(TryAcquireError::Full) => {
                    return Ok(Poll::Ready(Err(Error::SlotHeld { device_depth: engine.device.depth() })));
                }
                Err(_closed) => return Err(Error::Closed),
            }
            while matches!(hosts.try_acquire(), Err(TryAcquireError::Full)) {
                let _apart = cu::apart(engine.copies.stream.context())?;
                if !engine.copies.retire(true)? {
                    break; // a reserved slot, which the caller finds
                }
            }
            Ok(Poll::Ready(Ok(())))
        })?
    }
}
