//! One fill thread and its slots: fills a slot, issues its copies, and fills it again after they are done.

use std::io;
use std::mem;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use twinbuf_core::{Consumer, KeptSlot, ReadSlot, RecvError, TryRecvError};

use crate::cu::{self, BesideCaptures, Event, Stream};
use crate::edge;
use crate::error::{Error, Fate};
use crate::memory::HostBytes;

/// A slot of page-locked memory.
pub(super) struct Slot {
    pub(super) memory: HostBytes,
    pub(super) len: usize,
    /// Recorded on the caller's stream when the slot is handed over. Its copies wait for it.
    pub(super) ready: Event,
    /// Recorded on the copy stream after its copies. The thread blocks on it.
    pub(super) copied: Event,
    /// Whether copies were issued that the host has not waited for.
    pub(super) copying: bool,
}

impl Slot {
    /// Waits for the slot's last copies, and returns its bytes.
    fn bytes(&mut self) -> Result<&mut [u8], Error> {
        if mem::take(&mut self.copying) {
            // SAFETY: the event exists.
            unsafe { edge::refill_after_copy(self.copied.raw(), true) }?;
        }
        // SAFETY: `len` initialized bytes that no copy uses; `&mut self` excludes other references.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.start().as_ptr(), self.len) })
    }
}

/// A slot and what goes through it.
pub(super) struct Order<'s, 'env> {
    slot: &'s mut Slot,
    way: Way,
    /// Their bytes follow each other in the slot.
    pieces: Vec<Piece<'env>>,
    filled: usize,
}

/// The direction of copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Way {
    Upload,
    Offload,
}

/// Bytes of the device and their place on the host.
pub(super) struct Piece<'env> {
    pub(super) device: CUdeviceptr,
    pub(super) len: usize,
    pub(super) host: Host<'env>,
    /// Whether it follows the piece before it in the same allocation: one copy for both.
    pub(super) follows: bool,
}

/// Writes the bytes of a copy from this one on.
pub(super) type Fill<'env> = dyn Fn(usize, &mut [u8]) -> io::Result<()> + Send + Sync + 'env;

/// Takes the bytes of a copy from this one on.
pub(super) type Take<'env> = dyn Fn(usize, &[u8]) -> io::Result<()> + Send + Sync + 'env;

/// The host's end of a piece. Functions get the number of the piece's first byte.
pub(super) enum Host<'env> {
    From(&'env [u8]),
    Fill(Arc<Fill<'env>>, usize),
    To(&'env mut [u8]),
    Take(Arc<Take<'env>>, usize),
}

impl<'s, 'env> Order<'s, 'env> {
    pub(super) fn new(slot: &'s mut Slot) -> Self {
        Self { slot, way: Way::Upload, pieces: Vec::new(), filled: 0 }
    }

    /// Empties it for pieces of this direction.
    pub(super) fn begin(&mut self, way: Way) {
        (self.way, self.filled) = (way, 0);
        self.pieces.clear();
    }

    pub(super) fn way(&self) -> Way {
        self.way
    }

    pub(super) fn ready(&self) -> &Event {
        &self.slot.ready
    }

    /// Bytes that still fit.
    pub(super) fn room(&self) -> usize {
        self.slot.len - self.filled
    }

    /// The end of the last piece on the device.
    pub(super) fn end(&self) -> Option<CUdeviceptr> {
        self.pieces.last().map(|last| last.device + last.len as u64)
    }

    pub(super) fn push(&mut self, piece: Piece<'env>) {
        self.filled += piece.len;
        self.pieces.push(piece);
    }

    /// Fills the slot, if that is its direction, and issues its copies.
    fn start(&mut self, copies: &Stream) -> Result<(), Error> {
        let Self { slot, pieces, way, .. } = self;
        let mut rest = slot.bytes()?;
        if *way == Way::Upload {
            for piece in &*pieces {
                let out = rest.split_off_mut(..piece.len).unwrap_or_default();
                match &piece.host {
                    Host::From(bytes) => out.copy_from_slice(bytes),
                    Host::Fill(fill, at) => fill(*at, out).map_err(|error| Error::fill(&error))?,
                    Host::To(_) | Host::Take(..) => {}
                }
            }
        }
        // A fill is the caller's code, which may make another context current.
        cu::bind(copies.context())?;
        // SAFETY: both exist.
        unsafe { edge::copy_after_use(copies.raw(), slot.ready.raw()) }?;
        // Before the first copy: if a later call fails, the end of the scope waits for the copy stream.
        slot.copying = true;
        let mut host = slot.memory.start();
        for run in pieces.chunk_by(|_, next| next.follows) {
            let Some(first) = run.first() else { continue };
            let len = run.iter().map(|piece| piece.len).sum();
            let (device, at, stream) = (first.device, host.as_ptr(), copies.raw());
            match way {
                // SAFETY: the pieces fit in the slot, which is not touched until `copied` is complete. The device memory
                // is there until the end of the scope, which waits for the copies or makes the caller's stream wait. A
                // run is in one allocation.
                Way::Upload => unsafe { cu::copy_to_device(device, at, len, stream) },
                // SAFETY: as above.
                Way::Offload => unsafe { cu::copy_to_host(at, device, len, stream) },
            }?;
            // SAFETY: within the slot, or at its end.
            host = unsafe { host.add(len) };
        }
        // SAFETY: both exist.
        unsafe { cu::record(slot.copied.raw(), copies.raw()) }
    }

    /// Hands what the slot's copies have brought to the host's end of each piece.
    fn unload(&mut self) -> Result<(), Error> {
        let mut rest = &*self.slot.bytes()?;
        for piece in &mut self.pieces {
            let bytes = rest.split_off(..piece.len).unwrap_or_default();
            match &mut piece.host {
                Host::To(out) => out.copy_from_slice(bytes),
                Host::Take(take, at) => take(*at, bytes).map_err(|error| Error::fill(&error))?,
                Host::From(_) | Host::Fill(..) => {}
            }
        }
        Ok(())
    }
}

type Orders<'s, 'env> = Consumer<'s, Order<'s, 'env>>;

/// The body of a fill thread.
pub(super) fn run<'s, 'env: 's>(mut orders: Orders<'s, 'env>, copies: &Stream, fate: &Fate) {
    if let Err(error) = all(&mut orders, copies) {
        // Set before the ring ends, because the caller looks here when it sees the end. The first error counts.
        let _ = fate.set(error);
    }
}

fn all<'s, 'env: 's>(orders: &mut Orders<'s, 'env>, copies: &Stream) -> Result<(), Error> {
    cu::bind(copies.context())?;
    let _beside = BesideCaptures::enter();
    // An offload whose copies run. The next one is issued before this one is waited for.
    let mut last: Option<KeptSlot<'s, Order<'s, 'env>>> = None;
    loop {
        let next = match last.take() {
            None => orders.recv(),
            Some(mut order) => match orders.try_recv() {
                Err(TryRecvError::Empty | TryRecvError::Held) => {
                    order.unload()?;
                    continue;
                }
                next => {
                    last = Some(order);
                    next.map_err(|error| match error {
                        TryRecvError::Cancelled => RecvError::Cancelled,
                        _ => RecvError::Abandoned,
                    })
                }
            },
        };
        match next.map(|next| next.map(ReadSlot::keep)) {
            Ok(Some(mut order)) => {
                order.start(copies)?;
                let offload = (order.way == Way::Offload).then_some(order);
                if let Some(mut before) = mem::replace(&mut last, offload) {
                    before.unload()?;
                }
            }
            // The caller's work has failed; its order was given up.
            Err(RecvError::Cancelled) => {}
            Ok(None) | Err(_) => {
                return last.map_or(Ok(()), |mut order| order.unload());
            }
        }
    }
}
