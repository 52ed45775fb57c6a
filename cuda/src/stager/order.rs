//! An order: a slot, and the pieces that go through it. A fill thread fills the slot and issues its copies; the slot is
//! used again when they are done.

use std::io;
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUdeviceptr;
use twinbuf_core::{Consumer, KeptSlot, ReadSlot, TryRecvError};

use crate::cu::{self, Current, Event, Stream};
use crate::edge;
use crate::error::{Error, Fate, OnDrop, ending, lock};
use crate::lent;

/// A slot of page-locked memory.
pub(super) struct Slot {
    pub(super) memory: lent::Host,
    /// Recorded on the caller's stream when the slot is handed over. Its copies wait for it.
    pub(super) ready: Event,
    /// Recorded on the copy stream after its copies. The thread blocks on it.
    pub(super) copied: Event,
}

// SAFETY: a shared reference reaches neither the bytes nor the lender.
unsafe impl Sync for Slot {}

impl Slot {
    /// Waits for the slot's last copies, and returns its bytes.
    fn bytes(&mut self) -> Result<&mut [u8], Error> {
        // SAFETY: the event exists.
        unsafe { edge::refill_after_copy(self.copied.raw(), true) }?;
        // SAFETY: no copy uses the slot's bytes any more.
        Ok(unsafe { self.memory.bytes_mut() })
    }
}

/// A slot and what goes through it.
pub(super) struct Order<'s, 'env> {
    pub(super) slot: &'s mut Slot,
    pub(super) way: Way,
    pub(super) pieces: Vec<Piece<'env>>,
}

/// The direction of copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Way {
    Upload,
    Offload,
}

/// A range of device memory, and the host's end of its copy.
pub(super) struct Piece<'env> {
    pub(super) device: CUdeviceptr,
    /// The offset of its bytes in the slot.
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) host: Host<'env>,
    /// Whether it follows the piece before it in the slot and in the same allocation: one copy for both.
    pub(super) follows: bool,
}

/// The host's end of a piece.
pub(super) enum Host<'env> {
    /// The caller's function that fills an upload, and the offset of this piece in it.
    Fill(Arc<Fill<'env>>, usize),
    /// The caller's memory that receives an offload.
    Take(&'env mut [u8]),
}

pub(super) type Fill<'env> = dyn Fn(usize, &mut [u8]) -> io::Result<()> + Send + Sync + 'env;

impl Order<'_, '_> {
    /// The place for more elements in the slot, which begins at a multiple of their alignment. Empty if none fits.
    pub(super) fn room<T>(&self) -> Range<usize> {
        let filled = self.pieces.last().map_or(0, |last| last.at + last.len);
        let start = filled.next_multiple_of(align_of::<T>());
        let bytes = self.slot.memory.len.saturating_sub(start);
        start..start + bytes / size_of::<T>() * size_of::<T>()
    }

    /// Serves the host's end of each piece: lets it fill its bytes in the slot, or copies them to it.
    fn serve(&mut self) -> Result<(), Error> {
        let slot = self.slot.bytes()?;
        for Piece { host, at, len, .. } in &mut self.pieces {
            let bytes = &mut slot[*at..][..*len];
            match host {
                Host::Fill(fill, from) => fill(*from, bytes)
                    .map_err(|error| Error::Fill { kind: error.kind(), message: error.to_string() })?,
                Host::Take(out) => out.copy_from_slice(bytes),
            }
        }
        Ok(())
    }

    /// Fills the slot, if that is its direction, and issues its copies.
    fn start(&mut self, copies: &Stream) -> Result<(), Error> {
        match self.way {
            Way::Upload => self.serve()?,
            Way::Offload => drop(self.slot.bytes()?),
        }
        // Make the context current again: a fill is the caller's code and may have left another one current.
        // It stays current: the next order asks an event. `run` restores the thread's own at the end.
        mem::forget(Current::enter(copies.context())?);
        let Self { slot, pieces, way, .. } = self;
        // SAFETY: both exist.
        unsafe { edge::copy_after_use(copies.raw(), slot.ready.raw()) }?;
        // If a call below fails, `copied` is not recorded, but the end of the scope waits for the whole copy stream.
        for run in pieces.chunk_by(|_, next| next.follows) {
            let (device, len) = (run[0].device, run.iter().map(|piece| piece.len).sum());
            // SAFETY: a piece is within the slot.
            let host = unsafe { slot.memory.start.add(run[0].at) };
            match way {
                // SAFETY: the pieces fit in the slot, which is not touched until `copied` is complete. The device
                // memory lives until the end of the scope, which waits for the copies or makes the caller's stream
                // wait. A run of pieces is in one allocation.
                Way::Upload => unsafe { cu::copy_to_device(device, host.as_ptr(), len, copies.raw()) },
                // SAFETY: as above.
                Way::Offload => unsafe { cu::copy_to_host(host.as_ptr(), device, len, copies.raw()) },
            }?;
        }
        // SAFETY: both exist.
        unsafe { cu::record(slot.copied.raw(), copies.raw()) }
    }
}

/// Where the fill threads receive orders. `None` after the end, or after an error of one of them.
pub(super) type Orders<'s, 'env> = Mutex<Option<Consumer<'s, Order<'s, 'env>>>>;

/// The body of a fill thread. Its error is in `fate` too.
pub(super) fn run<'s, 'env: 's>(
    orders: &Orders<'s, 'env>,
    copies: &Stream,
    fate: &Fate,
) -> Result<(), Error> {
    // End the ring when a fill thread ends. Otherwise the caller would wait for a slot forever.
    let _end = OnDrop(|| {
        // `_ring` is dropped after the lock is released: the last share of the ring drops the caller's functions.
        let _ring = lock(orders).take();
    });
    // `ending` records an error before the slot of a failed copy becomes free, and before the ring ends. The slot's event
    // does not cover that copy, but a caller that takes the slot finds the error and hands nothing over.
    let _apart = ending(fate, cu::apart(copies.context()))?;
    // An offload whose copies are running. The next order is started before the host waits for these copies.
    let mut last: Option<KeptSlot<'s, Order<'s, 'env>>> = None;
    loop {
        let received = next(orders, last.is_none());
        let over = matches!(received, Ok(None) | Err(TryRecvError::Abandoned));
        let mut started = None;
        // Orders that the caller cancelled, because its work failed, arrive as errors and are skipped.
        if let Ok(Some(mut order)) = received {
            ending(fate, order.start(copies))?;
            started = (order.way == Way::Offload).then_some(order);
        }
        if let Some(mut before) = mem::replace(&mut last, started) {
            ending(fate, before.serve())?;
        }
        if over {
            return Ok(());
        }
    }
}

/// The next order. `None` after the end.
fn next<'s, 'env: 's>(
    orders: &Orders<'s, 'env>,
    wait: bool,
) -> Result<Option<KeptSlot<'s, Order<'s, 'env>>>, TryRecvError> {
    let mut orders = match orders.try_lock() {
        Ok(orders) => orders,
        _ if wait => lock(orders),
        // Another thread has the lock and waits for the next order: do not wait behind it.
        _ => return Err(TryRecvError::Empty),
    };
    let Some(orders) = &mut *orders else { return Ok(None) };
    let order = if wait { orders.recv()? } else { orders.try_recv()? };
    Ok(order.map(ReadSlot::keep))
}
