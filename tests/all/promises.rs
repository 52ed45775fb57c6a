//! What fronts promise, tested once for all: the loader, on the host and on a device, the stream of tensors, the
//! generator and the pipe. A new front is one more [`Tested`].

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_core::Stream;
use twinbuf::generate::{self, Generator};
use twinbuf::loader::At;
use twinbuf::pipe::{self, Content, Filling, Front, Items, Pipe, Slots, Source};
use twinbuf::stream::TensorStream;
use twinbuf::{BatchIndices, BoxError, Error, Loader, stream};

use crate::common::model::{self, Model, SIZES};
use crate::common::{LONG, Reads, in_order, numbers, until, woken};

const SLOTS: usize = 3;
const UNITS: u64 = SIZES.len() as u64;

/// Overlap, and one of `Tested::WORKERS`.
type Mode = (bool, usize);

/// What a source does for a unit before it fills the slot.
type Fill = Arc<dyn Fn(u64) -> Result<(), BoxError> + Send + Sync>;

/// How a front is built.
struct Setup {
    overlap: bool,
    /// One of `Tested::WORKERS`.
    variant: usize,
    held_timeout: Duration,
    fill: Fill,
    /// What is dropped after the front.
    kept: RefCell<Vec<Box<dyn std::any::Any>>>,
}

impl Setup {
    fn new((overlap, variant): Mode) -> Self {
        Self { overlap, variant, held_timeout: LONG, fill: Arc::new(|_| Ok(())), kept: RefCell::default() }
    }

    fn filled(self, fill: impl Fn(u64) -> Result<(), BoxError> + Send + Sync + 'static) -> Self {
        Self { fill: Arc::new(fill), ..self }
    }
}

/// The setup is dropped after the front.
fn built<F: Tested>(setup: Setup) -> (Setup, F) {
    let front = F::build(&setup);
    (setup, front)
}

trait Tested: Front<Item: Send> + Sized {
    /// The number of workers of each variant.
    const WORKERS: &[usize] = &[1];
    /// Whether its source calls [`Setup::fill`].
    const FILLS: bool = true;

    fn build(setup: &Setup) -> Self;

    fn call(&mut self) -> Items<'_, Self>;

    fn number(item: &Self::Item) -> u64;

    fn close(self) -> Result<(), Error>;

    /// The units of the call after one that has received all up to `reached`.
    fn units(_reached: u64) -> Range<u64> {
        0..UNITS
    }

    /// The option for the number of slots.
    const OPTION: &str = "depth";
    /// Whose panic an error names.
    const WHO: &str = "data set";
}

/// Units that are numbers.
struct Numbers(Fill);

impl Source<u64> for Numbers {
    type Unit = u64;

    fn fill(&mut self, unit: &mut u64, slot: &mut u64, at: &mut Filling<'_>) -> Result<Content, Error> {
        (self.0)(*unit).map_err(|error| at.failed(error))?;
        *slot = *unit;
        Ok(Content::Bytes(8))
    }
}

fn loader(setup: &Setup) -> twinbuf::loader::LoaderBuilder {
    let (plan, fill) = (in_order(UNITS, 1), setup.fill.clone());
    let read =
        move |batch: &BatchIndices, out: &mut [u8]| fill(batch.step()).and_then(|()| numbers(batch, out));
    Loader::builder(Reads(UNITS, 8, read), plan).overlap(setup.overlap).held_timeout(setup.held_timeout)
}

impl Tested for Loader {
    const WORKERS: &[usize] = &[1, 2];

    fn build(setup: &Setup) -> Self {
        loader(setup).workers(Self::WORKERS[setup.variant]).depth(SLOTS).build().unwrap()
    }
    fn call(&mut self) -> Items<'_, Self> {
        self.epoch(0)
    }
    fn number(item: &Self::Item) -> u64 {
        item.cast::<u64>().unwrap()[0]
    }
    fn close(self) -> Result<(), Error> {
        self.close()
    }
}

/// A loader on a device, where there is a software driver.
#[cfg(target_os = "linux")]
type OnDevice = Loader<twinbuf::loader::Cuda>;
#[cfg(not(target_os = "linux"))]
type OnDevice = Loader;

#[cfg(target_os = "linux")]
impl Tested for OnDevice {
    const OPTION: &str = "device_depth";

    fn build(setup: &Setup) -> Self {
        use twinbuf_cuda_sim::{Options, Sim};
        let sim = Sim::start(Options { delay_us: 5, ..Options::seeded(1) });
        setup.kept.borrow_mut().push(Box::new(sim));
        loader(setup).cuda(twinbuf::cuda::context(0).unwrap()).device_depth(SLOTS).build().unwrap()
    }
    fn call(&mut self) -> Items<'_, Self> {
        self.epoch(0)
    }
    fn number(item: &Self::Item) -> u64 {
        item.step()
    }
    fn close(self) -> Result<(), Error> {
        self.close()
    }
}

impl Tested for TensorStream {
    const FILLS: bool = false;

    fn build(setup: &Setup) -> Self {
        let model = Model::new(&[400, 3, 0, 2_500, 70, 9]);
        let builder = stream(model.groups()).overlap(setup.overlap).keep(0).depth(SLOTS);
        setup.kept.borrow_mut().push(Box::new(model));
        builder.held_timeout(setup.held_timeout).build().unwrap()
    }
    fn call(&mut self) -> Items<'_, Self> {
        self.pass()
    }
    fn number(item: &Self::Item) -> u64 {
        let up = item.tensor("mlp.up").unwrap().cast::<u16>().unwrap();
        let mut numbers = up.iter().enumerate();
        assert!(numbers.all(|(i, &found)| found == model::number(item.number(), i)), "{item:?}");
        item.number() as u64
    }
    fn close(self) -> Result<(), Error> {
        self.close()
    }
}

impl Tested for Generator<'static, u64> {
    /// The second variant in lockstep.
    const WORKERS: &[usize] = &[1, 1];
    const WHO: &str = "closure";

    fn build(setup: &Setup) -> Self {
        let fill = setup.fill.clone();
        let make = move |round, slot: &mut u64| {
            *slot = round;
            fill(round)
        };
        let builder = generate::with_slots([0; SLOTS], make).overlap(setup.overlap);
        let builder = if setup.variant == 1 { builder.before(|_| Ok::<(), BoxError>(())) } else { builder };
        builder.held_timeout(setup.held_timeout).build().unwrap()
    }
    fn call(&mut self) -> Items<'_, Self> {
        self.rounds(UNITS)
    }
    fn number(item: &Self::Item) -> u64 {
        assert_eq!(**item, item.number());
        item.number()
    }
    fn close(self) -> Result<(), Error> {
        self.close()
    }
    fn units(reached: u64) -> Range<u64> {
        reached..reached + UNITS
    }
}

impl Tested for Pipe<Slots<u64, u64>> {
    const WORKERS: &[usize] = &[1, 2];
    const WHO: &str = "source";

    fn build(setup: &Setup) -> Self {
        let builder = pipe::builder(vec![0; SLOTS]).overlap(setup.overlap).held_timeout(setup.held_timeout);
        let workers = Self::WORKERS[setup.variant];
        (0..workers).fold(builder, |builder, _| builder.worker(Numbers(setup.fill.clone()))).build().unwrap()
    }
    fn call(&mut self) -> Items<'_, Self> {
        self.items(0..UNITS)
    }
    fn number(item: &Self::Item) -> u64 {
        **item
    }
    fn close(self) -> Result<(), Error> {
        self.close()
    }
}

/// Defines the tests of promises: each for all fronts, their variants, and with overlap and without.
macro_rules! promises {
    ($($name:ident)+) => {$(
        #[test]
        fn $name() {
            for overlap in [true, false] {
                promises!(@ $name(overlap) Loader, OnDevice, TensorStream, Generator<'static, u64>, Pipe<Slots<u64, u64>>);
            }
        }
    )+};
    (@ $name:ident($overlap:ident) $($front:ty),+) => {$(
        for variant in 0..<$front as Tested>::WORKERS.len() {
            println!("{}, variant {variant}, overlap {}", std::any::type_name::<$front>(), $overlap);
            promise::$name::<$front>(($overlap, variant));
        }
    )+};
}

promises! {
    every_way_to_wait_gives_the_same
    a_wait_that_ends_early_loses_nothing
    slots_that_are_held_are_an_error_and_no_hang
    a_slot_that_another_thread_drops_late_is_waited_for
    a_slot_that_is_dropped_in_time_may_be_filled_for_longer
    a_slot_that_an_earlier_call_found_held_has_its_full_time_again
    a_slot_that_is_released_wakes_its_task
    a_fault_comes_once_and_in_its_place
    an_iterator_without_a_call_waits_for_nothing
    close_tells_what_nobody_has_heard
    what_is_left_anywhere_joins_its_threads_and_loses_nothing
}
#[cfg(unix)]
promises! { a_forked_process_is_told }

fn in_time<T>(found: Poll<T>) -> T {
    let Poll::Ready(found) = found else { panic!("it waited for {LONG:?}, or it does not wait") };
    found
}

fn place(error: &Error) -> &At {
    match error {
        Error::Load { at, .. } | Error::Panicked { at, .. } => at,
        error => panic!("{error}"),
    }
}

/// The unit of a place: its step, or the round of a generator.
fn unit(at: &At) -> u64 {
    at.step.unwrap_or(at.epoch)
}

mod promise {
    use super::*;

    pub(super) fn every_way_to_wait_gives_the_same<F: Tested>(mode: Mode) {
        type Way<F> = fn(&mut Items<'_, F>) -> Option<Result<<F as Front>::Item, Error>>;
        fn look_until<T>(mut look: impl FnMut() -> Poll<T>) -> T {
            loop {
                if let Poll::Ready(found) = look() {
                    return found;
                }
                std::thread::yield_now();
            }
        }
        let ways: [Way<F>; 5] = [
            |items| items.next(),
            |items| look_until(|| items.try_next()),
            |items| look_until(|| items.next_timeout(Duration::from_micros(50))),
            |items| pollster::block_on(items.next_async()),
            |items| pollster::block_on(poll_fn(|cx| Stream::poll_next(Pin::new(&mut *items), cx))),
        ];
        let setup = Setup::new(mode);
        let (mut front, mut reached) = (F::build(&setup), 0);
        for way in ways {
            let mut items = front.call();
            for wanted in F::units(reached) {
                assert_eq!(F::number(&way(&mut items).unwrap().unwrap()), wanted);
                reached = wanted + 1;
            }
            assert!(way(&mut items).is_none() && way(&mut items).is_none());
        }
        front.close().unwrap();
    }

    pub(super) fn a_wait_that_ends_early_loses_nothing<F: Tested>(mode @ (overlap, variant): Mode) {
        if !overlap || !F::FILLS || F::WORKERS[variant] > 1 {
            return;
        }
        let (open, gate) = channel();
        let gate = Mutex::new(gate);
        let setup = Setup::new(mode).filled(move |_| Ok(gate.lock().unwrap().recv()?));
        let mut front = F::build(&setup);
        let mut items = front.call();
        for _ in 0..3 {
            assert!(items.try_next().is_pending());
            assert!(items.next_timeout(Duration::from_micros(1)).is_pending());
            drop(items.next_async());
        }
        let (woken, waker, wakes) = woken();
        assert!(items.poll_next(&mut Context::from_waker(&waker)).is_pending());
        open.send(()).unwrap();
        wakes.recv().unwrap();
        assert_eq!(woken.0.load(Ordering::Relaxed), 1, "woken once");
        assert_eq!(F::number(&in_time(items.try_next()).unwrap().unwrap()), 0);
        open.send(()).unwrap();
        assert_eq!(F::number(&in_time(items.next_timeout(LONG)).unwrap().unwrap()), 1);
        open.send(()).unwrap();
        assert_eq!(F::number(&pollster::block_on(items.next_async()).unwrap().unwrap()), 2);
        // Then the source fails.
        drop(open);
        let error = in_time(items.next_timeout(LONG)).unwrap().map(|item| F::number(&item)).unwrap_err();
        assert_eq!(unit(place(&error)), 3);
        assert!(matches!(items.try_next(), Poll::Ready(None)));
        assert!(matches!(items.poll_next(&mut Context::from_waker(&waker)), Poll::Ready(None)));
    }

    pub(super) fn slots_that_are_held_are_an_error_and_no_hang<F: Tested>(mode: Mode) {
        const TIMEOUT: Duration = Duration::from_millis(20);
        let setup = Setup { held_timeout: TIMEOUT, ..Setup::new(mode) };
        let (mut front, mut reached) = (F::build(&setup), 0);
        // A thread; a task, each time anew; a task after a call that did not wait; a thread that would wait for longer.
        let (block, task, until) = (0, 1, 2);
        for (way, tried) in
            [(block, false), (task, false), (task, false), (task, true), (until, false), (until, true)]
        {
            let mut items = front.call();
            let first = F::units(reached).start;
            let held: Vec<_> = (0..SLOTS).map(|_| items.next().unwrap().unwrap()).collect();
            assert!(!tried || items.try_next().is_pending());
            let began = Instant::now();
            let error = match way {
                0 => items.next(),
                1 => pollster::block_on(items.next_async()),
                _ => in_time(items.next_timeout(LONG)),
            };
            let error = error.unwrap().map(|item| F::number(&item)).unwrap_err();
            assert!(tried || began.elapsed() >= TIMEOUT, "not before its time");
            reached = first + SLOTS as u64;
            let Error::SlotHeld { at, option, slots: SLOTS } = &error else { panic!("{error}") };
            assert!((unit(at), *option) == (reached, F::OPTION), "{error}");
            // A generator has no option for it.
            let or = at.step.map_or(String::new(), |_| format!(", or raise `{option}`"));
            let text =
                "wanted the next of 3 slots, found it held by what the caller received earlier: drop that";
            assert_eq!(error.to_string(), format!("{at}: {text}{or}"));
            assert!(items.next().is_none());
            assert!(held.iter().map(F::number).eq(first..reached), "unharmed");
        }
        assert!(front.call().map(|item| F::number(&item.unwrap())).eq(F::units(reached)), "it goes on");
        front.close().unwrap();
    }

    pub(super) fn a_slot_that_another_thread_drops_late_is_waited_for<F: Tested>(mode: Mode) {
        let (_setup, mut front) = built::<F>(Setup::new(mode));
        std::thread::scope(|scope| {
            let mut items = front.call();
            let (send, held) = channel();
            let (tell, told) = channel();
            scope.spawn(move || {
                for (unit, item) in held {
                    told.recv().unwrap();
                    assert_eq!(F::number(&item), unit, "unharmed");
                    drop::<F::Item>(item);
                }
            });
            for unit in 0..UNITS {
                if unit >= SLOTS as u64 {
                    // All slots are held: this is not an error, and nothing is lost.
                    assert!(items.try_next().is_pending());
                    assert!(items.next_timeout(Duration::from_millis(1)).is_pending());
                    tell.send(()).unwrap();
                }
                let item = if unit % 2 == 0 { items.next() } else { pollster::block_on(items.next_async()) };
                let item = item.unwrap().unwrap();
                assert_eq!(F::number(&item), unit);
                send.send((unit, item)).unwrap();
            }
            assert!(items.next().is_none());
            (0..SLOTS).for_each(|_| tell.send(()).unwrap());
        });
    }

    pub(super) fn a_slot_that_is_dropped_in_time_may_be_filled_for_longer<F: Tested>(mode: Mode) {
        const TIMEOUT: Duration = Duration::from_millis(20);
        let fill = |unit| {
            if unit >= SLOTS as u64 {
                std::thread::sleep(2 * TIMEOUT);
            }
            Ok(())
        };
        let setup = Setup { held_timeout: TIMEOUT, ..Setup::new(mode) }.filled(fill);
        let mut front = F::build(&setup);
        std::thread::scope(|scope| {
            let mut items = front.call();
            let mut held: VecDeque<_> = (0..SLOTS).map(|_| items.next().unwrap().unwrap()).collect();
            let (send, dropped) = channel();
            scope.spawn(move || dropped.into_iter().for_each(drop::<Option<F::Item>>));
            for unit in SLOTS as u64..UNITS {
                send.send(held.pop_front()).unwrap(); // it is dropped while this thread waits
                let found = match unit % 2 {
                    0 => items.next(),
                    _ => in_time(items.next_timeout(LONG)),
                };
                match found.unwrap() {
                    Ok(item) => held.push_back(item),
                    Err(Error::SlotHeld { .. }) => break, // a busy machine: the other thread was late
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }

    pub(super) fn a_slot_that_an_earlier_call_found_held_has_its_full_time_again<F: Tested>(mode: Mode) {
        const TIMEOUT: Duration = Duration::from_millis(20);
        let (_setup, mut front) = built::<F>(Setup { held_timeout: TIMEOUT, ..Setup::new(mode) });
        let mut items = front.call();
        let mut held: Vec<_> = (0..SLOTS).map(|_| items.next().unwrap().unwrap()).collect();
        // The first call leaves before the time is over, the second receives the error.
        for leaves in [true, false, false] {
            let began = Instant::now();
            while items.held_for().is_none() {
                assert!(items.try_next().is_pending());
            }
            assert!(items.held_for().unwrap() <= began.elapsed(), "it counts from this call on");
            until(|| began.elapsed() >= TIMEOUT);
            assert!(leaves || items.next_timeout(LONG).is_ready());
            drop(items);
            items = front.call();
        }
        held.clear();
        assert!(items.all(|item| item.is_ok()));
    }

    /// A task whose slot is held is woken by its release alone, and then nothing is held.
    pub(super) fn a_slot_that_is_released_wakes_its_task<F: Tested>(mode: Mode) {
        let (_setup, mut front) = built::<F>(Setup::new(mode));
        let mut items = front.call();
        let mut held: Vec<_> = (0..SLOTS).map(|_| items.next().unwrap().unwrap()).collect();
        let (woken, waker, wakes) = woken();
        let mut cx = Context::from_waker(&waker);
        until(|| {
            assert!(items.poll_next(&mut cx).is_pending());
            items.held_for().is_some()
        });
        let before = woken.0.load(Ordering::Relaxed);
        for _ in 0..10 {
            assert!(items.poll_next(&mut cx).is_pending());
        }
        assert_eq!(woken.0.load(Ordering::Relaxed), before, "it wakes itself");
        held.clear();
        let item = loop {
            wakes.recv().unwrap();
            if let Poll::Ready(item) = items.poll_next(&mut cx) {
                break item.unwrap().unwrap();
            }
        };
        assert_eq!(F::number(&item), SLOTS as u64);
        assert!(items.held_for().is_none());
        // The waker of a task that waits no more is not kept; a wake may still be under way.
        until(|| Arc::strong_count(&woken) == 2);
    }

    pub(super) fn a_fault_comes_once_and_in_its_place<F: Tested>(mode @ (_, variant): Mode) {
        for (at, panics) in (0..UNITS).flat_map(|at| [(at, false), (at, true)]).filter(|_| F::FILLS) {
            let calls = Arc::new(AtomicU64::new(0));
            let counted = calls.clone();
            let setup = Setup::new(mode).filled(move |unit| {
                counted.fetch_add(1, Ordering::Relaxed);
                assert!(unit != at || !panics, "unit {unit} is cursed");
                if unit == at { Err(format!("no unit {unit}").into()) } else { Ok(()) }
            });
            let (mut front, mut reached) = (F::build(&setup), 0);
            for _ in 0..2 {
                let mut items = front.call();
                for wanted in F::units(reached).start..at {
                    assert_eq!(F::number(&items.next().unwrap().unwrap()), wanted);
                }
                let error = items.next().unwrap().map(|item| F::number(&item)).unwrap_err();
                assert_eq!(unit(place(&error)), at);
                match error {
                    Error::Load { source, .. } if !panics => {
                        assert_eq!(source.to_string(), format!("no unit {at}"));
                    }
                    Error::Panicked { who, message, .. } if panics => {
                        assert_eq!((who, message), (F::WHO, format!("unit {at} is cursed")));
                    }
                    error => panic!("{error}"),
                }
                assert!(items.next().is_none() && items.next().is_none());
                assert_eq!(Iterator::size_hint(&items), (0, Some(0)));
                reached = at;
            }
            // No unit far behind is started.
            let most = 2 * (at + (SLOTS + F::WORKERS[variant]) as u64);
            assert!(calls.load(Ordering::Relaxed) <= most, "{calls:?} at {at}");
            front.close().unwrap();
            assert_eq!(Arc::strong_count(&setup.fill), 1, "its threads are joined");
        }
    }

    pub(super) fn an_iterator_without_a_call_waits_for_nothing<F: Tested>(mode: Mode) {
        for taken in 0..=SIZES.len() {
            let (_setup, mut front) = built::<F>(Setup::new(mode));
            assert!(Items::lent(&mut front).next_timeout(LONG).is_ready(), "before the first");
            assert!(front.call().take(taken).all(|item| item.is_ok()));
            assert!(Items::lent(&mut front).next_timeout(LONG).is_ready(), "after {taken}");
            assert_eq!(front.call().map(Result::unwrap).count() as u64, UNITS);
            assert!(Items::lent(&mut front).next_timeout(LONG).is_ready());
        }
    }

    pub(super) fn close_tells_what_nobody_has_heard<F: Tested>(mode @ (overlap, _): Mode) {
        for heard in [false, true].into_iter().filter(|_| overlap && F::FILLS) {
            let (tell, told) = channel();
            let tell = Mutex::new(tell);
            let setup = Setup::new(mode).filled(move |unit| {
                if unit != 1 {
                    return Ok(());
                }
                tell.lock().unwrap().send(())?;
                Err("met ahead".into())
            });
            let mut front = F::build(&setup);
            let mut items = front.call();
            assert_eq!(F::number(&items.next().unwrap().unwrap()), 0);
            told.recv().unwrap();
            assert!(!heard || items.next().unwrap().is_err());
            drop(items);
            match front.close() {
                Ok(()) => assert!(heard),
                Err(Error::Load { at, source }) => {
                    assert_eq!((unit(&at), &*source.to_string(), heard), (1, "met ahead", false));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub(super) fn what_is_left_anywhere_joins_its_threads_and_loses_nothing<F: Tested>(mode: Mode) {
        let ends = ["drop", "close", "panic", "leak"];
        for (taken, end) in (0..=UNITS).flat_map(|taken| ends.map(|end| (taken, end))) {
            let (setup, mut front) = built::<F>(Setup::new(mode));
            let mut items = front.call();
            (0..taken).for_each(|unit| assert_eq!(F::number(&items.next().unwrap().unwrap()), unit));
            drop(items);
            if end == "drop" {
                assert!(front.call().map(|item| F::number(&item.unwrap())).eq(F::units(taken)));
            }
            if end == "leak" {
                mem::forget(front.call().next()); // its slot stays as it is
            }
            match end {
                "close" | "leak" => front.close().unwrap(),
                "drop" => drop(front),
                _ => {
                    let caller = catch_unwind(AssertUnwindSafe(move || {
                        let _held = front.call().next();
                        panic!("the caller's own");
                    }));
                    assert!(caller.is_err());
                }
            }
            assert_eq!(Arc::strong_count(&setup.fill), 1, "after {taken}, {end}");
        }
        for close in [true, false] {
            let (setup, front) = built::<F>(Setup::new(mode));
            if close {
                front.close().unwrap();
            } else {
                drop(front);
            }
            assert_eq!(Arc::strong_count(&setup.fill), 1, "never called");
        }
    }

    /// Its threads stay in the process that it was forked from, here in the middle of a fill.
    #[cfg(unix)]
    pub(super) fn a_forked_process_is_told<F: Tested>(mode @ (overlap, _): Mode) {
        use crate::common::forked::forked;
        if !overlap || !F::FILLS || F::OPTION == "device_depth" {
            return;
        }
        let build = || {
            let (open, gate) = channel();
            let gate = Mutex::new(gate);
            // Not the first one: the worker that has the second might take what was sent for it.
            let fill = move |unit| if unit == 0 { Ok(()) } else { Ok(gate.lock().unwrap().recv()?) };
            (open, F::build(&Setup::new(mode).filled(fill)))
        };
        let (open, mut front) = build();
        let mut items = front.call();
        assert_eq!(F::number(&items.next().unwrap().unwrap()), 0);
        // An alarm ends a hang.
        assert!(forked(|| {
            let Some(Err(Error::Forked { at })) = items.next() else { return false };
            unit(&at) == 1 && items.next().is_none()
        }));
        (1..UNITS).for_each(|_| open.send(()).unwrap());
        assert!(items.map(|item| F::number(&item.unwrap())).eq(1..UNITS), "the parent goes on");
        assert!(forked(|| matches!(front.call().try_next(), Poll::Ready(Some(Err(Error::Forked { .. }))))));
        assert!(forked(|| front.close().is_ok()));
        let (_open, front) = build();
        assert!(forked(|| {
            drop(front);
            true
        }));
    }
}
