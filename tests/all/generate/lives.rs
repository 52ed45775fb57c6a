//! Generators that are dropped, forked or asked while a round is made.

use super::*;
#[cfg(unix)]
use crate::common::forked::forked;

#[test]
fn dropped_while_a_round_is_made_it_waits_for_it() {
    let (guard, dropped) = mpsc::channel::<()>();
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
    assert_eq!(dropped.try_recv(), Err(mpsc::TryRecvError::Empty));
    drop(release);
    caller.join().unwrap();
    assert_eq!(dropped.try_recv(), Err(mpsc::TryRecvError::Disconnected));
}

#[test]
#[cfg(unix)]
fn a_forked_process_leaves_the_trace_alone() {
    // The caller's side writes several times: in some of the forked processes a write would be due immediately.
    const ROUNDS: u64 = 150;
    let dir = crate::common::folder();
    let path = dir.path().join("trace.json");
    for overlap in [false, true] {
        let make = |round, slot: &mut u64| {
            *slot = round;
            Ok::<(), BoxError>(())
        };
        let builder = generate::with_slots([0; 2], make).overlap(overlap);
        let mut generator = builder.trace(Trace::new(&path).epochs(u64::MAX)).build().unwrap();
        let mut rounds = generator.rounds(ROUNDS);
        for number in 0..ROUNDS {
            assert_eq!(*rounds.next().unwrap().unwrap(), number);
            assert!(forked(|| {
                // The remaining rounds: without overlap they are made there; otherwise they fail, unless none remain.
                let received = rounds.by_ref().take_while(Result::is_ok).count() as u64;
                received == if overlap { 0 } else { ROUNDS - number - 1 }
            }));
        }
        assert!(rounds.next().is_none());
        drop(rounds);
        generator.close().unwrap();
        let events = crate::common::trace::events(&path);
        for name in ["generate", "queue_wait", "train"] {
            let spans = events.iter().filter(|event| event["name"] == name && event["ph"] == "X");
            let rounds: Vec<u64> = spans.map(|event| event["args"]["epoch"].as_u64().unwrap()).collect();
            let once = rounds.iter().copied().eq(0..ROUNDS);
            assert!(once, "{name}, overlap {overlap}: {} spans of {ROUNDS} rounds", rounds.len());
        }
    }
}

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
