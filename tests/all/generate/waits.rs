//! Rounds that are waited for in every way, numbered from anywhere, and hooks on both sides of a round.

use std::collections::VecDeque;

use super::*;

type Log = Arc<Mutex<VecDeque<String>>>;

#[test]
fn a_hook_runs_once_a_round_however_often_it_is_waited_for() {
    let (go, wait) = mpsc::channel::<()>();
    let make = move |_, _: &mut Vec<u64>| Ok(wait.recv_timeout(LONG)?);
    let mut hooks = 0;
    let mut generator = build((true, true), |_| hooks += 1, make);
    let mut rounds = generator.rounds(1);
    for _ in 0..5 {
        assert!(rounds.try_next().is_pending(), "nothing was made");
        assert!(rounds.next_timeout(Duration::from_micros(1)).is_pending(), "nothing was made");
    }
    go.send(()).unwrap();
    assert_eq!(rounds.next().unwrap().unwrap().number(), 0);
    drop(rounds);
    drop(generator);
    assert_eq!(hooks, 1);
}

/// A generator whose hooks and rounds write down what happens.
fn logged(overlap: bool, log: &Log, fail: Option<u64>) -> Generator<'static, u64> {
    let (before, after) = (log.clone(), log.clone());
    let mut fail = fail;
    generate(|round, slot: &mut u64| {
        *slot = round;
        Ok::<(), BoxError>(())
    })
    .overlap(overlap)
    .before(move |round| {
        before.lock().unwrap().push_back(format!("before {round}"));
        Ok::<(), BoxError>(())
    })
    .after(move |round| {
        if fail.take_if(|fail| *fail == round).is_some() {
            return Err("disk full".into());
        }
        after.lock().unwrap().push_back(format!("after {round}"));
        Ok::<(), BoxError>(())
    })
    .build()
    .unwrap()
}

#[test]
fn after_runs_for_every_round_the_last_too() {
    for overlap in [false, true] {
        let log = Log::default();
        let mut generator = logged(overlap, &log, None);
        for _ in 0..2 {
            for round in generator.rounds(2) {
                log.lock().unwrap().push_back(format!("train {}", *round.unwrap()));
            }
            log.lock().unwrap().push_back("end".into());
        }
        let expected = "before 0, before 1, train 0, after 0, train 1, after 1, end, \
                        before 2, before 3, train 2, after 2, train 3, after 3, end";
        assert_eq!(Vec::from(log.lock().unwrap().clone()).join(", "), expected, "overlap {overlap}");
    }
}

#[test]
fn an_after_that_fails_runs_again_and_no_round_is_lost() {
    for overlap in [false, true] {
        for fail in 0..3 {
            let log = Log::default();
            let mut generator = logged(overlap, &log, Some(fail));
            let mut found = Vec::new();
            let mut errors = 0;
            while found.len() < 3 || errors < 1 {
                for round in generator.rounds(3 - found.len() as u64) {
                    match round {
                        Ok(round) => found.push(*round),
                        Err(Error::Hook { at, source }) => {
                            assert_eq!((at, source.to_string()), (super::round(fail), "disk full".into()));
                            errors += 1;
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            }
            // The hook of the last round that failed runs in the next call, before anything else.
            assert!(generator.rounds(0).next().is_none());
            assert_eq!((found, errors), (vec![0, 1, 2], 1), "overlap {overlap}, fails {fail}");
            let log = Vec::from(log.lock().unwrap().clone());
            let after: Vec<_> = log.iter().filter(|entry| entry.starts_with("after")).collect();
            assert_eq!(after, ["after 0", "after 1", "after 2"], "overlap {overlap}, fails {fail}");
        }
    }
}

#[test]
fn a_round_left_early_has_its_after_in_the_next_call() {
    let log = Log::default();
    let mut generator = logged(true, &log, None);
    drop(generator.rounds(5).next());
    assert!(!log.lock().unwrap().contains(&"after 0".to_owned()), "the caller may still train on it");
    drop(generator.rounds(1).next());
    assert!(log.lock().unwrap().contains(&"after 0".to_owned()));
}

/// A round that a panic of `before` lost was not used, so `after` does not run for it.
#[test]
fn after_does_not_run_for_a_round_that_was_lost() {
    for overlap in [false, true] {
        let (after, mut failed) = (Mutex::new(Vec::new()), false);
        let make = |round, slot: &mut u64| {
            *slot = round;
            Ok::<(), BoxError>(())
        };
        let before = |round| {
            assert!(round != 2 || std::mem::replace(&mut failed, true), "the hook's own");
            Ok::<(), BoxError>(())
        };
        let after_hook = |round| {
            after.lock().unwrap().push(round);
            Ok::<(), BoxError>(())
        };
        let builder = generate(make).overlap(overlap).before(before).after(after_hook);
        let mut generator = builder.build().unwrap();
        let mut received = Vec::new();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            generator.rounds(5).for_each(|round| received.push(*round.unwrap()));
        }));
        assert!(panicked.is_err());
        generator.rounds(3).for_each(|round| received.push(*round.unwrap()));
        drop(generator);
        assert_eq!(received, [0, 2, 3, 4], "overlap {overlap}: round 1 was lost");
        assert_eq!(*after.lock().unwrap(), received, "overlap {overlap}");
    }
}
