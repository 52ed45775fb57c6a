//! Try, blocking and async calls on a static ring, in one program.

use core::hint::black_box;
use core::pin::pin;
use core::task::{Context, Poll, Waker};

use twinbuf_core::{DoubleBuffer, TryAcquireError, TryRecvError};

static RING: DoubleBuffer<u32> = DoubleBuffer::new([0, 0]);

/// The line of a check that failed.
pub(crate) struct Wrong(#[allow(dead_code)] pub(crate) u32); // not every program prints it

/// `assert!` without a panic.
macro_rules! require {
    ($condition:expr) => {
        if !$condition {
            return Err(Wrong(line!()));
        }
    };
}

/// Try, blocking and async calls on either side.
pub(crate) fn check() -> Result<(), Wrong> {
    let Some((mut tx, mut rx)) = RING.try_split_static() else { return Err(Wrong(line!())) };
    require!(RING.try_split_static().is_none());
    for value in 0..black_box(1000) {
        require!(matches!(rx.try_recv(), Err(TryRecvError::Empty)));
        let Ok(mut slot) = tx.try_acquire() else { return Err(Wrong(line!())) };
        *slot = value;
        require!(slot.commit().is_ok());
        let replaced = tx.fill(|slot| core::mem::replace(slot, value + 1));
        require!(replaced.is_ok());
        require!(matches!(tx.try_acquire(), Err(TryAcquireError::Full)));
        require!(matches!(rx.try_recv(), Ok(Some(slot)) if *slot == value));
        let Ok(Some(slot)) = rx.recv() else { return Err(Wrong(line!())) };
        require!(*slot.keep() == value + 1);
    }
    let mut cx = Context::from_waker(Waker::noop());
    require!(rx.poll_recv(&mut cx).is_pending());
    require!(matches!(pin!(tx.acquire_async()).poll(&mut cx), Poll::Ready(Ok(_))));
    tx.finish();
    require!(matches!(pin!(rx.recv_async()).poll(&mut cx), Poll::Ready(Ok(None))));
    require!(matches!(rx.recv(), Ok(None)));
    Ok(())
}
