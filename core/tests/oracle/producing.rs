//! The producer's operations, on the ring and on the model.

use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use twinbuf_core::{Closed, TryAcquireError};

use super::model::End;
use super::operation::{Call, Operation, Then};
use super::world::{Payload, Tx, Writing};
use super::{Check, Round};

impl<'w> Check<'w, '_> {
    /// Performs the operation if it belongs to the producer.
    pub(super) fn produce<'r>(
        &mut self,
        tx: &mut Option<Tx<'r, 'w>>,
        round: &mut Round<'r, 'w>,
        operation: Operation,
    ) where
        'w: 'r,
    {
        let Some(handle) = tx else { return };
        let end = match operation {
            Operation::Acquire(call, then) => {
                if let Some(slot) = self.acquire(handle, call) {
                    self.end_write(slot, then, round);
                }
                return;
            }
            Operation::Fill { panics } => return self.fill(handle, panics),
            Operation::Unread => {
                let expected = self.model.unread();
                let found = handle.unread();
                assert_eq!(found.as_ref().map(|slot| slot.slot), expected, "what the consumer left unread");
                if let Some(slot) = found {
                    assert_eq!(
                        slot.value, self.model.values[slot.slot],
                        "the value that was left in the slot"
                    );
                    slot.value = self.fresh();
                    self.model.values[slot.slot] = slot.value;
                }
                return;
            }
            Operation::ReuniteOther => return self.reunite_other(tx),
            Operation::LeakProducer => return self.leak(tx.take(), round),
            Operation::Finish => End::Finished,
            Operation::DropProducer => End::Abandoned,
            _ => return,
        };
        match (end, tx.take()) {
            (End::Finished, Some(tx)) => tx.finish(),
            (_, tx) => drop(tx),
        }
        self.model.drop_producer(end);
    }

    pub(super) fn acquire<'p, 'r>(
        &mut self,
        tx: &'p mut Tx<'r, 'w>,
        call: Call,
    ) -> Option<Writing<'p, 'r, 'w>> {
        let expected = self.model.next_write();
        let closed = |Closed| TryAcquireError::Closed;
        let pending = |poll| match poll {
            Poll::Ready(Ok(slot)) => Ok(slot),
            Poll::Ready(Err(Closed)) => Err(TryAcquireError::Closed),
            Poll::Pending => Err(TryAcquireError::Full),
        };
        let world = self.world;
        let got = match call {
            Call::Block | Call::Forever if expected == Err(TryAcquireError::Full) => {
                return None;
            }
            Call::Try => tx.try_acquire(),
            Call::Block => tx.acquire().map_err(closed),
            Call::Ticks(ticks) => tx.acquire_timeout(Duration::from_millis(ticks.into())),
            Call::Forever => tx.acquire_timeout(Duration::MAX),
            Call::Poll(task) => pending(tx.poll_acquire(&mut Context::from_waker(&world.waker(task)))),
            Call::Await(task) => {
                pending(pin!(tx.acquire_async()).poll(&mut Context::from_waker(&world.waker(task))))
            }
        };
        self.model.producer_asked(call, expected != Err(TryAcquireError::Full));
        match got {
            Ok(got) => {
                assert_eq!(expected, Ok(got.slot), "acquired a slot");
                assert_eq!(got.seq(), self.model.producer.handoffs);
                assert_eq!(got.value, self.model.values[got.slot], "the value that was left in the slot");
                Some(got)
            }
            Err(error) => {
                assert_eq!(expected, Err(error), "found no slot to acquire");
                None
            }
        }
    }

    pub(super) fn end_write<'r>(
        &mut self,
        mut slot: Writing<'_, 'r, 'w>,
        then: Then,
        round: &mut Round<'r, 'w>,
    ) {
        slot.value = self.fresh();
        self.model.values[slot.slot] = slot.value;
        match then {
            Then::Commit => {
                let expected = self.committed();
                self.model.commit();
                assert_eq!(slot.commit(), expected);
            }
            Then::Reserve => {
                let seq = slot.seq();
                self.model.reserve();
                let slot = slot.reserve();
                assert_eq!(slot.seq(), seq);
                round.reserved.push(slot);
            }
            #[expect(clippy::forget_non_drop, reason = "without a drop it is a promise of the ring")]
            Then::Leak => mem::forget(slot),
            Then::Drop | Then::Hold => drop(slot),
        }
    }

    fn fill(&mut self, tx: &mut Tx<'_, 'w>, panics: bool) {
        let expected = match self.model.next_write() {
            Err(TryAcquireError::Closed) => Ok(Err(Closed)),
            Err(_) => return,
            Ok(slot) => {
                self.model.values[slot] = self.fresh();
                if panics {
                    Err("broken")
                } else {
                    self.model.commit();
                    Ok(Ok(self.written))
                }
            }
        };
        let value = self.written;
        let fill = || {
            tx.fill(|slot| {
                slot.value = value;
                if panics { break_off() } else { value }
            })
        };
        let result = catch_unwind(AssertUnwindSafe(fill));
        let result = result.map_err(|panic| *panic.downcast::<&str>().expect("the panic of the closure"));
        assert_eq!(result, expected);
    }

    /// Reunites the handles if both exist and nothing else has a share of the ring. Returns the slots.
    pub(super) fn reunite<'r>(
        &mut self,
        tx: &mut Option<Tx<'r, 'w>>,
        round: &mut Round<'r, 'w>,
    ) -> Option<Vec<Payload<'w>>> {
        if tx.is_none() || round.rx.is_none() {
            return None;
        }
        let (Some(sender), Some(receiver)) = (tx.take(), round.rx.take()) else { unreachable!() };
        let expected = self.model.owned && self.model.owners == 2;
        match sender.reunite(receiver) {
            Ok(slots) => {
                assert!(expected, "reunited what has other owners");
                self.model.owned = false; // nothing is freed
                self.model.drop_producer(End::Abandoned);
                self.model.drop_consumer();
                Some(slots)
            }
            Err((sender, receiver)) => {
                assert!(!expected, "would not reunite");
                (*tx, round.rx) = (Some(sender), Some(receiver));
                None
            }
        }
    }

    /// Tries to reunite the producer with the consumer of another ring. This is refused.
    fn reunite_other<'r>(&mut self, tx: &mut Option<Tx<'r, 'w>>)
    where
        'w: 'r,
    {
        let Some(sender) = tx.take() else { return };
        let (other_tx, other_rx) = self.world.heap_ring(1).into_handles();
        let Err((sender, other_rx)) = sender.reunite(other_rx) else { panic!("reunited two rings") };
        *tx = Some(sender);
        assert!(other_tx.reunite(other_rx).is_ok(), "the other ring was touched");
        self.model.drops += 1;
    }
}

/// `resume_unwind` instead of `panic!`: it prints no message and runs no hook (a fuzzer's hook aborts).
fn break_off<R>() -> R {
    resume_unwind(Box::new("broken"))
}
