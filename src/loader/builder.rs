//! Builds a loader: checks the options, allocates the slots, starts the threads.

use std::alloc;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::{iter, mem};

#[cfg(feature = "cuda")]
use twinbuf_cuda::cudarc::driver::CudaContext;
use twinbuf_mmap::{Buffer, Plan, ReadMode};

use super::batch::Records;
use super::epochs::{Loader, Order};
use super::layout::{ALIGN, Depths, Layout};
use super::reader::{Driven, FieldReader, Reader, Transforming};
use crate::dataset::{Dataset, Fields, check_fields, fingerprint_fields};
use crate::error::Error;
use crate::loader::checkpoint::Identity;
use crate::observe::report::{Kind, Report};
use crate::pipe::AnySource;
#[cfg(feature = "cuda")]
use crate::pipe::device::Cuda;
use crate::pipe::memory::{Backend, Host, LEAST, Memory, MemoryLimit, check_memory, too_large};
use crate::pipe::options::{Options, common};
use crate::pipe::{Pipe, Setup};
use crate::thread::{MAX_WORKERS, processors};
use crate::transform::RecordTransform;

/// By default, a loader with one worker has only two slots if they have this many bytes or more. A further one hides the
/// time that a sleeping thread needs to wake up, which does not matter beside the load of a larger batch.
const SMALL: usize = 16 << 20;

/// By default, a loader has as many small slots of files as fit this many bytes, 16 at most. On a busy machine a
/// thread waits for a processor, and with more slots the others can go on meanwhile. With batches of 128 KiB, two
/// processors and two other busy threads, 16 slots were 1.4 times as fast as 4; on a quiet machine they were as fast.
/// A Python loop holds a batch while it asks for the next one: with images in full shuffle from the page cache it was
/// 1.2 times as fast with 4 slots as with 3. Where three slots share a huge page ([`Buffer::several`]) and four do not
/// fit it, three are faster.
const MANY: usize = 2 << 20;

/// Builds a [`Loader`]. [`Loader::builder`] returns it.
#[must_use = "a builder does nothing until `build`"]
pub struct LoaderBuilder<B: Backend = Host> {
    backend: B,
    pub(super) options: Options,
    pub(super) own: Own,
}

/// The options of a loader that no other front end has.
pub(super) struct Own {
    /// One for each field.
    datasets: Vec<Box<dyn Dataset>>,
    pub(super) plan: Plan,
    pub(super) workers: usize,
    /// `None`: see [`LoaderBuilder::depth`].
    pub(super) depth: Option<usize>,
    pub(super) hints: bool,
    read_mode: ReadMode,
    /// The transforms of each field, in the order of application.
    transforms: BTreeMap<usize, Vec<Box<dyn RecordTransform>>>,
    /// The caller's memory for the host slots.
    lent: Option<Vec<Buffer>>,
    pub(super) memory_limit: Option<MemoryLimit>,
    driven: bool,
}

impl Loader {
    /// Returns a builder for a loader that reads the batches of `plan` from `dataset`. Defaults: one worker, slots by
    /// their size ([`depth`](LoaderBuilder::depth)), overlap and prefetch on, no transform, no trace.
    ///
    /// A tuple of data sets gives batches with several [`Fields`].
    pub fn builder(dataset: impl Fields, plan: Plan) -> LoaderBuilder {
        let own = Own {
            datasets: dataset.into_fields(),
            plan,
            workers: 1,
            depth: None,
            hints: true,
            read_mode: ReadMode::Auto,
            transforms: BTreeMap::new(),
            lent: None,
            memory_limit: None,
            driven: false,
        };
        LoaderBuilder { backend: Host, options: Options::default(), own }
    }
}

impl<B: Backend> LoaderBuilder<B> {
    common!();

    /// Sets the number of threads that read, transform and decode batches, 1 to [`MAX_WORKERS`]. Default: 1.
    /// `build` returns [`Error::Option`] for a value out of range.
    ///
    /// A worker that is free takes the next batch: while slots are free, a slow batch does not delay the others. The
    /// caller receives the batches in the plan's order. Their records are the same for any number of workers.
    ///
    /// Use several workers if loading a batch takes more CPU time than a training step, for example because of
    /// decoding or slow transforms, or if each read waits for long, as from an object store. One worker is enough to
    /// read records without further processing. With [`overlap`](Self::overlap) set to `false`, the caller's thread is
    /// the only worker.
    ///
    /// While the files are in memory, a caller that waits for a batch may also read ([`Loader`]). Workers for which it
    /// and the others leave no processor then rest for 1 ms after each batch that takes less.
    ///
    /// Each worker but the first uses a clone of the data set ([`Dataset::try_clone`]) and of every transform
    /// ([`RecordTransform::try_clone`]). With overlap, `build` returns [`Error::Option`] if there are several workers
    /// and one of these cannot be cloned.
    pub fn workers(mut self, threads: usize) -> Self {
        self.own.workers = threads;
        self
    }

    /// Starts no loading threads: [`Loader::driven`] returns the [`workers`](Self::workers), and whoever has them lets
    /// them fill slots. Without overlap there is one, and the caller drives it: after
    /// [`Epochs::try_next`](super::Epochs::try_next) returned `Pending`, [`Driven::try_next`](super::Driven::try_next)
    /// fills the slot.
    ///
    /// ```
    /// use std::io;
    /// use std::sync::{Arc, Mutex};
    ///
    /// use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan};
    ///
    /// /// Record `i` is the byte `i`, which the driver makes.
    /// #[derive(Clone, Default)]
    /// struct Bytes(Arc<Mutex<Option<Made>>>);
    ///
    /// enum Made {
    ///     Wanted(Vec<u64>),
    ///     There(Vec<u8>),
    /// }
    ///
    /// impl Dataset for Bytes {
    ///     fn records(&self) -> u64 {
    ///         100
    ///     }
    ///     fn record_bytes(&self) -> usize {
    ///         1
    ///     }
    ///     fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
    ///         let mut made = self.0.lock().unwrap();
    ///         if let Some(Made::There(bytes)) = made.take() {
    ///             out.copy_from_slice(&bytes);
    ///             return Ok(out.len());
    ///         }
    ///         *made = Some(Made::Wanted(batch.runs().flatten().collect()));
    ///         Err(io::Error::from(io::ErrorKind::WouldBlock).into())
    ///     }
    /// }
    ///
    /// let data = Bytes::default();
    /// let plan = Plan::builder(100).batch(10).build()?;
    /// let mut loader = Loader::builder(data.clone(), plan).driven().build()?;
    /// let mut worker = loader.driven().remove(0);
    /// let driver = std::thread::spawn(move || {
    ///     while worker.next() {
    ///         let mut made = data.0.lock().unwrap();
    ///         let Some(Made::Wanted(records)) = made.take() else { continue };
    ///         *made = Some(Made::There(records.into_iter().map(|record| record as u8).collect()));
    ///     }
    /// });
    /// for (step, batch) in loader.epoch(0).enumerate() {
    ///     assert_eq!(batch?[9] as usize, 10 * step + 9);
    /// }
    /// loader.close()?;
    /// driver.join().unwrap();
    /// # Ok::<(), BoxError>(())
    /// ```
    pub fn driven(mut self) -> Self {
        self.own.driven = true;
        self
    }

    /// Sets the number of host slots. Each slot takes the memory of the largest batch.
    ///
    /// Default: two more than [`workers`](Self::workers), one of them for the batch in use; 2 for one worker with slots
    /// of 16 MiB and more, and without overlap. With overlap, smaller slots that are filled from files alone (no
    /// transform of the caller's, no [`driven`](Self::driven), no [`memory_limit`](Self::memory_limit)) are as many as
    /// fit 2 MiB in whole pages of 4 KiB, 16 at most; if those are fewer than two more than workers, three more than
    /// workers.
    ///
    /// With overlap the loader needs at least one more than workers, without it one; `build` returns [`Error::Option`]
    /// for fewer. More slots absorb bursts.
    pub fn depth(mut self, slots: usize) -> Self {
        self.own.depth = Some(slots);
        self
    }

    /// Uses the caller's memory for the host slots, for example a tensor library's pinned memory or registered pages
    /// ([`Buffer::lent`]). Default: the loader allocates the slots.
    ///
    /// [`wanted_slots`](Self::wanted_slots) returns the number of buffers, and the minimum size and alignment of
    /// each. `build` returns [`Error::Option`] if the number differs, or if a buffer is too small or misaligned.
    /// Batches in host memory stay in these buffers. The buffers are dropped together, after the loader and every such
    /// batch have been dropped.
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
    /// assert_eq!((count, slot.size()), (16, 16 * 64));
    /// let slots: Vec<Buffer> = (0..count).filter_map(|_| Buffer::new(slot.size())).collect(); // or `Buffer::lent`
    /// let mut loader = builder.slots(slots).build()?;
    /// assert_eq!(loader.epoch(0).count(), 4);
    /// # Ok::<(), twinbuf::BoxError>(())
    /// ```
    pub fn slots(mut self, memory: Vec<Buffer>) -> Self {
        self.own.lent = Some(memory);
        self
    }

    /// Returns the number of host slots that [`build`](Self::build) needs with the present options, and the minimum
    /// size and alignment of each slot in bytes. Use it to allocate the buffers for [`slots`](Self::slots).
    ///
    /// The number is [`depth`](Self::depth). A slot holds one batch after its transforms.
    ///
    /// Set all other options first, including options from the environment ([`from_env`](Self::from_env)). This
    /// method allocates no slots and does not count toward the [`memory_limit`](Self::memory_limit).
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: an option is out of range, a data set does not fit the others, the plan or its own element
    ///   type, or the slots exceed the memory of the machine.
    /// - [`Error::Transform`]: a transform does not accept the records.
    pub fn wanted_slots(&self) -> Result<(usize, alloc::Layout), Error> {
        let layout = self.layout()?;
        let slot = alloc::Layout::from_size_align(layout.slot, ALIGN).map_err(|_| too_large(&layout))?;
        Ok((layout.depths.host, slot))
    }

    /// Sets whether the loader requests the records of the next batches from the files ahead of time. Default: `true`.
    /// It has no effect without [`overlap`](Self::overlap), or for data sets that are not files.
    ///
    /// The loader never sets `MADV_SEQUENTIAL`: the kernel may then free pages soon after they are read (`madvise(2)`),
    /// and later epochs need them.
    pub fn hints(mut self, hints: bool) -> Self {
        self.own.hints = hints;
        self
    }

    /// Sets how files are read: through the page cache, or past it. Default: [`ReadMode::Auto`]. The
    /// [`Report`](crate::Report) shows and explains the choice.
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.own.read_mode = mode;
        self
    }

    /// Adds a transform of the records. Several transforms run in the order in which they were added. Default: no
    /// transform.
    ///
    /// Transforms run on the thread that fills the slot, on parts of at most 256 KiB as read, or one record, directly
    /// after each part was read. That is a worker's thread, the caller's or a driver's. Only
    /// [`Transform`](crate::transform::Transform) and [`Convert`](crate::transform::Convert) also run on a caller's
    /// thread that helps with overlap. The slot receives the transformed records. If there are several data sets, this
    /// transform applies to field 0; see [`transform_field`](Self::transform_field).
    pub fn transform(self, transform: impl RecordTransform + 'static) -> Self {
        self.transform_field(0, transform)
    }

    /// Adds a transform of one field. Fields are numbered from 0: in a data set `(images, labels)`, field 0 is the
    /// images. The other fields are unchanged. Each field can have its own transforms.
    ///
    /// `build` returns [`Error::Option`] if the field does not exist.
    pub fn transform_field(mut self, field: usize, transform: impl RecordTransform + 'static) -> Self {
        self.own.transforms.entry(field).or_default().push(Box::new(transform));
        self
    }

    /// Limits the memory of the slots and buffers, in bytes. To share one limit between loaders, pass clones of a
    /// [`MemoryLimit`]. Default: no limit.
    ///
    /// The loader counts the following memory: [`depth`](Self::depth) batches, `device_depth` batches on a device, and
    /// the scratch buffers of the transforms, for each worker and for a caller that helps. It also counts the memory of
    /// the readers of files ([`Reader::memory`](twinbuf_mmap::Reader::memory)) and the memory that the caller took out
    /// of a slot with [`Batch::into_buffer`](crate::Batch::into_buffer). It does not count the page cache. Memory is
    /// counted until the loader and its last batch are dropped, and memory taken out until that is dropped.
    ///
    /// `build` returns [`Error::Memory`] if the loader needs more than the limit has left.
    pub fn memory_limit(mut self, limit: impl Into<MemoryLimit>) -> Self {
        self.own.memory_limit = Some(limit.into());
        self
    }

    /// Allocates the slots and starts the threads.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: an option is out of range, a data set does not fit the others, the plan or its own element
    ///   type, the data set or a transform cannot be cloned for several workers, the caller's [`slots`](Self::slots)
    ///   do not fit, or the slots exceed the memory of the machine or cannot be allocated.
    /// - [`Error::Transform`]: a transform does not accept the records.
    /// - [`Error::Open`]: the files cannot be opened as [`read_mode`](Self::read_mode) requires.
    /// - [`Error::Memory`]: the slots and buffers exceed what the [`memory_limit`](Self::memory_limit) has left.
    /// - [`Error::Device`]: a call of the device's driver failed, for example to allocate slots, or the thread that
    ///   copies could not be started.
    /// - [`Error::Fingerprint`]: [`Dataset::fingerprint`] failed.
    /// - [`Error::Trace`]: the trace file could not be created.
    /// - [`Error::Spawn`]: the system could not start a worker's thread.
    pub fn build(self) -> Result<Loader<B>, Error> {
        let mut layout = self.layout()?;
        let Self { backend, mut options, own } = self;
        let Own { mut datasets, plan, hints, read_mode, mut transforms, lent, memory_limit, driven, .. } =
            own;
        let (Depths { readers, helps, host: depth, .. }, slot) = (layout.depths, layout.slot);
        let record_bytes: usize = datasets.iter().map(|dataset| dataset.record_bytes()).sum();
        check_slots(lent.as_deref(), depth, slot)?;
        let files = datasets.iter().map(|dataset| {
            let files = dataset.files().map(|files| twinbuf_mmap::Reader::new(files, &plan, read_mode));
            Ok(files.transpose()?.map(Arc::new))
        });
        let files: Vec<_> = files.collect::<Result<_, _>>().map_err(Error::Open)?;
        let memory = files.iter().flatten().map(|files: &Arc<twinbuf_mmap::Reader>| files.memory());
        layout.ahead = memory.fold(0, u64::saturating_add);
        let limited = memory_limit.is_some();
        layout.taken = memory_limit.map(|limit| layout.take(limit)).transpose()?;
        (layout.lent, layout.name) = (lent.is_some(), options.name.clone());
        let fingerprint = fingerprint_fields(&mut datasets)?;
        let trace = options.open(plan.rank(), plan.world())?;
        let locators: Vec<_> = datasets.iter().map(|dataset| dataset.locator()).collect();
        let mut readers: Vec<Reader> = (0..readers).map(|_| Reader::default()).collect();
        let scratch = layout.fields.iter().flat_map(|field| field.scratch.iter().copied());
        let scratch: Vec<_> = scratch.flat_map(|bytes| iter::repeat_n(bytes, readers.len())).collect();
        let mut scratch = Buffer::several(&scratch).into_iter().flatten();
        for (index, (dataset, files)) in datasets.into_iter().zip(&files).enumerate() {
            let datasets = copies(dataset, readers.len(), "the data set", Dataset::try_clone)?;
            for (reader, dataset) in readers.iter_mut().zip(datasets) {
                reader.fields.push(FieldReader { dataset, files: files.clone(), transforms: Vec::new() });
            }
            for transform in transforms.remove(&index).into_iter().flatten() {
                let transforms =
                    copies(transform, readers.len(), "the transform", RecordTransform::try_clone)?;
                for (reader, transform) in readers.iter_mut().zip(transforms) {
                    let scratch = scratch.next().ok_or_else(|| too_large(&layout))?;
                    reader.fields[index].transforms.push(Transforming { transform, scratch });
                }
            }
        }
        let files: Vec<_> = files.into_iter().flatten().collect();
        let (needs_clones, overlap) = (readers.len() == 1, options.overlaps());
        let helper = if overlap && helps { readers.pop() } else { None };
        let memory = Memory { slot, depth, lent, sum: &layout, trace: trace.clone(), options: &options };
        let counted = files.clone();
        let add_reads = Box::new(move |mut report: Report| {
            report.workers_with_overlap = own.workers;
            (report.needs_clones, report.helps, report.limited) = (needs_clones, helps, limited);
            report.with_reading(&counted)
        });
        let any = |reader| Box::new(reader) as AnySource<B::Ring<Records>>;
        let sides = backend.sides(memory)?;
        let drivers = if driven { mem::take(&mut readers) } else { Vec::new() };
        let mut pipe = Pipe::start(Setup {
            sides,
            sources: readers.into_iter().map(any).collect(),
            driven: drivers.len(),
            helper: helper.map(any),
            options,
            trace,
            kind: Kind::Batches,
            depth,
            locate: Box::new(move |field, record| locators.get(field)?.as_ref()?(record)),
            add_reads,
        })?;
        let identity = Identity::new(&plan, record_bytes, fingerprint);
        let driven = pipe.driven().into_iter().zip(drivers);
        let driven = driven.map(|(worker, reader)| Driven::new(worker, reader)).collect();
        let mut order = Order::new(plan, identity, layout, files);
        order.hints = hints && overlap;
        Ok(Loader { pipe, order, driven })
    }

    /// Checks the options against each other and against the data sets, and computes the memory that they need.
    fn layout(&self) -> Result<Layout, Error> {
        let Own { datasets, plan, transforms, workers, depth, memory_limit, .. } = &self.own;
        if !(1..=MAX_WORKERS).contains(workers) {
            let wanted = format!("1 to {MAX_WORKERS} threads");
            return Err(Error::option("workers", wanted, workers.to_string()));
        }
        check_fields(datasets)?;
        let records = datasets[0].records();
        if plan.list().range().end > records {
            let wanted = format!("a plan for at most the data set's {records} records");
            return Err(Error::option("plan", wanted, format!("one for {}", plan.list().range().end)));
        }
        if let Some(field) = transforms.keys().find(|&&field| field >= datasets.len()) {
            let wanted = format!("a field below {}", datasets.len());
            return Err(Error::option("transform_field", wanted, field.to_string()));
        }
        let overlap = self.options.overlaps();
        let (workers, least) = if overlap { (*workers, workers + 1) } else { (1, 1) };
        if let Some(depth) = depth.filter(|&depth| depth < least) {
            let wanted = format!("at least {least} slots for {workers} workers");
            return Err(Error::option("depth", wanted, depth.to_string()));
        }
        let host = depth.unwrap_or(least + 1);
        // Threads fill the slots from files alone, without foreign code.
        let files = datasets.iter().all(|dataset| dataset.files().is_some() && dataset.try_clone().is_some());
        let ours = transforms.values().flatten().all(|own| own.pays() && own.try_clone().is_some());
        let files = files && ours && !self.own.driven;
        // Then a waiting caller may fill slots too, if there is a processor for it.
        let (helps, device) = (files && processors() > 1, self.backend.device_depth());
        let readers = workers + usize::from(overlap && helps);
        let each = datasets.iter().enumerate();
        let each = each.map(|(i, dataset)| (&**dataset, transforms.get(&i).map_or(&[][..], Vec::as_slice)));
        let mut layout = Layout::new(plan, Depths { readers, helps, host, device }, each)?;
        if depth.is_none() && workers == 1 && layout.slot >= SMALL {
            layout.depths.host = 2;
        } else if depth.is_none() && layout.slot < SMALL && memory_limit.is_none() && overlap && files {
            let many = 16.min(MANY / layout.slot.max(1).next_multiple_of(LEAST));
            layout.depths.host = if many < workers + 2 { workers + 3 } else { many };
        }
        check_memory("depth", layout.depths.host, layout.slot.max(LEAST), &layout)?;
        Ok(layout)
    }
}

#[cfg(feature = "cuda")]
impl LoaderBuilder {
    /// Copies each batch to the device of `context` on a separate stream, while the previous batch is in use.
    ///
    /// The host slots are page-locked, unless they are the caller's ([`slots`](Self::slots)). There are also two
    /// device slots of the same size by default ([`device_depth`](LoaderBuilder::device_depth)). Epochs yield
    /// [`DeviceBatch`](crate::loader::DeviceBatch)es. Without overlap the loader has no thread: it reads and copies
    /// each batch when the caller asks for it.
    ///
    /// Page-locking is slow: keep the loader for all epochs. On Linux, page-locked slots are on the NUMA node of
    /// the thread that calls [`build`](Self::build), unless a memory policy (`numactl`) selects another node.
    ///
    /// The [`Report`](crate::Report) measures the time that the caller waits, not the work of the device. If the
    /// loop waits for its work at the end of each step, for example by reading the loss, that time counts as use.
    ///
    /// [`twinbuf::cuda::context`](crate::cuda::context) creates a context, and returns an error if there is no driver.
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
        LoaderBuilder { backend: Cuda { context, device_depth: 2 }, options: self.options, own: self.own }
    }
}

#[cfg(feature = "cuda")]
impl LoaderBuilder<Cuda> {
    /// Sets the number of device slots. Default: 2. With one slot, a batch is copied when the one before has been dropped:
    /// copies do not overlap with use, and reads still do. `build` returns [`Error::Option`] for 0.
    pub fn device_depth(mut self, slots: usize) -> Self {
        self.backend.device_depth = slots;
        self
    }

    /// Sets whether copies have a stream of their own. Default: `true`. With `false`, they are issued on the context's
    /// default stream, in order with the work on it: use it to measure what the copy stream gains, in a loop that uses the
    /// batches on `ctx.default_stream()`. Compare wall times: those of copies may include work of the loop. See
    /// [`Uploader::copy_stream`](crate::cuda::Uploader::copy_stream).
    pub fn copy_stream(mut self, copy_stream: bool) -> Self {
        self.options.copy_stream = copy_stream;
        self
    }
}

/// Returns an error if the caller's memory cannot be used for `wanted` slots of `bytes` bytes.
fn check_slots(slots: Option<&[Buffer]>, wanted: usize, bytes: usize) -> Result<(), Error> {
    let Some(slots) = slots else { return Ok(()) };
    let refuse = |wanted, found| Err(Error::option("slots", wanted, found));
    if slots.len() != wanted {
        return refuse(format!("{wanted} buffers: `depth`"), slots.len().to_string());
    }
    if let Some(slot) = slots.iter().find(|slot| slot.len() < bytes) {
        return refuse(format!("buffers of at least {bytes} bytes"), slot.len().to_string());
    }
    match slots.iter().find(|slot| slot.as_ptr().addr() % ALIGN != 0) {
        Some(slot) => refuse(format!("buffers at multiples of {ALIGN}"), format!("{:p}", slot.as_ptr())),
        None => Ok(()),
    }
}

/// Returns `first` and a clone of it for each further worker and for a caller that helps.
fn copies<T: ?Sized>(
    first: Box<T>,
    workers: usize,
    what: &str,
    try_clone: impl Fn(&T) -> Option<Box<T>>,
) -> Result<Vec<Box<T>>, Error> {
    let mut all = vec![first];
    let refuse =
        || Error::option("workers", format!("1 thread: {what} has no `try_clone`"), workers.to_string());
    while all.len() < workers {
        all.push(try_clone(&all[0]).ok_or_else(refuse)?);
    }
    Ok(all)
}

debug!([B: Backend] LoaderBuilder[B], |builder|
    backend: builder.backend, plan: builder.own.plan, options: builder.options, workers: builder.own.workers,
    depth: builder.own.depth);
