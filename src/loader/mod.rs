//! The loader: epochs as iterators of batches, read ahead of their use.

mod builder;
mod epoch;
mod fields;
#[cfg(feature = "cuda")]
mod local;
mod reader;
mod schedule;
mod sizes;
mod switches;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use twinbuf_mmap::Plan;

pub use self::builder::LoaderBuilder;
pub use crate::backend::batch::{Batch, MiniBatch, Numbers};

pub use self::epoch::Epochs;
pub use self::fields::Fields;
#[cfg(feature = "cuda")]
pub use self::local::context_from_env;
use self::schedule::Schedule;
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
use crate::observe::live::LiveReport;
use crate::observe::report::Report;
#[cfg(feature = "cuda")]
pub use crate::slot::BatchMeta;
pub use crate::slot::MAX_HOST_DEPTH;
use crate::stage::Stage;

/// Reads the batches of a plan, one ahead of the one in use.
///
/// A thread reads while the caller iterates. Between the two are `host_depth` buffers of one batch each, allocated
/// once: nothing is allocated or copied per batch. The thread lives as long as the loader. There can be several
/// [`workers`](LoaderBuilder::workers), each with its own thread and buffers.
///
/// The plan alone determines the batches and their order. They are the same with overlap on or off, with any number of
/// workers and at any depth.
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
    /// Starts to build a loader of `plan`'s batches from `dataset`. Defaults: two host slots, overlap and page hints,
    /// no trace.
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

    /// Iterates over the batches of one epoch, in order; see [`epochs`](Self::epochs).
    pub fn epoch(&mut self, epoch: u64) -> Epochs<'_, B> {
        Epochs::lent(self, Start::new(epoch), Some(epoch))
    }

    /// Iterates over the batches of several epochs, in order: `loader.epochs(0..3)`.
    ///
    /// There is no gap between two epochs: the first batch of the next one is read during the last step of this one.
    /// Reading starts when the iterator is made, before the first call of `next`: make it before the model is loaded or
    /// compiled, and that of a validation set before the last steps of an epoch, and the first batches are there in time.
    /// The report counts from the first call on.
    /// Dropping the iterator early leaves the rest unread.
    ///
    /// A batch borrows nothing and may be kept, also beyond the end of its epoch. But slots are filled in turn: while
    /// a batch is kept, only `host_depth - 1` more can be loaded (`device_depth - 1` on a device). The loader then
    /// waits for the batch to be dropped on another thread, up to
    /// [`held_timeout`](LoaderBuilder::held_timeout), and ends with [`Error::SlotHeld`].
    ///
    /// The iterator borrows the loader, so there is one at a time; [`into_epochs`](Self::into_epochs) owns it:
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

    /// Iterates over the batches from a checkpoint to the end of epoch `epochs - 1`: what is left of a training of so
    /// many epochs.
    ///
    /// They are the batches that the other loader would have delivered next, byte for byte if the transform is the
    /// same. Depth, overlap, hints and rank may differ.
    ///
    /// With another batch size or another number of ranks, this plan's batches are made of what is left of the epoch:
    /// all ranks together deliver every record that was not seen before the checkpoint, once. Their steps are numbered
    /// on. A schedule of batch sizes is where it is after the steps of the whole training. Later epochs are the plan's.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the checkpoint belongs to another data set, range, shuffle, seed or last batch; it names the
    /// field that differs.
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
    /// Batches that were only read ahead do not count; the batch in use does. At the end of an epoch it is the end of
    /// all ranks' epoch, also where this rank has a step fewer ([`LastBatch::Keep`](crate::LastBatch::Keep)).
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        let (epoch, step) = self.position;
        self.identity.at(epoch, step)
    }

    /// Reports where the time went so far.
    #[must_use]
    pub fn report(&self) -> Report {
        self.stage.report().with_reading(&self.files)
    }

    /// Returns the times of the last steps, up to [`STEPS`](crate::observe::STEPS), the oldest first. The current step
    /// is not included.
    #[must_use]
    pub fn recent_steps(&self) -> Vec<StepTimes> {
        self.stage.recent_steps()
    }

    /// Returns a handle of the report, for a loop whose iterator has the loader, and for other threads.
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

    /// Returns a handle of the breakdown that the loader was built with, for the phases of the loop itself.
    #[must_use]
    pub fn breakdown(&self) -> Breakdown {
        self.stage.breakdown().clone()
    }

    /// Returns the plan whose batches this loads.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.schedule.plan
    }

    /// Joins the reading threads and returns an error that has not been delivered. Waits for batches that are being read,
    /// however long that takes; see [`close_timeout`](Self::close_timeout).
    ///
    /// Dropping the loader joins the threads too. It waits for reads for at most 10 s, or 10 ms if a task waited for the last
    /// batch, and then leaves their threads behind.
    ///
    /// # Errors
    ///
    /// The error that the thread met ahead of a caller who left early, or [`Error::Device`] if the device failed; else
    /// [`Error::Trace`] if the trace could not be written. The batches are not affected by that.
    pub fn close(self) -> Result<(), Error> {
        self.stage.close(None, &self.locators)
    }

    /// Closes the loader as [`close`](Self::close) does, but waits for batches that are being read for `timeout` at most.
    ///
    /// A read that does not return, for example from a file server that is gone, cannot be ended by force. Its thread is
    /// left behind: it keeps the slots and the data set that it uses, and ends when the read does. The end of the process
    /// ends it too.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] with the batch, the file and the offset, if a thread was left behind; else those of
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
