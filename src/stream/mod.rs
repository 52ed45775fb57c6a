//! Weights: groups of tensors in the order of use, the next one read while this one is used.
//!
//! A stream is a loader whose batches are groups of tensors: the same thread, the same report, errors and trace. Its
//! passes are epochs.

mod group;
mod pass;
mod schedule;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use twinbuf_mmap::{Buffer, GroupReader};
pub use twinbuf_mmap::{Groups, ReadMode, Tensor, Tensors};

pub use self::group::{Group, View};
use self::group::{Kept, Memory};
pub use self::pass::Pass;
use self::schedule::{Order, Schedule};
use crate::backend::host::Values;
use crate::backend::sealed::SlotGuard;
use crate::backend::too_large;
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

/// Builds a stream of groups of tensors: the layers of a model, in the order of use. Feature `safetensors`.
///
/// Defaults: two slots, no limit of memory, passes that do not follow each other without a gap.
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
    StreamBuilder {
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
    }
}

/// Builds a [`TensorStream`]; made by [`stream`].
#[must_use = "a builder does nothing until `build`"]
pub struct StreamBuilder {
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

impl StreamBuilder {
    /// Names the stream in errors, reports and traces. Default: no name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Lets passes follow each other without a gap: the first group of the next pass is read while the last one of this
    /// pass is used. Default: reading begins with each call of [`pass`](TensorStream::pass).
    pub fn cycle(mut self) -> Self {
        self.cycle = true;
        self
    }

    /// Sets the order of the groups in each pass. `order(pass, step)` is the number of a group, and a pass has each group
    /// once. Default: the order of [`Groups`], in each pass.
    ///
    /// It is called on both threads, and returns the same each time: `move |pass, step| if pass % 2 == 0 { step } else
    /// { last - step }` goes forward and back.
    pub fn order(mut self, order: impl Fn(u64, usize) -> usize + Send + Sync + 'static) -> Self {
        self.order = Some(Box::new(order));
        self
    }

    /// Sets the number of slots, 1 to 8, each as large as the largest group that is not kept. Default: 2.
    ///
    /// A group that is in use has one of them, and the others are read into.
    pub fn host_depth(mut self, slots: usize) -> Self {
        self.depth = slots;
        self
    }

    /// Limits the memory of slots, of groups that are kept and of reads past the page cache, in bytes. Default: no limit.
    ///
    /// What the slots leave of it keeps groups: they are read once, and stay until the stream and the last [`Group`] are
    /// dropped. If not all of them fit, those that do are spread over the pass. It does not count the page cache.
    pub fn memory_limit(mut self, limit: impl Into<MemoryLimit>) -> Self {
        self.memory_limit = Some(limit.into());
        self
    }

    /// Sets how many groups are kept in memory at most. Default: as many as the
    /// [`memory_limit`](Self::memory_limit) has room for; none without a limit.
    pub fn keep(mut self, groups: usize) -> Self {
        self.keep = Some(groups);
        self
    }

    /// Whether a thread reads ahead of the caller. Default: `true`.
    ///
    /// With `false`, each group is read on the caller's thread when the caller asks for it.
    pub fn overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Sets where the bytes come from. Default: [`ReadMode::Auto`]: through the page cache if all groups fit there,
    /// otherwise past it. The [`Report`] has what was chosen.
    ///
    /// Past the page cache the disk writes to the slot, by one call for each run of tensors of 4 MiB or more: do not
    /// `fork` during a read (NOTES in `open(2)`).
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.read_mode = mode;
        self
    }

    /// Sets how long to wait for a group that is still held, when its slot is the next to be filled. Default: 10 s.
    ///
    /// Groups may be dropped on other threads. When the time is over the pass ends with [`Error::SlotHeld`], also if the
    /// caller itself holds the group.
    pub fn held_timeout(mut self, timeout: Duration) -> Self {
        self.held_timeout = timeout;
        self
    }

    /// Writes a Chrome trace. Default: no trace.
    pub fn trace(mut self, trace: impl Into<Trace>) -> Self {
        self.trace = Some(trace.into());
        self
    }

    /// Allocates the slots and starts the thread.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if there is no group, or the slots do not fit the memory; [`Error::Memory`] if they do not fit the
    /// limit; [`Error::Open`] if the files cannot be read as [`read_mode`](Self::read_mode) asks for; [`Error::Trace`] if
    /// the trace's file cannot be made; [`Error::Spawn`] if the system starts no thread.
    pub fn build(self) -> Result<TensorStream, Error> {
        let Self { groups, name, order, cycle, depth, keep, overlap, read_mode, .. } = self;
        if !(1..=MAX_HOST_DEPTH).contains(&depth) {
            let wanted = format!("1 to {MAX_HOST_DEPTH} slots");
            return Err(Error::Option { option: "host_depth", wanted, found: depth.to_string() });
        }
        if groups.is_empty() {
            let (wanted, found) = ("at least one group".to_string(), "none".to_string());
            return Err(Error::Option { option: "groups", wanted, found });
        }
        let left = self.memory_limit.as_ref().map(MemoryLimit::left);
        let schedule = Arc::new(Schedule::new(groups, order, depth, left, keep));
        let sum = schedule.to_string();
        let wanted = schedule.memory().ok_or_else(|| too_large(&sum))?;
        let taken = self.memory_limit.map(|limit| limit.take(wanted)).transpose();
        let taken =
            taken.map_err(|(limit, taken)| Error::Memory { sum: sum.clone(), wanted, limit, taken })?;
        let taken = taken.map(Arc::new);
        let reader = GroupReader::new(schedule.groups().clone(), read_mode, wanted).map_err(Error::Open)?;
        let reader = Arc::new(reader);
        let slot = |_| {
            let own = Buffer::untouched(schedule.slot()).ok_or_else(|| too_large(&sum))?;
            Ok(Memory { own, kept: None, group: 0, taken: taken.clone() })
        };
        let slots: Vec<Memory> = (0..depth).map(slot).collect::<Result<_, Error>>()?;
        let trace =
            self.trace.map(|trace| trace.open(name.as_deref(), 0, 1)).transpose().map_err(Error::trace)?;
        let streamed = schedule.streamed();
        let options = stage::Options {
            naming: Naming { loader: name.map(Into::into), rounds: false },
            overlap,
            held_timeout: self.held_timeout,
            trace,
            breakdown: Breakdown::off(),
            steps: Box::new(move |_, _| streamed),
            slots: (schedule.slot(), depth, &sum),
            lent: None,
        };
        let kept = vec![None; schedule.groups().len()];
        let (to_read, schedule_of_source) = (reader.clone(), schedule.clone());
        let source = Reading {
            reader: to_read,
            schedule: schedule_of_source,
            kept: kept.clone(),
            taken,
            begun: None,
            pass: None,
        };
        let stage = Stage::start(Values(slots), vec![Box::new(source)], options)?;
        Ok(TensorStream { stage, schedule, reader, kept, cycle, passes: 0, flowing: None })
    }
}

impl fmt::Debug for StreamBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamBuilder")
            .field("groups", &self.groups)
            .field("cycle", &self.cycle)
            .field("order", &self.order.is_some())
            .field("host_depth", &self.depth)
            .field("keep", &self.keep)
            .field("overlap", &self.overlap)
            .field("read_mode", &self.read_mode)
            .field("memory_limit", &self.memory_limit)
            .field("trace", &self.trace)
            .finish_non_exhaustive()
    }
}

/// Reads groups of tensors in the order of use, the next one while this one is used.
///
/// A thread reads while the caller computes, into slots that are allocated once and recycled. A slot is never
/// overwritten while its [`Group`] is alive. Groups that are [kept](StreamBuilder::memory_limit) are read once.
///
/// Dropping the stream waits for the group that is being read, for at most 10 s, and joins the thread.
pub struct TensorStream {
    stage: Stage<Values<Memory>>,
    schedule: Arc<Schedule>,
    reader: Arc<GroupReader>,
    /// The groups that are kept, as far as they have been received.
    kept: Vec<Option<Arc<Kept>>>,
    cycle: bool,
    /// Passes begun so far.
    passes: u64,
    /// The first group of the next pass, if it follows the last one without a gap.
    flowing: Option<Ticket>,
}

impl TensorStream {
    /// Iterates over the groups of the next pass.
    ///
    /// Reading begins when the iterator is made, or earlier with [`cycle`](StreamBuilder::cycle). If the iterator is
    /// dropped early, the pass is given up: the next call begins another pass with its first group.
    ///
    /// # Panics
    ///
    /// If the [order](StreamBuilder::order) panics.
    pub fn pass(&mut self) -> Pass<'_> {
        Pass::new(self)
    }

    /// Returns the groups.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        self.schedule.groups()
    }

    /// Returns how many groups are kept in memory when they have been read once.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.schedule.kept()
    }

    /// Reports where the time went so far. Passes are epochs and groups are batches; the use of a group that is kept counts
    /// as that of the one before it.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut report = self.stage.report();
        report.reading += self.reader.stats();
        report.choices = vec![self.reader.choice()];
        report
    }

    /// Joins the thread and returns an error that has not been delivered. Dropping the stream joins it too.
    ///
    /// # Errors
    ///
    /// The failure of a group that was read ahead of a caller who left early; else [`Error::Trace`] if the trace could
    /// not be written. The groups are not affected by that.
    pub fn close(self) -> Result<(), Error> {
        self.stage.close(None, &[])
    }
}

impl fmt::Debug for TensorStream {
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
    reader: Arc<GroupReader>,
    schedule: Arc<Schedule>,
    /// The groups that are kept, as far as they have been read.
    kept: Vec<Option<Arc<Kept>>>,
    taken: Option<Arc<Taken>>,
    /// The series of passes that the reader has the order of.
    begun: Option<u64>,
    /// The pass that is read, and the groups that come through the slots.
    pass: Option<(u64, u64, Vec<usize>)>,
}

impl Reading {
    /// The group of a ticket.
    fn group(&mut self, ticket: Ticket) -> Result<usize, Error> {
        let of = (ticket.epoch, ticket.steps);
        if self.pass.as_ref().is_none_or(|&(pass, steps, _)| (pass, steps) != of) {
            let mut order = self.schedule.pass(ticket.epoch)?;
            if ticket.steps != order.len() as u64 {
                order.retain(|&group| !self.schedule.is_kept(group));
            }
            self.pass = Some((of.0, of.1, order));
        }
        let order = self.pass.as_ref().map_or(&[][..], |(_, _, order)| order);
        // Both sides count the same steps.
        Ok(usize::try_from(ticket.step).ok().and_then(|step| order.get(step)).copied().unwrap_or(usize::MAX))
    }
}

impl Source<Memory> for Reading {
    fn log(&self) -> (What, &'static str) {
        (What::Read, "read")
    }

    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = Memory>) -> Result<usize, Error> {
        let Load { ticket, naming, times, who, .. } = load;
        *who = "order";
        let group = self.group(ticket)?;
        if self.begun != Some(ticket.generation) {
            self.begun = Some(ticket.generation);
            self.reader.begin(self.schedule.from(ticket));
        }
        *who = "reader";
        let failed =
            |source: twinbuf_mmap::Error| Error::Load { at: naming.at(ticket), source: source.into() };
        let memory = slot.content();
        memory.group = group;
        memory.kept = None;
        let bytes = self.schedule.groups().bytes(group);
        if !self.schedule.is_kept(group) {
            times.bytes = bytes;
            return self.reader.read(group, &mut memory.own).map_err(failed);
        }
        let kept = &mut self.kept[group];
        if kept.is_none() {
            times.bytes = bytes;
            let mut buffer = Buffer::untouched(bytes).ok_or_else(|| too_large(&*self.schedule))?;
            self.reader.read(group, &mut buffer).map_err(failed)?;
            *kept = Some(Arc::new(Kept { buffer, _taken: self.taken.clone() }));
        }
        memory.kept.clone_from(kept);
        Ok(kept.as_ref().map_or(0, |kept| kept.buffer.len()))
    }

    fn records(&self, _: Ticket) -> Option<Origin> {
        None
    }
}
