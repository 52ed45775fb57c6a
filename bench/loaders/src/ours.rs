//! twinbuf's loader: with its defaults, as its README recommends, and with two workers.

use std::sync::Arc;

use twinbuf::mmap::PlanBuilder;
use twinbuf::mmap::{Cut, ReadMode};
use twinbuf::transform::{Convert, per_record};
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan, Records, Shuffle};

use crate::sys::burn_cpu;
use crate::work::{Batch, Kind, Meter, WINDOW, Work};

pub fn run(work: &Work, meter: &mut Meter<'_>, mode: ReadMode, workers: usize) -> Result<(), BoxError> {
    let records = open(work)?;
    let plan = plan(work, records.len()).build()?;
    meter.ready()?;
    let records = Arc::new(records);
    let mut builder = match work.fail {
        Some(_) => Loader::builder(Faulty { records, work: work.clone(), read: 0 }, plan),
        None => Loader::builder(records, plan),
    };
    if work.kind == Kind::Tokens {
        builder = builder.transform(Convert::U16ToU32);
    }
    if !work.decode.is_zero() {
        let decode = work.decode;
        builder = builder.transform(per_record(work.kind.record_bytes(), move |record, out, _| {
            out.copy_from_slice(record);
            burn_cpu(decode);
            Ok(())
        }));
    }
    let mut loader = builder.read_mode(mode).workers(workers).build()?;
    for _ in 0..work.epochs {
        // The other subjects have the same order in every epoch.
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

/// The records, and a fault.
#[derive(Clone)]
struct Faulty {
    records: Arc<Records>,
    work: Work,
    /// The number of records so far.
    read: u64,
}

impl Dataset for Faulty {
    fn records(&self) -> u64 {
        self.records.records()
    }

    fn record_bytes(&self) -> usize {
        Dataset::record_bytes(&self.records)
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        self.work.fault(self.read / self.work.batch as u64);
        self.read += batch.len();
        Dataset::read(&mut self.records, batch, out)
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
}
