//! One side of a ring runs in an interrupt handler. The other side runs in the program, and is interrupted at random.
//!
//! The handler sets the timer for its next run at random. QEMU counts instructions, so each run of the program is the
//! same. Both sides choose their calls at random: try, block (the program only), await, or reserve and commit later. A
//! side that awaits, without a slot open, makes no call until it is woken. The consumer checks each word of each slot
//! twice. The handler ends the program as failed if it moves nothing for long.

#![no_std]
#![no_main]

#[path = "../machine.rs"]
mod machine;

use core::cell::UnsafeCell;
use core::pin::pin;
use core::ptr::{null, read_volatile, write_volatile};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use core::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};

use machine::{
    exit, interrupt_after, interrupt_now, stop_interrupts, wait_for_interrupt, write, write_number,
};
use twinbuf_core::{Consumer, DoubleBuffer, Producer, ReservedSlot, TryAcquireError, TryRecvError};

/// Hand-offs of a run.
const HANDOFFS: u32 = 250_000;
/// Runs of the handler without any progress: far more than any wait takes.
const STUCK: u32 = 100_000;
/// The minimum number of different instructions at which the program must be interrupted.
const PLACES: u32 = 300;

type Block = [u32; 4];

/// One for each run.
static RINGS: [DoubleBuffer<Block>; 6] = [const { DoubleBuffer::new([[0; 4]; 2]) }; 6];

/// Ends the program as failed, at this line.
fn fail(line: u32) -> ! {
    write("failed: tests/cortex-m/src/bin/interrupts.rs, line \0");
    write_number(line);
    write("\n\0");
    exit(false)
}

/// `assert!` without a panic.
macro_rules! require {
    ($condition:expr) => {
        if !$condition {
            fail(line!());
        }
    };
}

/// Random numbers by xorshift.
struct Random(u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }
}

/// The result of a call.
enum Made {
    /// It moved something.
    Progress,
    /// It found nothing to do.
    Nothing,
    /// It left a waker. The next call comes after a wake.
    Asleep,
    /// It was the last one.
    End,
}

/// Writes words `from..to` of hand-off `number`, one by one.
fn fill(block: &mut Block, number: u32, from: usize, to: usize) {
    for (index, word) in block.iter_mut().enumerate() {
        if from <= index && index < to {
            // SAFETY: a reference. Volatile: an interrupt can find the block half filled.
            unsafe { write_volatile(word, number.wrapping_mul(0x9e37_79b9)) };
        }
    }
}

/// One side of a ring.
enum Side {
    /// With its reserved slot and that slot's number.
    Filler {
        tx: Producer<'static, Block>,
        open: Option<(ReservedSlot<'static, Block>, u32)>,
    },
    Reader(Consumer<'static, Block>),
}

/// A side and its calls.
struct Caller {
    /// `None` after its last call.
    side: Option<Side>,
    /// The number of its next hand-off.
    next: u32,
    random: Random,
    /// Whether calls may block: true in the program, false in the handler.
    may_block: bool,
    waker: Waker,
}

impl Caller {
    fn call(&mut self) -> Made {
        let choice = self.random.next() >> 16;
        match &mut self.side {
            Some(Side::Filler { .. }) => self.fill(choice),
            Some(Side::Reader(_)) => self.read(choice),
            None => Made::Nothing,
        }
    }

    fn fill(&mut self, choice: u32) -> Made {
        let Some(Side::Filler { tx, open }) = &mut self.side else { fail(line!()) };
        if (choice & 8 != 0 || self.next == HANDOFFS)
            && let Some((mut slot, number)) = open.take()
        {
            fill(&mut slot, number, 2, 4);
            require!(slot.commit().is_ok());
            return Made::Progress;
        }
        if self.next == HANDOFFS {
            if let Some(Side::Filler { tx, .. }) = self.side.take() {
                tx.finish();
            }
            return Made::End;
        }
        let slot = match choice & 3 {
            // A blocking call would never get a slot that this side holds open.
            0 if self.may_block && open.is_none() => tx.acquire().ok(),
            1 => match tx.poll_acquire(&mut Context::from_waker(&self.waker)) {
                Poll::Ready(slot) => slot.ok(),
                Poll::Pending if open.is_some() => return Made::Nothing,
                Poll::Pending => return Made::Asleep,
            },
            _ => match tx.try_acquire() {
                Err(TryAcquireError::Full) => return Made::Nothing,
                slot => slot.ok(),
            },
        };
        let Some(mut slot) = slot else { fail(line!()) };
        fill(&mut slot, self.next, 0, 2);
        if choice & 4 != 0 && open.is_none() {
            *open = Some((slot.reserve(), self.next));
        } else {
            fill(&mut slot, self.next, 2, 4);
            require!(slot.commit().is_ok());
        }
        self.next += 1;
        Made::Progress
    }

    fn read(&mut self, choice: u32) -> Made {
        let Some(Side::Reader(rx)) = &mut self.side else { fail(line!()) };
        let slot = match choice & 3 {
            0 if self.may_block && self.next < HANDOFFS => rx.recv().ok().flatten(),
            1 if self.next < HANDOFFS => {
                match pin!(rx.recv_async()).poll(&mut Context::from_waker(&self.waker)) {
                    Poll::Ready(slot) => slot.ok().flatten(),
                    Poll::Pending => return Made::Asleep,
                }
            }
            _ => match rx.try_recv() {
                Err(TryRecvError::Empty) => return Made::Nothing,
                slot => slot.ok().flatten(),
            },
        };
        if slot.is_none() {
            require!(self.next == HANDOFFS);
            drop(slot);
            self.side = None;
            return Made::End;
        }
        let Some(slot) = slot else { fail(line!()) };
        // The second time too: the other side does not write to it.
        for _ in 0..2 {
            for word in slot.iter() {
                // SAFETY: a reference. Volatile: both rounds read.
                require!(unsafe { read_volatile(word) } == self.next.wrapping_mul(0x9e37_79b9));
            }
        }
        self.next += 1;
        Made::Progress
    }
}

static PROGRAM_WOKEN: AtomicBool = AtomicBool::new(false);
static HANDLER_WOKEN: AtomicBool = AtomicBool::new(false);
static HANDLER_ENDED: AtomicBool = AtomicBool::new(false);
/// How often the program and the handler were woken.
static WAKES: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];

fn count(counter: &AtomicU32) {
    counter.store(counter.load(SeqCst).wrapping_add(1), SeqCst);
}

fn wake_program(_: *const ()) {
    count(&WAKES[0]);
    PROGRAM_WOKEN.store(true, SeqCst);
}

/// The handler runs immediately, in the middle of the call that wakes it.
fn wake_handler(_: *const ()) {
    count(&WAKES[1]);
    HANDLER_WOKEN.store(true, SeqCst);
    interrupt_now();
}

static PROGRAM: RawWakerVTable =
    RawWakerVTable::new(|_| RawWaker::new(null(), &PROGRAM), wake_program, wake_program, |_| ());
static HANDLER: RawWakerVTable =
    RawWakerVTable::new(|_| RawWaker::new(null(), &HANDLER), wake_handler, wake_handler, |_| ());

/// The state of the interrupt handler.
struct Handler {
    caller: Caller,
    asleep: bool,
    /// Its runs since the last progress.
    idle: u32,
    interrupts: u32,
    /// For every two bytes of the first 16 KiB, whether the program was interrupted there.
    places: [u8; 1024],
}

struct Shared(UnsafeCell<Option<Handler>>);

// SAFETY: the program touches it only while there are no interrupts; otherwise only the handler does.
unsafe impl Sync for Shared {}

static SHARED: Shared = Shared(UnsafeCell::new(None));

/// The interrupt: makes calls, unless it awaits and was not woken. `at` is the address at which the program was
/// interrupted.
#[unsafe(no_mangle)]
extern "C" fn tick(at: usize) {
    // SAFETY: in an interrupt, the program does not touch it. There is one priority, so this function does not
    // interrupt itself.
    let Some(handler) = (unsafe { &mut *SHARED.0.get() }) else { fail(line!()) };
    handler.interrupts += 1;
    if let Some(byte) = handler.places.get_mut(at / 16) {
        *byte |= 1 << (at / 2 % 8);
    }
    handler.idle += 1;
    require!(handler.idle < STUCK);
    if !handler.asleep || HANDLER_WOKEN.load(SeqCst) {
        HANDLER_WOKEN.store(false, SeqCst);
        loop {
            let made = handler.caller.call();
            handler.asleep = matches!(made, Made::Asleep);
            if matches!(made, Made::End) {
                HANDLER_ENDED.store(true, SeqCst);
            }
            if !matches!(made, Made::Progress) {
                break;
            }
            handler.idle = 0;
            if handler.caller.random.next() & 0x3000 == 0 {
                break;
            }
        }
    }
    // Usually within a call of the program, sometimes after several.
    let random = handler.caller.random.next();
    interrupt_after(20 + (random & 0x7f) + if random & 0xf00 == 0 { random >> 22 } else { 0 });
}

/// One run. `filler` and `reader` are each in the program or in the handler.
fn run(ring: &'static DoubleBuffer<Block>, seed: u32, filler_in_handler: bool) {
    let Some((tx, rx)) = ring.try_split_static() else { fail(line!()) };
    let (filler, reader) = (Side::Filler { tx, open: None }, Side::Reader(rx));
    let (in_program, in_handler) = if filler_in_handler { (reader, filler) } else { (filler, reader) };
    let caller = |side, vtable, may_block, seed| Caller {
        side: Some(side),
        next: 0,
        random: Random(seed),
        may_block,
        // SAFETY: the functions of both tables take any pointer, on any thread.
        waker: unsafe { Waker::new(null(), vtable) },
    };
    let mut program = caller(in_program, &PROGRAM, true, seed);
    let handler = caller(in_handler, &HANDLER, false, seed ^ 0x5555_5555);
    let handler = Handler { caller: handler, asleep: false, idle: 0, interrupts: 0, places: [0; 1024] };
    // SAFETY: there are no interrupts.
    unsafe { *SHARED.0.get() = Some(handler) };
    interrupt_after(100);
    loop {
        PROGRAM_WOKEN.store(false, SeqCst);
        match program.call() {
            Made::Asleep => {
                while !PROGRAM_WOKEN.load(SeqCst) {
                    wait_for_interrupt();
                }
            }
            Made::End => break,
            Made::Progress | Made::Nothing => {}
        }
    }
    while !HANDLER_ENDED.load(SeqCst) {
        wait_for_interrupt();
    }
    stop_interrupts();
    HANDLER_ENDED.store(false, SeqCst);
    // SAFETY: there are no interrupts.
    let Some(handler) = (unsafe { (*SHARED.0.get()).take() }) else { fail(line!()) };
    require!(program.next == HANDOFFS && handler.caller.next == HANDOFFS);
    let places = handler.places.iter().map(|byte| byte.count_ones()).sum();
    require!(places >= PLACES);
    write("seed \0");
    for (number, text) in [
        (
            seed,
            if filler_in_handler { ", producer in the handler: \0" } else { ", consumer in the handler: \0" },
        ),
        (HANDOFFS, " hand-offs, \0"),
        (handler.interrupts, " interrupts at \0"),
        (places, " instructions, wakes: \0"),
        (WAKES[0].load(SeqCst), " of the program, \0"),
        (WAKES[1].load(SeqCst), " of the handler\n\0"),
    ] {
        write_number(number);
        write(text);
    }
    WAKES[0].store(0, SeqCst);
    WAKES[1].store(0, SeqCst);
}

pub(crate) fn main() -> ! {
    for (ring, seed) in RINGS.iter().zip(1..) {
        run(ring, seed, seed <= 4);
    }
    exit(true)
}
