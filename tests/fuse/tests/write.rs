//! A file system in memory that fails in turn at every call but lookups and reads. A writer's file is then whole
//! under its name, or one error comes with path and offset, and the name holds what it held before.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use twinbuf::write::{Writer, WriterBuilder};
use twinbuf::{Error, mmap};
use twinbuf_fuse::{Caching, Call, Fault, Mounted};

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
    let system = match Mounted::new(folder.path(), Vec::new(), Caching::Changing, 12) {
        Ok(system) => system,
        Err(error) => {
            assert!(std::env::var_os("TWINBUF_FUSE").is_none(), "{error}");
            return eprintln!("not checked: FUSE: {error} (TWINBUF_FUSE=1 makes this a failure)");
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
            let before = system.calls().len();
            system.fail_after(at, fault);
            let result = write(&path, shards);
            let Some(failed) = system.heal() else {
                assert!(result.is_ok() && system.calls().len() - before > 10);
                break;
            };
            *tried.entry((failed, result.is_ok())).or_insert(0) += 1;
            let case = format!("{fault:?} at call {at}, {failed:?}, shards {shards}: {result:?}");
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
            assert!(left == 0 || matches!(failed, Call::Change("unlink") | Call::Open(_)), "{case}");
            drop(builder(&path.with_file_name("target"), false).build());
        }
    }
    println!("{tried:?}");
    assert!(["fsync", "write"].iter().all(|call| tried.contains_key(&(Call::Change(call), false))));
}

/// Otherwise `build` took its file for one that another process has removed, and made files without end.
#[test]
fn a_file_that_cannot_be_looked_up_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let Ok(system) = Mounted::new(folder.path(), Vec::new(), Caching::Changing, 12) else { return };
    let path = folder.path().join("target");
    system.fail_after(0, Fault::Lost);
    let (tells, told) = std::sync::mpsc::channel();
    let target = path.clone();
    std::thread::spawn(move || tells.send(write(&target, false)));
    let result = told.recv_timeout(Duration::from_secs(60));
    let made = system.calls().iter().filter(|call| **call == Call::Change("create")).count();
    system.heal();
    let Ok(Err(Error::Write(why))) = &result else { panic!("{result:?}, {made} files") };
    assert_eq!((why.source.raw_os_error(), made), (Some(libc::EIO), 1), "{why:?}");
    // What could not be found, the next writer removes.
    write(&path, false).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
