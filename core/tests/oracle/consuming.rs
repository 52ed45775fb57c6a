//! The operations of the consumer and of the guards, on the ring and on the model.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use std::mem;

use twinbuf_core::{ReadSlot, TryRecvError};

use super::operation::{Call, Operation, Use};
use super::world::{Kept, Payload, Rx, Strategy};
use super::{Check, Round};

impl<'w> Check<'w, '_> {
    /// Performs the operation if it belongs to the consumer or to a guard.
    pub(super) fn consume<'r>(&mut self, round: &mut Round<'r, 'w>, operation: Operation)
    where
        'w: 'r,
    {
        let Round { rx, kept, reserved, .. } = round;
        let index = |k: u8, len: usize| usize::from(k) % len;
        match operation {
            Operation::Receive(call, then) => {
                if let Some(rx) = rx {
                    kept.extend(self.receive(rx, call, then));
                }
            }
            Operation::DropConsumer if rx.is_some() => {
                *rx = None;
                self.model.drop_consumer();
            }
            Operation::LeakConsumer => {
                let rx = rx.take();
                self.leak(rx, round);
            }
            Operation::Release(k) if !kept.is_empty() => {
                let slot = kept.remove(index(k, kept.len()));
                self.model.release_kept(slot.seq());
                drop(slot);
            }
            Operation::Write(k) if !kept.is_empty() => {
                let k = index(k, kept.len());
                kept[k].value = self.fresh();
                self.model.values[kept[k].slot] = kept[k].value;
            }
            Operation::LeakKept(k) if !kept.is_empty() => {
                let slot = kept.remove(index(k, kept.len()));
                self.leak(Some(slot), round);
            }
            Operation::CommitReserved(k) if !reserved.is_empty() => {
                let slot = reserved.remove(index(k, reserved.len()));
                let expected = self.committed();
                self.model.commit_reserved(slot.seq());
                assert_eq!(slot.commit(), expected);
            }
            Operation::DropReserved(k) if !reserved.is_empty() => {
                let slot = reserved.remove(index(k, reserved.len()));
                self.model.cancel(slot.seq());
                drop(slot);
            }
            Operation::WriteReserved(k) if !reserved.is_empty() => {
                let k = index(k, reserved.len());
                reserved[k].value = self.fresh();
                self.model.values[reserved[k].slot] = reserved[k].value;
            }
            Operation::LeakReserved(k) if !reserved.is_empty() => {
                let slot = reserved.remove(index(k, reserved.len()));
                self.leak(Some(slot), round);
            }
            _ => {}
        }
    }

    fn receive<'r>(&mut self, rx: &mut Rx<'r, 'w>, call: Call, then: Use) -> Option<Kept<'r, 'w>> {
        let expected = self.model.next_read();
        let waits = matches!(expected, Err(TryRecvError::Empty | TryRecvError::Held));
        assert_eq!(rx.is_held(), matches!(expected, Err(TryRecvError::Held)));
        if waits && matches!(call, Call::Block | Call::Forever) {
            return None;
        }
        let world = self.world;
        let pending = |poll| match poll {
            Poll::Ready(Ok(slot)) => Ok(slot),
            Poll::Ready(Err(error)) => Err(TryRecvError::from(error)),
            // A task cannot tell which of the two it waits for.
            Poll::Pending => Err(expected.expect_err("something to wait for")),
        };
        let got = match call {
            Call::Try => rx.try_recv(),
            Call::Block => rx.recv().map_err(TryRecvError::from),
            Call::Ticks(ticks) => rx.recv_timeout(Duration::from_millis(ticks.into())),
            Call::Forever => rx.recv_timeout(Duration::MAX),
            Call::Poll(task) => pending(rx.poll_recv(&mut Context::from_waker(&world.waker(task)))),
            Call::Await(task) => {
                pending(pin!(rx.recv_async()).poll(&mut Context::from_waker(&world.waker(task))))
            }
        };
        self.model.consumer_asked(call, !waits);
        self.compare_received(
            &expected,
            &got.as_ref().map(|got| got.as_ref().map(|got| (got.seq(), &**got))),
        );
        self.use_slot(got.ok()??, then)
    }

    fn compare_received(
        &mut self,
        expected: &Result<Option<usize>, TryRecvError>,
        got: &Result<Option<(u64, &Payload<'w>)>, &TryRecvError>,
    ) {
        let slots = got.map(|got| got.map(|(_, payload)| payload.slot));
        assert_eq!(expected.as_ref().copied(), slots, "what a receive returns");
        match got {
            Ok(Some((seq, payload))) => {
                assert_eq!(*seq, self.model.consumer.handoffs);
                assert_eq!(payload.value, self.model.committed_value(), "the value that was committed");
            }
            Err(TryRecvError::Cancelled) => self.model.release(),
            _ => {}
        }
    }

    fn use_slot<'r>(
        &mut self,
        mut slot: ReadSlot<'_, 'r, Payload<'w>, Strategy<'w>>,
        then: Use,
    ) -> Option<Kept<'r, 'w>> {
        match then {
            Use::Release => {
                slot.value = self.fresh();
                self.model.values[slot.slot] = slot.value;
                self.model.release();
                drop(slot);
                None
            }
            Use::Keep => {
                self.model.keep();
                Some(slot.keep())
            }
            // Nothing happened: the next receive returns it again.
            Use::Leak => {
                if self.written % 2 == 0 {
                    slot.put_back();
                } else {
                    mem::forget(slot);
                }
                None
            }
        }
    }
}
