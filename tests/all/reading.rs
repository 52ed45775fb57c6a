//! The hints that loaders send: each loader for its own reads, whoever else reads the same files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use twinbuf::{Loader, Plan, Records, Shuffle};

const RECORD: usize = 4096;
const RECORDS: usize = 8192;
const BYTES: u64 = (RECORD * RECORDS) as u64;

/// A file without any pages in the page cache. `None`, with a message, if the file system keeps it there.
fn cold_file() -> Option<(tempfile::TempDir, PathBuf)> {
    let (folder, path) = crate::common::written("data", vec![7; RECORD * RECORDS]);
    if evict(&path) {
        return Some((folder, path));
    }
    eprintln!("not checked: the file system lets go of nothing");
    None
}

/// Removes the file from the page cache. Tries again, because the kernel keeps a page that it is using at that moment.
fn evict(path: &Path) -> bool {
    gone(&Records::open([path], RECORD).unwrap())
}

fn gone(records: &Records) -> bool {
    (0..1000).any(|_| {
        records.evict().unwrap();
        records.residency().unwrap().resident == 0
    })
}

fn windows(range: std::ops::Range<u64>) -> Plan {
    let shuffle = Shuffle::Window { chunk_records: 64, window_chunks: 16 };
    let plan = Plan::builder(RECORDS as u64).batch(64).shuffle(shuffle).build().unwrap();
    plan.with_records(range).unwrap()
}

fn loader(data: &Arc<Records>, plan: Plan) -> Loader {
    Loader::builder(data.clone(), plan).build().unwrap()
}

/// The bytes requested by two loaders that alternate after `turn` batches.
fn two_loaders(data: [&Arc<Records>; 2], turn: usize) -> u64 {
    let plans = [windows(0..RECORDS as u64 / 2), windows(RECORDS as u64 / 2..RECORDS as u64)];
    let [mut first, mut second] = [0, 1].map(|which| loader(data[which], plans[which].clone()));
    let (mut one, mut other) = (first.epoch(0), second.epoch(0));
    loop {
        let read = one.by_ref().take(turn).count() + other.by_ref().take(turn).count();
        if read == 0 {
            break;
        }
    }
    drop((one, other));
    first.report().reading.hinted + second.report().reading.hinted
}

#[test]
fn two_loaders_on_one_data_set_ask_for_as_much_as_on_two() {
    let Some((_folder, path)) = cold_file() else { return };
    let open = || Arc::new(Records::open([&path], RECORD).unwrap());
    let apart = two_loaders([&open(), &open()], 1);
    assert!(evict(&path));
    let shared = open();
    let together = two_loaders([&shared, &shared], 1);
    assert!(together <= apart * 21 / 20, "{together} of one data set, {apart} of two");
    assert!(apart <= BYTES * 11 / 10, "{apart} of {BYTES}");
}

/// Like a validation.
#[test]
fn an_epoch_that_is_repeated_asks_again() {
    let Some((_folder, path)) = cold_file() else { return };
    let data = Arc::new(Records::open([&path], RECORD).unwrap());
    let plan = Plan::builder(RECORDS as u64).batch(64).shuffle(Shuffle::Full).build().unwrap();
    let mut loader = loader(&data, plan);
    let mut before = 0;
    for round in 0..3 {
        assert_eq!(loader.epoch(0).count(), RECORDS / 64);
        let hinted = loader.report().reading.hinted;
        let all = BYTES * 9 / 10..=BYTES * 11 / 10;
        assert!(all.contains(&(hinted - before)), "{round}: {hinted} - {before}");
        before = hinted;
        // This data set has its pages mapped.
        assert!(gone(&data));
    }
}
