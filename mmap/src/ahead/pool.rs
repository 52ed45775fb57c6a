//! Memory for pieces, in few sizes, used again and again.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::Buffer;

/// Beyond a power of two, for some sizes: a record of that size touches so many bytes more at most, in blocks of up to 4096 bytes.
pub(super) const SPILL: usize = 8192;
/// The memory is taken from the system so many bytes at a time, or a little more: a huge page where there are any.
const SLAB: usize = 2 << 20;
const SMALLEST: usize = 4096;

/// Memory that is not in use, by size.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: BTreeMap<usize, Vec<Buffer>>,
    /// Where the memory lies that was taken from the system: the first address, and the length.
    slabs: BTreeMap<usize, usize>,
}

/// The size of the memory for `len` bytes, at least one.
pub(super) fn class(len: usize) -> usize {
    let power = |len: usize| len.max(SMALLEST).next_power_of_two();
    power(len).min(power(len.saturating_sub(SPILL)) + SPILL)
}

impl Pool {
    /// Memory for `len` bytes that begins at a multiple of 4096. `None` if the system has none.
    ///
    /// Before it takes more than `most` bytes from the system in all, it gives back what is free in other sizes.
    pub(super) fn take(&mut self, len: usize, most: u64) -> Option<Buffer> {
        let class = class(len);
        if let Some(memory) = self.free.get_mut(&class).and_then(Vec::pop) {
            return Some(memory);
        }
        let slab = SLAB.next_multiple_of(class);
        if self.taken().saturating_add(slab as u64) > most {
            self.give_back();
        }
        let cut = cut(slab, class)?;
        self.slabs.insert(cut.first()?.as_ptr().addr(), slab);
        let free = self.free.entry(class).or_default();
        free.extend(cut);
        free.pop()
    }

    /// Bytes of memory that the system has given, used or not.
    pub(super) fn taken(&self) -> u64 {
        self.slabs.values().map(|&len| len as u64).sum()
    }

    /// Gives the slabs back of which no part is in use.
    fn give_back(&mut self) {
        for (class, free) in &mut self.free {
            free.sort_unstable_by_key(|memory| memory.as_ptr().addr());
            let slabs = &self.slabs;
            let slab = |memory: &Buffer| slabs.range(..=memory.as_ptr().addr()).next_back();
            let whole = free.chunk_by(|one, other| slab(one) == slab(other));
            let whole =
                whole.filter(|free| slab(&free[0]).is_some_and(|(_, len)| free.len() * class == *len));
            let whole: Vec<usize> =
                whole.filter_map(|free| slab(&free[0])).map(|(start, _)| *start).collect();
            free.retain(|memory| slab(memory).is_none_or(|(start, _)| whole.binary_search(start).is_err()));
            for start in whole {
                self.slabs.remove(&start);
            }
        }
    }

    pub(super) fn put(&mut self, memory: Buffer) {
        self.free.entry(memory.len()).or_default().push(memory);
    }
}

/// Cuts new memory of `bytes` bytes into buffers of `class` bytes, a multiple of 4096.
fn cut(bytes: usize, class: usize) -> Option<Vec<Buffer>> {
    /// Keeps the memory until the last buffer in it is gone. Nothing reads through it.
    struct Slab(#[expect(dead_code, reason = "dropped with the last buffer")] Buffer);
    let mut whole = Buffer::for_direct_reads(bytes)?;
    let start = NonNull::from(&mut whole[..]).cast::<u8>();
    let slab = Arc::new(Slab(whole));
    let buffer = |index: usize| {
        // SAFETY: within the memory, which has room for so many.
        let start = unsafe { start.add(index * class) };
        // SAFETY: the slab keeps these bytes, which are initialized. No other buffer has them, since each index is used
        // once, and nothing reaches them through the slab.
        unsafe { Buffer::lent(start, class, slab.clone()) }
    };
    Some((0..bytes / class).map(buffer).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_disjoint_at_blocks_and_used_again() {
        let mut pool = Pool::default();
        for len in [1, 512, 4096, 4097, 12_288, 12_289, 70_000, (1 << 20) + SPILL] {
            let class = class(len);
            assert!(class >= len && class % 4096 == 0, "{len}");
            let mut all: Vec<Buffer> = (0..5).map(|_| pool.take(len, u64::MAX).unwrap()).collect();
            for (number, memory) in (1..).zip(&mut all) {
                assert_eq!(memory.as_ptr().addr() % 4096, 0);
                assert_eq!(memory.len(), class);
                memory.fill(number);
            }
            for (number, memory) in (1..).zip(&all) {
                assert!(memory.iter().all(|&byte| byte == number), "{len}");
            }
            let addresses =
                |of: &[Buffer]| of.iter().map(|memory| memory.as_ptr().addr()).collect::<Vec<_>>();
            let mut before = addresses(&all);
            all.into_iter().for_each(|memory| pool.put(memory));
            let again: Vec<Buffer> = (0..5).map(|_| pool.take(len, u64::MAX).unwrap()).collect();
            let mut after = addresses(&again);
            before.sort_unstable();
            after.sort_unstable();
            assert_eq!(before, after, "{len}");
        }
    }
}
