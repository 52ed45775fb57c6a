//! An iterator of rounds, made ahead of their use.

use std::fmt;
use std::future::poll_fn;
use std::iter::FusedIterator;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use twinbuf_core::KeptSlot;

use super::{Generator, Hook};
use crate::backend::Waiting;
use crate::backend::host::Value;
use crate::error::{At, Error};
use crate::slot::Slot;
use crate::thread::this_thread;

/// An iterator over rounds. [`Generator::rounds`] returns it.
///
/// `next` blocks the thread until the next round is made. [`try_next`](Self::try_next) does not wait,
/// [`next_timeout`](Self::next_timeout) waits for a limited time, and [`next_async`](Self::next_async) waits without
/// blocking the thread. The caller may mix these calls. With the feature `stream`, this type also implements
/// `futures_core::Stream`.
///
/// # Errors
///
/// The iterator returns every round made before the failure, then one error, and then ends.
///
/// - [`Error::Load`]: the closure returned an error.
/// - [`Error::Panicked`]: the closure panicked.
/// - [`Error::Hook`]: a hook returned an error.
/// - [`Error::SlotHeld`]: the caller did not drop an earlier round within the
///   [`held_timeout`](super::GeneratorBuilder::held_timeout).
/// - [`Error::Forked`]: this process was forked from the process that built the generator.
/// - [`Error::ThreadGone`]: the thread ended unexpectedly.
///
/// # Panics
///
/// A call that asks for a round panics if a hook panics; see [`Generator::rounds`].
#[must_use = "rounds are delivered only by iterating"]
pub struct Rounds<'g, 'h, T: Send + 'static> {
    generator: &'g mut Generator<'h, T>,
    end: u64,
    started: Instant,
    /// The hook failed for the next round when the last one was received.
    hook_failed: Option<Error>,
    ended: bool,
}

impl<T: Send + 'static> Iterator for Rounds<'_, '_, T> {
    type Item = Result<Round<T>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.advance(Waiting::Block) {
            Poll::Ready(item) => item,
            Poll::Pending => unreachable!("a wait that blocks ends with a round or an error"),
        }
    }

    /// Collects at most two rounds. Each round occupies a slot, and the collection holds both slots: if there are
    /// more rounds, the collection ends at once with [`Error::SlotHeld`] and does not wait.
    fn collect<C: FromIterator<Self::Item>>(mut self) -> C {
        let mut rounds = 0;
        std::iter::from_fn(|| {
            rounds += 1;
            if rounds <= 2 {
                return self.next();
            }
            let patience = self.generator.stage.set_held_timeout(Duration::ZERO);
            let item = self.next();
            self.generator.stage.set_held_timeout(patience);
            item
        })
        .collect()
    }

    /// Returns 1 or 0 as the lower bound, because an error may end the iteration early. The upper bound is the
    /// number of remaining rounds, or 1 if only the `after` hook may still run.
    fn size_hint(&self) -> (usize, Option<usize>) {
        if self.ended {
            return (0, Some(0));
        }
        let left = self.end - self.generator.next;
        // At the end there is no round, but `after` may fail.
        let most = left.max(u64::from(self.generator.after.is_some()));
        (usize::from(left > 0), usize::try_from(most).ok())
    }
}

impl<T: Send + 'static> FusedIterator for Rounds<'_, '_, T> {}

impl<T: Send + 'static> Generator<'_, T> {
    /// Receives the next round, which may be started. After a failed load or a panic it has to be granted again.
    pub(super) fn receive(&mut self, waiting: Waiting<'_, '_>) -> Poll<Result<Round<T>, Error>> {
        let Poll::Ready(found) = self.stage.receive(self.ticket(), waiting) else { return Poll::Pending };
        match &found {
            Ok(_) => self.next += 1,
            Err(Error::Load { .. } | Error::Panicked { .. }) => {
                self.granted = self.next;
                if let Some(gate) = self.stage.gate() {
                    gate.heard();
                }
            }
            Err(_) => {}
        }
        Poll::Ready(found.map(|slot| Round { slot }))
    }
}

impl<'g, 'h, T: Send + 'static> Rounds<'g, 'h, T> {
    pub(super) fn new(generator: &'g mut Generator<'h, T>, n: u64) -> Self {
        let end = generator.next.saturating_add(n);
        Self { generator, end, started: Instant::now(), hook_failed: None, ended: false }
    }

    /// Returns the next round, without waiting for the thread that makes it. Returns [`Poll::Pending`] if the round
    /// is not made, and `Ready(None)` at the end. If [`overlap`](super::GeneratorBuilder::overlap) is `false`, this
    /// call makes the round and blocks until it is made.
    ///
    /// The hooks run inside this call. The [errors](Rounds#errors) are listed on the type.
    pub fn try_next(&mut self) -> Poll<Option<Result<Round<T>, Error>>> {
        self.advance(Waiting::Try)
    }

    /// Waits up to `timeout` for the next round. Returns [`Poll::Pending`] if the round is not made in time, and
    /// `Ready(None)` at the end. After `Pending`, a later call returns the round. If
    /// [`overlap`](super::GeneratorBuilder::overlap) is `false`, this call makes the round, and `timeout` does not
    /// limit the closure.
    ///
    /// The hooks run inside this call, and `timeout` does not limit them. The [errors](Rounds#errors) are listed on
    /// the type.
    pub fn next_timeout(&mut self, timeout: Duration) -> Poll<Option<Result<Round<T>, Error>>> {
        match Instant::now().checked_add(timeout) {
            Some(deadline) => self.advance(Waiting::Until(deadline)),
            None => Poll::Ready(self.next()),
        }
    }

    /// Returns the next round, or [`Poll::Pending`] if the round is not made. After `Pending`, the generator wakes
    /// the task of `cx` when the round is ready. Returns `Ready(None)` at the end. The [errors](Rounds#errors) are
    /// listed on the type.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Round<T>, Error>>> {
        self.advance(Waiting::Poll(cx))
    }

    /// Waits for the next round without blocking the thread. If [`overlap`](super::GeneratorBuilder::overlap) is
    /// `false`, the round is made on the thread that polls the future. Dropping the future loses no round. The
    /// [errors](Rounds#errors) are listed on the type.
    pub async fn next_async(&mut self) -> Option<Result<Round<T>, Error>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn advance(&mut self, waiting: Waiting<'_, '_>) -> Poll<Option<Result<Round<T>, Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let generator = &mut *self.generator;
        let ticket = generator.ticket();
        if generator.stage.is_orphaned() {
            self.ended = true;
            let at = generator.stage.naming().at(ticket);
            return Poll::Ready(Some(Err(Error::Forked { at })));
        }
        if let (Some(hook), Some(used)) = (&mut generator.after, generator.used) {
            if let Err(error) = run(hook, used, &generator.stage.naming().loader) {
                self.end();
                return Poll::Ready(Some(Err(error)));
            }
        }
        generator.used = None;
        if generator.next == self.end || self.hook_failed.is_some() {
            self.end();
            return Poll::Ready(self.hook_failed.take().map(Err));
        }
        generator.stage.asked(ticket, Instant::now());
        let found = match self.grant() {
            Ok(prepared) => {
                let stage = &mut self.generator.stage;
                if prepared {
                    stage.recorder().prepared(Instant::now());
                }
                let Poll::Ready(found) = self.generator.receive(waiting) else { return Poll::Pending };
                found
            }
            Err(error) => Err(error),
        };
        Poll::Ready(Some(match found {
            Ok(round) => {
                self.generator.used = Some(round.number());
                if self.generator.next < self.end {
                    self.hook_failed = self.grant().err();
                }
                Ok(round)
            }
            Err(error) => {
                self.end();
                Err(error)
            }
        }))
    }

    /// Gives leave to start the rounds asked for; with a hook only the next one, after the hook. Returns whether there
    /// was any to give.
    fn grant(&mut self) -> Result<bool, Error> {
        let Generator { stage, before, next, granted, .. } = &mut *self.generator;
        *granted = match before {
            Some(hook) if granted == next => {
                run(hook, *next, &stage.naming().loader)?;
                *next + 1
            }
            None if *granted < self.end => self.end,
            _ => return Ok(false),
        };
        if let Some(gate) = stage.gate() {
            gate.grant(*granted - 1, self.started);
        }
        Ok(true)
    }

    fn end(&mut self) {
        self.ended = true;
        let Generator { stage, before, granted, .. } = &mut *self.generator;
        if stage.is_orphaned() {
            return;
        }
        stage.ended(Instant::now());
        // With a hook the round that it ran before has been granted: it is made from what the hook saw.
        if let (Some(gate), None) = (stage.gate(), before) {
            *granted = gate.retract();
        }
    }
}

/// Runs a hook for a round.
fn run(hook: &mut Hook<'_>, round: u64, loader: &Option<Arc<str>>) -> Result<(), Error> {
    hook(round).map_err(|source| {
        let at = At { loader: loader.clone(), epoch: round, step: None };
        Error::Hook { at, source }
    })
}

#[cfg(feature = "stream")]
impl<T: Send + 'static> futures_core::Stream for Rounds<'_, '_, T> {
    type Item = Result<Round<T>, Error>;

    fn poll_next(self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Rounds::poll_next(self.get_mut(), cx)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        Iterator::size_hint(self)
    }
}

impl<T: Send + 'static> Drop for Rounds<'_, '_, T> {
    fn drop(&mut self) {
        if !self.ended {
            self.end();
        }
    }
}

/// The data of one round, in its slot. It dereferences to `T`. Dropping it frees the slot. It may move to another
/// thread.
pub struct Round<T: Send + 'static> {
    pub(super) slot: KeptSlot<'static, Slot<Value<T>>>,
}

/// The report takes into account how long rounds hold their slots.
impl<T: Send + 'static> Drop for Round<T> {
    fn drop(&mut self) {
        self.slot.freed = Some((Instant::now(), this_thread()));
    }
}

impl<T: Send + 'static> Round<T> {
    /// Returns the number of the round. Numbers start at [`first_round`](super::GeneratorBuilder::first_round) and
    /// continue over all iterators of the generator.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.slot.meta().ticket.epoch
    }
}

impl<T: Send + 'static> Deref for Round<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.slot.content.0
    }
}

impl<T: Send + 'static> DerefMut for Round<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.slot.content.0
    }
}

impl<T: Send + 'static> fmt::Debug for Rounds<'_, '_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rounds")
            .field("next", &self.generator.next)
            .field("end", &self.end)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl<T: fmt::Debug + Send + 'static> fmt::Debug for Round<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Round").field("number", &self.number()).field("value", &**self).finish()
    }
}
