//! A report for those who have no access to the loader while its batches are in use.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::report::Report;

/// A handle that reads a loader's report while an iterator borrows the loader.
/// [`Loader::live_report`](crate::Loader::live_report) returns it.
#[derive(Clone, Debug)]
pub struct LiveReport(Arc<Mutex<Report>>);

impl LiveReport {
    /// Returns a report of where the time went so far. During an epoch, it describes the state at most 100 ms before
    /// the last received batch. After an epoch, it describes the end of the epoch.
    #[must_use]
    pub fn get(&self) -> Report {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// How old a report may get while batches are received: a copy of it takes microseconds.
const INTERVAL: Duration = Duration::from_millis(100);

/// The side that writes the report, if a handle exists.
#[derive(Debug, Default)]
pub(crate) struct Publisher(Option<(LiveReport, Option<Instant>)>);

impl Publisher {
    /// A handle, whose report begins as `so_far`.
    pub(crate) fn handle(&mut self, so_far: Report) -> LiveReport {
        let new = || (LiveReport(Arc::new(Mutex::new(so_far))), None);
        self.0.get_or_insert_with(new).0.clone()
    }

    /// Whether the report is to be published at `now`.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let last = |(_, last): &(LiveReport, Option<Instant>)| {
            last.is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL)
        };
        self.0.as_ref().is_some_and(last)
    }

    pub(crate) fn publish(&mut self, report: Report, now: Instant) {
        if let Some((handle, last)) = &mut self.0 {
            *handle.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
            *last = Some(now);
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }
}
