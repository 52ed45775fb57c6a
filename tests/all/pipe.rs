//! Pipes of one's own: in order with any number of workers, errors and ends in their place, and never a hang.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::common::{LONG, Reads, busy, in_order, more_than_memory, until, woken};
use twinbuf::pipe::{self, Content, Filling, Items, Pipe, Slots, Source};
use twinbuf::{BatchIndices, BoxError, Error, Loader, generate};

/// Writes the unit, after yielding to other threads a few times; does what it is told at some units.
#[derive(Clone, Default)]
pub(crate) struct Numbers {
    fails: Option<u64>,
    ends: Option<u64>,
    fills: Arc<AtomicU64>,
}

impl Source<u64> for Numbers {
    type Unit = u64;

    fn fill(&mut self, unit: &mut u64, slot: &mut u64, at: &mut Filling<'_>) -> Result<Content, Error> {
        self.fills.fetch_add(1, Ordering::Relaxed);
        (0..unit.wrapping_mul(0x9e37_79b9) % 7).for_each(|_| std::thread::yield_now());
        if self.fails == Some(*unit) {
            return Err(at.failed("no such number"));
        }
        *slot = *unit;
        Ok(if self.ends == Some(*unit) { Content::End } else { Content::Bytes(8) })
    }
}

fn build(source: &Numbers, workers: usize, depth: usize, overlap: bool) -> Pipe<Slots<u64, u64>> {
    let builder = pipe::builder(vec![0; depth]).overlap(overlap);
    (0..workers).fold(builder, |builder, _| builder.worker(source.clone())).build().unwrap()
}

/// Workers, slots, overlap.
const MODES: [(usize, usize, bool); 5] =
    [(1, 1, false), (1, 1, true), (1, 2, true), (2, 3, true), (4, 6, true)];

#[test]
fn units_come_in_order_whatever_the_number_of_workers() {
    for (workers, depth, overlap) in MODES {
        let mut pipe = build(&Numbers::default(), workers, depth, overlap);
        for round in 0..20 {
            // With a length that is known, and with one that only the end tells.
            let found: Vec<u64> = pipe.items(round..100).map(|item| *item.unwrap()).collect();
            assert!(found.into_iter().eq(round..100), "{workers} workers");
            let unknown = (round..).take_while(|&unit| unit < 50);
            let found: Vec<u64> = pipe.items(unknown).map(|item| *item.unwrap()).collect();
            assert!(found.into_iter().eq(round..50), "{workers} workers, unknown length");
            // Left early: nothing of it is left to the next call.
            pipe.items(1000..2000).take(3).for_each(|item| assert!(*item.unwrap() < 1003));
        }
        pipe.close().unwrap();
    }
}

#[test]
#[cfg(target_pointer_width = "64")]
fn more_slots_than_memory_are_refused_before_any_is_allocated() {
    let nothing = |_: u64, (): &mut ()| Ok::<(), BoxError>(());
    let parts = |_: u64, _: usize, (): &mut ()| Ok::<(), BoxError>(());
    // Slots without bytes: the caller's vector takes no memory, however long it is.
    for slots in [1 << 40, 1 << 62, usize::MAX] {
        let pipe = pipe::builder(vec![(); slots]).worker(Nothing).build().map(drop);
        let generator = generate::with_slots(vec![(); slots], nothing).build().map(drop);
        for error in [pipe.unwrap_err(), generator.unwrap_err()] {
            assert_eq!(more_than_memory(&error, "slots", slots, 64), "slots");
        }
    }
    // Parts without bytes are no memory: any number of them is made by few threads.
    let slots = vec![vec![(); 1 << 10]; 2];
    let mut generator = generate::with_parts(slots, usize::MAX, parts).build().unwrap();
    assert_eq!(generator.rounds(3).filter(Result::is_ok).count(), 3);
}

#[test]
fn an_end_arrives_once_and_in_its_place() {
    for (workers, depth, overlap) in MODES {
        for at in [0, 1, 7] {
            let case = format!("{at}, {workers} workers, overlap {overlap}");
            let source = Numbers { ends: Some(at), ..Numbers::default() };
            let mut pipe = build(&source, workers, depth, overlap);
            for _ in 0..2 {
                let mut items = pipe.items(0..30);
                assert!(items.by_ref().map(|item| *item.unwrap()).eq(0..at), "{case}");
                assert!(items.next().is_none() && items.next().is_none(), "{case}");
                // It passes over errors alone. Otherwise units behind the end would come.
                items.resume(u64::MAX);
                assert!(items.next().is_none(), "{case}");
            }
            // No unit far behind is started.
            let most = 2 * (at + workers as u64 + depth as u64);
            assert!(source.fills.load(Ordering::Relaxed) <= most, "{case}");
            pipe.close().unwrap();
        }
    }
}

#[test]
fn a_panic_of_the_order_is_an_error_of_its_unit() {
    for (workers, depth, overlap) in MODES {
        let mut pipe = build(&Numbers::default(), workers, depth, overlap);
        let order = (0..20_u64).inspect(|&unit| assert!(unit != 5, "the order's own"));
        let mut items = pipe.items(order);
        for expected in 0..5 {
            assert_eq!(*items.next().unwrap().unwrap(), expected);
        }
        let error = items.next().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Panicked { at, who: "order", .. } if at.step == Some(5)), "{error}");
        assert!(items.next().is_none());
        drop(items);
        assert_eq!(pipe.items(0..20).count(), 20, "and the next call is as ever");
    }
}

/// With a receiver, waits at each fill until the other one has filled a slot; with a sender, tells of each fill.
struct Waits(Option<Sender<()>>, Option<Receiver<()>>);

impl Source<u64> for Waits {
    type Unit = u64;

    fn fill(&mut self, unit: &mut u64, slot: &mut u64, at: &mut Filling<'_>) -> Result<Content, Error> {
        self.1.as_ref().map_or(Ok(()), |fills| fills.recv_timeout(LONG)).map_err(|error| at.failed(error))?;
        self.0.iter().for_each(|fills| fills.send(()).unwrap());
        *slot = *unit;
        Ok(Content::Bytes(8))
    }

    fn pays(&self) -> bool {
        true
    }
}

#[test]
fn a_caller_with_a_source_of_its_own_fills_slots_while_it_waits() {
    let (helped, helps) = channel();
    let builder = pipe::builder(vec![0; 3]).worker(Waits(None, Some(helps)));
    let mut pipe = builder.helper(Waits(Some(helped), None)).build().unwrap();
    let mut items = pipe.items(0..2);
    for unit in 0..2 {
        // The worker fills a slot once the caller has filled one: in a call that finds the turn free.
        let item = loop {
            if let Poll::Ready(item) = items.next_timeout(Duration::from_millis(1)) {
                break item;
            }
        };
        assert_eq!(*item.unwrap().unwrap(), unit);
    }
    assert!(items.next().is_none());
}

#[test]
fn close_tells_no_error_of_an_earlier_call() {
    let source = Numbers { fails: Some(1), ..Numbers::default() };
    let mut pipe = build(&source, 1, 3, true);
    let mut items = pipe.items(0..9);
    assert_eq!(*items.next().unwrap().unwrap(), 0);
    until(|| source.fills.load(Ordering::Relaxed) >= 2); // the unit that fails is started
    drop(items);
    drop(pipe.items(10..12));
    pipe.close().unwrap();
}

/// Waits at each fill until a message comes.
struct Gated(Receiver<()>, Arc<AtomicBool>);

impl Source<u64> for Gated {
    type Unit = u64;

    fn fill(&mut self, unit: &mut u64, slot: &mut u64, at: &mut Filling<'_>) -> Result<Content, Error> {
        at.reads(3, 40 + *unit);
        self.0.recv().map_err(|error| at.failed(error))?;
        *slot = *unit;
        Ok(Content::Bytes(8))
    }
}

impl Drop for Gated {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

fn gated() -> (Sender<()>, Arc<AtomicBool>, Pipe<Slots<u64, u64>>) {
    let ((open, gate), dropped) = (channel(), Arc::default());
    let pipe = pipe::builder(vec![0; 2]).worker(Gated(gate, Arc::clone(&dropped))).name("mine");
    (open, dropped, pipe.build().unwrap())
}

#[test]
fn a_fill_that_hangs_is_named_and_left_behind() {
    let (open, dropped, mut pipe) = gated();
    let mut items = pipe.items(0..9);
    let mut reading = None;
    while reading.is_none() {
        assert!(items.next_timeout(Duration::from_millis(1)).is_pending());
        reading = items.reading().filter(|reading| reading.record.is_some());
    }
    let reading = reading.unwrap();
    assert_eq!((reading.at.to_string(), reading.record), ("mine: epoch 0, step 0".to_string(), Some(40)));
    drop(items);
    let error = pipe.close_timeout(Duration::from_millis(20)).unwrap_err();
    let Error::Timeout { reading: Some(reading), .. } = &error else { panic!("{error}") };
    assert_eq!(reading.at.to_string(), "mine: epoch 0, step 0");
    assert!(!dropped.load(Ordering::Relaxed), "its thread has it");
    drop(open);
    until(|| dropped.load(Ordering::Relaxed)); // it ends with its fill
}

/// It takes a moment to wake them.
#[test]
fn a_close_without_time_waits_for_threads_that_fill_nothing() {
    for _ in 0..100 {
        build(&Numbers::default(), 2, 3, true).close_timeout(Duration::ZERO).unwrap();
    }
}

/// A worker still fills the slot of the earlier call, and this slot is the next one in the ring. The caller waits for
/// this fill, so `reading` reports it.
#[test]
fn of_two_calls_the_fill_of_the_earlier_one_is_named() {
    let mut pipe = pipe::builder(vec![0_u64; 3]).driven().driven().build().unwrap();
    let [mut one, mut two] = <[_; 2]>::try_from(pipe.driven()).unwrap();
    let mut items = pipe.items(0..2_u64);
    one.next().unwrap().commit(8);
    assert_eq!(*items.next().unwrap().unwrap().unit(), 0);
    one.next().unwrap().suspend();
    drop(items);
    pipe.begin(7, 0..2, u64::MAX);
    two.next().unwrap().suspend();
    assert_eq!(pipe.reading().unwrap().at.to_string(), "epoch 0, step 1");
    one.next().unwrap().commit(8);
    assert_eq!(pipe.reading().unwrap().at.to_string(), "epoch 7, step 0");
    two.next().unwrap().commit(8);
    pipe.close().unwrap();
}

#[test]
fn units_are_started_as_they_are_granted() {
    for overlap in [false, true] {
        let source = Numbers::default();
        let mut pipe = build(&source, 1, 3, overlap);
        pipe.begin(7, 0..u64::MAX, 0);
        let mut items = pipe::Items::owned(pipe);
        for granted in 1..=5 {
            items.resume(granted);
            assert_eq!(*items.next().unwrap().unwrap(), granted - 1);
            assert_eq!(source.fills.load(Ordering::Relaxed), granted, "and no more, overlap {overlap}");
        }
        items.into_front().unwrap().close().unwrap();
    }
}

#[test]
fn an_iteration_goes_on_behind_an_error() {
    let source = Numbers { fails: Some(3), ..Numbers::default() };
    for overlap in [false, true] {
        let mut pipe = build(&source, 1, 2, overlap);
        pipe.begin(0, 0..6, u64::MAX);
        let mut items = pipe::Items::lent(&mut pipe);
        assert!(items.by_ref().map(|item| item.map(|item| *item).ok()).eq([Some(0), Some(1), Some(2), None]));
        items.resume(u64::MAX);
        assert!(items.map(|item| *item.unwrap()).eq([4, 5]), "overlap {overlap}");
    }
}

/// When a pipe is closed, no thread waits on for a slot that was held, and a driver that is left keeps no task.
#[test]
fn a_closed_pipe_forgets_the_task() {
    for (overlap, driven) in [(false, false), (true, false), (false, true), (true, true)] {
        let builder = pipe::builder(vec![0; 2]).worker(Numbers::default()).overlap(overlap);
        let builder = if driven { builder.driven() } else { builder };
        let mut pipe = builder.held_timeout(LONG).build().unwrap();
        let drivers = pipe.driven();
        let mut items = pipe.items(0..9);
        let held = (items.next().unwrap().unwrap(), items.next().unwrap().unwrap());
        let (woken, waker, wakes) = woken();
        assert!(items.poll_next(&mut Context::from_waker(&waker)).is_pending());
        drop((held, woken, waker, items));
        pipe.close().unwrap();
        // The last share of the waker goes with the last thread that has one.
        let mut next = Ok(());
        while next.is_ok() {
            next = wakes.recv_timeout(LONG / 10);
        }
        assert_eq!(next, Err(RecvTimeoutError::Disconnected), "overlap {overlap}, driven {driven}");
        drop(drivers);
    }
}

/// A fill may take longer than a slot may be held.
#[test]
fn a_slow_fill_is_no_held_slot() {
    struct Slow;
    impl Source<u64> for Slow {
        type Unit = u64;

        fn fill(&mut self, unit: &mut u64, slot: &mut u64, _: &mut Filling<'_>) -> Result<Content, Error> {
            std::thread::sleep(Duration::from_millis(10));
            *slot = *unit;
            Ok(Content::Bytes(8))
        }
    }
    let builder = pipe::builder(vec![0; 2]).worker(Slow).held_timeout(Duration::from_millis(1));
    let mut pipe = builder.build().unwrap();
    assert!(pipe.items(0..3).map(|item| *item.unwrap()).eq(0..3));
}

#[test]
fn units_of_an_iteration_that_was_left_are_not_started() {
    let mut pipe = pipe::builder(vec![0; 4]).driven().build().unwrap();
    let mut worker = pipe.driven().remove(0);
    let mut items = pipe.items(0..9);
    for unit in 0..2 {
        let Some(mut fill) = worker.next() else { panic!("unit {unit} may be started") };
        assert_eq!(*fill.unit(), unit);
        fill.suspend();
        if unit == 0 {
            worker.next().unwrap().commit(8);
            assert_eq!(*items.next().unwrap().unwrap().unit(), 0);
        }
    }
    drop(items);
    worker.next().unwrap().commit(8);
    assert!(worker.try_next().is_pending(), "after unit 1 the worker waits");
    pipe.close().unwrap();
    assert!(matches!(worker.try_next(), Poll::Ready(None)), "the pipe is closed");
    assert!(worker.next().is_none());
}

/// Yields three units, as its `size_hint` says, then `None` once, then more units.
struct Unfused(u64);

impl Iterator for Unfused {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 += 1;
        (self.0 != 4).then_some(self.0 - 1)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (3, Some(3))
    }
}

#[test]
fn an_order_is_not_asked_again_behind_its_end() {
    let mut pipe = pipe::builder(vec![0_u64; 4]).driven().build().unwrap();
    let mut worker = pipe.driven().remove(0);
    let items = pipe.items(Unfused(0));
    (0..3).for_each(|_| worker.next().unwrap().commit(8));
    assert!(worker.try_next().is_pending(), "a slot is free, but no unit is left");
    assert!(items.map(|item| *item.unwrap().unit()).eq(0..3));
    assert_eq!(pipe.report().loads, 3);
    pipe.close().unwrap();
}

#[test]
fn a_driver_that_leaves_leaves_the_units_to_the_other_workers() {
    let builder = pipe::builder(vec![0; 3]).driven().driven().worker(Numbers::default());
    let mut pipe = builder.build().unwrap();
    let mut workers = pipe.driven();
    assert_eq!(workers.len(), 2);
    assert!(pipe.driven().is_empty(), "each is handed out once");
    drop(workers.pop());
    for _ in 0..20 {
        assert!(pipe.items(0..100).map(|item| *item.unwrap()).eq(0..100));
    }
    drop(workers);
    assert!(pipe.items(0..100).map(|item| *item.unwrap()).eq(0..100));
    pipe.close().unwrap();
}

/// A driver that waits for a slot has the turn, and the caller would wait for it.
#[test]
fn without_overlap_a_caller_with_a_source_fills_all_slots() {
    let builder = pipe::builder(vec![0; 2]).driven().worker(Numbers::default()).overlap(false);
    let mut pipe = builder.build().unwrap();
    assert!(pipe.driven().is_empty());
    assert!(pipe.items(0..100).map(|item| *item.unwrap()).eq(0..100));
    pipe.close().unwrap();
}

/// Otherwise the report would count no wait for what the caller does before it grants a unit.
#[test]
fn a_worker_waits_from_the_callers_last_call_until_its_unit_is_granted() {
    let mut pipe = pipe::builder(vec![0; 2]).worker(Numbers::default()).rounds().build().unwrap();
    pipe.begin(0, 0..2_u64, 1);
    let mut items = Items::lent(&mut pipe);
    items.next().unwrap().unwrap();
    let received = Instant::now();
    busy(Duration::from_millis(5));
    let took = received.elapsed();
    items.resume(2);
    items.next().unwrap().unwrap();
    let waited = items.report().read.waiting;
    assert!(waited >= took, "{waited:?}, {took:?}");
}

#[test]
fn what_driven_workers_and_threads_fill_comes_in_order() {
    let builder = pipe::builder(vec![0; 5]).driven().worker(Numbers::default()).driven();
    let mut pipe = builder.build().unwrap();
    let drivers = pipe.driven().into_iter().map(|mut worker| {
        std::thread::spawn(move || {
            let mut filled = 0_u64;
            loop {
                let Some(mut fill) = worker.next() else { return filled };
                let unit = *fill.unit();
                *fill.slot() = unit;
                if filled % 3 == 0 {
                    fill.suspend();
                    worker.next().unwrap().commit(8);
                } else {
                    fill.commit(8);
                }
                filled += 1;
            }
        })
    });
    let drivers: Vec<_> = drivers.collect();
    for round in 0..20 {
        assert!(pipe.items(round..round + 100).map(|item| *item.unwrap()).eq(round..round + 100));
    }
    assert_eq!(pipe.report().loads, 2000);
    pipe.close().unwrap();
    let filled: u64 = drivers.into_iter().map(|driver| driver.join().unwrap()).sum();
    assert!(filled <= 2000);
}

/// A driver of one worker: it fills units up to `bad`, and ends that one in its own way.
fn drive(
    bad: u64,
    how: impl FnOnce(pipe::Fill<'_, Slots<u64, u64>>) + Send + 'static,
) -> Vec<Result<u64, String>> {
    let mut pipe = pipe::builder(vec![0; 3]).driven().build().unwrap();
    let mut worker = pipe.driven().remove(0);
    let driver = std::thread::spawn(move || {
        let mut how = Some(how);
        while let Some(mut fill) = worker.next() {
            let unit = *fill.unit();
            if unit != bad {
                *fill.slot() = unit;
                fill.commit(8);
            } else if let Some(how) = how.take() {
                how(fill);
            }
        }
    });
    let found =
        pipe.items(0..6).map(|item| item.map(|slot| *slot).map_err(|error| format!("{error:?}"))).collect();
    pipe.close().unwrap();
    let _ = driver.join();
    found
}

#[test]
fn a_fill_that_a_driver_fails_ends_or_forgets_comes_in_its_place() {
    let failed = drive(2, |mut fill| {
        let error = fill.parts().2.failed("no such number");
        fill.fail(error);
    });
    let error = "epoch 0, step 2: the batch could not be read: no such number";
    assert_eq!(failed, [Ok(0), Ok(1), Err(error.to_string())]);
    let ended = drive(2, |fill| {
        fill.end();
    });
    assert_eq!(ended, [Ok(0), Ok(1)]);
    let dropped = "epoch 0, step 2: the batch could not be read: wanted the slot filled, found the fill dropped by its \
                   driver";
    for found in [drive(2, |fill| drop(fill)), drive(2, |_fill| resume_unwind(Box::new("cursed")))] {
        assert_eq!(found, [Ok(0), Ok(1), Err(dropped.to_string())]);
    }
}

#[test]
fn close_tells_no_error_of_a_unit_behind_the_end() {
    for asks in [false, true] {
        let mut pipe = pipe::builder(vec![0_u64; 3]).driven().driven().build().unwrap();
        let mut workers = pipe.driven();
        pipe.begin(0, 0..9_u64, u64::MAX);
        let mut fills = workers.iter_mut().map(|worker| match worker.try_next() {
            Poll::Ready(Some(fill)) => fill,
            found => panic!("{found:?}"),
        });
        let (first, mut second) = (fills.next().unwrap(), fills.next().unwrap());
        let error = second.parts().2.failed("no such number");
        second.fail(error);
        first.end();
        if asks {
            assert!(Items::lent(&mut pipe).next().is_none());
        }
        pipe.close().unwrap();
    }
}

#[test]
fn a_pipe_does_not_wait_for_a_driver_that_does_nothing_and_not_for_ever_for_one_that_fills() {
    let (mut pipe, unit) = (pipe::builder(vec![0_u64; 3]).driven().driven().build().unwrap(), 7_u64);
    let [mut one, two] = <[_; 2]>::try_from(pipe.driven()).unwrap();
    pipe.begin(0, [unit, unit], u64::MAX);
    one.next().unwrap().suspend();
    assert!(matches!(
        pipe.close_timeout(Duration::from_millis(1)),
        Err(Error::Timeout { reading: Some(_), .. })
    ));
    one.next().unwrap().commit(8);
    assert!(one.next().is_none() && one.try_next().is_ready());
    drop((one, two));
    let mut pipe = pipe::builder(vec![0_u64; 3]).driven().build().unwrap();
    let _idle = pipe.driven();
    pipe.begin(0, [unit, unit], u64::MAX);
    pipe.close().unwrap();
    let mut pipe = pipe::builder(vec![0_u64; 3]).driven().build().unwrap();
    pipe.begin(0, [unit, unit], u64::MAX);
    pipe.close().unwrap();
}

/// Closes the pipe where it is woken, and tells how that ended.
struct Closes(Mutex<Option<Pipe<Slots<u64, u64>>>>, Sender<Result<(), Error>>);

impl Wake for Closes {
    fn wake(self: Arc<Self>) {
        let pipe = self.0.lock().unwrap().take();
        if let Some(pipe) = pipe {
            self.1.send(pipe.close_timeout(Duration::ZERO)).unwrap();
        }
    }
}

/// No thread waits for its own end.
#[test]
fn a_waker_may_close_the_pipe_on_the_thread_of_its_worker() {
    let (open, _dropped, mut pipe) = gated();
    pipe.begin(0, 0..1, u64::MAX);
    let (tell, closed) = channel();
    let closes = Arc::new(Closes(Mutex::default(), tell));
    let mut items = Items::owned(pipe);
    let waker = Waker::from(Arc::clone(&closes));
    assert!(items.poll_next(&mut Context::from_waker(&waker)).is_pending());
    until(|| items.reading().is_some()); // a unit that is not started would be taken back
    *closes.0.lock().unwrap() = items.into_front();
    open.send(()).unwrap();
    closed.recv().unwrap().unwrap();
}

#[test]
fn sixty_four_reads_in_flight_need_two_more_slots() {
    let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let read = move |_: &BatchIndices, _: &mut [u8]| {
        let [reads, most] = &*counts;
        most.fetch_max(reads.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        until(|| most.load(Ordering::Relaxed) == 64); // at once
        reads.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    };
    let builder = Loader::builder(Reads(128, 8, read), in_order(128, 1)).workers(64);
    assert_eq!(builder.wanted_slots().unwrap().0, 66);
    let mut loader = builder.build().unwrap();
    assert_eq!(loader.epoch(0).map(Result::unwrap).count(), 128);
}

#[test]
fn builders_refuse_what_cannot_work() {
    let refused = |builder: pipe::Builder<u64, u64>| builder.build().unwrap_err().to_string();
    assert_eq!(
        refused(pipe::builder(Vec::new()).worker(Numbers::default())),
        "option `slots`: wanted at least one, found none"
    );
    assert_eq!(refused(pipe::builder(vec![0])), "option `worker`: wanted at least one, found none");
    let none = twinbuf::generate::with_slots(Vec::new(), |_, _: &mut u64| Ok::<(), BoxError>(()));
    assert!(matches!(none.build(), Err(Error::Option { option: "slots", .. })));
}

/// Counts itself when it is dropped, on the thread of the test.
struct Counted(Arc<AtomicU64>, ThreadId);

impl Drop for Counted {
    fn drop(&mut self) {
        assert_eq!(std::thread::current().id(), self.1, "dropped by a worker");
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Nothing;

impl Source<()> for Nothing {
    type Unit = Counted;

    fn fill(&mut self, _: &mut Counted, (): &mut (), _: &mut Filling<'_>) -> Result<Content, Error> {
        Ok(Content::Bytes(0))
    }
}

#[test]
fn a_unit_is_dropped_with_its_item() {
    for (workers, depth, overlap) in MODES {
        let builder = pipe::builder(vec![(); depth]).overlap(overlap);
        let mut pipe = (0..workers).fold(builder, |builder, _| builder.worker(Nothing)).build().unwrap();
        let dropped = Arc::new(AtomicU64::new(0));
        let (of, here) = (dropped.clone(), std::thread::current().id());
        // More units than slots, so that workers fill each slot again.
        let items = pipe.items((0..20).map(move |_| Counted(of.clone(), here)));
        for (number, item) in (1..).zip(items) {
            drop(item.unwrap());
            assert_eq!(dropped.load(Ordering::Relaxed), number, "{workers} workers");
        }
        assert_eq!(dropped.load(Ordering::Relaxed), 20);
    }
}
