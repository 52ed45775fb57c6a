//! What `read` delivers is what the files hold: over shards, in any order, past 4 GiB, from any thread.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use crate::asked::write;
use tempfile::TempDir;
use twinbuf_mmap::{Error, Location, Plan, Records};

const RECORD: usize = 24;

/// Writes shards with these numbers of records; every byte depends on its place in the data set.
fn data_set(shards: &[usize]) -> (TempDir, Vec<PathBuf>, Vec<u8>) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = twinbuf_testing::bytes(shards.iter().sum::<usize>() * RECORD, 0);
    let (mut paths, mut rest) = (Vec::new(), &bytes[..]);
    for (index, records) in shards.iter().enumerate() {
        let part;
        (part, rest) = rest.split_at(records * RECORD);
        paths.push(write(folder.path(), &format!("{index}.bin"), part));
    }
    (folder, paths, bytes)
}

/// Reads all records as one batch, which must be `all`.
fn reads(records: &Records, all: &[u8]) {
    assert_eq!(records.len(), (all.len() / RECORD) as u64);
    let plan = Plan::builder(records.len()).batch(records.len()).build().unwrap();
    crate::asked::compare(records, &plan, "all", |record| &all[record * RECORD..][..RECORD]);
}

#[test]
fn records_are_located_in_their_shards() {
    let (_folder, paths, _) = data_set(&[7, 300, 1]);
    let records = Records::open(&paths, RECORD).unwrap();
    let shards: Vec<_> = records.shards().iter().map(|shard| (shard.path(), shard.records())).collect();
    assert_eq!(shards, [(&*paths[0], 0..7), (&*paths[1], 7..307), (&*paths[2], 307..308)]);
    let at =
        |shard, record: u64| Some(Location { shard, offset: record * RECORD as u64, len: RECORD as u64 });
    let expected = [(0, at(0, 0)), (6, at(0, 6)), (7, at(1, 0)), (306, at(1, 299)), (307, at(2, 0))];
    for (record, location) in expected {
        assert_eq!(records.locate(record), location, "record {record}");
    }
    assert_eq!(records.locate(308), None);
    assert_eq!((records.dtype(), records.shape()), (twinbuf_mmap::DType::U8, &[RECORD][..]));
    assert_eq!(records.locate(u64::MAX), None);
}

#[test]
fn the_rest_of_each_file_is_left_out_when_ignored() {
    let (_folder, paths, all) = data_set(&[2, 3]);
    for path in &paths {
        let len = std::fs::metadata(path).unwrap().len();
        File::options().write(true).open(path).unwrap().set_len(len + 5).unwrap();
    }
    let records = Records::options().partial(true).open(&paths, RECORD).unwrap();
    reads(&records, &all);
}

#[test]
fn a_batch_of_another_data_set_or_too_small_a_buffer() {
    let (_folder, paths, _) = data_set(&[4]);
    let records = Records::open(&paths, RECORD).unwrap();
    let plan = Plan::builder(6).batch(3).build().unwrap();
    let mut out = [0; 3 * RECORD];
    assert!(records.read(&plan.batch(0, 0).unwrap(), &mut out).is_ok());
    let error = records.read(&plan.batch(0, 1).unwrap(), &mut out).unwrap_err();
    assert!(matches!(error, Error::NoSuchRecord { wanted: 4, found: 4 }), "{error:?}");
    let error = records.read(&plan.batch(0, 0).unwrap(), &mut out[1..]).unwrap_err();
    assert!(matches!(error, Error::BufferTooSmall { wanted: 72, found: 71 }), "{error:?}");
    let huge = Plan::builder(u64::MAX).batch(u64::MAX).build().unwrap().batch(0, 0).unwrap();
    let error = records.read(&huge, &mut out).unwrap_err();
    assert!(matches!(error, Error::BufferTooSmall { wanted: u64::MAX, found: 72 }), "{error:?}");
}

/// A file server (Samba's kernel oplocks) holds a lease while a client writes; `open` waits until it is given up.
#[cfg(target_os = "linux")]
#[test]
fn a_leased_file_is_opened_when_it_is_given_up() {
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    let (_folder, paths, bytes) = data_set(&[100]);
    let server = File::options().read(true).write(true).open(&paths[0]).unwrap();
    let control = |command, value: libc::c_int| {
        // SAFETY: the descriptor is open as long as `server` lives; these commands take numbers.
        unsafe { libc::fcntl(server.as_raw_fd(), command, value) }
    };
    // The signal reports a waiting process, and would end this one.
    // SAFETY: nothing is called when the signal comes.
    unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    if control(libc::F_SETLEASE, libc::F_WRLCK) != 0 {
        return eprintln!("not checked: F_SETLEASE: {}", std::io::Error::last_os_error());
    }
    let opened = AtomicBool::new(false);
    let records = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !opened.load(Relaxed) && control(libc::F_GETLEASE, 0) == libc::F_WRLCK {
                std::thread::yield_now();
            }
            control(libc::F_SETLEASE, libc::F_UNLCK);
        });
        let records = Records::open(&paths, RECORD);
        opened.store(true, Relaxed);
        records
    });
    reads(&records.unwrap(), &bytes);
}

/// Empty files and files shorter than a record are left out where that is asked for, and listed.
#[test]
fn short_files_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let file = |(name, len): (&str, _)| write(folder.path(), name, vec![name.as_bytes()[0]; len]);
    let paths = [("0", 0), ("1", 24), ("2", 7), ("3", 8), ("4", 0)].map(file);
    assert!(matches!(Records::open(&paths, 8), Err(Error::TooShort { path, .. }) if path == paths[0]));
    let records = Records::options().skip_short(true).open(&paths, 8).unwrap();
    assert_eq!(records.skipped(), [&paths[0], &paths[2], &paths[4]].map(Clone::clone));
    assert_eq!((records.len(), records.shards().len()), (4, 2));
    let batch = Plan::builder(4).batch(4).build().unwrap().batch(0, 0).unwrap();
    let mut out = [0; 32];
    records.read(&batch, &mut out).unwrap();
    assert!(out.starts_with(&[b'1'; 24]) && out.ends_with(&[b'3'; 8]));
    // Without one that is long enough there is no data set.
    let short = [&paths[2], &paths[0]];
    let error = Records::options().skip_short(true).open(short, 8).unwrap_err();
    assert!(matches!(error, Error::TooShort { path, .. } if path == paths[2]));
}

/// What every system's own calls must do: hints that fail nowhere, and errors that name the call that is missing.
#[test]
fn what_a_system_lacks_is_named() {
    let (_folder, paths, all) = data_set(&[100]);
    let records = Arc::new(Records::open(&paths, RECORD).unwrap());
    let batch = Plan::builder(100).batch(100).build().unwrap().batch(0, 0).unwrap();
    let dropped = records.evict();
    let counted = records.residency();
    if cfg!(not(any(target_os = "linux", target_os = "android"))) {
        assert!(matches!(dropped, Err(Error::Unsupported { call: "posix_fadvise" })), "{dropped:?}");
        assert!(matches!(counted, Err(Error::Unsupported { call: "mincore" })), "{counted:?}");
    }
    // The records are as they were.
    let mut out = vec![0xEE; 100 * RECORD];
    let (stats, read) = crate::asked::read_and_ask(&records, &batch, &mut out);
    assert_eq!((stats.failed, read.unwrap()), (0, out.len()));
    assert!(out == all);
    // Counted where the system has them. (Linux leaves them out on some file systems.)
    assert!(!cfg!(windows) || stats.hints > 0 && stats.hinted > 0, "{stats:?}");
}
