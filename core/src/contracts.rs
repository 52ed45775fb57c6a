//! Programs that must not compile, as doctests.
//!
//! A slot's value is both written and read, so its type is invariant:
//!
//! ```compile_fail
//! use twinbuf_core::Producer;
//! fn shorter<'r, 's>(tx: Producer<'r, &'static str>) -> Producer<'r, &'s str> { tx }
//! ```
//! ```compile_fail
//! use twinbuf_core::Consumer;
//! fn shorter<'r, 's>(rx: Consumer<'r, &'static str>) -> Consumer<'r, &'s str> { rx }
//! ```
//! ```compile_fail
//! use twinbuf_core::ReservedSlot;
//! fn shorter<'r, 's>(slot: ReservedSlot<'r, &'static str>) -> ReservedSlot<'r, &'s str> { slot }
//! ```
//! ```compile_fail
//! use twinbuf_core::KeptSlot;
//! fn shorter<'r, 's>(slot: KeptSlot<'r, &'static str>) -> KeptSlot<'r, &'s str> { slot }
//! ```
//! ```compile_fail
//! use twinbuf_core::HeapRing;
//! fn shorter<'r, 's>(ring: &'r HeapRing<&'static str>) -> &'r HeapRing<&'s str> { ring }
//! ```
//!
//! Controls: the same functions with equal types compile, so the failures above are due to the lifetimes:
//!
//! ```
//! use twinbuf_core::{Consumer, HeapRing, KeptSlot, Producer, ReservedSlot};
//! fn tx<'r>(tx: Producer<'r, &'static str>) -> Producer<'r, &'static str> { tx }
//! fn rx<'r>(rx: Consumer<'r, &'static str>) -> Consumer<'r, &'static str> { rx }
//! fn reserved<'r>(slot: ReservedSlot<'r, &'static str>) -> ReservedSlot<'r, &'static str> { slot }
//! fn kept<'r>(slot: KeptSlot<'r, &'static str>) -> KeptSlot<'r, &'static str> { slot }
//! fn ring<'r>(ring: &'r HeapRing<&'static str>) -> &'r HeapRing<&'static str> { ring }
//! ```
//!
//! A struct that holds a handle or a guard needs no bound on its values, as with `std::sync::mpsc::Receiver`:
//!
//! ```
//! use twinbuf_core::{Consumer, KeptSlot, Producer, ReservedSlot};
//! struct Loader<B> { tx: Producer<'static, B>, rx: Consumer<'static, B> }
//! struct Guards<B> { open: ReservedSlot<'static, B>, kept: KeptSlot<'static, B> }
//! ```
//!
//! The first constructors return the types without a strategy:
//!
//! ```
//! use twinbuf_core::{Consumer, HeapRing, Producer, Ring};
//! let ring: Ring<u8> = Ring::new([0, 0]);
//! let ring: HeapRing<u8> = HeapRing::new([0, 0]);
//! let handles: (Producer<'static, u8>, Consumer<'static, u8>) = ring.into_handles();
//! ```
//!
//! The values of a ring must outlive its handles:
//!
//! ```compile_fail,E0597
//! use twinbuf_core::{Consumer, HeapRing};
//! let rx: Consumer<'static, &u8>;
//! let value = 1;
//! rx = HeapRing::new([&value, &value]).into_handles().1;
//! ```
//!
//! The last share of a ring on the heap may be dropped on any thread, so its values and its strategy must be `Send`.
//! Both sides use the strategy at the same time, so it must be `Sync`:
//!
//! ```compile_fail,E0277
//! use twinbuf_core::HeapRing;
//! let handles = HeapRing::new([std::rc::Rc::new(0)]).into_handles();
//! ```
//! ```compile_fail,E0277
//! use std::sync::MutexGuard;
//! use twinbuf_core::{HeapRing, Wait, Word};
//! struct Local(MutexGuard<'static, ()>); // `Sync`, and not `Send`
//! # impl Wait for Local {
//! #     fn relax(&self, _: u32) -> bool { true }
//! #     fn wait(&self, _: Word<'_>, _: u32) {}
//! #     fn wake(&self, _: Word<'_>) {}
//! # }
//! fn handles(wait: Local) { let _ = HeapRing::with_wait([0], wait).into_handles(); }
//! ```
//! ```compile_fail,E0277
//! use std::cell::Cell;
//! use twinbuf_core::{HeapRing, Wait, Word};
//! struct Local(Cell<u8>); // `Send`, and not `Sync`
//! # impl Wait for Local {
//! #     fn relax(&self, _: u32) -> bool { true }
//! #     fn wait(&self, _: Word<'_>, _: u32) {}
//! #     fn wake(&self, _: Word<'_>) {}
//! # }
//! fn handles(wait: Local) { let _ = HeapRing::with_wait([0], wait).into_handles(); }
//! ```
//!
//! Safe code in a strategy has no way to write to the word that it waits on:
//!
//! ```compile_fail,E0614
//! fn write(word: twinbuf_core::Word<'_>) { *word = 1; }
//! ```
//! ```compile_fail,E0616
//! fn write(word: twinbuf_core::Word<'_>) { word.0.store(1, std::sync::atomic::Ordering::SeqCst); }
//! ```
//! ```compile_fail,E0133
//! fn write(word: twinbuf_core::Word<'_>) { *word.as_ptr().cast_mut() = 1; }
//! ```
