//! The builder: allocates the slots, and connects the two sides.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use cudarc::driver::CudaContext;
use twinbuf_core::HeapRing;

use crate::batches::DeviceBatches;
use crate::copy::{Copies, Engine, Hand};
use crate::cu::{self, Owner, Stream};
use crate::driver::{Driver, check};
use crate::error::{Error, wrong};
use crate::host::{Copying, HostSlots, ThreadShare};
use crate::lease::Shared;
use crate::lent::{Host, page_locked};
use crate::slot::{DeviceBuf, HostBuf};
use crate::time::{Clock, Copied, OnCopied};

/// Builds the two sides of an upload: [`HostSlots`] and [`DeviceBatches`].
///
/// [`build`](Uploader::build) allocates the slots: `host_depth × slot_bytes` of page-locked host memory (unless they
/// are lent) and `device_depth × slot_bytes` of device memory. Only [`Lease::into_owned`](crate::Lease::into_owned)
/// allocates memory per batch. Page-locking takes long compared with a batch, so keep an uploader for many epochs. On
/// Linux, the host slots are on the NUMA node of the thread that calls `build`, unless a policy (`numactl`) chooses
/// another. On a machine with several nodes, call `build` on a thread bound near the device.
///
/// A device that other code resets (`cuDevicePrimaryCtxReset`, `cudaDeviceReset`) takes the slots' memory and events
/// with it. Drop all uploaders, leases and stagers before: afterwards the page-locked slots are not mapped, and
/// `acquire` may still hand one out.
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
    ctx: Owner<Arc<CudaContext>>,
    slot_bytes: usize,
    host_depth: Option<usize>,
    device_depth: usize,
    host_slots: Option<Vec<Host>>,
    overlap: bool,
    copy_stream: bool,
    times: bool,
    on_copied: Option<OnCopied>,
}

impl Uploader {
    /// Creates a builder for an uploader in this context. `slot_bytes` is the maximum size of a batch in bytes, at
    /// least 1. Defaults: two host slots, two device slots, a copy thread, a copy stream, no timing.
    pub fn new(ctx: &Arc<CudaContext>, slot_bytes: usize) -> Self {
        Self {
            ctx: Owner::new(ctx.clone()),
            slot_bytes,
            host_depth: None,
            device_depth: 2,
            host_slots: None,
            overlap: true,
            copy_stream: true,
            times: false,
            on_copied: None,
        }
    }

    /// Uses host memory of the caller as host slots. Their number is the [`host_depth`](Uploader::host_depth).
    /// Default: the uploader allocates page-locked memory. [`build`](Self::build) returns [`Error::Option`] if a
    /// slot is smaller than the slot size, if there is none, or if `host_depth` was set to a different number.
    pub fn host_slots(self, slots: Vec<Host>) -> Self {
        Self { host_slots: Some(slots), ..self }
    }

    /// Sets the number of host slots, at least 1. Default: 2, or the number of [`host_slots`](Self::host_slots). With
    /// one slot, reading does not overlap with copying; with several filling threads, take one slot more than there are
    /// threads. [`build`](Self::build) returns [`Error::Option`] for 0.
    pub fn host_depth(self, slots: usize) -> Self {
        Self { host_depth: Some(slots), ..self }
    }

    /// Sets the number of device slots, at least 1. Default: 2. With one slot, copying does not overlap with computing.
    /// [`build`](Self::build) returns [`Error::Option`] for 0.
    pub fn device_depth(self, slots: usize) -> Self {
        Self { device_depth: slots, ..self }
    }

    /// Sets whether a copy thread issues the copies. Default: `true`. With `false`,
    /// [`commit`](crate::ReservedSlot::commit) and later calls of both sides issue them, on the calling thread: use
    /// this to drive both sides from one thread.
    pub fn overlap(self, overlap: bool) -> Self {
        Self { overlap, ..self }
    }

    /// Sets whether the copies have a stream of their own. Default: `true`. With `false`, they are issued on the
    /// context's default stream ([`CudaContext::default_stream`]), in order with the work on it: a copy does not
    /// overlap with computing there. Use this to measure what the copy stream gains. The slots and the waits stay the
    /// same.
    ///
    /// A stream that does not synchronize with the default stream, such as one of [`CudaContext::new_stream`], still
    /// overlaps with copies. While a stream that does is being captured, make no call and drop nothing of this
    /// uploader: that can invalidate the capture and end the uploader with [`Error::Driver`]. The times of copies
    /// may include work that other threads enqueue on the default stream meanwhile: compare wall times.
    pub fn copy_stream(self, copy_stream: bool) -> Self {
        Self { copy_stream, ..self }
    }

    /// Sets whether each copy is timed, for [`Lease::copied`](crate::Lease::copied). Timing costs one more record per
    /// batch, and timing events are slower. Default: `false`. With [`on_copied`](Uploader::on_copied), copies are
    /// always timed.
    pub fn times(self, times: bool) -> Self {
        Self { times, ..self }
    }

    /// Calls `on_copied` for each completed copy, in order, after its host slot was released. The call is made on the
    /// copy thread, or inside a call or a drop of either side with `overlap(false)`. Empty batches are not copied and
    /// cause no call. If `on_copied` panics, the training side receives [`Error::Abandoned`], and the filling side
    /// [`Error::Closed`]. With `overlap(false)`, the panic also reaches the caller, and calls of the uploader from
    /// within `on_copied` neither wait nor issue copies.
    ///
    /// The call is made when the copies are next polled: soon with a copy thread, and at most one further batch per
    /// host slot later with `overlap(false)`. There is no call for a copy that was not yet polled as complete when the
    /// [`DeviceBatches`] are dropped or an error ends the uploader. To get the time of one batch without this delay,
    /// use [`Lease::copied`](crate::Lease::copied).
    pub fn on_copied(self, on_copied: impl FnMut(Copied) + Send + 'static) -> Self {
        Self { on_copied: Some(Box::new(on_copied)), ..self }
    }

    /// Makes the slots and starts the copy thread, if there is to be one. `M` is the type of the value committed
    /// with each batch.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: a depth or a size is out of range, a lent host slot is smaller than the slot size, or
    ///   `host_depth` is not the number of lent slots.
    /// - [`Error::NoDriver`], [`Error::NotADriver`], [`Error::StubDriver`]: no usable driver was loaded.
    /// - [`Error::Driver`]: a driver call failed, for example because there is not enough memory.
    /// - [`Error::Spawn`]: the system could not start the copy thread.
    ///
    /// On an error, all memory is freed.
    pub fn build<M: Send + 'static>(self) -> Result<(HostSlots<M>, DeviceBatches<M>), Error> {
        let Self { ctx, slot_bytes, device_depth, overlap, .. } = self;
        let lent = self.host_slots.as_ref().map(Vec::len);
        let host_depth = self.host_depth.or(lent).unwrap_or(2);
        if let Some(lent) = lent.filter(|lent| *lent != host_depth) {
            return Err(wrong("host_depth", format!("{lent}, the number of lent slots"), &host_depth));
        }
        let lent = self.host_slots.iter().flatten().map(|slot| ("host_slots", slot_bytes, slot.len));
        let sizes =
            [("host_depth", 1, host_depth), ("device_depth", 1, device_depth), ("slot_bytes", 1, slot_bytes)];
        for (option, least, found) in sizes.into_iter().chain(lent) {
            if found < least {
                let unit = if option.ends_with("depth") { "slot" } else { "byte" };
                let wanted = format!("at least {least} {unit}{}", if least == 1 { "" } else { "s" });
                return Err(wrong(option, wanted, &found));
            }
        }
        for (option, depth) in [("host_depth", host_depth), ("device_depth", device_depth)] {
            if depth.checked_mul(slot_bytes).is_none_or(|bytes| bytes > isize::MAX as usize) {
                let wanted = format!("slots of {slot_bytes} bytes that fit the memory");
                return Err(wrong(option, wanted, &depth));
            }
        }
        let driver = Driver::load()?;
        let _apart = cu::apart(&ctx)?;
        // cudarc keeps an error of a drop until its next call. Return it here, marked as one of an earlier call.
        check("a call before this uploader's", ctx.check_err())?;
        let stream = Arc::new(Stream::new(&ctx, self.copy_stream)?);
        let timed = self.times || self.on_copied.is_some();
        let host: Result<Vec<_>, Error> = match self.host_slots {
            Some(lent) => lent.into_iter().map(|slot| Ok(Host { len: slot_bytes, ..slot })).collect(),
            None => (0..host_depth).map(|_| page_locked(&ctx, slot_bytes)).collect(),
        };
        let host: Vec<_> = host?.into_iter().map(|memory| HostBuf { memory, len: 0, meta: None }).collect();
        let device = (0..device_depth)
            .map(|_| DeviceBuf::new(&stream, slot_bytes, timed))
            .collect::<Result<Vec<DeviceBuf<M>>, Error>>()?;
        let clock = timed.then(|| Clock::new(driver, &stream).map(Arc::new)).transpose()?;
        let shared = Arc::new(Shared::new(ctx, clock.clone()));

        let (host_tx, host_rx) = HeapRing::new(host).into_handles();
        let (device_tx, device_rx) = HeapRing::new(device).into_handles();
        // Each copy in flight keeps its host slot.
        let running = VecDeque::with_capacity(host_depth);
        let copies = Copies { stream, on_copied: self.on_copied.zip(clock), running, task: None };
        let engine = Engine { host: host_rx, copies, next: None, device: device_tx };
        let (hand, thread) = if overlap {
            let fate = shared.fate.clone();
            let spawned = std::thread::Builder::new()
                .name("twinbuf-copy".to_string())
                .spawn(move || engine.run(&fate))
                .map_err(|error| Error::Spawn { kind: error.kind() })?;
            (None, ThreadShare(Some(Arc::new(spawned))))
        } else {
            let (engine, user) = (Mutex::new(Some(Box::new(engine))), Mutex::new(None));
            (Some(Arc::new(Hand { engine, user, shared: shared.clone() })), ThreadShare(None))
        };
        let copying = Copying { fate: shared.fate.clone(), hand: hand.clone() };
        let slots = HostSlots { ring: host_tx, copying, _thread: thread.clone() };
        Ok((slots, DeviceBatches { ring: device_rx, next: 0, shared, hand, _thread: thread }))
    }
}

debug!([] Uploader, this, slot_bytes: this.slot_bytes, host_depth: this.host_depth,
    device_depth: this.device_depth, overlap: this.overlap);
