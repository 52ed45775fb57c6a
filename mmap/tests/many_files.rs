//! A thousand files or more, and a limit of 256 open ones: every record once, in every way; each
//! file opened on demand is the one that was opened first.
#![cfg(target_os = "linux")]

mod common;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use std::sync::Arc;

use twinbuf_mmap::{Cut, DType, Error, Plan, ReadMode, Reader, Records, Shuffle, Tensors};

/// Set in the process that has the limit, to the kind of limit.
const CHILD: &str = "TWINBUF_MANY_FILES";
/// Where the files are.
const FOLDER: &str = "TWINBUF_MANY_FILES_IN";

const IN_EACH: u64 = 3;

fn files() -> u64 {
    twinbuf_testing::extent(1000, 10_000)
}

fn path(folder: &Path, file: u64) -> PathBuf {
    folder.join(format!("{file:05}"))
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Of open files.
fn hard_limit() -> u64 {
    let mut limit = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit64`.
    assert_eq!(unsafe { libc::getrlimit64(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_max
}

/// In the parent: starts itself with each limit. In the child: the tests below.
#[test]
fn thousands_of_files_with_256_open() {
    if let Ok(limit) = std::env::var(CHILD) {
        let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
        let paths: Vec<PathBuf> = (0..files()).map(|file| path(&folder, file)).collect();
        // The test's own, and those that it was started with.
        let others = open_files();
        let records = open(&paths);
        let kept = open_files() - others;
        drop(records);
        if limit == "hard" {
            // A quarter of the limit.
            assert_eq!(kept, 64);
            every_record_once(&paths);
            the_program_has_room_for_mappings(&paths);
            others_take_the_descriptors(&paths);
            what_becomes_of_files(&paths);
        } else {
            // As many as the hard limit allows.
            assert_eq!(kept as u64, files().min(hard_limit() / 4));
        }
        return println!("{CHILD} is done");
    }
    if common::this_program().is_none() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for file in 0..files() {
        let numbers = file * IN_EACH..(file + 1) * IN_EACH;
        let bytes: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
        std::fs::write(path(folder.path(), file), bytes).unwrap();
    }
    // The first one leaves the files as they are.
    for (limit, ulimit) in [("soft", "ulimit -S -n 256"), ("hard", "ulimit -n 256")] {
        let mut child = Command::new("sh");
        child
            .args(["-c", &format!("{ulimit} && exec \"$0\" --nocapture")])
            .arg(std::env::current_exe().unwrap());
        let output = child.env(CHILD, limit).env(FOLDER, folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if limit == "soft" && said.contains("hard limit is lower") {
            println!("not checked: {said}");
            continue;
        }
        assert!(output.status.success() && said.contains(&format!("{CHILD} is done")), "{limit}: {said}");
    }
}

fn open(paths: &[PathBuf]) -> Records {
    Records::open_headerless(paths, DType::U64, Cut::Rows).unwrap()
}

fn every_record_once(paths: &[PathBuf]) {
    let records = Arc::new(open(paths));
    assert_eq!(records.len(), files() * IN_EACH);
    for mode in [ReadMode::Pread, ReadMode::Direct] {
        for shuffle in [Shuffle::None, Shuffle::Full] {
            let plan = Plan::builder(records.len()).batch(1000).shuffle(shuffle).build().unwrap();
            let reader = match Reader::new(records.ranges(), &plan, mode) {
                Err(Error::System { call: "open(O_DIRECT)", source, .. }) => {
                    eprintln!("not checked: open(O_DIRECT): {source}");
                    continue;
                }
                reader => reader.unwrap(),
            };
            let batches = plan.clone();
            reader.begin((0..).map_while(move |step| batches.batch(0, step)));
            let mut seen = Vec::new();
            let mut out = vec![0; 8000];
            for step in 0..plan.steps(0) {
                let batch = plan.batch(0, step).unwrap();
                reader.read(&batch, &mut out).unwrap();
                assert_eq!(reader.stats().failed, 0);
                let numbers = out.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
                assert!(numbers.clone().eq(batch.runs().flatten()), "{mode:?} {shuffle:?} {step}");
                seen.extend(numbers);
            }
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..files() * IN_EACH), "{mode:?} {shuffle:?}");
        }
        assert_eq!(records.residency().unwrap().pages, files());
    }
    let (few, all) = (open(&paths[..10]).fingerprint().unwrap(), open(paths).fingerprint().unwrap());
    assert_ne!(few, all);
}

/// The system allows a number of mappings, which suffices for those of the files, and for few more. A thread takes some.
fn the_program_has_room_for_mappings(paths: &[PathBuf]) {
    const OTHERS: usize = 1000;
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let most = most.trim().parse::<usize>().unwrap();
    if !(paths.len() + 2 * OTHERS..100_000).contains(&most) {
        return eprintln!("not checked: {most} mappings are allowed");
    }
    let file = File::open(&paths[0]).unwrap();
    let mut maps = Vec::with_capacity(most);
    let map = |_: &()| memmap2::MmapOptions::new().len(1).map_raw_read_only(&file).ok();
    maps.extend(std::iter::repeat(()).map_while(|own| map(&own)));
    maps.truncate(maps.len() - paths.len() - OTHERS / 2);
    let records = open(paths);
    let others = maps.len();
    maps.extend(std::iter::repeat(()).map_while(|own| map(&own)).take(OTHERS));
    let found = maps.len() - others;
    drop((maps, records));
    assert_eq!(found, OTHERS);
}

/// The program itself has nearly all: nothing is kept then, and what was is given back.
fn others_take_the_descriptors(paths: &[PathBuf]) {
    let mut others = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        others.push(file);
    }
    others.truncate(others.len() - 20);
    let before = open_files();
    let records = open(&paths[..100]);
    assert_eq!(open_files(), before);
    let batch = Plan::builder(300).batch(300).build().unwrap().batch(0, 0).unwrap();
    assert_eq!(records.read(&batch, &mut [0; 2400]).unwrap(), 2400);
    // So it is with the files of a model.
    let model = tempfile::tempdir_in(paths[0].parent().unwrap()).unwrap();
    let parts = (0..100_u8).map(|part| {
        let path = model.path().join(format!("{part}.safetensors"));
        let bytes = twinbuf_testing::safetensors([(format!("{part:03}"), "U8", [1], 1)], [part]);
        std::fs::write(&path, bytes).map(|()| path).unwrap()
    });
    let tensors = Tensors::open(parts.collect::<Vec<_>>()).unwrap();
    assert_eq!((tensors.all().len(), open_files()), (100, before));
    let reader = Reader::of_groups(tensors.groups([["000", "099"]]).unwrap(), ReadMode::Pread, 0).unwrap();
    let mut out = [0; 8192];
    let bytes = reader.read(&0, &mut out).unwrap();
    assert!(out[..bytes].contains(&99));
    // Not one is left.
    while let Ok(file) = File::open("/dev/null") {
        others.push(file);
    }
    let error = records.read(&batch, &mut [0; 2400]).unwrap_err();
    assert!(matches!(error, Error::Open { .. }), "{error:?}");
    assert!(error.to_string().contains("ulimit -n"), "{error}");
}

/// The last file is opened on demand.
fn what_becomes_of_files(paths: &[PathBuf]) {
    let records = open(paths);
    let last = paths.last().unwrap();
    let read = || {
        let batch = Plan::builder(records.len()).build().unwrap().batch(0, records.len() - 1).unwrap();
        let mut out = [0; 8];
        records.read(&batch, &mut out).map(|_| u64::from_le_bytes(out))
    };
    assert_eq!(read().unwrap(), files() * IN_EACH - 1);
    let kept = last.with_extension("kept");
    std::fs::rename(last, &kept).unwrap();
    let error = read().unwrap_err();
    assert!(matches!(&error, Error::NotFound { path } if path == last), "{error:?}");
    std::fs::write(last, [7; 24]).unwrap();
    let error = read().unwrap_err();
    assert!(matches!(&error, Error::Replaced { path } if path == last), "{error:?}");
    std::fs::rename(&kept, last).unwrap();
    assert_eq!(read().unwrap(), files() * IN_EACH - 1);
    File::options().write(true).open(last).unwrap().set_len(20).unwrap();
    let error = read().unwrap_err();
    assert!(matches!(&error, Error::Truncated { offset: 20, .. }), "{error:?}");
}
