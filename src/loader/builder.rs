//! Sets up a loader: its options, the memory it takes, its thread.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use twinbuf_cuda::cudarc::driver::CudaContext;
use twinbuf_mmap::{Buffer, CachePolicy, Plan, Tail};

use super::Loader;
use super::checkpoint::Identity;
use super::prefetch::Prefetch;
use super::reader::{Reader, Transforming};
#[cfg(feature = "cuda")]
use crate::backend::Cuda;
use crate::backend::{Backend, Host, MAX_HOST_DEPTH, too_large};
use crate::dataset::Dataset;
use crate::error::Error;
use crate::observe::breakdown::Breakdown;
use crate::observe::trace::Trace;
use crate::slot::Naming;
use crate::stage::{self, Stage};
use crate::transform::RecordTransform;

/// Default prefetch window in bytes. With batches of 4 MiB in shuffled chunks, every page was in memory when it was
/// read; a window of one batch had half of them (`bench/disk`, section `resident`).
const HINT_WINDOW: u64 = 32 << 20;

/// Default wait for a batch that is held: longer than any step but the largest models', so that handing batches to
/// other threads is no race.
pub(crate) const HELD_TIMEOUT: Duration = Duration::from_secs(10);

/// Builds a [`Loader`]; made by [`Loader::builder`].
#[must_use = "a builder does nothing until `build`"]
pub struct LoaderBuilder<B: Backend = Host> {
    pub(crate) backend: B,
    pub(crate) options: Options,
}

/// What a loader is built from, whatever its backend is.
pub(crate) struct Options {
    pub(crate) name: Option<String>,
    dataset: Box<dyn Dataset>,
    pub(crate) plan: Plan,
    pub(crate) host_depth: usize,
    pub(crate) overlap: bool,
    pub(crate) hints: bool,
    hint_window: Option<u64>,
    cache_policy: CachePolicy,
    transform: Option<Box<dyn RecordTransform>>,
    memory_limit: Option<u64>,
    held_timeout: Duration,
    pub(crate) trace: Option<Trace>,
    pub(crate) breakdown: Breakdown,
}

impl LoaderBuilder {
    pub(crate) fn new(dataset: Box<dyn Dataset>, plan: Plan) -> Self {
        let options = Options {
            name: None,
            dataset,
            plan,
            host_depth: 2,
            overlap: true,
            hints: true,
            hint_window: None,
            cache_policy: CachePolicy::Keep,
            transform: None,
            memory_limit: None,
            held_timeout: HELD_TIMEOUT,
            trace: None,
            breakdown: Breakdown::off(),
        };
        Self { backend: Host, options }
    }
}

impl<B: Backend> LoaderBuilder<B> {
    /// Names the loader in errors, reports and traces, and gives it switches of its own in the environment; see
    /// [`from_env`](Self::from_env). Default: no name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options.name = Some(name.into());
        self
    }

    /// Sets the number of host slots, 1 to [`MAX_HOST_DEPTH`]. Default: 2.
    ///
    /// Each slot takes the memory of one batch. Two are enough for a steady load; more even out a load that comes in
    /// bursts. With one slot nothing overlaps.
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.options.host_depth = slots;
        self
    }

    /// Whether a thread reads ahead of the caller. Default: `true`.
    ///
    /// With `false`, each batch is read on the caller's thread when the caller asks for it. The batches and their
    /// order are the same.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.options.overlap = overlap;
        self
    }

    /// Whether the reading thread asks the system for pages before it reads them. Default: `true`.
    ///
    /// Hints are made only where the plan jumps, only with overlap, and only for records that do not seem to be in
    /// the page cache already ([`Records::seems_cached`](twinbuf_mmap::Records::seems_cached)).
    pub fn hints(mut self, hints: bool) -> Self {
        self.options.hints = hints;
        self
    }

    /// Sets the prefetch window: how many bytes of records after the current batch are asked for ahead of time.
    /// Default: 32 MiB or one batch, whichever is more.
    ///
    /// Records that continue where the previous ones ended are left out, because the system reads ahead of those by
    /// itself, and faster. The pages go to the system's page cache, on top of the loader's own slots; a window larger
    /// than free memory makes the disk read pages twice.
    pub fn hint_window(mut self, bytes: u64) -> Self {
        self.options.hint_window = Some(bytes);
        self
    }

    /// What to do with a batch's cached pages after it has been read. Default: [`CachePolicy::Keep`].
    ///
    /// [`CachePolicy::Drop`] keeps a data set that is larger than memory from evicting everything else, but the next
    /// epoch finds nothing of it in the cache. Failures are counted in the [`Report`](crate::Report).
    pub fn cache_policy(mut self, policy: CachePolicy) -> Self {
        self.options.cache_policy = policy;
        self
    }

    /// Transforms the records on their way into the slots. Default: no transform.
    ///
    /// The transform runs on the reading thread, on 256 KiB at a time that have just been read. Slots then hold the
    /// transformed records.
    pub fn transform(mut self, transform: impl RecordTransform + 'static) -> Self {
        self.options.transform = Some(Box::new(transform));
        self
    }

    /// Limits the memory of the slots, in bytes. Default: no limit.
    ///
    /// Counts `host_depth` batches, `device_depth` more on a device, and the scratch buffer of a transform. Does not
    /// count the system's page cache.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.options.memory_limit = Some(bytes);
        self
    }

    /// How long to wait for a batch that is still held, when its slot is the next to be filled. Default: 10 s.
    ///
    /// Batches may be dropped on other threads. When the time is over the epoch ends with [`Error::SlotHeld`], also
    /// if the caller itself holds the batch.
    pub fn held_timeout(mut self, timeout: Duration) -> Self {
        self.options.held_timeout = timeout;
        self
    }

    /// Writes a Chrome trace: `builder.trace("trace.json")`. Default: no trace.
    pub fn trace(mut self, trace: impl Into<Trace>) -> Self {
        self.options.trace = Some(trace.into());
        self
    }

    /// Times the phases of each step. Default: off.
    ///
    /// The loader adds its own phases: `load` and, on a device, `h2d`. A loader whose breakdown is on does not
    /// overlap, whatever [`overlap`](Self::overlap) is set to.
    pub fn breakdown(mut self, breakdown: Breakdown) -> Self {
        self.options.breakdown = breakdown;
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
        let Self { backend, options } = self;
        let Options { mut dataset, plan, host_depth, overlap, hints, hint_window, .. } = options;
        let Options { name, cache_policy, transform, memory_limit, held_timeout, trace, breakdown, .. } =
            options;
        if overlap && breakdown.is_on() {
            breakdown.overlap_is_off();
        }
        let overlap = overlap && !breakdown.is_on();
        if !(1..=MAX_HOST_DEPTH).contains(&host_depth) {
            let wanted = format!("1 to {MAX_HOST_DEPTH} slots");
            return Err(Error::Option { option: "host_depth", wanted, found: host_depth.to_string() });
        }
        if plan.range().end > dataset.records() {
            return Err(Error::Option {
                option: "plan",
                wanted: format!("a plan for at most the data set's {} records", dataset.records()),
                found: format!("one for {}", plan.range().end),
            });
        }
        let record_bytes = dataset.record_bytes();
        let depths = (host_depth, backend.device_depth());
        let sizes = Sizes::new(&plan, depths, (record_bytes, dataset.part_bytes()), transform.as_deref())?;
        memory_limit.map_or(Ok(()), |limit| sizes.check(limit))?;
        let scratch = match sizes.part {
            0 => None,
            _ => Some(Buffer::new(sizes.scratch).ok_or_else(|| too_large(&sizes))?),
        };
        let transform = transform.zip(scratch).map(|(transform, scratch)| Transforming {
            transform,
            out_bytes: sizes.out_bytes,
            part: sizes.part,
            scratch,
        });
        let fingerprint = dataset.fingerprint().map_err(Error::Fingerprint)?;
        let trace = trace.map(|trace| trace.open(name.as_deref(), plan.rank(), plan.world())).transpose();
        let trace = trace.map_err(Error::trace)?;
        let records_in = |bytes: u64| bytes.div_ceil((record_bytes as u64).max(1));
        let window =
            hint_window.map_or_else(|| plan.batch_records().max(records_in(HINT_WINDOW)), records_in);
        let identity = Arc::new(Identity::new(&plan, record_bytes, fingerprint));
        let reader = Reader {
            dataset,
            plan,
            identity: identity.clone(),
            record_bytes,
            transform,
            prefetch: (hints && overlap).then(|| Prefetch::new(window)),
            cache_policy,
        };
        let options = stage::Options {
            naming: Naming { loader: name.map(Into::into), rounds: false },
            overlap,
            held_timeout,
            trace,
            breakdown,
            steps: plan.steps(),
            slots: (sizes.slot, host_depth, &sizes),
        };
        let stage = Stage::start(backend, Box::new(reader), options)?;
        Ok(Loader { stage, plan, identity, epochs_begun: 0, position: (0, 0) })
    }
}

#[cfg(feature = "cuda")]
impl LoaderBuilder {
    /// Copies each batch to the device of `context` on a stream of its own, while the one before is in use.
    ///
    /// Host slots are page-locked then, and there are two device slots of the same size. Epochs yield
    /// [`DeviceBatch`](crate::loader::DeviceBatch)es. Without overlap there is no thread: each batch is read and
    /// copied when it is asked for.
    ///
    /// The [`Report`](crate::Report) measures what the caller waits for, not what the device does. For a loop that
    /// only enqueues its work it estimates how long both sides waited for the device
    /// ([`Report::device`](crate::Report::device)). A loop that waits for its work at the end of each step, for
    /// example by reading the loss, has exact figures.
    ///
    /// [`twinbuf::cuda::context`](crate::cuda::context) creates a context and returns an error where there is no
    /// driver.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use twinbuf::{Loader, Plan, Records, cuda};
    ///
    /// let ctx = cuda::context(0)?; // or the context you have
    /// let stream = ctx.new_stream()?;
    /// let data = Arc::new(Records::open(["train.bin"], 1024)?);
    /// let plan = Plan::builder(data.len()).batch(256).build()?;
    /// let mut loader = Loader::builder(data, plan).cuda(ctx).build()?;
    /// for batch in loader.epoch(0) {
    ///     let batch = batch?;
    ///     let view = batch.on::<u8>(&stream)?; // `stream` waits for the copy, the host does not
    ///     // launch kernels on `stream` that read `view`
    /// }
    /// # Ok::<(), twinbuf::BoxError>(())
    /// ```
    pub fn cuda(self, context: Arc<CudaContext>) -> LoaderBuilder<Cuda> {
        LoaderBuilder { backend: Cuda { context, device_depth: 2 }, options: self.options }
    }
}

#[cfg(feature = "cuda")]
impl LoaderBuilder<Cuda> {
    /// Sets the number of device slots, 1 to 8. Default: 2.
    pub fn device_depth(mut self, slots: usize) -> Self {
        self.backend.device_depth = slots;
        self
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
        // A plan with fewer records than a batch has none that is full, unless it repeats them.
        let records = match plan.tail() {
            Tail::Wrap => plan.batch_records(),
            Tail::Drop | Tail::Keep => plan.batch_records().min(plan.records()),
        };
        let (out_bytes, part) = match transform {
            None => (record_bytes, 0),
            Some(transform) => {
                let failed = |source| Error::Transform { at: None, source };
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

    /// Refuses a sum above `limit` bytes.
    fn check(&self, limit: u64) -> Result<(), Error> {
        let wanted = (self.slot as u64)
            .checked_mul((self.host_depth as u64).saturating_add(self.device_depth as u64))
            .and_then(|slots| slots.checked_add(self.scratch as u64))
            .ok_or_else(|| too_large(self))?;
        if wanted > limit { Err(Error::Memory { sum: self.to_string(), wanted, limit }) } else { Ok(()) }
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

impl<B: Backend> fmt::Debug for LoaderBuilder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { plan, host_depth, overlap, hints, hint_window, memory_limit, trace, .. } =
            &self.options;
        f.debug_struct("LoaderBuilder")
            .field("backend", &self.backend)
            .field("plan", plan)
            .field("host_depth", host_depth)
            .field("overlap", overlap)
            .field("hints", hints)
            .field("hint_window", hint_window)
            .field("cache_policy", &self.options.cache_policy)
            .field("transform", &self.options.transform.is_some())
            .field("memory_limit", memory_limit)
            .field("trace", trace)
            .finish_non_exhaustive()
    }
}
