//! The loader: an epoch as an iterator of batches, read ahead of their use.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::iter::FusedIterator;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use twinbuf_core::{Consumer, Park, Producer, ReadSlot, RecvError, Ring, TryAcquireError};
use twinbuf_mmap::{BatchPlan, Plan};

use crate::dataset::Dataset;
use crate::error::Error;
use crate::reader::{Job, Load, Reader, Slot};
use crate::report::Report;
use crate::trace::{Profile, Trace, Track};

/// The most host slots a loader can have.
pub const MAX_HOST_DEPTH: usize = 8;

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
pub struct Loader {
    // Dropped in this order: the consumer's end makes the thread return from its wait for a slot, the feed's
    // end makes it return from its wait for a job, and joins it.
    slots: Consumer<'static, Slot, Park>,
    feed: Feed,
    plan: Plan,
    host_depth: usize,
    generation: Cell<u64>,
    reads: Arc<AtomicU64>,
    report: Cell<Report>,
    track: RefCell<Track>,
    trace: Option<Arc<Trace>>,
}

/// Who fills the slots.
enum Feed {
    /// A thread, ahead of the caller.
    Ahead { jobs: mpsc::Sender<Job>, wanted: Arc<AtomicU64>, _thread: Joined },
    /// The caller itself, when it asks for a batch.
    Inline(Box<RefCell<(Reader, Producer<'static, Slot, Park>)>>),
}

/// Makes a [`Loader`]; see [`Loader::builder`].
pub struct LoaderBuilder {
    dataset: Box<dyn Dataset>,
    plan: Plan,
    host_depth: usize,
    overlap: bool,
    hints: bool,
    profile: Option<Profile>,
}

impl Loader {
    /// A loader of `plan`'s batches from `dataset`, with two host slots, overlap and page hints, no trace.
    pub fn builder(dataset: impl Dataset + 'static, plan: Plan) -> LoaderBuilder {
        let dataset = Box::new(dataset);
        LoaderBuilder { dataset, plan, host_depth: 2, overlap: true, hints: true, profile: None }
    }

    /// The batches of one epoch of the plan, in order.
    ///
    /// One epoch at a time: starting one ends an earlier one that is still iterated, which then says so.
    ///
    /// The batches borrow the loader, not the epoch, so one may be kept beyond its epoch's end. But the slots
    /// come round in turn: while a batch is kept, only `host_depth - 1` more can be loaded, those included that
    /// were read ahead for an epoch that was left early. Then [`Error::AllHeld`] ends the epoch.
    pub fn epoch(&self, epoch: u64) -> Epoch<'_> {
        let job = Job { generation: self.generation.get() + 1, epoch };
        self.generation.set(job.generation);
        let mut report = self.report.get();
        report.epochs += 1;
        self.report.set(report);
        if let Feed::Ahead { jobs, wanted, .. } = &self.feed {
            // Relaxed: see the load in `Reader::run`.
            wanted.store(job.generation, Ordering::Relaxed);
            // Fails if the thread is gone; then so is its side of the ring, which the first batch will tell.
            let _ = jobs.send(job);
        }
        let now = Instant::now();
        Epoch { loader: self, job, step: 0, started: now, counted: now, in_use: None, ended: false }
    }

    /// Where the time went so far.
    #[must_use]
    pub fn report(&self) -> Report {
        // Relaxed: a count; the reads of the batches received were made visible by their hand-over.
        Report { reads: self.reads.load(Ordering::Relaxed), ..self.report.get() }
    }

    /// The plan whose batches this loads.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Ends the reading thread, which dropping the loader does too, and tells what nobody has heard yet.
    ///
    /// # Errors
    ///
    /// [`Error::Trace`] if the trace could not be written; the training was not disturbed by it.
    pub fn close(self) -> Result<(), Error> {
        let Self { slots, feed, track, trace, .. } = self;
        drop(slots);
        drop(feed);
        drop(track);
        trace.map_or(Ok(()), |trace| trace.check())
    }

    /// The next batch of `job`, which is that of `step`.
    fn receive(&self, job: Job, step: u64) -> Result<ReadSlot<'_, Slot, Park>, Error> {
        let Job { epoch, .. } = job;
        let all_held = || Error::AllHeld { epoch, step, host_depth: self.host_depth };
        if let Feed::Inline(inline) = &self.feed {
            let (reader, producer) = &mut *inline.borrow_mut();
            let mut slot = match producer.try_acquire() {
                Ok(slot) => slot,
                Err(TryAcquireError::Full) => return Err(all_held()),
                Err(TryAcquireError::Closed) => return Err(Error::ReaderGone { epoch, step }),
            };
            if let Some(plan) = self.plan.batch(epoch, step) {
                reader.load(job, step, plan, &mut slot, Duration::ZERO);
            }
            slot.commit().map_err(|_| Error::ReaderGone { epoch, step })?;
        }
        loop {
            let mut slot = self.slots.recv().map_err(|error| match error {
                RecvError::AllHeld => all_held(),
                RecvError::Finished | RecvError::Abandoned => Error::ReaderGone { epoch, step },
            })?;
            match &mut slot.load {
                Some(Load { generation, result, .. }) if *generation == job.generation => {
                    // An error is moved out; the slot that it leaves is an empty batch.
                    return match std::mem::replace(result, Ok(0)) {
                        Ok(len) => {
                            *result = Ok(len);
                            Ok(slot)
                        }
                        Err(error) => Err(error),
                    };
                }
                // Read ahead for an epoch that was given up: released, and on to the next.
                _ => {}
            }
        }
    }
}

impl LoaderBuilder {
    /// How many host slots there are, 1 to [`MAX_HOST_DEPTH`]; 2 unless said otherwise.
    ///
    /// Two are enough for a steady load; more even out one that comes in bursts. With one, nothing can overlap.
    /// Each takes the memory of one batch.
    #[must_use]
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.host_depth = slots;
        self
    }

    /// Whether a thread reads ahead; `true` unless said otherwise. If not, each batch is read on the caller's
    /// thread when it is asked for: the same batches in the same order.
    #[must_use]
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Whether the reading thread asks for the next batch's pages before it reads the present one; `true`
    /// unless said otherwise. Never done without overlap.
    #[must_use]
    pub fn hints(mut self, hints: bool) -> Self {
        self.hints = hints;
        self
    }

    /// Records what happens in a file; nothing unless said otherwise.
    #[must_use]
    pub fn profile(mut self, profile: Profile) -> Self {
        self.profile = Some(profile);
        self
    }

    /// Allocates the slots and starts the thread.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the depth is out of range, the plan is for more records than the data set has or
    /// the slots do not fit the memory; [`Error::Trace`] if the trace's file cannot be made;
    /// [`Error::Spawn`] if the system starts no thread.
    pub fn build(self) -> Result<Loader, Error> {
        let Self { dataset, plan, host_depth, overlap, hints, profile } = self;
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
        let slots = slots(&*dataset, &plan, host_depth)?;
        let (producer, consumer) = handles(slots);
        let trace = profile.map(Profile::create).transpose()?.map(Arc::new);
        let reads = Arc::new(AtomicU64::new(0));
        let track = RefCell::new(Track::new(trace.clone(), 1, "train"));
        let reader = Reader {
            dataset,
            plan,
            hints: hints && overlap,
            track: Track::new(trace.clone(), 2, "read"),
            reads: reads.clone(),
        };
        let feed = if overlap {
            let (jobs, inbox) = mpsc::channel();
            let wanted = Arc::new(AtomicU64::new(0));
            let seen = wanted.clone();
            let thread = std::thread::Builder::new()
                .name("twinbuf-read".to_string())
                .spawn(move || reader.run(&inbox, &seen, producer))
                .map_err(Error::Spawn)?;
            Feed::Ahead { jobs, wanted, _thread: Joined(Some(thread)) }
        } else {
            Feed::Inline(Box::new(RefCell::new((reader, producer))))
        };
        Ok(Loader {
            slots: consumer,
            feed,
            plan,
            host_depth,
            generation: Cell::new(0),
            reads,
            report: Cell::default(),
            track,
            trace,
        })
    }
}

/// The host slots, each of the size of a full batch.
fn slots(dataset: &dyn Dataset, plan: &Plan, host_depth: usize) -> Result<Vec<Slot>, Error> {
    let (records, record_bytes) = (plan.batch_records(), dataset.record_bytes());
    usize::try_from(records)
        .ok()
        .and_then(|records| records.checked_mul(record_bytes))
        .and_then(|len| (0..host_depth).map(|_| Slot::new(len)).collect())
        .ok_or_else(|| Error::Option {
            option: "host_depth",
            wanted: "slots that fit the memory".to_string(),
            found: format!("{host_depth} slots of {records} records of {record_bytes} bytes"),
        })
}

type Handles = (Producer<'static, Slot, Park>, Consumer<'static, Slot, Park>);

/// The ring of these slots, 1 to [`MAX_HOST_DEPTH`].
fn handles(slots: Vec<Slot>) -> Handles {
    fn of<const N: usize>(slots: Vec<Slot>) -> Handles {
        let Ok(slots) = <[Slot; N]>::try_from(slots) else { unreachable!("matched on their number") };
        Ring::with_wait(slots, Park).into_handles()
    }
    match slots.len() {
        1 => of::<1>(slots),
        2 => of::<2>(slots),
        3 => of::<3>(slots),
        4 => of::<4>(slots),
        5 => of::<5>(slots),
        6 => of::<6>(slots),
        7 => of::<7>(slots),
        8 => of::<8>(slots),
        depth => unreachable!("checked by the builder: {depth}"),
    }
}

/// A thread that is joined when this is dropped.
struct Joined(Option<JoinHandle<()>>);

impl Drop for Joined {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic of the thread has been reported by its hook, and to the caller as `ReaderGone`.
            let _ = thread.join();
        }
    }
}

/// The batches of one epoch; see [`Loader::epoch`].
///
/// After an error it ends. Dropping it early leaves the rest of the epoch unread.
pub struct Epoch<'l> {
    loader: &'l Loader,
    job: Job,
    step: u64,
    started: Instant,
    /// Up to when the report has counted the wall-clock time.
    counted: Instant,
    /// The batch that the caller has.
    in_use: Option<InUse>,
    ended: bool,
}

struct InUse {
    step: u64,
    asked: Instant,
    received: Instant,
    load: Duration,
}

impl<'l> Iterator for Epoch<'l> {
    type Item = Result<Batch<'l>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let asked = Instant::now();
        self.end_of_use(asked);
        if self.step == self.loader.plan.steps() {
            self.end(asked);
            return None;
        }
        let found = if self.loader.generation.get() == self.job.generation {
            self.loader.receive(self.job, self.step)
        } else {
            Err(Error::Superseded { epoch: self.job.epoch })
        };
        let received = Instant::now();
        match found {
            Ok(slot) => {
                self.count(asked, received, &slot);
                self.step += 1;
                Some(Ok(Batch { slot }))
            }
            Err(error) => {
                self.end(received);
                Some(Err(error))
            }
        }
    }

    /// Exact, unless an error cuts the epoch short.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended { 0 } else { self.loader.plan.steps() - self.step };
        (usize::from(left > 0), usize::try_from(left).ok())
    }
}

impl FusedIterator for Epoch<'_> {}

impl Epoch<'_> {
    /// A batch was asked for and received.
    fn count(&mut self, asked: Instant, received: Instant, slot: &Slot) {
        let Some(load) = &slot.load else { return };
        let waited = received - asked;
        let mut report = self.loader.report.get();
        report.batches += 1;
        report.bytes += slot.batch().len() as u64;
        report.read.busy += load.took;
        report.read.waiting += load.waited;
        report.train.waiting += waited;
        report.hints += load.hints;
        self.loader.report.set(report);
        self.in_use = Some(InUse { step: self.step, asked, received, load: load.took });
        self.span("queue_wait", Some(self.step), asked, received);
    }

    /// The caller is done with its batch: it asks for the next, or gives up.
    fn end_of_use(&mut self, now: Instant) {
        let mut report = self.loader.report.get();
        report.wall += now - self.counted;
        self.counted = now;
        if let Some(InUse { step, asked, received, load }) = self.in_use.take() {
            let used = now - received;
            report.train.busy += used;
            report.ideal += load.max(used);
            self.span("train", Some(step), received, now);
            self.span("chunk", Some(step), asked, now);
        }
        self.loader.report.set(report);
    }

    fn end(&mut self, now: Instant) {
        self.ended = true;
        self.end_of_use(now);
        self.span("epoch", None, self.started, now);
        self.loader.track.borrow_mut().flush();
        if let Feed::Ahead { wanted, .. } = &self.loader.feed {
            if self.loader.generation.get() == self.job.generation {
                // Nothing more is wanted, until the next epoch. Relaxed: see the load in `Reader::run`.
                wanted.store(0, Ordering::Relaxed);
            }
        }
    }

    fn span(&self, name: &str, step: Option<u64>, start: Instant, end: Instant) {
        self.loader.track.borrow_mut().span(name, self.job.place(step), start, end);
    }
}

impl Drop for Epoch<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.end(Instant::now());
        }
    }
}

/// The bytes of one batch, in their slot: record after record, in the plan's order.
///
/// The slot is free for another batch when this is dropped. It may be sent to another thread.
pub struct Batch<'l> {
    slot: ReadSlot<'l, Slot, Park>,
}

impl Batch<'_> {
    /// The epoch it belongs to.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.load().epoch
    }

    /// Its step within the epoch, from 0.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.load().step
    }

    /// Which records it is made of.
    #[must_use]
    pub fn plan(&self) -> &BatchPlan {
        &self.load().plan
    }

    fn load(&self) -> &Load {
        let Some(load) = &self.slot.load else { unreachable!("a batch is made of a slot that was loaded") };
        load
    }
}

impl Deref for Batch<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.slot.batch()
    }
}

impl DerefMut for Batch<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.slot.batch_mut()
    }
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("plan", &self.plan)
            .field("host_depth", &self.host_depth)
            .field("overlap", &matches!(self.feed, Feed::Ahead { .. }))
            .field("trace", &self.trace.as_ref().map(|trace| trace.path()))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for LoaderBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, host_depth, overlap, hints, profile, .. } = self;
        f.debug_struct("LoaderBuilder")
            .field("plan", plan)
            .field("host_depth", host_depth)
            .field("overlap", overlap)
            .field("hints", hints)
            .field("profile", profile)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Epoch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch")
            .field("epoch", &self.job.epoch)
            .field("step", &self.step)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("epoch", &self.epoch())
            .field("step", &self.step())
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}
