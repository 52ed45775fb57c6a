//! Pages of a mapping: their size, and which pages a range of bytes covers.

use std::ops::Range;

/// Bytes in a page of memory.
pub(crate) fn page_size() -> usize {
    /// The smallest page of any system, and Windows's on all processors.
    const SMALLEST: usize = 4096;
    #[cfg(not(unix))]
    return SMALLEST;
    #[cfg(unix)]
    {
        // SAFETY: sysconf reads a constant of the system; it takes no pointer and any name is allowed.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        // POSIX has every system answer; a failure would be -1.
        usize::try_from(bytes).unwrap_or(SMALLEST)
    }
}

/// The bytes of the whole pages that hold `bytes`, cut at `len`.
///
/// A range wholly past the end gives an empty range.
pub(crate) fn around(bytes: &Range<u64>, len: u64, page: u64) -> Range<u64> {
    let (start, end) = (bytes.start.min(len), bytes.end.min(len));
    if start >= end {
        return len..len;
    }
    start / page * page..end.checked_next_multiple_of(page).map_or(len, |end| end.min(len))
}

/// Brings the front of some bytes into the cache of the processor. It reads nothing that the program could see, so the address
/// may be any.
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
