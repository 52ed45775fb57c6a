//! Generators that are dropped, closed or forked in any state.

use super::*;
#[cfg(unix)]
use crate::common::forked::forked;

#[test]
fn dropped_or_closed_in_any_state_it_joins_the_thread() {
    type State = fn(&mut Generator<'_, Vec<u64>>, &mpsc::Receiver<u64>);
    let states: [(&str, State); 9] = [
        ("just built", |_, _| {}),
        ("asked for nothing", |generator, _| drop(generator.rounds(0).next())),
        ("not iterated", |generator, _| drop(generator.rounds(9))),
        ("first round taken", |generator, _| drop(generator.rounds(9).next().unwrap().unwrap())),
        ("next round under way or made", |generator, started| {
            let mut rounds = generator.rounds(9);
            let _held = rounds.next().unwrap().unwrap();
            while started.recv_timeout(LONG).unwrap() < 1 {}
        }),
        ("no slot free", |generator, started| {
            // Without lockstep, rounds 1 and 2 are made ahead, and the thread waits for a slot.
            let mut rounds = generator.rounds(9);
            drop(rounds.next().unwrap().unwrap());
            while started.recv_timeout(LONG).unwrap() < 1 {}
            yield_often();
        }),
        ("a round leaked", |generator, _| std::mem::forget(generator.rounds(9).next())),
        ("all taken", |generator, _| assert_eq!(generator.rounds(9).count(), 9)),
        ("all held", |generator, _| {
            let mut rounds = generator.rounds(9);
            let _held = (rounds.next().unwrap().unwrap(), rounds.next().unwrap().unwrap());
            assert!(rounds.next().unwrap().is_err());
        }),
    ];
    for (state, reach) in states {
        for lockstep in [false, true] {
            for close in [false, true] {
                let (guard, dropped) = Dropped::new();
                let (tell, started) = mpsc::channel();
                let make = move |round, _: &mut Vec<u64>| {
                    let _ = &guard;
                    let _ = tell.send(round);
                    Ok(())
                };
                let mut generator = build((true, lockstep), |_| {}, make);
                reach(&mut generator, &started);
                if close {
                    generator.close().unwrap();
                } else {
                    drop(generator);
                }
                assert!(dropped.load(Ordering::Relaxed), "{state}, lockstep {lockstep}, close {close}");
            }
        }
    }
}

#[test]
fn dropped_while_a_round_is_made_it_waits_for_it() {
    let (guard, dropped) = Dropped::new();
    let (started, starts) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let make = move |round, _: &mut Vec<u64>| {
        let _ = &guard;
        started.send(round)?;
        if round == 1 {
            let _ = released.recv();
        }
        Ok(())
    };
    let caller = std::thread::spawn(move || {
        let mut generator = build((true, false), |_| {}, make);
        let mut rounds = generator.rounds(9);
        let _held = rounds.next().unwrap().unwrap();
        assert_eq!([starts.recv_timeout(LONG), starts.recv_timeout(LONG)], [Ok(0), Ok(1)]);
        // Dropped here, with round 1 in the making.
    });
    yield_often();
    assert!(!dropped.load(Ordering::Relaxed));
    drop(release);
    caller.join().unwrap();
    assert!(dropped.load(Ordering::Relaxed));
}

#[test]
#[cfg(unix)]
fn a_forked_process_leaves_the_trace_alone() {
    // A side writes about every 60 rounds: in some of the forked processes a write would be due immediately.
    const ROUNDS: u64 = 150;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("trace.json");
    for overlap in [false, true] {
        let mut generator = generate::with_slots([0; 2], |round, slot: &mut u64| {
            *slot = round;
            Ok::<(), BoxError>(())
        })
        .overlap(overlap)
        .trace(Trace::new(&path).epochs(u64::MAX))
        .build()
        .unwrap();
        let mut rounds = generator.rounds(ROUNDS);
        for number in 0..ROUNDS {
            assert_eq!(*rounds.next().unwrap().unwrap(), number);
            assert!(forked(|| {
                // The remaining rounds: without overlap they are made there; otherwise they fail, unless none
                // remain.
                let received = rounds.by_ref().take_while(Result::is_ok).count() as u64;
                received == if overlap { 0 } else { ROUNDS - number - 1 }
            }));
        }
        assert!(rounds.next().is_none());
        drop(rounds);
        generator.close().unwrap();
        let events: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        for name in ["generate", "queue_wait", "train"] {
            let spans = events.iter().filter(|event| event["name"] == name && event["ph"] == "X");
            let rounds: Vec<u64> = spans.map(|event| event["args"]["epoch"].as_u64().unwrap()).collect();
            let once = rounds.iter().copied().eq(0..ROUNDS);
            assert!(once, "{name}, overlap {overlap}: {} spans of {ROUNDS} rounds", rounds.len());
        }
    }
}
