//! The ways to wait for a batch: not at all, as a task, as a stream.

mod common;

use std::cell::RefCell;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::task::{Context, Poll, Wake, Waker};

use common::{Gated, batches, files, is_dropped_by_a_waker, open, plan};
use futures_core::Stream;
use twinbuf::{Error, Loader, Plan};

fn gated() -> (Sender<()>, Loader) {
    let (open, gate) = channel();
    let plan = Plan::builder(8).batch(2).build().unwrap();
    (open, Loader::builder(Gated(gate), plan).build().unwrap())
}

/// Counts wakes, and says of each.
struct Woken(AtomicUsize, Sender<()>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        let _ = self.1.send(());
    }
}

#[test]
fn a_batch_that_is_not_there_is_pending_and_wakes_its_task_once() {
    let (open, loader) = gated();
    let mut epoch = loader.epoch(0);
    assert!(epoch.try_next().is_pending());
    assert!(epoch.try_next().is_pending());

    let (told, wakes) = channel();
    let woken = Arc::new(Woken(AtomicUsize::new(0), told));
    let waker = Waker::from(woken.clone());
    let mut cx = Context::from_waker(&waker);
    assert!(epoch.poll_next(&mut cx).is_pending());
    open.send(()).unwrap();
    wakes.recv().unwrap();
    assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    let Poll::Ready(Some(Ok(first))) = epoch.try_next() else { panic!("woken for nothing") };
    assert_eq!(first.step(), 0);
    drop(first);
    // The waits may be mixed, and a future that is dropped has lost nothing.
    drop(epoch.next_async());
    for step in 1..3 {
        open.send(()).unwrap();
        let next = if step == 1 { epoch.next() } else { pollster::block_on(epoch.next_async()) };
        assert_eq!(next.unwrap().unwrap().step(), step);
    }
    open.send(()).unwrap();
    assert_eq!(epoch.next().unwrap().unwrap().step(), 3);
    assert!(matches!(epoch.try_next(), Poll::Ready(None)));
    assert!(matches!(epoch.poll_next(&mut cx), Poll::Ready(None)));
}

#[test]
fn a_wait_without_end_is_ended_by_an_error_of_the_data_set() {
    let (open, loader) = gated();
    let mut epoch = loader.epoch(0);
    assert!(epoch.try_next().is_pending());
    drop(open); // the data set's own `recv` fails
    let error = pollster::block_on(epoch.next_async()).unwrap().unwrap_err();
    assert!(error.to_string().starts_with("epoch 0, step 0: "), "{error}");
    assert!(matches!(epoch.try_next(), Poll::Ready(None)));
}

#[test]
fn every_way_delivers_the_same() {
    let (_dir, paths) = files(&[41]);
    for overlap in [false, true] {
        let loader = Loader::builder(open(&paths), plan(41, 6)).overlap(overlap).build().unwrap();
        let expected: Vec<_> = batches(&loader, 0).into_iter().map(Result::unwrap).collect();

        let mut epoch = loader.epoch(0);
        let mut tried = Vec::new();
        loop {
            match epoch.try_next() {
                Poll::Ready(Some(batch)) => tried.push(batch.unwrap().to_vec()),
                Poll::Ready(None) => break,
                Poll::Pending => std::thread::yield_now(),
            }
        }
        assert!(tried == expected);

        let mut epoch = loader.epoch(0);
        let awaited = pollster::block_on(async {
            let mut found = Vec::new();
            while let Some(batch) = epoch.next_async().await {
                found.push(batch.unwrap().to_vec());
            }
            found
        });
        assert!(awaited == expected);

        let mut stream = loader.epoch(0);
        let streamed = pollster::block_on(async {
            let mut found = Vec::new();
            while let Some(batch) =
                std::future::poll_fn(|cx| Stream::poll_next(Pin::new(&mut stream), cx)).await
            {
                found.push(batch.unwrap().to_vec());
            }
            found
        });
        assert!(streamed == expected);
    }
}

#[test]
fn an_epoch_that_another_one_ends_is_woken_to_say_so() {
    let (open, loader) = gated();
    let (told, wakes) = channel();
    let wakers = [(); 2].map(|()| Arc::new(Woken(AtomicUsize::new(0), told.clone())));
    let [first, second] = wakers.clone().map(Waker::from);
    let mut earlier = loader.epoch(0);
    assert!(earlier.poll_next(&mut Context::from_waker(&first)).is_pending());
    let mut later = loader.epoch(1);
    assert!(later.poll_next(&mut Context::from_waker(&second)).is_pending());
    let woken = |i: usize| wakers[i].0.load(Ordering::Relaxed);
    assert_eq!((woken(0), woken(1)), (1, 0), "nobody else would");
    wakes.recv().unwrap();
    let said = earlier.poll_next(&mut Context::from_waker(&first));
    assert!(matches!(said, Poll::Ready(Some(Err(Error::Superseded { epoch: 0 })))), "{said:?}");
    // The batch that was read for it, and then the one that is wanted.
    open.send(()).unwrap();
    open.send(()).unwrap();
    let batch = loop {
        match later.poll_next(&mut Context::from_waker(&second)) {
            Poll::Ready(batch) => break batch.unwrap().unwrap(),
            Poll::Pending => wakes.recv().unwrap(),
        }
    };
    assert_eq!((batch.epoch(), batch.step()), (1, 0));
    drop(batch);
    // Whom nobody waits for is not woken.
    drop(later);
    drop(loader.epoch(2));
    assert_eq!(woken(0), 1);
    // The reader may wait at the gate, and the loader's end for the reader.
    drop(open);
}

#[test]
fn an_epoch_that_another_one_ends_is_woken_though_no_batch_ever_comes() {
    // The reader waits at the gate, in vain; the later epoch is given up at once, or nobody asks for its batches.
    for give_up in [false, true] {
        let (open, loader) = gated();
        // Dropped before the loader, whose end waits for the reader.
        let _open = open;
        let (told, _wakes) = channel();
        let woken = Arc::new(Woken(AtomicUsize::new(0), told));
        let waker = Waker::from(woken.clone());
        let mut cx = Context::from_waker(&waker);
        let mut earlier = loader.epoch(0);
        assert!(earlier.poll_next(&mut cx).is_pending());
        let later = loader.epoch(1);
        if give_up {
            drop(later);
        }
        assert_eq!(woken.0.load(Ordering::Relaxed), 1, "nobody else would");
        let said = earlier.poll_next(&mut cx);
        assert!(matches!(said, Poll::Ready(Some(Err(Error::Superseded { epoch: 0 })))), "{said:?}");
        drop((earlier, loader.epoch(2)));
        assert_eq!(woken.0.load(Ordering::Relaxed), 1, "whom nobody waits for is not");
    }
}

#[test]
fn a_waker_may_drop_the_loader_on_the_reading_thread() {
    let (open, loader) = gated();
    is_dropped_by_a_waker(loader, &open);
}

type Run = Box<dyn FnOnce(Waker)>;

thread_local! {
    static RUN: RefCell<Option<Run>> = const { RefCell::new(None) };
}

/// Runs its task at once, where it is woken for the first time.
struct AtOnce;

impl Wake for AtOnce {
    fn wake(self: Arc<Self>) {
        if let Some(run) = RUN.take() {
            run(Waker::from(self));
        }
    }
}

#[test]
fn a_task_may_run_where_another_epoch_ends_its_own() {
    for begins_one in [false, true] {
        let (open, loader) = gated();
        let loader: &'static Loader = Box::leak(Box::new(loader));
        let mut earlier = loader.epoch(0);
        let waker = Waker::from(Arc::new(AtOnce));
        assert!(earlier.poll_next(&mut Context::from_waker(&waker)).is_pending());
        let (tell, told) = channel();
        RUN.set(Some(Box::new(move |waker| {
            let said = earlier.poll_next(&mut Context::from_waker(&waker));
            assert!(matches!(said, Poll::Ready(Some(Err(Error::Superseded { epoch: 0 })))), "{said:?}");
            tell.send(begins_one.then(|| loader.epoch(2))).unwrap();
        })));
        let mut second = loader.epoch(1);
        let third = told.try_recv().unwrap();
        if third.is_some() {
            assert!(matches!(second.next(), Some(Err(Error::Superseded { epoch: 1 }))));
        }
        // The batch that is read in vain, and the one that is wanted.
        open.send(()).unwrap();
        open.send(()).unwrap();
        let batch = third.unwrap_or(second).next().unwrap().unwrap();
        assert_eq!((batch.epoch(), batch.step()), (if begins_one { 2 } else { 1 }, 0));
    }
}
