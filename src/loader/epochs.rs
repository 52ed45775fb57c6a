//! The loader: the order of its batches, the count of steps and epochs, and a batch for each filled slot.

use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use twinbuf_mmap::{Plan, Reader, RemainingEpoch};

use super::batch::{Batch, Records};
use super::checkpoint::{Checkpoint, Identity, Start};
use super::layout::Layout;
use super::reader::Driven;
use crate::error::Error;
use crate::observe::breakdown::Breakdown;
#[cfg(feature = "cuda")]
use crate::pipe::device::Cuda;
use crate::pipe::items::{Course, Next};
use crate::pipe::memory::{Backend, Host, Item};
use crate::pipe::options::calls_of_pipe;
use crate::pipe::{Front, Items, Pipe, Place};

/// Reads the batches of a plan ahead of their use.
///
/// A thread reads the next batch while the caller uses the current one. The thread and the caller share
/// [`depth`](crate::loader::LoaderBuilder::depth) slots. A slot is a buffer for one batch. The loader allocates the
/// slots when it is built. The thread runs until the loader is closed or dropped. A loader can have several
/// [`workers`](crate::loader::LoaderBuilder::workers).
///
/// With overlap, a call that blocks until the next batch is ready may be one more worker, but only if all data sets are
/// files in the page cache, every transform is a [`Transform`](crate::transform::Transform) or
/// [`Convert`](crate::transform::Convert), no driver fills slots, and there are two processors or more.
///
/// The plan determines the records of the batches and their order, after a resumption with the checkpoint. They are the
/// same with or without overlap, for any number of workers, and for any depth.
///
/// # Examples
///
/// ```
/// use twinbuf::{Loader, Plan, Records, Shuffle};
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data.bin");
/// # std::fs::write(&path, vec![7u8; 64 * 100])?;
/// let data = Records::open([&path], 64)?; // records of 64 bytes
/// let plan = Plan::builder(data.len()).batch(8).shuffle(Shuffle::Full).seed(42).build()?;
/// let mut loader = Loader::builder(data, plan).build()?;
/// for batch in loader.epochs(0..2) {
///     let batch = batch?; // bytes, read while the previous batch was in use
///     assert_eq!(batch.len(), 8 * 64);
/// }
/// println!("{}", loader.report());
/// loader.close()?;
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
pub struct Loader<B: Backend = Host> {
    pub(super) pipe: Pipe<B::Ring<Records>>,
    /// The place of the caller in the current call: its next batch is the one after the last that the caller received.
    /// If the epoch is over, the step is that of the rank with the most steps.
    pub(super) order: Order,
    /// Workers that no driver has taken.
    pub(super) driven: Vec<Driven<B>>,
}

impl<B: Backend> Loader<B> {
    calls_of_pipe!();

    /// Returns the workers of a [driven](crate::loader::LoaderBuilder::driven) loader, unless they were returned
    /// before. Whoever has one lets it fill slots.
    pub fn driven(&mut self) -> Vec<Driven<B>> {
        mem::take(&mut self.driven)
    }

    /// Begins a call for the batches from `start` to the end of epoch `last`. If `last` is `None` or before `start`, the call
    /// has no batches.
    fn begin(&mut self, start: Start, last: Option<u64>) {
        let Self { pipe, order, .. } = self;
        let Start { epoch, step, rest, identity } = start;
        (order.rest, order.identity) = (rest, identity);
        // The report counts the epochs, and so numbers them.
        order.next = Place { ordinal: pipe.recorder().report.epochs, epoch, step };
        order.last = last.filter(|&last| epoch <= last);
        if order.last.is_some() {
            pipe.recorder().began(order.next, Instant::now());
            pipe.post(Box::new(order.clone()), 0, u64::MAX);
        }
    }

    /// Iterates over the batches of one epoch, in order. Epochs are numbered from 0. See [`epochs`](Self::epochs).
    pub fn epoch(&mut self, epoch: u64) -> Epochs<'_, B> {
        self.begin(self.order.own.start(&self.order.plan, epoch, 0), Some(epoch));
        Items::lent(self)
    }

    /// Iterates over the batches of several epochs, in order: `loader.epochs(0..3)`. An empty range yields nothing.
    ///
    /// With overlap, the loader reads ahead across the end of an epoch.
    ///
    /// With overlap, reading starts when this method is called, before the first call of `next`, but in a
    /// [driven](crate::loader::LoaderBuilder::driven) loader only when a driver calls. Call it before the model is
    /// loaded or compiled, and call it for a validation set before the last training steps of an epoch: the first
    /// batches are then ready in time. The report counts time from the first call of `next`. If the caller drops the
    /// iterator early, the loader starts no further batch.
    ///
    /// A batch borrows nothing. The caller may keep it beyond the end of the epoch. Each batch in use occupies a slot:
    /// while the caller keeps one batch, the loader can load only `depth - 1` more (copy only `device_depth - 1` more
    /// to a device). Slots come round in turn. If the next batch needs an occupied slot, the call for it waits up to
    /// [`held_timeout`](crate::loader::LoaderBuilder::held_timeout) for another thread to drop the batch, and then the
    /// iterator returns [`Error::SlotHeld`] and ends. [`Epochs`] lists all errors.
    ///
    /// The iterator borrows the loader: only one iterator can exist at a time. [`into_epochs`](Self::into_epochs)
    /// returns an iterator that owns the loader.
    ///
    /// ```compile_fail,E0499
    /// # fn f(mut loader: twinbuf::Loader) {
    /// let (a, b) = (loader.epoch(0), loader.epoch(1));
    /// drop((a, b));
    /// # }
    /// ```
    pub fn epochs(&mut self, epochs: Range<u64>) -> Epochs<'_, B> {
        self.begin_range(epochs);
        Items::lent(self)
    }

    fn begin_range(&mut self, epochs: Range<u64>) {
        if epochs.is_empty() {
            self.order.last = None; // the position stays
        } else {
            let start = self.order.own.start(&self.order.plan, epochs.start, 0);
            self.begin(start, epochs.end.checked_sub(1));
        }
    }

    /// Iterates over the batches of several epochs as [`epochs`](Self::epochs) does, but owns the loader. Use it to
    /// return an iterator from a function, or to move it to a thread or a task. With the feature `stream` it is a
    /// `'static` stream.
    ///
    /// [`Items::into_front`] returns the loader.
    ///
    /// ```
    /// use twinbuf::{Batch, Error, Loader};
    ///
    /// fn batches(loader: Loader) -> impl Iterator<Item = Result<Batch, Error>> + Send + 'static {
    ///     loader.into_epochs(0..3)
    /// }
    /// ```
    pub fn into_epochs(mut self, epochs: Range<u64>) -> Epochs<'static, B> {
        self.begin_range(epochs);
        Items::owned(self)
    }

    /// Iterates from a checkpoint as [`epochs_from`](Self::epochs_from) does, but owns the loader.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] in the cases of [`epochs_from`](Self::epochs_from). The error is returned together with
    /// the loader.
    pub fn into_epochs_from(
        mut self,
        checkpoint: &Checkpoint,
        epochs: u64,
    ) -> Result<Epochs<'static, B>, Box<(Self, Error)>> {
        match self.begin_from(checkpoint, epochs) {
            Ok(()) => Ok(Items::owned(self)),
            Err(error) => Err(Box::new((self, error))),
        }
    }

    /// Iterates from `checkpoint` to the end of epoch `epochs - 1`. `epochs` is the total number of epochs in the
    /// training run. If no epoch remains, the iterator is empty.
    ///
    /// With the same batch size and number of ranks, each rank delivers the batches that it would have delivered next.
    /// With the same data and pure transforms, the bytes are identical. Depth, overlap, hints, and the rank that saved
    /// the checkpoint do not matter.
    ///
    /// With a different batch size or number of ranks, all ranks together deliver each remaining record of the epoch
    /// once; with [`LastBatch::Drop`](crate::LastBatch::Drop), records that do not fill the last step are omitted, and
    /// with [`LastBatch::Wrap`](crate::LastBatch::Wrap), others fill it again. If the plan sets the number of
    /// [steps](twinbuf_mmap::PlanBuilder::steps), they deliver the steps that are left, of this plan's batches. Step
    /// numbers continue. A schedule of batch sizes counts all steps of the training, including those before the
    /// checkpoint. Later epochs follow this loader's plan.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the data set, the plan's records, number of steps, shuffle, seed, or `LastBatch` mode
    /// differs, or if the step is outside of what is left of the epoch. The error names the field.
    pub fn epochs_from(&mut self, checkpoint: &Checkpoint, epochs: u64) -> Result<Epochs<'_, B>, Error> {
        self.begin_from(checkpoint, epochs)?;
        Ok(Items::lent(self))
    }

    fn begin_from(&mut self, checkpoint: &Checkpoint, epochs: u64) -> Result<(), Error> {
        let start = self.order.own.resume(&self.order.plan, checkpoint)?;
        self.begin(start, epochs.checked_sub(1));
        Ok(())
    }

    /// Returns the position after the last batch that the caller received, or where its iteration starts if it has
    /// received none.
    ///
    /// Batches that were only read ahead do not count. The batch in use counts. Once the iterator has ended at the end
    /// of an epoch, the position is the end of the epoch for all ranks, even if this rank has one step fewer
    /// ([`LastBatch::Keep`](crate::LastBatch::Keep)).
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        let Order { identity, next, .. } = &self.order;
        identity.at(next.epoch, next.step)
    }

    /// Returns a handle to the loader's breakdown. Use it to measure the phases of the training loop.
    #[must_use]
    pub fn breakdown(&self) -> Breakdown {
        self.pipe.breakdown().clone()
    }

    /// Returns the plan of this loader's batches.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.order.plan
    }
}

debug!([B: Backend] Loader[B], |loader| plan: loader.order.plan, pipe: loader.pipe);

impl<B: Backend> Front for Loader<B> {
    type Item = Batch<B>;
}

impl<B: Backend> Course<Batch<B>> for Loader<B> {
    type Ring = B::Ring<Records>;

    fn pipe(&self) -> &Pipe<B::Ring<Records>> {
        &self.pipe
    }

    fn pipe_mut(&mut self) -> &mut Pipe<B::Ring<Records>> {
        &mut self.pipe
    }

    fn place(&self) -> Place {
        self.order.next
    }

    fn next(&mut self) -> Next<Batch<B>> {
        let Self { pipe, order, .. } = self;
        let Some(last) = order.last else { return Next::End };
        if !self.driven.is_empty() {
            let source = "wanted a driver, found all workers still in the loader: call `Loader::driven`";
            return Next::Failed(Error::Load { at: pipe.at(order.next), source: source.into() });
        }
        while order.next.step >= order.rest.end() {
            // The caller asks for more, so the epoch is over, also on a rank that has no batch in the last step. If it has
            // none at all, it has none in later epochs either: of those without an end, the last would not come.
            let later = if order.next.step == 0 { last } else { order.next.epoch.saturating_add(1) };
            order.next.step = order.rest.max_steps();
            if order.next.epoch == last {
                return Next::End;
            }
            let now = Instant::now();
            pipe.used(now);
            pipe.recorder().epoch_ended(now);
            order.go_to(later);
            pipe.recorder().report.epochs = order.next.ordinal; // with those that are passed over
            pipe.recorder().began(order.next, Instant::now());
        }
        Next::Slot
    }

    fn item(&mut self, slot: Item<B, Records>) -> Batch<B> {
        self.order.next.step += 1;
        Batch { slot }
    }

    fn ended(&mut self, _: Option<&Error>) {
        self.order.last = None; // what was not started will not come
        self.pipe.retract();
    }

    fn left(&self) -> (usize, Option<usize>) {
        let Order { plan, rest, identity, next: Place { epoch, step, .. }, .. } = &self.order;
        let Some(last) = self.order.last else { return (0, Some(0)) };
        let trained = identity.steps_before(*epoch).saturating_add(rest.max_steps());
        let later = plan.steps_between(epoch.saturating_add(1)..last.saturating_add(1), trained);
        let left = later.saturating_add(rest.end().saturating_sub(*step));
        let left = Some(left).filter(|&left| left < u64::MAX).and_then(|left| usize::try_from(left).ok());
        (left.unwrap_or(usize::MAX).min(1), left)
    }
}

/// The batches of a call for epochs, in order, and a place among them. They are those of the plan. After a resumption
/// with another batch size or number of ranks, the rest of the interrupted epoch comes first.
///
/// The loader has one for the place of the caller. As the order of the pipe, a clone of it gives the batches, each with
/// its place. One struct in place of adapters, because each of them would move a batch once more.
#[derive(Clone)]
pub(super) struct Order {
    plan: Plan,
    /// The plan and the data set.
    own: Arc<Identity>,
    layout: Arc<Layout>,
    /// The readers of fields that are files. They begin when the pipe takes the first batch.
    files: Vec<Arc<Reader>>,
    /// Whether they are told what comes next.
    pub(super) hints: bool,
    /// The last epoch of the call. `None` if the call has no epochs.
    last: Option<u64>,
    next: Place,
    /// The batches of the epoch of `next`.
    rest: RemainingEpoch,
    /// What a checkpoint in that epoch belongs to. It differs from `own` if the training began with another plan.
    identity: Arc<Identity>,
}

impl Order {
    pub(super) fn new(plan: Plan, identity: Identity, layout: Layout, files: Vec<Arc<Reader>>) -> Self {
        let (own, layout, next, last) = (Arc::new(identity), Arc::new(layout), Place::default(), None);
        let Start { rest, identity, .. } = own.start(&plan, next.epoch, next.step);
        Self { plan, own, layout, files, hints: true, last, next, rest, identity }
    }

    /// Goes to the first batch of a later epoch.
    fn go_to(&mut self, epoch: u64) {
        let ordinal = self.next.ordinal.saturating_add(epoch - self.next.epoch);
        if !self.identity.before.is_empty() {
            Arc::make_mut(&mut self.identity).end_epoch(self.rest.max_steps());
        }
        self.next = Place { ordinal, epoch, step: 0 };
        self.rest = self.plan.epoch_after(self.identity.steps_before(epoch));
    }
}

impl Iterator for Order {
    type Item = (Place, Records);

    fn next(&mut self) -> Option<(Place, Records)> {
        for files in mem::take(&mut self.files) {
            // Without hints it only learns that a pass begins.
            let order = self.hints.then(|| self.clone()).into_iter().flatten();
            files.begin(order.map(|(_, records)| records.plan));
        }
        loop {
            let place = self.next;
            if let Some(plan) = self.rest.batch(place.epoch, place.step) {
                self.next.step += 1;
                let (identity, layout) = (self.identity.clone(), self.layout.clone());
                return Some((place, Records { plan, identity, layout, offsets: Vec::new() }));
            }
            // If an epoch has no step, later epochs have none either, and without this check there would be no end.
            if place.step == 0 || self.last == Some(place.epoch) {
                return None;
            }
            self.go_to(place.epoch + 1);
        }
    }
}

/// An iterator over the batches of one or more epochs. [`Loader::epochs`] returns it.
///
/// # Errors
///
/// The iterator returns every batch before the one that failed, then one error, and then ends.
///
/// - [`Error::Load`]: the data set returned an error, or the files could not be read. In a
///   [driven](crate::loader::LoaderBuilder::driven) loader also: a worker was dropped during a load, or no driver has
///   taken the workers.
/// - [`Error::Length`]: the data set read a wrong number of bytes.
/// - [`Error::Field`]: the data set gave a wrong number of lengths.
/// - [`Error::Transform`]: a transform returned an error, or a record of a wrong length.
/// - [`Error::Panicked`]: the data set, a transform or a task's waker panicked.
/// - [`Error::SlotHeld`]: the caller did not drop an earlier batch within the
///   [`held_timeout`](crate::loader::LoaderBuilder::held_timeout).
/// - [`Error::Upload`]: a copy to the device failed.
/// - [`Error::Forked`]: with overlap, this process was forked from the process that built the loader.
/// - [`Error::ThreadGone`]: no worker is left. On a device without overlap also: no driver has filled the slot that
///   `next` asked for.
pub type Epochs<'l, B = Host> = Items<'l, Loader<B>>;

impl<B: Backend> Epochs<'_, B> {
    /// Returns the position after the last batch that the caller received; see [`Loader::checkpoint`].
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.front().checkpoint()
    }
}

/// One batch in device memory: a lease of a device slot, and the position of the batch.
#[cfg(feature = "cuda")]
pub type DeviceBatch = Batch<Cuda>;
