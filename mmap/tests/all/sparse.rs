//! Memory stays flat over many batches of a sparse file of 20 GiB, in a second process.

use std::fs::File;

use twinbuf_mmap::{Plan, Records, Shuffle};

/// Set in the process that reads.
const CHILD: &str = "TWINBUF_SPARSE";

const BATCHES: u64 = 100_000;

/// This process's memory, mapped pages of files and all, in KiB: `proc_pid_status(5)`.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// In the parent: starts itself once. In the child: reads, and fails if it grew by 8 MiB.
#[test]
fn a_hundred_thousand_batches_of_a_sparse_file() {
    if std::env::var_os(CHILD).is_some() {
        read();
        return println!("{CHILD} is done");
    }
    let test = "sparse::a_hundred_thousand_batches_of_a_sparse_file";
    crate::common::again(test, CHILD, "1").iter().for_each(|said| print!("{said}"));
}

fn read() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("sparse");
    File::create(&path).unwrap().set_len(20 << 30).unwrap();
    let records = Records::open([&path], 64).unwrap();
    // Pieces of 1 MiB from all over the file, 25 of them.
    let order = Shuffle::Chunks { records: (1 << 20) / 64 };
    let plan = Plan::builder(records.len()).batch(4).shuffle(order).build().unwrap();
    let mut out = [0xEE; 4 * 64];
    let mut batch = |step| {
        let batch = plan.batch(0, step).unwrap();
        records.read(&batch, &mut out).unwrap();
        assert_eq!(out, [0; 4 * 64]);
    };
    // What is loaded and allocated once is there before the first look.
    (0..100).for_each(&mut batch);
    let before = resident();
    (100..BATCHES).for_each(&mut batch);
    let after = resident();
    eprintln!("{before} KiB before, {after} KiB after {BATCHES} batches");
    assert!(after < before + 8 * 1024, "{before} KiB before, {after} KiB after");
}
