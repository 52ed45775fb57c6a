//! Numbers one after the other without a header, as `numpy.ndarray.tofile` and nanoGPT write them.

use std::path::Path;

use super::{Array, known, open};
use crate::{Cut, DType, Error, Options, Records};

impl Records {
    /// Opens files that hold elements of `dtype` and nothing else: nanoGPT's `train.bin` (`DType::U16`, see
    /// its `data/openwebtext/prepare.py`), or token ids of 32 bits (`DType::U32`).
    ///
    /// A row is one element. Only the length of the files can be checked, and that none begins as a file of another
    /// format does: `.npy`, llm.c's tokens, `safetensors`, zip (`.npz`, `.pt`), gzip, zstd, HDF5, Parquet, Arrow, tar
    /// and pickles are refused, because their headers would be read as numbers.
    ///
    /// # Errors
    ///
    /// The errors of [`Options::open`](crate::Options::open), where [`Error::Ragged`] is a file that ends inside
    /// an element and [`Error::TooShort`] one that does not fill one record; [`Error::ZeroRecord`] and
    /// [`Error::ZeroStride`] for a window or a stride of 0; [`FormatError::NotHeaderless`](crate::FormatError) for a
    /// file of another format.
    ///
    /// See [`Cut`] for an example.
    pub fn open_headerless<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        dtype: DType,
        cut: Cut,
    ) -> Result<Self, Error> {
        Self::options().open_headerless(paths, dtype, cut)
    }
}

impl Options {
    /// Same as [`Records::open_headerless`], with these options.
    ///
    /// # Errors
    ///
    /// The errors of [`Records::open_headerless`].
    pub fn open_headerless<P: AsRef<Path>>(
        self,
        paths: impl IntoIterator<Item = P>,
        dtype: DType,
        cut: Cut,
    ) -> Result<Records, Error> {
        open(self, paths, cut, |file| {
            known::refuse(file)?;
            let wanted = dtype.size() as u64;
            let found = file.len % wanted;
            if found > 0 {
                return Err(Error::Ragged {
                    path: file.path.clone(),
                    offset: file.len - found,
                    wanted,
                    found,
                });
            }
            Ok(Array { offset: 0, dtype, shape: vec![file.len / wanted] })
        })
    }
}
