//! The contracts of the types: which of them can be sent to another thread, how long they live, and which are
//! unwind-safe.

use std::cell::Cell;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

use twinbuf_core::{
    Closed, Consumer, DoubleBuffer, HeapRing, KeptSlot, Producer, ReadSlot, RecvError, ReservedSlot, Ring,
    TryAcquireError, TryRecvError, Wait, Word, WriteSlot,
};

/// Compiles only if `$type` implements none of the traits. (If it implements one, it has two impls of `Ambiguous`, and
/// the compiler cannot choose a `hint`.)
macro_rules! assert_not {
    ($type:ty: $($trait:path),+) => {$({
        trait Ambiguous<Impl> {
            const HINT: bool;
        }
        impl<T: ?Sized> Ambiguous<()> for T {
            const HINT: bool = true;
        }
        struct Another;
        impl<T: ?Sized + $trait> Ambiguous<Another> for T {
            const HINT: bool = false;
        }
        const { assert!(<$type as Ambiguous<_>>::HINT) }
    })+};
}

/// May be sent, may not be shared.
type OneThread = Cell<u64>;
/// May neither be sent nor shared.
type Pinned = Rc<u64>;
/// May be shared, may not be sent.
struct Shared(#[allow(dead_code)] *const u8);
// SAFETY: the pointer is never used.
unsafe impl Sync for Shared {}

/// A strategy that holds a value.
struct With<X>(#[allow(dead_code)] X);

impl<X> Wait for With<X> {
    fn relax(&self, _round: u32) -> bool {
        true
    }
    fn wait(&self, _word: Word<'_>, _expected: u32) {}
    fn wake(&self, _word: Word<'_>) {}
}

#[test]
fn what_may_go_to_another_thread() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}

    send::<DoubleBuffer<OneThread>>();
    sync::<DoubleBuffer<OneThread>>();
    assert_not!(DoubleBuffer<Pinned>: Send, Sync);
    send::<HeapRing<OneThread>>();
    assert_not!(HeapRing<Pinned>: Send, Sync);

    send::<Producer<'_, OneThread>>();
    assert_not!(Producer<'_, u64>: Sync);
    assert_not!(Producer<'_, Pinned>: Send, Sync);

    send::<Consumer<'_, OneThread>>();
    assert_not!(Consumer<'_, u64>: Sync);
    assert_not!(Consumer<'_, Pinned>: Send, Sync);

    send::<WriteSlot<'_, '_, OneThread>>();
    assert_not!(WriteSlot<'_, '_, Pinned>: Send, Sync);

    send::<ReservedSlot<'_, OneThread>>();
    sync::<ReservedSlot<'_, u64>>();
    assert_not!(ReservedSlot<'_, OneThread>: Sync);
    assert_not!(ReservedSlot<'_, Pinned>: Send, Sync);

    send::<ReadSlot<'_, '_, OneThread>>();
    assert_not!(ReadSlot<'_, '_, Pinned>: Send, Sync);

    send::<KeptSlot<'_, OneThread>>();
    sync::<KeptSlot<'_, u64>>();
    assert_not!(KeptSlot<'_, OneThread>: Sync);
    assert_not!(KeptSlot<'_, Pinned>: Send, Sync);

    send::<RecvError>();
    sync::<TryAcquireError>();
}

/// A task that waits may move between threads.
#[test]
fn what_a_task_awaits_may_go_to_another_thread() {
    fn send<T: Send>(_: &T) {}
    let mut ring = DoubleBuffer::<OneThread>::new([Cell::new(0), Cell::new(0)]);
    let (mut tx, mut rx) = ring.split();
    send(&tx.acquire_async());
    send(&rx.recv_async());
}

/// Both sides call the strategy at the same time, so it must be `Sync`. A handle does not own it, so it need not be
/// `Send`.
#[test]
fn a_strategy_is_shared_by_both_sides() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}

    sync::<DoubleBuffer<u64, With<Shared>>>();
    send::<Producer<'_, u64, With<Shared>>>();
    send::<Consumer<'_, u64, With<Shared>>>();
    send::<ReservedSlot<'_, u64, With<Shared>>>();
    send::<KeptSlot<'_, u64, With<Shared>>>();
    assert_not!(DoubleBuffer<u64, With<Shared>>: Send);

    assert_not!(DoubleBuffer<u64, With<OneThread>>: Sync);
    assert_not!(Producer<'_, u64, With<OneThread>>: Send);
    assert_not!(Consumer<'_, u64, With<OneThread>>: Send);
    assert_not!(WriteSlot<'_, '_, u64, With<OneThread>>: Send);
    assert_not!(ReservedSlot<'_, u64, With<OneThread>>: Send, Sync);
    assert_not!(ReadSlot<'_, '_, u64, With<OneThread>>: Send);
    assert_not!(KeptSlot<'_, u64, With<OneThread>>: Send, Sync);
}

/// Covariant in the ring's lifetime. `core/src/contracts.rs` checks that nothing is covariant in the value, because the
/// value is both written and read.
#[test]
fn a_guard_may_be_kept_for_a_shorter_time() {
    fn shorter<'s>(slot: KeptSlot<'static, u64>, _: &'s u64) -> KeptSlot<'s, u64> {
        slot
    }
    static RING: DoubleBuffer<u64> = DoubleBuffer::new([0, 0]);
    let (mut tx, mut rx) = RING.try_split_static().unwrap();
    tx.fill(|slot| *slot = 3).unwrap();
    assert_eq!(*shorter(rx.recv().unwrap().unwrap().keep(), &0), 3);
}

#[test]
fn guards_of_owned_and_of_static_handles_are_static() {
    fn is_static<T: Send + 'static>(guard: T) -> T {
        guard
    }
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    let slot = is_static(tx.acquire().unwrap().reserve());
    drop(tx);
    slot.commit().unwrap();
    let slot = is_static(rx.recv().unwrap().unwrap().keep());
    drop(rx);
    assert_eq!(*slot, 0);

    static RING: DoubleBuffer<u64> = DoubleBuffer::new([0, 0]);
    let (mut tx, mut rx) = RING.try_split_static().unwrap();
    is_static(tx.acquire().unwrap().reserve()).commit().unwrap();
    drop(is_static(rx.recv().unwrap().unwrap().keep()));
}

#[test]
fn a_ring_is_split_once_if_it_lives_for_ever() {
    let ring: &'static mut DoubleBuffer<u64> = Box::leak(Box::new(DoubleBuffer::new([0, 0])));
    drop(ring.split());
    static KEPT: OnceLock<&'static DoubleBuffer<u64>> = OnceLock::new(); // for the leak checker
    let ring = KEPT.get_or_init(|| ring);
    assert!(ring.try_split_static().is_none(), "it was split before");
}

#[test]
fn what_survives_a_panic() {
    fn unwind<T: UnwindSafe + RefUnwindSafe>() {}
    unwind::<Ring<u64, 3>>();
    unwind::<Producer<'_, u64>>();
    unwind::<Consumer<'_, u64>>();
    unwind::<ReservedSlot<'_, u64>>();
    unwind::<KeptSlot<'_, u64>>();
    assert_not!(Ring<&mut u64, 3>: RefUnwindSafe);
    assert_not!(Producer<'_, &mut u64>: UnwindSafe);
    assert_not!(Consumer<'_, &mut u64>: UnwindSafe);
    assert_not!(ReservedSlot<'_, &mut u64>: UnwindSafe, RefUnwindSafe);
    assert_not!(KeptSlot<'_, &mut u64>: UnwindSafe, RefUnwindSafe);
    assert_not!(Producer<'_, u64, With<OneThread>>: UnwindSafe);
    assert_not!(Consumer<'_, u64, With<OneThread>>: UnwindSafe);
}

#[test]
fn the_end_of_either_side_passes_through_every_error_of_the_other() {
    fn all(tx: &mut Producer<'_, u64>, end: u8) -> Result<(), TryAcquireError> {
        match end {
            0 => tx.acquire()?.commit()?,
            1 => tx.acquire_timeout(Duration::ZERO)?.commit()?,
            2 => tx.try_acquire()?.commit()?,
            _ => tx.fill(|_| ())?,
        }
        Ok(())
    }
    let (mut tx, rx) = HeapRing::new([0, 0]).into_handles();
    drop(rx);
    for end in 0..4 {
        assert_eq!(all(&mut tx, end), Err(TryAcquireError::Closed));
    }
    assert_eq!(tx.acquire().map(drop), Err(Closed));

    fn received(rx: &mut Consumer<'_, u64>, blocking: bool) -> Result<bool, TryRecvError> {
        Ok(if blocking { rx.recv()?.is_some() } else { rx.try_recv()?.is_some() })
    }
    let (tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    drop(tx);
    assert_eq!([true, false].map(|blocking| received(&mut rx, blocking)), [Err(TryRecvError::Abandoned); 2]);
}
