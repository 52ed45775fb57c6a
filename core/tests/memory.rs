//! What a ring takes of the stack and of the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::thread;
use std::time::Duration;

use twinbuf_core::{HeapRing, Park, channel};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The slots of two rings, each far larger than the thread's stack.
const HUGE: usize = 64 << 20;

/// On a stack of 256 KiB: slots that are vectors, and slots that are arrays, made by a vector that is zeroed in place.
#[test]
fn slots_larger_than_the_stack() {
    let small = thread::Builder::new().stack_size(256 << 10);
    let test = small.spawn(|| {
        let (mut tx, mut rx) = channel([vec![0u8; HUGE], vec![0u8; HUGE]]);
        tx.fill(|slot| slot[HUGE - 1] = 1).unwrap();
        assert_eq!(rx.recv().unwrap()[HUGE - 1], 1);

        let slots: Vec<[u8; HUGE]> = bytemuck::zeroed_vec(2);
        let first = &raw const slots[0];
        let (mut tx, mut rx) = HeapRing::with_wait(slots, Park).into_handles();
        let mut reserved = tx.acquire().unwrap().reserve();
        reserved[HUGE - 1] = 2;
        reserved.commit().unwrap();
        let slot = rx.recv().unwrap();
        assert_eq!(slot[HUGE - 1], 2);
        assert_eq!(&raw const *slot, first, "the slots have not moved");
        drop(slot);
        let slots = tx.reunite(rx).unwrap();
        assert_eq!(&raw const slots[0], first, "nor on their way back");
    });
    test.unwrap().join().unwrap();
}

/// How many allocations `f` makes on this thread.
fn allocations(f: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    f();
    ALLOCATIONS.get() - before
}

/// Neither those that find their slot nor those that sleep for it. (Elsewhere `parking_lot_core` makes its table.)
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
#[test]
fn hand_offs_do_not_allocate() {
    let (mut tx, mut rx) = channel([0u64, 0]);
    let counts = thread::scope(|scope| {
        let producer = scope.spawn(move || {
            allocations(|| {
                for value in 0..1000 {
                    // The consumer is asleep at every fourth hand-off.
                    while value % 4 == 0 && !waited_for(&tx) {
                        thread::yield_now();
                    }
                    tx.acquire().unwrap().reserve().commit().unwrap();
                }
            })
        });
        let consumer = scope.spawn(move || {
            allocations(|| {
                for value in 0..1000 {
                    let slot = if value % 2 == 0 {
                        rx.recv().unwrap()
                    } else {
                        rx.recv_timeout(Duration::from_secs(1 << 20)).unwrap()
                    };
                    drop(slot);
                }
            })
        });
        [producer.join().unwrap(), consumer.join().unwrap()]
    });
    assert_eq!(counts, [0, 0]);
}

/// Whether the consumer waits; found out without an allocation.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn waited_for(tx: &impl std::fmt::Debug) -> bool {
    use std::fmt::Write;
    /// Finds a word in what is written to it.
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
