//! burn's `DataLoader`, built by its `DataLoaderBuilder`.
//!
//! The dataset is the epoch in its order, so nothing is shuffled a second time. Its items are those of
//! [`Lender::record`], and the batcher passes on the one that has the batch. This copies less than putting items of
//! bytes together in the batcher. It also keeps errors: a dataset can return them, a batcher cannot. The result is the
//! batch's memory; a tensor would cost one more copy.
//!
//! In 0.22 the only other setting for speed is the number of workers. Each worker gets a contiguous part of the
//! epoch's batches: with two workers, a half each. They are delivered as they come, up to 100 of them (`MAX_QUEUED_ITEMS` in
//! `multithread.rs`) ahead of the caller; with one worker, in order.

use std::sync::Arc;

use burn_core::data::dataloader::DataLoaderBuilder;
use burn_core::data::dataloader::batcher::Batcher;
use burn_core::data::dataset::{Dataset, DatasetError};
use burn_core::tensor::Device;
use twinbuf::BoxError;

use crate::lent::{Lender, Lent};
use crate::work::{Meter, Work};

/// Items and batches must be `Clone`.
type Item = Option<Arc<Lent>>;

struct Epoch(Arc<Lender>);

impl Dataset<Item> for Epoch {
    fn get(&self, index: usize) -> Result<Item, DatasetError> {
        Ok(self.0.record(index).map_err(DatasetError::new)?.map(Arc::new))
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

struct Whole;

impl Batcher<Item, Arc<Lent>> for Whole {
    fn batch(&self, items: Vec<Item>, _device: &Device) -> Arc<Lent> {
        items.into_iter().flatten().next().expect("batches of the loader are those of the lender")
    }
}

pub fn run(work: &Work, meter: &mut Meter<'_>, workers: usize) -> Result<(), BoxError> {
    let lender = Lender::open(work)?;
    meter.ready()?;
    let builder = DataLoaderBuilder::new(Whole).batch_size(lender.batch()).num_workers(workers);
    let loader = builder.build(Epoch(lender));
    for _ in 0..work.epochs {
        let mut epoch = meter.wait(|| loader.iter());
        while let Some(batch) = meter.wait(|| epoch.next()) {
            meter.take(batch?.batch())?;
        }
    }
    Ok(())
}
