//! The prefetch window: asks the system for pages of records before they are read.

use twinbuf_mmap::{BatchPlan, HintStats};

use super::schedule::Schedule;
use crate::slot::{Origin, Ticket};

/// Asks for the pages of some records, in all data sets.
pub(crate) type Ask<'a> = &'a mut dyn FnMut(&BatchPlan) -> HintStats;

/// The window of records after the batch that is being read whose pages have been asked for. It reaches into the
/// next epoch. Several workers share one, and begin their batches nearly in order.
pub(crate) struct Prefetch {
    /// How far the window may reach beyond the current batch, in records.
    window: u64,
    /// The batch at the end of the window.
    at: Ticket,
    /// Records of that batch that have been asked for.
    done: u64,
    /// From the start of the current batch to the end of the window; each batch counts as a full one.
    ahead: u64,
    /// The record after the last one that was asked for.
    next: Option<u64>,
    /// Only the first batch of the generation has been asked for.
    fresh: bool,
    /// Whether the system reads ahead of records in order.
    in_order: bool,
}

impl Prefetch {
    pub(crate) fn new(window: u64, in_order: bool) -> Self {
        Self {
            window,
            in_order,
            at: Ticket { generation: 0, seq: 0, ordinal: 0, epoch: 0, step: 0, steps: 0, last: 0 },
            done: 0,
            ahead: 0,
            next: None,
            fresh: false,
        }
    }

    /// Before a batch is read: extends the window past it by at most two batches, so that what is needed first is
    /// asked for first.
    ///
    /// The first batch of a generation has not been asked for. It is asked for alone, so that it does not wait for
    /// those after it, and not even that if it is one run, because it is read at once.
    pub(crate) fn before(&mut self, ask: Ask<'_>, schedule: &Schedule, ticket: Ticket) -> HintStats {
        if ticket.generation < self.at.generation {
            // Another worker has begun with what the caller asked for since.
            return HintStats::default();
        }
        if self.at.generation == ticket.generation {
            self.ahead = self.ahead.saturating_sub(schedule.plan.batch_records());
            self.fresh = false;
            return self.extend(ask, schedule, self.window);
        }
        (self.at, self.done, self.ahead, self.fresh) = (ticket, 0, 0, true);
        let first = schedule.batch(ticket);
        self.next = first.and_then(|first| first.plan.runs().next()).map(|run| run.start);
        self.extend(ask, schedule, 0)
    }

    /// After the first batch of a generation has been read: asks for those after it.
    pub(crate) fn after(&mut self, ask: Ask<'_>, schedule: &Schedule) -> HintStats {
        let fresh = std::mem::take(&mut self.fresh);
        if fresh { self.extend(ask, schedule, self.window) } else { HintStats::default() }
    }

    /// Extends the window to `window` records past the current batch, by at most two batches.
    fn extend(&mut self, ask: Ask<'_>, schedule: &Schedule, window: u64) -> HintStats {
        let batch = schedule.plan.batch_records();
        let until = batch.saturating_add(window).min(self.ahead.saturating_add(batch.saturating_mul(2)));
        let mut hints = HintStats::default();
        while self.ahead < until {
            let Some(Origin { plan: records, .. }) = schedule.batch(self.at) else {
                if self.at.epoch >= self.at.last || self.at.step == 0 {
                    break;
                }
                (self.at.epoch, self.at.step, self.done) = (self.at.epoch + 1, 0, 0);
                continue;
            };
            let end = records.len().min(self.done.saturating_add(until - self.ahead));
            if let Some(part) = records.part(self.done..end) {
                hints += self.ask(ask, &part);
            }
            if end == records.len() {
                self.ahead = self.ahead.saturating_add(batch - self.done);
                (self.at.step, self.done) = (self.at.step + 1, 0);
            } else {
                self.ahead += end - self.done;
                self.done = end;
            }
        }
        hints
    }

    /// Records that continue where the last ones ended are left to the system, if it reads ahead of sequential reads, which
    /// it does in larger requests: 1465 MiB/s instead of 616 (`bench/disk`, section `sequential`).
    fn ask(&mut self, ask: Ask<'_>, records: &BatchPlan) -> HintStats {
        let first = records.runs().next();
        let goes_on = self.next.is_some_and(|next| first == Some(next..next + records.len()));
        // Not by going through all runs, which would be done once more to read them.
        let last = records.len().checked_sub(1).and_then(|last| records.part(last..last + 1));
        self.next = last.and_then(|last| last.runs().next()).map(|run| run.end);
        if goes_on && self.in_order { HintStats::default() } else { ask(records) }
    }
}
