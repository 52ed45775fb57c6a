//! The peers, each used as its documentation recommends.
//!
//! A queue that takes items by value passes a large item in two ways, and the picture shows the better one: *recycled
//! boxes* (two boxes circulate and return through a second queue of the same kind) and *fresh boxes* (the sender
//! allocates, the receiver frees). A queue that exposes its slots is used in place as well.

use std::convert::Infallible;
use std::hint::spin_loop;
use std::sync::{Arc, mpsc};

use ringbuf::traits::{Consumer as _, Observer as _, Producer as _, Raw as _, Split as _};

use crate::measure::{Rx, Subjects, Tx, Wait};
use crate::payload::{Block1M, Block4K, Inline, Payload};

/// A queue of two, by value, with calls that wait.
trait Queue: 'static {
    type Tx<T: Send + 'static>: Send;
    type Rx<T: Send + 'static>: Send;

    fn pair<T: Send + 'static>() -> (Self::Tx<T>, Self::Rx<T>);
    fn send<T: Send + 'static>(tx: &mut Self::Tx<T>, item: T);
    fn recv<T: Send + 'static>(rx: &mut Self::Rx<T>) -> T;
}

/// `Queue` for a marker type: the two ends, how to make them, and the two calls.
macro_rules! queue {
    ($queue:ident: $tx:ty, $rx:ty, $pair:expr, |$t:ident, $item:ident| $send:expr, |$r:ident| $recv:expr) => {
        struct $queue;
        impl Queue for $queue {
            type Tx<T: Send + 'static> = $tx;
            type Rx<T: Send + 'static> = $rx;

            fn pair<T: Send + 'static>() -> (Self::Tx<T>, Self::Rx<T>) {
                $pair
            }
            #[inline]
            fn send<T: Send + 'static>($t: &mut Self::Tx<T>, $item: T) {
                assert!($send.is_ok(), "the receiver is there");
            }
            #[inline]
            fn recv<T: Send + 'static>($r: &mut Self::Rx<T>) -> T {
                $recv.ok().expect("the sender is there")
            }
        }
    };
}

/// Repeats a call that does not wait, and returns the item until there is room for it.
#[inline]
fn busy_send<T>(mut item: T, mut send: impl FnMut(T) -> Result<(), T>) -> Result<(), Infallible> {
    while let Err(back) = send(item) {
        item = back;
        spin_loop();
    }
    Ok(())
}

/// Polls until there is something.
#[inline]
fn busy<R>(mut look: impl FnMut() -> Option<R>) -> R {
    loop {
        if let Some(found) = look() {
            return found;
        }
        spin_loop();
    }
}

queue!(Rtrb: rtrb::Producer<T>, rtrb::Consumer<T>, rtrb::RingBuffer::new(2),
    |tx, item| busy_send(item, |item| tx.push(item).map_err(|rtrb::PushError::Full(item)| item)),
    |rx| Ok::<_, Infallible>(busy(|| rx.pop().ok())));

type SharedArray<T> = Arc<crossbeam_queue::ArrayQueue<T>>;
queue!(ArrayQueue: SharedArray<T>, SharedArray<T>,
    { let queue = Arc::new(crossbeam_queue::ArrayQueue::new(2)); (queue.clone(), queue) },
    |tx, item| busy_send(item, |item| tx.push(item)), |rx| Ok::<_, Infallible>(busy(|| rx.pop())));

queue!(Ringbuf: ringbuf::HeapProd<T>, ringbuf::HeapCons<T>, ringbuf::HeapRb::new(2).split(),
    |tx, item| busy_send(item, |item| tx.try_push(item)), |rx| Ok::<_, Infallible>(busy(|| rx.try_pop())));

queue!(Crossbeam: crossbeam_channel::Sender<T>, crossbeam_channel::Receiver<T>, crossbeam_channel::bounded(2),
    |tx, item| tx.send(item), |rx| rx.recv());
queue!(Std: mpsc::SyncSender<T>, mpsc::Receiver<T>, mpsc::sync_channel(2), |tx, item| tx.send(item), |rx| rx.recv());
queue!(Kanal: kanal::Sender<T>, kanal::Receiver<T>, kanal::bounded(2), |tx, item| tx.send(item), |rx| rx.recv());
queue!(Flume: flume::Sender<T>, flume::Receiver<T>, flume::bounded(2), |tx, item| tx.send(item), |rx| rx.recv());

type BlockingRb<T> = Arc<ringbuf_blocking::BlockingHeapRb<T>>;
type BlockingTx<T> = ringbuf_blocking::BlockingProd<BlockingRb<T>>;
type BlockingRx<T> = ringbuf_blocking::BlockingCons<BlockingRb<T>>;
queue!(RingbufBlocking: BlockingTx<T>, BlockingRx<T>, ringbuf_blocking::BlockingHeapRb::new(2).split(),
    |tx, item| tx.push(item), |rx| rx.pop());

/// An end of a queue whose items go one way: the sender makes them, and the receiver drops them.
struct OneWayTx<Q: Queue, P: Payload>(Q::Tx<P>);
struct OneWayRx<Q: Queue, P: Payload>(Q::Rx<P>);

fn one_way<Q: Queue, P: Payload>() -> (OneWayTx<Q, P>, OneWayRx<Q, P>) {
    let (tx, rx) = Q::pair();
    (OneWayTx(tx), OneWayRx(rx))
}

impl<Q: Queue, P: Payload> Tx for OneWayTx<Q, P> {
    #[inline]
    fn send(&mut self, seq: u64) {
        Q::send(&mut self.0, P::made(seq));
    }
}

impl<Q: Queue, P: Payload> Rx for OneWayRx<Q, P> {
    #[inline]
    fn recv(&mut self) -> u64 {
        Q::recv(&mut self.0).sum()
    }
}

/// An end of two queues: filled boxes go through the first, read ones return through the second.
struct RecycledTx<Q: Queue, P: Inline>(Q::Tx<Box<P>>, Q::Rx<Box<P>>);
struct RecycledRx<Q: Queue, P: Inline>(Q::Rx<Box<P>>, Q::Tx<Box<P>>);

fn recycled<Q: Queue, P: Inline>() -> (RecycledTx<Q, P>, RecycledRx<Q, P>) {
    let (tx, rx) = Q::pair();
    let (mut back_tx, back_rx) = Q::pair();
    for _ in 0..2 {
        Q::send(&mut back_tx, Payload::made(0));
    }
    (RecycledTx(tx, back_rx), RecycledRx(rx, back_tx))
}

impl<Q: Queue, P: Inline> Tx for RecycledTx<Q, P> {
    #[inline]
    fn send(&mut self, seq: u64) {
        let mut item = Q::recv(&mut self.1);
        item.fill(seq);
        Q::send(&mut self.0, item);
    }
}

impl<Q: Queue, P: Inline> Rx for RecycledRx<Q, P> {
    #[inline]
    fn recv(&mut self) -> u64 {
        let item = Q::recv(&mut self.0);
        let sum = item.sum();
        Q::send(&mut self.1, item);
        sum
    }
}

/// A queue that exposes its slots: how to wait for the next one and fill or read it in place.
macro_rules! in_place {
    ([$($p:ident: $bound:path)?] $tx:ty, |$t:ident, $seq:ident| $send:expr; $rx:ty, |$r:ident| $recv:expr) => {
        impl<$($p: $bound)?> Tx for $tx {
            #[inline]
            fn send(&mut self, $seq: u64) {
                let $t = self;
                $send;
            }
        }
        impl<$($p: $bound)?> Rx for $rx {
            #[inline]
            fn recv(&mut self) -> u64 {
                let $r = self;
                $recv
            }
        }
    };
}

in_place!([P: Inline] rtrb::Producer<P>, |tx, seq| {
    while tx.is_full() {
        spin_loop();
    }
    let mut chunk = tx.write_chunk_uninit(1).expect("it is not full");
    P::init(&mut chunk.as_mut_slices().0[0], seq);
    // SAFETY: the one item of the chunk has just been written.
    unsafe { chunk.commit_all() }
}; rtrb::Consumer<P>, |rx| {
    while rx.is_empty() {
        spin_loop();
    }
    let chunk = rx.read_chunk(1).expect("it is not empty");
    let sum = chunk.as_slices().0[0].sum();
    chunk.commit_all();
    sum
});

/// The next vacant slot of a ringbuf, filled.
macro_rules! ringbuf_send {
    ($tx:ident, $seq:ident) => {{
        P::init(&mut $tx.vacant_slices_mut().0[0], $seq);
        // SAFETY: one item has just been written to the beginning of the first vacant slice.
        unsafe { $tx.advance_write_index(1) }
    }};
}

/// The oldest item of a ringbuf, read.
macro_rules! ringbuf_recv {
    ($rx:ident) => {{
        let sum = $rx.first().expect("it is not empty").sum();
        $rx.skip(1);
        sum
    }};
}

in_place!([P: Inline] ringbuf::HeapProd<P>, |tx, seq| {
    while tx.is_full() {
        spin_loop();
    }
    ringbuf_send!(tx, seq);
}; ringbuf::HeapCons<P>, |rx| {
    while rx.is_empty() {
        spin_loop();
    }
    ringbuf_recv!(rx)
});

in_place!([P: Inline] BlockingTx<P>, |tx, seq| {
    tx.wait_vacant(1).expect("the receiver is there");
    ringbuf_send!(tx, seq);
}; BlockingRx<P>, |rx| {
    rx.wait_occupied(1).expect("the sender is there");
    ringbuf_recv!(rx)
});

/// Slots keep their contents between two uses.
struct Keep;

impl<P: Payload> thingbuf::Recycle<P> for Keep {
    fn new_element(&self) -> P {
        P::made(0)
    }

    #[inline]
    fn recycle(&self, _: &mut P) {}
}

struct ThingTx<P>(Arc<thingbuf::ThingBuf<P, Keep>>);
struct ThingRx<P>(Arc<thingbuf::ThingBuf<P, Keep>>);

fn thingbuf<P: Payload>() -> (ThingTx<P>, ThingRx<P>) {
    let queue = Arc::new(thingbuf::ThingBuf::with_recycle(2, Keep));
    (ThingTx(queue.clone()), ThingRx(queue))
}

in_place!([P: Payload] ThingTx<P>, |tx, seq| busy(|| tx.0.push_ref().ok()).fill(seq);
    ThingRx<P>, |rx| busy(|| rx.0.pop_ref()).sum());

in_place!([P: Payload] thingbuf::mpsc::blocking::Sender<P, Keep>, |tx, seq| {
    tx.send_ref().expect("the receiver is there").fill(seq);
}; thingbuf::mpsc::blocking::Receiver<P, Keep>, |rx| rx.recv_ref().expect("the sender is there").sum());

/// A queue by value, with all payloads.
fn by_value<Q: Queue>(list: &mut Subjects, wait: Wait, name: &'static str) {
    list.words((wait, name, "moved"), one_way::<Q, u64>);
    large::<Q, Block4K>(list, wait, name);
    large::<Q, Block1M>(list, wait, name);
}

fn large<Q: Queue, P: Inline>(list: &mut Subjects, wait: Wait, name: &'static str) {
    list.stream::<P, _, _>((wait, name, "recycled boxes"), recycled::<Q, P>);
    list.stream::<P, _, _>((wait, name, "fresh boxes"), one_way::<Q, Box<P>>);
}

pub fn add(list: &mut Subjects) {
    by_value::<Rtrb>(list, Wait::Spin, "rtrb");
    by_value::<ArrayQueue>(list, Wait::Spin, "crossbeam-queue");
    by_value::<Ringbuf>(list, Wait::Spin, "ringbuf");
    by_value::<Crossbeam>(list, Wait::SpinPark, "crossbeam-channel");
    by_value::<Std>(list, Wait::SpinPark, "std sync_channel");
    by_value::<Kanal>(list, Wait::SpinPark, "kanal");
    by_value::<Flume>(list, Wait::Park, "flume");
    by_value::<RingbufBlocking>(list, Wait::Park, "ringbuf-blocking");

    let id = (Wait::Spin, "rtrb", "in place");
    list.stream::<Block4K, _, _>(id, || rtrb::RingBuffer::<Block4K>::new(2));
    list.stream::<Block1M, _, _>(id, || rtrb::RingBuffer::<Block1M>::new(2));
    let id = (Wait::Spin, "ringbuf", "in place");
    list.stream::<Block4K, _, _>(id, || ringbuf::HeapRb::<Block4K>::new(2).split());
    list.stream::<Block1M, _, _>(id, || ringbuf::HeapRb::<Block1M>::new(2).split());
    let id = (Wait::Park, "ringbuf-blocking", "in place");
    list.stream::<Block4K, _, _>(id, || ringbuf_blocking::BlockingHeapRb::<Block4K>::new(2).split());
    list.stream::<Block1M, _, _>(id, || ringbuf_blocking::BlockingHeapRb::<Block1M>::new(2).split());
    let id = (Wait::Spin, "thingbuf", "in place");
    list.words(id, thingbuf::<u64>);
    list.stream::<Block4K, _, _>(id, thingbuf::<Block4K>);
    list.stream::<Block1M, _, _>(id, thingbuf::<Box<Block1M>>);
    let id = (Wait::Park, "thingbuf", "in place");
    list.words(id, || thingbuf::mpsc::blocking::with_recycle::<u64, _>(2, Keep));
    list.stream::<Block4K, _, _>(id, || thingbuf::mpsc::blocking::with_recycle::<Block4K, _>(2, Keep));
    list.stream::<Block1M, _, _>(id, || thingbuf::mpsc::blocking::with_recycle::<Box<Block1M>, _>(2, Keep));
}
