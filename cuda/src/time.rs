//! The times of copies: the device's timing events, mapped to the host's clock.

use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent;

use crate::cu::{self, Event, Stream};
use crate::driver::Driver;
use crate::error::Error;

/// The start and the duration of a copy, measured by the device's clock and converted to the host's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyTime {
    /// The start of the copy. It is never before the copy was issued, and otherwise never so late that the copy would
    /// end in the future. Within these bounds, it is as accurate as the device's clock. The two clocks are aligned
    /// once, when the uploader is built, and then drift apart. CUDA reports times as a 32-bit float in milliseconds:
    /// the resolution is 0.06 ms after ten minutes, and 0.25 ms after an hour.
    pub start: Instant,
    /// The duration of the copy, measured by the events before and after it, accurate to about half a microsecond.
    /// On an idle stream, the first event may complete before the copy is enqueued; the duration then includes the
    /// microseconds that the host needs to enqueue the copy. Without a copy stream
    /// ([`Uploader::copy_stream`](crate::Uploader::copy_stream)) it may include work that other threads enqueue
    /// meanwhile.
    pub took: Duration,
}

/// A completed copy. [`Uploader::on_copied`](crate::Uploader::on_copied) receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Copied {
    /// The sequence number of the batch; see [`Lease::seq`](crate::Lease::seq).
    pub seq: u64,
    /// The number of bytes copied, at least 1. Empty batches are not copied.
    pub bytes: usize,
    /// When the copy started, by the host's clock, and how long it took.
    pub time: CopyTime,
}

pub(crate) type OnCopied = Box<dyn FnMut(Copied) + Send>;

/// Converts events to times.
pub(crate) struct Clock {
    driver: &'static Driver,
    base: Event,
    /// Taken just before `base` was recorded on the idle stream. Waiting for `base` and then reading the host's clock
    /// would add the wake-up time.
    pub(crate) at: Instant,
}

impl Clock {
    /// Aligns the two clocks; waits for the work in `stream`, the copy stream.
    pub(crate) fn new(driver: &'static Driver, stream: &Stream) -> Result<Self, Error> {
        let base = Event::new(stream.context(), true, false)?;
        // SAFETY: the stream exists.
        unsafe { cu::synchronize(stream.raw()) }?;
        let at = Instant::now();
        // SAFETY: both exist.
        unsafe { cu::record(base.raw(), stream.raw()) }?;
        Ok(Self { driver, base, at })
    }

    /// The time of the copy between two events, issued at `issued`; `None` while it runs.
    ///
    /// # Safety
    ///
    /// Both events exist, are for timing, and were recorded.
    pub(crate) unsafe fn time(
        &self,
        start: CUevent,
        copied: CUevent,
        issued: Instant,
    ) -> Result<Option<CopyTime>, Error> {
        // SAFETY: the caller guarantees the events.
        let Some(took) = (unsafe { self.driver.milliseconds(start, copied) })? else { return Ok(None) };
        // SAFETY: as above, and `base` is ours.
        let Some(since) = (unsafe { self.driver.milliseconds(self.base.raw(), start) })? else {
            return Ok(None);
        };
        let duration = |ms: f32| Duration::try_from_secs_f64(f64::from(ms) / 1e3).unwrap_or_default();
        let took = duration(took);
        // The copy is over, so it began at least `took` ago, and not before it was issued. The second limit comes last:
        // it is the host's own time, and `took` is the device's, which may be too long.
        let latest = Instant::now().checked_sub(took).unwrap_or(issued);
        Ok(Some(CopyTime { start: (self.at + duration(since)).min(latest).max(issued), took }))
    }
}
