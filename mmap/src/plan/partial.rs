//! Parts of an epoch that were done with one batch size on one number of ranks, and where they left off.

/// Completed steps of an epoch with one batch size and one number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct PartialEpoch {
    /// The number of records in a batch of one rank.
    pub batch: u64,
    /// The number of ranks.
    pub world: u64,
    /// The number of steps that all ranks completed.
    pub steps: u64,
}

/// Where a part of an epoch ended at each rank, for an order that gives each rank a separate share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Seam {
    /// Shares that the part visited.
    pub(super) world: u64,
    /// Positions in a share, and those of them that it visited.
    pub(super) share: u64,
    pub(super) done: u64,
    /// Positions that were left.
    pub(super) left: u64,
}

impl Seam {
    /// Returns the position, before the part, of the position `at` of those that were left; and how many positions before
    /// `at` and from it on were neighbors then, too.
    fn before(&self, at: u64) -> (u64, u64, u64) {
        let Self { world, share, done, left } = *self;
        let each = share - done;
        if at < each * world {
            let (rank, within) = (at / each, at % each);
            (rank * share + done + within, within, each - within)
        } else {
            (at + world * done, at - each * world, left - at)
        }
    }
}

/// Positions that follow each other in the epoch's order.
pub(super) struct Stretch {
    /// Where `at` is in the epoch's order.
    pub(super) position: u64,
    /// Positions of the stretch before that one, and from it on.
    pub(super) back: u64,
    pub(super) ahead: u64,
}

/// Finds a position of those that are left after all seams, or `None` past them.
pub(super) fn find(seams: &[Seam], at: u64) -> Option<Stretch> {
    if at >= seams.last()?.left {
        return None;
    }
    let mut found = Stretch { position: at, back: u64::MAX, ahead: u64::MAX };
    for seam in seams.iter().rev() {
        let (position, back, ahead) = seam.before(found.position);
        found = Stretch { position, back: found.back.min(back), ahead: found.ahead.min(ahead) };
    }
    Some(found)
}

/// Positions that are left after all seams.
pub(super) fn left(seams: &[Seam]) -> Option<u64> {
    seams.last().map(|seam| seam.left)
}
