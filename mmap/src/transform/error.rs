//! The errors of transforms.

use crate::DType;

/// Why a [`Transform`](super::Transform) cannot be created, or a conversion of this module fails.
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
