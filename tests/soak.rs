//! Very many batches: every one right, and no memory for them.
//!
//! 10^5 in `cargo test`; 10^6 by `TWINBUF_SOAK_BATCHES=1000000 cargo test --release --test soak`.

mod common;

use common::{RECORD, files, open, plan, record};
use twinbuf::Loader;

/// The anonymous memory of this process in KiB, page by page: `VmRSS` is only near it (proc(5)), and has code in it.
#[cfg(target_os = "linux")]
fn resident() -> u64 {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = rollup.lines().find(|line| line.starts_with("Anonymous:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn every_batch_is_right_and_the_memory_stays_the_same() {
    let batches: u64 = match std::env::var("TWINBUF_SOAK_BATCHES") {
        Ok(number) => number.parse().expect("a number of batches"),
        Err(_) => 100_000,
    };
    let (_dir, paths) = files(&[600, 424]);
    let plan = plan(1024, 2);
    let mut loader = Loader::builder(open(&paths), plan).build().unwrap();
    let records: std::collections::HashMap<u64, Vec<u8>> = (0..1024).map(|i| (i, record(i))).collect();
    let mut done = 0;
    let mut before = 0;
    for epoch in 0..batches.div_ceil(plan.steps()) {
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
            before = resident();
        }
    }
    assert!(done >= batches && loader.report().batches == done && loader.report().loads == done);
    loader.close().unwrap();
    let after = resident();
    // A byte lost with each batch of the shortest run would be more; the allocator's own ups and downs are less.
    let allowed = 64;
    assert!(after <= before + allowed, "{before} KiB after 11 epochs, {after} KiB after {done} batches");
}
