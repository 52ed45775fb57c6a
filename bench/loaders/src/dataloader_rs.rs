//! The `DataLoader` of the crate dataloader-rs.
//!
//! The dataset is the epoch in its order. Its items are those of [`Lender::record`], and the collator passes on the one
//! that has the batch, so nothing is copied. `prefetch_depth` is the default, 2, as its BENCH.md recommends.
//! `items_in_parallel` is the default too, 1: the items of a batch are read together. BENCH.md also recommends settings
//! of glibc's `malloc`, to avoid faulting in the memory of batches again; here that memory is never freed.

use std::sync::Arc;

use dataloader_rs::{Collator, DataLoader, Dataset, error};
use twinbuf::BoxError;

use crate::lent::{Lender, Lent};
use crate::work::{Meter, Work};

struct Epoch(Arc<Lender>);

impl Dataset for Epoch {
    type Item = Option<Lent>;

    fn get(&self, index: usize) -> error::Result<Self::Item> {
        Ok(self.0.record(index)?)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

struct Whole;

impl Collator<Option<Lent>> for Whole {
    type Batch = Lent;

    fn collate(&self, items: Vec<Option<Lent>>) -> error::Result<Lent> {
        let batch = items.into_iter().flatten().next();
        batch.ok_or_else(|| "batches of the loader are not those of the lender".into())
    }
}

pub fn run(work: &Work, meter: &mut Meter<'_>, workers: usize) -> Result<(), BoxError> {
    let lender = Lender::open(work)?;
    meter.ready()?;
    let batch = lender.batch();
    let builder = DataLoader::builder(Epoch(lender)).batch_size(batch).drop_last(true);
    let mut loader = builder.collator(Whole).num_workers(workers).build();
    for _ in 0..work.epochs {
        let mut epoch = meter.wait(|| loader.iter());
        while let Some(batch) = meter.wait(|| epoch.next()) {
            meter.take(batch?.batch())?;
        }
    }
    Ok(())
}
