//! Rounds that are waited for in every way, numbered from anywhere, and a hook that panics.

use super::*;

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

#[test]
fn a_panic_of_the_hook_loses_the_round_that_was_to_be_returned() {
    for overlap in [false, true] {
        let mut failed = false;
        let make = |round, slot: &mut u64| {
            *slot = round;
            Ok::<(), BoxError>(())
        };
        let before = |round| {
            assert!(round != 2 || std::mem::replace(&mut failed, true), "the hook's own");
            Ok::<(), BoxError>(())
        };
        let mut generator = generate(make).overlap(overlap).before(before).build().unwrap();
        let mut received = Vec::new();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            generator.rounds(5).for_each(|round| received.push(*round.unwrap()));
        }));
        assert!(panicked.is_err());
        generator.rounds(3).for_each(|round| received.push(*round.unwrap()));
        drop(generator);
        assert_eq!(received, [0, 2, 3, 4], "overlap {overlap}: round 1 was lost");
    }
}
