//! Implements the traits of `embedded-dma`: a guard is the buffer of a DMA transfer.
//!
//! A transfer owns its buffer and can be leaked while the engine runs. Memory given to an engine must therefore stay
//! reserved until the guard is dropped. That holds for `'static` guards: those of owned handles and of
//! [`try_split_static`](crate::Ring::try_split_static). A borrowed ring can be freed after its guard was leaked, so
//! guards of a borrowed ring are not buffers:
//!
//! ```compile_fail,E0521
//! use twinbuf_core::ReservedSlot;
//! fn buffer(_: impl embedded_dma::WriteBuffer) {}
//! fn start<'r>(slot: ReservedSlot<'r, [u8; 64]>) { buffer(slot) }
//! ```
//!
//! [`WriteSlot`](crate::WriteSlot) and [`ReadSlot`](crate::ReadSlot) are not buffers either: after one was leaked, the
//! next call returns the same slot.
//!
//! ```compile_fail,E0277
//! use twinbuf_core::WriteSlot;
//! fn buffer(_: impl embedded_dma::WriteBuffer) {}
//! fn start(slot: WriteSlot<'static, 'static, [u8; 64]>) { buffer(slot) }
//! ```
//!
//! The engine may write any bytes, so a slot that it writes to must hold integers ([`WriteTarget`]):
//!
//! ```compile_fail,E0277
//! use twinbuf_core::ReservedSlot;
//! fn buffer(_: impl embedded_dma::WriteBuffer) {}
//! fn start(slot: ReservedSlot<'static, [bool; 64]>) { buffer(slot) }
//! ```
//!
//! These are buffers:
//!
//! ```
//! use core::mem::MaybeUninit;
//! use embedded_dma::{ReadBuffer, WriteBuffer};
//! use twinbuf_core::{DoubleBuffer, ReservedSlot};
//! fn target(_: impl WriteBuffer<Word = u8>) {}
//! fn source(_: impl ReadBuffer<Word = u8>) {}
//! fn write(slot: ReservedSlot<'static, [u8; 64]>) { target(slot) }
//! fn write_uninit(slot: ReservedSlot<'static, MaybeUninit<[u8; 64]>>) { target(slot) }
//!
//! static RING: DoubleBuffer<[u8; 64]> = DoubleBuffer::new([[0; 64]; 2]);
//! let (mut tx, mut rx) = RING.try_split_static().unwrap();
//! tx.fill(|slot| slot[0] = 1).unwrap();
//! source(rx.recv().unwrap().unwrap().keep());
//! ```

use embedded_dma::{ReadBuffer, ReadTarget, WriteBuffer, WriteTarget};

use crate::consumer::KeptSlot;
use crate::producer::ReservedSlot;
use crate::wait::Wait;

// SAFETY: the guard points to its slot. The slot does not move and is not freed before the guard is dropped: the ring
// is borrowed for `'static`, or the guard has a share of it. Until then no call of either side returns the slot again:
// the producer has moved on, and the slot's word stays free for a lap that has passed. This holds forever if the guard
// is leaked, because a ring is split again only when the borrow is over, and taken apart only when no share is left.
// `T: WriteTarget` is valid for any bytes.
unsafe impl<T: WriteTarget, W: Wait> WriteBuffer for ReservedSlot<'static, T, W> {
    type Word = T::Word;

    unsafe fn write_buffer(&mut self) -> (*mut T::Word, usize) {
        (**self).as_write_buffer()
    }
}

// SAFETY: as above, with the consumer in the producer's place: a kept slot stays `FULL` until its guard is dropped, so
// the producer does not write to it.
unsafe impl<T: ReadTarget, W: Wait> ReadBuffer for KeptSlot<'static, T, W> {
    type Word = T::Word;

    unsafe fn read_buffer(&self) -> (*const T::Word, usize) {
        (**self).as_read_buffer()
    }
}
