//! An iterator of tensor groups, read ahead of their use.

use std::fmt;
use std::future::poll_fn;
use std::iter::FusedIterator;
use std::sync::OnceLock;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::TensorStream;
use super::group::{Group, Place};
use crate::backend::{Backend, Host, Waiting};
use crate::error::Error;
use crate::observe::report::Report;
use crate::slot::Ticket;

/// An iterator over the groups of one pass. [`TensorStream::pass`] returns it.
///
/// `next` blocks the thread until the next group is in memory. [`try_next`](Self::try_next) does not wait,
/// [`next_timeout`](Self::next_timeout) waits for a limited time, and [`next_async`](Self::next_async) waits without
/// blocking the thread. The caller may mix these calls. With the feature `stream`, this type also implements
/// `futures_core::Stream`.
///
/// # Errors
///
/// The iterator returns every group that was read before the failure, then one error, and then ends.
///
/// - [`Error::Load`]: a file could not be read.
/// - [`Error::Option`]: the [order](super::StreamBuilder::order) does not return each group exactly once, or the
///   memory of a group cannot be allocated.
/// - [`Error::Panicked`]: the order panicked on the reading thread.
/// - [`Error::SlotHeld`]: the caller did not drop an earlier group within the
///   [`held_timeout`](super::StreamBuilder::held_timeout).
/// - [`Error::Forked`]: this process was forked from the process that built the stream.
/// - [`Error::ThreadGone`]: the thread ended unexpectedly.
#[must_use = "groups are delivered only by iterating"]
pub struct Pass<'s, B: Backend = Host> {
    stream: &'s mut TensorStream<B>,
    /// The groups, and the next one.
    order: Vec<usize>,
    at: usize,
    /// The next group that comes through a slot.
    next: Ticket,
    /// The error of an invalid order.
    failed: Option<Error>,
    ended: bool,
}

impl<'s, B: Backend> Pass<'s, B> {
    pub(super) fn new(stream: &'s mut TensorStream<B>) -> Self {
        let pass = stream.passes;
        let (order, failed) = match stream.schedule.pass(pass) {
            Ok(order) => (order, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        stream.passes += 1;
        let next = match stream.flowing.take().filter(|_| failed.is_none()) {
            Some(next) => next,
            None => Self::begin(stream, pass, failed.is_none()),
        };
        stream.stage.recorder().began(next, Instant::now());
        Self { stream, order, at: 0, next, failed, ended: false }
    }

    /// Begins a series of passes with this one.
    fn begin(stream: &mut TensorStream<B>, pass: u64, read: bool) -> Ticket {
        let generation = stream.stage.next_generation();
        let there = stream.kept.iter().filter_map(OnceLock::get).count() == stream.schedule.kept();
        // All groups come through the slots until each of those that are kept has done so.
        let steps = if there { stream.schedule.streamed() } else { stream.schedule.groups().len() as u64 };
        let last = if stream.cycle { u64::MAX } else { pass };
        let next = Ticket { generation, seq: 0, ordinal: pass, epoch: pass, step: 0, steps, last };
        if let (Some(gate), true, false) = (stream.stage.gate(), read, stream.stage.is_orphaned()) {
            gate.begin(next);
        }
        next
    }

    /// Returns the next group, without waiting for the reading thread. Returns [`Poll::Pending`] if the next group
    /// is not in memory, and `Ready(None)` at the end of the pass. If [`overlap`](super::StreamBuilder::overlap) is
    /// `false`, this call reads the group and blocks until the read completes. The [errors](Pass#errors) are listed
    /// on the type.
    pub fn try_next(&mut self) -> Poll<Option<Result<Group<B>, Error>>> {
        self.advance(Waiting::Try)
    }

    /// Waits up to `timeout` for the next group. Returns [`Poll::Pending`] if the group is not in memory in time,
    /// and `Ready(None)` at the end of the pass. After `Pending`, a later call returns the group. If
    /// [`overlap`](super::StreamBuilder::overlap) is `false`, this call reads the group, and `timeout` does not
    /// limit the read. The [errors](Pass#errors) are listed on the type.
    pub fn next_timeout(&mut self, timeout: Duration) -> Poll<Option<Result<Group<B>, Error>>> {
        match Instant::now().checked_add(timeout) {
            Some(deadline) => self.advance(Waiting::Until(deadline)),
            None => Poll::Ready(self.next()),
        }
    }

    /// Returns the next group, or [`Poll::Pending`] if the group is not in memory. After `Pending`, the stream wakes
    /// the task of `cx` when the group is ready. Returns `Ready(None)` at the end of the pass. The
    /// [errors](Pass#errors) are listed on the type.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Group<B>, Error>>> {
        self.advance(Waiting::Poll(cx))
    }

    /// Waits for the next group without blocking the thread. If [`overlap`](super::StreamBuilder::overlap) is
    /// `false`, the group is read on the thread that polls the future. Dropping the future loses no group. The
    /// [errors](Pass#errors) are listed on the type.
    pub async fn next_async(&mut self) -> Option<Result<Group<B>, Error>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Reports where the time went so far; see [`TensorStream::report`].
    #[must_use]
    pub fn report(&self) -> Report {
        self.stream.report()
    }

    /// Since when the next slot has been found held by calls that do not wait.
    #[doc(hidden)]
    #[must_use]
    pub fn held_for(&self) -> Option<Duration> {
        self.stream.stage.held_for()
    }

    fn advance(&mut self, waiting: Waiting<'_, '_>) -> Poll<Option<Result<Group<B>, Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if let Some(error) = self.failed.take() {
            self.end(false);
            return Poll::Ready(Some(Err(error)));
        }
        let (stage, schedule) = (&mut self.stream.stage, &self.stream.schedule);
        // `next` counts only the groups that come through the slots. Errors and traces show the place in the pass.
        let ticket = Ticket { step: self.at as u64, steps: self.order.len() as u64, ..self.next };
        let at = stage.naming().at(ticket);
        if stage.is_orphaned() {
            self.ended = true;
            return Poll::Ready(Some(Err(Error::Forked { at })));
        }
        let Some(&group) = self.order.get(self.at) else {
            self.end(true);
            return Poll::Ready(None);
        };
        let mut slot = None;
        // Kept groups no longer come through the slots once all of them are there.
        if self.next.steps == self.order.len() as u64 || schedule.is_streamed(group) {
            let Poll::Ready(found) = stage.receive(ticket, waiting) else { return Poll::Pending };
            match found {
                Ok(found) => slot = Some(found),
                Err(mut error) => {
                    // Without an order, the reading thread does not know the place.
                    if let Error::Panicked { at: found, .. } = &mut error {
                        *found = at;
                    }
                    self.end(false);
                    return Poll::Ready(Some(Err(error)));
                }
            }
            self.next.step += 1;
            self.next.seq += 1;
        }
        let kept = self.stream.kept[group].get().filter(|_| !schedule.is_streamed(group));
        let place = match (kept, slot) {
            (Some(kept), _) => Place::Kept(kept.clone()),
            (None, Some(slot)) => Place::Slot(slot),
            (None, None) => unreachable!("a group that is kept was read before"),
        };
        self.at += 1;
        let (groups, taken) = (schedule.groups().clone(), self.stream.taken.clone());
        Poll::Ready(Some(Ok(Group { place, groups, group, at, taken, more: None })))
    }

    /// The pass is over, or given up.
    fn end(&mut self, whole: bool) {
        self.ended = true;
        let TensorStream { stage, schedule, cycle, flowing, .. } = &mut *self.stream;
        if stage.is_foreign() {
            return;
        }
        stage.ended(Instant::now());
        if whole && *cycle {
            let Ticket { ordinal, epoch, .. } = self.next;
            let steps = schedule.streamed();
            *flowing = Some(Ticket { ordinal: ordinal + 1, epoch: epoch + 1, step: 0, steps, ..self.next });
        } else if let Some(gate) = stage.gate() {
            gate.retract();
        }
    }
}

impl<B: Backend> Iterator for Pass<'_, B> {
    type Item = Result<Group<B>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.advance(Waiting::Block) {
            Poll::Ready(item) => item,
            Poll::Pending => unreachable!("a wait that blocks ends with a group or an error"),
        }
    }

    /// Returns 1 or 0 as the lower bound, because an error may end the iteration early. The upper bound is the
    /// number of remaining groups.
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.ended { 0 } else { self.order.len() - self.at };
        (left.min(1), Some(left.max(usize::from(self.failed.is_some()))))
    }
}

impl<B: Backend> FusedIterator for Pass<'_, B> {}

#[cfg(feature = "stream")]
impl<B: Backend> futures_core::Stream for Pass<'_, B> {
    type Item = Result<Group<B>, Error>;

    fn poll_next(self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pass::poll_next(self.get_mut(), cx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        Iterator::size_hint(self)
    }
}

impl<B: Backend> Drop for Pass<'_, B> {
    fn drop(&mut self) {
        if !self.ended {
            self.end(self.failed.is_none() && self.at == self.order.len());
        }
    }
}

impl<B: Backend> fmt::Debug for Pass<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass")
            .field("pass", &self.next.epoch)
            .field("at", &self.at)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
