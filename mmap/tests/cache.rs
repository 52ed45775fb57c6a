//! Hints bring pages into the cache and eviction takes them out, as the kernel itself counts them.
#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::{Duration, Instant};

use twinbuf_mmap::{Order, Plan, Records, Residency};

const RECORD: usize = 4096;
const RECORDS: usize = 2048;

/// Below the smallest read-ahead limit in common use (128 KiB), so that no call is cut short.
const SMALL_PIECE: NonZeroUsize = NonZeroUsize::new(64 << 10).unwrap();

/// Two shards of different lengths. All counts here are multiples of 16 records, so that shards and batches
/// begin at a page also where pages are of 16 or 64 KiB.
fn data_set(folder: &Path) -> Records {
    let paths = [folder.join("a"), folder.join("b")];
    std::fs::write(&paths[0], vec![1; 768 * RECORD]).unwrap();
    std::fs::write(&paths[1], vec![2; (RECORDS - 768) * RECORD]).unwrap();
    Records::open(&paths, RECORD).unwrap()
}

/// File systems that live in memory keep their pages whatever they are told.
fn in_memory(folder: &Path) -> bool {
    let output = std::process::Command::new("stat").args(["-f", "-c", "%T"]).arg(folder).output().unwrap();
    matches!(String::from_utf8_lossy(&output.stdout).trim(), "tmpfs" | "ramfs")
}

/// Asks until `full`, or fails after a time in which any disk reads eight megabytes.
fn until_full(mut ask: impl FnMut() -> Residency) -> Residency {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let residency = ask();
        if residency.resident == residency.pages {
            return residency;
        }
        assert!(Instant::now() < deadline, "{residency:?}");
        std::thread::yield_now();
    }
}

#[test]
fn evicted_pages_are_gone_and_hinted_pages_come() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if in_memory(folder.path()) {
        eprintln!("not checked: {:?} lives in memory", folder.path());
        return;
    }
    let records = data_set(folder.path());
    let plan = Plan::builder(records.len()).batch(512).build().unwrap();
    let batch = |step| plan.batch(0, step).unwrap();

    // Just written, so resident and dirty: evicting has to write them out first.
    let before = records.residency().unwrap();
    assert_eq!(before.resident, before.pages);
    records.evict().unwrap();
    let evicted = records.residency().unwrap();
    assert_eq!(evicted, Residency { resident: 0, ..before });

    // Records 512..1024 lie in both shards. The other batches are not asked for.
    let hinted = records.will_need(&batch(1), SMALL_PIECE);
    assert_eq!(hinted.bytes, (512 * RECORD) as u64);
    assert_eq!(hinted.failed, 0);
    let batch_1 = until_full(|| records.residency_of(&batch(1)).unwrap());
    assert_eq!(batch_1.pages * page_bytes(&before), hinted.bytes);
    assert_eq!(records.residency_of(&batch(3)).unwrap().resident, 0);

    for step in [0, 2, 3] {
        records.will_need(&batch(step), SMALL_PIECE);
    }
    until_full(|| records.residency().unwrap());
}

/// Bytes in a page, from the number of pages of the whole data set.
fn page_bytes(all: &Residency) -> u64 {
    (RECORD * RECORDS) as u64 / all.pages
}

#[test]
fn one_call_for_every_piece_of_touching_pages() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let records = data_set(folder.path());
    let page = page_bytes(&records.residency().unwrap());
    let whole = Plan::builder(records.len()).batch(records.len()).build().unwrap().batch(0, 0).unwrap();
    let calls = |piece: usize| records.will_need(&whole, NonZeroUsize::new(piece).unwrap()).calls;
    // The shards are 768 and 1280 records long, and asked for apart.
    assert_eq!(calls(usize::MAX), 2);
    assert_eq!(calls(128 * RECORD), 6 + 10);
    assert_eq!(calls(1), records.residency().unwrap().pages);

    // All records one by one, in an order of their own: pages are asked for apart unless they touch.
    let plan = Plan::builder(records.len()).batch(records.len()).order(Order::Records).build().unwrap();
    let shuffled = plan.batch(0, 0).unwrap();
    let hinted = records.will_need(&shuffled, SMALL_PIECE);
    assert_eq!(hinted.failed, 0);
    assert!(hinted.bytes >= records.bytes(), "{hinted:?}");
    if page == 4096 {
        assert_eq!(hinted.bytes, records.bytes());
        assert!(hinted.calls >= shuffled.runs().count() as u64, "{hinted:?}");
    }
}

#[test]
fn small_records_on_one_page_take_one_call() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("small");
    std::fs::write(&path, [5; 600]).unwrap();
    let records = Records::open([&path], 6).unwrap();
    let plan = Plan::builder(100).batch(100).order(Order::Records).build().unwrap();
    let batch = plan.batch(0, 0).unwrap();
    assert!(batch.runs().count() > 50);
    let hinted = records.will_need(&batch, SMALL_PIECE);
    // Clamped to the file: 600 bytes, not the whole page.
    assert_eq!((hinted.calls, hinted.bytes, hinted.failed), (1, 600, 0));
}

#[test]
fn a_batch_of_another_data_set_is_counted_as_failed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("few");
    std::fs::write(&path, [5; 600]).unwrap();
    let records = Records::open([&path], 6).unwrap();
    let batch = Plan::builder(200).batch(200).build().unwrap().batch(0, 0).unwrap();
    let hinted = records.will_need(&batch, SMALL_PIECE);
    assert_eq!((hinted.calls, hinted.bytes, hinted.failed), (1, 600, 1));
    assert!(records.residency_of(&batch).is_err());
}

/// Records of 7/10 of a page, three to a batch: neighbours' pages touch though the records do not.
#[test]
fn no_page_of_a_batch_is_left_out() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let page = page_bytes(&data_set(folder.path()).residency().unwrap());
    let record = page * 7 / 10;
    let path = folder.path().join("records");
    std::fs::write(&path, vec![9; usize::try_from(20 * record).unwrap()]).unwrap();
    let records = Records::open([&path], usize::try_from(record).unwrap()).unwrap();
    for seed in 0..100 {
        let plan = Plan::builder(20).batch(3).order(Order::Records).seed(seed).build().unwrap();
        for step in 0..plan.steps() {
            let batch = plan.batch(0, step).unwrap();
            let pages: BTreeSet<u64> = batch
                .runs()
                .flat_map(|run| run.start * record / page..(run.end * record).div_ceil(page))
                .collect();
            let bytes: u64 = pages.iter().map(|at| page.min(records.bytes() - at * page)).sum();
            let hinted = records.will_need(&batch, SMALL_PIECE);
            assert!(hinted.bytes >= bytes, "seed {seed}, step {step}: {hinted:?}, {pages:?}");
        }
    }
}
