//! Memory for pieces, in few sizes, used again and again.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::Buffer;

/// Beyond a power of two, for some sizes: a record of that size touches so many bytes more at most, in blocks of up to 4096 bytes.
pub(super) const SPILL: usize = 8192;
/// The memory is taken from the system so many bytes at a time, in huge pages where there are any.
const SLAB: usize = 4 << 20;
const SMALLEST: usize = 4096;

/// Memory that is not in use, by size.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: BTreeMap<usize, Vec<Buffer>>,
}

/// The size of the memory for `len` bytes, at least one.
pub(super) fn class(len: usize) -> usize {
    let power = |len: usize| len.max(SMALLEST).next_power_of_two();
    power(len).min(power(len.saturating_sub(SPILL)) + SPILL)
}

impl Pool {
    /// Memory for `len` bytes that begins at a multiple of 4096. `None` if the system has none.
    pub(super) fn take(&mut self, len: usize) -> Option<Buffer> {
        let class = class(len);
        let free = self.free.entry(class).or_default();
        if free.is_empty() {
            *free = cut(SLAB.max(class), class)?;
        }
        free.pop()
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
            let mut all: Vec<Buffer> = (0..5).map(|_| pool.take(len).unwrap()).collect();
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
            let again: Vec<Buffer> = (0..5).map(|_| pool.take(len).unwrap()).collect();
            let mut after = addresses(&again);
            before.sort_unstable();
            after.sort_unstable();
            assert_eq!(before, after, "{len}");
        }
    }
}
