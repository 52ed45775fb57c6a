//! The ways to wait for a batch: not at all, as a task, with a timeout.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::common::{Gated, in_order, is_dropped_by_a_waker, until, woken};
use twinbuf::Loader;

fn gated() -> (Sender<()>, Loader) {
    let (open, gate) = channel();
    (open, Loader::builder(Gated(gate), in_order(8, 2)).build().unwrap())
}

#[test]
fn an_epoch_is_read_from_its_creation_on() {
    // Like a validation set that is loaded ahead while the training continues.
    let ((open, mut train), (open_valid, mut valid)) = (gated(), gated());
    let mut validation = valid.epoch(0);
    let mut epochs = train.epochs(0..2);
    // Before any batch is requested.
    until(|| epochs.report().loads > 0 && validation.report().loads > 0);
    open_valid.send(()).unwrap();
    until(|| validation.report().loads >= 2); // the slots are full
    assert_eq!(validation.report().wall, Duration::ZERO, "what comes before the first call is nobody's wait");
    (0..8).for_each(|_| open.send(()).unwrap());
    assert_eq!(epochs.by_ref().map(Result::unwrap).count(), 8);
    let Poll::Ready(Some(Ok(batch))) = validation.try_next() else { panic!("it was read meanwhile") };
    assert_eq!(batch.step(), 0);
    drop(batch);
    (0..3).for_each(|_| open_valid.send(()).unwrap());
    assert_eq!(validation.map(Result::unwrap).count(), 3);
}

#[test]
fn a_task_that_gives_up_its_epoch_leaves_the_next_one_alone() {
    let (open, mut loader) = gated();
    let ((told, first, _), (_, second, wakes)) = (woken(), woken());
    let mut earlier = loader.epoch(0);
    assert!(earlier.poll_next(&mut Context::from_waker(&first)).is_pending());
    until(|| earlier.report().loads > 0); // the batch is being read, and will come
    drop(earlier);
    let mut later = loader.epoch(1);
    assert!(later.poll_next(&mut Context::from_waker(&second)).is_pending());
    // The batch that was read for the earlier epoch, then the requested one.
    open.send(()).unwrap();
    open.send(()).unwrap();
    let batch = loop {
        match later.poll_next(&mut Context::from_waker(&second)) {
            Poll::Ready(batch) => break batch.unwrap().unwrap(),
            Poll::Pending => wakes.recv().unwrap(),
        }
    };
    assert_eq!((batch.epoch(), batch.step()), (1, 0));
    assert_eq!(told.0.load(Ordering::Relaxed), 0, "the last task that waited is woken");
    drop((batch, later));
    // The reader may wait at the gate, and dropping the loader may wait for the reader.
    drop(open);
}

#[test]
fn a_waker_may_drop_the_loader_on_the_reading_thread() {
    let (open, loader) = gated();
    is_dropped_by_a_waker(loader, &open);
}

/// No clock has that time: the wait has no end, as with any other long timeout.
#[test]
fn the_longest_timeout_is_a_timeout() {
    for overlap in [true, false] {
        let (open, gate) = channel();
        let builder = Loader::builder(Gated(gate), in_order(8, 2)).overlap(overlap).depth(2);
        let mut loader = builder.held_timeout(Duration::MAX).build().unwrap();
        (0..4).for_each(|_| open.send(()).unwrap());
        let mut epoch = loader.epoch(0);
        let mut next = || match epoch.next_timeout(Duration::MAX) {
            Poll::Ready(Some(batch)) => batch.unwrap(),
            other => panic!("{other:?}"),
        };
        let mut kept = vec![next(), next()];
        let mut cx = Context::from_waker(Waker::noop());
        assert!(epoch.poll_next(&mut cx).is_pending(), "two batches are kept");
        kept.clear();
        assert_eq!(epoch.next().unwrap().unwrap().step(), 2);
        drop(epoch);
        loader.close_timeout(Duration::MAX).unwrap();
    }
}
