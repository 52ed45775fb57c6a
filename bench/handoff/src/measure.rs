//! The method: two pinned threads per sample, and all subjects in rounds.

use std::hint::black_box;
use std::marker::PhantomData;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use twinbuf::BoxError;
use twinbuf_bench_harness::measure as harness;
use twinbuf_bench_harness::report::Table;
use twinbuf_bench_harness::sys;

use crate::payload::Payload;

/// The sending end of a subject: waits for room, fills an item with `seq`, hands it over.
pub trait Tx: Send {
    fn send(&mut self, seq: u64);
}

/// The receiving end: waits for an item, reads all of it, frees its room. Returns the item's sum.
pub trait Rx: Send {
    fn recv(&mut self) -> u64;
}

/// How a side waits. Only subjects that wait the same way are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Polls in a loop, with a pause of the processor (or a yield) in between.
    Spin,
    /// Spins or yields for a while, then sleeps in the kernel.
    SpinPark,
    /// Sleeps in the kernel immediately.
    Park,
}

impl Wait {
    pub const ALL: [Wait; 3] = [Wait::Spin, Wait::SpinPark, Wait::Park];

    pub fn name(self) -> &'static str {
        match self {
            Wait::Spin => "spin",
            Wait::SpinPark => "spin-then-park",
            Wait::Park => "parked",
        }
    }
}

/// The quantity to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Items of this many bytes in one direction at full speed: ns per hand-off.
    Stream(usize),
    /// One item of 8 B in each direction: ns per round trip.
    RoundTrip,
    /// One side waits while nothing arrives: its CPU time in ms per second of waiting.
    Idle,
}

impl Measure {
    pub const ALL: [Measure; 5] = [
        Measure::Stream(8),
        Measure::Stream(4 << 10),
        Measure::Stream(1 << 20),
        Measure::RoundTrip,
        Measure::Idle,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Measure::Stream(8) => "stream 8 B",
            Measure::Stream(4096) => "stream 4 KiB",
            Measure::Stream(_) => "stream 1 MiB",
            Measure::RoundTrip => "round trip 8 B",
            Measure::Idle => "idle wait",
        }
    }

    pub fn unit(self) -> &'static str {
        match self {
            Measure::Stream(_) => "ns a hand-off",
            Measure::RoundTrip => "ns a round trip",
            Measure::Idle => "CPU ms a second waited",
        }
    }
}

/// The name of the hand-written subjects, the denominators of the ratios.
pub const FLOOR: &str = "floor";

/// One sample.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// In the measure's unit.
    pub value: f64,
    /// CPU seconds used by both sides per second of the sample; in an idle wait by the waiting side.
    pub cpu: f64,
    pub took: Duration,
}

/// The contents of one sample.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub handoffs: u64,
    pub idle: Duration,
    pub cpus: [usize; 2],
}

type Run = Box<dyn Fn(&Job) -> Sample>;

/// One way to use one library, in one measure.
pub struct Subject {
    pub wait: Wait,
    pub measure: Measure,
    pub name: &'static str,
    /// How the items are passed.
    pub way: &'static str,
    run: Run,
}

impl Subject {
    /// Measure, wait, name and way: the text that `--only` matches.
    pub fn id(&self) -> String {
        format!("{}/{}/{}/{}", self.measure.name(), self.wait.name(), self.name, self.way)
    }
}

/// The list of subjects.
#[derive(Default)]
pub struct Subjects(pub Vec<Subject>);

impl Subjects {
    pub fn add(
        &mut self,
        id: (Wait, Measure, &'static str, &'static str),
        run: impl Fn(&Job) -> Sample + 'static,
    ) {
        let (wait, measure, name, way) = id;
        self.0.push(Subject { wait, measure, name, way, run: Box::new(run) });
    }

    /// A stream of `P` through the ends made by `pair`.
    pub fn stream<P: Payload, T: Tx, R: Rx>(
        &mut self,
        (wait, name, way): (Wait, &'static str, &'static str),
        pair: impl Fn() -> (T, R) + 'static,
    ) {
        let of = PhantomData::<P>;
        self.add((wait, Measure::Stream(P::BYTES), name, way), move |job| job.stream(of, pair()));
    }

    /// All measures of 8 B through the ends made by `pair`.
    pub fn words<T: Tx, R: Rx>(
        &mut self,
        id: (Wait, &'static str, &'static str),
        pair: impl Fn() -> (T, R) + Copy + 'static,
    ) {
        let (wait, name, way) = id;
        self.stream::<u64, _, _>(id, pair);
        self.round_trip(id, move || {
            let ((tx, back_rx), (back_tx, rx)) = (pair(), pair());
            ((tx, rx), (back_tx, back_rx))
        });
        self.add((wait, Measure::Idle, name, way), move |job| job.idle(pair()));
    }

    /// Only the round trip, between two sides made by `sides`.
    pub fn round_trip<T: Tx, R: Rx, U: Tx, S: Rx>(
        &mut self,
        (wait, name, way): (Wait, &'static str, &'static str),
        sides: impl Fn() -> ((T, R), (U, S)) + 'static,
    ) {
        self.add((wait, Measure::RoundTrip, name, way), move |job| job.round_trip(sides()));
    }
}

/// A library may put an item of one MiB on the stack more than once.
const STACK: usize = 64 << 20;

/// Runs `near` on the first processor and `far` on the second, started together. Returns their results when
/// both are done, so no side sees the other one end.
fn both<A: Send, B: Send>(
    cpus: [usize; 2],
    near: impl FnOnce() -> A + Send,
    far: impl FnOnce() -> B + Send,
) -> (A, B) {
    let start = Barrier::new(2);
    thread::scope(|scope| {
        let spawn = || thread::Builder::new().stack_size(STACK);
        let near = spawn().spawn_scoped(scope, || {
            sys::pin(cpus[0]);
            start.wait();
            near()
        });
        let far = spawn().spawn_scoped(scope, || {
            sys::pin(cpus[1]);
            start.wait();
            far()
        });
        let (near, far) = (near.expect("a thread"), far.expect("a thread"));
        (near.join().expect("the near side"), far.join().expect("the far side"))
    })
}

/// The two clocks of one side. Each side reads its own clocks: the process's CPU clock lags by up to one tick
/// for threads that run on another processor.
struct Watch {
    wall: Instant,
    cpu: Duration,
}

/// The duration of one side, in wall time and in CPU time.
type Took = (Duration, Duration);

impl Watch {
    fn start() -> Self {
        Self { cpu: sys::thread_cpu(), wall: Instant::now() }
    }

    fn stop(self) -> Took {
        (self.wall.elapsed(), sys::thread_cpu() - self.cpu)
    }
}

/// The sample of `timed`, whose wall clock counts, and of the `other` side.
fn sample(handoffs: u64, timed: Took, other: Took) -> Sample {
    let (took, cpu) = timed;
    let share = |(wall, cpu): Took| cpu.as_secs_f64() / wall.as_secs_f64();
    Sample { value: took.as_nanos() as f64 / handoffs as f64, cpu: share((took, cpu)) + share(other), took }
}

impl Job {
    /// The time of all hand-offs of one side. Some before the clock starts bring the slots' pages and lines into place.
    #[inline(always)]
    fn timed(&self, mut one: impl FnMut(u64)) -> Took {
        let warm_up = self.handoffs / 8 + 8;
        for seq in 0..warm_up {
            one(seq);
        }
        let watch = Watch::start();
        for seq in warm_up..warm_up + self.handoffs {
            one(seq);
        }
        watch.stop()
    }

    fn stream<P: Payload, T: Tx, R: Rx>(&self, _of: PhantomData<P>, (mut tx, mut rx): (T, R)) -> Sample {
        let send = move || (self.timed(|seq| tx.send(black_box(seq))), tx);
        let recv = move || {
            let mut wrong = 0;
            let took = self.timed(|seq| wrong += u64::from(black_box(rx.recv()) != P::expected(seq)));
            assert_eq!(wrong, 0, "items lost, doubled, reordered or torn");
            (took, rx)
        };
        let ((sender, _tx), (receiver, _rx)) = both(self.cpus, send, recv);
        sample(self.handoffs, receiver, sender)
    }

    fn round_trip<T: Tx, R: Rx, U: Tx, S: Rx>(
        &self,
        ((mut tx, mut rx), (mut far_tx, mut far_rx)): ((T, R), (U, S)),
    ) -> Sample {
        let near = move || {
            let mut wrong = 0;
            let took = self.timed(|seq| {
                tx.send(black_box(seq));
                wrong += u64::from(black_box(rx.recv()) != seq);
            });
            assert_eq!(wrong, 0, "items lost, doubled or reordered");
            (took, tx, rx)
        };
        let far = move || {
            let took = self.timed(|_| far_tx.send(far_rx.recv()));
            (took, far_tx, far_rx)
        };
        let ((near, ..), (far, ..)) = both(self.cpus, near, far);
        sample(self.handoffs, near, far)
    }

    fn idle<T: Tx, R: Rx>(&self, (mut tx, mut rx): (T, R)) -> Sample {
        let send = move || {
            thread::sleep(self.idle);
            tx.send(7);
            tx
        };
        let recv = move || {
            let (cpu, wall) = (sys::thread_cpu(), Instant::now());
            assert_eq!(rx.recv(), 7);
            let (cpu, took) = (sys::thread_cpu() - cpu, wall.elapsed());
            let share = cpu.as_secs_f64() / took.as_secs_f64();
            (Sample { value: 1e3 * share, cpu: share, took }, rx)
        };
        let (_, (sample, _)) = both(self.cpus, send, recv);
        sample
    }
}

/// How much is measured.
pub struct Effort {
    pub rounds: usize,
    pub idle_rounds: usize,
    /// The target duration of a sample.
    pub sample: Duration,
    pub idle: Duration,
    pub cpus: [usize; 2],
}

/// Measures all subjects of each group in rounds: a table for each.
pub fn run(subjects: &[Subject], effort: &Effort) -> Result<Vec<Table>, BoxError> {
    let job = |handoffs| Job { handoffs, idle: effort.idle, cpus: effort.cpus };
    let mut tables = Vec::new();
    for (measure, wait) in Measure::ALL.into_iter().flat_map(|measure| Wait::ALL.map(|wait| (measure, wait)))
    {
        let group: Vec<&Subject> =
            subjects.iter().filter(|subject| (subject.measure, subject.wait) == (measure, wait)).collect();
        if group.is_empty() {
            continue;
        }
        let idle = measure == Measure::Idle;
        let runs: Vec<_> = group
            .iter()
            .map(|subject| {
                let handoffs = if idle { 1 } else { enough(&subject.run, job, effort.sample) };
                harness::Subject::new(format!("{} ({})", subject.name, subject.way), move || {
                    let sample = (subject.run)(&job(handoffs));
                    Ok(vec![sample.value, sample.cpu])
                })
            })
            .collect();
        let mut table = Table::new(format!("{}, {}", measure.name(), wait.name()), &[measure.unit(), "CPUs"]);
        let rounds = if idle { effort.idle_rounds.min(effort.rounds) } else { effort.rounds };
        harness::run(&mut table, &runs, harness::Effort { rounds, time: Duration::MAX })?;
        table.reference = group.iter().position(|subject| subject.name == FLOOR).into_iter().collect();
        print!("{}", table.text());
        tables.push(table);
    }
    Ok(tables)
}

/// The number of hand-offs for an undisturbed sample of about `target`: from the fastest of three runs.
fn enough(run: &Run, job: impl Fn(u64) -> Job, target: Duration) -> u64 {
    let mut handoffs = 64;
    loop {
        let took = (0..3).map(|_| run(&job(handoffs)).took).min().expect("three");
        if took >= target / 8 {
            let scaled = handoffs as f64 * target.as_secs_f64() / took.as_secs_f64();
            return (scaled as u64).max(64);
        }
        handoffs *= 4;
    }
}
