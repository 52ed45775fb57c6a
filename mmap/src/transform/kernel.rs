//! The loops: code that the compiler vectorises, on x86-64 with the feature `simd` for two instruction sets.

/// Scales and shifts are repeated to at most this many numbers, which fit the first-level cache.
/// More channels than this are not repeated.
const BLOCK: usize = 1024;

/// Reads a number from exactly `B` bytes. Without the array, the compiler emits a load for each byte.
#[inline(always)]
fn read<const B: usize>(bytes: &[u8]) -> [u8; B] {
    bytes.try_into().expect("as many bytes as a number has")
}

/// Binary16 to binary32 without a branch and without subnormal operands (slow on some processors).
#[inline(always)]
pub(super) fn f16_to_f32(half: u16) -> f32 {
    let half = u32::from(half);
    let sign = (half & 0x8000) << 16;
    // Move exponent and fraction to their places in an f32, and replace the exponent's bias, 15, by 127.
    let magnitude = (half & 0x7fff) << 13;
    let normal = magnitude + ((127 - 15) << 23);
    // Infinity and NaN: raise the largest exponent of an f16, 31, to that of an f32, 255.
    let special = magnitude + ((255 - 31) << 23);
    // Zero and subnormals are fraction * 2^-24. Put the fraction into an f32 with the exponent of 2^-14, where its bits
    // have this weight, and subtract 2^-14, which is exact.
    let least_normal = (127 - 14) << 23;
    let subnormal = (f32::from_bits(magnitude + least_normal) - f32::from_bits(least_normal)).to_bits();
    let bits = if magnitude >= 31 << 23 { special } else { normal };
    let bits = if magnitude < 1 << 23 { subnormal } else { bits };
    f32::from_bits(sign | bits)
}

/// Binary32 to binary16, to nearest, ties to even; a NaN keeps its sign and the upper bits of its payload.
#[inline(always)]
pub(super) fn f32_to_f16(single: u32) -> u16 {
    let sign = single >> 16 & 0x8000;
    let magnitude = single & 0x7fff_ffff;
    // Round to nearest even: add half a unit of the last kept bit, or just less if that bit is 0, and cut off the rest.
    // A carry into the exponent is right.
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0fff + (magnitude >> 13 & 1)) >> 13;
    // Below 2^-14, results are multiples of 2^-24, as are the f32 from 0.5 to 1: adding 0.5 rounds to one of them, and
    // its fraction is the result.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    // Make a NaN quiet: the bits that made it a NaN may be cut off, which would leave infinity.
    let nan = 0x7e00 | (magnitude >> 13 & 0x03ff);
    let bits = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
    // 2^16 and more become infinity. Whatever rounds to a finite f16 is less.
    let bits = if magnitude >= (127 + 16) << 23 { 0x7c00 } else { bits };
    let bits = if magnitude > 255 << 23 { nan } else { bits };
    // The mask changes nothing: the upper half is 0.
    ((sign | bits) & 0xffff) as u16
}

/// Binary32 to its upper half, to nearest, ties to even; a NaN keeps its sign and the upper bits of its payload.
#[inline(always)]
pub(super) fn f32_to_bf16(single: u32) -> u16 {
    // Round to nearest even, as `f32_to_f16` does. Only a NaN can overflow, and it is replaced below.
    let rounded = single.wrapping_add(0x7fff + (single >> 16 & 1));
    let nan = single | 0x0040_0000;
    let bits = if single & 0x7fff_ffff > 255 << 23 { nan } else { rounded };
    (bits >> 16) as u16
}

/// A scale and a shift for each channel, repeated for long loops.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Affine {
    /// The scales. The length is a multiple of the number of channels.
    scale: Box<[f32]>,
    /// The shifts, as many as scales.
    shift: Box<[f32]>,
}

impl Affine {
    /// Each slice has one value for each channel. There is at least one channel.
    pub(super) fn new(scale: &[f32], shift: &[f32]) -> Self {
        let times = match BLOCK / scale.len() {
            0 => 1,
            // With a multiple of 32 repetitions, the vector loops have no remainder in a whole block.
            times if times >= 32 => times & !31,
            times => times,
        };
        Self { scale: scale.repeat(times).into(), shift: shift.repeat(times).into() }
    }

    /// Scale and shift of a channel.
    pub(super) fn of(&self, channel: usize) -> (f32, f32) {
        (self.scale[channel], self.shift[channel])
    }
}

/// A loop over source numbers of `B` little-endian bytes.
pub(super) trait Job<const B: usize> {
    fn run(self);
}

/// Runs the job, with AVX2 if the feature `simd` is on and this processor has it.
pub(super) fn run<const B: usize, J: Job<B>>(job: J) {
    #[cfg(test)]
    if super::tests::BASELINE.get() {
        return job.run();
    }
    dispatch(job);
}

/// Compiled once for each instruction set, with all that is inlined into it.
///
/// FMA is left out on purpose: results must not depend on it.
#[cfg_attr(feature = "simd", multiversion::multiversion(targets("x86_64+avx2")))]
fn dispatch<const B: usize, J: Job<B>>(job: J) {
    job.run();
}

/// Converts numbers one by one.
pub(super) struct Each<'a, O, F> {
    pub(super) src: &'a [u8],
    /// As many numbers as `src` has.
    pub(super) dst: &'a mut [O],
    pub(super) convert: F,
}

impl<const B: usize, O, F: Fn([u8; B]) -> O> Job<B> for Each<'_, O, F> {
    #[inline(always)]
    fn run(self) {
        let Self { src, dst, convert } = self;
        for (out, raw) in dst.iter_mut().zip(src.chunks_exact(B)) {
            *out = convert(read(raw));
        }
    }
}

/// Converts interleaved channels, with a scale and a shift for each.
pub(super) struct Interleaved<'a, F> {
    pub(super) src: &'a [u8],
    /// As many numbers as `src` has.
    pub(super) dst: &'a mut [f32],
    pub(super) affine: &'a Affine,
    pub(super) convert: F,
}

impl<const B: usize, F: Fn([u8; B]) -> f32> Job<B> for Interleaved<'_, F> {
    #[inline(always)]
    fn run(self) {
        let Self { src, dst, affine: Affine { scale, shift }, convert } = self;
        for (dst, src) in dst.chunks_mut(scale.len()).zip(src.chunks(scale.len() * B)) {
            let numbers = dst.iter_mut().zip(src.chunks_exact(B));
            for ((out, raw), (scale, shift)) in numbers.zip(scale.iter().zip(shift)) {
                *out = convert(read(raw)) * scale + shift;
            }
        }
    }
}

/// Separates the channels of whole pictures, and converts them.
pub(super) struct Planes<'a, F> {
    pub(super) src: &'a [u8],
    /// As many numbers as `src` has.
    pub(super) dst: &'a mut [f32],
    /// At least 2.
    pub(super) channels: usize,
    /// Pixels of a picture, at least 1.
    pub(super) pixels: usize,
    pub(super) affine: Option<&'a Affine>,
    pub(super) convert: F,
}

/// With this many channels or fewer, compilers separate them well.
const FEW: usize = 4;

/// The number of pixels whose channels are separated before they are written. It is large, so that long pieces of every
/// plane are written, and small enough for the first-level cache.
const WINDOW: usize = 512;

impl<const B: usize, F: Fn([u8; B]) -> f32> Job<B> for Planes<'_, F> {
    #[inline(always)]
    fn run(self) {
        match (self.channels, B) {
            (..=FEW, _) => self.by_channels::<B, FEW>(),
            (_, 1) => self.by_channels::<B, ROW>(),
            (_, 2) => self.by_channels::<B, { ROW / 2 }>(),
            (_, other) => unreachable!("no planes are made of numbers of {other} bytes"),
        }
    }
}

impl<F> Planes<'_, F> {
    /// Goes through each picture window by window, and through each window `N` channels at a time.
    #[inline(always)]
    fn by_channels<const B: usize, const N: usize>(self)
    where
        F: Fn([u8; B]) -> f32,
    {
        let Self { src, dst, channels, pixels, affine, convert } = self;
        let mut apart = [[[0; B]; WINDOW]; N];
        let pixel = channels * B;
        for (src, dst) in src.chunks_exact(pixels * pixel).zip(dst.chunks_exact_mut(pixels * channels)) {
            for start in (0..pixels).step_by(WINDOW) {
                for first in (0..channels).step_by(N) {
                    let src = &src[start * pixel + first * B..];
                    match channels {
                        2 => few::<B, 2>(src, &mut apart[..2]),
                        3 => few::<B, 3>(src, &mut apart[..3]),
                        4 => few::<B, 4>(src, &mut apart[..4]),
                        _ => many(src, pixel, &mut apart),
                    }
                    for (channel, numbers) in (first..channels).zip(&apart) {
                        let plane = &mut dst[channel * pixels..][..pixels];
                        let out = &mut plane[start..pixels.min(start + WINDOW)];
                        match affine {
                            None => {
                                for (out, raw) in out.iter_mut().zip(numbers) {
                                    *out = convert(*raw);
                                }
                            }
                            Some(affine) => {
                                let (scale, shift) = affine.of(channel);
                                for (out, raw) in out.iter_mut().zip(numbers) {
                                    *out = convert(*raw) * scale + shift;
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Separates the channels of the next [`WINDOW`] pixels, or of those that are left. `src` has pixels of `N` channels.
#[inline(always)]
fn few<const B: usize, const N: usize>(src: &[u8], apart: &mut [[[u8; B]; WINDOW]]) {
    for (i, pixel) in src.chunks_exact(N * B).enumerate().take(WINDOW) {
        for (n, raw) in pixel.chunks_exact(B).enumerate() {
            apart[n][i] = read(raw);
        }
    }
}

/// Does the same for the first `N` channels of pixels of `pixel` bytes. If the pixels have fewer channels, the rest of
/// `apart` has no meaning.
#[inline(always)]
fn many<const B: usize, const N: usize>(src: &[u8], pixel: usize, apart: &mut [[[u8; B]; WINDOW]; N]) {
    let mut rows = [[0; ROW]; N];
    for at in (0..WINDOW).step_by(N) {
        let Some(src) = src.get(at * pixel..) else { return };
        if src.len() < (N - 1) * pixel + ROW {
            // These are the last pixels of the picture. To read whole rows of bytes would go past its end. If pixels
            // are shorter than a row, more than `N` of them may be left.
            for (i, pixel) in src.chunks(pixel).enumerate().take(WINDOW - at) {
                for (plane, raw) in apart.iter_mut().zip(pixel.chunks_exact(B)) {
                    plane[at + i] = read(raw);
                }
            }
            return;
        }
        for (i, row) in rows.iter_mut().enumerate() {
            row.copy_from_slice(&src[i * pixel..][..ROW]);
        }
        for (plane, row) in apart.iter_mut().zip(transpose::<B, N>(rows)) {
            for (number, raw) in plane[at..][..N].iter_mut().zip(row.chunks_exact(B)) {
                *number = read(raw);
            }
        }
    }
}

/// Bytes in a row: those of the smallest vector register.
const ROW: usize = 16;

/// Transposes a square of `N` rows, each of `N` numbers of `B` bytes: number `j` of row `i` becomes number `i` of row
/// `j`. `N` is `ROW / B`.
///
/// Each round merges the two halves of all numbers like cards: one from the first half, one from the second, and so on.
/// This rotates the bits of each number's index by one. After as many rounds as the index of a row has bits, row and
/// column have changed places.
#[inline(always)]
fn transpose<const B: usize, const N: usize>(mut rows: [[u8; ROW]; N]) -> [[u8; ROW]; N] {
    assert_eq!(N * B, ROW, "numbers in a row");
    for _ in 0..N.ilog2() {
        let mut next = [[0; ROW]; N];
        for i in 0..N / 2 {
            [next[2 * i], next[2 * i + 1]] = interleave::<B>(&rows[i], &rows[i + N / 2]);
        }
        rows = next;
    }
    rows
}

/// Returns the first number of `a`, the first of `b`, the second of `a`, and so on.
///
/// It calls the instruction by name, because compilers do not always find it for a loop.
#[cfg(target_arch = "x86_64")]
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "all are of SSE2")]
#[inline(always)]
fn interleave<const B: usize>(a: &[u8; ROW], b: &[u8; ROW]) -> [[u8; ROW]; 2] {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_unpackhi_epi8, _mm_unpackhi_epi16, _mm_unpacklo_epi8,
        _mm_unpacklo_epi16,
    };

    // SAFETY: every x86-64 has SSE2. `a` and `b` have the 16 bytes that are read, at any alignment. The arrays have the
    // size of the two vectors and no padding.
    unsafe {
        let (a, b) = (_mm_loadu_si128(a.as_ptr().cast()), _mm_loadu_si128(b.as_ptr().cast()));
        std::mem::transmute::<[__m128i; 2], [[u8; ROW]; 2]>(match B {
            1 => [_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)],
            2 => [_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)],
            other => unreachable!("no planes are made of numbers of {other} bytes"),
        })
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn interleave<const B: usize>(a: &[u8; ROW], b: &[u8; ROW]) -> [[u8; ROW]; 2] {
    let mut both = [[0; ROW]; 2];
    let numbers = a.chunks_exact(B).zip(b.chunks_exact(B));
    for (pair, (a, b)) in both.as_flattened_mut().chunks_exact_mut(2 * B).zip(numbers) {
        let (first, second) = pair.split_at_mut(B);
        first.copy_from_slice(a);
        second.copy_from_slice(b);
    }
    both
}
