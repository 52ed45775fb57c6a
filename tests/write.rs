//! A writer: random programs, read back as `Records`; what a name holds after errors, drops, panics and kills.

mod common;

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{folder, names, until};
use twinbuf::mmap::{Cut, DType, files};
use twinbuf::write::{Failure, Writer, WriterBuilder};
use twinbuf::{BoxError, Error, Plan, Records};
use twinbuf_testing::Random;

const TYPES: [DType; 14] = {
    use DType::*;
    [Bool, U8, I8, U16, I16, F16, U32, I32, F32, U64, I64, F64, C64, C128]
};

/// Draws numbers below a limit.
struct Draws(Random);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.0.below(limit as u64)).unwrap()
    }

    /// Mostly small numbers, sometimes one up to the limit.
    fn size(&mut self, limit: usize) -> usize {
        let limit = if self.below(4) == 0 { limit } else { limit.min(8) };
        self.below(limit + 1)
    }
}

fn sharded(builder: WriterBuilder, bytes: Option<u64>) -> WriterBuilder {
    bytes.into_iter().fold(builder, WriterBuilder::shard_bytes)
}

fn failure(error: Error) -> Failure {
    let Error::Write(failure) = error else { panic!("{error:?}") };
    failure
}

/// A target and its rows.
struct Case {
    dtype: Option<DType>,
    shape: Vec<usize>,
    row: usize,
    sharded: bool,
}

impl Case {
    fn draw(draws: &mut Draws, path: &Path) -> (Self, WriterBuilder) {
        let dtype = (draws.below(3) > 0).then(|| TYPES[draws.below(TYPES.len())]);
        let shape: Vec<_> = match dtype {
            Some(_) => (0..draws.below(4)).map(|_| 1 + draws.size(40)).collect(),
            None => vec![1 + draws.size(9000)],
        };
        let row = shape.iter().product::<usize>() * dtype.map_or(1, DType::size);
        let builder = match dtype {
            Some(dtype) => Writer::npy(path, dtype, &shape),
            None => Writer::raw(path, row),
        };
        let builder = builder.depth(1 + draws.below(3)).slot_bytes(draws.size(40_000));
        let is_sharded = row <= 4096 && draws.below(2) == 0;
        // Whole rows in whole blocks are at most `4096 * row` long.
        let shards = is_sharded.then(|| (4096 * row) as u64 + draws.size(100_000) as u64);
        (Self { dtype, shape, row, sharded: is_sharded }, sharded(builder, shards))
    }

    fn open(&self, path: &Path) -> Result<Records, BoxError> {
        let paths = if self.sharded { files([path])? } else { vec![path.to_path_buf()] };
        Ok(match self.dtype {
            Some(_) => Records::open_npy(paths, Cut::Rows)?,
            None => Records::open(paths, self.row)?,
        })
    }

    /// Checks that the target holds these rows, and nothing else.
    fn check(&self, path: &Path, bytes: &[u8]) -> Result<(), BoxError> {
        let data = self.open(path)?;
        assert_eq!(data.bytes(), bytes.len() as u64);
        if let Some(dtype) = self.dtype {
            assert_eq!((data.dtype(), data.shape()), (dtype, &self.shape[..]));
        }
        let plan = Plan::builder(data.len()).batch(data.len()).build()?;
        let mut out = vec![0; bytes.len()];
        assert_eq!(data.read(&plan.batch(0, 0).unwrap(), &mut out)?, bytes.len());
        assert!(out == bytes, "other bytes");
        Ok(())
    }
}

/// One program: rows by both ways, in any sizes. Returns the bytes that must be in the target, or `None` if it was
/// left or refused.
fn program(draws: &mut Draws, case: &Case, mut out: Writer) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut next = 0_u8;
    let mut value = || {
        next = next.wrapping_mul(31).wrapping_add(7);
        next
    };
    for _ in 0..draws.size(30) {
        let rows = draws.size(1 + 60_000 / case.row);
        if draws.below(2) == 0 {
            let slot = match out.slot::<u8>(rows) {
                Err(Error::Option { option: "slot_bytes", .. }) => continue,
                slot => slot.unwrap(),
            };
            assert_eq!(slot.len(), rows * case.row);
            slot.iter_mut().for_each(|byte| *byte = value());
            let committed = draws.size(rows);
            let slot = slot[..committed * case.row].to_vec();
            if draws.below(5) > 0 {
                bytes.extend(slot);
                out.commit(committed);
            }
        } else {
            let written: Vec<_> = (0..rows * case.row).map(|_| value()).collect();
            let mut rest = VecDeque::from(written.clone());
            while !rest.is_empty() {
                let part: Vec<_> = rest.drain(..(1 + draws.size(5000)).min(rest.len())).collect();
                out.write_all(&part).unwrap();
            }
            bytes.extend(written);
        }
    }
    match draws.below(8) {
        0 => {
            drop(out);
            None
        }
        1 if case.row > 1 => {
            out.write_all(&[1]).unwrap();
            assert!(matches!(out.finish(), Err(Error::Option { option: "row", .. })));
            None
        }
        _ => {
            let done = out.finish().unwrap();
            assert_eq!((done.rows, done.bytes), ((bytes.len() / case.row) as u64, bytes.len() as u64));
            Some(bytes)
        }
    }
}

/// `TWINBUF_WRITE_PROGRAMS` sets their number.
#[test]
fn what_random_programs_write_is_read_back() {
    let programs = std::env::var("TWINBUF_WRITE_PROGRAMS")
        .map_or_else(|_| twinbuf_testing::extent(200, 2000), |number| number.parse().unwrap());
    let folder = folder();
    for seed in 0..programs {
        let mut draws = Draws(Random(seed));
        let path = folder.path().join("target");
        let before = draws.below(2) == 0;
        let (case, builder) = Case::draw(&mut draws, &path);
        if before && !case.sharded {
            fs::write(&path, b"before").unwrap();
        }
        let out = builder.build().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        match program(&mut draws, &case, out) {
            Some(bytes) if bytes.is_empty() => assert!(case.open(&path).is_err(), "seed {seed}"),
            Some(bytes) => case.check(&path, &bytes).unwrap_or_else(|error| panic!("seed {seed}: {error}")),
            None if before && !case.sharded => assert_eq!(fs::read(&path).unwrap(), b"before", "seed {seed}"),
            None => assert!(!path.exists(), "seed {seed}"),
        }
        assert!(names(folder.path()).iter().all(|name| name == "target"), "seed {seed}");
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
    }
}

#[test]
fn an_array_may_have_no_rows_and_many_axes() {
    let folder = folder();
    let path = folder.path().join("x.npy");
    for axes in [0, 1, 31, 63] {
        let out = Writer::npy(&path, DType::F32, &vec![1; axes]).build().unwrap();
        assert_eq!(out.finish().unwrap().files, 1);
        let file = fs::read(&path).unwrap();
        assert_eq!((file.len(), file[4095]), (4096, b'\n'));
        let mut out = Writer::npy(&path, DType::F32, &vec![1; axes]).build().unwrap();
        out.slot::<f32>(3).unwrap().fill(2.5);
        out.commit(3);
        out.finish().unwrap();
        let data = Records::open_npy([&path], Cut::Rows).unwrap();
        assert_eq!((data.len(), data.shape()), (3, &vec![1; axes][..]));
    }
    // In numpy's own order of the dictionary.
    let text = fs::read(&path).unwrap()[10..80].to_vec();
    assert!(text.starts_with(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 1, 1,"), "{text:?}");
}

#[test]
fn invalid_options_are_errors() {
    let folder = folder();
    let path = folder.path().join("x");
    let raw = |row| Writer::raw(&path, row);
    let npy = |dtype, row: &[usize]| Writer::npy(&path, dtype, row);
    for (wanted, builder) in [
        ("row", raw(0)),
        ("row", npy(DType::F32, &[3, 0])),
        ("row", npy(DType::F32, &[usize::MAX, 2])),
        ("row", npy(DType::Bf16, &[3])),
        ("row", npy(DType::F8E4M3, &[3])),
        ("row", npy(DType::F8E5M2, &[])),
        ("row", npy(DType::F32, &[1; 64])), // numpy has 64 axes at most, and the rows are one more
        ("row", npy(DType::F32, &[1; 2000])),
        ("depth", raw(1).depth(0)),
        ("depth", raw(1).depth(1 << 40)),
        ("depth", raw(1).slot_bytes(usize::MAX)),
        ("depth", raw(usize::MAX)),
        ("depth", raw(usize::MAX).shard_bytes(u64::MAX)),
        ("shard_bytes", raw(1).shard_bytes(4095)),
        ("shard_bytes", raw(3).shard_bytes(4096)),
        ("path", Writer::raw("", 1)),
        ("path", Writer::raw("..", 1)),
        ("path", Writer::raw(folder.path(), 1)),
        ("path", Writer::raw(folder.path(), 1).shard_bytes(1 << 20)),
    ] {
        match builder.build() {
            Err(Error::Option { option, found, .. }) => {
                assert_eq!(option, wanted);
                assert!(!found.contains("WriterBuilder"), "its fields alone: {found}");
            }
            found => panic!("{wanted}: {found:?}"),
        }
    }
    // Before anything is allocated: 2^40 slots of 4 MiB.
    let text = raw(1).depth(1 << 40).build().err().unwrap().to_string();
    assert!(text.contains(&format!("{} bytes", 1_u64 << 62)), "{text}");
    let error = Writer::raw(folder.path().join("y"), 5).shard_bytes(4096).build().unwrap_err();
    assert!(error.to_string().contains("at least 20480 bytes"), "{error}");
    let missing = failure(Writer::raw(folder.path().join("no/x"), 1).build().unwrap_err());
    assert_eq!(missing.source.kind(), io::ErrorKind::NotFound);
    let mut out = raw(12).slot_bytes(4096).build().unwrap();
    assert!(matches!(out.slot::<u64>(1), Err(Error::Option { option: "slot_bytes", .. })));
    assert!(matches!(out.slot::<u8>(usize::MAX), Err(Error::Option { .. })));
    assert!(matches!(out.slot::<u8>(1000), Err(Error::Option { .. })));
    // What an error gave is not to be written.
    for rows in [1, usize::MAX, 1000] {
        let _ = out.slot::<u64>(rows).unwrap_err();
        assert!(catch_unwind(AssertUnwindSafe(|| out.commit(1))).is_err(), "{rows}");
    }
    assert_eq!(out.slot::<[u32; 3]>(2).unwrap().len(), 2);
    let panic = catch_unwind(AssertUnwindSafe(|| out.commit(3))).unwrap_err();
    assert!(panic.downcast_ref::<String>().unwrap().contains("wanted 3 rows of 12 bytes"));
    out.commit(2);
    assert!(catch_unwind(AssertUnwindSafe(|| out.commit(1))).is_err());
    // What is written in between is not overtaken by a commit.
    let _ = out.slot::<u8>(1).unwrap();
    out.write_all(&[1; 12]).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| out.commit(1))).is_err());
    assert_eq!(out.finish().unwrap().rows, 3);
    assert_eq!(names(folder.path()), ["x"]);
}

#[test]
fn a_target_is_replaced_as_a_whole_or_not_at_all() {
    let folder = folder();
    let path = folder.path().join("x.bin");
    fs::write(&path, b"old").unwrap();
    let write = || {
        let mut out = Writer::raw(&path, 1000).slot_bytes(4096).build().unwrap();
        (0..100).for_each(|_| out.write_all(&[7; 1000]).unwrap());
        out
    };
    let out = write();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(folder.path()).len(), 2);
    drop(out);
    let panic = catch_unwind(|| {
        let _out = write();
        panic!("the loop fails");
    });
    assert!(panic.is_err());
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(folder.path()), ["x.bin"]);
    let done = write().finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), [7; 100_000]);
    let text = done.to_string();
    assert!(text.starts_with("100 rows, 97.7 KiB, 1 files in ") && text.contains("train waiting "), "{text}");
}

/// Something takes the target's name while a writer writes: the error names the target, also if there are shards.
#[test]
fn a_target_that_appears_meanwhile_is_named() {
    let folder = folder();
    for shards in [false, true] {
        let path = folder.path().join(format!("x{shards}"));
        let out = sharded(Writer::raw(&path, 1), shards.then_some(4096)).build().unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("in the way"), b"").unwrap();
        let why = failure(out.finish().unwrap_err());
        assert_eq!((why.path, why.call), (path, "rename"));
    }
    assert_eq!(names(folder.path()), ["xfalse", "xtrue"]);
}

#[cfg(unix)]
mod unix {
    use std::os::fd::AsRawFd as _;

    use super::*;
    use crate::common::forked::{forked, limit_files};

    #[test]
    fn of_two_writers_of_a_name_one_is_refused() {
        let folder = folder();
        let path = folder.path().join("x");
        let other = |shards: bool| sharded(Writer::raw(&path, 1), shards.then_some(4096)).build();
        for shards in [true, false] {
            let first = other(shards).unwrap();
            for shards in [true, false] {
                let why = failure(other(shards).unwrap_err());
                assert_eq!((why.call, &why.path), ("create", &path));
                assert!(why.source.to_string().contains("another writer"), "{why:?}");
            }
            // Another name may begin with this one.
            let _beside = Writer::raw(folder.path().join("x.y"), 1).build().unwrap();
            drop(other(shards).unwrap_err());
            drop(first);
            drop(other(shards).unwrap());
        }
        assert_eq!(names(folder.path()), Vec::<String>::new());
    }

    /// Leaves what a killed process leaves.
    fn abandon(builder: &WriterBuilder) {
        assert!(forked(|| {
            std::mem::forget(builder.clone().build().unwrap());
            true
        }));
    }

    /// In a process of its own: those that other tests fork would have copies of its locks.
    #[test]
    fn of_two_writers_at_one_moment_one_is_made() {
        let folder = folder();
        let path = folder.path().join("x");
        let builder = |shards: bool| sharded(Writer::raw(&path, 1), shards.then_some(4096));
        let barrier = std::sync::Barrier::new(2);
        let build = |shards| {
            barrier.wait();
            let made = builder(shards).build();
            barrier.wait(); // none ends before both have begun
            made.is_ok()
        };
        let one_is_made = |round| {
            if round % 50 == 0 {
                abandon(&builder(round % 100 == 0));
            }
            let made = std::thread::scope(|scope| {
                let other = scope.spawn(|| build(false));
                [build(round % 2 == 0), other.join().unwrap()]
            });
            made[0] != made[1] && names(folder.path()).is_empty()
        };
        assert!(forked(|| (0..4000).all(one_is_made)));
    }

    fn make_pipe(path: &Path) {
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the string ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    }

    /// The disk: who opens the first shard waits while this process has a lease of it (fcntl(2)). Who opens the second
    /// one, a pipe, waits for ever: what is discarded is not written before it is removed.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_disk_that_hangs_is_left() {
        let folder = folder();
        let path = folder.path().join("x");
        let is_left = |end: fn(Writer)| {
            // SAFETY: sets no handler. The signal says that another waits for the lease.
            unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
            let builder = Writer::raw(&path, 1).slot_bytes(0).depth(4);
            let mut out = sharded(builder, Some(8192)).build().unwrap();
            let temporary = names(folder.path());
            let [first, second] =
                ["00000.bin", "00001.bin"].map(|name| folder.path().join(&temporary[0]).join(name));
            make_pipe(&second);
            let first = fs::File::create_new(first).unwrap();
            // SAFETY: the descriptor is open.
            let lease = |call, how: libc::c_int| unsafe { libc::fcntl(first.as_raw_fd(), call, how) };
            if lease(libc::F_SETLEASE, libc::F_WRLCK) != 0 {
                eprintln!("not checked: F_SETLEASE: {}", io::Error::last_os_error());
                return true;
            }
            out.write_all(&[7; 3 * 8192]).unwrap();
            until(|| lease(libc::F_GETLEASE, 0) != libc::F_WRLCK); // the thread waits
            end(out);
            let found = names(folder.path());
            // The disk answers, so the thread ends and removes the files.
            assert_eq!(lease(libc::F_SETLEASE, libc::F_UNLCK), 0);
            until(|| names(folder.path()).is_empty());
            found == temporary
        };
        assert!(forked(|| is_left(|out| out.discard_timeout(Duration::ZERO))));
        assert!(forked(|| is_left(drop)));
    }

    /// Not even a folder can be opened, to remove what is in it.
    #[test]
    fn without_descriptors_nothing_stays() {
        let folder = folder();
        let path = folder.path().join("x");
        let most = libc::rlimit { rlim_cur: 200, rlim_max: 200 };
        let build = || sharded(Writer::raw(&path, 1).slot_bytes(0), Some(1 << 20)).build().unwrap();
        let take_all = || std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect::<Vec<_>>();
        assert!(forked(|| {
            // SAFETY: the struct is a live local.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most) }, 0);
            (0..40_000).step_by(10_000).all(|bytes| {
                let mut out = build();
                out.write_all(&vec![7; bytes]).unwrap(); // the file may be open
                let all = take_all();
                drop(out);
                let rest = take_all();
                let failed = build().finish().is_err();
                drop([all, rest]);
                failed && names(folder.path()).is_empty()
            })
        }));
    }

    /// Otherwise each later writer of the folder would wait for it.
    #[test]
    fn a_process_that_is_forked_meanwhile_keeps_no_lock_of_the_folder() {
        let folder = folder();
        let path = folder.path().join("x");
        // Who opens it to read waits until another opens it to write.
        let left = folder.path().join(".x.1-0-0.twinbuf-tmp");
        make_pipe(&left);
        let is_free = || {
            let folder = fs::File::open(folder.path()).unwrap();
            // SAFETY: the descriptor is open.
            unsafe { libc::flock(folder.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
        };
        assert!(forked(|| std::thread::scope(|scope| {
            let made = scope.spawn(|| Writer::raw(&path, 1).build().is_ok());
            until(|| !is_free()); // it has its turn
            // SAFETY: takes no pointer. The child has the lock, too; an alarm ends it.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: takes no pointer.
                unsafe { libc::alarm(300) };
                // SAFETY: takes no pointer.
                unsafe { libc::pause() };
            }
            drop(fs::File::options().write(true).open(&left).unwrap());
            let (made, free) = (made.join().unwrap(), is_free());
            // SAFETY: takes no pointer. The child is this process's.
            unsafe { libc::kill(child, libc::SIGKILL) };
            made && free
        })));
    }

    /// Once a call has told of the error, so do all later ones.
    fn write_until_error(mut out: Writer, rows: usize) -> Result<(), Failure> {
        let place = |failure: &Failure| (failure.path.clone(), failure.call, failure.offset);
        let mut failed: Option<Failure> = None;
        for number in 0..rows {
            let result = match number % 2 {
                0 => out.slot::<u8>(1).map(|row| row.fill(5)).map(|()| out.commit(1)),
                _ => out.write_all(&[5; 1000]).map_err(|error| error.downcast::<Error>().unwrap()),
            };
            match (&failed, result) {
                (None, Ok(())) => {}
                (None, Err(error)) => failed = Some(failure(error)),
                (Some(first), result) => {
                    let again = failure(result.unwrap_err());
                    assert_eq!(place(first), place(&again));
                }
            }
        }
        let finished = out.finish().map(drop).map_err(failure);
        if let Some(first) = failed {
            assert_eq!(place(&first), place(finished.as_ref().unwrap_err()));
        }
        finished
    }

    /// A file may be as large as the limit and no larger. No signal ends the process.
    #[test]
    fn a_limit_on_the_size_of_files_is_an_error_with_path_and_offset() {
        let folder = folder();
        let path = folder.path().join("x.npy");
        let rows = 60; // 60000 bytes of rows after the header
        for limit in (0..17).map(|blocks| blocks * 4096 + 1000) {
            for before in [false, true] {
                let _ = fs::remove_file(&path);
                if before {
                    fs::write(&path, b"old").unwrap();
                }
                assert!(forked(|| {
                    limit_files(limit);
                    let out = Writer::npy(&path, DType::U8, &[1000]).slot_bytes(8192).build().unwrap();
                    match write_until_error(out, rows) {
                        Ok(()) => limit >= 64_096,
                        Err(why) => {
                            limit < 64_096
                                && why.path == path
                                && why.call == "write"
                                && why.offset == limit.max(4096)
                                && why.source.raw_os_error() == Some(libc::EFBIG)
                        }
                    }
                }));
                match limit {
                    64_096.. => assert_eq!(Records::open_npy([&path], Cut::Rows).unwrap().len(), rows as u64),
                    _ if before => assert_eq!(fs::read(&path).unwrap(), b"old"),
                    _ => assert!(!path.exists()),
                }
                assert!(names(folder.path()).len() <= 1, "{:?}", names(folder.path()));
            }
        }
    }

    /// Mounts a small file system that is full after `blocks`; needs root. The first block of the file is for the header,
    /// and is written last.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_with_path_and_offset() {
        let folder = folder();
        let at = std::ffi::CString::new(folder.path().to_str().unwrap()).unwrap();
        for (blocks, shards) in (1..20).flat_map(|blocks| [(blocks, false), (blocks, true)]) {
            let options = std::ffi::CString::new(format!("size={}", blocks * 4096)).unwrap();
            // SAFETY: all strings end with a zero.
            let mounted = unsafe {
                libc::mount(c"tmpfs".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast())
            };
            if mounted != 0 {
                eprintln!("not checked: mount: {}", io::Error::last_os_error());
                return;
            }
            let path = folder.path().join("x");
            let builder = Writer::npy(&path, DType::U8, &[1000]).slot_bytes(4096);
            let builder = sharded(builder, shards.then_some(512_000));
            let done = builder.build().map_err(failure).and_then(|out| write_until_error(out, 40));
            let found = names(folder.path());
            // A process that another test forked may have the file open. SAFETY: the string ends with a zero.
            assert_eq!(unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) }, 0);
            match done {
                Ok(()) => assert!(blocks >= 11 && found == ["x"], "{blocks} {found:?}"),
                Err(why) => {
                    assert!(blocks <= 12 && found.is_empty(), "{blocks} {found:?}");
                    let file = if shards { path.join("00000.npy") } else { path };
                    assert_eq!((why.source.kind(), &why.path), (io::ErrorKind::StorageFull, &file));
                    assert!(why.call == "open" || why.offset <= (blocks as u64 + 1) * 4096, "{why:?}");
                }
            }
        }
    }

    /// `TWINBUF_WRITE_KILLS` sets the number of kills.
    #[test]
    fn a_kill_leaves_the_old_file_or_the_new_one_and_the_next_run_cleans_up() {
        let kills = std::env::var("TWINBUF_WRITE_KILLS")
            .map_or_else(|_| twinbuf_testing::extent(24, 200), |number| number.parse().unwrap());
        let folder = folder();
        let mut draws = Draws(Random(3));
        let (mut old, mut new) = (0, 0);
        for kill in 0..kills {
            let shards = kill % 2 == 0;
            let path = folder.path().join(if shards { "shards" } else { "file" });
            let _ = fs::remove_dir_all(&path);
            if !shards {
                fs::write(&path, b"old").unwrap();
            }
            let builder = || Writer::raw(&path, 1000).slot_bytes(4096);
            let build = || sharded(builder(), shards.then_some(512_000)).build();
            // SAFETY: the child leaves by a kill or `_exit`.
            let child = match unsafe { libc::fork() } {
                0 => {
                    let mut out = build().unwrap();
                    (0..2000).for_each(|_| out.write_all(&[9; 1000]).unwrap());
                    out.finish().unwrap();
                    // SAFETY: takes no pointer, and does not return.
                    unsafe { libc::_exit(0) }
                }
                child => child,
            };
            // Any moment will do.
            std::thread::sleep(Duration::from_micros(draws.below(60_000) as u64));
            // SAFETY: takes no pointer.
            assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
            let mut status = 0;
            // SAFETY: the kernel writes to `status`, a live local.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            let whole = |bytes: &[u8]| bytes.len() == 2_000_000 && bytes.iter().all(|&byte| byte == 9);
            if shards {
                assert_eq!(path.exists(), files([&path]).is_ok_and(|files| files.len() == 4));
                new += usize::from(path.exists());
                let _ = fs::remove_dir_all(&path);
            } else {
                let found = fs::read(&path).unwrap();
                assert!(found == b"old" || whole(&found), "{} bytes", found.len());
                old += usize::from(found == b"old");
            }
            drop(build().unwrap());
            let names = names(folder.path());
            assert!(names.iter().all(|name| name == "file"), "{names:?}");
        }
        println!("{kills} kills: {old} old files, {new} new folders");
    }

    #[test]
    fn a_forked_process_is_told_and_its_parent_goes_on() {
        let folder = folder();
        let path = folder.path().join("x");
        let mut out = Some(Writer::raw(&path, 1000).slot_bytes(4096).build().unwrap());
        out.as_mut().unwrap().write_all(&[1; 1000]).unwrap();
        assert!(forked(|| {
            let mut out = out.take().unwrap();
            let error = (0..100).find_map(|_| out.write_all(&[2; 1000]).err()).unwrap();
            format!("{error:?}").contains("another process") && out.finish().is_err()
        }));
        assert!(forked(|| {
            let mut out = out.take().unwrap();
            let slot = |_| match out.slot::<u8>(1) {
                Ok(_) => {
                    out.commit(1);
                    Ok(())
                }
                Err(error) => Err(failure(error)),
            };
            let why = (0..100).map(slot).last().unwrap().unwrap_err();
            why.call == "write" && out.finish().is_err()
        }));
        assert!(forked(|| out.take().unwrap().finish().is_err()));
        assert!(forked(|| {
            drop(out.take());
            true
        }));
        let mut out = out.take().unwrap();
        out.write_all(&[1; 9000]).unwrap();
        assert_eq!(out.finish().unwrap().rows, 10);
        assert_eq!(fs::read(&path).unwrap(), [1; 10_000]);
    }

    #[test]
    fn a_link_is_replaced() {
        let folder = folder();
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        Writer::raw(&link, 1).build().unwrap().finish().unwrap();
        assert_eq!((fs::read(&file).unwrap(), fs::read(&link).unwrap()), (b"old".to_vec(), Vec::new()));
    }

    /// As root, one rename would replace `/dev/null` for all programs.
    #[test]
    fn what_is_no_file_is_not_replaced() {
        let folder = folder();
        let path = folder.path().join("socket");
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let why = failure(Writer::raw(&path, 1).build().unwrap_err());
        assert_eq!((why.call, &why.path), ("create", &path));
        let error = twinbuf::Checkpoint::start().save(&path).unwrap_err();
        assert!(error.to_string().contains("socket"), "{error}");
        assert_eq!(names(folder.path()), ["socket"]);
        assert!(!path.is_file());
    }

    #[test]
    fn the_file_has_the_permissions_of_the_one_that_it_replaces() {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder();
        let path = folder.path().join("x");
        for mode in [0o600, 0o440, 0o664] {
            fs::write(&path, b"old").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let out = Writer::raw(&path, 1).build().unwrap();
            for name in names(folder.path()).into_iter().filter(|name| name != "x") {
                let meanwhile = fs::metadata(folder.path().join(name)).unwrap();
                assert_eq!(meanwhile.permissions().mode() & 0o7777, 0o600);
            }
            out.finish().unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, mode);
            // Also if that file is removed meanwhile.
            let out = Writer::raw(&path, 1).build().unwrap();
            fs::remove_file(&path).unwrap();
            out.finish().unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, mode);
            fs::remove_file(&path).unwrap();
        }
    }

    /// Before anything is written: the rename at the end would fail. A new folder of shards may be written so.
    #[test]
    fn a_path_that_ends_in_a_slash_is_that_of_a_folder() {
        let folder = folder();
        let path = folder.path().join("x/");
        for path in [path.clone(), path.join(".")] {
            let error = Writer::raw(&path, 1).build().unwrap_err();
            assert!(matches!(error, Error::Option { option: "path", .. }), "{error}");
        }
        for path in [path.clone(), folder.path().join("y/.")] {
            Writer::raw(&path, 1).shard_bytes(4096).build().unwrap().finish().unwrap();
            assert_eq!(names(&path), ["00000.bin"]);
        }
    }

    #[test]
    fn a_link_to_nothing_has_the_name_of_a_folder() {
        let folder = folder();
        let path = folder.path().join("x");
        std::os::unix::fs::symlink("nowhere", &path).unwrap();
        for path in [path.clone(), path.join(""), path.join(".")] {
            let error = Writer::raw(&path, 1).shard_bytes(4096).build().unwrap_err();
            assert!(matches!(error, Error::Option { option: "path", .. }), "{error}");
        }
    }

    /// A relative path may have an empty folder.
    #[test]
    fn a_path_may_be_relative() {
        let folder = folder();
        let there = folder.path().to_path_buf();
        assert!(forked(|| {
            std::env::set_current_dir(&there).unwrap();
            let mut done = true;
            for path in ["x", "./y", "../z"] {
                let out = Writer::raw(path, 1).build().unwrap();
                done &= Writer::raw(path, 1).build().is_err();
                done &= out.finish().is_ok() && PathBuf::from(path).is_file();
                fs::remove_file(path).unwrap();
            }
            done
        }));
    }

    #[test]
    fn a_relative_path_is_that_of_the_folder_where_the_writer_was_built() {
        let folder = folder();
        let [here, there] = ["here", "there"].map(|name| folder.path().join(name));
        [&here, &there].into_iter().for_each(|path| fs::create_dir(path).unwrap());
        assert!(forked(|| {
            std::env::set_current_dir(&here).unwrap();
            let shards = [None, Some(4096)];
            let mut kept =
                shards.map(|bytes| sharded(Writer::raw(format!("{bytes:?}"), 4), bytes).build().unwrap());
            let left =
                shards.map(|bytes| sharded(Writer::raw(format!("no{bytes:?}"), 4), bytes).build().unwrap());
            std::env::set_current_dir(&there).unwrap();
            kept.iter_mut().for_each(|out| out.write_all(&[3; 9000]).unwrap());
            drop(left);
            kept.into_iter().all(|out| out.finish().is_ok())
        }));
        assert_eq!((names(&here), names(&there)), (vec!["None".into(), "Some(4096)".into()], vec![]));
        assert_eq!(fs::read(here.join("None")).unwrap(), [3; 9000]);
        assert_eq!(names(&here.join("Some(4096)")), ["00000.bin", "00001.bin", "00002.bin"]);
    }
}
