//! A plan that was saved is checked like a new one when it comes back.

use crate::{Order, Plan, PlanError, Tail};

/// The fields of a [`Plan`], as they were found.
#[derive(serde::Deserialize)]
#[serde(rename = "Plan", deny_unknown_fields)]
pub(crate) struct Saved {
    records: u64,
    batch: u64,
    seed: u64,
    order: Order,
    rank: u64,
    world: u64,
    tail: Tail,
}

impl TryFrom<Saved> for Plan {
    type Error = PlanError;

    fn try_from(saved: Saved) -> Result<Self, PlanError> {
        let Saved { records, batch, seed, order, rank, world, tail } = saved;
        Self::builder(records).batch(batch).seed(seed).order(order).shard(rank, world).tail(tail).build()
    }
}
