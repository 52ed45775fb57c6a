//! One epoch: an iterator of batches, which are guards of their slots.

use std::fmt;
use std::future::poll_fn;
use std::iter::FusedIterator;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Instant;

use bytemuck::{AnyBitPattern, NoUninit};
use twinbuf_core::{Park, ReadSlot};
use twinbuf_mmap::BatchPlan;

use crate::backend::{Backend, Host};
use crate::error::Error;
use crate::loader::{Feed, Loader, longest};
use crate::reader::{Job, Waiting};
use crate::slot::{Load, Slot};
use crate::spans::{self, Span};

/// The batches of one epoch; see [`Loader::epoch`].
///
/// After an error it ends. Dropping it early leaves the rest of the epoch unread.
///
/// As an iterator it waits for each batch, asleep. [`try_next`](Self::try_next) does not wait and
/// [`next_async`](Self::next_async) waits as a task; the three may be mixed. With the feature `stream` it is a
/// `futures_core::Stream` too. It stays on the thread of its loader: a task that has it is not `Send` (tokio:
/// `block_on` or a `LocalSet`).
#[must_use = "an epoch gives its batches only to who iterates it"]
pub struct Epoch<'l, B: Backend = Host> {
    loader: &'l Loader<B>,
    job: Job,
    step: u64,
    started: Instant,
    /// Up to when the report has counted the wall-clock time: from the first time a batch was asked for.
    counted: Option<Instant>,
    /// Since when the caller has been asking for the next batch.
    asked: Option<Instant>,
    /// The batch that the caller has.
    in_use: Option<InUse>,
    ended: bool,
    span: Span,
    /// While it asks for a batch.
    wait: Option<Span>,
}

struct InUse {
    step: u64,
    asked: Instant,
    received: Instant,
}

impl<'l, B: Backend> Iterator for Epoch<'l, B> {
    type Item = Result<B::Batch<'l>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.advance(Waiting::Block) {
            Poll::Ready(item) => item,
            Poll::Pending => unreachable!("a wait that blocks ends with a batch or an error"),
        }
    }

    /// Exact, unless an error cuts the epoch short.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended { 0 } else { self.loader.plan.steps() - self.step };
        (usize::from(left > 0), usize::try_from(left).ok())
    }
}

impl<B: Backend> FusedIterator for Epoch<'_, B> {}

impl<'l, B: Backend> Epoch<'l, B> {
    pub(crate) fn new(loader: &'l Loader<B>, job: Job) -> Self {
        let (started, step) = (Instant::now(), job.start);
        let span = spans::epoch(job.epoch);
        Self {
            loader,
            job,
            step,
            started,
            counted: None,
            asked: None,
            in_use: None,
            ended: false,
            span,
            wait: None,
        }
    }

    /// The next batch if it has been loaded, [`Poll::Pending`] if not; what [`next`](Iterator::next) would give
    /// otherwise. Without overlap it is loaded now.
    ///
    /// From the first time it is asked for, the caller counts as waiting for it in the [`Report`](crate::Report).
    pub fn try_next(&mut self) -> Poll<Option<Result<B::Batch<'l>, Error>>> {
        self.advance(Waiting::Try)
    }

    /// The next batch, or [`Poll::Pending`] if it has not been loaded; then the task of `cx` will be woken.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<B::Batch<'l>, Error>>> {
        self.advance(Waiting::Poll(cx))
    }

    /// Waits for the next batch as a task, without blocking the thread; without overlap it is loaded on it. A
    /// future that is dropped has lost nothing.
    pub async fn next_async(&mut self) -> Option<Result<B::Batch<'l>, Error>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn advance(&mut self, waiting: Waiting<'_, '_>) -> Poll<Option<Result<B::Batch<'l>, Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if self.loader.is_orphaned() {
            // Nobody would ever come, and what the report and the trace say is the other process's.
            self.ended = true;
            return Poll::Ready(Some(Err(Error::Forked { epoch: self.job.epoch, step: self.step })));
        }
        if self.is_superseded() {
            (self.ended, self.in_use) = (true, None);
            return Poll::Ready(Some(Err(Error::Superseded { epoch: self.job.epoch })));
        }
        let asked = *self.asked.get_or_insert_with(Instant::now);
        self.end_of_use(asked);
        if self.step == self.loader.plan.steps() {
            self.end(asked);
            // A rank that has no part in the last step has done it by asking.
            let (place, epoch) = (&self.loader.place, self.job.epoch);
            if place.get() == (epoch, self.step) {
                place.set((epoch, longest(&self.loader.plan).steps()));
            }
            return Poll::Ready(None);
        }
        let wait = self.wait.get_or_insert_with(|| spans::wait(&self.span, self.job.epoch, self.step));
        let task = matches!(waiting, Waiting::Poll(_));
        let found = wait.in_scope(|| self.loader.receive(self.job, self.step, waiting));
        self.loader.asleep.set(found.is_pending() && (task || self.loader.asleep.get()));
        let Poll::Ready(found) = found else { return Poll::Pending };
        (self.asked, self.wait) = (None, None);
        let received = Instant::now();
        Poll::Ready(Some(match found {
            Ok(mut batch) => {
                if let Some(load) = B::load(&mut batch) {
                    self.count(asked, received, load);
                }
                self.step += 1;
                self.loader.place.set((self.job.epoch, self.step));
                Ok(batch)
            }
            Err(error) => {
                self.end(received);
                Err(error)
            }
        }))
    }

    /// Whether another epoch was started: since then the time is that one's.
    fn is_superseded(&self) -> bool {
        self.loader.generation.get() != self.job.generation
    }

    /// A batch was asked for and received.
    fn count(&mut self, asked: Instant, received: Instant, load: &Load) {
        let bytes = load.result.as_ref().map_or(0, |&bytes| bytes);
        let (breakdown, batches) = (&self.loader.breakdown, &self.loader.running.batches);
        // The step begins when it is asked for, not when the last of the loader's phases does.
        breakdown.add_from("load", asked, load.cost.load());
        if breakdown.is_on() {
            // Without overlap the copy is done by now.
            if let Some((_, took)) = B::transfers(batches, self.job.place(None).ordinal, self.step).this {
                breakdown.add("h2d", took);
            }
        }
        self.loader.report.borrow_mut().add(&load.cost, bytes, received - asked);
        self.in_use = Some(InUse { step: self.step, asked, received });
        self.span(B::WAIT, Some(self.step), asked, received);
        let mut track = self.loader.running.track.borrow_mut();
        track.taken(load.place());
        track.write_if_due(received);
    }

    /// The caller is done with its batch: it asks for the next, or gives up.
    fn end_of_use(&mut self, now: Instant) {
        let mut report = self.loader.report.borrow_mut();
        report.wall += now.saturating_duration_since(self.counted.unwrap_or(now));
        self.counted = Some(now);
        if let Some(InUse { step, asked, received }) = self.in_use.take() {
            let mut used = now - received;
            let ordinal = self.job.place(None).ordinal;
            if let Some((copied, _)) = B::transfers(&self.loader.running.batches, ordinal, step).this {
                // The caller has its batch before the copy is done: its own work began only then.
                let waited = copied.saturating_duration_since(received).min(used);
                used -= waited;
                report.train.waiting += waited;
            }
            report.train.busy += used;
            self.span("train", Some(step), received, now);
            self.span("chunk", Some(step), asked, now);
            self.loader.running.track.borrow_mut().used(self.job.place(Some(step)), received);
        }
    }

    fn end(&mut self, now: Instant) {
        self.ended = true;
        // The trace is the other process's, or the time the newer epoch's.
        if self.loader.running.is_foreign() || self.is_superseded() {
            return;
        }
        self.end_of_use(now);
        self.span("epoch", None, self.started, now);
        self.loader.running.track.borrow_mut().flush();
        if let Feed::Ahead { wanted, .. } = &self.loader.running.feed {
            // Nothing more is wanted, until the next epoch. Relaxed: see the load in `Reader::run`.
            wanted.store(0, Ordering::Relaxed);
        }
    }

    fn span(&self, name: &str, step: Option<u64>, start: Instant, end: Instant) {
        self.loader.running.track.borrow_mut().span(name, self.job.place(step), start, end);
    }
}

#[cfg(feature = "stream")]
impl<'l, B: Backend> futures_core::Stream for Epoch<'l, B> {
    type Item = Result<B::Batch<'l>, Error>;

    fn poll_next(self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Epoch::poll_next(self.get_mut(), cx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        Iterator::size_hint(self)
    }
}

impl<B: Backend> Drop for Epoch<'_, B> {
    fn drop(&mut self) {
        if !self.ended {
            self.end(Instant::now());
        }
    }
}

/// The bytes of one batch, in their slot: record after record, in the plan's order, as the transform left them.
///
/// They begin at a multiple of 64 bytes; [`numbers`](Self::numbers) gives them as numbers. The slot is free for
/// another batch when this is dropped. It may be sent to another thread.
pub struct Batch<'l> {
    pub(crate) slot: ReadSlot<'l, Slot, Park>,
}

impl Batch<'_> {
    /// The epoch it belongs to.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.load().epoch
    }

    /// Its step within the epoch, from 0.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.load().step
    }

    /// Which records it is made of.
    #[must_use]
    pub fn plan(&self) -> &BatchPlan {
        &self.load().plan
    }

    /// The bytes as numbers of type `T`, in place: `batch.numbers::<f32>()?`.
    ///
    /// They are taken as they lie, so on a big-endian machine little-endian files have them the wrong way round.
    ///
    /// # Errors
    ///
    /// [`Error::Numbers`] unless the bytes are a whole number of them.
    pub fn numbers<T: AnyBitPattern>(&self) -> Result<&[T], Error> {
        bytemuck::try_cast_slice(self).map_err(|_| self.not_whole::<T>())
    }

    /// The bytes as numbers that can be changed, in place.
    ///
    /// # Errors
    ///
    /// Those of [`numbers`](Self::numbers).
    pub fn numbers_mut<T: AnyBitPattern + NoUninit>(&mut self) -> Result<&mut [T], Error> {
        let error = self.not_whole::<T>();
        bytemuck::try_cast_slice_mut(self).map_err(|_| error)
    }

    fn not_whole<T>(&self) -> Error {
        let (epoch, step) = (self.epoch(), self.step());
        Error::Numbers { epoch, step, wanted: std::any::type_name::<T>(), found: self.len() }
    }

    fn load(&self) -> &Load {
        let Some(load) = &self.slot.load else { unreachable!("a batch is made of a slot that was loaded") };
        load
    }
}

impl Deref for Batch<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.slot.batch()
    }
}

impl DerefMut for Batch<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.slot.batch_mut()
    }
}

impl<B: Backend> fmt::Debug for Epoch<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch")
            .field("epoch", &self.job.epoch)
            .field("step", &self.step)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("epoch", &self.epoch())
            .field("step", &self.step())
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}
