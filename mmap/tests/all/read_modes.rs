//! Reads through and past the page cache give the same errors, and direct reads see the file that
//! was opened. The unit tests have the bytes.

use std::fs::File;
use std::io::Write;
use std::os::fd::FromRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use crate::asked::write;
use twinbuf_mmap::{Error, Plan, ReadMode, Reader, Records};
use twinbuf_testing::bytes;

/// A file in memory; gone when it is closed.
fn memfd(bytes: &[u8]) -> (File, PathBuf) {
    // SAFETY: the name is a C string; the call takes no other pointer.
    let fd = unsafe { libc::memfd_create(c"twinbuf".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel has just opened it, and nothing else uses it.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(bytes).unwrap();
    (file, PathBuf::from(format!("/proc/self/fd/{fd}")))
}

/// A reader of all records in one mode. `None`, said aloud, where the file system has no such reads.
fn reader(mode: ReadMode, records: &Arc<Records>) -> Option<Reader> {
    let plan = Plan::builder(records.len()).build().unwrap();
    match (mode, Reader::new(records.ranges(), &plan, mode)) {
        (ReadMode::Direct, Err(Error::System { call: call @ "open(O_DIRECT)", source, .. })) => {
            eprintln!("not checked: {call}: {source}");
            None
        }
        (_, reader) => Some(reader.unwrap()),
    }
}

/// What was written a moment ago and is not on the disk yet, and what takes the name of a file that is open.
#[test]
fn direct_reads_see_the_file_that_was_opened_as_it_is() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = write(folder.path(), "data", vec![1; 10_000]);
    let records = Arc::new(Records::open([&path], 10_000).unwrap());
    std::fs::rename(&path, folder.path().join("old")).unwrap();
    std::fs::write(&path, vec![2; 10_000]).unwrap();
    let Some(direct) = reader(ReadMode::Direct, &records) else { return };
    let mut out = vec![0; 10_000];
    let batch = Plan::builder(1).build().unwrap().batch(0, 0).unwrap();
    direct.read(&batch, &mut out).unwrap();
    assert!(out.iter().all(|&byte| byte == 1));
    assert_eq!(direct.stats().disk.div_ceil(4096), 3, "{:?}", direct.stats());
    if crate::disk::lives_in_memory(folder.path()) {
        return;
    }
    // The kernel leaves a page that it is just looking at itself.
    let gone = |_| {
        records.evict().unwrap();
        records.residency().unwrap().resident == 0
    };
    assert!((0..1000).any(gone), "{:?}", records.residency());
    // What is read past the page cache, ahead too, does not come into it.
    direct.begin([batch.clone(), batch.clone()]);
    direct.read(&batch, &mut out).unwrap();
    assert_eq!(records.residency().unwrap().resident, 0);
}

/// File systems without a disk refuse, or read all the same.
#[test]
fn direct_reads_of_what_is_not_on_a_disk_are_refused_by_name() {
    let (_file, path) = memfd(&bytes(400, 0));
    let records = Arc::new(Records::open([&path], 400).unwrap());
    let plan = Plan::builder(1).build().unwrap();
    match Reader::new(records.ranges(), &plan, ReadMode::Direct) {
        Ok(reader) => {
            let mut out = vec![0; 400];
            reader.read(&plan.batch(0, 0).unwrap(), &mut out).unwrap();
            assert_eq!(out, bytes(400, 0)[..]);
        }
        Err(Error::System { path: found, call, source }) => {
            assert_eq!((found, call), (path, "open(O_DIRECT)"));
            assert_eq!(source.raw_os_error(), Some(libc::EINVAL));
        }
        Err(error) => panic!("{error}"),
    }
}

/// The second of two files, inside a page, at a page, and to nothing: all say the same, and none raises a signal. Hints and
/// the count of pages keep working.
#[test]
fn a_truncated_file_is_the_same_error_in_every_mode() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths = ["whole", "cut"].map(|name| folder.path().join(name));
    let record = 1000;
    for left in [50_000 - 1, 40_960, 4097, 4096, 10, 0] {
        for touched in [false, true] {
            for batch in [1, 10, 50] {
                let mut errors = Vec::new();
                for mode in [ReadMode::Pread, ReadMode::Direct] {
                    paths.iter().for_each(|path| std::fs::write(path, vec![7; 50 * record]).unwrap());
                    let records = Arc::new(Records::open(&paths, record).unwrap());
                    let Some(reader) = reader(mode, &records) else { continue };
                    let plan = Plan::builder(100).batch(batch).build().unwrap();
                    let mut out = vec![0; 50 * record];
                    if touched {
                        for step in 0..plan.steps(0) {
                            reader.read(&plan.batch(0, step).unwrap(), &mut out).unwrap();
                        }
                    }
                    File::options().write(true).open(&paths[1]).unwrap().set_len(left).unwrap();
                    reader.begin(crate::asked::epoch(&plan, 0));
                    let results: Vec<String> = (0..plan.steps(0))
                        .map(|step| match reader.read(&plan.batch(0, step).unwrap(), &mut out) {
                            Ok(len) => {
                                assert!(out[..len].iter().all(|&byte| byte == 7), "{mode:?} {left}");
                                format!("{len} bytes")
                            }
                            Err(ref error @ Error::Truncated { path: ref at, offset, wanted, found }) => {
                                assert_eq!(*at, paths[1]);
                                let start = (step * batch - 50) * record as u64;
                                assert_eq!(offset, left.max(start), "{mode:?}");
                                assert_eq!((wanted, found), (batch * record as u64, offset - start));
                                let text = error.to_string();
                                assert!(text.contains(&format!("byte {offset} is missing")), "{text}");
                                format!("{offset} {wanted} {found}")
                            }
                            Err(error) => panic!("{mode:?}: {error}"),
                        })
                        .collect();
                    assert_eq!(reader.stats().failed, 0, "{:?}", reader.stats());
                    assert!(records.residency().is_ok());
                    errors.push(results);
                }
                assert!(errors.iter().all(|other| *other == errors[0]), "{left} {batch}: {errors:?}");
                assert!(errors[0].last().unwrap().contains(' '), "{errors:?}");
                assert!(!errors[0].last().unwrap().ends_with("bytes"), "{errors:?}");
            }
        }
    }
}
