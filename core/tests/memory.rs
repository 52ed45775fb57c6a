//! How much stack and heap a ring takes.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use twinbuf_core::{HeapRing, Ring, Wait, Word};

#[global_allocator]
static ALLOCATOR: twinbuf_testing::Counting = twinbuf_testing::Counting;

/// The size of a slot, far larger than the thread's stack.
const HUGE: usize = 64 << 20;

/// On a stack of 256 KiB: slots that are vectors, and slots that are arrays in a vector that is zeroed in place.
#[test]
fn slots_larger_than_the_stack() {
    let small = thread::Builder::new().stack_size(256 << 10);
    let test = small.spawn(|| {
        let (mut tx, mut rx) = HeapRing::new([vec![0u8; HUGE], vec![0u8; HUGE]]).into_handles();
        tx.fill(|slot| slot[HUGE - 1] = 1).unwrap();
        assert_eq!(rx.recv().unwrap().unwrap()[HUGE - 1], 1);

        let slots: Vec<[u8; HUGE]> = bytemuck::zeroed_vec(2);
        let first = &raw const slots[0];
        let (mut tx, mut rx) = HeapRing::new(slots).into_handles();
        let mut reserved = tx.acquire().unwrap().reserve();
        reserved[HUGE - 1] = 2;
        reserved.commit().unwrap();
        let slot = rx.recv().unwrap().unwrap();
        assert_eq!(slot[HUGE - 1], 2);
        assert_eq!(&raw const *slot, first, "the slots have not moved");
        drop(slot);
        let slots = tx.reunite(rx).unwrap();
        assert_eq!(&raw const slots[0], first, "nor on their way back");
    });
    test.unwrap().join().unwrap();
}

/// Hand-offs allocate nothing, whether they find their slot ready or sleep for it. (Elsewhere `parking_lot_core`
/// allocates its table.)
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
#[test]
fn hand_offs_do_not_allocate() {
    let (mut tx, mut rx) = HeapRing::new([0u64, 0]).into_handles();
    let counts = thread::scope(|scope| {
        let producer = scope.spawn(move || {
            twinbuf_testing::allocated(|| {
                for value in 0..1000 {
                    // The consumer waits at every fourth hand-off.
                    while value % 4 == 0 && !waited_for(&tx) {
                        thread::yield_now();
                    }
                    tx.acquire().unwrap().reserve().commit().unwrap();
                }
            })
        });
        let consumer = scope.spawn(move || {
            twinbuf_testing::allocated(|| {
                for value in 0..1000 {
                    let slot = if value % 2 == 0 {
                        rx.recv().unwrap()
                    } else {
                        rx.recv_timeout(Duration::from_secs(1 << 20)).unwrap()
                    };
                    assert!(slot.is_some());
                }
            })
        });
        [producer, consumer].map(|side| side.join().unwrap().0)
    });
    assert_eq!(counts, [0, 0]);
}

/// Whether the consumer waits. Does not allocate.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn waited_for(tx: &impl std::fmt::Debug) -> bool {
    use std::fmt::Write;
    /// Looks for a word in the text written to it.
    struct Find(bool);
    impl Write for Find {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            self.0 |= text.contains("WAITER");
            Ok(())
        }
    }
    let mut find = Find(false);
    write!(find, "{tx:?}").unwrap();
    find.0
}

/// Up to four slots of a few bytes move to the line of their words. More or larger ones stay where they were.
#[test]
fn small_slots_share_a_line() {
    fn moves<T: Send + 'static>(slots: Vec<T>) -> bool {
        let (depth, first) = (slots.len(), &raw const slots[0]);
        let (mut tx, mut rx) = HeapRing::new(slots).into_handles();
        let addresses = (0..depth).map(|_| {
            tx.fill(|_| ()).unwrap();
            (&raw const *rx.recv().unwrap().unwrap()).addr()
        });
        let addresses: Vec<_> = addresses.collect();
        assert!(addresses.iter().copied().eq((0..depth).map(|slot| addresses[0] + slot * size_of::<T>())));
        let moved = addresses[0] != first.addr();
        assert!(!moved || addresses.iter().all(|address| address / 128 == addresses[0] / 128), "one line");
        moved
    }
    assert_eq!([1, 2, 3, 4, 5].map(|depth| moves(vec![0u64; depth])), [true, true, true, true, false]);
    assert_eq!([moves(vec![[0u64; 3]; 4]), moves(vec![[0u64; 4]; 4])], [true, false]);
}

/// The slots have the order and the number that they were made in, and all of them are dropped, on a line and off it,
/// also if the drop of one panics.
#[test]
fn slots_are_numbered_from_zero_and_dropped() {
    struct Slot<'a>(usize, &'a Cell<u32>);
    impl Drop for Slot<'_> {
        fn drop(&mut self) {
            self.1.set(self.1.get() + 1);
            if self.0 == 0 && !thread::panicking() {
                resume_unwind(Box::new("no message"));
            }
        }
    }
    // SAFETY: each ring stays on its thread.
    unsafe impl Send for Slot<'_> {}
    for depth in 1..=5 {
        let drops = Cell::new(0);
        let (mut tx, mut rx) = HeapRing::from_fn(depth, |slot| Slot(slot, &drops)).into_handles();
        for slot in (0..depth).chain(0..depth) {
            tx.fill(|_| ()).unwrap();
            assert_eq!(rx.recv().unwrap().unwrap().0, slot);
        }
        assert!(catch_unwind(AssertUnwindSafe(|| drop((tx, rx)))).is_err());
        assert_eq!(drops.get() as usize, depth);
    }
}

/// The words of a ring on the heap begin at a cache line, whatever their number, and all of them work.
#[test]
fn words_fill_lines_of_their_own() {
    /// Records the address of each word that is waited for.
    #[derive(Default)]
    struct Addresses(Mutex<Vec<usize>>);

    impl Wait for &Addresses {
        fn relax(&self, _round: u32) -> bool {
            false
        }
        fn wait(&self, _word: Word<'_>, _expected: u32) {
            unreachable!("polled only");
        }
        fn wake(&self, word: Word<'_>) {
            self.0.lock().unwrap().push(word.as_ptr().addr());
        }
    }

    for depth in [1, 2, 31, 32, 33, 64, 65, 100] {
        let addresses = Addresses::default();
        let (mut tx, mut rx) = HeapRing::with_wait(vec![0u8; depth], &addresses).into_handles();
        for _ in 0..depth {
            assert!(rx.poll_recv(&mut Context::from_waker(Waker::noop())).is_pending());
            tx.fill(|slot| *slot += 1).unwrap(); // wakes
            assert_eq!(*rx.recv().unwrap().unwrap(), 1);
        }
        let found = std::mem::take(&mut *addresses.0.lock().unwrap());
        assert_eq!(found[0] % 128, 0, "depth {depth}");
        assert!(
            found.iter().copied().eq((0..depth).map(|slot| found[0] + 4 * slot)),
            "depth {depth}: {found:?}"
        );
    }
    if cfg!(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "powerpc64")) {
        assert_eq!(align_of::<Ring<u8, 2>>(), 128);
    }
}
