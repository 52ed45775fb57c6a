//! Implements the traits of `embedded-dma`: a guard can be the buffer of a DMA transfer.

use embedded_dma::{ReadBuffer, ReadTarget, WriteBuffer, WriteTarget};

use crate::consumer::KeptSlot;
use crate::producer::ReservedSlot;
use crate::wait::Wait;

/// A reserved slot can be the destination of a DMA transfer (feature `embedded-dma`).
///
/// A transfer owns its buffer, and safe code can leak the transfer while the DMA engine runs. The memory must
/// therefore stay reserved until the guard is dropped. A `'static` guard ensures this: one of an owned ring
/// ([`HeapRing`](crate::HeapRing)) of `'static` values, or of a ring that is borrowed forever, such as with
/// [`try_split_static`](crate::Ring::try_split_static). The owner of any other borrowed ring can free the ring after a
/// guard was leaked. For this reason, a guard that is not `'static` is not a buffer:
///
/// ```compile_fail,E0521
/// use twinbuf_core::ReservedSlot;
/// fn buffer(_: impl embedded_dma::WriteBuffer) {}
/// fn start<'r>(slot: ReservedSlot<'r, [u8; 64]>) { buffer(slot) }
/// ```
///
/// [`WriteSlot`](crate::WriteSlot) is not a buffer: after one was leaked, the next acquire returns the same slot.
///
/// ```compile_fail,E0277
/// use twinbuf_core::WriteSlot;
/// fn buffer(_: impl embedded_dma::WriteBuffer) {}
/// fn start(slot: WriteSlot<'static, 'static, [u8; 64]>) { buffer(slot) }
/// ```
///
/// The engine may write any bytes. A slot must therefore be a [`WriteTarget`], such as an array of integers:
///
/// ```compile_fail,E0277
/// use twinbuf_core::ReservedSlot;
/// fn buffer(_: impl embedded_dma::WriteBuffer) {}
/// fn start(slot: ReservedSlot<'static, [bool; 64]>) { buffer(slot) }
/// ```
///
/// These guards are buffers:
///
/// ```
/// use core::mem::MaybeUninit;
/// use embedded_dma::WriteBuffer;
/// use twinbuf_core::ReservedSlot;
/// fn target(_: impl WriteBuffer<Word = u8>) {}
/// fn write(slot: ReservedSlot<'static, [u8; 64]>) { target(slot) }
/// fn write_uninit(slot: ReservedSlot<'static, MaybeUninit<[u8; 64]>>) { target(slot) }
/// ```
// SAFETY: the guard points to its slot. The slot does not move and is not freed before the guard is dropped: the ring
// is borrowed for `'static`, or the guard has a share of it. Until then no call of either side returns the slot again:
// the producer has moved on, and the slot's word reads as free only on the lap that the producer has left. This holds
// forever if the guard is leaked, because a ring is split again only when the borrow is over, and taken apart only when
// no share is left. `T: WriteTarget` is valid for any bytes.
unsafe impl<T: WriteTarget, W: Wait> WriteBuffer for ReservedSlot<'static, T, W> {
    type Word = T::Word;

    unsafe fn write_buffer(&mut self) -> (*mut T::Word, usize) {
        (**self).as_write_buffer()
    }
}

/// A kept slot can be the source of a DMA transfer (feature `embedded-dma`). As for
/// [`ReservedSlot`](crate::ReservedSlot), the guard must be `'static`. [`ReadSlot`](crate::ReadSlot) is not a
/// buffer: after one was leaked, the next receive returns the same slot.
///
/// ```
/// use embedded_dma::ReadBuffer;
/// use twinbuf_core::DoubleBuffer;
/// fn source(_: impl ReadBuffer<Word = u8>) {}
///
/// static RING: DoubleBuffer<[u8; 64]> = DoubleBuffer::new([[0; 64]; 2]);
/// let (mut tx, mut rx) = RING.try_split_static().unwrap();
/// tx.fill(|slot| slot[0] = 1).unwrap();
/// source(rx.recv().unwrap().unwrap().keep());
/// ```
// SAFETY: as for `ReservedSlot` above, with the two sides exchanged: a kept slot stays `FULL` until its guard is
// dropped, so the producer does not write to it.
unsafe impl<T: ReadTarget, W: Wait> ReadBuffer for KeptSlot<'static, T, W> {
    type Word = T::Word;

    unsafe fn read_buffer(&self) -> (*const T::Word, usize) {
        (**self).as_read_buffer()
    }
}
