//! What transforms mean, number by number, with arithmetic in f64 and no bit tricks: slow, and to be believed.

/// The value of an f16, exact in f64 except for NaN.
fn f16_value(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        31 if fraction > 0.0 => f64::NAN,
        31 => f64::INFINITY,
        0 => fraction * 2_f64.powi(-24),
        _ => (1024.0 + fraction) * 2_f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

/// Exact; the payload of a NaN moves to the upper end of the larger one.
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let value = f16_value(bits);
    if value.is_nan() {
        let sign = u32::from(bits >> 15) << 31;
        return f32::from_bits(sign | 0x7f80_0000 | u32::from(bits & 0x3ff) << 13);
    }
    #[expect(clippy::cast_possible_truncation, reason = "the assertion says that nothing is lost")]
    let single = value as f32;
    assert_eq!(f64::from(single), value, "every f16 is an f32");
    single
}

pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_le_bytes([0, 0, bits.to_le_bytes()[0], bits.to_le_bytes()[1]])
}

/// The nearer of two neighbours, `lower` (at `bits`) and the next; of two equally near the even one.
fn nearer(value: f64, bits: u16, lower: f64, upper: f64) -> u16 {
    assert!(lower <= value && value < upper);
    match (value - lower).total_cmp(&(upper - value)) {
        std::cmp::Ordering::Less => bits,
        std::cmp::Ordering::Greater => bits + 1,
        std::cmp::Ordering::Equal => bits + bits % 2,
    }
}

pub(crate) fn f32_to_f16(single: f32) -> u16 {
    let (bits, magnitude) = (single.to_bits(), f64::from(single.abs()));
    let sign = if bits >> 31 == 1 { 0x8000 } else { 0 };
    if single.is_nan() {
        return sign | 0x7e00 | (bits >> 13 & 0x3ff) as u16;
    }
    // Infinity stands where the next number would be, were there one.
    let value = |bits: u16| if bits == 0x7c00 { 65536.0 } else { f16_value(bits) };
    if magnitude >= 65536.0 {
        return sign | 0x7c00;
    }
    let (mut low, mut high) = (0_u16, 0x7c00);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if value(middle) <= magnitude { low = middle } else { high = middle }
    }
    sign | nearer(magnitude, low, value(low), value(high))
}

pub(crate) fn f32_to_bf16(single: f32) -> u16 {
    let (bits, magnitude) = (single.to_bits(), f64::from(single.abs()));
    let sign = if bits >> 31 == 1 { 0x8000 } else { 0 };
    if single.is_nan() {
        return sign | 0x7fc0 | (bits >> 16 & 0x3f) as u16;
    }
    if single.is_infinite() {
        return sign | 0x7f80;
    }
    let value = |bits: u16| if bits == 0x7f80 { 2_f64.powi(128) } else { f64::from(bf16_to_f32(bits)) };
    let low = (bits >> 16) as u16 & 0x7fff;
    sign | nearer(magnitude, low, value(low), value(low + 1))
}

/// What a `Transform` should give, where `widen` reads the number at an index of the source.
pub(crate) fn transform(
    numbers: usize,
    widen: impl Fn(usize) -> f32,
    channels: usize,
    affine: Option<(&[f32], &[f32])>,
    pixels: Option<usize>,
) -> Vec<f32> {
    let mut out = vec![0.0; numbers];
    for i in 0..numbers {
        let channel = i % channels;
        let number = match affine {
            None => widen(i),
            Some((scale, shift)) => {
                let product = widen(i) * scale[channel];
                product + shift[channel]
            }
        };
        let place = match pixels {
            None => i,
            Some(pixels) => {
                let (picture, pixel) = (i / channels / pixels, i / channels % pixels);
                (picture * channels + channel) * pixels + pixel
            }
        };
        out[place] = number;
    }
    out
}
