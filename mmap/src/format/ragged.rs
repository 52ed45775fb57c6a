//! Records of varying length: where each one begins and ends.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::{Array, megatron, npy, numbers};
use crate::file::DataFile;
use crate::{DType, Error, FormatError};

/// Records of varying length in one or several files, numbered through from the first file on.
///
/// It describes where the records are: it is immutable, remembers nothing about its readers, and any number of threads
/// can share it. In memory it takes 8 bytes a record. The data files stay open.
///
/// ```
/// use twinbuf_mmap::RaggedRecords;
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
/// assert_eq!(words.range(1).map(|found| found.bytes), Some(3..9));
/// let mut word = vec![0; words.max_len()];
/// assert_eq!(words.read(2, &mut word)?, 4);
/// assert_eq!(&word[..4], b"four");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[expect(clippy::len_without_is_empty, reason = "a data set holds at least one record")]
pub struct RaggedRecords {
    /// At least one.
    files: Vec<RaggedFile>,
    dtype: DType,
    records: u64,
    max_len: usize,
    bytes: u64,
}

#[derive(Debug)]
struct RaggedFile {
    data: DataFile,
    /// The number of its first record.
    first: u64,
    /// Where its records begin, and last where the last one ends. They never decrease and are within the file.
    offsets: Vec<u64>,
}

/// Bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// The index of the file: in [`RaggedRecords::paths`], or in `Tensors::paths`.
    pub file: usize,
    /// Offsets from the start of the file. May be empty.
    pub bytes: Range<u64>,
}

impl RaggedRecords {
    /// Opens pairs of a data file and an index of offsets, a `.npy` file with one axis of `int64` or `uint64`: record `i`
    /// is the bytes from offset `i` to offset `i + 1`. There is one offset more than records, the last of which is the
    /// length of the data file.
    ///
    /// ```python
    /// offsets = numpy.cumsum([0] + [len(record) for record in records])
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Records::open_npy`](crate::Records::open_npy) for the index, and of both files those of opening;
    /// [`FormatError::UnsupportedType`] for other numbers, [`FormatError::BadShape`] for other axes or no record,
    /// [`FormatError::BadHeader`] for an offset below the one before it, and [`FormatError::DataLength`] where the last one
    /// is not the data file's length.
    pub fn open_indexed<P: AsRef<Path>, Q: AsRef<Path>>(
        pairs: impl IntoIterator<Item = (P, Q)>,
    ) -> Result<Self, Error> {
        Self::assemble(pairs.into_iter().map(|(data, index)| {
            let data = DataFile::open(data.as_ref())?;
            let offsets = indexed(&DataFile::open(index.as_ref())?)?;
            Ok((data, offsets, DType::U8))
        }))
    }

    /// Opens token files that Megatron-LM wrote (`IndexedDataset`: `.bin`, with an index in the `.idx` of the same name).
    /// A record is a sequence.
    ///
    /// The index, all of it little-endian: the magic `MMIDIDX\0\0`, the version 1 (`u64`), the type of a token (`u8`), the
    /// number of sequences and of entries of the document index (`u64` each), then the tokens in each sequence (`i32`),
    /// the first byte of each sequence (`i64`), and the sequence with which each document begins (`i64`). A data set with
    /// several modalities has a mode (`i8`) for each sequence behind it, which is not read, as the document index.
    ///
    /// # Errors
    ///
    /// Those of opening both files; [`FormatError::HeaderCutOff`], [`FormatError::BadMagic`],
    /// [`FormatError::BadVersion`], [`FormatError::UnsupportedType`]; [`FormatError::BadHeader`] for no sequence, a
    /// negative length, a sequence that does not begin where the one before it ends; [`FormatError::DataLength`] where the
    /// index or the data file has another length than the index says; [`Error::Mixed`] for files with different types.
    pub fn open_megatron<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self, Error> {
        Self::assemble(paths.into_iter().map(|path| {
            let path = path.as_ref();
            let data = DataFile::open(path)?;
            let (dtype, offsets) = megatron::index(&DataFile::open(&path.with_extension("idx"))?)?;
            Ok((data, offsets, dtype))
        }))
    }

    fn assemble(
        found: impl Iterator<Item = Result<(DataFile, Vec<u64>, DType), Error>>,
    ) -> Result<Self, Error> {
        let (mut files, mut dtype) = (Vec::<RaggedFile>::new(), None);
        let (mut records, mut bytes, mut longest) = (0_u64, 0_u64, 0);
        for found in found {
            let (data, offsets, of) = found?;
            let (start, end) = (offsets[0], offsets[offsets.len() - 1]);
            if end != data.len {
                let (wanted, found) = (end.saturating_sub(start), data.len.saturating_sub(start));
                return Err(FormatError::DataLength { path: data.path, offset: start, wanted, found }.into());
            }
            if *dtype.get_or_insert(of) != of {
                let first = files.first().map_or_else(PathBuf::new, |file| file.data.path.clone());
                let wanted = (dtype.unwrap_or(of), Vec::new());
                return Err(Error::Mixed { path: data.path, first, wanted, found: (of, Vec::new()) });
            }
            longest = offsets.windows(2).map(|pair| pair[1] - pair[0]).fold(longest, u64::max);
            bytes = match bytes.checked_add(end - start) {
                Some(sum) if usize::try_from(longest).is_ok() => sum,
                _ => return Err(Error::TooLarge { path: data.path }),
            };
            let first = records;
            records += offsets.len() as u64 - 1;
            files.push(RaggedFile { data, first, offsets });
        }
        let dtype = dtype.ok_or(Error::NoPaths)?;
        // Checked for every file.
        let max_len = usize::try_from(longest).unwrap_or(usize::MAX);
        Ok(Self { files, dtype, records, max_len, bytes })
    }

    /// Returns the number of records, at least 1.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.records
    }

    /// Returns the type of the elements; [`DType::U8`] for [`open_indexed`](Self::open_indexed).
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the bytes in the longest record.
    #[must_use]
    pub const fn max_len(&self) -> usize {
        self.max_len
    }

    /// Returns the bytes in all records.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the data files, in the order of their records.
    #[must_use]
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| file.data.path.as_path())
    }

    /// Returns where a record is, or `None` past the last. Takes O(log files).
    #[must_use]
    pub fn range(&self, record: u64) -> Option<ByteRange> {
        if record >= self.records {
            return None;
        }
        let file = self.files.partition_point(|file| file.first <= record) - 1;
        let RaggedFile { first, offsets, .. } = &self.files[file];
        let at = usize::try_from(record - first).ok()?;
        Some(ByteRange { file, bytes: offsets[at]..offsets[at + 1] })
    }

    /// Reads a record to the front of `out`, and returns its bytes. A buffer of [`max_len`](Self::max_len) holds any.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRecord`] and [`Error::BufferTooSmall`], before anything is read; [`Error::Truncated`] if the file
    /// has become shorter, [`Error::Read`] if the system fails.
    pub fn read(&self, record: u64, out: &mut [u8]) -> Result<usize, Error> {
        let Some(ByteRange { file, bytes }) = self.range(record) else {
            return Err(Error::NoSuchRecord { wanted: record, found: self.records });
        };
        let wanted = bytes.end - bytes.start;
        let found = out.len() as u64;
        let len = usize::try_from(wanted).unwrap_or(usize::MAX);
        let out = out.get_mut(..len).ok_or(Error::BufferTooSmall { wanted, found })?;
        self.files[file].data.read_exact(out, bytes.start)?;
        Ok(len)
    }
}

/// The offsets of an index.
fn indexed(file: &DataFile) -> Result<Vec<u64>, Error> {
    let Array { offset, dtype, shape } = npy::parse(file, &(0..file.len))?;
    if !matches!(dtype, DType::I64 | DType::U64) {
        let found = format!("offsets of {dtype}");
        return Err(FormatError::UnsupportedType { path: file.path.clone(), offset: 0, found }.into());
    }
    let count = match shape[..] {
        [count] if count >= 2 => count,
        _ => {
            let (path, wanted) = (file.path.clone(), "one axis of at least 2 offsets");
            return Err(FormatError::BadShape { path, wanted, found: shape }.into());
        }
    };
    let mut offsets = Vec::<u64>::new();
    numbers(file, offset, count, |at, bytes: [u8; 8]| {
        let found = u64::from_le_bytes(bytes);
        let negative = dtype == DType::I64 && found > i64::MAX as u64;
        if negative || offsets.last().is_some_and(|&last| found < last) {
            let found = if negative { i64::from_le_bytes(bytes).to_string() } else { found.to_string() };
            let wanted = "an offset from 0 that is not below the one before it";
            return Err(FormatError::BadHeader { path: file.path.clone(), offset: at, wanted, found }.into());
        }
        offsets.push(found);
        Ok(())
    })?;
    Ok(offsets)
}
