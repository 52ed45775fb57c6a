//! Source numbers, read from bytes.

/// A source number in little-endian bytes.
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
                // As an array: the compiler then sees one load and not one for each byte.
                Self::from_le_bytes(bytes.try_into().expect("as many bytes as the contract says"))
            }
        }
    )*};
}

raw!(u8 u16 u32);
