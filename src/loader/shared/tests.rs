//! Real threads: both fill one batch, again and again. Each record ends with its own number, whoever filled it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::AtomicU64;

use twinbuf_mmap::{Plan, Records, Shuffle};

use super::*;
use crate::error::At;
use crate::loader::{Loader, LoaderBuilder};
use crate::transform::{Convert, per_record};

const RECORDS: u64 = 23;
const EACH: usize = 3;

fn batch() -> BatchIndices {
    Plan::builder(RECORDS).batch(RECORDS).build().unwrap().batch(0, 0).unwrap()
}

fn write(part: &BatchIndices, (out, behind): Room<'_>) {
    let runs: Vec<u64> = part.runs().flatten().collect();
    assert_eq!(out.len(), runs.len() * EACH);
    assert_eq!(behind, Some(usize::try_from(RECORDS - 1 - runs.last().unwrap()).unwrap() * EACH));
    for (out, record) in out.chunks_exact_mut(EACH).zip(runs) {
        out.fill(u8::try_from(record).unwrap() + 1);
    }
}

fn expected() -> Vec<u8> {
    (1..=u8::try_from(RECORDS).unwrap()).flat_map(|record| [record; EACH]).collect()
}

fn split(part: u64) -> Split {
    Split { part, most: u64::MAX, each: EACH }
}

fn failed() -> Error {
    Error::ThreadGone { at: At { loader: None, epoch: 0, step: Some(0) } }
}

/// Fills `rounds` batches, with a caller that does `help` all the time. Returns how many records the caller filled.
fn run(rounds: u32, part: u64, help: impl Fn(&BatchIndices, Room<'_>) -> bool + Sync) -> u64 {
    let (shared, over, caller) = (Shared::default(), AtomicBool::new(false), AtomicU64::new(0));
    let calls = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let help = |field, part: &BatchIndices, room: Room<'_>| {
                    assert_eq!(field, 7);
                    help(part, room)
                };
                // What a panic leaves behind is what this is about.
                let _ = catch_unwind(AssertUnwindSafe(|| shared.help(help)));
                calls.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        for round in 0..rounds {
            let mut out = vec![0; expected().len()];
            let fill = |part: &BatchIndices, room: Room<'_>| {
                write(part, room);
                // The caller may not run for all of the rounds: the first one waits for a call that has seen it.
                let seen = calls.load(Ordering::Relaxed);
                while round == 0 && calls.load(Ordering::Relaxed) < seen + 2 {
                    std::thread::yield_now();
                }
                std::thread::yield_now();
                Ok(())
            };
            let did = shared.fill((7, &batch()), split(part), &mut out, fill).unwrap();
            assert_eq!(out, expected());
            caller.fetch_add(did.records, Ordering::Relaxed);
        }
        over.store(true, Ordering::Relaxed);
    });
    caller.into_inner()
}

const ROUNDS: u32 = if cfg!(miri) { 5 } else { 2000 };

#[test]
fn each_record_is_filled_once_whoever_takes_it() {
    for part in [1, 2, 5, 22] {
        let helped = run(ROUNDS, part, |part, room| {
            write(part, room);
            true
        });
        assert!(helped > 0, "parts of {part} records: the caller never took part");
    }
}

#[test]
fn what_the_caller_cannot_fill_is_filled_by_the_loading_thread() {
    let refuse = |_: &BatchIndices, (out, _): Room<'_>| {
        out.fill(0xEE);
        false
    };
    assert_eq!(run(ROUNDS, 2, refuse), 0);
}

#[test]
fn a_caller_that_panics_gives_its_part_back() {
    // Without a word on the terminal.
    assert_eq!(run(ROUNDS, 2, |_, _| resume_unwind(Box::new("in the caller"))), 0);
}

#[test]
fn the_first_part_that_fails_is_the_error() {
    let shared = Shared::default();
    let mut out = vec![0; expected().len()];
    let (mut asked, mut helped) = (Vec::new(), false);
    let result = shared.fill((7, &batch()), split(2), &mut out, |part, _| {
        let first = part.runs().next().unwrap().start;
        asked.push(first);
        // The caller has the part between these two, and cannot fill it either.
        helped |= first == 0 && shared.help(|_, part, _| part.runs().next().unwrap().start != 2);
        if first == 0 { Ok(()) } else { Err(failed()) }
    });
    assert!(result.is_err() && helped);
    assert_eq!(asked, [0, 4, 2], "the failure at 4 sends it back to the part at 2");
    assert!(!shared.help(|_, _, _| unreachable!("the fill is closed")));
}

/// Fills a batch in parts of 10 records or up to `most`. Returns the length of the first part.
fn first(shared: &Shared, most: u64, mut filled: impl FnMut(u64)) -> u64 {
    let (mut out, mut first) = (vec![0; expected().len()], None);
    let fill = |part: &BatchIndices, room: Room<'_>| {
        write(part, room);
        filled(*first.get_or_insert(part.len()));
        Ok(())
    };
    shared.fill((7, &batch()), Split { most, ..split(10) }, &mut out, fill).unwrap();
    assert_eq!(out, expected());
    first.unwrap()
}

#[test]
fn the_first_part_grows_while_the_loading_thread_waits_for_the_caller() {
    let shared = Shared::default();
    let lead = || shared.lead.load(Ordering::Relaxed);
    let has_part = AtomicBool::new(false);
    assert_eq!(first(&shared, 23, |_| {}), 10);
    for round in 0..=LEAD {
        has_part.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let since = Instant::now();
                let help = |_, part: &BatchIndices, room: Room<'_>| {
                    has_part.store(true, Ordering::Relaxed);
                    write(part, room);
                    // In the last round it stays as it is.
                    while if round < LEAD {
                        lead() == round
                    } else {
                        shared.has_parts.load(Ordering::Relaxed)
                    } {
                        assert!(since.elapsed() < Duration::from_secs(60), "the lead is still {round}");
                        std::thread::yield_now();
                    }
                    true
                };
                while !shared.help(help) {
                    std::thread::yield_now();
                }
            });
            first(&shared, 23, |_| {
                while !has_part.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
            });
        });
        match round {
            // The caller may have ended before the loading thread looked.
            LEAD => assert!([LEAD - 1, LEAD].contains(&lead()), "{}", lead()),
            _ => assert_eq!(lead(), round + 1),
        }
    }
    shared.lead.store(LEAD, Ordering::Relaxed);
    assert_eq!(first(&shared, 23, |_| {}), 17, "10 and 48/64 of it");
    assert_eq!(first(&shared, 13, |_| {}), 13, "no more than the transforms take");
    assert_eq!(lead(), LEAD, "a caller that did not help says nothing");
    let help = |_| {
        shared.help(|_, part, room| {
            write(part, room);
            true
        });
    };
    assert_eq!(first(&shared, 23, help), 17);
    assert_eq!(lead(), LEAD - 1, "the caller ended first");
}

#[test]
fn a_fill_that_panics_is_closed() {
    let (shared, mut out) = (Shared::default(), vec![0; expected().len()]);
    let fill = || {
        shared
            .fill((7, &batch()), split(2), &mut out, |_, _| resume_unwind(Box::new("in the loading thread")))
    };
    assert!(catch_unwind(AssertUnwindSafe(fill)).is_err());
    assert!(!shared.help(|_, _, _| unreachable!("the fill is closed")));
}

#[test]
fn small_batches_are_not_shared() {
    assert_eq!(Shared::part(64, 4096, None), Some(16));
    assert_eq!(Shared::part(31, 4096, None), None, "less than two parts");
    assert_eq!(Shared::part(1000, 4096, None), Some(125));
    assert_eq!(Shared::part(1000, 4096, Some(64)), Some(64), "no more than the transforms take");
    assert_eq!(Shared::part(2, 1 << 30, None), Some(1));
    assert_eq!(Shared::part(1, 1 << 30, None), None);
}

const SIZE: usize = 2048;

/// A file of 4 MiB, with its folder: where Linux has one in memory, because not all file systems count what they read.
fn file() -> (tempfile::TempDir, std::path::PathBuf) {
    let memory = std::path::Path::new("/dev/shm");
    let folder = if memory.exists() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
    let path = folder.path().join("data");
    let numbers = (0..2_u32 << 20).map(|at| u16::try_from(at * 7 % 65521).unwrap());
    std::fs::write(&path, numbers.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    (folder, path)
}

fn loader(path: &std::path::Path, shuffle: Shuffle) -> LoaderBuilder {
    let records = Records::open([path], SIZE).unwrap();
    let plan = Plan::builder(records.len()).batch(128).shuffle(shuffle).build().unwrap();
    Loader::builder(records, plan)
}

/// The first epochs find that the file is in memory.
fn warm(builder: LoaderBuilder) -> Loader {
    let mut loader = builder.build().unwrap();
    loader.epochs(0..8).for_each(|batch| drop(batch.unwrap()));
    loader
}

/// A file that is in memory, read by a caller that does nothing else.
#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "needs counted reads")]
#[cfg_attr(miri, ignore = "reads files")]
fn a_caller_that_waits_fills_parts_of_the_batches() {
    if std::thread::available_parallelism().unwrap().get() < 2 {
        return;
    }
    let (_folder, path) = file();
    for shuffle in [Shuffle::None, Shuffle::Full] {
        let mut alone = loader(&path, shuffle).transform(Convert::U16ToU32).overlap(false).build().unwrap();
        let alone: Vec<Vec<u8>> = alone.epoch(1).map(|batch| batch.unwrap().to_vec()).collect();
        let mut shared = warm(loader(&path, shuffle).transform(Convert::U16ToU32));
        // In some of the epochs the caller is in time.
        let helped = (0..500).find(|_| {
            let mut did = Duration::ZERO;
            for (batch, expected) in shared.epoch(1).zip(&alone) {
                let batch = batch.unwrap();
                assert!(*batch == **expected, "{shuffle:?}, step {}", batch.step());
                did += batch.times().helped.expect("the file is in memory");
            }
            !did.is_zero()
        });
        assert!(helped.is_some(), "{shuffle:?}: the caller never took part");
        // Nor does it run a closure of the program, which may belong to the loading thread.
        let copy = |record: &[u8], out: &mut [u8], _| {
            out.copy_from_slice(record);
            Ok(())
        };
        let mut closure = warm(loader(&path, shuffle).transform(per_record(SIZE, copy)));
        assert!(closure.epoch(8).all(|batch| batch.unwrap().times().helped.is_none()));
    }
}

/// A caller that helps still waits for a slot that another thread has.
#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn a_slot_that_another_thread_frees_soon_is_waited_for() {
    let (_folder, path) = file();
    let mut shared = warm(loader(&path, Shuffle::None));
    let (send, receive) = std::sync::mpsc::channel();
    let frees = std::thread::spawn(move || receive.iter().for_each(drop::<Vec<crate::Batch>>));
    for _ in 0..50 {
        let mut epoch = shared.epoch(0);
        while let Some(batch) = epoch.next() {
            let both = [Some(batch), epoch.next()].into_iter().flatten();
            send.send(both.map(|batch| batch.expect("a slot that is freed is no error")).collect()).unwrap();
        }
    }
    drop(send);
    frees.join().unwrap();
}
