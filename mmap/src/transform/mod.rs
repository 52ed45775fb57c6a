//! Converts the numbers of records for training.
//!
//! - [`Transform`]: `u8`, `u16`, `i16`, `f16` or `bf16` to `f32`, with an optional scale and shift per channel, and
//!   an optional change from interleaved channels (NHWC) to planes (NCHW).
//! - [`u16_to_u32`], [`u16_to_i64`]: tokens to index types of embeddings.
//! - [`f32_to_f16`], [`f32_to_bf16`]: rounding to 16-bit floats.
//!
//! Sources are the bytes of a batch: little-endian, packed, at any alignment, on any host. Each conversion writes to
//! the start of the destination and returns the number of elements written. On an error, the destination is unchanged.
//!
//! Results are bit-identical on every machine, for every instruction set, alignment and length. There is one exception:
//! Rust does not specify the bits of a NaN that results from a scale and shift.
//!
//! The loops are compiled for the instructions that the target and `-C target-cpu` allow (x86-64:
//! SSE2; `AArch64`: NEON). On x86-64, the feature `simd` (on by default) also compiles them for
//! AVX2, and selects one version at run time.
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

mod kernel;
#[cfg(test)]
mod tests;

use crate::DType;
use kernel::{Affine, Each, Interleaved, Planes, run};

/// Why a [`Transform`] cannot be created, or a conversion of this module fails.
///
/// Each message is one line.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransformError {
    /// The source type is not supported.
    #[error("wanted u8, u16, i16, f16 or bf16 as source, found {found}")]
    Source {
        /// The source type.
        found: DType,
    },
    /// The number of channels is 0.
    #[error("a pixel needs at least one channel, found 0")]
    NoChannels,
    /// The number of pixels is 0.
    #[error("a picture needs at least one pixel, found 0")]
    NoPixels,
    /// The size of a picture is about `isize::MAX` bytes or more as `f32`.
    #[error(
        "a picture of {pixels} pixels with {channels} channels is larger than any memory: give height times width as \
        pixels"
    )]
    PictureTooLarge {
        /// The number of channels in a pixel.
        channels: usize,
        /// The number of pixels in a picture.
        pixels: usize,
    },
    /// The number of scales or shifts differs from the number of channels.
    #[error("{name}: wanted one value for each channel, {wanted}, found {found}")]
    ChannelCount {
        /// `scale` or `shift`.
        name: &'static str,
        /// The number of channels.
        wanted: usize,
        /// The number of values.
        found: usize,
    },
    /// A scale or a shift is infinite or NaN.
    #[error(
        "{name} of channel {channel}: wanted a finite value, found {found}: check for a standard deviation of 0"
    )]
    NotFinite {
        /// `scale` or `shift`.
        name: &'static str,
        /// The first channel with such a value, from 0.
        channel: usize,
        /// The value.
        found: f32,
    },
    /// The length of the source is not a multiple of the size of a number, a pixel or a picture.
    #[error(
        "the source is not whole: wanted a multiple of {wanted} bytes, found {found}: check the number, the channels and \
        the pixels"
    )]
    SourceLength {
        /// The required unit in bytes: the length must be a multiple of it.
        wanted: usize,
        /// The length of the source in bytes.
        found: usize,
    },
    /// The destination is shorter than the result.
    #[error("the destination is too small: wanted {wanted} numbers, found {found}")]
    BufferTooSmall {
        /// The number of elements in the result.
        wanted: usize,
        /// The number of elements in the destination.
        found: usize,
    },
}

/// Converts the numbers of records to `f32`, with an optional scale and shift per channel and an optional change to
/// planar layout. Create it once, then apply it to records or batches.
///
/// The source is a sequence of pixels with `channels` numbers each. A row of features is also a pixel. With one
/// channel, the source is a plain sequence of numbers.
///
/// - Every `u8`, `u16`, `i16`, `f16` and `bf16` converts to `f32` exactly. A NaN keeps its payload.
/// - [`normalise`](Self::normalise) computes `x * scale[c] + shift[c]` for channel `c`, with one multiplication and
///   one addition, each rounded to nearest even. They are never fused.
/// - [`planar`](Self::planar) changes the layout of each picture from interleaved channels (HWC) to planes (CHW).
///
/// `Transform` is `Send` and `Sync`: several threads can apply one transform to parts of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Transform {
    dtype: DType,
    channels: usize,
    /// The number of pixels in a picture, if the result has planes.
    pixels: Option<usize>,
    affine: Option<Affine>,
}

impl Transform {
    /// Creates a transform that converts numbers of type `dtype` to `f32` and keeps their order. `channels` is the
    /// number of numbers in a pixel, at least 1.
    ///
    /// # Errors
    ///
    /// - [`TransformError::Source`]: `dtype` is not `U8`, `U16`, `I16`, `F16` or `Bf16`.
    /// - [`TransformError::NoChannels`]: `channels` is 0.
    pub const fn new(dtype: DType, channels: usize) -> Result<Self, TransformError> {
        if !matches!(dtype, DType::U8 | DType::U16 | DType::I16 | DType::F16 | DType::Bf16) {
            return Err(TransformError::Source { found: dtype });
        }
        if channels == 0 {
            return Err(TransformError::NoChannels);
        }
        Ok(Self { dtype, channels, pixels: None, affine: None })
    }

    /// Multiplies the numbers of channel `c` by `scale[c]` and adds `shift[c]`. Default: no scale and no shift.
    ///
    /// For `(x / 255 - mean) / std`, as in torchvision's `ToTensor` and `Normalize`, use a scale of `1 / (255 *
    /// std)` and a shift of `-mean / std`. The result differs from torchvision only by rounding.
    ///
    /// # Errors
    ///
    /// - [`TransformError::ChannelCount`]: a slice does not have one value per channel.
    /// - [`TransformError::NotFinite`]: a value is infinite or NaN, for example because a standard deviation is 0.
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

    /// Changes the layout of each picture from interleaved channels (HWC) to one plane per channel (CHW). `pixels`
    /// is the height times the width of a picture, at least 1. The source must then contain whole pictures. Default:
    /// the layout stays the same.
    ///
    /// # Errors
    ///
    /// - [`TransformError::NoPixels`]: `pixels` is 0.
    /// - [`TransformError::PictureTooLarge`]: the size of a picture is about `isize::MAX` bytes or more as `f32`.
    pub fn planar(self, pixels: usize) -> Result<Self, TransformError> {
        if pixels == 0 {
            return Err(TransformError::NoPixels);
        }
        let channels = self.channels;
        match channels.checked_mul(pixels) {
            // Check the size of the result: no source number has more bytes than an f32.
            Some(numbers) if numbers < isize::MAX as usize / size_of::<f32>() => {}
            _ => return Err(TransformError::PictureTooLarge { channels, pixels }),
        }
        Ok(Self { pixels: Some(pixels), ..self })
    }

    /// Returns the source type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of channels in a pixel, at least 1.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.channels
    }

    /// Returns the number of pixels in a picture. Returns `None` if the result is not [`planar`](Self::planar).
    #[must_use]
    pub const fn pixels(&self) -> Option<usize> {
        self.pixels
    }

    /// Returns the number of `f32` elements in the result for `src_len` source bytes: `src_len / dtype.size()`.
    /// Returns 0 for 0 bytes.
    ///
    /// # Errors
    ///
    /// [`TransformError::SourceLength`] if `src_len` is not a multiple of the pixel size, or of the picture size for
    /// a [`planar`](Self::planar) transform.
    pub const fn out_len(&self, src_len: usize) -> Result<usize, TransformError> {
        let numbers = match self.pixels {
            Some(pixels) => self.channels * pixels,
            None => self.channels,
        };
        // If the product saturates, it is longer than any slice, so only a length of 0 is a multiple of it.
        let unit = numbers.saturating_mul(self.dtype.size());
        if src_len % unit == 0 {
            Ok(src_len / self.dtype.size())
        } else {
            Err(TransformError::SourceLength { wanted: unit, found: src_len })
        }
    }

    /// Transforms all of `src` and writes the result to the start of `dst`. Returns the number of elements written,
    /// [`out_len`](Self::out_len).
    ///
    /// `src` may be one record, a batch, or any part of whole pixels (whole pictures for a [`planar`](Self::planar)
    /// transform). Transforming the parts separately gives the same results.
    ///
    /// # Errors
    ///
    /// - [`TransformError::SourceLength`], as for [`out_len`](Self::out_len).
    /// - [`TransformError::BufferTooSmall`]: `dst` is shorter than the result.
    ///
    /// In both cases `dst` is unchanged.
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
    pub fn apply(&self, src: &[u8], dst: &mut [f32]) -> Result<usize, TransformError> {
        let dst = front(self.out_len(src.len())?, dst)?;
        let len = dst.len();
        match self.dtype {
            DType::U8 => self.start(src, dst, |number| f32::from(u8::from_le_bytes(number))),
            DType::U16 => self.start(src, dst, |number| f32::from(u16::from_le_bytes(number))),
            DType::I16 => self.start(src, dst, |number| f32::from(i16::from_le_bytes(number))),
            DType::F16 => self.start(src, dst, |half| kernel::f16_to_f32(u16::from_le_bytes(half))),
            DType::Bf16 => self.start(src, dst, |[low, high]| f32::from_le_bytes([0, 0, low, high])),
            other => unreachable!("`new` refuses {other}"),
        }
        Ok(len)
    }

    fn start<const B: usize>(&self, src: &[u8], dst: &mut [f32], convert: impl Fn([u8; B]) -> f32) {
        let (channels, affine) = (self.channels, self.affine.as_ref());
        match (self.pixels, affine) {
            // With one channel, the planes have the order of the source.
            (Some(pixels), _) if channels > 1 => run(Planes { src, dst, channels, pixels, affine, convert }),
            (_, None) => run(Each { src, dst, convert }),
            (_, Some(affine)) if channels == 1 => {
                let (scale, shift) = affine.of(0);
                run(Each { src, dst, convert: |raw| convert(raw) * scale + shift });
            }
            (_, Some(affine)) => run(Interleaved { src, dst, affine, convert }),
        }
    }
}

/// Converts `u16` tokens to `u32`, an index type of embeddings in `candle`.
///
/// `src` contains little-endian `u16` at any alignment. The result is written to the start of `dst`. Returns the
/// number of elements written.
///
/// # Errors
///
/// - [`TransformError::SourceLength`]: the length of `src` is odd.
/// - [`TransformError::BufferTooSmall`]: `dst` is shorter than the result.
///
/// In both cases `dst` is unchanged.
///
/// ```
/// let mut tokens = [0; 2];
/// assert_eq!(twinbuf_mmap::transform::u16_to_u32(&[0x50, 0xc3, 0x01, 0x00], &mut tokens)?, 2);
/// assert_eq!(tokens, [50_000, 1]);
/// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
/// ```
pub fn u16_to_u32(src: &[u8], dst: &mut [u32]) -> Result<usize, TransformError> {
    each(src, dst, |token| u32::from(u16::from_le_bytes(token)))
}

/// Converts `u16` tokens to `i64`, an index type of embeddings in `PyTorch`.
///
/// `src` contains little-endian `u16` at any alignment. The result is written to the start of `dst`. Returns the
/// number of elements written.
///
/// # Errors
///
/// The errors of [`u16_to_u32`]: [`TransformError::SourceLength`] and [`TransformError::BufferTooSmall`].
///
/// ```
/// let mut tokens = [0; 2];
/// assert_eq!(twinbuf_mmap::transform::u16_to_i64(&[0x50, 0xc3, 0x01, 0x00], &mut tokens)?, 2);
/// assert_eq!(tokens, [50_000, 1]);
/// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
/// ```
pub fn u16_to_i64(src: &[u8], dst: &mut [i64]) -> Result<usize, TransformError> {
    each(src, dst, |token| i64::from(u16::from_le_bytes(token)))
}

/// Rounds `f32` to IEEE binary16, to nearest even (IEEE 754, 4.3.1). The results are the bits of the numbers, in the
/// byte order of the host.
///
/// Magnitudes of 65520 or more become infinity with the same sign. Results below 2^-14 are
/// subnormal or 0. A NaN becomes a quiet NaN and keeps its sign and the 9 payload bits after the
/// quiet bit. To fill a slice of `half::f16`, pass `dst.reinterpret_cast_mut()`.
///
/// `src` contains little-endian `f32` at any alignment. The result is written to the start of `dst`. Returns the
/// number of elements written.
///
/// # Errors
///
/// - [`TransformError::SourceLength`]: the length of `src` is not a multiple of 4 bytes.
/// - [`TransformError::BufferTooSmall`]: `dst` is shorter than the result.
///
/// In both cases `dst` is unchanged.
///
/// ```
/// let mut bits = [0; 3];
/// let numbers: Vec<u8> = [1.0_f32, -2.0, 65520.0].into_iter().flat_map(f32::to_le_bytes).collect();
/// assert_eq!(twinbuf_mmap::transform::f32_to_f16(&numbers, &mut bits)?, 3);
/// assert_eq!(bits, [0x3c00, 0xc000, 0x7c00]);
/// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
/// ```
pub fn f32_to_f16(src: &[u8], dst: &mut [u16]) -> Result<usize, TransformError> {
    each(src, dst, |number| kernel::f32_to_f16(u32::from_le_bytes(number)))
}

/// Rounds `f32` to bfloat16, to nearest even. The results are the bits of the numbers, in the byte order of the host.
///
/// Magnitudes of 2^128 - 2^119 (about 3.396e38) or more become infinity with the same sign. A NaN becomes a quiet
/// NaN and keeps its sign and the 6 payload bits after the quiet bit. To fill a slice of `half::bf16`, pass
/// `dst.reinterpret_cast_mut()`.
///
/// `src` contains little-endian `f32` at any alignment. The result is written to the start of `dst`. Returns the
/// number of elements written.
///
/// # Errors
///
/// The errors of [`f32_to_f16`]: [`TransformError::SourceLength`] and [`TransformError::BufferTooSmall`].
///
/// ```
/// let mut bits = [0; 2];
/// let numbers: Vec<u8> = [1.0_f32, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
/// assert_eq!(twinbuf_mmap::transform::f32_to_bf16(&numbers, &mut bits)?, 2);
/// assert_eq!(bits, [0x3f80, 0xc000]);
/// # Ok::<(), twinbuf_mmap::transform::TransformError>(())
/// ```
pub fn f32_to_bf16(src: &[u8], dst: &mut [u16]) -> Result<usize, TransformError> {
    each(src, dst, |number| kernel::f32_to_bf16(u32::from_le_bytes(number)))
}

fn each<const B: usize, O>(
    src: &[u8],
    dst: &mut [O],
    convert: impl Fn([u8; B]) -> O,
) -> Result<usize, TransformError> {
    let (wanted, found) = (B, src.len());
    if found % wanted != 0 {
        return Err(TransformError::SourceLength { wanted, found });
    }
    let dst = front(found / wanted, dst)?;
    let len = dst.len();
    run(Each { src, dst, convert });
    Ok(len)
}

/// Returns the first `wanted` numbers of `dst`.
fn front<T>(wanted: usize, dst: &mut [T]) -> Result<&mut [T], TransformError> {
    let found = dst.len();
    dst.get_mut(..wanted).ok_or(TransformError::BufferTooSmall { wanted, found })
}
