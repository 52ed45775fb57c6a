//! Sets up a loader: its options, the memory it takes, its thread.

use std::alloc;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use twinbuf_cuda::cudarc::driver::CudaContext;
use twinbuf_mmap::{Buffer, Plan, ReadMode, ReadOptions};

use super::Loader;
use super::fields;
use super::reader::{FieldReader, Reader, Transforming};
use super::schedule::Schedule;
use super::sizes::{Depths, Part, Sizes};
#[cfg(feature = "cuda")]
use crate::backend::Cuda;
use crate::backend::{Backend, Host, too_large};
use crate::batch::checkpoint::Identity;
use crate::batch::layout;
use crate::batch::memory::MemoryLimit;
use crate::dataset::Dataset;
use crate::error::Error;
use crate::observe::breakdown::Breakdown;
use crate::observe::trace::Trace;
use crate::slot::MAX_HOST_DEPTH;
use crate::slot::Naming;
use crate::stage::worker::Source;
use crate::stage::{self, HELD_TIMEOUT, Stage};
use crate::transform::{RecordTransform, RecordType};

/// The most workers: more than one machine has processors to spare for one loader.
pub(super) const MAX_WORKERS: usize = 64;

/// Slots begin at multiples of it, as fields do in a slot.
const SLOT_ALIGN: usize = 64;

/// Builds a [`Loader`]; made by [`Loader::builder`].
#[must_use = "a builder does nothing until `build`"]
pub struct LoaderBuilder<B: Backend = Host> {
    pub(crate) backend: B,
    pub(crate) options: Options,
}

/// The options of a loader that do not depend on the backend.
pub(crate) struct Options {
    pub(crate) name: Option<String>,
    /// One for each field.
    datasets: Vec<Box<dyn Dataset>>,
    pub(crate) plan: Plan,
    pub(crate) workers: usize,
    pub(crate) host_depth: usize,
    pub(crate) overlap: bool,
    pub(crate) hints: bool,
    hint_window: Option<u64>,
    fill_threads: usize,
    read_mode: ReadMode,
    /// By the number of the field, in the order of application.
    transforms: BTreeMap<usize, Vec<Box<dyn RecordTransform>>>,
    slots: Option<Vec<Buffer>>,
    slot_bytes: Option<usize>,
    pub(super) memory_limit: Option<MemoryLimit>,
    held_timeout: Duration,
    pub(crate) trace: Option<Trace>,
    pub(crate) breakdown: Breakdown,
}

impl Options {
    /// Whether a thread reads ahead. Phases that are timed do not overlap.
    fn overlaps(&self) -> bool {
        self.overlap && !self.breakdown.is_on()
    }

    /// Checks the options against each other and against the data sets, and finds what they need, with as many device
    /// slots for each worker.
    fn sizes(&self, device: usize) -> Result<(Sizes, layout::Layout), Error> {
        let Self { datasets, plan, transforms, workers, host_depth: host, .. } = self;
        for (option, found) in [("workers", workers), ("fill_threads", &self.fill_threads)] {
            if !(1..=MAX_WORKERS).contains(found) {
                let (wanted, found) = (format!("1 to {MAX_WORKERS} threads"), found.to_string());
                return Err(Error::Option { option, wanted, found });
            }
        }
        if !(1..=MAX_HOST_DEPTH).contains(host) {
            let wanted = format!("1 to {MAX_HOST_DEPTH} slots");
            return Err(Error::Option { option: "host_depth", wanted, found: host.to_string() });
        }
        fields::check(datasets)?;
        let records = datasets[0].records();
        if plan.range().end > records {
            return Err(Error::Option {
                option: "plan",
                wanted: format!("a plan for at most the data set's {records} records"),
                found: format!("one for {}", plan.range().end),
            });
        }
        if let Some(field) = transforms.keys().find(|&&field| field >= datasets.len()) {
            let wanted = format!("a field below {}", datasets.len());
            return Err(Error::Option { option: "transform_field", wanted, found: field.to_string() });
        }
        let depths = Depths { workers: if self.overlaps() { *workers } else { 1 }, host: *host, device };
        let each = datasets.iter().enumerate();
        let each = each.map(|(i, dataset)| (&**dataset, transforms.get(&i).map_or(&[][..], Vec::as_slice)));
        Sizes::new(plan, depths, self.slot_bytes, each)
    }
}

impl LoaderBuilder {
    pub(crate) fn new(datasets: Vec<Box<dyn Dataset>>, plan: Plan) -> Self {
        let options = Options {
            name: None,
            datasets,
            plan,
            workers: 1,
            host_depth: 2,
            overlap: true,
            hints: true,
            hint_window: None,
            fill_threads: 1,
            read_mode: ReadMode::Auto,
            transforms: BTreeMap::new(),
            slots: None,
            slot_bytes: None,
            memory_limit: None,
            held_timeout: HELD_TIMEOUT,
            trace: None,
            breakdown: Breakdown::off(),
        };
        Self { backend: Host, options }
    }
}

impl<B: Backend> LoaderBuilder<B> {
    /// Names the loader in errors, reports and traces, and gives it its own switches in the environment; see
    /// [`from_env`](Self::from_env). Default: no name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options.name = Some(name.into());
        self
    }

    /// Sets the number of threads that read, transform and decode, 1 to 64. Default: 1.
    ///
    /// Each has its own `host_depth` slots, on a device also `device_depth` and a copy stream. A thread that has a free
    /// slot takes the next batch: a batch that takes long delays no other thread. Batches are delivered in the plan's
    /// order, and are the same for any number of threads. Use more
    /// than one where a batch takes more CPU time than a step: decoding, slow transforms. One is enough for records
    /// that are only read. Without [`overlap`](Self::overlap) there are no threads, and one set of slots.
    ///
    /// Each thread has a copy of the data set ([`Dataset::try_clone`]) and of the transform
    /// ([`RecordTransform::try_clone`]).
    pub fn workers(mut self, threads: usize) -> Self {
        self.options.workers = threads;
        self
    }

    /// Sets the number of threads that read files into one slot, 1 to 64, each a part of the records. Default: 1.
    ///
    /// For batches of hundreds of megabytes: [`workers`](Self::workers) read as fast, but each has its own slots. With
    /// transforms, and for other data sets than files, one thread fills a slot. See [`ReadOptions::fill_threads`].
    pub fn fill_threads(mut self, threads: usize) -> Self {
        self.options.fill_threads = threads;
        self
    }

    /// Sets the number of host slots of each worker, 1 to [`MAX_HOST_DEPTH`]. Default: 2.
    ///
    /// Each slot takes the memory of one batch. Two are enough for a steady load; more even out a load that comes in
    /// bursts. With one slot nothing overlaps.
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.options.host_depth = slots;
        self
    }

    /// Uses this memory for the host slots, in place of new memory: a tensor library's pinned memory, or pages that
    /// the caller registered ([`Buffer::lent`]).
    ///
    /// [`wanted_slots`](Self::wanted_slots) returns how many buffers there must be, and the least size and alignment of
    /// each. Batches stay in these buffers. The buffers of a worker are dropped together, after the loader and the last
    /// batch in one of them.
    ///
    /// ```
    /// # use twinbuf::{Loader, Plan, Records, mmap::Buffer};
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("train.bin");
    /// # std::fs::write(&path, [1; 4096])?;
    /// let data = Records::open([&path], 64)?;
    /// let plan = Plan::builder(data.len()).batch(16).build()?;
    /// let builder = Loader::builder(data, plan);
    /// let (count, slot) = builder.wanted_slots()?;
    /// assert_eq!((count, slot.size()), (2, 16 * 64));
    /// let slots: Vec<Buffer> = (0..count).filter_map(|_| Buffer::new(slot.size())).collect(); // or `Buffer::lent`
    /// let mut loader = builder.slots(slots).build()?;
    /// assert_eq!(loader.epoch(0).count(), 4);
    /// # Ok::<(), twinbuf::BoxError>(())
    /// ```
    pub fn slots(mut self, memory: Vec<Buffer>) -> Self {
        self.options.slots = Some(memory);
        self
    }

    /// Sets the most bytes that the records of a batch take together, where they differ in length. Default: those of the longest
    /// records of the data set; with transforms, as many of the longest that these make as a batch has records.
    ///
    /// Slots are that large. It is for each field, and no limit for records of one size. A batch that does not fit ends its
    /// epoch with [`Error::Load`] or [`Error::Transform`].
    pub fn slot_bytes(mut self, bytes: usize) -> Self {
        self.options.slot_bytes = Some(bytes);
        self
    }

    /// Returns how many host slots [`build`](Self::build) needs with the options set so far, and the size and alignment
    /// of each in bytes: [`host_depth`](Self::host_depth) slots for each of the [`workers`](Self::workers) (one worker
    /// without overlap). A slot holds one batch after its transforms. For [`slots`](Self::slots).
    ///
    /// Set all other options before, also those of the environment ([`from_env`](Self::from_env)). Nothing is allocated,
    /// and nothing taken from the [`memory_limit`](Self::memory_limit).
    ///
    /// # Errors
    ///
    /// Those of [`build`](Self::build) that are found before it allocates: [`Error::Option`] if a number is out of range,
    /// the plan is for more records than the data set has or a slot does not fit the memory; [`Error::Transform`] if
    /// the records cannot be transformed.
    pub fn wanted_slots(&self) -> Result<(usize, alloc::Layout), Error> {
        let (sizes, _) = self.options.sizes(self.backend.device_depth())?;
        let slot = alloc::Layout::from_size_align(sizes.slot, SLOT_ALIGN).map_err(|_| too_large(&sizes))?;
        Ok((sizes.depths.workers * sizes.depths.host, slot))
    }

    /// Whether a thread reads ahead of the caller. Default: `true`.
    ///
    /// With `false`, each batch is read on the caller's thread when the caller asks for it. The batches and their
    /// order are the same.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.options.overlap = overlap;
        self
    }

    /// Whether files are prefetched. Default: `true`. Only with [`overlap`](Self::overlap).
    ///
    /// `MADV_SEQUENTIAL` is not used. It makes touches of mapped pages in order as fast as asking for the pages, but
    /// reads by `pread` have the system's own read-ahead; and pages that are read may be freed soon (`madvise(2)`), but
    /// later epochs need them.
    pub fn hints(mut self, hints: bool) -> Self {
        self.options.hints = hints;
        self
    }

    /// Sets the prefetch window: how many bytes of records after the current batch are prefetched. Default: 32 MiB or
    /// one batch, whichever is more. See [`ReadOptions::prefetch`].
    pub fn hint_window(mut self, bytes: u64) -> Self {
        self.options.hint_window = Some(bytes);
        self
    }

    /// Sets where the bytes of files come from. Default: [`ReadMode::Auto`]. The [`Report`](crate::Report) explains its
    /// choice.
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.options.read_mode = mode;
        self
    }

    /// Transforms the records on their way into the slots, after the transforms that were added before. Default: no
    /// transform.
    ///
    /// Transforms run on the reading thread, on 256 KiB at a time that have just been read. Slots then hold the
    /// transformed records.
    ///
    /// With several data sets, the records of the first are transformed; see
    /// [`transform_field`](Self::transform_field).
    pub fn transform(self, transform: impl RecordTransform + 'static) -> Self {
        self.transform_field(0, transform)
    }

    /// Transforms one field of the records, counted from 0: of `(images, labels)`, field 0 is the images. The others stay
    /// as they are. Each field can have its own transform.
    pub fn transform_field(mut self, field: usize, transform: impl RecordTransform + 'static) -> Self {
        self.options.transforms.entry(field).or_default().push(Box::new(transform));
        self
    }

    /// Limits the memory of the slots, in bytes; a [`MemoryLimit`] is for several loaders together. Default: no limit.
    ///
    /// Counts for each worker `host_depth` batches, `device_depth` more on a device, and the scratch buffer of a
    /// transform; and the memory for reads past the page cache ([`Reader::memory`](twinbuf_mmap::Reader::memory)). It
    /// counts until the loader and the last of its batches are dropped, and so does memory that a batch took out of its
    /// slot ([`Batch::into_buffer`](crate::Batch::into_buffer)). Does not count the page cache.
    pub fn memory_limit(mut self, limit: impl Into<MemoryLimit>) -> Self {
        self.options.memory_limit = Some(limit.into());
        self
    }

    /// Sets how long to wait for a batch that is still held, when its slot is the next to be filled. Default: 10 s.
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

    /// Allocates the slots and starts the threads.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if files cannot be opened past the page cache, as asked for; [`Error::Option`] if a number is out of
    /// range, there are several workers and the data set or the transform
    /// cannot be cloned, the plan is for more records than the data set has or
    /// the slots do not fit the memory; [`Error::Memory`] if they do not fit the limit; [`Error::Transform`] if
    /// the records cannot be transformed; [`Error::Device`] if the device has no such slots;
    /// [`Error::Fingerprint`] if the data set cannot tell its own; [`Error::Trace`] if the trace's file cannot be
    /// made; [`Error::Spawn`] if the system starts no thread.
    pub fn build(self) -> Result<Loader<B>, Error> {
        let Self { backend, options } = self;
        if options.overlap && options.breakdown.is_on() {
            options.breakdown.overlap_is_off();
        }
        let overlap = options.overlaps();
        let (mut sizes, mut layout) = options.sizes(backend.device_depth())?;
        let Depths { workers, host: host_depth, .. } = sizes.depths;
        let Options { name, mut datasets, plan, hints, hint_window, read_mode, mut transforms, .. } = options;
        let fill_threads = options.fill_threads;
        let Options { slots, memory_limit, held_timeout, trace, breakdown, .. } = options;
        let record_bytes: usize = datasets.iter().map(|dataset| dataset.record_bytes()).sum();
        check_slots(slots.as_deref(), workers * host_depth, sizes.slot)?;
        let how = ReadOptions::new().mode(read_mode).fill_threads(fill_threads);
        let how = hint_window.map_or(how, |bytes| how.prefetch(bytes));
        let files = datasets.iter().map(|dataset| {
            let files = dataset.files().map(|files| twinbuf_mmap::Reader::new(files, &plan, how));
            Ok(files.transpose()?.map(Arc::new))
        });
        let files: Vec<_> = files.collect::<Result<_, _>>().map_err(Error::Open)?;
        let memory = files.iter().flatten().map(|files: &Arc<twinbuf_mmap::Reader>| files.memory());
        sizes.ahead = memory.fold(0, u64::saturating_add);
        (layout.taken, layout.lent) =
            (memory_limit.map(|limit| sizes.take(limit)).transpose()?, slots.is_some());
        let fingerprint = fields::fingerprint(&mut datasets)?;
        let trace = trace.map(|trace| trace.open(name.as_deref(), plan.rank(), plan.world())).transpose();
        let trace = trace.map_err(Error::trace)?;
        let field_bytes: Vec<usize> = layout.fields.iter().map(RecordType::len).collect();
        let schedule = Schedule::new(plan, Identity::new(&plan, record_bytes, fingerprint), layout);
        let begun = (hints && overlap).then(Arc::default);
        let reader = |_| {
            let (schedule, begun) = (schedule.clone(), begun.clone());
            Reader { fields: Vec::new(), schedule, begun }
        };
        let locators = datasets.iter().map(|dataset| dataset.locator()).collect();
        let mut readers: Vec<Reader> = (0..workers).map(reader).collect();
        for (index, dataset) in datasets.into_iter().enumerate() {
            let (record_bytes, out_bytes) = (dataset.record_bytes(), field_bytes[index]);
            let Part { records: part, stages, ragged } = &sizes.parts[index];
            let datasets = copies(dataset, workers, "the data set", Dataset::try_clone)?;
            for (reader, dataset) in readers.iter_mut().zip(datasets) {
                let (part, transforms) = (*part, Vec::with_capacity(stages.len()));
                let (files, ragged) = (files[index].clone(), *ragged);
                let field = FieldReader { dataset, files, record_bytes, out_bytes, ragged, part, transforms };
                reader.fields.push(field);
            }
            for (transform, &stage) in transforms.remove(&index).into_iter().flatten().zip(stages) {
                let transforms = copies(transform, workers, "the transform", RecordTransform::try_clone)?;
                for (reader, transform) in readers.iter_mut().zip(transforms) {
                    let scratch = Buffer::new(stage.scratch).ok_or_else(|| too_large(&sizes))?;
                    reader.fields[index].transforms.push(Transforming { transform, stage, scratch });
                }
            }
        }
        let sources = readers.into_iter().map(|reader| Box::new(reader) as Box<dyn Source<[u8]>>).collect();
        let steps = schedule.clone();
        let options = stage::Options {
            naming: Naming { loader: name.map(Into::into), rounds: false },
            overlap,
            held_timeout,
            trace,
            breakdown,
            steps: Box::new(move |generation, epoch| steps.epoch(generation, epoch).0.end()),
            slots: (sizes.slot, host_depth, &sizes),
            lent: slots,
        };
        let stage = Stage::start(backend, sources, options)?;
        Ok(Loader::new(stage, schedule, locators, files.into_iter().flatten().collect()))
    }
}

#[cfg(feature = "cuda")]
impl LoaderBuilder {
    /// Copies each batch to the device of `context` on a separate stream, while the one before is in use.
    ///
    /// Host slots are page-locked then, and there are two device slots of the same size. Epochs yield
    /// [`DeviceBatch`](crate::loader::DeviceBatch)es. A batch of more than 8 MiB is copied in chunks while the rest of it
    /// is read. Without overlap there is no thread: each batch is read and copied when it is asked for.
    ///
    /// Page-locking is slow: keep the loader for all epochs. The host slots are on the NUMA node of the thread that calls
    /// [`build`](Self::build), unless a policy (`numactl`) chooses another.
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
    /// Sets the number of device slots, 1 to 8. Default: 2. With 1, a batch is copied when the one before has been dropped:
    /// copies do not overlap, and reads still do.
    pub fn device_depth(mut self, slots: usize) -> Self {
        self.backend.device_depth = slots;
        self
    }
}

/// Whether memory that the caller gave for `wanted` slots can hold batches of `bytes` bytes.
fn check_slots(slots: Option<&[Buffer]>, wanted: usize, bytes: usize) -> Result<(), Error> {
    let Some(slots) = slots else { return Ok(()) };
    let refuse = |wanted, found| Err(Error::Option { option: "slots", wanted, found });
    if slots.len() != wanted {
        return refuse(format!("{wanted} buffers: workers x host_depth"), slots.len().to_string());
    }
    if let Some(slot) = slots.iter().find(|slot| slot.len() < bytes) {
        return refuse(format!("buffers of at least {bytes} bytes"), slot.len().to_string());
    }
    match slots.iter().find(|slot| slot.as_ptr().addr() % SLOT_ALIGN != 0) {
        Some(slot) => refuse(format!("buffers at multiples of {SLOT_ALIGN}"), format!("{:p}", slot.as_ptr())),
        None => Ok(()),
    }
}

/// `first` and as many clones as there are further workers.
fn copies<T: ?Sized>(
    first: Box<T>,
    workers: usize,
    what: &str,
    try_clone: impl Fn(&T) -> Option<Box<T>>,
) -> Result<Vec<Box<T>>, Error> {
    let mut all = Vec::with_capacity(workers);
    all.push(first);
    while all.len() < workers {
        all.push(try_clone(&all[0]).ok_or_else(|| Error::Option {
            option: "workers",
            wanted: format!("1 thread: {what} has no `try_clone`"),
            found: workers.to_string(),
        })?);
    }
    Ok(all)
}

impl<B: Backend> fmt::Debug for LoaderBuilder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { plan, workers, host_depth, overlap, hints, hint_window, memory_limit, trace, .. } =
            &self.options;
        f.debug_struct("LoaderBuilder")
            .field("backend", &self.backend)
            .field("plan", plan)
            .field("workers", workers)
            .field("host_depth", host_depth)
            .field("overlap", overlap)
            .field("hints", hints)
            .field("hint_window", hint_window)
            .field("read_mode", &self.options.read_mode)
            .field("transform", &!self.options.transforms.is_empty())
            .field("memory_limit", memory_limit)
            .field("trace", trace)
            .finish_non_exhaustive()
    }
}
