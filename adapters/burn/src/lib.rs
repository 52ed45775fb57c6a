#![doc = include_str!("../README.md")]

mod data;
mod error;
mod iter;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn_core::data::dataloader::{DataLoader, DataLoaderIterator};
use burn_core::tensor::Device;
use twinbuf::loader::{Fields, LoaderBuilder};
use twinbuf::mmap::RecordList;
use twinbuf::{Batch, BoxError, Loader, Plan, Report};

pub use data::tensor_data;
pub use error::Error;

/// Converts a batch to the training's input, such as tensors on the device.
type Make<O> = dyn Fn(Batch, &Device) -> Result<O, BoxError> + Send + Sync;

/// Sets options of a [`LoaderBuilder`].
type Options = dyn Fn(LoaderBuilder) -> LoaderBuilder + Send + Sync;

/// A [`DataLoader`] whose batches are read ahead by a [`Loader`].
///
/// - **Each [`iter`](DataLoader::iter) is the next epoch** of the plan, from
///   [`first_epoch`](BurnLoaderBuilder::first_epoch) on, also if the one before was not iterated to its end.
/// - **An error is an item**, `Err`, in its place among the batches, and the last one. burn's
///   training stops at it; other loops must check it (`let batch = batch?`). Without one, epoch 0
///   has [`num_items`](DataLoader::num_items). [`Error`] is the `source` of burn's `DatasetError`.
/// - A [`Loader`] belongs to one thread and this does not: it keeps one between epochs, with its buffers and its
///   threads, and builds another after an error, or if it is iterated a second time while the first iterator is alive.
/// - [`to_device`](DataLoader::to_device) counts epochs separately, from this one's next epoch.
/// - [`slice`](DataLoader::slice) is a fixed range of the plan's *records*, in the order of their list, planned as this
///   is: with the same order, seed and batch. What the plan's `LastBatch::Drop` leaves over goes to the last slice. With
///   `LastBatch::Wrap` there can be more items than records: those past the last record are none, and a slice of nothing
///   else is empty. Only plans of one rank have slices: ranks split the records already. Otherwise, for a range that is
///   not there, and for one with too few records for the plan, the slice's only item is an error.
pub struct BurnLoader<D, O> {
    part: Arc<Part<D, O>>,
    device: Device,
    /// The epoch of the next iterator.
    epoch: AtomicU64,
}

/// Makes a [`BurnLoader`]; see [`BurnLoader::builder`].
#[must_use = "a builder does nothing until `build`"]
pub struct BurnLoaderBuilder<D, O> {
    data: D,
    plan: Plan,
    make: Box<Make<O>>,
    options: Box<Options>,
    first_epoch: u64,
}

/// What slices of a loader have in common.
struct Common<D, O> {
    data: D,
    make: Box<Make<O>>,
    options: Box<Options>,
}

/// Some of the records, and how they are visited.
struct Part<D, O> {
    common: Arc<Common<D, O>>,
    records: RecordList,
    /// `None` if there are no records.
    plan: Result<Option<Plan>, Error>,
    /// A loader that no iterator uses at the moment.
    idle: Mutex<Option<Loader>>,
}

impl<D: Fields + Clone + Send + Sync + 'static, O: 'static> BurnLoader<D, O> {
    /// A loader of `plan`'s batches from `data` (an `Arc<Records>`, or a pair of them for images
    /// and labels), each turned into an `O` by `make`.
    ///
    /// `make` runs on the thread that iterates, while the next batch is read. The batch's slot is read into again once
    /// the batch is dropped. [`tensor_data`] makes tensor data of it without a copy; `batch.cast()` gives the numbers.
    pub fn builder<F>(data: D, plan: Plan, make: F) -> BurnLoaderBuilder<D, O>
    where
        F: Fn(Batch, &Device) -> Result<O, BoxError> + Send + Sync + 'static,
    {
        BurnLoaderBuilder {
            data,
            plan,
            make: Box::new(make),
            options: Box::new(|loader| loader),
            first_epoch: 0,
        }
    }

    /// Where the time went so far, in the epochs that are over. `None` if no loader is idle: iterators have them, or errors
    /// ended them. Of several, that of the one whose iterator ended last.
    pub fn report(&self) -> Option<Report> {
        self.part.idle().as_ref().map(Loader::report)
    }
}

impl<D: Fields + Clone + Send + Sync + 'static, O: 'static> BurnLoaderBuilder<D, O> {
    /// Sets options of the [`LoaderBuilder`]: a transform, the depth, a memory limit.
    ///
    /// Called for each loader that is built: one for this and for each slice that is iterated, one
    /// more for each iterator that is alive at the same time as another, and one after each error.
    /// A trace that is set here starts anew with each.
    pub fn options(
        mut self,
        options: impl Fn(LoaderBuilder) -> LoaderBuilder + Send + Sync + 'static,
    ) -> Self {
        self.options = Box::new(options);
        self
    }

    /// The epoch of the first iterator, to resume a training. Default: 0.
    pub fn first_epoch(mut self, epoch: u64) -> Self {
        self.first_epoch = epoch;
        self
    }

    /// Allocates the buffers and starts the reading threads.
    ///
    /// # Errors
    ///
    /// The errors of [`LoaderBuilder::build`].
    pub fn build(self, device: &Device) -> Result<BurnLoader<D, O>, Error> {
        let Self { data, plan, make, options, first_epoch } = self;
        let records = plan.list().clone();
        let common = Arc::new(Common { data, make, options });
        let part = Part { common, records, plan: Ok(Some(plan.clone())), idle: Mutex::new(None) };
        let loader = part.loader(plan)?;
        part.keep(loader);
        Ok(BurnLoader { part: Arc::new(part), device: device.clone(), epoch: AtomicU64::new(first_epoch) })
    }
}

impl<D: Fields + Clone + Send + Sync + 'static, O: 'static> DataLoader<O> for BurnLoader<D, O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        // Relaxed: a count; nothing else is read because of it.
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed);
        Box::new(iter::Iter::new(&self.part, &self.device, epoch))
    }

    /// Records of epoch 0, as this rank sees them.
    fn num_items(&self) -> usize {
        self.part.items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Arc::new(Self { part: self.part.clone(), device: device.clone(), epoch: self.next_epoch() })
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        let part = Arc::new(self.part.slice(start, end));
        Arc::new(Self { part, device: self.device.clone(), epoch: self.next_epoch() })
    }
}

impl<D, O> BurnLoader<D, O> {
    fn next_epoch(&self) -> AtomicU64 {
        // Relaxed: a count.
        AtomicU64::new(self.epoch.load(Ordering::Relaxed))
    }
}

impl<D: Fields + Clone + Send + Sync + 'static, O> Part<D, O> {
    /// Takes the idle loader, or builds one. `None` if there are no records.
    fn take(&self) -> Result<Option<Loader>, Error> {
        let Some(plan) = self.plan.clone()? else { return Ok(None) };
        let idle = self.idle().take();
        idle.map_or_else(|| self.loader(plan), Ok).map(Some)
    }

    fn loader(&self, plan: Plan) -> Result<Loader, Error> {
        let Common { data, options, .. } = &*self.common;
        let builder = Loader::builder(data.clone(), plan);
        options(builder).build().map_err(|source| Error::Loader(Arc::new(source)))
    }

    fn slice(&self, start: usize, end: usize) -> Self {
        let (records, plan) = match self.range(start, end) {
            Ok(records) => (records.clone(), self.plan_of(records)),
            Err(error) => ((0..0).into(), Err(error)),
        };
        Self { common: self.common.clone(), records, plan, idle: Mutex::new(None) }
    }

    /// The records of a slice.
    fn range(&self, start: usize, end: usize) -> Result<RecordList, Error> {
        let items = self.items();
        let ranks = self.plan.clone()?.map_or(1, |plan| plan.world());
        if start > end || end > items || ranks > 1 {
            return Err(Error::Slice { wanted: start..end, items, ranks });
        }
        // A plan that wraps can have more items than records.
        let position = |item: usize| (item as u64).min(self.records.len());
        let positions = match end {
            _ if start == end => 0..0,
            // The last slice also has the records that the plan drops.
            end if end == items => position(start)..self.records.len(),
            end => position(start)..position(end),
        };
        // Without a look at each record, if they are in equal steps.
        let first = self.records.step().zip(self.records.get(positions.start));
        let even =
            first.and_then(|(step, first)| RecordList::even(first, step, positions.end - positions.start));
        Ok(even.unwrap_or_else(|| positions.filter_map(|at| self.records.get(at)).collect()))
    }

    /// This plan, for other records.
    fn plan_of(&self, records: RecordList) -> Result<Option<Plan>, Error> {
        let Some(plan) = self.plan.clone()?.filter(|_| !records.is_empty()) else { return Ok(None) };
        plan.with_records(records).map(Some).map_err(Error::Plan)
    }
}

impl<D, O> Part<D, O> {
    fn idle(&self) -> std::sync::MutexGuard<'_, Option<Loader>> {
        // A panic cannot leave it invalid: it is only taken or replaced.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a loader that is no longer iterated for the next iterator.
    fn keep(&self, loader: Loader) {
        let other = self.idle().replace(loader);
        // Drop it without the lock: this waits for the loader's thread, which may be reading a batch.
        drop(other);
    }

    /// Records of epoch 0.
    fn items(&self) -> usize {
        let Ok(Some(plan)) = &self.plan else { return 0 };
        let Some(last) = plan.steps(0).checked_sub(1) else { return 0 };
        // All batches before the last one are full. A schedule changes their size.
        let full: u64 = plan.epoch_after(0).parts(last).iter().map(|part| part.steps * part.batch).sum();
        let last_len = plan.batch(0, last).map_or(0, |batch| batch.len());
        usize::try_from(full + last_len).unwrap_or(usize::MAX)
    }
}

impl<D, O> fmt::Debug for BurnLoader<D, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BurnLoader")
            .field("records", &self.part.records)
            .field("plan", &self.part.plan)
            .field("device", &self.device)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

impl<D, O> fmt::Debug for BurnLoaderBuilder<D, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BurnLoaderBuilder")
            .field("plan", &self.plan)
            .field("first_epoch", &self.first_epoch)
            .finish_non_exhaustive()
    }
}
