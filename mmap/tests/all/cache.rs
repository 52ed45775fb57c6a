//! What is asked for comes into the page cache, and eviction takes it out, as the kernel itself counts it.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::asked::write;
use tempfile::TempDir;
use twinbuf_mmap::{BatchIndices, Plan, ReadMode, ReadStats, Reader, Records, Residency, Shuffle};

const RECORD: usize = 4096;

/// A file of records of [`RECORD`] bytes.
fn data_set(folder: &Path, records: usize) -> Arc<Records> {
    let path = folder.join("data");
    std::fs::write(&path, vec![1; records * RECORD]).unwrap();
    Arc::new(Records::open([path], RECORD).unwrap())
}

fn folder_on_disk() -> Option<TempDir> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    (!crate::disk::lives_in_memory(folder.path())).then_some(folder)
}

/// Whether an emulator keeps hints from the kernel, as QEMU does; tools/platforms.sh tells.
fn hints_go_nowhere() -> bool {
    let nowhere = std::env::var_os("TWINBUF_TEST_NO_HINTS").is_some();
    if nowhere {
        eprintln!("not checked: the emulator does not pass hints on");
    }
    nowhere
}

/// Asks until it holds, or fails after a time in which any disk reads eight megabytes.
#[track_caller]
fn until(mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(300);
    while !holds() {
        assert!(Instant::now() < deadline, "not within five minutes");
        std::thread::yield_now();
    }
}

/// Takes all pages out of the cache. Tries again, since the kernel leaves a page that it is just looking at itself.
#[track_caller]
fn evict(records: &Records) {
    until(|| {
        records.evict().unwrap();
        records.residency().unwrap().resident == 0
    });
}

/// Reads the first of these batches alone, and returns what was asked for until then.
fn ask(records: &Arc<Records>, plan: &Plan, batches: &[BatchIndices]) -> ReadStats {
    let reader = Reader::new(records.ranges(), plan, ReadMode::Auto).unwrap();
    reader.begin(batches.to_vec());
    let mut out = vec![0; usize::try_from(batches[0].len()).unwrap() * records.record_bytes()];
    reader.read(&batches[0], &mut out).unwrap();
    reader.stats()
}

#[test]
fn evicted_pages_are_gone_and_pages_that_are_asked_for_come() {
    let Some(folder) = folder_on_disk() else { return };
    let records = data_set(folder.path(), 2048);
    let plan = Plan::builder(records.len()).batch(512).build().unwrap();
    let batch = |step| plan.batch(0, step).unwrap();
    // Just written, so resident and dirty: evicting has to write them out first. Where memory is short, the kernel may be
    // faster, so it is not checked that all are there.
    let before = records.residency().unwrap();
    assert!(before.resident > 0, "{before:?}");
    // Some are mapped too.
    let mut out = vec![0; 1024 * RECORD];
    let shuffled = Plan::builder(records.len()).batch(1024).shuffle(Shuffle::Full).build().unwrap();
    records.read(&shuffled.batch(0, 0).unwrap(), &mut out).unwrap();
    evict(&records);
    assert_eq!(records.residency().unwrap(), Residency { resident: 0, ..before });
    if hints_go_nowhere() {
        return;
    }
    // The batch after the one that is read. It does not follow that one in the file. The others are not asked for.
    until(|| {
        evict(&records);
        let stats = ask(&records, &plan, &[batch(0), batch(2)]);
        assert_eq!((stats.hinted, stats.failed), ((512 * RECORD) as u64, 0));
        // The kernel leaves pages out where memory is short.
        let deadline = Instant::now() + Duration::from_secs(10);
        let full = || records.residency_of(&batch(2)).unwrap();
        while full().resident < full().pages && Instant::now() < deadline {
            std::thread::yield_now();
        }
        full().resident == full().pages
    });
    // Large pages may end behind what was asked for.
    let next = records.residency_of(&batch(3)).unwrap();
    assert!(next.resident <= next.pages / 4, "{next:?}");
}

/// Many pieces are one call where the kernel has it, so only the bounds of `hints` are known.
#[test]
fn what_touches_is_asked_for_together() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("touching");
    // Records of a page each, and small ones on one page.
    for (record, count, pieces) in [(RECORD, 2048, 8), (6, 100, 1)] {
        std::fs::write(&path, vec![5; record * count]).unwrap();
        let records = Arc::new(Records::open([&path], record).unwrap());
        // All records one by one, in another order.
        let plan = Plan::builder(records.len()).batch(records.len()).shuffle(Shuffle::Full).build().unwrap();
        let stats = ask(&records, &plan, &[plan.batch(0, 0).unwrap()]);
        assert_eq!((stats.hinted, stats.failed), (records.bytes(), 0));
        // In pieces of 1 MiB.
        assert!([1, pieces].contains(&stats.hints), "{stats:?}");
    }
}

#[test]
fn a_batch_of_another_data_set_is_counted_as_failed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let records = data_set(folder.path(), 10);
    let plan = Plan::builder(200).batch(1).shuffle(Shuffle::Full).build().unwrap();
    let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto).unwrap();
    let [known, unknown] =
        [9, 150].map(|record| Plan::builder(200).build().unwrap().batch(0, record).unwrap());
    reader.begin([known.clone(), unknown.clone()]);
    reader.read(&known, &mut [0; RECORD]).unwrap();
    assert_eq!(reader.stats().failed, 1);
    assert!(records.residency_of(&unknown).is_err());
}

/// Records of 7/10 of a page, shuffled: pages that several of them share are found wherever in the batch they are.
#[test]
fn each_page_of_a_batch_is_asked_for_once() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let page = (16 * RECORD) as u64 / data_set(folder.path(), 16).residency().unwrap().pages;
    let record = page * 7 / 10;
    let path = write(folder.path(), "records", vec![9; usize::try_from(20 * record).unwrap()]);
    let records = Arc::new(Records::open([&path], usize::try_from(record).unwrap()).unwrap());
    // A rank of many does not ask for what is around its records.
    let many = Plan::builder(20).rank(0, 1000).last_batch(twinbuf_mmap::LastBatch::Keep).build().unwrap();
    for seed in 0..100 {
        let plan = Plan::builder(20).batch(2 + seed % 7).shuffle(Shuffle::Full).seed(seed).build().unwrap();
        for step in 0..plan.steps(0) {
            let batch = plan.batch(0, step).unwrap();
            if batch.runs().count() == 1 {
                continue;
            }
            let pages: BTreeSet<u64> = batch
                .runs()
                .flat_map(|run| run.start * record / page..(run.end * record).div_ceil(page))
                .collect();
            let bytes: u64 = pages.iter().map(|at| page.min(records.bytes() - at * page)).sum();
            let stats = ask(&records, &many, &[batch]);
            assert_eq!(stats.hinted, bytes, "seed {seed}, step {step}: {stats:?}, {pages:?}");
        }
    }
}

/// A record here and there brings 128 KiB around it, once an epoch. The next epoch asks again.
#[test]
fn small_records_bring_what_is_around_them_once_an_epoch() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let records = data_set(folder.path(), 256);
    let plan = Plan::builder(256).batch(16).shuffle(Shuffle::Full).build().unwrap();
    let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto).unwrap();
    let mut out = vec![0; 16 * RECORD];
    for epochs in 1..4 {
        // In one shared sequence, and in a separate one.
        let batches = || {
            let plan = plan.clone();
            (0..32).filter_map(move |step| plan.batch(step / 16, step % 16))
        };
        reader.begin(batches());
        for batch in batches() {
            reader.read(&batch, &mut out).unwrap();
        }
        assert_eq!(reader.stats().hinted, epochs * (2 << 20), "{:?}", reader.stats());
    }
}
