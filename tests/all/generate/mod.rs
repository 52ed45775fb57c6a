//! Rounds made by code: identical in every mode, in order, started only when allowed, and never a hang. `histories` has
//! random calls in every mode.

mod faults;
mod lives;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use twinbuf::generate::Generator;
use twinbuf::loader::At;
use twinbuf::observe::{Trace, Verdict};
use twinbuf::{BoxError, Error, generate};

use crate::common::{LONG, yield_often};

/// Overlap and lockstep.
const MODES: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

fn round(round: u64) -> At {
    At { loader: None, epoch: round, step: None }
}

fn build<'h, F>(
    (overlap, lockstep): (bool, bool),
    hook: impl FnMut(u64) + Send + 'h,
    make: F,
) -> Generator<'h, Vec<u64>>
where
    F: FnMut(u64, &mut Vec<u64>) -> Result<(), BoxError> + Send + 'static,
{
    let builder = generate::with_slots([Vec::new(), Vec::new()], make).overlap(overlap);
    let builder = builder.held_timeout(Duration::from_millis(1));
    let mut hook = hook;
    let before = move |round| {
        hook(round);
        Ok::<(), BoxError>(())
    };
    if lockstep { builder.before(before) } else { builder }.build().unwrap()
}

/// Makes a round of its own number.
fn number(round: u64, slot: &mut Vec<u64>) -> Result<(), BoxError> {
    *slot = vec![round];
    Ok(())
}

/// Each part waits until as many parts are being made as there are threads, in turn or at once.
#[test]
fn the_same_parts_on_any_number_of_threads_which_all_work_at_once() {
    const PARTS: usize = 6;
    let of = |threads: usize, overlap| {
        let barrier = Barrier::new(threads.clamp(1, PARTS));
        let states: Vec<_> = (0..PARTS as u64).map(Mutex::new).collect();
        let make = move |round: u64, part: usize, games: &mut Vec<u64>| {
            barrier.wait();
            let mut state = states[part].lock().unwrap();
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round);
            games.clear();
            games.resize(part + 1, *state);
            Ok::<(), BoxError>(())
        };
        let slots: Vec<_> = (0..3).map(|_| vec![Vec::new(); PARTS]).collect();
        let mut generator = generate::with_parts(slots, threads, make).overlap(overlap).build().unwrap();
        let found: Vec<_> = generator.rounds(5).map(|round| round.unwrap().to_vec()).collect();
        generator.close().unwrap();
        found
    };
    let expected = of(1, false);
    assert_eq!(expected.len(), 5);
    for overlap in [false, true] {
        for threads in [0, 1, 2, 3, 6, 9] {
            assert_eq!(of(threads, overlap), expected, "{threads} threads, {overlap}");
        }
    }
    let fill = |_: u64, _: usize, _: &mut u64| Err("not called");
    let mut generator = generate::with_parts([vec![], vec![]], 2, fill).build().unwrap();
    assert_eq!(generator.rounds(3).map(|round| round.unwrap().len()).sum::<usize>(), 0);
}

#[test]
fn in_lockstep_a_round_sees_the_weights_of_when_the_one_before_it_was_taken() {
    let expected: Vec<u64> = [0, 0, 1, 2, 3, 4, 5, 6].into();
    for overlap in [false, true] {
        for left_after in 1..=8 {
            let trained = Mutex::new(0);
            let copy = Arc::new(AtomicU64::new(u64::MAX));
            let read = copy.clone();
            let make = move |_, slot: &mut Vec<u64>| {
                *slot = vec![read.load(Ordering::Relaxed)];
                Ok(())
            };
            let hook = |_| copy.store(*trained.lock().unwrap(), Ordering::Relaxed);
            let mut generator = build((overlap, true), hook, make);
            let mut found = Vec::new();
            while found.len() < 8 {
                for round in generator.rounds(8 - found.len() as u64).take(left_after) {
                    found.push(round.unwrap()[0]);
                    *trained.lock().unwrap() += 1;
                }
            }
            // Left early after the hook for the next round has run: that round is made from the state that the hook
            // saw.
            assert_eq!(found, expected, "overlap {overlap}, left after {left_after}");
        }
    }
}

#[test]
fn in_lockstep_no_round_starts_before_its_hook_has_run() {
    for overlap in [false, true] {
        let log = Arc::new(Mutex::new(Vec::new()));
        let of = |log: &Arc<Mutex<Vec<(&'static str, u64)>>>, what| {
            let log = log.clone();
            move |round| log.lock().unwrap().push((what, round))
        };
        let (started, made, hooked, took) =
            (of(&log, "start"), of(&log, "made"), of(&log, "hook"), of(&log, "took"));
        let make = move |round, _: &mut Vec<u64>| {
            started(round);
            made(round);
            Ok(())
        };
        let caller = std::thread::current().id();
        let hook = |round| {
            assert_eq!(std::thread::current().id(), caller);
            yield_often();
            hooked(round);
        };
        let mut generator = build((overlap, true), hook, make);
        for round in generator.rounds(30) {
            took(round.unwrap().number());
        }
        drop(generator);
        let log = log.lock().unwrap();
        let at = |what, round| {
            let mut found = log.iter().enumerate().filter(|(_, event)| **event == (what, round));
            let (at, _) = found.next().unwrap_or_else(|| panic!("no {what} {round}: {log:?}"));
            assert!(found.next().is_none(), "{what} {round} twice: {log:?}");
            at
        };
        for round in 0..30 {
            assert!(at("hook", round) < at("start", round), "overlap {overlap}, round {round}: {log:?}");
            assert!(at("made", round) < at("took", round), "overlap {overlap}, round {round}: {log:?}");
            if round > 0 {
                assert!(at("made", round - 1) < at("hook", round), "overlap {overlap}: {log:?}");
            }
        }
    }
}

#[test]
fn a_round_is_made_while_the_one_before_it_is_in_use() {
    for lockstep in [false, true] {
        let (holding, held) = mpsc::channel();
        let (started, starts) = mpsc::channel();
        let make = move |round, _: &mut Vec<u64>| {
            started.send(round)?;
            if round > 0 {
                let held: u64 = held.recv_timeout(LONG)?;
                assert_eq!(held, round - 1);
            }
            Ok(())
        };
        let mut generator = build((true, lockstep), |_| {}, make);
        for round in generator.rounds(20) {
            let round = round.unwrap();
            let number = round.number();
            if number == 0 {
                assert_eq!(starts.recv_timeout(LONG), Ok(0));
            }
            if number < 19 {
                // This round is held until the next one has begun; that one ends only while this one is held.
                assert_eq!(starts.recv_timeout(LONG), Ok(number + 1), "lockstep {lockstep}");
                holding.send(number).unwrap();
            }
            drop(round);
        }
    }
}

#[test]
fn nothing_is_made_that_was_not_asked_for() {
    for mode in MODES {
        let calls = Arc::new(AtomicU64::new(0));
        let counted = calls.clone();
        let make = move |_, _: &mut Vec<u64>| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let mut generator = build(mode, |_| {}, make);
        yield_often();
        drop(generator.rounds(5)); // never iterated
        yield_often();
        assert_eq!(calls.load(Ordering::Relaxed), 0, "{mode:?}");
        assert_eq!(generator.rounds(0).count(), 0);
        assert_eq!(generator.rounds(3).count(), 3);
        yield_often();
        drop(generator);
        assert_eq!(calls.load(Ordering::Relaxed), 3, "{mode:?}");
    }
}

#[test]
fn left_early_only_what_is_under_way_is_made() {
    let (started, starts) = mpsc::channel();
    let (release, released) = mpsc::channel();
    let make = move |round, _: &mut Vec<u64>| {
        started.send(round)?;
        released.recv_timeout(LONG)?;
        Ok(())
    };
    let mut generator = build((true, false), |_| {}, make);
    release.send(()).unwrap();
    drop(generator.rounds(100).next().unwrap().unwrap());
    // Round 1 may or may not be in progress. It is released, and no later round may begin.
    for _ in 0..10 {
        release.send(()).unwrap();
    }
    yield_often();
    drop(generator);
    let started: Vec<u64> = starts.iter().collect();
    assert!(started == [0] || started == [0, 1], "{started:?}");
}

#[test]
fn the_slots_are_recycled() {
    for mode in MODES {
        let slots = [(); 2].map(|()| Vec::<u64>::with_capacity(64));
        let buffers: HashSet<_> = slots.iter().map(Vec::as_ptr).collect();
        let builder = generate::with_slots(slots, |round, slot: &mut Vec<u64>| {
            slot.clear();
            slot.extend([round; 64]);
            Ok::<(), BoxError>(())
        })
        .overlap(mode.0);
        let mut generator =
            if mode.1 { builder.before(|_| Ok::<(), BoxError>(())) } else { builder }.build().unwrap();
        let rounds = generator.rounds(20).map(Result::unwrap);
        let found: Vec<_> = rounds.map(|round| ((&raw const *round).addr(), round.as_ptr())).collect();
        for pair in found.windows(3) {
            assert!(pair[0] == pair[2] && pair[0] != pair[1], "{mode:?}: two slots, in turn");
        }
        assert_eq!(found.iter().map(|(_, buffer)| *buffer).collect::<HashSet<_>>(), buffers, "{mode:?}");
    }
}

#[test]
fn the_report_adds_up() {
    for mode in MODES {
        let mut generator = build(mode, |_| {}, number);
        assert_eq!(generator.report().verdict(), Verdict::Unmeasured);
        for calls in 1..=3 {
            assert_eq!(generator.rounds(10).count(), 10);
            let report = generator.report();
            assert_eq!((report.epochs, report.batches), (0, calls * 10));
            assert!(report.wall >= report.train.busy + report.train.waiting, "{mode:?}: {report:?}");
            let text = report.to_string();
            assert!(text.starts_with(&format!("{} rounds in ", calls * 10)), "{text}");
            assert!((2..=5).contains(&text.lines().count()), "{text}");
        }
    }
}
