//! The types that the elements of a record can have.

use std::fmt;

/// The type of a record's elements.
///
/// Elements are **little-endian, as in the file**: nothing converts them. On a big-endian machine the caller
/// does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// One byte, 0 or 1. The bytes are not checked: others are delivered as they are found.
    Bool,
    /// Unsigned, 8 bits; also the bytes of records without a type.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// 8-bit float with 4 bits of exponent and 3 of fraction, without infinities (OCP FP8).
    F8E4M3,
    /// 8-bit float with 5 bits of exponent and 2 of fraction (OCP FP8).
    F8E5M2,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an IEEE 754 binary32.
    Bf16,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 32 bits.
    I32,
    /// IEEE 754 binary32.
    F32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits.
    I64,
    /// IEEE 754 binary64.
    F64,
    /// Complex: two binary32, the real part first.
    C64,
    /// Complex: two binary64, the real part first.
    C128,
}

impl DType {
    /// Bytes in an element: 1, 2, 4, 8 or 16.
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

/// The short name: `u16`, `bf16`, `c64`.
impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
            Self::C64 => "c64",
            Self::C128 => "c128",
        })
    }
}
