//! The upload stage: copies batches from page-locked host slots into device slots, on a separate stream.

use std::collections::VecDeque;
use std::fmt;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use twinbuf_cuda::cudarc::driver::CudaContext;
use twinbuf_cuda::{
    Copied, CopyTime, DeviceBatches, HostSlot, HostSlots, Lease, ReservedSlot, Uploader, lent,
};
use twinbuf_mmap::{BatchIndices, Buffer};

use super::sealed::{self, Batches, SlotGuard, Slots};
use super::{Backend, NoSlot, Received, Sides, Waiting};
use crate::batch::checkpoint::Checkpoint;
use crate::error::Error;
use crate::observe::log::{Event, What};
use crate::observe::trace::Track;
use crate::slot::{BatchMeta, Naming, Ticket};
use crate::transform::RecordType;

/// The backend of a loader that copies batches to a CUDA device. Its epochs yield [`DeviceBatch`].
/// [`LoaderBuilder::cuda`](crate::loader::LoaderBuilder::cuda) selects it.
#[derive(Clone, Debug)]
pub struct Cuda {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) device_depth: usize,
}

/// One batch in device memory: a [`Lease`] of a device slot, and the position of the batch.
///
/// Call [`on`](Lease::on) for each stream that uses the batch. Drop the batch as soon as the work that reads it is
/// *enqueued*: the next copy into the slot waits for these streams.
pub struct DeviceBatch {
    lease: Lease<BatchMeta>,
}

impl DeviceBatch {
    /// Returns the epoch of the batch, from 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.lease.meta().ticket.epoch
    }

    /// Returns the step of the batch within its epoch, from 0.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.lease.meta().ticket.step
    }

    /// Returns the indices of the batch's records in the data set.
    #[must_use]
    pub fn plan(&self) -> &BatchIndices {
        &self.lease.meta().records().plan
    }

    /// Returns the byte range of a field in the batch. Fields are numbered from 0. Returns `None` if the field does
    /// not exist. Pass the range to [`on_range`](Lease::on_range):
    /// `batch.on_range::<i64>(batch.field_range(1).ok_or("no labels")?, &stream)?`.
    #[must_use]
    pub fn field_range(&self, field: usize) -> Option<Range<usize>> {
        self.lease.meta().range(field)
    }

    /// Returns the element type and the shape of one record of a field, after the transforms. Returns `None` if the
    /// field does not exist.
    #[must_use]
    pub fn field_type(&self, field: usize) -> Option<&RecordType> {
        self.lease.meta().records().layout.fields.get(field)
    }

    /// Returns the position after this batch. A loader that resumes from it delivers the next batch first.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.lease.meta().checkpoint()
    }

    /// Returns the lease of the slot, for example to call [`Lease::into_owned`].
    #[must_use]
    pub fn into_lease(self) -> Lease<BatchMeta> {
        self.lease
    }
}

impl From<Lease<BatchMeta>> for DeviceBatch {
    #[doc(hidden)]
    fn from(lease: Lease<BatchMeta>) -> Self {
        Self { lease }
    }
}

impl Deref for DeviceBatch {
    type Target = Lease<BatchMeta>;

    fn deref(&self) -> &Lease<BatchMeta> {
        &self.lease
    }
}

impl fmt::Debug for DeviceBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBatch")
            .field("epoch", &self.epoch())
            .field("step", &self.step())
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}

/// The reader's side: page-locked host slots.
#[allow(missing_debug_implementations, reason = "of a sealed trait")]
pub struct HostSide {
    host: HostSlots<BatchMeta>,
    log: Arc<CopyLog>,
    /// `None` if batches are smaller, or without overlap.
    chunk: Option<usize>,
}

/// A page-locked host slot to be filled.
#[allow(missing_debug_implementations, reason = "of a sealed trait")]
pub struct HostGuard<'s> {
    /// `None` once a part was handed over.
    slot: Option<HostSlot<'s, BatchMeta>>,
    reserved: Option<ReservedSlot<BatchMeta>>,
    log: &'s CopyLog,
    chunk: Option<usize>,
}

/// The caller's side: leases of device slots.
#[allow(missing_debug_implementations, reason = "of a sealed trait")]
pub struct DeviceSide {
    device: DeviceBatches<BatchMeta>,
    /// Device slots.
    depth: usize,
    log: Arc<CopyLog>,
    /// Without overlap each copy is waited for before the caller has its batch, one stage after the other.
    inline: bool,
}

/// Times of the copies: the batch of each, when it was done, and the total.
struct CopyLog(Mutex<Copies>);

struct Copies {
    track: Option<Track>,
    naming: Naming,
    /// Batches whose copies are coming, by the uploader's number.
    coming: VecDeque<(u64, Ticket)>,
    time: Duration,
    bytes: u64,
    /// The last copies: more than there are slots, so they include the batch in use.
    last: VecDeque<(Ticket, Event)>,
}

/// How many copies are remembered.
const LAST: usize = 32;

impl CopyLog {
    fn lock(&self) -> MutexGuard<'_, Copies> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copied(&self, seq: u64, bytes: usize, time: CopyTime) {
        let mut copies = self.lock();
        // Each was noted before its batch was committed, so it is there; those before it were empty.
        let ticket = loop {
            match copies.coming.pop_front() {
                Some((committed, ticket)) if committed == seq => break ticket,
                Some(_) => {}
                None => return,
            }
        };
        // The host's clock and the device's are aligned to about the time of a call, and the bounds of `CopyTime::start` move
        // single copies. A stream runs one after the other: from the end of the one before no copy began earlier.
        let before = copies.last.back().map(|(_, event)| event.end);
        let start = before.map_or(time.start, |end| end.max(time.start));
        let (batch, end) = (copies.naming.id(ticket), start + time.took);
        let event = Event { what: What::Transfer, batch, start, end, bytes };
        if let Some(track) = &mut copies.track {
            track.add(&event);
            track.write_if_due(end);
        }
        copies.time += time.took;
        copies.bytes += bytes as u64;
        if copies.last.len() == LAST {
            copies.last.pop_front();
        }
        copies.last.push_back((ticket, event));
    }
}

impl Backend for Cuda {
    type Batch = DeviceBatch;
}

impl sealed::Backend for Cuda {
    type Content = [u8];
    type Slots = HostSide;
    type Batches = DeviceSide;

    const WAIT: What = What::DeviceWait;

    fn device_depth(&self) -> usize {
        self.device_depth
    }

    fn make(self, sides: &mut Sides<'_>) -> Result<sealed::Lanes<Self>, Error> {
        (0..sides.lanes).map(|lane| self.lane(lane, sides)).collect()
    }
}

impl Cuda {
    /// The two sides of a lane, with a separate copy stream.
    fn lane(&self, lane: usize, sides: &mut Sides<'_>) -> Result<(HostSide, DeviceSide), Error> {
        let (id, row) = sides.row(lane, "upload");
        let log = Arc::new(CopyLog(Mutex::new(Copies {
            track: sides.trace.clone().map(|trace| Track::new(trace, id + 1, &row)),
            naming: sides.naming.clone(),
            coming: VecDeque::new(),
            time: Duration::ZERO,
            bytes: 0,
            last: VecDeque::with_capacity(LAST),
        })));
        let mut uploader = Uploader::new(&self.context, sides.slot)
            .host_depth(sides.host_depth)
            .device_depth(self.device_depth)
            .overlap(sides.overlap)
            // A report may be asked for at any time, and has the time of the copies.
            .times(true);
        let chunk = sides.chunk(usize::MAX);
        if let Some(chunk) = chunk {
            uploader = uploader.chunk_bytes(chunk);
        }
        if let Some(memory) = sides.lent() {
            uploader = uploader.host_slots(memory.into_iter().map(lent_host).collect());
        }
        if sides.overlap {
            let log = log.clone();
            uploader =
                uploader.on_copied(move |Copied { seq, bytes, time, .. }| log.copied(seq, bytes, time));
        }
        let (host, device) = uploader.build().map_err(|error| match error {
            twinbuf_cuda::Error::Option { option, wanted, found } => Error::Option { option, wanted, found },
            error => Error::Device(error.into()),
        })?;
        let slots = HostSide { host, log: log.clone(), chunk };
        Ok((slots, DeviceSide { device, depth: self.device_depth, log, inline: !sides.overlap }))
    }
}

/// A slot's memory; the uploader keeps it.
fn lent_host(mut memory: Buffer) -> lent::Host {
    let bytes = NonNull::from(&mut memory[..]);
    // SAFETY: the bytes stay where they are when the buffer moves, and nothing reaches the buffer from now on.
    unsafe { lent::Host::new(bytes.cast(), bytes.len(), memory) }
}

impl HostSide {
    fn guard<'s>(
        slot: Result<HostSlot<'s, BatchMeta>, twinbuf_cuda::Error>,
        log: &'s CopyLog,
        chunk: Option<usize>,
    ) -> Result<HostGuard<'s>, NoSlot> {
        match slot {
            Ok(slot) => Ok(HostGuard { slot: Some(slot), reserved: None, log, chunk }),
            Err(twinbuf_cuda::Error::SlotHeld { .. } | twinbuf_cuda::Error::Full) => Err(NoSlot::Held),
            Err(_) => Err(NoSlot::Gone),
        }
    }
}

impl Slots for HostSide {
    type Content = [u8];
    type Guard<'s> = HostGuard<'s>;

    fn acquire(&mut self) -> Result<HostGuard<'_>, NoSlot> {
        Self::guard(self.host.acquire(), &self.log, self.chunk)
    }

    fn acquire_within(&mut self, timeout: Duration) -> Result<HostGuard<'_>, NoSlot> {
        Self::guard(self.host.acquire_deadline(Instant::now() + timeout.min(LONGEST)), &self.log, self.chunk)
    }

    fn finish(self) {
        self.host.finish();
    }
}

impl SlotGuard for HostGuard<'_> {
    type Content = [u8];

    fn content(&mut self) -> &mut [u8] {
        match (&mut self.slot, &mut self.reserved) {
            (Some(slot), _) => slot,
            (None, Some(reserved)) => reserved,
            (None, None) => unreachable!("one of them until the commit"),
        }
    }

    fn chunk(&self) -> Option<usize> {
        self.chunk
    }

    fn flush(&mut self, filled: usize) -> usize {
        // A slot that is not reserved is handed out again, if the batch does not come.
        if self.slot.is_some() && self.chunk.is_none_or(|chunk| filled < chunk) {
            return 0;
        }
        if let Some(slot) = self.slot.take() {
            self.reserved = Some(slot.reserve());
        }
        let Some(reserved) = &mut self.reserved else { return 0 };
        let before = reserved.flushed();
        // An error is also the commit's.
        let _ = reserved.flush(before + filled);
        reserved.flushed() - before
    }

    fn commit(self, meta: BatchMeta) -> Result<(), NoSlot> {
        // An error is a batch without bytes.
        let len = meta.result.as_ref().map_or(0, |&len| len);
        let Some(slot) = self.reserved.or(self.slot.map(HostSlot::reserve)) else { return Err(NoSlot::Gone) };
        self.log.lock().coming.push_back((slot.seq(), meta.ticket));
        slot.commit(len, meta).map_err(|_| NoSlot::Gone)
    }
}

/// The limit of the waits that a blocking wait is split into.
const LONGEST: Duration = Duration::from_secs(3600);

impl DeviceSide {
    /// Without overlap, waits on the host until the batch has been copied.
    fn finish_inline(&self, lease: &Lease<BatchMeta>) -> Result<(), twinbuf_cuda::Error> {
        if self.inline {
            if let Some(time) = lease.wait_copied()? {
                self.log.copied(lease.seq(), lease.len(), time);
            }
        }
        Ok(())
    }

    fn receive_next(
        &mut self,
        waiting: &mut Waiting<'_, '_>,
        held_timeout: Duration,
    ) -> Received<Lease<BatchMeta>> {
        use twinbuf_cuda::Error::{Abandoned, Cancelled, Empty, SlotHeld};
        let received = match waiting {
            Waiting::Drain => self.device.recv(),
            // The wait for an empty slot has no limit, the wait for a held one has.
            Waiting::Block if !self.device.is_held() => self.device.recv(),
            Waiting::Block => self.device.recv_deadline(Instant::now() + held_timeout.min(LONGEST)),
            Waiting::Until(deadline) => self.device.recv_deadline(*deadline),
            Waiting::Try => self.device.try_recv(),
            Waiting::Poll(cx) => match self.device.poll_recv(cx) {
                Poll::Ready(received) => received,
                Poll::Pending => return Received::NotYet,
            },
        };
        let received = received.and_then(|lease| {
            lease.as_ref().map_or(Ok(()), |lease| self.finish_inline(lease))?;
            Ok(lease)
        });
        match received {
            Ok(Some(lease)) => Received::Batch(lease),
            // Its slot was released after the wait had begun; or the batch does not come, but the next one does.
            Err(Empty) if !self.inline && matches!(waiting, Waiting::Block) => {
                self.receive_next(waiting, held_timeout)
            }
            Err(Cancelled) => self.receive_next(waiting, held_timeout),
            Err(Empty) if !self.inline => Received::NotYet,
            Err(SlotHeld { .. }) => {
                // Behind a capture, nothing wakes the task: only the next look tells.
                if let Waiting::Poll(cx) = waiting {
                    cx.waker().wake_by_ref();
                }
                Received::SlotHeld
            }
            Ok(None) | Err(Abandoned | Empty) => Received::Gone,
            Err(error) => Received::Failed(error.into()),
        }
    }
}

impl Batches for DeviceSide {
    type Batch = Lease<BatchMeta>;

    fn receive(
        &mut self,
        waiting: &mut Waiting<'_, '_>,
        held_timeout: Duration,
    ) -> Received<Lease<BatchMeta>> {
        self.receive_next(waiting, held_timeout)
    }

    fn meta(batch: &mut Lease<BatchMeta>) -> &mut BatchMeta {
        batch.meta_mut()
    }

    fn slots(&self) -> (&'static str, usize) {
        ("device_depth", self.depth)
    }

    fn copies(&self) -> (Duration, u64) {
        let copies = self.log.lock();
        (copies.time, copies.bytes)
    }

    fn copied(&self, ticket: Ticket) -> Option<(Instant, Instant)> {
        let copies = self.log.lock();
        let this = copies.last.iter().find(|(copied, _)| *copied == ticket);
        this.map(|(_, event)| (event.start, event.end))
    }

    fn copy_thread(&self) -> Option<ThreadId> {
        self.device.copy_thread()
    }
}
