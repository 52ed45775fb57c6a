//! A ring of memory: pieces of any length are handed out in order and given back in the same order.

use crate::Buffer;

/// Short pieces start at a multiple of this: the smallest block size of a disk.
pub(super) const SECTOR: u64 = 512;
/// Pieces of at least this many bytes start at a page. Otherwise they would cover one page more, and the disk would get
/// one memory segment more.
const LONG: u64 = 64 << 10;
pub(super) const PAGE: u64 = 4096;
/// The largest block size of a disk. The ring's memory starts at a multiple of it.
const BLOCK: u64 = super::direct::LARGEST as u64;

/// A ring of bytes. A place is a byte count that only grows; the place modulo `len` is the index in the memory.
pub(super) struct Ring {
    /// Allocated when the first piece is taken. Nothing reads or writes through it.
    memory: Option<Buffer>,
    /// Bytes in the ring, a multiple of [`BLOCK`].
    len: u64,
    /// The place where the next piece starts.
    head: u64,
    /// The place where the oldest piece starts. The pieces in use are between `tail` and `head`.
    tail: u64,
}

impl Ring {
    pub(super) const fn new(len: u64) -> Self {
        Self { memory: None, len: len / BLOCK * BLOCK, head: 0, tail: 0 }
    }

    /// Takes a piece of at least `len` bytes. Its address is a multiple of `block`, the disk's block size. Also returns
    /// the place to pass to [`give_back`](Self::give_back) when the piece is not needed any more. Returns `None` if
    /// there is no room.
    pub(super) fn take(&mut self, len: u64, block: u64) -> Option<(Buffer, u64)> {
        let len = len.max(1).next_multiple_of(SECTOR);
        let align = if len < LONG { SECTOR } else { PAGE }.max(block);
        let mut start = self.head.next_multiple_of(align);
        if start % self.len.max(1) + len > self.len {
            // The piece does not fit before the end of the memory: skip the rest and begin at the front.
            start = start.next_multiple_of(self.len.max(1));
        }
        if start + len - self.tail > self.len {
            return None;
        }
        if self.memory.is_none() {
            let whole = Buffer::for_direct_reads(usize::try_from(self.len + BLOCK).ok()?)?;
            let aligned = whole.as_ptr().align_offset(super::direct::LARGEST);
            // SAFETY: the memory has a block more than the ring, and `whole` is not used any more.
            self.memory = Some(unsafe { whole.part(aligned, usize::try_from(self.len).ok()?) });
        }
        let memory = self.memory.as_ref()?;
        let at = usize::try_from(start % self.len).ok()?;
        // SAFETY: the bytes are within the memory, as checked above. No other piece has the same bytes: those between
        // `tail` and `head` are given out once, and `give_back` moves `tail` only past pieces that have been dropped.
        let piece = unsafe { memory.part(at, usize::try_from(len).ok()?) };
        self.head = start + len;
        Some((piece, self.head))
    }

    /// Frees all memory before the place `until`.
    ///
    /// # Safety
    ///
    /// Nothing may access the pieces before `until` any more.
    pub(super) unsafe fn give_back(&mut self, until: u64) {
        self.tail = until;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[test]
    fn pieces_never_overlap_and_all_of_the_memory_is_used() {
        let mut ring = Ring::new(64 << 10);
        let mut held: VecDeque<(Buffer, u64, u8)> = VecDeque::new();
        let mut most = 0;
        for number in 0..10_000_u64 {
            let len = 1 + number * number % 9000;
            let (mut piece, place) = loop {
                if let Some(piece) = ring.take(len, 512) {
                    break piece;
                }
                let (piece, place, mark) = held.pop_front().expect("room for one piece");
                assert!(piece.iter().all(|&byte| byte == mark));
                drop(piece);
                // SAFETY: all pieces before `place` have been dropped.
                unsafe { ring.give_back(place) };
            };
            assert!(piece.len() as u64 >= len && piece.as_ptr().addr() % 512 == 0);
            let mark = u8::try_from(number % 251).unwrap();
            piece.fill(mark);
            held.push_back((piece, place, mark));
            most = most.max(held.iter().map(|(piece, ..)| piece.len()).sum());
        }
        assert!(most > 52 << 10, "{most}");
        assert!(ring.take(65 << 10, 512).is_none());
    }

    #[test]
    fn a_ring_without_memory_gives_none() {
        assert!(Ring::new(0).take(1, 512).is_none());
    }
}
