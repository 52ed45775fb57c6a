//! Errors of files: what, where, and what to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::DType;

/// Why files could not be opened, read or queried.
///
/// `Display` prints one line without the [`source`](std::error::Error::source), because error reporters print the
/// source separately. `Debug` prints the message and the source; `main` uses `Debug` for a returned error. Offsets and
/// lengths are in bytes. Offsets count from the start of the file.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The list of paths is empty.
    #[error("no files were given: name at least one")]
    NoPaths,
    /// The record size, or the number of rows in a window, is 0.
    #[error("a record needs at least one byte, found 0")]
    ZeroRecord,
    /// The stride is 0.
    #[error("the stride from a record to the next needs at least one row, found 0")]
    ZeroStride,
    /// A folder contains no files (names that start with a dot do not count), or a pattern matches none, is invalid or
    /// is not UTF-8.
    #[error("{path:?}: no files: name a folder with files, or another pattern")]
    NoFiles {
        /// The folder or pattern.
        path: PathBuf,
    },
    /// The file or folder does not exist.
    #[error("{path:?}: no such file{}", pattern(path))]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// This process may not read the file, or may not list or search a folder.
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
    /// The file was written to since it was opened, or, for a file that is not kept open, another file now has its
    /// path. A [`Reader`](crate::Reader) of batches checks the time of the last change after `begin`, at the first read
    /// of each higher epoch, one of groups at each read. A file that is not kept open is reopened for each use, and its
    /// time, device and inode are compared. If it is still the same file, but shorter than it was, it counts as
    /// truncated, whatever is in it: reads that need the missing bytes are [`Error::Truncated`], others succeed.
    #[error("{path:?}: replaced or written to since it was opened: do not change data files in use")]
    Replaced {
        /// The file.
        path: PathBuf,
    },
    /// The file or folder could not be opened, or its metadata not be read, for another reason.
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
    /// The total size of the records is 2^64 bytes or more, or one record or group of tensors
    /// exceeds the address space.
    #[error("{path:?}: wanted fewer than 2^64 bytes in all records, found more with this file")]
    TooLarge {
        /// The file at which the size overflows.
        path: PathBuf,
    },
    /// The file, its header or its index is not as the format requires, or is not supported.
    #[error(
        "{path:?}: {problem}{}{}{}{}",
        offset.map(|offset| format!(" at byte {offset}")).unwrap_or_default(),
        after(": wanted ", wanted), after(", found ", found), after(": ", advice)
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// The offset of the part that is wrong. `None` for an error about the whole file.
        offset: Option<u64>,
        /// What is wrong, for example `bad header`.
        problem: &'static str,
        /// What the format requires at the offset. Empty if the advice says it.
        wanted: Box<str>,
        /// The first 100 characters at the offset, or a description of what is there. It may be empty.
        found: Box<str>,
        /// What to do with such a file. Empty if there is no advice.
        advice: &'static str,
    },
    /// The file is a part of a model in several files, and not all of them were given.
    #[error(
        "{path:?}: a part of a model in {wanted} files: open all of them together: missing {}",
        few(missing)
    )]
    MissingParts {
        /// The first part that was given of this model.
        path: PathBuf,
        /// The number of parts.
        wanted: u64,
        /// The missing parts: the paths of their files by the name of the first, or `part 2 of 3` if that has
        /// another form.
        missing: Vec<PathBuf>,
    },
    /// The file or model has no tensor or array with this name.
    #[error("{path:?}: no such tensor or array: wanted {wanted:?}, found {}", few(found))]
    NoTensor {
        /// The file, or the first path that was given of a model.
        path: PathBuf,
        /// The requested name.
        wanted: String,
        /// The names in the file or model, sorted.
        found: Vec<String>,
    },
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
    /// A batch contains a record that the files do not have, because the plan was made for another
    /// data set; or a reader of groups has no such group or file.
    #[error(
        "no such record: wanted number {wanted}, found {found} records: make the plan with `Records::len`"
    )]
    NoSuchRecord {
        /// The index of the record, group or file, from 0.
        wanted: u64,
        /// The number of records, groups or files.
        found: u64,
    },
    /// The buffer is smaller than the batch or group.
    #[error("the buffer is too small for the batch: wanted {wanted} bytes, found {found}")]
    BufferTooSmall {
        /// The size of the batch or group in bytes; `u64::MAX` if it does not fit.
        wanted: u64,
        /// The size of the buffer in bytes.
        found: u64,
    },
    /// The file became shorter after it was opened, or `Reader::read_bytes` asked for bytes past its end.
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
    /// A system call to read the file failed.
    #[error("{path:?}: cannot be read at byte {offset}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The offset of the failed read; 0 for the directory of an `.npz` file.
        offset: u64,
        /// The system's error.
        source: io::Error,
    },
    /// Another system call on the file failed.
    #[error("{path:?}: {call} failed")]
    System {
        /// The file.
        path: PathBuf,
        /// The name of the call: `mmap`, `mincore`, `fsync`, `posix_fadvise`, `open(O_DIRECT)`,
        /// `preadv(O_DIRECT)` or `ReOpenFile`.
        call: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The crate has no such call for this operating system.
    #[error("this operating system has no {call}")]
    Unsupported {
        /// The name of the missing call.
        call: &'static str,
    },
}

impl Error {
    /// Returns the file, folder or pattern that the error is about, and the offset in bytes if
    /// there is one. `None` for an error about none of them.
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
            | Self::MissingParts { path, .. }
            | Self::NoTensor { path, .. }
            | Self::Mixed { path, .. }
            | Self::System { path, .. } => Some((path, None)),
            Self::Ragged { path, offset, .. }
            | Self::Truncated { path, offset, .. }
            | Self::Read { path, offset, .. } => Some((path, Some(*offset))),
            Self::Format { path, offset, .. } => Some((path, *offset)),
            Self::NoPaths
            | Self::ZeroRecord
            | Self::ZeroStride
            | Self::NoSuchRecord { .. }
            | Self::BufferTooSmall { .. }
            | Self::Unsupported { .. } => None,
        }
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

/// Locks a mutex whose content a panic cannot leave in an invalid state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The end of the message of [`Error::NotFound`]: advice for a path that looks like a pattern.
fn pattern(path: &Path) -> &'static str {
    let is_pattern = path.to_string_lossy().contains(['*', '?', '[']);
    if is_pattern { ": if it is a pattern, expand it with `files()`" } else { "" }
}

/// Whether `error` means that this process or the system has no file descriptor left.
pub(crate) fn too_many(error: &io::Error) -> bool {
    #[cfg(unix)]
    return matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
    #[cfg(not(unix))]
    {
        let _ = error;
        false
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        std::error::Error::source(self).map_or(Ok(()), |source| write!(f, ": {source}"))
    }
}

/// Returns `text` after `word`, or nothing if `text` is empty.
fn after(word: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{word}{text}") }
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
        let wanted = "truncated while open, byte 3 is missing: wanted 2 bytes, found 1: do not write to data files in use";
        assert_eq!(error.to_string(), format!("\"two\\nlines\": {wanted}"));
    }
}
