//! The loops: plain code that the compiler vectorises, compiled for two instruction sets where that helps.

use std::marker::PhantomData;

use super::store::{BLOCK, Plain, Store};

/// A source number as it stands in the bytes.
pub(super) trait Raw: Copy + Default {
    const BYTES: usize;

    /// Reads it from exactly [`BYTES`](Self::BYTES) bytes.
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! raw {
    ($($number:ty)*) => {$(
        impl Raw for $number {
            const BYTES: usize = size_of::<$number>();

            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                // As an array, so that the compiler sees one load and not one for each byte.
                Self::from_le_bytes(bytes.try_into().expect("as many bytes as the contract says"))
            }
        }
    )*};
}

raw!(u8 u16 u32);

/// From one number to another.
pub(super) trait Convert {
    type Raw: Raw;
    type Out: Plain;

    fn convert(raw: Self::Raw) -> Self::Out;
}

macro_rules! convert {
    ($($name:ident: $raw:ty => $out:ty, $convert:expr;)*) => {$(
        pub(super) struct $name;

        impl Convert for $name {
            type Raw = $raw;
            type Out = $out;

            #[inline(always)]
            fn convert(raw: $raw) -> $out {
                let convert: fn($raw) -> $out = $convert;
                convert(raw)
            }
        }
    )*};
}

convert! {
    U8ToF32: u8 => f32, f32::from;
    U16ToF32: u16 => f32, f32::from;
    I16ToF32: u16 => f32, |raw| f32::from(i16::from_ne_bytes(raw.to_ne_bytes()));
    F16ToF32: u16 => f32, f16_to_f32;
    Bf16ToF32: u16 => f32, |raw| f32::from_bits(u32::from(raw) << 16);
    U16ToU32: u16 => u32, u32::from;
    U16ToI64: u16 => i64, i64::from;
    F32ToF16: u32 => u16, f32_to_f16;
    F32ToBf16: u32 => u16, f32_to_bf16;
}

/// Binary16 to binary32 without a branch and without subnormal operands, which some processors are slow with.
#[inline(always)]
fn f16_to_f32(half: u16) -> f32 {
    let half = u32::from(half);
    let sign = (half & 0x8000) << 16;
    // Exponent and fraction in the places of an f32. The biases of the exponents are 15 and 127.
    let magnitude = (half & 0x7fff) << 13;
    let normal = magnitude + ((127 - 15) << 23);
    // Infinity and NaN: from the largest exponent of one format, 31, to that of the other, 255.
    let special = magnitude + ((255 - 31) << 23);
    // Zero and subnormals, fraction * 2^-24: with 2^-14 added the fraction has its place and its weight, and the
    // subtraction is exact.
    let least_normal = (127 - 14) << 23;
    let subnormal = (f32::from_bits(magnitude + least_normal) - f32::from_bits(least_normal)).to_bits();
    let bits = if magnitude >= 31 << 23 { special } else { normal };
    let bits = if magnitude < 1 << 23 { subnormal } else { bits };
    f32::from_bits(sign | bits)
}

/// Binary32 to binary16, to nearest, ties to even; a NaN keeps its sign and the upper bits of its payload.
#[inline(always)]
fn f32_to_f16(single: u32) -> u16 {
    let sign = single >> 16 & 0x8000;
    let magnitude = single & 0x7fff_ffff;
    // Half a unit of the last place that is kept, or just less where that place is even; a carry goes into the
    // exponent, as it should.
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0fff + (magnitude >> 13 & 1)) >> 13;
    // Below 2^-14, where results are multiples of 2^-24. So are the f32 from 0.5 to 1: the addition rounds to one
    // of them, and its fraction is the result.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    // Made quiet, since the bits that made it a NaN may be among those cut off.
    let nan = 0x7e00 | (magnitude >> 13 & 0x03ff);
    let bits = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
    // 2^16 and more, infinity too: whatever rounds to a finite number is less.
    let bits = if magnitude >= (127 + 16) << 23 { 0x7c00 } else { bits };
    let bits = if magnitude > 255 << 23 { nan } else { bits };
    low_half(sign | bits)
}

/// Binary32 to its upper half, to nearest, ties to even; a NaN keeps its sign and the upper bits of its payload.
#[inline(always)]
fn f32_to_bf16(single: u32) -> u16 {
    // As in `f32_to_f16`. Only a NaN overflows.
    let rounded = single.wrapping_add(0x7fff + (single >> 16 & 1));
    let nan = single | 0x0040_0000;
    low_half(if single & 0x7fff_ffff > 255 << 23 { nan } else { rounded } >> 16)
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "callers give numbers below 2^16")]
const fn low_half(bits: u32) -> u16 {
    bits as u16
}

/// A scale and a shift for each channel, repeated so that long loops can walk along them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Affine {
    /// A multiple of the channels long.
    scale: Box<[f32]>,
    /// As long as `scale`.
    shift: Box<[f32]>,
}

impl Affine {
    /// For as many channels as both slices are long, at least 1.
    pub(super) fn new(scale: &[f32], shift: &[f32]) -> Self {
        let times = match BLOCK / scale.len() {
            0 => 1,
            // A multiple of 32 numbers leaves no rest to the vector loops.
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

/// Work on slices.
pub(super) trait Job {
    fn run(self);
}

/// Does the job with the best instructions that this processor has.
pub(super) fn run<J: Job>(job: J) {
    #[cfg(test)]
    if super::tests::BASELINE.get() {
        return job.run();
    }
    dispatch(job);
}

/// One copy of this, and of all that is inlined into it, is made for each instruction set.
///
/// Of AVX2 the integer half matters, to widen and to take pixels apart. FMA is left out on purpose: results must not
/// depend on it.
#[cfg_attr(feature = "simd", multiversion::multiversion(targets("x86_64+avx2")))]
fn dispatch<J: Job>(job: J) {
    job.run();
}

/// Converts numbers one by one, and does `finish` to each.
pub(super) struct Each<'a, C: Convert, F> {
    pub(super) src: &'a [u8],
    /// As many numbers as `src` has.
    pub(super) dst: &'a mut [C::Out],
    pub(super) finish: F,
    /// Whether `dst` is to be written past the caches.
    pub(super) past_caches: bool,
}

impl<C: Convert, F: Fn(C::Out) -> C::Out> Job for Each<'_, C, F> {
    #[inline(always)]
    fn run(self) {
        let Self { src, dst, finish, past_caches } = self;
        let mut store = Store::new(past_caches);
        for (dst, src) in dst.chunks_mut(BLOCK).zip(src.chunks(BLOCK * C::Raw::BYTES)) {
            store.put(dst, |out| {
                for (out, raw) in out.iter_mut().zip(src.chunks_exact(C::Raw::BYTES)) {
                    *out = finish(C::convert(C::Raw::read(raw)));
                }
            });
        }
    }
}

/// Converts channels that stand side by side, with a scale and a shift for each.
pub(super) struct SideBySide<'a, C> {
    pub(super) src: &'a [u8],
    /// As many numbers as `src` has.
    pub(super) dst: &'a mut [f32],
    pub(super) affine: &'a Affine,
    /// Whether `dst` is to be written past the caches.
    pub(super) past_caches: bool,
    pub(super) convert: PhantomData<C>,
}

impl<C: Convert<Out = f32>> Job for SideBySide<'_, C> {
    #[inline(always)]
    fn run(self) {
        let Self { src, dst, affine: Affine { scale, shift }, past_caches, .. } = self;
        let mut store = Store::new(past_caches);
        for (dst, src) in dst.chunks_mut(scale.len()).zip(src.chunks(scale.len() * C::Raw::BYTES)) {
            // More than one round only if the channels alone are more than a block.
            let sides = dst.chunks_mut(BLOCK).zip(src.chunks(BLOCK * C::Raw::BYTES));
            for ((dst, src), (scale, shift)) in sides.zip(scale.chunks(BLOCK).zip(shift.chunks(BLOCK))) {
                store.put(dst, |out| {
                    let numbers = out.iter_mut().zip(src.chunks_exact(C::Raw::BYTES));
                    for ((out, raw), (scale, shift)) in numbers.zip(scale.iter().zip(shift)) {
                        *out = C::convert(C::Raw::read(raw)) * scale + shift;
                    }
                });
            }
        }
    }
}

/// Takes the channels of whole pictures apart, and converts them.
///
/// Planes are never written past the caches: steps end within the lines of several planes, and such parts of lines
/// cost more than is gained.
pub(super) struct Planes<'a, C> {
    pub(super) src: &'a [u8],
    /// As many numbers as `src` has.
    pub(super) dst: &'a mut [f32],
    /// At least 2.
    pub(super) channels: usize,
    /// Pixels of a picture, at least 1.
    pub(super) pixels: usize,
    pub(super) affine: Option<&'a Affine>,
    pub(super) convert: PhantomData<C>,
}

impl<C: Convert<Out = f32>> Job for Planes<'_, C> {
    #[inline(always)]
    fn run(self) {
        let Self { src, dst, channels, pixels, affine, .. } = self;
        let mut apart = [[C::Raw::default(); PIXELS]; 4];
        let pictures = src.chunks_exact(channels * pixels * C::Raw::BYTES);
        for (src, dst) in pictures.zip(dst.chunks_exact_mut(channels * pixels)) {
            let mut picture = Picture { dst, pixels, affine, apart: &mut apart };
            match channels {
                2 => picture.planes::<C, 2>(src),
                3 => picture.planes::<C, 3>(src),
                4 => picture.planes::<C, 4>(src),
                _ => picture.many_planes::<C>(src, channels),
            }
        }
    }
}

/// Pixels that are taken apart at a time.
const PIXELS: usize = 512;

/// Source bytes that are gone through for four planes before the next four, where there are more than four: enough
/// for long stretches in every plane, and few enough to stay in the second-level cache until the last.
const STRETCH_BYTES: usize = 64 << 10;

/// The planes of one picture.
struct Picture<'a, R> {
    dst: &'a mut [f32],
    pixels: usize,
    affine: Option<&'a Affine>,
    /// Room for up to four channels.
    apart: &'a mut [[R; PIXELS]; 4],
}

impl<R: Raw> Picture<'_, R> {
    /// From the whole picture with `N` channels.
    #[inline(always)]
    fn planes<C: Convert<Raw = R, Out = f32>, const N: usize>(&mut self, src: &[u8]) {
        for (at, src) in (0..self.pixels).step_by(PIXELS).zip(src.chunks(PIXELS * N * R::BYTES)) {
            self.step::<C, N>(src, 0, at);
        }
    }

    /// From the whole picture with 4 channels or more: four at a time are brought together, and then taken apart.
    #[inline(always)]
    fn many_planes<C: Convert<Raw = R, Out = f32>>(&mut self, src: &[u8], channels: usize) {
        const { assert!(R::BYTES <= 2, "`four` has room for numbers of 2 bytes") };
        let mut four = [0; PIXELS * 4 * 2];
        let (pixel, part) = (channels * R::BYTES, 4 * R::BYTES);
        let step = PIXELS.saturating_mul(pixel);
        let steps = (STRETCH_BYTES / step).max(1);
        let stretches = src.chunks(step.saturating_mul(steps));
        for (start, src) in (0..self.pixels).step_by(PIXELS * steps).zip(stretches) {
            for first in (0..channels).step_by(4) {
                // The last four may be some of those before too: they get the same values again.
                let first = first.min(channels - 4);
                for (at, src) in (start..).step_by(PIXELS).zip(src.chunks(step)) {
                    let pixels = src.chunks_exact(pixel);
                    let len = pixels.len() * part;
                    for (four, pixel) in four.chunks_exact_mut(part).zip(pixels) {
                        four.copy_from_slice(&pixel[first * R::BYTES..][..part]);
                    }
                    self.step::<C, 4>(&four[..len], first, at);
                }
            }
        }
    }

    /// From at most [`PIXELS`] pixels of `N` channels to the places from `at` on in the planes from `first` on.
    #[inline(always)]
    fn step<C: Convert<Raw = R, Out = f32>, const N: usize>(&mut self, src: &[u8], first: usize, at: usize) {
        let pixels = src.chunks_exact(N * R::BYTES);
        let len = pixels.len();
        for (i, pixel) in pixels.enumerate().take(PIXELS) {
            for (n, raw) in pixel.chunks_exact(R::BYTES).enumerate() {
                self.apart[n][i] = R::read(raw);
            }
        }
        for (channel, plane) in (first..).zip(&self.apart[..N]) {
            let dst = &mut self.dst[channel * self.pixels + at..][..len];
            match self.affine {
                None => {
                    for (out, raw) in dst.iter_mut().zip(plane) {
                        *out = C::convert(*raw);
                    }
                }
                Some(affine) => {
                    let (scale, shift) = affine.of(channel);
                    for (out, raw) in dst.iter_mut().zip(plane) {
                        *out = C::convert(*raw) * scale + shift;
                    }
                }
            }
        }
    }
}
