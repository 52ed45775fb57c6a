//! Epochs: an iterator of batches, loaded ahead of their use.

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

/// The batches of one epoch or of several; see [`Loader::epochs`].
///
/// After an error it ends. Dropping it early leaves the rest unread.
///
/// As an iterator it sleeps until the next batch is ready. [`try_next`](Self::try_next) does not wait,
/// [`next_timeout`](Self::next_timeout) waits for a limited time and [`next_async`](Self::next_async) waits as a
/// task; calls of all kinds may be mixed. With the feature `stream` it is a `futures_core::Stream` too.
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
    /// Iterates over the batches of several epochs as [`epochs`](Self::epochs) does, and owns the loader: for a function that
    /// returns its batches, a thread or a task. With the feature `stream` it is a `'static` stream.
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

    /// Iterates from a checkpoint as [`epochs_from`](Self::epochs_from) does, and owns the loader.
    ///
    /// # Errors
    ///
    /// The errors of [`epochs_from`](Self::epochs_from), and the loader.
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

    /// Collects the batches, at most as many as the loader has slots. If there are more, it fails with
    /// [`Error::SlotHeld`] at once: only the collection holds the slots, so a wait would never end.
    ///
    /// Instead, collect what is computed from the batches (`epoch.map(..).collect()`), raise
    /// [`host_depth`](crate::loader::LoaderBuilder::host_depth), or take
    /// [`Batch::into_buffer`](crate::Batch::into_buffer).
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

    /// Exact, unless an error ends the iteration early.
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

    /// Returns the next batch if it has been loaded, [`Poll::Pending`] if not. Without overlap it is loaded now.
    ///
    /// From the first call on, the caller counts as waiting for the batch in the [`Report`].
    ///
    /// # Errors
    ///
    /// Same as `next`; the error is in the returned `Result`.
    pub fn try_next(&mut self) -> Poll<Option<Result<B::Batch, Error>>> {
        self.advance(Waiting::Try)
    }

    /// Returns the next batch if it is loaded within `timeout`, [`Poll::Pending`] if not. Nothing is lost: the batch
    /// comes with a later call.
    ///
    /// [`reading`](Self::reading) tells what it waits for.
    pub fn next_timeout(&mut self, timeout: Duration) -> Poll<Option<Result<B::Batch, Error>>> {
        match Instant::now().checked_add(timeout) {
            Some(deadline) => self.advance(Waiting::Until(deadline)),
            None => Poll::Ready(self.next()),
        }
    }

    /// Returns the next batch, or [`Poll::Pending`] if it has not been loaded; the task of `cx` is then woken later.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<B::Batch, Error>>> {
        self.advance(Waiting::Poll(cx))
    }

    /// Waits for the next batch as a task, without blocking the thread; without overlap it is loaded on the thread
    /// that polls. Dropping the future loses nothing.
    pub async fn next_async(&mut self) -> Option<Result<B::Batch, Error>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Returns how long calls of [`try_next`](Self::try_next) and [`next_timeout`](Self::next_timeout) have found the next slot
    /// held by a batch that was received earlier. `None` if the last of them did not.
    #[must_use]
    pub fn held_for(&self) -> Option<Duration> {
        self.loader.stage.held_for()
    }

    /// Returns what the thread of the next batch is reading: the batch, for how long, file and offset. `None` if it
    /// reads nothing, because the batch is ready or no slot is free.
    ///
    /// For a caller whose [`next_timeout`](Self::next_timeout) found nothing. File and offset are those of the first record
    /// that the data set was asked for last, if it can tell ([`Dataset::locator`](crate::Dataset::locator)).
    #[must_use]
    pub fn reading(&self) -> Option<Reading> {
        self.loader.stage.reading(Some(self.next), &self.loader.locators)
    }

    /// Ends the iteration and returns the loader; `None` if the loader was only lent, by [`Loader::epochs`].
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

    /// Reports where the time went so far; see [`Loader::report`].
    #[must_use]
    pub fn report(&self) -> Report {
        self.loader.report()
    }

    /// Returns the times of the last steps; see [`Loader::recent_steps`].
    #[must_use]
    pub fn recent_steps(&self) -> Vec<StepTimes> {
        self.loader.recent_steps()
    }

    /// Returns the position after the last batch that was received; see [`Loader::checkpoint`].
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
