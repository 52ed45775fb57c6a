//! Errors with path, offset, expected value, found value, and advice.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::DType;

/// The error type of this crate: why files could not be opened, read or queried.
///
/// `Display` prints one line without the [`source`](std::error::Error::source), because error reporters print the
/// source separately. `Debug` prints the name of the variant, the message and the source; `main` uses `Debug` for a
/// returned error. Offsets and lengths are in bytes. Offsets count from the start of the file.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The list of paths is empty.
    #[error("no files were given: name at least one")]
    NoPaths,
    /// The record size is 0.
    #[error("a record needs at least one byte, found 0")]
    ZeroRecord,
    /// The stride is 0.
    #[error("the stride from a record to the next needs at least one row, found 0")]
    ZeroStride,
    /// A folder contains no files, or a pattern matches no file.
    #[error("{path:?}: no files: name a folder with files, or another pattern")]
    NoFiles {
        /// The folder or pattern.
        path: PathBuf,
    },
    /// The file does not exist.
    #[error("{path:?}: no such file{}", pattern(path))]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// This process may not read the file, or may not search a folder of its path.
    #[error("{path:?}: permission denied: check the file's mode and those of its folders")]
    PermissionDenied {
        /// The file.
        path: PathBuf,
    },
    /// The path does not name a regular file.
    #[error(
        "{path:?}: wanted a regular file, found a {found}{}",
        if *found == "directory" { ": list its files with `files()`" } else { "" }
    )]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// The kind of the path: `directory`, `FIFO`, `socket` or `device`.
        found: &'static str,
    },
    /// The file was written to since it was opened, or another file now has its path. A [`Reader`](crate::Reader) looks
    /// at the length and the time of the last change once an epoch. If there are too many files to keep open, the crate
    /// reopens each file for use and compares device and inode too.
    #[error("{path:?}: replaced or written to since it was opened: do not change data files in use")]
    Replaced {
        /// The file.
        path: PathBuf,
    },
    /// The file could not be opened for another reason.
    #[error(
        "{path:?}: cannot be opened{}",
        if too_many(source) { ": too many open files: raise the limit (`ulimit -n`)" } else { "" }
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file contains less than one record.
    #[error("{path:?}: holds no record: wanted at least {wanted} bytes, found {found}")]
    TooShort {
        /// The file.
        path: PathBuf,
        /// The size of a record in bytes; `u64::MAX` if it does not fit.
        wanted: u64,
        /// The size of the data in the file, in bytes.
        found: u64,
    },
    /// The size of the file's data is not a multiple of the record size or the element size. For records of untyped
    /// bytes, [`Options::partial`](crate::Options::partial) ignores the incomplete record.
    #[error(
        "{path:?}: the last record or element, at byte {offset}, is not whole: wanted {wanted} bytes, found {found}: \
        check its size, and whether the file is complete"
    )]
    Ragged {
        /// The file.
        path: PathBuf,
        /// The end of the last whole record or element.
        offset: u64,
        /// The size of a record or element, in bytes.
        wanted: u64,
        /// The number of bytes from `offset` to the end of the file.
        found: u64,
    },
    /// The total size of the records is 2^64 bytes or more, or one record exceeds the address space.
    #[error("{path:?}: wanted fewer than 2^64 bytes in all records, found more with this file")]
    TooLarge {
        /// The file at which the size overflows.
        path: PathBuf,
    },
    /// The header of the file is invalid, or the file's format cannot be read as records.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The element type or the record shape of a file differs from the first file.
    #[error(
        "{path:?}: other records than in {first:?}: wanted {} {:?}, found {} {:?}", wanted.0, wanted.1, found.0, found.1
    )]
    Mixed {
        /// The file that differs.
        path: PathBuf,
        /// The first file.
        first: PathBuf,
        /// The element type and record shape of the first file.
        wanted: (DType, Vec<usize>),
        /// The element type and record shape of the file that differs.
        found: (DType, Vec<usize>),
    },
    /// A batch contains a record that the files do not have. The plan was made for another data set.
    #[error(
        "no such record: wanted number {wanted}, found {found} records: make the plan with `Records::len`"
    )]
    NoSuchRecord {
        /// The index of the record, from 0.
        wanted: u64,
        /// The number of records in the files.
        found: u64,
    },
    /// The buffer is smaller than the batch.
    #[error("the buffer is too small for the batch: wanted {wanted} bytes, found {found}")]
    BufferTooSmall {
        /// The size of the batch in bytes; `u64::MAX` if it does not fit.
        wanted: u64,
        /// The size of the buffer in bytes.
        found: u64,
    },
    /// The file became shorter after it was opened.
    #[error(
        "{path:?}: truncated while open, byte {offset} is missing: wanted {wanted} bytes, found {found}: do not \
        write to data files in use"
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The offset of the first missing byte.
        offset: u64,
        /// The number of bytes requested by the read.
        wanted: u64,
        /// The number of bytes that the read returned. They end at `offset`.
        found: u64,
    },
    /// The system call to read the file failed.
    #[error("{path:?}: cannot be read at byte {offset}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The offset of the failed read.
        offset: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Another system call on the file failed.
    #[error("{path:?}: {call} failed")]
    System {
        /// The file.
        path: PathBuf,
        /// The name of the call: `mmap`, `mincore`, `fsync`, `fstat`, `madvise`, `posix_fadvise`, `open(O_DIRECT)`,
        /// `preadv(O_DIRECT)` or `ReOpenFile`.
        call: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// This operating system does not have the system call.
    #[error("this operating system has no {call}")]
    Unsupported {
        /// The name of the missing call.
        call: &'static str,
    },
}

impl Error {
    /// Returns the file, and the offset in it in bytes, that the error is about. `None` for an error about no file or no
    /// place.
    #[must_use]
    pub fn place(&self) -> Option<(&Path, Option<u64>)> {
        match self {
            Self::NoFiles { path }
            | Self::NotFound { path }
            | Self::PermissionDenied { path }
            | Self::NotAFile { path, .. }
            | Self::Replaced { path }
            | Self::Open { path, .. }
            | Self::TooShort { path, .. }
            | Self::TooLarge { path }
            | Self::Mixed { path, .. }
            | Self::System { path, .. } => Some((path, None)),
            Self::Ragged { path, offset, .. }
            | Self::Truncated { path, offset, .. }
            | Self::Read { path, offset, .. } => Some((path, Some(*offset))),
            Self::Format(error) => Some(error.place()),
            Self::NoPaths
            | Self::ZeroRecord
            | Self::ZeroStride
            | Self::NoSuchRecord { .. }
            | Self::BufferTooSmall { .. }
            | Self::Unsupported { .. } => None,
        }
    }

    /// Whether the file could not be opened because too many files are open.
    pub(crate) fn is_too_many(&self) -> bool {
        matches!(self, Self::Open { source, .. } if too_many(source))
    }

    /// Converts the system's error on opening `path` to a variant.
    pub(crate) fn opening(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { path },
            io::ErrorKind::PermissionDenied => Self::PermissionDenied { path },
            _ => Self::Open { path, source },
        }
    }
}

/// The end of the message of [`Error::NotFound`]: advice for a path that looks like a pattern.
fn pattern(path: &Path) -> &'static str {
    let is_pattern = path.to_string_lossy().contains(['*', '?', '[']);
    if is_pattern { ": if it is a pattern, expand it with `files()`" } else { "" }
}

/// Whether `error` means that this process or the system has no file descriptor left.
fn too_many(error: &io::Error) -> bool {
    #[cfg(unix)]
    return matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
    #[cfg(not(unix))]
    {
        let _ = error;
        false
    }
}

/// Returns the name of the error's variant. The list has all variants.
macro_rules! name {
    ($error:expr, $($variant:ident)*) => {
        match $error { $(Self::$variant { .. } => stringify!($variant),)* }
    };
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = name!(self, NoPaths ZeroRecord ZeroStride NoFiles NotFound PermissionDenied NotAFile Replaced Open
            TooShort Ragged TooLarge Format Mixed NoSuchRecord BufferTooSmall Truncated Read System Unsupported);
        write!(f, "{name}: {self}")?;
        match std::error::Error::source(self) {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

/// Why a file's header, or the array that it describes, cannot be read.
///
/// Each message is one line. Offsets and lengths are in bytes. Offsets count from the start of the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The file was opened as a file without a header, but its first bytes are the header of a known format.
    #[error("{path:?}: wanted numbers without a header, found {found}: {advice}")]
    NotHeaderless {
        /// The file.
        path: PathBuf,
        /// The name of the format.
        found: &'static str,
        /// How to open such a file.
        advice: &'static str,
    },
    /// The file is a pointer of Git LFS: a few lines of text in place of a large file that was not downloaded.
    #[error("{path:?}: wanted the file itself, found a pointer of Git LFS: download it with `git lfs pull`")]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// The file is a part of a model in several files, and not all of them were given.
    #[error(
        "{path:?}: a part of a model in {wanted} files: open all of them together: missing {}",
        few(missing)
    )]
    MissingParts {
        /// The first part that was given.
        path: PathBuf,
        /// The number of parts.
        wanted: u64,
        /// The missing parts: the paths of their files by the name of the first, or `part 2 of 3` if that has
        /// another form.
        missing: Vec<PathBuf>,
    },
    /// The file ends inside its header.
    #[error("{path:?}: ends inside its header: wanted at least {wanted} bytes, found {found}")]
    HeaderCutOff {
        /// The file.
        path: PathBuf,
        /// The minimum size of the header in bytes, as far as it is known.
        wanted: u64,
        /// The size of the file in bytes.
        found: u64,
    },
    /// The file has another format: the magic number or string is wrong.
    #[error("{path:?}: another format, by the magic at byte {offset}: wanted {wanted}, found {found}")]
    BadMagic {
        /// The file.
        path: PathBuf,
        /// The offset of the magic number.
        offset: u64,
        /// The magic number of the format.
        wanted: &'static str,
        /// The bytes found at the offset.
        found: String,
    },
    /// The version of the format is unknown.
    #[error("{path:?}: unknown version, at byte {offset}: wanted {wanted}, found {found}")]
    BadVersion {
        /// The file.
        path: PathBuf,
        /// The offset of the version.
        offset: u64,
        /// The known versions.
        wanted: String,
        /// The version of the file.
        found: String,
    },
    /// The header states an implausible length.
    #[error(
        "{path:?}: the header's length, at byte {offset}, is too large: wanted at most {wanted} bytes, found {found}"
    )]
    HeaderTooLong {
        /// The file.
        path: PathBuf,
        /// The offset of the length.
        offset: u64,
        /// The maximum length in bytes.
        wanted: u64,
        /// The stated length in bytes.
        found: u64,
    },
    /// The header cannot be parsed.
    #[error("{path:?}: bad header at byte {offset}: wanted {wanted}, found {found}")]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// The offset of the part that cannot be parsed.
        offset: u64,
        /// The expected content.
        wanted: &'static str,
        /// The first 100 characters at the offset, or a description of the problem.
        found: String,
    },
    /// No [`DType`] represents the element type.
    #[error("{path:?}: unsupported type at byte {offset}: found {found}: {advice}")]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// The offset of the type, or of the part of the header that contains it.
        offset: u64,
        /// The type in the notation of the format.
        found: String,
        /// How to save such data.
        advice: &'static str,
    },
    /// The elements are big-endian.
    #[error("{path:?}: big-endian numbers at byte {offset}: wanted little-endian, found {found}: save it with \
        `numpy.save(path, x.astype('{}'))`", found.replace('>', "<"))]
    BigEndian {
        /// The file.
        path: PathBuf,
        /// The offset of the type.
        offset: u64,
        /// The type in the notation of the format.
        found: String,
    },
    /// The array is in Fortran order (column-major). Its rows are not contiguous.
    #[error(
        "{path:?}: Fortran order at byte {offset}, in which no row lies in one piece: wanted C order: save it with \
        `numpy.save(path, numpy.ascontiguousarray(x))`"
    )]
    FortranOrder {
        /// The file.
        path: PathBuf,
        /// The offset of the order in the header.
        offset: u64,
    },
    /// The shape of the array does not describe records.
    #[error("{path:?}: no records in this shape: wanted {wanted}, found {found:?}")]
    BadShape {
        /// The file.
        path: PathBuf,
        /// The requirement on the shape.
        wanted: &'static str,
        /// The shape of the array.
        found: Vec<u64>,
    },
    /// The size of the data differs from the size in the header: the file is truncated or has extra bytes.
    #[error("{path:?}: cut off or grown: from byte {offset} on wanted {wanted} bytes, found {found}")]
    DataLength {
        /// The file.
        path: PathBuf,
        /// The offset of the data.
        offset: u64,
        /// The size of the data according to the header, in bytes.
        wanted: u64,
        /// The number of bytes from `offset` to the end of the file.
        found: u64,
    },
    /// The array is compressed. Single rows of a compressed array cannot be read.
    #[error(
        "{path:?}: the array {name:?} is compressed: wanted it stored, found {found}: save it with \
        `numpy.savez(path, ...)`, not `numpy.savez_compressed`"
    )]
    Compressed {
        /// The file.
        path: PathBuf,
        /// The name of the array.
        name: String,
        /// The compression method.
        found: String,
    },
    /// The file has no tensor or array with this name.
    #[error("{path:?}: no such tensor or array: wanted {wanted:?}, found {}", few(found))]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The requested name.
        wanted: String,
        /// The names in the file, sorted.
        found: Vec<String>,
    },
}

impl FormatError {
    /// Returns the file, and the offset in it in bytes, that the error is about.
    #[must_use]
    pub fn place(&self) -> (&Path, Option<u64>) {
        match self {
            Self::NotHeaderless { path, .. }
            | Self::LfsPointer { path }
            | Self::MissingParts { path, .. }
            | Self::HeaderCutOff { path, .. }
            | Self::BadShape { path, .. }
            | Self::Compressed { path, .. }
            | Self::NoTensor { path, .. } => (path, None),
            Self::BadMagic { path, offset, .. }
            | Self::BadVersion { path, offset, .. }
            | Self::HeaderTooLong { path, offset, .. }
            | Self::BadHeader { path, offset, .. }
            | Self::UnsupportedType { path, offset, .. }
            | Self::BigEndian { path, offset, .. }
            | Self::FortranOrder { path, offset }
            | Self::DataLength { path, offset, .. } => (path, Some(*offset)),
        }
    }
}

/// Formats the first 16 names, and the number of the others: a model may have thousands.
fn few(names: &[impl fmt::Debug]) -> String {
    let (shown, more) = names.split_at(names.len().min(16));
    if more.is_empty() { format!("{shown:?}") } else { format!("{shown:?} and {} more", more.len()) }
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
