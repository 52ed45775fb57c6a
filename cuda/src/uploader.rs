//! The builder: allocates the slots, and connects the two sides.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use twinbuf_core::{Consumer, HeapRing, Park, Producer};

use crate::batches::DeviceBatches;
use crate::copy::by_hand::ByHand;
use crate::copy::{self, Copies};
use crate::cu::{BesideCaptures, Current, Stream};
use crate::driver::{Driver, check};
use crate::error::{Error, Fate};
use crate::host::{HostSlots, Thread};
use crate::lease::Shared;
use crate::lent;
use crate::memory::{DeviceBytes, HostBytes};
use crate::slot::{DeviceBuf, HostBuf, Layout};
use crate::time::{Clock, Copied, OnCopied};

/// Builds the two sides of an upload: [`HostSlots`] and [`DeviceBatches`].
///
/// [`build`](Uploader::build) allocates all memory: `host_depth × slot_bytes` of page-locked host memory and
/// `device_depth × slot_bytes` of device memory. Nothing is allocated per batch. Page-locking takes long compared with
/// a batch, so keep an uploader for many epochs. The host slots are on the NUMA node of the thread that calls `build`,
/// unless a policy (`numactl`) chooses another. On a machine with several nodes, call `build` on a thread bound near
/// the device.
///
/// In a forked child process neither CUDA nor the copy thread works. Forget both sides there (`mem::forget`), because
/// dropping them joins that thread. (`twinbuf`'s loader does this.)
///
/// # Examples
///
/// ```no_run
/// use twinbuf_cuda::{Error, Uploader, context};
///
/// let ctx = context(0)?;
/// let (mut slots, mut batches) = Uploader::new(&ctx, 1 << 20)
///     .overlap(false) // no copy thread: `commit` issues the copy
///     .build::<&str>()?;
/// let stream = ctx.default_stream();
///
/// slots.acquire()?.commit(1 << 20, "first")?;
/// for _ in 0..10 {
///     let batch = batches.recv()?.unwrap();
///     let view = batch.on::<u8>(&stream)?;
///     // enqueue work on `view`; while it runs, release the batch and start the next copy
///     drop(batch);
///     slots.acquire()?.commit(1 << 20, "next")?;
/// }
/// # Ok::<(), Error>(())
/// ```
#[must_use = "a builder does nothing until `build`"]
pub struct Uploader {
    ctx: Arc<CudaContext>,
    slot_bytes: usize,
    chunk_bytes: Option<usize>,
    host_depth: Option<usize>,
    device_depth: usize,
    host_slots: Option<Vec<lent::Host>>,
    write_combined: bool,
    overlap: bool,
    times: bool,
    on_copied: Option<OnCopied>,
}

impl Uploader {
    /// The maximum number of slots on either side.
    pub const MAX_DEPTH: usize = 8;

    /// The maximum number of chunks per slot.
    pub const MAX_CHUNKS: usize = 1024;

    /// Creates a builder for an uploader in this context. `slot_bytes` is the maximum size of a batch in bytes, at
    /// least 1. Defaults: two host slots, two device slots, a copy thread, one chunk per slot, no timing.
    pub fn new(ctx: &Arc<CudaContext>, slot_bytes: usize) -> Self {
        Self {
            ctx: ctx.clone(),
            slot_bytes,
            chunk_bytes: None,
            host_depth: None,
            device_depth: 2,
            host_slots: None,
            write_combined: false,
            overlap: true,
            times: false,
            on_copied: None,
        }
    }

    /// Sets the chunk size in bytes. [`HostSlot::flush`](crate::HostSlot::flush) copies complete chunks while the
    /// rest of the slot is being filled. A usual size is 4 to 16 MiB. Default: the whole slot, copied by `commit`. A
    /// value above the slot size has the same effect. [`build`](Self::build) returns [`Error::Option`] if a slot
    /// would have more than [`MAX_CHUNKS`](Uploader::MAX_CHUNKS) chunks.
    pub fn chunk_bytes(mut self, bytes: usize) -> Self {
        self.chunk_bytes = Some(bytes);
        self
    }

    /// Uses host memory of the caller as host slots. Their number is the [`host_depth`](Uploader::host_depth).
    /// Default: the uploader allocates page-locked memory. [`build`](Self::build) returns [`Error::Option`] if a
    /// slot is smaller than the slot size, if the number is not 1 to [`MAX_DEPTH`](Uploader::MAX_DEPTH), or if
    /// `host_depth` was set to a different number.
    pub fn host_slots(mut self, slots: Vec<lent::Host>) -> Self {
        self.host_slots = Some(slots);
        self
    }

    /// Sets the number of host slots, 1 to [`MAX_DEPTH`](Uploader::MAX_DEPTH). Default: 2, or the number of
    /// [`host_slots`](Self::host_slots). With one slot, reading does not overlap with copying. [`build`](Self::build)
    /// returns [`Error::Option`] for a value out of range.
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.host_depth = Some(slots);
        self
    }

    /// Sets the number of device slots, 1 to [`MAX_DEPTH`](Uploader::MAX_DEPTH). Default: 2. With one slot, copying
    /// does not overlap with computing. [`build`](Self::build) returns [`Error::Option`] for a value out of range.
    pub fn device_depth(mut self, slots: usize) -> Self {
        self.device_depth = slots;
        self
    }

    /// Sets whether the host slots are write-combined. Write-combined memory is not cached: copies may be faster,
    /// but reading the slots on the host is very slow. Default: `false`. It has no effect on slots from
    /// [`host_slots`](Uploader::host_slots).
    pub fn write_combined(mut self, write_combined: bool) -> Self {
        self.write_combined = write_combined;
        self
    }

    /// Sets whether a copy thread issues the copies. Default: `true`. With `false`,
    /// [`commit`](crate::HostSlot::commit) issues them, and no call waits for another thread: use this to drive both
    /// sides from one thread.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Sets whether each copy is timed, for [`Lease::copied`](crate::Lease::copied). Timing costs one more event per
    /// batch, and timing events are slower. Default: `false`. With [`on_copied`](Uploader::on_copied), copies are
    /// always timed.
    pub fn times(mut self, times: bool) -> Self {
        self.times = times;
        self
    }

    /// Calls `on_copied` for each completed copy, in order, after its host slot was released. The call is made on
    /// the copy thread, or inside `acquire` with `overlap(false)`. Empty batches are not copied and cause no call.
    /// If `on_copied` panics, the uploader ends with [`Error::Abandoned`].
    ///
    /// The call is made when the copies are next polled: soon with a copy thread, and after one further batch per
    /// slot with `overlap(false)`. There is no call for a copy that is still running when the [`DeviceBatches`] are
    /// dropped, or, with `overlap(false)`, when the [`HostSlots`] are dropped without [`finish`](HostSlots::finish).
    /// To get the time of one batch without this delay, use [`Lease::copied`](crate::Lease::copied).
    pub fn on_copied(mut self, on_copied: impl FnMut(Copied) + Send + 'static) -> Self {
        self.on_copied = Some(Box::new(on_copied));
        self
    }

    /// Allocates the slots and starts the copy thread. `M` is the type of the value committed with each batch.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: a depth or a size is out of range, or a lent host slot is smaller than the slot size.
    /// - [`Error::NoDriver`], [`Error::NotADriver`], [`Error::StubDriver`]: no usable driver was found.
    /// - [`Error::Driver`]: a driver call failed, for example because there is not enough memory.
    /// - [`Error::Spawn`]: the system could not start the copy thread.
    ///
    /// On an error, all memory is freed.
    pub fn build<M: Send + 'static>(self) -> Result<(HostSlots<M>, DeviceBatches<M>), Error> {
        let Self { ctx, slot_bytes, chunk_bytes, device_depth, overlap, .. } = self;
        let host_depth = match (&self.host_slots, self.host_depth) {
            (Some(lent), Some(depth)) if depth != lent.len() => {
                let wanted = format!("{}, the number of lent slots", lent.len());
                return Err(Error::Option { option: "host_depth", wanted, found: depth.to_string() });
            }
            (Some(lent), _) => lent.len(),
            (None, depth) => depth.unwrap_or(2),
        };
        for (option, depth) in [("host_depth", host_depth), ("device_depth", device_depth)] {
            if !(1..=Self::MAX_DEPTH).contains(&depth) {
                let wanted = format!("1 to {} slots", Self::MAX_DEPTH);
                return Err(Error::Option { option, wanted, found: depth.to_string() });
            }
        }
        let least = slot_bytes.div_ceil(Self::MAX_CHUNKS).max(1);
        let chunk = chunk_bytes.unwrap_or(slot_bytes.max(1));
        let lent = self.host_slots.iter().flatten().map(|slot| ("host_slots", slot_bytes, slot.len));
        for (option, least, found) in
            [("slot_bytes", 1, slot_bytes), ("chunk_bytes", least, chunk)].into_iter().chain(lent)
        {
            if found < least {
                let wanted = format!("at least {least} byte{}", if least == 1 { "" } else { "s" });
                return Err(Error::Option { option, wanted, found: found.to_string() });
            }
        }
        let layout = Layout { bytes: slot_bytes, chunk: chunk.min(slot_bytes) };
        let driver = Driver::load()?;
        let _current = Current::enter(&ctx)?;
        let _beside = BesideCaptures::enter();
        // cudarc keeps errors of drops for its next call. Return such an error here, as one of an earlier call.
        check("a call before this uploader's", ctx.check_err())?;
        let stream = Arc::new(Stream::new(&ctx)?);
        let timed = self.times || self.on_copied.is_some();
        let flags = if self.write_combined { sys::CU_MEMHOSTALLOC_WRITECOMBINED } else { 0 };
        let host = match self.host_slots {
            Some(lent) => lent.into_iter().map(|slot| HostBytes::lent(slot.start, slot.lender)).collect(),
            None => (0..host_depth)
                .map(|_| HostBytes::new(&ctx, layout.bytes, flags))
                .collect::<Result<Vec<_>, Error>>()?,
        };
        let host: Vec<HostBuf<M>> =
            host.into_iter().flat_map(|memory| HostBuf::chunks(memory, layout)).collect();
        let device = (0..device_depth)
            .map(|_| DeviceBuf::new(&stream, DeviceBytes::new(&stream, layout.bytes)?, timed))
            .collect::<Result<Vec<DeviceBuf<M>>, Error>>()?;
        let clock = timed.then(|| Clock::new(driver, &stream).map(Arc::new)).transpose()?;
        let fate = Arc::new(Fate::new());
        let shared = Arc::new(Shared::new(ctx, clock.clone()));

        let (device_tx, device_rx) = ring(device);
        let limit = host_depth.min(device_depth);
        let (slots, thread) = if overlap {
            let (host_tx, mut host_rx) = ring(host);
            let (seen, on_copied) = (fate.clone(), self.on_copied);
            let thread = std::thread::Builder::new()
                .name("twinbuf-copy".to_string())
                .spawn(move || {
                    let copies = Copies::new(stream, clock, on_copied, limit, layout.chunks());
                    copy::thread::run(&mut host_rx, device_tx, copies, &seen);
                })
                .map_err(|error| Error::Spawn { kind: error.kind() })?;
            let thread = Arc::new(Thread(Some(thread)));
            let slots = HostSlots::ahead(host_tx, layout, device_depth, fate.clone(), thread.clone());
            (slots, Some(thread))
        } else {
            // One `HostBuf` per slot: by hand, it hands over the slot's chunks one by one.
            let host = host.into_iter().step_by(layout.chunks()).collect();
            let copies = Copies::new(stream, clock, self.on_copied, limit, layout.chunks());
            let by_hand = ByHand::new(copies, host, device_tx, fate.clone(), shared.clone());
            (HostSlots::by_hand(by_hand, layout, device_depth, fate.clone()), None)
        };
        Ok((slots, DeviceBatches::new(device_rx, shared, fate, thread)))
    }
}

type Handles<T> = (Producer<'static, T, Park>, Consumer<'static, T, Park>);

fn ring<T: Send + 'static>(slots: Vec<T>) -> Handles<T> {
    HeapRing::with_wait(slots, Park).into_handles()
}

impl fmt::Debug for Uploader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slot_bytes, chunk_bytes, host_depth, device_depth, write_combined, overlap, .. } = self;
        f.debug_struct("Uploader")
            .field("slot_bytes", slot_bytes)
            .field("chunk_bytes", chunk_bytes)
            .field("host_depth", host_depth)
            .field("device_depth", device_depth)
            .field("write_combined", write_combined)
            .field("overlap", overlap)
            .finish_non_exhaustive()
    }
}
