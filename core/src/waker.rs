//! A cell where one task leaves its `Waker` for whoever changes the slot's word.
//!
//! A ring has two cells: the producer registers in one, the consumer in the other. One *registrant* at a time (the
//! calls that register take the handle by `&mut`); any number of threads may wake.
//!
//! # States
//!
//! The cell has two places for a waker and one word of four bits. `LAST` is the index of a place, written `I` here;
//! `!I` is the other one.
//!
//! | `TAKING` | `REGISTERED` | place `I` | place `!I` |
//! | --- | --- | --- | --- |
//! | no | no | the registrant's | the registrant's |
//! | no | yes | the registered waker | the registrant's |
//! | yes | no | being emptied by a wake | the registrant's |
//! | yes | yes | being emptied by a wake | the registered waker |
//!
//! * *Register:* take back the last registration if it is still there (clear `REGISTERED`), write to a place that
//!   belongs to the registrant, publish it (set `REGISTERED`). The displaced waker is dropped, not woken: only the task
//!   that polled last is woken.
//! * *Wake:* with a registration and no wake in progress, `REGISTERED` becomes `TAKING`: the waker is moved out,
//!   `TAKING` is cleared, then the task is woken. With a wake in progress and a newer registration, `AGAIN` makes that
//!   wake run once more. With nothing registered, the word is written back unchanged.
//!
//! After the take-back, a place belongs to the registrant, and a publication can fail only because a wake made
//! progress. So registering never waits for an interrupted wake: if an executor polls inside an interrupt handler, on
//! the only core, while the main thread is in the middle of a wake, it registers and returns.
//!
//! # Why no wakeup is lost
//!
//! The task publishes its waker (R) and then announces itself in the slot's word (A: a read-modify-write, or a load
//! that finds `WAITER` already there). The other side changes the word (C: a read-modify-write) and, having seen
//! `WAITER` in what it replaced, wakes (K: a read-modify-write of this cell's word, also when it finds nothing to
//! wake). Both R and K modify this cell's word, so one comes first.
//!
//! * *R first:* K finds the registration and wakes it, or finds a wake in progress that has taken it or that `AGAIN`
//!   makes run once more.
//! * *K first:* R acquires what K released, so C happens before A: A reads C's word or a later one, and the task does
//!   not sleep on an older one.

use core::task::Waker;

use crate::sync::{AtomicU32, Ordering, UnsafeCell, const_fn};

/// The index of the place that was published last or is being emptied.
const LAST: u32 = 1;
/// A waker is registered: in place `LAST`, or in the other place while `TAKING` is set.
const REGISTERED: u32 = 1 << 1;
/// A wake is moving the waker out of place `LAST`.
const TAKING: u32 = 1 << 2;
/// Another wake came while `TAKING` was set, after the newer registration.
const AGAIN: u32 = 1 << 3;

#[derive(Debug)]
pub(crate) struct WakerCell {
    state: AtomicU32,
    places: [UnsafeCell<Option<Waker>>; 2],
}

// SAFETY: only the side to which `state` gives a place accesses it (see the table), and `state` changes with Release
// and Acquire. `Waker` itself may be moved to, dropped on and woken from any thread.
unsafe impl Sync for WakerCell {}

impl WakerCell {
    const_fn! {
        pub(crate) const fn new() -> Self {
            Self { state: AtomicU32::new(0), places: [UnsafeCell::new(None), UnsafeCell::new(None)] }
        }
    }

    /// Stores a clone of `waker` for one `wake`, or keeps the clone that is there, replacing an earlier registration.
    ///
    /// Only one thread at a time may register or unregister.
    pub(crate) fn register(&self, waker: &Waker) {
        let (mut seen, own) = self.take_back();
        // The place of the registration that was taken back, or else one that no wake is emptying. No wake touches it
        // before we publish it: a wake takes only a waker that is registered.
        let place = own.unwrap_or(if seen & TAKING == 0 { seen & LAST } else { !seen & LAST });
        let kept =
            own.is_some() && self.with(place, |cell| cell.as_ref().is_some_and(|old| old.will_wake(waker)));
        // `clone` is foreign code and may panic or wake this cell, which does no harm: nothing is registered at this
        // point. The displaced waker is dropped at the end, after the new one is published.
        let _displaced = (!kept).then(|| {
            let new = waker.clone();
            self.with(place, |cell| cell.replace(new))
        });
        loop {
            let published = match seen & TAKING {
                0 => REGISTERED | place,
                _ => seen | REGISTERED,
            };
            // Release: the waker is stored before a wake can take it. Acquire: what earlier wakes did to the slot's
            // word is visible to the task when it looks at that word next (K before R).
            match self.state.compare_exchange(seen, published, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                // A wake has changed the state in the meantime: try again with the new state.
                Err(now) => seen = now,
            }
        }
    }

    /// Wakes the registered task, if there is one (or a wake in progress does), and removes the registration.
    pub(crate) fn wake(&self) {
        loop {
            let (waker, again) = self.take();
            let rest = again.then(|| WakeOnDrop(self));
            if let Some(waker) = waker {
                waker.wake();
            }
            if rest.is_none() {
                return;
            }
            core::mem::forget(rest);
        }
    }

    /// Takes out the registered waker, for a handle that ends. Like `register`, one thread at a time.
    pub(crate) fn unregister(&self) -> Option<Waker> {
        let (_, own) = self.take_back();
        own.and_then(|place| self.with(place, Option::take))
    }

    /// The registrant takes its last registration back if no wake has taken it. Returns the word's new value, and the
    /// place of that registration. The place belongs to the registrant from now on.
    fn take_back(&self) -> (u32, Option<u32>) {
        // Acquire, here and below: a wake that emptied a place is done with it before we write to that place.
        let mut seen = self.state.load(Ordering::Acquire);
        while seen & REGISTERED != 0 {
            let place = if seen & TAKING == 0 { seen & LAST } else { !seen & LAST };
            // `AGAIN` stays set if it is set. A later registration may then be woken without need, which can happen
            // anyway if the wake has already read `AGAIN`.
            let without = seen & !REGISTERED;
            // Relaxed: the registrant itself stored the waker in this place, so there is nothing to acquire.
            match self.state.compare_exchange(seen, without, Ordering::Relaxed, Ordering::Acquire) {
                Ok(_) => return (without, Some(place)),
                Err(now) => seen = now,
            }
        }
        (seen, None)
    }

    /// Moves the registered waker out. Returns `true` if another wake came in the meantime, for a newer registration.
    fn take(&self) -> (Option<Waker>, bool) {
        // Relaxed: the exchange below checks the value, and acquires.
        let mut seen = self.state.load(Ordering::Relaxed);
        loop {
            let next = match seen & (TAKING | REGISTERED) {
                REGISTERED => seen & !REGISTERED | TAKING,
                // Nothing to wake. Write the value back, so that the next publication acquires what we did before.
                0 | TAKING => seen,
                _ => seen | AGAIN,
            };
            // Acquire: the registration that stored the waker happens before we take it. Release: what we did to the
            // slot's word is visible to a task that publishes its waker after this and then looks at that word.
            match self.state.compare_exchange(seen, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) if next & TAKING != 0 && seen & TAKING == 0 => break,
                Ok(_) => return (None, false),
                Err(now) => seen = now,
            }
        }
        let waker = self.with(seen & LAST, Option::take);
        let mut seen = seen & !REGISTERED | TAKING;
        loop {
            let next = match seen & REGISTERED {
                0 => seen & !TAKING,
                // A newer registration was stored in the other place during this wake: that place becomes `LAST`.
                _ => (seen & !(TAKING | AGAIN)) ^ LAST,
            };
            // Release: this wake has emptied the place before the registrant writes to it.
            match self.state.compare_exchange(seen, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return (waker, seen & AGAIN != 0),
                Err(now) => seen = now,
            }
        }
    }

    /// Accesses a place that `state` gives to the caller's side.
    fn with<R>(&self, place: u32, f: impl FnOnce(&mut Option<Waker>) -> R) -> R {
        let [zero, one] = &self.places;
        let cell = if place == 0 { zero } else { one };
        // SAFETY: the caller's side owns the place (see the table). No reference to its contents outlives this call.
        cell.with_mut(|cell| f(unsafe { &mut *cell }))
    }
}

/// Continues a wake whose waker panicked.
struct WakeOnDrop<'a>(&'a WakerCell);

impl Drop for WakeOnDrop<'_> {
    fn drop(&mut self) {
        self.0.wake();
    }
}
