//! Very many batches: every one is correct, and memory grows by 64 KiB at most.
//!
//! At least 20 000 in `cargo test`, 10^5 with `TWINBUF_TEST_WHOLE=1`; 10^6 by `TWINBUF_SOAK_BATCHES=1000000 cargo
//! test --release --test soak`.

mod common;

use common::{RECORD, files, open, plan, record};
use twinbuf::Loader;

/// The anonymous memory of this process in KiB, page by page: `VmRSS` is only approximate (proc(5)) and includes code.
/// Pages that the system has swapped out count: it may load them again.
#[cfg(target_os = "linux")]
fn anonymous() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let lines = rollup.lines().filter(|line| line.starts_with("Anonymous:") || line.starts_with("Swap:"));
    lines.map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum()
}

#[test]
#[cfg(target_os = "linux")]
fn every_batch_is_right_and_the_memory_stays_the_same() {
    let batches: u64 = match std::env::var("TWINBUF_SOAK_BATCHES") {
        Ok(number) => number.parse().expect("a number of batches"),
        Err(_) => twinbuf_testing::extent(20_000, 100_000),
    };
    // If huge pages are always on, the kernel may replace a few small pages by one at any time (khugepaged).
    // SAFETY: takes no pointer. An older kernel that lacks it returns an error.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    let (_dir, paths) = files(&[600, 424]);
    let plan = plan(1024, 2);
    let mut loader = Loader::builder(open(&paths), plan.clone()).build().unwrap();
    let records: std::collections::HashMap<u64, Vec<u8>> = (0..1024).map(|i| (i, record(i))).collect();
    let mut done = 0;
    let mut before = 0;
    for epoch in 0..batches.div_ceil(plan.steps(0)) {
        let mut order =
            (0..).map_while(|step| plan.batch(epoch, step)).flat_map(|batch| batch.runs().flatten());
        for batch in loader.epoch(epoch) {
            for found in batch.unwrap().chunks_exact(RECORD) {
                let wanted = order.next().unwrap();
                assert!(found == records[&wanted], "record {wanted} in epoch {epoch}");
            }
            done += 1;
        }
        assert_eq!(order.next(), None);
        if epoch == 10 {
            // A report copies the times of the last batches, and the allocator keeps that memory.
            assert_eq!(loader.report().batches, done);
            before = anonymous();
        }
    }
    assert!(done >= batches && loader.report().batches == done && loader.report().loads == done);
    loader.close().unwrap();
    let after = anonymous();
    // A leak of five bytes per batch in the shortest run would exceed this; the allocator's normal variation does not.
    let allowed = 64;
    assert!(after <= before + allowed, "{before} KiB after 11 epochs, {after} KiB after {done} batches");
}
