//! The upload stage: batches go on from page-locked host slots into device slots, on a stream of their own.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Deref;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use twinbuf_cuda::cudarc::driver::CudaContext;
use twinbuf_cuda::{Copied, CopyTime, DeviceBatches, HostSlots, Lease, Uploader};
use twinbuf_mmap::BatchPlan;

use crate::backend::{Backend, Host, NoSlot, Received, Sides, Transfers};
use crate::error::Error;
use crate::loader::LoaderBuilder;
use crate::reader::Waiting;
use crate::slot::Load;
use crate::trace::{Place, Track};

/// Batches end up in the memory of a CUDA device: [`DeviceBatch`]. See [`LoaderBuilder::cuda`].
#[derive(Clone, Debug)]
pub struct Cuda {
    context: Arc<CudaContext>,
    device_depth: usize,
}

impl LoaderBuilder<Host> {
    /// Uploads each batch to the device of `context`, on a stream of its own, while the one before is in use.
    ///
    /// Host slots are page-locked then, and beside them there are two device slots. Epochs yield
    /// [`DeviceBatch`]es. Without overlap there is no thread at all: each batch is read, and copied, when it is asked
    /// for.
    ///
    /// The [`Report`](crate::Report) knows what the caller waits for, not what the device does. A loop that only
    /// enqueues its work is told how long both sides of the loader waited for the device
    /// ([`Report::device`](crate::Report::device)); one that waits for its work at the end of each step, as by
    /// reading the loss, has exact figures.
    ///
    /// [`twinbuf::cuda::context`](crate::cuda::context) makes a context where there may be no driver.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use twinbuf::{Loader, Plan, Records, cuda};
    ///
    /// let ctx = cuda::context(0)?; // or the context you have
    /// let stream = ctx.new_stream()?;
    /// let data = Arc::new(Records::open(["train.bin"], 1024)?);
    /// let plan = Plan::builder(data.len()).batch(256).build()?;
    /// let loader = Loader::builder(data, plan).cuda(ctx).build()?;
    /// for batch in loader.epoch(0) {
    ///     let batch = batch?;
    ///     let view = batch.on::<u8>(&stream)?; // `stream` waits for the copy, the host does not
    ///     // launch kernels on `stream` that read `view`
    /// }
    /// # Ok::<(), twinbuf::BoxError>(())
    /// ```
    pub fn cuda(self, context: Arc<CudaContext>) -> LoaderBuilder<Cuda> {
        self.with_backend(Cuda { context, device_depth: 2 })
    }
}

impl LoaderBuilder<Cuda> {
    /// How many device slots there are, 1 to 8; 2 unless said otherwise. What other loaders call `gpu_prefetch`.
    pub fn device_depth(mut self, slots: usize) -> Self {
        self.backend.device_depth = slots;
        self
    }
}

/// One batch in device memory: a [`Lease`] of its slot, and which batch it is.
///
/// Use it by [`on`](Lease::on), for each stream; drop it as soon as the work that reads it is *enqueued*. When it
/// is dropped, the slot's next copy is made to wait for those streams.
pub struct DeviceBatch<'l> {
    lease: Lease<'l, Load>,
}

impl<'l> DeviceBatch<'l> {
    /// The epoch it belongs to.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.lease.meta().epoch
    }

    /// Its step within the epoch, from 0.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.lease.meta().step
    }

    /// Which records it is made of.
    #[must_use]
    pub fn plan(&self) -> &BatchPlan {
        &self.lease.meta().plan
    }

    /// The lease by itself, for the calls that consume it: [`Lease::into_owned`], [`Lease::on_this_thread`].
    #[must_use]
    pub fn into_lease(self) -> Lease<'l, Load> {
        self.lease
    }
}

impl<'l> Deref for DeviceBatch<'l> {
    type Target = Lease<'l, Load>;

    fn deref(&self) -> &Lease<'l, Load> {
        &self.lease
    }
}

impl fmt::Debug for DeviceBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBatch")
            .field("epoch", &self.epoch())
            .field("step", &self.step())
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}

/// The reader's side: host slots, and whose copy is coming.
#[allow(missing_debug_implementations, reason = "nobody outside has one")]
pub struct Slots {
    host: HostSlots<Load>,
    /// As the uploader numbers the batches.
    committed: u64,
    places: mpsc::Sender<(u64, Place)>,
}

/// The caller's side: leases, and what the copies took.
#[allow(missing_debug_implementations, reason = "nobody outside has one")]
pub struct Batches {
    device: DeviceBatches<Load>,
    /// Device slots.
    depth: usize,
    done: Arc<Mutex<Done>>,
    /// Without overlap each copy is waited for before the caller has its batch, one stage after the other, and
    /// accounted for here.
    inline: Option<RefCell<Account>>,
}

/// The copies that are done.
#[derive(Default)]
struct Done {
    time: Duration,
    bytes: u64,
    /// Of the last ones: more than there are slots, so that the batch in use is among them.
    last: VecDeque<(Place, Instant, Duration)>,
}

/// Writes down what the copies took.
struct Account {
    track: Track,
    coming: mpsc::Receiver<(u64, Place)>,
    done: Arc<Mutex<Done>>,
}

impl Account {
    fn copied(&mut self, seq: u64, bytes: usize, time: CopyTime) {
        // Each was sent before its batch was committed, so it is there.
        let Some((_, place)) = self.coming.try_iter().find(|(committed, _)| *committed == seq) else {
            return;
        };
        let end = time.start + time.took;
        self.track.span("gpu_transfer", place, time.start, end);
        self.track.write_if_due(end);
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.time += time.took;
        done.bytes += bytes as u64;
        if done.last.len() == LAST {
            done.last.pop_front();
        }
        done.last.push_back((place, end, time.took));
    }
}

/// How many copies are remembered.
const LAST: usize = 4 * twinbuf_cuda::MAX_DEPTH;

impl Batches {
    /// Without overlap, waits on the host until the batch has been copied.
    fn finish_inline(&self, lease: &Lease<'_, Load>) -> Result<(), twinbuf_cuda::Error> {
        let Some(account) = &self.inline else { return Ok(()) };
        if let Some(time) = lease.wait_copied()? {
            account.borrow_mut().copied(lease.seq(), lease.len(), time);
        }
        Ok(())
    }
}

impl Backend for Cuda {
    type Batch<'l> = DeviceBatch<'l>;
    type Slots = Slots;
    type Batches = Batches;

    const WAIT: &'static str = "gpu_queue_wait";

    fn device_depth(&self) -> usize {
        self.device_depth
    }

    fn make(self, sides: Sides<'_>) -> Result<(Slots, Batches), Error> {
        let done = Arc::<Mutex<Done>>::default();
        let (places, coming) = mpsc::channel();
        let track = Track::new(sides.trace.clone(), 3, "upload");
        let mut account = Account { track, coming, done: done.clone() };
        let mut uploader = Uploader::new(&self.context, sides.slot)
            .host_depth(sides.host_depth)
            .device_depth(self.device_depth)
            .overlap(sides.overlap);
        let mut inline = None;
        if sides.overlap {
            uploader =
                uploader.on_copied(move |Copied { seq, bytes, time, .. }| account.copied(seq, bytes, time));
        } else {
            inline = Some(RefCell::new(account));
        }
        let (host, device) = uploader.build().map_err(|error| match error {
            twinbuf_cuda::Error::Option { option, wanted, found } => Error::Option { option, wanted, found },
            error => Error::Device(error.into()),
        })?;
        Ok((Slots { host, committed: 0, places }, Batches { device, depth: self.device_depth, done, inline }))
    }

    fn fill(
        slots: &mut Slots,
        _: bool,
        fill: &mut dyn FnMut(&mut [u8]) -> Option<Load>,
    ) -> Result<(), NoSlot> {
        let Slots { host, committed, places } = slots;
        let mut slot = host.acquire().map_err(|error| match error {
            twinbuf_cuda::Error::AllHeld { .. } => NoSlot::AllHeld,
            _ => NoSlot::Gone,
        })?;
        let Some(load) = fill(&mut slot) else { return Ok(()) };
        // An error is a batch without bytes.
        let len = load.result.as_ref().map_or(0, |&len| len);
        // Fails if the copying has ended, which the commit tells.
        let _ = places.send((*committed, load.place()));
        *committed += 1;
        slot.commit(len, load).map_err(|_| NoSlot::Gone)
    }

    fn finish(slots: Slots) {
        slots.host.finish();
    }

    fn receive<'l>(batches: &'l Batches, waiting: &mut Waiting<'_, '_>) -> Received<DeviceBatch<'l>> {
        use twinbuf_cuda::Error::{Abandoned, AllHeld, Empty};
        let received = match waiting {
            Waiting::Block => batches.device.recv(),
            Waiting::Try => batches.device.try_recv(),
            Waiting::Poll(cx) => match batches.device.poll_recv(cx) {
                Poll::Ready(received) => received,
                Poll::Pending => return Received::NotYet,
            },
        };
        let received = received.and_then(|lease| {
            lease.as_ref().map_or(Ok(()), |lease| batches.finish_inline(lease))?;
            Ok(lease)
        });
        match received {
            Ok(Some(lease)) => Received::Batch(DeviceBatch { lease }),
            Err(Empty) if matches!(waiting, Waiting::Try) && batches.inline.is_none() => Received::NotYet,
            Err(AllHeld { .. }) => Received::AllHeld,
            Ok(None) | Err(Abandoned | Empty) => Received::Gone,
            Err(error) => Received::Failed(error.into()),
        }
    }

    fn held(batches: &Batches, _: usize) -> (&'static str, usize) {
        ("device_depth", batches.depth)
    }

    fn load<'b>(batch: &'b mut DeviceBatch<'_>) -> Option<&'b mut Load> {
        Some(batch.lease.meta_mut())
    }

    fn transfers(batches: &Batches, ordinal: u64, step: u64) -> Transfers {
        let done = batches.done.lock().unwrap_or_else(PoisonError::into_inner);
        let this = done.last.iter().find(|(place, ..)| place.ordinal == ordinal && place.step == Some(step));
        Transfers { time: done.time, bytes: done.bytes, this: this.map(|(_, end, took)| (*end, *took)) }
    }

    fn copy_thread(batches: &Batches) -> Option<ThreadId> {
        batches.device.copy_thread()
    }
}
