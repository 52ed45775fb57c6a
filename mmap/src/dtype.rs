//! Element types.

use std::fmt;

/// The type of a record's elements.
///
/// Elements are **little-endian, as in the file**. Reads do not convert the byte order: on a
/// big-endian machine, the caller must.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// One byte, 0 or 1. The crate does not check the value.
    Bool,
    /// Unsigned 8-bit integer. Also the type of untyped bytes.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// 8-bit float with 4 exponent bits and 3 fraction bits, without infinities (OCP FP8).
    F8E4M3,
    /// 8-bit float with 5 exponent bits and 2 fraction bits (OCP FP8).
    F8E5M2,
    /// 16-bit float, IEEE 754 binary16.
    F16,
    /// 16-bit float, bfloat16: the upper half of an IEEE 754 binary32.
    Bf16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// 32-bit float, IEEE 754 binary32.
    F32,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// 64-bit float, IEEE 754 binary64.
    F64,
    /// Complex number: two binary32, the real part first.
    C64,
    /// Complex number: two binary64, the real part first.
    C128,
}

impl DType {
    /// Every type.
    pub(crate) const ALL: [Self; 17] = {
        use DType::*;
        [Bool, U8, I8, U16, I16, F8E4M3, F8E5M2, F16, Bf16, U32, I32, F32, U64, I64, F64, C64, C128]
    };

    /// Returns the size of an element in bytes: 1, 2, 4, 8 or 16.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::C64 => 8,
            Self::C128 => 16,
        }
    }
}

/// Prints the short name, for example `u16`, `bf16` or `c64`.
impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}
