//! Compares the loops with a reference, for both versions of them and for destinations at several alignments.

use std::cell::Cell;

use proptest::prelude::*;

use super::{Transform, f32_to_bf16, f32_to_f16, u16_to_i64, u16_to_u32};
use crate::DType;

#[path = "../../tests/transform/reference.rs"]
mod reference;

thread_local! {
    /// Whether this thread uses the loops that are compiled for every processor of the target.
    pub(super) static BASELINE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a check with both versions of the loops.
fn each_way(mut check: impl FnMut()) {
    for baseline in [false, true] {
        BASELINE.set(baseline);
        check();
    }
}

/// Numbers in the destination after the result. They must not change.
const GUARD: usize = 5;

/// Returns a destination that starts `offset` numbers after the start of a cache line.
fn destination<T: Copy>(room: &mut Vec<T>, fill: T, offset: usize, len: usize) -> &mut [T] {
    let line = 64 / size_of::<T>();
    *room = vec![fill; 2 * line + len + GUARD];
    let start = room.as_ptr().align_offset(64) + offset % line;
    &mut room[start..start + len + GUARD]
}

fn widen(dtype: DType, src: &[u8], i: usize) -> f32 {
    let two = |i: usize| [src[2 * i], src[2 * i + 1]];
    match dtype {
        DType::U8 => f32::from(src[i]),
        DType::U16 => f32::from(u16::from_le_bytes(two(i))),
        DType::I16 => f32::from(i16::from_le_bytes(two(i))),
        DType::F16 => reference::f16_to_f32(u16::from_le_bytes(two(i))),
        DType::Bf16 => reference::bf16_to_f32(u16::from_le_bytes(two(i))),
        other => panic!("{other} is not transformed"),
    }
}

fn check_transform(
    dtype: DType,
    src: &[u8],
    channels: usize,
    affine: Option<(&[f32], &[f32])>,
    pixels: Option<usize>,
    offset: usize,
) {
    let mut transform = Transform::new(dtype, channels).unwrap();
    if let Some((scale, shift)) = affine {
        transform = transform.normalise(scale, shift).unwrap();
    }
    if let Some(pixels) = pixels {
        transform = transform.planar(pixels).unwrap();
    }
    let numbers = src.len() / dtype.size();
    let wanted = reference::transform(numbers, |i| widen(dtype, src, i), channels, affine, pixels);
    // After arithmetic, any NaN equals any other.
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || affine.is_some() && a.is_nan() && b.is_nan();
    check_each(|src, dst| transform.apply(src, dst), 7.0, src, (&wanted, same), offset);
}

/// Checks a function that converts numbers one by one. `wanted` has the result, and which numbers are the same.
fn check_each<T: Copy + PartialEq + std::fmt::Debug>(
    apply: impl Fn(&[u8], &mut [T]) -> Result<usize, super::TransformError>,
    fill: T,
    src: &[u8],
    (wanted, same): (&[T], impl Fn(T, T) -> bool),
    offset: usize,
) {
    each_way(|| {
        let mut room = Vec::new();
        let dst = destination(&mut room, fill, offset, wanted.len());
        assert_eq!(apply(src, dst), Ok(wanted.len()));
        let different = (0..wanted.len()).find(|&i| !same(dst[i], wanted[i]));
        assert_eq!(different.map(|i| (i, dst[i], wanted[i])), None, "(index, found, wanted)");
        assert_eq!(dst[wanted.len()..], [fill; GUARD], "numbers past the result");
    });
}

fn every_u16() -> Vec<u8> {
    (0..=u16::MAX).flat_map(u16::to_le_bytes).collect()
}

#[test]
fn every_number_of_two_bytes_is_widened_normalised_and_taken_apart() {
    for dtype in [DType::U16, DType::I16, DType::F16, DType::Bf16] {
        check_transform(dtype, &every_u16(), 1, None, None, 0);
        let (scale, shift) = ([0.1, -3.0, 1e-30, 1e38], [0.7, 1e-3, -1e-38, -1e38]);
        check_transform(dtype, &every_u16(), 4, Some((&scale, &shift)), None, 0);
        check_transform(dtype, &every_u16(), 4, Some((&scale, &shift)), Some(1 << 13), 0);
        check_transform(dtype, &every_u16(), 2, None, Some(1 << 15), 0);
        check_transform(dtype, &every_u16(), 16, None, Some(1 << 12), 0);
    }
}

/// Checks pictures that end at any place of a square of pixels, with rows of pixels shorter and longer than a register.
#[test]
fn every_number_of_channels_and_of_last_pixels_is_taken_apart() {
    let src: Vec<u8> =
        (0..2 * 2 * 35 * 50_u32).map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    for dtype in [DType::U8, DType::U16] {
        for channels in 2..=35 {
            for pixels in 1..=50 {
                let two_pictures = 2 * channels * pixels * dtype.size();
                check_transform(dtype, &src[..two_pictures], channels, None, Some(pixels), 0);
            }
        }
    }
}

#[test]
fn every_byte_is_normalised_as_two_roundings() {
    let src: Vec<u8> = (0..=u8::MAX).collect();
    // With these constants, a fused multiply-add gives another result for many of the bytes.
    let (scale, shift) = ([1.0 / (255.0 * 0.229)], [-0.485 / 0.229]);
    let fused = src.iter().filter(|&&x| {
        f32::from(x).mul_add(scale[0], shift[0]).to_bits() != (f32::from(x) * scale[0] + shift[0]).to_bits()
    });
    assert!(fused.count() > 20, "the constants must tell the two apart");
    check_transform(DType::U8, &src, 1, Some((&scale, &shift)), None, 0);
    check_transform(DType::U8, &src, 1, Some((&scale, &shift)), Some(64), 0);
}

#[test]
fn every_token_is_widened() {
    check_widening(&(0..=u16::MAX).collect::<Vec<_>>(), 0, 0);
}

/// Widens these tokens, which begin at byte `misaligned` of `src`.
fn check_widening(tokens: &[u16], misaligned: usize, offset: usize) {
    let mut src = vec![0; misaligned];
    src.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    let wanted: Vec<u32> = tokens.iter().map(|&token| token.into()).collect();
    check_each(u16_to_u32, 7, &src[misaligned..], (&wanted, |a, b| a == b), offset);
    let wanted: Vec<i64> = tokens.iter().map(|&token| token.into()).collect();
    check_each(u16_to_i64, 7, &src[misaligned..], (&wanted, |a, b| a == b), offset);
}

fn check_rounding(numbers: &[f32], offset: usize) {
    let src: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    let wanted: Vec<u16> = numbers.iter().map(|&number| reference::f32_to_f16(number)).collect();
    check_each(f32_to_f16, 7, &src, (&wanted, |a, b| a == b), offset);
    let wanted: Vec<u16> = numbers.iter().map(|&number| reference::f32_to_bf16(number)).collect();
    check_each(f32_to_bf16, 7, &src, (&wanted, |a, b| a == b), offset);
}

#[test]
fn numbers_at_and_beside_each_boundary_are_rounded_to_even() {
    // Every f16 and every bf16, the point half-way to the next, and the f32 values next to both.
    for upper in 0..=u16::MAX {
        let whole = [reference::f16_to_f32(upper), reference::bf16_to_f32(upper)];
        let half = [0x1000, 0x8000];
        let numbers: Vec<f32> = std::iter::zip(whole, half)
            .flat_map(|(whole, half)| [whole.to_bits(), whole.to_bits().wrapping_add(half)])
            .flat_map(|bits| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)].map(f32::from_bits))
            .collect();
        for number in numbers {
            let src = number.to_le_bytes();
            let mut found = [0];
            f32_to_f16(&src, &mut found).unwrap();
            assert_eq!(found[0], reference::f32_to_f16(number), "{number:e} to f16");
            f32_to_bf16(&src, &mut found).unwrap();
            assert_eq!(found[0], reference::f32_to_bf16(number), "{number:e} to bf16");
        }
    }
}

#[test]
fn subnormal_halves_are_rounded_at_their_halfway_points() {
    // Multiples of 2^-26 below 2^-13: quarters of 2^-24, the unit of subnormal f16.
    let numbers: Vec<f32> = (0..1 << 13).map(|i| i as f32 * 2_f32.powi(-26)).collect();
    check_rounding(&numbers, 0);
}

#[test]
fn a_rounded_half_comes_back() {
    for (bits, single) in (0..=u16::MAX).map(|bits| (bits, reference::f16_to_f32(bits))) {
        let quiet = if single.is_nan() { bits | 0x200 } else { bits };
        assert_eq!(reference::f32_to_f16(single), quiet);
        let single = reference::bf16_to_f32(bits);
        let quiet = if single.is_nan() { bits | 0x40 } else { bits };
        assert_eq!(reference::f32_to_bf16(single), quiet);
    }
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::U8, DType::U16, DType::I16, DType::F16, DType::Bf16])
}

fn channels() -> impl Strategy<Value = usize> {
    prop_oneof![1..=9_usize, 13..=18_usize, Just(33), 1000..1100_usize]
}

/// Lengths near the sizes of blocks and vectors, and others.
fn len() -> impl Strategy<Value = usize> {
    prop_oneof![0..70_usize, 480..560_usize, 1000..1060_usize, 0..5000_usize]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn any_transform_is_the_reference(
        dtype in dtype(),
        channels in channels(),
        pixels in len(),
        pictures in 0..3_usize,
        normalise in any::<bool>(),
        planar in any::<bool>(),
        (misaligned, offset) in (0..64_usize, 0..16_usize),
        seed in any::<u64>(),
    ) {
        // Use few pixels with many channels, to keep pictures small.
        let pixels = if channels > 100 { pixels % 9 } else { pixels };
        let pixels = if planar { pixels.max(1) } else { pixels };
        let len = channels * pixels * pictures * dtype.size();
        let mut state = twinbuf_testing::Random(seed);
        let mut random = || state.next().to_le_bytes()[3];
        let src: Vec<u8> = (0..misaligned + len).map(|_| random()).collect();
        let scale: Vec<f32> = (0..channels).map(|_| f32::from(random()) / 77.0 - 1.5).collect();
        let shift: Vec<f32> = (0..channels).map(|_| f32::from(random()) / 7.0 - 15.0).collect();
        let affine = normalise.then_some((&*scale, &*shift));
        check_transform(dtype, &src[misaligned..], channels, affine, planar.then_some(pixels), offset);
    }

    #[test]
    fn any_f32_is_rounded_as_the_reference(
        numbers in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..3000),
        // Most random f32 are outside the range of an f16, so add numbers within it.
        near in prop::collection::vec(-70000_f32..70000.0, 0..100),
        tiny in prop::collection::vec(-1e-4_f32..1e-4, 0..100),
        offset in 0..32_usize,
    ) {
        check_rounding(&[numbers, near, tiny].concat(), offset);
    }

    #[test]
    fn any_tokens_are_widened(
        tokens in prop::collection::vec(any::<u16>(), 0..5000),
        misaligned in 0..16_usize,
        offset in 0..16_usize,
    ) {
        check_widening(&tokens, misaligned, offset);
    }
}
