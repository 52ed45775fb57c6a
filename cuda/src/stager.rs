//! Copies files or host memory to device memory that the caller allocated, and device memory to host memory: the
//! weights of a model, or state that is moved off the device and back.
//!
//! ```text
//! caller          upload, upload, upload ──── one slot's worth of pieces ────┐ ring
//! fill thread     wait for copied (1) ─ fill the slot ─ issue its copies ◄───┘
//! copy stream     ─ wait for ready (3) ─ copy ─ copy ─ record copied ─ ...   record done
//! caller's stream ─ record ready ─                                           wait for done (2) ─
//! ```
//!
//! The three edges are those of an uploader: host memory is refilled after its copy (1), memory is used after its copy
//! (2), and a copy comes after the uses before it (3).

use std::marker::PhantomData;
use std::mem;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;

use cudarc::driver::{CudaContext, CudaStream};
use twinbuf_core::HeapRing;

use crate::cu::{self, Current, Event, Owner, Stream};
use crate::driver::{Driver, check};
use crate::edge;
use crate::error::{Error, Fate, OnDrop, wrong};
use crate::lent::page_locked;

mod order;
mod staging;

use order::{Order, Slot, Way};
pub use staging::Staging;
use staging::Used;

/// Builds a [`Stager`]; made by [`Stager::new`].
#[derive(Clone)]
#[must_use = "a builder does nothing until `build`"]
pub struct StagerBuilder {
    ctx: Owner<Arc<CudaContext>>,
    slot_bytes: usize,
    depth: usize,
    fill_threads: usize,
}

impl StagerBuilder {
    /// Sets the size of a slot in bytes, at least 1. Default: 8 MiB.
    ///
    /// A longer piece is split; shorter ones share a slot.
    pub fn slot_bytes(self, bytes: usize) -> Self {
        Self { slot_bytes: bytes, ..self }
    }

    /// Sets the number of slots per fill thread, 1 to 65536. Default: 2, so that one can be filled while another is
    /// copied.
    pub fn depth(self, slots: usize) -> Self {
        Self { depth: slots, ..self }
    }

    /// Sets the number of threads that fill slots, 1 to 64. Default: 4.
    pub fn fill_threads(self, threads: usize) -> Self {
        Self { fill_threads: threads, ..self }
    }

    /// Allocates the slots: `fill_threads × depth × slot_bytes` bytes of page-locked memory.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if a number is out of range; [`Error::NoDriver`], [`Error::NotADriver`] or
    /// [`Error::StubDriver`] if no usable driver was loaded; [`Error::Driver`] if there is not enough memory or the
    /// driver fails. Everything allocated before the error is freed.
    pub fn build(self) -> Result<Stager, Error> {
        let Self { ctx, slot_bytes, depth, fill_threads } = self;
        for (option, range, found) in [
            ("slot_bytes", 1..=isize::MAX as usize, slot_bytes),
            ("depth", 1..=1 << 16, depth),
            ("fill_threads", 1..=64, fill_threads),
        ] {
            if !range.contains(&found) {
                return Err(wrong(option, format!("{} to {}", range.start(), range.end()), &found));
            }
        }
        Driver::load()?;
        let _apart = cu::apart(&ctx)?;
        check("a call before this stager's", ctx.check_err())?;
        let stream = Stream::new(&ctx, true)?;
        let slot = |_| {
            Ok(Slot {
                memory: page_locked(&ctx, slot_bytes)?,
                ready: Event::new(&ctx, false, false)?,
                copied: Event::new(&ctx, false, true)?,
            })
        };
        let slots = (0..depth * fill_threads).map(slot).collect::<Result<_, Error>>()?;
        let done = Event::new(&ctx, false, false)?;
        Ok(Stager { slots, fill_threads, stream, done, lost: None })
    }
}

/// Copies between the host and device memory of the caller's, through page-locked slots.
///
/// All copies are asked for within a [`scope`](Stager::scope), as threads are in [`std::thread::scope`]. Fill threads
/// read or copy into the slots in parallel, each slot is one copy for every run of adjacent destinations in one
/// allocation, and the copies run on a separate stream while the next slots are being filled.
///
/// * **Destinations and sources are borrowed until the end of the scope**, also if a value is leaked with
///   [`mem::forget`]: no safe code frees or uses memory under a running copy.
/// * The copies come after the work that is in the scope's stream, and the stream's later work comes after the copies.
///   The host waits until the slots have been filled and the copies enqueued, and for the bytes of offloads.
/// * If a fill or a driver call fails, the copies that were issued are waited for before `scope` returns the error.
/// * Slots are allocated once: keep a stager for many scopes. Threads are started by each scope.
///
/// # Examples
///
/// ```no_run
/// use twinbuf_cuda::{Error, Stager, context};
///
/// let ctx = context(0)?;
/// let stream = ctx.default_stream();
/// let mut weights = stream.alloc_zeros::<f32>(1 << 20).unwrap();
/// let mut bias = stream.alloc_zeros::<f32>(1024).unwrap();
/// let file = std::fs::File::open("weights.bin").unwrap();
/// let ones = 1.0f32.to_le_bytes().repeat(1024);
///
/// let mut stager = Stager::new(&ctx).slot_bytes(32 << 20).fill_threads(4).build()?;
/// stager.scope(&stream, |to| {
///     // Called for each part that fits in a slot, by several threads.
///     # #[cfg(unix)]
///     to.upload_with(|at, out| std::os::unix::fs::FileExt::read_exact_at(&file, out, at as u64), weights.as_view_mut())?;
///     to.upload(&ones, bias.as_view_mut())
/// })?;
/// // work on `stream` finds both
/// # Ok::<(), Error>(())
/// ```
///
/// The memory is borrowed for as long as its copy may run:
///
/// ```compile_fail,E0505
/// # use twinbuf_cuda::{Error, Stager, context};
/// # let ctx = context(0)?;
/// # let stream = ctx.default_stream();
/// # let mut stager = Stager::new(&ctx).build()?;
/// let mut weights = stream.alloc_zeros::<f32>(1024).unwrap();
/// stager.scope(&stream, |to| {
///     to.upload(&[0; 4096], weights.as_view_mut())?;
///     drop(weights); // freed under the copy
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub struct Stager {
    slots: Vec<Slot>,
    fill_threads: usize,
    stream: Stream,
    /// Recorded after the last copy of a scope.
    done: Event,
    /// Set if the copies of a scope could not be waited for: they may still use the slots.
    lost: Option<Error>,
}

impl Stager {
    /// Describes a stager in this context, with 4 threads of two slots of 8 MiB each.
    #[allow(clippy::new_ret_no_self, reason = "as `Uploader::new` and `build`")]
    pub fn new(ctx: &Arc<CudaContext>) -> StagerBuilder {
        StagerBuilder { ctx: Owner::new(ctx.clone()), slot_bytes: 8 << 20, depth: 2, fill_threads: 4 }
    }

    /// Calls `work`, which says what to copy. When this returns `Ok`, every fill and offload is done and every upload
    /// is enqueued: work that is enqueued on `stream` from then on finds the data.
    ///
    /// `stream` is the stream that uses the memory. As with cudarc's own copies on it, the uses of that memory on other
    /// streams are ordered by cudarc's event tracking, or by the caller if that is off. It may be the per-thread
    /// default stream.
    ///
    /// # Errors
    ///
    /// The error that `work` returns; otherwise the first one of a copy: [`Error::Fill`], [`Error::Driver`],
    /// [`Error::Spawn`] if a thread cannot be started; [`Error::OtherContext`]; [`Error::Captured`] if `stream` is
    /// being captured when `work` asks for a copy, or at the end. The capture stays valid. After an error none of its
    /// copies is running, and the contents of the destinations are unspecified. The stager can be used again, unless
    /// the driver failed to wait for the copies: every later call then returns that error, and the slots are leaked.
    ///
    /// # Panics
    ///
    /// If `work` or a fill panics, after all copies have been waited for.
    pub fn scope<'env, R, E: From<Error>>(
        &mut self,
        stream: &'env Arc<CudaStream>,
        work: impl FnOnce(&mut Staging<'_, 'env>) -> Result<R, E>,
    ) -> Result<R, E> {
        self.begin(stream)?;
        let Self { slots, fill_threads, stream: copies, done, lost } = self;
        let (copies, fate) = (&*copies, Fate::new());
        // After an error or a panic, wait for the copies; otherwise the caller's stream does. If the wait fails, the
        // context is lost and no work runs in it: on a stream that exists, the driver documents only errors of the context
        // and of earlier work (CUDA driver API, `cuStreamSynchronize`).
        let drain = OnDrop(|| *lost = copies.settle().err());
        let ended = thread::scope(|threads| {
            let order = |slot| Order { slot, way: Way::Upload, pieces: Vec::new() };
            let slots: Vec<_> = slots.iter_mut().map(order).collect();
            let (producer, consumer) = HeapRing::new(slots).into_handles();
            let orders = Arc::new(Mutex::new(Some(consumer)));
            let mut running = Vec::new();
            for _ in 0..*fill_threads {
                let (fate, orders) = (&fate, orders.clone());
                let thread = thread::Builder::new()
                    .name("twinbuf-stage".to_string())
                    .spawn_scoped(threads, move || order::run(&orders, copies, fate))
                    .map_err(|error| Error::Spawn { kind: error.kind() })?;
                running.push(thread);
            }
            let used = Used { stream, guards: Vec::new() };
            let (open, allocation, _here) = (None, 0..0, PhantomData);
            let mut staging =
                Staging { copies, used, orders: producer, open, allocation, fate: &fate, _here };
            let worked = work(&mut staging);
            let used = staging.finish(worked.is_ok());
            for thread in running {
                // Its error is in `fate`.
                let _ = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            }
            let value = worked?;
            fate.get().cloned().map_or(Ok(()), Err)?;
            {
                let _current = Current::enter(copies.context())?;
                // SAFETY: the stream exists, and its handle names the same stream as before on this thread.
                if unsafe { cu::is_captured(stream.cu_stream()) }? {
                    return Err(Error::Captured.into());
                }
                // SAFETY: both exist.
                unsafe { cu::record(done.raw(), copies.raw()) }?;
                // SAFETY: as above.
                unsafe { edge::use_after_copy(stream.cu_stream(), done.raw()) }?;
            }
            used.release()?;
            Ok(value)
        });
        if ended.is_ok() {
            mem::forget(drain);
        }
        ended
    }

    /// Checks that the stream can be used.
    fn begin(&self, stream: &CudaStream) -> Result<(), Error> {
        let ctx = self.stream.context();
        self.lost.clone().map_or(Ok(()), Err)?;
        if stream.context() != ctx {
            return Err(Error::OtherContext);
        }
        // cudarc keeps an error of a drop until its next call. Return it here, marked as one of an earlier call.
        check("a call before this scope's", ctx.check_err())
    }
}

impl Drop for Stager {
    fn drop(&mut self) {
        if self.lost.is_some() || self.stream.settle().is_err() {
            // A copy may still use the slots: leak them.
            mem::forget(mem::take(&mut self.slots));
        }
    }
}

debug!([] StagerBuilder, this, slot_bytes: this.slot_bytes, depth: this.depth, fill_threads: this.fill_threads);

debug!([] Stager, this, slots: this.slots.len(), fill_threads: this.fill_threads, error: this.lost);
