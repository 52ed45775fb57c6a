//! Records of varying length: where each one begins and ends.

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use super::{Array, megatron, npy, numbers};
use crate::file::DataFile;
use crate::ranges::{Kind, Layout, Ranges};
use crate::shard::Places;
use crate::{DType, Error, FormatError, Location};

/// Records of varying length in one or several files, numbered through from the first file on.
///
/// It describes where the records are: it is immutable, remembers nothing about its readers, and any number of threads
/// can share it. In memory it takes 8 bytes a record. The data files are opened as [`Options::open`](crate::Options::open)
/// opens files. A [`Reader`](crate::Reader) reads them as it reads [`Records`](crate::Records), by its
/// [`ranges`](Self::ranges).
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
/// assert_eq!(words.locate(1).map(|found| (found.offset, found.len)), Some((3, 6)));
/// let mut word = vec![0; words.max_len()];
/// assert_eq!(words.read_record(2, &mut word)?, 4);
/// assert_eq!(&word[..4], b"four");
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
    /// Opens pairs of a data file and an index of offsets, a `.npy` file with one axis of `int64` or `uint64`: record
    /// `i` is the bytes from offset `i` to offset `i + 1`. There is one more offset than records: the last offset is
    /// the length of the data file.
    ///
    /// ```python
    /// offsets = numpy.cumsum([0] + [len(record) for record in records])
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`Records::open_npy`](crate::Records::open_npy) for the index, and of both files those of opening;
    /// [`FormatError::UnsupportedType`] for other numbers, [`FormatError::BadShape`] for other axes or no record,
    /// [`FormatError::BadHeader`] for an offset below the one before it, and [`FormatError::DataLength`] where the last one
    /// is not the data file's length.
    pub fn open_indexed<P: AsRef<Path>, Q: AsRef<Path>>(
        pairs: impl IntoIterator<Item = (P, Q)>,
    ) -> Result<Self, Error> {
        let (paths, indexes): (Vec<P>, Vec<Q>) = pairs.into_iter().unzip();
        let mut indexes = indexes.iter();
        Self::assemble(paths, |_| {
            // There is one for each data file.
            let index = indexes.next().ok_or(Error::NoPaths)?;
            Ok((DType::U8, indexed(&DataFile::open(index.as_ref())?)?))
        })
    }

    /// Opens token files that Megatron-LM wrote (`IndexedDataset`: `.bin`, with an index in the `.idx` of the same name).
    /// A record is a sequence.
    ///
    /// The index, all of it little-endian: the magic `MMIDIDX\0\0`, the version 1 (`u64`), the type of a token (`u8`),
    /// the number of sequences and of entries of the document index (`u64` each), then the tokens in each sequence
    /// (`i32`), the first byte of each sequence (`i64`), and the first sequence of each document (`i64`). A data set
    /// with several modalities has a mode (`i8`) for each sequence behind it. Neither the modes nor the document index
    /// are read.
    ///
    /// # Errors
    ///
    /// Those of opening both files; [`FormatError::HeaderCutOff`], [`FormatError::BadMagic`],
    /// [`FormatError::BadVersion`], [`FormatError::UnsupportedType`]; [`FormatError::BadHeader`] for no sequence, a
    /// negative length, a sequence that does not begin where the one before it ends; [`FormatError::DataLength`] where the
    /// index or the data file has another length than the index says; [`Error::Mixed`] for files with different types.
    pub fn open_megatron<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<Self, Error> {
        Self::assemble(paths, |data| megatron::index(&DataFile::open(&data.path.with_extension("idx"))?))
    }

    /// Opens data files with the offsets that `index` finds for each.
    fn assemble<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        mut index: impl FnMut(&DataFile) -> Result<(DType, Vec<u64>), Error>,
    ) -> Result<Self, Error> {
        let ranges = Ranges::assemble(paths, None, |data| {
            let (dtype, offsets) = index(data)?;
            let (start, end) = (offsets[0], offsets[offsets.len() - 1]);
            if end != data.len {
                let (wanted, found) = (end.saturating_sub(start), data.len.saturating_sub(start));
                let path = data.path.clone();
                return Err(FormatError::DataLength { path, offset: start, wanted, found }.into());
            }
            let (typed, bytes) = (dtype != DType::U8, dtype.size());
            let kind = Kind { dtype, typed, shape: Vec::new(), bytes, stride: bytes as u64 };
            Ok(Layout { kind, records: offsets.len() as u64 - 1, at: Places::Offsets(offsets) })
        })?;
        Ok(Self(ranges))
    }

    /// Returns the files and the places of the records in them, for a [`Reader`](crate::Reader).
    #[must_use]
    pub fn ranges(&self) -> Arc<Ranges> {
        self.0.clone()
    }

    /// Reads a record to the front of `out`, and returns its bytes. A buffer of [`max_len`](Ranges::max_len) holds any.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRecord`] and [`Error::BufferTooSmall`], before anything is read; [`Error::Truncated`] if the file
    /// has become shorter, [`Error::Read`] if the system fails.
    pub fn read_record(&self, record: u64, out: &mut [u8]) -> Result<usize, Error> {
        let Some(Location { shard, offset, len: wanted }) = self.locate(record) else {
            return Err(Error::NoSuchRecord { wanted: record, found: self.len() });
        };
        let found = out.len() as u64;
        let len = usize::try_from(wanted).unwrap_or(usize::MAX);
        let out = out.get_mut(..len).ok_or(Error::BufferTooSmall { wanted, found })?;
        self.shards()[shard].file.read_exact(out, offset)?;
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
