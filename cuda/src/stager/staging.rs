//! The caller's side of a scope: packs pieces into slots, and hands full slots to the fill threads.

use std::io;
use std::marker::PhantomData;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceSlice, SyncOnDrop};
use twinbuf_core::{Producer, ReservedSlot};

use super::order::{Fill, Host, Order, Piece, Way};
use crate::cu::{self, Current, Stream};
use crate::driver::check;
use crate::error::{Error, Fate, ended, ending, wrong};
use crate::lease::Element;

/// Says what to copy in a [scope](crate::Stager::scope).
///
/// Each call returns as soon as its pieces have slots, some of them perhaps not handed over yet. A call waits while the
/// fill threads have work for every slot.
///
/// Memory is named by cudarc's views: `slice.as_view_mut()`, `slice.slice_mut(8..16)`, the parts of
/// `slice.as_view_mut().chunks_exact_mut(8)`, `slice.as_view()`.
///
/// # Errors
///
/// Each call returns [`Error::Option`] if the two lengths differ, [`Error::OtherContext`], [`Error::Captured`] if the
/// scope's stream is being captured, [`Error::Driver`], and the error of an earlier call's copy that has failed by then
/// ([`Error::Closed`] if a fill panicked: then the scope panics too). An error other than the first two is also the
/// scope's if the closure returns `Ok`.
///
/// It stays on the thread of the scope: on another one, the per-thread default stream is another stream.
///
/// ```compile_fail,E0277
/// fn is_send<T: Send>() {}
/// is_send::<twinbuf_cuda::Staging<'_, '_>>();
/// ```
pub struct Staging<'s, 'env: 's> {
    pub(super) copies: &'s Stream,
    pub(super) used: Used<'env>,
    pub(super) orders: Producer<'s, Order<'s, 'env>>,
    /// The slot that is being packed.
    pub(super) open: Option<ReservedSlot<'s, Order<'s, 'env>>>,
    /// The last allocation that the driver was asked for. Empty before the first question, and after an error.
    pub(super) allocation: Range<CUdeviceptr>,
    pub(super) fate: &'s Fate,
    pub(super) _here: PhantomData<*const ()>,
}

impl<'s, 'env> Staging<'s, 'env> {
    /// Copies `bytes` to device memory of the same length.
    ///
    /// # Errors
    ///
    /// See [`Staging`].
    pub fn upload<T: Element>(&mut self, bytes: &'env [u8], dst: CudaViewMut<'env, T>) -> Result<(), Error> {
        same(bytes.len(), dst.num_bytes())?;
        self.fill::<T, u8>(dst, |at, out| {
            out.copy_from_slice(&bytes[at..][..out.len()]);
            Ok(())
        })
    }

    /// Copies what `fill` writes to device memory.
    ///
    /// `fill(at, out)` writes the bytes from byte `at` on to all of `out`, which contains other data before: it reads
    /// them from a file, or converts them. It is called for each part of the destination once, by several threads at a
    /// time if the destination spans slots. A part is a whole number of elements, and `out` starts at a multiple of the
    /// alignment of `T` in its slot.
    ///
    /// # Errors
    ///
    /// See [`Staging`]. An error that `fill` returns is [`Error::Fill`]. [`Error::Option`] if a slot is smaller than an
    /// element.
    pub fn upload_with<T: Element>(
        &mut self,
        fill: impl Fn(usize, &mut [u8]) -> io::Result<()> + Send + Sync + 'env,
        dst: CudaViewMut<'env, T>,
    ) -> Result<(), Error> {
        self.fill::<T, T>(dst, fill)
    }

    fn fill<T: Element, Part>(
        &mut self,
        dst: CudaViewMut<'env, T>,
        fill: impl Fn(usize, &mut [u8]) -> io::Result<()> + Send + Sync + 'env,
    ) -> Result<(), Error> {
        let (len, fill): (_, Arc<Fill<'env>>) = (dst.num_bytes(), Arc::new(fill));
        let device = self.address(&dst.stream().clone(), |stream| dst.view_ptr_mut(stream))?;
        self.add::<Part>(device, len, Way::Upload, |at, _| Host::Fill(fill.clone(), at))
    }

    /// Copies `src` from device memory to `out`. `out.len()` must equal the size of `src` in bytes. The bytes are in
    /// `out` when [`Stager::scope`](crate::Stager::scope) returns.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the sizes differ; else the errors of [`Staging`].
    pub fn offload<T: Element>(&mut self, src: CudaView<'env, T>, out: &'env mut [u8]) -> Result<(), Error> {
        let len = same(out.len(), src.num_bytes())?;
        let device = self.address(&src.stream().clone(), |stream| src.view_ptr(stream))?;
        let mut rest = out;
        self.add::<u8>(device, len, Way::Offload, |_, len| {
            Host::Take(rest.split_off_mut(..len).unwrap_or_default())
        })
    }

    /// Returns the address of the memory behind `view`, for use on the scope's stream.
    fn address(
        &mut self,
        owner: &Arc<CudaStream>,
        view: impl FnOnce(&'env CudaStream) -> (CUdeviceptr, SyncOnDrop<'env>),
    ) -> Result<CUdeviceptr, Error> {
        let ctx = self.copies.context();
        if owner.context() != ctx {
            return Err(Error::OtherContext);
        }
        let _current = self.usable()?;
        // With cudarc's event tracking on, `view` makes the stream wait for the memory's earlier uses, and the drop of
        // `guard` records this use.
        let (device, guard) = view(self.used.stream);
        if let Err(error) = check("cuStreamWaitEvent", ctx.check_err()) {
            // The stream has not waited for the memory's earlier uses, so the guard must not record this one.
            mem::forget(guard);
            return ending(self.fate, Err(error));
        }
        self.used.guards.push(guard);
        Ok(device)
    }

    /// Checks that work can be enqueued on the scope's stream, and makes the context current for it.
    fn usable(&self) -> Result<Current, Error> {
        self.fate.get().cloned().map_or(Ok(()), Err)?;
        let usable = Current::enter(self.copies.context()).and_then(|current| {
            // SAFETY: the borrow keeps the stream alive.
            let captured = unsafe { cu::is_captured(self.used.stream.cu_stream()) }?;
            if captured { Err(Error::Captured) } else { Ok(current) }
        });
        // Pieces that earlier calls packed may not be copied.
        ending(self.fate, usable)
    }

    /// Packs `len` bytes of device memory, from `device` on, into slots. Each piece is a whole number of `Part`, aligned in
    /// its slot. `host(offset, len)` returns the host's end of a piece.
    fn add<Part>(
        &mut self,
        device: CUdeviceptr,
        len: usize,
        way: Way,
        mut host: impl FnMut(usize, usize) -> Host<'env>,
    ) -> Result<(), Error> {
        let mut at = 0;
        while at < len {
            if self.open.as_ref().is_some_and(|order| order.way != way || order.room::<Part>().is_empty()) {
                self.dispatch()?;
            }
            let mut order = match self.open.take() {
                Some(order) => order,
                None => {
                    let slot = self.orders.acquire().map_err(|_closed| ended(self.fate))?;
                    let mut order = slot.reserve();
                    order.way = way;
                    order.pieces.clear();
                    order
                }
            };
            let room = order.room::<Part>();
            if room.is_empty() {
                let wanted = format!("at least {}, the bytes of an element", size_of::<Part>());
                return Err(wrong("slot_bytes", wanted, &order.slot.memory.len));
            }
            let (device, len) = (device + at as u64, room.len().min(len - at));
            let end = order.pieces.last().map(|last| (last.device + last.len as u64, last.at + last.len));
            let follows =
                end == Some((device, room.start)) && self.is_in_one_allocation(device - 1..device + 1);
            order.pieces.push(Piece { device, at: room.start, len, host: host(at, len), follows });
            at += len;
            let full = order.room::<u8>().is_empty();
            self.open = Some(order);
            if full {
                self.dispatch()?;
            }
        }
        Ok(())
    }

    /// Whether the driver has one allocation for these bytes. Allocations may follow each other, and a copy must not
    /// cross from one to the next.
    fn is_in_one_allocation(&mut self, bytes: Range<CUdeviceptr>) -> bool {
        let within = |all: &Range<CUdeviceptr>| all.start <= bytes.start && bytes.end <= all.end;
        if !within(&self.allocation) {
            let current = Current::enter(self.copies.context());
            // After an error the range is empty, so the two pieces are copied separately. An error of earlier work is
            // returned by the next call too.
            self.allocation = current.and_then(|_current| cu::allocation(bytes.start)).unwrap_or(0..0);
        }
        within(&self.allocation)
    }

    /// Hands the open slot over: its copies come after what is in the caller's stream now.
    fn dispatch(&mut self) -> Result<(), Error> {
        let Some(order) = self.open.take() else { return Ok(()) };
        let _current = self.usable()?;
        // SAFETY: the event and the stream exist. The slot was free, so every wait for the event's last record has been
        // enqueued.
        ending(self.fate, unsafe { cu::record(order.slot.ready.raw(), self.used.stream.cu_stream()) })?;
        order.commit().map_err(|_closed| ended(self.fate))
    }

    /// Hands the last slot over, if the caller's work has succeeded, and ends the ring of orders. The fill threads
    /// first finish the orders that are in it.
    pub(super) fn finish(mut self, worked: bool) -> Used<'env> {
        // The result is ignored: `fate` has the error of this call, or of the fill threads that have ended.
        let _ = if worked { self.dispatch() } else { Ok(()) };
        drop(self.open);
        self.orders.finish();
        self.used
    }
}

/// The uses of cudarc's memory in a scope.
pub(super) struct Used<'env> {
    pub(super) stream: &'env Arc<CudaStream>,
    /// Each records an event on the stream when it is dropped, with cudarc's event tracking on.
    pub(super) guards: Vec<SyncOnDrop<'env>>,
}

impl Used<'_> {
    /// Ends the uses: the copies are ordered before the stream's later work.
    pub(super) fn release(mut self) -> Result<(), Error> {
        let ctx = self.stream.context();
        let _current = Current::enter(ctx)?;
        self.guards.clear();
        check("cuEventRecord", ctx.check_err())
    }
}

impl Drop for Used<'_> {
    fn drop(&mut self) {
        if self.guards.is_empty() {
            return;
        }
        let _current = Current::enter_to_free(self.stream.context());
        // SAFETY: the borrow keeps the stream alive.
        if unsafe { cu::is_captured(self.stream.cu_stream()) } != Ok(false) {
            // Do not record the uses: the records would become part of the graph. They are not needed, because the host
            // waits for the copies.
            mem::forget(mem::take(&mut self.guards));
        }
    }
}

/// Both ends of a copy have the same length.
fn same(host: usize, device: usize) -> Result<usize, Error> {
    if host == device {
        return Ok(host);
    }
    Err(wrong("bytes", format!("{device} bytes, as many as the view has"), &host))
}

debug!([] Staging<'_, '_>, this, slots: this.orders.depth());
