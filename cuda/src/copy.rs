//! The copies: issued in order on the copy stream, followed until they are done.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent;
use cudarc::driver::{CudaStream, sys};
use twinbuf_core::{Consumer, Park, Producer, ReadSlot, RecvError, RecvTimeoutError, TryAcquireError};

use crate::cu::{self, Event};
use crate::driver::Driver;
use crate::edge;
use crate::error::Error;
use crate::slot::{DeviceBuf, HostBuf};

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
    pub(crate) fn new(driver: &'static Driver, stream: &CudaStream) -> Result<Self, Error> {
        let base = Event::new(stream.context(), sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        // SAFETY: the stream exists.
        unsafe { cu::synchronize(stream.cu_stream()) }?;
        let at = Instant::now();
        // SAFETY: both exist.
        unsafe { cu::record(base.raw(), stream.cu_stream()) }?;
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
    stream: Arc<CudaStream>,
    clock: Arc<Clock>,
    on_copied: Option<OnCopied>,
    running: VecDeque<Running<H>>,
    /// How many may run or wait at once. Not more than there are slots on either side, so that no event is
    /// recorded anew before its copy has been followed to the end.
    limit: usize,
}

struct Running<H> {
    seq: u64,
    bytes: usize,
    start: CUevent,
    copied: CUevent,
    issued: Instant,
    _held: H,
}

// SAFETY: the events are handles of the driver, which is thread-safe.
unsafe impl<H: Send> Send for Running<H> {}

impl<H> Copies<H> {
    pub(crate) fn new(
        stream: Arc<CudaStream>,
        clock: Arc<Clock>,
        on_copied: Option<OnCopied>,
        limit: usize,
    ) -> Self {
        Self { stream, clock, on_copied, running: VecDeque::with_capacity(limit), limit }
    }

    /// Makes the uploader's context the calling thread's: before each copy and each wait, because `on_copied` and
    /// wakers are the caller's code, and may make another one current.
    fn bind(&self) -> Result<(), Error> {
        cu::bind(self.stream.context())
    }

    /// Enqueues the copy of `len` bytes at `from` into `slot`, behind the uses of what is there.
    ///
    /// # Safety
    ///
    /// `held` keeps the source alive and unwritten. `slot` is this uploader's, and its last copy is no longer
    /// among the running ones.
    unsafe fn issue<M>(
        &mut self,
        seq: u64,
        from: *const u8,
        len: usize,
        slot: &mut DeviceBuf<M>,
        held: H,
    ) -> Result<(), Error> {
        slot.copy_after_uses()?;
        slot.len = len;
        slot.issued = Instant::now();
        let (stream, start, copied) = (self.stream.cu_stream(), slot.start.raw(), slot.copied.raw());
        // First held, then issued: whatever fails from here on, `settle` waits before it lets go.
        self.running.push_back(Running { seq, bytes: len, start, copied, issued: slot.issued, _held: held });
        if len == 0 {
            return Ok(()); // CUDA takes no empty copies
        }
        // SAFETY: both exist.
        unsafe { cu::record(start, stream) }?;
        // SAFETY: the source is page-locked and held, the target has at least as many bytes (`commit` checks it)
        // and its users have been waited for; both are freed behind the copy stream's work.
        unsafe { cu::copy_to_device(slot.address, from, len, stream) }?;
        // SAFETY: both exist.
        unsafe { cu::record(copied, stream) }
    }

    /// Waits for the oldest copy, and lets go of its host slot.
    fn retire(&mut self) -> Result<(), Error> {
        let Some(&Running { seq, bytes, start, copied, issued, .. }) = self.running.front() else {
            return Ok(());
        };
        if bytes > 0 {
            self.bind()?;
            // SAFETY: the event lives in a device slot, which lives as long as the ring.
            unsafe { edge::refill_after_copy(copied) }?;
            if let Some(on_copied) = &mut self.on_copied {
                // SAFETY: as above, and both were recorded by `issue`.
                if let Some(time) = unsafe { self.clock.time(start, copied, issued) }? {
                    on_copied(Copied { seq, bytes, time });
                }
            }
        }
        self.running.pop_front();
        Ok(())
    }

    /// Waits until one more copy may be issued.
    pub(crate) fn make_room(&mut self) -> Result<(), Error> {
        while self.running.len() >= self.limit {
            self.retire()?;
        }
        Ok(())
    }

    /// Lets go of all host slots, if no copy is running any more.
    fn retire_if_done(&mut self) -> Result<(), Error> {
        if let Some(newest) = self.running.iter().rev().find(|copy| copy.bytes > 0) {
            self.bind()?;
            // SAFETY: the event lives in a device slot, which lives as long as the ring.
            if !unsafe { cu::is_complete(newest.copied) }? {
                return Ok(());
            }
        }
        self.retire_all()
    }

    pub(crate) fn retire_all(&mut self) -> Result<(), Error> {
        while !self.running.is_empty() {
            self.retire()?;
        }
        Ok(())
    }

    /// Waits for the copy stream, whatever has failed before: no copy is running after this, or its host slot is
    /// never filled again.
    pub(crate) fn settle(&mut self) {
        let bound = self.bind();
        // SAFETY: the stream is ours.
        let settled = bound.and_then(|()| unsafe { cu::synchronize(self.stream.cu_stream()) });
        let running = mem::take(&mut self.running);
        if settled.is_err() {
            mem::forget(running);
        }
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
    host: &'h Consumer<'_, HostBuf<M>, Park>,
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
    host: &'h Consumer<'_, HostBuf<M>, Park>,
    device: &mut Producer<'_, DeviceBuf<M>, Park>,
    mut copies: Copies<ReadSlot<'h, HostBuf<M>, Park>>,
) -> Result<End, Error> {
    copies.bind()?;
    cu::ignore_captures_elsewhere();
    loop {
        let mut batch = match next(host, &mut copies)? {
            Ok(batch) => batch,
            Err(end) => {
                copies.retire_all()?;
                return Ok(if end == RecvError::Finished { End::Finished } else { End::Abandoned });
            }
        };
        let mut slot = match device.try_acquire() {
            Ok(slot) => slot,
            Err(TryAcquireError::Full) => {
                // Nothing can be queued now; so the reader may have its slot as soon as the copy is done.
                copies.retire_all()?;
                let Ok(slot) = device.acquire() else { return Ok(End::Abandoned) };
                slot
            }
            Err(TryAcquireError::Closed) => return Ok(End::Abandoned),
        };
        copies.bind()?;
        slot.meta = batch.meta.take();
        let (seq, from, len) = (batch.seq(), batch.bytes.as_ptr(), batch.len);
        // SAFETY: the read guard keeps the producer away from the host slot; both are slots of this uploader, and
        // `make_room` follows each copy.
        unsafe { copies.issue(seq, from, len, &mut slot, batch) }?;
        // Handed over while the copy runs: the streams wait for it, the caller does not.
        if slot.commit().is_err() {
            return Ok(End::Abandoned);
        }
        copies.make_room()?;
    }
}

/// Waits for the next batch, and beside it for the end of the copies that run.
///
/// A batch that comes before their end is queued behind them without a gap. If it does not come, the reader is to have
/// their slots before it has filled the one that it is at. No call waits for both: so the copies are looked at now and
/// then, the more seldom the longer they take.
fn next<'h, M>(
    host: &'h Consumer<'_, HostBuf<M>, Park>,
    copies: &mut Copies<ReadSlot<'h, HostBuf<M>, Park>>,
) -> Result<Result<ReadSlot<'h, HostBuf<M>, Park>, RecvError>, Error> {
    while let Some(newest) = copies.running.back() {
        let pause = (newest.issued.elapsed() / 8).clamp(Duration::from_micros(50), Duration::from_millis(5));
        match host.recv_timeout(pause) {
            Ok(batch) => return Ok(Ok(batch)),
            Err(RecvTimeoutError::Timeout) => copies.retire_if_done()?,
            Err(_) => break, // the end, which the call below tells again
        }
    }
    Ok(host.recv())
}

/// Everything that one thread needs to copy by hand, when it commits: the same slots and edges, no thread.
pub(crate) struct ByHand<M: 'static> {
    // Dropped in this order: first the copies are waited for.
    copies: Copies<()>,
    slots: Vec<HostBuf<M>>,
    /// `None` once something has failed: the consumer then sees the end, and looks for the error.
    device: Option<Producer<'static, DeviceBuf<M>, Park>>,
    /// The host slot whose turn it is.
    turn: usize,
    committed: u64,
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
        Self { copies, slots, device: Some(device), turn: 0, committed: 0, fate }
    }

    /// Waits until the next host slot may be filled. Never for a device slot, which only the caller can release.
    pub(crate) fn acquire(&mut self, device_depth: usize) -> Result<(), Error> {
        match self.device.as_mut().map(Producer::try_acquire) {
            Some(Ok(_)) => {}
            Some(Err(TryAcquireError::Full)) => return Err(Error::AllHeld { device_depth }),
            Some(Err(TryAcquireError::Closed)) => return Err(Error::Closed),
            None => return Err(self.fate.get().cloned().unwrap_or(Error::Closed)),
        }
        self.copies.make_room().map_err(|error| self.fail(error))
    }

    /// The host slot that the next `commit` copies; free after `acquire`.
    pub(crate) fn slot(&self) -> &HostBuf<M> {
        &self.slots[self.turn]
    }

    pub(crate) fn slot_mut(&mut self) -> &mut HostBuf<M> {
        &mut self.slots[self.turn]
    }

    /// Issues the copy of the first `len` bytes of that slot.
    pub(crate) fn commit(&mut self, len: usize, meta: M) -> Result<(), Error> {
        let Some(Ok(mut slot)) = self.device.as_mut().map(Producer::try_acquire) else {
            return Err(Error::Closed);
        };
        slot.meta = Some(meta);
        let from = self.slots[self.turn].bytes.as_ptr();
        // The thread may be another than `acquire`'s, or have another context by now.
        let issued = self.copies.bind().and_then(|()| {
            // SAFETY: the slots come round in turn, and `acquire` has waited until fewer copies run than there are
            // slots on either side: neither this host slot's last copy nor this device slot's is among them.
            unsafe { self.copies.issue(self.committed, from, len, &mut slot, ()) }
        });
        match issued {
            Ok(()) => {
                self.committed += 1;
                self.turn = (self.turn + 1) % self.slots.len();
                slot.commit().map_err(|_| Error::Closed)
            }
            Err(error) => Err(self.fail(error)),
        }
    }

    /// The end of the data, or of the uploader if a copy failed.
    pub(crate) fn finish(mut self) {
        match self.copies.retire_all() {
            Ok(()) => drop(self.device.take().map(Producer::finish)),
            Err(error) => drop(self.fail(error)),
        }
    }

    fn fail(&mut self, error: Error) -> Error {
        self.copies.settle();
        // Before the end is seen, which makes the other side look here. It is set once.
        let _ = self.fate.set(error.clone());
        self.device = None;
        error
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use twinbuf_cuda_sim::{Options, Sim};

    use super::*;
    use crate::cu::Pinned;

    /// As after a long run, when the two clocks have drifted apart.
    #[test]
    fn a_copy_is_never_said_to_begin_before_it_was_issued_or_to_end_later_than_now() {
        let _sim = Sim::start(Options::default());
        let ctx = crate::context(0).unwrap();
        let stream = ctx.new_stream().unwrap();
        let mut clock = Clock::new(Driver::load().unwrap(), &stream).unwrap();
        let right = clock.at;
        let second = Duration::from_secs(1);
        let source = Pinned::new(&ctx, 4096, 0).unwrap();
        let mut slot = DeviceBuf::<()>::new(&stream, 4096).unwrap();
        for (name, at) in [("behind", right - second), ("right", right), ("ahead", right + second)] {
            clock.at = at;
            let issued = Instant::now();
            let (start, copied, raw) = (slot.start.raw(), slot.copied.raw(), stream.cu_stream());
            slot.len = 4096;
            // SAFETY: both are there until the stream has been waited for.
            unsafe { cu::record(start, raw) }.unwrap();
            // SAFETY: as above, and both ranges are that long.
            unsafe { cu::copy_to_device(slot.address, source.as_ptr(), slot.len, raw) }.unwrap();
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
