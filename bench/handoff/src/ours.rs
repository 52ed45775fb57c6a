//! twinbuf with each of its wait strategies, always in place.

use twinbuf_core::{Auto, Consumer, HeapRing, Park, Producer, Ring, Spin};

use crate::measure::{Rx, Subjects, Tx, Wait};
use crate::payload::{Block1M, Block4K, Payload};

impl<P: Payload, W: twinbuf_core::Wait + Sync> Tx for Producer<'static, P, W> {
    #[inline]
    fn send(&mut self, seq: u64) {
        let mut slot = self.acquire().expect("the consumer is there");
        slot.fill(seq);
        slot.commit().expect("the consumer is there");
    }
}

impl<P: Payload, W: twinbuf_core::Wait + Sync> Rx for Consumer<'static, P, W> {
    #[inline]
    fn recv(&mut self) -> u64 {
        Consumer::recv(self).expect("the producer is there").expect("not the end").sum()
    }
}

/// A `static` ring: leaked, with its two slots, at each call.
fn ring<P: Payload, W>() -> (Producer<'static, P, W>, Consumer<'static, P, W>)
where
    W: twinbuf_core::Wait + Default + Send + Sync + 'static,
{
    Box::leak(Box::new(Ring::with_wait([P::made(0), P::made(0)], W::default()))).split()
}

/// Owned by its handles.
fn owned<P: Payload>() -> (Producer<'static, P, Spin>, Consumer<'static, P, Spin>) {
    HeapRing::with_wait([P::made(0), P::made(0)], Spin).into_handles()
}

fn strategy<W>(list: &mut Subjects, wait: Wait, name: &'static str)
where
    W: twinbuf_core::Wait + Default + Send + Sync + 'static,
{
    let id = (wait, name, "in place");
    list.words(id, ring::<u64, W>);
    list.stream::<Block4K, _, _>(id, ring::<Block4K, W>);
    list.stream::<Block1M, _, _>(id, ring::<Box<Block1M>, W>);
}

pub fn add(list: &mut Subjects) {
    strategy::<Spin>(list, Wait::Spin, "twinbuf Spin");
    strategy::<Auto>(list, Wait::SpinPark, "twinbuf Auto");
    strategy::<Park>(list, Wait::Park, "twinbuf Park");

    let id = (Wait::Spin, "twinbuf Spin, owned", "in place");
    list.words(id, owned::<u64>);
}
