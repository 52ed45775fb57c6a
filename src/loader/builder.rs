//! Builds a loader: checks the options, allocates the slots, starts the threads.

use std::alloc;
use std::collections::BTreeMap;
use std::fmt;
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use twinbuf_cuda::cudarc::driver::CudaContext;
use twinbuf_mmap::{BatchIndices, Buffer, Plan, ReadMode, ReadOptions};

use super::Loader;
use super::fields;
use super::reader::{FieldReader, Reader, Schedule, Transforming};
use super::shared::{Room, Shared};
use super::sizes::{Depths, Part, Sizes};
#[cfg(feature = "cuda")]
use crate::backend::Cuda;
use crate::backend::{Backend, Host, too_large};
use crate::batch::checkpoint::Identity;
use crate::batch::memory::MemoryLimit;
use crate::dataset::Dataset;
use crate::error::Error;
use crate::observe::breakdown::Breakdown;
use crate::observe::trace::Trace;
use crate::slot::{self, MAX_HOST_DEPTH, Naming, Sending};
use crate::stage::worker::Source;
use crate::stage::{self, HELD_TIMEOUT, Help, Stage};
use crate::transform::{RecordTransform, RecordType};

/// The maximum of [`workers`](LoaderBuilder::workers): more than one machine has processors to spare for one loader.
pub const MAX_WORKERS: usize = 64;

/// Slots begin at multiples of it, as fields do in a slot.
const SLOT_ALIGN: usize = 64;

/// Builds a [`Loader`]. [`Loader::builder`] returns it.
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
    read_mode: ReadMode,
    /// By the number of the field, in the order of application.
    transforms: BTreeMap<usize, Vec<Box<dyn RecordTransform>>>,
    slots: Option<Vec<Buffer>>,
    slot_bytes: Option<usize>,
    pub(super) memory_limit: Option<MemoryLimit>,
    held_timeout: Duration,
    sending: Option<Sending>,
    sends: bool,
    pub(crate) trace: Option<Trace>,
    pub(crate) breakdown: Breakdown,
}

impl Options {
    /// Whether a thread reads ahead. Phases that are timed do not overlap.
    fn overlaps(&self) -> bool {
        self.overlap && !self.breakdown.is_on()
    }

    /// Whether a caller that waits for a batch may fill a part of it: the only thread reads files, and no code runs but ours.
    fn helps(&self) -> bool {
        let alone = self.overlaps() && self.workers == 1;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut datasets = self.datasets.iter();
        let files = datasets.all(|dataset| dataset.files().is_some() && dataset.try_clone().is_some());
        let ours = self.transforms.values().flatten().all(RecordTransform::is_ours);
        alone && processors > 1 && files && ours
    }

    /// Checks the options against each other and against the data sets, and finds what they need, with as many device
    /// slots for each worker.
    fn sizes(&self, device: usize) -> Result<(Sizes, slot::Layout), Error> {
        let Self { datasets, plan, transforms, workers, host_depth: host, .. } = self;
        if !(1..=MAX_WORKERS).contains(workers) {
            let (wanted, found) = (format!("1 to {MAX_WORKERS} threads"), workers.to_string());
            return Err(Error::Option { option: "workers", wanted, found });
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
        let workers = if self.overlaps() { *workers } else { 1 };
        let depths = Depths { workers, helpers: usize::from(self.helps()), host: *host, device };
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
            read_mode: ReadMode::Auto,
            transforms: BTreeMap::new(),
            slots: None,
            slot_bytes: None,
            memory_limit: None,
            held_timeout: HELD_TIMEOUT,
            sending: None,
            sends: false,
            trace: None,
            breakdown: Breakdown::off(),
        };
        Self { backend: Host, options }
    }
}

impl<B: Backend> LoaderBuilder<B> {
    /// Sets the name of the loader in errors, reports and traces. Default: no name.
    ///
    /// A named loader also has environment variables that set options for it alone; see
    /// [`from_env`](Self::from_env).
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options.name = Some(name.into());
        self
    }

    /// Sets the number of threads that read, transform and decode batches, 1 to [`MAX_WORKERS`]. Default: 1.
    /// `build` returns [`Error::Option`] for a value out of range.
    ///
    /// Each worker has `host_depth` host slots. With `cuda`, each also has `device_depth` device slots and a copy
    /// stream. A worker with a free slot takes the next batch, and a slow batch does not delay the other workers.
    /// The caller receives the batches in the plan's order. The batches are the same for any number of workers.
    ///
    /// Use several workers if loading a batch takes more CPU time than a training step, for example because of
    /// decoding or slow transforms. One worker is enough to read records without further processing. With
    /// [`overlap`](Self::overlap) set to `false`, the loader starts no thread and allocates the slots of one worker.
    ///
    /// Each worker uses a clone of the data set ([`Dataset::try_clone`]) and of every transform
    /// ([`RecordTransform::try_clone`]). `build` returns [`Error::Option`] if there are several workers and one of
    /// these cannot be cloned.
    pub fn workers(mut self, threads: usize) -> Self {
        self.options.workers = threads;
        self
    }

    /// Sets the number of host slots of each worker, 1 to [`MAX_HOST_DEPTH`]. Default: 2.
    ///
    /// Each slot takes the memory of one batch. Two slots are enough if loading time is steady. Additional slots
    /// absorb bursts. With one slot, loading does not overlap with use. `build` returns [`Error::Option`] for a
    /// value out of range.
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.options.host_depth = slots;
        self
    }

    /// Uses the caller's memory for the host slots, for example a tensor library's pinned memory or registered pages
    /// ([`Buffer::lent`]). Default: the loader allocates the slots.
    ///
    /// [`wanted_slots`](Self::wanted_slots) returns the number of buffers, and the minimum size and alignment of
    /// each. `build` returns [`Error::Option`] if the number differs, or if a buffer is too small or misaligned.
    /// Batches stay in these buffers. The loader drops a worker's buffers together, after the loader and every batch
    /// in these buffers have been dropped.
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

    /// Sets the maximum size, in bytes, of one variable-length field in a batch.
    ///
    /// The limit applies to each such field separately. It has no effect on fields with fixed-length records, and a
    /// value above the default has no effect. Default: for files without transforms, the total size of the N longest
    /// records, where N is the batch size; otherwise, N times the maximum record length after the transforms.
    ///
    /// Each slot reserves this size for the field. If a batch exceeds it, the epoch ends with [`Error::Load`] or
    /// [`Error::Transform`].
    pub fn slot_bytes(mut self, bytes: usize) -> Self {
        self.options.slot_bytes = Some(bytes);
        self
    }

    /// The caller is a thread that sends the batches to a device: its row of the trace has `gpu_transfer`. For the Python
    /// package.
    #[doc(hidden)]
    pub fn sends(mut self) -> Self {
        self.options.sends = true;
        self
    }

    /// Calls `send` on a loading thread each time another chunk of a host slot is filled, with the slot's address and the
    /// bytes to send. `send` is called only for the batch that the caller waits for, if it is larger than a chunk of 8 MiB
    /// and its records have one length. Before the slot is filled again, it is called with an empty range: it then waits
    /// until nothing reads the slot. For the Python package.
    #[doc(hidden)]
    pub fn sends_chunks(mut self, send: impl Fn(usize, Range<usize>) + Send + Sync + 'static) -> Self {
        self.options.sending = Some(Sending { send: Arc::new(send), asked: Arc::default() });
        self
    }

    /// Returns the number of host slots that [`build`](Self::build) needs with the present options, and the minimum
    /// size and alignment of each slot in bytes. Use it to allocate the buffers for [`slots`](Self::slots).
    ///
    /// The number is [`host_depth`](Self::host_depth) times [`workers`](Self::workers), or `host_depth` without
    /// overlap. A slot holds one batch after its transforms.
    ///
    /// Set all other options first, including options from the environment ([`from_env`](Self::from_env)). This
    /// method allocates nothing and does not count toward the [`memory_limit`](Self::memory_limit).
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: an option is out of range, the data sets have different numbers of records, the plan has
    ///   more records than the data set, or a slot's size exceeds the address space.
    /// - [`Error::Transform`]: a transform does not accept the records.
    pub fn wanted_slots(&self) -> Result<(usize, alloc::Layout), Error> {
        let (sizes, _) = self.options.sizes(self.backend.device_depth())?;
        let slot = alloc::Layout::from_size_align(sizes.slot, SLOT_ALIGN).map_err(|_| too_large(&sizes))?;
        Ok((sizes.depths.workers * sizes.depths.host, slot))
    }

    /// Sets whether threads read batches ahead of the caller. Default: `true`.
    ///
    /// With `false`, the call that asks for a batch reads it on the caller's thread. The batches and their order are
    /// the same.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.options.overlap = overlap;
        self
    }

    /// Sets whether the loader requests the records of the next batches from the files ahead of time. Default: `true`.
    /// It has no effect without [`overlap`](Self::overlap), or for data sets that are not files.
    ///
    /// The loader never sets `MADV_SEQUENTIAL`: the kernel may then free pages soon after they are read (`madvise(2)`),
    /// and later epochs need them.
    pub fn hints(mut self, hints: bool) -> Self {
        self.options.hints = hints;
        self
    }

    /// Sets the prefetch window: the loader prefetches the records within the next `bytes` bytes after the current
    /// batch. Default: 32 MiB or one batch, whichever is more. See [`ReadOptions::prefetch`].
    pub fn hint_window(mut self, bytes: u64) -> Self {
        self.options.hint_window = Some(bytes);
        self
    }

    /// Sets how files are read: through the page cache, or past it. Default: [`ReadMode::Auto`]. The
    /// [`Report`](crate::Report) shows and explains the choice.
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.options.read_mode = mode;
        self
    }

    /// Adds a transform of the records. Several transforms run in the order in which they were added. Default: no
    /// transform.
    ///
    /// Transforms run on the reading thread, on parts of at most 256 KiB directly after each part was read.
    /// [`Transform`](crate::transform::Transform) and [`Convert`](crate::transform::Convert) also run on a thread that
    /// waits for the batch. The slot receives the transformed records. If there are several data sets, this transform
    /// applies to field 0; see [`transform_field`](Self::transform_field).
    pub fn transform(self, transform: impl RecordTransform + 'static) -> Self {
        self.transform_field(0, transform)
    }

    /// Adds a transform of one field. Fields are numbered from 0: in a data set `(images, labels)`, field 0 is the
    /// images. The other fields are unchanged. Each field can have its own transforms.
    ///
    /// `build` returns [`Error::Option`] if the field does not exist.
    pub fn transform_field(mut self, field: usize, transform: impl RecordTransform + 'static) -> Self {
        self.options.transforms.entry(field).or_default().push(Box::new(transform));
        self
    }

    /// Limits the memory of the slots, in bytes. To share one limit between loaders, pass clones of a
    /// [`MemoryLimit`]. Default: no limit.
    ///
    /// The loader counts the following memory for each worker: `host_depth` batches, `device_depth` batches on a
    /// device, and the scratch buffers of the transforms (with one worker, also those of a caller that helps it). It
    /// also counts the memory for direct I/O ([`Reader::memory`](twinbuf_mmap::Reader::memory)) and the memory that the
    /// caller took out of a slot with [`Batch::into_buffer`](crate::Batch::into_buffer). It does not count the page
    /// cache. Memory is counted until the loader and its last batch are dropped.
    ///
    /// `build` returns [`Error::Memory`] if the loader needs more than the limit has left.
    pub fn memory_limit(mut self, limit: impl Into<MemoryLimit>) -> Self {
        self.options.memory_limit = Some(limit.into());
        self
    }

    /// Sets how long to wait for the caller to drop an earlier batch when the loader needs its slot. Default: 10 s.
    ///
    /// Another thread can drop the batch during the wait. After the timeout the epoch ends with [`Error::SlotHeld`].
    /// If the waiting thread itself holds the batch, the
    /// loader waits for the full timeout.
    pub fn held_timeout(mut self, timeout: Duration) -> Self {
        self.options.held_timeout = timeout;
        self
    }

    /// Writes a Chrome trace to a file: `builder.trace("trace.json")`. Default: no trace.
    pub fn trace(mut self, trace: impl Into<Trace>) -> Self {
        self.options.trace = Some(trace.into());
        self
    }

    /// Measures the phases of each step. Default: off.
    ///
    /// The loader adds the phase `load` and, on a device, the phase `h2d` (host to device). A breakdown that is on
    /// turns overlap off, regardless of [`overlap`](Self::overlap).
    pub fn breakdown(mut self, breakdown: Breakdown) -> Self {
        self.options.breakdown = breakdown;
        self
    }

    /// Allocates the slots and starts the threads.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: an option is out of range, the data sets have different numbers of records, the plan has
    ///   more records than the data set, the data set or a transform cannot be cloned for several workers, the
    ///   caller's [`slots`](Self::slots) do not fit, or the slots cannot be allocated.
    /// - [`Error::Transform`]: a transform does not accept the records.
    /// - [`Error::Open`]: the files cannot be opened as [`read_mode`](Self::read_mode) requires.
    /// - [`Error::Memory`]: the slots exceed the [`memory_limit`](Self::memory_limit).
    /// - [`Error::Device`]: the device's slots could not be allocated.
    /// - [`Error::Fingerprint`]: [`Dataset::fingerprint`] failed.
    /// - [`Error::Trace`]: the trace file could not be created.
    /// - [`Error::Spawn`]: the system could not start a thread.
    pub fn build(self) -> Result<Loader<B>, Error> {
        let Self { backend, options } = self;
        if options.overlap && options.breakdown.is_on() {
            options.breakdown.overlap_is_off();
        }
        let overlap = options.overlaps();
        let (mut sizes, mut layout) = options.sizes(backend.device_depth())?;
        let Depths { workers, helpers, host: host_depth, .. } = sizes.depths;
        let Options { name, mut datasets, plan, hints, hint_window, read_mode, mut transforms, .. } = options;
        let Options { slots, memory_limit, held_timeout, sending, sends, trace, breakdown, .. } = options;
        let record_bytes: usize = datasets.iter().map(|dataset| dataset.record_bytes()).sum();
        check_slots(slots.as_deref(), workers * host_depth, sizes.slot)?;
        let how = ReadOptions::new().mode(read_mode);
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
        let sending = sending.filter(|_| !layout.fields.iter().any(RecordType::is_ragged));
        let field_bytes: Vec<usize> = layout.fields.iter().map(RecordType::len).collect();
        let schedule = Schedule::new(plan, Identity::new(&plan, record_bytes, fingerprint), layout);
        let begun = (hints && overlap).then(Arc::default);
        let shared: Option<Arc<Shared>> = (helpers > 0).then(Arc::default);
        let reader = |_| {
            let (schedule, begun) = (schedule.clone(), begun.clone());
            Reader { fields: Vec::new(), schedule, begun, shared: shared.clone() }
        };
        let locators = datasets.iter().map(|dataset| dataset.locator()).collect();
        let mut readers: Vec<Reader> = (0..workers + helpers).map(reader).collect();
        let stages = sizes.parts.iter().flat_map(|part| &part.stages);
        let scratch: Vec<_> = stages.flat_map(|stage| iter::repeat_n(stage.scratch, readers.len())).collect();
        let mut scratch = Buffer::several(&scratch).into_iter().flatten();
        for (index, dataset) in datasets.into_iter().enumerate() {
            let (record_bytes, out_bytes) = (dataset.record_bytes(), field_bytes[index]);
            let Part { records: part, stages, ragged, .. } = &sizes.parts[index];
            let datasets = copies(dataset, readers.len(), "the data set", Dataset::try_clone)?;
            for (reader, dataset) in readers.iter_mut().zip(datasets) {
                let (part, transforms) = (*part, Vec::with_capacity(stages.len()));
                let (files, ragged) = (files[index].clone(), *ragged);
                let field = FieldReader { dataset, files, record_bytes, out_bytes, ragged, part, transforms };
                reader.fields.push(field);
            }
            for (transform, &stage) in transforms.remove(&index).into_iter().flatten().zip(stages) {
                let transforms =
                    copies(transform, readers.len(), "the transform", RecordTransform::try_clone)?;
                for (reader, transform) in readers.iter_mut().zip(transforms) {
                    let scratch = scratch.next().ok_or_else(|| too_large(&sizes))?;
                    reader.fields[index].transforms.push(Transforming { transform, stage, scratch });
                }
            }
        }
        // The last one is the caller's.
        let help = shared.and_then(|shared| Some(help(shared, readers.pop()?.fields)));
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
            sending,
            sends,
            help,
        };
        let stage = Stage::start(backend, sources, options)?;
        Ok(Loader::new(stage, schedule, locators, files.into_iter().flatten().collect()))
    }
}

#[cfg(feature = "cuda")]
impl LoaderBuilder {
    /// Copies each batch to the device of `context` on a separate stream, while the previous batch is in use.
    ///
    /// The host slots are page-locked. Each worker also has two device slots of the same size by default
    /// ([`device_depth`](LoaderBuilder::device_depth)). Epochs yield [`DeviceBatch`](crate::loader::DeviceBatch)es.
    /// A batch of more than 8 MiB is copied in chunks while the rest of it is read. Without overlap the loader has
    /// no thread: it reads and copies each batch when the caller asks for it.
    ///
    /// Page-locking is slow: keep the loader for all epochs. The host slots are on the NUMA node of the thread that
    /// calls [`build`](Self::build), unless a memory policy (`numactl`) selects another node.
    ///
    /// The [`Report`](crate::Report) measures the time that the caller waits, not the work of the device. If the
    /// loop only enqueues work, the report estimates how long both sides waited for the device
    /// ([`Report::device`](crate::Report::device)). If the loop waits for its work at the end of each step, for
    /// example by reading the loss, the figures are exact.
    ///
    /// [`twinbuf::cuda::context`](crate::cuda::context) creates a context, and returns an error if there is no
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
    /// Sets the number of device slots of each worker, at least 1. Default: 2. With one slot, a batch is copied when the one
    /// before has been dropped: copies do not overlap with use, and reads still do. `build` returns [`Error::Option`] for
    /// a value out of range.
    pub fn device_depth(mut self, slots: usize) -> Self {
        self.backend.device_depth = slots;
        self
    }
}

/// Returns what the waiting caller calls to fill a part of the batch. `fields` are its own readers.
fn help(shared: Arc<Shared>, mut fields: Vec<FieldReader>) -> Help {
    Box::new(move || {
        let fill = |field: usize, part: &BatchIndices, room: Room<'_>| {
            fields.get_mut(field).is_some_and(|field| field.help(part, room).is_ok())
        };
        shared.is_on().then(|| shared.help(fill))
    })
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
