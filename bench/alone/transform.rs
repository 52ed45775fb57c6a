//! How fast transforms move bytes, against `memcpy` and against the loop one would write, all in one run.
//!
//! ```text
//! cargo bench --bench transform
//! ```
//!
//! Speed is bytes read plus bytes written, a second. `memcpy` moves as many: it copies half of their sum. Every
//! round runs all three, one after the other: a disturbance of the machine then affects all three. Buffers have
//! been touched before, so no page fault is timed. Those of large cases do not fit the caches. Those of small cases
//! stay there, and that favors `memcpy`: it has nothing to compute.
//!
//! The plain loop goes through pixels and channels as they are written down, and is compiled for the least
//! processor of the target, as code is that does not care.

use std::hint::black_box;
use std::time::Instant;

use twinbuf_mmap::DType;
use twinbuf_mmap::transform::{Transform, f32_to_bf16, f32_to_f16, u16_to_i64, u16_to_u32};

/// Source bytes of a case: a large batch; one whose result stays in a second- or third-level cache; a small record.
const SIZES: [usize; 3] = [8 << 20, 192 << 10, 3 << 10];

/// What each of the three moves in a case, over all its rounds, in bytes.
const MOVED: usize = 1 << 30;

const PAGE: usize = 4096;

const SCALE: f32 = 0.017;
const SHIFT: f32 = -2.1;

fn main() {
    println!("GB/s: best of the rounds (median); ratios of the best (of the medians)\n");
    for size in SIZES {
        let bytes = format!("{size} bytes in");
        println!(
            "{bytes:27} {:>15} {:>15} {:>15}   {:>13} {:>13}",
            "transform", "memcpy", "plain loop", "/ memcpy", "/ plain loop"
        );
        let wide = |src: &[u8]| f32::from(two(src));
        let byte = |src: &[u8]| f32::from(src[0]);
        to_f32("u8 -> f32", size, DType::U8, byte, 1, Kind::Widen);
        to_f32("u8 -> f32 normalise, 1 ch", size, DType::U8, byte, 1, Kind::Normalise);
        to_f32("u8 -> f32 normalise, 3 ch", size, DType::U8, byte, 3, Kind::Normalise);
        to_f32("u8 planar normalise, 1 ch", size, DType::U8, byte, 1, Kind::Planar);
        to_f32("u8 planar normalise, 3 ch", size, DType::U8, byte, 3, Kind::Planar);
        to_f32("u8 planar normalise, 4 ch", size, DType::U8, byte, 4, Kind::Planar);
        to_f32("u8 planar normalise, 5 ch", size, DType::U8, byte, 5, Kind::Planar);
        to_f32("u8 planar normalise, 13 ch", size, DType::U8, byte, 13, Kind::Planar);
        to_f32("u8 planar normalise, 32 ch", size, DType::U8, byte, 32, Kind::Planar);
        to_f32("u16 -> f32 normalise, 1 ch", size, DType::U16, wide, 1, Kind::Normalise);
        to_f32("u16 planar normalise, 3 ch", size, DType::U16, wide, 3, Kind::Planar);
        to_f32("u16 planar normalise, 13 ch", size, DType::U16, wide, 13, Kind::Planar);
        to_f32("f16 -> f32", size, DType::F16, |src| half(two(src)), 1, Kind::Widen);
        to_f32("f16 planar normalise, 3 ch", size, DType::F16, |src| half(two(src)), 3, Kind::Planar);
        let brain = |src: &[u8]| f32::from_bits(u32::from(two(src)) << 16);
        to_f32("bf16 -> f32", size, DType::Bf16, brain, 1, Kind::Widen);

        each("u16 -> u32", size, u16_to_u32, |src| u32::from(two(src)), 2);
        each("u16 -> i64", size, u16_to_i64, |src| i64::from(two(src)), 2);
        let single = |src: &[u8]| u32::from_le_bytes([src[0], src[1], src[2], src[3]]);
        let upper = |src: &[u8]| {
            let bits = single(src);
            low_half((bits + 0x7fff + (bits >> 16 & 1)) >> 16)
        };
        each("f32 -> bf16", size, f32_to_bf16, upper, 4);
        // No plain loop of one line rounds to f16: this one truncates, and handles normal numbers only.
        let cut = |src: &[u8]| {
            let bits = single(src);
            low_half((bits >> 16 & 0x8000) | ((bits & 0x7fff_ffff).wrapping_sub(112 << 23) >> 13 & 0x7fff))
        };
        each("f32 -> f16", size, f32_to_f16, cut, 4);
        println!();
    }
}

fn two(src: &[u8]) -> u16 {
    u16::from_le_bytes([src[0], src[1]])
}

fn low_half(bits: u32) -> u16 {
    let [low, high, ..] = bits.to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// Binary16, case by case.
fn half(bits: u16) -> f32 {
    let fraction = f32::from(bits & 0x3ff);
    let magnitude = match bits >> 10 & 31 {
        0 => fraction / 16_777_216.0,
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        exponent => (1.0 + fraction / 1024.0) * f32::from_bits((u32::from(exponent) + 112) << 23),
    };
    if bits & 0x8000 == 0 { magnitude } else { -magnitude }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Widen,
    Normalise,
    Planar,
}

fn to_f32(name: &str, size: usize, dtype: DType, read: impl Fn(&[u8]) -> f32, channels: usize, kind: Kind) {
    let width = dtype.size();
    // Two pictures, without a rest.
    let pixels = size / width / channels / 2;
    let (scale, shift) = (vec![SCALE; channels], vec![SHIFT; channels]);
    let mut transform = Transform::new(dtype, channels).unwrap();
    if kind != Kind::Widen {
        transform = transform.normalise(&scale, &shift).unwrap();
    }
    if kind == Kind::Planar {
        transform = transform.planar(pixels).unwrap();
    }
    let plain = |src: &[u8], dst: &mut [f32]| {
        if kind == Kind::Planar {
            let pictures =
                dst.chunks_exact_mut(pixels * channels).zip(src.chunks_exact(pixels * channels * width));
            for (dst, src) in pictures {
                for (p, pixel) in src.chunks_exact(channels * width).enumerate() {
                    for (c, number) in pixel.chunks_exact(width).enumerate() {
                        dst[c * pixels + p] = read(number) * scale[c] + shift[c];
                    }
                }
            }
        } else if kind == Kind::Normalise {
            for (dst, pixel) in dst.chunks_exact_mut(channels).zip(src.chunks_exact(channels * width)) {
                for (c, (dst, number)) in dst.iter_mut().zip(pixel.chunks_exact(width)).enumerate() {
                    *dst = read(number) * scale[c] + shift[c];
                }
            }
        } else {
            for (dst, number) in dst.iter_mut().zip(src.chunks_exact(width)) {
                *dst = read(number);
            }
        }
    };
    let apply = |src: &[u8], dst: &mut [f32]| {
        transform.apply(src, dst).unwrap();
    };
    compare(name, 2 * pixels * channels, width, apply, plain);
}

fn each<T: Copy + Default + From<u8>, E: std::fmt::Debug>(
    name: &str,
    size: usize,
    apply: impl Fn(&[u8], &mut [T]) -> Result<usize, E>,
    read: impl Fn(&[u8]) -> T,
    width: usize,
) {
    let apply = |src: &[u8], dst: &mut [T]| {
        apply(src, dst).unwrap();
    };
    let plain = |src: &[u8], dst: &mut [T]| {
        for (dst, number) in dst.iter_mut().zip(src.chunks_exact(width)) {
            *dst = read(number);
        }
    };
    compare(name, size / width, width, apply, plain);
}

/// Times the three on `numbers` numbers of `width` bytes, and prints a line.
fn compare<T: Copy + From<u8>>(
    name: &str,
    numbers: usize,
    width: usize,
    transform: impl Fn(&[u8], &mut [T]),
    plain: impl Fn(&[u8], &mut [T]),
) {
    // The low bytes count up and the high ones stay those of usual numbers, in every format.
    let src: Vec<u8> = (0..numbers * width)
        .map(|i| if i % width == width - 1 && width > 1 { 0x3f } else { i.to_le_bytes()[0] })
        .collect();
    // Not zeros: the system would not back them with memory yet.
    let mut dst = vec![T::from(1); numbers];
    let moved = src.len() + size_of_val(dst.as_slice());
    let (from, mut room) = (vec![1_u8; moved / 2], vec![2_u8; moved / 2 + PAGE]);
    // Half a page apart, modulo pages: some processors copy ten times slower if the destination is a little ahead.
    let start = (from.as_ptr().addr() + PAGE / 2).wrapping_sub(room.as_ptr().addr()) % PAGE;
    let to = &mut room[start..][..moved / 2];

    let rounds = (MOVED / moved).max(25);
    let mut speeds = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        let mut time = |who: usize, work: &mut dyn FnMut()| {
            let start = Instant::now();
            work();
            speeds[who].push(moved as f64 / start.elapsed().as_nanos() as f64);
        };
        time(0, &mut || transform(black_box(&src), black_box(&mut dst)));
        time(1, &mut || black_box(&mut *to).copy_from_slice(black_box(&from)));
        time(2, &mut || plain(black_box(&src), black_box(&mut dst)));
    }
    let [of_transform, of_memcpy, of_plain] = speeds.map(|mut speeds| {
        speeds.sort_by(f64::total_cmp);
        (speeds[speeds.len() - 1], speeds[speeds.len() / 2])
    });
    let speed = |(best, median): (f64, f64)| format!("{best:.1} ({median:.1})");
    let ratio = |over: (f64, f64)| format!("{:.2} ({:.2})", of_transform.0 / over.0, of_transform.1 / over.1);
    println!(
        "{name:27} {:>15} {:>15} {:>15}   {:>13} {:>13}",
        speed(of_transform),
        speed(of_memcpy),
        speed(of_plain),
        ratio(of_memcpy),
        ratio(of_plain)
    );
}
