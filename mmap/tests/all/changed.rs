//! Files that are truncated, grown again and replaced while threads read them: every byte that is delivered is right, the rest
//! is an error, and no signal comes. Also where the kernel refuses the call that copies out of mappings.
//!
//! `TWINBUF_CHANGES=100000 cargo test --release -p twinbuf-mmap --test all changed` makes more
//! changes than the usual 15.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use twinbuf_mmap::{Error, Plan, ReadMode, Reader, Records, Shuffle};

/// Set in the process that is refused the call.
const CHILD: &str = "TWINBUF_CHANGED_REFUSED";

/// No page and no block is a multiple of it.
const RECORD: usize = 1000;
const RECORDS: u64 = 600;
const THREADS: u64 = 4;

/// Record `number`; no byte of it is 0.
fn record(number: u64) -> Vec<u8> {
    (0..RECORD as u64).map(|at| u8::try_from((number * 31 + at * 7) % 255).unwrap() + 1).collect()
}

fn write(path: &Path) -> File {
    let mut file = File::options().create(true).write(true).truncate(false).open(path).unwrap();
    file.write_all(&(0..RECORDS).flat_map(record).collect::<Vec<_>>()).unwrap();
    file
}

/// Changes the file until it was changed so often. It never holds a wrong byte: it is cut off, and what is missing is written
/// behind its end.
fn change(path: &Path, changes: u64) {
    let mut file = File::options().write(true).open(path).unwrap();
    for change in 0..changes {
        let random = change.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        let left = random % (RECORDS * RECORD as u64 + 1);
        if change % 16 == 15 {
            // Another file takes its name. Readers keep the one that they have.
            let new = path.with_extension("new");
            file = write(&new);
            std::fs::rename(&new, path).unwrap();
            continue;
        }
        file.set_len(left).unwrap();
        let first = left / RECORD as u64;
        let rest: Vec<u8> = (first..RECORDS).flat_map(record).collect();
        let rest = &rest[usize::try_from(left - first * RECORD as u64).unwrap()..];
        // In two steps: between them it ends in the middle of a page.
        let (one, other) = rest.split_at(rest.len() / 2);
        file.write_all_at(one, left).unwrap();
        file.write_all_at(other, left + one.len() as u64).unwrap();
    }
}

/// Reads until `done`. Returns batches that were delivered and batches that were not.
fn read(path: &Path, thread: u64, done: &AtomicBool) -> [u64; 2] {
    let expected: Vec<Vec<u8>> = (0..RECORDS).map(record).collect();
    let mut counts = [0; 2];
    let mut out = vec![0; 60 * RECORD];
    for epoch in 0.. {
        // Opened again, because the file may be another one by now; or it is too short at the moment.
        let Ok(records) = Records::open([path], RECORD) else { continue };
        if records.len() < RECORDS {
            continue;
        }
        let records = Arc::new(records);
        let shuffle = if epoch % 4 == 3 { Shuffle::Chunks { records: 9 } } else { Shuffle::Full };
        let plan = Plan::builder(RECORDS).batch(60).shuffle(shuffle).seed(thread).build().unwrap();
        let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto).unwrap();
        reader.begin(crate::asked::epoch(&plan, epoch));
        for batch in crate::asked::epoch(&plan, epoch) {
            if done.load(Ordering::Relaxed) {
                return counts;
            }
            match reader.read(&batch, &mut out) {
                Ok(_) => {
                    for (number, found) in batch.runs().flatten().zip(out.chunks_exact(RECORD)) {
                        assert!(
                            found == expected[usize::try_from(number).unwrap()],
                            "record {number} is wrong"
                        );
                    }
                    counts[0] += 1;
                }
                Err(Error::Truncated { .. } | Error::Replaced { .. }) => counts[1] += 1,
                Err(error) => panic!("{error}"),
            }
        }
    }
    counts
}

fn files_change_while_threads_read() {
    let changes = std::env::var("TWINBUF_CHANGES")
        .map_or_else(|_| twinbuf_testing::extent(15, 60), |changes| changes.parse().unwrap());
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("data");
    write(&path);
    let (done, delivered, missing) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (path, done, delivered, missing) = (&path, &done, &delivered, &missing);
            scope.spawn(move || {
                let [whole, cut] = read(path, thread, done);
                delivered.fetch_add(whole, Ordering::Relaxed);
                missing.fetch_add(cut, Ordering::Relaxed);
            });
        }
        change(&path, changes);
        // Readers that never met a file as it should be meet one now.
        std::thread::yield_now();
        done.store(true, Ordering::Relaxed);
    });
    println!("{changes} changes: {delivered:?} batches delivered, {missing:?} told as truncated");
}

#[test]
fn files_that_change_deliver_no_wrong_byte() {
    if std::env::var_os(CHILD).is_some() {
        crate::refused::refuse(&[libc::SYS_process_vm_writev], libc::EPERM);
        files_change_while_threads_read();
        return println!("{CHILD} is done");
    }
    files_change_while_threads_read();
    let test = "changed::files_that_change_deliver_no_wrong_byte";
    let Some(said) = crate::common::again(test, CHILD, "1") else { return };
    said.lines().filter(|line| line.contains(" changes: ")).for_each(|line| println!("refused: {line}"));
}

/// A pass over an epoch that was read before finds a change too, as that of a validation does.
#[test]
fn a_repeated_epoch_finds_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    fs::write(&path, [1; 64]).unwrap();
    let records = Arc::new(Records::open([&path], 8).unwrap());
    let plan = Plan::builder(8).batch(4).build().unwrap();
    let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto).unwrap();
    let pass = || {
        reader.begin(crate::asked::epoch(&plan, 0));
        crate::asked::epoch(&plan, 0).try_for_each(|batch| reader.read(&batch, &mut [0; 32]).map(drop))
    };
    pass().unwrap();
    pass().unwrap();
    fs::write(&path, [2; 64]).unwrap();
    // The clock of the file system may not have moved.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    assert!(matches!(pass(), Err(Error::Replaced { .. })));
}
