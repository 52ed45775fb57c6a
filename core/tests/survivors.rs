//! Promises of the wait strategies that a single thread can check; `tools/mutate.py` breaks each of them.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use twinbuf_core::{
    Adaptive, Backoff, DoubleBuffer, Park, RecvTimeoutError, Spin, SpinYield, Wait, WaitUntil, Word,
};

/// A deadline is over as soon as the clock shows it.
#[test]
fn a_deadline_that_has_come_is_over() {
    fn over(strategy: &impl WaitUntil<Instant = Instant>) {
        for _ in 0..100 {
            assert!(strategy.expired(Instant::now()));
        }
        let far = strategy.after(Duration::from_secs(3600)).unwrap();
        assert!(!strategy.expired(far));
    }
    over(&Spin);
    over(&SpinYield);
    over(&Park);
    over(&Backoff::default());
    over(&Adaptive::new());
}

/// `round` counts the times that one wait was told `true`, over all its sleeps, and starts anew with the next wait.
#[test]
fn rounds_are_counted_over_a_whole_wait() {
    /// Is told `true` twice before each sleep, and gives up after three sleeps.
    #[derive(Default)]
    struct Log(RefCell<(Vec<u32>, u32)>);

    impl Wait for Log {
        fn relax(&self, round: u32) -> bool {
            let (rounds, sleeps) = &mut *self.0.borrow_mut();
            rounds.push(round);
            round < 2 * (*sleeps + 1)
        }
        fn wait(&self, _word: Word<'_>, _expected: u32) {
            self.0.borrow_mut().1 += 1;
        }
        fn wake(&self, _word: Word<'_>) {}
    }

    impl WaitUntil for Log {
        type Instant = u32;
        fn after(&self, _timeout: Duration) -> Option<u32> {
            Some(3)
        }
        fn expired(&self, deadline: u32) -> bool {
            self.0.borrow().1 >= deadline
        }
        fn wait_until(&self, word: Word<'_>, expected: u32, _deadline: u32) {
            self.wait(word, expected);
        }
    }

    let log = Log::default();
    let mut ring = DoubleBuffer::with_wait([0, 0], &log);
    let (_tx, mut rx) = ring.split();
    for _ in 0..2 {
        log.0.take();
        assert_eq!(rx.recv_timeout(Duration::ZERO).unwrap_err(), RecvTimeoutError::Timeout);
        assert_eq!(log.0.borrow().0, [0, 1, 2, 2, 3, 4, 4, 5, 6]);
    }
}
