//! Lists of record numbers. A list has the record for each position of a plan.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::permute::mix;

/// The record numbers of a plan: a range, every n-th record of a range, or any numbers in any order, also repeated.
///
/// A plan permutes the positions of the list; the list decides which record a position is. So an
/// epoch that drops and repeats none visits each *position* once, and a record as often as the list
/// has it. A range converts to a list, and any numbers can be collected to one. A list that rises
/// in equal steps allocates no memory, any other 8 bytes a record; a clone shares them.
///
/// ```
/// use twinbuf_mmap::{Plan, RecordList, Shuffle};
///
/// // Training and validation from one file: every tenth record is held out.
/// let (held_out, train): (Vec<u64>, Vec<u64>) = (0..1000).partition(|record| record % 10 == 0);
/// let plan = Plan::builder(1000).batch(10).shuffle(Shuffle::Full).seed(1).build()?;
/// let (train, valid) = (plan.with_records(train)?, plan.with_records(held_out)?);
/// assert_eq!((train.steps(0), valid.steps(0)), (90, 10));
/// assert!(valid.batch(0, 0).unwrap().runs().flatten().all(|record| record % 10 == 0));
///
/// // Weights: record 7 three times an epoch, record 8 once.
/// let weighted: RecordList = [7, 7, 7, 8].into_iter().collect();
/// let plan = Plan::builder(1000).records(weighted).batch(4).build()?;
/// assert!(plan.batch(0, 0).unwrap().runs().flatten().eq([7, 7, 7, 8]));
/// # Ok::<(), twinbuf_mmap::PlanError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RecordList(List);

#[derive(Clone, PartialEq, Eq, Hash)]
enum List {
    /// Numbers that rise in equal steps: a position has the record `first + position * step`. The
    /// last record plus 1 fits a u64, unless it is 2^64 - 1, which a plan refuses.
    Even { first: u64, step: u64, len: u64 },
    /// Any numbers. The other fields are the smallest and the largest number, and a hash of all numbers.
    Any(Arc<[u64]>, (u64, u64), u64),
}

impl RecordList {
    /// Returns a list of `len` records with equal steps: `first`, `first + step` and so on. It allocates no memory.
    /// Returns `None` if the step is 0, or if the last record is not below 2^64 - 1.
    ///
    /// ```
    /// # use twinbuf_mmap::RecordList;
    /// assert_eq!(RecordList::even(5, 10, 3), Some([5, 15, 25].into_iter().collect()));
    /// assert_eq!(RecordList::even(5, 1, u64::MAX), None);
    /// ```
    #[must_use]
    pub fn even(first: u64, step: u64, len: u64) -> Option<Self> {
        first.checked_add(len.saturating_sub(1).checked_mul(step)?)?.checked_add(len.min(1))?;
        (step > 0).then_some(Self(List::Even { first, step: if len > 1 { step } else { 1 }, len }))
    }

    /// Returns the number of positions. A record counts as often as it is in the list.
    #[must_use]
    pub fn len(&self) -> u64 {
        match &self.0 {
            List::Even { len, .. } => *len,
            List::Any(numbers, ..) => numbers.len() as u64,
        }
    }

    /// Returns `true` if the list has no records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the record at a position, from 0. Returns `None` past the end of the list.
    #[must_use]
    pub fn get(&self, position: u64) -> Option<u64> {
        (position < self.len()).then(|| self.run(position..position + 1).start)
    }

    /// Returns the smallest range that contains all records of the list, without record 2^64 - 1, which no plan has.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        let (least, most) = self.ends();
        if self.is_empty() { least..least } else { least..most.saturating_add(1) }
    }

    /// Returns the smallest and the largest record, for a list that is not empty.
    pub(super) fn ends(&self) -> (u64, u64) {
        match self.0 {
            List::Even { first, step, len } => (first, first + len.saturating_sub(1) * step),
            List::Any(_, ends, _) => ends,
        }
    }

    /// Returns a hash of a list without a [`step`](Self::step), for example for a checkpoint. Returns `None` for other
    /// lists: their [`range`](Self::range) and step describe them.
    #[must_use]
    pub const fn fingerprint(&self) -> Option<u64> {
        match &self.0 {
            List::Even { .. } => None,
            List::Any(_, _, hash) => Some(*hash),
        }
    }

    /// Returns the step from a record to the next, if all steps are equal and at least 1. Returns 1 for fewer than two
    /// records.
    #[must_use]
    pub const fn step(&self) -> Option<u64> {
        match &self.0 {
            List::Even { step, .. } => Some(*step),
            List::Any(..) => None,
        }
    }

    /// Returns the records at the front of `positions`, as far as each record is the one after the record before it.
    /// There is at least one position. Record 2^64 - 1, which no plan has, is an empty range.
    pub(super) fn run(&self, positions: Range<u64>) -> Range<u64> {
        let Range { start, end } = positions;
        match &self.0 {
            &List::Even { first, step: 1, .. } => first + start..first.saturating_add(end),
            &List::Even { first, step, .. } => first + start * step..(first + start * step).saturating_add(1),
            List::Any(numbers, ..) => {
                // A plan has only positions within the list, so they fit a usize.
                let [start, end] = [start, end].map(|at| usize::try_from(at).unwrap_or(usize::MAX));
                // No overflow in a plan, which refuses the record 2^64 - 1.
                let follow = numbers[start..end].windows(2).take_while(|two| two[1] == two[0] + 1);
                numbers[start]..(numbers[start] + follow.count() as u64).saturating_add(1)
            }
        }
    }
}

impl From<Range<u64>> for RecordList {
    fn from(records: Range<u64>) -> Self {
        let len = records.end.saturating_sub(records.start);
        Self(List::Even { first: records.start, step: 1, len })
    }
}

impl From<Vec<u64>> for RecordList {
    fn from(records: Vec<u64>) -> Self {
        records.into_iter().collect()
    }
}

impl FromIterator<u64> for RecordList {
    fn from_iter<I: IntoIterator<Item = u64>>(records: I) -> Self {
        let (mut first, mut step, mut len) = (0, 1, 0);
        let mut records = records.into_iter();
        while let Some(record) = records.next() {
            match len {
                0 => first = record,
                1 if record > first => step = record - first,
                _ if len > 1 && record.checked_sub(first + (len - 1) * step) == Some(step) => {}
                _ => {
                    let before = (0..len).map(|at| first + at * step);
                    let all: Arc<[u64]> = before.chain([record]).chain(records).collect();
                    let ends = all.iter().fold((u64::MAX, 0), |(a, b), &n| (a.min(n), b.max(n)));
                    let hash = all.iter().fold(all.len() as u64, |hash, &record| mix(hash ^ record));
                    return Self(List::Any(all, ends, hash));
                }
            }
            len += 1;
        }
        Self(List::Even { first, step, len })
    }
}

/// Prints the range of a list with a step, and the step if it is not 1; of any other, the number of records and the
/// range.
impl fmt::Debug for RecordList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            List::Even { step: 1, .. } => write!(f, "{:?}", self.range()),
            List::Even { step, .. } => write!(f, "{:?} by {step}", self.range()),
            List::Any(..) => write!(f, "{} records in {:?}", self.len(), self.range()),
        }
    }
}
