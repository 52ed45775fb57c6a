//! Writes results: with ordinary stores, or with non-temporal ones if the destination is large.

/// Numbers computed at a time: few enough that what a step reads and writes stays in the first-level cache.
pub(super) const BLOCK: usize = 1024;

/// Destinations of this many bytes or more are written past the caches.
///
/// An ordinary store to a line that is not in a cache first reads the line from memory, only to overwrite it. For a
/// destination that is not going to stay in the caches that is nearly half of all traffic, and it pushes out what
/// the training loop has there. Measured with u8 to f32, 32 MiB, Zen 3: 1.5 times the speed of ordinary stores.
/// Smaller destinations are written as usual: the next reader then finds them in a cache.
const LARGE: usize = 8 << 20;

/// Whether a destination should be written past the caches.
pub(super) fn non_temporal<T>(dst: &[T]) -> bool {
    #[cfg(test)]
    if let Some(forced) = super::tests::NON_TEMPORAL.get() {
        return forced;
    }
    cfg!(target_arch = "x86_64") && size_of_val(dst) >= LARGE
}

/// Numbers without padding and without invalid bit patterns.
///
/// # Safety
///
/// Any bytes must be a valid `Self`, and `Self` must have no padding.
pub(super) unsafe trait Plain: Copy + Default {}

// SAFETY: integers and floats have neither invalid bit patterns nor padding.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// Bytes of a cache line. A part of one would be slow to write past the caches.
pub(super) const LINE: usize = 64;

/// A block, aligned to cache lines.
#[repr(align(64))]
struct Scratch<T>([T; BLOCK]);

/// Takes results block by block.
pub(super) struct Store<T> {
    /// Where a block is computed before it goes past the caches; `None` to compute it in place.
    scratch: Option<Scratch<T>>,
}

impl<T: Plain> Store<T> {
    pub(super) fn new(non_temporal: bool) -> Self {
        Self { scratch: non_temporal.then(|| Scratch([T::default(); BLOCK])) }
    }

    /// Where to write all of `out`, at most [`BLOCK`] numbers; [`flush`](Self::flush) then brings them there.
    ///
    /// Two calls, and not one with a closure: a closure may be compiled separately, and then for the baseline
    /// processor.
    #[inline(always)]
    pub(super) fn block<'a>(&'a mut self, out: &'a mut [T]) -> &'a mut [T] {
        match &mut self.scratch {
            None => out,
            Some(scratch) => &mut scratch.0[..out.len()],
        }
    }

    /// Finishes what was written to the block for `out`.
    #[inline(always)]
    pub(super) fn flush(&self, out: &mut [T]) {
        if let Some(scratch) = &self.scratch {
            copy(&scratch.0[..out.len()], out);
        }
    }
}

/// However a job ends, its stores are seen before anything that the thread does next.
impl<T> Drop for Store<T> {
    fn drop(&mut self) {
        if self.scratch.is_some() {
            fence();
        }
    }
}

/// Copies `src` to `dst` past the caches, except for a few numbers at the ends where `dst` is not aligned.
///
/// [`Store`] calls [`fence`] before anybody else looks at `dst`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn copy<T: Plain>(src: &[T], dst: &mut [T]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    #[repr(align(64))]
    struct Line([__m128i; 4]);

    const { assert!(size_of::<Line>() == LINE) };

    // SAFETY: both types are plain numbers without padding, so any bytes of one are valid as the other.
    let (head, lines, tail) = unsafe { dst.align_to_mut::<Line>() };
    let (before, rest) = src.split_at(head.len());
    head.copy_from_slice(before);
    let per_line = LINE / size_of::<T>();
    let (middle, after) = rest.split_at(lines.len() * per_line);
    for (line, numbers) in lines.iter_mut().zip(middle.chunks_exact(per_line)) {
        for (place, part) in line.0.iter_mut().zip(numbers.chunks_exact(per_line / 4)) {
            // SAFETY: `part` has the 16 bytes that are read, at any alignment.
            let part = unsafe { _mm_loadu_si128(part.as_ptr().cast()) };
            // SAFETY: `place` is 16 bytes long and aligned. Nothing reads it before `fence`.
            unsafe { _mm_stream_si128(place, part) };
        }
    }
    tail.copy_from_slice(after);
}

/// Makes what [`copy`] wrote visible like ordinary stores: to this thread's later reads and to whoever
/// synchronizes with it.
#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: the fence is part of SSE, and every x86-64 has SSE.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn copy<T: Plain>(src: &[T], dst: &mut [T]) {
    dst.copy_from_slice(src);
}

#[cfg(not(target_arch = "x86_64"))]
const fn fence() {}
