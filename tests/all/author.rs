//! Pipes under code of their authors that breaks its word: panics in every method and every drop, lengths that are wrong,
//! calls out of turn, numbers at their ends. Every call returns, with an error that names the culprit or with the panic
//! itself; nothing leaks but the value of a panic whose drop panics.
//!
//! `TWINBUF_AUTHOR_CASES` sets the number of random cases, and runs all the others too. `--nocapture` prints the
//! number of cases and the slowest one.

#![allow(clippy::cast_possible_truncation, reason = "all numbers are small")]

use std::collections::VecDeque;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use twinbuf::Error;
use twinbuf::observe::LoopRecorder;
use twinbuf::pipe::{self, Content, Driven, Filled, Filling, Front, Items, Pipe, Slots, Source};
use twinbuf_testing::Random as Dice;

/// Much longer than any case takes, and shorter than the 10 s for which the drop of a pipe waits.
const LIMIT: Duration = Duration::from_secs(5);

/// The code that breaks its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Fill,
    /// The panic's own value panics when it is dropped.
    Payload,
    Pays,
    SourceDrop,
    UnitDrop,
    SlotDrop,
    ErrorDrop,
    OrderNext,
    OrderHint,
    OrderDrop,
    Wake,
    WakerClone,
    WakerDrop,
    /// A driver ends with a fill in its hands.
    Driver,
    /// An exact length of more, or fewer, units than there are.
    Long,
    Short,
    Empty,
}

const CULPRITS: [What; 17] = {
    use What::*;
    [
        Fill, Payload, Pays, SourceDrop, UnitDrop, SlotDrop, ErrorDrop, OrderNext, OrderHint, OrderDrop,
        Wake, WakerClone, WakerDrop, Driver, Long, Short, Empty,
    ]
};

/// Who has broken its word, and how often. Every value of the author's has a share of it: what is left is a leak.
#[derive(Debug)]
struct Bad {
    what: What,
    /// At which of its calls it panics, and whether at all later ones too.
    at: u64,
    always: bool,
    calls: AtomicU64,
    panics: AtomicU64,
}

impl Bad {
    fn new(what: What, at: u64, always: bool) -> Arc<Self> {
        Arc::new(Self { what, at, always, calls: AtomicU64::new(0), panics: AtomicU64::new(0) })
    }

    fn is_hit(&self, what: What) -> bool {
        if self.what != what || thread::panicking() {
            return false;
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let hit = call == self.at || self.always && call > self.at;
        self.panics.fetch_add(u64::from(hit), Ordering::Relaxed);
        hit
    }

    fn hit(&self, what: What) {
        if self.is_hit(what) {
            resume_unwind(Box::new(format!("{what:?}"))); // without the panic hook, which would print each
        }
    }
}

/// Breaks its word when it is dropped.
#[derive(Debug)]
struct Mark(Arc<Bad>, What);

impl Drop for Mark {
    fn drop(&mut self) {
        self.0.hit(self.1);
    }
}

#[derive(Debug)]
struct Unit(u64, #[expect(dead_code, reason = "for its drop")] Mark);

#[derive(Debug)]
struct Memory(u64, #[expect(dead_code, reason = "for its drop")] Mark);

#[derive(Debug)]
struct Broken(#[expect(dead_code, reason = "for its drop")] Mark);

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("broken")
    }
}

impl std::error::Error for Broken {}

struct Order {
    units: std::ops::Range<u64>,
    hint: Option<usize>,
    mark: Mark,
}

impl Iterator for Order {
    type Item = Unit;

    fn next(&mut self) -> Option<Unit> {
        self.mark.0.hit(What::OrderNext);
        self.units.next().map(|unit| Unit(unit, Mark(self.mark.0.clone(), What::UnitDrop)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.mark.0.hit(What::OrderHint);
        (self.hint.unwrap_or(0), self.hint)
    }
}

struct Author {
    /// The unit that cannot be filled.
    fails: u64,
    mark: Mark,
}

impl Source<Memory> for Author {
    type Unit = Unit;

    fn fill(&mut self, unit: &mut Unit, slot: &mut Memory, at: &mut Filling<'_>) -> Result<Content, Error> {
        let bad = &self.mark.0;
        bad.hit(What::Fill);
        if bad.is_hit(What::Payload) {
            bad.panics.fetch_add(1, Ordering::Relaxed);
            resume_unwind(Box::new(Broken(Mark(bad.clone(), What::Payload))));
        }
        if unit.0 == self.fails {
            return Err(at.failed(Broken(Mark(bad.clone(), What::ErrorDrop))));
        }
        slot.0 = unit.0;
        Ok(Content::Bytes(8))
    }

    fn pays(&self) -> bool {
        self.mark.0.hit(What::Pays);
        true
    }
}

type Authors = Slots<Memory, Unit>;

/// Fills slots until the pipe is closed, or until it breaks its word.
fn drive(mut worker: Driven<Authors>, mut source: Author) {
    let bad = source.mark.0.clone();
    while let Some(mut fill) = worker.next() {
        bad.hit(What::Driver);
        let (unit, slot, mut at) = fill.parts();
        match catch_unwind(AssertUnwindSafe(|| source.fill(unit, slot, &mut at))) {
            Ok(Ok(Content::Bytes(bytes))) => fill.commit(bytes),
            Ok(Ok(Content::End)) => fill.end(),
            Ok(Err(error)) => fill.fail(error),
            Err(panic) => {
                mem::forget(panic);
                drop(fill);
            }
        }
    }
}

/// A waker of this thread that breaks its word. It wakes the thread first.
struct Awake(Arc<Bad>, Thread);

fn waker(bad: &Arc<Bad>) -> Waker {
    const TABLE: RawWakerVTable = RawWakerVTable::new(
        |data| {
            // SAFETY: each waker of this table owns a box of this type, until its wake or its drop.
            let Awake(bad, thread) = unsafe { &*data.cast::<Awake>() };
            bad.hit(What::WakerClone);
            RawWaker::new(Box::into_raw(Box::new(Awake(bad.clone(), thread.clone()))).cast(), &TABLE)
        },
        |data| {
            // SAFETY: as above; `wake` consumes the waker.
            let Awake(bad, thread) = *unsafe { Box::from_raw(data.cast::<Awake>().cast_mut()) };
            thread.unpark();
            bad.hit(What::Wake);
        },
        |_| unreachable!("the pipe wakes no task twice"),
        |data| {
            // SAFETY: as above; a drop consumes the waker.
            let Awake(bad, _) = *unsafe { Box::from_raw(data.cast::<Awake>().cast_mut()) };
            bad.hit(What::WakerDrop);
        },
    );
    let data = Box::into_raw(Box::new(Awake(bad.clone(), thread::current())));
    // SAFETY: the table's functions treat the data as a box of `Awake`, which it is, and may run on any thread.
    unsafe { Waker::from_raw(RawWaker::new(data.cast(), &TABLE)) }
}

#[derive(Clone, Copy, Debug)]
enum How {
    Next,
    Try,
    Timeout,
    Poll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Close,
    CloseTimeout,
    Drop,
}

const HOWS: [How; 4] = [How::Next, How::Try, How::Timeout, How::Poll];

const ENDS: [End; 3] = [End::Close, End::CloseTimeout, End::Drop];

/// Threads, driven workers, slots, overlap.
const MODES: [(usize, usize, usize, bool); 8] = [
    (1, 0, 2, false),
    (1, 0, 1, true),
    (1, 0, 2, true),
    (2, 0, 4, true),
    (3, 0, 4, true),
    (0, 1, 2, true),
    (0, 2, 3, false),
    (1, 1, 3, true),
];

#[derive(Clone, Copy, Debug)]
struct Case {
    what: What,
    at: u64,
    always: bool,
    /// How the caller asks; each time in a random way if there is none.
    how: Option<How>,
    end: End,
    mode: (usize, usize, usize, bool),
    /// How many items of each call are taken.
    take: usize,
    /// Whether the caller goes on after an error.
    resumes: bool,
    /// How many items it keeps.
    keeps: usize,
    /// Chooses the rest. Nothing is chosen if it is 0.
    seed: u64,
}

impl Case {
    fn random(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let mut below = |limit: usize| dice.below(limit as u64) as usize;
        let (what, mode) = (CULPRITS[below(CULPRITS.len())], MODES[below(MODES.len())]);
        let (how, end) = (HOWS.get(below(8)).copied(), ENDS[below(3)]);
        let (at, always, resumes) = (below(12) as u64, below(3) == 0, below(2) == 0);
        let (take, keeps) = ([below(9), ALL][below(2)], below(mode.2));
        Self { what, at, always, how, end, mode, take, resumes, keeps, seed }
    }
}

/// Units of a call.
const UNITS: u32 = 6;

/// More than there are.
const ALL: usize = 99;

/// How many wrong cases are shown.
const MOST_WRONG: usize = 8;

/// Runs a case. Returns what is wrong.
fn run(case: Case) -> Result<(), String> {
    let Case { what, at, always, .. } = case;
    let bad = Bad::new(what, at, always);
    let heard = Mutex::new(Vec::new());
    let ran = catch_unwind(AssertUnwindSafe(|| run_with(case, &bad, &heard)));
    let heard = heard.into_inner().unwrap();
    match ran {
        Ok(Ok(())) => {}
        Ok(Err(wrong)) => return Err(format!("{wrong}, after {heard:?}")),
        Err(_) => return Err(format!("a panic of the test itself, after {heard:?}")),
    }
    let gone = heard.iter().find(|text| text.contains("thread is gone"));
    if let Some(gone) = gone.filter(|_| what != What::Driver) {
        return Err(format!("nobody is named: {gone}"));
    }
    let wrong = match what {
        // All units are asked for, but those behind an error.
        What::Long | What::Short | What::Empty => case.seed == 0 && case.take == ALL,
        // What was filled for a call that was left is discarded, with its errors.
        _ => case.take == ALL && bad.panics.load(Ordering::Relaxed) > 0 && case.end != End::Drop,
    };
    if wrong && heard.is_empty() {
        return Err("nobody hears of it".to_string());
    }
    // The thread that wakes tasks when their time is over may still have a waker.
    let until = Instant::now() + LIMIT / 2;
    while Arc::strong_count(&bad) > 1 && what != What::Payload && Instant::now() < until {
        thread::yield_now();
    }
    match Arc::strong_count(&bad) {
        // The value of a panic that panicked in its own drop may leak.
        1 => Ok(()),
        _ if what == What::Payload => Ok(()),
        left => Err(format!("{} values leak, after {heard:?}", left - 1)),
    }
}

/// What the caller has heard of the culprit.
type Heard = Mutex<Vec<String>>;

/// Notes a panic.
fn caught<T>(heard: &Heard, what: &str, call: impl FnOnce() -> T) -> Option<T> {
    let found = catch_unwind(AssertUnwindSafe(call)).map_err(mem::forget);
    if found.is_err() {
        heard.lock().unwrap().push(format!("panic of {what}"));
    }
    found.ok()
}

fn run_with(case: Case, bad: &Arc<Bad>, heard: &Heard) -> Result<(), String> {
    let (threads, driven, depth, overlap) = case.mode;
    let (mut dice, random) = (Dice(case.seed), case.seed > 0);
    let mark = |what| Mark(bad.clone(), what);
    let fails = if case.what == What::ErrorDrop { case.at } else { u64::MAX };
    let source = || Author { fails, mark: mark(What::SourceDrop) };
    let slots = (0..depth).map(|_| Memory(0, mark(What::SlotDrop))).collect();
    let builder = pipe::builder(slots).overlap(overlap).held_timeout(Duration::from_millis(2));
    let builder = (0..threads).fold(builder, |builder, _| builder.worker(source()));
    let helps = overlap && (case.what == What::Pays || random && dice.chance(30));
    let builder = if helps { builder.helper(source()) } else { builder };
    let mut pipe = (0..driven).fold(builder, |builder, _| builder.driven()).build().unwrap();
    let workers = pipe.driven();
    let waker = waker(bad);
    thread::scope(|scope| {
        for worker in workers {
            let source = source();
            scope.spawn(move || caught(heard, "a driver", || drive(worker, source)));
        }
        // Drops items on another thread.
        let (other, items) = channel();
        if random && dice.chance(30) {
            scope.spawn(move || {
                for item in items {
                    thread::yield_now();
                    caught(heard, "a drop of an item", || drop(item));
                }
            });
        } else {
            drop(items);
        }
        let mut found = Ok(());
        for _ in 0..if random { 1 + dice.below(4) } else { 2 } {
            found = found.and(call(case, &mut pipe, &mut dice, &other, &waker, heard, mark(What::OrderDrop)));
        }
        drop(other);
        let closed = caught(heard, "the end", || match case.end {
            End::Close => pipe.close(),
            End::CloseTimeout => pipe.close_timeout(LIMIT * 2),
            End::Drop => {
                drop(pipe);
                Ok(())
            }
        });
        if let Some(Err(error)) = closed {
            heard.lock().unwrap().push(format!("{error:?}"));
            caught(heard, "a drop of an error", || drop(error));
        }
        caught(heard, "a drop of a waker", || drop(waker));
        found
    })
}

/// Begins a call of the pipe, takes items as `case` says, and ends it. Returns an error if an item is wrong.
fn call(
    case: Case,
    pipe: &mut Pipe<Authors>,
    dice: &mut Dice,
    other: &Sender<Filled<Memory, Unit>>,
    waker: &Waker,
    heard: &Heard,
    mark: Mark,
) -> Result<(), String> {
    let Case { what, take, .. } = case;
    let random = case.seed > 0;
    let hint = match what {
        What::Long => Some(UNITS + 3),
        What::Short => Some(UNITS - 2),
        What::Empty => Some(0),
        _ if random && dice.chance(30) => None,
        _ => Some(UNITS),
    };
    let order = Order { units: 0..UNITS.into(), hint: hint.map(|hint| hint as usize), mark };
    let mut granted = if random && dice.chance(30) { dice.below(3) } else { u64::MAX };
    if caught(heard, "the begin", || pipe.begin(0, order, granted)).is_none() {
        return Ok(());
    }
    let mut items = Items::lent(pipe);
    let (mut kept, mut taken, mut failed) = (VecDeque::new(), 0, 0);
    let mut wrong = Ok(());
    for _ in 0..40 {
        if taken == take {
            break;
        }
        if taken as u64 + failed == granted {
            granted += 1 + dice.below(2);
            items.resume(granted);
        }
        let how = case.how.unwrap_or_else(|| HOWS[dice.below(4) as usize]);
        match caught(heard, "a call", || ask(&mut items, how, waker)) {
            None => {}
            Some(None) => break,
            Some(Some(Ok(item))) => {
                let unit = item.unit().0;
                let lies = matches!(what, What::OrderNext | What::Long | What::Short | What::Empty);
                if (unit, item.0) != (taken as u64 + failed, unit) && !lies {
                    wrong = Err(format!("item {taken}, after {failed} errors, is {item:?}"));
                }
                taken += 1;
                kept.push_back(item);
            }
            Some(Some(Err(error))) => {
                failed += u64::from(!matches!(error, Error::SlotHeld { .. }));
                heard.lock().unwrap().push(format!("{error:?}"));
                caught(heard, "a drop of an error", || drop(error));
                if !case.resumes {
                    break;
                }
                items.resume(granted);
            }
        }
        while kept.len() > case.keeps || random && dice.chance(20) && !kept.is_empty() {
            let item = if random && dice.chance(30) { kept.pop_back() } else { kept.pop_front() };
            let item = item.and_then(|item| other.send(item).err()).map(|error| error.0);
            caught(heard, "a drop of an item", || drop(item));
        }
    }
    caught(heard, "a drop of the items", || drop(items));
    for item in kept {
        caught(heard, "a drop of an item", || drop(item));
    }
    wrong
}

/// Asks until there is an answer.
fn ask<F: Front>(items: &mut Items<'_, F>, how: How, waker: &Waker) -> Option<Result<F::Item, Error>> {
    loop {
        let found = match how {
            How::Next => Poll::Ready(items.next()),
            How::Try => items.try_next(),
            How::Timeout => items.next_timeout(Duration::from_millis(1)),
            How::Poll => items.poll_next(&mut Context::from_waker(waker)),
        };
        match (found, how) {
            (Poll::Ready(found), _) => return found,
            (Poll::Pending, How::Poll) => thread::park(),
            (Poll::Pending, _) => thread::yield_now(),
        }
    }
}

/// Runs the cases, each on a thread of its own that is given up after the limit. Some run side by side: most of their time
/// is waits for held slots.
fn run_all(cases: impl Iterator<Item = Case> + Send) {
    let cases = Mutex::new(cases);
    let results = Mutex::new((0, (Duration::ZERO, None), Vec::new()));
    let lane = || {
        while results.lock().unwrap().2.len() < MOST_WRONG {
            let Some(case) = cases.lock().unwrap().next() else { return };
            let start = Instant::now();
            let (done, ends) = channel();
            thread::spawn(move || done.send(run(case)));
            let found = ends.recv_timeout(LIMIT).unwrap_or_else(|_| Err("hangs".to_string()));
            let took = start.elapsed();
            let (count, slowest, wrong) = &mut *results.lock().unwrap();
            *count += 1;
            if took > slowest.0 {
                *slowest = (took, Some(case));
            }
            wrong.extend(found.err().map(|error| format!("{error}: {case:?}")));
        }
    };
    thread::scope(|scope| (0..6).for_each(|_| drop(scope.spawn(lane))));
    let (count, slowest, wrong) = results.into_inner().unwrap();
    println!("{count} cases, the slowest: {slowest:?}");
    assert!(wrong.is_empty(), "{} of {count} cases:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn code_that_breaks_its_word_is_named_and_stops_nothing() {
    let mut cases = Vec::new();
    for (what, mode) in CULPRITS.into_iter().flat_map(|what| MODES.map(|mode| (what, mode))) {
        for (how, end) in HOWS.into_iter().flat_map(|how| ENDS.map(|end| (Some(how), end))) {
            for (at, always) in [(0, false), (1, false), (3, false), (0, true), (4, true)] {
                for (take, resumes, keeps) in [(2, false, 1), (ALL, false, 0), (ALL, true, mode.2 / 2)] {
                    cases.push(Case { what, at, always, how, end, mode, take, resumes, keeps, seed: 0 });
                }
            }
        }
    }
    // Some of them, all with the variable.
    let random: Option<u64> = std::env::var("TWINBUF_AUTHOR_CASES").ok().map(|most| most.parse().unwrap());
    let every = if random.is_some() { 1 } else { 29 };
    run_all(cases.into_iter().step_by(every).chain((1..=random.unwrap_or(500)).map(Case::random)));
}

/// Writes its unit, and fails where it is told to.
struct Numbers {
    fails: u64,
    bytes: usize,
}

impl Source<u64> for Numbers {
    type Unit = u64;

    fn fill(&mut self, unit: &mut u64, slot: &mut u64, at: &mut Filling<'_>) -> Result<Content, Error> {
        at.read_bytes(self.bytes);
        at.read_bytes(self.bytes);
        at.reads(usize::MAX, u64::MAX);
        *slot = *unit;
        if *unit == self.fails { Err(at.failed("no such number")) } else { Ok(Content::Bytes(self.bytes)) }
    }
}

/// Panics once.
fn once(what: What) -> Arc<Bad> {
    Bad::new(what, 0, false)
}

/// An order of three units. Its drop panics.
fn cursed() -> impl Iterator<Item = u64> + Send {
    let mark = Mark(once(What::OrderDrop), What::OrderDrop);
    (0..3).inspect(move |_| {
        let _ = &mark;
    })
}

/// Modes of a pipe: workers and overlap.
const PLAIN: [(usize, bool); 3] = [(1, false), (1, true), (2, true)];

fn numbers(fails: u64, (workers, overlap): (usize, bool)) -> Pipe<Slots<u64, u64>> {
    let builder = pipe::builder(vec![0; 4]).overlap(overlap);
    let add = |builder: pipe::Builder<u64, u64>, _| builder.worker(Numbers { fails, bytes: 8 });
    (0..workers).fold(builder, add).build().unwrap()
}

/// Asks in each way, on a thread that is given up after the limit. Each call makes its own iterator.
fn asked(
    mut pipe: Pipe<Slots<u64, u64>>,
    prepare: impl Fn(&mut Pipe<Slots<u64, u64>>) + Send + 'static,
) -> Vec<Option<String>> {
    let (done, ends) = channel();
    thread::spawn(move || {
        for how in HOWS {
            prepare(&mut pipe);
            let mut items = Items::lent(&mut pipe);
            let found = ask(&mut items, how, &waker(&once(What::Driver)));
            let told = |found: Result<Filled<_, _>, Error>| {
                found.map_or_else(|error| format!("{error:?}"), |item: Filled<u64, u64>| item.to_string())
            };
            done.send(found.map(told)).unwrap();
        }
        pipe.close().map_err(|error| error.to_string()).unwrap();
    });
    (0..4).map(|_| ends.recv_timeout(LIMIT).expect("no call waits for what cannot come")).collect()
}

#[test]
fn a_call_out_of_turn_is_an_error_or_the_end() {
    let load = |step, text: &str| Some(format!("epoch 0, step {step}: the batch could not be read: {text}"));
    for mode in PLAIN {
        let found = asked(numbers(9, mode), |_| ());
        assert_eq!(found, vec![load(0, "wanted `begin` before the first item"); 4], "{mode:?}");

        // After the end of an order of unknown length.
        let mut pipe = numbers(99, mode);
        assert_eq!(pipe.items((0..).take_while(|&unit| unit < 5)).count(), 5);
        assert_eq!(asked(pipe, |_| ()), vec![None; 4], "{mode:?}");

        // After an error, until the unit is passed over.
        let mut pipe = numbers(2, mode);
        assert_eq!(pipe.items(0..5).filter(Result::is_err).count(), 1);
        assert_eq!(asked(pipe, |pipe| pipe.grant(u64::MAX)), vec![None; 4], "{mode:?}");

        // More than is granted: the error, and then the end.
        let granted = "wanted more units granted, found that all that were have come";
        let mut pipe = numbers(99, mode);
        pipe.begin(0, 0..5, 0);
        let [first, later @ ..] = &asked(pipe, |_| ())[..] else { unreachable!() };
        assert_eq!((first, later), (&load(0, granted), &[None, None, None][..]), "{mode:?}");

        // After an iteration that was left, also with units that were started, until more are granted.
        let mut pipe = numbers(99, mode);
        pipe.begin(0, 0..5, 3);
        assert_eq!(Items::lent(&mut pipe).take(2).filter(Result::is_ok).count(), 2);
        let mut left = Items::lent(&mut pipe);
        assert_eq!((left.size_hint(), left.next().is_none()), ((0, Some(0)), true), "{mode:?}");
        drop(left);
        pipe.grant(4);
        assert!(Items::lent(&mut pipe).take(2).map(|item| *item.unwrap()).eq([2, 3]), "{mode:?}");
        assert_eq!(asked(pipe, |_| ()), vec![None; 4], "{mode:?}");

        let mut pipe = numbers(99, mode);
        pipe.begin(0, 0..5, 2);
        let mut items = Items::lent(&mut pipe);
        assert!([true, true, false].iter().all(|ok| items.next().unwrap().is_ok() == *ok));
        items.resume(3);
        assert_eq!(*items.next().unwrap().unwrap(), 2, "{mode:?}");
    }
    // A caller that fills slots fills none if its source does not pay.
    let helper = Numbers { fails: 99, bytes: 8 };
    for builder in [pipe::builder(vec![0; 4]), pipe::builder(vec![0; 4]).helper(helper)] {
        let pipe = builder.driven().build().unwrap();
        let driver = "wanted a driver, found all workers still in the pipe: call `Pipe::driven`";
        assert_eq!(asked(pipe, |pipe| pipe.begin(0, 0..5, 5)), vec![load(0, driver); 4]);
    }
}

#[test]
fn a_panic_of_a_drop_is_told_once_in_the_place_of_the_next_unit() {
    for mode in PLAIN {
        let mut pipe = numbers(99, mode);
        pipe.begin(0, cursed(), 0);
        // Grant no unit yet: `begin` or a worker drops the earlier order, and this drop must panic before the first
        // unit starts.
        pipe.begin(1, 0..3, 0);
        let mut items = Items::lent(&mut pipe);
        items.resume(u64::MAX);
        let error = items.next().unwrap().unwrap_err();
        let Error::Panicked { at, who: "order", message } = &error else { panic!("{error}") };
        assert_eq!((at.epoch, at.step, message.as_str()), (1, Some(0), "OrderDrop"), "{mode:?}");
        items.resume(u64::MAX);
        assert!(items.map(|item| *item.unwrap()).eq([1, 2]), "{mode:?}");
        pipe.close().unwrap();
    }
}

/// Otherwise a driver that outlives its pipe would keep the order, and without one the panic would leave `close`.
#[test]
fn an_order_that_no_worker_has_fetched_is_dropped_with_its_pipe() {
    for driven in [true, false] {
        let builder = pipe::builder(vec![0_u64; 2]).overlap(false);
        let worker = || Numbers { fails: 99, bytes: 8 };
        let builder = if driven { builder.driven() } else { builder.worker(worker()).worker(worker()) };
        let mut pipe = builder.build().unwrap();
        let workers = pipe.driven();
        pipe.begin(0, cursed(), 0);
        assert_eq!(pipe.report().settings.workers, 1);
        let error = pipe.close().unwrap_err();
        assert!(matches!(&error, Error::Panicked { who: "order", .. }), "driven {driven}: {error}");
        drop(workers);
    }
}

/// Otherwise nothing would tell why the workers are gone.
#[test]
fn a_caller_that_finds_no_worker_is_told_of_a_panic_once() {
    let mut pipe = pipe::builder(vec![0_u64; 2]).driven().build().unwrap();
    let workers = pipe.driven();
    pipe.begin(0, cursed(), u64::MAX);
    drop(workers); // and the order with the last worker
    let mut items = Items::lent(&mut pipe);
    let error = items.next().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Panicked { at, who: "order", .. } if at.step == Some(0)), "{error}");
    items.resume(u64::MAX);
    let error = items.next().unwrap().unwrap_err();
    assert!(matches!(&error, Error::ThreadGone { .. }), "{error}");
    drop(items);
    pipe.close().unwrap();
}

/// Otherwise the worker that takes the slot next would drop it, and its panic would end that worker.
#[test]
fn an_error_of_a_call_that_was_left_is_dropped_by_the_caller() {
    let bad = once(What::ErrorDrop);
    let mut pipe = pipe::builder(vec![0_u64; 2]).driven().build().unwrap();
    let mut worker = pipe.driven().remove(0);
    pipe.begin(0, 0..1, 1);
    let mut fill = worker.next().unwrap();
    let error = fill.parts().2.failed(Broken(Mark(bad.clone(), What::ErrorDrop)));
    fill.fail(error);
    pipe.begin(1, 0..1, 1);
    worker.next().unwrap().commit(8);
    let mut items = Items::lent(&mut pipe);
    assert_eq!(*items.next().unwrap().unwrap().unit(), 0);
    assert_eq!(Arc::strong_count(&bad), 1, "the slot of the earlier call has the error no more");
    drop(items);
    let error = pipe.close().unwrap_err();
    assert!(matches!(&error, Error::Panicked { who: "unit or an error", .. }), "{error}");
}

#[test]
fn numbers_at_their_ends_are_saturated() {
    for (workers, overlap) in PLAIN {
        let builder = pipe::builder(vec![0; 3]).overlap(overlap).rounds().held_timeout(Duration::MAX);
        let add =
            |builder: pipe::Builder<u64, u64>, _| builder.worker(Numbers { fails: 9, bytes: usize::MAX });
        let mut pipe = (0..workers).fold(builder, add).build().unwrap();
        for first in [u64::MAX, u64::MAX - 1] {
            pipe.begin(first, 0..3, u64::MAX);
            pipe.grant(u64::MAX);
            let mut items = Items::lent(&mut pipe);
            for unit in 0..3 {
                let Poll::Ready(Some(Ok(item))) = items.next_timeout(Duration::MAX) else {
                    panic!("unit {unit}")
                };
                assert_eq!(*item, unit);
            }
            items.resume(u64::MAX);
            assert!(items.next().is_none());
        }
        assert_eq!((pipe.report().bytes, pipe.report().batches), (u64::MAX, 6));
        assert!(!pipe.report().to_string().is_empty());
        pipe.close_timeout(Duration::MAX).unwrap();
    }
    let (mut recorder, now) = (LoopRecorder::new(None, None, false).unwrap(), Instant::now());
    recorder.received(u64::MAX, u64::MAX, now);
    recorder.asked(now);
    assert_eq!(recorder.report().batches, 1);
}
