//! The iterator of items: the only one, for every front end of a pipe.

use std::future::poll_fn;
use std::iter::FusedIterator;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::ring::{Ring, Waiting};
use super::turn::FOREVER;
use super::{Pipe, Place};
use crate::error::{Error, Reading};
use crate::observe::report::Report;

/// What [`Items`] iterates over: a [`Pipe`], a [`Loader`](crate::Loader), a
/// [`Generator`](crate::generate::Generator) or a stream of weights. No other crate implements this trait.
pub trait Front: Course<<Self as Front>::Item> {
    /// What the caller receives.
    type Item;
}

/// The caller's side of an order: what comes next, and how it is handed out as an item `I`.
pub trait Course<I> {
    /// The ring that the items come from.
    type Ring: Ring;

    /// Returns the pipe.
    fn pipe(&self) -> &Pipe<Self::Ring>;

    /// Returns the pipe.
    fn pipe_mut(&mut self) -> &mut Pipe<Self::Ring>;

    /// Returns the name of the next item, for errors.
    fn place(&self) -> Place;

    /// Decides what comes next. It is called again for the same item after a call that returned no item.
    fn next(&mut self) -> Next<I>;

    /// Makes the next item from a filled slot.
    fn item(&mut self, slot: <Self::Ring as Ring>::Item) -> I;

    /// The iteration is over: at its end, because the caller left it, or with an error, which the caller receives.
    fn ended(&mut self, error: Option<&Error>);

    /// Returns the bounds of the number of items that are left.
    fn left(&self) -> (usize, Option<usize>);
}

/// What comes next.
#[derive(Debug)]
pub enum Next<I> {
    /// The next unit of the pipe.
    Slot,
    /// An item that needs no slot.
    Item(I),
    /// The end of the iteration.
    End,
    /// An error, and then the end.
    Failed(Error),
}

/// An iterator over the items of a front end: the batches of a loader, the rounds of a generator, the groups of a stream.
///
/// With overlap, `next` blocks the thread until the next item is ready, [`try_next`](Self::try_next) does not wait,
/// [`next_timeout`](Self::next_timeout) waits for a limited time, and [`next_async`](Self::next_async) waits without
/// blocking the thread. A generator's hook runs in any of them. The caller may mix these calls. With the feature
/// `stream`, this type also implements `futures_core::Stream`.
///
/// The iterator returns every item before the one that failed, then one error, and then ends; only the items of a pipe
/// can be [resumed](Self::resume). If the caller drops it early, no further unit is started, except a generator's round
/// whose hook has run.
///
/// An item occupies its slot until it is dropped or leaves it. To collect more than there are slots, collect results
/// computed from the items (`items.map(..).collect()`), or take the memory out of each slot of a loader in host memory
/// ([`Batch::into_buffer`](crate::Batch::into_buffer)).
#[must_use = "items are delivered only by iterating"]
pub struct Items<'f, F: Front> {
    front: Held<'f, F>,
    pub(super) ended: bool,
}

/// The front end of an iterator.
enum Held<'f, F> {
    Lent(&'f mut F),
    /// `None` once it is given back: the iterator is over.
    Own(Option<Box<F>>),
}

impl<'f, F: Front> Items<'f, F> {
    /// Iterates over what `front` has been told to deliver: after the end of an iteration nothing, until it is told again.
    /// A generator goes on with the rounds that are left. A pipe without a [`begin`](Pipe::begin) returns an error.
    pub fn lent(front: &'f mut F) -> Self {
        Self { front: Held::Lent(front), ended: false }
    }

    /// Returns the front end.
    pub(crate) fn front(&self) -> &F {
        match &self.front {
            Held::Lent(front) => front,
            Held::Own(front) => front.as_deref().expect("given back by what consumes the iterator"),
        }
    }

    pub(super) fn front_mut(&mut self) -> &mut F {
        match &mut self.front {
            Held::Lent(front) => front,
            Held::Own(front) => front.as_deref_mut().expect("given back by what consumes the iterator"),
        }
    }

    /// Returns the next item, without waiting for a worker. Returns [`Poll::Pending`] if it is not filled, and
    /// `Ready(None)` at the end. Without overlap, and if no driver does it, this call fills the slot, and blocks until
    /// that is done.
    ///
    /// The [`Report`] counts the time from the first call that returns `Pending` to the call that returns the item as
    /// wait time.
    pub fn try_next(&mut self) -> Poll<Option<Result<F::Item, Error>>> {
        self.advance(Waiting::Try)
    }

    /// Waits up to `timeout` for the next item. Returns [`Poll::Pending`] if it is not filled in time, and `Ready(None)`
    /// at the end. After `Pending`, a later call returns the item, and [`reading`](Self::reading) shows what is being
    /// read. This call may fill slots: without overlap, and with it if the caller helps ([`Loader`](crate::Loader),
    /// [`Builder::helper`](super::Builder::helper)). `timeout` limits neither a fill nor, without overlap, a copy to a device.
    pub fn next_timeout(&mut self, timeout: Duration) -> Poll<Option<Result<F::Item, Error>>> {
        // No `Instant` is `Duration::MAX` from now.
        self.advance(Waiting::Until(Instant::now() + timeout.min(FOREVER)))
    }

    /// Returns the next item, or [`Poll::Pending`] if it is not filled. After `Pending`, the task of `cx` is woken when
    /// the item or an error is ready, or earlier. Returns `Ready(None)` at the end. Without overlap it fills the slot,
    /// as [`try_next`](Self::try_next) does.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<F::Item, Error>>> {
        self.advance(Waiting::Poll(cx))
    }

    /// Waits for the next item without blocking the thread. Without overlap, and if no driver does it, the thread that
    /// polls the future fills the slot, and blocks meanwhile. Dropping the future loses no item.
    pub async fn next_async(&mut self) -> Option<Result<F::Item, Error>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Returns how long an earlier item has blocked the next slot, measured from the first call of
    /// [`try_next`](Self::try_next), [`next_timeout`](Self::next_timeout) or [`poll_next`](Self::poll_next) that found
    /// the slot occupied. Returns `None` if the last call did not find it occupied.
    #[must_use]
    pub fn held_for(&self) -> Option<Duration> {
        self.front().pipe().running.held_since.map(|since| since.elapsed())
    }

    /// Returns what the worker is reading whose unit is needed first: its name, the duration so far, and, if known, the
    /// record, the file and the offset. Returns `None` if no worker is filling a slot, and in a forked process.
    ///
    /// Call it after [`next_timeout`](Self::next_timeout) returned `Pending`.
    #[must_use]
    pub fn reading(&self) -> Option<Reading> {
        self.front().pipe().reading()
    }

    /// Ends the use of the last item now, for the report and the trace. Without this call, the request for the next item
    /// or the end of the iteration ends it.
    pub fn used(&mut self) {
        self.front_mut().pipe_mut().used(Instant::now());
    }

    /// Returns a report of where the time went so far.
    #[must_use]
    pub fn report(&self) -> Report {
        self.front().pipe().report()
    }

    /// Ends the iteration and returns the front end. Returns `None` if the iterator only borrows it.
    #[must_use = "otherwise drop the iterator"]
    pub fn into_front(mut self) -> Option<F> {
        if !self.ended {
            self.end(None);
        }
        match &mut self.front {
            Held::Lent(_) => None,
            Held::Own(front) => front.take().map(|front| *front),
        }
    }

    fn advance(&mut self, waiting: Waiting<'_, '_>) -> Poll<Option<Result<F::Item, Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let front = self.front_mut();
        if front.pipe().is_orphaned() {
            // This is a forked process, and the workers are in its parent: no item would come. Report and trace are the
            // parent's.
            let at = front.pipe().at(front.place());
            self.ended = true;
            return Poll::Ready(Some(Err(Error::Forked { at })));
        }
        let found = match front.pipe_mut().failed.take().map_or_else(|| front.next(), Next::Failed) {
            Next::Slot => {
                let place = front.place();
                let Poll::Ready(found) = front.pipe_mut().receive(place, waiting) else {
                    return Poll::Pending;
                };
                found
            }
            Next::Item(item) => return Poll::Ready(Some(Ok(item))),
            Next::End => Ok(None),
            Next::Failed(error) => Err(error),
        };
        Poll::Ready(match found {
            Ok(Some(slot)) => Some(Ok(self.front_mut().item(slot))),
            Ok(None) => {
                self.end(None);
                None
            }
            Err(error) => {
                self.end(Some(&error));
                Some(Err(error))
            }
        })
    }

    fn end(&mut self, error: Option<&Error>) {
        self.ended = true;
        if !self.front().pipe().is_orphaned() {
            self.front_mut().pipe_mut().ended(Instant::now());
            self.front_mut().ended(error);
        }
    }
}

impl<F: Front> Items<'static, F> {
    /// Iterates as [`lent`](Self::lent) does, but owns the front end.
    pub fn owned(front: F) -> Self {
        Self { front: Held::Own(Some(Box::new(front))), ended: false }
    }
}

impl<F: Front> Iterator for Items<'_, F> {
    type Item = Result<F::Item, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.advance(Waiting::Block) {
            Poll::Ready(item) => item,
            Poll::Pending => unreachable!("a wait that blocks ends with an item or an error"),
        }
    }

    /// Returns 1 or 0 as the lower bound, because an error may end the iteration early. The upper bound is the number of
    /// items that are left, if the front end knows it.
    fn size_hint(&self) -> (usize, Option<usize>) {
        if self.ended { (0, Some(0)) } else { self.front().left() }
    }
}

impl<F: Front> FusedIterator for Items<'_, F> {}

#[cfg(feature = "stream")]
impl<F: Front> futures_core::Stream for Items<'_, F>
where
    Self: Unpin,
{
    type Item = Result<F::Item, Error>;

    fn poll_next(self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Items::poll_next(self.get_mut(), cx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        Iterator::size_hint(self)
    }
}

impl<F: Front> Drop for Items<'_, F> {
    fn drop(&mut self) {
        if !self.ended {
            self.end(None);
        }
    }
}

debug!([F: Front] Items['_, F], |items|
    next: items.front().place(), ended: items.ended);
