//! Numbers one after the other without a header, as `numpy.ndarray.tofile` and nanoGPT write them.

use std::path::Path;

use super::{Array, open};
use crate::{Cut, DType, Error, Records};

impl Records {
    /// Opens files that hold elements of `dtype` and nothing else: nanoGPT's `train.bin` (`DType::U16`, see
    /// its `data/openwebtext/prepare.py`), or token ids of 32 bits (`DType::U32`).
    ///
    /// A row is one element. Nothing in the files can be checked but their length.
    ///
    /// # Errors
    ///
    /// Those of [`Options::open`](crate::Options::open), where [`Error::Ragged`] is a file that ends inside
    /// an element and [`Error::TooShort`] one that does not fill one record; [`Error::ZeroRecord`] and
    /// [`Error::ZeroStride`] for a window or a stride of 0.
    ///
    /// See [`Cut`] for an example.
    pub fn open_headerless<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        dtype: DType,
        cut: Cut,
    ) -> Result<Self, Error> {
        open(paths, cut, |file| {
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
