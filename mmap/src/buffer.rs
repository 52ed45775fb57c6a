//! Memory for one batch, aligned for direct I/O, and functions for pages of memory.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;

/// Bytes in a huge page, on x86-64 and aarch64 with pages of 4 KiB. On other systems, the advice
/// for huge pages only has less effect.
pub(crate) const HUGE: usize = 2 << 20;

/// Two or more buffers share a huge page if they fit it and have at least this many bytes together.
/// With fewer, the unused rest of the huge page would waste too much memory.
const SHARED: usize = 256 << 10;

/// Memory of a fixed size at a fixed address. [`new`](Self::new), [`untouched`](Self::untouched)
/// and [`several`](Self::several) allocate it, starting at a page boundary. [`lent`](Self::lent)
/// uses memory that other code allocated. A buffer dereferences to its bytes.
///
/// An allocated buffer of 2 MiB or more starts at a multiple of 2 MiB. On Linux, it asks for huge pages
/// (`MADV_HUGEPAGE`) for every whole 2 MiB block. Huge pages allow larger disk requests if
/// [`ReadMode::Direct`](crate::ReadMode::Direct) reads directly into the buffer, because a request may cover only a
/// limited number of separate memory pieces (`queue/max_segments`). If the kernel refuses, the buffer uses normal
/// pages.
///
/// ```
/// let mut slot = twinbuf_mmap::Buffer::new(3 << 20).ok_or("no memory")?;
/// slot[0] = 1;
/// assert_eq!(slot.len(), 3 << 20);
/// assert_eq!(slot.as_ptr().addr() % (2 << 20), 0);
/// # Ok::<(), &str>(())
/// ```
pub struct Buffer {
    bytes: NonNull<[u8]>,
    /// Has the memory, and frees it when the last buffer that shares it is dropped.
    owner: Arc<dyn Any + Send>,
}

// SAFETY: only this buffer reaches the bytes, on whichever thread it is. The owner is `Send`, and is only dropped,
// once, with the last buffer that shares it.
unsafe impl Send for Buffer {}
// SAFETY: a shared buffer gives out `&[u8]` and nothing else; the owner is not touched before the drop.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `len` bytes and fills them with zeros, so that later reads into the buffer need
    /// not wait for the kernel to provide pages. Returns `None` if the memory cannot be mapped.
    #[must_use]
    pub fn new(len: usize) -> Option<Self> {
        let mut buffer = Self::untouched(len)?;
        buffer.fill(0);
        Some(buffer)
    }

    /// Allocates `len` bytes without touching them. The bytes are zero. The kernel provides each
    /// page when it is first used, on the thread that uses it. Use it if a read fills the memory
    /// anyway. Returns `None` if the memory cannot be mapped.
    #[must_use]
    pub fn untouched(len: usize) -> Option<Self> {
        let align = if len < HUGE { 1 } else { HUGE };
        // Map more than `len` bytes, so that the buffer can start at a multiple of `align`. The other bytes are never
        // touched and take no memory.
        let mut map = MmapMut::map_anon(len.max(1).checked_add(align - 1)?).ok()?;
        let skipped = map.as_ptr().align_offset(align);
        let bytes = NonNull::from(map.get_mut(skipped..skipped.checked_add(len)?)?);
        #[cfg(target_os = "linux")]
        if len >= HUGE {
            // A kernel without huge pages refuses the advice. The memory then works too, only slower.
            let _ = map.advise_range(memmap2::Advice::HugePage, skipped, len / HUGE * HUGE);
        }
        Some(Self { bytes, owner: Arc::new(map) })
    }

    /// Allocates buffers of these lengths, for example the slots of a ring, without touching them: see
    /// [`untouched`](Self::untouched). Two or more buffers that take 256 KiB to 2 MiB together, in whole pages, share
    /// one block of 2 MiB. The block is a huge page where the kernel has one, to copy small records into it faster. The
    /// last buffer frees the block. Returns `None` if the memory cannot be mapped.
    ///
    /// ```
    /// let slots = twinbuf_mmap::Buffer::several(&[128 << 10; 3]).ok_or("no memory")?;
    /// assert!(slots.iter().all(|slot| slot.len() == 128 << 10));
    /// # Ok::<(), &str>(())
    /// ```
    #[must_use]
    pub fn several(lens: &[usize]) -> Option<Vec<Self>> {
        let page = page_size();
        let mut starts = Vec::with_capacity(lens.len());
        let mut all = 0_usize;
        for len in lens {
            starts.push(all);
            all = all.checked_add(len.checked_next_multiple_of(page)?)?;
        }
        if lens.len() < 2 || !(SHARED..=HUGE).contains(&all) {
            return lens.iter().map(|&len| Self::untouched(len)).collect();
        }
        let block = Self::untouched(HUGE)?;
        let buffer = |(start, &len)| {
            // SAFETY: the next buffer starts behind this one's bytes, all of them fit into the block, and the block
            // itself is not used any more.
            unsafe { block.part(start, len) }
        };
        Some(starts.into_iter().zip(lens).map(buffer).collect())
    }

    /// Allocates untouched memory for reads that may be in flight during a `fork`. On Linux since
    /// 4.14, the child finds zeros in it.
    ///
    /// Otherwise parent and child would share the pages, and the process that writes to a page first would get a copy
    /// of it. A disk that is still writing would then write to the page of the other process (NOTES in `open(2)`).
    pub(crate) fn for_direct_reads(len: usize) -> Option<Self> {
        let buffer = Self::untouched(len)?;
        #[cfg(target_os = "linux")]
        {
            let start = buffer.as_ptr().cast_mut().cast();
            // SAFETY: whole pages of the buffer's own mapping, and the advice changes only what a forked child finds. A
            // kernel before 4.14 refuses it, and such a child then shares the pages.
            unsafe { libc::madvise(start, buffer.len(), libc::MADV_WIPEONFORK) };
        }
        Some(buffer)
    }

    /// Uses `len` bytes at `start` that other code allocated, for example page-locked memory or the memory of a
    /// tensor. `lender` owns the memory. The buffer drops `lender` when it is dropped, on any thread.
    ///
    /// ```
    /// use std::ptr::NonNull;
    /// let mut memory = vec![0u8; 4096];
    /// let start = NonNull::from(&mut memory[..]).cast();
    /// // SAFETY: the vector moves into the buffer, and nothing else reaches its bytes.
    /// let mut slot = unsafe { twinbuf_mmap::Buffer::lent(start, 4096, memory) };
    /// slot[0] = 1;
    /// ```
    ///
    /// # Safety
    ///
    /// Until `lender` is dropped, the `len` bytes at `start` must be initialized, must be valid for reads and
    /// writes, and must be accessed only through the buffer.
    #[must_use]
    pub unsafe fn lent(start: NonNull<u8>, len: usize, lender: impl Send + 'static) -> Self {
        Self { bytes: NonNull::slice_from_raw_parts(start, len), owner: Arc::new(lender) }
    }

    /// Returns `len` of the bytes, from `at` on, as a buffer of its own. It shares the memory.
    ///
    /// # Safety
    ///
    /// The bytes must be within this buffer. Until the result is dropped, they must be accessed only through it.
    pub(crate) unsafe fn part(&self, at: usize, len: usize) -> Self {
        // SAFETY: the caller promises that the place is within this buffer.
        let start = unsafe { self.bytes.cast().add(at) };
        Self { bytes: NonNull::slice_from_raw_parts(start, len), owner: self.owner.clone() }
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
        // SAFETY: whoever made the buffer promised that the bytes are initialized and that only this buffer reaches
        // them.
        unsafe { self.bytes.as_ref() }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` excludes any other reference.
        unsafe { self.bytes.as_mut() }
    }
}

/// Bytes in a page of memory.
pub(crate) fn page_size() -> usize {
    /// The page size of Windows, and the smallest of the systems here.
    const SMALLEST: usize = 4096;
    #[cfg(not(unix))]
    return SMALLEST;
    #[cfg(unix)]
    {
        // SAFETY: sysconf reads a constant of the system; it takes no pointer and any name is allowed.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        // POSIX requires every system to have a value. A failure would be -1, which does not fit a usize.
        usize::try_from(bytes).unwrap_or(SMALLEST)
    }
}

/// Extends `bytes` to whole pages, and cuts them at `len`.
///
/// The result is empty if `bytes` is empty or starts at `len` or later.
pub(crate) fn around(bytes: &Range<u64>, len: u64, page: u64) -> Range<u64> {
    let (start, end) = (bytes.start.min(len), bytes.end.min(len));
    if start >= end {
        return len..len;
    }
    start / page * page..end.checked_next_multiple_of(page).map_or(len, |end| end.min(len))
}

/// On x86-64, loads the `len` bytes from `first` on into the processor's cache. The program cannot
/// observe a prefetch, so any address is allowed.
pub(crate) fn prefetch(first: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in (0..len).step_by(64) {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (first, len);
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
    fn several_are_apart_and_outlive_each_other() {
        let lens: [&[usize]; 8] = [
            &[],
            &[HUGE],
            &[100; 2],
            &[128 << 10; 3],
            &[100_001; 5],
            &[1 << 20; 2],
            &[1 << 20; 3],
            &[1, 300_000, 0, 4096, 4097, 1],
        ];
        for lens in lens {
            let mut slots = Buffer::several(lens).unwrap();
            assert_eq!(slots.len(), lens.len());
            for ((number, slot), &len) in (1..).zip(&mut slots).zip(lens) {
                assert!(slot.len() == len && slot.iter().all(|&byte| byte == 0), "{lens:?}");
                assert_eq!(slot.as_ptr().addr() % 4096, 0, "{lens:?}");
                slot.fill(number);
            }
            for number in (1..).take(lens.len()) {
                let slot = slots.remove(0);
                assert!(slot.iter().all(|&byte| byte == number), "slot {number} of {lens:?}");
            }
        }
        let block = |slot: &Buffer| slot.as_ptr().addr() / HUGE;
        let slots = Buffer::several(&[128 << 10; 3]).unwrap();
        assert!(slots.iter().all(|slot| block(slot) == block(&slots[0])));
    }

    #[test]
    fn what_no_memory_holds_is_none() {
        for len in [usize::MAX, isize::MAX.unsigned_abs()] {
            assert!(Buffer::several(&[len; 3]).is_none() && Buffer::new(len).is_none(), "{len}");
        }
        assert!(Buffer::several(&[usize::MAX; 2]).is_none());
    }

    #[test]
    fn ranges_grow_to_pages_and_stop_at_the_end() {
        let cases = [
            (0..1, 0..10),
            (9..10, 0..10),
            (9..11, 0..20),
            (10..20, 10..20),
            (19..25, 10..25),
            (24..25, 20..25),
            (24..1000, 20..25),
            (25..26, 25..25),
            (u64::MAX - 1..u64::MAX, 25..25),
            (3..3, 25..25),
        ];
        for (bytes, expected) in cases {
            assert_eq!(around(&bytes, 25, 10), expected, "{bytes:?}");
        }
    }

    #[test]
    fn a_page_is_a_power_of_two() {
        assert!(page_size().is_power_of_two() && page_size() >= 4096);
    }
}
