//! Converts the numbers of records for training, in the same pass that copies them out of the read buffer.
//!
//! - [`Transform`]: u8, u16, i16, f16 or bf16 to f32, optionally with a scale and a shift for each channel, and
//!   optionally from interleaved pixels (NHWC) to planes (NCHW).
//! - [`u16_to_u32`], [`u16_to_i64`]: tokens, in the types that embedding layers take.
//! - [`f32_to_f16`], [`f32_to_bf16`]: rounding to 16 bits.
//!
//! Sources are the bytes of a batch: little-endian, packed, at any alignment, on any host. Every function writes to the
//! front of the destination and returns the number of results; on an error it has written nothing.
//!
//! Results are the same on every machine, bit for bit, with every instruction set and at every alignment and length.
//! The one exception is Rust's own: which of several NaNs a multiplication or addition returns.
//!
//! On x86-64 the loops are compiled for SSE2 and for AVX2, and the feature `simd` (on by default) chooses at run time;
//! without it they use SSE2, or what `-C target-cpu` allows. Elsewhere they are compiled once, for the target's baseline
//! (`AArch64`: NEON). On x86-64, destinations of 8 MiB or more are written with non-temporal stores, because they would
//! push everything else out of the caches; planar ones with 2 to 4 channels are not.
//!
//! ```
//! use twinbuf_mmap::{DType, transform::Transform};
//!
//! // A batch of two pictures of 2 pixels, red, green and blue: [2, 1, 2, 3] (NHWC).
//! let batch: [u8; 12] = [255, 0, 51, 255, 0, 51, 0, 255, 51, 0, 255, 51];
//!
//! // The usual (x / 255 - mean) / std is x * (1 / (255 * std)) + (-mean / std).
//! let (mean, std) = ([0.5, 0.5, 0.2], [0.5, 0.5, 1.0]);
//! let scale = std.map(|std| 1.0 / (255.0 * std));
//! let shift: [f32; 3] = std::array::from_fn(|c| -mean[c] / std[c]);
//! let transform = Transform::new(DType::U8, 3)?.normalise(&scale, &shift)?.planar(2)?;
//!
//! let mut planes = vec![0.0; transform.out_len(batch.len())?];
//! assert_eq!(transform.apply(&batch, &mut planes)?, 12);
//! // [2, 3, 1, 2] (NCHW): the red pixels of the first picture, its green ones, its blue ones, the second.
//! let wanted = [1.0, 1.0, -1.0, -1.0, 0.0, 0.0, -1.0, -1.0, 1.0, 1.0, 0.0, 0.0];
//! assert!(planes.iter().zip(wanted).all(|(found, wanted): (&f32, f32)| (found - wanted).abs() < 1e-6));
//! # Ok::<(), twinbuf_mmap::transform::TransformError>(())
//! ```

mod error;
mod kernel;
mod raw;
mod store;
#[cfg(test)]
mod tests;
mod transpose;

pub use error::TransformError;

use std::marker::PhantomData;

use crate::DType;
use kernel::{
    Affine, Bf16ToF32, Convert, Each, F16ToF32, F32ToBf16, F32ToF16, I16ToF32, Interleaved, Planes, U8ToF32,
    U16ToF32, U16ToI64, U16ToU32, run,
};
use raw::Raw;
use store::non_temporal;

/// A conversion of bytes to f32 numbers. Make it once, then apply it to records or to whole batches.
///
/// The source is a sequence of pixels of `channels` numbers each. Rows of features are pixels too, and with one channel
/// everything is one plane.
///
/// - Every u8, u16, i16, f16 and bf16 is an f32 exactly, so widening loses nothing; a NaN keeps its payload.
/// - [`normalise`](Self::normalise) then gives `x * scale[c] + shift[c]` for channel `c`: one multiplication
///   and one addition, each rounded to nearest even. They are never fused.
/// - [`planar`](Self::planar) then puts the numbers of each channel together, picture by picture.
///
/// `Transform` is `Send + Sync`: several threads may apply one to their parts of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Transform {
    dtype: DType,
    channels: usize,
    /// Pixels of a picture, for planes.
    pixels: Option<usize>,
    affine: Option<Affine>,
}

impl Transform {
    /// Widens numbers to f32 and leaves them in their order, `channels` for each pixel (at least 1).
    ///
    /// # Errors
    ///
    /// [`TransformError::Source`] unless `dtype` is `U8`, `U16`, `I16`, `F16` or `Bf16`.
    /// [`TransformError::NoChannels`].
    pub const fn new(dtype: DType, channels: usize) -> Result<Self, TransformError> {
        if !matches!(dtype, DType::U8 | DType::U16 | DType::I16 | DType::F16 | DType::Bf16) {
            return Err(TransformError::Source { found: dtype });
        }
        if channels == 0 {
            return Err(TransformError::NoChannels);
        }
        Ok(Self { dtype, channels, pixels: None, affine: None })
    }

    /// Multiplies channel `c` by `scale[c]`, then adds `shift[c]`.
    ///
    /// Bytes to `(x / 255 - mean) / std`, as in torchvision's `ToTensor` and `Normalize`, is a scale of
    /// `1 / (255 * std)` and a shift of `-mean / std`; the result differs from theirs by rounding.
    ///
    /// # Errors
    ///
    /// [`TransformError::ChannelCount`] unless both have one value for each channel.
    /// [`TransformError::NotFinite`] if a value is infinite or NaN; a standard deviation of 0 does that.
    pub fn normalise(self, scale: &[f32], shift: &[f32]) -> Result<Self, TransformError> {
        for (name, values) in [("scale", scale), ("shift", shift)] {
            if values.len() != self.channels {
                let (wanted, found) = (self.channels, values.len());
                return Err(TransformError::ChannelCount { name, wanted, found });
            }
            if let Some(channel) = values.iter().position(|value| !value.is_finite()) {
                return Err(TransformError::NotFinite { name, channel, found: values[channel] });
            }
        }
        Ok(Self { affine: Some(Affine::new(scale, shift)), ..self })
    }

    /// Converts pictures of `pixels` pixels (at least 1; height times width), each with its channels side by side
    /// (HWC), to pictures with one plane after the other (CHW). The source then holds whole pictures.
    ///
    /// # Errors
    ///
    /// [`TransformError::NoPixels`]. [`TransformError::PictureTooLarge`] if a picture has `isize::MAX` bytes or
    /// more, before or after.
    pub fn planar(self, pixels: usize) -> Result<Self, TransformError> {
        if pixels == 0 {
            return Err(TransformError::NoPixels);
        }
        let channels = self.channels;
        match channels.checked_mul(pixels) {
            // The size after: no source number has more bytes than an f32.
            Some(numbers) if numbers < isize::MAX as usize / size_of::<f32>() => {}
            _ => return Err(TransformError::PictureTooLarge { channels, pixels }),
        }
        Ok(Self { pixels: Some(pixels), ..self })
    }

    /// Returns the type of the source's numbers.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Numbers in a pixel, at least 1.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.channels
    }

    /// Pixels of a picture; `None` unless the result is [`planar`](Self::planar).
    #[must_use]
    pub const fn pixels(&self) -> Option<usize> {
        self.pixels
    }

    /// Numbers that `src_len` bytes become: `src_len / dtype.size()`.
    ///
    /// # Errors
    ///
    /// [`TransformError::SourceLength`] unless the bytes are whole pixels, or whole pictures if
    /// [`planar`](Self::planar). No bytes at all are fine, and become no numbers.
    pub const fn out_len(&self, src_len: usize) -> Result<usize, TransformError> {
        let numbers = match self.pixels {
            Some(pixels) => self.channels * pixels,
            None => self.channels,
        };
        // A unit that overflows is longer than any slice can be, and so is `usize::MAX`.
        let unit = numbers.saturating_mul(self.dtype.size());
        if src_len % unit == 0 {
            Ok(src_len / self.dtype.size())
        } else {
            Err(TransformError::SourceLength { wanted: unit, found: src_len })
        }
    }

    /// Transforms all of `src` to the front of `dst` and returns the number of results:
    /// [`out_len`](Self::out_len) of its length.
    ///
    /// One record, a batch, or any part of whole pixels (whole pictures if [`planar`](Self::planar)) may be
    /// given; the results are the same as in one go.
    ///
    /// ```
    /// use twinbuf_mmap::{DType, transform::Transform};
    ///
    /// let audio = Transform::new(DType::I16, 1)?.normalise(&[1.0 / 32768.0], &[0.0])?;
    /// let mut samples = [0.0; 4];
    /// assert_eq!(audio.apply(&[0x00, 0x80, 0x00, 0x40], &mut samples)?, 2);
    /// assert_eq!(samples, [-1.0, 0.5, 0.0, 0.0]);
    /// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`out_len`](Self::out_len). [`TransformError::BufferTooSmall`] if `dst` is shorter than the
    /// result. In both cases `dst` is unchanged.
    pub fn apply(&self, src: &[u8], dst: &mut [f32]) -> Result<usize, TransformError> {
        let dst = front(self.out_len(src.len())?, dst)?;
        let len = dst.len();
        match self.dtype {
            DType::U8 => self.start::<U8ToF32>(src, dst),
            DType::U16 => self.start::<U16ToF32>(src, dst),
            DType::I16 => self.start::<I16ToF32>(src, dst),
            DType::F16 => self.start::<F16ToF32>(src, dst),
            DType::Bf16 => self.start::<Bf16ToF32>(src, dst),
            other => unreachable!("`new` refuses {other}"),
        }
        Ok(len)
    }

    fn start<C: Convert<Out = f32>>(&self, src: &[u8], dst: &mut [f32]) {
        let (channels, affine, convert) = (self.channels, self.affine.as_ref(), PhantomData::<C>);
        let non_temporal = non_temporal(dst);
        match (self.pixels, affine) {
            // With one channel the order of planes is that of the source.
            (Some(pixels), _) if channels > 1 => {
                run(Planes { src, dst, channels, pixels, affine, non_temporal, convert });
            }
            (_, None) => run(Each::<C, _> { src, dst, finish: |number| number, non_temporal }),
            (_, Some(affine)) if channels == 1 => {
                let (scale, shift) = affine.of(0);
                run(Each::<C, _> { src, dst, finish: |number| number * scale + shift, non_temporal });
            }
            (_, Some(affine)) => run(Interleaved { src, dst, affine, non_temporal, convert }),
        }
    }
}

/// Tokens of two bytes to u32, the type that `candle` takes for an embedding.
///
/// `src` holds little-endian u16 at any alignment; the result goes to the front of `dst`, and its length is
/// returned.
///
/// ```
/// let mut tokens = [0; 2];
/// assert_eq!(twinbuf_mmap::transform::u16_to_u32(&[0x50, 0xc3, 0x01, 0x00], &mut tokens)?, 2);
/// assert_eq!(tokens, [50_000, 1]);
/// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
/// ```
///
/// # Errors
///
/// [`TransformError::SourceLength`] if the bytes are odd in number, [`TransformError::BufferTooSmall`] if `dst`
/// is shorter than the result. In both cases `dst` is unchanged.
pub fn u16_to_u32(src: &[u8], dst: &mut [u32]) -> Result<usize, TransformError> {
    each::<U16ToU32>(src, dst)
}

/// Tokens of two bytes to i64, the type that `PyTorch` takes for an embedding.
///
/// `src` holds little-endian u16 at any alignment; the result goes to the front of `dst`, and its length is
/// returned.
///
/// ```
/// let mut tokens = [0; 2];
/// assert_eq!(twinbuf_mmap::transform::u16_to_i64(&[0x50, 0xc3, 0x01, 0x00], &mut tokens)?, 2);
/// assert_eq!(tokens, [50_000, 1]);
/// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
/// ```
///
/// # Errors
///
/// The errors of [`u16_to_u32`].
pub fn u16_to_i64(src: &[u8], dst: &mut [i64]) -> Result<usize, TransformError> {
    each::<U16ToI64>(src, dst)
}

/// Rounds f32 to binary16, to nearest, ties to even (IEEE 754, 4.3.1); results are bits, in the host's order.
///
/// From 65520 on that is infinity; below 2^-14 there are subnormals. A NaN stays one: quiet, with its sign and the
/// upper 9 of the other bits of its payload. A slice of the crate `half`'s `f16` gives its bits by
/// `reinterpret_cast_mut`.
///
/// `src` holds little-endian f32 at any alignment; the result goes to the front of `dst`, and its length is
/// returned.
///
/// ```
/// let mut bits = [0; 3];
/// let numbers: Vec<u8> = [1.0_f32, -2.0, 65520.0].into_iter().flat_map(f32::to_le_bytes).collect();
/// assert_eq!(twinbuf_mmap::transform::f32_to_f16(&numbers, &mut bits)?, 3);
/// assert_eq!(bits, [0x3c00, 0xc000, 0x7c00]);
/// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
/// ```
///
/// # Errors
///
/// [`TransformError::SourceLength`] unless the bytes are a multiple of 4, [`TransformError::BufferTooSmall`] if
/// `dst` is shorter than the result. In both cases `dst` is unchanged.
pub fn f32_to_f16(src: &[u8], dst: &mut [u16]) -> Result<usize, TransformError> {
    each::<F32ToF16>(src, dst)
}

/// Rounds f32 to bf16, to nearest, ties to even; results are bits, in the host's order.
///
/// What is larger than every finite bf16 by half a unit in the last place or more becomes infinity. A NaN stays
/// one: quiet, with its sign and the upper 6 of the other bits of its payload. A slice of the crate `half`'s
/// `bf16` gives its bits by `reinterpret_cast_mut`.
///
/// `src` holds little-endian f32 at any alignment; the result goes to the front of `dst`, and its length is
/// returned.
///
/// ```
/// let mut bits = [0; 2];
/// let numbers: Vec<u8> = [1.0_f32, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
/// assert_eq!(twinbuf_mmap::transform::f32_to_bf16(&numbers, &mut bits)?, 2);
/// assert_eq!(bits, [0x3f80, 0xc000]);
/// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
/// ```
///
/// # Errors
///
/// The errors of [`f32_to_f16`].
pub fn f32_to_bf16(src: &[u8], dst: &mut [u16]) -> Result<usize, TransformError> {
    each::<F32ToBf16>(src, dst)
}

fn each<C: Convert>(src: &[u8], dst: &mut [C::Out]) -> Result<usize, TransformError> {
    let (wanted, found) = (C::Raw::BYTES, src.len());
    if found % wanted != 0 {
        return Err(TransformError::SourceLength { wanted, found });
    }
    let dst = front(found / wanted, dst)?;
    let len = dst.len();
    let non_temporal = non_temporal(dst);
    run(Each::<C, _> { src, dst, finish: |number| number, non_temporal });
    Ok(len)
}

/// The first `wanted` numbers of `dst`.
fn front<T>(wanted: usize, dst: &mut [T]) -> Result<&mut [T], TransformError> {
    let found = dst.len();
    dst.get_mut(..wanted).ok_or(TransformError::BufferTooSmall { wanted, found })
}
