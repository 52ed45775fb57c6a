//! Errors as values: what is wrong, path, offset, wanted, found, and what to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::DType;

/// Why files could not be opened, read or asked about.
///
/// Every message is one line and leaves out the [`source`](std::error::Error::source): an error reporter prints it
/// separately. `{:?}` has both; `main` prints an error that it returns in this form. Offsets and lengths are bytes,
/// counted from the start of the file.
#[non_exhaustive]
pub enum Error {
    /// No path was given.
    NoPaths,
    /// The record size is 0.
    ZeroRecord,
    /// The stride is 0.
    ZeroStride,
    /// A folder holds no files, or a pattern matches none.
    NoFiles {
        /// The folder or pattern.
        path: PathBuf,
    },
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
    /// Another file has taken this one's name. Files that are not kept open, because there are too many of them, are
    /// recognized by device and inode.
    Replaced {
        /// The file.
        path: PathBuf,
    },
    /// The file could not be opened for another reason.
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
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
        /// End of the last whole record or element.
        offset: u64,
        /// Bytes in a record or element.
        wanted: u64,
        /// Bytes from `offset` to the end of the file.
        found: u64,
    },
    /// The records together have 2^64 bytes or more, or one of them is larger than memory can be.
    TooLarge {
        /// The file that makes the sum overflow.
        path: PathBuf,
    },
    /// The file's header is bad, or it is not one that can be read as records.
    Format(FormatError),
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
        /// The number of the record.
        wanted: u64,
        /// Records in the files.
        found: u64,
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
        /// Offset where the failed read began, in bytes.
        offset: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Another call on the file failed.
    System {
        /// The file.
        path: PathBuf,
        /// The name of the call: `mmap`, `mincore`, `fsync`, `fstat`, `madvise`, `posix_fadvise`,
        /// `open(O_DIRECT)`, `preadv(O_DIRECT)`, `fcntl(F_NOCACHE)` or `ReOpenFile`.
        call: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// This operating system has no such call.
    Unsupported {
        /// The name of the call that is missing.
        call: &'static str,
    },
}

impl Error {
    /// Whether a file could not be opened because too many are open.
    pub(crate) fn is_too_many(&self) -> bool {
        matches!(self, Self::Open { source, .. } if too_many(source))
    }

    /// Sorts the system's errors on opening `path`.
    pub(crate) fn opening(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { path },
            io::ErrorKind::PermissionDenied => Self::PermissionDenied { path },
            _ => Self::Open { path, source },
        }
    }
}

/// Whether this process or the system has no descriptor left.
fn too_many(error: &io::Error) -> bool {
    #[cfg(unix)]
    return matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
    #[cfg(not(unix))]
    {
        let _ = error;
        false
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Paths are printed quoted and escaped: a line break in a name must not break the message.
        match self {
            Self::NoPaths => write!(f, "no files were given: name at least one"),
            Self::ZeroRecord => write!(f, "a record needs at least one byte, found 0"),
            Self::ZeroStride => {
                write!(f, "the stride from a record to the next needs at least one row, found 0")
            }
            Self::NoFiles { path } => {
                write!(f, "{path:?}: no files: name a folder with files, or another pattern")
            }
            Self::NotFound { path } => write!(f, "{path:?}: no such file"),
            Self::PermissionDenied { path } => {
                write!(f, "{path:?}: permission denied: check the file's mode and those of its folders")
            }
            Self::NotAFile { path, found } => write!(f, "{path:?}: wanted a regular file, found a {found}"),
            Self::Replaced { path } => {
                write!(f, "{path:?}: replaced since it was first opened: do not replace data files in use")
            }
            Self::Open { path, source } if too_many(source) => {
                write!(f, "{path:?}: cannot be opened: too many open files: raise the limit (`ulimit -n`)")
            }
            Self::Open { path, .. } => write!(f, "{path:?}: cannot be opened"),
            Self::TooShort { path, wanted, found } => {
                write!(f, "{path:?}: holds no record: wanted at least {wanted} bytes, found {found}")
            }
            Self::Ragged { path, offset, wanted, found } => write!(
                f,
                "{path:?}: the last record, at byte {offset}, is not whole: wanted {wanted} bytes, found \
                 {found}: check the record size, or set `Options::partial`",
            ),
            Self::TooLarge { path } => {
                write!(f, "{path:?}: wanted fewer than 2^64 bytes in all records, found more with this file")
            }
            Self::Format(error) => error.fmt(f),
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
            Self::BufferTooSmall { wanted, found } => {
                write!(f, "the buffer is too small for the batch: wanted {wanted} bytes, found {found}")
            }
            Self::Truncated { path, offset, wanted, found } => write!(
                f,
                "{path:?}: truncated while open, byte {offset} is missing: wanted {wanted} bytes, found \
                 {found}: do not write to data files in use",
            ),
            Self::Read { path, offset, .. } => write!(f, "{path:?}: cannot be read at byte {offset}"),
            Self::System { path, call, .. } => write!(f, "{path:?}: {call} failed"),
            Self::Unsupported { call } => write!(f, "this operating system has no {call}"),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)?;
        match std::error::Error::source(self) {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Open { source, .. } | Self::Read { source, .. } | Self::System { source, .. } => {
                Some(source)
            }
            // `Format` prints the line of what it holds, and so is not that one's consequence.
            _ => None,
        }
    }
}

/// What is wrong with a file's header, or with the array that it describes.
///
/// Every message is one line. Offsets and lengths are bytes, counted from the start of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FormatError {
    /// The file was opened as bare numbers, but it begins like one of another format.
    NotHeaderless {
        /// The file.
        path: PathBuf,
        /// The format.
        found: &'static str,
        /// What to do with such a file.
        advice: &'static str,
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
        /// Offset of the magic.
        offset: u64,
        /// The magic of the format.
        wanted: &'static str,
        /// What was found there.
        found: String,
    },
    /// The format's version is unknown.
    BadVersion {
        /// The file.
        path: PathBuf,
        /// Offset of the version.
        offset: u64,
        /// The known versions.
        wanted: String,
        /// The file's version.
        found: String,
    },
    /// The header claims a length that no header should have.
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// Offset of the header's length.
        offset: u64,
        /// The most bytes a header may have.
        wanted: u64,
        /// The length that it claims.
        found: u64,
    },
    /// The header cannot be understood.
    BadHeader {
        /// The file.
        path: PathBuf,
        /// Offset of the part that cannot be parsed.
        offset: u64,
        /// What was expected there.
        wanted: &'static str,
        /// The first 100 characters from there, or what is wrong with them.
        found: String,
    },
    /// The elements are of a type that no [`DType`] represents.
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// Offset of the type, or of the part of the header that holds it.
        offset: u64,
        /// The type, in the words of the format.
        found: String,
    },
    /// The elements have their bytes in big-endian order.
    BigEndian {
        /// The file.
        path: PathBuf,
        /// Offset of the type.
        offset: u64,
        /// The type, in the words of the format.
        found: String,
    },
    /// The array is stored in Fortran order: its first axis varies fastest, so no row is contiguous.
    FortranOrder {
        /// The file.
        path: PathBuf,
        /// Offset of the order.
        offset: u64,
    },
    /// The array has a shape that cannot be records.
    BadShape {
        /// The file.
        path: PathBuf,
        /// What was expected of the shape.
        wanted: &'static str,
        /// The array's shape.
        found: Vec<u64>,
    },
    /// The file holds fewer or more bytes of data than its header describes: it was cut off or has grown.
    DataLength {
        /// The file.
        path: PathBuf,
        /// Offset of the data.
        offset: u64,
        /// Bytes of data that the header describes.
        wanted: u64,
        /// Bytes from `offset` to the end of the file.
        found: u64,
    },
    /// The array is compressed, so no row can be read by itself.
    #[cfg(feature = "npz")]
    Compressed {
        /// The file.
        path: PathBuf,
        /// The name of the array.
        name: String,
        /// How it is compressed.
        found: String,
    },
    /// The file has no tensor or array of that name.
    #[cfg(any(feature = "safetensors", feature = "npz"))]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The name.
        wanted: String,
        /// The names of the tensors that it has, sorted.
        found: Vec<String>,
    },
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotHeaderless { path, found, advice } => {
                write!(f, "{path:?}: wanted numbers without a header, found {found}: {advice}")
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
                "{path:?}: the header's length, at byte {offset}, is too large: wanted at most {wanted} bytes, \
                 found {found}"
            ),
            Self::BadHeader { path, offset, wanted, found } => {
                write!(f, "{path:?}: bad header at byte {offset}: wanted {wanted}, found {found}")
            }
            Self::UnsupportedType { path, offset, found } => {
                write!(f, "{path:?}: unsupported type at byte {offset}: found {found}: {}", way_out(found))
            }
            Self::BigEndian { path, offset, found } => write!(
                f,
                "{path:?}: big-endian numbers at byte {offset}: wanted little-endian, found {found}: save it with \
                 `numpy.save(path, x.astype('{}'))`",
                found.replace('>', "<")
            ),
            Self::FortranOrder { path, offset } => write!(
                f,
                "{path:?}: Fortran order at byte {offset}, in which no row lies in one piece: wanted C order: save it \
                 with `numpy.save(path, numpy.ascontiguousarray(x))`"
            ),
            Self::BadShape { path, wanted, found } => {
                write!(f, "{path:?}: no records in this shape: wanted {wanted}, found {found:?}")
            }
            Self::DataLength { path, offset, wanted, found } => write!(
                f,
                "{path:?}: cut off or grown: from byte {offset} on wanted {wanted} bytes, found {found}"
            ),
            #[cfg(feature = "npz")]
            Self::Compressed { path, name, found } => write!(
                f,
                "{path:?}: the array {name:?} is compressed: wanted it stored, found {found}: save it with \
                 `numpy.savez(path, ...)`, not `numpy.savez_compressed`"
            ),
            #[cfg(any(feature = "safetensors", feature = "npz"))]
            Self::NoTensor { path, wanted, found } => {
                // A model may have thousands.
                let (shown, more) = found.split_at(found.len().min(16));
                write!(f, "{path:?}: no such tensor or array: wanted {wanted:?}, found {shown:?}")?;
                if more.is_empty() { Ok(()) } else { write!(f, " and {} more", more.len()) }
            }
        }
    }
}

/// What to do with an array `x` of a type that is not supported, by the type's name in its format.
fn way_out(found: &str) -> &'static str {
    match found {
        "<V2" | "|V2" => "if it is bfloat16, save its bits with `numpy.save(path, x.view(numpy.uint16))`",
        "<V1" | "|V1" => {
            "if it is an 8-bit float, save its bits with `numpy.save(path, x.view(numpy.uint8))`"
        }
        "|O" => "it holds Python objects: save numbers of one type, such as `x.astype('<f4')`",
        "<f16" | "<f12" => "save it with `numpy.save(path, x.astype('<f8'))`",
        _ if found.starts_with("[(") => "save each field separately with `numpy.save(path, x[name])`",
        _ if found.starts_with("<M8") || found.starts_with("<m8") => {
            "save it with `numpy.save(path, x.view(numpy.int64))`"
        }
        _ if found.contains('U') || found.contains('S') => {
            "text has no fixed meaning as numbers: save token ids"
        }
        _ if found.starts_with('F') => "elements of less than 8 bits and scales cannot be read",
        _ => "wanted bool, integers of 8 to 64 bits, floats of 8 to 64 bits, or complex numbers",
    }
}

impl std::error::Error for FormatError {}

impl From<FormatError> for Error {
    fn from(error: FormatError) -> Self {
        Self::Format(error)
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
