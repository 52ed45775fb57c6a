//! A range of a data set's records as a data set.

use std::ops::Range;

use twinbuf::mmap::{Hinted, Residency};
use twinbuf::{BatchPlan, BoxError, Dataset, Evict, Plan};

pub(crate) struct Sliced<D> {
    data: D,
    records: Range<u64>,
    /// All records of `data` in their order: batches of it are parts of this.
    all: BatchPlan,
}

impl<D: Dataset + Clone> Sliced<D> {
    /// `None` if they are the first ones: a plan for so many is enough.
    pub(crate) fn new(data: &D, records: &Range<u64>) -> Option<Self> {
        if records.start == 0 {
            return None;
        }
        let count = data.records();
        let all = Plan::builder(count).batch(count).build().ok()?.batch(0, 0)?;
        Some(Self { data: data.clone(), records: records.clone(), all })
    }

    /// A batch of the slice as batches of the data set, each a range of its records.
    fn runs(&self, batch: &BatchPlan) -> impl Iterator<Item = BatchPlan> + use<D> {
        let (all, first) = (self.all, self.records.start);
        batch.runs().map(move |run| {
            let part = all.part(first + run.start..first + run.end);
            part.unwrap_or_else(|| unreachable!("records {run:?} of a slice are records of the data set"))
        })
    }
}

impl<D: Dataset + Clone> Dataset for Sliced<D> {
    fn records(&self) -> u64 {
        self.records.end - self.records.start
    }

    fn record_bytes(&self) -> usize {
        self.data.record_bytes()
    }

    fn part_bytes(&self) -> usize {
        self.data.part_bytes()
    }

    fn read(&mut self, batch: &BatchPlan, mut out: &mut [u8]) -> Result<usize, BoxError> {
        let record_bytes = self.data.record_bytes();
        let mut read = 0;
        for run in self.runs(batch) {
            // Not more than `out` holds, which is the whole batch.
            let len = usize::try_from(run.len())? * record_bytes;
            let (part, rest) = out.split_at_mut(len);
            read += self.data.read(&run, part)?;
            out = rest;
        }
        Ok(read)
    }

    fn will_need(&mut self, batch: &BatchPlan) -> Hinted {
        let mut sum = Hinted::default();
        for run in self.runs(batch) {
            sum += self.data.will_need(&run);
        }
        sum
    }

    fn evict(&mut self, batch: &BatchPlan, evict: Evict) -> Result<(), BoxError> {
        self.runs(batch).try_for_each(|run| self.data.evict(&run, evict))
    }

    fn residency(&mut self, batch: &BatchPlan) -> Option<Residency> {
        let mut sum = Residency::default();
        for run in self.runs(batch) {
            let Residency { pages, resident, .. } = self.data.residency(&run)?;
            sum.pages += pages;
            sum.resident += resident;
        }
        Some(sum)
    }

    fn fingerprint(&mut self) -> Result<u64, BoxError> {
        self.data.fingerprint()
    }
}
