//! What can be wrong with a transform or its slices.

use std::fmt;

use crate::DType;

/// Why a [`Transform`](super::Transform) could not be made, or slices not be transformed.
///
/// Every message is one line.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum TransformError {
    /// Numbers of this type are not transformed.
    Source {
        /// The type.
        found: DType,
    },
    /// Pixels have 0 channels.
    NoChannels,
    /// Pictures have 0 pixels.
    NoPixels,
    /// A picture would have `isize::MAX` bytes or more. No slice has that many.
    PictureTooLarge {
        /// Numbers in a pixel.
        channels: usize,
        /// Pixels in a picture.
        pixels: usize,
    },
    /// There is not one scale, or not one shift, for each channel.
    ChannelCount {
        /// Which of the two: `scale` or `shift`.
        name: &'static str,
        /// Channels.
        wanted: usize,
        /// Values.
        found: usize,
    },
    /// A scale or a shift is infinite or NaN.
    NotFinite {
        /// Which of the two: `scale` or `shift`.
        name: &'static str,
        /// The first such channel.
        channel: usize,
        /// The value.
        found: f32,
    },
    /// The source does not hold whole numbers, pixels or pictures.
    SourceLength {
        /// Its length must be a multiple of this many bytes.
        wanted: usize,
        /// Its length in bytes.
        found: usize,
    },
    /// The destination is shorter than the result.
    BufferTooSmall {
        /// Numbers in the result.
        wanted: usize,
        /// Numbers that fit the destination.
        found: usize,
    },
}

impl fmt::Display for TransformError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source { found } => write!(f, "wanted u8, u16, i16, f16 or bf16 as source, found {found}"),
            Self::NoChannels => write!(f, "a pixel needs at least one channel, found 0"),
            Self::NoPixels => write!(f, "a picture needs at least one pixel, found 0"),
            Self::PictureTooLarge { channels, pixels } => write!(
                f,
                "a picture of {pixels} pixels with {channels} channels is larger than any memory: give height \
                 times width as pixels",
            ),
            Self::ChannelCount { name, wanted, found } => {
                write!(f, "{name}: wanted one value for each channel, {wanted}, found {found}")
            }
            Self::NotFinite { name, channel, found } => write!(
                f,
                "{name} of channel {channel}: wanted a finite value, found {found}: check for a standard \
                 deviation of 0",
            ),
            Self::SourceLength { wanted, found } => write!(
                f,
                "the source is not whole: wanted a multiple of {wanted} bytes, found {found}: check the number, \
                 the channels and the pixels",
            ),
            Self::BufferTooSmall { wanted, found } => {
                write!(f, "the destination is too small: wanted {wanted} numbers, found {found}")
            }
        }
    }
}

impl std::error::Error for TransformError {}
