//! Writes files behind a loop: the caller fills one buffer while a thread writes the other.
//!
//! It is for embeddings and activations of a data set, logs, and shards that a simulator makes. [`Writer::npy`] makes an
//! array for numpy and for [`Records::open_npy`](crate::Records::open_npy), [`Writer::raw`] a file of rows without a
//! header for [`Records::open`](crate::Records::open).
//!
//! ```
//! use twinbuf::mmap::{Cut, DType};
//! use twinbuf::write::Writer;
//! # use twinbuf::Records;
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("emb.npy");
//! let mut out = Writer::npy(&path, DType::F32, &[768]).build()?;
//! for batch in 0..3_u8 {
//!     let rows = out.slot::<f32>(256)?; // waits only while both buffers are being written
//!     rows.fill(batch.into()); // the model
//!     out.commit(256);
//! }
//! println!("{}", out.finish()?); // written, synced, renamed
//!
//! assert_eq!(Records::open_npy([&path], Cut::Rows)?.len(), 3 * 256);
//! # Ok::<(), twinbuf::BoxError>(())
//! ```
//!
//! # The file is whole, or not there
//!
//! The bytes go to a temporary file, or to a folder for shards, next to the target: `.NAME.*.twinbuf-tmp`.
//! [`finish`](Writer::finish) writes the rest, syncs, and gives the file its name with one rename, in place of an older
//! file or link; it keeps the permissions of an older file. Without `finish`, after an error, or if the process is
//! killed, the name is as it was. The drop of a writer removes the temporary file, after the write in progress. If the
//! disk hangs, the drop waits at most 10 s ([`discard_timeout`](Writer::discard_timeout): as long as you say), and then
//! leaves the thread, which removes the file when the disk answers. All other calls wait without a limit. On Unix, if
//! the file system has locks, the next writer of the name removes what a killed process left, and a second writer of a
//! name is refused while the first one lives, or its thread, or a process that was forked from it meanwhile. Neither
//! happens if the next writer cannot list the folder or open the temporary file, for example another user's. In a
//! process forked after `build`, the drop of the writer removes nothing.
//!
//! A relative path is relative to the working folder in which the writer is built. If a folder above the file is
//! renamed before `finish`, then `finish` fails, or a call before it, and the temporary file stays.
//!
//! # Errors
//!
//! If the disk is full or fails, a later call returns [`Error::Write`] with path and offset,
//! [`finish`](Writer::finish) at the latest. Nothing more is written: `slot`, `write` and `finish` then return the
//! same error. A file that grows past `RLIMIT_FSIZE` causes such an error, not a signal.
//!
//! # Limits
//!
//! One thread writes one file at a time. All rows have the same size. Numbers are written as they are in memory; `.npy`
//! headers of types with several bytes say little-endian. On Linux, slots go past the page cache (`O_DIRECT`) where the
//! file system allows it, except a last one that ends inside of a block of 4096 bytes.

use std::fmt;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytemuck::{AnyBitPattern, NoUninit};
use twinbuf_core::TryAcquireError;
use twinbuf_mmap::{Buffer, DType};

use crate::error::Error;
pub use crate::error::Failure;
use crate::observe::display::{size, time};
use crate::pipe::END_LIMIT;
use crate::pipe::memory::{check_memory, too_large};
use crate::pipe::turn::FOREVER;
use crate::sync::{Consumer, HeapRing, Producer, thread};
use crate::temporary::Temporary;
pub use crate::temporary::check_size;
use crate::thread::{ForkGuard, name};

/// Offsets, lengths and addresses of direct writes are multiples of this number of bytes: disks have blocks of 512 or 4096
/// bytes. It is also the size of the header of a `.npy` file, so that rows start at a block.
const BLOCK: usize = 4096;

/// Builds a [`Writer`]. [`Writer::npy`] and [`Writer::raw`] return it.
///
/// ```
/// use twinbuf::mmap::files;
/// use twinbuf::write::Writer;
/// # use twinbuf::Records;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("tokens");
/// let mut out = Writer::raw(&path, 4).shard_bytes(1 << 20).build()?; // the folder `tokens`
/// std::io::copy(&mut &vec![7; 3 << 20][..], &mut out)?;
/// assert_eq!(out.finish()?.files, 3);
/// assert_eq!(Records::open(files([&path])?, 4)?.len(), 3 << 18);
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct WriterBuilder {
    path: PathBuf,
    /// `None` if there is no header.
    dtype: Option<DType>,
    shape: Vec<usize>,
    /// Bytes of a row. 0 if the number overflows.
    row: usize,
    depth: usize,
    slot_bytes: usize,
    /// The most bytes of rows in a file. `None` if there is only one.
    shard_bytes: Option<u64>,
}

impl WriterBuilder {
    fn new(path: &Path, dtype: Option<DType>, row: &[usize]) -> Self {
        let (path, shape, element) = (path.to_path_buf(), row.to_vec(), dtype.map_or(1, DType::size));
        let row = row.iter().try_fold(element, |bytes, &axis| bytes.checked_mul(axis)).unwrap_or(0);
        Self { path, dtype, shape, row, depth: 2, slot_bytes: 4 << 20, shard_bytes: None }
    }

    /// Sets the number of slots, at least 1. Default: 2, one to fill and one to write. More slots smooth out a disk
    /// whose speed varies.
    pub fn depth(mut self, slots: usize) -> Self {
        self.depth = slots;
        self
    }

    /// Sets the size of a slot in bytes, rounded up to blocks of 4096 bytes: the most that one write has. What
    /// [`Writer::slot`] returns is at least 4096 bytes smaller. Default: 4 MiB. A slot is never smaller than one row
    /// and 4096 bytes.
    pub fn slot_bytes(mut self, bytes: usize) -> Self {
        self.slot_bytes = bytes;
        self
    }

    /// Writes shards of at most `bytes` bytes of rows, rounded down to whole rows and whole blocks of 4096 bytes.
    /// Default: one file. With shards, the path names a new folder. They are `00000.npy` and so on (`.bin` for raw
    /// rows): `Records::open_npy(files([path])?, cut)` opens them as one data set.
    ///
    /// `build` refuses a path that exists: remove it first. On Unix, `finish` replaces an empty folder that was made
    /// after `build`.
    pub fn shard_bytes(mut self, bytes: u64) -> Self {
        self.shard_bytes = Some(bytes);
        self
    }

    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: an option has an invalid value, numpy has no such type or shape, rows have no bytes, the slots
    ///   do not fit the memory, or the path is that of a folder or, without shards, ends in `/` or `/.`, or, with
    ///   shards, exists.
    /// - [`Error::Write`]: the temporary file cannot be created, another writer of the path has not finished, or the path is
    ///   that of a device or pipe.
    /// - [`Error::Spawn`]: the thread could not be started.
    pub fn build(mut self) -> Result<Writer, Error> {
        let (path, row, depth, shard) = (self.path.clone(), self.row, self.depth, self.shard_bytes);
        // The smallest shard of whole rows in whole blocks: the least common multiple of a row and 2^12 bytes.
        let whole = (row as u64).wrapping_mul(BLOCK as u64 >> row.trailing_zeros().min(12));
        self.shard_bytes = shard.map(|bytes| bytes - bytes.checked_rem(whole).unwrap_or(bytes));
        let named = self.dtype.is_none() || self.header(u64::MAX).is_some();
        let fits = path.file_name().is_some_and(|name| match shard {
            // Without what is behind the name: a link to nothing has the name, too.
            Some(_) => path.with_file_name(name).symlink_metadata().is_err(),
            // A path with more behind the name, such as `/`, would fail when the file gets it, after all was written.
            None => !path.is_dir() && path.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes()),
        });
        let least = format!("at least {whole} bytes: whole rows in whole blocks of 4096 bytes");
        let checks = [
            ("path", fits, "a file, or for shards a new folder"),
            ("row", row > 0 && named, "at least one byte, and a type and a shape that numpy has"),
            ("depth", depth > 0, "at least 1"),
            ("shard_bytes", self.shard_bytes != Some(0), least.as_str()),
        ];
        if let Some((option, _, wanted)) = checks.into_iter().find(|(_, is_valid, _)| !is_valid) {
            let (row, most) = (&self.shape, shard.unwrap_or(0));
            let found = format!("{path:?}, row {row:?}, depth {depth}, shard_bytes {most}");
            return Err(Error::option(option, wanted, found));
        }
        // A row and the `tail` fit.
        let slot = self.slot_bytes.max(row.saturating_add(BLOCK));
        let slot = slot.checked_next_multiple_of(BLOCK).unwrap_or(usize::MAX);
        let sum = format!("{depth} slots of {slot} bytes");
        check_memory("depth", depth, slot, &sum)?;
        let slots = Buffer::several(&vec![slot; depth]).ok_or_else(|| too_large(&sum))?;
        let why = |call, e: io::Error| Failure { path: path.clone(), call, offset: 0, source: e.into() };
        // Absolute: the program may change its working folder before the file gets its name. A look for other writers takes
        // microseconds, and is not waited for longer than 200 ms.
        let made =
            std::path::absolute(&path).and_then(|to| Temporary::create(to, shard.is_some())?.alone(200));
        let temporary = made.map_err(|error| Error::Write(why("create", error)))?;
        let failed = why("write", io::Error::other("the writing thread is in another process, or panicked"));
        let (discard, discarded) = HeapRing::new(vec![()]).into_handles();
        let disk = Disk { to: self, files: 0, file: None, bytes: 0, temporary, discarded };
        let slots = slots.into_iter().map(|buffer| (Some(buffer), 0));
        let (producer, parts) = HeapRing::new(slots.collect::<Vec<Part>>()).into_handles();
        let builder = thread::Builder::new().name(name(None, "write"));
        let thread = builder.spawn(move || disk.run(parts)).map_err(Error::Spawn)?;
        let (running, started) = (Some(ForkGuard::new((producer, discard, thread))), Instant::now());
        let (tail, current, given, filled, bytes, waiting) = (Vec::new(), None, 0, 0, 0, Duration::ZERO);
        Ok(Writer { running, failed, row, slot, tail, current, given, filled, bytes, started, waiting })
    }

    /// Returns the header of an array of `rows` rows as numpy writes it (`numpy.lib.format`), but `BLOCK` bytes wide.
    /// `None` if numpy has no name for the type, or if the shape does not fit.
    fn header(&self, rows: u64) -> Option<Vec<u8>> {
        // numpy has at most 64 axes: those of a row, and that of the rows.
        let dtype = self.dtype.filter(|_| self.shape.len() < 64)?;
        let (name, size) = (dtype.to_string(), dtype.size());
        let kind = name.get(..1).filter(|_| !name.contains("bf") && !name.contains("f8"))?;
        let order = if size == 1 { '|' } else { '<' };
        let axes: String = self.shape.iter().map(|axis| format!(" {axis},")).collect();
        let text =
            format!("{{'descr': '{order}{kind}{size}', 'fortran_order': False, 'shape': ({rows},{axes}), }}");
        // Before the text: magic, version 1.0, and the length of the text.
        let text = format!("{text:0$}\n", BLOCK - 11);
        (text.len() == BLOCK - 10).then(|| [b"\x93NUMPY\x01\x00\xf6\x0f", text.as_bytes()].concat())
    }
}

/// Writes rows of one size to a file, or to shards, on a separate thread; see the [module](self).
///
/// [`slot`](Self::slot) returns memory to fill in place. [`io::Write`] copies bytes. A program may use both.
pub struct Writer {
    /// `None` after the end.
    running: Option<ForkGuard<Running>>,
    /// Why nothing more can be written, if `running` is `None`.
    failed: Failure,
    /// Bytes of a row, and of a slot.
    row: usize,
    slot: usize,
    /// The block that the last slot ended in. The next one starts with it.
    tail: Vec<u8>,
    /// The memory that is being filled, taken out of the next free slot.
    current: Option<Buffer>,
    /// The size of what `slot` returned last. 0 after an error.
    given: usize,
    /// Bytes in the slot that are to be written, `tail` included.
    filled: usize,
    /// Bytes of rows in all.
    bytes: u64,
    started: Instant,
    waiting: Duration,
}

debug!([] Writer[], |writer| row: writer.row, bytes: writer.bytes, running: writer.running.is_some());

impl Writer {
    /// Returns a builder for a `.npy` file. `row` is the shape of a row, empty for one element. The header takes 4096
    /// bytes.
    pub fn npy(path: impl AsRef<Path>, dtype: DType, row: &[usize]) -> WriterBuilder {
        WriterBuilder::new(path.as_ref(), Some(dtype), row)
    }

    /// Returns a builder for a file without a header, with rows of `row_bytes` bytes.
    pub fn raw(path: impl AsRef<Path>, row_bytes: usize) -> WriterBuilder {
        WriterBuilder::new(path.as_ref(), None, &[row_bytes])
    }

    /// Returns memory for the next `rows` rows, with arbitrary content. Fill it, and then call [`commit`](Self::commit).
    /// Waits while all slots are being written.
    ///
    /// # Errors
    ///
    /// - [`Error::Write`]: an earlier write failed, or the writer was built in another process than this one: then the slot
    ///   that the other process was filling may still be returned. Nothing of this process is written.
    /// - [`Error::Option`]: the rows are larger than a slot less 4096 bytes, or not a whole number of aligned `T`.
    pub fn slot<T: AnyBitPattern + NoUninit>(&mut self, rows: usize) -> Result<&mut [T], Error> {
        let (row, bytes, most) = (self.row, rows.saturating_mul(self.row), self.slot - BLOCK);
        self.given = 0;
        if self.slot - self.filled < bytes {
            self.hand_over(false)?;
        }
        self.ready()?;
        let slot = self.current.as_mut().and_then(|buffer| buffer[self.filled..].get_mut(..bytes));
        let slot = slot.filter(|_| bytes <= most).and_then(|slot| bytemuck::try_cast_slice_mut(slot).ok());
        self.given = slot.as_ref().map_or(0, |_| bytes);
        slot.ok_or_else(|| {
            let wanted = format!("at most {most} bytes of whole {}", std::any::type_name::<T>());
            Error::option("slot_bytes", wanted, format!("{rows} rows of {row} bytes"))
        })
    }

    /// Appends the first `rows` rows of the last [`slot`](Self::slot). Without this call they are not written. If the disk
    /// fails, a later call returns the error.
    ///
    /// # Panics
    ///
    /// Panics if the slot has fewer rows. It has none before the first `slot`, after an error of `slot`, and after a
    /// `commit` or a `write`.
    pub fn commit(&mut self, rows: usize) {
        let (bytes, given) = (rows.saturating_mul(self.row), self.given);
        assert!(bytes <= given, "wanted {rows} rows of {} bytes, found a slot of {given} bytes", self.row);
        let _ = self.appended(bytes, given); // the error is kept
    }

    /// Writes the rest, syncs the files, and gives them their name. Returns what was written.
    ///
    /// # Errors
    ///
    /// - [`Error::Write`]: a write failed, now or before, or the writer was built in another process.
    /// - [`Error::Option`]: the last row is not whole.
    ///
    /// The name is then as it was.
    pub fn finish(mut self) -> Result<Written, Error> {
        self.hand_over(true)?;
        let (row, bytes, start) = (self.row as u64, self.bytes, Instant::now());
        if bytes % row != 0 {
            let wanted = format!("whole rows of {row} bytes");
            return Err(Error::option("row", wanted, format!("{bytes} bytes")));
        }
        let (files, busy) = self.end(true, FOREVER)?;
        let (wall, waiting) = (self.started.elapsed(), self.waiting + start.elapsed());
        Ok(Written { rows: bytes / row, bytes, files, wall, waiting, busy })
    }

    /// Removes what was written, as a drop does, but waits at most `timeout` for the write in progress.
    pub fn discard_timeout(mut self, timeout: Duration) {
        let _ = self.end(false, timeout);
    }

    /// Returns the memory to fill. Waits for a free slot if there is none.
    fn ready(&mut self) -> Result<&mut Buffer, Error> {
        if self.current.is_none() {
            let start = Instant::now();
            let running = self.running.as_mut().filter(|running| !running.is_foreign());
            self.current = running.and_then(|running| running.0.acquire().ok()?.0.take());
            self.waiting += start.elapsed();
            let Some(buffer) = &mut self.current else { return Err(self.end(false, FOREVER).unwrap_err()) };
            buffer[..self.tail.len()].copy_from_slice(&self.tail);
        }
        Ok(self.current.as_mut().expect("set above"))
    }

    /// Counts bytes that were filled. Hands the slot over if less than `next` bytes fit.
    fn appended(&mut self, bytes: usize, next: usize) -> Result<(), Error> {
        (self.given, self.filled) = (0, self.filled + bytes);
        self.bytes += bytes as u64;
        if self.slot - self.filled < next { self.hand_over(false) } else { Ok(()) }
    }

    /// Hands the whole blocks of the slot over to the thread, or all of it at the end.
    fn hand_over(&mut self, ends: bool) -> Result<(), Error> {
        let (filled, len) = (self.filled, if ends { self.filled } else { self.filled / BLOCK * BLOCK });
        self.tail = self.ready()?[len..filled].to_vec();
        self.filled = self.tail.len();
        let part = (self.current.take(), len);
        // If the thread has ended, the next call says why.
        let _ = self.running.as_mut().map(|running| running.0.fill(|slot| *slot = part));
        Ok(())
    }

    /// Ends the thread, and waits for it; if it does not finish, at most for `limit`. After an error, returns it again.
    fn end(&mut self, finish: bool, limit: Duration) -> Result<(u64, Duration), Error> {
        self.current = None;
        let running = self.running.take().and_then(ForkGuard::into_inner);
        let ended = running.and_then(|(producer, mut discard, thread)| {
            finish.then(|| producer.finish()); // otherwise it is only dropped
            let is_told = !finish && discard.fill(|()| ()).is_ok();
            // A thread that is left behind owns all that it uses: its file, and its sides of the rings.
            let is_left = is_told && matches!(discard.acquire_timeout(limit), Err(TryAcquireError::Full));
            if is_left { None } else { thread.join().ok() }
        });
        let ended = ended.unwrap_or_else(|| Err(self.failed.clone()));
        ended.inspect_err(|failure| self.failed = failure.clone()).map_err(Error::Write)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.end(false, END_LIMIT);
    }
}

/// Copies bytes. An error contains an [`Error`].
impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (start, buffer) = (self.filled, self.ready().map_err(io::Error::other)?);
        let len = bytes.len().min(buffer.len() - start);
        buffer[start..start + len].copy_from_slice(&bytes[..len]);
        self.appended(len, 1).map(|()| len).map_err(io::Error::other)
    }

    /// Does nothing: the file has no name before [`finish`](Writer::finish).
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a [`Writer`] has written, and where the time went. Displayed as one line.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Written {
    /// The number of rows.
    pub rows: u64,
    /// The size of the rows in bytes, without headers.
    pub bytes: u64,
    /// The number of files: 1, or that of the shards.
    pub files: u64,
    /// The time from the creation of the writer to the end of [`finish`](Writer::finish).
    pub wall: Duration,
    /// The time that the caller waited for a free slot, and in `finish`.
    pub waiting: Duration,
    /// The time that the thread wrote and synced.
    pub busy: Duration,
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rows, {}, {} files in {}: ", self.rows, size(self.bytes), self.files, time(self.wall))?;
        write!(f, "train waiting {}, write busy {}", time(self.waiting), time(self.busy))
    }
}

/// A slot of the ring: its memory, `None` while the caller fills it, and the number of bytes to write. Only the last part
/// may end inside of a block.
type Part = (Option<Buffer>, usize);

/// The ring; one that is filled to discard what is not written yet, and whose consumer the thread drops at its end; and
/// the thread, which returns the number of files, and how long it was busy.
type Running =
    (Producer<'static, Part>, Producer<'static, ()>, thread::JoinHandle<Result<(u64, Duration), Failure>>);

/// The side of the thread.
struct Disk {
    to: WriterBuilder,
    /// The number of whole files.
    files: u64,
    /// The file that grows, and its bytes of rows.
    file: Option<File>,
    bytes: u64,
    /// Dropped after the file, whose descriptor it may need.
    temporary: Temporary,
    /// Not empty once the writer is to end without a file. Dropped last: the writer then knows that all is removed.
    discarded: Consumer<'static, ()>,
}

impl Disk {
    /// Writes all parts, and gives the files their name if the caller has finished. The drop of `self` removes the files
    /// otherwise: at an error, or if the caller has dropped the producer.
    fn run(mut self, mut parts: Consumer<'static, Part>) -> Result<(u64, Duration), Failure> {
        let mut busy = Duration::ZERO;
        while let Ok(part) = parts.recv() {
            let start = Instant::now();
            let Some(mut part) = part else {
                if self.file.is_some() || self.files == 0 {
                    self.close()?;
                }
                self.to.shard_bytes = None; // An error names the folder, and none of its shards.
                self.temporary.publish().map_err(|error| self.failed("rename", 0, error))?;
                return Ok((self.files, busy + start.elapsed()));
            };
            self.write(&mut part)?;
            busy += start.elapsed();
        }
        Ok((0, busy))
    }

    fn write(&mut self, part: &mut Part) -> Result<(), Failure> {
        let ((Some(buffer), end), mut at) = (part, 0) else { return Ok(()) };
        while at < *end && self.discarded.is_empty() {
            let room = self.to.shard_bytes.map_or(u64::MAX, |most| most - self.bytes);
            let len = usize::try_from(room).unwrap_or(usize::MAX).min(*end - at);
            self.put(&buffer[at..at + len], self.end())?;
            (self.bytes, at) = (self.bytes + len as u64, at + len);
            if len as u64 == room {
                self.close()?;
            }
        }
        Ok(())
    }

    /// The end of the file.
    fn end(&self) -> u64 {
        self.to.dtype.map_or(0, |_| BLOCK as u64) + self.bytes
    }

    /// Writes at an offset of the file. Creates the file if there is none.
    fn put(&mut self, bytes: &[u8], offset: u64) -> Result<(), Failure> {
        let file = self.file.take().map_or_else(|| File::create(self.place(&self.temporary.path)), Ok);
        let mut file = file.map_err(|error| self.failed("open", 0, error))?;
        let fits = check_size(offset + bytes.len() as u64);
        fits.map_err(|(most, error)| self.failed("write", most.max(offset), error))?;
        set_direct(&file, bytes.len() % BLOCK == 0);
        let mut written = file.seek(SeekFrom::Start(offset)).and_then(|_| file.write_all(bytes));
        let mut at = file.stream_position().unwrap_or(offset);
        // `EINVAL`: the bytes are not aligned for this disk, or a short write ended inside of a block.
        if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
            set_direct(&file, false);
            written = file.write_all(&bytes[usize::try_from(at - offset).unwrap_or(0)..]);
            at = file.stream_position().unwrap_or(at);
        }
        self.file = Some(file);
        written.map_err(|error| self.failed("write", at, error))
    }

    /// Ends the file. The header comes last, because only now the number of rows is known.
    fn close(&mut self) -> Result<(), Failure> {
        let header = self.to.header(self.bytes / self.to.row as u64);
        self.put(&header.unwrap_or_default(), 0)?;
        let synced = self.file.take().map_or(Ok(()), |file| file.sync_all());
        synced.map_err(|error| self.failed("fsync", self.end(), error))?;
        (self.files, self.bytes) = (self.files + 1, 0);
        Ok(())
    }

    /// Returns the path of the file with the number `files` if the target has the path `path`.
    fn place(&self, path: &Path) -> PathBuf {
        let end = if self.to.dtype.is_some() { "npy" } else { "bin" };
        self.to.shard_bytes.map_or(path.into(), |_| path.join(format!("{:05}.{end}", self.files)))
    }

    fn failed(&self, call: &'static str, offset: u64, source: io::Error) -> Failure {
        Failure { path: self.place(&self.to.path), call, offset, source: source.into() }
    }
}

/// Turns direct writes on or off, where the file system has them.
#[cfg(target_os = "linux")]
fn set_direct(file: &File, on: bool) {
    use std::os::fd::AsRawFd as _;
    // SAFETY: the descriptor is open as long as `file` lives; the call takes no pointer.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_DIRECT * i32::from(on)) };
}

#[cfg(not(target_os = "linux"))]
fn set_direct(_: &File, _: bool) {}
