//! The batches of an epoch whose batch size or number of ranks may change in the middle.

use std::sync::Arc;

use super::batch::Seam;
use super::window::Shares;
use super::{BatchIndices, LastBatch, PartialEpoch, Plan, PlanError, Shuffle};

/// An epoch, or the rest of one after other plans completed some of its steps. [`Plan::resume`] and
/// [`Plan::epoch_after`] return it.
///
/// Step numbers continue: the number of the first remaining step equals the number of completed steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemainingEpoch {
    /// The legs before the last one. There is one leg for each batch size that is left in the epoch.
    earlier: Vec<Leg>,
    last: Leg,
}

/// The steps of an epoch that have one batch size.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Leg {
    /// The plan over the positions that are left at the start of the leg.
    left: Plan,
    /// The number of steps before the leg.
    base: u64,
    /// The number of positions before those that are left, among those after the last seam if there is one.
    front: u64,
    /// The shares of the first part of the epoch. They determine its order.
    shares: Shares,
    /// Where the earlier parts of a windowed shuffle ended at each rank.
    seams: Option<Arc<[Seam]>>,
}

/// The parts of an epoch of `plan` that were completed.
struct Past<'p> {
    plan: &'p Plan,
    /// The number of positions that were completed. If the order has started again at its front, counted from there.
    done: u64,
    /// The number of positions that are left up to the end of the order.
    left: u64,
    /// The number of steps that were completed.
    base: u64,
    /// The shares of the first part, also if none of its steps is whole.
    shares: Option<Shares>,
    seams: Vec<Seam>,
}

impl<'p> Past<'p> {
    /// Creates the past of an epoch that has just started.
    fn new(plan: &'p Plan) -> Self {
        Self { plan, done: 0, left: plan.records, base: 0, shares: None, seams: Vec::new() }
    }

    /// Adds a completed part. Fails if the part has more steps than were left.
    fn push(&mut self, part: PartialEpoch) -> Result<(), PlanError> {
        let PartialEpoch { batch, world, steps } = part;
        let Self { plan, left, .. } = *self;
        let room = plan.steps.map_or(u64::MAX, |steps| steps - self.base);
        let whole = batch.checked_mul(world).and_then(|step| left.checked_div(step)).unwrap_or(0).min(room);
        // Whether the steps may continue past the end of the order.
        let wraps = plan.last_batch == LastBatch::Wrap && plan.steps.is_some();
        let most = if wraps && batch > 0 && world > 0 { room } else { whole };
        let all = steps.checked_mul(batch).and_then(|all| all.checked_mul(world));
        let (true, Some(done)) = (steps <= most, all.and_then(|all| self.done.checked_add(all))) else {
            return Err(PlanError::PartialEpoch { part, left });
        };
        // No overflow: with `wraps`, the plan limits the steps. Otherwise each step takes records that were left.
        self.base += steps;
        self.left = left.saturating_sub(done - self.done);
        self.done = if done > plan.records { done % plan.records } else { done };
        self.shares = self.shares.or((steps > 0).then_some(Shares { len: whole * batch, count: world }));
        let steps = steps.min(whole);
        if steps > 0 {
            let left = left - steps * batch * world;
            self.seams.push(Seam { world, share: whole * batch, done: steps * batch, left });
        }
        Ok(())
    }

    /// Returns what is left, as a leg with batches of this size.
    fn leg(&self, batch: u64) -> Leg {
        let windows = matches!(self.plan.shuffle, Shuffle::Window { .. });
        let steps = self.plan.steps.map(|steps| steps - self.base);
        let plan = Plan { steps, ..self.plan.with_size(batch) };
        let shares = self.shares.filter(|_| windows).unwrap_or(plan.shares());
        let seams = (windows && !self.seams.is_empty()).then(|| self.seams.as_slice().into());
        // If the order has started again, what the last seam left is visited too, and comes before.
        let visited = self.seams.last().filter(|_| windows).map_or(0, |seam| seam.left);
        let front = if windows && self.left > 0 { 0 } else { visited + self.done };
        Leg { left: Plan { records: self.left, ..plan }, base: self.base, front, shares, seams }
    }

    /// Returns the rest of the epoch, which started after `trained` steps of the training.
    fn rest(mut self, trained: u64) -> RemainingEpoch {
        let mut earlier = Vec::new();
        loop {
            let (batch, more) = self.plan.size_at(trained.saturating_add(self.base));
            let leg = self.leg(batch);
            let part = PartialEpoch { batch, world: self.plan.world, steps: more };
            // This leg is the last if the epoch ends in it, or with a step that is not whole: then `push` fails.
            if leg.left.ends_within(more) || self.push(part).is_err() {
                return RemainingEpoch { earlier, last: leg };
            }
            earlier.push(leg);
        }
    }
}

impl Plan {
    /// Returns the rest of an epoch after `parts`. `parts` are the completed steps, in order, with any batch sizes and
    /// numbers of ranks. The remaining records are divided into this plan's batches and ranks. The other plans must
    /// have the same records, shuffle, seed and [`steps`](super::PlanBuilder::steps) as this plan.
    ///
    /// The remaining records keep the epoch's order. With [`LastBatch::Drop`](crate::LastBatch::Drop), records that
    /// do not fill a last step of this plan are dropped. With [`Shuffle::Window`], the first part determines the
    /// order of the epoch, and each rank takes a contiguous section of the rest. Memory is O(1) per part.
    ///
    /// A schedule of batch sizes ([`PlanBuilder::batches`](super::PlanBuilder::batches)) is where it is after the
    /// `trained` steps before this epoch and those of the parts.
    ///
    /// # Errors
    ///
    /// [`PlanError::PartialEpoch`] if a part has more whole steps than the remaining records or the
    /// steps of the epoch allow, or has steps and a batch size or number of ranks of 0.
    ///
    /// ```
    /// use twinbuf_mmap::{PartialEpoch, Plan};
    ///
    /// // One rank did three steps of four records. Two ranks go on with batches of eight.
    /// let parts = [PartialEpoch { batch: 4, world: 1, steps: 3 }];
    /// let plan = Plan::builder(44).batch(8).rank(1, 2).build()?;
    /// let rest = plan.resume(0, &parts)?;
    /// assert_eq!((rest.first(), rest.end()), (3, 5));
    /// let batch = rest.batch(0, 4).expect("a step that is left");
    /// assert!(batch.runs().eq([36..44]));
    /// # Ok::<(), twinbuf_mmap::PlanError>(())
    /// ```
    pub fn resume(&self, trained: u64, parts: &[PartialEpoch]) -> Result<RemainingEpoch, PlanError> {
        let mut past = Past::new(self);
        parts.iter().try_for_each(|part| past.push(*part))?;
        Ok(past.rest(trained))
    }

    /// Returns a whole epoch that starts after `trained` steps of the training.
    #[must_use]
    pub fn epoch_after(&self, trained: u64) -> RemainingEpoch {
        Past::new(self).rest(trained)
    }
}

impl RemainingEpoch {
    fn legs(&self) -> impl DoubleEndedIterator<Item = &Leg> {
        self.earlier.iter().chain([&self.last])
    }

    /// Returns the number of the first remaining step. It equals the number of steps that the earlier plans completed.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.earlier.first().unwrap_or(&self.last).base
    }

    /// Returns the number of this rank's last step plus one, or [`first`](Self::first) if this rank has no step left.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.last.base + self.last.left.steps_of(self.last.left.rank)
    }

    /// Returns the largest [`end`](Self::end) of all ranks.
    #[must_use]
    pub fn max_steps(&self) -> u64 {
        self.last.base + self.last.left.steps_of(0)
    }

    /// Returns the record indices of this rank at `step` of `epoch`. Returns `None` if the step is not one of the
    /// remaining steps.
    #[must_use]
    pub fn batch(&self, epoch: u64, step: u64) -> Option<BatchIndices> {
        let Leg { left, base, front, shares, seams } = self.legs().rfind(|leg| leg.base <= step)?;
        let (positions, share) = left.positions(step - base)?;
        Some(BatchIndices {
            list: left.list.clone(),
            seed: left.seed,
            shuffle: left.shuffle,
            epoch,
            step,
            start: positions.start + front,
            end: positions.end + front,
            share: share.start + front..share.end + front,
            shares: *shares,
            seams: seams.clone(),
        })
    }

    /// Returns the steps from [`first`](Self::first) up to, but not including, `step`, for
    /// [`Plan::resume`]: one part for each entry of the schedule that has some of these steps. `step` is at most the
    /// [`max_steps`](Self::max_steps) of the epoch. The steps must be whole: not the last one if it has fewer records
    /// (`LastBatch::Keep`) or, without [`steps`](super::PlanBuilder::steps), starts the order again
    /// (`LastBatch::Wrap`).
    #[must_use]
    pub fn parts(&self, step: u64) -> Vec<PartialEpoch> {
        let ends = self.legs().skip(1).map(|leg| leg.base).chain([u64::MAX]);
        let parts = self.legs().zip(ends).map(|(leg, end)| PartialEpoch {
            batch: leg.left.batch,
            world: leg.left.world,
            steps: end.min(step).saturating_sub(leg.base),
        });
        parts.filter(|part| part.steps > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn what_a_window_visits_was_asked_for_also_after_a_change() {
        let shuffle = Shuffle::Window { chunk_records: 50, window_chunks: 6 };
        let plan =
            |rank| Plan::builder(9999).batch(30).shuffle(shuffle).seed(9).rank(rank, 2).build().unwrap();
        let parts =
            [PartialEpoch { batch: 20, world: 3, steps: 40 }, PartialEpoch { batch: 8, world: 1, steps: 99 }];
        let mut visited = BTreeSet::new();
        for rank in 0..2 {
            let rest = plan(rank).resume(0, &parts).unwrap();
            let mut there = BTreeSet::<u64>::new();
            let (mut together, mut asked, mut follows) = (0, 0, false);
            for step in rest.first()..rest.end() {
                let batch = rest.batch(4, step).unwrap();
                visited.extend(batch.runs().flatten());
                // A batch across a seam has no `chunks`: it hints its own records. Like the first batch, the next one
                // asks for all chunks of its window.
                let before = std::mem::replace(&mut follows, false);
                let Some(chunks) = batch.chunks(before) else { continue };
                follows = true;
                together += 1;
                let chunks: Vec<u64> = chunks.into_iter().flatten().collect();
                asked += if before { chunks.len() } else { 0 };
                there.extend(&chunks);
                assert!(batch.runs().flatten().all(|record| there.contains(&record)), "step {step}");
            }
            assert!(together > 100, "{together} of {rest:?}");
            // Chunks are asked for a second time only around seams.
            assert!(asked < there.len() * 5 / 4, "{asked} of {}", there.len());
        }
        assert_eq!(visited.len(), (9999 - 40 * 60 - 99 * 8) / 60 * 60);
    }

    #[test]
    fn chunks_hold_their_batch_also_beside_a_seam_within_a_share() {
        let shuffle = Shuffle::Window { chunk_records: 50, window_chunks: 6 };
        let plan = Plan::builder(9999).batch(30).shuffle(shuffle).seed(9).build().unwrap();
        let parts =
            [PartialEpoch { batch: 20, world: 1, steps: 40 }, PartialEpoch { batch: 8, world: 5, steps: 99 }];
        let rest = plan.resume(0, &parts).unwrap();
        let mut seams = 0;
        for batch in (rest.first()..rest.end()).filter_map(|step| rest.batch(4, step)) {
            let Some(chunks) = batch.window_chunks() else {
                seams += 1;
                continue;
            };
            let has = |record| chunks.iter().any(|chunk| chunk.contains(&record));
            assert!(batch.runs().flatten().all(has), "step {}", batch.step());
        }
        assert!((4..=6).contains(&seams), "{seams}");
    }

    #[test]
    fn a_past_of_no_steps_is_none() {
        let shuffle = Shuffle::Window { chunk_records: 5, window_chunks: 3 };
        let plan = Plan::builder(100).batch(10).shuffle(shuffle).build().unwrap();
        let rest = plan.resume(0, &[PartialEpoch { batch: 3, world: 2, steps: 0 }]).unwrap();
        assert_eq!((rest.first(), rest.end(), rest.max_steps()), (0, 10, 10));
        assert!((0..11).all(|step| rest.batch(2, step) == plan.batch(2, step)));
        let [three, part] = [3, 4].map(|steps| PartialEpoch { batch: 3, world: 11, steps });
        assert_eq!(plan.resume(0, &[three]).unwrap().end(), 3, "one record is left");
        assert_eq!(plan.resume(0, &[part]), Err(PlanError::PartialEpoch { part, left: 100 }));
    }

    /// A first part whose steps are longer than the epoch still determines the order.
    #[test]
    fn the_first_part_determines_the_order_also_without_a_whole_step() {
        let plan = |batches: &[(u64, u64)]| {
            let shuffle = Shuffle::Window { chunk_records: 3, window_chunks: 2 };
            let plan = Plan::builder(14).shuffle(shuffle).seed(7).last_batch(LastBatch::Wrap).steps(5);
            plan.batches(batches.iter().copied()).build().unwrap()
        };
        let records = |batch: Option<BatchIndices>| batch.unwrap().runs().flatten().collect::<Vec<_>>();
        let one = plan(&[(u64::MAX, 21)]);
        let order: Vec<u64> = (0..3).flat_map(|step| records(one.batch(0, step))).collect();
        assert_eq!(order[..14], order[14..28]);
        // The order goes round: 63 of its positions were visited before step 3.
        let later =
            |step: usize| -> Vec<u64> { (0..8).map(|at| order[(63 + (step - 3) * 8 + at) % 14]).collect() };
        let part = PartialEpoch { batch: 21, world: 1, steps: 3 };
        let [two, eight] = [plan(&[(3, 21), (u64::MAX, 8)]), plan(&[(u64::MAX, 8)])];
        for rest in [two.epoch_after(0), two.resume(0, &[part]).unwrap(), eight.resume(0, &[part]).unwrap()] {
            assert_eq!([3, 4].map(later), [3, 4].map(|step| records(rest.batch(0, step))), "{rest:?}");
        }
    }
}
