//! Hints bring pages into the cache and eviction takes them out, as the kernel itself counts them.
#![cfg(target_os = "linux")]

#[path = "common/disk.rs"]
mod disk;

use std::collections::BTreeSet;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use twinbuf_mmap::{
    BatchPlan, CachePolicy, Error, HINT_CHUNK, Plan, ReadMode, Records, Residency, Shard, Shuffle,
};

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

fn folder_on_disk() -> Option<TempDir> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    (!disk::lives_in_memory(folder.path())).then_some(folder)
}

/// Whether an emulator keeps hints from the kernel, as QEMU does; tools/platforms.sh tells.
fn hints_go_nowhere() -> bool {
    let nowhere = std::env::var_os("TWINBUF_TEST_NO_HINTS").is_some();
    if nowhere {
        eprintln!("not checked: the emulator does not pass hints on");
    }
    nowhere
}

/// Three batches of 1024 records, 4 MiB, in one file: no folio of the cache, 2 MiB at most, belongs to two of them.
fn three_batches(folder: &Path) -> PathBuf {
    let path = folder.join("three");
    let file = File::create(&path).unwrap();
    std::fs::write(&path, vec![1; 3 * 1024 * RECORD]).unwrap();
    // Dirty pages are not dropped.
    file.sync_all().unwrap();
    path
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

/// Waits until all pages of a batch that was asked for are there. Asks again, since the kernel leaves pages out where
/// memory is short.
#[track_caller]
fn until_full(records: &Records, batch: &BatchPlan) -> Residency {
    let mut residency = records.residency_of(batch).unwrap();
    until(|| {
        if residency.resident < residency.pages {
            records.will_need(batch, SMALL_PIECE);
            residency = records.residency_of(batch).unwrap();
        }
        residency.resident == residency.pages
    });
    residency
}

#[test]
fn evicted_pages_are_gone_and_hinted_pages_come() {
    let Some(folder) = folder_on_disk() else { return };
    let records = data_set(folder.path());
    let plan = Plan::builder(records.len()).batch(512).build().unwrap();
    let batch = |step| plan.batch(0, step).unwrap();

    // Just written, so resident and dirty: evicting has to write them out first. Where memory is short, the kernel may be
    // faster, so it is not checked that all are there.
    let before = records.residency().unwrap();
    assert!(before.resident > 0, "{before:?}");
    evict(&records);
    assert_eq!(records.residency().unwrap(), Residency { resident: 0, ..before });
    if hints_go_nowhere() {
        return;
    }

    // Records 512..1024 lie in both shards. The other batches are not asked for.
    let hinted = records.will_need(&batch(1), SMALL_PIECE);
    assert_eq!(hinted.bytes, (512 * RECORD) as u64);
    assert_eq!(hinted.failed, 0);
    let batch_1 = until_full(&records, &batch(1));
    assert_eq!(batch_1.pages * page_bytes(&before), hinted.bytes);
    assert_eq!(records.residency_of(&batch(3)).unwrap().resident, 0);

    for step in [0, 2, 3] {
        records.will_need(&batch(step), SMALL_PIECE);
        until_full(&records, &batch(step));
    }
}

/// Bytes in a page, from the number of pages of the whole data set.
fn page_bytes(all: &Residency) -> u64 {
    (RECORD * RECORDS) as u64 / all.pages
}

/// Many pieces are one call where the kernel has it, so that only the bounds of `calls` are known.
#[test]
fn all_pieces_of_touching_pages_are_asked_for() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let data_set = data_set(folder.path());
    // Without huge pages.
    let options = Records::options().read_mode(ReadMode::Pread);
    let records = options.open(data_set.shards().iter().map(Shard::path), RECORD).unwrap();
    let whole = Plan::builder(records.len()).batch(records.len()).build().unwrap().batch(0, 0).unwrap();
    // The shards are 768 and 1280 records long, and asked for apart.
    for (piece, pieces) in [(usize::MAX, 2), (128 * RECORD, 6 + 10), (1, records.residency().unwrap().pages)]
    {
        let hinted = records.will_need(&whole, NonZeroUsize::new(piece).unwrap());
        assert_eq!((hinted.bytes, hinted.failed), (records.bytes(), 0), "pieces of {piece}");
        assert!((1..=pieces).contains(&hinted.calls), "pieces of {piece}: {hinted:?}");
    }

    // All records one by one, in an order of their own.
    let plan = Plan::builder(records.len()).batch(records.len()).shuffle(Shuffle::Records).build().unwrap();
    let hinted = records.will_need(&plan.batch(0, 0).unwrap(), SMALL_PIECE);
    assert_eq!((hinted.bytes, hinted.failed), (records.bytes(), 0));
    // Pieces of 16 records, as in order: in one call, or in one each.
    assert!([1, 48 + 80].contains(&hinted.calls), "{hinted:?}");
}

/// 1500 records of 8000, in more stretches than one call of the kernel takes, and every page comes.
#[test]
fn a_gather_is_asked_for_to_the_last_page() {
    let Some(folder) = folder_on_disk() else { return };
    let path = folder.path().join("gather");
    std::fs::write(&path, vec![3; 8000 * RECORD]).unwrap();
    let records = Records::open([&path], RECORD).unwrap();
    let plan = Plan::builder(8000).batch(1500).shuffle(Shuffle::Records).build().unwrap();
    let batch = plan.batch(0, 0).unwrap();
    assert!(batch.runs().count() > 1100);
    evict(&records);
    let hinted = records.will_need(&batch, SMALL_PIECE);
    assert_eq!(hinted.failed, 0, "{hinted:?}");
    assert!(hinted.bytes >= (1500 * RECORD) as u64, "{hinted:?}");
    if hints_go_nowhere() {
        return;
    }
    until_full(&records, &batch);
}

#[test]
fn used_batches_are_dropped_and_no_others() {
    let Some(folder) = folder_on_disk() else { return };
    let path = three_batches(folder.path());
    let records = Records::open([&path], RECORD).unwrap();
    let plan = Plan::builder(records.len()).batch(1024).build().unwrap();
    let batch = |step| plan.batch(0, step).unwrap();
    let resident = |step| records.residency_of(&batch(step)).unwrap().resident;
    let mut out = vec![0; 1024 * RECORD];
    let all = records.residency_of(&batch(0)).unwrap().pages;
    // Where memory is short, the kernel takes pages out itself.
    until(|| {
        for step in 0..3 {
            records.read(&batch(step), &mut out).unwrap();
        }
        records.evict_batch(&batch(1), CachePolicy::Keep).unwrap();
        let kept = resident(1);
        records.evict_batch(&batch(1), CachePolicy::Drop).unwrap();
        [kept, resident(0), resident(1), resident(2)] == [all, all, 0, all]
    });
    // They come back.
    out.fill(0);
    records.read(&batch(1), &mut out).unwrap();
    assert!(out.iter().all(|&byte| byte == 1));
    evict(&records);
}

/// Whether the kernel and the file system tell, said aloud if not: overlayfs, a container's, does not.
fn tells_what_needs_no_disk(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    let mut byte = 0_u8;
    let piece = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let start: libc::c_long = 0;
    // SAFETY: the descriptor is open; the kernel reads one entry and writes at most the byte that it names.
    let read = unsafe {
        libc::syscall(
            libc::SYS_preadv2,
            file.as_raw_fd(),
            &raw const piece,
            1_usize,
            start,
            start,
            libc::RWF_NOWAIT,
        )
    };
    let error = std::io::Error::last_os_error();
    let tells = read == 1 || error.raw_os_error() == Some(libc::EAGAIN);
    if !tells {
        eprintln!("not checked: preadv2: {error}");
    }
    tells
}

#[test]
fn a_batch_seems_cached_if_its_records_are() {
    let Some(folder) = folder_on_disk() else { return };
    let path = three_batches(folder.path());
    if !tells_what_needs_no_disk(&path) {
        return;
    }
    let records = Records::open([path], RECORD).unwrap();
    let plan = Plan::builder(records.len()).batch(1024).build().unwrap();
    let seems = || [0, 1, 2].map(|step| records.seems_cached(&plan.batch(0, step).unwrap()));
    let shuffled = Plan::builder(records.len()).batch(1500).shuffle(Shuffle::Records).build().unwrap();
    let shuffled = shuffled.batch(0, 0).unwrap();
    let mut out = vec![0; 1024 * RECORD];
    // Where memory is short, a page may have gone again.
    until(|| {
        for step in 0..3 {
            records.read(&plan.batch(0, step).unwrap(), &mut out).unwrap();
        }
        seems() == [true; 3] && records.seems_cached(&shuffled)
    });
    // A look at what is not there may bring it, and find it if the disk is faster than the look.
    let second = plan.batch(0, 1).unwrap();
    until(|| {
        for step in [0, 2] {
            records.read(&plan.batch(0, step).unwrap(), &mut out).unwrap();
        }
        records.evict_batch(&second, CachePolicy::Drop).unwrap();
        let residency = records.residency_of(&second).unwrap();
        residency.resident == 0 && seems() == [true, false, true]
    });
    until(|| {
        records.evict().unwrap();
        records.residency().unwrap().resident == 0 && seems() == [false; 3]
    });
    // One record, and one that is not there.
    let one = Plan::builder(records.len() + 1).build().unwrap();
    until(|| {
        records.read(&one.batch(0, 7).unwrap(), &mut [0; RECORD]).unwrap();
        records.seems_cached(&one.batch(0, 7).unwrap())
    });
    assert!(!records.seems_cached(&one.batch(0, records.len()).unwrap()));
}

/// Of two files the first is dropped, as a whole: the kernel keeps a large page of which a part is dropped.
#[test]
fn after_a_batch_that_is_there_one_record_tells_of_the_next() {
    let Some(folder) = folder_on_disk() else { return };
    let records = data_set(folder.path());
    records.evict().unwrap(); // dirty pages are not dropped
    let plan = |batch| Plan::builder(records.len()).batch(batch).build().unwrap();
    let (first, all) = (plan(768).batch(0, 0).unwrap(), plan(RECORDS as u64).batch(0, 0).unwrap());
    let mut out = vec![0; RECORDS * RECORD];
    records.read(&all, &mut out).unwrap();
    if !records.seems_cached(&all) {
        return eprintln!("not checked: the file system does not tell");
    }
    until(|| {
        records.read(&all, &mut out).unwrap();
        let there = records.seems_cached(&all);
        records.evict_batch(&first, CachePolicy::Drop).unwrap();
        there && records.residency_of(&first).unwrap().resident == 0 && records.seems_cached(&all)
    });
    let new = Records::open(records.shards().iter().map(twinbuf_mmap::Shard::path), RECORD).unwrap();
    until(|| {
        new.evict_batch(&first, CachePolicy::Drop).unwrap();
        new.residency_of(&first).unwrap().resident == 0 && !new.seems_cached(&all)
    });
}

/// Chunks of 64 KiB in windows of 8. The first batch asks for its window and begins the next; the others ask for the
/// rest, every chunk once, and before the batches that need it.
#[test]
fn a_windowed_epoch_is_asked_for_in_chunks_and_given_up_in_chunks() {
    let Some(folder) = folder_on_disk() else { return };
    let records = Records::open([three_batches(folder.path())], RECORD).unwrap();
    let shuffle = Shuffle::Window { records: 16, chunks: 8 };
    let plan = Plan::builder(records.len()).batch(8).shuffle(shuffle).build().unwrap();
    let batch = |step| plan.batch(0, step).unwrap();
    evict(&records);
    let window = (8 * 16 * RECORD) as u64;
    let mut asked = 0;
    for step in 0..plan.steps() {
        let hinted = records.will_need(&batch(step), SMALL_PIECE);
        assert_eq!(hinted.failed, 0);
        // Chunks begin anywhere, so with small pages of 4 KiB no byte more is asked for than there are chunks.
        assert_eq!(hinted.bytes >= window, step == 0, "step {step}: {hinted:?}");
        asked += hinted.bytes;
    }
    assert_eq!(asked, records.bytes());
    // Asked for once more, from the middle on, as after resuming in a new process.
    until(|| {
        records.evict().unwrap();
        let again = Records::open([records.shards()[0].path()], RECORD).unwrap();
        records.residency().unwrap().resident == 0 && again.will_need(&batch(20), SMALL_PIECE).bytes >= window
    });

    // Where memory is short the kernel leaves pages out, or takes them out; reading brings them.
    let mut out = vec![0; 8 * RECORD];
    let steps = 8 * 16 / 8;
    let resident =
        || (0..steps).map(|step| records.residency_of(&batch(step)).unwrap().resident).sum::<u64>();
    let before = 8 * 16;
    until(|| {
        for step in 0..3 * steps {
            records.read(&batch(step), &mut out).unwrap();
        }
        resident() == before
    });
    for step in 0..2 * steps {
        records.evict_batch(&batch(step), CachePolicy::Drop).unwrap();
    }
    // Folios that reach out of a chunk stay.
    assert!(resident() < before, "{} of {before} pages are left", resident());
}

#[test]
fn evicting_a_batch_of_another_data_set() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let records = data_set(folder.path());
    let more = Plan::builder(records.len() + 1).batch(1).build().unwrap().batch(0, records.len()).unwrap();
    records.evict_batch(&more, CachePolicy::Keep).unwrap();
    let error = records.evict_batch(&more, CachePolicy::Drop).unwrap_err();
    assert!(matches!(error, Error::NoSuchRecord { .. }), "{error:?}");
}

#[test]
fn small_records_on_one_page_take_one_call() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("small");
    std::fs::write(&path, [5; 600]).unwrap();
    let records = Records::open([&path], 6).unwrap();
    let plan = Plan::builder(100).batch(100).shuffle(Shuffle::Records).build().unwrap();
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

/// Records of 7/10 of a page, shuffled: pages that several of them share are found wherever in the batch they are.
#[test]
fn each_page_of_a_batch_is_asked_for_once() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let page = page_bytes(&data_set(folder.path()).residency().unwrap());
    let record = page * 7 / 10;
    let path = folder.path().join("records");
    std::fs::write(&path, vec![9; usize::try_from(20 * record).unwrap()]).unwrap();
    // `Auto` asks for more.
    let options = Records::options().read_mode(ReadMode::Pread);
    let records = options.open([&path], usize::try_from(record).unwrap()).unwrap();
    for seed in 0..100 {
        let plan =
            Plan::builder(20).batch(1 + seed % 7).shuffle(Shuffle::Records).seed(seed).build().unwrap();
        for step in 0..plan.steps() {
            let batch = plan.batch(0, step).unwrap();
            let pages: BTreeSet<u64> = batch
                .runs()
                .flat_map(|run| run.start * record / page..(run.end * record).div_ceil(page))
                .collect();
            let bytes: u64 = pages.iter().map(|at| page.min(records.bytes() - at * page)).sum();
            let hinted = records.will_need(&batch, SMALL_PIECE);
            assert_eq!(hinted.bytes, bytes, "seed {seed}, step {step}: {hinted:?}, {pages:?}");
        }
    }
}

/// A record here and there brings 128 KiB around it, and the second epoch asks again.
#[test]
fn small_records_bring_what_is_around_them_once_an_epoch() {
    const AROUND: u64 = 128 << 10;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("records");
    std::fs::write(&path, vec![9; 1 << 20]).unwrap();
    let records = Records::open([&path], 4096).unwrap();
    let plan = Plan::builder(256).batch(16).shuffle(Shuffle::Records).build().unwrap();
    for epoch in 0..2 {
        let mut asked = 0;
        for step in 0..plan.steps() {
            let batch = plan.batch(epoch, step).unwrap();
            let hinted = records.will_need(&batch, HINT_CHUNK);
            assert_eq!((hinted.bytes % AROUND, hinted.failed), (0, 0), "{epoch} {step}");
            asked += hinted.bytes;
            records.evict().unwrap();
            let again = records.will_need(&batch, HINT_CHUNK);
            assert_eq!(again.bytes, 0, "{epoch} {step}");
        }
        assert_eq!(asked, 1 << 20, "{epoch}");
    }
    // A rank of 32 reads one record of such a stretch an epoch.
    let plan = Plan::builder(256).batch(2).shuffle(Shuffle::Records).rank(0, 32).build().unwrap();
    let hinted = records.will_need(&plan.batch(0, 0).unwrap(), HINT_CHUNK);
    assert!((4096..=8192).contains(&hinted.bytes), "{hinted:?}");
}
