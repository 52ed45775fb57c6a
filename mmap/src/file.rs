//! One regular file, read at explicit offsets.

use std::cell::Cell;
use std::fmt::Display;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::Error;

thread_local! {
    /// The number of read requests that this thread has made.
    pub(crate) static READ_CALLS: Cell<u64> = const { Cell::new(0) };
}

/// A regular file of a data set. While it is kept open, reads return this file, even if its name was deleted or given
/// to another file.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) path: PathBuf,
    /// The open file. `None`: each use opens the file again, by the path `again`.
    pub(crate) kept: Option<Arc<File>>,
    again: PathBuf,
    /// Device and inode; zeros on other systems than Unix.
    pub(crate) id: [u64; 2],
    /// Bytes in the file when it was opened.
    pub(crate) len: u64,
    /// The time of the last change before the file was opened. `None` if the file system does not record it.
    modified: Option<SystemTime>,
    /// A mapping from the start of the file to the end of its records. Only the kernel reads through it. An error if
    /// the system refused the mapping, or if the address space had no room for the mappings of all files.
    #[cfg(unix)]
    pub(crate) map: io::Result<memmap2::MmapRaw>,
    /// Whether a prefetch hint for this file could block in its file system. Such a file gets no hints.
    pub(crate) hints_wait: bool,
}

impl DataFile {
    /// Opens a regular file and keeps it open.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let (file, metadata) = open(path)?;
        let file = Self {
            path: path.to_owned(),
            id: id(&metadata),
            len: metadata.len(),
            modified: metadata.modified().ok(),
            #[cfg(unix)]
            map: Err(io::ErrorKind::OutOfMemory.into()),
            hints_wait: false,
            kept: Some(Arc::new(file)),
            again: PathBuf::new(),
        };
        // If a file was not downloaded, Git LFS leaves a pointer in its place, shorter than 1024 bytes (git-lfs:
        // `docs/spec.md`).
        const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\n";
        if (POINTER.len() as u64..1024).contains(&file.len) && file.header(0, POINTER.len())? == POINTER {
            let (wanted, found) = ("the file itself", "a pointer of Git LFS");
            return Err(file.bad("not downloaded", None, wanted, found, "download it with `git lfs pull`"));
        }
        Ok(file)
    }

    /// Whether the address space had room for the mapping.
    #[cfg(unix)]
    pub(crate) fn has_room(&self) -> bool {
        self.map.as_ref().err().is_none_or(|error| error.kind() != io::ErrorKind::OutOfMemory)
    }

    /// Maps the first `bytes` bytes without touching them.
    #[cfg(unix)]
    pub(crate) fn mapped(&self, bytes: u64) -> io::Result<memmap2::MmapRaw> {
        // On a 32-bit system a file may be larger than the address space.
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let file = self.kept.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let map = memmap2::MmapOptions::new().len(len).map_raw_read_only(file)?;
        // Without this advice, the kernel may read megabytes around each page that is touched before it was hinted.
        let _ = map.advise(memmap2::Advice::Random);
        Ok(map)
    }

    /// Returns the error of a system call on this file.
    pub(crate) fn failed(&self, call: &'static str, source: io::Error) -> Error {
        Error::System { path: self.path.clone(), call, source }
    }

    /// Whether the file has the length and the time of change with which it was opened. `false` if that is unknown.
    pub(crate) fn is_unchanged(&self) -> bool {
        let same = |now: Metadata| now.len() == self.len && now.modified().ok() == self.modified;
        self.modified.is_some() && self.kept.as_ref().is_some_and(|file| file.metadata().is_ok_and(same))
    }

    /// Fails if the file was written to since it was opened, because its header may have changed,
    /// or if its metadata cannot be read. A file that is shorter passes. Does nothing for a
    /// file that is not kept open: [`file`](Self::file) checks such a file at each use.
    pub(crate) fn check_unchanged(&self) -> Result<(), Error> {
        let Some(file) = &self.kept else { return Ok(()) };
        self.check(&file.metadata().map_err(|source| Error::opening(&self.path, source))?)
    }

    /// Closes the file; each later use opens it again. Does nothing if its path cannot be made
    /// absolute, and on systems where the crate cannot check that it opens the same file again.
    pub(crate) fn give_back(&mut self) {
        // Keep an absolute path: the program may change its working directory.
        if let (true, Ok(path)) = (cfg!(unix), std::path::absolute(&self.path)) {
            (self.kept, self.again) = (None, path);
        }
    }

    /// Returns the open file. Opens it again if [`give_back`](Self::give_back) has closed it.
    pub(crate) fn file(&self) -> Result<Arc<File>, Error> {
        if let Some(file) = &self.kept {
            return Ok(file.clone());
        }
        let (file, metadata) = open(&self.again)?;
        self.check(&metadata).map(|()| Arc::new(file))
    }

    /// Fails if `found` belongs to another file or has another time of change. A file that is shorter passes: its
    /// bytes may be those from before a truncation, which sets the time too. Reading past its end returns
    /// [`Error::Truncated`].
    fn check(&self, found: &Metadata) -> Result<(), Error> {
        let written = found.len() >= self.len && found.modified().ok() != self.modified;
        if id(found) == self.id && !written {
            Ok(())
        } else {
            Err(Error::Replaced { path: self.path.clone() })
        }
    }

    /// Fills `out` with the bytes from `start` on.
    pub(crate) fn read_exact(&self, out: &mut [u8], start: u64) -> Result<(), Error> {
        let file = self.file()?;
        self.read_exact_by(out, start, |out, offset| read_at(&file, out, offset))
    }

    /// Fills `out` as [`read_exact`](Self::read_exact) does, with calls of `read_at`.
    pub(crate) fn read_exact_by(
        &self,
        out: &mut [u8],
        start: u64,
        mut read_at: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    ) -> Result<(), Error> {
        let mut found = 0;
        while found < out.len() {
            let offset = start + found as u64;
            READ_CALLS.with(|calls| calls.set(calls.get() + 1));
            match read_at(&mut out[found..], offset) {
                Ok(0) => {
                    let (wanted, found) = (out.len() as u64, found as u64);
                    return Err(Error::Truncated { path: self.path.clone(), offset, wanted, found });
                }
                // A short read is no error: Linux reads at most 2 GiB in a call.
                Ok(bytes) => found += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(Error::Read { path: self.path.clone(), offset, source }),
            }
        }
        Ok(())
    }

    /// Fails if a header needs `wanted` bytes of the file and there are only `found`.
    pub(crate) fn check_end(&self, wanted: u64, found: u64) -> Result<(), Error> {
        if wanted <= found {
            return Ok(());
        }
        Err(self.bad("ends inside its header", None, format_args!("at least {wanted} bytes"), found, ""))
    }

    /// Makes an [`Error::Format`] about this file.
    pub(crate) fn bad(
        &self,
        problem: &'static str,
        offset: Option<u64>,
        wanted: impl Display,
        found: impl Display,
        advice: &'static str,
    ) -> Error {
        let (path, wanted, found) = (self.path.clone(), wanted.to_string().into(), found.to_string().into());
        Error::Format { path, offset, problem, wanted, found, advice }
    }

    /// Reads the bytes `start..start + len` of the header. Checks that the file has these bytes before it allocates
    /// memory.
    pub(crate) fn header(&self, start: usize, len: usize) -> Result<Vec<u8>, Error> {
        self.header_within(&(0..self.len), start as u64, len)
    }

    /// Reads the bytes `start..start + len` of a header that is in the part `part` of the file.
    pub(crate) fn header_within(&self, part: &Range<u64>, start: u64, len: usize) -> Result<Vec<u8>, Error> {
        let start = part.start.saturating_add(start);
        self.check_end(start.saturating_add(len as u64), part.end)?;
        let mut bytes = vec![0; len];
        self.read_exact(&mut bytes, start)?;
        Ok(bytes)
    }
}

fn id(metadata: &Metadata) -> [u64; 2] {
    #[cfg(unix)]
    return [std::os::unix::fs::MetadataExt::dev(metadata), std::os::unix::fs::MetadataExt::ino(metadata)];
    #[cfg(not(unix))]
    {
        let _ = metadata;
        [0; 2]
    }
}

/// Opens a regular file and returns its metadata. Refuses anything else, without opening it if the
/// path does not change meanwhile.
fn open(path: &Path) -> Result<(File, Metadata), Error> {
    let regular = |metadata: Metadata| match special(&metadata) {
        Some(found) => Err(Error::NotAFile { path: path.to_owned(), found }),
        None => Ok(metadata),
    };
    let failed = |source| Error::opening(path, source);
    // Check what the file is before opening it: opening a FIFO wakes its writer, opening a tape drive can move it.
    regular(std::fs::metadata(path).map_err(failed)?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    // This flag keeps the open from blocking if a FIFO has replaced the file since the check. On a
    // regular file, the flag matters only if another process, such as a file server, holds a lease:
    // the open then fails with EWOULDBLOCK (open(2), fcntl(2)). The code below opens it again
    // without the flag, to wait for the lease. The open of a FIFO never fails so.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => File::open(path),
        file => file,
    };
    let file = file.map_err(failed)?;
    let metadata = regular(file.metadata().map_err(failed)?)?;
    Ok((file, metadata))
}

/// Converts at most 8 bytes to a number, little-endian.
pub(crate) fn little(bytes: &[u8]) -> u64 {
    let cut = |_| bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
    // A whole number is one load.
    bytes.try_into().map_or_else(cut, u64::from_le_bytes)
}

/// Returns what the path names if it is not a regular file.
fn special(metadata: &Metadata) -> Option<&'static str> {
    #[cfg(unix)]
    use std::os::unix::fs::FileTypeExt;
    match metadata.file_type() {
        kind if kind.is_file() => None,
        kind if kind.is_dir() => Some("directory"),
        #[cfg(unix)]
        kind if kind.is_fifo() => Some("FIFO"),
        #[cfg(unix)]
        kind if kind.is_socket() => Some("socket"),
        _ => Some("device"),
    }
}

/// One read at an offset; it does not depend on the file's cursor.
#[cfg(unix)]
pub(crate) fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

/// One read at an offset. It moves the file's cursor, but no code here uses the cursor.
#[cfg(windows)]
pub(crate) fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}
