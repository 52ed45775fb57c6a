//! Records of varying length.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Array, megatron, npy, numbers};
use crate::file::DataFile;
use crate::ranges::{Kind, Layout, Places, Ranges};
use crate::{DType, Error};

/// Records of varying length in one or more files. Record indices start at 0 and continue from each file to the next.
///
/// A `RaggedRecords` is an immutable description, and any number of threads can share it. It uses about 8 bytes of
/// memory per record. [`Options::open`](crate::Options::open) documents how many data files stay open. Pass
/// [`ranges`](Self::ranges) to a [`Reader`](crate::Reader) to read batches, as for [`Records`](crate::Records).
///
/// ```
/// use twinbuf_mmap::{Plan, RaggedRecords};
///
/// let folder = tempfile::tempdir()?;
/// let (data, index) = (folder.path().join("words.bin"), folder.path().join("words.idx.npy"));
/// std::fs::write(&data, "oneelevenfour")?;
/// // As numpy.save writes numpy.array([0, 3, 9, 13]).
/// let header = "{'descr': '<i8', 'fortran_order': False, 'shape': (4,), }";
/// let mut file = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
/// file.extend(format!("{header:117}\n").bytes());
/// file.extend([0_i64, 3, 9, 13].into_iter().flat_map(i64::to_le_bytes));
/// std::fs::write(&index, file)?;
///
/// let words = RaggedRecords::open_indexed([(&data, &index)])?;
/// assert_eq!((words.len(), words.max_len()), (3, 6));
/// assert_eq!(words.locate(1).map(|found| (found.offset, found.len)), Some((3, 6)));
/// let batch = Plan::builder(words.len()).batch(2).build()?.batch(0, 0).unwrap();
/// let mut slot = vec![0; 2 * words.max_len()];
/// assert_eq!(words.read(&batch, &mut slot)?, 9);
/// assert_eq!(&slot[..9], b"oneeleven");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RaggedRecords(Arc<Ranges>);

impl Deref for RaggedRecords {
    type Target = Ranges;

    fn deref(&self) -> &Ranges {
        &self.0
    }
}

impl RaggedRecords {
    /// Opens pairs of a data file and an index file. The index is a one-dimensional `.npy` array of `int64` or `uint64`
    /// byte offsets. Record `i` is the bytes from offset `i` to offset `i + 1`. For `n` records, there are `n + 1`
    /// offsets, and the last offset is the size of the data file. The records are untyped bytes.
    ///
    /// ```python
    /// offsets = numpy.cumsum([0] + [len(record) for record in records])
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Error::NoPaths`]: there are no pairs.
    /// - [`Error::NotFound`], [`Error::PermissionDenied`], [`Error::NotAFile`], [`Error::Open`]: a data file or an
    ///   index cannot be opened.
    /// - [`Error::Format`]: the index is not such an array, or has fewer than two offsets; an offset is negative or
    ///   less than the previous offset; the last offset is not the size of the data file; or a file is a pointer of Git
    ///   LFS. [`Records::open_npy`](crate::Records::open_npy) documents the format.
    /// - [`Error::Read`], [`Error::Truncated`]: an index cannot be read, or looking for such a pointer fails.
    /// - [`Error::TooLarge`]: the total size is 2^64 bytes or more.
    pub fn open_indexed<P: AsRef<Path>, Q: AsRef<Path>>(
        pairs: impl IntoIterator<Item = (P, Q)>,
    ) -> Result<Self, Error> {
        let (paths, indexes): (Vec<P>, Vec<Q>) = pairs.into_iter().unzip();
        let mut indexes = indexes.iter();
        Self::assemble(paths, |_| {
            // There are as many indexes as data files, so there is a next one.
            let index = indexes.next().ok_or(Error::NoPaths)?;
            Ok((DType::U8, indexed(&DataFile::open(index.as_ref())?)?))
        })
    }

    /// Opens token files written by Megatron-LM (`IndexedDataset`). `paths` are the `.bin` files, or prefixes as
    /// Megatron-LM takes them: `corpus` for `corpus.bin`. The index is the `.idx` file with the same name. A record is
    /// a sequence of tokens. Tokens of `uint8` become untyped bytes.
    ///
    /// The index is little-endian: the magic `MMIDIDX\0\0`, the version 1 (`u64`), the token type (`u8`), the number
    /// of sequences and the number of document index entries (`u64` each), the number of tokens of each sequence
    /// (`i32`), the offset of each sequence (`i64`), and the document index (`i64`). A multimodal data set has a
    /// mode (`i8`) per sequence at the end. The crate ignores the document index and the modes.
    ///
    /// # Errors
    ///
    /// - [`Error::Format`]: the index is invalid or has no sequence; a length is negative; a sequence does not start at
    ///   the end of the previous sequence; or the size of the index or of the data file does not match the index.
    /// - [`Error::Mixed`]: the files have different token types.
    /// - The other errors of [`open_indexed`](Self::open_indexed).
    pub fn open_megatron(paths: impl IntoIterator<Item: AsRef<Path>>) -> Result<Self, Error> {
        // Append `.bin` instead of replacing an extension: a prefix may have a dot in it.
        let data = paths.into_iter().map(|path| {
            let path = path.as_ref();
            let mut longer = path.as_os_str().to_owned();
            longer.push(".bin");
            let (longer, is_bin) = (PathBuf::from(longer), path.extension().is_some_and(|end| end == "bin"));
            if is_bin || path.is_file() && !longer.is_file() { path.to_owned() } else { longer }
        });
        Self::assemble(data, |data| megatron::index(&DataFile::open(&data.path.with_extension("idx"))?))
    }

    /// Opens data files. `index` reads the offsets of the records in each file.
    fn assemble(
        paths: impl IntoIterator<Item: AsRef<Path>>,
        mut index: impl FnMut(&DataFile) -> Result<(DType, Vec<u64>), Error>,
    ) -> Result<Self, Error> {
        Ranges::assemble(paths, false, |data| {
            let (dtype, offsets) = index(data)?;
            let (start, end) = (offsets[0], offsets[offsets.len() - 1]);
            data.check_data(start, end - start, data.len)?;
            let (typed, bytes) = (dtype != DType::U8, dtype.size());
            let kind = Kind { dtype, typed, shape: Vec::new(), bytes, stride: bytes as u64 };
            Ok(Layout { kind, records: offsets.len() as u64 - 1, at: Places::Offsets(offsets) })
        })
        .map(Self)
    }

    /// Returns the files and the byte ranges of the records, for a [`Reader`](crate::Reader).
    #[must_use]
    pub fn ranges(&self) -> Arc<Ranges> {
        self.0.clone()
    }
}

/// Reads the offsets in an index.
fn indexed(file: &DataFile) -> Result<Vec<u64>, Error> {
    let Array { offset, dtype, shape } = npy::parse(file, &(0..file.len))?;
    if !matches!(dtype, DType::I64 | DType::U64) {
        let advice = "wanted integers of 64 bits: save it with `numpy.save(path, x.astype('<i8'))`";
        return Err(file.unsupported(0, format!("offsets of {dtype}"), advice));
    }
    let [count @ 2..=u64::MAX] = shape[..] else {
        return Err(file.bad_shape("one axis of at least 2 offsets", &shape));
    };
    let mut offsets = Vec::<u64>::new();
    numbers(file, offset, count, |at, bytes: [u8; 8]| {
        let found = u64::from_le_bytes(bytes);
        let negative = dtype == DType::I64 && found > i64::MAX as u64;
        if negative || offsets.last().is_some_and(|&last| found < last) {
            let found = if negative { i64::from_le_bytes(bytes).to_string() } else { found.to_string() };
            return Err(file.bad_header(at, "an offset from 0 that is not below the one before it", found));
        }
        offsets.push(found);
        Ok(())
    })?;
    Ok(offsets)
}
