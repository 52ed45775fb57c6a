//! Token shards with a header of 256 `int32`, as llm.c and modded-nanogpt write them.

use std::path::Path;

use super::{Array, checked, open};
use crate::file::DataFile;
use crate::{Cut, DType, Error, Options, Records};

/// Bytes in the header: 256 int32. The first are the magic, the version and the number of tokens; the rest is not used.
const HEADER: usize = 256 * 4;
/// The magic, the version and the type of the tokens in each kind of header, GPT-2's and Llama 3's (`HEADERS_INFO` in
/// llm.c's `dev/data/data_common.py`).
const KINDS: [(i32, i32, DType); 2] = [(20_240_520, 1, DType::U16), (20_240_801, 7, DType::U32)];

impl Records {
    /// Opens token shards (`.bin`) with the header of llm.c and modded-nanogpt. `cut` sets how tokens become
    /// records; a row is one token.
    ///
    /// All numbers are little-endian. The header has 256 `int32`: magic, version, number of tokens, and 253 ignored
    /// values. The tokens follow the header. There are two kinds (`HEADERS_INFO` in llm.c's `dev/data/data_common.py`):
    ///
    /// | magic | version | tokens | written by |
    /// | --- | --- | --- | --- |
    /// | 20240520 | 1 | [`DType::U16`] | llm.c for GPT-2, modded-nanogpt |
    /// | 20240801 | 7 | [`DType::U32`] | llm.c for Llama 3 |
    ///
    /// The call refuses llm.c's evaluation files (magic 20240522), because their records vary in length.
    ///
    /// # Errors
    ///
    /// - [`Error::Format`]: the header is invalid, or the number of tokens is negative or does not match the size of the
    ///   file.
    /// - [`Error::Mixed`]: one file has 16-bit tokens and another has 32-bit tokens.
    /// - [`Error::TooShort`], [`Error::ZeroRecord`], [`Error::ZeroStride`], as for
    ///   [`open_headerless`](Self::open_headerless).
    /// - The remaining errors of [`Options::open`](crate::Options::open), without [`Error::Ragged`]; [`Error::Read`],
    ///   [`Error::Truncated`]: a header cannot be read.
    ///
    /// ```
    /// use twinbuf_mmap::{Cut, DType, Records};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("fineweb_train_000001.bin");
    /// let mut header = [0_i32; 256];
    /// header[..3].copy_from_slice(&[20240520, 1, 2049]);
    /// let mut shard: Vec<u8> = header.into_iter().flat_map(i32::to_le_bytes).collect();
    /// shard.extend((0..2049_u16).flat_map(u16::to_le_bytes));
    /// std::fs::write(&path, &shard)?;
    ///
    /// let records = Records::open_llm_c([&path], Cut::sequence(1024))?;
    /// assert_eq!(records.len(), 2);
    /// assert_eq!((records.dtype(), records.shape()), (DType::U16, &[1025][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_llm_c(paths: impl IntoIterator<Item: AsRef<Path>>, cut: Cut) -> Result<Self, Error> {
        Self::options().open_llm_c(paths, cut)
    }
}

impl Options {
    /// Opens files as [`Records::open_llm_c`] does, with these options.
    ///
    /// # Errors
    ///
    /// The errors of [`Records::open_llm_c`].
    pub fn open_llm_c(self, paths: impl IntoIterator<Item: AsRef<Path>>, cut: Cut) -> Result<Records, Error> {
        open(self, paths, cut, parse)
    }
}

fn parse(file: &DataFile) -> Result<Array, Error> {
    let header = file.header(0, HEADER)?;
    let number = |at: usize| i32::from_le_bytes([0, 1, 2, 3].map(|byte| header[4 * at + byte]));
    let Some(&(_, version, dtype)) = KINDS.iter().find(|(magic, ..)| *magic == number(0)) else {
        return Err(file.bad_magic(0, "20240520 or 20240801", number(0).to_string()));
    };
    if number(1) != version {
        return Err(file.bad_version(4, version, number(1)));
    }
    let Ok(tokens) = u64::try_from(number(2)) else {
        return Err(file.bad_header(8, "a number of tokens", number(2).to_string()));
    };
    checked(file, file.len, Array { offset: HEADER as u64, dtype, shape: vec![tokens] })
}
