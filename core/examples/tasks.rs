//! Two tasks on a multi-threaded executor (tokio) share a double buffer; neither blocks its thread.
//!
//! `cargo run --example tasks`

use twinbuf_core::{Closed, DoubleBuffer, RecvError};

static RING: DoubleBuffer<[u64; 512]> = DoubleBuffer::new([[0; 512]; 2]);

#[tokio::main]
async fn main() {
    let (mut tx, mut rx) = RING.try_split_static().expect("split once");

    let producer = tokio::spawn(async move {
        for batch in 0..1000 {
            let mut slot = tx.acquire_async().await?;
            slot.fill(batch);
            slot.commit()?;
        }
        tx.finish();
        Ok::<(), Closed>(())
    });

    let consumer = tokio::spawn(async move {
        let mut sum = 0;
        while let Some(slot) = rx.recv_async().await? {
            tokio::task::yield_now().await; // the guard may be held over an await, on any thread
            sum += slot.iter().sum::<u64>();
        }
        Ok::<u64, RecvError>(sum)
    });

    producer.await.expect("no panic").expect("the consumer stayed to the end");
    let sum = consumer.await.expect("no panic").expect("the producer finished");
    assert_eq!(sum, 512 * (0..1000).sum::<u64>());
    println!("1000 batches, sum {sum}");
}
