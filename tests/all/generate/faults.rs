//! A closure or a hook that fails or panics: the error is reported once, in order, and the call is repeated.

use super::*;

/// `promises` has errors and panics of every round; here is when the round is made again, and what the hook sees of that.
#[test]
fn a_round_that_failed_is_made_again_when_it_is_asked_for() {
    for (mode, times) in MODES.into_iter().flat_map(|mode| [(mode, 1), (mode, 2)]) {
        let (calls, hooks) = (Arc::new(AtomicU64::new(0)), Mutex::new(Vec::new()));
        let (counted, mut left) = (calls.clone(), times);
        let make = move |round, slot: &mut Vec<u64>| {
            counted.fetch_add(1, Ordering::Relaxed);
            if round == 2 && left > 0 {
                left -= 1;
                slot.push(u64::MAX); // half complete
                return Err("the simulator crashed".into());
            }
            number(round, slot)
        };
        let mut generator = build(mode, |round| hooks.lock().unwrap().push(round), make);
        let mut found = Vec::new();
        for attempt in 0..times {
            let rounds = generator.rounds(4);
            found.extend(rounds.map(|round| round.map(|round| round.clone()).map_err(|e| format!("{e:?}"))));
            let error = found.pop().unwrap().unwrap_err();
            assert_eq!(error, "round 2: the closure failed: the simulator crashed");
            std::thread::yield_now();
            assert_eq!(calls.load(Ordering::Relaxed), 3 + attempt as u64, "{mode:?}: tried again unasked");
        }
        found.extend(generator.rounds(3).map(|round| Ok(round.unwrap().clone())));
        assert!(found.into_iter().eq((0..5).map(|round| Ok(vec![round]))), "{mode:?}, {times} times");
        drop(generator);
        let again = std::iter::repeat_n(2, times);
        let expected: Vec<u64> = (0..3).chain(again).chain(3..5).collect();
        assert!(!mode.1 || *hooks.lock().unwrap() == expected, "{mode:?}: {hooks:?}");
    }
}

#[test]
fn a_fault_met_ahead_of_a_caller_that_left_is_told_in_the_next_call() {
    for lockstep in [false, true] {
        let (tell, told) = mpsc::channel();
        let mut failed = false;
        let make = move |round, slot: &mut Vec<u64>| {
            if round == 1 && !failed {
                failed = true;
                tell.send(())?;
                return Err("once".into());
            }
            number(round, slot)
        };
        let mut generator = build((true, lockstep), |_| {}, make);
        {
            let mut rounds = generator.rounds(5);
            assert_eq!(rounds.next().unwrap().unwrap().number(), 0);
            told.recv_timeout(LONG).unwrap(); // round 1 has failed, and nobody has taken its error
        }
        yield_often();
        let mut rounds = generator.rounds(5);
        let error = rounds.next().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Load { at, .. } if *at == round(1)), "{error:?}");
        assert!(rounds.next().is_none());
        drop(rounds);
        let found: Vec<u64> = generator.rounds(5).map(|round| round.unwrap()[0]).collect();
        assert_eq!(found, [1, 2, 3, 4, 5], "lockstep {lockstep}");
    }
}

#[test]
fn a_hook_that_fails_ends_the_rounds_and_is_tried_again() {
    for overlap in [true, false] {
        let calls = Mutex::new(Vec::new());
        let made = Arc::new(Mutex::new(Vec::new()));
        let seen = made.clone();
        let make = move |round: u64, out: &mut u64| {
            seen.lock().unwrap().push(round);
            *out = round;
            Ok::<(), BoxError>(())
        };
        let hook = |round: u64| {
            calls.lock().unwrap().push(round);
            let failed = calls.lock().unwrap().iter().filter(|&&call| call == round).count() == 1
                && [0, 2].contains(&round);
            if failed { Err(format!("no weights for round {round}")) } else { Ok(()) }
        };
        let mut generator = twinbuf::generate(make).overlap(overlap).before(hook).build().unwrap();
        let told = |error: Error, round: u64| {
            let text = format!("round {round}: the hook failed: no weights for round {round}");
            assert_eq!(format!("{error:?}"), text);
            assert!(matches!(error, Error::Hook { at, .. } if at == self::round(round)));
        };
        // Before the first round, and between two rounds: after every started round.
        told(generator.rounds(9).next().unwrap().unwrap_err(), 0);
        let mut rounds = generator.rounds(9);
        assert_eq!(*rounds.next().unwrap().unwrap(), 0);
        assert_eq!(*rounds.next().unwrap().unwrap(), 1);
        told(rounds.next().unwrap().unwrap_err(), 2);
        assert!(rounds.next().is_none());
        drop(rounds);
        assert_eq!(*made.lock().unwrap(), [0, 1], "its round is not started");
        let rest: Vec<u64> = generator.rounds(2).map(|round| *round.unwrap()).collect();
        assert_eq!(rest, [2, 3]);
        // It does not run after the last round, but before the next requested one.
        assert_eq!(*calls.lock().unwrap(), [0, 0, 1, 2, 2, 3]);
        assert_eq!(*generator.rounds(1).next().unwrap().unwrap(), 4);
        assert_eq!(calls.lock().unwrap().last(), Some(&4));
        generator.close().unwrap();
    }
}

/// The hook of the next round runs when a round is received, so a loop that ends there has not asked for its error.
#[test]
fn close_tells_of_a_hook_that_failed_ahead() {
    for overlap in [true, false] {
        let hook = |round: u64| if round == 1 { Err("no weights") } else { Ok(()) };
        let build = || twinbuf::generate(number).overlap(overlap).before(hook).build().unwrap();
        let mut generator = build();
        assert_eq!(generator.rounds(3).next().unwrap().unwrap()[0], 0);
        let error = generator.close().unwrap_err();
        assert!(matches!(&error, Error::Hook { at, .. } if *at == round(1)), "{error:?}");
        // Not of one that the caller has received, nor of an earlier iteration.
        let mut generator = build();
        assert!(generator.rounds(3).nth(1).unwrap().is_err());
        generator.close().unwrap();
        let mut generator = build();
        assert_eq!(generator.rounds(3).next().unwrap().unwrap()[0], 0);
        generator.rounds(0).for_each(drop);
        generator.close().unwrap();
    }
}

#[test]
fn a_hook_that_panics_leaves_its_round_unstarted() {
    for overlap in [false, true] {
        for at in 0..4 {
            let fail = Mutex::new(true);
            let hook = |round| {
                assert!(!(round == at && std::mem::take(&mut *fail.lock().unwrap())), "the hook's own");
            };
            let mut generator = build((overlap, true), hook, number);
            let mut found = Vec::new();
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                for round in generator.rounds(6) {
                    found.push(round.unwrap()[0]);
                }
            }));
            assert!(panicked.is_err());
            // The hook for `at` runs while the previous round is taken. That round is lost with it.
            assert_eq!(found, (0..at.saturating_sub(1)).collect::<Vec<_>>());
            let found: Vec<u64> = generator.rounds(2).map(|round| round.unwrap()[0]).collect();
            assert_eq!(found, [at, at + 1], "overlap {overlap}");
        }
    }
}

#[test]
fn the_first_part_that_fails_is_the_error_of_its_round() {
    for panics in [false, true] {
        for threads in 1..=4 {
            let case = format!("panics {panics}, {threads} threads");
            let started = Arc::new(Mutex::new(HashSet::new()));
            let (noted, failed) = (started.clone(), AtomicBool::new(false));
            // With two threads or more, part 3 fails before part 2 does.
            let (tell, told) = mpsc::channel();
            let told = Mutex::new(told);
            let make = move |round: u64, part: usize, slot: &mut u64| -> Result<(), BoxError> {
                if round == 1 && !failed.load(Ordering::Relaxed) {
                    noted.lock().unwrap().insert(part);
                    match part {
                        2 if threads > 1 => told.lock().unwrap().recv_timeout(LONG)?,
                        3 => tell.send(())?,
                        _ => {}
                    }
                    if part >= 2 {
                        failed.fetch_or(part == 2, Ordering::Relaxed);
                        assert!(!panics, "part {part} crashed");
                        return Err(format!("part {part} crashed").into());
                    }
                }
                *slot = round * 10 + part as u64;
                Ok(())
            };
            let builder = generate::with_parts([vec![0; 8], vec![0; 8]], threads, make);
            let mut generator = builder.build().unwrap();
            let mut rounds = generator.rounds(3);
            drop(rounds.next().unwrap().unwrap());
            match rounds.next().unwrap().unwrap_err() {
                Error::Load { at, source } if !panics => {
                    assert_eq!((at, source.to_string()), (round(1), "part 2 crashed".into()), "{case}");
                }
                Error::Panicked { at, who: "closure", message } if panics => {
                    assert_eq!((at, &*message), (round(1), "part 2 crashed"), "{case}");
                }
                error => panic!("{case}: {error:?}"),
            }
            assert!(rounds.next().is_none(), "{case}");
            drop(rounds);
            // The threads that failed took no other part. A third thread may have made the others before that.
            let most = if threads <= 2 { 2 + threads } else { 8 };
            assert!(started.lock().unwrap().len() <= most, "{case}: {started:?}");
            let again = generator.rounds(2).map(|round| round.unwrap().to_vec());
            let expected = [10, 20].map(|first| (first..first + 8).collect::<Vec<u64>>());
            assert_eq!(again.collect::<Vec<_>>(), expected, "{case}: made again, whole");
        }
    }
}
