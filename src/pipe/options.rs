//! The options that every front end of a pipe has.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::observe::breakdown::Breakdown;
use crate::observe::trace::{LoaderTrace, Trace};

/// Default wait for a slot that the caller holds: longer than any step except those of the largest models. Lending items
/// to other threads is then free of races.
const HELD_TIMEOUT: Duration = Duration::from_secs(10);

/// The options that every front end has.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) overlap: bool,
    pub(crate) held_timeout: Duration,
    pub(crate) trace: Option<Trace>,
    pub(crate) breakdown: Breakdown,
}

impl Default for Options {
    fn default() -> Self {
        let breakdown = Breakdown::off();
        Self { name: None, overlap: true, held_timeout: HELD_TIMEOUT, trace: None, breakdown }
    }
}

impl Options {
    /// Whether threads fill slots ahead. Phases that are timed do not overlap.
    pub(crate) fn overlaps(&self) -> bool {
        self.overlap && !self.breakdown.is_on()
    }

    /// Opens the trace of this rank, and tells that the breakdown turns overlap off.
    pub(crate) fn open(&mut self, rank: u64, world: u64) -> Result<Option<Arc<LoaderTrace>>, Error> {
        if self.overlap && self.breakdown.is_on() {
            self.breakdown.overlap_is_off();
        }
        let trace = self.trace.take().map(|trace| trace.open(self.name.as_deref(), rank, world));
        trace.transpose().map_err(Error::trace)
    }
}

/// The methods of a builder that sets [`Options`].
macro_rules! common {
    () => {
        /// Sets the name in errors, reports and traces. Default: no name.
        pub fn name(mut self, name: impl Into<String>) -> Self {
            self.options.name = Some(name.into().into());
            self
        }

        /// Sets whether threads fill slots ahead of the caller. Default: `true`.
        ///
        /// With `false` there is no thread: the call that asks for an item fills its slot. The items are the same.
        pub fn overlap(mut self, overlap: bool) -> Self {
            self.options.overlap = overlap;
            self
        }

        /// Sets how long to wait for the caller to drop an earlier item when its slot is needed. Default: 10 s.
        ///
        /// Another thread can drop the item during the wait. After the timeout the iterator returns
        /// [`Error::SlotHeld`](crate::Error::SlotHeld) and ends. If the waiting thread itself holds the item, the wait
        /// lasts for the full timeout.
        pub fn held_timeout(mut self, timeout: std::time::Duration) -> Self {
            self.options.held_timeout = timeout;
            self
        }

        /// Writes a Chrome trace to a file: `builder.trace("trace.json")`. Default: no trace.
        pub fn trace(mut self, trace: impl Into<crate::observe::Trace>) -> Self {
            self.options.trace = Some(trace.into());
            self
        }

        /// Measures the phases of each step. Default: off.
        ///
        /// The phase `load` is added, and on a device the phase `h2d` (host to device). A breakdown that is on turns
        /// overlap off, regardless of [`overlap`](Self::overlap).
        pub fn breakdown(mut self, breakdown: crate::Breakdown) -> Self {
            self.options.breakdown = breakdown;
            self
        }
    };
}
pub(crate) use common;
