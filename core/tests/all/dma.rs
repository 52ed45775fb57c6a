//! Guards as buffers of a DMA engine: where they point, and what happens to a guard that is leaked while the engine
//! runs.

use std::sync::Mutex;

use embedded_dma::{ReadBuffer, WriteBuffer, WriteTarget};
use twinbuf_core::{Consumer, DoubleBuffer, HeapRing, Producer, ReservedSlot, Ring, TryAcquireError};

type Block = [u16; 8];

/// The engine writes to a buffer.
fn engine_writes((address, words): (*mut u16, usize), value: u16) {
    for word in 0..words {
        // SAFETY: within a slot whose guard has not been dropped, and nobody reads the slot now.
        unsafe { address.wrapping_add(word).write_volatile(value) };
    }
}

#[test]
fn the_consumer_reads_what_the_engine_wrote() {
    static RING: DoubleBuffer<Block> = DoubleBuffer::new([[0; 8]; 2]);
    let (mut tx, mut rx) = RING.try_split_static().unwrap();
    for value in 1..=5 {
        let mut reserved = tx.acquire().unwrap().reserve();
        // SAFETY: not used before the engine has ended.
        let target = unsafe { reserved.write_buffer() };
        assert_eq!(target.1, 8);
        let moved = Box::new(reserved);
        engine_writes(target, value);
        moved.commit().unwrap();
        let slot = rx.recv().unwrap().unwrap().keep();
        // SAFETY: no engine reads.
        let source = unsafe { slot.read_buffer() };
        assert_eq!(source, (target.0.cast_const(), 8));
        assert_eq!(*slot, [value; 8]);
    }
}

/// Leaked guards, stored where a leak checker finds them.
static LEAKED: Mutex<Vec<ReservedSlot<'static, Block>>> = Mutex::new(Vec::new());

/// The engine keeps writing to the end, and no call on either side returns its slot.
fn a_leaked_target_is_never_handed_out(tx: Producer<'static, Block>, rx: Consumer<'static, Block>) {
    let (mut tx, mut rx) = (tx, rx);
    let first = tx.acquire().unwrap().reserve();
    let mut reserved = tx.acquire().unwrap().reserve();
    // SAFETY: never used again.
    let target = unsafe { reserved.write_buffer() };
    LEAKED.lock().unwrap().push(reserved);
    first.commit().unwrap();
    let (mut filled, mut read) = (1, 0);
    for _ in 0..3 {
        while let Ok(mut slot) = tx.try_acquire() {
            assert_ne!(slot.as_ptr(), target.0.cast_const());
            *slot = [7; 8];
            engine_writes(target, 9);
            assert_eq!(*slot, [7; 8]);
            slot.commit().unwrap();
            filled += 1;
        }
        while let Ok(Some(slot)) = rx.try_recv() {
            assert_ne!(slot.as_ptr(), target.0.cast_const());
            read += 1;
        }
    }
    assert_eq!((filled, read), (3, 1)); // both sides of the ring have reached the leaked slot
    assert_eq!(tx.try_acquire().unwrap_err(), TryAcquireError::Full);
    drop((tx, rx));
    engine_writes(target, 9); // not freed either: an address sanitizer would report it
}

/// As the README advises for engines behind a cache: no line holds bytes of a slot and of anything else.
#[test]
fn aligned_slots_share_no_cache_line() {
    const LINE: usize = 32;

    #[repr(C, align(32))]
    struct Aligned([u16; 64]);
    // SAFETY: integers without padding.
    unsafe impl WriteTarget for Aligned {
        type Word = u16;
    }

    fn lines<T: WriteTarget>(tx: &mut Producer<'static, T>) -> Vec<std::ops::Range<usize>> {
        let buffers = [(); 3].map(|()| {
            // SAFETY: nothing reads or writes through the pointer.
            unsafe { tx.acquire().unwrap().reserve().write_buffer() }
        });
        let lines = buffers.map(|(at, words)| {
            let (first, last) = (at.addr(), at.addr() + words * size_of::<T::Word>() - 1);
            first / LINE..last / LINE + 1
        });
        lines.into()
    }
    fn own(lines: &[std::ops::Range<usize>], ring: usize) -> bool {
        // The words are where the ring begins.
        lines[0].start > ring / LINE && lines.windows(2).all(|two| two[0].end <= two[1].start)
    }

    static RING: Ring<Aligned, 3> = Ring::new([const { Aligned([0; 64]) }; 3]);
    let (mut tx, _rx) = RING.try_split_static().unwrap();
    assert!(own(&lines(&mut tx), (&raw const RING).addr()));
    let slots: Vec<_> = (0..3).map(|_| Aligned([0; 64])).collect();
    let (mut tx, _rx) = HeapRing::new(slots).into_handles();
    assert!(own(&lines(&mut tx), 0));

    // Without the alignment they do share.
    static SHARED: Ring<[u16; 64], 3> = Ring::new([[0; 64]; 3]);
    let (mut tx, _rx) = SHARED.try_split_static().unwrap();
    assert!(!own(&lines(&mut tx), (&raw const SHARED).addr()));
}

#[test]
fn a_leaked_target_of_a_static_ring() {
    static RING: Ring<Block, 3> = Ring::new([[0; 8]; 3]);
    let (tx, rx) = RING.try_split_static().unwrap();
    a_leaked_target_is_never_handed_out(tx, rx);
}

#[test]
fn a_leaked_target_of_handles_that_own_their_ring() {
    let (tx, rx) = HeapRing::new([[0; 8]; 3]).into_handles();
    a_leaked_target_is_never_handed_out(tx, rx);
}
