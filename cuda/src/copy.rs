//! The copies: issued in order on the copy stream, followed until they are done.

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use cudarc::driver::sys::{CUdeviceptr, CUevent};
use twinbuf_core::{
    AcquireTimeoutError, Consumer, Park, Producer, ReadSlot, RecvError, RecvTimeoutError, TryAcquireError,
    WriteSlot,
};

use crate::cu::{self, BesideCaptures, Current, Event, Stream};
use crate::driver::Driver;
use crate::edge;
use crate::error::Error;
use crate::slot::{DeviceBuf, HostBuf, Layout};

/// When a copy ran, by the device's clock, as far as the host's can say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyTime {
    /// When it began: never before it was issued, nor so late that it would end after this was asked for. Between
    /// the two it is as good as the device's clock, which was set beside the host's once, when the uploader was
    /// made: the two drift apart, and CUDA counts in a 32-bit float of milliseconds, so in steps of 0.06 ms after
    /// ten minutes and 0.25 ms after an hour.
    pub start: Instant,
    /// How long it took, from the two events around it: to about half a microsecond. On an idle stream the first
    /// event does not wait for the copy to be enqueued: then what the host takes for that, some microseconds, is in it.
    pub took: Duration,
}

/// A copy that is done; see [`Uploader::on_copied`](crate::Uploader::on_copied).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Copied {
    /// The number of its batch, as [`Lease::seq`](crate::Lease::seq).
    pub seq: u64,
    /// Its bytes, at least one: an empty batch is not copied.
    pub bytes: usize,
    /// When.
    pub time: CopyTime,
}

pub(crate) type OnCopied = Box<dyn FnMut(Copied) + Send>;

/// The error that ended an uploader, for both of its sides.
pub(crate) type Fate = OnceLock<Error>;

/// Turns events into times.
pub(crate) struct Clock {
    driver: &'static Driver,
    base: Event,
    /// Just before `base` was recorded on the idle stream: closer to it than the wake-up after it would be, and
    /// never later.
    at: Instant,
}

impl Clock {
    /// Waits for what is in `stream`, the copy stream.
    pub(crate) fn new(driver: &'static Driver, stream: &Stream) -> Result<Self, Error> {
        let base = Event::new(stream.context(), sys::CUevent_flags::CU_EVENT_DEFAULT as u32)?;
        // SAFETY: the stream exists.
        unsafe { cu::synchronize(stream.raw()) }?;
        let at = Instant::now();
        // SAFETY: both exist.
        unsafe { cu::record(base.raw(), stream.raw()) }?;
        Ok(Self { driver, base, at })
    }

    /// When the copy between these events ran; `None` while it does. It was issued at `issued`.
    ///
    /// # Safety
    ///
    /// Both exist, are for timing, and were recorded.
    pub(crate) unsafe fn time(
        &self,
        start: CUevent,
        copied: CUevent,
        issued: Instant,
    ) -> Result<Option<CopyTime>, Error> {
        // SAFETY: they exist, says the caller.
        let Some(took) = (unsafe { self.driver.milliseconds(start, copied) })? else { return Ok(None) };
        // SAFETY: as above, and `base` is ours.
        let Some(since) = (unsafe { self.driver.milliseconds(self.base.raw(), start) })? else {
            return Ok(None);
        };
        let duration = |ms: f32| Duration::try_from_secs_f64(f64::from(ms) / 1e3).unwrap_or_default();
        let took = duration(took);
        // It is over by now. `issued` comes last: it holds even if the device counts `took` too long.
        let latest = Instant::now().checked_sub(took).unwrap_or(issued);
        Ok(Some(CopyTime { start: (self.at + duration(since)).min(latest).max(issued), took }))
    }
}

/// The copy stream, and the copies that may still be running in it, oldest first.
///
/// `H` is what keeps a copy's host slot from being filled again, as long as it is here.
pub(crate) struct Copies<H> {
    stream: Arc<Stream>,
    /// `None` if no times are asked for.
    clock: Option<Arc<Clock>>,
    on_copied: Option<OnCopied>,
    running: VecDeque<Running<H>>,
    /// What keeps the chunks of the batch that is being copied and not complete yet.
    open: Vec<H>,
    /// Emptied ones, kept for later batches.
    spare: Vec<Vec<H>>,
    /// Whether a copy of that batch was enqueued.
    started: bool,
    /// What follows are the arguments of a call, kept for the next one.
    targets: Vec<CUdeviceptr>,
    sources: Vec<CUdeviceptr>,
    sizes: Vec<usize>,
    layout: Arc<Layout>,
    driver: &'static Driver,
    /// How many may run or wait at once: as many as there are slots on either side. Not more, so that no event is
    /// recorded anew before its copy has been followed to the end.
    limit: usize,
}

struct Running<H> {
    seq: u64,
    bytes: usize,
    start: Option<CUevent>,
    /// `None` if nothing was copied.
    copied: Option<CUevent>,
    issued: Instant,
    held: Vec<H>,
}

// SAFETY: the events are handles of the driver, which is thread-safe.
unsafe impl<H: Send> Send for Running<H> {}

/// How long to wait for the oldest copy.
#[derive(Clone, Copy, PartialEq)]
enum Patience {
    /// Not at all: look whether it is done.
    Look,
    /// Until it is done, if it is not at a first look.
    Wait,
}

impl<H> Copies<H> {
    pub(crate) fn new(
        driver: &'static Driver,
        stream: Arc<Stream>,
        layout: Arc<Layout>,
        clock: Option<Arc<Clock>>,
        on_copied: Option<OnCopied>,
        limit: usize,
    ) -> Self {
        Self {
            stream,
            clock,
            on_copied,
            running: VecDeque::with_capacity(limit),
            open: Vec::new(),
            spare: Vec::with_capacity(limit),
            started: false,
            targets: Vec::new(),
            sources: Vec::new(),
            sizes: Vec::new(),
            layout,
            driver,
            limit,
        }
    }

    /// Makes the uploader's context the calling thread's: before each copy and each wait, because `on_copied` and
    /// wakers are the caller's code, and may make another one current.
    fn bind(&self) -> Result<(), Error> {
        cu::bind(self.stream.context())
    }

    /// Begins a batch in `slot`: its copies come behind the uses of what is there. The context is the calling thread's.
    fn begin<M>(&mut self, slot: &mut DeviceBuf<M>) -> Result<(), Error> {
        slot.copy_after_uses()?;
        slot.issued = Instant::now();
        self.started = false;
        Ok(())
    }

    /// Enqueues the copies of one chunk's pieces of the host slot at `from` to the same places in `slot`.
    ///
    /// # Safety
    ///
    /// `slot` was given to `begin`, is this uploader's, and its last copy is no longer among the running ones. The
    /// pieces lie in both slots. `held` keeps the source alive and the pieces unwritten. The context is the calling
    /// thread's.
    unsafe fn part<M>(
        &mut self,
        slot: &DeviceBuf<M>,
        from: NonNull<u8>,
        pieces: &[Range<usize>],
        held: H,
    ) -> Result<(), Error> {
        // First held, then issued: whatever fails from here on, `settle` waits before it lets go.
        self.open.push(held);
        if pieces.is_empty() {
            return Ok(()); // CUDA takes no empty copies
        }
        let stream = self.stream.raw();
        if let Some(start) = slot.start.as_ref().filter(|_| !self.started) {
            // SAFETY: both exist.
            unsafe { cu::record(start.raw(), stream) }?;
        }
        self.started = true;
        let from = from.as_ptr().cast_const();
        if pieces.len() > 1 {
            self.targets.clear();
            self.sources.clear();
            self.sizes.clear();
            for piece in pieces {
                self.targets.push(slot.address() + piece.start as u64);
                self.sources.push((from.expose_provenance() + piece.start) as u64);
                self.sizes.push(piece.len());
            }
            let (targets, sources, sizes) = (&mut self.targets, &mut self.sources, &mut self.sizes);
            // SAFETY: as below, for each piece; the stream is ours.
            if let Some(copied) = unsafe { self.driver.copy_batch(targets, sources, sizes, stream) } {
                return copied;
            }
        }
        for piece in pieces {
            // SAFETY: the slot has this piece.
            let from = unsafe { from.add(piece.start) };
            let to = slot.address() + piece.start as u64;
            // SAFETY: the source is held, the target has as many bytes, says the caller, and its users have been
            // waited for; both are freed behind the copy stream's work.
            unsafe { cu::copy_to_device(to, from, piece.len(), stream) }?;
        }
        Ok(())
    }

    /// Ends the batch: its copies are followed from now on.
    fn end<M>(&mut self, seq: u64, slot: &mut DeviceBuf<M>, lens: &[usize]) -> Result<(), Error> {
        slot.set_lens(&self.layout, lens);
        let copied = self.started.then(|| slot.copied.raw());
        self.running.push_back(Running {
            seq,
            bytes: lens.iter().sum(),
            start: slot.start.as_ref().map(Event::raw),
            copied,
            issued: slot.issued,
            held: mem::replace(&mut self.open, self.spare.pop().unwrap_or_default()),
        });
        // SAFETY: both exist.
        copied.map_or(Ok(()), |copied| unsafe { cu::record(copied, self.stream.raw()) })
    }

    /// The batch that was begun will not be ended: waits for its copies, and lets go of its chunks.
    fn abandon(&mut self) -> Result<(), Error> {
        if !self.open.is_empty() {
            // SAFETY: the stream is ours.
            unsafe { cu::synchronize(self.stream.raw()) }?;
            self.open.clear();
        }
        Ok(())
    }

    /// Lets go of the oldest copy's host slot, then tells of the copy. `false` if it still runs.
    fn retire(&mut self, patience: Patience) -> Result<bool, Error> {
        let Some(oldest) = self.running.front() else { return Ok(true) };
        if let Some(copied) = oldest.copied {
            self.bind()?;
            // SAFETY: the event lives in a device slot, which lives as long as the ring.
            let done = unsafe { edge::refill_after_copy(copied, patience == Patience::Wait) }?;
            if !done {
                return Ok(false);
            }
        }
        let Some(Running { seq, bytes, start, copied, issued, mut held }) = self.running.pop_front() else {
            return Ok(true);
        };
        // First the slot, which the reader may be waiting for, then the caller's code, which may take long.
        held.clear();
        self.spare.push(held);
        if let (Some(on_copied), Some(clock), Some(start), Some(copied), 1..) =
            (&mut self.on_copied, &self.clock, start, copied, bytes)
        {
            // The slot's release may have woken a task: the caller's code.
            cu::bind(self.stream.context())?;
            // SAFETY: both live in a device slot, were recorded for this batch, and are for timing, as there is a clock.
            if let Some(time) = unsafe { clock.time(start, copied, issued) }? {
                on_copied(Copied { seq, bytes, time });
            }
        }
        Ok(true)
    }

    /// Waits until one more copy may be issued.
    pub(crate) fn make_room(&mut self) -> Result<(), Error> {
        self.retire_done()?;
        while self.running.len() >= self.limit {
            self.retire(Patience::Wait)?;
        }
        Ok(())
    }

    /// Lets go of the host slots of all copies that are done.
    fn retire_done(&mut self) -> Result<(), Error> {
        while !self.running.is_empty() && self.retire(Patience::Look)? {}
        Ok(())
    }

    pub(crate) fn retire_all(&mut self) -> Result<(), Error> {
        while !self.running.is_empty() {
            self.retire(Patience::Wait)?;
        }
        Ok(())
    }

    /// How long to sleep before the copies are looked at again; `None` if none runs. The longer they take, the more
    /// seldom.
    fn pause(&self) -> Option<Duration> {
        let newest = self.running.back()?;
        Some((newest.issued.elapsed() / 8).clamp(Duration::from_micros(50), Duration::from_millis(5)))
    }

    /// Waits for the copy stream, whatever has failed before: no copy is running after this, or its host slot is
    /// never filled again, nor freed. `false` if it could not be waited for.
    pub(crate) fn settle(&mut self) -> bool {
        if self.running.is_empty() && self.open.is_empty() {
            return true;
        }
        let settled = self.stream.settle().is_ok();
        let held = (mem::take(&mut self.running), mem::take(&mut self.open));
        if !settled {
            // A guard that is leaked keeps its ring, and so the memory.
            mem::forget(held);
        }
        settled
    }
}

impl<H> Drop for Copies<H> {
    fn drop(&mut self) {
        self.settle();
    }
}

/// How the copying ended, where nothing failed.
enum End {
    /// The producer has finished, and everything was copied.
    Finished,
    /// One of the two sides is gone.
    Abandoned,
}

/// The copy thread: until the end of the data, until nobody wants them, or until something fails.
pub(crate) fn run<'h, M>(
    host: &mut Consumer<'h, HostBuf<M>, Park>,
    mut device: Producer<'_, DeviceBuf<M>, Park>,
    copies: Copies<ReadSlot<'h, HostBuf<M>, Park>>,
    fate: &Fate,
) {
    match copy_all(host, &mut device, copies) {
        Ok(End::Finished) => device.finish(),
        Ok(End::Abandoned) => drop(device),
        Err(error) => {
            // Before the ends are seen, which make both sides look here. It is set once.
            let _ = fate.set(error);
            drop(device);
        }
    }
}

fn copy_all<'h, M>(
    host: &mut Consumer<'h, HostBuf<M>, Park>,
    device: &mut Producer<'_, DeviceBuf<M>, Park>,
    mut copies: Copies<ReadSlot<'h, HostBuf<M>, Park>>,
) -> Result<End, Error> {
    copies.bind()?;
    let _beside = BesideCaptures::enter();
    let mut seq = 0;
    // Of one chunk, kept for the next: nothing is allocated per batch.
    let (mut pieces, mut lens) = (Vec::new(), Vec::new());
    'batches: loop {
        copies.make_room()?;
        let first = match next(host, &mut copies)? {
            Ok(chunk) => chunk,
            Err(RecvError::Cancelled) => continue, // a slot of several chunks that was dropped uncommitted
            Err(end) => {
                copies.retire_all()?;
                return Ok(if end == RecvError::Finished { End::Finished } else { End::Abandoned });
            }
        };
        let Some(mut slot) = device_slot(device, &mut copies)? else { return Ok(End::Abandoned) };
        copies.bind()?;
        copies.begin(&mut slot)?;
        let mut chunk = first;
        while !chunk.last {
            let from = chunk.memory.start();
            pieces.clone_from(&chunk.pieces);
            // SAFETY: the read guard keeps the producer away from this part of the host slot; both are slots of this
            // uploader, of one size, within which its parts lie; `make_room` has followed the device slot's last copy.
            unsafe { copies.part(&slot, from, &pieces, chunk) }?;
            chunk = match next(host, &mut copies)? {
                Ok(chunk) => chunk,
                Err(RecvError::Cancelled) => {
                    copies.bind()?;
                    copies.abandon()?;
                    continue 'batches;
                }
                Err(_) => return Ok(End::Abandoned), // a batch is finished whole
            };
            copies.bind()?;
        }
        slot.meta = chunk.meta.take();
        let from = chunk.memory.start();
        pieces.clone_from(&chunk.pieces);
        lens.clone_from(&chunk.lens);
        // SAFETY: as above.
        unsafe { copies.part(&slot, from, &pieces, chunk) }?;
        copies.end(seq, &mut slot, &lens)?;
        seq += 1;
        // Handed over while the copy runs: the streams wait for it, the caller does not.
        if slot.commit().is_err() {
            return Ok(End::Abandoned);
        }
    }
}

/// Waits for the next batch, and beside it for the end of the copies that run.
///
/// A batch that comes before their end is queued behind them without a gap. If it does not come, the reader is to have
/// their slots before it has filled the one that it is at. No call waits for both: so the copies are looked at now and
/// then.
fn next<'h, M>(
    host: &mut Consumer<'h, HostBuf<M>, Park>,
    copies: &mut Copies<ReadSlot<'h, HostBuf<M>, Park>>,
) -> Result<Result<ReadSlot<'h, HostBuf<M>, Park>, RecvError>, Error> {
    while let Some(pause) = copies.pause() {
        match host.recv_timeout(pause) {
            Ok(batch) => return Ok(Ok(batch)),
            Err(RecvTimeoutError::Timeout) => copies.retire_done()?,
            Err(RecvTimeoutError::Cancelled) => return Ok(Err(RecvError::Cancelled)),
            Err(_) => break, // the end, which the call below tells again
        }
    }
    Ok(host.recv())
}

/// Waits for the next device slot, likewise. `None`: nobody receives any more.
fn device_slot<'p, 'd, H, M>(
    device: &'p mut Producer<'d, DeviceBuf<M>, Park>,
    copies: &mut Copies<H>,
) -> Result<Option<WriteSlot<'p, 'd, DeviceBuf<M>, Park>>, Error> {
    while let Some(pause) = copies.pause() {
        match device.acquire_timeout(pause).map(drop) {
            // Dropped uncommitted, it is handed out again below.
            Ok(()) => break,
            Err(AcquireTimeoutError::Timeout) => copies.retire_done()?,
            Err(AcquireTimeoutError::Closed) => return Ok(None),
        }
    }
    Ok(device.acquire().ok())
}

/// Everything that one thread needs to copy by hand, when it commits: the same slots and edges, no thread.
pub(crate) struct ByHand<M: 'static> {
    copies: Copies<()>,
    slots: Vec<HostBuf<M>>,
    /// `None` once something has failed: the consumer then sees the end, and looks for the error.
    device: Option<Producer<'static, DeviceBuf<M>, Park>>,
    /// The host slot whose turn it is.
    turn: usize,
    committed: u64,
    /// Some of the slot whose turn it is has been handed over.
    begun: bool,
    fate: Arc<Fate>,
}

impl<M: 'static> ByHand<M> {
    /// At least one slot.
    pub(crate) fn new(
        copies: Copies<()>,
        slots: Vec<HostBuf<M>>,
        device: Producer<'static, DeviceBuf<M>, Park>,
        fate: Arc<Fate>,
    ) -> Self {
        Self { copies, slots, device: Some(device), turn: 0, committed: 0, begun: false, fate }
    }

    /// Waits until the next host slot may be filled. Never for a device slot, which only the caller can release.
    pub(crate) fn acquire(&mut self, device_depth: usize) -> Result<(), Error> {
        match self.device.as_mut().map(Producer::try_acquire) {
            Some(Ok(_)) => {}
            Some(Err(TryAcquireError::Full)) => return Err(Error::AllHeld { device_depth }),
            Some(Err(TryAcquireError::Closed)) => return Err(Error::Closed),
            None => return Err(self.fate.get().cloned().unwrap_or(Error::Closed)),
        }
        let entered = Current::enter(self.copies.stream.context());
        let _beside = BesideCaptures::enter();
        entered.and_then(|_current| self.copies.make_room()).map_err(|error| self.fail(error))
    }

    /// The host slot that the next `commit` copies; free after `acquire`.
    pub(crate) fn slot(&self) -> &HostBuf<M> {
        &self.slots[self.turn]
    }

    pub(crate) fn slot_mut(&mut self) -> &mut HostBuf<M> {
        &mut self.slots[self.turn]
    }

    /// Issues the copies of that slot's pieces; with the last ones, hands the batch over.
    pub(crate) fn part(&mut self) -> Result<(), Error> {
        let Some(Ok(mut slot)) = self.device.as_mut().map(Producer::try_acquire) else {
            return Err(Error::Closed);
        };
        let (copies, host) = (&mut self.copies, &mut self.slots[self.turn]);
        // The thread may be another than `acquire`'s, or have another context by now.
        let issued = Current::enter(copies.stream.context()).and_then(|_current| {
            if !self.begun {
                copies.begin(&mut slot)?;
                self.begun = true;
            }
            // SAFETY: the slots come round in turn, and `acquire` has waited until fewer copies run than there are
            // slots on either side: neither this host slot's last copy nor this device slot's is among them. Host and
            // device slots are of one size, within which the pieces lie. What was handed over is not written to
            // (`HostSlot`), and if the batch is not ended it is waited for (`abandon`).
            unsafe { copies.part(&slot, host.memory.start(), &host.pieces, ()) }?;
            if host.last { copies.end(self.committed, &mut slot, &host.lens) } else { Ok(()) }
        });
        match issued {
            Err(error) => Err(self.fail(error)),
            Ok(()) if !host.last => Ok(()),
            Ok(()) => {
                self.committed += 1;
                self.begun = false;
                slot.meta = host.meta.take();
                self.turn = (self.turn + 1) % self.slots.len();
                slot.commit().map_err(|_| Error::Closed)
            }
        }
    }

    /// The slot whose turn it is was dropped: what was handed over of it is waited for.
    pub(crate) fn abandon(&mut self) {
        if mem::take(&mut self.begun) {
            let entered = Current::enter(self.copies.stream.context());
            let _beside = BesideCaptures::enter();
            if let Err(error) = entered.and_then(|_current| self.copies.abandon()) {
                self.fail(error);
            }
        }
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.copies.layout
    }

    /// The end of the data, or of the uploader if a copy failed.
    pub(crate) fn finish(mut self) {
        let entered = Current::enter(self.copies.stream.context());
        let beside = BesideCaptures::enter();
        match entered.and_then(|_current| self.copies.retire_all()) {
            Ok(()) => drop(self.device.take().map(Producer::finish)),
            Err(error) => drop(self.fail(error)),
        }
        drop(beside);
    }

    fn fail(&mut self, error: Error) -> Error {
        self.settle();
        // Before the end is seen, which makes the other side look here. It is set once.
        let _ = self.fate.set(error.clone());
        self.device = None;
        error
    }

    /// No copy reads the slots after this, or they are never freed.
    fn settle(&mut self) {
        if !self.copies.settle() {
            mem::forget(mem::take(&mut self.slots));
        }
    }
}

impl<M: 'static> Drop for ByHand<M> {
    fn drop(&mut self) {
        self.settle();
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use twinbuf_cuda_sim::{Options, Sim};

    use super::*;
    use crate::cu::{DeviceBytes, HostBytes};

    /// As after a long run, when the two clocks have drifted apart.
    #[test]
    fn a_copy_is_never_said_to_begin_before_it_was_issued_or_to_end_later_than_now() {
        let _sim = Sim::start(Options::default());
        let ctx = crate::context(0).unwrap();
        let stream = Arc::new(Stream::new(&ctx).unwrap());
        let mut clock = Clock::new(Driver::load().unwrap(), &stream).unwrap();
        let right = clock.at;
        let second = Duration::from_secs(1);
        let source = HostBytes::new(&ctx, 4096, 0).unwrap();
        let bytes = DeviceBytes::new(&stream, 4096).unwrap();
        let mut slot = DeviceBuf::<()>::new(&stream, bytes, true).unwrap();
        for (name, at) in [("behind", right - second), ("right", right), ("ahead", right + second)] {
            clock.at = at;
            let issued = Instant::now();
            let start = slot.start.as_ref().unwrap().raw();
            let (copied, raw) = (slot.copied.raw(), stream.raw());
            slot.len = 4096;
            // SAFETY: both are there until the stream has been waited for.
            unsafe { cu::record(start, raw) }.unwrap();
            // SAFETY: as above, and both ranges are that long.
            unsafe { cu::copy_to_device(slot.address(), source.start().as_ptr(), slot.len, raw) }.unwrap();
            // SAFETY: as above.
            unsafe { cu::record(copied, raw) }.unwrap();
            // SAFETY: as above.
            unsafe { cu::synchronize(raw) }.unwrap();
            // SAFETY: they are there, for timing, and recorded.
            let time = unsafe { clock.time(start, copied, issued) }.unwrap().unwrap();
            assert!(time.took > Duration::ZERO, "{name}");
            assert!(issued <= time.start, "{name}: {:?} too early", issued - time.start);
            let end = time.start + time.took;
            let now = Instant::now();
            assert!(end <= now, "{name}: {:?} too late", end - now);
        }
    }
}
