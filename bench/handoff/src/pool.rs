//! Pools and read-ahead, as the examples of twinbuf-core have them, next to channels that do the same.
//!
//! A pool: workers whose results come in order. The peer is crossbeam's bounded channels with a map that restores the
//! order; the results cost 0, 1 or 100 us. Read-ahead: a thread fills buffers that come back to it. The peer is two
//! unbounded channels, one each way. Both sides have the same number of items in flight. It prints the speed of ours
//! divided by the peer's: the median of the rounds, and the quartiles.
//!
//! `pool [ROUNDS [BUSY]]`: the number of rounds (default: 11), and of busy threads beside them (default: 0).

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded, unbounded};
use twinbuf_bench_harness::report::{median, quartiles};
use twinbuf_bench_harness::sys;
use twinbuf_core::{Auto, HeapRing, Park, Wait};

/// Items in flight: being made, ready, and in use.
const DEPTH: usize = 8;
const SAMPLE: Duration = Duration::from_millis(40);

/// Passes this many items, and returns how long that took.
type Run<'a> = Box<dyn Fn(u64) -> Duration + 'a>;

/// What an item costs, in steps of arithmetic: a thread that is not running makes no progress. Not inlined, or a step
/// takes twice as long in one pool as in another.
#[inline(never)]
fn work(steps: u64, item: u64) -> u64 {
    (0..steps).fold(item, |sum, step| black_box(sum ^ step));
    item
}

/// The number of steps that take `time`.
fn steps(time: Duration) -> u64 {
    let measured = 10_000_000;
    let took = || {
        let start = Instant::now();
        black_box(work(measured, 0));
        start.elapsed()
    };
    let took = (0..5).map(|_| took()).min().expect("five");
    (measured as f64 * time.as_secs_f64() / took.as_secs_f64()) as u64
}

fn ring_pool(workers: usize, steps: u64, items: u64) -> Duration {
    let (tx, mut rx) = HeapRing::new([0; DEPTH]).into_handles();
    let turn = Mutex::new(tx);
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let next = || {
                    let mut looks = 0..16;
                    loop {
                        let mut tx = turn.lock().unwrap();
                        if looks.next().is_none() || tx.try_acquire().is_ok() {
                            return tx.acquire().map(|slot| slot.reserve());
                        }
                        drop(tx);
                        thread::yield_now();
                    }
                };
                while let Ok(mut slot) = next() {
                    *slot = work(steps, slot.seq());
                    if slot.commit().is_err() {
                        break;
                    }
                }
            });
        }
        for item in 0..items {
            assert_eq!(*rx.recv().unwrap().unwrap(), item);
        }
        drop(rx);
    });
    start.elapsed()
}

/// Workers take the numbers of items from a channel, and send the results through another. The consumer sends a number
/// for each result that it uses: as many items are in flight as with the ring.
fn channel_pool(workers: usize, steps: u64, items: u64) -> Duration {
    let (jobs_tx, jobs) = bounded(DEPTH);
    let (tx, rx) = bounded(DEPTH);
    (0..DEPTH as u64).for_each(|item| jobs_tx.send(item).unwrap());
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..workers {
            let (tx, jobs) = (tx.clone(), jobs.clone());
            scope.spawn(move || jobs.iter().all(|item| tx.send((item, work(steps, item))).is_ok()));
        }
        in_order(&rx, items, |item| jobs_tx.send(item + DEPTH as u64).unwrap());
        drop((rx, jobs_tx));
    });
    start.elapsed()
}

/// Receives results that come in any order, and uses them in order.
fn in_order(rx: &Receiver<(u64, u64)>, items: u64, used: impl Fn(u64)) {
    let mut early = HashMap::new();
    for item in 0..items {
        let value = early.remove(&item).unwrap_or_else(|| {
            loop {
                let (found, value) = rx.recv().unwrap();
                if found == item {
                    return value;
                }
                early.insert(found, value);
            }
        });
        assert_eq!(value, item);
        used(item);
    }
}

fn fill(buffer: &mut [u8], item: u64) {
    buffer.fill(item as u8);
}

fn sum(buffer: &[u8]) {
    black_box(buffer.iter().map(|&byte| u64::from(byte)).sum::<u64>());
}

fn ring_ahead(bytes: usize, items: u64) -> Duration {
    let (mut tx, mut rx) = HeapRing::from_fn(2, |_| vec![0u8; bytes]).into_handles();
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || {
            (0..items).try_for_each(|item| tx.fill(|slot| fill(slot, item))).unwrap();
            tx.finish();
        });
        while let Some(slot) = rx.recv().unwrap() {
            sum(&slot);
        }
    });
    start.elapsed()
}

fn channels_ahead(bytes: usize, items: u64) -> Duration {
    let ((full_tx, full_rx), (empty_tx, empty_rx)) = (unbounded(), unbounded());
    (0..2).for_each(|_| empty_tx.send(vec![0u8; bytes]).unwrap());
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || {
            for item in 0..items {
                let mut buffer = empty_rx.recv().unwrap();
                fill(&mut buffer, item);
                full_tx.send(buffer).unwrap();
            }
        });
        for buffer in full_rx {
            sum(&buffer);
            let _ = empty_tx.send(buffer);
        }
    });
    start.elapsed()
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>().expect("a number"));
    let (rounds, busy) = (arguments.next().unwrap_or(11), arguments.next().unwrap_or(0));
    println!("{}; {rounds} rounds beside {busy} busy threads", sys::machine());
    let mut cells: Vec<(String, [Run<'_>; 2])> = Vec::new();
    for micros in [0, 1, 100] {
        let steps = steps(Duration::from_micros(micros));
        for workers in [1, 2, 4] {
            let ours: Run<'_> = Box::new(move |items| ring_pool(workers, steps, items));
            let peer: Run<'_> = Box::new(move |items| channel_pool(workers, steps, items));
            cells.push((format!("pool of {workers}, items of {micros} us"), [ours, peer]));
        }
    }
    for bytes in [4 << 10, 64 << 10, 1 << 20] {
        let ours: Run<'_> = Box::new(move |items| ring_ahead(bytes, items));
        let peer: Run<'_> = Box::new(move |items| channels_ahead(bytes, items));
        cells.push((format!("read-ahead of {} KiB", bytes >> 10), [ours, peer]));
    }
    // Before the machine is busy: a time slice that another thread takes would count as the time of a few items.
    let items: Vec<u64> = cells.iter().map(|(_, runs)| enough(&runs[1]) / (1 + busy as u64)).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..busy {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    black_box(work(1000, 0));
                }
            });
        }
        measure(&cells, rounds, &items);
        let trips = |trip: fn() -> f64| median((0..rounds).map(|_| trip()));
        let [auto, park] =
            [trips(|| on_one_processor([Auto::new(), Auto::new()])), trips(|| on_one_processor([Park; 2]))];
        println!(
            "round trip on one processor: {auto:.0} ns of CPU, with `Park` {park:.0}: {:.2}",
            auto / park
        );
        over.store(true, Ordering::Relaxed);
    });
}

/// The CPU time of a round trip, in ns, with both sides on one processor.
fn on_one_processor<W: Wait + Send + Sync + 'static>(waits: [W; 2]) -> f64 {
    let trips = 20_000;
    let [there, back] = waits.map(|wait| HeapRing::with_wait([0_u64; 2], wait).into_handles());
    let ((mut tx, mut far_rx), (mut far_tx, mut rx)) = (there, back);
    let far = thread::spawn(move || {
        sys::pin(sys::processors()[0]);
        let start = sys::thread_cpu();
        for _ in 0..trips {
            let item = *far_rx.recv().unwrap().unwrap();
            far_tx.fill(|slot| *slot = item).unwrap();
        }
        sys::thread_cpu() - start
    });
    let near = thread::spawn(move || {
        sys::pin(sys::processors()[0]);
        let start = sys::thread_cpu();
        for item in 0..trips {
            tx.fill(|slot| *slot = item).unwrap();
            assert_eq!(*rx.recv().unwrap().unwrap(), item);
        }
        sys::thread_cpu() - start
    });
    (near.join().unwrap() + far.join().unwrap()).as_nanos() as f64 / trips as f64
}

fn measure(cells: &[(String, [Run<'_>; 2])], rounds: usize, items: &[u64]) {
    let mut times = vec![Vec::new(); cells.len()];
    for round in 0..rounds {
        for (((_, runs), &items), times) in cells.iter().zip(items).zip(&mut times) {
            let mut each = [0.0; 2];
            // Who is first changes from round to round.
            for turn in 0..2 {
                let which = (round + turn) % 2;
                each[which] = runs[which](items).as_secs_f64() * 1e9 / items as f64;
            }
            times.push(each);
        }
    }
    println!("{:28} {:>9} | channels, ns: speed of ours / theirs (quartiles)", "", "ours, ns");
    for ((name, _), times) in cells.iter().zip(&times) {
        let of = |who: usize| median(times.iter().map(|each| each[who]));
        let [low, ratio, high] = quartiles(times.iter().map(|each| each[1] / each[0]));
        println!("{name:28} {:9.0} | {:9.0}: {ratio:.2} ({low:.2} to {high:.2})", of(0), of(1));
    }
}

/// The number of items that take about one sample.
fn enough(run: &Run<'_>) -> u64 {
    let mut items = 64;
    loop {
        let took = run(items);
        if took >= SAMPLE / 8 {
            return (items as f64 * SAMPLE.as_secs_f64() / took.as_secs_f64()) as u64;
        }
        items *= 4;
    }
}
