//! A ring whose items are on a CUDA device: workers fill host slots, and with overlap a copy thread uploads them in
//! order.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use twinbuf_cuda::cudarc::driver::CudaContext;
use twinbuf_cuda::{
    Copied, CopyTime, DeviceBatches, Error as CudaError, HostSlots, Lease, ReservedSlot, Uploader, lent,
};
use twinbuf_mmap::Buffer;

use super::memory::{Backend, Memory, Places};
use super::ring::{BothSides, Header, Received, Ring, Sides, Waiting};
use crate::error::Error;
use crate::observe::log::{Event, Place, What};
use crate::observe::trace::Track;
use crate::sync::{Mutex, lock};

/// The backend that copies batches and groups to a CUDA device.
#[derive(Clone, Debug)]
pub struct Cuda {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) device_depth: usize,
}

/// A ring whose items are leases of device slots.
#[derive(Debug)]
pub struct DeviceSlots<U>(PhantomData<fn() -> U>);

/// The side that is filled: host slots.
pub struct HostSide<U: Send + 'static> {
    slots: HostSlots<Header<U>>,
    log: Arc<Mutex<Copies>>,
}

/// A host slot to be filled.
pub struct HostSlot<U: Send + 'static> {
    slot: ReservedSlot<Header<U>>,
    header: Header<U>,
    log: Arc<Mutex<Copies>>,
}

/// The side that receives leases of device slots.
pub struct DeviceSide<U: Send + 'static> {
    batches: DeviceBatches<Header<U>>,
    log: Arc<Mutex<Copies>>,
    /// Whether `receive` waits for the copy of each item: without overlap, the stages run one after the other.
    inline: bool,
}

/// Times of the copies: the last ones, and the sum of all.
struct Copies {
    track: Track,
    /// Units whose copies are coming, by their number in the ring.
    coming: Vec<(u64, Place)>,
    time: Duration,
    bytes: u64,
    /// The last copies. There are more of them than slots, so the copy of the item in use is among them.
    last: VecDeque<(u64, Event)>,
    most: usize,
}

impl Copies {
    fn copied(&mut self, number: u64, bytes: usize, time: CopyTime) {
        let Some(at) = self.coming.iter().position(|&(coming, _)| coming == number) else { return };
        let (_, batch) = self.coming.swap_remove(at);
        // The start of a copy is an estimate: the clocks of device and host are aligned only approximately. A stream
        // runs its copies one after the other, so this copy does not start before the last one ends.
        let before = self.last.back().map(|(_, event)| event.end);
        let start = before.map_or(time.start, |end| end.max(time.start));
        let end = start + time.took;
        let event = Event { what: What::Transfer, batch, start, end, bytes };
        self.track.add(&event);
        self.track.write_if_due(end);
        self.time += time.took;
        self.bytes += bytes as u64;
        self.last.drain(..self.last.len().saturating_sub(self.most - 1));
        self.last.push_back((number, event));
    }
}

impl Backend for Cuda {
    type Ring<U: Send + 'static> = DeviceSlots<U>;
}

impl Places for Cuda {
    fn device_depth(&self) -> usize {
        self.device_depth
    }

    fn sides<U: Send + 'static>(self, memory: Memory<'_>) -> Result<BothSides<DeviceSlots<U>>, Error> {
        let Memory { slot, depth, lent, trace, options, .. } = memory;
        let overlap = options.overlaps();
        let log = Arc::new(Mutex::new(Copies {
            track: Track::new(trace, 3, "upload", false, false),
            coming: Vec::new(),
            time: Duration::ZERO,
            bytes: 0,
            last: VecDeque::new(),
            most: depth.saturating_add(self.device_depth).saturating_add(2),
        }));
        let mut uploader = Uploader::new(&self.context, slot)
            .host_depth(depth)
            .device_depth(self.device_depth)
            .overlap(overlap)
            .copy_stream(options.copy_stream)
            // Time every copy: reports include the copies, and the caller may request one at any time.
            .times(true);
        if let Some(memory) = lent {
            uploader = uploader.host_slots(memory.into_iter().map(lent_host).collect());
        }
        if overlap {
            let log = log.clone();
            uploader = uploader
                .on_copied(move |Copied { seq, bytes, time, .. }| lock(&log).copied(seq, bytes, time));
        }
        let (slots, batches) = uploader.build().map_err(|error| match error {
            CudaError::Option { option, wanted, found } => Error::Option { option, wanted, found },
            error => Error::Device(error.into()),
        })?;
        Ok((HostSide { slots, log: log.clone() }, DeviceSide { batches, log, inline: !overlap }))
    }
}

/// Lends a slot's memory to the uploader, which keeps it.
fn lent_host(mut memory: Buffer) -> lent::Host {
    let bytes = NonNull::from(&mut memory[..]);
    // SAFETY: moving the buffer does not move its bytes. The host slot owns the buffer from now on, and nothing else
    // reaches it.
    unsafe { lent::Host::new(bytes.cast(), bytes.len(), memory) }
}

impl<U: Send + 'static> Ring for DeviceSlots<U> {
    type Unit = U;
    type Slot = ReservedSlot<Header<U>>;
    type Item = Lease<Header<U>>;
}

impl<U: Send + 'static> Sides<U, ReservedSlot<Header<U>>, Lease<Header<U>>> for DeviceSlots<U> {
    type Producer = HostSide<U>;
    type Reserved = HostSlot<U>;
    type Consumer = DeviceSide<U>;

    const ON_DEVICE: bool = true;

    fn wait_free(side: &mut HostSide<U>, until: Option<Instant>) -> bool {
        let found = match until {
            Some(until) => side.slots.acquire_deadline(until),
            None => side.slots.try_acquire(),
        };
        // This drops the guard of the free slot without a commit: `reserve` then acquires the same slot.
        found.is_ok()
    }

    fn reserve(side: &mut HostSide<U>) -> Option<HostSlot<U>> {
        let slot = side.slots.try_acquire().ok()?.reserve();
        Some(HostSlot { slot, header: Header::new(Instant::now(), None), log: side.log.clone() })
    }

    fn parts(reserved: &mut HostSlot<U>) -> (&mut ReservedSlot<Header<U>>, &mut Header<U>) {
        (&mut reserved.slot, &mut reserved.header)
    }

    fn commit(HostSlot { slot, header, log }: HostSlot<U>, bytes: usize) {
        if bytes > 0 {
            lock(&log).coming.push((slot.seq(), header.ticket.place));
        }
        // The receiving side gets an error of the device too, and reports it.
        let _ = slot.commit(bytes, header);
    }

    fn receive(side: &mut DeviceSide<U>, waiting: &mut Waiting<'_, '_>) -> Received<Lease<Header<U>>> {
        let batches = &mut side.batches;
        let found = match waiting {
            Waiting::Try => batches.try_recv(),
            Waiting::Until(deadline) => batches.recv_deadline(*deadline),
            Waiting::Poll(cx) => match batches.poll_recv(cx) {
                Poll::Ready(found) => found,
                Poll::Pending if batches.is_held() => return Received::Held,
                Poll::Pending => return Received::Empty,
            },
            Waiting::Block => batches.recv(),
        };
        let found = found.and_then(|lease| {
            if let (true, Some(lease)) = (side.inline, &lease) {
                if let Some(time) = lease.wait_copied()? {
                    lock(&side.log).copied(lease.seq(), lease.len(), time);
                }
            }
            Ok(lease)
        });
        match found {
            Ok(Some(lease)) => Received::Item(lease),
            // Without overlap, this cannot wait for a driver.
            Err(CudaError::Empty) if side.inline && matches!(waiting, Waiting::Block) => Received::Gone,
            Err(error @ (CudaError::Empty | CudaError::SlotHeld { .. })) => {
                // Nothing wakes the task when a capture of a CUDA graph lets go of the slot, or without overlap when a
                // driver has filled it. So the task polls again.
                if let Waiting::Poll(cx) = waiting {
                    cx.waker().wake_by_ref();
                }
                if matches!(error, CudaError::Empty) { Received::Empty } else { Received::Held }
            }
            Ok(None) | Err(CudaError::Abandoned | CudaError::Cancelled) => Received::Gone,
            Err(error) => Received::Failed(error.into()),
        }
    }

    fn header(item: &Lease<Header<U>>) -> &Header<U> {
        item.meta()
    }

    fn header_mut(item: &mut Lease<Header<U>>) -> &mut Header<U> {
        item.meta_mut()
    }

    fn number(item: &Lease<Header<U>>) -> u64 {
        item.seq()
    }

    fn depth(side: &DeviceSide<U>) -> (&'static str, usize) {
        ("device_depth", side.batches.depth())
    }

    fn copied(side: &DeviceSide<U>, number: u64) -> Option<(Instant, Instant)> {
        let copies = lock(&side.log);
        let this = copies.last.iter().find(|&&(copied, _)| copied == number);
        this.map(|(_, event)| (event.start, event.end))
    }

    fn copies(side: &DeviceSide<U>) -> (Duration, u64) {
        let copies = lock(&side.log);
        (copies.time, copies.bytes)
    }
}

debug!([U: Send + 'static] HostSide[U], |_side|);
debug!([U: Send + 'static] HostSlot[U], |_slot|);
debug!([U: Send + 'static] DeviceSide[U], |_side|);
