//! The place where one task leaves its `Waker` for the other side of the ring.
//!
//! A ring has two: the producer registers in one, the consumer in the other. One *registrant* at a time (the
//! handle is `&mut`, or is not `Sync`); any number of threads may wake.
//!
//! # States
//!
//! ```text
//!                register                       wake
//!   REGISTERING ◄──────── IDLE ─────────────────────────────► WAKING
//!        │                  ▲ ▲                                  │
//!        └──────────────────┘ └──────────────────────────────────┘
//!         the waker is stored        the waker has been taken
//! ```
//!
//! Whoever leaves `IDLE` has the cell to itself until it comes back. The two may meet:
//!
//! * *A wake finds `REGISTERING`.* It only adds the bit `WAKING` and goes: the registrant's way back to
//!   `IDLE` fails, so it takes out what it has just stored and wakes it.
//! * *A registration finds `WAKING`.* The word has just changed, so the registrant stores nothing and wakes
//!   itself: its task looks again.
//! * *A wake finds `WAKING`.* The other wake serves for both.
//!
//! # Why no wakeup is lost
//!
//! The task registers (R) and then announces itself in the slot's word (A: a read-modify-write, or a load that
//! finds `WAITER` already there). The other side changes the word (C: a read-modify-write) and, having seen
//! `WAITER` in what it replaced, wakes (K). Both R and K are read-modify-writes of this cell's state, so one
//! comes first. If R does, K finds the waker. If K does, R acquires what K released, so C happens before A:
//! then A cannot have been what C saw, and what A reads is C's word or a later one. The task does not sleep.

use core::task::Waker;

use crate::sync::{self, AtomicU32, Ordering, UnsafeCell, const_fn};

const IDLE: u32 = 0;
const REGISTERING: u32 = 1;
const WAKING: u32 = 2;

#[derive(Debug)]
pub(crate) struct WakerCell {
    state: AtomicU32,
    waker: UnsafeCell<Option<Waker>>,
}

// SAFETY: the waker is touched only by the thread that moved `state` out of `IDLE`, until it moves it back;
// `Waker` itself may be moved to, dropped on and woken from any thread.
unsafe impl Sync for WakerCell {}

impl WakerCell {
    const_fn! {
        pub(crate) const fn new() -> Self {
            Self { state: AtomicU32::new(IDLE), waker: UnsafeCell::new(None) }
        }
    }

    /// Leaves a clone of `waker`, for one `wake`. Another task's waker that is still here is woken, since it
    /// would not be found again: that task looks once more and registers anew.
    ///
    /// Only one thread at a time may register.
    pub(crate) fn register(&self, waker: &Waker) {
        // Cloned before the cell is taken and woken after it is given back: both run foreign code, which may
        // panic or come back here.
        let new = waker.clone();
        // Acquire: pairs with the release that ended the last wake, so that its waker is out of the cell and
        // what the waking side did to the slot's word before is visible to our next look at it.
        if self.state.compare_exchange(IDLE, REGISTERING, Ordering::Acquire, Ordering::Relaxed).is_err() {
            // Failed on WAKING. Nothing is read here; the task looks again, and registers anew if it must.
            sync::spin_loop();
            new.wake();
            return;
        }
        // SAFETY: `state` is REGISTERING, moved there by us: the cell is ours.
        let old = self.waker.with_mut(|cell| unsafe { (*cell).replace(new) });
        // Release: the waker is stored before a wake can find the cell idle. Relaxed on failure: a wake came
        // meanwhile, and left the cell to us. What its side did to the slot's word is acquired by the task's next
        // registration: the swap below goes on with that wake's release.
        let woken = self
            .state
            .compare_exchange(REGISTERING, IDLE, Ordering::Release, Ordering::Relaxed)
            .is_err()
            .then(|| {
                // SAFETY: `state` is REGISTERING | WAKING: every wake leaves the cell to us.
                let new = self.waker.with_mut(|cell| unsafe { (*cell).take() });
                // Release: our taking it out comes before the next wake that finds the cell idle.
                self.state.swap(IDLE, Ordering::Release);
                new
            });
        if let Some(old) = old.filter(|old| !same_task(old, waker)) {
            old.wake();
        }
        if let Some(Some(new)) = woken {
            new.wake();
        }
    }

    /// Wakes the task that is registered, if one is, and forgets it.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.take() {
            waker.wake();
        }
    }

    /// Takes out the waker, if no registration or wake is under way.
    pub(crate) fn take(&self) -> Option<Waker> {
        // Acquire: the registration that stored the waker comes before our taking it. Release: what we did to
        // the slot's word comes before the look of a registrant that finds this bit.
        if self.state.fetch_or(WAKING, Ordering::AcqRel) != IDLE {
            return None;
        }
        // SAFETY: `state` was IDLE and is WAKING, moved there by us: the cell is ours.
        let waker = self.waker.with_mut(|cell| unsafe { (*cell).take() });
        // Release: our taking it out, and our change of the slot's word before, come before the next
        // registration.
        self.state.fetch_and(!WAKING, Ordering::Release);
        waker
    }
}

/// Whether two wakers wake the same task. `will_wake` alone may say no of clones (a vtable can have several
/// addresses), and two clones that wake each other would keep their task polling.
fn same_task(a: &Waker, b: &Waker) -> bool {
    a.will_wake(b) || (!a.data().is_null() && a.data() == b.data())
}
