//! Numbers one after the other without a header, as `numpy.ndarray.tofile` and nanoGPT write them.

use std::path::Path;

use super::{Array, known, open};
use crate::records::behind;
use crate::{Cut, DType, Error, Options, Records};

impl Records {
    /// Opens files that contain only elements of type `dtype`, without a header: for example nanoGPT's `train.bin`
    /// (`DType::U16`, see `data/openwebtext/prepare.py`), or 32-bit token IDs (`DType::U32`). `cut` sets how
    /// elements become records; a row is one element.
    ///
    /// Without a header, the call can check only the size of the files. It also refuses files that start like
    /// another format, because their headers would be read as elements: the formats that this crate opens, archives
    /// and compressed files, tables and databases (such as HDF5, Parquet and Arrow), pickles, pictures,
    /// sound, documents, programs, and, unless the elements have one byte, JSON lines and other text.
    /// [`Options::header`] skips a header.
    ///
    /// # Errors
    ///
    /// - [`Error::Ragged`]: a file ends inside an element.
    /// - [`Error::TooShort`]: a file contains less than one record.
    /// - [`Error::ZeroRecord`], [`Error::ZeroStride`]: the window or the stride is 0.
    /// - [`FormatError::NotHeaderless`](crate::FormatError): a file has another format.
    /// - The remaining errors of [`Options::open`](crate::Options::open).
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
    /// Opens files as [`Records::open_headerless`] does, with these options.
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
        let Self { header, .. } = self;
        open(self, paths, cut, |file| {
            known::refuse(file, dtype, header)?;
            let (len, wanted) = (behind(file, header)?, dtype.size() as u64);
            match len % wanted {
                0 => Ok(Array { offset: header, dtype, shape: vec![len / wanted] }),
                found => {
                    Err(Error::Ragged { path: file.path.clone(), offset: file.len - found, wanted, found })
                }
            }
        })
    }
}
