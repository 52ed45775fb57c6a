//! Measurement: the report, the Chrome trace, the breakdown of steps, and spans for `tracing`.

pub(crate) mod breakdown;
pub(crate) mod display;
pub(crate) mod history;
pub(crate) mod log;
mod predict;
pub(crate) mod recorder;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod trace;

pub use self::breakdown::Validation;
pub use self::log::StageTimes;
pub use self::predict::Prediction;
pub use self::recorder::LoopRecorder;
pub use self::replay::Settings;
pub use self::report::{EpochTimes, LiveReport, Verdict};
pub use self::trace::Trace;
