//! Memory for pieces, in few sizes, used again and again.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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
    /// Bytes of memory taken from the system, less what it has back.
    taken: Arc<AtomicU64>,
}

/// The size of the memory for `len` bytes, at least one.
pub(super) fn class(len: usize) -> usize {
    let power = |len: usize| len.max(SMALLEST).next_power_of_two();
    power(len).min(power(len.saturating_sub(SPILL)) + SPILL)
}

impl Pool {
    /// Memory for `len` bytes that begins at a multiple of 4096. `None` if the system has none, or if it would be more
    /// than `most` bytes in all.
    pub(super) fn take(&mut self, len: usize, most: u64) -> Option<Buffer> {
        let class = class(len);
        if let Some(memory) = self.free.get_mut(&class).and_then(Vec::pop) {
            return Some(memory);
        }
        let slab = SLAB.next_multiple_of(class);
        let fits = |pool: &Self| pool.taken().saturating_add(slab as u64) <= most;
        if !fits(self) {
            // What is free in other sizes goes back to the system, but for slabs of which a part is in use.
            self.free.clear();
        }
        if !fits(self) {
            return None;
        }
        let mut free = cut(slab, class, &self.taken)?;
        let memory = free.pop();
        self.free.insert(class, free);
        memory
    }

    /// Bytes of memory that the system has given, used or not.
    pub(super) fn taken(&self) -> u64 {
        // It guards no other data.
        self.taken.load(Relaxed)
    }

    pub(super) fn put(&mut self, memory: Buffer) {
        self.free.entry(memory.len()).or_default().push(memory);
    }
}

/// Cuts new memory of `bytes` bytes into buffers of `class` bytes, a multiple of 4096.
fn cut(bytes: usize, class: usize, taken: &Arc<AtomicU64>) -> Option<Vec<Buffer>> {
    /// Keeps the memory until the last buffer in it is gone. Nothing reads through it.
    struct Slab {
        whole: Buffer,
        taken: Arc<AtomicU64>,
    }
    impl Drop for Slab {
        fn drop(&mut self) {
            self.taken.fetch_sub(self.whole.len() as u64, Relaxed);
        }
    }
    let mut whole = Buffer::for_direct_reads(bytes)?;
    let start = NonNull::from(&mut whole[..]).cast::<u8>();
    taken.fetch_add(whole.len() as u64, Relaxed);
    let slab = Arc::new(Slab { whole, taken: taken.clone() });
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
