//! twinbuf's loader: with its defaults, with two workers, and past the page cache.

use std::sync::Arc;

use twinbuf::mmap::{Cut, PlanBuilder, ReadMode};
use twinbuf::transform::Convert;
use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};

use crate::work::{Batch, Kind, Meter, WINDOW, Work};

pub fn run(work: &Work, meter: &mut Meter<'_>, mode: ReadMode, workers: usize) -> Result<(), BoxError> {
    let records = open(work)?;
    let plan = plan(work, records.len()).build()?;
    meter.ready()?;
    let mut builder = Loader::builder(Arc::new(records), plan);
    if work.kind == Kind::Tokens {
        builder = builder.transform(Convert::U16ToU32);
    }
    let mut loader = builder.read_mode(mode).workers(workers).build()?;
    for _ in 0..work.epochs {
        // Epoch 0 each time: the other loaders that are compared have the same order in every epoch.
        let mut epoch = loader.epoch(0);
        while let Some(batch) = meter.wait(|| epoch.next()) {
            let batch = batch?;
            meter.take(match work.kind {
                Kind::Tokens => Batch::Tokens(batch.cast()?),
                Kind::Images => Batch::Images(&batch),
            })?;
        }
    }
    Ok(loader.close()?)
}

/// The file as records.
pub fn open(work: &Work) -> Result<Records, BoxError> {
    let options = Records::options();
    Ok(match work.kind {
        Kind::Tokens => options.open_llm_c([&work.data], Cut::sequence(WINDOW - 1))?,
        Kind::Images => options.open([&work.data], work.kind.record_bytes())?,
    })
}

/// The order given to all subjects. An order file has that of this plan's epoch 0.
pub fn plan(work: &Work, records: u64) -> PlanBuilder {
    let builder = Plan::builder(records).batch(work.batch as u64);
    if work.order.is_some() { builder.shuffle(Shuffle::Full).seed(42) } else { builder }
}
