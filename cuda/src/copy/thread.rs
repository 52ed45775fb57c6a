//! The copy thread: copies committed host slots until the data end, a side is dropped, or something fails.

use twinbuf_core::{
    Consumer, KeptSlot, Park, Producer, ReadSlot, RecvError, TryAcquireError, TryRecvError, WriteSlot,
};

use super::Copies;
use crate::cu::BesideCaptures;
use crate::error::{Error, Fate};
use crate::slot::{DeviceBuf, HostBuf};

/// How copying ended without an error.
enum End {
    /// The producer has finished, and all batches were copied.
    Finished,
    /// One of the two sides was dropped.
    Abandoned,
}

/// The body of the copy thread.
pub(crate) fn run<'h, M>(
    host: &mut Consumer<'h, HostBuf<M>, Park>,
    mut device: Producer<'_, DeviceBuf<M>, Park>,
    copies: Copies<KeptSlot<'h, HostBuf<M>, Park>>,
    fate: &Fate,
) {
    match copy_all(host, &mut device, copies) {
        Ok(End::Finished) => device.finish(),
        Ok(End::Abandoned) => drop(device),
        Err(error) => {
            // Set before the rings end, because both sides read it when they see the end.
            let _ = fate.set(error);
            drop(device);
        }
    }
}

fn copy_all<'h, M>(
    host: &mut Consumer<'h, HostBuf<M>, Park>,
    device: &mut Producer<'_, DeviceBuf<M>, Park>,
    mut copies: Copies<KeptSlot<'h, HostBuf<M>, Park>>,
) -> Result<End, Error> {
    copies.bind()?;
    let _beside = BesideCaptures::enter();
    let mut seq = 0;
    'batches: loop {
        copies.make_room()?;
        let first = match next(host, &mut copies)? {
            Ok(Some(chunk)) => chunk,
            Err(RecvError::Cancelled) => continue, // a slot of several chunks was dropped without a commit
            end => {
                copies.retire_all()?;
                return Ok(if end.is_ok() { End::Finished } else { End::Abandoned });
            }
        };
        let Some(mut slot) = device_slot(device, &mut copies)? else { return Ok(End::Abandoned) };
        copies.bind()?;
        copies.begin(&mut slot)?;
        let mut chunk = first;
        while !chunk.last {
            let (from, piece) = (chunk.memory.start(), chunk.piece.clone());
            // SAFETY: the chunk's guard keeps the producer from writing to this piece. The piece is in bounds: all
            // slots of an uploader have one size. `make_room` has retired the device slot's previous copy.
            unsafe { copies.part(&slot, from, piece, chunk) }?;
            chunk = match next(host, &mut copies)? {
                Ok(Some(chunk)) => chunk,
                Err(RecvError::Cancelled) => {
                    copies.bind()?;
                    copies.abandon()?;
                    continue 'batches;
                }
                _ => return Ok(End::Abandoned), // the rest of the batch will not come
            };
            copies.bind()?;
        }
        slot.meta = chunk.meta.take();
        let (from, piece, len) = (chunk.memory.start(), chunk.piece.clone(), chunk.len);
        // SAFETY: as above.
        unsafe { copies.part(&slot, from, piece, chunk) }?;
        copies.end(seq, &mut slot, len)?;
        seq += 1;
        // Hand the batch over while the copy runs: the streams that use it wait for the copy, the host does not.
        if slot.commit().is_err() {
            return Ok(End::Abandoned);
        }
    }
}

/// A committed chunk, the end, or why there is none.
type Received<'h, M> = Result<Option<KeptSlot<'h, HostBuf<M>, Park>>, RecvError>;

/// Waits for the next chunk, and retires copies in the meantime.
///
/// A batch that arrives while copies run is queued behind them without a gap. If none arrives, the reader may be
/// waiting for a slot whose copy has just ended. No call waits for both a ring and an event, so the events are polled.
fn next<'h, M>(
    host: &mut Consumer<'h, HostBuf<M>, Park>,
    copies: &mut Copies<KeptSlot<'h, HostBuf<M>, Park>>,
) -> Result<Received<'h, M>, Error> {
    while let Some(pause) = copies.pause() {
        match host.recv_timeout(pause) {
            Ok(chunk) => return Ok(Ok(chunk.map(ReadSlot::keep))),
            // A held slot is held by a copy in flight, so query the copies.
            Err(TryRecvError::Empty | TryRecvError::Held) => copies.retire_done()?,
            Err(TryRecvError::Cancelled) => return Ok(Err(RecvError::Cancelled)),
            Err(_) => break, // the end; the call below returns it again
        }
    }
    // No copy is in flight, so no slot is held.
    Ok(host.recv().map(|chunk| chunk.map(ReadSlot::keep)))
}

/// Waits for the next device slot in the same way. `None` if the receiving side was dropped.
fn device_slot<'p, 'd, H, M>(
    device: &'p mut Producer<'d, DeviceBuf<M>, Park>,
    copies: &mut Copies<H>,
) -> Result<Option<WriteSlot<'p, 'd, DeviceBuf<M>, Park>>, Error> {
    while let Some(pause) = copies.pause() {
        match device.acquire_timeout(pause).map(drop) {
            // Dropped without a commit, the slot is returned again below.
            Ok(()) => break,
            Err(TryAcquireError::Full) => copies.retire_done()?,
            Err(_closed) => return Ok(None),
        }
    }
    Ok(device.acquire().ok())
}
