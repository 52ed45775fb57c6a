//! Memory for a batch: where direct reads can put it, and in huge pages where it is large.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};

use memmap2::MmapMut;

/// Bytes in a huge page where pages have 4 KiB; on other systems the advice just comes to less.
const HUGE: usize = 2 << 20;

/// Memory of a fixed size that begins at a page and never moves.
///
/// From 2 MiB on it begins at a multiple of 2 MiB, and on Linux it requests huge pages
/// (`MADV_HUGEPAGE`), as far as they fit in: [`ReadMode::Direct`](crate::ReadMode::Direct) reads into them in
/// larger requests, because a request to a disk has at most so many separate pieces of memory
/// (`queue/max_segments`), and each page of 4 KiB is one. If the kernel has none, pages of the usual size do.
///
/// ```
/// let mut slot = twinbuf_mmap::Buffer::new(3 << 20).ok_or("no memory")?;
/// slot[0] = 1;
/// assert_eq!(slot.len(), 3 << 20);
/// assert_eq!(slot.as_ptr().addr() % (2 << 20), 0);
/// # Ok::<(), &str>(())
/// ```
pub struct Buffer {
    map: MmapMut,
    bytes: Range<usize>,
}

impl Buffer {
    /// Allocates `len` zeros and touches all of them, so that no read pays for it. `None` if there is no memory.
    #[must_use]
    pub fn new(len: usize) -> Option<Self> {
        let align = if len < HUGE { 1 } else { HUGE };
        // What is in front of the first multiple, and behind the end, is never touched and takes no memory.
        let mut map = MmapMut::map_anon(len.max(1).checked_add(align - 1)?).ok()?;
        let start = map.as_ptr().align_offset(align);
        let end = start.checked_add(len)?;
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            // A kernel without them refuses, and the memory is as good, only slower.
            let _ = map.advise_range(memmap2::Advice::HugePage, start, len / HUGE * HUGE);
        }
        map.get_mut(start..end)?.fill(0);
        Some(Self { map, bytes: start..end })
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map[self.bytes.clone()]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.bytes.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_at_a_page_and_is_all_zeros() {
        for len in [0, 1, 4095, 4096, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 5] {
            let buffer = Buffer::new(len).unwrap();
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|&byte| byte == 0), "{len}");
            let align = if len < HUGE { 4096 } else { HUGE };
            assert_eq!(buffer.as_ptr().addr() % align, 0, "{len}");
        }
    }

    #[test]
    fn what_no_memory_holds_is_none() {
        assert!(Buffer::new(usize::MAX).is_none());
        assert!(Buffer::new(isize::MAX.unsigned_abs()).is_none());
    }
}
