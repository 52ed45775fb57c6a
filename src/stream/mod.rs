//! Streams of model weights: groups of tensors in the order of use. A thread reads the next group while the caller
//! uses the current group.
//!
//! A stream is a loader whose batches are groups of tensors. It has the same thread, report, errors and trace as a
//! loader. One pass over all groups is an epoch.

#[cfg(feature = "cuda")]
mod device;
mod group;
mod pass;
mod schedule;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use twinbuf_mmap::{Buffer, Reader};
pub use twinbuf_mmap::{Groups, ReadMode, Tensor, Tensors};

#[cfg(feature = "cuda")]
pub use self::device::DeviceView;
pub use self::group::{Group, View};
pub use self::pass::Pass;
use self::schedule::{Order, Schedule};
#[cfg(feature = "cuda")]
pub use crate::backend::Cuda;
use crate::backend::sealed::SlotGuard;
use crate::backend::{Backend, Host, too_large};
use crate::batch::memory::Taken;
use crate::error::Error;
use crate::loader::MemoryLimit;
use crate::observe::breakdown::Breakdown;
use crate::observe::log::What;
use crate::observe::report::Report;
use crate::observe::trace::Trace;
use crate::slot::{MAX_HOST_DEPTH, Naming, Origin, Ticket};
use crate::stage::worker::{Load, Source};
use crate::stage::{self, HELD_TIMEOUT, Stage};

/// Returns a builder for a stream of tensor groups, for example the layers of a model in the order of use. Requires
/// the feature `safetensors`.
///
/// Defaults: two slots, overlap on, no memory limit, no group [kept in memory](StreamBuilder::keep), each pass
/// starts to read when [`pass`](TensorStream::pass) is called.
///
/// # Examples
///
/// ```
/// use twinbuf::stream::Tensors;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let header = r#"{"layers.0.up":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
/// #                  "layers.1.up":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#;
/// # let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// # file.extend(header.bytes());
/// # file.extend([1.0f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat());
/// # std::fs::write(&path, &file)?;
/// let model = Tensors::open([&path])?; // or `model.safetensors.index.json`, or GGUF
/// let layer = |name: &str| name.split('.').nth(1)?.parse::<u32>().ok();
/// let mut layers = twinbuf::stream(model.groups_by(layer)?).cycle().memory_limit(1 << 30).build()?;
/// let mut sum = 0.0;
/// for _token in 0..3 {
///     for layer in layers.pass() {
///         let layer = layer?; // in memory; the next one is being read
///         sum += layer.tensor("up")?.cast::<f32>()?.iter().sum::<f32>();
///     }
/// }
/// assert_eq!(sum, 3.0 * 10.0);
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
pub fn stream(groups: Groups) -> StreamBuilder {
    let options = Options {
        groups,
        name: None,
        order: None,
        cycle: false,
        depth: 2,
        keep: None,
        overlap: true,
        read_mode: ReadMode::Auto,
        memory_limit: None,
        held_timeout: HELD_TIMEOUT,
        trace: None,
    };
    StreamBuilder { backend: Host, options }
}

/// Builds a [`TensorStream`]. [`stream`] returns it.
#[must_use = "a builder does nothing until `build`"]
pub struct StreamBuilder<B: Backend = Host> {
    backend: B,
    options: Options,
}

struct Options {
    groups: Groups,
    name: Option<String>,
    order: Option<Order>,
    cycle: bool,
    depth: usize,
    keep: Option<usize>,
    overlap: bool,
    read_mode: ReadMode,
    memory_limit: Option<MemoryLimit>,
    held_timeout: Duration,
    trace: Option<Trace>,
}

impl<B: Backend> StreamBuilder<B> {
    /// Sets the name of the stream in errors, reports and traces. Default: no name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.options.name = Some(name.into());
        self
    }

    /// Reads continuously across passes: the stream reads the first group of the next pass while the caller uses the
    /// last group of the current pass. Default: reading starts with each call of [`pass`](TensorStream::pass).
    pub fn cycle(mut self) -> Self {
        self.options.cycle = true;
        self
    }

    /// Sets the order of the groups in each pass. `order(pass, step)` returns the index of a group. Default: the
    /// order of [`Groups`] in each pass.
    ///
    /// `order` must return each group exactly once per pass. Otherwise the pass ends with [`Error::Option`]. The
    /// caller's thread and the reading thread both call `order`; it must return the same result for the same
    /// arguments. Example: `move |pass, step| if pass % 2 == 0 { step } else { last - step }` alternates between
    /// forward and backward order.
    pub fn order(mut self, order: impl Fn(u64, usize) -> usize + Send + Sync + 'static) -> Self {
        self.options.order = Some(Box::new(order));
        self
    }

    /// Sets the number of slots, 1 to 8. Default: 2.
    ///
    /// Each slot holds the largest group that is not [kept in memory](Self::keep). A group in use occupies one slot.
    /// The reader fills the other slots. `build` returns [`Error::Option`] if out of range.
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.options.depth = slots;
        self
    }

    /// Limits the memory of the stream, in bytes: slots (those of a device too), groups [kept in memory](Self::keep),
    /// and buffers for direct I/O. The page cache does not count. Default: no limit.
    ///
    /// With a limit, the stream uses the memory that the slots and buffers leave to keep groups in memory. `build`
    /// returns [`Error::Memory`] if the slots and buffers alone exceed the limit.
    pub fn memory_limit(mut self, limit: impl Into<MemoryLimit>) -> Self {
        self.options.memory_limit = Some(limit.into());
        self
    }

    /// Sets the maximum number of groups that stay in memory. Default: with a [`memory_limit`](Self::memory_limit),
    /// the number of groups that fit the limit; otherwise 0. A value above the number of groups keeps all groups.
    ///
    /// A group kept in memory is read once and stays until the stream and the last [`Group`] are dropped. It does
    /// not occupy a slot. If only some groups are kept, they are spread evenly over the pass.
    pub fn keep(mut self, groups: usize) -> Self {
        self.options.keep = Some(groups);
        self
    }

    /// Sets whether a thread reads groups ahead of the caller. Default: `true`.
    ///
    /// With `false`, the call that asks for a group reads it on the caller's thread.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.options.overlap = overlap;
        self
    }

    /// Sets how files are read: through the page cache, or past it (direct I/O). Default: [`ReadMode::Auto`],
    /// through the page cache if all groups fit, otherwise past it. The [`Report`] shows the choice.
    ///
    /// With direct I/O, the disk writes to the slot, with one request per contiguous run of tensors of 4 MiB or
    /// more. Do not call `fork` during a read (NOTES in `open(2)`).
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.options.read_mode = mode;
        self
    }

    /// Sets how long to wait for the caller to drop an earlier group when the stream needs its slot. Default: 10 s.
    ///
    /// Another thread can drop the group during the wait. After the timeout the pass ends with [`Error::SlotHeld`].
    /// If the waiting thread itself holds the group, the
    /// stream waits for the full timeout.
    pub fn held_timeout(mut self, timeout: Duration) -> Self {
        self.options.held_timeout = timeout;
        self
    }

    /// Writes a Chrome trace to a file. Default: no trace.
    pub fn trace(mut self, trace: impl Into<Trace>) -> Self {
        self.options.trace = Some(trace.into());
        self
    }

    /// Allocates the slots and starts the thread.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: there is no group, [`host_depth`](Self::host_depth) is out of range, or the slots cannot
    ///   be allocated.
    /// - [`Error::Memory`]: the slots exceed the [`memory_limit`](Self::memory_limit).
    /// - [`Error::Open`]: the files cannot be read as [`read_mode`](Self::read_mode) requires.
    /// - [`Error::Trace`]: the trace file could not be created.
    /// - [`Error::Spawn`]: the system could not start a thread.
    /// - [`Error::Device`]: a call of the device's driver failed.
    pub fn build(self) -> Result<TensorStream<B>, Error> {
        let Self { backend, options } = self;
        let Options { groups, name, order, cycle, depth, keep, overlap, read_mode, .. } = options;
        if !(1..=MAX_HOST_DEPTH).contains(&depth) {
            let wanted = format!("1 to {MAX_HOST_DEPTH} slots");
            return Err(Error::Option { option: "host_depth", wanted, found: depth.to_string() });
        }
        if groups.is_empty() {
            let (wanted, found) = ("at least one group".to_string(), "none".to_string());
            return Err(Error::Option { option: "groups", wanted, found });
        }
        let left = options.memory_limit.as_ref().map(MemoryLimit::left);
        let device_depth = backend.device_depth();
        let schedule = Arc::new(Schedule::new(groups, order, (depth, device_depth), left, keep));
        let sum = schedule.to_string();
        let wanted = schedule.memory().ok_or_else(|| too_large(&sum))?;
        let taken = options.memory_limit.map(|limit| limit.take(wanted)).transpose();
        let taken =
            taken.map_err(|(limit, taken)| Error::Memory { sum: sum.clone(), wanted, limit, taken })?;
        let taken = taken.map(Arc::new);
        let groups = schedule.groups().clone();
        let reader = Arc::new(Reader::of_groups(groups, read_mode, wanted).map_err(Error::Open)?);
        // A device has page-locked slots.
        let slots = (0..depth).filter(|_| device_depth == 0).map(|_| Buffer::untouched(schedule.slot()));
        let slots: Vec<Buffer> = slots.collect::<Option<_>>().ok_or_else(|| too_large(&sum))?;
        let trace =
            options.trace.map(|trace| trace.open(name.as_deref(), 0, 1)).transpose().map_err(Error::trace)?;
        let streamed = schedule.streamed();
        let kept: Kept = (0..schedule.groups().len()).map(|_| OnceLock::new()).collect();
        let source = Reading {
            reader: reader.clone(),
            schedule: schedule.clone(),
            kept: kept.clone(),
            begun: None,
            pass: None,
            _taken: taken.clone(),
        };
        let options = stage::Options {
            naming: Naming { loader: name.map(Into::into), rounds: false },
            overlap,
            held_timeout: options.held_timeout,
            trace,
            breakdown: Breakdown::off(),
            steps: Box::new(move |_, _| streamed),
            slots: (schedule.slot(), depth, &sum),
            lent: (device_depth == 0).then_some(slots),
            sending: None,
            sends: false,
            help: None,
        };
        let mut stage = Stage::start(backend, vec![Box::new(source)], options)?;
        stage.recorder().stream();
        Ok(TensorStream { stage, schedule, reader, kept, cycle, passes: 0, flowing: None, taken })
    }
}

impl<B: Backend> fmt::Debug for StreamBuilder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Options { groups, cycle, order, depth, keep, overlap, read_mode, memory_limit, trace, .. } =
            &self.options;
        f.debug_struct("StreamBuilder")
            .field("groups", groups)
            .field("cycle", cycle)
            .field("order", &order.is_some())
            .field("host_depth", depth)
            .field("keep", keep)
            .field("overlap", overlap)
            .field("read_mode", read_mode)
            .field("memory_limit", memory_limit)
            .field("trace", trace)
            .finish_non_exhaustive()
    }
}

/// Reads groups of tensors in the order of use. A thread reads the next group while the caller uses the current
/// group.
///
/// The thread reads into slots that are allocated once and reused. The thread never overwrites a slot while its
/// [`Group`] exists. Groups [kept in memory](StreamBuilder::keep) are read once.
///
/// Dropping the stream waits at most 10 s for the read in progress and joins the thread. After 10 s it detaches the
/// thread.
pub struct TensorStream<B: Backend = Host> {
    stage: Stage<B>,
    schedule: Arc<Schedule>,
    reader: Arc<Reader<Groups>>,
    kept: Kept,
    cycle: bool,
    /// Passes begun so far.
    passes: u64,
    /// The first group of the next pass, if it follows the last one without a gap.
    flowing: Option<Ticket>,
    /// Shared with the groups, and dropped after what it counts.
    taken: Option<Arc<Taken>>,
}

/// The memory of the groups that are kept, as far as they have been read.
type Kept = Arc<[OnceLock<Arc<Buffer>>]>;

impl<B: Backend> TensorStream<B> {
    /// Iterates over the groups of the next pass. [`Pass`] lists the errors.
    ///
    /// Reading starts with this call, or earlier with [`cycle`](StreamBuilder::cycle). If the caller drops the
    /// iterator early, the pass ends: the next call starts a new pass at its first group.
    ///
    /// # Panics
    ///
    /// If the [order](StreamBuilder::order) function panics.
    pub fn pass(&mut self) -> Pass<'_, B> {
        Pass::new(self)
    }

    /// Returns the groups of the stream.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        self.schedule.groups()
    }

    /// Returns the number of groups that stay in memory after they have been read once; see
    /// [`keep`](StreamBuilder::keep).
    #[must_use]
    pub fn kept(&self) -> usize {
        self.schedule.kept()
    }

    /// Returns a report of where the time went so far. In it, passes are epochs and groups are batches. The time in
    /// which the caller uses a group [kept in memory](StreamBuilder::keep) counts toward the previous group that was
    /// read.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut report = self.stage.report();
        report.reading += self.reader.stats();
        report.choices = vec![self.reader.choice()];
        report
    }

    /// Joins the thread and returns a pending error. Waits without a time limit for the read in progress. Dropping
    /// the stream also joins the thread, but waits at most 10 s.
    ///
    /// # Errors
    ///
    /// Returns the error of a group read ahead that the caller has not received: [`Error::Load`] or
    /// [`Error::Panicked`]. Otherwise, returns [`Error::Trace`] if the trace could not be written; delivered groups
    /// remain valid.
    pub fn close(self) -> Result<(), Error> {
        self.stage.close(None, &[])
    }
}

impl<B: Backend> fmt::Debug for TensorStream<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorStream")
            .field("groups", self.groups())
            .field("kept", &self.kept())
            .field("cycle", &self.cycle)
            .field("overlap", &self.stage.gate().is_some())
            .field("choice", &self.reader.choice())
            .finish_non_exhaustive()
    }
}

/// The files as the source of a stage.
struct Reading {
    reader: Arc<Reader<Groups>>,
    schedule: Arc<Schedule>,
    kept: Kept,
    /// The series of passes that the reader has the order of.
    begun: Option<u64>,
    /// The pass that is read.
    pass: Option<Streamed>,
    _taken: Option<Arc<Taken>>,
}

/// The groups of a pass that come through the slots.
struct Streamed {
    /// The pass, and how many groups come through the slots.
    of: (u64, u64),
    /// All groups of the pass.
    all: u64,
    /// Each with its place in the pass.
    groups: Vec<(u64, usize)>,
}

impl Streamed {
    fn get(&self, ticket: Ticket) -> Option<(u64, usize)> {
        let step = usize::try_from(ticket.step).ok().filter(|_| self.of == (ticket.epoch, ticket.steps))?;
        self.groups.get(step).copied()
    }
}

impl Reading {
    /// The group of a ticket.
    fn group(&mut self, ticket: Ticket) -> Result<usize, Error> {
        let of = (ticket.epoch, ticket.steps);
        if self.pass.as_ref().is_none_or(|pass| pass.of != of) {
            let order = self.schedule.pass(ticket.epoch)?;
            let all = order.len() as u64;
            let mut groups: Vec<_> = (0..).zip(order).collect();
            if ticket.steps != all {
                groups.retain(|&(_, group)| self.schedule.is_streamed(group));
            }
            self.pass = Some(Streamed { of, all, groups });
        }
        // Both sides count the same steps.
        Ok(self.pass.as_ref().and_then(|pass| pass.get(ticket)).map_or(usize::MAX, |(_, group)| group))
    }
}

impl Source<[u8]> for Reading {
    fn log(&self) -> (What, &'static str) {
        (What::Read, "read")
    }

    /// With the step that [`Pass`] counts: among all groups of the pass.
    fn placed(&self, ticket: Ticket) -> Ticket {
        let found = self.pass.as_ref().and_then(|pass| Some((pass.all, pass.get(ticket)?)));
        found.map_or(ticket, |(steps, (step, _))| Ticket { step, steps, ..ticket })
    }

    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = [u8]>) -> Result<usize, Error> {
        let Load { ticket, naming, times, who, .. } = load;
        *who = "order";
        let group = self.group(ticket)?;
        if self.begun != Some(ticket.generation) {
            self.begun = Some(ticket.generation);
            let kept = self.kept.clone();
            self.reader.begin(self.schedule.from(ticket, move |group| kept[group].get().is_some()));
        }
        *who = "reader";
        let placed = self.placed(ticket);
        let failed =
            |source: twinbuf_mmap::Error| Error::Load { at: naming.at(placed), source: source.into() };
        let bytes = self.schedule.groups().bytes(group);
        if !self.schedule.is_kept(group) {
            times.bytes = bytes;
            return self.reader.read(&group, slot.content()).map_err(failed);
        }
        let kept = &self.kept[group];
        if kept.get().is_none() {
            times.bytes = bytes;
            let mut buffer = Buffer::untouched(bytes).ok_or_else(|| too_large(&*self.schedule))?;
            self.reader.read(&group, &mut buffer).map_err(failed)?;
            // Only this thread sets it.
            let _ = kept.set(Arc::new(buffer));
        }
        if let (true, Some(kept)) = (self.schedule.is_streamed(group), kept.get()) {
            slot.content()[..bytes].copy_from_slice(kept);
        }
        Ok(bytes)
    }

    fn records(&self, _: Ticket) -> Option<Origin> {
        None
    }
}
