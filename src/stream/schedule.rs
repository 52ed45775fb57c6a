//! The groups that are kept in memory, and the group of each step of a pass.

use std::fmt;
use std::sync::Arc;

use twinbuf_mmap::{GroupReader, Groups};

use crate::error::Error;
use crate::slot::Ticket;

/// The group of a pass and a step.
pub(super) type Order = Box<dyn Fn(u64, usize) -> usize + Send + Sync>;

/// The order of the groups, and where each of them is.
pub(super) struct Schedule {
    groups: Groups,
    order: Option<Order>,
    depth: usize,
    /// Whether each group is kept.
    kept: Vec<bool>,
}

impl Schedule {
    /// With this many slots, and this many bytes for all of it.
    pub(super) fn new(
        groups: Groups,
        order: Option<Order>,
        depth: usize,
        left: Option<u64>,
        keep: Option<usize>,
    ) -> Self {
        let all = groups.len();
        let mut schedule = Self { groups, order, depth, kept: vec![false; all] };
        let most = keep.unwrap_or(if left.is_some() { all } else { 0 }).min(all);
        let left = left.unwrap_or(u64::MAX);
        if schedule.try_keep(most, left) {
            return schedule;
        }
        // The most that fit, as far as larger numbers need more memory.
        let (mut fits, mut too_many) = (0, most);
        while fits + 1 < too_many {
            let middle = fits.midpoint(too_many);
            if schedule.try_keep(middle, left) { fits = middle } else { too_many = middle }
        }
        schedule.try_keep(fits, left);
        schedule
    }

    /// Keeps `count` groups, spread over the pass: while one of them is used, one of the others is read. Whether they fit.
    fn try_keep(&mut self, count: usize, left: u64) -> bool {
        let all = self.kept.len();
        for (group, kept) in self.kept.iter_mut().enumerate() {
            *kept = (group + 1) * count / all > group * count / all;
        }
        self.memory().is_some_and(|memory| memory <= left)
    }

    pub(super) fn groups(&self) -> &Groups {
        &self.groups
    }

    pub(super) fn is_kept(&self, group: usize) -> bool {
        self.kept.get(group).is_some_and(|&kept| kept)
    }

    pub(super) fn kept(&self) -> usize {
        self.kept.iter().filter(|&&kept| kept).count()
    }

    /// How many are read in each pass.
    pub(super) fn streamed(&self) -> u64 {
        (self.groups.len() - self.kept()) as u64
    }

    /// Bytes of a slot.
    pub(super) fn slot(&self) -> usize {
        let streamed = (0..self.groups.len()).filter(|&group| !self.is_kept(group));
        streamed.map(|group| self.groups.bytes(group)).max().unwrap_or(0)
    }

    /// Bytes of all groups that are kept.
    fn kept_bytes(&self) -> u64 {
        let kept = (0..self.groups.len()).filter(|&group| self.is_kept(group));
        kept.fold(0, |sum, group| sum.saturating_add(self.groups.bytes(group) as u64))
    }

    /// Bytes of all of it. `None` if that is too much for any memory.
    pub(super) fn memory(&self) -> Option<u64> {
        let slots = (self.slot() as u64).checked_mul(self.depth as u64)?;
        slots.checked_add(self.kept_bytes())?.checked_add(GroupReader::MEMORY)
    }

    /// The groups that come through the slots from a ticket on, as far as the order is valid.
    pub(super) fn from(self: &Arc<Self>, first: Ticket) -> impl Iterator<Item = usize> + Send + 'static {
        let schedule = self.clone();
        let passes = (first.epoch..=first.last).map_while(move |pass| {
            let mut groups =
                schedule.pass(pass).ok().filter(|_| pass == first.epoch || schedule.streamed() > 0)?;
            // The first pass may have those that are kept: it reads them.
            if pass > first.epoch || first.steps < groups.len() as u64 {
                groups.retain(|&group| !schedule.is_kept(group));
            }
            Some(groups)
        });
        passes.flatten().skip(usize::try_from(first.step).unwrap_or(usize::MAX))
    }

    /// The groups of a pass, in its order.
    pub(super) fn pass(&self, pass: u64) -> Result<Vec<usize>, Error> {
        let all = self.groups.len();
        let Some(order) = &self.order else { return Ok((0..all).collect()) };
        let mut seen = vec![false; all];
        (0..all)
            .map(|step| {
                let group = order(pass, step);
                let first = seen.get_mut(group).map(|seen| !std::mem::replace(seen, true));
                if first == Some(true) {
                    return Ok(group);
                }
                let again = if first.is_some() { " again" } else { "" };
                Err(Error::Option {
                    option: "order",
                    wanted: format!("each of {all} groups once in pass {pass}"),
                    found: format!("{group}{again} at step {step}"),
                })
            })
            .collect()
    }
}

/// The sum, spelled out.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (depth, slot, kept) = (self.depth, self.slot(), self.kept());
        write!(f, "{depth} slots of {slot} bytes")?;
        if kept > 0 {
            write!(f, ", {kept} groups that are kept: {} bytes", self.kept_bytes())?;
        }
        write!(f, "; {} bytes for reads past the page cache", GroupReader::MEMORY)
    }
}
