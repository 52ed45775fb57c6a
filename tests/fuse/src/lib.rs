//! A file system in memory. It counts its calls, and at one of them delays, fails, truncates or writes less.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request,
    TimeOrNow, WriteFlags,
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
    /// From this call on, no file is found: its lookup fails.
    Lost,
    /// A write takes half of the bytes.
    Short,
    /// A write takes half of the bytes, and the disk refuses the next one, which starts inside of a block.
    Odd,
}

/// A call of the kernel. Those that change nothing name a file, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// Finds the file by its name.
    Lookup(usize),
    /// Asks for its length.
    Attributes(usize),
    /// Opens it.
    Open(usize),
    /// Reads from this offset.
    Read(usize, u64),
    /// Changes a file or a folder, by the call with this name.
    Change(&'static str),
}

impl Call {
    /// The file named by the call.
    #[must_use]
    pub const fn file(self) -> Option<usize> {
        match self {
            Self::Lookup(file) | Self::Attributes(file) | Self::Open(file) | Self::Read(file, _) => {
                Some(file)
            }
            Self::Change(_) => None,
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
    /// As well, and so does every change. Only opens and changes are counted.
    Changing,
}

/// Files named `0.bin`, `1.bin` and so on, mounted until this is dropped.
pub struct Mounted {
    shared: Arc<Mutex<State>>,
    _session: BackgroundSession,
}

#[derive(Default)]
struct State {
    /// The files and folders by their inodes, without the root.
    nodes: BTreeMap<u64, Node>,
    /// How many of them were made so far.
    made: u64,
    changing: bool,
    calls: Vec<Call>,
    /// The number of a call, and its fault.
    fault: Option<(usize, Fault)>,
    /// The call at which the fault occurred.
    happened: Option<Call>,
    holding: bool,
    held: Vec<Box<dyn FnOnce() + Send>>,
}

struct Node {
    parent: INodeNo,
    name: OsString,
    kind: FileType,
    data: Vec<u8>,
}

impl Mounted {
    /// Mounts files of these contents at a folder. `background` is the maximum number of reads in flight that nobody
    /// waits for.
    ///
    /// # Errors
    ///
    /// The system's error, if it has no FUSE or the user may not mount.
    pub fn new(at: &Path, files: Vec<Vec<u8>>, caching: Caching, background: u16) -> io::Result<Self> {
        let mut state = State { changing: caching == Caching::Changing, ..State::default() };
        for (file, data) in files.into_iter().enumerate() {
            state.make(INodeNo::ROOT, format!("{file}.bin").as_ref(), FileType::RegularFile, data);
        }
        let mut options = Config::default();
        let mode = if state.changing { MountOption::RW } else { MountOption::RO };
        options.mount_options = vec![mode, MountOption::FSName("twinbuf-fuse".into())];
        let shared = Arc::new(Mutex::new(state));
        let system = System { shared: shared.clone(), caching, background };
        let session = fuser::spawn_mount(system, at, &options)?;
        Ok(Self { shared, _session: session })
    }

    /// Makes `fault` occur after this many more calls.
    pub fn fail_after(&self, calls: usize, fault: Fault) {
        let mut state = lock(&self.shared);
        state.fault = Some((state.calls.len() + calls, fault));
    }

    /// Lets no fault occur from now on. Returns the call at which the last one occurred, if it has.
    pub fn heal(&self) -> Option<Call> {
        let mut state = lock(&self.shared);
        state.fault = None;
        state.happened.take()
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

/// The inode of the first file. The root has the one before.
const FIRST: u64 = 2;
/// The kernel keeps no names and attributes: it asks each time.
const TTL: Duration = Duration::ZERO;

/// The index of a file.
const fn file(inode: INodeNo) -> usize {
    (inode.0 - FIRST) as usize
}

impl State {
    /// Counts a call and applies its fault, if any. Returns whether a write takes half of the bytes.
    fn count(&mut self, call: Call) -> Result<bool, Errno> {
        if matches!((self.fault, call), (Some((at, Fault::Lost)), Call::Lookup(_)) if at <= self.calls.len())
        {
            return Err(Errno::EIO);
        }
        if self.changing && !matches!(call, Call::Open(_) | Call::Change(_)) {
            return Ok(false);
        }
        let number = self.calls.len();
        self.calls.push(call);
        match self.fault {
            Some((at, fault)) if at == number => {
                self.happened = Some(call);
                match (fault, call.file()) {
                    (Fault::Error(number), _) => return Err(Errno::from_i32(number)),
                    (Fault::Short | Fault::Odd, _) => return Ok(true),
                    (Fault::Truncate(bytes), Some(file)) => self.data(FIRST + file as u64).truncate(bytes),
                    (Fault::Truncate(_), None) | (Fault::Lost, _) => {}
                    (Fault::Delay, _) => self.holding = true,
                }
            }
            Some((at, Fault::Odd)) if at + 1 == number && call == Call::Change("write") => {
                return Err(Errno::EINVAL);
            }
            _ => {}
        }
        Ok(false)
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> Option<INodeNo> {
        let found = |(_, node): &(&u64, &Node)| node.parent == parent && node.name == name;
        self.nodes.iter().find(found).map(|(inode, _)| INodeNo(*inode))
    }

    fn make(&mut self, parent: INodeNo, name: &OsStr, kind: FileType, data: Vec<u8>) -> FileAttr {
        let inode = FIRST + self.made;
        self.made += 1;
        self.nodes.insert(inode, Node { parent, name: name.into(), kind, data });
        self.attributes(INodeNo(inode))
    }

    fn data(&mut self, inode: u64) -> &mut Vec<u8> {
        &mut self.nodes.get_mut(&inode).expect("a file that is there").data
    }

    /// What the kernel is told of a file or a folder.
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let node = self.nodes.get(&inode.0);
        let size = node.map_or(0, |node| node.data.len() as u64);
        FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: node.map_or(FileType::Directory, |node| node.kind),
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

struct System {
    shared: Arc<Mutex<State>>,
    caching: Caching,
    background: u16,
}

impl System {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared)
    }

    /// Closing does not wait for an answer: a killed process closes its files when nobody is left to answer.
    fn flags(&self) -> FopenFlags {
        match self.caching {
            Caching::Pages => FopenFlags::FOPEN_NOFLUSH,
            _ => FopenFlags::FOPEN_NOFLUSH | FopenFlags::FOPEN_DIRECT_IO,
        }
    }
}

fn answer(result: Result<bool, Errno>, reply: ReplyEmpty) {
    match result {
        Ok(_) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for System {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |nearest| io::Error::other(format!("wanted {}, found {nearest}", self.background));
        config.set_max_background(self.background).map_err(refused)?;
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut state = self.state();
        let Some(inode) = state.find(parent, name) else { return reply.error(Errno::ENOENT) };
        match state.count(Call::Lookup(file(inode))) {
            Ok(_) => reply.entry(&TTL, &state.attributes(inode), Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let mut state = self.state();
        let counted =
            if inode == INodeNo::ROOT { Ok(false) } else { state.count(Call::Attributes(file(inode))) };
        match counted {
            Ok(_) => reply.attr(&TTL, &state.attributes(inode)),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut state = self.state();
        if let Err(error) = state.count(Call::Change("setattr")) {
            return reply.error(error);
        }
        if let (Some(size), true) = (size, state.nodes.contains_key(&inode.0)) {
            state.data(inode.0).resize(size as usize, 0);
        }
        reply.attr(&TTL, &state.attributes(inode));
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let mut state = self.state();
        match state.count(Call::Change("mkdir")) {
            Ok(_) => {
                let made = state.make(parent, name, FileType::Directory, Vec::new());
                reply.entry(&TTL, &made, Generation(0));
            }
            Err(error) => reply.error(error),
        }
    }

    fn create(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        let mut state = self.state();
        match state.count(Call::Change("create")) {
            Ok(_) => {
                let made = state.make(parent, name, FileType::RegularFile, Vec::new());
                reply.created(&TTL, &made, Generation(0), FileHandle(0), self.flags());
            }
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.state().count(Call::Open(file(inode))) {
            Ok(_) => reply.opened(FileHandle(0), self.flags()),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(&self, _: &Request, inode: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let state = self.state();
        let entries = state.nodes.iter().filter(|(_, node)| node.parent == inode);
        for (number, (&inode, node)) in (1..).zip(entries).skip(offset as usize) {
            if reply.add(INodeNo(inode), number, node.kind, &node.name) {
                break;
            }
        }
        reply.ok();
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
        let mut state = self.state();
        if let Err(error) = state.count(Call::Read(file(inode), offset)) {
            return reply.error(error);
        }
        let bytes = state.data(inode.0);
        let start = bytes.len().min(offset as usize);
        let bytes = bytes[start..bytes.len().min(start + size as usize)].to_vec();
        if state.holding {
            state.held.push(Box::new(move || reply.data(&bytes)));
        } else {
            reply.data(&bytes);
        }
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.state();
        match state.count(Call::Change("write")) {
            Ok(short) => {
                let bytes = if short { &bytes[..bytes.len().div_ceil(2)] } else { bytes };
                let (start, data) = (offset as usize, state.data(inode.0));
                data.resize(data.len().max(start + bytes.len()), 0);
                data[start..start + bytes.len()].copy_from_slice(bytes);
                reply.written(bytes.len() as u32);
            }
            Err(error) => reply.error(error),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        answer(self.state().count(Call::Change("fsync")), reply);
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        answer(self.state().count(Call::Change("fsyncdir")), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        other: INodeNo,
        new: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mut state = self.state();
        let counted = state.count(Call::Change("rename"));
        if let (Ok(_), Some(from)) = (&counted, state.find(parent, name)) {
            let replaced = state.find(other, new);
            replaced.and_then(|inode| state.nodes.remove(&inode.0));
            let node = state.nodes.get_mut(&from.0).expect("just found");
            (node.parent, node.name) = (other, new.into());
        }
        answer(counted, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut state = self.state();
        let counted = state.count(Call::Change("unlink"));
        if let (Ok(_), Some(inode)) = (&counted, state.find(parent, name)) {
            state.nodes.remove(&inode.0);
        }
        answer(counted, reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.unlink(request, parent, name, reply);
    }

    /// Kernels before 5.16 ask once.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
}
