//! The waker cell alone: compiles `core/src/waker.rs` here, with a word of the model in place of a slot's word.
//!
//! The word has no orderings, so all synchronization comes from the cell.

use std::sync::Arc;
use std::task::Waker;

use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::common::*;
use crate::waker::WakerCell;

/// What both sides share: the cell, and the word that the task waits for.
struct Shared {
    word: AtomicU32,
    cell: WakerCell,
}

fn shared() -> Arc<Shared> {
    Arc::new(Shared { word: AtomicU32::new(0), cell: WakerCell::new() })
}

impl Shared {
    /// What a hand-off does after it found `WAITER`.
    fn hand_over(&self) {
        self.word.fetch_add(1, Relaxed);
        self.cell.wake();
    }

    /// What a poll does. Returns `true` if the word is `done`.
    fn poll(&self, waker: &Waker, done: u32) -> bool {
        self.cell.register(waker);
        self.word.load(Relaxed) == done
    }

    fn run(&self, task: &Arc<Task>, done: u32) {
        task.run(|waker| self.poll(waker, done).then_some(()));
    }
}

/// Spawns a hand-off.
fn hand_over(shared: &Arc<Shared>) -> loom::thread::JoinHandle<()> {
    let shared = shared.clone();
    spawn(move || shared.hand_over())
}

check! {
    without a parker
    /// A wake and a registration meet: neither does the one find the waker, nor does the task see the change.
    wake_meets_registration over [0, 1, 2], exhaustive
}
fn wake_meets_registration<P: Parker>(before: usize) {
    let shared = shared();
    let task = Task::new();
    for _ in 0..before {
        assert!(!shared.poll(&task.waker(), 1));
    }
    let other = hand_over(&shared);
    shared.run(&task, 1);
    other.join().unwrap();
    assert!(task.wakes() <= 1, "one hand-off");
    drop(shared.cell.unregister());
    assert_eq!(Arc::strong_count(&task), 1, "no waker is left behind");
}

check! {
    without a parker
    /// Registrations, with wakers of several tasks, during a wake: they meet in one place, or the last is not woken.
    registration_during_wake over [1, 2, 3], exhaustive quick 2
}
fn registration_during_wake<P: Parker>(polls: usize) {
    let shared = shared();
    let (first, last) = (Task::new(), Task::new());
    assert!(!shared.poll(&first.waker(), 1));
    let other = hand_over(&shared);
    let mut ready = false;
    for i in 0..polls {
        ready = ready || shared.poll(&[&first, &last][i % 2].waker(), 1);
    }
    if !ready {
        shared.run(&last, 1);
    }
    other.join().unwrap();
    assert!(first.wakes() + last.wakes() <= 1, "one hand-off");
    drop(shared.cell.unregister());
    assert_eq!((Arc::strong_count(&first), Arc::strong_count(&last)), (1, 1));
}

check! {
    without a parker
    /// A second wake while a first one empties a place: the newer registration sleeps through it.
    second_wake_during_wake over [1, 2, 3], 2 quick 1, deep 3
}
fn second_wake_during_wake<P: Parker>(polls: usize) {
    let shared = shared();
    let task = Task::new();
    assert!(!shared.poll(&task.waker(), 2));
    let others = [hand_over(&shared), hand_over(&shared)];
    let ready = (1..polls).any(|_| shared.poll(&task.waker(), 2));
    if !ready {
        shared.run(&task, 2);
    }
    others.into_iter().for_each(|other| other.join().unwrap());
    assert!(task.wakes() <= 2, "two hand-offs");
    drop(shared.cell.unregister());
    assert_eq!(Arc::strong_count(&task), 1);
}

check! {
    without a parker
    /// Two wakes and nothing registered, or both for one registration: a waker is taken twice, or a place twice.
    two_wakes over [0, 1], exhaustive
}
fn two_wakes<P: Parker>(registered: usize) {
    let shared = shared();
    let task = Task::new();
    if registered == 1 {
        assert!(!shared.poll(&task.waker(), 2));
    }
    let other = hand_over(&shared);
    shared.hand_over();
    other.join().unwrap();
    assert_eq!(task.wakes(), registered);
    assert_eq!(Arc::strong_count(&task), 1);
    assert!(shared.poll(&task.waker(), 2), "what either did is seen by a registration that follows");
}

check! {
    without a parker
    /// A handle goes while its task is woken: the waker stays behind, or is taken by both.
    unregister_meets_wake over [1, 2], exhaustive quick 2
}
fn unregister_meets_wake<P: Parker>(wakes: usize) {
    let shared = shared();
    let task = Task::new();
    assert!(!shared.poll(&task.waker(), 9));
    let others: Vec<_> = (0..wakes).map(|_| hand_over(&shared)).collect();
    if wakes == 1 {
        assert!(!shared.poll(&task.waker(), 9));
    }
    let waker = shared.cell.unregister();
    drop(waker);
    others.into_iter().for_each(|other| other.join().unwrap());
    assert_eq!(Arc::strong_count(&task), 1);
    assert!(shared.cell.unregister().is_none());
}

check! {
    without a parker
    /// A waker panics while a second wake has asked the first one to go round again: the newer task sleeps on.
    panicking_waker_with_a_second_wake, 2, deep 3
}
fn panicking_waker_with_a_second_wake<P: Parker>() {
    let shared = shared();
    let task = Task::new();
    assert!(!shared.poll(&bomb(), 2));
    let others = [0, 1].map(|_| {
        let shared = shared.clone();
        spawn(move || {
            let _ = survive(|| shared.hand_over());
        })
    });
    shared.run(&task, 2);
    others.into_iter().for_each(|other| other.join().unwrap());
}

check! {
    without a parker
    /// A waker that is woken inside a registration (its clone wakes the cell): the cell waits for itself.
    woken_while_cloned, 2, deep 3
}
fn woken_while_cloned<P: Parker>() {
    let shared = shared();
    let task = Task::new();
    assert!(!shared.poll(&task.waker(), 2));
    let other = hand_over(&shared);
    // Simulates a waker's clone: it is called after the old registration was taken back.
    let waker = task.waker();
    shared.cell.register(&reentrant(shared.clone()));
    if !shared.poll(&waker, 2) {
        shared.run(&task, 2);
    }
    other.join().unwrap();
    drop(shared.cell.unregister());
}

/// A waker whose clone hands over and wakes the cell.
fn reentrant(shared: Arc<Shared>) -> Waker {
    use std::task::{RawWaker, RawWakerVTable};
    static VTABLE: RawWakerVTable = RawWakerVTable::new(
        |data| {
            // SAFETY: `data` is a live `Shared`: see below.
            unsafe { &*data.cast::<Shared>() }.hand_over();
            RawWaker::new(std::ptr::null(), &NOTHING)
        },
        |_| (),
        |_| (),
        // SAFETY: from `Arc::into_raw` below, once: clones have the other table.
        |data| drop(unsafe { Arc::from_raw(data.cast::<Shared>()) }),
    );
    static NOTHING: RawWakerVTable =
        RawWakerVTable::new(|data| RawWaker::new(data, &NOTHING), |_| (), |_| (), |_| ());
    // SAFETY: the tables keep the contract of a waker. The data is an `Arc`, freed by the last function of the first
    // table.
    unsafe { Waker::from_raw(RawWaker::new(Arc::into_raw(shared).cast(), &VTABLE)) }
}
