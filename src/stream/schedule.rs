//! Which groups are kept in memory, and the order of the groups in each pass.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use twinbuf_mmap::{Buffer, Groups, Reader};

use crate::error::Error;
use crate::pipe::Place;
use crate::thread::caught;

/// Returns the group of a pass and a step.
pub(super) type Order = Box<dyn Fn(u64, usize) -> usize + Send + Sync>;

/// The order of the groups in each pass, and whether each group is kept in memory.
pub(super) struct Schedule {
    groups: Groups,
    order: Option<Order>,
    /// The numbers of host slots and of device slots.
    depths: (usize, usize),
    /// For each group that is kept in memory: its memory, once it has been read.
    kept: Vec<Option<Kept>>,
    /// The orders of the passes around the last one that was asked for, or what is wrong with them: both sides have the
    /// same.
    made: Mutex<BTreeMap<u64, Made>>,
}

/// How many passes one side may be ahead of the other without a second call of the order.
const AHEAD: u64 = 16;

type Made = Arc<OnceLock<Result<Vec<usize>, String>>>;

pub(super) type Kept = OnceLock<Arc<Buffer>>;

impl Schedule {
    /// Chooses the groups to keep: at most `keep`, and no more than fit into `left` bytes beside the slots. If their lengths
    /// differ, these may be fewer than would fit.
    pub(super) fn new(
        groups: Groups,
        order: Option<Order>,
        depths: (usize, usize),
        left: Option<u64>,
        keep: Option<usize>,
    ) -> Self {
        let all = groups.len();
        let mut schedule = Self { groups, order, depths, kept: vec![None; all], made: Mutex::default() };
        let most = keep.unwrap_or(if left.is_some() { all } else { 0 }).min(all);
        let left = left.unwrap_or(u64::MAX);
        let count = count_that_fits(most, |count| schedule.try_keep(count, left));
        schedule.try_keep(count, left);
        schedule
    }

    /// Keeps `count` groups, and no others. They are spread over the groups, so that in this order another group can be
    /// read while the caller uses one of them. Returns whether they fit into `left` bytes.
    fn try_keep(&mut self, count: usize, left: u64) -> bool {
        let all = self.kept.len();
        for (group, kept) in self.kept.iter_mut().enumerate() {
            *kept = ((group + 1) * count / all > group * count / all).then(OnceLock::new);
        }
        // For a group that the caller still has when it begins the next pass: that may leave its slot, which gets new
        // memory.
        let spare = if count > 0 && self.depths.1 == 0 { self.slot() as u64 } else { 0 };
        self.memory().is_some_and(|memory| memory.saturating_add(spare) <= left)
    }

    pub(super) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Returns the memory of a group, if it is kept.
    pub(super) fn memory_of(&self, group: usize) -> Option<&Kept> {
        self.kept.get(group)?.as_ref()
    }

    pub(super) fn kept(&self) -> usize {
        self.kept.iter().flatten().count()
    }

    /// Whether all groups that are kept have been read.
    pub(super) fn is_read(&self) -> bool {
        self.kept.iter().flatten().all(|kept| kept.get().is_some())
    }

    /// Whether a group comes through the slots in each pass. With a device, all groups do.
    pub(super) fn is_streamed(&self, group: usize) -> bool {
        self.depths.1 > 0 || self.memory_of(group).is_none()
    }

    /// Returns the bytes of a slot.
    pub(super) fn slot(&self) -> usize {
        let streamed = (0..self.groups.len()).filter(|&group| self.is_streamed(group));
        // A slot on a device has at least one byte.
        streamed.map(|group| self.groups.bytes(group)).max().unwrap_or(0).max(self.depths.1.min(1))
    }

    /// Returns the bytes of all groups that are kept.
    fn kept_bytes(&self) -> u64 {
        let kept = (0..self.groups.len()).filter(|&group| self.memory_of(group).is_some());
        kept.fold(0, |sum, group| sum.saturating_add(self.groups.bytes(group) as u64))
    }

    /// Returns the bytes of the slots, of the kept groups and of the reader's buffers. `None` if the sum overflows.
    pub(super) fn memory(&self) -> Option<u64> {
        let slots = (self.slot() as u64).checked_mul(self.depths.0.saturating_add(self.depths.1) as u64)?;
        slots.checked_add(self.kept_bytes())?.checked_add(Reader::<Groups>::MEMORY)
    }

    /// Returns the groups that these passes read from the files, up to the first pass with an invalid order.
    pub(super) fn reads(
        self: Arc<Self>,
        passes: RangeInclusive<u64>,
    ) -> impl Iterator<Item = usize> + Send + 'static {
        let first = *passes.start();
        let passes = passes.map_while(move |pass| {
            let is_first = pass == first;
            let mut groups = self.pass(pass).ok().filter(|_| is_first || self.kept() < self.groups.len())?;
            groups.retain(|&group| self.memory_of(group).is_none_or(|kept| is_first && kept.get().is_none()));
            Some(groups)
        });
        passes.flatten()
    }

    /// Returns the pipe's order for a series of passes: the groups that come through the slots. `whole`: in the first
    /// pass all groups do, because not all kept groups have been read yet.
    pub(super) fn order(
        self: Arc<Self>,
        passes: RangeInclusive<u64>,
        whole: bool,
    ) -> impl Iterator<Item = (Place, usize)> + Send + 'static {
        let first = *passes.start();
        let passes = passes.map_while(move |pass| {
            // An invalid order ends this iterator. The caller's side checks the order too, and returns the error.
            let groups = (0..).zip(self.pass(pass).ok()?);
            let mut units: Vec<_> =
                groups.map(|(step, group)| (Place { ordinal: pass, epoch: pass, step }, group)).collect();
            units.retain(|&(_, group)| whole && pass == first || self.is_streamed(group));
            // If no group of this pass needs a slot, all are kept in memory, and later passes need none either.
            Some(units).filter(|units| !units.is_empty())
        });
        passes.flatten()
    }

    /// Returns the groups of a pass, in its order. Returns an error if the order is invalid.
    pub(super) fn pass(&self, pass: u64) -> Result<Vec<usize>, Error> {
        let all = self.groups.len();
        let Some(order) = &self.order else { return Ok((0..all).collect()) };
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.retain(|of, _| of.abs_diff(pass) <= AHEAD);
        let groups = made.entry(pass).or_default().clone();
        // The order is foreign code: it may wait for the caller, who asks for an earlier pass.
        drop(made);
        let groups = groups.get_or_init(|| {
            let mut seen = vec![false; all];
            let group = |step| {
                let group = order(pass, step);
                let first = seen.get_mut(group).map(|seen| !std::mem::replace(seen, true));
                let again = if first.is_some() { " again" } else { "" };
                if first == Some(true) { Ok(group) } else { Err(format!("{group}{again} at step {step}")) }
            };
            caught(|| (0..all).map(group).collect()).unwrap_or_else(|panic| Err(format!("a panic: {panic}")))
        });
        let wanted = || format!("each of {all} groups once in pass {pass}");
        groups.clone().map_err(|found| Error::option("order", wanted(), found))
    }
}

/// Returns a number of groups that fits, by bisection: at most `most`, or 0 if it finds none.
///
/// More groups can take less memory, because they can make the slots shorter or, if all groups are kept, unnecessary. So
/// `most` is tried first, and the number found need not be the largest that fits. To try all numbers would take time in
/// proportion to the square of the number of groups.
fn count_that_fits(most: usize, mut fits: impl FnMut(usize) -> bool) -> usize {
    let counts: Vec<usize> = (1..=most).collect();
    if fits(most) { most } else { counts.partition_point(|&count| fits(count)) }
}

/// Prints what the memory is for.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (slot, kept) = (self.slot(), self.kept());
        match self.depths {
            (depth, 0) => write!(f, "{depth} slots of {slot} bytes")?,
            (host, device) => write!(f, "{host} host slots and {device} device slots of {slot} bytes")?,
        }
        if kept > 0 {
            write!(f, ", {kept} groups that are kept: {} bytes", self.kept_bytes())?;
        }
        write!(f, "; {} bytes for reads past the page cache", Reader::<Groups>::MEMORY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_groups_is_found_in_few_steps() {
        for most in [0, 1, 2, 7, 1000, 100_000] {
            for limit in (0..=most).step_by(1 + most / 99) {
                let mut calls = 0;
                let found = count_that_fits(most, |count| {
                    calls += 1;
                    count <= limit
                });
                assert_eq!(found, limit);
                assert!(calls <= 3 + most.max(1).ilog2(), "{calls} of {most}");
            }
            // If all groups are kept, there are no slots.
            assert_eq!(count_that_fits(most, |count| count == most), most);
            let (mut tried, odd) = (Vec::new(), |count| count % 2 == 1);
            let found = count_that_fits(most, |count| {
                tried.push(count);
                odd(count)
            });
            assert!(found == 0 || odd(found) && tried.contains(&found), "{found} was not tried");
        }
    }
}
