//! Measurement: the report, the Chrome trace, the breakdown of steps, and spans for `tracing`.

pub(crate) mod breakdown;
mod display;
pub(crate) mod history;
pub(crate) mod live;
pub(crate) mod log;
pub(crate) mod pause;
mod phases;
mod picture;
mod predict;
pub(crate) mod recorder;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod spans;
pub(crate) mod trace;

pub use self::breakdown::{Breakdown, Validation};
pub use self::history::{STEPS, StepTimes};
pub use self::live::LiveReport;
pub use self::log::StageTimes;
pub use self::predict::Prediction;
pub use self::recorder::LoopRecorder;
pub use self::replay::Settings;
pub use self::report::{EPOCHS, EpochTimes, Report, Verdict};
pub use self::trace::Trace;
