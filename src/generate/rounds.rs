//! Rounds: an iterator over what the closure made, ahead of its use.

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
use crate::backend::adaptive::Adaptive;
use crate::backend::host::Value;
use crate::error::{At, Error};
use crate::slot::Slot;

/// An iterator over rounds; see [`Generator::rounds`].
///
/// It yields at most one error, after every round made before it, and then ends. As an iterator it sleeps until the
/// next round is made; the other methods are those of [`Epochs`](crate::loader::Epochs). With the feature `stream` it
/// is a `futures_core::Stream` too.
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

    /// Collects the rounds, at most two. If there are more, it fails with [`Error::SlotHeld`] at once: only the
    /// collection holds the slots, so a wait would never end.
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

    /// Exact, unless an error ends the iteration early.
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

impl<'g, 'h, T: Send + 'static> Rounds<'g, 'h, T> {
    pub(super) fn new(generator: &'g mut Generator<'h, T>, n: u64) -> Self {
        let end = generator.next.saturating_add(n);
        Self { generator, end, started: Instant::now(), hook_failed: None, ended: false }
    }

    /// Returns the next round if it is made, [`Poll::Pending`] if not. Without overlap it is made now.
    ///
    /// # Errors
    ///
    /// Same as `next`; the error is in the returned `Result`.
    pub fn try_next(&mut self) -> Poll<Option<Result<Round<T>, Error>>> {
        self.advance(Waiting::Try)
    }

    /// Returns the next round if it is made within `timeout`, [`Poll::Pending`] if not. Nothing is lost: the round
    /// comes with a later call. The hooks run within the call; their time is not limited.
    pub fn next_timeout(&mut self, timeout: Duration) -> Poll<Option<Result<Round<T>, Error>>> {
        match Instant::now().checked_add(timeout) {
            Some(deadline) => self.advance(Waiting::Until(deadline)),
            None => Poll::Ready(self.next()),
        }
    }

    /// Returns the next round, or [`Poll::Pending`] if it is not made; the task of `cx` is then woken later.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Round<T>, Error>>> {
        self.advance(Waiting::Poll(cx))
    }

    /// Waits for the next round as a task, without blocking the thread; without overlap it is made on the thread that
    /// polls. Dropping the future loses nothing.
    pub async fn next_async(&mut self) -> Option<Result<Round<T>, Error>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn advance(&mut self, waiting: Waiting<'_, '_>) -> Poll<Option<Result<Round<T>, Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let generator = &mut *self.generator;
        let ticket = generator.ticket();
        let at = generator.stage.naming().at(ticket);
        if generator.stage.is_orphaned() {
            self.ended = true;
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
                let Poll::Ready(found) = stage.receive(ticket, waiting) else { return Poll::Pending };
                found
            }
            Err(error) => Err(error),
        };
        Poll::Ready(Some(match found {
            Ok(slot) => {
                self.generator.used = Some(self.generator.next);
                self.generator.next += 1;
                let round = Round { slot };
                if self.generator.next < self.end {
                    self.hook_failed = self.grant().err();
                }
                Ok(round)
            }
            Err(error) => {
                if matches!(error, Error::Load { .. } | Error::Panicked { .. }) {
                    self.generator.granted = ticket.epoch;
                    if let Some(gate) = self.generator.stage.gate() {
                        gate.heard();
                    }
                }
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

/// One round's data, in its slot. Dropping it frees the slot. It may be sent to another thread.
pub struct Round<T: Send + 'static> {
    slot: KeptSlot<'static, Slot<Value<T>>, Adaptive>,
}

impl<T: Send + 'static> Round<T> {
    /// Its number, from 0 over all rounds of the generator.
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
