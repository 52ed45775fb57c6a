//! What can go wrong with the files, as values: what, path, offset, wanted, found, and what to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::DType;

/// Why files could not be opened, read or asked about.
///
/// Every message is one line. Offsets and lengths are bytes, counted from the start of the file.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// No path was given.
    NoPaths,
    /// A record of 0 bytes was asked for.
    ZeroRecord,
    /// A stride of 0 rows was asked for.
    ZeroStride,
    /// There is no such file.
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// The file, or a folder on the way to it, may not be read by this process.
    PermissionDenied {
        /// The file.
        path: PathBuf,
    },
    /// The path names something other than a regular file.
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What it names: `directory`, `FIFO`, `socket` or `device`.
        found: &'static str,
    },
    /// The file could not be opened for another reason.
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file holds not even one record.
    TooShort {
        /// The file.
        path: PathBuf,
        /// Bytes in a record; `u64::MAX` if it has more than that.
        wanted: u64,
        /// Bytes of data in the file.
        found: u64,
    },
    /// The file's length is no multiple of the record size, or of the size of an element.
    Ragged {
        /// The file.
        path: PathBuf,
        /// Where the last whole record or element ends.
        offset: u64,
        /// Bytes in a record or element.
        wanted: u64,
        /// Bytes from `offset` to the end of the file.
        found: u64,
    },
    /// The records together have 2^64 bytes or more, or one of them is larger than memory can be.
    TooLarge {
        /// The file with which the sum overflows.
        path: PathBuf,
    },
    /// The file ends inside its header.
    HeaderCutOff {
        /// The file.
        path: PathBuf,
        /// Bytes in the header, as far as its length is known.
        wanted: u64,
        /// Bytes in the file.
        found: u64,
    },
    /// The file is of another format: it does not begin with the magic number or string.
    BadMagic {
        /// The file.
        path: PathBuf,
        /// Where the magic should be.
        offset: u64,
        /// The magic of the format.
        wanted: &'static str,
        /// What stands there.
        found: String,
    },
    /// The format is of a version that is not known.
    BadVersion {
        /// The file.
        path: PathBuf,
        /// Where the version stands.
        offset: u64,
        /// The versions that are known.
        wanted: String,
        /// The file's version.
        found: String,
    },
    /// The header says that it is longer than any header should be.
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// Where the header's length stands.
        offset: u64,
        /// The most bytes a header may have.
        wanted: u64,
        /// Bytes that it says it has.
        found: u64,
    },
    /// The header cannot be understood.
    BadHeader {
        /// The file.
        path: PathBuf,
        /// Where that begins which cannot.
        offset: u64,
        /// What should stand there.
        wanted: &'static str,
        /// What stands there, its first 100 characters, or what is wrong with it.
        found: String,
    },
    /// The elements are of a type that no [`DType`] stands for.
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// Where the type stands, or the part of the header that holds it.
        offset: u64,
        /// The type, in the words of the format.
        found: String,
    },
    /// The elements have their bytes in big-endian order.
    BigEndian {
        /// The file.
        path: PathBuf,
        /// Where the type stands.
        offset: u64,
        /// The type, in the words of the format.
        found: String,
    },
    /// The array is stored in Fortran order: its first axis varies fastest, so that no row lies in one piece.
    FortranOrder {
        /// The file.
        path: PathBuf,
        /// Where the order stands.
        offset: u64,
    },
    /// The array has a shape that cannot be records.
    BadShape {
        /// The file.
        path: PathBuf,
        /// What the shape lacks.
        wanted: &'static str,
        /// The array's shape.
        found: Vec<u64>,
    },
    /// The file holds fewer or more bytes of data than its header says: it was cut off or has grown.
    DataLength {
        /// The file.
        path: PathBuf,
        /// Where the data begins.
        offset: u64,
        /// Bytes of data by the header.
        wanted: u64,
        /// Bytes from `offset` to the end of the file.
        found: u64,
    },
    /// The file has no tensor of that name.
    #[cfg(feature = "safetensors")]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The name.
        wanted: String,
        /// The names of the tensors that it has, sorted.
        found: Vec<String>,
    },
    /// The records of one file differ from those of the first.
    Mixed {
        /// The file that differs.
        path: PathBuf,
        /// The first file.
        first: PathBuf,
        /// The type and the shape of a record of the first file.
        wanted: (DType, Vec<usize>),
        /// The type and the shape of a record of this file.
        found: (DType, Vec<usize>),
    },
    /// A batch names a record that the files do not have: its plan was made for another data set.
    NoSuchRecord {
        /// The record that was asked for.
        wanted: u64,
        /// Records in the files.
        found: u64,
    },
    /// A view was asked for of records that do not lie in one file.
    AcrossFiles {
        /// The file of the first of them.
        path: PathBuf,
        /// The number at which the view should end, exclusive.
        wanted: u64,
        /// The number at which the file's records end, exclusive.
        found: u64,
    },
    /// The file can still be truncated or written to, or it has holes, so that touching its mapping is no
    /// business of safe code.
    NotSealed {
        /// The file.
        path: PathBuf,
    },
    /// The buffer is smaller than the batch.
    BufferTooSmall {
        /// Bytes in the batch; `u64::MAX` if it has more than that.
        wanted: u64,
        /// Bytes in the buffer.
        found: u64,
    },
    /// The file ended early: it was truncated after it was opened.
    Truncated {
        /// The file.
        path: PathBuf,
        /// The first byte that is missing.
        offset: u64,
        /// Bytes that this read should have given.
        wanted: u64,
        /// Bytes that it gave, those just before `offset`.
        found: u64,
    },
    /// The system failed to read.
    Read {
        /// The file.
        path: PathBuf,
        /// The byte at which the read that failed began.
        offset: u64,
        /// What the system said.
        source: io::Error,
    },
    /// Another call on the file failed.
    System {
        /// The file.
        path: PathBuf,
        /// The name of the call: `mmap`, `mincore`, `fsync`, `fstat`, `madvise`, `posix_fadvise`,
        /// `process_vm_readv`, `open(O_DIRECT)` or `preadv(O_DIRECT)`.
        call: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// This operating system has no such call.
    Unsupported {
        /// The name of the call that is missing.
        call: &'static str,
    },
}

impl Error {
    /// Sorts what the system said when `path` was opened.
    pub(crate) fn opening(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { path },
            io::ErrorKind::PermissionDenied => Self::PermissionDenied { path },
            _ => Self::Open { path, source },
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Paths are printed quoted and escaped, so that a line break in a name does not break the message.
        match self {
            Self::NoPaths => write!(f, "no files were given: name at least one"),
            Self::ZeroRecord => write!(f, "a record needs at least one byte, found 0"),
            Self::ZeroStride => {
                write!(f, "the stride from a record to the next needs at least one row, found 0")
            }
            Self::NotFound { path } => write!(f, "{path:?}: no such file"),
            Self::PermissionDenied { path } => {
                write!(f, "{path:?}: permission denied: check the file's mode and those of its folders")
            }
            Self::NotAFile { path, found } => write!(f, "{path:?}: wanted a regular file, found a {found}"),
            Self::Open { path, source } => write!(f, "{path:?}: cannot be opened: {source}"),
            Self::TooShort { path, wanted, found } => {
                write!(f, "{path:?}: holds no record: wanted at least {wanted} bytes, found {found}")
            }
            Self::Ragged { path, offset, wanted, found } => write!(
                f,
                "{path:?}: the last record, at byte {offset}, is not whole: wanted {wanted} bytes, found \
                 {found}: check the record size, or open with Ragged::Ignore",
            ),
            Self::TooLarge { path } => {
                write!(f, "{path:?}: wanted fewer than 2^64 bytes in all records, found more with this file")
            }
            Self::HeaderCutOff { path, wanted, found } => {
                write!(f, "{path:?}: ends inside its header: wanted at least {wanted} bytes, found {found}")
            }
            Self::BadMagic { path, offset, wanted, found } => write!(
                f,
                "{path:?}: another format, by the magic at byte {offset}: wanted {wanted}, found {found}"
            ),
            Self::BadVersion { path, offset, wanted, found } => {
                write!(f, "{path:?}: unknown version, at byte {offset}: wanted {wanted}, found {found}")
            }
            Self::HeaderTooLong { path, offset, wanted, found } => write!(
                f,
                "{path:?}: the header's length, at byte {offset}, is absurd: wanted at most {wanted} bytes, \
                 found {found}"
            ),
            Self::BadHeader { path, offset, wanted, found } => {
                write!(f, "{path:?}: bad header at byte {offset}: wanted {wanted}, found {found}")
            }
            Self::UnsupportedType { path, offset, found } => write!(
                f,
                "{path:?}: no type to train on, at byte {offset}: wanted numbers of 1 to 16 bytes, found \
                 {found}"
            ),
            Self::BigEndian { path, offset, found } => write!(
                f,
                "{path:?}: wrong byte order, at byte {offset}: wanted little-endian, found {found}: save it \
                 again"
            ),
            Self::FortranOrder { path, offset } => write!(
                f,
                "{path:?}: wrong order of axes, at byte {offset}: wanted C order, found Fortran order: save \
                 it again"
            ),
            Self::BadShape { path, wanted, found } => {
                write!(f, "{path:?}: no records in this shape: wanted {wanted}, found {found:?}")
            }
            Self::DataLength { path, offset, wanted, found } => write!(
                f,
                "{path:?}: cut off or grown: from byte {offset} on wanted {wanted} bytes, found {found}"
            ),
            #[cfg(feature = "safetensors")]
            Self::NoTensor { path, wanted, found } => {
                // A model may have thousands.
                let (shown, more) = found.split_at(found.len().min(16));
                write!(f, "{path:?}: no such tensor: wanted {wanted:?}, found {shown:?}")?;
                if more.is_empty() { Ok(()) } else { write!(f, " and {} more", more.len()) }
            }
            Self::Mixed { path, first, wanted, found } => write!(
                f,
                "{path:?}: other records than in {first:?}: wanted {} {:?}, found {} {:?}",
                wanted.0, wanted.1, found.0, found.1
            ),
            Self::NoSuchRecord { wanted, found } => write!(
                f,
                "no such record: wanted number {wanted}, found {found} records: make the plan with \
                 `Records::len`",
            ),
            Self::AcrossFiles { path, wanted, found } => write!(
                f,
                "{path:?}: a view lies in one file: wanted records up to {wanted}, found them up to {found}: \
                 take one view of each file",
            ),
            Self::NotSealed { path } => write!(
                f,
                "{path:?}: not sealed: wanted a memfd without holes and with F_SEAL_SHRINK and F_SEAL_WRITE: \
                 use another read mode",
            ),
            Self::BufferTooSmall { wanted, found } => {
                write!(f, "the buffer is too small for the batch: wanted {wanted} bytes, found {found}")
            }
            Self::Truncated { path, offset, wanted, found } => write!(
                f,
                "{path:?}: truncated while open, byte {offset} is missing: wanted {wanted} bytes, found \
                 {found}: do not write to data files in use",
            ),
            Self::Read { path, offset, source } => {
                write!(f, "{path:?}: cannot be read at byte {offset}: {source}")
            }
            Self::System { path, call, source } => write!(f, "{path:?}: {call} failed: {source}"),
            Self::Unsupported { call } => write!(f, "this operating system has no {call}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Open { source, .. } | Self::Read { source, .. } | Self::System { source, .. } => {
                Some(source)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    #[test]
    fn opening_is_sorted_by_kind() {
        let opening = |kind| Error::opening(Path::new("a"), io::Error::from(kind));
        assert!(matches!(opening(io::ErrorKind::NotFound), Error::NotFound { .. }));
        let denied = opening(io::ErrorKind::PermissionDenied);
        assert!(matches!(denied, Error::PermissionDenied { .. }));
        assert!(denied.source().is_none());
        let other = opening(io::ErrorKind::OutOfMemory);
        assert!(matches!(other, Error::Open { .. }));
        assert!(other.source().is_some());
    }

    #[test]
    fn a_message_is_one_line() {
        let path = PathBuf::from("two\nlines");
        let error = Error::Truncated { path, offset: 3, wanted: 2, found: 1 };
        assert_eq!(
            error.to_string(),
            "\"two\\nlines\": truncated while open, byte 3 is missing: wanted 2 bytes, found 1: do not \
             write to data files in use"
        );
    }

    #[test]
    fn it_can_cross_threads() {
        fn crosses<T: Send + Sync + 'static>() {}
        crosses::<Error>();
    }
}
