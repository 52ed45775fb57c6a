//! Loads the batches of a plan ahead of their use. An epoch is an iterator of batches.

mod builder;
mod epoch;
mod fields;
#[cfg(feature = "cuda")]
mod local;
mod reader;
mod shared;
mod sizes;
mod switches;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use twinbuf_mmap::Plan;

pub use self::builder::{LoaderBuilder, MAX_WORKERS};
pub use crate::backend::batch::{Batch, MiniBatch, Numbers};

pub use self::epoch::Epochs;
pub use self::fields::Fields;
#[cfg(feature = "cuda")]
pub use self::local::context_from_env;
use self::reader::Schedule;
pub use crate::backend::{Backend, Host};
#[cfg(feature = "cuda")]
pub use crate::backend::{Cuda, DeviceBatch};
pub use crate::batch::checkpoint::Checkpoint;
use crate::batch::checkpoint::{Identity, Start};
pub use crate::batch::memory::MemoryLimit;
pub use crate::dataset::Locator;
use crate::error::Error;
pub use crate::error::{At, Reading};
use crate::observe::breakdown::Breakdown;
use crate::observe::history::StepTimes;
use crate::observe::report::LiveReport;
use crate::observe::report::Report;
#[cfg(feature = "cuda")]
pub use crate::slot::BatchMeta;
pub use crate::slot::MAX_HOST_DEPTH;
use crate::stage::Stage;

/// Reads the batches of a plan ahead of their use.
///
/// A thread reads the next batch while the caller uses the current one. The thread and the caller share `host_depth`
/// slots. A slot is a buffer for one batch. The loader allocates the slots once: it allocates nothing and copies
/// nothing per batch. The thread runs until the loader is dropped. A loader can have several
/// [`workers`](LoaderBuilder::workers), each with a thread and slots.
///
/// A call that blocks until the next batch is ready helps the thread: it reads parts of that batch itself. It does so
/// if the loader has one worker, the files are in the page cache, the batch has at least 128 KiB, and no transform is a
/// closure.
///
/// The plan alone determines the batches and their order. They are the same with or without overlap, for any number
/// of workers, and for any depth.
///
/// # Examples
///
/// ```
/// use twinbuf::{Loader, Plan, Records, Shuffle};
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("data.bin");
/// # std::fs::write(&path, vec![7u8; 64 * 100])?;
/// let data = Records::open([&path], 64)?; // records of 64 bytes
/// let plan = Plan::builder(data.len()).batch(8).shuffle(Shuffle::Full).seed(42).build()?;
/// let mut loader = Loader::builder(data, plan).build()?;
/// for batch in loader.epochs(0..2) {
///     let batch = batch?; // bytes, read while the previous batch was in use
///     assert_eq!(batch.len(), 8 * 64);
/// }
/// println!("{}", loader.report());
/// loader.close()?;
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
pub struct Loader<B: Backend = Host> {
    stage: Stage<B>,
    schedule: Schedule,
    /// For each field, how to find a record's file.
    locators: Vec<Option<Locator>>,
    /// The readers of fields that are files.
    files: Vec<Arc<twinbuf_mmap::Reader>>,
    /// Epochs begun so far.
    epochs_begun: u64,
    /// The epoch begun last, and the step of its next batch.
    position: (u64, u64),
    /// What a checkpoint there belongs to.
    identity: Arc<Identity>,
}

impl Loader {
    /// Returns a builder for a loader that reads the batches of `plan` from `dataset`. Defaults: one worker, two
    /// host slots, overlap and prefetch on, no transform, no trace.
    ///
    /// A tuple of data sets is a data set with several [`Fields`].
    pub fn builder(dataset: impl Fields, plan: Plan) -> LoaderBuilder {
        LoaderBuilder::new(dataset.into_fields(), plan)
    }
}

impl<B: Backend> Loader<B> {
    fn new(
        stage: Stage<B>,
        schedule: Schedule,
        locators: Vec<Option<Locator>>,
        files: Vec<Arc<twinbuf_mmap::Reader>>,
    ) -> Self {
        let identity = schedule.identity.clone();
        Self { stage, schedule, locators, files, epochs_begun: 0, position: (0, 0), identity }
    }

    /// Iterates over the batches of one epoch, in order. Epochs are numbered from 0. See [`epochs`](Self::epochs).
    pub fn epoch(&mut self, epoch: u64) -> Epochs<'_, B> {
        Epochs::lent(self, Start::new(epoch), Some(epoch))
    }

    /// Iterates over the batches of several epochs, in order: `loader.epochs(0..3)`. An empty range yields nothing.
    ///
    /// The loader reads the first batch of the next epoch during the last step of the current epoch.
    ///
    /// Reading starts when this method is called, before the first call of `next`. Call it before the model is
    /// loaded or compiled, and call it for a validation set before the last training steps of an epoch: the first
    /// batches are then ready in time. The report counts time from the first call of `next`. If the caller drops the
    /// iterator early, the loader does not read the remaining batches.
    ///
    /// A batch borrows nothing. The caller may keep it beyond the end of the epoch. Each batch in use occupies a
    /// slot: while the caller keeps one batch, the loader can load only `host_depth - 1` more (`device_depth - 1` on
    /// a device). When the loader needs an occupied slot, it waits up to
    /// [`held_timeout`](LoaderBuilder::held_timeout) for another thread to drop the batch, and then the iterator
    /// returns [`Error::SlotHeld`] and ends. [`Epochs`] lists all errors.
    ///
    /// The iterator borrows the loader: only one iterator can exist at a time. [`into_epochs`](Self::into_epochs)
    /// returns an iterator that owns the loader.
    ///
    /// ```compile_fail,E0499
    /// # fn f(mut loader: twinbuf::Loader) {
    /// let (a, b) = (loader.epoch(0), loader.epoch(1));
    /// drop((a, b));
    /// # }
    /// ```
    pub fn epochs(&mut self, epochs: Range<u64>) -> Epochs<'_, B> {
        let last = if epochs.is_empty() { None } else { epochs.end.checked_sub(1) };
        Epochs::lent(self, Start::new(epochs.start), last)
    }

    /// Iterates from `checkpoint` to the end of epoch `epochs - 1`. `epochs` is the total number of epochs in the
    /// training run. If no epoch remains, the iterator is empty.
    ///
    /// With the same batch size and number of ranks, it delivers the batches that the saving loader would have
    /// delivered next. The bytes are identical if the transforms are the same. Depth, overlap, hints, and rank may
    /// differ.
    ///
    /// With a different batch size or number of ranks, all ranks together deliver each unseen record of the epoch
    /// once; with [`LastBatch::Drop`](crate::LastBatch::Drop), records that do not fill the last step are omitted.
    /// Step numbers continue. A schedule of batch sizes counts all steps of the training, including those before the
    /// checkpoint. Later epochs follow this loader's plan.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the data set, record range, shuffle, seed, or `LastBatch` mode differs, or if the
    /// step is past the end of the epoch. The error names the field.
    pub fn epochs_from(&mut self, checkpoint: &Checkpoint, epochs: u64) -> Result<Epochs<'_, B>, Error> {
        let (start, last) = self.start_from(checkpoint, epochs)?;
        Ok(Epochs::lent(self, start, last))
    }

    /// Where to continue from a checkpoint, and the last epoch, if any is left.
    fn start_from(&mut self, checkpoint: &Checkpoint, epochs: u64) -> Result<(Start, Option<u64>), Error> {
        let start = self.schedule.identity.resume(&self.schedule.plan, checkpoint)?;
        let last = epochs.checked_sub(1).filter(|&last| start.epoch <= last);
        if last.is_none() {
            // Nothing is left to begin, but the place is not lost.
            self.position = (start.epoch, start.step);
            let begun = start.begun.as_ref().map(|begun| begun.identity.clone());
            self.identity = begun.unwrap_or_else(|| self.schedule.identity.clone());
        }
        Ok((start, last))
    }

    /// Returns the position after the last batch that the caller received.
    ///
    /// Batches that were only read ahead do not count. The batch in use counts. At the end of an epoch, the position
    /// is the end of the epoch for all ranks, even if this rank has one step fewer
    /// ([`LastBatch::Keep`](crate::LastBatch::Keep)).
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        let (epoch, step) = self.position;
        self.identity.at(epoch, step)
    }

    /// Returns a report of where the time went so far.
    #[must_use]
    pub fn report(&self) -> Report {
        self.stage.report().with_reading(&self.files)
    }

    /// Returns the times of the most recent completed steps, at most [`STEPS`](crate::observe::STEPS), oldest first.
    /// The current step is not included.
    #[must_use]
    pub fn recent_steps(&self) -> Vec<StepTimes> {
        self.stage.recent_steps()
    }

    /// Returns a handle that reads the report while an iterator borrows the loader, also from other threads.
    ///
    /// ```
    /// # fn f(mut loader: twinbuf::Loader) -> Result<(), twinbuf::BoxError> {
    /// let report = loader.live_report();
    /// for batch in loader.epochs(0..3) {
    ///     if batch?.step() % 1000 == 0 {
    ///         println!("{}", report.get());
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn live_report(&mut self) -> LiveReport {
        self.stage.live_report()
    }

    /// Returns a handle to the loader's breakdown. Use it to measure the phases of the training loop.
    #[must_use]
    pub fn breakdown(&self) -> Breakdown {
        self.stage.breakdown().clone()
    }

    /// Returns the plan of this loader's batches.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.schedule.plan
    }

    /// Joins the reading threads and returns a pending error. Waits without a time limit for reads in progress; see
    /// [`close_timeout`](Self::close_timeout).
    ///
    /// Dropping the loader also joins the threads. It waits for reads in progress for at most 10 s, or 10 ms if a task
    /// waited for the last batch. After that it detaches the threads.
    ///
    /// # Errors
    ///
    /// Returns the first read error that the caller has not received, for example because the caller stopped
    /// iterating early. Returns [`Error::Device`] if the device failed. Otherwise, returns [`Error::Trace`] if the
    /// trace could not be written; delivered batches remain valid.
    pub fn close(self) -> Result<(), Error> {
        self.stage.close(None, &self.locators)
    }

    /// Closes the loader as [`close`](Self::close) does, but waits at most `timeout` for reads in progress.
    ///
    /// A blocked read cannot be cancelled, for example if a file server does not answer. After the timeout, the
    /// loader detaches the reading thread. The thread keeps its slots and its data set until the read returns or the
    /// process exits.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] with the batch, the file and the offset if a thread was detached. Otherwise, the errors of
    /// [`close`](Self::close).
    pub fn close_timeout(self, timeout: Duration) -> Result<(), Error> {
        self.stage.close(Some(timeout), &self.locators)
    }
}

impl<B: Backend> fmt::Debug for Loader<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("name", &self.stage.naming().loader)
            .field("plan", &self.schedule.plan)
            .field("overlap", &self.stage.gate().is_some())
            .field("trace", &self.stage.trace_path())
            .finish_non_exhaustive()
    }
}
