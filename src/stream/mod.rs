//! Streams of model weights: groups of tensors in the order of use. A thread reads the next group while the caller
//! uses the current group.
//!
//! A stream is a loader whose batches are groups of tensors. It has a thread, a report, errors and a trace as a
//! loader has. One pass over all groups is an epoch.
//!
//! A stream to a device does not pay for decoding at batch 1 if the weights fit the device: each token needs all
//! weights, and the bus is slower than the device's memory.

#[cfg(feature = "cuda")]
mod device;
mod group;
mod schedule;

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Instant;
use std::{iter, mem};

pub use twinbuf_mmap::Tensors;
use twinbuf_mmap::{Buffer, Groups, ReadMode, Reader};

#[cfg(feature = "cuda")]
pub use self::device::DeviceView;
use self::group::Place as GroupPlace;
pub use self::group::{Group, View};
use self::schedule::{Order, Schedule};
use crate::error::Error;
use crate::observe::report::{Kind, Report};
use crate::pipe::items::{Course, Next};
use crate::pipe::memory::{Backend, Host, Item, LEAST, Memory, MemoryLimit, Taken, check_memory, too_large};
use crate::pipe::options::{Options, calls_of_pipe, common};
use crate::pipe::ring::Sides;
use crate::pipe::{Content, Filling, Front, Items, Pipe, Place, Setup, Source};

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
    let own = Own {
        groups,
        order: None,
        cycle: false,
        depth: 2,
        keep: None,
        read_mode: ReadMode::Auto,
        memory_limit: None,
    };
    StreamBuilder { backend: Host, options: Options::default(), own }
}

/// Builds a [`TensorStream`]. [`stream`] returns it.
#[must_use = "a builder does nothing until `build`"]
pub struct StreamBuilder<B: Backend = Host> {
    backend: B,
    options: Options,
    own: Own,
}

/// The options of a stream that no other front end has.
struct Own {
    groups: Groups,
    order: Option<Order>,
    cycle: bool,
    depth: usize,
    keep: Option<usize>,
    read_mode: ReadMode,
    memory_limit: Option<MemoryLimit>,
}

impl<B: Backend> StreamBuilder<B> {
    common!();

    /// Reads continuously across passes: with overlap, the stream reads the first group of the next pass while the
    /// caller uses the last group of the current pass. Default: reading starts with each call of
    /// [`pass`](TensorStream::pass).
    pub fn cycle(mut self) -> Self {
        self.own.cycle = true;
        self
    }

    /// Sets the order of the groups in each pass. `order(pass, step)` returns the index of a group. Default: the
    /// order of [`Groups`] in each pass.
    ///
    /// `order` must return each group exactly once per pass. If it does not, or panics, the pass has no groups, only
    /// [`Error::Option`]. It runs on the caller's thread or on the reading thread, with [`cycle`](Self::cycle) also for
    /// passes that never begin. It must return the same result for the same arguments: if the reading is more than 16
    /// passes ahead, it is called again for a pass, maybe while the other thread calls it too.
    ///
    /// Example: `move |pass, step| if pass % 2 == 0 { step } else { last - step }` alternates between forward and
    /// backward order.
    pub fn order(mut self, order: impl Fn(u64, usize) -> usize + Send + Sync + 'static) -> Self {
        self.own.order = Some(Box::new(order));
        self
    }

    /// Sets the number of slots. Default: 2.
    ///
    /// Each slot has room for the largest group that is not [kept in memory](Self::keep), and with a device for the
    /// largest of all. A group in use occupies one slot, unless it is kept in memory on the host or
    /// [left its slot](Group::leave_slot). The reader fills the other slots. `build` returns [`Error::Option`] for
    /// fewer than 2 with overlap, and for 0.
    pub fn depth(mut self, slots: usize) -> Self {
        self.own.depth = slots;
        self
    }

    /// Limits the memory of the stream, in bytes: slots (those of a device too), groups [kept in memory](Self::keep) or
    /// out of their slots, and 10 MiB of buffers for direct I/O, with every read mode. The page cache does not count.
    /// Default: no limit.
    ///
    /// With a limit, the stream uses the memory that the slots and buffers leave to keep groups in memory. On the host
    /// it spares that of one slot, for a group that [leaves its slot](Group::leave_slot), unless all groups can be
    /// kept. `build` returns [`Error::Memory`] if the slots and buffers alone exceed what the limit has left.
    pub fn memory_limit(mut self, limit: impl Into<MemoryLimit>) -> Self {
        self.own.memory_limit = Some(limit.into());
        self
    }

    /// Sets the maximum number of groups that stay in memory. Default: with a [`memory_limit`](Self::memory_limit), the
    /// number of groups that fit the limit; otherwise 0. A value above the number of groups stands for all groups. With
    /// a limit, no more are kept than fit it, or fewer if their lengths differ.
    ///
    /// A group kept in memory is read once and stays until the stream and its last [`Group`]s are dropped. Once all
    /// kept groups have been read, they occupy no slot on the host. If only some groups are kept, they are spread
    /// evenly over [`Groups`].
    pub fn keep(mut self, groups: usize) -> Self {
        self.own.keep = Some(groups);
        self
    }

    /// Sets how files are read: through the page cache, or past it (direct I/O). Default: [`ReadMode::Auto`], on Linux
    /// through the page cache as far as the groups fit in memory, the rest past it. The [`Report`] shows the choice.
    ///
    /// With direct I/O, the disk writes contiguous runs of tensors of 4 MiB or more to the slot, except for up to three
    /// blocks at their ends. Do not call `fork` during a read (NOTES in `open(2)`).
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.own.read_mode = mode;
        self
    }

    /// Allocates the slots and, with overlap, starts the thread.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: there is no group, [`depth`](Self::depth) or `device_depth` is out of range, or the slots
    ///   exceed the memory of the machine or cannot be allocated.
    /// - [`Error::Memory`]: the slots and buffers exceed what the [`memory_limit`](Self::memory_limit) has left.
    /// - [`Error::Open`]: the files cannot be read as [`read_mode`](Self::read_mode) requires.
    /// - [`Error::Trace`]: the trace file could not be created.
    /// - [`Error::Spawn`]: the system could not start a thread.
    /// - [`Error::Device`]: a call of the device's driver failed.
    pub fn build(self) -> Result<TensorStream<B>, Error> {
        let Self { backend, mut options, own } = self;
        let Own { groups, order, cycle, depth, keep, read_mode, memory_limit } = own;
        let least = if options.overlaps() { 2 } else { 1 };
        if depth < least {
            return Err(Error::option("depth", format!("at least {least} slots"), depth.to_string()));
        }
        if groups.is_empty() {
            return Err(Error::option("groups", "at least one group", "none"));
        }
        let left = memory_limit.as_ref().map(MemoryLimit::left);
        let device_depth = backend.device_depth();
        let schedule = Arc::new(Schedule::new(groups, order, (depth, device_depth), left, keep));
        let slot = schedule.slot();
        check_memory("depth", depth, slot.max(LEAST), &*schedule)?;
        let wanted = schedule.memory().ok_or_else(|| too_large(&*schedule))?;
        let taken = memory_limit.map(|limit| limit.take(wanted, &*schedule)).transpose()?.map(Arc::new);
        let groups = schedule.groups().clone();
        let own = wanted - Reader::<Groups>::MEMORY;
        let reader = Arc::new(Reader::of_groups(groups, read_mode, own).map_err(Error::Open)?);
        let trace = options.open(0, 1)?;
        let source = Reading { reader: reader.clone(), schedule: schedule.clone(), _taken: taken.clone() };
        let memory =
            Memory { slot, depth, lent: None, sum: &*schedule, trace: trace.clone(), options: &options };
        let (readers, limited) = ([reader.clone()], taken.is_some());
        let add_reads = Box::new(move |mut report: Report| {
            report.limited = limited;
            report.with_reading(&readers)
        });
        let sides = backend.sides(memory)?;
        let pipe = Pipe::start(Setup {
            sides,
            sources: vec![Box::new(source)],
            driven: 0,
            helper: None,
            options,
            trace,
            kind: Kind::Groups,
            depth,
            locate: Box::new(|_, _| None),
            add_reads,
        })?;
        let (order, at) = (Vec::new(), 0);
        let (passes, flowing, whole) = (0, false, false);
        Ok(TensorStream { pipe, schedule, reader, cycle, passes, flowing, order, at, whole, taken })
    }
}

debug!([B: Backend] StreamBuilder[B], |builder|
    groups: builder.own.groups, depth: builder.own.depth, options: builder.options);

/// Reads groups of tensors in the order of use. A thread reads the next group while the caller uses the current group.
///
/// The thread reads into slots that are reused. No slot is overwritten while a [`Group`] is in it. Groups
/// [kept in memory](StreamBuilder::keep) are read once.
pub struct TensorStream<B: Backend = Host> {
    pipe: Pipe<B::Ring<usize>>,
    schedule: Arc<Schedule>,
    reader: Arc<Reader<Groups>>,
    cycle: bool,
    /// The number of passes that have begun.
    passes: u64,
    /// Whether the pipe's current order continues with the next pass, which then needs no new order.
    flowing: bool,
    /// The groups of this pass.
    order: Vec<usize>,
    /// The index in `order` of the next group.
    at: usize,
    /// Whether all groups of this pass come through the slots, also those that are kept in memory.
    whole: bool,
    /// What the stream takes of the memory limit. Shared with the groups. The last field, because it is given back only
    /// after the memory has been freed.
    taken: Option<Arc<Taken>>,
}

impl<B: Backend> TensorStream<B> {
    calls_of_pipe!();

    /// Iterates over the groups of the next pass. [`Pass`] lists the errors.
    ///
    /// With overlap, reading starts with this call, or earlier with [`cycle`](StreamBuilder::cycle). If the caller
    /// drops the iterator early, the pass ends: the next call starts a new pass at its first group.
    pub fn pass(&mut self) -> Pass<'_, B> {
        self.begin_pass();
        Items::lent(self)
    }

    fn begin_pass(&mut self) {
        let pass = self.passes;
        // In a forked process only an error comes, and the thread that may be making this order does not exist.
        let order = if self.pipe.is_orphaned() { Ok(vec![0]) } else { self.schedule.pass(pass) };
        (self.order, self.pipe.failed) = match order {
            Ok(order) => (order, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        (self.passes, self.at) = (pass + 1, 0);
        // Until all kept groups have been read once, every group comes through a slot, kept ones too.
        self.whole = !self.schedule.is_read();
        if !mem::take(&mut self.flowing) && self.pipe.failed.is_none() {
            self.begin(pass);
        }
        let place = self.place();
        self.pipe.recorder().began(place, Instant::now());
    }

    /// Iterates over the groups of the next pass as [`pass`](Self::pass) does, but owns the stream.
    /// [`Items::into_front`] returns it.
    pub fn into_pass(mut self) -> Pass<'static, B> {
        self.begin_pass();
        Items::owned(self)
    }

    /// Gives the pipe a new order: this pass, and with `cycle` all later ones.
    fn begin(&mut self, pass: u64) {
        let passes = pass..=if self.cycle { u64::MAX } else { pass };
        let (reader, reads) = (self.reader.clone(), self.schedule.clone().reads(passes.clone()));
        let order = self.schedule.clone().order(passes, self.whole);
        // Not now, but when the reading thread takes the first group: it may still read for the pass before.
        let begin = move || {
            reader.begin(reads);
            order
        };
        self.pipe.post(Box::new(iter::once_with(begin).flatten()), 0, u64::MAX);
    }

    /// Returns the group of the next step, whose bytes are at `place`.
    fn group(&mut self, group: usize, place: GroupPlace<B>) -> Group<B> {
        let (groups, at) = (self.schedule.groups().clone(), self.pipe.at(self.place()));
        self.at += 1;
        Group { place, groups, group, at, taken: self.taken.clone() }
    }

    /// Returns the memory of a group, if the group is kept, has been read, and comes through no slot any more.
    fn kept_group(&self, group: usize) -> Option<Arc<Buffer>> {
        self.schedule.memory_of(group)?.get().filter(|_| !self.schedule.is_streamed(group)).cloned()
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
}

debug!([B: Backend] TensorStream[B], |stream|
    groups: stream.groups(), kept: stream.kept(), choice: stream.reader.choice(), pipe: stream.pipe);

/// The source of the pipe: reads groups from the files.
struct Reading {
    reader: Arc<Reader<Groups>>,
    schedule: Arc<Schedule>,
    _taken: Option<Arc<Taken>>,
}

impl<S: DerefMut<Target = [u8]> + ?Sized> Source<S> for Reading {
    type Unit = usize;

    fn fill(&mut self, &mut group: &mut usize, slot: &mut S, at: &mut Filling<'_>) -> Result<Content, Error> {
        at.runs("reader");
        let bytes = self.schedule.groups().bytes(group);
        let Some(kept) = self.schedule.memory_of(group) else {
            at.read_bytes(bytes);
            let read = self.reader.read(&group, slot).map_err(|error| at.failed(error))?;
            return Ok(Content::Bytes(read));
        };
        if kept.get().is_none() {
            at.read_bytes(bytes);
            let mut buffer = Buffer::untouched(bytes).ok_or_else(|| too_large(&*self.schedule))?;
            self.reader.read(&group, &mut buffer).map_err(|error| at.failed(error))?;
            // Only this thread sets it.
            let _ = kept.set(Arc::new(buffer));
        }
        if let (true, Some(kept)) = (self.schedule.is_streamed(group), kept.get()) {
            slot[..bytes].copy_from_slice(kept);
        }
        Ok(Content::Bytes(bytes))
    }
}

impl<B: Backend> Front for TensorStream<B> {
    type Item = Group<B>;
}

impl<B: Backend> Course<Group<B>> for TensorStream<B> {
    type Ring = B::Ring<usize>;

    fn pipe(&self) -> &Pipe<B::Ring<usize>> {
        &self.pipe
    }

    fn pipe_mut(&mut self) -> &mut Pipe<B::Ring<usize>> {
        &mut self.pipe
    }

    fn place(&self) -> Place {
        let pass = self.passes.saturating_sub(1);
        Place { ordinal: pass, epoch: pass, step: self.at as u64 }
    }

    fn next(&mut self) -> Next<Group<B>> {
        let Some(&group) = self.order.get(self.at) else { return Next::End };
        // Once all kept groups have been read, they are returned from memory and take no slot.
        match self.kept_group(group).filter(|_| !self.whole) {
            Some(kept) => {
                let (place, bytes) = (self.place(), self.groups().bytes(group));
                self.pipe.recorder().kept(place, bytes);
                Next::Item(self.group(group, GroupPlace::Kept(kept)))
            }
            None => Next::Slot,
        }
    }

    fn item(&mut self, slot: Item<B, usize>) -> Group<B> {
        // The group that was read: after an order that returns another result at each call, not the one of this side.
        let group = B::Ring::<usize>::header(&slot).unit.unwrap_or(self.order[self.at]);
        self.group(group, self.kept_group(group).map_or(GroupPlace::Slot(slot), GroupPlace::Kept))
    }

    fn ended(&mut self, _: Option<&Error>) {
        // Without groups it is no pass, or one with an invalid order, which ended the pipe's order.
        let (groups, at) = (mem::take(&mut self.order).len(), mem::take(&mut self.at));
        (self.pipe.failed, self.flowing) = (None, self.cycle && groups > 0 && at == groups);
        if !self.flowing {
            self.pipe.retract();
        }
    }

    fn left(&self) -> (usize, Option<usize>) {
        let left = self.order.len() - self.at;
        (left.min(1), Some(left.max(usize::from(self.pipe.failed.is_some()))))
    }
}

/// An iterator over the groups of one pass. [`TensorStream::pass`] returns it.
///
/// # Errors
///
/// The iterator returns every group before the one that failed, then one error, and then ends.
///
/// - [`Error::Load`]: a file could not be read.
/// - [`Error::Option`]: the [order](StreamBuilder::order) panics or does not return each group exactly once, or the memory
///   of a group cannot be allocated.
/// - [`Error::Panicked`]: the waker of a task panicked.
/// - [`Error::Upload`]: a copy to the device failed.
/// - [`Error::SlotHeld`]: the caller did not drop an earlier group within the
///   [`held_timeout`](StreamBuilder::held_timeout).
/// - [`Error::Forked`]: this process was forked from the process that built the stream, with overlap.
/// - [`Error::ThreadGone`]: the thread ended unexpectedly.
pub type Pass<'s, B = Host> = Items<'s, TensorStream<B>>;
