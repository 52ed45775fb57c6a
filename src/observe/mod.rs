//! Measurement: the report, the Chrome trace, the breakdown of steps, and spans for `tracing`.

pub(crate) mod breakdown;
pub(crate) mod display;
pub(crate) mod log;
pub(crate) mod recorder;
pub(crate) mod report;
pub(crate) mod trace;
mod verdict;

pub use self::log::StageTimes;
pub use self::recorder::LoopRecorder;
pub use self::report::{EpochTimes, Settings, Verdict};
pub use self::trace::Trace;
