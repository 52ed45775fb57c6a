//! Batch sizes of the first steps of a training.

use std::fmt;

/// The most batch sizes of a plan.
pub(super) const MAX_SIZES: usize = 16;

/// All batch sizes but the last, with the number of steps of each.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct EarlySizes {
    /// Steps and records in a batch. Those without steps are at the end.
    all: [(u64, u64); MAX_SIZES - 1],
}

impl EarlySizes {
    pub(super) const NONE: Self = Self { all: [(0, 0); MAX_SIZES - 1] };

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        self.all.into_iter().take_while(|&(steps, _)| steps > 0)
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.all[0].0 == 0
    }

    /// Adds a size. One without steps has no effect, nor has one too many: the builder refuses it.
    pub(super) fn push(&mut self, (steps, batch): (u64, u64)) {
        let used = self.iter().count();
        // Places that are not used are all equal: plans are compared by them.
        if let Some(free) = self.all.get_mut(used).filter(|_| steps > 0) {
            *free = (steps, batch);
        }
    }

    /// Records in a batch of each size.
    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> + use<> {
        self.iter().map(|(_, batch)| batch)
    }

    /// The largest size; 0 if there is none.
    pub(super) fn largest(&self) -> u64 {
        self.sizes().max().unwrap_or(0)
    }

    /// The size after that many steps, and for how many steps it stays. `None` if it is the last one.
    pub(super) fn at(&self, step: u64) -> Option<(u64, u64)> {
        let mut end = 0_u64;
        self.iter().find_map(|(steps, batch)| {
            end = end.saturating_add(steps);
            (step < end).then(|| (batch, end - step))
        })
    }
}

impl fmt::Debug for EarlySizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for EarlySizes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}
