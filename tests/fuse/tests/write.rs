//! A file system in memory that fails in turn at every call but lookups and reads. A writer's file is then whole
//! under its name, or one error comes with path and offset, and the name holds what it held before.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use twinbuf::write::{Writer, WriterBuilder};
use twinbuf::{Error, mmap};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Error(i32),
    /// A write takes half of the bytes.
    Short,
    /// A write takes half of the bytes, and the disk refuses the next one, which starts inside of a block.
    Odd,
}

struct Node {
    parent: u64,
    name: OsString,
    folder: bool,
    data: Vec<u8>,
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<u64, Node>,
    made: u64,
    calls: Vec<&'static str>,
    fault: Option<(usize, Fault)>,
}

impl State {
    /// Counts a call, and returns its fault.
    fn count(&mut self, call: &'static str) -> Result<bool, Errno> {
        self.calls.push(call);
        match self.fault {
            Some((at, Fault::Error(number))) if at + 1 == self.calls.len() => Err(Errno::from_i32(number)),
            Some((at, Fault::Odd)) if at + 2 == self.calls.len() && call == "write" => Err(Errno::EINVAL),
            Some((at, Fault::Short | Fault::Odd)) => Ok(at + 1 == self.calls.len()),
            _ => Ok(false),
        }
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> Option<u64> {
        let found = |(_, node): &(&u64, &Node)| node.parent == u64::from(parent) && node.name == name;
        self.nodes.iter().find(found).map(|(inode, _)| *inode)
    }

    fn make(&mut self, parent: INodeNo, name: &OsStr, folder: bool) -> FileAttr {
        self.made += 1;
        let inode = self.made + 1;
        self.nodes.insert(inode, Node { parent: parent.into(), name: name.into(), folder, data: Vec::new() });
        self.attributes(inode)
    }

    fn attributes(&self, inode: u64) -> FileAttr {
        let node = self.nodes.get(&inode);
        let kind =
            if node.is_none_or(|node| node.folder) { FileType::Directory } else { FileType::RegularFile };
        twinbuf_fuse::attributes(inode, kind, node.map_or(0, |node| node.data.len() as u64))
    }
}

struct System(Arc<Mutex<State>>);

const TTL: Duration = Duration::ZERO;

macro_rules! done {
    ($result:expr, $reply:expr) => {
        match $result {
            Ok(_) => $reply.ok(),
            Err(error) => $reply.error(error),
        }
    };
}

impl Filesystem for System {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let state = self.0.lock().unwrap();
        match state.find(parent, name) {
            Some(inode) => reply.entry(&TTL, &state.attributes(inode), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.0.lock().unwrap().attributes(inode.into()));
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
        let mut state = self.0.lock().unwrap();
        if let Err(error) = state.count("setattr") {
            return reply.error(error);
        }
        if let (Some(size), Some(node)) = (size, state.nodes.get_mut(&inode.into())) {
            node.data.resize(size as usize, 0);
        }
        reply.attr(&TTL, &state.attributes(inode.into()));
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let mut state = self.0.lock().unwrap();
        match state.count("mkdir") {
            Ok(_) => reply.entry(&TTL, &state.make(parent, name, true), Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn create(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        let mut state = self.0.lock().unwrap();
        match state.count("create") {
            Ok(_) => {
                let made = state.make(parent, name, false);
                reply.created(&TTL, &made, Generation(0), FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.0.lock().unwrap().count("open") {
            Ok(_) => reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(&self, _: &Request, inode: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let state = self.0.lock().unwrap();
        let entries = state.nodes.iter().filter(|(_, node)| node.parent == u64::from(inode));
        for (number, (&inode, node)) in (1..).zip(entries).skip(offset as usize) {
            if reply.add(INodeNo(inode), number, state.attributes(inode).kind, &node.name) {
                break;
            }
        }
        reply.ok();
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
        let mut state = self.0.lock().unwrap();
        match state.count("write") {
            Ok(short) => {
                let bytes = if short { &bytes[..bytes.len().div_ceil(2)] } else { bytes };
                let (start, data) = (offset as usize, &mut state.nodes.get_mut(&inode.into()).unwrap().data);
                data.resize(data.len().max(start + bytes.len()), 0);
                data[start..start + bytes.len()].copy_from_slice(bytes);
                reply.written(bytes.len() as u32);
            }
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
        let state = self.0.lock().unwrap();
        let data = &state.nodes[&u64::from(inode)].data;
        let start = data.len().min(offset as usize);
        reply.data(&data[start..data.len().min(start + size as usize)]);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        done!(self.0.lock().unwrap().count("fsync"), reply);
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        done!(self.0.lock().unwrap().count("fsyncdir"), reply);
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
        let mut state = self.0.lock().unwrap();
        let counted = state.count("rename");
        if counted.is_ok() {
            let from = state.find(parent, name).unwrap();
            let replaced = state.find(other, new);
            replaced.and_then(|inode| state.nodes.remove(&inode));
            let node = state.nodes.get_mut(&from).unwrap();
            (node.parent, node.name) = (other.into(), new.into());
        }
        done!(counted, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut state = self.0.lock().unwrap();
        let counted = state.count("unlink");
        if let (Ok(_), Some(inode)) = (&counted, state.find(parent, name)) {
            state.nodes.remove(&inode);
        }
        done!(counted, reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.unlink(request, parent, name, reply);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
}

const ROWS: usize = 40;

fn builder(path: &Path, shards: bool) -> WriterBuilder {
    let builder = Writer::npy(path, mmap::DType::U8, &[1024]).slot_bytes(0);
    if shards { builder.shard_bytes(16 << 10) } else { builder }
}

/// Writes by both ways. The error of a call is that of the end.
fn write(path: &Path, shards: bool) -> Result<(), Error> {
    let mut out = builder(path, shards).build()?;
    for row in 0..ROWS {
        let value = row as u8;
        if row % 2 == 0 {
            let _ = out.slot(1).map(|slot| slot.fill(value)).map(|()| out.commit(1));
        } else {
            let _ = out.write_all(&[value; 1024]);
        }
    }
    out.finish().map(drop)
}

#[test]
fn a_disk_that_fails_at_any_call_leaves_a_whole_file_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let shared = Arc::new(Mutex::new(State::default()));
    let mut options = Config::default();
    options.mount_options = vec![MountOption::FSName("twinbuf-write".into())];
    let session = match fuser::spawn_mount(System(shared.clone()), folder.path(), &options) {
        Ok(session) => session,
        Err(error) => {
            assert!(std::env::var_os("TWINBUF_FUSE").is_none(), "{error}");
            eprintln!("not checked: FUSE: {error} (TWINBUF_FUSE=1 makes this a failure)");
            return;
        }
    };
    let path = folder.path().join("target");
    let names = || fs::read_dir(folder.path()).unwrap().count();
    let mut tried = BTreeMap::new();
    for (shards, fault) in [false, true].into_iter().flat_map(|shards| {
        [
            Fault::Error(libc::EIO),
            Fault::Error(libc::EDQUOT),
            Fault::Error(libc::EROFS),
            Fault::Error(libc::EINTR),
            Fault::Short,
            Fault::Odd,
        ]
        .map(|fault| (shards, fault))
    }) {
        for at in 0.. {
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
            if !shards {
                fs::write(&path, b"old").unwrap();
            }
            let begin = {
                let mut state = shared.lock().unwrap();
                state.calls.clear();
                state.fault = Some((at, fault));
                state.calls.len()
            };
            let result = write(&path, shards);
            let mut state = shared.lock().unwrap();
            state.fault = None;
            let (calls, failed) = (state.calls.len() - begin, state.calls.get(at).copied());
            drop(state);
            let Some(failed) = failed else {
                assert!(result.is_ok() && calls > 10);
                break;
            };
            *tried.entry((failed, result.is_ok())).or_insert(0) += 1;
            let case = format!("{fault:?} at call {at}, {failed}, shards {shards}: {result:?}");
            match &result {
                Ok(()) => {
                    let files = if shards { mmap::files([&path]).unwrap() } else { vec![path.clone()] };
                    let rows: Vec<u8> =
                        files.iter().flat_map(|file| fs::read(file).unwrap()[4096..].to_vec()).collect();
                    let wanted: Vec<u8> = (0..ROWS).flat_map(|row| [row as u8; 1024]).collect();
                    assert!(rows == wanted, "{case}");
                    assert!(mmap::Records::open_npy(&files, mmap::Cut::Rows).is_ok(), "{case}");
                }
                Err(Error::Write(why)) => {
                    let Fault::Error(number) = fault else { panic!("{case}") };
                    assert_eq!(why.source.raw_os_error(), Some(number), "{case}");
                    assert!(why.path.starts_with(&path) && why.offset <= 4096 + 1024 * ROWS as u64, "{case}");
                    assert!(
                        shards && !path.exists() || !shards && fs::read(&path).unwrap() == b"old",
                        "{case}"
                    );
                }
                Err(_) => panic!("{case}"),
            }
            // What the file system did not let go, the next writer removes.
            let left = names() - usize::from(path.exists());
            assert!(left == 0 || matches!(failed, "unlink" | "open"), "{case}");
            drop(builder(&path.with_file_name("target"), false).build());
        }
    }
    println!("{tried:?}");
    assert!(tried.contains_key(&("fsync", false)) && tried.contains_key(&("write", false)));
    drop(session);
}
