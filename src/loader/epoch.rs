//! An iterator of batches, loaded ahead of their use.

use std::fmt;
use std::future::poll_fn;
use std::iter::FusedIterator;
use std::mem;
use std::ops::{Deref, DerefMut, Range};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::Loader;
use crate::backend::{Backend, Host, Waiting};
use crate::batch::checkpoint::{Checkpoint, Start};
use crate::error::{Error, Reading};
use crate::observe::history::StepTimes;
use crate::observe::report::Report;
use crate::slot::Ticket;

/// An iterator over the batches of one or more epochs. [`Loader::epochs`] returns it.
///
/// `next` blocks the thread until the next batch is ready. [`try_next`](Self::try_next) does not wait,
/// [`next_timeout`](Self::next_timeout) waits for a limited time, and [`next_async`](Self::next_async) waits without
/// blocking the thread. The caller may mix these calls. With the feature `stream`, this type also implements
/// `futures_core::Stream`. If the caller drops the iterator early, the loader does not read the remaining batches.
///
/// # Errors
///
/// The iterator returns every batch that was loaded before the failure, then one error, and then ends.
///
/// - [`Error::Load`]: the data set returned an error.
/// - [`Error::Length`]: the data set read a wrong number of bytes.
/// - [`Error::Transform`]: a transform returned an error.
/// - [`Error::Panicked`]: the data set or a transform panicked.
/// - [`Error::SlotHeld`]: the caller did not drop an earlier batch within the
///   [`held_timeout`](crate::loader::LoaderBuilder::held_timeout).
/// - [`Error::Upload`]: a copy to the device failed.
/// - [`Error::Forked`]: this process was forked from the process that built the loader.
/// - [`Error::ThreadGone`]: the loading thread ended unexpectedly.
#[must_use = "batches are delivered only by iterating"]
pub struct Epochs<'l, B: Backend = Host> {
    loader: Held<'l, B>,
    /// The next batch; past the end of its epoch if the epoch is over.
    next: Ticket,
    /// The number after that of the last step of any rank in this epoch.
    longest: u64,
    ended: bool,
}

/// The loader of an iterator.
enum Held<'l, B: Backend> {
    Lent(&'l mut Loader<B>),
    Own(Box<Loader<B>>),
    /// Given back: the iterator is over.
    None,
}

impl<B: Backend> Deref for Held<'_, B> {
    type Target = Loader<B>;

    fn deref(&self) -> &Loader<B> {
        match self {
            Self::Lent(loader) => loader,
            Self::Own(loader) => loader,
            Self::None => unreachable!("given back by what consumes the iterator"),
        }
    }
}

impl<B: Backend> DerefMut for Held<'_, B> {
    fn deref_mut(&mut self) -> &mut Loader<B> {
        match self {
            Self::Lent(loader) => loader,
            Self::Own(loader) => loader,
            Self::None => unreachable!("given back by what consumes the iterator"),
        }
    }
}

impl<B: Backend> Loader<B> {
    /// Iterates over the batches of several epochs as [`epochs`](Self::epochs) does, but owns the loader. Use it to
    /// return an iterator from a function, or to move it to a thread or a task. With the feature `stream` it is a
    /// `'static` stream.
    ///
    /// [`Epochs::into_loader`] returns the loader.
    ///
    /// ```
    /// use twinbuf::{Batch, Error, Loader};
    ///
    /// fn batches(loader: Loader) -> impl Iterator<Item = Result<Batch, Error>> + Send + 'static {
    ///     loader.into_epochs(0..3)
    /// }
    /// ```
    pub fn into_epochs(self, epochs: Range<u64>) -> Epochs<'static, B> {
        let last = if epochs.is_empty() { None } else { epochs.end.checked_sub(1) };
        Epochs::new(Held::Own(Box::new(self)), Start::new(epochs.start), last)
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
        match self.start_from(checkpoint, epochs) {
            Ok((start, last)) => Ok(Epochs::new(Held::Own(Box::new(self)), start, last)),
            Err(error) => Err(Box::new((self, error))),
        }
    }
}

impl<B: Backend> Iterator for Epochs<'_, B> {
    type Item = Result<B::Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.advance(Waiting::Block) {
            Poll::Ready(item) => item,
            Poll::Pending => unreachable!("a wait that blocks ends with a batch or an error"),
        }
    }

    /// Collects the batches. Each batch occupies a slot, and the collection holds them all: if there are more
    /// batches than slots, the collection ends at once with [`Error::SlotHeld`] and does not wait.
    ///
    /// To collect more, collect results computed from the batches (`epoch.map(..).collect()`), increase
    /// [`host_depth`](crate::loader::LoaderBuilder::host_depth), or call
    /// [`Batch::into_buffer`](crate::Batch::into_buffer) on each batch.
    fn collect<C: FromIterator<Self::Item>>(mut self) -> C {
        let (_, slots) = self.loader.stage.slots();
        let mut batches = 0;
        std::iter::from_fn(|| {
            if batches >= slots {
                return self.without_patience();
            }
            batches += 1;
            self.next()
        })
        .collect()
    }

    /// Returns 1 or 0 as the lower bound, because an error may end the iteration early. The upper bound is the
    /// number of remaining batches.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let Ticket { epoch, step, steps, last, .. } = self.next;
        let left = if self.ended {
            0
        } else {
            let trained = self.loader.identity.steps_before(epoch).saturating_add(self.longest);
            let later = epoch.saturating_add(1)..last.saturating_add(1);
            let later = self.loader.schedule.plan.steps_between(later, trained);
            later.saturating_add(steps.saturating_sub(step))
        };
        let left = Some(left).filter(|&left| left < u64::MAX).and_then(|left| usize::try_from(left).ok());
        (left.unwrap_or(usize::MAX).min(1), left)
    }
}

impl<B: Backend> FusedIterator for Epochs<'_, B> {}

impl<'l, B: Backend> Epochs<'l, B> {
    /// From `start` to the end of epoch `last`; nothing if `last` is `None`.
    pub(super) fn lent(loader: &'l mut Loader<B>, start: Start, last: Option<u64>) -> Self {
        Self::new(Held::Lent(loader), start, last)
    }

    fn new(mut loader: Held<'l, B>, start: Start, last: Option<u64>) -> Self {
        let generation = loader.stage.next_generation();
        let ordinal = loader.epochs_begun;
        let Start { epoch, step, begun } = start;
        let last_epoch = last.unwrap_or(epoch);
        let next = Ticket { generation, seq: 0, ordinal, epoch, step, steps: 0, last: last_epoch };
        let mut epochs = Self { loader, next, longest: 0, ended: last.is_none() };
        if epochs.ended {
            return epochs;
        }
        if let Some(begun) = begun {
            epochs.loader.schedule.begin(generation, begun);
        }
        epochs.begin_epoch();
        let mut next = epochs.next;
        if let (Some(gate), false) = (epochs.loader.stage.gate(), epochs.loader.stage.is_orphaned()) {
            // A rank with a step fewer than the checkpoint's may have no batch left in this epoch.
            if next.step >= next.steps && next.epoch < next.last {
                let (later, _) = epochs.loader.schedule.epoch(generation, epoch + 1);
                let steps = later.end();
                next = Ticket { ordinal: ordinal + 1, epoch: epoch + 1, step: 0, steps, ..next };
            }
            gate.begin(next);
        }
        epochs
    }

    /// Returns the next batch, without waiting for the reading thread. Returns [`Poll::Pending`] if the batch is not
    /// loaded, and `Ready(None)` at the end. If [`overlap`](crate::loader::LoaderBuilder::overlap) is `false`, this
    /// call loads the batch and blocks until it is loaded.
    ///
    /// The [`Report`] counts the time from the first call that returns `Pending` to the call that returns the batch as
    /// wait time. The [errors](Epochs#errors) are listed on the type.
    pub fn try_next(&mut self) -> Poll<Option<Result<B::Batch, Error>>> {
        self.advance(Waiting::Try)
    }

    /// Waits up to `timeout` for the next batch. Returns [`Poll::Pending`] if the batch is not loaded in time, and
    /// `Ready(None)` at the end. After `Pending`, a later call returns the batch. If
    /// [`overlap`](crate::loader::LoaderBuilder::overlap) is `false`, this call loads the batch, and `timeout` does
    /// not limit the load.
    ///
    /// After `Pending`, [`reading`](Self::reading) shows the read in progress. The [errors](Epochs#errors) are
    /// listed on the type.
    pub fn next_timeout(&mut self, timeout: Duration) -> Poll<Option<Result<B::Batch, Error>>> {
        match Instant::now().checked_add(timeout) {
            Some(deadline) => self.advance(Waiting::Until(deadline)),
            None => Poll::Ready(self.next()),
        }
    }

    /// Returns the next batch, or [`Poll::Pending`] if the batch is not loaded. After `Pending`, the loader wakes
    /// the task of `cx` when the batch is ready. Returns `Ready(None)` at the end. The [errors](Epochs#errors) are
    /// listed on the type.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<B::Batch, Error>>> {
        self.advance(Waiting::Poll(cx))
    }

    /// Waits for the next batch without blocking the thread. If [`overlap`](crate::loader::LoaderBuilder::overlap)
    /// is `false`, the batch is loaded on the thread that polls the future. Dropping the future loses no batch. The
    /// [errors](Epochs#errors) are listed on the type.
    pub async fn next_async(&mut self) -> Option<Result<B::Batch, Error>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Returns how long an earlier batch has blocked the next slot, measured from the first call of
    /// [`try_next`](Self::try_next), [`next_timeout`](Self::next_timeout) or [`poll_next`](Self::poll_next) that
    /// found the slot occupied. Returns `None` if the last call did not find it occupied.
    #[must_use]
    pub fn held_for(&self) -> Option<Duration> {
        self.loader.stage.held_for()
    }

    /// Returns what the thread that loads the next batch is reading: the batch, the duration so far, the file and
    /// the offset. Returns `None` if the thread is not reading, because the batch is ready or no slot is free.
    ///
    /// Call it after [`next_timeout`](Self::next_timeout) returned `Pending`. File and offset belong to the first
    /// record of the current request to the data set. They are present only if the data set has a
    /// [`locator`](crate::Dataset::locator).
    #[must_use]
    pub fn reading(&self) -> Option<Reading> {
        self.loader.stage.reading(Some(self.next), &self.loader.locators)
    }

    /// Ends the iteration and returns the loader. Returns `None` if the iterator only borrows the loader
    /// ([`Loader::epochs`]).
    #[must_use = "otherwise drop the iterator"]
    pub fn into_loader(mut self) -> Option<Loader<B>> {
        if !self.ended {
            self.end();
        }
        match mem::replace(&mut self.loader, Held::None) {
            Held::Own(loader) => Some(*loader),
            _ => None,
        }
    }

    /// Returns a report of where the time went so far; see [`Loader::report`].
    #[must_use]
    pub fn report(&self) -> Report {
        self.loader.report()
    }

    /// Returns the times of the most recent completed steps; see [`Loader::recent_steps`].
    #[must_use]
    pub fn recent_steps(&self) -> Vec<StepTimes> {
        self.loader.recent_steps()
    }

    /// Returns the position after the last batch that the caller received; see [`Loader::checkpoint`].
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.loader.checkpoint()
    }

    /// The next batch, if its slot is not held.
    fn without_patience(&mut self) -> Option<Result<B::Batch, Error>> {
        let patience = self.loader.stage.set_held_timeout(Duration::ZERO);
        let item = self.next();
        self.loader.stage.set_held_timeout(patience);
        item
    }

    fn advance(&mut self, waiting: Waiting<'_, '_>) -> Poll<Option<Result<B::Batch, Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if self.loader.stage.is_orphaned() {
            // Nothing would ever come, and the report and the trace belong to the other process.
            self.ended = true;
            let at = self.loader.stage.naming().at(self.next);
            return Poll::Ready(Some(Err(Error::Forked { at })));
        }
        while self.next.step >= self.next.steps {
            // A rank that has no part in the last step has done it by asking.
            self.loader.position = (self.next.epoch, self.longest);
            if self.next.epoch == self.next.last {
                self.end();
                return Poll::Ready(None);
            }
            self.loader.stage.next_epoch(Instant::now());
            let (ordinal, epoch) = (self.next.ordinal + 1, self.next.epoch + 1);
            self.next = Ticket { ordinal, epoch, step: 0, ..self.next };
            self.begin_epoch();
        }
        let Poll::Ready(found) = self.loader.stage.receive(self.next, waiting) else { return Poll::Pending };
        Poll::Ready(Some(match found {
            Ok(batch) => {
                self.next.step += 1;
                self.next.seq += 1;
                self.loader.position = (self.next.epoch, self.next.step);
                Ok(batch.into())
            }
            Err(error) => {
                self.end();
                Err(error)
            }
        }))
    }

    fn begin_epoch(&mut self) {
        let (batches, identity) = self.loader.schedule.epoch(self.next.generation, self.next.epoch);
        (self.next.steps, self.longest) = (batches.end(), batches.max_steps());
        self.loader.identity = identity;
        self.loader.position = (self.next.epoch, self.next.step);
        self.loader.epochs_begun += 1;
        self.loader.stage.recorder().began(self.next, Instant::now());
    }

    fn end(&mut self) {
        self.ended = true;
        // In a forked process the trace is the other's.
        if !self.loader.stage.is_foreign() {
            self.loader.stage.ended(Instant::now());
            if let Some(gate) = self.loader.stage.gate() {
                gate.retract();
            }
        }
    }
}

#[cfg(feature = "stream")]
impl<B: Backend> futures_core::Stream for Epochs<'_, B> {
    type Item = Result<B::Batch, Error>;

    fn poll_next(self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Epochs::poll_next(self.get_mut(), cx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        Iterator::size_hint(self)
    }
}

impl<B: Backend> Drop for Epochs<'_, B> {
    fn drop(&mut self) {
        if !self.ended {
            self.end();
        }
    }
}

impl<B: Backend> fmt::Debug for Epochs<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epochs")
            .field("epoch", &self.next.epoch)
            .field("step", &self.next.step)
            .field("last", &self.next.last)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
