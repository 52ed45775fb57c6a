//! Contracts, most of wait strategies, that a single thread can check. `tools/mutate.py` breaks them.

use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use twinbuf_core::{
    Auto, DoubleBuffer, HeapRing, Park, Producer, Spin, TryAcquireError, TryRecvError, Wait, WaitUntil, Word,
};

/// A deadline has passed as soon as the clock shows it.
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
    over(&Park);
    over(&Auto::new());
}

/// `round` counts how often one wait got `true`, over all its sleeps, and restarts with the next wait.
#[test]
fn rounds_are_counted_over_a_whole_wait() {
    /// Returns `true` twice before each sleep, and gives up after three sleeps.
    #[derive(Default)]
    struct Log(RefCell<(Vec<u32>, u32)>);

    impl Wait for &Log {
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

    impl WaitUntil for &Log {
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
        assert_eq!(rx.recv_timeout(Duration::ZERO).unwrap_err(), TryRecvError::Empty);
        assert_eq!(log.0.borrow().0, [0, 1, 2, 2, 3, 4, 4, 5, 6]);
    }
}

/// `Spin` never sleeps, and `Park` never spins.
#[test]
fn each_strategy_relaxes_as_it_promises() {
    for round in [0, 1, 1000, u32::MAX] {
        assert!(Spin.relax(round), "never sleeps");
        assert!(!Park.relax(round), "sleeps at once");
    }
}

/// The default strategy looks less often after each look in vain, and more often again once a look pays.
#[test]
fn the_default_strategy_learns_whether_looking_pays() {
    let auto = Auto::new();
    // A wait that is never ready: how often it looked before it slept. About 20 µs, at 20 to 50 ns a look and 300 a
    // yield. On a busy machine a yield is long, and the last one.
    let looks = (0..).take_while(|&round| auto.relax(round)).count();
    assert!((30..=160).contains(&looks), "{looks}");
    // From here on without yields: a long one would teach more than that looking is in vain.
    let auto = Auto::new();
    assert!(!auto.relax(u32::MAX));
    let in_vain = || auto.relax(0) && !auto.relax(u32::MAX);
    // The number of waits that slept at once, before each of the next ten that looked.
    let pauses = |waits: usize| -> Vec<usize> {
        (0..waits).map(|_| (0..).take_while(|_| !in_vain()).count()).collect()
    };
    assert_eq!(pauses(10), [2, 4, 8, 16, 32, 64, 128, 256, 256, 256]);
    (0..256).for_each(|_| assert!(!auto.relax(0)));
    // From now on each wait ends with its first look.
    for half in [128, 64, 32, 16, 8, 4, 2, 1, 0] {
        assert!(auto.relax(0), "and the next pause would be {half}");
    }
    assert!(auto.relax(0));
    assert!(in_vain());
    assert_eq!(pauses(2), [2, 4]);
}

/// The default strategy looks again after a sleep that a look would have ended.
#[test]
fn the_default_strategy_looks_after_a_short_sleep() {
    /// Sleeps in a wake, on a word that differs from the expected value: such a sleep is short.
    struct Short<'a>(&'a Auto);

    impl Wait for Short<'_> {
        fn relax(&self, _round: u32) -> bool {
            false
        }
        fn wait(&self, _word: Word<'_>, _expected: u32) {}
        fn wake(&self, word: Word<'_>) {
            self.0.wait(word, !word.load());
        }
    }

    let auto = Auto::new();
    let mut ring = DoubleBuffer::with_wait([0, 0], Short(&auto));
    let (mut tx, mut rx) = ring.split();
    // Eight looks in vain, and the 2 + 4 + ... + 128 waits between them. The next 256 waits sleep at once.
    (0..8 + 254).for_each(|_| assert!(!auto.relax(0) || !auto.relax(u32::MAX)));
    let mut sleep_and_relax = || {
        assert!(rx.poll_recv(&mut Context::from_waker(Waker::noop())).is_pending());
        tx.fill(|_| ()).unwrap();
        assert!(rx.recv().unwrap().is_some());
        auto.relax(0)
    };
    // One is enough: on a busy machine the other sleeps may be long.
    assert!((0..100).any(|_| sleep_and_relax()));
}

/// A slot that is filled at the last moment is delivered: the wait checks the slot before the deadline.
#[test]
fn a_slot_that_comes_with_the_deadline_is_delivered() {
    static PRODUCER: Mutex<Option<Producer<'static, u64, Late>>> = Mutex::new(None);
    static OVER: AtomicBool = AtomicBool::new(false);

    /// Its only sleep ends with the deadline, and with a hand-off.
    struct Late;

    impl Wait for Late {
        fn relax(&self, _round: u32) -> bool {
            false
        }
        fn wait(&self, _word: Word<'_>, _expected: u32) {
            unreachable!("has a deadline");
        }
        fn wake(&self, _word: Word<'_>) {}
    }

    impl WaitUntil for Late {
        type Instant = ();
        fn after(&self, _timeout: Duration) -> Option<()> {
            Some(())
        }
        fn expired(&self, _deadline: ()) -> bool {
            OVER.load(Relaxed)
        }
        fn wait_until(&self, _word: Word<'_>, _expected: u32, _deadline: ()) {
            OVER.store(true, Relaxed);
            PRODUCER.lock().unwrap().as_mut().unwrap().fill(|slot| *slot = 7).unwrap();
        }
    }

    let (tx, mut rx) = HeapRing::with_wait([0, 0], Late).into_handles();
    *PRODUCER.lock().unwrap() = Some(tx);
    assert_eq!(*rx.recv_timeout(Duration::ZERO).unwrap().unwrap(), 7);
    assert_eq!(rx.recv_timeout(Duration::ZERO).unwrap_err(), TryRecvError::Empty);
}

/// Each error message names its cause.
#[test]
fn messages() {
    let texts = [
        (TryAcquireError::Full.to_string(), "still in use"),
        (TryAcquireError::Closed.to_string(), "consumer of the ring is gone"),
        (TryRecvError::Empty.to_string(), "not filled yet"),
        (TryRecvError::Held.to_string(), "held by a kept read guard"),
        (TryRecvError::Abandoned.to_string(), "without a finish"),
        (TryRecvError::Cancelled.to_string(), "dropped it without a commit"),
    ];
    for (text, part) in texts {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
#[should_panic(expected = "a ring needs at least one slot")]
fn a_ring_without_slots() {
    let _ = HeapRing::<u64>::new([]);
}

/// Before it makes a single slot.
#[test]
#[should_panic(expected = "a ring has at most 2^31 slots")]
#[cfg(target_pointer_width = "64")]
fn a_ring_with_too_many_slots() {
    let _ = HeapRing::from_fn((1 << 31) + 1, |slot| -> usize { panic!("slot {slot}") });
}
