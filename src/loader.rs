//! The loader: an epoch as an iterator of batches, read ahead of their use.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Duration;

use twinbuf_mmap::{Buffer, Evict, Plan};

use crate::backend::{Backend, Host, NoSlot, Received, Sides, Transfers, too_large};
use crate::breakdown::Breakdown;
use crate::budget::{MemoryBudget, Taken};
use crate::dataset::Dataset;
use crate::epoch::Epoch;
use crate::error::Error;
use crate::fork::OfProcess;
use crate::reader::{Ahead, Job, Reader, Transforming, Waiting};
use crate::report::Report;
use crate::state::State;
use crate::trace::{Profile, Trace, Track};
use crate::transform::RecordTransform;

/// The most host slots a loader can have.
pub const MAX_HOST_DEPTH: usize = 8;

/// How far ahead hints go unless said otherwise: of batches of 4 MiB in shuffled chunks, all pages were in memory when
/// read, instead of half with one batch (`bench/disk`, section `resident`).
const PREFETCH: u64 = 32 << 20;

/// Reads the batches of a plan, one ahead of the one in use.
///
/// A thread of its own reads; the caller iterates. Between them stand `host_depth` buffers of one batch each,
/// made once: nothing is allocated or copied per batch. The thread lives as long as the loader.
///
/// The batches and their order are the plan's alone: the same with overlap on or off and at any depth.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use twinbuf::{Loader, Order, Plan, Records};
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data.bin");
/// # std::fs::write(&path, vec![7u8; 64 * 100])?;
/// let data = Arc::new(Records::open([&path], 64)?); // records of 64 bytes
/// let plan = Plan::builder(data.len()).batch(8).order(Order::Records).seed(42).build()?;
/// let loader = Loader::builder(data, plan).build()?;
/// for epoch in 0..2 {
///     for batch in loader.epoch(epoch) {
///         let batch = batch?; // bytes, read while the last batch was in use
///         assert_eq!(batch.len(), 8 * 64);
///     }
/// }
/// println!("{}", loader.report());
/// loader.close()?;
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
pub struct Loader<B: Backend = Host> {
    pub(crate) running: OfProcess<Running<B>>,
    pub(crate) plan: Plan,
    host_depth: usize,
    pub(crate) generation: Cell<u64>,
    reads: Arc<AtomicU64>,
    pub(crate) report: RefCell<Report>,
    pub(crate) breakdown: Breakdown,
    /// Of the data set: the size of a record, and its fingerprint.
    identity: (u64, u64),
    /// The epoch begun last, and the step of its next batch.
    pub(crate) place: Cell<(u64, u64)>,
    /// Where the next epoch is to begin, if it is this one.
    restored: Cell<Option<(u64, u64)>>,
    /// Whether a task waits for the next batch.
    pub(crate) asleep: Cell<bool>,
    _memory: Option<Taken>,
}

/// What goes on while a loader lives.
pub(crate) struct Running<B: Backend> {
    // Dropped in this order: the consumer's end makes the thread return from its wait for a slot, the feed's
    // end makes it return from its wait for a job, and joins it.
    pub(crate) batches: B::Batches,
    pub(crate) feed: Feed<B>,
    pub(crate) track: RefCell<Track>,
    trace: Option<Arc<Trace>>,
}

/// Who fills the slots.
pub(crate) enum Feed<B: Backend> {
    /// A thread, ahead of the caller.
    Ahead { jobs: mpsc::Sender<Job>, wanted: Arc<AtomicU64>, thread: Joined },
    /// The caller itself, when it asks for a batch.
    Inline(Box<RefCell<(Reader, B::Slots)>>),
}

/// Makes a [`Loader`]; see [`Loader::builder`].
#[must_use = "a builder does nothing until `build`"]
pub struct LoaderBuilder<B: Backend = Host> {
    pub(crate) backend: B,
    pub(crate) dataset: Box<dyn Dataset>,
    pub(crate) plan: Plan,
    pub(crate) host_depth: usize,
    pub(crate) overlap: bool,
    pub(crate) hints: bool,
    pub(crate) prefetch: Option<u64>,
    pub(crate) evict: Evict,
    pub(crate) residency: bool,
    pub(crate) transform: Option<Box<dyn RecordTransform>>,
    pub(crate) memory: Option<MemoryBudget>,
    pub(crate) profile: Option<Profile>,
    pub(crate) breakdown: Breakdown,
}

impl Loader {
    /// A loader of `plan`'s batches from `dataset`, with two host slots, overlap and page hints, no trace.
    pub fn builder(dataset: impl Dataset + 'static, plan: Plan) -> LoaderBuilder {
        LoaderBuilder {
            backend: Host,
            dataset: Box::new(dataset),
            plan,
            host_depth: 2,
            overlap: true,
            hints: true,
            prefetch: None,
            evict: Evict::Keep,
            residency: false,
            transform: None,
            memory: None,
            profile: None,
            breakdown: Breakdown::off(),
        }
    }
}

impl<B: Backend> Loader<B> {
    /// The batches of one epoch of the plan, in order, from its first step or from where it was
    /// [`restore`](Self::restore)d.
    ///
    /// One epoch at a time: starting one ends an earlier one that is still iterated, which then says so.
    ///
    /// The batches borrow the loader, not the epoch, so one may be kept beyond its epoch's end. But the slots
    /// come round in turn: while a batch is kept, only `host_depth - 1` more can be loaded (`device_depth - 1` on a
    /// device), those included that were read ahead for an epoch that was left early. Then [`Error::AllHeld`] ends
    /// the epoch. It does so too if a batch that was sent to another thread is not dropped there in time: ask for
    /// the next one after that.
    pub fn epoch(&self, epoch: u64) -> Epoch<'_, B> {
        let step = match self.restored.take() {
            Some((restored, step)) if restored == epoch => step,
            _ => 0,
        };
        let start = step.min(self.plan.steps());
        let job = Job { generation: self.generation.get() + 1, epoch, start };
        self.generation.set(job.generation);
        self.place.set((epoch, step));
        self.report.borrow_mut().epochs += 1;
        if let (Feed::Ahead { jobs, wanted, .. }, false) = (&self.running.feed, self.running.is_foreign()) {
            // Relaxed: see the load in `Reader::run`.
            wanted.store(job.generation, Ordering::Relaxed);
            self.wake_earlier();
            // If the task was run where it was woken, it may have begun an epoch, which then has ended this one.
            if self.generation.get() == job.generation {
                // Fails if the thread is gone; then so is its side of the ring, which the first batch will tell.
                let _ = jobs.send(job);
            }
        }
        Epoch::new(self, job)
    }

    /// Wakes the task that waits for a batch of an earlier epoch, so that it hears of its end: of that epoch none may
    /// come any more. A wait by another task wakes it. The new epoch is the loader's by now, and none of its batches
    /// is on its way.
    fn wake_earlier(&self) {
        if self.asleep.take() {
            // No job has this number: what has been read is given up.
            let none = Job { generation: 0, epoch: 0, start: 0 };
            let mut nobody = Context::from_waker(Waker::noop());
            // What went wrong is told once more, to the next who asks.
            let _ = self.receive(none, 0, Waiting::Poll(&mut nobody));
        }
    }

    /// Where the time went so far.
    #[must_use]
    pub fn report(&self) -> Report {
        // Relaxed: a count; the reads of the batches received were made visible by their hand-over.
        let reads = self.reads.load(Ordering::Relaxed);
        let Transfers { time, bytes, .. } = B::transfers(&self.running.batches, 0, 0);
        self.report.borrow().clone().with_transfers(reads, time, bytes)
    }

    /// The breakdown that it was built with: for the loop's own phases.
    #[must_use]
    pub fn breakdown(&self) -> &Breakdown {
        &self.breakdown
    }

    /// Whether batches come from a thread that stayed in the process this one was forked from.
    pub(crate) fn is_orphaned(&self) -> bool {
        matches!(self.running.feed, Feed::Ahead { .. }) && self.running.is_foreign()
    }

    /// The plan whose batches this loads.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The place after the last batch that the caller received: those that were only read ahead do not count,
    /// the one in use does. After an epoch that was iterated to its end, the end of all ranks' epoch, also where
    /// this one has a step fewer ([`Tail::Keep`](crate::Tail::Keep)).
    #[must_use]
    pub fn state(&self) -> State {
        let (record_bytes, fingerprint) = self.identity;
        let (epoch, step) = self.place.get();
        State { plan: self.plan, record_bytes, fingerprint, epoch, step }
    }

    /// Goes on where `state` was taken: the next [`epoch`](Self::epoch) begins at the state's step, if it is the
    /// state's epoch; another one begins at its first step.
    ///
    /// The batches are those that the other loader would have gone on with, byte for byte if their transform is the
    /// same, which the state does not know. Depth, overlap, hints and rank may be others; an epoch that is being
    /// iterated goes on as it is.
    ///
    /// # Errors
    ///
    /// [`Error::Restore`] if the state is of another data set or of another plan, or of no step of it. Then
    /// nothing has changed.
    pub fn restore(&self, state: &State) -> Result<(), Error> {
        let refuse = |what, wanted: String, found: String| Err(Error::Restore { what, wanted, found });
        // The rank alone may be another: a step is a step of all ranks.
        let all = longest(&self.plan);
        if longest(&state.plan) != all {
            return refuse("plan", format!("{:?}", self.plan), format!("{:?}", state.plan));
        }
        let (record_bytes, fingerprint) = self.identity;
        if (state.record_bytes, state.fingerprint) != self.identity {
            let say = |bytes, print| format!("records of {bytes} bytes, fingerprint {print:016x}");
            let found = say(state.record_bytes, state.fingerprint);
            return refuse("data set", say(record_bytes, fingerprint), found);
        }
        if state.step > all.steps() {
            let wanted = format!("at most the {} steps of an epoch", all.steps());
            return refuse("step", wanted, state.step.to_string());
        }
        let place = (state.epoch, state.step);
        self.restored.set(Some(place));
        self.place.set(place);
        Ok(())
    }

    /// Ends the reading thread, which dropping the loader does too, and tells what nobody has heard yet. Both wait for
    /// the batch that is being read.
    ///
    /// # Errors
    ///
    /// The error that the reading met ahead of the caller, who left the epoch before it came to it, or
    /// [`Error::Device`] if the device failed; else
    /// [`Error::Trace`] if the trace could not be written; the training was not disturbed by it.
    pub fn close(self) -> Result<(), Error> {
        let Self { running, generation, .. } = self;
        let Some(Running { batches, feed, track, trace }) = running.into_inner() else { return Ok(()) };
        let mut unheard = Ok(());
        if let Feed::Ahead { jobs, wanted, thread } = feed {
            // Relaxed: see the load in `Reader::run`.
            wanted.store(0, Ordering::Relaxed);
            drop(jobs);
            // Up to the end of the ring, or to a batch that the caller has leaked.
            loop {
                let mut batch = match B::receive(&batches, &mut Waiting::Block) {
                    Received::Batch(batch) => batch,
                    Received::Failed(source) => {
                        unheard = Err(Error::Device(source));
                        break;
                    }
                    _ => break,
                };
                let Some(load) = B::load(&mut batch) else { continue };
                if load.generation == generation.get() && load.result.is_err() {
                    unheard = std::mem::replace(&mut load.result, Ok(0)).map(drop);
                    break;
                }
            }
            drop(batches);
            drop(thread);
        } else {
            drop((batches, feed));
        }
        // The last of the tracks: now everything is written, or was refused.
        drop(track);
        unheard.and(trace.map_or(Ok(()), |trace| trace.check()))
    }

    /// The next batch of `job`, which is that of `step`.
    pub(crate) fn receive(
        &self,
        job: Job,
        step: u64,
        mut waiting: Waiting<'_, '_>,
    ) -> Poll<Result<B::Batch<'_>, Error>> {
        let Job { epoch, .. } = job;
        let Running { batches, feed, track, .. } = &*self.running;
        let all_held = || {
            let (option, slots) = B::held(batches, self.host_depth);
            Poll::Ready(Err(Error::AllHeld { epoch, step, option, slots }))
        };
        if let Feed::Inline(inline) = feed {
            let (reader, slots) = &mut *inline.borrow_mut();
            let filled = B::fill(slots, false, &mut |out| {
                let plan = self.plan.batch(epoch, step)?;
                Some(reader.load(job, step, plan, out, Duration::ZERO))
            });
            // If it is gone, the other side says why.
            if matches!(filled, Err(NoSlot::AllHeld)) {
                return all_held();
            }
        }
        loop {
            let mut batch = match B::receive(batches, &mut waiting) {
                Received::Batch(batch) => batch,
                Received::NotYet => return Poll::Pending,
                Received::AllHeld => return all_held(),
                Received::Gone => return Poll::Ready(Err(Error::ReaderGone { epoch, step })),
                Received::Failed(source) => return Poll::Ready(Err(Error::Upload { epoch, step, source })),
            };
            match B::load(&mut batch) {
                Some(load) if load.generation == job.generation => {
                    // An error is moved out; the slot that it leaves is an empty batch.
                    return Poll::Ready(match std::mem::replace(&mut load.result, Ok(0)) {
                        Ok(len) => {
                            load.result = Ok(len);
                            Ok(batch)
                        }
                        Err(error) => {
                            track.borrow_mut().taken(job.place(Some(step)));
                            Err(error)
                        }
                    });
                }
                // Read ahead for an epoch that was given up: released, and on to the next.
                Some(load) => track.borrow_mut().taken(load.place()),
                None => {}
            }
        }
    }
}

impl<B: Backend> LoaderBuilder<B> {
    /// The same, with batches that end up elsewhere.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_backend<C: Backend>(self, backend: C) -> LoaderBuilder<C> {
        let Self { dataset, plan, host_depth, overlap, hints, prefetch, evict, residency, .. } = self;
        let Self { transform, memory, profile, breakdown, .. } = self;
        LoaderBuilder {
            backend,
            dataset,
            plan,
            host_depth,
            overlap,
            hints,
            prefetch,
            evict,
            residency,
            transform,
            memory,
            profile,
            breakdown,
        }
    }

    /// How many host slots there are, 1 to [`MAX_HOST_DEPTH`]; 2 unless said otherwise.
    ///
    /// Two are enough for a steady load; more even out one that comes in bursts. With one, nothing can overlap.
    /// Each takes the memory of one batch.
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.host_depth = slots;
        self
    }

    /// Whether a thread reads ahead; `true` unless said otherwise. If not, each batch is read on the caller's
    /// thread when it is asked for: the same batches in the same order.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Whether the reading thread asks for pages before it reads them, where it jumps; `true` unless said otherwise.
    /// Never done without overlap, nor for records that seem to be in the page cache already
    /// ([`Records::seems_cached`](twinbuf_mmap::Records::seems_cached)).
    pub fn hints(mut self, hints: bool) -> Self {
        self.hints = hints;
        self
    }

    /// How far ahead the hints go: pages of so many bytes of records after the batch that is being read.
    ///
    /// Unless said otherwise, 32 MiB or one batch, whichever is more. Records that go on where the last ones ended are left out: the system reads
    /// ahead of those by itself, and faster. The pages come into the system's page cache, on top of the loader's own
    /// slots: more than the memory has room for is read twice. Less than a batch asks for its beginning.
    pub fn prefetch(mut self, bytes: u64) -> Self {
        self.prefetch = Some(bytes);
        self
    }

    /// What becomes of a batch's pages once it has been read; [`Evict::Keep`] unless said otherwise.
    ///
    /// [`Evict::Drop`] keeps a data set that is larger than memory from pushing everything else out of it, at the
    /// price that nothing of it is left for the next epoch. Failures are counted in the [`Report`].
    pub fn evict(mut self, evict: Evict) -> Self {
        self.evict = evict;
        self
    }

    /// Whether to count, just before each batch is read, how many of its pages are in memory: what the hints
    /// achieved. `false` unless said otherwise, because it takes a call for each run of records.
    pub fn residency(mut self, residency: bool) -> Self {
        self.residency = residency;
        self
    }

    /// What becomes of the records on their way into the slots; nothing unless said otherwise.
    ///
    /// It runs on the reading thread, on a quarter of a MiB at a time that has just been read. A batch is then
    /// made of the transformed records.
    pub fn transform(mut self, transform: impl RecordTransform + 'static) -> Self {
        self.transform = Some(Box::new(transform));
        self
    }

    /// The memory that the slots may take: a number of bytes for this loader, or a [`MemoryBudget`] that it
    /// shares with others. No limit unless said otherwise.
    ///
    /// What is counted is `host_depth` batches, on a device `device_depth` more, and with a transform what is read at
    /// a time. Pages that the system caches are not.
    pub fn memory_limit(mut self, limit: impl Into<MemoryBudget>) -> Self {
        self.memory = Some(limit.into());
        self
    }

    /// Records what happens in a file; nothing unless said otherwise.
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = Some(profile);
        self
    }

    /// Times the phases of each step; off unless said otherwise.
    ///
    /// The loader counts its own phases, `load` and, on a device, `h2d`. While the breakdown is on the loader does not overlap, whatever
    /// [`overlap`](Self::overlap) says.
    pub fn breakdown(mut self, breakdown: Breakdown) -> Self {
        self.breakdown = breakdown;
        self
    }

    /// Allocates the slots and starts the thread.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if a depth is out of range, the plan is for more records than the data set has or
    /// the slots do not fit the memory; [`Error::Memory`] if they do not fit the limit; [`Error::Transform`] if
    /// the records cannot be transformed; [`Error::Device`] if the device has no such slots;
    /// [`Error::Fingerprint`] if the data set cannot tell its own; [`Error::Trace`] if the trace's file cannot be
    /// made; [`Error::Spawn`] if the system starts no thread.
    pub fn build(self) -> Result<Loader<B>, Error> {
        let Self { mut dataset, plan, host_depth, overlap, hints, evict, residency, .. } = self;
        if overlap && self.breakdown.is_on() {
            self.breakdown.overlap_is_off();
        }
        let overlap = overlap && !self.breakdown.is_on();
        if !(1..=MAX_HOST_DEPTH).contains(&host_depth) {
            let wanted = format!("1 to {MAX_HOST_DEPTH} slots");
            return Err(Error::Option { option: "host_depth", wanted, found: host_depth.to_string() });
        }
        if plan.records() > dataset.records() {
            return Err(Error::Option {
                option: "plan",
                wanted: format!("a plan for at most the data set's {} records", dataset.records()),
                found: format!("one for {}", plan.records()),
            });
        }
        let record_bytes = dataset.record_bytes();
        let depths = (host_depth, self.backend.device_depth());
        let bytes = (record_bytes, dataset.part_bytes());
        let sizes = Sizes::new(&plan, depths, bytes, self.transform.as_deref())?;
        let memory = self.memory.map(|budget| sizes.take_from(&budget)).transpose()?;
        let scratch = match sizes.part {
            0 => None,
            _ => Some(Buffer::new(sizes.scratch).ok_or_else(|| too_large(&sizes))?),
        };
        let transform = self.transform.zip(scratch).map(|(transform, scratch)| Transforming {
            transform,
            out_bytes: sizes.out_bytes,
            part: sizes.part,
            scratch,
        });
        let fingerprint = dataset.fingerprint().map_err(Error::Fingerprint)?;
        let trace =
            self.profile.map(|profile| profile.create(plan.rank(), plan.world())).transpose()?.map(Arc::new);
        let sides = Sides { slot: sizes.slot, host_depth, overlap, trace: trace.clone(), sum: &sizes };
        let (slots, batches) = self.backend.make(sides)?;
        let reads = Arc::new(AtomicU64::new(0));
        let track = RefCell::new(Track::new(trace.clone(), 1, "train"));
        let records_in = |bytes: u64| bytes.div_ceil((record_bytes as u64).max(1));
        let budget = self.prefetch.map_or_else(|| plan.batch_records().max(records_in(PREFETCH)), records_in);
        let reader = Reader {
            dataset,
            plan,
            record_bytes,
            transform,
            ahead: (hints && overlap).then(|| Ahead::new(budget)),
            evict,
            residency,
            track: Track::new(trace.clone(), 2, "read"),
            reads: reads.clone(),
        };
        let feed = if overlap {
            let (jobs, inbox) = mpsc::channel();
            let wanted = Arc::new(AtomicU64::new(0));
            let seen = wanted.clone();
            let thread = thread::Builder::new()
                .name("twinbuf-read".to_string())
                .spawn(move || reader.run::<B>(&inbox, &seen, slots))
                .map_err(Error::Spawn)?;
            Feed::Ahead { jobs, wanted, thread: Joined::new(thread, B::copy_thread(&batches)) }
        } else {
            Feed::Inline(Box::new(RefCell::new((reader, slots))))
        };
        Ok(Loader {
            running: OfProcess::new(Running { batches, feed, track, trace }),
            plan,
            host_depth,
            generation: Cell::new(0),
            reads,
            report: RefCell::default(),
            identity: (record_bytes as u64, fingerprint),
            place: Cell::new((0, 0)),
            restored: Cell::new(None),
            asleep: Cell::new(false),
            breakdown: self.breakdown,
            _memory: memory,
        })
    }
}

/// The memory that a loader needs.
struct Sizes {
    host_depth: usize,
    device_depth: usize,
    records: u64,
    /// Of a record in a slot.
    out_bytes: usize,
    /// Bytes of a slot.
    slot: usize,
    /// Records that are transformed at a time, and bytes of so many in the file: 0 without a transform.
    part: u64,
    scratch: usize,
}

impl Sizes {
    fn new(
        plan: &Plan,
        (host_depth, device_depth): (usize, usize),
        (record_bytes, part_bytes): (usize, usize),
        transform: Option<&dyn RecordTransform>,
    ) -> Result<Self, Error> {
        let records = plan.batch_records();
        let (out_bytes, part) = match transform {
            None => (record_bytes, 0),
            Some(transform) => {
                let failed = |source| Error::Transform { place: None, source };
                let out_bytes = transform.out_bytes(record_bytes).map_err(failed)?;
                if out_bytes == 0 {
                    return Err(failed(
                        "wanted records of at least 1 byte, found 0 after the transform".into(),
                    ));
                }
                (out_bytes, ((part_bytes / record_bytes.max(1)).max(1) as u64).min(records))
            }
        };
        let slot = usize::try_from(records).ok().and_then(|records| records.checked_mul(out_bytes));
        // No more than a batch in the file, or one record.
        let scratch = usize::try_from(part).unwrap_or(usize::MAX).saturating_mul(record_bytes);
        let sizes = Self { host_depth, device_depth, records, out_bytes, slot: 0, part, scratch };
        match slot {
            Some(slot) => Ok(Self { slot, ..sizes }),
            None => Err(too_large(&sizes)),
        }
    }

    fn take_from(&self, budget: &MemoryBudget) -> Result<Taken, Error> {
        let wanted = (self.slot as u64)
            .checked_mul((self.host_depth as u64).saturating_add(self.device_depth as u64))
            .and_then(|slots| slots.checked_add(self.scratch as u64))
            .ok_or_else(|| too_large(self))?;
        budget.take(wanted).map_err(|used| Error::Memory {
            sum: self.to_string(),
            wanted,
            limit: budget.limit(),
            used,
        })
    }
}

/// The sum, spelled out.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host_depth, device_depth, records, out_bytes, scratch, .. } = self;
        write!(f, "{host_depth} host slots")?;
        if *device_depth > 0 {
            write!(f, " and {device_depth} device slots")?;
        }
        write!(f, " of {records} records of {out_bytes} bytes")?;
        if *scratch > 0 {
            write!(f, " and {scratch} bytes before the transform")?;
        }
        Ok(())
    }
}

/// The plan of rank 0, which has as many steps as any rank.
pub(crate) fn longest(plan: &Plan) -> Plan {
    let first = Plan::builder(plan.records())
        .batch(plan.batch_records())
        .seed(plan.seed())
        .order(plan.order())
        .tail(plan.tail())
        .shard(0, plan.world());
    let Ok(first) = first.build() else { unreachable!("there is a plan of another rank") };
    first
}

/// A thread that is joined when this is dropped, unless that happens on it, or on one that it may wait for.
pub(crate) struct Joined {
    thread: Option<JoinHandle<()>>,
    waits_for: Option<ThreadId>,
}

impl Joined {
    pub(crate) fn new(thread: JoinHandle<()>, waits_for: Option<ThreadId>) -> Self {
        Self { thread: Some(thread), waits_for }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        // A waker, which runs on the reading or the copying thread, may be the last that has the loader: then this is
        // that thread. No thread can wait for its own end, nor the two for each other's; they come to it by themselves.
        let here = thread::current().id();
        let other = |thread: &JoinHandle<()>| thread.thread().id() != here && self.waits_for != Some(here);
        if let Some(thread) = self.thread.take().filter(other) {
            // A panic of the thread has been reported by its hook, and to the caller as `ReaderGone` or
            // `WorkerGone`.
            let _ = thread.join();
        }
    }
}

impl<B: Backend> fmt::Debug for Loader<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("plan", &self.plan)
            .field("host_depth", &self.host_depth)
            .field("overlap", &matches!(self.running.feed, Feed::Ahead { .. }))
            .field("trace", &self.running.trace.as_ref().map(|trace| trace.path()))
            .finish_non_exhaustive()
    }
}

impl<B: Backend> fmt::Debug for LoaderBuilder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, host_depth, overlap, hints, prefetch, evict, residency, memory, profile, .. } = self;
        f.debug_struct("LoaderBuilder")
            .field("backend", &self.backend)
            .field("plan", plan)
            .field("host_depth", host_depth)
            .field("overlap", overlap)
            .field("hints", hints)
            .field("prefetch", prefetch)
            .field("evict", evict)
            .field("residency", residency)
            .field("transform", &self.transform.is_some())
            .field("memory", memory)
            .field("profile", profile)
            .finish_non_exhaustive()
    }
}
