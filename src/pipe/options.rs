//! The options that every front end of a pipe has.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::observe::breakdown::Breakdown;
use crate::observe::trace::{LoaderTrace, Trace};

/// Default wait for a slot that the caller holds. It is longer than a step of all but the largest models, so another thread
/// that uses an item drops it in time.
const HELD_TIMEOUT: Duration = Duration::from_secs(10);

/// The options that every front end has.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) overlap: bool,
    /// Whether copies to a device have a stream of their own.
    pub(crate) copy_stream: bool,
    /// Whether the caller sends the items to a device: its row of the trace shows that.
    pub(crate) sends: bool,
    pub(crate) held_timeout: Duration,
    pub(crate) trace: Option<Trace>,
    pub(crate) breakdown: Breakdown,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: None,
            overlap: true,
            copy_stream: true,
            sends: false,
            held_timeout: HELD_TIMEOUT,
            trace: None,
            breakdown: Breakdown::off(),
        }
    }
}

impl Options {
    /// Whether threads fill slots ahead. They do not while the breakdown times the phases.
    pub(crate) fn overlaps(&self) -> bool {
        self.overlap && !self.breakdown.is_on()
    }

    /// Opens the trace of this rank. If the breakdown turns overlap off, notes that in the breakdown.
    pub(crate) fn open(&mut self, rank: u64, world: u64) -> Result<Option<Arc<LoaderTrace>>, Error> {
        self.name.iter().for_each(|name| self.breakdown.name(name));
        if self.overlap && self.breakdown.is_on() {
            self.breakdown.overlap_is_off();
        }
        let trace = self.trace.take().map(|trace| trace.open(self.name.as_deref(), rank, world));
        trace.transpose()
    }
}

/// The methods of a builder that sets [`Options`].
macro_rules! common {
    () => {
        /// Sets the name in errors, traces, thread names and lines of a breakdown. Default: no name.
        pub fn name(mut self, name: impl Into<String>) -> Self {
            self.options.name = Some(name.into().into());
            self
        }

        /// Sets whether threads fill slots ahead of the caller. Default: `true`.
        ///
        /// With `false`, the call that asks for an item fills its slot, or a driven worker does. The order is the same.
        pub fn overlap(mut self, overlap: bool) -> Self {
            self.options.overlap = overlap;
            self
        }

        /// Sets how long a call for an item waits for the caller to drop an earlier item whose slot is needed. Default:
        /// 10 s.
        ///
        /// Another thread can drop the item during the wait. After the timeout the iterator returns
        /// [`Error::SlotHeld`](crate::Error::SlotHeld) and ends. If the thread that calls `next` holds the item itself,
        /// the wait lasts for the full timeout. Calls that return `Pending` share one timeout, from the first of them
        /// that found the slot held.
        pub fn held_timeout(mut self, timeout: std::time::Duration) -> Self {
            self.options.held_timeout = timeout;
            self
        }

        /// Writes a Chrome trace to a file: `builder.trace("trace.json")`. Default: no trace.
        pub fn trace(mut self, trace: impl Into<crate::observe::Trace>) -> Self {
            self.options.trace = Some(trace.into());
            self
        }

        /// Tells that the caller is a thread that sends the items to a device: in the trace its row is called `upload`,
        /// and its use of an item `gpu_transfer`, which [`Items::used`](crate::pipe::Items::used) can end. Default: the
        /// row is `train`.
        pub fn sends(mut self) -> Self {
            self.options.sends = true;
            self
        }

        /// Measures the phases of each step. Default: off.
        ///
        /// The phase `load` is added, `transform` if there are transforms, and on a device `h2d` (host to device). A
        /// breakdown that is on turns overlap off, regardless of [`overlap`](Self::overlap).
        pub fn breakdown(mut self, breakdown: crate::Breakdown) -> Self {
            self.options.breakdown = breakdown;
            self
        }
    };
}
pub(crate) use common;

/// The methods that a front end passes on to its pipe.
macro_rules! calls_of_pipe {
    () => {
        /// Returns a report of where the time went so far. A round, or a group that takes a slot, counts as a
        /// batch, and a pass as an epoch.
        ///
        /// The use of a group that is kept in memory counts toward the group that was read before it in the same pass. If
        /// there is none, it does not count. The time of a generator's closure is `read`.
        #[must_use]
        pub fn report(&self) -> crate::Report {
            self.pipe.report()
        }

        /// Joins the threads and returns a pending error. Waits without a time limit for what is being read or made; see
        /// [`close_timeout`](Self::close_timeout). In a forked process, it does nothing.
        ///
        /// A drop also joins the threads, but waits for at most 10 s, or 10 ms if the last item was asked for by
        /// [`poll_next`](crate::pipe::Items::poll_next) or [`next_async`](crate::pipe::Items::next_async). After that
        /// it detaches them.
        ///
        /// # Errors
        ///
        /// Returns the first error of the last iteration that the caller has not received, for example because it ended
        /// early: [`Error::Load`] or another error of the iterator, or [`Error::Device`] if the device failed. Without
        /// overlap, that can only be the error of a generator's hook. Otherwise, returns [`Error::Panicked`] if a drop
        /// or a waker panicked and no item failed by that, and then [`Error::Trace`] if the trace could not be written.
        /// Delivered items remain valid.
        pub fn close(self) -> Result<(), Error> {
            self.pipe.close()
        }

        /// Closes as [`close`](Self::close) does, but waits at most `timeout` for what is being read or made.
        ///
        /// A blocked read cannot be cancelled, for example if a file server does not answer. After the timeout, its thread
        /// is detached. The thread keeps its slot and its source until the read returns or the process exits. A thread that
        /// reads and makes nothing only has to be woken: it is waited for up to 1 s more.
        ///
        /// # Errors
        ///
        /// [`Error::Timeout`], with what is being read if anything is, if a thread was detached, or if a driver still
        /// fills or waits. Otherwise, the errors of [`close`](Self::close).
        pub fn close_timeout(self, timeout: std::time::Duration) -> Result<(), Error> {
            self.pipe.close_timeout(timeout)
        }
    };
}
pub(crate) use calls_of_pipe;
