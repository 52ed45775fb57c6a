//! A file system in memory. It counts its calls, and at one of them delays, fails or truncates.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyOpen, Request,
};

/// What happens at a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails with this number; the next one does not.
    Error(i32),
    /// The file is this many bytes long from this call on.
    Truncate(usize),
    /// This call, if it is a read, and all later reads are answered only after [`Mounted::release`].
    Delay,
}

/// A call of the kernel that names a file, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Finds the file by its name.
    Lookup(usize),
    /// Asks for its length.
    Attributes(usize),
    /// Opens it.
    Open(usize),
    /// Reads from this offset.
    Read(usize, u64),
}

impl Call {
    /// The file named by the call.
    #[must_use]
    pub const fn file(self) -> usize {
        match self {
            Self::Lookup(file) | Self::Attributes(file) | Self::Open(file) | Self::Read(file, _) => file,
        }
    }
}

/// How the kernel treats the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// With its page cache.
    Pages,
    /// Every read of the program reaches the file system.
    Nothing,
}

/// Files named `0.bin`, `1.bin` and so on, mounted until this is dropped.
#[derive(Debug)]
pub struct Mounted {
    shared: Arc<Mutex<State>>,
    _session: BackgroundSession,
}

#[derive(Default)]
struct State {
    files: Vec<Vec<u8>>,
    calls: Vec<Call>,
    /// The number of a call, and its fault.
    fault: Option<(usize, Fault)>,
    /// The call at which the fault occurred.
    happened: Option<Call>,
    holding: bool,
    held: Vec<Box<dyn FnOnce() + Send>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("calls", &self.calls).finish_non_exhaustive()
    }
}

impl Mounted {
    /// Mounts files of these contents at a folder. `background` is the maximum number of reads in flight that nobody
    /// waits for.
    ///
    /// # Errors
    ///
    /// The system's error, if it has no FUSE or the user may not mount.
    pub fn new(at: &Path, files: Vec<Vec<u8>>, caching: Caching, background: u16) -> io::Result<Self> {
        let shared = Arc::new(Mutex::new(State { files, ..State::default() }));
        let mut options = Config::default();
        options.mount_options = vec![MountOption::RO, MountOption::FSName("twinbuf-fuse".into())];
        let system = System { shared: shared.clone(), caching, background };
        let session = fuser::spawn_mount(system, at, &options)?;
        Ok(Self { shared, _session: session })
    }

    /// Makes `fault` occur after this many more calls.
    pub fn fail_after(&self, calls: usize, fault: Fault) {
        let mut state = lock(&self.shared);
        state.fault = Some((state.calls.len() + calls, fault));
    }

    /// The call at which the fault occurred, if it has.
    #[must_use]
    pub fn happened(&self) -> Option<Call> {
        lock(&self.shared).happened
    }

    /// The calls so far.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.shared).calls.clone()
    }

    /// Whether reads are waiting.
    #[must_use]
    pub fn holds(&self) -> bool {
        !lock(&self.shared).held.is_empty()
    }

    /// Answers the delayed calls, and stops delaying.
    pub fn release(&self) {
        let mut state = lock(&self.shared);
        state.holding = false;
        if matches!(state.fault, Some((_, Fault::Delay))) {
            state.fault = None;
        }
        let held = std::mem::take(&mut state.held);
        drop(state);
        held.into_iter().for_each(|answer| answer());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.release();
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

struct System {
    shared: Arc<Mutex<State>>,
    caching: Caching,
    background: u16,
}

/// The root is the first inode.
const FIRST: u64 = 2;
/// The kernel keeps no names and attributes: it asks each time.
const TTL: Duration = Duration::ZERO;

fn file(inode: INodeNo) -> Option<usize> {
    usize::try_from(u64::from(inode).checked_sub(FIRST)?).ok()
}

/// What the kernel is told of a file or a folder.
#[must_use]
pub fn attributes(inode: u64, kind: FileType, size: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(inode),
        size,
        blocks: size.div_ceil(512),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl State {
    /// Counts a call and applies its fault, if any.
    fn count(&mut self, call: Call) -> Result<(), Errno> {
        let number = self.calls.len();
        self.calls.push(call);
        match self.fault {
            Some((at, fault)) if at == number => {
                self.happened = Some(call);
                match fault {
                    Fault::Error(number) => return Err(Errno::from_i32(number)),
                    Fault::Truncate(bytes) => self.files[call.file()].truncate(bytes),
                    Fault::Delay => self.holding = true,
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn of_file(&self, file: usize) -> FileAttr {
        attributes(FIRST + file as u64, FileType::RegularFile, self.files[file].len() as u64)
    }
}

impl Filesystem for System {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |nearest| io::Error::other(format!("wanted {}, found {nearest}", self.background));
        config.set_max_background(self.background).map_err(refused)?;
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut state = lock(&self.shared);
        let index = name.to_str().and_then(|name| name.strip_suffix(".bin")?.parse().ok());
        let Some(file) = index.filter(|&file| file < state.files.len()) else {
            return reply.error(Errno::ENOENT);
        };
        match state.count(Call::Lookup(file)) {
            Ok(()) => reply.entry(&TTL, &state.of_file(file), Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let mut state = lock(&self.shared);
        let Some(file) = file(inode) else {
            return reply.attr(&TTL, &attributes(1, FileType::Directory, 0));
        };
        match state.count(Call::Attributes(file)) {
            Ok(()) => reply.attr(&TTL, &state.of_file(file)),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let Some(file) = file(inode) else { return reply.error(Errno::EISDIR) };
        // Closing does not wait for an answer: a killed process closes its files when nobody is left to answer.
        let flags = match self.caching {
            Caching::Pages => FopenFlags::FOPEN_NOFLUSH,
            Caching::Nothing => FopenFlags::FOPEN_NOFLUSH | FopenFlags::FOPEN_DIRECT_IO,
        };
        match lock(&self.shared).count(Call::Open(file)) {
            Ok(()) => reply.opened(FileHandle(0), flags),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = lock(&self.shared);
        let Some(file) = file(inode) else { return reply.error(Errno::EISDIR) };
        if let Err(error) = state.count(Call::Read(file, offset)) {
            return reply.error(error);
        }
        let bytes = &state.files[file];
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let end = start.saturating_add(size as usize).min(bytes.len());
        if state.holding {
            let bytes = bytes[start..end].to_vec();
            state.held.push(Box::new(move || reply.data(&bytes)));
        } else {
            reply.data(&bytes[start..end]);
        }
    }

    /// Kernels before 5.16 ask once.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
}
