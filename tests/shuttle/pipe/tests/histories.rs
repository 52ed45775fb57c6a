//! Long histories of a pipe under random schedules: whatever is asked, left, kept, stuck or broken, every call ends,
//! units come once and in their place, and no thread stays in the end.
//!
//! A lost wakeup is a deadlock, which shuttle reports with the schedule to replay. It does not test orderings: shuttle's
//! atomics are sequentially consistent. `TWINBUF_SHUTTLE_HISTORIES` sets the number of histories of each test.

use std::collections::VecDeque;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::mpsc::{Receiver, Sender, channel};
use shuttle::sync::{Arc, Mutex};
use shuttle::{check_pct, check_random, thread};
use twinbuf::pipe::{self, Content, Driven, Filled, Filling, Front, Items, Pipe, Slots, Source};
use twinbuf::write::Writer;
use twinbuf::{Error, Loader, Plan, Records};

/// Shorter than a history takes; a held slot is looked at again after 5 ms.
const SHORT: Duration = Duration::from_micros(200);

fn histories() -> usize {
    std::env::var("TWINBUF_SHUTTLE_HISTORIES").map_or(150, |number| number.parse().unwrap())
}

fn chance(percent: u32) -> bool {
    thread_rng().gen_ratio(percent, 100)
}

fn below(limit: u64) -> u64 {
    thread_rng().gen_range(0..limit)
}

/// What a source does at one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Fails,
    Panics,
    Ends,
    /// Waits until the gate opens.
    Sticks,
}

/// Sources, with the fault that each draws; what opens their gate, and what tells that all were dropped.
fn sources(
    workers: u64,
    mut fault: impl FnMut() -> Option<(Fault, u64)>,
) -> (Vec<Numbers>, Sender<()>, Receiver<()>) {
    let (open, gate) = channel();
    let (gone, left) = channel();
    let gate = Arc::new(Mutex::new(gate));
    let source = |_| Numbers { fault: fault(), gate: gate.clone(), _gone: gone.clone() };
    ((0..workers).map(source).collect(), open, left)
}

/// Writes the unit, after yielding to other threads up to twice.
struct Numbers {
    fault: Option<(Fault, u64)>,
    gate: Arc<Mutex<Receiver<()>>>,
    /// Tells of its drop.
    _gone: Sender<()>,
}

impl Source<u64> for Numbers {
    type Unit = u64;

    fn fill(&mut self, unit: &mut u64, slot: &mut u64, at: &mut Filling<'_>) -> Result<Content, Error> {
        (0..below(3)).for_each(|_| thread::yield_now());
        match self.fault {
            Some((Fault::Fails, number)) if number == *unit => return Err(at.failed("no such number")),
            // Without the panic hook, which would print each.
            Some((Fault::Panics, number)) if number == *unit => resume_unwind(Box::new("cursed")),
            Some((Fault::Ends, number)) if number == *unit => return Ok(Content::End),
            Some((Fault::Sticks, number)) if number == *unit => drop(self.gate.lock().unwrap().recv()),
            _ => {}
        }
        *slot = *unit;
        Ok(Content::Bytes(8))
    }
}

/// A pipe with a worker for each source.
fn threads(builder: pipe::Builder<u64, u64>, sources: Vec<Numbers>) -> Pipe<Slots<u64, u64>> {
    sources.into_iter().fold(builder, pipe::Builder::worker).build().unwrap()
}

/// Drives a worker on a thread of its own, with a source; suspends a fill now and then.
fn drive(mut worker: Driven<Slots<u64, u64>>, mut source: Numbers) {
    loop {
        let Some(mut fill) = worker.next() else { return };
        let (unit, slot, mut at) = fill.parts();
        let filled = catch_unwind(AssertUnwindSafe(|| source.fill(unit, slot, &mut at)));
        let result = filled.unwrap_or_else(|_| {
            Err(Error::Panicked { at: at.at(), who: "source", message: "cursed".to_string() })
        });
        let fill = if chance(20) {
            fill.suspend();
            thread::yield_now();
            worker.next().unwrap()
        } else {
            fill
        };
        match result {
            Ok(Content::Bytes(bytes)) => fill.commit(bytes),
            Ok(Content::End) => fill.end(),
            Err(error) => fill.fail(error),
        }
    }
}

/// Asks for the next item in one of the five ways.
fn ask<F: Front>(items: &mut Items<'_, F>) -> Option<Result<F::Item, Error>> {
    loop {
        let found = match below(6) {
            0 => items.try_next(),
            1 => items.next_timeout(SHORT / 8),
            2 => items.poll_next(&mut Context::from_waker(Waker::noop())),
            3 => return block_on(items.next_async()),
            _ => return items.next(),
        };
        match found {
            Poll::Ready(found) => return found,
            Poll::Pending => thread::yield_now(),
        }
    }
}

/// Items that the caller keeps, with the number of items received before each, or that another thread drops.
struct Keeper<I> {
    kept: VecDeque<(usize, I)>,
    other: Sender<I>,
}

impl<I> Keeper<I> {
    /// Drops the kept items that would block item `index`: it needs the slot of item `index - depth`.
    fn before(&mut self, index: usize, depth: usize) {
        self.kept.retain(|&(kept, _)| kept + depth > index);
    }

    fn take(&mut self, index: usize, item: I) {
        match below(4) {
            0 => self.kept.push_back((index, item)),
            1 => self.other.send(item).unwrap(),
            _ => drop(item),
        }
    }
}

/// A pipe of numbers: what it delivers, and how it ends.
fn numbers() {
    let overlap = chance(90);
    let workers = if overlap { 1 + below(3) } else { 1 };
    let depth = (1 + below(workers + 2)) as usize;
    let kind = [None, Some(Fault::Fails), Some(Fault::Panics), Some(Fault::Ends)][below(4) as usize];
    let fault = kind.map(|fault| (fault, below(3) * 100 + below(8)));
    let (sources, _open, left) = sources(workers, || fault);
    let mut builder = pipe::builder(vec![0; depth]).overlap(overlap);
    let mut drivers = Vec::new();
    for source in sources {
        if overlap && chance(40) {
            drivers.push(source);
            builder = builder.driven();
        } else {
            builder = builder.worker(source);
        }
    }
    let mut pipe = builder.build().unwrap();
    for (worker, source) in pipe.driven().into_iter().zip(drivers) {
        thread::spawn(move || drive(worker, source));
    }
    let (other, items) = channel::<Filled<u64, u64>>();
    let dropper = thread::spawn(move || {
        while items.recv().is_ok() {
            thread::yield_now();
        }
    });
    let mut keeper = Keeper { kept: VecDeque::new(), other };
    let mut unheard = None;
    for call in 0..1 + below(3) {
        unheard = calls(&mut pipe, call * 100, fault, depth, &mut keeper);
    }
    drop(keeper);
    // The error of a unit that was not received is not lost.
    match (below(4), unheard) {
        (0, _) => drop(pipe),
        (_, Some(heard)) => match pipe.close() {
            Ok(()) => {}
            Err(error) => check_error(&error, fault, heard),
        },
        (1, None) => pipe.close_timeout(Duration::from_secs(60)).unwrap(),
        _ => pipe.close().unwrap(),
    }
    dropper.join().unwrap();
    assert!(left.recv().is_err(), "every source was dropped");
}

/// One call of a pipe, up to its end or not. Returns the first unit of the call if an error of it may be unheard.
fn calls(
    pipe: &mut Pipe<Slots<u64, u64>>,
    first: u64,
    fault: Option<(Fault, u64)>,
    depth: usize,
    keeper: &mut Keeper<Filled<u64, u64>>,
) -> Option<u64> {
    let units = first..first + below(12);
    let until = if chance(30) { below(12) } else { u64::MAX };
    let broken = chance(10).then(|| first + below(8));
    let order = units.clone().inspect(move |&unit| {
        if broken == Some(unit) {
            resume_unwind(Box::new("the order's own"));
        }
    });
    let granted = if chance(30) { below(3) } else { u64::MAX };
    let counted = chance(60);
    if counted {
        // The map hides nothing: the length is exact.
        pipe.begin(first, order, granted);
    } else {
        let end = units.end;
        pipe.begin(first, order.take_while(move |&unit| unit < end), granted);
    }
    let mut items = Items::lent(pipe);
    let mut received = 0;
    let mut granted = granted;
    let result = loop {
        let unit = units.start + received;
        if received == until {
            break Some(unit);
        }
        if received == granted {
            // In lockstep, or a few more.
            granted += 1 + below(2);
            items.resume(granted);
        }
        keeper.before(received as usize, depth);
        let found = ask(&mut items);
        if broken == Some(unit) && unit < units.end {
            let Some(Err(Error::Panicked { who: "order", .. })) = found else { panic!("{found:?}") };
            break None;
        }
        if unit == units.end || fault == Some((Fault::Ends, unit)) {
            assert!(found.is_none(), "{found:?}");
            break None;
        }
        match found {
            Some(Ok(item)) => {
                assert_eq!((*item, *item.unit()), (unit, unit));
                keeper.take(received as usize, item);
                received += 1;
            }
            Some(Err(error)) => {
                check_error(&error, fault, unit);
                assert!(fault.is_some_and(|(_, number)| number == unit));
                break None;
            }
            None => panic!("the end before {unit} of {units:?}"),
        }
    };
    keeper.kept.clear();
    if result.is_none() {
        assert!(ask(&mut items).is_none(), "an end is an end");
    }
    drop(items);
    // An order that panicked ahead is an error too.
    if broken.is_some() { result.or(Some(first)) } else { result }
}

/// The error is that of the fault, and was not heard before.
fn check_error(error: &Error, fault: Option<(Fault, u64)>, heard: u64) {
    match error {
        Error::Load { .. } => {
            assert!(fault.is_some_and(|(fault, unit)| fault == Fault::Fails && unit >= heard), "{error}");
        }
        Error::Panicked { who: "source", .. } => {
            assert!(fault.is_some_and(|(fault, unit)| fault == Fault::Panics && unit >= heard), "{error}");
        }
        Error::Panicked { who: "order", .. } => {}
        _ => panic!("{error}"),
    }
}

/// A source that does not return: it is named, its thread is left behind, and ends with its fill.
fn stuck() {
    let workers = 1 + below(3);
    let depth = (1 + below(workers + 2)) as usize;
    let at = below(6);
    let (sources, open, left) = sources(workers, || Some((Fault::Sticks, at)));
    let mut pipe = threads(pipe::builder(vec![0; depth]), sources);
    let mut items = pipe.items(0..12_u64);
    for unit in 0..at {
        assert_eq!(*ask(&mut items).unwrap().unwrap(), unit);
    }
    assert!(items.next_timeout(SHORT / 8).is_pending(), "it is stuck");
    let met = items.reading().is_some_and(|reading| reading.at.step == Some(at));
    match below(4) {
        0 => {
            // As a task: its drop does not wait long.
            assert!(items.poll_next(&mut Context::from_waker(Waker::noop())).is_pending());
            drop(items);
            drop(pipe);
        }
        1 => {
            drop(items);
            // The fill returns while the pipe waits for it.
            let opener = thread::spawn(move || open.send(()).unwrap());
            pipe.close().unwrap();
            opener.join().unwrap();
            assert!(left.recv().is_err(), "every source was dropped");
            return;
        }
        _ => {
            drop(items);
            match pipe.close_timeout(SHORT) {
                Err(Error::Timeout { reading, .. }) => {
                    let reading = reading.map(|reading| reading.at.step);
                    assert!(reading.is_none() || reading == Some(Some(at)) || !met, "{reading:?}");
                }
                found => assert!(!met, "it is stuck: {found:?}"),
            }
        }
    }
    let _ = open.send(());
    drop(open);
    assert!(left.recv().is_err(), "every source was dropped");
}

/// A call is left while its unit fails: the next call goes on.
fn late() {
    let (sources, _open, _left) = sources(1 + below(2), || Some((Fault::Fails, below(2))));
    let mut pipe = threads(pipe::builder(vec![0; 3]), sources);
    let left = pipe.items(0..9_u64);
    thread::yield_now();
    drop(left);
    assert!(pipe.items(10..14_u64).map(|item| *item.unwrap()).eq(10..14));
    pipe.close().unwrap();
}

/// The caller keeps every item: it is told at the timeout, in whatever way it waits.
fn held() {
    let overlap = chance(70);
    let workers = if overlap { 1 + below(2) } else { 1 };
    let depth = (1 + below(workers + 2)) as usize;
    let (sources, _open, left) = sources(workers, || None);
    let builder = pipe::builder(vec![0; depth]).overlap(overlap).held_timeout(SHORT);
    let mut pipe = threads(builder, sources);
    let mut items = pipe.items(0..12_u64);
    let kept: Vec<_> = (0..depth).map(|_| ask(&mut items).unwrap().unwrap()).collect();
    assert!(kept.iter().map(|item| **item).eq(0..depth as u64));
    let error = ask(&mut items).unwrap().unwrap_err();
    assert!(matches!(error, Error::SlotHeld { slots, .. } if slots == depth), "{error}");
    assert!(ask(&mut items).is_none());
    drop(items);
    if chance(50) {
        drop(kept);
        assert!(pipe.items(0..3_u64).map(|item| *item.unwrap()).eq(0..3));
        pipe.close().unwrap();
    } else {
        // What is kept outlives the pipe.
        drop(pipe);
        assert!(kept.iter().map(|item| **item).eq(0..depth as u64));
    }
    assert!(left.recv().is_err(), "every source was dropped");
}

/// A loader of files in memory, whose waiting caller fills slots too.
fn loader(data: &std::sync::Arc<Records>) {
    let plan = Plan::builder(data.len()).batch(1 + below(3)).build().unwrap();
    let (batch, depth) = (plan.batch_records(), (2 + below(3)) as usize);
    let mut loader = Loader::builder(data.clone(), plan.clone()).depth(depth).hints(false).build().unwrap();
    let (other, batches) = channel();
    let dropper = thread::spawn(move || while batches.recv().is_ok() {});
    let mut keeper = Keeper { kept: VecDeque::new(), other };
    for _ in 0..1 + below(3) {
        let until = if chance(50) { below(20) } else { u64::MAX };
        let steps = plan.steps(0);
        let mut epochs = loader.epochs(0..2);
        for index in 0..(2 * steps).min(until) {
            keeper.before(index as usize, depth);
            let item = ask(&mut epochs).unwrap().unwrap();
            assert_eq!((item.epoch(), item.step()), (index / steps, index % steps));
            let first = (index % steps * batch) as u8;
            assert!(item.chunks(8).map(|record| record[0]).eq(first..first + batch as u8));
            keeper.take(index as usize, item);
        }
        if until > 2 * steps {
            assert!(ask(&mut epochs).is_none());
        }
        keeper.kept.clear();
    }
    drop(keeper);
    if chance(50) {
        loader.close().unwrap();
    }
    dropper.join().unwrap();
}

/// The most bytes of a file in the history below (`RLIMIT_FSIZE`).
const MOST: u64 = 6 * 4096;

/// A writer whose disk may be full: the file is whole under its name, or an error comes, once and for all.
fn written(folder: &std::path::Path) {
    let path = folder.join("rows");
    let mut out = Writer::raw(&path, 1000).depth(1 + below(3) as usize).slot_bytes(0).build().unwrap();
    let (mut bytes, mut failed) = (Vec::new(), false);
    let leaves = chance(20);
    for number in 0..below(40) {
        (0..below(3)).for_each(|_| thread::yield_now());
        let rows = 1 + below(4) as usize;
        let value = number as u8;
        let result = if chance(50) {
            out.write_all(&vec![value; rows * 1000]).map_err(drop)
        } else {
            out.slot::<u8>(rows).map(|slot| slot.fill(value)).map(|()| out.commit(rows)).map_err(drop)
        };
        assert!(result.is_err() || !failed, "nothing is written after an error");
        failed = result.is_err();
        bytes.extend(vec![value; rows * 1000]);
        assert!(!failed || bytes.len() as u64 > MOST);
    }
    if leaves {
        drop(out);
    } else {
        match out.finish() {
            Ok(done) => {
                assert!(!failed && done.bytes == bytes.len() as u64 && done.bytes <= MOST);
                assert!(std::fs::read(&path).unwrap() == bytes);
                std::fs::remove_file(&path).unwrap();
            }
            Err(Error::Write(why)) => assert!(bytes.len() as u64 > MOST && why.offset == MOST, "{why:?}"),
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
}

/// Half of the schedules are drawn at random, and half have few preemptions, at the most important places (Burckhardt et
/// al., "A randomized scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010).
fn check(history: impl Fn() + Send + Sync + Clone + 'static) {
    let history = move || {
        // `check_pct` refuses a first history of one thread, as those without overlap may be.
        let other = thread::spawn(thread::yield_now);
        history();
        other.join().unwrap();
    };
    check_random(history.clone(), histories() / 2);
    check_pct(history, histories() / 2, 4);
}

#[test]
fn units_come_once_and_in_their_place() {
    check(numbers);
}

#[test]
fn a_thread_that_is_stuck_is_left_behind() {
    check(stuck);
}

#[test]
fn a_unit_of_an_earlier_call_stops_nothing() {
    check(late);
}

#[test]
fn a_slot_that_is_held_is_an_error() {
    check(held);
}

#[test]
fn a_caller_that_helps_is_one_more_worker() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records");
    std::fs::write(&path, (0..12_u64).flat_map(u64::to_le_bytes).collect::<Vec<_>>()).unwrap();
    let data = std::sync::Arc::new(Records::open([path], 8).unwrap());
    check(move || loader(&data));
}

#[test]
fn what_is_written_behind_is_whole_or_an_error() {
    // The limit is that of the process, and of a file that the tests print to.
    if std::env::var_os("HISTORIES_WITH_A_LIMIT").is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child
            .args(["--exact", "what_is_written_behind_is_whole_or_an_error"])
            .env("HISTORIES_WITH_A_LIMIT", "1");
        let done = child.output().unwrap();
        let printed = [done.stdout, done.stderr].concat();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&printed));
        assert!(String::from_utf8_lossy(&printed).contains("1 passed"));
        return;
    }
    let limit = libc::rlimit { rlim_cur: MOST, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the pointer is to a live local. The limit is for the whole process, which runs only this test.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    let folder = tempfile::tempdir_in(if cfg!(target_os = "linux") { "/dev/shm" } else { "." }).unwrap();
    let path = folder.path().to_path_buf();
    check(move || written(&path));
}
