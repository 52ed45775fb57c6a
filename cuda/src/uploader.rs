//! Puts the two sides together.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use twinbuf_core::{Consumer, Park, Producer, Ring};

use crate::copy::{self, ByHand, Clock, Copied, Copies, Fate, OnCopied};
use crate::cu::{self, check};
use crate::driver::Driver;
use crate::error::Error;
use crate::host::{HostSlots, Thread};
use crate::lease::DeviceBatches;
use crate::slot::{DeviceBuf, HostBuf};

/// The most slots that either side can have.
pub const MAX_DEPTH: usize = 8;

/// Copies that the copy thread may have in flight: one that runs, and one queued behind it.
const AHEAD: usize = 2;

/// Makes the two sides of an upload: [`HostSlots`] and [`DeviceBatches`].
///
/// It takes `host_depth × slot_bytes` of page-locked host memory and `device_depth × slot_bytes` of device memory,
/// all of it when it is built; nothing is allocated per batch.
///
/// A process forked from this one has neither CUDA nor the copy thread: forget both sides there (`mem::forget`), since
/// dropping them waits for that thread. (`twinbuf`'s loader does so by itself.)
///
/// # Examples
///
/// ```no_run
/// use twinbuf_cuda::{Error, Uploader, context};
///
/// let ctx = context(0)?;
/// let (mut slots, batches) = Uploader::new(&ctx, 1 << 20)
///     .overlap(false) // no thread: `commit` issues the copy
///     .build::<&str>()?;
/// let stream = ctx.default_stream();
///
/// slots.acquire()?.commit(1 << 20, "first")?;
/// for _ in 0..10 {
///     let batch = batches.recv()?.unwrap();
///     let view = batch.on::<u8>(&stream)?;
///     // enqueue the work on `view`, then, while it runs: hand the batch back, start the next copy
///     drop(batch);
///     slots.acquire()?.commit(1 << 20, "next")?;
/// }
/// # Ok::<(), Error>(())
/// ```
#[must_use = "nothing is made before `build`"]
pub struct Uploader {
    ctx: Arc<CudaContext>,
    slot_bytes: usize,
    host_depth: usize,
    device_depth: usize,
    write_combined: bool,
    overlap: bool,
    on_copied: Option<OnCopied>,
}

impl Uploader {
    /// An uploader in this context, for batches of at most `slot_bytes`: two slots on either side, a copy thread.
    pub fn new(ctx: &Arc<CudaContext>, slot_bytes: usize) -> Self {
        Self {
            ctx: ctx.clone(),
            slot_bytes,
            host_depth: 2,
            device_depth: 2,
            write_combined: false,
            overlap: true,
            on_copied: None,
        }
    }

    /// How many host slots there are, 1 to [`MAX_DEPTH`]; 2 unless said otherwise. With one, reading and copying
    /// take turns.
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.host_depth = slots;
        self
    }

    /// How many device slots there are, 1 to [`MAX_DEPTH`]; 2 unless said otherwise. With one, copying and
    /// computing take turns.
    pub fn device_depth(mut self, slots: usize) -> Self {
        self.device_depth = slots;
        self
    }

    /// Whether the host slots are write-combined memory: not cached, which may make the copy faster and makes
    /// reading them on the host very slow. `false` unless said otherwise.
    pub fn write_combined(mut self, write_combined: bool) -> Self {
        self.write_combined = write_combined;
        self
    }

    /// Whether a thread issues the copies; `true` unless said otherwise. If not,
    /// [`commit`](crate::HostSlot::commit) does, and nothing here waits for another thread: for a caller that
    /// drives both sides by hand.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Calls `on_copied` after each copy, in order: on the copy thread, or in `acquire` with `overlap(false)`.
    /// Empty batches are not copied. If it panics, the uploader ends.
    ///
    /// It comes when the copies are next looked at, not when one ends: on the copy thread soon after, with
    /// `overlap(false)` up to as many batches late as there are slots. It never comes for copies that still run when the
    /// [`DeviceBatches`] are dropped, or, with `overlap(false)`, the [`HostSlots`] without
    /// [`finish`](HostSlots::finish). [`Lease::copied`](crate::Lease::copied) tells one batch's time at once.
    pub fn on_copied(mut self, on_copied: impl FnMut(Copied) + Send + 'static) -> Self {
        self.on_copied = Some(Box::new(on_copied));
        self
    }

    /// Allocates the slots and starts the thread. `M` is what travels with each batch.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if a depth or the size is out of range; [`Error::Driver`] if there is not that much
    /// memory, or the driver fails; [`Error::Spawn`] if the system starts no thread. Nothing is left behind.
    pub fn build<M: Send + 'static>(self) -> Result<(HostSlots<M>, DeviceBatches<M>), Error> {
        let Self { ctx, slot_bytes, host_depth, device_depth, write_combined, overlap, on_copied } = self;
        for (option, depth) in [("host_depth", host_depth), ("device_depth", device_depth)] {
            if !(1..=MAX_DEPTH).contains(&depth) {
                let wanted = format!("1 to {MAX_DEPTH} slots");
                return Err(Error::Option { option, wanted, found: depth.to_string() });
            }
        }
        if slot_bytes == 0 {
            let wanted = "at least 1 byte".to_string();
            return Err(Error::Option { option: "slot_bytes", wanted, found: "0".to_string() });
        }
        let driver = Driver::load()?;
        cu::bind(&ctx)?;
        // cudarc keeps errors of drops for its next call; not to be taken for one of ours.
        check("a call before this uploader's", ctx.check_err())?;
        let stream = check("cuStreamCreate", ctx.new_stream())?;
        let flags = if write_combined { sys::CU_MEMHOSTALLOC_WRITECOMBINED } else { 0 };
        let host = (0..host_depth)
            .map(|_| HostBuf::new(&ctx, slot_bytes, flags))
            .collect::<Result<Vec<HostBuf<M>>, Error>>()?;
        let device = (0..device_depth)
            .map(|_| DeviceBuf::new(&stream, slot_bytes))
            .collect::<Result<Vec<DeviceBuf<M>>, Error>>()?;
        let clock = Arc::new(Clock::new(driver, &stream)?);
        let fate = Arc::new(Fate::new());

        let (device_tx, device_rx) = ring(device);
        let limit = host_depth.min(device_depth);
        let (slots, thread) = if overlap {
            let (host_tx, host_rx) = ring(host);
            let (clock, seen) = (clock.clone(), fate.clone());
            let thread = std::thread::Builder::new()
                .name("twinbuf-copy".to_string())
                .spawn(move || {
                    let copies = Copies::new(stream, clock, on_copied, limit.min(AHEAD));
                    copy::run(&host_rx, device_tx, copies, &seen);
                })
                .map_err(|error| Error::Spawn { kind: error.kind() })?;
            let thread = Arc::new(Thread(Some(thread)));
            (HostSlots::ahead(host_tx, device_depth, fate.clone(), thread.clone()), Some(thread))
        } else {
            let copies = Copies::new(stream, clock.clone(), on_copied, limit);
            let by_hand = ByHand::new(copies, host, device_tx, fate.clone());
            (HostSlots::by_hand(by_hand, device_depth, fate.clone()), None)
        };
        Ok((slots, DeviceBatches::new(device_rx, device_depth, clock, ctx, fate, thread)))
    }
}

type Handles<T> = (Producer<'static, T, Park>, Consumer<'static, T, Park>);

/// The ring of these slots, 1 to [`MAX_DEPTH`].
fn ring<T: Send + 'static>(slots: Vec<T>) -> Handles<T> {
    fn of<T: Send + 'static, const N: usize>(slots: Vec<T>) -> Handles<T> {
        let Ok(slots) = <[T; N]>::try_from(slots) else { unreachable!("matched on their number") };
        Ring::with_wait(slots, Park).into_handles()
    }
    match slots.len() {
        1 => of::<T, 1>(slots),
        2 => of::<T, 2>(slots),
        3 => of::<T, 3>(slots),
        4 => of::<T, 4>(slots),
        5 => of::<T, 5>(slots),
        6 => of::<T, 6>(slots),
        7 => of::<T, 7>(slots),
        8 => of::<T, 8>(slots),
        depth => unreachable!("checked by the builder: {depth}"),
    }
}

impl fmt::Debug for Uploader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slot_bytes, host_depth, device_depth, write_combined, overlap, .. } = self;
        f.debug_struct("Uploader")
            .field("slot_bytes", slot_bytes)
            .field("host_depth", host_depth)
            .field("device_depth", device_depth)
            .field("write_combined", write_combined)
            .field("overlap", overlap)
            .finish_non_exhaustive()
    }
}
