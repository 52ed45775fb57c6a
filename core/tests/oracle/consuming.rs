//! The operations of the consumer and of the guards, on the ring and on the model.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use twinbuf_core::{RecvError, RecvTimeoutError, TryRecvError};

use super::operation::{Call, Operation};
use super::world::{Reading, Rx};
use super::{Check, Round};

impl<'w> Check<'w, '_> {
    /// Does what of this is the consumer's or a guard's.
    pub(super) fn consume<'r>(&mut self, round: &mut Round<'r, 'w>, operation: Operation)
    where
        'w: 'r,
    {
        let Round { rx, reading, reserved, .. } = round;
        let index = |k: u8, len: usize| usize::from(k) % len;
        match operation {
            Operation::Receive(call) => {
                if let Some(rx) = rx {
                    reading.extend(self.receive(rx, call));
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
            Operation::Release(k) if !reading.is_empty() => {
                let slot = reading.remove(index(k, reading.len()));
                self.model.release(slot.seq());
                slot.release();
            }
            Operation::Write(k) if !reading.is_empty() => {
                let k = index(k, reading.len());
                reading[k].value = self.fresh();
                self.model.values[reading[k].slot] = reading[k].value;
            }
            Operation::LeakRead(k) if !reading.is_empty() => {
                let slot = reading.remove(index(k, reading.len()));
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

    fn receive<'r>(&mut self, rx: &mut Rx<'r, 'w>, call: Call) -> Option<Reading<'r, 'w>> {
        let expected = self.model.next_read();
        // A call with a timeout waits for a guard too.
        let waits = match expected {
            Err(TryRecvError::Empty) => true,
            Err(TryRecvError::SlotHeld) => matches!(call, Call::Ticks(_) | Call::Forever),
            _ => false,
        };
        let timed_out = |error| match error {
            RecvTimeoutError::Timeout => TryRecvError::Empty,
            RecvTimeoutError::Finished => TryRecvError::Finished,
            RecvTimeoutError::Abandoned => TryRecvError::Abandoned,
            RecvTimeoutError::Cancelled => TryRecvError::Cancelled,
            RecvTimeoutError::SlotHeld => TryRecvError::SlotHeld,
        };
        let pending = |poll| match poll {
            Poll::Ready(Ok(slot)) => Ok(slot),
            Poll::Ready(Err(error)) => Err(TryRecvError::from(error)),
            Poll::Pending => Err(TryRecvError::Empty),
        };
        let world = self.world;
        let got = match call {
            Call::Block | Call::Iterate | Call::Forever if waits => return None,
            Call::Try => rx.try_recv(),
            Call::Block => rx.recv().map_err(TryRecvError::from),
            Call::Iterate => {
                let mut slots = rx.iter();
                let item = slots.next().unwrap_or(Err(RecvError::Finished)).map_err(TryRecvError::from);
                let goes_on = matches!(item, Ok(_) | Err(TryRecvError::Cancelled));
                assert!(goes_on || slots.next().is_none(), "the iterator goes on after its end");
                item
            }
            Call::Ticks(ticks) => rx.recv_timeout(Duration::from_millis(ticks.into())).map_err(timed_out),
            Call::Forever => rx.recv_timeout(Duration::MAX).map_err(timed_out),
            Call::Poll(task) => pending(rx.poll_recv(&mut Context::from_waker(&world.waker(task)))),
            Call::Await(task) => {
                pending(pin!(rx.recv_async()).poll(&mut Context::from_waker(&world.waker(task))))
            }
        };
        self.model.consumer_asked(call, !waits);
        match got {
            Ok(got) => {
                assert_eq!(expected, Ok(got.slot), "received a slot");
                assert_eq!(got.seq(), self.model.consumer.stats.handoffs);
                assert_eq!(got.value, self.model.receive(), "the value that was committed");
                Some(got)
            }
            Err(error) => {
                assert_eq!(expected, Err(error), "found no slot to receive");
                if error == TryRecvError::Cancelled {
                    self.model.skip_cancelled();
                }
                None
            }
        }
    }
}
