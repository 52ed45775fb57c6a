//! The tensors of `safetensors` files. The crate of that name parses the header, and only the header is read.

use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::tensor::find;
use super::{Array, ByteRange, LONGEST, Tensor, little, open};
use crate::file::DataFile;
use crate::{Cut, DType, Error, Options, Records};

/// Bytes before the header. They are its length, as a number of 64 bits.
const PREFIX: usize = 8;

impl Records {
    /// Opens the tensor named `tensor` in each file. `cut` sets how rows become records; a row is one entry along
    /// the first axis. Requires the feature `safetensors`.
    ///
    /// The call reads only the header, at most 100 MB (the limit of the format). As the format requires, the tensors
    /// must cover the rest of the file without gaps or overlaps.
    ///
    /// # Errors
    ///
    /// - [`Error::Format`]: the header is invalid; the size of the tensors does not match the size of the file; the
    ///   tensor has 4-bit or 6-bit floats, or 8-bit floats without a [`DType`], such as `F8_E8M0`; it has no axis, or its
    ///   rows are empty.
    /// - [`Error::NoTensor`]: the file has no tensor with this name. The error lists the names.
    /// - [`Error::Mixed`]: the rows of a file differ in type or shape from the first file.
    /// - [`Error::TooShort`], [`Error::ZeroRecord`], [`Error::ZeroStride`]: a file contains less than one record, or
    ///   the window or the stride is 0.
    /// - The remaining errors of [`Options::open`](crate::Options::open), without [`Error::Ragged`]; [`Error::Read`],
    ///   [`Error::Truncated`]: a header cannot be read.
    ///
    /// ```
    /// use twinbuf_mmap::{Cut, DType, Records};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("train.safetensors");
    /// let header = r#"{"x":{"dtype":"F32","shape":[5,3],"data_offsets":[0,60]}}"#;
    /// let mut file = (header.len() as u64).to_le_bytes().to_vec();
    /// file.extend(header.bytes());
    /// file.extend([0; 60]);
    /// std::fs::write(&path, &file)?;
    ///
    /// let records = Records::open_safetensors([&path], "x", Cut::Rows)?;
    /// assert_eq!(records.len(), 5);
    /// assert_eq!((records.dtype(), records.shape()), (DType::F32, &[3][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_safetensors(
        paths: impl IntoIterator<Item: AsRef<Path>>,
        tensor: &str,
        cut: Cut,
    ) -> Result<Self, Error> {
        Self::options().open_safetensors(paths, tensor, cut)
    }

    /// Returns an iterator over all tensors of one file, sorted by name. Each item is the name and the opened tensor.
    /// The iterator opens a tensor when it reaches the tensor. The call reads the header once.
    ///
    /// # Errors
    ///
    /// The call returns the errors of [`open_safetensors`](Self::open_safetensors) that concern the file. The item of a
    /// tensor contains the others, and those of opening the file again.
    ///
    /// ```
    /// use twinbuf_mmap::{Cut, Records};
    ///
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("model.safetensors");
    /// let header = r#"{"w":{"dtype":"U8","shape":[5,3],"data_offsets":[0,15]},
    ///                  "scale":{"dtype":"U8","shape":[],"data_offsets":[15,16]}}"#;
    /// let mut file = (header.len() as u64).to_le_bytes().to_vec();
    /// file.extend(header.bytes());
    /// file.extend([0; 16]);
    /// std::fs::write(&path, &file)?;
    ///
    /// let found: Vec<_> = Records::open_safetensors_each(&path, Cut::Rows)?
    ///     .map(|(name, records)| (name, records.ok().map(|records| records.len())))
    ///     .collect();
    /// // A number alone has no rows.
    /// assert_eq!(found, [("scale".to_owned(), None), ("w".to_owned(), Some(5))]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_safetensors_each<P: AsRef<Path>>(
        path: P,
        cut: Cut,
    ) -> Result<impl Iterator<Item = (String, Result<Self, Error>)>, Error> {
        let file = DataFile::open(path.as_ref())?;
        let header = Header::read(&file, 0)?;
        Ok((0..header.tensors.len()).map(move |index| {
            let name = header.tensors[index].name();
            let records = open(Self::options(), [&file.path], cut, |file| header.array(file, name));
            (name.to_owned(), records)
        }))
    }
}

impl Options {
    /// Opens files as [`Records::open_safetensors`] does, with these options.
    ///
    /// # Errors
    ///
    /// The errors of [`Records::open_safetensors`].
    pub fn open_safetensors(
        self,
        paths: impl IntoIterator<Item: AsRef<Path>>,
        tensor: &str,
        cut: Cut,
    ) -> Result<Records, Error> {
        open(self, paths, cut, |file| Header::read(file, 0)?.array(file, tensor))
    }
}

/// The header, which is before the tensors in the file.
pub(super) struct Header {
    /// The offset of the first byte after the header.
    end: u64,
    /// The number of bytes in all tensors.
    len: u64,
    /// Sorted by name.
    pub(super) tensors: Vec<Tensor>,
}

impl Header {
    /// Reads the header of a file. `index` is the index of the file in the model.
    pub(super) fn read(file: &DataFile, index: usize) -> Result<Self, Error> {
        let length = little(&file.header(0, PREFIX)?);
        let header = file.header(PREFIX, file.header_len(0, LONGEST, length)?)?;
        // The `safetensors` crate also checks that the tensors follow each other and have the bytes of their shapes.
        let found: Metadata = serde_json::from_slice(&header).map_err(|error| {
            // serde's message names a type of that crate: replace the name.
            let found = error.to_string().replace("struct HashMetadata", "a map");
            file.bad_header(PREFIX as u64, "the description of tensors that follow each other", found)
        })?;
        let end = PREFIX as u64 + length;
        // Before offsets are added up, which may be up to 2^64.
        file.check_data(end, found.data_len() as u64, file.len)?;
        let describe = |(name, info): (String, &TensorInfo)| {
            let [start, end] = [info.data_offsets.0, info.data_offsets.1].map(|at| end + at as u64);
            Tensor {
                name: name.into(),
                dtype: dtype(info.dtype),
                format: info.dtype.to_string().into(),
                shape: info.shape.as_slice().into(),
                range: ByteRange { file: index, bytes: start..end },
            }
        };
        let mut tensors: Vec<Tensor> = found.tensors().into_iter().map(describe).collect();
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { end, len: found.data_len() as u64, tensors })
    }

    /// Returns the place, type and shape of a tensor in `file`. Checks the length of the file again, because the file
    /// may have been opened after the header was read.
    fn array(&self, file: &DataFile, name: &str) -> Result<Array, Error> {
        file.check_data(self.end, self.len, file.len)?;
        let tensor = &self.tensors[find(&self.tensors, name, &file.path)?];
        let Some(dtype) = tensor.dtype else {
            let advice = "records cannot have this type, but a stream of tensors reads its bytes";
            return Err(file.unsupported(PREFIX as u64, tensor.format.to_string(), advice));
        };
        let shape = tensor.shape.iter().map(|&axis| axis as u64).collect();
        Ok(Array { offset: tensor.range.bytes.start, dtype, shape })
    }
}

/// Converts the type of the crate `safetensors`. `None`: floats of 4 and 6 bits, and floats of 8 bits that [`DType`]
/// does not have.
fn dtype(of: Dtype) -> Option<DType> {
    // Compare the names without `_` and without case: `F8_E4M3` is `F8E4M3`, and `BF16` is `Bf16`.
    let name = of.to_string().replace('_', "").to_lowercase();
    DType::ALL.into_iter().find(|dtype| dtype.to_string() == name)
}
