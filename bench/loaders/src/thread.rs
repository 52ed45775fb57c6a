//! A thread that reads ahead and a channel of the standard library: the usual code without a loader.
//!
//! The buffers return through a second channel.

use std::sync::mpsc::{channel, sync_channel};
use std::thread;

use twinbuf::BoxError;

use crate::source::{Buffer, Source};
use crate::work::{Meter, Work};

/// One in use, one ready, one being filled.
const BUFFERS: usize = 3;

pub fn run(work: &Work, meter: &mut Meter<'_>) -> Result<(), BoxError> {
    let order = work.order()?;
    let mut source = Source::open(work)?;
    meter.ready()?;
    thread::scope(|scope| {
        let (full, batches) = sync_channel(BUFFERS - 2);
        let (empty, buffers) = channel();
        (0..BUFFERS).try_for_each(|_| empty.send(Buffer::new(work)))?;
        let reader = scope.spawn(move || {
            for _ in 0..work.epochs {
                for records in order.chunks(work.batch) {
                    let Ok(mut buffer) = buffers.recv() else { return };
                    let read = source.read(records, &mut buffer).map(|()| buffer);
                    let failed = read.is_err();
                    if full.send(read).is_err() || failed {
                        return;
                    }
                }
            }
        });
        while let Ok(batch) = meter.wait(|| batches.recv()) {
            let buffer = batch?;
            meter.take(buffer.batch())?;
            // Fails if the reader is done.
            let _ = empty.send(buffer);
        }
        // The end of the channel does not say why it ended.
        reader.join().map_err(|_| "told by join alone: the reader panicked".into())
    })
}
