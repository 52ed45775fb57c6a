//! Reads, then computes, in turn on one thread with one buffer, like the training loop of llm.c.

use twinbuf::BoxError;

use crate::source::{Buffer, Source};
use crate::work::{Meter, Work};

pub fn run(work: &Work, meter: &mut Meter<'_>) -> Result<(), BoxError> {
    let order = work.order()?;
    let mut source = Source::open(work)?;
    meter.ready()?;
    let mut buffer = Buffer::new(work);
    for _ in 0..work.epochs {
        for records in order.chunks(work.batch) {
            meter.wait(|| source.read(records, &mut buffer))?;
            meter.take(buffer.batch())?;
        }
    }
    Ok(())
}
