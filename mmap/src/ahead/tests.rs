use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::{BatchPlan, Cut, DType, HINT_CHUNK, Plan, ReadMode, Records, Shuffle, Tail};

/// Files of so many bytes each; the bytes depend on their place.
fn files(folder: &tempfile::TempDir, lens: &[usize]) -> Vec<PathBuf> {
    let file = |(len, number): (&usize, u32)| {
        let path = folder.path().join(number.to_string());
        let numbers = (0_u32..).map(|at| (at ^ number << 28).wrapping_mul(2_654_435_761));
        let bytes: Vec<u8> = numbers.flat_map(u32::to_le_bytes).take(*len).collect();
        std::fs::write(&path, bytes).unwrap();
        path
    };
    lens.iter().zip(0..).map(file).collect()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
}

/// The same files, read only when a batch needs them.
fn pread(mut records: Records) -> Records {
    records.around = None;
    records
}

/// `None`, said aloud, where the file system has no such reads.
fn direct(records: Records, straight: bool) -> Option<Records> {
    let mut records = pread(records);
    match records.open_direct(Ahead::new(straight, u64::MAX)) {
        Ok(()) => Some(records),
        Err(error) => {
            eprintln!("not checked: {error}");
            None
        }
    }
}

fn state(records: &Records) -> MutexGuard<'_, State> {
    records.ahead.as_ref().unwrap().state().unwrap()
}

fn read(records: &Records, batch: &BatchPlan) -> Vec<u8> {
    let len = usize::try_from(batch.len()).unwrap() * records.record_bytes();
    let mut out = vec![0xEE; len + 3];
    assert_eq!(records.read(batch, &mut out).unwrap(), len);
    assert_eq!(out.split_off(len), [0xEE; 3]);
    out
}

/// Rows, windows that overlap, windows with gaps, and rows that no block fits, in two files.
fn kinds(folder: &tempfile::TempDir) -> Vec<[Records; 3]> {
    let paths = files(folder, &[600_000, 1_320_000]);
    let cuts = [
        Cut::Rows,
        Cut::Windows { rows: 700, stride: 300 },
        Cut::Windows { rows: 100, stride: 130 },
        Cut::Windows { rows: 513, stride: 512 },
    ];
    let mut kinds: Vec<Vec<Records>> = cuts
        .iter()
        .map(|cut| (0..3).map(|_| Records::open_headerless(&paths, DType::U16, *cut).unwrap()).collect())
        .collect();
    kinds[0] = (0..3).map(|_| Records::open(&paths, 1000).unwrap()).collect();
    let kind = |kind: Vec<Records>| -> Option<[Records; 3]> {
        let mut kind = kind.into_iter();
        let pread = pread(kind.next()?);
        Some([pread, direct(kind.next()?, true)?, direct(kind.next()?, false)?])
    };
    kinds.into_iter().filter_map(kind).collect()
}

/// In every order, asked for one, several or no batches ahead, in one piece or in parts: the bytes are the same, and
/// nothing is left over that the order does not explain.
#[test]
fn batches_are_the_same_however_far_ahead_they_are_asked_for() {
    let folder = folder();
    for [pread, straight, all_ahead] in &kinds(&folder) {
        for records in [straight, all_ahead] {
            for shuffle in [
                Shuffle::None,
                Shuffle::Records,
                Shuffle::Chunks { records: 50 },
                Shuffle::Window { records: 64, chunks: 3 },
            ] {
                for (ahead, parts) in [(0, 1), (1, 1), (5, 3)] {
                    let plan = Plan::builder(pread.len())
                        .batch(70)
                        .shuffle(shuffle)
                        .tail(Tail::Keep)
                        .build()
                        .unwrap();
                    for step in 0..plan.steps() {
                        let batch = plan.batch(3, step).unwrap();
                        let first = if step == 0 { 0 } else { ahead };
                        for next in (first..=ahead)
                            .filter(|_| ahead > 0)
                            .filter_map(|ahead| plan.batch(3, step + ahead))
                        {
                            for part in 0..parts {
                                let part =
                                    next.part(next.len() * part / parts..next.len() * (part + 1) / parts);
                                if let Some(part) = part {
                                    assert_eq!(records.will_need(&part, HINT_CHUNK).failed, 0);
                                }
                            }
                        }
                        assert!(read(records, &batch) == read(pread, &batch), "{shuffle:?} {ahead} {step}");
                        let room = records.ahead_bytes(&plan);
                        assert!(state(records).held <= room, "{shuffle:?} {ahead} {step}");
                    }
                    let left = state(records).held;
                    let windows = matches!(shuffle, Shuffle::Window { .. });
                    assert!(
                        windows || records.stride() < records.record_bytes() as u64 || left == 0,
                        "{shuffle:?} {ahead}: {left}"
                    );
                }
            }
        }
    }
}

/// A window's chunks are read once, whole, whatever the records, and all of them are given up.
#[test]
fn a_window_is_read_once() {
    let folder = folder();
    let paths = files(&folder, &[4096 * 1000]);
    let Some(records) = direct(Records::open(&paths, 1024).unwrap(), true) else { return };
    let plan = Plan::builder(4000)
        .batch(100)
        .shuffle(Shuffle::Window { records: 256, chunks: 4 })
        .seed(5)
        .build()
        .unwrap();
    for epoch in 0..4 {
        let before = state(&records).asked;
        for step in 0..plan.steps() {
            let batch = plan.batch(epoch, step).unwrap();
            records.will_need(&batch, HINT_CHUNK);
            read(&records, &batch);
        }
        let state = state(&records);
        // The ring begins and ends within a block.
        assert!(state.asked - before <= 4096 * 1000 + 2 * 16 * 4096, "{epoch}: {}", state.asked - before);
        assert_eq!(state.held, 0, "{epoch}");
        assert!(state.pieces.is_empty() && state.tags.is_empty());
        assert!(state.order.len() <= 100, "{}", state.order.len());
    }
}

/// A loader asks for more than there is room for. What was asked for after that is not given up before its batch is read.
#[test]
fn what_is_asked_for_far_ahead_is_read_once() {
    let folder = folder();
    let paths = files(&folder, &[96 << 20]);
    let Some(records) = direct(Records::open(&paths, 64 << 10).unwrap(), true) else { return };
    let plan = Plan::builder(records.len()).batch(128).shuffle(Shuffle::Records).seed(5).build().unwrap();
    let pread = Records::open(&paths, 64 << 10).unwrap();
    let mut ahead = 1;
    for step in 0..plan.steps() {
        for _ in 0..2 {
            // 40 MiB after the batch.
            if ahead < plan.steps().min(step + 6) {
                records.will_need(&plan.batch(0, ahead).unwrap(), HINT_CHUNK);
                ahead += 1;
            }
        }
        let batch = plan.batch(0, step).unwrap();
        assert!(read(&records, &batch) == read(&pread, &batch), "{step}");
    }
    let state = state(&records);
    assert_eq!((state.asked, state.held), (96 << 20, 0));
}

/// Epochs that nobody finishes leave something behind, and it does not grow.
#[test]
fn what_is_left_of_other_epochs_makes_room() {
    let folder = folder();
    let paths = files(&folder, &[40 << 20]);
    let Some(records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    let plan = Plan::builder(records.len()).batch(256).shuffle(Shuffle::Records).build().unwrap();
    let windows =
        Plan::builder(records.len()).batch(256).shuffle(Shuffle::Window { records: 256, chunks: 8 });
    let windows = windows.build().unwrap();
    let pread = Records::open(&paths, 4096).unwrap();
    for epoch in 0..12 {
        let plan = if epoch % 4 == 3 { &windows } else { &plan };
        for step in 0..10 {
            for ahead in 0..8 {
                records.will_need(&plan.batch(epoch, step + ahead).unwrap(), HINT_CHUNK);
            }
            let batch = plan.batch(epoch, step).unwrap();
            assert!(read(&records, &batch) == read(&pread, &batch), "{epoch} {step}");
            assert!(state(&records).held <= records.ahead_bytes(&windows), "{epoch} {step}");
        }
    }
    // And goes on as before: what it asks for is not refused for long.
    let last = plan.steps() - 1;
    for step in 0..last {
        records.will_need(&plan.batch(12, step + 1).unwrap(), HINT_CHUNK);
        let held = state(&records).held;
        read(&records, &plan.batch(12, step).unwrap());
        assert!(step < 20 || held >= 256 * 4096, "{step}: {held}");
    }
    read(&records, &plan.batch(12, last).unwrap());
    assert!(state(&records).held <= AHEAD, "{}", state(&records).held);
}

/// Whoever leaves an epoch does not wait for the windows that it had asked for.
#[test]
fn another_epoch_does_not_wait_for_the_last_ones_windows() {
    let folder = folder();
    let paths = files(&folder, &[64 << 20]);
    let Some(records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    let order = Shuffle::Window { records: 256, chunks: 24 };
    let plan = Plan::builder(records.len()).batch(256).shuffle(order).build().unwrap();
    let batch = |epoch| plan.batch(epoch, 0).unwrap();
    records.will_need(&batch(0), HINT_CHUNK);
    let first = state(&records).next_tag;
    assert!(first >= 24, "{first}");
    records.will_need(&batch(1), HINT_CHUNK);
    // Those in flight are 8 MiB at most.
    let left = state(&records).tags.keys().filter(|&&tag| tag < first).count();
    assert!(left <= 9, "{left}");
    let pread = Records::open(&paths, 4096).unwrap();
    assert!(read(&records, &batch(1)) == read(&pread, &batch(1)));
}

/// Several threads read the batches of one plan, each asks for what another one reads.
#[test]
fn threads_share_what_is_ahead() {
    let folder = folder();
    let paths = files(&folder, &[8 << 20, 3 << 20]);
    let Some(records) = direct(Records::open(&paths, 512).unwrap(), false) else { return };
    let pread = Records::open(&paths, 512).unwrap();
    for shuffle in [Shuffle::Records, Shuffle::Window { records: 100, chunks: 20 }] {
        let plan = Plan::builder(records.len()).batch(300).shuffle(shuffle).build().unwrap();
        std::thread::scope(|scope| {
            for worker in 0..3 {
                let (records, pread, plan) = (&records, &pread, &plan);
                scope.spawn(move || {
                    for step in (worker..plan.steps()).step_by(3) {
                        if let Some(next) = plan.batch(0, step + 2) {
                            records.will_need(&next, HINT_CHUNK);
                        }
                        let batch = plan.batch(0, step).unwrap();
                        assert!(read(records, &batch) == read(pread, &batch), "{shuffle:?} {step}");
                    }
                });
            }
        });
    }
}

/// A read that fails is an error once, with its place; it is not tried again in silence.
#[test]
fn a_read_ahead_that_fails_is_an_error_with_its_place() {
    let folder = folder();
    let paths = files(&folder, &[1 << 20]);
    let Some(mut records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    let plan = Plan::builder(256).batch(16).shuffle(Shuffle::Records).build().unwrap();
    let batch = plan.batch(0, 0).unwrap();
    // A descriptor that cannot be read.
    let unreadable = Arc::new(File::options().append(true).open(&paths[0]).unwrap());
    let wanted = io::Read::read(&mut &*unreadable, &mut [0]).unwrap_err().kind();
    let readable = records.shards_mut()[0].direct.as_mut().unwrap().replace(unreadable);
    records.will_need(&batch, HINT_CHUNK);
    records.shards_mut()[0].direct.as_mut().unwrap().replace(readable);
    let mut out = vec![0; 16 * 4096];
    let Err(crate::Error::Read { path, offset, source }) = records.read(&batch, &mut out) else {
        panic!("wanted an error")
    };
    assert_eq!((path, source.kind()), (paths[0].clone(), wanted));
    assert_eq!(offset % 4096, 0);
    // Each piece fails once.
    let failures = (0..20).take_while(|_| records.read(&batch, &mut out).is_err()).count();
    assert!(failures < 16, "{failures}");
    assert!(out == read(&Records::open(&paths, 4096).unwrap(), &batch));
}

/// Its parent's reads are under way when the child begins to use the same records.
#[cfg(target_os = "linux")]
#[test]
fn a_forks_child_reads_alone() {
    let folder = folder();
    let paths = files(&folder, &[8 << 20]);
    let Some(records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    let pread = Records::open(&paths, 4096).unwrap();
    let plan = Plan::builder(records.len()).batch(256).shuffle(Shuffle::Records).build().unwrap();
    let batch = |step| plan.batch(0, step).unwrap();
    for step in 0..4 {
        records.will_need(&batch(step), HINT_CHUNK);
    }
    let expected = [read(&pread, &batch(0)), read(&pread, &batch(1))];
    let mut out = vec![0; 256 * 4096];
    // SAFETY: the child reads files into memory that it has, and exits.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", io::Error::last_os_error());
    if child == 0 {
        // SAFETY: takes no pointer. It ends a child that hangs.
        unsafe { libc::alarm(600) };
        let same = (0..2).all(|step: u8| {
            records.will_need(&batch(u64::from(step)), HINT_CHUNK);
            records.read(&batch(u64::from(step)), &mut out).is_ok() && out == expected[usize::from(step)]
        });
        drop(records);
        // SAFETY: takes no pointer.
        unsafe { libc::_exit(i32::from(!same)) };
    }
    assert!(read(&records, &batch(0)) == expected[0] && read(&records, &batch(1)) == expected[1]);
    let mut status = 0;
    // SAFETY: the kernel writes one status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}

#[test]
fn the_mode_fits_the_memory() {
    let folder = folder();
    let paths = files(&folder, &[1 << 20, 3 << 20]);
    let open = |record: usize| Records::open(&paths, record).unwrap();
    if direct(open(4096), true).is_none() {
        return;
    }
    for (record, memory, mode) in [
        (4096, Some(8 << 20), ReadMode::Pread),
        (4096, Some((8 << 20) - 2), ReadMode::Direct),
        (4096, None, ReadMode::Pread),
        (1 << 20, Some(0), ReadMode::Direct),
    ] {
        assert_eq!(open(record).with_fitting_mode(memory).read_mode(), mode, "{record} {memory:?}");
    }
    let large = Records::open(&paths[1..], 3 << 20).unwrap();
    assert_eq!(large.with_fitting_mode(Some(0)).read_mode(), ReadMode::Direct);
    let paths = files(&folder, &[4 << 20]);
    let larger = Records::open(&paths, 4 << 20).unwrap();
    assert_eq!(larger.with_fitting_mode(Some(0)).read_mode(), ReadMode::Pread);
    // A machine with 8 MiB of memory runs no tests.
    assert_eq!(open(4096).asked.load(Relaxed), 0);
    assert_eq!(open(4096).read_mode(), ReadMode::Pread);
}

/// A file that is larger than memory, of which nothing is on the disk.
#[cfg(target_os = "linux")]
#[test]
fn what_no_memory_holds_is_read_past_the_page_cache_by_default() {
    let folder = folder();
    let path = folder.path().join("large");
    let file = File::create(&path).unwrap();
    let len = crate::limit::memory().unwrap() / 2;
    let open = || Records::open([&path], 4096).unwrap();
    file.set_len(len / 4096 * 4096).unwrap();
    assert_eq!(open().read_mode(), ReadMode::Pread);
    if direct(open(), true).is_none() {
        return;
    }
    file.set_len((len / 4096 + 1) * 4096).unwrap();
    assert_eq!(open().read_mode(), ReadMode::Direct);
    let in_mode = |mode| Records::options().read_mode(mode).open([&path], 4096).unwrap();
    assert_eq!(in_mode(ReadMode::Pread).read_mode(), ReadMode::Pread, "whatever fits");
    assert!(in_mode(ReadMode::Direct).ahead.is_some_and(|ahead| ahead.straight), "not as `Auto` opens it");
}

/// Validation between the steps of training: the windows of training stay in memory.
#[test]
fn other_batches_leave_windows_alone() {
    let folder = folder();
    let paths = files(&folder, &[80 << 20]);
    let Some(records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    let pread = pread(Records::open(&paths, 4096).unwrap());
    let order = Shuffle::Window { records: 64, chunks: 100 };
    let train = Plan::builder(18_000).batch(256).shuffle(order).build().unwrap();
    let validation = Plan::builder(records.len()).batch(256).shuffle(Shuffle::Records).build().unwrap();
    let validation = validation.with_range(18_000..20_480).unwrap();
    let mut asked = 0;
    for step in 0..train.steps() {
        let before = state(&records).asked;
        let batch = train.batch(0, step).unwrap();
        records.will_need(&batch, HINT_CHUNK);
        assert!(read(&records, &batch) == read(&pread, &batch), "{step}");
        asked += state(&records).asked - before;
        if step % 4 == 3 {
            let batch = validation.batch(0, step % validation.steps()).unwrap();
            records.will_need(&batch, HINT_CHUNK);
            assert!(read(&records, &batch) == read(&pread, &batch), "{step}");
        }
        assert!(state(&records).held <= records.ahead_bytes(&train));
    }
    assert!(asked <= 18_000 * 4096 * 11 / 10, "{asked}");
}

/// Batches whose pieces are of other sizes each time.
#[test]
fn memory_of_all_sizes_together_is_bounded() {
    let folder = folder();
    let paths = files(&folder, &[40 << 20]);
    let Some(records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    for chunk in (0..9).map(|power| 1 << power) {
        let order = Shuffle::Chunks { records: chunk };
        let plan = Plan::builder(records.len()).batch(9000).shuffle(order).build().unwrap();
        read(&records, &plan.batch(0, 0).unwrap());
        let (taken, most) = (state(&records).pool.taken(), records.ahead_bytes(&plan));
        assert!(taken <= most, "{chunk}: {taken} of {most}");
    }
}

/// Batches of many sizes, then windows that nobody finishes: all that follows is still read ahead.
#[test]
fn what_is_left_keeps_no_memory_from_later_batches() {
    let folder = folder();
    let paths = files(&folder, &[64 << 20]);
    let Some(records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    let plan = |order| Plan::builder(records.len()).batch(512).shuffle(order).build().unwrap();
    let steps = |plan: &Plan, steps: u64| {
        let mut asked = 0;
        for step in 0..steps {
            let before = state(&records).asked;
            records.will_need(&plan.batch(0, step + 1).unwrap(), HINT_CHUNK);
            read(&records, &plan.batch(0, step).unwrap());
            asked += state(&records).asked - before;
        }
        asked
    };
    for chunk in [1, 3, 9, 20, 50, 100, 200] {
        steps(&plan(Shuffle::Chunks { records: chunk }), 5);
    }
    steps(&plan(Shuffle::Window { records: 64, chunks: 100 }), 15);
    steps(&plan(Shuffle::Records), 20);
    // The windows still have a part of it. The rest is not left to calls that wait for one record each.
    let asked = steps(&plan(Shuffle::Chunks { records: 2 }), 8);
    assert!(asked >= 4 << 20, "{asked}");
}

/// Each thread has a large batch of its own.
#[test]
fn threads_with_large_batches_share_the_memory() {
    let folder = folder();
    let paths = files(&folder, &[64 << 20]);
    let Some(records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    let plan = Plan::builder(records.len()).batch(4096).shuffle(Shuffle::Records).build().unwrap();
    std::thread::scope(|scope| {
        for step in 0..4 {
            let (records, plan) = (&records, &plan);
            scope.spawn(move || {
                let batch = plan.batch(0, step).unwrap();
                let mut out = vec![0; 16 << 20];
                for part in 0..4 {
                    let part = batch.part(part * 1024..(part + 1) * 1024).unwrap();
                    records.read(&part, &mut out).unwrap();
                }
                records.read(&batch, &mut out).unwrap();
            });
        }
    });
    let state = state(&records);
    assert!(state.pool.taken() <= records.ahead_bytes(&plan), "{}", state.pool.taken());
    assert!(state.asked <= 140 << 20, "{}", state.asked);
}

/// Disks with blocks of 4096 bytes read a hole at the front of a file in smaller ones.
#[cfg(target_os = "linux")]
#[test]
fn a_block_that_is_too_small_grows() {
    let folder = folder();
    let paths = files(&folder, &[1 << 20]);
    File::open(&paths[0]).unwrap().sync_all().unwrap();
    let pread = Records::options().partial(true).open(&paths, 1000).unwrap();
    for straight in [false, true] {
        let records = Records::options().partial(true).open(&paths, 1000).unwrap();
        let Some(mut records) = direct(records, straight) else { return };
        records.shards_mut()[0].direct.as_mut().unwrap().set_block(128);
        let plan = Plan::builder(records.len()).batch(100).shuffle(Shuffle::Records).build().unwrap();
        for step in 0..3 {
            let batch = plan.batch(0, step).unwrap();
            assert!(read(&records, &batch) == read(&pread, &batch), "{step}");
        }
        let direct = records.shards()[0].direct.as_ref().unwrap();
        // File systems that live in memory take any block.
        let mut out = [0; 128];
        if crate::file::read_at(direct.kept().unwrap(), &mut out, 128).is_ok() {
            return eprintln!("not checked: the file system reads blocks of 128 bytes");
        }
        assert!(direct.block() >= 512);
    }
}

/// Reads straight to the caller's memory would harm a program that forks: `Auto` makes none.
#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_read_ahead_comes_through_the_page_cache_by_default() {
    let folder = folder();
    let paths = files(&folder, &[1 << 20]);
    let plan = Plan::builder(256).batch(128).shuffle(Shuffle::Records).build().unwrap();
    let batch = plan.batch(0, 0).unwrap();
    for straight in [true, false] {
        let Some(records) = direct(Records::open(&paths, 4096).unwrap(), straight) else { return };
        let panicked = std::thread::scope(|scope| {
            let panic = || {
                let _state = state(&records);
                panic!("with the state locked");
            };
            scope.spawn(panic).join()
        });
        assert!(panicked.is_err());
        records.evict().unwrap();
        if records.residency().unwrap().resident > 0 {
            return eprintln!("not checked: the file system keeps its pages");
        }
        let found = read(&records, &batch);
        assert_eq!(records.residency().unwrap().resident > 0, !straight);
        assert!(found == read(&Records::open(&paths, 4096).unwrap(), &batch));
    }
}

/// Memory that cannot be given back must not be what the process may use.
#[test]
fn auto_leaves_windows_that_are_too_large_to_the_page_cache() {
    let folder = folder();
    let paths = files(&folder, &[4 << 20]);
    let records = pread(Records::open(&paths, 4096).unwrap());
    let expected = pread(Records::open(&paths, 4096).unwrap());
    let order = Shuffle::Window { records: 256, chunks: 2 };
    let plan = |order| Plan::builder(expected.len()).batch(100).shuffle(order).build().unwrap();
    let (windows, alone) = (plan(order), plan(Shuffle::Records));

    // Half of the file's bytes: so large a file is read past the cache; a quarter of it is no room for two windows.
    let records = records.with_fitting_mode(Some(2 << 20));
    if records.read_mode() == ReadMode::Pread {
        return eprintln!("not checked: no direct reads here");
    }
    assert_eq!((records.ahead_bytes(&windows), records.ahead_bytes(&alone)), (0, 32 << 20));
    for step in 0..windows.steps() {
        let batch = windows.batch(0, step).unwrap();
        records.will_need(&batch, HINT_CHUNK);
        assert!(read(&records, &batch) == read(&expected, &batch));
        assert_eq!(state(&records).asked, 0);
    }
    records.will_need(&alone.batch(0, 0).unwrap(), HINT_CHUNK);
    assert!(state(&records).asked > 0);
}

#[test]
fn a_window_is_no_larger_than_the_data_set() {
    let folder = folder();
    let paths = files(&folder, &[1 << 20]);
    let Some(records) = direct(Records::open(&paths, 4096).unwrap(), true) else { return };
    let order = Shuffle::Window { records: 1 << 40, chunks: 1 << 10 };
    let plan = Plan::builder(records.len()).batch(100).shuffle(order).build().unwrap();
    assert_eq!(records.ahead_bytes(&plan), (32 << 20) + (1 << 20) / 4 * 9);
}
