//! What can go wrong with the files, as values: what, path, offset, wanted, found, and what to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

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
        /// Bytes in a record.
        wanted: u64,
        /// Bytes in the file.
        found: u64,
    },
    /// The file's length is no multiple of the record size.
    Ragged {
        /// The file.
        path: PathBuf,
        /// Where the last whole record ends.
        offset: u64,
        /// Bytes in a record.
        wanted: u64,
        /// Bytes from `offset` to the end of the file.
        found: u64,
    },
    /// The files together hold 2^64 bytes or more.
    TooLarge {
        /// The file with which the sum overflows.
        path: PathBuf,
    },
    /// A batch names a record that the files do not have: its plan was made for another data set.
    NoSuchRecord {
        /// The record that was asked for.
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
        /// The byte at which the read that failed began.
        offset: u64,
        /// What the system said.
        source: io::Error,
    },
    /// Another call on the file failed.
    System {
        /// The file.
        path: PathBuf,
        /// The name of the call: `mmap`, `mincore`, `fsync` or `posix_fadvise`.
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
                write!(f, "{path:?}: wanted fewer than 2^64 bytes in all files, found more with this one")
            }
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
