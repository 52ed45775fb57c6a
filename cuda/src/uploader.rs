//! Puts the two sides together.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, sys};
use twinbuf_core::{Consumer, HeapRing, Park, Producer};

use crate::copy::{self, ByHand, Clock, Copied, Copies, Fate, OnCopied};
use crate::cu::{BesideCaptures, Current, DeviceBytes, HostBytes, Lender, Stream, check};
use crate::driver::Driver;
use crate::error::Error;
use crate::host::{HostSlots, Thread};
use crate::lease::DeviceBatches;
use crate::slot::{DeviceBuf, HostBuf, Layout};

/// The most slots that either side can have.
pub const MAX_DEPTH: usize = 8;

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
/// let (mut slots, mut batches) = Uploader::new(&ctx, 1 << 20)
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
    arrays: Vec<usize>,
    chunk_bytes: Option<usize>,
    host_depth: usize,
    device_depth: usize,
    host_slots: Option<Vec<LentHost>>,
    device_slots: Option<Vec<LentDevice>>,
    write_combined: bool,
    overlap: bool,
    times: bool,
    on_copied: Option<OnCopied>,
}

impl Uploader {
    /// An uploader in this context, for batches of at most `slot_bytes`: two slots on either side, a copy thread.
    pub fn new(ctx: &Arc<CudaContext>, slot_bytes: usize) -> Self {
        Self {
            ctx: ctx.clone(),
            arrays: vec![slot_bytes],
            chunk_bytes: None,
            host_depth: 2,
            device_depth: 2,
            host_slots: None,
            device_slots: None,
            write_combined: false,
            overlap: true,
            times: false,
            on_copied: None,
        }
    }

    /// Several arrays a slot instead of one blob, each of at most as many bytes: they begin at multiples of 256 bytes
    /// ([`HostSlot::arrays`](crate::HostSlot::arrays)), and of each only what a batch has is copied
    /// ([`HostSlot::commit_arrays`](crate::HostSlot::commit_arrays)).
    pub fn arrays(mut self, bytes: &[usize]) -> Self {
        self.arrays = bytes.to_vec();
        self
    }

    /// How large the pieces are whose copy [`HostSlot::flush`](crate::HostSlot::flush) starts while the rest of the
    /// slot is being filled; 4 to 16 MiB are usual. Default: the whole slot, so that nothing is copied before `commit`.
    pub fn chunk_bytes(mut self, bytes: usize) -> Self {
        self.chunk_bytes = Some(bytes);
        self
    }

    /// Host slots that somebody else has allocated, in the place of [`host_depth`](Uploader::host_depth) new ones.
    pub fn host_slots(mut self, slots: Vec<LentHost>) -> Self {
        self.host_depth = slots.len();
        self.host_slots = Some(slots);
        self
    }

    /// Device slots that somebody else has allocated, in the place of [`device_depth`](Uploader::device_depth) new
    /// ones.
    pub fn device_slots(mut self, slots: Vec<LentDevice>) -> Self {
        self.device_depth = slots.len();
        self.device_slots = Some(slots);
        self
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

    /// Whether each copy is timed, for [`Lease::copied`](crate::Lease::copied): one more event a batch, and events
    /// that keep time. Default: only with [`on_copied`](Uploader::on_copied).
    pub fn times(mut self, times: bool) -> Self {
        self.times = times;
        self
    }

    /// Calls `on_copied` after each copy, in order, once its host slot is free: on the copy thread, or in `acquire`
    /// with `overlap(false)`. Empty batches are not copied. If it panics, the uploader ends.
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
        let Self { ctx, arrays, chunk_bytes, host_depth, device_depth, overlap, .. } = self;
        for (option, depth) in [("host_depth", host_depth), ("device_depth", device_depth)] {
            if !(1..=MAX_DEPTH).contains(&depth) {
                let wanted = format!("1 to {MAX_DEPTH} slots");
                return Err(Error::Option { option, wanted, found: depth.to_string() });
            }
        }
        let at_least_one = |option, found: usize| {
            let wanted = "at least 1 byte".to_string();
            if found > 0 { Ok(()) } else { Err(Error::Option { option, wanted, found: found.to_string() }) }
        };
        at_least_one("chunk_bytes", chunk_bytes.unwrap_or(1))?;
        let Some(layout) = Layout::new(&arrays, chunk_bytes) else {
            let wanted = "as many bytes as can be addressed".to_string();
            return Err(Error::Option { option: "arrays", wanted, found: format!("{arrays:?}") });
        };
        at_least_one("slot_bytes", layout.bytes)?;
        let lent_host = self.host_slots.iter().flatten().map(|slot| ("host_slots", slot.len));
        let lent_device = self.device_slots.iter().flatten().map(|slot| ("device_slots", slot.len));
        for (option, len) in lent_host.chain(lent_device) {
            if len < layout.bytes {
                let wanted = format!("slots of at least {} bytes", layout.bytes);
                return Err(Error::Option { option, wanted, found: len.to_string() });
            }
        }
        let layout = Arc::new(layout);
        let driver = Driver::load()?;
        let _current = Current::enter(&ctx)?;
        let _beside = BesideCaptures::enter();
        // cudarc keeps errors of drops for its next call; not to be taken for one of ours.
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
            host.into_iter().flat_map(|memory| HostBuf::chunks(memory, &layout)).collect();
        let device = match self.device_slots {
            Some(lent) => {
                lent.into_iter().map(|slot| DeviceBytes::lent(&stream, slot.start, slot.lender)).collect()
            }
            None => (0..device_depth)
                .map(|_| DeviceBytes::new(&stream, layout.bytes))
                .collect::<Result<Vec<_>, Error>>()?,
        };
        let device = device
            .into_iter()
            .map(|bytes| DeviceBuf::new(&stream, bytes, timed))
            .collect::<Result<Vec<DeviceBuf<M>>, Error>>()?;
        let clock = timed.then(|| Clock::new(driver, &stream).map(Arc::new)).transpose()?;
        let fate = Arc::new(Fate::new());

        let (device_tx, device_rx) = ring(device);
        let limit = host_depth.min(device_depth);
        let copies_layout = layout.clone();
        let (slots, thread) = if overlap {
            let (host_tx, mut host_rx) = ring(host);
            let (clock, seen, on_copied) = (clock.clone(), fate.clone(), self.on_copied);
            let thread = std::thread::Builder::new()
                .name("twinbuf-copy".to_string())
                .spawn(move || {
                    let copies = Copies::new(driver, stream, copies_layout, clock, on_copied, limit);
                    copy::run(&mut host_rx, device_tx, copies, &seen);
                })
                .map_err(|error| Error::Spawn { kind: error.kind() })?;
            let thread = Arc::new(Thread(Some(thread)));
            let slots = HostSlots::ahead(host_tx, layout.clone(), device_depth, fate.clone(), thread.clone());
            (slots, Some(thread))
        } else {
            // A slot's chunks are handed over in its one turn.
            let host = host.into_iter().step_by(layout.chunks()).collect();
            let copies = Copies::new(driver, stream, copies_layout, clock.clone(), self.on_copied, limit);
            let by_hand = ByHand::new(copies, host, device_tx, fate.clone());
            (HostSlots::by_hand(by_hand, device_depth, fate.clone()), None)
        };
        Ok((slots, DeviceBatches::new(device_rx, layout, clock, ctx, fate, thread)))
    }
}

/// Host memory that somebody else has allocated, as one slot; see [`Uploader::host_slots`].
pub struct LentHost {
    start: NonNull<u8>,
    len: usize,
    lender: Lender,
}

impl LentHost {
    /// `len` bytes at `start`, of any alignment. `lender` keeps them allocated, and is dropped when nothing uses them
    /// any more, on whatever thread that happens. Page-locked memory is copied while the program goes on; any other is
    /// staged by the driver first.
    ///
    /// # Safety
    ///
    /// The bytes can be read and written, are initialized, and are nobody else's until `lender` is dropped.
    pub unsafe fn new(start: NonNull<u8>, len: usize, lender: impl Send + 'static) -> Self {
        Self { start, len, lender: Box::new(lender) }
    }
}

// SAFETY: memory that is nobody else's, and a `Send` lender.
unsafe impl Send for LentHost {}

/// Device memory that somebody else has allocated, as one slot; see [`Uploader::device_slots`].
pub struct LentDevice {
    start: CUdeviceptr,
    len: usize,
    lender: Lender,
}

impl LentDevice {
    /// `len` bytes at `start`. `lender` keeps them allocated, and is dropped when everything that was enqueued for them
    /// here is done, on whatever thread that happens.
    ///
    /// # Safety
    ///
    /// The bytes are of the uploader's context, and nobody else's until `lender` is dropped: no work uses them that was
    /// enqueued before and is not done.
    pub unsafe fn new(start: CUdeviceptr, len: usize, lender: impl Send + 'static) -> Self {
        Self { start, len, lender: Box::new(lender) }
    }
}

impl fmt::Debug for LentHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentHost").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

impl fmt::Debug for LentDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentDevice")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

type Handles<T> = (Producer<'static, T, Park>, Consumer<'static, T, Park>);

fn ring<T: Send + 'static>(slots: Vec<T>) -> Handles<T> {
    HeapRing::with_wait(slots, Park).into_handles()
}

impl fmt::Debug for Uploader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arrays, chunk_bytes, host_depth, device_depth, write_combined, overlap, .. } = self;
        f.debug_struct("Uploader")
            .field("arrays", arrays)
            .field("chunk_bytes", chunk_bytes)
            .field("host_depth", host_depth)
            .field("device_depth", device_depth)
            .field("write_combined", write_combined)
            .field("overlap", overlap)
            .finish_non_exhaustive()
    }
}
